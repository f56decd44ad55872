"""One token of a cell and its derivative, device side: `axes.routes.cells` says what they are.

Tiles are of sequences and channels of a head. p are the pre-activations x + u, u = W h + b; GRU's third is x alone, and
u2 its u; `extra` is what is carried beside h. Every function is a cell's by its name.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power(x):
    """2^x by the instruction that leaves out numbers below 2^-126."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def over(x):
    """1 / x, likewise; 0 of infinity."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def log_2(x):
    """Likewise."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def log(x, QUICK: tl.constexpr):
    return 0.6931471805599453 * log_2(x) if QUICK else tl.log(x)


@triton.jit
def exp(x, QUICK: tl.constexpr):
    return power(1.4426950408889634 * x) if QUICK else tl.exp(x)


@triton.jit
def sigmoid(x, QUICK: tl.constexpr = False):
    if QUICK:
        return over(1.0 + power(-1.4426950408889634 * x))
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x, QUICK: tl.constexpr = False):
    """Of large arguments too. QUICK: to 1e-7, not to a part of itself."""
    if QUICK:
        return 1.0 - 2.0 * over(1.0 + power(2.8853900817779268 * x))
    else:
        e = tl.exp(-2.0 * tl.abs(x))  # no exponent is positive
        y = (1.0 - e) / (1.0 + e)
        return tl.where(x < 0, -y, y)


@triton.jit
def log_sigmoid(x, QUICK: tl.constexpr = False):
    return tl.minimum(x, 0.0) - log(1.0 + exp(-tl.abs(x), QUICK), QUICK)


@triton.jit
def log_sum(a, b, QUICK: tl.constexpr = False):
    """log(e^a + e^b)."""
    return tl.maximum(a, b) + log(1.0 + exp(-tl.abs(a - b), QUICK), QUICK)


@triton.jit
def walk(p0, p1, p2, p3, u2, y, extra, CELL: tl.constexpr, QUICK: tl.constexpr = False):
    """What is shown, the state and what is carried, after a token. QUICK: by instructions of Nvidia's."""
    if CELL == "gru":
        r, z = sigmoid(p0, QUICK), sigmoid(p1, QUICK)
        n = tanh(p2 + r * u2, QUICK)
        after = n + z * (y - n)
        shown = after
        carried = extra
    else:
        held = extra + log_sigmoid(p1, QUICK)
        carried = log_sum(held, p0, QUICK)
        rho = exp(p0 - carried, QUICK)
        after = y + rho * (tanh(p2, QUICK) - y)
        shown = sigmoid(p3, QUICK) * after
    return shown, after, carried


@triton.jit
def slopes(p0, p1, p2, p3, u2, y, extra, CELL: tl.constexpr):
    """What `through` multiplies gradients by, of a token alone: of the pre-activations, the rate of y, and that of what
    is shown."""
    if CELL == "gru":
        r, z = sigmoid(p0), sigmoid(p1)
        n = tanh(p2 + r * u2)
        by_n = (1.0 - z) * (1.0 - n * n)
        a0, a1, a2, a3 = by_n * u2 * r * (1.0 - r), (y - n) * z * (1.0 - z), by_n, by_n * r
        rate = z
        shows = z
    else:
        total = log_sum(extra + log_sigmoid(p1), p0)
        rho, z, o = tl.exp(p0 - total), tanh(p2), sigmoid(p3)
        after = y + rho * (z - y)
        a0, a1, a2, a3 = z - y, sigmoid(-p1), rho * (1.0 - z * z), after * o * (1.0 - o)
        rate = rho
        shows = o
    return a0, a1, a2, a3, rate, shows


@triton.jit
def through(a0, a1, a2, a3, rate, shows, dshown, dy, dextra, CELL: tl.constexpr):
    """Gradients, linear in those of what a token left: of up to four x, or three and the u that r multiplies (GRU); of
    the state before; of what was carried. Where not said otherwise, u hears what x does."""
    if CELL == "gru":
        d = dshown + dy
        d0, d1, d2, d3 = d * a0, d * a1, d * a2, d * a3
        before = d * rate
        out = dextra
    else:
        d = dy + dshown * shows
        by_rho = d * a0 * rate
        left = dextra - by_rho
        out = left * (1.0 - rate)
        d0, d1, d2, d3 = by_rho + left * rate, out * a1, d * a2, dshown * a3
        before = d * (1.0 - rate)
    return d0, d1, d2, d3, before, out
