"""Derivatives written by hand for a CPU, where autograd's rules would go through memory three times as often.

Each has a form in torch's own operations, its meaning: that is what runs on other devices, in half precision, for
compilers and transforms of torch.func, and what is differentiated where a derivative is differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, linear, silu

from axes.linalg.formulas import by_autograd, by_formula

_ROWS = 128  # tokens of a block, which stays in the cache


def convolved(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, activated: bool = False) -> Tensor:
    """(B, T, C) behind its tail (B, w - 1, C) by weights (C, 1, w): (B, T, C); activated: silu of it."""
    if x.shape[1] and tail.dtype == x.dtype and _by_hand(x):
        y: Tensor = _Convolved.apply(x, tail, weight, bias, activated)
        return y
    return _convolved(x, tail, weight, bias, activated)


def _convolved(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, activated: bool) -> Tensor:
    full = torch.cat((tail.to(x.dtype), x), 1)
    if _wide_on_a_cpu(x):  # torch's own convolution leaves time innermost there
        *earlier, own = weight[:, 0].unbind(-1)
        y = x * own
        for j, tap in reversed(list(enumerate(earlier))):  # in the order of those by hand: the same rounding
            y = torch.addcmul(y, full[:, j : j + x.shape[1]], tap)
        y = y if bias is None else y + bias
    else:
        y = conv1d(full.mT, weight, bias, groups=weight.shape[0]).mT
    return silu(y) if activated else y


def normalised(x: Tensor, share: float, eps: float) -> Tensor:
    """x (share sum x^2 + eps)^(-1/2) over the last dimension: share 1 for unit length, 1/d for a mean square of one.

    In float32 at least, as kernels compute it: float16 holds no eps^(-3/2), which is in the derivative of a short x.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    if _by_hand(wide):
        y: Tensor = _Normalised.apply(wide, share, eps)
        return y.to(x.dtype)
    return _normalised(wide, share, eps).to(x.dtype)


def _normalised(x: Tensor, share: float, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) * share + eps)


def in_parts(projection: nn.Linear, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    """The columns of a projection in parts, on a CPU by a product each: gradients of parts are not put together."""
    plain = type(projection) is nn.Linear and not (projection._forward_hooks or projection._forward_pre_hooks)
    if x.device.type != "cpu" or not plain or projection.bias is not None:
        return projection(x).split(widths, -1)
    return [linear(x, part) for part in projection.weight.split(widths)]


def _by_hand(x: Tensor) -> bool:
    return _wide_on_a_cpu(x) and by_formula(x)


def _wide_on_a_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


@final
class _Convolved(torch.autograd.Function):
    """sum_j taps_j x_(t - w + 1 + j), block by block of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, activated: bool) -> Tensor:
        *earlier, own = _taps(weight)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        out = torch.empty_like(y) if activated else y
        for first, end in _blocks(x.shape[1]):
            part = torch.mul(x[:, first:end], own, out=y[:, first:end])
            for back, tap in enumerate(reversed(earlier), 1):
                for rows, source in _shifted(x, tail, first, end, back):
                    part[:, rows].addcmul_(source, tap)
            if bias is not None:
                part += bias
            if activated:
                torch.ops.aten.silu.out(part, out=out[:, first:end])
        ctx.activated = activated
        ctx.save_for_backward(x, tail, weight, bias, y if activated else None)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, tail, weight, bias, y = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_autograd(_convolved, (x, tail, weight, bias, ctx.activated), (dy,))
        *earlier, own = _taps(weight)
        dx, dtail = torch.empty_like(x), torch.zeros_like(tail)
        room = torch.empty_like(x[:, :_ROWS])
        dweight, dbias = torch.zeros_like(weight[:, 0].mT), torch.zeros_like(weight[:, 0, 0])
        for first, end in _blocks(x.shape[1]):
            d = dy[:, first:end]
            if y is not None:
                d = torch.ops.aten.silu_backward(d, y[:, first:end])
            torch.mul(d, own, out=dx[:, first:end])
            dweight[-1] += torch.mul(d, x[:, first:end], out=room[:, : end - first]).sum((0, 1))
            for back, tap in enumerate(reversed(earlier), 1):
                parts = zip(_shifted(x, tail, first, end, back), _shifted(dx, dtail, first, end, back), strict=True)
                for (rows, source), (_, into) in parts:
                    into.addcmul_(d[:, rows], tap)
                    dweight[-1 - back] += torch.mul(d[:, rows], source, out=room[:, rows]).sum((0, 1))
            if bias is not None:
                dbias += d.sum((0, 1))
        return dx, dtail, dweight.mT[:, None], None if bias is None else dbias, None


def _taps(weight: Tensor) -> Sequence[Tensor]:
    """Of every lag its numbers side by side."""
    return weight[:, 0].mT.contiguous().unbind(0)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(n, min(n + _ROWS, length)) for n in range(0, length, _ROWS)]


def _shifted(x: Tensor, tail: Tensor, first: int, end: int, back: int) -> list[tuple[slice, Tensor]]:
    """What stands `back` tokens before the tokens from first to end: where in the block, and views of tail and x."""
    inside = min(max(back - first, 0), end - first)  # tokens whose earlier one is in the tail
    width, parts = tail.shape[1], []
    if inside:
        parts.append((slice(0, inside), tail[:, width - back + first : width - back + first + inside]))
    if inside < end - first:
        parts.append((slice(inside, end - first), x[:, first + inside - back : end - back]))
    return parts


@final
class _Normalised(torch.autograd.Function):
    """dx = r (dy - share y (y . dy)) with y = r x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, eps: float) -> Tensor:
        r = torch.rsqrt((x * x).sum(-1, keepdim=True).mul_(share).add_(eps))
        y = x * r
        ctx.share, ctx.eps = share, eps
        ctx.save_for_backward(x, y, r)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, y, r = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_autograd(_normalised, (x, ctx.share, ctx.eps), (dy,))
        room = dy * y
        along = room.sum(-1, keepdim=True).mul_(-ctx.share)
        return torch.addcmul(dy, y, along, out=room).mul_(r), None, None


__all__ = ["convolved", "in_parts", "normalised"]
