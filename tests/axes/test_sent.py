"""Numbers of the host in a tensor of a device, more often than there are rows that they are sent from; and back."""

from __future__ import annotations

import torch

from axes.programs import sent


def test_every_row_arrives() -> None:
    to = torch.zeros(3, dtype=torch.float64)
    several = sent.Sent(to)
    for t in range(5 * sent._HALF):
        several.send([t, 0.1 * t, -t])
        assert to.tolist() == [t, 0.1 * t, -t]


def test_what_is_told_is_what_was_there_then() -> None:
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)
    told = sent.Told(x)
    for t in range(3):
        told.tell(x)
        now = x.tolist()
        x += t + 1
        assert told.numbers() == now
