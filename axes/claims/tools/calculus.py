"""Derivatives by autograd and minimisers by general solvers: sides of a check that know nothing of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import optimize
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from axes.claims.tools.float64 import zeros

Scalar = Callable[[Tensor], Tensor]


def gradient(value: Scalar, at: Tensor) -> Tensor:
    """The derivative of a scalar function."""
    x = at.detach().clone().requires_grad_()
    return torch.autograd.grad(value(x), x)[0]


def derivative(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The Jacobian as a matrix: a row for every number of the result, a column for every number of the argument."""
    j = jacobian(function, at)
    assert isinstance(j, Tensor)
    return j.reshape(-1, at.numel())


def curvature(value: Scalar, at: Tensor) -> Tensor:
    """The Hessian as a matrix over the numbers of the argument."""
    h = hessian(value, at)
    assert isinstance(h, Tensor)
    return h.reshape(at.numel(), at.numel())


def negative_entropy(w: Tensor) -> Tensor:
    return -torch.special.entr(w).sum()


def half_square(w: Tensor) -> Tensor:
    return w.square().sum() / 2


def vector_huber(e: Tensor, delta: float) -> Tensor:
    """Huber's cost of the norm of an error."""
    size = e.norm()
    return torch.where(size <= delta, size * size / 2, delta * (size - delta / 2))


def quadratic_minimiser(value: Scalar, *shape: int) -> Tensor:
    """argmin of a quadratic function, from its derivatives at zero."""
    zero = zeros(*shape)
    return -torch.linalg.solve(curvature(value, zero), gradient(value, zero).flatten()).reshape(shape)


def minimiser(
    value: Scalar,
    start: Tensor,
    equal: Sequence[Scalar] = (),
    positive: Sequence[Scalar] = (),
    lower: float | None = None,
) -> Tensor:
    """argmin of a smooth function by a general solver (BFGS or, with constraints, SLSQP) with autograd's gradients.

    equal: functions that must be 0.  positive: functions that must be >= 0.  lower: a bound on every entry.
    """

    def shaped(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(x, dtype=np.float64).copy()).reshape(start.shape)

    def of(f: Scalar) -> Callable[[np.ndarray], float]:
        return lambda x: float(f(shaped(x)))

    def slope(f: Scalar) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: gradient(f, shaped(x)).flatten().numpy()

    constraints = [
        {"type": kind, "fun": of(f), "jac": slope(f)} for kind, fs in (("eq", equal), ("ineq", positive)) for f in fs
    ]
    bounds = None if lower is None else [(lower, None)] * start.numel()
    method = "SLSQP" if constraints else "BFGS" if bounds is None else "L-BFGS-B"
    limit = {"ftol": 1e-15} if method == "SLSQP" else {"gtol": 1e-11}
    if method == "L-BFGS-B":
        limit["ftol"] = 1e-16
    found = optimize.minimize(
        of(value),
        start.flatten().numpy(),
        jac=slope(value),
        method=method,
        constraints=constraints,
        bounds=bounds,
        options={"maxiter": 500, **limit},
    )
    return shaped(found.x)


def box_oracle(g: Tensor, radius: float) -> Tensor:
    """argmin of <g, W> over the entries in [-radius, radius], by linear programming."""
    program = optimize.linprog(g.flatten().numpy(), bounds=(-radius, radius))
    return torch.from_numpy(program.x.copy()).reshape(g.shape)
