"""Kernels as operators of torch, under Triton's interpreter: what compilers are told of them holds, eager calls skip
the dispatcher and give the same bits, and a derivative that is not there says so.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
"""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from tests.interpreter import interpret

PROGRAM = r"""
import torch
from unittest.mock import patch
from torch.library import opcheck
from axes.kernels.attention import attend, transport, turn
from axes.kernels import step
from axes.kernels.block import chain as block
from axes.kernels.diagonal import chain as diagonal, rows
from axes.kernels.levels import chain as levels, inside
from axes.kernels.diagonal_delta import chain as diagonal_delta
from axes.kernels.products import outer
from axes.kernels.entries import modes
from axes.kernels.scalar import chain as scalar, mass
from axes.kernels.streams import mix

torch.manual_seed(0)
CU = torch.tensor([0, 1, 20])

def given(module, entry, *args, name="_chain", **options):
    '''The operator that an entry calls, and what it is given.'''
    class Called(Exception):
        pass
    def called(*inputs):
        raise Called(inputs)
    of = getattr(module, name)
    with patch.object(module, name, called):
        try:
            entry(*args, **options)
        except Called as call:
            (inputs,) = call.args
    return of, [x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x for x in inputs]

def free(inputs):
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]

def check_fakes(of, inputs):
    '''What compilers think that comes back is what comes back.'''
    opcheck(of.operator, (*inputs, True), test_utils=("test_schema", "test_faketensor"))
    *outputs, kept = of.forward(*inputs, True)
    grads = [torch.randn_like(x) for x in outputs]
    if not of.twice:
        opcheck(of.reverse, (*free(inputs), [*free(outputs[:of.reads]), *kept], *grads), test_utils="test_faketensor")
    return outputs, grads

def check(of, inputs):
    leaves = [x for x in inputs[:of.gradients] if isinstance(x, torch.Tensor) and x.requires_grad]
    outputs, grads = check_fakes(of, inputs)
    opcheck(of.operator, (*inputs, False), test_utils="test_faketensor")
    *seen, _ = of.operator(*inputs, True)
    eager, plain = of(*inputs), of(*free(inputs))
    for x, y, z in zip(eager, seen, plain, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z) and x.requires_grad and not z.requires_grad
    want = torch.autograd.grad(seen, leaves, grads)
    found = torch.autograd.grad(eager, leaves, grads, create_graph=True)
    assert all(torch.equal(x, y) and x.shape == z.shape for x, y, z in zip(found, want, leaves, strict=True))
    if of.twice:
        along = [x.requires_grad_() for x in grads]  # a linear operator has no other second derivative
        found = torch.autograd.grad(of(*inputs), leaves, along, create_graph=True)
        second = torch.autograd.grad(found[0].sum(), [*leaves, *along], allow_unused=True)
        assert any(x is not None and x.abs().sum() > 0 for x in second)
        return
    alone = torch.autograd.grad(of(*inputs)[0], leaves, grads[0])  # the other gradient did not come
    rest = [torch.zeros_like(x) for x in grads[1:]]
    want = torch.autograd.grad(eager, leaves, [grads[0], *rest], retain_graph=True)
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(alone, want, strict=True))
    try:
        torch.autograd.grad(found[0].sum(), leaves)
    except RuntimeError as error:
        assert "no autograd formula" in str(error), error
    else:
        raise AssertionError("a second derivative that no kernel computes")

def tokens(batch=1, t=20, heads=1, value_heads=2):
    q, k = (torch.randn(batch, t, heads, 16) for _ in range(2))
    v, gate = torch.randn(batch, t, value_heads, 16), torch.rand(batch, t, value_heads)
    return q, k, v, gate, torch.randn(batch, value_heads, 16, 16)
"""

CASES = {
    "scalar": """
q, k, v, gate, start = tokens(t=40)
check(*given(scalar, scalar.scalar_chain, q, k, v, gate, -gate, initial_state=start, segments=2))
check_fakes(*given(scalar, scalar.scalar_chain, q, k, v, gate, erase=k))
check_fakes(*given(scalar, scalar.scalar_chain, q, k, v, gate, -gate, rule="write", segments=2))
q, k, v, gate, _ = tokens()
two = torch.randn(2, 2, 16, 16)
check_fakes(*given(scalar, scalar.scalar_chain, q, k, v, gate, -gate, initial_state=two, cu_seqlens=CU))
check(*given(scalar, scalar.scalar_chain, q[:, :0], k[:, :0], v[:, :0], gate[:, :0], initial_state=start))
""",
    "diagonal": """
q, k, v, gate, start = tokens()
g = -torch.rand(1, 20, 2, 16)
check(*given(diagonal, diagonal.diagonal_chain, q, k, v, g, gate, initial_state=start))
check_fakes(*given(diagonal, diagonal.diagonal_chain, q, k, v, g, cu_seqlens=CU))
check(*given(diagonal, diagonal.diagonal_chain, q, k, v, g, bonus=torch.randn(2, 16)))
""",
    "modes": """
q, k, v, gate, start = tokens()
one, angle = q[..., :1], torch.randn(1, 20, 2, 8)
check(*given(modes, modes.modes_chain, one, one, v, -angle.abs(), angle, start[..., :1]))
check_fakes(*given(modes, modes.modes_chain, one, one, v, -angle.abs()[0, 0], angle[0, 0], cu_seqlens=CU))
""",
    "mass": """
q, k, v, gate, start = tokens()
check_fakes(*given(mass, mass.mass_chain, q, k, v, gate, -gate, start[:, :, 0]))
check_fakes(*given(mass, mass.mass_chain, q, k, v, cu_seqlens=CU))
""",
    "rows": """
q, k, v, gate, start = tokens(heads=2)
g = -torch.rand(1, 20, 2, 16)
check(*given(rows, rows.rows_chain, q, k, v, g, start))
check_fakes(*given(rows, rows.rows_chain, q, k, v, g, cu_seqlens=CU))
""",
    "levels": """
q, k, v, gate, start = tokens(t=70)
w = torch.rand(1, 70, 2, 8)
check(*given(levels, levels.levels_chain, q, k, v, gate, -gate, w))
check_fakes(*given(levels, levels.levels_chain, q, k, v, None, None, w))
check(*given(inside, inside.levels_inside, q, k, k, v, -gate, w, name="_inside"))
""",
    "diagonal delta": """
q, k, v, gate, start = tokens()
g = -torch.rand(1, 20, 2, 16)
check(*given(diagonal_delta, diagonal.diagonal_chain, q, k, v, g, gate, rule="delta", initial_state=start))
check_fakes(*given(diagonal_delta, diagonal.diagonal_chain, q, k, v, g, rule="dplr", a=k, b=q, cu_seqlens=CU))
""",
    "block": """
q, k, v, _, _ = tokens()
mix, write, erase = (torch.rand(1, 20, 2, *s) for s in ((2, 2), (2,), (2,)))
check(*given(block, block.block_chain, q, k, v, mix, write, erase, torch.randn(1, 2, 16, 2, 16)))
check_fakes(*given(block, block.block_chain, q, k, v, mix, write, cu_seqlens=CU))
""",
    "attention": """
q, k, v, gate, _ = tokens(heads=2)
check(*given(attend, attend.attend, q, k, v, gate.double(), name="_attend", scale=0.3))
views = q[:, :, ::2], k[:, :, :1], v[:, :, :1]
check_fakes(*given(attend, attend.attend, *views, name="_attend", scale=0.3, cu_seqlens=CU))
check(*given(transport, transport.transport, q, k, v, -k / 16, k, gate.double(), name="_transport", scale=0.3))
check(*given(turn, turn.turn, q, k, torch.rand(20, 8), name="_turned"))
angle = torch.rand(*q.shape[:-1], q.shape[-1] // 2)
check(*given(turn, turn.turn_rows, q, angle, angle.cos(), angle.sin(), -1.0, torch.float32, name="_turned_rows"))
""",
    "streams": """
x, y, w = torch.randn(5, 3, 8), torch.randn(5, 8), torch.rand(5, 3)
check(*given(mix, mix.mix_write, x, y, w, name="_writes"))  # whose gradient of x is the one that it is given
check(*given(mix, mix.mix_write, x, y, w, torch.rand(5, 3, 3), name="_writes"))
""",
    "outer": """
u, k, w = torch.randn(2, 20, 5), torch.randn(2, 20, 7), torch.rand(2, 20)
check(*given(outer, outer.outer_sum, u, name="_sum"))
check(*given(outer, outer.outer_sum, u, k, w, torch.randn(2, 5, 7), torch.rand(2), name="_sum"))
""",
    "step": """
q, k, v, gate = (x[:, 0] for x in tokens()[:4])
two, mix, write = torch.randn(1, 2, 16, 2, 16), torch.rand(1, 2, 2, 2), torch.rand(1, 2, 2)
for name, entry, args, options in (
    ("chain", step.chain_step, (two[:, :, :, 0].contiguous(), q, k, v), dict(beta=gate, g=-gate, rule="delta")),
    ("block", step.block_step, (two, q, k, v, mix, write), {}),
):
    run, inputs = given(step, entry, *args, name=f"_{name}_once", **options)
    opcheck(getattr(torch.ops.axes, f"{name}_step"), free(inputs), test_utils=("test_schema", "test_faketensor"))
""",
}


@pytest.mark.parametrize("case", CASES)
def test_operators(case: str) -> None:
    interpret(PROGRAM + CASES[case])
