"""Steps over stacks of matrices of one shape, as programs that may take the entries of a matrix together.

The step is traced until a geometry mixes entries in a way that is no operation of programs (`apart`): products, roots,
sorts. That geometry is given stacks of equal shapes, and what follows is traced on; so are products with roots and
bases that statistics hold, which take the drive on the way. So a step is one program or more;
in these norms, means and sums over leaves, rows and columns are operations like any other, traced for the shape that
they are of: LAMB's ratio, Adafactor's means, a clipped norm, or what a geometry of one's own does with such numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from axes.core.algorithms import Anchor, Held
from axes.core.facts import fact
from axes.core.state_update import StateUpdate
from axes.optim.engine.apart import functions, links, program_around, squares
from axes.optim.engine.capabilities import needs_layers, parts_of, turns, vectors
from axes.optim.engine.forms import Group
from axes.optim.engine.generated import GRADIENT
from axes.optim.engine.layouts import Layout
from axes.optim.engine.options import how
from axes.optim.engine.precision import Precision
from axes.optim.engine.statistics import average
from axes.optim.engine.together import reads_more, uncompiled
from axes.programs.batched import Schedule
from axes.programs.program import Program
from axes.programs.stages import Stage, stages

Shape = tuple[int, int]
_SHAPE: Shape = (3, 5)  # any two sizes that no number in a rule equals


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
def schedule_over(update: StateUpdate, maximize: bool, shape: Shape, dtype: torch.dtype, alone: bool) -> Schedule:
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


__all__ = [
    "Shape", "Traced", "fits", "no_stages", "over_stacks", "schedule_over", "set_apart", "staged", "traced_for"
]  # fmt: skip
