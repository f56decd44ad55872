"""The states of every token of a chunk, W_t = a_t * W_{t-1} + v_t k_t^T, where h or a solve needs them all.

Token by token in place, two passes over a state each; the adjoint is one pass a token backwards, and sums.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from axes.core.memory import Leaves
from axes.core.parts import Parts
from axes.core.rates import Signal, rate_shape, resolve
from axes.linalg.formulas import by_autograd
from axes.routes.scan import back_through, cumulative


def numbers(p: Parts, signal: Signal, like: Leaves, size: int) -> list[tuple[Tensor, Tensor]]:
    """For every leaf, what tokens multiply the state and what is written with: (..., T, 1|m), of all keys alike."""
    ones = tuple(x.new_ones((1, 1)) for x in like)
    rate = resolve(p.step.rate, signal)
    gates = p.memory.act(p.monoid.element(signal, rate, ones[0]), ones)
    rates = p.memory.add(tuple(torch.zeros_like(o) for o in ones), rate, rate_shape(p.step.rate), ones)

    def timed(x: Tensor) -> Tensor:
        return (x if x.ndim > 2 else x.expand(size, *x.shape))[..., 0]

    return [(timed(g), timed(r)) for g, r in zip(gates, rates, strict=True)]


def states(gate: Tensor, value: Tensor, key: Tensor, start: Tensor) -> Tensor:
    """(..., T, m, n) of gates (..., T, 1|m), of any sign, value (..., T, m), key (..., T, n); start (..., m, n)."""
    return cast(Tensor, _States.apply(gate, value, key, start))


def _plain(gate: Tensor, value: Tensor, key: Tensor, start: Tensor) -> Tensor:
    return cumulative(gate[..., None], value[..., None] * key[..., None, :], start)


class _States(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor, key: Tensor, start: Tensor) -> Tensor:
        gates, values, keys = (x.unbind(-3) for x in (gate[..., None], value[..., None], key[..., None, :]))
        before = torch.addcmul(start * gates[0], values[0], keys[0])
        out = before.new_empty((*before.shape[:-2], len(keys), *before.shape[-2:]))
        first, *rest = out.unbind(-3)
        first.copy_(before)
        for now, a, v, k in zip(rest, gates[1:], values[1:], keys[1:], strict=True):
            torch.mul(before, a, out=now).addcmul_(v, k)
            before = now
        ctx.save_for_backward(gate, value, key, start, out)
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        gate, value, key, start, out = ctx.saved_tensors
        if torch.is_grad_enabled():  # for derivatives of derivatives
            return by_autograd(_plain, (gate, value, key, start), (given,))
        into = given.clone(memory_format=torch.contiguous_format)
        asked, kept = into.unbind(-3), gate[..., None].unbind(-3)
        back_through(asked, kept)
        by_gate = None
        if ctx.needs_input_grad[0]:
            first = (asked[0] * start).sum(-1)[..., None, :]
            rest = (into[..., 1:, :, :] * out[..., :-1, :, :]).sum(-1)
            by_gate = torch.cat((first, rest), -2).sum_to_size(gate.shape)
        by_value = (into * key[..., None, :]).sum(-1).sum_to_size(value.shape)
        by_key = (into * value[..., None]).sum(-2).sum_to_size(key.shape)
        return by_gate, by_value, by_key, (asked[0] * kept[0]).sum_to_size(start.shape)


__all__ = ["numbers", "states"]
