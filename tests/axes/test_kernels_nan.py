"""A NaN stays one through what kernels do to bits and bounds, the NaN of all ones that a GPU computes too."""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from tests.interpreter import interpret

PROGRAM = r"""
import torch
import triton
import triton.language as tl
from axes.kernels.common.codes import bfloat16_at_random
from axes.kernels.common.tiles import floored
from axes.kernels.diagonal.channels import _rounded


@triton.jit
def through(x, held, short, drawn, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(held + i, floored(value))
    tl.store(short + i, _rounded(value))
    tl.store(drawn + i, bfloat16_at_random(value, i * 0 + 0xFFFF))


bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7FFF8000], dtype=torch.int32).view(torch.float32)
numbers = torch.tensor([-1000.0, -100.0, -0.5, 3.0])
x = torch.cat((bits, numbers))
held, short = torch.empty_like(x), torch.empty_like(x)
drawn = torch.empty(8, dtype=torch.bfloat16)
through[(1,)](x, held, short, drawn, 8)
for out in (held, short, drawn):
    assert out[:4].isnan().all(), out
assert held[4:].tolist() == [-100.0, -100.0, -0.5, 3.0]
assert torch.equal(short[4:], numbers)  # which have eight bits
"""


def test_a_nan_stays_one() -> None:
    interpret(PROGRAM)
