"""Kernels of the scalar chain with rule "write": S_t = e^{g_t} S_{t-1} + beta_t v_t k_t^T, o_t = S_t q_t.

With X a chunk's first state (as K x V), dX' the gradient of its last one, G its cumulative log gates and
D_ij = e^{G_i - G_j} for i >= j, P = (Q K^T) * D, E = (dO V^T) * D and r = e^(G_last - G), all row by row:
    o  = e^G (Q X)     + P (beta v)                     X'   = e^G_last X + K^T (r beta v)
    dq = e^G (dO X^T)  + E (beta k)                     X'^T, likewise
    dv = beta [r (K dX')  + P^T dO]                     dX   = e^G_last dX' + Q^T (e^G dO)
    dk = beta r (V dX'^T) + (beta E^T) Q                dX^T, likewise
One form, out = (row weights) (x state) + ((x y^T) * D) z with state += y^T z, four times: (x, y, z) = (q, k, v),
(do, v, k), and in reverse (k, q, do), (v, do, q). Each is one serial kernel that reads its tokens once and keeps the
states in registers; only the gradient of a gate, which needs <X, dX'>, has the states of chunks pass through memory.
A segment's map is X -> e^(sum of its g) X + b. For plain shapes a Hopper GPU runs `hopper_write.mix` in place of `mix`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import load_line, load_tile, store_line, store_tile
from axes.kernels.scalar.tiles import (
    chunk_gates,
    chunk_origin,
    chunk_span,
    gates,
    later_sum,
    store_state,
    strengths,
    unit_span,
)

_SIZES = ["T", "S", "L", "N", "H", "HV", "tokens"]


@triton.jit
def fade(late, early, keep):
    """`tiles.decay` of logs to the base 2."""
    return tl.exp2(tl.where(keep, late - early, float("-inf")))


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def cumulate(g, runs, offsets, units, T, S, L, N, HV, C: tl.constexpr, PACKED: tl.constexpr):
    """Cumulative gates of every chunk, here logs to the base 2: a product less for every pair of tokens."""
    pid = tl.program_id(0).to(tl.int64)
    head, first, rows, _ = chunk_span(offsets, units, pid, T, S, L, N, HV, C, PACKED)
    if rows > 0:
        chunk_gates(g, runs, first, rows, head, HV, C, True, False, 1.4426950408889634)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def mix(
    x, y, z, own, beta, g, runs, start, out, final, trace, dots, dbeta, dg, offsets,
    T, S, L, N, H, HV, tokens,
    A: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, STARTED: tl.constexpr,
    ROLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out of one unit, one head and one block of the columns of z, serial over chunks; state (A, W) in registers.

    ROLE names the output: "o", "dq", "dv", "dk". own: q for "dq", v for "dv", k for "dk", whose products with the
    output make the gradients of gates and strengths: dots, dg and dbeta have a part of tokens * HV numbers for each
    block of columns.
    """
    KEYED: tl.constexpr = ROLE == "o" or ROLE == "dv"  # x and y are q and k; otherwise z is one of them
    REVERSE: tl.constexpr = ROLE == "dv" or ROLE == "dk"
    PARTS: tl.constexpr = (W + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    part = pid % PARTS
    head = pid // PARTS % HV
    unit = pid // PARTS // HV
    key = head // (HV // H)
    first, end = unit_span(offsets, unit, T, S, L, PACKED)
    origin, step = chunk_origin(first, unit, head, N, HV, C, PACKED)
    d = tl.arange(0, BK)
    e = part.to(tl.int32) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    if REVERSE:
        keep = i <= j
    else:
        keep = i >= j
    block = d[:, None] * W + e[None, :]
    within = (d < A)[:, None] & (e < W)[None, :]
    public = (unit * HV + head) * (A * W)
    if KEYED:
        public += e[None, :] * A + d[:, None]
    else:
        public += block
    if STARTED:
        state = tl.load(start + public, mask=within, other=0.0)
    else:
        state = tl.zeros([BK, BV], dtype=tl.float32)
    chunks = ((end - first + C - 1) // C).to(tl.int32)
    for count in range(chunks):
        if REVERSE:
            n = chunks - 1 - count
        else:
            n = count
        here = first + n * C
        rows = tl.minimum(end - here, C).to(tl.int32)
        if GATED and ROLE == "dk":
            before = tl.load(trace + (origin + n * step) * (A * W) + block, mask=within, other=0.0)
            both = tl.sum(tl.sum(before * state, 1), 0)
        if KEYED:
            bx = load_tile(x, here, rows, d, key, H, A, C)
            by = load_tile(y, here, rows, d, key, H, A, C)
            bz = load_tile(z, here, rows, e, head, HV, W, C)
        else:
            bx = load_tile(x, here, rows, d, head, HV, A, C)
            by = load_tile(y, here, rows, d, head, HV, A, C)
            bz = load_tile(z, here, rows, e, key, H, W, C)
        old = state.to(bx.dtype)
        if GATED and ROLE == "dq":
            tl.store(trace + (origin + n * step) * (A * W) + block, old, mask=within)
        scores = tl.dot(bx, tl.trans(by), input_precision=PRECISION)
        written = bz
        strength = strengths(beta, here, rows, head, HV, C, WEIGHTED)
        if GATED:
            run, _, total = gates(runs, here, rows, head, HV, C, GATED, False)
            if REVERSE:
                fall = fade(run[None, :], run[:, None], keep)
                reach, weight = tl.exp2(total - run), tl.exp2(run)
            else:
                fall = fade(run[:, None], run[None, :], keep)
                reach, weight = tl.exp2(run), tl.exp2(total - run)
            scores = scores * fall
        else:
            scores = tl.where(keep, scores, 0.0)
        if WEIGHTED and not REVERSE:
            scores = scores * strength[None, :]
            if GATED:
                weight = weight * strength
            else:
                weight = strength
        if WEIGHTED and ROLE == "dk":
            scores = scores * strength[:, None]  # rounded as in "dq": a token's own pair must cancel in its gate
        if GATED or (WEIGHTED and not REVERSE):
            written = (bz * weight[:, None]).to(bz.dtype)
        scores = scores.to(bz.dtype)
        result = tl.dot(bx, old, input_precision=PRECISION)
        if GATED:
            result = result * reach[:, None]
        if WEIGHTED and ROLE == "dk":
            result = result * strength[:, None]
        if GATED and ROLE == "dk":
            mine = load_tile(own, here, rows, e, key, H, W, C)
            last = tl.sum(tl.sum(mine * result, 1), 0) + tl.exp2(total) * both
        if GATED:
            state *= tl.exp2(total)
        result += tl.dot(scores, bz, input_precision=PRECISION)
        state += tl.dot(tl.trans(by), written, input_precision=PRECISION)
        if ROLE == "dq" and GATED:
            mine = load_tile(own, here, rows, e, key, H, W, C)
            store_line(dots + part * tokens * HV, tl.sum(mine * result, 1), here, rows, head, HV, C)
        if ROLE == "dk" and GATED:
            mine = load_tile(own, here, rows, e, key, H, W, C)
            gain = load_line(dots + part * tokens * HV, here, rows, head, HV, C) - tl.sum(mine * result, 1)
            alive = load_line(g, here, rows, head, HV, C) > -100.0
            dlog = tl.where(alive, later_sum(gain, C, True) + last, 0.0)
            store_line(dg + part * tokens * HV, dlog, here, rows, head, HV, C)
        if ROLE == "dv" and WEIGHTED:
            mine = load_tile(own, here, rows, e, head, HV, W, C)
            store_line(dbeta + part * tokens * HV, tl.sum(mine * result, 1), here, rows, head, HV, C)
            result = result * strength[:, None]
        store_tile(out, result, here, rows, e, head, HV, W, C)
    if KEYED:
        tl.store(final + public, state, mask=within)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def ends(
    x, y, beta, runs, final, through, offsets, T, S, L, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """b of the segments' maps, in final, and their products of gates, in through, from x = k and y = v.

    REVERSE: of the maps of gradients, from x = q and y = dO. Left out is the segment of an entry that nothing follows.
    """
    KEYS: tl.constexpr = (K + BK - 1) // BK
    VALUES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    d = (pid % KEYS).to(tl.int32) * BK + tl.arange(0, BK)
    e = (pid // KEYS % VALUES).to(tl.int32) * BV + tl.arange(0, BV)
    pid = pid // (KEYS * VALUES)
    head = pid % HV
    unit = pid // HV
    if unit % S == (0 if REVERSE else S - 1):
        return
    key = head // (HV // H)
    first, end = unit_span(offsets, unit, T, S, L, PACKED)
    state = tl.zeros([BK, BV], dtype=tl.float32)
    log = 0.0
    chunks = ((end - first + C - 1) // C).to(tl.int32)
    for count in range(chunks):
        if REVERSE:
            n = chunks - 1 - count
        else:
            n = count
        here = first + n * C
        rows = tl.minimum(end - here, C).to(tl.int32)
        left = load_tile(x, here, rows, d, key, H, K, C)
        right = load_tile(y, here, rows, e, head, HV, V, C)
        if GATED or WEIGHTED:
            run, _, total = gates(runs, here, rows, head, HV, C, GATED, False)
            if REVERSE:
                weight = tl.exp2(run)
            else:
                weight = tl.exp2(total - run) * strengths(beta, here, rows, head, HV, C, WEIGHTED)
            right = (right * weight[:, None]).to(left.dtype)
        if GATED:
            state *= tl.exp2(total)
            log += total
        state += tl.dot(tl.trans(left), right, input_precision=PRECISION)
    store_state(final, state, unit * HV + head, d, e, K, V)
    tl.store(through + unit * HV + head, tl.exp2(log))
