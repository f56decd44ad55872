"""`axes bench layers` as people read it: a table on the terminal and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from axes.bench.layers import PRODUCTS, Row


def rows(results: dict[str, Any]) -> list[Row]:
    return [Row(**row) for row in results["rows"]]


def table(results: dict[str, Any]) -> Table:
    """A group a layer, a line a contender."""
    where = results["where"]
    out = Table(title=f"{where['device']} · torch {where['torch']} · eager medians, forward / forward + backward")
    for name in ("layer", "B,T,D,H", "who"):
        out.add_column(name)
    for name in ("ms", "graph ms", "peak MB", "saved B a token", "host ms", "first s", "rel. error"):
        out.add_column(name, justify="right")
    out.add_column("note")
    last = None
    for row in rows(results):
        key = row.key[:3]
        if last is not None and key != last:
            out.add_section()
        new, last = key != last, key
        saved = "" if row.saved is None else f"{row.saved:,}"
        if row.predicted is not None:
            saved += f" ({row.predicted:,} by the block)"
        out.add_row(
            row.layer if new else "", f"{row.size} {row.dtype}" if new else "", row.who,
            _pair(row.forward, row.both), _pair(row.forward_graph, row.both_graph),
            "" if row.peak is None else f"{row.peak / 1e6:,.0f}", saved, _pair(row.host, row.host_both),
            "" if row.first is None else f"{row.first:.1f}",
            "" if row.error is None else f"{row.error:.1e} {row.worst}", row.refused,
        )  # fmt: skip
    return out


def _pair(forward: float | None, both: float | None) -> str:
    return " / ".join("" if x is None else f"{x:.2f}" for x in (forward, both)) if forward is not None else ""


def draw(results: dict[str, Any], path: Path) -> None:
    """Forward + backward of every layer, a bar a contender; black: the products alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows(results):
        if row.both is not None:
            groups.setdefault(row.key[:3], []).append(row)
    names = sorted({r.who for members in groups.values() for r in members})
    lines = sum(len(g) for g in groups.values())
    figure = Figure(figsize=(9.0, 1.2 + 0.45 * lines), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    plot = figure.add_subplot()
    at, ticks, labels = 0.0, [], []
    for (layer, size, _), members in groups.items():
        floor = next((r.both for r in members if r.who == PRODUCTS), None)
        ticks.append(at + (len(members) - 1) / 2)
        labels.append(f"{layer}\n{size}")
        for row in members:
            assert row.both is not None
            plot.barh(at, row.both, color=f"C{names.index(row.who)}", height=0.8)
            plot.text(row.both, at, f" {row.who} {row.both:.2f}", va="center", fontsize=7)
            if floor is not None:
                plot.plot([floor] * 2, [at - 0.4, at + 0.4], color="black", linewidth=1.2)
            at += 1.0
        at += 0.6
    plot.set_yticks(ticks, labels, fontsize=8)
    plot.invert_yaxis()
    plot.set_xlabel("ms, forward + backward, eager; black: the products alone")
    plot.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
