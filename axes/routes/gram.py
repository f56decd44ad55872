"""Exact chunk forms of normalised slots in the space of their inner products (Lattice Sim, Enc and Dec).

The gates of a slot need the state only through inner products with the chunk's values, so the token loop runs on
(C, d_k) numbers and the width d_v appears in matrix products alone. A forget gate mu only rescales the step: with the
renormalisation, (mu, gamma) is the same update as (1, gamma / mu).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.routes import one_state


def sim(
    start: Tensor, k: Tensor, v: Tensor, q: Tensor, step: Tensor, encode: bool = False
) -> tuple[Tensor, Tensor]:
    """Alignment cost. start (..., d_v, d_k) with unit columns, k, q (..., C, d_k), v (..., C, d_v), step (..., C).

    s_{t,i} = A_{t,i} s_{0,i} + sum_tau B_{t,tau,i} v_tau. Returns o (..., C, d_v) and the last state.
    encode: squared error of the encoded value. It turns slot i by k_i - <s_i, v> where alignment turns it by k_i, and
    that inner product is what a gate needs anyway.
    """
    size, batch = k.shape[-2], start.shape[:-2]
    overlap, gram = v @ start, v @ v.mT  # (..., C, d_k), (..., C, C)
    kept, written = cast(tuple[Tensor, Tensor], _Turned.apply(overlap, gram, k, step, encode))

    def whole(x: Tensor, fill: float = 0.0) -> Tensor:
        """Flat, and up to a power of two with tokens that do nothing."""
        room = (1 << (size - 1).bit_length()) - size
        x = x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
        return torch.nn.functional.pad(x, (0, 0, 0, room), value=fill) if room else x

    slots, values, asked, added = whole(start.mT).mT[..., : start.shape[-1]], whole(v), whole(q), whole(written)
    factors = one_state.Factors(whole(kept, 1.0))
    out = (factors.kept * asked) @ slots.mT + factors.scores(asked, added) @ values
    last = slots * factors.kept[:, -1:, :] + values.mT @ (factors.left * added)
    return out[:, :size].unflatten(0, batch), _unit(last.unflatten(0, batch))


def _turn(p: Tensor, key: Tensor, step: Tensor, square: Tensor, encode: bool) -> tuple[Tensor, Tensor]:
    """(a, b) of slots that become a s + b v: p = <s, v>, key (..., d_k), step and square = |v|^2 (..., 1)."""
    turn = step * (key - p if encode else key)
    norm = torch.rsqrt(1 + turn * turn * (square - p * p).clamp_min(0))
    return norm * (1 - turn * p), norm * turn


class _Turned(torch.autograd.Function):
    """(a, b) of every token (..., C, d_k), from the slots' products with the values and those of the values.

    A token turns what later ones find, p_s <- a_t p_s + <v_s, v_t> b_t; the adjoint is the same loop backwards.
    """

    @staticmethod
    def forward(ctx: Any, overlap: Tensor, gram: Tensor, k: Tensor, step: Tensor, encode: bool) -> Any:
        size = k.shape[-2]
        carried = overlap.movedim(-2, 0).clone(memory_format=torch.contiguous_format)
        pairs = gram.movedim((-2, -1), (0, 1))[..., None].contiguous()
        squares = gram.diagonal(dim1=-2, dim2=-1)
        tokens = (x.unbind(-2) for x in (k, step[..., None], squares[..., None]))
        found, met = [], []
        for t, (key, rate, square) in enumerate(zip(*tokens, strict=True)):
            found.append(_turn(carried[t], key, rate, square, encode))
            if t + 1 < size:
                a, b = found[-1]
                later = carried[t + 1 :]
                met.append(later.clone())
                torch.addcmul(pairs[t, t + 1 :] * b, later, a, out=later)
        a, b = (torch.stack(x, -2) for x in zip(*found, strict=True))
        ctx.save_for_backward(a, b, pairs, k, step, carried, *met)
        ctx.encode = encode
        return a, b

    @staticmethod
    def backward(ctx: Any, given_a: Tensor, given_b: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise AxesError(
                "slots in the space of their inner products have first derivatives only: for second ones run the "
                "sequence with implementation='reference', which interprets the tuple"
            )
        a, b, pairs, k, step, p, *met = ctx.saved_tensors
        size = k.shape[-2]
        square = pairs.diagonal(dim1=0, dim2=1)[..., 0, :, None]
        inputs = [x.detach().requires_grad_() for x in (p.movedim(0, -2), k, step[..., None], square)]
        with torch.enable_grad():
            found, keys, rates, squares = inputs
            turned = _turn(found, keys, rates, squares, ctx.encode)
        slopes = [torch.autograd.grad(x, inputs[0], torch.ones_like(x), retain_graph=True)[0] for x in turned]
        by_a, by_b = (x.movedim(-2, 0).contiguous() for x in slopes)
        into_a, into_b = (x.movedim(-2, 0).clone(memory_format=torch.contiguous_format) for x in (given_a, given_b))
        kept, added = a.movedim(-2, 0), b.movedim(-2, 0)
        into, by_pair = torch.zeros_like(p), torch.zeros_like(pairs)
        for t in range(size - 1, -1, -1):
            later, now_a, now_b = into[t + 1 :], into_a[t], into_b[t]
            if t + 1 < size:
                now_a += (later * met[t]).sum(0)
                now_b += (later * pairs[t, t + 1 :]).sum(0)
                torch.sum(later * added[t], -1, keepdim=True, out=by_pair[t, t + 1 :])
                later *= kept[t]
            torch.addcmul(by_a[t] * now_a, by_b[t], now_b, out=into[t])
        cotangents = [x.movedim(0, -2) for x in (into_a, into_b)]
        _, by_key, by_step, by_square = torch.autograd.grad(turned, inputs, cotangents)
        gram = by_pair[..., 0].movedim((0, 1), (-2, -1)) + torch.diag_embed(by_square[..., 0])
        return into.movedim(0, -2), gram, by_key, by_step[..., 0], None


def dec(start: Tensor, k: Tensor, v: Tensor, q: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of the decoded key, shapes as `sim`: carries the slots' Gram matrix M and S_t = S_0 U + V^T B."""
    size, d_k = k.shape[-2:]
    batch = start.shape[:-2]
    gram = v @ v.mT
    slots, values = start.mT @ start, start.mT @ v.mT  # M (..., d_k, d_k), X (..., d_k, C)
    basis = torch.eye(d_k, dtype=k.dtype, device=k.device).expand(*batch, d_k, d_k)
    written = torch.zeros(*batch, size, d_k, dtype=k.dtype, device=k.device)
    place = torch.eye(size, dtype=k.dtype, device=k.device)
    reads_start, reads_values = [], []
    for t in range(size):
        key, rate, x = k[..., t, :], step[..., t, None], values[..., t]
        gate = 1 + rate * key * ((slots @ key[..., None])[..., 0] - x)
        y = rate * (gate * x - rate * key * (key * x).sum(-1, keepdim=True))

        def turn(z: Tensor, key: Tensor = key, rate: Tensor = rate, gate: Tensor = gate) -> Tensor:
            """z R with R = Diag(gate) - rate k k^T."""
            return z * gate[..., None, :] - (z @ key[..., None]) * (rate * key)[..., None, :]

        basis = turn(basis)
        written = turn(written) + place[t][:, None] * (rate * key)[..., None, :]
        values = turn(values.mT).mT + (rate * key)[..., :, None] * gram[..., t, None, :]
        slots = turn(turn(slots).mT).mT
        slots = slots + y[..., :, None] * key[..., None, :] + key[..., :, None] * y[..., None, :]
        slots = slots + (rate * rate * gram[..., t, t, None])[..., None] * key[..., :, None] * key[..., None, :]
        inverse = torch.rsqrt(slots.diagonal(dim1=-2, dim2=-1))
        basis, written = basis * inverse[..., None, :], written * inverse[..., None, :]
        values, slots = values * inverse[..., :, None], slots * inverse[..., :, None] * inverse[..., None, :]
        reads_start.append((basis @ q[..., t, :, None])[..., 0])
        reads_values.append((written @ q[..., t, :, None])[..., 0])
    out = torch.stack(reads_start, -2) @ start.mT + torch.stack(reads_values, -2) @ v
    return out, _unit(start @ basis + v.mT @ written)


def _unit(state: Tensor) -> Tensor:
    """True norms, not accumulated ones: rounding must not drift (lattice.md L36)."""
    return state * torch.rsqrt((state * state).sum(-2, keepdim=True))
