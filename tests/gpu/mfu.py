"""Where the time of `axes train` goes on a GPU: seconds up to the first step with cold caches, MFU, one step's profile.

BEGUN=$(date +%s.%N) TRITON_CACHE_DIR=$(mktemp -d) python -m tests.gpu.mfu [--optimizer muon] [--compile] > mfu.txt

The model is the 124 M one of docs/train.md unless options say otherwise. Imports are timed from BEGUN.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

BEGUN = float(os.environ.get("BEGUN", time.time()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequence", default="gated-delta-net")
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--folder", help="Of the run, instead of a temporary one.")
    given = parser.parse_args()

    def said(what: str) -> None:
        print(f"{time.time() - BEGUN:7.2f} s  {what}", flush=True)

    said("Python runs")
    import torch

    said("torch is imported")
    import axes.cli  # noqa: F401  as the command does
    from axes.tasks import language_modelling
    from axes.tasks.configuration import Configuration
    from axes.tasks.run_folder import RunFolder

    said("axes is imported")
    settings = {name: x for name, x in vars(given).items() if name not in ("folder", "steps")}
    configuration = Configuration(
        **settings, depth="residual", steps=given.steps + 8, eval_every=0, save_every=0,
        validation_windows=1,
    )  # fmt: skip

    def wait() -> None:
        if given.device != "cpu":
            torch.cuda.synchronize()

    with tempfile.TemporaryDirectory() as beside:
        folder = RunFolder(Path(given.folder or beside) / "run")
        training = language_modelling.start(configuration, folder, True)
        said("the model is made, kernels are being compiled, the folder is written")
        if training.rehearsal is not None:
            said(str(training.rehearsal))
            said(training.rehearsal.wait())
        taken = []
        for step in range(given.steps):
            begun = time.perf_counter()
            loss = training.step()["loss"]
            taken.append(time.perf_counter() - begun)
            said(f"step {step + 1}: {taken[-1]:.4f} s, loss {loss:.3f}")
        middle = statistics.median(taken[len(taken) // 2 :])
        print({name: round(x, 4) for name, x in training.throughput(middle).items()}, f"{middle:.4f} s a step")
        if given.device == "cpu":
            return
        print(torch.cuda.get_device_name(), f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most")
        for part, name in ((training.loss, "forward"), (lambda w: training.loss(w).backward(), "and backward")):
            part_of_batch = given.batch // given.accumulate, given.context + 1
            windows = torch.randint(given.vocabulary, part_of_batch, device="cuda")
            for _ in range(2):
                wait()
                begun = time.perf_counter()
                part(windows)
                host = time.perf_counter() - begun
                wait()
                both = time.perf_counter() - begun
            print(f"{name}: host {host:.4f} s, until the GPU has ended {both:.4f}")
        wait()
        begun = time.perf_counter()
        training.optimizer.step()
        host = time.perf_counter() - begun
        wait()
        print(f"optimizer: host {host:.4f} s, until the GPU has ended {time.perf_counter() - begun:.4f}")
        training.optimizer.zero_grad(set_to_none=True)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.step()
        torch.cuda.set_sync_debug_mode("default")
        print("waits of the host in a step:", [f"{w.filename}:{w.lineno}" for w in caught])
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            begun = time.perf_counter()
            training.step()
            wait()
            profiled = time.perf_counter() - begun
        table = profile.key_averages()
        busy = sum(x.self_device_time_total for x in table if x.device_type != torch.autograd.DeviceType.CPU) / 1e6
        print(f"profiled step: {profiled:.4f} s, kernels {busy:.4f} s")
        print(table.table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90))
        print(table.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    main()
