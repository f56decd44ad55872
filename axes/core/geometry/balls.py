"""Balls and spheres: steepest descent directions and projections."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from axes.core.geometry.bregman import (
    NO_CONTEXT,
    TINY,
    Context,
    EuclideanOn,
    SphereOf,
    leaf_dims,
    leaf_size,
    require,
    require_matrix,
    wide,
)
from axes.core.rates import Rate, Variable, rate_shape, resolve, spread


@final
@dataclass(frozen=True, repr=False)
class Sphere(EuclideanOn):
    """h = |W|^2 / 2 on spheres: W = radius * theta / |theta|, per row, per column (slot) or for the whole leaf.

    This is the nearest point of the sphere. radius None is sqrt(number of entries normalised together): RMSNorm.
    A zero row stays zero, with derivative zero.

    Source: Lattice, eq. 14 (columns, agile) and eq. 8 (columns, lazy). Differs: divides by the true norm, with `TINY`
    = 1e-24 added to its square.
    """

    axis: Literal["rows", "columns", "whole"] = "rows"
    radius: float | None = 1.0

    scale_free = True

    def __post_init__(self) -> None:
        ok = self.axis in ("rows", "columns", "whole")
        require(ok, self, f"axis {self.axis!r} is not one of rows, columns, whole")
        fits = self.radius is None or 0 < self.radius < math.inf
        require(fits, self, f"radius must be positive and finite, or None (sqrt of the entries), got {self.radius}")

    @property
    def matrix(self) -> bool:  # type: ignore[override]
        return self.axis == "columns"

    @property
    def turns(self) -> bool:  # type: ignore[override]
        return self.axis != "columns" and self.radius is not None

    @property
    def sphere(self) -> SphereOf:  # type: ignore[override]
        return self.axis, self.radius

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if self.matrix:
            require_matrix(self, theta)
        x = wide(theta)
        square = self._square(x)
        # what has no direction has no derivative either: 1 / sqrt(TINY) a token would leave float32 in four
        over = torch.where(square == 0, 0.0, (square + TINY).rsqrt())
        return (x * (self._radius(x) * over)).to(theta.dtype)

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        return ((self._square(wide(w)).sqrt() - self._radius(w)).abs() <= tol).all(leaf_dims(w))

    def _dims(self, x: Tensor) -> tuple[int, ...]:
        return leaf_dims(x) if self.axis == "whole" else (-2 if self.axis == "columns" else -1,)

    def _square(self, x: Tensor) -> Tensor:
        return x.square().sum(self._dims(x), keepdim=True)

    def _radius(self, x: Tensor) -> float:
        return math.sqrt(math.prod([x.shape[d] for d in self._dims(x)])) if self.radius is None else self.radius


@final
@dataclass(frozen=True, repr=False)
class SignBall(EuclideanOn):
    """The unit ball of the max norm: W = sign(theta) maximises <theta, W> over it; sign(0) = 0 is still a maximiser.

    On a filter it is signed descent (Lion); agile on a state it is the projection onto the corners.

    Source: Chen et al. 2023, algorithm 2 (Lion); as a linear minimisation oracle, W = grad h*(theta) for h the
    indicator of the ball.
    """

    scale_free = True
    entrywise = True

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta.sign()

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        return (w.abs() <= 1 + tol).all(leaf_dims(w))


@final
@dataclass(frozen=True, repr=False)
class Ball(EuclideanOn):
    """h = |W|^2 / 2 on a ball around 0: W = the nearest point of it to theta.

    norm: "euclidean" scales theta to at most `radius` over the leaf, "rms" to at most `radius` times the root of the
    number of its entries, "max" clamps every entry to [-radius, radius]. On a memoryless filter ahead of all others it
    is gradient clipping, parameter by parameter.

    Source: Pascanu, Mikolov and Bengio 2013, algorithm 1 (euclidean); Shazeer and Stern 2018, algorithm 3 (rms).
    """

    radius: Rate = 1.0
    norm: Literal["euclidean", "rms", "max"] = "euclidean"

    approximates = True

    def __post_init__(self) -> None:
        fits = isinstance(self.radius, Variable) or 0 < self.radius < math.inf
        require(fits, self, f"radius must be positive and finite, got {self.radius}")
        require(rate_shape(self.radius) == "scalar", self, f"the radius must be scalar, got {self.radius!r}")
        known = self.norm in ("euclidean", "rms", "max")
        require(known, self, f"norm {self.norm!r} is not one of euclidean, rms, max")

    @property
    def entrywise(self) -> bool:  # type: ignore[override]
        return self.norm == "max"

    def rates(self) -> tuple[Rate, ...]:
        return (self.radius,)

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        radius = spread(resolve(self.radius, context.signal), "scalar")
        if self.norm == "max":
            return theta.clamp(-radius, radius)  # type: ignore[arg-type]
        size, radius = leaf_size(theta), radius * self._unit(theta)
        return (theta * (radius / size.clamp_min(radius))).to(theta.dtype)

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        size = w.abs().amax(leaf_dims(w)) if self.norm == "max" else wide(w).square().sum(leaf_dims(w)).sqrt()
        return size <= resolve(self.radius, {}) * self._unit(w) + tol

    def _unit(self, x: Tensor) -> float:
        return math.prod(x.shape[d] for d in leaf_dims(x)) ** 0.5 if self.norm == "rms" else 1.0
