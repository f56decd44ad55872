"""The mutation law: change any field of any part, and the trajectory moves, or the change is refused, or it is a gauge.

This keeps the tuple honest: no field of it is there for show.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from axes.core import costs, geometry, memory, monoids
from axes.core.algorithms import Anchor, Held, Mix, Momentum, Read, Step
from axes.core.costs import Cost, Ridge
from axes.core.declared import Declared
from axes.core.geometry import Geometry
from axes.core.memory import Memory
from axes.core.monoids import Monoid
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, IllegalUpdate
from axes.testing.examples import error, example, trajectory
from axes.testing.gauges import gauge_of

# A change of a field counts if an output moves by this much; invariances stay below 1e-13.
MOVES = 1e-10

_COSTS: tuple[Cost, ...] = (
    costs.Alignment(),
    costs.SquaredError(),
    costs.SquaredError(encode=True),
    costs.Lp(3.0),
    costs.Huber(0.2),
    costs.Huber(0.2, "norm"),
    costs.HuberSwitch(0.2),
    costs.RobustShift(0.3),
    costs.CrossEntropy(),
)
_GEOMETRIES: tuple[Geometry, ...] = (
    geometry.Euclidean(),
    geometry.Entropic(),
    geometry.Lq(),
    geometry.SoftThreshold(0.05),
    geometry.Bounded(),
    geometry.Hypentropy(),
    geometry.Sphere("rows"),
    geometry.Sphere("columns"),
    geometry.SignBall(),
    geometry.Spectral("polar"),
)
_MONOIDS: tuple[Monoid, ...] = (
    monoids.Identity(),
    monoids.Zero(),
    monoids.Scalar(0.6),
    monoids.Scalar("mutated_gate"),
    monoids.Decay(0.2),
    monoids.Diagonal("mutated_key_gate"),
    monoids.Diagonal("mutated_row_gate", "row"),
    monoids.Diagonal(Per("mutated_pair_gate", "pair", "unit"), "pair"),
    monoids.Diagonal(Per("mutated_row_pair_gate", "row-pair", "unit"), "row-pair"),
    monoids.Rotation(Per("mutated_row_angle", "row-pair", "real")),
    monoids.Hadamard("mutated_square_gate"),
    monoids.Rotation(),
    monoids.Householder(0.5, "mutated_w"),
    monoids.DPLR("mutated_key_gate", "mutated_a", "mutated_b"),
    monoids.GeneralLinear(Per("mutated_mix", "mix", "real")),
)
_MEMORIES: tuple[Memory, ...] = (
    memory.Matrix(),
    memory.Entries(),
    memory.Slots(),
    memory.LayerNormMatrix(),
    memory.MLP(2),
    memory.List(),
    memory.BoundedList(3),
    memory.Regression(2),
    memory.Correlation(2, 3),
)
_OTHERS: Mapping[str, tuple[object, ...]] = {
    "cost": _COSTS,
    "h": _GEOMETRIES,
    "monoid": _MONOIDS,
    "memory": _MEMORIES,
    "at": ("prev", "gated", "read", "new", Anchor(2), Anchor(3), Held(2), Held(2, "excluded")),
    "read": (None, Read(0.5, 0.75), Mix(0.6)),
}


class _Change(NamedTuple):
    """One field of a tuple set to another value: where, the result or why it is refused, why nothing need move."""

    path: str
    result: object
    gauge: str | None


def mutations(update: StateUpdate) -> Iterator[tuple[str, StateUpdate | IllegalUpdate]]:
    """Every one-field neighbour of an update's normal form: what was changed, and the new update or its refusal."""
    for change in _changes(update.normal(), object):
        assert isinstance(change.result, StateUpdate | IllegalUpdate)
        yield change.path, change.result


def mutation_law(update: StateUpdate) -> dict[str, int]:
    """Every legal change of one field moves the trajectory, or is one of GAUGES.

    Returns how many changes moved it, were refused, and were excused. Raises AssertionError naming the dead fields.
    """
    update = update.normal()
    count = {"moved": 0, "refused": 0, "gauge": 0}
    known: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
    dead = []
    for change in _changes(update, object):
        if isinstance(change.result, IllegalUpdate):
            count["refused"] += 1
            continue
        assert isinstance(change.result, StateUpdate)
        outcome = _moves(update, change.result, known)
        if outcome == "still" and change.gauge is None:
            dead.append(change.path)
        count["gauge" if outcome == "still" else outcome] += 1
    assert not dead, f"{update!r}: these changes move nothing and no gauge invariance explains it: {'; '.join(dead)}"
    return count


def _moves(
    update: StateUpdate, mutated: StateUpdate, known: dict[tuple[int, ...], tuple[Tensor, ...]]
) -> Literal["moved", "refused", "still"]:
    """known: the trajectories of `update` by the shape of its data, for all its neighbours."""
    # signs of a parameter's step change late; a proximal step on a curved h is solved for, and dear
    batch, length = (8,), 7 if update.parts().memory.keyed else 20
    if isinstance(anchor := update.parts().step.at, Anchor):  # beyond the first refresh, whichever neighbour refreshes
        length = max(length, anchor.every + 3)
    windows = [m.most for m in (update.parts().memory, mutated.parts().memory) if isinstance(m, memory.List)]
    if len(set(windows)) > 1:  # beyond the narrower one, or both keep every pair
        length = max(length, min(w for w in windows if w is not None) + 3)
    if solves(update) or solves(mutated):
        length = 2 if solves(update) else 1
    each = [(u.parts().step.writes, u.parts().step.reads) for u in (update, mutated)]
    if each[0] != each[1]:  # what they have in common is the first of their pairs
        first, second = (example(u, batch=batch, length=length) for u in (update, mutated))
        return "moved" if not error(_seen(mutated, second), _seen(update, first)) < MOVES else "still"
    signal = example(update, mutated, batch=batch, length=length)
    shape = (length, *_sizes(signal))
    if shape not in known:
        known[shape] = _seen(update, signal)
    before = known[shape]
    try:
        after = _seen(mutated, signal)
    except AxesError:  # shapes that only the data can tell
        return "refused"
    except torch.linalg.LinAlgError:  # a decomposition of what is no number any more
        return "moved"
    return "moved" if not error(after, before) < MOVES else "still"


def _seen(update: StateUpdate, signal: Mapping[str, Tensor | float]) -> tuple[Tensor, ...]:
    """What an axis sees of a trajectory: the outputs, and at its end what the tuple tells and makes of that."""
    outputs, state = trajectory(update, signal)
    if (h := update.telling) is None:
        return (outputs,)
    told, began = update.told(state, signal), outputs.new_tensor(h.began())
    return outputs, told, began, h.number(told.abs(), began)  # what is negative it may well leave out


def solves(update: StateUpdate) -> bool:
    return update.parts().step.at == "new" and not update.parts().h.is_identity


def _sizes(signal: Mapping[str, Tensor | float]) -> tuple[int, ...]:
    return tuple(n for name in ("v", "g") for n in getattr(signal.get(name), "shape", ()))


def _changes(value: object, hint: object) -> Iterator[_Change]:
    """One-field neighbours of a value that stands in a field with this type hint."""
    if isinstance(value, Per):
        yield _Change(f"{value.name} renamed", dataclasses.replace(value, name=f"mutated_{value.name}"), None)
        if _admits(hint, float):
            yield _Change(f"{value.name} -> 0.37", 0.37, None)
    elif isinstance(value, Declared):
        yield from _field_changes(value)
    elif isinstance(value, bool):
        yield _Change(str(not value), not value, None)
    elif literals := _literals(hint):
        yield from (_Change(repr(x), x, None) for x in literals if x != value)
        if isinstance(value, str) and _admits(hint, Anchor):
            yield from (_Change(repr(x), x, None) for x in (Anchor(2), Anchor(3)))
    elif isinstance(value, int):
        yield _Change(str(value + 1), value + 1, None)
    elif isinstance(value, float):
        new = 0.7 * value if abs(value) > 1e-6 else 0.3
        yield _Change(f"{new:g}", new, None)
    elif isinstance(value, str):
        yield _Change(f"mutated_{value}", f"mutated_{value}", None)
    elif value is None and _admits(hint, float):
        yield _Change("0.7", 0.7, None)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            for path, changed, gauge in _changes(item, object):
                refused = isinstance(changed, IllegalUpdate)
                yield _Change(f"[{i}] {path}", changed if refused else (*value[:i], changed, *value[i + 1 :]), gauge)


def _field_changes(owner: Declared) -> Iterator[_Change]:
    hints = typing.get_type_hints(type(owner))
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]
        value = getattr(owner, field.name)
        found = list(_changes(value, hints[field.name]))
        if isinstance(owner, StateUpdate | Step):
            found += [_Change(repr(x), x, None) for x in _OTHERS.get(field.name, ()) if x != value]
        if isinstance(owner, StateUpdate) and field.name == "cost" and not isinstance(value, Ridge):
            found.append(_Change("Ridge(0.3)", _refusable(Ridge, cost=value, weight=0.3), None))
        if field.name == "via":
            found += [_Change(f"[{i}] removed", value[:i] + value[i + 1 :], None) for i in range(len(value))]
            found.append(_Change("one more", (*value, Momentum(0.8, "ema")), None))
        for change in found:
            result = change.result
            if not isinstance(result, IllegalUpdate):
                result = _refusable(dataclasses.replace, owner, **{field.name: result})
            if result == owner:  # another spelling of the same value
                continue
            gauge = change.gauge
            if gauge is None and isinstance(owner, StateUpdate) and isinstance(result, StateUpdate):
                gauge = gauge_of(owner, result)
            yield _Change(f".{field.name} {change.path}", result, gauge)


def _refusable(build: Callable[..., object], *args: object, **fields: object) -> object:
    try:
        return build(*args, **fields)
    except IllegalUpdate as refusal:
        return refusal


def _admits(hint: object, kind: type) -> bool:
    """Whether a type hint is a union with this class in it, or the class."""
    return hint is kind or any(_admits(inner, kind) for inner in _union(hint))


def _literals(hint: object) -> tuple[object, ...]:
    """The values of the literals in a hint, and None if it is optional."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    found = tuple(x for inner in _union(hint) for x in _literals(inner))
    return (*found, None) if found and type(None) in _union(hint) else found


def _union(hint: object) -> tuple[object, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else ()


__all__ = ["mutation_law", "mutations", "solves"]
