"""Symmetric products and normalised stacks under Triton's interpreter, against float64.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

PROGRAM = r"""
import torch
from axes.kernels.normalise import normalised
from axes.kernels.symmetric import symmetric_product

torch.manual_seed(0)

def mirrored(x):
    return (x + x.mT) / 2

for m, k in ((8, 16), (136, 72), (256, 64), (392, 40)):
    for columns in (False, True):
        a = torch.randn(2, m, k).half()
        a = a.mT.contiguous().mT if columns else a
        d, e = mirrored(torch.randn(2, m, m).half()), mirrored(torch.randn(2, m, m))
        got = symmetric_product(a, alpha=0.5, terms=((2.0, d), (-1.5, e)), diagonal=3.0, dtype=torch.float32)
        want = 0.5 * a.double() @ a.double().mT + 2 * d.double() - 1.5 * e.double()
        want += 3.0 * torch.eye(m, dtype=torch.float64)
        assert torch.equal(got, got.mT)
        assert (got - want).norm() <= 3e-6 * want.norm(), (m, k, columns)
g = mirrored(torch.randn(2, 264, 264)) / 16
x, y = (0.3 * g + g @ g).half(), (g - 0.2 * g @ g).half()
term = y.clone()
symmetric_product(x, y, terms=((0.5, term),), out=term)
want = x.double() @ y.double() + 0.5 * y.double()
assert torch.equal(term, term.mT)
assert (term - want).norm() <= 2e-3 * want.norm()

for x in (torch.randn(3, 40, 300), torch.randn(2, 300, 40).mT):
    got = normalised(x, 1.0, 0.0, 1e-7)
    want = x / torch.linalg.matrix_norm(x)[:, None, None]
    assert got.stride() == x.stride() and (got - want).norm() < 1e-3 * want.norm()
"""


def test_products_equal_float64() -> None:
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
