"""Figures as people read them: a table on the terminal and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from axes.bench import figures
from axes.bench.figures import Bar, bars
from axes.bench.sequence import ratios, rows

_WORDS = ("rule", "B,T,H,D", "who", "note")
_HEADER = (
    "rule", "B,T,H,D", "who", "forward ms", "forward + backward ms", "floor ms", "peak MB", "first call s",
    "rel. error", "note",
)  # fmt: skip


def table(results: dict[str, Any]) -> Table:
    """One line a contender; a group a rule and shape, with the best peer's time over ours."""
    where = results["where"]
    title = f"{figures.machine(where)} · CUDA-graph medians where there are any (eager)"
    return figures.table(title, _HEADER, _WORDS, _lines(results))


def _lines(results: dict[str, Any]) -> Iterator[tuple[bool, tuple[str, ...]]]:
    found = rows(results)
    better, last = ratios(found), None
    for row in found:
        key = row.key[:3]
        first, last = key != last, key
        note = row.refused or row.note
        if first:
            gains = [f"{x:.1f}x" for x in better[key] if x is not None]
            note = " ".join(filter(None, (note, f"peer / ours {', '.join(gains)}" if gains else "")))
        yield first, (
            row.rule if first else "", f"{row.shape} {row.dtype}" if first else "", row.who,
            _pair(row.forward, row.forward_eager), _pair(row.both, row.both_eager),
            "" if row.forward_floor is None else f"{row.forward_floor:.2f} / {row.both_floor:.2f}",
            "" if row.peak is None else f"{row.peak / 1e6:.0f}",
            "" if row.first_call is None else f"{row.first_call:.1f}",
            "" if row.error is None else f"{row.error:.1e} {row.worst}",
            note,
        )  # fmt: skip


def _pair(best: float | None, eager: float | None) -> str:
    if best is None:
        return ""
    return f"{best:.3f}" if eager is None or eager == best else f"{best:.3f} ({eager:.3f})"


def draw(results: dict[str, Any], path: Path) -> None:
    """Forward + backward of every rule (forward where there is no more), one bar a contender, floors as lines."""
    groups: dict[tuple[str, ...], list[Bar]] = {}
    for row in rows(results):
        value = row.both if row.both is not None else row.forward
        if value is not None:
            bar = Bar(row.who, value, row.both_floor if row.both is not None else None)
            bar = bar if row.both is not None else replace(bar, note=" (forward)")
            groups.setdefault(row.key[:3], []).append(bar)
    named = ((f"{rule}\n{shape}", members) for (rule, shape, _), members in groups.items())
    bars(named, path, "ms, forward + backward; black: the floor by bytes and products")
