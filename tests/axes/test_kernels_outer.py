"""Sums of outer products under Triton's interpreter, against float64, with gradients; and what the entry refuses.

The interpreter is chosen when Triton is imported, so the kernel runs in a process of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.errors import ShapeError
from tests.interpreter import interpret

PROGRAM = r"""
import torch
from axes.kernels.products import outer
from axes.kernels.products.outer import outer_sum

torch.manual_seed(0)

def exact(u, k=None, weight=None, start=None, decay=None):
    k = u if k is None else k
    total = u.mT @ (k if weight is None else weight[..., None] * k)
    if start is None:
        return total
    return total + (start if decay is None else decay[:, None, None] * start)

def check(bound, **inputs):
    inputs = {n: x.requires_grad_() for n, x in inputs.items()}
    got = outer_sum(**inputs)
    wide = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    want = exact(**wide)
    d = torch.randn_like(got)
    found = [got, *torch.autograd.grad(got, list(inputs.values()), d)]
    wanted = [want, *torch.autograd.grad(want, list(wide.values()), d.double())]
    for name, a, w in zip(("S", *inputs), found, wanted, strict=True):
        assert (a.double() - w).norm() < bound * w.norm(), (name, a, w)

def draw(n, t, v, k):
    return {"u": torch.randn(n, t, v), "k": torch.randn(n, t, k), "weight": torch.randn(n, t),
            "start": torch.randn(n, v, k), "decay": torch.randn(n)}

check(3e-6, **draw(2, 40, 70, 20))
check(3e-6, **{n: x for n, x in draw(2, 33, 5, 5).items() if n != "k"})
x = torch.randn(1, 40, 150)
check(3e-6, u=x)
check(3e-6, u=x.detach().mT.contiguous().mT)
got = outer_sum(x)
assert torch.equal(got, got.mT)
check(2e-3, u=torch.randn(1, 70, 90).half(), k=torch.randn(1, 70, 30).half())
outer._LEAST = 32  # several parts
check(3e-6, **draw(1, 150, 9, 20))
"""


def test_equals_the_sum() -> None:
    interpret(PROGRAM)


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"u": torch.zeros(3, 4)}, r"u \(N, T, V\)"),
        ({"k": torch.zeros(2, 4, 5)}, r"u \(N, T, V\)"),
        ({"k": torch.zeros(2, 3, 5).half()}, "one of bf16"),
        ({"u": torch.zeros(2, 3, 4).double(), "k": None}, "one of bf16"),
        ({}, "needs a CUDA device"),
    ),
)
def test_refuses(change: dict[str, Any], says: str) -> None:
    from axes.kernels.products.outer import outer_sum

    with pytest.raises(ShapeError, match=says):
        outer_sum(**{"u": torch.zeros(2, 3, 4), "k": torch.zeros(2, 3, 5), **change})
