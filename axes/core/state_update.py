"""`StateUpdate`: one algorithm on every axis, as a value that is executed.

    W_t = argmin_{W in C}  l_t(W; k_t, v_t) + (1/eta_t) D_h(W, A_t W_{t-1})

The recursion that this stands for is in `axes.core.execution`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import final

from torch import Tensor

from axes.core import execution
from axes.core.algorithms import Momentum, Read, Step, Sum
from axes.core.costs import Cost, Linear
from axes.core.declared import Declared, Recurrence
from axes.core.execution import Output, State
from axes.core.geometry import Euclidean, Geometry
from axes.core.legality import check
from axes.core.memory import Leaves, Matrix, Memory, Parameter
from axes.core.monoids import Identity, Monoid, Product, Scalar, Zero
from axes.core.parts import Parts
from axes.core.rates import SEEN, Per, Signal, named
from axes.errors import IllegalUpdate

__all__ = ["OnUpdate", "Output", "Parts", "State", "StateUpdate"]


@final
@dataclass(frozen=True, repr=False)
class OnUpdate(Declared):
    """Sugar: h acts on the last filter (on a memoryless one if there is none), the state itself is Euclidean."""

    h: Geometry


@final
@dataclass(frozen=True, repr=False, eq=False)
class StateUpdate(Recurrence):
    """The tuple (cost, h, monoid, algorithm) over a memory; `axes.core.execution` is the recursion it stands for.

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
        if self.normal() is self:  # another normal form has been judged when it was made
            check(self.parts())
            self.demands()

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
        return tuple(_nested(b) for f in self.parts().step.via for b in (f.branches if isinstance(f, Sum) else (f,)))

    def statistics(self) -> tuple[StateUpdate, ...]:
        """The statistics of h, in the order in which h is given their values."""
        return tuple(_nested(s) for s in self.parts().h.stats)

    # ---- what it asks of its axis ----------------------------------------------------------------------------

    def demands(self) -> tuple[Per, ...]:
        """Every named rate of the tuple, filters and statistics included: what an axis must supply."""
        found: dict[str, Per] = {}
        for rate in (per for any_rate in self.parts().rates() for per in named(any_rate)):
            if found.setdefault(rate.name, rate) != rate:
                raise IllegalUpdate(f"two rates named {rate.name!r} disagree: {found[rate.name]} and {rate}")
        return tuple(found.values())

    def signals(self) -> frozenset[str]:
        """Vectors by name that the update reads: k, v, g, and what its monoids transport along."""
        return self.parts().signals()

    @property
    def drive_sees_state(self) -> bool:
        """Whether the drive depends on the state at all: through the cost's gradient or a ridge."""
        return self.parts().drive_sees_state

    # ---- execution -------------------------------------------------------------------------------------------

    def init(self, signal: Signal, weights: Leaves | None = None) -> State:
        """The state before the first datum.

        signal: one datum, for shapes, dtype and device.  weights: theta_0 (the dual state when lazy, W_0 when agile);
        the memory's empty state otherwise.
        """
        p = self.parts()
        signal = execution.one_write(p, signal, 0)
        return execution.init(p, p.memory.zeros(signal) if weights is None else weights, signal)

    def step(
        self, state: State, signal: Signal, drive: Leaves | None = None, weights: Leaves | None = None
    ) -> tuple[State, Output]:
        """One datum: the new state and the output.

        drive: the input of a filter or statistic (cost Linear).  weights: the outer W, for geometries that see it.
        """
        return execution.step(self.parts(), state, self.numbered(state, signal), drive, weights)

    def output(self, state: State, signal: Signal) -> Output:
        """The weights that a state stands for, without a step (depth reads before it writes)."""
        return execution.output(self.parts(), state, self.numbered(state, signal))

    def numbered(self, state: State, signal: Signal) -> Signal:
        """The signal of the datum after a state, with the number that rates may depend on. What is inside of an update
        counts its data by the update's own count."""
        return {**signal, SEEN: state.count} if self.counts and SEEN not in signal else signal

    @cached_property
    def counts(self) -> bool:
        """Whether a rate depends on the number of the datum."""
        return self.parts().counts

    @cached_property
    def telling(self) -> Geometry | None:
        """The h that tells the axis what a rate of the next datum is made of, or None."""
        return next((f.h for f in self.parts().filters() if f.h.tells is not None), None)

    def told(self, state: State, signal: Signal) -> Tensor:
        """What that h has to say of a state; IllegalUpdate where there is none."""
        return execution.told(self.parts(), state, self.numbered(state, signal))

    def read(self, out: Output, q: Tensor, signal: Signal) -> Tensor:
        """Read q (..., d_k) from an output: (..., d_v), divided by the normaliser when debiased."""
        return execution.read(self.parts(), out, q, signal)


def _unchanged(lowered: tuple[object, ...], written: tuple[object, ...]) -> bool:
    """Whether nothing was lowered. By identity, since equality already looks through sugar."""
    return len(lowered) == len(written) and all(a is b for a, b in zip(lowered, written, strict=True))


def _nested(part: object) -> StateUpdate:
    """A filter or a statistic as what it is."""
    if not isinstance(part, StateUpdate):
        raise IllegalUpdate(f"filters and statistics are StateUpdates (filters also Momentum or Sum), got {part!r}")
    return part


def _lower(f: Recurrence | Sum | Momentum) -> StateUpdate | Sum:
    """A filter without sugar."""
    if isinstance(f, Sum):
        branches = tuple(_nested(b).normal() for b in f.branches)
        return f if _unchanged(branches, f.branches) else Sum(branches, f.weights)
    if not isinstance(f, Momentum):
        return _nested(f).normal()
    if f.rate != 1.0 or f.at != "prev":
        raise IllegalUpdate("Momentum: rate and at belong to the step; a filter in `via` has no use for them")
    weight = 1.0 - f.beta if f.kind == "ema" else 1.0
    # g-weight now plus beta times the new buffer: (beta^2, weight' + beta * weight)
    read = Read(f.beta * f.beta, (1.0 - f.beta if f.kind == "ema" else 1.0) + f.beta * weight) if f.nesterov else None
    step = Step(rate=weight, read=read, debias=f.debias, start=f.start)
    return StateUpdate(Linear(), Euclidean(), _lower_monoid(Scalar(f.beta)), step)


def _lower_stats(h: Geometry) -> Geometry:
    stats = tuple(_nested(s).normal() for s in h.stats)
    return h if _unchanged(stats, h.stats) else h.with_stats(stats)


def _lower_monoid(monoid: Monoid) -> Monoid:
    """Flatten products, drop identities, name the constants 0 and 1."""
    if isinstance(monoid, Scalar):
        return Identity() if monoid.gate == 1.0 else Zero() if monoid.gate == 0.0 else monoid
    if not isinstance(monoid, Product):
        return monoid
    flat: list[Monoid] = []
    for part in monoid.parts:
        lowered = _lower_monoid(part)
        flat.extend(lowered.parts if isinstance(lowered, Product) else (lowered,))
    flat = [p for p in flat if not isinstance(p, Identity)]
    return Identity() if not flat else flat[0] if len(flat) == 1 else Product(tuple(flat))
