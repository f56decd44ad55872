"""Two states that mix, theta and a momentum buffer, in Triton, exact chunk by chunk: X_t = X_{t-1} M_t + write.

    p_t = sum_i e_t[i] X_{t-1}[i] k_t
    X_t[j] = sum_i X_{t-1}[i] M_t[i, j] + w_t[j] (v_t - p_t) k_t^T            o_t = X_t[0] q_t

What carries a token to another is a product of 2 x 2 blocks, Phi(s+1..t) = M_{s+1} ... M_t. It may be singular, so no
ratio of prefixes gives it: rows Y_s^t = w_s Phi(s+1..t) follow the recurrence Y^t = Y^{t-1} M_t over the C tokens of a
chunk, in float32. Inside a chunk with first state X (each slot as K x V), P^t = Phi(1..t):
    D_ts = Y_s^{t-1} . e_t  (s < t)     Q_ts = Y_s^t[0]  (s <= t)     c_t = P^{t-1} e_t     z_t = P^t[:, 0]
    M = (I + D * K K^T)^-1              S = Q * Q K^T
    u = M [V - sum_a c[a] (K X_a)]      o = sum_a z[a] (Q X_a) + S u
    X'_b = sum_a P^C[a, b] X_a + K^T (Y^C[b] u)
and backwards, from do and dX':
    du = S^T do + sum_b Y^C[b] (K dX'_b)         r = M^T du,  dv = r
    dX_a = sum_b P^C[a, b] dX'_b + Q^T (z[a] do) - K^T (c[a] r)
    dD = -(r u^T) * K K^T,  dQ = (do u^T) * Q K^T,  and the rest are products with X, dX', u and r.
dM, dw and de follow from dD, dQ and the gradients of c, z, Y^C, P^C by the adjoint recurrence, last token first.
Forward: the recurrence, M and S of all chunks, one kernel serial in time. Backward: the recurrence again, the states
again, the serial reverse pass, a kernel over all chunks, the adjoint recurrence. No atomics: one order, the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import (
    check_like,
    check_packing,
    check_tokens,
    contiguous,
    layout,
    on_device,
    precision,
)
from axes.kernels.common.tiles import (
    TILE,
    first_slot,
    load_rows,
    slot_rows,
    store_rows,
    unit_rows,
)

# ---- kernels -------------------------------------------------------------------------------------------------------
# Per chunk slot and value head: recurrence (2, C, C) holds Y_s^t[j] as (j, t, s); carries (8, C) holds P^t (rows 0 to
# 3), c (4, 5) and Y^C (6, 7); totals (4) is P^C; m and scores are (C, C); states are (2, K, V).


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def _recurrence(
    block, write, erase, recurrence, carries, totals, offsets, units, T, N,
    HV: tl.constexpr, C: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Y and P of one chunk. Tokens after the last one of a unit neither carry nor write: M = I, w = e = 0."""
    pid = tl.program_id(0).to(tl.int64)
    _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
    s = tl.arange(0, C)
    y0 = tl.zeros([C], dtype=tl.float32)
    y1 = tl.zeros([C], dtype=tl.float32)
    p00, p01, p10, p11 = 1.0, 0.0, 0.0, 1.0
    out = recurrence + pid * 2 * C * C + s
    small = carries + pid * 8 * C
    for t in range(C):
        at = (first + t) * HV + pid % HV
        here = first + t < end
        m00 = tl.load(block + at * 4, mask=here, other=1.0)
        m01 = tl.load(block + at * 4 + 1, mask=here, other=0.0)
        m10 = tl.load(block + at * 4 + 2, mask=here, other=0.0)
        m11 = tl.load(block + at * 4 + 3, mask=here, other=1.0)
        w0 = tl.load(write + at * 2, mask=here, other=0.0)
        w1 = tl.load(write + at * 2 + 1, mask=here, other=0.0)
        if ERASE:
            e0 = tl.load(erase + at * 2, mask=here, other=0.0)
            e1 = tl.load(erase + at * 2 + 1, mask=here, other=0.0)
            tl.store(small + 4 * C + t, p00 * e0 + p01 * e1)
            tl.store(small + 5 * C + t, p10 * e0 + p11 * e1)
        next0 = y0 * m00 + y1 * m10
        next1 = y0 * m01 + y1 * m11
        y0 = tl.where(s == t, w0, next0)
        y1 = tl.where(s == t, w1, next1)
        q00 = p00 * m00 + p01 * m10
        q01 = p00 * m01 + p01 * m11
        q10 = p10 * m00 + p11 * m10
        q11 = p10 * m01 + p11 * m11
        p00, p01, p10, p11 = q00, q01, q10, q11
        tl.store(out + t * C, y0)
        tl.store(out + C * C + t * C, y1)
        tl.store(small + t, p00)
        tl.store(small + C + t, p01)
        tl.store(small + 2 * C + t, p10)
        tl.store(small + 3 * C + t, p11)
    tl.store(small + 6 * C + s, y0)
    tl.store(small + 7 * C + s, y1)
    tl.store(totals + pid * 4, p00)
    tl.store(totals + pid * 4 + 1, p01)
    tl.store(totals + pid * 4 + 2, p10)
    tl.store(totals + pid * 4 + 3, p11)


@triton.jit
def _read_pairs(recurrence, C: tl.constexpr):
    """Q_ts: what a token reads of an earlier one or of itself; zero above the diagonal, as the recurrence left it."""
    return tl.load(recurrence + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def _erase_pairs(recurrence, erase, rows, end, hv, HV, C: tl.constexpr):
    """D_ts = Y_s^{t-1} . e_t, strictly lower."""
    t = tl.arange(0, C)[:, None]
    before = recurrence + (t - 1) * C + tl.arange(0, C)[None, :]
    e0 = tl.load(erase + (rows * HV + hv) * 2, mask=rows < end, other=0.0)
    e1 = tl.load(erase + (rows * HV + hv) * 2 + 1, mask=rows < end, other=0.0)
    y0 = tl.load(before, mask=t > tl.arange(0, C)[None, :], other=0.0)
    y1 = tl.load(before + C * C, mask=t > tl.arange(0, C)[None, :], other=0.0)
    return e0[:, None] * y0 + e1[:, None] * y1


@triton.jit
def _quarter(square, side: tl.constexpr, ROWS: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr):
    """Where the blocks (ROWS, COLUMN) of the side x side diagonal blocks of a (C, C) are, (C / side, half, half)."""
    HALF: tl.constexpr = side // 2
    block = tl.arange(0, C // side)[:, None, None] * side
    row = block + ROWS * HALF + tl.arange(0, HALF)[None, :, None]
    return square + row * C + block + COLUMN * HALF + tl.arange(0, HALF)[None, None, :]


@triton.jit
def _merge(square, side: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """The lower left quarters -X2 L21 X1 of the inverses of diagonal blocks, from the inverses X1, X2 of halves."""
    low = _quarter(square, side, 1, 0, C)
    x1 = tl.load(_quarter(square, side, 0, 0, C))
    x2 = tl.load(_quarter(square, side, 1, 1, C))
    if side == C:
        HALF: tl.constexpr = side // 2
        part = tl.reshape(tl.load(low), [HALF, HALF])
        inner = tl.dot(part, tl.reshape(x1, [HALF, HALF]), input_precision=PRECISION)
        cross = tl.dot(tl.reshape(x2, [HALF, HALF]), inner, input_precision=PRECISION)[None, :, :]
    else:
        cross = tl.dot(x2, tl.dot(tl.load(low), x1, input_precision=PRECISION), input_precision=PRECISION)
    tl.debug_barrier()  # all have read L21 before any writes its place
    tl.store(low, -cross)
    tl.debug_barrier()


@triton.jit
def _invert(square, C: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """A strictly lower (C, C) in memory becomes (I + it)^-1: substitution in blocks, then blocks of twice the size.

    Powers of it are never formed: with keys close to each other they grow past what float32 resolves. A thread owns
    whole columns in the substitution, so that sums stay inside of it: COLUMNS, C or more, is a multiple of the threads.
    """
    row = tl.arange(0, SIDE)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    block = column // SIDE * SIDE
    x = tl.where(row == column % SIDE, 1.0, 0.0)
    for i in range(1, SIDE):
        line = tl.load(square + (block + i) * C + block + row, mask=(column < C) & (row < i), other=0.0)
        x = tl.where(row == i, x - tl.sum(line * x, axis=0)[None, :], x)
    tl.debug_barrier()
    tl.store(square + (block + row) * C + column, x, mask=column < C)
    tl.debug_barrier()
    if C == 2 * SIDE:
        _merge(square, 2 * SIDE, C, PRECISION)
    if C == 4 * SIDE:
        _merge(square, 2 * SIDE, C, PRECISION)
        _merge(square, 4 * SIDE, C, PRECISION)


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def _prepare(
    q, k, erase, recurrence, m, scores, offsets, units, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SIDE: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    MERGE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """M and S of every chunk; where something is erased, Y is lost."""
    pid = tl.program_id(0).to(tl.int64)
    hv = pid % HV
    head = hv // (HV // H)
    _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
    rows = first + tl.arange(0, C)
    d = tl.arange(0, BK)
    square = pid * C * C + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    keys = load_rows(k, rows, end, d, head, H, K)
    queries = load_rows(q, rows, end, d, head, H, K)
    weights = recurrence + pid * 2 * C * C
    read = _read_pairs(weights, C) * tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    tl.store(scores + square, read.to(scores.dtype.element_ty))
    if ERASE:
        lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        lower *= _erase_pairs(weights, erase, rows, end, hv, HV, C)
        inner = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
        tl.debug_barrier()  # Y has been read: its place holds the matrix that is inverted
        tl.store(weights + inner, lower)
        tl.debug_barrier()
        _invert(weights, C, SIDE, COLUMNS, MERGE)
        tl.store(m + square, tl.load(weights + inner).to(m.dtype.element_ty))


@triton.jit
def _mixed(x0, x1, w0, w1, added):
    """w0 x0 + w1 x1 + added, the sum outside the matrix unit, which truncates what it adds to."""
    return tl.fma(x1, w1, tl.fma(x0, w0, added))


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def _scan(
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
    inner = d[:, None] * V + e[None, :]
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
        rows = first + n * C + tl.arange(0, C)
        at = (base + n) * HV + hv
        keys = load_rows(k, rows, end, d, head, H, K)
        u = load_rows(v, rows, end, e, hv, HV, V)
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
                store_rows(written, u, rows, end, e, hv, HV, V)
        else:
            strength = u.to(tl.float32)
        if not RECORD:
            queries = load_rows(q, rows, end, d, head, H, K)
            out = tl.load(small)[:, None] * tl.dot(queries, old0, input_precision=PRECISION)
            out += tl.load(small + 2 * C)[:, None] * tl.dot(queries, old1, input_precision=PRECISION)
            out += tl.dot(tl.load(scores + at * C * C + square), u, input_precision=PRECISION)
            store_rows(o, out, rows, end, e, hv, HV, V)
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
def _reverse(
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
    inner = d[:, None] * V + e[None, :]
    square = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    first, end = unit_rows(offsets, unit, T, PACKED)
    base = first_slot(first, unit, N, C, PACKED)
    chunks = ((end - first).to(tl.int32) + C - 1) // C
    g0 = tl.load(dfinal + public, mask=within, other=0.0)
    g1 = tl.load(dfinal + public + K, mask=within, other=0.0)
    for back in tl.range(chunks):
        n = chunks - 1 - back
        rows = first + n * C + tl.arange(0, C)
        at = (base + n) * HV + hv
        keys = load_rows(k, rows, end, d, head, H, K)
        dout = load_rows(do, rows, end, e, hv, HV, V)
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
        store_rows(dv, r, rows, end, e, hv, HV, V)
        queries = load_rows(q, rows, end, d, head, H, K)
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
def _pairs(
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
    rows = first + tl.arange(0, C)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    dscores = tl.zeros([C, C], dtype=tl.float32)
    near = tl.zeros([C, C], dtype=tl.float32)
    for left in range(0, V, BV):
        e = left + tl.arange(0, BV)
        dout = load_rows(do, rows, end, e, hv, HV, V)
        u = load_rows(written, rows, end, e, hv, HV, V)
        dscores += tl.dot(dout, tl.trans(u), input_precision=PRECISION)
    for low in range(0, K, BK):
        d = low + tl.arange(0, BK)
        queries = load_rows(q, rows, end, d, head, H, K)
        keys = load_rows(k, rows, end, d, head, H, K)
        near += tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    weights = recurrence + pid * 2 * C * C
    square = pid * C * C + t * C + s
    pairs = dpairs + pid * 2 * C * C + t * C + s
    tl.store(reads + square, (dscores * _read_pairs(weights, C)).to(reads.dtype.element_ty))
    tl.store(pairs, tl.where(t >= s, dscores * near, 0.0))
    if ERASE:
        dlower = tl.zeros([C, C], dtype=tl.float32)
        near = tl.zeros([C, C], dtype=tl.float32)
        for left in range(0, V, BV):
            e = left + tl.arange(0, BV)
            r = load_rows(dv, rows, end, e, hv, HV, V)
            u = load_rows(written, rows, end, e, hv, HV, V)
            dlower -= tl.dot(r, tl.trans(u), input_precision=PRECISION)
        for low in range(0, K, BK):
            keys = load_rows(k, rows, end, low + tl.arange(0, BK), head, H, K)
            near += tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        among = dlower * _erase_pairs(weights, erase, rows, end, hv, HV, C)
        tl.store(erases + square, among.to(erases.dtype.element_ty))
        tl.store(pairs + C * C, tl.where(t > s, dlower * near, 0.0))


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def _gradients(
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
    rows = first + tl.arange(0, C)
    d = part.to(tl.int32) * BK + tl.arange(0, BK)
    square = pid * C * C + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    keys = load_rows(k, rows, end, d, head, H, K)
    queries = load_rows(q, rows, end, d, head, H, K)
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
            within = (d < K)[:, None] & (e < V)[None, :]
            inner = d[:, None] * V + e[None, :]
            state = tl.load(x + inner, mask=within, other=0.0)
            grad = tl.load(g + inner, mask=within, other=0.0)
            dout = load_rows(do, rows, end, e, hv, HV, V)
            u = load_rows(written, rows, end, e, hv, HV, V)
            out += tl.dot(dout, tl.trans(state), input_precision=PRECISION)
            into += tl.dot(u, tl.trans(grad), input_precision=PRECISION)
            if ERASE:
                r = load_rows(dv, rows, end, e, hv, HV, V)
                read += tl.dot(r, tl.trans(state), input_precision=PRECISION)
            same += tl.sum(state.to(tl.float32) * grad, 1)
            cross += tl.sum(state.to(tl.float32) * tl.load(other + inner, mask=within, other=0.0), 1)
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
    store_rows(dq, dquery, rows, end, d, hv, HV, K)
    store_rows(dk, dkey, rows, end, d, hv, HV, K)


@triton.jit
def _parts(ptr, stride, PARTS: tl.constexpr):
    """The sum of what the blocks of keys gave, in order."""
    total = tl.load(ptr)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptr + part * stride)
    return total


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def _adjoint(
    block, erase, recurrence, carries, dpairs, dcarries, dtotals, dblock, dwrite, derase, offsets, units, T, N,
    HV: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The recurrence backwards from a chunk's last token: with gY^t and gP^t the gradients of Y^t and P^t,

    dw_t = gY_t^t,  dM_t = sum_{s<t} Y_s^{t-1} gY_s^t + P^{t-1}^T gP^t,  gY^{t-1} = gY^t M_t^T + dD_t. e_t + dQ_{t-1}.
    """
    pid = tl.program_id(0).to(tl.int64)
    _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
    s = tl.arange(0, C)
    chunks = tl.num_programs(0).to(tl.int64)
    far = chunks * 6 * C
    small = carries + pid * 8 * C
    dsmall = dcarries + pid * 6 * C
    y = recurrence + pid * 2 * C * C + s
    pairs = dpairs + pid * 2 * C * C + s
    gy0 = _parts(dsmall + 4 * C + s, far, PARTS)
    gy1 = _parts(dsmall + 5 * C + s, far, PARTS)
    gp00 = _parts(dtotals + pid * 4, chunks * 4, PARTS)
    gp01 = _parts(dtotals + pid * 4 + 1, chunks * 4, PARTS)
    gp10 = _parts(dtotals + pid * 4 + 2, chunks * 4, PARTS)
    gp11 = _parts(dtotals + pid * 4 + 3, chunks * 4, PARTS)
    dw0 = tl.zeros([C], dtype=tl.float32)
    dw1 = tl.zeros([C], dtype=tl.float32)
    for back in range(C):
        t = C - 1 - back
        at = (first + t) * HV + pid % HV
        here = first + t < end
        m00 = tl.load(block + at * 4, mask=here, other=1.0)
        m01 = tl.load(block + at * 4 + 1, mask=here, other=0.0)
        m10 = tl.load(block + at * 4 + 2, mask=here, other=0.0)
        m11 = tl.load(block + at * 4 + 3, mask=here, other=1.0)
        y0 = tl.load(y + (t - 1) * C, mask=s < t, other=0.0)  # Y^{t-1}
        y1 = tl.load(y + C * C + (t - 1) * C, mask=s < t, other=0.0)
        p00 = tl.load(small + t - 1, mask=t > 0, other=1.0)  # P^{t-1}
        p01 = tl.load(small + C + t - 1, mask=t > 0, other=0.0)
        p10 = tl.load(small + 2 * C + t - 1, mask=t > 0, other=0.0)
        p11 = tl.load(small + 3 * C + t - 1, mask=t > 0, other=1.0)
        gy0 += tl.load(pairs + t * C)
        gp00 += _parts(dsmall + t, far, PARTS)
        gp10 += _parts(dsmall + C + t, far, PARTS)
        dw0 = tl.where(s == t, gy0, dw0)
        dw1 = tl.where(s == t, gy1, dw1)
        gy0 = tl.where(s < t, gy0, 0.0)
        gy1 = tl.where(s < t, gy1, 0.0)
        tl.store(dblock + at * 4, tl.sum(y0 * gy0, 0) + p00 * gp00 + p10 * gp10, mask=here)
        tl.store(dblock + at * 4 + 1, tl.sum(y0 * gy1, 0) + p00 * gp01 + p10 * gp11, mask=here)
        tl.store(dblock + at * 4 + 2, tl.sum(y1 * gy0, 0) + p01 * gp00 + p11 * gp10, mask=here)
        tl.store(dblock + at * 4 + 3, tl.sum(y1 * gy1, 0) + p01 * gp01 + p11 * gp11, mask=here)
        before0 = gy0 * m00 + gy1 * m01
        gy1 = gy0 * m10 + gy1 * m11
        gy0 = before0
        before00 = gp00 * m00 + gp01 * m01
        before10 = gp10 * m00 + gp11 * m01
        gp01 = gp00 * m10 + gp01 * m11
        gp11 = gp10 * m10 + gp11 * m11
        gp00 = before00
        gp10 = before10
        if ERASE:
            e0 = tl.load(erase + at * 2, mask=here, other=0.0)
            e1 = tl.load(erase + at * 2 + 1, mask=here, other=0.0)
            dd = tl.load(pairs + C * C + t * C)
            dc0 = _parts(dsmall + 2 * C + t, far, PARTS)
            dc1 = _parts(dsmall + 3 * C + t, far, PARTS)
            tl.store(derase + at * 2, tl.sum(dd * y0, 0) + dc0 * p00 + dc1 * p10, mask=here)
            tl.store(derase + at * 2 + 1, tl.sum(dd * y1, 0) + dc0 * p01 + dc1 * p11, mask=here)
            gy0 += dd * e0
            gy1 += dd * e1
            gp00 += dc0 * e0
            gp01 += dc0 * e1
            gp10 += dc1 * e0
            gp11 += dc1 * e1
    rows = first + s
    at = (rows * HV + pid % HV) * 2
    tl.store(dwrite + at, dw0, mask=rows < end)
    tl.store(dwrite + at + 1, dw1, mask=rows < end)


# ---- launches ------------------------------------------------------------------------------------------------------


def _chunk(q: Tensor) -> int:
    """Tokens of a chunk."""
    return 32 if q.dtype == torch.float32 else 64


# of every kernel with tiles: most keys and most values of a tile, warps, stages, in 16 bit, 16 bit with keys wider
# than 128, and float32. 16 bit: tiles are 64 wide whatever the width. Seen on an H200 with Triton 3.6 (ptxas 12.8):
# scan (32 values, 4 warps, 1 stage) faults with an illegal access; gradients with 2 stages: a copy overwrites a tile
# that a product still reads, since the tile is used in registers too and has one buffer (tests/in_flight.py).
_LAUNCH = {
    "prepare": ((256, 64, 4, 1), (256, 64, 4, 1), (256, 32, 8, 1)),
    "scan": ((256, 64, 8, 2), (256, 64, 8, 1), (256, 32, 8, 1)),
    "states": ((256, 64, 8, 2), (256, 64, 8, 1), (256, 32, 8, 1)),
    "reverse": ((256, 64, 8, 2), (256, 64, 8, 1), (256, 32, 8, 1)),
    "pairs": ((64, 64, 4, 2), (64, 64, 4, 2), (32, 32, 4, 1)),
    "gradients": ((64, 64, 8, 1), (64, 64, 8, 1), (64, 32, 8, 1)),
}


def _launch(q: Tensor, v: Tensor, kernel: str) -> dict[str, int]:
    """Tile sides, warps and pipeline stages: the only ones that were tested."""
    full = q.dtype == torch.float32
    most_k, most_v, warps, stages = _LAUNCH[kernel][2 if full else q.shape[-1] > 128]
    least = TILE if full else min(64, most_v)
    d_k, d_v = (triton.next_power_of_2(x.shape[-1]) for x in (q, v))
    sides = {"BK": min(max(least, d_k), most_k), "BV": min(max(least, d_v), most_v)}
    return {**sides, "num_warps": warps, "num_stages": stages}


def _shape(q: Tensor, v: Tensor) -> dict[str, int]:
    return {"H": q.shape[2], "HV": v.shape[2], "K": q.shape[-1], "V": v.shape[-1], "C": _chunk(q)}


def _weights(
    q: Tensor, v: Tensor, block: Tensor, write: Tensor, erase: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, what readers and writers see of a chunk's first and last state, and P^C."""
    c, hv = _chunk(q), v.shape[2]
    cut = layout(q.shape[0], q.shape[1], c, cu_seqlens)
    recurrence = block.new_empty(cut.slots * hv, 2, c, c)
    carries, totals = block.new_empty(cut.slots * hv, 8, c), block.new_empty(cut.slots * hv, 4)
    _recurrence[(cut.slots * hv,)](
        block, write, write if erase is None else erase, recurrence, carries, totals,
        block if cut.offsets is None else cut.offsets, block if cut.units_of_slots is None else cut.units_of_slots,
        cut.length, cut.chunks, HV=hv, C=c, ERASE=erase is not None, PACKED=cut.packed, num_warps=1, num_stages=1,
    )  # fmt: skip
    return recurrence, carries, totals


@torch.library.custom_op("axes::block_chain", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, block: Tensor, write: Tensor, erase: Tensor | None, start: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    shape, erased = _shape(q, v), erase is not None
    c, hv = _chunk(q), v.shape[2]
    cut = layout(q.shape[0], q.shape[1], c, cu_seqlens)
    offsets = block if cut.offsets is None else cut.offsets
    units = block if cut.units_of_slots is None else cut.units_of_slots
    o, final = torch.empty_like(v), block.new_empty(cut.units, hv, v.shape[-1], 2, q.shape[-1])
    scores = q.new_empty(cut.slots, hv, c, c)
    m = q.new_empty(cut.slots if erased else 0, hv, c, c)
    exact = precision(q)
    with on_device(q):
        recurrence, carries, totals = _weights(q, v, block, write, erase, cu_seqlens)
        tiles = _launch(q, v, "prepare")
        _prepare[(cut.slots * hv,)](
            q, k, erase if erased else write, recurrence, m if erased else scores, scores, offsets, units,
            cut.length, cut.chunks, **shape, SIDE=TILE, ERASE=erased, PACKED=cut.packed, PRECISION=exact,
            MERGE="ieee" if exact == "ieee" else "tf32x3", COLUMNS=max(c, 32 * tiles["num_warps"]), **tiles,
        )  # fmt: skip
        tiles = _launch(q, v, "scan")
        _scan[(cut.units * hv * triton.cdiv(v.shape[-1], tiles["BV"]),)](
            q, k, v, carries, totals, m if erased else scores, scores, final if start is None else start, o, final,
            o, o, offsets, cut.length, cut.chunks, **shape, ERASE=erased, STARTED=start is not None,
            RECORD=False, PACKED=cut.packed, PRECISION=exact, **tiles,
        )  # fmt: skip
    return o, final, m, scores


@_forward.register_fake
def _(q, k, v, block, write, erase, start, cu_seqlens):
    c, hv = _chunk(q), v.shape[2]
    (b, t), packed = q.shape[:2], cu_seqlens is not None
    units = cu_seqlens.shape[0] - 1 if packed else b
    slots = t // c + units if packed else b * ((t + c - 1) // c)
    return (
        torch.empty_like(v),
        block.new_empty(units, hv, v.shape[-1], 2, q.shape[-1]),
        q.new_empty(0 if erase is None else slots, hv, c, c),
        q.new_empty(slots, hv, c, c),
    )


@torch.library.custom_op("axes::block_chain_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, block: Tensor, write: Tensor, erase: Tensor | None, start: Tensor | None,
    cu_seqlens: Tensor | None, m: Tensor, scores: Tensor, do: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    shape, erased = _shape(q, v), erase is not None
    (b, t, h, d), hv, c = q.shape, v.shape[2], _chunk(q)
    cut = layout(b, t, c, cu_seqlens)
    offsets = block if cut.offsets is None else cut.offsets
    units = block if cut.units_of_slots is None else cut.units_of_slots
    exact, wide = precision(q), v.shape[-1]
    states = q.new_empty(cut.slots * hv, 2, d, wide)
    dstates = torch.empty_like(states)
    written = torch.empty_like(v) if erased else v
    dv, dblock, dwrite, dstart = (torch.empty_like(x) for x in (v, block, write, dfinal))
    derase = torch.empty_like(write) if erased else write.new_empty(0)
    grouped = hv != h  # one gradient a value head, summed over the heads that share a key
    dq, dk = (q.new_empty(b, t, hv, d, dtype=torch.float32 if grouped else q.dtype) for _ in range(2))
    tiles = {kernel: _launch(q, v, kernel) for kernel in ("states", "reverse", "pairs", "gradients")}
    parts = triton.cdiv(d, tiles["gradients"]["BK"])
    dpairs = block.new_empty(cut.slots * hv, 2, c, c)
    dcarries = block.new_empty(parts, cut.slots * hv, 6, c)
    dtotals = block.new_empty(parts, cut.slots * hv, 4)
    gate = erase if erased else write
    inverted = m if erased else scores
    reads = torch.empty_like(scores)
    erases = torch.empty_like(m) if erased else reads
    heads = cut.units * hv
    common = {"ERASE": erased, "PACKED": cut.packed, "PRECISION": exact}
    with on_device(q):
        recurrence, carries, totals = _weights(q, v, block, write, erase, cu_seqlens)
        _scan[(heads * triton.cdiv(wide, tiles["states"]["BV"]),)](
            q, k, v, carries, totals, inverted, scores, dfinal if start is None else start, v, dfinal, states,
            written if erased else states, offsets, cut.length, cut.chunks, **shape,
            STARTED=start is not None, RECORD=True, **common, **tiles["states"],
        )  # fmt: skip
        _reverse[(heads * triton.cdiv(wide, tiles["reverse"]["BV"]),)](
            q, k, carries, totals, inverted, scores, do, dfinal, dstates, dv, dstart, offsets, cut.length, cut.chunks,
            **shape, **common, **tiles["reverse"],
        )  # fmt: skip
        _pairs[(cut.slots * hv,)](
            q, k, gate, recurrence, do, written, dv, dpairs, reads, erases, offsets, units, cut.length, cut.chunks,
            **shape, **common, **tiles["pairs"],
        )  # fmt: skip
        _gradients[(cut.slots * hv * parts,)](
            q, k, carries, do, written, dv, states, dstates, reads, erases, dq, dk, dcarries, dtotals,
            offsets, units, cut.length, cut.chunks, **shape, **common, **tiles["gradients"],
        )  # fmt: skip
        _adjoint[(cut.slots * hv,)](
            block, gate, recurrence, carries, dpairs, dcarries, dtotals, dblock, dwrite, derase if erased else dwrite,
            offsets, units, cut.length, cut.chunks,
            HV=hv, C=c, PARTS=parts, ERASE=erased, PACKED=cut.packed, num_warps=1, num_stages=1,
        )  # fmt: skip
    if grouped:
        dq, dk = (x.unflatten(2, (h, hv // h)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dblock, dwrite, derase, dstart


@_backward.register_fake
def _(q, k, v, block, write, erase, start, cu_seqlens, m, scores, do, dfinal):
    derase = write.new_empty(0) if erase is None else torch.empty_like(write)
    return (*(torch.empty_like(x) for x in (q, k, v, block, write)), derase, torch.empty_like(dfinal))


def _save(ctx, inputs, output) -> None:
    _, _, m, scores = output
    ctx.mark_non_differentiable(m, scores)
    ctx.save_for_backward(*inputs, m, scores)
    ctx.set_materialize_grads(True)


def _differentiate(ctx, do, dfinal, _m, _scores):
    q, k, v, block, write, erase, start, cu_seqlens, m, scores = ctx.saved_tensors
    dq, dk, dv, dblock, dwrite, derase, dstart = _backward(
        q, k, v, block, write, erase, start, cu_seqlens, m, scores, do.contiguous(), dfinal.contiguous().float()
    )
    none = None
    return (
        dq, dk, dv, dblock, dwrite, none if erase is None else derase, none if start is None else dstart, none,
    )  # fmt: skip


_forward.register_autograd(_differentiate, setup_context=_save)


# ---- entry ---------------------------------------------------------------------------------------------------------


def block_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Tensor,
    write: Tensor,
    erase: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """X_t[j] = sum_i X_{t-1}[i] M_t[i, j] + w_t[j] (v_t - sum_i e_t[i] X_{t-1}[i] k_t) k_t^T and o_t = X_t[0] q_t.

    q, k (B, T, H, K) and v (B, T, HV, V) in one dtype (bf16, fp16 or fp32), HV a multiple of H; K, V from 1 to 256.
    block (B, T, HV, 2, 2) is M, source slot first; write (B, T, HV, 2) is w; erase (B, T, HV, 2) is e, or None if
    nothing is erased. Any numbers: blocks may be singular. initial_state (B, HV, V, 2, K) or None for zero.
    cu_seqlens (U + 1,) int32 or int64: B = 1 and sequences one after another, with U initial and final states.
    Returns o (B, T, HV, V) in v's dtype and the final state (U or B, HV, V, 2, K) in float32. All inputs receive
    gradients, once: there is no double backward. Raises ShapeError for other shapes, dtypes or devices.
    """
    check_tokens("block_chain", q, k, v)
    check_packing("block_chain", q.shape[0], cu_seqlens, q.device)
    token = tuple(v.shape[:3])
    units = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (units, v.shape[2], v.shape[3], 2, q.shape[3])
    for name, x, shape in (
        ("block", block, (*token, 2, 2)),
        ("write", write, (*token, 2)),
        ("erase", erase, (*token, 2)),
        ("initial_state", initial_state, state),
    ):
        check_like("block_chain", name, x, shape, q.device)
    numbers = (None if x is None else x.float() for x in (block, write, erase, initial_state))
    matrix, weights, erased, start = contiguous(*numbers)
    if 0 in token:
        final = torch.zeros(state, dtype=torch.float32, device=q.device) if start is None else start.clone()
        return torch.empty_like(v), final
    queries, keys, values = contiguous(q, k, v)
    o, final, _, _ = _forward(queries, keys, values, matrix, weights, erased, start, cu_seqlens)
    return o, final
