"""What a figure of the report is."""

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
