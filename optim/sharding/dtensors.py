"""DTensors: what a process holds of them, and what stands for their matrices.

Everything that knows torch.distributed.tensor is here. It is imported on first use: whoever has a DTensor has it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from axes.optim.engine.routing import canonical_shape
from axes.optim.sharding.exchange import Region

_INSIDE = operator.attrgetter("_local_tensor")  # what to_local() returns where no graph is made
_PLACES = operator.attrgetter("placements")


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


def local_shards(tensors: Sequence[Any]) -> list[Tensor]:
    """Their own parts of many DTensors, looked up in one go."""
    found = list(map(_INSIDE, tensors))
    return found if set(map(type, found)) <= {Tensor} else [local_shard(x) for x in tensors]


def places_of(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """How many DTensors are placed."""
    return list(map(_PLACES, tensors))


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
