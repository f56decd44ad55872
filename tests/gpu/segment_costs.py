"""What a layer whose tokens are split over two processes costs each of them, on one GPU: nothing is sent.

    python -m tests.gpu.segment_costs > costs.txt        # about 40 seconds

A segment of 65,536 tokens by the whole layer, as the first process and as the last one: milliseconds of the host and
until the GPU has ended, forward and with backward, and the kernels of a step that take most.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from axes import catalogue
from axes.models.options import accepted_options
from axes.parallel import split
from axes.parallel.group import Group


class Alone(Group):
    """A process of two whose neighbour sends zeros."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2

    def _shift(self, packed: Tensor | None, received: Tensor | None, by: int) -> None:
        if received is not None:
            received.zero_()

    def _settle(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer", default="gated-delta-net")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    device, cls = torch.device(given.device), catalogue.get(given.layer, axis="sequence").cls
    torch.manual_seed(0)
    layer = cls(given.width, **accepted_options(cls, heads=given.heads), device=device)
    x = torch.randn(1, given.tokens, given.width, device=device, requires_grad=True)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def step() -> tuple[float, ...]:
        wait()
        begun = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            y, _ = layer(x)
        said = [time.perf_counter() - begun]
        wait()
        said.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        y.sum().backward()
        said.append(time.perf_counter() - begun)
        wait()
        said.append(time.perf_counter() - begun)
        return tuple(1e3 * s for s in said)

    for rank in (None, 0, 1):
        if rank is not None:
            layer.across = split.Split("the layer", layer, Alone(rank), False)
        taken = [step() for _ in range(8)][3:]
        numbers = [statistics.median(s) for s in zip(*taken, strict=True)]
        who = "whole" if rank is None else ("first", "last")[rank]
        print(f"{who:<6} forward: host {numbers[0]:.2f} ms, GPU has ended {numbers[1]:.2f}", end="; ")
        print(f"backward: host {numbers[2]:.2f}, GPU has ended {numbers[3]:.2f}", flush=True)
        if device.type != "cuda":
            continue
        kinds: Any = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            step()
        table = [e for e in profile.key_averages() if e.device_type != torch.autograd.DeviceType.CPU]
        table.sort(key=lambda e: -e.self_device_time_total)
        print(f"  kernels {sum(e.self_device_time_total for e in table) / 1e3:.2f} ms")
        for e in table[:24]:
            print(f"  {e.self_device_time_total / 1e3:8.3f} ms {e.count:4} x  {e.key[:90]}")


if __name__ == "__main__":
    main()
