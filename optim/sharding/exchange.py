"""How tensors travel between the shards that processes hold and whole copies at their owners: one all-to-all each way.

What goes where is worked out once (`Way`). Several tensors travel as one message, and whoever starts one goes on with
something else until it wants what arrives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from axes.errors import AxesError


class Region(NamedTuple):
    """A block of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))]

    def first(self, shape: tuple[int, ...]) -> int | None:
        """Where the block begins among the entries of a tensor of this shape, row by row; None if it is no run."""
        if self.shape[1:] != shape[1:]:
            return None
        return self.offset[0] * math.prod(shape[1:]) if shape else 0


@final
class Part:
    """One tensor in an exchange: the region that every process holds, and the owner of the whole."""

    def __init__(self, shape: tuple[int, ...], regions: Sequence[Region], owner: int) -> None:
        self.shape, self.regions, self.owner = shape, regions, owner
        nearest: dict[Region, int] = {}  # replicas hold the same region: the one nearest to the owner sends it
        for rank in sorted(range(len(regions)), key=lambda r: (abs(r - owner), r)):
            if regions[rank].size:
                nearest.setdefault(regions[rank], rank)
        self.senders = {rank: region for region, rank in nearest.items()}
        if sum(region.size for region in nearest) != math.prod(shape):
            raise AxesError(f"shards of a tensor of shape {shape} overlap or leave entries out: {list(nearest)}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@final
class Exchange:
    """The processes of a mesh."""

    def __init__(self, mesh: Any) -> None:
        import torch.distributed as dist

        ranks = mesh.mesh.flatten().tolist()
        if mesh.ndim == 1:
            self.group = mesh.get_group()
        elif sorted(ranks) == list(range(dist.get_world_size())):
            self.group = dist.group.WORLD
        else:
            self.group = mesh._flatten().get_group()
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.load = [0] * self.size

    def owners(self, costs: Sequence[int]) -> list[int]:
        """The owners of more tensors: the dearest first, each to the process with the least to do."""
        found = [0] * len(costs)
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            found[i] = min(range(self.size), key=lambda r: (self.load[r], r))
            self.load[found[i]] += costs[i]
        return found

    def share(self, value: Any) -> list[Any]:
        """What every process says, in their order."""
        import torch.distributed as dist

        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.group)
        return said

    def swap(self, sent: Tensor, to: list[int], found: list[int]) -> Callable[[], Tensor]:
        """Start to send a vector in runs of these sizes, one to each process; the result waits for those from each."""
        import torch.distributed as dist

        arrived = sent.new_empty(sum(found))
        work = dist.all_to_all_single(arrived, sent, found, to, group=self.group, async_op=True)
        assert work is not None  # this rank is one of the group

        def wait() -> Tensor:
            work.wait()
            return arrived

        return wait

    def all_to_all(
        self, sent: list[list[Tensor]], expected: list[list[Region]], like: Tensor
    ) -> Callable[[], list[list[Tensor]]]:
        """Send lists of tensors, one list to each process; the result waits and returns the list from each."""
        pieces = [x.reshape(-1) for to in sent for x in to]
        out = torch.cat(pieces) if pieces else like.new_empty(0)
        sizes = [sum(region.size for region in source) for source in expected]
        wait = self.swap(out, [sum(x.numel() for x in to) for to in sent], sizes)

        def lists() -> list[list[Tensor]]:
            flat = iter(wait().split([region.size for source in expected for region in source]))
            return [[next(flat).view(region.shape) for region in source] for source in expected]

        return lists


class _Piece(NamedTuple):
    """What of a tensor goes from one process to another. place: of the tensor, among all or among those owned here."""

    place: int
    region: Region
    first: int | None  # its first entry, if it is a run of them


@final
class Way:
    """The way of some tensors to their owners and back, worked out once."""

    def __init__(self, exchange: Exchange, parts: Sequence[Part]) -> None:
        self.exchange, self.parts = exchange, parts
        rank, ranks = exchange.rank, range(exchange.size)
        self.mine = [part for part in parts if part.owner == rank]
        self.here = [part.regions[rank] for part in parts]
        by_owner = [[i for i, part in enumerate(parts) if part.owner == r] for r in ranks]
        self.sent = [[i for i in some if rank in parts[i].senders] for some in by_owner]  # shards, to their owners
        self.shards = [[i for i in some if self.here[i].size] for some in by_owner]  # which come back from them
        self.found = [[_piece(j, p, p.senders[r]) for j, p in enumerate(self.mine) if r in p.senders] for r in ranks]
        self.given = [[_piece(j, p, p.regions[r]) for j, p in enumerate(self.mine) if p.regions[r].size] for r in ranks]
        self.runs = _runs(self.found)
        self._pieces: tuple[list[Tensor], list[Tensor]] = ([], [])

    def gather(self, shards: Sequence[Tensor], dtype: torch.dtype | None = None) -> Callable[[], list[Tensor]]:
        """Start to bring tensors to their owners; the call of the result waits and returns those owned here.

        dtype: in which they are wanted, by default the one in which they travel.
        """
        like = shards[0]
        chosen = [shards[i].reshape(-1) for i in itertools.chain.from_iterable(self.sent)]
        to = [sum(self.here[i].size for i in some) for some in self.sent]
        wait = self.exchange.swap(torch.cat(chosen) if chosen else like.new_empty(0), to, self._sizes(self.found))
        return lambda: self._put_together(wait().to(dtype or like.dtype))

    def _put_together(self, arrived: Tensor) -> list[Tensor]:
        sizes = [part.size for part in self.mine]
        pieces = arrived.split([p.region.size for some in self.found for p in some])
        if self.runs is not None:  # put in another order, pieces follow one another as the entries of the tensors do
            if self.runs != list(range(len(pieces))):
                arrived = torch.cat([pieces[k] for k in self.runs])
            return [x.view(part.shape) for x, part in zip(arrived.split(sizes), self.mine, strict=True)]
        whole = torch.empty_like(arrived).split(sizes)
        out = [x.view(part.shape) for x, part in zip(whole, self.mine, strict=True)]
        places = [p.region.of(out[p.place]) for some in self.found for p in some]
        shapes = [p.region.shape for some in self.found for p in some]
        torch._foreach_copy_(places, [x.view(shape) for x, shape in zip(pieces, shapes, strict=True)])
        return out

    def scatter(self, wholes: Sequence[Tensor], like: Tensor) -> Callable[[], list[Tensor]]:
        """Start to bring tensors to their shards; the call of the result waits and returns this process's shards.

        wholes: those owned here, in the order of parts.
        """
        pieces = self._divided(wholes)
        back = [sum(self.here[i].size for i in some) for some in self.shards]
        wait = self.exchange.swap(torch.cat(pieces) if pieces else like.new_empty(0), self._sizes(self.given), back)

        def shards() -> list[Tensor]:
            order = list(itertools.chain.from_iterable(self.shards))
            arrived = dict(zip(order, wait().split([self.here[i].size for i in order]), strict=True))
            return [
                arrived[i].view(region.shape) if region.size else like.new_empty(region.shape)
                for i, region in enumerate(self.here)
            ]

        return shards

    def _divided(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """What of the tensors goes where; views that are the same as long as the tensors are."""
        known, pieces = self._pieces
        if len(known) == len(wholes) and all(x is y for x, y in zip(known, wholes, strict=True)):
            return pieces
        found, lasting = [], True
        for piece in itertools.chain.from_iterable(self.given):
            whole, first = wholes[piece.place], piece.first
            if first is None:
                found.append(piece.region.of(whole).reshape(-1))
                lasting = False  # perhaps a copy
            else:
                found.append(whole.reshape(-1).narrow(0, first, piece.region.size))
                lasting = lasting and whole.is_contiguous()
        if lasting:
            self._pieces = (list(wholes), found)
        return found

    def _sizes(self, pieces: list[list[_Piece]]) -> list[int]:
        return [sum(p.region.size for p in some) for some in pieces]


def _piece(index: int, part: Part, region: Region) -> _Piece:
    return _Piece(index, region, region.first(part.shape))


def _runs(found: list[list[_Piece]]) -> list[int] | None:
    """The order in which pieces are the entries of the tensors, one tensor behind the other, or None."""
    flat = list(itertools.chain.from_iterable(found))
    if any(piece.first is None for piece in flat):
        return None
    return sorted(range(len(flat)), key=lambda k: (flat[k].place, flat[k].first))


__all__ = ["Exchange", "Part", "Region", "Way"]
