"""Pairs of bfloat16 numbers under Triton's interpreter, and what the entry refuses.

The interpreter is chosen when Triton is imported, so the kernel runs in a process of its own. It truncates to bfloat16,
so that a pair holds 15 bits there; on a GPU the pairs are torch's to the bit (tests/gpu/test_roots.py).
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
from axes.kernels.products.halves import thirds

torch.manual_seed(0)
for x in (torch.randn(2, 70, 130), torch.randn(3, 65, 20).mT, torch.randn(4, 4, 5)[::2, 1:]):
    for dim in (-1, -2):
        for order in ((0, 0, 1), (0, 1, 0)):
            first, second, third = thirds(x, dim, order).float().chunk(3, dim)
            high, low = (first, third) if order[2] else (first, second)
            assert torch.equal(high, second if order[2] else third)
            assert ((high + low - x).abs() <= 2.0**-14 * x.abs()).all()
            assert ((high - x).abs() <= 2.0**-7 * x.abs()).all()
"""


def test_pairs_add_up() -> None:
    interpret(PROGRAM)


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"x": torch.zeros(3, 4)}, r"takes \(N, m, n\) in float32, got \(3, 4\)"),
        ({"x": torch.zeros(1, 3, 4).double()}, "float64"),
        ({"dim": 0}, "dim=0"),
        ({"order": (1, 0, 0)}, r"order=\(1, 0, 0\)"),
        ({}, "needs a CUDA device, not cpu"),
    ),
)
def test_what_the_kernel_refuses(change: dict[str, Any], says: str) -> None:
    from axes.kernels.products.halves import thirds

    with pytest.raises(ShapeError, match=says):
        thirds(**{"x": torch.zeros(1, 3, 4), "dim": -1, "order": (0, 0, 1), **change})
