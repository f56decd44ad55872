"""Rules with geometries that are no programs, in stages: the same as the interpreter, whatever the parameters are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given
from axes.core.geometry import Spectral
from axes.core.monoids import Decay
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim.engine.around import Around
from axes.optim.engine.staged import set_apart, staged
from axes.optim.rules.first_order import LR, WEIGHT_DECAY
from axes.programs.program import trace

SHAPES = ((6, 4), (4, 6), (6, 4), (5, 5), (4, 3, 2, 2), (4, 6))
RULES: dict[str, tuple[Any, str]] = {"muon": (optim.Muon, "muon"), "normuon": (optim.NorMuon, "normuon")}


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def walk(
    optimizer: Any, ps: list[nn.Parameter], steps: int = 4, seed: int = 0, skip: Callable[..., bool] | None = None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for t in range(steps):
        for i, p in enumerate(ps):
            g = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad = None if skip is not None and skip(t, i) else g
        optimizer.step()


def make(rule: str, ps: list[nn.Parameter], **options: Any) -> Any:
    cls, name = RULES[rule]
    return cls([{"params": ps, "rule": name}], lr=0.05, **options)


def stacks(optimizer: Any) -> list[Around]:
    return [b.around for *_, made in optimizer._batches.made.values() for b in made if b.around is not None]


def same(ps: list[nn.Parameter], qs: list[nn.Parameter], a: Any, b: Any, bound: float = 1e-12) -> None:
    for p, q in zip(ps, qs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=bound)
        assert a.state[p].keys() == b.state[q].keys()
        for name, x in a.state[p].items():
            assert x.shape == b.state[q][name].shape and x.dtype == b.state[q][name].dtype, name
            torch.testing.assert_close(x, b.state[q][name], rtol=0, atol=bound)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"precision": "input"},
    {"precision": "input", "form": "direct", "maximize": True},
    {"precision": "input", "nesterov": False, "scale": "original", "weight_decay": 0.3},
    {"precision": "input", "method": "polar-express", "scale": None, "ns_steps": 7},
    {"precision": "bfloat16"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_stacks_step_as_the_interpreter_does(rule: str, options: dict[str, Any]) -> None:
    ps, qs = parameters(), parameters()
    together, alone = make(rule, ps, **options), make(rule, qs, foreach=False, **options)
    walk(together, ps)
    walk(alone, qs)
    (stack,) = stacks(together)
    assert len(stack.shaped) == 4 and not stacks(alone)  # one for each shape
    same(ps, qs, together, alone)


@pytest.mark.parametrize("rule", RULES)
def test_parameters_may_come_and_go(rule: str) -> None:
    ps, qs = parameters(), parameters()
    options = {"precision": "input"}
    together, alone = make(rule, ps, **options), make(rule, qs, foreach=False, **options)
    for optimizer, xs in ((together, ps), (alone, qs)):
        walk(optimizer, xs, 5, skip=lambda t, i: (t + i) % 3 == 0)
        optimizer.param_groups[0]["lr"] = 0.2
        optimizer.param_groups[0]["momentum"] = 0.5  # another tuple, with the same state
        walk(optimizer, xs, 2, seed=1)
        late = nn.Parameter(torch.ones(6, 4, dtype=torch.float64))
        optimizer.add_param_group({"params": [late], "rule": RULES[rule][1], "weight_decay": 0.0})
        xs.append(late)
        walk(optimizer, xs, 2, seed=2)
    same(ps, qs, together, alone)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", ["state dict", "pickle", "deepcopy"])
def test_a_copy_goes_on_bit_for_bit(rule: str, how: str) -> None:
    ps, qs = parameters(torch.float32), parameters(torch.float32)
    whole, part = make(rule, ps), make(rule, qs)
    walk(whole, ps, 3)
    walk(part, qs, 3)
    if how == "state dict":
        other = make(rule, qs)
        other.load_state_dict(copy.deepcopy(part.state_dict()))
    else:
        both = (part, qs)
        other, qs = pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
    walk(whole, ps, 3, seed=5)
    walk(other, qs, 3, seed=5)
    same(ps, qs, whole, other, 0.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_views_and_16_bit_parameters_step_as_copies(rule: str, dtype: torch.dtype) -> None:
    ps, qs = parameters(dtype), parameters(dtype)
    odd = [nn.Parameter(p.detach().mT.contiguous().mT) if p.ndim == 2 else p for p in ps]
    assert not odd[0].is_contiguous()
    together, alone = make(rule, odd), make(rule, qs, foreach=False)
    walk(together, odd)
    walk(alone, qs)
    assert stacks(together)
    same(odd, qs, together, alone, 2e-2 if dtype == torch.bfloat16 else 1e-4)
    assert all(x.dtype == torch.float32 for p in odd for n, x in together.state[p].items() if "count" not in n)


@pytest.mark.parametrize("rule", RULES)
def test_zero_and_low_rank_gradients_stay_finite(rule: str) -> None:
    ps = parameters(torch.float32)
    optimizer = make(rule, ps, weight_decay=0.0)
    before = [p.detach().clone() for p in ps]
    for p in ps:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(map(torch.equal, ps, before))
    for p in ps:
        p.grad = torch.full_like(p, 1e-20)  # rank one, and below eps
    optimizer.step()
    assert all(bool(torch.isfinite(p).all()) for p in ps)


def test_a_step_reads_gradients_of_another_layout() -> None:
    ps, qs = parameters(), parameters()
    together, alone = make("muon", ps, precision="input"), make("muon", qs, foreach=False, precision="input")
    for p, q in zip(ps, qs, strict=True):
        g = torch.randn(p.shape, dtype=torch.float64)
        p.grad, q.grad = g.mT.contiguous().mT, g
    together.step()
    alone.step()
    same(ps, qs, together, alone)


def _rule(h: Any, **momentum: Any) -> StateUpdate:
    return StateUpdate(
        Given(), OnUpdate(h), Decay(WEIGHT_DECAY), Step(LR, via=(Momentum(0.9, "ema", **momentum),))
    ).normal()


def test_what_is_set_apart_and_what_is_not() -> None:
    found = staged(optim.NorMuon.declare().normal())
    assert found is not None and [stage.entrywise for stage in found.stages] == [True, False]
    assert found.stages[0].program.outputs.keys() == {"parameter", "via.0.theta"}
    normuon = optim.NorMuon.declare().normal()
    assert set_apart(normuon) == [repr(normuon.filters()[0].parts().h)]
    apart: dict[str, tuple[StateUpdate, int]] = {
        "polynomials": (_rule(Spectral()), 2),
        "exact": (_rule(Spectral("polar")), 2),
        "first datum": (_rule(Spectral(), start="first"), 2),
        "on the state": (StateUpdate(Given(), Spectral(), algorithm=Step(LR)).normal(), 2),
        "rows": (optim.LAMB.update.normal(), 1),
        "roots that are held": (optim.Shampoo.update.normal(), 2),
        "bases, and squares in them": (optim.SOAP.update.normal(), 3),
    }
    for name, (update, count) in apart.items():
        found = staged(update)
        assert found is not None and len(found.stages) == count, name
    assert staged(optim.PSGDKron.update.normal()) is None


def test_the_place_of_an_operation_is_not_taken_for_its_number() -> None:
    """Value 1 of a program, its second input, times a constant: not the constant 1."""

    def step(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"parameter": values["g"] * 0.05, "m": values["parameter"] / values["g"]}

    found = trace(step, ("parameter", "g", "m"), ())
    names = [op.name for op in found.operations]
    assert "mul" in names and "div" in names


@pytest.mark.parametrize("rule", RULES)
def test_memory_that_is_swapped_between_steps_is_followed(rule: str) -> None:
    """By `p.data = ...`, as averages of weights are swapped in."""
    ps, qs = parameters(), parameters()
    a, b = make(rule, ps), make(rule, qs, foreach=False)
    for seed in range(3):
        for optimizer, some in ((a, ps), (b, qs)):
            walk(optimizer, some, 1, seed)
            for p in some:
                p.data = p.detach() * 0.5
    assert stacks(a)
    same(ps, qs, a, b)


TOGETHER: dict[str, Any] = {**RULES, "soap": (optim.SOAP, "soap"), "shampoo": (optim.Shampoo, "shampoo")}


@pytest.mark.parametrize("rule", [*TOGETHER, "adamw", "sgd", "lion"])
def test_a_state_that_is_replaced_between_steps_is_followed(rule: str) -> None:
    """By another tensor, as by other numbers in the one that is there."""

    def begun(ps: list[nn.Parameter]) -> Any:
        if rule in TOGETHER:
            cls, name = TOGETHER[rule]
            return cls([{"params": ps, "rule": name}], lr=0.05)
        entrywise: dict[str, Any] = {"adamw": optim.AdamW, "sgd": optim.SGD, "lion": optim.Lion}
        return entrywise[rule](ps, lr=0.05)

    ps, qs = parameters(), parameters()
    a, b = begun(ps), begun(qs)
    for optimizer, some in ((a, ps), (b, qs)):
        walk(optimizer, some, 2)
    for p, q in zip(ps, qs, strict=True):
        for name in [n for n, x in a.state[p].items() if x.ndim > 1]:
            a.state[p][name] = a.state[p][name] * 0.5
            b.state[q][name].mul_(0.5)
    for optimizer, some in ((a, ps), (b, qs)):
        walk(optimizer, some, 2, 1)
    assert all(map(torch.equal, ps, qs))


@pytest.mark.parametrize("rule", (optim.AdamW, optim.Muon))
@pytest.mark.parametrize("alone", (True, False))
def test_states_that_take_the_place_of_others_are_those_that_step(rule: Any, alone: bool) -> None:
    """Between steps somebody exchanges two states, and puts a copy in the place of a third. alone: no other group."""

    def run(foreach: bool) -> list[Tensor]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(4, 3, dtype=torch.float64)) for _ in range(8)]
        groups = [weights] if alone else [weights[:1], *([w] for w in weights[1:6]), weights[6:]]
        main = "adamw" if rule is optim.AdamW else "muon"
        optimizer = rule([{"params": some, "rule": main} for some in groups], lr=0.1, foreach=foreach)
        for step in range(6):
            for i, w in enumerate(weights):
                w.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(8 * step + i), dtype=w.dtype)
            optimizer.step()
            if step == 3:
                states = optimizer.state
                states[weights[6]], states[weights[7]] = states[weights[7]], states[weights[6]]
                states[weights[0]] = {name: x.clone() for name, x in states[weights[7]].items()}
        return [w.detach() for w in weights]

    for one, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
