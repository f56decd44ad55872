"""Prodigy's distance is one number of all groups: shared, saved, scheduled, captured, and refused where it is not one.

Its steps beside the paper's recurrence and pytorch_optimizer are in test_entries.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from axes import optim
from axes.core.algorithms import Read, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import DISTANCE, Distance, Euclidean
from axes.core.monoids import Decay, Identity, Scalar
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, IllegalUpdate
from tests.optim.table import net, same, train, values

D0 = {"d0": 1e-3}


def distance(optimizer: optim.Optimizer, group: int = 0) -> float:
    return float(optimizer.param_groups[group]["distance"])


def halves(model: nn.Module) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.numel()]
    return [{"params": parameters[:3]}, {"params": parameters[3:]}]


def test_groups_share_the_distance_and_are_one_group() -> None:
    one, two = net(), net()
    whole, parted = optim.Prodigy(one, **D0), optim.Prodigy(halves(two), **D0)
    train(one, whole, 6), train(two, parted, 6)
    same(values(one), values(two), 1e-13)
    assert distance(whole) == pytest.approx(distance(parted), rel=1e-13) and distance(whole) > D0["d0"]
    assert distance(parted) == distance(parted, 1)
    late = nn.Parameter(torch.ones(2, dtype=torch.float64))
    parted.add_param_group({"params": [late]})
    assert distance(parted, 2) == distance(parted)


def test_groups_that_differ_in_what_makes_the_distance_are_refused() -> None:
    model = net()
    groups = halves(model)
    groups[1]["d_coef"] = 2.0
    optimizer = optim.Prodigy(groups)
    before = values(model)
    with pytest.raises(AxesError, match="distance is one number of all groups, and they differ"):
        train(model, optimizer, 1)
    same(values(model), before)


@pytest.mark.parametrize("way", [{}, {"foreach": False}, {"capturable": True}], ids=str)
def test_it_resumes_bit_for_bit(way: dict[str, Any]) -> None:
    model, twin = net(torch.float32), net(torch.float32)
    options = {**D0, "growth_rate": 1.3, "weight_decay": 0.1, **way}
    first = optim.Prodigy(halves(model), **options)
    train(model, first, 4)
    saved = copy.deepcopy(first.state_dict())
    twin.load_state_dict(model.state_dict())
    second = optim.Prodigy(halves(twin), **options)
    second.load_state_dict(saved)
    train(model, first, 4, start=4), train(twin, second, 4, start=4)
    same(values(model), values(twin))
    assert distance(first) == distance(second) and distance(first, 1) == distance(second, 1)
    for group in saved["param_groups"]:
        del group["largest_distance"]
    with pytest.raises(AxesError, match="has no largest_distance"):
        second.load_state_dict(saved)


def test_a_step_that_is_left_out_leaves_the_distance() -> None:
    for options in ({"check_finite": "skip"}, {"check_finite": "skip", "capturable": True}):
        model, twin = net(), net()
        one, two = (optim.Prodigy(m, growth_rate=1.5, **D0, **options) for m in (model, twin))
        train(model, one, 3), train(twin, two, 3)
        model(torch.tensor([[0, 1]])).backward()
        next(p for p in model.parameters() if p.grad is not None).grad.fill_(float("nan"))  # type: ignore[union-attr]
        one.step()
        train(model, one, 3, start=3), train(twin, two, 3, start=3)
        same(values(model), values(twin))
        assert one.skipped == 1


def test_a_warm_up_from_zero_and_a_schedule() -> None:
    model = net()
    optimizer = optim.Prodigy(model, d0=1e-4)
    warm = lr_scheduler.LambdaLR(optimizer, lambda t: min(t / 3, 1.0))
    before, seen = values(model), []
    for t in range(12):
        losses = train(model, optimizer, 1, t)
        warm.step()
        seen.append(distance(optimizer))
        assert losses[0] == losses[0]
        if t == 0:
            same(values(model), before)
    assert seen == sorted(seen) and seen[1] == 1e-4 and seen[-1] > 1e-3


def test_it_finds_the_step_size() -> None:
    """Whatever d0 is, |w - 1| falls as with a rate that was chosen for it."""
    for d0 in (1e-7, 1e-4):
        w = nn.Parameter(torch.zeros(20, dtype=torch.float64))
        optimizer = optim.Prodigy([w], d0=d0)
        for _ in range(300):
            optimizer.zero_grad()
            (w - 1.0).abs().sum().backward()
            optimizer.step()
        assert 0.02 < distance(optimizer) <= 1.0  # a bound from below of the distance, 1 an entry
        assert float((w.detach() - 1.0).abs().max()) < 0.2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"d0": 0.0}, "d0 and d_coef must be positive"),
        ({"d_coef": -1.0}, "d0 and d_coef must be positive"),
        ({"growth_rate": 0.9}, "growth_rate at least 1"),
        ({"beta3": 1.0}, "beta3 must lie in"),
        ({"betas": (0.9, 1.0)}, "beta2 must lie in"),
        ({"eps": -1.0}, "eps must be >= 0"),
        ({"fused": True}, "mixes entries: a statistic of travel"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(AxesError, match=said):
        optim.Prodigy(net(), **options)


def test_a_sharded_parameter_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("axes.optim.engine.across.spread", lambda p: True)
    with pytest.raises(AxesError, match="distance is a number of all parameters, which no process has"):
        optim.Prodigy(net())


# ---- the parts -------------------------------------------------------------------------------------------------------


def kept(of: Any, **step: Any) -> StateUpdate:
    return StateUpdate(Linear(of), monoid=Scalar(0.9), algorithm=Step(0.5, **step))


def holding(h: Any, monoid: Any = Identity(), rate: float = 0.0, read: Read | None = Read(0.0, 1.0)) -> StateUpdate:
    return StateUpdate(Linear(), h, monoid, Step(rate, start="W0", read=read))


def rule(h: Any, rate: Any = DISTANCE, **filter: Any) -> StateUpdate:
    return StateUpdate(Given(), algorithm=Step(rate, via=(holding(h, **filter),)))


AWAY = Distance((kept("drive"), kept("travel")))


def test_what_is_told_is_the_way_from_the_start() -> None:
    update = rule(AWAY)
    w, g = torch.randn(2, 4, 3, dtype=torch.float64).unbind()
    state = update.init({"g": g}, (w,))
    path, travel, now = torch.zeros_like(w), 0.0, w
    for t in range(4):
        travel = 0.9 * travel + 0.5 * float((-g * (now - w)).sum())
        path = 0.9 * path - 0.5 * g
        state, out = update.step(state, {"g": g, "distance": 0.1 + t})
        now = now - (0.1 + t) * g
        torch.testing.assert_close(out.weights[0], now)
        torch.testing.assert_close(update.told(state, {}).tolist(), [travel, float(path.abs().sum())])
    assert update.telling is not None and update.telling.tells == DISTANCE


def test_numbers_grow_to_the_largest_estimate() -> None:
    h = Distance(AWAY.stats, start=0.1, coefficient=2.0, growth=1.5)
    number = lambda told, last: h.number(torch.tensor(told), torch.tensor(last)).tolist()  # noqa: E731
    assert number((0.0, 0.0), h.began()) == pytest.approx([0.1, 0.1])
    assert number((-3.0, 1.0), h.began()) == pytest.approx([0.1, 0.1])
    assert number((3.0, 2.0), h.began()) == pytest.approx([3.0, 3.0])  # the first one is free
    assert number((8.0, 2.0), (3.0, 3.0)) == pytest.approx([4.5, 8.0])
    assert number((1.0, 2.0), (4.5, 8.0)) == pytest.approx([6.75, 8.0])
    assert number((1.0, 2.0), (6.75, 8.0)) == pytest.approx([8.0, 8.0])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rule(AWAY, rate=0.1), "no rate of the tuple reads it"),
        (lambda: rule(AWAY, monoid=Decay(0.1)), "a decay that is multiplied by a step size of zero"),
        (lambda: rule(AWAY, read=None), "a step size of zero learns nothing"),
        (lambda: rule(Euclidean()), "a step size of zero learns nothing"),
        (lambda: StateUpdate(Given(), AWAY, algorithm=Step(DISTANCE)), "put it on a filter, not on a state"),
        (lambda: Distance((kept("travel"), kept("drive"))), "takes a statistic of drive"),
        (lambda: Distance((kept("drive"),)), "two statistics"),
        (lambda: rule(Distance((kept("drive"), kept("travel", start="first")))), "is 0 at the first datum"),
        (lambda: rule(Distance((kept("drive", read=Read(1.0, 0.0)), kept("travel")))), "a read point of theirs"),
        (
            lambda: StateUpdate(Given(), algorithm=Step(DISTANCE, via=(holding(AWAY), holding(AWAY)))),
            "both tell the axis something",
        ),
        (lambda: Distance(AWAY.stats, start=0.0), "start must be positive"),
        (lambda: Distance(AWAY.stats, growth=0.5), "growth must be at least 1"),
    ],
)
def test_parts_that_could_not_act_are_refused(make: Any, said: str) -> None:
    with pytest.raises(IllegalUpdate, match=said):
        make()
