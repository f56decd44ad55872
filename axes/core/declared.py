"""What parts are: values that print what was declared, in a form that `eval` reads back."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

from axes.errors import IllegalUpdate
from axes.programs.numbers import Number

P = TypeVar("P")


class Declared:
    """A frozen dataclass whose repr names only the fields that differ from their defaults.

    A field that holds a number holds nothing but what it is annotated with, which is seen to before the class looks at
    its value.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        judge = cls.__dict__.get("__post_init__")
        if judge is None:
            return

        @functools.wraps(judge)
        def complete(self: Declared) -> None:
            require_numbers(self)
            judge(self)

        cls.__post_init__ = complete  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        require_numbers(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.said())})"

    def said(self) -> tuple[str, ...]:
        """The fields that are not what they are when left out."""
        return tuple(
            field.name
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if not _same(getattr(self, field.name), self._undeclared(field))
        )

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


# ---- what fields may hold --------------------------------------------------------------------------------------------


def require_numbers(part: Declared) -> None:
    """IllegalUpdate if a field that is annotated as a number, or as one among others, holds something else."""
    cls: Any = type(part)
    for name, hint in _numbers(cls).items():
        value = getattr(part, name)
        if not _fits(value, hint):
            raise IllegalUpdate(f"{type(part).__name__}: {name} must be {_described(hint)}, got {value!r}")


@functools.cache
def _numbers(cls: Any) -> dict[str, Any]:
    """The fields of a class that hold numbers, with their annotations."""
    names = [field.name for field in dataclasses.fields(cls)]
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # of a class inside a function, whose names nobody else sees
        return {}
    return {name: hints[name] for name in names if {float, int} & set(_alternatives(hints[name]))}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """What an annotation allows; of a tuple, for its members."""
    of = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        return tuple(found for one in of for found in _alternatives(one))
    return (hint,)


def _fits(value: object, hint: Any) -> bool:
    allowed = _alternatives(hint)
    if isinstance(value, tuple | list):  # how many there must be is the class's to say
        return all(_fits(x, hint) for x in value)
    if float in allowed and isinstance(value, numbers.Real) or int in allowed and isinstance(value, numbers.Integral):
        return True
    words = [word for one in allowed if typing.get_origin(one) is Literal for word in typing.get_args(one)]
    kinds = tuple(one for one in allowed if isinstance(one, type) and one not in (float, int))
    return value in words or isinstance(value, kinds)


def _described(hint: Any) -> str:
    words: dict[Any, str] = {float: "a number", int: "an integer", type(None): "None", str: "a name"}
    allowed = (one for one in _alternatives(hint) if one is not ...)
    found = (x for one in allowed for x in (typing.get_args(one) if typing.get_origin(one) is Literal else (one,)))
    return " or ".join(dict.fromkeys(words.get(one, str(getattr(one, "__name__", one))) for one in found))


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


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


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
    kind: Any = type(part)
    names = _names(kind)
    old = [getattr(part, name) for name in names]
    fields = {n: y for n, x in zip(names, old, strict=True) if (y := _resolved(x, values)) is not x}
    if not fields:
        return part
    out = object.__new__(type(part))
    for name, x in zip(names, old, strict=True):
        object.__setattr__(out, name, fields.get(name, x))
    return out
