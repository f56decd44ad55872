"""`flash.forward` on Hopper for sequences side by side: scores of one tile while the values of another are weighed.

A program owns 128 queries, each of two warpgroups 64 of them; one warp feeds both with tiles of pairs, from the last
that a query sees to the first, so that the running maximum is settled early. What is in flight at once: the product of
a tile with the queries, and of the weights of the tile before with its values; the exponentials run beside the latter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axes.kernels.attention.reach import reach
from axes.kernels.common import layout
from axes.kernels.common.bulk import head_tiles
from axes.kernels.common.gluon import (
    async_load,
    async_store,
    barrier,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.warpgroup import ROWS, arrive, left_layout, product_layout, published, retire, times

_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def place(sizes, masses, BN: gl.constexpr, GROUP: gl.constexpr, MASS: gl.constexpr):
    """Of a program: batch entry, head, first query, one more than its last tile of pairs, and how many tiles it reads:
    not the first ones, if they weigh nothing."""
    T, S, H, slots = sizes
    high, low, ends, m_b, m_t, m_h = masses
    pid = gl.program_id(0)
    line = pid // slots
    b = line // H
    h = line % H
    slot = slots - 1 - pid % slots
    begin = slot * (2 * ROWS)
    count = (gl.minimum(begin + 2 * ROWS + S - T, S) + BN - 1) // BN
    steps = count
    if MASS:
        steps -= gl.load(ends + (b * (H // GROUP) + h // GROUP) * slots + slot) * 64 // BN
    return b, h, begin, count, steps


@gluon.jit
def _masses(high, low, j, m_t, S):
    """Of the pairs j, the two parts of each; none where there is no pair."""
    here = (j >= 0) & (j < S)
    at = j.to(gl.int64) * m_t
    return gl.load(high + at, mask=here, other=float("-inf")), gl.load(low + at, mask=here, other=0.0)


@gluon.jit
def feed(q_tiles, k_tiles, v_tiles, masses, tiles, bars, sizes, GROUP: gl.constexpr, MASS: gl.constexpr):
    """One warp: the queries, then tiles of keys with their masses, relative to the first query's, and of values."""
    qs, ks, vs, lines = tiles
    high, low, ends, m_b, m_t, m_h = masses
    asked, keyed, unkeyed, valued, unvalued = bars
    T, S, H, slots = sizes
    STAGES: gl.constexpr = ks.shape[0]
    BN: gl.constexpr = ks.shape[3]
    D: gl.constexpr = ks.shape[4]
    flat: gl.constexpr = gl.BlockedLayout([BN // 32], [32], [1], [0])
    b, h, begin, count, steps = place(sizes, masses, BN, GROUP, MASS)
    g = h // GROUP
    mbarrier.expect(asked, 2 * 2 * ROWS * D)
    for w in gl.static_range(2):
        async_load(q_tiles, [b, h, begin + w * ROWS, 0], asked, qs.index(w))
    if MASS:
        high += b.to(gl.int64) * m_b + g * m_h
        low += b.to(gl.int64) * m_b + g * m_h
        base = gl.load(high + (begin + S - T).to(gl.int64) * m_t)
        near, rest = _masses(high, low, (count - 1) * BN + gl.arange(0, BN, flat), m_t, S)
    for step in range(steps):
        n = count - 1 - step
        stage = step % STAGES
        again = (step // STAGES & 1) ^ 1
        if MASS:
            line = ((near - base) + rest) * _LOG2E
            near, rest = _masses(high, low, (n - 1) * BN + gl.arange(0, BN, flat), m_t, S)  # long before they are used
        mbarrier.wait(unkeyed.index(stage), again)
        if MASS:
            lines.index(stage).store(line)
            barrier()
        mbarrier.expect(keyed.index(stage), 2 * BN * D)
        async_load(k_tiles, [b, g, n * BN, 0], keyed.index(stage), ks.index(stage))
        mbarrier.wait(unvalued.index(stage), again)
        mbarrier.expect(valued.index(stage), 2 * BN * D)
        async_load(v_tiles, [b, g, n * BN, 0], valued.index(stage), vs.index(stage))


@gluon.jit
def exact(s, n, own_high, own_low, i, high, low, m_t, S, old, BN: gl.constexpr, MASS: gl.constexpr):
    """Scores of a tile that the diagonal or the end crosses, masses relative to each query's own."""
    across: gl.constexpr = gl.SliceLayout(0, product_layout(BN))
    j = n * BN + gl.arange(0, BN, across)
    if MASS:
        at = j.to(gl.int64) * m_t
        mass_high = gl.load(high + at, mask=j < S, other=0.0)
        mass_low = gl.load(low + at, mask=j < S, other=0.0)
        s += ((mass_high[None, :] - own_high[:, None]) + (mass_low[None, :] - own_low[:, None])) * _LOG2E
    return gl.where((j[None, :] <= i[:, None] + old) & (j < S)[None, :], s, float("-inf"))


@gluon.jit
def _weigh(s, apart, most, total):
    """Weights of a tile, the new maximum and sum, and what there was shrinks by. apart: how far below the query's own
    frame, in which the maximum is, the scores are."""
    new = gl.maximum(most, gl.max(s, 1) - apart)
    safe = gl.where(new == float("-inf"), 0.0, new)  # so far no pair that the query sees
    p = gl.exp2(s - (safe + apart)[:, None])
    shrink = gl.exp2(most - safe)
    return p, new, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _attend(
    P: gl.constexpr, o_tiles, lse, masses, tiles, bars, sizes, scale, total, GROUP: gl.constexpr, MASS: gl.constexpr
):  # fmt: skip
    """One warpgroup: 64 queries."""
    qs, ks, vs, lines = tiles
    asked, keyed, unkeyed, valued, unvalued = bars
    high, low, ends, m_b, m_t, m_h = masses
    T, S, H, slots = sizes
    STAGES: gl.constexpr = ks.shape[0]
    BN: gl.constexpr = ks.shape[3]
    D: gl.constexpr = ks.shape[4]
    DTYPE: gl.constexpr = ks.dtype
    pairs: gl.constexpr = product_layout(BN)
    across: gl.constexpr = gl.SliceLayout(0, pairs)
    down: gl.constexpr = gl.SliceLayout(1, pairs)
    wide: gl.constexpr = product_layout(D)
    operand: gl.constexpr = left_layout(D)
    b, h, begin, count, steps = place(sizes, masses, BN, GROUP, MASS)
    old = S - T
    i = begin + P * ROWS + gl.arange(0, ROWS, down)
    factor = scale * _LOG2E
    own_high = gl.zeros([ROWS], gl.float32, down)
    own_low = own_high
    none = own_high
    apart = own_high
    if MASS:
        high += b.to(gl.int64) * m_b + h // GROUP * m_h
        low += b.to(gl.int64) * m_b + h // GROUP * m_h
        at = (i + old).to(gl.int64) * m_t
        own_high = gl.load(high + at, mask=i < T, other=0.0)
        own_low = gl.load(low + at, mask=i < T, other=0.0)
        base = gl.load(high + (begin + old).to(gl.int64) * m_t)
        apart = ((own_high - base) + own_low) * _LOG2E
    q = qs.index(P).reshape([ROWS, D])
    mbarrier.wait(asked, 0)
    mbarrier.wait(keyed.index(0), 0)
    s = warpgroup_mma_wait(0, [times(q, ks.index(0).reshape([BN, D]).permute((1, 0)), BN)])
    arrive(unkeyed.index(0))
    s = exact(s * factor, count - 1, own_high, own_low, i, high, low, m_t, S, old, BN, MASS)
    most = gl.full([ROWS], float("-inf"), gl.float32, down)
    weight = gl.zeros([ROWS], gl.float32, down)
    weights, most, weight, shrink = _weigh(s, none, most, weight)
    p = gl.convert_layout(weights.to(DTYPE), operand)
    out = gl.zeros([ROWS, D], gl.float32, wide)
    crossed = count - (begin + old + 1) // BN
    for step in range(1, crossed):
        stage = step % STAGES
        before = (step - 1) % STAGES
        mbarrier.wait(keyed.index(stage), step // STAGES & 1)
        s = times(q, ks.index(stage).reshape([BN, D]).permute((1, 0)), BN)
        mbarrier.wait(valued.index(before), (step - 1) // STAGES & 1)
        out = warpgroup_mma(p, vs.index(before).reshape([BN, D]), out, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        arrive(unkeyed.index(stage))
        s = exact(s * factor, count - 1 - step, own_high, own_low, i, high, low, m_t, S, old, BN, MASS)
        weights, most, weight, shrink = _weigh(s, none, most, weight)
        out = warpgroup_mma_wait(0, [out])
        arrive(unvalued.index(before))
        p = gl.convert_layout(weights.to(DTYPE), operand)
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, wide))[:, None]
    for step in range(gl.maximum(crossed, 1), steps):
        stage = step % STAGES
        before = (step - 1) % STAGES
        mbarrier.wait(keyed.index(stage), step // STAGES & 1)
        s = times(q, ks.index(stage).reshape([BN, D]).permute((1, 0)), BN)
        mbarrier.wait(valued.index(before), (step - 1) // STAGES & 1)
        out = warpgroup_mma(p, vs.index(before).reshape([BN, D]), out, is_async=True)
        s = warpgroup_mma_wait(1, [s]) * factor
        if MASS:
            s += lines.index(stage).load(across)[None, :]
        arrive(unkeyed.index(stage))
        weights, most, weight, shrink = _weigh(s, apart, most, weight)
        out = warpgroup_mma_wait(0, [out])
        arrive(unvalued.index(before))
        p = gl.convert_layout(weights.to(DTYPE), operand)
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, wide))[:, None]
    last = (steps - 1) % STAGES
    mbarrier.wait(valued.index(last), (steps - 1) // STAGES & 1)
    out = warpgroup_mma(p, vs.index(last).reshape([BN, D]), out, is_async=True)
    line = h.to(gl.int64) * total + b.to(gl.int64) * T + i
    gl.store(lse + line, most + gl.log2(weight), mask=i < T)
    inverse = gl.convert_layout(1.0 / weight, gl.SliceLayout(1, wide))
    out = warpgroup_mma_wait(0, [out]) * inverse[:, None]
    q.store(out.to(DTYPE))
    published()
    async_store(o_tiles, [b, h, begin + P * ROWS, 0], qs.index(P))
    store_wait(0)


@Kernel
@gluon.jit(do_not_specialize=["T", "S", "H", "slots", "total", "m_b", "m_t", "m_h"])
def forward(
    q_tiles, k_tiles, v_tiles, o_tiles, lse, high, low, ends, scale, T, S, H, slots, total, m_b, m_t, m_h,
    GROUP: gl.constexpr, STAGES: gl.constexpr, FEED: gl.constexpr, ATTEND: gl.constexpr, MASS: gl.constexpr,
):  # fmt: skip
    """o, and the log2 of the weights' sum relative to the query's own mass."""
    BN: gl.constexpr = k_tiles.block_shape[2]
    D: gl.constexpr = k_tiles.block_shape[3]
    DTYPE: gl.constexpr = k_tiles.dtype
    qs = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], q_tiles.layout)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], k_tiles.layout)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], v_tiles.layout)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keyed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    unkeyed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    valued = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    unvalued = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(asked, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keyed.index(stage), count=1)
        mbarrier.init(unkeyed.index(stage), count=2)
        mbarrier.init(valued.index(stage), count=1)
        mbarrier.init(unvalued.index(stage), count=2)
    published()
    tiles = (qs, ks, vs, lines)
    bars = (asked, keyed, unkeyed, valued, unvalued)
    masses = (high, low, ends, m_b, m_t, m_h)
    sizes = (T, S, H, slots)
    gl.warp_specialize(
        [
            (_attend, (0, o_tiles, lse, masses, tiles, bars, sizes, scale, total, GROUP, MASS)),
            (_attend, (1, o_tiles, lse, masses, tiles, bars, sizes, scale, total, GROUP, MASS)),
            (feed, (q_tiles, k_tiles, v_tiles, masses, tiles, bars, sizes, GROUP, MASS)),
        ],
        [4, 1],
        [ATTEND, FEED],
    )
    retire(asked)
    retire(keyed)
    retire(unkeyed)
    retire(valued)
    retire(unvalued)


# ---- launches ------------------------------------------------------------------------------------------------------

# by width: pairs of a tile, stages
_TILES = {64: (128, 3), 128: (128, 2)}


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` may be called on a Hopper: 16 bit, equal widths of 64 or 128, strides that bulk copies take."""
    d = q.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16) or d not in (64, 128) or v.shape[-1] != d or 0 in q.shape:
        return False
    return not any(n % 8 or not n for x in (q, k, v) for n in x.stride()[:3])


def attend(
    q: Tensor, k: Tensor, v: Tensor, mass: tuple[Tensor, Tensor] | None, o: Tensor, lse: Tensor, scale: float
) -> None:
    """o (B, T, H, D) and lse (H, B T) for tensors that `fits`; mass: high and low (B, S, G), or none."""
    (b, t, h, d), s = q.shape, k.shape[1]
    slots = cdiv(t, 128)
    pairs, stages = _TILES[d]
    high, low = (lse, lse) if mass is None else mass
    ends = lse if mass is None else reach(q, k, high, scale)[0]
    with layout.on_device(q):
        forward[(b * h * slots,)](
            head_tiles(q, 64), head_tiles(k, pairs), head_tiles(v, pairs), head_tiles(o, 64), lse, high, low, ends,
            scale, t, s, h, slots, b * t, *((0, 0, 0) if mass is None else high.stride()), GROUP=h // k.shape[2],
            STAGES=stages, FEED=24, ATTEND=240, MASS=mass is not None, num_warps=4, maxnreg=168,
        )  # fmt: skip
