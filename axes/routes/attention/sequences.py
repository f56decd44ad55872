"""How the tokens of a call stand: every batch entry is a sequence, or N of them are packed in one entry.

Both answer the same four questions. Time is the last dimension of numbers (..., H, T), the one before it of vectors
(..., H, T, d). Packed sequences stand behind what their states hold, n pairs each: S = T + N n.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from axes.routes.attention.room import append, may_append
from axes.routes.packed import Packing


@final
class Alone:
    """One sequence a batch entry."""

    cu_seqlens: Tensor | None = None

    def __init__(self, length: int) -> None:
        self.length = length  # of the longest sequence

    def sums(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """Numbers (..., T) summed over every sequence, from where it starts (...) or from zero."""
        total = x if x.shape[-1] == 1 else x.cumsum(-1)  # of one token torch's scan of rows takes its time
        return total if start is None else total + start[..., None]

    def behind(self, old: Tensor, new: Tensor) -> Tensor:
        """New vectors behind the stored ones; an empty store has no say in their dtype."""
        if not old.shape[-2]:
            return new
        batch = torch.broadcast_shapes(old.shape[:-2], new.shape[:-2])
        if new.shape[-2] == 1 and batch == old.shape[:-2] and may_append(old, new):
            return append(old, new)
        return torch.cat((old.expand(*batch, *old.shape[-2:]), new.expand(*batch, *new.shape[-2:])), -2)

    def ends(self, sums: Tensor, start: Tensor | None = None) -> Tensor:
        """The sums of whole sequences (...)."""
        return sums[..., -1]

    def rows(self, pairs: Tensor, fill: float = 0.0) -> Tensor:
        """All pairs (..., S, d), by sequence."""
        return pairs

    def places(self, old: int) -> Tensor:
        """How many pairs every token sees (T,)."""
        return torch.arange(old + 1, old + self.length + 1)


@final
class Packed:
    """N sequences in one batch entry. Their lists are as long as the longest, shorter ones with pairs in front that
    weigh nothing: for that the host waits for the lengths."""

    def __init__(self, cu_seqlens: Tensor, length: int) -> None:
        self.cu_seqlens, self.packing = cu_seqlens, Packing.of(cu_seqlens, length)
        self.length = int((self.packing.offsets[1:] - self.packing.offsets[:-1]).max()) if self.packing.sequences else 0
        self.old = 0

    def sums(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        total = self.packing.from_starts(x.cumsum(-1).movedim(-1, 1))
        return (total if start is None else total + start[self.packing.sequence][None]).movedim(1, -1)

    def behind(self, old: Tensor, new: Tensor) -> Tensor:
        self.old = old.shape[-2]
        if not self.old:
            return new
        whole = self.packing.behind(*(x.transpose(1, 2).flatten(2) for x in (new, old)))
        return whole.unflatten(2, (new.shape[1], new.shape[3])).transpose(1, 2)

    def ends(self, sums: Tensor, start: Tensor | None = None) -> Tensor:
        offsets = self.packing.offsets
        last = sums[0][..., (offsets[1:] - 1).clamp_min(0)].movedim(-1, 0)
        empty = (offsets[1:] == offsets[:-1]).view(-1, *[1] * (last.ndim - 1))
        return torch.where(empty, torch.zeros_like(last) if start is None else start.to(last), last)

    def rows(self, pairs: Tensor, fill: float = 0.0) -> Tensor:
        """(1, H, S, d) as (N, H, longest, d)."""
        at = torch.arange(-self.old - self.length, 0, device=pairs.device) + self._ends()[:, None]
        missing = at < (self._ends() - self._held())[:, None]
        found = pairs[0, :, at.clamp_min(0)].transpose(0, 1)
        return found.masked_fill(missing[:, None, :, None], fill)

    def _held(self) -> Tensor:
        return self.packing.offsets[1:] - self.packing.offsets[:-1] + self.old

    def _ends(self) -> Tensor:
        return self._held().cumsum(0)

    def places(self, old: int) -> Tensor:
        tokens = torch.arange(self.packing.sequence.shape[0], device=self.packing.offsets.device)
        return tokens - self.packing.offsets[:-1][self.packing.sequence] + old + 1
