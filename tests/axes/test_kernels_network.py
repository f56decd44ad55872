"""Anchored memories of two layers by kernels, under Triton's interpreter against the recurrence in float64; what is
picked.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own; bfloat16 products are
left to tests/gpu.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from axes.core.algorithms import Anchor, Momentum, Step
from axes.core.costs import SquaredError
from axes.core.geometry import Euclidean
from axes.core.memory import MLP
from axes.core.monoids import Diagonal
from axes.core.state_update import StateUpdate
from axes.routes import dispatch, network_kernel
from axes.routes.choice import Target
from axes.sequence import TTTMLP, Memora, Titans, Yaad
from axes.testing import checks
from tests.interpreter import interpret

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

PROGRAM = r"""
import torch
from axes.core import reference
from axes.core.algorithms import Anchor, Step
from axes.core.costs import Huber, Linear, SquaredError
from axes.core.geometry import Euclidean
from axes.core.memory import MLP
from axes.core.monoids import Diagonal, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.kernels.network import hold
from axes.routes import dispatch, network_kernel
from axes.testing import checks

AT = Anchor(16)
BETA, ROW_BETA = Per("beta"), Per("row_beta", "row")
ROWS = Diagonal("row_decay", side="row")
GATED = Scalar("decay")
SURPRISE = StateUpdate(Linear(), Euclidean(), Scalar("momentum"), Step(Per("theta")))
hold.SEGMENT = 2
ON_CHIP = (torch.float32,)

def results(run, signal, start, dtype):
    live = {n: x.to(dtype).requires_grad_() for n, x in signal.items()}
    first = [x.to(dtype).requires_grad_() for x in start]
    out, state = run(live, tuple(first))
    torch.manual_seed(1)
    shown = [out, *state.theta, *state.anchor, *[x for s in state.via for x in s.theta]]
    loss = sum((x.double() * torch.randn(x.shape, dtype=torch.float64)).sum() for x in shown)
    return [*shown, *torch.autograd.grad(loss, [*live.values(), *first])], [*live, "w1", "w2"]

def check(update, length, d=9, gates=1.0, heads=1, gain=1.0):
    torch.manual_seed(0)
    signal = checks.example(update, length=length, d_k=d, d_v=d)
    signal = {n: x[:1].float().unsqueeze(2).repeat(1, 1, heads, *[1] * (x.ndim - 2)) for n, x in signal.items()}
    signal = {n: x + 0.1 * torch.randn(x.shape) if n in "qkv" else x for n, x in signal.items()}
    signal = {n: gates * x if "decay" in n else 0.1 * x if n in "beta row_beta theta" else x for n, x in signal.items()}
    signal["ln_gain"] = gain * signal["ln_gain"]
    f = update.parts().memory.expansion * d
    start = [torch.randn(1, heads, d, f) / f**0.5, torch.randn(1, heads, f, d) / d**0.5]
    got, names = results(lambda s, w: network_kernel.run(update, s, None, w), signal, start, torch.float32)
    want, _ = results(lambda s, w: reference.run(update, s, time=1, weights=w), signal, start, torch.float64)
    torch_form = lambda s, w: dispatch.run(update, s, weights=w, implementation="torch")
    near, _ = results(torch_form, signal, start, torch.float32)  # norms of few numbers amplify what is rounded
    names = [*[f"shown {n}" for n in range(len(want) - len(names))], *names]
    wrong = []
    for name, a, w, x in zip(names, got, want, near, strict=True):
        error, bar = (((y - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item() for y in (a, x))
        print(name, tuple(w.shape), f"{error:.1e} {bar:.1e}")
        if not error < max(4e-6, 16 * bar):  # 3 or 12 times it, as a processor's products round
            wrong.append(name)
    assert not wrong, wrong
"""
CASES = {
    "nothing forgotten": "check(StateUpdate(SquaredError(), algorithm=Step(BETA, at=AT), memory=MLP(3)), 34, heads=2)",
    "a gate": ("check(StateUpdate(Huber(0.5), monoid=GATED, algorithm=Step(BETA, at=AT), memory=MLP(4)), 33)"),
    "a filter": (
        "check(StateUpdate(SquaredError(), Euclidean(), GATED, Step(at=AT, via=(SURPRISE,)), memory=MLP(2)), 37)"
    ),
    "rows": "check(StateUpdate(Huber(ROW_BETA), monoid=ROWS, algorithm=Step(ROW_BETA, at=AT), memory=MLP(3)), 20)",
    "rows that close": (
        "check(StateUpdate(Huber(0.5), monoid=ROWS, algorithm=Step(ROW_BETA, at=AT), memory=MLP(2)), 17, gates=8.0)"
    ),
    "rates by rows": ("check(StateUpdate(SquaredError(), algorithm=Step(ROW_BETA, at=AT), memory=MLP(2)), 17)"),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_recurrence(case: str) -> None:
    interpret(PROGRAM + CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_kernels_that_hold_states_on_chip_equal_the_recurrence(case: str) -> None:
    """Those of 16 bits, which the interpreter takes float32 for."""
    interpret(PROGRAM + "hold.DTYPES = ON_CHIP\n" + CASES[case])


HOPPER = r"""
import inspect, triton.language as tl
from unittest.mock import patch
from axes.kernels.common import versions
from axes.kernels.network import hopper, hopper_hold
from axes.kernels.substitution import chain
from tests.gluon import plain

hopper_hold.DTYPES, versions.hopper_refusal = {torch.float32: tl.float32}, lambda device: None
launched, source, made = [], inspect.getsource, chain.made

def serial(of, text, name):
    with patch.object(inspect, "getsource", lambda x: plain(source(x)) if x is hopper else source(x)):
        launched.append(name)
        return made(of, text, name)

hopper_hold.made = serial
"""
WIDE = {
    "nothing forgotten": "StateUpdate(SquaredError(), algorithm=Step(BETA, at=AT), memory=MLP(4)), 34",
    "a gate": "StateUpdate(Huber(0.5), monoid=GATED, algorithm=Step(BETA, at=AT), memory=MLP(4)), 33",
    "rows": "StateUpdate(Huber(ROW_BETA), monoid=ROWS, algorithm=Step(ROW_BETA, at=AT), memory=MLP(4)), 36",
    "a filter": "StateUpdate(SquaredError(), Euclidean(), GATED, Step(at=AT, via=(SURPRISE,)), memory=MLP(4)), 35",
}


@pytest.mark.parametrize("case", WIDE)
def test_the_passes_of_hopper_equal_the_recurrence(case: str) -> None:
    interpret(f"{PROGRAM}{HOPPER}check({WIDE[case]}, d=64, gain=0.1)\nassert len(launched) == 2")


SPOILT = r"""
from axes.kernels.common import versions
from tests.spoilt import spoilt

versions.refusal = lambda *given, **named: None
LENGTH, AT, BEGUN = 22, 19, 9  # the last block of 16 has tokens ahead of it, and behind

def same(got, want, what):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda said: f"{what}: {said}")

def earlier(update):
    torch.manual_seed(0)
    given, named = spoilt(update, LENGTH, AT, 8, torch.float32)
    part = lambda first, end: {n: x[:, first:end] for n, x in given.items()}
    _, state = reference.run(update, part(0, BEGUN), time=1)  # within a block
    live = {n: x.requires_grad_() for n, x in part(BEGUN, LENGTH).items()}
    at = AT - BEGUN
    out, last = dispatch.run(update, live, state, implementation="triton")
    without, _ = network_kernel._run(update, live, state, None)
    assert torch.equal(out[0], without[0])  # what is finite is as it was, bit for bit
    assert not without[:, :at].isfinite().all()  # this test could fail
    read = torch.randn(1, at, *out.shape[2:])
    grads = dict(zip(live, torch.autograd.grad((read * out[:, :at]).sum(), live.values())))
    for i, (n, x) in enumerate(named):
        same(out[i, :, 1], out[0, :, 1], (n, x)), same(out[i, :at], out[0, :at], (n, x))
        behind = slice(at, at + 1) if n == "q" else slice(at, None)  # a memory hears of no query
        assert n == "nothing" or out[i, behind, 0].isnan().all(), (n, x)
        for leaf in last.theta:
            same(leaf[i, 1], leaf[0, 1], n)
            assert leaf[i, 0].isnan().all() == (n not in ("nothing", "q")), n
        for m, grad in grads.items():
            same(grad[i], grad[0], (n, x, m))
        if n == "q":
            same(out[i, at + 1 :], out[0, at + 1 :], n)
"""


@pytest.mark.parametrize(("layer", "form"), [("TTTMLP", "hold.DTYPES"), ("Titans", "_"), ("Yaad", "_")])
def test_what_is_not_finite_reaches_no_earlier_token_of_its_block_nor_its_gradient(layer: str, form: str) -> None:
    interpret(f"{PROGRAM}{SPOILT}{form} = ON_CHIP\nfrom axes.sequence import {layer}\nearlier({layer}.update)")


# ---- the identity ----------------------------------------------------------------------------------------------------


def test_numbers_of_a_block_give_the_states_of_the_recurrence() -> None:
    """W_t = a_t W + b_t M + sum_s c_ts p_s k_s^T, and what the filter holds last, in float64 but for the numbers."""
    update, d, length = Titans.update, 5, 11
    signal = checks.example(update, length=length, d_k=d, d_v=d)
    signal = {n: x[:1].double().unsqueeze(2) if isinstance(x, Tensor) else x for n, x in signal.items()}
    generator = torch.Generator().manual_seed(0)
    start = update.init({n: x[:, 0] for n, x in signal.items()})
    held = tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in start.theta)
    start = start._replace(via=(start.via[0]._replace(theta=held),))  # type: ignore[union-attr]
    k, v = signal["k"], signal["v"]
    terms = network_kernel.numbers(update, signal, k, v.shape)
    memory = update.parts().memory
    assert isinstance(memory, MLP) and terms.a is not None and terms.b is not None and terms.e is not None
    first, state = start.theta, start
    drives = []
    for t in range(length):
        token = {n: x[:, t] for n, x in signal.items()}
        r = update.parts().cost.residual(memory.predict(first, token["k"], token), token["v"], 0.0, token)
        drives.append([torch.einsum("...i,...j->...ij", *f) for f in memory.factors(first, token["k"], -r, token)])
        state = update.step(state, token)[0]
        for i, want in enumerate(state.theta):
            made = terms.a[0, t, 0] * first[i] + terms.b[0, t, 0] * held[i]
            made = made + sum(terms.c[0, t, 0, s] * drives[s][i] for s in range(t + 1))
            assert (made - want).norm() < 1e-6 * want.norm(), t
    assert terms.e0 is not None
    for i, want in enumerate(state.via[0].theta):  # type: ignore[union-attr]
        made = terms.e0[0, 0, 0] * held[i] + sum(terms.e[0, 0, 0, s] * drives[s][i] for s in range(length))
        assert (made - want).norm() < 1e-6 * want.norm()


# ---- what is picked --------------------------------------------------------------------------------------------------


def test_select_names_the_kernels_and_says_why_not() -> None:
    gpu = Target.of("cuda:sm_90")
    for layer in (TTTMLP, Titans, Yaad):
        assert dispatch.select(layer.update, gpu, torch.bfloat16)[:2] == ("cascade", "triton")
        assert dispatch.select(layer.update, "cpu")[:2] == ("cascade", "torch")

    def reason(update: StateUpdate, **shapes: tuple[int, ...]) -> str:
        choice = dispatch.select(update, gpu, torch.bfloat16, shapes)
        assert choice[:2] == ("cascade", "torch")
        return choice.reason

    def anchored(every: int, **more: Any) -> StateUpdate:
        return StateUpdate(SquaredError(), Euclidean(), algorithm=Step(at=Anchor(every), **more), memory=MLP())

    assert "one width up to 128, not 16 and 256" in reason(TTTMLP.update, k=(1, 4, 2, 16), v=(1, 4, 2, 256))
    assert "h = Entropic" in reason(Memora.update) and "anchor for 16 tokens" in reason(anchored(4))
    assert "room for one filter" in reason(anchored(16, via=(Momentum(0.9, "sum"), Momentum(0.5, "ema"))))
    assert "more than a sum" in reason(anchored(16, via=(Momentum(0.9, "sum", debias=True),)))
    assert "more than a sum" in reason(anchored(16, via=(Momentum(0.9, "sum", nesterov=True),)))
    rows = StateUpdate(
        SquaredError(),
        Euclidean(),
        Diagonal("decay", side="row"),
        Step(at=Anchor(16), via=(Momentum(0.9, "sum"),)),
        MLP(),
    )
    assert "by rows beside a filter" in reason(rows)
