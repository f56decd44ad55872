"""Geometries that act on a spectrum: orthogonalisation (singular values) and whitening (eigenvalues of statistics)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
from torch import Tensor

from axes.core.costs import Side
from axes.core.geometry.bregman import (
    NO_CONTEXT,
    Context,
    EuclideanOn,
    Geometry,
    is_finite,
    require,
    require_matrix,
    wide,
)
from axes.errors import IllegalUpdate, ShapeError
from axes.linalg.formulas import by_autograd, by_formula, followed, numberless
from axes.linalg.matrix_roots import decomposed
from axes.linalg.newton_schulz import SAFETY, Form, Moving, Start, Triple, iterate, polar_express_schedule
from axes.linalg.polynomials import iterated

Scale = Literal["original", "match_rms_adamw", "spectral"] | None
_READS = {
    "newton-schulz": ("steps", "coefficients", "eps", "precision", "form"),
    "polar-express": ("steps", "eps", "precision", "form"),
    "polar": ("tolerance",),
}


@final
@dataclass(frozen=True, repr=False)
class Spectral(EuclideanOn):
    """The unit spectral ball: W = U V^T for theta = U S V^T maximises <theta, W> over it.

    method: "newton-schulz" is `steps` times x -> a x + b x^3 + c x^5 on the singular values, started at
    theta / max(|theta|_F, eps), which ends in a band around 1; "polar-express" uses a different optimal polynomial in
    each step, started at theta / (1.01 |theta|_F + eps); "polar" is exact, and drops singular values up to
    tolerance * s_1, or up to 8 rounding units of s_1 (the minimum-norm maximiser: the full SVD would complete the null
    space arbitrarily).
    scale: None (1), "original" sqrt(max(1, m/n)), "match_rms_adamw" 0.2 sqrt(max(m, n)), "spectral" sqrt(m/n) for
    theta (..., m, n). precision: "bfloat16" runs the polynomials in bfloat16 whatever the input. form: how they are
    evaluated, "direct" or "gram", see `axes.linalg.newton_schulz`; the two differ by rounding.
    On a filter it is Muon's direction; agile with the exact polar it is the projection of a state. Zero stays zero,
    with derivative zero.

    Derivatives: the polynomials are differentiated as they are; the polar factor has the derivatives of
    theta (theta^T theta)^{-1/2} on the kept singular values, finite also where they coincide.

    Source: Jordan et al. 2024 (Muon); Amsel et al. 2025 (Polar Express). newton-schulz in bfloat16 and form "direct"
    follows torch.optim.Muon operation by operation. Differs: batches of matrices; a field the method does not read is
    refused.
    """

    method: Literal["newton-schulz", "polar-express", "polar"] = "newton-schulz"
    steps: int = 5
    coefficients: Triple = (3.4445, -4.7750, 2.0315)
    scale: Scale = None
    eps: float = 1e-7
    precision: Literal["input", "bfloat16"] = "input"
    tolerance: float = 1e-9
    form: Form = "direct"

    scale_free = True
    matrix = True

    @property
    def is_potential(self) -> bool:  # type: ignore[override]
        return self.method == "polar"  # a truncated iteration is only close to a gradient

    def __post_init__(self) -> None:
        require(self.method in _READS, self, f"method {self.method!r} is not one of {', '.join(_READS)}")
        object.__setattr__(self, "coefficients", tuple(self.coefficients))
        for field in dataclasses.fields(self):
            read = field.name in ("method", "scale", *_READS[self.method])
            message = f"{field.name} has no effect with method {self.method!r}: leave it at {field.default!r}"
            require(read or getattr(self, field.name) == field.default, self, message)
        ok = isinstance(self.steps, int) and 1 <= self.steps < 100
        require(ok, self, f"steps must be an integer in [1, 99], got {self.steps!r}")
        require(len(self.coefficients) == 3, self, f"coefficients must be (a, b, c), got {self.coefficients}")
        scales = (None, "original", "match_rms_adamw", "spectral")
        require(self.scale in scales, self, f"scale {self.scale!r} is not one of {scales}")
        require(self.eps > 0, self, f"eps must be positive, got {self.eps}")
        require(self.precision in ("input", "bfloat16"), self, f"precision {self.precision!r} is not input or bfloat16")
        require(0 <= self.tolerance < 1, self, f"tolerance must lie in [0, 1), got {self.tolerance}")
        require(self.form in ("direct", "gram"), self, f"form {self.form!r} is not direct or gram")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        require_matrix(self, theta)
        if self.method == "polar":
            tall = theta.shape[-2] > theta.shape[-1]
            x = polar(wide(theta.mT if tall else theta), self.tolerance)
            return (x.mT if tall else x).to(theta.dtype) * self._factor(theta)
        return self._directions((theta,), theta.dtype)[0].to(theta.dtype)

    def primal_by_formula(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        by_hand = self.method != "polar" and self.form == "direct" and self.precision == "input"
        if not by_hand or wide(theta) is not theta or theta.device.type != "cpu" or not by_formula(theta):
            return self.primal(theta, context)
        require_matrix(self, theta)
        tall = theta.shape[-2] > theta.shape[-1]
        start, schedule = self._begun()
        out = iterated(theta.mT if tall else theta, start, schedule, self._factor(theta))
        return out.mT if tall else out

    def _begun(self) -> tuple[Start, tuple[Triple, ...]]:
        """What the polynomials start at, and their coefficients."""
        if self.method == "newton-schulz":
            return Start(1.0, 0.0, self.eps), (self.coefficients,) * self.steps
        return Start(SAFETY, self.eps, 0.0), polar_express_schedule(self.steps)

    @property
    def launches(self) -> bool:  # type: ignore[override]
        return self.method != "polar"

    @property
    def reads_squares(self) -> bool:  # type: ignore[override]
        return self.precision == "bfloat16" and self.form == "gram"

    def takes_in(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16" else dtype

    def primals(
        self,
        stacks: Sequence[Tensor],
        contexts: Sequence[Context],
        dtype: torch.dtype,
        squares: Sequence[Tensor] | None = None,
        whole: Mapping[int, int] | None = None,
        numbers: Tensor | None = None,
    ) -> list[Tensor]:
        if self.method == "polar":
            return super().primals(stacks, contexts, dtype)
        return self._directions(stacks, dtype, squares, True, whole, numbers)

    def moving(self) -> tuple[float, ...]:
        return (self.eps, *Moving.told(self.coefficients, self.steps)) if self.method == "newton-schulz" else ()

    def _directions(
        self,
        stacks: Sequence[Tensor],
        dtype: torch.dtype,
        squares: Sequence[Tensor] | None = None,
        spend: bool = False,
        whole: Mapping[int, int] | None = None,
        numbers: Tensor | None = None,
    ) -> list[Tensor]:
        """By polynomials. spend: the stacks may be overwritten. numbers: those of `moving`, on the device."""
        tall = [x.shape[-2] > x.shape[-1] for x in stacks]
        wide = [x.mT if t else x for x, t in zip(stacks, tall, strict=True)]
        sizes = [self._factor(x) for x in stacks]
        if self.precision == "bfloat16":
            wide = [x.bfloat16() for x in wide]
        schedule: tuple[Triple, ...] | Moving
        if numbers is not None:
            schedule, start = Moving(numbers[1:], self.steps), Start(1.0, 0.0, numbers[0])
        else:
            start, schedule = self._begun()
        out = iterate(wide, start, schedule, self.form, sizes, dtype, squares, spend, whole)
        return [w.mT if t else w for w, t in zip(out, tall, strict=True)]

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        norm: Tensor = torch.linalg.matrix_norm(wide(w), 2)
        return norm <= self._factor(w) * (1 + tol)

    def _factor(self, leaf: Tensor) -> float:
        return scale_of(self.scale, leaf)


def scale_of(scale: Scale, leaf: Tensor) -> float:
    """The size of an orthogonal step for leaves (..., m, n), see Spectral."""
    m, n = leaf.shape[-2:]
    if scale == "original":
        return math.sqrt(max(1, m / n))
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(m / n) if scale == "spectral" else 1.0


def polar(x: Tensor, tolerance: float) -> Tensor:
    """U V^T of (..., m, n), m <= n, over singular values above tolerance * s_1; NaN where x is not finite."""
    finite = is_finite(x)
    x = torch.where(finite, x, torch.nan)
    u, s, vh = torch.linalg.svd(torch.where(finite, x.detach(), 0.0), full_matrices=False)
    keep = (s > max(tolerance, 8 * torch.finfo(s.dtype).eps) * s[..., :1]) & (s > 0)
    value = torch.where(finite, (u * keep[..., None, :]) @ vh, torch.nan)
    if not torch.is_grad_enabled():
        return value
    # The factor does not depend on the scale of x; at s_1 = 1 the powers of s below cannot overflow.
    top = torch.where(s[..., :1] > 0, s[..., :1], 1.0)
    x = x / top[..., None]
    live = spectral_inverse_power(x @ x.mT, u, (s / top).square(), keep, 0.5) @ x
    return value + (live - live.detach())


def usable(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix that a decomposition takes, and whether (..., 1, 1) it is the given one: the identity if not finite."""
    finite = is_finite(matrix)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.where(finite, matrix, eye), finite


def inverse_power(matrix: Tensor, power: float, eps: float) -> Tensor:
    """(A + eps I)^{-power} of a semi-definite A; with eps = 0 the pseudo-power, rank cut at n * machine eps * l_1.

    Value and both derivatives stay finite where eigenvalues coincide or vanish. NaN where A is not finite.
    """
    matrix, finite = usable(matrix)
    return torch.where(finite, _inverse_power(matrix, power, eps), torch.nan)


def _inverse_power(matrix: Tensor, power: float, eps: float) -> Tensor:
    eigenvalues, basis = decomposed(matrix.detach())
    if eps > 0:
        eigenvalues = eigenvalues.clamp_min(0) + eps
        return spectral_inverse_power(matrix, basis, eigenvalues, eigenvalues > 0, power)
    cut = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * eigenvalues[..., -1:].clamp_min(0)
    return spectral_inverse_power(matrix, basis, eigenvalues, eigenvalues > cut, power)


def spectral_inverse_power(matrix: Tensor, basis: Tensor, spectrum: Tensor, keep: Tensor, power: float) -> Tensor:
    """V f(L) V^T with f(x) = x^{-power} on the kept eigenvalues and 0 on the others, twice differentiable in `matrix`.

    Differentiating the decomposition would divide by gaps between eigenvalues. Instead basis and spectrum are constants
    and the change of `matrix` enters through the first two terms of the Daleckii-Krein expansion,
    f[i,j] D_ij + sum_k f[i,k,j] D_ik D_kj, whose divided differences are finite everywhere. The second one, n^3 numbers
    a matrix, is only made for second derivatives.
    """
    spectrum = torch.where(keep, spectrum, 0.0)
    f = torch.where(keep, torch.where(keep, spectrum, 1.0) ** -power, 0.0)
    if not torch.is_grad_enabled():
        return (basis * f[..., None, :]) @ basis.mT
    return cast(Tensor, _Power.apply(matrix, basis, spectrum, f, keep, power))


class _Power(torch.autograd.Function):
    """V f(L) V^T, with the derivatives of a function of the matrix that V and L decompose."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, basis: Tensor, spectrum: Tensor, f: Tensor, keep: Tensor, power: float) -> Tensor:
        return (basis * f[..., None, :]) @ basis.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.power = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        matrix, basis, spectrum, f, keep = ctx.saved_tensors
        # Differences beyond the range of the dtype become its largest number: infinity times a change of 0 would be NaN
        first = torch.nan_to_num(_first_differences(spectrum, f, keep, ctx.power))
        if not torch.is_grad_enabled():
            found = basis @ (first * (basis.mT @ given @ basis)) @ basis.mT
        else:
            change = basis.mT @ (matrix - matrix.detach()) @ basis  # 0 in value
            second = torch.nan_to_num(_second_differences(spectrum, first, ctx.power))
            change = first * change + torch.einsum("...ikj,...ik,...kj->...ij", second, change, change)
            (found,) = torch.autograd.grad(basis @ change @ basis.mT, matrix, given, create_graph=True)
        return found, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, change: Tensor, *rest: None) -> Tensor:
        _, basis, spectrum, f, keep = ctx.saved_tensors
        first = torch.nan_to_num(_first_differences(spectrum, f, keep, ctx.power))
        return basis @ (first * (basis.mT @ change @ basis)) @ basis.mT


def root_times(x: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """(A + eps I)^{-1/2} x of a semi-definite A (..., n, n), eps > 0, and x (..., n): the root itself is not made.

    Derivatives as those of `inverse_power`. NaN where A is not finite.
    """
    matrix, finite = usable(matrix)
    eigenvalues, basis = decomposed(matrix.detach())
    f = (eigenvalues.clamp_min(0) + eps) ** -0.5
    return torch.where(finite[..., 0], cast(Tensor, _RootTimes.apply(x, matrix, basis, f)), torch.nan)


@final
class _RootTimes(torch.autograd.Function):
    """V f(L) V^T x, f = L^{-1/2}, in the basis V: divided differences of f are -f_i^2 f_j^2 / (f_i + f_j), and what is
    asked of the root is an outer product. Vectors are rows, which BLAS takes sooner."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, basis: Tensor, f: Tensor) -> Tensor:
        turned = (x[..., None, :] @ basis)[..., 0, :]
        ctx.save_for_backward(x, matrix, basis, f, turned)
        return ((f * turned)[..., None, :] @ basis.mT)[..., 0, :]

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix, basis, f, turned = ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(x: Tensor, matrix: Tensor) -> Tensor:
                root = spectral_inverse_power(matrix, basis, f**-2, f > 0, 0.5)
                return (root @ x[..., None])[..., 0]

            return *by_autograd(plain, (x, matrix), (given,)), None, None
        asked = (given[..., None, :] @ basis)[..., 0, :]
        by_x = by_matrix = None
        if ctx.needs_input_grad[0]:
            by_x = ((f * asked)[..., None, :] @ basis.mT)[..., 0, :].sum_to_size(x.shape)
        if ctx.needs_input_grad[1]:
            square = f * f
            change = (asked * -square)[..., :, None] * (turned * square)[..., None, :]
            change /= f[..., :, None] + f[..., None, :]
            by_matrix = (basis @ change @ basis.mT).sum_to_size(matrix.shape)
        return by_x, by_matrix, None, None


def _held_up(matrix: Tensor, eps: float) -> Tensor:
    """A statistic, plus what a ridge of eps lacks of n units of its rounding: smaller eigenvalues are rounding."""
    rounding = matrix.shape[-1] * torch.finfo(matrix.dtype).eps
    trace = (rounding * matrix.detach().diagonal(dim1=-2, dim2=-1)).sum(-1)[..., None, None]
    lacks = (trace - eps).clamp_min(0)
    return matrix + lacks * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def solved(theta: Tensor, matrix: Tensor, eps: float) -> Tensor | None:
    """theta (A + eps I)^{-1} of a semi-definite A, by Cholesky; None where A is so far from it that it has none.

    A recorded step cannot look, nor go another way: what has no factor is not a number there. Nor can transforms of
    torch.func, which are told that there is none."""
    if followed():
        return None
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor, failed = torch.linalg.cholesky_ex(matrix.detach() + eps * eye)
    if failed.is_cuda and torch.cuda.is_current_stream_capturing():
        factor = factor.masked_fill((failed != 0)[..., None, None], torch.nan)
    elif not numberless(failed) and bool(failed.any()):  # without numbers nothing fails
        return None
    return cast(Tensor, _Solved.apply(theta, matrix, factor))


class _Solved(torch.autograd.Function):
    """X = theta A^{-1} by the factor of A: what is asked of theta is one more solve, of A - X^T of that, symmetric."""

    generate_vmap_rule = True

    @staticmethod
    def forward(theta: Tensor, matrix: Tensor, factor: Tensor) -> Tensor:
        # not cholesky_solve: its batches are MAGMA's on a GPU, which cannot be recorded into a graph
        half = torch.linalg.solve_triangular(factor.mT, theta, upper=True, left=False)
        return torch.linalg.solve_triangular(factor, half, upper=False, left=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, matrix, factor = inputs
        ctx.save_for_backward(matrix, factor, output)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        matrix, factor, x = ctx.saved_tensors
        asked = cast(Tensor, _Solved.apply(given, matrix, factor))
        product = x.mT @ asked
        return asked, -0.5 * (product + product.mT), None


def _first_differences(x: Tensor, f: Tensor, keep: Tensor, power: float) -> Tensor:
    """f[i, j] = (f_i - f_j) / (x_i - x_j), -power x^{-power-1} on coincidence; x and f are 0 where not kept."""
    a, b = x[..., :, None], x[..., None, :]
    both = keep[..., :, None] & keep[..., None, :]
    low = torch.where(both, torch.minimum(a, b), 1.0)
    gap = torch.where(both, torch.maximum(a, b), 1.0) / low - 1
    ratio = torch.expm1(-power * torch.log1p(gap)) / torch.where(gap == 0, 1.0, gap)
    close = low ** (-power - 1) * torch.where(gap == 0, -power, ratio)
    total = a + b
    far = (f[..., :, None] + f[..., None, :]) / torch.where(total == 0, 1.0, total)
    return torch.where(both, close, far)


def _second_differences(x: Tensor, first: Tensor, power: float) -> Tensor:
    """f[i, k, j], each from its widest gap; from the second derivative at the mean where all three nearly coincide."""
    i, k, j = x[..., :, None, None], x[..., None, :, None], x[..., None, None, :]
    ik, kj, ij = first[..., :, :, None], first[..., None, :, :], first[..., :, None, :]
    outer, left, right = i - j, i - k, k - j
    widest = torch.maximum(torch.maximum(outer.abs(), left.abs()), right.abs())
    by_left = left.abs() == widest
    by_right = (right.abs() == widest) & ~by_left
    top = torch.where(by_left, ij - kj, torch.where(by_right, ik - ij, ik - kj))
    gap = torch.where(by_left, left, torch.where(by_right, right, outer))
    mean = (i + k + j) / 3
    positive = torch.where(mean > 0, mean, 1.0)
    taylor = torch.where(mean > 0, power * (power + 1) / 2 * positive ** (-power - 2), 0.0)
    same = widest <= 1e-4 * mean
    return torch.where(same, taylor, top / torch.where(same, 1.0, gap))


def over_root(x: Tensor, v: Tensor, power: float, eps: float = 0.0, floor: float = 0.0) -> Tensor:
    """x / max(v^power + eps, floor), 0 where that is 0; value and gradient of the root are 0 where v is 0."""
    if (eps > 0 or floor > 0) and not (v.requires_grad and torch.is_grad_enabled()):
        root = v.clamp_min(0) ** power
        root = root + eps if eps > 0 else root
        return x / (root.clamp_min(floor) if floor > 0 else root)
    root = torch.where(v > 0, torch.where(v > 0, v, 1.0) ** power, 0.0) + eps
    root = root.clamp_min(floor) if floor > 0 else root
    return torch.where(root > 0, x / torch.where(root > 0, root, 1.0), 0.0)


_SIDES: dict[str, tuple[Side, ...]] = {
    "diagonal": ("entries",),
    "centered": ("entries", "entries"),
    "kronecker": ("rows", "columns"),
    "right": ("columns",),
    "full": ("whole",),
}


@final
@dataclass(frozen=True, repr=False)
class Whiten(Geometry):
    """h = half the square of theta's metric, a metric built from statistics: theta times an inverse power of them.

    kind "diagonal": theta / (v^power + eps), or theta / (v + eps)^power with eps_inside; stats (v,), v like theta. The
    denominator is at least `floor`. A power below 0, with eps_inside, colours: theta (v + eps)^-power. "centered": the
    same with the variance v - m^2 in the place of v; stats (v, m).
    "kronecker": L^{-power} theta R^{-power}, stats (L, R). "right": theta R^{-power}, stats (R,).
    "full": the same on the row-major vector of theta, stats (F,), F (..., m n, m n).
    For the matrix kinds eps is added to the eigenvalues, or n units of rounding of their sum where that is more; with
    eps = 0 they are pseudo-powers, and the diagonal kind gives 0 where the denominator is 0. power 1/2 is Adam
    (diagonal), 1/4 or 1/2 Shampoo (kronecker), 1 RLS (right) and the natural gradient (full).

    Source: Kingma and Ba 2015, algorithm 1; Gupta et al. 2018, algorithm 1 (power 1/4). Differs: the exponent is
    explicit, and bias correction belongs to the statistics.
    """

    stats: tuple[Any, ...]
    kind: Literal["diagonal", "centered", "kronecker", "right", "full"] = "diagonal"
    power: float = 0.5
    eps: float = 1e-8
    eps_inside: bool = False
    floor: float = 0.0

    linear = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", tuple(self.stats))
        require(self.kind in _SIDES, self, f"kind {self.kind!r} is not one of {', '.join(_SIDES)}")
        need = len(self.sides)
        require(len(self.stats) == need, self, f"kind {self.kind!r} takes {need} statistic(s), got {len(self.stats)}")
        colours = self.eps_inside and self.eps > 0 and -math.inf < self.power < 0
        message = f"power must be positive and finite, or negative with eps_inside and eps > 0, got {self.power}"
        require(0 < self.power < math.inf or colours, self, message)
        require(0 <= self.eps < math.inf, self, f"eps must be finite and >= 0, got {self.eps}")
        message = f"kind {self.kind!r} always adds eps to the eigenvalues: leave eps_inside at False and floor at 0"
        require(self.entrywise or not self.eps_inside and self.floor == 0.0, self, message)
        require(self.eps > 0 or not self.eps_inside, self, "eps_inside has no effect at eps 0: leave it at False")
        require(0 <= self.floor < math.inf, self, f"floor must be finite and >= 0, got {self.floor}")
        require(self.power > 0 or self.floor == 0.0, self, "a power below 0 has no denominator: leave floor at 0")

    @property
    def sides(self) -> tuple[Side, ...]:  # type: ignore[override]
        return _SIDES[self.kind]

    @property
    def matrix(self) -> bool:  # type: ignore[override]
        return not self.entrywise

    @property
    def entrywise(self) -> bool:  # type: ignore[override]
        return self.kind in ("diagonal", "centered")

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if len(context.stats) != len(self.stats):
            raise IllegalUpdate(f"Whiten: {len(self.stats)} statistic(s) declared, {len(context.stats)} supplied")
        if self.kind == "diagonal":
            return self._diagonal(theta, context.stats[0])
        if self.kind == "centered":
            second, first = context.stats
            return self._diagonal(theta, (second - first * first).clamp_min(0))
        require_matrix(self, theta)
        m, n = theta.shape[-2:]
        sizes = {"kronecker": (m, n), "right": (n,), "full": (m * n,)}[self.kind]
        for size, stat in zip(sizes, context.stats, strict=True):
            if stat.shape[-2:] != (size, size):
                raise ShapeError(
                    f"Whiten: a {self.kind} statistic of theta {(m, n)} must be ({size}, {size}), got "
                    f"{tuple(stat.shape[-2:])}"
                )
        stats = [wide(stat) for stat in context.stats]
        if self.eps > 0:
            stats = [_held_up(stat, self.eps) for stat in stats]
        if self.kind == "right" and self.power == 1.0 and self.eps > 0:
            out = solved(wide(theta), stats[0], self.eps)
            if out is not None:
                return out.to(theta.dtype)
        roots = [inverse_power(stat, self.power, self.eps) for stat in stats]
        x = wide(theta)
        if self.kind == "full":
            return (roots[0] @ x.flatten(-2)[..., None]).reshape(x.shape).to(theta.dtype)
        return (x @ roots[0] if self.kind == "right" else roots[0] @ x @ roots[1]).to(theta.dtype)

    @property
    def by_sides(self) -> bool:  # type: ignore[override]
        return self.kind in ("kronecker", "right")

    def across(self, x: Tensor, stat: Tensor) -> Tensor:
        stat, given = wide(stat), wide(x)
        if self.eps > 0:
            stat = _held_up(stat, self.eps)
        if self.power == 1.0 and self.eps > 0:
            out = solved(given[..., None, :], stat, self.eps)
            if out is not None:
                return out[..., 0, :].to(x.dtype)
        if self.power == 0.5 and self.eps > 0 and by_formula(given, stat):
            return root_times(given, stat, self.eps).to(x.dtype)
        return (inverse_power(stat, self.power, self.eps) @ given[..., None])[..., 0].to(x.dtype)

    def _diagonal(self, theta: Tensor, v: Tensor) -> Tensor:
        if self.power < 0:
            return theta * (v + self.eps) ** -self.power
        if self.eps_inside:
            root = (v.clamp_min(0) + self.eps) ** self.power
            return theta / (root.clamp_min(self.floor) if self.floor > 0 else root)
        return over_root(theta, v, self.power, self.eps, self.floor)
