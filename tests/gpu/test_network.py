"""Anchored memories of two layers by kernels on a GPU against the torch route in float64: values, every gradient, hard
inputs. The bar is that of substitution: one and a half times the torch route whose products round their operands.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.core.state_update import StateUpdate  # noqa: E402
from axes.routes import dispatch  # noqa: E402
from axes.sequence.miras import Yaad, YaadSwitch  # noqa: E402
from axes.sequence.titans import Titans  # noqa: E402
from axes.sequence.ttt import TTTMLP  # noqa: E402
from tests.gpu.told import Rounded, apart, distance, unequal, unwritten  # noqa: E402

HALF, SMALL, FULL = torch.bfloat16, torch.float16, torch.float32
FREE = {FULL: 1e-5, SMALL: 2e-3, HALF: 8e-3}
SYSTEMS = {"ttt": TTTMLP.update, "titans": Titans.update, "yaad": Yaad.update, "yaad switch": YaadSwitch.update}


def draw(
    update: StateUpdate, length: int, width: int, dtype: torch.dtype, b: int = 2, h: int = 2, gates: float = 0.003
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Gains, rates and gates are small: at a gain of one, 600 tokens amplify what is rounded to all there is."""
    torch.manual_seed(0)
    whole = (b, length, h, width)
    q, k = (torch.nn.functional.normalize(torch.randn(whole, device="cuda"), dim=-1) for _ in range(2))
    signal = {"q": q.to(dtype), "k": k.to(dtype), "v": torch.randn(whole, device="cuda", dtype=dtype)}
    for per in update.demands():
        x = torch.rand(whole if per.shape == "row" else whole[:3], device="cuda")
        small = 0.1 + 0.2 * x if per.name == "ln_gain" else 0.01 * x
        signal[per.name] = -gates * x if per.domain == "unit" else x + 0.5 if per.name == "delta" else small
    start = update.parts().memory.zeros({n: signal[n][:, 0].float() for n in "kv"})
    return signal, (start[0].clone(), start[1].clone())


def results(
    update: StateUpdate, signal: dict[str, Tensor], start: tuple[Tensor, Tensor], dtype: torch.dtype | None, who: str
) -> dict[str, Tensor]:
    """Outputs, states and gradients by name."""
    live = {n: (x if dtype is None else x.to(dtype)).detach().requires_grad_() for n, x in signal.items()}
    first = [x.to(torch.float32 if dtype is None else dtype).detach().requires_grad_() for x in start]
    out, state = dispatch.run(update, live, weights=tuple(first), implementation=who)  # type: ignore[arg-type]
    shown = {"o": out, "w1": state.theta[0], "w2": state.theta[1], "a1": state.anchor[0], "a2": state.anchor[1]}
    via: Any = state.via
    shown |= {f"m{i}": x for s in via for i, x in enumerate(s.theta)}
    torch.manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, device="cuda", dtype=torch.float64)).sum() for x in shown.values())
    grads = torch.autograd.grad(loss, [*live.values(), *first], allow_unused=True)  # type: ignore[arg-type]
    names = [*live, "start1", "start2"]
    shown |= {f"d{n}": g for n, g in zip(names, grads, strict=True) if g is not None}
    return {n: x.detach() for n, x in shown.items()}


def check(
    update: StateUpdate, length: int, width: int, dtype: torch.dtype, case: str, again: bool = False, **options: Any
) -> list[str]:
    """Tensors that are too far from the torch route in float64; again: or whose bits differ in a second call."""
    signal, start = draw(update, length, width, dtype, **options)
    got = results(update, signal, start, None, "triton")
    want = results(update, signal, start, torch.float64, "torch")
    with Rounded(dtype):
        near = results(update, signal, start, FULL, "torch")
    loose = {"ddecay": 2, "dmomentum": 2, "dv": 8, "ddelta": 8}  # Huber's branches turn where values are rounded
    free = {n: FREE[dtype] * loose.get(n, 1) for n in want}
    bars = {n: max(1.5 * distance(near[n].to(got[n].dtype), w), free[n]) for n, w in want.items()}
    wrong = apart(got, want, bars, case)
    if again:
        with unwritten():
            second = results(update, signal, start, None, "triton")
        wrong += unequal(got, second, f"{case}, again over NaN,")
    return wrong


@pytest.mark.parametrize("name", SYSTEMS)
def test_in_bfloat16(name: str) -> None:
    update = SYSTEMS[name]
    wrong = check(update, 600, 64, HALF, "T=600", again=True)
    wrong += check(update, 150, 64, HALF, "closing gates", gates=30.0)
    for length in (1, 15, 16, 17, 33):
        wrong += check(update, length, 64, HALF, f"T={length}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ("titans", "yaad"))
def test_more_programs_than_a_chip_holds(name: str) -> None:
    update = SYSTEMS[name]
    signal, start = draw(update, 100, 64, HALF, b=40, h=8)
    first = results(update, signal, start, None, "triton")
    wrong = unequal(first, results(update, signal, start, None, "triton"))
    wrong += [n for n, x in first.items() if not torch.isfinite(x).all()]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("name", "width", "dtype"), [
    ("ttt", 64, FULL), ("titans", 32, FULL), ("yaad", 20, SMALL), ("ttt", 128, HALF), ("titans", 128, HALF),
    ("yaad", 64, SMALL), ("titans", 64, SMALL), ("ttt", 32, HALF), ("titans", 32, HALF),
])  # fmt: skip
def test_sides(name: str, width: int, dtype: torch.dtype) -> None:
    wrong = check(SYSTEMS[name], 70, width, dtype, "T=70", again=True)
    assert not wrong, "\n".join(wrong)


def test_anchors_go_on_from_a_state_between_them() -> None:
    update = SYSTEMS["titans"]
    signal, start = draw(update, 60, 64, FULL)
    whole, end = dispatch.run(update, signal, weights=start, implementation="triton")
    state, outs = None, []
    for a, e in ((0, 5), (5, 23), (23, 60)):
        part = {n: x[:, a:e] for n, x in signal.items()}
        more: Any = {"weights": start} if state is None else {}
        out, state = dispatch.run(update, part, state, implementation="triton", **more)
        outs.append(out)
    assert state is not None
    wrong = apart({"o": torch.cat(outs, 1), "last": state.theta[0]}, {"o": whole, "last": end.theta[0]}, 1e-5)
    assert not wrong, "\n".join(wrong)


def test_compiles_as_one_graph() -> None:
    update = SYSTEMS["titans"]
    signal, start = draw(update, 40, 64, HALF)
    eager = dispatch.run(update, signal, weights=start)[0]

    def call(given: dict[str, Tensor], start: tuple[Tensor, Tensor]) -> Tensor:
        return dispatch.run(update, given, weights=start)[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(signal, start)
    assert not unequal({"o": eager}, {"o": compiled})
