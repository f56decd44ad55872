"""Every kernel compiled for sm_90 without a GPU, as the entries launch it: registers, spills, use of wgmma.

`PYTHONPATH=. python tests/axes/test_kernels_compile.py` prints the table below anew. Spills cost bandwidth, not
correctness; a number here may sink, and grows only on purpose. The counts are of Triton 3.6.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import triton  # on Linux its absence is an error, not a reason to skip

from axes.kernels.attention.attend import attend
from axes.kernels.attention.decode import attend_one
from axes.kernels.attention.turn import turn
from axes.kernels.block import chain as block_module
from axes.kernels.block.chain import block_chain
from axes.kernels.diagonal import hopper as hopper_diagonal
from axes.kernels.diagonal.chain import diagonal_chain
from axes.kernels.diagonal_delta import hopper as hopper_diagonal_delta
from axes.kernels.products import hopper_symmetric
from axes.kernels.products.outer import outer_sum
from axes.kernels.products.symmetric import symmetric_product
from axes.kernels.scalar import chain as scalar_module
from axes.kernels.scalar import hopper_write
from axes.kernels.scalar.chain import scalar_chain
from axes.kernels.step import block_step, chain_step
from axes.optim import AdamW
from tests.barriers import not_ended
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
        fits = patch.object(hopper_write, "fits", lambda *_: plain)
        with patch.object(scalar_module, "_plain", lambda *_: plain), fits:
            both(scalar_chain(q, k, v, beta, g, **options))  # type: ignore[arg-type]

    return run


def diagonal(
    dtype: torch.dtype, d: int, rule: str, plain: bool = False, strong: bool = True, cuts: int = 1
) -> Callable[[], None]:
    def run() -> None:
        q, k, v, beta, _ = tokens(dtype, d, d)
        g = (-torch.rand(2, 256, 2, d)).requires_grad_()
        more = {"a": k, "b": q} if rule == "dplr" else {}
        cut = patch.object(hopper_diagonal, "segments_of", lambda *_: cuts)
        reads = patch.object(hopper_diagonal_delta, "fits", lambda *_: plain)
        with patch.object(hopper_write, "fits", lambda *_: plain), cut, reads:
            both(diagonal_chain(q, k, v, g, beta if strong and rule != "dplr" else None, rule=rule, **more))  # type: ignore[arg-type]

    return run


def block(dtype: torch.dtype, d: int) -> Callable[[], None]:
    def run() -> None:
        q, k, v, _, _ = tokens(dtype, d, d)
        coefficients = [torch.rand(2, 256, 2, *s, requires_grad=True) for s in ((2, 2), (2,), (2,))]
        both(block_chain(q, k, v, *coefficients))

    return run


def attention(dtype: torch.dtype, d: int, masses: bool = True) -> Callable[[], None]:
    def run() -> None:
        q, k, v = (torch.randn(2, 256, 2, d, dtype=dtype, requires_grad=True) for _ in range(3))
        mass = torch.zeros(2, 256, 2, dtype=torch.float64, requires_grad=True) if masses else None
        attend(q, k, v, mass, scale=0.1).sum().backward()

    return run


def one_query() -> None:
    k, v = (torch.randn(2, 500, 2, 128, dtype=HALF) for _ in range(2))
    attend_one(torch.randn(2, 1, 8, 128, dtype=HALF), k, v, torch.zeros(2, 2, 500), 0.1)


def turned() -> None:
    turn(*(torch.randn(2, 256, 2, 128, dtype=HALF) for _ in range(2)), torch.rand(256, 64))


def steps() -> None:
    q, k, v, beta, g = (x.detach()[:, 0] for x in tokens(HALF, 128, 128))
    chain_step(torch.zeros(2, 2, 128, 128), q, k, v, beta=beta, g=g, rule="delta")
    two = torch.zeros(2, 2, 128, 2, 128)
    block_step(two, q, k, v, torch.rand(2, 2, 2, 2), torch.rand(2, 2, 2), torch.rand(2, 2, 2))


def sums() -> None:
    outer_sum(torch.randn(1, 512, 256, dtype=HALF))


def symmetric(plain: bool) -> Callable[[], None]:
    """Every form: no, one and two terms; by columns; results and factors in float32; numbers for each matrix."""

    def run() -> None:
        x, full = torch.randn(2, 256, 512).half(), torch.randn(2, 256, 256)
        gram = full.half()
        fits = patch.object(hopper_symmetric, "fits", lambda _: plain)
        with fits, patch.object(hopper_symmetric, "_processors", lambda _: 132):
            symmetric_product(x)
            symmetric_product(gram, x[..., :256].contiguous(), terms=((0.5, gram),), diagonal=1.0)
            symmetric_product(gram, terms=((0.5, gram), (2.0, gram)))
            symmetric_product(x.mT.contiguous().mT, dtype=FULL, terms=((0.5, full),))
            if plain:
                symmetric_product(full, terms=((0.5, full),), factors=torch.ones(2, 2))

    return run


def adamw(dtype: torch.dtype, **options: Any) -> Callable[[], None]:
    def run() -> None:
        parameters = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in (10_000, 77)]
        for p in parameters:
            p.grad = torch.randn_like(p)
        AdamW(parameters, fused=True, **options).step()

    return run


CASES: dict[str, Callable[[], None]] = {
    "hopper 128": scalar(HALF, 128, plain=True, rule="delta"),
    "hopper 64": scalar(HALF, 64, plain=True, rule="delta"),
    "hopper segments": scalar(HALF, 128, plain=True, rule="delta", segments=2),
    "delta 128": scalar(HALF, 128, rule="delta"),
    "delta 256": scalar(HALF, 256, rule="delta"),
    "delta 64 float32": scalar(FULL, 64, rule="delta"),
    "delta segments": scalar(HALF, 128, rule="delta", segments=2),
    "hopper write 128": scalar(HALF, 128, plain=True, rule="write"),
    "hopper write 64": scalar(HALF, 64, plain=True, rule="write"),
    "write 128": scalar(HALF, 128, rule="write"),
    "hopper diagonal 128": diagonal(HALF, 128, "write", plain=True, strong=False),
    "hopper diagonal segments": diagonal(HALF, 128, "write", plain=True, strong=False, cuts=2),
    "diagonal 128": diagonal(HALF, 128, "write"),
    "hopper diagonal delta 128": diagonal(HALF, 128, "delta", plain=True),
    "diagonal delta 128": diagonal(HALF, 128, "delta"),
    "hopper dplr 128": diagonal(HALF, 128, "dplr", plain=True),
    "dplr 128": diagonal(HALF, 128, "dplr"),
    "block 128": block(HALF, 128),
    "attention 128": attention(HALF, 128),
    "attention 64": attention(HALF, 64),
    "attention 256": attention(HALF, 256),
    "plain attention 128": attention(HALF, 128, masses=False),
    "attention 64 float32": attention(FULL, 64),
    "one query": one_query,
    "turn": turned,
    "step": steps,
    "outer": sums,
    "hopper symmetric": symmetric(plain=True),
    "symmetric": symmetric(plain=False),
    "adamw": adamw(FULL),
    "adamw 24 bit, 8 bit": adamw(HALF, master="24bit", moments="8bit"),
    "adamw at random": adamw(HALF, rounding="stochastic"),
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
        ("_chain", 128, 16, True),
        ("_states", 255, 0, True),
        ("_gradients", 168, 0, True),
    ),
    "hopper 64": (
        ("_prepare", 128, 0, True),
        ("_chain", 80, 0, True),
        ("_states", 179, 0, True),
        ("_gradients", 255, 0, True),
    ),
    "hopper segments": (
        ("_prepare", 128, 0, True),
        ("spans", 24, 0, False),
        ("scan", 233, 0, True),
        ("merge", 192, 0, False),
        ("_chain", 128, 136, True),
        ("reverse", 255, 0, True),
        ("merge", 192, 0, False),
        ("_states", 255, 0, True),
        ("_gradients", 168, 0, True),
    ),
    "delta 128": (
        ("prepare", 255, 0, False),
        ("scan", 255, 16, True),
        ("scan", 255, 8, True),
        ("reverse", 255, 160, True),
        ("gradients", 255, 56, True),
    ),
    "delta 256": (
        ("prepare", 255, 568, False),
        ("scan", 255, 0, True),
        ("scan", 250, 0, True),
        ("reverse", 255, 312, True),
        ("gradients", 255, 672, True),
    ),
    "delta 64 float32": (
        ("prepare", 169, 0, False),
        ("scan", 255, 448, False),
        ("scan", 255, 264, False),
        ("reverse", 255, 328, False),
        ("gradients", 255, 48, False),
    ),
    "delta segments": (
        ("prepare", 255, 8, False),
        ("spans", 24, 0, False),
        ("scan", 232, 0, True),
        ("merge", 192, 0, False),
        ("scan", 255, 96, True),
        ("scan", 255, 8, True),
        ("reverse", 255, 0, True),
        ("merge", 192, 0, False),
        ("reverse", 255, 160, True),
        ("gradients", 255, 56, True),
    ),
    "hopper write 128": (
        ("_numbers", 26, 0, False),
        ("_mix", 128, 8, True),
        ("_numbers", 26, 0, False),
        ("_mix", 128, 0, True),
        ("_mix", 128, 64, True),
        ("_mix", 128, 32, True),
    ),
    "hopper write 64": (
        ("_numbers", 26, 0, False),
        ("_mix", 80, 8, True),
        ("_numbers", 26, 0, False),
        ("_mix", 80, 0, True),
        ("_mix", 80, 48, True),
        ("_mix", 80, 48, True),
    ),
    "write 128": (
        ("cumulate", 20, 0, False),
        ("mix", 255, 80, True),
        ("mix", 255, 256, True),
        ("mix", 255, 200, True),
        ("mix", 255, 432, True),
    ),
    "hopper diagonal 128": (
        ("_chain", 128, 0, True),
        ("_outputs", 255, 32, True),
        ("_chain", 128, 0, True),
        ("_chain", 128, 8, True),
        ("_keys", 237, 0, True),
        ("_keys", 255, 1088, True),
    ),
    "hopper diagonal segments": (
        ("_chain", 128, 0, True),
        ("_merge", 64, 0, False),
        ("_chain", 128, 0, True),
        ("_outputs", 255, 32, True),
        ("_chain", 128, 0, True),
        ("_merge", 64, 0, False),
        ("_chain", 128, 0, True),
        ("_chain", 128, 0, True),
        ("_merge", 64, 0, False),
        ("_chain", 128, 8, True),
        ("_keys", 237, 0, True),
        ("_keys", 255, 1088, True),
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
    "hopper diagonal delta 128": (
        ("_prepare", 255, 0, True),
        ("_prepare_closed", 255, 48, True),
        ("_solve", 168, 0, False),
        ("_walk", 168, 0, True),
        ("_prepare", 127, 0, True),
        ("_walk", 168, 0, True),
        ("_walk", 168, 0, True),
        ("_tokens", 255, 160, True),
        ("_gradients", 255, 728, True),
    ),
    "diagonal delta 128": (
        ("_prepare", 255, 0, True),
        ("_prepare_closed", 255, 48, True),
        ("_solve", 168, 0, False),
        ("_scan", 255, 72, True),
        ("_prepare", 127, 0, True),
        ("_scan", 252, 0, True),
        ("_reverse", 255, 128, True),
        ("_gradients", 255, 312, True),
        ("_gradients", 255, 728, True),
    ),
    "hopper dplr 128": (
        ("_prepare", 255, 448, True),
        ("_prepare_closed", 255, 760, True),
        ("_solve", 168, 0, False),
        ("_walk", 168, 96, True),
        ("_prepare", 184, 0, True),
        ("_walk", 168, 0, True),
        ("_walk", 168, 64, True),
        ("_gradients", 255, 1208, True),
        ("_gradients", 255, 1584, True),
    ),
    "dplr 128": (
        ("_prepare", 255, 448, True),
        ("_prepare_closed", 255, 760, True),
        ("_solve", 168, 0, False),
        ("_scan", 255, 368, True),
        ("_prepare", 184, 0, True),
        ("_scan", 255, 72, True),
        ("_reverse", 255, 368, True),
        ("_gradients", 255, 1208, True),
        ("_gradients", 255, 1584, True),
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
    "hopper symmetric": (
        ("_symmetric", 128, 0, True),
        ("_symmetric", 128, 0, True),
        ("_symmetric", 128, 0, True),
        ("_symmetric", 128, 80, True),
        ("_symmetric", 128, 80, True),
    ),
    "symmetric": (
        ("_symmetric", 180, 0, True),
        ("_symmetric", 184, 0, True),
        ("_symmetric", 241, 0, True),
        ("_symmetric", 223, 0, True),
    ),
    "adamw": (("advance", 37, 0, False), ("step", 63, 0, False)),
    "adamw 24 bit, 8 bit": (("advance", 37, 0, False), ("step", 56, 0, False)),
    "adamw at random": (("advance", 37, 0, False), ("step", 96, 0, False)),
}


@pytest.mark.parametrize("name", CASES)
def test_registers_spills_and_wgmma(name: str) -> None:
    launches = compiled(name)
    assert launches
    for launch in launches:
        assert launch.shared <= 232448, launch  # what a program can have on an H100 or H200
        assert launch.registers <= 255
        assert not launch.overwritten and not launch.barriers, launch
    if triton.__version__ != "3.6.0":
        return
    found, pinned = rows(launches), PINNED[name]
    assert [x[0] for x in found] == [x[0] for x in pinned]
    for now, before in zip(found, pinned, strict=True):
        assert now[1] <= before[1] + 8 and now[2] <= before[2] and now[3] >= before[3], (now, before)


def test_an_operand_that_a_copy_overwrites_is_found() -> None:
    """The launch that gave other bits at every run on a full chip."""
    if triton.__version__ != "3.6.0":
        pytest.skip("a fault of Triton 3.6.0")
    with patch.dict(block_module._LAUNCH, {"gradients": ((64, 64, 8, 2),) * 3}):
        found = {x.kernel for x in compiled("block 128") if x.overwritten}
    assert found == {"_gradients"}


def test_a_barrier_that_is_never_invalidated_is_found() -> None:
    text = """
    %filled = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared3, #smem, mutable>
    %done = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared3, #smem, mutable>
    %0 = ttg.memdesc_index %filled[%c0_i32] : !ttg.memdesc<2x1xi64, #shared3, #smem, mutable>
    ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64, #shared3, #smem, mutable>
    ttng.init_barrier %done, 1 : !ttg.memdesc<1xi64, #shared3, #smem, mutable>
    ttng.inval_barrier %done : !ttg.memdesc<1xi64, #shared3, #smem, mutable>
    """
    assert not_ended(text) == ["filled"]


if __name__ == "__main__":
    print("PINNED: dict[str, tuple[tuple[str, int, int, bool], ...]] = {")
    for case in CASES:
        print(f'    "{case}": (')
        for row in rows(compiled(case)):
            print(f"        {row},".replace("'", '"'))
        print("    ),")
    print("}")
