"""Every legal route equals the interpreter: outputs, final state and gradients; and dispatch says what runs and why."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from systems import (
    ATTENTION,
    CASCADES,
    CHAINS,
    DATA,
    EARLY,
    GRAM,
    KEYED,
    LEVELS,
    PASSES,
    SEQUENTIAL,
    SEVERAL,
    SOLVES,
    SUBSTITUTIONS,
    TURNED,
)
from torch import Tensor
from torch.utils import _pytree as pytree

from axes import explain
from axes.core import reference
from axes.core.algorithms import Anchor, Step
from axes.core.costs import Alignment, Huber, SquaredError
from axes.core.geometry import Entropic, Sphere
from axes.core.memory import List, Slots
from axes.core.monoids import DPLR, Diagonal, Householder, Product, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, ShapeError
from axes.routes import attention, cascade, dispatch, gram, solves
from axes.routes.dispatch import Choice, NoImplementation, implementation, routes, run, select
from axes.sequence import AdamNet, Moneta, SequenceLayer, ShampooNet, Titans
from axes.testing import checks, examples, strategies
from tests.drawn import drawn

FAST = {
    **CHAINS, **EARLY, **TURNED, **SEVERAL, **ATTENTION, **PASSES, **LEVELS, **GRAM, **CASCADES, **SOLVES,
    **SUBSTITUTIONS,
}  # fmt: skip
EXACT = 1e-9  # measured 3e-12 in a value (a normaliser near zero), 1e-11 in a gradient


def example(update: StateUpdate, length: int = 7, **sizes: int) -> dict[str, Tensor]:
    return {n: x for n, x in checks.example(update, length=length, **sizes).items() if isinstance(x, Tensor)}  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 70])
@pytest.mark.parametrize("name", FAST)
def test_a_route_is_the_interpreter(name: str, length: int) -> None:
    if length > 33 and name in CASCADES:
        pytest.skip("anchored nonlinear recurrences at these rates are chaotic: rounding grows with every chunk")
    signal = example(FAST[name], length)
    assert checks.error(run(FAST[name], signal), reference.run(FAST[name], signal, time=1)) < EXACT


@pytest.mark.parametrize("name", FAST)
def test_gradients_of_a_route(name: str) -> None:
    """In every input and in the initial weights, for a loss of outputs and final state."""
    update = FAST[name]
    signal = example(update, 19)
    first = {n: x[:, 0] for n, x in signal.items()}
    start = tuple(
        x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype)
        for x in update.init(first).theta
    )
    live = {n: x.requires_grad_() for n, x in signal.items()}
    weights = tuple(x.requires_grad_() for x in start)
    results = [
        examples.gradients(
            f(update, live, time=1, weights=weights), {**live, **{f"w{i}": w for i, w in enumerate(weights)}}
        )
        for f in (run, reference.run)
    ]
    assert checks.error(results[0], results[1]) < EXACT


@pytest.mark.parametrize("cut", [1, 4, 18])
@pytest.mark.parametrize("name", FAST)
def test_a_split_run_is_the_whole_run(name: str, cut: int) -> None:
    """Also inside a chunk and inside the span of an anchor."""
    update = FAST[name]
    signal = example(update, 21)
    whole = run(update, signal)
    head, state = run(update, {n: x[:, :cut] for n, x in signal.items()})
    tail, last = run(update, {n: x[:, cut:] for n, x in signal.items()}, state)
    assert checks.error((torch.cat((head, tail), 1), last), whole) < EXACT


@pytest.mark.parametrize("name", FAST)
def test_step_by_step_is_the_run(name: str) -> None:
    """A route continues from a state that the interpreter made, and hands back one it can take."""
    update = FAST[name]
    signal = example(update, 9)
    outputs, state = [], None
    for t in range(9):
        token = {n: x[:, t : t + 1] for n, x in signal.items()}
        step = run if t % 2 else reference.run
        y, state = step(update, token, state, time=1)
        outputs.append(y)
    assert checks.error((torch.cat(outputs, 1), state), reference.run(update, signal, time=1)) < EXACT


@pytest.mark.parametrize("name", KEYED)
def test_zero_tokens(name: str) -> None:
    update = KEYED[name]
    signal = example(update, 3)
    empty = {n: x[:, :0] for n, x in signal.items()}
    y, fresh = run(update, empty)
    reads = update.parts().step.reads
    assert y.shape == (2, 0, *((reads,) if reads > 1 else ()), signal["v"].shape[-1])
    first = update.init({n: x[:, 0] for n, x in signal.items()})
    assert [x.shape for x in checks.leaves(fresh)] == [x.shape for x in checks.leaves(first)]
    _, state = run(update, signal)
    y, after = run(update, empty, state)
    assert after is state and y.shape[1] == 0
    rest = run(update, signal, fresh)
    assert checks.error(rest, run(update, signal)) < EXACT


@given(update=strategies.updates())
@settings(max_examples=80, suppress_health_check=list(HealthCheck))
def test_random_legal_tuples_by_their_route(update: StateUpdate) -> None:
    if select(update).route == "interpreter":
        return
    signal = example(update, 18)
    signal["v"] = 0.3 * signal["v"]
    assert checks.error(run(update, signal), reference.run(update, signal, time=1)) < EXACT, update


@pytest.mark.parametrize("time", [0, 1, 2])
@pytest.mark.parametrize("name", ["gated delta", "row delta", "fox", "lattice sim", "memora"])
def test_time_may_stand_anywhere(name: str, time: int) -> None:
    update = FAST[name]
    base = {n: x for n, x in checks.example(update, batch=(2, 3), length=5).items() if isinstance(x, Tensor)}
    expected = reference.run(update, base, time=2)[0]
    moved = {n: x.movedim(2, time) for n, x in base.items()}
    y, _ = run(update, moved, time=time)
    assert checks.error(y.movedim(time, 2), expected) < EXACT


@pytest.mark.parametrize("name", FAST)
def test_strided_inputs(name: str) -> None:
    signal = {n: x.transpose(0, 1).contiguous().transpose(0, 1) for n, x in example(FAST[name]).items()}
    assert checks.error(run(FAST[name], signal), run(FAST[name], example(FAST[name]))) < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["gated delta", "fox", "lattice sim", "memora", "normalised gla"])
def test_half_precision_computes_in_single(name: str, dtype: torch.dtype) -> None:
    signal = {n: x.to(dtype) for n, x in example(FAST[name]).items()}
    y, state = run(FAST[name], signal)
    kept = dtype if isinstance(FAST[name].parts().memory, List) else torch.float32  # a list keeps the pairs as given
    assert y.dtype == dtype and state.theta[0].dtype == kept
    expected, _ = reference.run(FAST[name], {n: x.double() for n, x in signal.items()}, time=1)
    assert checks.error(y.double(), expected) < {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}[dtype]


# ---- each route by itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["sim", "dec"])
def test_gram_forms_from_any_unit_slots(form: str) -> None:
    """The chunk form alone, against the interpreter started from random unit slots; more slots than dimensions too."""
    for d_v, d_k in ((6, 4), (3, 5)):
        cost = Alignment() if form == "sim" else SquaredError()
        update = StateUpdate(cost, Sphere("columns"), algorithm=Step(Per("beta"), lazy=False), memory=Slots())
        signal = {**example(update, 20, d_k=d_k, d_v=d_v)}
        start = torch.nn.functional.normalize(torch.randn(2, d_v, d_k, dtype=torch.float64), dim=-2)
        expected, state = reference.run(update, signal, time=1, weights=(start,))
        y, last = getattr(gram, form)(start, *(signal[n] for n in ("k", "v", "q", "beta")))
        assert checks.error((y, last), (expected, state.theta[0])) < EXACT
        assert float((last.square().sum(-2) - 1).abs().max()) < 1e-13


def test_gram_slots_stay_unit_over_many_chunks() -> None:
    _, state = run(GRAM["lattice dec"], example(GRAM["lattice dec"], 400))
    assert float((state.theta[0].square().sum(-2) - 1).abs().max()) < 1e-13


@pytest.mark.parametrize("every", [1, 2, 5, 16, 40])
def test_cascades_with_any_anchor(every: int) -> None:
    step = Step(Per("beta"), at=Anchor(every))
    for update, route in (
        (StateUpdate(Huber(0.5), monoid=Scalar("decay"), algorithm=step), "substitution"),
        (StateUpdate(SquaredError(), Entropic("row"), Scalar("decay"), step), "cascade"),
    ):
        signal = example(update, 35)
        assert select(update).route == route
        assert checks.error(run(update, signal), reference.run(update, signal, time=1)) < EXACT


def test_an_anchor_of_one_is_the_previous_state() -> None:
    """And an anchor of many is another tuple, with other numbers."""
    anchored, plain, frozen = (
        StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(Per("beta"), at=at))  # type: ignore[arg-type]
        for at in (Anchor(1), "prev", Anchor(3))
    )
    signal = example(plain, 17)
    assert checks.error(run(anchored, signal), run(plain, signal)[0:1]) == float("inf")  # another kind of state
    assert checks.error(run(anchored, signal)[0], run(plain, signal)[0]) < EXACT
    assert checks.error(run(frozen, signal)[0], run(plain, signal)[0]) > 1e-3


@pytest.mark.parametrize(
    "monoid",
    [
        DPLR("key_decay"),
        Product((Householder(Per("beta")), Rotation())),
        Product((Householder(Per("beta")), Householder(Per("beta_2"), "w_2"))),
        Product((Rotation(), Diagonal("key_decay"))),
    ],
    ids=repr,
)
def test_attention_leaves_other_transports_to_the_interpreter(monoid: object) -> None:
    update = StateUpdate(Alignment(), Entropic(), monoid, memory=List())  # type: ignore[arg-type]
    assert select(update).route == "interpreter" and "reflection" in str(routes(update)["attention"])
    signal = example(update)
    assert checks.error(run(update, signal), reference.run(update, signal, time=1)) == 0.0


def test_products_of_rotations_and_gates_are_attention() -> None:
    for parts in itertools.permutations((Scalar("decay"), Rotation(), Rotation(Per("angle", "pair", "real")))):
        update = StateUpdate(Alignment(), Entropic(), Product(parts), memory=List())
        signal = example(update, 12)
        assert select(update).route == "attention"
        assert checks.error(run(update, signal), reference.run(update, signal, time=1)) < EXACT


# ---- dispatch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", drawn(range(6), 6))
def test_select_is_pure(part: int) -> None:
    """A sixth of the tuples: a first choice on a GPU follows a token's step, which takes most of a second."""
    for update in (*KEYED.values(), *DATA.values())[part::6]:
        before = repr(update)
        choices = {select(update, "cpu", torch.float64), select(update, torch.device("cuda"), torch.bfloat16)}
        assert {c.route for c in choices} - {"token"} <= {select(update).route} and repr(update) == before
        assert all(isinstance(c, Choice) and c.reason for c in choices)


def test_select_by_name() -> None:
    update = CHAINS["gated delta"]
    assert select(update, implementation="reference")[:2] == ("interpreter", "reference")
    assert select(update, implementation="torch")[:2] == ("chain", "torch")
    with pytest.raises(NoImplementation, match="no fast torch route for .*several steps"):
        select(SEQUENTIAL["several steps"], implementation="torch")
    with pytest.raises(NoImplementation, match="Triton.*not a GPU"):
        select(update, "cpu", implementation="triton")
    with pytest.raises(NoImplementation, match="'fastest' is not one of reference, torch, triton"):
        select(update, implementation="fastest")  # type: ignore[arg-type]


def test_run_obeys_a_name_and_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    update = CHAINS["gated delta"]
    signal, seen = example(update), []
    interpret = reference.run
    monkeypatch.setattr(reference, "run", lambda *a, **k: seen.append("reference") or interpret(*a, **k))
    run(update, signal)
    assert seen == []
    run(update, signal, implementation="reference")
    assert seen == ["reference"]
    with implementation("reference"):
        run(update, signal)
        with implementation("torch"):
            run(update, signal)
            run(update, signal, implementation="reference")  # the name at the call wins
        run(update, signal)
    run(update, signal)
    assert seen == ["reference"] * 4
    with implementation("torch"), pytest.raises(NoImplementation):
        run(SEQUENTIAL["several steps"], example(SEQUENTIAL["several steps"]))
    with pytest.raises(NoImplementation, match="'numpy'"), implementation("numpy"):  # type: ignore[arg-type]
        pass
    run(update, signal)  # the block is left behind after an error


def test_run_says_what_is_missing() -> None:
    with pytest.raises(ShapeError, match="needs 'q' in the signal"):
        run(CHAINS["gated delta"], {"k": torch.zeros(1, 2, 3)})


def test_routes_give_reasons() -> None:
    for update in KEYED.values():
        given_reasons = routes(update)
        assert given_reasons["interpreter"] is None
        assert all(reason is None or len(reason) > 10 for reason in given_reasons.values())


@pytest.mark.parametrize("name", ["titans", "lattice enc", "softmax", "huber, every token"])
def test_explain(name: str) -> None:
    text = explain(KEYED[name])
    for word in ("tuple", "asks for", "signals", "feedback", "transition", "runs"):
        assert word in text, word
    assert re.search("interpreter +legal", text)
    assert select(KEYED[name]).route in text


def test_explain_other_things() -> None:
    class Thing:
        update = DATA["muon"]

    text = explain(Thing())
    assert "normal form" in text and "OnUpdate" in text and "lr" not in text and "stacks by torch on cpu" in text
    with implementation("reference"):
        assert "interpreter by reference" in explain(CHAINS["gated delta"])
    with pytest.raises(AxesError, match="3 has no tuple that could be run: give a StateUpdate, a name"):
        explain(3)


@pytest.mark.parametrize("damage", ["gate", "order", "mass", "norm"])
def test_a_planted_error_is_found(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route that drops a gate, swaps an order or forgets a mass is not the interpreter."""
    name = {"gate": "memora", "order": "adam net", "mass": "fox", "norm": "lattice sim"}[damage]
    if damage == "gate":
        plain = cascade.states
        monkeypatch.setattr(cascade, "states", lambda g, v, k, s: plain(torch.ones_like(g), v, k, s))
    elif damage == "order":
        stage = cascade._stage
        monkeypatch.setattr(cascade, "_stage", lambda u, s, x, d, n: stage(u, s, x, tuple(z.flip(-3) for z in d), n))
    elif damage == "mass":
        monkeypatch.setattr(attention, "_mass", lambda *args: 1.5)
    else:
        monkeypatch.setattr(gram, "_unit", lambda state: 1.01 * state)
    with pytest.raises(AssertionError):
        checks.check_routes(FAST[name])
    assert dispatch.select(FAST[name]).implementation == "torch"


def test_attention_forgets_everything_at_a_closed_gate() -> None:
    """A log gate of -inf drops what was stored before, and nothing turns into NaN."""
    update = StateUpdate(Alignment(), Entropic(), Scalar("decay"), memory=List())
    k, v, q = (torch.randn(6, 4, dtype=torch.float64) for _ in range(3))
    gate = torch.zeros(6, dtype=torch.float64)
    gate[3] = -torch.inf
    out, _ = dispatch.run(update, {"k": k, "v": v, "q": q, "decay": gate}, time=0)
    later, _ = dispatch.run(update, {"k": k[3:], "v": v[3:], "q": q[3:], "decay": torch.zeros(3).double()}, time=0)
    torch.testing.assert_close(out[3:], later, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", (Titans, Moneta, AdamNet, ShampooNet), ids=lambda c: c.name)
def test_chunks_that_are_computed_again_are_the_same(
    layer: type[SequenceLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans in spans, weights some tokens at a time, from a state between two anchors."""
    update = layer.update
    signal = example(update, length=100, d_k=4, d_v=4)
    signal = {n: 0.01 * x if n in ("eta", "theta", "beta") else x for n, x in signal.items()}  # no step overshoots
    _, state = dispatch.run(update, {n: x[:, :5] for n, x in signal.items()}, implementation="torch")
    state = pytree.tree_map(torch.Tensor.detach, state)

    def results() -> list[Tensor]:
        live = {n: x.detach().requires_grad_() for n, x in signal.items()}
        theta = tuple(x.detach().requires_grad_() for x in state.theta)
        out, end = dispatch.run(update, live, state._replace(theta=theta), implementation="torch")
        loss = out.square().sum() + sum(x.square().sum() for x in end.theta)
        return [out, *end.theta, *torch.autograd.grad(loss, [*live.values(), *theta])]

    plain = results()
    counted: list[int] = []
    usual = cascade.again
    for module in (cascade, solves):
        monkeypatch.setattr(module, "again", lambda *given: counted.append(1) or usual(*given))
    monkeypatch.setattr(cascade, "KEPT", 0)
    monkeypatch.setattr(cascade, "_FORMED", 200)
    for a, b in zip(results(), plain, strict=True):
        assert (a - b).norm() <= 1e-10 * b.norm()
    assert len(counted) > 5
