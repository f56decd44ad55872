"""What runs, asked of anything that has a tuple: a name of the catalogue, a class, an object, the tuple itself.

Nothing here decides: each adapter answers for itself (`plans`, `default_plans`), as its own steps do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from axes.core.derived import block_size, feedback, structure
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.routes import dispatch
from axes.routes.choice import Choice, Implementation, Plan, Target
from axes.routes.select import Shapes
from axes.routes.select import plans as plans_of_a_sequence

if TYPE_CHECKING:
    from axes.moves import Axis


def select(
    obj: object,
    device: str | torch.device | Target | None = None,
    dtype: torch.dtype | None = None,
    shapes: Shapes | None = None,
    implementation: Implementation | None = None,
    time: int = 1,
) -> Choice:
    """What runs: a route (how), an implementation (who) and why nothing faster.

    Args:
        obj: a name or an entry of the catalogue; a layer, a mixer, an optimizer or their classes; what
            `axes.optim.optimizer` and `axes.depth.mixer` return; or a `StateUpdate`: along a sequence if it has keys,
            else as an optimizer. An object with several tuples answers for its first (an optimizer for its first
            group); `explain` tells of all.
        device: "cpu", "cuda", ...; "cuda:sm_80" is a GPU of that capability, "cuda" one of capability 9.0 if there is
            none here. By default where an object's parameters are, and a CPU for all others.
        dtype: of what is computed; by default the object's, and float32 for all others.
        shapes, time: of the signal that a bare tuple is run with, see `axes.dispatch.run`.
        implementation: reference, torch, triton or c by name.

    Raises:
        NoImplementation: the named implementation cannot compute it.
        AxesError: a device that torch does not know, or an object without a tuple.
    """
    if isinstance(obj, StateUpdate) and obj.parts().memory.keyed and (dtype is None or isinstance(dtype, torch.dtype)):
        target = Target.of("cpu" if device is None else device)
        return dispatch.select(obj, target, dtype or torch.float32, shapes, implementation, time)
    if shapes is not None or time != 1:
        raise AxesError("select: shapes and time are of a signal that a tuple with keys is run with, and this is none")
    return plans(obj, device, dtype, implementation)[0].choice


def explain(
    obj: object,
    device: str | torch.device | Target | None = None,
    dtype: torch.dtype | None = None,
    axis: Axis | None = None,
) -> str:
    """Tuple, normal form, derived facts, what runs and why not something faster, as text; arguments as for `select`.

    axis: "data", "sequence" or "depth": of the tuple as `axes.retarget` moves it there. First come both, field by
    field, what moved marked.

    Raises:
        AxesError: as `select`; the tuple has no meaning on the axis (with the reason).
    """
    lines: list[str] = []
    if axis is not None:
        update = plans(obj)[0].update
        obj, text = _moved(update, axis)
        lines += [text, ""]
    about: StateUpdate | None = None
    for plan in plans(obj, device, dtype):
        if plan.update is not about:
            lines += [*([""] if about else []), *_facts(plan.update)]
            about = plan.update
        route, who, reason = plan.choice
        lines.append(f"{plan.name:<12} {route} by {who} on {plan.target}, {_word(plan.dtype)}: {reason}")
        for other, refused in plan.routes.items():
            lines.append(f"  {other:<13}{'legal' if refused is None else 'no: ' + refused}")
    return "\n".join(lines)


def plans(
    obj: object,
    device: str | torch.device | Target | None = None,
    dtype: torch.dtype | None = None,
    implementation: Implementation | None = None,
) -> tuple[Plan, ...]:
    """What runs for every tuple of an object, arguments as for `select`."""
    target = None if device is None else Target.of(device)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise AxesError(f"dtype must be a torch.dtype, such as torch.bfloat16, got {dtype!r}")
    if isinstance(obj, str):
        from axes import catalogue  # loads all families

        obj = catalogue.get(obj)
    if isinstance(obj, StateUpdate):
        if obj.parts().memory.keyed:
            named = implementation or dispatch.chosen()
            return plans_of_a_sequence(obj, target or Target.of("cpu"), dtype or torch.float32, named)
        from axes.optim import optimizer

        return (optimizer(obj).plans(target, dtype, implementation)[0]._replace(name="runs"),)
    update = getattr(obj, "update", None)
    asked: Any = getattr(obj, "default_plans" if isinstance(obj, type) else "plans", None)
    if not isinstance(update, StateUpdate):
        raise AxesError(
            f"{obj!r} has no tuple that could be run: give a StateUpdate, a name of the catalogue, or a layer, an "
            "optimizer or a mixer (its class, or an object that was constructed)"
        )
    if asked is None:  # something of the caller's own that carries a tuple
        return plans(update, device, dtype, implementation)
    found: tuple[Plan, ...] = asked(target, dtype, implementation)
    if not found:
        raise AxesError(f"{type(obj).__name__} has no parameter that would be stepped, so nothing runs")
    return found


def _moved(update: StateUpdate, axis: Axis) -> tuple[object, str]:
    """What runs a tuple on another axis, and the tuple beside what it is there."""
    from axes.moves import pair, retarget

    moved = retarget(update, axis)
    runs: object = moved
    if axis == "data":
        from axes.optim import optimizer

        runs = optimizer(moved)
    elif axis == "depth":
        from axes.depth import mixer

        runs = mixer(moved)
    return runs, pair(update, moved)


def _facts(update: StateUpdate) -> Iterable[str]:
    yield f"tuple        {update!r}"
    normal = update.normal()
    if normal is not update:
        yield f"normal form  {normal!r}"
    demands = ", ".join(f"{p.name} ({p.shape}, {p.domain})" for p in update.demands()) or "nothing"
    yield f"asks for     {demands}"
    yield f"signals      {', '.join(sorted(update.signals()))}"
    yield f"feedback     {feedback(update)}"
    yield f"transition   {structure(update)}, block size {block_size(update)}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["explain", "plans", "select"]
