"""Group I: every claim on a few draws, and faults planted on one axis, which the other axis then shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from torch import Tensor

from axes.claims.checks import i_descent, i_memory
from axes.claims.tools.tuples import layer_tuple
from axes.core import costs, execution, memory, monoids
from axes.core.algorithms import Step
from axes.core.geometry import spectral
from axes.core.state_update import StateUpdate
from axes.routes import dispatch

Red = Callable[..., bool]  # the fixture


def replaced(monkeypatch: pytest.MonkeyPatch, module: object, name: str, **parts: object) -> None:
    """The layer of a name with other parts, as a check of that module sees it."""

    def tuple_of(wanted: str) -> StateUpdate:
        update = layer_tuple(wanted)
        return dataclasses.replace(update, **parts) if wanted == name else update  # type: ignore[arg-type]

    monkeypatch.setattr(module, "layer_tuple", tuple_of)


def test_layer_error_with_the_wrong_sign(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = costs.SquaredError._prox
    monkeypatch.setattr(costs.SquaredError, "_prox", lambda self, e, c, signal: -true(self, e, c, signal))
    assert red("I01", "I03", "I05", "I06", "I08", "I11", "I13")


def test_layer_without_its_rate(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, i_descent, "delta-net", algorithm=Step())
    assert red("I11")


def test_gate_after_the_gradient(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, i_descent, "gated-delta-net", algorithm=layer_tuple("gated-delta-net-prev").algorithm)
    assert red("I02", "I03")


def test_optimizer_decay_not_tied_to_the_step(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = monoids.Decay.element
    monkeypatch.setattr(monoids.Decay, "element", lambda self, signal, rate, like: true(self, signal, 1.0, like))
    assert red("I02", "I06")


def test_coupled_decay_with_the_wrong_sign(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = execution._ridged

    def flipped(parts: object, u: tuple[Tensor, ...], weights: tuple[Tensor, ...], signal: object) -> object:
        return true(parts, u, tuple(-w for w in weights), signal)  # type: ignore[arg-type]

    monkeypatch.setattr(execution, "_ridged", flipped)
    assert red("I02", "I04")


def test_proximal_step_taken_explicitly(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.SquaredError, "_prox", lambda self, e, c, signal: e)
    assert red("I05")


def test_momentum_evaluated_elsewhere(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = dataclasses.replace(layer_tuple("titans-matrix").algorithm, at="gated")  # type: ignore[type-var]
    replaced(monkeypatch, i_memory, "titans-matrix", algorithm=gated)
    assert red("I06", "I07")


def test_second_moment_without_its_root(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = costs.Linear.drive
    halved = lambda self, u, signal=None: true(self, u, signal or {}) / (2 if self.of == "square" else 1)  # noqa: E731
    monkeypatch.setattr(costs.Linear, "drive", halved)
    assert red("I08")


def test_ridge_with_the_wrong_power(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = spectral.inverse_power
    monkeypatch.setattr(spectral, "inverse_power", lambda m, power, eps: true(m, power / 2, eps))
    monkeypatch.setattr(spectral, "solved", lambda theta, m, eps: theta @ true(m, 0.5, eps))
    assert red("I05", "I09")


def test_swapped_outer_product(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = memory.outer
    monkeypatch.setattr(memory, "outer", lambda column, row: true(column, row).flip(-1))
    assert red("I03", "I04", "I10", "I13")


def test_fast_route_without_a_gate(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = dispatch.chain
    monkeypatch.setattr(dispatch, "chain", lambda u, s: dataclasses.replace(true(u, s), gate=None))
    assert red("I03", "I04", "I12")


def test_rotation_the_other_way(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(i_descent, "rotate", lambda x, angle: monoids.rotate(x, -angle))
    assert red("I12")
