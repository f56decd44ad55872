"""The cascade: stage by stage inside a chunk, exact for every lazy update without feedback inside it.

With an anchored gradient (or a cost linear in the state) no buffer reads the state, so all drives of a chunk come
first, then each filter as one scan, its geometry point by point, then the state as one scan, its geometry, the reads.
It interprets the same tuple as `reference`, stage-major instead of time-major.

Where every drive is one outer product a_t b_t^T and the filters are linear, the stages scan coordinates in the basis
(a_1 b_1^T, ..., a_C b_C^T, buffers and state at the chunk's start) instead of matrices. Euclidean memories, MLPs
included, are then read without forming a state per token; other geometries form it once, for their link, and without
filters each state is made of the one before (`states`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from axes.core import execution
from axes.core.algorithms import Anchor, Read, Sum
from axes.core.execution import Datum, Output
from axes.core.facts import fact
from axes.core.geometry import Context
from axes.core.legality import gates
from axes.core.memory import Factors, Leaves, RankOne
from axes.core.rates import Per, rate_shape, resolve
from axes.core.state_update import State, StateUpdate
from axes.linalg.formulas import again
from axes.routes.each import Each
from axes.routes.scan import cumulative
from axes.routes.spans import datum, sizes, split
from axes.routes.states import numbers, states

Tokens = Mapping[str, Tensor | float]
Filters = tuple[State | tuple[State, ...], ...]
Response = tuple[Leaves, Leaves, tuple[Context, ...]]
_CHUNK, _CHUNK_FACTORED = 16, 64
KEPT = 1 << 30  # bytes that a backward pass may keep before chunks are computed again in it
_FORMED = 1 << 26  # bytes of weights that are formed at a time, where every token has its own


def run(update: StateUpdate, signal: Tokens, state: State, q: Tensor, batch: int) -> tuple[Tensor, State]:
    """Outputs (..., T, d_v) and the final state. signal: `batch` batch dimensions, then T, then features.

    Where the backward pass would keep more than `KEPT` bytes, spans of chunks are computed again in it, and in these
    every chunk: what is kept is about two states for each root of the number of chunks.
    """
    step, factored = update.parts().step, is_factored(update)
    longest = _CHUNK_FACTORED if factored and update.parts().h.is_identity else _CHUNK
    lengths = sizes(q.shape[batch], longest, step.at, state.number())
    parts = list(zip(split({**signal, "q": q}, batch, lengths), lengths, strict=True))
    twice = _keeps(update, state, parts, q) > KEPT and live(signal, state, q)
    each = math.isqrt(len(parts) - 1) + 1 if twice else len(parts)
    outputs = []
    for first in range(0, len(parts), each):
        span = parts[first : first + each]
        if not twice:
            out, state = _span(update, span, state, batch, False)
        else:
            out, state = again(_span, update, span, _to_be_renewed(update, state), batch, True)
        outputs.append(out)
    return torch.cat(outputs, batch), state


def _span(
    update: StateUpdate, parts: Sequence[tuple[Tokens, int]], state: State, batch: int, twice: bool
) -> tuple[Tensor, State]:
    """Chunks in turn. twice: each is computed once more in the backward pass."""
    outputs = []
    for part, size in parts:
        if twice and len(parts) > 1:
            out, state = again(_one, update, part, _to_be_renewed(update, state), size, batch)
        else:
            out, state = _one(update, part, state, size, batch)
        outputs.append(out)
    return torch.cat(outputs, batch), state


def _one(update: StateUpdate, part: Tokens, state: State, size: int, batch: int) -> tuple[Tensor, State]:
    """What is read in a chunk, and the state after it."""
    if _renews(update, state):
        state = state.but(anchor=update.output(state, datum(part, batch, 0)).weights)
    if is_factored(update):
        bent = not update.parts().h.is_identity and not update.parts().step.via
        return (_walked if bent else _factored)(update, part, state, size, batch)
    out, state = _chunk(update, part, state, size)
    out = _each(out) if isinstance(update.parts().memory, RankOne) else out
    return update.read(out, cast(Tensor, part["q"]), part), state


def _each(out: Output) -> Output:
    """Weights of every token, of a memory that multiplies them with vectors alone."""
    return out._replace(weights=cast(Leaves, tuple(Each(w) for w in out.weights)))


def _renews(update: StateUpdate, state: State) -> bool:
    at = update.parts().step.at
    return isinstance(at, Anchor) and state.number() % at.every == 0


def _to_be_renewed(update: StateUpdate, state: State) -> State:
    """Without an anchor that nobody reads any more."""
    return state.but(anchor=state.theta) if _renews(update, state) else state


def _keeps(update: StateUpdate, state: State, parts: Sequence[tuple[Tokens, int]], q: Tensor) -> int:
    """Bytes that a backward pass would keep, about: states of every chunk, those that h sees of every token, and what
    tokens are on their way."""
    held = 4 * len(parts) * sum(x.numel() for x in pytree.tree_leaves(state) if isinstance(x, Tensor))
    tokens = 0 if update.parts().h.is_identity else sum(size for _, size in parts)
    formed = 5 * tokens * sum(x.numel() for x in state.theta)
    return q.element_size() * (held + formed + 24 * q.numel())


def live(signal: Tokens, state: State, q: Tensor) -> bool:
    """Whether there is going to be a backward pass."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    leaves = [q, *signal.values(), *pytree.tree_leaves(state)]
    return any(isinstance(x, Tensor) and x.requires_grad for x in leaves)


# ---- drives as matrices ------------------------------------------------------------------------------------------


def _chunk(update: StateUpdate, signal: Tokens, state: State, size: int) -> tuple[Output, State]:
    """All data of one chunk; leaves of the output have time before their matrix dimensions."""
    p = update.parts()
    timeless = state.but(theta=_with_time(state.theta), anchor=_with_time(state.anchor))
    u = execution.drive(p, Datum(timeless, signal, resolve(p.step.rate, signal), timeless.theta, timeless.anchor))
    u, via = _through(update, state.via, signal, u, size)
    response, new = _stage(update, state, signal, u, size)
    return execution.at_point(p, *response, by_formula=True), new.but(via=via)


def _through(update: StateUpdate, states: Filters, signal: Tokens, u: Leaves, size: int) -> tuple[Leaves, Filters]:
    """The drives of a chunk after each filter in turn."""
    via: list[State | tuple[State, ...]] = []
    for f, s in zip(update.parts().step.via, states, strict=True):
        branches = f.branches if isinstance(f, Sum) else (f,)
        inner = (s,) if isinstance(s, State) else s
        outs, ends = [], []
        for b, t in zip(branches, inner, strict=True):
            assert isinstance(b, StateUpdate)
            response, end = _stage(b, t, signal, u, size)
            outs.append(execution.at_point(b.parts(), *response, by_formula=True).weights)
            ends.append(end)
        if isinstance(f, Sum):
            weights = [resolve(w, signal) for w in f.weights]
            outs = [tuple(w * x for x in out) for w, out in zip(weights, outs, strict=True)]
        u = tuple(sum(xs[1:], xs[0]) for xs in zip(*outs, strict=True))
        via.append(ends[0] if isinstance(s, State) else tuple(ends))
    return u, tuple(via)


def _stage(update: StateUpdate, state: State, signal: Tokens, u: Leaves, size: int) -> tuple[Response, State]:
    """One linear recurrence over the chunk, after its statistics.

    Returns what the output is made of (dual points, their normalisers, what the geometry may see) and the last state.
    """
    _, h, monoid, step, memory = update.parts()
    rate = resolve(step.rate, signal)
    stats: list[State] = []
    seen: list[Leaves] = []
    for s, t in zip(update.statistics(), state.stats, strict=True):
        response, end = _stage(s, t, signal, execution.seen(s.parts(), u, signal, seen), size)
        stats.append(end)
        seen.append(execution.at_point(s.parts(), *response).weights)
    # element-wise gates act on ones: what is left is the gate of each leaf
    ones = tuple(torch.ones((1, 1), dtype=x.dtype, device=x.device) for x in u)
    gate = memory.act(monoid.element(signal, rate, u[0]), ones)
    zero = tuple(torch.zeros_like(o) for o in ones)
    entering = memory.add(zero, rate, rate_shape(step.rate), u)
    theta = tuple(_over_time(g, e, s, size) for g, e, s in zip(gate, entering, state.theta, strict=True))
    norm: Leaves = ()
    if step.debias:
        unit = memory.add(zero, rate, rate_shape(step.rate), ones)
        norm = tuple(_over_time(g, e, s, size) for g, e, s in zip(gate, unit, state.norm, strict=True))
    context = tuple(Context(x, tuple(s[i] for s in seen), None, signal) for i, x in enumerate(u))  # no h reads weights
    point, scale = theta, norm
    if isinstance(step.read, Read):
        g, r = resolve(step.read.gate, signal), resolve(step.read.rate, signal)
        point = tuple(g * _previous(x, s) + r * d for x, s, d in zip(theta, state.theta, u, strict=True))
        scale = tuple(g * _previous(n, s) + r for n, s in zip(norm, state.norm, strict=True))
    last = State(
        tuple(x[..., -1, :, :] for x in theta),
        state.via,
        tuple(stats),
        tuple(n[..., -1, :, :] for n in norm),
        state.anchor,
        state.count + size,
    )
    return (point, scale, context), last


def _with_time(leaves: Leaves) -> Leaves:
    return tuple(x[..., None, :, :] for x in leaves)


def _over_time(gate: Tensor, entering: Tensor, start: Tensor, size: int) -> Tensor:
    """Scan a leaf over the chunk; constants are the same at every token."""
    gate, entering = (x if x.ndim > 2 else x.expand(size, *x.shape) for x in (gate, entering))
    return cumulative(gate, entering, start)


def _previous(theta: Tensor, start: Tensor) -> Tensor:
    """theta_{t-1} for every token of the chunk."""
    first = start[..., None, :, :].expand(*theta.shape[:-3], 1, *theta.shape[-2:])
    return torch.cat((first, theta[..., :-1, :, :]), -3)


# ---- drives as outer products ------------------------------------------------------------------------------------


@fact
def is_factored(update: StateUpdate) -> bool:
    """Whether every stage is linear in outer products, with one coefficient per token and row."""
    cost, h, monoid, step, memory = update.parts()
    if not isinstance(memory, RankOne) or isinstance(cost.ridge, Per) or cost.ridge != 0.0:
        return False
    if h.stats or h.reads:  # it sees more than theta
        return False
    stages = (update, *update.filters())
    by_rows = all(
        gates(m) <= {"identity", "zero", "scalar", "row"} and rate_shape(s.rate) in ("scalar", "row")
        for _, _, m, s, _ in (x.parts() for x in stages)
    )
    return by_rows and all(f.parts().h.is_identity for f in update.filters())


@final
@dataclass(frozen=True, eq=False)
class _Still:
    """A leaf (..., m, n) that is the same at every token: multiplies columns (..., T, n, 1) without being repeated."""

    leaf: Tensor

    def __matmul__(self, x: Tensor) -> Tensor:
        return (x[..., 0] @ self.leaf.mT)[..., None]

    @property
    def mT(self) -> _Still:
        return _Still(self.leaf.mT)


@final
@dataclass(frozen=True, eq=False)
class _Moving:
    """A leaf at every token t:  W_t = sum_s c_ts * (a_s b_s^T) + sum_j c_tj * start_j,  not formed unless asked.

    c (..., T, 1|m, S + p), a (..., S, m), b (..., S, n), and p starts (..., m, n).
    """

    c: Tensor
    a: Tensor
    b: Tensor
    starts: Leaves

    def __matmul__(self, x: Tensor) -> Tensor:
        x, size = x[..., 0], self.a.shape[-2]
        dots = (x @ self.b.mT)[..., None, :]  # (..., T, 1, S)
        if self.c.shape[-2] == 1:
            y = (self.c[..., :size] * dots)[..., 0, :] @ self.a
        else:
            y = (self.c[..., :size] * dots * self.a.mT[..., None, :, :]).sum(-1)
        for j, start in enumerate(self.starts, size):
            y = torch.addcmul(y, self.c[..., j], x @ start.mT)
        return y[..., None]

    def formed(self) -> Tensor:
        """(..., T, m, n)."""
        size = self.a.shape[-2]
        left = self.c[..., :size] * self.a.mT[..., None, :, :]  # (..., T, m, S)
        w = (left.flatten(-3, -2) @ self.b).unflatten(-2, left.shape[-3:-1])
        for j, start in enumerate(self.starts, size):
            w = torch.addcmul(w, self.c[..., j, None], start[..., None, :, :])
        return w

    def tokens(self, first: int, end: int) -> _Moving:
        """Some of the tokens."""
        return _Moving(self.c[..., first:end, :, :], self.a, self.b, self.starts)

    def last(self) -> Tensor:
        """(..., m, n) after the last token."""
        return self.tokens(self.c.shape[-3] - 1, self.c.shape[-3]).formed()[..., 0, :, :]


def _factored(update: StateUpdate, signal: Tokens, state: State, size: int, batch: int) -> tuple[Tensor, State]:
    """`_chunk` in coordinates: the same stages, on rows of coefficients instead of matrices; and what is read."""
    factors = _drives(update, state, signal)
    buffers = [t for s in state.via for t in ((s,) if isinstance(s, State) else s)]
    starts = (state, *buffers)
    width, like = size + len(starts), factors[0][0]
    basis = torch.eye(width, dtype=like.dtype, device=like.device)[:, None, :]  # one row of coordinates each

    def shadow(s: State) -> State:
        place = size + next(i for i, x in enumerate(starts) if x is s)
        return s.but(theta=(basis[place],) * len(factors))

    via = tuple(shadow(s) if isinstance(s, State) else tuple(shadow(t) for t in s) for s in state.via)
    u, via = _through(update, via, signal, (basis[:size],) * len(factors), size)
    (point, norm, _), last = _stage(update, shadow(state), signal, u, size)

    def leaves(coordinates: Leaves) -> tuple[_Moving, ...]:
        begun = zip(*(s.theta for s in starts), strict=True)  # leaf by leaf
        return tuple(_Moving(c, a, b, w) for c, (a, b), w in zip(coordinates, factors, begun, strict=True))

    def solid(s: State) -> State:
        return s.but(theta=tuple(m.last() for m in leaves(_with_time(s.theta))))

    ends = tuple(solid(s) if isinstance(s, State) else tuple(solid(t) for t in s) for s in via)
    weights, after = leaves(point), solid(last).but(via=ends)
    if update.parts().h.is_identity:
        return update.read(Output(cast(Leaves, weights), norm), cast(Tensor, signal["q"]), signal), after

    def formed(first: int, end: int, _: Leaves) -> Leaves:
        return tuple(m.tokens(first, end).formed() for m in weights)

    return _linked(update, formed, state.theta, norm, signal, size, batch)[0], after


def _walked(update: StateUpdate, signal: Tokens, state: State, size: int, batch: int) -> tuple[Tensor, State]:
    """`_factored` of a state without filters that h bends: every token's state is needed, and is made from the last."""
    p, factors = update.parts(), _drives(update, state, signal)
    own = numbers(p, signal, tuple(a for a, _ in factors), size)
    writes = [(gate, rate * a, b) for (gate, rate), (a, b) in zip(own, factors, strict=True)]

    def formed(first: int, end: int, before: Leaves) -> Leaves:
        part = slice(first, end)
        return tuple(
            states(gate[..., part, :], value[..., part, :], key[..., part, :], w)
            for (gate, value, key), w in zip(writes, before, strict=True)
        )

    read, theta = _linked(update, formed, state.theta, (), signal, size, batch)
    return read, state.but(theta=theta, count=state.count + size)


def _linked(
    update: StateUpdate,
    formed: Callable[[int, int, Leaves], Leaves],
    start: Leaves,
    norm: Leaves,
    signal: Tokens,
    size: int,
    batch: int,
) -> tuple[Tensor, Leaves]:
    """What is read of weights that h makes of every token's own state, some tokens at a time; and the last state.

    formed: the states (..., T, m, n) of tokens from one to before another, of which the one before is given, too.
    """
    held = sum(w.numel() * w.element_size() for w in start)
    each = max(1, min(size, _FORMED // max(held, 1)))
    lengths = sizes(size, each, None, 0)

    def some(first: int, length: int, part: Tokens, before: Leaves) -> tuple[Tensor, Leaves]:
        theta = formed(first, first + length, before)
        own = tuple(n[..., first : first + length, :, :] for n in norm)
        out = execution.at_point(update.parts(), theta, own, (Context(signal=part),), by_formula=True)
        return update.read(_each(out), cast(Tensor, part["q"]), part), tuple(w[..., -1, :, :] for w in theta)

    outputs, first, before = [], 0, start
    for part, length in zip(split(signal, batch, lengths), lengths, strict=True):
        whole = len(lengths) == 1 or not torch.is_grad_enabled() or torch.compiler.is_compiling()
        given = (first, length, part, before)
        read, before = some(*given) if whole else again(some, *given)
        outputs.append(read)
        first += length
    return torch.cat(outputs, batch), before


def _drives(update: StateUpdate, state: State, signal: Tokens) -> Factors:
    """The factors of u = -grad l for all tokens at the anchor, or anywhere if the gradient does not depend on W."""
    p = update.parts()
    assert isinstance(p.memory, RankOne)
    x, target = execution.pair(p, signal)
    weights = cast(Leaves, tuple(_Still(w) for w in state.anchor or state.theta))
    prediction = p.memory.predict(weights, x, signal, encode=p.cost.encode) if p.predicts else target
    r = p.cost.residual(prediction, target, 0.0, signal)
    return p.memory.factors(weights, x, -r, signal, encode=p.cost.encode)


__all__ = ["KEPT", "is_factored", "live", "run"]
