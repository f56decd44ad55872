"""`axes bench training`: one language model, trained with our recurrence, with flash-linear-attention's and with
flash attention in its place. Everything else (projections, convolutions, norms, optimizer, data) is the same."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from axes.bench.peers import CHUNKED, FLA, OURS, SDPA, attention, lifted_guard, peer
from axes.bench.rules import find
from axes.errors import AxesError
from axes.models import Architecture, LanguageModel
from axes.sequence import SequenceLayer
from axes.tasks.run_folder import write_json

WHO = (OURS, FLA, SDPA, CHUNKED)
FILE = "training.json"
_WARM = 3
_CLOSE = 2e-2  # bfloat16: two operators, one model and batch, relative difference of the losses


@final
@dataclass(frozen=True)
class Size:
    """The model and what it reads in a step."""

    layers: int = 12
    width: int = 768
    heads: int = 6
    vocabulary: int = 32000
    batch: int = 8
    tokens: int = 4096
    steps: int = 20


@final
@dataclass(frozen=True)
class Throughput:
    """Training with one operator. loss: of the last step of the warm-up."""

    who: str
    tokens_per_second: float | None = None
    step_ms: float | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    refused: str = ""


def measure(
    size: Size, folder: Path, device: torch.device, who: tuple[str, ...] = WHO,
    watch: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> list[Throughput]:  # fmt: skip
    """Train with each operator from the same weights on the same tokens; the file is written after each."""
    if unknown := set(who) - set(WHO):
        raise AxesError(f"unknown contender {', '.join(sorted(unknown))}; known: {', '.join(WHO)}")
    found: list[Throughput] = []
    for index, name in enumerate(who):
        watch(name, index, len(who))
        reference = next((t.loss for t in found if t.who == OURS), None)
        found.append(_train(name, size, device, reference))
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, {"size": asdict(size), "rows": [asdict(t) for t in found]})
    watch("done", len(who), len(who))
    return found


def _train(who: str, size: Size, device: torch.device, reference: float | None) -> Throughput:
    if who == FLA and (importlib.util.find_spec("fla") is None or device.type != "cuda"):
        return Throughput(who, refused="not installed, or no GPU")
    torch.manual_seed(0)
    model = LanguageModel(
        Architecture("gated-delta-net", "residual", size.layers, size.width, size.heads, vocabulary=size.vocabulary),
        device=device,
    )
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused)
    tokens = torch.randint(size.vocabulary, (size.batch, size.tokens + 1), device=device)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            logits, _ = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())  # in float32 under autocast
        loss.backward()
        optimizer.step()
        return loss.detach()

    def wait() -> None:
        if fused:
            torch.cuda.synchronize()

    with _operator(model, who):
        try:
            for _ in range(_WARM):
                first = step()
            loss = first.item()
            if fused:
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            for _ in range(size.steps):
                step()
            wait()
            seconds = (time.perf_counter() - begun) / size.steps
        except (RuntimeError, AxesError) as error:
            return Throughput(who, refused=f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
    if reference is not None and who in (FLA, CHUNKED) and abs(loss - reference) > _CLOSE * abs(reference):
        return Throughput(who, loss=loss, refused=f"its loss {loss:.4f} is not ours {reference:.4f}")
    peak = torch.cuda.max_memory_allocated() if fused else None
    return Throughput(who, size.batch * size.tokens / seconds, 1e3 * seconds, peak, loss)


@contextmanager
def _operator(model: LanguageModel, who: str) -> Iterator[None]:
    """Within the block the sequence layers compute their recurrence by this contender."""
    layers = [layer for layer in model.sublayers if isinstance(layer, SequenceLayer)]
    if who in (OURS, CHUNKED):
        for layer in layers:
            layer.implementation = "torch" if who == CHUNKED else None
        yield
        return
    if who == SDPA:
        run: Callable[[dict[str, Tensor]], tuple[Tensor, Any]] = attention
    else:
        run = peer(*find(("gated delta",)))

    def recur(self: SequenceLayer, signal: Any, memory: Any) -> tuple[Tensor, Any]:
        half = {n: x.bfloat16() if n in "qkv" else x for n, x in signal.items()}
        out, _ = run(half)
        return out, memory

    with patch.object(SequenceLayer, "_recur", recur), lifted_guard():
        yield
