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
from axes.linalg.formulas import by_autograd, followed
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
    if followed():
        return _plain(gate, value, key, start)
    return cast(Tensor, _States.apply(gate, value, key, start))


def _plain(gate: Tensor, value: Tensor, key: Tensor, start: Tensor) -> Tensor:
    return cumulative(gate[..., None], value[..., None] * key[..., None, :], start)


class _States(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor, key: Tensor, start: Tensor) -> Tensor:
        batch = torch.broadcast_shapes(start.shape[:-2], *(x.shape[:-2] for x in (gate, value, key)))
        shape, dtype = (*batch, key.shape[-2], value.shape[-1], key.shape[-1]), torch.result_type(start, value)
        out = value.new_empty(shape, dtype=dtype)
        torch.mul(value[..., None], key[..., None, :], out=out)
        before = start
        for now, a in zip(out.unbind(-3), gate[..., None].unbind(-3), strict=True):
            before = now.addcmul_(a, before)
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
        # as rows: BLAS takes a multiple of the time for columns
        by_value = (key[..., None, :] @ into.mT)[..., 0, :].sum_to_size(value.shape)
        by_key = (value[..., None, :] @ into)[..., 0, :].sum_to_size(key.shape)
        by_start, by_gate = (asked[0] * kept[0]).sum_to_size(start.shape), None
        if ctx.needs_input_grad[0]:  # last, in the room of what was asked
            asked[0].mul_(start)
            into[..., 1:, :, :].mul_(out[..., :-1, :, :])
            by_gate = into.sum(-1).sum_to_size(gate.shape)
        return by_gate, by_value, by_key, by_start


__all__ = ["numbers", "states"]
