"""Kernels of the scalar chain with rule "delta": u_t = beta_t (v_t - S' a_t), S_t = e^{g_t} S_{t-1} + u_t k_t^T.

Inside a chunk of C tokens with first state X (as K x V), cumulative log gates G, gates R that readers of erase keys see
(R = G, or G before the token's own gate with EARLY), D_ij = e^{G_i - G_j} for i >= j, F_ij = e^{R_i - G_j} for i > j:
    M = (I + beta A K^T * F)^-1                         P = lower(Q K^T * D)
    u = M [beta (V - e^R (A X))]                        what each token really writes
    o = e^G (Q X) + P u                                 X' = e^G_last X + K^T (e^(G_last - G) u)
and backwards, from do and dX':
    r = M^T [P^T do + e^(G_last - G) (K dX')]           dX = e^G_last dX' + Q^T (e^G do) - A^T (beta e^R r)
    dv = beta r,  strict part of d(A K^T) = -beta r u^T * F, and the rest are products with X, dX', u and r.
Forward: one kernel over all chunks (M, P), one serial in time (o, final state). Backward: the states again (X, u), the
serial reverse pass (dX', r), and one kernel over all chunks for the gradients. The gradient of a gate is a sum inside
its chunk of what q, a, k gain and lose: no division, no atomics, one order.
A segment's map X -> W X + b is the state pass on [X | I]: columns of the identity, for which the values are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.inverse import invert
from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import decay, load_line, load_tile, store_line, store_tile
from axes.kernels.scalar.tiles import (
    chunk_gates,
    chunk_origin,
    chunk_span,
    gates,
    later_sum,
    load_state,
    store_state,
    strengths,
    stretch,
    unit_span,
)

_SIZES = ["T", "S", "L", "N", "H", "HV"]


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def prepare(
    q, k, a, beta, g, runs, lowers, m, p, bounds, offsets, units, T, S, L, N, H, HV,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SIDE: tl.constexpr, LANES: tl.constexpr,
    PACKED: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, EARLY: tl.constexpr, ERASE: tl.constexpr,
    CUT: tl.constexpr, PRECISION: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """M and P of every chunk, its cumulative gates; CUT and GATED: the log of a bound on how far the chunk's map
    stretches a state."""
    pid = tl.program_id(0).to(tl.int64)
    head, first, rows, index = chunk_span(offsets, units, pid, T, S, L, N, HV, C, PACKED)
    if rows <= 0:
        return
    key = head // (HV // H)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    scores = tl.zeros([C, C], dtype=tl.float32)
    lower = tl.zeros([C, C], dtype=tl.float32)
    length = tl.zeros([C], dtype=tl.float32)
    reader = tl.zeros([C], dtype=tl.float32)
    for left in range(0, K, BK):
        d = left + tl.arange(0, BK)
        keys = load_tile(k, first, rows, d, key, H, K, C)
        queries = load_tile(q, first, rows, d, key, H, K, C)
        if ERASE:
            erase = load_tile(a, first, rows, d, key, H, K, C)
        else:
            erase = keys
        scores += tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        lower += tl.dot(erase, tl.trans(keys), input_precision=PRECISION)
        if CUT and GATED and ERASE:
            length += tl.sum(keys.to(tl.float32) * keys, 1)
            reader += tl.sum(erase.to(tl.float32) * erase, 1)
    strength = strengths(beta, first, rows, head, HV, C, WEIGHTED)
    run, seen = chunk_gates(g, runs, first, rows, head, HV, C, GATED, EARLY, 1.0)
    if CUT and GATED:
        product = tl.sum(tl.where(i == j, lower, 0.0), 1)
        if ERASE:
            log = stretch(length, reader, product, strength)
        else:
            log = stretch(product, product, product, strength)
        total = tl.min(run, 0)  # the last, since gates are logs of at most 1
        tl.store(bounds + index, total + tl.sum(log, 0))
    square = i * C + j
    lowers += index * C * C
    lower = lower * decay(seen[:, None], run[None, :], i > j)
    tl.store(lowers + square, strength[:, None] * lower)
    scores = scores * decay(run[:, None], run[None, :], i >= j)
    tl.store(p + index * C * C + square, scores.to(p.dtype.element_ty))
    tl.debug_barrier()
    invert(lowers, m + index * C * C, C, SIDE, LANES, MERGE)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def scan(
    q, k, a, v, beta, runs, spans, m, p, start, o, final, maps, states, written, offsets,
    T, S, L, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, EARLY: tl.constexpr, ERASE: tl.constexpr,
    STARTED: tl.constexpr, MODE: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Serial over the chunks of one unit for one head and one block of values.

    MODE "output": o and the final state; "record": each X and u; "map": b and W of the segments' maps X -> W X + b, but
    for b of an entry's last segment, W of its first where no state comes in, and W that is zero by `spans`. COLUMNS: m
    holds beta^-1 M beta, the inverse with the strengths on the columns of the triangle.
    """
    VALUES: tl.constexpr = (V + BV - 1) // BV
    PARTS: tl.constexpr = VALUES + ((K + BV - 1) // BV if MODE == "map" else 0)
    pid = tl.program_id(0).to(tl.int64)
    part = (pid % PARTS).to(tl.int32)
    head = pid // PARTS % HV
    unit = pid // PARTS // HV
    key = head // (HV // H)
    first, end = unit_span(offsets, unit, T, S, L, PACKED)
    origin, step = chunk_origin(first, unit, head, N, HV, C, PACKED)
    d = tl.arange(0, BK)
    e = part * BV + tl.arange(0, BV)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    square = i * C + j
    block = d[:, None] * V + e[None, :]
    within = (d < K)[:, None] & (e < V)[None, :]
    if MODE == "map":
        segment = unit % S
        if part < VALUES and segment == S - 1:
            return
        if part >= VALUES and segment == 0 and not STARTED:
            return
    if STARTED and MODE != "map":
        state = load_state(start, unit * HV + head, d, e, K, V)
    else:
        state = tl.zeros([BK, BV], dtype=tl.float32)
    if MODE == "map":
        column = e - VALUES * BV  # of the identity; past the last column of v, where values read as zero
        state = tl.where((d[:, None] == column[None, :]) & (d < K)[:, None], 1.0, state)
    chunks = ((end - first + C - 1) // C).to(tl.int32)
    begin = 0
    if MODE == "map" and GATED:
        span = tl.load(spans + (unit * HV + head) * 2)
        if part >= VALUES and span <= N:
            return
        begin = tl.maximum(chunks - span, 0)
    for n in range(begin, chunks):
        here = first + n * C
        rows = tl.minimum(end - here, C).to(tl.int32)
        index = origin + n * step
        keys = load_tile(k, here, rows, d, key, H, K, C)
        if ERASE:
            erase = load_tile(a, here, rows, d, key, H, K, C)
        else:
            erase = keys
        values = load_tile(v, here, rows, e, head, HV, V, C)
        solve = tl.load(m + index * C * C + square)
        strength = strengths(beta, here, rows, head, HV, C, WEIGHTED)
        run, seen, total = gates(runs, here, rows, head, HV, C, GATED, EARLY)
        old = state.to(keys.dtype)
        if MODE == "record":
            tl.store(states + index * K * V + block, old, mask=within)
        missing = values - tl.exp(seen)[:, None] * tl.dot(erase, old, input_precision=PRECISION)
        if COLUMNS:
            u = strength[:, None] * tl.dot(solve, missing.to(keys.dtype), input_precision=PRECISION)
        else:
            u = tl.dot(solve, (strength[:, None] * missing).to(keys.dtype), input_precision=PRECISION)
        if MODE == "record":
            store_tile(written, u, here, rows, e, head, HV, V, C)
        if MODE == "output":
            queries = load_tile(q, here, rows, d, key, H, K, C)
            scores = tl.load(p + index * C * C + square)
            out = tl.exp(run)[:, None] * tl.dot(queries, old, input_precision=PRECISION)
            out += tl.dot(scores, u.to(keys.dtype), input_precision=PRECISION)
            store_tile(o, out, here, rows, e, head, HV, V, C)
        kept = (tl.exp(total - run)[:, None] * u).to(keys.dtype)
        if GATED:
            state *= tl.exp(total)
        state += tl.dot(tl.trans(keys), kept, input_precision=PRECISION)
    if MODE == "map":
        if part < VALUES:
            store_state(final, state, unit * HV + head, d, e, K, V)
        else:
            store_state(maps, state, unit * HV + head, d, column, K, K)
    if MODE == "output":
        store_state(final, state, unit * HV + head, d, e, K, V)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def reverse(
    q, k, a, beta, runs, spans, m, p, do, dfinal, dstates, dwritten, dstart, offsets,
    T, S, L, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, EARLY: tl.constexpr, ERASE: tl.constexpr,
    STARTED: tl.constexpr, RECORD: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Serial over chunks from the last: dX' of every chunk and r, and the gradient of the first state.

    Without RECORD only the latter, for all segments of an entry but the first. COLUMNS: as in `scan`, without RECORD.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    head = pid // PARTS % HV
    unit = pid // PARTS // HV
    key = head // (HV // H)
    first, end = unit_span(offsets, unit, T, S, L, PACKED)
    origin, step = chunk_origin(first, unit, head, N, HV, C, PACKED)
    d = tl.arange(0, BK)
    e = (pid % PARTS).to(tl.int32) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    square = i * C + j
    block = d[:, None] * V + e[None, :]
    within = (d < K)[:, None] & (e < V)[None, :]
    if not RECORD and unit % S == 0:
        return
    if STARTED:
        grad = load_state(dfinal, unit * HV + head, d, e, K, V)
    else:
        grad = tl.zeros([BK, BV], dtype=tl.float32)
    chunks = ((end - first + C - 1) // C).to(tl.int32)
    if not RECORD and GATED:
        chunks = tl.minimum(chunks, tl.load(spans + (unit * HV + head) * 2 + 1))
    for back in range(chunks):
        n = chunks - 1 - back
        here = first + n * C
        rows = tl.minimum(end - here, C).to(tl.int32)
        index = origin + n * step
        keys = load_tile(k, here, rows, d, key, H, K, C)
        queries = load_tile(q, here, rows, d, key, H, K, C)
        if ERASE:
            erase = load_tile(a, here, rows, d, key, H, K, C)
        else:
            erase = keys
        dout = load_tile(do, here, rows, e, head, HV, V, C)
        solve = tl.load(m + index * C * C + square)
        scores = tl.load(p + index * C * C + square)
        strength = strengths(beta, here, rows, head, HV, C, WEIGHTED)
        run, seen, total = gates(runs, here, rows, head, HV, C, GATED, EARLY)
        later = grad.to(keys.dtype)
        du = tl.exp(total - run)[:, None] * tl.dot(keys, later, input_precision=PRECISION)
        du += tl.dot(tl.trans(scores), dout, input_precision=PRECISION)
        if COLUMNS:
            du = strength[:, None] * du
        r = tl.dot(tl.trans(solve), du.to(keys.dtype), input_precision=PRECISION)
        if RECORD:
            tl.store(dstates + index * K * V + block, later, mask=within)
            store_tile(dwritten, r, here, rows, e, head, HV, V, C)
        if GATED:
            grad *= tl.exp(total)
        reached = (tl.exp(run)[:, None] * dout).to(keys.dtype)
        grad += tl.dot(tl.trans(queries), reached, input_precision=PRECISION)
        if COLUMNS:
            erased = (-tl.exp(seen)[:, None] * r).to(keys.dtype)
        else:
            erased = (-(strength * tl.exp(seen))[:, None] * r).to(keys.dtype)
        grad += tl.dot(tl.trans(erase), erased, input_precision=PRECISION)
    store_state(dstart, grad, unit * HV + head, d, e, K, V)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def gradients(
    q, k, a, v, beta, g, runs, do, states, dstates, written, dwritten, dq, dk, da, dv, dbeta, dg,
    offsets, units, T, S, L, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, EARLY: tl.constexpr, ERASE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks at once: every gradient of a token from X, dX', u and r; those of q, k, a by value head."""
    pid = tl.program_id(0).to(tl.int64)
    head, first, rows, index = chunk_span(offsets, units, pid, T, S, L, N, HV, C, PACKED)
    if rows <= 0:
        return
    key = head // (HV // H)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    strength = strengths(beta, first, rows, head, HV, C, WEIGHTED)
    run, seen, total = gates(runs, first, rows, head, HV, C, GATED, EARLY)
    dscores = tl.zeros([C, C], dtype=tl.float32)
    dlower = tl.zeros([C, C], dtype=tl.float32)
    dstrength = tl.zeros([C], dtype=tl.float32)
    for at in range(0, V, BV):
        e = at + tl.arange(0, BV)
        dout = load_tile(do, first, rows, e, head, HV, V, C)
        u = load_tile(written, first, rows, e, head, HV, V, C)
        r = load_tile(dwritten, first, rows, e, head, HV, V, C)
        dscores += tl.dot(dout, tl.trans(u), input_precision=PRECISION)
        dlower += tl.dot(r, tl.trans(u), input_precision=PRECISION)
        if WEIGHTED:
            values = load_tile(v, first, rows, e, head, HV, V, C)
            dstrength += tl.sum(r.to(tl.float32) * values, 1)
        store_tile(dv, strength[:, None] * r, first, rows, e, head, HV, V, C)
    kind = q.dtype.element_ty
    dscores = (dscores * decay(run[:, None], run[None, :], i >= j)).to(kind)
    dlower = -dlower * decay(seen[:, None], run[None, :], i > j)
    scaled = (strength[:, None] * dlower).to(kind)
    reach, reread = tl.exp(run)[:, None], tl.exp(seen)[:, None]
    keep = tl.exp(total - run)[:, None]

    out_dots = tl.zeros([C], dtype=tl.float32)  # q . dq, all of which sees G
    read_dots = tl.zeros([C], dtype=tl.float32)  # a . da, all of which sees R
    write_dots = tl.zeros([C], dtype=tl.float32)  # k . dk as the key of a write, which sees -G
    last = 0.0
    for left in tl.static_range(0, K, BK):
        d = left + tl.arange(0, BK)
        from_out = tl.zeros([C, BK], dtype=tl.float32)
        from_read = tl.zeros([C, BK], dtype=tl.float32)
        from_write = tl.zeros([C, BK], dtype=tl.float32)
        both = tl.zeros([BK], dtype=tl.float32)
        for at in range(0, V, BV):
            e = at + tl.arange(0, BV)
            block = d[:, None] * V + e[None, :]
            within = (d < K)[:, None] & (e < V)[None, :]
            dout = load_tile(do, first, rows, e, head, HV, V, C)
            u = load_tile(written, first, rows, e, head, HV, V, C)
            r = load_tile(dwritten, first, rows, e, head, HV, V, C)
            state = tl.load(states + index * K * V + block, mask=within, other=0.0)
            grad = tl.load(dstates + index * K * V + block, mask=within, other=0.0)
            from_out += tl.dot(dout, tl.trans(state), input_precision=PRECISION)
            from_read += tl.dot(r, tl.trans(state), input_precision=PRECISION)
            from_write += tl.dot(u, tl.trans(grad), input_precision=PRECISION)
            if GATED:
                both += tl.sum(state.to(tl.float32) * grad, 1)
        keys = load_tile(k, first, rows, d, key, H, K, C)
        queries = load_tile(q, first, rows, d, key, H, K, C)
        if ERASE:
            erase = load_tile(a, first, rows, d, key, H, K, C)
        else:
            erase = keys
        dquery = reach * from_out + tl.dot(dscores, keys, input_precision=PRECISION)
        store_tile(dq, dquery, first, rows, d, head, HV, K, C)
        from_read = reread * from_read
        if WEIGHTED:
            alone = tl.dot(dlower.to(kind), keys, input_precision=PRECISION) - from_read
            dstrength += tl.sum(erase * alone, 1)
        derase = tl.dot(scaled, keys, input_precision=PRECISION) - strength[:, None] * from_read
        from_write = keep * from_write
        dkey = from_write + tl.dot(tl.trans(dscores), queries, input_precision=PRECISION)
        dkey += tl.dot(tl.trans(scaled), erase, input_precision=PRECISION)
        if ERASE:
            store_tile(da, derase, first, rows, d, head, HV, K, C)
            store_tile(dk, dkey, first, rows, d, head, HV, K, C)
        else:
            store_tile(dk, dkey + derase, first, rows, d, head, HV, K, C)
        if GATED:
            out_dots += tl.sum(queries * dquery, 1)
            read_dots += tl.sum(erase * derase, 1)
            write_dots += tl.sum(keys * dkey, 1)
        if GATED:
            last += tl.sum(tl.sum(keys * from_write, 1), 0) + tl.exp(total) * tl.sum(both, 0)
    if WEIGHTED:
        store_line(dbeta, dstrength, first, rows, head, HV, C)
    if GATED:
        dlog = later_sum(out_dots - write_dots, C, True) + later_sum(read_dots, C, not EARLY) + last
        alive = load_line(g, first, rows, head, HV, C) > -100.0
        store_line(dg, tl.where(alive, dlog, 0.0), first, rows, head, HV, C)
