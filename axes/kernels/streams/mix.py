"""Reads and writes of n residual streams X (..., n, d), one pass over them each way.

    read    y = sum_j r_j X_j                       dX_j = r_j dy      dr_j = <X_j, dy>
    write   X'_i = sum_j M_ij X_j + w_i y           dX_j = sum_i M_ij G_i      dy = sum_i w_i G_i
                                                    dM_ij = <G_i, X_j>         dw_i = <G_i, y>
    both    the write, then x = sum_i r_i X'_i      G_i = dX'_i + r_i dx       dr_i = <X'_i, dx>

G = dX' where nothing is read; what is made of the X that a read returns beside y gives its gradient to that pass.
Coefficients are float32, of every token or one for all; products and sums are float32, results are rounded once to the
dtype of the streams, and what is read of X' is what has been written. Without M the streams stay as they are, M = I. A
program owns a tile of tokens and columns; its parts of sums over columns are written down and added in one order, those
of constant coefficients over tokens too. Where a write and a read go together the backward makes X' again.

Of up to four streams the backward of a write is a walk along the columns: coefficients are loaded once, ahead of all
stores, behind which no compiler would load them early; every thread keeps its share of the n^2 + n sums, which meet at
the end; and the next columns are on their way to shared memory while these are worked on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.streams import LARGEST

_KEPT = 8  # up to so many streams are held in registers while they meet; more are loaded for every meeting
_FEW = 4  # of up to so many a write's backward walks along the columns
_WALK = (4, 3)  # its warps and stages
_PROGRAMS = 512  # enough of them to fill a GPU
_WARPS = 4
_NONE, _CONSTANT, _EACH = 0, 1, 2  # coefficients: not there, one for all tokens, of every token


# ---- device ----------------------------------------------------------------------------------------------------------


@triton.jit
def _places(program, tokens, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a program: its part of the columns, its tokens and columns, and which of them there are."""
    parts = tl.cdiv(d, COLUMNS)
    part = program % parts
    token = (program // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    return part, token, column, token < tokens, (token < tokens)[:, None] & (column < d)[None, :]


@triton.jit
def _stream(x, token, column, inside, d, j, N: tl.constexpr):
    """One of the streams in float32."""
    return tl.load(x + ((token * N + j) * d)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _again(kept, x, token, column, inside, d, j, N: tl.constexpr, KEPT: tl.constexpr):
    """The same from the tiles that are held, if they are."""
    if KEPT:
        return kept[j]
    else:
        return _stream(x, token, column, inside, d, j, N)


@triton.jit
def _number(c, token, there, index, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """A coefficient of every token as a column, or the one of all."""
    if KIND == 2:
        return tl.load(c + token * WIDTH + index, mask=there, other=0.0)[:, None]
    else:
        return tl.load(c + index)


@triton.jit
def _tell(sums, product, part, tokens, token, there, index, WIDTH: tl.constexpr):
    """A part of a sum over columns."""
    tl.store(sums + (part.to(tl.int64) * tokens + token) * WIDTH + index, tl.sum(product, axis=1), mask=there)


@triton.jit
def _mixed(kept, x, m, w, y, token, column, there, inside, d, i, N: tl.constexpr, MIX: tl.constexpr,
           WRITE: tl.constexpr, KEPT: tl.constexpr):  # fmt: skip
    """A stream after the write, in float32."""
    total = _number(w, token, there, i, N, WRITE) * y
    if MIX == 0:
        total += _again(kept, x, token, column, inside, d, i, N, KEPT)
    else:
        for j in tl.static_range(N):
            c = _number(m, token, there, i * N + j, N * N, MIX)
            total += c * _again(kept, x, token, column, inside, d, j, N, KEPT)
    return total


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _read(x, r, y, tokens, d, N: tl.constexpr, READ: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tokens, which the pass before left in the cache
    part, token, column, there, inside = _places(program, tokens, d, ROWS, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for j in tl.static_range(N):
        total += _number(r, token, there, j, N, READ) * _stream(x, token, column, inside, d, j, N)
    tl.store(y + (token * d)[:, None] + column[None, :], total.to(y.dtype.element_ty), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _read_backward(
    x, r, dy, more, dx, dr, tokens, d, N: tl.constexpr, READ: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    part, token, column, there, inside = _places(tl.program_id(0), tokens, d, ROWS, COLUMNS)
    grad = _stream(dy, token, column, inside, d, 0, 1)
    for j in tl.static_range(N):
        moved = _number(r, token, there, j, N, READ) * grad
        at = ((token * N + j) * d)[:, None] + column[None, :]
        if more is not None:
            moved += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, moved.to(dx.dtype.element_ty), mask=inside)
        _tell(dr, grad * _stream(x, token, column, inside, d, j, N), part, tokens, token, there, j, N)


@triton.jit
def _write_one(kept, x, m, y, w, r, out, seen, token, column, there, inside, d, i, N: tl.constexpr, MIX: tl.constexpr,
               WRITE: tl.constexpr, READ: tl.constexpr, KEPT: tl.constexpr):  # fmt: skip
    """Write a stream; what has been read so far, with it."""
    made = _mixed(kept, x, m, w, y, token, column, there, inside, d, i, N, MIX, WRITE, KEPT).to(out.dtype.element_ty)
    tl.store(out + ((token * N + i) * d)[:, None] + column[None, :], made, mask=inside)
    if READ:
        seen += _number(r, token, there, i, N, READ) * made.to(tl.float32)
    return seen


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _write(
    x, m, y, w, r, out, seen, tokens, d,
    N: tl.constexpr, MIX: tl.constexpr, WRITE: tl.constexpr, READ: tl.constexpr, KEPT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    part, token, column, there, inside = _places(tl.program_id(0), tokens, d, ROWS, COLUMNS)
    v = _stream(y, token, column, inside, d, 0, 1)
    z = tl.zeros([ROWS, COLUMNS], tl.float32)
    kept = ()
    if KEPT:
        for i in tl.static_range(N):
            kept = kept + (_stream(x, token, column, inside, d, i, N),)  # type: ignore[assignment]
        for i in tl.static_range(N):
            z = _write_one(kept, x, m, v, w, r, out, z, token, column, there, inside, d, i, N, MIX, WRITE, READ, KEPT)
    else:
        for i in range(N):
            z = _write_one(kept, x, m, v, w, r, out, z, token, column, there, inside, d, i, N, MIX, WRITE, READ, KEPT)
    if READ:
        tl.store(seen + (token * d)[:, None] + column[None, :], z.to(seen.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(kept, dout, r, shown, token, column, there, inside, d, i, N: tl.constexpr, READ: tl.constexpr,
              KEPT: tl.constexpr):  # fmt: skip
    """What a stream after the write hears from those behind it, its read among them."""
    if KEPT:
        return kept[i]
    else:
        grad = _stream(dout, token, column, inside, d, i, N)
        if READ:
            grad += _number(r, token, there, i, N, READ) * shown
        return grad


@triton.jit
def _hear_one(kept, grads, x, m, y, w, r, dout, shown, dm, du, dw, dr, part, tokens, token, column, there, inside,
              d, i, N: tl.constexpr, MIX: tl.constexpr, WRITE: tl.constexpr, READ: tl.constexpr,
              KEPT: tl.constexpr):  # fmt: skip
    """Sums of the coefficients that made a stream after the write; the gradient of y so far, with it."""
    grad = _gradient(grads, dout, r, shown, token, column, there, inside, d, i, N, READ, KEPT)
    _tell(dw, grad * y, part, tokens, token, there, i, N)
    if MIX:
        for j in tl.static_range(N):
            product = grad * _again(kept, x, token, column, inside, d, j, N, KEPT)
            _tell(dm, product, part, tokens, token, there, i * N + j, N * N)
    if READ:
        made = _mixed(kept, x, m, w, y, token, column, there, inside, d, i, N, MIX, WRITE, KEPT)
        _tell(dr, made.to(dout.dtype.element_ty).to(tl.float32) * shown, part, tokens, token, there, i, N)
    return du + _number(w, token, there, i, N, WRITE) * grad


@triton.jit
def _back_one(grads, m, r, dout, shown, dx, token, column, there, inside, d, j, N: tl.constexpr, MIX: tl.constexpr,
              READ: tl.constexpr, KEPT: tl.constexpr):  # fmt: skip
    """The gradient of a stream before the write."""
    if MIX:
        back = tl.zeros(inside.shape, tl.float32)
        for i in tl.static_range(N):
            grad = _gradient(grads, dout, r, shown, token, column, there, inside, d, i, N, READ, KEPT)
            back += _number(m, token, there, i * N + j, N * N, MIX) * grad
    else:
        back = _gradient(grads, dout, r, shown, token, column, there, inside, d, j, N, READ, KEPT)
    at = ((token * N + j) * d)[:, None] + column[None, :]
    tl.store(dx + at, back.to(dx.dtype.element_ty), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _write_backward(
    x, m, y, w, r, dout, dseen, dx, dm, dy, dw, dr, tokens, d,
    N: tl.constexpr, MIX: tl.constexpr, WRITE: tl.constexpr, READ: tl.constexpr, KEPT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    part, token, column, there, inside = _places(tl.program_id(0), tokens, d, ROWS, COLUMNS)
    v = _stream(y, token, column, inside, d, 0, 1)
    shown = v
    if READ:
        shown = _stream(dseen, token, column, inside, d, 0, 1)
    du = tl.zeros([ROWS, COLUMNS], tl.float32)
    kept = ()
    grads = ()
    if KEPT:
        for i in tl.static_range(N):
            if MIX or READ:
                kept = kept + (_stream(x, token, column, inside, d, i, N),)  # type: ignore[assignment]
            grad = _gradient(grads, dout, r, shown, token, column, there, inside, d, i, N, READ, False)
            grads = grads + (grad,)  # type: ignore[assignment]
        for i in tl.static_range(N):
            du = _hear_one(kept, grads, x, m, v, w, r, dout, shown, dm, du, dw, dr, part, tokens, token, column, there,
                           inside, d, i, N, MIX, WRITE, READ, KEPT)  # fmt: skip
            if MIX or READ:
                _back_one(grads, m, r, dout, shown, dx, token, column, there, inside, d, i, N, MIX, READ, KEPT)
    else:
        for i in range(N):
            du = _hear_one(kept, grads, x, m, v, w, r, dout, shown, dm, du, dw, dr, part, tokens, token, column, there,
                           inside, d, i, N, MIX, WRITE, READ, KEPT)  # fmt: skip
            if MIX or READ:
                _back_one(grads, m, r, dout, shown, dx, token, column, there, inside, d, i, N, MIX, READ, KEPT)
    tl.store(dy + (token * d)[:, None] + column[None, :], du.to(dy.dtype.element_ty), mask=inside)


@triton.jit
def _of_lanes(product, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr):
    """A sum over the columns that a thread has."""
    return tl.sum(tl.reshape(product, [ROWS, COLUMNS // LANE, LANE]), axis=2)


@Kernel
@triton.jit(do_not_specialize=["tokens", "span"])
def _walk_backward(
    x, m, y, w, r, dout, dseen, dx, dm, dy, dw, dr, tokens, d, span,
    N: tl.constexpr, MIX: tl.constexpr, WRITE: tl.constexpr, READ: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_write_backward` of `span` tiles of columns and few streams."""
    tiles = tl.cdiv(d, COLUMNS)
    parts = tl.cdiv(tiles, span)
    part = tl.program_id(0) % parts
    token = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = token < tokens
    mixing, writing, reading, sums = (), (), (), ()
    for i in tl.static_range(N):
        writing = writing + (_number(w, token, there, i, N, WRITE),)  # type: ignore[assignment]
        if READ:
            reading = reading + (_number(r, token, there, i, N, READ),)  # type: ignore[assignment]
        if MIX:
            for j in tl.static_range(N):
                mixing = mixing + (_number(m, token, there, i * N + j, N * N, MIX),)  # type: ignore[assignment]
    BEFORE: tl.constexpr = N * N if MIX else 0  # sums of dm, then of dw, then of dr
    for _ in tl.static_range(BEFORE + (2 * N if READ else N)):
        sums = sums + (tl.zeros([ROWS, COLUMNS // LANE], tl.float32),)  # type: ignore[assignment]
    for tile in tl.range(part * span, tl.minimum(part * span + span, tiles), num_stages=STAGES):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = there[:, None] & (column < d)[None, :]
        v = _stream(y, token, column, inside, d, 0, 1)
        shown = v
        if READ:
            shown = _stream(dseen, token, column, inside, d, 0, 1)
        kept, grads, more = (), (), ()
        for i in tl.static_range(N):
            grad = _stream(dout, token, column, inside, d, i, N)
            if READ:
                grad += reading[i] * shown
            grads = grads + (grad,)  # type: ignore[assignment]
            if MIX or READ:
                kept = kept + (_stream(x, token, column, inside, d, i, N),)  # type: ignore[assignment]
        if MIX:
            for i in tl.static_range(N):
                for j in tl.static_range(N):
                    product = _of_lanes(grads[i] * kept[j], ROWS, COLUMNS, LANE)
                    more = more + (sums[i * N + j] + product,)  # type: ignore[assignment]
        du = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in tl.static_range(N):
            du += writing[i] * grads[i]
            more = more + (sums[BEFORE + i] + _of_lanes(grads[i] * v, ROWS, COLUMNS, LANE),)  # type: ignore[assignment]
        if READ:
            for i in tl.static_range(N):
                made = writing[i] * v
                if MIX:
                    for j in tl.static_range(N):
                        made += mixing[i * N + j] * kept[j]
                else:
                    made += kept[i]
                product = made.to(dout.dtype.element_ty).to(tl.float32) * shown
                made = sums[BEFORE + N + i] + _of_lanes(product, ROWS, COLUMNS, LANE)
                more = more + (made,)  # type: ignore[assignment]
        sums = more
        if MIX or READ:
            for j in tl.static_range(N):
                if MIX:
                    back = tl.zeros([ROWS, COLUMNS], tl.float32)
                    for i in tl.static_range(N):
                        back += mixing[i * N + j] * grads[i]
                else:
                    back = grads[j]
                at = ((token * N + j) * d)[:, None] + column[None, :]
                tl.store(dx + at, back.to(dx.dtype.element_ty), mask=inside)
        tl.store(dy + (token * d)[:, None] + column[None, :], du.to(dy.dtype.element_ty), mask=inside)
    for i in tl.static_range(BEFORE):
        _tell(dm, sums[i], part, tokens, token, there, i, N * N)
    for i in tl.static_range(N):
        _tell(dw, sums[BEFORE + i], part, tokens, token, there, i, N)
        if READ:
            _tell(dr, sums[BEFORE + N + i], part, tokens, token, there, i, N)


# ---- launches --------------------------------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """How streams are cut into tiles: a warp reads whole lines of one token, 16 bytes a thread."""

    rows: int
    columns: int
    parts: int
    programs: int

    @classmethod
    def of(cls, x: Tensor) -> _Cut:
        tokens, _, d = x.shape
        columns = min(512 // x.element_size(), power_of_2(d))
        rows = _WARPS * 256 // columns
        parts = cdiv(d, columns)
        return cls(rows, columns, parts, parts * cdiv(tokens, rows))


class _Walk(NamedTuple):
    """How the same is walked along: a warp is on one line, goes through `span` tiles of it."""

    rows: int
    columns: int
    lane: int
    warps: int
    stages: int
    span: int
    parts: int
    programs: int

    @classmethod
    def of(cls, x: Tensor) -> _Walk:
        tokens, _, d = x.shape
        warps, stages = _WALK
        lane = 16 // x.element_size()
        columns = min(32 * lane, power_of_2(d))
        rows = warps * 32 * lane // max(columns, lane)
        tiles = cdiv(tokens, rows)
        span, parts = _spread(cdiv(d, columns), tiles)
        return cls(rows, columns, min(lane, columns), warps, stages, span, parts, parts * tiles)


def _spread(tiles: int, others: int) -> tuple[int, int]:
    """How many of the tiles a program goes through, beside so many others; and how many programs do."""
    span = cdiv(tiles, max(1, _PROGRAMS // max(1, others)))
    return span, cdiv(tiles, span)


def _kind(coefficients: Tensor | None, constant: int) -> int:
    """constant: of how many dimensions they are for all tokens together."""
    return _NONE if coefficients is None else _CONSTANT if coefficients.ndim == constant else _EACH


def _launch(kernel: Kernel, x: Tensor, *given: Tensor | None, **constants: int) -> None:
    tokens, n, d = x.shape
    cut = _Cut.of(x)
    if cut.programs:
        with layout.on_device(x):
            kernel[(cut.programs,)](
                x, *given, tokens, d, N=n, ROWS=cut.rows, COLUMNS=cut.columns, num_warps=_WARPS, **constants
            )


def _sums(x: Tensor, width: int, parts: int | None = None) -> Tensor:
    return x.new_empty(_Cut.of(x).parts if parts is None else parts, x.shape[0], width, dtype=torch.float32)


def _total(sums: Tensor, like: Tensor, kind: int) -> Tensor:
    """Parts of sums, added in their order, and over all tokens if one number serves them all."""
    if kind == _CONSTANT:
        return sums.sum((0, 1)).view(like.shape)
    return (sums.view(sums.shape[1:]) if sums.shape[0] == 1 else sums.sum(0)).view(like.shape)


def _forward_read(x: Tensor, r: Tensor, record: bool) -> tuple[Tensor, list[Tensor]]:
    y = torch.empty_like(x[:, 0])
    _launch(_read, x, r, y, READ=_kind(r, 1))
    return y, []


def _backward_read(
    x: Tensor, r: Tensor, kept: list[Tensor], dy: Tensor | None, more: Tensor | None = None
) -> list[Tensor]:
    kind, dx, dr = _kind(r, 1), torch.empty_like(x), _sums(x, x.shape[1])
    _launch(_read_backward, x, r, torch.zeros_like(x[:, 0]) if dy is None else dy, more, dx, dr, READ=kind)
    return [dx, _total(dr, r, kind)]


def _constants(n: int, m: Tensor | None, w: Tensor, r: Tensor | None) -> dict[str, int]:
    return {"MIX": _kind(m, 2), "WRITE": _kind(w, 1), "READ": _kind(r, 1), "KEPT": n <= _KEPT}


def _run(x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor | None]:
    out, seen = torch.empty_like(x), None if r is None else torch.empty_like(x[:, 0])
    _launch(_write, x, m, y, w, r, out, seen, **_constants(x.shape[1], m, w, r))
    return out, seen


def _differentiate(
    x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, r: Tensor | None, dout: Tensor, dseen: Tensor | None
) -> list[Any]:
    tokens, n, d = x.shape
    dy, walk, constants = torch.empty_like(y), None, _constants(n, m, w, r)
    dx = dout if m is None and r is None else torch.empty_like(x)  # of streams that stay as they are it is theirs
    if n <= _FEW:
        walk = _Walk.of(x)
    parts = None if walk is None else walk.parts
    dm, dw = None if m is None else _sums(x, n * n, parts), _sums(x, n, parts)
    dr = None if r is None else _sums(x, n, parts)
    given = (m, y, w, r, dout, dseen, dx, dm, dy, dw, dr)
    if walk is None:
        _launch(_write_backward, x, *given, **constants)
    elif walk.programs:
        del constants["KEPT"]
        with layout.on_device(x):
            _walk_backward[(walk.programs,)](
                x, *given, tokens, d, walk.span, N=n, **constants, ROWS=walk.rows, COLUMNS=walk.columns, LANE=walk.lane,
                STAGES=walk.stages, num_warps=walk.warps,
            )  # fmt: skip
    total = None if m is None or dm is None else _total(dm, m, constants["MIX"])
    found = [dx, total, dy, _total(dw, w, constants["WRITE"])]
    return found if r is None or dr is None else [*found, _total(dr, r, constants["READ"])]


def _forward_write(x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, record: bool) -> tuple[Tensor, list[Tensor]]:
    return _run(x, m, y, w, None)[0], []


def _backward_write(
    x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, kept: list[Tensor], dout: Tensor
) -> list[Tensor]:
    return _differentiate(x, m, y, w, None, dout, None)


def _forward_both(
    x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, r: Tensor, record: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    out, seen = _run(x, m, y, w, r)
    assert seen is not None
    return out, seen, []


def _backward_both(
    x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, r: Tensor, kept: list[Tensor], dout: Tensor, dseen: Tensor
) -> list[Tensor]:
    return _differentiate(x, m, y, w, r, dout, dseen)


_reads = Differentiable(
    "mix_read", _forward_read, _backward_read, lambda x, r, record: (torch.empty_like(x[:, 0]), []), gradients=2,
    missing=True, passes=1,
)  # fmt: skip
_writes = Differentiable(
    "mix_write", _forward_write, _backward_write, lambda x, m, y, w, record: (torch.empty_like(x), []), gradients=4
)
_writes_and_reads = Differentiable(
    "mix_write_read", _forward_both, _backward_both,
    lambda x, m, y, w, r, record: (torch.empty_like(x), torch.empty_like(x[:, 0]), []), gradients=5,
)  # fmt: skip


# ---- calls -----------------------------------------------------------------------------------------------------------


def _check(who: str, x: Tensor, y: Tensor | None, **coefficients: Tensor | None) -> None:
    if x.ndim < 2 or not 1 <= x.shape[-2] <= LARGEST or not x.shape[-1]:
        raise ShapeError(f"{who}: streams are (..., n, d) with n from 1 to {LARGEST}, not {tuple(x.shape)}")
    lead, n, d = x.shape[:-2], x.shape[-2], x.shape[-1]
    if y is not None and y.shape != (*lead, d):
        raise ShapeError(f"{who}: y is {(*lead, d)} beside streams {tuple(x.shape)}, not {tuple(y.shape)}")
    kinds = [t.dtype for t in (x, y) if t is not None]
    if not set(kinds) <= set(layout.DTYPES):
        raise ShapeError(f"{who}: streams and y are bf16, fp16 or fp32, not {kinds}")
    for name, c in coefficients.items():
        one = (n, n) if name == "m" else (n,)
        if c is None:
            continue
        if tuple(c.shape) not in (one, (*lead, *one)):
            raise ShapeError(f"{who}: {name} is {one} or {(*lead, *one)}, not {tuple(c.shape)}")
        if not c.is_floating_point() or c.device != x.device:
            raise ShapeError(f"{who}: {name} is floating point on {x.device}, not {c.dtype} on {c.device}")
    if x.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"{who}: the Triton kernels need a CUDA device, not {x.device}")


def _flat(c: Tensor, dimensions: int) -> Tensor:
    """Coefficients in float32, those of all tokens one after another."""
    c = c.to(torch.float32)
    return (c if c.ndim == dimensions else c.reshape(-1, *c.shape[-dimensions:])).contiguous()


def mix_read(x: Tensor, r: Tensor) -> Tensor:
    """y = sum_j r_j X_j (..., d) of streams x (..., n, d), in their dtype; r (n) or (..., n).

    Raises ShapeError for other shapes and dtypes, and for devices that no kernel runs on.
    """
    return mix_read_on(x, r)[0]


def mix_read_on(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """`mix_read`, and x once more: what is made of that gives its gradient to the pass that writes the read's."""
    _check("mix_read", x, None, r=r)
    y, again = _reads(x.reshape(-1, *x.shape[-2:]).contiguous(), _flat(r, 1))
    return y.view(*x.shape[:-2], x.shape[-1]), again.view(x.shape)


def mix_write(x: Tensor, y: Tensor, w: Tensor, m: Tensor | None = None) -> Tensor:
    """X'_i = sum_j m_ij X_j + w_i y (..., n, d) of streams x (..., n, d), in their dtype; y (..., d).

    w (n) or (..., n); m (n, n) or (..., n, n), without it the identity.  Raises ShapeError as `mix_read`.
    """
    _check("mix_write", x, y, m=m, w=w)
    (made,) = _writes(*_given(x, y, w, m))
    out: Tensor = made.view(x.shape)
    return out


def mix_write_read(x: Tensor, y: Tensor, w: Tensor, r: Tensor, m: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`mix_write`, and `mix_read` of what was written with r (n) or (..., n), in one pass: (X', x)."""
    _check("mix_write_read", x, y, m=m, w=w, r=r)
    made, seen = _writes_and_reads(*_given(x, y, w, m), _flat(r, 1))
    return made.view(x.shape), seen.view(y.shape)


def _given(x: Tensor, y: Tensor, w: Tensor, m: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    flat = x.reshape(-1, *x.shape[-2:]).contiguous()
    return flat, None if m is None else _flat(m, 2), y.reshape(-1, y.shape[-1]).contiguous(), _flat(w, 1)
