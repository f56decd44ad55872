"""The passes over the chunks of a unit, forward and in reverse, device side; shapes as in `pairs`."""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import first_slot, load_line, load_tile, store_tile, unit_rows
from axes.kernels.diagonal.channels import power
from axes.kernels.diagonal_delta.pairs import LENGTHS


@Kernel
@triton.jit(do_not_specialize=LENGTHS)
def scan(
    qs, as_, ys, zs, v, beta, m, p, m2, p2, totals, start, o, final, states, written, offsets, T, N, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TWO: tl.constexpr, STARTED: tl.constexpr, RECORD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Serial over the chunks of one unit, head and block of values: o and the final state, or with RECORD each X, u."""
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (V + BV - 1) // BV
    unit, head = pid // parts // HV, pid // parts % HV
    first, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(first, unit, N, C, PACKED)
    d = tl.arange(0, BK)
    e = (pid % parts) * BV + tl.arange(0, BV)
    square = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    within = (d < K)[:, None] & (e < V)[None, :]
    public = (unit * HV + head) * V * K + e[None, :] * K + d[:, None]
    chunk = e[None, :] * K + d[:, None]
    if STARTED:
        state = tl.load(start + public, mask=within, other=0.0)
    else:
        state = tl.zeros([BK, BV], dtype=tl.float32)
    for n in tl.range(tl.cdiv(end - first, C)):
        here = first + n * C
        rows = tl.minimum(end - here, C).to(tl.int32)
        block = (slot + n) * HV + head
        reader = load_tile(as_, here, rows, d, head, HV, K, C, "nothing")
        writer = load_tile(ys, here, rows, d, head, HV, K, C, "nothing")
        values = load_tile(v, here, rows, e, head, HV, V, C, "nothing")
        solve = tl.load(m + block * C * C + square)
        total = power(tl.load(totals + block * K + d, mask=d < K, other=0.0))
        kind = values.dtype
        old = state.to(kind)
        if RECORD:
            tl.store(states + block * K * V + chunk, old, mask=within)
        seen = tl.dot(reader, old, input_precision=PRECISION)
        if TWO:
            solve2 = tl.load(m2 + block * C * C + square)
            seen += tl.dot(solve2, values, input_precision=PRECISION)
        else:
            seen = load_line(beta, here, rows, head, HV, C)[:, None] * (values - seen)
        u = tl.dot(solve, seen.to(kind), input_precision=PRECISION).to(kind)
        if RECORD:
            store_tile(written, u, here, rows, e, head, HV, V, C, "nothing")
        else:
            query = load_tile(qs, here, rows, d, head, HV, K, C, "nothing")
            scores = tl.load(p + block * C * C + square)
            out = tl.dot(query, old, input_precision=PRECISION)
            out += tl.dot(scores, u, input_precision=PRECISION)
            if TWO:
                scores2 = tl.load(p2 + block * C * C + square)
                out += tl.dot(scores2, values, input_precision=PRECISION)
            store_tile(o, out, here, rows, e, head, HV, V, C, "nothing")
        gain = tl.dot(tl.trans(writer), u, input_precision=PRECISION)
        if TWO:
            writer2 = load_tile(zs, here, rows, d, head, HV, K, C, "nothing")
            gain += tl.dot(tl.trans(writer2), values, input_precision=PRECISION)
        state = tl.fma(state, tl.broadcast_to(total[:, None], [BK, BV]), gain)
    if not RECORD:
        tl.store(final + public, state, mask=within)


@Kernel
@triton.jit(do_not_specialize=LENGTHS)
def reverse(
    qs, as_, ys, zs, beta, m, p, m2, p2, totals, do, dfinal, dstates, dwritten, dv, dstart, offsets, T, N, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TWO: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Serial over chunks from the last: dX' of every chunk, r, dv, and the gradient of the initial state."""
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (V + BV - 1) // BV
    unit, head = pid // parts // HV, pid // parts % HV
    first, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(first, unit, N, C, PACKED)
    d = tl.arange(0, BK)
    e = (pid % parts) * BV + tl.arange(0, BV)
    square = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    within = (d < K)[:, None] & (e < V)[None, :]
    public = (unit * HV + head) * V * K + e[None, :] * K + d[:, None]
    chunk = e[None, :] * K + d[:, None]
    grad = tl.load(dfinal + public, mask=within, other=0.0)
    count = tl.cdiv(end - first, C)
    for back in tl.range(count):
        n = count - 1 - back
        here = first + n * C
        rows = tl.minimum(end - here, C).to(tl.int32)
        block = (slot + n) * HV + head
        reader = load_tile(as_, here, rows, d, head, HV, K, C, "nothing")
        writer = load_tile(ys, here, rows, d, head, HV, K, C, "nothing")
        query = load_tile(qs, here, rows, d, head, HV, K, C, "nothing")
        dout = load_tile(do, here, rows, e, head, HV, V, C, "nothing")
        solve = tl.load(m + block * C * C + square)
        scores = tl.load(p + block * C * C + square)
        total = power(tl.load(totals + block * K + d, mask=d < K, other=0.0))
        kind = dout.dtype
        later = grad.to(kind)
        tl.store(dstates + block * K * V + chunk, later, mask=within)
        du = tl.dot(writer, later, input_precision=PRECISION)
        du += tl.dot(tl.trans(scores), dout, input_precision=PRECISION)
        r = tl.dot(tl.trans(solve), du.to(kind), input_precision=PRECISION)
        store_tile(dwritten, r, here, rows, e, head, HV, V, C, "nothing")
        if TWO:
            back_read = r.to(kind)
            writer2 = load_tile(zs, here, rows, d, head, HV, K, C, "nothing")
            solve2 = tl.load(m2 + block * C * C + square)
            scores2 = tl.load(p2 + block * C * C + square)
            dvalue = tl.dot(writer2, later, input_precision=PRECISION)
            dvalue += tl.dot(tl.trans(scores2), dout, input_precision=PRECISION)
            dvalue += tl.dot(tl.trans(solve2), back_read, input_precision=PRECISION)
        else:
            dvalue = load_line(beta, here, rows, head, HV, C)[:, None] * r
            back_read = (-dvalue).to(kind)
        store_tile(dv, dvalue, here, rows, e, head, HV, V, C, "nothing")
        gain = tl.dot(tl.trans(query), dout, input_precision=PRECISION)
        gain += tl.dot(tl.trans(reader), back_read, input_precision=PRECISION)
        grad = tl.fma(grad, tl.broadcast_to(total[:, None], [BK, BV]), gain)
    tl.store(dstart + public, grad, mask=within)
