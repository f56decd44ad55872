"""Products of tokens and states: the matrices of chunks, the passes over them and the gradients, device side.

Beside the numbers of `axes.kernels.block.weights`, per chunk slot and value head: m and scores are (C, C), states are
(2, V, K). The mathematics is in `axes.kernels.block.chain`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.block.weights import erase_pairs, read_pairs
from axes.kernels.common.inverse import invert
from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import first_slot, load_tile, slot_rows, store_tile, unit_rows


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def prepare(
    q, k, erase, recurrence, scores, offsets, units, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S of every chunk, and D * K K^T, which takes the place of Y."""
    pid = tl.program_id(0).to(tl.int64)
    hv = pid % HV
    head = hv // (HV // H)
    _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
    rows = (end - first).to(tl.int32)
    d = tl.arange(0, BK)
    square = pid * C * C + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    keys = load_tile(k, first, rows, d, head, H, K, C)
    queries = load_tile(q, first, rows, d, head, H, K, C)
    weights = recurrence + pid * 2 * C * C
    read = read_pairs(weights, C) * tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    tl.store(scores + square, read.to(scores.dtype.element_ty))
    if ERASE:
        lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        lower *= erase_pairs(weights, erase, first, rows, hv, HV, C)
        inner = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
        tl.debug_barrier()  # Y has been read
        tl.store(weights + inner, lower)


@Kernel
@triton.jit
def solve(recurrence, m, C: tl.constexpr, SIDE: tl.constexpr, LANES: tl.constexpr, MERGE: tl.constexpr):
    """M of every chunk from what `prepare` left, by one warp each."""
    pid = tl.program_id(0).to(tl.int64)
    invert(recurrence + pid * 2 * C * C, m + pid * C * C, C, SIDE, LANES, MERGE)


@triton.jit
def _mixed(x0, x1, w0, w1, added):
    """w0 x0 + w1 x1 + added, the sum outside the matrix unit, which truncates what it adds to."""
    return tl.fma(x1, w1, tl.fma(x0, w0, added))


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def scan(
    q, k, v, carries, totals, m, scores, start, o, final, states, written, offsets, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, STARTED: tl.constexpr, RECORD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Serial over chunks for one head and one block of values: o and the final state, or with RECORD each X and u."""
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (V + BV - 1) // BV
    hv, unit = pid // parts % HV, pid // parts // HV
    head = hv // (HV // H)
    d = tl.arange(0, BK)
    e = (pid % parts).to(tl.int32) * BV + tl.arange(0, BV)
    within = (d < K)[:, None] & (e < V)[None, :]
    public = ((unit * HV + hv) * V + e)[None, :] * (2 * K) + d[:, None]
    inner = e[None, :] * K + d[:, None]
    square = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    first, end = unit_rows(offsets, unit, T, PACKED)
    base = first_slot(first, unit, N, C, PACKED)
    chunks = ((end - first).to(tl.int32) + C - 1) // C
    if STARTED:
        x0 = tl.load(start + public, mask=within, other=0.0)
        x1 = tl.load(start + public + K, mask=within, other=0.0)
    else:
        x0 = tl.zeros([BK, BV], dtype=tl.float32)
        x1 = tl.zeros([BK, BV], dtype=tl.float32)
    for n in tl.range(chunks):
        here = first + n * C
        rows = tl.minimum(end - here, C).to(tl.int32)
        at = (base + n) * HV + hv
        keys = load_tile(k, here, rows, d, head, H, K, C, "rows")
        u = load_tile(v, here, rows, e, hv, HV, V, C, "rows")
        small = carries + at * 8 * C + tl.arange(0, C)
        p00 = tl.load(totals + at * 4)
        p01 = tl.load(totals + at * 4 + 1)
        p10 = tl.load(totals + at * 4 + 2)
        p11 = tl.load(totals + at * 4 + 3)
        end0 = tl.load(small + 6 * C)
        end1 = tl.load(small + 7 * C)
        old0 = x0.to(keys.dtype)
        old1 = x1.to(keys.dtype)
        if RECORD:
            tl.store(states + at * 2 * K * V + inner, old0, mask=within)
            tl.store(states + (at * 2 + 1) * K * V + inner, old1, mask=within)
        if ERASE:
            missing = u - tl.load(small + 4 * C)[:, None] * tl.dot(keys, old0, input_precision=PRECISION)
            missing -= tl.load(small + 5 * C)[:, None] * tl.dot(keys, old1, input_precision=PRECISION)
            inverted = tl.load(m + at * C * C + square)
            strength = tl.dot(inverted, missing.to(keys.dtype), input_precision=PRECISION)
            u = strength.to(keys.dtype)
            if RECORD:
                store_tile(written, u, here, rows, e, hv, HV, V, C, "rows")
        else:
            strength = u.to(tl.float32)
        if not RECORD:
            queries = load_tile(q, here, rows, d, head, H, K, C, "rows")
            out = tl.load(small)[:, None] * tl.dot(queries, old0, input_precision=PRECISION)
            out += tl.load(small + 2 * C)[:, None] * tl.dot(queries, old1, input_precision=PRECISION)
            out += tl.dot(tl.load(scores + at * C * C + square), u, input_precision=PRECISION)
            store_tile(o, out, here, rows, e, hv, HV, V, C, "rows")
        into0 = (end0[:, None] * strength).to(keys.dtype)
        into1 = (end1[:, None] * strength).to(keys.dtype)
        next0 = _mixed(x0, x1, p00, p10, tl.dot(tl.trans(keys), into0, input_precision=PRECISION))
        x1 = _mixed(x0, x1, p01, p11, tl.dot(tl.trans(keys), into1, input_precision=PRECISION))
        x0 = next0
    if not RECORD:
        tl.store(final + public, x0, mask=within)
        tl.store(final + public + K, x1, mask=within)


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def reverse(
    q, k, carries, totals, m, scores, do, dfinal, dstates, dv, dstart, offsets, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Serial over chunks from the last: dX' of every chunk, r = dv, and the gradient of the initial state."""
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (V + BV - 1) // BV
    hv, unit = pid // parts % HV, pid // parts // HV
    head = hv // (HV // H)
    d = tl.arange(0, BK)
    e = (pid % parts).to(tl.int32) * BV + tl.arange(0, BV)
    within = (d < K)[:, None] & (e < V)[None, :]
    public = ((unit * HV + hv) * V + e)[None, :] * (2 * K) + d[:, None]
    inner = e[None, :] * K + d[:, None]
    square = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    first, end = unit_rows(offsets, unit, T, PACKED)
    base = first_slot(first, unit, N, C, PACKED)
    chunks = ((end - first).to(tl.int32) + C - 1) // C
    g0 = tl.load(dfinal + public, mask=within, other=0.0)
    g1 = tl.load(dfinal + public + K, mask=within, other=0.0)
    for back in tl.range(chunks):
        n = chunks - 1 - back
        here = first + n * C
        rows = tl.minimum(end - here, C).to(tl.int32)
        at = (base + n) * HV + hv
        keys = load_tile(k, here, rows, d, head, H, K, C, "rows")
        dout = load_tile(do, here, rows, e, hv, HV, V, C, "rows")
        small = carries + at * 8 * C + tl.arange(0, C)
        p00 = tl.load(totals + at * 4)
        p01 = tl.load(totals + at * 4 + 1)
        p10 = tl.load(totals + at * 4 + 2)
        p11 = tl.load(totals + at * 4 + 3)
        later0 = g0.to(keys.dtype)
        later1 = g1.to(keys.dtype)
        tl.store(dstates + at * 2 * K * V + inner, later0, mask=within)
        tl.store(dstates + (at * 2 + 1) * K * V + inner, later1, mask=within)
        r = tl.load(small + 6 * C)[:, None] * tl.dot(keys, later0, input_precision=PRECISION)
        r += tl.load(small + 7 * C)[:, None] * tl.dot(keys, later1, input_precision=PRECISION)
        r += tl.dot(tl.trans(tl.load(scores + at * C * C + square)), dout, input_precision=PRECISION)
        if ERASE:
            inverted = tl.load(m + at * C * C + square)
            r = tl.dot(tl.trans(inverted), r.to(keys.dtype), input_precision=PRECISION)
        store_tile(dv, r, here, rows, e, hv, HV, V, C, "rows")
        queries = load_tile(q, here, rows, d, head, H, K, C, "rows")
        read0 = (tl.load(small)[:, None] * dout).to(keys.dtype)
        read1 = (tl.load(small + 2 * C)[:, None] * dout).to(keys.dtype)
        into0 = tl.dot(tl.trans(queries), read0, input_precision=PRECISION)
        into1 = tl.dot(tl.trans(queries), read1, input_precision=PRECISION)
        if ERASE:
            erased0 = (-tl.load(small + 4 * C)[:, None] * r).to(keys.dtype)
            erased1 = (-tl.load(small + 5 * C)[:, None] * r).to(keys.dtype)
            into0 = tl.dot(tl.trans(keys), erased0, acc=into0, input_precision=PRECISION)
            into1 = tl.dot(tl.trans(keys), erased1, acc=into1, input_precision=PRECISION)
        next0 = _mixed(g0, g1, p00, p01, into0)
        g1 = _mixed(g0, g1, p10, p11, into1)
        g0 = next0
    tl.store(dstart + public, g0, mask=within)
    tl.store(dstart + public + K, g1, mask=within)


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def pairs(
    q, k, erase, recurrence, do, written, dv, dpairs, reads, erases, offsets, units, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks at once, what pairs of tokens get: dQ and dD, and the gradients of Q K^T and of K K^T."""
    pid = tl.program_id(0).to(tl.int64)
    hv = pid % HV
    head = hv // (HV // H)
    _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
    rows = (end - first).to(tl.int32)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    dscores = tl.zeros([C, C], dtype=tl.float32)
    near = tl.zeros([C, C], dtype=tl.float32)
    for left in range(0, V, BV):
        e = left + tl.arange(0, BV)
        dout = load_tile(do, first, rows, e, hv, HV, V, C)
        u = load_tile(written, first, rows, e, hv, HV, V, C)
        dscores += tl.dot(dout, tl.trans(u), input_precision=PRECISION)
    for low in range(0, K, BK):
        d = low + tl.arange(0, BK)
        queries = load_tile(q, first, rows, d, head, H, K, C)
        keys = load_tile(k, first, rows, d, head, H, K, C)
        near += tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    weights = recurrence + pid * 2 * C * C
    square = pid * C * C + t * C + s
    pairs = dpairs + pid * 2 * C * C + t * C + s
    tl.store(reads + square, (dscores * read_pairs(weights, C)).to(reads.dtype.element_ty))
    tl.store(pairs, tl.where(t >= s, dscores * near, 0.0))
    if ERASE:
        dlower = tl.zeros([C, C], dtype=tl.float32)
        near = tl.zeros([C, C], dtype=tl.float32)
        for left in range(0, V, BV):
            e = left + tl.arange(0, BV)
            r = load_tile(dv, first, rows, e, hv, HV, V, C)
            u = load_tile(written, first, rows, e, hv, HV, V, C)
            dlower -= tl.dot(r, tl.trans(u), input_precision=PRECISION)
        for low in range(0, K, BK):
            keys = load_tile(k, first, rows, low + tl.arange(0, BK), head, H, K, C)
            near += tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        among = dlower * erase_pairs(weights, erase, first, rows, hv, HV, C)
        tl.store(erases + square, among.to(erases.dtype.element_ty))
        tl.store(pairs + C * C, tl.where(t > s, dlower * near, 0.0))


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def gradients(
    q, k, carries, do, written, dv, states, dstates, reads, erases, dq, dk, dcarries, dtotals, offsets, units, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks at once, one block of keys: dq and dk (by value head), and the gradients of z, c, Y^C, P^C."""
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (K + BK - 1) // BK
    part = pid % parts
    again = part * (tl.num_programs(0) // parts) + pid // parts
    pid = pid // parts
    hv = pid % HV
    head = hv // (HV // H)
    _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
    rows = (end - first).to(tl.int32)
    d = part.to(tl.int32) * BK + tl.arange(0, BK)
    square = pid * C * C + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    keys = load_tile(k, first, rows, d, head, H, K, C)
    queries = load_tile(q, first, rows, d, head, H, K, C)
    among = tl.load(reads + square)
    dquery = tl.dot(among, keys, input_precision=PRECISION)
    dkey = tl.dot(tl.trans(among), queries, input_precision=PRECISION)
    if ERASE:
        among = tl.load(erases + square)
        dkey += tl.dot(among, keys, input_precision=PRECISION)
        dkey += tl.dot(tl.trans(among), keys, input_precision=PRECISION)
    small = carries + pid * 8 * C + tl.arange(0, C)
    for a in tl.static_range(2):  # the two states
        x = states + (pid * 2 + a) * K * V
        g = dstates + (pid * 2 + a) * K * V
        other = dstates + (pid * 2 + 1 - a) * K * V
        out = tl.zeros([C, BK], dtype=tl.float32)
        read = tl.zeros([C, BK], dtype=tl.float32)
        into = tl.zeros([C, BK], dtype=tl.float32)
        same = tl.zeros([BK], dtype=tl.float32)
        cross = tl.zeros([BK], dtype=tl.float32)
        for left in range(0, V, BV):
            e = left + tl.arange(0, BV)
            within = (e < V)[:, None] & (d < K)[None, :]
            inner = e[:, None] * K + d[None, :]
            state = tl.load(x + inner, mask=within, other=0.0)
            grad = tl.load(g + inner, mask=within, other=0.0)
            dout = load_tile(do, first, rows, e, hv, HV, V, C)
            u = load_tile(written, first, rows, e, hv, HV, V, C)
            out += tl.dot(dout, state, input_precision=PRECISION)
            into += tl.dot(u, grad, input_precision=PRECISION)
            if ERASE:
                r = load_tile(dv, first, rows, e, hv, HV, V, C)
                read += tl.dot(r, state, input_precision=PRECISION)
            same += tl.sum(state.to(tl.float32) * grad, 0)
            cross += tl.sum(state.to(tl.float32) * tl.load(other + inner, mask=within, other=0.0), 0)
        tl.store(dtotals + again * 4 + 3 * a, tl.sum(same, 0))
        tl.store(dtotals + again * 4 + 1 + a, tl.sum(cross, 0))
        dsmall = dcarries + (again * 6 + a) * C + tl.arange(0, C)
        tl.store(dsmall, tl.sum(queries * out, 1))
        tl.store(dsmall + 4 * C, tl.sum(keys * into, 1))
        dquery += tl.load(small + 2 * a * C)[:, None] * out
        dkey += tl.load(small + (6 + a) * C)[:, None] * into
        if ERASE:
            tl.store(dsmall + 2 * C, -tl.sum(keys * read, 1))
            dkey -= tl.load(small + (4 + a) * C)[:, None] * read
    store_tile(dq, dquery, first, rows, d, hv, HV, K, C)
    store_tile(dk, dkey, first, rows, d, hv, HV, K, C)
