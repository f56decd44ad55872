"""Stacks of matrices of one shape: programs that take the entries of a matrix together, or the tuple itself.

The step is traced until a geometry mixes entries in a way that is no operation of programs (`apart`): products, roots,
sorts. That geometry is given stacks of equal shapes, and what follows is traced on; so are products with roots and
bases that statistics hold, which take the drive on the way. So a step is one program or more;
in these norms, means and sums over leaves, rows and columns are operations like any other, traced for the shape that
they are of: LAMB's ratio, Adafactor's means, a clipped norm, or what a geometry of one's own does with such numbers.
Where a step is none, the tuple is executed as it is written, once a stack. On a CPU a stack is stepped as a whole
before the next one is touched, and is no larger than what fits in cache. States are the interpreter's, name by name:
views of the stacks'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from axes.core.algorithms import Anchor, Held
from axes.core.facts import fact
from axes.core.state_update import StateUpdate
from axes.optim.engine import trees
from axes.optim.engine.apart import functions, links, program_around, squares
from axes.optim.engine.around import Around, Shaped, Whole
from axes.optim.engine.blocks import BLOCK, Block
from axes.optim.engine.capabilities import needs_layers, parts_of, turns, vectors
from axes.optim.engine.forms import Group, Today
from axes.optim.engine.generated import GRADIENT, How
from axes.optim.engine.kept import Kept
from axes.optim.engine.layouts import PLAIN, Layout
from axes.optim.engine.options import how
from axes.optim.engine.precision import Precision
from axes.optim.engine.statistics import average
from axes.optim.engine.together import Numbers, reads_more, uncompiled
from axes.programs.batched import Schedule
from axes.programs.program import Program
from axes.programs.stages import Stage, stages

Shape = tuple[int, int]
_SHAPE: Shape = (3, 5)  # any two sizes that no number in a rule equals
_TOGETHER = 1 << 14  # entries of a matrix up to which copies cost less than operations of its own (measured, CPUs)


class Traced(NamedTuple):
    """A step over stacks of one shape: a program, and its stages."""

    program: Program
    stages: tuple[Stage, ...]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What parameters that step together have in common."""
        return tuple((*stage.rooms.items(), stage.calls) for stage in self.stages)


def staged(update: StateUpdate, maximize: bool = False) -> Traced | None:
    """A step over stacks of some shape, or None if it is no program, nor programs around geometries."""
    return over_stacks(update, maximize, _SHAPE, torch.float32)


def no_stages(update: StateUpdate, maximize: bool = False) -> str | None:
    """Why a step over stacks is neither, or None."""
    found = _staged(update, maximize, _SHAPE, torch.float32)
    return found if isinstance(found, str) else None


def set_apart(update: StateUpdate, maximize: bool = False) -> list[str]:
    """What is no program in a staged step: geometries, and products with what statistics hold."""
    found = staged(update, maximize)
    if found is None:
        return []
    every, held = links(update), [link.prefix for link in squares(update).values()]
    names = [repr(every[i].h) for i in sorted(functions(found.program))]
    with_products = [link for link in every if any(prefix.startswith(f"{link.prefix}stats.") for prefix in held)]
    return list(dict.fromkeys([*names, *(f"the products of {type(link.h).__name__}" for link in with_products)]))


def fits(update: StateUpdate, group: Group) -> bool:
    """Whether a group's tuple can be executed on stacks: it reads nothing but a gradient and numbers, and its state is
    what it leaves."""
    plain = group["foreach"] and how(group) == "host" and Precision.of(group).plain
    return plain and not needs_layers(update) and not vectors(update)


@fact
@uncompiled()
def _staged(update: StateUpdate, maximize: bool, shape: Shape, dtype: torch.dtype) -> Traced | str:
    if (reason := reads_more(update)) is not None:
        return reason
    if (turned := turns(update)) is not None:
        return f"mixes entries: {turned}"
    sums = [link.update for link in squares(update).values()]
    if any(average(part) is None for part in sums):
        return "a statistic of rows or columns is no average whose root or basis is held"
    refreshed = [part for part in parts_of(update) if isinstance(part.parts().step.at, Held | Anchor)]
    if any(part not in sums for part in refreshed):
        return "a value is refreshed at some of its data"
    found = program_around(update, maximize, torch.empty(shape, dtype=dtype, device="meta"))
    return found if isinstance(found, str) else Traced(found, stages(found, GRADIENT))


def over_stacks(update: StateUpdate, maximize: bool, shape: Shape, dtype: torch.dtype) -> Traced | None:
    """The step for one shape and dtype, or None."""
    found = _staged(update, maximize, shape, dtype)
    return found if isinstance(found, Traced) else None


@fact
def _schedule(update: StateUpdate, maximize: bool, shape: Shape, dtype: torch.dtype, alone: bool) -> Schedule:
    """Of a step that is one program. alone: of a single matrix on a CPU, its rates on the host."""
    found = over_stacks(update, maximize, shape, dtype)
    assert found is not None
    program = found.program
    extents, kept = program.extent_of(), (*program.inputs.values(), *program.outputs.values())
    leaves = any(program.shaped(x) and extents[x] == (False, False) for x in kept)  # that are kept are tensors
    return Schedule(program, keep=(GRADIENT,), alone=alone and not leaves)


def traced_for(
    update: StateUpdate, maximize: bool, parameter: Tensor, layout: Layout
) -> tuple[Shape, torch.dtype, Traced | None]:
    """How a parameter is seen by a step over stacks: the shape of its matrices, the dtype of the step, and the step."""
    *_, rows, columns = layout.shape(parameter)
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return (rows, columns), wide, over_stacks(update, maximize, (rows, columns), wide)


@final
class Staged(Kept):
    """Parameters of one dtype and device, with the same numbers in their states, whose steps have the same stages.

    Where these are none, they have seen equally many data.
    """

    def __init__(
        self,
        update: StateUpdate,
        maximize: bool,
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        how: How = "host",
        layouts: Sequence[Layout] = (),
        programmed: bool = True,
        whole: Whole | None = None,
    ) -> None:
        """states: flat, with tensors of their own; they are replaced by views of stacks. layouts: of the parameters.

        programmed: by programs; else the tuple is executed. whole: of their group; by default they are all.
        """
        self.form = self.update = update
        self.maximize, self.parameters, self.how, self.programmed = maximize, parameters, how, programmed
        layouts = layouts or [PLAIN] * len(parameters)
        like = parameters[0]
        wide = torch.promote_types(like.dtype, torch.float32)
        alike: dict[tuple[Shape, int], list[int]] = {}
        for i, (p, layout) in enumerate(zip(parameters, layouts, strict=True)):
            *batch, rows, columns = layout.shape(p)
            alike.setdefault(((rows, columns), math.prod(batch)), []).append(i)
        found = {s: over_stacks(update, maximize, s, wide) if programmed else None for s, _ in alike}
        some = next(iter(found.values()))
        self.program = Program() if some is None else some.program
        self.numbers = Numbers(self.program, states, how)
        self.seen = {n: x for n, x in states[0].items() if trees.counts(n)}
        around = some is not None and len(some.stages) > 1
        sums = tuple(link.prefix for link in squares(update).values()) if around else ()  # which have their own stacks
        others = [*self.numbers.names, *(n for n in states[0] if n.startswith(sums))]
        simple = around and all(stage.entrywise for traced in found.values() if traced for stage in traced.stages)
        self.blocks: list[tuple[Block, Schedule | None]] = []
        shaped: dict[Shape, list[tuple[list[int], int, list[Block]]]] = {}
        for (shape, count), members in alike.items():
            blocks = []
            for part in [] if simple else _parts(members, count * math.prod(shape), like.is_cpu):
                held = [(parameters[i], states[i], layouts[i]) for i in part]
                blocks.append(Block(held, (len(part) * count, *shape), wide, others))
                alone = how == "host" and like.is_cpu and len(part) * count == 1
                schedule = _schedule(update, maximize, shape, wide, alone) if some is not None and not around else None
                self.blocks.append((blocks[-1], schedule))
            shaped.setdefault(shape, []).append((members, count, blocks))
        self.around: Around | None = None
        if around:
            stacks = [
                Shaped(
                    shape,
                    [i for members, _, _ in theirs for i in members],
                    [count for members, count, _ in theirs for _ in members],
                    found[shape].stages,  # type: ignore[union-attr]
                    [block for _, _, blocks in theirs for block in blocks],
                )
                for shape, theirs in shaped.items()
            ]
            whole = whole or Whole.of(layout.shape(p) for p, layout in zip(parameters, layouts, strict=True))
            self.around = Around(update, stacks, parameters, states, layouts, whole)
        self.keep(parameters, states)

    def take(self, today: Today) -> None:
        super().take(today)
        if self.around is not None:
            self.around.take(today)
        elif not self.programmed:
            self.update = today.of(self.form)

    @uncompiled()
    def step(
        self, rates: Mapping[str, float | Tensor], found: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """One datum for every parameter; found and scale are of fused steps, which these are not."""
        if self.programmed:
            self._programs(rates)
        else:
            for block, _ in self.blocks:
                block.interpret(self.update, self.seen, rates, self.maximize)
        self.numbers.counts.add_(1)

    def _programs(self, rates: Mapping[str, float | Tensor]) -> None:
        numbers, hosted = self.numbers, self.how == "host"
        given = numbers.given(rates) if hosted else numbers.beside(rates)
        if self.around is not None:
            self.around.step(given)
        if self.around is None or numbers.names:
            if hosted:
                given = {n: float(x) for n, x in given.items()}
            known: dict[int, Sequence[Any]] = {id(self.program): self._values(self.program, given)}
            for block, schedule in self.blocks if self.around is None else ():
                assert schedule is not None
                program = schedule.program
                if id(program) not in known:
                    known[id(program)] = self._values(program, given)
                block.run(schedule, known[id(program)])
            (numbers.take if hosted else numbers.put)(self.program, known[id(self.program)])

    def _values(self, program: Program, given: Mapping[str, Any]) -> Sequence[Any]:
        return program.numbers(given) if self.how == "host" else program.tensors(given)


def _parts(some: list[int], size: int, cached: bool) -> list[list[int]]:
    """Members of a shape, of so many entries each, in the stacks that are stepped."""
    if not cached:
        return [some]
    count = 1 if size > _TOGETHER else max(1, BLOCK // size)
    return [some[i : i + count] for i in range(0, len(some), count)]


__all__ = [
    "Shape", "Staged", "Traced", "fits", "no_stages", "over_stacks", "set_apart", "staged", "traced_for"
]  # fmt: skip
