"""PSGD-Kron: the fitted factors whiten, stay symmetric and positive, and begin and fail as their docstring says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from axes.core.geometry import FittedFactor
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.linalg import blockwise
from axes.linalg.matrix_roots import PRECISIONS
from axes.optim.rules.psgd import PSGDKron


def fitted(update: StateUpdate, gradients: Tensor) -> list[tuple[Tensor, Tensor]]:
    """P_L and P_R after every gradient (steps, ..., m, n)."""
    rates = {"lr": torch.tensor(0.0), "weight_decay": torch.tensor(0.0)}
    state = update.init({"g": gradients[0], **rates}, (torch.zeros_like(gradients[0]),))
    seen = []
    for g in gradients:
        state, _ = update.step(state, {"g": g, **rates})
        left, right = state.via[0].stats  # type: ignore[union-attr]
        seen.append((left.anchor[0], right.anchor[0]))
    return seen


def covariance(size: int, spread: float) -> tuple[Tensor, Tensor]:
    """A symmetric positive matrix with eigenvalues from 1 down to `spread`, and its root."""
    basis, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
    values = torch.logspace(0, torch.tensor(spread).log10().item(), size, dtype=torch.float64)
    return basis * values @ basis.mT, basis * values.sqrt() @ basis.mT


def test_factors_become_the_inverse_roots_of_a_kronecker_covariance() -> None:
    """For g = 3 C_L^{1/2} z C_R^{1/2}, z white: P_L C_L P_L and P_R C_R P_R are the identity on average."""
    torch.manual_seed(0)
    (c_left, r_left), (c_right, r_right) = covariance(5, 0.01), covariance(3, 0.1)
    z = torch.randn(400, 200, 5, 3, dtype=torch.float64)  # 200 runs side by side
    for left, right in fitted(PSGDKron.declare(0.0, fit_rate=0.1), 3 * r_left @ z @ r_right)[-1:]:
        white, across = ((p @ c @ p).mean(0) for p, c in ((left, c_left), (right, c_right)))
        assert (white / white.trace() * 5 - torch.eye(5)).abs().max() < 0.05  # measured 0.02; 2.4 at the first step
        assert (across / across.trace() * 3 - torch.eye(3)).abs().max() < 0.05
        power = 9 * white.trace() / 5 * across.trace() / 3  # of the entries of P_L g P_R
        assert abs(power - 1) < 0.2  # 0.11: the noise of the fit


def test_white_gradients_leave_the_factors_where_they_are() -> None:
    torch.manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))
    for left, right in fitted(PSGDKron.declare(0.0, damping=1e-14), (2 * basis).expand(6, 4, 4)):
        assert (left - torch.eye(4)).abs().max() < 1e-12  # rows of length 2 = sqrt(4): entries of variance one
        assert (right - torch.eye(4)).abs().max() < 1e-12


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(-6, 6)), min_size=1, max_size=8), st.integers(0, 1000))
def test_factors_stay_symmetric_positive_and_bounded(drives: list[tuple[int, float]], seed: int) -> None:
    """Whatever the rank and the size of a gradient is, and however they jump."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gradients = torch.stack([10.0**size * draw(4, rank) @ draw(rank, 3) for rank, size in drives])
    bound = max(1e-4**-0.5, (gradients[0].square().mean() ** -0.25).item())
    for factors in fitted(PSGDKron.declare(0.0, fit_rate=1.0, damping=1e-4), gradients):
        for p in factors:
            assert torch.equal(p, p.mT)
            values = torch.linalg.eigvalsh(p)
            assert values[0] > -1e-12 * values[-1]
            assert values[-1] <= 1.5 * bound


def fit(n: int, dtype: torch.dtype = torch.float64, count: int = 2) -> tuple[Tensor, Tensor]:
    """A statistic and a factor, semi-definite."""
    generator = torch.Generator().manual_seed(n)
    y, q = (torch.randn(count, n, 2 * n, generator=generator, dtype=torch.float64) for _ in range(2))
    return (y @ y.mT / n).to(dtype), (q @ q.mT / n).to(dtype)


# the first two are the error of a product, times the size of a step; the last is that of one precision's own rounding
@pytest.mark.parametrize(("precision", "tolerance"), [("input", 1e-12), ("bfloat16x3", 3e-5), ("tf32", 2e-3)])
@pytest.mark.parametrize("strips", [1, 4])
def test_a_step_is_the_congruence(
    precision: Any, tolerance: float, strips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out: P = (I - r E) P (I - r E), r by two power iterations from the row of the largest entry."""
    monkeypatch.setattr(blockwise, "_strips", lambda count, n: strips)
    a, p = fit(9)
    moved, good = FittedFactor(0.7, 1e-2, precision).moved(a, p)
    assert bool(good.all()) and torch.equal(moved, moved.mT)
    for one, before, after in zip(a, p, moved, strict=True):
        error = one + 1e-2 * before @ before
        x = error[error.diagonal().argmax()]
        for _ in range(2):
            x = x / x.norm() @ error
        eye = torch.eye(9, dtype=torch.float64)
        move = eye - 0.7 / 2 / (1 + x.norm()) * (error - eye)
        torch.testing.assert_close(after, move @ before @ move, rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strips", [1, 2])
def test_what_is_not_finite_leaves_a_factor_as_it_is(
    precision: Any, dtype: torch.dtype, strips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "_strips", lambda count, n: strips)
    h = FittedFactor(1.0, 1e-3, precision)
    a, p = fit(8, dtype, count=5)
    p = (p + p.mT) / 2
    p[3:] = 0  # not begun
    spoiled = a.clone()
    spoiled[1, 2, :] = spoiled[1, :, 2] = math.nan
    spoiled[2, 0, 0] = spoiled[3, 0, 0] = math.inf
    moved, good = h.moved(spoiled, p)
    alone, _ = h.moved(a[:1], p[:1])
    assert good.flatten().tolist() == [True, False, False, False, True]
    torch.testing.assert_close(moved[:1], alone)
    assert torch.equal(moved[1:4], p[1:4])
    torch.testing.assert_close(moved[4], a[4].diagonal().mean() ** -0.25 * torch.eye(8, dtype=dtype))
    assert h.moved(spoiled, None)[1].flatten().tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_that_nothing_bounds_stops_before_it_overflows(precision: Any, dtype: torch.dtype) -> None:
    """Zero gradients and a damping that vanishes in its square: it grows with every step, and then is kept."""
    h, p, kept = FittedFactor(1.0, 1e-300, precision), torch.eye(4, dtype=dtype)[None], 0
    for _ in range(1000):
        p, good = h.moved(torch.zeros_like(p), p)
        kept += int(not good)
        assert bool(p.isfinite().all())
    assert (dtype == torch.float64 and precision == "input") or kept > 0


def test_a_step_reads_nothing_back() -> None:
    """Without storage there is nothing to read: a step that runs waits for no device."""
    a = torch.empty(3, 8, 8, device="meta")
    for precision in PRECISIONS:
        for last in (a, None):
            value, good = FittedFactor(precision=precision).moved(a, last)
            assert value.shape == a.shape and good.shape == (3, 1, 1)


def test_zero_gradients_wait_and_other_values_are_kept_out() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    optimizer = PSGDKron([{"params": [weight], "rule": "psgd-kron"}], lr=0.1, weight_decay=0.0)
    before = weight.detach().clone()
    for _ in range(3):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert torch.equal(weight, before)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    step = (before - weight.detach()) / 0.1
    # the first direction is the gradient at variance one; its average is of four gradients, three of them zero
    expected = weight.grad / weight.grad.square().mean().sqrt() * 0.1 / (1 - 0.9**4)
    torch.testing.assert_close(step, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "options", [{"fit_rate": 0.0}, {"fit_rate": 1.5}, {"damping": 0.0}, {"refresh": 0}, {"beta": 1.0}]
)
def test_refusals(options: dict[str, Any]) -> None:
    with pytest.raises(AxesError, match="rate|damping|refresh|beta"):
        PSGDKron(torch.nn.Linear(3, 2), **options)


def test_an_ill_conditioned_quadratic_is_no_obstacle() -> None:
    """min |A (W - T) B|^2 with condition 1e6: whitened steps come near the minimum, where momentum alone does not."""

    def loss_after(make: Any) -> float:
        torch.manual_seed(0)
        (_, a), (_, b) = covariance(6, 1e-4), covariance(5, 1e-2)
        target = torch.randn(6, 5, dtype=torch.float64)
        weight = torch.nn.Parameter(torch.zeros(6, 5, dtype=torch.float64))
        optimizer = make(weight)
        for t in range(400):
            optimizer.zero_grad()
            loss = (a @ (weight - target) @ b).square().sum()
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (1 - t / 400) + 1e-4
            optimizer.step()
        return float((weight - target).detach().square().mean())

    whitened = loss_after(lambda w: PSGDKron([{"params": [w], "rule": "psgd-kron"}], weight_decay=0.0))
    plain = loss_after(lambda w: torch.optim.SGD([w], momentum=0.9))
    assert whitened < 0.05 * plain
