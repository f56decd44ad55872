"""What is read over its mass, row by row: the division that takes a normaliser's bias out, in one launch and back.

    o_n = y_n / c_n,     c_n = m_n,  or max(|m_n|, floor);     o_n = 0 where c_n = 0
Backwards    dy_n = do_n / c_n,    dm_n = - <do_n, o_n> / c_n,    times the sign of m_n, and 0 below a floor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import LARGEST, on_device
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.common.tiles import divisor
from axes.kernels.rows.places import entries, of_program

_NUMBERS = 4096  # of a program


@Kernel
@triton.jit(do_not_specialize=["N"])
def _over_mass(y, mass, o, N, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, FLOOR: tl.constexpr):
    row = of_program(BR)
    held, at, there = entries(row, N, D, DP)
    c, empty = divisor(tl.load(mass + row, mask=held, other=1.0).to(tl.float32), FLOOR)
    read = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
    tl.store(o + at, tl.where(empty[:, None], 0.0, read / c[:, None]).to(o.dtype.element_ty), mask=there)


@Kernel
@triton.jit(do_not_specialize=["N"])
def _over_mass_backward(
    mass, o, do, dy, dmass, N, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, FLOOR: tl.constexpr
):
    row = of_program(BR)
    held, at, there = entries(row, N, D, DP)
    m = tl.load(mass + row, mask=held, other=1.0).to(tl.float32)
    c, empty = divisor(m, FLOOR)
    d = tl.load(do + at, mask=there, other=0.0).to(tl.float32) / c[:, None]
    d = tl.where(empty[:, None], 0.0, d)
    tl.store(dy + at, d.to(dy.dtype.element_ty), mask=there)
    change = -tl.sum(d * tl.load(o + at, mask=there, other=0.0).to(tl.float32), 1)
    if FLOOR > 0:
        change = tl.where(tl.abs(m) < FLOOR, 0.0, tl.where(m < 0, -change, change))
    tl.store(dmass + row, change.to(dmass.dtype.element_ty), mask=held)


def _sizes(y: Tensor, floor: float) -> tuple[int, dict[str, int | float]]:
    n, d = y.numel() // y.shape[-1], y.shape[-1]
    wide = power_of_2(d)
    each = max(1, _NUMBERS // wide)
    return cdiv(n, each), {"N": n, "D": d, "DP": wide, "BR": each, "FLOOR": floor}


def _forward(y: Tensor, mass: Tensor, floor: float, record: bool) -> tuple[Tensor, list[Tensor]]:
    o = torch.empty_like(y)
    if y.numel():
        programs, sizes = _sizes(y, floor)
        with on_device(y):
            _over_mass[(programs,)](y, mass, o, **sizes)
    return o, []


def _backward(y: Tensor, mass: Tensor, floor: float, kept: list[Tensor], do: Tensor) -> list[Tensor]:
    (o,) = kept
    dy, dmass = torch.empty_like(y), torch.empty_like(mass)
    if y.numel():
        programs, sizes = _sizes(y, floor)
        with on_device(y):
            _over_mass_backward[(programs,)](mass, o, do, dy, dmass, **sizes)
    return [dy, dmass]


def _shapes(y: Tensor, mass: Tensor, floor: float, record: bool) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(y), []


_divided = Differentiable("over_mass", _forward, _backward, _shapes, gradients=2, reads=1)


def over_mass(y: Tensor, mass: Tensor, floor: float = 0.0) -> Tensor:
    """y (..., D) over mass (..., 1), or over max(|mass|, floor); an empty memory, of mass 0, reads zero.

    In float32 whatever the dtypes; the result has y's. Both receive gradients, once. Raises ShapeError on what does
    not fit.
    """
    if y.ndim < 1 or mass.shape != (*y.shape[:-1], 1) or not 0 < y.shape[-1] <= LARGEST:
        raise ShapeError(
            f"over_mass: y is (..., D), D up to {LARGEST}, and mass (..., 1), not {tuple(y.shape)}, {tuple(mass.shape)}"
        )
    made: Tensor = _divided(y.contiguous(), mass.contiguous(), floor)[0]
    return made
