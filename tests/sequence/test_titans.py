"""Titans against loops written from the paper: velocity, decay, and the gradient of the loss by autograd."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from axes.core import reference
from axes.core.algorithms import Anchor, Momentum, Step
from axes.core.costs import SquaredError
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.routes import dispatch
from axes.sequence.titans import Titans, TitansMatrix

D, HEADS, B, T = 12, 2, 2, 37


def signal_of(layer: torch.nn.Module, x: Tensor) -> tuple[dict[str, Tensor], object]:
    signal, _, kept = layer.around.enter(x, layer.around.tails(x.shape[0], x))
    return {n: s.detach() for n, s in signal.items()}, kept


def perturbed(cls: type, **fields: object) -> torch.nn.Module:
    """A layer away from its initial symmetries."""
    layer = cls(D, heads=HEADS, dtype=torch.float64, **fields)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return layer


def matrix(w: list[Tensor], x: Tensor, s: dict[str, Tensor]) -> Tensor:
    return w[0] @ x


def mlp(w: list[Tensor], x: Tensor, s: dict[str, Tensor]) -> Tensor:
    return x + layer_norm(w[0] @ gelu(w[1] @ x), x.shape, s["ln_gain"], s["ln_bias"], 1e-6)


def titans(memory, start: tuple[Tensor, ...], signal: dict[str, Tensor], every: int = 1) -> Tensor:
    """S = eta S - theta grad l; M = a M + S, gradients at the memory `every` tokens apart; y = M(q)."""
    out = torch.zeros_like(signal["v"])
    for b in range(out.shape[0]):
        for h in range(out.shape[2]):
            w = [leaf[h].detach() for leaf in start]
            velocity = [torch.zeros_like(leaf) for leaf in w]
            for t in range(out.shape[1]):
                s = {n: x[b, t, h] for n, x in signal.items()}
                if t % every == 0:
                    anchor = [leaf.clone().requires_grad_() for leaf in w]
                loss = 0.5 * (memory(anchor, s["k"], s) - s["v"]).square().sum()
                grads = torch.autograd.grad(loss, anchor)
                velocity = [s["momentum"].exp() * m - s["theta"] * g for m, g in zip(velocity, grads, strict=True)]
                w = [s["decay"].exp() * leaf + m for leaf, m in zip(w, velocity, strict=True)]
                out[b, t, h] = memory(w, s["q"], s)
    return out


def starts(layer: torch.nn.Module) -> tuple[Tensor, ...]:
    if layer.initial is not None:
        return tuple(layer.initial)
    s = layer.sizes
    return (torch.zeros(s.heads, s.d_v, s.d_k, dtype=torch.float64),)


@pytest.mark.parametrize("cls, memory, every", [(TitansMatrix, matrix, 1), (Titans, mlp, 16)])
def test_layer_is_the_papers_recurrence(cls, memory, every) -> None:
    layer = perturbed(cls)
    x = torch.randn(B, T, D, dtype=torch.float64)
    signal, kept = signal_of(layer, x)
    expected = layer.around.leave(titans(memory, starts(layer), signal, every), kept)
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-10)


def test_mlp_at_the_previous_state_is_the_sequential_recurrence() -> None:
    step = dataclasses.replace(Titans.update.algorithm, at="prev")
    layer = perturbed(Titans, update=dataclasses.replace(Titans.update, algorithm=step))
    x = torch.randn(B, 11, D, dtype=torch.float64)
    signal, kept = signal_of(layer, x)
    expected = layer.around.leave(titans(mlp, starts(layer), signal), kept)
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-10)
    anchored = dataclasses.replace(Titans.update, algorithm=dataclasses.replace(step, at=Anchor(1)))
    every_token = Titans(D, heads=HEADS, dtype=torch.float64, update=anchored)
    every_token.load_state_dict(layer.state_dict())
    torch.testing.assert_close(every_token(x)[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("momentum", [True, False])
def test_matrix_chain_is_the_interpreter(momentum: bool) -> None:
    update = TitansMatrix.update
    if not momentum:
        update = StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(Per("theta")))
    assert dispatch.select(update).route == "chain"
    block = None if momentum else dataclasses.replace(TitansMatrix.block, charts=TitansMatrix.block.charts[::2])
    layer = perturbed(TitansMatrix, update=update, block=block)
    signal, _ = signal_of(layer, torch.randn(B, T, D, dtype=torch.float64))
    fast, end = dispatch.run(update, signal)
    slow, last = reference.run(update, signal, time=1)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-11)
    torch.testing.assert_close(end.theta[0], last.theta[0], rtol=0, atol=1e-11)


def test_without_momentum_it_is_the_delta_rule_before_the_gate() -> None:
    """eta = 0: W = a W - theta (W k - v) k^T with the gradient at the undecayed W."""
    layer = perturbed(TitansMatrix)
    signal, _ = signal_of(layer, torch.randn(B, T, D, dtype=torch.float64))
    signal["momentum"] = torch.full_like(signal["momentum"], -torch.inf)
    plain = StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(Per("theta")))
    expected, _ = reference.run(plain, signal, time=1)
    torch.testing.assert_close(reference.run(TitansMatrix.update, signal, time=1)[0], expected, rtol=0, atol=1e-12)


def test_both_conventions_agree_for_constant_rates_only() -> None:
    """theta inside the buffer = eta (1 - b) outside an average, if nothing varies (claims I06, I07)."""
    k, v, q = (torch.randn(1, 40, 1, 5, dtype=torch.float64) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    beta, eta = 0.8, 0.3
    step = Step(Per("theta"), via=(Momentum(beta, "ema"),))
    outside = StateUpdate(SquaredError(), monoid=Scalar(0.95), algorithm=step)

    def gap(rate: Tensor) -> float:
        gates = {"decay": torch.full_like(rate, 0.95).log(), "momentum": torch.full_like(rate, beta).log()}
        ours, _ = dispatch.run(TitansMatrix.update, {"k": k, "v": v, "q": q, "theta": rate * (1 - beta), **gates})
        theirs, _ = dispatch.run(outside, {"k": k, "v": v, "q": q, "theta": rate})
        return float((ours - theirs).abs().max() / theirs.abs().max())

    constant = torch.full((1, 40, 1), eta, dtype=torch.float64)
    assert gap(constant) < 1e-12
    assert gap(constant * torch.rand(1, 40, 1, dtype=torch.float64)) > 0.02


def test_the_printed_sign_ascends() -> None:
    """W = a W - S (the Miras paper's table) diverges where W = a W + S learns (claim C19)."""
    k, v = torch.randn(6, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    losses = {}
    for sign in (1.0, -1.0):
        w, s = torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, 6, dtype=torch.float64)
        for _ in range(60):
            e = w @ k - v
            s = 0.5 * s - 0.1 / k.dot(k) * torch.outer(e, k)
            w = w + sign * s
        losses[sign] = float(0.5 * (w @ k - v).square().sum())
    assert losses[1.0] < 1e-4 < 1e3 < losses[-1.0]


def recall(d: int) -> tuple[Tensor, Tensor]:
    """8 pairs, then the same keys: what was stored with them?"""
    keys, values = torch.randn(4, 8, d // 2), torch.randn(4, 8, d // 2)
    x = torch.cat((torch.cat((keys, values), -1), torch.cat((keys, torch.zeros_like(values)), -1)), 1)
    return x, values
