"""LAMB and LARS beside their recurrences, written out, and beside pytorch_optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from axes import optim
from axes.errors import AxesError

SHAPES = ((4, 6), (5,), (3, 2, 2))


def started() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in SHAPES]


def walk(make: Any, steps: int = 40) -> list[Tensor]:
    ps = started()
    optimizer, generator = make(ps), torch.Generator().manual_seed(2)
    for _ in range(steps):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    return [p.detach() for p in ps]


def gap(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest relative difference."""
    return max(float(((x - y).abs() / y.abs().clamp_min(1e-3)).max()) for x, y in zip(a, b, strict=True))


class Written(torch.optim.Optimizer):
    """A recurrence w, *state = rule(t, w, g, *state) of every parameter alone."""

    def __init__(self, params: Any, rule: Any, kept: int) -> None:
        super().__init__(params, {})
        self.rule, self.kept, self.count = rule, kept, 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for p in self.param_groups[0]["params"]:
            state = self.state[p].setdefault("kept", [torch.zeros_like(p) for _ in range(self.kept)])
            w, *self.state[p]["kept"] = self.rule(self.count, p.detach(), p.grad, *state)
            p.data = w


LAMBS: list[dict[str, Any]] = [{}, {"bounds": (1.0, 2.5)}, {"bias_correction": False}, {"adapt": False}]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("options", LAMBS, ids=str)
def test_lamb_against_its_recurrence(options: dict[str, Any], foreach: bool) -> None:
    lr, (b1, b2), eps, decay = 0.02, (0.8, 0.95), 1e-4, 0.1
    low, high = options.get("bounds", (0.0, float("inf")))

    def rule(t: int, w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        c, s = (1 - b1**t, 1 - b2**t) if options.get("bias_correction", True) else (1.0, 1.0)
        d = m / c / ((v / s).sqrt() + eps) + decay * w
        r = min(max(float(w.norm()), low), high) / float(d.norm()) if options.get("adapt", True) else 1.0
        return w - lr * r * d, m, v

    ours = walk(
        lambda ps: optim.LAMB(ps, lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, foreach=foreach, **options)
    )
    assert gap(ours, walk(lambda ps: Written(ps, rule, 2))) < 1e-11


def test_lamb_against_pytorch_optimizer() -> None:
    """Which has the third version's phi, min(|W|, 10), and eps beside |d|; adam_debias leaves its lr alone."""
    given: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-13}
    ours = walk(lambda ps: optim.LAMB(ps, bounds=(0.0, 10.0), bias_correction=False, **given))
    theirs = walk(lambda ps: pytorch_optimizer.Lamb(ps, weight_decouple=False, adam_debias=True, **given))
    assert gap(ours, theirs) < 1e-10


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_against_pytorch_optimizer(nesterov: bool, foreach: bool) -> None:
    """Which takes plain SGD for vectors."""
    lr, momentum, decay = 2.0, 0.9, 0.1

    def ours(ps: list[nn.Parameter]) -> Any:
        vectors = {"params": [p for p in ps if p.ndim < 2], "adapt": False, "weight_decay": 0.0}
        groups = [{"params": [p for p in ps if p.ndim > 1]}, vectors]
        return optim.LARS(
            groups, lr=lr, momentum=momentum, weight_decay=decay, coefficient=0.01, nesterov=nesterov, foreach=foreach
        )

    theirs = walk(
        lambda ps: pytorch_optimizer.LARS(
            ps, lr=lr, momentum=momentum, weight_decay=decay, trust_coefficient=0.01, nesterov=nesterov
        )
    )
    assert gap(walk(ours), theirs) < 1e-11


@pytest.mark.parametrize("cls", [optim.LAMB, optim.LARS])
def test_a_zero_parameter_moves_and_a_step_is_in_proportion_to_the_others(cls: Any) -> None:
    zero, p = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.full((3,), 2.0))
    optimizer = cls([zero, p], lr=0.1, weight_decay=0.0)
    zero.grad, p.grad = torch.ones(3), torch.full((3,), 7.0)
    optimizer.step()
    assert bool((zero < 0).all())
    part = 0.1 * (1e-3 if cls is optim.LARS else 1.0)
    torch.testing.assert_close((p.detach() - 2).norm(), part * 2 * torch.ones(3).norm())


def test_options_that_make_no_sense_are_refused() -> None:
    p = [nn.Parameter(torch.ones(2))]
    for make, message in (
        (lambda: optim.LAMB(p, bounds=(2.0, 1.0)), "least < most"),
        (lambda: optim.LAMB(p, eps=-1.0), "eps must be >= 0"),
        (lambda: optim.LARS(p, momentum=0.0, nesterov=True), "nesterov needs momentum"),
        (lambda: optim.LARS(p, coefficient=0.0), "coefficient must be positive"),
    ):
        with pytest.raises(AxesError, match=message):
            make()
