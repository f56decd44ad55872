"""The report's figures: what the statistical claims look like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Figure:
    """A named plot: draw(axis) computes its data from fixed seeds and draws on a matplotlib axis."""

    name: str
    title: str
    caption: str
    draw: Callable[[Any], None]


def __getattr__(name: str) -> Any:
    # FIGURES is loaded when a report is rendered: the figures' modules import Figure from here
    if name != "FIGURES":
        raise AttributeError(name)
    from axes.claims.figures_capacity import FIGURES as CAPACITY
    from axes.claims.figures_data import FIGURES as DATA
    from axes.claims.figures_depth import FIGURES as DEPTH

    return (*CAPACITY, *DATA, *DEPTH)
