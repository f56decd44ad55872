"""Steps around geometries that are no programs: their stacks, and the programs before, between and after them.

A stage that acts entry by entry is one program over all tensors; one that takes entries of a matrix together runs over
stacks that fit in cache. What a stage leaves for a geometry is a stack for each shape, in the dtype that it asks for,
and it is given all stacks at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from axes.core.geometry import Geometry
from axes.core.state_update import StateUpdate
from axes.optim.engine import generated, trees
from axes.optim.engine.apart import context, links, squares
from axes.optim.engine.blocks import Block
from axes.optim.engine.generated import GRADIENT
from axes.optim.engine.layouts import Layout
from axes.optim.engine.lists import ListProgram, readable, values_of, writable
from axes.optim.engine.replayed import Replayed
from axes.optim.engine.statistics import Statistics
from axes.optim.engine.statistics import given as drives
from axes.programs.batched import Schedule
from axes.programs.program import PARAMETER, function_of
from axes.programs.sent import Sent
from axes.programs.stages import Call, Stage, shared, states_left, without

if TYPE_CHECKING:
    from axes.optim.engine.forms import Today

_HOST_BOUND = 100_000_000  # entries up to which the launches of a step take longer than the work
_BRANCHES = 4  # streams on which such a step is recorded: the products of few matrices do not fill a GPU
Rates = Mapping[str, float | Tensor]


class Whole(NamedTuple):
    """What products are chosen for: all matrices of a group, whichever of them are stepped here and now.

    sides: how many have each shorter side. alone: every parameter is one matrix.
    """

    sides: Mapping[int, int]
    alone: bool

    @staticmethod
    def of(shapes: Iterable[tuple[int, ...]]) -> Whole:
        """Of parameters that are (*batch, rows, columns) to their rule."""
        sides: Counter[int] = Counter()
        alone = True
        for *batch, rows, columns in shapes:
            sides[min(rows, columns)] += math.prod(batch)
            alone = alone and math.prod(batch) == 1
        return Whole(sides, alone)


class Shaped(NamedTuple):
    """The members of a shape: their places, how many matrices each is, and the blocks that they are stepped in."""

    shape: tuple[int, int]
    places: list[int]
    counts: list[int]
    stages: tuple[Stage, ...]
    blocks: list[Block]


@final
class Around:
    """Parameters whose steps have the same stages, for each shape."""

    def __init__(
        self,
        update: StateUpdate,
        shaped: Sequence[Shaped],
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        layouts: Sequence[Layout],
        whole: Whole,
    ) -> None:
        """whole: of the parameters' group."""
        self.shaped, self.stages = shaped, shaped[0].stages
        like = parameters[0]
        self.wide = torch.promote_types(like.dtype, torch.float32)
        order = [i for some in shaped for i in some.places]
        self.held = [(parameters[i], layouts[i]) for i in order]
        self.viewed = any(layout.axes for _, layout in self.held)
        seen = [layout.seen(p.detach()) for p, layout in self.held]
        hs, calls = [link.h for link in links(update)], [call for stage in self.stages for call in stage.calls]
        kinds = {c.inputs[0]: hs[int(c.which)].takes_in(self.wide) for c in calls if _is_geometry(c)}
        every = range(len(self.stages))
        self.over = [all(s.stages[k].program == self.stages[k].program for s in shaped) for k in every]  # all shapes
        self.over = [same and self.stages[k].entrywise for k, same in enumerate(self.over)]
        self.joined: dict[str, list[Tensor]] = {}  # states that are stacks, which functions take as they are
        self.stacked: dict[str, list[Tensor]] = {}  # all states that are, by their own names
        self.stages = tuple(self._lean(k, set(kinds), states) for k in every)
        self.rooms = self._rooms(kinds)
        observed = {c.which for c in calls if c.observes}
        members = [(some.places, some.counts) for some in shaped]
        self.statistics = Statistics({n: x for n, x in squares(update).items() if n in observed}, members, states)
        self.given = {c.output: self.statistics.values(c.which) for c in calls if c.observes}
        self.inside: list[Tensor] = []
        self.shown: list[tuple[Tensor, Tensor]] = []
        if any(over and PARAMETER not in stage.rooms for over, stage in zip(self.over, self.stages, strict=True)):
            self.inside = [writable(x, self.wide) for x in seen]
            pairs = zip(seen, self.inside, strict=True)
            self.shown = [(x, y) for x, y in pairs if x.data_ptr() != y.data_ptr()]
        self.steps: list[tuple[Callable[[Rates], None], dict[str, list[Tensor]], list[_Product | _Whole]]] = []
        for k, stage in enumerate(self.stages):
            sizes: dict[str, list[Tensor] | None] = {}
            if self.over[k]:
                room = stage.rooms.get(PARAMETER)
                some_calls = [c for c in stage.calls if _is_geometry(c) and c.inputs[0] == room]
                read = whole.alone and any(hs[int(c.which)].reads_squares for c in some_calls)
                program, run = self._lists(stage, states, read)
                if room is not None:
                    sizes[room] = program.squares_of(self.rooms[room])
            else:
                run = self._blocks(k)
            products: list[_Product | _Whole] = []
            for call in stage.calls:
                stacks = [self.rooms[name] if name in self.rooms else self.given[name] for name in call.inputs]
                function = function_of(call.which)
                if function is not None:
                    self.given[call.output] = self.rooms.get(call.output) or self._room(self.wide)
                    products.append(_Whole(function, call, stacks, self.given[call.output]))
                elif not call.observes:
                    sums = sizes.get(call.inputs[0])
                    products.append(_Product(hs[int(call.which)], call, stacks, self.wide, sums, whole))
            self.steps.append((run, drives(stage.calls, self.rooms), products))

    def take(self, today: Today) -> None:
        self.statistics.take(today)
        for _, _, products in self.steps:
            for product in products:
                product.take(today)

    def step(self, rates: Rates) -> None:
        """One datum. rates: all numbers that the programs read."""
        for run, observed, products in self.steps:
            run(rates)
            if observed:
                self.statistics.observe(observed)
            for product in products:
                name = product.call.output
                self.given[name] = directions = product.directions()
                if name in self.rooms and directions is not self.rooms[name]:
                    torch._foreach_copy_(self.rooms[name], directions)

    # ---- what stages leave to each other -----------------------------------------------------------------------------

    def _kept(self) -> list[str]:
        """What needs a room: all but what a geometry gives and a program reads as its gradient, at once."""
        names = [name for stage in self.stages for name in stage.rooms.values()]
        behind = {call.output: k + 1 for k, stage in enumerate(self.stages) for call in stage.calls}
        gone = {name for name, k in behind.items() if self.stages[k].rooms.get(GRADIENT) == name}
        later = {x for k, stage in enumerate(self.stages) for x in stage.rooms.values() if k > behind.get(x, k)}
        return [name for name in dict.fromkeys(names) if name not in gone - later]

    def _lean(self, k: int, written: Collection[str], states: list[dict[str, Tensor]]) -> Stage:
        """A stage that leaves nothing that is a state as well, and nobody else writes: such states become stacks."""
        stage = self.stages[k]
        if not self.over[k] or any(some.blocks for some in self.shaped):
            return stage
        alike = {own: n for own, n in states_left(stage).items() if own not in written}
        same = {own: n for own, n in alike.items() if all(state[n].dtype == self.wide for state in states)}
        self.joined |= {own: self._as_stacks(n, states) for own, n in same.items()}
        return without(stage, same)

    def _as_stacks(self, name: str, states: list[dict[str, Tensor]]) -> list[Tensor]:
        """What the states have under a name as a stack of every shape, of which they are views from now on."""
        if name not in self.stacked:
            self.stacked[name] = []
            for some in self.shaped:
                leaves = [states[i][name] for i in some.places]
                self.stacked[name].append(trees.rows(leaves, some.counts))
                for i, x in zip(some.places, trees.divide(self.stacked[name][-1], leaves, some.counts), strict=True):
                    states[i][name] = x
        return self.stacked[name]

    def _rooms(self, kinds: Mapping[str, torch.dtype]) -> dict[str, list[Tensor]]:
        """A stack of every shape for everything that needs one, in as few places as there can be."""
        wholes = [c.output for stage in self.stages for c in stage.calls if function_of(c.which) is not None]
        names = {name: kinds.get(name, self.wide) for name in (*self._kept(), *wholes)}
        places = shared(self.stages, names)
        rooms = {name: self._room(kind) for name, kind in names.items() if places[name] == name}
        return {name: rooms[places[name]] for name in names} | self.joined

    def _room(self, kind: torch.dtype) -> list[Tensor]:
        """A stack for each shape."""
        like = self.held[0][0]
        return [like.new_empty(sum(some.counts), *some.shape, dtype=kind) for some in self.shaped]

    def _divided(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """What of the stacks is each parameter's, in their order."""
        pairs = zip(stacks, self.shaped, strict=True)
        return [x for stack, some in pairs for x in stack.split(some.counts)]

    def _gradients(self) -> list[Tensor]:
        return [layout.seen(g) if self.viewed else g for p, layout in self.held if (g := p.grad) is not None]

    # ---- stages ------------------------------------------------------------------------------------------------------

    def _lists(
        self, stage: Stage, states: list[dict[str, Tensor]], squares: bool
    ) -> tuple[ListProgram, Callable[[Rates], None]]:
        """A stage as a program over lists. squares: of what it makes."""
        names = [n for n, i in stage.program.inputs.items() if stage.program.shaped(i) and n != GRADIENT]
        kept = [n for n in names if n not in stage.rooms and n != PARAMETER]
        given, own = stage.rooms.get(GRADIENT), PARAMETER in names and PARAMETER not in stage.rooms
        theirs = [states[i] for some in self.shaped for i in some.places]
        stacks = given is not None and not own and not any(some.blocks for some in self.shaped)
        stacks = stacks and all(s[n].dtype == self.wide for s in theirs for n in kept)
        divided: Callable[[Sequence[Tensor]], list[Tensor]] = list if stacks else self._divided  # no leaf is asked
        tensors = {PARAMETER: self.inside, **{n: self._as_stacks(n, states) for n in kept if stacks}}
        tensors |= {n: divided(self.rooms[room]) for n, room in stage.rooms.items() if n != GRADIENT}
        fixed = stacks or any(some.blocks for some in self.shaped)
        moved = [n for n in kept if not fixed and n not in self.stacked]  # what is no view of a stack
        tensors |= {n: [s[n] for s in theirs] for n in kept if n not in (*moved, *tensors)}
        program = ListProgram(stage.program, tensors, theirs, moved, squares)

        def run(rates: Rates) -> None:
            if given is None:
                gradients = readable(self._gradients(), self.wide, program)
            else:
                gradients = divided(self.given[given])
            if own and self.shown:
                torch._foreach_copy_([x for _, x in self.shown], [p for p, _ in self.shown])
            program.step(gradients, rates)
            if own and self.shown:
                torch._foreach_copy_([p for p, _ in self.shown], [x for _, x in self.shown])

        return program, run

    def _blocks(self, k: int) -> Callable[[Rates], None]:
        """A stage over the blocks of every shape."""
        schedules = [Schedule(some.stages[k].program, keep=(GRADIENT,)) for some in self.shaped]
        names = self.stages[k].rooms

        def run(rates: Rates) -> None:
            for i, (some, schedule) in enumerate(zip(self.shaped, schedules, strict=True)):
                values = values_of(schedule.program, rates, self.held[0][0].device)
                stacks = {n: self.given[x][i] if x in self.given else self.rooms[x][i] for n, x in names.items()}
                first = 0
                for block in some.blocks:
                    end = first + block.shape[0]
                    rooms = {n: x[first:end] for n, x in stacks.items()}
                    if GRADIENT in rooms:
                        rooms[GRADIENT] = rooms[GRADIENT].to(self.wide)
                    block.run(schedule, values, rooms)
                    first = end

        return run


def _is_geometry(call: Call) -> bool:
    return not call.observes and function_of(call.which) is None


@final
class _Whole:
    """A function that is linear in stacks, given values of statistics."""

    def __init__(self, function: Any, call: Call, stacks: list[list[Tensor]], out: list[Tensor]) -> None:
        self.function, self.call, self.stacks, self.out = function, call, stacks, out

    def take(self, today: Today) -> None:
        """Its numbers are none of the step's."""

    def directions(self) -> list[Tensor]:
        for out, *given in zip(self.out, *self.stacks, strict=True):
            self.function.into(out, *given)
        return self.out


@final
class _Product:
    """A geometry over all stacks, those of about the same work beside each other."""

    def __init__(
        self,
        h: Geometry,
        call: Call,
        stacks: list[list[Tensor]],
        wide: torch.dtype,
        squares: list[Tensor] | None,
        whole: Whole,
    ) -> None:
        """stacks: of each argument, by shape."""
        self.form, self.call, self.wide, self.squares, self.whole = h, call, wide, squares, whole
        self.h: Geometry | None = None  # with plain numbers
        self.numbers: Tensor | None = None  # those that move, where what is recorded reads them
        self.sent: Sent  # there
        self.stacks, *self.others = stacks
        like = self.stacks[0]
        bound = sum(x.numel() for x in self.stacks) <= _HOST_BOUND
        recorded = generated.no_kernels(like.device) is None and bound and h.launches
        self.branches = self._branches(_BRANCHES if recorded else 1)
        self.directions: Callable[[], list[Tensor]] = self._here
        if recorded:
            self.directions = Replayed(self._here, self._in_branches)

    def take(self, today: Today) -> None:
        h = today.of(self.form)
        if isinstance(self.directions, Replayed) and self.h not in (None, h):
            moved = h.moving()
            if self.numbers is None or not moved:  # from now on they are read there
                self.directions.forget()
            if moved:
                if self.numbers is None:
                    device = self.stacks[0].device
                    self.numbers = torch.empty(len(moved), dtype=torch.float64, device=device)
                    self.sent = Sent(self.numbers)
                self.sent.send(moved)
        self.h = h

    def _branches(self, count: int) -> list[list[int]]:
        """Stacks in groups of about the same work."""
        branches: list[list[int]] = [[] for _ in range(min(count, len(self.stacks)))]
        for i in sorted(range(len(self.stacks)), key=lambda i: -self.stacks[i].numel()):
            min(branches, key=lambda branch: sum(self.stacks[j].numel() for j in branch)).append(i)
        return branches

    def _here(self) -> list[Tensor]:
        """The values of all stacks, in one dtype."""
        return self._alike(self._on([None] * len(self.branches)))

    def _in_branches(self) -> list[Tensor]:
        """The same, every branch on its stream."""
        now = torch.cuda.current_stream()
        streams = [now, *(torch.cuda.Stream() for _ in self.branches[1:])]
        for stream in streams[1:]:
            stream.wait_stream(now)
        out = self._on(streams)
        for stream in streams[1:]:
            now.wait_stream(stream)
        return self._alike(out)  # reads what every branch made

    def _on(self, streams: Sequence[torch.cuda.Stream | None]) -> list[Tensor]:
        assert self.h is not None
        out = list(self.stacks)
        for stream, branch in zip(streams, self.branches, strict=True):
            squares = None if self.squares is None else [self.squares[i] for i in branch]
            contexts = [context(self.h, [x[i] for x in self.others]) for i in branch]
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                some = [self.stacks[i] for i in branch]
                moving = {} if self.numbers is None else {"numbers": self.numbers}
                made = self.h.primals(some, contexts, self.wide, squares, self.whole.sides, **moving)
            for i, x in zip(branch, made, strict=True):
                out[i] = x
        return out

    def _alike(self, out: list[Tensor]) -> list[Tensor]:
        return out if len({x.dtype for x in out}) == 1 else [x.to(self.wide) for x in out]


__all__ = ["Around", "Shaped", "Whole"]
