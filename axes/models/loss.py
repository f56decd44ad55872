"""Cross-entropy of a linear head without its logits: rows are taken a part at a time, forward and backward at once.

    z_n = W x_n      loss = mean_n (log sum_v e^(z_nv) - z_(n, y_n))      over the n whose class is not ignored
    dz_n = softmax(z_n) - [y_n]      dx_n = W^T dz_n / count      dW = sum_n dz_n x_n^T / count
The gradient is known as soon as the logits are, so a part's logits become their own gradient and then products; no
more than `_ENTRIES` logits, or one part in `_PARTS`, exist at a time, in the dtype of x. dW adds up in float32 at
least. The count divides at the end, together with what comes from behind (a scaled loss): in 16 bit a probability
divided by it would be no number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from axes.errors import AxesError, ShapeError
from axes.kernels.common import versions
from axes.kernels.common.operators import Differentiable
from axes.routes.precision import own_precision, taken_in

_ENTRIES = 1 << 28  # logits at a time: 0.5 GB of 16-bit numbers,
_PARTS = 8  # or an eighth of all, little beside what a model keeps of so many tokens: every part passes over dW


def _by_torch(logits: Tensor, targets: Tensor, gradients: bool, ignored: int) -> Tensor:
    """What the kernel does: losses of rows, and if asked for their gradients in the logits' place."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    logs = logits.log_softmax(-1, dtype=wide)
    losses = F.nll_loss(logs, targets, ignore_index=ignored, reduction="none")
    if gradients:
        counts = (targets != ignored)[:, None]
        logs.exp_().scatter_add_(1, targets[:, None].clamp_min(0), -torch.ones_like(logs[:, :1]))
        logits.copy_(logs.where(counts, logs.new_zeros(())))
    return losses


def _forward(
    x: Tensor, weight: Tensor, targets: Tensor, ignored: int, for_x: bool, for_weight: bool, kernel: bool, record: bool
) -> tuple[Tensor, list[Tensor]]:
    """The loss, and what of its gradients is wanted, for x (N, D) and weight (V, D), taken in x's dtype."""
    rows_of_logits: Any = _by_torch
    if kernel:
        from axes.kernels.rows.cross_entropy import cross_entropy as rows_of_logits  # triton is imported on first use
    wide, weight = torch.promote_types(x.dtype, torch.float32), weight.to(x.dtype)
    scale = (targets != ignored).sum().clamp_min(1).to(wide).reciprocal()
    loss, dx, dw = scale.new_zeros(()), x.new_empty(x.shape if for_x else 0), None
    rows = max(1, _ENTRIES // max(1, weight.shape[0]), -(-x.shape[0] // _PARTS))
    for first in range(0, x.shape[0], rows):
        part, aims = x[first : first + rows], targets[first : first + rows]
        logits = F.linear(part, weight)
        loss += rows_of_logits(logits, aims, record, ignored).sum()
        if record and for_x:
            torch.mm(logits, weight, out=dx[first : first + rows])
        if record and for_weight:
            dw = _added(dw, logits, part, wide, _narrow(x, weight))
        del logits  # before the next part's
    dw = dw if dw is not None else weight.new_zeros(weight.shape if for_weight else 0)
    return loss * scale, [dx, dw, scale] if record else []


def _narrow(x: Tensor, weight: Tensor) -> bool:
    """Whether dW is kept in x's dtype: where it is one product, unless a sum over tokens may be beyond that dtype."""
    return x.shape[0] * weight.shape[0] <= _ENTRIES and x.dtype != torch.float16


def _shapes(
    x: Tensor, weight: Tensor, targets: Tensor, ignored: int, for_x: bool, for_weight: bool, kernel: bool, record: bool
) -> tuple[Tensor, list[Tensor]]:
    wide = torch.promote_types(x.dtype, torch.float32)
    dx = x.new_empty(x.shape if for_x else 0)
    dw = weight.new_empty(weight.shape if for_weight else 0, dtype=x.dtype if _narrow(x, weight) else wide)
    return x.new_empty((), dtype=wide), [dx, dw, x.new_empty((), dtype=wide)] if record else []


def _backward(
    x: Tensor, weight: Tensor, targets: Tensor, ignored: int, for_x: bool, for_weight: bool, kernel: bool,
    kept: list[Tensor], dloss: Tensor,
) -> list[Tensor]:  # fmt: skip
    *sums, scale = kept
    factor = (dloss * scale)[None]  # a scalar would be rounded to the dtype of what it multiplies
    wanted = zip(sums, (x, weight), (for_x, for_weight), strict=True)
    return [_scaled(d, factor, y, kernel) if want else torch.empty_like(y) for d, y, want in wanted]


def _scaled(d: Tensor, factor: Tensor, like: Tensor, kernel: bool) -> Tensor:
    """d times the number `factor` in the dtype of another: torch's product of two dtypes takes three times a pass."""
    if kernel and d.dtype == like.dtype != factor.dtype:
        from axes.kernels.rows import scaled  # triton is imported on first use

        if scaled.fits(d, factor):
            return scaled.scale(d, factor)
    return torch.mul(d, factor, out=torch.empty_like(like))


def _added(total: Tensor | None, dz: Tensor, x: Tensor, wide: torch.dtype, narrow: bool) -> Tensor:
    """dz^T x, added to what there is; in float32 at least unless `narrow`."""
    if narrow or dz.dtype == wide:
        return dz.mT @ x if total is None else total.addmm_(dz.mT, x)
    if not dz.is_cuda:
        made = dz.mT.to(wide) @ x.to(wide)
        return made if total is None else total.add_(made)
    if total is None:
        return torch.mm(dz.mT, x, out_dtype=wide)
    return torch.addmm(total, dz.mT, x, out_dtype=wide, out=total)  # a pass over dW less than a product to be added


_operator = Differentiable("linear_cross_entropy", _forward, _backward, _shapes, gradients=2)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, ignored: int = -100, implementation: str | None = None
) -> Tensor:
    """Mean of -log softmax(W x_n)_(y_n), in float32 at least, without a tensor of all logits.

    Args:
        x: (..., D), under autocast taken in its dtype.
        weight: W (V, D).
        targets: y (...) integers below V; entries `ignored` do not count. Without one that counts the loss is 0. Of a
            class that is none torch raises, and the kernel's loss is NaN.
        implementation: of the rows' losses: "triton", "torch", or None for the kernel where there is one.

    x and W receive gradients, once. Raises ShapeError on shapes that do not fit, AxesError on an implementation that
    cannot run.
    """
    who = "linear_cross_entropy"
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1] or targets.shape != x.shape[:-1]:
        got = f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        raise ShapeError(f"{who}: x is (..., D), the weight (V, D) and targets (...), not {got}")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ShapeError(f"{who}: targets are integers, not {targets.dtype}")
    dtype = taken_in(x)
    refused = versions.no_kernel(x.device, dtype)
    if implementation not in (None, "triton", "torch"):
        raise AxesError(f"{who}: implementation is None, 'triton' or 'torch', not {implementation!r}")
    if implementation == "triton" and refused is not None:
        raise AxesError(f"{who}: implementation='triton' cannot run: {refused}")
    flat = x.reshape(-1, x.shape[-1]).to(dtype)
    wanted = x.requires_grad, weight.requires_grad
    inputs: Any = flat, weight, targets.reshape(-1).long(), ignored, *wanted
    with own_precision(x):
        loss: Tensor = _operator(*inputs, refused is None and implementation != "torch")[0]
    return loss
