"""The entropic, rotational and reflective optimizers against the recursions they are defined by."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from axes import optim

STEPS, LR, BETA = 30, 0.1, 0.8


def run(make, start: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The final weights of a fixed stream of gradients, and the stream."""
    weight = nn.Parameter(start.clone())
    optimizer = make(weight)
    generator = torch.Generator().manual_seed(0)
    stream = [torch.randn(start.shape, generator=generator, dtype=start.dtype) for _ in range(STEPS)]
    for g in stream:
        weight.grad = g.clone()
        optimizer.step()
    return weight.detach(), stream


def test_signed_eg_is_two_multiplicative_halves() -> None:
    start = torch.randn(4, 6, dtype=torch.float64)
    end, stream = run(lambda w: optim.SignedEG([w], lr=0.05, scale=0.5), start)
    # U - V with U = s/2 e^theta and V = s/2 e^-theta, each multiplied by exp(-+ lr g)
    theta = torch.asinh(start / 0.5)
    u, v = 0.25 * theta.exp(), 0.25 * (-theta).exp()
    for g in stream:
        u, v = u * torch.exp(-0.05 * g), v * torch.exp(0.05 * g)
    torch.testing.assert_close(end, u - v, rtol=1e-12, atol=1e-12)


def test_rotational_momentum_is_complex_momentum() -> None:
    start = torch.randn(3, 6, dtype=torch.float64)
    angle = 0.3
    end, stream = run(
        lambda w: optim.RotationalMomentum([{"params": [w], "rule": "rotational"}], lr=LR, momentum=BETA, angle=angle),
        start,
    )
    rate = BETA * complex(math.cos(angle), math.sin(angle))
    w, m = torch.complex(*start.chunk(2, -1)), torch.zeros(3, 3, dtype=torch.complex128)
    for g in stream:
        m = rate * m + (1 - BETA) * torch.complex(*g.chunk(2, -1))
        w = w - LR * m
    torch.testing.assert_close(end, torch.cat((w.real, w.imag), -1), rtol=0, atol=1e-12)


def test_reflective_momentum_is_negative_momentum_along_the_mean() -> None:
    start = torch.randn(3, 5, dtype=torch.float64)
    end, stream = run(
        lambda w: optim.ReflectiveMomentum([{"params": [w], "rule": "reflective"}], lr=LR, momentum=BETA), start
    )
    across, along, total = torch.zeros_like(start), torch.zeros_like(start), start
    for g in stream:
        mean = g.mean(-1, keepdim=True).expand_as(g)
        across = BETA * across + (1 - BETA) * (g - mean)
        along = -BETA * along + (1 - BETA) * mean
        total = total - LR * (across + along)
    torch.testing.assert_close(end, total, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [optim.RotationalMomentum, optim.ReflectiveMomentum])
def test_without_momentum_it_is_gradient_descent(cls) -> None:
    assert cls.declare(momentum=0.0) == optim.SGD.declare(momentum=0.0, decoupled=True)


@pytest.mark.parametrize("cls", [optim.SignedEG, optim.RotationalMomentum, optim.ReflectiveMomentum])
def test_they_lower_a_loss(cls) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(64, 6)
    y = x[:, :1] * x[:, 1:2]
    optimizer, losses = cls(model), []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
