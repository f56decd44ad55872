"""`axes bench training`: language models of one size in training, each made of one library's own parts.

Weights and the optimizer's numbers are float32, products bfloat16 by autocast. A model is compiled too where `compiled`
says so, in a row of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from axes.bench.floors import ceilings
from axes.bench.peers import lifted_guard
from axes.bench.results import Watch, said, unwatched
from axes.bench.training_models import CONTENDERS, Made, Size, products, with_depth
from axes.errors import AxesError
from axes.files import write_json
from axes.tasks.machine import require_memory

WHO = tuple(CONTENDERS)
FILE = "training.json"
_WARM = 3


@final
@dataclass(frozen=True)
class Throughput:
    """Training of one model. loss: of the last step of the warm-up; first: seconds of the first step; used: share of
    the device's measured rate of products that products with weights take."""

    who: str
    tokens_per_second: float | None = None
    step_ms: float | None = None
    peak_bytes: int | None = None
    used: float | None = None
    first: float | None = None
    loss: float | None = None
    refused: str = ""


def measure(
    size: Size, folder: Path, device: torch.device, who: tuple[str, ...] = WHO, compiled: bool = False,
    depths: tuple[str, ...] = (), watch: Watch = unwatched,
) -> list[Throughput]:  # fmt: skip
    """Train each model on the same tokens, and ours with these depth mixers too; the file is written after each."""
    if unknown := set(who) - set(WHO):
        raise AxesError(f"unknown contender {', '.join(sorted(unknown))}; known: {', '.join(WHO)}")
    for field, value in asdict(size).items():
        if value < 1:
            raise AxesError(f"--{field} must be at least 1, got {value}")
    # weights with gradients and two statistics, and eight activations of the width that every block keeps
    weights = size.layers * 8 * size.width**2 + size.vocabulary * size.width
    require_memory(
        16 * weights + 16 * size.layers * size.batch * size.tokens * size.width, device, "the models of this bench"
    )
    found: list[Throughput] = []
    rate = ceilings(device).flops_per_second if device.type == "cuda" else None
    models = {name: CONTENDERS[name] for name in who} | with_depth(depths)
    work = [(name, c) for name in models for c in ((False, True) if compiled else (False,))]
    folder.mkdir(parents=True, exist_ok=True)
    for index, (name, compile_it) in enumerate(work):
        watch(f"{name}, compiled" if compile_it else name, index, len(work))
        found.append(_train(name, models[name], compile_it, size, device, rate))
        write_json(folder / FILE, {"size": asdict(size), "rows": [asdict(t) for t in found]})
    watch("done", len(work), len(work))
    return found


def _train(
    name: str, made: Callable[[Size], Made], compile_it: bool, size: Size, device: torch.device, rate: float | None
) -> Throughput:
    who = f"{name}, compiled" if compile_it else name
    torch.manual_seed(0)
    try:
        with device:
            model, make = made(size)
    except (ImportError, AxesError) as error:
        return Throughput(who, refused=str(error))
    optimizer = make(model)
    run = torch.compile(model) if compile_it else model
    tokens = torch.randint(size.vocabulary, (size.batch, size.tokens + 1), device=device)
    gpu = device.type == "cuda"

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = run(tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def seconds(steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        if gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / steps

    try:
        with lifted_guard():  # fla's gated backward refuses Hopper with some Tritons
            first = seconds(1)
            loss = [step() for _ in range(_WARM)][-1].item()
            if gpu:
                torch.cuda.reset_peak_memory_stats()
            each = seconds(size.steps)
    except (RuntimeError, ImportError, AxesError) as error:
        return Throughput(who, refused=said(error))
    peak = torch.cuda.max_memory_allocated() if gpu else None
    used = None if rate is None else products(model, size) / each / rate
    return Throughput(who, size.batch * size.tokens / each, 1e3 * each, peak, used, first, loss)
