"""How the parameters of a group are stepped, and by whom: what every step asks, and `axes.explain` tells.

    entrywise    one program over all of them, as a generated kernel, a loop of C or by torch's multi-tensor operations
    stacks       a program over all matrices of one shape, or programs around their products
    interpreter  the tuple itself
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from axes.core.state_update import StateUpdate
from axes.optim.engine import generated, loops
from axes.optim.engine.capabilities import keyed
from axes.optim.engine.facts import facts
from axes.optim.engine.generated import GRADIENT
from axes.optim.engine.options import how
from axes.optim.engine.precision import Precision
from axes.optim.engine.staged import set_apart, staged
from axes.optim.engine.together import schedule
from axes.programs import c_entries
from axes.programs.batched import Schedule
from axes.routes.choice import Choice, Implementation, Plan, Route, Target, require_named

DEFAULT_GROUP: Mapping[str, Any] = {"maximize": False, "foreach": True, "fused": False, "capturable": False}


def route(update: StateUpdate, group: Mapping[str, Any]) -> Route:
    """How a group is stepped. Nothing else decides it."""
    routes = facts(update, group["maximize"]).routes
    if routes["entrywise"] is None and (group["foreach"] or group["fused"]):
        return "entrywise"
    return "stacks" if routes["stacks"] is None and group["foreach"] else "interpreter"


def choose(
    update: StateUpdate,
    group: Mapping[str, Any],
    target: Target,
    plain: bool = True,
    dtype: torch.dtype = torch.float32,
    seen: int = 0,
) -> Choice:
    """How a group is stepped on a device, by whom and why.

    plain: whether its parameters are ordinary tensors. seen: how many entries it has moved.
    """
    chosen = route(update, group)
    if chosen == "interpreter":
        return Choice(chosen, "reference", _why_interpreted(update, group))
    entrywise = chosen == "entrywise"
    fallen = generated.no_kernel(how(group), target, plain) if entrywise else generated.no_kernels(target)
    if not entrywise and fallen is None and not _lists(update, group["maximize"]):
        fallen = "it takes entries of a matrix together"
    describe = _entrywise if entrywise else _stacks
    if fallen is None:
        return Choice(chosen, "triton", describe(update, group, target, None))
    slow = _no_loop(update, group, target, plain, dtype, seen)
    if slow is not None and target.device.type == "cpu":
        fallen = f"{fallen}; no loop of C: {slow}"
    by: Implementation = "c" if slow is None else "torch"
    return Choice(chosen, by, describe(update, group, target, fallen, by))


def plan(
    name: str,
    update: StateUpdate,
    target: Target,
    dtype: torch.dtype,
    implementation: Implementation | None = None,
    group: Mapping[str, Any] = DEFAULT_GROUP,
    plain: bool = True,
    seen: int = 0,
) -> Plan:
    """What steps a group with this tuple. reference by name is foreach=False; others run where they do, or raise. seen:
    how many entries it has moved."""
    if implementation == "reference":
        group = {**group, "foreach": False, "fused": False}
    normal = update.normal()
    choice = require_named(choose(normal, group, target, plain, dtype, seen), implementation, update)
    return Plan(name, update, choice, target, dtype, facts(normal, group["maximize"]).routes)


def _no_loop(
    update: StateUpdate, group: Mapping[str, Any], target: Target, plain: bool, dtype: torch.dtype, seen: int
) -> str | None:
    """Why no program of a step is a loop of C, or None if one is."""
    if how(group) != "host":
        return "the numbers of a step are beside the tensors"
    if not plain:
        return "a parameter is a tensor with arithmetic of its own"
    if not Precision.of(group).plain:
        return "what is stored in other forms is decoded by torch"
    if route(update, group) == "entrywise":
        schedules = [schedule(update, group["maximize"])]
    else:
        found = staged(update, group["maximize"])
        stages = [] if found is None or len(found.stages) == 1 else found.stages
        schedules = [Schedule(stage.program, keep=(GRADIENT,)) for stage in stages if stage.entrywise]
    refused = [c_entries.no_loop(some) for some in schedules]
    if all(refused):
        return next(iter(refused), "it takes entries of a matrix together")
    return loops.no_loops(target.device, dtype, seen)


# ---- in words --------------------------------------------------------------------------------------------------------


def _entrywise(
    update: StateUpdate, group: Mapping[str, Any], target: Target, fallen: str | None, by: Implementation = "torch"
) -> str:
    if fallen is None:
        reason = "one generated kernel over all parameters"
    elif by == "c":
        reason = "one loop of C over all parameters"
    else:
        library = schedule(update, group["maximize"]).library is not None and target.device.type == "cpu"
        own = library and how(group) == "host"
        reason = f"torch's {'own' if own else 'multi-tensor'} operations over all parameters (no kernel: {fallen})"
    return reason + _first(update, group)


def _lists(update: StateUpdate, maximize: bool) -> bool:
    """Whether some program of a step over stacks acts entry by entry."""
    found = staged(update, maximize)
    return found is None or any(stage.entrywise for stage in found.stages)


def _stacks(
    update: StateUpdate, group: Mapping[str, Any], target: Target, fallen: str | None, by: Implementation = "torch"
) -> str:
    found = staged(update, group["maximize"])
    assert found is not None
    if len(found.stages) == 1:
        reason = f"one program over all matrices of a shape, by torch's multi-tensor operations (no kernel: {fallen})"
        return reason + _first(update, group)
    about, rest = " and ".join(set_apart(update, group["maximize"])), not all(s.entrywise for s in found.stages)
    kernels = "generated kernels where matrices begin at multiples of 16 bytes"
    reason = f"programs before and after {about}, matrices of one shape as one stack; programs are "
    torchs = f"torch's multi-tensor operations (no kernel: {fallen})"
    reason += kernels if fallen is None else "loops of C" if by == "c" else torchs
    reason += "; what takes entries together is stepped by torch's operations over the stacks" if rest else ""
    return reason + _first(update, group)


def _first(update: StateUpdate, group: Mapping[str, Any]) -> str:
    special = facts(update, group["maximize"]).special
    return "; the first step of a parameter is interpreted" if special else ""


def _why_interpreted(update: StateUpdate, group: Mapping[str, Any]) -> str:
    routes = facts(update, group["maximize"]).routes
    refused = {r: why for r, why in routes.items() if why is not None}
    if len(refused) < len(routes) - 1:
        return "foreach=False asks for the tuple itself"
    way = "the tuple itself, example by example" if keyed(update) else "the tuple itself"
    return f"{way} ({'; '.join(f'{r}: {why}' for r, why in refused.items())})"
