"""Training curves as a picture. matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final


@final
@dataclass(frozen=True)
class Curve:
    """Bits per byte along one run."""

    name: str
    steps: tuple[int, ...]
    training: tuple[float, ...]
    evaluated: tuple[int, ...]
    validation: tuple[float, ...]
    unigram: float


def draw_curves(curves: Sequence[Curve], path: Path) -> None:
    """Training loss faint, validation with marks, the unigram entropy as a dashed line."""
    # the object interface, without pyplot: no display, no global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    plot = figure.add_subplot()
    for index, curve in enumerate(curves):
        colour = f"C{index}"
        plot.plot(curve.steps, curve.training, color=colour, alpha=0.3, linewidth=0.8)
        plot.plot(
            curve.evaluated, curve.validation, color=colour, marker="o", markersize=3, label=f"{curve.name}: validation"
        )
    for level in sorted({curve.unigram for curve in curves}):
        plot.axhline(level, color="0.4", linestyle="--", linewidth=0.8, label=f"unigram entropy {level:.2f}")
    plot.set_xlabel("step")
    plot.set_ylabel("bits per byte")
    plot.set_ylim(bottom=0.0)
    plot.legend(frameon=False, fontsize=8)
    plot.spines[["top", "right"]].set_visible(False)
    # two equal runs leave equal files: the program's version is not part of the picture
    figure.savefig(path, metadata={"Software": None})
