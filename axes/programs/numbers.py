"""Numbers that remember how they were computed, so that a tuple made of them is had again with other ones.

A tuple is built from hyperparameters: gates, rates, dampings. Where these are scheduled, everything about the tuple but
its numbers stays what it was. A rule is therefore called once with a `Number` for every hyperparameter: arithmetic
gives numbers that remember it, and the outcome of every comparison is kept, since another one may lead to another
tuple. `Origin.holds` says whether they all come out the same with other hyperparameters, `axes.core.declared.resolved`
gives the tuple of plain floats for them, and a traced program has the numbers as inputs (`axes.programs.program`).

To C a number is NaN. What takes its value behind Python's back, `math.sqrt` say, is therefore seen: what it makes of
one is NaN, in the tuple (`axes.core.declared.forgotten`) or in the program.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Self, final

Formula = Callable[[Sequence[Any]], Any]


@functools.lru_cache(maxsize=4096)
def formula(text: str) -> Formula:
    """The function of the hyperparameters h that a text says."""
    found: Formula = eval(f"lambda h: {text}", {"__builtins__": {"abs": abs}})
    return found


@final
class Origin:
    """Hyperparameters, and what was asked of the numbers made of them."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = tuple(values)
        self.asked: dict[str, bool] = {}  # comparisons by their text, with the outcome
        self.used: dict[str, None] = {}  # formulas that programs have as inputs
        self._holds: tuple[int, Formula] = (0, lambda h: True)

    def numbers(self) -> list[Number]:
        """h[0], h[1], ..."""
        return [Number(x, self, f"h[{i}]") for i, x in enumerate(self.values)]

    def holds(self, values: Sequence[float]) -> bool:
        """Whether every comparison comes out the same with these hyperparameters."""
        known, test = self._holds
        if known != len(self.asked):
            text = " and ".join(f"({x}) is {outcome}" for x, outcome in self.asked.items())
            self._holds = (len(self.asked), formula(text))
            test = self._holds[1]
        return bool(test(values))

    def fix(self) -> None:
        """Let no other hyperparameters do."""
        for number in self.numbers():
            number.fixed()


@final
class Number(float):
    """A hyperparameter, or what arithmetic has made of some. text: of the formula in h, the hyperparameters."""

    __slots__ = ("origin", "text", "value")
    value: float
    origin: Origin
    text: str

    def __new__(cls, value: float, origin: Origin, text: str) -> Self:
        self = super().__new__(cls, math.nan)
        self.value, self.origin, self.text = value, origin, text
        return self

    def at(self, values: Sequence[Any]) -> Any:
        """The number for other hyperparameters: floats, or tensors."""
        return formula(self.text)(values)

    def fixed(self) -> float:
        """The plain value, which the tuple now depends on."""
        self.origin.asked[f"{self.text} == {self.value!r}"] = True
        return self.value

    # ---- what makes it a float like any other -----------------------------------------------------------------

    def __float__(self) -> float:
        return self.fixed()

    def __int__(self) -> int:
        return int(self.fixed())

    def __round__(self, digits: Any = None) -> Any:
        return round(self.fixed(), digits)

    def __trunc__(self) -> int:
        return math.trunc(self.fixed())

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __bool__(self) -> bool:
        return self != 0.0

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (self.value,)

    def __neg__(self) -> Number:
        return Number(-self.value, self.origin, f"-({self.text})")

    def __pos__(self) -> Number:
        return self

    def __abs__(self) -> Number:
        return Number(abs(self.value), self.origin, f"abs({self.text})")


def as_float(x: float) -> float:
    """A plain float, or the number that is one already."""
    return x if isinstance(x, Number) else float(x)


def _operand(x: object) -> tuple[float, str] | None:
    """The value and the text of what may stand beside a number."""
    if isinstance(x, Number):
        return x.value, f"({x.text})"
    if not isinstance(x, int | float):
        return None
    x = float(x) if isinstance(x, float) else int(x)
    return x, f"({x!r})" if math.isfinite(x) else f"({'-' if x < 0 else ''}1e999)"


def _arithmetic(function: Callable[[Any, Any], Any], sign: str, swapped: bool = False) -> Any:
    def run(self: Number, other: object) -> Any:
        known = _operand(other)
        if known is None:
            return NotImplemented
        (a, x), (b, y) = (known, _own(self)) if swapped else (_own(self), known)
        return Number(function(a, b), self.origin, f"{x} {sign} {y}")

    return run


def _comparison(function: Callable[[Any, Any], Any], sign: str) -> Any:
    def run(self: Number, other: object) -> Any:
        known = _operand(other)
        if known is None:
            return NotImplemented
        outcome = bool(function(self.value, known[0]))
        self.origin.asked[f"({self.text}) {sign} {known[1]}"] = outcome
        return outcome

    return run


def _own(number: Number) -> tuple[float, str]:
    return number.value, f"({number.text})"


for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("truediv", "/"), ("pow", "**")):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name), _sign))
    setattr(Number, f"__r{_name}__", _arithmetic(getattr(operator, _name), _sign, swapped=True))
for _name, _sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    setattr(Number, f"__{_name}__", _comparison(getattr(operator, _name), _sign))


__all__ = ["Number", "Origin", "as_float", "formula"]
