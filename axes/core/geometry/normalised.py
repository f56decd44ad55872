"""Directions divided by what their rows, their columns or their keys are long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from axes.core.costs import Side
from axes.core.geometry.bregman import NO_CONTEXT, Context, Geometry, leaf_size, require, require_matrix, wide
from axes.errors import IllegalUpdate, ShapeError


@final
@dataclass(frozen=True, repr=False)
class NormedWhiten(Geometry):
    """A direction divided by the root of a second moment, then the whole rescaled to a norm that is known.

    W = theta' |theta| / |theta'|,  theta' = theta / (sqrt(v) + eps), v a statistic of "row-square", "column-square" or
    "square": one number a row, a column or an entry. rms: W's norm is rms sqrt(m n) instead of theta's. On a memoryless
    filter behind Muon's it is NorMuon with a number a row, and AdaMuon with a number an entry and rms 0.2.

    Source: Li et al. 2025 (NorMuon), algorithm 1, whose code keeps the norm where the text sets it by rms 0.2; Si,
    Zhang and Shen 2025 (AdaMuon), algorithm 1.
    """

    stats: tuple[Any, ...]
    eps: float = 1e-10
    rms: float | None = None

    is_potential = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", tuple(self.stats))
        require(len(self.stats) == 1, self, f"one statistic, got {len(self.stats)}")
        require_of(self, self.stats[0], ("row-square", "column-square", "square"))
        p = self.stats[0].parts()
        bare = p.step.rate == 1.0 and not p.step.debias and p.h.is_identity
        require(bare, self, "factors of v cancel: leave its rate at 1, debias off and its h out")
        require(0 < self.eps < math.inf, self, f"eps must be positive and finite, got {self.eps}")
        known = self.rms is None or 0 < self.rms < math.inf
        require(known, self, f"rms must be positive and finite, or None for the norm that was, got {self.rms}")

    @property
    def sides(self) -> tuple[Side, ...]:  # type: ignore[override]
        side: Side = self.stats[0].parts().cost.side
        return (side,)

    @property
    def matrix(self) -> bool:  # type: ignore[override]
        return self.sides != ("entries",)

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        require_matrix(self, theta)
        (second,) = require_sides(self, theta, context.stats)
        root = torch.where(second > 0, torch.where(second > 0, second, 1.0).sqrt(), 0.0)
        even = wide(theta) / (root + self.eps)
        norm = leaf_size(theta) if self.rms is None else self.rms * math.prod(theta.shape[-2:]) ** 0.5
        return (even * (norm / (leaf_size(even) + self.eps))).to(theta.dtype)


@final
@dataclass(frozen=True, repr=False)
class RankOneWhiten(Geometry):
    """theta / sqrt(v) entry by entry, v = r c / a the matrix of rank one with the row means r and column means c.

    The statistics are of "row-square" and "column-square": m + n numbers where an entry-wise second moment has m n. a
    is the mean of r and of c, which are one number (the root of their product where they are not). Of a single row v is
    c, the second moment itself. guard: "added" adds eps to both statistics, as if each square had been g^2 + eps;
    "floor" takes a as at least eps and v as at least eps^2. eps None is the rounding unit of the dtype.

    Source: Shazeer and Stern 2018, algorithm 4 ("added"); torch.optim.Adafactor ("floor").
    """

    stats: tuple[Any, ...]
    eps: float | None = 1e-30
    guard: Literal["added", "floor"] = "added"

    linear = True
    sides = ("each-row", "each-column")

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", tuple(self.stats))
        require(len(self.stats) == 2, self, f"two statistics, of rows and of columns, got {len(self.stats)}")
        require_of(self, self.stats[0], ("row-square",))
        require_of(self, self.stats[1], ("column-square",))
        known = self.eps is None or 0 < self.eps < math.inf
        require(known, self, f"eps must be positive and finite, or None, got {self.eps}")
        require(self.guard in ("added", "floor"), self, f"guard {self.guard!r} is not one of added, floor")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        rows, columns = require_sides(self, theta, context.stats)
        eps = torch.finfo(rows.dtype).eps if self.eps is None else self.eps
        if self.guard == "added":
            rows, columns = rows + eps, columns + eps
        row, column = rows.mean(-2, keepdim=True), columns.mean(-1, keepdim=True)
        if self.guard == "added":  # by roots: the products may be below the range of float32
            scale = (rows / row.sqrt()).sqrt() * (columns / column.sqrt()).sqrt()
        else:
            mean = (row.sqrt() * column.sqrt()).clamp_min(eps)
            scale = (rows / mean * columns).sqrt().clamp_min(eps)
        return (wide(theta) / scale).to(theta.dtype)


@final
@dataclass(frozen=True, repr=False)
class KeyNormalised(Geometry):
    """theta / (eps + |k|^2), k the key of the datum: a step of unit length whatever the length of the key is (NLMS).

    The drive of a squared error, e k^T, becomes e k^T / (eps + |k|^2). With eps = 0 a zero key gives 0. It reads the
    datum, so it belongs on a filter of an update with keys.

    Source: Nagumo and Noda 1967.
    """

    eps: float = 0.0

    linear = True
    is_potential = False

    def __post_init__(self) -> None:
        require(0 <= self.eps < math.inf, self, f"eps must be finite and >= 0, got {self.eps}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        k = context.signal.get("k")
        if not isinstance(k, Tensor):
            raise IllegalUpdate("KeyNormalised divides by the key: put it on a filter of an update with keys")
        square = self.eps + wide(k).square().sum(-1)[..., None, None]
        live = square > 0
        return torch.where(live, theta / torch.where(live, square, 1.0), 0.0).to(theta.dtype)


_LONG: dict[Side, tuple[bool, bool]] = {
    "each-row": (True, False),
    "each-column": (False, True),
    "entries": (True, True),
}


def require_sides(owner: Geometry, theta: Tensor, stats: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The values of an owner's statistics of rows, columns or entries of theta (..., m, n), at least in float32."""
    who = type(owner).__name__
    if len(stats) != len(owner.sides):
        raise IllegalUpdate(f"{who}: {len(owner.sides)} statistic(s) declared, {len(stats)} supplied")
    for stat, side in zip(stats, owner.sides, strict=True):
        shape = tuple(n if long else 1 for n, long in zip(theta.shape[-2:], _LONG[side], strict=True))
        if tuple(stat.shape[-2:]) != shape:
            raise ShapeError(
                f"{who}: a statistic of theta {tuple(theta.shape[-2:])} must be {shape} here, got "
                f"{tuple(stat.shape[-2:])}"
            )
    return tuple(wide(stat) for stat in stats)


def require_of(owner: Geometry, statistic: Any, allowed: tuple[str, ...]) -> None:
    """IllegalUpdate unless a statistic is of one of these quantities."""
    of = getattr(getattr(statistic, "cost", None), "of", None)
    require(of in allowed, owner, f"takes a statistic of {' or '.join(allowed)}, got {statistic!r}")
