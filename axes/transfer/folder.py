"""The folder of results: `plan.json`, a file a run under `runs`, and `transfer.json`, which is made of them.

Every file is replaced whole (`axes.files`), so a kill loses runs that were not finished and nothing else. One process
at a time writes. A folder holds runs of one version of the package, one form, one number of seeds and one device;
further experiments may be added to it, by other commits of that version too: what a run is, its name says.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from filelock import FileLock, Timeout

import axes
from axes.errors import AxesError
from axes.files import explained, is_temporary, read_json, write_json
from axes.transfer.experiments import Experiment
from axes.transfer.plan import Plan
from axes.transfer.training import Run, run_of

FORMAT = 1
_PLAN, _RUNS, _LOCK = "plan.json", "runs", ".lock"
RESULTS = "transfer.json"


@final
class ResultsFolder:
    """Reading and writing of one folder's files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.results = self.path / RESULTS

    def __str__(self) -> str:
        return str(self.path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other process writes here meanwhile. Raises AxesError if one does, or if the folder is somebody else's."""
        self.require_no_file()
        plan = self.path / _PLAN
        there = [p.name for p in self.path.iterdir()] if self.path.is_dir() and not plan.exists() else []
        if any(name not in (_RUNS, _LOCK) and not is_temporary(name, plan) for name in there):
            raise AxesError(f"{self} holds something that `axes transfer` did not write: choose another --out")
        with explained(self.path):
            (self.path / _RUNS).mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / _LOCK)
        with explained(self.path / _LOCK):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                other = f"{self} is being written by another process: wait for its end, or choose another --out"
                raise AxesError(other) from None
        try:
            for half in (self.path / _RUNS).glob(".*.json"):  # of a writer that was killed
                half.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def require_no_file(self) -> None:
        """AxesError where something that is no folder has its name."""
        if self.path.exists() and not self.path.is_dir():
            raise AxesError(f"{self} is a file, and results are a folder: choose another --out")

    def begin(self, plan: Plan, command: str = "") -> dict[str, Any]:
        """Write down what is run here, or add it to what was. Raises AxesError for another version or plan."""
        described = described_plan(plan, command)
        path = self.path / _PLAN
        if path.exists():
            before = self.plan()
            if wrong := _unlike(before, described):
                raise AxesError(f"{self} holds runs of {wrong}: choose another --out")
            described = _joined(before, described)
        write_json(path, described)
        return described

    def plan(self) -> dict[str, Any]:
        """What is run here. Raises AxesError if nothing is, or another version of the format."""
        path = self.path / _PLAN
        if not path.exists():
            kind = "is no folder" if not self.path.is_dir() else f"holds no {_PLAN}"
            raise AxesError(f"{self} {kind}: it holds no results of `axes transfer run`")
        try:
            found: dict[str, Any] = read_json(path)
            version = found["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AxesError(f"{path} is not a plan of `axes transfer`: {error}") from None
        if version != FORMAT:
            raise AxesError(f"{path} has the format {version}, and this version reads {FORMAT}: run again elsewhere")
        return found

    def runs(self) -> dict[str, Run]:
        """Every finished run by its key."""
        found = {}
        for path in sorted((self.path / _RUNS).glob("[!.]*.json")):
            try:
                run = run_of(read_json(path))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise AxesError(f"{path} is not a run of `axes transfer`: {error}; remove it to run it again") from None
            found[run.key] = run
        return found

    def keep(self, run: Run) -> None:
        write_json(self.path / _RUNS / f"{run.key}.json", run.as_dict())


_FIXED = {
    "form": "form", "seeds": "number of seeds", "device": "device", "capture": "way to step", "torch": "torch",
}  # fmt: skip
# a folder that several commits, days or GPUs have filled says all of them
_GROWS = ("version", "hardware", "command", "date")


def _both(before: str, now: str) -> str:
    return "; ".join(dict.fromkeys(part for text in (before, now) for part in text.split("; ") if part))


def _joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Two plans that are not unlike, as one."""
    return {
        **before,
        **{name: _both(before.get(name, "unknown"), now.get(name, "unknown")) for name in _GROWS},
        "trials": before["trials"] | now["trials"],
        "experiments": before["experiments"] | now["experiments"],
        "calibrations": now["calibrations"],
    }


def _unlike(before: dict[str, Any], now: dict[str, Any]) -> str:
    """In what the runs of a folder differ from those that are asked for, or nothing."""
    ours, theirs = now["version"].split(" at ")[0], {x.split(" at ")[0] for x in before["version"].split("; ")}
    if theirs != {ours}:
        return f"another version, {before['version']}, not {now['version']}"
    if now["device"] == "cpu" and before["hardware"] != now["hardware"]:
        return f"another machine, {before['hardware']}, not {now['hardware']}"
    for name, word in _FIXED.items():
        if before[name] != now[name]:
            return f"another {word}, {before[name]}, not {now[name]}"
    for kind in ("trials", "experiments"):
        for name in sorted(before[kind].keys() & now[kind].keys()):
            if before[kind][name] != now[kind][name]:
                return f"another plan, in which {name} was not the same"
    return ""


def put_together(sources: Sequence[ResultsFolder], out: ResultsFolder) -> None:
    """Fill a new folder with what several hold: runs of one plan that were made on several GPUs.

    A system's runs on a trial come from one folder, the one that has most of them, of equals the first: what is
    measured follows from a sweep, and on a GPU two sweeps may choose two rates. Those that calibrate on a trial stay
    together, since one of them may have the rate of another.

    Raises AxesError: a folder is given twice, holds no results, or of another version, form, number of seeds, device,
    way to step, torch or plan than the first; `out` holds something; a folder is being written.
    """
    places = [source.path.resolve() for source in sources]
    if twice := next((s for i, s in enumerate(sources) if places[i] in places[:i]), None):
        raise AxesError(f"{twice} is given twice: name every folder once")
    plan = functools.reduce(partial(_fitting, sources[0]), sources[1:], sources[0].plan())
    out.require_no_file()
    if out.path.exists() and any(out.path.iterdir()):
        raise AxesError(f"{out} is not empty: folders are put together in a new one, choose another --out")
    calibrating = {(c["task"], system) for c in plan["calibrations"].values() for system in c["systems"]}
    chosen: dict[tuple[str, str], list[Run]] = {}
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source.held())
            mine: dict[tuple[str, str], list[Run]] = {}
            for run in source.runs().values():
                whose = "" if (run.task, run.system) in calibrating else run.system
                mine.setdefault((run.task, whose), []).append(run)
            chosen |= {unit: runs for unit, runs in mine.items() if len(runs) > len(chosen.get(unit, ()))}
    with out.held():
        for run in itertools.chain.from_iterable(chosen.values()):
            out.keep(run)
        write_json(out.path / _PLAN, plan)


def _fitting(first: ResultsFolder, plan: dict[str, Any], source: ResultsFolder) -> dict[str, Any]:
    """A plan with that of a further folder."""
    further = source.plan()
    if wrong := _unlike(further, plan):
        raise AxesError(f"{source} does not go with {first}: it holds runs of {wrong}")
    return _joined(plan, further)


def described_plan(plan: Plan, command: str = "") -> dict[str, Any]:
    """A plan for a file: everything that a report says of it."""
    return {
        "format": FORMAT,
        "version": version(),
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "form": plan.form,
        "seeds": plan.seeds,
        "device": plan.device,
        "capture": plan.capture,
        **machine(plan.device),
        "trials": {
            name: {"metric": one.metric, "higher": one.higher, "steps": one.steps, "seen": one.seen, "is": repr(one)}
            for name, one in plan.trials().items()
        },
        "experiments": {e.id: described(e, plan) for e in plan.experiments},
        "calibrations": {
            c.id: {
                "question": c.question,
                "helps": c.helps,
                "least": c.least,
                "task": c.task,
                "systems": [c.arm.key, c.control.key],
            }
            for c in plan.calibrations
        },
    }


def described(e: Experiment, plan: Plan) -> dict[str, Any]:
    """An experiment for a file."""
    arm, control = e.systems
    return {
        "id": e.id,
        "question": e.question,
        "source": e.source,
        "axis": e.axis,
        "margin": e.margin,
        "tasks": list(plan.tasks_of(e)),
        "arm": {f: repr(getattr(e.arm.normal(), f)) for f in FIELDS},
        "control": {f: repr(getattr(e.control.normal(), f)) for f in FIELDS},
        "moved": [[d.path, repr(d.first), repr(d.second)] for d in e.moved],
        "systems": [arm.key, control.key],
        "schedules": list(e.schedules),
        "shared": e.shared,
        **({"said": e.said} if e.said else {}),
    }


FIELDS = ("cost", "h", "monoid", "algorithm", "memory")


@functools.cache
def version() -> str:
    """Of the package, with the commit where it runs from a checkout."""
    root = Path(axes.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return axes.__version__
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return axes.__version__
    return f"{axes.__version__} at {said.stdout.strip()}"


def machine(device: str) -> dict[str, Any]:
    """Where runs run."""
    where = torch.device(device)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else _processor()
    return {"hardware": name, "torch": torch.__version__, "python": platform.python_version()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} CPUs"
