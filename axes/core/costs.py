"""Costs: what one write should improve, seen through the prediction and the target only.

A cost gives its value l(p; v) and r = dl/dp; the memory turns r into a gradient by its vector-Jacobian product.
Explicit and implicit steps share `residual`, the gradient of the Moreau envelope with parameter c,

    M_c(p) = min_x l(x; v) + sum_j (x_j - p_j)^2 / (2 c_j),      r in dl(p - c r; v),

so that c = 0 is the plain gradient and c = eta |k|^2 the implicit step of a Euclidean matrix memory.
Everywhere e = p - v, sums run over the last dimension and squares carry one half. At kinks sign(0) = 0 and
e/|e| = 0 at e = 0, with derivative 0; the side that holds |e| = delta is the quadratic one.

Rates are numbers or `Per` of domain positive: scalar (...), broadcast over the coordinates, or row (..., d_v).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from axes.core.declared import Declared
from axes.core.rates import Per, Rate, Signal, Variable, rate_shape, resolve
from axes.errors import IllegalUpdate, ShapeError
from axes.linalg import solve
from axes.linalg.blockwise import outer_mean
from axes.linalg.matrix_roots import PRECISIONS, Precision, symmetric_product
from axes.programs.numbers import as_float

__all__ = [
    "Alignment",
    "Cost",
    "CrossEntropy",
    "Given",
    "Huber",
    "HuberSwitch",
    "Linear",
    "Lp",
    "Ridge",
    "RobustShift",
    "SquaredError",
]

Curvature = Literal["none", "affine", "nonlinear"]
Residual = Literal["target", "error"]
Side = Literal[
    "entries",
    "rows",
    "columns",
    "each-row",
    "each-column",
    "eigen-entries",
    "eigen-rows",
    "eigen-columns",
    "whole",
    "number",
]
Value = Tensor | float
# what the squares of keys, values and errors are made of; made once, since compilers do not follow its checks
_SHOWN = {"k": Per("k", "key", "real"), "v": Per("v", "row", "real"), "e": Per("e", "row", "real")}
_BY_ENTRY = ("drive", "square", "magnitude", "unit", "white-square", "state")
_EMPTY: Signal = MappingProxyType({})


def _norm(x: Tensor) -> Tensor:
    """|x| over the last dimension, kept; 0 with all derivatives 0 at x = 0. Asked for zero, so that NaN stays NaN."""
    square = (x * x).sum(-1, keepdim=True)
    return torch.where(square == 0, 0.0, torch.where(square == 0, 1.0, square).sqrt())


def _sign(x: Tensor) -> Tensor:
    """torch's is 0 of NaN, which nobody would see again."""
    return torch.where(x == x, x.sign(), x)


def _unit(x: Tensor) -> Tensor:
    """x / |x|; finite, with finite derivatives, at x = 0, where every caller selects another branch."""
    norm = _norm(x)
    return x / torch.where(norm > 0, norm, 1.0)


def _power(x: Tensor, exponent: float) -> Tensor:
    """sign(x) |x|^exponent; 0 at 0, with all derivatives 0 there unless the exponent is 1."""
    if exponent == 1:
        return x
    if exponent == 2:
        return x * x.abs()
    return torch.where(x == 0, 0.0, _sign(x) * torch.where(x == 0, 1.0, x.abs()) ** exponent)


def _over(e: Tensor, c: Value) -> tuple[Tensor, Tensor]:
    """e / c, the residual of a step that ends on the target (e itself where c = 0), and the mask of c > 0."""
    c = c if isinstance(c, Tensor) else e.new_full((), c)
    return e / torch.where(c > 0, c, 1.0), c > 0


def _varies(c: Value) -> bool:
    return isinstance(c, Tensor) and c.ndim > 0 and c.shape[-1] > 1


def _positive(owner: str, rate: Rate, shapes: tuple[str, ...] = ("scalar",)) -> Rate:
    """The rate as declared, checked: a finite number > 0, or a positive `Per` of one of the shapes."""
    if isinstance(rate, Per) and (rate.domain != "positive" or rate.shape not in shapes):
        raise IllegalUpdate(f"{owner} takes a positive Per of shape {' or '.join(shapes)}, got {rate}")
    if isinstance(rate, Variable):
        return rate
    if not 0 < rate < math.inf:
        raise IllegalUpdate(f"{owner} must be a finite number > 0 or a Per, got {rate}")
    return as_float(rate)


def _per_coordinate(rate: Rate, signal: Signal) -> Value:
    value = resolve(rate, signal)
    return value.unsqueeze(-1) if isinstance(value, Tensor) and rate_shape(rate) == "scalar" else value


class Cost(Declared):
    """l(prediction; target) and its derivative; prediction, target, gradient and residual (..., d), value (...).

    curvature: how the gradient depends on the prediction. needs: what the cost reads of the signal besides its rates.
    encode: the memory compares the encoded value with the key. ridge: weight of |W|^2 / 2, which the step adds.
    drives: where the drive -r is known without asking, the "target" v whatever the prediction, or minus the "error",
    v - p, and the implicit step is that of |p - v|^2 / 2. by_coordinate: whether an entry of the gradient, and of the
    implicit step, depends on that entry of prediction and target alone. superlinear: the gradient grows faster than the
    error, so that no explicit step is stable wherever it starts.
    """

    @property
    def curvature(self) -> Curvature:
        return "nonlinear"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"k", "v"})

    @property
    def is_gradient(self) -> bool:
        return True

    @property
    def encode(self) -> bool:
        return False

    @property
    def ridge(self) -> Rate:
        return 0.0

    @property
    def drives(self) -> Residual | None:
        return None

    @property
    def by_coordinate(self) -> bool:
        return False

    @property
    def superlinear(self) -> bool:
        return False

    def rates(self) -> tuple[Rate, ...]:
        return ()

    def value(self, prediction: Tensor, target: Tensor, signal: Signal = _EMPTY) -> Tensor:
        raise IllegalUpdate(f"{self!r} has no value as a function of prediction and target")

    def gradient(self, prediction: Tensor, target: Tensor, signal: Signal = _EMPTY) -> Tensor:
        raise IllegalUpdate(f"{self!r} has no gradient as a function of prediction and target")

    def residual(self, prediction: Tensor, target: Tensor, c: Value = 0.0, signal: Signal = _EMPTY) -> Tensor:
        """r with r in dl(prediction - c r; target): the gradient of the Moreau envelope, or of l itself at c = 0.

        c >= 0 is a number or broadcasts against the prediction: unsqueeze one c per datum to (..., 1); (..., d) is
        one c per coordinate. First and second derivatives in prediction, target, c and rates are exact.
        """
        if isinstance(c, Tensor):
            if c.ndim and c.shape[-1] not in (1, prediction.shape[-1]):
                raise ShapeError(
                    f"c {tuple(c.shape)} does not broadcast against the prediction {tuple(prediction.shape)}: "
                    "unsqueeze one c per datum to (..., 1)"
                )
        elif not c >= 0:
            raise IllegalUpdate(f"the Moreau parameter c must be >= 0, got {c}")
        elif c == 0:
            return self.gradient(prediction, target, signal)
        if not self.is_gradient:
            raise IllegalUpdate(f"{self!r} is the gradient of nothing and has no implicit step: use an explicit one")
        return self._moreau(prediction, target, c, signal)

    def _moreau(self, prediction: Tensor, target: Tensor, c: Value, signal: Signal) -> Tensor:
        def equation(r: Tensor) -> Tensor:
            return r - self.gradient(prediction - c * r, target, signal)

        return solve.root(equation, self.gradient(prediction, target, signal) / (1 + c))


class _ErrorCost(Cost):
    """A cost of e = prediction - target with a Moreau residual `_prox(e, c)` in closed form or by a scalar root."""

    def _loss(self, e: Tensor, signal: Signal) -> Tensor:
        raise NotImplementedError

    def _prox(self, e: Tensor, c: Value, signal: Signal) -> Tensor:
        raise NotImplementedError

    def _slope(self, e: Tensor, signal: Signal) -> Tensor:
        return self._prox(e, 0.0, signal)

    def value(self, prediction: Tensor, target: Tensor, signal: Signal = _EMPTY) -> Tensor:
        return self._loss(prediction - target, signal).sum(-1)

    def gradient(self, prediction: Tensor, target: Tensor, signal: Signal = _EMPTY) -> Tensor:
        return self._slope(prediction - target, signal)

    def _moreau(self, prediction: Tensor, target: Tensor, c: Value, signal: Signal) -> Tensor:
        return self._prox(prediction - target, c, signal)


@final
@dataclass(frozen=True, repr=False)
class Alignment(Cost):
    """l = -<p, v>, r = -v for every c: the Hebbian write of linear attention (Miras eq. 8 without its factor 2)."""

    curvature: ClassVar[Curvature] = "none"
    drives: ClassVar[Residual] = "target"
    by_coordinate: ClassVar[bool] = True

    def value(self, prediction: Tensor, target: Tensor, signal: Signal = _EMPTY) -> Tensor:
        return -(prediction * target).sum(-1)

    def gradient(self, prediction: Tensor, target: Tensor, signal: Signal = _EMPTY) -> Tensor:
        return -target

    def _moreau(self, prediction: Tensor, target: Tensor, c: Value, signal: Signal) -> Tensor:
        return -target


@final
@dataclass(frozen=True, repr=False)
class SquaredError(_ErrorCost):
    """l = |e|^2 / 2, r = e / (1 + c): delta rule (c = 0) and Longhorn (its eq. 6, c = beta |k|^2).

    encode: the prediction is the value encoded, S^T v, and the target the key (Lattice).
    """

    encode: bool = False
    curvature: ClassVar[Curvature] = "affine"
    drives: ClassVar[Residual] = "error"
    by_coordinate: ClassVar[bool] = True

    def _loss(self, e: Tensor, signal: Signal) -> Tensor:
        return e * e / 2

    def _prox(self, e: Tensor, c: Value, signal: Signal) -> Tensor:
        return e / (1 + c)


@final
@dataclass(frozen=True, repr=False)
class Lp(_ErrorCost):
    """l = |e|_p^p, r = p sign(e) |e|^(p-1) for p >= 1 (Miras eqs. 10-12); mean_one divides both by p.

    smooth = (kappa, eps): r = p tanh(kappa e) (e^2 + eps)^((p-1)/2) (Miras remark 5) and l its integral from 0;
    None: exact. "auto" stands for (100, 1e-6) below p = 2, where the exact r has no derivative at 0, and for None
    from p = 2 on, where smoothing only distorts. At p = 1 eps cannot act: it must be 0.
    Differs from the paper, which smooths every p and does not print kappa.
    """

    p: float
    smooth: tuple[float, float] | Literal["auto"] | None = "auto"
    mean_one: bool = False
    by_coordinate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.p < math.inf:
            raise IllegalUpdate(f"Lp: p must be a finite number >= 1 (below 1 the cost is not convex), got {self.p}")
        if self.p == 1 and self.mean_one:
            raise IllegalUpdate("Lp(p=1): mean_one divides by p and has no effect: leave it at False")
        smooth = self.smooth
        if smooth == "auto":
            smooth = self._auto()
        elif smooth is not None:
            smooth = (as_float(smooth[0]), as_float(smooth[1]))
            if not (0 < smooth[0] < math.inf and 0 <= smooth[1] < math.inf and (smooth[1] == 0) == (self.p == 1)):
                raise IllegalUpdate(
                    f"Lp(p={self.p}): smooth = (kappa, eps) takes kappa > 0 and eps > 0 (eps = 0 at p = 1, where it "
                    f"cannot act), got {smooth}"
                )
        object.__setattr__(self, "p", as_float(self.p))
        object.__setattr__(self, "smooth", smooth)

    def _auto(self) -> tuple[float, float] | None:
        return (100.0, 0.0 if self.p == 1 else 1e-6) if self.p < 2 else None

    def _undeclared(self, field: dataclasses.Field[object]) -> object:
        return self._auto() if field.name == "smooth" else field.default

    @property
    def curvature(self) -> Curvature:
        return "affine" if self.p == 2 and self.smooth is None else "nonlinear"

    @property
    def drives(self) -> Residual | None:
        return "error" if self.curvature == "affine" and self._factor == 1 else None

    @property
    def superlinear(self) -> bool:
        return self.p > 2

    @property
    def _factor(self) -> float:
        return 1.0 if self.mean_one else self.p

    def _slope(self, e: Tensor, signal: Signal) -> Tensor:
        if self.smooth is None:
            return self._factor * _power(e, self.p - 1)
        kappa, eps = map(float, self.smooth)
        return self._factor * torch.tanh(kappa * e) * (e * e + eps) ** ((self.p - 1) / 2)

    def _loss(self, e: Tensor, signal: Signal) -> Tensor:
        if self.smooth is None:
            return e * self._slope(e, signal) / self.p
        # l = int_0^1 e r(t e) dt has no closed form. With t = sigmoid(z) the singularities of the integrand stay at
        # |Im z| >= pi/2 for every kappa, eps and e: the trapezoidal rule of this step is exact to rounding.
        z = torch.arange(-32, 37, 0.25, dtype=torch.float64, device=e.device)
        nodes, weights = z.sigmoid(), 0.25 * z.sigmoid() * (-z).sigmoid()
        return e * (weights.to(e.dtype) * self._slope(nodes.to(e.dtype) * e.unsqueeze(-1), signal)).sum(-1)

    def _prox(self, e: Tensor, c: Value, signal: Signal) -> Tensor:
        f, p, zero = self._factor, self.p, torch.zeros_like(e)
        if self.curvature == "affine":
            return f * e / (1 + f * c)
        if self.smooth is None and p == 1:
            inner, positive = _over(e, c)
            return torch.where(positive & (inner.abs() <= 1), inner, _sign(e))
        if self.smooth is None and p < 2:  # in r: the slope is not smooth, but its inverse is

            def by_residual(r: Tensor) -> Tensor:
                return _power(r / f, 1 / (p - 1)) + c * r - e

            bound = self._slope(e, signal)
            return solve.scalar_root(by_residual, torch.minimum(bound, zero), torch.maximum(bound, zero))

        def by_error(x: Tensor) -> Tensor:
            return x + c * self._slope(x, signal) - e

        x = solve.scalar_root(by_error, torch.minimum(e, zero), torch.maximum(e, zero))
        return self._slope(x, signal)


@final
@dataclass(frozen=True, repr=False)
class Huber(_ErrorCost):
    """H quadratic within delta, linear beyond: H(a) = a^2 / 2 for |a| <= delta, else delta (|a| - delta / 2).

    coordinate: l = sum_j H(e_j), r = clip(e / (1 + c), -delta, delta), delta scalar or row (Miras eqs. 13-14,
    torch.nn.HuberLoss). norm: l = H(|e|), r = e min(1 / (1 + c), delta / |e|), delta scalar (eq. 15).
    An infinite coordinate is one more outlier: it is clipped, and nothing behind it tells. NaN stays NaN.
    """

    delta: Rate = 1.0
    kind: Literal["coordinate", "norm"] = "coordinate"

    def __post_init__(self) -> None:
        if self.kind not in ("coordinate", "norm"):
            raise IllegalUpdate(f"Huber: kind {self.kind!r} is not one of coordinate, norm (switch: see HuberSwitch)")
        shapes = ("scalar", "row") if self.kind == "coordinate" else ("scalar",)
        object.__setattr__(self, "delta", _positive(f"Huber(kind={self.kind!r}): delta", self.delta, shapes))

    @property
    def by_coordinate(self) -> bool:
        return self.kind == "coordinate"

    def rates(self) -> tuple[Rate, ...]:
        return (self.delta,)

    def _loss(self, e: Tensor, signal: Signal) -> Tensor:
        delta, by_norm = _per_coordinate(self.delta, signal), self.kind == "norm"
        size, square = (_norm(e), (e * e).sum(-1, keepdim=True)) if by_norm else (e.abs(), e * e)
        return torch.where(size <= delta, square / 2, delta * (size - delta / 2))

    def _prox(self, e: Tensor, c: Value, signal: Signal) -> Tensor:
        delta, quadratic = _per_coordinate(self.delta, signal), e / (1 + c)
        if self.kind == "coordinate":
            return torch.where(quadratic.abs() <= delta, quadratic, delta * _sign(e))
        inside = _norm(quadratic) <= delta
        if not _varies(c):
            return torch.where(inside, quadratic, delta * _unit(e))
        # One c per coordinate: r = e / (s + c) with s >= 1 such that |r| = delta.
        e = torch.where(inside, 2 * delta * (1 + c), e)  # keeps the unused branch regular: an error beyond delta

        def equation(s: Tensor) -> Tensor:
            return delta - _norm(e / (s + c))

        one = torch.ones_like(e[..., :1])
        s = solve.scalar_root(equation, one, torch.maximum(one, _norm(e) / delta))
        return torch.where(inside, quadratic, e / (s + c))


@final
@dataclass(frozen=True, repr=False)
class HuberSwitch(Cost):
    """r = e if |e| <= delta else delta sign(e): a named operator, the gradient of no cost (Miras eq. 16).

    It jumps by the factor sqrt(d) at |e| = delta and its loop work is not 0, so it has neither value nor implicit
    step. delta: scalar, or row (each coordinate compares |e| with its own delta).
    """

    delta: Rate = 1.0
    is_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", _positive("HuberSwitch: delta", self.delta, ("scalar", "row")))

    def rates(self) -> tuple[Rate, ...]:
        return (self.delta,)

    def gradient(self, prediction: Tensor, target: Tensor, signal: Signal = _EMPTY) -> Tensor:
        e, delta = prediction - target, _per_coordinate(self.delta, signal)
        return torch.where(_norm(e) <= delta, e, delta * _sign(e))


@final
@dataclass(frozen=True, repr=False)
class RobustShift(_ErrorCost):
    """l = max over |s| <= Delta of |e - s|^2 / 2 = (|e| + Delta)^2 / 2 (Miras eq. 17 ff.).

    r = (e + Delta e / |e|) / (1 + c), or e / c where |e| <= c Delta: the step that ends on the target.
    """

    Delta: Rate

    def __post_init__(self) -> None:
        object.__setattr__(self, "Delta", _positive("RobustShift: Delta", self.Delta))

    def rates(self) -> tuple[Rate, ...]:
        return (self.Delta,)

    def _loss(self, e: Tensor, signal: Signal) -> Tensor:
        shift = _per_coordinate(self.Delta, signal)
        return ((e * e).sum(-1, keepdim=True) + shift * (2 * _norm(e) + shift)) / 2

    def _prox(self, e: Tensor, c: Value, signal: Signal) -> Tensor:
        shift = _per_coordinate(self.Delta, signal)
        inner, positive = _over(e, c)
        reached = (positive | (e == 0)).all(-1, keepdim=True) & (_norm(inner * positive) <= shift)
        if not _varies(c):
            return torch.where(reached, inner, (e + shift * _unit(e)) / (1 + c))
        # One c per coordinate: r = e / (s + c), where s = |x| / (|x| + Delta) at the new error x.
        e = torch.where(reached, 2 * shift * (1 + c), e)  # keeps the unused branch regular: an error out of reach

        def equation(s: Tensor) -> Tensor:
            return shift - (1 - s) * _norm(e / (s + c))

        s = solve.scalar_root(equation, torch.zeros_like(e[..., :1]), torch.ones_like(e[..., :1]))
        return torch.where(reached, inner, e / (s + c))


@final
@dataclass(frozen=True, repr=False)
class CrossEntropy(Cost):
    """l = log sum exp p - <v, p>, r = softmax(p) - v: prediction = logits, target = probabilities.

    The Moreau residual is found by Newton's method, for any logits as long as c does not exceed about 1000.
    """

    def value(self, prediction: Tensor, target: Tensor, signal: Signal = _EMPTY) -> Tensor:
        return torch.logsumexp(prediction, -1) - (prediction * target).sum(-1)

    def gradient(self, prediction: Tensor, target: Tensor, signal: Signal = _EMPTY) -> Tensor:
        return torch.softmax(prediction, -1) - target


@final
@dataclass(frozen=True, repr=False)
class Given(Cost):
    """The gradient comes from an oracle as signal["g"]; it may depend on the weights in any way."""

    needs: ClassVar[frozenset[str]] = frozenset({"g"})


@final
@dataclass(frozen=True, repr=False)
class Linear(Cost):
    """l = -<W, z>: the cost of filters and statistics, whose drive z is a quantity of the datum.

    of: drive u, square u * u, magnitude |u|, unit 1 (one number, whatever u is: a normaliser), row-square and
    column-square the means of u * u over each row, (..., d_v, 1), and over each column, (..., 1, d_k), left u u^T,
    right u^T u (u the raw drive (..., d_v, d_k)), white-square y * y for the y that an entry-wise geometry made of u
    with its statistics before the datum, eigen-square as square but
    with u in the bases that the two statistics before it give, eigen-square-left and -right with its rows or its
    columns in the basis that the one before it gives, key k k^T, value v v^T, error e e^T (e the gradient of
    a layer's output). A signal that has "kk", "vv" or "ee" supplies that product itself,
    for data that are means over several examples. white-left is y y^T / d_k and white-right y^T y / d_v for the y that
    the geometry made of u with its statistics before the datum (u itself at the first): the identity on average where
    y is white. eigen-fisher is the square of e k^T in the bases that the two statistics before it give, for the
    examples in the rows of "k_rows" and "e_rows" their mean. state is what the update that carries the statistic holds
    after the datum, its theta. travel is one number, the sum of u (W - theta) over a leaf, W the weights around the
    filter that carries the statistic. precision: of matrix products, see `axes.linalg.matrix_roots.product`. offset:
    added to a square or a magnitude. raw: of the drive as it came, ahead of the filters of the part whose statistic it
    is.
    """

    of: Literal[
        "drive", "square", "magnitude", "unit", "left", "right", "row-square", "column-square", "white-square",
        "white-left", "white-right", "eigen-square", "eigen-square-left", "eigen-square-right", "eigen-fisher", "key",
        "value", "error", "state", "travel",
    ] = "drive"  # fmt: skip
    precision: Precision = "input"
    offset: Rate = 0.0
    raw: bool = False
    curvature: ClassVar[Curvature] = "none"

    def __post_init__(self) -> None:
        sides = ("left", "right", "white-left", "white-right")
        turned = ("eigen-square", "eigen-square-left", "eigen-square-right", "eigen-fisher")
        means = ("row-square", "column-square")
        allowed = (*_BY_ENTRY, *means, *sides, *turned, "key", "value", "error", "travel")
        if self.of not in allowed:
            raise IllegalUpdate(f"Linear: of={self.of!r} is not one of {', '.join(allowed)}")
        if self.precision not in PRECISIONS:
            raise IllegalUpdate(f"Linear: precision {self.precision!r} is not one of {', '.join(PRECISIONS)}")
        if self.precision != "input" and self.of not in (*sides, *turned):
            raise IllegalUpdate(f"Linear: of={self.of!r} is no matrix product: leave precision at 'input'")
        if self.offset != 0.0 and self.of not in ("square", "magnitude"):
            raise IllegalUpdate(f"Linear: offset is added to a square or a magnitude, not to of={self.of!r}")
        if self.raw and self.of not in ("drive", "square", "magnitude", "left", "right"):
            raise IllegalUpdate(f"Linear: of={self.of!r} does not read the drive as it came: leave raw at False")

    def rates(self) -> tuple[Rate, ...]:
        return (self.offset,)

    @property
    def needs(self) -> frozenset[str]:
        if self.of == "eigen-fisher":
            return frozenset(("k", "e"))
        return frozenset(self.of[0] if self.of in ("key", "value", "error") else ())

    @property
    def whitened(self) -> bool:
        """Whether it is driven by what the geometry made of u, not by u."""
        return self.of in ("white-square", "white-left", "white-right")

    @property
    def by_entry(self) -> bool:
        """Whether an entry of z is a function of that entry of u."""
        return self.of in _BY_ENTRY

    @property
    def side(self) -> Side:
        """What z has the shape of."""
        if self.of in ("left", "white-left", "value", "error"):
            return "rows"
        if self.of in ("right", "white-right", "key"):
            return "columns"
        named: dict[str, Side] = {
            "row-square": "each-row", "column-square": "each-column", "eigen-square": "eigen-entries",
            "eigen-fisher": "eigen-entries", "eigen-square-left": "eigen-rows", "eigen-square-right": "eigen-columns",
            "travel": "number",
        }  # fmt: skip
        return named.get(self.of, "entries")

    def drive(self, u: Tensor, signal: Signal = _EMPTY) -> Tensor:
        """z from the raw drive u (not read for key, value and error; of examples for eigen-fisher; u (W - theta) for
        travel) and the signal."""
        if self.of in ("key", "value", "error"):
            supplied = signal.get(2 * self.of[0])
            if isinstance(supplied, Tensor):
                return supplied
            x = torch.as_tensor(resolve(_SHOWN[self.of[0]], signal))
            return x.unsqueeze(-1) * x.unsqueeze(-2)
        if self.of in ("left", "right", "white-left", "white-right"):
            x = u.mT if self.of in ("left", "white-left") else u
            if self.whitened:
                return outer_mean(x, self.precision)
            return symmetric_product(x.mT, None, self.precision)
        if self.of == "unit":
            return u.new_ones((*u.shape[:-2], *(1,) * min(u.ndim, 2)))
        if self.of == "travel":
            return u.sum((-2, -1) if u.ndim >= 2 else tuple(range(u.ndim)), keepdim=True)
        if self.of == "magnitude":
            return self._offset(u.abs(), signal)
        if self.of in ("row-square", "column-square"):
            return (u * u).mean(-1 if self.of == "row-square" else -2, keepdim=True)
        return self._offset(u * u, signal) if "square" in self.of else u

    def _offset(self, z: Tensor, signal: Signal) -> Tensor:
        return z + resolve(self.offset, signal) if self.offset != 0.0 else z


@final
@dataclass(frozen=True, repr=False)
class Ridge(Cost):
    """cost + weight |W|^2 / 2: the step reads `ridge`, since a cost sees no weights; all else is the cost's own."""

    cost: Cost
    weight: Rate

    def __post_init__(self) -> None:
        if isinstance(self.cost, (Ridge, Linear)):
            raise IllegalUpdate(
                f"Ridge takes a cost of a prediction or an oracle, not {self.cost!r}: add up ridge weights; what a "
                "filter retains is its monoid"
            )
        object.__setattr__(self, "weight", _positive("Ridge: weight", self.weight, ("scalar", "key", "row", "square")))

    @property
    def curvature(self) -> Curvature:
        return self.cost.curvature

    @property
    def needs(self) -> frozenset[str]:
        return self.cost.needs

    @property
    def is_gradient(self) -> bool:
        return self.cost.is_gradient

    @property
    def encode(self) -> bool:
        return self.cost.encode

    @property
    def ridge(self) -> Rate:
        return self.weight

    @property
    def drives(self) -> Residual | None:
        return self.cost.drives

    @property
    def by_coordinate(self) -> bool:
        return self.cost.by_coordinate

    @property
    def superlinear(self) -> bool:
        return self.cost.superlinear

    def rates(self) -> tuple[Rate, ...]:
        return (*self.cost.rates(), self.weight)

    def value(self, prediction: Tensor, target: Tensor, signal: Signal = _EMPTY) -> Tensor:
        return self.cost.value(prediction, target, signal)

    def gradient(self, prediction: Tensor, target: Tensor, signal: Signal = _EMPTY) -> Tensor:
        return self.cost.gradient(prediction, target, signal)

    def _moreau(self, prediction: Tensor, target: Tensor, c: Value, signal: Signal) -> Tensor:
        return self.cost._moreau(prediction, target, c, signal)
