"""A step on a CPU that goes the way of the last one: only what can have changed since is asked.

Where every batch is a loop of C (`loops`), the host's way to them takes as long as the arithmetic. Who may step, by
which loop and with which state was found out at the last step; what a user can have changed is compared with what it
was then, numbers are made anew where they move, and one call of the loop looks at the gradients and steps. Where
anything is otherwise, nothing has moved, and the step takes the general way, which is the meaning: it also says whose
gradient is not finite.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from axes.optim.engine.batch import Batch
from axes.optim.engine.batches import Batches, way
from axes.optim.engine.facts import facts
from axes.optim.engine.forms import Group, Today
from axes.optim.engine.generated import GRADIENT
from axes.optim.engine.gradients import Gradients
from axes.optim.engine.groups import rates_of
from axes.optim.engine.kept import State
from axes.programs import c_library
from axes.programs.batched import Schedule
from axes.programs.c_entries import LOOK, STEP, Loop

_GRAD = operator.attrgetter("grad")


@final
class Straight:
    """All groups of an optimizer, whose batches are loops of C."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        self.groups = groups
        self.dicts = [some.group for some in groups]
        self.parts = [part for some in groups for part in some.parts]

    @staticmethod
    def after(groups: Sequence[Group], todays: Mapping[int, Today], batches: Batches) -> Straight | None:
        """After a step of these batches in the general way; None where one of them was no loop."""
        every = [batch for *_, some in batches.made.values() for batch in some]
        if not all(batch.entries is not None and batch.entries.how == "host" for batch in every):
            return None
        found = [_Group.after(group, todays[id(group)], batches) for group in groups]
        made = [some for some in found if some is not None]
        return Straight(made) if len(made) == len(groups) and any(some.parts for some in made) else None

    def step(
        self,
        groups: Sequence[Group],
        today: Callable[[Group], Today],
        state: Mapping[Tensor, State],
        looks: bool,
    ) -> bool:
        """One datum for every parameter. False where it must go the general way, or a gradient is not finite where
        somebody `looks`: nothing has moved."""
        if len(groups) != len(self.dicts) or not all(map(operator.is_, groups, self.dicts)) or c_library.followed():
            return False
        if not all(some.is_ready(today(some.group), state) for some in self.groups):
            return False
        if looks and len(self.parts) == 1:
            if self.parts[0].loop(LOOK | STEP):
                return False
        else:
            if looks and any(part.loop(LOOK) for part in self.parts):
                return False
            for part in self.parts:
                part.loop(STEP)
        for part in self.parts:
            part.has_moved()
        return True


@final
class _Group:
    """A group as it was at the last step, and its batches."""

    def __init__(self, group: Group, today: Today, idle: list[Tensor], parts: Sequence[_Part]) -> None:
        """idle: parameters without a gradient."""
        self.group, self.form, self.idle, self.parts = group, today.form, idle, parts
        self.way, self.parameters = way(group), list(group["params"])
        self.names = _asked(group, today)
        self.last: list[Any] = []  # what the rates are made of, if none of it can change where it is

    @staticmethod
    def after(group: Group, today: Today, batches: Batches) -> _Group | None:
        update, made_for, made = batches.made.get(id(group), (None, None, ()))
        idle = [p for p in group["params"] if p.grad is None]
        empty = sum(p.grad is not None and not p.numel() for p in group["params"])
        if len(idle) + empty == len(group["params"]):
            return _Group(group, today, idle, ())
        stepped = sum(len(batch.parameters) for batch in made) + len(idle) + empty
        if update is not today.form.update or made_for != way(group) or stepped != len(group["params"]):
            return None
        rates = _floats(group, _asked(group, today), today)
        parts = [_Part.of(batch, rates) for batch in made]
        some = [part for part in parts if part is not None]
        return _Group(group, today, idle, some) if len(some) == len(parts) else None

    def is_ready(self, today: Today, state: Mapping[Tensor, State]) -> bool:
        """Whether its loops have all they need for this step."""
        parameters = self.group["params"]
        if len(parameters) != len(self.parameters) or not all(map(operator.is_, parameters, self.parameters)):
            return False
        if today.form is not self.form or way(self.group) != self.way:
            return False
        if not all(map(operator.is_, map(_GRAD, self.idle), itertools.repeat(None))):
            return False
        now = [today, self.group["lr_scale"], *map(self.group.__getitem__, self.names)]
        rates = None
        if len(now) != len(self.last) or not all(map(operator.is_, now, self.last)):
            rates = _floats(self.group, self.names, today)
            self.last = now if all(type(x) is float for x in now[1:]) else []
        return all(part.is_ready(rates, state) for part in self.parts)


@final
class _Part:
    """A batch that steps by one loop, with the numbers that it was given last."""

    def __init__(self, batch: Batch, schedule: Schedule, loop: Loop) -> None:
        assert batch.entries is not None and batch.entries.lists.loops is not None
        self.batch, self.entries, self.loops = batch, batch.entries, batch.entries.lists.loops
        self.schedule, self.loop, self.row = schedule, loop, schedule.names.index(GRADIENT)
        self.rates: Mapping[str, float] = {}  # none yet
        self.values: Sequence[Any] = ()
        self.moves = bool(self.entries.numbers.counted or self.entries.numbers.names)  # numbers, whatever the rates

    @staticmethod
    def of(batch: Batch, rates: Mapping[str, float]) -> _Part | None:
        """None where the last step was no loop of C, or one that looks at no gradient."""
        if batch.entries is None or batch.entries.lists.loops is None:
            return None
        schedule = batch.entries.scheduled(rates)
        loop = batch.entries.lists.loops.made.get((schedule, False))
        return None if loop is None or GRADIENT not in schedule.names else _Part(batch, schedule, loop)

    def is_ready(self, rates: Mapping[str, float] | None, state: Mapping[Tensor, State]) -> bool:
        """Whether the loop has all that it needs for this step. rates: if they may be others."""
        gradients = Gradients(map(_GRAD, self.batch.parameters))
        if not self.loops.takes(gradients) or not self.batch.stay(state):
            return False
        if rates is not None:
            if self.entries.scheduled(rates) is not self.schedule:
                return False
            self.rates = rates
        if rates is not None or self.moves:
            self.values = self.entries.numbers.of(self.schedule.program, self.entries.numbers.given(self.rates))
            numbers = self.loops.numbers(self.schedule, self.values)
            if len(numbers) != self.loop.numbers:
                return False
            self.loop.give(numbers)
        self.loop.put(self.row, gradients.places)
        return True

    def has_moved(self) -> None:
        """What else a datum changes: the count of entries, versions that graphs have noted, numbers of the state."""
        self.loops.seen += self.loops.total
        self.loops.has_moved()
        self.entries.numbers.counts.add_(1)
        self.entries.numbers.take(self.schedule.program, self.values)


def _asked(group: Group, today: Today) -> tuple[str, ...]:
    return facts(today.form.update, group["maximize"]).rates


def _floats(group: Group, asked: Sequence[str], today: Today) -> dict[str, float]:
    return {name: float(x) for name, x in rates_of(group, asked, today).items()}


__all__ = ["Straight"]
