"""How a tile lies over threads: candidates for the kernels of tokens, each checked and then timed.

    python -m tests.gpu.tune_token --seconds 120        # on a machine with a GPU

Each is compiled in a process of its own and held to the float64 interpreter, outputs, states and all gradients; what is
right is timed alone as a CUDA graph with cold L2, forward and with backward.
All are printed beside what the package has ("today"), and every candidate that is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from axes import sequence
from axes.programs.tile_text import Threads, Walk
from axes.routes import token, token_threads

UPDATES = {
    "moneta": sequence.MonetaMatrix.update,
    "memora": sequence.MemoraMatrix.update,
    "adam": sequence.AdamNet.update,
    "lattice-dec": sequence.LatticeDec.update,
    "lattice-osr": sequence.LatticeOSR.update,
    "lattice-dec 128": sequence.LatticeDec.update,
}
HALF = torch.bfloat16
BOUND = 2e-2


def shape(rule: str, batch: int = 2, length: int = 77) -> tuple[int, ...]:
    """77 tokens are no whole number of spans."""
    width = int(rule.partition(" ")[2] or 64)
    return batch, length, 16, width, width


class Candidate(NamedTuple):
    """What is changed of what is walked forward and back; None: nothing."""

    rule: str
    forward: dict[str, Any] | None = None
    back: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return "today" if self.forward is None else f"{_said(self.forward)} | {_said(self.back or {})}"


def _said(change: dict[str, Any]) -> str:
    """In few letters: lanes and warps along rows x keys, and what else is changed."""
    given = dict(change)
    lanes, warps = given.pop("threads", ((0, 0), (0, 0)))
    rest = " ".join(f"{n[:2]}{int(v)}" for n, v in given.items() if n not in ("across", "warps"))
    return f"l{lanes[0]}x{lanes[1]} w{warps[0]}x{warps[1]} {rest}" if lanes[0] else rest or "same"


def laid(lanes: tuple[int, int], warps: tuple[int, int], **more: Any) -> dict[str, Any]:
    return {"threads": Threads(lanes, warps), "warps": warps[0] * warps[1], "across": "v", **more}


def candidates() -> list[Candidate]:
    """Those that take long to compile first."""
    tall, square, long = (laid(lanes, (1, 1)) for lanes in ((8, 4), (4, 8), (2, 16)))
    one, two, soon = {"unroll": 1}, {"unroll": 2}, {"early": 1}
    turned, reread = {"level": 15.0}, {"reread": True}
    apart = {
        "adam": [
            (square | two, long | one), (tall | one, long | two), (square | one, square | two),
            (tall | one, tall | one),
        ],
        "memora": [(square | two, square | two), (tall | one, long | two), (tall | two | soon, tall | two)],
    }  # fmt: skip
    return [
        Candidate("lattice-dec 128", turned, reread),
        Candidate("lattice-dec 128", {}, reread),
        Candidate("lattice-dec 128", laid((8, 4), (1, 8)), laid((8, 4), (1, 8)) | reread),
        *(Candidate(rule, forward, back) for rule, rows in apart.items() for forward, back in rows),
        Candidate("lattice-osr", turned, {}),
        Candidate("lattice-osr", turned | two, reread),
        Candidate("lattice-osr", turned | laid((8, 4), (1, 4)), laid((8, 4), (1, 8))),
        Candidate("lattice-dec", turned, {}),
        Candidate("lattice-dec", turned | two, laid((8, 4), (1, 8))),
        Candidate("lattice-dec", laid((8, 4), (1, 4)), reread),
        Candidate("moneta", one, two),
        Candidate("lattice-dec", {}, {}),
        Candidate("moneta", laid((4, 8), (8, 1), unroll=2), laid((4, 8), (8, 1))),
        Candidate("moneta", laid((8, 4), (4, 1), unroll=2), laid((2, 16), (4, 1))),
        *map(Candidate, UPDATES),
    ]


def changed(candidate: Candidate) -> Any:
    """Within the block the package walks so."""
    usual, kept = token.walk, {}  # type: ignore[var-annotated]

    def walk(*given: Any) -> Any:
        if given not in kept:
            found = usual(*given)
            assert isinstance(found, Walk)
            if candidate.forward is not None:  # of the same step, in the forms that are picked or by other prices
                assert found.hopper is not None
                changes = [dict(candidate.forward), dict(candidate.back or {})]
                level = changes[0].pop("level", None)
                if level is not None:
                    kind = token_threads.kind_of(found)
                    assert kind is not None
                    prices = dataclasses.replace(kind.prices, level=level)
                    step = token_threads.cheapest(found, prices)
                    changes = [{"step": step, **c} for c in changes]
                both = zip(found.hopper, changes, strict=True)
                told = tuple(dataclasses.replace(x, told=None, **c) for x, c in both)
                found = dataclasses.replace(found, told=lambda _: told)
            kept[given] = found
        return kept[given]

    return patch.object(token, "walk", walk)


def _drawn(rule: str) -> tuple[Any, Any]:
    from tests.gpu import test_token as held

    torch.manual_seed(0)
    signal = held.draw(UPDATES[rule], shape(rule), HALF)
    return signal, held.start(UPDATES[rule], signal, count=7)


@contextmanager
def _steady_states() -> Iterator[None]:
    """Within the block no gradient is asked of states that no token moves, as in training: another kernel."""
    from tests.gpu import test_token as held

    usual = held.results

    def results(run: Any, update: Any, signal: Any, state: Any, pulls: Any) -> Any:
        def without(update: Any, live: Any, state: Any, time: int) -> Any:
            leaves, form = pytree.tree_flatten(state)
            still = token._steady(update)
            leaves = [x.detach() if f"s{i}" in still else x for i, x in enumerate(leaves)]
            return run(update, live, pytree.tree_unflatten(leaves, form), time=time)

        return usual(without, update, signal, state, pulls)

    with patch.object(held, "results", results):
        yield


def exact(given: tuple[str, str]) -> None:
    """In a process of its own: what the interpreter says of a rule, into a file."""
    from tests.gpu import test_token as held

    rule, folder = given
    torch.set_num_threads(1)
    pulls: list[Tensor] = []
    with _steady_states():
        want = held.exact(UPDATES[rule], *_drawn(rule), pulls)
    torch.save((want, pulls), f"{folder}/{rule}.part")
    os.rename(f"{folder}/{rule}.part", f"{folder}/{rule}")


def check(given: tuple[int, Candidate, str]) -> tuple[int, float, float, str]:
    """In a process of its own: seconds of compiling, the largest error, and why there is none."""
    from tests.gpu import test_token as held

    index, candidate, folder = given
    torch.set_num_threads(1)
    begun = time.monotonic()
    try:
        signal, state = _drawn(candidate.rule)
        update = UPDATES[candidate.rule]
        with changed(candidate), torch.no_grad():
            bare, _ = token.run(update, signal, state, None)
        with changed(candidate), _steady_states():
            held.results(held.walked, update, signal, state, [])
        took = time.monotonic() - begun
        while not Path(folder, candidate.rule).exists():
            time.sleep(0.1)
        want, pulls = torch.load(f"{folder}/{candidate.rule}")
        with changed(candidate), _steady_states():
            got = held.results(held.walked, update, signal, state, pulls)
        worst, at = 0.0, ""
        for name, x in want.items():
            if x is None:
                continue
            mine = got[name]
            far = float("inf") if mine is None else ((mine.double().cpu() - x).norm() / (x.norm() + 1e-9)).item()
            if not far <= worst:
                worst, at = far if far == far else float("inf"), name
        if not (bare.double().cpu() - want["o"]).norm() <= BOUND * want["o"].norm():
            return index, took, worst, "without gradients it differs"
        return index, took, worst, "" if worst <= BOUND else f"{at} is {worst:.1e} off"
    except Exception as error:
        if "CUDA error" in str(error) or "illegal" in str(error):
            threading.Timer(0.3, os._exit, [0]).start()  # nothing else runs in such a process
        return index, time.monotonic() - begun, 0.0, f"{type(error).__name__}: {str(error).strip()[-160:]}"


def milliseconds(call: Callable[[], object], cold: Tensor) -> float:
    """The least of some replays of a CUDA graph, each with cold L2."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    found = []
    for _ in range(4):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cold.zero_()
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        found.append(before.elapsed_time(after))
    del graph
    torch.cuda.empty_cache()
    return min(found)


def timed(candidate: Candidate, cold: Tensor) -> tuple[float, float, int]:
    """Milliseconds of both, and MB that training takes beyond inputs, outputs and gradients."""
    from tests.gpu import test_token as held

    update = UPDATES[candidate.rule]
    torch.manual_seed(0)
    few = held.draw(update, shape(candidate.rule, 1, 128), HALF)  # on the host
    signal = {n: x.repeat(8, 32, *[1] * (x.ndim - 2)) for n, x in few.items()}
    leaves = {n: x.detach().requires_grad_() for n, x in signal.items()}
    do = torch.randn_like(signal["v"])

    def forward() -> Tensor:
        with torch.no_grad():
            return token.run(update, signal, None, None)[0]

    def both() -> Any:
        return torch.autograd.grad(token.run(update, leaves, None, None)[0], list(leaves.values()), do)

    with changed(candidate):
        took = milliseconds(forward, cold), milliseconds(both, cold)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = [*both(), do]  # what is read is as large as its cotangent
        beyond = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in made)
        return *took, round(beyond / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--processes", type=int, default=min(24, os.cpu_count() or 8))
    parser.add_argument("--only", action="append", default=[], help="a rule")
    parser.add_argument("--plain", action="store_true", help="what the package has, no candidates")
    given = parser.parse_args()
    begun, folder = time.monotonic(), mkdtemp()
    work = [c for c in candidates() if (not given.only or c.rule in given.only) and not (given.plain and c.forward)]
    checked: dict[int, tuple[float, float, str]] = {}
    pool = multiprocessing.get_context("spawn").Pool(given.processes)
    pool.map_async(exact, [(rule, folder) for rule in UPDATES], chunksize=1, error_callback=print)
    for i, candidate in enumerate(work):
        pool.apply_async(check, ((i, candidate, folder),), callback=lambda r: checked.__setitem__(r[0], r[1:]))
    for rule in dict.fromkeys(c.rule for c in work):  # what timing asks for, while others compile
        found = token.walk(UPDATES[rule], *shape(rule)[3:])
        assert isinstance(found, Walk)
        _ = found.hopper
    share = 0.66 * given.seconds  # the rest is timing's
    while len(checked) < len(work) and time.monotonic() - begun < share:
        time.sleep(0.2)
    pool.terminate()
    done = time.monotonic() - begun
    right = [i for i in sorted(checked) if not checked[i][2]]
    cold = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    times: dict[int, tuple[float, float, int]] = {}
    for i in right:
        if time.monotonic() - begun > given.seconds:
            break
        try:
            forward, both, beyond = times[i] = timed(work[i], cold)
        except Exception as error:
            checked[i] = (*checked[i][:2], f"{type(error).__name__}: {str(error).strip()[-120:]}")
            continue
        said = f"{forward:.2f} / {both:.2f}, back {both - forward:.2f}, {checked[i][1]:.0e} off"
        said += f", {beyond} MB, {checked[i][0]:.0f} s"
        print(f"{work[i].rule} {work[i].name}: {said}", flush=True)
    for i in sorted(checked):
        if checked[i][2]:
            print(f"WRONG {work[i].rule} {work[i].name}: {checked[i][2]}"[:200])
    late = [f"{work[i].rule} {work[i].name}" for i in range(len(work)) if i not in checked]
    slowest = max((x[0] for x in checked.values()), default=0.0)
    print(f"{len(work)} candidates, {len(right)} right, {len(times)} timed; checked in {done:.0f} s ({slowest:.0f})")
    print("late:", "; ".join(late)[:600])


if __name__ == "__main__":
    main()
