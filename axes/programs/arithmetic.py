"""Operations of programs on numbers of the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


def _power(a: Any, b: Any) -> Any:
    """As of tensors: infinite or no number where Python raises or leaves the real numbers."""
    try:
        value = a**b
    except (ZeroDivisionError, OverflowError):
        return math.inf
    return math.nan if isinstance(value, complex) else value


EVALUATE: dict[str, Callable[..., Any]] = {
    "mul": lambda a, b: a * b, "add": lambda a, b: a + b, "sub": lambda a, b: a - b,
    "div": lambda a, b: a / b if b else math.copysign(math.inf, a) if a else math.nan, "neg": lambda a: -a,
    "pow": _power, "sqrt": math.sqrt, "rsqrt": lambda a: 1 / math.sqrt(a), "reciprocal": lambda a: 1 / a,
    "abs": abs, "sign": lambda a: (a > 0) - (a < 0), "exp": math.exp, "log": math.log, "log1p": math.log1p,
    "expm1": math.expm1, "sinh": math.sinh, "asinh": math.asinh, "tanh": math.tanh, "maximum": max, "minimum": min,
    "clamp": lambda a, low, high: min(max(a, low), high), "where": lambda c, a, b: a if c else b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "and": lambda a, b: bool(a) and bool(b),
    "or": lambda a, b: bool(a) or bool(b), "not": lambda a: not a,
}  # fmt: skip


def evaluated(name: str, given: Sequence[Any]) -> float:
    """An operation on numbers that come from tensors: infinite or no number where Python raises, as a tensor is."""
    try:
        return float(EVALUATE["ne" if name == "truth" else name](*(given if name != "truth" else (given[0], 0.0))))
    except (ValueError, OverflowError, ZeroDivisionError):
        tensors = [torch.tensor(float(x), dtype=torch.float64) for x in given]
        return float(getattr(torch, name)(*tensors))
