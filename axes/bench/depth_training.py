"""`axes bench depth-training`: the same small language model under every mixer along depth.

Every run is `axes bench optim-training`'s, with one optimizer and another model. Sublayers, embedding and head of one
seed begin with the same weights under every mixer, and see the same batches, so that runs of a seed are pairs. Every
mixer is trained at its own best learning rate, or all at one (`Plan(rates=0)`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from axes import catalogue
from axes.bench.optim_tasks import Task, language_model
from axes.bench.optim_training import Optimizers, Plan, Trainer, fill
from axes.bench.results import Watch, unwatched, write
from axes.errors import AxesError, ShapeError
from axes.models.language_model import Architecture, LanguageModel
from axes.optim import AdamW

FILE = "depth-training.json"
REFERENCE = "pre-norm"  # what the others are compared with, seed by seed
_CENTRE = 3e-3  # of the first grid of learning rates


@final
@dataclass(frozen=True)
class Size:
    """The model and what it reads in a step. streams: at least; a mixer that keeps earlier outputs has as many as it
    needs."""

    sequence: str = "rope"
    layers: int = 4
    width: int = 64
    heads: int = 2
    streams: int = 4
    batch: int = 8
    context: int = 64


def measure(
    mixers: tuple[str, ...], size: Size, plan: Plan, folder: Path, watch: Watch = unwatched, fresh: bool = False
) -> dict[str, Any]:
    """Train every run that the folder does not hold yet; the file is written after each. Returns its contents."""
    plan.require(swept=False)
    names = [catalogue.get(name, "depth").name for name in mixers] or [e.name for e in catalogue.entries("depth")]
    pairs = [(task(name, size), trainer(name)) for name in names]
    results = fill(pairs, plan, folder / FILE, watch, fresh)
    results["parameters"] = results.get("parameters", {}) | {name: _parameters(name, size) for name in names}
    write(folder / FILE, results)
    return results


def task(mixer: str, size: Size) -> Task:
    """The model under a mixer; the description is that of every mixer's."""
    given = architecture(mixer, size)
    text = (
        f"{size.sequence}, {size.layers} layers, width {size.width}, {size.heads} heads, {size.streams} streams, "
        f"{size.batch} windows of {size.context} bytes a step"
    )
    return language_model(text, partial(LanguageModel, given), size.batch, size.context)


def architecture(mixer: str, size: Size) -> Architecture:
    """With the least number of streams, from that of the size on, that the mixer takes in so many sublayers."""
    refused = None
    for given in _architectures(mixer, size):
        try:
            LanguageModel(given, device="meta")
        except ShapeError as error:
            refused = error
        else:
            return given
    raise AxesError(f"{mixer} takes no number of streams up to {2 * size.layers + 1}: {refused}")


def _architectures(mixer: str, size: Size) -> Iterator[Architecture]:
    for streams in range(size.streams, max(size.streams, 2 * size.layers + 1) + 1):
        yield Architecture(size.sequence, mixer, size.layers, size.width, size.heads, streams)


def _parameters(mixer: str, size: Size) -> int:
    return sum(p.numel() for p in LanguageModel(architecture(mixer, size), device="meta").parameters())


def trainer(mixer: str) -> Trainer:
    def adamw(model: Any, lr: float) -> Optimizers:
        return [AdamW(model.parameters(), lr=lr, weight_decay=0.0)]

    return Trainer(mixer, adamw, _CENTRE)
