"""Substitution by kernels on a GPU against the torch route in float64: values, every gradient, hard inputs.

The bar is the torch route in float32 whose matrix products round their operands as the kernels do, backwards too: no
tensor may be further from float64 than one and a half times that. A failing test names every tensor that is, in every
call that it made. Kernels take long to compile: what shares them stands in one test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.core.algorithms import Step  # noqa: E402
from axes.core.costs import CrossEntropy, Huber, Lp, SquaredError  # noqa: E402
from axes.core.monoids import Diagonal, Scalar  # noqa: E402
from axes.core.rates import Per  # noqa: E402
from axes.core.state_update import StateUpdate  # noqa: E402
from axes.routes import dispatch, substitution_kernel  # noqa: E402
from axes.sequence.longhorn import Longhorn  # noqa: E402
from axes.sequence.miras import YaadMatrix  # noqa: E402
from axes.sequence.predicted import FrankWolfeDelta  # noqa: E402
from axes.sequence.ttt import TTTLinear  # noqa: E402
from tests.gpu.told import Rounded, apart, distance, unequal, unwritten  # noqa: E402

BETA, ROW_BETA = Per("beta"), Per("row_beta", "row")
ROWS = Diagonal("row_decay", side="row")
HALF, SMALL, FULL = torch.bfloat16, torch.float16, torch.float32
FREE = {FULL: 4e-6, SMALL: 2e-3, HALF: 8e-3}


def at(update: StateUpdate, where: str) -> StateUpdate:
    n = update.normal()
    step: Any = dataclasses.replace(n.algorithm, at=where)  # type: ignore[arg-type]
    return StateUpdate(n.cost, n.h, n.monoid, step, n.memory)


SYSTEMS = {
    "longhorn": Longhorn.update,
    "yaad": YaadMatrix.update,
    "yaad prev": at(YaadMatrix.update, "prev"),
    "frank-wolfe": FrankWolfeDelta.update,
    "ttt": TTTLinear.update,
    "ttt prev": at(TTTLinear.update, "prev"),
    "huber, gated rows": StateUpdate(Huber(0.5, "norm"), monoid=ROWS, algorithm=Step(ROW_BETA, at="gated")),
    "huber, implicit": StateUpdate(Huber(0.5), monoid=Scalar("decay"), algorithm=Step(BETA, at="new")),
    "cubic": StateUpdate(Lp(3.0), monoid=Scalar("decay"), algorithm=Step(BETA)),
    "cross-entropy": StateUpdate(CrossEntropy(), monoid=Scalar("decay"), algorithm=Step(BETA)),
    "squares by rows": StateUpdate(SquaredError(), monoid=ROWS, algorithm=Step(ROW_BETA)),
}


def draw(
    update: StateUpdate, length: int, d_k: int, d_v: int, dtype: torch.dtype, b: int = 2, h: int = 2, gates: float = 0.1
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    q, k = (torch.randn(b, length, h, d_k, device="cuda") for _ in range(2))
    k = torch.nn.functional.normalize(k, dim=-1)
    signal = {"q": q.to(dtype), "k": k.to(dtype), "v": torch.randn(b, length, h, d_v, device="cuda", dtype=dtype)}
    for per in update.demands():
        x = torch.rand((b, length, h, d_v) if per.shape == "row" else (b, length, h), device="cuda")
        rate = 0.3 * x + 0.1
        # a step of a cubic cost is stable below 2 / (3 |e|), and errors of 4 are among these
        signal[per.name] = -gates * x if per.domain == "unit" else rate * (0.2 if update.cost == Lp(3.0) else 1.0)
    return signal


def results(update: StateUpdate, signal: dict[str, Tensor], start: Tensor, dtype: torch.dtype | None, who: str, **more):
    """Outputs, states and gradients by name."""
    live = {n: (x if dtype is None else x.to(dtype)).detach().requires_grad_() for n, x in signal.items()}
    first = start.to(live["v"].dtype if dtype is not None else torch.float32).detach().requires_grad_()
    out, state = dispatch.run(update, live, weights=(first,), implementation=who, **more)
    shown = {"o": out, "final": state.theta[0], **{f"via{n}": s.theta[0] for n, s in enumerate(state.via)}}
    if state.anchor:
        shown["anchor"] = state.anchor[0]
    torch.manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, device="cuda", dtype=torch.float64)).sum() for x in shown.values())
    names = [*live, "start"]
    grads = torch.autograd.grad(loss, [*live.values(), first], allow_unused=True)
    shown |= {f"d{n}": g for n, g in zip(names, grads, strict=True) if g is not None}
    return {n: x.detach() for n, x in shown.items()}


def check(
    update: StateUpdate,
    length: int,
    d_k: int,
    d_v: int,
    dtype: torch.dtype,
    case: str,
    again: bool = False,
    **options: Any,
) -> list[str]:
    """Tensors that are too far from the torch route in float64; again: or whose bits differ in a second call."""
    signal = draw(update, length, d_k, d_v, dtype, **options)
    b, h = signal["k"].shape[0], signal["k"].shape[2]
    start = 0.1 * torch.randn(b, h, d_v, d_k, device="cuda")
    got = results(update, signal, start, None, "triton")
    read, want = dict(got), results(update, signal, start, torch.float64, "torch")
    with Rounded(dtype):
        near = results(update, signal, start, torch.float32, "torch")
    # terms of a gate's gradient cancel where gates close, and u and w are kept in this dtype between passes
    free = {n: FREE[dtype] * (2 if n.endswith("decay") else 1) for n in want}
    if "delta" in signal:
        kinks = at_thresholds(update, signal, start)
        for shown in (read, near):
            shown |= {n: torch.where(kinks, want[n].to(shown[n].dtype), shown[n]) for n in ("dv", "ddelta")}
    bars = {n: max(1.5 * distance(near[n].to(read[n].dtype), w), free[n]) for n, w in want.items()}
    wrong = apart(read, want, bars, case)
    return wrong + (twice(update, signal, start, got, case) if again else [])


def at_thresholds(update: StateUpdate, signal: dict[str, Tensor], start: Tensor) -> Tensor:
    """Entries whose errors are at their thresholds to what 16 bits can tell: derivatives jump there."""
    by = [signal | {"delta": signal["delta"] * factor} for factor in (1 - 2**-7, 1 + 2**-7)]
    less, more = (results(update, x, start, torch.float64, "torch")["dv"] for x in by)
    kinks = (less == 0) != (more == 0)
    assert kinks.double().mean() < 0.02, "too many to leave out"
    return kinks


def twice(
    update: StateUpdate, signal: dict[str, Tensor], start: Tensor, first: dict[str, Tensor], case: str
) -> list[str]:
    """Tensors whose bits differ where what is not written holds NaN."""
    with unwritten():
        second = results(update, signal, start, None, "triton")
    return unequal(first, second, f"{case}, again over NaN,")


def closed(update: StateUpdate) -> list[str]:
    """Gates of minus infinity, and a key of zeros."""
    signal = draw(update, 70, 64, 64, HALF)
    for per in update.demands():
        if per.domain == "unit":
            signal[per.name][:, 5::7] = -torch.inf
    signal["k"][:, 3] = 0.0
    shown = results(update, signal, torch.zeros(2, 2, 64, 64, device="cuda"), None, "triton")
    return [f"gates of -inf {n}: not finite" for n, x in shown.items() if not torch.isfinite(x).all()]


def full(update: StateUpdate) -> list[str]:
    """More programs than a chip holds at a time."""
    signal = draw(update, 333, 64, 64, HALF, b=40, h=8)
    start = torch.randn(40, 8, 64, 64, device="cuda")
    return twice(update, signal, start, results(update, signal, start, None, "triton"), "a full chip")


LENGTHS = (1, 15, 16, 17, 64, 65, 300)


@pytest.mark.parametrize("name", SYSTEMS)
def test_in_bfloat16(name: str) -> None:
    update = SYSTEMS[name]
    wrong = check(update, 200, 64, 64, HALF, "T=200", again=True)
    wrong += check(update, 150, 64, 64, HALF, "closing gates", gates=30.0) + closed(update)
    if name in ("yaad", "yaad prev", "frank-wolfe"):
        for length in LENGTHS:
            wrong += check(update, length, 64, 64, HALF, f"T={length}")
    wrong += full(update)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ("longhorn", "yaad", "yaad prev", "frank-wolfe"))
def test_at_128(name: str) -> None:
    update = SYSTEMS[name]
    wrong = check(update, 200, 128, 128, HALF, "T=200", again=True)
    wrong += check(update, 150, 128, 128, HALF, "closing gates", gates=30.0)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ("longhorn", "yaad prev", "frank-wolfe", "ttt"))
def test_in_float32(name: str) -> None:
    wrong = check(SYSTEMS[name], 200, 64, 64, FULL, "T=200", again=True)
    assert not wrong, "\n".join(wrong)


SIDES = (
    ("longhorn", 128, 128),
    ("longhorn", 128, 20),
    ("yaad prev", 16, 100),
    ("frank-wolfe", 1, 3),
    ("frank-wolfe", 128, 128),
)


@pytest.mark.parametrize(("name", "d_k", "d_v"), SIDES)
def test_sides(name: str, d_k: int, d_v: int) -> None:
    wrong = check(SYSTEMS[name], 130, d_k, d_v, SMALL, "T=130", again=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ("longhorn", "yaad", "yaad prev", "frank-wolfe"))
def test_packed_equals_one_by_one(name: str) -> None:
    update, cuts = SYSTEMS[name], [0, 70, 70, 71, 300]
    signal = draw(update, 300, 64, 64, HALF, b=1)
    start = torch.randn(4, 2, 64, 64, device="cuda")
    first = {n: x[:, 0].expand(4, *x.shape[2:]) for n, x in signal.items()}
    out, last = dispatch.run_packed(
        update, signal, update.init(first, (start,)), torch.tensor(cuts, device="cuda"), implementation="triton"
    )
    assert last is not None
    wrong = []
    for u, (a, e) in enumerate(zip(cuts, cuts[1:], strict=False)):
        if e > a:
            own = {n: x[:, a:e] for n, x in signal.items()}
            alone, state = substitution_kernel.run(update, own, None, (start[u : u + 1],))
            wrong += unequal(
                {"o": alone, "last": state.theta[0]},
                {"o": out[:, a:e], "last": last.theta[0][u : u + 1]},
                f"sequence {u}",
            )
    assert not wrong, "\n".join(wrong)


def test_anchors_go_on_from_a_state_between_them() -> None:
    update = SYSTEMS["yaad"]
    signal = draw(update, 60, 64, 64, FULL)
    whole, end = dispatch.run(update, signal, implementation="triton")
    state, outs = None, []
    for a, e in ((0, 5), (5, 23), (23, 60)):
        part = {n: x[:, a:e] for n, x in signal.items()}
        out, state = dispatch.run(update, part, state, implementation="triton")
        outs.append(out)
    wrong = apart({"o": torch.cat(outs, 1), "last": state.theta[0]}, {"o": whole, "last": end.theta[0]}, 1e-5)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ("yaad", "frank-wolfe"))
def test_compiles_as_one_graph(name: str) -> None:
    update = SYSTEMS[name]
    signal = {n: x.requires_grad_() for n, x in draw(update, 100, 64, 64, HALF).items()}
    start = torch.randn(2, 2, 64, 64, device="cuda")
    eager = dispatch.run(update, signal, weights=(start,))[0]

    def call(given: dict[str, Tensor], start: Tensor) -> Tensor:
        return dispatch.run(update, given, weights=(start,))[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(signal, start)
    do = torch.randn_like(eager)
    made = [torch.autograd.grad(x, list(signal.values()), do) for x in (eager, compiled)]
    got, want = ({"o": x, **dict(zip(signal, g, strict=True))} for x, g in zip((eager, compiled), made, strict=True))
    wrong = unequal(got, want)
    assert not wrong, "\n".join(wrong)
