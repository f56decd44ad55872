"""How parameters and states are stored between steps: options of the rules that act entry by entry.

    master    "32bit": float32 weights as the bfloat16 parameter and 16 more bits in its state, exactly;
              "24bit": the same with 8 more bits, rounded
    moments   "8bit": filters and statistics in blocks of 256 entries with one float32 unit each
    rounding  "stochastic": a bfloat16 parameter, or its 24-bit master, is rounded at random and without bias

All arithmetic stays float32. A stored form describes itself: the state has the parameter's further bits under
`parameter.low` and the units of `via.0.theta` under `via.0.theta.unit`, so a state dict is what the optimizer holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine import trees
from axes.optim.engine.capabilities import parts_of
from axes.optim.engine.together import program
from axes.programs.program import PARAMETER

Master = Literal["32bit", "24bit"]
Moments = Literal["8bit"]
Rounding = Literal["nearest", "stochastic"]
DEFAULTS: dict[str, Any] = {"master": None, "moments": None, "rounding": "nearest", "seed": 0}
_MASTER = {"32bit": "split-16", "24bit": "split-8"}


@final
@dataclass(frozen=True)
class Precision:
    """The storage options of a parameter group."""

    master: Master | None = None
    moments: Moments | None = None
    rounding: Rounding = "nearest"
    seed: int = 0

    @staticmethod
    def of(group: Mapping[str, Any]) -> Precision:
        return Precision(*(group.get(name, default) for name, default in DEFAULTS.items()))

    @property
    def plain(self) -> bool:
        return self.master is None and self.moments is None and self.rounding == "nearest"

    def require(self, who: str, update: StateUpdate) -> None:
        """AxesError unless the options make sense and the rule can be stored so."""
        allowed = {"master": (None, "32bit", "24bit"), "moments": (None, "8bit"), "rounding": ("nearest", "stochastic")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                shown = " or ".join(map(repr, values))
                raise AxesError(f"{who}: {name} must be {shown}, got {getattr(self, name)!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise AxesError(f"{who}: seed must be an integer in [0, 2^63), got {self.seed!r}")
        if self.plain:
            return
        given = next(n for n, x in DEFAULTS.items() if getattr(self, n) != x and n != "seed")
        found = program(update)
        if found is None:
            raise AxesError(
                f"{who}: {given}={getattr(self, given)!r} is for rules that act entry by entry, and this one mixes "
                "entries: give it to the groups of another rule"
            )
        if self.master == "32bit" and self.rounding == "stochastic":
            raise AxesError(f"{who}: nothing is rounded with master='32bit': leave out rounding='stochastic'")
        if trees.keeps_theta(update) and (self.master or self.rounding == "stochastic"):
            raise AxesError(f"{who}: the state of this rule holds exact weights already: leave out {given}=")
        if self.moments and any(part.parts().step.start == "W0" for part in parts_of(update)):
            raise AxesError(f"{who}: a filter of this rule holds weights, not moments: leave out moments=")

    def forms(self, who: str, update: StateUpdate, parameter: Tensor) -> dict[str, str]:
        """The form of everything that is not stored as it is: of the parameter and of its states, by name."""
        forms: dict[str, str] = {}
        if parameter.dtype == torch.float16 and (self.master or self.rounding == "stochastic"):
            raise AxesError(f"{who}: master and stochastic rounding are for bfloat16 parameters, not float16")
        if self.master and parameter.dtype == torch.bfloat16:
            forms[PARAMETER] = _MASTER[self.master]
        if self.moments:
            if parameter.dtype in (torch.float64, torch.complex128):
                raise AxesError(f"{who}: moments='8bit' is for parameters of at most float32, not {parameter.dtype}")
            found = program(update)
            assert found is not None
            shaped = [n for n, i in found.inputs.items() if found.operations[i].shaped]
            for name in shaped:
                if name.endswith(".theta"):
                    forms[name] = "root-8" if name in found.nonnegative else "signed-8"
        return forms

    def draws(self, parameter: Tensor) -> bool:
        """Whether storing this parameter takes random bits."""
        return self.rounding == "stochastic" and parameter.dtype == torch.bfloat16
