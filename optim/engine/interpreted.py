"""Steps that execute the tuple: on one parameter, on those of one shape together, or on one example after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from axes.core.rates import SEEN
from axes.core.state_update import Output, State, StateUpdate
from axes.optim.engine import stored, trees
from axes.optim.engine.groups import rates
from axes.optim.engine.options import Group
from axes.optim.engine.places import Places
from axes.optim.engine.precision import Precision
from axes.optim.engine.routing import real
from axes.optim.engine.states import Flat, counts, first, read, require_inside, show


@final
class Member:
    """A parameter with its state, as a group's tuple sees it and as it is kept.

    ticks: None where its counts are on the host; elsewhere what they say, so that nobody waits for them: empty until
    they are read once.
    """

    def __init__(
        self,
        places: Places,
        group: Group,
        update: StateUpdate,
        parameter: Tensor,
        kept: Flat,
        ticks: dict[str, int] | None,
    ) -> None:
        self._places, self._group, self._update = places, group, update
        self._parameter, self._kept, self._ticks = parameter, kept, ticks
        self.layout = places.layout(parameter)

    @property
    def forms(self) -> tuple[tuple[str, str], ...]:
        """What its state is stored in."""
        return tuple(sorted(stored.forms_of(self._kept).items()))

    @property
    def seen(self) -> Tensor | None:
        """How many data came before, where only the device knows: a step that it called off was none."""
        return None if self._ticks is None else self._kept[trees.COUNT].to(torch.float64)

    def open(self, datum: Mapping[str, Any]) -> State:
        """The state as the tuple sees it."""
        flat = self._kept
        if self._ticks is not None:
            if not self._ticks:
                self._ticks.update(counts(flat))
            flat = {**flat, **{n: torch.tensor(x) for n, x in self._ticks.items()}}
        try:
            return read(self._update, self._parameter, flat, self.layout)
        except KeyError:  # a scheduled hyperparameter has turned a part of the tuple on
            require_inside(self._places, self._update, self._parameter)
            begun = first(self._update, self._parameter, datum, self.layout)
            return read(self._update, self._parameter, {**begun, **flat}, self.layout)

    def close(self, state: State, out: Output) -> None:
        """Keep what the tuple has left, and show the weights."""
        flat = stored.closed(trees.flatten(self._update, state), self._kept)
        if self._ticks is None:
            self._kept.update(flat)
        else:
            self._ticks.clear()
            self._ticks.update(counts(flat))
            self._write(flat)
        precision = Precision.of(self._group)
        if precision.plain:
            show(self._parameter, out.weights[0], self.layout)
            return
        target, random = real(self._parameter), None
        if precision.draws(self._parameter):
            random = (self._kept[trees.COUNT], self._places.stream(self._parameter), precision.seed)
        stored.write(target, out.weights[0].reshape(target.shape), self._kept, random)

    def _write(self, flat: Flat) -> None:
        """Where a captured step will look for it again."""
        for name, x in flat.items():
            if name not in self._kept:
                self._kept[name] = x.to(self._parameter.device)
            elif trees.counts(name):
                self._kept[name].add_(1)
            else:
                self._kept[name].copy_(x)


def interpret(group: Group, update: StateUpdate, members: Iterable[tuple[Member, dict[str, Tensor]]]) -> None:
    """One datum for every parameter, for those of one shape at a time unless foreach is off."""
    batches: dict[Any, list[tuple[Member, State, dict[str, Tensor]]]] = {}
    for index, (member, datum) in enumerate(members):
        state, g = member.open(datum), datum["g"]
        shapes = tuple(x.shape for x in datum.values())
        alike = (shapes, g.dtype, g.device, int(state.count)) if group["foreach"] else index
        batches.setdefault((alike, member.forms), []).append((member, state, datum))
    # a device works longest on the largest, which come first: meanwhile the host prepares the small ones
    for batch in sorted(batches.values(), key=lambda batch: -len(batch) * batch[0][2]["g"].numel()):
        given = rates(group, update, batch[0][2]["g"])
        if update.parts().counts and (seen := batch[0][0].seen) is not None:
            given[SEEN] = seen
        if len(batch) == 1:
            member, state, datum = batch[0]
            member.close(*update.step(state, {**datum, **given}))
            continue
        stacked = {name: torch.stack([datum[name] for _, _, datum in batch]) for name in batch[0][2]}
        state, out = update.step(trees.stack([state for _, state, _ in batch]), {**stacked, **given})
        for i, (member, _, _) in enumerate(batch):
            member.close(trees.unstack(state, i), Output((out.weights[0][i],)))


def replay(group: Group, update: StateUpdate, member: Member, examples: Mapping[str, Tensor]) -> None:
    """Feed the examples of a layer one after another."""
    given = rates(group, update, examples["k"])
    state: State | None = None
    out: Output | None = None
    for k, v in zip(examples["k"], examples["v"], strict=True):
        datum = {**given, "k": k, "v": v}
        state, out = update.step(member.open(datum) if state is None else state, datum)
    if state is not None and out is not None:
        member.close(state, out)
