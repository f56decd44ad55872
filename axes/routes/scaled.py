"""Vectors times numbers of another dtype, rounded to theirs: one pass over memory, where a product and a cast are two.

    y = x s in x's dtype,    dx = dy s in x's dtype,    ds = the sum of dy x over what s was expanded to, in s's dtype
    m = <x, y> of bfloat16 vectors in float32,          dx = dm y,    dy = dm x
    y_t = o_{t-1} + x_t s_t,                            do_{t-1} = dy_t, and as above

Products are taken in the wider dtype. The entries of a bfloat16 dy x, or x y, are rounded to bfloat16 before they are
added up in float32; float16, whose products leave its range, is widened. Compilers, which fuse a cast by themselves,
transforms and second derivatives see torch's operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axes.kernels.common.versions import DTYPES, refusal
from axes.linalg.formulas import by_formula


def differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def scaled(x: Tensor, by: Tensor | float) -> Tensor:
    """(x * by).to(x.dtype); `by` broadcasts to x. Sixteen bits by float32 numbers: without a float32 copy of x."""
    if not isinstance(by, Tensor) or by.ndim == 0 or torch.promote_types(x.dtype, by.dtype) == x.dtype:
        return x * by
    if not by_formula(x, by):
        return (x * by).to(x.dtype)
    if differentiated(x, by):
        made: Tensor = _Scaled.apply(x, by)
        return made
    return _product(x, by)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """<x, y> (..., 1) of vectors of one dtype, in float32 at least."""
    if not x.dtype == y.dtype == torch.bfloat16 or not by_formula(x, y):
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x.to(wide) * y).sum(-1, keepdim=True)
    if differentiated(x, y):
        made: Tensor = _Inner.apply(x, y)
        return made
    return torch.sum(x * y, -1, keepdim=True, dtype=torch.float32)


def rounded(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """x * by, of the shape of x, written in this dtype by the multiplication itself."""
    return torch.mul(x, by, out=torch.empty_like(x, dtype=dtype))


def to_numbers(dy: Tensor, x: Tensor, by: Tensor) -> Tensor:
    """The gradient of the numbers that x was scaled by, from that of the product."""
    if torch.is_grad_enabled() or dy.dtype != torch.bfloat16:
        return (dy * x.to(by.dtype)).sum_to_size(by.shape)
    if by.shape == x.shape:
        return rounded(dy, x, by.dtype)
    lead = x.ndim - by.ndim
    over = [d for d in range(x.ndim) if d < lead or by.shape[d - lead] == 1]
    return torch.sum(dy * x, over, keepdim=True, dtype=by.dtype).view(by.shape)


def _by_kernel(x: Tensor, by: Tensor) -> bool:
    """Whether a kernel multiplies: on a GPU, in the dtypes and shapes that it takes."""
    if not x.is_cuda or x.dtype not in DTYPES or by.dtype != torch.float32 or refusal(x.device) is not None:
        return False
    from axes.kernels.rows.scaled import fits

    return fits(x, by)


def _product(x: Tensor, by: Tensor) -> Tensor:
    """(x * by).to(x.dtype), in one pass."""
    if not _by_kernel(x, by):
        return rounded(x, by, x.dtype)
    from axes.kernels.rows.scaled import scale

    return scale(x, by)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor) -> Tensor:
        ctx.save_for_backward(x, by)
        return _product(x, by)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, by = ctx.saved_tensors
        dx, dby = ctx.needs_input_grad
        if dby and not torch.is_grad_enabled() and by_formula(dy) and _by_kernel(x, by):
            from axes.kernels.rows.scaled import scale_backward, whole

            if whole(x, by):
                return scale_backward(dy, x, by, dx, dby)
        return scaled(dy, by) if dx else None, to_numbers(dy, x, by) if dby else None


class _Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return torch.sum(x * y, -1, keepdim=True, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dm: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, y), (dx, dy) = ctx.saved_tensors, ctx.needs_input_grad
        return scaled(y, dm) if dx else None, scaled(x, dm) if dy else None


def behind(firsts: Tensor, out: Tensor, x: Tensor, by: Tensor, time: int) -> Tensor:
    """What stands a token before, and x times numbers: y_t = out_{t-1} + x_t by_t.

    firsts: what stands before the first token, like out, of one token.
    """
    if out.dtype not in (torch.bfloat16, torch.float16) or not by_formula(firsts, out, x, by):
        before = torch.cat((firsts, out), time).narrow(time, 0, out.shape[time])  # of length - 1 none: it may be one
        return before + (x * by).to(out.dtype)
    if differentiated(firsts, out, x, by):
        made: Tensor = _Behind.apply(firsts, out, x, by, time)
        return made
    return _behind(firsts, out, x, by, time)


def _behind(firsts: Tensor, out: Tensor, x: Tensor, by: Tensor, time: int) -> Tensor:
    made, later = torch.empty_like(out), out.shape[time] - 1
    (first, rest), (x0, x1), (by0, by1) = (z.split((1, later), time) for z in (made, x, by))
    torch.addcmul(firsts, x0, by0, out=first)
    torch.addcmul(out.narrow(time, 0, later), x1, by1, out=rest)
    return made


class _Behind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, firsts: Tensor, out: Tensor, x: Tensor, by: Tensor, time: int) -> Tensor:
        ctx.save_for_backward(x, by)
        ctx.time = time
        return _behind(firsts, out, x, by, time)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, by), (*_, dx, dby, _) = ctx.saved_tensors, ctx.needs_input_grad
        first, rest = dy.split((1, dy.shape[ctx.time] - 1), ctx.time)
        dout = torch.cat((rest, torch.zeros_like(first)), ctx.time)
        return first, dout, scaled(dy, by) if dx else None, to_numbers(dy, x, by) if dby else None, None


__all__ = ["behind", "differentiated", "inner", "rounded", "scaled", "to_numbers"]
