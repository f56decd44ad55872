"""A mass, in float64, as two float32 numbers: a kernel multiplies and compares the first and adds what is missing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv

_MANY = 1024


@Kernel
@triton.jit(do_not_specialize=["n"])
def _split(mass, high, low, n, MANY: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
    x = tl.load(mass + at, mask=at < n, other=0.0)
    near = x.to(tl.float32)
    tl.store(high + at, near, mask=at < n)
    rest = (x - near.to(tl.float64)).to(tl.float32)
    tl.store(low + at, tl.where(near - near == 0.0, rest, 0.0), mask=at < n)


def split(mass: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """high + low, with the strides of the mass if these leave no gaps; any tensor where there is none."""
    if mass is None:
        return like, like
    high = torch.empty_like(mass, dtype=torch.float32)
    if high.stride() != mass.stride():
        mass, high = mass.contiguous(), mass.new_empty(mass.shape, dtype=torch.float32)
    low = torch.empty_like(high)
    if mass.numel():
        with layout.on_device(mass):
            _split[(cdiv(mass.numel(), _MANY),)](mass, high, low, mass.numel(), MANY=_MANY, num_warps=4)
    return high, low
