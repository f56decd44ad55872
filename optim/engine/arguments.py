"""What constructors are given against what they declare: a number where the default is one, as many where it is a
tuple, and for a flag yes or no.

Asked before any of them computes with it (`Optimizer.__new__`), so that no rule need ask. Ranges are the parts' own.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from axes.errors import AxesError, wrong_type


def require_arguments(cls: type, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """AxesError for what is no number, or NaN, where a constructor's default is a number or a tuple of them, or None
    where it may be a number too; and for what is no flag where it is True or False."""
    names, wanted = _declared(cls)
    for name, value in (*zip(names, given, strict=False), *named.items()):
        if name not in wanted or value is None and wanted[name].optional:
            continue
        length, who = wanted[name].length, cls.__name__
        if wanted[name].flag:
            if not isinstance(value, Real) and not _of_numpy(value) or value not in (True, False):
                raise wrong_type(who, name, "True or False", value)
        elif length is None:
            _require_number(who, name, value, "a number")
        elif not isinstance(value, Sequence) or isinstance(value, str):
            raise wrong_type(who, name, f"a tuple of {length} numbers", value)
        elif len(value) != length:
            raise AxesError(f"{who}: {name} must be a tuple of {length} numbers, got {len(value)}")
        else:
            for i, x in enumerate(value):
                if x is not None or not wanted[name].optional:
                    _require_number(who, f"{name}[{i}]", x, "a number")


def _require_number(who: str, name: str, value: Any, wanted: str) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            got = tuple(value.shape)
            raise AxesError(f"{who}: {name} must be a number or a tensor of one element, got shape {got}")
    elif not isinstance(value, Real):
        raise wrong_type(who, name, wanted, value)
    elif math.isnan(value):
        raise AxesError(f"{who}: {name} must be a number, got {value!r}")


def _of_numpy(value: Any) -> bool:
    """numpy's own yes and no, which are no numbers of Python's."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


class _Wanted(NamedTuple):
    """length: of a tuple's numbers, None for one alone. optional: or None."""

    flag: bool
    length: int | None
    optional: bool


@functools.cache
def _declared(cls: type) -> tuple[list[str], dict[str, _Wanted]]:
    """The names of a constructor's arguments, and those that stand for numbers and flags."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    wanted = {}
    for p in parameters:
        kinds, default = str(p.annotation).split(" | "), p.default
        if isinstance(default, bool) or _is_number(default) or (default is None and kinds in _OPTIONAL):
            length = len(default) if isinstance(default, tuple) else None
            wanted[p.name] = _Wanted(isinstance(default, bool), length, "None" in str(p.annotation))
    return [p.name for p in parameters], wanted


_OPTIONAL = (["float", "None"], ["int", "None"])


def _is_number(default: Any) -> bool:
    if isinstance(default, tuple):
        return bool(default) and all(x is None or _is_number(x) for x in default)
    return isinstance(default, int | float) and not isinstance(default, bool)


__all__ = ["require_arguments"]
