"""Kernels of two-layer memories one launch after another, the host waiting for each: which one fails, and how far what
they give is from the torch route in float64.

    python -m tests.gpu.alone                # every variant of sizes in a process of its own, side by side: a minute
    python -m tests.gpu.alone titans 64 8    # one system, its width, warps of all programs
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest.mock import patch

VARIANTS = (("ttt", 64, 8), ("ttt", 64, 16), ("titans", 64, 8), ("titans", 64, 16), ("yaad", 64, 8), ("yaad", 64, 16),
            ("ttt", 128, 4), ("ttt", 128, 8), ("titans", 128, 4), ("titans", 128, 8))  # fmt: skip
_SECONDS = 100


def one(name: str, width: int, warps: int) -> None:
    import torch

    from axes.kernels.common.launch import Kernel
    from axes.kernels.network import chain, hold, hopper_hold
    from tests.gpu.test_network import FULL, HALF, SYSTEMS, draw, results
    from tests.gpu.told import Rounded, distance

    called = Kernel.__getitem__

    def waiting(self: Kernel, grid: tuple[int, ...]) -> Any:
        launch = called(self, grid)

        def call(*given: Any, **options: Any) -> None:
            kernel = getattr(self.kernel, "__name__", "?")
            try:
                launch(*given, **options)
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{name} {width} warps={warps}: {kernel} of {grid} failed: {str(error)[:120]}", flush=True)
                os._exit(1)

        return call

    update = SYSTEMS[name]
    signal, start = draw(update, 100, width, HALF)
    sizes = dict(WARPS=warps, WARPS_READS=warps, WARPS_BACK=warps)
    in_memory, on_chip = patch.multiple(chain, **sizes), patch.multiple(hold, **sizes, WARPS_AGAIN=warps)
    in_gluon = patch.multiple(hopper_hold, WARPS=warps, WARPS_AGAIN=warps, WARPS_BACK=warps)
    with in_memory, on_chip, in_gluon, patch.object(Kernel, "__getitem__", waiting):
        got = results(update, signal, start, None, "triton")
    want = results(update, signal, start, torch.float64, "torch")
    with Rounded(HALF):
        near = results(update, signal, start, FULL, "torch")
    found = {n: (distance(got[n], w), distance(near[n].to(got[n].dtype), w)) for n, w in want.items()}
    said = ", ".join(f"{n} {a:.1e}/{b:.1e}" for n, (a, b) in found.items())
    print(f"{name} {width} warps={warps}: ran; distance/of torch with rounded operands: {said}", flush=True)


def every() -> None:
    running = []
    for variant in VARIANTS:
        command = [sys.executable, "-m", "tests.gpu.alone", *map(str, variant)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for variant, process in zip(VARIANTS, running, strict=True):
        try:
            said = process.communicate(timeout=_SECONDS)[0].strip().splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            said = [f"{variant}: not done in {_SECONDS} s"]
        print(said[-1] if said else f"{variant}: said nothing", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        one(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        every()
