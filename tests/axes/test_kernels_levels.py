"""Levels by the kernel of their chain: the runs with the chain in torch, and under Triton's interpreter."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from axes import explain
from axes.core.memory import Fenwick
from axes.core.rates import Signal
from axes.core.state_update import State, StateUpdate
from axes.routes import dispatch, levels_kernel
from axes.routes.select import select
from axes.sequence import LogLinearGatedDeltaNet, LogLinearMamba2
from tests.interpreter import interpret

LAYERS = {"mamba2": LogLinearMamba2, "gated-delta-net": LogLinearGatedDeltaNet}


def draw(
    update: StateUpdate, length: int, width: int, dtype: torch.dtype, shared: bool, batch: int
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shape = (batch, length, 2)
    signal = {n: torch.randn(batch, length, 1 if shared else 2, width) for n in "qk"}
    signal["v"] = torch.randn(*shape, width + 1)
    signal["k"] /= signal["k"].norm(dim=-1, keepdim=True)
    signal |= {"decay": -torch.rand(shape), "beta": torch.rand(shape), "dt": torch.rand(shape)}
    signal["level"] = torch.rand(*shape, update.parts().memory.levels)  # type: ignore[attr-defined]
    asked = {per.name for per in update.demands()} | {"q", "k", "v"}
    return {n: x.to(dtype if n in "qkv" else torch.float32) for n, x in signal.items() if n in asked}


def results(run: Any, given: dict[str, Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    leaves = {n: x.to(dtype or x.dtype).detach().clone().requires_grad_() for n, x in given.items()}
    out, state = run(leaves)
    torch.manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, dtype=torch.float64)).sum() for x in (out, state.theta[0]))
    return [out, *state.theta, *torch.autograd.grad(loss, list(leaves.values()))]


def compare(
    name: str, most: int, length: int, width: int, dtype: torch.dtype, compute: Any, bound: float,
    shared: bool = False, closed: bool = False, batch: int = 2,
) -> None:  # fmt: skip
    update = replace(LAYERS[name].update, memory=Fenwick(most))
    given = draw(update, length, width, dtype, shared, batch)
    if closed:
        given["decay"] = torch.where(torch.rand(given["decay"].shape) < 0.2, -1e3, 10 * given["decay"])
    want = results(lambda x: dispatch.run(update, x, implementation="reference"), given, torch.float64)
    wide = torch.float64 if dtype == torch.float64 else None
    got = results(lambda x: levels_kernel.run(update, x, compute, whole=compute is not by_torch), given, wide)
    for i, (w, g) in enumerate(zip(want, got, strict=True)):
        error = ((g - w).norm() / max(w.norm().item(), 1e-3 * w.numel() ** 0.5)).item()
        assert error < bound, (name, most, length, i, error)


def by_torch(update: StateUpdate, signal: Signal, start: State | None) -> tuple[Tensor, State]:
    return dispatch.run(update, signal, start, implementation="torch")


def whole(update: StateUpdate, signal: Signal, start: State | None) -> tuple[Tensor, State]:
    raise AssertionError("all levels are computed at once")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("most", (3, 5, 16))
def test_the_runs_are_the_levels(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 tokens: cut anywhere, with levels that are full."""
    monkeypatch.setattr(levels_kernel, "CHUNK", 4)
    for length in (1, 3, 4, 13, 41):
        compare(name, most, length, 3, torch.float64, by_torch, 1e-12)


def test_the_kernels_are_the_levels() -> None:
    if sys.platform != "linux":
        pytest.importorskip("triton")
    interpret("""
import torch
from axes.routes import levels_kernel
from axes.routes.dispatch import _chain_by_kernel
from tests.axes.test_kernels_levels import compare

levels_kernel.CHUNK = 16
compare("mamba2", 6, 53, 5, torch.float32, _chain_by_kernel, 1e-5)
compare("gated-delta-net", 6, 40, 16, torch.float16, _chain_by_kernel, 2e-2)
compare("gated-delta-net", 9, 70, 5, torch.float32, _chain_by_kernel, 1e-5, shared=True, batch=1)
compare("gated-delta-net", 8, 70, 16, torch.float16, _chain_by_kernel, 2e-2, batch=1)
compare("gated-delta-net", 8, 40, 16, torch.float32, _chain_by_kernel, 5e-5, closed=True, batch=1)
""")


def test_all_levels_at_once() -> None:
    """Chunks of 32 and 64 tokens: a few, an odd number, a power of two; shared keys, no gates, no strengths."""
    if sys.platform != "linux":
        pytest.importorskip("triton")
    interpret("""
import torch
from axes.core.costs import Alignment
from axes.core.memory import Fenwick
from axes.core.state_update import StateUpdate
from tests.axes import test_kernels_levels
from tests.axes.test_kernels_levels import LAYERS, compare, whole

for length, width, batch in ((1, 3, 2), (32, 16, 2), (225, 17, 1)):
    compare("mamba2", 9, length, width, torch.float32, whole, 1e-5, batch=batch)
compare("mamba2", 16, 130, 20, torch.float16, whole, 1e-2, batch=1)
class Plain:
    update = StateUpdate(Alignment(), memory=Fenwick(8))
LAYERS["plain"] = Plain
compare("plain", 8, 65, 8, torch.float32, whole, 1e-5)
compare("mamba2", 9, 100, 8, torch.float32, whole, 1e-5, shared=True)
compare("mamba2", 9, 40, 8, torch.float32, whole, 5e-5, closed=True)
""")


def test_what_runs_is_said() -> None:
    update, cuda = LogLinearMamba2.update, torch.device("cuda")
    shapes = {n: (1, 64, 2, 16) for n in "qkv"}
    assert select(update, cuda, torch.bfloat16, shapes)[:2] == ("levels", "triton")
    assert select(update, cuda, torch.bfloat16, {**shapes, "levels": (1, 2, 16, 16, 16)})[:2] == ("levels", "torch")
    said = explain("log-linear-mamba2", device="cuda:sm_90")
    assert "levels by triton" in said and "levels go on from a state by torch" in said
