"""Every kernel compiled for sm_90 without a GPU, as the entries launch it: registers, spills, use of wgmma.

`PYTHONPATH=. python tests/axes/test_kernels_compile.py` prints the table below anew. Spills cost bandwidth, not
correctness; a number here may sink, and grows only on purpose. The counts are of Triton 3.6.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import triton  # on Linux its absence is an error, not a reason to skip

from axes.elementwise.fused import Fused
from axes.kernels import scalar as scalar_module
from axes.kernels.block import block_chain
from axes.kernels.diagonal import diagonal_chain
from axes.kernels.outer import outer_sum
from axes.kernels.scalar import scalar_chain
from axes.kernels.step import block_step, chain_step
from axes.optim import AdamW
from axes.optim.together import program
from tests.hopper import Launch, hopper

HALF, FULL = torch.bfloat16, torch.float32


def tokens(dtype: torch.dtype, d_k: int, d_v: int, length: int = 256) -> tuple[Tensor, ...]:
    q, k = (torch.randn(2, length, 2, d_k, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.randn(2, length, 2, d_v, dtype=dtype, requires_grad=True)
    beta = torch.rand(2, length, 2, requires_grad=True)
    return q, k, v, beta, -beta.detach().requires_grad_()


def both(outputs: tuple[Tensor, ...]) -> None:
    """Forward has been launched: launch the backward."""
    sum(o.float().sum() for o in outputs).backward()  # type: ignore[union-attr]


def scalar(dtype: torch.dtype, d: int, plain: bool = False, **options: object) -> Callable[[], None]:
    def run() -> None:
        q, k, v, beta, g = tokens(dtype, d, d)
        with patch.object(scalar_module, "_plain", lambda x: plain):
            both(scalar_chain(q, k, v, beta, g, **options))  # type: ignore[arg-type]

    return run


def diagonal(dtype: torch.dtype, d: int, rule: str) -> Callable[[], None]:
    def run() -> None:
        q, k, v, beta, _ = tokens(dtype, d, d)
        g = (-torch.rand(2, 256, 2, d)).requires_grad_()
        more = {"a": k, "b": q} if rule == "dplr" else {}
        both(diagonal_chain(q, k, v, g, None if rule == "dplr" else beta, rule=rule, **more))  # type: ignore[arg-type]

    return run


def block(dtype: torch.dtype, d: int) -> Callable[[], None]:
    def run() -> None:
        q, k, v, _, _ = tokens(dtype, d, d)
        coefficients = [torch.rand(2, 256, 2, *s, requires_grad=True) for s in ((2, 2), (2,), (2,))]
        both(block_chain(q, k, v, *coefficients))

    return run


def steps() -> None:
    q, k, v, beta, g = (x.detach()[:, 0] for x in tokens(HALF, 128, 128))
    chain_step(torch.zeros(2, 2, 128, 128), q, k, v, beta=beta, g=g, rule="delta")
    two = torch.zeros(2, 2, 128, 2, 128)
    block_step(two, q, k, v, torch.rand(2, 2, 2, 2), torch.rand(2, 2, 2), torch.rand(2, 2, 2))


def sums() -> None:
    outer_sum(torch.randn(1, 512, 256, dtype=HALF))


def adamw() -> None:
    traced = program(AdamW.update.normal())
    assert traced is not None
    names = [traced.names[i] for i, op in enumerate(traced.operations) if op.name == "input" and op.shaped]
    tensors = {n: [torch.randn(10_000), torch.randn(77)] for n in names}
    Fused(traced, names, tensors).step(tensors["g"], traced.numbers(dict.fromkeys(traced.names.values(), 0.5)))


CASES: dict[str, Callable[[], None]] = {
    "hopper 128": scalar(HALF, 128, plain=True, rule="delta"),
    "hopper 64": scalar(HALF, 64, plain=True, rule="delta"),
    "delta 128": scalar(HALF, 128, rule="delta"),
    "delta 256": scalar(HALF, 256, rule="delta"),
    "delta 64 float32": scalar(FULL, 64, rule="delta"),
    "delta segments": scalar(HALF, 128, rule="delta", segments=2),
    "write 128": scalar(HALF, 128, rule="write"),
    "diagonal 128": diagonal(HALF, 128, "write"),
    "diagonal delta 128": diagonal(HALF, 128, "delta"),
    "dplr 128": diagonal(HALF, 128, "dplr"),
    "block 128": block(HALF, 128),
    "step": steps,
    "outer": sums,
    "adamw": adamw,
}


def compiled(name: str) -> list[Launch]:
    with hopper() as launches:
        CASES[name]()
    return launches


def rows(launches: list[Launch]) -> tuple[tuple[str, int, int, bool], ...]:
    return tuple((x.kernel, x.registers, x.spills, x.wgmma > 0) for x in launches)


# (kernel, registers, bytes of stack, whether wgmma) of every launch, in order
PINNED: dict[str, tuple[tuple[str, int, int, bool], ...]] = {
    "hopper 128": (
        ("_prepare", 128, 0, True),
        ("_chain", 128, 8, True),
        ("_states", 255, 0, True),
        ("_gradients", 168, 0, True),
    ),
    "hopper 64": (
        ("_prepare", 128, 0, True),
        ("_chain", 80, 0, True),
        ("_states", 168, 0, True),
        ("_gradients", 255, 0, True),
    ),
    "delta 128": (
        ("prepare", 255, 0, False),
        ("scan", 255, 16, True),
        ("scan", 255, 8, True),
        ("reverse", 255, 160, True),
        ("gradients", 255, 40, True),
    ),
    "delta 256": (
        ("prepare", 255, 568, False),
        ("scan", 255, 0, True),
        ("scan", 250, 0, True),
        ("reverse", 255, 312, True),
        ("gradients", 255, 720, True),
    ),
    "delta 64 float32": (
        ("prepare", 169, 0, False),
        ("scan", 255, 448, False),
        ("scan", 255, 264, False),
        ("reverse", 255, 328, False),
        ("gradients", 255, 48, False),
    ),
    "delta segments": (
        ("prepare", 255, 0, False),
        ("scan", 233, 0, True),
        ("merge", 168, 0, False),
        ("scan", 255, 96, True),
        ("scan", 255, 8, True),
        ("reverse", 255, 0, True),
        ("merge", 168, 0, False),
        ("reverse", 255, 160, True),
        ("gradients", 255, 40, True),
    ),
    "write 128": (
        ("cumulate", 20, 0, False),
        ("mix", 255, 80, True),
        ("mix", 255, 256, True),
        ("mix", 255, 200, True),
        ("mix", 255, 432, True),
    ),
    "diagonal 128": (
        ("_pass", 255, 192, True),
        ("_outputs", 255, 0, True),
        ("_outputs", 255, 288, True),
        ("_pass", 255, 192, True),
        ("_pass", 252, 0, True),
        ("_values", 247, 0, True),
        ("_keys", 255, 304, True),
        ("_keys", 255, 1088, True),
    ),
    "diagonal delta 128": (
        ("_prepare", 255, 32, True),
        ("_prepare_closed", 255, 48, True),
        ("_solve", 168, 0, False),
        ("_scan", 255, 24, True),
        ("_prepare", 128, 0, True),
        ("_scan", 255, 0, True),
        ("_reverse", 255, 240, True),
        ("_pairs_backward", 157, 0, True),
        ("_gradients", 255, 528, True),
        ("_gradients", 255, 720, True),
    ),
    "dplr 128": (
        ("_prepare", 255, 552, True),
        ("_prepare_closed", 255, 760, True),
        ("_solve", 168, 0, False),
        ("_scan", 255, 368, True),
        ("_prepare", 184, 0, True),
        ("_scan", 255, 32, True),
        ("_reverse", 255, 464, True),
        ("_pairs_backward", 243, 0, True),
        ("_gradients", 255, 1136, True),
        ("_gradients", 255, 1824, True),
    ),
    "block 128": (
        ("_recurrence", 44, 0, False),
        ("_prepare", 164, 0, True),
        ("_scan", 255, 32, True),
        ("_recurrence", 44, 0, False),
        ("_scan", 255, 96, True),
        ("_reverse", 255, 296, True),
        ("_pairs", 190, 0, True),
        ("_gradients", 242, 0, True),
        ("_adjoint", 64, 0, False),
    ),
    "step": (
        ("_chain", 48, 0, False),
        ("_block", 80, 0, False),
    ),
    "outer": (("_outer", 95, 0, True),),
    "adamw": (("step", 188, 0, False),),
}


@pytest.mark.parametrize("name", CASES)
def test_registers_spills_and_wgmma(name: str) -> None:
    launches = compiled(name)
    assert launches
    for launch in launches:
        assert launch.shared <= 232448, launch  # what a program can have on an H100 or H200
        assert launch.registers <= 255
    if triton.__version__ != "3.6.0":
        return
    found, pinned = rows(launches), PINNED[name]
    assert [x[0] for x in found] == [x[0] for x in pinned]
    for now, before in zip(found, pinned, strict=True):
        assert now[1] <= before[1] + 8 and now[2] <= before[2] and now[3] >= before[3], (now, before)


if __name__ == "__main__":
    print("PINNED: dict[str, tuple[tuple[str, int, int, bool], ...]] = {")
    for case in CASES:
        print(f'    "{case}": (')
        for row in rows(compiled(case)):
            print(f"        {row},".replace("'", '"'))
        print("    ),")
    print("}")
