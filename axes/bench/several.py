"""Processes of a bench on this machine: torch's launcher starts them, and ends all when one of them dies."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import typer

from axes.errors import AxesError
from axes.tasks.processes import leaving, missing_are_said

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # which the launcher takes for itself, and keeps


def launch(module: str, processes: int, arguments: list[str]) -> None:
    """Run a module in so many processes. Raises AxesError if one of them fails: the others are ended with it."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if processes < 1:
        raise AxesError(f"--processes must be at least 1, got {processes}")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid.uuid4().hex, max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", rdzv_timeout=600,
    )  # fmt: skip
    try:
        with _own_signals_and_words():
            elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        raise AxesError(
            f"process {rank} of the {processes} of this bench {how}, and all were ended: what it said stands above"
        ) from None
    except SignalException:
        raise KeyboardInterrupt from None


@contextmanager
def _own_signals_and_words() -> Iterator[None]:
    """Handlers are afterwards what they were, threads of a process are as torchrun sets them, and of a process that
    died nothing is said but the sentence."""
    named = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in named}
    logger = logging.getLogger("torch.distributed.elastic")
    level, threads = logger.level, os.environ.get("OMP_NUM_THREADS")
    logger.setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        logger.setLevel(level)
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def met() -> Iterator[tuple[int, torch.device]]:
    """In one of the processes: its rank and its device, a GPU if there are enough. What it refuses ends it."""
    rank = int(os.environ["LOCAL_RANK"])
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    options: dict[str, Any] = {"backend": "gloo"}
    if gpu:
        torch.cuda.set_device(device)
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    dist.init_process_group(**options)
    try:
        with missing_are_said("Begin again"):
            yield rank, device
    except (AxesError, torch.OutOfMemoryError) as error:  # not taking the group apart: the others may be gone
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
    dist.destroy_process_group()


def process(main: Callable[..., None]) -> None:
    """What a module does that `launch` runs."""
    with leaving():
        typer.run(main)
