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
from axes.optim.sharding.dtensors import local_shard
from axes.optim.sharding.exchange import Way
from axes.optim.sharding.member import Member, Owner
from axes.optim.sharding.merging import merge_layers
from axes.programs.program import PARAMETER

BUCKETS = 4  # parts of a group that travel while others are stepped, at most
LEAST = 25_000_000  # entries of a part from which another one travels in less time than it takes to launch


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
    """Whole parameters of one group, mesh and dtype on their way to their owners and back."""

    def __init__(self, group: Group, rule: StateUpdate, move: StateUpdate | None, members: list[Member]) -> None:
        """rule: what owners do. move: what every process then does to its shard; None where the rule does it all."""
        self.group, self.rule, self.move, self.members = group, rule, move, members
        exchange = members[0].exchange
        assert exchange is not None
        self.exchange = exchange
        self.way = Way(self.exchange, [h.part for h in members if h.part is not None])
        self.owned = [h for h in members if h.owned]
        dtype = members[0].shard.dtype
        self.dtype = torch.promote_types(dtype, torch.float32) if self.move is not None else dtype
        self.sent = dtype  # of gradients
        self._like = members[0].shard.new_empty(0, dtype=self.dtype)
        self._gradients: Callable[[], list[Tensor]] | None = None
        self._weights: Callable[[], list[Tensor]] | None = None
        self._results: Callable[[], list[Tensor]] | None = None
        self._moved: Moved | None = None

    def gather(self, gradients: bool = True, blank: bool = False) -> None:
        """Start to send gradients, and weights if the rule sees them, to their owners.

        blank: zeros in the place of gradients, which this process has not, or has in another form.
        """
        if blank:
            self._gradients = self.way.gather([h.shard.new_zeros(h.shard.shape, dtype=self.sent) for h in self.members])
        elif gradients:
            shards = [local_shard(h.parameter.grad, h.parameter.placements) for h in self.members]
            self.sent = shards[0].dtype
            self._gradients = self.way.gather(shards, self.dtype)
        if self.move is None:
            self._weights = self.way.gather([h.shard for h in self.members])

    def drop(self) -> None:
        """Nobody wants what travels; its memory is given back when it has arrived."""
        for arrived in (self._gradients, self._weights):
            if arrived is not None:
                arrived()
        self._gradients = self._weights = None

    def arrive(self, optimizer: Owner) -> None:
        """Lay what has arrived into the stand-ins; where the rule does not see the weights they are zero."""
        weights = None if self._weights is None else self._weights()
        gradients = None if self._gradients is None else self._gradients()
        self._weights = self._gradients = None
        for held in self.owned:
            held.stand(self.dtype)
        stand_ins = [held.stand_in for held in self.owned]
        if stand_ins and weights is None:
            torch._foreach_zero_(stand_ins)
        elif stand_ins and weights is not None:
            torch._foreach_copy_(stand_ins, weights)
        if gradients is not None:
            for stand_in, gradient in zip(stand_ins, gradients, strict=True):
                stand_in.grad = gradient
        if gradients is not None and needs_layers(self.rule):
            for held in self.members:
                merge_layers(optimizer, self.exchange, held)

    def scatter(self) -> None:
        self._results = self.way.scatter([h.stand_in for h in self.owned], self._like)

    def finish(self, optimizer: Owner) -> None:
        assert self._results is not None
        results, self._results = self._results(), None
        self.name_states(optimizer)
        shards = [h.shard for h in self.members]
        if self.move is None:
            torch._foreach_copy_(shards, results)
            return
        today = optimizer._today(self.group)
        numbers = {name: rate(self.group, name) for name in facts(self.move, True).rates}
        if self._moved is None:
            self._moved = Moved(self.move, shards, self.dtype)
        self._moved.step(results, numbers | {**today.numbers})

    def name_states(self, optimizer: Owner) -> None:
        """Others than the owner know the names of a state."""
        for held in self.members:
            if not held.owned and not optimizer.state.get(held.parameter):
                names = optimizer.expected_state(optimizer.form_for(self.group), held.parameter)
                held.hide({name: self._like.new_empty(0) for name in names})
                optimizer.state[held.parameter] = held.shown

    def release(self, optimizer: Owner) -> None:
        self._weights = self._gradients = self._results = None  # left over where a step has failed
        for held in self.owned:
            held.stand_in.grad = None
        layers = getattr(optimizer, "_layers", None)
        if layers is not None:
            for held in self.owned:
                layers.found.pop(held.stand_in, None)
