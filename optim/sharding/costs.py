"""What a step of one parameter costs its owner, about: multiplications, so that owners get equal shares."""

from __future__ import annotations

import math

from axes.core.facts import fact
from axes.core.geometry import Geometry, Spectral
from axes.core.state_update import StateUpdate
from axes.linalg.newton_schulz import multiplications
from axes.optim.engine.capabilities import parts_of

_POLAR = 20  # a singular value decomposition, in products of the matrix with a square one


@fact
def cost(update: StateUpdate, shape: tuple[int, ...]) -> int:
    """Of a parameter that is (*batch, rows, columns) to its rule."""
    *batch, rows, columns = shape
    products = sum(_cost(part.parts().h, rows, columns) for part in parts_of(update))
    return math.prod(batch) * (rows * columns + products)


def _cost(h: Geometry, rows: int, columns: int) -> int:
    short, long = sorted((rows, columns))
    if isinstance(h, Spectral):
        return _POLAR * short**2 * long if h.method == "polar" else multiplications(short, long, h.steps, h.form)
    sides = {"rows": rows, "columns": columns}
    kept = [sides[side] for side in h.sides if side in sides]  # a square statistic of each, and a product with it
    return sum(side**3 + side * rows * columns for side in kept) or h.matrix * short**2 * long


__all__ = ["cost"]
