"""Rates and gates: a number, a named quantity that an axis supplies per datum, or a formula of these and the count.

`Per` is the only channel by which a tuple asks its axis for something: a sequence layer projects it from
the token, an optimizer schedules it, a depth mixer makes it a parameter. `Count` is the number of the datum, from 1,
which every update knows by itself. Arithmetic on the two gives a `Formula`: Per("lr") / (1.0 + 0.1 * Count()).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from axes.core.declared import Declared
from axes.errors import IllegalUpdate, ShapeError
from axes.programs.arithmetic import EVALUATE
from axes.programs.numbers import Number, as_float

Shape = Literal["scalar", "key", "row", "square", "pair", "row-pair", "mix", "permutation", "own"]
SHAPES = ("scalar", "key", "row", "square", "pair", "row-pair", "mix", "permutation", "own")
ORDERED = 8  # keys: as many as have a rate for every order of theirs, 40 320 of them
Domain = Literal["unit", "positive", "real"]
Signal = Mapping[str, Tensor | float]
SEEN = "data seen"  # the key of a signal that says how many data came before it; no name of a rate can be that


class Variable(Declared):
    """A rate that is no constant: sums, products, powers and comparisons of such are formulas."""

    def __add__(self, other: Rate) -> Formula:
        return Formula("+", (self, other))

    def __radd__(self, other: Rate) -> Formula:
        return Formula("+", (other, self))

    def __sub__(self, other: Rate) -> Formula:
        return Formula("-", (self, other))

    def __rsub__(self, other: Rate) -> Formula:
        return Formula("-", (other, self))

    def __mul__(self, other: Rate) -> Formula:
        return Formula("*", (self, other))

    def __rmul__(self, other: Rate) -> Formula:
        return Formula("*", (other, self))

    def __truediv__(self, other: Rate) -> Formula:
        return Formula("/", (self, other))

    def __rtruediv__(self, other: Rate) -> Formula:
        return Formula("/", (other, self))

    def __pow__(self, other: Rate) -> Formula:
        return Formula("**", (self, other))

    def __rpow__(self, other: Rate) -> Formula:
        return Formula("**", (other, self))

    def __gt__(self, other: Rate) -> Formula:
        return Formula(">", (self, other))


@final
@dataclass(frozen=True, repr=False)
class Per(Variable):
    """A rate named by the tuple and supplied per datum by the axis.

    shape: scalar (...), key (..., d_k), row (..., d_v), square (..., d_v, d_k), pair (..., d_k/2) for angles, row-pair
    (..., d_v/2) for those of rows, mix (..., d_k, d_k) for a matrix on the key side, permutation (..., d_k!) for one of
    every order of the keys, or own (..., size), one for each of what a memory has `size` of (slots, levels).
    domain: unit gates are supplied as logs (g <= 0); positive and real rates as they are.
    """

    name: str
    shape: Shape = "scalar"
    domain: Domain = "positive"
    size: int | None = None

    def __post_init__(self) -> None:
        if not self.name.replace("_", "").isalnum():
            raise IllegalUpdate(f"Per: name {self.name!r} must be letters, digits and underscores")
        if self.shape not in SHAPES:
            raise IllegalUpdate(f"Per({self.name!r}): shape {self.shape!r} is not one of {', '.join(SHAPES)}")
        if self.domain not in ("unit", "positive", "real"):
            raise IllegalUpdate(f"Per({self.name!r}): domain {self.domain!r} is not one of unit, positive, real")
        if (self.shape == "own") != (self.size is not None) or self.size is not None and self.size < 1:
            raise IllegalUpdate(
                f"Per({self.name!r}): a rate of shape own has a size of its own, at least 1, and no other has; got "
                f"shape={self.shape!r}, size={self.size}"
            )


@final
@dataclass(frozen=True, repr=False)
class Complement(Variable):
    """What a unit gate leaves, 1 - e^g of its log g, one for each of its numbers: who writes it averages (HGRN2)."""

    of: Per

    def __post_init__(self) -> None:
        if self.of.domain != "unit":
            raise IllegalUpdate(f"Complement: {self.of!r} must be a unit gate, of which something is left")


@final
@dataclass(frozen=True, repr=False)
class Count(Variable):
    """The number of the datum, from 1: of the step, the token, the layer."""


@final
@dataclass(frozen=True, repr=False)
class Formula(Variable):
    """A number of the datum: an operation on numbers, scalar rates, the count and other formulas.

    It is written as arithmetic, and printed so: 1.0 - Count() ** -0.8. `minimum`, `maximum`, `log`
    and `where(a > b, x, y)` are functions of this module.
    """

    operation: str
    inputs: tuple[Rate, ...]

    def __post_init__(self) -> None:
        arity = _ARITY.get(self.operation)
        if arity is None:
            raise IllegalUpdate(f"Formula: operation {self.operation!r} is not one of {', '.join(_ARITY)}")
        if len(self.inputs) != arity:
            raise IllegalUpdate(f"Formula: {self.operation!r} takes {arity} inputs, got {len(self.inputs)}")
        for x in self.inputs:
            if not isinstance(x, int | float | Variable):
                raise IllegalUpdate(f"Formula: {self.operation!r} takes numbers, rates and formulas, got {x!r}")
            if isinstance(x, Per) and (x.shape != "scalar" or x.domain == "unit"):
                raise IllegalUpdate(f"Formula: {x!r} must be a scalar rate, positive or real: a formula is one number")
            if isinstance(x, Complement):
                raise IllegalUpdate(f"Formula: {x!r} is a rate by itself, and stands in no formula")
            tested = self.operation == "where" and x is self.inputs[0]
            if (isinstance(x, Formula) and x.operation == ">") != tested:
                raise IllegalUpdate("Formula: a comparison is the first input of where(a > b, x, y), and nothing else")

    def __repr__(self) -> str:
        shown = [f"({x!r})" if isinstance(x, Formula) and x.infix or _negative(x) else repr(x) for x in self.inputs]
        if self.infix:
            return f" {self.operation} ".join(shown)
        return f"{self.operation}({', '.join(map(repr, self.inputs))})"

    @property
    def infix(self) -> bool:
        return not self.operation.isalpha()


Rate = float | Variable
_NAMES = {"+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow", ">": "gt"}
_TENSORS: dict[str, Any] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow,
    "gt": operator.gt, "minimum": torch.minimum, "maximum": torch.maximum, "log": torch.log,
}  # fmt: skip
_ARITY = {"+": 2, "-": 2, "*": 2, "/": 2, "**": 2, ">": 2, "minimum": 2, "maximum": 2, "where": 3, "log": 1}


def minimum(a: Rate, b: Rate) -> Formula:
    return Formula("minimum", (a, b))


def maximum(a: Rate, b: Rate) -> Formula:
    return Formula("maximum", (a, b))


def where(test: Rate, then: Rate, otherwise: Rate) -> Formula:
    return Formula("where", (test, then, otherwise))


def _negative(x: Rate) -> bool:
    return not isinstance(x, Variable) and x < 0


def log(x: Rate) -> Formula:
    return Formula("log", (x,))


def named(rate: Rate) -> Iterator[Per]:
    """The rates by name that it is made of."""
    if isinstance(rate, Per):
        yield rate
    elif isinstance(rate, Complement):
        yield rate.of
    elif isinstance(rate, Formula):
        for x in rate.inputs:
            yield from named(x)


def counted(rate: Rate) -> bool:
    """Whether it depends on the number of the datum."""
    return isinstance(rate, Count) or isinstance(rate, Formula) and any(map(counted, rate.inputs))


def as_gate(rate: Rate | str, shape: Shape = "scalar") -> Rate:
    """A gate from a number in [0, 1], a name (sugar for a unit `Per`), a `Per` or a formula."""
    if isinstance(rate, str):
        return Per(rate, shape, "unit")
    if isinstance(rate, Variable):
        return rate
    if not 0.0 <= rate <= 1.0:
        raise IllegalUpdate(f"a constant gate must lie in [0, 1], got {rate}")
    return as_float(rate)


def resolve(rate: Rate, signal: Signal) -> Tensor | float:
    """The value of a rate for this datum."""
    if isinstance(rate, Formula):
        return _apply(rate.operation, [resolve(x, signal) for x in rate.inputs])
    if isinstance(rate, Count):
        return _count(signal)
    if isinstance(rate, Complement):
        log = resolve(rate.of, signal)
        return -torch.expm1(log) if isinstance(log, Tensor) else -math.expm1(log)
    if not isinstance(rate, Per):
        assert not isinstance(rate, Variable)
        return rate
    if rate.name not in signal:
        raise ShapeError(
            f"the tuple asks for {rate.name!r} ({rate.shape}, {rate.domain}) and the signal does not supply it; "
            f"it has {sorted(signal)}"
        )
    return signal[rate.name]


def _count(signal: Signal) -> Tensor | float:
    """An integer of a state is on the host, and a number there; where a step is traced it is one of its inputs."""
    seen = signal.get(SEEN)
    if seen is None:
        raise ShapeError("the tuple has rates that depend on the number of the datum: step it by StateUpdate.step")
    return seen + 1.0 if not isinstance(seen, Tensor) or seen.is_floating_point() else float(int(seen) + 1)


def _apply(operation: str, x: list[Tensor | float]) -> Any:
    """What it comes to: of numbers on the host, or of tensors where one is."""
    if operation == "log" and isinstance(x[0], Number):  # a step is traced, where C's logarithm would forget it
        x = [x[0] * torch.ones(())]
    like = next((y for y in x if isinstance(y, Tensor)), None)
    name = _NAMES.get(operation, operation)
    if like is None:
        return EVALUATE[name](*x)
    if name == "where":
        test, then, otherwise = x
        return torch.where(test, then, otherwise) if isinstance(test, Tensor) else then if test else otherwise
    if name == "pow":  # of two tensors: where a step is traced, a constant would choose its form
        x = [y if isinstance(y, Tensor) else y * torch.ones_like(like) for y in x]
    if name in ("minimum", "maximum") and not all(isinstance(y, Tensor) for y in x):
        bound = x[1] if x[0] is like else x[0]
        return like.clamp_max(bound) if name == "minimum" else like.clamp_min(bound)
    return _TENSORS[name](*x)


def extent(per: Per, d_k: int, d_v: int) -> tuple[int, ...]:
    """The dimensions of a rate over a state (d_v, d_k)."""
    shape = per.shape
    if shape == "permutation" and d_k > ORDERED:
        raise ShapeError(f"a rate for every order of {d_k} keys has {d_k}! numbers: at most {ORDERED} keys have one")
    extents: dict[Shape, tuple[int, ...]] = {
        "scalar": (),
        "key": (d_k,),
        "row": (d_v,),
        "square": (d_v, d_k),
        "pair": (d_k // 2,),
        "row-pair": (d_v // 2,),
        "mix": (d_k, d_k),
        "permutation": (math.factorial(min(d_k, ORDERED)),),
        "own": (per.size or 1,),
    }
    return extents[shape]


def rate_shape(rate: Rate) -> Shape:
    per = rate.of if isinstance(rate, Complement) else rate
    return per.shape if isinstance(per, Per) else "scalar"


def spread(value: Tensor | float, shape: Shape) -> Tensor | float:
    """Broadcast a rate of the given shape against a state (..., d_v, d_k)."""
    if not isinstance(value, Tensor) or value.ndim == 0 or shape == "square":
        return value
    if shape == "scalar":
        return value[..., None, None]
    return value[..., None, :] if shape == "key" else value[..., :, None]
