"""Exponentiated gradient on the simplex beside its multiplicative form."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.errors import AxesError


def simplex(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_steps_are_multiplicative_and_normalised(shape: tuple[int, ...], foreach: bool) -> None:
    lr, decay = 0.1, 0.2
    generator = torch.Generator().manual_seed(3)
    p = nn.Parameter(simplex(*shape))
    optimizer = optim.ExponentiatedGradient([p], lr=lr, weight_decay=decay, foreach=foreach)
    w = p.detach()
    for _ in range(30):
        g = torch.randn(shape, generator=generator, dtype=torch.float64)
        p.grad = g
        w = w ** (1 - lr * decay) * torch.exp(-lr * g)
        w = w / w.sum(-1, keepdim=True)
        optimizer.step()
        torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-14)


def test_others_take_the_signed_form() -> None:
    model = nn.Linear(4, 3).double()
    other = copy.deepcopy(model)
    mixture = nn.Parameter(simplex(6))
    named = [*model.named_parameters(), ("mixture", mixture)]
    optimizer = optim.ExponentiatedGradient(named, lr=0.1)
    assert [g["simplex"] for g in optimizer.param_groups] == [True, False]
    signed = optim.SignedEG(other, lr=0.1)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.grad, q.grad = p.detach().sin(), q.detach().sin()
    mixture.grad = torch.arange(6.0, dtype=torch.float64)
    optimizer.step()
    signed.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.detach(), q.detach())
    torch.testing.assert_close(mixture.detach().sum().item(), 1.0)
    assert mixture[0] > simplex(6)[0]


def test_it_finds_the_best_expert() -> None:
    """Regret of at most sqrt(T log(n) / 2) for losses in [0, 1] at lr = sqrt(8 log(n) / T)."""
    generator = torch.Generator().manual_seed(1)
    n, steps = 10, 400
    losses = torch.rand(steps, n, generator=generator, dtype=torch.float64)
    losses[:, 3] *= 0.8
    p = nn.Parameter(torch.full((n,), 1 / n, dtype=torch.float64))
    optimizer = optim.ExponentiatedGradient([p], lr=(8 * torch.tensor(float(n)).log() / steps).sqrt().item())
    total = 0.0
    for loss in losses:
        total += float(p.detach() @ loss)
        p.grad = loss
        optimizer.step()
    best = float(losses.sum(0).min())
    assert -1e-9 <= total - best <= (steps * torch.tensor(float(n)).log() / 2).sqrt()


def test_a_group_that_says_so_must_be_on_the_simplex() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = optim.ExponentiatedGradient([{"params": [p], "simplex": True}])
    p.grad = torch.ones(3)
    with pytest.raises(AxesError, match="not in the set of Entropic"):
        optimizer.step()
