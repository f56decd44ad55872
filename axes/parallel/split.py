"""A layer whose tokens are split over processes: its convolutions' tails, its recurrence and its last state.

An affine chain exchanges maps of states. A process finds what its segment makes of a state, S_in A + b; all gather
these, and every process works out the state that enters its own segment and runs it. Backwards, with D_r the gradient
of the state that enters segment r and c_r what its own outputs put into it,

    D_r = D_{r+1} A_r^T + c_r ,

so that a process first finds its c, gathers, and then goes back through its segment once with the right D_{r+1}.

Every other recurrence runs whole, on a process's share of the heads: tokens of all heads go out, all tokens of its own
heads come in, and outputs go back. What a chain sends does not depend on the number of tokens; this does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # imports the compiler at the first call

from axes.core.rates import Signal
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError, ShapeError
from axes.parallel import group as send
from axes.parallel import maps
from axes.parallel.group import Group
from axes.parallel.maps import Run
from axes.routes.precision import own_precision
from axes.sequence.base import Across, LayerState, SequenceLayer


@final
class Split(Across):
    """What a layer asks at every call. states: whether the state after the last token is wanted, on every process."""

    def __init__(self, who: str, layer: SequenceLayer, group: Group, states: bool) -> None:
        self.who, self.update, self.group, self.states = who, layer.update, group, states
        self.refused = maps.form(layer.update)
        self.by_maps = isinstance(self.refused, str)
        shapes = layer.init_state(1, "meta").tails
        self.halo = max((x.shape[1] for x in shapes), default=0)
        self.heads = layer.memories[0]
        heads = {"heads": self.heads, "heads of keys": layer.sizes.key_heads // _queries(layer)}
        uneven = [f"{n} {name}" for name, n in heads.items() if n % group.size]
        if not self.by_maps and uneven:
            assert isinstance(self.refused, maps.NoMap)
            raise AxesError(
                f"parallel.sequence: {who} cannot be split over {group.size} processes. It exchanges no maps of states "
                f"({self.refused.reason}), so its heads are shared out, and {uneven[0]} are no multiple of "
                f"{group.size}: give it such a number of heads, or split over fewer processes"
            )

    def __str__(self) -> str:
        if isinstance(self.refused, str):
            return "maps of states (W, b)"
        return f"heads for tokens, all to all ({self.refused.reason})"

    # ---- the ends of segments ------------------------------------------------------------------------------------

    @_disable_dynamo
    def tails(self, layer: SequenceLayer, x: Tensor, first: Sequence[Tensor] | None) -> tuple[Tensor, ...] | None:
        if not self.halo:
            return None if first is None else tuple(first)
        if x.shape[1] < self.halo:
            raise ShapeError(
                f"{self.who}: its convolutions read {self.halo} tokens of the process before, and this one "
                f"({self.group.rank} of {self.group.size}) has a segment of {x.shape[1]}: split over fewer processes"
            )
        sent = layer.tails_of(x[:, x.shape[1] - self.halo :].contiguous())
        before = [torch.zeros_like(t) for t in sent]
        if first is not None:
            before = [x.to(t.dtype) for x, t in zip(first, sent, strict=True)]
        return send.from_before(self.group, before, sent)

    @_disable_dynamo
    def after(self, y: Tensor, tails: tuple[Tensor, ...], memory: State) -> tuple[Tensor, LayerState | None]:
        if not self.states:
            return y, None
        if self.by_maps:
            memory = maps.with_rows(memory, send.of_last(self.group, maps.rows(memory)))
        state = LayerState(tuple(send.of_last(self.group, x) for x in tails), memory)
        given = [y, *(x for x in _tensors(state) if x.is_floating_point())]
        y, *rest = send.tied(given)
        kept = iter(rest)
        return y, cast(LayerState, _every(state, lambda x: next(kept) if x.is_floating_point() else x))

    # ---- the recurrence ------------------------------------------------------------------------------------------

    @_disable_dynamo
    def recur(self, run: Run, signal: Signal, start: State) -> tuple[Tensor, State]:
        return (self._by_maps if self.by_maps else self._by_heads)(run, signal, start)

    def _by_maps(self, run: Run, signal: Signal, start: State) -> tuple[Tensor, State]:
        group, update, given = self.group, self.update, maps.rows(start)
        found = _maps(update, run, signal, start, group)
        received = given.detach() if group.first else maps.prefix(update, *found, group.rank)
        differentiated = torch.is_grad_enabled() and any(
            x.requires_grad for x in (given, *signal.values()) if isinstance(x, Tensor)
        )
        whole = _Entering.apply(group.first, given, received.requires_grad_()) if differentiated else received
        out, memory = run(signal, maps.with_rows(start, whole))
        count = start.count + sum(n for (n,) in self._tokens(signal)) if self.states else memory.count
        if differentiated:
            segment = _Segment(update, group, found[0], whole, out, maps.rows(memory))
            out, left = _Leaving.apply(segment, segment.out, segment.left)
            memory = maps.with_rows(memory, left)
        return out, memory._replace(count=count)

    def _tokens(self, signal: Signal) -> list[list[int]]:
        v = cast(Tensor, signal["v"])
        return self.group.numbers([v.shape[1]], v.device)

    def _by_heads(self, run: Run, signal: Signal, start: State) -> tuple[Tensor, State]:
        group, v = self.group, cast(Tensor, signal["v"])
        places = group.numbers([v.shape[1], v.shape[0]], v.device)
        lengths = [n for n, _ in places]
        if any(batch != v.shape[0] for _, batch in places):
            raise ShapeError(f"{self.who}: processes have segments of {[b for _, b in places]} sequences, not as many")
        own = {n: self._own_heads(x, lengths) if isinstance(x, Tensor) else x for n, x in signal.items()}
        out, memory = run(own, _share(start, group, self.heads))
        out = send.tokens_for_heads(group, out, lengths)
        return out, _joined(memory, start, group, self.heads) if self.states else memory

    def _own_heads(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        if x.ndim < 2:
            return x  # a number of all tokens
        if x.ndim == 2:  # one a token, of no head
            every = x[..., None].expand(*x.shape, self.group.size)
            return send.heads_for_tokens(self.group, every, lengths)[..., 0]
        if x.shape[2] == 1 and self.heads > 1:  # of all heads
            x = x.expand(*x.shape[:2], self.group.size, *x.shape[3:])
        return send.heads_for_tokens(self.group, x, lengths)


def _queries(layer: SequenceLayer) -> int:
    queries = getattr(layer.block, "queries", 1)
    return layer.sizes.key_heads if queries == "all" else int(queries)


# ---- maps ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _maps(
    update: StateUpdate, run: Run, signal: Signal, start: State, group: Group
) -> tuple[list[Tensor], list[Tensor]]:
    """Every segment's A and b; of the first, b is what leaves it. What nobody reads is left out, and zero."""
    signal = {n: x.detach() if isinstance(x, Tensor) else x for n, x in signal.items()}
    given = maps.rows(start).detach()
    empty = torch.zeros_like(given, memory_format=torch.contiguous_format)
    b, width = empty, given.shape[-1]
    if not group.last:
        b = maps.constant(run, signal, maps.with_rows(start, given if group.first else empty))
    if not (group.first or group.last):
        a = maps.matrix(update, run, signal, maps.with_rows(start, empty))
    elif maps.form(update) == "entries":
        a = empty
    else:
        a = empty.new_zeros(*empty.shape[:-2], width, width)
    if group.size == 2:
        return [a, a], group.gathered(b)  # one segment before, one behind: no map is read
    return group.gathered(a), group.gathered(b)


class _Entering(torch.autograd.Function):
    """The state that enters a segment: the caller's on the first process, and received by the others, whose share of
    the gradient of the caller's is zero."""

    @staticmethod
    def forward(ctx: Any, first: bool, given: Tensor, received: Tensor) -> Tensor:
        ctx.first = first
        return received.clone()

    @staticmethod
    def backward(ctx: Any, adjoint: Tensor) -> Any:
        return None, adjoint if ctx.first else torch.zeros_like(adjoint), None


@final
class _Segment:
    """What going back through a segment asks: tensors with the graph that made them."""

    def __init__(
        self, update: StateUpdate, group: Group, by: list[Tensor], entered: Tensor, out: Tensor, left: Tensor
    ) -> None:
        self.update, self.group, self.by = update, group, by
        self.entered, self.out, self.left = entered, out, left

    def own(self, out: Tensor, left: Tensor) -> Tensor:
        """c: what gradients of this segment's own outputs are of the state that enters it."""
        ends = [(x, g) for x, g in ((self.out, out), (self.left, left)) if x.requires_grad]
        (c,) = torch.autograd.grad(
            [x for x, _ in ends], self.entered, [g for _, g in ends], retain_graph=True, allow_unused=True
        )
        return torch.zeros_like(self.entered) if c is None else c


class _Leaving(torch.autograd.Function):
    """Nothing forward; backward the gradient of the state that leaves a segment, from the segments behind it."""

    @staticmethod
    def forward(ctx: Any, segment: _Segment, out: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        ctx.segment = segment
        return out.view_as(out), left.view_as(left)

    @staticmethod
    def backward(ctx: Any, out: Tensor, left: Tensor) -> Any:
        s: _Segment = ctx.segment
        if torch.is_grad_enabled():
            raise AxesError("parallel.sequence: a split layer is differentiated once; leave create_graph out")
        constants = s.group.gathered(s.own(out, left))
        if s.group.last:
            return None, out, left
        with own_precision(constants[0]):
            behind = maps.suffix(s.update, s.by, constants, s.group.rank)
        return None, out, left + behind


# ---- heads -----------------------------------------------------------------------------------------------------------


def _share(state: State, group: Group, heads: int) -> State:
    """The state of this process's heads, which stand in dimension 1; a number that all heads share stays."""

    def change(x: Tensor) -> Tensor:
        return x.chunk(group.size, 1)[group.rank] if x.ndim > 1 and x.shape[1] == heads else x

    return cast(State, _every(state, change))


def _joined(state: Any, start: Any, group: Group, heads: int) -> Any:
    """The state of all heads. start: of all heads, which says of what they have one each; what it lacks, a list has
    begun to keep."""
    if isinstance(state, Tensor):
        shared = isinstance(start, Tensor) and (start.ndim < 2 or start.shape[1] != heads)
        return state if state.ndim < 2 or shared else send.joined(group, state, 1)
    begun = [*start, *[None] * (len(state) - len(start))] if isinstance(start, tuple) else [None] * len(state)
    made = [_joined(x, y, group, heads) for x, y in zip(state, begun, strict=True)]
    return type(state)(*made) if hasattr(state, "_fields") else tuple(made)


def _tensors(held: Any) -> list[Tensor]:
    return [held] if isinstance(held, Tensor) else [x for part in held for x in _tensors(part)]


def _every(held: Any, change: Any) -> Any:
    """A nested tuple of tensors, changed one by one."""
    if isinstance(held, Tensor):
        return change(held)
    made = [_every(x, change) for x in held]
    return type(held)(*made) if hasattr(held, "_fields") else tuple(made)


__all__ = ["Split"]
