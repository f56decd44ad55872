"""NAdam with a constant momentum, beside its formula and beside torch, whose bias correction differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim

PLAIN: dict[str, Any] = {"momentum_decay": None, "decoupled_weight_decay": True}
BETAS = [(0.9, 0.999), (0.5, 0.9), (0.0, 0.9)]


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(steps)]


def walk(make: Any, steps: int = 30, silent: int = 0) -> Tensor:
    """Parameters after `steps` steps, the first `silent` of them with lr = 0."""
    p = nn.Parameter(torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6))
    optimizer = make(p)
    (group,) = optimizer.param_groups
    lr = group["lr"]
    for t, g in enumerate(gradients(steps + silent)):
        group["lr"] = 0.0 if t < silent else lr
        p.grad = g
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("betas", BETAS)
def test_nadam_against_its_formula(betas: tuple[float, float], foreach: bool) -> None:
    lr, eps, decay = 0.05, 1e-3, 0.1
    (b1, b2), w = betas, torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(gradients(30), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        ahead = (b1 * m + (1 - b1) * g) / (1 - b1 ** (t + 1))
        w = (1 - lr * decay) * w - lr * ahead / ((v / (1 - b2**t)).sqrt() + eps)
    ours = walk(lambda p: optim.NAdam([p], lr=lr, betas=betas, eps=eps, weight_decay=decay, foreach=foreach, **PLAIN))
    torch.testing.assert_close(ours, w, rtol=0, atol=1e-13)


@pytest.mark.parametrize("betas", [(0.5, 0.9), (0.0, 0.9)])
def test_nadam_is_torch_nadam_once_the_bias_is_gone(betas: tuple[float, float]) -> None:
    """A large momentum_decay makes torch's schedule constant; 60 steps with lr = 0 let beta1^t vanish."""
    ours = walk(lambda p: optim.NAdam([p], lr=0.05, betas=betas, weight_decay=0.1, **PLAIN), silent=60)
    theirs = walk(
        lambda p: torch.optim.NAdam(
            [p], lr=0.05, betas=betas, weight_decay=0.1, decoupled_weight_decay=True, momentum_decay=1e9
        ),
        silent=60,
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_on_a_constant_gradient_the_first_step_is_lr_and_torch_overshoots() -> None:
    """torch divides its fresh gradient by 1 - b instead of 1 - b^2; it keeps the product of the b's in float32."""
    g = torch.tensor([1.0, -3.0], dtype=torch.float64)
    makes: list[tuple[Any, float, float]] = [
        (lambda p: optim.NAdam([p], lr=0.1, eps=0.0, **PLAIN), 1.0, 1e-14),
        (lambda p: torch.optim.NAdam([p], lr=0.1, eps=0.0, momentum_decay=1e9), 1 + 0.9 / 1.9, 1e-7),
    ]
    for make, size, tolerance in makes:
        p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        p.grad = g
        make(p).step()
        torch.testing.assert_close(p.detach(), -0.1 * size * g.sign(), rtol=0, atol=tolerance)


def test_without_momentum_it_is_adamw_without_momentum() -> None:
    assert optim.NAdam.declare((0.0, 0.9), **PLAIN) == optim.AdamW.declare((0.0, 0.9))
