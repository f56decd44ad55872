"""Optimizers over losses or gradients: the weights that they pass through, and how they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from axes.claims.base import Draw
from axes.claims.tools.calculus import half_square
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given
from axes.core.geometry import Geometry
from axes.core.monoids import Decay
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim import SGD, Shampoo, optimizer

Loss = Callable[[Tensor], Tensor]
Make = Callable[[nn.Parameter], torch.optim.Optimizer]
_M = TypeVar("_M", bound=nn.Module)

LR, DECAY = Per("lr"), Per("weight_decay")


class Family(Protocol):
    """Optimizers of one weight, to be told apart by options: `sgd`, `torch_sgd`."""

    def __call__(self, weight: Tensor, /, **options: Any) -> torch.optim.Optimizer: ...


# ---- losses ---------------------------------------------------------------------------------------------------------


def squared_error(x: Tensor, y: Tensor) -> Loss:
    """W -> |y - W x|^2 / 2, or its sum if x and y hold pairs as rows."""
    return lambda w: half_square(y - x @ w.mT)


def squared_errors(k: Tensor, v: Tensor) -> list[Loss]:
    """The squared error of every pair."""
    return [squared_error(x, y) for x, y in zip(k, v, strict=True)]


def alignment(x: Tensor, y: Tensor) -> Loss:
    """W -> -<y, W x>, or its sum if x and y hold pairs as rows."""
    return lambda w: -(y * (x @ w.mT)).sum()


def alignments(k: Tensor, v: Tensor) -> list[Loss]:
    """The alignment cost of every pair."""
    return [alignment(x, y) for x, y in zip(k, v, strict=True)]


def short_pairs(draw: Draw, n: int, d_v: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of length at most one, so that steps of size up to two descend, values and a start."""
    return draw.unit(n, d) * draw.uniform(n, 1, low=0.3), draw.normal(n, d_v), draw.normal(d_v, d)


# ---- optimizers -----------------------------------------------------------------------------------------------------


def parameter(w: Tensor) -> nn.Parameter:
    return nn.Parameter(w.clone())


def sgd(weight: Tensor, /, **options: Any) -> SGD:
    """The package's, plain: a unit rate and no momentum where nothing else is said."""
    return SGD([weight], **{"lr": 1.0, "momentum": 0.0, **options})


def torch_sgd(weight: Tensor, /, **options: Any) -> torch.optim.SGD:
    """The library's, plain."""
    return torch.optim.SGD([weight], **{"lr": 1.0, **options})


def shampoo(exponent: float, **options: Any) -> Callable[[Tensor], Shampoo]:
    """Shampoo on one matrix, with a unit rate."""

    def make(weight: Tensor) -> Shampoo:
        given = {"lr": 1.0, "damping": 0.0, **options}
        return Shampoo([{"params": [weight], "rule": "shampoo"}], **given, exponent=exponent)

    return make


def rule(update: StateUpdate, weight: Tensor, /, **rates: Any) -> torch.optim.Optimizer:
    """The optimizer of a tuple for one matrix."""
    matrix = update.parts().h.matrix or any(f.parts().h.matrix for f in update.filters())
    return optimizer(update)([{"params": [weight], "rule": "matrix"}] if matrix else [weight], **rates)


def model_rule(update: StateUpdate, model: nn.Linear, /, **rates: Any) -> torch.optim.Optimizer:
    """The optimizer of a tuple for a linear model, whose inputs and output gradients it sees."""
    return optimizer(update)([{"params": [model.weight], "rule": "matrix"}], model=model, **rates)


def directed(h: Geometry, beta: float = 0.0) -> StateUpdate:
    """The data-axis tuple W = (1 - lr wd) W + lr h(m), m an average of -g (the drive itself if beta is 0)."""
    via = (Momentum(beta, "ema"),) if beta else ()
    return StateUpdate(Given(), OnUpdate(h), Decay(DECAY), Step(LR, via=via))


# ---- paths ----------------------------------------------------------------------------------------------------------


def trained(make: Make, start: Tensor, losses: Iterable[Loss], **rates: Sequence[float]) -> Tensor:
    """The weights (N, ...) along one step on each loss; rates: per step, set in the parameter group."""
    weight, path = parameter(start), []
    stepper = make(weight)
    for n, loss in enumerate(losses):
        _set(stepper, n, rates)
        stepper.step(partial(_evaluated, stepper, weight, loss))
        path.append(weight.detach().clone())
    return torch.stack(path)


def fed(make: Make, start: Tensor, gradients: Iterable[Tensor], **rates: Sequence[float]) -> Tensor:
    """The weights (N, ...) of an optimizer that is handed these gradients; rates: per step."""
    weight, path = parameter(start), []
    stepper = make(weight)
    for n, g in enumerate(gradients):
        _set(stepper, n, rates)
        weight.grad = g.clone()
        stepper.step()
        path.append(weight.detach().clone())
    return torch.stack(path)


def moves(make: Make, start: Tensor, gradients: Iterable[Tensor]) -> Tensor:
    """What each step of an optimizer that is handed these gradients adds to the weights."""
    return torch.diff(torch.cat((start[None], fed(make, start, gradients))), dim=0)


def _set(stepper: torch.optim.Optimizer, n: int, rates: dict[str, Sequence[float]]) -> None:
    for name, values in rates.items():
        stepper.param_groups[0][name] = float(values[n])


def _evaluated(stepper: torch.optim.Optimizer, weight: Tensor, loss: Loss) -> float:
    """The closure of a step: the loss at the weights as they are, and its gradient."""
    stepper.zero_grad()
    value = loss(weight)
    value.backward()
    return float(value.detach())


# ---- models ---------------------------------------------------------------------------------------------------------


def linear(weight: Tensor) -> nn.Linear:
    """The linear model with these weights."""
    model = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        model.weight.copy_(weight)
    return model


@torch.no_grad()
def randomised(module: _M, draw: Draw, scale: float = 0.5) -> _M:
    """The module with parameters drawn anew: constructors use a generator of their own."""
    for p in module.parameters():
        p.copy_(scale * draw.normal(*p.shape))
    return module


def model_trained(
    make: Callable[[nn.Linear], torch.optim.Optimizer],
    start: Tensor,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor] = lambda out, y: half_square(out - y),
) -> Tensor:
    """The weights (N, ...) of a linear model along one step on each batch, for optimizers that look at the model."""
    model, path = linear(start), []
    stepper = make(model)
    for x, y in batches:
        stepper.zero_grad()
        loss(model(x), y).backward()
        stepper.step()
        path.append(model.weight.detach().clone())
    return torch.stack(path)
