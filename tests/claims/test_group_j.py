"""Groups J and K: every claim holds its verdict, and faults planted in the parts turn checks red."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from axes.claims.base import Verdict
from axes.claims.register import find
from axes.core import monoids
from axes.core.costs import Linear
from axes.core.geometry import Entropic, Sphere, spectral


def test_external_statements_are_listed_with_a_reason() -> None:
    untestable = [c for c in find(["J", "K"]) if c.check is None]
    assert [c.id for c in untestable] == ["J10", "K01", "K02", "K03"]
    assert all(c.verdict is Verdict.UNTESTABLE and c.reason for c in untestable)


def _turn_back(patch: pytest.MonkeyPatch) -> None:
    straight = monoids.rotate
    patch.setattr(monoids, "rotate", lambda x, angle: straight(x, -angle))


def _no_statistic(patch: pytest.MonkeyPatch) -> None:
    drive = Linear.drive
    patch.setattr(Linear, "drive", lambda self, u, signal: drive(self, u, signal) * (0.5 if self.of == "key" else 1))


def _no_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(spectral.Whiten, "_diagonal", lambda self, theta, v: theta / (v + self.eps))


def _no_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sphere, "primal", lambda self, theta, context=None: theta)


def _wrong_axis(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Entropic, "primal", lambda self, theta, context=None: torch.softmax(theta, -2))


def _no_reflection(patch: pytest.MonkeyPatch) -> None:
    element = monoids.Householder.element

    def projection(self: monoids.Householder, signal: object, rate: object, like: torch.Tensor) -> monoids.Element:
        e = element(self, signal, rate, like)  # type: ignore[arg-type]
        assert e.left is not None
        return monoids.Element(left=e.left / 2, right=e.right)

    patch.setattr(monoids.Householder, "element", projection)


@pytest.mark.parametrize(
    ("id", "fault"),
    [
        ("J01", _no_statistic),
        ("J03", _no_statistic),
        ("J04", _no_root),
        ("J05", _no_norm),
        ("J06", _turn_back),
        ("J07", _wrong_axis),
        ("J09", _no_reflection),
    ],
)
def test_planted_fault_turns_the_check_red(
    id: str, fault: Callable[[pytest.MonkeyPatch], None], red: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert red(id)
