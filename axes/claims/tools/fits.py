"""Numbers read off a table of measurements: slopes, exponents, where a share falls to one half."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Numbers = Sequence[float] | np.ndarray


def slope(x: Numbers, y: Numbers) -> float:
    """Of the line nearest to the points."""
    return float(np.polyfit(x, y, 1)[0])


def exponent(x: Numbers, y: Numbers) -> float:
    """p of the law y ~ x^p nearest to the points, on logarithmic axes."""
    return slope(np.log(x), np.log(y))


def half_count(counts: Sequence[int], shares: Numbers) -> float:
    """The count at which a share that falls reaches one half, interpolated."""
    return float(np.interp(-0.5, -np.array(shares), counts))
