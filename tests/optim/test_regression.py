"""Rules of inputs and targets beside closed forms, autograd and textbook recursions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.errors import AxesError

N, D_IN, D_OUT = 12, 4, 3


def data(n: int = N, noise: float = 1.0, seed: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D_IN, generator=generator, dtype=torch.float64)
    true = torch.randn(D_OUT, D_IN, generator=generator, dtype=torch.float64)
    return x, x @ true.T + noise * torch.randn(n, D_OUT, generator=generator, dtype=torch.float64)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D_IN, D_OUT, bias=False).double()


def fit(make: Callable[[nn.Module], Any], x: Tensor, y: Tensor, passes: int = 1, batch: int = N) -> Tensor:
    """The weights of a linear model after passes over the data in batches; the labels are the targets."""
    model = linear()
    optimizer = make(model)
    for _ in range(passes):
        for i in range(0, len(x), batch):
            optimizer.zero_grad()
            error = (model(x[i : i + batch]) - y[i : i + batch]).square().sum() / 2
            (error / len(x[i : i + batch])).backward()
            optimizer.step()
    return model.weight.detach()


def by_hand(step: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, y: Tensor, passes: int = 1) -> Tensor:
    w = linear().weight.detach()
    for _ in range(passes):
        for k, v in zip(x, y, strict=True):
            w = step(w, k, v)
    return w


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


LR, DECAY = 0.01, 0.1


@pytest.mark.parametrize("batch", [1, 5, N])
@pytest.mark.parametrize(
    ("make", "residual"),
    [
        (optim.Hebbian, lambda e, v: -v),
        (lambda m, **o: optim.LpRegression(m, p=3.0, **o), lambda e, v: 3 * e.sign() * e.abs() ** 2),
        (lambda m, **o: optim.HuberRegression(m, delta=0.5, **o), lambda e, v: e.clamp(-0.5, 0.5)),
    ],
    ids=["hebbian", "lp", "huber"],
)
def test_explicit_steps(make: Any, residual: Callable[[Tensor, Tensor], Tensor], batch: int) -> None:
    x, y = data()

    def step(w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (1 - LR * DECAY) * w - LR * torch.outer(residual(w @ k - v, v), k)

    mine = fit(lambda m: make(m, lr=LR, weight_decay=DECAY), x, y, 2, batch)
    close(mine, by_hand(step, x, y, 2))


def test_hebbian_writes_the_correlation_matrix() -> None:
    x, y = data()
    close(fit(lambda m: optim.Hebbian(m, lr=0.1), x, y) - linear().weight.detach(), 0.1 * y.T @ x)


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (
            lambda m: optim.HuberRegression(m, lr=LR, delta=0.5),
            lambda p, v: nn.functional.huber_loss(p, v, reduction="sum", delta=0.5),
        ),
        (lambda m: optim.LpRegression(m, lr=LR, p=3.0), lambda p, v: (p - v).abs().pow(3).sum()),
    ],
    ids=["huber", "lp"],
)
def test_robust_steps_are_sgd_on_torchs_losses(make: Any, loss: Any) -> None:
    x, y = data()
    model = linear()
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    for k, v in zip(x, y, strict=True):
        sgd.zero_grad()
        loss(model(k), v).backward()
        sgd.step()
    close(fit(make, x, y), model.weight.detach())


def test_below_two_the_sign_is_smoothed_and_errors_far_from_zero_do_not_feel_it() -> None:
    x, y = data(noise=0.0)
    y = y + 100.0  # every error is large

    def step(w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = w @ k - v
        return w - 0.001 * torch.outer(1.5 * e.sign() * e.abs().sqrt(), k)

    close(fit(lambda m: optim.LpRegression(m, lr=0.001), x, y), by_hand(step, x, y), 1e-8)


@pytest.mark.parametrize("batch", [1, N])
def test_nlms(batch: int) -> None:
    x, y = data()

    def step(w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return w - 1.5 * (torch.outer(w @ k - v, k) + DECAY * w) / (0.2 + k @ k)

    mine = fit(lambda m: optim.NLMS(m, lr=1.5, eps=0.2, weight_decay=DECAY), x, y, 2, batch)
    close(mine, by_hand(step, x, y, 2))


def test_nlms_is_the_proximal_minimiser() -> None:
    """The gradient of |W k - v|^2 / 2 + eps |W - W'|^2 / 2 vanishes at the new W."""
    x, y = data(1)
    before, eps = linear().weight.detach(), 0.7
    w = fit(lambda m: optim.NLMS(m, lr=1.0, eps=eps), x, y).clone().requires_grad_()
    (((x @ w.T - y).square().sum() + eps * (w - before).square().sum()) / 2).backward()
    assert w.grad is not None
    close(w.grad, torch.zeros_like(w))


def test_kaczmarz_finds_the_pseudo_inverse_solution() -> None:
    """Fewer consistent equations than unknowns: the solution nearest to W_0."""
    x, y = data(3, noise=0.0)
    w = fit(lambda m: optim.NLMS(m, lr=1.0, eps=0.0), x, y, passes=400)
    start = linear().weight.detach()
    pinv = torch.linalg.pinv(x)
    close(w, (pinv @ y).T + start @ (torch.eye(D_IN, dtype=torch.float64) - (pinv @ x).T), 1e-9)


@pytest.mark.parametrize("batch", [1, 5, N])
def test_rls_is_ridge_regression_after_every_batch(batch: int) -> None:
    x, y = data()
    eps = 0.3
    start = linear().weight.detach()
    for n in range(batch, N + 1, batch):
        mine = fit(lambda m: optim.RecursiveLeastSquares(m, forget=1.0, eps=eps), x[:n], y[:n], 1, batch)
        gram = x[:n].T @ x[:n] + eps * torch.eye(D_IN, dtype=torch.float64)
        close(mine, torch.linalg.solve(gram, (y[:n].T @ x[:n] + eps * start).T).T, 1e-11)


def test_rls_after_one_pass_is_batch_least_squares() -> None:
    x, y = data()
    best = torch.linalg.lstsq(x, y).solution.T
    gaps = []
    for eps in (1e-2, 1e-4, 1e-6):
        w = fit(lambda m, eps=eps: optim.RecursiveLeastSquares(m, forget=1.0, eps=eps), x, y)
        gaps.append(float((w - best).abs().max()))
    assert gaps[2] < 1e-6 and 50 < gaps[0] / gaps[1] < 200 and 50 < gaps[1] / gaps[2] < 200, gaps


def test_rls_with_forgetting() -> None:
    x, y = data()
    gram = [torch.zeros(D_IN, D_IN, dtype=torch.float64)]

    def step(w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gram[0] = 0.9 * gram[0] + torch.outer(k, k)
        inverse = torch.linalg.inv(gram[0] + 0.5 * torch.eye(D_IN, dtype=torch.float64))
        return w - 0.8 * (torch.outer(w @ k - v, k) + DECAY * w) @ inverse

    mine = fit(
        lambda m: optim.RecursiveLeastSquares(m, lr=0.8, forget=0.9, eps=0.5, weight_decay=DECAY), x, y, passes=2
    )
    close(mine, by_hand(step, x, y, 2))


def test_rls_follows_a_target_that_moves_and_one_that_remembers_all_does_not() -> None:
    x, _ = data(120)
    generator = torch.Generator().manual_seed(9)
    first, second = (torch.randn(D_OUT, D_IN, generator=generator, dtype=torch.float64) for _ in range(2))
    y = torch.cat((x[:60] @ first.T, x[60:] @ second.T))
    errors = [
        float((fit(lambda m, f=f: optim.RecursiveLeastSquares(m, forget=f, eps=1e-3), x, y, batch=20) - second).norm())
        for f in (0.8, 1.0)
    ]
    assert errors[0] < 0.01 and errors[1] > 0.5, errors


def test_maximizing_turns_the_gradient_around() -> None:
    x, y = data()
    up = fit(lambda m: optim.HuberRegression(m, lr=LR, delta=100.0, maximize=True), x, y, batch=1)

    def step(w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return w + LR * torch.outer(w @ k - v, k)

    close(up, by_hand(step, x, y))


def test_a_sum_over_examples_is_one_too() -> None:
    x, y = data()
    model = linear()
    optimizer = optim.NLMS(model, lr=1.0, reduction="sum")
    ((model(x) - y).square().sum() / 2).backward()
    optimizer.step()
    close(model.weight.detach(), fit(lambda m: optim.NLMS(m, lr=1.0), x, y))
    with pytest.raises(AxesError, match="reduction"):
        optim.NLMS(model, reduction="median")  # type: ignore[arg-type]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(AxesError, match="forget"):
        optim.RecursiveLeastSquares.declare(forget=0.0)
    with pytest.raises(AxesError, match="eps"):
        optim.RecursiveLeastSquares.declare(eps=0.0)
    with pytest.raises(AxesError, match="pass the model"):
        optim.NLMS(linear().parameters())
