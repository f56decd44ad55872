"""Directions divided by what their rows or their keys are long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from axes.core.geometry.bregman import NO_CONTEXT, Context, Geometry, leaf_size, require, require_matrix, wide
from axes.errors import IllegalUpdate, ShapeError


@final
@dataclass(frozen=True, repr=False)
class RowWhiten(Geometry):
    """Rows divided by the root of their mean second moment, then the whole rescaled to the norm it had.

    W = theta' |theta| / |theta'|,  theta'_i = theta_i / (sqrt(mean_j v_ij) + eps), with a statistic v like theta. On a
    memoryless filter behind Muon's it is NorMuon.

    Source: Li et al. 2025 (NorMuon), algorithm 1. Differs: the norm is kept, as in the authors' code, where the text
    sets it to 0.2 sqrt(m n); v is kept entry by entry, whose row means are what the paper keeps.
    """

    stats: tuple[Any, ...]
    eps: float = 1e-10

    matrix = True
    is_potential = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", tuple(self.stats))
        require(len(self.stats) == 1, self, f"one statistic, got {len(self.stats)}")
        require_entries(self, self.stats[0], ("drive", "square"))
        step = self.stats[0].parts().step
        require(step.rate == 1.0 and not step.debias, self, "factors of v cancel: leave its rate at 1 and debias off")
        require(0 < self.eps < math.inf, self, f"eps must be positive and finite, got {self.eps}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        require_matrix(self, theta)
        if len(context.stats) != 1:
            raise IllegalUpdate(f"RowWhiten: one statistic declared, {len(context.stats)} supplied")
        if context.stats[0].shape[-2:] != theta.shape[-2:]:
            shapes = tuple(theta.shape[-2:]), tuple(context.stats[0].shape[-2:])
            raise ShapeError(f"RowWhiten: the statistic of theta {shapes[0]} must have its shape, got {shapes[1]}")
        second = wide(context.stats[0]).mean(-1, keepdim=True)
        root = torch.where(second > 0, torch.where(second > 0, second, 1.0).sqrt(), 0.0)
        rows = wide(theta) / (root + self.eps)
        return (rows * (leaf_size(theta) / (leaf_size(rows) + self.eps))).to(theta.dtype)


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


def require_entries(owner: Geometry, statistic: Any, allowed: tuple[str, ...]) -> None:
    """IllegalUpdate unless a statistic has an entry for every entry of the drive."""
    of = getattr(getattr(statistic, "cost", None), "of", None)
    require(of in allowed, owner, f"takes a statistic of {' or '.join(allowed)}, got {statistic!r}")
