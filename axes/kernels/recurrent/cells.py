"""One token of a cell and its derivative, device side: `axes.routes.cells` says what they are.

Tiles are (BM, BV): sequences and channels of a head. p are the pre-activations x + u, u = W h + b alone where a cell
asks for it; `extra` is what is carried beside h. Every function is a cell's by its name.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Of large arguments too: no exponent is positive."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def log_sum(a, b):
    """log(e^a + e^b)."""
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def walk(x0, x1, x2, x3, u0, u1, u2, u3, y, extra, CELL: tl.constexpr):
    """What is shown, the state and what is carried, after a token."""
    if CELL == "gru":
        r, z = sigmoid(x0 + u0), sigmoid(x1 + u1)
        n = tanh(x2 + r * u2)
        after = n + z * (y - n)
        shown = after
        carried = extra
    else:
        held = extra + log_sigmoid(x1 + u1)
        carried = log_sum(held, x0 + u0)
        rho = tl.exp(x0 + u0 - carried)
        after = y + rho * (tanh(x2 + u2) - y)
        shown = sigmoid(x3 + u3) * after
    return shown, after, carried


@triton.jit
def back(x0, x1, x2, x3, u0, u1, u2, u3, y, extra, dshown, dy, dextra, CELL: tl.constexpr):
    """Gradients of the pre-activations' x and u, of the state before and of what was carried."""
    if CELL == "gru":
        r, z = sigmoid(x0 + u0), sigmoid(x1 + u1)
        n = tanh(x2 + r * u2)
        d = dshown + dy
        before = d * z
        by_n = (d - before) * (1.0 - n * n)
        dx0 = by_n * u2 * r * (1.0 - r)
        dx1 = d * (y - n) * z * (1.0 - z)
        dx2, dx3 = by_n, by_n
        du2 = by_n * r
        out = dextra
    else:
        held = extra + log_sigmoid(x1 + u1)
        total = log_sum(held, x0 + u0)
        rho, z, o = tl.exp(x0 + u0 - total), tanh(x2 + u2), sigmoid(x3 + u3)
        after = y + rho * (z - y)
        d = dy + dshown * o
        by_rho = d * (z - y) * rho
        through = dextra - by_rho
        out = through * (1.0 - rho)
        dx0 = by_rho + through * rho
        dx1 = out * sigmoid(-x1 - u1)
        dx2 = d * rho * (1.0 - z * z)
        dx3 = dshown * after * o * (1.0 - o)
        du2 = dx2
        before = d * (1.0 - rho)
    return dx0, dx1, dx2, dx3, du2, before, out
