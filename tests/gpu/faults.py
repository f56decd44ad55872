"""Forty faults of GPU kernels, planted one at a time in a copy of the tree, and whether the tests of the GPU see them.

    python -m tests.gpu.faults                 # on a machine with a GPU, Hopper for all of them
    python -m tests.gpu.faults --report docs/mutants_gpu.md

Missing masks, gates at the wrong end, exchanged signs, dropped barriers and fences, wrong strides and phases. Each runs in
a process of its own with a limit of time, since a dropped barrier may wait for ever; one that survives is printed last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """was stands once in the file. tests: of tests/gpu, one of which must fail."""

    file: str
    was: str
    now: str
    tests: str


SCALAR, HOPPER = "test_scalar.py", "test_hopper_forward.py"
BACKWARD, WRITE = "test_hopper_backward.py", "test_hopper_write.py"
DIAGONAL, DELTA, BLOCK = "test_diagonal.py", "test_diagonal_delta.py", "test_block.py"
ATTENTION, STREAMS = "test_attention.py", "test_streams.py"

FAULTS: tuple[Fault, ...] = tuple(
    Fault(*x)
    for x in (
        # gates at the wrong end, of the wrong token, or of the wrong sign
        ("axes/kernels/scalar/delta.py", "kept = (tl.exp(total - run)[:, None] * u)", "kept = (tl.exp(run)[:, None] * u)", SCALAR),
        ("axes/kernels/scalar/delta.py", "missing = values - tl.exp(seen)[:, None]", "missing = values - tl.exp(run)[:, None]", SCALAR),
        ("axes/kernels/scalar/delta.py", "out = tl.exp(run)[:, None] *", "out = tl.exp(seen)[:, None] *", SCALAR),
        ("axes/kernels/scalar/delta.py", "            state *= tl.exp(total)\n", "            state *= tl.exp(-total)\n", SCALAR),
        ("axes/kernels/scalar/delta.py", "            grad *= tl.exp(total)\n", "            pass\n", SCALAR),
        ("axes/kernels/scalar/delta.py", "reached = (tl.exp(run)[:, None] * dout)", "reached = (tl.exp(total)[:, None] * dout)", SCALAR),
        ("axes/kernels/scalar/delta.py", "erased = (-tl.exp(seen)[:, None] * r)", "erased = (tl.exp(seen)[:, None] * r)", SCALAR),
        ("axes/kernels/scalar/delta.py", "+ tl.exp(total) * tl.sum(both, 0)", "+ tl.sum(both, 0)", SCALAR),
        ("axes/kernels/scalar/hopper.py", "gl.store(to + 2 * _C, gl.exp(total - run))", "gl.store(to + 2 * _C, gl.exp(run))", HOPPER),
        ("axes/kernels/scalar/hopper_write.py", "tl.store(at + C, tl.exp(total - run))", "tl.store(at + C, tl.exp(run))", WRITE),
        ("axes/kernels/diagonal/hopper.py", "state = state * tl.exp(run)[None, :] + tl.load(", "state = state + tl.load(", DIAGONAL),
        # masks
        ("axes/kernels/scalar/delta.py", "store_line(dg, tl.where(alive, dlog, 0.0),", "store_line(dg, dlog,", SCALAR),
        ("axes/kernels/scalar/delta.py", "product = tl.sum(tl.where(i == j, lower, 0.0), 1)", "product = tl.sum(tl.where(i >= j, lower, 0.0), 1)", SCALAR),
        ("axes/kernels/scalar/hopper.py", "strength = gl.load(beta + at, mask=token < T, other=0.0)", "strength = gl.load(beta + at, mask=token < T, other=1.0)", HOPPER),
        ("axes/kernels/scalar/hopper.py", "gl.store(runs + at, run, mask=token < T)", "gl.store(runs + at, run, mask=token < T - 1)", BACKWARD),
        ("axes/kernels/scalar/hopper_write.py", "gl.store(line + there, total, mask=token < T)", "gl.store(line + there, total, mask=token < T - 1)", WRITE),
        ("axes/kernels/diagonal/channels.py", "out += tl.where(met(size, flat, C, STRICT), product, 0.0)", "out += product", DIAGONAL),
        ("axes/kernels/diagonal/channels.py", "kept = tl.where(met(size, flat, C, STRICT), dp, 0.0)", "kept = dp", DIAGONAL),
        ("axes/kernels/diagonal/channels.py", "keep = tl.where(flat, same, same & (i // half != j // half))", "keep = same", DIAGONAL),
        ("axes/kernels/diagonal_delta/gradients.py", "inside = tl.where(i >= j, scores, 0.0)", "inside = tl.where(i > j, scores, 0.0)", DELTA),
        ("axes/kernels/diagonal_delta/gradients.py", "strict = tl.where(i > j, lower, 0.0)", "strict = tl.where(i >= j, lower, 0.0)", DELTA),
        ("axes/kernels/diagonal_delta/gradients.py", "inside2 = tl.where(i >= j, scores2, 0.0)", "inside2 = tl.where(i > j, scores2, 0.0)", DELTA),
        ("axes/kernels/block/weights.py", "m11 = tl.load(block + at * 4 + 3, mask=here, other=1.0)", "m11 = tl.load(block + at * 4 + 3, mask=here, other=0.0)", BLOCK),
        ("axes/kernels/block/weights.py", "gy0 = tl.where(s < t, gy0, 0.0)", "gy0 = tl.where(s <= t, gy0, 0.0)", BLOCK),
        ("axes/kernels/block/kernels.py", "tl.store(pairs, tl.where(t >= s, dscores * near, 0.0))", "tl.store(pairs, tl.where(t > s, dscores * near, 0.0))", BLOCK),
        ("axes/kernels/attention/flash.py", "s = tl.where((j[None, :] <= i[:, None] + old) & (j < end)[None, :], s, float(\"-inf\"))", "s = tl.where((j < end)[None, :], s, float(\"-inf\"))", ATTENTION),
        ("axes/kernels/attention/flash.py", "s = tl.where(j[:, None] <= i[None, :] + old, s, float(\"-inf\"))", "s = tl.where(j[:, None] < i[None, :] + old, s, float(\"-inf\"))", ATTENTION),
        ("axes/kernels/attention/hopper.py", "(j[None, :] <= i[:, None] + old) & (j < S)[None, :], s,", "(j[None, :] <= i[:, None] + old + 1) & (j < S)[None, :], s,", ATTENTION),
        ("axes/kernels/attention/decode.py", "s = tl.where((j < end)[None, :], s, float(\"-inf\"))", "s = tl.where((j < end + 1)[None, :], s, float(\"-inf\"))", ATTENTION),
        ("axes/kernels/attention/decode.py", "share = tl.exp2(top - tl.max(top, 0))", "share = tl.exp2(top - tl.min(top, 0))", ATTENTION),
        ("axes/kernels/attention/masses.py", "tl.store(low + at, tl.where(near - near == 0.0, rest, 0.0), mask=at < n)", "tl.store(low + at, 0.0 * rest, mask=at < n)", ATTENTION),
        # signs and strides
        ("axes/kernels/attention/turn.py", "tl.store(target, (x * c - y * s).to(kind), mask=here)", "tl.store(target, (x * c + y * s).to(kind), mask=here)", ATTENTION),
        ("axes/kernels/attention/blocks.py", "lower = tl.where(row > col, -tl.dot(a,", "lower = tl.where(row > col, tl.dot(a,", ATTENTION),
        ("axes/kernels/block/hopper_pairs.py", "gl.where(i > j, -scores * near, 0.0)", "gl.where(i > j, scores * near, 0.0)", BLOCK),
        ("axes/kernels/attention/hopper_backward.py", "gl.store(dm + (b.to(gl.int64) * S + j) * (H // GROUP) + g, dmass, mask=j < S)", "gl.store(dm + (b.to(gl.int64) * S + j) * (H // GROUP), dmass, mask=j < S)", ATTENTION),
        ("axes/kernels/block/kernels.py", "tl.store(states + (at * 2 + 1) * K * V + inner, old1, mask=within)", "tl.store(states + (at * 2 + 1) * K * V + inner, old0, mask=within)", BLOCK),
        # barriers, fences and phases
        ("axes/kernels/scalar/hopper.py", "mbarrier.wait(scored.index(buffer), n // BUFFERS & 1)", "pass", HOPPER),
        ("axes/kernels/scalar/hopper_write.py", "mbarrier.wait(scored.index(buffer), count // BUFFERS & 1)", "pass", WRITE),
        ("axes/kernels/diagonal/hopper.py", "mbarrier.wait(done, count & 1)", "mbarrier.wait(done, (count & 1) ^ 1)", DIAGONAL),
        ("axes/kernels/attention/hopper_backward.py", "mbarrier.wait(stored, 0)", "pass", ATTENTION),
    )
)  # fmt: skip


def planted(tree: Path, fault: Fault, seconds: float) -> tuple[str, str]:
    """seen, or survived; and by what."""
    path = tree / fault.file
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(fault.was, fault.now), encoding="utf-8")
    run = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", f"tests/gpu/{fault.tests}"]
    kernels = {"TRITON_CACHE_DIR": str(tree.parent / "triton"), "AXES_TRITON_CACHE": str(tree.parent / "triton")}
    environment = {**os.environ, **kernels, "PYTHONPATH": str(tree)}
    process = subprocess.Popen(
        run, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "seen", f"longer than {seconds:.0f} s"
    finally:
        path.write_text(before, encoding="utf-8")
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if process.returncode == 0:
        return "survived", said.strip().splitlines()[-1]
    return "seen", failed[0][:160] if failed else f"pytest ended with {process.returncode}"


def run(seconds: float, only: str) -> list[tuple[Fault, str, str]]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv*", ".cache", "runs", "*.so"))
        for number, fault in enumerate(x for x in FAULTS if only in x.file):
            begun = time.monotonic()
            outcome, by = planted(tree, fault, seconds)
            found.append((fault, outcome, by))
            print(f"{number + 1}/{len(FAULTS)} {time.monotonic() - begun:.0f} s {outcome}: {fault.file}: {fault.now} ({by})", flush=True)
    return found


def report(found: list[tuple[Fault, str, str]]) -> str:
    seen = sum(outcome == "seen" for _, outcome, _ in found)
    rows = [f"| `{f.file}` | `{f.was.strip()}` | `{f.now.strip()}` | {o} | {by} |".replace("\n", " ") for f, o, by in found]
    head = ["| file | was | became | outcome | by |", "| --- | --- | --- | --- | --- |"]
    return "\n".join((f"{seen} of {len(found)} faults were seen.\n", *head, *rows)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="of one fault")
    parser.add_argument("--only", default="", help="files whose path has this")
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    found = run(given.seconds, given.only)
    if given.report:
        given.report.write_text(report(found), encoding="utf-8")
    print(report([x for x in found if x[1] == "survived"]))


if __name__ == "__main__":
    main()
