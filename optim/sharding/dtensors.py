"""DTensors: what a process holds of them, and how they travel between their shards and whole copies.

Everything that knows torch.distributed.tensor is here. It is imported on first use: whoever has a DTensor has it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.optim.engine.routing import canonical_shape


def spread(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # imported by whoever made one
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Any) -> Tensor:
    """A DTensor put together on every process, other tensors themselves."""
    if not spread(tensor):
        return tensor
    dtype = tensor.dtype
    sent = tensor.to(torch.int32) if dtype == torch.int16 else tensor  # which gloo and NCCL do not carry
    full: Tensor = sent.full_tensor().to(dtype)
    return full


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


@final
class Exchange:
    """Moves tensors between shards on a mesh and whole copies at their owners: one all-to-all each way."""

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

    def choose(self, cost: int) -> int:
        """The owner of one more tensor: the process with the least to do."""
        owner = min(range(self.size), key=lambda r: (self.load[r], r))
        self.load[owner] += cost
        return owner

    def share(self, value: Any) -> list[Any]:
        """What every process says, in their order."""
        import torch.distributed as dist

        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.group)
        return said

    def gather(self, shards: Sequence[Tensor], parts: Sequence[Part]) -> Callable[[], list[Tensor]]:
        """Start to bring tensors to their owners; the call of the result waits and returns those owned here."""
        sent: list[list[Tensor]] = [[] for _ in range(self.size)]
        for shard, part in zip(shards, parts, strict=True):
            if self.rank in part.senders:
                sent[part.owner].append(shard)
        mine = [part for part in parts if part.owner == self.rank]
        expected = [[part.senders[r] for part in mine if r in part.senders] for r in range(self.size)]
        finish = self.all_to_all(sent, expected, shards[0])

        def wholes() -> list[Tensor]:
            arrived = [iter(pieces) for pieces in finish()]
            out: list[Tensor] = []
            places: list[Tensor] = []
            found: list[Tensor] = []
            for part in mine:
                pieces = {r: next(arrived[r]) for r in range(self.size) if r in part.senders}
                if len(pieces) == 1:
                    out.append(next(iter(pieces.values())))
                    continue
                out.append(shards[0].new_empty(part.shape))
                places += [part.senders[r].of(out[-1]) for r in pieces]
                found += pieces.values()
            if places:
                torch._foreach_copy_(places, found)
            return out

        return wholes

    def scatter(self, wholes: Sequence[Tensor], parts: Sequence[Part], like: Tensor) -> Callable[[], list[Tensor]]:
        """Start to bring tensors to their shards; the call of the result waits and returns this process's shards.

        wholes: those owned here, in the order of parts.
        """
        mine = [part for part in parts if part.owner == self.rank]
        sent: list[list[Tensor]] = [
            [part.regions[r].of(whole) for whole, part in zip(wholes, mine, strict=True) if part.regions[r].size]
            for r in range(self.size)
        ]
        here = [(part.owner, part.regions[self.rank]) for part in parts]
        expected = [[region for owner, region in here if owner == r and region.size] for r in range(self.size)]
        finish = self.all_to_all(sent, expected, like)

        def shards() -> list[Tensor]:
            arrived = [iter(pieces) for pieces in finish()]
            return [next(arrived[owner]) if region.size else like.new_empty(region.shape) for owner, region in here]

        return shards

    def all_to_all(
        self, sent: list[list[Tensor]], expected: list[list[Region]], like: Tensor
    ) -> Callable[[], list[list[Tensor]]]:
        """Send lists of tensors, one list to each process; the result waits and returns the list from each."""
        import torch.distributed as dist

        pieces = [x.reshape(-1) for to in sent for x in to]
        out = torch.cat(pieces) if pieces else like.new_empty(0)
        arrived = like.new_empty(sum(region.size for source in expected for region in source))
        work = dist.all_to_all_single(
            arrived,
            out,
            [sum(region.size for region in source) for source in expected],
            [sum(x.numel() for x in to) for to in sent],
            group=self.group,
            async_op=True,
        )
        assert work is not None  # this rank is one of the group

        def wait() -> list[list[Tensor]]:
            work.wait()
            flat = iter(arrived.split([region.size for source in expected for region in source]))
            return [[next(flat).view(region.shape) for region in source] for source in expected]

        return wait


def matrix_placements(parameter: Any) -> tuple[Any, ...] | None:
    """Placements of the parameter's matrix whose shards are the matrices of the parameter's shards, if there are such.

    They differ where a vector is a row. From three dimensions on, shards of the second dimension must be equal.
    """
    from torch.distributed.tensor import Shard

    shape = tuple(parameter.shape) + ((2,) if parameter.is_complex() else ())
    found = []
    for place, count in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        dim = getattr(place, "dim", None)
        if len(shape) == 1 and dim == 0:
            dim = 1
        elif dim is not None and dim > 0 and len(shape) > 2 and (dim > 1 or shape[1] % count):
            return None
        if dim is None or dim == place.dim:
            found.append(place)
        else:
            strided = getattr(place, "split_factor", None)
            found.append(Shard(dim) if strided is None else type(place)(dim, split_factor=strided))
    return tuple(found)


def row_placements(parameter: Any) -> tuple[Any, ...]:
    """Rows of any tensor over the processes among which the parameter is sharded."""
    from torch.distributed.tensor import Replicate, Shard

    return tuple(Replicate() if place.is_replicate() else Shard(0) for place in parameter.placements)


def own_region(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Region:
    """What this process holds of a tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
    return Region(tuple(offset), tuple(local))


def wrapped(local: Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(tuple(shape), device="meta").stride()
    out: Tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return out


def local_shard(tensor: Any, placements: Sequence[Any] | None = None) -> Tensor:
    """The process's own part of a DTensor (under the given placements), the tensor itself if it is none."""
    if not spread(tensor):
        return tensor
    if placements is not None and tuple(tensor.placements) != tuple(placements):
        tensor = tensor.redistribute(placements=placements)
    if torch.is_grad_enabled():
        with torch.no_grad():  # without a graph this is the tensor inside, the same object every time
            return local_shard(tensor)
    local: Tensor = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local


def as_matrix(tensor: Tensor, parameter: Any) -> Tensor:
    """A tensor of the parameter's shape as the parameter's matrix, sharded alike where it can be."""
    if not spread(tensor):
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return real.reshape(canonical_shape(parameter))
    placements = matrix_placements(parameter) if spread(parameter) else None
    if placements is None or tensor.device_mesh != parameter.device_mesh:  # type: ignore[attr-defined]
        return as_matrix(whole(tensor), parameter)
    local = local_shard(tensor, parameter.placements)
    return wrapped(as_matrix(local, local), parameter.device_mesh, placements, canonical_shape(parameter))


def from_matrix(tensor: Tensor, parameter: Any) -> Tensor:
    """The parameter's matrix as a tensor of the parameter's shape, sharded like it."""
    if not spread(tensor):
        if parameter.is_complex():
            return torch.view_as_complex(tensor.reshape(*parameter.shape, 2).contiguous())
        return tensor.reshape(parameter.shape)
    placements = matrix_placements(parameter)
    if placements is None:
        region = own_region(parameter.shape, parameter.device_mesh, parameter.placements)
        local = region.of(whole(tensor).reshape(parameter.shape)).contiguous()
    else:
        local = from_matrix(local_shard(tensor, placements), local_shard(parameter))
    return wrapped(local, parameter.device_mesh, parameter.placements, parameter.shape)
