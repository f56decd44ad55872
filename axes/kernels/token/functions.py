"""Functions that Triton has for one kind of GPU or not at all, in operations that every backend has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """log(1 + x): what rounding 1 + x loses is put back."""
    y = 1.0 + x
    return tl.where(tl.abs(x) < 1e-7, x, tl.log(y) - ((y - 1.0) - x) / y)


@triton.jit
def expm1(x):
    """exp(x) - 1, near zero by its series."""
    series = x * (1.0 + x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720))))))
    return tl.where(tl.abs(x) < 0.3, series, tl.exp(x) - 1.0)


@triton.jit
def tanh(x):
    """From the exponential that cannot overflow."""
    small = expm1(-2.0 * tl.abs(x))
    y = -small / (2.0 + small)
    return tl.where(x < 0, -y, y)


@triton.jit
def power(x, y):
    """x ** y of x >= 0: no number for others, as where y is no integer."""
    return tl.exp2(y * tl.log2(x))


@triton.jit
def sum_2(a, b, c, d):
    """Two sums at once: what warps have is added in one exchange."""
    return a + c, b + d


@triton.jit
def sum_3(a, b, c, d, e, f):
    """Three of them."""
    return a + d, b + e, c + f


@triton.jit
def max_2(a, b, c, d):
    """Two maxima at once."""
    return tl.maximum(a, c), tl.maximum(b, d)
