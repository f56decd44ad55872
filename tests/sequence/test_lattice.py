"""Lattice against gradient steps by autograd on the losses of normalised slots, and its exact Gram-space forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from axes.core import reference
from axes.core.costs import Alignment, SquaredError
from axes.core.memory import Slots
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.routes import dispatch
from axes.sequence.lattice import LATTICE, LatticeDec, LatticeEnc, LatticeOSR, LatticeSim
from axes.testing.examples import example

D, HEADS, B, T = 12, 2, 2, 37
COST = {LatticeDec: "dec", LatticeEnc: "enc", LatticeSim: "sim", LatticeOSR: "dec"}
NORMALISED = (LatticeDec, LatticeEnc, LatticeSim)
GRAM = (LatticeDec, LatticeSim)


def unit(s: Tensor) -> Tensor:
    return s / s.norm(dim=0)


def loss(kind: str, s: Tensor, k: Tensor, v: Tensor) -> Tensor:
    phi = unit(s)
    if kind == "dec":
        return 0.5 * (phi @ k - v).square().sum()
    return 0.5 * (phi.T @ v - k).square().sum() if kind == "enc" else -(phi @ k).dot(v)


def step(
    kind: str, s: Tensor, k: Tensor, v: Tensor, gamma: Tensor, mu: Tensor | float = 1.0, normalise: bool = True
) -> Tensor:
    """The literal online gradient step, with the Jacobian of the normalisation left to autograd."""
    at = s.detach().requires_grad_()
    moved = mu * s - gamma * torch.autograd.grad(loss(kind, at, k, v), at)[0]
    return unit(moved) if normalise else moved


def run_loop(kind: str, signal: dict[str, Tensor], normalise: bool = True) -> Tensor:
    out = torch.zeros_like(signal["v"])
    for b in range(out.shape[0]):
        for h in range(out.shape[2]):
            s = torch.eye(out.shape[-1], signal["k"].shape[-1], dtype=torch.float64)
            for t in range(out.shape[1]):
                x = {n: y[b, t, h] for n, y in signal.items()}
                s = step(kind, s, x["k"], x["v"], x["gamma"], x["decay"].exp() if "decay" in x else 1.0, normalise)
                out[b, t, h] = s @ x["q"]
    return out


def perturbed(cls: type, **fields: object) -> torch.nn.Module:
    layer = cls(D, heads=HEADS, dtype=torch.float64, **fields)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return layer


def signal_of(layer: torch.nn.Module, x: Tensor) -> tuple[dict[str, Tensor], object]:
    signal, _, kept = layer.around.enter(x, layer.around.tails(x.shape[0], x))
    return {n: s.detach() for n, s in signal.items()}, kept


def random_signal(t: int = 24, d_v: int = 7, d_k: int = 5) -> dict[str, Tensor]:
    k, q = (torch.randn(1, t, 1, d_k, dtype=torch.float64) for _ in range(2))
    gamma, decay = (torch.rand(1, t, 1, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, t, 1, d_v, dtype=torch.float64)
    return {"k": k, "q": q, "v": v, "gamma": 1.5 * gamma, "decay": -decay}


@pytest.mark.parametrize("cls", LATTICE)
def test_layer_is_the_gradient_step_on_normalised_slots(cls) -> None:
    layer = perturbed(cls)
    x = torch.randn(B, T, D, dtype=torch.float64)
    signal, kept = signal_of(layer, x)
    expected = layer.around.leave(run_loop(COST[cls], signal, cls is not LatticeOSR), kept)
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cls", GRAM)
@pytest.mark.parametrize("gated", [False, True])
def test_gram_space_is_the_interpreter(cls, gated: bool) -> None:
    """L40, with a forget gate folded into the step; more tokens than one chunk, d_k above and below d_v."""
    update = dataclasses.replace(cls.update, monoid=Scalar("decay")) if gated else cls.update
    assert dispatch.select(update).route == "gram"
    for d_v, d_k in ((7, 5), (4, 6)):
        given = random_signal(70, d_v, d_k).items()
        signal = {n: s.clone().requires_grad_() for n, s in given if gated or n != "decay"}
        fast, end = dispatch.run(update, signal)
        slow, last = reference.run(update, signal, time=1)
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-10)
        torch.testing.assert_close(end.theta[0], last.theta[0], rtol=0, atol=1e-10)
        leaves = [signal[n] for n in ("k", "v", "q", "gamma")]
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (fast, slow)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_gram_forms_stay_on_the_sphere_in_float32() -> None:
    signal = {n: s.float() for n, s in random_signal(2048, 8, 8).items() if n != "decay"}
    exact = {n: s.double() for n, s in signal.items()}
    for cls in GRAM:
        out, state = dispatch.run(cls.update, signal)
        assert (state.theta[0].norm(dim=-2) - 1).abs().max() < 1e-6
        assert (out - dispatch.run(cls.update, exact)[0]).abs().max() < 5e-2  # chaotic in places, never adrift


@pytest.mark.parametrize("kind", ["dec", "enc", "sim"])
def test_gradient_claims(kind: str) -> None:
    """L6: losses see directions only, so gradients are tangent and of degree -1. L15, L16: the write of each slot is
    orthogonal to it and norms add in squares."""
    s, k, v = (torch.randn(n, dtype=torch.float64) for n in ((7, 5), (5,), (7,)))
    scale = torch.rand(5, dtype=torch.float64) + 0.5
    torch.testing.assert_close(loss(kind, s * scale, k, v), loss(kind, s, k, v))
    gamma, decay = torch.tensor([0.7, -0.3], dtype=torch.float64)
    signal = {"k": k, "v": v, "gamma": gamma, "decay": decay}
    cost = {"dec": SquaredError(), "enc": SquaredError(encode=True), "sim": Alignment()}[kind]
    update = dataclasses.replace(LatticeOSR.update, cost=cost)
    moved = update.step(update.init(signal, (s,)), signal)[0].theta[0]
    write = moved - signal["decay"].exp() * s
    assert (s * write).sum(0).abs().max() < 1e-13
    squares = signal["decay"].mul(2).exp() * s.square().sum(0) + write.square().sum(0)
    torch.testing.assert_close(moved.square().sum(0), squares)
    scaled = update.step(update.init(signal, (s * scale,)), signal)[0].theta[0] - signal["decay"].exp() * s * scale
    torch.testing.assert_close(scaled, write / scale)


@pytest.mark.parametrize("cls", NORMALISED)
def test_forget_gate_folds_into_the_step(cls) -> None:
    """L19: with renormalisation (mu, gamma) is (1, gamma / mu), exactly."""
    signal = random_signal()
    gated, _ = reference.run(dataclasses.replace(cls.update, monoid=Scalar("decay")), signal, time=1)
    folded = {**signal, "gamma": signal["gamma"] / signal["decay"].exp()}
    torch.testing.assert_close(reference.run(cls.update, folded, time=1)[0], gated, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", NORMALISED)
def test_renormalisation_factor(cls) -> None:
    """L18: the printed factor (1 + |D|^2)^(-1/2) is right at mu = 1; with a gate it is (mu^2 + |D|^2)^(-1/2)."""
    signal = {n: x[0, 0, 0] for n, x in random_signal().items()}
    s, kind = unit(torch.randn(7, 5, dtype=torch.float64)), COST[cls]
    for mu in (torch.ones((), dtype=torch.float64), torch.tensor(0.8, dtype=torch.float64)):
        moved = step(kind, s, signal["k"], signal["v"], signal["gamma"], mu, normalise=False)
        write = (moved - mu * s).square().sum(0)
        torch.testing.assert_close((moved * (mu * mu + write).rsqrt()).norm(dim=0), torch.ones(5, dtype=torch.float64))
    update = dataclasses.replace(cls.update, monoid=Scalar(0.8))
    ours = update.step(update.init(signal, (s,)), signal)[0].theta[0]
    torch.testing.assert_close(ours, moved * (0.64 + write).rsqrt(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", NORMALISED)
def test_equivariances(cls) -> None:
    """L28: rotations of the values, permutations of slots, joint signs; not rotations of the keys."""
    signal = {n: x for n, x in random_signal().items() if n != "decay"}
    start = unit(torch.randn(7, 5, dtype=torch.float64))
    turn = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64))[0]
    order, sign = torch.randperm(5), torch.randint(0, 2, (5,), dtype=torch.float64) * 2 - 1

    def outputs(s: Tensor, **changed: Tensor) -> Tensor:
        return dispatch.run(cls.update, {**signal, **changed}, weights=(s.expand(1, 1, 7, 5),))[0]

    y, k, q = outputs(start), signal["k"], signal["q"]
    torch.testing.assert_close(outputs(turn @ start, v=signal["v"] @ turn.T), y @ turn.T, rtol=0, atol=1e-10)
    torch.testing.assert_close(outputs(start[:, order], k=k[..., order], q=q[..., order]), y, rtol=0, atol=1e-10)
    torch.testing.assert_close(outputs(start * sign, k=k * sign, q=q * sign), y, rtol=0, atol=1e-10)
    keys = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    assert (outputs(start @ keys, k=k @ keys, q=q @ keys) - y).abs().max() > 0.05
    scaled = outputs(start, v=3 * signal["v"], gamma=signal["gamma"] / 3)
    assert torch.allclose(scaled, y, atol=1e-10) == (cls is LatticeSim)


@pytest.mark.parametrize("cls", NORMALISED)
def test_unit_norm_shortcut_has_the_same_gradients(cls) -> None:
    """L36: without the factors 1 / |s| values and gradients are the same on unit slots."""
    signal = {n: x.clone().requires_grad_() for n, x in random_signal().items() if n != "decay"}
    s, outs = torch.eye(7, 5, dtype=torch.float64), []
    for t in range(24):
        k, v, q, gamma = (signal[n][0, t, 0] for n in ("k", "v", "q", "gamma"))
        h, c = {"dec": (s @ k - v, k), "enc": (v, s.T @ v - k), "sim": (-v, k)}[COST[cls]]
        write = -gamma * (h[:, None] - s * (s.T @ h)) * c
        s = (s + write) * (1 + write.square().sum(0)).rsqrt()
        outs.append(s @ q)
    short, full = torch.stack(outs), dispatch.run(cls.update, signal)[0][0, :, 0]
    torch.testing.assert_close(full, short, rtol=0, atol=1e-11)
    leaves = [signal[n] for n in ("k", "v", "gamma")]
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (full, short)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_start() -> None:
    """S_0 is orthonormal, or has distinct unit columns if there are more slots than dimensions; L42: |S_0 q| = |q|."""
    for d_v, d_k in ((7, 5), (5, 7)):
        k, v = (torch.zeros(2, n, dtype=torch.float64) for n in (d_k, d_v))
        (s,) = Slots().zeros({"k": k, "v": v})
        products = s.mT @ s
        eye = torch.eye(d_k, dtype=torch.float64)
        torch.testing.assert_close(products * eye, eye.expand(2, d_k, d_k))
        if d_k <= d_v:
            torch.testing.assert_close(products, eye.expand(2, d_k, d_k))
        else:
            assert (products - eye).abs().max() < 0.99


@pytest.mark.parametrize("cls", LATTICE)
def test_no_token_writes_beyond_its_value(cls: type) -> None:
    """L30: turned by gamma |k_i| |v| <= 2 (Enc: gamma |v|^2) a slot gets no further from the value; |k| = 1."""
    layer, x = perturbed(cls), torch.randn(1, 64, D, dtype=torch.float64)
    for size, share in ((0.0, 0.5), (1e4, 1.0)):  # where steps start, and where inputs have taken them
        signal = signal_of(layer if size else cls(D, heads=HEADS, dtype=torch.float64), size * x)[0]
        most = 2.0 if cls is LatticeSim else 1.0
        torch.testing.assert_close(signal["gamma"].amax(), torch.tensor(share * most, dtype=torch.float64))
        assert bool((signal["v"].norm(dim=-1) <= 1.0 + 1e-12).all())


def test_steps_are_demanded_of_a_layer() -> None:
    assert StateUpdate(Alignment(), algorithm=LatticeOSR.update.algorithm).demands() == (Per("gamma"),)


@pytest.mark.parametrize("cls", NORMALISED)
def test_rounding_does_not_drift(cls: type) -> None:
    """L36: slots are normalised by their true norms at every chunk's end, 60 of them here, in float32."""
    signal = example(cls.update, batch=(1,), length=60 * 32, d_k=4, d_v=6, dtype=torch.float32)
    with torch.no_grad():
        out, state = dispatch.run(cls.update, signal)
    assert out.isfinite().all()
    norms = torch.linalg.vector_norm(state.theta[0].double(), dim=-2)
    assert (norms - 1).abs().max() < 1e-6


@pytest.mark.parametrize("cls", LATTICE)
def test_gradients_with_one_batch_dimension(cls: type) -> None:
    """Of which the length of a sequence is the last but one, and not the third."""

    def gradients(implementation: str | None) -> tuple[Tensor, ...]:
        signal = example(cls.update, batch=(2,), length=9, d_k=4, d_v=6)
        leaves = [x.requires_grad_() for x in signal.values() if isinstance(x, Tensor)]
        out, _ = dispatch.run(cls.update, signal, implementation=implementation)  # type: ignore[arg-type]
        return torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True)

    for a, b in zip(gradients(None), gradients("reference"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
