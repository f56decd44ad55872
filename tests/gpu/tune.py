"""What the sizes of the token, substitution and network kernels cost at the shapes that they are for.

    python -m tests.gpu.tune --out tuned.jsonl        # on a machine with a GPU; stops by itself after --limit seconds
    python -m tests.gpu.tune --only substitution --only adam

Every candidate is compiled in a process of its own, then timed alone in this one, forward and forward with backward,
and held to what the sizes of the package give, tensor by tensor. A row is written as soon as it is there; the fastest
of each case are timed once more beside what the package has, when nothing else runs. In the first row of a case stand
the time of every kernel and errors against float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from axes.bench.check import compare
from axes.bench.rules import Shape, Signal, find
from axes.bench.timing import median, peak_extra
from axes.routes import dispatch, token
from tests.gpu.told import distance

HALF = torch.bfloat16
AGREES = 2e-2  # of candidates with what the package has, bfloat16
_PROCESSES, _SECONDS = 14, 0.12


class Case(NamedTuple):
    """A rule at a shape, and what is changed of its sizes."""

    rule: str
    width: int
    route: str
    change: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.rule} {self.width}"

    def shape(self, tokens: int = 4096, batch: int = 8) -> Shape:
        return Shape(batch, tokens, 16, self.width)


def cases() -> list[Case]:
    """Those of the package first, then the changes, by turns of the rules."""
    found: list[list[Case]] = []
    for rule in ("moneta", "memora", "adam", "lattice decoding", "lattice without norms"):
        walk = token.walk(find((rule,))[0].update, 64, 64)
        assert not isinstance(walk, token.NoWalk), walk
        changes: list[dict[str, Any]] = [{}]
        if rule in ("memora", "adam"):  # whose rows do not meet: more programs, that exchange among fewer warps
            some = ((32, walk.warps // 2), (16, walk.warps // 4), (16, 2), (32, 4))
            changes += [{"rows": n, "warps": w, "across": a} for a in "kv" for n, w in some]
        changes += [{"across": "v"}, {"ahead": 0}, {"ahead": 2}]
        changes += [{"chunk": n} for n in (16, 32, 64) if n != walk.chunk]
        changes += [{"warps": n} for n in (walk.warps // 2, walk.warps * 2) if 1 <= n <= 16]
        changes += [{"grouped": False}]
        if walk.rows < 64:
            changes += [{"rows": walk.rows * 2}]
        found.append([Case(rule, 64, "token", change) for change in changes])
    spread: list[dict[str, Any]] = [{"AT_ONCE": ()}, {"AT_ONCE": tuple((g, r) for g in range(3) for r in range(3))}]
    spread += [{"AT_ONCE_WARPS": 8, "AT_ONCE_COLUMNS": 128}, {"SERIAL_PART": 128}]
    rules = (("longhorn", 128), ("yaad", 128), ("yaad prev", 128), ("frank-wolfe delta", 128), ("ttt-linear", 64))
    for rule, width in rules:
        rows = rule in ("longhorn", "yaad", "yaad prev")  # a head is one program where rows meet
        changes = [{}, *(c for c in spread if rows or "SERIAL_PART" not in c)]
        found.append([Case(rule, width, "substitution", change) for change in changes])
    tiles: list[dict[str, Any]] = [{"WARPS": 16}, {"WARPS_AGAIN": 16}, {"WARPS_BACK": 16}, {"WARPS_READS": 4}]
    tiles += [{"WARPS_READS": 16}, {"SEGMENT": 8}, {"SEGMENT": 32}]
    for rule in ("ttt mlp", "titans mlp", "yaad mlp"):
        found.append([Case(rule, 64, "cascade", change) for change in ({}, *tiles)])
    longest = max(map(len, found))
    return [group[i] for i in range(longest) for group in found if i < len(group)]


@contextmanager
def changed(case: Case) -> Iterator[None]:
    """Within the block kernels have these sizes."""
    if case.route in ("substitution", "cascade"):
        from axes.kernels.network import hold
        from axes.kernels.substitution import chain as substitution

        sizes = substitution if case.route == "substitution" else hold
        with patch.multiple(sizes, **case.change) if case.change else nullcontext():
            yield
        return
    usual, kept = token.walk, {}  # type: ignore[var-annotated]

    def walk(*given: Any) -> Any:
        if given not in kept:
            told = {"hopper": None} if case.change else {}
            kept[given] = dataclasses.replace(usual(*given), **told, **case.change)
        return kept[given]

    with patch.object(token, "walk", walk):
        yield


def calls(case: Case, signal: Signal) -> tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]:
    """The forward, and the forward with the backward, whose results have names."""
    (rule,) = find((case.rule,))
    leaves = {n: x.detach().requires_grad_() for n, x in signal.items()}
    torch.manual_seed(0)
    do = torch.randn_like(signal["v"])

    def run(given: Signal) -> Tensor:
        return dispatch.run(rule.update, given, implementation="triton")[0]

    def forward() -> tuple[Tensor]:
        with torch.no_grad():
            return (run(signal),)

    def both() -> dict[str, Tensor]:
        out = run(leaves)
        made = torch.autograd.grad(out, list(leaves.values()), do)
        return {"o": out.detach(), **{f"d{n}": g for n, g in zip(leaves, made, strict=True)}}

    return forward, both


def compiled(given: tuple[int, Case]) -> tuple[int, float, str]:
    """In a process of its own: what a case compiles for, and why it does not."""
    index, case = given
    begun = time.monotonic()
    try:
        (rule,) = find((case.rule,))
        with changed(case):
            forward, both = calls(case, rule.signal(case.shape(64, 1), HALF, torch.device("cuda")))
            forward(), both()
            torch.cuda.synchronize()
        return index, time.monotonic() - begun, ""
    except Exception as error:
        return index, time.monotonic() - begun, f"{type(error).__name__}: {str(error)[:300]}"


def milliseconds(call: Callable[[], object]) -> float:
    """Median of eager calls by events."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    found: list[float] = []
    begun = time.monotonic()
    while len(found) < 3 or (time.monotonic() - begun < _SECONDS and len(found) < 50):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        found.append(before.elapsed_time(after))
    return statistics.median(found)


def passes(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of every kernel of a call."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    taken: dict[str, float] = {}
    for event in found.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            taken[event.name[:48]] = taken.get(event.name[:48], 0.0) + event.time_range.elapsed_us() / 1e3
    return {n: round(t, 4) for n, t in sorted(taken.items(), key=lambda x: -x[1])[:8]}


def measured(case: Case, signal: Signal, want: dict[str, Tensor] | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with changed(case):
        forward, both = calls(case, signal)
        got = both()
        row: dict[str, Any] = {}
        if want is not None:
            verdict = compare(got, want, AGREES)
            row["apart"], row["wrong"] = verdict.error, verdict.reason
        row["forward"], row["both"] = milliseconds(forward), milliseconds(both)
        row["megabytes"] = peak_extra(lambda: both().values()) / 1e6
        if want is None:
            row["passes"] = passes(both)
            first = {n: x[:1, :512, :2] for n, x in signal.items()}
            exact = calls_exact(case, first)
            small = calls(case, first)[1]()
            row["error"] = {n: float(f"{distance(small[n], w):.2e}") for n, w in exact.items()}
    return row, got


def calls_exact(case: Case, signal: Signal) -> dict[str, Tensor]:
    """In float64 by torch, of the first tokens of two heads."""
    (rule,) = find((case.rule,))
    leaves = {n: x.double().detach().requires_grad_() for n, x in signal.items()}
    torch.manual_seed(0)
    do = torch.randn_like(signal["v"])
    out, _ = dispatch.run(rule.update, leaves)
    made = torch.autograd.grad(out, list(leaves.values()), do.double())
    return {"o": out.detach(), **{f"d{n}": g for n, g in zip(leaves, made, strict=True)}}


def tune(out: Path, limit: float, only: tuple[str, ...], batch: int, tokens: int, plain: bool) -> None:
    begun = time.monotonic()
    work = [c for c in cases() if not only or c.route in only or c.rule in only]
    work = [c for c in work if not (plain and c.change)]
    rows: dict[int, dict[str, Any]] = {}
    wants: dict[str, dict[str, Tensor]] = {}
    device = torch.device("cuda")

    def write(row: dict[str, Any]) -> None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def signal(case: Case) -> Signal:
        (rule,) = find((case.rule,))
        return rule.signal(case.shape(tokens, batch), HALF, device)

    def kept(case: Case) -> dict[str, Tensor]:
        if case.key not in wants:
            with changed(case._replace(change={})):
                wants[case.key] = {n: x.cpu() for n, x in calls(case._replace(change={}), signal(case))[1]().items()}
        return {n: x.to(device) for n, x in wants[case.key].items()}

    def row(case: Case, index: int, seconds: float, why: str) -> None:
        made: dict[str, Any] = {
            "case": case.key,
            "route": case.route,
            "change": case.change,
            "compiled": round(seconds, 1),
        }
        try:
            if why:
                raise RuntimeError(why)
            found, got = measured(case, signal(case), kept(case) if case.change else None)
            if not case.change:
                wants[case.key] = {n: x.cpu() for n, x in got.items()}
            made |= found
        except Exception as error:
            made["refused"] = f"{type(error).__name__}: {str(error)[:300]}"
        rows[index] = made
        torch.cuda.empty_cache()
        write({**made, "at": round(time.monotonic() - begun, 1)})

    context = multiprocessing.get_context("spawn")
    with context.Pool(min(_PROCESSES, len(work))) as pool:
        waiting = pool.imap_unordered(compiled, list(enumerate(work)))
        for _ in work:
            left = limit - (time.monotonic() - begun)
            try:
                index, seconds, why = waiting.next(timeout=max(left, 0.1))
            except multiprocessing.TimeoutError:
                write({"stopped": f"{len(work) - len(rows)} candidates were not timed within {limit:.0f} s"})
                break
            row(work[index], index, seconds, why)
        pool.terminate()
    for key in dict.fromkeys(c.key for c in work):
        mine = {i: r for i, r in rows.items() if r["case"] == key and "both" in r and not r.get("wrong")}
        chosen = {min(mine, key=lambda i: mine[i][of]) for of in ("forward", "both")} if mine else set()
        chosen |= {i for i in mine if not mine[i]["change"]}
        for i in sorted(chosen):
            if time.monotonic() - begun > limit + 20:
                return
            with changed(work[i]):
                forward, both = calls(work[i], signal(work[i]))
                times = [median(call, device).best for call in (forward, lambda: both().values())]  # noqa: B023
            write({"again": key, "change": work[i].change, "forward": times[0], "both": times[1]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tuned.jsonl"))
    parser.add_argument("--limit", type=float, default=100.0, help="seconds")
    parser.add_argument("--only", action="append", default=[], help="a rule, token, substitution or cascade")
    parser.add_argument("--plain", action="store_true", help="what the package has, no candidates")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    given = parser.parse_args()
    tune(given.out, given.limit, tuple(given.only), given.batch, given.tokens, given.plain)
