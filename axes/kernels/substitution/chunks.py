"""Gradients of substitution from u and w, one program a chunk, where gates are of the whole state or none.

By `passes`, in a chunk with first state X and derivative D in its last one,
    dq = C K + e^G do X,   dk = (C^T Q + W^T K + e^{G_last - G} u D) + (W K + e^R w X)
and numbers of a token stand on rows of products, so that C, W and what states give are products of tiles as they lie.
What a gate is asked for is in these already: q_t . dq_t is do_t . o_t, and k_t . dk_t the sum of what u_t is asked for,
times u_t (the first bracket), and of w_t x_t (the second). So no output is made again. A token's own pair, which stands
in do_t . o_t and in what u_t is asked for, is added behind.
"""

# mypy: disable-error-code="assignment, var-annotated, index, misc"
from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import decay, floored, load_line, load_tile, slot_rows, store_tile
from axes.kernels.substitution.passes import _load_state, _sight, _unit_end, wanted


@Kernel
@triton.jit(do_not_specialize=["tokens", "T", "N", "H"])
def behind(
    q, k, g, do, written, turns, states, dstates, before, dbefore, dk2, dq, dk, dg, offsets, units, tokens, T, N, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, GATED: tl.constexpr, READS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk of a chunk, BD columns of them in a program, and what these give to derivatives in gates,
    (BK / BD, tokens, H)."""
    PARTS: tl.constexpr = BK // BD
    part = tl.program_id(0) % PARTS
    pid = (tl.program_id(0) // PARTS).to(tl.int64)
    head = pid % H
    slot = pid // H
    unit, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    rows = (end - first).to(tl.int32)
    if rows > 0:
        d = part * BD + tl.arange(0, BD)
        i = tl.arange(0, C)
        late, soon = i[:, None], i[None, :]
        kind = written.dtype.element_ty
        grad_q = tl.zeros([C, BD], dtype=tl.float32)
        by_reads = tl.zeros([C, BD], dtype=tl.float32)
        by_writes = tl.zeros([C, BD], dtype=tl.float32)
        outs = tl.zeros([C, C], dtype=tl.float32)
        reads = tl.zeros([C, C], dtype=tl.float32)
        kept = tl.zeros([BD], dtype=tl.float32)
        if READS == 2:
            stop = _unit_end(offsets, unit, T, PACKED)
            block = (rows - 1) // 16 * 16  # whose first state is shown, where the unit ends here
            by_before = tl.zeros([C, BD], dtype=tl.float32)
            shown_before = tl.zeros([BD], dtype=tl.float32)
        for at in range(0, V, BV):
            v = at + tl.arange(0, BV)
            shown = load_tile(do, first, rows, v, head, H, V, C)
            u = load_tile(written, first, rows, v, head, H, V, C)
            w = load_tile(turns, first, rows, v, head, H, V, C)
            state = _load_state(states, slot * H + head, v, d, V, K)
            dstate = _load_state(dstates, slot * H + head, v, d, V, K)
            outs = tl.dot(shown, tl.trans(u), outs, input_precision=PRECISION)
            reads = tl.dot(w, tl.trans(u), reads, input_precision=PRECISION)
            grad_q = tl.dot(shown, state, grad_q, input_precision=PRECISION)
            by_reads = tl.dot(w, state, by_reads, input_precision=PRECISION)
            by_writes = tl.dot(u, dstate, by_writes, input_precision=PRECISION)
            if GATED:
                kept += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
            if READS == 2:  # noqa: SIM102 (a constant around a test)
                if end == stop:
                    asks = _load_state(dbefore, unit * H + head, v, d, V, K)
                    early = tl.where((i < block)[:, None], u, tl.zeros_like(u))
                    by_before = tl.dot(early, asks.to(kind), by_before, input_precision=PRECISION)
                    if GATED:
                        shown_before += tl.sum(asks * _load_state(before, unit * H + head, v, d, V, K), 0)
        keys = load_tile(k, first, rows, d, head, H, K, C)
        queries = load_tile(q, first, rows, d, head, H, K, C)
        own = tl.sum(tl.where(late == soon, outs, 0.0), 1)[:, None]
        if READS == 2:
            apart = late // 16 > soon // 16
        else:
            apart = late > soon
        if GATED:
            line = floored(load_line(g, first, rows, head, H, C))
            run = tl.cumsum(line, 0)
            sight = _sight(line, run, C, READS)
            rest = tl.sum(tl.where(soon > late, line[None, :], 0.0), 1)
            grad_q = grad_q * tl.exp(run)[:, None]
            by_reads = by_reads * tl.exp(sight)[:, None]
            by_writes = by_writes * tl.exp(rest)[:, None]
            whole = tl.sum(kept, 0) * tl.exp(tl.sum(line, 0))
            whole += tl.sum(tl.sum(by_writes * keys.to(tl.float32), 1), 0)
            outs = outs * decay(run[:, None], run[None, :], late > soon)
            reads = reads * decay(sight[:, None], run[None, :], apart)
            if READS == 2:
                inner = tl.sum(tl.where((soon > late) & (soon < block), line[None, :], 0.0), 1)
                by_before = by_before * tl.exp(inner)[:, None]
        else:
            outs = tl.where(late > soon, outs, 0.0)
            reads = tl.where(apart, reads, 0.0)
        if READS == 2:
            by_writes += by_before
        by_out = outs.to(kind)
        by_read = reads.to(kind)
        grad_q = tl.dot(by_out, keys, grad_q, input_precision=PRECISION)
        by_reads = tl.dot(by_read, keys, by_reads, input_precision=PRECISION)
        by_writes = tl.dot(tl.trans(by_out), queries, by_writes, input_precision=PRECISION)
        by_writes = tl.dot(tl.trans(by_read), keys, by_writes, input_precision=PRECISION)
        near = keys.to(tl.float32)
        asked = queries.to(tl.float32)
        if GATED:
            through = tl.sum(by_reads * near, 1)
            change = tl.sum(grad_q * asked, 1) - tl.sum(by_writes * near, 1)
            if READS == 1:
                change += through
            total = tl.sum(tl.where(soon >= late, change[None, :], 0.0), 1) + whole
            if READS == 0:
                total += tl.sum(tl.where(soon > late, through[None, :], 0.0), 1)
            if READS == 2:
                total += tl.sum(tl.where(soon // 16 > late // 16, through[None, :], 0.0), 1)
                total += tl.where(i < block, tl.sum(shown_before, 0), 0.0)
            tl.store(dg + part * tokens + (first + i) * H + head, total, mask=i < rows)
        length = tl.load(dk2 + (first + i) * H + head, mask=i < rows, other=0.0)[:, None]
        store_tile(dq, grad_q + own * near, first, rows, d, head, H, K, C)
        store_tile(dk, by_writes + by_reads + own * asked + 2.0 * length * near, first, rows, d, head, H, K, C)


@Kernel
@triton.jit(do_not_specialize=["T", "N", "H"])
def together(
    q, k, shown, written, turns, states, dstates, kept, early, dq, dk, offsets, units, harsh, T, N, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk of a chunk of an anchored response, of do, u and w as gates have left them at the chunk's end or will
    (`anchored.reverse`), BD columns of them in a program: products and nothing else."""
    PARTS: tl.constexpr = BK // BD
    part = tl.program_id(0) % PARTS
    pid = (tl.program_id(0) // PARTS).to(tl.int64)
    head = pid % H
    slot = pid // H
    unit, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    rows = (end - first).to(tl.int32)
    if (rows > 0) & (not wanted(harsh, unit, head, H, SPLIT)):
        d = part * BD + tl.arange(0, BD)
        i = tl.arange(0, C)
        late, soon = i[:, None], i[None, :]
        kind = written.dtype.element_ty
        grad_q = tl.zeros([C, BD], dtype=tl.float32)
        grad_k = tl.zeros([C, BD], dtype=tl.float32)
        outs = tl.zeros([C, C], dtype=tl.float32)
        reads = tl.zeros([C, C], dtype=tl.float32)
        ends = end == _unit_end(offsets, unit, T, PACKED)
        for at in range(0, V, BV):
            v = at + tl.arange(0, BV)
            show = load_tile(shown, first, rows, v, head, H, V, C)
            u = load_tile(written, first, rows, v, head, H, V, C)
            w = load_tile(turns, first, rows, v, head, H, V, C)
            outs = tl.dot(show, tl.trans(u), outs, input_precision=PRECISION)
            reads = tl.dot(w, tl.trans(u), reads, input_precision=PRECISION)
            left = tl.load(kept + (slot * H + head) * V + v, mask=v < V, other=0.0)
            state = _load_state(states, slot * H + head, v, d, V, K)
            state = (state.to(tl.float32) * left[:, None]).to(kind)
            grad_q = tl.dot(show, state, grad_q, input_precision=PRECISION)
            grad_k = tl.dot(w, state, grad_k, input_precision=PRECISION)
            dstate = _load_state(dstates, slot * H + head, v, d, V, K)
            grad_k = tl.dot(u, dstate, grad_k, input_precision=PRECISION)
            if ends:
                u = tl.where(late < (rows - 1) // 16 * 16, u, tl.zeros_like(u))
                asks = _load_state(early, unit * H + head, v, d, V, K)
                grad_k = tl.dot(u, asks, grad_k, input_precision=PRECISION)
        keys = load_tile(k, first, rows, d, head, H, K, C)
        queries = load_tile(q, first, rows, d, head, H, K, C)
        outs = tl.where(late >= soon, outs, 0.0)
        reads = tl.where(late // 16 > soon // 16, reads, 0.0)
        by_out = outs.to(kind)
        grad_q = tl.dot(by_out, keys, grad_q, input_precision=PRECISION)
        grad_k = tl.dot(tl.trans(by_out), queries, grad_k, input_precision=PRECISION)
        grad_k = tl.dot((reads + tl.trans(reads)).to(kind), keys, grad_k, input_precision=PRECISION)
        store_tile(dq, grad_q, first, rows, d, head, H, K, C)
        store_tile(dk, grad_k, first, rows, d, head, H, K, C)


__all__ = ["behind", "together"]
