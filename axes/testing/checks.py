"""The common suite: what every update owes its reader, and the law that every field of a tuple means something.

`checks(instance)` yields each check that applies with the reason why it is expected to fail, or None. A check takes
the update and raises AssertionError. `mutation_law` is the one that keeps the tuple honest: change any field of any
part and the trajectory moves, or the change is refused, or it is one of GAUGES, a short list of proven invariances.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from axes.core import algorithms, costs, execution, geometry, memory, monoids, rates, reference, state_update
from axes.core.algorithms import Anchor, Held, Mix, Momentum, Read, Step, Sum
from axes.core.costs import Cost, Linear, Ridge
from axes.core.declared import Declared
from axes.core.execution import Datum
from axes.core.geometry import Birkhoff, Cayley, Eigenbasis, Entropic, Geometry, InverseRoot, Spectral
from axes.core.memory import MLP, LayerNormMatrix, List, Matrix, Memory
from axes.core.monoids import Decay, Monoid
from axes.core.rates import Per
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError, IllegalUpdate
from axes.routes import dispatch
from axes.testing.declarations import check_declarations

Check = Callable[[StateUpdate], None]

# Measured over all systems of the tests in float64: routes differ from the interpreter by up to 3e-12 in a value (a
# normaliser close to zero) and 1e-11 in a gradient. They are relative to the largest entry.
TOLERANCE = 1e-9
# A change of a field counts if an output moves by this much; invariances stay below 1e-13.
MOVES = 1e-10


# ---- running an update on data of its own ------------------------------------------------------------------------


def example(
    *updates: StateUpdate,
    batch: tuple[int, ...] = (2,),
    length: int = 7,
    d_k: int = 4,
    d_v: int = 6,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor | float]:
    """A random signal that supplies what all the updates ask for.

    Keyed updates get the batch dimensions, then time, then features; updates of a parameter get time first, and "g" is
    (T, d_v, d_k). A name has the same values whatever other names are asked for. Memories that need d_v = d_k get d_k.
    """
    parts = [part for update in updates for part in _parts(update)]
    if any(isinstance(part, LayerNormMatrix | MLP) for part in parts):
        d_v = d_k
    keyed = updates[0].parts().memory.keyed
    lead = (*batch, length) if keyed else (length,)
    shapes = {"scalar": (), "key": (d_k,), "row": (d_v,), "square": (d_v, d_k), "pair": (d_k // 2,), "mix": (d_k, d_k)}

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        return torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)

    signal: dict[str, Tensor | float] = {}
    for name in sorted({"q", *(("k", "v") if keyed else ("g",))}.union(*(u.signals() for u in updates))):
        x = draw(name, {"v": (d_v,), "e": (d_v,), "g": (d_v, d_k)}.get(name, (d_k,)))
        # keys have unit length; the other vectors of a transition are small enough that products of many stay so
        unit = name == "k" or name.startswith(("w", "mutated_w"))
        if name == "v":  # errors from well inside to well outside any threshold
            x = x * torch.exp(1.5 * draw("size of v", (1,)) - 1)
        if unit:
            x = torch.nn.functional.normalize(x, dim=-1)
        if name == "k":  # unit length would hide what depends on it, more would let explicit steps diverge
            x = x * (0.6 + 0.4 * torch.sigmoid(draw("size of k", (1,))))
        signal[name] = x if unit or name in ("v", "q", "g") else 0.3 * x
    for rate in {rate for update in updates for rate in update.demands()}:
        x = draw(rate.name, shapes[rate.shape])
        if rate.domain == "unit":
            x = torch.nn.functional.logsigmoid(x)
        elif rate.domain == "positive":
            x = torch.sigmoid(x)
        signal[rate.name] = x
    return {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in signal.items()}


def trajectory(
    update: StateUpdate, signal: Mapping[str, Tensor | float], state: State | None = None
) -> tuple[Tensor, State]:
    """Outputs (..., T, ...) and the final state, by the interpreter.

    An update of a parameter descends l(W) = |W|^2 / 4 + <g, W> from W_0 = g_0, its gradient taken where the tuple says;
    a filter or a statistic is driven by g.
    """
    p = update.parts()
    if p.memory.keyed:
        return reference.run(update, signal, state, time=_time(signal))
    outputs: list[Tensor] = []
    out = None
    for datum in reference.tokens(signal, 0):
        g = datum["g"]
        assert isinstance(g, Tensor)
        if isinstance(p.cost, Linear):
            driven = (p.cost.drive(g, datum),)
            state = update.init({**datum, "g": driven[0]}) if state is None else state
            state, out = update.step(state, datum, drive=driven)
        else:
            state = update.init(datum, (g,)) if state is None else state
            rate = rates.resolve(p.step.rate, datum)
            kept = p.memory.act(p.monoid.element(datum, rate, state.theta[0]), state.theta)
            (point,) = execution.evaluated(p, Datum(state, datum, rate, kept, state.anchor))
            if p.step.at == "read" and out is not None:
                point = out.weights[0]
            state, out = update.step(state, {**datum, "g": point / 2 + g})
        outputs.append(out.weights[0])
    assert state is not None
    return torch.stack(outputs), state


def leaves(tree: object) -> list[Tensor]:
    """The tensors of a nested tuple, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, tuple) else []


def error(a: object, b: object) -> float:
    """Largest difference between nested tuples of tensors, relative to the largest entry of each; inf if unalike."""
    worst = 0.0
    first, second = leaves(a), leaves(b)
    if [x.shape for x in first] != [x.shape for x in second]:
        return float("inf")
    for x, y in zip(first, second, strict=True):
        if x.numel() and x.is_floating_point():
            x, y = x.detach(), y.detach()
            gap = (x - y).abs().max() / y.abs().max().clamp_min(1)
            worst = max(worst, float(torch.nan_to_num(gap, nan=torch.inf)))
        elif not torch.equal(x, y):
            return float("inf")
    return worst


def _time(signal: Mapping[str, Tensor | float]) -> int:
    """The time dimension of a signal made by `example`."""
    k = signal["k"]
    assert isinstance(k, Tensor)
    return k.ndim - 2


def _slice(signal: Mapping[str, Tensor | float], time: int, start: int, stop: int) -> dict[str, Tensor | float]:
    return {n: x.narrow(time, start, stop - start) if isinstance(x, Tensor) else x for n, x in signal.items()}


def _parts(update: StateUpdate) -> Iterator[object]:
    """Every part of a tuple, filters and statistics included."""
    yield from update.parts()
    for inner in (*update.filters(), *update.parts().h.stats):
        yield from _parts(inner)


# ---- the checks --------------------------------------------------------------------------------------------------


def check_pickle(update: StateUpdate) -> None:
    """A pickled and a deep-copied tuple equal the original, and hash alike."""
    for again in (pickle.loads(pickle.dumps(update)), copy.deepcopy(update)):
        assert again == update and hash(again) == hash(update), f"{again!r} differs from {update!r}"


def check_repr(update: StateUpdate) -> None:
    """The repr is the declaration: evaluated among the parts it gives an equal tuple."""
    again = eval(repr(update), dict(NAMES))
    assert again == update, f"{again!r} is not {update!r}"
    assert repr(again) == repr(update)


def check_normal_form(update: StateUpdate) -> None:
    """The normal form is its own normal form, equals the tuple, and computes the same numbers bit for bit."""
    normal = update.normal()
    assert normal.normal() is normal and normal == update and hash(normal) == hash(update)
    signal = example(update)
    assert _identical(trajectory(update, signal), trajectory(normal, signal)), "sugar changes the numbers"


def check_deterministic(update: StateUpdate) -> None:
    """The same data give the same bits, and they are finite."""
    signal = example(update)
    first, second = trajectory(update, signal), trajectory(update, signal)
    assert _identical(first, second), "two runs differ"
    assert all(bool(x.isfinite().all()) for x in leaves(first) if x.is_floating_point()), "not finite"


def check_state_round_trip(update: StateUpdate) -> None:
    """A state survives torch.save and a weights-only load, and continues bit for bit."""
    signal = example(update)
    time = 0 if not update.parts().memory.keyed else _time(signal)
    _, state = trajectory(update, _slice(signal, time, 0, 4))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=True)
    rest = _slice(signal, time, 4, 7)
    assert _identical(trajectory(update, rest, state), trajectory(update, rest, again)), "a loaded state differs"


def check_split(update: StateUpdate) -> None:
    """A run in two parts is the whole run."""
    signal = example(update)
    time = 0 if not update.parts().memory.keyed else _time(signal)
    whole, final = trajectory(update, signal)
    head, state = trajectory(update, _slice(signal, time, 0, 3))
    if _reads_last_output(update):
        return  # the point of the next gradient is an output, which a state does not hold
    tail, last = trajectory(update, _slice(signal, time, 3, 7), state)
    assert _identical((whole, final), (torch.cat((head, tail), time), last)), "a split run differs"


def check_routes(update: StateUpdate) -> None:
    """The selected route equals the interpreter: outputs, final state, and the gradients of all inputs."""
    signal = {n: x.requires_grad_() if isinstance(x, Tensor) else x for n, x in example(update, length=19).items()}
    time = _time(signal)
    expected = reference.run(update, signal, time=time)
    found = dispatch.run(update, signal, time=time)
    gap = error(found, expected)
    assert gap < TOLERANCE, f"outputs or state off by {gap:.1e}"
    gap = error(_gradients(found, signal), _gradients(expected, signal))
    assert gap < TOLERANCE, f"gradients off by {gap:.1e}"


def check_gradients(update: StateUpdate) -> None:
    """Every input that the outputs depend on gets a finite gradient."""
    signal = {n: x.requires_grad_() if isinstance(x, Tensor) else x for n, x in example(update).items()}
    for name, gradient in zip(signal, _gradients(trajectory(update, signal), signal), strict=True):
        assert bool(gradient.isfinite().all()), f"the gradient of {name!r} is not finite"


def check_mutation_law(update: StateUpdate) -> None:
    """See `mutation_law`."""
    mutation_law(update)


CHECKS: tuple[Check, ...] = (
    check_pickle,
    check_repr,
    check_normal_form,
    check_deterministic,
    check_state_round_trip,
    check_split,
    check_routes,
    check_gradients,
    check_declarations,
    check_mutation_law,
)


def checks(instance: object) -> Iterator[tuple[Check, str | None]]:
    """Each check that applies, with the reason why it is expected to fail, or None.

    instance: a StateUpdate, or anything with an `update`; its `known_failures`, pairs (check name, reason), are the
    excuses. Naming an unknown check is an error: an excuse must not outlive what it excuses.
    """
    update = instance if isinstance(instance, StateUpdate) else getattr(instance, "update", None)
    if not isinstance(update, StateUpdate):
        raise AxesError(f"checks: {instance!r} is neither a StateUpdate nor something with an `update`")
    excuses: dict[str, str] = dict(getattr(instance, "known_failures", ()))
    unknown = set(excuses) - {check.__name__ for check in CHECKS}
    if unknown:
        raise AxesError(f"checks: known_failures names {', '.join(sorted(unknown))}, which no check is called")
    for check in CHECKS:
        if check is check_routes and not update.parts().memory.keyed:
            continue
        yield check, excuses.get(check.__name__)


def _identical(a: object, b: object) -> bool:
    first, second = leaves(a), leaves(b)
    return len(first) == len(second) and all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) and torch.equal(x.isnan(), y.isnan())
        for x, y in zip(first, second, strict=True)
    )


def _gradients(result: tuple[Tensor, State], signal: Mapping[str, Tensor | float]) -> tuple[Tensor, ...]:
    """Gradients of a fixed random functional of outputs and final state in every input; zero where there is none."""
    loss = torch.zeros((), dtype=torch.float64)
    for i, x in enumerate(leaves(result)):
        if x.is_floating_point() and x.requires_grad:
            weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            loss = loss + (weights * x).sum()
    inputs = [x for x in signal.values() if isinstance(x, Tensor)]
    if not loss.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


def _reads_last_output(update: StateUpdate) -> bool:
    return update.parts().step.at == "read"


# ---- mutations ---------------------------------------------------------------------------------------------------

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
    known: dict[tuple[int, ...], Tensor] = {}
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
    update: StateUpdate, mutated: StateUpdate, known: dict[tuple[int, ...], Tensor]
) -> Literal["moved", "refused", "still"]:
    """known: the trajectories of `update` by the shape of its data, for all its neighbours."""
    # signs of a parameter's step change late; a proximal step on a curved h is solved for, and dear
    batch, length = (8,), 7 if update.parts().memory.keyed else 20
    if isinstance(anchor := update.parts().step.at, Anchor):  # beyond the first refresh, whichever neighbour refreshes
        length = max(length, anchor.every + 3)
    if _solves(update) or _solves(mutated):
        length = 2 if _solves(update) else 1
    signal = example(update, mutated, batch=batch, length=length)
    shape = (length, *_sizes(signal))
    if shape not in known:
        known[shape] = trajectory(update, signal)[0]
    before = known[shape]
    try:
        after, _ = trajectory(mutated, signal)
    except AxesError:  # shapes that only the data can tell
        return "refused"
    return "moved" if not error(after, before) < MOVES else "still"


def _solves(update: StateUpdate) -> bool:
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
                gauge = _gauge(owner, result)
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


# ---- gauge invariances -------------------------------------------------------------------------------------------


class Gauge(NamedTuple):
    """A change of one field that provably moves nothing: when, and why."""

    name: str
    applies: Callable[[StateUpdate, StateUpdate], bool]
    reason: str


def _same_but(a: object, b: object, *names: str) -> bool:
    """Whether two parts of one class agree in all other fields."""
    return type(a) is type(b) and all(
        getattr(a, f.name) == getattr(b, f.name)
        for f in dataclasses.fields(a)  # type: ignore[arg-type]
        if f.name not in names
    )


def _only_rate(a: StateUpdate, b: StateUpdate) -> bool:
    """Whether two updates differ only in a constant step size."""
    first, second = a.parts().step, b.parts().step
    constant = not isinstance(first.rate, Per) and not isinstance(second.rate, Per)
    same = a.parts()[:3] == b.parts()[:3] and a.memory == b.memory and _same_but(first, second, "rate")
    return same and constant and not isinstance(a.monoid, Decay)


def _debiased_rate(a: StateUpdate, b: StateUpdate) -> bool:
    step = a.parts().step
    return _only_rate(a, b) and step.debias and step.read is None


def _trust_ratio(a: StateUpdate, b: StateUpdate) -> bool:
    h, first, second = a.parts().h, a.parts().step, b.parts().step
    if not isinstance(h, geometry.TrustRatio) or not (h.base.linear or h.base.scale_free):
        return False
    return a.parts()[:3] == b.parts()[:3] and _same_but(first, second, "debias") and first.read is None


def _scale_free_rate(a: StateUpdate, b: StateUpdate) -> bool:
    step = a.parts().step
    return _only_rate(a, b) and a.parts().h.scale_free and step.lazy and step.read is None and step.start == "zero"


def _scale_free_ahead(a: StateUpdate, b: StateUpdate) -> bool:
    """A constant factor of a linear filter in front of a scale-free one, or of a lazy scale-free state."""
    if not _same_but(a.algorithm, b.algorithm, "via") or len(a.filters()) != len(b.filters()):
        return False
    via = a.parts().step.via
    if any(isinstance(f, Sum) for f in via):
        return False
    changed = [i for i, (f, g) in enumerate(zip(a.filters(), b.filters(), strict=True)) if f != g]
    if len(changed) != 1 or not _only_rate(a.filters()[changed[0]], b.filters()[changed[0]]):
        return False
    for f in a.filters()[changed[0] :]:
        _, h, _, step, _ = f.parts()
        if h.scale_free:
            return step.start == "zero" or f is not a.filters()[changed[0]]
        if not h.is_identity or step.read is not None and f is a.filters()[changed[0]]:
            return False
    return a.parts().h.scale_free and a.parts().step.lazy


def _held_for_one(a: StateUpdate, b: StateUpdate) -> bool:
    """A statistic's value computed at every datum, and the same value kept until the next."""
    first, second = a.parts().step, b.parts().step
    same = a.parts()[:3] == b.parts()[:3] and _same_but(first, second, "at")
    return same and {first.at, second.at} == {"prev", Held(1)}


def _numerical(a: StateUpdate, b: StateUpdate) -> bool:
    first, second = a.parts().h, b.parts().h
    if isinstance(first, Spectral):
        return any(_same_but(first, second, field) for field in ("tolerance", "eps", "form"))
    if isinstance(first, Eigenbasis | InverseRoot):
        return _same_but(first, second, "qr" if isinstance(first, Eigenbasis) else "method")
    links = [list(_links(u.parts().monoid)) for u in (a, b)]
    changed = [(x, y) for x, y in zip(*links, strict=False) if x != y]
    return len(changed) == 1 and (_same_but(*changed[0], "iterations") or _same_but(*changed[0], "method"))


def _links(monoid: Monoid) -> Iterator[Geometry]:
    if isinstance(monoid, monoids.GeneralLinear) and isinstance(monoid.link, Birkhoff | Cayley):
        yield monoid.link
    for part in monoid.parts if isinstance(monoid, monoids.Product) else ():
        yield from _links(part)


def _sign_of_error(a: StateUpdate, b: StateUpdate) -> bool:
    """Another cost of the error whose drive goes through a memoryless sign first."""
    via = a.parts().step.via
    if not via or isinstance(via[0], Sum) or a.parts()[1:] != b.parts()[1:]:
        return False
    _, h, monoid, _, _ = via[0].parts()  # type: ignore[union-attr]
    kinds = tuple(type(u.cost) for u in (a, b))
    if not isinstance(monoid, monoids.Zero) or a.cost.encode or b.cost.encode:
        return False
    parallel = all(
        isinstance(u.cost, costs.SquaredError | costs.RobustShift) or getattr(u.cost, "kind", "") == "norm"
        for u in (a, b)
    )
    signs = (costs.SquaredError, costs.Lp, costs.Huber, costs.HuberSwitch, costs.RobustShift)
    return parallel and h.scale_free or isinstance(h, geometry.SignBall) and all(issubclass(k, signs) for k in kinds)


def _rank_one(a: StateUpdate, b: StateUpdate) -> bool:
    """Two normalisations of a memoryless direction, whose drive r k^T has one singular value."""
    via = [u.parts().step.via for u in (a, b)]
    if any(len(v) != 1 or isinstance(v[0], Sum) for v in via) or not a.parts().memory.keyed:
        return False
    firsts = [v[0].parts() for v in via]  # type: ignore[union-attr]
    same = all(isinstance(f[2], monoids.Zero) for f in firsts)
    return same and {repr(f[1]) for f in firsts} == {"Sphere(axis='whole')", "Spectral(method='polar')"}


def _list_is_matrix(a: StateUpdate, b: StateUpdate) -> bool:
    kinds = {type(a.memory), type(b.memory)}
    scales = {m.scale for m in (a.memory, b.memory) if isinstance(m, List)}
    return kinds == {List, Matrix} and scales == {1.0} and a.parts().h.is_identity


def _last_is_row(a: StateUpdate, b: StateUpdate) -> bool:
    first, second = a.parts().h, b.parts().h
    if not isinstance(first, Entropic) or not isinstance(second, Entropic):
        return False
    return {first.axis, second.axis} == {"last", "row"} and first.mass == second.mass


GAUGES: tuple[Gauge, ...] = (
    Gauge(
        "rate of a debiased recurrence",
        _debiased_rate,
        "theta and its response to a unit drive carry the same constant rate, which their ratio does not",
    ),
    Gauge(
        "rate under a scale-free h",
        _scale_free_rate,
        "theta is linear in a constant rate from a zero start, and h.primal(c theta) = h.primal(theta) for c > 0",
    ),
    Gauge(
        "rate of a linear filter before a scale-free h",
        _scale_free_ahead,
        "linear filters pass a constant positive factor on, and the first scale-free h behind them drops it",
    ),
    Gauge(
        "a value held for one datum",
        _held_for_one,
        "what is computed anew at every datum need not be kept; the two differ where a root or basis fails",
    ),
    Gauge(
        "bias under a trust ratio",
        _trust_ratio,
        "the ratio |W| / |direction| removes every factor of a linear direction; only at W = 0 is it left in",
    ),
    Gauge(
        "cost before a memoryless direction",
        _sign_of_error,
        "every cost of the error e has a gradient with the signs of e, those of |e| alone one parallel to e: a sign or "
        "normalised direction of -r k^T is the same for all of them",
    ),
    Gauge(
        "direction of rank one",
        _rank_one,
        "the polar factor of a rank-one drive r k^T is r k^T / (|r| |k|): the projection onto the unit sphere",
    ),
    Gauge(
        "numerical-only fields",
        _numerical,
        "tolerance and eps far from their threshold, iterations after convergence, the two evaluations of Cayley's "
        "map, of an inverse root, of an orthonormalisation and of odd polynomials change rounding alone",
    ),
    Gauge(
        "list memory with Euclidean h",
        _list_is_matrix,
        "sum_i v_i <k_i, q> is (sum_i v_i k_i^T) q: with scale 1 the list is the matrix memory",
    ),
    Gauge(
        "entropic axis of a matrix parameter",
        _last_is_row,
        'the last axis of a matrix is its rows: "last" is for vectors, whose shape only the data tell',
    ),
)


def _gauge(a: StateUpdate, b: StateUpdate) -> str | None:
    return next((gauge.name for gauge in GAUGES if gauge.applies(a, b)), None)


def _names(modules: Iterable[types.ModuleType]) -> Mapping[str, object]:
    """The classes that a repr may name."""
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Declared)
    }


NAMES = _names((rates, costs, geometry, monoids, algorithms, memory, state_update))

__all__ = [
    "CHECKS",
    "GAUGES",
    "Check",
    "Gauge",
    "checks",
    "error",
    "example",
    "leaves",
    "mutation_law",
    "mutations",
    "trajectory",
]
