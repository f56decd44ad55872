"""On a GPU `dispatch` gives every affine chain its kernel: what comes out is what the torch route computes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from axes import catalogue
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.routes import dispatch
from axes.routes import kernel_terms as terms
from axes.sequence import DeltaNet, GatedDeltaNet, layer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "axes"))
from test_kernel_terms import UPDATES  # the tuples whose mapping the CPU tests check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CHAINS = [e for e in catalogue.entries("sequence") if not isinstance(terms.family(e.update), terms.NoFamily)]


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-6 * b.numel() ** 0.5))


def _signal(update: StateUpdate, length: int, width: int) -> dict[str, torch.Tensor]:
    lead = (2, length, 2)
    signal = {n: torch.randn(*lead, width, device="cuda") for n in "qkv"}
    signal["k"] = torch.nn.functional.normalize(signal["k"], dim=-1)
    if update.parts().step.debias:  # masses of both signs may cancel, and what is divided by them is noise
        signal["q"], signal["k"] = signal["q"].abs(), signal["k"].abs()
    for p in update.demands():
        own = {"scalar": (), "key": (width,), "row": (width,), "pair": (width // 2,), "square": (width, width)}
        x = torch.rand((*lead, *own[p.shape]), device="cuda")
        signal[p.name] = -x if p.domain == "unit" else x
    for n in update.signals() - set(signal):
        signal[n] = torch.nn.functional.normalize(torch.randn(*lead, width, device="cuda"), dim=-1) / 2
    return signal


def _results(update: StateUpdate, signal: dict[str, torch.Tensor], who: str | None) -> list[torch.Tensor]:
    leaves = {n: x.clone().requires_grad_() for n, x in signal.items()}
    out, state = dispatch.run(update, leaves, time=1, implementation=who)  # type: ignore[arg-type]
    weight = torch.linspace(0, 1, out.shape[-1], device="cuda")
    loss = (out * weight).sum() + sum(x.square().sum() for x in _leaves(state))
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return [out, *_leaves(state), *(g for g in grads if g is not None)]


def _leaves(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state] if state.is_floating_point() else []
    return [x for part in state for x in _leaves(part)] if isinstance(state, tuple) else []


@pytest.mark.parametrize("name", UPDATES)
def test_the_kernel_is_chosen_and_agrees_with_torch(name: str) -> None:
    update = UPDATES[name][0]
    signal = _signal(update, 150, 64)
    shapes = {n: tuple(x.shape) for n, x in signal.items()}
    assert dispatch.select(update, "cuda", torch.float32, shapes, time=1).implementation == "triton"
    for kernel, plain in zip(_results(update, signal, None), _results(update, signal, "torch"), strict=True):
        assert _relative(kernel, plain) < 1e-4


@pytest.mark.parametrize("name", UPDATES)
def test_one_token_continues_a_sequence(name: str) -> None:
    update = UPDATES[name][0]
    signal = _signal(update, 21, 32)
    whole, last = dispatch.run(update, signal, time=1, implementation="torch")
    _, state = dispatch.run(update, {n: x[:, :20] for n, x in signal.items()}, time=1)
    token = {n: x[:, 20:] for n, x in signal.items()}
    for in_place in (False, True):
        out, after = dispatch.step(update, token, state, in_place=in_place)
        assert _relative(out, whole[:, 20:]) < 1e-4
        for a, b in zip(_leaves(after), _leaves(last), strict=True):
            assert _relative(a, b) < 1e-4


@pytest.mark.parametrize("entry", CHAINS, ids=lambda e: e.name)
def test_a_layer_of_the_catalogue(entry: catalogue.Entry) -> None:
    """Outputs and gradients of the whole layer, by the kernel and by torch, and the two forms of bfloat16."""
    torch.manual_seed(0)
    model = entry.cls(128, heads=2).cuda()
    x = torch.randn(2, 150, 128, device="cuda")
    results = []
    for who in ("triton", "torch"):
        model.implementation = who
        model.zero_grad()
        y, state = model(x)
        y.square().mean().backward()
        results.append([y, *(p.grad for p in model.parameters() if p.grad is not None)])
        assert state is not None and int(state.memory.count) == 150
    for kernel, plain in zip(*results, strict=True):
        assert _relative(kernel, plain) < 3e-3  # products of TF32, and ReBased squares what they make
    model.implementation = None
    with torch.autocast("cuda", torch.bfloat16):
        half, _ = model(x)
    assert _relative(half, results[1][0]) < 5e-2
    with torch.no_grad():
        y, state = model(x[:, :100])
        for t in range(100, 110):
            y, state = model.step(x[:, t], state)
            assert _relative(y, results[1][0][:, t]) < 1e-3


@pytest.mark.parametrize("entry", CHAINS, ids=lambda e: e.name)
def test_packed_sequences_of_a_layer(entry: catalogue.Entry) -> None:
    """Sequences one after another, by the kernel at once and by torch one by one."""
    torch.manual_seed(0)
    model = entry.cls(128, heads=2).cuda()
    x = torch.randn(1, 300, 128, device="cuda")
    ends = torch.tensor([0, 64, 64, 65, 200, 300], dtype=torch.int32, device="cuda")
    results = []
    for who in ("triton", "torch"):
        model.implementation = who
        model.zero_grad()
        y, state = model(x, cu_seqlens=ends)
        assert state is not None
        y.square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([y, *state.memory.theta, *state.tails, *gradients])
    for kernel, plain in zip(*results, strict=True):
        assert _relative(kernel, plain) < 2e-3


@pytest.mark.filterwarnings("ignore::UserWarning")  # compilers advise TF32 and the like
@pytest.mark.parametrize("cls", [DeltaNet, GatedDeltaNet])
def test_a_layer_compiles_as_one_graph(cls: type[DeltaNet] | type[GatedDeltaNet]) -> None:
    torch.manual_seed(0)
    model = cls(128, heads=2).cuda()
    x = torch.randn(2, 100, 128, device="cuda")
    want, _ = model(x)
    got, _ = torch.compile(model, fullgraph=True)(x)
    assert _relative(got, want) < 1e-4


def test_a_width_without_a_kernel_says_so() -> None:
    update = UPDATES["delta"][0]
    with pytest.raises(dispatch.NoImplementation, match="widths up to"):
        dispatch.select(update, "cuda", torch.float32, {"k": (1, 2, 1, 3000), "v": (1, 2, 1, 8)}, "triton", time=1)


def test_a_tuple_of_ones_own_is_a_layer_on_the_gpu() -> None:
    delta = UPDATES["delta"][0].parts()
    update = StateUpdate(delta.cost, algorithm=type(delta.step)(Per("beta")))
    model = layer(update)(64, heads=2).cuda()
    y, _ = model(torch.randn(1, 70, 64, device="cuda"))
    assert torch.isfinite(y).all()
