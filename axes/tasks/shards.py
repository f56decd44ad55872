"""Checkpoints of several processes: `checkpoint-STEP/`, written beside by all, then renamed by the first.

The shards are of `torch.distributed.checkpoint`; `numbers.pt` holds what all processes have, `rank-N.pt` the state of
a process's generators. Any number of processes reads them again; with as many, the same bits follow. Its `.metadata` is
a pickle: read checkpoints of people you trust, as torch's own.
"""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from axes.errors import AxesError
from axes.files import explained, sync
from axes.tasks.processes import Processes

_PREFIX, _NUMBERS = "checkpoint-", "numbers.pt"


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of several processes in a run folder."""
    found = [d for d in folder.glob(f"{_PREFIX}*") if d.is_dir() and d.name.removeprefix(_PREFIX).isdigit()]
    return max(found, key=lambda d: int(d.name.removeprefix(_PREFIX)), default=None)


def unfinished(name: str) -> bool:
    """Whether a folder of this name is what a process that was killed left."""
    return name.startswith(f".{_PREFIX}")


def remove(folder: Path) -> None:
    """All checkpoints of several processes, whole or not."""
    for place in (*folder.glob(f"{_PREFIX}*"), *folder.glob(f".{_PREFIX}*")):
        if place.is_dir():
            shutil.rmtree(place)


def write(
    folder: Path, processes: Processes, sharded: dict[str, Any], numbers: Mapping[str, Any], generators: Any
) -> None:
    """Called by all processes; the checkpoint before stands until this one is whole."""
    place = folder / f"{_PREFIX}{int(numbers['position']):08d}"
    new = folder / f".{place.name}"

    def begin() -> None:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()

    def end() -> None:
        with explained(place):
            torch.save({**numbers, "processes": processes.size}, new / _NUMBERS)
            sync(new)
        old = [d for d in folder.glob(f"{_PREFIX}*") if d.is_dir()]
        if place.exists():  # the same step once more: its end has moved
            os.rename(place, folder / f".{place.name}.old")
        os.rename(new, place)
        sync(folder)
        for d in (*old, folder / f".{place.name}.old"):
            if d != place:
                shutil.rmtree(d, ignore_errors=True)

    import torch.distributed.checkpoint as dcp  # seconds, for processes alone

    processes.first_does(begin)
    try:
        dcp.save(sharded, checkpoint_id=new)
    except dcp.CheckpointException as error:  # on all processes, with what kept each of them from writing
        reasons = sorted({" ".join(f"{cause}".split())[:200] for cause, _ in error.failures.values()})
        raise AxesError(f"could not write {place}: {'; '.join(reasons)}; the checkpoint before is intact") from None
    failed: AxesError | None = None
    try:
        with explained(place):
            torch.save(generators, new / f"rank-{processes.rank:05d}.pt")
    except AxesError as error:
        failed = error
    if processes.any(failed is not None):  # all have written
        raise failed or AxesError(f"could not write {place}: another process could not")
    processes.first_does(end)


def numbers_of(place: Path, rank: int = 0) -> dict[str, Any]:
    """What all processes had, and the generators of one, or those of the first where there was no such process."""
    file = place / f"rank-{rank:05d}.pt"
    try:
        numbers = torch.load(place / _NUMBERS, map_location="cpu", weights_only=True)
        generators = torch.load(file if file.exists() else place / "rank-00000.pt", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise AxesError(f"{place} is damaged: {' '.join(str(error).split())[:200]}") from None
    return {**numbers, "generators": generators}


def read(place: Path, sharded: dict[str, Any]) -> None:
    """Into the tensors given, which may be sharded over other processes than those that wrote."""
    import torch.distributed.checkpoint as dcp  # seconds, for processes alone

    try:
        dcp.load(sharded, checkpoint_id=place)
    except (OSError, RuntimeError, ValueError, KeyError, dcp.CheckpointException) as error:
        reason = " ".join(str(error).split())
        raise AxesError(f"{place} does not fit the run's configuration, or is damaged: {reason[:300]}") from None


def whole_model(place: Path) -> dict[str, torch.Tensor]:
    """The weights alone, whole, without processes."""
    import torch.distributed.checkpoint as dcp  # seconds, for processes alone
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    known = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    room: dict[str, Any] = {
        name: torch.empty(held.size, dtype=held.properties.dtype)
        for name, held in known.items()
        if isinstance(held, TensorStorageMetadata) and name.startswith("model.")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant
        dcp.load(room, checkpoint_id=place, no_dist=True)
    return {name.removeprefix("model."): x for name, x in room.items()}
