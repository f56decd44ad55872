"""Every cost against autograd, finite differences and scipy: gradient, Moreau residual and their derivatives."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor

from axes.core.costs import (
    Alignment,
    Cost,
    CrossEntropy,
    Given,
    Huber,
    HuberSwitch,
    Linear,
    Lp,
    Ridge,
    RobustShift,
    SquaredError,
)
from axes.core.rates import Per
from axes.errors import IllegalUpdate, ShapeError
from tests.drawn import crossed

ROW, SCALAR = Per("threshold", "row"), Per("level")
CONSERVATIVE: tuple[Cost, ...] = (
    Alignment(),
    SquaredError(),
    SquaredError(encode=True),
    Lp(1),
    Lp(1, smooth=None),
    Lp(1.5),
    Lp(1.5, smooth=None, mean_one=True),
    Lp(2),
    Lp(2, mean_one=True),
    Lp(2, smooth=(10.0, 1e-6)),
    Lp(3),
    Lp(4, mean_one=True),
    Huber(0.7),
    Huber(SCALAR),
    Huber(ROW),
    Huber(0.7, "norm"),
    Huber(SCALAR, "norm"),
    RobustShift(0.5),
    RobustShift(SCALAR),
    CrossEntropy(),
    Ridge(Huber(ROW), 0.1),
)
OTHERS: tuple[Cost, ...] = (
    HuberSwitch(0.7),
    HuberSwitch(ROW),
    Given(),
    Linear(),
    Linear("left"),
    Ridge(Given(), SCALAR),
)
every_cost = pytest.mark.parametrize("cost", CONSERVATIVE, ids=repr)
C_KINDS = ("number", "datum", "coordinate")
few = settings(max_examples=max(5, settings().max_examples // 3))  # for the laws that already run once per cost


class Data:
    """A reproducible problem: half of the errors small, half large; c and thresholds of either size."""

    def __init__(self, cost: Cost, seed: int, batch: tuple[int, ...] = (4,), d: int = 3, c: str = "number") -> None:
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=draw)

        inner = cost.cost if isinstance(cost, Ridge) else cost
        self.target = normal(*batch, d).softmax(-1) if isinstance(inner, CrossEntropy) else normal(*batch, d)
        self.prediction = self.target + normal(*batch, d) * normal(*batch, 1).exp()
        self.signal = {"level": normal(*batch).exp(), "threshold": normal(*batch, d).exp()}
        shape = {"number": (), "datum": (*batch, 1), "coordinate": (*batch, d)}[c]
        self.c: Tensor | float = normal(*shape).exp()
        if c == "number":
            self.c = float(self.c)

    def grow(self) -> tuple[Tensor, ...]:
        """Everything a residual depends on, requiring gradients."""
        c = torch.as_tensor(self.c, dtype=torch.float64)
        leaves = (self.prediction, self.target, c, self.signal["level"], self.signal["threshold"])
        return tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)


def residual(cost: Cost, prediction: Tensor, target: Tensor, c: Tensor | float, level: Tensor, row: Tensor) -> Tensor:
    return cost.residual(prediction, target, c, {"level": level, "threshold": row})


seeds = st.integers(0, 2**31 - 1)
batches = st.sampled_from([(), (3,), (0,), (2, 2)])


# ---- value and gradient


@every_cost
@few
@given(seed=seeds, batch=batches, d=st.integers(1, 5))
def test_gradient_is_autograd_of_value_and_finite_difference(cost, seed, batch, d):
    data = Data(cost, seed, batch, d)
    p = data.prediction.requires_grad_()
    value = cost.value(p, data.target, data.signal)
    gradient = cost.gradient(p, data.target, data.signal).detach()
    assert value.shape == batch and gradient.shape == (*batch, d)
    (expected,) = torch.autograd.grad(value.sum(), p)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)

    assume(bool(((p - data.target).abs() > 1e-3).all()))  # the kinks and steep places of l_p and the robust cost
    p, h = p.detach(), 1e-6
    for j in range(d):
        shift = h * torch.eye(d, dtype=p.dtype)[j]
        up, down = (cost.value(p + s * shift, data.target, data.signal) for s in (1, -1))
        torch.testing.assert_close((up - down) / (2 * h), gradient[..., j], rtol=1e-5, atol=1e-5)


def test_values_and_gradients_are_the_published_formulas():
    data = Data(SquaredError(), 0, (50,), 4)
    p, v = data.prediction, data.target
    e, delta = p - v, 0.7
    close = torch.testing.assert_close
    close(Alignment().gradient(p, v), -v)
    close(SquaredError().value(p, v), torch.nn.functional.mse_loss(p, v, reduction="none").sum(-1) / 2)
    close(Lp(1, smooth=None).gradient(p, v), e.sign())
    close(Lp(3).value(p, v), torch.linalg.vector_norm(e, 3, dim=-1) ** 3)
    close(Lp(3).gradient(p, v), 3 * e.sign() * e.abs() ** 2)
    close(Lp(3, mean_one=True).gradient(p, v), e.sign() * e.abs() ** 2)
    close(Lp(2, mean_one=True).residual(p, v, 0.3), SquaredError().residual(p, v, 0.3))
    close(Lp(1.5).gradient(p, v), 1.5 * torch.tanh(100 * e) * (e**2 + 1e-6) ** 0.25)
    close(Huber(delta).value(p, v), torch.nn.functional.huber_loss(p, v, delta=delta, reduction="none").sum(-1))
    norm = e.norm(dim=-1, keepdim=True)
    close(Huber(delta, "norm").gradient(p, v), e * torch.clamp(delta / norm, max=1.0))
    close(HuberSwitch(delta).gradient(p, v), torch.where(norm <= delta, e, delta * e.sign()))
    close(RobustShift(delta).gradient(p, v), e * (1 + delta / norm))
    classes = torch.arange(50) % 4
    one_hot = torch.nn.functional.one_hot(classes, 4).double()
    close(CrossEntropy().value(p, one_hot), torch.nn.functional.cross_entropy(p, classes, reduction="none"))


@given(seed=seeds)
def test_robust_cost_is_the_worst_shift_of_the_value(seed):
    data = Data(RobustShift(0.5), seed, (6,))
    e = data.prediction - data.target
    worst = RobustShift(0.5).value(data.prediction, data.target)
    shifts = torch.randn(200, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    shifts = 0.5 * shifts / shifts.norm(dim=-1, keepdim=True).clamp(min=1)
    assert ((e - shifts).square().sum(-1) / 2 <= worst + 1e-12).all()
    attained = -0.5 * e / e.norm(dim=-1, keepdim=True)
    torch.testing.assert_close((e - attained).square().sum(-1) / 2, worst, rtol=1e-13, atol=0)


def test_an_l_1_cost_has_no_mean() -> None:
    with pytest.raises(IllegalUpdate, match="mean_one divides by p and has no effect"):
        Lp(1, mean_one=True)


@pytest.mark.parametrize("p", [1.0, 1.25, 1.5, 1.9])
@pytest.mark.parametrize("kappa", [10.0, 100.0])
def test_tanh_smoothing_has_the_derived_error_and_slope(p, kappa):
    eps = 0.0 if p == 1 else 1e-6
    mean = p > 1
    smooth, exact = Lp(p, (kappa, eps), mean_one=mean), Lp(p, smooth=None, mean_one=mean)
    x = torch.linspace(-3, 3, 60001, dtype=torch.float64).unsqueeze(-1)
    zero = torch.zeros_like(x)
    error = (smooth.gradient(x, zero) - exact.gradient(x, zero)).abs().max()
    bound = 1.0 if p == 1 else 2 * ((p - 1) / (2 * math.e * kappa)) ** (p - 1) + eps ** ((p - 1) / 2)
    assert error <= bound
    origin = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(smooth.gradient(origin, torch.zeros_like(origin)).sum(), origin)
    assert slope.item() == pytest.approx(kappa * eps ** ((p - 1) / 2), rel=1e-12)


@pytest.mark.parametrize("kappa", [1.0, 100.0, 1e4])
def test_value_of_smooth_l1_is_log_cosh(kappa):
    x = torch.logspace(-12, 3, 200, dtype=torch.float64).unsqueeze(-1)
    expected = (torch.logaddexp(kappa * x, -kappa * x) - math.log(2)) / kappa
    value = Lp(1, (kappa, 0.0)).value(x, torch.zeros_like(x))
    torch.testing.assert_close(value.unsqueeze(-1), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("p", [1.25, 1.5, 3.0])
def test_l_p_step_has_its_two_cycle(p):
    c = 0.1
    edge = torch.tensor([(p * c / 2) ** (1 / (2 - p))], dtype=torch.float64)
    cost, zero = Lp(p, smooth=None), torch.zeros(1, dtype=torch.float64)
    torch.testing.assert_close(edge - c * cost.gradient(edge, zero), -edge, rtol=1e-12, atol=0)
    inside, outside = 0.98 * edge, 1.02 * edge
    for _ in range(60):
        inside, outside = (e - c * cost.gradient(e, zero) for e in (inside, outside))
        outside = outside.clamp(-1e3, 1e3)
    if p > 2:
        assert inside.abs() < 0.9 * edge and outside.abs() > 2 * edge
    else:
        torch.testing.assert_close(torch.cat([inside, outside]).abs(), edge.expand(2), rtol=1e-3, atol=0)


# ---- Moreau residual


def minimiser(cost: Cost, data: Data) -> Tensor:
    """The proximal point by scipy, datum by datum: BFGS, then Nelder-Mead over the kinks."""
    rows = []
    c = torch.as_tensor(data.c, dtype=torch.float64).expand_as(data.prediction)
    for i in range(len(data.prediction)):
        signal = {name: x[i] for name, x in data.signal.items()}

        def objective(x, i=i, signal=signal):
            x = torch.as_tensor(x, dtype=torch.float64)
            near = ((x - data.prediction[i]).square() / (2 * c[i])).sum()
            return (cost.value(x, data.target[i], signal) + near).item()

        options = {"xatol": 1e-10, "fatol": 1e-14, "maxiter": 4000, "maxfev": 4000}
        starts = (data.prediction[i].numpy(), data.target[i].numpy())
        found = [optimize.minimize(objective, optimize.minimize(objective, start).x, method="Nelder-Mead",
                                   options=options) for start in starts]  # fmt: skip
        rows.append(torch.from_numpy(min(found, key=lambda result: result.fun).x))
    return torch.stack(rows)


@every_cost
@pytest.mark.parametrize("c", C_KINDS)
def test_residual_is_the_scipy_minimiser(cost, c):
    data = Data(cost, 3, (3,), 2, c)
    r = cost.residual(data.prediction, data.target, data.c, data.signal)
    torch.testing.assert_close(r, (data.prediction - minimiser(cost, data)) / data.c, rtol=1e-5, atol=1e-5)


@every_cost
@few
@given(
    seed=seeds, batch=batches, d=st.integers(1, 4), c=st.sampled_from(C_KINDS), scale=st.sampled_from([0.01, 1, 100])
)
def test_residual_solves_its_own_argmin(cost, seed, batch, d, c, scale):
    """The objective is 1/c strongly convex: every other point is higher by at least |x - x*|^2 / 2c."""
    data = Data(cost, seed, batch, d, c)
    c_all = torch.as_tensor(scale * data.c, dtype=torch.float64).expand(*batch, d)

    def objective(x: Tensor) -> Tensor:
        near = (x - data.prediction).square() / (2 * c_all)
        return cost.value(x, data.target, data.signal) + near.sum(-1)

    r = cost.residual(data.prediction, data.target, scale * data.c, data.signal)
    assert r.shape == (*batch, d)
    best = data.prediction - c_all * r
    noise = torch.randn(40, *batch, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for size in (1e-3, 0.1, 1.0, 10.0):
        other = best + size * noise
        gap = objective(other) - objective(best) - ((other - best).square() / (2 * c_all)).sum(-1)
        assert (gap >= -1e-11 * (1 + objective(other).abs())).all()
    assert (objective(data.target) >= objective(best) - 1e-11 * (1 + objective(best).abs())).all()


@every_cost
@few
@given(seed=seeds, batch=batches, c=st.sampled_from(C_KINDS))
def test_residual_is_the_gradient_at_the_new_point(cost, seed, batch, c):
    data = Data(cost, seed, batch, 3, c)
    r = cost.residual(data.prediction, data.target, data.c, data.signal)
    new = data.prediction - data.c * r
    at_kink = (new - data.target).abs() < 1e-6  # r is only one of the subgradients there
    gradient = cost.gradient(new, data.target, data.signal)
    keep = ~at_kink if isinstance(cost, Lp) else ~at_kink.all(-1, keepdim=True).expand_as(r)
    torch.testing.assert_close(r[keep], gradient[keep], rtol=1e-10, atol=1e-10)


@every_cost
@few
@given(seed=seeds, d=st.integers(1, 4))
def test_c_zero_is_the_gradient_in_every_spelling(cost, seed, d):
    data = Data(cost, seed, (5,), d)
    expected = cost.gradient(data.prediction, data.target, data.signal)
    for c in (0.0, 0, torch.tensor(0.0, dtype=torch.float64), expected.new_zeros(5, 1), expected.new_zeros(5, d)):
        r = cost.residual(data.prediction, data.target, c, data.signal)
        torch.testing.assert_close(r, expected, rtol=1e-12, atol=1e-12)


@every_cost
@few
@given(seed=seeds, d=st.integers(2, 4), c=st.sampled_from(C_KINDS[:2]))
def test_spellings_of_c_agree(cost, seed, d, c):
    data = Data(cost, seed, (6,), d, c)
    one = cost.residual(data.prediction, data.target, data.c, data.signal)
    c_all = torch.as_tensor(data.c, dtype=torch.float64).expand(6, d)
    torch.testing.assert_close(
        cost.residual(data.prediction, data.target, c_all, data.signal), one, rtol=1e-11, atol=1e-12
    )


@every_cost
@few
@given(seed=seeds, c=st.sampled_from(C_KINDS))
def test_residual_is_firmly_non_expansive(cost, seed, c):
    """<r - r', p - p'> >= sum_j c_j (r_j - r'_j)^2: what makes an implicit step stable for every rate."""
    data, other = Data(cost, seed, (8,), 3, c), Data(cost, seed + 1, (8,), 3, c)
    r, r2 = (cost.residual(p, data.target, data.c, data.signal) for p in (data.prediction, other.prediction))
    product = ((r - r2) * (data.prediction - other.prediction)).sum(-1)
    assert (product >= (data.c * (r - r2).square()).sum(-1) - 1e-10).all()


@every_cost
@few
@given(seed=seeds, c=st.sampled_from(C_KINDS))
def test_residual_is_autograd_of_the_envelope(cost, seed, c):
    data = Data(cost, seed, (5,), 3, c)
    p = data.prediction.requires_grad_()
    r = cost.residual(p, data.target, data.c, data.signal)
    envelope = cost.value(p - data.c * r, data.target, data.signal) + (data.c * r.square()).sum(-1) / 2
    (gradient,) = torch.autograd.grad(envelope.sum(), p)
    torch.testing.assert_close(gradient, r.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("cost", "c"), crossed((pytest.param(x, id=repr(x)) for x in CONSERVATIVE), C_KINDS))
def test_implicit_derivatives_are_exact_to_second_order(cost, c):
    leaves = Data(cost, 11, (2,), 2, c).grow()
    assert torch.autograd.gradcheck(lambda *x: residual(cost, *x), leaves)
    assert torch.autograd.gradgradcheck(lambda *x: residual(cost, *x), leaves, atol=1e-4, fast_mode=True)


@every_cost
def test_residual_under_no_grad_and_vmap(cost):
    data = Data(cost, 5, (4,), 3, "coordinate")
    leaves = (data.prediction, data.target, data.c, data.signal["level"], data.signal["threshold"])
    expected = residual(cost, *leaves)
    with torch.no_grad():
        assert torch.equal(residual(cost, *data.grow()), expected)
    mapped = torch.func.vmap(lambda *x: residual(cost, *x))(*leaves)
    torch.testing.assert_close(mapped, expected, rtol=1e-11, atol=1e-12)


@every_cost
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_keeps_its_dtype_and_is_close(cost, dtype):
    data = Data(cost, 5, (4,), 3, "datum")
    leaves = (data.prediction, data.target, data.c, data.signal["level"], data.signal["threshold"])
    low = tuple(x.to(dtype) for x in leaves)
    p, v, _, level, row = low
    assert cost.value(p, v, {"level": level, "threshold": row}).dtype == dtype
    for c, c_low in ((leaves[2], low[2]), (0.5, 0.5)):
        exact = residual(cost, *(x.to(dtype).double() for x in leaves[:2]), c, *leaves[3:])
        r = residual(cost, p, v, c_low, level, row)
        assert r.dtype == dtype
        torch.testing.assert_close(
            r.double(), exact, rtol=64 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps
        )


@every_cost
@pytest.mark.parametrize("zeros", ["all", "datum", "coordinate"])
def test_nothing_is_nan_at_zero_error_up_to_second_derivatives(cost, zeros):
    data = Data(cost, 7, (3,), 3)
    where = torch.zeros(3, 3, dtype=torch.bool)
    where[{"all": slice(None), "datum": 0, "coordinate": (0, 1)}[zeros]] = True
    if not isinstance(cost, CrossEntropy):
        data.prediction = torch.where(where, data.target, data.prediction)
    mixed = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.4, 0.0], [0.3, 0.0, 0.2]], dtype=torch.float64)
    spellings = (0.0, 0.5, mixed.new_zeros(3, 1), mixed[:, 1:2], mixed, mixed.flip(0), mixed.new_zeros(3, 3))
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for c in spellings:
        data.c = c
        p, v, c_leaf, level, row = leaves = data.grow()
        used = c if isinstance(c, float) else c_leaf
        value = cost.value(p, v, {"level": level, "threshold": row}).sum()
        for output in (value, (residual(cost, p, v, used, level, row) * weights).sum()):
            assert output.isfinite()
            first = torch.autograd.grad(output, leaves, create_graph=True, materialize_grads=True)
            assert all(g.isfinite().all() for g in first)
            mixture = sum((g * torch.linspace(-1, 1, g.numel(), dtype=g.dtype).reshape(g.shape)).sum() for g in first)
            if mixture.requires_grad:
                second = torch.autograd.grad(mixture, leaves, materialize_grads=True)
                assert all(g.isfinite().all() for g in second)


@pytest.mark.parametrize(("cost", "r"), [(Huber(1.0, "norm"), 0.5), (RobustShift(3.0), 1.0)], ids=repr)
def test_unused_branch_of_a_coordinate_c_cannot_spoil_the_derivatives(cost, r):
    """Here the error lies on the closed branch, and Newton's step on the other one ends in a division by zero."""
    e = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    c = torch.ones(2, dtype=torch.float64, requires_grad=True)
    residual = cost.residual(e, torch.zeros_like(e), c)
    assert torch.equal(residual.detach(), torch.tensor([r, 0.0], dtype=torch.float64))
    first = torch.autograd.grad(residual.sum(), (e, c), create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first), (e, c))
    assert all(g.isfinite().all() for g in (*first, *second))


def test_conventions_at_the_kinks():
    zero = torch.zeros(2, 3, dtype=torch.float64)
    for cost in CONSERVATIVE:
        if not isinstance(cost, (CrossEntropy, Alignment)):
            signal = {"level": zero[:, 0] + 1, "threshold": zero + 1}
            assert torch.equal(cost.gradient(zero, zero, signal), zero)
    at_delta = torch.tensor([0.7, -0.7], dtype=torch.float64, requires_grad=True)
    (inside,) = torch.autograd.grad(Huber(0.7).gradient(at_delta, torch.zeros(2)).sum(), at_delta)
    assert torch.equal(inside, torch.ones_like(inside))
    start = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    expected = {Lp(1, smooth=None): 0, Lp(1.5, smooth=None): 0, Lp(2): 2, Lp(3): 0, RobustShift(0.5): 1}
    for cost, slope in expected.items():
        (found,) = torch.autograd.grad(cost.gradient(start, torch.zeros_like(start)).sum(), start)
        assert found.item() == slope


@given(seed=seeds, rows=st.booleans())
def test_implicit_squared_error_is_longhorn(seed, rows):
    draw = torch.Generator().manual_seed(seed)
    state, k, v, beta = (torch.randn(s, dtype=torch.float64, generator=draw) for s in ((4, 3), (3,), (4,), (4,)))
    beta = beta.exp() if rows else beta.exp()[:1]
    r = SquaredError().residual(state @ k, v, beta * (k @ k))
    new = state - torch.outer(beta * r, k)
    eps = beta / (1 + beta * (k @ k))
    torch.testing.assert_close(new, state + torch.outer(eps * (v - state @ k), k), rtol=1e-12, atol=1e-12)
    stationarity = (new - state) + torch.outer(beta * (new @ k - v), k)
    assert stationarity.abs().max() <= 1e-12 * (1 + beta.max()) * (1 + state.abs().max() + v.abs().max())


@given(seed=seeds, scale=st.sampled_from([1.0, 30.0, 1000.0]), c=st.sampled_from([1e-3, 1.0, 30.0, 1000.0]))
def test_cross_entropy_residual_converges_for_extreme_logits(seed, scale, c):
    draw = torch.Generator().manual_seed(seed)
    logits, wanted = scale * torch.randn(2, 8, 5, dtype=torch.float64, generator=draw)
    cost, target = CrossEntropy(), wanted.softmax(-1)
    r = cost.residual(logits, target, c)
    torch.testing.assert_close(r, cost.gradient(logits - c * r, target), rtol=0, atol=1e-11)


# ---- operators that are not gradients, filters, ridge


def work_along_a_loop(cost: Cost, delta: float) -> float:
    """Work of the gradient from 0 out along one ray, across, and back along another; both cross |e| = delta."""
    rays = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    corners = [0 * rays[0], delta * rays[0], 2 * rays[0], 2 * rays[1], delta * rays[1], 0 * rays[0]]
    work = 0.0
    for start, end in zip(corners, corners[1:], strict=False):
        t = (torch.arange(4000, dtype=torch.float64).unsqueeze(-1) + 0.5) / 4000
        points = start + t * (end - start)
        work += (cost.gradient(points, torch.zeros_like(points)) @ (end - start)).mean().item()
    return work


def test_huber_switch_is_not_conservative():
    delta = 0.7
    for cost in (Huber(delta), Huber(delta, "norm"), RobustShift(delta), Lp(3)):
        assert abs(work_along_a_loop(cost, delta)) <= 1e-6
    # the branches disagree by delta^2 |u|_1 where a ray u leaves the ball
    assert work_along_a_loop(HuberSwitch(delta), delta) == pytest.approx(delta**2 * (1.4 - 1.0), abs=1e-6)
    assert not HuberSwitch(delta).is_gradient and not Ridge(HuberSwitch(delta), 0.1).is_gradient
    assert all(cost.is_gradient for cost in CONSERVATIVE)


@pytest.mark.parametrize("d", [1, 4, 16, 64])
def test_huber_switch_jumps_by_root_d(d):
    e = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    e = 0.7 * e / e.norm()
    inner, outer = (HuberSwitch(0.7).gradient(s * e, torch.zeros_like(e)).norm() for s in (1 - 1e-12, 1 + 1e-12))
    assert (outer / inner).item() == pytest.approx(math.sqrt(d), rel=1e-9)


@pytest.mark.parametrize("cost", [HuberSwitch(0.7), Given(), Linear(), Ridge(HuberSwitch(0.7), 0.1)], ids=repr)
def test_costs_without_a_value_say_so(cost):
    x = torch.ones(2, dtype=torch.float64)
    with pytest.raises(IllegalUpdate, match="has no value"):
        cost.value(x, x)
    with pytest.raises(IllegalUpdate, match=r"no implicit step|no gradient"):
        cost.residual(x, x, 0.5)
    if isinstance(cost, (Given, Linear)):
        with pytest.raises(IllegalUpdate, match="has no gradient"):
            cost.residual(x, x)


@given(seed=seeds, batch=batches)
def test_linear_drives_are_their_quantities(seed, batch):
    draw = torch.Generator().manual_seed(seed)
    u, k, v = (torch.randn((*batch, *s), dtype=torch.float64, generator=draw) for s in ((2, 3), (3,), (2,)))
    signal = {"k": k, "v": v}
    expected = {
        "drive": u,
        "square": u**2,
        "left": torch.einsum("...ij,...kj->...ik", u, u),
        "right": torch.einsum("...ji,...jk->...ik", u, u),
        "key": torch.einsum("...i,...j->...ij", k, k),
        "value": torch.einsum("...i,...j->...ij", v, v),
    }
    for of, drive in expected.items():
        torch.testing.assert_close(Linear(of).drive(u, signal), drive, rtol=1e-13, atol=1e-14)
        assert Linear(of).needs == {"key": {"k"}, "value": {"v"}}.get(of, set())
        assert Linear(of).curvature == "none"
    with pytest.raises(ShapeError, match="'k'"):
        Linear("key").drive(u, {})


def test_ridge_delegates_all_but_the_weight():
    for cost in (*CONSERVATIVE[:-1], HuberSwitch(0.7), Given(), SquaredError(encode=True)):
        ridge = Ridge(cost, 0.1)
        assert (ridge.ridge, cost.ridge) == (0.1, 0.0)
        assert ridge.rates() == (*cost.rates(), 0.1)
        assert (ridge.curvature, ridge.needs, ridge.is_gradient, ridge.encode) == (
            cost.curvature, cost.needs, cost.is_gradient, cost.encode)  # fmt: skip
        if not isinstance(cost, (HuberSwitch, Given)):
            data = Data(cost, 1, (4,), 3, "datum")
            arguments = (data.prediction, data.target)
            for name, more in (("value", ()), ("gradient", ()), ("residual", (data.c,))):
                found, expected = (getattr(x, name)(*arguments, *more, data.signal) for x in (ridge, cost))
                assert torch.equal(found, expected)


def test_declared_facts():
    expected = {
        Alignment(): "none", SquaredError(): "affine", Lp(2): "affine", Lp(2, smooth=(10.0, 1e-6)): "nonlinear",
        Lp(3): "nonlinear", Huber(): "nonlinear", HuberSwitch(): "nonlinear", CrossEntropy(): "nonlinear",
        Given(): "nonlinear", Linear(): "none", Ridge(Alignment(), 1.0): "none",
    }  # fmt: skip
    assert {cost: cost.curvature for cost in expected} == expected
    assert Given().needs == {"g"} and SquaredError().needs == {"k", "v"}
    assert SquaredError(encode=True).encode and not Lp(3).encode
    assert Ridge(Huber(ROW), SCALAR).rates() == (ROW, SCALAR) and Lp(3).rates() == ()


@every_cost
@few
@given(seed=seeds)
def test_curvature_is_what_the_gradient_does(cost, seed):
    data = Data(cost, seed, (), 2)
    hessian = torch.func.jacrev(lambda p: cost.gradient(p, data.target, data.signal) + 0 * p)
    here, there = hessian(data.prediction), hessian(data.target + 0.01)
    if cost.curvature == "none":
        assert not here.any()
    elif cost.curvature == "affine":
        assert torch.equal(here, there) and here.any()


# ---- declarations


@pytest.mark.parametrize("cost", (*CONSERVATIVE, *OTHERS), ids=repr)
def test_declarations_are_values(cost):
    names = {c.__name__: c for c in (Alignment, CrossEntropy, Given, Huber, HuberSwitch, Linear, Lp, Per, Ridge,
                                     RobustShift, SquaredError)}  # fmt: skip
    for copy in (pickle.loads(pickle.dumps(cost)), eval(repr(cost), names), dataclasses.replace(cost)):
        assert copy == cost and hash(copy) == hash(cost) and repr(copy) == repr(cost)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost.delta = 1.0


def test_equality_is_equality_of_what_runs():
    assert len({*CONSERVATIVE, *OTHERS}) == len(CONSERVATIVE) + len(OTHERS)
    assert Huber(1) == Huber(1.0) and repr(Huber(1)) == repr(Huber(1.0))
    assert Lp(1.5) == Lp(1.5, smooth=(100.0, 1e-6)) and Lp(3) == Lp(3, smooth=None) and Lp(1) == Lp(1, (100, 0))
    assert Huber(0.7) != Huber(0.7, "norm") and Huber(0.7) != HuberSwitch(0.7) and Lp(2) != Lp(2, mean_one=True)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: Lp(0.9), "p must be a finite number >= 1"),
        (lambda: Lp(math.nan), "p must be"),
        (lambda: Lp(math.inf), "p must be"),
        (lambda: Lp(1.5, smooth=(0.0, 1e-6)), "kappa > 0"),
        (lambda: Lp(1.5, smooth=(100.0, 0.0)), "eps > 0"),
        (lambda: Lp(1.0, smooth=(100.0, 1e-6)), "cannot act"),
        (lambda: Huber(0.0), "delta must be a finite number > 0"),
        (lambda: Huber(-1.0), "delta must be"),
        (lambda: Huber(math.inf), "delta must be"),
        (lambda: Huber(math.nan), "delta must be"),
        (lambda: Huber(1.0, "switch"), "HuberSwitch"),
        (lambda: Huber(ROW, "norm"), "shape scalar"),
        (lambda: Huber(Per("d", "key")), "shape scalar or row"),
        (lambda: Huber(Per("d", "scalar", "unit")), "positive Per"),
        (lambda: HuberSwitch(0.0), "delta must be"),
        (lambda: RobustShift(0.0), "Delta must be"),
        (lambda: RobustShift(ROW), "shape scalar"),
        (lambda: Ridge(SquaredError(), 0.0), "weight must be"),
        (lambda: Ridge(SquaredError(), Per("w", "scalar", "real")), "positive Per"),
        (lambda: Ridge(Ridge(SquaredError(), 0.1), 0.1), "add up ridge weights"),
        (lambda: Ridge(Linear(), 0.1), "its monoid"),
        (lambda: Linear("gradient"), "is not one of drive, square"),
        (lambda: SquaredError().residual(torch.ones(2), torch.ones(2), -0.1), "c must be >= 0"),
        (lambda: SquaredError().residual(torch.ones(2), torch.ones(2), math.nan), "c must be >= 0"),
    ],
)
def test_illegal_declarations_are_refused(declare, message):
    with pytest.raises(IllegalUpdate, match=message):
        declare()


def test_wrong_shapes_and_missing_rates_are_named():
    p = torch.ones(5, 3)
    with pytest.raises(ShapeError, match="unsqueeze"):
        SquaredError().residual(p, p, torch.ones(5))
    with pytest.raises(ShapeError, match="'level'"):
        Huber(SCALAR).gradient(p, p, {"k": p})
