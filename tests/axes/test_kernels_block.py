"""The block chain: the identities of its chunk form in float64, and its Triton kernels under Triton's interpreter.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
bfloat16 products are left to tests/gpu: the interpreter multiplies their bit patterns.
"""

from __future__ import annotations

import sys

import pytest
import torch

from axes.core.algorithms import Momentum, Step
from axes.core.chain import chain
from axes.core.costs import Ridge, SquaredError
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import ShapeError
from axes.routes.scan import sequential
from axes.sequence.titans import TitansMatrix
from tests.block_form import KINDS, chunk_form, draw, run
from tests.chains import block_chain as token_loop
from tests.interpreter import interpret

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

PROGRAM = r"""
import torch
from axes.kernels.block.chain import block_chain
from tests.block_form import by_sequence, draw, run
from tests.chains import block_chain as token_loop

NAMES = ("o", "final", "dq", "dk", "dv", "dblock", "dwrite", "derase", "dstate")

def check(length, d_k, d_v, dtype, kind, bound, offsets=None, **options):
    units = 1 if offsets is None else len(offsets) - 1
    inputs = draw(length, d_k, d_v, dtype, kind, b=1, units=units, **options)
    do, dfinal = torch.randn_like(inputs[2]), torch.randn(units, inputs[2].shape[2], d_v, 2, d_k)
    packing = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    got = run(block_chain, inputs, do, dfinal, **packing)
    exact = [None if x is None else x.double() for x in inputs]
    want = run(token_loop if offsets is None else by_sequence(token_loop, offsets), exact, do.double(), dfinal.double())
    for name, a, w in zip(NAMES, got, want):
        if w is not None:
            error = ((a - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
            print(length, d_k, d_v, dtype, kind, options, name, f"{error:.1e}")
            assert error < bound, (length, d_k, d_v, dtype, kind, options, name, error)

torch.manual_seed(0)
"""

CASES = {
    "full": """
for t in (1, 33): check(t, 16, 16, torch.float32, "titans", 3e-6)
check(40, 5, 20, torch.float32, "general", 3e-6, h=1, hv=2)
check(34, 16, 3, torch.float32, "singular", 3e-6, h=1, hv=1, erased=False, started=False)
check(70, 16, 16, torch.float32, "closed", 3e-6, offsets=[0, 1, 1, 36, 70], h=1, hv=1)
""",
    "half": """
check(66, 20, 7, torch.float16, "titans", 3e-3, h=1, hv=1)
check(5, 70, 66, torch.float16, "general", 3e-3, h=1, hv=1, erased=False)
""",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("erased", (True, False))
def test_the_chunk_form_is_the_token_loop(kind: str, erased: bool) -> None:
    torch.manual_seed(0)
    inputs = draw(37, 6, 5, torch.float64, kind, h=1, erased=erased)
    inputs = [None if x is None else x.double() for x in inputs]
    do, dfinal = torch.randn(2, 37, 2, 5, dtype=torch.float64), torch.randn(2, 2, 5, 2, 6, dtype=torch.float64)
    want = run(token_loop, inputs, do, dfinal)
    for size in (1, 16, 64):
        for a, w in zip(run(chunk_form, inputs, do, dfinal, size=size), want, strict=True):
            if w is not None:
                assert (a - w).norm() <= 1e-11 * (1 + w.norm())


_DECAY = Scalar("decay")
UPDATES = {
    "titans": TitansMatrix.update,
    "ungated": StateUpdate(SquaredError(), algorithm=Step(0.3, via=(Momentum(0.5, "sum"),))),
    "gated": StateUpdate(
        SquaredError(), monoid=_DECAY,
        algorithm=Step(Per("theta"), at="gated", via=(Momentum(0.9, "ema", nesterov=True),)),
    ),
    "ridge": StateUpdate(
        Ridge(SquaredError(), 0.1), monoid=_DECAY,
        algorithm=Step(Per("theta"), at="gated", via=(Momentum(0.5, "sum"),)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UPDATES)
def test_a_derived_chain_maps_onto_blocks(name: str) -> None:
    """M, w and e are the coefficients of the chain of a key that is the number one: keys only multiply them."""
    torch.manual_seed(0)
    (q, k), v = torch.randn(2, 2, 9, 4, dtype=torch.float64), torch.randn(2, 9, 3, dtype=torch.float64)
    decay, momentum, theta = torch.rand(3, 2, 9, dtype=torch.float64)
    signal = {"k": k, "v": v, "decay": -decay, "momentum": -momentum, "theta": theta}
    start = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    want, last = sequential(chain(UPDATES[name], signal), start, q)
    one = chain(UPDATES[name], {**signal, "k": torch.ones_like(k[..., :1])})
    assert one.block is not None and one.a is not None
    block, write, erase = one.block[..., 0], one.key[..., 0], one.a[..., 0, :, 0]
    shapes = ((2, 9, 2, 2), (2, 9, 2), (2, 9, 2))
    weights = [x.expand(shape)[:, :, None] for x, shape in zip((block, write, erase), shapes, strict=True)]
    o, final = token_loop(*(x[:, :, None] for x in (q, k, v)), *weights, start[:, None])
    assert (o[:, :, 0] - want).abs().max() < 1e-12
    assert (final[:, 0] - last).abs().max() < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_token_loop(case: str) -> None:
    interpret(PROGRAM + CASES[case])


def arguments() -> dict[str, torch.Tensor | None]:
    pair = torch.zeros(2, 3, 4, 2)
    return {
        "q": torch.zeros(2, 3, 2, 8), "k": torch.zeros(2, 3, 2, 8), "v": torch.zeros(2, 3, 4, 5),
        "block": torch.zeros(2, 3, 4, 2, 2), "write": pair, "erase": pair,
        "initial_state": torch.zeros(2, 4, 5, 2, 8),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"q": torch.zeros(2, 3, 8)}, r"\(B, T, H, D\)"),
        ({"k": torch.zeros(2, 3, 2, 7)}, "k has the shape of q"),
        ({"block": torch.zeros(2, 3, 4, 4)}, "block is floating point of shape"),
        ({"write": torch.zeros(2, 3, 4, 1)}, "write is floating point of shape"),
        ({"erase": torch.zeros(2, 3, 4, 3)}, "erase is floating point of shape"),
        ({"initial_state": torch.zeros(2, 4, 2, 5, 8)}, "initial_state is floating point of shape"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "batch size 1"),
        ({"erase": torch.zeros(2, 3, 4, 2, device="meta")}, "erase is on meta"),
    ),
)
def test_refuses(change: dict[str, torch.Tensor], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.kernels.block.chain import block_chain

    monkeypatch.setattr("axes.kernels.common.layout.interpreted", lambda: True)  # else the device is what is refused
    with pytest.raises(ShapeError, match=says):
        block_chain(**{**arguments(), **change})  # type: ignore[arg-type]


def test_needs_a_device() -> None:
    from axes.kernels.block.chain import block_chain

    with pytest.raises(ShapeError, match="need a CUDA device"):
        block_chain(**arguments())  # type: ignore[arg-type]


def test_no_tokens_leave_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.kernels.block.chain import block_chain

    monkeypatch.setattr("axes.kernels.common.layout.interpreted", lambda: True)
    inputs = draw(0, 8, 5, torch.float32)
    o, final = block_chain(*inputs)  # type: ignore[arg-type]
    assert o.shape == (2, 0, 2, 5)
    assert inputs[-1] is not None and torch.equal(final, inputs[-1])
