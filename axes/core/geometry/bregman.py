"""The contract of a generating function h: its link, its constraint set, its divergence.

h = h0 + r on a set C, with h0 smooth and r an indicator or a penalty:

    primal(theta) = grad h*(theta) = argmax_{W in C} <theta, W> - h(W)
    dual(W)       = grad h0(W)
    D_h(W, W')    = h(W) - h(W') - <s, W - W'>,  s a subgradient of h at W'

Then `primal(theta_0 + u)` minimises -<u, W> + D_h(W, W_0), where theta_0 is any subgradient at W_0 (lazy), and
`primal(dual(W_0) + u)` minimises -<u, W> + D_h0(W, W_0) + r(W) (agile: composite mirror descent). When r is an
indicator, `primal(dual(W)) = W` for every W that primal can return. The two differ only where primal forgets part of
theta, that is where h projects (indicator of a curved set) or proximates (penalty).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from axes.core.costs import Side
from axes.core.declared import Declared
from axes.core.rates import Per, Rate, Shape, Signal
from axes.errors import IllegalUpdate, ShapeError
from axes.linalg.matrix_roots import largest_entry

Slice = Literal["row", "column", "whole"]
Made = Literal["root", "basis", "factors"]
TINY = 1e-24  # added to the square of a length that is divided by
SphereOf = tuple[Literal["rows", "columns", "whole"], float | None]


class Context(NamedTuple):
    """What a link may read besides theta.

    drive: the raw drive u, before any filter. stats: values of `h.stats`, in order.
    weights: the outer W (for a link that sits on a filter). signal: the datum.
    """

    drive: Tensor | None = None
    stats: tuple[Tensor, ...] = ()
    weights: Tensor | None = None
    signal: Signal = {}


NO_CONTEXT = Context()


class Geometry(Declared, ABC):
    """A generating function h; its capabilities are attributes, so that legality can be decided from the tuple alone.

    invertible: dual(primal(theta)) = theta up to a gauge of primal, so that lazy and agile coincide.
    is_potential: primal is the gradient of some h*. is_identity: primal(theta) = theta.
    linear: primal is linear in theta, given the context. scale_free: primal(c theta) = primal(theta) for c > 0.
    matrix: a leaf needs two axes. slice_axis: gates must be constant on this slice of theta (None: no condition).
    stats: the statistics (state updates) whose values arrive as `context.stats`. sides: what each of them has the shape
    of; () for no condition. takes: what the h of the first two must make of them. makes: what this h makes of a
    statistic of rows or columns, or of a state, which it is then the h of. continues: from its last value, which has to
    be held. fitted: that value is moved until what it whitens is white.
    turns: primal(theta Q) = primal(theta) Q for isometries Q of the keys, of any number: an outer product stays one.
    entrywise: an entry of primal(theta) is a function of that entry of theta and of the context's entries there.
    approximates: primal shows a part of theta, which `used` gives: the rest can be kept.
    reads: what else of the context primal needs, of "drive" and "weights".
    tells: the rate that an axis makes for the next datum, of what statistics come to over all leaves: `told`, `number`.
    sphere: where primal only rescales, what it rescales to one length and that length (None: the root of its entries);
        `TINY` is added to squares of lengths.
    sinkhorn: how many pairs of normalisations of e^theta primal is, of columns and then of rows, and what is added to
        their sums, if it is that.
    rotation: where primal is the Cayley map of scale / 2 (theta^T - theta), scale and whether that is centred first.
    logits: the shape of what primal makes a matrix of, where that is no matrix: a link of `GeneralLinear` alone.
    launches: what `primals` does is launches alone, which shapes decide: on a GPU it can be recorded.
    reads_squares: `primals` reads sums of squares if they are given.
    by_sides: primal(theta) is a product A theta B with a matrix for each of `sides`, symmetric, made of its statistic:
        `across` multiplies vectors with one of them.
    """

    stats: tuple[Any, ...] = ()
    sides: tuple[Side, ...] = ()
    takes: Made | None = None
    makes: Made | None = None
    continues: bool = False
    fitted: bool = False
    invertible: bool = False
    is_potential: bool = True
    is_identity: bool = False
    linear: bool = False
    scale_free: bool = False
    matrix: bool = False
    slice_axis: Slice | None = None
    turns: bool = False
    entrywise: bool = False
    approximates: bool = False
    reads: frozenset[str] = frozenset()
    tells: Per | None = None
    sphere: SphereOf | None = None
    sinkhorn: tuple[int, float] | None = None
    rotation: tuple[float, bool] | None = None
    logits: Shape = "mix"
    launches: bool = False
    reads_squares: bool = False
    by_sides: bool = False

    @abstractmethod
    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """grad h*(theta) on C, leaf by leaf; theta (..., d_v, d_k)."""

    def primal_by_formula(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """The same numbers, for routes: with derivatives by a formula where autograd's own operations are many."""
        return self.primal(theta, context)

    def primals(
        self,
        stacks: Sequence[Tensor],
        contexts: Sequence[Context],
        dtype: torch.dtype,
        squares: Sequence[Tensor] | None = None,
        whole: Mapping[int, int] | None = None,
    ) -> list[Tensor]:
        """`primal` of several stacks (N_i, m_i, n_i), which may be overwritten, in `dtype` or in that of its products.

        squares: of each stack (N_i, any number), sums of squares of parts of its matrices, where they are known.
        whole: by shorter side, how many matrices products are chosen for.
        """
        return [self.primal(x, context) for x, context in zip(stacks, contexts, strict=True)]

    def moving(self) -> tuple[float, ...]:
        """The numbers that recorded `primals` can read from a tensor, `numbers`, given them: others at every replay."""
        return ()

    def takes_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which `primals` wants its stacks, where their entries have this one."""
        return dtype

    def used(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """The part of theta that primal shows, for an h that approximates; what is left is its error."""
        return self.primal(theta, context)

    def empty(self, theta: Tensor) -> Tensor:
        """What is held of a statistic like theta before its first datum."""
        return torch.zeros_like(theta)

    def refreshed(self, theta: Tensor, held: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        """The value of a matrix theta to be held after `held`, and whether (..., 1, 1) it is a new one: only numbers
        are taken."""
        new = self.primal(theta, context)
        good = is_finite(new)
        return torch.where(good, new, held), good

    def across(self, x: Tensor, stat: Tensor) -> Tensor:
        """For an h that acts by sides: A x of vectors (..., n), A made of a statistic (..., n, n) of either side."""
        raise IllegalUpdate(f"{self!r} is no product with a matrix for every side")

    def told(self, stats: tuple[Tensor, ...]) -> Tensor:
        """For an h that tells: what a leaf contributes (..., n), from its statistics; axes add it up over leaves."""
        raise IllegalUpdate(f"{self!r} tells its axis nothing")

    def number(self, told: Tensor, last: Tensor) -> Tensor:
        """For an h that tells: (..., k), the rate first, from the sum of what was told and the last ones."""
        raise IllegalUpdate(f"{self!r} tells its axis nothing")

    def began(self) -> tuple[float, ...]:
        """For an h that tells: the numbers (k) before the first datum."""
        raise IllegalUpdate(f"{self!r} tells its axis nothing")

    def dual(self, w: Tensor) -> Tensor:
        """Gradient of the smooth part of h at w; IllegalUpdate where there is none."""
        raise IllegalUpdate(f"{self!r} has no inverse link: keep theta as the state (lazy), or take an h that has one")

    def subgradient(self, w: Tensor) -> Tensor:
        """A subgradient of the whole h at w: primal(subgradient(w)) = w."""
        return self.dual(w)

    def potential(self, w: Tensor) -> Tensor:
        """h(w), summed over a leaf: (...); IllegalUpdate where h has no value of its own."""
        raise IllegalUpdate(f"{self!r} has no potential: it is an operator, or it depends on statistics")

    def divergence(self, w: Tensor, other: Tensor) -> Tensor:
        """Bregman divergence D_h(w, other) >= 0, zero only at w = other; both in C; (...)."""
        slope = (self.subgradient(other) * (w - other)).sum(leaf_dims(w))
        return self.potential(w) - self.potential(other) - slope

    def contains(self, w: Tensor, tol: float = 1e-6) -> Tensor:
        """Whether w lies in C up to tol: bool (...)."""
        return torch.isfinite(w).all(leaf_dims(w)) if w.ndim else torch.isfinite(w)

    def rates(self) -> tuple[Rate, ...]:
        """The numbers of the datum that this h reads: those that an axis supplies, and formulas."""
        return ()

    def neutral(self) -> dict[str, float]:
        """The values of its named rates, by name, at which primal leaves theta as it is; others have no such value."""
        return {}

    def identity_logits(self, like: Tensor, low: float) -> Tensor:
        """Logits whose primal is the identity matrix (n, n), in the shape that primal takes; like: (n).

        Logits beyond `low` and -low are cut there: where the exact ones are infinite, the matrix comes close.
        """
        eye = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
        return self.dual(eye).clamp(low, -low)

    def links(self) -> Iterator[Geometry]:
        """The link and those it is made of, outermost first."""
        yield self

    def with_stats(self, stats: tuple[Any, ...]) -> Self:
        """The same h on other statistics, one for each of its own."""
        return dataclasses.replace(self, stats=stats) if stats else self  # type: ignore[type-var]


class EuclideanOn(Geometry):
    """h = |W|^2 / 2 plus an indicator or a penalty: primal is a projection (or a prox) and dual the identity."""

    def dual(self, w: Tensor) -> Tensor:
        return w

    def potential(self, w: Tensor) -> Tensor:
        return w.square().sum(leaf_dims(w)) / 2


def is_finite(matrix: Tensor) -> Tensor:
    """Whether every entry of a matrix is, (..., 1, 1)."""
    return largest_entry(matrix.detach()).isfinite()


def leaf_dims(leaf: Tensor) -> tuple[int, ...]:
    """The axes of one leaf: the last two of a matrix, the only one of a vector."""
    return (-2, -1) if leaf.ndim >= 2 else tuple(range(leaf.ndim))


def wide(x: Tensor) -> Tensor:
    """At least float32: 16-bit inputs are too coarse for norms, roots and normalisers."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def require_matrix(h: Geometry, theta: Tensor, square: bool = False) -> None:
    """ShapeError unless theta is a (batch of) matrices, square ones if asked."""
    if theta.ndim < 2 or (square and theta.shape[-1] != theta.shape[-2]):
        kind = "square matrices (..., n, n)" if square else "matrices (..., m, n)"
        raise ShapeError(f"{h!r} acts on {kind}, got shape {tuple(theta.shape)}")


def require(condition: bool, owner: object, message: str) -> None:
    """IllegalUpdate that names the class, what was given and what is allowed."""
    if not condition:
        raise IllegalUpdate(f"{type(owner).__name__}: {message}")


def leaf_size(x: Tensor) -> Tensor:
    """Euclidean norm of a leaf, kept; 0 with gradient 0 at 0."""
    square = wide(x).square().sum(leaf_dims(x), keepdim=True)
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)
