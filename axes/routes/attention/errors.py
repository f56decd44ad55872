"""Values that are errors: what a list stores is what its pairs, read by the token's own key, leave of the value.

    u_t = r_t (v_t - sum_{i<t} p_ti u_i),    p_t = softmax over i < t of scale <x_t, k_i> + mass_i

or p_ti = kappa(x_t, k_i) e^mass_ti of another kernel than the reads', whose weights do not sum to one (LUCID). A unit
triangular system: with the weights P strictly below the diagonal, (I + Diag(r) P) u = Diag(r) (v - what earlier pairs
give). Blocks of tokens are solved one after another, so that scores are as large as a block times the list.
Legend: ... batch, T tokens, n pairs of the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from axes.core.memory import Kernel

_BLOCK = 128


class Seen(NamedTuple):
    """What a token's key sees of a list: softmax weights of this scale, masses (..., n + T) and sum, or a kernel's.

    total: what the weights of a read sum to; None: the root of how many pairs it reads.  ahead: by how much masses are
    less than they are at a token, (..., T): of no consequence to a softmax.
    """

    scale: float
    mass: Tensor | None = None
    total: float | None = 1.0
    kernel: Kernel | None = None
    ahead: Tensor | None = None


def written(readers: Tensor, keys: Tensor, old: Tensor, values: Tensor, rate: Tensor | float, seen: Seen) -> Tensor:
    """u (..., T, d_v). readers (..., T, d_k), keys (..., n + T, d_k), old (..., n, d_v)."""
    kind, wide = values.dtype, torch.promote_types(values.dtype, torch.float32)
    readers, keys, old, values = (x.to(wide) for x in (readers, keys, old, values))
    length, n = readers.shape[-2], old.shape[-2]
    if isinstance(rate, Tensor):
        rates = (rate[..., None] if rate.ndim else rate).expand(*values.shape[:-1], 1)
    else:
        rates = values.new_full((*values.shape[:-1], 1), rate)  # filled on the device: a graph records it
    batch = torch.broadcast_shapes(readers.shape[:-2], keys.shape[:-2], values.shape[:-2], old.shape[:-2])
    stored = [old.expand(*batch, *old.shape[-2:])]
    for first in range(0, length, _BLOCK):
        last = min(first + _BLOCK, length)
        weights = _weights(readers[..., first:last, :], keys[..., : n + last, :], n + first, first, seen)
        share = rates[..., first:last, :]
        before = torch.cat(stored, -2)
        right = share * (values[..., first:last, :] - weights[..., : n + first] @ before)
        system = (share * weights[..., n + first :]).expand(*batch, last - first, last - first)
        identity = torch.eye(last - first, dtype=system.dtype, device=system.device)
        solved = torch.linalg.solve_triangular(identity + system, right, upper=False, unitriangular=True)
        stored.append(solved)
    return torch.cat(stored[1:], -2).to(kind)


def _weights(readers: Tensor, keys: Tensor, place: int, first: int, seen: Seen) -> Tensor:
    """Of a block of tokens, `first` of the sequence, which stands at `place` of the list: of pairs before each."""
    pairs = torch.arange(keys.shape[-2], device=keys.device)
    earlier = pairs < pairs[place:, None]
    mass = None if seen.mass is None else seen.mass[..., None, : keys.shape[-2]]
    if seen.kernel is not None:
        if mass is not None and seen.ahead is not None:
            mass = mass + seen.ahead[..., first : first + readers.shape[-2], None]
        if mass is not None:  # of later pairs it may be large
            mass = mass.expand(*mass.shape[:-2], *earlier.shape).masked_fill(~earlier, -torch.inf).to(readers.dtype)
        return torch.where(earlier, seen.kernel.between(readers, keys, mass), 0.0)
    scores = seen.scale * (readers @ keys.mT)
    if mass is not None:
        scores = scores + mass.to(scores.dtype)
    scores = scores.masked_fill(~earlier, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top.isfinite(), top, 0.0))
    whole = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(whole > 0, whole, 1.0)
    if seen.total == 1.0:
        return weights
    count = earlier.sum(-1, keepdim=True).to(weights.dtype)
    return weights * (count.sqrt() if seen.total is None else seen.total)


__all__ = ["Seen", "written"]
