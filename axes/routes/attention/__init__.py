"""Attention: a list memory read for all tokens at once. Gates become masses, rotations and reflections move keys.

A scalar gate adds G_t - G_i to the score of pair i (ALiBi, FoX): of these only the pair's own mass, -G_i, changes a
softmax. A rotation turns keys and queries once, to the frame of the first token (RoPE). A generalised Householder
product carries keys past blocks of tokens (PaTH). With Euclidean h the list is read through the matrix that it equals.

Keys, values and queries keep the dtype of the values, which is what products are taken in and lists are kept in; keys
that move at every token are kept in float32, or rounding would add up. Masses are summed in float64.
Legend: ... batch, T tokens, n pairs of the state, S = n + T, d_k key, d_v value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from axes.core.derived import Chain
from axes.core.geometry import Entropic, Geometry
from axes.core.memory import List
from axes.core.monoids import Element, rotate
from axes.core.rates import rate_shape, resolve
from axes.core.state_update import State, StateUpdate
from axes.routes import scan
from axes.routes.attention import softmax, transported


def run(update: StateUpdate, signal: Mapping[str, Tensor | float], state: State, q: Tensor) -> tuple[Tensor, State]:
    """Outputs (..., T, d_v) and the list after T more pairs. signal: batch dimensions, then T, then features."""
    _, h, _, _, memory = update.parts()
    assert isinstance(memory, List)
    k, v, element = _written(update, signal)
    q, length, scale = q.to(v.dtype), k.shape[-2], memory.temperature(k.shape[-1])
    gate = _log_gate(memory, element)
    final: Tensor | None = None
    old_keys, old_values, old_mass = state.theta
    old = old_mass.shape[-1]
    if element.angle is not None:
        turned = _turned(element.angle, length)
        q, k = _turn(q, -turned), _turn(k, -turned)
    keys, values = _behind(old_keys, k), _behind(old_values, v)
    mass = _mass_of(old_mass, gate, keys)
    if element.angle is not None:
        final = rotate(keys.to(turned.dtype), turned[..., -1:, :])
    if h.is_identity:
        out = scale * _linear(element, gate, state, k, v, q)
        if element.left is not None:
            final = transported.last_keys(keys, *_factors(memory, element, k))
    elif element.left is not None:
        a, b = _factors(memory, element, k)
        wide = (x.to(a.dtype) for x in (q, keys, values))
        out, final = transported.attend(*wide, a, b, scale, mass)
    else:
        out = softmax.attend(q, keys, values, scale, mass)
    if not h.is_identity:
        out = _weighed(h, old, out)
    kept = _now(mass, gate, keys)
    theta = (keys if final is None else final, values, kept)
    return out.to(v.dtype), State(theta, state.via, state.stats, state.norm, state.anchor, state.count + length)


# ---- the numbers of a token ----------------------------------------------------------------------------------------


def _written(update: StateUpdate, signal: Mapping[str, Tensor | float]) -> tuple[Tensor, Tensor, Element]:
    """Keys and values to be stored, in one dtype, and what happens to earlier pairs, in float32 at least."""
    _, _, monoid, step, _ = update.parts()
    k, v = signal["k"], signal["v"]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    numbers = dict(signal)
    for name in {*monoid.signals(), *(p.name for p in update.demands())}:
        x = numbers.get(name)
        if isinstance(x, Tensor):
            numbers[name] = x.to(wide)
    rate = resolve(step.rate, numbers)
    element = monoid.element(numbers, rate, k[..., :1, None, :].to(wide))
    if isinstance(rate, Tensor) or rate != 1.0:
        spread = isinstance(rate, Tensor) and rate.ndim and rate_shape(step.rate) == "scalar"
        v = (v * (rate[..., None] if spread else rate)).to(v.dtype)  # type: ignore[index]
    return k.to(v.dtype), v, element


def _log_gate(memory: List, element: Element) -> Tensor | None:
    """The log gates of the tokens' masses (..., T) or (): what the element does to a massless pair; None if nothing."""
    gate = element.gate
    if gate is None and isinstance(element.scale, float) and element.scale == 1.0:
        return None
    dtype = torch.float64 if gate is None else gate.dtype
    device = None if gate is None else gate.device
    none = torch.zeros(1, 1, dtype=dtype, device=device)
    moved = memory.act(Element(element.scale, gate), (none, none, none[0]))[2]
    return scan.floored(moved)[..., 0]


def _mass_of(old: Tensor, gate: Tensor | None, keys: Tensor) -> Tensor | None:
    """Log masses (..., S) less the gates after the first token: what the state held, then -G_i. None if all are 0."""
    length = keys.shape[-2] - old.shape[-1]
    if gate is None:
        return torch.cat((old.double(), old.new_zeros((*old.shape[:-1], length)).double()), -1) if old.shape[-1] else None
    batch = torch.broadcast_shapes(gate.shape[:-1], keys.shape[:-2])
    total = gate.to(keys.device).double().expand(*batch, length).cumsum(-1)
    return torch.cat((old.double().expand(*batch, old.shape[-1]), -total), -1)


def _now(mass: Tensor | None, gate: Tensor | None, keys: Tensor) -> Tensor:
    """Log masses after the last token."""
    wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
    if mass is None:
        return torch.zeros(keys.shape[:-1], dtype=wide, device=keys.device)
    return (mass if gate is None else mass - mass[..., -1:]).to(wide)


def _turned(angle: Tensor, length: int) -> Tensor:
    """Angles since the first token's past: (T, d_k/2) of constants, (..., T, d_k/2) of named ones."""
    total = angle.double().expand(*angle.shape[:-2], length, angle.shape[-1]).cumsum(-2)
    return total.remainder(2 * math.pi).to(angle.dtype)


def _turn(x: Tensor, angle: Tensor) -> Tensor:
    return rotate(x.to(angle.dtype), angle).to(x.dtype)


def _behind(old: Tensor, new: Tensor) -> Tensor:
    """Stored rows, then new ones; an empty store has no say in their dtype."""
    return torch.cat((old, new.expand(*old.shape[:-2], *new.shape[-2:])), -2) if old.shape[-2] else new


def _factors(memory: List, element: Element, k: Tensor) -> tuple[Tensor, Tensor]:
    """a, b (..., T, d_k) of the transport I + a b^T, with any scalar gate already moved to the mass."""
    gate, left = element.gate, element.left
    assert left is not None and element.right is not None
    if gate is not None:
        left = left * torch.exp(-gate if gate.ndim == 0 else -gate[..., None])
    if left.shape[-1] != 1:
        raise NotImplementedError("attention transports keys through one reflection a token")
    return left[..., 0].expand_as(k), element.right[..., 0].expand_as(k)


def _weighed(h: Geometry, old: int, out: Tensor) -> Tensor:
    """Softmax sums to one: times what the weights of a query sum to, a number, or the root of how many pairs it sees."""
    mass = _mass(h, old, out.shape[-2], out)
    return out if isinstance(mass, float) and mass == 1.0 else out * mass


def _mass(h: Geometry, old: int, length: int, like: Tensor) -> Tensor | float:
    assert isinstance(h, Entropic)
    if h.mass is not None:
        return h.mass
    return torch.arange(old + 1, old + length + 1, dtype=like.dtype, device=like.device).sqrt()[:, None]


def _linear(
    element: Element, gate: Tensor | None, state: State, k: Tensor, v: Tensor, q: Tensor
) -> Tensor:
    """What the matrix sum_i e^mass_i v_i k_i^T reads: keys and queries have been turned, the rest is a chain."""
    k, v, q = (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in (k, v, q))
    keys, values, mass = (x.to(k.dtype) for x in state.theta)
    start = (torch.exp(mass)[..., None] * values).mT @ keys
    factors = (x if x is None else x[..., 0][..., None, None, :].expand(*k.shape[:-1], 1, 1, k.shape[-1]) for x in (element.left, element.right))
    if gate is not None:
        gate = gate[..., None].to(k.dtype).expand(*k.shape[:-1], 1)
    a, b = factors
    return scan.chunked(Chain(k[..., None, :], v, gate, a=a, b=b), start[..., None, :], q)[0]
