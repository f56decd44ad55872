"""The attention kernels under Triton's interpreter against scores written out in float64; and their refusals.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
bfloat16 products are left to tests/gpu: the interpreter multiplies their bit patterns.
"""

from __future__ import annotations

import sys

import pytest
import torch

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.errors import ShapeError
from tests.interpreter import interpret

PROGRAM = r"""
import torch
from axes.kernels.attention.attend import attend

torch.manual_seed(0)
torch.set_num_threads(1)

def written_out(q, k, v, mass, scale, lengths, old):
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    outs, at = [], 0
    for n, length in enumerate(lengths or (q.shape[1],)):
        seen = slice(at + n * old, at + n * old + old + length)
        s = scale * torch.einsum("bthd,bshd->bhts", q[:, at : at + length], k[:, seen])
        if mass is not None:
            own = mass[:, seen].repeat_interleave(group, 2)
            s = s + (own[:, None] - own[:, old:, None]).permute(0, 3, 1, 2)
        future = torch.ones(length, old + length, dtype=torch.bool).triu(old + 1)
        p = s.masked_fill(future, -torch.inf).softmax(-1)
        outs.append(torch.einsum("bhts,bshd->bthd", p, v[:, seen]))
        at += length
    return torch.cat(outs, 1)

def check(T, K, V, dtype=torch.float32, B=1, G=1, group=1, old=0, lengths=(), mass="gates", step=1.0, shared=False,
          bound=1e-5):
    case = {n: x for n, x in locals().items()}
    b, t, s = (1, sum(lengths), sum(lengths) + len(lengths) * old) if lengths else (B, T, T + old)
    q, k, v = torch.randn(b, t, G * group, K), torch.randn(b, s, 1 if shared else G, K), torch.randn(b, s, G, V)
    m = -(-step * torch.rand(b, s, G, dtype=torch.float64)).cumsum(1)
    if mass == "closed":
        m = -torch.where(torch.rand(b, s, G) < 0.5, -200.0, -0.1 * torch.rand(b, s, G)).double().cumsum(1)
    if old:
        at = 0
        for n, length in enumerate(lengths or (t,)):
            m[:, at + n * old : at + n * old + old] = torch.randn(old, G).double() - 3
            m[:, at + n * old : at + n * old + old // 2] = -torch.inf
            at += length
    m = None if mass is None else m
    do = torch.randn(b, t, G * group, V)
    cu = torch.tensor((0, *lengths)).cumsum(0).int() if lengths else None

    def run(function, cast):
        leaves = [None if x is None else x.to(dtype).to(cast).requires_grad_() for x in (q, k, v)]
        leaves.append(None if m is None else m.clone().requires_grad_())
        given = [leaves[0], leaves[1].expand(-1, -1, G, -1), *leaves[2:]]
        o = function(*given)
        used = [x for x in leaves if x is not None]
        return [o, *torch.autograd.grad(o, used, do.to(o.dtype))]

    got = run(lambda *x: attend(*x, scale=K**-0.5, cu_seqlens=cu), dtype)
    want = run(lambda *x: written_out(*x, K**-0.5, lengths, old), torch.float64)
    for n, (x, w) in enumerate(zip(got, want)):
        error = ((x - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
        assert error < bound, (case, n, error)
"""

CASES = {
    "plain": """
for t in (1, 31, 32, 33, 70): check(t, 16, 16, mass=None)
check(40, 5, 40, B=2, G=3, mass=None)
check(40, 20, 3, group=2, G=2, mass=None)
check(40, 16, 16, G=2, mass=None, shared=True)
check(20, 140, 130, mass=None)
""",
    "masses": """
for t in (1, 32, 33, 70): check(t, 16, 16)
check(40, 5, 40, B=2, G=3)
check(70, 20, 3, group=2, G=2)
""",
    "large masses": """
check(130, 16, 16, step=30.0)
check(130, 16, 16, mass="closed", bound=2e-5)
""",
    "earlier pairs": """
for old in (1, 31, 32, 45): check(33, 16, 16, old=old)
check(40, 16, 8, old=7, B=2, G=2, group=2)
check(1, 16, 16, old=40)
check(33, 16, 16, old=50, mass=None)
""",
    "packed": """
check(0, 16, 16, lengths=(0, 1, 40, 0, 32))
check(0, 16, 16, lengths=(5, 33, 64), mass=None, G=2, group=2)
check(0, 16, 16, lengths=(1, 33, 0, 30), old=9)
check(0, 16, 16, lengths=(3, 40), old=33, mass=None, group=2)
""",
    "half": """
check(70, 32, 16, dtype=torch.float16, bound=3e-3)
check(150, 64, 64, dtype=torch.float16, G=2, old=20, bound=3e-3)
check(0, 16, 16, dtype=torch.float16, lengths=(1, 90, 20), mass=None, bound=3e-3)
""",
}


@pytest.mark.parametrize("name", CASES)
def test_against_scores_written_out(name: str) -> None:
    interpret(PROGRAM + CASES[name])


def test_a_planted_error_is_found() -> None:
    """Masses of the wrong pairs in the gradients alone."""
    plant = """
from axes.kernels.attention import attend as module
split, calls = module._split, []
def wrong(mass, like):
    calls.append(1)
    high, low = split(mass, like)
    return (high, low) if len(calls) == 1 else (high.roll(1, 1), low)
module._split = wrong
"""
    with pytest.raises(AssertionError, match="AssertionError"):
        interpret(PROGRAM + plant + "check(40, 16, 16)")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"q": torch.zeros(1, 4, 2)}, r"\(B, T, H, D\), not \(1, 4, 2\)"),
        ({"v": torch.zeros(1, 5, 2, 8)}, r"to q \(B, T, H, K\) = \(1, 4, 2, 8\), not \(1, 4, 2, 8\) and \(1, 5, 2, 8\)"),
        ({"q": torch.zeros(1, 4, 3, 8)}, "multiple of the pairs' heads, not 3 of 2"),
        ({n: torch.zeros(1, 4, 2, 300) for n in "qk"}, "from 1 to 256, not 300 and 8"),
        ({"q": torch.zeros(1, 4, 2, 8).double()}, "share one of bf16, fp16, fp32, not torch.float64"),
        ({}, "need a CUDA device, not cpu"),
    ],
)
def test_refusals(change: dict[str, torch.Tensor], complaint: str) -> None:
    from axes.kernels.attention.attend import attend

    given = {n: torch.zeros(1, 4, 2, 8) for n in "qkv"}
    with pytest.raises(ShapeError, match=complaint):
        attend(**{**given, **change}, scale=1.0)
