"""Matrices with a side that is too long for a statistic: whitened from the other one, and the report says so."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from axes import optim
from axes.errors import AxesError
from axes.testing import checks

RULES = {"soap": optim.SOAP, "shampoo": optim.Shampoo, "psgd-kron": optim.PSGDKron}
SHAPES = ((3, 7), (7, 3), (3, 2))
LIMIT = 4
STEPS = 14


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in SHAPES]


def gradients() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES] for _ in range(STEPS)]


def walk(optimizer: Any, ps: list[nn.Parameter]) -> list[Tensor]:
    for step in gradients():
        for p, g in zip(ps, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in ps]


def close(a: list[Tensor], b: list[Tensor], bound: float) -> None:
    assert max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) < bound


@pytest.mark.parametrize("foreach", [False, True])
def test_soap_is_the_authors_as_published_in_pytorch_optimizer(foreach: bool) -> None:
    """Its QR is in float32."""
    ps, qs = parameters(), parameters()
    options: dict[str, Any] = {"lr": 0.05, "betas": (0.9, 0.95), "shampoo_beta": 0.8, "eps": 1e-12, "weight_decay": 0.0}
    ours = optim.SOAP([{"params": ps, "rule": "soap"}], refresh=3, max_side=LIMIT, foreach=foreach, **options)
    theirs = pytorch_optimizer.SOAP(qs, precondition_frequency=3, max_precondition_dim=LIMIT, **options)
    close(walk(ours, ps), walk(theirs, qs), 1e-5)


@pytest.mark.parametrize("exponent", [0.25, 0.5])
def test_shampoo_takes_the_power_of_two_sides_from_one(exponent: float) -> None:
    ps = parameters()
    optimizer = optim.Shampoo(
        [{"params": ps, "rule": "shampoo"}], 0.1, (0.0, 1.0), exponent, eps=1e-2, damping=0.0, max_side=LIMIT
    )
    ws = [p.detach().clone() for p in ps]
    sums = [[torch.zeros(n, n, dtype=torch.float64) for n in s] for s in SHAPES]

    def root(a: Tensor, power: float) -> Tensor:
        values, vectors = torch.linalg.eigh(a)
        return vectors @ torch.diag((values + 1e-2) ** -power) @ vectors.T

    for step in gradients():
        for w, g, (left, right) in zip(ws, step, sums, strict=True):
            left += g @ g.T
            right += g.T @ g
            m, n = g.shape
            if n > LIMIT:
                w -= 0.1 * root(left, 2 * exponent) @ g
            elif m > LIMIT:
                w -= 0.1 * g @ root(right, 2 * exponent)
            else:
                w -= 0.1 * root(left, exponent) @ g @ root(right, exponent)
    close(walk(optimizer, ps), ws, 1e-11)


def test_one_fitted_factor_whitens_what_it_can() -> None:
    """P E[g g^T] P = n I, from rows alone."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    p = nn.Parameter(torch.zeros(3, 40, dtype=torch.float64))
    optimizer = optim.PSGDKron([{"params": [p], "rule": "psgd-kron"}], beta=0.0, fit_rate=0.05, max_side=LIMIT)
    for _ in range(500):
        p.grad = mix @ torch.randn(3, 40, generator=generator, dtype=torch.float64)
        optimizer.step()
    factor = optimizer.state[p]["via.0.stats.0.held"]
    white = factor @ mix @ mix.T @ factor
    assert (white - torch.eye(3)).abs().max() < 0.1


@pytest.mark.parametrize("rule", RULES)
def test_groups_and_the_report_say_which_side_is_left_out(rule: str) -> None:
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 3), nn.Linear(3, 3), nn.Linear(6, 7))
    optimizer = RULES[rule](model, max_side=LIMIT)  # type: ignore[operator]
    assert {g.get("sides") for g in optimizer.param_groups} == {"both", "rows", "columns", None}
    rows = {row.name: row for row in optimizer.report().rows}
    assert "no statistic of its rows, of which it has more than max_side=4" in rows["0.weight"].reason
    assert "no statistic of its columns, of which it has more than max_side=4" in rows["1.weight"].reason
    assert "no statistic" not in rows["2.weight"].reason
    assert rows["3.weight"].rule == "adamw" and "both sides are longer than max_side=4" in rows["3.weight"].reason
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    again = RULES[rule](model, max_side=LIMIT)  # type: ignore[operator]
    again.load_state_dict(optimizer.state_dict())
    assert str(again.state_dict()) == str(optimizer.state_dict())
    whole = RULES[rule](model, max_side=None)  # type: ignore[operator]
    assert {g.get("sides") for g in whole.param_groups} == {"both", None}
    assert whole.report().state_bytes > optimizer.report().state_bytes


def test_the_head_of_a_language_model_fits() -> None:
    """50,257 x 512: 20.4 GB of state without a limit."""
    with torch.device("meta"):
        head = nn.Linear(512, 50257, bias=False)
    groups: Any = [{"params": head.weight, "rule": "soap"}]
    assert optim.SOAP(groups, max_side=None).report().state_bytes > 20e9
    assert optim.SOAP(groups).report().state_bytes < 0.21e9


def test_what_makes_no_sense_is_refused() -> None:
    p = nn.Parameter(torch.ones(6, 7))
    for limit in (0, 2.5, "long", True):
        with pytest.raises(AxesError, match="max_side must be (an integer|a number, got a str)"):
            optim.SOAP([{"params": [p], "rule": "soap"}], max_side=limit)  # type: ignore[arg-type]
    with pytest.raises(AxesError, match="wide, a matrix of 6 x 7, is longer than max_side=4 in both sides"):
        optim.SOAP([{"params": [("wide", p)], "rule": "soap"}], max_side=LIMIT)
    with pytest.raises(AxesError, match="takes powers 1, 1/2"):
        optim.Shampoo([{"params": [nn.Parameter(torch.ones(3, 7))], "rule": "shampoo"}], exponent=1 / 3,
                      method="newton", max_side=LIMIT)  # fmt: skip


@pytest.mark.parametrize("sides", ["rows", "columns"])
@pytest.mark.parametrize("rule", RULES)
def test_every_field_of_a_one_sided_tuple_matters(rule: str, sides: Any) -> None:
    checks.mutation_law(RULES[rule].declare(sides=sides))
