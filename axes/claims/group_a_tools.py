"""What the checks of group A share: autograd's gradient, one step of a tuple, and trajectories of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn

from axes.catalogue import get
from axes.claims.base import Draw
from axes.core.state_update import StateUpdate

_M = TypeVar("_M", bound=nn.Module)


def gradient(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The derivative of a scalar function by autograd."""
    x = at.detach().clone().requires_grad_()
    return torch.autograd.grad(value(x), x)[0]


def squared_error(x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """W -> |y - W x|^2 / 2."""
    return lambda w: (y - w @ x).square().sum() / 2


def layer_tuple(name: str) -> StateUpdate:
    """The tuple of a sequence layer in the catalogue."""
    return get(name, "sequence").update


def one_step(update: StateUpdate, start: Tensor, **signal: Tensor | float) -> Tensor:
    """The stored matrix (dual, if the update is lazy) after one datum."""
    return update.step(update.init(signal, (start,)), signal)[0].theta[0]


def one_output(update: StateUpdate, start: Tensor, **signal: Tensor | float) -> Tensor:
    """The weights after one datum."""
    return update.step(update.init(signal, (start,)), signal)[1].weights[0]


def fed(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: Sequence[Tensor]) -> Tensor:
    """The weights (N, ...) that an optimizer passes through when it is handed these gradients."""
    path = []
    for g in gradients:
        weight.grad = g.clone()
        optimizer.step()
        path.append(weight.detach().clone())
    return torch.stack(path)


def trained(
    optimizer: torch.optim.Optimizer,
    weight: nn.Parameter,
    losses: Sequence[Callable[[Tensor], Tensor]],
    rates: Sequence[float] | None = None,
) -> Tensor:
    """The weights (N, ...) along one step on each loss, with autograd's gradients and, if given, a rate per step."""
    path = []
    for n, loss in enumerate(losses):
        if rates is not None:
            for group in optimizer.param_groups:
                group["lr"] = rates[n]
        optimizer.zero_grad()
        loss(weight).backward()
        optimizer.step()
        path.append(weight.detach().clone())
    return torch.stack(path)


@torch.no_grad()
def randomised(module: _M, draw: Draw, scale: float = 0.5) -> _M:
    """The module with parameters drawn anew: constructors use a generator of their own."""
    for p in module.parameters():
        p.copy_(scale * draw.normal(*p.shape))
    return module


def minimiser(
    value: Callable[[Tensor], Tensor],
    start: Tensor,
    equal: Sequence[Callable[[Tensor], Tensor]] = (),
    positive: Sequence[Callable[[Tensor], Tensor]] = (),
    lower: float | None = None,
) -> Tensor:
    """argmin of a smooth function by a general solver (BFGS or, with constraints, SLSQP) with autograd's gradients.

    equal: functions that must be 0.  positive: functions that must be >= 0.  lower: a bound on every entry.
    """

    def shaped(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(x, dtype=np.float64).copy()).reshape(start.shape)

    def of(f: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], float]:
        return lambda x: float(f(shaped(x)))

    def slope(f: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: gradient(f, shaped(x)).flatten().numpy()

    constraints = [
        {"type": kind, "fun": of(f), "jac": slope(f)} for kind, fs in (("eq", equal), ("ineq", positive)) for f in fs
    ]
    bounds = None if lower is None else [(lower, None)] * start.numel()
    method = "SLSQP" if constraints else "BFGS" if bounds is None else "L-BFGS-B"
    limit = {"ftol": 1e-15} if method == "SLSQP" else {"gtol": 1e-11}
    if method == "L-BFGS-B":
        limit["ftol"] = 1e-16
    found = optimize.minimize(
        of(value),
        start.flatten().numpy(),
        jac=slope(value),
        method=method,
        constraints=constraints,
        bounds=bounds,
        options={"maxiter": 500, **limit},
    )
    return shaped(found.x)
