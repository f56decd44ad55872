"""Algorithms: how the argmin is approached. Data only; `StateUpdate` executes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

from axes.core.declared import Declared, Recurrence
from axes.core.rates import Per, Rate, Variable
from axes.errors import IllegalUpdate

__all__ = [
    "Anchor",
    "Held",
    "Mix",
    "Momentum",
    "Read",
    "Step",
    "Sum",
]

At = Literal["prev", "gated", "read", "new"]


@final
@dataclass(frozen=True, repr=False)
class Anchor(Declared):
    """The gradient at the state as it stood at the last multiple of `every` data (mini-batch, frozen chunk)."""

    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise IllegalUpdate(f"Anchor: every must be at least 1, got {self.every}")


@final
@dataclass(frozen=True, repr=False)
class Held(Declared):
    """A statistic's value is computed at data 1, 1 + every, 1 + 2 every, ... and kept in between (a root, a basis).

    datum: whether a refresh has "included" the datum at which it happens, or "excluded" it (the first one must be
    included: there is nothing else). A value that is not finite is not taken: the last good one stays, zero if there
    was none, and it is counted.
    """

    every: int
    datum: Literal["included", "excluded"] = "included"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise IllegalUpdate(f"Held: every must be at least 1, got {self.every}")
        if self.datum not in ("included", "excluded"):
            raise IllegalUpdate(f"Held: datum {self.datum!r} is not included or excluded")

    def before(self, count: int) -> bool:
        """Whether the value is computed before datum `count` (from 0)."""
        return self.datum == "excluded" and count > 1 and (count - 1) % self.every == 0

    def after(self, count: int) -> bool:
        """Whether the value is computed after datum `count` (from 0) was added."""
        return count == 0 or self.datum == "included" and count % self.every == 0


@final
@dataclass(frozen=True, repr=False)
class Read(Declared):
    """The output is read at  gate * theta_{t-1} + rate * u_t  instead of theta_t (Nesterov, Lion, RWKV-6's bonus).

    Both are numbers, or linear rates of the datum: scalar, or one for every key entry or row.
    """

    gate: Rate
    rate: Rate

    def __post_init__(self) -> None:
        for field, rate in (("gate", self.gate), ("rate", self.rate)):
            known = ("scalar", "key", "row", "square")
            if isinstance(rate, Per) and (rate.domain == "unit" or rate.shape not in known):
                wanted = "a scalar, key, row or square rate, positive or real"
                raise IllegalUpdate(f"Read: {field} must be {wanted}, got {rate}: a read point is linear in it")


@final
@dataclass(frozen=True, repr=False)
class Mix(Declared):
    """The output is  weight * W_t + (1 - weight) * u_t, u behind the filters: between an average and its newest term
    (schedule-free; with weight 0 the average is kept and not shown), or between what h makes of a drive and the drive.
    """

    weight: Rate

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Variable) and not 0.0 <= self.weight < 1.0:
            raise IllegalUpdate(f"Mix: weight must lie in [0, 1), got {self.weight}")


@final
@dataclass(frozen=True, repr=False)
class Sum(Declared):
    """Filters side by side on the same drive, their outputs added with `weights` (two-EMA mixes)."""

    branches: tuple[Recurrence, ...]
    weights: tuple[Rate, ...]

    def __post_init__(self) -> None:
        if len(self.branches) != len(self.weights) or len(self.branches) < 2:
            raise IllegalUpdate("Sum: give at least two branches and one weight for each")


@final
@dataclass(frozen=True, repr=False)
class Momentum(Declared):
    """Sugar for a filter with constant retention: m = beta m + w g, w = 1 - beta for kind "ema", 1 for "sum".

    nesterov reads  g + beta m_t  (sum) or  (1 - beta) g + beta m_t  (ema); debias divides by the response to a unit
    drive; start="first" begins the buffer at the first drive. As `algorithm` it also carries the step's other fields.
    """

    beta: float
    kind: Literal["ema", "sum"]
    nesterov: bool = False
    debias: bool = False
    start: Literal["zero", "first"] = "zero"
    rate: Rate = 1.0
    at: At | Anchor = "prev"

    def __post_init__(self) -> None:
        if self.kind not in ("ema", "sum"):
            raise IllegalUpdate(f"Momentum: kind {self.kind!r} is not ema or sum (there is no default: they differ)")
        if not 0.0 <= self.beta < 1.0:
            raise IllegalUpdate(f"Momentum: beta must lie in [0, 1), got {self.beta}")


@final
@dataclass(frozen=True, repr=False)
class Step(Declared):
    """One gradient or proximal step per datum.

    rate: step size eta.  at: where the gradient is evaluated (prev, gated, read, new = implicit, or an Anchor); of a
    statistic, Held: when its value is computed.
    steps: gradient steps on the same datum.  lazy: theta is stored (dual averaging, pre-norm); else W is (mirror
    descent, post-norm).  via: filters between gradient and state, in order.  read: where the output is read.
    debias: divide the output by the response n to a unit drive, or by max(|n|, floor) where a floor > 0 is given.
    start: zero, first (theta_1 is the first drive), second (the first datum is for statistics alone: theta and its
    response stay, a filter puts out 0), W0 (a filter that starts at the outer weights: averages of weights), or the
    number > 0 that every entry of a filter or statistic starts at.  write: theta = A theta + rate u, the "sum", or the
    "max" of the two, entry by entry.
    writes: pairs of key and value that a datum brings, written one after another: the monoid acts before the first, the
    output is read after the last. k, v and the rates of step and cost have a dimension for them, ahead of their own.
    reads: queries that a datum brings, all of them read after its last write. q, and what is read, have a dimension for
    them, ahead of their own.
    feedback: of a filter whose h approximates what it holds: this share of what h used leaves the state once it was
    shown, and the error stays for the next datum. 1 keeps the error alone; 1 - mu is momentum of what was used.
    """

    rate: Rate = 1.0
    at: At | Anchor | Held = "prev"
    steps: int = 1
    lazy: bool = True
    via: tuple[Recurrence | Sum | Momentum, ...] = ()
    read: Read | Mix | None = None
    debias: bool = False
    start: Literal["zero", "first", "second", "W0"] | float = "zero"
    write: Literal["sum", "max"] = "sum"
    feedback: Rate = 0.0
    writes: int = 1
    floor: float = 0.0
    reads: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.feedback, Variable) and not 0.0 <= self.feedback <= 1.0:
            raise IllegalUpdate(f"Step: feedback is a share in [0, 1], got {self.feedback}")
        if isinstance(self.feedback, Per) and (self.feedback.shape != "scalar" or self.feedback.domain == "unit"):
            raise IllegalUpdate(f"Step: feedback must be a scalar rate, positive or real, got {self.feedback}")
        if isinstance(self.rate, Per) and self.rate.domain == "unit":
            # step sizes multiply the drive as they are; logs are for gates
            raise IllegalUpdate(f"Step: rate {self.rate.name!r} must be positive or real, not unit")
        if not isinstance(self.at, Anchor | Held) and self.at not in ("prev", "gated", "read", "new"):
            raise IllegalUpdate(f"Step: at={self.at!r} is not prev, gated, read, new, Anchor(b) or Held(b)")
        if not 0.0 <= self.floor < math.inf:
            raise IllegalUpdate(f"Step: floor must be finite and at least 0, got {self.floor}")
        if self.writes < 1:
            raise IllegalUpdate(f"Step: writes must be at least 1, got {self.writes}")
        if self.reads < 1:
            raise IllegalUpdate(f"Step: reads must be at least 1, got {self.reads}")
        if self.steps < 1:
            raise IllegalUpdate(f"Step: steps must be at least 1, got {self.steps}")
        named = ("zero", "first", "second", "W0")
        if not self.start > 0.0 if isinstance(self.start, float) else self.start not in named:
            raise IllegalUpdate(f"Step: start={self.start!r} is not zero, first, second, W0 or a number > 0")
        if self.write not in ("sum", "max"):
            raise IllegalUpdate(f"Step: write={self.write!r} is not sum or max")

    def rates(self) -> tuple[Rate, ...]:
        """Its own numbers and names: of the step, of the read point, of filters side by side."""
        look = self.read
        read = (look.gate, look.rate) if isinstance(look, Read) else () if look is None else (look.weight,)
        return (self.rate, self.feedback, *read, *(w for f in self.via if isinstance(f, Sum) for w in f.weights))
