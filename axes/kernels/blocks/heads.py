"""Tiles of one head of some tokens, where a head's parameters stay and tokens go by: (tokens, H, D) in memory."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.sizes import cdiv, power_of_2

_ENTRIES, _WARPS = 8, 4  # of a tile in a thread
_PROGRAMS = 132 * 16  # at most, with a row of sums each


def cut(x: Tensor) -> tuple[int, dict[str, Any]]:
    """x (B, T, H, D): programs of a head, and the kernel's sizes."""
    tokens, heads, d = x.shape[0] * x.shape[1], x.shape[2], x.shape[3]
    side = power_of_2(d)
    rows = max(1, 32 * _WARPS * _ENTRIES // side)
    tiles = cdiv(tokens, rows)
    steps = cdiv(tiles * heads, _PROGRAMS)
    sizes = {"tokens": tokens, "steps": steps, "H": heads, "D": d, "DP": side, "BR": rows, "num_warps": _WARPS}
    return cdiv(tiles, steps), sizes


@triton.jit
def columns(ptr, D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr):
    """The head's numbers (1, D)."""
    column = tl.arange(0, DP)
    return tl.load(ptr + tl.program_id(0) % H * D + column, mask=column < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _place(n, steps, tokens, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr):
    token = ((tl.program_id(0) // H).to(tl.int64) * steps + n) * BR + tl.arange(0, BR)
    column = tl.arange(0, DP)
    at = (token * H + tl.program_id(0) % H)[:, None] * D + column[None, :]
    return at, (token < tokens)[:, None] & (column < D)[None, :]


@triton.jit
def load(ptr, n, steps, tokens, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr):
    """The program's n-th tile (tokens, D) in float32, zero where there is nothing."""
    at, held = _place(n, steps, tokens, H, D, DP, BR)
    return tl.load(ptr + at, mask=held, other=0.0).to(tl.float32)


@triton.jit
def store(ptr, x, n, steps, tokens, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr):
    at, held = _place(n, steps, tokens, H, D, DP, BR)
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=held)
