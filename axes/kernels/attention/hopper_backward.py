"""`flash.queries` and `flash.pairs` on Hopper for sequences side by side.

A tile of scores is made twice, once for each owner: seven products in the place of five, and every gradient has one
writer and one order of sums. Written and added by blocks of pairs, the parts of dq would be T / 128 times the bytes of
dq, twice. In either kernel two warpgroups own 64 rows each and one warp feeds both. Rows are of what is owned (scores
are turned in `pairs`): weights and dS are then left operands in the registers where they were made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from axes.kernels.attention.hopper import exact, feed, place
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


# ---- a block of queries --------------------------------------------------------------------------------------------


@gluon.jit
def _feed_gather(q_tiles, k_tiles, v_tiles, do_tiles, masses, tiles, dos, bars, heard, sizes,
                 GROUP: gl.constexpr, MASS: gl.constexpr):  # fmt: skip
    """One warp: do, then what a forward is fed with."""
    BN: gl.constexpr = tiles[1].shape[3]
    D: gl.constexpr = tiles[1].shape[4]
    b, h, begin, count, steps = place(sizes, masses, BN, GROUP, MASS)
    mbarrier.expect(heard, 2 * 2 * ROWS * D)
    for w in gl.static_range(2):
        async_load(do_tiles, [b, h, begin + w * ROWS, 0], heard, dos.index(w))
    feed(q_tiles, k_tiles, v_tiles, masses, tiles, bars, sizes, GROUP, MASS)


@gluon.jit
def _pass(
    step, left, found, summed, q, outer, norm, shifted, dot, own, i, n, tiles, bars, high, low, m_t, S, old, factor,
    MASS: gl.constexpr, WHOLE: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """dS of a tile of pairs as a left operand; dq takes the tile before, beside the exponentials of this one."""
    qs, ks, vs, lines = tiles
    asked, keyed, unkeyed, valued, unvalued = bars
    own_high, own_low = own
    STAGES: gl.constexpr = ks.shape[0]
    BN: gl.constexpr = ks.shape[3]
    D: gl.constexpr = ks.shape[4]
    UNDER: gl.constexpr = 0 if FIRST else 1  # products of dq in flight
    stage = step % STAGES
    before = (step - 1) % STAGES
    mbarrier.wait(keyed.index(stage), step // STAGES & 1)
    s = times(q, ks.index(stage).reshape([BN, D]).permute((1, 0)), BN)
    mbarrier.wait(valued.index(stage), step // STAGES & 1)
    dp = times(outer, vs.index(stage).reshape([BN, D]).permute((1, 0)), BN)
    if UNDER:
        found = warpgroup_mma(left, ks.index(before).reshape([BN, D]), found, is_async=True)
    s = warpgroup_mma_wait(1 + UNDER, [s]) * factor
    if not WHOLE:
        s = exact(s, n, own_high, own_low, i, high, low, m_t, S, old, BN, MASS) - norm[:, None]
    elif MASS:
        s += lines.index(stage).load(gl.SliceLayout(0, product_layout(BN)))[None, :] - shifted[:, None]
    else:
        s -= norm[:, None]
    p = gl.exp2(s)
    dp = warpgroup_mma_wait(UNDER, [dp])
    arrive(unvalued.index(stage))
    ds = p * (dp - dot[:, None])
    summed += gl.sum(ds, 1)
    if UNDER:
        found = warpgroup_mma_wait(0, [found])
        arrive(unkeyed.index(before))
    return gl.convert_layout(ds.to(ks.dtype), left_layout(D)), found, summed


@gluon.jit
def _gather(
    P: gl.constexpr, o, dq_tiles, lse, dots, sums, masses, tiles, dos, bars, heard, sizes, scale, total,
    GROUP: gl.constexpr, MASS: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dq, D and the sums of dS of 64 queries. HELD: of do, or of do and q, in registers."""
    qs, ks, vs, lines = tiles
    asked, keyed, unkeyed, valued, unvalued = bars
    high, low, ends, m_b, m_t, m_h = masses
    T, S, H, slots = sizes
    STAGES: gl.constexpr = ks.shape[0]
    BN: gl.constexpr = ks.shape[3]
    D: gl.constexpr = ks.shape[4]
    DTYPE: gl.constexpr = ks.dtype
    down: gl.constexpr = gl.SliceLayout(1, product_layout(BN))
    wide: gl.constexpr = product_layout(D)
    b, h, begin, count, steps = place(sizes, masses, BN, GROUP, MASS)
    old = S - T
    first = begin + P * ROWS
    i = first + gl.arange(0, ROWS, down)
    line = h.to(gl.int64) * total + b.to(gl.int64) * T
    norm = gl.load(lse + line + i, mask=i < T, other=float("inf"))
    own_high = gl.zeros([ROWS], gl.float32, down)
    own_low = own_high
    shifted = norm
    if MASS:
        high += b.to(gl.int64) * m_b + h // GROUP * m_h
        low += b.to(gl.int64) * m_b + h // GROUP * m_h
        at = (i + old).to(gl.int64) * m_t
        own_high = gl.load(high + at, mask=i < T, other=0.0)
        own_low = gl.load(low + at, mask=i < T, other=0.0)
        base = gl.load(high + (begin + old).to(gl.int64) * m_t)
        shifted = norm + ((own_high - base) + own_low) * _LOG2E
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    there = ((b.to(gl.int64) * T + row) * H + h)[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, wide))[None, :]
    out = gl.load(o + there, mask=(row < T)[:, None], other=0.0).to(gl.float32)
    outer = dos.index(P).reshape([ROWS, D])
    mbarrier.wait(heard, 0)
    dot = gl.convert_layout(gl.sum(out * outer.load(wide).to(gl.float32), 1), down)
    gl.store(dots + line + i, dot, mask=i < T)
    q = qs.index(P).reshape([ROWS, D])
    factor = scale * _LOG2E
    found = gl.zeros([ROWS, D], gl.float32, wide)
    summed = gl.zeros([ROWS], gl.float32, down)
    left = gl.zeros([ROWS, BN], DTYPE, left_layout(D))
    own = (own_high, own_low)
    crossed = gl.maximum(count - (begin + old + 1) // BN, 1)
    mbarrier.wait(asked, 0)
    ours = q
    if HELD >= 1:
        outer = outer.load(left_layout(BN))
    if HELD == 2:
        q = q.load(left_layout(BN))
    left, found, summed = _pass(
        0, left, found, summed, q, outer, norm, shifted, dot, own, i, count - 1, tiles, bars, high, low, m_t, S, old,
        factor, MASS, False, True,
    )  # fmt: skip
    for step in range(1, crossed):
        left, found, summed = _pass(
            step, left, found, summed, q, outer, norm, shifted, dot, own, i, count - 1 - step, tiles, bars, high, low,
            m_t, S, old, factor, MASS, False, False,
        )  # fmt: skip
    for step in range(crossed, steps):
        left, found, summed = _pass(
            step, left, found, summed, q, outer, norm, shifted, dot, own, i, count - 1 - step, tiles, bars, high, low,
            m_t, S, old, factor, MASS, True, False,
        )  # fmt: skip
    found = warpgroup_mma(left, ks.index((steps - 1) % STAGES).reshape([BN, D]), found, is_async=True)
    found = warpgroup_mma_wait(0, [found])
    if MASS:
        gl.store(sums + line + i, summed, mask=i < T)
    ours.store((found * scale).to(DTYPE))
    published()
    async_store(dq_tiles, [b, h, first, 0], qs.index(P))
    store_wait(0)


@Kernel
@gluon.jit(do_not_specialize=["T", "S", "H", "slots", "total", "m_b", "m_t", "m_h"])
def queries(
    q_tiles, k_tiles, v_tiles, do_tiles, dq_tiles, o, lse, dots, sums, high, low, ends, scale,
    T, S, H, slots, total, m_b, m_t, m_h,
    GROUP: gl.constexpr, STAGES: gl.constexpr, FEED: gl.constexpr, MULTIPLY: gl.constexpr, MASS: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    """dq, D and the sums of dS over pairs."""
    BN: gl.constexpr = k_tiles.block_shape[2]
    D: gl.constexpr = k_tiles.block_shape[3]
    DTYPE: gl.constexpr = k_tiles.dtype
    qs = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], q_tiles.layout)
    dos = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], do_tiles.layout)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], k_tiles.layout)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], v_tiles.layout)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    heard = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keyed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    unkeyed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    valued = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    unvalued = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(heard, count=1)
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
            (_gather, (0, o, dq_tiles, lse, dots, sums, masses, tiles, dos, bars, heard, sizes, scale, total, GROUP,
                       MASS, HELD)),
            (_gather, (1, o, dq_tiles, lse, dots, sums, masses, tiles, dos, bars, heard, sizes, scale, total, GROUP,
                       MASS, HELD)),
            (_feed_gather, (q_tiles, k_tiles, v_tiles, do_tiles, masses, tiles, dos, bars, heard, sizes, GROUP, MASS)),
        ],
        [4, 1],
        [MULTIPLY, FEED],
    )  # fmt: skip
    retire(heard)
    retire(asked)
    retire(keyed)
    retire(unkeyed)
    retire(valued)
    retire(unvalued)


# ---- a block of pairs ----------------------------------------------------------------------------------------------


@gluon.jit
def _block(sizes, masses, BM: gl.constexpr, GROUP: gl.constexpr, MASS: gl.constexpr):
    """Of a program: batch entry, head of pairs, first pair, and its tiles of queries: the first, the first that sees
    every pair, one more than the last, without those in which no pair weighs anything. Blocks with most come first."""
    T, S, H, slots = sizes
    high, low, ends, m_b, m_t, m_h = masses
    pid = gl.program_id(0)
    line = pid // slots
    slot = pid % slots
    begin = slot * (2 * ROWS)
    old = S - T
    count = (T + BM - 1) // BM
    first = gl.maximum(begin - old, 0) // BM
    whole = gl.minimum((gl.maximum(begin + 2 * ROWS - 1 - old, 0) + BM - 1) // BM, count)
    if MASS:
        last = (gl.load(ends + line * slots + slot) * 64 + BM - 1) // BM
        count = gl.minimum(count, gl.maximum(last, gl.maximum(whole, first + 1)))
    return line // (H // GROUP), line % (H // GROUP), begin, first, whole, count


@gluon.jit
def _base(high, begin, m_t, S, flat: gl.constexpr):
    """The largest mass of a block of pairs, 0 where none has any: what the block's masses are relative to."""
    j = begin + gl.arange(0, 2 * ROWS, flat)
    base = gl.max(gl.load(high + j.to(gl.int64) * m_t, mask=j < S, other=float("-inf")), 0)
    return gl.where(base == float("-inf"), 0.0, base)


@gluon.jit
def _own(high, low, i, m_t, T, S):
    """The two parts of queries' own masses, zero where there is no query."""
    at = (i + (S - T)).to(gl.int64) * m_t
    return gl.load(high + at, mask=i < T, other=0.0), gl.load(low + at, mask=i < T, other=0.0)


@gluon.jit
def _feed_collect(q_tiles, k_tiles, v_tiles, do_tiles, lse, dots, masses, tiles, bars, sizes, total,
                  GROUP: gl.constexpr, MASS: gl.constexpr):  # fmt: skip
    """One warp: the pairs, then tiles of queries and do with their numbers: -log2 of the weights' sum, in the frame of
    the block's masses where all pairs are seen, D, and the queries' own masses."""
    qs, dos, ks, vs, numbers = tiles
    high, low, ends, m_b, m_t, m_h = masses
    stored, come, gone = bars
    T, S, H, slots = sizes
    STAGES: gl.constexpr = qs.shape[0]
    BM: gl.constexpr = qs.shape[3]
    D: gl.constexpr = qs.shape[4]
    flat: gl.constexpr = gl.BlockedLayout([BM // 32], [32], [1], [0])
    b, g, begin, first, whole, count = _block(sizes, masses, BM, GROUP, MASS)
    mbarrier.expect(stored, 4 * 2 * ROWS * D)
    for w in gl.static_range(2):
        async_load(k_tiles, [b, g, begin + w * ROWS, 0], stored, ks.index(w))
        async_load(v_tiles, [b, g, begin + w * ROWS, 0], stored, vs.index(w))
    if MASS:
        high += b.to(gl.int64) * m_b + g * m_h
        low += b.to(gl.int64) * m_b + g * m_h
        base = _base(high, begin, m_t, S, gl.BlockedLayout([2 * ROWS // 32], [32], [1], [0]))
    step = 0
    for member in range(GROUP):
        h = g * GROUP + member
        line = h.to(gl.int64) * total + b.to(gl.int64) * T
        i = first * BM + gl.arange(0, BM, flat)
        norm_next = gl.load(lse + line + i, mask=i < T, other=float("inf"))
        dot_next = gl.load(dots + line + i, mask=i < T, other=0.0)
        if MASS:
            high_next, low_next = _own(high, low, i, m_t, T, S)
        for n in range(first, count):
            stage = step % STAGES
            norm = -norm_next
            dot = dot_next
            i = (n + 1) * BM + gl.arange(0, BM, flat)  # what comes from memory is asked for one tile ahead
            norm_next = gl.load(lse + line + i, mask=i < T, other=float("inf"))
            dot_next = gl.load(dots + line + i, mask=i < T, other=0.0)
            if MASS:
                own_high = high_next
                own_low = low_next
                if n >= whole:
                    norm += ((base - own_high) - own_low) * _LOG2E
                high_next, low_next = _own(high, low, i, m_t, T, S)
            mbarrier.wait(gone.index(stage), (step // STAGES & 1) ^ 1)
            numbers.index(4 * stage + 0).store(norm)
            numbers.index(4 * stage + 1).store(dot)
            if MASS:
                numbers.index(4 * stage + 2).store(own_high)
                numbers.index(4 * stage + 3).store(own_low)
            barrier()
            mbarrier.expect(come.index(stage), 2 * 2 * BM * D)
            async_load(q_tiles, [b, h, n * BM, 0], come.index(stage), qs.index(stage))
            async_load(do_tiles, [b, h, n * BM, 0], come.index(stage), dos.index(stage))
            step += 1


@gluon.jit
def _add(
    step, n, weights, left, dk, dv, dm, key, value, relative, mass, j, tiles, bars, old, factor,
    MASS: gl.constexpr, WHOLE: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """What a tile of queries adds to the gradients of 64 pairs. AHEAD: of the tile before, beside the exponentials of
    this one; at first zeros times this one."""
    qs, dos, ks, vs, numbers = tiles
    stored, come, gone = bars
    mass_high, mass_low = mass
    STAGES: gl.constexpr = qs.shape[0]
    BM: gl.constexpr = qs.shape[3]
    D: gl.constexpr = qs.shape[4]
    DTYPE: gl.constexpr = qs.dtype
    across: gl.constexpr = gl.SliceLayout(0, product_layout(BM))
    stage = step % STAGES
    before = gl.maximum(step - 1, 0) % STAGES
    query = qs.index(stage).reshape([BM, D])
    outer = dos.index(stage).reshape([BM, D])
    mbarrier.wait(come.index(stage), step // STAGES & 1)
    s = times(key, query.permute((1, 0)), BM)
    dp = times(value, outer.permute((1, 0)), BM)
    UNDER: gl.constexpr = 2 if AHEAD else 0
    if AHEAD:
        dv = warpgroup_mma(weights, dos.index(before).reshape([BM, D]), dv, is_async=True)
        dk = warpgroup_mma(left, qs.index(before).reshape([BM, D]), dk, is_async=True)
    s = warpgroup_mma_wait(1 + UNDER, [s]) * factor
    if MASS:
        if WHOLE:
            s += relative[:, None]
        else:
            own_high = numbers.index(4 * stage + 2).load(across)
            own_low = numbers.index(4 * stage + 3).load(across)
            s += ((mass_high[:, None] - own_high[None, :]) + (mass_low[:, None] - own_low[None, :])) * _LOG2E
    s += numbers.index(4 * stage).load(across)[None, :]
    if not WHOLE:
        i = n * BM + gl.arange(0, BM, across)
        s = gl.where(j[:, None] <= i[None, :] + old, s, float("-inf"))
    p = gl.exp2(s)
    if AHEAD:
        dp = warpgroup_mma_wait(2, [dp])
    else:
        dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), left_layout(D)), outer, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
    ds = p * (dp - numbers.index(4 * stage + 1).load(across)[None, :])
    if MASS:
        dm += gl.sum(ds, 1)
    if AHEAD:
        dv, dk = warpgroup_mma_wait(0, [dv, dk])
        barrier()
        mbarrier.arrive(gone.index(before), count=1, pred=step > 0)
        left = gl.convert_layout(ds.to(DTYPE), left_layout(D))
        weights = gl.convert_layout(p.to(DTYPE), left_layout(D))
    else:
        dk = warpgroup_mma(gl.convert_layout(ds.to(DTYPE), left_layout(D)), query, dk, is_async=True)
        dv, dk = warpgroup_mma_wait(0, [dv, dk])
        arrive(gone.index(stage))
    return weights, left, dk, dv, dm


@gluon.jit
def _collect(
    P: gl.constexpr, dk_tiles, dv_tiles, dm, sums, masses, tiles, bars, sizes, scale, total,
    GROUP: gl.constexpr, MASS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One warpgroup: gradients of 64 pairs."""
    qs, dos, ks, vs, numbers = tiles
    high, low, ends, m_b, m_t, m_h = masses
    stored, come, gone = bars
    T, S, H, slots = sizes
    BM: gl.constexpr = qs.shape[3]
    D: gl.constexpr = qs.shape[4]
    DTYPE: gl.constexpr = qs.dtype
    down: gl.constexpr = gl.SliceLayout(1, product_layout(BM))
    wide: gl.constexpr = product_layout(D)
    b, g, begin, first, whole, count = _block(sizes, masses, BM, GROUP, MASS)
    old = S - T
    factor = scale * _LOG2E
    j = begin + P * ROWS + gl.arange(0, ROWS, down)
    mass_high = gl.zeros([ROWS], gl.float32, down)
    mass_low = mass_high
    relative = mass_high
    if MASS:
        high += b.to(gl.int64) * m_b + g * m_h
        low += b.to(gl.int64) * m_b + g * m_h
        base = _base(high, begin, m_t, S, gl.BlockedLayout([1], [32], [4], [0]))
        at = j.to(gl.int64) * m_t
        mass_high = gl.load(high + at, mask=j < S, other=float("-inf"))
        mass_low = gl.load(low + at, mask=j < S, other=0.0)
        relative = ((mass_high - base) + mass_low) * _LOG2E
    mass = (mass_high, mass_low)
    key = ks.index(P).reshape([ROWS, D])
    value = vs.index(P).reshape([ROWS, D])
    dkey = gl.zeros([ROWS, D], gl.float32, wide)
    dvalue = gl.zeros([ROWS, D], gl.float32, wide)
    dmass = gl.zeros([ROWS], gl.float32, down)
    left = gl.zeros([ROWS, BM], DTYPE, left_layout(D))
    weights = left
    mbarrier.wait(stored, 0)
    step = 0
    for member in range(GROUP):
        line = (g * GROUP + member).to(gl.int64) * total + b.to(gl.int64) * T
        if MASS:
            dmass -= gl.load(sums + line + (j - old), mask=(j >= old) & (j < S), other=0.0)
        for n in range(first, whole):
            weights, left, dkey, dvalue, dmass = _add(
                step, n, weights, left, dkey, dvalue, dmass, key, value, relative, mass, j, tiles, bars, old, factor,
                MASS, False, AHEAD,
            )  # fmt: skip
            step += 1
        for n in range(whole, count):
            weights, left, dkey, dvalue, dmass = _add(
                step, n, weights, left, dkey, dvalue, dmass, key, value, relative, mass, j, tiles, bars, old, factor,
                MASS, True, AHEAD,
            )  # fmt: skip
            step += 1
    if AHEAD:
        last = (step - 1) % qs.shape[0]
        dvalue = warpgroup_mma(weights, dos.index(last).reshape([BM, D]), dvalue, is_async=True)
        dkey = warpgroup_mma(left, qs.index(last).reshape([BM, D]), dkey, is_async=True)
        dvalue, dkey = warpgroup_mma_wait(0, [dvalue, dkey])
    if MASS:
        gl.store(dm + (b.to(gl.int64) * S + j) * (H // GROUP) + g, dmass, mask=j < S)
    key.store((dkey * scale).to(DTYPE))
    value.store(dvalue.to(DTYPE))
    published()
    async_store(dk_tiles, [b, g, begin + P * ROWS, 0], ks.index(P))
    async_store(dv_tiles, [b, g, begin + P * ROWS, 0], vs.index(P))
    store_wait(0)


@Kernel
@gluon.jit(do_not_specialize=["T", "S", "H", "slots", "total", "m_b", "m_t", "m_h"])
def pairs(
    q_tiles, k_tiles, v_tiles, do_tiles, dk_tiles, dv_tiles, dm, lse, dots, sums, high, low, ends, scale,
    T, S, H, slots, total, m_b, m_t, m_h,
    GROUP: gl.constexpr, STAGES: gl.constexpr, FEED: gl.constexpr, MULTIPLY: gl.constexpr, MASS: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """dk, dv and dm."""
    BM: gl.constexpr = q_tiles.block_shape[2]
    D: gl.constexpr = q_tiles.block_shape[3]
    DTYPE: gl.constexpr = q_tiles.dtype
    qs = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], q_tiles.layout)
    dos = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], do_tiles.layout)
    ks = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], k_tiles.layout)
    vs = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], v_tiles.layout)
    numbers = gl.allocate_shared_memory(gl.float32, [4 * STAGES, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gone = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(stored, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(come.index(stage), count=1)
        mbarrier.init(gone.index(stage), count=2)
    published()
    tiles = (qs, dos, ks, vs, numbers)
    bars = (stored, come, gone)
    masses = (high, low, ends, m_b, m_t, m_h)
    sizes = (T, S, H, slots)
    gl.warp_specialize(
        [
            (_collect, (0, dk_tiles, dv_tiles, dm, sums, masses, tiles, bars, sizes, scale, total, GROUP, MASS,
                        AHEAD)),
            (_collect, (1, dk_tiles, dv_tiles, dm, sums, masses, tiles, bars, sizes, scale, total, GROUP, MASS,
                        AHEAD)),
            (_feed_collect, (q_tiles, k_tiles, v_tiles, do_tiles, lse, dots, masses, tiles, bars, sizes, total, GROUP,
                             MASS)),
        ],
        [4, 1],
        [MULTIPLY, FEED],
    )  # fmt: skip
    retire(stored)
    retire(come)
    retire(gone)


# ---- launches ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Queries:
    pairs: int  # of a tile
    stages: int
    held: int


@dataclass(frozen=True)
class _Pairs:
    queries: int  # of a tile
    stages: int
    ahead: bool


# by width
_QUERIES = {64: _Queries(64, 4, 2), 128: _Queries(64, 4, 1)}
_PAIRS = {64: _Pairs(64, 6, True), 128: _Pairs(64, 3, False)}


def attend(
    q: Tensor, k: Tensor, v: Tensor, mass: tuple[Tensor, Tensor] | None, o: Tensor, lse: Tensor, do: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and dm (float32; anything where there is no mass) for tensors that the forward `fits`; o, do
    contiguous."""
    (b, t, h, d), (s, g) = q.shape, k.shape[1:3]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dots = torch.empty_like(lse)
    sums, dm = (dots, dots) if mass is None else (torch.empty_like(lse), lse.new_empty(b, s, g))
    high, low = (lse, lse) if mass is None else mass
    strides = (0, 0, 0) if mass is None else high.stride()
    first, last = (lse, lse) if mass is None else reach(q, k, high, scale)
    by_queries, by_pairs = _QUERIES[d], _PAIRS[d]
    options = {"GROUP": h // g, "FEED": 24, "MULTIPLY": 240, "MASS": mass is not None, "num_warps": 4, "maxnreg": 168}
    with layout.on_device(q):
        queries[(b * h * cdiv(t, 128),)](
            head_tiles(q, 64), head_tiles(k, by_queries.pairs), head_tiles(v, by_queries.pairs), head_tiles(do, 64),
            head_tiles(dq, 64), o, lse, dots, sums, high, low, first, scale, t, s, h, cdiv(t, 128), b * t, *strides,
            STAGES=by_queries.stages, HELD=by_queries.held, **options,
        )  # fmt: skip
        pairs[(b * g * cdiv(s, 128),)](
            head_tiles(q, by_pairs.queries), head_tiles(k, 64), head_tiles(v, 64), head_tiles(do, by_pairs.queries),
            head_tiles(dk, 64), head_tiles(dv, 64), dm, lse, dots, sums, high, low, last, scale, t, s, h, cdiv(s, 128),
            b * t, *strides, STAGES=by_pairs.stages, AHEAD=by_pairs.ahead, **options,
        )  # fmt: skip
    return dq, dk, dv, dm
