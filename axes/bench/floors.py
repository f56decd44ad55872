"""What no implementation can undercut: the bytes and products of a rule, and the ceilings of the GPU, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from axes.bench.timing import median

_CHUNK = 64


@final
@dataclass(frozen=True)
class Account:
    """Bytes moved once each and floating-point operations of the chunk form, forward and forward + backward."""

    forward_bytes: int
    both_bytes: int
    forward_flops: int
    both_flops: int


@final
@dataclass(frozen=True)
class Ceilings:
    """Measured: bytes/s of a device-to-device copy (read + written), FLOP/s of an 8192^3 product in bfloat16."""

    bytes_per_second: float
    flops_per_second: float

    def milliseconds(self, moved: int, flops: int) -> float:
        """The larger of the two times: no version runs much faster."""
        return 1e3 * max(moved / self.bytes_per_second, flops / self.flops_per_second)


def account(
    tokens: int, heads: int, width: int, item: int, numbers: int = 0, channels: int = 0, keys: int = 0,
    erases: bool = False, slots: int = 1, key_width: int | None = None, products: bool = True,
) -> Account:  # fmt: skip
    """The account of one rule for `tokens` tokens in all sequences.

    item: bytes of an element. numbers: float32 numbers a token and head (strength, gate). channels: float32 gates of
    every key entry. keys: key vectors beyond q and k. erases: whether the state is read before the write too.
    key_width: of q and k, where it is not that of values. products: whether matrix products compute it.
    """
    rows = tokens * heads
    wide = width if key_width is None else key_width
    inputs = rows * (item * (width + wide * (2 + keys)) + 4 * (numbers + channels))
    outputs = rows * item * width
    forward = inputs + outputs
    # backward: inputs and the output's gradient in, a gradient of every input out
    both = forward + inputs + outputs + inputs
    reads = 2 * slots + (2 if erases else 0) * slots
    each = reads * wide * width + 2 * _CHUNK * width * (2 + (3 if erases else 0)) if products else 0
    return Account(forward, both, rows * each, round(3.5 * rows * each))


def ceilings(device: torch.device) -> Ceilings:
    """Measure both ceilings once on this device: ten copies of 4 GiB, ten products."""
    source = torch.randn(1 << 30, device=device)
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source))
    moved = 2 * 4 * source.numel()
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    return Ceilings(moved / copy, 2 * 8192**3 / _seconds(lambda: a @ b))


def copy_rate(numbers: int, device: torch.device) -> float:
    """Bytes a second, read and written, of a copy: on a GPU of much memory, on a CPU of as many float32 numbers."""
    if device.type == "cuda":
        return ceilings(device).bytes_per_second
    source = torch.ones(numbers)
    target = torch.empty_like(source)
    milliseconds = median(lambda: (target.copy_(source),), device).eager
    return 8 * numbers / (1e-3 * milliseconds)


def _seconds(call: Callable[[], object], times: int = 10) -> float:
    call()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(times):
        call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3 / times
