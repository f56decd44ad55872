"""What of a tuple is no program: geometries, found by following them, and statistics that keep no entries of a leaf.

Both are set apart in what is traced. A statistic that is a square matrix of rows or columns, as Shampoo and SOAP make
roots and bases of, is an operation that takes the drive; its value is for functions of whole tensors alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from axes.core.algorithms import Step, Sum
from axes.core.costs import Linear
from axes.core.declared import leaves, resolved
from axes.core.geometry import Context, Euclidean, Geometry
from axes.core.geometry.bregman import NO_CONTEXT
from axes.core.monoids import Zero
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.together import traced
from axes.programs.numbers import Number
from axes.programs.program import ForgottenNumber, Program, called, function_of, observed, observes
from axes.programs.program import apart as set_apart

_SQUARE = ("rows", "columns")


class Link(NamedTuple):
    """The parameter, or one of its filters. prefix: of its state's names."""

    prefix: str
    update: StateUpdate

    @property
    def h(self) -> Geometry:
        return self.update.parts().h


def links(update: StateUpdate) -> list[Link]:
    """What functions in a program are numbered by: the parameter, and its filters in their order."""
    found = [Link("", update)]
    for i, f in enumerate(update.parts().step.via):
        if isinstance(f, Sum):
            found += [Link(f"via.{i}.{j}.", branch) for j, branch in enumerate(f.branches)]  # type: ignore[arg-type]
        else:
            found.append(Link(f"via.{i}.", f))  # type: ignore[arg-type]
    return found


def statistics(update: StateUpdate) -> dict[str, Link]:
    """All statistics, by how programs number those that are set apart, with the prefixes of their states' names."""
    every = [Link(f"{link.prefix}stats.{i}.", s) for link in links(update) for i, s in enumerate(link.h.stats)]
    return {str(number): link for number, link in enumerate(every)}


def squares(update: StateUpdate) -> dict[str, Link]:
    """The statistics among them that are sums over rows or columns: they have no entry for every entry of a leaf."""
    return {n: link for n, link in statistics(update).items() if getattr(link.update.cost, "side", "") in _SQUARE}


def functions(program: Program) -> frozenset[int]:
    """The numbers of the links whose geometries a program sets apart."""
    names = ((op.name, called(op.name)) for op in program.operations)
    own = (which for name, which in names if which is not None and not observes(name) and function_of(which) is None)
    return frozenset(map(int, own))


def context(h: Geometry, others: Sequence[Tensor]) -> Context:
    """What a geometry reads besides theta, in the order in which programs name it."""
    stats, rest = tuple(others[: len(h.stats)]), iter(others[len(h.stats) :])
    drive = next(rest) if "drive" in h.reads else None
    return Context(drive, stats, next(rest) if "weights" in h.reads else None)


def program_around(update: StateUpdate, maximize: bool, like: Tensor) -> Program | str:
    """The program of a step over stacks of matrices like this one, or why there is none.

    Numbers are not asked what they are by geometries that turn out to be none.
    """
    origin = next((x.origin for x in leaves(update) if isinstance(x, Number)), None)
    plain = update if origin is None else resolved(update, origin.values)
    try:
        found = traced(_Twins(plain, None).update, maximize, like, stack=True)
        if isinstance(found, str) or origin is None:
            return found
        return traced(_Twins(update, functions(found)).update, maximize, like, stack=True)
    except ForgottenNumber:
        raise
    except (AxesError, NotImplementedError) as error:  # what reads its data, or is not for this shape
        return f"is no program: {error}"


class _Twins:
    """A tuple with some of its links and statistics set apart; which: of the links, None for whichever are none."""

    def __init__(self, update: StateUpdate, which: frozenset[int] | None) -> None:
        self.kept, self.which = squares(update), which
        self.numbers, self.of_statistics = iter(range(1, len(links(update)))), iter(statistics(update))
        h = self._h(update, 0)  # statistics are numbered in the order of links
        step = update.parts().step
        via = tuple(
            Sum(tuple(map(self._link, f.branches)), f.weights)  # type: ignore[arg-type]
            if isinstance(f, Sum)
            else self._link(f)  # type: ignore[arg-type]
            for f in step.via
        )
        self.update = dataclasses.replace(update, h=h, algorithm=dataclasses.replace(step, via=via))

    def _link(self, part: StateUpdate) -> StateUpdate:
        return dataclasses.replace(part, h=self._h(part, next(self.numbers)))

    def _h(self, part: StateUpdate, number: int) -> Geometry:
        h = part.parts().h
        numbers = [next(self.of_statistics) for _ in h.stats]
        plain = h.is_identity or (h.entrywise and not h.matrix) or not (self.which is None or number in self.which)
        stats = tuple(_observed(s, n) if n in self.kept else s for s, n in zip(h.stats, numbers, strict=True))
        h = h if stats == tuple(h.stats) else h.with_stats(stats)
        return h if plain else _twin(h, number, self.which is None)


def _twin(h: Geometry, number: int, followed: bool) -> Geometry:
    """A geometry of the same class but for what a trace sees of it. followed: if it can be."""

    def primal(self: Geometry, theta: Tensor, given: Context = NO_CONTEXT) -> Tensor:
        others: list[Any] = [*given.stats]
        others += [x for name, x in (("drive", given.drive), ("weights", given.weights)) if name in h.reads]
        if h.rates():  # numbers of the datum are a program's
            return h.primal(theta, given)
        return set_apart(number, (lambda: h.primal(theta, given)) if followed else None, theta, *others)

    twin = copy.copy(h)
    object.__setattr__(twin, "__class__", type(type(h).__name__, (type(h),), {"primal": primal}))
    return twin


def _observed(statistic: StateUpdate, number: str) -> StateUpdate:
    """A statistic that keeps nothing, and whose value is `observed`."""
    cost = statistic.parts().cost
    assert isinstance(cost, Linear)

    def drive(self: Linear, u: Tensor, signal: Mapping[str, Any] | None = None) -> Tensor:
        return observed(int(number), u)

    twin, h = copy.copy(cost), Euclidean()
    object.__setattr__(twin, "__class__", type("Linear", (Linear,), {"drive": drive}))
    object.__setattr__(h, "__class__", type("Euclidean", (Euclidean,), {"makes": statistic.parts().h.makes}))
    return StateUpdate(twin, h, Zero(), Step(1.0))


__all__ = ["Link", "context", "functions", "links", "program_around", "squares"]
