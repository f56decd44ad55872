"""Functions of one number in registers, and their derivatives: activations of vectors, charts of rates.

"ssm" is softplus, which the kernel multiplies by a rate of the column; "nothing" is padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.blocks.plan import ACTIVATIONS, CHARTS
from axes.kernels.common.codes import quotient

SILU = tl.constexpr(ACTIVATIONS.index("silu"))
GELU = tl.constexpr(ACTIVATIONS.index("gelu"))
RELU = tl.constexpr(ACTIVATIONS.index("relu"))
ELU = tl.constexpr(ACTIVATIONS.index("elu+1"))
SQUASH = tl.constexpr(ACTIVATIONS.index("sigmoid"))
SIGMOID = tl.constexpr(CHARTS.index("sigmoid"))
LOGSIGMOID = tl.constexpr(CHARTS.index("logsigmoid"))
SOFTPLUS = tl.constexpr(CHARTS.index("softplus"))
SSM = tl.constexpr(CHARTS.index("ssm"))
NOTHING = tl.constexpr(CHARTS.index("nothing"))


@triton.jit
def sigmoid(x):
    return quotient(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def _normal(x):
    """The standard normal distribution function."""
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == SILU:
        x = x * sigmoid(x)
    if KIND == GELU:
        x = x * _normal(x)
    if KIND == RELU:
        x = tl.maximum(x, 0.0)
    if KIND == ELU:
        x = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    if KIND == SQUASH:
        x = sigmoid(x)
    return x


@triton.jit
def slope(x, KIND: tl.constexpr):
    """The derivative of `activate` at x."""
    if KIND == SILU:
        s = sigmoid(x)
        x = s + x * s * (1.0 - s)
    elif KIND == GELU:
        x = _normal(x) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif KIND == RELU:
        x = tl.where(x > 0, 1.0, 0.0)
    elif KIND == ELU:
        x = tl.exp(tl.minimum(x, 0.0))
    elif KIND == SQUASH:
        s = sigmoid(x)
        x = s * (1.0 - s)
    else:
        x = tl.full(x.shape, 1.0, tl.float32)
    return x


@triton.jit
def _log_1p(x):
    """log(1 + x) to the last bits for x in [0, 1]: the series of 2 artanh(x / (2 + x))."""
    s = x / (2.0 + x)
    r = s * s
    series = 1.0 / 13.0 + r * (1.0 / 15.0)
    series = 1.0 / 9.0 + r * (1.0 / 11.0 + r * series)
    series = 1.0 / 5.0 + r * (1.0 / 7.0 + r * series)
    return 2.0 * s * (1.0 + r * (1.0 / 3.0 + r * series))


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + _log_1p(tl.exp(-tl.abs(x)))


@triton.jit
def chart(z, KIND: tl.constexpr):
    if KIND == SIGMOID:
        z = sigmoid(z)
    if KIND == LOGSIGMOID:
        z = -softplus(-z)
    if (KIND == SOFTPLUS) | (KIND == SSM):
        z = softplus(z)
    return z


@triton.jit
def chart_slope(z, KIND: tl.constexpr):
    """The derivative of `chart` at z."""
    if KIND == SIGMOID:
        s = sigmoid(z)
        z = s * (1.0 - s)
    elif KIND == LOGSIGMOID:
        z = sigmoid(-z)
    elif (KIND == SOFTPLUS) | (KIND == SSM):
        z = sigmoid(z)
    else:
        z = tl.full(z.shape, 1.0, tl.float32)
    return z
