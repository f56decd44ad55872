"""Figures of the depth axis: how Sinkhorn converges, and what 64 mixing matrices in a row do to the streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from axes.claims.base import Draw
from axes.claims.figures.figure import Figure
from axes.core.geometry import Birkhoff, Cayley

_LAYERS, _STREAMS = 64, 4


def sinkhorn_errors(seed: int = 0, iterations: int = 30) -> list[tuple[float, np.ndarray, np.ndarray]]:
    """For logits of three spreads: the spread, the column error after k iterations, and sigma_2^(2 k) from the "
    "limit."""
    draw, curves = Draw(seed), []
    base = draw.normal(5, 5)
    for spread in (0.5, 1.0, 2.0):
        limit = Birkhoff(3000).primal(spread * base)
        rate = float(torch.linalg.svdvals(limit)[1]) ** 2
        errors = np.array(
            [float((Birkhoff(k).primal(spread * base).sum(0) - 1).norm()) for k in range(1, iterations + 1)]
        )
        curves.append((spread, errors, errors[0] * rate ** np.arange(iterations)))
    return curves


def _draw_sinkhorn(axis: Any) -> None:
    for color, (spread, errors, law) in enumerate(sinkhorn_errors()):
        steps = np.arange(1, len(errors) + 1)
        axis.semilogy(
            steps, np.maximum(errors, 1e-16), "o", ms=3, color=f"C{color}", label=f"logits {spread:g} N(0, 1)"
        )
        axis.semilogy(steps, np.maximum(law, 1e-16), "-", lw=1, color=f"C{color}")
    axis.set_xlabel("Sinkhorn iterations")
    axis.set_ylabel("column sums: distance to 1")
    axis.set_ylim(1e-16, 10)
    axis.legend()


def gains(seed: int = 0, draws: int = 40) -> dict[str, np.ndarray]:
    """Singular values of products of 1..64 mixers on the mean-free streams: (largest, smallest) medians per depth."""
    draw = Draw(seed)
    n = _STREAMS
    eye = torch.eye(n, dtype=torch.float64)
    free = eye - torch.full((n, n), 1 / n, dtype=torch.float64)
    families = {
        "GL(n): I + 0.1 G": lambda g: eye + 0.1 * g,
        "Birkhoff: logits N(0, 1)": Birkhoff(50).primal,
        "Birkhoff: near the identity": lambda g: Birkhoff(50).primal(g + 8 * eye),
        "SO(n): Cayley": Cayley(scale=1.0).primal,
    }
    result = {}
    for name, link in families.items():
        mixers: Tensor = link(draw.normal(draws, _LAYERS, n, n))
        product, path = free.expand(draws, n, n), []
        for depth in range(_LAYERS):
            product = mixers[:, depth] @ product
            path.append(torch.linalg.svdvals(product)[:, 0].median())
        result[name] = torch.stack(path).numpy()
    return result


def _draw_gains(axis: Any) -> None:
    for name, path in gains().items():
        axis.semilogy(np.arange(1, _LAYERS + 1), np.maximum(path, 1e-18), label=name)
    axis.set_xlabel("sublayers")
    axis.set_ylabel("gain of stream differences")
    axis.legend()


FIGURES = (
    Figure(
        "sinkhorn",
        "Sinkhorn converges at the square of the second singular value",
        "Column error of the truncated map (points) and sigma_2^(2k) of its limit (lines), rows normalised last.",
        _draw_sinkhorn,
    ),
    Figure(
        "gain",
        "Stream differences through 64 mixing matrices",
        "Largest singular value on the mean-free streams, median of 40 draws: unconstrained mixing drifts, doubly "
        "stochastic "
        "mixing forgets unless it stays near the identity, rotations keep everything.",
        _draw_gains,
    ),
)
