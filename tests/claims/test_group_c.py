"""Group C: every claim on a few draws, and faults planted in the parts that its checks run through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from axes.claims.checks import c_frank_wolfe
from axes.core import costs, geometry, monoids
from axes.core.geometry import norms, spectral
from axes.optim import Lion
from axes.routes import dispatch

Red = Callable[..., bool]  # the fixture


def test_error_with_the_wrong_sign(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = costs.SquaredError._prox
    monkeypatch.setattr(costs.SquaredError, "_prox", lambda self, e, c, signal: -true(self, e, c, signal))
    assert red("C01", "C02", "C03", "C09")


def test_implicit_step_taken_explicitly(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.SquaredError, "_prox", lambda self, e, c, signal: e)
    assert red("C09")


def test_fast_write_without_its_rate(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = dispatch.chain
    doubled = lambda u, s: dataclasses.replace(true(u, s), key=2 * s["k"][..., None, :])  # noqa: E731
    monkeypatch.setattr(dispatch, "chain", doubled)
    assert red("C04", "C05", "C22")


def test_householder_without_its_strength(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    def element(self: monoids.Householder, signal: dict[str, Tensor], rate: object, like: Tensor) -> monoids.Element:
        w = signal[self.key]
        return monoids.Element(left=-w[..., None], right=w[..., None])

    monkeypatch.setattr(monoids.Householder, "element", element)
    assert red("C01", "C02")


def test_whitening_with_the_wrong_power(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = spectral.inverse_power
    monkeypatch.setattr(spectral, "inverse_power", lambda m, power, eps: true(m, power / 2, eps))
    monkeypatch.setattr(spectral, "solved", lambda theta, m, eps: theta @ true(m, 0.5, eps))
    assert red("C08", "C10", "C12", "C13")


def test_ridge_left_out(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = spectral.inverse_power
    monkeypatch.setattr(spectral, "inverse_power", lambda m, power, eps: true(m, power, 2 * eps))
    monkeypatch.setattr(spectral, "solved", lambda theta, m, eps: theta @ true(m, 1.0, 2 * eps))
    assert red("C08", "C09", "C10")


def test_norm_link_with_the_primal_exponent(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = norms._norm_link
    monkeypatch.setattr(norms, "_norm_link", lambda x, p: true(x, p / (p - 1)))
    assert red("C12")


def test_polar_completes_the_null_space(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(x: Tensor, tolerance: float) -> Tensor:
        u, _, vh = torch.linalg.svd(x, full_matrices=False)
        return u @ vh

    monkeypatch.setattr(spectral, "polar", full)
    assert red("C14", "C15")


def test_direction_without_its_norm(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry.Sphere, "primal", lambda self, theta, context=None: theta)
    assert red("C14", "C15", "C17")


def test_lion_with_its_rates_swapped(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    class Swapped:
        def __new__(cls, params: object, betas: tuple[float, float] = (0.9, 0.99), **options: float) -> Lion:  # type: ignore[misc]
            return Lion(params, betas=betas[::-1], **options)  # type: ignore[arg-type]

    monkeypatch.setattr(c_frank_wolfe, "Lion", Swapped)
    assert red("C18")


def test_decay_not_tied_to_the_step(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = monoids.Decay.element
    monkeypatch.setattr(monoids.Decay, "element", lambda self, signal, rate, like: true(self, signal, 1.0, like))
    assert red("C15", "C18")


def test_cautious_keeps_what_disagrees(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = geometry.Cautious.primal
    flipped = lambda self, theta, context: true(self, theta, context._replace(drive=-context.drive))  # noqa: E731
    monkeypatch.setattr(geometry.Cautious, "primal", flipped)
    assert red("C20")
