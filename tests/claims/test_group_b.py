"""Group B: every claim on a few draws, and faults planted in the parts that its checks run through."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from axes import costs, dispatch, memory
from axes.claims import group_b, group_b_writes
from axes.claims.base import Claim, Draw, Result, Verdict
from axes.claims.verify import verify_one
from axes.geometry import Entropic
from axes.memory import List
from axes.state_update import StateUpdate

TESTED = [c for c in group_b.CLAIMS if c.check is not None]
HEAVY = {"B03", "B09", "B10", "B12", "B18", "B22"}  # more than 40 ms a draw: one draw


def test_every_id_in_order() -> None:
    assert [c.id for c in group_b.CLAIMS] == [f"B{i:02d}" for i in range(1, 25)]


@pytest.mark.parametrize("claim", [c for c in TESTED if c.id not in HEAVY], ids=lambda c: c.id)
@settings(max_examples=2)
@given(seed=st.integers(0, 10_000))
def test_claim_holds(claim: Claim, seed: int) -> None:
    assert claim.check is not None
    result = Result(claim, claim.check(Draw(seed)))
    assert result.ok, [str(f) for f in result.findings if not f.ok]


@pytest.mark.parametrize("claim", [c for c in TESTED if c.id in HEAVY], ids=lambda c: c.id)
def test_heavy_claim_holds(claim: Claim) -> None:
    result = verify_one(claim, 1)
    assert result.ok, (result.error, [str(f) for f in result.findings if not f.ok])


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


def test_verdicts() -> None:
    count = {v: sum(c.verdict is v for c in group_b.CLAIMS) for v in Verdict}
    assert count == {
        Verdict.EXACT: 10,
        Verdict.CONDITIONAL: 7,
        Verdict.APPROXIMATE: 0,
        Verdict.STATISTICAL: 1,
        Verdict.FALSE: 5,
        Verdict.UNTESTABLE: 1,
    }
