"""Cross-entropy of rows of logits z (N, V) with classes y, and its gradient in the place of the logits.

    loss_n = log sum_v e^(z_nv) - z_ny        dz_nv = softmax(z_n)_v - [v = y]
A row is read twice by one program, in float32 whatever its dtype. The first time every place of a block keeps the
maximum of what it has seen and the sum in units of it, moved on once for `_TOGETHER` blocks, and all places meet at the
end alone. The second time dz is written, backwards: what was read last is in the cache still, and what is written makes
way for it; the class itself is mended at the end. Rows of class `ignored` have loss 0 and gradient 0.
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
_TOGETHER = tl.constexpr(4)
_LEAST = tl.constexpr(-1e30)  # a maximum of nothing, of which minus infinity can be taken


@triton.jit
def _seen(logits, first, V, peaks, sums, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, WHOLE: tl.constexpr):
    """Maxima and sums of places, with TOGETHER blocks more, which all are in the row if WHOLE."""
    at = first + tl.arange(0, BLOCK)
    blocks = ()
    highest = peaks
    for i in tl.static_range(TOGETHER):
        inside = None if WHOLE else at + i * BLOCK < V
        z = tl.load(logits + at + i * BLOCK, mask=inside, other=None if WHOLE else float("-inf")).to(tl.float32)
        blocks = blocks + (z,)  # type: ignore[assignment]
        highest = tl.maximum(highest, z)
    sums *= tl.exp(peaks - highest)
    for i in tl.static_range(TOGETHER):
        sums += tl.exp(blocks[i] - highest)  # what is no number stays
    return highest, sums


@triton.jit
def _written(logits, first, V, peak, share, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Probabilities in the place of a block."""
    at = first + tl.arange(0, BLOCK)
    inside = None if WHOLE else at < V
    z = tl.load(logits + at, mask=inside, eviction_policy="evict_first").to(tl.float32)
    tl.store(logits + at, (tl.exp(z - peak) * share).to(logits.dtype.element_ty), mask=inside,
             eviction_policy="evict_first")  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=["ignored"])
def _cross_entropy(logits, targets, losses, ignored, V, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    counts = target != ignored
    if counts:
        peaks, sums = tl.full([BLOCK], _LEAST, tl.float32), tl.zeros([BLOCK], tl.float32)
        step: tl.constexpr = BLOCK * _TOGETHER
        whole = V // step * step
        for first in range(0, whole, step):
            peaks, sums = _seen(logits, first, V, peaks, sums, BLOCK, _TOGETHER, True)
        for first in range(whole, V, BLOCK):
            peaks, sums = _seen(logits, first, V, peaks, sums, BLOCK, 1, False)
        peak = tl.max(peaks)
        total = tl.sum(sums * tl.exp(peaks - peak))
        known = (target >= 0) & (target < V)  # of another class the loss is no number, and no other row is written to
        aim = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)
        tl.store(losses + row, tl.log(total) + (peak - aim))
        if GRAD:
            tl.debug_barrier()  # the logit of the class has been read by all before it is overwritten
            share, last = 1.0 / total, V // BLOCK * BLOCK
            if last < V:
                _written(logits, last, V, peak, share, BLOCK, False)
            for back in range(BLOCK, last + 1, BLOCK):
                _written(logits, last - back, V, peak, share, BLOCK, True)
            tl.debug_barrier()  # by whomever the class was written, it is mended now
            own = tl.exp(aim - peak) * share - 1.0
            tl.store(logits + target, own.to(logits.dtype.element_ty), mask=known)
    else:
        tl.store(losses + row, 0.0)
        if GRAD:
            for first in range(0, V, BLOCK):
                at = first + tl.arange(0, BLOCK)
                tl.store(logits + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < V)


def _tiles(classes: int) -> dict[str, int]:
    block = min(_BLOCK, power_of_2(classes))
    return {"BLOCK": block, "num_warps": max(1, _WARPS * block // _BLOCK)}


def cross_entropy(logits: Tensor, targets: Tensor, gradients: bool, ignored: int) -> Tensor:
    """Losses (N) in float32 of logits (N, V), contiguous; their gradients replace the logits if asked for.

    targets (N) int64, every one below V or `ignored`: of another the loss is NaN. Raises ShapeError for other layouts
    and for devices that no kernel runs on.
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
