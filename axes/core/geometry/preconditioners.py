"""Roots and bases of Kronecker statistics, and the directions that are built from them.

A statistic is a state update, and its own h turns it into what is read: an inverse root (Shampoo) or an eigenbasis
(SOAP). Held between refreshes (`axes.core.algorithms.Held`), a step reads it by matrix products alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor

from axes.core.costs import Side
from axes.core.geometry.bregman import NO_CONTEXT, Context, Geometry, require, require_matrix, wide
from axes.core.geometry.spectral import inverse_power, over_root, usable
from axes.core.rates import Signal
from axes.errors import IllegalUpdate, ShapeError
from axes.linalg.blockwise import symmetric_sum
from axes.linalg.matrix_roots import (
    LEAST_DAMPING,
    PRECISIONS,
    Precision,
    add_product,
    eigenvectors,
    largest,
    newton_inverse_root,
    power_step,
    product,
)
from axes.programs.program import whole


def is_begun(matrix: Tensor) -> Tensor:
    """(..., 1, 1): whether a factor, semi-definite, is held, which begins as the zero matrix."""
    return (matrix.diagonal(dim1=-2, dim2=-1) != 0).any(-1)[..., None, None]


@final
@dataclass(frozen=True, repr=False)
class InverseRoot(Geometry):
    """W = (A + (eps + damping |A|) I)^{-power} of a statistic A, |A| = (sum of eigenvalues^8)^{1/8}.

    |A| lies between the largest eigenvalue and n^{1/8} times it. method: "eigh" decomposes A, and with eps and
    damping 0 gives the pseudo-power; "newton" takes matrix products alone, for a power 1, 1/2, 1/3, ..., and needs a
    damping above what its rounding does to small eigenvalues: 1e-7, 1e-4 with precision "bfloat16x3", 1e-2 with "tf32".
    A root that did not converge, or of an A that is not finite, is NaN.

    Source: Gupta et al. 2018, algorithm 1 (power 1/4); see `axes.linalg.matrix_roots.newton_inverse_root`.
    """

    power: float = 0.25
    eps: float = 0.0
    damping: float = 0.0
    method: Literal["eigh", "newton"] = "eigh"
    precision: Precision = "input"

    matrix = True
    makes = "root"
    is_potential = False

    def __post_init__(self) -> None:
        require(0 < self.power < math.inf, self, f"power must be positive and finite, got {self.power}")
        require(0 <= self.eps < math.inf, self, f"eps must be finite and >= 0, got {self.eps}")
        require(0 <= self.damping < 1, self, f"damping must lie in [0, 1), got {self.damping}")
        require(self.method in ("eigh", "newton"), self, f"method {self.method!r} is not one of eigh, newton")
        require(self.precision in PRECISIONS, self, f"precision {self.precision!r} is not one of {PRECISIONS}")
        if self.method == "eigh":
            require(self.precision == "input", self, "precision is of products: leave it at 'input' with method 'eigh'")
            return
        order = 1 / self.power
        whole = round(order) >= 1 and math.isclose(order, round(order), rel_tol=1e-12)
        require(whole, self, f"method 'newton' takes powers 1, 1/2, 1/3, ..., got {self.power}: take 'eigh'")
        least = LEAST_DAMPING[self.precision]
        message = f"method 'newton' with precision {self.precision!r} needs damping >= {least:g}, got {self.damping}"
        require(self.damping >= least, self, message)

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        require_matrix(self, theta, square=True)
        a = wide(theta)
        if self.method == "newton":
            root = newton_inverse_root(a, round(1 / self.power), self.damping, self.eps, self.precision)
            return root.to(theta.dtype)
        if self.damping:
            a = a + self.damping * largest(a) * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        return inverse_power(a, self.power, self.eps).to(theta.dtype)


@final
@dataclass(frozen=True, repr=False)
class Eigenbasis(Geometry):
    """The orthonormal eigenvectors of a statistic, as columns; a constant in derivatives.

    method: "eigh" decomposes it (ascending eigenvalues); "power-qr" moves the basis held so far by one step of
    orthogonal iteration, and begins with "eigh". qr, of that step: "cholesky" is made of matrix products,
    "householder" is torch.linalg.qr. A basis that is not orthonormal, or of a statistic that is not finite, is NaN.

    Of a null space it is a fixed basis, where rounding would choose one: `axes.linalg.matrix_roots.eigenvectors`.

    Source: Vyas et al. 2024, algorithm 4 (power-qr); see `axes.linalg.matrix_roots.power_step` for what differs.
    """

    method: Literal["eigh", "power-qr"] = "eigh"
    qr: Literal["cholesky", "householder"] = "cholesky"
    precision: Precision = "input"

    matrix = True
    makes = "basis"
    scale_free = True
    is_potential = False

    def __post_init__(self) -> None:
        require(self.method in ("eigh", "power-qr"), self, f"method {self.method!r} is not one of eigh, power-qr")
        require(self.qr in ("cholesky", "householder"), self, f"qr {self.qr!r} is not one of cholesky, householder")
        require(self.precision in PRECISIONS, self, f"precision {self.precision!r} is not one of {PRECISIONS}")
        if self.method == "eigh":
            require(self.qr == "cholesky", self, "qr has no effect with method 'eigh': leave it at 'cholesky'")
            require(self.precision == "input", self, "precision has no effect with method 'eigh': leave it at 'input'")

    @property
    def continues(self) -> bool:  # type: ignore[override]
        return self.method == "power-qr"

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        require_matrix(self, theta, square=True)
        a = wide(theta.detach())
        last = context.weights if self.method == "power-qr" else None
        if last is not None and self.qr == "cholesky":
            return power_step(a, wide(last.detach()), self.qr, self.precision).to(theta.dtype)
        a, finite = usable(a)
        if last is not None:
            basis = power_step(a, wide(last.detach()), self.qr, self.precision)
        else:
            basis = eigenvectors(a)
        return torch.where(finite, basis, torch.nan).to(theta.dtype)


@final
@dataclass(frozen=True, repr=False)
class FittedFactor(Geometry):
    """A factor P that is fitted until what it whitens is white: P = (I - r E) P (I - r E), E = A + damping P^2 - I.

    A is a statistic of whitened drives ("white-left" or "white-right"), whose mean is I where P is right. r is
    rate / (2 (1 + b)) with an estimate b of the largest eigenvalue of A + damping P^2; P stays symmetric and positive.
    It begins as the multiple of I that is right for drives of one variance, which is their variance^{-power}: 1/4 where
    another factor takes its half, 1/2 alone. No eigenvalue grows beyond damping^{-1/2}.

    Source: the whitening criterion of Li 2015 with the Kronecker factors of Li 2018, section 4. Differs: symmetric
    factors and a congruence, which needs products only, in the place of triangular ones and solves; the damping bounds
    the factors, where noise on the drives would.
    """

    rate: float = 0.1
    damping: float = 1e-9
    precision: Precision = "input"
    power: float = 0.25

    matrix = True
    makes = "root"
    continues = True
    fitted = True
    is_potential = False

    def __post_init__(self) -> None:
        require(0 < self.rate <= 1, self, f"rate must lie in (0, 1], got {self.rate}")
        require(0 < self.damping < math.inf, self, f"damping must be positive and finite, got {self.damping}")
        require(0 < self.power < math.inf, self, f"power must be positive and finite, got {self.power}")
        require(self.precision in PRECISIONS, self, f"precision {self.precision!r} is not one of {PRECISIONS}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        value, good = self.moved(theta, context.weights)
        return torch.where(good, value, torch.nan)

    def refreshed(self, theta: Tensor, held: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        return self.moved(theta, context.weights)

    def moved(self, theta: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
        """P after the statistic `theta`, and whether (..., 1, 1) it could be computed: where not, it is the last one.

        last: P so far, 0 where there is none; None where there is none at all.
        """
        require_matrix(self, theta, square=True)
        a = wide(theta).reshape(-1, *theta.shape[-2:])
        n, p = a.shape[-1], None if last is None else wide(last).reshape(a.shape)
        # no entry of a semi-definite matrix is larger than all of its diagonal: these bound what a step computes
        trace = most = a.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        if p is not None:
            size = p.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
            most = torch.addcmul(trace, size, size, value=(1 + self.damping) * (16 * n) ** 2)
        finite = most < (math.inf if self.precision == "input" else torch.finfo(torch.float32).max)
        begin = finite & (trace > 0)
        start = torch.where(begin, trace / n, math.inf) ** -self.power
        if p is None:
            value, good = torch.diag_embed(start.expand(-1, n)), begin
        else:
            begun = is_begun(p)[..., 0]
            good = torch.where(begun, finite, begin)
            value = self._congruent(a, p, finite[..., None])
            if self.precision != "input" and a.dtype == torch.float64:  # P may be beyond what its products can hold
                value = torch.where(finite[..., None], value, p)
            value.diagonal(dim1=-2, dim2=-1).add_(torch.where(begun, 0.0, start))
        return value.reshape(theta.shape).to(theta.dtype), good.reshape(*theta.shape[:-2], 1, 1)

    def _congruent(self, a: Tensor, p: Tensor, finite: Tensor) -> Tensor:
        """(I - r E) P (I - r E) of (N, n, n), P itself where A is not finite.

        In terms of E + I, half of it is (1 + r) P - r (E + I) P; and P is symmetric in all bits.
        """
        seen = symmetric_sum(a, p, keep=finite.to(a.dtype), rate=self.damping, precision=self.precision)  # E + I
        rate = torch.where(finite, self.rate / 2 / (1 + _top(seen)), 0.0)
        half = torch.lerp(p, product(seen, p.mT, self.precision), -rate)
        return symmetric_sum(half, half, seen, 1 + rate, -rate, self.precision, exact=True)


def _top(matrix: Tensor) -> Tensor:
    """An estimate (N, 1, 1) from below of the largest eigenvalue of a semi-definite matrix: two power iterations."""
    largest_entry, row = matrix.diagonal(dim1=-2, dim2=-1)[:, None].max(-1, keepdim=True)
    x = matrix.gather(-2, row.expand(-1, -1, matrix.shape[-1]))
    for _ in range(2):
        x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) @ matrix
    # it is the larger one, but for norms that overflow
    return torch.maximum(torch.linalg.vector_norm(x, dim=-1, keepdim=True), largest_entry)


On = Literal["both", "rows", "columns"]
_ON: dict[str, tuple[Side, ...]] = {"both": ("rows", "columns"), "rows": ("rows",), "columns": ("columns",)}


def _pair(on: On, factors: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    """The factors of the rows and of the columns, None where there is none."""
    return (factors[0] if on != "columns" else None, factors[-1] if on != "rows" else None)


@final
@dataclass(frozen=True)
class Between:
    """A x B with the factors of both sides or of one, each as it is or transposed: linear in x.

    who: whose factors they are, in messages; the same products for another are the same function.
    """

    on: On
    precision: Precision = "input"
    turned: tuple[bool, bool] = (False, False)
    who: str = field(default="Linear", compare=False, repr=False)

    def __call__(self, x: Tensor, *factors: Tensor) -> Tensor:
        left, right = self._factors(x, factors)
        made = wide(x) if left is None else product(wide(left), wide(x), self.precision)
        return (made if right is None else product(made, wide(right), self.precision)).to(x.dtype)

    def into(self, out: Tensor, x: Tensor, *factors: Tensor) -> None:
        """The same of a stack (N, m, n), in the place of another, where all are of one dtype."""
        left, right = self._factors(x, factors)
        if right is None:
            assert left is not None
            add_product(out, left, x, 0.0, 1.0, self.precision)
            return
        add_product(out, x if left is None else product(left, x, self.precision), right, 0.0, 1.0, self.precision)

    def _factors(self, x: Tensor, factors: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        for side, factor in zip(_ON[self.on], factors, strict=True):
            size = x.shape[-2 if side == "rows" else -1]
            if factor.shape[-2:] != (size, size):
                raise ShapeError(
                    f"{self.who}: a factor of theta {tuple(x.shape[-2:])} must be ({size}, {size}), got "
                    f"{tuple(factor.shape[-2:])}"
                )
        pairs = zip(_pair(self.on, factors), self.turned, strict=True)
        left, right = (f.mT if f is not None and turned else f for f, turned in pairs)
        return left, right


def rotate(x: Tensor, left: Tensor | None, right: Tensor | None, precision: Precision, who: str = "Linear") -> Tensor:
    """Q_L^T x Q_R; None for a side that stays."""
    on: On = "columns" if left is None else "rows" if right is None else "both"
    return whole(Between(on, precision, (True, False), who), x, *(f for f in (left, right) if f is not None))


def fisher(signal: Signal, left: Tensor, right: Tensor, precision: Precision) -> Tensor:
    """The mean over examples of (Q_L^T e k^T Q_R)^2, entry by entry: second moments of their gradients."""
    e, k = (_rows(signal, name) for name in ("e", "k"))
    turned = (product(wide(x), q, precision).square() for x, q in ((e, left), (k, right)))
    errors, keys = turned
    return (product(errors.mT, keys, precision) / e.shape[-2]).to(left.dtype)


def _rows(signal: Signal, name: str) -> Tensor:
    """The vectors of this name, one example a row."""
    x = signal.get(f"{name}_rows")
    if isinstance(x, Tensor):
        return x
    x = signal[name]
    assert isinstance(x, Tensor)
    return x[..., None, :]


def _require_factors(owner: Geometry, theta: Tensor, stats: tuple[Tensor, ...]) -> None:
    """Raise unless there is a value for each of its sides, of a matrix."""
    if len(stats) != len(owner.sides):
        raise IllegalUpdate(f"{type(owner).__name__}: {len(owner.sides)} statistics declared, {len(stats)} supplied")
    require_matrix(owner, theta)


@final
@dataclass(frozen=True, repr=False)
class Kronecker(Geometry):
    """W = A theta B with the roots A and B that two statistics give: Whiten(kind="kronecker") with roots that are held.

    on: "both" sides, or "rows" (A theta) or "columns" (theta B), with one statistic.

    Source: Gupta et al. 2018, algorithm 1.
    """

    stats: tuple[Any, ...]
    precision: Precision = "input"
    on: On = "both"

    linear = True
    matrix = True
    takes = "root"

    @property
    def sides(self) -> tuple[Side, ...]:  # type: ignore[override]
        return _ON[self.on]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", tuple(self.stats))
        require(self.on in _ON, self, f"on={self.on!r} is not one of {', '.join(_ON)}")
        need = len(self.sides)
        require(len(self.stats) == need, self, f"takes {need} statistics with on={self.on!r}, got {len(self.stats)}")
        require(self.precision in PRECISIONS, self, f"precision {self.precision!r} is not one of {PRECISIONS}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        _require_factors(self, theta, context.stats)
        return whole(Between(self.on, self.precision, who="Kronecker"), theta, *context.stats)


@final
@dataclass(frozen=True, repr=False)
class RotatedWhiten(Geometry):
    """W = Q_L [(Q_L^T theta Q_R) / (v^power + eps)] Q_R^T with the bases Q of two statistics, v one of "eigen-square".

    0 where the denominator is 0. on: "both" sides, or "rows" or "columns": the other one stays as it is, there is one
    basis, and v is one of "eigen-square-left" or "eigen-square-right".

    Source: Vyas et al. 2024, algorithm 3; one-sided: section 4.
    """

    stats: tuple[Any, ...]
    power: float = 0.5
    eps: float = 1e-8
    precision: Precision = "input"
    on: On = "both"

    linear = True
    matrix = True
    takes = "basis"

    @property
    def sides(self) -> tuple[Side, ...]:  # type: ignore[override]
        second: dict[str, Side] = {"both": "eigen-entries", "rows": "eigen-rows", "columns": "eigen-columns"}
        return (*_ON[self.on], second[self.on])

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", tuple(self.stats))
        require(self.on in _ON, self, f"on={self.on!r} is not one of {', '.join(_ON)}")
        need = len(self.sides)
        require(len(self.stats) == need, self, f"takes {need} statistics with on={self.on!r}, got {len(self.stats)}")
        require(0 < self.power < math.inf, self, f"power must be positive and finite, got {self.power}")
        require(0 <= self.eps < math.inf, self, f"eps must be finite and >= 0, got {self.eps}")
        require(self.precision in PRECISIONS, self, f"precision {self.precision!r} is not one of {PRECISIONS}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        _require_factors(self, theta, context.stats)
        *bases, second = (wide(s) for s in context.stats)
        left, right = _pair(self.on, tuple(bases))
        scaled = self.whitened(rotate(wide(theta), left, right, self.precision, "RotatedWhiten"), second)
        back = Between(self.on, self.precision, (False, True), "RotatedWhiten")
        return whole(back, scaled, *bases).to(theta.dtype)

    def whitened(self, turned: Tensor, second: Tensor) -> Tensor:
        """What W is in the bases, from theta in them: theta / (v^power + eps)."""
        return over_root(turned, second, self.power, self.eps)
