"""Matrices of a stack over their Frobenius norms, in float16, in two passes: sums of squares by blocks, then quotients.

Every program of the second pass adds the sums of its matrix in the same order: results repeat bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels import layout
from axes.kernels.launch import Kernel

_BLOCK = 8192


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
def _quotients(
    x, y, sums, size, blocks, factor, shift, floor,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one matrix over max(factor norm + shift, floor)."""
    pid = tl.program_id(0).to(tl.int64)
    matrix, block = pid // blocks, pid % blocks
    place = tl.arange(0, BLOCKS)
    norm = tl.sqrt(tl.sum(tl.load(sums + matrix * blocks + place, mask=place < blocks, other=0.0)))
    divisor = tl.maximum(factor * norm + shift, floor)
    at = block * BLOCK + tl.arange(0, BLOCK)
    entries = tl.load(x + matrix * size + at, mask=at < size).to(tl.float32)
    tl.store(y + matrix * size + at, (entries / divisor).to(tl.float16), mask=at < size)


def normalised(x: Tensor, factor: float, shift: float, floor: float) -> Tensor:
    """x (N, m, n) over max(factor |x|_F + shift, floor), matrix by matrix, in float16 and stored as x is.

    x is contiguous, or `.mT` of what is. Raises ShapeError for other layouts and devices that no kernel runs on.
    """
    columns = not x.is_contiguous()
    flat = x.mT if columns else x
    if x.ndim != 3 or not flat.is_contiguous():
        raise ShapeError(f"normalised: x is (N, m, n), by rows or by columns, not {tuple(x.shape)} with {x.stride()}")
    if x.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"normalised: the Triton kernel needs a CUDA device, not {x.device}")
    y = torch.empty_like(flat, dtype=torch.float16)
    size = x.shape[1] * x.shape[2]
    if not y.numel():
        return y.mT if columns else y
    blocks = triton.cdiv(size, _BLOCK)
    sums = torch.empty(x.shape[0] * blocks, dtype=torch.float32, device=x.device)
    grid = (x.shape[0] * blocks,)
    with layout.on_device(x):
        _squares[grid](flat, sums, size, blocks, BLOCK=_BLOCK, num_warps=8)
        _quotients[grid](
            flat, y, sums, size, blocks, factor, shift, floor,
            BLOCKS=triton.next_power_of_2(blocks), BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return y.mT if columns else y
