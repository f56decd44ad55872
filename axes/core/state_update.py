"""`StateUpdate`: one algorithm on every axis, as a value that is executed.

    W_t = argmin_{W in C}  l_t(W; k_t, v_t) + (1/eta_t) D_h(W, A_t W_{t-1})

    u      = -grad l(W_eval; k_t, v_t)      W_eval by algorithm.at
    u      = f(u)  for f in algorithm.via   filters: StateUpdates whose cost is linear in the drive
    stats  = s(u)  for s in h.stats         statistics: the same
    theta  = A_t theta + rate * u
    W      = grad h*(theta)                 lazy stores theta; agile stores W
    out    = W, or grad h* at algorithm.read

Nothing else has memory. All tensors may carry leading batch dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from axes.core.algorithms import Anchor, Held, Mix, Momentum, Read, Step, Sum
from axes.core.costs import Cost, Linear
from axes.core.declared import Declared
from axes.core.geometry import Context, Euclidean, Geometry
from axes.core.geometry.preconditioners import fisher, is_begun, rotate
from axes.core.legality import check
from axes.core.memory import Leaves, List, Matrix, Memory, Parameter
from axes.core.monoids import Element, Identity, Monoid, Product, Scalar, Zero
from axes.core.rates import Per, Rate, Signal, rate_shape, resolve, spread
from axes.errors import IllegalUpdate
from axes.linalg.solve import root


@final
@dataclass(frozen=True, repr=False)
class OnUpdate(Declared):
    """Sugar: h acts on the last filter (on a memoryless one if there is none), the state itself is Euclidean."""

    h: Geometry


class State(NamedTuple):
    """Everything an update remembers: a plain nested tuple of tensors."""

    theta: Leaves
    via: tuple[State | tuple[State, ...], ...]
    stats: tuple[State, ...]
    norm: Leaves
    anchor: Leaves
    count: Tensor  # type: ignore[assignment]


torch.serialization.add_safe_globals([State])  # a saved state loads with weights_only=True


class Output(NamedTuple):
    """What a step yields: the primal weights, and the normaliser that a debiased keyed memory is read with."""

    weights: Leaves
    norm: Leaves = ()


class Parts(NamedTuple):
    """The five parts of an update in normal form: no sugar, every part typed."""

    cost: Cost
    h: Geometry
    monoid: Monoid
    step: Step
    memory: Memory


@final
@dataclass(frozen=True, repr=False, eq=False)
class StateUpdate(Declared):
    """The tuple (cost, h, monoid, algorithm) over a memory; see the module for the recursion it executes.

    Two updates are equal if their normal forms are: sugar does not count.

    memory defaults to Matrix() for costs that see keys and to Parameter() for Given and Linear.
    Raises IllegalUpdate if the parts cannot act together or a setting would have no effect.
    """

    cost: Cost
    h: Geometry | OnUpdate = Euclidean()
    monoid: Monoid = Identity()
    algorithm: Step | Momentum = Step()
    memory: Memory | None = None

    def __post_init__(self) -> None:
        algorithms, none = (Step, Momentum), type(None)
        wanted: tuple[tuple[type, ...], ...] = ((Cost,), (Geometry, OnUpdate), (Monoid,), algorithms, (Memory, none))
        for field, kinds in zip(dataclasses.fields(self), wanted, strict=True):
            value = getattr(self, field.name)
            if not isinstance(value, kinds):
                raise IllegalUpdate(f"StateUpdate: {field.name} must be a {kinds[0].__name__}, got {value!r}")
        if self.memory is None:
            object.__setattr__(self, "memory", self._usual_memory())
        normal = self.normal()
        check(normal)
        normal.demands()

    def _usual_memory(self) -> Memory:
        return Parameter() if isinstance(self.cost, Linear) or "g" in self.cost.needs else Matrix()

    def _undeclared(self, field: dataclasses.Field[object]) -> object:
        return self._usual_memory() if field.name == "memory" else field.default

    def __eq__(self, other: object) -> bool:
        return self.parts() == other.parts() if isinstance(other, StateUpdate) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.parts())

    def __getstate__(self) -> dict[str, object]:
        """The declaration alone: a copy works out its normal form and its facts for itself."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    # ---- the normal form -------------------------------------------------------------------------------------

    def normal(self) -> StateUpdate:
        """The same update without sugar: equality of updates is equality of normal forms."""
        return self._normal

    @cached_property
    def _normal(self) -> StateUpdate:
        step = self.algorithm
        if isinstance(step, Momentum):
            step = Step(rate=step.rate, at=step.at, via=(dataclasses.replace(step, rate=1.0, at="prev"),))
        via = tuple(_lower(f) for f in step.via)
        h = self.h
        if isinstance(h, OnUpdate):
            last = via[-1] if via else None
            if isinstance(last, StateUpdate) and isinstance(last.h, Euclidean):
                via = (*via[:-1], dataclasses.replace(last, h=_lower_stats(h.h)))
            else:
                via = (*via, StateUpdate(Linear(), _lower_stats(h.h), Zero()))
            h = Euclidean()
        h = _lower_stats(h)
        monoid = _lower_monoid(self.monoid)
        step = dataclasses.replace(step, via=via)
        same = h is self.h and monoid == self.monoid and isinstance(self.algorithm, Step)
        if same and _unchanged(via, self.algorithm.via):  # type: ignore[union-attr]
            return self
        return StateUpdate(self.cost, h, monoid, step, self.memory)

    def parts(self) -> Parts:
        """The five parts of the normal form, typed."""
        return self._parts

    @cached_property
    def _parts(self) -> Parts:
        n = self.normal()
        assert isinstance(n.h, Geometry) and isinstance(n.algorithm, Step) and n.memory is not None
        return Parts(n.cost, n.h, n.monoid, n.algorithm, n.memory)

    def filters(self) -> tuple[StateUpdate, ...]:
        """The filters in order, parallel branches flattened."""
        step = self.parts().step
        return tuple(b for f in step.via for b in (f.branches if isinstance(f, Sum) else (f,)))  # type: ignore[misc]

    # ---- what it asks of its axis ----------------------------------------------------------------------------

    def demands(self) -> tuple[Per, ...]:
        """Every named rate of the tuple, filters and statistics included: what an axis must supply."""
        found: dict[str, Per] = {}
        for rate in self._rates():
            if isinstance(rate, Per) and found.setdefault(rate.name, rate) != rate:
                raise IllegalUpdate(f"two rates named {rate.name!r} disagree: {found[rate.name]} and {rate}")
        return tuple(found.values())

    def _rates(self) -> Iterator[Rate]:
        cost, h, monoid, step, memory = self.parts()
        yield from monoid.rates()
        yield step.rate
        yield from cost.rates()
        yield from h.rates()
        yield from memory.rates()
        for inner in (*self.filters(), *h.stats):
            yield from inner._rates()

    def signals(self) -> frozenset[str]:
        """Vectors by name that the update reads: k, v, g, and what its monoids transport along."""
        cost, h, monoid, _, _ = self.parts()
        inner = (u.signals() for u in (*self.filters(), *h.stats))
        return cost.needs.union(monoid.signals(), *inner)

    # ---- execution -------------------------------------------------------------------------------------------

    def init(self, signal: Signal, weights: Leaves | None = None) -> State:
        """The state before the first datum.

        signal: one datum, for shapes, dtype and device.  weights: theta_0 (the dual state when lazy, W_0 when agile);
        the memory's empty state otherwise.
        """
        memory = self.parts().memory
        return self._init(memory.zeros(signal) if weights is None else weights, signal)

    def _init(self, theta: Leaves, signal: Signal, outer: Leaves = ()) -> State:
        """outer: the weights around a filter, which it may start at."""
        _, h, _, step, memory = self.parts()
        like = tuple(torch.zeros_like(leaf) for leaf in theta) if memory.filterable else ()
        via: list[State | tuple[State, ...]] = []
        for f in step.via:
            if isinstance(f, Sum):
                via.append(tuple(b._init(like, signal, theta) for b in f.branches))
            else:
                assert isinstance(f, StateUpdate)
                via.append(f._init(like, signal, theta))
        stats: list[State] = []
        for s in h.stats:  # a later statistic may see the earlier ones
            seen = s._seen(like, signal, [t.theta for t in stats])
            stats.append(s._init(tuple(torch.zeros_like(x) for x in seen), signal))
        theta = outer if step.start == "W0" else theta
        norm: Leaves = ()
        if step.debias:
            keyed = memory.keyed
            norm = tuple(leaf[..., :1, :] * 0 if keyed else leaf.new_zeros((1,) * leaf.ndim) for leaf in theta)
        anchor = tuple(torch.zeros_like(leaf) for leaf in theta) if isinstance(step.at, Anchor | Held) else ()
        if isinstance(step.at, Held):  # and how often no value could be taken
            anchor += tuple(leaf.new_zeros((*leaf.shape[:-2], 1, 1)) for leaf in theta)
        return State(theta, tuple(via), tuple(stats), norm, anchor, torch.zeros((), dtype=torch.int64))

    def step(
        self, state: State, signal: Signal, drive: Leaves | None = None, weights: Leaves | None = None
    ) -> tuple[State, Output]:
        """One datum: the new state and the output.

        drive: the input of a filter or statistic (cost Linear).  weights: the outer W, for geometries that see it.
        """
        cost, h, monoid, step, memory = self.parts()
        rate = resolve(step.rate, signal)
        previous = state.theta
        element = monoid.element(signal, rate, previous[0])
        kept = memory.act(element, previous)
        anchor = state.anchor
        if isinstance(step.at, Anchor) and int(state.count) % step.at.every == 0:
            anchor = self._primal(previous, state, signal)
        if isinstance(step.at, Held) and step.at.before(int(state.count)):
            anchor = self._refreshed(state, previous, state.norm, signal)
        gated, theta, via, stats = kept, kept, state.via, state.stats
        u: Leaves = ()
        for micro in range(step.steps):
            raw = self._drive(state, gated, anchor, rate, signal, drive, micro)
            u, via = self._filter(raw, via, signal, state, weights)
            stats = self._observe(u, stats, signal)
            theta = u if self._passes(gated, rate, u) else memory.add(gated, rate, rate_shape(step.rate), u)
            if step.start == "first" and int(state.count) == 0:
                theta = u
            gated = theta
        norm = tuple(self._unit(element, n, rate, signal) for n in state.norm)
        if isinstance(step.at, Held):
            if step.at.after(int(state.count)):
                anchor = self._refreshed(state, theta, norm, signal)
            return State(theta, via, stats, norm, anchor, state.count + 1), Output(anchor[: len(theta)])
        context = self._context(stats, signal, u, weights)
        out = self._output(theta, norm, context)
        if isinstance(step.read, Read):
            point = tuple(step.read.gate * p + step.read.rate * x for p, x in zip(previous, u, strict=True))
            read_norm = tuple(step.read.gate * n + step.read.rate * torch.ones_like(n) for n in state.norm)
            out = self._output(point, read_norm, context)
        if isinstance(step.read, Mix):
            w = step.read.weight
            out = Output(tuple(w * x + (1 - w) * y for x, y in zip(out.weights, u, strict=True)))
        stored = theta if step.lazy else self._map(theta, context)
        return State(stored, via, stats, norm, anchor, state.count + 1), out

    def output(self, state: State, signal: Signal) -> Output:
        """The weights that a state stands for, without a step (depth reads before it writes)."""
        step = self.parts().step
        if isinstance(step.at, Held):
            return Output(state.anchor[: len(state.theta)])
        if not step.lazy:
            return Output(state.theta)
        return self._output(state.theta, state.norm, self._context(state.stats, signal))

    def read(self, out: Output, q: Tensor, signal: Signal) -> Tensor:
        """Read q (..., d_k) from an output: (..., d_v), divided by the normaliser when debiased."""
        _, h, _, step, memory = self.parts()
        y = memory.read(out.weights, q, signal, h)
        if not out.norm:
            return y
        mass = memory.read(out.norm, q, signal, h)
        # an empty memory reads zero, not NaN
        return torch.where(mass == 0, torch.zeros_like(y), y / torch.where(mass == 0, torch.ones_like(mass), mass))

    # ---- pieces of a step ------------------------------------------------------------------------------------

    def _context(
        self, stats: tuple[State, ...], signal: Signal, drive: Leaves = (), weights: Leaves | None = None
    ) -> tuple[Context, ...]:
        """What the geometry may see, leaf by leaf; the last one stands for all further leaves."""
        h = self.parts().h
        outs = tuple(s.output(t, signal).weights for s, t in zip(h.stats, stats, strict=True))
        seen = (drive, weights or (), *outs)
        columns: Any = zip_longest(*seen) if any(seen) else [(None,) * len(seen)]
        return tuple(Context(u, tuple(rest), w, signal) for u, w, *rest in columns)

    def _map(self, theta: Leaves, context: tuple[Context, ...]) -> Leaves:
        _, h, _, _, memory = self.parts()
        if h.is_identity or isinstance(memory, List):  # a list's scores are its dual: h acts when it is read
            return theta
        return tuple(h.primal(leaf, context[min(i, len(context) - 1)]) for i, leaf in enumerate(theta))

    def _primal(self, theta: Leaves, state: State, signal: Signal) -> Leaves:
        """W at theta. An agile state stores W itself: h projects or proximates, so it must not act twice."""
        step = self.parts().step
        if not step.lazy and theta is state.theta:
            return theta
        return self._map(theta, self._context(state.stats, signal))

    def _output(self, theta: Leaves, norm: Leaves, context: tuple[Context, ...]) -> Output:
        memory = self.parts().memory
        if not norm:
            return Output(self._map(theta, context))
        if memory.keyed:
            return Output(self._map(theta, context), norm)
        return Output(self._map(_debiased(theta, norm), context))

    def _unit(self, element: Element, norm: Tensor, rate: Tensor | float, signal: Signal) -> Tensor:
        """The normaliser: the same recurrence driven by a unit value."""
        _, _, _, step, memory = self.parts()
        if memory.keyed:
            k = signal["k"]
            assert isinstance(k, Tensor)
            return memory.add((element.act(norm),), rate, rate_shape(step.rate), (k[..., None, :],))[0]
        return memory.add((element.act(norm),), rate, rate_shape(step.rate), (torch.ones_like(norm),))[0]

    def _observe(self, u: Leaves, states: tuple[State, ...], signal: Signal) -> tuple[State, ...]:
        """Step the statistics of h with the drive, each seeing the ones before it."""
        stepped: list[State] = []
        outs: list[Leaves] = []
        stats = self.parts().h.stats
        white = self._whitened(u, states, signal) if any(map(_whitened, stats)) else u
        for s, state in zip(stats, states, strict=True):
            state, out = s.step(state, signal, s._seen(white if _whitened(s) else u, signal, outs))
            stepped.append(state)
            outs.append(out.weights)
        return tuple(stepped)

    def _refreshed(self, state: State, theta: Leaves, norm: Leaves, signal: Signal) -> Leaves:
        """The held value of theta, which may continue from the last one, or that one where there is no new one."""
        h = self.parts().h
        held, missed = state.anchor[: len(theta)], state.anchor[len(theta) :]
        last: tuple[Tensor | None, ...] = held if int(state.count) else (None,) * len(held)
        context = (Context(weights=w, signal=signal) for w in last)
        pairs = tuple(map(h.refreshed, _debiased(theta, norm), held, context))
        return tuple(x for x, _ in pairs) + tuple(m + ~good for (_, good), m in zip(pairs, missed, strict=True))

    def _whitened(self, u: Leaves, states: tuple[State, ...], signal: Signal) -> Leaves:
        """What h makes of the drive with its statistics before the datum; the drive itself where they have no value."""
        context = self._context(states, signal, u)
        begun = (torch.stack([is_begun(x) for x in c.stats]).all(0) for c in context)
        return tuple(torch.where(b, y, x) for b, y, x in zip(begun, self._map(u, context), u, strict=True))

    def _seen(self, u: Leaves, signal: Signal, earlier: Sequence[Leaves]) -> Leaves:
        """What a statistic is driven by: squares or products of the drive, rotated by earlier ones or not."""
        assert isinstance(self.cost, Linear)
        if self.cost.of == "eigen-fisher":
            left, right = earlier[-2:]
            return tuple(fisher(signal, a, b, self.cost.precision) for a, b in zip(left, right, strict=True))
        if self.cost.of == "eigen-square":
            bases = zip(u, *earlier[-2:], strict=True)
            u = tuple(rotate(x, left, right, self.cost.precision) for x, left, right in bases)
        return tuple(self.cost.drive(leaf, signal) for leaf in u)

    def _passes(self, gated: Leaves, rate: Tensor | float, u: Leaves) -> bool:
        """Whether theta is the drive itself: nothing is kept, the rate is 1, and u has the shape of theta."""
        _, _, monoid, step, memory = self.parts()
        if not isinstance(monoid, Zero) or not isinstance(memory, Parameter) or step.steps > 1 or step.read is not None:
            return False
        if isinstance(rate, Tensor) or rate != 1.0:
            return False
        return all(x.ndim == 0 or x.shape == y.shape for x, y in zip(gated, u, strict=True))

    def _drive(
        self,
        state: State,
        gated: Leaves,
        anchor: Leaves,
        rate: Tensor | float,
        signal: Signal,
        drive: Leaves | None,
        micro: int,
    ) -> Leaves:
        """u = -grad l(W_eval), before the filters. gated: A theta (or the last micro-step's theta)."""
        cost, h, _, step, memory = self.parts()
        if isinstance(cost, Linear):
            if drive is None:
                raise IllegalUpdate("a Linear cost is driven from outside: this update is a filter or a statistic")
            return drive
        if "g" in cost.needs:
            g = signal["g"]
            given = g if isinstance(g, tuple) else (g,)
            return self._descend(tuple(-x for x in given), self._evaluated(state, gated, anchor, signal, micro), signal)  # type: ignore[misc]
        x, target = self._pair(signal)
        encode = cost.encode
        if step.at == "new":
            u = self._implicit(gated, rate, x, target, state, signal)
            return self._descend(u, self._primal(gated, state, signal), signal)
        if not self._predicts:
            r = cost.residual(target, target, 0.0, signal)
            u = memory.vjp(gated, x, -r, signal, encode=encode)
            if not self.drive_sees_state:
                return u
            return self._descend(u, self._evaluated(state, gated, anchor, signal, micro), signal)
        weights = self._evaluated(state, gated, anchor, signal, micro)
        if isinstance(memory, List):
            prediction = memory.read(weights, x, signal, h)
        else:
            prediction = memory.predict(weights, x, signal, encode=encode)
        r = cost.residual(prediction, _align(target, prediction), 0.0, signal)
        return self._descend(memory.vjp(weights, x, -r, signal, encode=encode), weights, signal)

    def _evaluated(self, state: State, gated: Leaves, anchor: Leaves, signal: Signal, micro: int) -> Leaves:
        """W_eval: where the gradient is taken."""
        step = self.parts().step
        if isinstance(step.at, Anchor):
            return anchor
        return self._primal(gated if step.at == "gated" or micro else state.theta, state, signal)

    @cached_property
    def _predicts(self) -> bool:
        """Whether the cost's gradient depends on W: through its curvature or through a nonlinear memory."""
        cost, _, _, _, memory = self.parts()
        return memory.keyed and (cost.curvature != "none" or not memory.linear)

    @property
    def drive_sees_state(self) -> bool:
        """Whether the drive depends on the state at all (the cost's gradient, or a ridge)."""
        return self._predicts or isinstance(self.cost.ridge, Per) or self.cost.ridge != 0.0

    def _pair(self, signal: Signal) -> tuple[Tensor, Tensor]:
        k, v = signal["k"], signal["v"]
        assert isinstance(k, Tensor) and isinstance(v, Tensor)
        return (v, k) if self.cost.encode else (k, v)

    def _descend(self, u: Leaves, weights: Leaves, signal: Signal) -> Leaves:
        """Add the ridge of a coupled decay, l + (weight/2) |W|^2, at the evaluation point."""
        ridge = self.cost.ridge
        if not isinstance(ridge, Per) and ridge == 0.0:
            return u
        weight = resolve(ridge, signal)
        return tuple(x - spread(weight, rate_shape(ridge)) * w for x, w in zip(u, weights, strict=True))

    def _implicit(
        self, gated: Leaves, rate: Tensor | float, x: Tensor, target: Tensor, state: State, signal: Signal
    ) -> Leaves:
        """The drive of the proximal step: r = grad l(predict(grad h*(A theta - rate r k^T))), d_v unknowns."""
        cost, h, _, step, memory = self.parts()
        shape = rate_shape(step.rate)
        if h.is_identity:
            prediction = memory.predict(gated, x, signal)
            c = rate
            if isinstance(rate, Tensor) and rate.ndim:  # against predictions (..., d_v), or (..., d_v, d_k) by entry
                c = rate[..., None] if shape == "scalar" else rate
                c = c if prediction.ndim == target.ndim else c[..., None]
            r = cost.residual(prediction, _align(target, prediction), c * memory.sharpness(x), signal)
            return memory.vjp(gated, x, -r, signal)
        stats = self._context(state.stats, signal)

        def stationarity(r: Tensor) -> Tensor:
            moved = memory.add(gated, rate, shape, memory.vjp(gated, x, -r, signal))
            prediction = memory.predict(self._map(moved, stats), x, signal)
            return r - cost.residual(prediction, target, 0.0, signal)

        r = root(stationarity, torch.zeros_like(target))
        return memory.vjp(gated, x, -r, signal)

    def _filter(
        self,
        u: Leaves,
        states: tuple[State | tuple[State, ...], ...],
        signal: Signal,
        outer: State,
        weights: Leaves | None,
    ) -> tuple[Leaves, tuple[State | tuple[State, ...], ...]]:
        """Send the drive through algorithm.via; its geometries may see the outermost W."""
        step = self.parts().step
        if step.via and weights is None:
            weights = self._primal(outer.theta, outer, signal)
        kept: list[State | tuple[State, ...]] = []
        for f, s in zip(step.via, states, strict=True):
            if isinstance(f, Sum):
                assert not isinstance(s, State)
                pairs = [b.step(t, signal, u, weights) for b, t in zip(f.branches, s, strict=True)]
                kept.append(tuple(t for t, _ in pairs))
                mixed = [tuple(w * x for x in out.weights) for w, (_, out) in zip(f.weights, pairs, strict=True)]
                u = tuple(sum(xs[1:], xs[0]) for xs in zip(*mixed, strict=True))
            else:
                assert isinstance(f, StateUpdate) and isinstance(s, State)
                s, out = f.step(s, signal, u, weights)
                kept.append(s)
                u = out.weights
        return u, tuple(kept)


def _debiased(theta: Leaves, norm: Leaves) -> Leaves:
    """theta / norm where there is a normaliser; before the first datum both are zero, and so is this."""
    safe = (torch.where(n == 0, torch.ones_like(n), n) for n in norm)
    return tuple(x / n for x, n in zip(theta, safe, strict=True)) if norm else theta


def _align(target: Tensor, prediction: Tensor) -> Tensor:
    """Targets (..., d_v) against entry-wise predictions (..., d_v, d_k)."""
    return target if target.ndim == prediction.ndim else target[..., None]


def _unchanged(lowered: tuple[object, ...], written: tuple[object, ...]) -> bool:
    """Whether nothing was lowered. By identity, since equality already looks through sugar."""
    return len(lowered) == len(written) and all(a is b for a, b in zip(lowered, written, strict=True))


def _whitened(statistic: StateUpdate) -> bool:
    return isinstance(statistic.cost, Linear) and statistic.cost.whitened


def _lower(f: StateUpdate | Sum | Momentum) -> StateUpdate | Sum:
    """A filter without sugar."""
    if isinstance(f, Sum):
        branches = tuple(b.normal() for b in f.branches)
        return f if _unchanged(branches, f.branches) else Sum(branches, f.weights)
    if isinstance(f, StateUpdate):
        return f.normal()
    if f.rate != 1.0 or f.at != "prev":
        raise IllegalUpdate("Momentum: rate and at belong to the step; a filter in `via` has no use for them")
    weight = 1.0 - f.beta if f.kind == "ema" else 1.0
    # g-weight now plus beta times the new buffer: (beta^2, weight' + beta * weight)
    read = Read(f.beta * f.beta, (1.0 - f.beta if f.kind == "ema" else 1.0) + f.beta * weight) if f.nesterov else None
    step = Step(rate=weight, read=read, debias=f.debias, start=f.start)
    return StateUpdate(Linear(), Euclidean(), _lower_monoid(Scalar(f.beta)), step)


def _lower_stats(h: Geometry) -> Geometry:
    stats = tuple(s.normal() for s in h.stats)
    return h if _unchanged(stats, h.stats) else h.with_stats(stats)


def _lower_monoid(monoid: Monoid) -> Monoid:
    """Flatten products, drop identities, name the constants 0 and 1."""
    if isinstance(monoid, Scalar) and not isinstance(monoid.gate, Per):
        return Identity() if monoid.gate == 1.0 else Zero() if monoid.gate == 0.0 else monoid
    if not isinstance(monoid, Product):
        return monoid
    flat: list[Monoid] = []
    for part in monoid.parts:
        lowered = _lower_monoid(part)
        flat.extend(lowered.parts if isinstance(lowered, Product) else (lowered,))
    flat = [p for p in flat if not isinstance(p, Identity)]
    return Identity() if not flat else flat[0] if len(flat) == 1 else Product(tuple(flat))
