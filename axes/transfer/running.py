"""Running a plan into a folder: what is missing, in processes side by side, each run kept as soon as it is done."""

from __future__ import annotations

import gc
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from axes.errors import AxesError
from axes.tasks.workers import Died, Last, side_by_side
from axes.transfer.capture import require_capture
from axes.transfer.folder import ResultsFolder
from axes.transfer.plan import Group, Plan
from axes.transfer.results import compile_folder
from axes.transfer.training import Crowded, Run, train_together

Watch = Callable[[str, int, int], None]  # what was done last, how many runs are done, of how many
_MOST_WORKERS = 256


class RunsFailed(AxesError):
    """Some runs failed; `results` are those of all others."""

    def __init__(self, failed: list[str], results: dict[str, Any]) -> None:
        super().__init__(failed[0] if len(failed) == 1 else f"{failed[0]} (and {len(failed) - 1} more failed so)")
        self.failed, self.results = failed, results


def unwatched(what: str, done: int, of: int) -> None:
    """For runs that nobody waits for."""


def run(
    plan: Plan, out: str | Path, workers: int = 1, watch: Watch = unwatched, command: str = "",
    until: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run what the folder does not hold yet of a plan, and say what all of it says: the contents of transfer.json.

    Args:
        plan: as `axes.transfer.plan.planned` makes it.
        out: the folder; it may hold runs of the same plan, or of other experiments with the same settings.
        workers: processes; on a GPU they share it. 1 runs in this one. What is found does not depend on their number.
        until: of `time.monotonic`; runs that are not done then are given up, and the same call goes on with them.

    Raises:
        AxesError: the folder is of another version or plan, or is being written; arm and control differ in parameters
            by more than 1 %; RunsFailed, once everything that does not fail is done. What was done is kept.
    """
    if not 1 <= workers <= _MOST_WORKERS:
        raise AxesError(f"--workers must be from 1 to {_MOST_WORKERS}, got {workers}")
    require_capture(plan.capture, torch.device(plan.device))
    plan.require_equal_sizes()
    folder = ResultsFolder(out)
    with folder.held():
        folder.begin(plan, command)
        try:
            failed = _fill(plan, folder, workers, watch, until)
        finally:
            results = compile_folder(folder)
    if failed:
        raise RunsFailed(failed, results)
    return results


def _fill(plan: Plan, folder: ResultsFolder, workers: int, watch: Watch, until: float | None) -> list[str]:
    """Run what is missing; what failed, a sentence each."""
    runs = folder.runs()
    started: set[str] = set()
    failed: list[str] = []
    offered: list[Group] = []
    waiting: deque[Group] = deque()
    alone = False  # one process, one run at a time

    def ask() -> None:
        """What can be started now, in the order of the plan: what follows from a sweep comes before later sweeps."""
        left = {group[0].key for group in waiting}
        started.update(job.key for group in offered if group[0].key not in left for job in group)
        jobs = (job for job in plan.wanted(runs) if job.key not in started)
        offered[:] = [(job,) for job in jobs] if alone else plan.groups(jobs, workers)
        waiting.clear()
        waiting.extend(offered)

    def pieces(count: int) -> Iterator[tuple[Group, Any]]:
        return side_by_side(_work, waiting, count, until) if workers > 1 else _here(waiting, until)

    def worked() -> Iterator[tuple[Group, Any]]:
        """What came of every group; what lacked memory is tried once more when all others have given theirs back."""
        nonlocal alone
        crowded: list[tuple[Group, Lacking]] = []
        for group, found in pieces(workers):
            if isinstance(found, Lacking):
                crowded.append((group, found))
            yield group, [] if isinstance(found, Lacking) else found
        if not crowded or (until is not None and time.monotonic() >= until):
            yield from ((group, found.said) for group, found in crowded)
            return
        alone = True
        started.difference_update(job.key for group, _ in crowded for job in group)
        ask()
        for group, found in pieces(1):
            yield group, found.said if isinstance(found, Lacking) else found

    ask()
    done = _kept(plan, runs)
    watch("", done, max(plan.runs_in_all(), done + sum(map(len, waiting))))
    for group, found in worked():
        if isinstance(found, Died):
            found = (
                f"the process that ran {group[0].key} died (out of memory, say; {len(runs)} runs are kept): "
                "use fewer --workers, and the same command goes on"
            )
        if isinstance(found, str):
            failed.append(f"{plan.whose(group[0])}: {found}")
            found = []
        for one in found:
            folder.keep(one)
            runs[one.key] = one
        ask()
        for one in found:
            done += 1
            watch(one.key, done, max(plan.runs_in_all(), done + sum(map(len, waiting))))
    return failed


def _kept(plan: Plan, runs: dict[str, Run]) -> int:
    """How many of the plan's runs are there."""
    mine = {(s.key, task) for s, task in plan.trained()}
    return sum((r.system, r.task) in mine for r in runs.values())


def _here(waiting: deque[Group], until: float | None) -> Iterator[tuple[Group, Any]]:
    threads = torch.get_num_threads()
    try:
        while waiting and (until is None or time.monotonic() < until):
            group = waiting.popleft()
            done = _work(group)
            yield group, done.done if isinstance(done, Last) else done
    finally:
        torch.set_num_threads(threads)


class Lacking(NamedTuple):
    """There was too little memory for a group, beside others."""

    said: str


def _work(group: Group) -> list[Run] | str | Lacking | Last:
    """Runs, or why there are none, in a sentence where it is a reader's matter."""
    torch.set_num_threads(1)  # as in every worker: sums round differently on another number
    gpu = group[0].device.startswith("cuda")
    try:
        runs = train_together(group)
    except Crowded as error:
        return Last(Lacking(str(error)))  # all that its process holds goes back
    except AxesError as error:
        return str(error)
    except Exception:
        said = f"{group[0].key} failed: {traceback.format_exc(limit=-3)}"
        return Last(said) if gpu else said  # what a driver is left with, nobody knows
    if gpu:  # others share the device
        gc.collect()  # a model, its step and its graph hold one another
        torch.cuda.empty_cache()
    return Last(runs) if any(run.note for run in runs) else runs
