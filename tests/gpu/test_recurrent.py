"""Cells, and passes, by their kernels on a GPU against the tuple's own steps in float64."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes import catalogue  # noqa: E402
from axes.core.state_update import State  # noqa: E402
from axes.kernels.common import versions  # noqa: E402
from axes.kernels.recurrent import hold  # noqa: E402
from axes.kernels.recurrent.chain import recurrent_chain  # noqa: E402
from axes.kernels.recurrent.sizes import CELLS as SIZES  # noqa: E402
from axes.routes import recurrent  # noqa: E402
from axes.routes.cells import GRU, SLSTM, VectorCell  # noqa: E402
from axes.routes.matrix_cells import M2RNN  # noqa: E402
from axes.sequence import GRU as GRULayer  # noqa: E402
from axes.sequence import M2RNN as M2RNNLayer  # noqa: E402
from axes.sequence import SLSTM as SLSTMLayer  # noqa: E402
from axes.sequence import SequenceLayer  # noqa: E402

BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
CELLS = pytest.mark.parametrize("cell", (GRU(), SLSTM()), ids=("gru", "slstm"))


@pytest.fixture(params=(False, True), ids=("matrices on chip", "matrices in registers"))
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Which of two walks runs, whatever is picked."""
    monkeypatch.setattr(hold, "WAVES", float("inf") if request.param else 0.0)
    if request.param and versions.hopper_refusal(torch.device("cuda")) is not None:
        pytest.skip("the walk with matrices in registers is for Hopper")
    return bool(request.param)


def draw(cell: VectorCell, length: int, width: int, units: int, heads: int, dtype: torch.dtype, packed: bool = False):
    torch.manual_seed(0)
    shapes = {
        "inputs": (1 if packed else units, length, heads, cell.gates, width),
        "weight": (heads, width, cell.gates, width),
        "bias": (heads, cell.gates, width),
        "y": (units, heads, width),
        **{f"carry{n}": (units, heads, width) for n in range(cell.carried)},
    }
    made = {n: torch.randn(s, device="cuda") for n, s in shapes.items()}
    made["weight"] /= width**0.5
    return {n: x.to(dtype) if n in ("inputs", "weight", "bias") else x for n, x in made.items()}


def results(cell: VectorCell, given: dict[str, torch.Tensor], who: str, cu: torch.Tensor | None = None):
    leaves = {n: x.detach().clone().requires_grad_() for n, x in given.items()}
    carry = tuple(leaves[f"carry{n}"] for n in range(cell.carried))
    state = State((leaves["y"][..., None],), (), (), (), (), torch.zeros((), dtype=torch.int64))
    tokens, matrices = {"inputs": leaves["inputs"]}, (leaves["weight"], leaves["bias"])
    out, after, carry = recurrent.run(GRULayer.update, cell, tokens, matrices, carry, state, cu, who)
    shown = {"out": out, "y": after.theta[0], **{f"last{n}": x for n, x in enumerate(carry)}}
    torch.manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, device="cuda").double()).sum() for x in shown.values())
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return shown | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


def compare(cell: VectorCell, dtype: torch.dtype, length: int, width: int, units: int, heads: int, cuts=None) -> None:
    given = draw(cell, length, width, units, heads, dtype, cuts is not None)
    cu = None if cuts is None else torch.tensor(cuts, device="cuda")
    want = results(cell, {n: x.double() for n, x in given.items()}, "torch", cu)
    got = results(cell, given, "triton", cu)
    for name, w in want.items():
        assert torch.isfinite(got[name]).all(), name
        error = ((got[name].double() - w).norm() / max(w.norm().item(), 1e-3 * w.numel() ** 0.5)).item()
        print(f"{name} {error:.1e}", end="  ")
        assert error < BOUNDS[dtype], (name, error)


@CELLS
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("width", (20, 64, 128))
def test_equals_the_steps(cell: VectorCell, dtype: torch.dtype, width: int, held: bool) -> None:
    if held and dtype not in hold.DTYPES:
        pytest.skip("matrices in registers have 16 bits")
    if recurrent.no_kernel(cell, torch.device("cuda"), dtype, width) is not None:
        pytest.skip("its matrices do not fit on the chip")
    compare(cell, dtype, 60, width, 33, 2)


@CELLS
@pytest.mark.parametrize(("length", "units"), ((1, 1), (2, 16), (7, 17)))
def test_sizes(cell: VectorCell, length: int, units: int, held: bool) -> None:
    compare(cell, torch.float16 if held else torch.float32, length, 32, units, 3)


@CELLS
def test_packed(cell: VectorCell, held: bool) -> None:
    compare(cell, torch.float16 if held else torch.float32, 90, 64, 5, 2, [0, 30, 30, 31, 80, 90])


@CELLS
def test_a_full_chip_repeats(cell: VectorCell, held: bool) -> None:
    given = draw(cell, 100, 128, 500, 8, torch.bfloat16)
    first, second = (results(cell, given, "triton") for _ in range(2))
    for n, x in first.items():
        assert torch.equal(x, second[n]), n


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("d_k", "d_v", "cuts"), ((64, 16, None), (20, 64, None), (64, 64, [0, 30, 30, 31, 80, 90])))
def test_cells_of_matrices(dtype: torch.dtype, d_k: int, d_v: int, cuts: list[int] | None) -> None:
    """By the kernel against torch in float64, of the same rounded numbers."""
    torch.manual_seed(0)
    units, batch, length, cell = 5, 1 if cuts else 5, 90, M2RNN()
    shapes = {"q": (d_k,), "k": (d_k,), "v": (d_v,), "decay": ()}
    given = {n: torch.randn(batch, length, 3, *s, device="cuda") for n, s in shapes.items()}
    given["decay"] = -given["decay"].abs()
    given["weight"] = torch.randn(3, d_v, d_v, device="cuda") / d_v**0.5
    given["state"] = torch.randn(units, 3, d_v, d_k, device="cuda")
    given = {n: x if n in ("decay", "state") else x.to(dtype) for n, x in given.items()}
    cu = None if cuts is None else torch.tensor(cuts, device="cuda")
    shown = []
    for who in ("torch", "triton", "triton"):
        leaves = {n: (x.double() if who == "torch" else x).detach().clone().requires_grad_() for n, x in given.items()}
        state = State((leaves["state"],), (), (), (), (), torch.zeros((), dtype=torch.int64))
        tokens = {n: leaves[n] for n in shapes}
        out, after, _ = recurrent.run(M2RNNLayer.update, cell, tokens, (leaves["weight"],), (), state, cu, who)
        torch.manual_seed(1)
        loss = sum((x.double() * torch.randn(x.shape, device="cuda").double()).sum() for x in (out, after.theta[0]))
        shown.append([out, after.theta[0], *torch.autograd.grad(loss, list(leaves.values()))])
    for want, got, again in zip(*shown, strict=True):
        assert torch.equal(got, again)
        error = ((got - want).norm() / max(want.norm().item(), 1.0)).item()
        print(f"{error:.1e}", end="  ")
        assert error < BOUNDS[dtype]


def test_times_of_matrices() -> None:
    """Printed (-s): a layer of 16 heads of 64 x 64, by the kernel and by torch; B=8 T=1024, bf16."""
    x = torch.randn(8, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    for who in ("triton", "torch"):
        layer = M2RNNLayer(1024, heads=16, implementation=who, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            forward = milliseconds(lambda m=layer: m(x))
        print(f"{who}: {forward:.2f} / {milliseconds(lambda m=layer: m(x)[0].sum().backward()):.2f} ms")


@pytest.mark.parametrize("name", ("mesa-net", "gsa", "abc"))
def test_passes_by_kernels(name: str) -> None:
    cls = catalogue.get(name, axis="sequence").cls
    torch.manual_seed(0)
    plain = cls(256, heads=2, implementation="torch", device="cuda", dtype=torch.float64)
    fast = cls(256, heads=2, implementation="triton", device="cuda")
    fast.load_state_dict(plain.state_dict())
    x, shown = torch.randn(2, 200, 256, device="cuda"), []
    for layer, dtype in ((plain, torch.float64), (fast, torch.float32)):
        z = x.to(dtype).requires_grad_()
        y, _ = layer(z)
        y.square().sum().backward()
        shown.append([y, z.grad, *[p.grad for p in layer.parameters()]])
    for a, b in zip(*shown, strict=True):
        assert (a - b).norm() <= 2e-3 * max(a.norm().item(), 1.0)


def milliseconds(call, times: int = 5) -> float:  # type: ignore[no-untyped-def]
    call()
    torch.cuda.synchronize()
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - begun))
    return min(found)


@pytest.mark.filterwarnings("ignore::UserWarning")  # cuDNN compacts weights that a dtype has moved
@pytest.mark.parametrize("heads", (1, 8))
def test_times_beside_cudnn_and_a_loop(heads: int) -> None:
    """Printed (-s): ours by kernels, by torch and by the interpreter, cuDNN's GRU as wide, a loop over torch's cells;
    forward and with backward, B=64 T=512."""
    width = 128
    x = torch.randn(64, 512, heads * width, device="cuda", dtype=torch.bfloat16)
    peer = nn.GRU(heads * width, heads * width, batch_first=True, device="cuda", dtype=torch.bfloat16)
    cell = nn.GRUCell(heads * width, heads * width, device="cuda", dtype=torch.bfloat16)

    def loop() -> torch.Tensor:
        h, outs = x.new_zeros(64, heads * width), []
        for z in x.unbind(1):
            h = cell(z, h)
            outs.append(h)
        return torch.stack(outs, 1)

    def ours(cls: type[SequenceLayer], who: str):  # type: ignore[no-untyped-def]
        layer = cls(heads * width, heads=heads, implementation=who, device="cuda", dtype=torch.bfloat16)
        return lambda: layer(x)[0]

    calls = {"cuDNN": lambda: peer(x)[0], "loop of cells": loop}
    calls |= {f"{c.name} by {w}": ours(c, w) for c in (GRULayer, SLSTMLayer) for w in ("triton", "torch", "reference")}
    for name, call in calls.items():
        with torch.no_grad():
            forward = milliseconds(call, 2 if "reference" in name else 5)
        both = milliseconds(lambda c=call: c().sum().backward(), 1 if "reference" in name else 5)
        print(f"heads {heads}  {name}: {forward:.2f} / {both:.2f} ms")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", hold.DTYPES, ids=str)
@pytest.mark.parametrize(("units", "heads"), ((64, 1), (500, 8)))
def test_times_of_both_walks_beside_cudnn(dtype: torch.dtype, units: int, heads: int, held: bool) -> None:
    """Printed (-s): operators alone, forward and with backward, heads of 128; cuDNN's GRU, with its product of
    inputs, once."""
    length, width = (1024, 128) if heads == 1 else (128, 128)
    for cell, (gates, carried, *_) in SIZES.items():
        x = torch.randn(units, length, heads, gates, width, device="cuda", dtype=dtype, requires_grad=True)
        w = torch.randn(heads, width, gates, width, device="cuda", dtype=dtype) / width**0.5
        b = torch.randn(heads, gates, width, device="cuda", dtype=dtype)
        state = [torch.zeros(units, heads, width, device="cuda") for _ in range(1 + carried)]
        leaves = (x, w.requires_grad_(), b.requires_grad_(), *(y.requires_grad_() for y in state))

        def call(cell=cell, leaves=leaves):  # type: ignore[no-untyped-def]
            return recurrent_chain(cell, *leaves[:4], tuple(leaves[4:]))[0]

        heard = torch.randn_like(call())
        with torch.no_grad():
            forward = milliseconds(call)
        both = milliseconds(lambda call=call, leaves=leaves, g=heard: torch.autograd.grad(call(), leaves, g))
        print(f"{cell} {dtype} {units} x {length} x {heads}, held {held}: {forward:.3f} / {both:.3f} ms")
    if heads == 1 and not held:
        peer = nn.GRU(width, width, batch_first=True, device="cuda", dtype=dtype)
        z = torch.randn(units, length, width, device="cuda", dtype=dtype, requires_grad=True)
        with torch.no_grad():
            forward = milliseconds(lambda: peer(z))
        print(f"cuDNN {dtype}: {forward:.3f} / {milliseconds(lambda: peer(z)[0].sum().backward()):.3f} ms")
