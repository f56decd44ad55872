"""Rows that turn by kernels, under Triton's interpreter: the turn against float64, and S5 in 16 bits, whose angles hear
a long sum of differences.

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
from axes.kernels.common import versions
versions.refusal = lambda device: None

torch.manual_seed(0)
torch.set_num_threads(1)

def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()

def compare(got, want, bound):
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert error(a, b) < bound, (n, error(a, b))
"""
CASES = {
    "turn": """
from axes.kernels.attention.turn import turn_rows

def plain(x, angle, sign):
    (a, b), c, s = x.chunk(2, -1), torch.cos(angle), torch.sin(sign * angle)
    return torch.cat((a * c - b * s, a * s + b * c), -1)

full, half = torch.float32, torch.bfloat16
for shape in ((2, 5, 3, 8), (40, 1, 6), (1, 1, 2)):
    for taken, made, bound in ((full, full, 1e-6), (half, full, 5e-3), (full, half, 5e-3), (half, half, 9e-3)):
        for sign in (1.0, -1.0):
            x, angle = torch.randn(shape).to(taken), 9 * torch.randn(*shape[:-1], shape[-1] // 2)
            leaves = [x.requires_grad_(), angle.requires_grad_()]
            y = turn_rows(x, angle, angle.detach().cos(), angle.detach().sin(), sign, made)
            assert y.dtype == made and y.shape == x.shape
            dy = torch.randn(shape).to(made)
            got = [y, *torch.autograd.grad(y, leaves, dy)]
            wide = [z.detach().double().requires_grad_() for z in leaves]
            want = plain(*wide, sign)
            compare(got, [want, *torch.autograd.grad(want, wide, dy.double())], bound)
            assert got[1].dtype == taken and got[2].dtype == full
""",
    "s5": """
from axes.core import reference
from axes.routes import dispatch
from axes.sequence import S5

B, T, H, D = 1, 150, 1, 8
given = dict(q=torch.ones(B, T, H, 1), k=torch.ones(B, T, H, 1), v=torch.randn(B, T, H, D))
given |= dict(decay=-0.03 * torch.rand(B, T, H, D // 2), angle=torch.randn(B, T, H, D // 2))
given = {n: x.half() if n in "qkv" else x for n, x in given.items()}
do = torch.randn(B, T, H, D).half()

def all_of(run, given, do):
    leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
    o, state = run(S5.update, leaves)
    return [o, state.theta[0], *torch.autograd.grad(o, [leaves[n] for n in ("v", "decay", "angle")], do)]

got = all_of(lambda u, s: dispatch.run(u, s, implementation="triton"), given, do)
want = all_of(lambda u, s: reference.run(u, s, time=1), {n: x.double() for n, x in given.items()}, do.double())
compare(got, want, 1e-3)  # with values rounded to 16 bits between the turns 1.7e-3 of the angles

update, ends = S5.update, torch.tensor([0, 40, 40, T], dtype=torch.int32)
start = update.init({n: x[0, :3].float() for n, x in given.items()})
start = start._replace(theta=tuple(torch.randn_like(x) for x in start.theta))
out, last = dispatch.run_packed(update, given, start, ends, implementation="triton")
want, there = dispatch.run_packed(update, given, start, ends, implementation="reference")
compare([out, last.theta[0]], [want.double(), there.theta[0].double()], 1e-3)
""",
}


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name: str) -> None:
    interpret(PROGRAM + CASES[name])
