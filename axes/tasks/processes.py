"""The processes of a run under torchrun: who has which windows and tokens, and what only the first one does."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from axes import parallel
from axes.errors import AxesError
from axes.models.language_model import LanguageModel

Made = TypeVar("Made")
_TIMEOUT = "AXES_TIMEOUT"  # seconds; a fact of the machines, not of the run
_MOST = 600.0


def launched() -> bool:
    """Whether torchrun started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


@contextmanager
def joined() -> Iterator[bool]:
    """Meet the other processes of torchrun, if there are any; whether this one reports."""
    if not launched():
        yield True
        return
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        seconds = float(os.environ.get(_TIMEOUT, _MOST))
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timedelta(seconds=seconds))
    except (RuntimeError, ValueError) as error:
        raise AxesError(f"the processes of torchrun do not find each other: {' '.join(str(error).split())}") from None
    with missing_are_said():
        yield dist.get_rank() == 0
    dist.destroy_process_group()  # not behind an error: the others may be gone, and this process ends


@contextmanager
def leaving() -> Iterator[None]:
    """Around all that a process of torchrun does: it ends as it would, but for taking the interpreter apart.

    gloo's threads let go of a message's tensors after those who waited for it go on. Where an interpreter is being
    taken apart, a thread that asks for it to do so aborts the process (Python 3.11 to 3.13): a good run would end with
    SIGABRT. destroy_process_group ends these threads only if nobody holds the group, and torch's caches of DTensors do.
    """
    if not launched():
        yield
        return
    ended: Any = None
    try:
        yield
    except SystemExit as error:
        ended = error.code
    if ended is not None and not isinstance(ended, int):
        print(ended, file=sys.stderr)
        ended = 1
    threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter does first: it waits for threads,
    atexit._run_exitfuncs()  # and calls what asked for it
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(ended or 0)


_ADVICE = "The last checkpoint is kept; start all processes again with --resume"


@contextmanager
def missing_are_said(advice: str = _ADVICE) -> Iterator[None]:
    """Turn the errors of collectives into one sentence. advice: what to do then."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if not isinstance(error, dist.DistError) and not any(x in text for x in ("gloo", "NCCL", "ProcessGroup")):
            raise
        raise AxesError(
            "another process of the run is gone, or did not come in time "
            f"({_TIMEOUT} seconds, {_MOST:g} if that is not set): its own error says why. {advice} ({text[:160]})"
        ) from error


def agreed(what: Callable[[], Made], same: Callable[[Made], Mapping[str, Any]]) -> Made:
    """Let every process of torchrun do something, or this one alone without it; what any refuses is refused on all.

    same: of what was made, by name, what has to be one and the same on all.
    """
    if not launched():
        return what()
    made: Made | None = None
    said, shown = "", {}
    try:
        made = what()
        shown = dict(same(made))
    except (AxesError, OSError) as error:
        said = " ".join(str(error).split())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (said, shown))
    refused = {error: rank for rank, (error, _) in reversed([*enumerate(every)]) if error}
    if len(refused) == 1 and all(error for error, _ in every):
        raise AxesError(said)
    if refused:
        raise AxesError("; ".join(f"process {rank}: {error}" for error, rank in refused.items()))
    first = every[0][1]
    for rank, (_, other) in enumerate(every):
        for name in first:
            if other.get(name) != first[name]:
                raise AxesError(
                    f"process {rank} has another {name} than process 0, {other.get(name)} and {first[name]}: give all "
                    "the same options and the same files"
                )
    return cast(Made, made)


@final
class Processes:
    """Data parallel times sequence parallel, the parameters sharded over all.

    segments: processes that share the tokens of a window; a divisor of the number of processes.
    """

    def __init__(self, device: torch.device, segments: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # seconds, which one process need not wait

        self.rank, self.size, self.segments = dist.get_rank(), dist.get_world_size(), segments
        if self.size % segments:
            raise AxesError(f"sequence-parallel {segments} does not divide the {self.size} processes of torchrun")
        self.device = device if device.type != "cuda" else torch.device("cuda", torch.cuda.current_device())
        self.every = init_device_mesh(device.type, (self.size,), mesh_dim_names=("all",))
        shape, names = (self.size // segments, segments), ("data", "sequence")
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.replicas, self.replica = shape[0], self.mesh.get_local_rank("data")

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def shard(self, model: LanguageModel) -> None:
        """Before the optimizer is built: the model's layers learn of the other segments, its parameters are sharded."""
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        # outputs are views, and nobody changes them in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self.split(model)
        for layer in model.sublayers:
            fully_shard(layer, mesh=self.every)
        fully_shard(model, mesh=self.every)
        register_fsdp_forward_method(model, "loss")

    def split(self, model: LanguageModel) -> None:
        if self.segments > 1:
            parallel.sequence(model, self.mesh["sequence"])

    def own(self, windows: Tensor) -> Tensor:
        """This process's share of windows (B, T + 1): its sequences, and of these its tokens."""
        mine = windows.chunk(self.replicas)[self.replica]
        return parallel.segment(mine, self.mesh["sequence"], more=1) if self.segments > 1 else mine

    def mean(self, x: Tensor) -> Tensor:
        total = x.detach().double()
        dist.all_reduce(total)
        return total / self.size

    def any(self, here: bool) -> bool:
        """Whether it is so on any process."""
        flag = torch.tensor(float(here), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def first_does(self, what: Callable[[], Made]) -> Made | None:
        """Let the first process do something; what it refuses is refused on all."""
        said: list[Any] = [None]
        made = None
        if self.leads:
            try:
                made = what()
            except (AxesError, OSError) as error:
                said = [str(error)]
        dist.broadcast_object_list(said, 0)
        if said[0] is not None:
            raise AxesError(said[0])
        return made
