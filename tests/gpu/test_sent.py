"""Numbers that the host sends while the device is behind: none is written over before it has been copied."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.programs import sent  # noqa: E402


def test_rows_wait_for_their_copies() -> None:
    to = torch.zeros(3, dtype=torch.float64, device="cuda")
    several, found = sent.Sent(to), []

    def send(first: int, end: int) -> None:
        torch.cuda._sleep(20_000_000)  # some 10 ms
        for t in range(first, end):
            several.send([t, 0.1 * t, -t])
            found.append(to.clone())

    send(0, 5 * sent._HALF)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        send(5 * sent._HALF, 8 * sent._HALF)
    torch.cuda.synchronize()
    assert torch.stack(found).tolist() == [[t, 0.1 * t, -t] for t in range(8 * sent._HALF)]


def test_what_is_told_does_not_wait_for_what_comes_later() -> None:
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, device="cuda")
    told = sent.Told(x)
    for t in range(3):
        told.tell(x)
        torch.cuda._sleep(200_000_000)  # some 100 ms
        x += 1
        end = torch.cuda.current_stream().record_event()
        assert told.numbers() == [1.0 + t, -2.0 + t]
        assert not end.query()
        torch.cuda.synchronize()
