"""A write of streams, and what the next sublayer predicts and reads of what was written: one operator, a pass less.

    X'_i = sum_j M_ij X_j + w_i y           axes.kernels.streams.mix
    entries, pre, x of X'                   axes.kernels.streams.look

Where launches say so, the pass that writes X' makes the products and squares of what it has just rounded, so that X' is
read once more, for x. A program owns a tile of tokens and walks along the columns, coefficients in registers and the
next columns on their way; all products of a tile of columns meet in one sum before they are added outside of the matrix
unit. More than four streams, and more entries than sums have room for, have passes of their own.

The gradient is that of the look, which writes dX' once with what the following write gives, and then that of the write;
or both in one pass, which makes X' again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv
from axes.kernels.streams import look, mix
from axes.kernels.streams.mix import _number, _of_lanes, _spread, _stream, _tell

_Launches = dict[str, tuple[int, int, int, int]]  # tokens and columns of a tile, warps, stages
# Of products in the write's pass, and of a backward in one pass; None: passes of their own. The former took 0.3 ms more
# than two passes with tiles of (64, 32, 8, 2) (H200, 32,768 tokens of 4 x 2,048), the latter has not been timed.
_LAUNCH: _Launches | None = None
_BACK: _Launches | None = None
_SIDE = 64  # entries that sums have room for, of all streams together
_SPLIT = 64  # columns of a program that splits
_LEAST = 64  # rows that the matrix unit takes at once: entries in all terms


@Kernel
@triton.jit
def _split(phi, terms, width, C: tl.constexpr, SIDE: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr):
    """phi (C, W) as `TERMS` matrices of fewer bits, one under the other, each in the room of SIDE rows."""
    c, column = tl.arange(0, SIDE), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (c < C)[:, None] & (column < width)[None, :]
    f = tl.load(phi + (c * width)[:, None] + column[None, :], mask=inside, other=0.0)
    for k in tl.static_range(TERMS):
        term = f.to(terms.dtype.element_ty)
        tl.store(terms + ((k * SIDE + c) * width)[:, None] + column[None, :], term, mask=inside)
        f -= term.to(tl.float32)


@Kernel
@triton.jit(do_not_specialize=["tokens", "span"])
def _write_project(
    x, m, y, w, terms, out, products, moments, tokens, d, span,
    N: tl.constexpr, MIX: tl.constexpr, WRITE: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr,
    CENTRED: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of a tile of tokens and `span` tiles of columns: X', products (parts, rows, C), moments (parts, 2, rows)."""
    tiles = tl.cdiv(d, COLUMNS)
    parts = tl.cdiv(tiles, span)
    part = tl.program_id(0) % parts
    token = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = token < tokens
    c, line = tl.arange(0, SIDE), tl.arange(0, TERMS * SIDE)
    PER: tl.constexpr = N // GROUPS  # streams of a row of entries
    mixing, writing, totals, squares, sums = (), (), (), (), ()
    for i in tl.static_range(N):
        writing = writing + (_number(w, token, there, i, N, WRITE),)  # type: ignore[assignment]
        if MIX:
            for j in tl.static_range(N):
                mixing = mixing + (_number(m, token, there, i * N + j, N * N, MIX),)  # type: ignore[assignment]
    for _ in tl.static_range(GROUPS):
        totals = totals + (tl.zeros([TERMS * SIDE, ROWS], tl.float32),)  # type: ignore[assignment]
        squares = squares + (tl.zeros([ROWS, COLUMNS // LANE], tl.float32),)  # type: ignore[assignment]
        sums = sums + (tl.zeros([ROWS, COLUMNS // LANE], tl.float32),)  # type: ignore[assignment]
    for tile in tl.range(part * span, tl.minimum(part * span + span, tiles), num_stages=STAGES):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        has = column < d
        inside = there[:, None] & has[None, :]
        v = _stream(y, token, column, inside, d, 0, 1)
        kept, weights = (), ()
        for j in tl.static_range(N):
            kept = kept + (_stream(x, token, column, inside, d, j, N),)  # type: ignore[assignment]
        for j in tl.static_range(PER):
            at = (line * (PER * d))[:, None] + (j * d + column)[None, :]
            f = tl.load(terms + at, mask=(line % SIDE < C)[:, None] & has[None, :], other=0.0)
            weights = weights + (f,)  # type: ignore[assignment]
        found, squared, summed = (), (), ()
        for g in tl.static_range(GROUPS):
            product = tl.zeros([TERMS * SIDE, ROWS], tl.float32)
            square, add = squares[g], sums[g]  # type: ignore[var-annotated]
            for k in tl.static_range(PER):
                total = writing[g * PER + k] * v
                if MIX:
                    for j in tl.static_range(N):
                        total += mixing[(g * PER + k) * N + j] * kept[j]
                else:
                    total += kept[g * PER + k]
                made = total.to(out.dtype.element_ty)
                tl.store(out + ((token * N + (g * PER + k)) * d)[:, None] + column[None, :], made, mask=inside)
                wide = made.to(tl.float32)
                square += _of_lanes(wide * wide, ROWS, COLUMNS, LANE)
                if CENTRED:
                    add += _of_lanes(wide, ROWS, COLUMNS, LANE)
                if made.dtype == tl.bfloat16:
                    product = tl.dot(weights[k], tl.trans(made), product)
                else:
                    product = tl.dot(weights[k], tl.trans(wide), product, input_precision="tf32x3")
            found = found + (tl.fma(product, 1.0, totals[g]),)  # type: ignore[assignment]
            squared = squared + (square,)  # type: ignore[assignment]
            summed = summed + (add,)  # type: ignore[assignment]
        totals, squares, sums = found, squared, summed
    rows = tokens.to(tl.int64) * GROUPS
    first = part.to(tl.int64) * rows
    for g in tl.static_range(GROUPS):
        row = token * GROUPS + g
        total = tl.sum(tl.reshape(totals[g], [TERMS, SIDE, ROWS]), 0)
        at = ((first + row) * C)[None, :] + c[:, None]
        tl.store(products + at, total, mask=there[None, :] & (c < C)[:, None])
        tl.store(moments + 2 * first + row, tl.sum(squares[g], 1), mask=there)
        if CENTRED:
            tl.store(moments + 2 * first + rows + row, tl.sum(sums[g], 1), mask=there)


@Kernel
@triton.jit(do_not_specialize=["tokens", "span"])
def _give_back(
    x, m, y, w, phi, pre, dseen, du, slopes, means, more, dx, dm, dy, dw, tokens, d, span,
    N: tl.constexpr, MIX: tl.constexpr, WRITE: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr,
    CENTRED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """What `_give` makes of X', which is made again, goes into `_walk_backward` where it is: it is in no memory."""
    tiles = tl.cdiv(d, COLUMNS)
    parts = tl.cdiv(tiles, span)
    part = tl.program_id(0) % parts
    token = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, c = token < tokens, tl.arange(0, SIDE)
    PER: tl.constexpr = N // GROUPS  # streams of a row of entries
    mixing, writing, reading, sums, us, steep, middle = (), (), (), (), (), (), ()
    for i in tl.static_range(N):
        writing = writing + (_number(w, token, there, i, N, WRITE),)  # type: ignore[assignment]
        reading = reading + (_number(pre, token, there, i, N, 2),)  # type: ignore[assignment]
        if MIX:
            for j in tl.static_range(N):
                mixing = mixing + (_number(m, token, there, i * N + j, N * N, MIX),)  # type: ignore[assignment]
    for g in tl.static_range(GROUPS):
        row = token * GROUPS + g
        u = tl.load(du + (row * C)[:, None] + c[None, :], mask=there[:, None] & (c < C)[None, :], other=0.0)
        us = us + (u,)  # type: ignore[assignment]
        steep = steep + (tl.load(slopes + row, mask=there, other=0.0)[:, None],)  # type: ignore[assignment]
        if CENTRED:
            middle = middle + (tl.load(means + row, mask=there, other=0.0)[:, None],)  # type: ignore[assignment]
    BEFORE: tl.constexpr = N * N if MIX else 0  # sums of dm, then of dw
    for _ in tl.static_range(BEFORE + N):
        sums = sums + (tl.zeros([ROWS, COLUMNS // LANE], tl.float32),)  # type: ignore[assignment]
    for tile in tl.range(part * span, tl.minimum(part * span + span, tiles), num_stages=STAGES):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        has = column < d
        inside = there[:, None] & has[None, :]
        v = _stream(y, token, column, inside, d, 0, 1)
        shown = _stream(dseen, token, column, inside, d, 0, 1)
        kept, grads, weights, after = (), (), (), ()
        for j in tl.static_range(N):
            kept = kept + (_stream(x, token, column, inside, d, j, N),)  # type: ignore[assignment]
            if more is not None:
                grads = grads + (_stream(more, token, column, inside, d, j, N),)  # type: ignore[assignment]
            else:
                grads = grads + (tl.zeros([ROWS, COLUMNS], tl.float32),)  # type: ignore[assignment]
        for j in tl.static_range(PER):
            at = (c * (PER * d))[:, None] + (j * d + column)[None, :]
            f = tl.load(phi + at, mask=(c < C)[:, None] & has[None, :], other=0.0)
            weights = weights + (f,)  # type: ignore[assignment]
        for i in tl.static_range(N):
            made = writing[i] * v
            if MIX:
                for j in tl.static_range(N):
                    made += mixing[i * N + j] * kept[j]
            else:
                made += kept[i]
            made = made.to(dx.dtype.element_ty).to(tl.float32)
            if CENTRED:
                made -= middle[i // PER]
            grad = grads[i] + reading[i] * shown + steep[i // PER] * made
            grad += tl.dot(us[i // PER], weights[i % PER], input_precision=PRECISION)
            after = after + (grad,)  # type: ignore[assignment]
        summed = ()
        if MIX:
            for i in tl.static_range(N):
                for j in tl.static_range(N):
                    product = _of_lanes(after[i] * kept[j], ROWS, COLUMNS, LANE)
                    summed = summed + (sums[i * N + j] + product,)  # type: ignore[assignment]
        back = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in tl.static_range(N):
            back += writing[i] * after[i]
            product = _of_lanes(after[i] * v, ROWS, COLUMNS, LANE)
            summed = summed + (sums[BEFORE + i] + product,)  # type: ignore[assignment]
        sums = summed
        tl.store(dy + (token * d)[:, None] + column[None, :], back.to(dy.dtype.element_ty), mask=inside)
        for j in tl.static_range(N):
            if MIX:
                back = tl.zeros([ROWS, COLUMNS], tl.float32)
                for i in tl.static_range(N):
                    back += mixing[i * N + j] * after[i]
            else:
                back = after[j]
            at = ((token * N + j) * d)[:, None] + column[None, :]
            tl.store(dx + at, back.to(dx.dtype.element_ty), mask=inside)
    for i in tl.static_range(BEFORE):
        _tell(dm, sums[i], part, tokens, token, there, i, N * N)
    for i in tl.static_range(N):
        _tell(dw, sums[BEFORE + i], part, tokens, token, there, i, N)


# ---- launches --------------------------------------------------------------------------------------------------------


def _forward(
    x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, phi: Tensor, a: Tensor, b: Tensor,
    chart: str, tanh: bool, centred: bool, eps: float, floor: float, record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    shape = look._Shape.of(x, b)
    if _LAUNCH is None or not _together(x, shape):
        out = mix._run(x, m, y, w, None)[0]
        return out, *look._forward(out, phi, a, b, chart, tanh, centred, eps, floor, record)
    out = torch.empty_like(x)
    rows, columns, warps, stages = _LAUNCH["terms" if x.dtype == torch.bfloat16 else "tf32"]
    tiles = cdiv(shape.tokens, rows)
    span, parts = _spread(cdiv(shape.d, columns), tiles)
    products, moments = look._sums_of(x, shape, parts)
    count = look._TERMS if x.dtype == torch.bfloat16 else 1
    side, terms = max(_LEAST // count, shape.side), phi
    sizes, mixes = {"C": shape.entries, "SIDE": side, "TERMS": count}, mix._constants(shape.n, m, w, None)
    with layout.on_device(x):
        if count > 1:
            terms = x.new_empty(count * side, shape.width)
            _split[(cdiv(shape.width, _SPLIT),)](phi, terms, shape.width, **sizes, COLUMNS=_SPLIT, num_warps=4)
        _write_project[(tiles * parts,)](
            x, m, y, w, terms, out, products, moments, shape.tokens, shape.d, span, **sizes, N=shape.n,
            MIX=mixes["MIX"], WRITE=mixes["WRITE"], GROUPS=shape.groups, CENTRED=centred, ROWS=rows, COLUMNS=columns,
            LANE=_lane(x, columns), STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return out, *look._charted(out, a, b, products, moments, chart, tanh, centred, eps, floor, record)


def _together(x: Tensor, shape: look._Shape) -> bool:
    return shape.n <= mix._FEW and shape.groups * shape.side <= _SIDE and x.numel() > 0


def _lane(x: Tensor, columns: int) -> int:
    """Columns of a tile that a thread has side by side."""
    return min(16 // x.element_size(), columns)


def _empty(
    x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, phi: Tensor, a: Tensor, b: Tensor,
    chart: str, tanh: bool, centred: bool, eps: float, floor: float, record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    return torch.empty_like(x), *look._empty(x, phi, a, b, chart, tanh, centred, eps, floor, record)


def _backward(
    x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, phi: Tensor, a: Tensor, b: Tensor,
    chart: str, tanh: bool, centred: bool, eps: float, floor: float, kept: list[Tensor],
    dout: Tensor | None, dpre: Tensor | None, dentries: Tensor | None, dseen: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    out, *rest = kept
    shape = look._Shape.of(x, b)
    if _BACK is not None and _together(x, shape):
        dseen = torch.zeros_like(y) if dseen is None else dseen
        du, slopes, *others = look._felt(out, phi, a, b, chart, tanh, rest, dpre, dentries, dseen)
        rows, columns, warps, stages = _BACK["terms" if x.dtype == torch.bfloat16 else "tf32"]
        tiles = cdiv(shape.tokens, rows)
        span, parts = _spread(cdiv(shape.d, columns), tiles)
        dx, dy, sizes = torch.empty_like(x), torch.empty_like(y), mix._constants(shape.n, m, w, None)
        dm = None if m is None else mix._sums(x, shape.n**2, parts)
        dw = mix._sums(x, shape.n, parts)
        with layout.on_device(x):
            _give_back[(tiles * parts,)](
                x, m, y, w, phi, rest[0], dseen, du, slopes, rest[3], dout, dx, dm, dy, dw, shape.tokens, shape.d,
                span, **shape.constants(), MIX=sizes["MIX"], WRITE=sizes["WRITE"], CENTRED=centred,
                PRECISION=look._precision(x), ROWS=rows, COLUMNS=columns, LANE=_lane(x, columns), STAGES=stages,
                num_warps=warps,
            )  # fmt: skip
        total = None if m is None or dm is None else mix._total(dm, m, sizes["MIX"])
        return [dx, total, dy, mix._total(dw, w, sizes["WRITE"]), *others]  # type: ignore[list-item]
    dx, *others = look._backward(out, phi, a, b, chart, tanh, centred, eps, floor, rest, dpre, dentries, dseen, dout)
    return [*mix._differentiate(x, m, y, w, None, dx, None), *others]


_follows = Differentiable("mix_write_look", _forward, _backward, _empty, gradients=7, reads=2, missing=True)


def write_look(
    x: Tensor, y: Tensor, w: Tensor, m: Tensor | None, phi: Tensor, a: Tensor, b: Tensor, chart: str,
    *, tanh: bool = False, centred: bool = False, eps: float = 1e-6, floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(X', x_in, pre, entries): `mix_write` of streams x (..., n, d), and `look` at what it wrote.

    Raises ShapeError as these do.
    """
    mix._check("write_look", x, y, m=m, w=w)
    look._require("write_look", x, phi, a, b, chart)
    n, d, lead = *x.shape[-2:], x.shape[:-2]
    parameters = (t.to(torch.float32).contiguous() for t in (phi, a, b))
    options = chart, tanh, centred, float(eps), float(floor)
    made, pre, entries, seen = _follows(*mix._given(x, y, w, m), *parameters, *options)
    return made.view(x.shape), seen.view(*lead, d), pre.view(*lead, n), entries.view(*lead, *b.shape)
