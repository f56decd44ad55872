"""Checkpoints of torch.optim continue here, and ours there, as if nothing had happened."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from axes import optim
from axes.errors import AxesError
from axes.optim.tools.convert import from_torch, to_torch

Made = Callable[[Any], Any]


def muon(ps: Any, **settings: Any) -> optim.Muon:
    # a stack of matrices is multiplied in another order than one matrix, which torch.optim.Muon does
    return optim.Muon([{"params": list(ps), "rule": "muon"}], form="direct", foreach=False, **settings)


PAIRS: dict[str, tuple[Made, Made]] = {
    "adamw": (lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0.1), lambda ps: optim.AdamW(ps)),
    "adamw betas": (lambda ps: torch.optim.AdamW(ps, betas=(0.0, 0.9), maximize=True), lambda ps: optim.AdamW(ps)),
    "adam": (lambda ps: torch.optim.Adam(ps, lr=0.02, weight_decay=0.1, eps=1e-3), lambda ps: optim.Adam(ps)),
    "decoupled": (
        lambda ps: torch.optim.Adam(ps, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
        lambda ps: optim.Adam(ps),
    ),
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=0.1), lambda ps: optim.SGD(ps, decoupled=True)),
    "momentum": (
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
        lambda ps: optim.SGD(ps, momentum=0.0),
    ),
    "nesterov": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.8, nesterov=True), lambda ps: optim.SGD(ps)),
    "muon": (lambda ps: torch.optim.Muon(ps, lr=0.02), lambda ps: muon(ps, momentum=0.5, precision="input")),
    "muon rms": (
        lambda ps: torch.optim.Muon(ps, lr=0.02, adjust_lr_fn="match_rms_adamw", nesterov=False, eps=1e-6, ns_steps=3),
        muon,
    ),
}
for name, cases in {
    "RMSprop": ({"momentum": 0.9, "centered": True, "weight_decay": 0.1}, {"alpha": 0.9}),
    "Adagrad": ({"lr_decay": 0.1, "initial_accumulator_value": 0.3, "weight_decay": 0.1},),
    "Adadelta": ({"rho": 0.8, "weight_decay": 0.1, "maximize": True},),
    "Adamax": ({"betas": (0.8, 0.9)},),
    "RAdam": ({"betas": (0.9, 0.8), "weight_decay": 0.1, "decoupled_weight_decay": True}, {"betas": (0.9, 0.5)}),
    "NAdam": ({"weight_decay": 0.1, "momentum_decay": 0.1}, {"betas": (0.0, 0.9)}),
    "Adam": ({"amsgrad": True, "betas": (0.8, 0.9)},),
    "AdamW": ({"amsgrad": True, "betas": (0.8, 0.9)},),
    "ASGD": ({"lambd": 0.1, "t0": 2, "weight_decay": 0.1},),
}.items():
    for number, case in enumerate(cases):

        def there(ps: Any, name: str = name, case: Any = case) -> Any:
            return getattr(torch.optim, name)(ps, lr=0.02, **case)

        PAIRS[f"{name} {number}"] = there, lambda ps, name=name: getattr(optim, name)(ps)
PAIRS["AMSGrad"] = lambda ps: torch.optim.Adam(ps, amsgrad=True), lambda ps: optim.AMSGrad(ps)


@pytest.fixture
def wide_numbers() -> Iterator[None]:
    """torch keeps the product of NAdam's momenta in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


WIDE = pytest.mark.usefixtures("wide_numbers")
BOTH = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def parameters(matrices: bool, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(4, 3), (3, 5)] if matrices else [(4, 3), (5,), (), (2, 3, 2)]
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in shapes]


def train(optimizer: Any, ps: list[torch.Tensor], steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in ps:
            p.grad = torch.randn(p.shape, dtype=torch.float64, generator=generator).to(p.dtype)
        optimizer.step()


def close(one: list[torch.Tensor], other: list[torch.Tensor], **tolerance: float) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), **tolerance or {"rtol": 1e-12, "atol": 1e-13})


@WIDE
@BOTH
@pytest.mark.parametrize("begun", [0, 1, 3])
def test_a_run_of_torch_continues_here(pair: tuple[Made, Made], begun: int) -> None:
    theirs, ours = pair
    ps = parameters("uon" in str(theirs.__code__.co_names))
    expected = theirs(ps)
    train(expected, ps, begun)
    copies = [p.detach().clone().requires_grad_() for p in ps]
    optimizer = ours(copies)
    train(optimizer, [p.detach().clone() for p in ps], 0)
    state = copy.deepcopy(expected.state_dict())
    from_torch(state, optimizer)
    assert str(state) == str(expected.state_dict())  # what was given is as it was
    train(expected, ps, 3, seed=7)
    train(optimizer, copies, 3, seed=7)
    close(ps, copies)


@WIDE
@BOTH
@pytest.mark.parametrize("begun", [0, 1, 3])
def test_a_run_from_here_continues_in_torch(pair: tuple[Made, Made], begun: int) -> None:
    theirs, ours = pair
    ps = parameters("uon" in str(theirs.__code__.co_names))
    optimizer = ours(ps)
    from_torch(theirs([p.detach().clone().requires_grad_() for p in ps]).state_dict(), optimizer)  # its settings
    train(optimizer, ps, begun)
    copies = [p.detach().clone().requires_grad_() for p in ps]
    expected = theirs(copies)
    keys = expected.state_dict()["param_groups"][0].keys()
    expected.load_state_dict(to_torch(optimizer))
    assert expected.state_dict()["param_groups"][0].keys() == keys
    train(expected, copies, 3, seed=7)
    train(optimizer, ps, 3, seed=7)
    close(ps, copies)


@WIDE
@BOTH
def test_there_and_back_is_the_same_checkpoint(pair: tuple[Made, Made]) -> None:
    theirs, ours = pair
    ps = parameters("uon" in str(theirs.__code__.co_names))
    expected = theirs(ps)
    train(expected, ps, 2)
    optimizer = ours([p.detach().clone().requires_grad_() for p in ps])
    from_torch(expected.state_dict(), optimizer)
    back, there = to_torch(optimizer), expected.state_dict()
    (group,) = there["param_groups"]
    if "dampening" in group and group["momentum"] == 0:  # torch notes None where there is no buffer
        there["state"] = {}
    if there["param_groups"][0].get("betas", (1,))[0] == 0:  # an average of nothing is not kept
        for held in (*back["state"].values(), *there["state"].values()):
            held.pop("exp_avg")
    if there["param_groups"][0].get("betas", (1, 1))[1] == 0.5:  # RAdam that never uses it
        for held in (*back["state"].values(), *there["state"].values()):
            held.pop("exp_avg_sq")
    there["param_groups"][0]["adjust_lr_fn"] = there["param_groups"][0].get("adjust_lr_fn") or "original"
    back["param_groups"][0].setdefault("adjust_lr_fn", "original")
    assert str(back) == str(there)


def test_groups_schedules_and_names() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    other = copy.deepcopy(model)

    def groups(m: nn.Module) -> list[dict[str, Any]]:
        named = list(m.named_parameters())
        return [{"params": named[:2], "lr": 0.1, "mark": "first"}, {"params": named[2:], "betas": (0.5, 0.7)}]

    expected = torch.optim.AdamW(groups(model), lr=0.01)
    schedule = lr_scheduler.ExponentialLR(expected, 0.5)
    train(expected, list(model.parameters()), 2)
    schedule.step()
    other.load_state_dict(model.state_dict())
    optimizer = optim.AdamW(groups(other), lr=1.0)
    from_torch(expected.state_dict(), optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.005]
    assert [g["initial_lr"] for g in optimizer.param_groups] == [0.1, 0.01]
    assert optimizer.param_groups[0]["mark"] == "first"
    train(expected, list(model.parameters()), 2, seed=3)
    train(optimizer, list(other.parameters()), 2, seed=3)
    close(list(model.parameters()), list(other.parameters()))
    assert to_torch(optimizer)["param_groups"][0]["mark"] == "first"
    renamed = [(f"x.{n}", p) for n, p in other.named_parameters()]
    with pytest.raises(AxesError, match=r"parameter '0.weight' where the optimizer has 'x.0.weight'"):
        from_torch(expected.state_dict(), optim.AdamW([{"params": renamed[:2]}, {"params": renamed[2:]}]))


def test_two_optimizers_of_torch_become_one_of_two_rules_and_again_two() -> None:
    ps = parameters(True) + parameters(False)[1:3]
    theirs = torch.optim.Muon(ps[:2], lr=0.02), torch.optim.AdamW(ps[2:], lr=0.003)
    for o in theirs:
        train(o, ps, 2)
    copies = [p.detach().clone().requires_grad_() for p in ps]
    groups = [{"params": copies[:2], "rule": "muon"}, {"params": copies[2:], "rule": "adamw"}]
    optimizer = optim.Muon(groups, aux_lr_scale=0.5, form="direct", foreach=False)
    with pytest.raises(AxesError, match="one by one"):
        from_torch(theirs[0].state_dict(), optimizer)
    from_torch(theirs[0].state_dict(), optimizer, rule="muon")
    from_torch(theirs[1].state_dict(), optimizer, rule="adamw")
    for o in theirs:
        train(o, ps[:2] if o is theirs[0] else ps[2:], 2, seed=3)
    twins = [copies[:2], copies[2:]]
    for members in twins:  # each rule saw its own gradients
        train(optimizer, members, 2, seed=3)
        for p in members:
            p.grad = None
    close(ps, copies)
    back = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in ps[2:]])
    back.load_state_dict(to_torch(optimizer, rule="adamw"))
    assert str(back.state_dict()["state"]) == str(theirs[1].state_dict()["state"])


def test_a_scaled_step_size_arrives_as_the_product() -> None:
    ps = parameters(True) + parameters(False)[1:3]
    optimizer = optim.Muon(
        [{"params": ps[:2], "rule": "muon"}, {"params": ps[2:], "rule": "adamw"}], lr=0.5, aux_lr_scale=0.25
    )
    assert to_torch(optimizer, rule="adamw")["param_groups"][0]["lr"] == 0.125


def test_sixteen_bits_widen_exactly_and_are_not_rounded_unasked() -> None:
    ps = parameters(False, torch.bfloat16)
    expected = torch.optim.AdamW(ps, lr=0.02)
    train(expected, ps, 2)
    copies = [p.detach().clone().requires_grad_() for p in ps]
    for master in (None, "32bit"):
        optimizer = optim.AdamW(copies, master=master)
        from_torch(expected.state_dict(), optimizer)
        for p, q in zip(ps, copies, strict=True):
            held = optimizer.state[q]["via.0.theta"]
            assert held.dtype == torch.float32 and torch.equal(held.reshape(p.shape), -expected.state[p]["exp_avg"])
    with pytest.raises(AxesError, match="rounded=True"):
        to_torch(optimizer)
    again = torch.optim.AdamW(ps)
    again.load_state_dict(to_torch(optimizer, rounded=True))
    assert str(again.state_dict()["state"]) == str(expected.state_dict()["state"])
    with pytest.raises(AxesError, match="8bit"):
        from_torch(expected.state_dict(), optim.AdamW(copies, moments="8bit"))


def test_a_wider_state_is_not_rounded() -> None:
    p = torch.ones(3, requires_grad=True)
    expected = torch.optim.AdamW([p])
    train(expected, [p], 1)
    saved = expected.state_dict()
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].double()
    with pytest.raises(AxesError, match="'exp_avg' of parameter 0 is torch.float64 and would be rounded"):
        from_torch(saved, optim.AdamW([p]))


def test_complex_parameters() -> None:
    p = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    q = p.detach().clone().requires_grad_()
    expected, optimizer = torch.optim.AdamW([p], lr=0.1), optim.AdamW([q])
    for o, x in ((expected, p), (expected, p), (optimizer, q)):
        if o is optimizer:
            q.data.copy_(p.data)
            from_torch(expected.state_dict(), optimizer)
            back = torch.optim.AdamW([p])
            back.load_state_dict(to_torch(optimizer))
            assert str(back.state_dict()["state"]) == str(expected.state_dict()["state"])
        x.grad = torch.full_like(x, 1 + 2j)
        o.step()
    expected.step()
    torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-12, atol=1e-13)


Change = Callable[[dict[str, Any]], Any]
MISMATCHES: dict[str, tuple[Made, Made, Change, str]] = {
    "another rule": (PAIRS["sgd"][0], optim.AdamW, lambda s: None, "has no 'amsgrad', 'betas', 'eps': it is of"),
    "nadam": (torch.optim.NAdam, optim.AdamW, lambda s: None, "'amsgrad'"),
    "radam": (torch.optim.RAdam, optim.Adam, lambda s: None, "no 'amsgrad'"),
    "adagrad": (torch.optim.Adagrad, optim.SGD, lambda s: None, "no 'dampening', 'momentum', 'nesterov'"),
    "coupled": (PAIRS["adam"][0], optim.AdamW, lambda s: None, r"that of Adam \(coupled decay\): take that rule"),
    "amsgrad": (PAIRS["adam"][0], optim.AMSGrad, lambda s: None, "AMSGrad is torch.optim.Adam with amsgrad=True"),
    "no rule": (PAIRS["adamw"][0], optim.Lion, lambda s: None, "'lion' is none of torch.optim's that can be converted"),
    "no groups": (PAIRS["adamw"][0], optim.AdamW, lambda s: s.pop("param_groups"), "'state' and 'param_groups'"),
    "fewer parameters": (
        PAIRS["adamw"][0], optim.AdamW, lambda s: s["param_groups"][0]["params"].pop(), r"groups of \[3\] parameters",
    ),
    "shape": (
        PAIRS["adamw"][0], optim.AdamW, lambda s: s["state"][1].update(exp_avg=torch.zeros(2)),
        r"'exp_avg' of parameter 1 has shape \(2,\), the parameter has \(5,\)",
    ),
    "a key too few": (
        PAIRS["adamw"][0], optim.AdamW, lambda s: s["state"][0].pop("exp_avg_sq"), "parameter 0 has no 'exp_avg_sq'",
    ),
    "a key too many": (
        PAIRS["adamw"][0], optim.AdamW, lambda s: s["state"][0].update(extra=torch.zeros(2)),
        r"has 'extra'; expected \['exp_avg', 'exp_avg_sq', 'step'\]",
    ),
    "a foreign key": (
        PAIRS["adamw"][0], optim.AdamW, lambda s: s["param_groups"][0].update(momentum_decay=0.1), "'momentum_decay'",
    ),
    "half a step": (
        PAIRS["adamw"][0], optim.AdamW, lambda s: s["state"][2].update(step=torch.tensor(1.5)), "not a count",
    ),
    "a stray state": (
        PAIRS["adamw"][0], optim.AdamW, lambda s: s["state"].update({9: {}}), r"state of \[9\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHES.values(), ids=MISMATCHES)
def test_what_does_not_fit_is_named_and_changes_nothing(case: tuple[Made, Made, Change, str]) -> None:
    theirs, ours, change, message = case
    ps = parameters(False)
    expected = theirs(ps)
    train(expected, ps, 1)
    saved = copy.deepcopy(expected.state_dict())
    change(saved)
    copies = [p.detach().clone().requires_grad_() for p in ps]
    optimizer = ours(copies)
    before = str(optimizer.state_dict())
    with pytest.raises(AxesError, match=message):
        from_torch(saved, optimizer)
    assert str(optimizer.state_dict()) == before


def test_settings_that_torch_does_not_have() -> None:
    ps = parameters(True)
    for settings, message in (
        ({"scale": "spectral"}, "no scale 'spectral'"),
        ({"method": "polar-express"}, "no method 'polar-express'"),
        ({"precision": "input"}, "bfloat16 only"),
        ({"maximize": True}, "cannot maximize"),
    ):
        with pytest.raises(AxesError, match=message):
            to_torch(optim.Muon([{"params": ps, "rule": "muon"}], **settings))
    with pytest.raises(AxesError, match="None is another rule"):
        to_torch(optim.NAdam(ps, momentum_decay=None))
    with pytest.raises(AxesError, match="no decoupled weight decay"):
        to_torch(optim.SGD(ps, decoupled=True, weight_decay=0.1))
