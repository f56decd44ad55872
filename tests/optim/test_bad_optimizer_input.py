"""Every wrong input is one clear sentence, and changes nothing."""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from axes import optim
from axes.errors import AxesError, IllegalUpdate


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "negative lr": (lambda: optim.SGD(layer(), lr=-1.0), "lr must be a finite number >= 0"),
    "nan lr": (lambda: optim.SGD(layer(), lr=float("nan")), "lr must be a finite number >= 0"),
    "lr as text": (lambda: optim.SGD(layer(), lr="fast"), "lr must be a finite number >= 0, got 'fast'"),
    "two rates": (lambda: optim.SGD(layer(), lr=torch.ones(2)), "must have one element"),
    "odd width": (
        lambda: optim.RotationalMomentum(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))),
        r"'rotational' does not take 1.weight of shape \(2, 3\), a matrix of 3 columns: .* must be even",
    ),
    "negative decay": (lambda: optim.AdamW(layer(), weight_decay=-0.1), "weight_decay must be"),
    "momentum": (lambda: optim.SGD(layer(), momentum=1.0), r"momentum must lie in \[0, 1\)"),
    "nesterov": (lambda: optim.SGD(layer(), momentum=0.0, nesterov=True), "nesterov needs momentum > 0"),
    "dampened nesterov": (lambda: optim.SGD(layer(), dampening=0.1, nesterov=True), "dampening = 0"),
    "beta": (lambda: optim.Adam(layer(), betas=(0.9, 1.0)), r"beta2 must lie in \[0, 1\)"),
    "tensor beta": (lambda: optim.Muon(layer(), momentum=torch.tensor([0.9, 0.8])), "a tensor of one element"),
    "eps": (lambda: optim.Adam(layer(), eps=-1.0), "eps must be >= 0"),
    "muon steps": (lambda: optim.Muon(layer(), ns_steps=0), r"steps must be an integer in \[1, 99\]"),
    "muon scale": (lambda: optim.Muon(layer(), scale="huge"), "scale 'huge'"),
    "muon nesterov": (lambda: optim.Muon(layer(), momentum=0.0), "nesterov needs momentum > 0"),
    "shampoo beta": (lambda: optim.Shampoo(layer(), betas=(0.9, 1.5)), "beta2 must lie"),
    "shampoo exponent": (lambda: optim.Shampoo(layer(), exponent=0.0), "exponent must be finite and > 0"),
    "reduction": (lambda: optim.NaturalGradient(layer(), reduction="max"), "reduction 'max'"),
    "differentiable": (lambda: optim.AdamW(layer(), differentiable=True), r"axes\.core\.reference\.run"),
    "two ways": (lambda: optim.AdamW(layer(), fused=True, foreach=True), "two ways to do the same"),
    "fused matrices": (lambda: optim.Muon(layer(), fused=True), "rule 'muon' mixes entries"),
    "waiting": (lambda: optim.AdamW(layer(), capturable=True, check_finite=True), "raising waits for the device"),
    "check": (lambda: optim.AdamW(layer(), check_finite="count"), "must be 'raise'"),  # type: ignore[arg-type]
    "master": (lambda: optim.AdamW(layer(), master="16bit"), "master must be None or '32bit' or '24bit'"),
    "moments": (lambda: optim.Muon(layer(), moments="8bit"), "mixes entries: give it to the groups of another rule"),
    "exact rounding": (lambda: optim.SGD(layer(), master="32bit", rounding="stochastic"), "nothing is rounded"),
    "dual weights": (lambda: optim.SignedEG(layer(), master="32bit"), "holds exact weights already"),
    "half": (lambda: optim.SGD(layer().half(), master="24bit"), "not float16"),
    "double moments": (lambda: optim.Adam(layer().double(), moments="8bit"), "of at most float32"),
    "seed": (lambda: optim.SGD(layer(), rounding="stochastic", seed=-1), "seed must be an integer"),
    "integers": (lambda: optim.SGD([torch.zeros(3, dtype=torch.int64)]), "only floating-point and complex"),
    "complex matrix": (
        lambda: optim.Muon([{"params": [torch.zeros(3, 3, dtype=torch.complex64)], "rule": "muon"}]),
        "is complex",
    ),
    "no params": (lambda: optim.SGD([{"lr": 0.1}]), "needs 'params'"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_construction(case: str) -> None:
    make, message = ERRORS[case]
    with pytest.raises(AxesError, match=message):
        make()


def _arguments(cls: type) -> dict[str, Any]:
    found = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    return {n: p.default for n, p in found.items() if p.default is not p.empty}


def _filled(default: Any, bad: Any) -> list[Any]:
    """Where the default is a tuple: one with a bad number in every place in turn."""
    if not isinstance(default, tuple):
        return [bad]
    return [default[:i] + (bad,) + default[i + 1 :] for i in range(len(default))]


@pytest.mark.parametrize("cls", optim.ALL, ids=lambda cls: cls.name)
def test_whatever_is_refused_is_refused_by_the_name_of_its_argument(cls: Any) -> None:
    """A word, a list, NaN, infinity and numbers of other ranges for every argument of every optimizer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for name, default in _arguments(cls).items():
        for bad in ("x", [1], math.nan, math.inf, -1.0, 1e9, 2.0, 0):
            for value in _filled(default, bad):
                try:
                    cls(model, **{name: value})
                except (AxesError, TypeError) as error:
                    assert isinstance(error, AxesError) and name.removesuffix("s") in str(error), (name, value)
                else:
                    number = isinstance(bad, int | float) and not math.isnan(bad)
                    assert number or not isinstance(default, float | tuple), (name, value)


# what a rule keeps of the past is a share of it, and what keeps roots apart is no debt
SHARES = ("momentum", "beta", "beta2", "betas", "shampoo_beta", "nu", "nus", "rho", "aux_betas")
FLOORS = ("eps", "damping", "aux_eps", "graft_eps", "row_eps", "entry_eps", "aux_lr_scale")


@pytest.mark.parametrize("cls", optim.ALL, ids=lambda cls: cls.name)
def test_shares_of_the_past_and_floors_of_roots_have_their_ranges_in_every_rule(cls: Any) -> None:
    for name, default in _arguments(cls).items():
        wrong = (-0.1, 1.1) if name in SHARES else (-1e-3,) if name in FLOORS else ()
        for value in (v for bad in wrong for v in _filled(default, bad)):
            with pytest.raises(AxesError, match=name.removesuffix("s")):
                cls(nn.Linear(4, 4), **{name: value})


def test_errors_torch_makes_too() -> None:
    model = layer()
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.SGD([])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optim.SGD([{"params": [model.weight]}, {"params": [model.weight]}])
    with pytest.raises(TypeError, match="ordered collections"):
        optim.SGD([{"params": {model.weight}}])
    with pytest.raises(TypeError, match="optimize tensors"):
        optim.SGD([1.0, 2.0])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="non-leaf"):
        optim.SGD([model.weight * 2])
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate': it takes params, lr, .*maximize"):
        optim.SGD(model, learning_rate=0.1)  # type: ignore[call-arg]


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optim.SGD(table)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(AxesError, match="sparse gradients"):
        optimizer.step()


def test_a_bad_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = optim.Muon(layer())
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    for bad in ({"lr": -1.0}, {"rule": "sgd"}, {"rule": "muon", "momentum": 2.0}):
        with pytest.raises(AxesError):
            optimizer.add_param_group({"params": [("w", nn.Parameter(torch.ones(2, 2)))], **bad})
    assert optimizer.state_dict()["param_groups"] == groups


def step(optimizer: Any, model: nn.Module) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("cls", "young"),
    [
        (optim.AdamW, ("amsgrad", "master", "moments", "rounding", "seed", "lr_scale")),
        (optim.SOAP, ("sides", "max_side")),
        (optim.Shampoo, ("sides", "max_side", "seed")),
        (optim.LAMB, ("max_norm",)),
    ],
)
def test_options_that_are_younger_than_a_checkpoint_are_what_rules_did_without(
    cls: Any, young: tuple[str, ...]
) -> None:
    model, twin = layer(), layer()
    first, second = cls(model, lr=0.01), cls(twin, lr=0.01)
    step(first, model)
    saved = copy.deepcopy(first.state_dict())
    twin.load_state_dict(model.state_dict())
    whole = copy.deepcopy(saved)
    for group in saved["param_groups"]:
        for key in young:
            group.pop(key, None)
    second.load_state_dict(saved)
    for a, b in zip(first.param_groups, second.param_groups, strict=True):
        assert {**a, "params": 0, "max_side": 0} == {**b, "params": 0, "max_side": 0}
    for m, optimizer in ((model, first), (twin, second)):
        optimizer.zero_grad()
        step(optimizer, m)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    for spoil in (lambda s: s["param_groups"][0].pop("eps"), lambda s: s["state"][0].pop("count")):
        spoilt = copy.deepcopy(whole)
        spoil(spoilt)
        with pytest.raises(AxesError, match=r"has no eps|no count"):
            second.load_state_dict(spoilt)


def test_what_is_no_option_is_never_made_up() -> None:
    """The state of a rule with amsgrad, loaded without the word, has a tensor more than the rule that it then is."""
    model = layer()
    optimizer = optim.AdamW(model, amsgrad=True)
    step(optimizer, model)
    plain = optim.AdamW(layer())
    step(plain, layer())
    saved = copy.deepcopy(plain.state_dict())
    saved["param_groups"][0].pop("amsgrad")
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["amsgrad"] is False
    saved["param_groups"][0]["amsgrad"] = True
    with pytest.raises(AxesError, match="is of another rule"):
        optimizer.load_state_dict(saved)


def test_foreign_checkpoints_are_refused_and_change_nothing() -> None:
    model = layer()
    optimizer = optim.AdamW(model)
    step(optimizer, model)
    before = copy.deepcopy(optimizer.state_dict())
    theirs = torch.optim.AdamW(layer().parameters())
    wider = nn.Linear(4, 2)
    other = optim.AdamW(wider)
    wider(torch.ones(2, 4)).sum().backward()
    other.step()
    lion = optim.Lion(layer())
    renamed = copy.deepcopy(before)
    for group in renamed["param_groups"]:
        group["rule"] = "lion"
    stateless = copy.deepcopy(before)
    stateless["state"][0].pop("via.0.theta")
    for state, message in (
        (theirs.state_dict(), "rule None"),
        (lion.state_dict(), "rule 'lion'"),
        (renamed, "rule 'lion'"),
        (other.state_dict(), r"^AdamW: the saved .* of parameter 0 has shape"),
        (stateless, r"^AdamW: the saved state of parameter 0 is of another rule: no via\.0\.theta"),
        ({"epoch": 1}, "'state' and 'param_groups'"),
    ):
        with pytest.raises(AxesError, match=message):
            optimizer.load_state_dict(state)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for index, kept in before["state"].items():
            assert all(torch.equal(value, after["state"][index][name]) for name, value in kept.items())
    with pytest.raises(ValueError, match="number of parameter groups"):
        optimizer.load_state_dict(optim.Muon(model).state_dict())


def test_an_illegal_tuple_is_refused_by_its_parts() -> None:
    with pytest.raises(IllegalUpdate):
        optim.Muon(layer(), eps=-1.0)


# ---- arguments of constructors ---------------------------------------------------------------------------------------

KINDS = (["float", "None"], ["int", "None"])


def _numbers(cls: type) -> list[inspect.Parameter]:
    """Arguments that stand for a number, several, or yes and no."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]  # type: ignore[misc]

    def is_number(x: Any) -> bool:
        return isinstance(x, int | float) or isinstance(x, tuple) and any(map(is_number, x))

    return [p for p in parameters if is_number(p.default) or str(p.annotation).split(" | ") in KINDS]


@pytest.mark.parametrize("cls", optim.ALL, ids=lambda cls: cls.name)
def test_what_is_no_number_is_refused_by_its_name(cls: type) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    for argument in _numbers(cls):
        for value in ("x", [1.0], object(), torch.ones(2), np.ones(2), math.nan, (1.0, "x")):
            if argument.name == "lr" and value is math.nan:
                continue
            with pytest.raises(AxesError, match=rf"{cls.__name__}: {argument.name}\b"):
                cls(model, **{argument.name: value})


@pytest.mark.parametrize("given", [{"aux_lr_scale": -1.0}, {"refresh": math.nan}, {"graft_eps": "x"}])
def test_three_that_were_accepted(given: dict[str, Any]) -> None:
    with pytest.raises(AxesError, match=next(iter(given)).removeprefix("aux_")):
        optim.Shampoo(layer(), **given)


def test_numbers_of_other_kinds_are_taken() -> None:
    optim.AdamW(layer(), 1e-3, [0.9, 0.99], amsgrad=np.True_, eps=np.float32(1e-8))  # type: ignore[arg-type]
    optim.Adafactor(layer(), eps=(None, 1e-3))


OUTSIDE: dict[str, float] = {
    "eps": -1e-8, "graft_eps": -1.0, "damping": -1.0, "weight_decay": -0.1, "momentum": 1.0, "beta": 1.0, "rho": 1.0,
}  # fmt: skip
# whose number a part of the tuple refuses, by its own name
BY_PARTS = {
    ("NLMS", "eps"), ("Adadelta", "eps"), ("Muon", "eps"), ("NorMuon", "eps"), ("AdaMuon", "eps"), ("Shampoo", "eps"),
    ("Shampoo", "damping"), ("PSGDKron", "damping"), ("ScheduleFree", "beta"),
}  # fmt: skip


@pytest.mark.parametrize("cls", optim.ALL, ids=lambda cls: cls.name)
def test_numbers_outside_their_range_are_refused_by_every_rule(cls: type) -> None:
    """Averages keep less than all of what was; what is added to a root, and a decay, is at least zero."""
    taken = inspect.signature(cls).parameters
    wrong = [{name: value} for name, value in OUTSIDE.items() if name in taken]
    if isinstance(betas := taken["betas"].default if "betas" in taken else None, tuple):
        sums = cls is optim.Shampoo  # whose second one is 1 for a sum
        each = [tuple(1.5 if n == i else b for n, b in enumerate(betas)) for i in range(len(betas))]
        wrong += [{"betas": b} for b in (*each, tuple(-0.1 for _ in betas), (1.0, *betas[1:]))]
        wrong += [] if sums else [{"betas": (*betas[:-1], 1.0)}]
    rules = {c.__name__ for c in optim.ALL}
    for given in wrong:
        with pytest.raises(AxesError) as refused:
            cls(torch.nn.Linear(2, 2), **given)
        who = str(refused.value).partition(":")[0]
        assert who in rules or (cls.__name__, next(iter(given))) in BY_PARTS, refused.value
