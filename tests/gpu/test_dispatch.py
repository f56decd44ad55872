"""On a GPU `dispatch` gives the delta family its kernel: what comes out is what the torch route computes."""

from __future__ import annotations

import pytest
import torch

from axes import dispatch
from axes.algorithms import Step
from axes.costs import SquaredError
from axes.monoids import Scalar
from axes.rates import Per
from axes.sequence import DeltaNet, GatedDeltaNet
from axes.state_update import StateUpdate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BETA = Per("beta")
UPDATES = {
    "delta": StateUpdate(SquaredError(), algorithm=Step(BETA)),
    "gated": StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="gated")),
    "constant gate": StateUpdate(SquaredError(), monoid=Scalar(0.9), algorithm=Step(BETA, at="gated")),
    "implicit": StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="new")),
    "constant rate": StateUpdate(SquaredError(), algorithm=Step(0.3)),
}


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", UPDATES)
def test_the_kernel_is_chosen_and_agrees_with_torch(name: str) -> None:
    update, shape = UPDATES[name], (2, 200, 3, 64)
    signal = {n: torch.randn(shape, device="cuda") for n in "qkv"}
    signal["k"] = torch.nn.functional.normalize(signal["k"], dim=-1)
    signal["beta"] = torch.rand(shape[:3], device="cuda")
    signal["decay"] = -torch.rand(shape[:3], device="cuda")
    start = torch.randn(2, 3, 64, 64, device="cuda")
    results = []
    for who in (None, "torch"):
        leaves = {n: x.clone().requires_grad_() for n, x in signal.items()}
        out, state = dispatch.run(update, leaves, weights=(start,), implementation=who)  # type: ignore[arg-type]
        used = [x for n, x in leaves.items() if n in "qkv" or n in {p.name for p in update.demands()}]
        loss = (out * torch.linspace(0, 1, 64, device="cuda")).sum() + state.theta[0].square().sum()
        results.append((out, state.theta[0], *torch.autograd.grad(loss, used)))
    assert dispatch.select(update, "cuda", torch.float32, {"k": shape, "v": shape}).implementation == "triton"
    for kernel, plain in zip(*results, strict=True):
        assert _relative(kernel, plain) < 2e-5


@pytest.mark.parametrize("cls", [DeltaNet, GatedDeltaNet])
def test_a_layer_under_autocast(cls: type[DeltaNet] | type[GatedDeltaNet]) -> None:
    layer = cls(128, heads=2).cuda()
    x = torch.randn(2, 150, 128, device="cuda")
    outputs = []
    for who in (None, "torch"):
        layer.implementation = who
        with torch.autocast("cuda", torch.bfloat16):
            y, state = layer(x)
        assert state is not None and int(state.memory.count) == 150
        outputs.append(y)
    assert _relative(*outputs) < 2e-2
    layer.implementation = None
    _, half = layer(x[:, :70])
    rest, _ = layer(x[:, 70:], half)
    whole, _ = layer(x)
    assert _relative(rest, whole[:, 70:]) < 1e-4
