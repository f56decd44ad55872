"""How far tensors are from what they should be, by name: a test that fails says of each which it is and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Bars = Mapping[str, float] | Callable[[str], float] | float


class Rounded(TorchDispatchMode):
    """Matrix products of operands rounded to a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__.split(".")[0] in ("mm", "bmm"):
            args = tuple(x.to(self.dtype).to(x.dtype) for x in args)
        return function(*args, **(kwargs or {}))


def distance(a: Tensor, want: Tensor, least: float = 1e-3) -> float:
    """Relative to the norm of a whole tensor, of which entries of `least` are taken for zero."""
    a, want = a.detach().double().cpu(), want.detach().double().cpu()
    return float((a - want).norm() / want.norm().clamp_min(max(least * want.numel() ** 0.5, 1e-300)))


def apart(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], bars: Bars, case: str = "", least: float = 1e-3
) -> list[str]:
    """A line for every tensor that is missing, of another shape, not finite, or further away than its bar."""
    wrong = []
    for name, w in want.items():
        a = got.get(name)
        if w is None:
            continue
        bar = bars if isinstance(bars, float) else bars(name) if callable(bars) else bars[name]
        if a is None or a.shape != w.shape:
            wrong.append(f"{case} {name}: {None if a is None else tuple(a.shape)}, not {tuple(w.shape)}")
        elif not torch.isfinite(a).all():
            bad = ~torch.isfinite(a)
            wrong.append(f"{case} {name}: {int(bad.sum())} of {a.numel()} not finite, first at {_first(bad)}")
        elif (error := distance(a, w, least)) > bar:
            off = (a.detach().double().cpu() - w.detach().double().cpu()).abs()
            worst = _first(off == off.max())
            wrong.append(
                f"{case} {name}: {error:.2e} > {bar:.2e}; worst at {worst} of {tuple(w.shape)}: "
                f"{a.double()[worst]:.4e}, not {w.double()[worst]:.4e}; {_spread(off)}"
            )
    return wrong


def unequal(first: Mapping[str, Tensor | None], again: Mapping[str, Tensor | None], case: str = "") -> list[str]:
    """A line for every tensor whose bits differ."""
    wrong = []
    for name, a in first.items():
        b = again[name]
        if a is not None and b is not None and not torch.equal(a, b):
            differ = ~(a == b)
            wrong.append(
                f"{case} {name}: {int(differ.sum())} of {a.numel()} bits differ, first at {_first(differ)}: "
                f"{a[_first(differ)]:.6e} and {b[_first(differ)]:.6e}"
            )
    return wrong


@contextmanager
def unwritten() -> Iterator[None]:
    """Within the block what torch makes without filling it holds NaN."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **given: Any) -> Tensor:
            x = make(*args, **given)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    functions = patch.multiple(torch, empty=filled(torch.empty), empty_like=filled(torch.empty_like))
    with functions, patch.object(Tensor, "new_empty", filled(Tensor.new_empty)):
        yield


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in where.nonzero()[0].tolist())


def _spread(off: Tensor) -> str:
    """Over how many of its tokens and heads an error spreads."""
    if off.ndim < 3 or off.max() == 0:
        return f"{int((off > off.max() / 10).sum())} of {off.numel()} entries"
    far = (off > off.max() / 10).flatten(3).any(-1) if off.ndim > 3 else off > off.max() / 10
    return f"{int(far.sum())} of {far.numel()} (sequence, token, head)"
