"""What the processes of a group send each other, with autograd: tails to the next, the last one's to all, heads for
tokens.

A gradient goes back the way its tensor came. Every process sums the losses of all: what it is given of a tensor that
several hold is a share of the gradient, and the shares add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from axes.errors import AxesError, ShapeError, wrong_type
from axes.kernels.common.line import called

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Place = tuple[int, int, int]  # last tokens of a product, its first column and how many columns
_AHEAD = 64  # messages that may be on their way
# What was sent, and perhaps not yet received: it is kept until then, whatever becomes of the layer that sent it.
_GOING: WeakKeyDictionary[dist.ProcessGroup, list[tuple[dist.Work, Tensor]]] = WeakKeyDictionary()


@final
class Group:
    """A process group whose processes hold the segments of a sequence, in the order of their ranks."""

    def __init__(self, processes: dist.ProcessGroup) -> None:
        self.processes = processes
        self.rank, self.size = dist.get_rank(processes), dist.get_world_size(processes)
        self._going = _GOING.setdefault(processes, [])

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # connections are no part of what is copied

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1

    @contextmanager
    def _speaking(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of gloo and of NCCL: a connection is closed, or nobody came in time
            reason = " ".join(str(error).split())[:200]
            raise AxesError(
                f"process {self.rank} of {self.size} could not {what}: another process of the group is gone, does "
                f"something else, or did not come before the group's timeout. Its own error says why ({reason})"
            ) from error

    def gathered(self, x: Tensor) -> list[Tensor]:
        """What every process has; of one shape and dtype on all."""
        whole = x.new_empty(self.size * x.numel())
        called(self._gather, whole, x.flatten())
        return list(whole.view(self.size, *x.shape).unbind())

    def numbers(self, values: Sequence[int], device: torch.device) -> list[list[int]]:
        """Whole numbers of every process; the host waits for them."""
        return torch.stack(self.gathered(torch.tensor(values, device=device))).tolist()

    def summed(self, x: Tensor) -> Tensor:
        total = x.contiguous().clone()
        with self._speaking("add up what all hold"):
            dist.all_reduce(total, group=self.processes)
        return total

    def of_last(self, x: Tensor) -> Tensor:
        """The last process's."""
        received = x.contiguous().clone()
        with self._speaking("receive from the last process"):
            dist.broadcast(received, dist.get_global_rank(self.processes, self.size - 1), group=self.processes)
        return received

    def shifted(self, sent: Sequence[Tensor], by: int) -> list[Tensor]:
        """What the process `by` ranks before this one has, zeros where there is none: one message to and from each.
        Who only sends does not wait, and is ahead of the others until it receives, or `settle`s."""
        if len({x.dtype for x in sent}) > 1:
            return [self.shifted([x], by)[0] for x in sent]
        sends, receives = 0 <= self.rank + by < self.size, 0 <= self.rank - by < self.size
        packed = _packed(sent) if sends else None
        room = torch.empty if receives else torch.zeros
        whole = room(sum(x.numel() for x in sent), dtype=sent[0].dtype, device=sent[0].device)
        called(self._shift, packed, whole if receives else None, by)
        parts = whole.split([x.numel() for x in sent])
        return [part.view(x.shape) for part, x in zip(parts, sent, strict=True)]

    def settle(self) -> None:
        """Wait until what was sent is received: before a process may end, or sends what nothing answers."""
        called(self._settle)

    def settle_after_backward(self) -> None:
        """In a backward: `settle` when it ends."""
        called(torch.autograd.Variable._execution_engine.queue_callback, self._settle)

    def _gather(self, whole: Tensor, x: Tensor) -> None:
        with self._speaking("gather what the others hold"):
            dist.all_gather_into_tensor(whole, x, group=self.processes)

    def _shift(self, packed: Tensor | None, received: Tensor | None, by: int) -> None:
        operations = []
        for x, operation, other in ((packed, dist.isend, self.rank + by), (received, dist.irecv, self.rank - by)):
            if x is not None:
                peer = dist.get_global_rank(self.processes, other)
                operations.append(dist.P2POp(operation, x, peer, self.processes))
        with self._speaking("exchange the ends of segments with its neighbours"):
            works = dist.batch_isend_irecv(operations) if operations else []
            if received is not None:
                for work in works:
                    work.wait()
            elif packed is not None:
                self._going += [(work, packed) for work in works]
                self._wait(_AHEAD)

    def _settle(self) -> None:
        with self._speaking("send the end of its segment"):
            self._wait(0)

    def _wait(self, most: int) -> None:
        """Until at most so many messages are on their way."""
        while len(self._going) > most:
            self._going.pop(0)[0].wait()

    def exchanged(self, sent: Tensor, to: list[int], by: list[int]) -> Tensor:
        """Flat parts of these lengths, one to every process and one from every process."""
        received = sent.new_empty(sum(by))
        with self._speaking("exchange heads for tokens"):
            dist.all_to_all_single(received, sent.contiguous(), by, to, group=self.processes)
        return received


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """In one buffer, one after another."""
    return torch.cat([x.flatten() for x in tensors]) if len(tensors) > 1 else tensors[0].flatten()


def group_of(who: str, mesh: DeviceMesh | dist.ProcessGroup) -> Group:
    """The group of a mesh of one dimension. Raises WrongType or ShapeError for anything else."""
    if not dist.is_available() or not dist.is_initialized():
        raise AxesError(f"{who}: no processes: call torch.distributed.init_process_group, under torchrun, first")
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ()
            raise ShapeError(f"{who}: the mesh has {mesh.ndim} dimensions {names}: give one of them, as mesh['name']")
        return Group(mesh.get_group())
    if isinstance(mesh, dist.ProcessGroup):
        return Group(mesh)
    raise wrong_type(who, "mesh", "a DeviceMesh of one dimension or a ProcessGroup", mesh)


# ---- with gradients --------------------------------------------------------------------------------------------------


def from_before(group: Group, first: Sequence[Tensor], sent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What the process before sent; on the first process, `first`."""
    received = cast(tuple[Tensor, ...], _FromBefore.apply(group, *first, *sent))
    if not torch.is_grad_enabled():
        group.settle()
    return received


class _FromBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(tensors) // 2
        first, sent = tensors[:count], tensors[count:]
        ctx.group = group
        received = group.shifted(sent, 1)
        return tuple(x.clone() for x in first) if group.first else tuple(received)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        sent = ctx.group.shifted(given, -1)
        ctx.group.settle_after_backward()
        own = given if ctx.group.first else tuple(torch.zeros_like(x) for x in given)
        return None, *own, *sent


def columns_from_before(
    group: Group, p: Tensor, places: Sequence[Place], first: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """p (B, T, W), and what the process before has in its own at these places; on the first process, `first`.

    The gradient of p that comes back is added to in place: it is to be nobody else's, as that of a kernel is.
    """
    p, *before = cast(tuple[Tensor, ...], _ColumnsFromBefore.apply(group, tuple(places), p, *first))
    if not torch.is_grad_enabled():
        group.settle()
    return p, before


class _ColumnsFromBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, places: Sequence[Place], p: Tensor, *first: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.places, ctx.begins = group, places, bool(first)
        received = group.shifted([_columns(p, place) for place in places], 1)
        return p.view_as(p), *((x.clone() for x in first) if group.first else received)

    @staticmethod
    def backward(ctx: Any, dp: Tensor, *given: Tensor) -> Any:
        group, places = ctx.group, [_columns(dp, place) for place in ctx.places]
        sent = group.shifted(given or places, -1)  # the first process sends nothing
        group.settle_after_backward()
        if not group.last:
            for place, more in zip(places, sent, strict=True):
                place.add_(more)
        if not ctx.begins:
            return None, None, dp
        return None, None, dp, *(given if group.first else map(torch.zeros_like, given))


def _columns(p: Tensor, place: Place) -> Tensor:
    tokens, column, columns = place
    return p[:, p.shape[1] - tokens :, column : column + columns]


def of_last(group: Group, x: Tensor) -> Tensor:
    """The last process's tensor, on every process."""
    return cast(Tensor, _OfLast.apply(group, x))


class _OfLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        ctx.group = group
        return group.of_last(x)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        total = ctx.group.summed(given)
        return None, total if ctx.group.last else torch.zeros_like(total)


def tied(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same tensors, of which a use of one is a use of all: else a process that reads no state would not take part
    in what goes back through it, and the others would wait."""
    return cast(tuple[Tensor, ...], _Tied.apply(*tensors))


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        return given


def joined(group: Group, x: Tensor, dim: int) -> Tensor:
    """What all processes hold beside each other, on every process: equal parts along a dimension."""
    return cast(Tensor, _Joined.apply(group, x, dim))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return torch.cat(group.gathered(x), dim)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        return None, ctx.group.summed(given).chunk(ctx.group.size, ctx.dim)[ctx.group.rank], None


def heads_for_tokens(group: Group, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """(B, own tokens, heads, ...) -> (B, all tokens, own heads, ...). lengths: tokens of every process."""
    return cast(Tensor, _Exchange.apply(group, x, tuple(lengths), True))


def tokens_for_heads(group: Group, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """(B, all tokens, own heads, ...) -> (B, own tokens, heads, ...)."""
    return cast(Tensor, _Exchange.apply(group, x, tuple(lengths), False))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, lengths: tuple[int, ...], to_heads: bool) -> Tensor:
        ctx.group, ctx.lengths, ctx.to_heads = group, lengths, to_heads
        return (_to_heads if to_heads else _to_tokens)(group, x, lengths)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        back = (_to_tokens if ctx.to_heads else _to_heads)(ctx.group, given, ctx.lengths)
        return None, back, None, None


def _to_heads(group: Group, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    batch, own, heads, *rest = x.shape
    each = heads // group.size
    parts = x.unflatten(2, (group.size, each)).movedim(2, 0)  # (processes, B, own tokens, their heads, ...)
    one = batch * each * math.prod(rest)
    received = group.exchanged(parts.flatten(), [own * one] * group.size, [t * one for t in lengths])
    pieces = received.split([t * one for t in lengths])
    return torch.cat([p.view(batch, t, each, *rest) for p, t in zip(pieces, lengths, strict=True)], 1)


def _to_tokens(group: Group, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    batch, _, each, *rest = x.shape
    own, one = lengths[group.rank], batch * each * math.prod(rest)
    sent = torch.cat([p.flatten() for p in x.split(list(lengths), 1)])
    received = group.exchanged(sent, [t * one for t in lengths], [own * one] * group.size)
    return received.view(group.size, batch, own, each, *rest).movedim(0, 2).flatten(2, 3)
