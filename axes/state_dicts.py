"""What a state dict must hold: names and shapes, with one sentence for what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from axes.errors import AxesError, ShapeError

Shape = tuple[str | int, ...]  # symbols are the same number wherever they stand


def require_names(
    owner: str, state: Mapping[str, Tensor], wanted: Iterable[str], without: Iterable[tuple[str, str]] = ()
) -> None:
    """AxesError unless the names are those wanted. without: names with no counterpart, and why."""
    wanted, reasons = list(wanted), dict(without)
    for reason in dict.fromkeys(reasons[n] for n in state if n in reasons):
        names = ", ".join(n for n in state if reasons.get(n) == reason)
        raise AxesError(f"{owner}: no counterpart of {names}: {reason}")
    unknown, missing = [n for n in state if n not in wanted], [n for n in wanted if n not in state]
    told = [f"no counterpart of {', '.join(unknown)}"] * bool(unknown) + [f"no {', '.join(missing)}"] * bool(missing)
    if told:
        raise AxesError(f"{owner}: {'; '.join(told)}. A state dict has {', '.join(wanted)}, no more and no less")


def require_shape(owner: str, name: str, x: Tensor, shape: Shape, sizes: dict[str, int]) -> None:
    """ShapeError unless x has the shape, its symbols as in `sizes`, where new ones are entered."""
    known = [n if isinstance(n, int) else sizes.get(n) for n in shape]
    if len(known) != x.ndim or any(n is not None and n != got for n, got in zip(known, x.shape, strict=True)):
        told = ", ".join(f"{n} = {k}" if isinstance(n, str) and k is not None else str(n)
                         for n, k in zip(shape, known, strict=True))  # fmt: skip
        raise ShapeError(f"{owner}: {name} must be ({told}), got {tuple(x.shape)}")
    sizes.update({n: got for n, got in zip(shape, x.shape, strict=True) if isinstance(n, str)})


__all__ = ["Shape", "require_names", "require_shape"]
