"""The gated half of a network, u = silu(g) h of rows [g | h] (..., 2 H), one launch forward and one backward.

    dh = silu(g) du        dg = silu'(g) h du
Both halves are columns of one product, so that tokens are read once by it, and their gradients stand side by side: one
product more, over both, is the whole gradient of the tokens. Rows are taken in groups of 16 columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.blocks.functions import SILU, activate, slope
from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import on_device
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv

COLUMNS = 16  # of a group
_GROUPS, _WARPS = 128, 8  # of a program: 8 numbers of either half in a thread, 16 bytes of a 16-bit number


@triton.jit
def _place(groups, H: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the program's columns are in a row of H numbers, in one of 2 H, and which there are."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    row, column = group // (H // COLUMNS), group % (H // COLUMNS) * COLUMNS
    beside = tl.arange(0, COLUMNS)[None, :]
    held = (group < groups)[:, None] & (beside < COLUMNS)
    return group[:, None] * COLUMNS + beside, (row * (2 * H) + column)[:, None] + beside, held


@Kernel
@triton.jit(do_not_specialize=["groups"])
def _gated(z, u, groups, H: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    at, wide, held = _place(groups, H, GROUPS, COLUMNS)
    g = tl.load(z + wide, mask=held, other=0.0).to(tl.float32)
    h = tl.load(z + wide + H, mask=held, other=0.0).to(tl.float32)
    tl.store(u + at, (activate(g, SILU) * h).to(u.dtype.element_ty), mask=held)


@Kernel
@triton.jit(do_not_specialize=["groups"])
def _gated_backward(z, du, dz, groups, H: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    at, wide, held = _place(groups, H, GROUPS, COLUMNS)
    g = tl.load(z + wide, mask=held, other=0.0).to(tl.float32)
    h = tl.load(z + wide + H, mask=held, other=0.0).to(tl.float32)
    d = tl.load(du + at, mask=held, other=0.0).to(tl.float32)
    tl.store(dz + wide, (d * h * slope(g, SILU)).to(dz.dtype.element_ty), mask=held)
    tl.store(dz + wide + H, (d * activate(g, SILU)).to(dz.dtype.element_ty), mask=held)


def _cut(z: Tensor) -> tuple[int, int, dict[str, int]]:
    """Groups of columns, programs, and the kernels' sizes."""
    groups = z.numel() // (2 * COLUMNS)
    sizes = {"H": z.shape[-1] // 2, "GROUPS": _GROUPS, "COLUMNS": COLUMNS, "num_warps": _WARPS}
    return groups, cdiv(groups, _GROUPS), sizes


def _forward(z: Tensor, record: bool) -> tuple[Tensor, list[Tensor]]:
    groups, programs, sizes = _cut(z)
    u = z.new_empty(*z.shape[:-1], sizes["H"])
    with on_device(z):
        _gated[(programs,)](z, u, groups, **sizes)
    return u, []


def _backward(z: Tensor, kept: list[Tensor], du: Tensor) -> list[Tensor]:
    groups, programs, sizes = _cut(z)
    dz = torch.empty_like(z)
    with on_device(z):
        _gated_backward[(programs,)](z, du, dz, groups, **sizes)
    return [dz]


def _shapes(z: Tensor, record: bool) -> tuple[Tensor, list[Tensor]]:
    return z.new_empty(*z.shape[:-1], z.shape[-1] // 2), []


_operator = Differentiable("gated", _forward, _backward, _shapes, gradients=1)


def gated(z: Tensor) -> Tensor:
    """silu(g) h of z = [g | h] (..., 2 H), with H a multiple of 16, in z's dtype; z receives a gradient, once."""
    if z.ndim < 1 or z.numel() == 0 or z.shape[-1] % (2 * COLUMNS):
        raise ShapeError(f"gated: z is (..., 2 H), not empty, H a multiple of {COLUMNS}, not {tuple(z.shape)}")
    made: Tensor = _operator(z.contiguous())[0]
    return made


__all__ = ["COLUMNS", "gated"]
