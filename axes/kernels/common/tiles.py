"""Building blocks of the chunk kernels, device side: which tokens a program works on, tiles, decays, the inverse.

Tokens are rows of a flat (tokens, H, D) view of (B, T, H, D); a unit is a run of rows that one state passes through: a
batch entry, a packed sequence, a segment. Chunks of C rows have slots: unit u's n-th chunk sits in slot base(u) + n.
Row numbers and offsets are int64. Rows outside a unit read as zero and are never written. Gates are logs, floored at
-100 (exp is zero in float32 far before), so that differences of cumulative sums stay numbers, and masked before exp, so
that no exponent is positive.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 16  # rows of a block that forward substitution inverts; also the smallest side of a matrix product


# ---- which tokens --------------------------------------------------------------------------------------------------


@triton.jit
def unit_rows(offsets, unit, T, PACKED: tl.constexpr):
    """First row of a unit and the row after its last: (first, end), int64."""
    if PACKED:
        first = tl.load(offsets + unit).to(tl.int64)
        end = tl.load(offsets + unit + 1).to(tl.int64)
    else:
        first = unit.to(tl.int64) * T
        end = first + T
    return first, end


@triton.jit
def first_slot(first, unit, N, C, PACKED: tl.constexpr):
    """Slot of a unit's first chunk: dense units have N slots each; packed ones start at first // C + unit, which
    leaves room for every chunk without knowing the lengths on the host."""
    if PACKED:
        slot = first // C + unit
    else:
        slot = unit.to(tl.int64) * N
    return slot


@triton.jit
def slot_rows(offsets, units, slot, T, N, C, PACKED: tl.constexpr):
    """Unit, first row and end row of the chunk in a slot; an empty slot of a packed layout has first >= end."""
    if PACKED:
        unit = tl.load(units + slot).to(tl.int64)
    else:
        unit = slot.to(tl.int64) // N
    first, end = unit_rows(offsets, unit, T, PACKED)
    first += (slot - first_slot(first, unit, N, C, PACKED)) * C
    return unit, first, tl.minimum(first + C, end)


# ---- tiles ---------------------------------------------------------------------------------------------------------


@triton.jit
def load_rows(ptr, rows, end, columns, head, H, D: tl.constexpr):
    """Tile (rows, columns) of one head of a (tokens, H, D) tensor; zero from row `end` on. rows are int64."""
    at = ptr + (rows * H + head)[:, None] * D + columns[None, :]
    return tl.load(at, mask=(rows < end)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, tile, rows, end, columns, head, H, D: tl.constexpr):
    """Write a tile that `load_rows` would read."""
    at = ptr + (rows * H + head)[:, None] * D + columns[None, :]
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=(rows < end)[:, None] & (columns < D)[None, :])


@triton.jit
def load_numbers(ptr, rows, end, head, H):
    """One float32 number a token of a (tokens, H) tensor; zero from row `end` on."""
    return tl.load(ptr + rows * H + head, mask=rows < end, other=0.0).to(tl.float32)


@triton.jit
def cumulative_gate(ptr, rows, end, head, H, C: tl.constexpr, GATED: tl.constexpr):
    """Cumulative log gates of a chunk's tokens and their total."""
    if GATED:
        log = tl.maximum(load_numbers(ptr, rows, end, head, H), -100.0)
        run, total = tl.cumsum(log, 0), tl.sum(log, 0)
    else:
        run, total = tl.zeros([C], dtype=tl.float32), 0.0
    return run, total


@triton.jit
def decay(late, early, keep):
    """exp(late - early) where keep, else 0: masked before exp."""
    return tl.exp(tl.where(keep, late - early, float("-inf")))


@triton.jit
def accumulate(state, u, k, PRECISION: tl.constexpr):
    """state + sum_t u_t k_t^T over a tile of tokens, u (C, V), k (C, K), state (V, K) in float32.

    The sum is outside the matrix unit, which truncates what it adds to.
    """
    return tl.fma(tl.dot(tl.trans(u), k, input_precision=PRECISION), 1.0, state)


# ---- (I + L)^-1 ----------------------------------------------------------------------------------------------------


@triton.jit
def _diagonal(x, C: tl.constexpr, SIDE: tl.constexpr):
    """The diagonal blocks (C / SIDE, SIDE, SIDE) of (C, C)."""
    B: tl.constexpr = C // SIDE
    same = tl.arange(0, B)[:, None, None, None] == tl.arange(0, B)[None, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(x, [B, SIDE, B, SIDE]), 0.0), axis=2)


@triton.jit
def _merge(lower, x, C: tl.constexpr, SIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses x (2 B, SIDE, SIDE) of diagonal blocks to those (B, C, C) of the blocks `lower` of twice the size."""
    B: tl.constexpr = x.shape[0] // 2
    pair = tl.reshape(x, [B, 2, SIDE, SIDE])
    second = tl.arange(0, 2)[None, :, None, None] == 1
    x1 = tl.sum(tl.where(second, 0.0, pair), axis=1)
    x2 = tl.sum(tl.where(second, pair, 0.0), axis=1)
    quarters = tl.reshape(lower, [B, 2, SIDE, 2, SIDE])
    row = tl.arange(0, 2)[None, :, None, None, None]
    col = tl.arange(0, 2)[None, None, None, :, None]
    part = tl.sum(tl.sum(tl.where((row == 1) & (col == 0), quarters, 0.0), axis=3), axis=1)
    if B == 1:
        flat1 = tl.reshape(x1, [SIDE, SIDE])
        flat2 = tl.reshape(x2, [SIDE, SIDE])
        inner = tl.dot(tl.reshape(part, [SIDE, SIDE]), flat1, input_precision=PRECISION)
        cross = tl.reshape(tl.dot(flat2, inner, input_precision=PRECISION), [B, SIDE, SIDE])
    else:
        cross = tl.dot(x2, tl.dot(part, x1, input_precision=PRECISION), input_precision=PRECISION)
    out = tl.where((row == 0) & (col == 0), x1[:, None, :, None, :], 0.0)
    out += tl.where((row == 1) & (col == 1), x2[:, None, :, None, :], 0.0)
    out -= tl.where((row == 1) & (col == 0), cross[:, None, :, None, :], 0.0)
    return tl.reshape(out, [B, C, C])


@triton.jit
def inverse(lower, C: tl.constexpr, SIDE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower (C, C): substitution in the diagonal blocks, then blocks of twice the size.

    Powers of `lower` are never formed: with keys close to each other they grow past what float32 resolves.
    """
    B: tl.constexpr = C // SIDE
    blocks = _diagonal(lower, C, SIDE)
    row = tl.arange(0, SIDE)[None, :, None]
    col = tl.arange(0, SIDE)[None, None, :]
    x = tl.where(row == col, 1.0, 0.0) + tl.zeros([B, SIDE, SIDE], dtype=tl.float32)
    for i in range(1, SIDE):
        line = tl.sum(tl.where(row == i, blocks, 0.0), axis=1)
        gain = tl.sum(line[:, :, None] * x, axis=1)
        x = x - tl.where(row == i, gain[:, None, :], 0.0)
    if C == 2 * SIDE:
        x = _merge(lower, x, C, SIDE, PRECISION)
    if C == 4 * SIDE:
        x = _merge(_diagonal(lower, C, 2 * SIDE), x, 2 * SIDE, SIDE, PRECISION)
        x = _merge(lower, x, C, 2 * SIDE, PRECISION)
    return tl.reshape(x, [C, C])
