"""`axes bench sequence`: every rule at every shape, by every contender that can compute it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from axes.bench.apart import Steps
from axes.bench.check import check
from axes.bench.floors import Ceilings, ceilings
from axes.bench.peers import FLA, LOOP, OURS, Contender, contenders, lifted_guard, tune_again, tuned
from axes.bench.results import Apart, Watch, begin, fill, unwatched
from axes.bench.rules import SequenceRule, Shape, Signal, find, read
from axes.bench.timing import Timing, median, peak_extra
from axes.errors import AxesError

FILE = "sequence.json"


@final
@dataclass(frozen=True)
class Row:
    """One contender at one rule and shape. Milliseconds; bytes; None where it was not measured."""

    rule: str
    shape: str
    dtype: str
    who: str
    forward: float | None = None
    forward_eager: float | None = None
    both: float | None = None
    both_eager: float | None = None
    first_call: float | None = None  # seconds, forward, with a cold kernel cache
    peak: int | None = None
    error: float | None = None
    worst: str = ""
    refused: str = ""  # why there are no numbers
    note: str = ""
    forward_floor: float | None = None
    both_floor: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.rule, self.shape, self.dtype, self.who


@final
@dataclass(frozen=True)
class Plan:
    """What is compared. configurations: of a peer's kernel that its tuner may try; 0 for all. apart: see
    `results.fill`."""

    rules: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    device: str = "cuda"
    who: tuple[str, ...] = ()
    first_calls: bool = False
    lift_guard: bool = False
    configurations: int = 0
    apart: Apart | None = None
    seed: int = 0


def measure(
    plan: Plan,
    folder: Path,
    watch: Watch = unwatched,
    fresh: bool = False,
) -> dict[str, Any]:
    """Measure every row that the folder does not hold yet; the file is written after each. Returns its contents."""
    device, _ = device_of(plan.device), dtype_of(plan.dtype)
    results = begin(folder / FILE, Row, device, plan.seed, fresh)
    limits = Ceilings(**results["ceilings"]) if results["ceilings"] else None
    if device.type == "cuda" and limits is None:
        limits = ceilings(device)
        results["ceilings"] = asdict(limits)

    every = [
        (Row(rule.name, str(Shape.parse(shape)), plan.dtype, who.name), partial(_row, plan=plan, limits=limits))
        for rule in find(plan.rules)
        for shape in plan.shapes
        for who in contenders(rule, device, plan.who)
    ]
    return fill(folder / FILE, results, every, watch, plan.apart)


def rows(results: dict[str, Any]) -> list[Row]:
    return [Row(**row) for row in results["rows"]]


def _row(row: Row, plan: Plan, limits: Ceilings | None) -> Steps[Row]:
    """The row; pauses when everything is compiled."""
    device, dtype = device_of(plan.device), dtype_of(plan.dtype)
    (rule,), shape = find((row.rule,)), Shape.parse(row.shape)
    (who,) = contenders(rule, device, (row.who,))
    with ExitStack() as around:
        if who.name == FLA:
            around.enter_context(tuned(plan.configurations))
            if plan.lift_guard:
                around.enter_context(lifted_guard())
        row = yield from _measured(row, rule, shape, dtype, device, who, plan, limits)
    guard = plan.lift_guard and who.name == FLA
    return replace(row, note="; ".join(filter(None, (row.note, "guard lifted")))) if guard else row


def _measured(
    row: Row,
    rule: SequenceRule,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    who: Contender,
    plan: Plan,
    limits: Ceilings | None,
) -> Steps[Row]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    signal = rule.signal(shape, dtype, device, plan.seed)
    if limits is not None and who.same_rule:
        a = rule.account(shape, dtype)
        row = replace(
            row,
            forward_floor=limits.milliseconds(a.forward_bytes, a.forward_flops),
            both_floor=limits.milliseconds(a.both_bytes, a.both_flops),
        )
    backward = True
    if who.same_rule:
        verdict = check(rule, who.run, signal, backward=True)
        if not verdict.right:
            alone = check(rule, who.run, signal, backward=False)
            if not alone.right:
                return replace(row, refused=verdict.reason, error=verdict.error, worst=verdict.worst)
            backward, row = False, replace(row, note=f"no backward: {verdict.reason}")
            verdict = alone
        row = replace(row, error=verdict.error, worst=verdict.worst)
    forward, both = _calls(who, signal)
    if plan.apart is not None:  # all that compiles, before the pause
        try:
            with torch.no_grad():
                forward()
            if backward:
                both()
        except torch.OutOfMemoryError:
            return replace(row, refused="out of memory")
        del signal, forward, both
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    yield
    if plan.apart is not None:
        tune_again()
        forward, both = _calls(who, rule.signal(shape, dtype, device, plan.seed))
    try:
        with torch.no_grad():
            timing = median(forward, device)
        row = replace(row, forward=timing.best, forward_eager=timing.eager)
        if backward:
            timing = _both(both, device)
            row = replace(row, both=timing.best, both_eager=timing.eager)
            if device.type == "cuda":
                row = replace(row, peak=peak_extra(both))
    except torch.OutOfMemoryError:
        return replace(row, refused="out of memory")
    if plan.first_calls and device.type == "cuda" and who.same_rule:
        row = replace(row, first_call=first_call(rule.name, str(shape), plan.dtype, who.name))
    return row


def _calls(who: Contender, signal: Signal) -> tuple[Any, Any]:
    leaves = {n: x.detach().requires_grad_() for n, x in signal.items()}
    used = [leaves[n] for n in (leaves if who.same_rule else "qkv")]
    do = torch.randn(read(signal), dtype=signal["v"].dtype, device=signal["v"].device)

    def forward() -> Any:
        return who.run(signal)

    def both() -> Any:
        out, final = who.run(leaves)
        return (out, final, *torch.autograd.grad(out, used, do))

    return forward, both


def _both(call: Any, device: torch.device) -> Timing:
    return median(call, device)


def first_call(rule: str, shape: str, dtype: str, who: str) -> float | None:
    """Seconds of the first forward in a new process with a cold Triton cache, imports and the device's start apart."""
    program = (
        "import sys, time, torch\n"
        "from axes.bench.peers import contenders\n"
        "from axes.bench.rules import Shape, find\n"
        "rule, shape, dtype, who = sys.argv[1:]\n"
        "device = torch.device('cuda')\n"
        "(rule,) = find((rule,))\n"
        "signal = rule.signal(Shape.parse(shape), getattr(torch, dtype), device)\n"
        "(chosen,) = contenders(rule, device, (who,))\n"
        "torch.cuda.synchronize(); begun = time.perf_counter()\n"
        "with torch.no_grad(): chosen.run(signal)\n"
        "torch.cuda.synchronize(); print('seconds', time.perf_counter() - begun)\n"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        command = [sys.executable, "-c", program, rule, shape, dtype, who]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    found = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    return float(found[-1].split()[1]) if done.returncode == 0 and found else None


def device_of(name: str) -> torch.device:
    """The device of this name, which has to be here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise AxesError(f"--device is cpu or cuda, not {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise AxesError("--device cuda: torch sees no CUDA device; use --device cpu")
    return device


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise AxesError(f"--dtype is one of {', '.join(dtypes)}, not {name!r}")
    return dtypes[name]


def ratios(found: Sequence[Row]) -> dict[tuple[str, str, str], tuple[float | None, float | None]]:
    """For each (rule, shape, dtype): time of the best other contender over ours, forward and forward + backward.

    On a CPU the chunked form is ours and the token loop the other.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        groups.setdefault(row.key[:3], []).append(row)
    out = {}
    for key, members in groups.items():
        ours = next((r for r in members if r.who == OURS), None) or next((r for r in members if r.who != LOOP), None)
        others = [r for r in members if r is not ours and r.who in (FLA, LOOP)]
        out[key] = (_ratio(ours, others, "forward"), _ratio(ours, others, "both"))
    return out


def _ratio(ours: Row | None, others: list[Row], field: str) -> float | None:
    mine = getattr(ours, field) if ours is not None else None
    theirs = [getattr(r, field) for r in others if getattr(r, field) is not None]
    return min(theirs) / mine if mine and theirs else None
