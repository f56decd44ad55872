"""Monoids: how the old state is kept. Elements have one normal form and act from the right.

An element maps  S  to  outer * (S B + (S U) V^T)  with  B = scale * exp(gate) * rotation * dense :
diagonal (or rotation, or dense) plus low rank on the key side, and an element-wise `outer` gate for the maps that
do not act on the right at all (rows, Hadamard). `turn` rotates pairs of rows, from the left: with a gate for both rows
of a pair the two are one complex number (S5, the LRU). Depth mixing acts on the right too: its state is S = X^T.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor

from axes.core.declared import Declared
from axes.core.geometry import Euclidean, Geometry
from axes.core.rates import Per, Rate, Shape, Signal, as_gate, rate_shape, resolve
from axes.errors import IllegalUpdate

__all__ = [
    "DPLR",
    "Decay",
    "Diagonal",
    "Element",
    "GeneralLinear",
    "Hadamard",
    "Householder",
    "Identity",
    "Monoid",
    "Product",
    "Rotation",
    "Scalar",
    "Zero",
]

Kind = Literal[
    "identity", "zero", "scalar", "diagonal", "pair", "row", "slot", "hadamard", "rotation", "turn", "low rank", "dense"
]


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate the pairs (x_j, x_{j+d/2}) of the last axis by `angle` (..., d/2): x is a row, x -> x R."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def rotation_matrix(angle: Tensor) -> Tensor:
    """R with  x R = rotate(x, angle)  for angles (..., d/2): (..., d, d)."""
    d = 2 * angle.shape[-1]
    eye = torch.eye(d, dtype=angle.dtype, device=angle.device).expand(*angle.shape[:-1], d, d)
    return rotate(eye, angle[..., None, :])


# exp of minus these is still a number
_NEXT_TO_NOTHING = {torch.float64: -700.0}


@final
@dataclass(frozen=True, eq=False)
class Element:
    """One retention map in normal form; None fields are trivial.

    scale: a linear factor (number or 0-d tensor);  gate: logs (..., 1) or (..., d_k) or 0-d;  angle (..., d_k/2);
    dense, a matrix (..., d_k, d_k);  left, right: U, V (..., d_k, r);  outer: logs (..., d_v, 1) or (..., d_v, d_k).
    paired: the gate is one for both entries of a pair, so that it commutes with angles.
    turn: angles (..., d_v/2) of pairs of rows; an outer gate beside it is one for both rows of a pair, `even`.
    """

    scale: float | Tensor = 1.0
    gate: Tensor | None = None
    angle: Tensor | None = None
    dense: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    outer: Tensor | None = None
    paired: bool = False
    turn: Tensor | None = None
    even: bool = False

    @property
    def trivial(self) -> bool:
        """Whether the state stays as it is."""
        fields = (self.gate, self.angle, self.dense, self.left, self.outer, self.turn)
        return isinstance(self.scale, float) and self.scale == 1.0 and all(x is None for x in fields)

    def ungated_left(self) -> Tensor | None:
        """U of a map e^g (I + U' V^T) with a scalar gate, U = e^g U', without that gate: U'.

        Where e^g is next to zero, so is U: nothing is left of what the map would have moved, and U' may be anything
        finite.
        """
        if self.left is None or self.gate is None:
            return self.left
        gate = self.gate.clamp_min(_NEXT_TO_NOTHING.get(self.gate.dtype, -80.0))
        return self.left * torch.exp(-gate if gate.ndim == 0 else -gate[..., None])

    def base(self, x: Tensor) -> Tensor:
        """x B for rows x (..., n, d_k)."""
        if self.dense is not None:
            x = x @ self.dense
        if self.angle is not None:
            x = rotate(x, self.angle[..., None, :])
        if self.gate is not None:
            x = x * torch.exp(self.gate if self.gate.ndim == 0 else self.gate[..., None, :])
        return x if isinstance(self.scale, float) and self.scale == 1.0 else x * self.scale

    def act(self, state: Tensor) -> Tensor:
        """The state (..., d_v, d_k) after retention."""
        kept = self.base(state)
        if self.left is not None and self.right is not None:
            kept = kept + (state @ self.left) @ self.right.mT
        if self.outer is not None:
            kept = kept * torch.exp(self.outer)
        return kept if self.turn is None else rotate(kept.mT, self.turn[..., None, :]).mT

    def transpose_base(self, x: Tensor) -> Tensor:
        """B x for columns given as rows x (..., n, d_k): what a key sees before the map."""
        out = x if isinstance(self.scale, float) and self.scale == 1.0 else x * self.scale
        if self.gate is not None:
            out = out * torch.exp(self.gate if self.gate.ndim == 0 else self.gate[..., None, :])
        if self.angle is not None:
            out = rotate(out, -self.angle[..., None, :])
        return out if self.dense is None else out @ self.dense.mT

    def to_dense(self, d_k: int, like: Tensor) -> Tensor:
        """A (..., d_k, d_k) with S -> S A; element-wise outer gates have no such matrix."""
        if self.outer is not None or self.turn is not None:
            raise IllegalUpdate("an element-wise outer gate and a turn of rows are no right actions and have no matrix")
        if self.dense is not None and self.left is None:  # a matrix is not multiplied by the identity
            return replace(self, dense=None).act(self.dense)
        return self.act(torch.eye(d_k, dtype=like.dtype, device=like.device))

    def then(self, other: Element) -> Element:
        """The element of acting with self first and with `other` after it."""
        outer, turn = _add(self.outer, other.outer), _add(self.turn, other.turn)
        even = all(e.outer is None or e.even for e in (self, other))
        if turn is not None and outer is not None and not even:
            raise IllegalUpdate(
                "rows that turn in pairs have one gate for both of a pair: Diagonal(Per(name, 'row-pair', 'unit'), "
                "'row-pair')"
            )
        if self.outer is not None and self.outer.shape[-1] != 1 and not other._elementwise:
            raise IllegalUpdate("a Hadamard gate followed by a matrix is not closed: materialise the states instead")
        left, right = self.left, self.right
        if left is not None and right is not None:  # (U1 V1^T) A2 = U1 (V1^T A2)
            moved = other.base(right.mT)
            if other.left is not None and other.right is not None:
                moved = moved + (right.mT @ other.left) @ other.right.mT
            right = moved.mT
        if other.left is not None and other.right is not None:  # B1 U2 V2^T
            left, right = _stack(left, self.transpose_base(other.left.mT).mT), _stack(right, other.right)
        scale = self.scale * other.scale
        commute = all(e.gate is None or e.paired or _uniform(e.gate) for e in (self, other))
        rotates = self.angle is not None or other.angle is not None
        if self.dense is None and other.dense is None and (commute or not rotates):
            gate, angle = _add(self.gate, other.gate), _add(self.angle, other.angle)
            paired = commute and (self.paired or other.paired)
            return Element(scale, gate, angle, None, left, right, outer, paired, turn, even)
        d_k, like = _width(self, other)
        first = Element(1.0, self.gate, self.angle, self.dense).to_dense(d_k, like)
        second = Element(1.0, other.gate, other.angle, other.dense).to_dense(d_k, like)
        return Element(scale, None, None, first @ second, left, right, outer, turn=turn, even=even)

    @property
    def _elementwise(self) -> bool:
        return self.angle is None and self.dense is None and self.left is None


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _stack(a: Tensor | None, b: Tensor) -> Tensor:
    if a is None:
        return b
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return torch.cat((a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])), dim=-1)


def _uniform(gate: Tensor) -> bool:
    return gate.ndim == 0 or gate.shape[-1] == 1


def _width(*elements: Element) -> tuple[int, Tensor]:
    """d_k and a tensor for dtype and device, from whichever field of the elements carries them."""
    for e in elements:
        if e.dense is not None:
            return e.dense.shape[-1], e.dense
        if e.angle is not None:
            return 2 * e.angle.shape[-1], e.angle
    raise IllegalUpdate("an element without matrix or angle has no width of its own")


class Monoid(Declared, ABC):
    """A family of retention maps closed under composition; `element` is its chart from the signal.

    kind: the structure of its maps. rank_one: they are I + a b^T and nothing else, one pair of vectors a datum.
    along: the vector of the signal that b is, if it is one. loose: named vectors a and b whose product nothing bounds.
    strength: of a map along a named vector the rate, one or one an entry, that -a is that vector times, if it is so.
    """

    kind: Kind
    rank_one: bool = False
    along: str | None = None
    strength: Rate | None = None
    loose: tuple[str, ...] = ()

    @abstractmethod
    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        """The map of this datum. rate: the resolved step size, for decays tied to it; like: gives dtype, device."""

    def no_width(self, width: int) -> str | None:
        """Why keys of this width have no such map, or None if they have."""
        return None

    def no_height(self, height: int) -> str | None:
        """Why values of this width have no such map, or None if they have."""
        return None

    def rates(self) -> tuple[Rate, ...]:
        return ()

    def gates(self) -> tuple[Rate | str, ...]:
        """Of the rates those that multiply the state."""
        gate: Rate | str | None = getattr(self, "gate", None)
        return () if gate is None else (gate,)

    def signals(self) -> frozenset[str]:
        """Vectors on the key side that the monoid reads by name (besides its rates)."""
        return frozenset()

    def neutral(self) -> dict[str, float | Geometry]:
        """Where the map is the identity: rates and vectors by name with their value, logits with their link.

        What is left out is a gate, and keeps everything at one.
        """
        return {}


def _gate(rate: Rate, signal: Signal, like: Tensor) -> Element:
    """A key-side gate: numbers are gates, named unit rates arrive as logs, other domains are linear factors."""
    value = resolve(rate, signal)
    if not isinstance(rate, Per):
        return Element(scale=value)
    if not isinstance(value, Tensor):
        return Element(scale=math.exp(value) if rate.domain == "unit" else value)
    if rate.domain != "unit":
        if value.ndim:
            raise IllegalUpdate(f"gate {rate.name!r} varies per datum: declare it unit and supply its log")
        return Element(scale=value)
    if rate.shape == "scalar":
        return Element(gate=value if value.ndim == 0 else value[..., None])
    if rate.shape == "key":
        return Element(gate=value)
    if rate.shape == "pair":
        return Element(gate=torch.cat((value, value), -1), paired=True)
    if rate.shape in ("row", "own"):
        return Element(outer=value[..., :, None])
    if rate.shape == "row-pair":
        return Element(outer=torch.cat((value, value), -1)[..., :, None], even=True)
    return Element(outer=value)


def finite_logs(x: Tensor) -> Tensor:
    """Logs of gates that are multiplied: -inf as the least number, which a slope of zero may meet. What is expanded
    stays so."""
    one = x
    for i, (n, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if n > 1 and not step:
            one = one.narrow(i, 0, 1)
    return one.clamp_min(torch.finfo(x.dtype).min).expand_as(x)


@final
@dataclass(frozen=True, repr=False)
class Identity(Monoid):
    """A = I: everything is kept."""

    kind = "identity"

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        return Element()


@final
@dataclass(frozen=True, repr=False)
class Zero(Monoid):
    """A = 0: nothing is kept (a memoryless filter: steepest descent, Frank-Wolfe directions)."""

    kind = "zero"

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        return Element(scale=0.0)


@final
@dataclass(frozen=True, repr=False)
class Scalar(Monoid):
    """A = a I, with a in [0, 1] a number or a named log-gate."""

    gate: Rate | str
    kind = "scalar"

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate", as_gate(self.gate))
        if isinstance(self.gate, Per) and self.gate.shape != "scalar":
            raise IllegalUpdate(
                f"Scalar: gate {self.gate.name!r} has shape {self.gate.shape}; use Diagonal or Hadamard"
            )

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        assert not isinstance(self.gate, str)
        return _gate(self.gate, signal, like)

    def rates(self) -> tuple[Rate, ...]:
        assert not isinstance(self.gate, str)
        return (self.gate,)


@final
@dataclass(frozen=True, repr=False)
class Decay(Monoid):
    """A = (1 - rate * weight) I: decoupled weight decay, tied to the step size; independent: A = (1 - weight) I."""

    weight: Rate
    independent: bool = False
    kind = "scalar"

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        weight = resolve(self.weight, signal)
        kept = 1.0 - (weight if self.independent else rate * weight)
        if isinstance(kept, Tensor) and kept.ndim:
            raise IllegalUpdate("Decay: the step size varies per datum; gate the state with Scalar(Per(...)) instead")
        return Element(scale=kept)

    def rates(self) -> tuple[Rate, ...]:
        return (self.weight,)

    def neutral(self) -> dict[str, float | Geometry]:
        return _zero(self.weight)


@final
@dataclass(frozen=True, repr=False)
class Diagonal(Monoid):
    """A = Diag(a) on the key side, the row gate diag(a) S on the value side (side="row"), one gate for both entries of
    a pair of keys (side="pair"), which commutes with rotations: with one it is a complex diagonal (S4D); the same of
    rows (side="row-pair"), beside rows that turn (S5, the LRU); or a gate of every slot of a bounded memory
    (side="slot"): Diagonal(Per("decay", "own", "unit", size=64), "slot")."""

    gate: Rate | str
    side: Literal["key", "row", "pair", "row-pair", "slot"] = "key"

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        return "diagonal" if self.side == "key" else "row" if self.side == "row-pair" else self.side

    def __post_init__(self) -> None:
        if self.side not in ("key", "row", "pair", "row-pair", "slot"):
            raise IllegalUpdate(f"Diagonal: side {self.side!r} is not key, row, pair, row-pair or slot")
        shape: Shape = "own" if self.side == "slot" else self.side
        if not (self.side == "slot" and isinstance(self.gate, str)):  # whose number of slots nobody knows
            object.__setattr__(self, "gate", as_gate(self.gate, shape))
        if not isinstance(self.gate, Per) or self.gate.shape != shape:
            raise IllegalUpdate(
                f"Diagonal(side={self.side!r}): the gate must be a Per of shape {shape}; use Scalar otherwise"
            )

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        assert isinstance(self.gate, Per)
        return _gate(self.gate, signal, like)

    def no_width(self, width: int) -> str | None:
        if self.side == "pair" and width % 2:
            return f"Diagonal(side='pair'): keys are gated in pairs, their width must be even, got {width}"
        return None

    def no_height(self, height: int) -> str | None:
        if self.side == "row-pair" and height % 2:
            return f"Diagonal(side='row-pair'): rows are gated in pairs, values must be of even width, got {height}"
        return None

    def rates(self) -> tuple[Rate, ...]:
        assert isinstance(self.gate, Per)
        return (self.gate,)


@final
@dataclass(frozen=True, repr=False)
class Hadamard(Monoid):
    """S -> a * S entry by entry, a (..., d_v, d_k) supplied as a log; with times, a row rate dt, a^dt * S (Mamba-1).

    A gate that is the same for all tokens, expanded over time, is then never written down for each of them.
    """

    gate: Rate | str
    times: Per | None = None
    kind = "hadamard"

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate", as_gate(self.gate, "square"))
        if self.times is not None and (self.times.shape != "row" or self.times.domain != "positive"):
            raise IllegalUpdate(f"Hadamard: times must be a positive Per of shape row, got {self.times}")
        if not isinstance(self.gate, Per) or self.gate.shape != "square":
            raise IllegalUpdate("Hadamard: the gate must be a Per of shape square; use Scalar or Diagonal otherwise")

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        assert isinstance(self.gate, Per)
        element = _gate(self.gate, signal, like)
        if self.times is None or element.outer is None:
            return element
        times = resolve(self.times, signal)
        return Element(outer=finite_logs(element.outer) * (times[..., :, None] if isinstance(times, Tensor) else times))

    def rates(self) -> tuple[Rate, ...]:
        assert isinstance(self.gate, Per)
        return (self.gate,) if self.times is None else (self.gate, self.times)


@final
@dataclass(frozen=True, repr=False)
class Rotation(Monoid):
    """A = R(angle) on pairs of keys: constant angles, or named ones of shape pair.

    A number is the base of the geometric angles base^(-2j/d_k) (RoPE); with uniform it is the angle of every pair.
    pairs: how many of the d_k/2 pairs turn, the first ones, by angles for 2 pairs in the place of d_k; None for all.
    Angles of shape row-pair turn pairs of rows, from the left, S -> R S: what was written turns on.
    """

    angle: float | Per = 10000.0
    uniform: bool = False
    pairs: int | None = None

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        return "turn" if self._of_rows else "rotation"

    @property
    def _of_rows(self) -> bool:
        return isinstance(self.angle, Per) and self.angle.shape == "row-pair"

    def __post_init__(self) -> None:
        if isinstance(self.angle, Per):
            named = self.angle.shape in ("pair", "row-pair") and self.angle.domain == "real"
            if not named or self.uniform or self.pairs is not None:
                raise IllegalUpdate(
                    "Rotation: named angles must have shape pair (of keys) or row-pair (of rows) and domain real, one "
                    "for every pair"
                )
        elif not self.angle > 0:
            raise IllegalUpdate(f"Rotation: the base (or uniform angle) must be positive, got {self.angle}")
        if self.pairs is not None and self.pairs < 1:
            raise IllegalUpdate(f"Rotation: at least one pair turns, got pairs={self.pairs}: use Identity")

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        if isinstance(self.angle, Per):
            value = torch.as_tensor(resolve(self.angle, signal), dtype=like.dtype, device=like.device)
            if self._of_rows:
                return Element(turn=value if value.ndim else value[None])
            return Element(angle=value if value.ndim else value.expand(like.shape[-1] // 2))  # a number: of every pair
        d_k = like.shape[-1]
        if (reason := self.no_width(d_k)) is not None:
            raise IllegalUpdate(reason)
        turning = d_k // 2 if self.pairs is None else self.pairs
        if self.uniform:
            angle = torch.full((turning,), self.angle, dtype=like.dtype, device=like.device)
        else:
            exponent = torch.arange(0, 2 * turning, 2, dtype=like.dtype, device=like.device) / (2 * turning)
            angle = self.angle**-exponent
        return Element(angle=torch.cat((angle, angle.new_zeros(d_k // 2 - turning))) if 2 * turning < d_k else angle)

    def no_height(self, height: int) -> str | None:
        if self._of_rows and height % 2:
            return f"Rotation: rows are rotated in pairs, values must be of even width, got {height}"
        return None

    def no_width(self, width: int) -> str | None:
        if self._of_rows:
            return None
        if width % 2:
            return f"Rotation: keys are rotated in pairs, their width must be even, got {width}"
        if self.pairs is not None and 2 * self.pairs > width:
            return f"Rotation: keys of width {width} have {width // 2} pairs, of which {self.pairs} cannot turn"
        return None

    def rates(self) -> tuple[Rate, ...]:
        return (self.angle,) if isinstance(self.angle, Per) else ()

    def neutral(self) -> dict[str, float | Geometry]:
        return _zero(self.angle)


@final
@dataclass(frozen=True, repr=False)
class Householder(Monoid):
    """A = I - beta w w^T, a generalised Householder map: identity at 0, projection at 1, reflection at 2 (|w| = 1).

    key: the name of w in the signal; None for the constant unit vector with equal entries. "k" erases what the token's
    own key reads, with another strength than the write's (Comba). beta: a scalar, or one for every entry of w, which
    scales what is read: A = I - (beta * w) w^T, whose eigenvalues lie in [0, 1] for beta in [0, 1] and |w| = 1 (GDN-2).
    """

    beta: Rate
    key: str | None = "w"
    kind = "low rank"
    rank_one = True

    def __post_init__(self) -> None:
        if isinstance(self.beta, Per) and (self.beta.shape not in ("scalar", "key") or self.beta.domain == "unit"):
            raise IllegalUpdate(
                f"Householder: beta must be a scalar or key rate, positive or real, got {self.beta}: a linear strength"
            )

    @property
    def along(self) -> str | None:  # type: ignore[override]
        return self.key

    @property
    def strength(self) -> Rate | None:  # type: ignore[override]
        return None if self.key is None else self.beta

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        beta = resolve(self.beta, signal)
        if self.key is None:
            width = like.shape[-1]
            w = torch.full((width,), width**-0.5, dtype=like.dtype, device=like.device)
        else:
            w = _vector(signal, self.key, "Householder")
        each = isinstance(beta, Tensor) and beta.ndim and rate_shape(self.beta) == "scalar"
        removed = w * -(beta[..., None] if each else beta)  # type: ignore[index]
        return Element(left=removed[..., None], right=w[..., None])

    def rates(self) -> tuple[Rate, ...]:
        return (self.beta,)

    def signals(self) -> frozenset[str]:
        return frozenset() if self.key is None else frozenset((self.key,))

    def neutral(self) -> dict[str, float | Geometry]:
        return _zero(self.beta)


@final
@dataclass(frozen=True, repr=False)
class DPLR(Monoid):
    """A = Diag(a) + left right^T: diagonal plus low rank (RWKV-7), the vectors named in the signal."""

    gate: Rate | str
    left: str = "a"
    right: str = "b"
    kind = "low rank"

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate", as_gate(self.gate, "key"))

    @property
    def loose(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.left, self.right)

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        assert not isinstance(self.gate, str)
        base = _gate(self.gate, signal, like)
        left, right = _vector(signal, self.left, "DPLR"), _vector(signal, self.right, "DPLR")
        return Element(base.scale, base.gate, left=left[..., None], right=right[..., None])

    def rates(self) -> tuple[Rate, ...]:
        assert not isinstance(self.gate, str)
        return (self.gate,)

    def signals(self) -> frozenset[str]:
        return frozenset((self.left, self.right))

    def neutral(self) -> dict[str, float | Geometry]:
        return {self.left: 0.0}


@final
@dataclass(frozen=True, repr=False)
class GeneralLinear(Monoid):
    """A = link(logits)^T, a d_k x d_k matrix: GL(n) with the identity link, Birkhoff(n) or SO(n) with theirs.

    logits: of the shape that the link makes a matrix of, a matrix itself ("mix") for most.

    R = link(logits) is written (destination, source), as for streams X -> R X, which is S -> S R^T with S = X^T.
    """

    logits: Per
    link: Geometry = Euclidean()
    kind = "dense"

    def __post_init__(self) -> None:
        if self.logits.shape != self.link.logits:
            raise IllegalUpdate(
                f"GeneralLinear: logits {self.logits.name!r} must have shape {self.link.logits}, not "
                f"{self.logits.shape}: that is what {self.link!r} makes a matrix of"
            )

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        logits = resolve(self.logits, signal)
        if not isinstance(logits, Tensor):
            raise IllegalUpdate(f"GeneralLinear: {self.logits.name!r} must be a matrix, got the number {logits}")
        return Element(dense=self.link.primal(logits).mT)

    def rates(self) -> tuple[Rate, ...]:
        return (self.logits,)

    def neutral(self) -> dict[str, float | Geometry]:
        return {self.logits.name: self.link}


@final
@dataclass(frozen=True, repr=False)
class Product(Monoid):
    """A = A_1 A_2 ... : the parts act in the order given."""

    parts: tuple[Monoid, ...]
    kind = "dense"

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise IllegalUpdate("Product: give at least two monoids")

    @property
    def loose(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for part in self.parts for name in part.loose)

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        result = self.parts[0].element(signal, rate, like)
        for part in self.parts[1:]:
            result = result.then(part.element(signal, rate, like))
        return result

    def no_width(self, width: int) -> str | None:
        return next((reason for part in self.parts if (reason := part.no_width(width)) is not None), None)

    def no_height(self, height: int) -> str | None:
        return next((reason for part in self.parts if (reason := part.no_height(height)) is not None), None)

    def rates(self) -> tuple[Rate, ...]:
        return tuple(r for part in self.parts for r in part.rates())

    def gates(self) -> tuple[Rate | str, ...]:
        return tuple(gate for part in self.parts for gate in part.gates())

    def signals(self) -> frozenset[str]:
        return frozenset().union(*(part.signals() for part in self.parts))

    def neutral(self) -> dict[str, float | Geometry]:
        return {name: value for part in self.parts for name, value in part.neutral().items()}


def _zero(rate: Rate) -> dict[str, float | Geometry]:
    return {rate.name: 0.0} if isinstance(rate, Per) else {}


def product(parts: Sequence[Monoid]) -> Monoid:
    """Maps one after another; the identity if there is none."""
    return Identity() if not parts else parts[0] if len(parts) == 1 else Product(tuple(parts))


def _vector(signal: Signal, name: str, who: str) -> Tensor:
    value = signal.get(name)
    if not isinstance(value, Tensor):
        raise IllegalUpdate(f"{who}: the signal must supply the vector {name!r} (..., d_k); it has {sorted(signal)}")
    return value
