"""The two halves of a block, sequence by sequence, in whatever dtype they are given: what their kernels are compared
with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

FUNCTIONS = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "elu+1": lambda x: F.elu(x) + 1,
    "sigmoid": torch.sigmoid,
}
CHARTS = {"linear": lambda z: z, "sigmoid": torch.sigmoid, "logsigmoid": F.logsigmoid, "softplus": F.softplus}


def enter(p, streams, numbers, parameters, tails, cu_seqlens=None) -> tuple[list[Tensor], list[Tensor]]:
    """`axes.kernels.blocks.enter.enter` with the declaration's parts."""
    if cu_seqlens is not None:
        bounds = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
        each = [_enter(p[:, a:b], streams, numbers, parameters, [x[n : n + 1] for x in tails])
                for n, (a, b) in enumerate(bounds)]  # fmt: skip
        outs, ends = zip(*each, strict=True)
        return [torch.cat(x, 1) for x in zip(*outs, strict=True)], [torch.cat(x) for x in zip(*ends, strict=True)]
    return _enter(p, streams, numbers, parameters, tails)


def _enter(p, streams, numbers, parameters, tails) -> tuple[list[Tensor], list[Tensor]]:
    outs, ends, first = [], [], 0
    rest, tails = iter(parameters), iter(tails)
    b, t = p.shape[:2]
    for s in streams:
        c = s.heads * s.width
        x, first = p[..., first : first + c], first + c
        if s.conv:
            weight = next(rest).reshape(c, s.conv)
            bias = next(rest) if s.biased else 0
            tail = next(tails, None)
            x = torch.cat((p.new_zeros(b, s.conv - 1, c) if tail is None else tail.to(p.dtype), x), 1)
            ends.append(x[:, x.shape[1] - s.conv + 1 :])
            x = sum(weight[:, j] * x[:, j : j + t] for j in range(s.conv)) + bias
        x = FUNCTIONS[s.feature_map](FUNCTIONS[s.activation](x)).unflatten(-1, (s.heads, s.width))
        if s.norm != "none":
            square = (x * x).sum(-1, keepdim=True) if s.norm == "unit" else (x * x).mean(-1, keepdim=True)
            x = x * torch.rsqrt(square + s.eps)
        if s.turn:
            j = torch.arange(s.width // 2, dtype=torch.float64, device=x.device)
            angle = torch.full_like(j, s.turn) if s.uniform else s.turn ** (-2 * j / s.width)
            back = -torch.arange(1, t + 1, device=x.device)[:, None, None] * angle
            back = torch.polar(torch.ones_like(back), back)  # a pair as a complex number
            pairs = torch.complex(*x.double().unflatten(-1, (2, -1)).unbind(-2)) * back
            x = torch.cat((pairs.real, pairs.imag), -1).to(x.dtype)
        outs.append(x * s.scale)
    for n in numbers:
        z, first = p[..., first : first + n.columns], first + n.columns
        rate = next(rest) if n.chart == "ssm" else None
        z = z + next(rest) if n.biased else z
        if rate is not None:
            dt = F.softplus(z)
            outs += [-torch.exp(rate) * dt * n.factor] + [dt] * n.step
        else:
            outs.append(n.factor * CHARTS[n.chart](z))
    return outs, ends


def leave(y, gate=None, weight=None, skip=None, v=None, activation="none", eps=0.0, after=False) -> Tensor:
    """`axes.kernels.blocks.leave.leave`."""
    heads = y.shape[2:]
    if skip is not None:
        y = y + skip.view(heads) * v
    if gate is not None:
        gate = FUNCTIONS[activation](gate).unflatten(-1, heads)
    if after:
        y = (y * gate).flatten(-2)
    if weight is not None:
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps) * weight
    if gate is not None and not after:
        y = y * gate
    return y if after else y.flatten(-2)


def gradients(function, given: Sequence[Tensor], directions: Sequence[Tensor | None]) -> list[Tensor]:
    """Outputs, then gradients of the given along the directions; None takes no part."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    outs = function(*leaves)
    pairs = [(o, d.to(o.dtype)) for o, d in zip(outs, directions, strict=True) if d is not None]
    got = torch.autograd.grad([o for o, _ in pairs], leaves, [d for _, d in pairs], allow_unused=True)
    full = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, got, strict=True)]
    return [*[o.detach() for o in outs], *full]
