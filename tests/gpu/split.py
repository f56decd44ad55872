"""A long sequence on several GPUs beside one: equal losses and gradients, tokens a second.

torchrun --nproc-per-node 2 -m tests.gpu.split [--tokens 131072] [--device cpu for a small try with gloo]
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from axes import parallel
from axes.models import Architecture, LanguageModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 131072), ("layers", 4), ("width", 768), ("heads", 6), ("vocabulary", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", nargs="*", default=["gated-delta-net", "softmax-attention"])
    given = parser.parse_args()
    gpu = given.device == "cuda"
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    if gpu:
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(given.device, (world,))
    for name in given.sequences:
        architecture = Architecture(
            name, "residual", layers=given.layers, width=given.width, heads=given.heads, vocabulary=given.vocabulary
        )
        torch.manual_seed(0)
        model = LanguageModel(architecture, device=given.device)
        torch.manual_seed(1)
        windows = torch.randint(given.vocabulary, (1, given.tokens + 1), device=given.device)

        def step(windows: Tensor, model: LanguageModel = model) -> Tensor:
            model.zero_grad()
            with torch.autocast(given.device, torch.bfloat16):
                loss = model.loss(windows)
            loss.backward()
            return loss.detach()

        def timed(windows: Tensor) -> tuple[float, Tensor, float]:
            loss = step(windows)
            step(windows)
            dist.barrier()
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            for _ in range(given.steps):
                step(windows)
            if gpu:
                torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 1e9 if gpu else 0.0
            return (time.perf_counter() - begun) / given.steps, loss, peak

        alone, loss, memory = timed(windows)
        wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        parallel.sequence(model, mesh)
        together, part, share = timed(parallel.segment(windows, mesh, more=1))
        dist.all_reduce(part)
        worst = 0.0
        for (_, p), w in zip(model.named_parameters(), wanted, strict=True):
            assert p.grad is not None
            dist.all_reduce(p.grad)  # means of equal segments
            worst = max(worst, float((p.grad / world - w).norm() / w.norm().clamp_min(1e-12)))
        if rank == 0:
            speeds = [given.tokens / seconds for seconds in (alone, together)]
            print(
                f"{name}: {speeds[0]:,.0f} tokens/s on one, {speeds[1]:,.0f} on {world}: "
                f"{speeds[1] / speeds[0]:.2f} times; "
                f"{memory:.1f} and {share:.1f} GB; loss {loss.item():.5f} and {part.item() / world:.5f}, "
                f"gradients within {worst:.1e}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
