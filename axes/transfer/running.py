"""Running a plan into a folder: what is missing, in processes side by side, each run kept as soon as it is done."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from axes.errors import AxesError
from axes.tasks.workers import Died, side_by_side
from axes.transfer.capture import require_capture
from axes.transfer.folder import ResultsFolder
from axes.transfer.plan import Plan
from axes.transfer.results import compile_folder
from axes.transfer.training import Job, Run, train

Watch = Callable[[str, int, int], None]  # what was done last, how many runs are done, of how many
_MOST_WORKERS = 256


def unwatched(what: str, done: int, of: int) -> None:
    """For runs that nobody waits for."""


def run(plan: Plan, out: str | Path, workers: int = 1, watch: Watch = unwatched, command: str = "") -> dict[str, Any]:
    """Run what the folder does not hold yet of a plan, and say what all of it says: the contents of transfer.json.

    Args:
        plan: as `axes.transfer.plan.planned` makes it.
        out: the folder; it may hold runs of the same plan, or of other experiments with the same settings.
        workers: processes; on a GPU they share it. 1 runs in this one.

    Raises:
        AxesError: the folder is of another version or plan, or is being written; arm and control differ in parameters
            by more than 1 %; a run needs more memory than there is. What was done is kept.
    """
    if not 1 <= workers <= _MOST_WORKERS:
        raise AxesError(f"--workers must be from 1 to {_MOST_WORKERS}, got {workers}")
    require_capture(plan.capture, torch.device(plan.device))
    plan.require_equal_sizes()
    folder = ResultsFolder(out)
    with folder.held():
        folder.begin(plan, command)
        try:
            _fill(plan, folder, workers, watch)
        finally:
            results = compile_folder(folder)
    return results


def _fill(plan: Plan, folder: ResultsFolder, workers: int, watch: Watch) -> None:
    runs = folder.runs()
    started: set[str] = set()
    waiting: deque[Job] = deque()

    def ask() -> None:
        for job in plan.wanted(runs):
            if job.key not in started:
                started.add(job.key)
                waiting.append(job)

    ask()
    own = {job.key for job in waiting}
    done = _kept(plan, runs)
    watch("", done, max(plan.runs_in_all(), done + len(own)))
    arriving = side_by_side(_work, waiting, workers) if workers > 1 else _here(waiting)
    for job, found in arriving:
        if isinstance(found, Died):
            raise AxesError(
                f"the process that ran {job.key} died (out of memory, say; {len(runs)} runs are kept): "
                "use fewer --workers, and the same command goes on"
            )
        if isinstance(found, str):
            raise AxesError(found)
        folder.keep(found)
        runs[found.key] = found
        ask()
        done += 1
        watch(job.key, done, max(plan.runs_in_all(), done + len(waiting)))


def _kept(plan: Plan, runs: dict[str, Run]) -> int:
    """How many of the plan's runs are there."""
    mine = {(s.key, task) for s, task in plan.trained()}
    return sum((r.system, r.task) in mine for r in runs.values())


def _here(waiting: deque[Job]) -> Any:
    threads = torch.get_num_threads()
    try:
        while waiting:
            job = waiting.popleft()
            yield job, _work(job)
    finally:
        torch.set_num_threads(threads)


def _work(job: Job) -> Run | str:
    """A run, or why there is none, in a sentence where it is a reader's matter."""
    torch.set_num_threads(1)  # as in every worker: sums round differently on another number
    try:
        return train(job)
    except AxesError as error:
        return str(error)
    except Exception:
        return f"{job.key} failed: {traceback.format_exc(limit=-3)}"
