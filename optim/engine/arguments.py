"""What constructors are given against what they declare: a number where the default is one, as many where it is a
tuple, an integer where it is one, yes or no for a flag, and one of the words of a `Literal`.

Asked before any of them computes with it (`Optimizer.__new__`), so that no rule need ask, and by the name that it was
given under. Ranges are the rules' own, but for names that mean one thing in all of them.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.errors import AxesError, UnknownName, wrong_type


class _Range(NamedTuple):
    low: float
    high: float = math.inf
    text: str = "finite and >= 0"
    open_below: bool = False
    open_above: bool = True

    def holds(self, x: float) -> bool:
        above = x > self.low if self.open_below else x >= self.low
        return above and (x < self.high if self.open_above else x <= self.high)


_POSITIVE = _Range(0.0, text="finite and > 0", open_below=True)
_FINITE = _Range(-math.inf, text="finite", open_below=True)
_RANGES = {
    "refresh": _Range(1, text="at least 1"),
    "ns_steps": _Range(1, 99, "an integer in [1, 99]", open_above=False),
    "aux_lr_scale": _Range(0.0),
    "aux_eps": _Range(0.0),
    "aux_weight_decay": _Range(0.0),
    "aux_betas": _Range(0.0, 1.0, "in [0, 1)"),
    "entry_eps": _POSITIVE,
    "row_eps": _POSITIVE,
    "exponent": _POSITIVE,
    "fit_rate": _Range(0.0, 1.0, "in (0, 1]", open_below=True, open_above=False),
    "max_norm": _Range(0.0, text="> 0", open_below=True, open_above=False),
    **dict.fromkeys(("t0", "warmup", "clip_exponent", "growth_rate"), _Range(-math.inf, open_above=False)),  # or never
}


def require_arguments(cls: type, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """AxesError for what a constructor's declaration does not allow: no number or NaN where its default is a number or
    a tuple of them, no flag where it is True or False, another word than it names, or one out of a range."""
    names, wanted = _declared(cls)
    for name, value in (*zip(names, given, strict=False), *named.items()):
        if name not in wanted or value is None and wanted[name].optional:
            continue
        want, who = wanted[name], cls.__name__
        if want.tuples:
            if not isinstance(value, StateUpdate):
                raise wrong_type(who, name, "a StateUpdate", value)
        elif want.words:
            if not isinstance(value, str):
                raise wrong_type(who, name, f"one of {', '.join(map(repr, want.words))}", value)
            if value not in want.words:
                raise UnknownName(f"{who} {name}", value, want.words)
        elif want.flag:
            if not isinstance(value, Real) and not _of_numpy(value) or value not in (True, False):
                raise wrong_type(who, name, "True or False", value)
        elif want.length is None:
            _require_number(who, name, value, want.whole, _RANGES.get(name, _FINITE))
        elif not isinstance(value, Sequence) or isinstance(value, str):
            raise wrong_type(who, name, f"a tuple of {want.length} numbers", value)
        elif len(value) != want.length:
            raise AxesError(f"{who}: {name} must be a tuple of {want.length} numbers, got {len(value)}")
        else:
            for i, x in enumerate(value):
                if x is not None or not want.gaps:
                    _require_number(who, f"{name}[{i}]", x, False, _RANGES.get(name, _FINITE))


def arguments_of(cls: type) -> list[str]:
    """The names of a constructor's arguments."""
    return _declared(cls)[0]


def _require_number(who: str, name: str, value: Any, whole: bool, among: _Range) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            got = tuple(value.shape)
            raise AxesError(f"{who}: {name} must be a number or a tensor of one element, got shape {got}")
        return
    if not isinstance(value, Real):
        raise wrong_type(who, name, "a number", value)
    if math.isnan(value):
        raise AxesError(f"{who}: {name} must be a number, got {value!r}")
    if whole and not isinstance(value, Integral):
        raise AxesError(f"{who}: {name} must be an integer, got {value!r}")
    if not among.holds(float(value)):
        raise AxesError(f"{who}: {name} must be {among.text}, got {value!r}")


def _of_numpy(value: Any) -> bool:
    """numpy's own yes and no, which are no numbers of Python's."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


class _Wanted(NamedTuple):
    """length: of a tuple's numbers, None for one alone. optional: or None. gaps: any of a tuple's. words: of a Literal.
    tuples: a StateUpdate."""

    flag: bool = False
    length: int | None = None
    optional: bool = False
    gaps: bool = False
    whole: bool = False
    words: tuple[str, ...] = ()
    tuples: bool = False


@functools.cache
def _declared(cls: type) -> tuple[list[str], dict[str, _Wanted]]:
    """The names of a constructor's arguments, and those whose values are known to be right or wrong."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    hints = typing.get_type_hints(cls.__init__)  # type: ignore[misc]
    found = {p.name: _wanted(hints.get(p.name), p.default) for p in parameters if p.default is not p.empty}
    return [p.name for p in parameters], {name: want for name, want in found.items() if want is not None}


def _wanted(hint: Any, default: Any) -> _Wanted | None:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    optional, kinds = NoneType in kinds, tuple(k for k in kinds if k is not NoneType)
    kind, *others = kinds or (None,)
    if others:
        return None
    if typing.get_origin(kind) is Literal:
        words = typing.get_args(kind)
        return _Wanted(words=words, optional=optional) if all(isinstance(w, str) for w in words) else None
    if kind is StateUpdate:
        return _Wanted(tuples=True, optional=optional)
    if isinstance(default, bool):
        return _Wanted(flag=True, optional=optional)
    if typing.get_origin(kind) is tuple and (default is None or _is_number(default)):
        within = typing.get_args(kind)
        gaps = any(NoneType in typing.get_args(w) for w in within)
        return _Wanted(length=len(within), optional=optional, gaps=gaps)
    if _is_number(default) or default is None and kind in (float, int):
        return _Wanted(optional=optional, whole=kind is int)
    return None


def _is_number(default: Any) -> bool:
    if isinstance(default, tuple):
        return bool(default) and all(x is None or _is_number(x) for x in default)
    return isinstance(default, int | float) and not isinstance(default, bool)


__all__ = ["arguments_of", "require_arguments"]
