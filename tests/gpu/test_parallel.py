"""Sequences split over two GPUs, through NCCL, are those of one: outputs, final states and gradients, by the kernels.

This file, executed, is one of the two processes; each runs the whole sequence by itself too.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.gpu
if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from axes import catalogue, parallel  # noqa: E402
from axes.models.options import accepted_options  # noqa: E402
from tests.gpu.together import together  # noqa: E402

WORLD, _NAME = 2, "layer.txt"
# a normaliser, key gates, an erase, two slots, rotations, free transitions, a list, slots of softmax
LAYERS = ("linear-attention", "gla", "gated-delta-net", "titans-matrix", "retnet", "rwkv7", "mamba2", "kda",
          "softmax-attention", "fox")  # fmt: skip
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-6))


def _compare(name: str, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (WORLD,))
    cls, device = catalogue.get(name, axis="sequence").cls, torch.device("cuda", dist.get_rank())
    layer = cls(256, **accepted_options(cls, heads=4), device=device, dtype=dtype)
    x, along = torch.randn(2, 2, 1025, 256, device=device, dtype=dtype)
    x.requires_grad_()
    y, _ = layer(x)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(y, [x, *parameters], along, allow_unused=True)
    parallel.sequence(layer, mesh)
    for call in range(3):  # by Python, written down, followed
        own = parallel.segment(x.detach(), mesh).clone().requires_grad_()
        mine, _ = layer(own)
        direction = parallel.segment(along, mesh).clone()
        found = torch.autograd.grad(mine, [own, *parameters], direction, allow_unused=True)
        pairs = {"y": (mine, parallel.segment(y, mesh)), "x": (found[0], parallel.segment(wanted[0], mesh))}
        for i, (a, b) in enumerate(zip(found[1:], wanted[1:], strict=True)):
            if b is not None:
                total = torch.zeros_like(b) if a is None else a.clone()
                dist.all_reduce(total)
                pairs[f"parameter {i}"] = (total, b)
        worst = max((_apart(a, b), n) for n, (a, b) in pairs.items())
        assert worst[0] <= CLOSE[dtype], (name, dtype, call, worst)
    if dist.get_rank() == 0:
        print(f"{name} {dtype}: {worst[0]:.1e} ({worst[1]})", flush=True)


def _work(rank: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), WORLD)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=240), device_id=device
    )
    try:
        for dtype in CLOSE:
            _compare((folder / _NAME).read_text(), dtype)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", LAYERS)
def test_two_gpus_hold_one_sequence(name: str, tmp_path: Path) -> None:
    (tmp_path / _NAME).write_text(name)
    codes = together(__file__, tmp_path, WORLD)
    assert not any(codes), f"exit codes {codes}"


if __name__ == "__main__":
    _work(int(sys.argv[1]), Path(sys.argv[2]))
