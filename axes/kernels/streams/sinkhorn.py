"""Sinkhorn's k pairs of normalisations of small matrices, one launch each way, whatever k.

    z <- z - lse_i z,  z <- z - lse_j z   (columns, then rows)  k times,  W = e^z       z = logits (..., n, n) at first

What a normalisation takes away is kept apart from z, so that no exponent is positive. The gradient is that of the
truncated map: through z' = z - lse z it is dz = dz' - e^z' sum dz', and e^z' is what the normalisation left. So the
backward goes through the pairs again, writes down what each took away, 2 n numbers a pair, and puts it back one by one.
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
from axes.kernels.streams import LARGEST

_ENTRIES = 1024  # of a program
_WARPS = 4


@triton.jit
def _logsumexp(z, inside, AXIS: tl.constexpr):
    """Of rows or columns with entries, 0 of the others."""
    top = tl.where(inside, tl.max(z, AXIS, keep_dims=True), 0.0)
    return top, tl.log(tl.where(inside, tl.sum(tl.exp(z - top), AXIS, keep_dims=True), 1.0))


@triton.jit
def _places(matrices, n, ROWS: tl.constexpr, N: tl.constexpr):
    """Of a program: its matrices and their entries, and which of these, of columns and of rows there are."""
    matrix = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    i, j = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
    there = matrix < matrices
    return matrix, i, j, there & (i < n) & (j < n), there & (j < n), there & (i < n)


@Kernel
@triton.jit(do_not_specialize=["matrices", "pairs"])
def _forward(logits, out, matrices, pairs, n, ROWS: tl.constexpr, N: tl.constexpr):
    matrix, i, j, inside, columns, rows = _places(matrices, n, ROWS, N)
    at = matrix * n * n + i * n + j
    z = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    for _ in range(pairs):
        top, rest = _logsumexp(z, columns, 1)
        z = (z - top) - rest
        top, rest = _logsumexp(z, rows, 2)
        z = (z - top) - rest
    tl.store(out + at, tl.exp(z), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["matrices", "pairs"])
def _backward(logits, dout, dlogits, taken, matrices, pairs, n, ROWS: tl.constexpr, N: tl.constexpr):
    """taken: (2 pairs, matrices, n), written and read by this program alone."""
    matrix, i, j, inside, columns, rows = _places(matrices, n, ROWS, N)
    at = matrix * n * n + i * n + j
    z = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    step = matrices.to(tl.int64) * n
    place = taken + matrix * n
    for _ in range(pairs):
        top, rest = _logsumexp(z, columns, 1)
        z = (z - top) - rest
        tl.store(place + j, top + rest, mask=columns)
        top, rest = _logsumexp(z, rows, 2)
        z = (z - top) - rest
        tl.store(place + step + i, top + rest, mask=rows)
        place += 2 * step
    tl.debug_barrier()  # what one thread has written another one reads
    w = tl.exp(z)
    dz = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32) * w
    for _ in range(pairs):
        place -= 2 * step
        dz -= tl.exp(z) * tl.sum(dz, 2, keep_dims=True)
        z += tl.load(place + step + i, mask=rows, other=0.0)
        dz -= tl.exp(z) * tl.sum(dz, 1, keep_dims=True)
        z += tl.load(place + j, mask=columns, other=0.0)
    tl.store(dlogits + at, dz.to(dlogits.dtype.element_ty), mask=inside)


def _launch(kernel: Kernel, logits: Tensor, *given: Tensor, pairs: int) -> None:
    matrices, n = logits.shape[:2]
    side = triton.next_power_of_2(n)
    rows = min(_ENTRIES // side**2, triton.next_power_of_2(max(matrices, 1)))
    if matrices:
        with layout.on_device(logits):
            kernel[(triton.cdiv(matrices, rows),)](
                logits, *given, matrices, pairs, n, ROWS=rows, N=side, num_warps=_WARPS
            )


def _run(logits: Tensor, pairs: int, record: bool) -> tuple[Tensor, list[Tensor]]:
    out = torch.empty_like(logits)
    _launch(_forward, logits, out, pairs=pairs)
    return out, []


def _differentiate(logits: Tensor, pairs: int, kept: list[Tensor], dout: Tensor) -> list[Tensor]:
    dlogits, taken = torch.empty_like(logits), logits.new_empty(2 * pairs, *logits.shape[:2])
    _launch(_backward, logits, dout, dlogits, taken, pairs=pairs)
    return [dlogits]


_sinkhorn = Differentiable(
    "sinkhorn", _run, _differentiate, lambda logits, pairs, record: (torch.empty_like(logits), []), gradients=1
)


def sinkhorn(logits: Tensor, pairs: int) -> Tensor:
    """Matrices (..., n, n) in float32, row sums one, column sums nearly so: e^logits after `pairs` of normalisations.

    Raises ShapeError for other shapes, n above 16, and devices that no kernel runs on.
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or not 1 <= logits.shape[-1] <= LARGEST:
        raise ShapeError(f"sinkhorn: logits are (..., n, n) with n from 1 to {LARGEST}, not {tuple(logits.shape)}")
    if not logits.is_floating_point() or logits.dtype == torch.float64 or pairs < 1:
        raise ShapeError(f"sinkhorn: logits of up to 32 bits and pairs from 1 on, not {logits.dtype} and {pairs}")
    if logits.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"sinkhorn: the Triton kernel needs a CUDA device, not {logits.device}")
    (out,) = _sinkhorn(logits.to(torch.float32).reshape(-1, *logits.shape[-2:]).contiguous(), pairs)
    made: Tensor = out.view(logits.shape)
    return made
