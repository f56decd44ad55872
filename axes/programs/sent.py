"""Numbers of a step on their way to a device, for which the host does not wait, and on their way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

_HALF = 32  # rows


@final
class Sent:
    """Copies numbers of the host into a tensor, each time from a row of its own.

    Rows are pinned where a GPU copies, since the host waits for a copy from other memory. Half of them at a time are
    written again when their copies have been made, which the host waits for if the device is so many copies behind; on
    another stream there are other rows.
    """

    def __init__(self, to: Tensor) -> None:
        self.to, self.pinned, self.stream = to, to.device.type == "cuda", 0
        self._begin()

    def _begin(self) -> None:
        rows = torch.empty(2 * _HALF, len(self.to), dtype=self.to.dtype, device="cpu", pin_memory=self.pinned)
        self.rows, self.written, self.next = rows.unbind(), rows.numpy(), 0
        self.made: list[torch.cuda.Event | None] = [None, None]  # of each half, when it was written last

    def send(self, numbers: Sequence[float]) -> None:
        if self.pinned and self.stream != (now := torch._C._cuda_getCurrentRawStream(self.to.device.index)):
            self._begin()
            self.stream = now
        half, place = divmod(self.next, _HALF)
        if not place and (made := self.made[half]) is not None:
            made.synchronize()
        self.written[self.next] = numbers
        self.to.copy_(self.rows[self.next], non_blocking=True)
        if self.pinned and place == _HALF - 1:
            self.made[half] = torch.cuda.current_stream(self.to.device).record_event()
        self.next = (self.next + 1) % (2 * _HALF)


@final
class Told:
    """Numbers of a device in memory of the host that stays; who asks waits for them, not for what is launched later."""

    def __init__(self, like: Tensor) -> None:
        self.here = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
        self.made: torch.cuda.Event | None = None  # the copy that was begun last

    def tell(self, x: Tensor) -> None:
        self.here.copy_(x, non_blocking=True)
        if x.is_cuda:
            self.made = torch.cuda.current_stream(x.device).record_event(self.made)

    def numbers(self) -> list[float]:
        if self.made is not None:
            self.made.synchronize()
        found: list[float] = self.here.tolist()
        return found


__all__ = ["Sent", "Told"]
