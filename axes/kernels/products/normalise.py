"""Matrices of a stack over their Frobenius norms, in float16: sums of squares by blocks, one divisor, then quotients.

Whoever writes the stack may bring the sums: then it is read once. Sums of a matrix are added by one program, always in
the same order: results repeat bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv

_BLOCK = 8192  # entries of a program
_SUMS = 4096  # sums that are added at a time


@Kernel
@triton.jit
def _squares(x, sums, size, blocks, BLOCK: tl.constexpr):
    """The sum of squares of one block of one matrix."""
    pid = tl.program_id(0).to(tl.int64)
    matrix, block = pid // blocks, pid % blocks
    at = block * BLOCK + tl.arange(0, BLOCK)
    entries = tl.load(x + matrix * size + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(sums + pid, tl.sum(entries * entries))


@Kernel
@triton.jit
def _divisors(sums, divisors, parts, factor, shift, floor, there, BLOCK: tl.constexpr, MOVES: tl.constexpr):
    """max(factor norm + shift, floor) of one matrix, from its sums of squares. MOVES: the floor is what is there."""
    matrix = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, parts, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(sums + matrix * parts + at, mask=at < parts, other=0.0)
    least = tl.load(there).to(tl.float32) if MOVES else floor
    tl.store(divisors + matrix, tl.maximum(factor * tl.sqrt(tl.sum(total)) + shift, least))


@Kernel
@triton.jit
def _quotients(x, y, divisors, size, blocks, BLOCK: tl.constexpr):
    """One block of one matrix over its divisor."""
    pid = tl.program_id(0).to(tl.int64)
    matrix, block = pid // blocks, pid % blocks
    divisor = tl.load(divisors + matrix)
    at = block * BLOCK + tl.arange(0, BLOCK)
    entries = tl.load(x + matrix * size + at, mask=at < size).to(tl.float32)
    tl.store(y + matrix * size + at, (entries / divisor).to(tl.float16), mask=at < size)


def normalised(x: Tensor, factor: float, shift: float, floor: float | Tensor, squares: Tensor | None = None) -> Tensor:
    """x (N, m, n) over max(factor |x|_F + shift, floor), matrix by matrix, in float16 and stored as x is.

    x is contiguous, or `.mT` of what is. squares: (N, any number) contiguous float32 that add up to the squares of each
    matrix, where they are known. floor: a number, or a tensor of one beside x. Raises ShapeError for other layouts and
    devices that no kernel runs on.
    """
    columns = not x.is_contiguous()
    flat = x.mT if columns else x
    if x.ndim != 3 or not flat.is_contiguous():
        raise ShapeError(f"normalised: x is (N, m, n), by rows or by columns, not {tuple(x.shape)} with {x.stride()}")
    if x.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"normalised: the Triton kernel needs a CUDA device, not {x.device}")
    if squares is not None and (squares.shape[:-1] != x.shape[:1] or not squares.is_contiguous()):
        raise ShapeError(
            f"normalised: squares are (N, any number), contiguous, with N {x.shape[0]}, not {tuple(squares.shape)}"
        )
    y = torch.empty_like(flat, dtype=torch.float16)
    size = x.shape[1] * x.shape[2]
    if not y.numel():
        return y.mT if columns else y
    blocks = cdiv(size, _BLOCK)
    grid = (x.shape[0] * blocks,)
    divisors = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    with layout.on_device(x):
        if squares is None:
            squares = torch.empty(x.shape[0], blocks, dtype=torch.float32, device=x.device)
            _squares[grid](flat, squares, size, blocks, BLOCK=_BLOCK, num_warps=8)
        moves = isinstance(floor, Tensor)
        least, there = (0.0, floor) if isinstance(floor, Tensor) else (floor, squares)
        _divisors[(x.shape[0],)](
            squares, divisors, squares.shape[1], factor, shift, least, there, BLOCK=_SUMS, MOVES=moves, num_warps=8
        )
        _quotients[grid](flat, y, divisors, size, blocks, BLOCK=_BLOCK, num_warps=8)
    return y.mT if columns else y
