"""Newton-Schulz iterations with derivatives by hand: two thirds of the products that autograd takes.

    G = x x^T,  H = b G + c G^2,  y = a x + H x;
    with S = dy x^T and D = S + S^T:  dx = a dy + H dy + (b D + c (D G + G D)) x
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor

from axes.linalg.formulas import by_autograd
from axes.linalg.newton_schulz import Start, Triple, direct, is_zero


def iterated(x: Tensor, start: Start, schedule: Sequence[Triple], size: float) -> Tensor:
    """The iteration of `newton_schulz.direct` on x (..., m, n), m <= n, over what `start` divides by, times size."""
    return cast(Tensor, _Iterated.apply(x, start, schedule, size))


def _plain(x: Tensor, start: Start, schedule: Sequence[Triple], size: float) -> Tensor:
    return direct(x / start.divisor(x), schedule) * size


@final
class _Iterated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Start, schedule: Sequence[Triple], size: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        divisor = (norm * start.factor + start.shift).clamp(min=start.floor)
        y, kept = (x / divisor).reshape(-1, *x.shape[-2:]), []
        for a, b, c in schedule:
            gram = y @ y.mT
            factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            kept += [y, gram, factor]
            y = torch.baddbmm(y, factor, y, beta=a)
        ctx.call = start, schedule, size
        ctx.save_for_backward(x, norm, divisor, *kept)
        return (y if size == 1.0 else y * size).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, divisor, *kept = ctx.saved_tensors
        start, schedule, size = ctx.call
        if torch.is_grad_enabled():
            return *by_autograd(lambda x: _plain(x, *ctx.call), (x,), (given,)), None, None, None
        dy = (given if size == 1.0 else given * size).reshape(-1, *x.shape[-2:])
        for i in reversed(range(len(schedule))):
            (a, b, c), (y, gram, factor) = schedule[i], kept[3 * i : 3 * i + 3]
            change = dy @ y.mT
            change = change + change.mT
            half = torch.baddbmm(change, change, gram, beta=b / 2, alpha=c)
            dy = torch.baddbmm(dy, factor, dy, beta=a).baddbmm_(half + half.mT, y)
        dy = (dy.reshape(x.shape)) / divisor
        dy = torch.where(is_zero(x), 0.0, dy)
        moves = (norm > 0) & (norm * start.factor + start.shift >= start.floor)  # the divisor: held at its floor or not
        along = (dy * x).sum((-2, -1), keepdim=True) * start.factor
        along = torch.where(moves, along / torch.where(moves, norm * divisor, 1.0), 0.0)
        return dy.addcmul_(x, along, value=-1), None, None, None


__all__ = ["iterated"]
