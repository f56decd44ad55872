"""Vectors times numbers of another dtype in one pass, and both gradients in another.

    y = x s in x's dtype;    dx = dy s in x's dtype,    ds = dy x, or its sum over a vector where s is a number of it
Products are of float32, a sum is of one row in one order. x, s and dy are read where they stand, whatever their
strides, which are zero where one is the same for several.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import on_device
from axes.kernels.common.sizes import cdiv

WIDEST, DIMS = 1024, 4  # entries of a vector; dimensions, the vector's among them
_NUMBERS, _WARPS = 4096, 4  # of a program
_SIZES = ["N", "B", "C", "x0", "x1", "x2", "s0", "s1", "s2", "d0", "d1", "d2"]


@triton.jit
def _rows(N, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of a program, which of them there are, its columns, and which entries there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    return row, row < N, column, (row < N)[:, None] & (column < D)


@triton.jit
def _at(row, B, C, s0, s1, s2):
    """Where rows of (A, B, C) begin, of such strides."""
    return ((row // C // B) * s0 + (row // C % B) * s1 + (row % C) * s2)[:, None]


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def _scale(
    x, s, y, N, B, C, x0, x1, x2, s0, s1, s2,
    D: tl.constexpr, X: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """X, S: strides of entries; S of -1 says that a vector has one number."""
    row, there, column, held = _rows(N, ROWS, D, BLOCK)
    first = _at(row, B, C, s0, s1, s2)
    if S < 0:
        by = tl.load(s + first, mask=there[:, None], other=0.0).to(tl.float32)
    else:
        by = tl.load(s + first + column * S, mask=held, other=0.0).to(tl.float32)
    vector = tl.load(x + _at(row, B, C, x0, x1, x2) + column * X, mask=held, other=0.0).to(tl.float32)
    tl.store(y + row[:, None] * D + column, (vector * by).to(y.dtype.element_ty), mask=held)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def _scale_backward(
    dy, x, s, dx, ds, N, B, C, d0, d1, d2, x0, x1, x2, s0, s1, s2,
    D: tl.constexpr, G: tl.constexpr, X: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    DX: tl.constexpr, DS: tl.constexpr,
):  # fmt: skip
    row, there, column, held = _rows(N, ROWS, D, BLOCK)
    grad = tl.load(dy + _at(row, B, C, d0, d1, d2) + column * G, mask=held, other=0.0).to(tl.float32)
    if DX:
        first = _at(row, B, C, s0, s1, s2)
        if S < 0:
            by = tl.load(s + first, mask=there[:, None], other=0.0).to(tl.float32)
        else:
            by = tl.load(s + first + column * S, mask=held, other=0.0).to(tl.float32)
        tl.store(dx + row[:, None] * D + column, (grad * by).to(dx.dtype.element_ty), mask=held)
    if DS:
        vector = tl.load(x + _at(row, B, C, x0, x1, x2) + column * X, mask=held, other=0.0).to(tl.float32)
        if S < 0:
            tl.store(ds + row, tl.sum(grad * vector, 1).to(ds.dtype.element_ty), mask=there)
        else:
            tl.store(ds + row[:, None] * D + column, (grad * vector).to(ds.dtype.element_ty), mask=held)


def fits(x: Tensor, by: Tensor) -> bool:
    """Whether `scale` takes these: on a CUDA device, vectors of at most 1,024 entries in at most four dimensions."""
    return x.is_cuda and by.device == x.device and 0 < x.ndim <= DIMS and 0 < x.shape[-1] <= WIDEST and x.numel() > 0


def whole(x: Tensor, by: Tensor) -> bool:
    """Whether every number has one vector, or entry, of its own: its gradient is then that of a row, or entry."""
    return by.shape == x.shape or by.shape == (*x.shape[:-1], 1)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Of four dimensions."""
    return (*(0,) * (DIMS - x.ndim), *x.stride())


def _sizes(x: Tensor, by: Tensor) -> tuple[tuple[int, int, int], tuple[int, ...], int, dict[str, int]]:
    """Rows with the lengths of their two last dimensions, strides of numbers and of their entries, and blocks."""
    shape = (*(1,) * (DIMS - x.ndim), *x.shape)
    one = by.shape[-1] == 1 if by.ndim else True
    *leading, entry = _strides(by.expand(x.shape))
    block = triton.next_power_of_2(shape[3])
    blocks = {"D": shape[3], "ROWS": max(_NUMBERS // block, 1), "BLOCK": block, "num_warps": _WARPS}
    return (x.numel() // shape[3], shape[1], shape[2]), tuple(leading), -1 if one else entry, blocks


def scale(x: Tensor, by: Tensor) -> Tensor:
    """x * by in x's dtype, contiguous; `by` broadcasts to x. For what `fits`."""
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (n, b, c), of_by, entry, blocks = _sizes(x, by)
    *of_x, own = _strides(x)
    with on_device(x):
        _scale[(cdiv(n, blocks["ROWS"]),)](x, by, made, n, b, c, *of_x, *of_by, X=own, S=entry, **blocks)
    return made


def scale_backward(dy: Tensor, x: Tensor, by: Tensor, dx: bool, dby: bool) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of `by`, which is `whole`, those that are wanted."""
    to_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if dx else None
    to_by = torch.empty(by.shape, dtype=by.dtype, device=by.device) if dby else None
    (n, b, c), of_by, entry, blocks = _sizes(x, by)
    (*of_dy, grad), (*of_x, own) = _strides(dy), _strides(x)
    with on_device(x):
        _scale_backward[(cdiv(n, blocks["ROWS"]),)](
            dy, x, by, dy if to_x is None else to_x, by if to_by is None else to_by, n, b, c,
            *of_dy, *of_x, *of_by, G=grad, X=own, S=entry, DX=dx, DS=dby, **blocks,
        )  # fmt: skip
    return to_x, to_by


__all__ = ["fits", "scale", "scale_backward", "whole"]
