"""Exact chunk forms of slots by their turns: every token makes of each slot a multiple of it and of one direction.

    S_t = S_{t-1} Diag(a_t) + d_t b_t^T

Where the direction d is the value, a and b need the state only through inner products with the chunk's values, so that
the token loop runs on (C, d_k) numbers (Lattice Sim and Enc), and the slots are scanned with what it found. Where it is
the error, v - Phi k, the loop holds the slots and reads them (Lattice Dec and OSR). Loops run without autograd and have
adjoints of their own. A forget gate mu only rescales the step of slots that are normalised: (mu, gamma) is the same
update as (1, gamma / mu).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from axes.core.memory import inverse_length
from axes.errors import AxesError
from axes.linalg.formulas import followed
from axes.routes.states import states

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
    turned, read = (_turned, _outputs) if followed() else (_Turned.apply, _Read.apply)
    kept, written = cast(tuple[Tensor, Tensor], turned(overlap, gram, k, step, encode))
    out, last = cast(tuple[Tensor, Tensor], read(start, kept, written, v, q))
    return out, _unit(last)


def _turn(p: Tensor, key: Tensor, step: Tensor, square: Tensor, encode: bool) -> tuple[Tensor, Tensor]:
    """(a, b) of slots that become a s + b v: p = <s, v>, key (..., d_k), step and square = |v|^2 (..., 1)."""
    turn = step * (key - p if encode else key)
    norm = torch.rsqrt(1 + turn * turn * (square - p * p).clamp_min(0))
    return norm * (1 - turn * p), norm * turn


def _turned(overlap: Tensor, gram: Tensor, k: Tensor, step: Tensor, encode: bool) -> tuple[Tensor, Tensor]:
    """`_Turned` by torch's operations, which anybody follows."""
    found = []
    for t, (key, rate) in enumerate(zip(k.unbind(-2), step[..., None].unbind(-2), strict=True)):
        pairs = gram[..., t, t:, None]  # with itself and with later ones
        found.append(_turn(overlap[..., 0, :], key, rate, pairs[..., 0, :], encode))
        a, b = (x[..., None, :] for x in found[-1])
        overlap = overlap[..., 1:, :] * a + pairs[..., 1:, :] * b
    a, b = (torch.stack(x, -2) for x in zip(*found, strict=True))
    return a, b


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

    own = flat(start), flat(k), flat(v), flat(q), flat(step[..., None]), None if keep is None else flat(keep[..., None])
    found = _held(*own)[:2] if followed() else _Decoded.apply(*own)
    out, last = (x.unflatten(0, batch) for x in cast(tuple[Tensor, ...], found))
    return out, _unit(last) if keep is None else last


def _outputs(start: Tensor, kept: Tensor, written: Tensor, values: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """What is read of S_t = S_{t-1} Diag(a_t) + v_t b_t^T, and the last one."""
    found = states(kept, written, values, start.mT)  # a slot's multiple stands on a row
    return (q[..., None, :] @ found)[..., 0, :], found[..., -1, :, :].mT


class _Read(torch.autograd.Function):
    """`_outputs`, whose states are made again for the backward pass: of one chunk at a time."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Any:
        ctx.save_for_backward(*given)
        return _outputs(*given)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise AxesError(_FIRST)
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            made = _outputs(*inputs)
        return torch.autograd.grad(made, inputs, given)


def _decoded(
    p: Tensor, square: Tensor, inverse: Tensor | None, read: Tensor, rate: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(a, b) of slots that become a s + b e, e = v - S r: p = <s, e> of unit slots, those of any length over theirs,
    square = |e|^2, inverse = 1 / |s|, read = r."""
    if keep is None or inverse is None:
        return _turn(p, read, rate, square, False)
    b = rate * read
    return keep - b * p * inverse, b


def _held(
    start: Tensor, k: Tensor, v: Tensor, q: Tensor, step: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What is read, the last slots, and of every token a, b, the error, p, |e|^2 and 1/|s|."""
    state, one = start, start.new_ones(())
    made: list[tuple[Tensor, ...]] = []
    keeps = [None] * k.shape[1] if keep is None else keep.unbind(1)
    tokens = (x.unbind(1) for x in (k, v[..., None], q[..., None], step))
    for key, value, asked, rate, stay in zip(*tokens, keeps, strict=True):
        read, inverse = key, None
        if stay is not None:
            inverse = inverse_length(state.square().sum(-2))
            read = key * inverse
        error = torch.baddbmm(value, state, read[..., None], alpha=-1)
        p, square = torch.bmm(error.mT, state)[:, 0], error.square().sum(-2)
        p = p if inverse is None else p * inverse
        a, b = _decoded(p, square, inverse, read, rate, stay)
        state = torch.baddbmm(state * a[:, None, :], error, b[:, None, :])
        inverse = one if inverse is None else inverse
        made.append((torch.bmm(state, asked)[..., 0], a, b, error[..., 0], p, square, inverse))
    out, *met = (torch.stack(x, 1) if x[0].ndim else one for x in zip(*made, strict=True))
    return out, state, met


class _Decoded(torch.autograd.Function):
    """What is read (N, C, d_v) of the slots that the loop holds, and the last ones; its adjoint is the loop backwards.

    start (N, d_v, d_k), k, q (N, C, d_k), v (N, C, d_v), step and keep (N, C, 1).
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, k: Tensor, v: Tensor, q: Tensor, step: Tensor, keep: Tensor | None) -> Any:
        out, state, met = _held(start, k, v, q, step, keep)
        ctx.save_for_backward(start, k, q, step, keep, *met)
        return out, state

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise AxesError(_FIRST)
        start, k, q, step, keep, kept, written, errors, p, square, inverse = ctx.saved_tensors
        free = keep is not None
        # a slot's length is differentiated by its logarithm: what is divided by |s| three times would leave the dtype
        inputs = [x.detach().requires_grad_() for x in (p, square.expand_as(p), torch.zeros_like(p), k, step)]
        stay = None if keep is None else keep.detach().requires_grad_()
        with torch.enable_grad():
            found, squares, logs, keys, rates = inputs
            per_length = None if stay is None else inverse * torch.exp(-logs)
            r = keys if per_length is None else keys * per_length
            a, b = _decoded(found, squares, per_length, r, rates, stay)

        def slopes(y: Tensor) -> list[tuple[Tensor, ...]]:
            """In p, |e|^2 and log |s|, token by token (N, d_k)."""
            one = torch.ones_like(y)
            by = torch.autograd.grad(y, inputs[:3], one, retain_graph=True, allow_unused=True, materialize_grads=True)
            return [x.unbind(1) for x in by]

        (a_p, a_e, a_s), (b_p, b_e, b_s) = slopes(a), slopes(b)
        r_s, inverses, shares = (slopes(r)[2], inverse.unbind(1), p.unbind(1)) if free else ((), (), ())
        reads, now, value = (x.unbind(1) for x in (r.detach()[..., None, :], kept[..., None, :], errors[..., None]))
        rows, columns = (x.unbind(1) for x in (written[..., None, :], written[..., None]))
        by_out, into = given
        states, state = [start], start
        for t in range(k.shape[1]):
            state = torch.baddbmm(state * now[t], value[t], rows[t])
            states.append(state)
        by_q = torch.bmm(torch.stack(states[1:], 1).flatten(0, 1).mT, by_out.reshape(-1, by_out.shape[-1], 1))
        heard, asks = by_out[..., None].unbind(1), q[..., None, :].unbind(1)
        asked: list[list[Tensor]] = [[], [], [], []]  # of a, b, e and r
        for t in range(k.shape[1] - 1, -1, -1):
            state, error = states[t], value[t]
            into = torch.baddbmm(into, heard[t], asks[t])
            by_a, by_b = (into * state).sum(-2), torch.bmm(error.mT, into)[:, 0]
            by_p = torch.addcmul(a_p[t] * by_a, b_p[t], by_b)
            by_s = by_p * inverses[t] if free else by_p  # of <s, e>
            by_e = torch.baddbmm(torch.bmm(into, columns[t]), state, by_s[..., None])
            if not free:  # the length of an error acts on unit slots alone
                by_square = torch.addcmul(a_e[t] * by_a, b_e[t], by_b).sum(-1)[:, None, None]
                by_e = torch.addcmul(by_e, by_square, error, value=2)
            by_r = torch.bmm(by_e.mT, state)[:, 0].neg()
            into = torch.baddbmm(into * now[t], error, by_s[:, None])
            into = torch.baddbmm(into, by_e, reads[t], alpha=-1)
            if free:
                by_log = torch.addcmul(a_s[t] * by_a, r_s[t], by_r)
                by_log = torch.addcmul(by_log, b_s[t], by_b) - by_p * shares[t]
                into = torch.addcmul(into, state * inverses[t][:, None], (by_log * inverses[t])[:, None])
            for xs, x in zip(asked, (by_a, by_b, by_e[..., 0], by_r), strict=True):
                xs.append(x)
        by_a, by_b, by_e, by_r = (torch.stack(xs[::-1], 1) for xs in asked)
        wanted = inputs[3:] + ([] if stay is None else [stay])
        by_k, by_step, *by_keep = torch.autograd.grad((a, b, r), wanted, (by_a, by_b, by_r))
        return into, by_k, by_e, by_q.view_as(q), by_step, by_keep[0] if free else None


def _unit(state: Tensor) -> Tensor:
    """True norms, not accumulated ones: rounding must not drift (lattice.md L36)."""
    return state * torch.rsqrt((state * state).sum(-2, keepdim=True))
