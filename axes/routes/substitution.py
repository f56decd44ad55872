"""Substitution: a nonlinear drive u_t = rho_t(W k_t) of a memory whose gates and rates act on rows or the whole.

Inside a chunk only u is nonlinear. What the keys of the chunk read, P_s = W k_s, is carried in the place of W:

    x_t = P_t,    u_t = rho_t(x_t),    P_s = a_t * P_s + (k_s . k_t) u_t    for the later tokens s,

vectors (d_v) alone, a state never. With u known, outputs and the chunk's last state are those of gated linear
attention. Where the gradient is anchored all u are known at once; where rho is affine, with rates or gates by rows,
every row is one triangular system. The loop of all others runs without autograd. Derivatives come
from u = rho(x(u)) once more, with u on the right a constant: (I - J L) du = d rho, J the slopes of rho and L how x
depends on u, so that the adjoint is the same loop backwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from axes.core.algorithms import Anchor
from axes.core.derived import feedback
from axes.core.execution import pair
from axes.core.memory import Leaves, RankOne, outer
from axes.core.parts import Parts
from axes.core.rates import rate_shape, resolve
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError
from axes.linalg.formulas import followed
from axes.routes import one_state
from axes.routes.spans import datum, sizes, split

Tokens = Mapping[str, Tensor | float]
_CHUNK, _CHUNK_SOLVED, _BLOCK = 64, 16, 16
_STRAIGHT = torch.contiguous_format


def run(update: StateUpdate, signal: Tokens, state: State, q: Tensor, batch: int) -> tuple[Tensor, State]:
    """Outputs (..., T, d_v) and the final state. signal: `batch` batch dimensions, then T, then features."""
    at, outputs, count = update.parts().step.at, [], state.number()
    lengths: list[int] = []
    for size in sizes(q.shape[batch], _CHUNK_SOLVED if _is_affine(update) else _CHUNK, at, count):
        while size:  # gates by rows are halved, and halved again
            lengths.append(1 << size.bit_length() - 1)
            size -= lengths[-1]
    for part, size in zip(split({**signal, "q": q}, batch, lengths), lengths, strict=True):
        if isinstance(at, Anchor) and count % at.every == 0:
            state = state.but(anchor=state.theta)
        out, state = _chunk(update, part, state, part["q"])
        outputs.append(out)
        count += size
    return torch.cat(outputs, batch), state


@final
class _Chunk:
    """A chunk as gated linear attention of what is written: all but the u (N, C, d_v), over flat batches N."""

    def __init__(self, p: Parts, signal: Tokens, theta: Tensor) -> None:
        k = signal["k"]
        assert isinstance(k, Tensor)
        self.p, self.signal, self.batch, self.size = p, signal, theta.shape[:-2], k.shape[-2]
        self.early = p.step.at == "prev"
        self.gate = row_gate(p, signal, k)
        self.written = torch.nn.functional.normalize(k, dim=-1, eps=_tiny(k)) if p.step.via else k
        self.start, self.keys, self.rows = self.flat(theta), self.flat(k), self.flat(self.written)
        self.decays = one_state.decays(None if self.gate is None else self.flat(self.gate), self.rows, _BLOCK)
        self.asked = Asked.of(p, signal)

    def flat(self, x: Tensor) -> Tensor:
        return x.expand(*self.batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])

    def deep(self, x: Tensor) -> Tensor:
        return x.unflatten(0, self.batch)

    def before(self) -> tuple[Tensor, Tensor, Tensor]:
        """What keys read before their tokens write: of the first state as it is (N, C, d_v), how much of that is left,
        and of the writes (N, C, C)."""
        kept = self.decays.kept
        if self.early and self.gate is not None:
            kept = torch.cat((torch.ones_like(kept[:, :1]), kept[:, :-1]), 1)
        return self.keys @ self.start.mT, kept, (self.keys @ self.rows.mT).tril(-1)

    def seen(self, u: Tensor, before: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """What every key reads (..., C, d_v), from all u."""
        reads, kept, pairs = before
        return self.deep(kept * reads + self.decays.mixed(pairs, u, self.early))

    def read(self, u: Tensor, q: Tensor) -> Tensor:
        asked = self.flat(q)
        y = self.decays.kept * (asked @ self.start.mT) + self.decays.mixed(asked @ self.rows.mT, u)
        return self.p.memory.read(cast(Leaves, (Read(self.deep(y)),)), q, self.signal, self.p.h)

    def last(self, u: Tensor) -> Tensor:
        """The state (..., d_v, d_k) after the chunk."""
        added = (self.decays.left * u).mT @ self.rows
        return self.deep(added + (self.start if self.gate is None else self.decays.kept[:, -1, :, None] * self.start))


def _chunk(update: StateUpdate, signal: Tokens, state: State, q: Tensor | float) -> tuple[Tensor, State]:
    assert isinstance(q, Tensor)
    p, (theta,) = update.parts(), state.theta
    c = _Chunk(p, signal, theta)
    if isinstance(p.step.at, Anchor):
        x = c.deep(c.keys @ c.flat(state.anchor[0]).mT)
        u, held = response(p, x, c.asked)
        u, held = u.flatten(0, -3), [h[..., -1, :] for h in held]
    else:
        before = c.before()
        u = _solved(c, before) if _is_affine(update) else _settled(c, before)
        held = []
        if p.step.via:  # what filters hold after the last token
            last = Asked.of(p, datum(signal, len(c.batch), c.size - 1))
            _, held = response(p, c.seen(u, before)[..., -1, :], last)
    ends = (outer(h, c.written[..., -1, :]) for h in held)
    via = tuple(s.but(theta=(w,), count=s.count + c.size) for s, w in zip(cast(Any, state.via), ends, strict=True))
    return c.read(u, q), state.but(theta=(c.last(u),), via=via, count=state.count + c.size)


def _solved(c: _Chunk, before: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """u = b + J x(u) of a drive that is affine in every coordinate alone: a triangular system a row."""
    reads, kept, pairs = before
    x = c.deep(kept * reads)
    fixed, _ = response(c.p, torch.zeros_like(x), c.asked)
    slope = response(c.p, torch.ones_like(x), c.asked)[0] - fixed
    fixed, slope, x = (y.flatten(0, -3) for y in (fixed, slope, x))
    system = slope[..., None, :] * c.decays.between(c.early) * pairs[..., None]  # (N, C, C, d_v)
    system = torch.eye(c.size, dtype=x.dtype, device=x.device) - system.movedim(-1, 1)
    forced = (fixed + slope * x).mT[..., None]
    return torch.linalg.solve_triangular(system, forced, upper=False, unitriangular=True)[..., 0].mT


def _unrolled(c: _Chunk, before: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """`_settled` by operations that anybody follows: every u of all before it."""
    none = c.deep(torch.zeros_like(before[0]))
    found: list[Tensor] = []
    for t, asked in enumerate(c.asked.tokens(len(c.batch), c.size)):
        u = torch.cat((*(u[..., None, :] for u in found), none[..., t:, :]), -2)
        found.append(response(c.p, c.seen(u.flatten(0, -3), before)[..., t, :], asked)[0])
    return torch.stack(found, -2).flatten(0, -3)


def _settled(c: _Chunk, before: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """u = rho(x(u)): found without derivatives, then once more with them."""
    if followed():
        return _unrolled(c, before)
    reads, _, pairs = before
    inputs = [x for x in (*c.signal.values(), reads) if isinstance(x, Tensor)]
    live = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    factor = None if c.gate is None else c.gate.detach().exp().expand(*c.batch, *c.gate.shape[-2:])
    with torch.no_grad():
        still = Asked.of(c.p, {n: x.detach() if isinstance(x, Tensor) else x for n, x in c.signal.items()})
        across = c.deep(pairs.detach())
        found = _found(c.p, still.tokens(len(c.batch), c.size), c.deep(reads.detach()), across, factor)
    x = c.seen(found.flatten(0, -3), before)
    u, _ = response(c.p, x, c.asked)
    if live:
        u = cast(Tensor, _Settled.apply(u, _Tape(c.p, across, factor, x.detach(), still)))
    return u.flatten(0, -3)


def row_gate(p: Parts, signal: Tokens, k: Tensor) -> Tensor | None:
    """The log gate (..., T, 1|d_v) of the memory's rows, or None where nothing is forgotten."""
    element = p.monoid.element(signal, resolve(p.step.rate, signal), k[..., None, :])
    if element.trivial:
        return None
    gate = torch.zeros_like(k[..., :1])
    if not isinstance(element.scale, float) or element.scale != 1.0:
        gate = gate + torch.as_tensor(element.scale, dtype=k.dtype, device=k.device).log()
    if element.gate is not None:
        gate = gate + element.gate
    gate = gate if element.outer is None else gate + element.outer[..., 0]
    return gate.clamp_min(one_state.floor(gate.dtype))


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny ** 0.5


def _is_affine(update: StateUpdate) -> bool:
    return feedback(update) == "affine" and not update.parts().step.via


def _by_coordinate(p: Parts) -> bool:
    """Whether an entry of what is written depends on that entry of what is read alone."""
    return p.cost.by_coordinate and p.memory.linear and not p.step.via


# ---- what a token writes -------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Read:
    """A matrix of which one product is known: with the key (..., d_k, 1) it is x (..., d_v, 1)."""

    x: Tensor

    def __matmul__(self, key: Tensor) -> Tensor:
        return self.x[..., None]


class Asked(NamedTuple):
    """What does not depend on the state of what tokens write. weight: the rate against values (..., d_v), held: those
    of filters, times |k| for the first; moreau: c of an implicit step."""

    signal: Tokens
    weight: Tensor | float
    moreau: Tensor | float
    held: tuple[Tensor | float, ...]

    @classmethod
    def of(cls, p: Parts, signal: Tokens) -> Asked:
        weight, (key, _) = each(p, signal), pair(p, signal)
        moreau = weight * p.memory.sharpness(key) if p.step.at == "new" else 0.0
        held = [each(f, signal) for f in p.filters()]
        if held:
            held[0] = held[0] * torch.linalg.vector_norm(key, dim=-1, keepdim=True)
        return cls(signal, weight, moreau, tuple(held))

    def tokens(self, dim: int, size: int) -> list[Asked]:
        """One for each token."""
        signal = {n: _each_token(x, dim, size) for n, x in self.signal.items()}
        numbers = [_each_token(x, dim, size) for x in (self.weight, self.moreau, *self.held)]
        out = []
        for t in range(size):
            weight, moreau, *held = (x[t] for x in numbers)
            out.append(Asked({n: xs[t] for n, xs in signal.items()}, weight, moreau, tuple(held)))
        return out


def _each_token(x: Tensor | float, dim: int, size: int) -> Sequence[Tensor | float]:
    return x.unbind(dim) if isinstance(x, Tensor) and x.ndim > dim else [x] * size


def response(p: Parts, x: Tensor, asked: Asked) -> tuple[Tensor, list[Tensor]]:
    """The value (..., d_v) that a token writes along its key, from what its key reads; and what each filter holds."""
    key, target = pair(p, asked.signal)
    weights = cast(Leaves, (Read(x),))
    assert isinstance(p.memory, RankOne)
    prediction = p.memory.predict(weights, key, asked.signal)
    r = p.cost.residual(prediction, target, asked.moreau, asked.signal)
    ((value, _),) = p.memory.factors(weights, key, -r, asked.signal)
    held = []
    for f, weight in zip(p.filters(), asked.held, strict=True):
        # h of value key^T is h of one column, (|key| value), along the direction of the key
        held.append(weight * value)
        value = f.h.primal(held[-1][..., None])[..., 0]
    return asked.weight * value, held


def each(p: Parts, signal: Tokens) -> Tensor | float:
    """The rate of a step against values (..., d_v)."""
    rate = resolve(p.step.rate, signal)
    scalar = isinstance(rate, Tensor) and rate.ndim > 0 and rate_shape(p.step.rate) == "scalar"
    return rate[..., None] if scalar else rate  # type: ignore[index]


def _found(p: Parts, tokens: Sequence[Asked], reads: Tensor, pairs: Tensor, factor: Tensor | None) -> Tensor:
    """All u (..., C, d_v), token by token.

    reads (..., C, d_v): what the keys read of the first state; pairs (..., C, C): what keys read of writes.
    """
    early = p.step.at == "prev"
    carried = reads.movedim(-2, 0).clone(memory_format=_STRAIGHT)  # which the loop writes over
    later = pairs.movedim((-1, -2), (0, 1))[..., None].contiguous()  # by writer, then by reader
    factors = None if factor is None else factor.movedim(-2, 0)
    found = []
    for first in range(0, len(tokens), _BLOCK):  # beyond a block, what it wrote is read at its end
        end = min(first + _BLOCK, len(tokens))
        block = carried[first:end]
        for t in range(first, end):
            rest = block[t - first :]
            if factors is not None and not early:
                rest.mul_(factors[t])
            u, _ = response(p, rest[0], tokens[t])
            found.append(u)
            if factors is not None and early:
                rest.mul_(factors[t])
            if t + 1 < end:
                rest[1:].addcmul_(later[t, t + 1 : end], u)
        if end < len(tokens):
            written, beyond = torch.stack(found[first:end]), carried[end:]
            if factors is not None:
                left = factors[first:end].expand_as(written).flip(0).cumprod(0).flip(0)
                beyond.mul_(left[0])
                written[:-1].mul_(left[1:])
            beyond.add_((later[first:end, end:] * written[:, None]).sum(0))
    return torch.stack(found, -2)


# ---- derivatives ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Tape:
    """What the adjoint needs of a chunk: pairs (..., C, C), factors of the rows, and where rho has its slopes."""

    p: Parts
    pairs: Tensor
    factor: Tensor | None
    x: Tensor
    asked: Asked

    def adjoint(self, given: Tensor) -> Tensor:
        """(I - J L)^-T of a cotangent (..., C, d_v) of u."""
        size, early = given.shape[-2], self.p.step.at == "prev"
        total = given.movedim(-2, 0).clone(memory_format=_STRAIGHT)
        earlier = self.pairs.movedim((-2, -1), (0, 1))[..., None].contiguous()  # by reader, then by writer
        factors = None if self.factor is None else self.factor.movedim(-2, 0)
        slopes = self._slopes()
        dense = slopes.ndim > total.ndim
        seen = torch.zeros_like(total)  # what the reads of later tokens ask of the writes of earlier ones
        for end in range(size, 0, -_BLOCK):
            first = max(0, end - _BLOCK)
            backs = []
            for t in range(end - 1, first - 1, -1):
                rest, now = seen[first : t + 1], total[t]
                now += rest[-1]
                backs.append((now[..., None, :] @ slopes[t])[..., 0, :] if dense else slopes[t] * now)
                if t == first:
                    break
                if factors is not None and early:
                    rest.mul_(factors[t])
                rest[:-1].addcmul_(earlier[t, first:t], backs[-1])
                if factors is not None and not early:
                    rest.mul_(factors[t])
            if first > 0:
                asked, before = torch.stack(backs[::-1]), seen[:first]
                if factors is not None:
                    kept = factors[first:end].expand_as(asked).cumprod(0)
                    before.mul_(kept[-1])
                    asked = torch.cat((asked[:1], asked[1:] * kept[:-1])) if early else asked * kept
                before.add_((earlier[first:end, :first] * asked[:, None]).sum(0))
        return total.movedim(0, -2)

    def _slopes(self) -> Tensor:
        """(C, ..., d_v) where rho acts on every coordinate alone, else (C, ..., d_v, d_v)."""
        with torch.enable_grad():
            x = self.x.requires_grad_()
            u, _ = response(self.p, x, self.asked)
        if _by_coordinate(self.p):
            return torch.autograd.grad(u, x, torch.ones_like(u))[0].movedim(-2, 0)
        width = u.shape[-1]
        each = torch.eye(width, dtype=u.dtype, device=u.device).view(width, *[1] * (u.ndim - 1), width)
        (slopes,) = torch.autograd.grad(u, x, each.expand(width, *u.shape), is_grads_batched=True)
        return slopes.movedim((-2, 0), (0, -2)).contiguous()


class _Settled(torch.autograd.Function):
    """rho(x(u)) of the u that it equals: as a value itself, with the derivatives of the u that settles."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, tape: _Tape) -> Tensor:
        ctx.tape = tape
        return u.view_as(u)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise AxesError(
                "a sequence by substitution has first derivatives only: for second ones run it with "
                "implementation='reference', which interprets the tuple"
            )
        return ctx.tape.adjoint(given), None


__all__ = ["Asked", "Read", "each", "response", "row_gate", "run"]
