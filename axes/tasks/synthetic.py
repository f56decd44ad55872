"""Tasks whose answers are known: windows of tokens and what is asked where, drawn from a seed.

A task is a frozen value; `task.draw(batch, seed)` is always the same windows. `length` of a draw
is for tests on longer windows than those of training. Where nothing is asked the target is IGNORED.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from axes.errors import AxesError

IGNORED = -100  # what torch's cross-entropy leaves out


class Windows(NamedTuple):
    """tokens (B, T) and, of every position, the token that is asked for there, or IGNORED; both int64."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Task(ABC):
    """A generator of windows. vocabulary: how many tokens there are; length: of a window."""

    name: ClassVar[str]
    source: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise AxesError(f"{self.name}: {field.name} must be at least 1, got {value}")

    @property
    @abstractmethod
    def vocabulary(self) -> int: ...

    @classmethod
    @abstractmethod
    def published(cls) -> Task:
        """The settings of the source."""

    def draw(self, batch: int, seed: int, length: int | None = None) -> Windows:
        """The windows of a seed. Raises AxesError for a length that does not hold what the task needs."""
        if batch < 1:
            raise AxesError(f"{self.name}: batch must be at least 1, got {batch}")
        tokens, targets = self._draw(batch, torch.Generator().manual_seed(seed), length)
        return Windows(tokens, targets)

    @abstractmethod
    def _draw(self, batch: int, draw: torch.Generator, length: int | None) -> tuple[Tensor, Tensor]: ...


def chosen(batch: int, count: int, among: int, draw: torch.Generator, weights: Tensor | None = None) -> Tensor:
    """(batch, count) different numbers below `among`, in random order; weights (among,): how likely each is drawn."""
    w = torch.ones(among, dtype=torch.float64) if weights is None else weights.double()
    return torch.multinomial(w.expand(batch, among), count, generator=draw)


def integers(low: int, high: int, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=draw)
