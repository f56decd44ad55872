"""Memories that are read through solves: conjugate gradients in plain loops, how near many steps come to exact ones."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import scipy.special
import torch
import torch.nn.functional as F
from torch import Tensor

from axes.core.algorithms import Momentum, Step
from axes.core.costs import Alignment, SquaredError
from axes.core.geometry import Entropic
from axes.core.memory import Correlation, Regression
from axes.core.monoids import Diagonal, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.linalg.krylov import conjugate_gradients, inverse_root_shifts, shifted_gradients
from axes.routes import dispatch
from axes.sequence import MesaNet, RLSNet, SequenceLayer, ShampooNet
from axes.sequence.mesa import Positive
from tests.oracles import Found, check_formula, convolutions, heads, rms, through

BETA, RIDGE = Per("beta"), Per("ridge", "key")


def mesa(m: SequenceLayer, x: Tensor) -> Found:
    """von Oswald et al. 2025: H and G with gates; the textbook's conjugate gradients, query by query."""
    p, steps = m.around, m.update.parts().memory.steps  # type: ignore[attr-defined]
    q, k, v = convolutions(p, x)
    gamma, beta = (torch.sigmoid(through(p.charts[n], x)) for n in ("decay", "beta"))
    ridge = torch.diag_embed(0.25 + F.softplus(p.charts["ridge"].logit))
    d_k, d_v, out = q.shape[-1], v.shape[-1], []
    big_h = x.new_zeros(x.shape[0], q.shape[2], d_k, d_k)
    big_g = x.new_zeros(x.shape[0], q.shape[2], d_v, d_k)
    for t in range(x.shape[1]):
        kept, b = gamma[:, t, :, None, None], beta[:, t, :, None, None]
        big_h = kept * big_h + b * k[:, t, :, :, None] * k[:, t, :, None, :]
        big_g = kept * big_g + b * v[:, t, :, :, None] * k[:, t, :, None, :]
        a, y = big_h + ridge, torch.zeros_like(q[:, t])
        residual = direction = q[:, t]
        for _ in range(steps):
            step = (residual**2).sum(-1) / torch.einsum("bhi,bhij,bhj->bh", direction, a, direction)
            y = y + step[..., None] * direction
            after = residual - step[..., None] * torch.einsum("bhij,bhj->bhi", a, direction)
            ratio = (after**2).sum(-1) / (residual**2).sum(-1)
            residual, direction = after, after + ratio[..., None] * direction
        out.append(torch.einsum("bhvk,bhk->bhv", big_g, y))
    y = rms(torch.stack(out, 1), p.norm.weight) * F.silu(heads(x @ p.g_proj.weight.T))
    return y, (big_g, big_h)


@pytest.mark.parametrize("steps", (1, 3, 5))
@pytest.mark.parametrize("who", (None, "reference"))
def test_the_layer_is_its_formula(steps: int, who: str | None) -> None:
    """Of fewer steps than a key has entries: beyond them rounding alone is left, which a plain loop divides by."""
    update = replace(MesaNet.update, memory=Regression(steps, Per("ridge", "key")))
    check_formula(MesaNet, mesa, update=update, implementation=who)


def test_many_steps_are_the_exact_solve() -> None:
    """The layer of thirty steps, and rls-net, whose inverse is exact, with the same ridge."""
    torch.manual_seed(0)
    b, t, h, d = 2, 12, 2, 6
    signal: dict[str, Any] = {n: torch.randn(b, t, h, d, dtype=torch.float64) for n in "qkv"}
    signal |= {"decay": -0.1 * torch.rand(b, t, h).double(), "beta": torch.rand(b, t, h).double()}
    exact, _ = dispatch.run(RLSNet.update, signal)
    errors = []
    for steps in (1, 2, 4, 6, 30):
        memory = Regression(steps, 0.1)
        update = StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA), memory=memory)
        out, _ = dispatch.run(update, signal)
        errors.append(((out - exact).norm() / exact.norm()).item())
    assert errors[0] > 0.05 and sorted(errors, reverse=True)[:4] == errors[:4] and errors[-1] < 1e-9, errors


def random_sums(size: int, tokens: int) -> Tensor:
    """Discounted sums of outer products of unit vectors, as layers have them, with a ridge of 0.1."""
    torch.manual_seed(0)
    k = F.normalize(torch.randn(3, tokens, size, dtype=torch.float64), dim=-1)
    kept = 0.9975 ** torch.arange(tokens, dtype=torch.float64).flip(0)
    return (kept[:, None] * k).mT @ k + 0.1 * torch.eye(size, dtype=torch.float64)


def test_nodes_are_those_of_the_contour_integral() -> None:
    """Against scipy's elliptic functions; and the error of the sum falls as the page says, over four decades."""
    low, high = 0.1, 1e3
    quarter = scipy.special.ellipkm1(low / high)
    x = torch.logspace(-1, 3, 300, dtype=torch.float64)
    for count in (1, 4, 8, 12):
        nodes = inverse_root_shifts(count, low, high)
        for j, (shift, weight) in enumerate(nodes):
            sn, cn, dn, _ = scipy.special.ellipj((j + 0.5) * quarter / count, 1 - low / high)
            assert math.isclose(shift, low * (sn / cn) ** 2, rel_tol=1e-7)
            assert math.isclose(weight, 2 * quarter * low**0.5 * dn / (math.pi * count * cn**2), rel_tol=1e-7)
        error = (sum(c / (x + s) for s, c in nodes) * x.sqrt() - 1).abs().max()
        assert error < 6 * math.exp(-2 * math.pi**2 * count / (math.log(high / low) + 3)), (count, error)


@pytest.mark.parametrize("steps", (1, 2, 5, 9))
def test_shifted_systems_are_solved_as_if_each_were_alone(steps: int) -> None:
    """Every system by conjugate gradients of its own: the same vectors, from one product with A a step."""
    matrix, nodes = random_sums(12, 40), ((0.0, 1.0), (0.3, -2.0), (7.0, 0.5))
    b, products = torch.randn(3, 12, dtype=torch.float64, requires_grad=True), 0

    def apply(p: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return (matrix @ p[..., None])[..., 0]

    found = shifted_gradients(apply, b, nodes, steps)
    assert products == steps
    alone = [c * conjugate_gradients(lambda p, s=s: apply(p) + s * p, b, steps) for s, c in nodes]  # type: ignore[misc]
    torch.testing.assert_close(found, sum(alone), rtol=1e-11, atol=1e-12)
    grads = [torch.autograd.grad(y.square().sum(), b)[0] for y in (found, sum(alone))]  # type: ignore[union-attr]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-11)


def test_roots_by_one_space_come_near_exact_ones_step_by_step() -> None:
    """At 128 entries, 1,024 tokens, decay 0.9975 and a ridge of 0.1: 2e-5 at ten steps, float32 as float64."""
    matrix, b, errors = random_sums(128, 1024), torch.randn(3, 128, dtype=torch.float64), []
    values, basis = torch.linalg.eigh(matrix)
    exact = (basis @ (values[..., None] ** -0.5 * (basis.mT @ b[..., None])))[..., 0]
    for dtype in (torch.float64, torch.float32):
        own = matrix.to(dtype)
        for steps in (2, 4, 6, 8, 10):
            nodes = inverse_root_shifts(10, 0.1, 1e3)
            x = shifted_gradients(lambda p, own=own: (own @ p[..., None])[..., 0], b.to(dtype), nodes, steps)  # type: ignore[misc]
            errors.append(((x - exact).norm() / exact.norm()).item())
    wide, narrow = errors[:5], errors[5:]
    assert all(b < 0.4 * a for a, b in itertools.pairwise(wide)) and wide[-1] < 5e-5, errors
    assert all(abs(a - b) < 0.1 * a + 1e-6 for a, b in zip(wide, narrow, strict=True)), errors


def test_many_steps_and_shifts_are_the_exact_whitening() -> None:
    """shampoo-net, whose roots are those of eigenvalues, with the same ridge; states too."""
    torch.manual_seed(0)
    b, t, h, d = 2, 12, 2, 6
    signal: dict[str, Any] = {n: torch.randn(b, t, h, d, dtype=torch.float64) for n in "qkv"}
    signal |= {"decay": -0.1 * torch.rand(b, t, h).double(), "beta": torch.rand(b, t, h).double()}
    exact, end = dispatch.run(ShampooNet.update, signal, implementation="reference")
    errors = []
    for steps, shifts in ((1, 16), (2, 16), (4, 16), (12, 4), (12, 16)):
        memory = Correlation(steps, shifts, 0.1)
        update = StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA), memory=memory)
        out, state = dispatch.run(update, signal)
        errors.append(((out - exact).norm() / exact.norm()).item())
    assert errors[0] > 0.05 and errors[2] < errors[1] < errors[0] and 1e-9 < errors[3] < 0.05 and errors[4] < 1e-9, (
        errors
    )
    left, right = (s.theta[0] for s in end.stats)
    for found, want in zip(state.theta, (end.theta[0], right, left), strict=True):
        torch.testing.assert_close(found, want)


def test_what_is_left_of_nothing_is_nothing() -> None:
    """Queries of zero, and more steps than there are eigenvalues: no division by what rounding left."""
    matrix = torch.diag(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
    b = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    x = conjugate_gradients(lambda p: p @ matrix, b, 40)
    torch.testing.assert_close(x, b.detach() @ torch.linalg.inv(matrix), rtol=1e-12, atol=1e-14)
    y = shifted_gradients(lambda p: p @ matrix, b, inverse_root_shifts(20, 1.0, 5.0), 40)
    torch.testing.assert_close(y, b.detach() @ torch.diag(matrix.diag() ** -0.5), rtol=1e-12, atol=1e-14)
    (grad,) = torch.autograd.grad(x.sum() + y.sum(), b)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize(
    ("call", "says"),
    (
        (lambda: Regression(0), "at least one step"),
        (lambda: Regression(3, 0.0), "ridge is a positive number"),
        (lambda: Regression(3, Per("ridge")), "Per of shape key"),
        (lambda: StateUpdate(SquaredError(), memory=Regression(3)), r"the cost is Alignment\(\)"),
        (lambda: StateUpdate(Alignment(), Entropic(), memory=Regression(3)), r"h is Euclidean\(\)"),
        (lambda: StateUpdate(Alignment(), monoid=Diagonal("decay"), memory=Regression(3)), "scalars"),
        (lambda: StateUpdate(Alignment(), algorithm=Step(RIDGE), memory=Regression(3)), "scalars"),
        (lambda: StateUpdate(Alignment(), algorithm=Step(debias=True), memory=Regression(3)), "normaliser"),
        (lambda: StateUpdate(Alignment(), algorithm=Momentum(0.9, kind="ema"), memory=Regression(3)), "no filters"),
        (lambda: Positive(0.1), "start is above least"),
        (lambda: Correlation(0), "steps is at least 1"),
        (lambda: Correlation(3, 0), "shifts is at least 1"),
        (lambda: Correlation(3, 4, 0.0), "0 < ridge < top"),
        (lambda: Correlation(3, 4, 2.0, 1.0), "0 < ridge < top"),
        (lambda: StateUpdate(SquaredError(), memory=Correlation(3)), r"the cost is Alignment\(\)"),
        (lambda: StateUpdate(Alignment(), monoid=Diagonal("decay"), memory=Correlation(3)), "scalars"),
    ),
)
def test_what_means_nothing_is_refused(call: Any, says: str) -> None:
    with pytest.raises(IllegalUpdate, match=says):
        call()
