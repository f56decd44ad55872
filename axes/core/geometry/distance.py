"""How far a solution is, as far as the drives so far can tell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from axes.core.geometry.bregman import NO_CONTEXT, Context, Geometry, require
from axes.core.geometry.normalised import require_of
from axes.core.rates import Per

DISTANCE = Per("distance")


@final
@dataclass(frozen=True, repr=False)
class Distance(Geometry):
    """Theta as it is; of two statistics the axis makes a bound from below of the distance to a solution, `DISTANCE`.

    The statistics are s of the "drive" and r of its "travel" from where the filter holds that the weights began:

        estimate = coefficient (sum of r) / (sum of |s|_1),   most = max(most, estimate),   d = min(most, growth d)

    Sums run over all leaves, d and most begin at `start`, and the first d beyond it is the estimate whatever growth is.
    The next datum has d as its rate. It stands on a filter that holds where the weights began, Step(0.0, start="W0").

    Source: Mishchenko and Defazio 2024, section 5, after Defazio and Mishchenko 2023; coefficient and growth are of
    their code.
    """

    stats: tuple[Any, ...]
    start: float = 1e-6
    coefficient: float = 1.0
    growth: float = math.inf

    linear = True
    is_potential = False
    entrywise = True
    reads = frozenset({"weights"})
    sides = ("entries", "number")
    tells = DISTANCE

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", tuple(self.stats))
        require(len(self.stats) == 2, self, f"two statistics, of the drive and of its travel, got {len(self.stats)}")
        require_of(self, self.stats[0], ("drive",))
        require_of(self, self.stats[1], ("travel",))
        require(0 < self.start < math.inf, self, f"start must be positive and finite, got {self.start}")
        require(0 < self.coefficient < math.inf, self, f"coefficient must be positive, got {self.coefficient}")
        require(self.growth >= 1, self, f"growth must be at least 1, or inf for no limit, got {self.growth}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta

    def told(self, stats: tuple[Tensor, ...]) -> Tensor:
        path, travel = stats
        return torch.stack((travel.sum((-2, -1)), path.abs().sum((-2, -1))), -1)

    def number(self, told: Tensor, last: Tensor) -> Tensor:
        (travel, length), (d, most) = told.unbind(-1), last.unbind(-1)
        known = length > 0
        estimate = torch.where(known, self.coefficient * travel / torch.where(known, length, 1.0), 0.0)
        d = torch.where(most <= self.start, torch.maximum(d, estimate), d)
        most = torch.maximum(most, estimate)
        return torch.stack((torch.minimum(most, d * self.growth), most), -1)

    def began(self) -> tuple[float, ...]:
        return (self.start, self.start)
