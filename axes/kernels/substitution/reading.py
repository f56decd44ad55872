"""What a query reads, y = f(S q, inputs), where that is more than S q: one pass forward, one backward.

f is text of the same functions as what tokens write (`axes.kernels.substitution.response`), with S q in the place of
what the key reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from axes.kernels.common.layout import on_device
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.substitution.chain import SLOTS, known_response

ROWS, WARPS = 16, 4


def _forward(
    x: Tensor, i0: Tensor | None, i1: Tensor | None, i2: Tensor | None, i3: Tensor | None, i4: Tensor | None,
    i5: Tensor | None, i6: Tensor | None, i7: Tensor | None, dtype: torch.dtype, name: str, record: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    out = torch.empty_like(x, dtype=dtype)
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    with on_device(x):
        known_response(name)[1].read[(cdiv(rows, ROWS),)](
            x, i0, i1, i2, i3, i4, i5, i6, i7, out, rows, V=width, BV=max(16, power_of_2(width)), R=ROWS,
            num_warps=WARPS,
        )  # fmt: skip
    return out, []


def _shapes(x, i0, i1, i2, i3, i4, i5, i6, i7, dtype, name, record):
    return torch.empty_like(x, dtype=dtype), []


def _backward(
    x: Tensor, i0: Tensor | None, i1: Tensor | None, i2: Tensor | None, i3: Tensor | None, i4: Tensor | None,
    i5: Tensor | None, i6: Tensor | None, i7: Tensor | None, dtype: torch.dtype, name: str, kept: list[Tensor],
    do: Tensor,
) -> list[Tensor]:  # fmt: skip
    given = (i0, i1, i2, i3, i4, i5, i6, i7)
    dx = torch.empty_like(x)
    grads = [None if i is None else torch.empty_like(i) for i in given]
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    with on_device(x):
        known_response(name)[1].read_back[(cdiv(rows, ROWS),)](
            x, do, *given, dx, *grads, rows, V=width, BV=max(16, power_of_2(width)), R=ROWS, num_warps=WARPS
        )
    return [dx, *grads]  # type: ignore[list-item]


_read = Differentiable("substitution_read", _forward, _backward, _shapes, gradients=1 + SLOTS)


def shown(x: Tensor, response: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """f of x (B, T, H, V), float32, in a dtype; inputs: rows (B, T, H, V) or numbers (B, T, H), as it says."""
    if x.numel() == 0:
        return x.to(dtype)
    slots: list[Tensor | None] = [*(i.contiguous() for i in inputs), *[None] * (SLOTS - len(inputs))]
    (out,) = _read(x.contiguous(), *slots, dtype, response)
    return out


__all__ = ["shown"]
