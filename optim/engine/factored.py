"""Rules that precondition matrices from both sides (Shampoo, SOAP), over all matrices of a group.

Matrices of one shape are a stack. What acts entry by entry is a program before, between and after the products; a
statistic takes its product where it is kept, in one pass. Roots and bases are the interpreter's own, those of small
statistics of one size together. States are the interpreter's, name by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from axes.core import execution
from axes.core.algorithms import Held
from axes.core.costs import Given, Linear
from axes.core.facts import fact
from axes.core.geometry import Eigenbasis, Euclidean, InverseRoot, Kronecker, RotatedWhiten
from axes.core.monoids import Identity, Scalar, Zero
from axes.core.state_update import State, StateUpdate
from axes.linalg.blockwise import symmetric_sum
from axes.linalg.matrix_roots import add_product, product
from axes.optim.engine import trees
from axes.optim.engine.capabilities import parts_of, vectors
from axes.optim.engine.forms import Today
from axes.optim.engine.generated import GRADIENT
from axes.optim.engine.kept import Kept
from axes.optim.engine.layouts import PLAIN, Layout
from axes.optim.engine.lists import ListProgram, readable, writable
from axes.optim.engine.together import program, together, uncompiled
from axes.programs.numbers import as_float
from axes.programs.program import PARAMETER, NotElementwise, Program, trace

_TOGETHER = 1024  # statistics up to this size do not fill a GPU: those of all shapes are refreshed as one batch
_FILTER = "via.0."
_AVERAGE, _SECOND = "average", "second"  # the names of entries in the programs,
_RESPONSE, _RESPONSE_2 = "response", "second_response"  # and of numbers


class Average(NamedTuple):
    """What a filter or statistic with numbers of the step does: x <- keep x + rate u."""

    keep: float
    rate: float
    debias: bool


class Side(NamedTuple):
    """A statistic of rows or columns, and what it does before its value is taken."""

    statistic: StateUpdate
    cost: Linear
    at: Held
    kept: Average


class Factors(NamedTuple):
    """A rule in parts: its filter, the statistics of rows and columns and in their bases, programs around products."""

    filter: Average
    sides: tuple[Side, Side]
    second: Average | None
    head: Program
    between: Program | None
    tail: Program
    h: Kronecker | RotatedWhiten


def factors(update: StateUpdate, maximize: bool = False) -> Factors | None:
    """The parts of a rule whose one filter is preconditioned from both sides by held values, or None."""
    found = _factors(update, maximize)
    return found if isinstance(found, Factors) else None


def no_factors(update: StateUpdate, maximize: bool = False) -> str | None:
    """Why a rule has no such parts, or None if it has."""
    found = _factors(update, maximize)
    return found if isinstance(found, str) else None


@fact
def _no_filters_alone(update: StateUpdate) -> str | None:
    """Why a step is more than what filters make of the gradient, added to a parameter that decays; or None."""
    cost, h, _, step, memory = update.parts()
    if not isinstance(cost, Given) or memory.kind != "parameter" or update.drive_sees_state:
        return "its drive is more than the gradient"
    if not h.is_identity or h.stats:
        return "the parameter has a geometry of its own"
    if step.at != "prev" or step.read is not None or step.start != "zero" or step.debias:
        return "the parameter is read, or its gradient taken, where it is not"
    if any(part.parts().step.steps != 1 for part in parts_of(update)):
        return "it takes several steps on one datum"
    if vectors(update) or any(per.shape != "scalar" for per in update.demands()):
        return "it reads rates or gates that are no single number"
    return None


@fact
@uncompiled()
def _factors(update: StateUpdate, maximize: bool) -> Factors | str:
    step = update.parts().step
    reason = _no_filters_alone(update)
    if reason is not None:
        return reason
    last = step.via[0] if len(step.via) == 1 else None
    if not isinstance(last, StateUpdate) or not isinstance(last.parts().h, Kronecker | RotatedWhiten):
        return "it has not one filter, preconditioned from both sides"
    whitening, kept = last.parts().h, _average(last)
    if not {"rows", "columns"} <= set(whitening.sides):
        return "it is preconditioned from one side"
    if kept is None or last.cost != Linear() or (kept.keep == 0 and (kept.rate != 1 or kept.debias)):
        return "what is preconditioned is neither the gradient nor an average of it"
    left, right, *squares = whitening.stats
    rows, columns = _side(left, "left"), _side(right, "right")
    if rows is None or columns is None:
        return "its factors are not held roots or bases of sums over rows and columns"
    second = None
    if squares:
        second = _average(squares[0])
        plain = second is not None and second.keep != 0 and squares[0].parts().h.is_identity
        if not plain or squares[0].cost.of != "eigen-square":
            return "the second moment in its bases is no average of the gradient's squares"
    tail = program(dataclasses.replace(update, algorithm=dataclasses.replace(step, via=())).normal(), True)
    head = _head(kept, maximize)
    between = None if second is None else _between(whitening, kept, second)
    if head is None or tail is None or (second is not None and between is None):
        return "what is around its products is no program"
    assert isinstance(whitening, Kronecker | RotatedWhiten)
    return Factors(kept, (rows, columns), second, head, between, tail, whitening)


def _average(part: StateUpdate) -> Average | None:
    """The numbers of a filter or statistic, or None if it is more than an average or a sum."""
    cost, _, monoid, step, memory = part.parts()
    plain = isinstance(cost, Linear) and memory.kind == "parameter" and isinstance(monoid, Identity | Scalar | Zero)
    plain = plain and step.at == "prev" and not step.via and step.read is None and step.lazy
    plain = plain and step.start in ("zero", "second")  # a first datum that is special is not stepped here
    keep = monoid.gate if isinstance(monoid, Scalar) else 1.0 if isinstance(monoid, Identity) else 0.0
    if not plain or not isinstance(keep, float) or not isinstance(step.rate, int | float):
        return None
    return Average(keep, as_float(step.rate), step.debias)


def _side(part: StateUpdate, of: str) -> Side | None:
    """A statistic of rows or columns whose root or basis is held, or None if it is something else."""
    cost, h, _, step, _ = part.parts()
    if not isinstance(step.at, Held) or not isinstance(h, InverseRoot | Eigenbasis):
        return None
    kept = _average(dataclasses.replace(part, h=Euclidean(), algorithm=dataclasses.replace(step, at="prev")))
    if not isinstance(cost, Linear) or cost.of != of or kept is None or kept.keep == 0:
        return None
    return Side(part, cost, step.at, kept)


def _program(
    run: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], shaped: tuple[str, ...], numbers: tuple[str, ...]
) -> Program | None:
    """The program of `run`, or None if it mixes entries."""
    with torch.no_grad():
        try:
            return trace(run, (PARAMETER, GRADIENT, *shaped), numbers)
        except NotElementwise:
            return None


def _head(kept: Average, maximize: bool) -> Program | None:
    """The drive, under the parameter's name, and its average."""

    def run(values: dict[str, Tensor]) -> Mapping[str, Tensor]:
        drive = values[GRADIENT] if maximize else -values[GRADIENT]
        if kept.keep == 0:
            return {PARAMETER: drive}
        return {PARAMETER: drive, _AVERAGE: _moved(kept, values[_AVERAGE], drive)}

    return _program(run, (_AVERAGE,) if kept.keep else (), ())


def _between(h: Any, kept: Average, second: Average) -> Program | None:
    """The second moment of the rotated drive, and the rotated average, under the parameter's name, whitened by it."""
    numbers = (*((_RESPONSE,) if kept.debias else ()), *((_RESPONSE_2,) if second.debias else ()))

    def run(values: dict[str, Tensor]) -> Mapping[str, Tensor]:
        average, drive = values[PARAMETER], values[GRADIENT]
        squares = seen = _moved(second, values[_SECOND], drive * drive)
        if kept.debias:
            average = average / values[_RESPONSE]
        if second.debias:
            seen = squares / values[_RESPONSE_2]
        return {PARAMETER: h.whitened(average, seen), _SECOND: squares}

    return _program(run, (_SECOND,), numbers)


def _moved(kept: Average, value: Tensor, drive: Tensor) -> Tensor:
    return kept.keep * value + kept.rate * drive


# ---- one step --------------------------------------------------------------------------------------------------------


@final
class Factored(Kept):
    """Parameters of one dtype and device that step together under a rule that `factors` takes apart."""

    how = "host"

    def __init__(
        self,
        update: StateUpdate,
        maximize: bool,
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        layouts: Sequence[Layout] = (),
    ) -> None:
        """states: flat, with tensors of their own; they are replaced by views of stacks. layouts: of the parameters."""
        found = factors(update, maximize)
        assert found is not None
        layouts = layouts or [PLAIN] * len(parameters)
        self.found = found
        alike: dict[Any, list[int]] = {}
        for i, state in enumerate(states):
            numbers = {n: x for n, x in state.items() if n.endswith(".norm") or trees.counts(n)}
            alike.setdefault(tuple((n, float(x)) for n, x in sorted(numbers.items())), []).append(i)
        members = list(zip(parameters, states, layouts, strict=True))
        self.runs = [_Run(found, [members[i] for i in some]) for some in alike.values()]
        self.keep(parameters, states)

    def take(self, today: Today) -> None:
        super().take(today)
        for run in self.runs:
            run.parts = today.of(self.found)

    @uncompiled()
    def step(
        self, rates: Mapping[str, float | Tensor], found: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """One datum for every parameter; found and scale are of fused steps, which these are not."""
        for run in self.runs:
            run.step(rates)


class _Stack(NamedTuple):
    """Matrices of one shape: their state, and room for the drive and for its rotation."""

    kept: dict[str, Tensor]
    drive: Tensor
    rotated: Tensor

    def state(self, side: int) -> dict[str, Tensor]:
        """What a statistic of rows (0) or columns (1) keeps."""
        prefix = f"{_FILTER}stats.{side}."
        return {n.removeprefix(prefix): x for n, x in self.kept.items() if n.startswith(prefix)}


def _by_matrix(
    parameters: Sequence[Tensor], layouts: Sequence[Layout]
) -> tuple[dict[tuple[int, int], list[int]], list[int]]:
    """The places of the parameters whose matrices have one shape, and how many matrices each parameter is."""
    places: dict[tuple[int, int], list[int]] = {}
    counts = []
    for i, (p, layout) in enumerate(zip(parameters, layouts, strict=True)):
        *batch, rows, columns = layout.shape(p)
        places.setdefault((rows, columns), []).append(i)
        counts.append(math.prod(batch))
    return places, counts


class _Run:
    """Parameters that have seen the same data: the numbers of a step are the same for all."""

    def __init__(self, parts: Factors, members: list[tuple[Tensor, dict[str, Tensor], Layout]]) -> None:
        states = [state for _, state, _ in members]
        self.parts, self.states = parts, states
        by_shape, self.matrices = _by_matrix([p for p, _, _ in members], [layout for _, _, layout in members])
        order = [i for some in by_shape.values() for i in some]
        self.each = [[self.matrices[i] for i in some] for some in by_shape.values()]
        self.held = [(members[i][0], members[i][2]) for i in order]
        self.parameters = [layout.seen(p.detach()) for p, layout in self.held]
        like = self.parameters[0]
        self.wide = torch.promote_types(like.dtype, torch.float32)
        self.stacks = [self._stack(shape, some) for shape, some in by_shape.items()]
        self.counts = together(states, [n for n in states[0] if trees.counts(n)])
        self.ages = [states[0][f"{_FILTER}stats.{i}.count"] for i in (0, 1)]
        self.inside = [writable(p, self.wide) for p in self.parameters]
        self.shown = [(p, x) for p, x in zip(self.parameters, self.inside, strict=True) if x.data_ptr() != p.data_ptr()]
        drives = [s.drive for s in self.stacks]
        inputs = {PARAMETER: self._divided(drives)}
        if parts.filter.keep:
            inputs[_AVERAGE] = self._divided([s.kept[_FILTER + "theta"] for s in self.stacks])
        self.head = ListProgram(parts.head, inputs)
        self.tail = ListProgram(parts.tail, {PARAMETER: self.inside})
        self.between: ListProgram | None = None
        if parts.between is not None:
            squares = [s.kept[_FILTER + "stats.2.theta"] for s in self.stacks]
            self.between = ListProgram(parts.between, {PARAMETER: drives, _SECOND: squares})

    def step(self, rates: Mapping[str, float | Tensor]) -> None:
        parts = self.parts
        gradients = [layout.seen(p.grad) for p, layout in self.held if p.grad is not None]
        self.head.step(readable(gradients, self.wide, self.head), rates)
        self._respond("norm", parts.filter)
        self._observe([int(age) for age in self.ages])
        if parts.second is None:
            for stack in self.stacks:
                left, right = (stack.state(i)["held"] for i in (0, 1))
                turned = product(left, self._argument(stack), parts.h.precision)
                if parts.filter.debias:
                    turned.div_(stack.kept[_FILTER + "norm"])
                add_product(stack.rotated, turned, right, 0.0, 1.0, parts.h.precision)
        else:
            self._respond("stats.2.norm", parts.second)
            self._whiten(rates)
        if self.shown:
            torch._foreach_copy_([x for _, x in self.shown], [p for p, _ in self.shown])
        self.tail.step(self._divided([s.rotated for s in self.stacks]), rates)
        if self.shown:
            torch._foreach_copy_([p for p, _ in self.shown], [x for _, x in self.shown])
        self.counts.add_(1)

    def _stack(self, shape: tuple[int, int], some: list[int]) -> _Stack:
        kept: dict[str, Tensor] = {}
        counts = [self.matrices[i] for i in some]
        for name in self.states[some[0]]:
            if not trees.counts(name):
                leaves = [self.states[i][name] for i in some]
                kept[name] = trees.rows(leaves, counts)
                for i, x in zip(some, trees.divide(kept[name], leaves, counts), strict=True):
                    self.states[i][name] = x
        drive = self.parameters[0].new_empty(sum(counts), *shape, dtype=self.wide)
        return _Stack(kept, drive, torch.empty_like(drive))

    def _divided(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """What of the stacks is each parameter's, in their order."""
        return [x for stack, counts in zip(stacks, self.each, strict=True) for x in stack.split(counts)]

    def _argument(self, stack: _Stack) -> Tensor:
        """What is preconditioned: the average, or the drive where none is kept."""
        return stack.kept[_FILTER + "theta"] if self.parts.filter.keep else stack.drive

    # ---- statistics --------------------------------------------------------------------------------------------------

    def _observe(self, ages: Sequence[int]) -> None:
        """Both statistics of every stack take the drive; what they hold is computed when it is time."""
        sides = self.parts.sides
        self._refresh({i: ages[i] for i, side in enumerate(sides) if side.at.before(ages[i])})
        for i, side in enumerate(sides):
            self._respond(f"stats.{i}.norm", side.kept)
            for stack in self.stacks:
                _take(stack.state(i)["theta"], side.cost, side.kept, stack.drive)
        self._refresh({i: ages[i] for i, side in enumerate(sides) if side.at.after(ages[i])})

    def _respond(self, name: str, kept: Average) -> None:
        """The responses to a unit drive, if they are kept."""
        norms = [stack.kept[_FILTER + name] for stack in self.stacks if _FILTER + name in stack.kept]
        if norms:
            torch._foreach_mul_(norms, kept.keep)
            torch._foreach_add_(norms, kept.rate)

    def _refresh(self, ages: Mapping[int, int]) -> None:
        """Compute what statistics hold, for small ones of one size together. ages: of the sides that are meant."""
        alike: dict[Any, tuple[StateUpdate, int, list[dict[str, Tensor]]]] = {}
        for i, age in ages.items():
            statistic = self.parts.sides[i].statistic
            _, h, _, step, _ = statistic.parts()
            for j, stack in enumerate(self.stacks):
                size = stack.drive.shape[i - 2]
                key = (h, step, age, size) if size <= _TOGETHER else (i, j)
                alike.setdefault(key, (statistic, age, []))[-1].append(stack.state(i))
        for statistic, age, states in alike.values():
            joined = {n: torch.cat([s[n] for s in states]) if len(states) > 1 else states[0][n] for n in states[0]}
            norm = (joined["norm"],) if "norm" in joined else ()
            held = (joined["held"], joined["misses"])
            state = State((joined["theta"],), (), (), norm, held, torch.tensor(age))
            new = execution.refreshed(statistic.parts(), state, state.theta, norm, {})
            lengths = [len(s["held"]) for s in states]
            for s, value, missed in zip(states, *(x.split(lengths) for x in new), strict=True):
                s["held"].copy_(value)
                s["misses"].copy_(missed)

    # ---- directions --------------------------------------------------------------------------------------------------

    def _whiten(self, rates: Mapping[str, float | Tensor]) -> None:
        """From drives to directions, which take the place of the rotated drives."""
        precision, kept = self.parts.h.precision, self.stacks[0].kept
        bases = [(s.state(0)["held"], s.state(1)["held"]) for s in self.stacks]
        for stack, (left, right) in zip(self.stacks, bases, strict=True):
            add_product(stack.rotated, product(left.mT, stack.drive, precision), right, 0.0, 1.0, precision)
            turned = product(left.mT, self._argument(stack), precision)
            add_product(stack.drive, turned, right, 0.0, 1.0, precision)
        names = {_RESPONSE: "norm", _RESPONSE_2: "stats.2.norm"}  # the same for all: they have seen the same data
        numbers = {n: kept[_FILTER + x].flatten()[0] for n, x in names.items() if _FILTER + x in kept}
        assert self.between is not None
        self.between.step([s.rotated for s in self.stacks], {**rates, **numbers})
        for stack, (left, right) in zip(self.stacks, bases, strict=True):
            add_product(stack.rotated, product(left, stack.drive, precision), right.mT, 0.0, 1.0, precision)


def _take(total: Tensor, cost: Linear, kept: Average, drive: Tensor) -> None:
    """total <- keep total + rate u u^T, or u^T u, in place."""
    x = drive.mT if cost.of == "left" else drive
    if total.is_cuda:
        symmetric_sum(total, x.mT, keep=kept.keep, rate=kept.rate, precision=cost.precision, out=total)
        return
    # bit for bit what the interpreter adds: rounding decides what the basis of a null space is
    sums = cost.drive(drive[0])[None] if len(drive) == 1 else cost.drive(drive)
    if kept.keep != 1:
        total.mul_(kept.keep)
    total.add_(kept.rate * sums)
