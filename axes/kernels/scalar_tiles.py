"""Device side of the scalar chain that its two rules share: spans of units and chunks, tiles of a chunk, gates.

A unit is a run of tokens with one state: a packed sequence, or one of S segments of L tokens of a batch entry of T
tokens (S = 1 and L = T without segments). Matrices of chunks (slots x HV, ., .) lie unit by unit, then head by head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.tiles import unit_rows


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
def load_tile(ptr, first, rows, columns, head, H, D: tl.constexpr, C: tl.constexpr):
    """`rows` rows from row `first` of one head of a (tokens, H, D) tensor, the rest of C zero; int32 inside."""
    token = tl.arange(0, C)
    at = (token * (H * D))[:, None] + columns[None, :]
    return tl.load(ptr + (first * H + head) * D + at, mask=(token < rows)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def load_unit(ptr, scale, first, rows, columns, head, H, D: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr):
    """`load_tile`, with UNIT of vectors times their numbers `scale` (tokens, H): 1 / length."""
    tile = load_tile(ptr, first, rows, columns, head, H, D, C)
    if UNIT:
        by = load_line(scale, first, rows, head, H, C)
        tile = (tile.to(tl.float32) * by[:, None]).to(tile.dtype)
    return tile


@triton.jit
def store_tile(ptr, tile, first, rows, columns, head, H, D: tl.constexpr, C: tl.constexpr):
    """Write a tile that `load_tile` would read."""
    token = tl.arange(0, C)
    at = (token * (H * D))[:, None] + columns[None, :]
    mask = (token < rows)[:, None] & (columns < D)[None, :]
    tl.store(ptr + (first * H + head) * D + at, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_line(ptr, first, rows, head, H, C: tl.constexpr):
    """One float32 number a token of a (tokens, H) tensor."""
    token = tl.arange(0, C)
    return tl.load(ptr + first * H + head + token * H, mask=token < rows, other=0.0).to(tl.float32)


@triton.jit
def store_line(ptr, line, first, rows, head, H, C: tl.constexpr):
    """Write what `load_line` would read."""
    token = tl.arange(0, C)
    tl.store(ptr + first * H + head + token * H, line, mask=token < rows)


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
        log = tl.maximum(load_line(g, first, rows, head, HV, C), -100.0)
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
def inverse_lengths(x, scale, first, rows, head, H, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """scale = 1 / sqrt(|x|^2 + 1e-6) of a chunk's vectors."""
    square = tl.zeros([C], dtype=tl.float32)
    for left in tl.static_range(0, K, BK):
        tile = load_tile(x, first, rows, left + tl.arange(0, BK), head, H, K, C).to(tl.float32)
        square += tl.sum(tile * tile, 1)
    line = 1.0 / tl.sqrt(square + 1e-6)
    store_line(scale, line, first, rows, head, H, C)
    return line


@triton.jit
def project(grad, x, scale, dots, first, rows, head, key, H, HV, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Gradients of unit vectors y = scale x, in place, to those of x: scale (dy - y (y . dy)), dots = y . dy."""
    by = load_line(scale, first, rows, key, H, C)
    for left in tl.static_range(0, K, BK):
        d = left + tl.arange(0, BK)
        y = load_tile(x, first, rows, d, key, H, K, C).to(tl.float32) * by[:, None]
        old = load_tile(grad, first, rows, d, head, HV, K, C).to(tl.float32)
        store_tile(grad, by[:, None] * (old - y * dots[:, None]), first, rows, d, head, HV, K, C)


@triton.jit(do_not_specialize=["S", "HV"])
def merge(
    constants, maps, starts, S, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MATRIX: tl.constexpr, REVERSE: tl.constexpr, STARTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """States before the segments of an entry, one after another: X <- X map + constant, in float32.

    starts holds the first state of the first segment (REVERSE: the gradient of the last segment's last state) and
    receives the others; REVERSE takes maps transposed. maps (units, HV, K, K), or without MATRIX (units, HV) numbers.
    The state passes through memory, so that its blocks can meet blocks of the map. Without STARTED the first state is
    zero and its map is not read.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    v = (pid % PARTS).to(tl.int32) * BV + tl.arange(0, BV)
    head = pid // PARTS % HV
    entry = pid // PARTS // HV
    for n in range(S - 1):
        if REVERSE:
            here = (entry * S + S - 1 - n) * HV + head
            there = here - HV
        else:
            here = (entry * S + n) * HV + head
            there = here + HV
        for out in tl.static_range(0, K, BK):
            to = out + tl.arange(0, BK)
            at = v[:, None] * K + to[None, :]
            shown = (v < V)[:, None] & (to < K)[None, :]
            state = tl.load(constants + here * (V * K) + at, mask=shown, other=0.0)
            if MATRIX:
                for left in tl.static_range(0, K, BK):
                    by = left + tl.arange(0, BK)
                    old = tl.load(
                        starts + here * (V * K) + v[:, None] * K + by[None, :],
                        mask=(v < V)[:, None] & (by < K)[None, :], other=0.0,
                    )  # fmt: skip
                    if REVERSE:
                        cell = to[None, :] * K + by[:, None]
                    else:
                        cell = by[:, None] * K + to[None, :]
                    known = (by < K)[:, None] & (to < K)[None, :] & (STARTED or n > 0)
                    block = tl.load(maps + here * (K * K) + cell, mask=known, other=0.0)
                    state += tl.dot(old, block, input_precision=PRECISION)
            else:
                old = tl.load(starts + here * (V * K) + at, mask=shown, other=0.0)
                state += tl.load(maps + here) * old
            tl.store(starts + there * (V * K) + at, state, mask=shown)
        tl.debug_barrier()  # the next step reads what other threads of the program wrote
