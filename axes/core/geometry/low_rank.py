"""Directions of low rank, from the factors that power iteration keeps of a state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from axes.core.geometry.bregman import NO_CONTEXT, Context, Geometry, require, require_matrix, wide
from axes.core.geometry.spectral import scale_of
from axes.errors import IllegalUpdate, ShapeError


@final
@dataclass(frozen=True, repr=False)
class PowerFactors(Geometry):
    """P over R (m + n, r) of a statistic (m, n): P has orthonormal columns, R = theta^T P, so that P R^T is near theta.

    P is an orthonormal basis of theta Q, Q the columns of the R held so far at length one: a step of power iteration,
    whose P R^T tends to the best matrix of rank r if theta moves slowly. r is the smaller side divided by `divisor`, at
    least 1. It begins with columns of a cosine transform as Q, the constant one last. A constant in derivatives.

    Source: Ahn et al. 2025 (Dion), algorithm 2. Differs: a fixed first Q; columns of R that are rounding beside the
    largest one count as zero, where the paper divides by them, and give way to other directions.
    """

    divisor: int = 2

    matrix = True
    makes = "factors"
    continues = True
    is_potential = False

    def __post_init__(self) -> None:
        ok = isinstance(self.divisor, int) and self.divisor >= 1
        require(ok, self, f"divisor must be an integer >= 1, got {self.divisor!r}")

    def empty(self, theta: Tensor) -> Tensor:
        *batch, m, n = theta.shape
        return theta.new_zeros(*batch, m + n, self._rank(theta))

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        require_matrix(self, theta)
        x = wide(theta.detach())
        m, n = x.shape[-2:]
        last = context.weights
        right = _cosines(n, self._rank(x), x) if last is None else lengths_one(wide(last.detach())[..., m:, :], m)
        left = torch.linalg.qr(x @ right).Q
        return torch.cat((left, x.mT @ left), -2).to(theta.dtype)

    def _rank(self, theta: Tensor) -> int:
        return max(1, min(theta.shape[-2:]) // self.divisor)


@final
@dataclass(frozen=True, repr=False)
class LowRank(Geometry):
    """W = s P Q^T for the factors P R^T near theta, Q the columns of R at length one: the polar factor of low rank.

    The statistic is of "state", with PowerFactors. s is `scale`, as in Spectral. What W uses of theta is P R^T, so with
    error feedback on the filter the buffer keeps the rest (`axes.core.algorithms.Step`).

    Source: Ahn et al. 2025 (Dion), algorithm 1.
    """

    stats: tuple[Any, ...]
    scale: Literal["match_rms_adamw", "spectral"] | None = None

    matrix = True
    scale_free = True
    sides = ("entries",)
    takes = "factors"
    approximates = True
    is_potential = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", tuple(self.stats))
        require(len(self.stats) == 1, self, f"one statistic, got {len(self.stats)}")
        scales = (None, "match_rms_adamw", "spectral")
        require(self.scale in scales, self, f"scale {self.scale!r} is not one of {scales}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        left, right = self._factors(theta, context)
        q = lengths_one(right, theta.shape[-2])
        return (scale_of(self.scale, theta) * (left @ q.mT)).to(theta.dtype)

    def used(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        left, right = self._factors(theta, context)
        return (left @ right.mT).to(theta.dtype)

    def _factors(self, theta: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        require_matrix(self, theta)
        if len(context.stats) != 1:
            raise IllegalUpdate(f"LowRank: one statistic declared, {len(context.stats)} supplied")
        both, (m, n) = wide(context.stats[0]), theta.shape[-2:]
        if both.shape[-2] != m + n:
            raise ShapeError(f"LowRank: factors of theta {(m, n)} have {m + n} rows, got {tuple(both.shape[-2:])}")
        return both[..., :m, :], both[..., m:, :]


def lengths_one(matrix: Tensor, rows: int) -> Tensor:
    """Columns (..., n, r) divided by their lengths; zero where a length is rounding of products over `rows` numbers."""
    size = torch.linalg.vector_norm(matrix, dim=-2, keepdim=True)
    least = max(rows, matrix.shape[-2]) * torch.finfo(matrix.dtype).eps * size.amax(-1, keepdim=True)
    live = size > least
    return torch.where(live, matrix / torch.where(live, size, 1.0), 0.0)


def _cosines(n: int, r: int, like: Tensor) -> Tensor:
    """r orthonormal columns (n, r) of the cosine transform, the constant one last: inputs behind a norm have none."""
    rows = torch.arange(n, dtype=torch.float64, device=like.device) + 0.5
    columns = (torch.arange(r, dtype=torch.float64, device=like.device) + 1) % n
    waves = torch.cos(math.pi / n * rows[:, None] * columns)
    return (waves / torch.linalg.vector_norm(waves, dim=0)).to(like.dtype)
