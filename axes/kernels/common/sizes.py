"""Sizes of launches, for the host: Triton's functions of these names are its compiler's too, and ten times slower."""

from __future__ import annotations


def cdiv(x: int, y: int) -> int:
    """The least whole number that is not less than x / y."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The least power of two that is not less than x, which is 1 or more."""
    return 1 << (x - 1).bit_length()
