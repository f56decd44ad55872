"""The training comparison as people read it: a table with intervals, and loss against steps, time and rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rich.table import Table

from axes.bench.optim_tasks import UNITS
from axes.bench.optim_training import Run, runs_of

REFERENCE = "axes adamw"  # whose final loss the others are timed to
_LEVEL = 0.95


@final
@dataclass(frozen=True)
class Summary:
    """One optimizer on one task. runs: at the best rate, the seed of the sweep left out. sweep: (rate, loss)."""

    task: str
    who: str
    lr: float
    runs: tuple[Run, ...]
    sweep: tuple[tuple[float, float], ...]

    @property
    def loss(self) -> tuple[float, float]:
        """Mean and half width of its confidence interval."""
        return interval([run.loss for run in self.runs])

    @property
    def accuracy(self) -> float | None:
        found = [run.accuracy for run in self.runs if run.accuracy is not None]
        return sum(found) / len(found) if found else None

    def curve(self) -> list[tuple[int, float, float, float, float]]:
        """(step, mean loss, half width, mean seconds, mean seconds of the CPU) where every seed got to."""
        out = []
        for points in zip(*(run.curve for run in self.runs), strict=False):
            mean, half = interval([loss for _, loss, _, _ in points])
            wall, cpu = (sum(p[i] for p in points) / len(points) for i in (2, 3))
            out.append((points[0][0], mean, half, wall, cpu))
        return out

    def milliseconds(self, column: int) -> float:
        """Of a step, by the wall (2) or by the CPU (3)."""
        last = [run.curve[-1] for run in self.runs]
        return 1e3 * sum(point[column] for point in last) / max(1, sum(point[0] for point in last))

    def reaches(self, loss: float) -> int | None:
        """The first step looked at whose mean loss is no more, to a thousandth."""
        return next((step for step, mean, *_ in self.curve() if mean <= 1.001 * loss), None)


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of Student's 95 % interval for it; infinite if a value is."""
    from scipy.stats import t

    n, mean = len(values), sum(values) / len(values)
    if n < 2 or not math.isfinite(mean):
        return mean, math.inf
    variance = sum((x - mean) ** 2 for x in values) / (n - 1)
    return mean, float(t.ppf(0.5 + _LEVEL / 2, n - 1)) * math.sqrt(variance / n)


def summaries(results: dict[str, Any]) -> list[Summary]:
    """By task, the smallest loss first; optimizers whose seeds are not all there yet are left out."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs_of(results):
        groups.setdefault((run.task, run.who), []).append(run)
    found = []
    for (task, who), runs in groups.items():
        swept = sorted((run.lr, run.loss) for run in runs if run.seed == 0)
        best = min(swept, key=lambda pair: pair[1])[0] if swept else runs[0].lr
        seeds = tuple(run for run in runs if run.seed != 0 and run.lr == best)
        if len(seeds) > 1:
            found.append(Summary(task, who, best, seeds, tuple(swept)))
    return sorted(found, key=lambda s: (list(UNITS).index(s.task), s.loss[0]))


_HEADER = (
    "task",
    "optimizer",
    "rate",
    "held-out loss",
    "accuracy",
    f"steps to {REFERENCE}'s",
    "ms a step",
    "CPU ms",
    "state bytes",
)


def table(results: dict[str, Any]) -> Table:
    """One line an optimizer, best first."""
    out = Table(title=_title(results))
    for i, name in enumerate(_HEADER):
        out.add_column(name, justify="left" if i < 2 else "right")
    for first, cells in _lines(results):
        if first and out.row_count:
            out.add_section()
        out.add_row(*cells)
    return out


def markdown(results: dict[str, Any]) -> str:
    """The same for a page."""
    lines = [_title(results), "", "| " + " | ".join(_HEADER) + " |"]
    lines.append("| " + " | ".join("---" if i < 2 else "---:" for i in range(len(_HEADER))) + " |")
    lines += ["| " + " | ".join(cells) + " |" for _, cells in _lines(results)]
    lines += ["", *(f"- {name}: {what}." for name, what in results["tasks"].items())]
    return "\n".join(lines) + "\n"


def _title(results: dict[str, Any]) -> str:
    where, found = results["where"], summaries(results)
    seeds = sorted({len(s.runs) for s in found})
    return (
        f"{results['size']['steps']} steps · mean and 95 % interval of {'-'.join(map(str, seeds)) or 'no'} seeds "
        f"at the best rate of another seed · {where['device']} · {where['threads']} threads · torch {where['torch']}"
    )


def _lines(results: dict[str, Any]) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """(whether a task begins, cells)."""
    found, last = summaries(results), None
    goals = {s.task: s.loss[0] for s in found if s.who == REFERENCE}
    for s in found:
        first, last = s.task != last, s.task
        mean, half = s.loss
        reached = s.reaches(goals[s.task]) if s.task in goals else None
        accuracy = s.accuracy
        yield first, (
            f"{s.task} ({UNITS[s.task]})" if first else "", s.who, f"{s.lr:.3g}",
            f"{mean:.3f} ± {half:.3f}" if math.isfinite(mean) else "broke down",
            "" if accuracy is None else f"{accuracy:.1%}", "" if reached is None else str(reached),
            f"{s.milliseconds(2):.1f}", f"{s.milliseconds(3):.1f}", f"{s.runs[0].state:.1f}",
        )  # fmt: skip


def draw(results: dict[str, Any], path: Path) -> None:
    """A row a task: held-out loss against steps, against seconds, and at the end against the rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = summaries(results)
    tasks = list(dict.fromkeys(s.task for s in found))
    names = sorted({s.who for s in found})
    figure = Figure(figsize=(13.0, 4.2 * max(1, len(tasks))), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for row, task in enumerate(tasks):
        plots = [figure.add_subplot(len(tasks), 3, 3 * row + i + 1) for i in range(3)]
        for s in (s for s in found if s.task == task):
            colour = f"C{names.index(s.who) % 10}"
            style = "-" if s.who.startswith("axes") else "--"
            points = s.curve()
            mean = [p[1] for p in points]
            band = [m - p[2] for m, p in zip(mean, points, strict=True)], [p[1] + p[2] for p in points]
            for plot, column in ((plots[0], 0), (plots[1], 3)):
                at = [p[column] for p in points]
                plot.plot(at, mean, style, color=colour, linewidth=1.2, label=s.who)
                plot.fill_between(at, *band, color=colour, alpha=0.12, linewidth=0)
            finite = [(lr, loss) for lr, loss in s.sweep if math.isfinite(loss)]
            plots[2].plot(*zip(*finite, strict=True), style, color=colour, marker="o", markersize=3)
        low = min(min(p[1] for p in s.curve()) for s in found if s.task == task)
        high = max(s.curve()[0][1] for s in found if s.task == task)
        for plot, label in zip(plots, ("step", "seconds of training", "learning rate, one seed"), strict=True):
            plot.set_xlabel(label)
            plot.set_ylim(0.9 * low, 1.05 * high)
            plot.set_yscale("log")
            plot.spines[["top", "right"]].set_visible(False)
        plots[0].set_ylabel(f"{task}: {UNITS[task]}, held out")
        plots[2].set_xscale("log")
        plots[0].legend(frameon=False, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
