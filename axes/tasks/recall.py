"""Tasks of memory: what stood beside what, where, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.tasks.synthetic import IGNORED, Task, chosen, integers


@final
@dataclass(frozen=True)
class MultiQueryRecall(Task):
    """Pairs of a key and a value, then every key once more among other tokens: what was its value?

    Keys are the lower half of the vocabulary without 0, values the upper half. Pairs stand at the start, queries behind
    them at even places whose distances are drawn with p(n) ~ n^(power - 1); everything else is any token.
    """

    pairs: int = 16
    length: int = 128
    tokens: int = 512
    power: float = 0.01
    name = "multi-query-recall"
    source = "Arora et al., Zoology (2023), section 4 and appendix E"

    @property
    def vocabulary(self) -> int:
        return self.tokens

    @classmethod
    def published(cls) -> MultiQueryRecall:
        return cls(pairs=64, length=256, tokens=8192)

    def _draw(self, batch: int, draw: torch.Generator, length: int | None) -> tuple[Tensor, Tensor]:
        n, t, half = self.pairs, self.length if length is None else length, self.tokens // 2
        places = (t - 2 * n) // 2
        if places < n or n > half - 1:
            wanted = f"{n} pairs need {4 * n} tokens of a window and {n + 1} keys"
            raise AxesError(f"{self.name}: {wanted}; got length {t} and {half} keys")
        keys = 1 + chosen(batch, n, half - 1, draw)
        values = half + integers(0, self.tokens - half, (batch, n), draw)
        likely = torch.arange(1, places + 1, dtype=torch.float64) ** (self.power - 1)
        asked = 2 * n + 2 * chosen(batch, n, places, draw, likely)
        window = integers(0, self.tokens, (batch, t), draw)
        window[:, 0 : 2 * n : 2], window[:, 1 : 2 * n : 2] = keys, values
        targets = torch.full_like(window, IGNORED)
        return window.scatter(1, asked, keys), targets.scatter(1, asked, values)


@final
@dataclass(frozen=True)
class SelectiveCopy(Task):
    """Some tokens among blanks, then as many marks: the tokens in their order.

    0 is the blank, 1 the mark, the rest is to be copied.
    """

    copied: int = 16
    length: int = 256
    tokens: int = 16
    name = "selective-copy"
    source = "Gu and Dao, Mamba (2023), section 4.1.1; Poli et al., MAD (2024), section 3.1"

    @property
    def vocabulary(self) -> int:
        return self.tokens

    @classmethod
    def published(cls) -> SelectiveCopy:
        return cls()

    def _draw(self, batch: int, draw: torch.Generator, length: int | None) -> tuple[Tensor, Tensor]:
        n, t = self.copied, self.length if length is None else length
        if t < 2 * n or self.tokens < 3:
            wanted = f"{n} tokens need a window of {2 * n} and a vocabulary of 3"
            raise AxesError(f"{self.name}: {wanted}; got {t} and {self.tokens}")
        content = integers(2, self.tokens, (batch, n), draw)
        places = chosen(batch, n, t - n, draw).sort(1).values
        window = torch.zeros(batch, t, dtype=torch.int64).scatter(1, places, content)
        window[:, t - n :] = 1
        targets = torch.full_like(window, IGNORED)
        targets[:, t - n :] = content
        return window, targets


@final
@dataclass(frozen=True)
class NoisyRecall(Task):
    """Keys and their values one after another, with noise between pairs: at a key that was seen, its value.

    A key has one value in a window. Keys are the lower half of the first `tokens`, values the upper half; noise has
    tokens of its own behind them. Without noise this is in-context recall.
    """

    length: int = 128
    tokens: int = 16
    noises: int = 16
    share: float = 0.2
    name = "noisy-recall"
    source = "Poli et al., MAD (2024), section 3.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.share < 1.0:
            raise AxesError(f"{self.name}: share of noise must lie in [0, 1), got {self.share}")

    @property
    def vocabulary(self) -> int:
        return self.tokens + self.noises

    @classmethod
    def published(cls) -> NoisyRecall:
        return cls()

    def _draw(self, batch: int, draw: torch.Generator, length: int | None) -> tuple[Tensor, Tensor]:
        t, half = self.length if length is None else length, self.tokens // 2
        if t < 4 or half < 1:
            raise AxesError(f"{self.name}: a window of 4 and a vocabulary of 2 are the least; got {t}, {self.tokens}")
        value_of = half + integers(0, self.tokens - half, (batch, half), draw)
        pairs = t // 2
        keys, noise = integers(0, half, (batch, pairs), draw), integers(0, self.noises, (batch, pairs, 2), draw)
        noisy = torch.rand(batch, pairs, generator=draw) < self.share
        values = value_of.gather(1, keys)
        slots = torch.where(noisy[..., None], self.tokens + noise, torch.stack((keys, values), -1))
        earlier = torch.ones(pairs, pairs, dtype=torch.bool).tril(-1)
        same = (keys[:, :, None] == keys[:, None, :]) & ~noisy[:, None, :] & earlier
        seen = same.any(-1) & ~noisy
        asked = torch.stack((torch.where(seen, values, IGNORED), torch.full_like(values, IGNORED)), -1)
        window = torch.zeros(batch, t, dtype=torch.int64)
        targets = torch.full_like(window, IGNORED)
        window[:, : 2 * pairs], targets[:, : 2 * pairs] = slots.flatten(1), asked.flatten(1)
        return window, targets


@final
@dataclass(frozen=True)
class LatestRecall(Task):
    """Keys are given values again and again, and asked for now and then: what was the last value of this key?

    Two tokens at a time: a key and its new value, or 0 and a key that is asked for, at which the answer is due. Keys
    are the `keys` tokens behind 0, values the `values` behind those. A memory that adds what it is given cannot tell
    which value came last.
    """

    length: int = 64
    keys: int = 8
    values: int = 8
    share: float = 0.4  # of what is asked
    name = "latest-recall"
    source = "Schlag et al., Linear Transformers Are Secretly Fast Weight Programmers (2021), section 6.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.share < 1.0:
            raise AxesError(f"{self.name}: share of what is asked must lie in (0, 1), got {self.share}")

    @property
    def vocabulary(self) -> int:
        return 1 + self.keys + self.values

    @classmethod
    def published(cls) -> LatestRecall:
        return cls(length=80, keys=20, values=20)

    def _draw(self, batch: int, draw: torch.Generator, length: int | None) -> tuple[Tensor, Tensor]:
        t = self.length if length is None else length
        if t < 4:
            raise AxesError(f"{self.name}: a window of 4 is the least that is answered, got {t}")
        pairs = t // 2
        key, value = integers(0, self.keys, (batch, pairs), draw), integers(0, self.values, (batch, pairs), draw)
        asks = torch.rand(batch, pairs, generator=draw) < self.share
        asks[:, 0], asks[:, 1] = False, True
        key[:, 1] = key[:, 0]  # so that something is answered in every window
        last = torch.full((batch, self.keys), IGNORED)
        answers = torch.full((batch, pairs), IGNORED)
        for i in range(pairs):
            k, asked = key[:, i : i + 1], asks[:, i : i + 1]
            answers[:, i : i + 1] = torch.where(asked, last.gather(1, k), IGNORED)
            last = torch.where(asked, last, last.scatter(1, k, 1 + self.keys + value[:, i : i + 1]))
        slots = torch.stack((torch.where(asks, 0, 1 + key), torch.where(asks, 1 + key, 1 + self.keys + value)), -1)
        due = torch.stack((torch.full_like(answers, IGNORED), answers), -1)
        window, targets = torch.zeros(batch, t, dtype=torch.int64), torch.full((batch, t), IGNORED)
        window[:, : 2 * pairs], targets[:, : 2 * pairs] = slots.flatten(1), due.flatten(1)
        return window, targets


@final
@dataclass(frozen=True)
class FuzzyRecall(Task):
    """As in-context recall, but keys and values are words of 1 to `longest` tokens: at a word that was seen, the next
    tokens are those of its value.

    A word of the lower half of the vocabulary is a key, of the upper half a value; a window has its own dictionary, in
    which no key begins another. Pairs that do not fit at the end are left out, 0 fills.
    """

    length: int = 128
    tokens: int = 16
    words: int = 4
    longest: int = 3
    name = "fuzzy-recall"
    source = "Poli et al., MAD (2024), section 3.1"

    @property
    def vocabulary(self) -> int:
        return self.tokens

    @classmethod
    def published(cls) -> FuzzyRecall:
        return cls()

    def _draw(self, batch: int, draw: torch.Generator, length: int | None) -> tuple[Tensor, Tensor]:
        t, half = self.length if length is None else length, self.tokens // 2
        if half - 1 < self.words:
            raise AxesError(f"{self.name}: {self.words} keys begin with different tokens; there are {half - 1}")
        window = torch.zeros(batch, t, dtype=torch.int64)
        targets = torch.full_like(window, IGNORED)
        for row in range(batch):
            first = 1 + chosen(1, self.words, half - 1, draw)[0]
            begun = half + integers(0, self.tokens - half, (self.words,), draw)
            keys = [[int(x), *self._rest(1, half, draw)] for x in first]
            values = [[int(x), *self._rest(half, self.tokens, draw)] for x in begun]
            at, seen = 0, set[int]()
            while True:
                word = int(integers(0, self.words, (1,), draw))
                key, value = keys[word], values[word]
                if at + len(key) + len(value) > t:
                    break
                window[row, at : at + len(key) + len(value)] = torch.tensor(key + value)
                if word in seen:  # every token of the value is asked for one token before it stands there
                    begin = at + len(key) - 1
                    targets[row, begin : begin + len(value)] = torch.tensor(value)
                seen.add(word)
                at += len(key) + len(value)
        return window, targets

    def _rest(self, low: int, high: int, draw: torch.Generator) -> list[int]:
        more = int(integers(0, self.longest, (1,), draw))
        return [int(x) for x in integers(low, high, (more,), draw)]


@final
@dataclass(frozen=True)
class Memorisation(Task):
    """Keys, each with a mark behind it: at the mark the value that the key has in every window. Weights must know it.

    The last token is the mark; keys are the lower half of the others.
    """

    length: int = 32
    tokens: int = 256
    dictionary: int = 0  # seed of the map
    name = "memorisation"
    source = "Poli et al., MAD (2024), section 3.1"

    def __post_init__(self) -> None:
        if self.length < 2 or self.tokens < 2:
            raise AxesError(f"{self.name}: length and tokens must be at least 2, got {self.length} and {self.tokens}")

    @property
    def vocabulary(self) -> int:
        return self.tokens + 1

    @classmethod
    def published(cls) -> Memorisation:
        return cls(length=32, tokens=256)

    @property
    def values(self) -> Tensor:
        """Of every key."""
        half = self.tokens // 2
        own = torch.Generator().manual_seed(self.dictionary)
        return half + integers(0, self.tokens - half, (half,), own)

    def _draw(self, batch: int, draw: torch.Generator, length: int | None) -> tuple[Tensor, Tensor]:
        t = self.length if length is None else length
        keys = integers(0, self.tokens // 2, (batch, t // 2), draw)
        window = torch.full((batch, t), self.tokens)
        targets = torch.full_like(window, IGNORED)
        window[:, 0 : 2 * (t // 2) : 2], targets[:, 1 : 2 * (t // 2) : 2] = keys, self.values[keys]
        return window, targets
