"""What parts are: values that print what was declared, in a form that `eval` reads back."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from axes.programs.numbers import Number

P = TypeVar("P")


class Declared:
    """A frozen dataclass whose repr names only the fields that differ from their defaults."""

    def __repr__(self) -> str:
        shown = (
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if not _same(value := getattr(self, field.name), self._undeclared(field))
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def _undeclared(self, field: dataclasses.Field[object]) -> object:
        """The value of a field that was left out; classes that complete a default in __post_init__ say so here."""
        return field.default


class Recurrence(Declared):
    """An update inside another one, a filter or a statistic, named below the parts that it is made of.

    `StateUpdate` is the one class; `parts()` are its `axes.core.parts.Parts`.
    """

    def parts(self) -> Any:
        raise NotImplementedError


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


# ---- parts whose numbers are hyperparameters -------------------------------------------------------------------------


def leaves(part: object) -> Iterator[object]:
    """The values in the fields of a part, in those of its parts, and so on."""
    if isinstance(part, Declared):
        for field in dataclasses.fields(part):  # type: ignore[arg-type]
            yield from leaves(getattr(part, field.name))
    elif isinstance(part, tuple | list):
        for x in part:
            yield from leaves(x)
    else:
        yield part


def forgotten(part: object) -> bool:
    """Whether the value of a number was taken without asking."""
    return any(type(x) is float and math.isnan(x) for x in leaves(part))


def resolved(part: P, values: Sequence[float]) -> P:
    """A part with plain floats, those of other hyperparameters, in the place of numbers.

    Nothing is judged again: for these hyperparameters the part's origin must hold.
    """
    return _resolved(part, values)


def _resolved(part: Any, values: Sequence[float]) -> Any:
    if isinstance(part, Number):
        return part.at(values)
    if isinstance(part, tuple):
        new = tuple(_resolved(x, values) for x in part)
        if all(map(operator.is_, new, part)):
            return part
        return type(part)._make(new) if hasattr(part, "_make") else new
    if not isinstance(part, Declared):
        return part
    names = [field.name for field in dataclasses.fields(part)]  # type: ignore[arg-type]
    old = [getattr(part, name) for name in names]
    fields = {n: y for n, x in zip(names, old, strict=True) if (y := _resolved(x, values)) is not x}
    if not fields:
        return part
    out = object.__new__(type(part))
    for name, x in zip(names, old, strict=True):
        object.__setattr__(out, name, fields.get(name, x))
    return out
