"""What parts are: values that print what was declared, in a form that `eval` reads back."""

from __future__ import annotations

import dataclasses
from typing import Any


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
