"""(I + L)^-1 of a chunk's strictly lower matrix L, once for every portable kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from axes.kernels.common.tiles import TILE


def constants(dtype: torch.dtype, chunk: int, warps: int) -> dict[str, int | str]:
    """What `invert` is given for tokens of this dtype in a kernel of so many warps."""
    return {"SIDE": TILE, "LANES": max(chunk, 32 * warps), "MERGE": "ieee" if dtype == torch.float32 else "tf32x3"}


@triton.jit
def stacked(rows, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """(COUNT, width) of 2^LEVELS rows, each row in the registers of the threads that hold its columns."""
    parts = rows
    for level in tl.static_range(LEVELS):
        joined = ()
        for r in tl.static_range(COUNT >> (level + 1)):
            joined = joined + (tl.join(parts[r], parts[r + (COUNT >> (level + 1))]),)  # type: ignore[assignment]
        parts = joined
    return tl.trans(tl.reshape(parts[0], [rows[0].shape[0], COUNT]))


@triton.jit
def invert(lowers, m, C: tl.constexpr, SIDE: tl.constexpr, LANES: tl.constexpr, MERGE: tl.constexpr):
    """m = (I + lowers)^-1, both (C, C) in memory, apart: substitution in diagonal blocks of SIDE rows, then blocks of
    twice the size, whose products have precision MERGE. C is SIDE, 2 SIDE or 4 SIDE; lowers is float32.

    Powers of `lowers` are never formed: with keys close to each other they grow past what float32 resolves. A thread
    owns columns in the substitution, with the rows of a block in its registers, so that nothing moves between threads:
    each row is a tensor of its own, since the layout of a tile of rows is the compiler's to choose. LANES is C, or the
    number of threads where that is more. lowers was written before a barrier, if by this program.
    """
    kind = m.dtype.element_ty
    B: tl.constexpr = C // SIDE
    lane = tl.arange(0, LANES)  # the columns of all blocks
    block, inside = lane // SIDE * SIDE, lane < C
    rows = ()
    for r in tl.static_range(SIDE):
        row = tl.where((lane - block == r) & inside, 1.0, 0.0)
        for n in tl.static_range(r):
            row -= tl.load(lowers + (block + r) * C + block + n, mask=inside, other=0.0) * rows[n]
        rows = rows + (row,)  # type: ignore[assignment]
    LEVELS: tl.constexpr = SIDE.bit_length() - 1
    x = stacked(rows, SIDE, LEVELS)
    if B == 1:
        tl.store(m + tl.arange(0, SIDE)[:, None] * C + lane[None, :], x.to(kind), mask=inside[None, :])
    else:
        if LANES > C:  # lanes past the last column hold zeros
            x = tl.sum(tl.reshape(x, [SIDE, LANES // C, C]), axis=1)
        P: tl.constexpr = B // 2
        WIDE: tl.constexpr = 2 * SIDE
        x1, x2 = tl.split(tl.permute(tl.reshape(x, [SIDE, P, 2, SIDE]), (1, 0, 3, 2)))
        p = tl.arange(0, P)[:, None, None] * WIDE
        i = tl.arange(0, SIDE)[None, :, None]
        j = tl.arange(0, SIDE)[None, None, :]
        part = tl.load(lowers + (p + SIDE + i) * C + p + j)
        if P == 1:
            inner = tl.dot(tl.reshape(part, [SIDE, SIDE]), tl.reshape(x1, [SIDE, SIDE]), input_precision=MERGE)
            cross = tl.dot(tl.reshape(x2, [SIDE, SIDE]), inner, input_precision=MERGE)
            cross = tl.reshape(cross, [P, SIDE, SIDE])
        else:
            cross = tl.dot(x2, tl.dot(part, x1, input_precision=MERGE), input_precision=MERGE)
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
            cross = tl.dot(x2, tl.dot(part, x1, input_precision=MERGE), input_precision=MERGE)
            tl.store(m + (WIDE + i) * C + j, (-cross).to(kind))
            tl.store(m + i * C + WIDE + j, tl.zeros_like(cross).to(kind))
