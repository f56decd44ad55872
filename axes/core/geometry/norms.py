"""Separable and norm-like generating functions: Euclidean, entropic, l_q, soft threshold, bounded, hypentropic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
from torch import Tensor

from axes.core.geometry.bregman import (
    NO_CONTEXT,
    Context,
    EuclideanOn,
    Geometry,
    Slice,
    leaf_dims,
    require,
    require_matrix,
    wide,
)
from axes.core.rates import Per, Rate, Variable, rate_shape, resolve, spread
from axes.linalg.formulas import by_autograd, by_formula


@final
@dataclass(frozen=True, repr=False)
class Euclidean(EuclideanOn):
    """h = |W|^2 / 2 on the whole space: both links are the identity."""

    invertible = True
    is_identity = True
    linear = True
    entrywise = True

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta


@final
@dataclass(frozen=True, repr=False)
class Entropic(Geometry):
    """h = sum W log W on scaled simplices: W = mass * softmax(theta).

    axis: which entries share one mass: each "row" (along d_k), each "column" (along d_v), the "whole" matrix, or the
    "last" axis of a vector leaf. mass: the sum over such a slice; None is sqrt(n_in), n_in the length of the last axis.
    theta is defined up to a constant per slice, so gates must not vary inside one.

    Source: Miras, eq. 20-21 and 27 (Memora: whole matrix, mass 1). Differs: axis and mass are explicit; rows with
    mass sqrt(n_in) keep the output variance of a normalised memory.
    """

    axis: Literal["row", "column", "whole", "last"] = "row"
    mass: float | None = 1.0

    invertible = True

    def __post_init__(self) -> None:
        allowed = ("row", "column", "whole", "last")
        require(self.axis in allowed, self, f"axis {self.axis!r} is not one of {', '.join(allowed)}")
        ok = self.mass is None or 0 < self.mass < math.inf
        require(ok, self, f"mass must be positive or None (sqrt(n_in)), got {self.mass}")

    @property
    def matrix(self) -> bool:  # type: ignore[override]
        return self.axis != "last"

    @property
    def slice_axis(self) -> Slice:  # type: ignore[override]
        # Only a scalar gate is surely constant along a vector leaf.
        return "whole" if self.axis == "last" else self.axis

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if self.matrix:
            require_matrix(self, theta)
        if self.axis == "whole":
            weights = theta.flatten(-2).softmax(-1).reshape(theta.shape)
        else:
            weights = theta.softmax(-2 if self.axis == "column" else -1)
        mass = self._mass(theta)
        return weights if mass == 1.0 else weights * mass

    def primal_by_formula(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if self.axis not in ("row", "last") or not by_formula(theta):
            return self.primal(theta, context)
        return cast(Tensor, _Shares.apply(theta, self._mass(theta)))

    def dual(self, w: Tensor) -> Tensor:
        # An entry that underflowed to 0 keeps the smallest positive weight: its log and gradient stay finite.
        return w.clamp_min(torch.finfo(w.dtype).tiny).log()

    def potential(self, w: Tensor) -> Tensor:
        return (w * self.dual(w)).sum(self._leaf(w))

    def divergence(self, w: Tensor, other: Tensor) -> Tensor:
        # Generalised Kullback-Leibler: not negative even where rounding leaves the masses unequal.
        return (w * (self.dual(w) - self.dual(other)) - w + other).sum(self._leaf(w))

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        dims: dict[str, int | tuple[int, ...]] = {"row": -1, "last": -1, "column": -2, "whole": (-2, -1)}
        even = (w.sum(dims[self.axis], keepdim=True) - self._mass(w)).abs() <= tol
        return (even & (w >= -tol)).all(self._leaf(w))

    def _mass(self, leaf: Tensor) -> float:
        return math.sqrt(leaf.shape[-1]) if self.mass is None else self.mass

    def _leaf(self, leaf: Tensor) -> tuple[int, ...]:
        return leaf_dims(leaf) if self.matrix else (-1,)


@final
class _Shares(torch.autograd.Function):
    """W = mass softmax(x) along rows: what g asks of x is W g - W <W, g> / mass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mass: float) -> Tensor:
        w = x.softmax(-1) * mass
        ctx.mass = mass
        ctx.save_for_backward(x, w)
        return w

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, None]:
        x, w = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_autograd(lambda x: x.softmax(-1) * ctx.mass, (x,), (given,))[0], None
        found = w * given
        along = found.sum(-1, keepdim=True)
        return torch.addcmul(found, w, along, value=-1 / ctx.mass), None


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / m and m = max|x| over the leaf (1 for a zero leaf).

    m is held constant: it is used only where m f(x/m) = f(x) for every m, which makes all derivatives exact.
    """
    top = x.detach().abs().amax(leaf_dims(x), keepdim=True)
    top = torch.where(top > 0, top, torch.ones_like(top))
    return x / top, top


def _power(magnitude: Tensor, exponent: float) -> Tensor:
    """magnitude^exponent with value and gradient 0 at 0, whatever the exponent."""
    positive = magnitude > 0
    return torch.where(positive, torch.where(positive, magnitude, 1.0) ** exponent, 0.0)


def _norm_link(x: Tensor, p: float) -> Tensor:
    """Gradient of |x|_p^2 / 2: sign(x) |x|^{p-1} / |x|_p^{p-2}, homogeneous of degree 1, 0 at 0."""
    if p == 2:
        return x
    y, top = _scaled(wide(x))
    if p == 4:  # products have their derivatives at 0 without a guard, and cost a tenth of powers
        square = y * y
        below, whole = y * square, square * square
    else:
        below, whole = y.sign() * _power(y.abs(), p - 1), _power(y.abs(), p)
    total = whole.sum(leaf_dims(x), keepdim=True)
    total = torch.where(total > 0, total, torch.ones_like(total))
    return (below * (total ** ((2 - p) / p) * top)).to(x.dtype)


@final
class _Fourth(torch.autograd.Function):
    """`_norm_link` of p = 4, W = x^3 / |x|^2: what g asks of x is 3 x^2 g / |x|^2 - 2 x^3 <x^3, g> / |x|^6."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, top = _scaled(x)
        square = y * y
        below = y * square
        total = (square * square).sum(leaf_dims(x), keepdim=True)
        inverse = torch.where(total > 0, total, 1.0) ** -0.5
        ctx.save_for_backward(x, square, below, inverse)
        return below * (inverse * top)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor | None:
        x, square, below, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_autograd(lambda x: _norm_link(x, 4), (x,), (given,))[0]
        along = (below * given).sum(leaf_dims(x), keepdim=True)
        return torch.addcmul(square * given * (3 * inverse), below, -2 * inverse**3 * along)


@final
@dataclass(frozen=True, repr=False)
class Lq(Geometry):
    """h = |W|_s^2 / 2 with s = p/(p-1): W = sign(theta) |theta|^{p-1} / |theta|_p^{p-2}, norms over the leaf.

    p > 1 is the dual exponent (Moneta's "q = 4" is p = 4, which regularises the 4/3-norm); p = 2 is Euclidean.
    Where an entry is 0 the link has an infinite slope for p < 2 (its inverse for p > 2): the gradient there is 0.

    Source: Miras, eq. 24 and section 4.2.4. Differs: the printed link lost the factor |theta|^{p-2} (`LqLiteral`), and
    the constant 1/(q-1) of the printed regulariser belongs to the rate.
    """

    p: float = 4.0

    invertible = True

    def __post_init__(self) -> None:
        require(1 < self.p < math.inf, self, f"the dual exponent p must be finite and above 1, got {self.p}")

    @property
    def is_identity(self) -> bool:  # type: ignore[override]
        return self.p == 2

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.p == 2

    @property
    def entrywise(self) -> bool:  # type: ignore[override]
        return self.p == 2

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return _norm_link(theta, self.p)

    def primal_by_formula(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        by_hand = self.p == 4 and wide(theta) is theta and by_formula(theta)
        return cast(Tensor, _Fourth.apply(theta)) if by_hand else self.primal(theta, context)

    def dual(self, w: Tensor) -> Tensor:
        return _norm_link(w, self.p / (self.p - 1))

    def potential(self, w: Tensor) -> Tensor:
        # Euler: a function of degree 2 is half of <gradient, point>.
        return (w * self.dual(w)).sum(leaf_dims(w)) / 2


@final
@dataclass(frozen=True, repr=False)
class LqLiteral(Geometry):
    """The printed Moneta link W = theta / |theta|_p^{p-2}: an operator, not the gradient of any h (p = 2 apart).

    Homogeneous of degree 3 - p, so for p > 3 it shrinks what it should grow. The norm is floored at 1e-6, which makes
    W linear in theta below it.

    Source: Miras, eq. 24 as printed. Differs: the floor.
    """

    p: float = 4.0

    is_potential = False

    def __post_init__(self) -> None:
        require(1 < self.p < math.inf, self, f"the dual exponent p must be finite and above 1, got {self.p}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        y, top = _scaled(wide(theta))
        total = _power(y.abs(), self.p).sum(leaf_dims(theta), keepdim=True)
        norm = top * _power(total, 1 / self.p)
        return (wide(theta) / norm.clamp_min(1e-6) ** (self.p - 2)).to(theta.dtype)


@final
@dataclass(frozen=True, repr=False)
class SoftThreshold(EuclideanOn):
    """h = |W|^2 / 2 + threshold |W|_1: W = sign(theta) max(|theta| - threshold, 0).

    Lazy it is soft-threshold FTRL (what lies below the threshold survives in theta); agile it is ISTA, the prox of the
    penalty at every step: `dual` is the gradient of |W|^2 / 2 alone. threshold: number >= 0 or a positive `Per`.

    Source: Miras, eq. 22 (agile) and 23 (lazy, with the 1/2 that makes the printed formula its own argmin).
    """

    threshold: Rate

    entrywise = True
    approximates = True

    def __post_init__(self) -> None:
        if isinstance(self.threshold, Per):
            require(self.threshold.domain == "positive", self, f"{self.threshold!r} must have domain positive")
        elif not isinstance(self.threshold, Variable):
            ok = 0 <= self.threshold < math.inf
            require(ok, self, f"the threshold must be finite and >= 0, got {self.threshold}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta.sign() * (theta.abs() - self._threshold(context)).clamp_min(0)

    def subgradient(self, w: Tensor) -> Tensor:
        return w + self._threshold(NO_CONTEXT) * w.sign()

    def potential(self, w: Tensor) -> Tensor:
        return (w.square() / 2 + self._threshold(NO_CONTEXT) * w.abs()).sum(leaf_dims(w))

    def rates(self) -> tuple[Rate, ...]:
        return (self.threshold,)

    def neutral(self) -> dict[str, float]:
        return {self.threshold.name: 0.0} if isinstance(self.threshold, Per) else {}

    def _threshold(self, context: Context) -> Tensor | float:
        return spread(resolve(self.threshold, context.signal), rate_shape(self.threshold))


@final
@dataclass(frozen=True, repr=False)
class Shrink(EuclideanOn):
    """h = |W|^2 / (2 factor) on every row: W = factor theta.

    Lazy it is a scale of what is shown; agile it is the prox, at every step, of the penalty by which h exceeds
    |W|^2 / 2: a decay after the step that each row has for itself. factor: a number in (0, 1), or a positive `Per`.

    Source: the limit on attention logits of Kimi Team 2025, section 2.1, as a proximal step.
    """

    factor: Rate

    linear = True
    entrywise = True

    def __post_init__(self) -> None:
        if isinstance(self.factor, Per):
            ok = self.factor.domain == "positive" and self.factor.shape in ("scalar", "row", "square")
            require(ok, self, f"{self.factor!r} must be positive, of shape scalar, row or square")
        elif not isinstance(self.factor, Variable):
            require(0 < self.factor < 1, self, f"the factor must lie in (0, 1), got {self.factor}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta * self._factor(context)

    def subgradient(self, w: Tensor) -> Tensor:
        return w / self._factor(NO_CONTEXT)

    def potential(self, w: Tensor) -> Tensor:
        return (w.square() / self._factor(NO_CONTEXT)).sum(leaf_dims(w)) / 2

    def rates(self) -> tuple[Rate, ...]:
        return (self.factor,)

    def neutral(self) -> dict[str, float]:
        return {self.factor.name: 1.0} if isinstance(self.factor, Per) else {}

    def _factor(self, context: Context) -> Tensor | float:
        return spread(resolve(self.factor, context.signal), rate_shape(self.factor))


@final
@dataclass(frozen=True, repr=False)
class Bounded(Geometry):
    """h = sum W log W + (1 - W) log(1 - W) on the unit cube: W = sigmoid(theta), theta = logit(W).

    Source: Miras, section 4.2.5. Differs: keep theta as the state, since in float32 a saturated W has no finite logit;
    `dual` clamps W one rounding unit inside the cube.
    """

    invertible = True
    entrywise = True

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta.sigmoid()

    def dual(self, w: Tensor) -> Tensor:
        limits = torch.finfo(w.dtype)
        return w.clamp_min(limits.tiny).log() - (-w.clamp_max(1 - limits.eps)).log1p()

    def potential(self, w: Tensor) -> Tensor:
        tiny = torch.finfo(w.dtype).tiny
        rest = 1 - w
        return (w * w.clamp_min(tiny).log() + rest * rest.clamp_min(tiny).log()).sum(leaf_dims(w))

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        return ((w >= -tol) & (w <= 1 + tol)).all(leaf_dims(w))


@final
@dataclass(frozen=True, repr=False)
class Hypentropy(Geometry):
    """h = sum W asinh(W / scale) - sqrt(W^2 + scale^2): W = scale sinh(theta), theta = asinh(W / scale).

    Mirror descent is exponentiated gradient on signed weights: scale/2 (e^theta - e^-theta) with both halves
    multiplicative. Large weights move in proportion to their size, weights below scale as under gradient descent.

    Source: Ghai, Hazan and Singer 2020, definition 1 (their beta is our scale).
    """

    scale: float = 1.0

    invertible = True
    entrywise = True

    def __post_init__(self) -> None:
        require(0 < self.scale < math.inf, self, f"scale must be positive and finite, got {self.scale}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        # beyond the largest number of the dtype W saturates instead of overflowing
        limit = math.log(torch.finfo(theta.dtype).max) - max(0.0, math.log(self.scale)) - 1
        return self.scale * theta.clamp(-limit, limit).sinh()

    def dual(self, w: Tensor) -> Tensor:
        return (w / self.scale).asinh()

    def potential(self, w: Tensor) -> Tensor:
        return (w * (w / self.scale).asinh() - (w * w + self.scale**2).sqrt()).sum(leaf_dims(w))

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        return w.isfinite().all(leaf_dims(w))
