"""The delta rule and its gated relatives against direct recurrences, and the facts that set them apart."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axes.routes import dispatch
from axes.sequence import KDA, DeltaNet, DeltaNetReflective, GatedDeltaNet, GatedDeltaNetPrev, SequenceLayer

B, T, D, H = 2, 11, 16, 2
TOLERANCE = 1e-10


def make(cls: type[SequenceLayer], **options: Any) -> SequenceLayer:
    module = cls(D, heads=H, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module


def tokens() -> Tensor:
    return torch.randn(B, T, D, dtype=torch.float64)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1))


def error(found: Tensor, expected: Tensor) -> float:
    return (found - expected).abs().max().item()


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """A width-4 causal convolution by padding and shifting, then SiLU."""
    padded = F.pad(x, (0, 0, 3, 0))
    return F.silu(sum(weight[:, 0, j] * padded[:, j : j + x.shape[1]] for j in range(4)))


def surroundings(m: SequenceLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, beta from the layer's parameters."""
    p = m.around
    q, k, v = (
        heads(convolved(x @ w.weight.T, c.weight))
        for w, c in ((p.q_proj, p.q_conv), (p.k_proj, p.k_conv), (p.v_proj, p.v_conv))
    )
    unit = lambda z: z / z.norm(dim=-1, keepdim=True)  # noqa: E731
    return unit(q) / math.sqrt(q.shape[-1]), unit(k), v, torch.sigmoid(x @ p.charts["beta"].up.weight.T)


def leave(m: SequenceLayer, x: Tensor, out: Tensor) -> Tensor:
    p = m.around
    y = p.norm.weight * out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if p.g_proj is not None:
        gate = torch.sigmoid if isinstance(m, KDA) else F.silu
        y = y * gate(heads(x @ p.g_proj.weight.T))
    return y.flatten(-2) @ p.o_proj.weight.T


def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, before: Tensor, beside: Tensor) -> Tensor:
    """S = before * S, then S <- S - beta (S k - v) k^T with beside * S in place of the first S; gates (B, T, H, 1 or
    K)."""
    state, out = torch.zeros(B, H, v.shape[-1], k.shape[-1], dtype=torch.float64), torch.zeros_like(v)
    for t in range(T):
        state = before[:, t, :, None] * state
        wrong = torch.einsum("bhvk,bhk->bhv", state, k[:, t]) - v[:, t]
        change = torch.einsum("bh,bhv,bhk->bhvk", beta[:, t], wrong, k[:, t])
        state = beside[:, t, :, None] * state - change
        out[:, t] = torch.einsum("bhvk,bhk->bhv", state, q[:, t])
    return out


@pytest.mark.parametrize(
    ("cls", "scale"), [(DeltaNet, 1.0), (DeltaNetReflective, 2.0)], ids=["delta-net", "reflective"]
)
def test_delta_net(cls: type[SequenceLayer], scale: float) -> None:
    m, x = make(cls), tokens()
    q, k, v, beta = surroundings(m, x)
    one = torch.ones_like(beta)[..., None]
    assert error(m(x)[0], leave(m, x, run(q, k, v, scale * beta, one, one))) < TOLERANCE


@pytest.mark.parametrize("cls", [GatedDeltaNet, GatedDeltaNetPrev], ids=lambda c: c.name)
def test_gated_delta_net(cls: type[SequenceLayer]) -> None:
    m, x = make(cls), tokens()
    q, k, v, beta = surroundings(m, x)
    chart = m.around.charts["decay"]
    gate = torch.exp(-chart.log_rate.exp() * F.softplus(x @ chart.up.weight.T + chart.up.bias))[..., None]
    one = torch.ones_like(gate)
    expected = run(q, k, v, beta, gate, one) if cls is GatedDeltaNet else run(q, k, v, beta, one, gate)
    assert error(m(x)[0], leave(m, x, expected)) < TOLERANCE
    other = run(q, k, v, beta, one, gate) if cls is GatedDeltaNet else run(q, k, v, beta, gate, one)
    assert error(m(x)[0], leave(m, x, other)) > 1e-3, "the two orders of gate and gradient are different updates"


def test_kda() -> None:
    m, x = make(KDA), tokens()
    q, k, v, beta = surroundings(m, x)
    chart = m.around.charts["decay"]
    logits = x @ chart.down.weight.T @ chart.up.weight.T + chart.up.bias
    gate = torch.exp(-chart.log_rate.exp() * F.softplus(heads(logits)))
    assert gate.shape == k.shape and chart.log_rate.numel() == H
    one = torch.ones_like(gate)
    assert error(m(x)[0], leave(m, x, run(q, k, v, beta, gate, one))) < TOLERANCE
    assert error(m(x)[0], leave(m, x, run(q, k, v, beta, gate.mean(-1, keepdim=True), one))) > 1e-4


def test_kda_differs_from_gated_delta_net_in_one_field() -> None:
    fields = [field.name for field in dataclasses.fields(KDA.update)]
    other = [name for name in fields if getattr(KDA.update, name) != getattr(GatedDeltaNet.update, name)]
    assert other == ["monoid"]


def signal(gate: float | None = None, beta: float = 1.0) -> dict[str, Tensor]:
    k = F.normalize(torch.randn(B, T, H, 6, dtype=torch.float64), dim=-1)
    found = {"q": k, "k": k, "v": torch.randn(B, T, H, 5, dtype=torch.float64)}
    found["beta"] = torch.full((B, T, H), beta, dtype=torch.float64)
    return found if gate is None else {**found, "decay": torch.full((B, T, H), math.log(gate), dtype=torch.float64)}


def test_a_full_step_recalls_its_value() -> None:
    """beta = 1, |k| = 1: S k = v after any write; gated only if the gradient comes after the gate."""
    s = signal()
    assert error(dispatch.run(DeltaNet.update, s, time=1)[0], s["v"]) < TOLERANCE
    s = signal(gate=0.5)
    assert error(dispatch.run(GatedDeltaNet.update, s, time=1)[0], s["v"]) < TOLERANCE
    assert error(dispatch.run(GatedDeltaNetPrev.update, s, time=1)[0], s["v"]) > 1e-2


def test_an_open_gate_is_the_delta_rule() -> None:
    s = signal(gate=1.0, beta=0.7)
    expected, _ = dispatch.run(DeltaNet.update, {n: x for n, x in s.items() if n != "decay"}, time=1)
    for cls in (GatedDeltaNet, GatedDeltaNetPrev):
        assert error(dispatch.run(cls.update, s, time=1)[0], expected) < TOLERANCE


def test_a_reflection_counts_modulo_two() -> None:
    """beta = 2 and v = 0 flips the sign of what lies along k at every token: the parity of their number."""
    k = F.normalize(torch.randn(6, dtype=torch.float64), dim=0).expand(1, T, 1, 6)
    v = torch.zeros(1, T, 1, 5, dtype=torch.float64)
    start = torch.randn(1, 1, 5, 6, dtype=torch.float64)
    beta = torch.full((1, T, 1), 2.0, dtype=torch.float64)
    out, _ = dispatch.run(DeltaNetReflective.update, {"q": k, "k": k, "v": v, "beta": beta}, weights=(start,), time=1)
    at_start = (start[0, 0] @ k[0, 0, 0]).expand(T, 5)
    signs = (-1.0) ** torch.arange(1, T + 1, dtype=torch.float64)
    assert error(out[0, :, 0], signs[:, None] * at_start) < TOLERANCE


def test_step_sizes_stay_in_their_range() -> None:
    x = 30 * tokens()
    for cls, top in ((DeltaNet, 1.0), (DeltaNetReflective, 2.0)):
        beta = make(cls).around.charts["beta"](x)["beta"]
        assert beta.min() >= 0 and top / 2 < beta.max() <= top
