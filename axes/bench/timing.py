"""Time and memory of one call: eager and CUDA-graph medians on a GPU, wall-clock medians on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[[], Iterable[Any]]  # tensors, or lists of them
_SECONDS = 0.25  # how long one figure is measured, after a warm-up
_FEWEST, _MOST = 5, 200


@final
@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: eager, and replayed in a CUDA graph (None on a CPU or where capture failed)."""

    eager: float
    graph: float | None = None

    @property
    def best(self) -> float:
        """The figure that targets are about."""
        return self.eager if self.graph is None else self.graph


def median(call: Call, device: torch.device) -> Timing:
    """Medians over repeated calls, warmed up."""
    if device.type != "cuda":
        return Timing(_wall(call))
    return Timing(_events(call), _graph(call))


def peak_extra(call: Call) -> int:
    """Bytes that a call holds at most beyond what was there before and what it returns (CUDA)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = [x for x in pytree.tree_leaves(call()) if isinstance(x, Tensor)]
    torch.cuda.synchronize()
    returned = sum(x.untyped_storage().nbytes() for x in {x.untyped_storage().data_ptr(): x for x in results}.values())
    return max(0, torch.cuda.max_memory_allocated() - before - returned)


def kept_for_backward(call: Call, own: Iterable[Tensor]) -> int:
    """Bytes that the graph of a call keeps, `own` tensors (parameters) apart."""
    mine = {x.untyped_storage().data_ptr() for x in own}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = call()
    del out
    return sum(kept.values())


def launches(call: Callable[[], object], device: torch.device) -> float:
    """Kernels that a call starts, as the profiler sees them; on a CPU the operators that it calls."""
    if device.type != "cuda":
        with _Operators() as operators:
            call()
        return operators.count
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        wait(device)
    on_device = [e for e in found.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not e.name.startswith(("Memcpy", "Memset", "Optimizer.")) for e in on_device)


class _Operators(TorchDispatchMode):
    """Counts the operators that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def _wall(call: Call) -> float:
    call()
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) < 3 or time.perf_counter() - begun < _SECONDS and len(taken) < _MOST:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def _events(call: Call) -> float:
    """Median with a cold L2 between calls, as triton.testing.do_bench has it, with events around each call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = _count(time.perf_counter() - start)
    cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for before, after in pairs:
        cache.zero_()
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in pairs)


def _graph(call: Call) -> float | None:
    """Median of replays, each of one captured call; the memory of a capture that fails is given back."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            kept = call()
    except Exception:  # a peer that synchronises cannot be captured: its eager figure stands alone
        torch.cuda.synchronize()
        return None

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return ()

    timing = _events(replay)
    del kept
    graph.reset()
    return timing


def _count(seconds: float) -> int:
    return max(_FEWEST, min(_MOST, int(_SECONDS / max(seconds, 1e-6))))
