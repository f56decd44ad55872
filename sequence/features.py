"""Feature maps that widen keys and queries: their products are polynomials of products, and memories stay matrices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from axes.errors import ShapeError


class FeatureMap(ABC):
    """A declaration of features of a vector of `width` entries, d_k of them."""

    @abstractmethod
    def features(self, width: int) -> int:
        """How many features a vector of this width has."""

    @abstractmethod
    def build(self, d_k: int, factory: dict[str, Any]) -> FeatureModule:
        """The module for keys of d_k features; ShapeError where no width has as many."""

    def width(self, d_k: int) -> int:
        """Of the vectors that have d_k features."""
        width = 1
        while self.features(width) < d_k:
            width += 1
        if self.features(width) != d_k:
            known = ", ".join(f"{self.features(n)} (of {n})" for n in (4, 8, 16, 32))
            raise ShapeError(f"{type(self).__name__}: no vector has d_k={d_k} features: take {known}, ...")
        return width


class FeatureModule(nn.Module):
    """(..., width) -> (..., d_k)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


def squares(x: Tensor) -> Tensor:
    """s with s(x) . s(y) = (x . y)^2: products x_i x_j of all pairs i <= j, sqrt(2) times where they differ."""
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    weight = torch.where(i == j, x.new_ones(()), x.new_full((), math.sqrt(2.0)))
    return x[..., i] * x[..., j] * weight


@final
@dataclass(frozen=True)
class Taylor(FeatureMap):
    """phi(q) . phi(k) = 1 + s + s^2 / 2 with s = q . k / sqrt(width): the exponential's series to second order (Based).

    Equal products stand once, so that a width of 16 has 153 features, where the paper's has 273 of the same products.
    """

    def features(self, width: int) -> int:
        return 1 + width + width * (width + 1) // 2

    def build(self, d_k: int, factory: dict[str, Any]) -> FeatureModule:
        return _TaylorModule(self.width(d_k))


@final
class _TaylorModule(FeatureModule):
    def forward(self, x: Tensor) -> Tensor:
        x = x * self.width**-0.25
        return torch.cat((torch.ones_like(x[..., :1]), x, squares(x) * math.sqrt(0.5)), -1)


@final
@dataclass(frozen=True)
class Quadratic(FeatureMap):
    """phi(q) . phi(k) = (q' . k')^2 / width with x' = gain * LN(x) + bias, learned, for q and k alike (ReBased)."""

    eps: float = 1e-5

    def features(self, width: int) -> int:
        return width * (width + 1) // 2

    def build(self, d_k: int, factory: dict[str, Any]) -> FeatureModule:
        return _QuadraticModule(self, self.width(d_k), factory)


@final
class _QuadraticModule(FeatureModule):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, declared: Quadratic, width: int, factory: dict[str, Any]) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width, eps=declared.eps, **factory)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.norm.weight
        normed: Tensor = self.norm(x.to(weight.dtype)).to(x.dtype)
        return squares(normed) * self.width**-0.5


@final
@dataclass(frozen=True)
class Centred(FeatureMap):
    """x less its mean: all that a row of weights of one sum sees of a key. An even row reads nothing (Memora)."""

    def features(self, width: int) -> int:
        return width

    def build(self, d_k: int, factory: dict[str, Any]) -> FeatureModule:
        return _CentredModule(d_k)


@final
class _CentredModule(FeatureModule):
    def forward(self, x: Tensor) -> Tensor:
        # in float32 at least: an even row reads the mean that rounding leaves, and pairs write a hundredth of it
        wide = x if x.dtype == torch.float64 else x.float()
        return wide - wide.mean(-1, keepdim=True)


__all__ = ["Centred", "FeatureMap", "FeatureModule", "Quadratic", "Taylor", "squares"]
