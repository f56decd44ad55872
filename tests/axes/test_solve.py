"""The solvers against scipy, and their implicit derivatives against finite differences."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor

from axes.linalg.solve import root, scalar_root

batches = st.sampled_from([(), (1,), (3,), (0,), (2, 2), (2, 0, 3)])
sizes = st.integers(1, 4)
seeds = st.integers(0, 2**31 - 1)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def monotone(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + A^T sinh(A x) + (A - A^T) x - b: strongly monotone, no gradient, and stiff: full Newton steps overshoot."""
    column = x.unsqueeze(-1)
    return x + (a.mT @ torch.sinh(a @ column) + (a - a.mT) @ column).squeeze(-1) - b


@given(batches, sizes, seeds, st.sampled_from([0.1, 1.0, 30.0]))
def test_root_agrees_with_scipy_for_any_batch_shape(batch, n, seed, scale):
    a, b = draw(seed, *batch, n, n), scale * draw(seed + 1, *batch, n)
    x = root(lambda x: monotone(x, a, b), torch.zeros_like(b))
    assert x.shape == b.shape
    assert (monotone(x, a, b).abs() <= 1e-10 * (1 + scale)).all()
    for a_i, b_i, x_i in zip(a.reshape(-1, n, n), b.reshape(-1, n), x.reshape(-1, n), strict=True):
        found = optimize.root(lambda z, a_i=a_i, b_i=b_i: monotone(torch.from_numpy(z), a_i, b_i).numpy(), x_i.numpy())
        assert torch.from_numpy(found.x).sub(x_i).abs().max() <= 1e-7


@settings(max_examples=4)
@given(st.integers(1, 2), seeds)
def test_first_and_second_derivatives_of_root_are_implicit(n, seed):
    a, b = draw(seed, n, n).requires_grad_(), draw(seed + 1, n).requires_grad_()

    def solution(a: Tensor, b: Tensor) -> Tensor:
        return root(lambda x: monotone(x, a, b), torch.zeros_like(b))

    assert torch.autograd.gradcheck(solution, (a, b))
    assert torch.autograd.gradgradcheck(solution, (a, b), fast_mode=True)


def test_order_counts_the_exact_derivatives():
    # x^3 = a has x = a^(1/3), x'' = -2/9 a^(-5/3)
    for order, exact in ((1, False), (2, True)):
        a = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
        x = root(lambda x, a=a: x**3 - a, torch.ones(1, dtype=torch.float64), order=order)
        (first,) = torch.autograd.grad(x, a, create_graph=True)
        torch.testing.assert_close(first.detach(), a.detach() ** (-2 / 3) / 3, rtol=1e-13, atol=0)
        second = torch.autograd.grad(first, a)[0] if first.requires_grad else torch.zeros(1, dtype=torch.float64)
        assert torch.allclose(second, -2 / 9 * a.detach() ** (-5 / 3), rtol=1e-12) is exact


def test_backtracking_makes_newton_converge_where_it_diverges():
    # Newton's method on arctan diverges from |x| > 1.392
    start = torch.tensor([[1.5], [20.0], [-300.0], [0.0]], dtype=torch.float64)
    assert root(torch.atan, start).abs().max() <= 1e-14
    full_steps_only = root(torch.atan, start, halvings=0, order=0)
    assert torch.equal(full_steps_only, start)


@given(seeds, st.integers(0, 6))
def test_iterations_never_raise_the_residual(seed, iterations):
    a, b, start = 2 * draw(seed, 5, 3, 3), 10 * draw(seed + 1, 5, 3), 3 * draw(seed + 2, 5, 3)

    def size(x: Tensor) -> Tensor:
        return monotone(x, a, b).norm(dim=-1)

    before = root(lambda x: monotone(x, a, b), start, iterations=iterations, order=0)
    after = root(lambda x: monotone(x, a, b), start, iterations=iterations + 1, order=0)
    assert (size(after) <= size(before)).all() and (size(before) <= size(start)).all()


def test_a_step_that_leaves_the_domain_is_not_taken():
    x = root(lambda x: x.log(), torch.tensor([[20.0], [1e-3]], dtype=torch.float64))
    torch.testing.assert_close(x, torch.ones(2, 1, dtype=torch.float64), rtol=1e-14, atol=0)


@settings(max_examples=5)
@given(seeds)
def test_root_under_no_grad_vmap_and_forward_mode(seed):
    a, b = draw(seed, 4, 3, 3), draw(seed + 1, 4, 3)

    def solution(a: Tensor, b: Tensor) -> Tensor:
        return root(lambda x: monotone(x, a, b), torch.zeros_like(b))

    expected = solution(a, b)
    with torch.no_grad():
        assert torch.equal(solution(a.requires_grad_(), b), expected)
    a = a.detach()
    torch.testing.assert_close(torch.func.vmap(solution)(a, b), expected, rtol=1e-12, atol=1e-12)
    reverse = torch.func.jacrev(solution, argnums=1)(a, b)
    torch.testing.assert_close(torch.func.jacfwd(solution, argnums=1)(a, b), reverse, rtol=1e-10, atol=1e-10)


def test_root_does_not_differentiate_the_start():
    start = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for iterations in (0, 30):
        assert not root(lambda x: x**3 - 2, start, iterations=iterations).requires_grad


@given(batches, seeds, st.sampled_from([1e-3, 1.0, 1e3]))
def test_scalar_root_agrees_with_brentq(batch, seed, scale):
    b = scale * draw(seed, *batch)
    reach = b.abs() + 1
    x = scalar_root(lambda x: x + x**3 + torch.tanh(5 * x) - b, -reach, reach)
    assert x.shape == b.shape
    for b_i, x_i in zip(b.reshape(-1).tolist(), x.reshape(-1).tolist(), strict=True):
        found = optimize.brentq(
            lambda z, b_i=b_i: z + z**3 + math.tanh(5 * z) - b_i, -abs(b_i) - 1, abs(b_i) + 1, xtol=1e-15, rtol=1e-14
        )
        assert abs(found - x_i) <= 1e-13 * (1 + abs(found))


@settings(max_examples=5)
@given(seeds)
def test_first_and_second_derivatives_of_scalar_root_are_implicit(seed):
    b, w = draw(seed, 3).requires_grad_(), draw(seed + 1, 3).exp().requires_grad_()

    def solution(b: Tensor, w: Tensor) -> Tensor:
        reach = b.abs() + 1
        return scalar_root(lambda x: x + w * x**3 - b, -reach, reach)

    assert torch.autograd.gradcheck(solution, (b, w))
    assert torch.autograd.gradgradcheck(solution, (b, w))
    torch.testing.assert_close(torch.func.vmap(solution)(b, w), solution(b, w), rtol=1e-14, atol=1e-14)


def test_scalar_root_has_derivative_zero_where_the_slope_is_zero():
    b = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    x = scalar_root(lambda x: x**3 - b, -torch.ones_like(b), torch.ones_like(b), iterations=0)
    (derivative,) = torch.autograd.grad(x, b)
    assert x.item() == 0 and derivative.item() == 0
