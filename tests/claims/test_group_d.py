"""Group D: every claim on a few draws, and faults planted in the parts that its checks run through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from axes.core import monoids
from axes.core.monoids import Element
from axes.routes import attention, scan

Red = Callable[..., bool]  # the fixture


def test_rotations_the_other_way(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(x: Tensor, angle: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()), dim=-1)

    for module in (monoids, scan, attention):
        monkeypatch.setattr(module, "rotate", transposed)
    assert red("D09", "D10", "D15")


def test_composition_in_the_wrong_order(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = Element.then
    monkeypatch.setattr(Element, "then", lambda self, other: true(other, self))
    assert red("D14", "D22")


def test_householder_without_its_rate(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = monoids.Householder.element

    def full(self: monoids.Householder, signal: dict[str, Tensor], rate: float, like: Tensor) -> Element:
        element = true(self, signal, rate, like)
        assert element.right is not None
        return Element(left=-element.right, right=element.right)

    monkeypatch.setattr(monoids.Householder, "element", full)
    assert red("D12", "D14", "D22")
