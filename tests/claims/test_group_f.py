"""Group F of the register: every claim on drawn seeds, and faults planted in the instances that turn claims red."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from axes.claims.checks.f_axes import buckets
from axes.claims.tools import chunks
from axes.core.costs import SquaredError
from axes.core.monoids import Element, GeneralLinear
from axes.core.rates import resolve

Red = Callable[..., bool]  # the fixture


def test_buckets() -> None:
    assert buckets(0) == [(0, 0, 1)]
    assert buckets(6) == [(0, 6, 7), (2, 4, 6), (3, 0, 4)]


def test_wrong_sign_in_the_chain(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = chunks.chain

    def flipped(update: Any, signal: Any) -> Any:
        return dataclasses.replace(true(update, signal), value=-signal["v"])

    monkeypatch.setattr(chunks, "chain", flipped)
    assert red("F03", "F04", "F07", "F13", "F14", "F19", "F20")


def test_doubled_error(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = SquaredError._prox
    monkeypatch.setattr(SquaredError, "_prox", lambda self, e, c, signal: 2 * true(self, e, c, signal))
    assert red("F07", "F08", "F09", "F10", "F11", "F12", "F24", "F26")


def test_transposed_mixing(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    def element(self: GeneralLinear, signal: Any, rate: Any, like: Tensor) -> Element:
        logits = resolve(self.logits, signal)
        assert isinstance(logits, Tensor)
        return Element(dense=self.link.primal(logits))

    monkeypatch.setattr(GeneralLinear, "element", element)
    assert red("F18")
