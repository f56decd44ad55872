"""Spans of a signal: its data cut into chunks, or one datum. What does not vary in time stays.

Signals are split once: a slice for every chunk would have a gradient of the length of the sequence for every chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from axes.core.algorithms import Anchor

Signal = Mapping[str, Tensor | float]


def sizes(length: int, longest: int, at: Any, count: int) -> list[int]:
    """Of chunks, none of which reaches beyond the place where an anchor is refreshed. count: of data before them."""
    out = []
    while length:
        size = min(longest, length)
        if isinstance(at, Anchor):
            size = min(size, at.every - count % at.every)
        out.append(size)
        count, length = count + size, length - size
    return out


def split(signal: Signal, dim: int, lengths: Sequence[int]) -> list[dict[str, Tensor | float]]:
    """One signal a chunk."""
    parts = {n: x.split(list(lengths), dim) for n, x in signal.items() if isinstance(x, Tensor) and x.ndim > dim}
    return [{n: parts[n][i] if n in parts else x for n, x in signal.items()} for i in range(len(lengths))]


def datum(signal: Signal, dim: int, t: int) -> dict[str, Tensor | float]:
    return {n: x.select(dim, t) if isinstance(x, Tensor) and x.ndim > dim else x for n, x in signal.items()}


__all__ = ["datum", "sizes", "split"]
