"""Figures of capacity: recall error against load, and signal to noise against the number of pairs and temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from axes.claims.base import Draw
from axes.claims.figures.figure import Figure
from axes.claims.tools.capacity import (
    linear_snr,
    list_curve,
    matrix_curve,
    softmax_recall_law,
    softmax_snr,
    softmax_snr_law,
    sphere,
)
from axes.claims.tools.tuples import DELTA, LINEAR
from axes.tasks.capacity import delta_recall_law, linear_recall_law


@final
@dataclass(frozen=True)
class Curve:
    """One memory: measured points and the theory's curve, each with its own abscissae."""

    label: str
    x: np.ndarray
    measured: np.ndarray
    theory_x: np.ndarray
    theory: np.ndarray


def capacity_against_load(seed: int = 0, d: int = 32, lists: int = 24) -> tuple[Curve, ...]:
    """Relative recall error against N/d for additive, delta and softmax memories over the same random keys.

    Matrix memories see unit keys; softmax attention the same keys at length sqrt(d) with T = sqrt(d). lists: how many
    independent sets of pairs the mean is over.
    """
    draw = Draw(seed)
    counts = sorted({round(d * 2.0**x) for x in np.arange(-3, 4.6, 0.5)})
    keys, values = draw.unit(lists, counts[-1], d), draw.normal(lists, counts[-1], 4)
    load, fine = np.array(counts) / d, np.geomspace(counts[0], counts[-1], 200)
    temperature = math.sqrt(d)
    return (
        Curve("linear", load, matrix_curve(LINEAR, keys, values, counts).numpy(), fine / d, linear_recall_law(fine, d)),
        Curve("delta", load, matrix_curve(DELTA, keys, values, counts).numpy(), fine / d, delta_recall_law(fine / d)),
        Curve(
            "softmax",
            load,
            list_curve(temperature, keys * math.sqrt(d), values, counts, queries=2).numpy(),
            fine / d,
            softmax_recall_law(fine, d, temperature),
        ),
    )


def snr_against_count(seed: int = 0, sizes: tuple[int, ...] = (16, 32), draws: int = 15) -> tuple[Curve, ...]:
    """Signal to noise at a stored key against N: additive memory, and softmax attention at T = sqrt(d) (median)."""
    draw, curves = Draw(seed), []
    for d in sizes:
        counts = np.array([5, 9, 17, 33, 65, 129])
        measured = np.array([linear_snr(draw, d, int(n), 16, 100) for n in counts])
        fine = np.geomspace(4, 20000, 60)
        curves.append(Curve(f"linear, d = {d}", counts, measured, fine, d / (fine - 1)))
    for d in sizes:
        counts = np.array([10, 50, 200, 1000, 4000, 20000])
        keys = [sphere(draw, int(counts[-1]), d) for _ in range(draws)]
        temperature = math.sqrt(d)
        measured = np.array([np.median([float(softmax_snr(k[:n], temperature)) for k in keys]) for n in counts])
        fine = np.geomspace(4, 20000, 60)
        law = softmax_snr_law(fine, d, np.array(temperature))
        curves.append(Curve(f"softmax, d = {d}", counts, measured, fine, law))
    return tuple(curves)


def snr_against_temperature(
    seed: int = 0, d: int = 32, counts: tuple[int, ...] = (65, 2000), draws: int = 31
) -> tuple[Curve, ...]:
    """Median signal to noise of softmax attention at a stored key against temperature, keys of length sqrt(d)."""
    draw, curves = Draw(seed), []
    temperatures = np.geomspace(1.5, 3000, 14)
    fine = np.geomspace(1.5, 3000, 120)
    for n in counts:
        keys = [sphere(draw, n, d) for _ in range(draws)]
        measured = np.array([np.median([float(softmax_snr(k, t)) for k in keys]) for t in temperatures])
        curves.append(Curve(f"softmax, N = {n}", temperatures, measured, fine, softmax_snr_law(np.array(n), d, fine)))
    return tuple(curves)


def plot(axis: Any, curves: tuple[Curve, ...]) -> None:
    """Points for what was measured, lines of the same colour for the theory, on logarithmic axes."""
    for i, curve in enumerate(curves):
        axis.plot(curve.x, curve.measured, "os^Dv<"[i % 6], color=f"C{i}", markersize=5, label=curve.label)
        axis.plot(curve.theory_x, curve.theory, color=f"C{i}", linewidth=1.2)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.legend(fontsize="small")


def draw_capacity(axis: Any) -> None:
    """Recall error against load."""
    plot(axis, capacity_against_load())
    axis.axhline(0.5, color="0.6", linewidth=0.8, linestyle=":")
    axis.set_ylim(1e-3, 50)
    axis.set_xlabel("load N / d")
    axis.set_ylabel("recall error |read - v|² / |v|²")


def draw_snr(axis: Any) -> None:
    """Signal to noise against the number of pairs."""
    plot(axis, snr_against_count())
    axis.axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
    axis.set_xlabel("pairs N")
    axis.set_ylabel("signal to noise (power)")


def draw_temperature(axis: Any) -> None:
    """Signal to noise against temperature, with the limit 1/(N - 1) and the standard temperature."""
    curves = snr_against_temperature()
    plot(axis, curves)
    for n in (65, 2000):
        axis.axhline(1 / (n - 1), color="0.6", linewidth=0.8, linestyle=":")
    axis.axvline(math.sqrt(32), color="0.6", linewidth=0.8, linestyle="--")
    axis.set_ylim(1e-4, 1e12)
    axis.set_xlabel("temperature T (dashed: √d)")
    axis.set_ylabel("signal to noise (power)")


FIGURES = (
    Figure(
        "capacity",
        "Recall error against load, d = 32",
        "One pass over random unit keys, then every pair is read back. Lines are theory: (N-1)/d for additive "
        "writes; 2 - E - (1-E)(2-E)/a with E = exp(-a), a = N/d, for the delta rule, whose error saturates at 2 as "
        "it forgets; the mean field for softmax attention at T = √d, whose target is outweighed from N near exp(√d - "
        "1/2) on.",
        draw_capacity,
    ),
    Figure(
        "snr",
        "Signal to noise against stored pairs",
        "Power of the target's share of the output over the power of the rest, when a stored key is the query. Lines "
        "are theory: d/(N-1) for additive memories; for softmax attention at T = √d the largest competitor on the "
        "sphere and the mean of the others: close to exp(2√d - 2)/N for many pairs.",
        draw_snr,
    ),
    Figure(
        "snr-temperature",
        "Signal to noise of softmax against temperature, d = 32",
        "Low temperatures are exponentially sharp; as T grows the weights become uniform and the ratio falls to "
        "1/(N-1) (dotted), not to the d/(N-1) of linear attention. Lines are the same theory as against N.",
        draw_temperature,
    ),
)
