"""Roots and bases of Kronecker statistics, and the directions that are built from them.

A statistic is a state update, and its own h turns it into what is read: an inverse root (Shampoo) or an eigenbasis
(SOAP). Held between refreshes (`axes.algorithms.Held`), a step reads it by matrix products alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from axes.bregman import NO_CONTEXT, Context, Geometry, require, require_matrix, wide
from axes.errors import IllegalUpdate, ShapeError
from axes.matrix_roots import (
    LEAST_DAMPING,
    PRECISIONS,
    Precision,
    largest,
    newton_inverse_root,
    power_step,
    product,
    symmetric_product,
)
from axes.rates import Signal
from axes.spectral import inverse_power, over_root


def is_begun(matrix: Tensor) -> Tensor:
    """(..., 1, 1): whether a value is held, which begins as the zero matrix."""
    return (matrix != 0).any(-1, keepdim=True).any(-2, keepdim=True)


def is_finite(matrix: Tensor) -> Tensor:
    """(..., 1, 1): whether every entry of a matrix is."""
    return matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)


def _usable(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix that a decomposition takes, and whether (..., 1, 1) it is the given one: the identity if not finite."""
    finite = is_finite(matrix)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.where(finite, matrix, eye), finite


@final
@dataclass(frozen=True, repr=False)
class InverseRoot(Geometry):
    """W = (A + (eps + damping |A|) I)^{-power} of a statistic A, |A| = (sum of eigenvalues^8)^{1/8}.

    |A| lies between the largest eigenvalue and n^{1/8} times it. method: "eigh" decomposes A, and with eps and
    damping 0 gives the pseudo-power; "newton" takes matrix products alone, for a power 1, 1/2, 1/3, ..., and needs a
    damping above what its rounding does to small eigenvalues: 1e-7, 1e-4 with precision "bfloat16x3", 1e-2 with "tf32".
    A root that did not converge, or of an A that is not finite, is NaN.

    Source: Gupta et al. 2018, algorithm 1 (power 1/4); see `axes.matrix_roots.newton_inverse_root`.
    """

    power: float = 0.25
    eps: float = 0.0
    damping: float = 0.0
    method: Literal["eigh", "newton"] = "eigh"
    precision: Precision = "input"

    matrix = True
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
        a, usable = _usable(a)
        if self.damping:
            a = a + self.damping * largest(a) * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        return torch.where(usable, inverse_power(a, self.power, self.eps), torch.nan).to(theta.dtype)


@final
@dataclass(frozen=True, repr=False)
class Eigenbasis(Geometry):
    """The orthonormal eigenvectors of a statistic, as columns; a constant in derivatives.

    method: "eigh" decomposes it (ascending eigenvalues); "power-qr" moves the basis held so far by one step of
    orthogonal iteration, and begins with "eigh". qr, of that step: "cholesky" is made of matrix products,
    "householder" is torch.linalg.qr. A basis that is not orthonormal, or of a statistic that is not finite, is NaN.

    Source: Vyas et al. 2024, algorithm 4 (power-qr); see `axes.matrix_roots.power_step` for what differs.
    """

    method: Literal["eigh", "power-qr"] = "eigh"
    qr: Literal["cholesky", "householder"] = "cholesky"
    precision: Precision = "input"

    matrix = True
    scale_free = True
    is_potential = False

    def __post_init__(self) -> None:
        require(self.method in ("eigh", "power-qr"), self, f"method {self.method!r} is not one of eigh, power-qr")
        require(self.qr in ("cholesky", "householder"), self, f"qr {self.qr!r} is not one of cholesky, householder")
        require(self.precision in PRECISIONS, self, f"precision {self.precision!r} is not one of {PRECISIONS}")
        if self.method == "eigh":
            require(self.qr == "cholesky", self, "qr has no effect with method 'eigh': leave it at 'cholesky'")
            require(self.precision == "input", self, "precision has no effect with method 'eigh': leave it at 'input'")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        require_matrix(self, theta, square=True)
        a, usable = _usable(wide(theta.detach()))
        if self.method == "power-qr" and context.weights is not None:
            last = wide(context.weights.detach())
            basis = power_step(a, last, self.qr, self.precision)
        else:
            basis = torch.linalg.eigh(a).eigenvectors
        return torch.where(usable, basis, torch.nan).to(theta.dtype)


@final
@dataclass(frozen=True, repr=False)
class FittedFactor(Geometry):
    """A factor P that is fitted until what it whitens is white: P = (I - r E) P (I - r E), E = A + damping P^2 - I.

    A is a statistic of whitened drives ("white-left" or "white-right"), whose mean is I where P is right. r is
    rate / (2 (1 + b)) with an estimate b of the largest eigenvalue of A + damping P^2; P stays symmetric and positive.
    It begins as the multiple of I that is right for drives of one variance, and no eigenvalue grows beyond
    damping^{-1/2}.

    Source: the whitening criterion of Li 2015 with the Kronecker factors of Li 2018, section 4. Differs: symmetric
    factors and a congruence, which needs products only, in the place of triangular ones and solves; the damping bounds
    the factors, where noise on the drives would.
    """

    rate: float = 0.1
    damping: float = 1e-9
    precision: Precision = "input"

    matrix = True
    is_potential = False

    def __post_init__(self) -> None:
        require(0 < self.rate <= 1, self, f"rate must lie in (0, 1], got {self.rate}")
        require(0 < self.damping < math.inf, self, f"damping must be positive and finite, got {self.damping}")
        require(self.precision in PRECISIONS, self, f"precision {self.precision!r} is not one of {PRECISIONS}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        require_matrix(self, theta, square=True)
        a = wide(theta)
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        power = a.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        begin = torch.where(power > 0, power, torch.nan) ** -0.25 * eye
        if context.weights is None:
            return begin.to(theta.dtype)
        last = wide(context.weights)
        error = a + self.damping * symmetric_product(last, None, self.precision)
        rate = self.rate / 2 / (1 + _top(error))
        error = error - eye
        moved = last - rate * product(error, last, self.precision)
        moved = moved - rate * product(moved, error, self.precision)
        return torch.where(is_begun(last), (moved + moved.mT) / 2, begin).to(theta.dtype)


def _top(matrix: Tensor) -> Tensor:
    """An estimate (..., 1, 1) from below of the largest eigenvalue of a semi-definite matrix: two power iterations."""
    row = matrix.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    x = matrix.gather(-2, row.expand(*row.shape[:-1], matrix.shape[-1]))
    for _ in range(2):
        x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) @ matrix
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def rotate(x: Tensor, left: Tensor, right: Tensor, precision: Precision) -> Tensor:
    """Q_L^T x Q_R."""
    turned = product(product(wide(left).mT, wide(x), precision), wide(right), precision)
    return turned.to(x.dtype)


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


def _require_factors(owner: Geometry, theta: Tensor, stats: tuple[Tensor, ...], count: int) -> None:
    """Raise unless there are `count` values, the first two square and of the sizes of theta (..., m, n)."""
    if len(stats) != count:
        raise IllegalUpdate(f"{type(owner).__name__}: {count} statistics declared, {len(stats)} supplied")
    require_matrix(owner, theta)
    for size, stat in zip(theta.shape[-2:], stats, strict=False):
        if stat.shape[-2:] != (size, size):
            raise ShapeError(
                f"{type(owner).__name__}: a factor of theta {tuple(theta.shape[-2:])} must be ({size}, {size}), got "
                f"{tuple(stat.shape[-2:])}"
            )


@final
@dataclass(frozen=True, repr=False)
class Kronecker(Geometry):
    """W = A theta B with the roots A and B that two statistics give: Whiten(kind="kronecker") with roots that are held.

    Source: Gupta et al. 2018, algorithm 1.
    """

    stats: tuple[Any, ...]
    precision: Precision = "input"

    linear = True
    matrix = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", tuple(self.stats))
        require(len(self.stats) == 2, self, f"takes 2 statistics, got {len(self.stats)}")
        require(self.precision in PRECISIONS, self, f"precision {self.precision!r} is not one of {PRECISIONS}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        _require_factors(self, theta, context.stats, 2)
        left, right = (wide(s) for s in context.stats)
        return product(product(left, wide(theta), self.precision), right, self.precision).to(theta.dtype)


@final
@dataclass(frozen=True, repr=False)
class RotatedWhiten(Geometry):
    """W = Q_L [(Q_L^T theta Q_R) / (v^power + eps)] Q_R^T with the bases Q of two statistics, v one of "eigen-square".

    0 where the denominator is 0.

    Source: Vyas et al. 2024, algorithm 3.
    """

    stats: tuple[Any, ...]
    power: float = 0.5
    eps: float = 1e-8
    precision: Precision = "input"

    linear = True
    matrix = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", tuple(self.stats))
        require(len(self.stats) == 3, self, f"takes 3 statistics, got {len(self.stats)}")
        require(0 < self.power < math.inf, self, f"power must be positive and finite, got {self.power}")
        require(0 <= self.eps < math.inf, self, f"eps must be finite and >= 0, got {self.eps}")
        require(self.precision in PRECISIONS, self, f"precision {self.precision!r} is not one of {PRECISIONS}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        _require_factors(self, theta, context.stats, 3)
        left, right, second = (wide(s) for s in context.stats)
        scaled = over_root(rotate(wide(theta), left, right, self.precision), second, self.power, self.eps)
        return product(product(left, scaled, self.precision), right.mT, self.precision).to(theta.dtype)
