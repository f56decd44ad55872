"""`axes bench segments`: a training step of long sequences on several processes beside the same step on one.

    axes bench segments --processes 2 --length 131072
    torchrun --nproc-per-node 2 -m axes.bench.segments --layer gated-delta-net

Every process has the whole model and a part of the sequence (`axes.parallel`); gradients are averaged by
DistributedDataParallel. The first process also takes the step alone, on the whole sequence, while the others wait. The
loss of both is compared: it depends on every token before. Activations of all tokens have to fit one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, final

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from axes import catalogue, parallel
from axes.bench.results import unwatched
from axes.bench.several import met, process
from axes.bench.timing import wait
from axes.bench.watching import Lines
from axes.errors import ShapeError
from axes.models import Architecture, LanguageModel

_WARM, _STEPS = 3, 5
_SUM = 400  # megabytes of gradients in one sum, behind the backward: sums beside its kernels took 1 ms of 55 more


@final
@dataclass(frozen=True)
class Row:
    """A layer in a model. Seconds a step, forward and backward."""

    layer: str
    tokens: int
    one: float
    several: float
    apart: float  # relative difference of the losses
    gigabytes: tuple[float, float]  # most that one process holds, alone and with others

    def text(self) -> str:
        a, b = self.tokens / self.one, self.tokens / self.several
        return (
            f"{self.layer:<20} {self.tokens:>9,} tokens   one {a:>10,.0f} tokens/s   several {b:>10,.0f} tokens/s "
            f"(x {b / a:.2f})   loss apart {self.apart:.1e}   {self.gigabytes[0]:.1f} / {self.gigabytes[1]:.1f} GB"
        )


@final
class _Losses(nn.Module):
    """Windows (B, T + 1) -> the mean loss."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, windows: Tensor) -> Tensor:
        return self.model.loss(windows)


def measure(layer: str, size: Architecture, length: int, device: torch.device) -> Row | None:
    """One row, on the first process; None on the others, all of which take part."""
    world, gpu = dist.get_world_size(), device.type == "cuda"
    if length < world or length % world:
        raise ShapeError(f"bench segments: {length} tokens are not shared out evenly over {world} processes")
    torch.manual_seed(0)
    with device:
        alone = _Losses(LanguageModel(size))
        windows = torch.randint(size.vocabulary, (1, length + 1))
    first = dist.get_rank() == 0

    def timed(module: nn.Module, given: Tensor, all_wait: bool) -> tuple[float, float, float]:
        def step() -> Tensor:
            module.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                loss: Tensor = module(given)
            loss.backward()
            return loss.detach()

        def every(call: Callable[[], Tensor]) -> float:
            if all_wait:
                dist.barrier()
            wait(device)
            begun = time.perf_counter()
            call()
            wait(device)
            return time.perf_counter() - begun

        loss = float(step())
        for _ in range(_WARM - 1):
            step()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        taken = statistics.median(every(step) for _ in range(_STEPS))
        return taken, loss, torch.cuda.max_memory_allocated() / 1e9 if gpu else float("nan")

    one = timed(alone, windows, False) if first else None
    alone.zero_grad(set_to_none=True)
    if gpu:
        torch.cuda.empty_cache()
    dist.barrier()
    # a group of its own: behind a sum of gradients, which waits for all, an adjoint that the others need would wait too
    group: Any = dist.new_group()
    parallel.sequence(alone, group)
    spread = DistributedDataParallel(
        alone, device_ids=[device.index] if gpu else None, gradient_as_bucket_view=True, bucket_cap_mb=_SUM
    )
    own = parallel.segment(windows, group, more=1)
    several, loss, held = timed(spread, own, True)
    mean = torch.tensor(loss, device=device)
    dist.all_reduce(mean)
    if one is None:
        return None
    return Row(layer, length, one[0], several, abs(mean.item() / world - one[1]) / one[1], (one[2], held))


def main(
    layers: Annotated[list[str] | None, typer.Option("--layer", help="Sequence layers. Repeatable.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of the sequence.")] = 131072,
    depth: Annotated[int, typer.Option(help="Blocks of the model.")] = 4,
    width: Annotated[int, typer.Option(help="Of the model.")] = 1024,
    heads: Annotated[int, typer.Option(help="Of every layer.")] = 8,
    vocabulary: Annotated[int, typer.Option(help="Entries.")] = 256,
) -> None:
    """One process of the comparison."""
    with met() as (rank, device):
        names, watch = layers or ["gated-delta-net", "softmax-attention"], unwatched if rank else Lines()
        for n, name in enumerate(names):
            watch(f"{name}, a step on one process, then on all", n, len(names))
            found = catalogue.get(name, "sequence").name
            size = Architecture(found, "residual", depth, width, heads, vocabulary=vocabulary)
            row = measure(found, size, length, device)
            if row is not None:
                print(row.text(), flush=True)
        watch("all layers", len(names), len(names))


if __name__ == "__main__":
    process(main)
