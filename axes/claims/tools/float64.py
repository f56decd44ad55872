"""Constants of the precision that checks compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def full(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def arange(*bounds: int) -> Tensor:
    return torch.arange(*bounds, dtype=torch.float64)
