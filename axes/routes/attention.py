"""Attention: a list memory read for all tokens at once. Gates become biases, rotations and reflections of the keys.

A scalar gate adds G_t - G_i to the score of pair i (ALiBi, FoX), a rotation turns keys and queries (RoPE), a
generalised Householder product transports keys through a triangular system (PaTH).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from axes.core.geometry import Entropic, Geometry
from axes.core.memory import Leaves, List
from axes.core.monoids import Element, rotate
from axes.core.rates import resolve
from axes.core.state_update import State, StateUpdate
from axes.routes.scan import floored


def run(update: StateUpdate, signal: Mapping[str, Tensor | float], state: State, q: Tensor) -> tuple[Tensor, State]:
    """Outputs (..., T, d_v) and the list after T more pairs. signal: batch dimensions, then T, then features."""
    _, h, monoid, step, memory = update.parts()
    assert isinstance(memory, List)
    k, v = signal["k"], signal["v"]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    rate = resolve(step.rate, signal)
    v = v * (rate[..., None] if isinstance(rate, Tensor) and rate.ndim else rate)
    old_keys, old_values, old_mass = state.theta
    old, length = old_keys.shape[-2], k.shape[-2]

    # the gates of the new tokens; what was stored before has seen none of them
    gated = memory.act(monoid.element(signal, rate, k[..., None, :]), _probe(k))
    element = monoid.element(signal, rate, k[..., None, :])
    drift = floored(gated[2].expand(*k.shape[:-1], 1)[..., 0]).cumsum(-1)  # G_t
    mass = torch.cat((old_mass.expand(*k.shape[:-2], old), -drift), -1)  # a pair's own mass less its birth's G
    keys, values = torch.cat((old_keys.expand(*k.shape[:-2], old, k.shape[-1]), k), -2), torch.cat((old_values, v), -2)
    turned_q, final_keys = q, keys
    correction: Tensor | None = None
    if element.angle is not None:
        angle = element.angle.expand(*k.shape[:-1], element.angle.shape[-1]).cumsum(-2)
        positions = torch.cat(
            (torch.zeros_like(angle[..., :1, :]).expand(*angle.shape[:-2], old, angle.shape[-1]), angle), -2
        )
        keys, turned_q = rotate(keys, -positions), rotate(q, -angle)
        final_keys = rotate(keys, angle[..., -1:, :])
    if element.left is not None and element.right is not None:
        correction, final_keys = _transport(keys, turned_q, _factors(memory, element, k), old)

    scale = memory.temperature(k.shape[-1])
    future = torch.ones(length, old + length, dtype=torch.bool, device=k.device).triu(old + 1)
    bias = (drift[..., :, None] + mass[..., None, :]).masked_fill(future, -torch.inf)
    if h.is_identity or correction is not None:
        scores = turned_q @ keys.mT if correction is None else turned_q @ keys.mT + correction
        weights = torch.exp(bias) * scale * scores if h.is_identity else torch.softmax(scale * scores + bias, -1)
        out = weights @ values
    else:
        out = scaled_dot_product_attention(turned_q, keys, values, attn_mask=bias, scale=scale)
    if not h.is_identity:
        out = out * _mass(h, old, length, out)
    last = mass + drift[..., -1:]
    theta = (final_keys, values, last)
    return out, State(theta, state.via, state.stats, state.norm, state.anchor, state.count + length)


def _mass(h: Geometry, old: int, length: int, like: Tensor) -> Tensor | float:
    """What the weights of one query sum to: a number, or the root of how many pairs it sees."""
    assert isinstance(h, Entropic)
    if h.mass is not None:
        return h.mass
    return torch.arange(old + 1, old + length + 1, dtype=like.dtype, device=like.device).sqrt()[:, None]


def _probe(k: Tensor) -> Leaves:
    """One massless pair per token: acting on it shows what a token's gate does to the mass."""
    return k[..., None, :], k[..., None, :], torch.zeros_like(k[..., :1])


def _factors(memory: List, element: Element, k: Tensor) -> tuple[Tensor, Tensor]:
    """a, b (..., T, d_k) of the transport I + a b^T, with any scalar gate already moved to the mass."""
    gate, left = element.gate, element.left
    assert left is not None and element.right is not None
    if gate is not None:
        left = left * torch.exp(-gate if gate.ndim == 0 else -gate[..., None])
    if left.shape[-1] != 1:
        raise NotImplementedError("attention transports keys through one reflection a token")
    return left[..., 0].expand_as(k), element.right[..., 0].expand_as(k)


def _transport(keys: Tensor, q: Tensor, factors: tuple[Tensor, Tensor], old: int) -> tuple[Tensor, Tensor]:
    """k_i (A_{i+1} ... A_t - I) q_t for A = I + a b^T, and the keys after all T maps.

    Pair i picks up p_{i,s} b_s at token s > i, where p_{i,s} = k_i . a_s + sum_{i<u<s} p_{i,u} b_u . a_s.
    """
    a, b = factors
    length = a.shape[-2]
    strict = (b @ a.mT).triu(1)  # [u, s] = b_u . a_s for u < s
    forced = (keys @ a.mT).triu(1 - old)  # [i, s] for s > i, stored pairs precede every s
    identity = torch.eye(length, dtype=a.dtype, device=a.device)
    picked = torch.linalg.solve_triangular(identity - strict, forced, upper=True, left=False, unitriangular=True)
    seen = (b @ q.mT).triu()  # [s, t] for s <= t
    return (picked @ seen).mT, keys + picked @ b
