"""Coefficients that every token predicts from its n streams, and the read with the first of them, in one operator.

    entries = a * f(u s) + b,   u = X^ phi^T (C),   s = (mean X^2 + eps)^-1/2        f: identity or tanh
    pre     = chart(entries),   x = sum_j pre_j X_j

X^ is vec(X) (n d), or every stream by itself (d): one row of entries for a token, or one for each stream. Where it is
centred, s is that of X^ less its mean, and rows of phi are taken less their means, which is what centring X^ does to u.

    "sigmoid"   pre_j = sigmoid(entries_j) + floor
    "softmax"   pre_j = mean_i softmax_j(entries_ij), of n x n entries
    "first"     pre_j = the first entry of stream j

With `writes` as many entries behind these make k (n), and `rest` are those behind them:

    "sigmoid"   k_j = 2 sigmoid(entries_n+j)
    "softmax"   k_i = sum_j softmax_i(entries_ij)

Forward: X is read for u and s, parts of sums over columns are added and charted, and X is read again for x. Backward,
with e = d entries and r = u s:

    dpre_j = <X_j, dx>          e += chart'(dpre)          dr = a f'(r) e         da = sum e f(r)        db = sum e
    dX_j = pre_j dx + (s dr phi)_j - s^2 <r, dr> X_j / W                          dphi = sum s dr X^

in two passes over X, the second of which writes dX once, with what a write of the same X has to add, and sums dphi of
the tiles that it holds. There is no copy of X in float32: streams of bfloat16 are multiplied as they are, and what they
meet goes in `TERMS` terms of as many bits, so that only what is beyond them is lost; beside other streams it is three
products of tf32. Sums over tokens are written down by parts and added in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.streams import ENTRIES, LARGEST
from axes.kernels.streams.mix import _Cut, _forward_read, _places, _spread, _stream, _sums, _tell
from axes.kernels.streams.predict import (
    TERMS,
    Shape,
    _activated,
    _added,
    _chart,
    _project,
    _rows,
    _scale,
    centred,
    split,
    summed,
)  # fmt: skip

CHARTS = ("sigmoid", "softmax", "first")
_LAUNCH = {  # of each, tokens and columns of a tile, warps, stages; wide: of more than 32 entries, widest: than 64
    "project": (64, 64, 4, 3), "project, tf32": (128, 64, 8, 3), "project, widest": (64, 64, 8, 3),
    "give": (32, 128, 8, 3), "give, wide": (16, 128, 4, 3), "give, widest": (32, 64, 4, 3),
    "give, tf32": (16, 128, 4, 2), "give, tf32, wide": (16, 32, 4, 2), "give, tf32, widest": (16, 32, 4, 2),
}  # fmt: skip
_WARPS = 4  # of the others


# ---- device ----------------------------------------------------------------------------------------------------------


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _heard(x, dx, dpre, tokens, d, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Parts of dpre_j = <X_j, dx>."""
    part, token, column, there, inside = _places(tl.program_id(0), tokens, d, ROWS, COLUMNS)
    grad = _stream(dx, token, column, inside, d, 0, 1)
    for j in tl.static_range(N):
        _tell(dpre, grad * _stream(x, token, column, inside, d, j, N), part, tokens, token, there, j, N)


@triton.jit
def _shown(dpre, given, at, mask, parts, step):
    """The gradient of pre: parts of what the read makes, and what came besides."""
    total = _added(dpre, at, mask, parts, step)
    if given is not None:
        total += tl.load(given + at, mask=mask, other=0.0)
    return total


@triton.jit
def _entry(raw, a, b, row, at, mask, N: tl.constexpr, C: tl.constexpr, SCALES: tl.constexpr, TANH: tl.constexpr):
    """Entries of rows again, of the one group that there is."""
    f, slope = _activated(tl.load(raw + (row * C)[:, None] + at[None, :], mask=mask, other=0.0), TANH)
    return tl.load(a + _scale(at, N, C, SCALES))[None, :] * f + tl.load(b + at)[None, :]


@triton.jit
def _unsoftmaxed(raw, a, b, entry, dshare, given, row, there, inside, c, first, parts, step, BESIDE: tl.constexpr,
                 ALONG: tl.constexpr, N: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr, SCALES: tl.constexpr,
                 TANH: tl.constexpr):  # fmt: skip
    """What the entries of n softmaxes hear, as `_softmaxes` has them, of the gradient of their sums."""
    place = c - first
    matrix = (place >= 0) & (place < N * N)
    of, begin = inside & matrix[None, :], tl.where(matrix, first + place // BESIDE % N * BESIDE, 0)
    top = tl.full([there.shape[0], SIDE], float("-inf"), tl.float32)
    for k in range(N):
        top = tl.maximum(top, _entry(raw, a, b, row, begin + k * ALONG, of, N, C, SCALES, TANH))
    total = tl.zeros([there.shape[0], SIDE], tl.float32)
    shown = tl.zeros([there.shape[0], SIDE], tl.float32)
    for k in range(N):
        weight = tl.exp(_entry(raw, a, b, row, begin + k * ALONG, of, N, C, SCALES, TANH) - top)
        heard = _shown(dshare, given, row * N + k, there, parts, step)
        total += weight
        shown += weight * heard[:, None]
    heard = _shown(dshare, given, (row * N)[:, None] + (place // ALONG % N)[None, :], of, parts, step)
    return tl.where(of, tl.exp(entry - top) / total * (heard - shown / total), 0.0)


@Kernel
@triton.jit(do_not_specialize=["tokens", "parts"])
def _back(
    raw, units, a, b, dpre, given, dk, drest, du, few, slopes, da, db, tokens, width, parts,
    N: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr, SCALES: tl.constexpr,
    BEHIND: tl.constexpr, CHART: tl.constexpr, TANH: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Through the charts and the norm: du = s dr, in TERMS of few bits too, slopes = -s^2 <r, dr> / W, parts of da and
    db over tokens."""
    group, token, there, row = _rows(tokens, GROUPS, ROWS)
    c = tl.arange(0, SIDE)
    inside, at = there[:, None] & (c < C)[None, :], (row * C)[:, None] + c[None, :]
    step = tokens.to(tl.int64) * N
    r = tl.load(raw + at, mask=inside, other=0.0)
    scale = tl.load(a + _scale(c, N, C, SCALES), mask=c < C, other=0.0)
    f, slope = _activated(r, TANH)
    entry = scale[None, :] * f + tl.load(b + group * C + c, mask=c < C, other=0.0)[None, :]
    grad = tl.zeros([ROWS, SIDE], tl.float32)
    if drest is not None:
        behind = inside & (c >= BEHIND)[None, :]
        grad += tl.load(drest + (row * (C - BEHIND))[:, None] + (c - BEHIND)[None, :], mask=behind, other=0.0)
    if CHART == "first":
        grad += _shown(dpre, given, row[:, None] + c[None, :], inside & (c < 1)[None, :], parts, step)
    elif CHART == "sigmoid":
        of, place = inside & (c < N)[None, :], (row * N)[:, None] + c[None, :]
        share = 1.0 / (1.0 + tl.exp(-entry))
        heard = _shown(dpre, given, place, of, parts, step)
        if dk is not None:
            heard += 2.0 * tl.load(dk + place - N, mask=inside & ((c >= N) & (c < BEHIND))[None, :], other=0.0)
        grad += heard * share * (1.0 - share)
    else:
        grad += _unsoftmaxed(
            raw, a, b, entry, dpre, given, row, there, inside, c, 0, parts, step, N, 1, N, C, SIDE, SCALES, TANH
        ) / N  # fmt: skip
        if dk is not None:
            grad += _unsoftmaxed(
                raw, a, b, entry, dk, None, row, there, inside, c, N * N, 1, step, 1, N, N, C, SIDE, SCALES, TANH
            )
    tile = (tl.program_id(0).to(tl.int64)) * C
    tl.store(da + tile + c, tl.sum(grad * f, 0), mask=c < C)
    tl.store(db + tile + c, tl.sum(grad, 0), mask=c < C)
    unit = tl.load(units + row, mask=there, other=0.0)
    grad *= scale[None, :] * slope
    left = unit[:, None] * grad
    tl.store(du + at, left, mask=inside)
    for k in tl.static_range(TERMS):
        term = left.to(few.dtype.element_ty)
        tl.store(few + (row * (TERMS * C))[:, None] + k * C + c[None, :], term, mask=inside)
        left -= term.to(tl.float32)
    tl.store(slopes + row, -unit * unit * tl.sum(grad * r, 1) / width, mask=there)


@triton.jit
def _taught(total, x, u, few, at, mask, C: tl.constexpr, TERMS: tl.constexpr):
    """total + u^T x, x a tile of streams and u that of their entries, taken in the terms that were written of it."""
    if TERMS:
        for k in tl.static_range(TERMS):
            total = tl.dot(tl.load(few + at + k * C, mask=mask, other=0.0), x, total)
        return total
    else:
        return tl.fma(tl.dot(tl.trans(u), x.to(tl.float32), input_precision="tf32x3"), 1.0, total)


@Kernel
@triton.jit(do_not_specialize=["tokens", "span"])
def _give(
    x, phi, pre, dx, du, few, slopes, means, more, dout, dphi, tokens, d, span,
    N: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr, CENTRED: tl.constexpr,
    TERMS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dX, and parts of dphi over tokens, of columns of a stream and `span` tiles of tokens. All that a
    tile needs is asked for ahead of the products, whose barriers no load is moved across; STAGES of them are on their
    way at a time."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tokens are in the cache
    j = program % N  # programs beside each other read the same dx
    cuts = tl.cdiv(d, COLUMNS)
    column = program // N % cuts * COLUMNS + tl.arange(0, COLUMNS)
    split = program // N // cuts
    c, has = tl.arange(0, SIDE), column < d
    if GROUPS == 1:
        group, width, place = 0, N * d, j * d + column
    else:
        group, width, place = j, d, column
    known = (c < C)[:, None] & has[None, :]
    f = tl.load(phi + (c * width)[:, None] + place[None, :], mask=known, other=0.0)
    total = tl.zeros([SIDE, COLUMNS], tl.float32)
    for tile in tl.range(split * span, tl.minimum(split * span + span, tl.cdiv(tokens, ROWS)), num_stages=STAGES):
        token = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        there = token < tokens
        inside, row = there[:, None] & has[None, :], token * GROUPS + group
        at = ((token * N + j) * d)[:, None] + column[None, :]
        of = there[:, None] & (c < C)[None, :]
        u = tl.load(du + (row * C)[:, None] + c[None, :], mask=of, other=0.0)
        v = tl.load(x + at, mask=inside, other=0.0)
        rest = tl.load(dx + (token * d)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        rest *= tl.load(pre + token * N + j, mask=there, other=0.0)[:, None]
        wide = v.to(tl.float32)
        if CENTRED:
            wide -= tl.load(means + row, mask=there, other=0.0)[:, None]
        rest += tl.load(slopes + row, mask=there, other=0.0)[:, None] * wide
        if more is not None:
            rest += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        turned = there[None, :] & (c < C)[:, None]
        total = _taught(total, v, u, few, (row * (TERMS * C))[None, :] + c[:, None], turned, C, TERMS)
        grad = tl.dot(u, f, input_precision=PRECISION) + rest
        tl.store(dout + at, grad.to(dout.dtype.element_ty), mask=inside)
    dphi += (split * GROUPS + group) * C * width
    tl.store(dphi + (c * width)[:, None] + place[None, :], total, mask=known)


# ---- launches --------------------------------------------------------------------------------------------------------


def _options(kernel: str, x: Tensor, side: int) -> dict[str, int]:
    rows, columns, warps, stages = _LAUNCH[kernel]
    if side > (64 if x.dtype == torch.bfloat16 else 32):  # three are more shared memory than small GPUs have
        stages = 1
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


def _behind(n: int, chart: str, writes: bool) -> int:
    """Entries in front of the rest."""
    return 0 if not writes else 2 * n if chart == "sigmoid" else 2 * n * n


def _forward(
    x: Tensor, phi: Tensor, a: Tensor, b: Tensor, chart: str, writes: bool, tanh: bool, centres: bool, eps: float,
    floor: float, record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    shape = Shape.of(x, a, b)
    if not x.numel():
        return _empty(x, phi, a, b, chart, writes, tanh, centres, eps, floor, record)
    terms = TERMS if x.dtype == torch.bfloat16 else 1
    kernel = "project, widest" if shape.side > 64 else "project" if terms > 1 else "project, tf32"
    options = _options(kernel, x, shape.side)
    rows, stages = shape.tokens * shape.groups, options.pop("num_stages")
    tiles = cdiv(rows, options["ROWS"])
    span, parts = _spread(cdiv(shape.width, options["COLUMNS"]), tiles)
    products = x.new_empty(parts, rows, shape.entries, dtype=torch.float32)
    moments = products.new_empty(parts, 2, rows)
    pre, k, rest, _, kept = _empty(x, phi, a, b, chart, writes, tanh, centres, eps, floor, record)
    raw, units, means = kept[:3] if record else (rest, rest, rest)
    phi = centred(phi) if centres else phi
    kept = [*kept, phi] if record and centres else kept
    with layout.on_device(x):
        _project[(tiles * parts,)](
            x, split(x, phi) if terms > 1 else phi, products, moments, rows, shape.width, span,
            C=shape.entries, SIDE=shape.side, CENTRED=centres, TERMS=terms, STAGES=stages, **options,
        )  # fmt: skip
        _chart[(shape.tiles,)](
            products, moments, a, b, pre, k, rest, raw, units, means, shape.tokens, shape.width, parts, eps, floor,
            **shape.constants(), BEHIND=_behind(shape.n, chart, writes), ACROSS=power_of_2(shape.n), CHART=chart,
            TANH=tanh, CENTRED=centres, KEEP=record, ROWS=shape.rows, num_warps=_WARPS,
        )  # fmt: skip
    return pre, k, rest, _forward_read(x, pre, False)[0], kept


def _empty(
    x: Tensor, phi: Tensor, a: Tensor, b: Tensor, chart: str, writes: bool, tanh: bool, centres: bool, eps: float,
    floor: float, record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    (tokens, n, d), (groups, entries) = x.shape, b.shape
    raw = x.new_empty(tokens, groups, entries, dtype=torch.float32)
    rest = raw.new_empty(tokens, groups, entries - _behind(n, chart, writes))
    kept = [raw, raw.new_empty(tokens, groups), raw.new_empty(tokens if centres else 0, groups)]
    pre, k = raw.new_empty(tokens, n), raw.new_empty(tokens, n if writes else 0)
    return pre, k, rest, x.new_empty(tokens, d), kept if record else []


def _backward(
    x: Tensor, phi: Tensor, a: Tensor, b: Tensor, chart: str, writes: bool, tanh: bool, centres: bool, eps: float,
    floor: float, kept: list[Tensor], given: Tensor | None, dk: Tensor | None, drest: Tensor | None,
    dseen: Tensor | None, more: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    if not x.numel():
        return [torch.zeros_like(t) for t in (x, phi, a, b)]
    shape, cut, dout = Shape.of(x, a, b), _Cut.of(x), torch.empty_like(x)
    pre, raw, units, means, *instead = kept
    dseen = torch.zeros_like(x[:, 0]) if dseen is None else dseen
    dpre, du, slopes = _sums(x, shape.n), torch.empty_like(raw), torch.empty_like(units)
    da, db = (raw.new_empty(shape.tiles, shape.entries) for _ in range(2))
    count = TERMS if x.dtype == torch.bfloat16 else 0
    few = x.new_empty(count * raw.numel())
    size = "" if shape.side <= 32 else ", wide" if shape.side <= 64 else ", widest"
    kernel = f"give{'' if count else ', tf32'}{size}"
    options = _options(kernel, x, shape.side)
    blocks, stages = shape.n * cdiv(shape.d, options["COLUMNS"]), options.pop("num_stages")
    span, splits = _spread(cdiv(shape.tokens, options["ROWS"]), blocks)
    dphi = phi.new_empty(splits * shape.groups, *phi.shape)
    with layout.on_device(x):
        _heard[(cut.programs,)](
            x, dseen, dpre, shape.tokens, shape.d, N=shape.n, ROWS=cut.rows, COLUMNS=cut.columns, num_warps=_WARPS
        )
        _back[(shape.tiles,)](
            raw, units, a, b, dpre, given, dk if writes else None, drest, du, few, slopes, da, db, shape.tokens,
            shape.width, cut.parts, **shape.constants(), BEHIND=_behind(shape.n, chart, writes), CHART=chart,
            TANH=tanh, TERMS=count, ROWS=shape.rows, num_warps=_WARPS,
        )  # fmt: skip
        _give[(blocks * splits,)](
            x, instead[0] if instead else phi, pre, dseen, du, few, slopes, means, more, dout, dphi, shape.tokens,
            shape.d, span, N=shape.n, GROUPS=shape.groups, C=shape.entries, SIDE=shape.side, CENTRED=centres,
            TERMS=count, PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32", STAGES=stages, **options,
        )  # fmt: skip
    dphi, *others = summed(shape, phi, a, b, (dphi, da, db))
    return [dout, centred(dphi) if centres else dphi, *others]


_looks = Differentiable("look", _forward, _backward, _empty, gradients=4, reads=1, missing=True, passes=1)


# ---- call ------------------------------------------------------------------------------------------------------------


def _require(who: str, x: Tensor, phi: Tensor, a: Tensor, b: Tensor, chart: str, writes: bool) -> None:
    if x.ndim < 2 or not 1 <= x.shape[-2] <= LARGEST or not x.shape[-1]:
        raise ShapeError(f"{who}: streams are (..., n, d) with n from 1 to {LARGEST}, not {tuple(x.shape)}")
    n, d = x.shape[-2:]
    if x.dtype not in layout.DTYPES:
        raise ShapeError(f"{who}: streams are bf16, fp16 or fp32, not {x.dtype}")
    if chart not in CHARTS or (writes and chart == "first"):
        raise ShapeError(f"{who}: chart is one of {', '.join(CHARTS)}, the last without writes, not {chart!r}")
    groups, least = (n if chart == "first" else 1), {"first": 1, "sigmoid": n, "softmax": n * n}[chart]
    least *= 1 + writes
    if b.ndim != 2 or b.shape[0] != groups or not least <= b.shape[1] <= ENTRIES:
        raise ShapeError(f"{who}: b is ({groups}, C) with C from {least} to {ENTRIES}, not {tuple(b.shape)}")
    entries = b.shape[1]
    if a.ndim != 1 or not (len(a) == entries or 1 <= len(a) <= -(-entries // n)):
        raise ShapeError(
            f"{who}: a is ({entries},), or has up to {-(-entries // n)} numbers for {n} entries each and the rest, not "
            f"{tuple(a.shape)}"
        )
    wanted = {"phi": (phi, (entries, n * d // groups)), "a": (a, tuple(a.shape)), "b": (b, tuple(b.shape))}
    for name, (t, size) in wanted.items():
        if tuple(t.shape) != size:
            raise ShapeError(f"{who}: {name} is {size} beside streams {tuple(x.shape)}, not {tuple(t.shape)}")
        if not t.is_floating_point() or t.dtype == torch.float64 or t.device != x.device:
            raise ShapeError(f"{who}: {name} has up to 32 bits, on {x.device}, not {t.dtype} on {t.device}")
    if x.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"{who}: the Triton kernels need a CUDA device, not {x.device}")


def look(
    x: Tensor, phi: Tensor, a: Tensor, b: Tensor, chart: str,
    *, writes: bool = False, tanh: bool = False, centred: bool = False, eps: float = 1e-6, floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(x_in, pre, k, rest, x) of streams x (..., n, d): (..., d) in their dtype, (..., n), (..., n or, without writes,
    0) and the other entries, without writes all of them, (..., g, <= C) in float32.

    What is made of the x that it returns gives its gradient to the pass that writes the operator's own.

    b (g, C) with g = 1 or, for every stream by itself, n; phi (C, n d / g); a (C), or fewer: each of n entries, the
    last of all others.  Raises ShapeError for other shapes and dtypes, C above `ENTRIES`, and devices that no kernel
    runs on.
    """
    _require("look", x, phi, a, b, chart, writes)
    n, d = x.shape[-2:]
    parameters = (t.to(torch.float32).contiguous() for t in (phi, a, b))
    flat = x.reshape(-1, n, d).contiguous()
    pre, k, rest, seen, again = _looks(flat, *parameters, chart, writes, tanh, centred, float(eps), float(floor))
    lead = x.shape[:-2]
    others = (t.view(*lead, *t.shape[1:]) for t in (seen, pre, k, rest))
    return *others, again.view(x.shape)
