"""Optimizer steps as people read them: a table on the terminal or in a page, and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

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
    out = Table(title=_title(results))
    for name in _HEADER:
        out.add_column(name, justify="left" if name in _WORDS else "right")
    for first, cells in _lines(results):
        if first and out.row_count:
            out.add_section()
        out.add_row(*cells)
    return out


def markdown(results: dict[str, Any]) -> str:
    """The same for a page."""
    lines = [_title(results), "", "| " + " | ".join(_HEADER) + " |"]
    lines.append("| " + " | ".join("---" if name in _WORDS else "---:" for name in _HEADER) + " |")
    lines += ["| " + " | ".join(cells) + " |" for _, cells in _lines(results)]
    return "\n".join(lines) + "\n"


def _title(results: dict[str, Any]) -> str:
    where = results["where"]
    rates = {round(rate / 1e9, 1) for rate in (results["ceilings"] or {}).values()}
    copies = f" · copies at {', '.join(f'{r:,.0f}' for r in sorted(rates))} GB/s" if rates else ""
    threads = f" · {where['threads']} threads" if where["threads"] and "NVIDIA" not in where["device"] else ""
    return f"{where['device']}{threads} · torch {where['torch']}{copies}"


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = sorted((r for r in rows(results) if r.best is not None), key=_place)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        groups.setdefault(row.key[:3], []).append(row)
    names = sorted({r.who for r in found})
    figure = Figure(figsize=(9.0, 1.5 + 0.3 * len(found) + 0.2 * len(groups)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    plot = figure.add_subplot()
    at, ticks, labels = 0.0, [], []
    for (suite, rule, dtype), members in groups.items():
        ticks.append(at + (len(members) - 1) / 2)
        labels.append(f"{rule}\n{suite} {dtype}")
        for row in members:
            assert row.best is not None and row.share is not None
            plot.barh(at, row.best, color=f"C{names.index(row.who) % 10}", height=0.8)
            plot.text(row.best, at, f" {row.who} {row.best:.3g}", va="center", fontsize=7)
            plot.plot([row.best * row.share] * 2, [at - 0.4, at + 0.4], color="black", linewidth=1.2)
            at += 1.0
        at += 0.6
    plot.set_yticks(ticks, labels, fontsize=8)
    plot.invert_yaxis()
    plot.set_xscale("log")
    plot.margins(x=0.25, y=0.01)
    plot.set_xlabel("ms a step; black: a copy of as many bytes")
    plot.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
