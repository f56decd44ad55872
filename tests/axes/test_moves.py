"""`retarget`: what comes out is the same algorithm, and what tells two tuples apart is said field by field."""

from __future__ import annotations

import re

import pytest
import torch

from axes import catalogue
from axes.core import reference
from axes.core.algorithms import Step
from axes.core.costs import Alignment, Huber, Linear, SquaredError
from axes.core.geometry import Euclidean
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import mixer
from axes.errors import AxesError, IllegalUpdate, UnknownName
from axes.moves import differences, pair, replaced, retarget
from axes.optim import SGD, Adagrad, Adam, Adamax, RMSprop
from axes.sequence import AdamNet, FrankWolfeDelta, GatedDeltaNetPrev, YaadMatrix, layer
from axes.testing.checks import NAMES

RATE, TOKENS, WIDTH = 0.05, 9, 4
OF_TORCH = {
    "sgd": (SGD.declare(momentum=0.9), lambda p: torch.optim.SGD(p, RATE, momentum=0.9)),
    "nesterov": (SGD.declare(momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, RATE, 0.9, nesterov=True)),
    "adam": (Adam.declare(), lambda p: torch.optim.Adam(p, RATE)),
    "adamax": (Adamax.declare(), lambda p: torch.optim.Adamax(p, RATE)),
    "rmsprop": (RMSprop.declare(), lambda p: torch.optim.RMSprop(p, RATE)),
    "adagrad": (Adagrad.declare(), lambda p: torch.optim.Adagrad(p, RATE)),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_an_optimizer_along_tokens_is_that_optimizer_on_the_loss_of_every_token(name: str) -> None:
    """torch's own, stepped on 1/2 |W k - v|^2 of one token after another, writes the memory that the layer reads."""
    declared, made = OF_TORCH[name]
    update = retarget(declared, "sequence")
    k, v, q = torch.randn(3, 1, TOKENS, 1, WIDTH, dtype=torch.float64)
    none = torch.zeros(1, TOKENS, 1, dtype=torch.float64)
    signal = {"q": q, "k": k, "v": v, "beta": none + RATE, "decay": none}
    out, _ = reference.run(update, signal, time=1)
    w = torch.zeros(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    optimizer = made([w])
    for t in range(TOKENS):
        optimizer.zero_grad()
        (0.5 * (w @ k[0, t, 0] - v[0, t, 0]).square().sum()).backward()
        optimizer.step()
        torch.testing.assert_close(out[0, t, 0], w.detach() @ q[0, t, 0], rtol=1e-9, atol=1e-12)


def test_a_layer_along_training_steps_is_a_step_with_decoupled_decay() -> None:
    from axes.optim.rules.general import optimizer

    update = retarget(GatedDeltaNetPrev.update, "data")
    p, g = torch.nn.Parameter(torch.randn(3, 2)), torch.randn(4, 3, 2)
    w = p.detach().clone()
    steps = optimizer(update)([p], lr=0.1, weight_decay=0.3)
    for x in g:
        p.grad = x.clone()
        steps.step()
        w = (1 - 0.1 * 0.3) * w - 0.1 * x
        torch.testing.assert_close(p.detach(), w)


ENTRIES = [e for e in catalogue.entries() if e.name not in ("titans", "yaad", "moneta", "memora", "ttt-mlp")]


@pytest.mark.parametrize("axis", ("data", "sequence", "depth"))
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_every_system_has_a_meaning_elsewhere_or_a_reason(entry: catalogue.Entry, axis: str) -> None:
    try:
        moved = retarget(entry.update, axis)  # type: ignore[arg-type]
    except IllegalUpdate as error:
        assert str(error).startswith("retarget: ") and len(str(error)) > 60
        return
    assert retarget(moved, axis) == moved  # type: ignore[arg-type]
    kept = {"cost", "monoid", "algorithm.rate", "algorithm.at", "memory"}
    for path, *_ in differences(entry.update, moved):  # geometry, filters and statistics go along
        assert any(path == field or path.startswith((field + ".", field + "[")) for field in kept), path


def test_there_and_back() -> None:
    """What has no more than the table of the module says comes home."""
    for rule in (SGD.declare(momentum=0.0), Adam.declare()):
        home = retarget(retarget(rule, "sequence"), "data")
        assert [d.path for d in differences(rule, home)] == ["cost", "monoid"]  # the ridge is a decoupled decay


def test_differences_are_as_deep_as_they_can_be_said() -> None:
    def of(rate: float, gate: float) -> StateUpdate:
        momentum = StateUpdate(Linear(), Euclidean(), Scalar(gate))
        return StateUpdate(SquaredError(), algorithm=Step(Per("beta"), via=(momentum,)), monoid=Scalar(rate))

    assert differences(of(0.5, 0.9), of(0.5, 0.9)) == ()
    (gate,) = differences(of(0.5, 0.9), of(0.5, 0.8))
    assert (gate.path, gate.first, gate.second) == ("algorithm.via[0].monoid.gate", 0.9, 0.8)
    assert [d.path for d in differences(of(0.5, 0.9), of(0.4, 0.8))] == ["monoid.gate", "algorithm.via[0].monoid.gate"]
    (h,) = differences(FrankWolfeDelta.update, GatedDeltaNetPrev.update)
    assert h.path.startswith(("h", "algorithm.via")) and "Sphere" in str(h)


@pytest.mark.parametrize("axis", ("sequence", "depth", "data"))
def test_differences_lead_from_one_tuple_to_the_other(axis: str) -> None:
    updates = [e.update for e in catalogue.entries(axis)]  # type: ignore[arg-type]
    for a, b in zip(updates, updates[1:], strict=False):
        assert replaced(a, {d.path: d.second for d in differences(a, b)}) == b


@pytest.mark.parametrize("axis", ("sequence", "depth", "data"))
def test_a_pair_says_both_tuples_and_marks_what_differs(axis: str) -> None:
    updates = [e.update.normal() for e in catalogue.entries(axis)]  # type: ignore[arg-type]
    for a, b in zip(updates, updates[1:], strict=False):
        lines = [line.split(maxsplit=2 if line[0] == "*" else 1) for line in pair(a, b).splitlines()]
        for *_, name, text in lines:
            for group, whole in ((1, a), (2, b)):
                one = re.sub(r"\[([^][]*) -> ([^][]*)\]", lambda m, group=group: m[group], text)  # type: ignore[misc]
                assert eval(one, dict(NAMES)) == getattr(whole, name), (text, one)
        marked = {words[1] for words in lines if words[0] == "*"}
        assert marked == {re.split(r"[.\[]", d.path)[0] for d in differences(a, b)}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("h.x", "Euclidean has no 'x'"), ("via[0]", "StateUpdate has no 'via'"), ("a b", "a path is"),
        ("algorithm.via[3]", "tuple has no '3'"), ("monoid.gate.name.x", "str has no 'x'"),
    ],
)  # fmt: skip
def test_a_path_that_leads_nowhere(path: str, said: str) -> None:
    with pytest.raises(IllegalUpdate, match=said):
        replaced(AdamNet.update, {path: 0.5})


def test_an_anchor_is_for_tokens() -> None:
    moved = retarget(Adam.declare(), "sequence", anchor=16)
    assert [d.path for d in differences(moved, retarget(Adam.declare(), "sequence"))] == ["algorithm.at"]
    with pytest.raises(IllegalUpdate, match="anchor=16 is for tokens"):
        retarget(Adam.declare(), "depth", anchor=16)


def test_costs_may_be_chosen() -> None:
    assert retarget(SGD.declare(), "sequence", cost=Huber()).cost == Huber()
    assert retarget(SGD.declare(), "depth").cost == Alignment()
    assert retarget(AdamNet.update, "data", cost=SquaredError()).cost == SquaredError()


@pytest.mark.parametrize(
    ("given", "axis", "error", "said"),
    [
        (SGD.declare(), "time", UnknownName, "unknown axis"),
        ("sgd", "data", IllegalUpdate, "takes a StateUpdate"),
        (YaadMatrix.update, "data", IllegalUpdate, "a training step has one number"),
        (catalogue.get("titans").update, "data", IllegalUpdate, "a memory of its own"),
        (catalogue.get("titans").update, "depth", IllegalUpdate, "no streams of a MLP memory"),
        (catalogue.get("lion").update, "depth", IllegalUpdate, "does not move"),
        (catalogue.get("natural-gradient").update, "sequence", IllegalUpdate, "asks for 'e'"),
        (catalogue.get("rwkv7").update, "data", IllegalUpdate, "a rate of every key"),
    ],
)
def test_what_has_no_meaning_says_why(given: object, axis: str, error: type[AxesError], said: str) -> None:
    with pytest.raises(error, match=said):
        retarget(given, axis)  # type: ignore[arg-type]


def test_statistics_of_constant_keys_stand_beside_streams() -> None:
    """Keys that all tokens share have one statistic for all of them."""
    made = mixer(retarget(catalogue.get("rls-net").update, "depth"))(8, 0, 2)
    streams = made.expand(torch.randn(2, 3, 8))
    for _ in range(2):
        seen, coefficients = made.read(streams)
        streams = made.write(streams, torch.tanh(seen), coefficients)
    assert made.reduce(streams).shape == (2, 3, 8)


def test_a_moved_tuple_is_a_layer_that_learns() -> None:
    torch.manual_seed(0)
    made = layer(retarget(Adam.declare(), "sequence", anchor=4))(8, heads=2, d_k=4, d_v=4)
    y, _ = made(torch.randn(2, 9, 8))
    y.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
