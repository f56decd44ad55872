"""Group B: every claim on a few draws, and faults planted in the parts that its checks run through."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from axes.claims import group_b, group_b_writes
from axes.claims.verify import verify_one
from axes.core import costs, memory
from axes.core.geometry import Entropic
from axes.core.memory import List
from axes.core.state_update import StateUpdate
from axes.routes import dispatch


def red(id: str) -> bool:
    """Whether a claim is found to fail, by its findings and not by an exception."""
    result = verify_one(next(c for c in group_b.CLAIMS if c.id == id), 1)
    return not result.ok and not result.error


def test_sign_of_the_alignment_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.Alignment, "gradient", lambda self, prediction, target, signal=None: target)
    assert red("B01") and red("B02")


def test_sign_of_the_fast_write(monkeypatch: pytest.MonkeyPatch) -> None:
    true = dispatch.chain
    flipped = lambda u, s, d: dataclasses.replace(true(u, s, d), value=-s["v"])  # noqa: E731
    monkeypatch.setattr(dispatch, "chain", flipped)
    assert red("B02") and red("B03") and red("B04") and red("B05")


def test_error_scaled_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    true = costs.SquaredError._prox
    monkeypatch.setattr(costs.SquaredError, "_prox", lambda self, e, c, signal: 2 * true(self, e, c, signal))
    assert red("B03") and red("B24")


def test_missing_rate_of_the_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_b_writes, "sequence_tuple", lambda name: StateUpdate(costs.SquaredError()))
    assert red("B22")


def test_swapped_outer_product(monkeypatch: pytest.MonkeyPatch) -> None:
    true = memory.outer
    monkeypatch.setattr(memory, "outer", lambda column, row: true(column, row).flip(-1))
    assert red("B03") and red("B13") and red("B16")


def test_power_without_its_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.Lp, "_factor", property(lambda self: 1.0))
    assert red("B13")


def test_huber_without_its_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.Huber, "_prox", lambda self, e, c, signal: e)
    assert red("B14")


def test_attention_without_normaliser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entropic, "primal", lambda self, theta, context=None: theta.exp())
    assert red("B06") and red("B08") and red("B17") and red("B19")


def test_temperature_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(List, "temperature", lambda self, d_k: 1.0)
    assert red("B06") and red("B07")


def test_cross_entropy_without_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    def logits(self: costs.CrossEntropy, prediction: Tensor, target: Tensor, signal: object = None) -> Tensor:
        return torch.sigmoid(prediction) - target

    monkeypatch.setattr(costs.CrossEntropy, "gradient", logits)
    assert red("B16")
