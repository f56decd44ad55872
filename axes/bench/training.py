"""`axes bench training`: language models of one size in training, each made of one library's own parts.

Weights and the optimizer's numbers are float32, products bfloat16 by autocast, residual streams float32 or bfloat16. A
model is compiled too where `compiled` says so, in a row of its own.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from axes.bench.apart import Steps, finished, in_turn
from axes.bench.floors import ceilings
from axes.bench.peers import lifted_guard, tune_again, tuned
from axes.bench.results import Apart, Watch, said, unwatched
from axes.bench.training_models import CONTENDERS, KINDS, Size, products, with_depth
from axes.errors import AxesError
from axes.files import write_json
from axes.tasks.machine import require_memory

WHO = tuple(CONTENDERS)
FILE = "training.json"
_WARM = 3


@final
@dataclass(frozen=True)
class Throughput:
    """Training of one model. loss: of the last step of the warm-up; first: seconds of the first step, None where it was
    compiled before, apart; used: share of the device's measured rate of products that products with weights take."""

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
    depths: tuple[str, ...] = (), watch: Watch = unwatched, configurations: int = 0, apart: Apart | None = None,
) -> list[Throughput]:  # fmt: skip
    """Train each model on the same tokens, and ours with these depth mixers too; the file is written after each.

    configurations: of a peer's kernel that its tuner may try; 0 for all. apart: each in a process of its own, where one
    block is compiled before, and the model made when its turn comes.
    """
    if unknown := set(who) - set(WHO):
        raise AxesError(f"unknown contender {', '.join(sorted(unknown))}; known: {', '.join(WHO)}")
    if size.dtype not in KINDS:
        raise AxesError(f"--dtype is one of {', '.join(KINDS)}, not {size.dtype!r}")
    for field, value in asdict(size).items():
        if field != "dtype" and value < 1:
            raise AxesError(f"--{field} must be at least 1, got {value}")
    # weights with gradients and two statistics, and eight activations of the width that every block keeps
    weights = size.layers * 8 * size.width**2 + size.vocabulary * size.width
    require_memory(
        16 * weights + 16 * size.layers * size.batch * size.tokens * size.width, device, "the models of this bench"
    )
    found: list[Throughput] = []
    rate = ceilings(device).flops_per_second if device.type == "cuda" else None
    models = {name: CONTENDERS[name] for name in who} | with_depth(depths)
    each = partial(_train, depths=depths, size=size, device=device, rate=rate, configurations=configurations)
    work: list[tuple[Throughput, partial[Steps[Throughput]]]] = [
        (Throughput(f"{name}, compiled" if c else name), partial(each, name=name, compile_it=c))
        for name in models
        for c in ((False, True) if compiled else (False,))
    ]
    folder.mkdir(parents=True, exist_ok=True)

    def begun(index: int) -> None:
        watch(work[index][0].who, index, len(work))

    def written(row: Throughput) -> None:
        found.append(row)
        write_json(folder / FILE, {"size": asdict(size), "rows": [asdict(t) for t in found]})

    if apart is not None:
        ahead = [(row, partial(steps, ahead=True)) for row, steps in work]
        for row, got in in_turn(ahead, apart.at_once, apart.patience, begun):
            written(replace(row, refused=got) if isinstance(got, str) else got)
    else:
        for index, (row, steps) in enumerate(work):
            begun(index)
            written(finished(steps(row)))
    watch("done", len(work), len(work))
    return found


def _train(
    row: Throughput, *, name: str, depths: tuple[str, ...], compile_it: bool, size: Size, device: torch.device,
    rate: float | None, configurations: int, ahead: bool = False,
) -> Steps[Throughput]:  # fmt: skip
    """The row; pauses when everything is compiled, if that is done ahead."""
    with lifted_guard(), tuned(configurations):  # fla's gated backward refuses Hopper with some Tritons
        try:
            if ahead:
                one = size if compile_it else replace(size, layers=1)
                run = _Training(name, depths, compile_it, one, device)
                run.seconds(2)
                del run
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                yield
                tune_again()
            run = _Training(name, depths, compile_it, size, device)
            first = run.seconds(1)
            loss = [run.step() for _ in range(_WARM)][-1].item()
            if run.gpu:
                torch.cuda.reset_peak_memory_stats()
            each = run.seconds(size.steps)
        except (RuntimeError, ImportError, AxesError) as error:
            return replace(row, refused=said(error) if isinstance(error, RuntimeError) else str(error))
    peak = torch.cuda.max_memory_allocated() if run.gpu else None
    used = None if rate is None else products(run.model, size) / each / rate
    return Throughput(row.who, size.batch * size.tokens / each, 1e3 * each, peak, used, None if ahead else first, loss)


@final
class _Training:
    """A model with its optimizer and tokens."""

    def __init__(self, name: str, depths: tuple[str, ...], compile_it: bool, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            self.model, make = (CONTENDERS | with_depth(depths))[name](size)
        self.optimizer = make(self.model)
        self.run = torch.compile(self.model) if compile_it else self.model
        self.tokens = torch.randint(size.vocabulary, (size.batch, size.tokens + 1), device=device)
        self.device, self.gpu = device, device.type == "cuda"

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss: Tensor = self.run(self.tokens)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def seconds(self, steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        if self.gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / steps
