"""Chains with one decay a channel in Triton, exact chunk by chunk: S_t = S_{t-1} Diag(e^{g_t}) + beta_t v_t k_t^T.

In a chunk of C tokens with first state S, cumulative log gates G (C, K) and u = beta v:
    P_ij = sum_c q_ic k_jc e^(G_ic - G_jc), i >= j        o = (q e^G) S^T + P u
    S' = S Diag(e^G_last) + u^T (k e^(G_last - G))
and backwards, from do and dS':
    dS = dS' Diag(e^G_last) + do^T (q e^G)                du = (k e^(G_last - G)) dS'^T + P^T do
    dP = lower(do u^T)                                    dq = e^G (do S) + dq of P
    m = e^(G_last - G) (u dS')                            dk = m + dk of P
    dg_t = sum_{i >= t} (q dq - k dk of P)_i + sum_{i < t} (k m)_i + e^G_last sum_v S dS'
Forward: one kernel serial in time leaves the state before every chunk, one over all chunks reads it (P, o).
Backward: the states again, the same pass over reversed time (dS'), one kernel over all chunks for dv, one for the rest.
On Hopper, for plain shapes, the serial kernels are those of `hopper_diagonal`, which make o and dv on the way, and the
mild chunks' dq, dk, dg those of `hopper_diagonal_keys`.
A chunk in which no channel decays by more than e^-MILD takes r = q e^G and w = k e^-G, P = lower(r w^T): two
exponentials for a number; the others (DEEP) take channels.pairs, exact for any gates, in launches of their own.
The channels of a state do not mix, so that serial passes split keys: every exponential is taken once.
Sums are in float32; products of float32 inputs are IEEE; no atomics, no division, one order.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import (
    Layout,
    check_like,
    check_packing,
    check_tokens,
    contiguous,
    layout,
    on_device,
    precision,
)
from axes.kernels.common.tiles import accumulate, first_slot, slot_rows, unit_rows
from axes.kernels.common.versions import gluon_refusal
from axes.kernels.diagonal.channels import add_up, exponents, pairs, pairs_backward, power, split

if _GLUON := gluon_refusal() is None:  # on an unknown Triton these modules raise, and the portable kernels run
    from axes.kernels.diagonal import hopper as hopper_diagonal
    from axes.kernels.diagonal import hopper_keys as hopper_diagonal_keys
    from axes.kernels.scalar import hopper_write

LENGTHS = ["T", "N", "H", "HV"]  # one compilation for all of them

# ---- tiles of a chunk ------------------------------------------------------------------------------------------------


@triton.jit
def load_near(ptr, here, count, columns, H, D: tl.constexpr, C: tl.constexpr):
    """C rows of one head of a (tokens, H, D) tensor from number `here` = (row * H + head) on; zero from row `count`."""
    i = tl.arange(0, C)
    at = ptr + here * D + (i * (H * D))[:, None] + columns[None, :]
    return tl.load(at, mask=(i < count)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def store_near(ptr, tile, here, count, columns, H, D: tl.constexpr, C: tl.constexpr):
    """Write a tile that `load_near` would read."""
    i = tl.arange(0, C)
    at = ptr + here * D + (i * (H * D))[:, None] + columns[None, :]
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=(i < count)[:, None] & (columns < D)[None, :])


@triton.jit
def load_strengths(beta, here, count, HV, C: tl.constexpr):
    """beta of C tokens as a column; zero from row `count` on."""
    i = tl.arange(0, C)
    return tl.load(beta + here + i * HV, mask=i < count, other=0.0)[:, None]


# ---- kernels ---------------------------------------------------------------------------------------------------------
# Tokens (tokens, H or HV, D), public states (units, HV, V, K), those of chunks (slots, HV, V, K), P (slots, HV, C, C).


@Kernel
@triton.jit(do_not_specialize=LENGTHS)
def _pass(
    x, y, beta, g, states, totals, start, last, offsets, T, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, STARTED: tl.constexpr, STRONG: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
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
        keys = load_near(x, at * H + head // (HV // H), count, d, H, K, C)
        values = load_near(y, at * HV + head, count, e, HV, V, C)
        log = tl.maximum(load_near(g, at * HV + head, count, d, HV, K, C).to(tl.float32), -100.0)
        high, middle, low = split(log, PARTS)
        if STRONG:
            values = (load_strengths(beta, at * HV + head, count, HV, C) * values).to(y.dtype.element_ty)
        if REVERSE:
            reach = add_up(i >= j, high, middle, low, PARTS)
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
    pid, q, k, v, beta, g, totals, states, scores, o, offsets, units, T, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STRONG: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr, BOUND: tl.constexpr, MILD: tl.constexpr,
    PRECISION: tl.constexpr, DEEP: tl.constexpr, KEEP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """P, if it is to KEEP, and one block of values of o of one chunk, mild or DEEP; nothing if it is the other.

    ADD: o already holds what is read from the chunk's first state.
    """
    v_parts: tl.constexpr = (V + BV - 1) // BV
    part = (pid % v_parts).to(tl.int32)
    head = pid // v_parts % HV
    slot = pid // (v_parts * HV)
    _, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    matrix = slot * HV + head
    if (first < end) & (_is_deep(totals + matrix * K, K, MILD) == DEEP):
        count = (end - first).to(tl.int32)
        here, shared = first * HV + head, first * H + head // (HV // H)
        e = part * BV + tl.arange(0, BV)
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        out = tl.zeros([C, BV], dtype=tl.float32)
        p = tl.zeros([C, C], dtype=tl.float32)
        for left in range(0, K, BK):
            d = left + tl.arange(0, BK)
            log = tl.maximum(load_near(g, here, count, d, HV, K, C).to(tl.float32), -100.0)
            queries = load_near(q, shared, count, d, H, K, C)
            keys = load_near(k, shared, count, d, H, K, C)
            high, middle, low = split(log, PARTS)
            if not ADD or not DEEP:
                run = add_up(i >= j, high, middle, low, PARTS)
                reader = (queries * power(run)).to(q.dtype.element_ty)
            if not ADD:
                at = states + matrix * V * K + e[:, None] * K + d[None, :]
                state = tl.load(at, mask=(e < V)[:, None] & (d < K)[None, :], other=0.0)
                out += tl.dot(reader, tl.trans(state), input_precision=PRECISION)
            if DEEP:
                p += pairs(queries, keys, high, middle, low, C, False, False, PARTS, BOUND, PRECISION)
            else:
                writer = (keys * power(-run)).to(q.dtype.element_ty)
                p += tl.dot(reader, tl.trans(writer), input_precision=PRECISION)
        values = load_near(v, here, count, e, HV, V, C)
        if STRONG:
            values = (load_strengths(beta, here, count, HV, C) * values).to(v.dtype.element_ty)
        kept = tl.where(i >= j, p, 0.0).to(q.dtype.element_ty)
        if KEEP and part == 0:
            tl.store(scores + matrix * C * C + i * C + j, kept)
        out += tl.dot(kept, values, input_precision=PRECISION)
        if ADD:
            out += load_near(o, here, count, e, HV, V, C)
        store_near(o, out, here, count, e, HV, V, C)


@Kernel
@triton.jit(do_not_specialize=[*LENGTHS, "programs"])
def _outputs(
    q, k, v, beta, g, totals, states, scores, o, offsets, units, T, N, H, HV, programs,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STRONG: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr, BOUND: tl.constexpr, MILD: tl.constexpr,
    PRECISION: tl.constexpr, DEEP: tl.constexpr, GROUP: tl.constexpr, KEEP: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """All mild chunks at once, or GROUP by GROUP those that are not: P and o."""
    pid = tl.program_id(0).to(tl.int64) * GROUP
    if GROUP == 1:
        _output(
            pid, q, k, v, beta, g, totals, states, scores, o, offsets, units, T, N, H, HV,
            K, V, C, BK, BV, STRONG, PACKED, PARTS, BOUND, MILD, PRECISION, DEEP, KEEP, ADD,
        )  # fmt: skip
    elif _any_deep(totals, pid, programs, K, (V + BV - 1) // BV, GROUP, MILD):
        for n in range(GROUP):
            if pid + n < programs:
                _output(
                    pid + n, q, k, v, beta, g, totals, states, scores, o, offsets, units, T, N, H, HV,
                    K, V, C, BK, BV, STRONG, PACKED, PARTS, BOUND, MILD, PRECISION, DEEP, KEEP, ADD,
                )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=[*LENGTHS, "tokens"])
def _values(
    k, v, beta, g, scores, do, dstates, dv, dbeta, tokens, offsets, units, T, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STRONG: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
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
        here, shared = first * HV + head, first * H + head // (HV // H)
        matrix = slot * HV + head
        e = part * BV + tl.arange(0, BV)
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        p = tl.load(scores + matrix * C * C + i * C + j)
        dout = load_near(do, here, count, e, HV, V, C)
        du = tl.dot(tl.trans(p), dout, input_precision=PRECISION)
        for left in range(0, K, BK):
            d = left + tl.arange(0, BK)
            log = tl.maximum(load_near(g, here, count, d, HV, K, C).to(tl.float32), -100.0)
            keys = load_near(k, shared, count, d, H, K, C)
            at = dstates + matrix * V * K + e[:, None] * K + d[None, :]
            grad = tl.load(at, mask=(e < V)[:, None] & (d < K)[None, :], other=0.0)
            high, middle, low = split(log, PARTS)
            kept = (keys * power(add_up(i < j, high, middle, low, PARTS))).to(k.dtype.element_ty)
            du += tl.dot(kept, tl.trans(grad), input_precision=PRECISION)
        if STRONG:
            values = load_near(v, here, count, e, HV, V, C)
            rows = tl.arange(0, C)
            at = dbeta + part * tokens * HV + here + rows * HV
            tl.store(at, tl.sum(du * values, 1), mask=rows < count)
            du *= load_strengths(beta, here, count, HV, C)
        store_near(dv, du, here, count, e, HV, V, C)


@triton.jit
def _key(
    pid, q, k, v, beta, g, totals, do, states, dstates, dq, dk, dg, offsets, units, T, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STRONG: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr, BOUND: tl.constexpr, MILD: tl.constexpr,
    PRECISION: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """One block of keys of dq, dk and dg of one chunk, mild or DEEP; nothing if it is the other."""
    k_parts: tl.constexpr = (K + BK - 1) // BK
    part = (pid % k_parts).to(tl.int32)
    head = pid // k_parts % HV
    slot = pid // (k_parts * HV)
    _, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    matrix = slot * HV + head
    if (first < end) & (_is_deep(totals + matrix * K, K, MILD) == DEEP):
        count = (end - first).to(tl.int32)
        here, shared = first * HV + head, first * H + head // (HV // H)
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
            dout = load_near(do, here, count, e, HV, V, C)
            values = load_near(v, here, count, e, HV, V, C)
            if STRONG:
                values = (load_strengths(beta, here, count, HV, C) * values).to(v.dtype.element_ty)
            dquery += tl.dot(dout, state, input_precision=PRECISION)
            moved += tl.dot(values, grad, input_precision=PRECISION)
            dp += tl.dot(dout, tl.trans(values), input_precision=PRECISION)
            both += tl.dot(tl.trans(state), grad, input_precision=PRECISION)  # its diagonal: sum_v S dS'
        log = tl.maximum(load_near(g, here, count, d, HV, K, C).to(tl.float32), -100.0)
        queries = load_near(q, shared, count, d, H, K, C)
        keys = load_near(k, shared, count, d, H, K, C)
        total = tl.load(totals + matrix * K + d, mask=d < K, other=0.0)
        row, column = tl.arange(0, BK)[:, None], tl.arange(0, BK)[None, :]
        last = power(total) * tl.sum(tl.where(row == column, both, 0.0), 0)
        high, middle, low = split(log, PARTS)
        run = add_up(i >= j, high, middle, low, PARTS)
        if DEEP:
            inner, dkey = pairs_backward(queries, keys, dp, high, middle, low, C, False, False, PARTS, BOUND, PRECISION)
            dquery = dquery * power(run) + inner
            moved *= power(add_up(i < j, high, middle, low, PARTS))
        else:
            grow, fade = power(run), power(-run)
            kept = tl.where(i >= j, dp, 0.0).to(q.dtype.element_ty)
            writer = (keys * fade).to(q.dtype.element_ty)
            dquery = grow * (dquery + tl.dot(kept, writer, input_precision=PRECISION))
            reader = (queries * grow).to(q.dtype.element_ty)
            dkey = fade * tl.dot(tl.trans(kept), reader, input_precision=PRECISION)
            moved *= fade * power(total)[None, :]
        store_near(dq, dquery, here, count, d, HV, K, C)
        store_near(dk, dkey + moved, here, count, d, HV, K, C)
        # sums from a token on are those of the chunk less those before it
        change = queries * dquery - keys * dkey
        last += tl.sum(change, 0)
        change -= keys * moved
        high, middle, low = split(change, 0 if PARTS == 0 else 2)
        dlog = change - add_up(i >= j, high, middle, low, 0 if PARTS == 0 else 2) + last[None, :]
        if DEEP:
            floored = load_near(g, here, count, d, HV, K, C).to(tl.float32) <= -100.0
            dlog = tl.where(floored, 0.0, dlog)
        store_near(dg, dlog, here, count, d, HV, K, C)


@Kernel
@triton.jit(do_not_specialize=[*LENGTHS, "programs"])
def _keys(
    q, k, v, beta, g, totals, do, states, dstates, dq, dk, dg, offsets, units, T, N, H, HV, programs,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STRONG: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr, BOUND: tl.constexpr, MILD: tl.constexpr,
    PRECISION: tl.constexpr, DEEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """All mild chunks at once, or GROUP by GROUP those that are not: dq, dk and dg."""
    pid = tl.program_id(0).to(tl.int64) * GROUP
    if GROUP == 1:
        _key(
            pid, q, k, v, beta, g, totals, do, states, dstates, dq, dk, dg, offsets, units, T, N, H, HV,
            K, V, C, BK, BV, STRONG, PACKED, PARTS, BOUND, MILD, PRECISION, DEEP,
        )  # fmt: skip
    elif _any_deep(totals, pid, programs, K, (K + BK - 1) // BK, GROUP, MILD):
        for n in range(GROUP):
            if pid + n < programs:
                _key(
                    pid + n, q, k, v, beta, g, totals, do, states, dstates, dq, dk, dg, offsets, units, T, N, H, HV,
                    K, V, C, BK, BV, STRONG, PACKED, PARTS, BOUND, MILD, PRECISION, DEEP,
                )  # fmt: skip


# ---- launches --------------------------------------------------------------------------------------------------------


def _side(width: int, least: int, most: int) -> int:
    return max(least, min(most, triton.next_power_of_2(width)))


def chunk_length(q: Tensor) -> int:
    """Tokens of a chunk."""
    return 32 if q.dtype == torch.float32 else 64


def settings(q: Tensor, v: Tensor, kernel: str) -> dict[str, int]:
    """Block sides, warps and stages of a kernel: the only ones that were tested. 16 bit: no tile below 64."""
    d_k, d_v = q.shape[-1], v.shape[-1]
    if q.dtype == torch.float32:
        return {"BK": _side(d_k, 16, 32), "BV": _side(d_v, 16, 32), "num_warps": 4, "num_stages": 1}
    d_v = 64 if kernel == "keys" else _side(d_v, 64, 128)
    return {"BK": 64, "BV": d_v, "num_warps": 4, "num_stages": 3 if kernel == "pass" else 1}


def mild(q: Tensor) -> float:
    """Largest decay of a chunk, as a log, whose inverse scales an operand of a product; -1: no chunk is mild.

    float16 has few exponents; float32 saves too little for kernels of its own.
    """
    return {torch.float16: 6.0, torch.float32: -1.0}.get(q.dtype, 60.0)


def group(programs: int) -> int:
    """Programs that one of few looks after, where all chunks may be mild and nothing is to be done."""
    return 16 if programs >= 2048 else 1


def _blocks(q: Tensor, v: Tensor, chosen: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(q.shape[-1], chosen["BK"]), triton.cdiv(v.shape[-1], chosen["BV"])


def _pass_over(
    x: Tensor, y: Tensor, beta: Tensor | None, g: Tensor, start: Tensor | None, cut: Layout, *, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """States of chunks (slots, HV, V, K) in the tokens' dtype, the last (units, HV, V, K), totals (slots, HV, K)."""
    h, hv, d_k, d_v = x.shape[2], y.shape[2], x.shape[3], y.shape[3]
    states = x.new_empty(cut.slots, hv, d_v, d_k)
    last = x.new_empty(cut.units, hv, d_v, d_k, dtype=torch.float32)
    totals = last if reverse else x.new_empty(cut.slots, hv, d_k, dtype=torch.float32)
    chosen = settings(x, y, "pass")
    k_parts, v_parts = _blocks(x, y, chosen)
    _pass[(cut.units * hv * k_parts * v_parts,)](
        x, y, g if beta is None else beta, g, states, totals, last if start is None else start, last,
        x if cut.offsets is None else cut.offsets, cut.length, cut.chunks, h, hv,
        REVERSE=reverse, STARTED=start is not None, PARTS=exponents(x, g)["PARTS"],
        **_constants(x, y, beta, cut), **chosen,
    )  # fmt: skip
    return states, last, totals


def _constants(q: Tensor, v: Tensor, beta: Tensor | None, cut: Layout) -> dict[str, Any]:
    strong = beta is not None
    return dict(K=q.shape[3], V=v.shape[3], C=cut.chunk, STRONG=strong, PACKED=cut.packed, PRECISION=precision(q))


def _where(q: Tensor, v: Tensor, cut: Layout) -> tuple[Any, ...]:
    """The last arguments of every kernel over chunks: which tokens a slot holds."""
    if cut.offsets is None or cut.units_of_slots is None:
        return q, q, cut.length, cut.chunks, q.shape[2], v.shape[2]
    return cut.offsets, cut.units_of_slots, cut.length, cut.chunks, q.shape[2], v.shape[2]


def _twice(
    kernel: Any, name: str, tensors: tuple[Tensor, ...], programs: int,
    q: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, cut: Layout, shallow: bool = True, **more: bool,
) -> None:  # fmt: skip
    """A kernel over chunks for the mild ones, where that is another kernel and they are not done, and for the rest."""
    limit = mild(q)
    for deep in (False, True) if limit > 0 and shallow else (True,):
        members = group(programs) if deep and limit > 0 else 1
        kernel[(triton.cdiv(programs, members),)](
            *tensors, *_where(q, v, cut), programs, **_constants(q, v, beta, cut), **exponents(q, g),
            MILD=limit, DEEP=deep, GROUP=members, **more, **settings(q, v, name),
        )  # fmt: skip


def _plain(q: Tensor, v: Tensor, cut: Layout) -> bool:
    """Whether the serial passes are those of `hopper_diagonal`."""
    return not cut.packed and _GLUON and hopper_write.fits(q, v)


def _values_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scores: Tensor, do: Tensor, dstates: Tensor,
    cut: Layout,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dv and dbeta from the gradients of states."""
    chosen = settings(q, v, "values")
    parts = _blocks(q, v, chosen)[1]
    dv = torch.empty_like(v)
    dbeta = g.new_empty((parts, *v.shape[:3]) if beta is not None else (1, 0), dtype=torch.float32)
    _values[(cut.slots * v.shape[2] * parts,)](
        k, v, g if beta is None else beta, g, scores, do, dstates, dv, dbeta, v.shape[0] * v.shape[1],
        *_where(q, v, cut), **_constants(q, v, beta, cut), PARTS=exponents(q, g)["PARTS"], **chosen,
    )  # fmt: skip
    return dv, dbeta[0] if parts == 1 else dbeta.sum(0)


@torch.library.custom_op("axes::diagonal_write", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, start: Tensor | None, cu_seqlens: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    cut = layout(q.shape[0], q.shape[1], chunk_length(q), cu_seqlens)
    programs, strength = cut.slots * v.shape[2], g if beta is None else beta
    with on_device(q):
        plain = _plain(q, v, cut)
        if plain:
            o, final, scores, totals = hopper_diagonal.forward(q, k, v, g, beta, start, mild(q), keep)
            states = o
        else:
            states, final, totals = _pass_over(k, v, beta, g, start, cut, reverse=False)
            o, scores = torch.empty_like(v), q.new_empty(cut.slots * keep, v.shape[2], cut.chunk, cut.chunk)
        blocks = _blocks(q, v, settings(q, v, "outputs"))[1]
        tensors = (q, k, v, strength, g, totals, states, scores, o)
        more = dict(shallow=not plain, KEEP=keep, ADD=plain)
        _twice(_outputs, "outputs", tensors, programs * blocks, q, v, g, beta, cut, **more)
    return o, final, scores


@_forward.register_fake
def _(q, k, v, g, beta, start, cu_seqlens, keep):
    c, hv = chunk_length(q), v.shape[2]
    units = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots = q.shape[0] * ((q.shape[1] + c - 1) // c) if cu_seqlens is None else q.shape[1] // c + units
    final = q.new_empty(units, hv, v.shape[3], q.shape[3], dtype=torch.float32)
    return torch.empty_like(v), final, q.new_empty(slots * keep, hv, c, c)


@torch.library.custom_op("axes::diagonal_write_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, start: Tensor | None, cu_seqlens: Tensor | None,
    scores: Tensor, do: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    cut = layout(q.shape[0], q.shape[1], chunk_length(q), cu_seqlens)
    (b, t, h, d_k), hv = q.shape, v.shape[2]
    programs, strength = cut.slots * hv, g if beta is None else beta
    with on_device(q):
        plain = _plain(q, v, cut)
        dg = torch.empty_like(g)
        if plain:
            states, _, totals = hopper_diagonal.states(q, k, v, g, beta, start)
        else:
            states, _, totals = _pass_over(k, v, beta, g, start, cut, reverse=False)
        if plain and beta is None:
            dv, dstates, dstart = hopper_diagonal.values_backward(q, k, g, do, dfinal, scores, totals)
            dbeta = g.new_empty(0, dtype=torch.float32)
        else:
            dstates, dstart, _ = _pass_over(q, do, None, g, dfinal, cut, reverse=True)
            dv, dbeta = _values_backward(q, k, v, g, beta, scores, do, dstates, cut)
        # a value head's share of a shared query's gradient: float32, added below
        dq, dk = (q.new_empty(b, t, hv, d_k, dtype=torch.float32 if hv > h else q.dtype) for _ in range(2))
        blocks = _blocks(q, v, settings(q, v, "keys"))[0]
        tensors = (q, k, v, strength, g, totals, do, states, dstates, dq, dk, dg)
        plain = plain and beta is None and hv == h
        if plain:
            hopper_diagonal_keys.keys_backward(*tensors[:3], *tensors[4:], mild(q))
        _twice(_keys, "keys", tensors, programs * blocks, q, v, g, beta, cut, shallow=not plain)
        if hv > h:
            dq, dk = (x.view(b, t, h, hv // h, d_k).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, dstart


@_backward.register_fake
def _(q, k, v, g, beta, start, cu_seqlens, scores, do, dfinal):
    dbeta = g.new_empty(v.shape[:3] if beta is not None else (0,), dtype=torch.float32)
    return (*(torch.empty_like(x) for x in (q, k, v, g)), dbeta, torch.empty_like(dfinal))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs[:-1], output[2])
    ctx.set_materialize_grads(True)


def _differentiate(ctx: Any, do: Tensor, dfinal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, scores = ctx.saved_tensors
    beta, start = inputs[4:6]
    *grads, dbeta, dstart = _backward(*inputs, scores, do.contiguous(), dfinal.contiguous().float())
    return *grads, None if beta is None else dbeta, None if start is None else dstart, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


# ---- entry -----------------------------------------------------------------------------------------------------------


def diagonal_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    initial_state: Tensor | None = None,
    rule: Literal["write", "delta", "dplr"] = "write",
    early: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chains with one log gate a channel; o_t = S_t q_t. With D_t = Diag(e^{g_t}):

    "write": S_t = S_{t-1} D_t + beta_t v_t k_t^T (gated linear attention).
    "delta": S_t = S_{t-1} D_t + beta_t (v_t - S' e_t) k_t^T, e = erase or k, S' = S_{t-1} D_t or, with early, S_{t-1}.
    "dplr": S_t = S_{t-1} (D_t + a_t b_t^T) + beta_t v_t k_t^T.

    q, k, erase, a, b (B, T, H, K) and v (B, T, HV, V) in one dtype (bf16, fp16, fp32), HV a multiple of H, K and V
    from 1 to 256; g (B, T, HV, K) logs, g <= 0, floored at -100; beta (B, T, HV) or None for one; initial_state
    (U, HV, V, K) or None for zero, U = B or the number of sequences that cu_seqlens (U + 1,) packs in one batch entry.
    Returns o (B, T, HV, V) in v's dtype and the final state (U, HV, V, K) in float32. All inputs receive gradients,
    once. Raises ShapeError for other shapes, dtypes or devices.
    """
    who = "diagonal_chain"
    check_tokens(who, q, k, v)
    check_packing(who, q.shape[0], cu_seqlens, q.device)
    (batch, t, h, d_k), (hv, d_v) = q.shape, v.shape[2:]
    units = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_like(who, "g", g, (batch, t, hv, d_k), q.device)
    check_like(who, "beta", beta, (batch, t, hv), q.device)
    check_like(who, "initial_state", initial_state, (units, hv, d_v, d_k), q.device)
    for name, x in (("erase", erase), ("a", a), ("b", b)):
        check_like(who, name, x, (batch, t, h, d_k), q.device)
    if rule not in ("write", "delta", "dplr"):
        raise ShapeError(f'{who}: rule is "write", "delta" or "dplr", not {rule!r}')
    if (erase is not None and rule != "delta") or ((a is not None) + (b is not None)) != 2 * (rule == "dplr"):
        raise ShapeError(f'{who}: erase belongs to rule "delta", a and b to rule "dplr", not to {rule!r}')
    g = g if g.dtype in (torch.bfloat16, torch.float16) else g.float()
    beta = None if beta is None else beta.float()
    start = None if initial_state is None else initial_state.float()
    if q.numel() == 0 or v.numel() == 0:
        final = v.new_zeros(units, hv, d_v, d_k, dtype=torch.float32) if start is None else start.clone()
        return v.new_zeros(v.shape), final
    if rule != "write":
        from axes.kernels.diagonal_delta import chain as diagonal_delta

        if a is not None and b is not None:
            v = v if beta is None else (v * beta[..., None]).to(v.dtype)
            return diagonal_delta.dplr(q, k, v, g, a, b, start, cu_seqlens)
        beta = v.new_ones(v.shape[:3], dtype=torch.float32) if beta is None else beta
        return diagonal_delta.delta(q, k, v, g, beta, erase, early, start, cu_seqlens)
    inputs = contiguous(q, k, v, g, beta, start)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    o, final, _ = _forward(*inputs, cu_seqlens, keep)
    return o, final
