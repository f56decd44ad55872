"""Sums of weighted outer products, the write of every axis:  S = decay S_0 + sum_t w_t u_t k_t^T.

Chunks of tokens are multiplied on the matrix units and added up outside of them in float32 (`tiles.accumulate`, which
the sequence kernels write their states with). With u = k the sum is symmetric up to S_0: tiles below the diagonal are
computed and mirrored, half the work. Where there are too few tiles to fill a GPU the tokens are cut into parts whose
sums are added by a second pass, in one order. Backward, with D = dS:
    du_t = w_t D k_t    dk_t = w_t D^T u_t    dw_t = u_t . D k_t    dS_0 = decay D    d decay = <S_0, D>
which are plain matrix products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import layout, tiles
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv

_PROCESSORS = 132  # of an H100; a constant, so that a sum has the same bits on every GPU
_LEAST = 512  # tokens that a part is worth


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _finish(out, start, scale, total, n, part, N, rows, columns, chosen, V, K, START: tl.constexpr):
    """Write the chosen entries of one tile of a part of S; the first part has decay S_0 in it."""
    at = (n * V + rows[:, None]) * K + columns[None, :]
    inside = (rows < V)[:, None] & (columns < K)[None, :] & chosen
    if START:
        total = tl.fma(scale, tl.load(start + at, mask=inside & (part == 0), other=0.0), total)
    tl.store(out + part.to(tl.int64) * N * V * K + at, total, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["span", "N"])
def _outer(
    u, k, weight, start, decay, out, T, span, N, V, K, u_n, u_t, u_v, k_n, k_t, k_k,
    C: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, SAME: tl.constexpr, WEIGHT: tl.constexpr,
    START: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix over `span` chunks of tokens. SAME: k is u, and tiles are numbered along the triangle."""
    pid = tl.program_id(0)
    down, across = tl.cdiv(V, BV), tl.cdiv(K, BK)
    if SAME:
        count = down * (down + 1) // 2
        tile = pid % count
        i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
        i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
        i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
        j = tile - i * (i + 1) // 2
    else:
        count = down * across
        i, j = pid % count // across, pid % count % across
    n = (pid // count % N).to(tl.int64)
    part = pid // count // N
    rows, columns = i * BV + tl.arange(0, BV), j * BK + tl.arange(0, BK)
    left = u + n * u_n + rows[None, :].to(tl.int64) * u_v
    right = k + n * k_n + columns[None, :].to(tl.int64) * k_k
    total = tl.zeros([BV, BK], dtype=tl.float32)
    for c in tl.range(part * span, tl.minimum((part + 1) * span, tl.cdiv(T, C))):
        t = c * C + tl.arange(0, C)
        here = (t < T)[:, None]
        x = tl.load(left + t[:, None].to(tl.int64) * u_t, mask=here & (rows < V)[None, :], other=0.0)
        y = tl.load(right + t[:, None].to(tl.int64) * k_t, mask=here & (columns < K)[None, :], other=0.0)
        if WEIGHT:
            w = tl.load(weight + n * T + t, mask=t < T, other=0.0).to(tl.float32)
            y = (w[:, None] * y).to(x.dtype)
        total = tiles.accumulate(total, x, y, PRECISION)
    scale = 1.0
    if DECAY:
        scale = tl.load(decay + n).to(tl.float32)
    chosen = (rows[:, None] >= columns[None, :]) | (not SAME)
    _finish(out, start, scale, total, n, part, N, rows, columns, chosen, V, K, START)
    if SAME:  # what is above the diagonal is a copy, on diagonal tiles too: symmetric to the bit
        above = columns[:, None] < rows[None, :]
        _finish(out, start, scale, tl.trans(total), n, part, N, columns, rows, above, V, K, START)


# ---- launch ----------------------------------------------------------------------------------------------------------


def settings(dtype: torch.dtype, value: int, key: int, rows: bool) -> dict[str, int | str]:
    """Tile sides, tokens of a chunk, warps and stages by dtype and widths; the only ones that are picked.

    rows: the features of a token are adjacent in memory. Where its tokens are (transposed views) IEEE products of
    float32 stall on shared memory; those in pieces on the matrix units take half the time.
    """
    if dtype == torch.float32 and rows:
        return {"C": 32, "BV": 64, "BK": 64, "num_warps": 4, "num_stages": 2, "PRECISION": "ieee"}
    if dtype == torch.float32:
        return {"C": 64, "BV": 64, "BK": 64, "num_warps": 4, "num_stages": 2, "PRECISION": layout.pieces()}
    side = 128 if min(value, key) > 256 else 64
    return {"C": 64, "BV": side, "BK": side, "num_warps": side // 16, "num_stages": 3, "PRECISION": "tf32"}


def parts(programs: int, side: int, length: int) -> int:
    """Into how many runs of tokens a sum is cut to fill a GPU: one tile of 128 on a processor, or four of 64."""
    return max(1, min(_PROCESSORS * (1 if side == 128 else 4) // programs, length // _LEAST))


def _launch(u: Tensor, k: Tensor | None, weight: Tensor | None, start: Tensor | None, decay: Tensor | None) -> Tensor:
    other = u if k is None else k
    (count, length, value), key = u.shape, other.shape[2]
    chosen = settings(u.dtype, value, key, u.stride(2) == 1 and other.stride(2) == 1)
    down, across = (cdiv(value, int(chosen["BV"])), cdiv(key, int(chosen["BK"])))
    programs = count * (down * (down + 1) // 2 if k is None else down * across)
    cut = parts(programs, int(chosen["BV"]), length)
    chunks = cdiv(length, int(chosen["C"]))
    span = cdiv(chunks, cut)
    cut = cdiv(chunks, span)
    out = u.new_empty(cut, count, value, key, dtype=torch.float32)
    with layout.on_device(u):
        _outer[(programs * cut,)](
            u, other, u if weight is None else weight, u if start is None else start, u if decay is None else decay,
            out, length, span, count, value, key, *u.stride(), *other.stride(), SAME=k is None,
            WEIGHT=weight is not None, START=start is not None, DECAY=decay is not None, **chosen,
        )  # fmt: skip
    return out[0] if cut == 1 else out.sum(0)


# ---- operator --------------------------------------------------------------------------------------------------------


def _forward(
    u: Tensor, k: Tensor | None, weight: Tensor | None, start: Tensor | None, decay: Tensor | None, record: bool
) -> tuple[Tensor, list[Tensor]]:
    return _launch(u, k, weight, start, decay), []


def _shapes(u, k, weight, start, decay, record):
    return u.new_empty(u.shape[0], u.shape[2], (u if k is None else k).shape[2], dtype=torch.float32), []


def _backward(u, k, weight, start, decay, kept, dout):
    """In torch, hence differentiable once more; products in the dtype of u, as the kernel's are."""
    other, d = u if k is None else k, dout.to(u.dtype)
    seen = other @ d.mT  # D k_t
    du, dk = seen, u @ d
    if k is None:
        du, dk = seen + dk, None
    dweight = dstart = ddecay = None
    if weight is not None:
        dweight = (u.float() * seen.float()).sum(-1)
        du = (weight[..., None] * du).to(u.dtype)
        dk = None if dk is None else (weight[..., None] * dk).to(u.dtype)
    if start is not None:
        dstart = dout if decay is None else decay[:, None, None] * dout
        ddecay = None if decay is None else (start * dout).sum((-2, -1))
    return [du, dk, dweight, dstart, ddecay]


_sum = Differentiable("outer_sum", _forward, _backward, _shapes, gradients=5, twice=True)


# ---- entry -----------------------------------------------------------------------------------------------------------


def _strided(x: Tensor) -> Tensor:
    """x where tokens or features are adjacent in memory, as in a transposed view; else a copy."""
    return x if 1 in x.stride()[1:] and min(x.stride()[1:]) > 0 else x.contiguous()


def outer_sum(
    u: Tensor,
    k: Tensor | None = None,
    weight: Tensor | None = None,
    start: Tensor | None = None,
    decay: Tensor | None = None,
) -> Tensor:
    """S = decay S_0 + sum_t w_t u_t k_t^T for each of N matrices, in float32.

    u (N, T, V), k (N, T, K) or None for u, in one of bf16, fp16, fp32; transposed views are read in place.
    weight (N, T) or None for 1; start S_0 (N, V, K) or None for 0; decay (N,) or None for 1, only with start.
    16-bit products are exact and only their sum rounds, but a weighted k rounds to its dtype.
    Returns (N, V, K). Every input receives gradients. ShapeError for shapes, dtypes and devices that do not fit.
    """
    who = "outer_sum"
    other = u if k is None else k
    if u.ndim != 3 or other.ndim != 3 or other.shape[:2] != u.shape[:2]:
        raise ShapeError(f"{who}: u (N, T, V) and k (N, T, K), not {tuple(u.shape)} and {tuple(other.shape)}")
    if u.dtype not in layout.DTYPES or other.dtype != u.dtype or other.device != u.device:
        raise ShapeError(f"{who}: u and k share a device and one of bf16, fp16, fp32, not {u.dtype} and {other.dtype}")
    if u.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(
            f"{who}: the Triton kernel needs a CUDA device, not {u.device}: axes.linalg.accumulate runs anywhere"
        )
    count, length, value = u.shape
    layout.check_like(who, "weight", weight, (count, length), u.device)
    layout.check_like(who, "start", start, (count, value, other.shape[2]), u.device)
    layout.check_like(who, "decay", decay, (count,), u.device)
    if decay is not None and start is None:
        raise ShapeError(f"{who}: decay acts on start, which is not given")
    start, decay = (None if x is None else x.float().contiguous() for x in (start, decay))
    if 0 in (*u.shape, other.shape[2]):
        empty = u.new_zeros(count, value, other.shape[2], dtype=torch.float32)
        return empty if start is None else empty + (start if decay is None else decay[:, None, None] * start)
    weight = None if weight is None else weight.float().contiguous()
    (total,) = _sum(_strided(u), None if k is None else _strided(k), weight, start, decay)
    return total
