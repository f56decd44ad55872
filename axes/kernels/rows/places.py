"""Where the rows of a program and their entries stand, device side."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def of_program(ROWS: tl.constexpr):
    """The rows of a program that has as many as every other."""
    return tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def entries(row, N, D, BLOCK: tl.constexpr):
    """Of rows (N, D): which of them there are, where their entries stand, and which of these there are."""
    column = tl.arange(0, BLOCK)
    held = row < N
    return held, row[:, None] * D + column[None, :], held[:, None] & (column < D)[None, :]
