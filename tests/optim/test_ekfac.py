"""EKFAC against the Fisher matrix of every layer, built from per-example gradients by autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from axes import optim
from axes.errors import AxesError

N = 9


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()


def data(seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(N, 2, generator=generator, dtype=torch.float64)


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum(-1).mean() / 2


def per_example(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """(N, out, in) gradients of the examples' own losses."""
    values = {name: p.detach() for name, p in model.named_parameters()}
    one = grad(lambda ps, a, b: loss(functional_call(model, ps, (a[None],)), b[None]))
    return vmap(one, (None, 0, 0))(values, x, y)


def inputs(model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"0.weight": x, "2.weight": torch.tanh(model[0](x))}


def fisher(gradients: Tensor) -> Tensor:
    rows = gradients.flatten(1)
    return rows.mT @ rows / len(rows)


def factors(gradients: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """G and A: every per-example gradient is delta x^T."""
    delta = gradients @ x[..., None] / x.square().sum(-1)[:, None, None]
    return (delta * delta.mT).mean(0), x.mT @ x / len(x)


def direction(gradients: Tensor, x: Tensor, damping: float) -> Tensor:
    """U (diag(U^T F U) + damping)^{-1} U^T mean gradient, with U the eigenvectors of G (x) A."""
    g, a = factors(gradients, x)
    u = torch.kron(torch.linalg.eigh(g).eigenvectors, torch.linalg.eigh(a).eigenvectors)
    s = (u.mT @ fisher(gradients) @ u).diagonal()
    mean = gradients.mean(0)
    return (u @ ((u.mT @ mean.flatten()) / (s + damping))).reshape(mean.shape)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_is_that_of_the_fisher_diagonal_in_the_kronecker_basis(reduction: Any, foreach: bool) -> None:
    model = network()
    optimizer = optim.EKFAC(
        model, lr=0.5, beta=0.0, momentum=0.0, damping=1e-2, refresh=1, reduction=reduction, foreach=foreach
    )
    scale = 1.0 if reduction == "mean" else float(N)
    for t in range(4):
        x, y = data(t)
        seen, given = per_example(model, x, y), inputs(model, x)
        expected = {
            name: p.detach() - 0.5 * scale * direction(seen[name], given[name], 1e-2)
            for name, p in model.named_parameters()
        }
        optimizer.zero_grad()
        (scale * loss(model(x), y)).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), expected[name], rtol=0, atol=1e-9)


def test_it_is_nearer_to_the_fisher_matrix_than_its_factors_are() -> None:
    """|F - U s U^T| <= |F - G (x) A| for both layers: what the eigenvalues are there for."""
    model, (x, y) = network(), data()
    seen, given = per_example(model, x, y), inputs(model, x)
    for name in seen:
        f, (g, a) = fisher(seen[name]), factors(seen[name], given[name])
        u = torch.kron(torch.linalg.eigh(g).eigenvectors, torch.linalg.eigh(a).eigenvectors)
        corrected = u * (u.mT @ f @ u).diagonal() @ u.mT
        assert (f - corrected).norm() < (f - torch.kron(g, a)).norm()


def test_bases_are_kept_between_refreshes_while_moments_go_on() -> None:
    model = network()
    optimizer = optim.EKFAC(model, lr=0.1, beta=0.5, refresh=3)
    bases, moments = [], []
    for t in range(7):
        x, y = data(t)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        state = optimizer.state[model[0].weight]
        held = {n: v.clone() for n, v in state.items() if v.ndim == 2}
        bases.append([v for n, v in held.items() if n.endswith(".held")])
        moments.append([held["via.0.stats.2.theta"]])
    same = [all(map(torch.equal, a, b)) for a, b in zip(bases, bases[1:], strict=False)]
    assert same == [True, True, False, True, True, False]
    assert not any(all(map(torch.equal, a, b)) for a, b in zip(moments, moments[1:], strict=False))


def test_passes_on_sampled_labels_give_the_fisher_matrix_of_the_model() -> None:
    model, (x, y) = network(), data()
    optimizer = optim.EKFAC(model, lr=0.5, beta=0.0, momentum=0.0, damping=1e-2, refresh=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    labels = data(5)[1]
    seen, given = per_example(model, x, labels), inputs(model, x)
    with optimizer.fisher_pass():
        loss(model(x), labels).backward()
    gradients = per_example(model, x, y)
    loss(model(x), y).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        g, a = factors(seen[name], given[name])
        u = torch.kron(torch.linalg.eigh(g).eigenvectors, torch.linalg.eigh(a).eigenvectors)
        s = (u.mT @ fisher(seen[name]) @ u).diagonal()
        step = u @ ((u.mT @ gradients[name].mean(0).flatten()) / (s + 1e-2))
        torch.testing.assert_close(p.detach(), before[name] - 0.5 * step.reshape(p.shape), rtol=0, atol=1e-9)


def test_layers_of_one_shape_may_see_different_numbers_of_examples() -> None:
    torch.manual_seed(0)
    one, two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    model = nn.ModuleList([one, two])
    optimizer = optim.EKFAC(model, lr=0.1)
    (one(torch.randn(4, 3)).square().mean() + two(torch.randn(7, 3)).square().mean()).backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("options", [{"damping": 0.0}, {"beta": 1.0}, {"refresh": 0}, {"reduction": "max"}])
def test_refusals(options: dict[str, Any]) -> None:
    with pytest.raises(AxesError, match="damping|beta|refresh|reduction"):
        optim.EKFAC(network(), **options)
