"""`axes bench layers` as people read it: a table on the terminal and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from axes.bench import figures
from axes.bench.figures import Bar, bars
from axes.bench.layers import PRODUCTS, Row

_WORDS = ("layer", "B,T,D,H", "who", "note")
_HEADER = (
    "layer", "B,T,D,H", "who", "ms", "graph ms", "peak MB", "saved B a token", "host ms", "first s", "rel. error",
    "note",
)  # fmt: skip


def rows(results: dict[str, Any]) -> list[Row]:
    return [Row(**row) for row in results["rows"]]


def table(results: dict[str, Any]) -> Table:
    """A group a layer, a line a contender."""
    where = results["where"]
    title = f"{figures.machine(where)} · eager medians, forward / forward + backward"
    return figures.table(title, _HEADER, _WORDS, _lines(results))


def _lines(results: dict[str, Any]) -> Iterator[tuple[bool, tuple[str, ...]]]:
    last = None
    for row in rows(results):
        key = row.key[:3]
        new, last = key != last, key
        saved = "" if row.saved is None else f"{row.saved:,}"
        if row.predicted is not None:
            saved += f" ({row.predicted:,} by the block)"
        yield new, (
            row.layer if new else "", f"{row.size} {row.dtype}" if new else "", row.who,
            _pair(row.forward, row.both), _pair(row.forward_graph, row.both_graph),
            "" if row.peak is None else f"{row.peak / 1e6:,.0f}", saved, _pair(row.host, row.host_both),
            "" if row.first is None else f"{row.first:.1f}",
            "" if row.error is None else f"{row.error:.1e} {row.worst}", row.refused,
        )  # fmt: skip


def _pair(forward: float | None, both: float | None) -> str:
    return " / ".join("" if x is None else f"{x:.2f}" for x in (forward, both)) if forward is not None else ""


def draw(results: dict[str, Any], path: Path) -> None:
    """Forward + backward of every layer, a bar a contender; black: the products alone."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows(results):
        if row.both is not None:
            groups.setdefault(row.key[:3], []).append(row)

    def named() -> Iterator[tuple[str, list[Bar]]]:
        for (layer, size, _), members in groups.items():
            floor = next((r.both for r in members if r.who == PRODUCTS), None)
            yield f"{layer}\n{size}", [Bar(r.who, r.both, floor) for r in members if r.both is not None]

    bars(named(), path, "ms, forward + backward, eager; black: the products alone", logarithmic=False)
