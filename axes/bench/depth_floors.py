"""What no implementation of a depth mixer can undercut: the numbers that one sublayer's read and write move."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from axes.core.monoids import Identity
from axes.depth.base import DepthMixer


class Account(NamedTuple):
    """Numbers a token, forward and backward, each tensor moved once a pass over it."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward


@torch.enable_grad()
def account(mixer: DepthMixer, streams: Any) -> Account:
    """By the tuple and by what the coefficients at these streams touch; what a row does not need is not counted.

    Forward: the rows that are read in, x out; the rows that are written in and out, y in. Backward, first of the
    write: the gradient of written rows in, y's out, and where rows are mixed also they themselves in and their gradient
    out, and y for a key that is learned. Then of the read: x's gradient and the rows in, the gradient of the rows that
    the write left in and out. x that is a stream itself and y that is added as it is move nothing of their own. Of n
    streams that mix that is 3 n + 2 and 6 n + 3 times d.
    """
    d, width = mixer.d_model, mixer.d_model // mixer.fractions
    cost, h, monoid, step, memory = mixer.update.parts()
    if memory.kind == "list":
        seen = streams.theta[1].shape[-2] * d
        return Account(seen + 3 * d, 3 * seen + d)
    _, coefficients = mixer.read(streams)
    key = torch.as_tensor(coefficients.signal["k"])
    normed, stored_normed = not h.is_identity and step.lazy, not h.is_identity and not step.lazy
    whole = mixer.streams * d
    mixed = not isinstance(monoid, Identity) or cost.curvature != "none" or stored_normed
    read = whole if normed else _touched(coefficients.pre) * width
    written = whole if mixed else _touched(key) * width
    is_stream = whole == d and mixer.fractions == 1 and not normed and not coefficients.pre.requires_grad
    is_added = _touched(key) == 1 and not key.requires_grad

    forward = (0 if is_stream else read + d) + 2 * written + d
    of_write = 0 if is_added else written + d
    of_write += 3 * written if is_added and mixed else 2 * written if mixed else 0
    of_write += d if key.requires_grad else 0
    of_read = d + (2 if is_stream else 3) * read
    return Account(forward, of_write + of_read)


def _touched(weights: Tensor) -> int:
    """Rows with a weight that is not zero for some token."""
    return int((weights != 0).reshape(-1, weights.shape[-1]).any(0).sum())
