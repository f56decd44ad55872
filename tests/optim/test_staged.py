"""What takes entries together is one program over stacks: the same as the interpreter, whatever the shapes are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

import axes
from axes import optim
from axes.core.algorithms import Momentum, Step, Sum
from axes.core.costs import Given, Linear
from axes.core.geometry import Context, Geometry, Spectral
from axes.core.geometry.bregman import NO_CONTEXT
from axes.core.monoids import Zero
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.optim.engine import batch as engine
from axes.optim.engine.batch import Batch
from axes.optim.engine.capabilities import needs_matrices
from axes.optim.engine.replayed import Replayed
from axes.optim.engine.staged import staged
from axes.optim.rules import wrappers
from axes.programs import batched
from axes.programs.batched import Schedule
from axes.programs.program import NotElementwise, trace

ADAM = optim.AdamW.declare()
SHAPES = ((4, 3), (4, 3), (3,), (1,), (5, 1), (1, 6), (4, 4), (6, 4), (2, 3, 2, 2), (300, 70), (4, 3))


@final
@dataclass(frozen=True, repr=False)
class Own(Geometry):
    """Every row over its largest entry, in proportion to the leaf's mean size: nobody's but this test's."""

    is_potential = False

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        largest = theta.abs().amax(-1, keepdim=True)
        return theta / (largest + 0.1) * theta.abs().mean((-2, -1), keepdim=True)


@final
@dataclass(frozen=True, repr=False)
class Product(Geometry):
    """theta theta^T theta, which is no program."""

    is_potential = False

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta @ theta.mT @ theta


def rule(h: Geometry) -> StateUpdate:
    return StateUpdate(
        Given(), algorithm=Step(Per("lr"), via=(Momentum(0.5, "ema"), StateUpdate(Linear(), h, Zero())))
    ).normal()


def memoryless(h: Geometry) -> StateUpdate:
    return StateUpdate(Linear(), h, Zero())


def wrapped(update: StateUpdate) -> Callable[..., Any]:
    made = optim.optimizer(update)
    return lambda ps, **options: made(ps, lr=0.01, **options)


RULES: dict[str, Callable[..., Any]] = {
    "LAMB": lambda ps, **o: optim.LAMB(ps, **o),
    "LAMB, bounds": lambda ps, **o: optim.LAMB(ps, bounds=(0.1, 2.0), bias_correction=False, **o),
    "LARS": lambda ps, **o: optim.LARS(ps, weight_decay=0.1, **o),
    "Adafactor": lambda ps, **o: optim.Adafactor(ps, weight_decay=0.1, **o),
    "Adafactor, added": lambda ps, **o: optim.Adafactor(ps, guard="added", momentum=0.9, maximize=True, **o),
    "MARS": lambda ps, **o: optim.MARS(ps, **o),
    "clipped": wrapped(wrappers.clipped(ADAM, 0.5)),
    "clipped, rms": wrapped(wrappers.clipped(ADAM, 0.01, "rms")),
    "cautious": wrapped(wrappers.cautious(ADAM)),
    "rows": wrapped(wrappers.rotational(ADAM, "rows")),
    "own": wrapped(rule(Own())),
}


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def walk(optimizer: Any, ps: list[nn.Parameter], steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    for t in range(steps):
        for i, p in enumerate(ps):
            g = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad = None if t == 3 and i in (0, 5) else g
        before = [None if p.grad is None else p.grad.clone() for p in ps]
        optimizer.step()
        for p, g in zip(ps, before, strict=True):
            assert (p.grad is None) == (g is None) and (g is None or torch.equal(p.grad, g))  # nobody writes to it


def batches(optimizer: Any) -> list[Batch]:
    return [b for *_, some in optimizer._batches.made.values() for b in some if b.entries is None]


def same(ps: list[nn.Parameter], qs: list[nn.Parameter], a: Any, b: Any, bound: float) -> None:
    for p, q in zip(ps, qs, strict=True):
        torch.testing.assert_close(p, q, rtol=bound, atol=bound)
        assert a.state[p].keys() == b.state[q].keys()
        for name, x in a.state[p].items():
            y = b.state[q][name]
            assert x.shape == y.shape and x.dtype == y.dtype, name
            torch.testing.assert_close(x, y, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("name", "capturable"), [*((name, False) for name in RULES), ("LAMB", True), ("Adafactor", True), ("rows", True)]
)
def test_programs_over_stacks_step_as_the_interpreter_does(name: str, capturable: bool) -> None:
    ps, qs = parameters(), parameters()
    a, b = RULES[name](ps, capturable=capturable), RULES[name](qs, foreach=False, capturable=capturable)
    walk(a, ps)
    walk(b, qs)
    assert axes.select(a)[:2] == ("stacks", "torch") and axes.select(b).route == "interpreter"
    assert batches(a) and all(batch.route == "stacks" for batch in batches(a)) and not batches(b)
    same(ps, qs, a, b, 4e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_parameters_and_others_than_contiguous_ones_step_as_copies(dtype: torch.dtype) -> None:
    ps, qs = parameters(dtype), parameters(dtype)
    odd = [nn.Parameter(p.detach().mT.contiguous().mT) if p.ndim == 2 else p for p in ps]
    assert not odd[0].is_contiguous()
    a, b = optim.LAMB(odd), optim.LAMB(qs, foreach=False)
    walk(a, odd)
    walk(b, qs)
    same(odd, qs, a, b, 1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("name", ["LAMB", "Adafactor", "own"])
def test_a_stack_is_cut_where_no_more_fits_in_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BLOCK", 12)
    monkeypatch.setattr(engine, "_TOGETHER", 12)
    ps, qs = parameters(), parameters()
    a, b = RULES[name](ps), RULES[name](qs, foreach=False)
    walk(a, ps)
    walk(b, qs)
    assert any(len({x.shape[1:] for x, _ in batch.blocks}) < len(batch.blocks) for batch in batches(a))
    same(ps, qs, a, b, 4e-15)


def test_what_is_a_program_over_stacks_and_what_is_not() -> None:
    for update, words in ((optim.LAMB.declare().normal(), "sum -2 -1"), (rule(Own()), "amax -1")):
        found = staged(update)
        assert found is not None and words in str(found.program) and len(found.stages) == 1
    assert staged(optim.PSGDKron.declare().normal()) is None
    ps, qs = parameters()[:3], parameters()[:3]
    a, b = (
        optim.PSGDKron([{"params": ps[:2], "rule": "psgd-kron"}]),
        optim.PSGDKron([{"params": qs[:2], "rule": "psgd-kron"}], foreach=False),
    )
    walk(a, ps, 2), walk(b, qs, 2)
    assert axes.select(a).route == "interpreter" and batches(a) and all(x.route == "interpreter" for x in batches(a))


def side_by_side() -> StateUpdate:
    """Two geometries of one drive, and one more of their sum."""
    branches = Sum((memoryless(Spectral("polar")), memoryless(Product())), (0.3, 0.7))
    return StateUpdate(
        Given(), algorithm=Step(Per("lr"), via=(Momentum(0.5, "ema", debias=True), branches, memoryless(Product())))
    ).normal()


AROUND: dict[str, tuple[StateUpdate, int]] = {
    "own": (rule(Product()), 2),
    "on the state": (StateUpdate(Given(), Spectral("polar"), algorithm=Step(Per("lr"), lazy=False)).normal(), 2),
    "clipped Muon": (wrappers.clipped(optim.Muon.declare(precision="input"), 0.5).normal(), 2),
    "side by side": (side_by_side(), 3),
}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", AROUND)
def test_what_mixes_entries_is_given_stacks_and_the_rest_is_traced(name: str, capturable: bool) -> None:
    update, count = AROUND[name]
    found = staged(update)
    assert found is not None and len(found.stages) == count
    ps, qs = ([p for p in some if p.ndim > 1] for some in (parameters(), parameters()))
    rule_name = "matrix" if needs_matrices(update) else "update"
    a = wrapped(update)([{"params": ps, "rule": rule_name}], capturable=capturable)
    b = wrapped(update)([{"params": qs, "rule": rule_name}], capturable=capturable, foreach=False)
    walk(a, ps)
    walk(b, qs)
    assert axes.select(a).route == "stacks" and any(x.around is not None for x in batches(a))
    same(ps, qs, a, b, 1e-11)


def test_a_stage_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what a geometry gives is forgotten."""
    ps, qs = parameters(), parameters()
    a, b = wrapped(rule(Product()))(ps), wrapped(rule(Product()))(qs, foreach=False)
    monkeypatch.setattr(Product, "primals", lambda self, stacks, *rest: list(stacks))
    walk(a, ps)
    walk(b, qs)
    with pytest.raises(AssertionError):
        same(ps, qs, a, b, 1e-6)


def test_a_norm_that_is_another_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an inner product that forgets a factor."""
    inner = batched._inner_of
    monkeypatch.setattr(batched, "_inner_of", lambda x, y: 0.5 * inner(x, y))
    ps, qs = parameters(), parameters()
    a, b = RULES["clipped"](ps), RULES["clipped"](qs, foreach=False)
    walk(a, ps)
    walk(b, qs)
    with pytest.raises(AssertionError):
        same(ps, qs, a, b, 1e-6)


def stack(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_sums_of_what_was_repeated_and_of_other_dimensions_are_refused() -> None:
    like = {"parameter": stack(3, 5), "g": stack(3, 5), "r": stack(3, 1)}

    def repeated(v: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"parameter": v["r"].expand(3, 5).sum(-1, keepdim=True) * v["g"], "r": v["r"]}

    def flat(v: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"parameter": v["g"] * v["g"].sum(), "r": v["r"]}

    for step, words in ((repeated, "repeated"), (flat, "dimensions")):
        with pytest.raises(NotElementwise, match=words):
            trace(step, ("parameter", "g", "r"), (), like)


def test_rows_beside_columns_are_broadcast_and_values_are_no_constants() -> None:
    """Value 2 is not the constant 2: an average that nobody reads again is overwritten, not copied."""

    def step(v: dict[str, Tensor]) -> dict[str, Tensor]:
        m = 0.5 * v["m"] + v["g"]
        outer = v["r"] + v["g"].mean(-2, keepdim=True)
        return {"parameter": v["parameter"] ** 2 + outer * m - v["r"], "m": m, "r": v["r"] * 2.0}

    like = {"parameter": stack(3, 5), "g": stack(3, 5), "m": stack(3, 5), "r": stack(3, 1)}
    names = ("parameter", "g", "m", "r")
    for alone in (False, True):
        schedule = Schedule(trace(step, names, (), like), alone=alone)
        assert not any(s.name == "copy" and schedule.names[s.target] == "m" for s in schedule.steps)
        generator, count = torch.Generator().manual_seed(0), 1 if alone else 4
        given = {n: torch.randn(count, *like[n].shape, generator=generator, dtype=torch.float64) for n in names}
        held = {n: x.clone() for n, x in given.items()}
        schedule.run([[held[n]] for n in schedule.names], schedule.program.numbers({}))
        for name, expected in step(given).items():
            torch.testing.assert_close(held[name], expected)
        assert torch.equal(held["g"], given["g"])


def test_a_program_that_asks_what_is_not_so_of_a_groups_numbers_makes_another_tuple() -> None:
    """Two groups are alike until a program for 16 x 16 asks whether d times 16 is one; the first does not need it."""
    for d, shapes in ((1.0, ((3, 4),)), (0.0625, ((3, 4), (16, 16)))):
        ps = [torch.nn.Parameter(torch.linspace(-1, 1, m * n).view(m, n)) for m, n in shapes]
        optimizer = optim.Adafactor(ps, d=d, eps=(None, 0.00123))
        exact = optim.Adafactor([p.detach().clone() for p in ps], d=d, eps=(None, 0.00123), foreach=False)
        for _ in range(2):
            for p, q in zip(ps, exact.param_groups[0]["params"], strict=True):
                p.grad = q.grad = p.detach().cos()
            optimizer.step()
            exact.step()
        for p, q in zip(ps, exact.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(p.detach(), q.detach())


def test_what_a_schedule_moves_is_not_recorded_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    def record(self: Replayed) -> None:
        calls.append("record")
        self.graph, self.results = Graph(), []  # type: ignore[assignment]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Replayed, "_record", record)
    replayed = Replayed(lambda: calls.append("call") or [], lambda: [])  # type: ignore[func-returns-value]
    for _ in range(3):
        replayed()
    assert calls == ["call", "record", "replay", "replay"]
    calls.clear()
    for _ in range(3):
        replayed.forget()
        replayed()
    assert calls == ["call"] * 3
    calls.clear()
    replayed()
    replayed()
    assert calls == ["record", "replay", "replay"]


def test_numbers_that_move_are_read_where_products_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded once for the numbers that stay, and once more for those that move; the same steps as without records."""
    records: list[int] = []

    class Graph:
        def __init__(self, function: Callable[[], list[Tensor]]) -> None:
            self.replay = function

    def record(self: Replayed) -> None:
        records.append(1)
        numbers = product_of[id(self)].h  # what was recorded stays with the numbers of then

        def replay() -> None:
            product = product_of[id(self)]
            now, product.h = product.h, numbers
            self.results = self.recorded()
            product.h = now

        self.graph = Graph(replay)  # type: ignore[assignment,arg-type]

    product_of: dict[int, Any] = {}
    moved: list[list[Tensor]] = []
    for recorded in (True, False):
        torch.manual_seed(0)
        ps = [nn.Parameter(torch.randn(s)) for s in ((4, 9), (9, 4), (5, 5))]
        optimizer = optim.Muon([{"params": ps, "rule": "muon"}], lr=0.1, precision="input")
        for t in range(9):
            if t >= 4:
                optimizer.param_groups[0].update(ns_coefficients=(3.4 - 0.02 * t, -4.7, 2.0), eps=0.01 * t)
            optimizer.param_groups[0]["momentum"] = 0.9 - 0.01 * t  # of no product
            for p in ps:
                p.grad = 0.1 * torch.randn(p.shape)
            optimizer.step()
            if recorded and t == 0:
                (batch,) = (b for *_, some in optimizer._batches.made.values() for b in some)
                assert batch.around is not None
                (product,) = (p for *_, products in batch.around.steps for p in products)
                product.directions = Replayed(product._here, product._here)
                product_of[id(product.directions)] = product
                monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
                monkeypatch.setattr(Replayed, "_record", record)
        moved.append([p.detach() for p in ps])
    assert len(records) == 2
    for x, y in zip(*moved, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-6)
