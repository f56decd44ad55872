"""How much a tuple's memory holds, before anything is trained: random pairs are written, and every key is asked.

Keys (B, N, d) are random directions, values (B, N, d) too; gates are open and rates one. Lists see the same keys at
length sqrt(d), so that their logits q . k / sqrt(d) differ. Of N pairs:

    error   sum |read - v|^2 / sum |v|^2
    snr     power of the read along its value over the power of everything else that is read
    right   share of reads that are nearest to their own value, of the N that are stored

For what is written once along unit keys there are laws, which what is measured stands beside:

    written and added                 error (N - 1) / d,  snr d / (N - 1)
    written by the delta rule, once   error 2 - E - (1 - E)(2 - E) / a,  E = e^-a, load a = N / d
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from axes.core.costs import Alignment, SquaredError
from axes.core.rates import extent
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.routes import dispatch

Law = Callable[[np.ndarray, int], np.ndarray]


class Stored(NamedTuple):
    """What was measured of `pairs` in a memory of keys of `width`; law: the error that theory says, if it does."""

    width: int
    pairs: int
    error: float
    snr: float
    right: float
    law: float | None


def recall_error(read: Tensor, values: Tensor) -> Tensor:
    """sum |read - v|^2 / sum |v|^2 over pairs and channels: (...) from (..., N, d_v)."""
    return (read - values).square().sum((-2, -1)) / values.square().sum((-2, -1))


def linear_recall_law(n: np.ndarray, d: int) -> np.ndarray:
    """(N - 1) / d for random unit keys."""
    return (n - 1) / d


def delta_recall_law(load: np.ndarray) -> np.ndarray:
    """2 - E - (1 - E)(2 - E) / a with E = exp(-a): one pass of full steps over random unit keys, load a = N/d.

    A pair written at a = s is overwritten by what follows: averaging the exponential ages over the list gives the law
    for large d. It tends to 2 (the memory forgets, it does not blow up).
    """
    e = np.exp(-load)
    return 2 - e - (1 - e) * (2 - e) / load


def law_of(update: StateUpdate) -> Law | None:
    """The law of the error for what a tuple writes once along unit keys, if there is one here."""
    p = update.parts()
    plain = p.h.is_identity and not p.step.via and p.memory.kind == "matrix" and p.step.at in ("prev", "gated")
    if plain and isinstance(p.cost, Alignment):
        return linear_recall_law
    if plain and isinstance(p.cost, SquaredError):
        return lambda n, d: delta_recall_law(n / d)
    return None


def stored(update: StateUpdate, width: int, pairs: int, batch: int = 64, seed: int = 0) -> Stored:
    """Write pairs into a memory of keys of a width, as wide in its values, and ask for every one of them.

    Raises AxesError for a tuple that keeps no memory of pairs.
    """
    if not update.parts().memory.keyed:
        raise AxesError(f"stored: a memory of keys and values is asked, and {update!r} has none")
    if width < 1 or pairs < 1 or batch < 1:
        raise AxesError(f"stored: width, pairs and batch must be at least 1, got {width}, {pairs} and {batch}")
    draw = torch.Generator().manual_seed(seed)
    keys, values = (
        normalize(torch.randn(batch, pairs, width, generator=draw, dtype=torch.float64), dim=-1) for _ in range(2)
    )
    if update.parts().memory.kind == "list":
        keys = keys * width**0.5
    signal: dict[str, Tensor | float] = {"k": keys, "v": values, "q": keys}
    for per in update.demands():
        size = (batch, pairs, *extent(per, width, width))
        signal[per.name] = keys.new_zeros(size) if per.domain in ("unit", "real") else keys.new_ones(size)
    _, state = dispatch.run(update, signal, time=1)
    last = {n: x.select(1, -1) if isinstance(x, Tensor) else x for n, x in signal.items()}
    out = update.output(state, last)
    read = torch.stack([update.read(out, q, {**last, "q": q}) for q in keys.unbind(1)], 1)
    along = (read * values).sum(-1, keepdim=True) * values
    nearest = (read @ values.mT).argmax(-1) == torch.arange(pairs)
    snr = float(along.square().sum() / (read - along).square().sum())
    law = law_of(update)
    said = None if law is None else float(law(np.array(float(pairs)), width))
    return Stored(width, pairs, float(recall_error(read, values).mean()), snr, float(nearest.double().mean()), said)


def curve(
    update: StateUpdate, widths: Sequence[int], loads: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0), batch: int = 64
) -> list[Stored]:
    """`stored` for pairs against width: N = load d."""
    return [stored(update, d, max(2, round(load * d)), batch) for d in widths for load in loads]
