"""What was found out about the parameters of an optimizer, for as long as they are as they were."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.optim.engine.options import Group
from axes.optim.sharding.dtensors import local_shard, local_shards, places_of
from axes.optim.sharding.member import Member


class Parts(NamedTuple):
    """Parameters by the way they step: as they are, by their shards, or whole."""

    others: list[Tensor]
    local: list[Member]
    gathered: list[Member]


class Sorted(NamedTuple):
    """Parameters of a group, and what they are."""

    parameters: list[Tensor]
    parts: Parts


@final
class Met:
    """The tuples and parameters of all groups, and where the shards are."""

    def __init__(self, updates: list[StateUpdate], groups: Sequence[Group], spread: list[Tensor]) -> None:
        """spread: those that are DTensors."""
        self.updates, self.spread = updates, spread
        self.parameters = [list(group["params"]) for group in groups]
        self.shards = local_shards(spread)
        self.addresses = list(map(Tensor.data_ptr, self.shards))

    def holds(self, updates: list[StateUpdate], groups: Sequence[Group]) -> bool:
        """Whether they are the same, where they were."""
        if not same(self.updates, updates) or len(groups) != len(self.parameters):
            return False
        if not all(same(known, group["params"]) for known, group in zip(self.parameters, groups, strict=True)):
            return False
        shards = local_shards(self.spread)
        return same(self.shards, shards) and list(map(Tensor.data_ptr, shards)) == self.addresses


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the very same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def dtypes_of(members: Sequence[Member]) -> list[torch.dtype]:
    """Of gradients."""
    return [held.parameter.grad.dtype for held in members]


def in_place(members: Sequence[Member]) -> bool:
    """Whether gradients are placed as their parameters are."""
    parameters: list[Any] = [held.parameter for held in members]
    return places_of([p.grad for p in parameters]) == places_of(parameters)


def gradients_of(members: Sequence[Member]) -> list[Tensor]:
    """Shards of gradients, placed as their parameters are."""
    if in_place(members):
        return local_shards([held.parameter.grad for held in members])
    return [local_shard(held.parameter.grad, held.parameter.placements) for held in members]


__all__ = ["Met", "Parts", "Sorted", "dtypes_of", "gradients_of", "in_place", "same"]
