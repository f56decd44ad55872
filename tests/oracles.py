"""What oracles of sequence layers share: pieces of blocks in a few words, and how a layer is held against a formula.

An oracle is a paper's formula in plain loops over tokens. It reads the parameters of a layer and nothing else of the
package, and returns the outputs before the output projection and the last state (d_v, d_k), or None where a state is
something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axes.sequence import SequenceLayer

B, T, D, H = 2, 9, 16, 2
Found = tuple[Tensor, Tensor | tuple[Tensor, ...] | None]
Oracle = Callable[[SequenceLayer, Tensor], Found]


def make(cls: type[SequenceLayer], **options: Any) -> SequenceLayer:
    module = cls(D, heads=H, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return module


# ---- what blocks are made of


def heads(x: Tensor, n: int = H) -> Tensor:
    return x.unflatten(-1, (n, -1))


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def convolved(x: Tensor, conv: Any) -> Tensor:
    """A causal convolution by padding and shifting, then SiLU."""
    weight = conv.weight[:, 0]
    padded = F.pad(x, (0, 0, weight.shape[1] - 1, 0))
    y = sum(weight[:, j] * padded[:, j : j + x.shape[1]] for j in range(weight.shape[1]))
    return F.silu(y if conv.bias is None else y + conv.bias)


def through(chart: nn.Module, x: Tensor) -> Tensor:
    """A chart's projections."""
    if chart.down is not None:
        x = x @ chart.down.weight.T
    return F.linear(x, chart.up.weight, chart.up.bias)


def mamba_gate(chart: Any, x: Tensor) -> Tensor:
    z = F.softplus(through(chart, x))
    z = z if z.shape[-1] == H else heads(z)
    return torch.exp(-chart.log_rate.exp() * z)


def loop(q: Tensor, k: Tensor, v: Tensor, kept: Callable[[Tensor, int], Tensor]) -> Found:
    """S = kept(S, t) + v k^T, o = S q over (B, T, H, d)."""
    state, out = v.new_zeros(*v.shape[:1], v.shape[2], v.shape[-1], k.shape[-1]), []
    for t in range(v.shape[1]):
        state = kept(state, t) + torch.einsum("bhv,bhk->bhvk", v[:, t], k[:, t])
        out.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1), state


def projected(p: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(heads(x @ w.weight.T) for w in (p.q_proj, p.k_proj, p.v_proj))  # type: ignore[return-value]


def convolutions(p: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    names = ("q", "k", "v")
    q, k, v = (heads(convolved(x @ getattr(p, f"{n}_proj").weight.T, getattr(p, f"{n}_conv"))) for n in names)
    return unit(q), unit(k), v


def root(q: Tensor) -> float:
    return math.sqrt(q.shape[-1])


def out_projection(m: SequenceLayer) -> Tensor:
    p = getattr(m.around, "plain", m.around)
    p = getattr(p, "around", p)  # of a cell with a block around it
    weight: Tensor = getattr(p, "o_proj", getattr(p, "out_proj", None)).weight  # type: ignore[union-attr]
    return weight


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1)).item()


def errors(cls: type[SequenceLayer], oracle: Oracle, **options: Any) -> tuple[float, float, float]:
    """How far a layer is from a formula: outputs, last state, gradients of the input and of every parameter."""
    m = make(cls, **options)
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    y, state = m(x)
    heads_out, last = oracle(m, x)
    expected = heads_out.flatten(2) @ out_projection(m).T
    assert state is not None
    leaves = () if last is None else (last,) if isinstance(last, Tensor) else last
    states = [relative(a, b) for a, b in zip(state.memory.theta, leaves, strict=False)]
    weight = torch.randn_like(y)
    wanted = [x, *m.parameters()]
    pairs = zip(*(torch.autograd.grad((z * weight).sum(), wanted) for z in (y, expected)), strict=True)
    return relative(y, expected), max(states, default=0.0), max(relative(a, b) for a, b in pairs)


def check_formula(cls: type[SequenceLayer], oracle: Oracle, **options: Any) -> None:
    """To rounding; the block's unit vectors have 1e-12 beside their squared length."""
    outputs, states, gradients = errors(cls, oracle, **options)
    assert outputs < 1e-10 and states < 1e-10 and gradients < 1e-9, (outputs, states, gradients)
