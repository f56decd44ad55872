"""Faults of GPU kernels, planted one at a time in copies of the tree, and whether the tests of the GPU see them.

    python -m tests.gpu.faults --workers 14 --limit 240 --report docs/mutants_gpu     # with a GPU, Hopper for all of them
    python -m tests.gpu.faults --render docs/mutants_gpu                              # the page again, from its JSON

Missing masks, gates at the wrong end, exchanged signs, dropped barriers and fences, wrong strides and phases. Every fault
names the narrowest tests that should see it. These run without it first: they are to pass, and leave Triton's cache warm,
so that a fault compiles the kernels that it changes and no other (the cache goes by a kernel's source, so all workers
share it). Every worker has a copy of the tree; a fault runs in a process of its own with a limit of time, since a dropped
barrier may wait for ever. What is known is written down after every fault; at --limit the rest is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.planted import Child, First, Raised, copied, forked, tests_of


class Fault(NamedTuple):
    """was stands once in the file. tests: of tests/gpu, one of which must fail."""

    file: str
    was: str
    now: str
    tests: tuple[str, ...]


class Found(NamedTuple):
    """outcome: seen, slow (it did not end), compiler (no kernel was made), survived, or why it was not shown."""

    fault: Fault
    outcome: str
    by: str
    seconds: float


def _of(file: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"tests/gpu/test_{file}.py::test_{t}" for t in tests)


SCALAR = _of("scalar", "equals_the_token_loop[T=300 dtype=float32]")
SEGMENTED = _of("scalar", "gradients_of_segments_are_those_of_the_whole")
EARLY = _of("scalar", "equals_the_token_loop[K=128 V=128 dtype=float32 group=2 erase=True early=True]")
HOPPER = _of(
    "hopper_forward", "lengths[torch.bfloat16-64-65]", "a_full_chip_repeats_and_equals_its_parts[torch.bfloat16-64]"
)
BACKWARD = _of("hopper_backward", "lengths[64-65]")
WRITE = _of(
    "hopper_write", "it_runs_and_equals_the_token_loop_no_worse_than_the_portable_kernels[T=300 rule=write]",
    "a_full_chip_repeats_and_equals_its_parts[torch.bfloat16-64-64]",
)  # fmt: skip
DIAGONAL = _of("diagonal", "lengths[torch.float32-65]", "kinds_of_input[torch.float32-shut channels]")
CARRIED = _of(
    "diagonal", "lengths[torch.bfloat16-65]", "a_full_chip_repeats_and_equals_its_parts[bare-torch.bfloat16-64-64]"
)
SEGMENTS = _of("diagonal", "segments_side_by_side[mild-3]")
DELTA = _of("diagonal_delta", "lengths[-dplr-torch.float32]")
BLOCK = _of("block", "lengths[torch.float32-65]")
PAIRS = _of("block", "lengths[torch.bfloat16-65]")
FLASH = _of("attention", "widths[16-64-torch.float32]")
ATTENTION = _of("attention", "lengths[64-torch.bfloat16-masses]")
STORED = _of("attention", "lengths[64-torch.bfloat16-masses]", "bits_repeat")
DECODE = _of("attention", "decoding_is_the_forward[rope-torch.float32]")
TURN = _of("attention", "turn[torch.float32]")
KEYS = _of("attention", "carried_keys[64-torch.float32-plain]")
ROWS = _of("substitution", "in_bfloat16[huber, gated rows]")
YAAD = _of("substitution", "in_float32[yaad prev]")
LONGHORN = _of("substitution", "in_float32[longhorn]")
TOKEN = _of("token", "equals_the_interpreter_in_the_same_bits_again[lattice-osr-(2, 70, 3, 64, 64)-torch.float32]")
FORM = _of("token", "every_form_of_the_kernels[{'across': 'k'}]")
MONETA = _of("token", "equals_the_interpreter_in_the_same_bits_again[moneta-(2, 70, 3, 64, 64)-torch.float32]")
_STREAM = "d=2048 tokens=300 each=True dtype=bfloat16]"
READ = _of("streams", f"against_float64[name=read n=4 {_STREAM}")
MIX = _of("streams", f"against_float64[name=write n=4 {_STREAM}", f"against_float64[name=both n=4 {_STREAM}")
NARROW = _of("streams", "against_float64[name=write n=4 d=100 tokens=67 each=True dtype=bfloat16]")
_LOOK = "dtype=bfloat16 tanh=False"
LOOK = _of("streams", f"projected_coefficients[chart=sigmoid n=4 d=2048 tokens=300 entries=24 {_LOOK} centred=False]")
CENTRED = _of("streams", f"projected_coefficients[chart=softmax n=3 d=512 tokens=300 entries=27 {_LOOK} centred=True]")
SINKHORN = _of("streams", "sinkhorn[77-1.0-3]")
OUTER = _of("outer", "widths[130-torch.float32]")
PARTS = _of("outer", "parts[torch.float32]")
TILES = _of("hopper_symmetric", "every_form_equals_float64[hopper-520-1032-dtype0-result0]")
CORNERS = _of("hopper_symmetric", "every_form_equals_float64[triton-256-256-dtype0-result0]")
LOSS = _of("loss", "equals_float64_and_repeats[1-2048-128-32000-torch.float32]")
STEP = _of("step", "every_chain[torch.float32-dplr-channel]", "blocks[torch.float32]")

_SCALAR = "axes/kernels/scalar/"
_PASSES = "axes/kernels/substitution/passes.py"
_STREAMS = "axes/kernels/streams/"

FAULTS: tuple[Fault, ...] = tuple(
    Fault(*x)
    for x in (
        # gates at the wrong end, of the wrong token, or of the wrong sign
        (_SCALAR + "hopper.py", "gl.store(to + 2 * _C, gl.exp(total - run))", "gl.store(to + 2 * _C, gl.exp(run))", HOPPER),
        (_SCALAR + "hopper_write.py", "tl.store(at + C, tl.exp(total - run))", "tl.store(at + C, tl.exp(run))", WRITE),
        (_PASSES, "u = u * left[:, None]", "u = u * 1.0", YAAD),
        (_SCALAR + "delta.py", "kept = (tl.exp(total - run)[:, None] * u)", "kept = (tl.exp(run)[:, None] * u)", SCALAR),
        (_SCALAR + "delta.py", "missing = values - tl.exp(seen)[:, None]", "missing = values - tl.exp(run)[:, None]", EARLY),
        (_SCALAR + "delta.py", "out = tl.exp(run)[:, None] *", "out = tl.exp(seen)[:, None] *", EARLY),
        (_SCALAR + "delta.py", "            state *= tl.exp(total)\n", "            state *= tl.exp(-total)\n", SCALAR),
        (_SCALAR + "delta.py", "            grad *= tl.exp(total)\n", "            pass\n", SCALAR),
        (_SCALAR + "delta.py", "reached = (tl.exp(run)[:, None] * dout)", "reached = (tl.exp(total)[:, None] * dout)", SCALAR),
        (_SCALAR + "delta.py", "erased = (-tl.exp(seen)[:, None] * r)", "erased = (tl.exp(seen)[:, None] * r)", SEGMENTED),
        (_SCALAR + "delta.py", "erased = (-(strength * tl.exp(seen))[:, None] * r)", "erased = ((strength * tl.exp(seen))[:, None] * r)", SCALAR),
        (_SCALAR + "delta.py", "+ tl.exp(total) * tl.sum(both, 0)", "+ tl.sum(both, 0)", SCALAR),
        (_SCALAR + "delta.py", "later_sum(read_dots, C, not EARLY)", "later_sum(read_dots, C, EARLY)", SCALAR),
        ("axes/kernels/diagonal/hopper.py", "state = state * tl.exp(run)[None, :] + tl.load(", "state = state + tl.load(", SEGMENTS),
        (_PASSES, "sight = tl.exp(run - logs)\n                reads, u", "sight = scale\n                reads, u", YAAD),
        ("axes/kernels/step.py", "seen = tl.sum(old * eraser[None, :], 1)", "seen = tl.sum(new * eraser[None, :], 1)", STEP),
        # masks
        (_SCALAR + "delta.py", "lower = lower * decay(seen[:, None], run[None, :], i > j)", "lower = lower * decay(seen[:, None], run[None, :], i >= j)", SCALAR),
        (_SCALAR + "hopper.py", "floored(gl.load(g + at, mask=token < T, other=0.0))", "floored(gl.load(g + at, mask=token < T, other=-1.0))", HOPPER),
        (_SCALAR + "hopper_backward.py", "gl.store(dbeta + there, dstrength, mask=token < T)", "gl.store(dbeta + there, dstrength, mask=token < T - 1)", BACKWARD),
        (_SCALAR + "hopper_write.py", "gl.store(line + there, total, mask=token < T)", "gl.store(line + there, total, mask=token < T - 1)", WRITE),
        ("axes/kernels/diagonal/channels.py", "out += tl.where(met(size, flat, C, STRICT), product, 0.0)", "out += product", DIAGONAL),
        ("axes/kernels/diagonal/channels.py", "kept = tl.where(met(size, flat, C, STRICT), dp, 0.0)", "kept = dp", DIAGONAL),
        ("axes/kernels/diagonal/channels.py", "keep = tl.where(flat, same, same & (i // half != j // half))", "keep = same", DIAGONAL),
        ("axes/kernels/diagonal_delta/gradients.py", "inside = tl.where(i >= j, scores, 0.0)", "inside = tl.where(i > j, scores, 0.0)", DELTA),
        ("axes/kernels/diagonal_delta/gradients.py", "strict = tl.where(i > j, lower, 0.0)", "strict = tl.where(i >= j, lower, 0.0)", DELTA),
        ("axes/kernels/diagonal_delta/gradients.py", "inside2 = tl.where(i >= j, scores2, 0.0)", "inside2 = tl.where(i > j, scores2, 0.0)", DELTA),
        ("axes/kernels/block/weights.py", "m11 = tl.load(block + at * 4 + 3, mask=here, other=1.0)", "m11 = tl.load(block + at * 4 + 3, mask=here, other=0.0)", BLOCK),
        ("axes/kernels/block/weights.py", "gy0 = tl.where(s < t, gy0, 0.0)", "gy0 = tl.where(s <= t, gy0, 0.0)", BLOCK),
        ("axes/kernels/block/kernels.py", "tl.store(pairs, tl.where(t >= s, dscores * near, 0.0))", "tl.store(pairs, tl.where(t > s, dscores * near, 0.0))", BLOCK),
        ("axes/kernels/attention/flash.py", "s = tl.where((j[None, :] <= i[:, None] + old) & (j < end)[None, :], s, float(\"-inf\"))", "s = tl.where((j < end)[None, :], s, float(\"-inf\"))", FLASH),
        ("axes/kernels/attention/flash.py", "s = tl.where(j[:, None] <= i[None, :] + old, s, float(\"-inf\"))", "s = tl.where(j[:, None] < i[None, :] + old, s, float(\"-inf\"))", FLASH),
        ("axes/kernels/attention/hopper.py", "(j[None, :] <= i[:, None] + old) & (j < S)[None, :], s,", "(j[None, :] <= i[:, None] + old + 1) & (j < S)[None, :], s,", ATTENTION),
        ("axes/kernels/attention/decode.py", "s = tl.where((j < end)[None, :], s, float(\"-inf\"))", "s = tl.where((j < end + 1)[None, :], s, float(\"-inf\"))", DECODE),
        ("axes/kernels/attention/masses.py", "tl.store(high + at, near, mask=at < n)", "tl.store(high + at, near, mask=at < n - 1)", FLASH),
        (_PASSES, "reads = late > soon\n", "reads = late >= soon\n", LONGHORN),
        (_STREAMS + "mix.py", "(token < tokens)[:, None] & (column < d)[None, :]", "(token < tokens)[:, None] & (column < d + 1)[None, :]", NARROW),
        (_STREAMS + "predict.py", "z = tl.where((j < N)[None, :], z, float(\"-inf\"))", "z = tl.where((j < N + 1)[None, :], z, float(\"-inf\"))", CENTRED),
        ("axes/kernels/products/outer.py", "mask=inside & (part == 0), other=0.0)", "mask=inside, other=0.0)", PARTS),
        # signs, scales and strides
        ("axes/kernels/attention/decode.py", "share = tl.exp2(top - tl.max(top, 0))", "share = tl.exp2(top - tl.min(top, 0))", DECODE),
        ("axes/kernels/attention/turn.py", "tl.store(target, (x * c - y * s).to(kind), mask=here)", "tl.store(target, (x * c + y * s).to(kind), mask=here)", TURN),
        ("axes/kernels/attention/blocks.py", "lower = tl.where(row > col, -tl.dot(left,", "lower = tl.where(row > col, tl.dot(left,", KEYS),
        ("axes/kernels/block/hopper_pairs.py", "gl.where(i > j, -scores * near, 0.0)", "gl.where(i > j, scores * near, 0.0)", PAIRS),
        ("axes/kernels/attention/hopper_backward.py", "gl.store(dm + (b.to(gl.int64) * S + j) * (H // GROUP) + g, dmass, mask=j < S)", "gl.store(dm + (b.to(gl.int64) * S + j) * (H // GROUP), dmass, mask=j < S)", ATTENTION),
        ("axes/kernels/block/kernels.py", "tl.store(states + (at * 2 + 1) * K * V + inner, old1, mask=within)", "tl.store(states + (at * 2 + 1) * K * V + inner, old0, mask=within)", BLOCK),
        (_PASSES, "of = tl.where(line[:, None] <= token, of, 0.0)", "of = tl.where(line[:, None] < token, of, 0.0)", ROWS),
        (_PASSES, "own = tl.load(pair + (256 + 17 * line))", "own = tl.load(pair + (256 + 16 * line))", LONGHORN),
        (_PASSES, "store_tile(turns, w, first, rows, v, head, H, V, 16)", "store_tile(turns, y, first, rows, v, head, H, V, 16)", YAAD),
        (_PASSES, "grad_k += 2.0 * length[:, None]", "grad_k += 1.0 * length[:, None]", LONGHORN),
        ("axes/kernels/token/functions.py", "return a + c, b + d", "return a + d, b + c", FORM),
        ("axes/kernels/token/gluon_functions.py", "gl.sum(_before(x, AXIS, WARPS), AXIS + 1)", "gl.max(_before(x, AXIS, WARPS), AXIS + 1)", TOKEN),
        ("axes/kernels/token/gluon_functions.py", "return _unit(x, \"rsqrt\")", "return _unit(x, \"sqrt\")", TOKEN),
        ("axes/programs/tile_text.py", "before = f\"{self._turn('t')} - 1\"", "before = self._turn('t')", MONETA),
        ("axes/programs/tile_text.py", "f\"tl.minimum(t + {walk.early}, count - 1)\"", "f\"tl.minimum(t + {walk.early} + 1, count - 1)\"", MONETA),
        ("axes/programs/tile_text.py", "self._store(n, \"t - start\")", "self._store(n, \"end - 1 - t\")", TOKEN),
        (_STREAMS + "mix.py", "_tell(dr, grad * _stream(x, token, column, inside, d, j, N)", "_tell(dr, grad * _stream(x, token, column, inside, d, 0, N)", READ),
        (_STREAMS + "mix.py", "c = _number(m, token, there, i * N + j, N * N, MIX)", "c = _number(m, token, there, j * N + i, N * N, MIX)", MIX),
        (_STREAMS + "mix.py", "back += mixing[i * N + j] * grads[i]", "back += mixing[j * N + i] * grads[i]", MIX),
        (_STREAMS + "predict.py", "mean = _added(moments, rows + row, there, parts, 2 * rows) / width", "mean = _added(moments, row, there, parts, 2 * rows) / width", CENTRED),
        (_STREAMS + "look.py", "heard * share * (1.0 - share)", "heard * share", LOOK),
        (_STREAMS + "look.py", "rest *= tl.load(pre + token * N + j, mask=there, other=0.0)", "rest *= tl.load(pre + token * N, mask=there, other=0.0)", LOOK),
        (_STREAMS + "sinkhorn.py", "tl.store(place + step + i, top + rest, mask=rows)", "tl.store(place + i, top + rest, mask=rows)", SINKHORN),
        ("axes/kernels/products/outer.py", "_finish(out, start, scale, tl.trans(total), n, part, N, columns, rows, above,", "_finish(out, start, scale, total, n, part, N, columns, rows, above,", OUTER),
        ("axes/kernels/products/hopper_symmetric.py", "tile.permute((1, 0)).store(out)", "tile.store(out)", TILES),
        ("axes/kernels/products/symmetric.py", "right = b.load([batch, col, k]).reshape(TILE, DEPTH).T", "right = b.load([batch, row, k]).reshape(TILE, DEPTH).T", CORNERS),
        ("axes/kernels/rows/cross_entropy.py", "total = tl.sum(sums * tl.exp(peaks - peak))", "total = tl.sum(sums)", LOSS),
        ("axes/kernels/step.py", "_number(block, entry, block_row, head * 4 + 2)", "_number(block, entry, block_row, head * 4 + 1)", STEP),
        # barriers, fences and phases
        (_SCALAR + "hopper.py", "mbarrier.wait(scored.index(buffer), n // BUFFERS & 1)", "pass", HOPPER),
        (_SCALAR + "hopper_write.py", "mbarrier.wait(scored.index(buffer), count // BUFFERS & 1)", "pass", WRITE),
        ("axes/kernels/diagonal/hopper.py", "mbarrier.wait(done, count & 1)", "mbarrier.wait(done, (count & 1) ^ 1)", CARRIED),
        ("axes/kernels/attention/hopper_backward.py", "mbarrier.wait(stored, 0)", "pass", STORED),
        ("axes/kernels/products/hopper_symmetric.py", "mbarrier.wait(left, turned & 1)", "pass", TILES),
    )
)  # fmt: skip


# Faults that change nothing a test can tell, by file and what became of it: the reason.
EQUIVALENT: dict[tuple[str, str], str] = {
    (_SCALAR + "delta.py", "lower = lower * decay(seen[:, None], run[None, :], i >= j)"): (
        "the inverse reads what is below the diagonal alone"
    ),
    ("axes/kernels/block/weights.py", "gy0 = tl.where(s <= t, gy0, 0.0)"): (
        "the rows it meets are zero from s = t on, and of column s what is before t is no longer asked for"
    ),
}


# ---- a run -----------------------------------------------------------------------------------------------------------


def _shown(tree: Path, tests: tuple[str, ...]) -> Callable[[], Any]:
    def work() -> tuple[str, str]:
        os.environ["PYTEST_XDIST_WORKER"] = (
            "gw0"  # tests/gpu/test_scalar.py compiles all of its kernels for one process
        )
        plugin = First()
        status = tests_of(tree, tests, plugin, "-x")
        ended = f"pytest ended with {status}" if status else "" if plugin.ran else "every test was skipped"
        return plugin.name or ended, plugin.said

    return work


class _Worker:
    """A copy of the tree; the process that runs in it, of a fault or, without one, of tests alone."""

    def __init__(self, tree: Path) -> None:
        self.tree = copied(tree)
        self.child: Child | None = None
        self.fault: Fault | None = None
        self.tests: tuple[str, ...] = ()
        self._before = ""

    def begin(self, fault: Fault | None, tests: tuple[str, ...], seconds: float) -> None:
        self.fault, self.tests = fault, tests
        if fault is not None:
            path = self.tree / fault.file
            self._before = path.read_text(encoding="utf-8")
            path.write_text(self._before.replace(fault.was, fault.now), encoding="utf-8")
        self.child = Child(_shown(self.tree, tests), seconds)

    def end(self) -> None:
        if self.fault is not None:
            (self.tree / self.fault.file).write_text(self._before, encoding="utf-8")
        self.child = self.fault = None


def _outcome(answer: Any, seconds: float) -> tuple[str, str]:
    if answer is None:
        return "slow", f"longer than {seconds:.0f} s"
    if isinstance(answer, Raised):
        return "not shown: an error of this tool", answer.text[-200:]
    if answer == "ended":
        return "seen", "the process died"
    name, said = answer
    if not name:
        return "survived", ""
    kind = "compiler" if "CompilationError" in said or "cannot be collected" in name else "seen"
    return kind, f"{name.removeprefix('tests/gpu/')}: {said}"[:240]


def run(
    faults: list[Fault], workers: int, seconds: float, limit: float, known: Callable[[list[Found]], None]
) -> list[Found]:
    """Every fault's outcome. known is called with what is known after every one."""
    begun, found = time.monotonic(), list[Found]()
    alone = deque(dict.fromkeys(f.tests for f in faults))  # tests without a fault
    took: dict[tuple[str, ...], float] = {}
    waiting, ready = list(faults), deque[Fault]()
    with tempfile.TemporaryDirectory() as folder:
        crew = [_Worker(Path(folder) / f"tree{n}") for n in range(workers)]
        while alone or ready or any(w.child for w in crew):
            if time.monotonic() - begun > limit:
                for w in crew:
                    if w.child:
                        w.child.kill()
                        w.end()
                break
            for w in crew:
                if w.child and w.child.done():
                    _settle(w, seconds, took, waiting, ready, found)
                    known(found)
                if w.child is None and alone:
                    w.begin(None, alone.popleft(), limit)
                elif w.child is None and ready:
                    fault = ready.popleft()
                    w.begin(fault, fault.tests, max(seconds, 3 * took[fault.tests]))
            time.sleep(0.05)
    done = {x.fault for x in found}
    found += [Found(f, "not shown: no time was left", "", 0.0) for f in faults if f not in done]
    known(found)
    return found


def _settle(
    w: _Worker, seconds: float, took: dict[tuple[str, ...], float], waiting: list[Fault], ready: deque[Fault],
    found: list[Found],
) -> None:  # fmt: skip
    """What a worker's process has told."""
    assert w.child is not None
    spent = time.monotonic() - w.child.begun
    outcome, by = _outcome(w.child.answer, spent)
    if w.fault is not None:
        found.append(Found(w.fault, outcome, by, spent))
        print(
            f"{len(found)} {spent:.0f} s {outcome}: {w.fault.file}: {' '.join(w.fault.now.split())} ({by})", flush=True
        )
    else:
        took[w.tests] = spent
        print(f"without a fault {spent:.0f} s {outcome} {' '.join(w.tests)} {by}", flush=True)
        mine = [f for f in waiting if f.tests == w.tests]
        if outcome == "survived":
            ready.extend(mine)
        else:
            found.extend(Found(f, "not shown: its tests fail without it", by, spent) for f in mine)
    w.end()


def report(found: list[Found]) -> str:
    """Markdown: how many were seen, and every fault with what saw it."""
    same = [x for x in found if x.outcome == "survived" and (x.fault.file, x.fault.now) in EQUIVALENT]
    shown = [x for x in found if not x.outcome.startswith("not shown") and x not in same]
    seen = sum(x.outcome in ("seen", "slow") for x in shown)
    head = ["| file | was | became | outcome | by |", "| --- | --- | --- | --- | --- |"]
    rows = []
    for x in sorted(found, key=lambda x: (x.outcome in ("seen", "slow"), x.fault.file)):
        told = EQUIVALENT[x.fault.file, x.fault.now] if x in same else x.by.split(":")[0]
        was, now, by = (" ".join(t.split()).replace("|", "\\|") for t in (x.fault.was, x.fault.now, told))
        rows.append(f"| `{x.fault.file}` | `{was}` | `{now}` | {'equivalent' if x in same else x.outcome} | {by} |")
    count = f"{seen} of {len(shown)} faults that were shown and change anything were seen; {len(same)} change nothing.\n"
    return "\n".join((count, *head, *rows)) + "\n"


_HEAD = """# Planted faults of GPU kernels

Written by `python -m tests.gpu.faults --report docs/mutants_gpu` on a GPU:
{device}. Each fault is shown to the narrowest tests that should see it, which pass
without it.

"""


def _page(path: Path, rows: list[dict[str, Any]], device: str) -> None:
    found = [Found(Fault(r["file"], r["was"], r["now"], ()), r["outcome"], r["by"], r["seconds"]) for r in rows]
    path.with_suffix(".md").write_text(_HEAD.format(device=device) + report(found), encoding="utf-8")


def _kept(path: Path, device: str, found: list[Found]) -> None:
    rows = [
        {"file": x.fault.file, "was": x.fault.was, "now": x.fault.now, "outcome": x.outcome, "by": x.by,
         "seconds": round(x.seconds, 1)} for x in found
    ]  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps({"device": device, "faults": rows}, indent=1) + "\n")
    _page(path, rows, device)


def _seen(path: Path) -> list[Found]:
    """What an earlier report has seen of the faults that there are."""
    rows = {(r["file"], r["was"], r["now"]): r for r in json.loads(path.read_text())["faults"]}
    kept = ((f, rows.get((f.file, f.was, f.now))) for f in FAULTS)
    return [Found(f, r["outcome"], r["by"], r["seconds"]) for f, r in kept if r and r["outcome"] in ("seen", "slow")]


def _device() -> str:
    """What is there, asked of a forked process, as tests will. This one imports what all of them need, and asks nothing:
    after that no process forked from it could use the GPU."""
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import triton

    def work() -> str:
        name = "no GPU"
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
            name = torch.cuda.get_device_name()
        return f"{name}, torch {torch.__version__}, Triton {triton.__version__}"

    found = forked(work, 120)
    if not isinstance(found, str) or found == "ended":
        raise SystemExit(f"a forked process could not use the GPU: {found}")
    return str(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60, help="of one fault")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of all")
    parser.add_argument("--only", default="", help="files whose path has this")
    parser.add_argument(
        "--again", type=Path, help="NAME.json of an earlier report: what it has seen is not shown again"
    )
    parser.add_argument("--report", type=Path, help="NAME.json and NAME.md")
    parser.add_argument("--render", type=Path, help="write NAME.md from NAME.json, and nothing else")
    given = parser.parse_args()
    if given.render:
        kept = json.loads(given.render.with_suffix(".json").read_text())
        return _page(given.render, kept["faults"], kept["device"])
    device, begun = _device(), time.monotonic()
    seen = _seen(given.again) if given.again else []
    there = {x.fault for x in seen}
    faults = [f for f in FAULTS if given.only in f.file and f not in there]

    def known(found: list[Found]) -> None:
        if given.report:
            _kept(given.report, device, seen + found)

    found = run(faults, given.workers, given.seconds, given.limit, known)
    print(report([x for x in found if x.outcome not in ("seen", "slow")]))
    print(
        f"{sum(x.outcome in ('seen', 'slow') for x in found)} of {len(found)} seen in {time.monotonic() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
