"""Exact chunk forms of slots by their turns: every token makes of each slot a multiple of it and of one direction.

    S_t = S_{t-1} Diag(a_t) + d_t b_t^T

Where the direction d is the value, a and b need the state only through inner products with the chunk's values, so that
the token loop runs on (C, d_k) numbers (Lattice Sim and Enc). Where it is the error, v - Phi k, the loop holds the
slots (Lattice Dec and OSR). Loops run without autograd and have adjoints of their own; with a, b and d known, outputs
are products. A forget gate mu only rescales the step of slots that are normalised: (mu, gamma) is the same update as
(1, gamma / mu).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.routes import one_state

_FIRST = (
    "slots by their turns have first derivatives only: for second ones run the sequence with "
    "implementation='reference', which interprets the tuple"
)


def sim(start: Tensor, k: Tensor, v: Tensor, q: Tensor, step: Tensor, encode: bool = False) -> tuple[Tensor, Tensor]:
    """Alignment cost. start (..., d_v, d_k) with unit columns, k, q (..., C, d_k), v (..., C, d_v), step (..., C).

    s_{t,i} = A_{t,i} s_{0,i} + sum_tau B_{t,tau,i} v_tau. Returns o (..., C, d_v) and the last state.
    encode: squared error of the encoded value. It turns slot i by k_i - <s_i, v> where alignment turns it by k_i, and
    that inner product is what a gate needs anyway.
    """
    overlap, gram = v @ start, v @ v.mT  # (..., C, d_k), (..., C, C)
    kept, written = cast(tuple[Tensor, Tensor], _Turned.apply(overlap, gram, k, step, encode))

    out, last = _outputs(start, kept, written, v, q)
    return out, _unit(last)


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
            raise AxesError(_FIRST)
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


def dec(
    start: Tensor, k: Tensor, v: Tensor, q: Tensor, step: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Squared error of the decoded key, shapes as `sim`: slots turn towards the error, S <- S Diag(a) + e b^T.

    keep (..., C): slots of any length forget by it and grow by every turn, where `None` normalises them.
    """
    batch = start.shape[:-2]

    def flat(x: Tensor) -> Tensor:
        return x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])

    rates = [None if x is None else flat(x[..., None]) for x in (step, keep)]
    found = _Decoded.apply(flat(start), flat(k), flat(v), *rates)
    kept, written, errors = (x.unflatten(0, batch) for x in cast(tuple[Tensor, ...], found))
    out, last = _outputs(start, kept, written, errors, q)
    return out, _unit(last) if keep is None else last


def _outputs(start: Tensor, kept: Tensor, written: Tensor, values: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """What is read of S_t = S_{t-1} Diag(a_t) + v_t b_t^T, and the last one."""
    size, batch = q.shape[-2], start.shape[:-2]

    def whole(x: Tensor, fill: float = 0.0) -> Tensor:
        """Flat, and up to a power of two with tokens that do nothing."""
        room = (1 << (size - 1).bit_length()) - size
        x = x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
        return torch.nn.functional.pad(x, (0, 0, 0, room), value=fill) if room else x

    slots, directions = start.reshape(-1, *start.shape[-2:]), whole(values)
    asked, added = whole(q), whole(written)
    factors = one_state.Factors(whole(kept, 1.0))
    out = (factors.kept * asked) @ slots.mT + factors.scores(asked, added) @ directions
    last = slots * factors.kept[:, -1:, :] + directions.mT @ (factors.left * added)
    return out[:, :size].unflatten(0, batch), last.unflatten(0, batch)


def _decoded(
    p: Tensor, square: Tensor, length: Tensor, key: Tensor, rate: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, r) of slots that become a s + b e, e = v - S r: p = <s, e>, square = |e|^2, length = |s|^2 (..., d_k)."""
    if keep is None:
        return *_turn(p, key, rate, square, False), key * torch.ones_like(length)
    inverse = torch.rsqrt(torch.where(length > 0, length, 1.0)) * (length > 0)
    read = key * inverse
    b = rate * read
    return keep - b * p * inverse * inverse, b, read


class _Decoded(torch.autograd.Function):
    """(a, b) (N, C, d_k) and the errors e (N, C, d_v) of every token; the adjoint is the same loop backwards.

    start (N, d_v, d_k), k (N, C, d_k), v (N, C, d_v), step and keep (N, C, 1).
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, k: Tensor, v: Tensor, step: Tensor, keep: Tensor | None) -> Any:
        state, one = start, start.new_ones(())
        made: list[tuple[Tensor, ...]] = []
        keeps = [None] * k.shape[1] if keep is None else keep.unbind(1)
        for key, value, rate, stay in zip(k.unbind(1), v.unbind(1), step.unbind(1), keeps, strict=True):
            length = one if stay is None else state.square().sum(-2)
            read = key
            if stay is not None:
                read = key * torch.rsqrt(torch.where(length > 0, length, 1.0)) * (length > 0)
            error = torch.baddbmm(value[..., None], state, read[..., None], alpha=-1)
            p, square = torch.bmm(error.mT, state)[:, 0], error.square().sum(-2)
            a, b, _ = _decoded(p, square, length, key, rate, stay)
            state = torch.baddbmm(state * a[:, None, :], error, b[:, None, :])
            made.append((a, b, error[..., 0], p, square, length))
        kept, written, errors, *met = (torch.stack(x, 1) if x[0].ndim else one for x in zip(*made, strict=True))
        ctx.save_for_backward(start, k, step, keep, *met, kept, written, errors)
        return kept, written, errors

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise AxesError(_FIRST)
        start, k, step, keep, p, square, length, kept, written, errors = ctx.saved_tensors
        free = keep is not None
        inputs = [x.detach().requires_grad_() for x in (p, square.expand_as(p), length.expand_as(p), k, step)]
        stay = None if keep is None else keep.detach().requires_grad_()
        with torch.enable_grad():
            found, squares, lengths, keys, rates = inputs
            a, b, r = _decoded(found, squares, lengths, keys, rates, stay)

        def slopes(y: Tensor) -> list[Tensor]:
            """In p, |e|^2 and |s|^2: (C, N, d_k)."""
            one = torch.ones_like(y)
            by = torch.autograd.grad(y, inputs[:3], one, retain_graph=True, allow_unused=True, materialize_grads=True)
            return [x.transpose(0, 1).contiguous() for x in by]

        (a_p, a_e, a_s), (b_p, b_e, b_s), r_s = slopes(a), slopes(b), slopes(r)[2]
        states, state = [], start
        for now, add, error in zip(kept.unbind(1), written.unbind(1), errors.unbind(1), strict=True):
            states.append(state)
            state = torch.baddbmm(state * now[:, None, :], error[..., None], add[:, None, :])
        into = torch.zeros_like(start)
        asked: list[list[Tensor]] = [[], [], [], []]  # of a, b, e and r
        reads = r.detach()
        for t in range(k.shape[1] - 1, -1, -1):
            state, error = states[t], errors[:, t, :, None]
            by_a = given[0][:, t] + (into * state).sum(-2)
            by_b = torch.baddbmm(given[1][:, t, None], error.mT, into)[:, 0]
            by_p = a_p[t] * by_a + b_p[t] * by_b
            by_square = (a_e[t] * by_a + b_e[t] * by_b).sum(-1)[:, None, None]
            by_e = torch.baddbmm(given[2][:, t, :, None], into, written[:, t, :, None])
            by_e = torch.baddbmm(by_e, state, by_p[..., None]) + 2 * by_square * error
            sides = torch.cat((error, by_e), -1), torch.stack((by_p, -reads[:, t]), 1)
            into = torch.baddbmm(into * kept[:, t, None], *sides)
            by_r = torch.bmm(by_e.mT, state)[:, 0].neg()
            if free:
                by_length = a_s[t] * by_a + b_s[t] * by_b + r_s[t] * by_r
                into = torch.addcmul(into, state, by_length[:, None], value=2)
            for xs, x in zip(asked, (by_a, by_b, by_e[..., 0], by_r), strict=True):
                xs.append(x)
        by_a, by_b, by_e, by_r = (torch.stack(xs[::-1], 1) for xs in asked)
        wanted = inputs[3:] + ([] if stay is None else [stay])
        by_k, by_step, *by_keep = torch.autograd.grad((a, b, r), wanted, (by_a, by_b, by_r))
        return into, by_k, by_e, by_step, by_keep[0] if free else None


def _unit(state: Tensor) -> Tensor:
    """True norms, not accumulated ones: rounding must not drift (lattice.md L36)."""
    return state * torch.rsqrt((state * state).sum(-2, keepdim=True))
