"""The quicker interpreter computes the bits of Triton's own. This file, executed, is a process that has either."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]


@triton.jit
def _halve(x):
    return x / tl.full(x.shape, 2, x.dtype)


@triton.jit
def _arithmetic(a, b, out, index, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Halves that are divided, sums of a row and a column, of a number and a block, masks, integers, products."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    place = row * COLUMNS + column
    inside = (row < n) & (column >= 1)
    x, y = tl.load(a + place, mask=inside, other=0.5), tl.load(b + place)
    z = _halve(x).to(tl.float32) + (x / y) - 3 * y + tl.where(inside, x, y)
    z += tl.dot(x, tl.trans(y)).sum(1)[:, None] * tl.exp(-(y * y).to(tl.float32)) + tl.cumsum(y.to(tl.float32), 1)
    tl.store(out + place, z)
    tl.store(index + place, place // 3 + place % 5 - (place < 7) + n)


@triton.jit
def _operators(a, out, index, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Every operator twice, of blocks, rows, columns, a number that is loaded, numbers on either side, and pointers."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    x, first = tl.load(a + row * COLUMNS + column), tl.load(a)
    y, z, place = x, tl.load(a + column) - first, row * 0
    for i in range(2):
        y = 1 - (2.5 * y + i) + (y - 0.5) * z + row * 0.25 - 3 * (first + z) + -0.0
        small, even, alike = (y < 0) & (y <= x), (row >= i) | (column == 3), (x > y) & (y != z)
        y = tl.where(small | alike, y / 2, y / (z * z + 3)) + (even & (column >= first)) + tl.where(row > 3, z, y)
        place = 2 * place + (row - column) * 3 - column * n + (1 - row) + (row < n) + (2 if n > 3 else i)
    tl.store(out + row * COLUMNS + (column + 0), y)
    tl.store(COLUMNS * row + index + column, place)


def results() -> list[Tensor]:
    from axes.kernels.scalar.chain import scalar_chain

    torch.manual_seed(0)
    found = []
    for dtype in (torch.float32, torch.float16):
        a, b = torch.randn(16, 32).to(dtype), torch.rand(16, 32).to(dtype) + 1
        out, index = torch.empty(16, 32), torch.empty(16, 32, dtype=torch.int32)
        _arithmetic[(1,)](a, b, out, index, 9, 16, 32)
        more, places = torch.empty(16, 32), torch.empty(16, 32, dtype=torch.int32)
        _operators[(1,)](a, more, places, 9, 16, 32)
        q, k, v = (torch.randn(1, 37, 1, d).to(dtype).requires_grad_() for d in (16, 16, 20))
        beta, g = torch.rand(1, 37, 1), -torch.rand(1, 37, 1)
        y, state = scalar_chain(q, k / 4, v, beta, g, segments=2)
        grads = torch.autograd.grad(y.float().sin().sum() + state.square().sum(), (q, k, v))
        found += [out, index, more, places, y, state, *grads]
    return found


@pytest.mark.slow
def test_the_bits_are_those_of_tritons_own() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    said = [
        subprocess.run([sys.executable, __file__, how], env=env, capture_output=True, text=True, check=True).stdout
        for how in ("plain", "quicker")
    ]
    assert said[0] == said[1] and len(said[0].split()) == 18


if __name__ == "__main__":
    if sys.argv[1] == "quicker":
        from tests import quicker

        quicker.patch()
    for x in results():
        print(hashlib.sha256(x.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest())
