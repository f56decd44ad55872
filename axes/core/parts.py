"""The five parts of an update in normal form, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from axes.core.algorithms import Step, Sum
from axes.core.costs import Cost, Linear
from axes.core.geometry import Geometry
from axes.core.memory import Memory
from axes.core.monoids import Monoid
from axes.core.rates import Per, Rate


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
        yield self.step.rate
        yield from self.cost.rates()
        yield from self.h.rates()
        yield from self.memory.rates()
        for inner in (*self.filters(), *self.statistics()):
            yield from inner.rates()

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
        return isinstance(self.cost.ridge, Per) or self.cost.ridge != 0.0

    @property
    def predicts(self) -> bool:
        """Whether the cost's gradient depends on W: through its curvature or through a nonlinear memory."""
        return self.memory.keyed and (self.cost.curvature != "none" or not self.memory.linear)

    @property
    def drive_sees_state(self) -> bool:
        """Whether the drive depends on the state at all: through the cost's gradient or a ridge."""
        return self.predicts or self.ridged
