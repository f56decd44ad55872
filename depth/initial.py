"""Where mixers start: equal to plain pre-normed residual connections, and yet not symmetric under exchange of streams.

Equal copies with sum(pre) = 1, post = 1 and unit row sums of R stay equal copies, whatever R: the network is pre-norm.
Exchanging streams must change something, or every gradient is the same for all of them and they never part: so the
read is concentrated on stream l mod n, while the write is the same for all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axes.errors import ShapeError

# off-diagonal logit of R: stream differences keep 0.84 of their size over 128 sublayers of four streams
OFF_DIAGONAL = -8.0
# share of the read that goes to stream l mod n; the others split the rest (0.05 each of four)
CONCENTRATION = 0.85


def one_hot(index: int, like: Tensor) -> Tensor:
    """e_{index mod n} with the shape of `like` (n)."""
    return (torch.arange(like.shape[-1], device=like.device) == index % like.shape[-1]).to(like.dtype)


def read_shares(index: int, like: Tensor) -> Tensor:
    """Weights (n) that sum to one, mostly on stream index mod n; like: (n)."""
    rest = (1 - CONCENTRATION) / (like.shape[-1] - 1)
    return rest + (CONCENTRATION - rest) * one_hot(index, like)


def require_several(who: str, streams: int, least: int = 2) -> None:
    """ShapeError for fewer streams than the mixer can mix."""
    if isinstance(streams, int) and streams < least:
        raise ShapeError(f"{who}: streams must be at least {least}, got {streams}: with one stream use Residual")
