"""Group B: every claim on a few draws, and faults planted in the parts that its checks run through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from axes.claims.checks import b_writes
from axes.core import costs, memory
from axes.core.geometry import Entropic
from axes.core.memory import List
from axes.core.state_update import StateUpdate
from axes.routes import dispatch

Red = Callable[..., bool]  # the fixture


def test_sign_of_the_alignment_cost(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.Alignment, "gradient", lambda self, prediction, target, signal=None: target)
    assert red("B01", "B02")


def test_sign_of_the_fast_write(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = dispatch.chain
    flipped = lambda u, s: dataclasses.replace(true(u, s), value=-s["v"])  # noqa: E731
    monkeypatch.setattr(dispatch, "chain", flipped)
    assert red("B02", "B03", "B04", "B05")


def test_error_scaled_by_two(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = costs.SquaredError._prox
    monkeypatch.setattr(costs.SquaredError, "_prox", lambda self, e, c, signal: 2 * true(self, e, c, signal))
    assert red("B03", "B24")


def test_missing_rate_of_the_delta_rule(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(b_writes, "layer_tuple", lambda name: StateUpdate(costs.SquaredError()))
    assert red("B22")


def test_swapped_outer_product(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = memory.outer
    monkeypatch.setattr(memory, "outer", lambda column, row: true(column, row).flip(-1))
    assert red("B03", "B13", "B16")


def test_power_without_its_factor(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.Lp, "_factor", property(lambda self: 1.0))
    assert red("B13")


def test_huber_without_its_threshold(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.Huber, "_prox", lambda self, e, c, signal: e)
    assert red("B14")


def test_attention_without_normaliser(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entropic, "primal", lambda self, theta, context=None: theta.exp())
    assert red("B06", "B08", "B17", "B19")


def test_temperature_ignored(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(List, "temperature", lambda self, d_k: 1.0)
    assert red("B06", "B07")


def test_cross_entropy_without_softmax(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    def logits(self: costs.CrossEntropy, prediction: Tensor, target: Tensor, signal: object = None) -> Tensor:
        return torch.sigmoid(prediction) - target

    monkeypatch.setattr(costs.CrossEntropy, "gradient", logits)
    assert red("B16")
