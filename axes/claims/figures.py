"""The report's figures: what the statistical claims look like."""

from __future__ import annotations

from axes.claims import figures_capacity, figures_data, figures_depth
from axes.claims.figure import Figure

FIGURES: tuple[Figure, ...] = (*figures_capacity.FIGURES, *figures_data.FIGURES, *figures_depth.FIGURES)
