"""Figures of the data axis: when a mini-batch is large enough, and how the answer depends on the method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from axes.claims.base import Draw
from axes.claims.figures.figure import Figure
from axes.claims.tools.noise import descended, gradients, inputs, snr


@final
@dataclass(frozen=True)
class Regime:
    """One curve: signal to noise of the mean of B gradients, measured, and the critical batch size."""

    label: str
    critical: float
    sizes: Tensor
    measured: Tensor


def regimes(seed: int = 0, n: int = 4000, d: int = 30, batches: int = 400) -> tuple[Regime, ...]:
    """Gradient and natural gradient, at a random start and after long descent; mini-batches with replacement."""
    draw = Draw(seed)
    x, noise = inputs(draw, n, d), draw.normal(n)
    noise = noise - x @ torch.linalg.lstsq(x, noise[:, None]).solution[:, 0]  # w* is the minimiser of the sample
    fisher, start = x.T @ x / n, draw.normal(d)
    found = []
    for when, error in (("start", start), ("after 50 steps", descended(x, start, 50))):
        plain = gradients(x, error, noise)
        for what, g in (("gradient", plain), ("natural gradient", torch.linalg.solve(fisher, plain.T).T)):
            critical = 1 / float(snr(g))
            sizes = torch.tensor([2.0**i for i in range(0, 13, 2)])
            mean, values = g.mean(0), []
            for size in sizes:
                chosen = torch.randint(n, (batches, int(size)), generator=draw.generator)
                counts = torch.zeros(batches, n, dtype=torch.float64)
                counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
                estimates = counts @ g / size
                values.append(mean.square().sum() / (estimates - mean).square().sum(-1).mean())
            found.append(Regime(f"{what}, {when}", critical, sizes, torch.stack(values)))
    return tuple(found)


def draw_critical(axis: Any) -> None:
    """Signal to noise of a mini-batch gradient against its size."""
    for i, regime in enumerate(regimes()):
        label = f"{regime.label}: {regime.critical:.0f}"
        axis.plot(regime.sizes, regime.measured, "os^D"[i], color=f"C{i}", markersize=5, label=label)
        axis.plot(regime.sizes, regime.sizes / regime.critical, color=f"C{i}", linewidth=1.2)
    axis.axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("batch size B")
    axis.set_ylabel("signal to noise |G|² / E|g - G|²")
    axis.legend(fontsize="small", title="critical batch size")


FIGURES = (
    Figure(
        "critical-batch",
        "Signal to noise of a mini-batch against its size",
        "Linear regression with curvatures 1/i, d = 30. Points: mini-batches drawn with replacement; lines: B |G|² / "
        "tr "
        "Σ, which crosses one at the critical batch size. At a random start natural gradient raises it; after long "
        "descent, with the error in flat directions, natural gradient lowers it.",
        draw_critical,
    ),
)
