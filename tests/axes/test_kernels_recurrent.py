"""Cells under Triton's interpreter, and by torch, against the tuple's own steps; and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from axes.core.state_update import State
from axes.errors import ShapeError
from axes.routes import recurrent
from axes.routes.cells import GRU, SLSTM
from axes.routes.cells import VectorCell as Vector
from axes.routes.matrix_cells import M2RNN
from axes.sequence import GRU as GRULayer
from axes.sequence import M2RNN as M2RNNLayer
from tests.interpreter import interpret


def draw(cell: Vector, length: int, width: int, units: int, dtype: torch.dtype, packed: bool = False, heads: int = 2):
    """Inputs, matrices, the state and what is carried, as leaves."""
    batch = 1 if packed else units
    made = {
        "inputs": torch.randn(batch, length, heads, cell.gates, width),
        "weight": torch.randn(heads, width, cell.gates, width) / width**0.5,
        "bias": torch.randn(heads, cell.gates, width),
        "y": torch.randn(units, heads, width),
    }
    made |= {f"carry{n}": torch.randn(units, heads, width) for n in range(cell.carried)}
    return {n: x.to(dtype) for n, x in made.items()}


def results(cell: Vector, given: dict[str, torch.Tensor], who: str, cu: Any = None) -> dict[str, torch.Tensor]:
    leaves = {n: x.detach().clone().requires_grad_() for n, x in given.items()}
    carry = tuple(leaves[f"carry{n}"] for n in range(cell.carried))
    state = State((leaves["y"][..., None],), (), (), (), (), torch.zeros((), dtype=torch.int64))
    tokens, matrices = {"inputs": leaves["inputs"]}, (leaves["weight"], leaves["bias"])
    out, after, carry = recurrent.run(GRULayer.update, cell, tokens, matrices, carry, state, cu, who)  # type: ignore[arg-type]
    shown = {"out": out, "y": after.theta[0], **{f"last{n}": x for n, x in enumerate(carry)}}
    torch.manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, dtype=torch.float64)).sum() for x in shown.values())
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return shown | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


def compare(cell: Vector, length: int, width: int, units: int, dtype: torch.dtype, who: str, bound: float, cuts=None):
    torch.manual_seed(0)
    given = draw(cell, length, width, units, dtype, cuts is not None)
    cu = None if cuts is None else torch.tensor(cuts)
    want = results(cell, {n: x.double() for n, x in given.items()}, "reference", cu)
    got = results(cell, given, who, cu)
    for name, w in want.items():
        error = ((got[name] - w).norm() / max(w.norm().item(), 1e-3 * w.numel() ** 0.5)).item()
        assert error < bound, (cell, length, width, dtype, name, error)


@pytest.mark.parametrize("cell", (GRU(), SLSTM()), ids=("gru", "slstm"))
def test_torch_at_once_is_the_steps(cell: Vector) -> None:
    compare(cell, 7, 5, 3, torch.float64, "torch", 1e-12)
    compare(cell, 1, 1, 2, torch.float64, "torch", 1e-12)
    compare(cell, 9, 4, 4, torch.float64, "torch", 1e-12, cuts=[0, 3, 3, 4, 9])


def matrices(who: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], cuts: Any = None) -> dict[str, Any]:
    """A cell of matrices: what it gives and its gradients. sizes: tokens, keys, channels, sequences."""
    torch.manual_seed(0)
    (length, d_k, d_v, units), batch = sizes, 1 if cuts else sizes[3]
    shapes = {"q": (d_k,), "k": (d_k,), "v": (d_v,), "decay": ()}
    given = {n: torch.randn(batch, length, 2, *s, dtype=torch.float64) for n, s in shapes.items()}
    given["decay"] = -given["decay"].abs()
    given["weight"] = torch.randn(2, d_v, d_v, dtype=torch.float64) / d_v**0.5
    given["state"] = torch.randn(units, 2, d_v, d_k, dtype=torch.float64)
    short = {n: x.to(torch.float32 if n in ("decay", "state") else dtype) for n, x in given.items()}
    if who == "reference":
        short = {n: x.to(given[n]) for n, x in short.items()}
    leaves = {n: x.detach().requires_grad_() for n, x in short.items()}
    state = State((leaves["state"],), (), (), (), (), torch.zeros((), dtype=torch.int64))
    cu, cell = None if cuts is None else torch.tensor(cuts), M2RNN()
    tokens = {n: leaves[n] for n in shapes}
    out, after, _ = recurrent.run(M2RNNLayer.update, cell, tokens, (leaves["weight"],), (), state, cu, who)  # type: ignore[arg-type]
    shown = {"out": out, "last": after.theta[0]}
    loss = sum((x.double() * torch.randn(x.shape, dtype=torch.float64)).sum() for x in shown.values())
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return shown | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


def compare_matrices(who: str, dtype: torch.dtype, bound: float, sizes: Any, cuts: Any = None) -> None:
    want, got = matrices("reference", dtype, sizes, cuts), matrices(who, dtype, sizes, cuts)
    for name, w in want.items():
        error = ((got[name] - w).norm() / max(w.norm().item(), 1e-3 * w.numel() ** 0.5)).item()
        assert error < bound, (sizes, name, error)


def test_matrices_at_once_are_the_steps() -> None:
    compare_matrices("torch", torch.float64, 1e-6, (7, 3, 5, 2))  # state and decay were float32
    compare_matrices("torch", torch.float32, 3e-6, (9, 4, 2, 4), [0, 3, 3, 4, 9])


def test_the_kernel_of_matrices_is_the_steps() -> None:
    interpret("""
import torch
from axes.routes import recurrent
from tests.axes.test_kernels_recurrent import compare_matrices

recurrent.no_kernel = lambda *_: None
compare_matrices("triton", torch.float32, 3e-6, (19, 5, 20, 2))
compare_matrices("triton", torch.float16, 1e-2, (3, 16, 16, 1))
compare_matrices("triton", torch.float32, 3e-6, (37, 4, 3, 4), [0, 18, 18, 19, 37])
""")


@pytest.mark.parametrize("name", ("GRU", "SLSTM"))
def test_the_kernel_is_the_steps(name: str) -> None:
    if sys.platform != "linux":
        pytest.importorskip("triton")
    interpret(f"""
import torch
from axes.routes import recurrent
from axes.routes.cells import {name}
from tests.axes.test_kernels_recurrent import compare

recurrent.no_kernel = lambda *_: None
compare({name}(), 4, 20, 3, torch.float32, "triton", 3e-6)
compare({name}(), 1, 3, 17, torch.float32, "triton", 3e-6)
compare({name}(), 3, 16, 2, torch.float16, "triton", 4e-3)
compare({name}(), 7, 5, 4, torch.float32, "triton", 3e-6, cuts=[0, 3, 3, 4, 7])
""")


HELD = """
import torch
import triton.language as tl
from axes.kernels.recurrent import cells, hold, words
from axes.routes import recurrent
from axes.routes.cells import GRU, SLSTM
from tests.axes.test_kernels_recurrent import beside_torch, compare
from tests.gluon import stand_in

# the interpreter knows no instructions of Nvidia's
words.two = lambda a, b, kind: words.word(a.to(kind), b.to(kind), a.to(kind), a.to(kind)).to(tl.int32)
cells.power, cells.over, cells.log_2 = (lambda x: tl.exp2(x)), (lambda x: 1.0 / x), (lambda x: tl.log2(x))
held = stand_in("axes.kernels.recurrent.held")
launched = []
for name in ("forward", "backward"):
    setattr(held, name, type("Counted", (), {
        "__getitem__": lambda self, grid, kernel=getattr(held, name), name=name: launched.append(name) or kernel[grid]
    })())
recurrent.no_kernel, hold.fits = lambda *_: None, lambda x, cu: x.dtype in hold.DTYPES
"""


@pytest.mark.parametrize("name", ("GRU", "SLSTM"))
def test_matrices_in_registers_are_the_steps(name: str) -> None:
    """Odd numbers of tokens and sequences, heads that are padded, states before and after, sequences side by side. In
    float16: products of bfloat16 are wrong in the interpreter."""
    interpret(f"""{HELD}
for sizes in ((4, 20, 3), (1, 3, 17), (5, 16, 9), (2, 1, 1)):
    compare({name}(), *sizes, torch.float16, "triton", 4e-3)
compare({name}(), 9, 5, 5, torch.float16, "triton", 4e-3, cuts=[0, 3, 3, 4, 8, 9])
assert launched == ["forward", "backward"] * 5, launched
""")


def beside_torch(length: int, width: int, units: int, dtype: torch.dtype, bound: float) -> None:
    """Outputs and gradients of one head beside `torch.nn.GRU` in float64, whose second and first gate are ours."""
    torch.manual_seed(0)
    cell = GRU()
    given = draw(cell, length, width, units, dtype, heads=1)
    leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
    state = State((leaves["y"][..., None],), (), (), (), (), torch.zeros((), dtype=torch.int64))
    tokens, given_matrices = {"inputs": leaves["inputs"]}, (leaves["weight"], leaves["bias"])
    out, after, _ = recurrent.run(GRULayer.update, cell, tokens, given_matrices, (), state, None, "triton")
    peer = torch.nn.GRU(3 * width, width, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        peer.weight_ih_l0.copy_(torch.eye(3 * width))
        peer.bias_ih_l0.zero_()
        peer.weight_hh_l0.copy_(given["weight"][0].permute(1, 2, 0).reshape(3 * width, width))
        peer.bias_hh_l0.copy_(given["bias"][0].flatten())
    x, y = (leaves[n].detach().double().requires_grad_() for n in ("inputs", "y"))
    want, last = peer(x.flatten(2), y.transpose(0, 1))
    heard = torch.randn(want.shape, dtype=torch.float64)
    ours = [out[:, :, 0], after.theta[0][:, 0, :, 0]]
    ours += torch.autograd.grad((out[:, :, 0] * heard).sum() + after.theta[0].sum(), list(leaves.values()))
    theirs = [want, last[0]]
    found = torch.autograd.grad((want * heard).sum() + last.sum(), [x, peer.weight_hh_l0, peer.bias_hh_l0, y])
    weight = found[1].view(3, width, width).permute(2, 0, 1)[None]
    theirs += [found[0], weight, found[2].view(1, 3, width), found[3]]
    for mine, other in zip(ours, theirs, strict=True):
        assert ((mine - other).norm() / other.norm()).item() < bound, (mine.shape, (mine - other).norm() / other.norm())


def test_matrices_in_registers_are_torchs_gru() -> None:
    interpret(HELD + "beside_torch(11, 24, 5, torch.float16, 3e-3)\nassert launched == ['forward', 'backward']")


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"cell": "lstm"}, "gru, slstm"),
        ({"inputs": torch.zeros(2, 3, 1, 4, 8)}, r"\(B, T, H, 3, V <= 128\)"),
        ({"inputs": torch.zeros(2, 3, 1, 3, 8, dtype=torch.float64)}, "bf16, fp16 or fp32"),
        ({"weight": torch.zeros(1, 8, 8, 3)}, r"weight is floating point of shape \(1, 8, 3, 8\)"),
        ({"y": torch.zeros(1, 1, 8)}, r"y is floating point of shape \(2, 1, 8\)"),
        ({"carry": (torch.zeros(2, 1, 8),)}, "carries 0 tensors"),
    ),
)
def test_wrong_shapes_are_refused(change: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.kernels.common import layout
    from axes.kernels.recurrent import chain

    monkeypatch.setattr(layout, "interpreted", lambda: True)
    given: dict[str, Any] = {"cell": "gru", "inputs": torch.zeros(2, 3, 1, 3, 8), "weight": torch.zeros(1, 8, 3, 8)}
    given |= {"bias": torch.zeros(1, 3, 8), "y": torch.zeros(2, 1, 8)}
    with pytest.raises(ShapeError, match=says):
        chain.recurrent_chain(**given | change)
