"""Generating functions h and their links grad h*: where a state lives and how a dual vector becomes a point there.

Element-wise and vector geometries stand here; those that need the spectrum are in `axes.spectral`, roots and bases of
statistics in `axes.preconditioners`, those that turn free logits into mixing matrices in `axes.mixing`; the contract
itself is in `axes.bregman`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Self, final

import torch
from torch import Tensor

from axes.bregman import NO_CONTEXT, Context, EuclideanOn, Geometry, Slice, leaf_dims, require, require_matrix, wide
from axes.errors import IllegalUpdate, ShapeError
from axes.mixing import Birkhoff, Cayley
from axes.preconditioners import Eigenbasis, FittedFactor, InverseRoot, Kronecker, RotatedWhiten
from axes.rates import Per, Rate, rate_shape, resolve, spread
from axes.spectral import Spectral, Whiten

__all__ = [
    "Ball",
    "Birkhoff",
    "Bounded",
    "Cautious",
    "Cayley",
    "Composite",
    "ConstantNorm",
    "Context",
    "Eigenbasis",
    "Entropic",
    "Euclidean",
    "FittedFactor",
    "Hypentropy",
    "Geometry",
    "KeyNormalised",
    "Kronecker",
    "Graft",
    "InverseRoot",
    "Lq",
    "LqLiteral",
    "RotatedWhiten",
    "RowWhiten",
    "SignBall",
    "SoftThreshold",
    "Spectral",
    "Sphere",
    "TrustRatio",
    "Whiten",
]


@final
@dataclass(frozen=True, repr=False)
class Euclidean(EuclideanOn):
    """h = |W|^2 / 2 on the whole space: both links are the identity."""

    invertible = True
    is_identity = True
    linear = True

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
        ok = self.mass is None or (self.mass > 0 and math.isfinite(self.mass))
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
        return weights * self._mass(theta)

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
    total = _power(y.abs(), p).sum(leaf_dims(x), keepdim=True)
    total = torch.where(total > 0, total, torch.ones_like(total))
    return (y.sign() * _power(y.abs(), p - 1) * total ** ((2 - p) / p) * top).to(x.dtype)


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

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return _norm_link(theta, self.p)

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

    def __post_init__(self) -> None:
        if isinstance(self.threshold, Per):
            require(self.threshold.domain == "positive", self, f"{self.threshold!r} must have domain positive")
        else:
            ok = 0 <= self.threshold < math.inf
            require(ok, self, f"the threshold must be finite and >= 0, got {self.threshold}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta.sign() * (theta.abs() - self._threshold(context)).clamp_min(0)

    def subgradient(self, w: Tensor) -> Tensor:
        return w + self._threshold(NO_CONTEXT) * w.sign()

    def potential(self, w: Tensor) -> Tensor:
        return (w.square() / 2 + self._threshold(NO_CONTEXT) * w.abs()).sum(leaf_dims(w))

    def rates(self) -> tuple[Per, ...]:
        return (self.threshold,) if isinstance(self.threshold, Per) else ()

    def _threshold(self, context: Context) -> Tensor | float:
        return spread(resolve(self.threshold, context.signal), rate_shape(self.threshold))


@final
@dataclass(frozen=True, repr=False)
class Bounded(Geometry):
    """h = sum W log W + (1 - W) log(1 - W) on the unit cube: W = sigmoid(theta), theta = logit(W).

    Source: Miras, section 4.2.5. Differs: keep theta as the state, since in float32 a saturated W has no finite logit;
    `dual` clamps W one rounding unit inside the cube.
    """

    invertible = True

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


@final
@dataclass(frozen=True, repr=False)
class Sphere(EuclideanOn):
    """h = |W|^2 / 2 on spheres: W = radius * theta / |theta|, per row, per column (slot) or for the whole leaf.

    This is the nearest point of the sphere. radius None is sqrt(number of entries normalised together): RMSNorm.
    A zero row stays zero.

    Source: Lattice, eq. 14 (columns, agile) and eq. 8 (columns, lazy). Differs: divides by the true norm, with 1e-24
    added to its square.
    """

    axis: Literal["rows", "columns", "whole"] = "rows"
    radius: float | None = 1.0

    scale_free = True

    def __post_init__(self) -> None:
        ok = self.axis in ("rows", "columns", "whole")
        require(ok, self, f"axis {self.axis!r} is not one of rows, columns, whole")
        fits = self.radius is None or 0 < self.radius < math.inf
        require(fits, self, f"radius must be positive and finite, or None (sqrt of the entries), got {self.radius}")

    @property
    def matrix(self) -> bool:  # type: ignore[override]
        return self.axis == "columns"

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if self.matrix:
            require_matrix(self, theta)
        x = wide(theta)
        return (x * (self._radius(x) * (self._square(x) + 1e-24).rsqrt())).to(theta.dtype)

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        return ((self._square(wide(w)).sqrt() - self._radius(w)).abs() <= tol).all(leaf_dims(w))

    def _dims(self, x: Tensor) -> tuple[int, ...]:
        return leaf_dims(x) if self.axis == "whole" else (-2 if self.axis == "columns" else -1,)

    def _square(self, x: Tensor) -> Tensor:
        return x.square().sum(self._dims(x), keepdim=True)

    def _radius(self, x: Tensor) -> float:
        return math.sqrt(math.prod([x.shape[d] for d in self._dims(x)])) if self.radius is None else self.radius


@final
@dataclass(frozen=True, repr=False)
class SignBall(EuclideanOn):
    """The unit ball of the max norm: W = sign(theta) maximises <theta, W> over it; sign(0) = 0 is still a maximiser.

    On a filter it is signed descent (Lion); agile on a state it is the projection onto the corners.

    Source: Chen et al. 2023, algorithm 2 (Lion); as a linear minimisation oracle, W = grad h*(theta) for h the
    indicator of the ball.
    """

    scale_free = True

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta.sign()

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        return (w.abs() <= 1 + tol).all(leaf_dims(w))


@final
@dataclass(frozen=True, repr=False)
class Ball(EuclideanOn):
    """h = |W|^2 / 2 on a ball around 0: W = the nearest point of it to theta.

    norm: "euclidean" scales theta to at most `radius` over the leaf, "max" clamps every entry to [-radius, radius]. On
    a memoryless filter ahead of all others it is gradient clipping, parameter by parameter.

    Source: Pascanu, Mikolov and Bengio 2013, algorithm 1 (euclidean).
    """

    radius: float = 1.0
    norm: Literal["euclidean", "max"] = "euclidean"

    def __post_init__(self) -> None:
        require(0 < self.radius < math.inf, self, f"radius must be positive and finite, got {self.radius}")
        require(self.norm in ("euclidean", "max"), self, f"norm {self.norm!r} is not one of euclidean, max")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if self.norm == "max":
            return theta.clamp(-self.radius, self.radius)
        size = _size(theta)
        return (theta * (self.radius / size.clamp_min(self.radius))).to(theta.dtype)

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        size = w.abs().amax(leaf_dims(w)) if self.norm == "max" else wide(w).square().sum(leaf_dims(w)).sqrt()
        return size <= self.radius + tol


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
        _require_entries(self, self.stats[0], ("drive", "square"))
        step = self.stats[0].parts()[3]
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
        return (rows * (_size(theta) / (_size(rows) + self.eps))).to(theta.dtype)


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


def _require_entries(owner: Geometry, statistic: Any, allowed: tuple[str, ...]) -> None:
    """IllegalUpdate unless a statistic has an entry for every entry of the drive."""
    of = getattr(getattr(statistic, "cost", None), "of", None)
    require(of in allowed, owner, f"takes a statistic of {' or '.join(allowed)}, got {statistic!r}")


def _size(x: Tensor) -> Tensor:
    """Euclidean norm of a leaf, kept; 0 with gradient 0 at 0."""
    square = wide(x).square().sum(leaf_dims(x), keepdim=True)
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)


class _Wrapper(Geometry):
    """A link that rescales or masks another one; it reads the context, so it belongs on a filter, not on a state."""

    base: Geometry
    is_potential = False

    def __post_init__(self) -> None:
        require(isinstance(self.base, Geometry), self, f"base must be a geometry, got {self.base!r}")

    @property
    def stats(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.base.stats

    def with_stats(self, stats: tuple[Any, ...]) -> Self:
        return dataclasses.replace(self, base=self.base.with_stats(stats))  # type: ignore[type-var]

    @property
    def scale_free(self) -> bool:  # type: ignore[override]
        return self.base.scale_free

    @property
    def matrix(self) -> bool:  # type: ignore[override]
        return self.base.matrix

    @property
    def slice_axis(self) -> Slice | None:  # type: ignore[override]
        return self.base.slice_axis

    def rates(self) -> tuple[Per, ...]:
        return self.base.rates()


@final
@dataclass(frozen=True, repr=False)
class Cautious(_Wrapper):
    """Keeps the entries of a direction that agree in sign with the raw drive, and rescales what is left.

    variant: "count" multiplies by numel / (kept + 1), "mean" divides by max(kept / numel, 1e-3); the published code has
    used both. Needs `context.drive`.

    Source: Liang et al. 2024, algorithm 1 (Cautious optimizers).
    """

    base: Geometry
    variant: Literal["count", "mean"] = "count"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.variant in ("count", "mean"), self, f"variant {self.variant!r} is not one of count, mean")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if context.drive is None:
            raise IllegalUpdate("Cautious compares a direction with the raw drive: put it on a filter, not on a state")
        w = self.base.primal(theta, context)
        agree = (w * context.drive > 0).to(w.dtype)
        dims = leaf_dims(w)
        if self.variant == "mean":
            return w * (agree / agree.mean(dims, keepdim=True).clamp_min(1e-3))
        size = math.prod(w.shape[d] for d in dims)
        return w * (agree * (size / (agree.sum(dims, keepdim=True) + 1)))


@final
@dataclass(frozen=True, repr=False)
class TrustRatio(_Wrapper):
    """Rescales a direction to the norm of the weights: |W| / |direction|, layer by layer; 1 where either is 0.

    Needs `context.weights`.

    Source: You et al. 2020, algorithm 2 (LAMB) with phi = identity.
    """

    base: Geometry

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if context.weights is None:
            raise IllegalUpdate("TrustRatio compares a direction with the weights: put it on a filter, not on a state")
        w = self.base.primal(theta, context)
        have, need = (wide(x).square().sum(leaf_dims(x), keepdim=True) for x in (w, context.weights))
        both = (have > 0) & (need > 0)
        ratio = torch.where(both, need, 1.0).sqrt() / torch.where(both, have, 1.0).sqrt()
        return (w * ratio).to(w.dtype)


def _homogeneous(h: Geometry) -> bool:
    """Whether a positive factor of theta is a factor of primal(theta), or none."""
    return h.linear or h.scale_free or isinstance(h, Cautious | TrustRatio) and _homogeneous(h.base)


@final
@dataclass(frozen=True, repr=False)
class Graft(_Wrapper):
    """The direction of one rule with the norm of another: W = base(theta) |m| / |base(theta)| over a leaf.

    magnitude: the other rule, a filter on the same drive, whose output is m. It is kept as a statistic. 0 where
    base(theta) is 0.

    Source: Agarwal et al. 2020, algorithm 1 (layer-wise grafting).
    """

    base: Geometry
    magnitude: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_entries(self, self.magnitude, ("drive",))

    @property
    def stats(self) -> tuple[Any, ...]:  # type: ignore[override]
        return (*self.base.stats, self.magnitude)

    def with_stats(self, stats: tuple[Any, ...]) -> Graft:
        return Graft(self.base.with_stats(stats[:-1]), stats[-1])

    @property
    def scale_free(self) -> bool:  # type: ignore[override]
        return _homogeneous(self.base)

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if not context.stats:
            raise IllegalUpdate("Graft takes its norm from a statistic: put it on a filter of a state update")
        w = self.base.primal(theta, context._replace(stats=context.stats[:-1]))
        have = _size(w)
        ratio = torch.where(have > 0, _size(context.stats[-1]) / torch.where(have > 0, have, 1.0), 0.0)
        return (w * ratio).to(w.dtype)


@final
@dataclass(frozen=True, repr=False)
class ConstantNorm(_Wrapper):
    """The direction d for which W + rate d keeps the norm of W: a step of the sphere through W, turned to it.

    W + rate d = |W| y / |y|,  y = W / |W| + rate n,  n = base(theta) / |base(theta)|. d stays finite as the rate goes
    to 0, where it is n without its part along W. axis: one norm for the "whole" leaf or one for each of its "rows". A
    norm that is 0 leaves the base direction. rate must be the step size of the update. Needs `context.weights`.

    Source: Wen et al. 2025 (Hyperball) for "whole"; Kosson et al. 2024, algorithm 1, fixes rows and sets the angle by
    the decay instead.
    """

    base: Geometry
    rate: Rate = 1.0
    axis: Literal["whole", "rows"] = "whole"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.axis in ("whole", "rows"), self, f"axis {self.axis!r} is not one of whole, rows")
        if isinstance(self.rate, Per):
            require(self.rate.shape == "scalar", self, f"the rate must be scalar, got {self.rate!r}")

    @property
    def scale_free(self) -> bool:  # type: ignore[override]
        return _homogeneous(self.base)

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if context.weights is None:
            raise IllegalUpdate("ConstantNorm turns the weights: put it on a filter, not on a state")
        rate = resolve(self.rate, context.signal)
        w = wide(self.base.primal(theta, context))
        have, radius = self._norm(w), self._norm(context.weights)
        n = w / torch.where(have > 0, have, 1.0)
        at = wide(context.weights) / torch.where(radius > 0, radius, 1.0)
        along = (at * n).sum(self._dims(w), keepdim=True)
        moved = self._norm(at + rate * n)
        turned = radius / moved * (n - at * ((2 * along + rate) / (1 + moved)))
        return torch.where((radius > 0) & (have > 0), turned, w).to(theta.dtype)

    def rates(self) -> tuple[Per, ...]:
        own = (self.rate,) if isinstance(self.rate, Per) else ()
        return (*self.base.rates(), *own)

    def _dims(self, x: Tensor) -> tuple[int, ...]:
        return leaf_dims(x) if self.axis == "whole" else (-1,)

    def _norm(self, x: Tensor) -> Tensor:
        square = wide(x).square().sum(self._dims(x), keepdim=True)
        return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)


@final
@dataclass(frozen=True, repr=False)
class Composite(Geometry):
    """outer(inner(theta)): two links in a row, with their statistics in the order inner, outer.

    The composition of two gradients is in general not a gradient.
    """

    outer: Geometry
    inner: Geometry

    is_potential = False

    def __post_init__(self) -> None:
        for part in (self.outer, self.inner):
            require(isinstance(part, Geometry), self, f"both parts must be geometries, got {part!r}")
            require(not part.is_identity, self, f"{part!r} is the identity: use the other part alone")

    @property
    def stats(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.inner.stats + self.outer.stats

    def with_stats(self, stats: tuple[Any, ...]) -> Composite:
        split = len(self.inner.stats)
        return Composite(self.outer.with_stats(stats[split:]), self.inner.with_stats(stats[:split]))

    @property
    def invertible(self) -> bool:  # type: ignore[override]
        return self.inner.invertible and self.outer.invertible

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.inner.linear and self.outer.linear

    @property
    def scale_free(self) -> bool:  # type: ignore[override]
        return self.inner.scale_free or (self.inner.linear and self.outer.scale_free)

    @property
    def matrix(self) -> bool:  # type: ignore[override]
        return self.inner.matrix or self.outer.matrix

    @property
    def slice_axis(self) -> Slice | None:  # type: ignore[override]
        # An inner link that mixes entries carries the outer slice to the whole leaf.
        return self.inner.slice_axis or ("whole" if self.outer.slice_axis else None)

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        split = len(self.inner.stats)
        w = self.inner.primal(theta, context._replace(stats=context.stats[:split]))
        return self.outer.primal(w, context._replace(stats=context.stats[split:]))

    def dual(self, w: Tensor) -> Tensor:
        return self.inner.dual(self.outer.dual(w))

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        return self.outer.contains(w, tol)

    def rates(self) -> tuple[Per, ...]:
        return self.inner.rates() + self.outer.rates()
