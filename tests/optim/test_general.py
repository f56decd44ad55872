"""Any tuple as an optimizer: mirror maps, read points, and tuples that see layers instead of gradients."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.core.algorithms import Anchor, Momentum, Read, Step
from axes.core.costs import Alignment, CrossEntropy, Given, Huber, Linear, Ridge, SquaredError
from axes.core.geometry import Bounded, Entropic, Lq, SoftThreshold, Spectral, Sphere, TrustRatio, Whiten
from axes.core.memory import MLP
from axes.core.monoids import Decay, Householder, Scalar
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.errors import AxesError, IllegalUpdate

LR, DECAY = Per("lr"), Per("weight_decay")


def target(shape: tuple[int, ...]) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def descend(update: StateUpdate, start: Tensor, steps: int = 25, closure: bool = False, **rates: Any) -> Tensor:
    p = nn.Parameter(start.clone())
    optimizer = optim.optimizer(update)([p], **rates)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (p - target(tuple(p.shape))).pow(4).sum()
        value.backward()
        return value

    for _ in range(steps):
        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
    return p.detach()


def slope(w: Tensor) -> Tensor:
    return 4 * (w - target(tuple(w.shape))) ** 3


START = torch.full((3, 4), 0.25, dtype=torch.float64)


def test_mirror_descent_on_a_simplex_starts_at_the_parameter_and_stays_inside() -> None:
    update = StateUpdate(Given(), Entropic("last"), algorithm=Step(LR))
    w = START
    for _ in range(25):
        w = w * torch.exp(-0.1 * slope(w))
        w = w / w.sum(-1, keepdim=True)
    torch.testing.assert_close(descend(update, START, lr=0.1), w, rtol=0, atol=1e-14)
    with pytest.raises(AxesError, match="not in the set of Entropic"):
        descend(update, START + 1, lr=0.1)


def test_bounded_mirror_descent() -> None:
    theta = torch.logit(START)
    for _ in range(25):
        theta = theta - 0.1 * slope(torch.sigmoid(theta))
    update = StateUpdate(Given(), Bounded(), algorithm=Step(LR))
    torch.testing.assert_close(descend(update, START, lr=0.1), torch.sigmoid(theta), rtol=0, atol=1e-13)


def test_soft_threshold_agile_is_ista_and_lazy_is_dual_averaging() -> None:
    def soft(x: Tensor) -> Tensor:
        return torch.nn.functional.softshrink(x, 0.05)

    w, theta = START, START + 0.05
    for _ in range(25):
        w = soft(w - 0.1 * slope(w))
        theta = theta - 0.1 * slope(soft(theta))
    agile = StateUpdate(Given(), SoftThreshold(0.05), algorithm=Step(LR, lazy=False))
    lazy = StateUpdate(Given(), SoftThreshold(0.05), algorithm=Step(LR))
    torch.testing.assert_close(descend(agile, START, lr=0.1), w, rtol=0, atol=1e-14)
    torch.testing.assert_close(descend(lazy, START, lr=0.1), soft(theta), rtol=0, atol=1e-14)


def test_projected_descent_on_a_sphere() -> None:
    update = StateUpdate(Given(), Sphere("rows"), algorithm=Step(LR, lazy=False))
    w = START
    for _ in range(25):
        w = w - 0.1 * slope(w)
        w = w / w.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(descend(update, START, lr=0.1), w, rtol=0, atol=1e-12)


def test_vectors_and_tensors_of_any_order_are_one_leaf() -> None:
    """A norm over a leaf is over the whole parameter, whatever its shape."""
    update = StateUpdate(Given(), OnUpdate(Lq(4.0)), algorithm=Step(LR))
    flat = torch.full((24,), 0.1, dtype=torch.float64)

    def train(shape: tuple[int, ...]) -> Tensor:
        return descend(update, flat.reshape(shape), lr=0.05).flatten()

    for shape in ((2, 12), (2, 3, 4), (1, 24), (2, 2, 3, 2)):
        torch.testing.assert_close(train(shape), train((24,)), rtol=0, atol=1e-15)


def test_a_batch_of_vectors_keeps_its_members_apart() -> None:
    trust = StateUpdate(Given(), OnUpdate(TrustRatio(Lq(3.0))), algorithm=Step(LR))
    torch.manual_seed(0)
    start = [torch.randn(5, dtype=torch.float64) for _ in range(3)]

    def train(foreach: bool) -> list[Tensor]:
        ps = [nn.Parameter(s.clone()) for s in start]
        optimizer = optim.optimizer(trust)(ps, lr=0.1, foreach=foreach)
        for _ in range(5):
            for p in ps:
                p.grad = p.detach().sin()
            optimizer.step()
        return [p.detach() for p in ps]

    for a, b in zip(train(False), train(True), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-15)


def test_gradient_after_the_gate_needs_a_closure() -> None:
    update = StateUpdate(Given(), monoid=Decay(DECAY), algorithm=Step(LR, at="gated"))
    w = START
    for _ in range(25):
        gated = (1 - 0.1 * 0.5) * w
        w = gated - 0.1 * slope(gated)
    rates = {"lr": 0.1, "weight_decay": 0.5}
    torch.testing.assert_close(descend(update, START, closure=True, **rates), w, rtol=0, atol=1e-14)
    with pytest.raises(AxesError, match=r"step\(closure\)"):
        descend(update, START, **rates)


def test_a_failing_closure_leaves_the_parameter_where_it_was() -> None:
    p = nn.Parameter(START.clone())
    update = StateUpdate(Given(), monoid=Decay(DECAY), algorithm=Step(LR, at="gated"))
    optimizer = optim.optimizer(update)([p], lr=0.1, weight_decay=0.5)

    def fail() -> None:
        assert not torch.equal(p, START)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        optimizer.step(fail)
    assert torch.equal(p, START)


def test_the_parameter_shows_the_read_point() -> None:
    """at="read" differentiates there; at="prev" at the state itself, which needs a closure."""
    read = Read(1.0, 0.06)
    shown, theta = START, START
    for _ in range(25):
        u = -slope(shown)
        shown, theta = theta + 0.06 * u, theta + 0.02 * u
    update = StateUpdate(Given(), algorithm=Step(LR, at="read", read=read))
    torch.testing.assert_close(descend(update, START, lr=0.02), shown, rtol=0, atol=1e-14)
    shown, theta = START, START
    for _ in range(25):
        u = -slope(theta)
        shown, theta = theta + 0.06 * u, theta + 0.02 * u
    update = StateUpdate(Given(), algorithm=Step(LR, read=read))
    torch.testing.assert_close(descend(update, START, closure=True, lr=0.02), shown, rtol=0, atol=1e-14)


def test_constant_vectors_of_a_monoid_are_group_options() -> None:
    """A Householder retention forgets along w."""
    w = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    p = nn.Parameter(START.clone())
    update = StateUpdate(Given(), monoid=Householder(0.5), algorithm=Step(LR))
    optimizer = optim.optimizer(update)([p], lr=0.1, w=w)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), START * torch.tensor([1, 1, 1, 0.5], dtype=torch.float64))
    with pytest.raises(AxesError, match="reads the vector 'w'"):
        optim.optimizer(update)([p], lr=0.1)


def test_named_gates_are_logs() -> None:
    update = StateUpdate(Given(), monoid=Scalar("keep"), algorithm=Step(LR))
    p = nn.Parameter(START.clone())
    optimizer = optim.optimizer(update)([p], lr=0.1, keep=math.log(0.5))
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), START / 2, rtol=0, atol=1e-15)
    with pytest.raises(AxesError, match="its log"):
        optim.optimizer(update)([p], lr=0.1, keep=0.5)


# ---- tuples that see layers ----------------------------------------------------------------------------------------


def regression(n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 2, generator=generator, dtype=torch.float64)


def fit(update: StateUpdate, steps: int = 5, bias: bool = True, **rates: Any) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=bias).double()
    start = model.weight.detach().clone()
    bias0 = model.bias.detach().clone() if bias else torch.zeros(2, dtype=torch.float64)
    optimizer = optim.optimizer(update)(model, **rates)
    x, y = regression()
    for _ in range(steps):
        optimizer.zero_grad()
        ((model(x) - y).square().sum() / 2).backward()
        if bias:
            assert model.bias.grad is not None
            model.bias.grad.zero_()  # AdamW without decay then leaves the bias alone
        optimizer.step()
    return model, start, bias0


def test_the_delta_rule_is_least_mean_squares_example_by_example() -> None:
    model, w, bias = fit(StateUpdate(SquaredError(), algorithm=Step(Per("beta"))), beta=0.1)
    x, y = regression()
    for _ in range(5):
        for k, v in zip(x, y - bias, strict=True):  # the label of the linear part
            w = w - 0.1 * torch.outer(w @ k - v, k)
    torch.testing.assert_close(model.weight.detach(), w, rtol=0, atol=1e-13)
    assert torch.equal(model.bias.detach(), bias)


def test_the_implicit_step_is_normalised() -> None:
    update = StateUpdate(SquaredError(), algorithm=Step(Per("beta"), at="new"))
    model, w, _ = fit(update, bias=False, beta=2.0)
    x, y = regression()
    for _ in range(5):
        for k, v in zip(x, y, strict=True):
            w = w - 2.0 / (1 + 2.0 * k @ k) * torch.outer(w @ k - v, k)
    torch.testing.assert_close(model.weight.detach(), w, rtol=0, atol=1e-13)


def test_hebbian_writes_and_recursive_least_squares() -> None:
    model, w, _ = fit(StateUpdate(Alignment(), algorithm=Step(Per("beta"))), steps=1, bias=False, beta=0.1)
    x, y = regression()
    torch.testing.assert_close(model.weight.detach(), w + 0.1 * y.T @ x, rtol=0, atol=1e-13)

    gram = StateUpdate(Linear("key"))
    recursive = StateUpdate(SquaredError(), OnUpdate(Whiten((gram,), "right", 1.0, eps=1e-12)), algorithm=Step(1.0))
    model, w, _ = fit(recursive, steps=1, bias=False)
    best = torch.linalg.lstsq(x, y).solution.T
    # a little of W_0 is left: eps over rank-deficient beginnings
    torch.testing.assert_close(model.weight.detach(), best, rtol=0, atol=1e-3)


def test_layers_inside_a_network_and_tuples_with_filters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    update = StateUpdate(Huber(1.0), algorithm=Step(Per("beta"), via=(Momentum(0.5, "ema"),)))
    optimizer = optim.optimizer(update)(model, beta=0.1, lr=0.01)
    assert {row.name: row.rule for row in optim.report(model, optimizer).rows} == {
        "0.weight": "matrix",
        "0.bias": "auxiliary",
        "2.weight": "matrix",
        "2.bias": "auxiliary",
    }
    x, y = regression(20)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x) - y).square().sum() / 2
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_a_tuple_that_sees_layers_needs_the_model() -> None:
    update = StateUpdate(SquaredError(), algorithm=Step(Per("beta")))
    model = nn.Linear(3, 2)
    with pytest.raises(AxesError, match="pass the model"):
        optim.optimizer(update)(model.parameters(), beta=0.1)
    optimizer = optim.optimizer(update)(model.named_parameters(), beta=0.1, model=model)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    with pytest.raises(AxesError, match="a copy has no hooks"):
        clone = copy.deepcopy(optimizer)
        for group in clone.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        clone.step()


# ---- what cannot be an optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (StateUpdate(Linear(), monoid=Scalar(0.9)), "is a filter or a statistic"),
        (StateUpdate(CrossEntropy(), memory=MLP(), algorithm=Step(0.1)), "MLP memory"),
        (StateUpdate(Given(), monoid=Scalar(0.9), algorithm=Step(0.1, debias=True)), "debias"),
    ],
)
def test_tuples_that_are_not_optimizers(update: StateUpdate, message: str) -> None:
    with pytest.raises(IllegalUpdate, match=message):
        optim.optimizer(update)


def test_rates_are_checked_by_name() -> None:
    update = StateUpdate(Given(), algorithm=Step(Per("speed")))
    p = nn.Parameter(START.clone())
    with pytest.raises(AxesError, match="asks for 'speed'"):
        optim.optimizer(update)([p])
    with pytest.raises(AxesError, match="does not ask for 'lr'"):
        optim.optimizer(update)([p], speed=0.1, lr=0.1)
    with pytest.raises(AxesError, match="auxiliary tuple"):
        matrix = StateUpdate(Given(), OnUpdate(Spectral()), algorithm=Step(LR))
        optim.optimizer(matrix, auxiliary=matrix)


def test_an_anchor_needs_the_cost_itself() -> None:
    with pytest.raises(IllegalUpdate, match="given gradient"):
        StateUpdate(Given(), algorithm=Step(LR, at=Anchor(4)))


def test_equal_tuples_give_identical_trajectories() -> None:
    sugar = StateUpdate(Ridge(Given(), DECAY), algorithm=Momentum(0.9, "sum", rate=LR))
    lowered = optim.SGD.declare(momentum=0.9)
    assert sugar.normal() == lowered.normal()
    rates = {"lr": 0.05, "weight_decay": 0.1}
    assert torch.equal(descend(sugar, START, **rates), descend(lowered, START, **rates))
