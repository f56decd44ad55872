"""A layer whose tokens are split over processes: its convolutions' tails, its recurrence and its last state.

An affine chain exchanges maps of states. A process finds what its segment makes of a state, S_in A + b; all gather
these, and every process works out the state that enters its own segment and runs it. Backwards, with D_r the gradient
of the state that enters segment r and c_r what its own outputs put into it,

    D_r = D_{r+1} A_r^T + c_r ,

so that a process first finds its c, gathers, and then goes back through its segment once with the right D_{r+1}. At the
ends nothing is found first: the first process runs its segment and says what left it, the last one goes back through
its own and says D. Two processes pass on S and D themselves.

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
        if layer.around.cell is not None:
            raise AxesError(
                f"parallel.sequence: {who} cannot be split over {group.size} processes. What a token is given depends "
                "on what the token before it read, so that tokens are taken one after another: share out sequences "
                "instead of their tokens, or take another layer"
            )
        self.refused = maps.form(layer.update)
        self.by_maps = isinstance(self.refused, str)
        self.repeats = self.by_maps and not states  # of heads, numbers of tokens are read on the host
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
        self._require_tokens(x.shape[1])
        sent = layer.tails_of(x[:, x.shape[1] - self.halo :].contiguous())
        before = [torch.zeros_like(t) for t in sent]
        if first is not None:
            before = [x.to(t.dtype) for x, t in zip(first, sent, strict=True)]
        return send.from_before(self.group, before, sent)

    @_disable_dynamo
    def columns(
        self, p: Tensor, places: Sequence[tuple[int, int, int]], first: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        self._require_tokens(p.shape[1])
        return send.columns_from_before(self.group, p, places, [x.to(p.dtype) for x in first])

    def _require_tokens(self, tokens: int) -> None:
        if tokens < self.halo:
            raise ShapeError(
                f"{self.who}: its convolutions read {self.halo} tokens of the process before, and this one "
                f"({self.group.rank} of {self.group.size}) has a segment of {tokens}: split over fewer processes"
            )

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
        group, given = self.group, maps.rows(start)
        differentiated = torch.is_grad_enabled() and any(
            x.requires_grad for x in (given, *signal.values()) if isinstance(x, Tensor)
        )
        ends = _Ends(self.update, group)
        if not group.first:
            received = ends.entering(run, signal, start)
            entered, signal = _enter(ends, given, received, signal) if differentiated else (received, signal)
            start = maps.with_rows(start, entered)
        out, memory = run(signal, start)
        left = maps.rows(memory)
        if group.first:
            ends.leaving(left)
            if not differentiated:
                group.settle()
        count = start.count + sum(n for (n,) in self._tokens(signal)) if self.states else memory.count
        if differentiated and not group.last:
            segment = _Segment(ends, None if group.first else entered, out, left)
            out, left = _Leaving.apply(segment, segment.out, segment.left)
            memory = maps.with_rows(memory, left)
        return out, memory.but(count=count)

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


@final
class _Ends:
    """What processes tell each other of their segments, forward and backward, for one call of a layer.

    The first segment begins from a state that is known, so its own run says what leaves it; of the last one nobody
    asks. Those between run their tokens before, for A and b. Between two processes the state itself is passed on.
    """

    def __init__(self, update: StateUpdate, group: Group) -> None:
        self.update, self.group = update, group
        self.by: list[Tensor] = []  # every segment's A

    @torch.no_grad()
    def leaving(self, left: Tensor) -> None:
        """Of the first process: the state that leaves its segment."""
        self._constants(left.detach(), None)

    @torch.no_grad()
    def entering(self, run: Run, signal: Signal, start: State) -> Tensor:
        """Of the others: the state that enters their segment."""
        empty = torch.zeros_like(maps.rows(start), memory_format=torch.contiguous_format)
        b, a = empty, None
        if not self.group.last:
            signal = {n: x.detach() if isinstance(x, Tensor) else x for n, x in signal.items()}
            b = maps.constant(run, signal, maps.with_rows(start, empty))
            a = maps.matrix(self.update, run, signal, maps.with_rows(start, empty))
        constants = self._constants(b, a)
        with own_precision(b):
            return maps.prefix(self.update, self.by, constants, self.group.rank)

    def _constants(self, b: Tensor, a: Tensor | None) -> list[Tensor]:
        """All b; A on the way, in one message. What nobody reads is left out, and zero."""
        group = self.group
        if group.size == 2:
            return group.shifted([b], 1)
        if a is None:
            entries = maps.form(self.update) == "entries"
            a = torch.zeros_like(b) if entries else b.new_zeros(*b.shape[:-2], b.shape[-1], b.shape[-1])
        every = [x.split([b.shape[-2], a.shape[-2]], -2) for x in group.gathered(torch.cat((b, a), -2))]
        self.by = [by for _, by in every]
        return [constant for constant, _ in every]

    def gradient_entered(self, adjoint: Tensor) -> None:
        """Of the last process: the gradient of the state that entered its segment."""
        if self.group.size == 2:
            self.group.shifted([adjoint], -1)
            self.group.settle_after_backward()
        else:
            self.group.gathered(adjoint)

    def gradient_left(self, own: Tensor) -> Tensor:
        """Of the others: the gradient of the state that leaves their segment, from the segments behind it. own: what
        their own outputs put into that of the state that enters it; of the first process it is not read."""
        if self.group.size == 2:
            return self.group.shifted([own], -1)[0]
        constants = self.group.gathered(own)
        with own_precision(own):
            return maps.suffix(self.update, self.by, constants, self.group.rank)


def _enter(ends: _Ends, given: Tensor, received: Tensor, signal: Signal) -> tuple[Tensor, Signal]:
    """The state that enters a segment, and its tokens: gradients of both leave the segment together, so that what is
    sent back of the state is sent before what is sent back of tokens, as it is received."""
    names = [n for n, x in signal.items() if isinstance(x, Tensor) and x.requires_grad]
    entered, *tokens = _Entering.apply(ends, given, received, *(signal[n] for n in names))
    return entered, {**signal, **dict(zip(names, tokens, strict=True))}


class _Entering(torch.autograd.Function):
    """The state that the process before sent, whose share of the gradient of the caller's is zero."""

    @staticmethod
    def forward(ctx: Any, ends: _Ends, given: Tensor, received: Tensor, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.ends, ctx.shape = ends, (given.shape, given.dtype, given.device)
        ctx.set_materialize_grads(False)
        return received.clone(), *(x.view_as(x) for x in tokens)

    @staticmethod
    def backward(ctx: Any, adjoint: Tensor | None, *tokens: Tensor | None) -> Any:
        _once()
        shape, dtype, device = ctx.shape
        none = torch.zeros(shape, dtype=dtype, device=device)
        if ctx.ends.group.last:
            ctx.ends.gradient_entered(none if adjoint is None else adjoint)
        return None, none, None, *tokens


@final
class _Segment:
    """What going back through a segment asks: tensors with the graph that made them."""

    def __init__(self, ends: _Ends, entered: Tensor | None, out: Tensor, left: Tensor) -> None:
        self.ends, self.entered, self.out, self.left = ends, entered, out, left

    def own(self, out: Tensor, left: Tensor) -> Tensor:
        """c: what gradients of this segment's own outputs are of the state that enters it."""
        if self.entered is None:
            return torch.zeros_like(left)
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
        segment: _Segment = ctx.segment
        _once()
        return None, out, left + segment.ends.gradient_left(segment.own(out, left))


def _once() -> None:
    if torch.is_grad_enabled():
        raise AxesError("parallel.sequence: a split layer is differentiated once; leave create_graph out")


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
