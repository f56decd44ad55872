"""Values that are not finite set aside, in one pass: vectors with zeros in their place, and which vectors had some.

    y = x where x is finite, else 0;    bad = whether a vector has an entry that is not
Of log gates minus infinity is a gate of zero, no accident, and stays. Nothing that hears of a zero in the place of what
was not finite keeps a gradient (`axes.routes.finite`), so that y hands its own to x as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import on_device
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv
from axes.kernels.rows.scaled import DIMS, WIDEST, _at, _rows, _strides

_NUMBERS, _WARPS = 1024, 4  # of a program


@Kernel
@triton.jit(do_not_specialize=["N", "B", "C", "x0", "x1", "x2"])
def _set_aside(
    x, y, bad, N, B, C, x0, x1, x2,
    D: tl.constexpr, X: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, there, column, held = _rows(N, ROWS, D, BLOCK)
    given = tl.load(x + _at(row, B, C, x0, x1, x2) + column * X, mask=held, other=0.0)
    wide = given.to(tl.float32)
    fine = tl.abs(wide) < float("inf")  # a NaN is not
    if GATE:
        fine = fine | (wide == float("-inf"))
    tl.store(y + row[:, None] * D + column, tl.where(fine, given, 0.0).to(y.dtype.element_ty), mask=held)
    tl.store(bad + row, tl.max(tl.where(fine, 0, 1), 1) > 0, mask=there)


def fits(x: Tensor) -> bool:
    """Whether `set_aside` takes it: on a CUDA device, vectors of at most 1,024 entries in at most four dimensions."""
    narrow = x.is_floating_point() and x.itemsize <= 4
    return x.is_cuda and narrow and 1 < x.ndim <= DIMS and 0 < x.shape[-1] <= WIDEST and x.numel() > 0


def _laid(x: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """x as it lies in memory, vectors last; what a launch fills, vectors and a flag for each, in the same order; and
    the way back from that order."""
    strides = x.stride()
    order = (*sorted(range(x.ndim - 1), key=lambda i: -strides[i]), x.ndim - 1)
    laid = x.permute(order)
    made = torch.empty(laid.shape, dtype=x.dtype, device=x.device)
    bad = torch.empty(laid.shape[:-1], dtype=torch.bool, device=x.device)
    return laid, made, bad, tuple(sorted(range(x.ndim), key=order.__getitem__))


def _forward(x: Tensor, gate: bool, record: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    laid, made, bad, back = _laid(x)
    *leading, own = _strides(laid)
    _, b, c, d = (*(1,) * (DIMS - x.ndim), *laid.shape)
    n, block = laid.numel() // d, triton.next_power_of_2(d)
    rows = max(_NUMBERS // block, 1)
    with on_device(x):
        _set_aside[(cdiv(n, rows),)](
            laid, made, bad, n, b, c, *leading, D=d, X=own, GATE=gate, ROWS=rows, BLOCK=block, num_warps=_WARPS
        )
    return made.permute(back), bad.permute(back[:-1]), []


def _shapes(x: Tensor, gate: bool, record: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    _, made, bad, back = _laid(x)
    return made.permute(back), bad.permute(back[:-1]), []


def _backward(x: Tensor, gate: bool, kept: list[Tensor], dy: Tensor, dbad: Tensor) -> list[Tensor]:
    return [dy]


_operator = Differentiable("set_aside", _forward, _backward, _shapes, gradients=1, twice=True)


def set_aside(x: Tensor, gate: bool = False) -> tuple[Tensor, Tensor]:
    """x (..., d) with zeros for what is not finite, in its order of memory, and (...) bool: which vectors had some.

    gate: x holds log gates, of which minus infinity stays and counts as fine. For what `fits`.
    """
    made, bad = _operator(x, gate)
    return made, bad


__all__ = ["fits", "set_aside"]
