"""Figures as people read them: a table on the terminal and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from axes.bench.sequence import Row, ratios, rows


def table(results: dict[str, Any]) -> Table:
    """One line a contender; a group a rule and shape, with the best peer's time over ours."""
    where = results["where"]
    out = Table(title=f"{where['device']} · torch {where['torch']} · CUDA-graph medians where there are any (eager)")
    for name in ("rule", "B,T,H,D", "who"):
        out.add_column(name)
    for name in ("forward ms", "forward + backward ms", "floor ms", "peak MB", "first call s", "rel. error"):
        out.add_column(name, justify="right")
    out.add_column("note")
    found = rows(results)
    better, last = ratios(found), None
    for row in found:
        key = row.key[:3]
        if last is not None and key != last:
            out.add_section()
        first = key != last
        last = key
        note = row.refused or row.note
        if first:
            gains = [f"{x:.1f}x" for x in better[key] if x is not None]
            note = " ".join(filter(None, (note, f"peer / ours {', '.join(gains)}" if gains else "")))
        out.add_row(
            row.rule if first else "", f"{row.shape} {row.dtype}" if first else "", row.who,
            _pair(row.forward, row.forward_eager), _pair(row.both, row.both_eager),
            "" if row.forward_floor is None else f"{row.forward_floor:.2f} / {row.both_floor:.2f}",
            "" if row.peak is None else f"{row.peak / 1e6:.0f}",
            "" if row.first_call is None else f"{row.first_call:.1f}",
            "" if row.error is None else f"{row.error:.1e} {row.worst}",
            note,
        )  # fmt: skip
    return out


def _pair(best: float | None, eager: float | None) -> str:
    if best is None:
        return ""
    return f"{best:.3f}" if eager is None or eager == best else f"{best:.3f} ({eager:.3f})"


def draw(results: dict[str, Any], path: Path) -> None:
    """Forward + backward of every rule (forward where there is no more), one bar a contender, floors as lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [r for r in rows(results) if r.forward is not None]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        groups.setdefault(row.key[:3], []).append(row)
    names = sorted({r.who for r in found})
    figure = Figure(figsize=(9.0, 1.2 + 0.45 * sum(len(g) for g in groups.values())), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    plot = figure.add_subplot()
    at, ticks, labels = 0.0, [], []
    for (rule, shape, _), members in groups.items():
        ticks.append(at + (len(members) - 1) / 2)
        labels.append(f"{rule}\n{shape}")
        for row in members:
            value = row.both if row.both is not None else row.forward
            assert value is not None
            only = "" if row.both is not None else " (forward)"
            plot.barh(at, value, color=f"C{names.index(row.who)}", height=0.8)
            plot.text(value, at, f" {row.who}{only} {value:.2f}", va="center", fontsize=7)
            if row.both_floor is not None and row.both is not None:
                plot.plot([row.both_floor] * 2, [at - 0.4, at + 0.4], color="black", linewidth=1.2)
            at += 1.0
        at += 0.6
    plot.set_yticks(ticks, labels, fontsize=8)
    plot.invert_yaxis()
    plot.set_xscale("log")
    plot.set_xlabel("ms, forward + backward; black: the floor by bytes and products")
    plot.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
