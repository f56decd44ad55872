"""RWKV-7 against the paper's time mixing, token by token with dense transition matrices."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axes.errors import IllegalUpdate
from axes.routes import dispatch
from axes.sequence import RWKV7, DeltaNet, GatedDeltaNetPrev
from axes.sequence.rwkv7 import RWKV7Block

B, T, D, H, N = 2, 11, 16, 2, 8
TOLERANCE = 1e-10


def make() -> RWKV7:
    module = RWKV7(D, heads=H, dtype=torch.float64)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


def paper(m: RWKV7, x: Tensor) -> Tensor:
    """Time mixing as in the paper's section 4 and the released reference, one token after the other."""
    p = m.around

    def lora(g: torch.nn.Module, z: Tensor, f: object) -> Tensor:
        hidden = z @ g.down.T
        return (f(hidden) if callable(f) else hidden) @ g.up.T + (0 if g.bias is None else g.bias)

    state, last, out = torch.zeros(B, H, N, N, dtype=torch.float64), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        now = x[:, t]
        xr, xw, xk, xv, xa, xg = (now + (last - now) * p.mix[c] for c in "rwkvag")
        last = now
        r, k, v = xr @ p.r_proj.weight.T, xk @ p.k_proj.weight.T, xv @ p.v_proj.weight.T
        w = torch.exp(-math.exp(-0.5) * torch.sigmoid(lora(p.decay, xw, torch.tanh)))
        a = torch.sigmoid(lora(p.rate, xa, None))
        g = lora(p.gate, xg, torch.sigmoid)
        kappa = F.normalize((k * p.removal).view(B, H, N), dim=-1)
        k = k * (1 + (a - 1) * p.replacement)
        r, w, k, v, a = (z.view(B, H, N) for z in (r, w, k, v, a))
        transition = torch.diag_embed(w) - kappa[..., :, None] * (a * kappa)[..., None, :]
        state = state @ transition + v[..., :, None] * k[..., None, :]
        y = torch.einsum("bhvk,bhk->bhv", state, r)
        y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + N * 1e-5).sqrt()
        y = y.flatten(-2) * p.norm_weight + p.norm_bias
        y = y + ((r * k * p.bonus).sum(-1, keepdim=True) * v).flatten(-2)
        out.append((y * g) @ p.o_proj.weight.T)
    return torch.stack(out, 1)


def test_rwkv7() -> None:
    m, x = make(), torch.randn(B, T, D, dtype=torch.float64)
    assert (m(x)[0] - paper(m, x)).abs().max() < TOLERANCE


def test_log_decay_is_bounded() -> None:
    """w = exp(-e^(-1/2) sigmoid(.)) > 0.545: no channel forgets more than this in one token."""
    m = make()
    signal, _, _ = m.around.enter(100 * torch.randn(B, T, D, dtype=torch.float64), m.around.tails(B, torch.zeros(())))
    assert -math.exp(-0.5) <= signal["decay"].min() and signal["decay"].max() <= 0


def test_tied_keys_and_an_even_decay_are_the_gated_delta_rule() -> None:
    """kappa = k, a = beta, w = alpha: the transition alpha I - beta k k^T of the gradient at the old state."""
    k = F.normalize(torch.randn(B, T, H, N, dtype=torch.float64), dim=-1)
    q, v = torch.randn_like(k), torch.randn_like(k)
    beta, alpha = torch.rand(B, T, H, dtype=torch.float64), -torch.rand(B, T, H, dtype=torch.float64)
    low_rank = {"a": -k, "b": beta[..., None] * k, "decay": alpha[..., None].expand_as(k)}
    ours, _ = dispatch.run(RWKV7.update, {"q": q, "k": beta[..., None] * k, "v": v, **low_rank}, time=1)
    delta = {"q": q, "k": k, "v": v, "beta": beta, "decay": alpha}
    expected, _ = dispatch.run(GatedDeltaNetPrev.update, delta, time=1)
    assert (ours - expected).abs().max() < TOLERANCE


def test_the_block_refuses_other_tuples() -> None:
    with pytest.raises(IllegalUpdate, match="RWKV7Block supplies k, v, q, a, b"):
        DeltaNet(D, heads=H, block=RWKV7Block())
