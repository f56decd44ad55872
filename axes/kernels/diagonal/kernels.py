"""Kernels of the chain with a gate for every key entry: states of chunks, outputs, gradients, device side.

Tokens (tokens, H or HV, D), public states (units, HV, V, K), those of chunks (slots, HV, V, K), P (slots, HV, C, C).
The mathematics is in `axes.kernels.diagonal.chain`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import (
    accumulate,
    complement,
    first_slot,
    load_line,
    load_tile,
    slot_rows,
    store_line,
    store_tile,
    unit_rows,
)
from axes.kernels.diagonal.channels import (
    add_up,
    factors,
    load_logs,
    met,
    pairs,
    pairs_backward,
    power,
    split,
    until,
    written,
)

_LENGTHS = ["T", "N", "H", "HV"]  # one compilation for all of them


@Kernel
@triton.jit(do_not_specialize=_LENGTHS)
def scan(
    x, y, beta, g, states, totals, start, last, offsets, T, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, STARTED: tl.constexpr, STRONG: tl.constexpr, AVERAGE: tl.constexpr, BONUS: tl.constexpr,
    PACKED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Serial over the chunks of one head, one block of keys and values: the states before every chunk and the last.

    Forward x = k, y = v, and the totals of the logs; REVERSE x = q, y = do: the gradients of the states after every
    chunk and of the start.
    """
    pid = tl.program_id(0).to(tl.int64)
    v_parts: tl.constexpr = (V + BV - 1) // BV
    k_parts: tl.constexpr = (K + BK - 1) // BK
    d = (pid % k_parts) * BK + tl.arange(0, BK)
    e = (pid // k_parts % v_parts) * BV + tl.arange(0, BV)
    pid = pid // (k_parts * v_parts)
    head, unit = pid % HV, pid // HV
    first, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(first, unit, N, C, PACKED)
    chunks = ((end - first + C - 1) // C).to(tl.int32)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    within = (e < V)[:, None] & (d < K)[None, :]
    tile = e[:, None] * K + d[None, :]
    public = (unit * HV + head) * V * K + tile
    if STARTED:
        state = tl.load(start + public, mask=within, other=0.0).to(tl.float32)
    else:
        state = tl.zeros([BV, BK], dtype=tl.float32)
    for step in tl.range(chunks):
        if REVERSE:
            n = chunks - 1 - step
        else:
            n = step
        at = first + n.to(tl.int64) * C
        count = tl.minimum(end - at, C).to(tl.int32)
        tl.store(states + ((slot + n) * HV + head) * V * K + tile, state.to(states.dtype.element_ty), mask=within)
        keys = load_tile(x, at, count, d, head // (HV // H), H, K, C, "rows")
        values = load_tile(y, at, count, e, head, HV, V, C, "rows")
        log = load_logs(g, at, count, d, head, HV, K, C, "rows")
        high, middle, low = split(log, PARTS)
        if not REVERSE:
            keys = written(keys, log, AVERAGE)
        if STRONG:
            values = (load_line(beta, at, count, head, HV, C)[:, None] * values).to(y.dtype.element_ty)
        if REVERSE:
            reach = until(high, middle, low, C, BONUS, PARTS)
        else:
            reach = add_up(i < j, high, middle, low, PARTS)
        total = tl.sum(log, 0)
        if not REVERSE:
            tl.store(totals + ((slot + n) * HV + head) * K + d, total, mask=d < K)
        state *= power(total)[None, :]
        state = accumulate(state, values, (keys * power(reach)).to(x.dtype.element_ty), PRECISION)
    tl.store(last + public, state, mask=within)


@triton.jit
def _is_deep(totals, K: tl.constexpr, MILD: tl.constexpr):
    """Whether a channel of a chunk decays by more than e^-MILD; else e^G and e^-G serve every exponent."""
    d = tl.arange(0, triton.next_power_of_2(K))
    total = tl.load(totals + d, mask=d < K, other=0.0)
    return (tl.min(total, 0) >= -MILD) == 0


@triton.jit
def _any_deep(totals, pid, programs, K: tl.constexpr, PER: tl.constexpr, GROUP: tl.constexpr, MILD: tl.constexpr):
    """Whether one of the GROUP programs from pid on, PER a chunk, has a deep chunk."""
    d = tl.arange(0, triton.next_power_of_2(K))
    n = pid + tl.arange(0, GROUP)
    seen = (n < programs)[:, None] & (d < K)[None, :]
    total = tl.load(totals + (n // PER * K)[:, None] + d[None, :], mask=seen, other=0.0)
    return (tl.min(tl.min(total, 1), 0) >= -MILD) == 0


@triton.jit
def _output(
    pid, q, k, v, beta, bonus, g, totals, states, scores, o, offsets, units, T, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STRONG: tl.constexpr, AVERAGE: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr,
    BOUND: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr, DEEP: tl.constexpr, KEEP: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """P, if it is to KEEP, and one block of values of o of one chunk, mild or DEEP; nothing if it is the other.

    ADD: o already holds what is read from the chunk's first state.  BONUS: tokens are read before their own gate and
    write, and of those (bonus * k_t) . q_t.
    """
    v_parts: tl.constexpr = (V + BV - 1) // BV
    part = (pid % v_parts).to(tl.int32)
    head = pid // v_parts % HV
    slot = pid // (v_parts * HV)
    _, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    matrix = slot * HV + head
    if (first < end) & (_is_deep(totals + matrix * K, K, MILD) == DEEP):
        count = (end - first).to(tl.int32)
        shared = head // (HV // H)
        e = part * BV + tl.arange(0, BV)
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        out = tl.zeros([C, BV], dtype=tl.float32)
        p = tl.zeros([C, C], dtype=tl.float32)
        own = tl.zeros([C], dtype=tl.float32)
        for left in range(0, K, BK):
            d = left + tl.arange(0, BK)
            log = load_logs(g, first, count, d, head, HV, K, C, "rows")
            queries = load_tile(q, first, count, d, shared, H, K, C, "rows")
            keys = written(load_tile(k, first, count, d, shared, H, K, C, "rows"), log, AVERAGE)
            high, middle, low = split(log, PARTS)
            if not ADD or not DEEP:
                reach = until(high, middle, low, C, BONUS, PARTS)
                reader = (queries * power(reach)).to(q.dtype.element_ty)
            if not ADD:
                at = states + matrix * V * K + e[:, None] * K + d[None, :]
                state = tl.load(at, mask=(e < V)[:, None] & (d < K)[None, :], other=0.0)
                out += tl.dot(reader, tl.trans(state), input_precision=PRECISION)
            if DEEP:
                p += pairs(queries, keys, high, middle, low, C, BONUS, BONUS, PARTS, BOUND, PRECISION)
            else:
                run = reach
                if BONUS:
                    run = until(high, middle, low, C, False, PARTS)
                writer = (keys * power(-run)).to(q.dtype.element_ty)
                p += tl.dot(reader, tl.trans(writer), input_precision=PRECISION)
            if BONUS:
                weight = tl.load(bonus + head * K + d, mask=d < K, other=0.0)[None, :]
                own += tl.sum(queries.to(tl.float32) * keys * weight, 1)
        if BONUS:
            p = tl.where(i == j, own[:, None], p)
        values = load_tile(v, first, count, e, head, HV, V, C, "rows")
        if STRONG:
            values = (load_line(beta, first, count, head, HV, C)[:, None] * values).to(v.dtype.element_ty)
        kept = tl.where(i >= j, p, 0.0).to(q.dtype.element_ty)
        if KEEP and part == 0:
            tl.store(scores + matrix * C * C + i * C + j, kept)
        out += tl.dot(kept, values, input_precision=PRECISION)
        if ADD:
            out += load_tile(o, first, count, e, head, HV, V, C, "rows")
        store_tile(o, out, first, count, e, head, HV, V, C, "rows")


@Kernel
@triton.jit(do_not_specialize=[*_LENGTHS, "programs"])
def outputs(
    q, k, v, beta, bonus, g, totals, states, scores, o, offsets, units, T, N, H, HV, programs,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STRONG: tl.constexpr, AVERAGE: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr,
    BOUND: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr, DEEP: tl.constexpr, GROUP: tl.constexpr,
    KEEP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """All mild chunks at once, or GROUP by GROUP those that are not: P and o."""
    pid = tl.program_id(0).to(tl.int64) * GROUP
    if GROUP == 1:
        _output(
            pid, q, k, v, beta, bonus, g, totals, states, scores, o, offsets, units, T, N, H, HV,
            K, V, C, BK, BV, STRONG, AVERAGE, BONUS, PACKED, PARTS, BOUND, MILD, PRECISION, DEEP, KEEP, ADD,
        )  # fmt: skip
    elif _any_deep(totals, pid, programs, K, (V + BV - 1) // BV, GROUP, MILD):
        for n in range(GROUP):
            if pid + n < programs:
                _output(
                    pid + n, q, k, v, beta, bonus, g, totals, states, scores, o, offsets, units, T, N, H, HV,
                    K, V, C, BK, BV, STRONG, AVERAGE, BONUS, PACKED, PARTS, BOUND, MILD, PRECISION, DEEP, KEEP,
                    ADD,
                )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=[*_LENGTHS, "tokens"])
def values(
    k, v, beta, g, scores, do, dstates, dv, dbeta, tokens, offsets, units, T, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STRONG: tl.constexpr, AVERAGE: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks at once: one block of values of dv and its share of dbeta."""
    pid = tl.program_id(0).to(tl.int64)
    v_parts: tl.constexpr = (V + BV - 1) // BV
    part = (pid % v_parts).to(tl.int32)
    head = pid // v_parts % HV
    slot = pid // (v_parts * HV)
    _, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    if first < end:
        count = (end - first).to(tl.int32)
        shared = head // (HV // H)
        matrix = slot * HV + head
        e = part * BV + tl.arange(0, BV)
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        p = tl.load(scores + matrix * C * C + i * C + j)
        dout = load_tile(do, first, count, e, head, HV, V, C, "rows")
        du = tl.dot(tl.trans(p), dout, input_precision=PRECISION)
        for left in range(0, K, BK):
            d = left + tl.arange(0, BK)
            log = load_logs(g, first, count, d, head, HV, K, C, "rows")
            keys = written(load_tile(k, first, count, d, shared, H, K, C, "rows"), log, AVERAGE)
            at = dstates + matrix * V * K + e[:, None] * K + d[None, :]
            grad = tl.load(at, mask=(e < V)[:, None] & (d < K)[None, :], other=0.0)
            high, middle, low = split(log, PARTS)
            kept = (keys * power(add_up(i < j, high, middle, low, PARTS))).to(k.dtype.element_ty)
            du += tl.dot(kept, tl.trans(grad), input_precision=PRECISION)
        if STRONG:
            values = load_tile(v, first, count, e, head, HV, V, C, "rows")
            store_line(dbeta + part * tokens * HV, tl.sum(du * values, 1), first, count, head, HV, C)
            du *= load_line(beta, first, count, head, HV, C)[:, None]
        store_tile(dv, du, first, count, e, head, HV, V, C, "rows")


@triton.jit
def _key(
    pid, q, k, v, beta, bonus, g, totals, do, states, dstates, dq, dk, dg, dbonus, offsets, units, T, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STRONG: tl.constexpr, AVERAGE: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr,
    SUMS: tl.constexpr, BOUND: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """One block of keys of dq, dk, dg and a chunk's share of dbonus, mild or DEEP; nothing if it is the other."""
    k_parts: tl.constexpr = (K + BK - 1) // BK
    part = (pid % k_parts).to(tl.int32)
    head = pid // k_parts % HV
    slot = pid // (k_parts * HV)
    _, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    matrix = slot * HV + head
    if (first < end) & (_is_deep(totals + matrix * K, K, MILD) == DEEP):
        count = (end - first).to(tl.int32)
        shared = head // (HV // H)
        d = part * BK + tl.arange(0, BK)
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        dquery = tl.zeros([C, BK], dtype=tl.float32)
        moved = tl.zeros([C, BK], dtype=tl.float32)
        dp = tl.zeros([C, C], dtype=tl.float32)
        both = tl.zeros([BK, BK], dtype=tl.float32)
        for left in range(0, V, BV):
            e = left + tl.arange(0, BV)
            at = matrix * V * K + e[:, None] * K + d[None, :]
            within = (e < V)[:, None] & (d < K)[None, :]
            state = tl.load(states + at, mask=within, other=0.0)
            grad = tl.load(dstates + at, mask=within, other=0.0)
            dout = load_tile(do, first, count, e, head, HV, V, C, "rows")
            values = load_tile(v, first, count, e, head, HV, V, C, "rows")
            if STRONG:
                values = (load_line(beta, first, count, head, HV, C)[:, None] * values).to(v.dtype.element_ty)
            dquery += tl.dot(dout, state, input_precision=PRECISION)
            moved += tl.dot(values, grad, input_precision=PRECISION)
            dp += tl.dot(dout, tl.trans(values), input_precision=PRECISION)
            both += tl.dot(tl.trans(state), grad, input_precision=PRECISION)  # its diagonal: sum_v S dS'
        log = load_logs(g, first, count, d, head, HV, K, C, "rows")
        queries = load_tile(q, first, count, d, shared, H, K, C, "rows")
        plain = load_tile(k, first, count, d, shared, H, K, C, "rows")
        keys = written(plain, log, AVERAGE)
        total = tl.load(totals + matrix * K + d, mask=d < K, other=0.0)
        row, column = tl.arange(0, BK)[:, None], tl.arange(0, BK)[None, :]
        last = power(total) * tl.sum(tl.where(row == column, both, 0.0), 0)
        high, middle, low = split(log, PARTS)
        reach = until(high, middle, low, C, BONUS, PARTS)
        if DEEP:
            inner, dkey = pairs_backward(queries, keys, dp, high, middle, low, C, BONUS, BONUS, PARTS, BOUND, PRECISION)
            dquery = dquery * power(reach) + inner
            moved *= power(add_up(i < j, high, middle, low, PARTS))
        else:
            run, before = reach, i >= j
            if BONUS:
                run, before = until(high, middle, low, C, False, PARTS), i > j
            grow, fade = power(reach), power(-run)
            kept = tl.where(before, dp, 0.0).to(q.dtype.element_ty)
            writer = (keys * fade).to(q.dtype.element_ty)
            dquery = grow * (dquery + tl.dot(kept, writer, input_precision=PRECISION))
            reader = (queries * grow).to(q.dtype.element_ty)
            dkey = fade * tl.dot(tl.trans(kept), reader, input_precision=PRECISION)
            moved *= fade * power(total)[None, :]
        if BONUS:
            down = tl.sum(tl.where(i == j, dp, 0.0), 1)[:, None]
            weight = down * tl.load(bonus + head * K + d, mask=d < K, other=0.0)[None, :]
            asked = dkey + moved + weight * queries
            store_tile(dq, dquery + weight * keys, first, count, d, head, HV, K, C, "rows")
            tl.store(dbonus + matrix * K + d, tl.sum(down * queries * keys, 0), mask=d < K)
        else:
            store_tile(dq, dquery, first, count, d, head, HV, K, C, "rows")
            asked = dkey + moved
        if not AVERAGE:
            store_tile(dk, asked, first, count, d, head, HV, K, C, "rows")
        # sums from a token on are those of the chunk less those before it
        change = queries * dquery - keys * dkey
        last += tl.sum(change, 0)
        change -= keys * moved
        high, middle, low = split(change, SUMS)
        dlog = change - add_up(i >= j, high, middle, low, SUMS) + last[None, :]
        if BONUS:  # a query's own gate comes after it
            dlog -= queries * dquery
        if AVERAGE:  # of what the gate writes
            forgotten = complement(log)
            dlog -= asked * plain * (1.0 - forgotten)
            store_tile(dk, asked * forgotten, first, count, d, head, HV, K, C, "rows")
        if DEEP:
            floored = load_tile(g, first, count, d, head, HV, K, C, "rows").to(tl.float32) <= -100.0
            dlog = tl.where(floored, 0.0, dlog)
        store_tile(dg, dlog, first, count, d, head, HV, K, C, "rows")


@Kernel
@triton.jit(do_not_specialize=[*_LENGTHS, "programs"])
def keys(
    q, k, v, beta, bonus, g, totals, do, states, dstates, dq, dk, dg, dbonus, offsets, units, T, N, H, HV, programs,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STRONG: tl.constexpr, AVERAGE: tl.constexpr, BONUS: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr,
    SUMS: tl.constexpr, BOUND: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr, DEEP: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """All mild chunks at once, or GROUP by GROUP those that are not: dq, dk and dg."""
    pid = tl.program_id(0).to(tl.int64) * GROUP
    if GROUP == 1:
        _key(
            pid, q, k, v, beta, bonus, g, totals, do, states, dstates, dq, dk, dg, dbonus, offsets, units, T, N, H, HV,
            K, V, C, BK, BV, STRONG, AVERAGE, BONUS, PACKED, PARTS, SUMS, BOUND, MILD, PRECISION, DEEP,
        )  # fmt: skip
    elif _any_deep(totals, pid, programs, K, (K + BK - 1) // BK, GROUP, MILD):
        for n in range(GROUP):
            if pid + n < programs:
                _key(
                    pid + n, q, k, v, beta, bonus, g, totals, do, states, dstates, dq, dk, dg, dbonus,
                    offsets, units, T, N, H, HV,
                    K, V, C, BK, BV, STRONG, AVERAGE, BONUS, PACKED, PARTS, SUMS, BOUND, MILD, PRECISION, DEEP,
                )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=["T", "N", "H"])
def rows(
    k, v, do, g, states, dq, offsets, units, T, N, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, AVERAGE: tl.constexpr,
    PACKED: tl.constexpr, PARTS: tl.constexpr, BOUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks at once: one block of keys of dq, which is what a chain with gates on rows reads."""
    pid = tl.program_id(0).to(tl.int64)
    k_parts: tl.constexpr = (K + BK - 1) // BK
    d = (pid % k_parts).to(tl.int32) * BK + tl.arange(0, BK)
    head = pid // k_parts % H
    slot = pid // (k_parts * H)
    _, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    if first < end:
        count = (end - first).to(tl.int32)
        out = tl.zeros([C, BK], dtype=tl.float32)
        dp = tl.zeros([C, C], dtype=tl.float32)
        for left in range(0, V, BV):
            e = left + tl.arange(0, BV)
            at = (slot * H + head) * V * K + e[:, None] * K + d[None, :]
            state = tl.load(states + at, mask=(e < V)[:, None] & (d < K)[None, :], other=0.0)
            dout = load_tile(do, first, count, e, head, H, V, C, "rows")
            values = load_tile(v, first, count, e, head, H, V, C, "rows")
            out += tl.dot(dout, state, input_precision=PRECISION)
            dp += tl.dot(dout, tl.trans(values), input_precision=PRECISION)
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        log = load_logs(g, first, count, d, head, H, K, C, "rows")
        keys = written(load_tile(k, first, count, d, head, H, K, C, "rows"), log, AVERAGE)
        high, middle, low = split(log, PARTS)
        out *= power(add_up(i >= j, high, middle, low, PARTS))
        size = tl.full([], C, tl.int32)
        while size > 0:  # as `pairs_backward`
            reader, writer, flat = factors(high, middle, low, size, C, False, PARTS, BOUND)
            kept = tl.where(met(size, flat, C, False), dp, 0.0).to(keys.dtype)
            out += reader * tl.dot(kept, (keys * writer).to(keys.dtype), input_precision=PRECISION)
            size = tl.where(flat, 0, size // 2)
        store_tile(dq, out, first, count, d, head, H, K, C, "rows")
