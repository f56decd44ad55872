"""Operations that a model needs for a token, from its sizes alone: what a share of the peak (MFU) is counted by.

    operations of a training token = 6 (P - E) + 3 sum over sequence layers of R

P are all parameters, E those of embeddings, which are looked up: each other weight is multiplied and added once
forward and twice backward. R are those of a recurrence forward: for a matrix d_v x d_k of a head, 2 d_v d_k to write,
to read, and, where errors drive, to predict; for a list, 2 (d_k + d_v) times the pairs that a token reads, (T + 1) /
2 on average; for any other memory 6 times its numbers. Nothing that is computed a second time counts, and no chunk's
own arithmetic.
"""

from __future__ import annotations

from torch import nn

from axes.models.language_model import LanguageModel
from axes.sequence.base import SequenceLayer


def training_flops(model: LanguageModel, context: int) -> float:
    """Of one token of windows of `context` tokens, forward and backward; of one process's whole model."""
    every = {id(p): p.numel() for p in model.parameters()}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = sum(n for i, n in every.items() if i not in tables)
    recurrences = sum(_recurrence(m, context) for m in model.modules() if isinstance(m, SequenceLayer))
    return 6.0 * weights + 3.0 * recurrences


def _recurrence(layer: SequenceLayer, context: int) -> float:
    s, p = layer.sizes, layer.update.parts()
    if p.memory.kind == "list":
        window = getattr(p.memory, "window", None) or context
        return s.heads * 2.0 * (s.d_k + s.d_v) * min((context + 1) / 2, window)
    if p.memory.kind == "network":
        held = layer.init_state(1, "meta").memory.theta
        return 6.0 * sum(x.numel() for x in held)
    return s.heads * 2.0 * s.d_k * s.d_v * ((1 + p.predicts) * s.writes + s.reads)


__all__ = ["training_flops"]
