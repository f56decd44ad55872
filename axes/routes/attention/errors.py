"""Values that are errors: what a list stores is what its pairs, read by the token's own key, leave of the value.

    u_t = r_t (v_t - sum_{i<t} p_ti u_i),    p_t = softmax over i < t of scale <x_t, k_i> + mass_i

A unit triangular system: with the weights P strictly below the diagonal, (I + Diag(r) P) u = Diag(r) (v - what earlier
pairs give). Blocks of tokens are solved one after another, so that scores are as large as a block times the list.
Legend: ... batch, T tokens, n pairs of the state.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 128


def written(
    readers: Tensor,
    keys: Tensor,
    old: Tensor,
    values: Tensor,
    scale: float,
    mass: Tensor | None,
    rate: Tensor | float,
    total: float | None = 1.0,
) -> Tensor:
    """u (..., T, d_v). readers (..., T, d_k), keys (..., n + T, d_k), old (..., n, d_v), mass (..., n + T) or None.

    total: what the weights of a read sum to; None: the root of how many pairs it reads.
    """
    kind, wide = values.dtype, torch.promote_types(values.dtype, torch.float32)
    readers, keys, old, values = (x.to(wide) for x in (readers, keys, old, values))
    length, n = readers.shape[-2], old.shape[-2]
    rates = rate[..., None] if isinstance(rate, Tensor) and rate.ndim else values.new_tensor(rate)
    rates = rates.expand(*values.shape[:-1], 1)
    batch = torch.broadcast_shapes(readers.shape[:-2], keys.shape[:-2], values.shape[:-2], old.shape[:-2])
    stored = [old.expand(*batch, *old.shape[-2:])]
    for first in range(0, length, _BLOCK):
        last = min(first + _BLOCK, length)
        scores = scale * (readers[..., first:last, :] @ keys[..., : n + last, :].mT)
        if mass is not None:
            scores = scores + mass[..., None, : n + last].to(scores.dtype)
        pairs = torch.arange(n + last, device=scores.device)
        seen = pairs < pairs[n + first :, None]
        scores = scores.masked_fill(~seen, -torch.inf)
        top = scores.detach().amax(-1, keepdim=True)
        weights = torch.exp(scores - torch.where(top.isfinite(), top, 0.0))
        whole = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(whole > 0, whole, 1.0)
        if total != 1.0:
            weights = weights * (seen.sum(-1, keepdim=True).to(weights.dtype).sqrt() if total is None else total)
        share = rates[..., first:last, :]
        before = torch.cat(stored, -2)
        right = share * (values[..., first:last, :] - weights[..., : n + first] @ before)
        system = (share * weights[..., n + first :]).expand(*batch, last - first, last - first)
        identity = torch.eye(last - first, dtype=system.dtype, device=system.device)
        solved = torch.linalg.solve_triangular(identity + system, right, upper=False, unitriangular=True)
        stored.append(solved)
    return torch.cat(stored[1:], -2).to(kind)


__all__ = ["written"]
