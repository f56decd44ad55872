"""The mass of what is written, by its kernel under Triton's interpreter, against the recurrence in float64.

The interpreter is chosen when Triton is imported, so the kernel runs in a process of its own.
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
from axes.kernels.scalar.mass import mass_chain

torch.manual_seed(0)
torch.set_num_threads(1)

def loop(q, k, heads, beta=None, g=None, start=None, cu=None):
    queries, keys = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    ends, masses, lasts = [0, q.shape[1]] if cu is None else cu.tolist(), [], []
    for u, (first, end) in enumerate(zip(ends, ends[1:])):
        n = torch.zeros_like(keys[:, 0]) if start is None else (start if cu is None else start[u : u + 1])
        for t in range(first, end):
            kept = n if g is None else g[:, t, :, None].clamp(min=-100).exp() * n
            n = kept + (keys[:, t] if beta is None else beta[:, t, :, None] * keys[:, t])
            masses.append((queries[:, t] * n).sum(-1))
        lasts.append(n)
    return torch.stack(masses, 1), torch.cat(lasts), q, k

def check(B, T, H, HV, K, dtype, bound, kind="mild", bare=False, cu=None):
    units = B if cu is None else len(cu) - 1
    given = dict(q=torch.randn(B, T, H, K).to(dtype), k=torch.randn(B, T, H, K).to(dtype))
    if not bare:
        given |= dict(beta=torch.rand(B, T, HV), g=-torch.rand(B, T, HV), start=torch.randn(units, HV, K))
    if kind == "closed":
        given["g"] = torch.where(torch.rand(B, T, HV) < 0.2, -1e3, given["g"])
    of_both = torch.randn(2, B, T, H, K)  # what q and k hear from behind it
    hears = torch.randn(B, T, HV), torch.randn(units, HV, K), *of_both

    def all_of(rule, given):
        leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
        out = rule(**leaves)
        grads = [d.to(o.dtype) for d, o in zip(hears, out, strict=True)]
        return [*out, *torch.autograd.grad(out, list(leaves.values()), grads)]

    v = torch.zeros(B, T, HV, 1, dtype=dtype)
    got = all_of(lambda q, k, **more: mass_chain(q, k, v, **more, cu_seqlens=cu), given)
    want = all_of(lambda q, k, **more: loop(q, k, HV, **more, cu=cu), {n: x.double() for n, x in given.items()})
    for name, a, b in zip(("mass", "last", "q again", "k again", *given), got, want, strict=True):
        error = (a.double() - b).norm() / max(b.norm(), 1e-3 * b.numel() ** 0.5)
        assert a.shape == b.shape and error < bound, (name, error)
"""

CASES = {
    "full": "check(2, 70, 1, 2, 20, torch.float32, 3e-6)",
    "closed": "check(2, 40, 2, 2, 16, torch.float32, 1e-4, kind='closed')",  # differences of sums of hundreds
    "bare": "check(1, 1, 2, 2, 3, torch.float32, 3e-6, bare=True)",
    "packed": "check(1, 41, 1, 2, 16, torch.float32, 3e-6, cu=torch.tensor([0, 0, 1, 34, 41]))",
    "half": "check(1, 70, 2, 2, 16, torch.float16, 2e-3)",
}


def test_equals_the_recurrence() -> None:
    interpret(PROGRAM + "\n".join(CASES.values()))
