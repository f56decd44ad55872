"""Tasks whose labels a fixed network says: a linear one some of whose labels are flipped, and a deep one of classes."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from axes.errors import AxesError


class Examples(NamedTuple):
    """inputs (B, features) and what is said of each: (B, outputs) numbers, or (B,) classes."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Teacher(ABC):
    """A generator of examples; `draw(batch, seed)` is always the same ones. teacher: the seed of the network."""

    features: int = 16
    outputs: int = 8
    teacher: int = 0
    name: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "teacher" else 1
            if isinstance(value, int) and value < least:
                raise AxesError(f"{self.name}: {field.name} must be at least {least}, got {value}")

    def draw(self, batch: int, seed: int) -> Examples:
        """Examples of a seed, with whatever noise their labels have."""
        if batch < 1:
            raise AxesError(f"{self.name}: batch must be at least 1, got {batch}")
        draw = torch.Generator().manual_seed(seed)
        inputs = torch.randn(batch, self.features, generator=draw)
        return Examples(inputs, self._noisy(self.true(inputs), draw))

    @abstractmethod
    def true(self, inputs: Tensor) -> Tensor:
        """What the teacher says."""

    def _noisy(self, targets: Tensor, draw: torch.Generator) -> Tensor:
        return targets


@final
@dataclass(frozen=True)
class FlippedLabels(Teacher):
    """Regression y = W x with W (outputs, features) of variance 1 / features: outputs of variance 1; the label of a
    share of examples has the other sign in every output."""

    share: float = 0.1
    name = "flipped-labels"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.share < 0.5:
            raise AxesError(f"{self.name}: share of flipped labels must lie in [0, 0.5), got {self.share}")

    def true(self, inputs: Tensor) -> Tensor:
        (weight,) = _weights(self.teacher, (self.features, self.outputs))
        return inputs @ weight.T

    def _noisy(self, targets: Tensor, draw: torch.Generator) -> Tensor:
        flipped = torch.rand(len(targets), 1, generator=draw) < self.share
        return torch.where(flipped, -targets, targets)


@final
@dataclass(frozen=True)
class DeepTeacher(Teacher):
    """Classes: the largest output of a network of tanh, `layers` matrices of `hidden` units between."""

    hidden: int = 32
    layers: int = 3
    name = "deep-teacher"

    def true(self, inputs: Tensor) -> Tensor:
        *inner, last = _weights(self.teacher, (self.features, *[self.hidden] * (self.layers - 1), self.outputs))
        for weight in inner:
            inputs = torch.tanh(2.0 * inputs @ weight.T)
        return (inputs @ last.T).argmax(-1)


@functools.cache
def _weights(seed: int, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Matrices from each width to the next, of variance one over the former."""
    draw = torch.Generator().manual_seed(seed)
    pairs = zip(widths, widths[1:], strict=False)
    return tuple(torch.randn(out, width, generator=draw) * width**-0.5 for width, out in pairs)
