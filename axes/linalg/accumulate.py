"""Sums of outer products, one function for all axes:  S = decay S_0 + sum_t w_t u_t k_t^T.

Tokens of a chunk written into a memory, examples summed into a Kronecker statistic, columns of a gradient summed into
G G^T are the same sum. `no_kernel` says when Triton computes it; torch computes it everywhere else, exactly in float64.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from axes.kernels.common import versions

_HALF = (torch.float16, torch.bfloat16)
_LEAST_WORK = 250_000_000  # products from which the kernel was faster than torch on an H200, for 16-bit inputs
_LEAST_WIDTH = 768  # of float32 inputs


def no_kernel(u: Tensor, k: Tensor | None = None, weight: Tensor | None = None) -> str | None:
    """Why no Triton kernel computes the sum for u (..., T, V) and k (..., T, K), or None if one does."""
    reason = versions.refusal(u.device)
    if reason is not None:
        return reason
    if u.dtype not in (*_HALF, torch.float32) or (k is not None and k.dtype != u.dtype):
        return f"the kernel takes float32 and 16-bit inputs, not {u.dtype} and {u.dtype if k is None else k.dtype}"
    work = u.numel() * (u if k is None else k).shape[-1]
    if u.dtype in _HALF and weight is not None:
        return "weighted keys would be rounded to 16 bits"
    if u.dtype == torch.float32 and k is not None:
        return "torch's own float32 product is faster unless the sum is symmetric, where half of it is enough"
    if work < (_LEAST_WORK if u.dtype in _HALF else 4 * _LEAST_WORK) or (
        u.dtype == torch.float32 and u.shape[-1] < _LEAST_WIDTH
    ):
        return "a sum this small takes torch no longer"
    return None


def outer_sum(
    u: Tensor,
    k: Tensor | None = None,
    weight: Tensor | None = None,
    start: Tensor | None = None,
    decay: Tensor | None = None,
) -> Tensor:
    """S = decay S_0 + sum_t w_t u_t k_t^T in float32, or in float64 if u or k is.

    u (..., T, V), k (..., T, K) or None for u; weight (..., T) or None for 1; start S_0 (..., V, K) or None for 0;
    decay (...) or None for 1. Returns (..., V, K). 16-bit inputs are not rounded again: their products are exact.
    """
    if no_kernel(u, k, weight) is None:
        from axes.kernels.products import outer  # triton is imported on first use

        batch = u.shape[:-2]
        flat = (u.reshape(-1, *u.shape[-2:]), None if k is None else k.reshape(-1, *k.shape[-2:]))
        weight = None if weight is None else weight.expand(u.shape[:-1]).reshape(-1, u.shape[-2])
        shape = (*batch, u.shape[-1], (u if k is None else k).shape[-1])
        start = None if start is None else start.expand(shape).reshape(-1, *shape[-2:])
        decay = None if decay is None else decay.expand(batch).reshape(-1)
        return outer.outer_sum(*flat, weight, start, decay).reshape(shape)
    wide = torch.promote_types(torch.promote_types(u.dtype, (u if k is None else k).dtype), torch.float32)
    kind = u.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        left, right = u.to(wide), (u if k is None else k).to(wide)
        if weight is not None:
            right = weight.to(wide)[..., None] * right
        if start is not None and decay is not None:
            start = decay.to(wide)[..., None, None] * start
        if start is None:
            return left.mT @ right
        if u.shape[-2] == 1:  # one token: the outer product is never in memory
            return torch.addcmul(start, left.mT, right)
        return start + left.mT @ right
