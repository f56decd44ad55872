"""Device side of the scalar chain that its two rules share: spans of units and chunks, tiles of a chunk, gates.

A unit is a run of tokens with one state: a packed sequence, or one of S segments of L tokens of a batch entry of T
tokens (S = 1 and L = T without segments). Matrices of chunks (slots x HV, ., .) lie unit by unit, then head by head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import floored, load_line, store_line, unit_rows


@triton.jit
def unit_span(offsets, unit, T, S, L, PACKED: tl.constexpr):
    """First row of a unit and the row after its last, int64."""
    if PACKED:
        first, end = unit_rows(offsets, unit, T, True)
    else:
        entry = unit // S
        first = entry * T + (unit - entry * S) * L
        end = tl.minimum(first + L, (entry + 1) * T)
    return first, end


@triton.jit
def chunk_origin(first, unit, head, N, HV, C: tl.constexpr, PACKED: tl.constexpr):
    """Index of the matrix of a unit's first chunk and the step to the next: whole heads lie together where the number
    of chunks is known on the host, heads alternate where it is not."""
    if PACKED:
        origin = (first // C + unit) * HV + head
        step = HV.to(tl.int64)
    else:
        origin = (unit * HV + head) * N
        step = tl.full([], 1, tl.int64)
    return origin, step


@triton.jit
def chunk_span(offsets, units, pid, T, S, L, N, HV, C: tl.constexpr, PACKED: tl.constexpr):
    """Of one program for each slot and head: head, first row, number of rows (none in an empty slot), matrix index."""
    head = pid % HV
    slot = pid // HV
    if PACKED:
        unit = tl.load(units + slot).to(tl.int64)
        first, end = unit_span(offsets, unit, T, S, L, True)
        n = slot - (first // C + unit)
    else:
        unit = slot // N
        first, end = unit_span(offsets, unit, T, S, L, False)
        n = slot - unit * N
    origin, step = chunk_origin(first, unit, head, N, HV, C, PACKED)
    first += n * C
    return head, first, (tl.maximum(tl.minimum(end - first, C), 0)).to(tl.int32), origin + n * step


@triton.jit
def strengths(beta, first, rows, head, HV, C: tl.constexpr, WEIGHTED: tl.constexpr):
    """beta of a chunk's tokens, or ones."""
    if WEIGHTED:
        line = load_line(beta, first, rows, head, HV, C)
    else:
        line = tl.full([C], 1.0, tl.float32)
    return line


@triton.jit
def chunk_gates(
    g, runs, first, rows, head, HV, C: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr, UNIT: tl.constexpr
):
    """Cumulative log gates G of a chunk and those that a reader of erase keys sees (exclusive with EARLY); UNIT G is
    kept in runs (tokens, HV) for the other kernels."""
    if GATED:
        log = floored(load_line(g, first, rows, head, HV, C))
        run = tl.cumsum(log, 0)
        store_line(runs, run * UNIT, first, rows, head, HV, C)
        if EARLY:
            seen = run - log
        else:
            seen = run
    else:
        run = tl.zeros([C], dtype=tl.float32)
        seen = run
    return run, seen


@triton.jit
def gates(runs, first, rows, head, HV, C: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr):
    """Cumulative log gates of a chunk from runs, in its unit, those that a reader of erase keys sees, and the total."""
    if GATED:
        token = tl.arange(0, C)
        at = runs + first * HV + head
        total = tl.load(at + (rows - 1) * HV)
        run = tl.load(at + token * HV, mask=token < rows, other=0.0)
        run = tl.where(token < rows, run, total)
        if EARLY:
            seen = tl.load(at + token * HV - HV, mask=(token > 0) & (token < rows), other=0.0)
        else:
            seen = run
    else:
        run, total = tl.zeros([C], dtype=tl.float32), 0.0
        seen = run
    return run, seen, total


@triton.jit
def stretch(length, reader, product, strength):
    """Log of the norm of I - beta k a^T for each token: length |k|^2, reader |a|^2, product a . k. For a = k it is that
    of max(1, |1 - beta |k|^2|)."""
    x = strength * tl.sqrt(length * reader)
    return tl.log((x + tl.sqrt(tl.maximum(x * x + 4.0 - 4.0 * strength * product, 0.0))) / 2)


@Kernel
@triton.jit(do_not_specialize=["T", "S", "L", "N", "HV"])
def spans(bounds, out, T, S, L, N, HV, C: tl.constexpr, BLOCK: tl.constexpr):
    """How many chunks at a segment's end, and at its start, shrink every state to nothing: (units, HV, 2), N + 1 where
    all of them do not.

    bounds: logs of bounds on what each chunk's map stretches. At e^-104 = 2^-150 of itself a state has left float32:
    what lies before those chunks (backwards: after them) does not reach the other side, and the segment's map is zero.
    """
    pid = tl.program_id(0).to(tl.int64)
    unit = pid // HV
    first, end = unit_span(bounds, unit, T, S, L, False)
    chunks = ((end - first + C - 1) // C).to(tl.int32)
    at = tl.arange(0, BLOCK)
    for side in tl.static_range(2):
        found = N + 1
        log = 0.0
        for passed in range(0, chunks, BLOCK):
            i = passed + at
            if side == 0:
                n = chunks - 1 - i
            else:
                n = i
            bound = tl.load(bounds + pid * N + n, mask=i < chunks, other=0.0)
            sums = log + tl.cumsum(bound, 0)
            found = tl.minimum(found, tl.min(tl.where((sums < -104.0) & (i < chunks), i + 1, N + 1), 0))
            log += tl.sum(bound, 0)
        tl.store(out + pid * 2 + side, found)


@triton.jit
def later_sum(x, C: tl.constexpr, SELF: tl.constexpr):
    """sum over i >= t (or i > t without SELF) of x_i, for each t of a chunk."""
    i = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    if SELF:
        keep = i >= t
    else:
        keep = i > t
    return tl.sum(tl.where(keep, x[:, None], 0.0), 0)


@triton.jit
def load_state(ptr, index, d, e, K: tl.constexpr, V: tl.constexpr):
    """Block (K, V) of a public state (., V, K)."""
    at = index * (V * K) + e[None, :] * K + d[:, None]
    return tl.load(ptr + at, mask=(d < K)[:, None] & (e < V)[None, :], other=0.0)


@triton.jit
def store_state(ptr, state, index, d, e, K: tl.constexpr, V: tl.constexpr):
    """Write a block that `load_state` would read."""
    at = index * (V * K) + e[None, :] * K + d[:, None]
    tl.store(ptr + at, state, mask=(d < K)[:, None] & (e < V)[None, :])


@triton.jit
def _map_block(map, rows, columns, known, K: tl.constexpr, REVERSE: tl.constexpr):
    """Block of a map (K, K), or of its transpose, read along its rows."""
    if REVERSE:
        inside = (columns < K)[:, None] & (rows < K)[None, :] & known
        block = tl.trans(tl.load(map + columns[:, None] * K + rows[None, :], mask=inside, other=0.0))
    else:
        inside = (rows < K)[:, None] & (columns < K)[None, :] & known
        block = tl.load(map + rows[:, None] * K + columns[None, :], mask=inside, other=0.0)
    return block


@Kernel
@triton.jit(do_not_specialize=["S", "N", "HV"])
def merge(
    constants, maps, spans, edge, starts, S, N, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, FLAGS: tl.constexpr, MATRIX: tl.constexpr, WHOLE: tl.constexpr, GATED: tl.constexpr,
    REVERSE: tl.constexpr, STARTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """States before the segments of an entry, one after another: X <- X map + constant, in float32.

    edge (entries, HV, V, K): the first state of the first segment (REVERSE: the gradient of the last segment's last
    state), without STARTED zero, and its map is not read; starts receives it and the others. REVERSE takes maps
    transposed. maps (units, HV, K, K), with GATED zero and never written where `spans` says so, or without MATRIX
    (units, HV) numbers. A program goes on from the edge, or from a segment whose map is zero, to the next such segment.
    Without WHOLE the state passes through memory, so that its blocks can meet blocks of the map.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    BLOCK: tl.constexpr = 64
    pid = tl.program_id(0).to(tl.int64)
    v = (pid % PARTS).to(tl.int32) * BV + tl.arange(0, BV)
    head = pid // PARTS % HV
    unit = pid // PARTS // HV
    entry = unit // S
    first = (unit - entry * S).to(tl.int32)  # in the order of this pass
    d = tl.arange(0, BK)
    at = v[:, None] * K + d[None, :]
    shown = (v < V)[:, None] & (d < K)[None, :]
    if REVERSE:
        here = (entry * S + S - 1) * HV + head
        step = -HV
    else:
        here = entry * S * HV + head
        step = HV
    last = S - 1
    begins = first == 0
    if GATED:
        n = tl.arange(0, FLAGS)
        flag = spans + (here + n.to(tl.int64) * step) * 2
        tail = tl.load(flag, mask=n < S - 1, other=0)
        shut = (tail <= N) | (tl.load(flag + 1, mask=n < S - 1, other=0) <= N)
        last = tl.min(tl.where(shut & (n >= first), n, S - 1), 0)
        begins = begins | (tl.sum(tl.where(shut & (n == first - 1), 1, 0), 0) > 0)
    if not begins:
        return
    here += first.to(tl.int64) * step
    state = tl.load(constants + (here - step) * (V * K) + at, mask=shown & (first > 0), other=0.0)
    if STARTED:
        state += tl.load(edge + (entry * HV + head) * (V * K) + at, mask=shown & (first == 0), other=0.0)
    tl.store(starts + here * (V * K) + at, state, mask=shown)
    for n in range(first, last):
        known = STARTED or n > 0
        if WHOLE:
            constant = tl.load(constants + here * (V * K) + at, mask=shown, other=0.0)
            if MATRIX:
                map = _map_block(maps + here * (K * K), d, d, known, K, REVERSE)
                state = tl.dot(state, map, input_precision=PRECISION) + constant
            else:
                state = state * tl.load(maps + here) + constant
            tl.store(starts + (here + step) * (V * K) + at, state, mask=shown)
        else:
            tl.debug_barrier()  # what other threads of the program wrote
            for out in tl.static_range(0, K, BLOCK):
                to = out + tl.arange(0, BLOCK)
                cell = v[:, None] * K + to[None, :]
                within = (v < V)[:, None] & (to < K)[None, :]
                block = tl.load(constants + here * (V * K) + cell, mask=within, other=0.0)
                for left in tl.static_range(0, K, BLOCK):
                    by = left + tl.arange(0, BLOCK)
                    read = (v < V)[:, None] & (by < K)[None, :]
                    old = tl.load(starts + here * (V * K) + v[:, None] * K + by[None, :], mask=read, other=0.0)
                    map = _map_block(maps + here * (K * K), by, to, known, K, REVERSE)
                    block += tl.dot(old, map, input_precision=PRECISION)
                tl.store(starts + (here + step) * (V * K) + cell, block, mask=within)
        here += step
