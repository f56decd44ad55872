"""transfer.json: what the runs of a folder say. A function of its plan and its runs, in the order of their names.

A verdict is written where it may be believed: in the forms that are large enough, with every calibration as it must be.
"""

from __future__ import annotations

import statistics as averages
from collections.abc import Iterable, Mapping
from typing import Any

from axes.files import write_json
from axes.transfer.experiments import EXPERIMENTS
from axes.transfer.folder import ResultsFolder
from axes.transfer.named import NAMED
from axes.transfer.plan import SWEEP
from axes.transfer.statistics import compare, holm
from axes.transfer.training import Run

MARGIN = 0.02


def compiled(plan: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, Any]:
    """The contents of transfer.json."""
    calibrations = []
    for name, c in plan["calibrations"].items():
        found = _compared(plan, runs, c["systems"], c["task"], MARGIN)
        calibrations.append({"id": name, "question": c["question"], "holds": _holds(found, c), **found})
    whole = plan["form"] != "quick"
    believed = whole and all(c["holds"] for c in calibrations)
    experiments = []
    for e in sorted(plan["experiments"].values(), key=_place):
        compared = [_compared(plan, runs, e["systems"], task, e["margin"]) for task in e["tasks"]]
        experiments.append({**e, "compared": compared})
    primary = {e["id"]: e["compared"][0]["p"] for e in experiments if "p" in e["compared"][0]}
    corrected = holm(primary)
    for e in experiments:
        for i, found in enumerate(e["compared"]):
            if "p" in found:
                found["holm"] = corrected.get(e["id"]) if i == 0 else None
                found["verdict"] = found["verdict"] if believed else None
    kept = {key: value for key, value in plan.items() if key not in ("experiments", "calibrations")}
    rows = sorted(runs.values(), key=lambda run: (run.task, run.system, run.seed, run.lr))
    return {
        **kept,
        "verdicts": _about_verdicts(whole, calibrations),
        "calibrations": calibrations,
        "experiments": experiments,
        "runs": [run.as_dict() for run in rows],
    }


def _place(e: Mapping[str, Any]) -> int:
    """Where an experiment stands in the list of all, whichever command added it; one's own come last."""
    known = [one.id for one in (*EXPERIMENTS, *NAMED)]
    return known.index(e["id"]) if e["id"] in known else len(known)


def compile_folder(folder: ResultsFolder) -> dict[str, Any]:
    """What the folder's runs say, written to its transfer.json."""
    results = compiled(folder.plan(), folder.runs())
    write_json(folder.results, results)
    return results


def without_times(results: Mapping[str, Any]) -> dict[str, Any]:
    """The same, less everything that another run of the same plan would measure otherwise."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: cut(v) for k, v in value.items() if k not in ("times", "step_ms", "command", "date")}
        return [cut(v) for v in value] if isinstance(value, list) else value

    return {k: cut(v) for k, v in results.items()}


def _about_verdicts(whole: bool, calibrations: Iterable[Mapping[str, Any]]) -> str:
    """Why there are no verdicts, or nothing."""
    if not whole:
        return "a quick run: too small to say anything, so that there are no verdicts"
    if failed := [c["id"] for c in calibrations if not c["holds"] and "effect" in c]:
        return f"no verdicts: calibration {', '.join(failed)} did not come out as it must"
    if waiting := [c["id"] for c in calibrations if "effect" not in c]:
        return f"no verdicts yet: calibration {', '.join(waiting)} is not done"
    return ""


def _holds(found: Mapping[str, Any], c: Mapping[str, Any]) -> bool:
    if "p" not in found:
        return False
    if c["helps"]:
        return bool(found["low"] > c["least"])
    return found["verdict"] not in ("helps", "hurts")


def _compared(
    plan: Mapping[str, Any], runs: Mapping[str, Run], systems: list[str], task: str, margin: float
) -> dict[str, Any]:
    """Arm and control on a task: what each measured, and what their difference says once every seed is there."""
    metric, higher = (plan["trials"][task][key] for key in ("metric", "higher"))
    sides = [_side(runs, system, task) for system in systems]
    out: dict[str, Any] = {"task": task, "metric": metric, "higher": higher}
    out["arm"], out["control"] = sides
    seeds = [sorted(side["values"], key=int) for side in sides]
    if seeds[0] != seeds[1] or len(seeds[0]) < plan["seeds"]:
        out["missing"] = sum(plan["seeds"] - len(found) for found in seeds)
        return out
    arm, control = ([side["values"][seed] for seed in seeds[0]] for side in sides)
    return {**out, **compare(arm, control, margin, higher)._asdict()}


def _side(runs: Mapping[str, Run], system: str, task: str) -> dict[str, Any]:
    """One of two: values by seed, and what does not depend on a seed of the first of them."""
    mine = [run for run in runs.values() if run.system == system and run.task == task]
    measured = sorted((run for run in mine if run.seed != SWEEP), key=lambda run: run.seed)
    sweep = sorted((run for run in mine if run.seed == SWEEP), key=lambda run: run.lr)
    out: dict[str, Any] = {
        "system": system,
        "values": {str(run.seed): run.value for run in measured},
        "broke": sum(run.broke is not None for run in measured),
        "swept": [[run.lr, run.value] for run in sweep],
    }
    if measured:
        first = measured[0]
        out |= {"lr": first.lr, "parameters": first.parameters, "seen": first.seen, "flops": first.flops}
        out |= {"state": first.state, "by": _mean_by(measured)}
        out["step_ms"] = round(averages.median(run.times["step_ms"] for run in measured), 2)
    return out


def _mean_by(runs: Iterable[Run]) -> dict[str, dict[str, float]]:
    """Means over seeds of accuracies by length, by number of pairs, by position."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for kind, values in run.by.items():
            for name, value in values.items():
                found.setdefault(kind, {}).setdefault(name, []).append(value)
    return {kind: {name: averages.fmean(v) for name, v in values.items()} for kind, values in found.items()}
