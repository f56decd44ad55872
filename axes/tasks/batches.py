"""Windows of a text: training batches as a pure function of (seed, step), validation windows at fixed places."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from axes.tasks.corpus import as_tokens

_MASK = (1 << 64) - 1


def training_batch(text: Tensor, seed: int, step: int, batch: int, context: int) -> Tensor:
    """The windows of training step `step`: they depend on nothing but the arguments, so a resumed run sees them again.

    Args:
        text: (N,) tokens as a corpus holds them, N > context.
        seed, step: name the batch.

    Returns:
        (batch, context + 1) int64; column t + 1 is the target of column t.
    """
    generator = torch.Generator().manual_seed(mixed(seed, step))
    offsets = torch.randint(len(text) - context, (batch,), generator=generator)
    return _windows(text, offsets, context)


def validation_batches(text: Tensor, windows: int, batch: int, context: int) -> Iterator[Tensor]:
    """At most `windows` windows that do not overlap in their targets, evenly spread over the text.

    Yields:
        (at most batch, context + 1) int64.
    """
    available = (len(text) - 1) // context
    count = min(windows, available)
    places = torch.arange(count) * available // count * context
    for chosen in places.split(batch):
        yield _windows(text, chosen, context)


def _windows(text: Tensor, places: Tensor, context: int) -> Tensor:
    return as_tokens(torch.stack([text[place : place + context + 1] for place in places.tolist()]))


def mixed(seed: int, step: int) -> int:
    """SplitMix64 of the pair: neighbouring seeds and steps give unrelated generators."""
    state = (seed * 0x9E3779B97F4A7C15 + step + 1) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return (state ^ (state >> 31)) >> 1
