"""Small tensors stepped as one: an operation on a thousand of them takes a hundred times as long as on their sum.

Tensors that lie one behind the other are one already; others are copied to a room before a step and back after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

SMALL = 4096  # entries up to which copies there and back cost less than operations of a tensor's own (measured, CPUs)
_FEW = 4  # tensors that are not worth it


def small(sizes: Sequence[int]) -> bool:
    """Whether contiguous tensors of these sizes are better stepped as one."""
    return len(sizes) > _FEW and max(sizes) <= SMALL


def flat(tensors: Sequence[Tensor]) -> Tensor | None:
    """The flat tensor that contiguous tensors are the parts of, if they lie one behind the other in memory."""
    first = tensors[0]
    end, size, storage = first.data_ptr(), first.element_size(), first.untyped_storage().data_ptr()
    for x in tensors:
        if x.data_ptr() != end or not x.is_contiguous():
            return None
        end += x.numel() * size
    if tensors[-1].untyped_storage().data_ptr() != storage:  # neighbours by chance
        return None
    return first.as_strided((sum(x.numel() for x in tensors),), (1,), first.storage_offset())


def parts(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor in the shapes of other tensors."""
    pieces = whole.split([x.numel() for x in like])
    return [piece.view(x.shape) for piece, x in zip(pieces, like, strict=True)]


def behind_one_another(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors that are the parts of a flat one."""
    return parts(torch.cat([x.reshape(-1) for x in tensors]), tensors)


@final
class Rooms:
    """Tensors of others, each list with a flat tensor that stands for it while a step lasts."""

    def __init__(self) -> None:
        self.outside: list[Tensor] = []
        self.inside: list[Tensor] = []

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The flat tensor of a list: its own where it has one."""
        own = flat(tensors)
        if own is not None:
            return own
        room = torch.cat([x.reshape(-1) for x in tensors])
        self.outside += tensors
        self.inside += parts(room, tensors)
        return room

    def enter(self) -> None:
        """Before a step."""
        if self.outside:
            torch._foreach_copy_(self.inside, self.outside)

    def leave(self) -> None:
        """After it."""
        if self.outside:
            torch._foreach_copy_(self.outside, self.inside)


@final
class Guest:
    """A room for lists that come anew with every step and are read only: gradients."""

    def __init__(self) -> None:
        self.room: Tensor | None = None
        self.inside: list[Tensor] = []

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The flat tensor of a list, copied unless it has one. Lists have the same shapes every time."""
        own = flat(tensors)
        if own is not None:
            return own
        if self.room is None or self.room.dtype != tensors[0].dtype:
            self.room = tensors[0].new_empty(sum(x.numel() for x in tensors))
            self.inside = parts(self.room, tensors)
        torch._foreach_copy_(self.inside, list(tensors))
        return self.room


@final
class Joined:
    """Blocks of lists that a program steps as one tensor a list."""

    def __init__(self, lists: Mapping[str, list[list[Tensor]]], blocks: Iterable[int]) -> None:
        """lists: by name, those of every block, which are changed where a block is one of these."""
        self.rooms = Rooms()
        self.guests = {b: Guest() for b in blocks}
        for b in self.guests:
            for some in lists.values():
                some[b] = [self.rooms.of(some[b])]

    def enter(self, gradients: list[list[Tensor]]) -> None:
        """Before a step, with the gradients of every block, which are changed likewise."""
        for b, guest in self.guests.items():
            gradients[b] = [guest.of(gradients[b])]
        self.rooms.enter()

    def leave(self) -> None:
        """After it."""
        self.rooms.leave()


__all__ = ["SMALL", "Guest", "Joined", "Rooms", "behind_one_another", "flat", "parts", "small"]
