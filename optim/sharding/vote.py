"""What all processes of a mesh must know of each other before they step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from axes.programs.sent import Sent, Told


@final
class Vote:
    """The largest of some numbers over the processes of a mesh, in memory that stays."""

    def __init__(self, mesh: Any) -> None:
        self.groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        self.said = torch.zeros(4, dtype=torch.float64, device=mesh.device_type)
        self._sent, self._told = Sent(self.said), Told(self.said)

    def cast(self, bad: bool | Tensor, count: int, changed: bool) -> Callable[[], list[float]]:
        """Begin to say them; the call of the result waits, for nothing that is launched in between.

        It returns whether any process says bad, the largest count, minus the smallest, and whether any has changed.
        """
        import torch.distributed as dist

        flag = bad if isinstance(bad, Tensor) else None
        self._sent.send([0.0 if flag is not None else float(bad), count, -count, float(changed)])
        if flag is not None:
            self.said[0].copy_(flag)
        for group in self.groups:
            dist.all_reduce(self.said, dist.ReduceOp.MAX, group=group)
        self._told.tell(self.said)
        return self._told.numbers


__all__ = ["Vote"]
