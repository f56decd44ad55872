"""What the checks of group H share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from axes.claims.group_a_tools import fed, squared_error, trained
from axes.optim import SGD


def rank(x: Tensor) -> int:
    """The number of singular values above rounding."""
    return int(torch.linalg.matrix_rank(x.detach(), rtol=1e-10))


def stepped(make: Callable[[nn.Parameter], torch.optim.Optimizer], start: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights along one step on the squared error of each pair."""
    weight = nn.Parameter(start.clone())
    return trained(make(weight), weight, [squared_error(x, y) for x, y in zip(k, v, strict=True)])


def handed(make: Callable[[nn.Parameter], torch.optim.Optimizer], start: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """The weights of an optimizer that is handed these gradients."""
    weight = nn.Parameter(start.clone())
    return fed(make(weight), weight, gradients)


def scheduled(start: Tensor, gradients: Sequence[Tensor], rates: Sequence[float], weight_decay: float) -> Tensor:
    """The weights of SGD with decoupled decay along a schedule of learning rates."""
    weight, path = nn.Parameter(start.clone()), []
    sgd = SGD([weight], lr=0.0, momentum=0.0, weight_decay=weight_decay, decoupled=True)
    for g, rate in zip(gradients, rates, strict=True):
        sgd.param_groups[0]["lr"] = rate
        weight.grad = g.clone()
        sgd.step()
        path.append(weight.detach().clone())
    return torch.stack(path)
