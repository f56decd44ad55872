"""Rules that precondition from both sides, stepped as stacks: the same as the interpreter, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.core import execution
from axes.linalg.matrix_roots import add_product
from axes.optim.engine import statistics
from axes.optim.engine.apart import squares
from axes.optim.engine.batch import Batch
from axes.optim.engine.routing import canonical_shape
from axes.optim.engine.staged import no_stages
from axes.optim.engine.together import start
from axes.optim.rules import wrappers

SQUARES = ((6, 6), (4, 4), (6, 6), (5, 5), (4, 2, 2, 1))  # whose statistics have full rank from the first gradient on
SHAPES = ((6, 4), (4, 6), (6, 4), (5, 5), (4, 3, 2, 2))
SOAP = {"lr": 0.05, "eps": 1e-3}
RULES: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "SOAP": (optim.SOAP, "soap", SQUARES, {**SOAP, "refresh": 3}),
    "SOAP by decomposition": (optim.SOAP, "soap", SQUARES, {**SOAP, "refresh": 4, "basis": "eigh"}),
    "SOAP by Householder": (optim.SOAP, "soap", SQUARES, {**SOAP, "qr": "householder", "maximize": True}),
    "SOAP without momentum": (optim.SOAP, "soap", SQUARES, {**SOAP, "betas": (0.0, 0.9), "maximize": True}),
    "Shampoo": (optim.Shampoo, "shampoo", SHAPES, {"refresh": 4, "eps": 1e-3, "weight_decay": 0.1}),
    "averaged Shampoo": (optim.Shampoo, "shampoo", SHAPES, {"eps": 1e-3, "betas": (0.9, 0.95), "maximize": True}),
    "grafted Shampoo": (optim.Shampoo, "shampoo", SHAPES, {"refresh": 3, "eps": 1e-3, "graft": "adagrad"}),
    "Shampoo by Newton": (
        optim.Shampoo, "shampoo", SHAPES, {"refresh": 3, "betas": (0.0, 0.95), "method": "newton", "damping": 1e-3},
    ),
}  # fmt: skip


def make(rule: str, dtype: torch.dtype = torch.float64, **more: Any) -> tuple[list[nn.Parameter], Any]:
    """Parameters, and an optimizer that interprets the tuple for one after another, after one step.

    A first datum that is treated unlike the others is the interpreter's anyway.
    """
    cls, name, shapes, options = RULES[rule]
    generator = torch.Generator().manual_seed(1)
    ps = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]
    optimizer = cls([{"params": ps, "rule": name}], foreach=False, **{**options, **more})
    advance(1, generator, (ps,), optimizer.step)
    return ps, optimizer


def together(ps: list[nn.Parameter], optimizer: Any) -> tuple[Batch, dict[str, Any]]:
    """The same step over stacks, on the optimizer's parameters and states; and its rates."""
    (group,) = optimizer.param_groups
    for p in ps:
        optimizer.state[p] = start(optimizer.state[p], p)
    update = optimizer.update_for(group)
    runner = Batch(update, group["maximize"], list(ps), [optimizer.state[p] for p in ps], route="stacks")
    return runner, {per.name: group[per.name] for per in update.demands()}


def give(generator: torch.Generator, *lists: list[nn.Parameter]) -> None:
    for members in zip(*lists, strict=True):
        g = torch.randn(members[0].shape, generator=generator, dtype=torch.float64).to(members[0].dtype)
        for p in members:
            p.grad = g.clone()


def advance(
    steps: int, generator: torch.Generator, lists: tuple[list[nn.Parameter], ...], *steppers: Callable[[], Any]
) -> None:
    """Steps on the same new gradients for every list."""
    for _ in range(steps):
        give(generator, *lists)
        with torch.no_grad():
            for step in steppers:
                step()


def same(ps: list[nn.Parameter], qs: list[nn.Parameter], a: Any, b: Any, bound: float = 1e-11) -> None:
    for p, q in zip(ps, qs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=bound, equal_nan=True)
        assert a.state[p].keys() == b.state[q].keys()
        for name, x in a.state[p].items():
            y = b.state[q][name]
            assert x.shape == y.shape and x.dtype == y.dtype, name
            torch.testing.assert_close(x, y, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("rule", RULES)
def test_stacks_step_as_the_interpreter_does(rule: str) -> None:
    ps, alone = make(rule)
    qs, other = make(rule)
    runner, rates = together(qs, other)
    assert runner.around is not None and runner.around.statistics.links
    assert len(runner.around.shaped) == len({canonical_shape(p) for p in ps})
    generator = torch.Generator().manual_seed(5)
    for _ in range(12):
        give(generator, ps, qs)
        alone.step()
        assert runner.matches(qs, other.state)
        with torch.no_grad():
            runner.step(rates)
    same(ps, qs, alone, other)


def test_statistics_of_one_size_are_refreshed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond some size alone; what is held is the same."""
    seen: list[list[int]] = []
    refreshed = execution.refreshed

    def counted(parts: Any, state: Any, theta: Any, norm: Any, signal: Any) -> Any:
        seen[-1].append(len(theta[0]))
        return refreshed(parts, state, theta, norm, signal)

    monkeypatch.setattr(execution, "refreshed", counted)
    runs = []
    for size in (1024, 4):
        monkeypatch.setattr(statistics, "_TOGETHER", size)
        seen.append([])
        ps, optimizer = make("SOAP")
        runner, rates = together(ps, optimizer)
        seen[-1].clear()
        generator = torch.Generator().manual_seed(5)
        advance(5, generator, (ps,), partial(runner.step, rates))
        runs.append((ps, optimizer))
    # sides of 6, 4 and 5: rows and columns of two, two and one matrices; at datum 5
    assert sorted(seen[0]) == sorted([4, 4, 2]) and sorted(seen[1]) == sorted([2, 2, 4, 1, 1])
    same(runs[0][0], runs[1][0], runs[0][1], runs[1][1])


@pytest.mark.parametrize("rule", ["SOAP", "Shampoo"])
def test_parameters_that_have_seen_different_data(rule: str) -> None:
    ps, alone = make(rule)
    qs, stacked = make(rule)
    stacked.param_groups[0]["foreach"] = True
    generator = torch.Generator().manual_seed(5)
    for t in range(9):
        give(generator, ps, qs)
        for i in range(len(ps) if t < 3 else 0):
            if (t + i) % 4 == 0:
                ps[i].grad = qs[i].grad = None
        alone.step()
        stacked.step()
    same(ps, qs, alone, stacked)


@pytest.mark.parametrize("rule", ["SOAP", "Shampoo", "Shampoo by Newton"])
def test_what_is_not_finite_is_not_taken(rule: str) -> None:
    """The last good value stays and is counted, for one parameter of a stack; its neighbours do not see it."""
    ps, alone = make(rule, check_finite=False)
    qs, other = make(rule, check_finite=False)
    runner, rates = together(qs, other)
    generator = torch.Generator().manual_seed(5)
    for t in range(9):
        give(generator, ps, qs)
        if t == 5:
            for xs in (ps, qs):
                assert xs[0].grad is not None
                xs[0].grad[0, 0] = torch.nan
        alone.step()
        with torch.no_grad():
            runner.step(rates)
    same(ps, qs, alone, other)
    misses = [sum(int(x) for n, x in other.state[q].items() if n.endswith("misses")) for q in qs]
    assert misses[0] > 0 and not any(misses[1:])


@pytest.mark.parametrize("rule", ["SOAP", "Shampoo"])
def test_parameters_of_16_bits_and_without_one_run_of_memory(rule: str) -> None:
    ps, alone = make(rule, torch.bfloat16)
    qs, other = make(rule, torch.bfloat16)
    for i in (1, 3):
        qs[i].data = qs[i].data.mT.contiguous().mT
    runner, rates = together(qs, other)
    generator = torch.Generator().manual_seed(5)
    advance(6, generator, (ps, qs), alone.step, partial(runner.step, rates))
    same(ps, qs, alone, other, 2e-2)


@pytest.mark.parametrize("rule", ["SOAP", "Shampoo"])
def test_a_run_goes_on_bit_for_bit_from_its_state(rule: str) -> None:
    ps, optimizer = make(rule, torch.float32)
    runner, rates = together(ps, optimizer)
    generator = torch.Generator().manual_seed(5)
    advance(5, generator, (ps,), partial(runner.step, rates))
    qs, other = make(rule, torch.float32)
    for p, q in zip(ps, qs, strict=True):
        q.detach().copy_(p.detach())
        other.state[q] = {n: x.clone() for n, x in optimizer.state[p].items()}
    again, _ = together(qs, other)
    advance(5, generator, (ps, qs), partial(runner.step, rates), partial(again.step, rates))
    same(ps, qs, optimizer, other, 0.0)


def test_a_product_is_added_where_a_statistic_is_kept() -> None:
    """As on a GPU, and the same to rounding."""
    generator = torch.Generator().manual_seed(0)
    u, total = (torch.randn(3, 4, n, generator=generator, dtype=torch.float64) for n in (5, 4))
    rows, columns = (link.update for link in squares(optim.SOAP.declare().normal()).values())
    for side, expected in ((rows, u @ u.mT), (columns, u.mT @ u)):
        n, kept = expected.shape[-1], statistics.average(side)
        assert kept is not None
        begun = total if n == 4 else torch.ones(3, 5, 5, dtype=torch.float64)
        plain, added = begun.clone(), begun.clone()
        statistics._take(plain, side.cost, kept, u)
        a, b = (u, u.mT) if n == 4 else (u.mT, u)
        add_product(added, a, b, kept.keep, kept.rate, side.cost.precision)
        for got in (plain, added):
            torch.testing.assert_close(got, 0.95 * begun + 0.05 * expected, rtol=1e-13, atol=1e-13)


def test_every_rule_of_such_statistics_is_staged() -> None:
    """Whatever else there is about it, from one side too; values that are no averages are left to the interpreter."""
    soap, shampoo = optim.SOAP.declare(), optim.Shampoo.declare()
    for taken in (
        soap,
        shampoo,
        optim.SOAP.declare(precision="tf32", basis="eigh"),
        optim.Shampoo.declare(graft="adagrad"),
        wrappers.grafting(shampoo, optim.AdamW.declare()),
        wrappers.rotational(soap),
    ):
        assert no_stages(taken.normal()) is None and no_stages(taken.normal(), True) is None
    assert no_stages(optim.PSGDKron.declare().normal()) is not None


def test_what_is_left_for_later_shares_memory() -> None:
    """Beyond the state, SOAP holds three numbers for every entry, and products read its average where it is kept."""
    ps, optimizer = make("SOAP", torch.float32)
    runner, _ = together(ps, optimizer)
    assert runner.around is not None
    around, places = runner.around, set()
    for stacks in around.rooms.values():
        places |= {(x.data_ptr(), x.numel()) for x in stacks}
    own = {s["via.0.theta"].data_ptr() for s in (optimizer.state[p] for p in ps)}
    entries = sum(p.numel() for p in ps)
    assert sum(n for place, n in places if place not in own) == 3 * entries


def test_the_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of rows and columns exchanged: square matrices do not complain."""
    ps, alone = make("SOAP")
    qs, other = make("SOAP")
    runner, rates = together(qs, other)
    take = statistics._take
    monkeypatch.setattr(statistics, "_take", lambda total, cost, kept, u: take(total, cost, kept, u.mT))
    generator = torch.Generator().manual_seed(5)
    advance(3, generator, (ps, qs), alone.step, partial(runner.step, rates))
    with pytest.raises(AssertionError):
        same(ps, qs, alone, other)


def test_a_state_may_be_written() -> None:
    """States are the optimizer's own tensors: what is written into them is what the next step reads."""
    ps, optimizer = make("SOAP")
    runner, rates = together(ps, optimizer)
    generator = torch.Generator().manual_seed(5)
    advance(1, generator, (ps,), partial(runner.step, rates))
    before: list[Tensor] = [p.detach().clone() for p in ps]
    for name, x in optimizer.state[ps[0]].items():
        if name.endswith("held"):
            x.zero_()
    advance(1, generator, (ps,), partial(runner.step, {**rates, "weight_decay": 0.0}))
    moved = [not torch.equal(p, q) for p, q in zip(ps, before, strict=True)]
    assert moved == [False, True, True, True, True]


@pytest.mark.parametrize("rule", ["SOAP", "Shampoo"])
def test_memory_that_is_swapped_is_noticed(rule: str) -> None:
    """By `p.data = ...`, as averages of weights are swapped in."""
    ps, optimizer = make(rule, torch.float32)
    runner, _ = together(ps, optimizer)
    assert runner.matches(ps, optimizer.state)
    ps[0].data = ps[0].detach() * 0.5
    assert not runner.matches(ps, optimizer.state)
