"""Hyperparameters are numbers of a step: scheduled, they trace nothing and compile nothing, and mean what they say."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from axes import optim
from axes.core.algorithms import Step
from axes.core.costs import Given
from axes.core.declared import leaves
from axes.core.geometry import Whiten
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine import forms
from axes.programs import program
from axes.programs.numbers import Number, Origin
from tests.drawn import one_of_each
from tests.optim.table import INSTANCES, net, same, train, values


def floats(optimizer: optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group's rule that are numbers and act, and at what."""
    rule = optimizer._rules[group["rule"]]
    given = {n: group[n] for n in inspect.signature(rule).parameters}
    return {n: x for n, x in given.items() if any(isinstance(y, float) for y in leaves(x)) and _acts(rule, given, n)}


def _acts(rule: Any, given: dict[str, Any], name: str) -> bool:
    try:
        rule(**{**given, name: moved(given[name], 4)})
    except AxesError:
        return False
    return True


def moved(value: Any, t: int) -> Any:
    """What a schedule makes of a value: as legal as it was, zeros and ones included."""
    if isinstance(value, tuple):
        return tuple(moved(x, t) for x in value)
    if not isinstance(value, float) or value in (0.0, 1.0):
        return value
    return value * (1 - 0.01 * t) if value < 1 else value * (1 + 0.002 * t)


def scheduled(optimizer: optim.Optimizer) -> Callable[[int], None]:
    """Every number of every group on a schedule."""
    first = [floats(optimizer, group) for group in optimizer.param_groups]

    def at(t: int) -> None:
        for group, numbers in zip(optimizer.param_groups, first, strict=True):
            group.update({n: moved(x, t) for n, x in numbers.items()})

    return at


def made(instance: Any, options: dict[str, Any], **more: Any) -> tuple[nn.Module, optim.Optimizer]:
    model = net()
    return model, instance.cls(model, lr=instance.lr, **options, **more)


class Counts:
    """How often a tuple was traced, and how often a rule was asked for one."""

    traced = built = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    found, record, built = Counts(), program._Recorded, forms._built

    def traced(*given: Any, **named: Any) -> Any:
        found.traced += 1
        return record(*given, **named)

    def build(*given: Any) -> Any:
        found.built += 1
        return built(*given)

    monkeypatch.setattr(program, "_Recorded", traced)
    monkeypatch.setattr(forms, "_built", build)
    yield found


def by_two() -> Iterator[list[Any]]:
    """Configurations of one rule, two at a time: every rule is drawn from."""
    for i in INSTANCES:
        every = [pytest.param(i, options, id=f"{i}-{n}") for n, options in enumerate(i.configurations)]
        yield from (every[n : n + 2] for n in range(0, len(every), 2))


@pytest.mark.parametrize(("instance", "options"), one_of_each(by_two()))
def test_a_schedule_of_everything_traces_nothing_and_is_what_the_tuples_say(
    instance: Any, options: dict[str, Any], counts: Counts
) -> None:
    (fast, together), (slow, alone) = made(instance, options), made(instance, options, foreach=False)
    one, other = scheduled(together), scheduled(alone)
    for t in range(5):
        one(t), other(t)
        train(fast, together, 1, t)
        if t == 2:
            before = (counts.traced, counts.built)
        train(slow, alone, 1, t)
        for group in together.param_groups:
            rule = together._rules[group["rule"]]
            given = {n: group[n] for n in inspect.signature(rule).parameters}
            assert together.update_for(group) == rule(**given).normal()
    assert (counts.traced, counts.built) == before
    same(values(fast), values(slow), 1e-7)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=12),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "one after another": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 8)], milestones=[4]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("cls", (optim.SGD, optim.AdamW, optim.Muon, optim.SOAP, optim.PSGDKron))
def test_torch_schedulers_trace_nothing(name: str, cls: Any, counts: Counts) -> None:
    model = net(torch.float32)
    if name == "one cycle" and cls is optim.PSGDKron:
        pytest.skip("OneCycleLR knows momentum and betas; the rule has neither")
    optimizer = cls(model, lr=0.01, **({"momentum": 0.9} if cls is optim.SGD else {}))
    scheduler = SCHEDULERS[name](optimizer)
    for t in range(10):
        train(model, optimizer, 1, t)
        scheduler.step(*([1.0] if name == "plateau" else []))
        if t == 1:
            before = counts.traced, counts.built
    assert (counts.traced, counts.built) == before


def test_a_number_that_decides_what_the_tuple_is_made_of_makes_another_one(counts: Counts) -> None:
    model = net()
    optimizer = optim.SGD(model, lr=0.1, momentum=0.9)
    group = optimizer.param_groups[0]
    train(model, optimizer, 1)
    form, built = optimizer.form_for(group), counts.built
    group["momentum"] = 0.5
    assert optimizer.form_for(group) is form and counts.built == built
    group["momentum"] = 0.0
    assert optimizer.form_for(group) is not form and not optimizer.update_for(group).filters()
    group["momentum"] = 1.5
    with pytest.raises(AxesError, match="momentum must lie in"):
        optimizer.step()


def test_what_is_no_number_and_moves_beside_one_makes_another_tuple() -> None:
    optimizer = optim.LARS(net(), lr=0.1, momentum=0.9)
    (group,) = optimizer.param_groups
    rule = optimizer._rules[group["rule"]]
    for change in ({"momentum": 0.8}, {"momentum": 0.7, "nesterov": True}, {"momentum": 0.6, "adapt": False}):
        group.update(change)
        given = {n: group[n] for n in inspect.signature(rule).parameters}
        assert optimizer.update_for(group) == rule(**given).normal()


def test_tensors_are_numbers_and_keep_what_they_are(counts: Counts) -> None:
    model, other = net(), net()
    betas = torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.99, dtype=torch.float64)
    one, two = optim.AdamW(model, lr=0.01, betas=betas), optim.AdamW(other, lr=0.01, betas=(0.9, 0.99))
    for t in range(4):
        betas[0].fill_(0.9 - 0.02 * t)
        two.param_groups[0]["betas"] = (betas[0].item(), 0.99)
        train(model, one, 1, t), train(other, two, 1, t)
    same(values(model), values(other))
    assert one.param_groups[0]["betas"] is betas


def test_a_rule_that_hides_how_it_computes_is_asked_again_every_time(counts: Counts) -> None:
    def declare(strength: float) -> StateUpdate:
        whitened = optim.AdamW.declare((0.9, 0.99), eps=math.sqrt(strength))
        return whitened

    class Hidden(optim.Optimizer):
        name = "hidden"

        def __init__(self, params: Any, strength: float, **options: Any) -> None:
            own = {"lr": 0.01, "weight_decay": 0.0, "strength": strength}
            super().__init__(params, {"hidden": declare}, {"hidden": own}, **options)

    model, other = net(), net()
    one, two = Hidden(model, 1e-4), optim.AdamW(other, lr=0.01, betas=(0.9, 0.99), weight_decay=0.0)
    for t in range(4):
        strength = 1e-4 * (1 + t)
        one.param_groups[0]["strength"], two.param_groups[0]["eps"] = strength, math.sqrt(strength)
        train(model, one, 1, t), train(other, two, 1, t)
    same(values(model), values(other))


def test_a_geometry_that_hides_a_number_is_traced_again_every_time() -> None:
    class Sly(Whiten):
        def primal(self, theta: Any, context: Any) -> Any:
            return theta * math.sqrt(self.eps)

    def declare(eps: float) -> StateUpdate:
        square = StateUpdate(**optim.rules.first_order.average(0.9, "square"))
        inner = StateUpdate(h=Sly((square,), "diagonal", power=0.5, eps=eps), **optim.rules.first_order.average(0.9))
        return StateUpdate(Given(), algorithm=Step(optim.rules.first_order.LR, via=(inner,)))

    class Hidden(optim.Optimizer):
        name = "hidden"

        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, {"hidden": declare}, {"hidden": {"lr": 0.1, "eps": 0.25}}, **options)

    (fast, one), (slow, two) = [(m := net(), Hidden(m, foreach=f)) for f in (True, False)]
    for t in range(4):
        for optimizer in (one, two):
            optimizer.param_groups[0]["eps"] = 0.25 + 0.1 * t
        train(fast, one, 1, t), train(slow, two, 1, t)
    same(values(fast), values(slow), 1e-12)


# ---- the numbers themselves ------------------------------------------------------------------------------------------


@given(st.floats(0.1, 0.9), st.floats(0.1, 0.9), st.floats(0.1, 0.9), st.floats(0.1, 0.9))
def test_a_formula_is_the_arithmetic(a: float, b: float, c: float, d: float) -> None:
    def what(x: float, y: float) -> float:
        return (1.0 - x) * y / (2 + x) ** 0.5 + 3 * abs(x - y) - -x

    x, y = Origin((a, b)).numbers()
    z = what(x, y)
    assert isinstance(z, Number) and z.value == what(a, b) and z.at((c, d)) == what(c, d)


def test_comparisons_are_kept() -> None:
    origin = Origin((0.5,))
    (x,) = origin.numbers()
    assert 0 <= x < 1 and x and not x > 0.75 and max(x, 0.1) is x
    assert origin.holds((0.6,)) and not origin.holds((0.8,)) and not origin.holds((0.0,))


def test_a_plain_float_fixes_the_hyperparameter() -> None:
    origin = Origin((0.5,))
    assert float(origin.numbers()[0]) == 0.5
    assert origin.holds((0.5,)) and not origin.holds((0.6,))


def test_what_takes_the_value_without_asking_gets_none() -> None:
    (x,) = Origin((0.25,)).numbers()
    assert math.isnan(math.sqrt(x)) and f"{x:.2f}" == "0.25" and repr(x) == "0.25" and hash(x) == hash(0.25)
    assert type(pickle.loads(pickle.dumps(x))) is float and pickle.loads(pickle.dumps(x)) == 0.25


@pytest.mark.parametrize("rule", (optim.SOAP, optim.Shampoo, optim.Muon))
def test_a_tensor_on_the_host_is_the_number_that_it_holds(rule: Any) -> None:
    """A float32 tensor is float32's nearest number to the float it was made of, which is another step."""

    def weights(lr: Any) -> list[torch.Tensor]:
        model = net(torch.float32)
        train(model, rule(model, lr=lr), 13)
        return [p.detach() for p in model.parameters()]

    tensor = torch.tensor(0.003)
    for a, b in zip(weights(tensor), weights(tensor.item()), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(weights(torch.tensor(0.003, dtype=torch.float64)), weights(0.003), strict=True):
        assert torch.equal(a, b)
