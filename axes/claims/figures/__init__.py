"""The report's figures: what the statistical claims look like."""

from __future__ import annotations

from axes.claims.figures import capacity, data, depth
from axes.claims.figures.figure import Figure

FIGURES: tuple[Figure, ...] = (*capacity.FIGURES, *data.FIGURES, *depth.FIGURES)
