"""Statistics of rows and columns, whose values are held: averages of products, and the roots or bases made of them.

They are the interpreter's own, name by name, over stacks: a product is added where its statistic is kept, in one pass,
and what is due is computed together, for small ones of one size of all shapes and sides at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from axes.core import execution
from axes.core.algorithms import Held
from axes.core.costs import Linear
from axes.core.geometry import Eigenbasis, InverseRoot
from axes.core.monoids import Identity, Scalar
from axes.core.state_update import State, StateUpdate
from axes.linalg.blockwise import symmetric_sum
from axes.optim.engine import trees
from axes.optim.engine.apart import Link
from axes.optim.engine.blocks import BLOCK
from axes.programs.numbers import as_float
from axes.programs.stages import Call

if TYPE_CHECKING:
    from axes.optim.engine.forms import Today

_TOGETHER = 1024  # statistics up to this size do not fill a GPU: those of all shapes are refreshed as one batch


class Average(NamedTuple):
    """What a statistic does with numbers of the step: x <- keep x + rate u."""

    keep: float
    rate: float


def average(part: StateUpdate) -> Average | None:
    """The numbers of a statistic whose root or basis is held, or None if it is something else."""
    cost, h, monoid, step, memory = part.parts()
    plain = isinstance(cost, Linear) and cost.of in ("left", "right") and not cost.raw
    plain = plain and isinstance(step.at, Held) and isinstance(h, InverseRoot | Eigenbasis)
    plain = plain and memory.kind == "parameter" and isinstance(monoid, Identity | Scalar) and not step.via
    plain = plain and step.read is None and step.lazy and step.start == "zero" and step.steps == 1
    keep = monoid.gate if isinstance(monoid, Scalar) else 1.0
    if not plain or not isinstance(keep, float) or not isinstance(step.rate, int | float) or keep == 0:
        return None
    return Average(keep, as_float(step.rate))


@final
class Statistics:
    """Statistics of all stacks of matrices that have seen the same data."""

    def __init__(
        self,
        links: Mapping[str, Link],
        shapes: Sequence[tuple[list[int], list[int]]],
        states: Sequence[dict[str, Tensor]],
    ) -> None:
        """links: by the names that calls have. shapes: of every stack the places of its members, and how many matrices
        each is. states: of all members, flat; what they have of statistics becomes views of stacks."""
        self.links, self.today = links, {which: link.update for which, link in links.items()}
        self.kept = {which: [_stacked(link.prefix, *some, states) for some in shapes] for which, link in links.items()}
        self.ages = {which: states[0][link.prefix + trees.COUNT] for which, link in links.items()}

    def take(self, today: Today) -> None:
        self.today = {which: today.of(link.update) for which, link in self.links.items()}

    def values(self, which: str) -> list[Tensor]:
        """What a statistic holds, of every stack."""
        return [kept[trees.HELD] for kept in self.kept[which]]

    def observe(self, drives: Mapping[str, Sequence[Tensor]]) -> None:
        """These statistics of every stack take their drives; what they hold is computed when it is time."""
        ages = {which: int(self.ages[which]) for which in drives}
        due = {which: _held(self.today[which]) for which in drives}
        self._refresh({which: age for which, age in ages.items() if due[which].before(age)})
        for which, stacks in drives.items():
            cost, kept = self.today[which].cost, average(self.today[which])
            assert isinstance(cost, Linear) and kept is not None
            for own, drive in zip(self.kept[which], stacks, strict=True):
                _take(own["theta"], cost, kept, drive)
                if "norm" in own:
                    own["norm"].mul_(kept.keep).add_(kept.rate)
        self._refresh({which: age for which, age in ages.items() if due[which].after(age)})

    def _refresh(self, ages: Mapping[str, int]) -> None:
        """Compute what statistics hold."""
        alike: dict[Any, tuple[StateUpdate, int, list[dict[str, Tensor]]]] = {}
        for which, age in ages.items():
            statistic = self.today[which]
            _, h, _, step, _ = statistic.parts()
            for stack, own in enumerate(self.kept[which]):
                size = own["theta"].shape[-1]
                key = (h, step, age, size) if size <= _TOGETHER else (which, stack)
                alike.setdefault(key, (statistic, age, []))[-1].append(own)
        for statistic, age, every in alike.values():
            for states in _passes(every):
                _compute(statistic, age, states)


def _compute(statistic: StateUpdate, age: int, states: list[dict[str, Tensor]]) -> None:
    """What statistics of one size hold, from what they are now."""
    joined = {n: torch.cat([s[n] for s in states]) if len(states) > 1 else states[0][n] for n in states[0]}
    norm = (joined["norm"],) if "norm" in joined else ()
    held = (joined[trees.HELD], joined[trees.MISSES])
    state = State((joined["theta"],), (), (), norm, held, torch.tensor(age))
    new = execution.refreshed(statistic.parts(), state, state.theta, norm, {})
    lengths = [len(s[trees.HELD]) for s in states]
    for s, value, missed in zip(states, *(x.split(lengths) for x in new), strict=True):
        s[trees.HELD].copy_(value)
        s[trees.MISSES].copy_(missed)


def _passes(states: list[dict[str, Tensor]]) -> Iterator[list[dict[str, Tensor]]]:
    """Statistics of one size as they are computed: on a CPU no more at once than what stays in cache."""
    theta = states[0]["theta"]
    if not theta.is_cpu:
        yield states
        return
    room = most = max(1, BLOCK // theta[0].numel())
    some: list[dict[str, Tensor]] = []
    for state in states:
        first, count = 0, len(state["theta"])
        while first < count:
            end = min(count, first + room)
            some.append({n: x[first:end] for n, x in state.items()})
            room, first = room - (end - first), end
            if not room:
                yield some
                some, room = [], most
    if some:
        yield some


def given(calls: Sequence[Call], stacks: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """The drives of the statistics among some calls."""
    return {call.which: stacks[call.inputs[0]] for call in calls if call.observes}


def _stacked(
    prefix: str, places: list[int], counts: list[int], states: Sequence[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """What the members of a stack keep of a statistic."""
    kept: dict[str, Tensor] = {}
    names = [n for n in states[places[0]] if n.startswith(prefix) and not trees.counts(n)]
    for name in names:
        own = [states[i][name] for i in places]
        whole = kept[name.removeprefix(prefix)] = trees.rows(own, counts)
        for i, x in zip(places, trees.divide(whole, own, counts), strict=True):
            states[i][name] = x
    return kept


def _held(statistic: StateUpdate) -> Held:
    at = statistic.parts().step.at
    assert isinstance(at, Held)
    return at


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


__all__ = ["Average", "Statistics", "average", "given"]
