"""Cross-entropy of rows of logits z (N, V) with classes y, and its gradient in the place of the logits.

    loss_n = log sum_v e^(z_nv) - z_ny        dz_nv = softmax(z_n)_v - [v = y]
A row is read twice by one program, in float32 whatever its dtype. The first time every place of a block keeps the
maximum of what it has seen and the sum in units of it, with one exponential a number, and all places meet at the end
alone. The second time dz is written, backwards: what was read last is in the cache still, and what is written makes way
for it. Rows of class `ignored` have loss 0 and gradient 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import power_of_2

_BLOCK, _WARPS = 4096, 16  # entries at once; few rows at a time, for the cache
_LEAST = tl.constexpr(-1e30)  # stands for no number, and for minus infinity, of which no difference is taken


@Kernel
@triton.jit(do_not_specialize=["ignored"])
def _cross_entropy(logits, targets, losses, ignored, V, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    counts = target != ignored
    peaks, sums = tl.full([BLOCK], _LEAST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = tl.load(logits + at, mask=at < V, other=_LEAST).to(tl.float32)
        z = tl.where(z < _LEAST, _LEAST, z)  # what is not a number stays
        beyond = z - peaks
        smaller = tl.exp(-tl.abs(beyond))
        sums = tl.where(beyond > 0, sums * smaller + 1.0, sums + smaller)
        peaks = tl.where(beyond > 0, z, peaks)
    peak = tl.max(peaks)
    total = tl.sum(sums * tl.exp(peaks - peak))
    aim = tl.load(logits + target, mask=counts, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(counts, tl.log(total) + (peak - aim), 0.0))
    if GRAD:
        tl.debug_barrier()  # the logit of the class has been read by all before it is overwritten
        share, last = 1.0 / total, (V - 1) // BLOCK * BLOCK
        for back in range(0, V, BLOCK):
            at = last - back + tl.arange(0, BLOCK)
            z = tl.load(logits + at, mask=at < V, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
            dz = tl.exp(z - peak) * share - (at == target).to(tl.float32)
            dz = tl.where(counts, dz, 0.0).to(logits.dtype.element_ty)
            tl.store(logits + at, dz, mask=at < V, eviction_policy="evict_first")


def _tiles(classes: int) -> dict[str, int]:
    block = min(_BLOCK, power_of_2(classes))
    return {"BLOCK": block, "num_warps": max(1, _WARPS * block // _BLOCK)}


def cross_entropy(logits: Tensor, targets: Tensor, gradients: bool, ignored: int) -> Tensor:
    """Losses (N) in float32 of logits (N, V), contiguous; their gradients replace the logits if asked for.

    targets (N) int64, every one below V or `ignored`. Raises ShapeError for other layouts and for
    devices that no kernel runs on.
    """
    if logits.ndim != 2 or not logits.is_contiguous() or targets.shape != logits.shape[:1]:
        got = f"{tuple(logits.shape)} with {logits.stride()} and {tuple(targets.shape)}"
        raise ShapeError(f"cross_entropy: logits are (N, V), contiguous, and targets (N), not {got}")
    if logits.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"cross_entropy: the Triton kernel needs a CUDA device, not {logits.device}")
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    if losses.numel():
        with layout.on_device(logits):
            _cross_entropy[(losses.shape[0],)](
                logits, targets, losses, ignored, logits.shape[1],
                GRAD=gradients, **_tiles(logits.shape[1]),
            )  # fmt: skip
    return losses
