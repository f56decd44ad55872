"""How tensors travel between the shards that processes hold and whole copies at their owners: one all-to-all each way.

What goes where is worked out once (`Way`), and so is where it lies at either end (`ToOwners`, `ToShards`): a step of
tensors that travel as before copies and sends, and makes no tensor. Several tensors travel as one message, and whoever
starts one goes on with something else until it wants what arrives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from axes.errors import AxesError

T = TypeVar("T")
_ALIGNED = 64  # entries


class Region(NamedTuple):
    """A block of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))]


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

    def owners(self, costs: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """The owners of more tensors: the dearest first, each to the process with the least to do.

        Of one shape every process gets its share: then as much travels in one direction as in the other, and in every
        part of what travels all processes have something to do.
        """
        found = [0] * len(costs)
        for i in sorted(range(len(costs)), key=lambda i: (-costs[i], shapes[i])):
            found[i] = min(range(self.size), key=lambda r: (self.load[r], r))
            self.load[found[i]] += costs[i]
        return found

    def share(self, value: Any) -> list[Any]:
        """What every process says, in their order."""
        import torch.distributed as dist

        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.group)
        return said

    def swap(self, sent: Tensor, to: list[int], arrived: Tensor, found: list[int]) -> Callable[[], object]:
        """Start to send a vector in runs of these sizes, one to each process; the result waits for those from each."""
        import torch.distributed as dist

        work = dist.all_to_all_single(arrived, sent, found, to, group=self.group, async_op=True)
        assert work is not None  # this rank is one of the group
        wait: Callable[[], object] = work.wait
        return wait

    def all_to_all(self, sent: list[list[Tensor]], expected: list[list[Region]], like: Tensor) -> list[list[Tensor]]:
        """Send lists of tensors, one list to each process; the list from each."""
        pieces = [x.reshape(-1) for to in sent for x in to]
        out = torch.cat(pieces) if pieces else like.new_empty(0)
        sizes = [sum(region.size for region in source) for source in expected]
        arrived = out.new_empty(sum(sizes))
        self.swap(out, [sum(x.numel() for x in to) for to in sent], arrived, sizes)()
        flat = iter(arrived.split([region.size for source in expected for region in source]))
        return [[next(flat).view(region.shape) for region in source] for source in expected]


@final
class Way:
    """The way of some tensors to their owners and back, worked out once.

    Pieces of a message follow one another by owner on the way there, and by the process they come from or go to at the
    owner, in the order of parts.
    """

    def __init__(self, exchange: Exchange, parts: Sequence[Part]) -> None:
        self.exchange, self.parts = exchange, parts
        rank, ranks = exchange.rank, range(exchange.size)
        self.mine = [part for part in parts if part.owner == rank]
        self.here = [part.regions[rank] for part in parts]
        by_owner = [[i for i, part in enumerate(parts) if part.owner == r] for r in ranks]
        sent = [[i for i in some if rank in parts[i].senders] for some in by_owner]  # shards, to their owners
        back = [[i for i in some if self.here[i].size] for some in by_owner]  # which come back from them
        found = [[(j, p.senders[r]) for j, p in enumerate(self.mine) if r in p.senders] for r in ranks]
        given = [[(j, p.regions[r]) for j, p in enumerate(self.mine) if p.regions[r].size] for r in ranks]
        self.sent, self.back = _flat(sent), _flat(back)
        self.found, self.given = _flat(found), _flat(given)  # places among the owned, and regions
        self.to, self.returned = ([sum(self.here[i].size for i in some) for some in x] for x in (sent, back))
        self.arriving, self.leaving = ([sum(r.size for _, r in some) for some in x] for x in (found, given))
        self.owned = sum(_aligned(part.size) for part in self.mine)  # entries of memory for all that are owned

    def room(self, *dtypes: torch.dtype) -> int:
        """Bytes for whatever of the tensors is at this process at once, in any of these dtypes."""
        entries = max(self.owned, *map(sum, (self.to, self.returned, self.arriving, self.leaving)))
        return int(entries * max(dtype.itemsize for dtype in dtypes))

    def wholes(self, memory: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """The tensors owned here, in this memory: where kernels want tensors to begin."""
        flat = memory[: self.owned * dtype.itemsize].view(dtype)
        starts = itertools.accumulate((_aligned(part.size) for part in self.mine), initial=0)
        return [flat[a : a + part.size].view(part.shape) for a, part in zip(starts, self.mine, strict=False)]


@final
class ToOwners:
    """Shards on their way to the owners, in memory that is laid out once."""

    def __init__(self, way: Way, near: Tensor, far: Tensor, sent: torch.dtype, wanted: torch.dtype) -> None:
        """near: bytes of which messages are sent, and in which the tensors owned here are put together, in the dtype
        that is wanted; far: bytes in which messages arrive. Nobody else uses either in between."""
        self.way = way
        self.message, self.pieces = _divided(near, sent, [way.here[i].shape for i in way.sent])
        self.landing, self.landed = _divided(far, sent, [region.shape for _, region in way.found])
        self.wholes = way.wholes(near, wanted)
        self.places = [region.of(self.wholes[j]) for j, region in way.found]

    def start(self, shards: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to send; the call of the result waits and returns the tensors owned here."""
        _copy(self.pieces, [shards[i] for i in self.way.sent])
        wait = self.way.exchange.swap(self.message, self.way.to, self.landing, self.way.arriving)

        def arrived() -> list[Tensor]:
            wait()
            _copy(self.places, self.landed)
            return self.wholes

        return arrived


@final
class ToShards:
    """Tensors on their way from their owners to the shards, in memory that is laid out once."""

    def __init__(self, way: Way, wholes: Sequence[Tensor], near: Tensor, far: Tensor, dtype: torch.dtype) -> None:
        """wholes: those owned here, in the order of parts. near: bytes of which messages are sent, far: bytes in which
        they arrive, where the wholes may stand."""
        self.way = way
        self.message, self.pieces = _divided(near, dtype, [region.shape for _, region in way.given])
        self.sources = [region.of(wholes[j]) for j, region in way.given]
        self.landing, landed = _divided(far, dtype, [way.here[i].shape for i in way.back])
        there = dict(zip(way.back, landed, strict=True))
        self.shards = [there[i] if i in there else self.landing.new_empty(r.shape) for i, r in enumerate(way.here)]

    def start(self) -> Callable[[], list[Tensor]]:
        """Begin to send; the call of the result waits and returns this process's shards."""
        _copy(self.pieces, self.sources)
        wait = self.way.exchange.swap(self.message, self.way.leaving, self.landing, self.way.returned)

        def arrived() -> list[Tensor]:
            wait()
            return self.shards

        return arrived


def _divided(memory: Tensor, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
    """The begin of some bytes as tensors that follow one another: as one, and each of them."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = memory[: sum(sizes) * dtype.itemsize].view(dtype)
    return flat, [x.view(shape) for x, shape in zip(flat.split(sizes), shapes, strict=True)]


def _copy(to: list[Tensor], what: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, what)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _flat(lists: list[list[T]]) -> list[T]:
    return list(itertools.chain.from_iterable(lists))


__all__ = ["Exchange", "Part", "Region", "ToOwners", "ToShards", "Way"]
