"""Roots of monotone equations with implicit derivatives: what an implicit step or a Moreau residual has to solve.

Iteration counts are fixed, so that both solvers run under `torch.func.vmap` and need no host synchronisation. The
iterations see detached values. Derivatives enter through `order` live chord steps x <- x - J^-1 F(x) from the
converged root, with J detached: one step is exact up to first derivatives (implicit function theorem), and since
J is off by O(change of the parameters), each further step makes one more order of derivatives exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp, vmap

Equation = Callable[[Tensor], Tensor]


def _newton_step(jacobian: Tensor, value: Tensor) -> Tensor:
    # solve_ex reports a singular matrix as non-finite numbers instead of synchronising in order to raise
    dtype = torch.promote_types(value.dtype, torch.float32)
    step: Tensor = torch.linalg.solve_ex(jacobian.to(dtype), value.to(dtype).unsqueeze(-1), check_errors=False).result
    return step.squeeze(-1).to(value.dtype)


def _jacobian(residual: Equation, x: Tensor) -> Tensor:
    """dF/dx (..., n, n) of a residual that couples only the last dimension: one tangent per basis vector."""
    n = x.shape[-1]
    basis = torch.eye(n, dtype=x.dtype, device=x.device).reshape(n, *[1] * (x.ndim - 1), n).expand(n, *x.shape)

    def column(tangent: Tensor) -> Tensor:
        image: Tensor = jvp(residual, (x,), (tangent,))[1]
        return image

    columns: Tensor = vmap(column)(basis)
    return columns.movedim(0, -1)


def root(residual: Equation, start: Tensor, iterations: int = 30, halvings: int = 12, order: int = 2) -> Tensor:
    """x with F(x) = 0, by Newton's method with backtracking.

    Args:
        residual: F, (..., n) -> (..., n); monotone, or at least with a non-singular Jacobian; batch entries do not
            mix. It may close over tensors that require gradients.
        start: x_0 (..., n), any batch shape, empty included.
        iterations: Newton steps.
        halvings: each step tries the lengths 1, 1/2, ..., 2^-halvings, keeps the one with the smallest |F| and stays
            where it is if none improves, so that |F| never grows.
        order: derivatives of x with respect to what F closes over are exact up to this order.

    Where F is not differentiable, or its Jacobian singular, at the root, no derivative exists and none is promised.
    """
    with torch.no_grad():
        x = start.detach()
        powers = torch.arange(-1, halvings + 1, device=x.device).reshape(-1, *[1] * x.ndim)
        lengths = torch.where(powers < 0, 0.0, 0.5**powers).to(x.dtype)
        for _ in range(iterations):
            step = _newton_step(_jacobian(residual, x), residual(x))
            trials = x - lengths * torch.where(step.isfinite(), step, 0.0)
            sizes = vmap(residual)(trials).norm(dim=-1, keepdim=True).nan_to_num(nan=torch.inf)
            x = trials.take_along_dim(sizes.argmin(0, keepdim=True), 0).squeeze(0).detach()
        jacobian = _jacobian(residual, x).detach()
    for _ in range(order):
        x = x - _newton_step(jacobian, residual(x))
    return x


def scalar_root(function: Equation, lower: Tensor, upper: Tensor, iterations: int = 60, order: int = 2) -> Tensor:
    """x with f(x) = 0 for an element-wise non-decreasing f with f(lower) <= 0 <= f(upper), by bisection.

    Args:
        function: f, element-wise: entry i of f(x) depends on entry i of x only; never evaluated at the bounds.
        lower, upper: brackets, of the shape of x; their derivatives are not used.
        iterations: halvings of the bracket.
        order: as in `root`. Where f'(x) is 0 or not finite, the derivative of x is taken as 0.
    """
    with torch.no_grad():
        lower, upper = lower.detach(), upper.detach()
        for _ in range(iterations):
            middle = (lower + upper) / 2
            below = function(middle) < 0
            lower, upper = torch.where(below, middle, lower), torch.where(below, upper, middle)
        x = (lower + upper) / 2
        slope: Tensor = jvp(function, (x,), (torch.ones_like(x),))[1].detach()
        slope = torch.where(slope.isfinite() & (slope != 0), slope, torch.inf)
    for _ in range(order):
        x = x - function(x) / slope
    return x
