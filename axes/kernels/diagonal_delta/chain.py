"""Reading rules under a gate per channel in Triton, exact chunk by chunk: the delta rule (KDA) and RWKV-7's rule.

    delta:  S_t = S_{t-1} Diag(e^{g_t}) + beta_t (v_t - S' a_t) k_t^T      S' = S_{t-1} Diag(e^{g_t}); early: S_{t-1}
    dplr:   S_t = S_{t-1} (Diag(e^{g_t}) + a_t b_t^T) + v_t k_t^T          o_t = S_t q_t

In a chunk of C tokens with first state X (as K x V), G the inclusive and E the exclusive cumulative log gates of each
channel, R = G for a reader after the gate and E for one before it, lower matrices sum over channels d
    A_xy[i, j] = sum_d x_id y_jd exp(R_id - G_jd)   i > j         P_y[i, j] = sum_d q_id y_jd exp(G_id - G_jd)   i >= j
    delta:  u = (I + beta A_ak)^-1 [beta (V - (a e^R) X)]         one writer k of u
    dplr:   u = (I - A_ab)^-1 [(a e^E) X + A_ak V]                two writers, b of u and k of V
    o = (q e^G) X + P u (+ P_k V)       X' = e^G_last X + sum over writers (y e^(G_last - G))^T u
and backwards, from do and dX', with M the inverse:
    r = M^T [P^T do + (y e^(G_last - G)) dX']           dX = e^G_last dX' + (q e^G)^T do -+ (a e^R)^T (beta) r
    dA = -+ strict(r u^T),  dP = lower(do u^T),         delta: dbeta = r . (v + a's gradient without beta)
A gate's gradient is the reverse cumulated sum of x dx over readers less y dy over writers, channel by channel, and
<X', dX'> at the chunk's end: no division, no atomics, one order of sums.

Where no channel of a chunk falls by more than e^-80 (float16: e^-6), exp(R_i - G_j) = exp(R_i) exp(-G_j), one matrix
product; other chunks are left to kernels of their own, exact for any gates (channels.py).
Forward: `_prepare` over all chunks (scaled vectors, pair matrices), `_solve` (M), and one kernel serial in time, which
needs no gates any more. Backward: the scaled vectors and states again, the serial reverse pass, then over all chunks
the gradients of pairs and of tokens. On Hopper `hopper_diagonal_delta` has the serial passes of plain shapes and
`hopper_diagonal_delta_tokens` the gradients of mild chunks.
The scaled vectors live only as long as a call: written, they cost the serial pass what cumulative gates would.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import Layout, layout, on_device, precision
from axes.kernels.common.tiles import TILE, first_slot, load_numbers, load_rows, slot_rows, store_rows, unit_rows
from axes.kernels.common.versions import gluon_refusal
from axes.kernels.diagonal.channels import (
    add_up,
    after,
    exponents,
    from_middle,
    halves,
    largest,
    met,
    power,
    split,
    until,
)

if _GLUON := gluon_refusal() is None:  # on an unknown Triton these modules raise, and the portable kernels run
    from axes.kernels.diagonal_delta import hopper
    from axes.kernels.diagonal_delta.hopper_tokens import tokens_backward

_LENGTHS = ["T", "N", "HV"]  # one compilation for all of them

# ---- decays of pairs -----------------------------------------------------------------------------------------------


@triton.jit
def _decays(
    high, middle, low, size,
    C: tl.constexpr, LATE: tl.constexpr, PARTS: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Factors of q, of the reader a (before its gate unless LATE) and of writers at blocks of `size` rows; flatness.

    As channels.factors, for two readers. A reader before its gate has no pairs in a block of one row.
    """
    x = from_middle(high, middle, low, size, C, False, PARTS)
    if LATE:
        flat = (largest(x) <= BOUND).to(tl.int32) != 0  # the interpreter keeps a comparison of floats a float
        query = halves(x, flat, 1.0)
        reader = query
    else:
        e = tl.where(size > 1, from_middle(high, middle, low, size, C, True, PARTS), 0.0)
        flat = (tl.maximum(largest(x), largest(e)) <= BOUND).to(tl.int32) != 0
        query = halves(x, flat, 1.0)
        reader = halves(e, flat, 1.0)
    return query, reader, halves(x, flat, -1.0), flat


@triton.jit
def _load(ptr, here, count, columns, H, D: tl.constexpr, C: tl.constexpr):
    """C rows of one head of a (tokens, H, D) tensor from number `here` = row * H + head on; zero from row `count`."""
    i = tl.arange(0, C)
    at = ptr + here * D + ((i * (H * D))[:, None] + columns[None, :])
    return tl.load(at, mask=(i < count)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _store(ptr, tile, here, count, columns, H, D: tl.constexpr, C: tl.constexpr):
    """Write a tile that `_load` would read."""
    i = tl.arange(0, C)
    at = ptr + here * D + ((i * (H * D))[:, None] + columns[None, :])
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=(i < count)[:, None] & (columns < D)[None, :])


@triton.jit
def _numbers(ptr, here, count, H, C: tl.constexpr):
    """One number a row, as `_load`."""
    i = tl.arange(0, C)
    return tl.load(ptr + here + i * H, mask=i < count, other=0.0)


@triton.jit
def _logs(g, here, count, columns, H, D: tl.constexpr, C: tl.constexpr):
    """channels.load_logs: float32, floored at -100."""
    return tl.maximum(_load(g, here, count, columns, H, D, C).to(tl.float32), -100.0)


@triton.jit
def _lowest(falls, block, K: tl.constexpr, BK: tl.constexpr):
    """The least total of a chunk's channels."""
    parts: tl.constexpr = (K + BK - 1) // BK
    lowest = tl.load(falls + block * parts)
    for part in tl.static_range(1, parts):
        lowest = tl.minimum(lowest, tl.load(falls + block * parts + part))
    return lowest


@triton.jit
def _store_pairs(
    lowers, p, m2, p2, lower, scores, lower2, scores2, beta, here, count, block, HV, C: tl.constexpr, TWO: tl.constexpr
):
    """Write a chunk's pair matrices, P with its diagonal, and what `_solve` inverts."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    at = block * C * C + (i * C + j)
    tl.store(p + at, tl.where(i >= j, scores, 0.0).to(p.dtype.element_ty))
    if TWO:
        tl.store(p2 + at, tl.where(i >= j, scores2, 0.0).to(p.dtype.element_ty))
        tl.store(m2 + at, tl.where(i > j, lower2, 0.0).to(p.dtype.element_ty))
        lower = -lower
    else:
        lower *= tl.load(beta + here + i * HV, mask=i < count, other=0.0)
    tl.store(lowers + at, tl.where(i > j, lower, 0.0))


# ---- kernels -------------------------------------------------------------------------------------------------------
# Tokens are (tokens, H, D); scaled vectors (tokens, HV, K); chunk matrices (slots, HV, C, C); totals (slots, HV, K);
# states of chunks (slots, HV, V, K), public ones (U, HV, V, K). y is the writer of u (k, or b with TWO), z the other.


@Kernel
@triton.jit(do_not_specialize=[*_LENGTHS, "H"])
def _prepare(
    q, a, y, z, beta, g, lowers, p, m2, p2, qs, as_, ys, zs, totals, falls, offsets, units, T, N, H, HV,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    TWO: tl.constexpr, LATE: tl.constexpr, SHARED: tl.constexpr, MATRICES: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, BOUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Totals and scaled vectors of a chunk, with MATRICES its pair matrices if no channel falls by more than BOUND.

    exp(R_i - G_j) is exp(R_i) exp(-G_j) there. Without MATRICES a program has one block of channels.
    """
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = 1 if MATRICES else (K + BK - 1) // BK
    begin = (pid % parts).to(tl.int32) * BK
    pid = pid // parts
    slot, head = pid // HV, pid % HV
    _, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    if first >= end:
        return
    source = head // (HV // H)
    here, near, count = first * HV + head, first * H + source, (end - first).to(tl.int32)
    lower = tl.zeros([C, C], dtype=tl.float32)
    scores = tl.zeros([C, C], dtype=tl.float32)
    lower2 = tl.zeros([C, C], dtype=tl.float32)
    scores2 = tl.zeros([C, C], dtype=tl.float32)
    lowest = tl.full([], 0.0, tl.float32)
    for left in range(begin, K if MATRICES else begin + BK, BK):
        d = left + tl.arange(0, BK)
        log = _logs(g, here, count, d, HV, K, C)
        query = _load(q, near, count, d, H, K, C)
        writer = _load(y, near, count, d, H, K, C)
        reader = writer if SHARED else _load(a, near, count, d, H, K, C)
        if TWO:
            value = _load(z, near, count, d, H, K, C)
        kind = query.dtype
        high, middle, low = split(log, PARTS)
        total = tl.sum(log, 0)
        tl.store(totals + pid * K + d, total, mask=d < K)
        fall = tl.min(total, 0)
        tl.store(falls + pid * ((K + BK - 1) // BK) + left // BK, fall)
        lowest = tl.minimum(lowest, fall)
        run = until(high, middle, low, C, False, PARTS)
        reach = power(run)
        up = (query * reach).to(kind)
        _store(qs, up, here, count, d, HV, K, C)
        if not LATE:
            reach = power(until(high, middle, low, C, True, PARTS))
        read = (reader * reach).to(kind)
        _store(as_, read, here, count, d, HV, K, C)
        if PARTS == 0:
            kept = power(after(high, middle, low, C, PARTS))
        else:  # closed gates cost digits that 16 bits do not have
            kept = power(total[None, :] - run)
        _store(ys, writer * kept, here, count, d, HV, K, C)
        if TWO:
            _store(zs, value * kept, here, count, d, HV, K, C)
        if MATRICES:
            loss = power(-run)
            down = tl.trans((writer * loss).to(kind))
            scores += tl.dot(up, down, input_precision=PRECISION)
            lower += tl.dot(read, down, input_precision=PRECISION)
            if TWO:
                down = tl.trans((value * loss).to(kind))
                scores2 += tl.dot(up, down, input_precision=PRECISION)
                lower2 += tl.dot(read, down, input_precision=PRECISION)
    if MATRICES:  # noqa: SIM102 (a constant around a test)
        if lowest >= -BOUND:
            _store_pairs(lowers, p, m2, p2, lower, scores, lower2, scores2, beta, here, count, pid, HV, C, TWO)


@Kernel
@triton.jit(do_not_specialize=[*_LENGTHS, "H"])
def _prepare_closed(
    q, a, y, z, beta, g, lowers, p, m2, p2, falls, offsets, units, T, N, H, HV,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    TWO: tl.constexpr, LATE: tl.constexpr, SHARED: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, BOUND: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The pair matrices of chunks that `_prepare` leaves, those with closed gates."""
    pid = tl.program_id(0).to(tl.int64)
    slot, head = pid // HV, pid % HV
    _, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    if first >= end:
        return
    if _lowest(falls, pid, K, BK) >= -BOUND:
        return
    source = head // (HV // H)
    here, near, count = first * HV + head, first * H + source, (end - first).to(tl.int32)
    lower = tl.zeros([C, C], dtype=tl.float32)
    scores = tl.zeros([C, C], dtype=tl.float32)
    lower2 = tl.zeros([C, C], dtype=tl.float32)
    scores2 = tl.zeros([C, C], dtype=tl.float32)
    for left in range(0, K, BK):
        d = left + tl.arange(0, BK)
        high, middle, low = split(_logs(g, here, count, d, HV, K, C), PARTS)
        query = _load(q, near, count, d, H, K, C)
        writer = _load(y, near, count, d, H, K, C)
        reader = writer if SHARED else _load(a, near, count, d, H, K, C)
        if TWO:
            value = _load(z, near, count, d, H, K, C)
        kind = query.dtype
        size = tl.full([], C, tl.int32)
        while size > 0:
            rise, gain, loss, flat = _decays(high, middle, low, size, C, LATE, PARTS, FLAT)
            up = (query * rise).to(kind)
            read = (reader * gain).to(kind)
            down = tl.trans((writer * loss).to(kind))
            pair = met(size, flat, C, False)
            scores += tl.where(pair, tl.dot(up, down, input_precision=PRECISION), 0.0)
            lower += tl.where(pair, tl.dot(read, down, input_precision=PRECISION), 0.0)
            if TWO:
                down = tl.trans((value * loss).to(kind))
                scores2 += tl.where(pair, tl.dot(up, down, input_precision=PRECISION), 0.0)
                lower2 += tl.where(pair, tl.dot(read, down, input_precision=PRECISION), 0.0)
            size = tl.where(flat, 0, size // 2)
    _store_pairs(lowers, p, m2, p2, lower, scores, lower2, scores2, beta, here, count, pid, HV, C, TWO)


@Kernel
@triton.jit(do_not_specialize=_LENGTHS)
def _solve(
    lowers, m, offsets, units, T, N, HV,
    C: tl.constexpr, SIDE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """m = (I + lower)^-1 of every chunk: substitution in diagonal blocks of SIDE rows, then blocks of twice the size.

    Made for one warp: the rows of a block are registers of a thread, which owns columns, so that substitution moves
    nothing between threads. Powers of `lower` are never formed (tiles.inverse).
    """
    pid = tl.program_id(0).to(tl.int64)
    _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
    if first >= end:
        return
    lowers += pid * C * C
    m += pid * C * C
    kind = m.dtype.element_ty
    B: tl.constexpr = C // SIDE
    row = tl.arange(0, SIDE)[None, :]
    lane = tl.arange(0, C)[:, None]  # the columns of all blocks
    block = lane // SIDE * SIDE
    x = tl.where(row == lane - block, 1.0, 0.0)
    for n in tl.static_range(SIDE - 1):
        column = tl.load(lowers + (block + row) * C + block + n, mask=row > n, other=0.0)
        x -= column * tl.sum(tl.where(row == n, x, 0.0), axis=1)[:, None]
    if B == 1:
        tl.store(m + row * C + lane, x.to(kind))
    else:
        P: tl.constexpr = B // 2
        WIDE: tl.constexpr = 2 * SIDE
        x1, x2 = tl.split(tl.permute(tl.reshape(x, [P, 2, SIDE, SIDE]), (0, 3, 2, 1)))
        p = tl.arange(0, P)[:, None, None] * WIDE
        i = tl.arange(0, SIDE)[None, :, None]
        j = tl.arange(0, SIDE)[None, None, :]
        part = tl.load(lowers + (p + SIDE + i) * C + p + j)
        if P == 1:
            inner = tl.dot(tl.reshape(part, [SIDE, SIDE]), tl.reshape(x1, [SIDE, SIDE]), input_precision=PRECISION)
            cross = tl.dot(tl.reshape(x2, [SIDE, SIDE]), inner, input_precision=PRECISION)
            cross = tl.reshape(cross, [P, SIDE, SIDE])
        else:
            cross = tl.dot(x2, tl.dot(part, x1, input_precision=PRECISION), input_precision=PRECISION)
        top = tl.reshape(tl.permute(tl.join(x1, tl.zeros_like(x1)), (0, 1, 3, 2)), [P, SIDE, WIDE])
        bottom = tl.reshape(tl.permute(tl.join(-cross, x2), (0, 1, 3, 2)), [P, SIDE, WIDE])
        x = tl.reshape(tl.permute(tl.join(top, bottom), (0, 3, 1, 2)), [P, WIDE, WIDE])
        i = tl.arange(0, WIDE)[None, :, None]
        j = tl.arange(0, WIDE)[None, None, :]
        tl.store(m + (p + i) * C + p + j, x.to(kind))
        if P == 2:
            x1, x2 = tl.split(tl.permute(x, (1, 2, 0)))
            i = tl.arange(0, WIDE)[:, None]
            j = tl.arange(0, WIDE)[None, :]
            part = tl.load(lowers + (WIDE + i) * C + j)
            cross = tl.dot(x2, tl.dot(part, x1, input_precision=PRECISION), input_precision=PRECISION)
            tl.store(m + (WIDE + i) * C + j, (-cross).to(kind))
            tl.store(m + i * C + WIDE + j, tl.zeros_like(cross).to(kind))


@Kernel
@triton.jit(do_not_specialize=_LENGTHS)
def _scan(
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
        rows = first + n * C + tl.arange(0, C)
        block = (slot + n) * HV + head
        reader = load_rows(as_, rows, end, d, head, HV, K)
        writer = load_rows(ys, rows, end, d, head, HV, K)
        values = load_rows(v, rows, end, e, head, HV, V)
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
            seen = load_numbers(beta, rows, end, head, HV)[:, None] * (values - seen)
        u = tl.dot(solve, seen.to(kind), input_precision=PRECISION).to(kind)
        if RECORD:
            store_rows(written, u, rows, end, e, head, HV, V)
        else:
            query = load_rows(qs, rows, end, d, head, HV, K)
            scores = tl.load(p + block * C * C + square)
            out = tl.dot(query, old, input_precision=PRECISION)
            out += tl.dot(scores, u, input_precision=PRECISION)
            if TWO:
                scores2 = tl.load(p2 + block * C * C + square)
                out += tl.dot(scores2, values, input_precision=PRECISION)
            store_rows(o, out, rows, end, e, head, HV, V)
        gain = tl.dot(tl.trans(writer), u, input_precision=PRECISION)
        if TWO:
            writer2 = load_rows(zs, rows, end, d, head, HV, K)
            gain += tl.dot(tl.trans(writer2), values, input_precision=PRECISION)
        state = tl.fma(state, tl.broadcast_to(total[:, None], [BK, BV]), gain)
    if not RECORD:
        tl.store(final + public, state, mask=within)


@Kernel
@triton.jit(do_not_specialize=_LENGTHS)
def _reverse(
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
        rows = first + n * C + tl.arange(0, C)
        block = (slot + n) * HV + head
        reader = load_rows(as_, rows, end, d, head, HV, K)
        writer = load_rows(ys, rows, end, d, head, HV, K)
        query = load_rows(qs, rows, end, d, head, HV, K)
        dout = load_rows(do, rows, end, e, head, HV, V)
        solve = tl.load(m + block * C * C + square)
        scores = tl.load(p + block * C * C + square)
        total = power(tl.load(totals + block * K + d, mask=d < K, other=0.0))
        kind = dout.dtype
        later = grad.to(kind)
        tl.store(dstates + block * K * V + chunk, later, mask=within)
        du = tl.dot(writer, later, input_precision=PRECISION)
        du += tl.dot(tl.trans(scores), dout, input_precision=PRECISION)
        r = tl.dot(tl.trans(solve), du.to(kind), input_precision=PRECISION)
        store_rows(dwritten, r, rows, end, e, head, HV, V)
        if TWO:
            back_read = r.to(kind)
            writer2 = load_rows(zs, rows, end, d, head, HV, K)
            solve2 = tl.load(m2 + block * C * C + square)
            scores2 = tl.load(p2 + block * C * C + square)
            dvalue = tl.dot(writer2, later, input_precision=PRECISION)
            dvalue += tl.dot(tl.trans(scores2), dout, input_precision=PRECISION)
            dvalue += tl.dot(tl.trans(solve2), back_read, input_precision=PRECISION)
        else:
            dvalue = load_numbers(beta, rows, end, head, HV)[:, None] * r
            back_read = (-dvalue).to(kind)
        store_rows(dv, dvalue, rows, end, e, head, HV, V)
        gain = tl.dot(tl.trans(query), dout, input_precision=PRECISION)
        gain += tl.dot(tl.trans(reader), back_read, input_precision=PRECISION)
        grad = tl.fma(grad, tl.broadcast_to(total[:, None], [BK, BV]), gain)
    tl.store(dstart + public, grad, mask=within)


@Kernel
@triton.jit(do_not_specialize=[*_LENGTHS, "H", "tokens"])
def _gradients(
    q, a, y, z, v, beta, g, totals, falls, do, states, dstates, written, dwritten,
    dq, da, dy, dz, dbeta, dg, offsets, units, tokens, T, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FALL: tl.constexpr,
    TWO: tl.constexpr, LATE: tl.constexpr, SHARED: tl.constexpr, OPEN: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, SUMS: tl.constexpr, BOUND: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks at once: every gradient of a token but dv, from X, dX', u and r.

    Of chunks with mild gates if OPEN, else of the others. SHARED: the reader is the writer (a = k), whose gradients are
    added. dbeta comes in one part a block of channels. First the pairs' gradients, then readers, then writers, so that
    few sums live at a time.
    """
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (K + BK - 1) // BK
    part = pid % parts
    pid = pid // parts
    slot, head = pid // HV, pid % HV
    _, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    if first >= end:
        return
    totals += pid * K
    mild = _lowest(falls, pid, K, FALL) >= -BOUND
    if OPEN:
        if not mild:
            return
    else:
        if mild:
            return
    source = head // (HV // H)
    here, near, count = first * HV + head, first * H + source, (end - first).to(tl.int32)
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
        dout = _load(do, here, count, e, HV, V, C)
        r = _load(dwritten, here, count, e, HV, V, C)
        u = tl.trans(_load(written, here, count, e, HV, V, C))
        values = _load(v, here, count, e, HV, V, C)
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
        strength = -_numbers(beta, here, count, HV, C)[:, None]

    d = (part * BK).to(tl.int32) + tl.arange(0, BK)
    far = power(tl.load(totals + d, mask=d < K, other=0.0))

    # readers
    dquery = tl.zeros([C, BK], dtype=tl.float32)
    dread = tl.zeros([C, BK], dtype=tl.float32)
    for left in range(0, V, BV):
        e = left + tl.arange(0, BV)
        within = (e < V)[:, None] & (d < K)[None, :]
        state = tl.load(states + e[:, None] * K + d[None, :], mask=within, other=0.0)
        dquery += tl.dot(_load(do, here, count, e, HV, V, C), state, input_precision=PRECISION)
        dread += tl.dot(_load(dwritten, here, count, e, HV, V, C), state, input_precision=PRECISION)
    high, middle, low = split(_logs(g, here, count, d, HV, K, C), PARTS)
    writer = _load(y, near, count, d, H, K, C)
    if TWO:
        value = _load(z, near, count, d, H, K, C)
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
            rise, gain, loss, flat = _decays(high, middle, low, size, C, LATE, PARTS, FLAT)
            pair = met(size, flat, C, False)
            down = (writer * loss).to(kind)
            dquery += rise * tl.dot(tl.where(pair, inside, none), down, input_precision=PRECISION)
            dread += gain * tl.dot(tl.where(pair, strict, none), down, input_precision=PRECISION)
            if TWO:
                down = (value * loss).to(kind)
                dquery += rise * tl.dot(tl.where(pair, inside2, none), down, input_precision=PRECISION)
                dread += gain * tl.dot(tl.where(pair, strict2, none), down, input_precision=PRECISION)
            size = tl.where(flat, 0, size // 2)
    query = _load(q, near, count, d, H, K, C)
    reader = writer if SHARED else _load(a, near, count, d, H, K, C)
    _store(dq, dquery, here, count, d, HV, K, C)
    change = query * dquery
    if not TWO:
        push -= tl.sum(reader * dread, 1)
        dread *= strength
    before = reader * dread
    change += before
    if not SHARED:
        _store(da, dread, here, count, d, HV, K, C)

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
            rise, gain, loss, flat = _decays(high, middle, low, size, C, LATE, PARTS, FLAT)
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
        late += tl.dot(_load(written, here, count, e, HV, V, C), grad, input_precision=PRECISION)
    late *= kept
    _store(dy, dwrite + late, here, count, d, HV, K, C)
    late *= writer
    change -= late
    last = tl.sum(late, 0)
    if TWO:
        late = tl.zeros([C, BK], dtype=tl.float32)
        for left in range(0, V, BV):
            e = left + tl.arange(0, BV)
            within = (e < V)[:, None] & (d < K)[None, :]
            grad = tl.load(dstates + e[:, None] * K + d[None, :], mask=within, other=0.0)
            late += tl.dot(_load(v, here, count, e, HV, V, C), grad, input_precision=PRECISION)
        late *= kept
        _store(dz, dvalue + late, here, count, d, HV, K, C)
        late *= value
        change -= late
        last += tl.sum(late, 0)
    # a token's gate scales what is read and written from it on, and what reaches the chunk's end, <X', dX'>
    high, middle, low = split(change, SUMS)
    dlog = add_up(i <= j, high, middle, low, SUMS) + (far * both + last)[None, :]
    if not LATE:  # its own reader came before it
        dlog -= before
    log = _logs(g, here, count, d, HV, K, C)
    _store(dg, tl.where(log > -100.0, dlog, 0.0), here, count, d, HV, K, C)
    if not TWO:
        tl.store(dbeta + part * tokens * HV + here + tl.arange(0, C) * HV, push, mask=tl.arange(0, C) < count)


# ---- launches ------------------------------------------------------------------------------------------------------


def _chunk(q: Tensor) -> int:
    """Tokens of a chunk."""
    if q.dtype == torch.float32:
        return 32 if q.shape[-1] <= 128 else 16
    return 64


def _sizes(q: Tensor, v: Tensor, kernel: str) -> dict[str, int]:
    """Block sides. 16 bit: values go by 64 whatever V is; smaller blocks have met compiler faults."""
    d_k, d_v = (triton.next_power_of_2(x.shape[-1]) for x in (q, v))
    if q.dtype == torch.float32:
        wide = max(TILE, d_k) if kernel == "serial" else max(TILE, min(d_k, 64))
        return {"BK": wide, "BV": max(TILE, min(d_v, 32))}
    return {"BK": max(64, d_k) if kernel == "serial" else 64, "BV": 64}


def _launch(q: Tensor, kernel: str, two: bool) -> dict[str, int]:
    """Warps and pipeline stages: the only ones that were tested.

    Gradients have one stage: in Triton 3.6 a tile of a pipelined loop that is an operand and is used in registers too
    has one buffer, which the next copy overwrites while products still read it.
    """
    if q.dtype == torch.float32:
        return {"num_warps": {"gradients": 8, "solve": 1}.get(kernel, 4), "num_stages": 1}
    if kernel == "solve":  # rows of a block in the registers of one warp
        return {"num_warps": 1, "num_stages": 1}
    if kernel in ("prepare", "scale", "gradients"):
        return {"num_warps": 4, "num_stages": 2 if kernel == "prepare" else 1}
    if q.shape[-1] > 128:
        return {"num_warps": 8, "num_stages": 1}
    return {"num_warps": 4, "num_stages": 1 if two or kernel == "reverse" else 2}


def _exponents(q: Tensor, g: Tensor) -> dict[str, int | float]:
    """channels.exponents, whose bound holds on both sides of a block's middle: FLAT; from one side it is twice that."""
    found = exponents(q, g)
    return {"PARTS": min(2, found["PARTS"]), "BOUND": 2 * found["BOUND"], "FLAT": found["BOUND"]}


def _matrices(q: Tensor, v: Tensor, cuts: Layout, count: int) -> list[Tensor]:
    return [q.new_empty(cuts.slots, v.shape[2], cuts.chunk, cuts.chunk) for _ in range(count)]


def _run_prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, x: Tensor | None, y: Tensor, two: bool, early: bool,
    cuts: Layout, matrices: list[Tensor] | None,
) -> list[Tensor]:  # fmt: skip
    """The scaled q, a and writers, totals G_last, the least of each block; fills M, P (A_ak, P_k) where given."""
    h, hv, d = q.shape[2], v.shape[2], q.shape[3]
    scaled = [q.new_empty(*q.shape[:2], hv, d) for _ in range(4 if two else 3)]
    block = _sizes(q, v, "prepare")["BK"]
    totals = g.new_empty(cuts.slots, hv, d, dtype=torch.float32)
    falls = g.new_empty(cuts.slots, hv, triton.cdiv(d, block), dtype=torch.float32)
    m, *pairs = [scaled[0]] * 4 if matrices is None else matrices * (1 if two else 2)
    lowers = totals if matrices is None else torch.empty_like(m, dtype=torch.float32)
    grid = (cuts.slots * hv,)
    if grid[0] > 0 and q.shape[1] > 0:
        inputs = (q, k if x is None else x, y if two else k, k, k if two else y, g, lowers, *pairs)
        where = (cuts.offsets, cuts.units_of_slots, cuts.length, cuts.chunks)
        shape = dict(
            H=h, HV=hv, K=d, C=cuts.chunk, BK=block, TWO=two, LATE=not (two or early), SHARED=x is None,
            PACKED=cuts.packed, PRECISION=precision(q), **_launch(q, "scale" if matrices is None else "prepare", two),
        )  # fmt: skip
        constants = _exponents(q, g)
        flat = constants.pop("FLAT")
        _prepare[(grid[0] * (1 if matrices is not None else triton.cdiv(d, block)),)](
            *inputs, *scaled[:3], scaled[-1], totals, falls, *where, MATRICES=matrices is not None, **constants, **shape
        )
        if matrices is not None:
            _prepare_closed[grid](*inputs, falls, *where, FLAT=flat, **constants, **shape)
            exact = "ieee" if precision(q) == "ieee" else "tf32x3"
            _solve[grid](
                lowers, m, *where, HV=hv, C=cuts.chunk, SIDE=TILE, PACKED=cuts.packed, PRECISION=exact,
                **_launch(q, "solve", two),
            )  # fmt: skip
    return [*scaled[:3], scaled[-1], totals, falls]


@torch.library.custom_op("axes::diagonal_delta", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, x: Tensor | None, y: Tensor, start: Tensor | None,
    cu_seqlens: Tensor | None, two: bool, early: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """x: a, or None where it is k; y: beta (B, T, HV), or with `two` b (B, T, H, K)."""
    cuts = layout(q.shape[0], q.shape[1], _chunk(q), cu_seqlens)
    hv, d, d_v = v.shape[2], q.shape[3], v.shape[3]
    o, final = torch.empty_like(v), q.new_empty(cuts.units, hv, d_v, d, dtype=torch.float32)
    matrices = _matrices(q, v, cuts, 4 if two else 2)
    with on_device(q):
        *scaled, totals, _ = _run_prepare(q, k, v, g, x, y, two, early, cuts, matrices)
        sizes = _sizes(q, v, "serial")
        grid = cuts.units * hv * triton.cdiv(d_v, sizes["BV"])
        if grid:
            if not cuts.packed and _GLUON and hopper.fits(scaled[0], v):
                hopper.walk(scaled, v, None if two else y, matrices, totals, start, final, o)
                return o, final, matrices
            _scan[(grid,)](
                *scaled, v, v if two else y, *(matrices * (1 if two else 2)), totals, final if start is None else start,
                o, final, o, o, cuts.offsets, cuts.length, cuts.chunks,
                HV=hv, K=d, V=d_v, C=cuts.chunk, **sizes, TWO=two, STARTED=start is not None, RECORD=False,
                PACKED=cuts.packed, PRECISION=precision(q), **_launch(q, "scan", two),
            )  # fmt: skip
    return o, final, matrices


@_forward.register_fake
def _(q, k, v, g, x, y, start, cu_seqlens, two, early):
    c = _chunk(q)
    if cu_seqlens is None:
        units = q.shape[0]
        slots = units * ((q.shape[1] + c - 1) // c)
    else:
        units = cu_seqlens.shape[0] - 1
        slots = q.shape[1] // c + units
    final = q.new_empty(units, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32)
    return torch.empty_like(v), final, [q.new_empty(slots, v.shape[2], c, c) for _ in range(4 if two else 2)]


@torch.library.custom_op("axes::diagonal_delta_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, x: Tensor | None, y: Tensor, start: Tensor | None,
    cu_seqlens: Tensor | None, two: bool, early: bool, matrices: list[Tensor], do: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, x, y, start."""
    cuts = layout(q.shape[0], q.shape[1], _chunk(q), cu_seqlens)
    h, hv, d, d_v = q.shape[2], v.shape[2], q.shape[3], v.shape[3]
    dot, late, constants = precision(q), not (two or early), _exponents(q, g)
    states = q.new_empty(cuts.slots, hv, d_v, d)
    dstates, written, dwritten = torch.empty_like(states), torch.empty_like(v), torch.empty_like(v)
    dv, dg, dstart = torch.empty_like(v), torch.empty_like(g), torch.empty_like(dfinal)
    # a value head's share of a shared key head's gradients: float32, added below
    wide = q.new_empty(*q.shape[:2], hv, d, dtype=torch.float32 if hv > h else q.dtype)
    dq, dk = wide, torch.empty_like(wide)
    dx = dk if x is None else torch.empty_like(wide)
    dy = torch.empty_like(wide) if two else dk
    parts = triton.cdiv(d, _sizes(q, v, "gradients")["BK"])
    dbeta = g.new_empty((0,) if two else (parts, *v.shape[:3]), dtype=torch.float32)
    with on_device(q):
        *scaled, totals, falls = _run_prepare(q, k, v, g, x, y, two, early, cuts, None)
        square = matrices * (1 if two else 2)
        beta = v if two else y
        serial = _sizes(q, v, "serial")
        shape = dict(HV=hv, K=d, V=d_v, C=cuts.chunk, TWO=two, PACKED=cuts.packed, PRECISION=dot)
        grid = cuts.units * hv * triton.cdiv(d_v, serial["BV"])
        plain = not cuts.packed and _GLUON and hopper.fits(scaled[0], v)
        fast = plain and not two and x is None and h == hv
        if plain:
            strength = None if two else y
            hopper.walk(scaled, v, strength, matrices, totals, start, dfinal, written, states=states, record=True)
            hopper.walk(scaled, do, strength, matrices, totals, dfinal, dstart, dwritten, dv=dv, states=dstates)
        elif grid:
            _scan[(grid,)](
                *scaled, v, beta, *square, totals, dfinal if start is None else start, v, dfinal, states, written,
                cuts.offsets, cuts.length, cuts.chunks, **serial, STARTED=start is not None, RECORD=True, **shape,
                **_launch(q, "states", two),
            )  # fmt: skip
            _reverse[(grid,)](
                *scaled, beta, *square, totals, do, dfinal, dstates, dwritten, dv, dstart,
                cuts.offsets, cuts.length, cuts.chunks, **serial, **shape, **_launch(q, "reverse", two),
            )  # fmt: skip
        if cuts.slots * hv > 0 and q.shape[1] > 0:
            if fast:
                tokens_backward(
                    q, k, v, g, y, totals, do, states, dstates, written, dwritten, dq, dk, dbeta, dg, late,
                    float(constants["BOUND"]),
                )  # fmt: skip
            for is_open in (False,) if fast else (True, False):
                _gradients[(cuts.slots * hv * parts,)](
                    q, k if x is None else x, y if two else k, k, v, beta, g, totals, falls, do, states, dstates,
                    written, dwritten, dq, dx, dy, dk, dbeta, dg, cuts.offsets, cuts.units_of_slots,
                    v.shape[0] * v.shape[1], cuts.length, cuts.chunks, **shape, **_sizes(q, v, "gradients"),
                    FALL=_sizes(q, v, "prepare")["BK"], H=h, LATE=late, SHARED=x is None, OPEN=is_open, **constants,
                    SUMS=min(2, 2 * constants["PARTS"]), **_launch(q, "gradients", two),
                )  # fmt: skip

    def grouped(grad: Tensor) -> Tensor:
        return grad if h == hv else grad.view(*q.shape[:2], h, hv // h, d).sum(3).to(q.dtype)

    last = grouped(dy) if two else dbeta.sum(0)
    return grouped(dq), grouped(dk), dv, dg, q.new_empty(0) if x is None else grouped(dx), last, dstart


@_backward.register_fake
def _(q, k, v, g, x, y, start, cu_seqlens, two, early, matrices, do, dfinal):
    dx = q.new_empty(0) if x is None else torch.empty_like(x)
    return (*(torch.empty_like(t) for t in (q, k, v, g)), dx, torch.empty_like(y), torch.empty_like(dfinal))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, g, x, y, start, cu_seqlens, two, early = inputs
    matrices = output[2]
    ctx.mark_non_differentiable(*matrices)
    ctx.save_for_backward(q, k, v, g, x, y, start, cu_seqlens, *matrices)
    ctx.two, ctx.early = two, early
    ctx.set_materialize_grads(True)


def _differentiate(ctx: Any, do: Tensor, dfinal: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, g, x, y, start, cu_seqlens, *matrices = ctx.saved_tensors
    dq, dk, dv, dg, dx, dy, dstart = _backward(
        q, k, v, g, x, y, start, cu_seqlens, ctx.two, ctx.early, matrices, do.contiguous(), dfinal.contiguous().float()
    )
    no_x, no_start = x is None, start is None
    return dq, dk, dv, dg, None if no_x else dx, dy, None if no_start else dstart, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


# ---- entries -------------------------------------------------------------------------------------------------------


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    erase: Tensor | None = None,
    early: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} Diag(e^{g_t}) + beta_t (v_t - S' a_t) k_t^T, o_t = S_t q_t; the caller has checked the shapes.

    a is k or `erase`, like k; S' = S_{t-1} Diag(e^{g_t}), with `early` S_{t-1}. q, k (B, T, H, K), v (B, T, HV, V),
    g (B, T, HV, K) <= 0, beta (B, T, HV), initial_state (U, HV, V, K). Returns o like v and the last state, float32.
    """
    o, final, _ = _forward(
        q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(),
        None if erase is None else erase.to(q.dtype).contiguous(), beta.float().contiguous(),
        None if initial_state is None else initial_state.float().contiguous(), cu_seqlens, False, early,
    )  # fmt: skip
    return o, final


def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} (Diag(e^{g_t}) + a_t b_t^T) + v_t k_t^T, o_t = S_t q_t; the caller has checked the shapes.

    q, k, a, b (B, T, H, K), v (B, T, HV, V), g (B, T, HV, K) <= 0, initial_state (U, HV, V, K).
    Returns o like v and the last state, float32.
    """
    o, final, _ = _forward(
        q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(),
        a.to(q.dtype).contiguous(), b.to(q.dtype).contiguous(),
        None if initial_state is None else initial_state.float().contiguous(), cu_seqlens, True, False,
    )  # fmt: skip
    return o, final
