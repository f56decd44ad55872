"""Keys and queries past whole blocks, by a binary tree of blocks: a query meets every key at one level of it.

Piece p of level l is the blocks from p 2^l up to (p + 1) 2^l. Two blocks' pieces are siblings at exactly one level, of
the highest bit in which their numbers differ: there keys of the left piece stand at its end and queries of the right
one at its start, and their score is a product. So level l holds queries of the blocks that have bit l and keys of those
that have not, (levels, B H, N, C, BD). One level up, the left piece's keys go on through the right piece's map, H, and
the right one's queries back through the left one's; H is kept less the identity, which rounding would hide it behind.
A level costs a product with a d x d map for every token, where walking from block to block would pay that N times.

Levels' maps stand one after another, each (B H, pieces, BD, BD), pieces = ceil(N / 2^l).
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.attention.blocks import square, strip
from axes.kernels.common.launch import Kernel


@Kernel
@triton.jit(do_not_specialize=["pieces"])
def join(maps, parents, pieces, BD: tl.constexpr, PRECISION: tl.constexpr):
    """(I + l) (I + r) less the identity; a piece without a sibling is its own parent."""
    half = (pieces + 1) // 2
    pid = tl.program_id(0).to(tl.int64)
    line, p = pid // half, pid % half
    at = square(BD)
    left = tl.load(maps + (line * pieces + 2 * p) * BD * BD + at)
    found = left.to(tl.float32)
    if 2 * p + 1 < pieces:
        right = tl.load(maps + (line * pieces + 2 * p + 1) * BD * BD + at)
        found = tl.dot(left, right, found + right.to(tl.float32), input_precision=PRECISION)
    tl.store(parents + pid * BD * BD + at, found.to(parents.dtype.element_ty))


@Kernel
@triton.jit(do_not_specialize=["T", "N", "levels"])
def carry(
    start, carried, maps, last, T, N, H, levels,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block's queries, or keys, at every level where they are read; keys at last at the end of all blocks."""
    pid = tl.program_id(0).to(tl.int64)
    n, line = pid % N, pid // N
    lines = tl.num_programs(0).to(tl.int64) // N
    size = lines * N * C * BD
    kind = carried.dtype.element_ty
    here = pid * C * BD + strip(C, BD)
    x = tl.load(start + here).to(tl.float32)
    pieces = N.to(tl.int64)
    for level in range(levels):
        piece = n >> level
        other = piece ^ 1
        if (piece & 1) != KEYS:
            tl.store(carried + level * size + here, x.to(kind))
            if (other < pieces) & (KEYS | (piece > 1)):
                through = tl.load(maps + (line * pieces + other) * BD * BD + square(BD))
                through = through if KEYS else tl.trans(through)
                x = tl.dot(x.to(kind), through, x, input_precision=PRECISION)
        maps += lines * pieces * BD * BD
        pieces = (pieces + 1) // 2
    if KEYS:
        row, columns = n * C + tl.arange(0, C), tl.arange(0, BD)
        at = ((line // H * T + row) * H + line % H)[:, None] * D + columns[None, :]
        tl.store(last + at, x, mask=(row < T)[:, None] & (columns < D)[None, :])


@triton.jit
def _back(
    carried, dcarried, running, mine, first, end, dmap, C: tl.constexpr, BD: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a piece's vectors before its sibling's map, and what they add to that of the map."""
    for n in range(first, end):
        at = n * C * BD + strip(C, BD)
        x, g = tl.load(carried + at), tl.load(running + at)
        own = tl.load(dcarried + at).to(tl.float32) + g.to(tl.float32)
        if KEYS:
            dmap = tl.dot(tl.trans(x), g, dmap, input_precision=PRECISION)
            own = tl.dot(g, tl.trans(mine), own, input_precision=PRECISION)
        else:
            dmap = tl.dot(tl.trans(g), x, dmap, input_precision=PRECISION)
            own = tl.dot(g, mine, own, input_precision=PRECISION)
        tl.store(running + at, own.to(x.dtype))
    return dmap


@Kernel
@triton.jit(do_not_specialize=["N", "pieces", "level"])
def back(
    carried, dcarried, maps, dparents, dbegun, dended, dmaps, N, pieces, level,
    C: tl.constexpr, BD: tl.constexpr, ROOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`carry` and `join` at one level: a program owns a piece's map, and the vectors that pass it, its sibling's.

    ROOT: the parent is the root, whose map nobody reads.
    """
    pid = tl.program_id(0).to(tl.int64)
    line, p = pid // pieces, pid % pieces
    at = square(BD)
    other = p ^ 1
    kind = dmaps.dtype.element_ty
    dmap = tl.zeros([BD, BD], tl.float32)
    if not ROOT:
        above = tl.load(dparents + (line * ((pieces + 1) // 2) + p // 2) * BD * BD + at)
        dmap = above.to(tl.float32)
        if other < pieces:
            beside = tl.load(maps + (line * pieces + other) * BD * BD + at)
            if p % 2 == 0:
                dmap = tl.dot(above, tl.trans(beside), dmap, input_precision=PRECISION)
            else:
                dmap = tl.dot(tl.trans(beside), above, dmap, input_precision=PRECISION)
    if other < pieces:
        mine = tl.load(maps + pid * BD * BD + at)
        first = other << level
        end = tl.minimum(first + (tl.full([], 1, tl.int64) << level), N)
        base = line * N * C * BD
        if p % 2 == 0:
            dmap = _back(
                carried + base, dcarried + base, dbegun + base, mine, first, end, dmap, C, BD, False, PRECISION
            )
        else:
            dmap = _back(carried + base, dcarried + base, dended + base, mine, first, end, dmap, C, BD, True, PRECISION)
    tl.store(dmaps + pid * BD * BD + at, dmap.to(kind))
