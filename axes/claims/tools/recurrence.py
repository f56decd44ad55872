"""Recursions written out, the way a paper prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from axes.claims.tools.float64 import eye, zeros


def recurrence(step: Callable[..., Any], start: Any, *data: Iterable[Any]) -> Tensor:
    """The states (N, ...) under state = step(state, *datum); of a state of several parts, the first."""
    state, path = start, []
    for datum in zip(*data, strict=True):
        state = step(state, *datum)
        path.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(path)


def textbook_least_squares(k: Tensor, v: Tensor, delta: float, forget: float = 1.0) -> Tensor:
    """S + (v - S k) g^T, g = P k/(forget + k^T P k), P = (P - g k^T P)/forget, from P = I/delta and S = 0."""

    def step(state: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        s, p = state
        g = p @ x / (forget + x @ p @ x)
        p = (p - torch.outer(g, x @ p)) / forget
        return s + torch.outer(y - s @ x, g), (p + p.mT) / 2

    return recurrence(step, (zeros(v.shape[1], k.shape[1]), eye(k.shape[1]) / delta), k, v)
