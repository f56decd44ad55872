"""Whole parameters on their way to the processes that own them, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.optim.engine.capabilities import needs_layers
from axes.optim.engine.facts import facts
from axes.optim.engine.groups import rate
from axes.optim.engine.lists import ListProgram, writable
from axes.optim.engine.options import Group
from axes.optim.engine.together import program
from axes.optim.sharding.exchange import ToOwners, ToShards, Way
from axes.optim.sharding.member import Member, Owner
from axes.optim.sharding.merging import merge_layers
from axes.optim.sharding.met import gradients_of
from axes.programs.program import PARAMETER

BUCKETS = 4  # parts of a group that travel while others are stepped, at most
LEAST = 60_000_000  # entries of a part from which another one travels in less time than it takes to launch


def alike(members: Iterable[Member], gradients: bool = True) -> list[list[Member]]:
    """Members that can travel together."""
    found: dict[Any, list[Member]] = {}
    for held in members:
        sent = held.parameter.grad.dtype if gradients else None
        found.setdefault((held.exchange, held.parameter.dtype, sent), []).append(held)
    return list(found.values())


def buckets(members: list[Member]) -> Iterator[list[Member]]:
    """Members in parts of about one size, those of one shape together: while one is stepped, others travel."""
    shapes: dict[tuple[int, int], list[Member]] = {}
    for held in members:
        shapes.setdefault(held.shape, []).append(held)
    total = sum(math.prod(shape) * len(some) for shape, some in shapes.items())
    count = max(1, min(BUCKETS, total // LEAST))
    bucket: list[Member] = []
    size = 0
    for shape, some in shapes.items():
        bucket, size = bucket + some, size + math.prod(shape) * len(some)
        if size * count >= total:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


@final
class Moved:
    """Shards that are moved along directions, by the program that follows the products on one process."""

    def __init__(self, move: StateUpdate, shards: list[Tensor], wide: torch.dtype) -> None:
        self.places = [i for i, x in enumerate(shards) if x.numel()]
        seen = [shards[i] for i in self.places]
        inside = [writable(x, wide) for x in seen]
        pairs = [(x, y) for x, y in zip(seen, inside, strict=True) if x.data_ptr() != y.data_ptr()]
        self.shown, self.inside = [x for x, _ in pairs], [y for _, y in pairs]  # what is moved as a copy
        found = program(move, True)
        assert found is not None
        self.program = ListProgram(found, {PARAMETER: inside}) if inside else None

    def step(self, directions: list[Tensor], rates: Mapping[str, float | Tensor]) -> None:
        if self.program is None:
            return
        if self.inside:
            torch._foreach_copy_(self.inside, self.shown)
        self.program.step([directions[i] for i in self.places], rates)
        if self.inside:
            torch._foreach_copy_(self.shown, self.inside)


@final
class Job:
    """Whole parameters of one group, mesh and dtype on their way to their owners and back.

    Where weights stay with the shards, a job keeps its memory: an owner's gradients stand where messages are sent, the
    stand-ins, with the directions, where they arrive. All addresses stay, which kernels and graphs note. Else each
    message has memory of its own, for a step.
    """

    def __init__(self, group: Group, rule: StateUpdate, move: StateUpdate | None, members: list[Member]) -> None:
        """rule: what owners do. move: what every process then does to its shard; None where the rule does it all."""
        self.group, self.rule, self.move, self.members = group, rule, move, members
        exchange = members[0].exchange
        assert exchange is not None
        self.exchange = exchange
        self.way = Way(self.exchange, [h.part for h in members if h.part is not None])
        self.owned = [h for h in members if h.owned]
        self.shards = [h.shard for h in members]
        dtype = self.shards[0].dtype
        self.dtype = torch.promote_types(dtype, torch.float32) if self.move is not None else dtype
        self.sent = dtype  # of gradients
        self._near: Tensor | None = None
        self._far: Tensor | None = None
        self._there: ToOwners | None = None
        self._back: ToShards | None = None
        self._gradients: Callable[[], list[Tensor]] | None = None
        self._weights: Callable[[], list[Tensor]] | None = None
        self._results: Callable[[], list[Tensor]] | None = None
        self._moved: Moved | None = None

    def gather(self, gradients: bool = True, blank: bool = False) -> None:
        """Start to send gradients, and weights if the rule sees them, to their owners.

        blank: zeros in the place of gradients, which this process has not, or has in another form.
        """
        if gradients:
            if blank:
                shards = [x.new_zeros(x.shape, dtype=self.sent) for x in self.shards]
            else:
                shards = gradients_of(self.members)
                self.sent = shards[0].dtype
            if self._there is None:
                self._near, self._far = self._memory(), self._memory()
                self._there = ToOwners(self.way, self._near, self._far, self.sent, self.dtype)
            self._gradients = self._there.start(shards)
        if self.move is None:
            there = ToOwners(self.way, self._memory(), self._memory(), self.dtype, self.dtype)
            self._weights = there.start(self.shards)

    def _memory(self) -> Tensor:
        """Bytes for what of the parameters is at this process at once."""
        return self.shards[0].new_empty(self.way.room(self.dtype, self.sent), dtype=torch.uint8)

    def receive(self) -> None:
        """Put gradients together as they arrive, before anybody knows whether they are wanted."""
        if self._gradients is not None:
            wholes = self._gradients()
            self._gradients = lambda: wholes

    def drop(self) -> None:
        """Nobody wants what travels; its memory is given back when it has arrived."""
        for arrived in (self._gradients, self._weights):
            if arrived is not None:
                arrived()
        self._gradients = self._weights = None

    def arrive(self, optimizer: Owner) -> None:
        """Lay what has arrived into the stand-ins; where the rule does not see the weights they are zero."""
        gradients = None if self._gradients is None else self._gradients()
        weights = None if self._weights is None else self._weights()
        self._weights = self._gradients = None
        if weights is not None:
            for held in self.owned:
                held.stand_by(self.dtype)
            if self.owned:
                torch._foreach_copy_([held.stand_in for held in self.owned], weights)
        elif self.owned:
            if self._back is None:  # nobody has stood there before
                self._far = self._memory() if self._far is None else self._far
                for held, x in zip(self.owned, self.way.wholes(self._far, self.dtype), strict=True):
                    held.stand(x)
            assert self._far is not None
            self._far.zero_()
        if gradients is not None:
            for held, gradient in zip(self.owned, gradients, strict=True):
                held.stand_in.grad = gradient
        if gradients is not None and needs_layers(self.rule):
            for held in self.members:
                merge_layers(optimizer, self.exchange, held)

    def scatter(self) -> None:
        if self._back is None:
            assert self._near is not None and self._far is not None
            self._back = ToShards(self.way, [h.stand_in for h in self.owned], self._near, self._far, self.dtype)
        self._results = self._back.start()

    def finish(self, optimizer: Owner) -> None:
        assert self._results is not None
        results, self._results = self._results(), None
        self.name_states(optimizer)
        if self.move is None:
            torch._foreach_copy_(self.shards, results)
            return
        today = optimizer._today(self.group)
        numbers = {name: rate(self.group, name) for name in facts(self.move, True).rates}
        if self._moved is None:
            self._moved = Moved(self.move, self.shards, self.dtype)
        self._moved.step(results, numbers | {**today.numbers})

    def name_states(self, optimizer: Owner) -> None:
        """Others than the owner know the names of a state."""
        for held in self.members:
            if not held.owned and not optimizer.state.get(held.parameter):
                names = optimizer.expected_state(optimizer.form_for(self.group), held.parameter)
                held.hide({name: held.shard.new_empty(0, dtype=self.dtype) for name in names})
                optimizer.state[held.parameter] = held.shown

    def release(self, optimizer: Owner) -> None:
        self._weights = self._gradients = self._results = None  # left over where a step has failed
        if self.move is None:
            self._near = self._far = self._there = self._back = None
        for held in self.owned:
            held.stand_in.grad = None
        layers = getattr(optimizer, "_layers", None)
        if layers is not None:
            for held in self.owned:
                layers.found.pop(held.stand_in, None)
