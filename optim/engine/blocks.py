"""A stack of matrices of one shape, with their states: what a program or the tuple itself steps at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.optim.engine import trees
from axes.optim.engine.generated import GRADIENT
from axes.optim.engine.groups import beside
from axes.optim.engine.layouts import Layout
from axes.programs.batched import Schedule
from axes.programs.program import PARAMETER

BLOCK = 1 << 17  # entries of a stack whose step stays in cache (measured, CPUs)
NO_ROOMS: Mapping[str, Tensor] = MappingProxyType({})


@final
class Block:
    """A stack of matrices: their parameters where they are, or in a room for them while a step lasts."""

    def __init__(
        self,
        members: list[tuple[Tensor, dict[str, Tensor], Layout]],
        shape: tuple[int, int, int],
        wide: torch.dtype,
        numbers: Sequence[str],
    ) -> None:
        """numbers: by name, what of the states is none of the stack's."""
        self.shape, self.wide = shape, wide
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
        self.room: tuple[Tensor, list[Tensor]] | None = None  # for gradients
        own = self._whole(self.shown)
        if own is None:
            own, self.inside = self._room()
        self.weights = own
        self.lists = {PARAMETER: [own], **{n: [x] for n, x in self.kept.items()}}

    def run(self, schedule: Schedule, values: Sequence[Any], rooms: Mapping[str, Tensor] = NO_ROOMS) -> None:
        """One datum by a program, given its numbers. rooms: what stands for other tensors than the members' own."""
        own = PARAMETER not in rooms
        lists = {**self.lists, **{n: [x] for n, x in rooms.items()}}
        if own and self.inside:
            torch._foreach_copy_(self.inside, self.shown)
        if GRADIENT in schedule.names and GRADIENT not in rooms:
            lists[GRADIENT] = [self._gradients()]
        schedule.run([lists[n] for n in schedule.names], values)
        if own:
            self._leave()

    def interpret(
        self, update: StateUpdate, counts: Mapping[str, Tensor], rates: Mapping[str, Any], maximize: bool
    ) -> None:
        """One datum by the tuple."""
        if self.inside:
            torch._foreach_copy_(self.inside, self.shown)
        g = self._gradients()
        given = {per.name: beside(rates[per.name], g) for per in update.demands()}
        state = trees.unflatten(update, {**self.kept, **counts}, self.weights)
        state, out = update.step(state, {GRADIENT: -g if maximize else g, **given})
        after = trees.flatten(update, state)
        if self.kept:
            torch._foreach_copy_(list(self.kept.values()), [after[n] for n in self.kept])
        self.weights.copy_(out.weights[0])
        self._leave()

    def _gradients(self) -> Tensor:
        """The gradients as a stack."""
        gradients = [layout.seen(p.grad) for p, layout in self.held if p.grad is not None]
        whole = self._whole(gradients)
        if whole is None:
            self.room = self.room or self._room()
            whole = self.room[0]
            torch._foreach_copy_(self.room[1], gradients)
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


__all__ = ["BLOCK", "Block"]
