"""A split layer by the kernels is followed as a line, exchanges included, and gives what one process gives.

This file, executed, is one of two gloo processes, whose kernels run in Triton's interpreter.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from axes import catalogue, parallel
from axes.kernels.common import line as lines
from axes.models.options import accepted_options
from tests.processes import joined, run

TOKENS = 6
CLOSE = 2e-5


@pytest.mark.parametrize("name", ["linear-attention", pytest.param("gated-delta-net", marks=pytest.mark.slow)])
def test_a_split_layer_repeats_its_exchanges(name: str, tmp_path: Path) -> None:
    run(__file__, tmp_path, 2, name, interpreted=True)


def _compare(name: str) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    cls = catalogue.get(name, axis="sequence").cls
    layer = cls(16, **accepted_options(cls, heads=1))
    split = copy.deepcopy(layer)
    for _ in range(3):  # a line of a whole sequence that looks like a segment
        own = parallel.segment(torch.randn(1, TOKENS, 16), mesh).clone().requires_grad_()
        split(own)[0].sum().backward()
    split.zero_grad(set_to_none=True)
    parallel.sequence(split, mesh)
    followed: list[object] = []
    follow = lines.Line.follow
    lines.Line.follow = lambda self, *given: followed.append(self) or follow(self, *given)  # type: ignore[func-returns-value, method-assign]
    for step in range(4):
        x, along = torch.randn(1, TOKENS, 16), torch.randn(1, TOKENS, 16)
        with torch.no_grad():
            for p, q in zip(layer.parameters(), split.parameters(), strict=True):
                q.copy_(p.add_(0.01 * torch.randn(p.shape)))
        x.requires_grad_()
        y, _ = layer._run(x, None, None)
        wanted = torch.autograd.grad(y, [x, *layer.parameters()], along)
        own = parallel.segment(x.detach(), mesh).clone().requires_grad_()
        mine, none = split(own)
        assert none is None
        found = torch.autograd.grad(mine, [own, *split.parameters()], parallel.segment(along, mesh))
        pairs = {"y": (mine, parallel.segment(y, mesh)), "x": (found[0], parallel.segment(wanted[0], mesh))}
        for (n, _), a, b in zip(layer.named_parameters(), found[1:], wanted[1:], strict=True):
            dist.all_reduce(a)
            pairs[n] = a, b
        for n, (a, b) in pairs.items():
            apart = float((a - b).norm() / b.norm())
            assert apart < CLOSE, f"{name}, step {step}, {n}: {apart:.1e} apart"
    assert len(followed) == 2, f"{name} was followed in {len(followed)} of 2 steps"
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(split(own.detach())[0], parallel.segment(y.detach(), mesh))


if __name__ == "__main__":
    with joined() as (_, names):
        for layer_name in names:
            _compare(layer_name)
