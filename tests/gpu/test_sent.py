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
