"""Which tiles of scores can weigh anything: where gates have closed most cannot, and kernels leave those out.

A weight is at most 2^(2 a - b): a the largest |score|, which is no more than scale max|q| max|k|, and b how far the
pair's mass lies below the query's own, both in units of log 2; for a query's weights sum to no less than that of its
own pair. Below 2^-149 it is zero in float32, and so is what it adds to anything: the bits are those of all tiles. Only
values that are no numbers would show, which zero times them is not either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv, power_of_2

_LOG2E = tl.constexpr(1.4426950408889634)
_NOTHING = tl.constexpr(160.0)  # 2^-160, with room for the rounding of scores
_TILE, _BLOCK = 64, 128


@triton.jit
def _longest(x, rows, end, by_row, D: tl.constexpr, BD: tl.constexpr):
    """The largest |x|^2 of so many rows, infinite if one is no number."""
    columns = tl.arange(0, BD)
    here = (rows < end)[:, None] & (columns < D)[None, :]
    found = tl.load(x + rows.to(tl.int64)[:, None] * by_row + columns[None, :], mask=here, other=0.0).to(tl.float32)
    squares = tl.sum(found * found, 1)
    return tl.max(tl.where(squares == squares, squares, float("inf")), 0)


@Kernel
@triton.jit(do_not_specialize=["T", "S", "G", "N", "m_b", "m_t", "m_h"])
def _measure(
    q, k, high, tiles, T, S, G, N, q_b, q_t, q_h, k_b, k_t, k_h, m_b, m_t, m_h,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """tiles (B, G, 4, N): of TILE queries the least own mass and the largest |q|^2, of TILE pairs the largest mass and
    |k|^2. Where the ends of a line differ too little for any tile to go, vectors are not read."""
    pid = tl.program_id(0)
    n, of = pid % N, (pid // N).to(tl.int64)
    b, g = of // G, of % G
    to = tiles + of * (4 * N) + n
    line = high + b * m_b + g * m_h
    rows = n * TILE + tl.arange(0, TILE)
    own = tl.load(line + (rows + (S - T)).to(tl.int64) * m_t, mask=rows < T, other=float("inf"))
    mass = tl.load(line + rows.to(tl.int64) * m_t, mask=rows < S, other=float("-inf"))
    tl.store(to, tl.min(own, 0))
    tl.store(to + 2 * N, tl.max(mass, 0))
    apart = tl.load(line + (S - 1).to(tl.int64) * m_t) - tl.load(line)
    from_k = tl.where(apart * _LOG2E > _NOTHING, 0.0, float("inf"))
    from_q = from_k
    if apart * _LOG2E > _NOTHING:
        from_k = _longest(k + b * k_b + g * k_h, rows, S, k_t, D, BD)
        for member in tl.static_range(GROUP):
            at = q + b * q_b + (g * GROUP + member) * q_h
            from_q = tl.maximum(from_q, _longest(at, rows, T, q_t, D, BD))
    tl.store(to + N, from_q)
    tl.store(to + 3 * N, from_k)


@Kernel
@triton.jit(do_not_specialize=["N", "LATE", "EARLY"])
def _reach(
    tiles, first, last, scale, N, LATE, EARLY, BLOCKS: tl.constexpr, TILES: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """first (B, G, LATE): of a block of queries, WIDE tiles, the first tile of pairs that may weigh anything;
    last (B, G, EARLY): of a block of pairs one more than the last tile of queries."""
    pid, parts = tl.program_id(0), tl.cdiv(EARLY, BLOCKS)
    c, line = pid % parts * BLOCKS + tl.arange(0, BLOCKS), (pid // parts).to(tl.int64)
    tiles += line * (4 * N)
    longest_q, longest_k = tl.zeros([TILES], tl.float32), tl.zeros([TILES], tl.float32)
    for at in range(0, N, TILES):
        n = at + tl.arange(0, TILES)
        longest_q = tl.maximum(longest_q, tl.load(tiles + N + n, mask=n < N, other=0.0))
        longest_k = tl.maximum(longest_k, tl.load(tiles + 3 * N + n, mask=n < N, other=0.0))
    score = tl.sqrt(tl.max(longest_q, 0)) * tl.sqrt(tl.max(longest_k, 0)) * (1.01 * _LOG2E * tl.abs(scale))
    nothing = _NOTHING + 2.0 * score
    inner = tl.arange(0, WIDE)
    part = c[:, None] * WIDE + inner[None, :]
    own = tl.min(tl.load(tiles + part, mask=part < N, other=float("inf")), 1)
    mass = tl.max(tl.load(tiles + 2 * N + part, mask=part < N, other=float("-inf")), 1)
    found, ended = tl.zeros([BLOCKS], tl.int32) + N, tl.zeros([BLOCKS], tl.int32)
    for at in range(0, N, TILES):
        n = at + tl.arange(0, TILES)
        mass_n = tl.load(tiles + 2 * N + n, mask=n < N, other=float("-inf"))
        own_n = tl.load(tiles + n, mask=n < N, other=float("inf"))
        gone = (own[:, None] - mass_n[None, :]) * _LOG2E > nothing + tl.abs(own)[:, None] * 1e-6
        found = tl.minimum(found, tl.min(tl.where(gone | (n >= N)[None, :], N, n[None, :]), 1))
        gone = (own_n[None, :] - mass[:, None]) * _LOG2E > nothing + tl.abs(own_n)[None, :] * 1e-6
        gone |= (own_n == float("inf"))[None, :]  # no query
        ended = tl.maximum(ended, tl.max(tl.where(gone, 0, n[None, :] + 1), 1))
    tl.store(first + line * LATE + c, found, mask=c < LATE)
    tl.store(last + line * EARLY + c, ended, mask=c < EARLY)


def reach(q: Tensor, k: Tensor, high: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """In tiles of 64: of every 128 queries the first tile of pairs that may weigh anything, of every 128 pairs one more
    than the last tile of queries in which they may: (B, G, .) each.

    q (B, T, H, K), k (B, S, G, K), high (B, S, G) masses in float32. Tiles that the diagonal crosses always may.
    """
    (b, t, h, d), (s, g) = q.shape, k.shape[1:3]
    n, late, early = cdiv(s, _TILE), cdiv(t, _BLOCK), cdiv(s, _BLOCK)
    tiles = high.new_empty(b, g, 4, n)
    first, last = (torch.empty(b, g, x, dtype=torch.int32, device=q.device) for x in (late, early))
    with layout.on_device(q):
        _measure[(n * g * b,)](
            q, k, high, tiles, t, s, g, n, *q.stride()[:3], *k.stride()[:3], *high.stride(), GROUP=h // g, D=d,
            BD=power_of_2(d), TILE=_TILE, num_warps=4,
        )  # fmt: skip
        _reach[(cdiv(early, 32) * g * b,)](
            tiles, first, last, scale, n, late, early, BLOCKS=32, TILES=64, WIDE=_BLOCK // _TILE, num_warps=4
        )
    return first, last
