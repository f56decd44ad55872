"""Memories: what the state is a parameter of. Each predicts from a key, pulls a cotangent back, and is read.

Leaves are the tensors of the state. predict(W, x) is what the cost sees; vjp(W, x, r) is the gradient of
<predict(W, x), r> in W, the only derivative the core needs; read(W, q) is what the layer returns.
Legend: ... batch, d_k key, d_v value, f hidden width, n stored items.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from axes.core.declared import Declared
from axes.core.geometry import Geometry
from axes.core.monoids import Element, rotate
from axes.core.rates import Per, Rate, Shape, Signal, resolve, spread
from axes.errors import IllegalUpdate
from axes.linalg.krylov import conjugate_gradients, inverse_root_shifts, shifted_gradients

__all__ = [
    "BoundedList",
    "Correlation",
    "Entries",
    "Fenwick",
    "Kernel",
    "LayerNormMatrix",
    "List",
    "MLP",
    "Matrix",
    "Memory",
    "Parameter",
    "RankOne",
    "Regression",
    "Slots",
    "Solved",
]

Kind = Literal["matrix", "entries", "slots", "parameter", "list", "bounded", "regression", "levels", "network"]
Leaves = tuple[Tensor, ...]
Factors = tuple[tuple[Tensor, Tensor], ...]


def outer(column: Tensor, row: Tensor) -> Tensor:
    """column row^T: (..., m), (..., n) -> (..., m, n)."""
    return column[..., :, None] * row[..., None, :]


def times(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix x: (..., m, n), (..., n) -> (..., m)."""
    if x.shape[-1] == 1 and isinstance(matrix, Tensor):
        # a residual stream: the same bits, and a product of one column is ten times as slow on a GPU
        return matrix[..., 0] * x
    return (matrix @ x[..., None])[..., 0]


class Memory(Declared, ABC):
    """A container with a prediction map. `linear`: predict is linear in W; `keyed`: it predicts from keys at all.

    kind: "matrix" is one leaf (d_v, d_k) that predicts W k, under "entries" each of its entries predicts alone, under
    "slots" the direction of each column; a "parameter" is one leaf that predicts nothing; a "list" keeps every datum,
    a "bounded" one as much of them as it has slots; a "regression" is read through a solve; "levels" are matrices of
    ever longer stretches of data; a "network" is any other function of the key.
    scored: h acts on what keys score when it is read (lists, bounded ones).
    """

    kind: ClassVar[Kind] = "network"
    linear: ClassVar[bool] = True
    keyed: ClassVar[bool] = True
    matrix_gates: ClassVar[bool] = True  # right actions on the key side are defined
    filterable: ClassVar[bool] = True  # drives have the shape of the leaves, so filters can hold them
    one_leaf: ClassVar[bool] = True
    starts_at_zero: ClassVar[bool] = True  # an empty one is zero
    scored: ClassVar[bool] = False

    @abstractmethod
    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        """The prediction for input x; encode=True predicts the key from the value (S^T v)."""

    @abstractmethod
    def vjp(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Leaves:
        """Gradient of <predict(W, x), r> in each leaf."""

    @abstractmethod
    def zeros(self, signal: Signal) -> Leaves:
        """An empty memory with the batch shape, dtype and device of the signal's keys and values."""

    def read(self, leaves: Leaves, q: Tensor, signal: Signal, h: Geometry) -> Tensor:
        return self.predict(leaves, q, signal)

    def act(self, element: Element, leaves: Leaves) -> Leaves:
        return tuple(element.act(leaf) for leaf in leaves)

    def add(self, leaves: Leaves, rate: Tensor | float, shape: Shape, drive: Leaves) -> Leaves:
        """theta + rate * u, the rate spread over the leaves."""
        step = spread(rate, shape)
        if isinstance(step, float) and leaves[0].is_cuda:  # one pass over memory; on a CPU the bits would differ
            return tuple(torch.add(leaf, u, alpha=step) for leaf, u in zip(leaves, drive, strict=True))
        return tuple(leaf + step * u for leaf, u in zip(leaves, drive, strict=True))

    def unread(self, leaves: Leaves) -> Leaves:
        """The normaliser of an empty memory: the response of a row to unit values."""
        return tuple(leaf[..., :1, :] * 0 for leaf in leaves)

    def respond(self, norm: Tensor, rate: Tensor | float, shape: Shape, unit: Tensor) -> Tensor:
        """A normaliser after a unit value. unit: (..., 1, d_k), the key as a row, where there is one."""
        return self.add((norm,), rate, shape, (unit,))[0]

    def read_over(self, leaves: Leaves, norm: Leaves, q: Tensor, signal: Signal, h: Geometry, floor: float) -> Tensor:
        """What is read over what its normaliser reads, or over max(|.|, floor)."""
        return normalised(self.read(leaves, q, signal, h), self.read(norm, q, signal, h), floor)

    def sharpness(self, x: Tensor) -> Tensor:
        """How much the prediction moves per unit step along its own gradient: |k|^2 for a matrix (implicit steps)."""
        return (x * x).sum(-1, keepdim=True)

    def recalled(self, leaves: Leaves, x: Tensor, signal: Signal, h: Geometry) -> Tensor:
        """What a scored memory gives for the key of a datum, whose error is asked for: what is read, or by another
        kernel."""
        return self.read(leaves, x, signal, h)

    def rates(self) -> tuple[Rate, ...]:
        return ()

    @property
    def upper(self) -> Memory | None:
        """Of a network of two layers, the memory that the upper one is of hidden units, else None."""
        return None

    @property
    def free(self) -> frozenset[str]:
        """Names of rates that a signal may leave out."""
        return frozenset(r.name for r in self.rates() if isinstance(r, Per))


def normalised(y: Tensor, mass: Tensor, floor: float) -> Tensor:
    """What is read over its mass, or over max(|mass|, floor); an empty memory reads zero, not NaN."""
    if floor:
        return y / mass.abs().clamp_min(floor)
    return torch.where(mass == 0, torch.zeros_like(y), y / torch.where(mass == 0, torch.ones_like(mass), mass))


def mean_gate(log: Tensor, dim: int, keepdim: bool = True) -> Tensor:
    """The log of the mean of gates, of their logs: finite, with finite derivatives, where all of them are shut."""
    shut = torch.finfo(log.dtype).min
    return torch.logsumexp(log.clamp_min(shut), dim, keepdim) - math.log(log.shape[dim])


def inverse_length(square: Tensor) -> Tensor:
    """1/|s| of |s|^2; 0 where that is below the smallest normal number, and 1/|s|^2 beyond the largest."""
    short = square < torch.finfo(square.dtype).tiny
    return torch.where(short, 0.0, torch.rsqrt(torch.where(short, 1.0, square)))


def directions(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Vectors at unit length, and 1/length with `dim` kept; zero has direction zero, not NaN.

    Derivatives are those of vectors that a constant brings to unit length first: of their own square a power of -3/2
    would leave the dtype long before 1/length^2, the largest that a derivative is.
    """
    scale = inverse_length((x * x).sum(dim, keepdim=True)).detach()
    unit = x * scale
    square = (unit * unit).sum(dim, keepdim=True)
    again = torch.rsqrt(torch.where(square == 0, 1.0, square))
    return unit * again, scale * again


class RankOne(Memory):
    """A memory whose gradient is one outer product per leaf and datum: fast routes keep the two factors."""

    @abstractmethod
    def factors(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Factors:
        """(column, row) of each leaf's gradient: vjp = column row^T."""

    def vjp(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Leaves:
        return tuple(outer(column, row) for column, row in self.factors(leaves, x, r, signal, encode=encode))


@final
@dataclass(frozen=True, repr=False)
class Matrix(RankOne):
    """S (d_v, d_k), predict S k, read S q; streams are the same with S = X^T."""

    kind: ClassVar[Kind] = "matrix"

    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        return times(leaves[0].mT if encode else leaves[0], x)

    def factors(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Factors:
        return ((x, r),) if encode else ((r, x),)

    def zeros(self, signal: Signal) -> Leaves:
        return (_empty(signal),)


@final
@dataclass(frozen=True, repr=False)
class Slots(Memory):
    """S whose columns are slots of which only the direction counts: predict Phi k, Phi = S / column norms (Lattice).

    The gradient of a column is P(s) g / |s| with P(s) = I - s s^T / |s|^2 (lattice.md 2.2). Read is S q.
    """

    kind: ClassVar[Kind] = "slots"
    linear: ClassVar[bool] = False
    starts_at_zero: ClassVar[bool] = False

    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        phi, _ = directions(leaves[0], -2)
        return times(phi.mT if encode else phi, x)

    def vjp(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Leaves:
        phi, inverse_norm = directions(leaves[0], -2)
        h, c = (x, r) if encode else (r, x)
        overlap = phi.mT @ h[..., None]  # (..., d_k, 1): each slot's share of h
        tangent = h[..., :, None] - phi * overlap.mT
        return (tangent * (c[..., None, :] * inverse_norm),)

    def read(self, leaves: Leaves, q: Tensor, signal: Signal, h: Geometry) -> Tensor:
        return times(leaves[0], q)

    def zeros(self, signal: Signal) -> Leaves:
        """Slots have no direction at zero: the empty memory has orthonormal columns, or fixed random unit ones if
        d_k > d_v (equal slots would stay equal). Which orthonormal ones does not matter: a rotation of the values
        turns one choice into any other."""
        state = _empty(signal)
        d_v, d_k = state.shape[-2:]
        columns = torch.eye(d_v, d_k, dtype=torch.float64, device=state.device)  # a captured step copies nothing there
        if d_k > d_v:
            columns = torch.randn(d_v, d_k, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            columns = columns / columns.norm(dim=0)
        return (state + columns.to(state),)


@final
@dataclass(frozen=True, repr=False)
class Entries(Memory):
    """S entry by entry: each S_ij alone predicts v_i from k_j (diagonal Longhorn).

    The step's sharpness is the full |k|^2, as in Longhorn's Algorithm 1; longhorn.md 2.4 and 2.8 say what that solves.
    """

    kind: ClassVar[Kind] = "entries"

    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        return leaves[0] * x[..., None, :]

    def vjp(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Leaves:
        return (r * x[..., None, :],)

    def read(self, leaves: Leaves, q: Tensor, signal: Signal, h: Geometry) -> Tensor:
        return times(leaves[0], q)

    def sharpness(self, x: Tensor) -> Tensor:
        return (x * x).sum(-1, keepdim=True)[..., None]

    def zeros(self, signal: Signal) -> Leaves:
        return (_empty(signal),)


@final
@dataclass(frozen=True, repr=False)
class Parameter(Memory):
    """A tensor of any shape whose gradient is given: a network's weight on the data axis, or a filter's buffer."""

    kind: ClassVar[Kind] = "parameter"
    keyed: ClassVar[bool] = False
    starts_at_zero: ClassVar[bool] = False  # but at the weights it is given

    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        raise IllegalUpdate("Parameter memory predicts nothing: its cost must be Given or Linear")

    def vjp(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Leaves:
        raise IllegalUpdate("Parameter memory predicts nothing: its cost must be Given or Linear")

    def zeros(self, signal: Signal) -> Leaves:
        g = signal["g"]
        if not isinstance(g, Tensor):
            raise IllegalUpdate("Parameter memory: the signal's gradient 'g' must be a tensor")
        return (torch.zeros_like(g),)


@final
@dataclass(frozen=True, repr=False)
class LayerNormMatrix(RankOne):
    """predict x + LN(W x), LN with a slow gain and bias (TTT-Linear); d_v = d_k."""

    eps: float = 1e-6
    gain: Per = Per("ln_gain", "row", "real")
    bias: Per = Per("ln_bias", "row", "real")
    linear: ClassVar[bool] = False
    matrix_gates: ClassVar[bool] = False

    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        gain, bias = _affine(self, signal)
        return x + gain * _normalise(times(leaves[0], x), self.eps)[0] + bias

    def factors(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Factors:
        gain, _ = _affine(self, signal)
        return ((_normalise_vjp(times(leaves[0], x), gain * r, self.eps), x),)

    def zeros(self, signal: Signal) -> Leaves:
        return (_empty(signal),)

    def rates(self) -> tuple[Rate, ...]:
        return (self.gain, self.bias)


@final
@dataclass(frozen=True, repr=False)
class MLP(RankOne):
    """predict x + LN(W1 gelu(W2 x)), W2 (f d, d), W1 (d, f d): the two-layer memory of TTT-MLP, Titans and Miras.

    Row rates (d) act on the rows of W1; W2, whose rows are hidden units, takes their mean.
    """

    expansion: int = 4
    eps: float = 1e-6
    gain: Per = Per("ln_gain", "row", "real")
    bias: Per = Per("ln_bias", "row", "real")
    linear: ClassVar[bool] = False
    matrix_gates: ClassVar[bool] = False
    one_leaf: ClassVar[bool] = False
    starts_at_zero: ClassVar[bool] = False

    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        gain, bias = _affine(self, signal)
        w1, w2 = leaves
        hidden = torch.nn.functional.gelu(w2 @ x[..., None])
        return x + gain * _normalise((w1 @ hidden)[..., 0], self.eps)[0] + bias

    def factors(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Factors:
        gain, _ = _affine(self, signal)
        w1, w2 = leaves
        z = times(w2, x)
        hidden = torch.nn.functional.gelu(z)
        du = _normalise_vjp(times(w1, hidden), gain * r, self.eps)
        dz = times(w1.mT, du) * _gelu_slope(z)
        return (du, hidden), (dz, x)

    def act(self, element: Element, leaves: Leaves) -> Leaves:
        if element.outer is None:
            return tuple(element.act(leaf) for leaf in leaves)
        mean = Element(element.scale, element.gate, outer=mean_gate(element.outer, -2))
        return element.act(leaves[0]), mean.act(leaves[1])

    def add(self, leaves: Leaves, rate: Tensor | float, shape: Shape, drive: Leaves) -> Leaves:
        step = spread(rate, shape)
        mean = step.mean(-2, keepdim=True) if shape == "row" and isinstance(step, Tensor) and step.ndim else step
        return leaves[0] + step * drive[0], leaves[1] + mean * drive[1]

    def zeros(self, signal: Signal) -> Leaves:
        """Small, symmetry-breaking weights from a fixed generator: zero weights would pass no gradient."""
        empty = _empty(signal)
        d = empty.shape[-1]
        generator = torch.Generator().manual_seed(0)
        shapes = ((d, self.expansion * d), (self.expansion * d, d))
        transformed = torch._C._are_functorch_transforms_active()  # for vmap these are no random numbers
        with torch._C._DisableFuncTorch() if transformed else nullcontext():
            draws = [torch.randn(s, generator=generator, dtype=torch.float64) / math.sqrt(s[1]) for s in shapes]
        return tuple(w.to(empty).expand(*empty.shape[:-2], *w.shape) for w in draws)

    @property
    def upper(self) -> Memory:
        return LayerNormMatrix(self.eps, self.gain, self.bias)

    def rates(self) -> tuple[Rate, ...]:
        return (self.gain, self.bias)


@final
@dataclass(frozen=True, repr=False)
class BoundedList(Memory):
    """As many pairs as there are slots: leaves (keys (m, d_k), values (m, d_v)), every datum written to all of them.

    read: sum_i p_i v_i with p = grad h*(scale * K q) over the m slots, as of a list. Gates and rates are scalars or one
    for every slot, Per(name, "own", size=slots): they say what a slot keeps, and how much of a datum it takes.
    Debiased, a slot is a weighted mean of keys, and of values. scale: None means d_k^(-1/2).
    """

    slots: int = 64
    scale: float | None = 1.0
    kind: ClassVar[Kind] = "bounded"
    filterable: ClassVar[bool] = False
    one_leaf: ClassVar[bool] = False
    scored: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise IllegalUpdate(f"BoundedList: a memory has at least one slot, got {self.slots}")

    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        raise IllegalUpdate("BoundedList memory is read through its geometry: call read")

    def read(self, leaves: Leaves, q: Tensor, signal: Signal, h: Geometry) -> Tensor:
        keys, values = leaves
        return times(values.mT, self.weights(times(keys, q), q.shape[-1], h))

    def weights(self, scores: Tensor, d_k: int, h: Geometry) -> Tensor:
        """What h makes of scores (..., m)."""
        scores = scores * (d_k**-0.5 if self.scale is None else self.scale)
        return scores if h.is_identity else h.primal(scores.unsqueeze(-2)).squeeze(-2)

    def read_over(self, leaves: Leaves, norm: Leaves, q: Tensor, signal: Signal, h: Geometry, floor: float) -> Tensor:
        return self.read(tuple(normalised(leaf, norm[0], floor) for leaf in leaves), q, signal, h)

    def unread(self, leaves: Leaves) -> Leaves:
        return (leaves[0][..., :1] * 0,)

    def respond(self, norm: Tensor, rate: Tensor | float, shape: Shape, unit: Tensor) -> Tensor:
        return norm + self._by_slot(rate, shape)

    def vjp(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Leaves:
        return r, x

    def add(self, leaves: Leaves, rate: Tensor | float, shape: Shape, drive: Leaves) -> Leaves:
        value, key = drive
        step = self._by_slot(rate, shape)
        return leaves[0] + step * key[..., None, :], leaves[1] + step * value[..., None, :]

    def _by_slot(self, rate: Tensor | float, shape: Shape) -> Tensor | float:
        """Against (..., m, n)."""
        if not isinstance(rate, Tensor) or not rate.ndim:
            return rate
        return rate[..., :, None] if shape == "own" else rate[..., None, None]

    def zeros(self, signal: Signal) -> Leaves:
        k, v = _vectors(signal)
        batch = torch.broadcast_shapes(k.shape[:-1], v.shape[:-1])
        return tuple(x.new_zeros(*batch, self.slots, x.shape[-1]) for x in (k, v))


@final
@dataclass(frozen=True, repr=False)
class Fenwick(Memory):
    """Matrices of ever longer stretches of data, a level each, that a read weighs: o = sum_l w_l S_l q.

    Level 0 is the datum, level l a stretch of 2^(l-1) before it: datum t (from 0) finds those that the bits of t name,
    as in a Fenwick tree, and s stands in level bitlength(t xor s). Whatever is full moves up ahead of the monoid, which
    acts on every level; the highest one takes what the others have no room for, so that `levels` of them are exact over
    2^(levels-1) data, and the state does not grow.  weights: one for every level, of the read; a signal that has none
    reads all alike, which is the matrix that the levels are a sum of.
    """

    levels: int = 16
    weights: Per | str = "level"
    kind: ClassVar[Kind] = "levels"
    filterable: ClassVar[bool] = False
    one_leaf: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= 24:
            raise IllegalUpdate(f"Fenwick: a memory has 2 to 24 levels, got {self.levels}")
        if isinstance(self.weights, str):
            object.__setattr__(self, "weights", Per(self.weights, "own", "positive", size=self.levels))
        w = self.weights
        if not isinstance(w, Per) or w.domain == "unit" or w.shape != "own" or w.size != self.levels:
            wanted = f"a positive or real Per of shape own and size {self.levels}, one for every level"
            raise IllegalUpdate(f"Fenwick: weights must be {wanted}, got {w!r}")

    @property
    def period(self) -> int:
        """Data after which the highest level takes all others in again."""
        return 1 << (self.levels - 2)

    def place(self, number: Tensor) -> Tensor:
        """How many data came before, modulo the period: a whole number, whatever somebody adds to a state."""
        return number.detach().round().remainder(self.period)

    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        return times(leaves[0].sum(-3), x)

    def vjp(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Leaves:
        return (outer(r, x),)

    def read(self, leaves: Leaves, q: Tensor, signal: Signal, h: Geometry) -> Tensor:
        every = times(leaves[0], q[..., None, :])  # (..., levels, d_v)
        assert isinstance(self.weights, Per)
        if self.weights.name not in signal:
            return every.sum(-2)
        w = resolve(self.weights, signal)
        return ((w[..., None] if isinstance(w, Tensor) and w.ndim else w) * every).sum(-2)

    def act(self, element: Element, leaves: Leaves) -> Leaves:
        levels, number = leaves
        moved = [element.act(level) for level in self._moved_up(levels, self.place(number))]
        return torch.stack(torch.broadcast_tensors(*moved), -3), number

    def _moved_up(self, levels: Tensor, number: Tensor) -> list[Tensor]:
        """The levels that datum `number` finds: the full ones below the first that is free are there now."""
        parts, found = levels.unbind(-3), []
        below = torch.zeros_like(parts[0])
        for i, part in enumerate(parts):
            free = number.remainder(1 << i) == 0  # every datum below level i is in it
            arrives = number.remainder(1 << max(i - 1, 0)) == 0
            if i == self.levels - 1:
                found.append(part + torch.where(arrives, below, 0.0))
            else:
                found.append(torch.where(free, 0.0, part + torch.where(arrives, below, 0.0) if i else part))
            below = below + part
        return found

    def add(self, leaves: Leaves, rate: Tensor | float, shape: Shape, drive: Leaves) -> Leaves:
        levels, number = leaves
        first, *rest = levels.unbind(-3)
        step = first + spread(rate, shape) * drive[0]
        return torch.stack(torch.broadcast_tensors(step, *rest), -3), self.place(number + 1)

    def zeros(self, signal: Signal) -> Leaves:
        empty = _empty(signal)
        each = empty[..., None, :, :].expand(*empty.shape[:-2], self.levels, *empty.shape[-2:])
        return each, empty.new_zeros(*empty.shape[:-2], 1, 1)

    def rates(self) -> tuple[Rate, ...]:
        assert isinstance(self.weights, Per)
        return (self.weights,)


@final
@dataclass(frozen=True, repr=False)
class Kernel(Declared):
    """A similarity of two keys by the angle between them, 1 for a key with itself if scale is None.

    of: exponential, exp(scale (cos - 1)), scale sqrt(d_k) if None: exp of the products of keys of unit RMS over
    sqrt(d_k), over its value at the key itself; or linear, scale cos, scale 1 if None.
    """

    of: Literal["exponential", "linear"] = "exponential"
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.of not in ("exponential", "linear"):
            raise IllegalUpdate(f"Kernel: of={self.of!r} is not exponential or linear")
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise IllegalUpdate(f"Kernel: scale must be a finite number > 0 or None, got {self.scale}")

    def between(self, readers: Tensor, keys: Tensor, mass: Tensor | None = None) -> Tensor:
        """(..., m, d_k), (..., n, d_k) -> (..., m, n), times e^mass (..., m, n)."""
        cosines = directions(readers, -1)[0] @ directions(keys, -1)[0].mT
        if self.of == "linear":
            found = cosines if self.scale is None else self.scale * cosines
            return found if mass is None else found * torch.exp(mass)
        scale = math.sqrt(keys.shape[-1]) if self.scale is None else self.scale
        exponent = scale * (cosines - 1)
        return torch.exp(exponent if mass is None else exponent + mass)


class Solved(Memory):
    """Sums that a read makes a solve with: S (d_v, d_k) of what was written first, then R (d_k, d_k) of keys."""

    kind: ClassVar[Kind] = "regression"
    matrix_gates: ClassVar[bool] = False
    filterable: ClassVar[bool] = False
    one_leaf: ClassVar[bool] = False

    @abstractmethod
    def solve(self, apply: Callable[[Tensor], Tensor], b: Tensor, signal: Signal) -> Tensor:
        """What is made of vectors b, where `apply` multiplies with a sum of outer squares."""

    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        raise IllegalUpdate(f"{type(self).__name__} memory is read through its solves: call read")

    @property
    def free(self) -> frozenset[str]:
        return frozenset()


@final
@dataclass(frozen=True, repr=False)
class Regression(Solved):
    """The ridge regression of values on keys, solved when it is read: leaves (S (d_v, d_k), R (d_k, d_k)).

    A datum writes v k^T to S and k k^T to R, with one rate; read: S x, x what `steps` steps of conjugate gradients from
    zero make of (R + Diag(ridge)) x = q. Many steps are the exact least squares of `Whiten(kind="right", power=1)`; few
    are another tuple. ridge: a positive number, or one a token and key, which only reads see.

    Source: von Oswald et al. 2025 (MesaNet), eqs. 4-8; Hestenes and Stiefel 1952.
    """

    steps: int = 30
    ridge: Rate = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise IllegalUpdate(f"Regression: a read takes at least one step, got steps={self.steps}")
        ridge = self.ridge
        named = isinstance(ridge, Per) and ridge.shape == "key" and ridge.domain == "positive"
        if not named and (isinstance(ridge, Per) or not ridge > 0):
            raise IllegalUpdate(f"Regression: ridge is a positive number or a positive Per of shape key, not {ridge!r}")

    def read(self, leaves: Leaves, q: Tensor, signal: Signal, h: Geometry) -> Tensor:
        s, r = leaves
        return times(s, self.solve(lambda p: times(r, p), q, signal))

    def solve(self, apply: Callable[[Tensor], Tensor], b: Tensor, signal: Signal) -> Tensor:
        ridge = resolve(self.ridge, signal)
        return conjugate_gradients(lambda p: apply(p) + ridge * p, b, self.steps)

    def vjp(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Leaves:
        return outer(r, x), outer(x, x)

    def zeros(self, signal: Signal) -> Leaves:
        k, _ = _vectors(signal)
        s = _empty(signal)
        return s, s.new_zeros(*s.shape[:-2], k.shape[-1], k.shape[-1])

    def rates(self) -> tuple[Rate, ...]:
        return (self.ridge,)


@final
@dataclass(frozen=True, repr=False)
class Correlation(Solved):
    """Values on keys, both whitened when they are read: leaves (S (d_v, d_k), R (d_k, d_k), L (d_v, d_v)).

    A datum writes v k^T to S, k k^T to R and v v^T to L, with one rate; read: A(L) S A(R) q, A(M) = (M + ridge)^{-1/2}.
    A root is a sum of `shifts` resolvents, found by `steps` steps of conjugate gradients in one Krylov space. For
    eigenvalues from ridge to `top` the sum is exact but for 3 exp(-2 pi^2 shifts / (log(top / ridge) + 3)). Many steps
    and shifts are the exact `Whiten(kind="kronecker", power=1/2, eps=ridge)` by statistics of values and keys; few are
    another tuple. ridge, top: positive numbers.

    Source: `axes.linalg.krylov`.
    """

    steps: int = 10
    shifts: int = 8
    ridge: float = 0.1
    top: float = 1e3

    def __post_init__(self) -> None:
        for name in ("steps", "shifts"):
            if getattr(self, name) < 1:
                raise IllegalUpdate(f"Correlation: {name} is at least 1, got {getattr(self, name)}")
        if not 0 < self.ridge < self.top < math.inf:
            raise IllegalUpdate(f"Correlation: 0 < ridge < top, both finite, got ridge={self.ridge}, top={self.top}")

    def read(self, leaves: Leaves, q: Tensor, signal: Signal, h: Geometry) -> Tensor:
        s, r, l = leaves
        read = times(s, self.solve(lambda p: times(r, p), q, signal))
        return self.solve(lambda p: times(l, p), read, signal)

    def solve(self, apply: Callable[[Tensor], Tensor], b: Tensor, signal: Signal) -> Tensor:
        nodes = inverse_root_shifts(self.shifts, self.ridge, self.top)
        return shifted_gradients(lambda p: apply(p) + self.ridge * p, b, nodes, self.steps)

    def vjp(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Leaves:
        return outer(r, x), outer(x, x), outer(r, r)

    def zeros(self, signal: Signal) -> Leaves:
        k, v = _vectors(signal)
        s = _empty(signal)
        return s, *(s.new_zeros(*s.shape[:-2], x.shape[-1], x.shape[-1]) for x in (k, v))


@final
@dataclass(frozen=True, repr=False)
class List(Memory):
    """Every written pair is kept: leaves (keys (n, d_k), values (n, d_v), log-mass (n)); scores are its dual.

    read: sum_i p_i v_i with p = grad h*(scale * K q + log-mass): softmax attention with entropic h, linear attention
    with Euclidean h (then the mass multiplies). Scalar gates act on the mass (ALiBi, FoX), matrix gates on the keys
    (RoPE, PaTH). Drives stay factored as (value, key). scale: None means d_k^(-1/2).  window: only so many pairs are
    kept, the last ones (sliding window); None for all.  first: so many stay beside them, the first ones (attention
    sinks, learned tokens ahead of a sequence).  errors: the kernel by which a datum's own key asks what is left
    of its value, sum_i kappa(k, k_i) e^mass_i v_i; None: as queries read (DeltaFormer; LUCID has an exponential one).

    Rotations turn all keys alike, so they are owed: from the first one on a last leaf (d_k/2) says by how much every
    stored key has yet to be turned; what is read or added turns back by it instead, and stored keys stay as they are.
    """

    scale: float | None = None
    window: int | None = None
    errors: Kernel | None = None
    first: int = 0
    kind: ClassVar[Kind] = "list"
    scored: ClassVar[bool] = True
    filterable: ClassVar[bool] = False
    one_leaf: ClassVar[bool] = False
    starts_at_zero: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise IllegalUpdate(f"List: a window keeps at least one pair, got {self.window}; None keeps all")
        if not isinstance(self.first, int) or self.first < 0:
            raise IllegalUpdate(f"List: first is how many pairs stay beside a window, 0 or more, got {self.first!r}")
        if self.first and self.window is None:
            raise IllegalUpdate(f"List: every pair is kept, so first={self.first} keeps no more: give a window, or 0")

    @property
    def most(self) -> int | None:
        """How many pairs are kept; None for all."""
        return None if self.window is None else self.first + self.window

    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        raise IllegalUpdate("List memory is read through its geometry: call read")

    def read(self, leaves: Leaves, q: Tensor, signal: Signal, h: Geometry) -> Tensor:
        keys, values, mass, *owed = leaves
        wide = torch.promote_types(torch.promote_types(keys.dtype, mass.dtype), q.dtype)  # lists keep their own
        keys, values, q = keys.to(wide), values.to(wide), q.to(wide)
        scores = self.temperature(q.shape[-1]) * times(keys, _turned_back(q, owed))
        if h.is_identity:
            weights = torch.exp(mass) * scores
        else:
            weights = h.primal((scores + mass)[..., None, :])[..., 0, :]
        return (weights[..., None, :] @ values)[..., 0, :]

    def recalled(self, leaves: Leaves, x: Tensor, signal: Signal, h: Geometry) -> Tensor:
        if self.errors is None:
            return self.read(leaves, x, signal, h)
        keys, values, mass, *owed = leaves
        weights = self.errors.between(_turned_back(x, owed)[..., None, :], keys, mass[..., None, :])
        return (weights @ values)[..., 0, :]

    def temperature(self, d_k: int) -> float:
        return d_k**-0.5 if self.scale is None else self.scale

    def vjp(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Leaves:
        return r, x

    def act(self, element: Element, leaves: Leaves) -> Leaves:
        keys, values, mass, *owed = leaves
        if element.outer is not None:
            raise IllegalUpdate("List memory has no rows to gate")
        if not isinstance(element.scale, float) or element.scale != 1.0:
            mass = mass + torch.log(torch.as_tensor(element.scale, dtype=mass.dtype, device=mass.device))
        gate, left = element.gate, element.left
        if gate is not None and (gate.ndim == 0 or gate.shape[-1] == 1):
            mass = mass + gate
            # a scalar gate of a product also scales its low-rank part: take it out of there too
            left, gate = element.ungated_left(), None
        if gate is None and element.dense is None and left is None:
            angle = element.angle
            if angle is not None:
                whole = angle + owed[0] if owed else angle.expand(*keys.shape[:-2], angle.shape[-1])
                owed = [whole.remainder(2 * math.pi)]
            return keys, values, mass, *owed
        if owed:
            keys = rotate(keys, owed[0][..., None, :])
        if left is not None:  # a list may be kept in fewer bits than what moves it
            keys = keys.to(torch.promote_types(keys.dtype, left.dtype))
        return Element(1.0, gate, element.angle, element.dense, left, element.right).act(keys), values, mass

    def add(self, leaves: Leaves, rate: Tensor | float, shape: Shape, drive: Leaves) -> Leaves:
        keys, values, mass, *owed = leaves
        value, key = drive
        key = _turned_back(key, owed)
        step = rate[..., None] if isinstance(rate, Tensor) and rate.ndim and shape == "scalar" else rate
        keys = torch.cat((keys, key[..., None, :]), -2)
        values = torch.cat((values, (step * value)[..., None, :]), -2)
        mass = torch.cat((mass, torch.zeros_like(key[..., :1])), -1)
        return *self.kept((keys, values, mass)), *owed

    def kept(self, pairs: Leaves) -> Leaves:
        """Of keys, values and masses those in the window, and the first."""
        keys, values, mass = pairs
        if self.window is None or self.first and mass.shape[-1] <= self.first + self.window:
            return pairs
        found = keys[..., -self.window :, :], values[..., -self.window :, :], mass[..., -self.window :]
        if not self.first:
            return found
        ahead = keys[..., : self.first, :], values[..., : self.first, :], mass[..., : self.first]
        dims = (-2, -2, -1)
        return tuple(torch.cat(both, dim) for *both, dim in zip(ahead, found, dims, strict=True))

    def zeros(self, signal: Signal) -> Leaves:
        k, v = _vectors(signal)
        return k[..., None, :][..., :0, :], v[..., None, :][..., :0, :], k[..., :0]


def _turned_back(x: Tensor, owed: list[Tensor]) -> Tensor:
    """A vector in the frame in which a list's keys stand."""
    return rotate(x, -owed[0]) if owed else x


def _vectors(signal: Signal) -> tuple[Tensor, Tensor]:
    k, v = signal.get("k"), signal.get("v")
    if not isinstance(k, Tensor) or not isinstance(v, Tensor):
        raise IllegalUpdate(f"this memory needs keys 'k' and values 'v' in the signal; it has {sorted(signal)}")
    return k, v


def _empty(signal: Signal) -> Tensor:
    k, v = _vectors(signal)
    batch = v.shape[:-1]
    if k.shape[:-1] != batch:
        batch = torch.broadcast_shapes(batch, k.shape[:-1])
    return v.new_zeros(*batch, v.shape[-1], k.shape[-1], dtype=torch.promote_types(v.dtype, k.dtype))


def _affine(memory: LayerNormMatrix | MLP, signal: Signal) -> tuple[Tensor | float, Tensor | float]:
    """The slow gain and bias; a signal without them gets the identity."""
    gain = resolve(memory.gain, signal) if memory.gain.name in signal else 1.0
    return gain, resolve(memory.bias, signal) if memory.bias.name in signal else 0.0


def _normalise(u: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    centred = u - u.mean(-1, keepdim=True)
    scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return centred * scale, scale


def _normalise_vjp(u: Tensor, p: Tensor, eps: float) -> Tensor:
    """Pull p back through LN at u: (p - mean p - u^ mean(p u^)) / std (miras.md section 1)."""
    unit, scale = _normalise(u, eps)
    return (p - p.mean(-1, keepdim=True) - unit * (p * unit).mean(-1, keepdim=True)) * scale


def _gelu_slope(z: Tensor) -> Tensor:
    """Derivative of the exact gelu: Phi(z) + z phi(z)."""
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * density
