"""Links around another link: they rescale or mask what it gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, final

import torch
from torch import Tensor

from axes.core.geometry.bregman import NO_CONTEXT, Context, Geometry, Slice, leaf_dims, leaf_size, require, wide
from axes.core.geometry.normalised import require_of
from axes.core.rates import Per, Rate, Shape, Variable, rate_shape, resolve, spread
from axes.errors import IllegalUpdate


class _Wrapper(Geometry):
    """A link that rescales or masks another one; it reads the context, so it belongs on a filter, not on a state."""

    base: Geometry
    is_potential = False
    _compares: ClassVar[frozenset[str]] = frozenset()  # what of the context it compares the direction with

    def __post_init__(self) -> None:
        require(isinstance(self.base, Geometry), self, f"base must be a geometry, got {self.base!r}")

    @property
    def stats(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.base.stats

    def links(self) -> Iterator[Geometry]:
        yield self
        yield from self.base.links()

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

    @property
    def reads(self) -> frozenset[str]:  # type: ignore[override]
        return self.base.reads | self._compares

    def rates(self) -> tuple[Rate, ...]:
        return self.base.rates()

    def neutral(self) -> dict[str, float]:
        return self.base.neutral()


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

    _compares = frozenset({"drive"})

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
class Decayed(_Wrapper):
    """A direction with a decay in it: W = base(theta) - weight w, w the weights around the filter.

    They are those at which the gradient was taken, which need not be those that move. Needs `context.weights`.

    Source: Defazio et al. 2024, whose code decays where it takes the gradient; inside of a `TrustRatio` LARS and LAMB.
    """

    base: Geometry
    weight: Rate

    _compares = frozenset({"weights"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.weight, Per):
            message = f"the weight must be positive and one number a leaf or an entry, got {self.weight!r}"
            require(self.weight.domain == "positive" and self.weight.shape in ("scalar", "square"), self, message)
        elif not isinstance(self.weight, Variable):
            require(0 < self.weight < math.inf, self, f"the weight must be positive and finite, got {self.weight}")

    @property
    def entrywise(self) -> bool:  # type: ignore[override]
        return self.base.entrywise

    @property
    def scale_free(self) -> bool:  # type: ignore[override]
        return False

    def parts(self, theta: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        """base(theta), and what is taken from it: weight w."""
        if context.weights is None:
            raise IllegalUpdate("Decayed pulls on the weights: put it on a filter, not on a state")
        pull = spread(resolve(self.weight, context.signal), rate_shape(self.weight)) * wide(context.weights)
        return wide(self.base.primal(theta, context)), pull

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        own, pull = self.parts(theta, context)
        return (own - pull).to(theta.dtype)

    def rates(self) -> tuple[Rate, ...]:
        return (*self.base.rates(), self.weight)

    def neutral(self) -> dict[str, float]:
        return {}


@final
@dataclass(frozen=True, repr=False)
class TrustRatio(_Wrapper):
    """A direction in proportion to the weights: W = d r,  d = base(theta),  r = coefficient |w| / |d|.

    w are the weights around the filter, norms are those of a leaf, and r is 1 where either of them is 0. A base that is
    `Decayed` has the weights' own decay inside of what is rescaled. length: what r divides by, the norm of the "whole"
    d or the sum of those of the "parts" of a Decayed one, which bounds it. bounds: |w| is taken as the nearest number
    between these. Needs `context.weights`.

    Source: You et al. 2020, algorithm 2 (LAMB; bounds are its phi); You, Gitman and Ginsburg 2017, eq. 6 (LARS: parts).
    """

    base: Geometry
    coefficient: float = 1.0
    length: Literal["whole", "parts"] = "whole"
    bounds: tuple[float, float] | None = None

    _compares = frozenset({"weights"})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.coefficient < math.inf, self, f"coefficient must be positive, got {self.coefficient}")
        require(self.length in ("whole", "parts"), self, f"length {self.length!r} is not one of whole, parts")
        parted = self.length == "whole" or isinstance(self.base, Decayed)
        require(parted, self, f"length='parts' is of a Decayed direction, and that of {self.base!r} is whole")
        if self.bounds is not None:
            object.__setattr__(self, "bounds", tuple(self.bounds))
            ok = len(self.bounds) == 2 and 0 <= self.bounds[0] < self.bounds[1]
            require(ok, self, f"bounds are (least, most) with 0 <= least < most, got {self.bounds}")

    @property
    def drops_factors(self) -> bool:
        """Whether a positive factor of theta, as far as the base passes it on, makes no difference."""
        return not any(isinstance(link, Decayed) for link in self.base.links())

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if context.weights is None:
            raise IllegalUpdate("TrustRatio compares a direction with the weights: put it on a filter, not on a state")
        need = leaf_size(wide(context.weights))
        if self.length == "parts" and isinstance(self.base, Decayed):
            own, pull = self.base.parts(theta, context)
            d, have = own - pull, leaf_size(own) + leaf_size(pull)
        else:
            d = wide(self.base.primal(theta, context))
            have = leaf_size(d)
        both = (have > 0) & (need > 0)
        if self.bounds is not None:
            need = need.clamp(*self.bounds)
        ratio = self.coefficient * need / torch.where(both, have, 1.0)
        return (d * torch.where(both, ratio, 1.0)).to(theta.dtype)


@final
@dataclass(frozen=True, repr=False)
class RelativeStep(_Wrapper):
    """A direction times the root mean square of the weights: W = base(theta) max(rms(w), least), rms over a leaf.

    Where base gives entries of size one, a step is relative to the weights. least: what a parameter near zero moves by.
    Needs `context.weights`.

    Source: Shazeer and Stern 2018, section 8.
    """

    base: Geometry
    least: float = 1e-3

    _compares = frozenset({"weights"})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.least < math.inf, self, f"least must be positive and finite, got {self.least}")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if context.weights is None:
            raise IllegalUpdate("RelativeStep scales by the weights: put it on a filter, not on a state")
        w = self.base.primal(theta, context)
        size = wide(context.weights).square().mean(leaf_dims(context.weights), keepdim=True)
        return (w * torch.where(size > 0, size, 1.0).sqrt().where(size > 0, 0.0).clamp_min(self.least)).to(w.dtype)


def _homogeneous(h: Geometry) -> bool:
    """Whether a positive factor of theta is a factor of primal(theta), or none."""
    if isinstance(h, TrustRatio):
        return h.drops_factors and _homogeneous(h.base)
    return h.linear or h.scale_free or isinstance(h, Cautious) and _homogeneous(h.base)


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
        require_of(self, self.magnitude, ("drive",))

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
        have = leaf_size(w)
        ratio = torch.where(have > 0, leaf_size(context.stats[-1]) / torch.where(have > 0, have, 1.0), 0.0)
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

    _compares = frozenset({"weights"})

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

    def rates(self) -> tuple[Rate, ...]:
        return (*self.base.rates(), self.rate)

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

    def links(self) -> Iterator[Geometry]:
        yield self
        yield from self.inner.links()
        yield from self.outer.links()

    def with_stats(self, stats: tuple[Any, ...]) -> Composite:
        split = len(self.inner.stats)
        return Composite(self.outer.with_stats(stats[split:]), self.inner.with_stats(stats[:split]))

    @property
    def invertible(self) -> bool:  # type: ignore[override]
        return self.inner.invertible and self.outer.invertible

    @property
    def logits(self) -> Shape:  # type: ignore[override]
        return self.inner.logits

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

    @property
    def entrywise(self) -> bool:  # type: ignore[override]
        return self.inner.entrywise and self.outer.entrywise

    @property
    def reads(self) -> frozenset[str]:  # type: ignore[override]
        return self.inner.reads | self.outer.reads

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        split = len(self.inner.stats)
        w = self.inner.primal(theta, context._replace(stats=context.stats[:split]))
        return self.outer.primal(w, context._replace(stats=context.stats[split:]))

    def dual(self, w: Tensor) -> Tensor:
        return self.inner.dual(self.outer.dual(w))

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        return self.outer.contains(w, tol)

    def rates(self) -> tuple[Rate, ...]:
        return self.inner.rates() + self.outer.rates()

    def neutral(self) -> dict[str, float]:
        return self.inner.neutral() | self.outer.neutral()
