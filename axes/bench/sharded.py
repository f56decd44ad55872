"""`axes bench sharded`: a step on several processes beside the same step on one, and how far the two are apart.

    axes bench sharded --processes 2 --rule muon --suite 50M
    torchrun --nproc-per-node 2 -m axes.bench.sharded --rule muon --suite 50M

Parameters are DTensors, rows over processes, as `fully_shard` makes them; the first process also has all of them as
ordinary tensors and steps those alone, while the others wait. Both see the same gradients. On GPUs it is NCCL, else
gloo, where the processes share the CPU and a message is a copy through sockets: there only counts and differences mean
something.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, final
from unittest.mock import patch

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from axes.bench.optim_contenders import find_suites
from axes.bench.results import unwatched
from axes.bench.several import met, process
from axes.bench.timing import wait
from axes.bench.watching import Lines
from axes.errors import AxesError

RULES = ("muon", "normuon", "soap", "shampoo", "psgd-kron", "adamw")
_COMPARED = 3  # steps
_RATE = 0.02  # what is added is of the size of the weights, else their rounding would be the difference
_OPTIONS: dict[str, dict[str, Any]] = {"soap": {"precision": "tf32"}, "shampoo": {"precision": "tf32"}}
_WARM = 4  # steps: kernels are compiled, and products recorded
_ROUNDS = 5


@final
@dataclass(frozen=True)
class Row:
    """One rule on one set of parameters. Milliseconds a step of a host that waits for it."""

    rule: str
    suite: str
    one: float
    several: float
    host: float  # of several: until the step returns
    apart: float  # largest relative difference of what some steps added to a parameter
    messages: int  # all-to-alls a step
    megabytes: float  # a process sends to others, in a step

    def text(self) -> str:
        return (
            f"{self.rule:<10} {self.suite:<7} one {self.one:8.3f} ms   several {self.several:8.3f} ms "
            f"(x {self.several / self.one:.2f}; host {self.host:.3f} ms)   apart {self.apart:.1e}   "
            f"{self.messages} messages, {self.megabytes:.1f} MB sent"
        )


@torch.no_grad()
def measure(
    rule: str, suite: str, device: torch.device, dtype: torch.dtype, traces: Path | None = None, **options: Any
) -> Row | None:
    """One row, on the first process; None on the others, all of which take part.

    traces: a folder for what torch's profiler sees of three steps on the first process, alone and together.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    (found,) = find_suites((suite,), device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    shapes = [shape for shape in found.shapes if rule == "adamw" or len(shape) > 1]
    torch.manual_seed(0)
    start = [torch.randn(shape, device=device).mul_(0.02).to(dtype) for shape in shapes]
    grown = [torch.randn(shape, device=device).mul_(0.01).to(dtype) for shape in shapes]
    spread = [nn.Parameter(distribute_tensor(x, mesh, (Shard(0),))) for x in start]
    first = dist.get_rank() == 0
    plain = [nn.Parameter(x.clone()) for x in start] if first else []
    several, one = _optimizer(rule, spread, options), _optimizer(rule, plain, options) if first else None

    def gradients(turn: int) -> None:  # another one every time, the same for all
        for i, (p, g) in enumerate(zip(spread, grown, strict=True)):
            g = g.roll(turn, -1)
            p.grad = distribute_tensor(g, mesh, (Shard(0),))
            if plain:
                plain[i].grad = g.clone()

    for turn in range(_WARM + _COMPARED):
        if turn == _WARM:
            before = [p.full_tensor().clone() for p in spread]  # type: ignore[attr-defined]
            own = [p.detach().clone() for p in plain]
        gradients(turn)
        several.step()
        if one is not None:
            one.step()
    apart = 0.0
    for i, (p, past) in enumerate(zip(spread, before, strict=True)):
        moved = p.full_tensor().double() - past.double()  # type: ignore[attr-defined]
        if plain:
            alone = plain[i].detach().double() - own[i].double()
            apart = max(apart, float((moved - alone).norm() / alone.norm()))

    with _counted() as sent:
        several.step()
    alone_ms, together_ms, host_ms = [], [], []
    for _ in range(_ROUNDS):  # by turns, since clocks move
        dist.barrier()
        if one is not None:
            alone_ms.append(_timed(one.step, device)[0])
        dist.barrier()
        whole, host = _timed(several.step, device)
        together_ms.append(whole)
        host_ms.append(host)
    if traces is not None:
        _trace(several.step, device, traces / f"{rule}-{suite}-several.json" if first else None)
        if one is not None:
            _trace(one.step, device, traces / f"{rule}-{suite}-one.json")
    if not first:
        return None
    one_ms, several_ms, on_host = map(statistics.median, (alone_ms, together_ms, host_ms))
    return Row(rule, suite, one_ms, several_ms, on_host, apart, len(sent), sum(sent) / 1e6)


def _optimizer(rule: str, parameters: list[nn.Parameter], options: dict[str, Any]) -> torch.optim.Optimizer:
    from axes import optim

    classes: dict[str, Any] = {cls.name: cls for cls in optim.ALL}
    if rule not in RULES:
        raise AxesError(f"unknown rule {rule!r}; known: {', '.join(RULES)}")
    given: Any = parameters if rule == "adamw" else [{"params": parameters, "rule": rule}]
    optimizer: torch.optim.Optimizer = classes[rule](given, lr=_RATE, **{**_OPTIONS.get(rule, {}), **options})
    return optimizer


def _timed(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds a step, of a host that waits for it and of one that does not."""
    wait(device)
    count, begun = 0, time.perf_counter()
    host = 0.0
    while count < 20:
        now = time.perf_counter()
        step()
        host += time.perf_counter() - now
        wait(device)
        count += 1
    return 1e3 * (time.perf_counter() - begun) / count, 1e3 * host / count


def _trace(step: Callable[[], object], device: torch.device, path: Path | None) -> None:
    """Three steps, for chrome://tracing and the like."""
    from torch.profiler import ProfilerActivity, profile

    seen = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=seen) as found:
        for _ in range(3):
            step()
            wait(device)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(path))


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Bytes that this process sends to others, message by message."""
    sent: list[int] = []
    own: Any = dist.all_to_all_single
    rank = dist.get_rank()

    def counted(out: Tensor, given: Tensor, found: list[int], to: list[int], **kwargs: Any) -> Any:
        sent.append((sum(to) - to[rank]) * given.element_size())
        return own(out, given, found, to, **kwargs)

    with patch.object(dist, "all_to_all_single", counted):
        yield sent


def main(
    rules: Annotated[list[str] | None, typer.Option("--rule", help=f"{', '.join(RULES)}. Repeatable.")] = None,
    suites: Annotated[list[str] | None, typer.Option("--suite", help="As of `axes bench optim`. Repeatable.")] = None,
    dtype: Annotated[str, typer.Option(help="Of parameters and gradients.")] = "float32",
    parts: Annotated[int, typer.Option(help="In how many parts a group travels; 0 for what is built in.")] = 0,
    unchecked: Annotated[bool, typer.Option(help="Without the look at the gradients, which waits.")] = False,
    traces: Annotated[Path | None, typer.Option(metavar="FOLDER", help="For what the profiler sees of steps.")] = None,
) -> None:
    """One process of the comparison."""
    from axes.bench.sequence import dtype_of
    from axes.optim.sharding import travel

    if parts:
        travel.BUCKETS, travel.LEAST = parts, 1
    options = {"check_finite": False} if unchecked else {}
    with met() as (rank, device):
        default = ["50M", "302M"] if device.type == "cuda" else ["0.9M"]
        every = [(s, r) for s in suites or default for r in rules or ["muon"]]
        watch = unwatched if rank else Lines()
        for n, (suite, rule) in enumerate(every):
            watch(f"{rule} of {suite}, on one process, then on all", n, len(every))
            row = measure(rule, suite, device, dtype_of(dtype), traces, **options)
            if row is not None:
                print(row.text(), flush=True)
        watch("all rules", len(every), len(every))


if __name__ == "__main__":
    process(main)
