"""Spans of a signal: some of its data in a row, or one. What does not vary in time stays."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def span(x: Tensor | float, dim: int, start: int, size: int) -> Tensor | float:
    return x.narrow(dim, start, size) if isinstance(x, Tensor) and x.ndim > dim else x


def datum(signal: Mapping[str, Tensor | float], dim: int, t: int) -> dict[str, Tensor | float]:
    return {n: x.select(dim, t) if isinstance(x, Tensor) and x.ndim > dim else x for n, x in signal.items()}


__all__ = ["datum", "span"]
