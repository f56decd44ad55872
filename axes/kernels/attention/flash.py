"""Causal softmax attention over pairs that each have a log mass:  p_ti = softmax_i(scale q_t . k_i + m_i),  o = p v.

A tuple's scalar gates are masses, m_i = -G_i (ALiBi, FoX); without masses it is plain attention. Scores stay on chip.
In `forward` and `queries` a program owns a block of queries and walks over its pairs, in `pairs` it owns a block of
pairs and walks over the queries that see them: every sum has one order and one writer, so bits repeat.

Only differences of masses count, and near the diagonal small ones of large numbers: a mass is two float32, high + low.
A block takes masses relative to its own first query's (or its largest), where what still weighs is near zero; tiles
that the diagonal crosses subtract pair by pair. Backward, with D_t = o_t . do_t and dS = p (do v^T - D):
    dq = scale dS k    dk = scale dS^T q    dv = p^T do    dm = (dS summed over queries) - (over pairs, at the own pair)
where the last sum is zero but for rounding, which a cumulative sum of dm would add up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common import tiles
from axes.kernels.common.launch import Kernel

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _origin(first, unit, by_unit, by_row, PACKED: tl.constexpr):
    """Where a unit's rows begin: packed units stand one after another, dense ones in batch entries."""
    if PACKED:
        at = first * by_row
    else:
        at = unit * by_unit
    return at


@triton.jit
def tile(ptr, rows, stride, end, columns, D: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr):
    """(rows, columns), zero past the end. WHOLE: all rows are there."""
    at = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if WHOLE and D == BD:
        x = tl.load(at)
    elif WHOLE:
        x = tl.load(at, mask=(columns < D)[None, :], other=0.0)
    elif D == BD:
        x = tl.load(at, mask=(rows < end)[:, None], other=0.0)
    else:
        x = tl.load(at, mask=(rows < end)[:, None] & (columns < D)[None, :], other=0.0)
    return x


@triton.jit
def put(ptr, x, rows, stride, end, columns, D: tl.constexpr):
    at = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(rows < end)[:, None] & (columns < D)[None, :])


@triton.jit
def masses(high, low, rows, stride, end, other):
    at = rows.to(tl.int64) * stride
    here = rows < end
    return tl.load(high + at, mask=here, other=other), tl.load(low + at, mask=here, other=0.0)


# ---- a block of queries --------------------------------------------------------------------------------------------


@triton.jit
def scores(
    q, k, v, high, low, base, own_high, own_low, i, j, k_t, v_t, m_t, end, scale, old, keys, values,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MASS: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores in units of log 2, (queries, pairs), and the pairs' keys and values. WHOLE: every query sees every pair,
    and masses are relative to the base; else to each query's own."""
    key = tile(k, j, k_t, end, keys, K, BK, WHOLE)
    value = tile(v, j, v_t, end, values, V, BV, WHOLE)
    s = tl.dot(q, tl.trans(key), input_precision=PRECISION) * (scale * _LOG2E)
    if MASS:
        mass_high, mass_low = masses(high, low, j, m_t, end, float("-inf"))
        if WHOLE:
            s += ((mass_high - base) + mass_low)[None, :] * _LOG2E
        else:
            s += ((mass_high[None, :] - own_high[:, None]) + (mass_low[None, :] - own_low[:, None])) * _LOG2E
    if not WHOLE:
        s = tl.where((j[None, :] <= i[:, None] + old) & (j < end)[None, :], s, float("-inf"))
    return s, key, value


@triton.jit
def absorb(s, value, most, total, out, PRECISION: tl.constexpr):
    """One more tile of pairs: the running maximum, sum and weighted values."""
    new = tl.maximum(most, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)  # so far all pairs are without mass
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(most - safe)
    total = total * shrink + tl.sum(p, 1)
    out = tl.dot(p.to(value.dtype), value, out * shrink[:, None], input_precision=PRECISION)
    return new, total, out


@Kernel
@triton.jit(do_not_specialize=["T", "N", "slots", "total", "old", "m_b", "m_t", "m_h"])
def forward(
    q, k, v, high, low, o, lse, offsets, units, scale, T, N, slots, total, old, H,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, m_b, m_t, m_h,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o, and the log2 of the weights' sum relative to the query's own mass. Blocks with most pairs come first."""
    pid = tl.program_id(0)
    head = pid // slots
    unit, row, stop = tiles.slot_rows(offsets, units, slots - 1 - pid % slots, T, N, BM, PACKED)
    first, last = tiles.unit_rows(offsets, unit, T, PACKED)
    if row < last:
        begin = (row - first).to(tl.int32)
        length = (last - first).to(tl.int32)
        pairs = first + unit * old
        end = length + old
        q += _origin(first, unit, q_b, q_t, PACKED) + head * q_h
        k += _origin(pairs, unit, k_b, k_t, PACKED) + head // GROUP * k_h
        v += _origin(pairs, unit, v_b, v_t, PACKED) + head // GROUP * v_h
        i, keys, values = begin + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
        query = tile(q, i, q_t, length, keys, K, BK, False)
        base, own_high, own_low = 0.0, i.to(tl.float32), i.to(tl.float32)
        if MASS:
            high += _origin(pairs, unit, m_b, m_t, PACKED) + head // GROUP * m_h
            low += _origin(pairs, unit, m_b, m_t, PACKED) + head // GROUP * m_h
            own_high, own_low = masses(high, low, i + old, m_t, end, 0.0)
            base = tl.load(high + (begin + old).to(tl.int64) * m_t)
        most = tl.full([BM], float("-inf"), tl.float32)
        weight = tl.zeros([BM], tl.float32)
        out = tl.zeros([BM, BV], tl.float32)
        whole = (begin + old + 1) // BN * BN
        for at in tl.range(0, whole, BN):
            j = at + tl.arange(0, BN)
            s, key, value = scores(
                query, k, v, high, low, base, own_high, own_low, i, j, k_t, v_t, m_t, end, scale, old, keys, values,
                K, V, BK, BV, MASS, True, PRECISION,
            )  # fmt: skip
            most, weight, out = absorb(s, value, most, weight, out, PRECISION)
        if MASS:
            most += ((base - own_high) - own_low) * _LOG2E
        for at in tl.range(whole, tl.minimum(begin + BM + old, end), BN):
            j = at + tl.arange(0, BN)
            s, key, value = scores(
                query, k, v, high, low, base, own_high, own_low, i, j, k_t, v_t, m_t, end, scale, old, keys, values,
                K, V, BK, BV, MASS, False, PRECISION,
            )  # fmt: skip
            most, weight, out = absorb(s, value, most, weight, out, PRECISION)
        put(o + (first * H + head) * V, out / weight[:, None], i, H * V, length, values, V)
        tl.store(lse + head.to(tl.int64) * total + first + i, most + tl.log2(weight), mask=i < length)


@Kernel
@triton.jit(do_not_specialize=["T", "N", "slots", "total", "old", "m_b", "m_t", "m_h"])
def queries(
    q, k, v, high, low, o, do, lse, dq, dots, sums, offsets, units, scale, T, N, slots, total, old, H,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, m_b, m_t, m_h,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, D and the sums of dS over pairs; o and do are (tokens, H, V)."""
    pid = tl.program_id(0)
    head = pid // slots
    unit, row, stop = tiles.slot_rows(offsets, units, slots - 1 - pid % slots, T, N, BM, PACKED)
    first, last = tiles.unit_rows(offsets, unit, T, PACKED)
    if row < last:
        begin = (row - first).to(tl.int32)
        length = (last - first).to(tl.int32)
        pairs = first + unit * old
        end = length + old
        q += _origin(first, unit, q_b, q_t, PACKED) + head * q_h
        k += _origin(pairs, unit, k_b, k_t, PACKED) + head // GROUP * k_h
        v += _origin(pairs, unit, v_b, v_t, PACKED) + head // GROUP * v_h
        i, keys, values = begin + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
        query = tile(q, i, q_t, length, keys, K, BK, False)
        outer = tile(do + (first * H + head) * V, i, H * V, length, values, V, BV, False)
        out = tile(o + (first * H + head) * V, i, H * V, length, values, V, BV, False)
        dot = tl.sum(out.to(tl.float32) * outer.to(tl.float32), 1)
        number = head.to(tl.int64) * total + first + i
        norm = tl.load(lse + number, mask=i < length, other=float("inf"))
        tl.store(dots + number, dot, mask=i < length)
        base, own_high, own_low, shifted = 0.0, i.to(tl.float32), i.to(tl.float32), norm
        if MASS:
            high += _origin(pairs, unit, m_b, m_t, PACKED) + head // GROUP * m_h
            low += _origin(pairs, unit, m_b, m_t, PACKED) + head // GROUP * m_h
            own_high, own_low = masses(high, low, i + old, m_t, end, 0.0)
            base = tl.load(high + (begin + old).to(tl.int64) * m_t)
            shifted = norm - ((base - own_high) - own_low) * _LOG2E
        found = tl.zeros([BM, BK], tl.float32)
        summed = tl.zeros([BM], tl.float32)
        whole = (begin + old + 1) // BN * BN
        for at in tl.range(0, whole, BN):
            j = at + tl.arange(0, BN)
            s, key, value = scores(
                query, k, v, high, low, base, own_high, own_low, i, j, k_t, v_t, m_t, end, scale, old, keys, values,
                K, V, BK, BV, MASS, True, PRECISION,
            )  # fmt: skip
            ds = tl.dot(outer, tl.trans(value), input_precision=PRECISION) - dot[:, None]
            ds *= tl.exp2(s - shifted[:, None])
            summed += tl.sum(ds, 1)
            found = tl.dot(ds.to(key.dtype), key, found, input_precision=PRECISION)
        for at in tl.range(whole, tl.minimum(begin + BM + old, end), BN):
            j = at + tl.arange(0, BN)
            s, key, value = scores(
                query, k, v, high, low, base, own_high, own_low, i, j, k_t, v_t, m_t, end, scale, old, keys, values,
                K, V, BK, BV, MASS, False, PRECISION,
            )  # fmt: skip
            ds = tl.dot(outer, tl.trans(value), input_precision=PRECISION) - dot[:, None]
            ds *= tl.exp2(s - norm[:, None])
            summed += tl.sum(ds, 1)
            found = tl.dot(ds.to(key.dtype), key, found, input_precision=PRECISION)
        put(dq + (first * H + head) * K, found * scale, i, H * K, length, keys, K)
        if MASS:
            tl.store(sums + number, summed, mask=i < length)


# ---- a block of pairs ----------------------------------------------------------------------------------------------


@triton.jit
def _collect(
    key, value, mass_high, mass_low, relative, base, q, do, high, low, lse, dots, i, j, q_t, o_t, m_t, length, end,
    scale, old, keys, values, dk, dv, dm,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MASS: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a block of queries adds to the gradients of a block of pairs; everything is (pairs, queries)."""
    query = tile(q, i, q_t, length, keys, K, BK, False)
    outer = tile(do, i, o_t, length, values, V, BV, False)
    norm = tl.load(lse + i, mask=i < length, other=float("inf"))
    dot = tl.load(dots + i, mask=i < length, other=0.0)
    s = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (scale * _LOG2E)
    if MASS:
        own_high, own_low = masses(high, low, i + old, m_t, end, 0.0)
        if WHOLE:
            s += relative[:, None] + (((base - own_high) - own_low) * _LOG2E - norm)[None, :]
        else:
            s += ((mass_high[:, None] - own_high[None, :]) + (mass_low[:, None] - own_low[None, :])) * _LOG2E
            s -= norm[None, :]
    else:
        s -= norm[None, :]
    if not WHOLE:
        s = tl.where(j[:, None] <= i[None, :] + old, s, float("-inf"))
    p = tl.exp2(s)
    dv = tl.dot(p.to(outer.dtype), outer, dv, input_precision=PRECISION)
    ds = p * (tl.dot(value, tl.trans(outer), input_precision=PRECISION) - dot[None, :])
    dk = tl.dot(ds.to(query.dtype), query, dk, input_precision=PRECISION)
    if MASS:
        dm += tl.sum(ds, 1)
    return dk, dv, dm


@Kernel
@triton.jit(do_not_specialize=["S", "N", "slots", "total", "old", "m_b", "m_t", "m_h"])
def pairs(
    q, k, v, high, low, do, lse, dots, sums, dk, dv, dm, offsets, units, scale, S, N, slots, total, old, H,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, m_b, m_t, m_h,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv (pairs, H / GROUP, .) and dm; offsets and units are those of pairs."""
    pid = tl.program_id(0)
    shared = pid // slots
    unit, row, stop = tiles.slot_rows(offsets, units, pid % slots, S, N, BN, PACKED)
    first, last = tiles.unit_rows(offsets, unit, S, PACKED)
    if row < last:
        begin = (row - first).to(tl.int32)
        end = (last - first).to(tl.int32)
        length = end - old
        tokens = first - unit * old
        k += _origin(first, unit, k_b, k_t, PACKED) + shared * k_h
        v += _origin(first, unit, v_b, v_t, PACKED) + shared * v_h
        j, keys, values = begin + tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BV)
        key = tile(k, j, k_t, end, keys, K, BK, False)
        value = tile(v, j, v_t, end, values, V, BV, False)
        base = 0.0
        mass_high, mass_low, relative = j.to(tl.float32), j.to(tl.float32), j.to(tl.float32)
        if MASS:
            high += _origin(first, unit, m_b, m_t, PACKED) + shared * m_h
            low += _origin(first, unit, m_b, m_t, PACKED) + shared * m_h
            mass_high, mass_low = masses(high, low, j, m_t, end, float("-inf"))
            base = tl.max(mass_high, 0)
            base = tl.where(base == float("-inf"), 0.0, base)
            relative = ((mass_high - base) + mass_low) * _LOG2E
        dkey = tl.zeros([BN, BK], tl.float32)
        dvalue = tl.zeros([BN, BV], tl.float32)
        dmass = tl.zeros([BN], tl.float32)
        crossed = tl.maximum(begin - old, 0) // BM * BM
        whole = tl.minimum(tl.cdiv(tl.maximum(begin + BN - 1 - old, 0), BM) * BM, tl.cdiv(length, BM) * BM)
        for member in range(GROUP):
            head = shared * GROUP + member
            from_q = q + _origin(tokens, unit, q_b, q_t, PACKED) + head * q_h
            from_do = do + (tokens * H + head) * V
            numbers = head.to(tl.int64) * total + tokens
            if MASS:
                dmass -= tl.load(sums + numbers + (j - old), mask=(j >= old) & (j < end), other=0.0)
            for at in tl.range(crossed, whole, BM):
                i = at + tl.arange(0, BM)
                dkey, dvalue, dmass = _collect(
                    key, value, mass_high, mass_low, relative, base, from_q, from_do, high, low, lse + numbers,
                    dots + numbers, i, j, q_t, H * V, m_t, length, end, scale, old, keys, values, dkey, dvalue, dmass,
                    K, V, BK, BV, MASS, False, PRECISION,
                )  # fmt: skip
            for at in tl.range(whole, length, BM):
                i = at + tl.arange(0, BM)
                dkey, dvalue, dmass = _collect(
                    key, value, mass_high, mass_low, relative, base, from_q, from_do, high, low, lse + numbers,
                    dots + numbers, i, j, q_t, H * V, m_t, length, end, scale, old, keys, values, dkey, dvalue, dmass,
                    K, V, BK, BV, MASS, True, PRECISION,
                )  # fmt: skip
        heads = H // GROUP
        put(dk + (first * heads + shared) * K, dkey * scale, j, heads * K, end, keys, K)
        put(dv + (first * heads + shared) * V, dvalue, j, heads * V, end, values, V)
        if MASS:
            tl.store(dm + (first + j) * heads + shared, dmass, mask=j < end)
