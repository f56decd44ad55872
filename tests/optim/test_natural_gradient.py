"""The factored and the exact natural gradient against Fisher and Gauss-Newton matrices built by autograd."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

from axes import optim
from axes.errors import AxesError

STEPS = 30


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()


def data(n: int, outputs: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, outputs, generator=generator, dtype=torch.float64)


def half_square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum(-1).mean() / 2


def kronecker_factors(fisher: Tensor, m: int, n: int, trace: Tensor) -> tuple[Tensor, Tensor]:
    """G and A of a matrix G (x) A whose A has this trace, by partial traces."""
    blocks = fisher.reshape(m, n, m, n)
    g = torch.einsum("iaja->ij", blocks) / trace
    return g, torch.einsum("iaib->ab", blocks) / g.trace()


def solve(fisher: tuple[Tensor, Tensor], gradient: Tensor, damping: float) -> Tensor:
    g, a = (x + damping**0.5 * torch.eye(len(x), dtype=x.dtype) for x in fisher)
    return torch.linalg.solve(torch.kron(g, a), gradient.flatten()).reshape(gradient.shape)


def one_example_step(observe: bool) -> tuple[nn.Sequential, list[Tensor], list[Tensor]]:
    """Parameters before and after one plain step of the factored rule on one example."""
    model, (x, y) = network(), data(1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optim.NaturalGradient(model, lr=1.0, beta=0.0, momentum=0.0, damping=1e-2)
    if observe:
        for c in range(2):  # scores of unit variance in every output: their average over passes is J^T J
            with optimizer.fisher_pass():
                (2**0.5 * model(x)[:, c]).mean().backward()
    half_square(model(x), y).backward()
    optimizer.step()
    return model, before, [p.detach() for p in model.parameters()]


def test_one_example_is_the_empirical_fisher_block() -> None:
    model, before, after = one_example_step(observe=False)
    x, y = data(1)
    gradients = grad(lambda ps: half_square(functional_call(model, ps, (x,)), y))(named(model, before))
    hidden = torch.tanh(x @ before[0].T)
    for w, new, g, inputs in zip(before, after, gradients.values(), (x, hidden), strict=True):
        block = torch.outer(g.flatten(), g.flatten())
        factors = kronecker_factors(block, *w.shape, inputs.square().sum())
        torch.testing.assert_close(torch.kron(*factors), block, rtol=0, atol=1e-14)
        torch.testing.assert_close(w - solve(factors, g, 1e-2), new, rtol=0, atol=1e-12)


def test_one_example_with_scores_of_every_output_is_the_gauss_newton_block() -> None:
    model, before, after = one_example_step(observe=True)
    x, y = data(1)
    values = named(model, before)
    gradients = grad(lambda ps: half_square(functional_call(model, ps, (x,)), y))(values)
    jacobians = jacrev(lambda ps: functional_call(model, ps, (x,))[0])(values)
    hidden = torch.tanh(x @ before[0].T)
    for w, new, name, inputs in zip(before, after, values, (x, hidden), strict=True):
        j = jacobians[name].flatten(1)
        block = j.T @ j
        factors = kronecker_factors(block, *w.shape, inputs.square().sum())
        torch.testing.assert_close(torch.kron(*factors), block, rtol=0, atol=1e-14)
        torch.testing.assert_close(w - solve(factors, gradients[name], 1e-2), new, rtol=0, atol=1e-12)


def named(model: nn.Module, values: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip((name for name, _ in model.named_parameters()), values, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("foreach", [False, True])
def test_averaged_factors_against_per_example_gradients(reduction: Any, foreach: bool) -> None:
    beta, damping, momentum, lr, decay, n = 0.9, 1e-2, 0.8, 0.05, 0.1, 7
    model, (x, y) = network(), data(n)
    scale = 1.0 if reduction == "mean" else float(n)
    optimizer = optim.NaturalGradient(
        model, lr, beta, damping, momentum, weight_decay=decay, reduction=reduction, foreach=foreach
    )
    weights = [p.detach().clone() for p in model.parameters()]
    factors = [[torch.zeros(d, d, dtype=torch.float64) for d in w.shape] for w in weights]
    buffers = [torch.zeros_like(w) for w in weights]
    for t in range(1, STEPS + 1):
        optimizer.zero_grad()
        (scale * half_square(model(x), y)).backward()
        optimizer.step()

        def outputs(shifts: list[Tensor], xi: Tensor) -> Tensor:
            hidden = torch.tanh(weights[0] @ xi + shifts[0])
            return weights[1] @ hidden + shifts[1]

        def loss(shifts: list[Tensor], xi: Tensor, yi: Tensor) -> Tensor:
            return (outputs(shifts, xi) - yi).square().sum() / 2

        zeros = [torch.zeros(w.shape[0], dtype=torch.float64) for w in weights]
        deltas = vmap(grad(loss), (None, 0, 0))(zeros, x, y)  # output gradients of every layer, per example
        inputs = [x, torch.tanh(x @ weights[0].T)]
        for i, w in enumerate(list(weights)):
            delta, k = deltas[i], inputs[i]
            g = scale * delta.T @ k / n
            products = (delta.T @ delta / n, k.T @ k / n)
            factors[i] = [beta * f + (1 - beta) * p for f, p in zip(factors[i], products, strict=True)]
            debiased = (factors[i][0] / (1 - beta**t), factors[i][1] / (1 - beta**t))
            buffers[i] = momentum * buffers[i] + (1 - momentum) * solve(debiased, g, damping)
            weights[i] = (1 - lr * decay) * w - lr * buffers[i] / (1 - momentum**t)
        for ours, w in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(ours.detach(), w, rtol=0, atol=1e-10)


def test_a_position_of_a_sequence_is_an_example() -> None:
    x, y = data(12)

    def train(shape: tuple[int, ...]) -> list[Tensor]:
        model = network()
        optimizer = optim.NaturalGradient(model)
        for _ in range(5):
            optimizer.zero_grad()
            half_square(model(x.reshape(*shape, 3)), y.reshape(*shape, 2)).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for a, b in zip(train((12,)), train((3, 4)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_accumulated_batches_are_one_batch() -> None:
    x, y = data(12)

    def train(parts: int) -> list[Tensor]:
        model = network()
        optimizer = optim.NaturalGradient(model)
        for _ in range(5):
            optimizer.zero_grad()
            for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (half_square(model(xs), ys) / parts).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for a, b in zip(train(1), train(3), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_a_fisher_pass_leaves_the_gradients_alone() -> None:
    model, (x, y) = network(), data(4)
    optimizer = optim.NaturalGradient(model)
    half_square(model(x), y).backward()
    kept = [p.grad for p in model.parameters()]
    with optimizer.fisher_pass():
        half_square(model(x), y + 1).backward()
    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gaussian": half_square,
    "categorical": lambda logits, target: -(F.log_softmax(logits, -1) * target.softmax(-1)).sum(-1).mean(),
    "empirical": half_square,
}


@pytest.mark.parametrize("likelihood", list(LOSSES))
def test_the_exact_form_against_an_explicit_matrix(likelihood: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = data(6, outputs=3)
    loss, lr, damping, decay = LOSSES[likelihood], 0.3, 0.05, 0.1
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def unpack(w: Tensor) -> dict[str, Tensor]:
        pieces = w.split([s.numel() for s in shapes.values()])
        return {name: piece.reshape(s) for (name, s), piece in zip(shapes.items(), pieces, strict=True)}

    def f(w: Tensor) -> Tensor:
        return functional_call(model, unpack(w), (x,))

    w = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = optim.ExactNaturalGradient(model, lr=lr, damping=damping, weight_decay=decay, likelihood=likelihood)
    for _ in range(STEPS):
        gradient = grad(lambda v: loss(f(v), y))(w)
        if likelihood == "empirical":
            scores = jacrev(lambda v: torch.stack([loss(o[None], t[None]) for o, t in zip(f(v), y, strict=True)]))(w)
            fisher = scores.T @ scores / len(x)
        else:  # Gauss-Newton: the Hessian of the loss of the linearised model
            j, at = jacrev(f)(w), f(w)
            fisher = hessian(lambda v, at=at, j=j, w=w: loss(at + j @ (v - w), y))(w)
        step = torch.linalg.solve(fisher + damping * torch.eye(len(w), dtype=w.dtype), gradient)
        w = (1 - lr * decay) * w - lr * step
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        ours = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(ours, w, rtol=0, atol=1e-9)


def test_the_exact_form_solves_least_squares_in_one_step() -> None:
    x, y = data(20)
    model = nn.Linear(3, 2).double()
    optimizer = optim.ExactNaturalGradient(model, lr=1.0, damping=1e-12)
    half_square(model(x), y).backward()
    optimizer.step()
    ones = torch.cat([x, torch.ones(20, 1, dtype=x.dtype)], 1)
    best = torch.linalg.lstsq(ones, y).solution
    torch.testing.assert_close(model.weight.detach(), best[:3].T, rtol=0, atol=1e-9)
    torch.testing.assert_close(model.bias.detach(), best[3], rtol=0, atol=1e-9)


def test_state_of_the_exact_form_round_trips() -> None:
    x, y = data(5)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        half_square(model(x), y).backward()
        optimizer.step()

    a = network()
    first = optim.ExactNaturalGradient(a)
    step(a, first)
    b = network()
    b.load_state_dict(a.state_dict())
    second = optim.ExactNaturalGradient(b)
    second.load_state_dict(first.state_dict())
    step(a, first)
    step(b, second)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_what_cannot_work_is_said() -> None:
    model = network()
    with pytest.raises(AxesError, match="pass the model"):
        optim.NaturalGradient(list(model.parameters()))
    with pytest.raises(AxesError, match="max_parameters"):
        optim.ExactNaturalGradient(nn.Linear(100, 100))
    with pytest.raises(AxesError, match="pass the model itself"):
        optim.ExactNaturalGradient(list(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(AxesError, match="damping must be positive"):
        optim.NaturalGradient(model, damping=0.0)
    with pytest.raises(AxesError, match="likelihood"):
        optim.ExactNaturalGradient(model, likelihood="poisson")  # type: ignore[arg-type]
    exact = optim.ExactNaturalGradient(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(AxesError, match="was not called"):
        exact.step()
    factored = optim.NaturalGradient(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(AxesError, match="no layer inputs were collected for '0.weight'"):
        factored.step()


# ---- hooks -----------------------------------------------------------------------------------------------------------

WATCHING: dict[str, Callable[[nn.Module], Any]] = {
    "natural gradient": optim.NaturalGradient,
    "eigenvalues too": optim.EKFAC,
    "least squares": optim.RecursiveLeastSquares,
    "exact": optim.ExactNaturalGradient,
}


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("make", WATCHING.values(), ids=WATCHING)
def test_hooks_go_with_their_optimizer(make: Callable[[nn.Module], Any]) -> None:
    model, (x, y) = network(), data(4)
    for _ in range(3):
        optimizer = make(model)
        one = hooks(model)
        half_square(model(x), y).backward()
        optimizer.step()
        del optimizer
        gc.collect()
        assert one > 0 and hooks(model) == 0


@pytest.mark.parametrize("make", WATCHING.values(), ids=WATCHING)
def test_hooks_are_removed_when_asked(make: Callable[[nn.Module], Any]) -> None:
    model, (x, y) = network(), data(4)
    optimizer, other = make(model), make(model)
    both = hooks(model)
    optimizer.remove_hooks()
    optimizer.remove_hooks()
    assert 2 * hooks(model) == both
    half_square(model(x), y).backward()
    other.step()
    with pytest.raises(AxesError, match=r"hooks were removed|was not called"):
        optimizer.step()


def test_a_copied_model_does_not_feed_the_optimizer_of_the_original() -> None:
    """A model with hooks is copied and pickled as one without."""
    model, (x, y) = network(), data(4)
    optimizer = optim.NaturalGradient(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        half_square(twin(x), y).backward()
    assert optimizer._layers is not None and not optimizer._layers.found
    half_square(model(x), y).backward()
    assert len(optimizer._layers.found) == 2
