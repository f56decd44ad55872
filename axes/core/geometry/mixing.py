"""Links from free logits to mixing matrices: doubly stochastic (Sinkhorn, permutations) and orthogonal (Cayley)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from axes.core.geometry.bregman import NO_CONTEXT, Context, Geometry, leaf_dims, require, require_matrix, wide
from axes.core.rates import ORDERED
from axes.errors import ShapeError
from axes.linalg.sinkhorn import sinkhorn


@final
@dataclass(frozen=True, repr=False)
class Birkhoff(Geometry):
    """h = sum W log W on doubly stochastic matrices: Sinkhorn's alternating KL projections of exp(theta).

    theta (..., n, n), W[i, j] the weight of source j in destination i. `iterations` pairs (columns, then rows): row
    sums are exact and all truncation error sits in the column sums. Logs where numbers would leave the range
    (`axes.linalg.sinkhorn`), at least float32, and the result stays that wide, because rounding W to 16 bits biases
    products of many. The gradient is that of the truncated map.
    eps > 0 is what released models compute: it is added to every entry after the first columns, and to every sum that
    is divided by. Rows then sum to 1 - eps or a little less, and where logits saturate W is another matrix: at 1e-6 an
    entry moves by up to 3e-5 with logits of N(0, 1), but by up to 0.35 with 4 N(0, 1) (20 000 draws at n = 4).

    Source: mHC (Xie et al. 2025), section 4.2; eps as in the inference code of DeepSeek-V4. Differs: log domain where
    eps = 0; rows last in the convention above.
    """

    iterations: int = 20
    eps: float = 0.0

    matrix = True
    slice_axis = "whole"

    def __post_init__(self) -> None:
        ok = isinstance(self.iterations, int) and self.iterations >= 1
        require(ok, self, f"iterations must be an integer >= 1, got {self.iterations!r}")
        require(0 <= self.eps < 1, self, f"eps must lie in [0, 1), got {self.eps!r}")

    @property
    def invertible(self) -> bool:  # type: ignore[override]
        return self.eps == 0

    @property
    def is_potential(self) -> bool:  # type: ignore[override]
        return self.eps == 0

    @property
    def sinkhorn(self) -> tuple[int, float]:  # type: ignore[override]
        return self.iterations, self.eps

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        require_matrix(self, theta, square=True)
        z = wide(theta)
        return self._floored(z) if self.eps else sinkhorn(z, self.iterations)

    def _floored(self, z: Tensor) -> Tensor:
        """Entries are at least eps after the first columns, so that no sum vanishes and logs are not needed."""
        w = z.softmax(-2) + self.eps
        for done in range(self.iterations):
            w = w / (w.sum(-2, keepdim=True) + self.eps) if done else w
            w = w / (w.sum(-1, keepdim=True) + self.eps)
        return w

    def dual(self, w: Tensor) -> Tensor:
        # One of many: theta is defined up to a constant per row and per column.
        return w.clamp_min(torch.finfo(w.dtype).tiny).log()

    def potential(self, w: Tensor) -> Tensor:
        return (w * self.dual(w)).sum((-2, -1))

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        return is_doubly_stochastic(w, tol)


@final
@dataclass(frozen=True, repr=False)
class Permutations(Geometry):
    """W = sum_p softmax(theta)_p P_p over all n! permutation matrices: doubly stochastic with nothing to converge.

    theta (..., n!), the permutations in the order of their words (the identity first), P_p[i, p(i)] = 1 with i the
    destination and p(i) the source. Row and column sums are 1 to rounding at any logits, and every doubly stochastic
    matrix with positive weights is reached (Birkhoff and von Neumann), by many theta: there is no inverse. At least
    float32, and the result stays that wide. A link of `GeneralLinear`, no h of a state: theta is no matrix.

    Source: mHC-lite (Yang and Gao 2026). Differs: sums row by row, without a table of the n! matrices.
    """

    is_potential = False
    logits = "permutation"

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        n = _ORDERS.get(theta.shape[-1] if theta.ndim else 0)
        if n is None:
            raise ShapeError(
                f"{self!r} takes a logit for every permutation (..., n!), n <= {ORDERED}, got {tuple(theta.shape)}"
            )
        return _mixture(wide(theta).softmax(-1), n)

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        return is_doubly_stochastic(w, tol)

    def identity_logits(self, like: Tensor, low: float) -> Tensor:
        logits = like.new_full((math.factorial(like.shape[-1]),), low)
        logits[0] = 0.0
        return logits


_ORDERS = {math.factorial(n): n for n in range(1, ORDERED + 1)}


def _mixture(weights: Tensor, n: int) -> Tensor:
    """sum_p weights_p P_p (..., n, n) of weights (..., n!): the first source, then what is left of the permutation."""
    if n == 1:
        return weights[..., None]
    blocks = weights.unflatten(-1, (n, -1))  # by the source of the first destination
    left = _mixture(blocks, n - 1)
    source, other, place = (torch.arange(m, device=weights.device) for m in (n, n - 1, n))
    skipped = other + (other >= source[:, None])  # (source, other): the others without that source
    rest = torch.einsum("...sij,sjk->...ik", left, (skipped[..., None] == place).to(weights.dtype))
    return torch.cat((blocks.sum(-1)[..., None, :], rest), -2)


def is_doubly_stochastic(w: Tensor, tol: float) -> Tensor:
    """Whether matrices have no negative entry and unit row and column sums, up to tol: bool (...)."""
    error = torch.maximum((w.sum(-1) - 1).abs().amax(-1), (w.sum(-2) - 1).abs().amax(-1))
    return (error <= tol) & (w >= -tol).all(leaf_dims(w))


@final
@dataclass(frozen=True, repr=False)
class Cayley(Geometry):
    """W = (I + A)^{-1} (I - A) with A = -(scale/2) (theta - theta^T): a chart of SO(n) without the eigenvalue -1.

    A retraction, not the nearest orthogonal matrix (that is `Spectral(method="polar")`); theta = 0 gives I.
    kind "mean-preserving" rotates only the complement of the all-ones vector, which W and W^T then both fix.
    method "closed" needs no linear solve, for rotated dimension up to 4 (n <= 4, or n <= 5 mean-preserving).
    theta (..., n, n); at least float32, and the result stays that wide.

    Source: JPmHC (Sengupta et al. 2026), the map whose two-step fixed point they iterate with scale = alpha. Differs:
    exact, hence orthogonal at any scale; the mean-preserving kind and the closed forms are ours.
    """

    scale: float = 1.0
    kind: Literal["full", "mean-preserving"] = "full"
    method: Literal["solve", "closed"] = "solve"

    invertible = True
    is_potential = False
    matrix = True

    def __post_init__(self) -> None:
        require(0 < self.scale < math.inf, self, f"scale must be positive and finite, got {self.scale}")
        require(self.kind in ("full", "mean-preserving"), self, f"kind {self.kind!r} is not full or mean-preserving")
        require(self.method in ("solve", "closed"), self, f"method {self.method!r} is not solve or closed")

    @property
    def rotation(self) -> tuple[float, bool]:  # type: ignore[override]
        return self.scale, self.kind == "mean-preserving"

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        require_matrix(self, theta, square=True)
        z = wide(theta)
        skew = (z.mT - z) * (self.scale / 2)
        if self.kind == "full":
            return self._rotation(skew)
        basis = helmert(z.shape[-1], z)
        inner = self._rotation(basis.mT @ skew @ basis)
        return basis @ inner @ basis.mT + 1 / z.shape[-1]

    def dual(self, w: Tensor) -> Tensor:
        eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
        skew = torch.linalg.solve(eye + w, eye - w)
        return (skew.mT - skew) / (2 * self.scale)

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
        inside = ((w @ w.mT - eye).abs() <= tol).all(leaf_dims(w)) & (torch.linalg.det(w) > 0)
        if self.kind == "full":
            return inside
        return inside & ((w.sum(-1) - 1).abs() <= tol).all(-1)

    def _rotation(self, skew: Tensor) -> Tensor:
        n = skew.shape[-1]
        eye = torch.eye(n, dtype=skew.dtype, device=skew.device)
        if self.method == "solve":
            # I + A is never singular: skipping the check saves a synchronisation with the device.
            rotation: Tensor = torch.linalg.solve_ex(eye + skew, eye - skew)[0]
            return rotation
        if n > 4:
            raise ShapeError(
                f"{self!r}: no closed form for a rotation of {n} dimensions, at most 4: use method='solve'"
            )
        # Cayley-Hamilton: A^4 + p A^2 + q I = 0, q the squared Pfaffian (0 below four dimensions).
        square = skew @ skew
        p = skew.square().sum((-2, -1), keepdim=True) / 2
        q = pfaffian(skew).square() if n == 4 else torch.zeros_like(p)
        return 2 * (eye - skew) @ ((1 + p) * eye + square) / (1 + p + q) - eye


def pfaffian(skew: Tensor) -> Tensor:
    """Pfaffian of skew 4 x 4 matrices, as (..., 1, 1)."""
    a = skew[..., 0, 1] * skew[..., 2, 3] - skew[..., 0, 2] * skew[..., 1, 3] + skew[..., 0, 3] * skew[..., 1, 2]
    return a[..., None, None]


def helmert(n: int, like: Tensor) -> Tensor:
    """Orthonormal basis (n, n - 1) of the complement of the all-ones vector."""
    i = torch.arange(n, dtype=like.dtype, device=like.device)[:, None]
    j = torch.arange(1, n, dtype=like.dtype, device=like.device)
    return ((i < j).to(like.dtype) - j * (i == j)) / (j * (j + 1)).sqrt()
