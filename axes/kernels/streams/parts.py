"""What entries that tokens predict are for, one launch each way: weights of a write, and logits that mix.

    k = factor * sigmoid(entries[first : first + n]),   rest = entries[first + n :]

The gradient of the first `first` entries is zero here: what they are for gives its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2

_NUMBERS = 1024  # of a program
_WARPS = 4


@triton.jit
def _places(rows, FIRST: tl.constexpr, N: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr):
    """Of a program: its rows and columns, which of them there are, are of the weights, and of the rest."""
    row, c = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, SIDE)[None, :]
    inside = (row < rows) & (c < C)
    return row, c, inside, inside & (c >= FIRST) & (c < FIRST + N), inside & (c >= FIRST + N)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _part(entries, k, rest, rows, factor, FIRST: tl.constexpr, N: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr,
          ROWS: tl.constexpr):  # fmt: skip
    row, c, inside, writes, others = _places(rows, FIRST, N, C, SIDE, ROWS)
    entry = tl.load(entries + row * C + c, mask=inside, other=0.0)
    tl.store(k + row * N + (c - FIRST), factor * _sigmoid(entry), mask=writes)
    tl.store(rest + row * (C - FIRST - N) + (c - FIRST - N), entry, mask=others)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _part_backward(entries, dk, drest, dentries, rows, factor, FIRST: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
                   SIDE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    row, c, inside, writes, others = _places(rows, FIRST, N, C, SIDE, ROWS)
    share = _sigmoid(tl.load(entries + row * C + c, mask=inside, other=0.0))
    grad = tl.zeros([ROWS, SIDE], tl.float32)
    if dk is not None:
        grad += factor * tl.load(dk + row * N + (c - FIRST), mask=writes, other=0.0) * share * (1.0 - share)
    if drest is not None:
        grad += tl.load(drest + row * (C - FIRST - N) + (c - FIRST - N), mask=others, other=0.0)
    tl.store(dentries + row * C + c, grad, mask=inside)


def _launch(kernel: Kernel, entries: Tensor, *given: Tensor | None, factor: float, first: int, n: int) -> None:
    rows, entry = entries.shape
    side = power_of_2(entry)
    of = max(1, min(_NUMBERS // side, power_of_2(max(rows, 1))))
    if rows:
        with layout.on_device(entries):
            kernel[(cdiv(rows, of),)](
                entries, *given, rows, factor, FIRST=first, N=n, C=entry, SIDE=side, ROWS=of, num_warps=_WARPS
            )


def _forward(entries: Tensor, first: int, n: int, factor: float, record: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    k, rest, kept = _empty(entries, first, n, factor, record)
    _launch(_part, entries, k, rest, factor=factor, first=first, n=n)
    return k, rest, kept


def _empty(entries: Tensor, first: int, n: int, factor: float, record: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    rows, entry = entries.shape
    return entries.new_empty(rows, n), entries.new_empty(rows, entry - first - n), []


def _backward(
    entries: Tensor, first: int, n: int, factor: float, kept: list[Tensor], dk: Tensor | None, drest: Tensor | None
) -> list[Tensor]:
    dentries = torch.empty_like(entries)
    _launch(_part_backward, entries, dk, drest, dentries, factor=factor, first=first, n=n)
    return [dentries]


_parts = Differentiable("parts", _forward, _backward, _empty, gradients=1, missing=True)


def parts(entries: Tensor, first: int, n: int, factor: float) -> tuple[Tensor, Tensor]:
    """(k, rest) of entries (..., C) of float32: (..., n) and (..., C - first - n).

    Raises ShapeError for other dtypes and sizes, and devices that no kernel runs on.
    """
    if entries.dtype != torch.float32 or not entries.ndim or min(first, n - 1, entries.shape[-1] - first - n) < 0:
        raise ShapeError(
            f"parts: entries (..., C) of float32 with C at least first + n, n at least 1, not {tuple(entries.shape)} "
            f"of {entries.dtype}, first = {first} and n = {n}"
        )
    if entries.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"parts: the Triton kernels need a CUDA device, not {entries.device}")
    k, rest = _parts(entries.reshape(-1, entries.shape[-1]).contiguous(), first, n, float(factor))
    lead = entries.shape[:-1]
    return k.view(*lead, n), rest.view(*lead, rest.shape[-1])
