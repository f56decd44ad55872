"""What a claim is, what its check may find, and which findings a verdict needs.

A claim is a row of `statements/` and a function of `checks/` that bears its id; `register` puts the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, final

import torch
from torch import Tensor

from axes.errors import AxesError


class Verdict(StrEnum):
    """The verdicts of the register."""

    EXACT = "exact"
    CONDITIONAL = "exact under conditions"
    APPROXIMATE = "approximate"
    STATISTICAL = "statistical"
    FALSE = "false as stated"
    UNTESTABLE = "not testable"


Role = Literal["holds", "breaks", "within"]


@final
@dataclass(frozen=True)
class Finding:
    """One measured number and the interval it must lie in.

    holds: an identity (or a correction) to rounding;  breaks: a statement that fails by at least a margin;
    within: a measured constant or exponent in its interval.
    """

    role: Role
    what: str
    measured: float
    low: float
    high: float

    @property
    def ok(self) -> bool:
        return self.low <= self.measured <= self.high  # false for NaN

    def __str__(self) -> str:
        bound = (
            f"<= {self.high:.3g}"
            if self.role == "holds"
            else f">= {self.low:.3g}"
            if self.role == "breaks"
            else f"in [{self.low:.4g}, {self.high:.4g}]"
        )
        return f"{self.what}: {self.measured:.3g} ({bound})"


def holds(what: str, error: Tensor | float, tolerance: float = 1e-10) -> Finding:
    """An identity holds: the error is at most `tolerance`."""
    return Finding("holds", what, _number(error), 0.0, tolerance)


def breaks(what: str, gap: Tensor | float, margin: float) -> Finding:
    """A statement fails: it is off by at least `margin`."""
    return Finding("breaks", what, _number(gap), margin, float("inf"))


def within(what: str, value: Tensor | float, low: float, high: float) -> Finding:
    """A measured constant lies in [low, high]."""
    return Finding("within", what, _number(value), low, high)


def agree(what: str, a: Tensor | float, b: Tensor | float, tolerance: float) -> Finding:
    """Two sides of an identity are the same, entry by entry, to `tolerance`."""
    return holds(what, gap(a, b), tolerance)


def differ(what: str, a: Tensor | float, b: Tensor | float, margin: float) -> Finding:
    """Two things that a statement takes for the same differ in some entry by at least `margin`."""
    return breaks(what, gap(a, b), margin)


def _number(value: Tensor | float) -> float:
    return float(value.detach().abs().max() if isinstance(value, Tensor) and value.numel() != 1 else value)


def gap(a: Tensor | float, b: Tensor | float) -> float:
    """The largest absolute difference; infinite if the shapes do not even agree."""
    x, y = (z.detach() if isinstance(z, Tensor) else torch.tensor(z, dtype=torch.float64) for z in (a, b))
    return float((x - y).abs().max()) if x.shape == y.shape else float("inf")


@final
class Draw:
    """Seeded float64 inputs for a check; the same seed draws the same inputs on every machine of a kind."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def unit(self, *shape: int) -> Tensor:
        """Vectors of length one in the last dimension."""
        x = self.normal(*shape)
        return x / x.norm(dim=-1, keepdim=True)

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def orthogonal(self, n: int) -> Tensor:
        """A Haar-distributed orthogonal matrix."""
        q, r = torch.linalg.qr(self.normal(n, n))
        return q * torch.sign(torch.diagonal(r))

    def conditioned(self, n: int, d: int, low: float = 0.6, high: float = 1.4) -> Tensor:
        """A matrix (n, d) with singular values in [low, high]."""
        r = min(n, d)
        return (self.orthogonal(n)[:, :r] * self.uniform(r, low=low, high=high)) @ self.orthogonal(d)[:r]

    def positive_definite(self, n: int, floor: float = 0.1) -> Tensor:
        a = self.normal(n, n)
        return a @ a.mT / n + floor * torch.eye(n, dtype=torch.float64)


Findings = Iterator[Finding]
Check = Callable[[Draw], Iterable[Finding]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """The check of the claim whose id is the function's name: it yields findings for one draw."""
    name, before = function.__name__, CHECKS.get(function.__name__)
    if before is not None and before.__module__ != function.__module__:
        raise AxesError(f"claim {name} has two checks: in {before.__module__} and in {function.__module__}")
    CHECKS[name] = function
    return function


@final
@dataclass(frozen=True)
class Source:
    """Where a claim is made: author, title, section or equation."""

    author: str
    title: str
    place: str

    def __str__(self) -> str:
        return f"{self.author}, “{self.title}”, {self.place}"


@final
@dataclass(frozen=True)
class Claim:
    """One claim of the literature.

    instance: the public instance or part that one side of the check runs through, or "none: <reason>".
    correction: what is true instead, for a refuted claim.  kind: MATH, OVER, NOTN or LABEL for refuted ones.
    derivation: why, in a few lines.  reason: why an untestable one is untestable.  seeds: draws of a full run.
    figure: name of the report's figure that shows it, or "".
    """

    id: str
    statement: str
    verdict: Verdict
    source: Source
    instance: str
    conditions: str = ""
    correction: str = ""
    kind: str = ""
    derivation: str = ""
    reason: str = ""
    seeds: int = 3
    figure: str = ""
    check: Check | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.verdict is Verdict.UNTESTABLE:
            if not self.reason or self.check is not None:
                raise AxesError(f"claim {self.id}: an untestable claim has a reason and no check")
        elif self.check is None:
            raise AxesError(
                f"claim {self.id}: a testable claim needs a check, a function {self.id} under @check in "
                f"checks/{self.group.lower()}_*.py; or the verdict {str(Verdict.UNTESTABLE)!r} and a reason"
            )
        elif self.reason:
            raise AxesError(f"claim {self.id}: only an untestable claim has a reason, this one has a check")
        if self.verdict is Verdict.FALSE and (
            not self.correction or self.kind not in ("MATH", "OVER", "NOTN", "LABEL")
        ):
            raise AxesError(f"claim {self.id}: a refuted claim says its kind and what is true instead")
        if self.verdict is Verdict.CONDITIONAL and not self.conditions:
            raise AxesError(f"claim {self.id}: say the conditions")

    @property
    def group(self) -> str:
        return self.id[0]


_NEEDS: dict[Verdict, tuple[Role, ...]] = {
    Verdict.EXACT: ("holds",),
    Verdict.CONDITIONAL: ("holds", "breaks"),
    Verdict.FALSE: ("breaks", "holds"),
    Verdict.APPROXIMATE: ("within",),
    Verdict.STATISTICAL: ("within",),
    Verdict.UNTESTABLE: (),
}


@final
@dataclass(frozen=True)
class Result:
    """What a claim's check found over several draws."""

    claim: Claim
    findings: tuple[Finding, ...]
    seconds: float = 0.0
    error: str = ""

    @property
    def ok(self) -> bool:
        """The verdict still holds: every finding is in its interval, and every kind of finding it needs is there."""
        roles = {f.role for f in self.findings}
        return not self.error and all(f.ok for f in self.findings) and roles.issuperset(_NEEDS[self.claim.verdict])

    @property
    def worst(self) -> Finding | None:
        """The finding that decides: a failing one, or the first."""
        failing = [f for f in self.findings if not f.ok]
        return (failing or list(self.findings) or [None])[0]  # type: ignore[list-item]
