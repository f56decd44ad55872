"""Optimizer steps as people read them: a table on the terminal or in a page, and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from axes.bench import figures
from axes.bench.figures import Bar, bars
from axes.bench.optim import Row, ratios, rows
from axes.bench.optim_contenders import RULES, SUITES

_HEADER = (
    "parameters",
    "rule",
    "who",
    "ms a step",
    "eager ms",
    "state bytes",
    "launches",
    "extra MB",
    "of copy",
    "rel. error",
    "note",
)
_WORDS = ("parameters", "rule", "who", "note")


def table(results: dict[str, Any]) -> Table:
    """One line a contender; a group a rule and set of parameters, with the best peer's time over ours."""
    return figures.table(_title(results), _HEADER, _WORDS, _lines(results))


def markdown(results: dict[str, Any]) -> str:
    """The same for a page."""
    return figures.markdown(_title(results), _HEADER, _WORDS, _lines(results))


def _title(results: dict[str, Any]) -> str:
    where = results["where"]
    rates = {round(rate / 1e9, 1) for rate in (results["ceilings"] or {}).values()}
    copies = f" · copies at {', '.join(f'{r:,.0f}' for r in sorted(rates))} GB/s" if rates else ""
    return figures.machine(where) + copies


def _lines(results: dict[str, Any]) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """(whether a group begins, cells)."""
    found = sorted(rows(results), key=_place)
    gains, last = ratios(found), None
    for row in found:
        first, last = row.key[:3] != last, row.key[:3]
        note = row.refused or row.note
        if first and last in gains:
            who, gain = gains[last]
            note = "; ".join(filter(None, (note, f"{who} / ours {gain:.2f}x")))
        yield first, (
            f"{row.suite} {row.dtype}" if first else "", row.rule if first else "", row.who,
            _number(row.best, 3), _number(row.eager, 3) if row.graph is not None else "",
            _number(row.state, 2), _number(row.launches, 0), "" if row.peak is None else f"{row.peak / 1e6:.0f}",
            "" if row.share is None else f"{row.share:.0%}",
            "" if row.error is None else f"{row.error:.0e}", note,
        )  # fmt: skip


def _place(row: Row) -> tuple[int, int, str]:
    """Groups in the order in which suites and rules are declared; rows within them as they were measured."""
    return [s.name for s in SUITES].index(row.suite), [r.name for r in RULES].index(row.rule), row.dtype


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Milliseconds a step, one bar a contender; black: the time of a copy of the bytes that the step moves."""
    groups: dict[tuple[str, ...], list[Bar]] = {}
    for row in sorted((r for r in rows(results) if r.best is not None), key=_place):
        assert row.best is not None and row.share is not None
        groups.setdefault(row.key[:3], []).append(Bar(row.who, row.best, row.best * row.share))
    named = ((f"{rule}\n{suite} {dtype}", members) for (suite, rule, dtype), members in groups.items())
    bars(named, path, "ms a step; black: a copy of as many bytes")
