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
    "modes": """
from axes.kernels.entries.modes import modes_chain

def loop(q, k, v, gate, angle, start=None, cu=None):
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    gate, angle = (x.expand(*v.shape[:2], *x.shape[-2:]) for x in (gate, angle))
    ends, outs, lasts = [0, v.shape[1]] if cu is None else cu.tolist(), [], []
    for n, (first, end) in enumerate(zip(ends, ends[1:])):
        z = torch.zeros_like(v[:, 0]) if start is None else (start if cu is None else start[n : n + 1])[..., 0]
        z = torch.complex(*z.chunk(2, -1))
        for t in range(first, end):
            z = torch.exp(torch.complex(gate[:, t], angle[:, t])) * z + k[:, t] * torch.complex(*v[:, t].chunk(2, -1))
            outs.append(torch.cat((z.real, z.imag), -1) * q[:, t])
        lasts.append(torch.cat((z.real, z.imag), -1))
    return torch.stack(outs, 1), torch.cat(lasts)[..., None]

def check(B, T, H, HV, V, dtype, shared, cu=None, started=True, bound=2e-6):
    units, lead = B if cu is None else len(cu) - 1, () if shared else (B, T)
    given = [torch.randn(B, T, H, 1).to(dtype), torch.randn(B, T, H, 1).to(dtype), torch.randn(B, T, HV, V).to(dtype)]
    given += [-torch.rand(*lead, HV, V // 2), 9 * torch.randn(*lead, HV, V // 2)]
    given += [torch.randn(units, HV, V, 1)] if started else []
    do, dlast = torch.randn(B, T, HV, V), torch.randn(units, HV, V, 1)

    def all_of(rule, given):
        leaves = [x.detach().requires_grad_() for x in given]
        out = rule(*leaves)
        return [*out, *torch.autograd.grad(out, leaves, (do.to(out[0].dtype), dlast.to(out[1].dtype)))]

    got = all_of(lambda *x: modes_chain(*x, cu_seqlens=cu), given)
    for n, (a, b) in enumerate(zip(got, all_of(lambda *x: loop(*x, cu=cu), [x.double() for x in given]), strict=True)):
        assert a.shape == b.shape and (a.double() - b).norm() < bound * max(b.norm(), 1e-3 * b.numel() ** 0.5), n

check(2, 19, 1, 2, 6, torch.float32, False)
check(1, 1, 2, 2, 70, torch.float32, False, started=False)
check(2, 19, 1, 2, 6, torch.float32, True)
check(1, 20, 1, 2, 6, torch.float32, True, cu=torch.tensor([0, 0, 3, 19, 20]))
check(1, 20, 2, 2, 6, torch.float16, False, cu=torch.tensor([0, 0, 3, 19, 20]), bound=1e-3)
""",
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
    "turn of any strides": """
from axes.kernels.attention.turn import turn

def pairs(x, angle):
    (a, b), c, s = x.double().chunk(2, -1), torch.cos(angle.double())[:, None], torch.sin(angle.double())[:, None]
    return torch.cat((a * c - b * s, a * s + b * c), -1)

angle = 9 * torch.rand(5, 4)
for order in ((0, 1, 2, 3), (0, 1, 3, 2), (0, 3, 2, 1), (3, 2, 1, 0)):
    q, k = (torch.randn(*(dict(zip(range(4), (2, 5, h, 8)))[n] for n in order)).permute(order) for h in (3, 1))
    assert q.shape == (2, 5, 3, 8)
    compare(turn(q, k, angle), [pairs(x, angle) for x in (q, k)], 1e-6)
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
