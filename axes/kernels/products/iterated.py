"""Newton-Schulz iterations of small matrices, one launch each way whatever the number of steps: a matrix a program.

    d = max(factor |X|_F + shift, floor),   x <- X / d,   x <- a x + Q x,  Q = b G + c G G,  G = x x^T   steps times

and Y = size x. Products are IEEE float32, of tiles of 16 or 32. Backwards the iterates are made again and written down,
steps of them for a matrix, which the same program reads. Through a step, with G symmetric and S = dy x^T + x dy^T,

    dx = a dy + Q dy + (b S + c (S G + G S)) x

and through the quotient dX = dx / d - factor <dx, x> x / |X|_F, without the second term where |X|_F is zero or d is the
floor; that of a matrix of zeros is zero. The gradient is an operator too, whose own derivatives are those of torch's
form of all this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import Differentiable
from axes.kernels.products import LARGEST_SIDE, MOST_POLYNOMIALS

# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _number(polynomials, step, OF: tl.constexpr):
    """a, b or c (OF 0, 1, 2) of a step; the last polynomial is that of all further steps."""
    x = polynomials[OF]
    for p in tl.static_range(1, len(polynomials) // 3):
        x = tl.where(step >= p, polynomials[3 * p + OF], x)
    return x


@triton.jit
def _places(m, n, M: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr):
    """Where the entries of a matrix (m, n) stand, and which there are. TALL: it is stored as (n, m)."""
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    inside = (i < m) & (j < n)
    return (j * m + i if TALL else i * n + j), inside


@triton.jit
def _started(x, factor, shift, floor):
    """X / d, |X|_F, d, and whether d moves with X. What is not a number stays so."""
    norm = tl.sqrt_rn(tl.sum(x * x))
    moving = factor * norm + shift
    divisor = tl.where(moving < floor, floor, moving)
    return tl.div_rn(x, tl.zeros_like(x) + divisor), norm, divisor, (moving >= floor) & (norm > 0.0)


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _factor(x, b, c):
    """G and Q of an iterate."""
    gram = _product(x, tl.trans(x))
    return gram, b * gram + c * _product(gram, gram)


@triton.jit
def _next(x, polynomials, step):
    _, q = _factor(x, _number(polynomials, step, 1), _number(polynomials, step, 2))
    return _number(polynomials, step, 0) * x + _product(q, x)


@Kernel
@triton.jit(do_not_specialize=["steps"])
def _iterate(
    given, out, polynomials, steps, factor, shift, floor, size, m, n,
    M: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * m * n
    at, inside = _places(m, n, M, N, TALL)
    x = tl.load(given + first + at, mask=inside, other=0.0)
    x, norm, divisor, moves = _started(x, factor, shift, floor)
    for step in range(steps):
        x = _next(x, polynomials, step)
    tl.store(out + first + at, size * x, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["steps"])
def _iterate_backward(
    given, dout, dgiven, taken, polynomials, steps, factor, shift, floor, size, m, n,
    M: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """taken: (matrices, steps, m n), written and read by this program alone."""
    matrix = tl.program_id(0).to(tl.int64)
    first, taken = matrix * m * n, taken + matrix * steps * m * n
    at, inside = _places(m, n, M, N, TALL)
    begun = tl.load(given + first + at, mask=inside, other=0.0)
    begun, norm, divisor, moves = _started(begun, factor, shift, floor)
    x = begun
    for step in range(steps):
        tl.store(taken + step * m * n + at, x, mask=inside)
        x = _next(x, polynomials, step)
    tl.debug_barrier()  # what a thread reads another one may have written
    dx = size * tl.load(dout + first + at, mask=inside, other=0.0)
    for back in range(steps):
        step = steps - 1 - back
        b, c = _number(polynomials, step, 1), _number(polynomials, step, 2)
        x = tl.load(taken + step * m * n + at, mask=inside, other=0.0)
        gram, q = _factor(x, b, c)
        s = _product(dx, tl.trans(x))
        s += tl.trans(s)
        p = _product(s, gram)
        s = b * s + c * (p + tl.trans(p))
        dx = _number(polynomials, step, 0) * dx + _product(q, dx) + _product(s, x)
    along = tl.where(moves, factor * tl.sum(dx * begun) / tl.where(moves, norm, 1.0), 0.0)
    there = tl.max(tl.where(begun == 0.0, 0, 1)) > 0  # a matrix of zeros, which stays so, has derivative zero
    tl.store(dgiven + first + at, tl.where(there, dx / divisor - along * begun, 0.0), mask=inside)


# ---- operators -------------------------------------------------------------------------------------------------------


def _launch(
    kernel: Kernel, x: Tensor, *given: Tensor, polynomials: list[float], steps: int, start: list[float]
) -> None:
    """start: factor, shift, floor, size."""
    matrices, rows, columns = x.shape
    if not x.numel():
        return
    m, n = min(rows, columns), max(rows, columns)
    sides = [16 if side <= 16 else 32 for side in (m, n)]
    with layout.on_device(x):
        kernel[(matrices,)](
            *given, tuple(polynomials), steps, *start, m, n,
            M=sides[0], N=sides[1], TALL=rows > columns, num_warps=sides[0] * sides[1] // 256,
        )  # fmt: skip


def _run(
    x: Tensor, polynomials: list[float], steps: int, start: list[float], record: bool
) -> tuple[Tensor, list[Tensor]]:
    out = torch.empty_like(x)
    _launch(_iterate, x, x, out, polynomials=polynomials, steps=steps, start=start)
    return out, []


def _differentiate(
    x: Tensor, polynomials: list[float], steps: int, start: list[float], kept: list[Tensor], dout: Tensor
) -> list[Tensor]:
    return list(_gradient(x, dout, polynomials, steps, start))


def _run_back(
    x: Tensor, dout: Tensor, polynomials: list[float], steps: int, start: list[float], record: bool
) -> tuple[Tensor, list[Tensor]]:
    dx, taken = torch.empty_like(x), x.new_empty(x.shape[0], steps, *x.shape[1:])
    _launch(_iterate_backward, x, x, dout, dx, taken, polynomials=polynomials, steps=steps, start=start)
    return dx, []


def _differentiate_again(
    x: Tensor, dout: Tensor, polynomials: list[float], steps: int, start: list[float], kept: list[Tensor], ddx: Tensor
) -> list[Tensor]:
    """Of the gradient, in torch, which may differentiate it once more."""
    more = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views end the walk back here where dout is made of x, as that of a power of the result is.
        x, dout = (t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in (x, dout))
        (dx,) = torch.autograd.grad(_by_torch(x, polynomials, steps, start), x, dout, create_graph=True)
        return list(torch.autograd.grad(dx, (x, dout), ddx, create_graph=more))


def _by_torch(x: Tensor, polynomials: list[float], steps: int, start: list[float]) -> Tensor:
    factor, shift, floor, size = start
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    squares = x.square().sum((-2, -1), keepdim=True)
    norm = torch.where(squares > 0, torch.where(squares > 0, squares, 1.0).sqrt(), 0.0)
    zero = (x == 0).all(-1, keepdim=True).all(-2, keepdim=True)
    x = x / torch.where(zero, torch.inf, (factor * norm + shift).clamp(min=floor))
    for step in range(steps):
        a, b, c = polynomials[3 * min(step, len(polynomials) // 3 - 1) :][:3]
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return size * (x.mT if tall else x)


_gradient = Differentiable(
    "newton_schulz_gradient", _run_back, _differentiate_again,
    lambda x, dout, polynomials, steps, start, record: (torch.empty_like(x), []), gradients=2, twice=True,
)  # fmt: skip
_newton_schulz = Differentiable(
    "newton_schulz", _run, _differentiate,
    lambda x, polynomials, steps, start, record: (torch.empty_like(x), []), gradients=1, twice=True,
)  # fmt: skip


# ---- entry -----------------------------------------------------------------------------------------------------------


def newton_schulz(
    x: Tensor,
    polynomials: tuple[tuple[float, float, float], ...],
    steps: int,
    factor: float = 1.0,
    shift: float = 0.0,
    floor: float = 0.0,
    size: float = 1.0,
) -> Tensor:
    """size y, from y = x / max(factor |x|_F + shift, floor) by y <- a y + (b y y^T + c (y y^T)^2) y, `steps` times.

    x (..., m, n) in float32 with both sides up to 32; of tall matrices x^T x is made and acts from the right.
    polynomials: (a, b, c) of the first steps, the last of them that of all others, at most 8.
    Stored as x is where that is by rows or columns. x receives gradients, which may be differentiated.
    Raises ShapeError for other shapes, dtypes, numbers of polynomials, and devices that no kernel runs on.
    """
    who = "newton_schulz"
    if x.ndim < 2 or max(x.shape[-2:]) > LARGEST_SIDE:
        raise ShapeError(f"{who}: x is (..., m, n) with m and n up to {LARGEST_SIDE}, not {tuple(x.shape)}")
    if x.dtype != torch.float32:
        raise ShapeError(f"{who}: x is float32, not {x.dtype}: axes.linalg.newton_schulz takes any")
    if x.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"{who}: the Triton kernel needs a CUDA device, not {x.device}")
    if not 1 <= len(polynomials) <= MOST_POLYNOMIALS or steps < 1:
        raise ShapeError(
            f"{who}: takes at least one step, of 1 to {MOST_POLYNOMIALS} polynomials, not {steps} of {len(polynomials)}"
        )
    columns = not x.is_contiguous() and x.mT.is_contiguous()
    flat = x.mT if columns else x
    numbers = [float(number) for triple in polynomials for number in triple]
    start = [float(number) for number in (factor, shift, floor, size)]
    stack = flat.reshape(flat.shape[:-2].numel(), *flat.shape[-2:]).contiguous()
    (out,) = _newton_schulz(stack, numbers, steps, start)
    made: Tensor = out.view(flat.shape)
    return made.mT if columns else made
