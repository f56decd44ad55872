"""Numbers across parameters: rates that the data axis makes itself, once a step, of all parameters together.

A tuple asks for one by name as for any rate, `Per("gradient_norm")`; its group has the value of the last step, for who
wants to see it. Along tokens and layers whoever runs the tuple supplies it, as every other rate.

    gradient_norm    Euclidean norm of the gradients of all parameters of the optimizer that step
    distance         what an h that tells makes of the states of all parameters before the step: `Distance`

What is told has a memory, the numbers of the step before: these are in the groups too, and saved with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from axes.core.facts import fact
from axes.core.geometry import Geometry
from axes.core.rates import Per
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError
from axes.optim.engine.forms import Group
from axes.optim.engine.options import how
from axes.optim.sharding.dtensors import spread

GRADIENT_NORM = Per("gradient_norm")
Telling = list[tuple[Group, StateUpdate, Geometry]]  # groups with their tuples, and the h that tells


@fact
def asked(update: StateUpdate) -> tuple[str, ...]:
    """The numbers across parameters that a tuple reads."""
    made = {GRADIENT_NORM.name} | ({_rate(update.telling)} if update.telling is not None else set())
    return tuple(per.name for per in update.demands() if per.name in made)


@fact
def made(update: StateUpdate) -> bool:
    """Whether a tuple reads such numbers, or has something to say of one."""
    return bool(asked(update)) or update.telling is not None


def begun(who: str, update: StateUpdate, parameters: Iterable[Tensor], groups: Iterable[Group]) -> dict[str, float]:
    """What a group has of them before its first step. groups: those that there are.

    Raises:
        AxesError: a parameter is sharded, so that no process has all of its gradient.
    """
    names = asked(update)
    if names and any(spread(p) for p in parameters):
        raise AxesError(
            f"{who}: {', '.join(names)} is a number of all parameters, which no process has where they are sharded "
            "(DTensors): leave parameters whole (DDP), or for the norm of gradients call "
            "torch.nn.utils.clip_grad_norm_ between backward and step"
        )
    found = {name: 1.0 for name in names if name == GRADIENT_NORM.name}
    if (h := update.telling) is not None:
        keys = _keys(h)
        last = next(({key: group[key] for key in keys} for group in groups if keys[-1] in group), None)
        found |= last or dict(zip(keys, h.began(), strict=True))
    return found


# ---- of gradients ----------------------------------------------------------------------------------------------------


def supply_norm(work: list[tuple[Group, list[Tensor]]], form_for: Callable[[Group], StateUpdate], scale: Any) -> None:
    """Into every group that asks. scale: of a gradient scaler that leaves gradients scaled, or None."""
    asking = [(group, ps) for group, ps in work if GRADIENT_NORM.name in asked(form_for(group))]
    if not asking:
        return
    norm = _gradient_norm([g for _, parameters in work for p in parameters if (g := p.grad) is not None])
    for group, parameters in asking:
        _put(group, GRADIENT_NORM.name, norm if scale is None else norm / scale.to(norm.device), parameters[0])


def _gradient_norm(gradients: list[Tensor]) -> Tensor:
    """In float64 and in one order, however the gradients are batched afterwards."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for g in gradients:
        by_device.setdefault(g.device, []).append(torch.view_as_real(g) if g.is_complex() else g)
    norms = [torch.stack(torch._foreach_norm(xs, 2, torch.float64)) for xs in by_device.values()]
    total: Tensor = torch.linalg.vector_norm(torch.cat([n.to(norms[0].device) for n in norms]))
    return total


# ---- of states -------------------------------------------------------------------------------------------------------


def telling(groups: Iterable[Group], update_for: Callable[[Group], StateUpdate]) -> Telling:
    """The groups whose tuples tell something, each with its tuple and that h."""
    updates = ((group, update_for(group)) for group in groups if group["params"])
    return [(group, update, h) for group, update in updates if (h := update.telling) is not None]


def supply_told(
    who: str, groups: Telling, states: Callable[[Group, StateUpdate], Iterable[State]], called_off: Tensor | None
) -> None:
    """Into every one of the groups, which share their numbers.

    states: those of a group's parameters that have one. called_off: a flag on a device that this step is none, which
    leaves the numbers as they are.

    Raises:
        AxesError: the groups differ in what the numbers are made with.
    """
    _, _, h = groups[0]
    for _, _, other in groups[1:]:
        if _settings(other) != _settings(h):
            raise AxesError(
                f"{who}: {_rate(h)} is one number of all groups, and they differ in what makes it, {_settings(h)} and "
                f"{_settings(other)}: give all groups the same, or make another optimizer for some"
            )
    told = [update.told(state, {}) for group, update, _ in groups for state in states(group, update)]
    if not told:
        return
    device = told[0].device
    total = torch.stack([x.reshape(-1, x.shape[-1]).sum(0).to(device, torch.float64) for x in told]).sum(0)
    first, keys = groups[0][0], _keys(h)
    last = torch.stack([torch.as_tensor(first[key], dtype=torch.float64, device=device) for key in keys])
    now = h.number(total, last)
    if called_off is not None:
        now = torch.where(called_off.to(device).bool(), last, now)
    for group, _, _ in groups:
        for key, value in zip(keys, now.unbind(), strict=True):
            _put(group, key, value, group["params"][0])


def _rate(h: Geometry | None) -> str:
    assert h is not None and h.tells is not None
    return h.tells.name


def _keys(h: Geometry) -> tuple[str, ...]:
    """Where groups have the rate that an h tells of, and the largest value that it could have."""
    return (_rate(h), f"largest_{_rate(h)}")


def _settings(h: Geometry) -> str:
    """What an h makes its numbers with."""
    names = [field.name for field in dataclasses.fields(h) if field.name != "stats"]  # type: ignore[arg-type]
    return f"{type(h).__name__}({', '.join(f'{name}={getattr(h, name)!r}' for name in names)})"


def _put(group: Group, key: str, value: Tensor, beside: Tensor) -> None:
    """A number into a group; where steps are captured, into the tensor that the next one reads."""
    there = group.get(key)
    if how(group) == "host":
        group[key] = value.item()
    elif isinstance(there, Tensor) and there.device == beside.device:
        there.copy_(value)
    else:
        group[key] = value.to(beside.device)
