"""The functions of `functions` in Gluon's language, and what that has no name for."""

from __future__ import annotations

from axes.kernels.common.gluon import gl, gluon
from axes.kernels.token import functions

_ENTRYWISE = functions.log1p, functions.expm1, functions.tanh, functions.power
log1p, expm1, tanh, power = (gluon.jit(f.fn) for f in _ENTRYWISE)
sum_2 = gluon.jit(functions.sum_2.fn)


@gluon.jit
def max_2(a, b, c, d):
    """Two maxima at once."""
    return gl.maximum(a, c), gl.maximum(b, d)


@gluon.jit
def _before(x, AXIS: gl.constexpr, WARPS: gl.constexpr):
    """A tile with the warps along an axis, each of which has neighbours, as an axis of their own ahead of it."""
    n: gl.constexpr = x.shape[AXIS] // WARPS
    shape: gl.constexpr = [x.shape[0], WARPS, n] if AXIS == 1 else [WARPS, n, x.shape[1]]
    return gl.reshape(x, shape)


@gluon.jit
def sum_across(x, AXIS: gl.constexpr, WARPS: gl.constexpr, NEAR: gl.constexpr, LAYOUT: gl.constexpr):
    """Over an axis that is across warps: what each of them has passes through shared memory once."""
    parts = gl.convert_layout(gl.sum(_before(x, AXIS, WARPS), AXIS + 1), NEAR)
    return gl.convert_layout(gl.sum(parts, AXIS), gl.SliceLayout(AXIS, LAYOUT), assert_trivial=True)


@gluon.jit
def max_across(x, AXIS: gl.constexpr, WARPS: gl.constexpr, NEAR: gl.constexpr, LAYOUT: gl.constexpr):
    parts = gl.convert_layout(gl.max(_before(x, AXIS, WARPS), AXIS + 1), NEAR)
    return gl.convert_layout(gl.max(parts, AXIS), gl.SliceLayout(AXIS, LAYOUT), assert_trivial=True)


@gluon.jit
def _unit(x, NAME: gl.constexpr):
    """By the processor's unit of functions alone, within two units of the last place, numbers below 2^-126 as none."""
    text: gl.constexpr = NAME + ".approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(text, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return _unit(x, "rcp")


@gluon.jit
def rsqrt(x):
    return _unit(x, "rsqrt")


@gluon.jit
def sqrt(x):
    return _unit(x, "sqrt")


@gluon.jit
def exp(x):
    return _unit(x * 1.4426950408889634, "ex2")


@gluon.jit
def exp_of_sum(a, b):
    """exp(a + b), of a tile and what is less: one product that is added for a sum and a product of every entry."""
    return _unit(a * 1.4426950408889634 + b * 1.4426950408889634, "ex2")
