"""What `axes bench optim-training` trains: a small language model on the embedded corpus, a network on the digits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axes.errors import AxesError
from axes.models.language_model import Architecture, LanguageModel, Logits
from axes.tasks.batches import training_batch, validation_batches
from axes.tasks.corpus import Corpus, embedded
from axes.tasks.digits import digits as _images
from axes.tasks.digits import has_digits

_CONTEXT, _BATCH, _WINDOWS = 64, 8, 64
_ARCHITECTURE = Architecture("rope", "residual", layers=2, width=64, heads=2)
_TEXT = 2_000_000  # bytes
_DIGITS_BATCH, _DIGITS_WIDTH = 64, 64


@final
@dataclass(frozen=True)
class Task:
    """A model and its data. loss(model, seed, step, device): on the batch of that step, the same for every optimizer.

    held_out(model, device): loss in `unit`, and accuracy where there is one.
    """

    name: str
    unit: str
    description: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int, torch.device], Tensor]
    held_out: Callable[[nn.Module, torch.device], tuple[float, float | None]]


def find_tasks(names: tuple[str, ...] = ()) -> list[Task]:
    """Tasks by name; without names those whose data is here.

    Raises:
        AxesError: an unknown name, or the digits asked for by name without scikit-learn.
    """
    for name in names:
        if name not in UNITS:
            raise AxesError(f"unknown task {name!r}; known: {', '.join(UNITS)}")
    chosen = names or tuple(name for name in UNITS if name != DIGITS or has_digits())
    return [_digits() if name == DIGITS else _language_model() for name in dict.fromkeys(chosen)]


LANGUAGE_MODEL, DIGITS = "language-model", "digits"
UNITS = {LANGUAGE_MODEL: "bits per byte", DIGITS: "nats per image"}


def _language_model() -> Task:
    numbers = sum(p.numel() for p in LanguageModel(_ARCHITECTURE, device="meta").parameters())
    return language_model(
        f"rope x residual, 2 layers, width 64, {numbers:,} parameters, {_BATCH} windows of {_CONTEXT} bytes a step",
        lambda: LanguageModel(_ARCHITECTURE),
    )


def language_model(
    description: str, made: Callable[[], LanguageModel], batch: int = _BATCH, context: int = _CONTEXT
) -> Task:
    """The task of a model of bytes, of windows of the embedded corpus."""
    return Task(
        LANGUAGE_MODEL,
        UNITS[LANGUAGE_MODEL],
        description,
        lambda: Logits(made()),
        lambda model, seed, step, device: _cross_entropy(
            model, training_batch(_corpus().train, seed, step, batch, context).to(device)
        ),
        lambda model, device: (_bits(model, device, context), None),
    )


@functools.cache
def _corpus() -> Corpus:
    return embedded(_TEXT)


@torch.no_grad()
def _bits(model: nn.Module, device: torch.device, context: int) -> float:
    """A byte, held out."""
    model.eval()
    parts = list(validation_batches(_corpus().validation, _WINDOWS, _WINDOWS, context))
    total = sum(float(_cross_entropy(model, part.to(device))) * len(part) for part in parts)
    return total / sum(map(len, parts)) / math.log(2.0)


def _cross_entropy(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def _digits() -> Task:
    if not has_digits():
        raise AxesError("the task 'digits' needs scikit-learn: install it, or leave it out with --task language-model")
    _images()
    return Task(
        DIGITS,
        UNITS[DIGITS],
        f"64-{_DIGITS_WIDTH}-{_DIGITS_WIDTH}-10, {_DIGITS_BATCH} of 1,438 images a step, 359 held out",
        lambda: nn.Sequential(
            nn.Linear(64, _DIGITS_WIDTH), nn.ReLU(), nn.Linear(_DIGITS_WIDTH, _DIGITS_WIDTH), nn.ReLU(),
            nn.Linear(_DIGITS_WIDTH, 10),
        ),
        _digits_loss,
        _digits_held_out,
    )  # fmt: skip


def _digits_loss(model: nn.Module, seed: int, step: int, device: torch.device) -> Tensor:
    images, labels, _, _ = _images()
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    chosen = torch.randint(len(labels), (_DIGITS_BATCH,), generator=generator)
    return F.cross_entropy(model(images[chosen].to(device)), labels[chosen].to(device))


@torch.no_grad()
def _digits_held_out(model: nn.Module, device: torch.device) -> tuple[float, float]:
    model.eval()
    _, _, images, labels = _images()
    logits = model(images.to(device))
    right = (logits.argmax(-1) == labels.to(device)).double().mean()
    return float(F.cross_entropy(logits, labels.to(device))), float(right)
