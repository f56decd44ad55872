"""What of parameters steps together, whatever a step is: programs, with what is none between them, or the tuple itself.

A rule that acts entry by entry is one program over all tensors (`entries`). One that takes entries of a matrix together
runs over stacks of matrices of one shape (`blocks`), on a CPU one after another, each no larger than what fits in
cache, and is stepped around geometries that are no programs (`around`). Where a step is none, the tuple is executed as
it is written, once a stack. States are the interpreter's, name by name: views of the stacks'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.optim.engine import generated, trees
from axes.optim.engine.apart import squares
from axes.optim.engine.around import Around, Shaped, Whole
from axes.optim.engine.blocks import BLOCK, Block
from axes.optim.engine.entries import Entries
from axes.optim.engine.forms import Today
from axes.optim.engine.generated import How, is_plain
from axes.optim.engine.gradients import Gradients
from axes.optim.engine.kept import Kept
from axes.optim.engine.layouts import PLAIN, Layout
from axes.optim.engine.staged import Shape, over_stacks, schedule_over
from axes.optim.engine.together import Numbers, uncompiled
from axes.programs.batched import Schedule
from axes.programs.program import Program
from axes.routes.choice import Route

_TOGETHER = 1 << 14  # entries of a matrix up to which copies cost less than operations of its own (measured, CPUs)


@final
class Batch(Kept):
    """Parameters that step together: of one dtype and device, with the same numbers in their states.

    how: "host" computes the numbers of a step on the host, "device" beside the tensors, so that nothing waits for the
    device and a step can be captured, and "fused" is one generated kernel, for which the counts are on the device too.
    Where generated kernels run, "host" is that kernel as well: it has the counts from a copy, and keeps the numbers.
    """

    def __init__(
        self,
        update: StateUpdate,
        maximize: bool,
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        how: How = "host",
        route: Route = "entrywise",
        layouts: Sequence[Layout] = (),
        whole: Whole | None = None,
        streams: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        """states: flat, with tensors of their own, which may be replaced by views of others.

        route: of "stacks" the steps have the same stages; the "interpreter" takes those that have seen equally many
        data. layouts: of the parameters; whole: of their group, by default they are all. streams: of random bits, if
        parameters are rounded at random.
        """
        self.form = self.update = update
        self.maximize, self.parameters, self.how, self.route = maximize, parameters, how, route
        self.hosted = how == "host"  # where the counts are
        self.entries: Entries | None = None
        self.around: Around | None = None
        self.blocks: list[tuple[Block, Schedule | None]] = []
        if route == "entrywise":
            if generated.no_kernel(how, parameters[0].device, all(map(is_plain, parameters))) is None:
                self.how = "fused"
            self.entries = Entries(update, maximize, parameters, states, self.how, self.hosted, streams, seed)
        else:
            self._stack(states, layouts or [PLAIN] * len(parameters), whole)
        self.keep(parameters, states)

    def take(self, today: Today) -> None:
        super().take(today)
        if self.around is not None:
            self.around.take(today)
        elif self.route == "interpreter":
            self.update = today.of(self.form)

    @uncompiled(recursive=False)
    def step(
        self,
        rates: Mapping[str, float | Tensor],
        found: Tensor | None = None,
        scale: Tensor | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        """One datum for every parameter. found, scale: of a gradient scaler, for fused batches. gradients: what the
        parameters have, where somebody has looked at them."""
        if self.entries is not None:
            self.entries.step(rates, found, scale, gradients)
        else:
            self._over_stacks(rates)

    # ---- stacks ------------------------------------------------------------------------------------------------------

    def _stack(self, states: list[dict[str, Tensor]], layouts: Sequence[Layout], whole: Whole | None) -> None:
        parameters, like = self.parameters, self.parameters[0]
        wide = torch.promote_types(like.dtype, torch.float32)
        alike: dict[tuple[Shape, int], list[int]] = {}
        for i, (p, layout) in enumerate(zip(parameters, layouts, strict=True)):
            *batch, rows, columns = layout.shape(p)
            alike.setdefault(((rows, columns), math.prod(batch)), []).append(i)
        programmed = self.route == "stacks"
        found = {s: over_stacks(self.update, self.maximize, s, wide) if programmed else None for s, _ in alike}
        some = next(iter(found.values()))
        self.program = Program() if some is None else some.program
        self.numbers = Numbers(self.program, states, self.how)
        self.seen = {n: x for n, x in states[0].items() if trees.counts(n)}
        around = some is not None and len(some.stages) > 1
        sums = tuple(link.prefix for link in squares(self.update).values()) if around else ()  # in stacks of their own
        others = [*self.numbers.names, *(n for n in states[0] if n.startswith(sums))]
        simple = around and all(stage.entrywise for traced in found.values() if traced for stage in traced.stages)
        shaped: dict[Shape, list[tuple[list[int], int, list[Block]]]] = {}
        for (shape, count), members in alike.items():
            blocks = []
            for part in [] if simple else _parts(members, count * math.prod(shape), like.is_cpu):
                held = [(parameters[i], states[i], layouts[i]) for i in part]
                blocks.append(Block(held, (len(part) * count, *shape), wide, others))
                alone = self.hosted and like.is_cpu and len(part) * count == 1
                one = None if some is None or around else schedule_over(self.update, self.maximize, shape, wide, alone)
                self.blocks.append((blocks[-1], one))
            shaped.setdefault(shape, []).append((members, count, blocks))
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
            self.around = Around(self.update, stacks, parameters, states, layouts, whole)

    @uncompiled()
    def _over_stacks(self, rates: Mapping[str, float | Tensor]) -> None:
        if self.route == "interpreter":
            for block, _ in self.blocks:
                block.interpret(self.update, self.seen, rates, self.maximize)
        else:
            self._programs(rates)
        self.numbers.counts.add_(1)

    def _programs(self, rates: Mapping[str, float | Tensor]) -> None:
        numbers = self.numbers
        given = numbers.given(rates)
        known: dict[int, Sequence[Any]] = {}

        def values(program: Program) -> Sequence[Any]:
            if id(program) not in known:
                known[id(program)] = numbers.of(program, given)
            return known[id(program)]

        if self.around is not None:
            self.around.step(given)
        else:
            for block, schedule in self.blocks:
                assert schedule is not None
                block.run(schedule, values(schedule.program))
        if numbers.names:
            numbers.take(self.program, values(self.program))


def _parts(some: list[int], size: int, cached: bool) -> list[list[int]]:
    """Members of a shape, of so many entries each, in the stacks that are stepped."""
    if not cached:
        return [some]
    count = 1 if size > _TOGETHER else max(1, BLOCK // size)
    return [some[i : i + count] for i in range(0, len(some), count)]


__all__ = ["Batch"]
