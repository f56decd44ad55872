"""Group G: every claim holds its verdict, its figures can be drawn, and planted faults turn checks red."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from axes.claims.figures.depth import gains, sinkhorn_errors
from axes.core.geometry import Birkhoff, Cayley
from axes.core.memory import List, Matrix


def test_figures_show_what_they_say() -> None:
    for _, errors, law in sinkhorn_errors(iterations=8):
        assert np.all(np.diff(errors) < 0) and np.all(law > 0)
    end = {name: path[-1] for name, path in gains(draws=4).items()}
    assert end["Birkhoff: logits N(0, 1)"] < 1e-10 < end["Birkhoff: near the identity"] < 1
    assert abs(end["SO(n): Cayley"] - 1) < 1e-12


def _rows_first(patch: pytest.MonkeyPatch) -> None:
    def primal(self: Birkhoff, theta: torch.Tensor, context: object = None) -> torch.Tensor:
        for _ in range(self.iterations):
            theta = theta - theta.logsumexp(-1, keepdim=True)
            theta = theta - theta.logsumexp(-2, keepdim=True)
        return theta.exp()

    patch.setattr(Birkhoff, "primal", primal)


def _only_columns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Birkhoff, "primal", lambda self, theta, context=None: torch.softmax(theta, -2))


def _first_order(patch: pytest.MonkeyPatch) -> None:
    def primal(self: Cayley, theta: torch.Tensor, context: object = None) -> torch.Tensor:
        skew = self.scale / 2 * (theta - theta.mT)
        return torch.eye(theta.shape[-1], dtype=theta.dtype) + 2 * skew

    patch.setattr(Cayley, "primal", primal)


def _ascend(patch: pytest.MonkeyPatch) -> None:
    vjp = Matrix.vjp
    patch.setattr(
        Matrix,
        "vjp",
        lambda self, leaves, x, r, signal, *, encode=False: vjp(self, leaves, x, -r, signal, encode=encode),
    )


def _massless(patch: pytest.MonkeyPatch) -> None:
    add = List.add

    def forget(self: List, leaves: tuple, rate: object, shape: object, drive: tuple) -> tuple:
        keys, values, mass = add(self, leaves, rate, shape, drive)  # type: ignore[arg-type]
        return keys[..., -2:, :], values[..., -2:, :], mass[..., -2:]

    patch.setattr(List, "add", forget)


@pytest.mark.parametrize(
    ("id", "fault"),
    [
        ("G01", _ascend),
        ("G03", _only_columns),
        ("G04", _rows_first),
        ("G05", _rows_first),
        ("G08", _first_order),
        ("G10", _first_order),
        ("G11", _ascend),
        ("G12", _massless),
    ],
)
def test_planted_fault_turns_the_check_red(
    id: str, fault: Callable[[pytest.MonkeyPatch], None], red: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert red(id)
