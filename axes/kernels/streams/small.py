"""Small matrices, one a thread: entries are registers, row by row in a tuple; no sum waits for another thread."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv

FEW = 4  # up to so many rows
_WARPS = 1


@triton.jit
def _place(matrices, ROWS: tl.constexpr):
    matrix = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return matrix, matrix < matrices


@triton.jit
def _entries(x, matrix, there, N: tl.constexpr):
    """The N N entries of matrices, row by row."""
    z = ()
    for e in tl.static_range(N * N):
        z = z + (tl.load(x + matrix * (N * N) + e, mask=there, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return z


@triton.jit
def _kept(x, z, matrix, there, N: tl.constexpr):
    for e in tl.static_range(N * N):
        tl.store(x + matrix * (N * N) + e, z[e].to(x.dtype.element_ty), mask=there)


@triton.jit
def _sums(z, N: tl.constexpr, AXIS: tl.constexpr):
    """Of every column (AXIS 0) or row."""
    found = ()
    for k in tl.static_range(N):
        total = z[k if AXIS == 0 else k * N]
        for i in tl.static_range(1, N):
            total += z[i * N + k if AXIS == 0 else k * N + i]
        found = found + (total,)  # type: ignore[assignment]
    return found


@triton.jit
def _less(z, c, N: tl.constexpr, AXIS: tl.constexpr):
    """Entries less one number for each column or row."""
    made = ()
    for e in tl.static_range(N * N):
        made = made + (z[e] - c[e % N if AXIS == 0 else e // N],)  # type: ignore[assignment]
    return made


@triton.jit
def _times(w, c, N: tl.constexpr, AXIS: tl.constexpr):
    """Entries times one number for each column or row."""
    made = ()
    for e in tl.static_range(N * N):
        made = made + (w[e] * c[e % N if AXIS == 0 else e // N],)  # type: ignore[assignment]
    return made


def launch(kernel: Kernel, matrices: int, *given: Any, **constants: Any) -> None:
    """given: ahead of the number of matrices; constants: what comes behind it."""
    rows = 32 * _WARPS
    kernel[(cdiv(matrices, rows),)](*given, matrices, ROWS=rows, num_warps=_WARPS, **constants)
