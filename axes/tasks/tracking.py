"""Tasks of state: what a word of a group is so far, at every letter."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.tasks.synthetic import Task, integers


@final
@dataclass(frozen=True)
class ModularSum(Task):
    """Digits below `modulus`: their sum so far. Of modulus 2, parity."""

    length: int = 40
    modulus: int = 2
    name = "modular-sum"
    source = "Grazzi et al., Unlocking State-Tracking in Linear RNNs (2024), section 5"

    @property
    def vocabulary(self) -> int:
        return self.modulus

    @classmethod
    def published(cls) -> ModularSum:
        return cls()

    def _draw(self, batch: int, draw: torch.Generator, length: int | None) -> tuple[Tensor, Tensor]:
        if self.modulus < 2:
            raise AxesError(f"{self.name}: modulus must be at least 2, got {self.modulus}")
        window = integers(0, self.modulus, (batch, self.length if length is None else length), draw)
        return window, window.cumsum(1) % self.modulus


@final
@dataclass(frozen=True)
class GroupWord(Task):
    """Permutations of `letters` things, one after another: the permutation that they make so far, g_t ... g_1.

    A token is a permutation's number in the order of `itertools.permutations`.
    """

    length: int = 64
    letters: int = 3
    name = "group-word"
    source = "Merrill et al., The Illusion of State (2024); Siems et al., DeltaProduct (2025), section 5.1"

    @property
    def vocabulary(self) -> int:
        return len(products(self.letters))

    @classmethod
    def published(cls) -> GroupWord:
        return cls(length=128, letters=3)

    def _draw(self, batch: int, draw: torch.Generator, length: int | None) -> tuple[Tensor, Tensor]:
        if not 2 <= self.letters <= 5:
            raise AxesError(f"{self.name}: letters are 2 to 5, got {self.letters}: of more the table is too large")
        table = products(self.letters)
        window = integers(0, len(table), (batch, self.length if length is None else length), draw)
        so_far = window.clone()
        for t in range(1, window.shape[1]):
            so_far[:, t] = table[window[:, t], so_far[:, t - 1]]
        return window, so_far


@functools.cache
def products(letters: int) -> Tensor:
    """table[a, b] is the number of a after b."""
    words = list(itertools.permutations(range(letters)))
    number = {word: n for n, word in enumerate(words)}
    return torch.tensor([[number[tuple(a[x] for x in b)] for b in words] for a in words])
