"""Seconds up to the end of a layer's first forward and backward with cold caches, by `axes.compile_ahead`.

python -m tests.gpu.cold [layers]     every layer in a process of its own and an empty cache, one after the other

Printed as they come: seconds of imports, of compiling ahead, of the first forward and backward, and their sum without
imports; kernels compiled. The goal is 10 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

LAYERS = (
    "gated-delta-net", "delta-net", "kda", "mamba2", "gla", "linear-attention", "retnet", "rwkv7", "softmax-attention",
    "rope", "alibi", "fox", "path", "titans-matrix",
)  # fmt: skip


def once(name: str, device: str, batch: int, length: int, width: int, heads: int) -> None:
    begun = time.perf_counter()
    import torch

    import axes
    from axes import catalogue

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = catalogue.get(name, axis="sequence").cls(width, heads=heads, device=device, dtype=dtype)
    x = torch.randn(batch, length, width, device=device, dtype=dtype, requires_grad=True)
    imported = time.perf_counter()
    kernels = axes.compile_ahead(layer, x)
    ahead = time.perf_counter()
    y, _ = layer(x)
    y.backward(torch.ones_like(y))
    if device != "cpu":
        torch.cuda.synchronize()
    end = time.perf_counter()
    took = f"imports {imported - begun:5.1f}, ahead {ahead - imported:5.1f}, first call {end - ahead:5.1f}"
    print(f"{name:20s} {took}, both {end - imported:5.1f} s, {kernels} kernels", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="*", default=LAYERS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="8,4096,2048,16", help="batch, tokens, width, heads")
    parser.add_argument("--once", action="store_true", help="here, with the caches there are")
    given = parser.parse_args()
    if given.once:
        once(given.layers[0], given.device, *map(int, given.size.split(",")))
        return
    for name in given.layers:
        with tempfile.TemporaryDirectory() as cold:
            call = [sys.executable, "-m", "tests.gpu.cold", name, "--once", "--device", given.device]
            done = subprocess.run([*call, "--size", given.size], env={**os.environ, "TRITON_CACHE_DIR": cold})
            if done.returncode:
                print(f"{name:20s} ended with {done.returncode}", flush=True)


if __name__ == "__main__":
    main()
