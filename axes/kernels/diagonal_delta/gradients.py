"""Gradients of all tokens from what the passes left, device side; shapes as in `pairs`."""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import load_line, load_tile, slot_rows, store_line, store_tile
from axes.kernels.diagonal.channels import add_up, after, load_logs, met, power, split, until
from axes.kernels.diagonal_delta.pairs import LENGTHS, decays, least_total, some_closed


@triton.jit
def _of_block(
    q, a, y, z, v, beta, g, totals, do, states, dstates, written, dwritten,
    dq, da, dy, dz, dbeta, dg, pid, part, first, count, tokens, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TWO: tl.constexpr, LATE: tl.constexpr, SHARED: tl.constexpr, OPEN: tl.constexpr,
    PARTS: tl.constexpr, SUMS: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of channels of one chunk. First the pairs' gradients, then readers, then writers, so that few sums live
    at a time."""
    head = pid % HV
    totals += pid * K
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    states += pid * K * V
    dstates += pid * K * V

    # pairs
    scores = tl.zeros([C, C], dtype=tl.float32)
    lower = tl.zeros([C, C], dtype=tl.float32)
    scores2 = tl.zeros([C, C], dtype=tl.float32)
    lower2 = tl.zeros([C, C], dtype=tl.float32)
    push = tl.zeros([C], dtype=tl.float32)
    for left in range(0, V, BV):
        e = left + tl.arange(0, BV)
        dout = load_tile(do, first, count, e, head, HV, V, C)
        r = load_tile(dwritten, first, count, e, head, HV, V, C)
        u = tl.trans(load_tile(written, first, count, e, head, HV, V, C))
        values = load_tile(v, first, count, e, head, HV, V, C)
        scores += tl.dot(dout, u, input_precision=PRECISION)
        lower += tl.dot(r, u, input_precision=PRECISION)
        if TWO:
            scores2 += tl.dot(dout, tl.trans(values), input_precision=PRECISION)
            lower2 += tl.dot(r, tl.trans(values), input_precision=PRECISION)
        else:
            push += tl.where(part == 0, tl.sum(r.to(tl.float32) * values, 1), 0.0)
    kind = do.dtype.element_ty
    inside = tl.where(i >= j, scores, 0.0).to(kind)
    strict = tl.where(i > j, lower, 0.0).to(kind)
    none = tl.zeros([C, C], dtype=kind)
    if TWO:
        inside2 = tl.where(i >= j, scores2, 0.0).to(kind)
        strict2 = tl.where(i > j, lower2, 0.0).to(kind)
    else:
        strength = -load_line(beta, first, count, head, HV, C)[:, None]

    d = (part * BK).to(tl.int32) + tl.arange(0, BK)
    far = power(tl.load(totals + d, mask=d < K, other=0.0))

    # readers
    dquery = tl.zeros([C, BK], dtype=tl.float32)
    dread = tl.zeros([C, BK], dtype=tl.float32)
    for left in range(0, V, BV):
        e = left + tl.arange(0, BV)
        within = (e < V)[:, None] & (d < K)[None, :]
        state = tl.load(states + e[:, None] * K + d[None, :], mask=within, other=0.0)
        dquery += tl.dot(load_tile(do, first, count, e, head, HV, V, C), state, input_precision=PRECISION)
        dread += tl.dot(load_tile(dwritten, first, count, e, head, HV, V, C), state, input_precision=PRECISION)
    high, middle, low = split(load_logs(g, first, count, d, head, HV, K, C), PARTS)
    source = head // (HV // H)
    writer = load_tile(y, first, count, d, source, H, K, C)
    if TWO:
        value = load_tile(z, first, count, d, source, H, K, C)
    if OPEN:
        rise = until(high, middle, low, C, False, PARTS)
        loss = power(-rise)
        rise = power(rise)
        gain = rise if LATE else power(until(high, middle, low, C, True, PARTS))
        down = (writer * loss).to(kind)
        dquery += tl.dot(inside, down, input_precision=PRECISION)
        dread += tl.dot(strict, down, input_precision=PRECISION)
        if TWO:
            down = (value * loss).to(kind)
            dquery += tl.dot(inside2, down, input_precision=PRECISION)
            dread += tl.dot(strict2, down, input_precision=PRECISION)
        dquery *= rise
        dread *= gain
    else:
        reach = power(until(high, middle, low, C, False, PARTS))
        dquery *= reach
        if not LATE:
            reach = power(until(high, middle, low, C, True, PARTS))
        dread *= reach
        size = tl.full([], C, tl.int32)
        while size > 0:
            rise, gain, loss, flat = decays(high, middle, low, size, C, LATE, PARTS, FLAT)
            pair = met(size, flat, C, False)
            down = (writer * loss).to(kind)
            dquery += rise * tl.dot(tl.where(pair, inside, none), down, input_precision=PRECISION)
            dread += gain * tl.dot(tl.where(pair, strict, none), down, input_precision=PRECISION)
            if TWO:
                down = (value * loss).to(kind)
                dquery += rise * tl.dot(tl.where(pair, inside2, none), down, input_precision=PRECISION)
                dread += gain * tl.dot(tl.where(pair, strict2, none), down, input_precision=PRECISION)
            size = tl.where(flat, 0, size // 2)
    query = load_tile(q, first, count, d, source, H, K, C)
    reader = writer if SHARED else load_tile(a, first, count, d, source, H, K, C)
    store_tile(dq, dquery, first, count, d, head, HV, K, C)
    change = query * dquery
    if not TWO:
        push -= tl.sum(reader * dread, 1)
        dread *= strength
    before = reader * dread
    change += before
    if not SHARED:
        store_tile(da, dread, first, count, d, head, HV, K, C)

    # writers: what pairs give, then what the chunk's end gives
    if OPEN:
        up = (query * rise).to(kind)
        read = (reader * gain).to(kind) if TWO else (strength * reader * gain).to(kind)
        dwrite = tl.dot(tl.trans(inside), up, input_precision=PRECISION)
        dwrite += tl.dot(tl.trans(strict), read, input_precision=PRECISION)
        dwrite *= loss
        if TWO:
            dvalue = tl.dot(tl.trans(inside2), up, input_precision=PRECISION)
            dvalue += tl.dot(tl.trans(strict2), read, input_precision=PRECISION)
            dvalue *= loss
    else:
        dwrite = tl.zeros([C, BK], dtype=tl.float32)
        dvalue = tl.zeros([C, BK], dtype=tl.float32)
        size = tl.full([], C, tl.int32)
        while size > 0:
            rise, gain, loss, flat = decays(high, middle, low, size, C, LATE, PARTS, FLAT)
            pair = met(size, flat, C, False)
            up = (query * rise).to(kind)
            read = (reader * gain).to(kind) if TWO else (strength * reader * gain).to(kind)
            behind = tl.dot(tl.trans(tl.where(pair, inside, none)), up, input_precision=PRECISION)
            behind += tl.dot(tl.trans(tl.where(pair, strict, none)), read, input_precision=PRECISION)
            dwrite += loss * behind
            if TWO:
                behind = tl.dot(tl.trans(tl.where(pair, inside2, none)), up, input_precision=PRECISION)
                behind += tl.dot(tl.trans(tl.where(pair, strict2, none)), read, input_precision=PRECISION)
                dvalue += loss * behind
            size = tl.where(flat, 0, size // 2)
    change -= writer * dwrite
    if SHARED:
        dwrite += dread
    if TWO:
        change -= value * dvalue
    kept = power(after(high, middle, low, C, PARTS))
    both = tl.zeros([BK], dtype=tl.float32)
    late = tl.zeros([C, BK], dtype=tl.float32)
    for left in range(0, V, BV):
        e = left + tl.arange(0, BV)
        within = (e < V)[:, None] & (d < K)[None, :]
        state = tl.load(states + e[:, None] * K + d[None, :], mask=within, other=0.0)
        grad = tl.load(dstates + e[:, None] * K + d[None, :], mask=within, other=0.0)
        both += tl.sum(state.to(tl.float32) * grad, 0)
        late += tl.dot(load_tile(written, first, count, e, head, HV, V, C), grad, input_precision=PRECISION)
    late *= kept
    store_tile(dy, dwrite + late, first, count, d, head, HV, K, C)
    late *= writer
    change -= late
    last = tl.sum(late, 0)
    if TWO:
        late = tl.zeros([C, BK], dtype=tl.float32)
        for left in range(0, V, BV):
            e = left + tl.arange(0, BV)
            within = (e < V)[:, None] & (d < K)[None, :]
            grad = tl.load(dstates + e[:, None] * K + d[None, :], mask=within, other=0.0)
            late += tl.dot(load_tile(v, first, count, e, head, HV, V, C), grad, input_precision=PRECISION)
        late *= kept
        store_tile(dz, dvalue + late, first, count, d, head, HV, K, C)
        late *= value
        change -= late
        last += tl.sum(late, 0)
    # a token's gate scales what is read and written from it on, and what reaches the chunk's end, <X', dX'>
    high, middle, low = split(change, SUMS)
    dlog = add_up(i <= j, high, middle, low, SUMS) + (far * both + last)[None, :]
    if not LATE:  # its own reader came before it
        dlog -= before
    log = load_logs(g, first, count, d, head, HV, K, C)
    store_tile(dg, tl.where(log > -100.0, dlog, 0.0), first, count, d, head, HV, K, C)
    if not TWO:
        store_line(dbeta + part * tokens * HV, push, first, count, head, HV, C)


@triton.jit
def _of_chunk(
    q, a, y, z, v, beta, g, totals, falls, do, states, dstates, written, dwritten,
    dq, da, dy, dz, dbeta, dg, offsets, units, place, tokens, T, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FALL: tl.constexpr,
    TWO: tl.constexpr, LATE: tl.constexpr, SHARED: tl.constexpr, OPEN: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, SUMS: tl.constexpr, BOUND: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of channels, if its chunk is there and its gates are as OPEN says."""
    parts: tl.constexpr = (K + BK - 1) // BK
    part = place % parts
    pid = place // parts
    _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
    if first < end:
        mild = least_total(falls, pid, K, FALL) >= -BOUND
        if mild == OPEN:
            _of_block(
                q, a, y, z, v, beta, g, totals, do, states, dstates, written, dwritten, dq, da, dy, dz, dbeta, dg,
                pid, part, first, (end - first).to(tl.int32), tokens, H, HV,
                K, V, C, BK, BV, TWO, LATE, SHARED, OPEN, PARTS, SUMS, FLAT, PRECISION,
            )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=[*LENGTHS, "H", "tokens", "chunks"])
def gradients(
    q, a, y, z, v, beta, g, totals, falls, do, states, dstates, written, dwritten,
    dq, da, dy, dz, dbeta, dg, offsets, units, tokens, T, N, H, HV, chunks,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FALL: tl.constexpr,
    LOOK: tl.constexpr,
    TWO: tl.constexpr, LATE: tl.constexpr, SHARED: tl.constexpr, OPEN: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, SUMS: tl.constexpr, BOUND: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks at once: every gradient of a token but dv, from X, dX', u and r.

    Of chunks with mild gates if OPEN, a block of channels a program; else of the others, LOOK of all blocks a program.
    SHARED: the reader is the writer (a = k), whose gradients are added. dbeta comes in one part a block of channels.
    """
    place = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (K + BK - 1) // BK
    if OPEN:
        _of_chunk(
            q, a, y, z, v, beta, g, totals, falls, do, states, dstates, written, dwritten,
            dq, da, dy, dz, dbeta, dg, offsets, units, place, tokens, T, N, H, HV,
            K, V, C, BK, BV, FALL, TWO, LATE, SHARED, OPEN, PACKED, PARTS, SUMS, BOUND, FLAT, PRECISION,
        )  # fmt: skip
    elif some_closed(falls, chunks, parts, LOOK, BOUND, K, FALL):
        for turn in tl.range(LOOK, disable_licm=True):  # what is the same in every turn would be held, and spill
            at = place + turn * tl.num_programs(0)
            if at < chunks * parts:
                _of_chunk(
                    q, a, y, z, v, beta, g, totals, falls, do, states, dstates, written, dwritten,
                    dq, da, dy, dz, dbeta, dg, offsets, units, at, tokens, T, N, H, HV,
                    K, V, C, BK, BV, FALL, TWO, LATE, SHARED, OPEN, PACKED, PARTS, SUMS, BOUND, FLAT, PRECISION,
                )  # fmt: skip
