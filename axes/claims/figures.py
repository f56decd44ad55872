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


def _all() -> tuple[Figure, ...]:
    from axes.claims import figures_capacity, figures_data, figures_depth

    return (*figures_capacity.FIGURES, *figures_data.FIGURES, *figures_depth.FIGURES)


def __getattr__(name: str) -> Any:
    # loaded when a report is rendered: the figures' modules import Figure from here
    if name == "FIGURES":
        return _all()
    raise AttributeError(name)
