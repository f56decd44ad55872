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


def _tape(x: Tensor, start: Start, schedule: Sequence[Triple]) -> tuple[Tensor, list[Tensor]]:
    """What the iteration ends in, and what its adjoint reads: norm, divisor, and y, G and H of every step."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    divisor = (norm * start.factor + start.shift).clamp(min=start.floor)
    y, kept = (x / divisor).reshape(-1, *x.shape[-2:]), [norm, divisor]
    for a, b, c in schedule:
        gram = y @ y.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        kept += [y, gram, factor]
        y = torch.baddbmm(y, factor, y, beta=a)
    return y, kept


def _adjoint(
    x: Tensor, tape: Sequence[Tensor], given: Tensor, start: Start, schedule: Sequence[Triple], size: float
) -> Tensor:
    norm, divisor, *kept = tape
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
    return dy.addcmul_(x, along, value=-1)


@final
class _Iterated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Start, schedule: Sequence[Triple], size: float) -> Tensor:
        y, tape = _tape(x, start, schedule)
        ctx.call = start, schedule, size
        ctx.save_for_backward(x, *tape)
        return (y if size == 1.0 else y * size).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        x, *tape = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *by_autograd(lambda x: _plain(x, *ctx.call), (x,), (given,)), None, None, None
        return _adjoint(x, tape, given, *ctx.call), None, None, None


# ---- as operators ----------------------------------------------------------------------------------------------------


def operator(x: Tensor, start: Start, schedule: Sequence[Triple], size: float) -> Tensor:
    """`iterated` as one operation of torch, axes::newton_schulz_whole, whose adjoint is another: for who follows them
    (`axes.programs.tiles`), not for numbers in a hurry."""
    numbers = [float(x) for x in (*start[:2], start.floor, size, *(n for triple in schedule for n in triple))]
    return cast(Tensor, _whole(x, numbers))


def _told(numbers: Sequence[float]) -> tuple[Start, list[Triple], float]:
    triples = [(a, b, c) for a, b, c in zip(*[iter(numbers[4:])] * 3, strict=True)]
    return Start(*numbers[:3]), triples, numbers[3]


@torch.library.custom_op("axes::newton_schulz_whole", mutates_args=())
def _whole(x: Tensor, numbers: Sequence[float]) -> Tensor:
    start, schedule, size = _told(numbers)
    y, _ = _tape(x, start, schedule)
    return (y * size).reshape(x.shape)


@torch.library.custom_op("axes::newton_schulz_whole_adjoint", mutates_args=())
def _whole_adjoint(x: Tensor, given: Tensor, numbers: Sequence[float]) -> Tensor:
    start, schedule, size = _told(numbers)
    return _adjoint(x, _tape(x, start, schedule)[1], given, start, schedule, size)


_whole.register_fake(lambda x, numbers: x.new_empty(x.shape))
_whole_adjoint.register_fake(lambda x, given, numbers: x.new_empty(x.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.numbers = inputs[1]


_whole.register_autograd(
    lambda ctx, given: (_whole_adjoint(*ctx.saved_tensors, given, ctx.numbers), None), setup_context=_save
)


__all__ = ["iterated", "operator"]
