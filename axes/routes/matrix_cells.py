"""Cells whose state is a matrix: every key entry has a vector of its own, which hears itself through one matrix W.

    Z = tanh(W^T S + v k^T),   S' = f S + (1 - f) Z,   o = S' q.

As a tuple it is a gated average with d_k pairs a token, values Z e_i at the unit keys e_i: column i of the state is a
state of one entry, and all have one gate. Legend: B batch, T tokens, H heads, K keys, V channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from axes.core import reference
from axes.core.state_update import State, StateUpdate
from axes.routes.cells import Cell


class MatrixCell(Cell):
    """A cell that is given q, k (..., K), v (..., V) and the log of f, a number a head; W is (H, V, V), of u = h W."""


@final
@dataclass(frozen=True)
class M2RNN(MatrixCell):
    """Z = tanh(W^T S + v k^T)."""

    kernel = "m2rnn"


def by_steps(
    update: StateUpdate, state: State, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, weight: Tensor
) -> tuple[Tensor, State]:
    """The meaning: what the last state makes of a token, a step of the tuple for every column, what is read."""
    outs, (theta,) = [], state.theta
    for t in range(v.shape[1]):
        heard = torch.einsum("hvw,bhvk->bhwk", weight, theta)
        z = torch.tanh(heard + v[:, t, :, :, None] * k[:, t, :, None, :])
        gate = decay[:, t, :, None].expand(*z.shape[:2], z.shape[-1])
        one = z.new_ones(()).expand(*gate.shape, 1)
        signal: dict[str, Tensor | float] = {"q": one, "k": one, "v": z.mT, "decay": gate, "write": -torch.expm1(gate)}
        columns = state.but(theta=(theta.mT[..., None],))
        read, after = reference.run(update, {n: x[:, None] for n, x in signal.items()}, columns, time=1)  # type: ignore[index]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], read[:, 0]))
        theta = after.theta[0][..., 0].mT
        state = after.but(theta=(theta,))
    return torch.stack(outs, 1), state


class Walk(torch.autograd.Function):
    """All tokens at once. Inside, heads are the batch of a product, and columns stand beside sequences: (H, B K, V)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, weight: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        ks, vs, kept = k.permute(1, 2, 0, 3)[..., None], v.permute(1, 2, 0, 3)[..., None, :], torch.exp(decay)
        fs, h = kept.permute(1, 2, 0)[..., None, None], y.permute(1, 0, 3, 2).contiguous()
        states, values = [h], []
        for key, value, f in zip(ks, vs, fs, strict=True):
            u = torch.baddbmm((key * value).flatten(1, 2), h.flatten(1, 2), weight)
            z = u.tanh_().view(h.shape)
            h = torch.lerp(z, h, f)
            states.append(h)
            values.append(z)
        ctx.states, ctx.values = states, values
        ctx.save_for_backward(q, k, v, kept, weight)
        read = torch.stack(states[1:])  # (T, H, B, K, V)
        out = q.permute(1, 2, 0, 3)[..., None, :] @ read
        return out.squeeze(-2).permute(2, 0, 1, 3), h.permute(1, 0, 3, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dy: Tensor) -> Any:
        q, k, v, kept, weight = ctx.saved_tensors
        d, turned = dy.permute(1, 0, 3, 2).contiguous(), weight.mT
        douts, qs = dout.permute(1, 2, 0, 3)[..., None, :], q.permute(1, 2, 0, 3)[..., None]
        by_pre, by_decay = [], []
        for t in range(v.shape[1] - 1, -1, -1):
            d = d + qs[t] * douts[t]
            h, z, f = ctx.states[t], ctx.values[t], kept[:, t].mT[..., None, None]
            by_decay.append((d * (h - z)).sum((-2, -1)).mT)
            p = d * (1 - f) * (1 - z * z)
            by_pre.append(p)
            d = torch.baddbmm((f * d).flatten(1, 2), p.flatten(1, 2), turned).view(d.shape)
        pre, states = torch.stack(by_pre[::-1]), torch.stack(ctx.states)
        dq = (states[1:] @ douts.mT).squeeze(-1).permute(2, 0, 1, 3)
        dk = (pre @ v.permute(1, 2, 0, 3)[..., None]).squeeze(-1).permute(2, 0, 1, 3)
        dv = (k.permute(1, 2, 0, 3)[..., None, :] @ pre).squeeze(-2).permute(2, 0, 1, 3)
        dweight = torch.einsum("thbkv,thbkw->hvw", states[:-1], pre)
        return dq, dk, dv, torch.stack(by_decay[::-1], 1) * kept, dweight, d.permute(1, 0, 3, 2)


__all__ = ["M2RNN", "MatrixCell", "Walk", "by_steps"]
