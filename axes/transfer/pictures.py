"""Pictures of results: effects by experiment and task, and training curves of arms and controls."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axes.files import replacing
from axes.transfer.statistics import verdict

_COLOURS = ("#0b6bcb", "#9a6700")  # of arms, of controls


def heat_map(results: Mapping[str, Any]) -> Any:
    """Effects, positive where the arm is better, in margins; hatched where nothing is decided."""
    from matplotlib.patches import Rectangle

    experiments = results["experiments"]
    tasks = list(dict.fromkeys(c["task"] for e in experiments for c in e["compared"]))
    figure, plot = _figure(1.6 + 1.25 * max(1, len(tasks)), 1.6 + 0.36 * max(1, len(experiments)))
    drawn = plot.imshow([[float("nan")] * len(tasks) for _ in experiments], cmap="RdBu", vmin=-5, vmax=5, aspect="auto")
    for row, e in enumerate(experiments):
        for c in e["compared"]:
            if "effect" not in c:
                continue
            column, margins = tasks.index(c["task"]), c["effect"] / e["margin"]
            colour = drawn.to_rgba(max(-5.0, min(5.0, margins)))
            hatch = "///" if verdict(c["low"], c["high"], e["margin"]) == "undecided" else None
            cell = Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=colour, edgecolor="0.6", hatch=hatch, lw=0.5)
            plot.add_patch(cell)
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.5}
            plot.text(column, row, f"{c['effect']:+.3f}", ha="center", va="center", fontsize=8, bbox=box)
    plot.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right", fontsize=8)
    plot.set_yticks(range(len(experiments)), [e["id"] for e in experiments], fontsize=8)
    figure.colorbar(drawn, label="effect in margins, arm less control", shrink=0.9)
    return figure


def curves(results: Mapping[str, Any]) -> Any:
    """Mean training loss of arm and control of every comparison, each at its own learning rate."""
    found = [(e["id"], c) for e in results["experiments"] for c in e["compared"]]
    columns = min(3, max(1, len(found)))
    rows = -(-max(1, len(found)) // columns)
    figure, plots = _figure(3.4 * columns, 2.4 * rows, rows, columns)
    by_run: dict[tuple[str, str], list[Any]] = {}
    for run in results["runs"]:
        if run["seed"]:
            by_run.setdefault((run["system"], run["task"]), []).append(run["curve"])
    for plot in plots.flat[len(found) :]:
        plot.set_visible(False)
    for plot, (name, c) in zip(plots.flat, found, strict=False):
        for side, colour in zip(("arm", "control"), _COLOURS, strict=True):
            all_ = by_run.get((c[side]["system"], c["task"]), [])
            for points in all_:
                if points:
                    plot.plot(*zip(*points, strict=True), color=colour, lw=0.5, alpha=0.35)
            whole = [points for points in all_ if points and len(points) == len(all_[0])]
            if whole:
                means = [sum(p[i][1] for p in whole) / len(whole) for i in range(len(whole[0]))]
                plot.plot([p[0] for p in whole[0]], means, color=colour, lw=1.6, label=side)
        plot.set_title(f"{name} · {c['task']}", fontsize=9)
        plot.tick_params(labelsize=7)
        plot.spines[["top", "right"]].set_visible(False)
    if found:
        if plots.flat[0].get_legend_handles_labels()[0]:
            plots.flat[0].legend(frameon=False, fontsize=8)
        figure.supxlabel("step", fontsize=8)
        figure.supylabel("training loss", fontsize=8)
    return figure


def _figure(width: float, height: float, rows: int = 0, columns: int = 0) -> tuple[Any, Any]:
    # the object interface, without pyplot: no display, no global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False) if rows else figure.add_subplot()


def _bytes(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})  # equal results leave equal files
    return buffer.getvalue()


def save(figure: Any, path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(_bytes(figure))


def data_url(figure: Any) -> str:
    """A picture that a page carries itself."""
    return "data:image/png;base64," + base64.b64encode(_bytes(figure)).decode()
