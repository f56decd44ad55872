"""Two bfloat16 numbers for every float32 one, x = high + low to 16 bits, three times along a dimension, in Triton.

Products of such pairs are one product of bfloat16 matrices of three times the length. Written with library calls the
pairs cost more than that product: here an entry is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import interpreted, on_device
from axes.kernels.common.sizes import cdiv

_TILE = 64


@Kernel
@triton.jit
def _thirds(
    x, out, M, N, across, x_b, x_m, x_n, o_b, o_m, o_n, third,
    SECOND: tl.constexpr, THIRD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix. third: entries of `out` between its thirds."""
    pid = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    rows = (pid // across * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    columns = (pid % across * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    inside = (rows < M) & (columns < N)
    value = tl.load(x + batch * x_b + rows * x_m + columns * x_n, mask=inside, other=0.0)
    high = value.to(tl.bfloat16)
    low = (value - high.to(tl.float32)).to(tl.bfloat16)
    at = out + batch * o_b + rows * o_m + columns * o_n
    tl.store(at, high, mask=inside)
    tl.store(at + third, low if SECOND else high, mask=inside)
    tl.store(at + 2 * third, low if THIRD else high, mask=inside)


def thirds(x: Tensor, dim: int, order: tuple[int, int, int]) -> Tensor:
    """The high (0) and low (1) halves of x (N, m, n) in float32, in this order along dimension -1 or -2.

    order begins with 0. Raises ShapeError for shapes, dtypes and devices that do not fit.
    """
    if x.ndim != 3 or x.dtype != torch.float32 or dim not in (-1, -2) or order[0] != 0:
        raise ShapeError(f"thirds: takes (N, m, n) in float32, got {tuple(x.shape)} in {x.dtype}, {dim=}, {order=}")
    if x.device.type != "cuda" and not interpreted():
        raise ShapeError(f"thirds: the Triton kernel needs a CUDA device, not {x.device}")
    count, m, n = x.shape
    out = torch.empty(count, *((m, 3 * n) if dim == -1 else (3 * m, n)), dtype=torch.bfloat16, device=x.device)
    if not out.numel():
        return out
    across = cdiv(n, _TILE)
    with on_device(x):
        _thirds[(cdiv(m, _TILE) * across, count)](
            x, out, m, n, across, *x.stride(), *out.stride(), n if dim == -1 else m * n,
            SECOND=bool(order[1]), THIRD=bool(order[2]), TILE=_TILE, num_warps=4,
        )  # fmt: skip
    return out
