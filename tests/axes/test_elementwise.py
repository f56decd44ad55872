"""Tuples as straight-line programs: what runs over many tensors at a time is what the interpreter does to each."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from axes import optim
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given, Linear, Ridge
from axes.core.geometry import SignBall, SoftThreshold, Sphere, Whiten
from axes.core.monoids import Decay, Scalar, Zero
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.optim.engine import trees
from axes.optim.engine.batch import Batch
from axes.optim.engine.together import program, start
from axes.programs.batched import Schedule, blocks
from axes.programs.program import NotElementwise, trace
from tests.interpreter import interpret

LR, DECAY = Per("lr"), Per("weight_decay")
SECOND = StateUpdate(Linear("square"), monoid=Scalar(0.95), algorithm=Step(0.05, debias=True))
SIGN = StateUpdate(Linear(), SignBall(), Zero())
CUBE = StateUpdate(Linear(), Whiten((SECOND,), "diagonal", power=1 / 3), Zero())
RULES = {
    "sgd": optim.SGD.declare(0.0),
    "momentum": optim.SGD.declare(0.9),
    "nesterov, decoupled": optim.SGD.declare(0.9, nesterov=True, decoupled=True),
    "adam": optim.Adam.declare(),
    "adam without eps": optim.Adam.declare(eps=0.0),
    "adamw": optim.AdamW.declare(),
    "adamw without memory": optim.AdamW.declare((0.0, 0.0)),
    "lion": optim.Lion.declare(),
    "sign": StateUpdate(Given(), monoid=Decay(DECAY), algorithm=Step(LR, via=(SIGN,))),
    "soft threshold": StateUpdate(Ridge(Given(), DECAY), SoftThreshold(0.01), algorithm=Step(LR)),
    "signed eg": optim.SignedEG.update,
    "cube root": StateUpdate(Given(), monoid=Decay(DECAY), algorithm=Step(LR, via=(CUBE,))),
    "two filters": StateUpdate(Given(), algorithm=Step(LR, via=(Momentum(0.9, "ema"), Momentum(0.5, "sum")))),
}  # fmt: skip


def setting(update: StateUpdate, seed: int = 0, sizes: tuple[tuple[int, ...], ...] = ((4, 3), (7,), (2, 5))) -> Any:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in sizes]
    states = []
    for p in parameters:
        w = p.detach().reshape(-1, p.shape[-1])
        h = update.parts().h
        theta = w if h.is_identity or not update.parts().step.lazy else h.subgradient(w)
        rates = {per.name: 0.1 for per in update.demands()}
        states.append(start(trees.flatten(update, update.init({"g": torch.zeros_like(w), **rates}, (theta,))), p))
    return parameters, states


@pytest.mark.parametrize("maximize", (False, True))
@pytest.mark.parametrize("name", RULES)
def test_equals_the_interpreter_step_by_step(name: str, maximize: bool) -> None:
    update = RULES[name].normal()
    assert program(update, maximize) is not None
    parameters, states = setting(update)
    alone = [p.detach().clone().reshape(-1, p.shape[-1]) for p in parameters]
    memory = [{n: x.clone() for n, x in s.items()} for s in states]
    batch = Batch(update, maximize, parameters, states)
    for t in range(4):
        rates = {per.name: 0.1 / (t + 1) for per in update.demands()}
        for i, p in enumerate(parameters):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + i), dtype=p.dtype)
            p.grad[0] = 0.0
            g = p.grad.reshape(alone[i].shape)
            state = trees.unflatten(update, memory[i], alone[i])
            state, out = update.step(state, {"g": -g if maximize else g, **rates})
            memory[i], alone[i] = trees.flatten(update, state), out.weights[0]
        batch.step(rates)
        for i, p in enumerate(parameters):
            torch.testing.assert_close(p.detach().reshape(alone[i].shape), alone[i], rtol=1e-13, atol=1e-13)
            assert states[i].keys() == memory[i].keys()
            for n, x in states[i].items():
                torch.testing.assert_close(x, memory[i][n].reshape(x.shape).to(x.dtype), rtol=1e-13, atol=1e-13)


@given(seed=st.integers(0, 10**6), block=st.integers(1, 40), name=st.sampled_from(sorted(RULES)))
def test_any_cut_into_blocks_gives_the_same(seed: int, block: int, name: str) -> None:
    update = RULES[name].normal()
    schedule = Schedule(program(update))  # type: ignore[arg-type]
    sizes = [13, 1, 0, 30]
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: [torch.rand(s, generator=generator, dtype=torch.float64) for s in sizes] for n in schedule.names}
    inputs = [i for i, op in enumerate(schedule.program.operations) if op.name == "input" and not op.shaped]
    values = schedule.program.numbers({schedule.program.names[i]: 0.3 for i in inputs})
    whole = {n: [x.clone() for x in xs] for n, xs in tensors.items()}
    schedule.run([whole[n] for n in schedule.names], values)
    for group in blocks(sizes, block):
        assert sum(b - a for _, a, b in group) <= block
        schedule.run([[tensors[n][i][a:b] for i, a, b in group] for n in schedule.names], values)
    for n in schedule.names:
        for a, b in zip(tensors[n], whole[n], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)  # vector and scalar loops round exp differently


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 60))
def test_blocks_cover_every_entry_once(sizes: list[int], block: int) -> None:
    seen = [(i, e) for group in blocks(sizes, block) for i, a, b in group for e in range(a, b)]
    assert sorted(seen) == [(i, e) for i, size in enumerate(sizes) for e in range(size)]


def test_adamw_takes_seven_operations_and_no_guard() -> None:
    schedule = Schedule(program(optim.AdamW.update.normal()))  # type: ignore[arg-type]
    names = [s.name for s in schedule.steps]
    assert len(names) == 7 and {"mix", "addcmul", "addcdiv", "pow xn"} <= set(names)
    assert not any(n.startswith(("where", "gt", "copy")) for n in names)


@pytest.mark.parametrize("keep", (0.0, 0.1, 0.5, 0.9, 1.0, 1.5, -0.9))
@pytest.mark.parametrize("rate", (0.0, 0.1, -0.1, 3.0, 1e-300))
@pytest.mark.parametrize("layout", ("one", "several", "transposed"))
def test_what_is_kept_of_one_and_added_of_another_is_one_operation(keep: float, rate: float, layout: str) -> None:
    found = trace(lambda v: {"x": v["x"] * v["keep"] + v["rate"] * v["y"]}, ("x", "y"), ("keep", "rate"))
    schedule = Schedule(found, keep=("y",))
    assert [s.name for s in schedule.steps] == ["mix"]
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 40)] if layout == "one" else [(5, 40), (3,)] if layout == "several" else [(40, 5)]
    x, y = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in "xy"]
    if layout == "transposed":
        x = [t.mT for t in x]
        y = [t.mT for t in y]
    before, exact = [t.clone() for t in y], [keep * a + rate * b for a, b in zip(x, y, strict=True)]
    places = [t.data_ptr() for t in x]
    schedule.run([x, y], found.numbers({"keep": keep, "rate": rate}))
    for t, e in zip(x, exact, strict=True):
        torch.testing.assert_close(t, e, rtol=1e-14, atol=1e-14)
    assert [t.data_ptr() for t in x] == places and all(map(torch.equal, y, before))


def test_a_guard_that_can_act_stays() -> None:
    """Without eps the denominator may vanish: zero gradients must leave a parameter where it is."""
    names = [s.name for s in Schedule(program(optim.Adam.declare(eps=0.0).normal())).steps]  # type: ignore[arg-type]
    assert any(n.startswith("where") for n in names)


@pytest.mark.parametrize(
    ("update", "why"),
    (
        (optim.Muon.update, "a polar factor mixes entries"),
        (StateUpdate(Given(), Sphere(), algorithm=Step(LR, lazy=False)), "a norm mixes entries"),
        (optim.Shampoo.update, "Kronecker factors mix entries"),
    ),
)
def test_what_mixes_entries_has_no_program(update: StateUpdate, why: str) -> None:
    assert program(update.normal()) is None, why


def test_trace_says_which_operation_mixes_entries() -> None:
    with pytest.raises(NotElementwise, match="sum gives a tensor of another shape|entries are mixed|sum"):
        trace(lambda v: {"parameter": v["parameter"] / v["parameter"].sum(1, keepdim=True)}, ("parameter",), ())
    with pytest.raises(NotElementwise, match="branches on a number"):
        trace(lambda v: {"parameter": v["parameter"] * (2 if v["n"] > 0 else 1)}, ("parameter",), ("n",))
    with pytest.raises(NotElementwise, match="neither an entry nor a number"):
        constant = torch.ones(3, 5)
        trace(lambda v: {"parameter": v["parameter"] + constant}, ("parameter",), ())


def test_states_that_take_each_others_places_are_moved_as_if_at_once() -> None:
    """Two that change places, one behind them, and a sum whose terms read the same entries."""

    def step(v: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        drive = v["g"] * v["n"]
        mixed = v["n"] * (drive / (v["a"] * v["a"] + 1.0)) + (1.0 - v["n"]) * drive
        return {"parameter": v["parameter"] + mixed, "a": v["b"], "b": v["a"], "c": v["b"]}

    schedule = Schedule(trace(step, ("parameter", "g", "a", "b", "c"), ("n",)))
    draw = torch.Generator().manual_seed(0)
    given = {n: torch.randn(4, 3, generator=draw, dtype=torch.float64) for n in ("parameter", "g", "a", "b", "c")}
    lists = {n: [x.clone()] for n, x in given.items()}
    schedule.run([lists[n] for n in schedule.names], schedule.program.numbers({"n": 0.3}))
    for name, expected in step({**given, "n": torch.tensor(0.3, dtype=torch.float64)}).items():
        torch.testing.assert_close(lists[name][0], expected)


def test_the_program_reads_as_text() -> None:
    text = str(program(optim.SGD.declare(0.0).normal()))
    assert "%0 = parameter" in text and "parameter <- %" in text and "number = lr" in text


def test_the_root_of_a_number_of_any_sign_keeps_its_guard() -> None:
    """Only what can never be negative may lose it: elsewhere the root of a negative entry would be no number."""
    x = torch.tensor([-4.0, 0.0, 9.0], dtype=torch.float64)

    def plain(v: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        g = v["g"]
        return {"parameter": torch.where(g > 0, torch.where(g > 0, g, 1.0) ** 0.5, 0.0)}

    schedule = Schedule(trace(plain, ("parameter", "g"), ()))
    held = {"parameter": [torch.ones_like(x)], "g": [x.clone()]}
    schedule.run([held[n] for n in schedule.names], schedule.program.numbers({}))
    assert held["parameter"][0].tolist() == [0.0, 0.0, 3.0] and held["g"][0].equal(x)


SQUARES = r"""
import torch
from axes import optim
from axes.programs.fused import Fused
from axes.programs.program import trace
from axes.errors import AxesError
from axes.optim.engine.staged import staged

torch.manual_seed(0)
SIZES = (2048, 1500, 7, 512, 3001, 1)


def away_from_zero(v):  # what it makes of padding is not zero
    m = 0.9 * v["m"] + v["g"]
    return {"parameter": 0.5 * v["parameter"] + m + 3.0, "m": m}


muon = staged(optim.Muon.update.normal()).stages[0].program
other = trace(away_from_zero, ("parameter", "m", "g"), ())


def fused(program, dtype, forms=None, **options):
    shaped = [n for n, i in program.inputs.items() if program.shaped(i) and n not in ("parameter", "g")]
    stored = {"parameter": [torch.randn(s).to(dtype) for s in SIZES]}
    for n in shaped:
        stored[n] = [torch.zeros(s, dtype=torch.int8 if forms else torch.float32) for s in SIZES]
        if forms:
            stored[n + ".unit"] = [torch.zeros(-(-s // 256)) for s in SIZES]
    counts = torch.zeros(len(SIZES) if "streams" in options else 1, dtype=torch.int64)
    return stored, Fused(program, stored, forms or {}, {}, counts, squares=True, **options)


def wanted(parameters, block):
    return torch.stack([part.double().square().sum() for x in parameters for part in x.split(block)])


cases = [(muon, torch.bfloat16, None, {}), (muon, torch.float32, None, {}), (other, torch.bfloat16, None, {})]
cases += [(other, torch.float32, {"m": "signed-8"}, {}), (other, torch.bfloat16, None, {"streams": range(len(SIZES))})]
for program, dtype, forms, options in cases:
    stored, kernel = fused(program, dtype, forms, **options)
    assert kernel.block == (512 if forms else 1024)
    rates = {n: 0.1 for n in kernel.names}
    off, on = torch.ones(()), torch.zeros(())
    gradients = [torch.randn(s) for s in SIZES]
    kernel.step(gradients, rates, off)
    assert torch.equal(kernel.squares, torch.zeros(sum(-(-s // kernel.block) for s in SIZES)))
    for found, scale in ((None, None), (on, torch.tensor(4.0))):
        kernel.step(gradients, rates, found, scale)
        want = wanted(stored["parameter"], kernel.block)
        torch.testing.assert_close(kernel.squares.double(), want, rtol=1e-6, atol=0)
    before = kernel.squares.clone()
    assert (before > 0).all()
    kernel.step([torch.randn(s) for s in SIZES], rates, off)
    assert torch.equal(before, kernel.squares)
    kernel.step([torch.randn(s) for s in SIZES], rates)
    assert not torch.equal(before, kernel.squares)
try:
    fused(other, torch.bfloat16, {"m": "signed-8", "parameter": "split-8"})
except AxesError as error:
    assert "plain parameter, not of split-8" in str(error)
else:
    raise AssertionError
"""


def test_the_kernel_leaves_the_sum_of_squares_of_every_chunk_as_it_is_stored() -> None:
    if sys.platform != "linux":
        pytest.importorskip("triton")
    interpret(SQUARES)
