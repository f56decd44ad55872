"""What a parameter group must be for its rule, its way of stepping and its parameters."""

from __future__ import annotations

import importlib.util
import math

from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.errors import AxesError, ShapeError
from axes.optim.engine.capabilities import elementwise, holds, parts_of, vectors
from axes.optim.engine.groups import Named
from axes.optim.engine.layouts import PLAIN, Layout
from axes.optim.engine.options import Group
from axes.optim.engine.precision import Precision
from axes.optim.engine.together import no_program


def require(who: str, group: Group, update: StateUpdate, members: Named, matrices: bool) -> None:
    """AxesError unless a group has what its tuple reads and suits its parameters. matrices: its rule is for them."""
    _require_numbers(who, group, update)
    if update.parts().step.reads > 1:
        raise AxesError(f"{who}: rule {group['rule']!r} reads by several queries, a training step by none")
    if update.parts().step.writes > 1:
        raise AxesError(f"{who}: rule {group['rule']!r} writes several pairs a datum, and examples are one")
    if matrices:
        for name, parameter in members:
            if parameter.ndim < 2:
                raise ShapeError(
                    f"{who}: rule {group['rule']!r} is for matrices, and {name or 'a parameter'} has shape "
                    f"{tuple(parameter.shape)}"
                )
    monoids = [part.parts().monoid for part in parts_of(update)]
    layouts = [Layout.of(who, text) if text else PLAIN for text in group.get("matrices") or [""] * len(members)]
    for (name, parameter), layout in zip(members, layouts, strict=True):
        width = layout.shape(parameter)[-1]
        reason = next((why for m in monoids if (why := m.no_width(width)) is not None), None)
        if reason is not None and parameter.numel():  # an empty one never steps
            raise ShapeError(
                f"{who}: rule {group['rule']!r} does not take {name or 'a parameter'} of shape "
                f"{tuple(parameter.shape)}, a matrix of {width} columns: {reason}; give it to another rule, in a group "
                "that names it"
            )
    if not elementwise(update):
        for name, parameter in members:
            if parameter.is_complex():
                raise AxesError(
                    f"{who}: {name or 'a parameter'} is complex, and only rules that act entry by "
                    "entry take complex parameters (as pairs of real numbers)"
                )
    _require_way(who, group, update, kernels=not on_host(members))
    for name, parameter in members:
        _require_place(who, group, update, name, parameter, alone=not on_host(members))


def _require_numbers(who: str, group: Group, update: StateUpdate) -> None:
    """Of the rates, gates and vectors that a tuple reads from its group."""
    for key in ("lr", "weight_decay", "lr_scale"):
        value = group.get(key, 0.0)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise AxesError(f"{who}: a tensor {key} must have one element, got shape {tuple(value.shape)}")
        elif not (isinstance(value, int | float) and value >= 0 and math.isfinite(value)):
            raise AxesError(f"{who}: {key} must be a finite number >= 0, got {value!r}")
    for vector in vectors(update):
        if not isinstance(group.get(vector), Tensor):
            raise AxesError(f"{who}: the tuple reads the vector {vector!r}: pass {vector}=, a tensor")
    for per in update.demands():
        if group.get(per.name) is None:
            raise AxesError(
                f"{who}: the tuple asks for {per.name!r} ({per.shape}, {per.domain}): pass {per.name}=..."
                + (", the log of the gate" if per.domain == "unit" else "")
            )
        value = group[per.name]
        if per.domain == "unit" and not isinstance(value, Tensor) and value > 0:
            raise AxesError(f"{who}: {per.name!r} is a gate in [0, 1] given by its log, so at most 0; got {value}")


def on_host(members: Named) -> bool:
    """Whether parameters are on the CPU, all of them, where no kernel runs."""
    return all(p.device.type == "cpu" for _, p in members) and not _interpreted()


def _require_way(who: str, group: Group, update: StateUpdate, kernels: bool) -> None:
    """Of the way in which a group's rule is stepped and stored. kernels: its parameters are where these run."""
    Precision.of(group).require(who, update)
    if group["capturable"] and holds(update):
        raise AxesError(
            f"{who}: capturable=True records one step, and rule {group['rule']!r} refreshes what it holds in some "
            "steps only: leave it out"
        )
    if group["fused"]:
        reason = no_program(update, group["maximize"])
        if reason is not None:
            raise AxesError(
                f"{who}: fused=True is for rules that act entry by entry, and rule {group['rule']!r} {reason}: "
                "leave it out (foreach=True is the batched form), or give it to the groups of another rule"
            )
        if kernels and importlib.util.find_spec("triton") is None:
            raise AxesError(f"{who}: fused=True needs Triton, which is not installed")


def _require_place(
    who: str, group: Group, update: StateUpdate, name: str | None, parameter: Tensor, alone: bool
) -> None:
    """Of the dtype and the device of a parameter. alone: others of its group are on a device."""
    Precision.of(group).forms(who, update, parameter)
    place = parameter.device.type
    if group["fused"] and alone and place not in ("cuda", "meta") and not _interpreted():
        raise AxesError(
            f"{who}: fused=True needs the parameters of a group on CUDA devices or all on the CPU, and "
            f"{name or 'a parameter'} is on {parameter.device}: give it a group of its own, or leave fused out"
        )
    for rate in ("lr", "weight_decay"):
        value = group.get(rate)
        if isinstance(value, Tensor) and group["capturable"] and value.device.type != place and place == "cuda":
            raise AxesError(
                f"{who}: with capturable=True a tensor {rate} must be beside the parameters, on "
                f"{parameter.device}; it is on {value.device}"
            )


def _interpreted() -> bool:
    """Whether kernels run without a device, in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    from axes.kernels.common.layout import interpreted  # triton is imported on first use

    return interpreted()
