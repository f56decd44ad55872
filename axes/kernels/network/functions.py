"""What both forms of the kernels of two layers are made of, of single numbers."""

# mypy: disable-error-code="assignment, var-annotated, index, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normal(z):
    """The distribution and the density of a normal number, of one exponential: Abramowitz and Stegun 7.1.26, an error
    of at most 7.5e-8."""
    return normal_of(z, tl.exp2(-0.7213475204444817 * z * z), 1.0 / (1.0 + 0.2316418882635141 * tl.abs(z)))


@triton.jit
def normal_of(z, e, t):
    """Of e^{-z^2/2} and 1 / (1 + 0.23164.. |z|)."""
    half = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    upper = half * e
    return tl.where(z < 0.0, upper, 1.0 - upper), e * 0.3989422804014327


@triton.jit
def gelu(z):
    """And its derivative."""
    return gelu_of(z, normal(z))


@triton.jit
def gelu_of(z, known):
    below, density = known
    return z * below, below + z * density


@triton.jit
def bent(z):
    """gelu, its first and its second derivative."""
    return bent_of(z, normal(z))


@triton.jit
def bent_of(z, known):
    below, density = known
    return z * below, below + z * density, density * (2.0 - z * z)


@triton.jit
def line(ptr, at, there, GATED: tl.constexpr):
    """a of the tokens of a block; 1 where nothing is forgotten."""
    if GATED:
        made = tl.load(ptr + at, mask=there, other=0.0)
    else:
        made = tl.where(there, 1.0, 0.0)
    return made
