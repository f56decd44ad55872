"""A tuple on another axis: `retarget`; what tells two tuples apart, field by field: `differences`, `pair`.

What an axis supplies differs, the algorithm does not. A loss hands the training step a gradient, tokens and layers hand
over pairs (k, v); a training step has numbers that are scheduled, tokens and layers have rates that are projected or
learned:

    training step                              tokens, layers
    cost Given()                               SquaredError() of tokens, Alignment() of what layers write
    ridge and decoupled decay, weight_decay    a gate of the state, Scalar(Per("decay", domain="unit"))
    learning rate Per("lr")                    Per("beta"), a rate of every datum
    memory Parameter()                         Matrix()

Everything else, geometry, filters, statistics and where a state is read, is the tuple's own and goes along.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch

from axes.core.algorithms import Anchor
from axes.core.costs import Alignment, Cost, Given, Ridge, SquaredError
from axes.core.declared import Declared
from axes.core.memory import Matrix, Parameter
from axes.core.monoids import Decay, Diagonal, Hadamard, Identity, Monoid, Product, Scalar
from axes.core.rates import Complement, Formula, Per, Rate, rate_shape
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, IllegalUpdate, UnknownName

Axis = Literal["data", "sequence", "depth"]
_AXES = get_args(Axis)
_ONTO: dict[str, Cost] = {"sequence": SquaredError(), "depth": Alignment()}  # what stands for a given gradient
FORGET, WRITE = Per("decay", "scalar", "unit"), Per("beta")
RATE, DECAY = Per("lr"), Per("weight_decay")


class Difference(NamedTuple):
    """A field in which two tuples differ. path: such as algorithm.via[0].h; a part that one has not is None."""

    path: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.first!r} -> {self.second!r}"


def differences(first: StateUpdate, second: StateUpdate) -> tuple[Difference, ...]:
    """The fields in which two tuples differ, each as deep as it can be said; none if they are equal.

    >>> from axes.core.algorithms import Step
    >>> rate = Step(Per("beta"))
    >>> str(*differences(StateUpdate(Alignment(), algorithm=rate), StateUpdate(SquaredError(), algorithm=rate)))
    'cost: Alignment() -> SquaredError()'
    """
    return () if first == second else tuple(_differ("", first.normal(), second.normal()))


def _differ(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, Declared) and type(a) is type(b):
        for field in dataclasses.fields(a):  # type: ignore[arg-type]
            below = f"{path}.{field.name}" if path else field.name
            yield from _differ(below, getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differ(f"{path}[{i}]", x, y)
    elif a != b:
        yield Difference(path, a, b)


def pair(first: StateUpdate, second: StateUpdate) -> str:
    """Two tuples as text, a field a line. A field in which they differ is marked, and has in place what it differs in.

    >>> from axes.core.algorithms import Step
    >>> rate = Step(Per("beta"))
    >>> print(pair(StateUpdate(Alignment(), algorithm=rate), StateUpdate(SquaredError(), algorithm=rate)))
    * cost       [Alignment() -> SquaredError()]
      h          Euclidean()
      monoid     Identity()
      algorithm  Step(rate=Per(name='beta'))
      memory     Matrix()
    """
    a, b = first.normal(), second.normal()
    fields = ((field.name, getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    return "\n".join(f"{' ' if x == y else '*'} {name:<9}  {_both(x, y)}" for name, x, y in fields)


def _both(a: Any, b: Any) -> str:
    """As `repr`, with [a -> b] where `_differ` finds a difference."""
    if a == b:
        return repr(b)
    if isinstance(a, Declared) and type(a) is type(b):
        names = [f.name for f in dataclasses.fields(a)]  # type: ignore[arg-type]
        parts = [(n, getattr(a, n), getattr(b, n)) for n in names]
        return f"{type(b).__name__}({', '.join(f'{n}={_both(x, y)}' for n, x, y in parts if x != y or n in b.said())})"
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return f"({', '.join(_both(x, y) for x, y in zip(a, b, strict=True))}{',' if len(b) == 1 else ''})"
    return f"[{a!r} -> {b!r}]"


def replaced(update: StateUpdate, values: Mapping[str, Any]) -> StateUpdate:
    """The tuple with other values in some fields, by path as `differences` names them; judged once all are in place.

    Raises IllegalUpdate if there is no such field, or the tuple is not legal then.

    >>> from axes.optim import Adam
    >>> from axes.core.geometry import Euclidean
    >>> replaced(Adam.declare(), {"algorithm.via[0].h": Euclidean()}).filters()[0].h
    Euclidean()
    """
    steps = {}
    for path, value in values.items():
        if not re.fullmatch(r"\w+(\[\d+\]|\.\w+)*", path):
            raise IllegalUpdate(f"replaced: a path is such as algorithm.via[0].h, not {path!r}")
        steps[tuple(re.findall(r"\w+", path))] = value
    made: StateUpdate = _put(update.normal(), steps)
    return made


def _put(part: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    if () in values:
        return values[()]
    below: dict[str, dict[tuple[str, ...], Any]] = {}
    for (name, *rest), value in values.items():
        below.setdefault(name, {})[tuple(rest)] = value
    if isinstance(part, tuple):
        names = [str(i) for i in range(len(part))]
    else:
        names = [f.name for f in dataclasses.fields(part)] if isinstance(part, Declared) else []  # type: ignore[arg-type]
    if unknown := sorted(set(below) - set(names)):
        has = ", ".join(names) or "no fields"
        raise IllegalUpdate(f"replaced: {type(part).__name__} has no {unknown[0]!r}, but {has}")
    if isinstance(part, tuple):
        return tuple(_put(x, below[n]) if n in below else x for n, x in zip(names, part, strict=True))
    return dataclasses.replace(part, **{n: _put(getattr(part, n), below[n]) for n in below})


def retarget(update: StateUpdate, axis: Axis, cost: Cost | None = None, anchor: int | None = None) -> StateUpdate:
    """The same algorithm on another axis: "data" (training steps), "sequence" (tokens) or "depth" (layers).

    cost: in the place of a given gradient, of a cost of pairs on the way to training steps; by the table of this module
    if left out.  anchor: tokens whose gradients are all taken where the first of them began; a direction that mixes
    entries of the gradient costs a product a token without.

    A tuple that has a meaning there as it is comes back unchanged.

    Raises:
        IllegalUpdate: the tuple has no meaning on that axis, with the reason.

    >>> from axes.optim import SGD
    >>> moved = retarget(SGD.declare(momentum=0.0), "sequence")
    >>> moved.cost, moved.monoid, moved.algorithm
    (SquaredError(), Scalar(gate=Per(name='decay', domain='unit')), Step(rate=Per(name='beta')))
    """
    if axis not in _AXES:
        raise UnknownName("axis", str(axis), _AXES)
    if not isinstance(update, StateUpdate):
        raise IllegalUpdate(f"retarget takes a StateUpdate, got {update!r}")
    if anchor is not None and axis != "sequence":
        raise IllegalUpdate(f"retarget: anchor={anchor} is for tokens; a step of {axis} has one gradient")
    try:
        moved = _to_numbers(update, cost) if axis == "data" else _to_pairs(update, cost or _ONTO[axis], anchor)
        _TRIED[axis](moved)
    except AxesError as error:
        raise IllegalUpdate(f"retarget: {update.cost!r} ... has no meaning on the axis {axis}: {error}") from error
    return moved


# ---- to tokens and layers --------------------------------------------------------------------------------------------


def _to_pairs(update: StateUpdate, onto: Cost, anchor: int | None) -> StateUpdate:
    cost, monoid, forgets = update.cost, update.monoid, False
    if isinstance(cost, Ridge):
        cost, forgets = cost.cost, True
    if isinstance(monoid, Decay):
        monoid, forgets = Identity(), True
    if isinstance(cost, Given):
        cost = onto
    if forgets:
        gate = Scalar(FORGET)
        monoid = gate if isinstance(monoid, Identity) else Product((gate, monoid))
    step = update.algorithm
    step = dataclasses.replace(step, rate=_named(step.rate, RATE, WRITE))
    if anchor is not None:
        step = dataclasses.replace(step, at=Anchor(every=anchor))
    memory = None if isinstance(update.memory, Parameter) else update.memory
    return StateUpdate(cost, update.h, monoid, step, memory)


# ---- to training steps -----------------------------------------------------------------------------------------------


def _to_numbers(update: StateUpdate, cost: Cost | None) -> StateUpdate:
    if isinstance(update.memory, Parameter):
        return update
    if not isinstance(update.memory, Matrix):
        kind = type(update.memory).__name__
        raise IllegalUpdate(f"a training step changes the parameters that there are, and {kind} is a memory of its own")
    given = cost or (Given() if isinstance(update.cost, Alignment | SquaredError) else update.cost)
    monoid, decayed = _without_gates(update.monoid)
    if decayed and not isinstance(monoid, Identity):
        given = Ridge(given, DECAY)
    elif decayed:
        monoid = Decay(DECAY)
    step = update.algorithm
    step = dataclasses.replace(step, rate=_scheduled(step.rate))
    if isinstance(given, Given) or isinstance(given, Ridge) and isinstance(given.cost, Given):
        step = dataclasses.replace(step, at="prev")  # the loss has said where its gradient is taken
    return StateUpdate(given, update.h, monoid, step)


def _without_gates(monoid: Monoid) -> tuple[Monoid, bool]:
    """A monoid without what forgets by a rate of every datum, and whether there was such a thing."""
    parts = monoid.parts if isinstance(monoid, Product) else (monoid,)
    kept: list[Monoid] = []
    for part in parts:
        if isinstance(part, Diagonal | Hadamard) and isinstance(part.gate, Per):
            raise IllegalUpdate(f"{part!r} forgets every channel at a rate of its own; a training step has one number")
        if not (isinstance(part, Scalar) and isinstance(part.gate, Per)):
            kept.append(part)
    whole = Identity() if not kept else kept[0] if len(kept) == 1 else Product(tuple(kept))
    return whole, len(kept) < len(parts)


def _scheduled(rate: Rate) -> Rate:
    if rate_shape(rate) != "scalar":
        raise IllegalUpdate(f"{rate!r} is a rate of every {rate_shape(rate)}; a training step has one number")
    return RATE if isinstance(rate, Per) else _inside(rate, lambda per: RATE)


# ---- rates -----------------------------------------------------------------------------------------------------------


def _named(rate: Rate, old: Per, new: Per) -> Rate:
    """A rate with another name in the place of one; numbers stay."""
    return new if rate == old else _inside(rate, lambda per: new if per == old else per)


def _inside(rate: Rate, renamed: Callable[[Per], Per]) -> Rate:
    if isinstance(rate, Per):
        return renamed(rate)
    if isinstance(rate, Complement):
        return Complement(renamed(rate.of))
    if isinstance(rate, Formula):
        return Formula(rate.operation, tuple(_inside(x, renamed) for x in rate.inputs))
    return rate


# ---- tried -----------------------------------------------------------------------------------------------------------


def _as_optimizer(update: StateUpdate) -> None:
    from axes.optim.rules.general import optimizer

    optimizer(update)
    for per in update.demands():
        if per.shape != "scalar":
            raise IllegalUpdate(f"{per!r} is a rate of every {per.shape}; a training step has one number")


def _as_layer(update: StateUpdate) -> None:
    from axes.sequence import layer

    with torch.random.fork_rng(devices=()), torch.no_grad():
        made = layer(update)(8, heads=2, d_k=4, d_v=4)
        out, _ = made(torch.randn(1, 3, 8))
    if not out.isfinite().all():
        raise IllegalUpdate("three tokens give what is not finite")


def _as_mixer(update: StateUpdate) -> None:
    from axes.depth import mixer

    mixer(update)


_TRIED: dict[str, Callable[[StateUpdate], None]] = {"data": _as_optimizer, "sequence": _as_layer, "depth": _as_mixer}
