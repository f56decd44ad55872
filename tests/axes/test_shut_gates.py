"""Finite numbers where something is zero or shut: values and gradients in float32 against float64, and NaN nowhere."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from axes import dispatch
from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Spectral, Sphere
from axes.core.memory import Kernel, directions, mean_gate
from axes.core.monoids import Hadamard
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence import ALL, PREDICTED
from axes.testing.examples import example, leaves
from tests.drawn import crossed
from tests.interpreter import interpret

SYSTEMS = {cls.name: cls.update for cls in (*ALL, *PREDICTED)}
Signal = dict[str, Tensor]
ROUTES = ("torch", "reference")


def signal_of(update: StateUpdate, length: int = 20, d: int = 4) -> Signal:
    """(B, T, H, ...) in float64, of numbers that float32 has."""
    made = example(update, batch=(1, 2), length=length, d_k=d, d_v=d)
    return {n: x.movedim(2, 1).float().double() for n, x in made.items() if isinstance(x, Tensor)}


def _results(update: StateUpdate, signal: Signal, dtype: torch.dtype, implementation: str) -> dict[str, Tensor]:
    """Outputs, states, and gradients of a sum of them in every input."""
    live = {n: x.to(dtype).requires_grad_() for n, x in signal.items()}
    out, state = dispatch.run(update, live, implementation=implementation)  # type: ignore[arg-type]
    shown = [out, *(x for x in leaves(state) if x.is_floating_point() and x.requires_grad)]
    generator = torch.Generator().manual_seed(0)
    loss = sum((x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in shown)
    grads = torch.autograd.grad(loss, list(live.values()), allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
    named = {f"shown {i}": x.detach() for i, x in enumerate(shown)}
    return named | {f"d {n}": g for n, g in zip(live, grads, strict=True)}


def _near(update: StateUpdate, signal: Signal, implementation: str, limit: Signal | None = None) -> None:
    """float32 against float64, of the same signal or of one that tends to it."""
    got = _results(update, signal, torch.float32, implementation)
    want = _results(update, limit or signal, torch.float64, "reference")
    for name, x in want.items():
        assert got[name].isfinite().all(), name
        least = 2e-5 * max(1.0, float(x.abs().max()))
        torch.testing.assert_close(got[name].double(), x, rtol=2e-4, atol=least, msg=name)


# ---- gates by rows over two layers -----------------------------------------------------------------------------------


def test_the_mean_of_gates_is_that_of_numbers_and_none_of_shut_ones_is_lost() -> None:
    logs = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    want = logs.exp().mean(-1).log()
    torch.testing.assert_close(mean_gate(logs, -1, keepdim=False), want)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), logs)[0] for x in (mean_gate(logs, -1), want)))
    for log in (-120.0, -1e4, -math.inf):
        shut = torch.full((3,), log, requires_grad=True)
        mean = mean_gate(shut, -1)
        assert mean.isfinite() or log == -math.inf
        assert log == -math.inf or float(mean.detach()) == pytest.approx(log)  # exp and log would have made it -inf
        (grad,) = torch.autograd.grad(mean.exp(), shut)
        assert mean.exp() == 0 and torch.equal(grad, torch.zeros(3))
        half = torch.tensor([log, 0.0], requires_grad=True)
        (grad,) = torch.autograd.grad(mean_gate(half, -1).exp(), half)
        torch.testing.assert_close(grad, torch.tensor([0.0, 0.5]))
    assert mean_gate(torch.tensor([0.0, math.nan]), -1).isnan()


@pytest.mark.parametrize("implementation", ROUTES)
@pytest.mark.parametrize("log", [-90.0, -200.0, -math.inf])
def test_rows_of_two_layers_that_are_shut(log: float, implementation: str) -> None:
    """At one token, where what is before it is forgotten; and in some rows alone."""
    update = SYSTEMS["yaad"]
    signal = signal_of(update)
    for rows in (slice(None), slice(0, 2)):
        decay = signal["decay"].clone()
        decay[:, 5, :, rows] = log
        tends = decay.clamp_min(-600.0)  # e^-600 is no number of float32, and one of float64
        _near(update, {**signal, "decay": decay}, implementation, {**signal, "decay": tends})


def test_times_a_gate_that_is_shut() -> None:
    """a^dt at a log of -inf asks nothing of dt, of a gate that is expanded over tokens neither."""
    update = StateUpdate(Alignment(), monoid=Hadamard("a", times=Per("dt", "row")), algorithm=Step())
    signal = signal_of(update)
    for log in (-1e4, -math.inf):
        gate = signal["a"].clone()
        gate[:, 5] = log
        for implementation in ROUTES:
            tends = {**signal, "a": gate.clamp_min(-1e4)}
            _near(update, {**signal, "a": gate}, implementation, tends)
    monoid = update.parts().monoid
    one = {"a": torch.full((1, 3, 4), -math.inf).expand(6, 3, 4), "dt": torch.full((6, 3), 0.5)}
    assert monoid.element(one, 1.0, torch.zeros(())).outer.isfinite().all()  # type: ignore[union-attr]


# ---- slots, and what is divided by a length --------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ROUTES)
@pytest.mark.parametrize("log", [-3.0, -7.0])
def test_slots_that_fade_while_nothing_is_written(log: float, implementation: str) -> None:
    """To 1e-8 and 1e-18 of their length, with zero keys: the first power of 1/|s| that float32 lacks met a zero. After
    less, writes turn them again, by 1/|s|."""
    update = SYSTEMS["lattice-osr"]
    signal = signal_of(update, length=8)
    signal["decay"] = torch.full_like(signal["decay"], -0.1)
    signal["decay"][:, 2:8] = log
    signal["k"][:, 2:8] = 0
    _near(update, signal, implementation)
    faint = {n: x.clone() for n, x in signal.items()}
    faint["decay"][:, 2:8] = -1.0
    faint["k"][:, 7] = 0.1
    _near(update, faint, implementation)


@pytest.mark.parametrize("implementation", ROUTES)
def test_slots_that_are_gone_have_no_direction(implementation: str) -> None:
    """Below the root of the smallest normal number, and zero by a shut gate."""
    update = SYSTEMS["lattice-osr"]
    for log in (-60.0, -math.inf):
        signal = signal_of(update)
        signal["decay"][:, 5] = log
        signal["k"][:, 5] = 0
        got = _results(update, signal, torch.float32, implementation)
        assert all(x.isfinite().all() for x in got.values())
        assert not got["shown 0"][:, 5:].any() or log == -60.0


def test_directions_and_their_derivatives_at_every_length() -> None:
    x = torch.tensor([[3.0, 4.0], [0.6, -0.8]], dtype=torch.float64)
    for scale in (1e-18, 1e-15, 1e-9, 1.0, 1e9, 1e18):
        short = (scale * x).float().requires_grad_()
        unit, inverse = directions(short, -1)
        torch.testing.assert_close(unit.double(), x / x.norm(dim=-1, keepdim=True), rtol=1e-6, atol=0)
        torch.testing.assert_close(inverse.double() * scale, 1 / x.norm(dim=-1, keepdim=True), rtol=1e-6, atol=0)
        (by_unit,) = torch.autograd.grad(unit[:, 0].sum(), short, retain_graph=True)
        exact = x.clone().requires_grad_()
        (want,) = torch.autograd.grad((exact / exact.norm(dim=-1, keepdim=True))[:, 0].sum(), exact)
        torch.testing.assert_close(by_unit.double() * scale, want, rtol=1e-5, atol=1e-6)
        (nothing,) = torch.autograd.grad((0 * inverse).sum(), short)
        assert torch.equal(nothing, torch.zeros(2, 2))
    assert directions(torch.tensor([math.nan, 1.0]), -1)[0].isnan().all()
    zero = torch.zeros(2, requires_grad=True)
    assert torch.equal(torch.autograd.grad(directions(zero, -1)[0].sum(), zero)[0], torch.zeros(2))


def test_the_slopes_of_directions_are_twice_differentiable() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.autograd.gradgradcheck(lambda x: directions(x, -1), x)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_kernels_of_short_keys(kind: str) -> None:
    keys = torch.full((2, 3), 1e-20, requires_grad=True)
    found = Kernel(kind).between(torch.ones(1, 3), keys)  # type: ignore[arg-type]
    assert torch.autograd.grad(found.sum(), keys)[0].isfinite().all()


@pytest.mark.parametrize("part", [Sphere("whole"), Sphere("rows"), Sphere("columns"), Spectral("newton-schulz"),
                                  Spectral("polar-express"), Spectral("polar")])  # fmt: skip
def test_what_stays_zero_has_derivative_zero(part: Sphere) -> None:
    theta = torch.zeros(3, 4, requires_grad=True)
    w = part.primal(theta)
    assert torch.equal(w, torch.zeros(3, 4))
    assert torch.equal(torch.autograd.grad(w.sum(), theta)[0], torch.zeros(3, 4))
    one = torch.eye(3, 4, dtype=torch.float64)  # float32 of one and of two rounds otherwise here and there
    beside, alone = torch.stack((torch.zeros_like(one), one)).requires_grad_(), one.requires_grad_()
    weights = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    (both,) = torch.autograd.grad((weights * part.primal(beside)).sum(), beside)
    (own,) = torch.autograd.grad((weights * part.primal(alone)).sum(), alone)
    torch.testing.assert_close(both[1], own)
    assert not both[0].any()
    bad = torch.full((3, 4), math.nan)
    assert part.primal(bad).isnan().all() and part.primal(bad.requires_grad_()).isnan().all()


ZERO = [("muon-net-state", "k"), ("muon-net-state", "v"), ("frank-wolfe-delta", "v")]


@pytest.mark.parametrize("name, nothing", ZERO)
def test_a_state_that_is_normalised_while_nothing_is_written(name: str, nothing: str) -> None:
    """For as long as it is zero, and behind that as if nothing had been."""
    update = SYSTEMS[name]
    signal = signal_of(update)
    signal[nothing][:, :8] = 0
    got = _results(update, signal, torch.float32, "reference")
    assert all(x.isfinite().all() for x in got.values())
    late = _results(update, {n: x[:, 8:] for n, x in signal.items()}, torch.float32, "reference")
    torch.testing.assert_close(got["shown 0"][:, 8:], late["shown 0"])


# ---- every system ----------------------------------------------------------------------------------------------------


def cases(update: StateUpdate, signal: Signal) -> dict[str, Signal]:
    """What is zero, shut, open or the same again."""
    gates = {p.name for p in update.demands() if p.domain == "unit"}
    first = torch.zeros_like(signal["k"])
    first[..., 0] = 1
    found = {
        "no keys": {"k": 0 * signal["k"]},
        "no values": {"v": 0 * signal["v"]},
        "nothing": {n: 0 * signal[n] for n in "kvq"},
        "one key": {"k": first},
        "constant": {n: x[:, :1].expand_as(x) for n, x in signal.items() if x.ndim > 2},
        **{f"gates at {g}": {n: torch.full_like(signal[n], g) for n in gates} for g in (0.0, -200.0, -math.inf)},
    }
    one = {n: x[:, :1] if x.ndim > 2 else x for n, x in signal.items()}
    return {**{what: {**signal, **given} for what, given in found.items()}, "one token": one}


# their exact derivatives leave float32: every token multiplies by 1.875^8 what a state of rank one has no part in
BEYOND = {("muon-net-state", "one key")}


@pytest.mark.parametrize(
    "name, dtype", crossed([pytest.param(name, id=name) for name in SYSTEMS], [torch.float32, torch.bfloat16])
)
def test_outputs_and_gradients_are_finite(name: str, dtype: torch.dtype) -> None:
    update = SYSTEMS[name]
    fast = dispatch.select(update).implementation
    for what, signal in cases(update, signal_of(update, length=18)).items():
        if (name, what) in BEYOND:
            continue
        found = _results(update, signal, dtype, fast)
        assert all(x.isfinite().all() for x in found.values()), (what, [n for n, x in found.items() if x.isnan().any()])


KERNELS = r"""
import torch
from axes import dispatch
from axes.kernels.common import versions
from tests.axes.test_shut_gates import SYSTEMS, cases, signal_of

versions.refusal = lambda *given, **named: None
update = SYSTEMS[NAME]
signal = {n: x[:, :, :1] if x.ndim > 2 else x for n, x in signal_of(update, length=18, d=16).items()}
shapes = {n: tuple(x.shape) for n, x in signal.items()}
if dispatch.select(update, "cpu", torch.float32, shapes).implementation == "triton":
    for what, given in cases(update, signal).items():
        if WHAT is not None and what not in WHAT:
            continue
        live = {n: x.float().contiguous().requires_grad_() for n, x in given.items()}
        out, _ = dispatch.run(update, live)
        want, _ = dispatch.run(update, given, implementation="reference")
        assert (out.double() - want).abs().max() <= 1e-3 * (1 + want.abs().max()), what
        grads = torch.autograd.grad((out * torch.randn_like(out)).sum(), list(live.values()), allow_unused=True)
        lost = [n for n, g in zip(live, grads, strict=True) if g is not None and not g.isfinite().all()]
        assert not lost, (what, lost)
else:
    assert WHAT is None
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's interpreter")
def test_kernels_of_a_gate_that_is_shut_and_a_step_that_it_multiplies() -> None:
    interpret(f"NAME, WHAT = 'mamba', ['gates at -inf']\n{KERNELS}")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's interpreter")
@pytest.mark.parametrize("name", sorted(set(SYSTEMS) - {"muon-net-state"}))
def test_kernels_are_finite(name: str) -> None:
    interpret(f"NAME, WHAT = {name!r}, None\n{KERNELS}")
