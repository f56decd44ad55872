"""Numbers across parameters: rates that the data axis makes itself, once a step, of all parameters together.

A tuple asks for one by name as for any rate, `Per("gradient_norm")`; its group has the value of the last step, for who
wants to see it. Along tokens and layers whoever runs the tuple supplies it, as every other rate.

    gradient_norm    Euclidean norm of the gradients of all parameters of the optimizer that step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.forms import Group
from axes.optim.engine.options import how
from axes.optim.sharding.dtensors import spread

GRADIENT_NORM = Per("gradient_norm")


def _gradient_norm(gradients: list[Tensor]) -> Tensor:
    """In float64 and in one order, however the gradients are batched afterwards."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for g in gradients:
        by_device.setdefault(g.device, []).append(torch.view_as_real(g) if g.is_complex() else g)
    norms = [torch.stack(torch._foreach_norm(xs, 2, torch.float64)) for xs in by_device.values()]
    total: Tensor = torch.linalg.vector_norm(torch.cat([n.to(norms[0].device) for n in norms]))
    return total


_MADE: Mapping[str, Callable[[list[Tensor]], Tensor]] = {GRADIENT_NORM.name: _gradient_norm}


def asked(update: StateUpdate) -> tuple[str, ...]:
    """The numbers across parameters that a tuple reads."""
    return tuple(per.name for per in update.demands() if per.name in _MADE)


def begun(who: str, update: StateUpdate, parameters: Iterable[Tensor]) -> dict[str, float]:
    """What a group has of them before its first step.

    Raises:
        AxesError: a parameter is sharded, so that no process has all of its gradient.
    """
    names = asked(update)
    if names and any(spread(p) for p in parameters):
        raise AxesError(
            f"{who}: {', '.join(names)} is a number of all parameters, which no process has where they are sharded "
            "(DTensors): take it between backward and step, torch.nn.utils.clip_grad_norm_ for the norm of gradients"
        )
    return dict.fromkeys(names, 1.0)


def supply(work: list[tuple[Group, list[Tensor]]], form_for: Callable[[Group], StateUpdate], scale: Any) -> None:
    """Into every group that asks. scale: of a gradient scaler that leaves gradients scaled, or None."""
    wanted = {id(group): asked(form_for(group)) for group, _ in work}
    if not any(wanted.values()):
        return
    gradients = [g for _, parameters in work for p in parameters if (g := p.grad) is not None]
    made = {name: _MADE[name](gradients) for name in set().union(*wanted.values())}
    for group, parameters in work:
        for name in wanted[id(group)]:
            value = made[name] if scale is None else made[name] / scale.to(made[name].device)
            group[name] = value.item() if how(group) == "host" else value.to(parameters[0].device)
