"""Building blocks of the chunk kernels, device side: which tokens a program works on, tiles, decays.

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

WHOLE = tl.constexpr("tile")  # Triton 3.6 takes no plain string for a default


@triton.jit
def _place(ptr, first, rows, columns, head, H, D: tl.constexpr, C: tl.constexpr, KEPT: tl.constexpr):
    """Pointers to a tile, and which of its numbers there are."""
    token = tl.arange(0, C)
    if KEPT == WHOLE:
        at = (token * (H * D))[:, None] + columns[None, :]
        place = ptr + (first * H + head) * D + at
    elif KEPT == "rows":
        place = ptr + (first * H + head) * D + (token * (H * D))[:, None] + columns[None, :]
    else:
        place = ptr + ((first + token) * H + head)[:, None] * D + columns[None, :]
    return place, (token < rows)[:, None] & (columns < D)[None, :]


@triton.jit
def load_tile(ptr, first, rows, columns, head, H, D: tl.constexpr, C: tl.constexpr, KEPT: tl.constexpr = WHOLE):
    """`rows` rows from row `first` (int64) of one head of a (tokens, H, D) tensor, the rest of C zero.

    KEPT: what a loop that moves `first` may keep of the offsets, int32 of a "tile" or of its "rows", or "nothing": a
    loop that is short of registers works them out every time.
    """
    place, inside = _place(ptr, first, rows, columns, head, H, D, C, KEPT)
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def store_tile(ptr, tile, first, rows, columns, head, H, D: tl.constexpr, C: tl.constexpr, KEPT: tl.constexpr = WHOLE):
    """Write a tile that `load_tile` would read."""
    place, inside = _place(ptr, first, rows, columns, head, H, D, C, KEPT)
    tl.store(place, tile.to(ptr.dtype.element_ty), mask=inside)


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
def floored(log):
    """A log gate held from below. A NaN stays one, which a plain maximum drops."""
    return tl.maximum(log, -100.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def complement(log):
    """1 - e^log of log <= 0: near zero by its series, since a difference would have lost the digits."""
    near = -log * (1.0 + log * (0.5 + log * (0.16666667 + log * 0.041666667)))
    return tl.where(log > -0.0625, near, 1.0 - tl.exp2(log * 1.4426950408889634))


@triton.jit
def divisor(mass, FLOOR: tl.constexpr):
    """A mass, or max(|mass|, floor), one where it is zero, and where that is."""
    c = mass
    if FLOOR > 0:
        c = tl.maximum(tl.abs(mass), FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(c == 0, 1.0, c), c == 0


@triton.jit
def reciprocal(mass, FLOOR: tl.constexpr):
    """1 / `divisor`, zero where nothing was written."""
    c, empty = divisor(mass, FLOOR)
    return tl.where(empty, 0.0, 1.0 / c)


@triton.jit
def apart(strength):
    """A strength held away from zero, by which others are divided: 2^-24, less than float32 rounding of what it scales.
    A NaN stays one."""
    return tl.where(tl.abs(strength) < 5.9604644775390625e-08, 5.9604644775390625e-08, strength)


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
