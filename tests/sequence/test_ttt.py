"""TTT against loops written from the paper: mini-batch gradients of |x + LN(m(x)) - v|^2 / 2 by autograd."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from axes.core import reference
from axes.core.algorithms import Anchor, Step
from axes.core.costs import SquaredError
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.routes import dispatch
from axes.sequence.ttt import TTT, TTTMLP, TTTLinear

D, HEADS, B, T = 12, 2, 2, 37


def linear(w: list[Tensor], x: Tensor) -> Tensor:
    return w[0] @ x


def mlp(w: list[Tensor], x: Tensor) -> Tensor:
    return w[0] @ gelu(w[1] @ x)


INNER = {TTTLinear: linear, TTTMLP: mlp}


def perturbed(cls: type, **fields: object) -> torch.nn.Module:
    layer = cls(D, heads=HEADS, dtype=torch.float64, **fields)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return layer


def signal_of(layer: torch.nn.Module, x: Tensor) -> tuple[dict[str, Tensor], object]:
    signal, _, kept = layer.around.enter(x, layer.around.tails(x.shape[0], x))
    return {n: s.detach() for n, s in signal.items()}, kept


def train_at_test_time(inner, start: tuple[Tensor, ...], signal: dict[str, Tensor], batch: int) -> Tensor:
    """z_t = f(q_t; W_t), W_t = W_0 - sum of eta_s grad l(W_0; k_s, v_s) over the mini-batch so far."""
    out = torch.zeros_like(signal["v"])
    for b in range(out.shape[0]):
        for h in range(out.shape[2]):
            w = [leaf[h].detach() for leaf in start]
            for t in range(out.shape[1]):
                s = {n: x[b, t, h] for n, x in signal.items()}

                def f(w: list[Tensor], x: Tensor, s: dict[str, Tensor] = s) -> Tensor:
                    return x + layer_norm(inner(w, x), x.shape, s["ln_gain"], s["ln_bias"], 1e-6)

                if t % batch == 0:
                    w_0 = [leaf.clone().requires_grad_() for leaf in w]
                grads = torch.autograd.grad(0.5 * (f(w_0, s["k"]) - s["v"]).square().sum(), w_0)
                w = [leaf - s["eta"] * g for leaf, g in zip(w, grads, strict=True)]
                out[b, t, h] = f(w, s["q"])
    return out


@pytest.mark.parametrize("cls", TTT)
@pytest.mark.parametrize("batch", [16, 1, 5])
def test_layer_is_mini_batch_gradient_descent(cls, batch: int) -> None:
    step = dataclasses.replace(cls.update.algorithm, at=Anchor(batch))
    layer = perturbed(cls, update=dataclasses.replace(cls.update, algorithm=step))
    x = torch.randn(B, T, D, dtype=torch.float64)
    signal, kept = signal_of(layer, x)
    expected = layer.around.leave(train_at_test_time(INNER[cls], tuple(layer.initial), signal, batch), kept)
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cls", TTT)
def test_a_mini_batch_of_one_is_the_gradient_at_the_previous_state(cls) -> None:
    layer = perturbed(cls)
    signal, _ = signal_of(layer, torch.randn(B, 9, D, dtype=torch.float64))
    weights = tuple(p.detach().expand(B, *p.shape) for p in layer.initial)
    one, prev = (
        dispatch.run(dataclasses.replace(cls.update, algorithm=Step(Per("eta"), at=at)), signal, weights=weights)[0]
        for at in (Anchor(1), "prev")
    )
    torch.testing.assert_close(one, prev, rtol=0, atol=1e-11)


def test_on_a_bare_matrix_a_mini_batch_of_one_is_deltanet() -> None:
    """Claim F26: b = 1 is the delta rule; b = T from zero is eta times linear attention; b = 4 is neither."""
    k, v, q = (torch.randn(1, 24, 1, 5, dtype=torch.float64) for _ in range(3))
    k, beta = k / k.norm(dim=-1, keepdim=True), torch.rand(1, 24, 1, dtype=torch.float64)
    signal = {"k": k, "v": v, "q": q, "eta": beta}

    def outputs(every: int) -> Tensor:
        return dispatch.run(StateUpdate(SquaredError(), algorithm=Step(Per("eta"), at=Anchor(every))), signal)[0]

    s, delta, sums = torch.zeros(5, 5, dtype=torch.float64), [], []
    attention = torch.zeros(5, 5, dtype=torch.float64)
    for t in range(24):
        kt, vt, bt = k[0, t, 0], v[0, t, 0], beta[0, t, 0]
        s = s - bt * torch.outer(s @ kt - vt, kt)
        attention = attention + bt * torch.outer(vt, kt)
        delta.append(s @ q[0, t, 0])
        sums.append(attention @ q[0, t, 0])
    torch.testing.assert_close(outputs(1)[0, :, 0], torch.stack(delta), rtol=0, atol=1e-12)
    torch.testing.assert_close(outputs(24)[0, :, 0], torch.stack(sums), rtol=0, atol=1e-12)
    assert (outputs(4)[0, :, 0] - torch.stack(delta)).abs().max() > 0.05


@pytest.mark.parametrize("cls, base", [(TTTLinear, 1.0), (TTTMLP, 0.1)])
def test_inner_rate_is_base_over_width(cls, base: float) -> None:
    layer = cls(D, heads=HEADS, dtype=torch.float64)
    x = torch.zeros(1, 3, D, dtype=torch.float64)
    rate = signal_of(layer, x)[0]["eta"]
    torch.testing.assert_close(rate, torch.full_like(rate, base / (D // HEADS) / 2))


def test_first_order_error_in_eta() -> None:
    """Stale gradients cost O(eta^2): halving eta quarters the distance to sequential steps (claim F20)."""
    layer = perturbed(TTTLinear)
    signal, _ = signal_of(layer, torch.randn(1, 16, D, dtype=torch.float64))
    weights = tuple(torch.randn_like(p).expand(1, *p.shape) for p in layer.initial)
    prev = dataclasses.replace(TTTLinear.update, algorithm=Step(Per("eta"), at="prev"))
    gaps = []
    for eta in (4e-3, 2e-3):
        given = {**signal, "eta": torch.full_like(signal["eta"], eta)}
        sequential = reference.run(prev, given, time=1, weights=weights)[1].theta[0]
        stale = dispatch.run(TTTLinear.update, given, weights=weights)[1].theta[0]
        gaps.append(float((sequential - stale).norm()))
    assert math.isclose(math.log2(gaps[0] / gaps[1]), 2.0, abs_tol=0.15)
