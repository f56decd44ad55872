"""What anchored substitution by rows costs at the shape that it is for, by sizes: right first, then milliseconds.

    python -m tests.gpu.tune_anchored           # about 100 s; sizes are compiled side by side
    python -m tests.gpu.tune_anchored warm 2    # compiles what one of them needs
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any
from unittest.mock import patch

import torch

from axes.kernels.substitution import chain
from axes.routes import dispatch
from tests.gpu import test_substitution as hard

SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"TOGETHER": (64, 4, 2, 128)},
    {"TOGETHER": (64, 4, 1, 64)},
    {"TOGETHER": (64, 4, 2, 64), "ANCHORED": (64, 2)},
    {"ANCHORED_BACK": (32, 4)},
    {"anchored_on_hopper": lambda *_: False},
)
NAME = "yaad"


def signal(b: int, t: int, h: int, d: int) -> dict[str, torch.Tensor]:
    made = hard.draw(hard.SYSTEMS[NAME], t, d, d, torch.bfloat16, b, h, 0.05)
    return {n: x.requires_grad_() for n, x in made.items()}


def once(given: dict[str, torch.Tensor], do: torch.Tensor | None) -> Any:
    b, _, h, d = given["v"].shape
    start = torch.zeros(b, h, d, d, device="cuda")  # so that what is checked is what is timed
    out = dispatch.run(hard.SYSTEMS[NAME], given, weights=(start,), implementation="triton")[0]
    return out if do is None else torch.autograd.grad(out, list(given.values()), do)


def timed(call: Any) -> float:
    call(), call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush, taken = torch.empty(1 << 28, dtype=torch.int8, device="cuda"), []
    for _ in range(9):
        flush.zero_()
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        taken.append(begun.elapsed_time(ended))
    return statistics.median(taken)


def parts(call: Any) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found = sorted(((e.self_device_time_total / 1e3, e.key[:14]) for e in seen.key_averages()), reverse=True)
    return " ".join(f"{n} {ms:.2f}" for ms, n in found[:8])


def main() -> None:
    begun = time.perf_counter()
    warming = [
        subprocess.Popen([sys.executable, "-m", "tests.gpu.tune_anchored", "warm", str(i)], env=os.environ)
        for i in range(len(SIZES) + 1)
    ]
    for process in warming:
        process.wait()
    print(f"compiled, {time.perf_counter() - begun:.0f} s", flush=True)
    for i, size in enumerate(SIZES[:-1]):
        with patch.multiple(chain, **size) if size else patch.object(chain, "AGAIN", 32):
            update = hard.SYSTEMS[NAME]
            wrong = hard.check(update, 200, 128, 128, torch.bfloat16, f"{i} T=200", again=True)
            wrong += hard.check(update, 17, 64, 64, torch.bfloat16, f"{i} T=17") if i == 0 else []
            wrong += hard.check(update, 130, 128, 128, torch.bfloat16, f"{i} closing", gates=30.0) if i == 0 else []
        print(f"{i} {size}: {'right' if not wrong else ' | '.join(wrong)[:600]}", flush=True)
    given = signal(8, 4096, 16, 128)
    do = torch.randn_like(given["v"])
    for i, size in enumerate(SIZES):
        with patch.multiple(chain, **size) if size else patch.object(chain, "AGAIN", 32):
            with torch.no_grad():
                ahead = timed(lambda: once(given, None))
            both = timed(lambda: once(given, do))
            print(f"{i} forward {ahead:.3f}, with backward {both:.3f} ms", flush=True)
            if i < len(SIZES) - 1:
                print("  " + parts(lambda: once(given, do)), flush=True)


def warm(i: int) -> None:
    size, d = ({}, 64) if i == len(SIZES) else (SIZES[i], 128)
    with patch.multiple(chain, **size) if size else patch.object(chain, "AGAIN", 32):
        hard.check(hard.SYSTEMS[NAME], 80, d, d, torch.bfloat16, "")
        with torch.no_grad():
            once(signal(1, 64, 1, d), None)


if __name__ == "__main__":
    warm(int(sys.argv[2])) if sys.argv[1:2] == ["warm"] else main()
