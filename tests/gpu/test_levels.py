"""Levels by the kernels of their chain on a GPU against torch in float64, and their time beside the chain's."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.core.memory import Fenwick  # noqa: E402
from axes.routes import dispatch, levels_kernel  # noqa: E402
from axes.sequence import LogLinearGatedDeltaNet, LogLinearMamba2, SequenceLayer  # noqa: E402

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
LAYERS = pytest.mark.parametrize("cls", (LogLinearMamba2, LogLinearGatedDeltaNet), ids=lambda cls: cls.name)


def draw(cls: type[SequenceLayer], most: int, length: int, width: int, dtype: torch.dtype):
    """A tuple and signals of two sequences and three heads."""
    torch.manual_seed(0)
    update, shape = replace(cls.update, memory=Fenwick(most)), (2, length, 3)
    signal = {n: torch.nn.functional.normalize(torch.randn(*shape, width, device="cuda"), dim=-1) for n in "qk"}
    signal["v"] = torch.randn(*shape, width, device="cuda")
    signal["decay"] = -0.2 * torch.rand(shape, device="cuda")
    signal |= {n: torch.rand(shape, device="cuda") for n in ("beta", "dt")}
    signal["level"] = torch.rand(*shape, most, device="cuda")
    asked = {per.name for per in update.demands()} | set("qkv")
    return update, {n: x.to(dtype) if n in "qkv" else x for n, x in signal.items() if n in asked}


def results(update, given, who: str):  # type: ignore[no-untyped-def]
    leaves = {n: (x.double() if who == "torch" else x).detach().clone().requires_grad_() for n, x in given.items()}
    out, state = dispatch.run(update, leaves, implementation=who)  # type: ignore[arg-type]
    torch.manual_seed(1)
    shown = (out, state.theta[0])
    loss = sum((x.double() * torch.randn(x.shape, device="cuda").double()).sum() for x in shown)
    return [*shown, *torch.autograd.grad(loss, list(leaves.values()))]


@LAYERS
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("most", "length", "width"), ((16, 1000, 64), (9, 1000, 128), (16, 70, 20), (16, 64, 32)))
def test_equals_torch(cls: type[SequenceLayer], dtype: torch.dtype, most: int, length: int, width: int) -> None:
    """Nine levels tell 128 tokens apart, two chunks: the highest takes the rest."""
    update, given = draw(cls, most, length, width, dtype)
    want, got, again = (results(update, given, who) for who in ("torch", "triton", "triton"))
    for w, g, a in zip(want, got, again, strict=True):
        assert torch.isfinite(g).all() and torch.equal(g, a)
        error = ((g - w).norm() / max(w.norm().item(), 1.0)).item()
        print(f"{error:.1e}", end="  ")
        assert error < BOUNDS[dtype]


def test_layers_use_them() -> None:
    layer = LogLinearMamba2(128, heads=2, device="cuda")
    seen, own = [], levels_kernel.run
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(levels_kernel, "run", lambda *a, **b: seen.append(1) or own(*a, **b))
        layer(torch.randn(2, 200, 128, device="cuda"))
    assert seen


@LAYERS
def test_times(cls: type[SequenceLayer]) -> None:
    """Printed (-s): levels by kernels, by torch, and the chain without levels; forward and both, B8 T4096 H16 D128."""
    update, given = draw(cls, 16, 4096, 128, torch.bfloat16)
    given = {n: x[:1, :, :1].expand(8, -1, 16, *x.shape[3:]).contiguous() for n, x in given.items()}
    plain = levels_kernel.chain_of(update)
    linear = {n: x for n, x in given.items() if n != "level"}
    for name, tuple_, signal, who in (
        ("levels", update, given, "triton"), ("levels", update, given, "torch"), ("chain", plain, linear, "triton"),
    ):  # fmt: skip
        leaves = {n: x.clone().requires_grad_() for n, x in signal.items()}
        times = []
        for backward in (False, True):
            best = float("inf")
            for _ in range(4):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                with torch.set_grad_enabled(backward):
                    out, _ = dispatch.run(tuple_, leaves, implementation=who)  # type: ignore[arg-type]
                    if backward:
                        torch.autograd.grad(out.float().sum(), list(leaves.values()))
                torch.cuda.synchronize()
                best = min(best, time.perf_counter() - begun)
            times.append(1e3 * best)
        print(f"{cls.name} {name} by {who}: {times[0]:.2f} / {times[1]:.2f} ms")
