"""The five parts of an update in normal form, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from axes.core.algorithms import Read, Step, Sum
from axes.core.costs import Cost, Linear
from axes.core.geometry import Geometry
from axes.core.memory import Memory
from axes.core.monoids import Monoid
from axes.core.rates import Count, Formula, Per, Rate, Variable, counted


class Parts(NamedTuple):
    """No sugar, every part typed. What stands in `step.via` and `h.stats` has parts of its own."""

    cost: Cost
    h: Geometry
    monoid: Monoid
    step: Step
    memory: Memory

    def filters(self) -> tuple[Parts, ...]:
        """The parts of the filters in order, parallel branches flattened."""
        return tuple(b.parts() for f in self.step.via for b in (f.branches if isinstance(f, Sum) else (f,)))  # type: ignore[union-attr]

    def statistics(self) -> tuple[Parts, ...]:
        return tuple(s.parts() for s in self.h.stats)

    def rates(self) -> Iterator[Rate]:
        """All numbers and names of the tuple, filters and statistics included."""
        yield from self.monoid.rates()
        yield from self.step.rates()
        yield from self.cost.rates()
        yield from self.h.rates()
        yield from self.memory.rates()
        for inner in (*self.filters(), *self.statistics()):
            yield from inner.rates()

    @property
    def counts(self) -> bool:
        """Whether a rate depends on the number of the datum."""
        return any(map(counted, self.rates()))

    @property
    def computes_rates(self) -> bool:
        """Whether a rate is a formula, or one of a filter's read point or of filters side by side is no constant."""
        own = any(isinstance(r, Formula | Count) for r in self.rates())
        look = self.step.read
        read = (look.gate, look.rate) if isinstance(look, Read) else ()  # of the update itself: a query's business
        weights = (r for p in self.every() for r in p.step.rates()[1:] if p is not self or r not in read)
        return own or any(isinstance(r, Variable) for r in weights)

    def every(self) -> Iterator[Parts]:
        """These, and those of filters and statistics at every depth."""
        yield self
        for inner in (*self.filters(), *self.statistics()):
            yield from inner.every()

    def linear_gates(self) -> frozenset[str]:
        """Names of gates that are supplied as they are, not as logs: a number each, which no datum may change."""
        found: set[str] = set()
        for p in self.every():
            found |= {gate.name for gate in p.monoid.gates() if isinstance(gate, Per) and gate.domain != "unit"}
        return frozenset(found)

    def signals(self) -> frozenset[str]:
        """Vectors by name that are read: k, v, g, and what monoids transport along."""
        inner = (p.signals() for p in (*self.filters(), *self.statistics()))
        return self.cost.needs.union(self.monoid.signals(), *inner)

    @property
    def oracle(self) -> bool:
        """Whether the gradient is given, as the signal's "g"."""
        return "g" in self.cost.needs

    @property
    def driven(self) -> bool:
        """Whether it is a filter or a statistic, which something else drives."""
        return isinstance(self.cost, Linear)

    @property
    def ridged(self) -> bool:
        return self.cost.ridge != 0.0

    @property
    def predicts(self) -> bool:
        """Whether the cost's gradient depends on W: through its curvature or through a nonlinear memory."""
        return self.memory.keyed and (self.cost.curvature != "none" or not self.memory.linear)

    @property
    def drive_sees_state(self) -> bool:
        """Whether the drive depends on the state at all: through the cost's gradient or a ridge."""
        return self.predicts or self.ridged
