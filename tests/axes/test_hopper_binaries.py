"""Hopper kernels are one binary for all sizes: what ran on a full chip is then what runs anywhere.

Not one for each number of heads or tokens: ptxas mixes up registers of copies and products in ways that differ by
binary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from axes.kernels.diagonal import hopper as hopper_diagonal
from axes.kernels.diagonal.chain import diagonal_chain
from axes.kernels.scalar import hopper_write
from axes.kernels.scalar.chain import scalar_chain
from tests.hopper import hopper

SIZES = ((2, 100, 3, 6), (3, 260, 2, 4))  # batch, tokens, heads, value heads: two for one
SEGMENTS = 2


def write(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    beta, g = torch.rand(2, *v.shape[:3]).requires_grad_().unbind()
    return scalar_chain(q, k, v, beta, g, initial_state=start, rule="write", segments=SEGMENTS)


def diagonal(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    g = (-torch.rand(*v.shape[:3], q.shape[3])).requires_grad_()
    return diagonal_chain(q, k, v, g, initial_state=start)


@pytest.mark.parametrize("rule", (write, diagonal))
def test_sizes_share_binaries(rule: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_write, "fits", lambda *_: True)
    monkeypatch.setattr(hopper_diagonal, "segments_of", lambda *_: SEGMENTS)
    made = []
    for batch, length, heads, value_heads in SIZES:
        q, k = torch.randn(2, batch, length, heads, 128, dtype=torch.bfloat16).requires_grad_().unbind()
        v = torch.randn(batch, length, value_heads, 128, dtype=torch.bfloat16).requires_grad_()
        with hopper() as launches:
            sum(x.float().sum() for x in rule(q, k, v, torch.randn(batch, value_heads, 128, 128))).backward()
        made.append([x.binary for x in launches if x.kernel in ("_mix", "_numbers", "_chain", "_merge")])
    assert made[0] and all(x == made[0] for x in made)
