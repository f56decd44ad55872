"""Products that are known to be symmetric, by what computes them fastest: C = alpha A B^T + sum beta_i D_i + delta I.

Gram matrices, squares of symmetric matrices, and products of two polynomials in one matrix. `no_kernel` says when the
Triton kernel, which computes one triangle, takes them; torch's batched product does everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from axes.kernels.common import versions

_HALF = (torch.float16, torch.bfloat16)
_LEAST_SIDE = 512  # below, and
_LEAST_TILES = 132  # with fewer tiles of 128 x 128, torch's full product took less time on an H200
_ALONE = 2048  # sides from which one matrix has enough tiles


def no_kernel(a: Tensor, count: int | None = None, rounded: bool = False) -> str | None:
    """Why no kernel multiplies a (N, m, k) into (N, m, m), or None if one does.

    count: in the place of N. rounded: float32 matrices, which the kernel takes by rows, may be rounded to 11 bits.
    """
    reason = versions.refusal(a.device)
    if reason is not None:
        return reason
    full = rounded and a.dtype == torch.float32
    if a.dtype not in _HALF and not full:
        return f"the kernel multiplies 16-bit matrices, not {a.dtype}"
    if a.ndim != 3 or a.shape[1] % 8 or a.shape[2] % 8:
        return f"sides must be multiples of 8, not {tuple(a.shape[1:])}"
    side = -(-a.shape[1] // 128)
    tiles = (a.shape[0] if count is None else count) * side * (side + 1) // 2
    # statistics of few data turn another rounding into another direction: there it is not the number of matrices that
    # decides, which is another one where they are spread over processes
    least = _ALONE if full or tiles < _LEAST_TILES else _LEAST_SIDE
    if a.shape[1] < least:
        return "torch takes no longer for products this small"
    if a.requires_grad and torch.is_grad_enabled():
        return "the kernel has no derivative"
    if torch.cuda.get_device_properties(a.device).major < 9:
        return "the kernel's descriptors need Hopper or later"
    if full and versions.hopper_refusal(a.device) is not None:
        return f"float32 matrices are multiplied by a kernel for Hopper: {versions.hopper_refusal(a.device)}"
    return None


def by_kernel(a: Tensor, b: Tensor | None = None, **arguments: Any) -> Tensor:
    """`axes.kernels.products.symmetric.symmetric_product`, for matrices that `no_kernel` has nothing
    against; float32 ones are copied where they are not stored by rows."""
    from axes.kernels.products import symmetric  # triton is imported on first use

    if a.dtype == torch.float32:
        a, b = a.contiguous(), None if b is None else b.contiguous()
    return symmetric.symmetric_product(a, b, **arguments)


def product(
    a: Tensor,
    b: Tensor | None = None,
    *,
    alpha: float = 1.0,
    terms: Sequence[tuple[float, Tensor]] = (),
    diagonal: float = 0.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    count: int | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """alpha A B^T + sum of beta D over `terms` (beta, D) + diagonal I, for an A B^T that is symmetric but for rounding.

    a, b (N, m, k), b None for a; D (N, m, m) symmetric, at most two. dtype: of the result, that of a by default. out:
    where it goes, contiguous and neither a nor b. count: in the place of N where the kernel is chosen: how many there
    are in all, of matrices that several launches or processes share. By the kernel the result is exactly symmetric;
    sums are float32. factors (N, 2): of alpha and the first beta in each matrix, where these are numbers of the device.
    """
    if no_kernel(a, count) is None:
        given = {} if factors is None else {"factors": factors.float().contiguous()}
        return by_kernel(a, b, alpha=alpha, terms=terms, diagonal=diagonal, dtype=dtype, out=out, **given)
    b = a if b is None else b
    if factors is not None:
        high = torch.promote_types(a.dtype, torch.float32)
        of_product, of_first = factors.to(high)[:, :, None, None].unbind(1)
        c = torch.bmm(a, b.mT).to(high) * (alpha * of_product)
        for i, (beta, term) in enumerate(terms):
            c = c + term.to(high) * (beta * of_first if i == 0 else beta)
        if diagonal:
            c = c + diagonal * torch.eye(c.shape[-1], dtype=high, device=c.device)
        return c.to(dtype or a.dtype) if out is None else out.copy_(c)
    if out is not None and out.dtype == a.dtype and not terms and alpha == 1.0 and not diagonal:
        return torch.bmm(a, b.mT, out=out)
    if terms:
        (beta, first), *more = terms
        c = torch.baddbmm(first.to(a.dtype), a, b.mT, beta=beta, alpha=alpha)
        for gamma, term in more:
            c = c.add(term, alpha=gamma)
    else:
        c = torch.bmm(a, b.mT)
        c = c if alpha == 1.0 else c * alpha
    if diagonal:
        c = c + diagonal * torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
    if out is not None:
        return out.copy_(c)
    return c if dtype is None else c.to(dtype)
