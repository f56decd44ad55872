"""`axes bench depth` as people read it: a table on the terminal or in a page, and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from axes.bench import figures
from axes.bench.depth import Row, rows
from axes.bench.depth_contenders import TORCH
from axes.bench.figures import Bar, bars

_WORDS = ("mixer", "who", "note")
_HEADER = (
    "mixer", "who", "forward ms", "with backward", "floor ms", "of h + y", "peak MB", "kept B a token", "launches",
    "rel. error", "note",
)  # fmt: skip


def table(results: dict[str, Any]) -> Table:
    """A group a mixer and size, a line a contender."""
    return figures.table(_title(results), _HEADER, _WORDS, _lines(results))


def markdown(results: dict[str, Any]) -> str:
    """The same for a page."""
    return figures.markdown(_title(results), _HEADER, _WORDS, _lines(results))


def _title(results: dict[str, Any]) -> str:
    where = results["where"]
    rates = ", ".join(f"{rate / 1e9:,.0f}" for rate in dict.fromkeys((results["ceilings"] or {}).values()))
    return " · ".join(
        (
            figures.machine(where),
            f"copies at {rates} GB/s",
            "medians of CUDA graphs (eager)" if "NVIDIA" in where["device"] else "medians",
            *([] if len(_sizes(results)) > 1 else _sizes(results)),
        )
    )


def _sizes(results: dict[str, Any]) -> list[str]:
    """N,D,n and dtype of the rows, each once."""
    return list(dict.fromkeys(f"{row.size} {row.dtype}" for row in rows(results)))


def _lines(results: dict[str, Any]) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """(whether a group begins, cells)."""
    found, last = rows(results), None
    plain = {row.key[1:3]: row.both for row in found if row.mixer == "residual" and row.who == TORCH}
    many = len(_sizes(results)) > 1
    for row in sorted(found, key=lambda r: [x.key[:3] for x in found].index(r.key[:3])):
        first, last = row.key[:3] != last, row.key[:3]
        added = plain.get(row.key[1:3])
        name = f"{row.mixer} {row.size} {row.dtype}" if many else row.mixer
        yield first, (
            name if first else "", row.who,
            _pair(row.forward, row.forward_eager), _pair(row.both, row.both_eager),
            "" if row.forward_floor is None else f"{row.forward_floor:.3g} / {row.both_floor:.3g}",
            "" if row.both is None or added is None else f"{row.both / added:.1f}x",
            "" if row.peak is None else f"{row.peak / 1e6:,.0f}",
            "" if row.kept is None else f"{row.kept:,}",
            "" if row.launches is None else f"{row.launches:.0f}",
            "" if row.error is None else f"{row.error:.0e} {row.worst}", row.refused,
        )  # fmt: skip


def _pair(best: float | None, eager: float | None) -> str:
    if best is None:
        return ""
    return f"{best:.3g}" if eager is None or eager == best else f"{best:.3g} ({eager:.3g})"


def draw(results: dict[str, Any], path: Path) -> None:
    """Forward + backward of every mixer, one bar a contender; black: the floor by bytes."""
    groups: dict[tuple[str, ...], list[Bar]] = {}
    for row in rows(results):
        if row.both is not None:
            groups.setdefault(row.key[:3], []).append(Bar(row.who, row.both, row.both_floor))
    named = ((f"{mixer}\n{size} {dtype}", members) for (mixer, size, dtype), members in groups.items())
    bars(named, path, "ms of one sublayer's read and write, forward + backward; black: the floor by bytes")


__all__ = ["Row", "draw", "markdown", "table"]
