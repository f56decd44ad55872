"""The alignment family against its papers, written out on numpy-like tensors: parameters in, outputs out."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from axes.routes import dispatch
from axes.sequence import GLA, LinearAttention, Mamba2, RetNet, SequenceLayer, UnnormalisedLinearAttention

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


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def error(found: Tensor, expected: Tensor) -> float:
    return (found - expected).abs().max().item()


def test_linear_attention() -> None:
    """Katharopoulos et al. 2020, eq. 9: a weighted mean with weights phi(q_t) . phi(k_i), summed without recurrence."""
    m, x = make(LinearAttention), tokens()
    p = m.around
    q, k, v = (heads(x @ w.weight.T) for w in (p.q_proj, p.k_proj, p.v_proj))
    phi_q, phi_k = (torch.where(z > 0, z + 1, z.exp()) for z in (q, k))
    out = torch.zeros_like(v)
    for t in range(T):
        weights = torch.einsum("bhd,bihd->bhi", phi_q[:, t], phi_k[:, : t + 1])
        out[:, t] = torch.einsum("bhi,bihd->bhd", weights, v[:, : t + 1]) / weights.sum(-1, keepdim=True)
    assert error(m(x)[0], out.flatten(-2) @ p.o_proj.weight.T) < TOLERANCE


def test_linear_attention_of_an_empty_memory_is_zero_and_constant_values_are_kept() -> None:
    m = make(LinearAttention)
    signal, _, _ = m.around.enter(tokens(), ())
    signal["v"] = torch.full_like(signal["v"], 3.0)
    out, _ = dispatch.run(m.update, signal, time=1)
    assert error(out, signal["v"]) < TOLERANCE  # the weights sum to one
    nothing, _ = dispatch.run(m.update, {**signal, "k": torch.zeros_like(signal["k"])}, time=1)
    assert nothing.abs().max() == 0


def test_unnormalised_linear_attention() -> None:
    m, x = make(UnnormalisedLinearAttention), tokens()
    p = m.around
    q, k, v = (heads(x @ w.weight.T) for w in (p.q_proj, p.k_proj, p.v_proj))
    causal = torch.ones(T, T, dtype=torch.float64).tril()
    scores = torch.einsum("bthd,bihd->bhti", q, k) / math.sqrt(D // H) * causal
    out = rms(torch.einsum("bhti,bihd->bthd", scores, v), p.norm.weight)
    assert error(m(x)[0], out.flatten(-2) @ p.o_proj.weight.T) < TOLERANCE


def test_retnet() -> None:
    """Sun et al. 2023, eqs. 5 and 8: the parallel form with complex q e^(i n theta) and k e^(i m theta)."""
    m, x = make(RetNet), tokens()
    p = m.around
    q, k, v = (heads(x @ w.weight.T) for w in (p.q_proj, p.k_proj, p.v_proj))
    half = q.shape[-1] // 2
    theta = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    # pairs (j, j + d/2) as complex numbers; our rotation turns the other way, which conjugates them
    as_complex = lambda z: torch.complex(z[..., :half], -z[..., half:])  # noqa: E731
    turn = torch.exp(1j * torch.arange(T)[:, None, None] * theta)
    complex_scores = torch.einsum("bthd,bihd->bhti", as_complex(q) * turn, (as_complex(k) * turn).conj())
    gamma = 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    decay = torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp_min(0), 0.0)
    scores = complex_scores.real / math.sqrt(2 * half) * decay
    out = rms(torch.einsum("bhti,bihd->bthd", scores, v), p.norm.weight)
    out = out * F.silu(heads(x @ p.g_proj.weight.T))
    assert error(m(x)[0], out.flatten(-2) @ p.o_proj.weight.T) < TOLERANCE
    assert m.sizes.d_v == 2 * m.sizes.d_k


def test_retnet_decay_is_the_papers_and_not_learned() -> None:
    m = RetNet(64, heads=4, dtype=torch.float64)
    assert not any("decay" in n for n, _ in m.named_parameters())
    gate = m.around.charts["decay"](torch.zeros(1, 1, 64, dtype=torch.float64))["decay"]
    assert error(gate.exp(), torch.tensor([31 / 32, 63 / 64, 127 / 128, 255 / 256], dtype=torch.float64)) < 1e-15


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y_t = sum_j w_j x_{t - width + 1 + j} channel by channel, then SiLU."""
    width, out = weight.shape[-1], torch.zeros_like(x)
    for t in range(x.shape[1]):
        for j in range(width):
            s = t - width + 1 + j
            if s >= 0:
                out[:, t] = out[:, t] + weight[:, 0, j] * x[:, s]
    return F.silu(out if bias is None else out + bias)


def test_mamba2() -> None:
    """Dao and Gu 2024: the state space h_t = exp(dt A) h_{t-1} + dt B x, y = C^T h + D x inside the Mamba-2 block."""
    m, x = make(Mamba2, d_k=5), tokens()
    p, inner = m.around, 2 * D
    z, mixed = (x @ p.in_proj.weight.T).split((inner, inner + 10), -1)
    xs, b, c = causal_convolution(mixed, p.conv.weight, p.conv.bias).split((inner, 5, 5), -1)
    chart = p.charts["decay"]
    dt = F.softplus(x @ chart.up.weight.T + chart.up.bias)  # (B, T, H)
    a, xs = -chart.log_rate.exp(), heads(xs)
    state, out = torch.zeros(B, H, inner // H, 5, dtype=torch.float64), torch.zeros_like(xs)
    for t in range(T):
        write = torch.einsum("bh,bhp,bn->bhpn", dt[:, t], xs[:, t], b[:, t])
        state = (dt[:, t] * a).exp()[..., None, None] * state + write
        out[:, t] = torch.einsum("bhpn,bn->bhp", state, c[:, t]) + p.skip * xs[:, t]
    y = rms(out.flatten(-2) * F.silu(z), p.norm.weight)
    assert error(m(x)[0], y @ p.out_proj.weight.T) < TOLERANCE


def test_mamba2_starts_with_the_papers_ranges() -> None:
    m = Mamba2(64, heads=32)
    chart = m.around.charts["decay"]
    rate, dt = chart.log_rate.exp(), F.softplus(chart.up.bias)
    assert rate.min() >= 1 and rate.max() <= 16 and dt.min() >= 0.99e-3 and dt.max() <= 0.101
    assert (m.sizes.d_k, m.sizes.d_v) == (128, 4)


def test_gla() -> None:
    """Yang et al. 2023: S_t = Diag(a_t) S_{t-1} + k_t^T v_t (transposed), a = sigmoid(W x)^(1/16) through rank 16."""
    m, x = make(GLA), tokens()
    p = m.around
    q, k, v = (heads(x @ w.weight.T) for w in (p.q_proj, p.k_proj, p.v_proj))
    chart = p.charts["decay"]
    assert chart.down.weight.shape == (16, D)
    a = heads(torch.sigmoid(x @ chart.down.weight.T @ chart.up.weight.T + chart.up.bias)) ** (1 / 16)
    state, out = torch.zeros(B, H, D // H // 2, D // H, dtype=torch.float64), torch.zeros_like(v)
    for t in range(T):
        state = a[:, t, ..., None] * state + k[:, t, ..., :, None] * v[:, t, ..., None, :]
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state) / math.sqrt(D // H // 2)
    y = rms(out, p.norm.weight) * F.silu(heads(x @ p.g_proj.weight.T))
    assert error(m(x)[0], y.flatten(-2) @ p.o_proj.weight.T) < TOLERANCE


def test_relatives_meet_where_a_gate_is_open() -> None:
    """Mamba-2 with dt = 1 and no decay, RetNet without angles and GLA at a = 1 are linear attention."""
    q, k, v = (torch.randn(B, T, H, d, dtype=torch.float64) for d in (4, 4, 3))
    shape = (B, T, H)
    plain, _ = dispatch.run(UnnormalisedLinearAttention.update, {"q": q, "k": k, "v": v}, time=1)
    zero = torch.zeros(shape, dtype=torch.float64)
    ssm, _ = dispatch.run(Mamba2.update, {"q": q, "k": k, "v": v, "decay": zero, "dt": zero + 1}, time=1)
    gla, _ = dispatch.run(GLA.update, {"q": q, "k": k, "v": v, "decay": torch.zeros_like(k)}, time=1)
    assert error(ssm, plain) < TOLERANCE and error(gla, plain) < TOLERANCE
