"""Stacks of matrices of one shape: programs that take the entries of a matrix together, or the tuple itself.

Where the step is one program (`axes.programs`), norms, means and sums over leaves, rows and columns are operations like
any other, traced for the shape that they are of: LAMB's ratio, Adafactor's means, a clipped norm, or what a geometry of
one's own does with such numbers. Where it is none, the tuple is executed as it is written, once a stack. On a CPU a
stack is stepped as a whole before the next one is touched, and is no larger than what fits in cache. States are the
interpreter's, name by name: views of the stacks'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from axes.core.algorithms import Anchor, Held
from axes.core.facts import fact
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine import trees
from axes.optim.engine.capabilities import needs_layers, parts_of, turns, vectors
from axes.optim.engine.forms import Group, Today
from axes.optim.engine.generated import GRADIENT, How
from axes.optim.engine.groups import beside
from axes.optim.engine.kept import Kept
from axes.optim.engine.layouts import PLAIN, Layout
from axes.optim.engine.options import how
from axes.optim.engine.precision import Precision
from axes.optim.engine.together import Numbers, reads_more, traced, uncompiled
from axes.programs.batched import Schedule
from axes.programs.program import PARAMETER, ForgottenNumber, Program

Shape = tuple[int, int]
_SHAPE: Shape = (3, 5)  # any two sizes that no number in a rule equals
_TOGETHER = 1 << 14  # entries of a matrix up to which copies cost less than operations of its own (measured, CPUs)
BLOCK = 1 << 17  # entries of a stack whose step stays in cache (the same)


def staged(update: StateUpdate, maximize: bool = False) -> Program | None:
    """The program of a step over stacks, for some shape, or None if it is none."""
    found = _staged(update, maximize, _SHAPE, torch.float32)
    return found if isinstance(found, Program) else None


def no_stages(update: StateUpdate, maximize: bool = False) -> str | None:
    """Why a step over stacks is no program, or None if it is one."""
    found = _staged(update, maximize, _SHAPE, torch.float32)
    return found if isinstance(found, str) else None


def fits(update: StateUpdate, group: Group) -> bool:
    """Whether a group's tuple can be executed on stacks: it reads nothing but a gradient and numbers, and its state is
    what it leaves."""
    plain = group["foreach"] and how(group) == "host" and Precision.of(group).plain
    return plain and not needs_layers(update) and not vectors(update)


@fact
@uncompiled()
def _staged(update: StateUpdate, maximize: bool, shape: Shape, dtype: torch.dtype) -> Program | str:
    if (reason := reads_more(update)) is not None:
        return reason
    if (turned := turns(update)) is not None:
        return f"mixes entries: {turned}"
    if any(isinstance(part.parts().step.at, Held | Anchor) for part in parts_of(update)):
        return "a value is refreshed at some of its data"
    try:
        return traced(update, maximize, torch.empty(shape, dtype=dtype, device="meta"), stack=True)
    except ForgottenNumber:
        raise
    except (AxesError, NotImplementedError) as error:  # what reads its data, or is not for this shape
        return f"is no program: {error}"


@fact
def over_stacks(
    update: StateUpdate, maximize: bool, shape: Shape, dtype: torch.dtype, alone: bool = False
) -> Schedule | None:
    """The program for one shape and dtype, or None. alone: of a single matrix on a CPU, its rates on the host."""
    found = _staged(update, maximize, shape, dtype)
    if not isinstance(found, Program):
        return None
    extents, kept = found.extent_of(), (*found.inputs.values(), *found.outputs.values())
    leaves = any(found.shaped(x) and extents[x] == (False, False) for x in kept)  # that are kept are tensors
    return Schedule(found, keep=(GRADIENT,), alone=alone and not leaves)


@final
class Staged(Kept):
    """Parameters of one dtype and device that have seen equally many data, with the same numbers in their states."""

    def __init__(
        self,
        update: StateUpdate,
        maximize: bool,
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        how: How = "host",
        layouts: Sequence[Layout] = (),
        programmed: bool = True,
    ) -> None:
        """states: flat, with tensors of their own; they are replaced by views of stacks. layouts: of the parameters.

        programmed: by programs, where they are; else the tuple is executed.
        """
        self.form = self.update = update
        self.maximize, self.parameters, self.how = maximize, parameters, how
        layouts = layouts or [PLAIN] * len(parameters)
        wide = torch.promote_types(parameters[0].dtype, torch.float32)
        alike: dict[tuple[Shape, int], list[int]] = {}
        for i, (p, layout) in enumerate(zip(parameters, layouts, strict=True)):
            *batch, rows, columns = layout.shape(p)
            alike.setdefault(((rows, columns), math.prod(batch)), []).append(i)
        shapes = [shape for shape, _ in alike] if programmed else []
        schedules = {shape: over_stacks(update, maximize, shape, wide) for shape in shapes}
        lone = how == "host" and parameters[0].is_cpu
        # a part may do with a single row, say, what is no operation of a program: then all are interpreted
        self.programmed = programmed and None not in schedules.values()
        some = next(iter(schedules.values())) if self.programmed else None
        self.numbers = Numbers(Program() if some is None else some.program, states, how)
        self.seen = {n: x for n, x in states[0].items() if trees.counts(n)}
        self.blocks: list[_Block] = []
        for (shape, count), members in alike.items():
            for part in _parts(members, count * math.prod(shape), parameters[0].is_cpu):
                block = [(parameters[i], states[i], layouts[i]) for i in part]
                schedule = None
                if self.programmed:
                    schedule = over_stacks(update, maximize, shape, wide, lone and len(part) * count == 1)
                self.blocks.append(_Block(schedule, block, (len(part) * count, *shape), wide, self.numbers.names))
        self.keep(parameters, states)

    def take(self, today: Today) -> None:
        super().take(today)
        if not self.programmed:
            self.update = today.of(self.form)

    @uncompiled()
    def step(
        self, rates: Mapping[str, float | Tensor], found: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """One datum for every parameter; found and scale are of fused steps, which these are not."""
        if self.programmed:
            self._programs(rates)
        else:
            self._interpret(rates)
        self.numbers.counts.add_(1)

    def _programs(self, rates: Mapping[str, float | Tensor]) -> None:
        numbers, hosted = self.numbers, self.how == "host"
        host = numbers.given({n: float(x) for n, x in rates.items()}) if hosted else {}
        there = {} if hosted else numbers.beside(rates)
        known: dict[int, Sequence[Any]] = {}
        for block in self.blocks:
            assert block.schedule is not None
            program = block.schedule.program
            if id(program) not in known:
                known[id(program)] = program.numbers(host) if hosted else program.tensors(there)
            block.run(block.schedule, known[id(program)])
        (numbers.take if hosted else numbers.put)(program, known[id(program)])  # those of states are the same for all

    def _interpret(self, rates: Mapping[str, float | Tensor]) -> None:
        for block in self.blocks:
            block.interpret(self.update, self.seen, rates, self.maximize)


def _parts(some: list[int], size: int, cached: bool) -> list[list[int]]:
    """Members of a shape, of so many entries each, in the stacks that are stepped."""
    if not cached:
        return [some]
    count = 1 if size > _TOGETHER else max(1, BLOCK // size)
    return [some[i : i + count] for i in range(0, len(some), count)]


@final
class _Block:
    """A stack of matrices: their parameters where they are, or in a room for them while a step lasts."""

    def __init__(
        self,
        schedule: Schedule | None,
        members: list[tuple[Tensor, dict[str, Tensor], Layout]],
        shape: tuple[int, int, int],
        wide: torch.dtype,
        numbers: Sequence[str],
    ) -> None:
        """numbers: by name, what of the states is none of the stack's."""
        self.schedule, self.shape, self.wide = schedule, shape, wide
        self.held = [(p, layout) for p, _, layout in members]
        self.shown = [layout.seen(p.detach()) for p, layout in self.held]
        states = [state for _, state, _ in members]
        self.kept: dict[str, Tensor] = {}
        for name in [n for n in states[0] if not trees.counts(n) and n not in numbers]:
            leaves, counts = [s[name] for s in states], [shape[0] // len(states)] * len(states)
            self.kept[name] = trees.rows(leaves, counts)
            for s, x in zip(states, trees.divide(self.kept[name], leaves, counts), strict=True):
                s[name] = x
        self.inside: list[Tensor] = []  # what of the room is each parameter's
        self.gradients: tuple[Tensor, list[Tensor]] | None = None  # a room for those
        own = self._whole(self.shown)
        if own is None:
            own, self.inside = self._room()
        self.weights = own
        self.lists = {PARAMETER: [own], **{n: [x] for n, x in self.kept.items()}}

    def run(self, schedule: Schedule, values: Sequence[Any]) -> None:
        """One datum by the program, given its numbers."""
        lists = {**self.lists, GRADIENT: [self._enter()]}
        schedule.run([lists[n] for n in schedule.names], values)
        self._leave()

    def interpret(
        self, update: StateUpdate, counts: Mapping[str, Tensor], rates: Mapping[str, Any], maximize: bool
    ) -> None:
        """One datum by the tuple."""
        g = self._enter()
        given = {per.name: beside(rates[per.name], g) for per in update.demands()}
        state = trees.unflatten(update, {**self.kept, **counts}, self.weights)
        state, out = update.step(state, {GRADIENT: -g if maximize else g, **given})
        after = trees.flatten(update, state)
        if self.kept:
            torch._foreach_copy_(list(self.kept.values()), [after[n] for n in self.kept])
        self.weights.copy_(out.weights[0])
        self._leave()

    def _enter(self) -> Tensor:
        """The gradients as a stack, with the parameters in their room if they have one."""
        if self.inside:
            torch._foreach_copy_(self.inside, self.shown)
        gradients = [layout.seen(p.grad) for p, layout in self.held if p.grad is not None]
        whole = self._whole(gradients)
        if whole is None:
            self.gradients = self.gradients or self._room()
            whole = self.gradients[0]
            torch._foreach_copy_(self.gradients[1], gradients)
        return whole

    def _leave(self) -> None:
        if self.inside:
            torch._foreach_copy_(self.shown, self.inside)

    def _whole(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """A tensor as the stack that it is where it is, or None."""
        x = tensors[0]
        return x.view(self.shape) if len(tensors) == 1 and x.dtype == self.wide and x.is_contiguous() else None

    def _room(self) -> tuple[Tensor, list[Tensor]]:
        """A stack, and what of it is each parameter's."""
        room = self.shown[0].new_empty(self.shape, dtype=self.wide)
        parts = room.split(self.shape[0] // len(self.shown))
        return room, [x.view(y.shape) for x, y in zip(parts, self.shown, strict=True)]


__all__ = ["BLOCK", "Shape", "Staged", "fits", "no_stages", "over_stacks", "staged"]
