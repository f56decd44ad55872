"""What the kernels of cells take: asked on every machine, Triton is not imported."""

from __future__ import annotations

from typing import NamedTuple

import torch

from axes.kernels.common import versions
from axes.kernels.common.sizes import power_of_2

WIDEST = 128
_ON_CHIP = 200 << 10  # bytes of shared memory that one program's matrices may take


class Size(NamedTuple):
    """gates: pre-activations.  carried: tensors beside the state, h and one more.  ends: the Triton from which its
    compiler ends in an assertion of LLVM in float32.  widest: heads."""

    gates: int
    carried: int = 0
    ends: str | None = None
    widest: int = WIDEST


CELLS = {"gru": Size(3), "slstm": Size(4, 2, ends="3.9.0")}
MATRIX_CELLS = {"m2rnn": Size(1, widest=64)}  # whose state is a matrix, on chip with its gradient and that of W


def refusal(cell: str, dtype: torch.dtype, width: int) -> str | None:
    """Why no kernel walks a cell of heads this wide, whatever the GPU, or None."""
    if dtype not in versions.DTYPES:
        return f"the kernel accumulates in float32, the values are {dtype}"
    known = CELLS | MATRIX_CELLS
    if cell not in known:
        return f"the kernel walks {', '.join(known)}, not {cell!r}"
    gates, _, ends, widest = known[cell]
    if dtype == torch.float32 and ends is not None and versions.since(ends):
        return f"Triton {ends} ends in an assertion of LLVM on {cell} in float32"
    if not 0 < width <= widest:
        return f"the kernel keeps matrices of heads up to {widest} wide on chip"
    taken = gates * max(16, power_of_2(width)) ** 2 * dtype.itemsize
    if taken > _ON_CHIP:
        what = f"{gates} matrices of a head {width} wide"
        return f"{what} take {taken >> 10} KB in {dtype}, where {_ON_CHIP >> 10} fit on the chip"
    return None


__all__ = ["CELLS", "MATRIX_CELLS", "WIDEST", "Size", "refusal"]
