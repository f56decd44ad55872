"""The affine chain of a tuple: the effective transition of state and buffers, and the write, of every token.

A token of an affine cost drives with  u = (v - theta seen) k^T,  seen = k before the gate or A k after it, and what
enters each slot of X = [theta | buffers] is a combination of the slots before the token and of u. So X is mapped by
gates and coefficients between slots, by the rank-one factors of the monoid, and by one more:  - seen (into)^T  where
into is what a unit of u puts into each slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, final

import torch
from torch import Tensor

from axes.core.algorithms import Read, Sum
from axes.core.declared import Recurrence
from axes.core.derived import block_size, erases_along_key, no_chain, scales_values
from axes.core.memory import Entries
from axes.core.monoids import Element
from axes.core.parts import Parts
from axes.core.rates import Rate, Signal, rate_shape, resolve
from axes.core.state_update import StateUpdate


@final
@dataclass(frozen=True, eq=False)
class Chain:
    """X_t = X_{t-1} M_t + sum_r (X_{t-1} . a_r) b_r^T + v k^T  over X = [theta | buffers], per token.

    gate: logs (..., T, 1|d_k) of the one-slot chain, or block: (..., T, p, p, 1|d_k) linear, source slot first;
    angle (..., T, d_k/2) or dense (..., T, d_k, d_k): the base of a one-slot chain, before the gate;
    a, b (..., T, r, p, d_k);  key (..., T, p, d_k), value (..., T, d_v).
    rows: every row of the state has its own transition: the row is a batch dimension before T and d_v is 1.
    erases: the only rank-one factor has b = -key: X_t = X_{t-1} M_t + (v - X_{t-1} . a) k^T.
    """

    key: Tensor
    value: Tensor
    gate: Tensor | None = None
    block: Tensor | None = None
    angle: Tensor | None = None
    dense: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    rows: bool = False
    erases: bool = False

    @property
    def slots(self) -> int:
        return self.key.shape[-2]

    def transition(self) -> Tensor:
        """The dense maps (..., T, p d_k, p d_k), X -> X A with X flattened (slot, key)."""
        p, d = self.key.shape[-2:]
        eye = torch.eye(d, dtype=self.key.dtype, device=self.key.device)
        if self.block is not None:
            full = self.block.expand(*self.block.shape[:-1], d)
            out = full[..., :, None, :, :] * eye[:, None, :]  # (..., p, d, p, d)
            out = out.reshape(*full.shape[:-3], p * d, p * d)
        else:
            base = Element(1.0, self.gate, self.angle, self.dense)
            out = base.base(eye)
            out = out.expand(torch.broadcast_shapes(out.shape, (*self.key.shape[:-2], d, d)))
        if self.a is not None and self.b is not None:
            a, b = self.a.flatten(-2), self.b.flatten(-2)
            out = out + a.mT @ b
        return out


def chain(update: StateUpdate, signal: Signal) -> Chain:
    """The effective transition and write of every token. signal: batch dimensions, then T, then features."""
    reason = no_chain(update)
    if reason is not None:
        raise ValueError(f"not an affine chain: {reason}")
    t = _tokens(update, signal)
    buffers, drive = _filters(t, _unfiltered(t))
    flows = [drive.scaled(t.rate), *buffers]
    into = _stack([f.drive * t.key for f in flows], -2)  # (..., T, p, d_k)
    if t.erases and t.entries:
        return _by_entry(t, flows[0], into)
    factors = _transition_factors(t)
    if t.erases:
        into = into if t.parts.step.at != "new" else _shrink(t)[..., None, :] * into
        factors.append((t.on_state(_seen(t)), -into))
    elif erases_along_key(update):
        factors = [(-a, -b) for a, b in factors]
    a = _stack([a for a, _ in factors], -3) if factors else None
    b = _stack([b for _, b in factors], -3) if factors else None
    if len(flows) > 1 or t.parts.ridged:
        return Chain(into, t.value, block=_block(t, flows), a=a, b=b, rows=t.layout.rows)
    value = t.value
    if not t.erases and not t.layout.rows and t.rate.shape[-1] == 1:  # keys that heads share stay shared
        into, one = t.key[..., None, :], resolve(t.parts.step.rate, t.signal)
        ready = isinstance(one, float) and one == 1.0 or scales_values(update)
        value = value if ready else t.rate * value
    angle, dense = t.layout.base(t.element)
    gate = t.gate if t.gated else None
    erases = t.erases and len(factors) == 1 or erases_along_key(update)
    return Chain(into, value, gate, None, angle, dense, a, b, rows=t.layout.rows, erases=erases)


def _stack(xs: Sequence[Tensor], dim: int) -> Tensor:
    """Broadcast and stacked; one alone is not copied."""
    return xs[0].unsqueeze(dim) if len(xs) == 1 else torch.stack(torch.broadcast_tensors(*xs), dim)


# ---- the tokens --------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class _Layout:
    """Moves what belongs to tokens into the chain's layout, with the row as a batch dimension where rows differ."""

    rows: bool

    def vector(self, x: Tensor) -> Tensor:
        """(..., T, n) -> (..., [1,] T, n)."""
        return x[..., None, :, :] if self.rows else x

    def value(self, v: Tensor) -> Tensor:
        """(..., T, d_v), or (..., d_v, T, 1) by rows."""
        return v.mT[..., None] if self.rows else v

    def outer(self, gate: Tensor) -> Tensor:
        """(..., T, d_v, n) -> (..., d_v, T, n)."""
        return gate.transpose(-2, -3)

    def base(self, element: Element) -> tuple[Tensor | None, Tensor | None]:
        """Angle and dense matrix of an element."""
        angle, dense = element.angle, element.dense
        angle = None if angle is None else self.vector(angle)
        return angle, dense if dense is None or not self.rows else dense[..., None, :, :, :]

    def rate(self, rate: Rate, signal: Signal, like: Tensor) -> Tensor:
        """A rate of each token as (..., T, 1|d_k)."""
        value, shape = resolve(rate, signal), rate_shape(rate)
        if not isinstance(value, Tensor) or value.ndim == 0:
            return torch.zeros_like(like[..., :1]) + value
        if shape == "row":
            return value.mT[..., None]
        return self.vector(value[..., None] if shape == "scalar" else value)

    def gate(self, element: Element, like: Tensor) -> Tensor:
        """All element-wise factors of an element as one log gate (..., T, 1|d_k)."""
        total = torch.zeros_like(like[..., :1])
        if not isinstance(element.scale, float) or element.scale != 1.0:
            total = total + torch.log(torch.as_tensor(element.scale, dtype=like.dtype, device=like.device))
        if element.gate is not None:
            total = total + (element.gate if element.gate.ndim == 0 else self.vector(element.gate))
        return total if element.outer is None else total + self.outer(element.outer)

    def kept(self, element: Element, like: Tensor) -> Tensor:
        """The same as a linear factor: numbers are not rounded through a logarithm, and zero has none."""
        if element.gate is None and element.outer is None:
            return torch.zeros_like(like[..., :1]) + element.scale
        return torch.exp(self.gate(element, like))


@final
@dataclass(frozen=True, eq=False)
class _Tokens:
    """What an update makes of a signal before anything is composed, in the chain's layout."""

    parts: Parts
    signal: Signal
    layout: _Layout
    slots: int
    k: Tensor  # the signal's keys as rows (..., T, 1, d_k), which elements act on
    key: Tensor  # (..., T, d_k)
    value: Tensor
    element: Element  # of the state's own monoid
    gate: Tensor  # its element-wise factors, a log
    rate: Tensor
    erases: bool  # whether the drive holds a prediction

    @property
    def entries(self) -> bool:
        return isinstance(self.parts.memory, Entries)

    @property
    def gated(self) -> bool:
        e = self.element
        return not (e.gate is None and e.outer is None and isinstance(e.scale, float) and e.scale == 1.0)

    @property
    def after_gate(self) -> bool:
        """Whether the drive sees the state after its gate."""
        return self.parts.step.at in ("gated", "new")

    @property
    def one(self) -> Tensor:
        return torch.ones_like(self.key[..., :1])

    def on_state(self, x: Tensor) -> Tensor:
        """A vector (..., T, d) on theta's slot of the chain: (..., T, p, d)."""
        return _stack([x] + [torch.zeros_like(x)] * (self.slots - 1), -2)


def _tokens(update: StateUpdate, signal: Signal) -> _Tokens:
    p = update.parts()
    k, v = signal["k"], signal["v"]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    rows = k[..., None, :]
    element = p.monoid.element(signal, resolve(p.step.rate, signal), rows)
    if element.angle is not None:
        element = replace(element, angle=element.angle.expand(*k.shape[:-1], element.angle.shape[-1]))
    scaled = scales_values(update)
    by_row = rate_shape(p.step.rate) == "row" and not scaled or rate_shape(p.cost.ridge) == "row"
    layout = _Layout(element.outer is not None or isinstance(p.memory, Entries) or by_row)
    key = layout.vector(k)
    if scaled:
        v = v * resolve(p.step.rate, signal)
    gate, rate = layout.gate(element, key), layout.rate(1.0 if scaled else p.step.rate, signal, key)
    erases = p.predicts and p.cost.curvature == "affine"
    return _Tokens(p, signal, layout, block_size(update), rows, key, layout.value(v), element, gate, rate, erases)


# ---- state and buffers -------------------------------------------------------------------------------------------


class _Flow(NamedTuple):
    """sum_i slots[i] X_i + drive * u: a combination of the slots before a token and its drive u.

    Coefficients are (..., T, 1|d_k).
    """

    slots: Sequence[Tensor]
    drive: Tensor

    def scaled(self, by: Tensor | float) -> _Flow:
        return _Flow([by * c for c in self.slots], by * self.drive)

    def plus(self, slot: int, coefficient: Tensor | float) -> _Flow:
        """With more of one slot."""
        return self._replace(slots=[c + coefficient if i == slot else c for i, c in enumerate(self.slots)])

    def added(self, other: _Flow) -> _Flow:
        return _Flow([a + b for a, b in zip(self.slots, other.slots, strict=True)], self.drive + other.drive)


def _unfiltered(t: _Tokens) -> _Flow:
    """The drive before the filters: u, less the ridge times the state it is evaluated at."""
    flow = _Flow([torch.zeros_like(t.one)] * t.slots, t.one)
    if not t.parts.ridged:
        return flow
    weight = t.layout.rate(t.parts.cost.ridge, t.signal, t.key)
    return flow.plus(0, -weight * (torch.exp(t.gate) if t.parts.step.at == "gated" else t.one))


def _filters(t: _Tokens, drive: _Flow) -> tuple[list[_Flow], _Flow]:
    """What enters the buffers, in the order of their slots, and the drive behind all filters."""
    buffers: list[_Flow] = []
    for f in t.parts.step.via:
        branches, weights = (f.branches, f.weights) if isinstance(f, Sum) else ((f,), (1.0,))
        outputs = []
        for branch in branches:
            assert isinstance(branch, Recurrence)
            buffer, output = _filter(t, branch.parts(), 1 + len(buffers), drive)
            buffers.append(buffer)
            outputs.append(output)
        drive = reduce(_Flow.added, (o.scaled(resolve(w, t.signal)) for o, w in zip(outputs, weights, strict=True)))
    return buffers, drive


def _filter(t: _Tokens, branch: Parts, slot: int, drive: _Flow) -> tuple[_Flow, _Flow]:
    """One filter: the new buffer, and its output, which is the buffer or its read point."""
    kept = t.layout.kept(branch.monoid.element(t.signal, 1.0, t.k), t.key)
    buffer = drive.scaled(t.layout.rate(branch.step.rate, t.signal, t.key)).plus(slot, kept)
    read = branch.step.read
    if read is None:
        return buffer, buffer
    assert isinstance(read, Read)
    return buffer, drive.scaled(resolve(read.rate, t.signal)).plus(slot, resolve(read.gate, t.signal))


def _block(t: _Tokens, flows: Sequence[_Flow]) -> Tensor:
    """What stays and moves between slots, (..., T, p, p, 1|d_k), source slot first."""
    into = [flows[0].plus(0, torch.exp(t.gate)), *flows[1:]]
    wide = torch.broadcast_shapes(*(c.shape for f in into for c in f.slots))
    return torch.stack([torch.stack([c.expand(wide) for c in f.slots], dim=-2) for f in into], dim=-2)


# ---- curvature ---------------------------------------------------------------------------------------------------


def _transition_factors(t: _Tokens) -> list[tuple[Tensor, Tensor]]:
    """The monoid's own low-rank part, pair by pair (a_r, b_r)."""
    left, right = t.element.left, t.element.right
    if left is None or right is None:
        return []
    pairs = zip(left.unbind(-1), right.unbind(-1), strict=True)
    return [(t.on_state(t.layout.vector(a)), t.on_state(t.layout.vector(b))) for a, b in pairs]


def _shrink(t: _Tokens) -> Tensor:
    """How much of the drive an implicit step leaves: (I + rate k k^T)^-1 k = k / (1 + rate |k|^2)."""
    if t.parts.step.at != "new":
        return t.one
    return 1.0 / (1.0 + t.rate * (t.key * t.key).sum(-1, keepdim=True))


def _seen(t: _Tokens) -> Tensor:
    """What of theta the prediction reads: k, or A k where the gate acts first."""
    if not t.after_gate:
        return t.key
    element = t.element
    seen = t.layout.vector(_through(element, t.k))
    return seen if element.outer is None else seen * torch.exp(t.layout.outer(element.outer))


def _through(element: Element, k: Tensor) -> Tensor:
    """A k of right actions, for keys as rows (..., 1, d_k)."""
    seen = element.transpose_base(k)[..., 0, :]
    if element.left is not None and element.right is not None:
        seen = seen + (element.left @ (element.right.mT @ k.mT))[..., 0]
    return seen


def read_by_key(update: StateUpdate, signal: Signal) -> tuple[Tensor, Tensor | float]:
    """What of the state before a token its error reads, and the share of the error that drives: of any layout.

    The share is 1 but for implicit steps, 1 / (1 + rate |k|^2).
    """
    p, k = update.parts(), signal["k"]
    assert isinstance(k, Tensor)
    rate = resolve(p.step.rate, signal)
    if p.step.at == "prev":
        return k, 1.0
    seen = _through(p.monoid.element(signal, rate, k[..., None, :]), k[..., None, :])
    if p.step.at != "new":
        return seen, 1.0
    each = isinstance(rate, Tensor) and rate.ndim
    return seen, 1.0 / (1.0 + (rate[..., None] if each else rate) * (k * k).sum(-1, keepdim=True))  # type: ignore[index]


def _by_entry(t: _Tokens, drive: _Flow, into: Tensor) -> Chain:
    """Each entry predicts alone: what the rank-one factor would be is part of the gate."""
    shrink = _shrink(t)
    erased = -(shrink * t.rate) * (t.key * t.key)  # few products have a row, a token and a key each: they are the cost
    kept = drive.slots[0] + torch.exp(t.gate) + (erased * torch.exp(t.gate) if t.after_gate and t.gated else erased)
    value, written = t.value, shrink[..., None, :] * into
    if t.layout.rows and drive.drive.shape[-1] == 1 and shrink.shape[-1] == 1:  # one strength a row stands on its value
        value, written = shrink * drive.drive * value, t.key[..., None, :]
    return Chain(written, value, block=kept[..., None, None, :], rows=t.layout.rows)


__all__ = ["Chain", "chain", "read_by_key"]
