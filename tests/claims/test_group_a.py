"""Group A of the register: every claim on drawn seeds, and faults planted in the instances that turn claims red."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from axes.core.algorithms import Step
from axes.core.costs import SquaredError
from axes.core.geometry import Entropic, Sphere
from axes.core.geometry.spectral import Spectral
from axes.core.memory import Matrix, Memory
from axes.core.monoids import Decay, Element
from axes.depth import PostNorm

Red = Callable[..., bool]  # the fixture
Fault = tuple[type, str, Callable[..., Any]]


def _wrong_sign(self: SquaredError, e: Tensor, c: Any, signal: Any) -> Tensor:
    return -e / (1 + c)


def _without_rate(self: SquaredError, e: Tensor, c: Any, signal: Any) -> Tensor:
    return e


def _other_axis(self: Entropic, theta: Tensor, context: Any = None) -> Tensor:
    return theta.softmax({"row": -2, "column": -1}.get(self.axis, -1)) * self._mass(theta)


def _gate_upside_down(self: Element, x: Tensor) -> Tensor:
    return x if self.gate is None else x * torch.exp(-self.gate[..., None, :])


def _decay_without_rate(self: Decay, signal: Any, rate: Any, like: Tensor) -> Element:
    return Element(scale=1.0 - signal["weight_decay"])


def _half_write(self: Matrix, leaves: Any, x: Tensor, r: Tensor, signal: Any, **_: Any) -> Any:
    return (0.5 * r[..., :, None] * x[..., None, :],)


def _full_step(self: Memory, leaves: Any, rate: Any, shape: Any, drive: Any) -> Any:
    return tuple(leaf + u for leaf, u in zip(leaves, drive, strict=True))


def _unit_radius(self: Sphere, theta: Tensor, context: Any = None) -> Tensor:
    return theta / (theta.square().sum(self._dims(theta), keepdim=True) + 1e-24).sqrt()


_unit_streams: Any = property(lambda self: (self.axis, 1.0))  # mixers normalise by torch's RMSNorm


def _doubled(self: Spectral, theta: Tensor, context: Any = None) -> Tensor:
    u, _, vh = torch.linalg.svd(theta, full_matrices=False)
    return 2 * u @ vh


FAULTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "the error's sign": ((SquaredError, "_prox", _wrong_sign), ("A02", "A20", "A22", "A25")),
    "an implicit step without its shrinkage": ((SquaredError, "_prox", _without_rate), ("A20", "A22", "A24")),
    "softmax along another axis": ((Entropic, "primal", _other_axis), ("A25", "A40", "A41")),
    "a gate's reciprocal": ((Element, "base", _gate_upside_down), ("A03",)),
    "weight decay without the step size": ((Decay, "element", _decay_without_rate), ("A08", "A31")),
    "half a write": ((Matrix, "vjp", _half_write), ("A10", "A23", "A34")),
    "a step without its rate": ((Memory, "add", _full_step), ("A01", "A05", "A07")),
    "a sphere of the wrong radius": ((Sphere, "primal", _unit_radius), ("A35",)),
    "streams on a sphere of the wrong radius": ((Sphere, "sphere", _unit_streams), ("A36",)),
    "twice the polar factor": ((Spectral, "primal", _doubled), ("A28", "A29", "A32")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault(name: str, red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    (owner, attribute, faulty), claims = FAULTS[name]
    monkeypatch.setattr(owner, attribute, faulty)
    assert red(*claims)


def test_post_norm_that_does_not_store_its_norm(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PostNorm, "update", dataclasses.replace(PostNorm.update, algorithm=Step()))
    assert red("A36")
