"""Rates and gates: a number, or a named quantity that an axis supplies per datum.

`Per` is the only channel by which a tuple asks its axis for something: a sequence layer projects it from
the token, an optimizer schedules it, a depth mixer makes it a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

from axes.core.declared import Declared
from axes.errors import IllegalUpdate, ShapeError
from axes.programs.numbers import as_float

Shape = Literal["scalar", "key", "row", "square", "pair", "mix"]
SHAPES = ("scalar", "key", "row", "square", "pair", "mix")
Domain = Literal["unit", "positive", "real"]
Signal = Mapping[str, Tensor | float]


@final
@dataclass(frozen=True, repr=False)
class Per(Declared):
    """A rate named by the tuple and supplied per datum by the axis.

    shape: scalar (...), key (..., d_k), row (..., d_v), square (..., d_v, d_k), pair (..., d_k/2) for angles,
    or mix (..., d_k, d_k) for a matrix on the key side.
    domain: unit gates are supplied as logs (g <= 0); positive and real rates as they are.
    """

    name: str
    shape: Shape = "scalar"
    domain: Domain = "positive"

    def __post_init__(self) -> None:
        if not self.name.replace("_", "").isalnum():
            raise IllegalUpdate(f"Per: name {self.name!r} must be letters, digits and underscores")
        if self.shape not in SHAPES:
            raise IllegalUpdate(f"Per({self.name!r}): shape {self.shape!r} is not one of {', '.join(SHAPES)}")
        if self.domain not in ("unit", "positive", "real"):
            raise IllegalUpdate(f"Per({self.name!r}): domain {self.domain!r} is not one of unit, positive, real")


Rate = float | Per


def as_gate(rate: float | str | Per, shape: Shape = "scalar") -> Rate:
    """A gate from a number in [0, 1], a name (sugar for a unit `Per`) or a `Per`."""
    if isinstance(rate, str):
        return Per(rate, shape, "unit")
    if isinstance(rate, Per):
        return rate
    if not 0.0 <= rate <= 1.0:
        raise IllegalUpdate(f"a constant gate must lie in [0, 1], got {rate}")
    return as_float(rate)


def resolve(rate: Rate, signal: Signal) -> Tensor | float:
    """The value of a rate for this datum."""
    if not isinstance(rate, Per):
        return rate
    if rate.name not in signal:
        raise ShapeError(
            f"the tuple asks for {rate.name!r} ({rate.shape}, {rate.domain}) and the signal does not supply it; "
            f"it has {sorted(signal)}"
        )
    return signal[rate.name]


def rate_shape(rate: Rate) -> Shape:
    return rate.shape if isinstance(rate, Per) else "scalar"


def spread(value: Tensor | float, shape: Shape) -> Tensor | float:
    """Broadcast a rate of the given shape against a state (..., d_v, d_k)."""
    if not isinstance(value, Tensor) or value.ndim == 0 or shape == "square":
        return value
    if shape == "scalar":
        return value[..., None, None]
    return value[..., None, :] if shape == "key" else value[..., :, None]
