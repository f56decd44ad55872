"""Gauge invariances: changes of one field that provably move nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from axes.core import costs, geometry, monoids
from axes.core.algorithms import Held, Mix, Step, Sum
from axes.core.geometry import (
    Ball,
    Birkhoff,
    Cayley,
    Eigenbasis,
    Entropic,
    Euclidean,
    Geometry,
    Hypentropy,
    InverseRoot,
    Spectral,
    Whiten,
)
from axes.core.memory import List, Matrix, Regression
from axes.core.monoids import Decay, Identity, Monoid
from axes.core.rates import SEEN, Per, named, resolve
from axes.core.state_update import StateUpdate

_CONVERGED = 16  # steps of conjugate gradients: more than the law's keys have entries


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


def _only(part: str, a: StateUpdate, b: StateUpdate) -> bool:
    """Whether two updates agree in all other parts."""
    return a.parts()._replace(**{part: getattr(b.parts(), part)}) == b.parts()


def _only_rate(a: StateUpdate, b: StateUpdate) -> bool:
    """Whether two updates differ only in a constant step size."""
    first, second = a.parts().step, b.parts().step
    constant = not isinstance(first.rate, Per) and not isinstance(second.rate, Per)
    same = _only("step", a, b) and _same_but(first, second, "rate")
    return same and constant and not isinstance(a.monoid, Decay)


def _debiased_rate(a: StateUpdate, b: StateUpdate) -> bool:
    step = a.parts().step
    return _only_rate(a, b) and step.debias and step.read is None


def _trust_ratio(a: StateUpdate, b: StateUpdate) -> bool:
    h, first, second = a.parts().h, a.parts().step, b.parts().step
    if not isinstance(h, geometry.TrustRatio) or not h.drops_factors or not (h.base.linear or h.base.scale_free):
        return False
    return _only("step", a, b) and _same_but(first, second, "debias") and first.read is None


def _scale_free_rate(a: StateUpdate, b: StateUpdate) -> bool:
    step, h = a.parts().step, a.parts().h
    drops = h.scale_free or isinstance(h, Ball) and h.norm == "euclidean"
    return _only_rate(a, b) and drops and step.lazy and step.read is None and step.start == "zero"


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
        p, first = f.parts(), f is a.filters()[changed[0]]
        if p.h.scale_free:
            return p.step.start == "zero" or not first
        if not p.h.is_identity or p.step.read is not None and first:
            return False
    return a.parts().h.scale_free and a.parts().step.lazy


def _held_for_one(a: StateUpdate, b: StateUpdate) -> bool:
    """A statistic's value computed at every datum, and the same value kept until the next."""
    first, second = a.parts().step, b.parts().step
    same = _only("step", a, b) and _same_but(first, second, "at")
    return same and {first.at, second.at} == {"prev", Held(1)}


def _numerical(a: StateUpdate, b: StateUpdate) -> bool:
    first, second = a.parts().h, b.parts().h
    kept = [u.parts().memory for u in (a, b)]
    if isinstance(kept[0], Regression) and _only("memory", a, b) and _same_but(kept[0], kept[1], "steps"):
        return all(m.steps >= _CONVERGED for m in kept if isinstance(m, Regression))
    if isinstance(first, Spectral):
        return any(_same_but(first, second, field) for field in ("tolerance", "eps", "form"))
    if {type(first), type(second)} == {Euclidean, Hypentropy}:
        return _only("h", a, b)
    if isinstance(first, Whiten):
        return _same_but(first, second, "floor") or first.eps < 1e-12 and _same_but(first, second, "eps_inside")
    if isinstance(first, Eigenbasis | InverseRoot):
        return _same_but(first, second, "qr" if isinstance(first, Eigenbasis) else "method")
    pairs = [(x, y) for x, y in zip(first.links(), second.links(), strict=False) if x != y]
    if pairs and isinstance(pairs[-1][0], geometry.RankOneWhiten) and _same_but(*pairs[-1], "guard"):
        return True
    if pairs and isinstance(pairs[-1][0], geometry.RelativeStep) and _same_but(*pairs[-1], "least"):
        return True
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
    if not via or isinstance(via[0], Sum) or not _only("cost", a, b):
        return False
    first = a.filters()[0].parts()
    kinds = tuple(type(u.cost) for u in (a, b))
    if not isinstance(first.monoid, monoids.Zero) or a.cost.encode or b.cost.encode:
        return False
    parallel = all(
        isinstance(u.cost, costs.SquaredError | costs.RobustShift) or getattr(u.cost, "kind", "") == "norm"
        for u in (a, b)
    )
    signs = (costs.SquaredError, costs.Lp, costs.Huber, costs.HuberSwitch, costs.RobustShift)
    if parallel and first.h.scale_free:
        return True
    # a row of the drive r k^T on a sphere is the sign of its error along the key
    rows = isinstance(first.h, geometry.Sphere) and first.h.axis == "rows" and a.parts().memory.kind == "matrix"
    return (rows or isinstance(first.h, geometry.SignBall)) and all(issubclass(k, signs) for k in kinds)


def _rank_one(a: StateUpdate, b: StateUpdate) -> bool:
    """Two normalisations of a memoryless direction, whose drive r k^T has one singular value."""
    via = [u.parts().step.via for u in (a, b)]
    if any(len(v) != 1 or isinstance(v[0], Sum) for v in via) or not a.parts().memory.keyed:
        return False
    firsts = [u.filters()[0].parts() for u in (a, b)]
    same = all(isinstance(f.monoid, monoids.Zero) for f in firsts)
    return same and {repr(f.h) for f in firsts} == {"Sphere(axis='whole')", "Spectral(method='polar')"}


def _unshown_average(a: StateUpdate, b: StateUpdate) -> bool:
    """Another average beside weights that are shown alone, or one that is still the weights."""
    first, second = a.parts().step, b.parts().step
    return first.read == Mix(0.0) and first.via == second.via and (_only("monoid", a, b) or _only("step", a, b))


def _changed_filters(a: StateUpdate, b: StateUpdate) -> list[tuple[int, Step, Step]]:
    """Places and steps of the filters that differ, where nothing else does."""
    if not _same_but(a.algorithm, b.algorithm, "via") or len(a.filters()) != len(b.filters()):
        return []
    pairs = enumerate(zip(a.filters(), b.filters(), strict=True))
    return [(i, f.parts().step, g.parts().step) for i, (f, g) in pairs if f != g]


def _nothing_at_first(a: StateUpdate, b: StateUpdate) -> bool:
    """Another start where the first drive is zero: of a filter at or behind the ball, or of the update itself."""
    closed = [
        isinstance(f.h, Ball) and not any(named(f.h.radius)) and resolve(f.h.radius, {SEEN: 0}) == 0.0
        for f in a.parts().filters()
    ]
    if _only("step", a, b) and _same_but(a.algorithm, b.algorithm, "start"):
        return any(closed) and isinstance(a.parts().monoid, Identity)
    changed = _changed_filters(a, b)
    return len(changed) == 1 and any(closed[: changed[0][0] + 1]) and _same_but(*changed[0][1:], "start")


def _along_the_weights(a: StateUpdate, b: StateUpdate) -> bool:
    """Whether one filter with a trust ratio and a decay starts elsewhere."""
    changed = _changed_filters(a, b)
    ratios = [a.filters()[i].parts().h for i, _, _ in changed]
    decays = [isinstance(h, geometry.TrustRatio) and not h.drops_factors for h in ratios]
    return decays == [True] and _same_but(*changed[0][1:], "start")


def _list_is_matrix(a: StateUpdate, b: StateUpdate) -> bool:
    kinds = {type(a.memory), type(b.memory)}
    scales = {m.scale for m in (a.memory, b.memory) if isinstance(m, List)}
    every = all(m.window is None for m in (a.memory, b.memory) if isinstance(m, List))
    return kinds == {List, Matrix} and scales == {1.0} and every and a.parts().h.is_identity


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
        "theta is linear in a constant rate from a zero start, and h.primal(c theta) = h.primal(theta) for c > 0; a "
        "Euclidean ball drops c where theta is outside of it",
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
        lambda a, b: _trust_ratio(a, b) or _along_the_weights(a, b),
        "the ratio |W| / |direction| removes every factor of a linear direction; only at W = 0 is it left in. The "
        "law's first gradient is along the weights, as a decay in the direction is: without it that is the same",
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
        "an average that is not shown",
        _unshown_average,
        "read=Mix(0.0) shows the newest weights, where the gradient is taken too; their average is in the state alone, "
        "and equal to the weights while its rate is 1",
    ),
    Gauge(
        "start behind a ball without a radius",
        _nothing_at_first,
        "a ball whose radius grows from 0 passes nothing of the first drive on: zero is what a filter starts at anyway",
    ),
    Gauge(
        "numerical-only fields",
        _numerical,
        "tolerance, floor, eps, where eps stands and the least size of weights, far from their threshold, iterations "
        "after convergence, the two evaluations of Cayley's map, of an inverse root, of an orthonormalisation and of "
        "odd polynomials change rounding alone; the hyperbolic sine of a state far below its scale is the state",
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


def gauge_of(a: StateUpdate, b: StateUpdate) -> str | None:
    """The invariance that a change of one field is, by name, or None."""
    return next((g.name for g in GAUGES if g.applies(a, b)), None)


__all__ = ["GAUGES", "Gauge", "gauge_of"]
