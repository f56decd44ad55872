"""The same model under every mixer as people read it: losses with intervals, and differences seed by seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from axes.bench.depth_training import REFERENCE
from axes.bench.optim_training_report import Summary, interval, summaries

_HEADER = ("mixer", "parameters", "rate", "held-out bits a byte", f"less {REFERENCE}'s", "CPU ms a step")


def differences(found: list[Summary]) -> dict[str, tuple[float, float]]:
    """Of every mixer: its loss less the reference's, mean over the seeds that both have and half width of the interval
    of that mean."""
    base = next((s for s in found if s.who == REFERENCE), None)
    losses = {} if base is None else {run.seed: run.loss for run in base.runs}
    out = {}
    for s in found:
        paired = [run.loss - losses[run.seed] for run in s.runs if run.seed in losses]
        if paired and s.who != REFERENCE:
            out[s.who] = interval(paired)
    return out


def table(results: dict[str, Any]) -> Table:
    """One line a mixer, best first."""
    out = Table(title=_title(results))
    for i, name in enumerate(_HEADER):
        out.add_column(name, justify="left" if not i else "right")
    for cells in _lines(results):
        out.add_row(*cells)
    return out


def markdown(results: dict[str, Any]) -> str:
    """The same for a page."""
    lines = [_title(results), "", "| " + " | ".join(_HEADER) + " |"]
    lines.append("| --- |" + " ---: |" * (len(_HEADER) - 1))
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in _lines(results))]) + "\n"


def _title(results: dict[str, Any]) -> str:
    where, found = results["where"], summaries(results)
    seeds = sorted({len(s.runs) for s in found})
    rate = "at its best rate of another seed" if any(s.sweep for s in found) else "all at one rate"
    (text,) = set(results["tasks"].values())
    machine = f"{where['device']}, {where['threads']} threads, torch {where['torch']}"
    return (
        f"{text}; {results['size']['steps']} steps, {rate}; mean and 95 % interval of "
        f"{'-'.join(map(str, seeds)) or 'no'} seeds; {machine}"
    )


def _lines(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    found = summaries(results)
    less, sizes = differences(found), results.get("parameters", {})
    for s in found:
        (mean, half), (by, within) = s.loss, less.get(s.who, (math.nan, math.nan))
        yield (
            s.who, f"{sizes[s.who]:,}" if s.who in sizes else "", f"{s.lr:.3g}",
            f"{mean:.3f} ± {half:.3f}" if math.isfinite(mean) else "broke down",
            f"{by:+.3f} ± {within:.3f}" if math.isfinite(by) else "", f"{s.milliseconds(3):.0f}",
        )  # fmt: skip


def draw(results: dict[str, Any], path: Path) -> None:
    """Differences from the reference with their intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    less = {who: d for who, d in differences(summaries(results)).items() if math.isfinite(d[0])}
    figure = Figure(figsize=(7.0, 1.0 + 0.3 * max(1, len(less))), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    plot = figure.add_subplot()
    names = list(reversed(less))
    plot.errorbar([less[n][0] for n in names], range(len(names)), xerr=[less[n][1] for n in names], fmt="o", capsize=3)
    plot.set_yticks(range(len(names)), names)
    plot.axvline(0.0, color="0.6", linewidth=0.8)
    plot.set_xlabel(f"held-out bits a byte less those of {REFERENCE}, same seeds and batches")
    plot.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
