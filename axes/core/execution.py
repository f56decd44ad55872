"""One step of the recursion, from the five parts of an update in normal form.

    u      = -grad l(W_eval; k_t, v_t)      W_eval by step.at
    u      = f(u)  for f in step.via        filters: updates whose cost is linear in the drive
    stats  = s(u)  for s in h.stats         statistics: the same
    theta  = A_t theta + rate * u           or the larger of the two, entry by entry
    W      = grad h*(theta)                 lazy stores theta; agile stores W
    out    = W, or grad h* at step.read

All tensors may carry leading batch dimensions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from axes.core.algorithms import Anchor, Held, Mix, Read, Sum
from axes.core.costs import Linear
from axes.core.declared import Recurrence
from axes.core.geometry import Context
from axes.core.geometry.preconditioners import fisher, is_begun, rotate
from axes.core.memory import Leaves
from axes.core.monoids import Element, Identity, Zero
from axes.core.parts import Parts
from axes.core.rates import Per, Rate, Signal, extent, named, rate_shape, resolve, spread
from axes.errors import IllegalUpdate
from axes.linalg.formulas import numberless
from axes.linalg.solve import root


class State(NamedTuple):
    """Everything an update remembers: a plain nested tuple of tensors."""

    theta: Leaves
    via: tuple[State | tuple[State, ...], ...]
    stats: tuple[State, ...]
    norm: Leaves
    anchor: Leaves
    count: Tensor  # type: ignore[assignment]

    def but(self, **fields: Any) -> State:
        """The same with other fields: what `_replace` does, which torch 2.11's compiler cannot follow."""
        return State(*(fields.get(name, x) for name, x in zip(State._fields, self, strict=True)))

    def to(self, dtype: torch.dtype) -> State:
        """The same held in this dtype: one of 16 bits halves what a step reads and writes, and rounds it every time."""
        return _each(self, lambda x: x.to(dtype) if x.is_floating_point() else x)

    def detach(self) -> State:
        """The same without the graph that made it."""
        return _each(self, Tensor.detach)

    def number(self) -> int:
        """The count, on the host: of a tensor without numbers that of a first datum."""
        return 0 if numberless(self.count) else int(self.count)

    def held(self) -> torch.dtype | None:
        """The dtype of 16 bits in which matrices are held; None where they are held as they are computed."""
        return self.theta[0].dtype if self.theta and self.theta[0].dtype in SHORT else None


SHORT = (torch.bfloat16, torch.float16)


def _each(x: Any, f: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(x, Tensor):
        return f(x)
    parts = [_each(part, f) for part in x]
    return type(x)(*parts) if isinstance(x, State) else tuple(parts)


torch.serialization.add_safe_globals([State])  # a saved state loads with weights_only=True
Filters = tuple[State | tuple[State, ...], ...]
Values = list[Leaves]


class Output(NamedTuple):
    """What a step yields: the primal weights, and the normaliser that a debiased keyed memory is read with."""

    weights: Leaves
    norm: Leaves = ()


class Datum(NamedTuple):
    """What a datum finds: the state before it, its numbers, and the points where its gradient may be taken.

    gated: the state after retention, or what the last of several steps on the datum gave (`again`).
    anchor: the weights as they stood when they were last looked at, or a value that is held.
    """

    state: State
    signal: Signal
    rate: Tensor | float
    gated: Leaves
    anchor: Leaves = ()
    again: bool = False


# ---- states ------------------------------------------------------------------------------------------------------


def init(p: Parts, theta: Leaves, signal: Signal, outer: Leaves = ()) -> State:
    """The state before the first datum. outer: the weights around a filter, which it may start at."""
    held = p.memory.filterable and (p.step.via or p.h.stats)
    like = tuple(torch.zeros_like(leaf) for leaf in theta) if held else ()
    via: list[State | tuple[State, ...]] = []
    for f in p.step.via:
        if isinstance(f, Sum):
            via.append(tuple(init(b.parts(), like, signal, theta) for b in f.branches))
        else:
            assert isinstance(f, Recurrence)
            via.append(init(f.parts(), like, signal, theta))
    stats: list[State] = []
    for s in p.statistics():  # a later statistic may see the earlier ones
        driven = seen(s, like, signal, [t.theta for t in stats])
        stats.append(init(s, tuple(torch.zeros_like(x) for x in driven), signal))
    if isinstance(start := p.step.start, float):
        theta = tuple(torch.full_like(leaf, start) for leaf in theta)
    theta = outer if start == "W0" else theta
    norm: Leaves = ()
    if p.step.debias:
        keyed = p.memory.keyed
        norm = p.memory.unread(theta) if keyed else tuple(leaf.new_zeros((1,) * leaf.ndim) for leaf in theta)
    anchor: Leaves = ()
    if isinstance(p.step.at, Anchor):
        anchor = tuple(torch.zeros_like(leaf) for leaf in theta)
    if isinstance(p.step.at, Held):
        anchor = tuple(map(p.h.empty, theta))  # and how often no value could be taken
        anchor += tuple(leaf.new_zeros((*leaf.shape[:-2], 1, 1)) for leaf in theta)
    return State(theta, tuple(via), tuple(stats), norm, anchor, torch.zeros((), dtype=torch.int64))


def step(
    p: Parts, state: State, signal: Signal, given: Leaves | None = None, outer: Leaves | None = None
) -> tuple[State, Output]:
    """The state after one datum, and the output.

    given: the drive of a filter or statistic.  outer: the weights around a filter, for geometries that see them.
    """
    if p.step.writes > 1:
        return _one_after_another(p, state, signal)
    at = p.step.at
    rate = resolve(p.step.rate, signal)
    element = p.monoid.element(signal, rate, state.theta[0])
    waits = p.step.start == "second" and state.number() == 0
    gated = state.theta if waits else p.memory.act(element, state.theta)
    anchor = state.anchor
    if isinstance(at, Anchor) and state.number() % at.every == 0:
        anchor = primal(p, state.theta, state, signal)
    if isinstance(at, Held) and at.before(state.number()):
        anchor = refreshed(p, state, state.theta, state.norm, signal)
    datum, via, stats = Datum(state, signal, rate, gated, anchor), state.via, state.stats
    u: Leaves = ()
    values: Values = []
    for _ in range(p.step.steps):
        raw = _from_outside(given) if p.driven else drive(p, datum)
        u, via = _filtered(p, raw, via, state, signal, outer)
        shown = tuple(torch.zeros_like(x) for x in u) if waits else u
        datum = datum._replace(gated=_written(p, datum, shown), again=True)
        stats, values = _observed(p, u, raw, datum.gated, stats, signal, outer)
        u = shown
    theta, count = datum.gated, state.count + 1
    norm = state.norm if waits else tuple(_responded(p, element, n, rate, signal) for n in state.norm)
    if isinstance(at, Held):
        if at.after(state.number()):
            anchor = refreshed(p, state, theta, norm, signal)
        return State(theta, via, stats, norm, anchor, count), Output(anchor[: len(theta)])
    context = _contexts(signal, u, outer, values)
    out = _shown(p, state, theta, norm, u, context, signal)
    stored = theta if p.step.lazy else _map(p, theta, context)
    if p.step.feedback != 0.0:
        stored = _kept(p, theta, context, _value(p.step.feedback, signal))
    return State(stored, via, stats, norm, anchor, count), out


def several(p: Parts) -> frozenset[str]:
    """Names of which a datum of several writes has one for each: keys, values and the rates of step and cost."""
    if p.step.writes == 1:
        return frozenset()
    return frozenset({"k", "v", *(per.name for r in (p.step.rate, *p.cost.rates()) for per in named(r))})


def one_write(p: Parts, signal: Signal, i: int) -> dict[str, Any]:
    """What a datum of several writes brings with one of them."""
    rates: dict[str, Per] = {per.name: per for r in (p.step.rate, *p.cost.rates()) for per in named(r)}
    found = dict(signal)
    for name in several(p):
        x, own = signal.get(name), 1 if name in "kv" else len(extent(rates[name], 1, 1))
        if isinstance(x, Tensor) and x.ndim > own:
            found[name] = x.select(-1 - own, i)
    return found


@functools.lru_cache(maxsize=256)
def _of_one_write(p: Parts, first: bool) -> Parts:
    step = dataclasses.replace(p.step, writes=1)
    return p._replace(step=step) if first else p._replace(step=step, monoid=Identity())


def _one_after_another(p: Parts, state: State, signal: Signal) -> tuple[State, Output]:
    """A datum of several writes: the monoid acts with the first, the others follow under the identity."""
    count = state.count + 1
    for i in range(p.step.writes):
        state, out = step(_of_one_write(p, i == 0), state, one_write(p, signal, i))
    return state.but(count=count), out


def output(p: Parts, state: State, signal: Signal) -> Output:
    """The weights that a state stands for, without a step (depth reads before it writes)."""
    if isinstance(p.step.at, Held):
        return Output(state.anchor[: len(state.theta)])
    if not p.step.lazy:
        return Output(state.theta)
    return at_point(p, state.theta, state.norm, _context(p, state.stats, signal))


def told(p: Parts, state: State, signal: Signal) -> Tensor:
    """What the filter whose h tells the axis something has to say of a state: see `Geometry.told`."""
    kept: list[Any] = [t for s in state.via for t in ((s,) if isinstance(s, State) else s)]
    for f, s in zip(p.filters(), kept, strict=True):
        if f.h.tells is not None:
            (context,) = _context(f, s.stats, signal)
            return f.h.told(context.stats)
    raise IllegalUpdate("no filter of the update tells its axis anything")


def read(p: Parts, out: Output, q: Tensor, signal: Signal) -> Tensor:
    """Read q (..., d_k) from an output: (..., d_v), divided by the normaliser when debiased. Of several reads q is
    (..., reads, d_k), and what is read (..., reads, d_v)."""
    if p.step.reads > 1:
        one = p._replace(step=dataclasses.replace(p.step, reads=1))
        return torch.stack([read(one, out, x, signal) for x in q.unbind(-2)], -2)
    if not out.norm:
        return p.memory.read(out.weights, q, signal, p.h)
    return p.memory.read_over(out.weights, out.norm, q, signal, p.h, p.step.floor)


# ---- the drive ---------------------------------------------------------------------------------------------------


def drive(p: Parts, datum: Datum) -> Leaves:
    """u = -grad l(W_eval), before the filters."""
    if p.step.at == "new":
        return _implicit(p, datum)
    signal = datum.signal
    weights = evaluated(p, datum) if p.drive_sees_state else datum.gated
    if p.oracle:
        g = signal["g"]
        u: Leaves = tuple(-x for x in (g if isinstance(g, tuple) else (g,)))  # type: ignore[misc]
    else:
        x, target = pair(p, signal)
        prediction = _predicted(p, weights, x, signal) if p.predicts else target
        r = p.cost.residual(prediction, _against(p, target), 0.0, signal)
        u = p.memory.vjp(weights, x, -r, signal, encode=p.cost.encode)
    return _ridged(p, u, weights, signal) if p.ridged else u


def _ridged(p: Parts, u: Leaves, weights: Leaves, signal: Signal) -> Leaves:
    """With the ridge of a coupled decay, l + (weight/2) |W|^2, at the evaluation point."""
    weight = _value(p.cost.ridge, signal)
    return tuple(x - weight * w for x, w in zip(u, weights, strict=True))


def _from_outside(given: Leaves | None) -> Leaves:
    if given is None:
        raise IllegalUpdate("a Linear cost is driven from outside: this update is a filter or a statistic")
    return given


def pair(p: Parts, signal: Signal) -> tuple[Tensor, Tensor]:
    """What the memory predicts from, and what it should predict: key and value, or value and key when encoding."""
    k, v = signal["k"], signal["v"]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    return (v, k) if p.cost.encode else (k, v)


def evaluated(p: Parts, datum: Datum) -> Leaves:
    """W_eval: where the gradient is taken."""
    if isinstance(p.step.at, Anchor):
        return datum.anchor
    if p.step.at == "read":
        return _asked(p, datum.state, datum.signal)
    theta = datum.gated if p.step.at == "gated" or datum.again else datum.state.theta
    return primal(p, theta, datum.state, datum.signal)


def _asked(p: Parts, state: State, signal: Signal) -> Leaves:
    """The weights at which the gradient of a datum is given: W, or between W and what the last filter gave before."""
    weights, look = primal(p, state.theta, state, signal), p.step.read
    if p.step.at != "read" or not isinstance(look, Mix):
        return weights
    last, kept = p.step.via[-1], state.via[-1]
    assert isinstance(last, Recurrence) and isinstance(kept, State)
    newest, w = output(last.parts(), kept, signal).weights, _value(look.weight, signal)
    return tuple(w * x + (1 - w) * z for x, z in zip(weights, newest, strict=True))


def _predicted(p: Parts, weights: Leaves, x: Tensor, signal: Signal) -> Tensor:
    if p.memory.scored:
        return p.memory.recalled(weights, x, signal, p.h)
    return p.memory.predict(weights, x, signal, encode=p.cost.encode)


def _implicit(p: Parts, datum: Datum) -> Leaves:
    """The drive of the proximal step: r = grad l(predict(grad h*(A theta - rate r k^T))), d_v unknowns."""
    cost, memory, signal = p.cost, p.memory, datum.signal
    gated, rate, shape = datum.gated, datum.rate, rate_shape(p.step.rate)
    x, target = pair(p, signal)
    if p.h.is_identity:
        prediction = memory.predict(gated, x, signal)
        c = rate
        if isinstance(rate, Tensor) and rate.ndim:  # against predictions (..., d_v), or (..., d_v, d_k) by entry
            c = _against(p, rate[..., None] if shape == "scalar" else rate)
        r = cost.residual(prediction, _against(p, target), c * memory.sharpness(x), signal)
        return memory.vjp(gated, x, -r, signal)
    context = _context(p, datum.state.stats, signal)

    def stationarity(r: Tensor) -> Tensor:
        moved = memory.add(gated, rate, shape, memory.vjp(gated, x, -r, signal))
        prediction = memory.predict(_map(p, moved, context), x, signal)
        return r - cost.residual(prediction, target, 0.0, signal)

    r = root(stationarity, torch.zeros_like(target))
    return memory.vjp(gated, x, -r, signal)


# ---- filters and statistics --------------------------------------------------------------------------------------


def _filtered(
    p: Parts, u: Leaves, states: Filters, state: State, signal: Signal, outer: Leaves | None
) -> tuple[Leaves, Filters]:
    """The drive behind all filters, and their states; their geometries may see the outermost W."""
    if p.step.via and outer is None:
        outer = _asked(p, state, signal)
    kept: list[State | tuple[State, ...]] = []
    for f, s in zip(p.step.via, states, strict=True):
        if isinstance(f, Sum):
            assert not isinstance(s, State)
            pairs = [step(b.parts(), t, signal, u, outer) for b, t in zip(f.branches, s, strict=True)]
            kept.append(tuple(t for t, _ in pairs))
            weights = [_value(w, signal) for w in f.weights]
            mixed = [tuple(w * x for x in out.weights) for w, (_, out) in zip(weights, pairs, strict=True)]
            u = tuple(sum(xs[1:], xs[0]) for xs in zip(*mixed, strict=True))
        else:
            assert isinstance(f, Recurrence) and isinstance(s, State)
            s, out = step(f.parts(), s, signal, u, outer)
            kept.append(s)
            u = out.weights
    return u, tuple(kept)


def _observed(
    p: Parts,
    u: Leaves,
    raw: Leaves,
    theta: Leaves,
    states: tuple[State, ...],
    signal: Signal,
    outer: Leaves | None,
) -> tuple[tuple[State, ...], Values]:
    """The statistics of h after u has made the state theta, each seeing the ones before it, and their values."""
    stepped: list[State] = []
    outs: Values = []
    stats = p.statistics()
    white = _whitened(p, u, states, signal) if any(_asks(s, "whitened") for s in stats) else u
    for s, state in zip(stats, states, strict=True):
        of = white if _asks(s, "whitened") else raw if _asks(s, "raw") else theta if _is_of(s, "state") else u
        if _is_of(s, "travel"):
            of = _travelled(u, theta, outer)
        state, out = step(s, state, signal, seen(s, of, signal, outs))
        stepped.append(state)
        outs.append(out.weights)
    return tuple(stepped), outs


def seen(p: Parts, u: Leaves, signal: Signal, earlier: Sequence[Leaves]) -> Leaves:
    """What a statistic is driven by: squares or products of the drive, rotated by earlier ones or not."""
    cost = p.cost
    assert isinstance(cost, Linear)
    if cost.of == "eigen-fisher":
        left, right = earlier[-2:]
        return tuple(fisher(signal, a, b, cost.precision) for a, b in zip(left, right, strict=True))
    if cost.of == "eigen-square":
        bases = zip(u, *earlier[-2:], strict=True)
        u = tuple(rotate(x, left, right, cost.precision) for x, left, right in bases)
    elif cost.of == "eigen-square-left":
        u = tuple(rotate(x, left, None, cost.precision) for x, left in zip(u, earlier[-1], strict=True))
    elif cost.of == "eigen-square-right":
        u = tuple(rotate(x, None, right, cost.precision) for x, right in zip(u, earlier[-1], strict=True))
    return tuple(cost.drive(leaf, signal) for leaf in u)


def _whitened(p: Parts, u: Leaves, states: tuple[State, ...], signal: Signal) -> Leaves:
    """What h makes of the drive with its statistics before the datum; the drive itself where they have no value."""
    context = _context(p, states, signal, u)
    if p.h.entrywise:
        return _map(p, u, context)
    begun = (torch.stack([is_begun(x) for x in c.stats]).all(0) for c in context)
    return tuple(torch.where(b, y, x) for b, y, x in zip(begun, _map(p, u, context), u, strict=True))


def refreshed(p: Parts, state: State, theta: Leaves, norm: Leaves, signal: Signal) -> Leaves:
    """The held value of theta, which may continue from the last one, or that one where there is no new one."""
    held, missed = state.anchor[: len(theta)], state.anchor[len(theta) :]
    last: tuple[Tensor | None, ...] = held if state.number() else (None,) * len(held)
    context = (Context(weights=w, signal=signal) for w in last)
    pairs = tuple(map(p.h.refreshed, _debiased(theta, norm), held, context))
    return tuple(x for x, _ in pairs) + tuple(m + ~good for (_, good), m in zip(pairs, missed, strict=True))


# ---- the new state and what is shown of it -----------------------------------------------------------------------


def _written(p: Parts, datum: Datum, u: Leaves) -> Leaves:
    """A theta + rate u."""
    if p.step.start == "first" and datum.state.number() == 0 or _passes(p, datum, u):
        return u
    shape = rate_shape(p.step.rate)
    if p.step.write == "max":
        written = p.memory.add(tuple(torch.zeros_like(x) for x in datum.gated), datum.rate, shape, u)
        return tuple(map(torch.maximum, datum.gated, written))
    return p.memory.add(datum.gated, datum.rate, shape, u)


def _passes(p: Parts, datum: Datum, u: Leaves) -> bool:
    """Whether theta is the drive itself: nothing is kept, the rate is 1, and u has the shape of theta."""
    if not isinstance(p.monoid, Zero) or p.memory.kind != "parameter":
        return False
    if p.step.steps > 1 or isinstance(datum.rate, Tensor) or datum.rate != 1.0:
        return False
    return all(x.ndim == 0 or x.shape == y.shape for x, y in zip(datum.gated, u, strict=True))


def _responded(p: Parts, element: Element, norm: Tensor, rate: Tensor | float, signal: Signal) -> Tensor:
    """The normaliser: the same recurrence driven by a unit value."""
    return p.memory.respond(element.act(norm), rate, rate_shape(p.step.rate), _unit(p, norm, signal))


def _unit(p: Parts, norm: Tensor, signal: Signal) -> Tensor:
    """What a unit value drives a normaliser by: its key, where there is one."""
    if not p.memory.keyed:
        return torch.ones_like(norm)
    k = signal["k"]
    assert isinstance(k, Tensor)
    return k[..., None, :]


def _shown(
    p: Parts, state: State, theta: Leaves, norm: Leaves, u: Leaves, context: tuple[Context, ...], signal: Signal
) -> Output:
    """The output of a step: at theta, at the read point, or between theta and the newest drive."""
    look = p.step.read
    if isinstance(look, Read):
        gate, rate = _value(look.gate, signal), _value(look.rate, signal)
        theta = tuple(gate * x for x in state.theta)
        if look.rate != 0.0:  # else it is a value before the datum
            theta = tuple(x + rate * y for x, y in zip(theta, u, strict=True))
        norm = tuple(gate * n + rate * _unit(p, n, signal) for n in state.norm)
    out = at_point(p, theta, norm, context)
    if isinstance(look, Mix):
        w = _value(look.weight, signal)
        return Output(tuple(w * x + (1 - w) * y for x, y in zip(out.weights, u, strict=True)))
    return out


def _kept(p: Parts, theta: Leaves, context: tuple[Context, ...], share: Tensor | float) -> Leaves:
    """What is left of theta when a share of what h used of it is taken."""
    last = len(context) - 1
    return tuple(x - share * p.h.used(x, context[min(i, last)]) for i, x in enumerate(theta))


def _value(rate: Rate, signal: Signal) -> Tensor | float:
    """A rate against leaves."""
    return spread(resolve(rate, signal), rate_shape(rate))


def at_point(
    p: Parts, theta: Leaves, norm: Leaves, context: tuple[Context, ...], by_formula: bool = False
) -> Output:
    """The output at a dual point with this normaliser. by_formula: of h's derivatives, see `Geometry`."""
    if p.memory.keyed:
        return Output(_map(p, theta, context, by_formula), norm)
    return Output(_map(p, _debiased(theta, norm), context, by_formula))


def primal(p: Parts, theta: Leaves, state: State, signal: Signal) -> Leaves:
    """W at theta. An agile state stores W itself: h projects or proximates, so it must not act twice."""
    if not p.step.lazy and theta is state.theta:
        return theta
    return _map(p, theta, _context(p, state.stats, signal))


def _map(p: Parts, theta: Leaves, context: tuple[Context, ...], by_formula: bool = False) -> Leaves:
    if p.h.is_identity or p.memory.scored:  # a list's scores are its dual: h acts when it is read
        return theta
    primal = p.h.primal_by_formula if by_formula else p.h.primal
    return tuple(primal(leaf, context[min(i, len(context) - 1)]) for i, leaf in enumerate(theta))


def _context(
    p: Parts, stats: tuple[State, ...], signal: Signal, u: Leaves = (), outer: Leaves | None = None
) -> tuple[Context, ...]:
    """What the geometry may see, leaf by leaf; the last one stands for all further leaves."""
    outs = [output(s, t, signal).weights for s, t in zip(p.statistics(), stats, strict=True)]
    return _contexts(signal, u, outer, outs)


def _contexts(signal: Signal, u: Leaves, outer: Leaves | None, stats: Values) -> tuple[Context, ...]:
    given = (u, outer or (), *stats)
    columns: Any = zip_longest(*given) if any(given) else [(None,) * len(given)]
    return tuple(Context(x, tuple(rest), w, signal) for x, w, *rest in columns)


def _debiased(theta: Leaves, norm: Leaves) -> Leaves:
    """theta / norm where there is a normaliser; before the first datum both are zero, and so is this."""
    safe = (torch.where(n == 0, torch.ones_like(n), n) for n in norm)
    return tuple(x / n for x, n in zip(theta, safe, strict=True)) if norm else theta


def _against(p: Parts, target: Tensor) -> Tensor:
    """Targets (..., d_v) as predictions have them: against all keys (..., d_v, 1) where each entry predicts alone."""
    return target[..., None] if p.memory.kind == "entries" else target


def _is_of(statistic: Parts, of: Literal["state", "travel"]) -> bool:
    return isinstance(statistic.cost, Linear) and statistic.cost.of == of


def _travelled(u: Leaves, theta: Leaves, outer: Leaves | None) -> Leaves:
    """u (W - theta), which is what the drive promises of the way from theta to the weights around a filter."""
    if outer is None:
        raise IllegalUpdate("a statistic of travel reads the weights around its filter: pass weights")
    return tuple(x * (w - a) for x, w, a in zip(u, outer, theta, strict=True))


def _asks(statistic: Parts, of: Literal["whitened", "raw"]) -> bool:
    """Whether a statistic is of what h made of the drive, or of the drive ahead of the filters."""
    return isinstance(statistic.cost, Linear) and bool(getattr(statistic.cost, of))
