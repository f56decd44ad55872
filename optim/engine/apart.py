"""Geometries of a tuple that are no programs: found by following them, and set apart in what is traced."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from axes.core.algorithms import Sum
from axes.core.declared import leaves, resolved
from axes.core.geometry import Context, Geometry
from axes.core.geometry.bregman import NO_CONTEXT
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.together import traced
from axes.programs.numbers import Number
from axes.programs.program import ForgottenNumber, Program, apart, called


def links(update: StateUpdate) -> list[Geometry]:
    """The geometries of the parameter and of its filters: what functions in a program are numbered by."""
    return [update.parts().h, *(f.parts().h for f in update.filters())]


def functions(program: Program) -> frozenset[int]:
    """The numbers of the geometries that a program sets apart."""
    return frozenset(which for op in program.operations if (which := called(op.name)) is not None)


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
        found = traced(_with_twins(plain, None), maximize, like, stack=True)
        if isinstance(found, str) or origin is None:
            return found
        return traced(_with_twins(update, functions(found)), maximize, like, stack=True)
    except ForgottenNumber:
        raise
    except (AxesError, NotImplementedError) as error:  # what reads its data, or is not for this shape
        return f"is no program: {error}"


def _with_twins(update: StateUpdate, which: frozenset[int] | None) -> StateUpdate:
    """A tuple with these of its links set apart; None for whichever are no programs."""
    numbers: Iterator[int] = iter(range(1, 1 + len(update.filters())))

    def twin(part: StateUpdate, number: int) -> StateUpdate:
        h = part.parts().h
        plain = h.is_identity or (h.entrywise and not h.matrix) or not (which is None or number in which)
        return part if plain else dataclasses.replace(part, h=_twin(h, number, which is None))

    step = update.parts().step
    via = tuple(
        Sum(tuple(twin(b, next(numbers)) for b in f.branches), f.weights)  # type: ignore[arg-type]
        if isinstance(f, Sum)
        else twin(f, next(numbers))  # type: ignore[arg-type]
        for f in step.via
    )
    return twin(dataclasses.replace(update, algorithm=dataclasses.replace(step, via=via)), 0)


def _twin(h: Geometry, number: int, followed: bool) -> Geometry:
    """A geometry of the same class but for what a trace sees of it. followed: if it can be."""

    def primal(self: Geometry, theta: Tensor, given: Context = NO_CONTEXT) -> Tensor:
        others: list[Any] = [*given.stats]
        others += [x for name, x in (("drive", given.drive), ("weights", given.weights)) if name in h.reads]
        if h.rates():  # numbers of the datum are a program's
            return h.primal(theta, given)
        return apart(number, (lambda: h.primal(theta, given)) if followed else None, theta, *others)

    twin = copy.copy(h)
    object.__setattr__(twin, "__class__", type(type(h).__name__, (type(h),), {"primal": primal}))
    return twin


__all__ = ["context", "functions", "links", "program_around"]
