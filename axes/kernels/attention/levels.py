"""Softmax attention over keys that are read at the levels of a tree of blocks (`tree`), and inside the own block.

Level by level it is the attention of `flash`: other queries, other keys, the same running sums. A program owns R blocks
next to each other, of queries or of pairs; those that are siblings inside a tile meet at level 0, and scores inside
a block are read as `blocks` left them. Rounded up to tiles there may be blocks without a token, which weigh nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.attention.flash import absorb, masses, put, tile
from axes.kernels.common.launch import Kernel

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _distances(high, low, own_high, own_low, j, m_t, end):
    """Masses of pairs j relative to every query's own, (queries, pairs), in units of log 2."""
    mass_high, mass_low = masses(high, low, j, m_t, end, float("-inf"))
    return ((mass_high[None, :] - own_high[:, None]) + (mass_low[None, :] - own_low[:, None])) * _LOG2E


@Kernel
@triton.jit(do_not_specialize=["T", "N", "levels"])
def forward(
    carried, scores, v, high, low, o, lse, scale, T, N, H, levels,
    V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, R: tl.constexpr, MASS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o, and the log2 of the weights' sum relative to the query's own mass. Tiles with most pairs come first."""
    count = N // R
    pid = tl.program_id(0)
    line = (pid // count).to(tl.int64)
    size = (tl.num_programs(0) // count).to(tl.int64) * N * C * BD
    own = (count - 1 - pid % count) * R
    batch, head = line // H, line % H
    v += (batch * T * H + head) * V
    o += (batch * T * H + head) * V
    carried += line * N * C * BD
    i, c, features, values = own * C + tl.arange(0, R * C), tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BV)
    base, own_high, own_low = 0.0, i.to(tl.float32), i.to(tl.float32)
    if MASS:
        high += batch * T * H + head
        low += batch * T * H + head
        own_high, own_low = masses(high, low, i, H, T, 0.0)
        base = tl.load(high + own.to(tl.int64) * C * H, mask=own * C < T, other=0.0)
    most = tl.full([R * C], float("-inf"), tl.float32)
    weight = tl.zeros([R * C], tl.float32)
    out = tl.zeros([R * C, BV], tl.float32)
    for level in range(R // 2, levels):
        here = carried + level * size
        query = tl.load(here + i[:, None] * BD + features[None, :])
        piece = own >> level
        first = (piece - 1) << level
        for at in range(first * C, (first + ((piece & 1) << level)) * C, C):
            j = at + c
            key = tl.load(here + j[:, None] * BD + features[None, :])
            value = tile(v, j, H * V, T, values, V, BV, True)
            s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * _LOG2E)
            if MASS:
                mass_high, mass_low = masses(high, low, j, H, T, float("-inf"))
                s += ((mass_high - base) + mass_low)[None, :] * _LOG2E
            most, weight, out = absorb(s, value, most, weight, out, PRECISION)
    if MASS:
        most += ((base - own_high) - own_low) * _LOG2E
    if R == 2:
        query = tl.load(carried + i[:, None] * BD + features[None, :])
        j = own * C + c
        key = tl.load(carried + j[:, None] * BD + features[None, :])
        value = tile(v, j, H * V, T, values, V, BV, False)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * _LOG2E)
        if MASS:
            s += _distances(high, low, own_high, own_low, j, H, T)
        s = tl.where((i >= (own + 1) * C)[:, None], s, float("-inf"))
        most, weight, out = absorb(s, value, most, weight, out, PRECISION)
    inside = tl.load(scores + (line * N * C + i)[:, None] * C + c[None, :]) * (scale * _LOG2E)
    for r in tl.static_range(R):
        j = (own + r) * C + c
        value = tile(v, j, H * V, T, values, V, BV, False)
        s = inside
        if MASS:
            s += _distances(high, low, own_high, own_low, j, H, T)
        s = tl.where((i // C == own + r)[:, None] & (j[None, :] <= i[:, None]), s, float("-inf"))
        most, weight, out = absorb(s, value, most, weight, out, PRECISION)
    put(o, out / weight[:, None], i, H * V, T, values, V)
    tl.store(lse + line * T + i, most + tl.log2(weight), mask=i < T)


@Kernel
@triton.jit(do_not_specialize=["T", "N", "levels"])
def queries(
    carried, scores, v, high, low, o, do, lse, dcarried, dscores, dots, sums, scale, T, N, H, levels,
    V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, R: tl.constexpr, MASS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of queries at every level and of scores inside a block, D and the sums of dS over pairs."""
    count = N // R
    pid = tl.program_id(0)
    line = (pid // count).to(tl.int64)
    size = (tl.num_programs(0) // count).to(tl.int64) * N * C * BD
    own = (count - 1 - pid % count) * R
    batch, head = line // H, line % H
    v += (batch * T * H + head) * V
    carried += line * N * C * BD
    dcarried += line * N * C * BD
    i, c, features, values = own * C + tl.arange(0, R * C), tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BV)
    kind = carried.dtype.element_ty
    outer = tile(do + (batch * T * H + head) * V, i, H * V, T, values, V, BV, False)
    out = tile(o + (batch * T * H + head) * V, i, H * V, T, values, V, BV, False)
    dot = tl.sum(out.to(tl.float32) * outer.to(tl.float32), 1)
    tl.store(dots + line * T + i, dot, mask=i < T)
    norm = tl.load(lse + line * T + i, mask=i < T, other=float("inf"))
    base, own_high, own_low, shifted = 0.0, i.to(tl.float32), i.to(tl.float32), norm
    if MASS:
        high += batch * T * H + head
        low += batch * T * H + head
        own_high, own_low = masses(high, low, i, H, T, 0.0)
        base = tl.load(high + own.to(tl.int64) * C * H, mask=own * C < T, other=0.0)
        shifted = norm - ((base - own_high) - own_low) * _LOG2E
    summed = tl.zeros([R * C], tl.float32)
    for level in range(R // 2, levels):
        here = carried + level * size
        query = tl.load(here + i[:, None] * BD + features[None, :])
        piece = own >> level
        first = (piece - 1) << level
        found = tl.zeros([R * C, BD], tl.float32)
        for at in range(first * C, (first + ((piece & 1) << level)) * C, C):
            j = at + c
            key = tl.load(here + j[:, None] * BD + features[None, :])
            value = tile(v, j, H * V, T, values, V, BV, True)
            s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * _LOG2E)
            if MASS:
                mass_high, mass_low = masses(high, low, j, H, T, float("-inf"))
                s += ((mass_high - base) + mass_low)[None, :] * _LOG2E
            ds = tl.dot(outer, tl.trans(value), input_precision=PRECISION) - dot[:, None]
            ds *= tl.exp2(s - shifted[:, None])
            summed += tl.sum(ds, 1)
            found = tl.dot(ds.to(kind), key, found, input_precision=PRECISION)
        if (piece & 1) == 1:
            to = dcarried + level * size
            tl.store(to + i[:, None] * BD + features[None, :], (found * scale).to(kind))
    if R == 2:
        query = tl.load(carried + i[:, None] * BD + features[None, :])
        j = own * C + c
        key = tl.load(carried + j[:, None] * BD + features[None, :])
        value = tile(v, j, H * V, T, values, V, BV, False)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * _LOG2E)
        if MASS:
            s += _distances(high, low, own_high, own_low, j, H, T)
        right = (i >= (own + 1) * C)[:, None]
        s = tl.where(right, s, float("-inf"))
        ds = tl.dot(outer, tl.trans(value), input_precision=PRECISION) - dot[:, None]
        ds *= tl.exp2(s - norm[:, None])
        summed += tl.sum(ds, 1)
        found = tl.dot(ds.to(kind), key, input_precision=PRECISION)
        tl.store(dcarried + i[:, None] * BD + features[None, :], (found * scale).to(kind), mask=right)
    at_own = (line * N * C + i)[:, None] * C + c[None, :]
    inside = tl.load(scores + at_own) * (scale * _LOG2E)
    found_inside = tl.zeros([R * C, C], tl.float32)
    for r in tl.static_range(R):
        j = (own + r) * C + c
        value = tile(v, j, H * V, T, values, V, BV, False)
        s = inside
        if MASS:
            s += _distances(high, low, own_high, own_low, j, H, T)
        s = tl.where((i // C == own + r)[:, None] & (j[None, :] <= i[:, None]), s, float("-inf"))
        ds = tl.dot(outer, tl.trans(value), input_precision=PRECISION) - dot[:, None]
        found_inside += ds * tl.exp2(s - norm[:, None])
    tl.store(dscores + at_own, found_inside * scale)
    if MASS:
        tl.store(sums + line * T + i, summed + tl.sum(found_inside, 1), mask=i < T)


@Kernel
@triton.jit(do_not_specialize=["T", "N", "levels"])
def pairs(
    carried, scores, v, high, low, do, lse, dots, sums, dscores, dcarried, dv, dm, scale, T, N, H, levels,
    V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, R: tl.constexpr, MASS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys at every level, of values and masses. Everything is (pairs, queries)."""
    count = N // R
    pid = tl.program_id(0)
    line = (pid // count).to(tl.int64)
    size = (tl.num_programs(0) // count).to(tl.int64) * N * C * BD
    own = pid % count * R
    batch, head = line // H, line % H
    v += (batch * T * H + head) * V
    do += (batch * T * H + head) * V
    lse += line * T
    dots += line * T
    carried += line * N * C * BD
    dcarried += line * N * C * BD
    j, c, features, values = own * C + tl.arange(0, R * C), tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BV)
    kind = carried.dtype.element_ty
    value = tile(v, j, H * V, T, values, V, BV, False)
    dvalue = tl.zeros([R * C, BV], tl.float32)
    dmass = tl.zeros([R * C], tl.float32)
    base, mass_high, mass_low, relative = 0.0, j.to(tl.float32), j.to(tl.float32), j.to(tl.float32)
    if MASS:
        high += batch * T * H + head
        low += batch * T * H + head
        mass_high, mass_low = masses(high, low, j, H, T, float("-inf"))
        base = tl.max(mass_high, 0)
        base = tl.where(base == float("-inf"), 0.0, base)
        relative = ((mass_high - base) + mass_low) * _LOG2E
        dmass -= tl.load(sums + line * T + j, mask=j < T, other=0.0)
    for level in range(R // 2, levels):
        here = carried + level * size
        key = tl.load(here + j[:, None] * BD + features[None, :])
        piece = own >> level
        dkey = tl.zeros([R * C, BD], tl.float32)
        first = (piece + 1) << level
        end = tl.minimum((first + ((1 - (piece & 1)) << level)) * C, T)
        for at in range(first * C, end, C):
            i = at + c
            query = tl.load(here + i[:, None] * BD + features[None, :])
            outer = tile(do, i, H * V, T, values, V, BV, False)
            norm = tl.load(lse + i, mask=i < T, other=float("inf"))
            dot = tl.load(dots + i, mask=i < T, other=0.0)
            s = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (scale * _LOG2E)
            if MASS:
                own_high, own_low = masses(high, low, i, H, T, 0.0)
                s += relative[:, None] + (((base - own_high) - own_low) * _LOG2E - norm)[None, :]
            else:
                s -= norm[None, :]
            p = tl.exp2(s)
            dvalue = tl.dot(p.to(kind), outer, dvalue, input_precision=PRECISION)
            ds = p * (tl.dot(value, tl.trans(outer), input_precision=PRECISION) - dot[None, :])
            dkey = tl.dot(ds.to(kind), query, dkey, input_precision=PRECISION)
            if MASS:
                dmass += tl.sum(ds, 1)
        if (piece & 1) == 0:
            to = dcarried + level * size
            tl.store(to + j[:, None] * BD + features[None, :], (dkey * scale).to(kind))
    if R == 2:
        i = (own + 1) * C + c
        key = tl.load(carried + j[:, None] * BD + features[None, :])
        query = tl.load(carried + i[:, None] * BD + features[None, :])
        outer = tile(do, i, H * V, T, values, V, BV, False)
        norm = tl.load(lse + i, mask=i < T, other=float("inf"))
        dot = tl.load(dots + i, mask=i < T, other=0.0)
        s = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (scale * _LOG2E)
        if MASS:
            own_high, own_low = masses(high, low, i, H, T, 0.0)
            s += tl.trans(_distances(high, low, own_high, own_low, j, H, T))
        left = (j < (own + 1) * C)[:, None]
        p = tl.exp2(tl.where(left, s - norm[None, :], float("-inf")))
        dvalue = tl.dot(p.to(kind), outer, dvalue, input_precision=PRECISION)
        ds = p * (tl.dot(value, tl.trans(outer), input_precision=PRECISION) - dot[None, :])
        dkey = tl.dot(ds.to(kind), query, input_precision=PRECISION)
        if MASS:
            dmass += tl.sum(ds, 1)
        tl.store(dcarried + j[:, None] * BD + features[None, :], (dkey * scale).to(kind), mask=left)
    for r in tl.static_range(R):
        i = (own + r) * C + c
        outer = tile(do, i, H * V, T, values, V, BV, False)
        norm = tl.load(lse + i, mask=i < T, other=float("inf"))
        seen = (j // C == own + r)[:, None] & (j[:, None] <= i[None, :])
        inside = (line * N * C + i)[None, :] * C + (j - (own + r) * C)[:, None]
        s = tl.load(scores + inside, mask=seen, other=0.0) * (scale * _LOG2E)
        if MASS:
            own_high, own_low = masses(high, low, i, H, T, 0.0)
            s += tl.trans(_distances(high, low, own_high, own_low, j, H, T))
            dmass += tl.sum(tl.load(dscores + inside, mask=seen, other=0.0), 1) / scale
        p = tl.exp2(tl.where(seen, s - norm[None, :], float("-inf")))
        dvalue = tl.dot(p.to(kind), outer, dvalue, input_precision=PRECISION)
    put(dv + (batch * T * H + head) * V, dvalue, j, H * V, T, values, V)
    if MASS:
        tl.store(dm + (batch * T + j) * H + head, dmass, mask=j < T)
