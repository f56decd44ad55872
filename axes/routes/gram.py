"""Exact chunk forms of normalised slots in the space of their inner products (Lattice Sim, Enc and Dec).

The gates of a slot need the state only through inner products with the chunk's values, so the token loop runs on
(C, d_k) numbers and the width d_v appears in matrix products alone. A forget gate mu only rescales the step: with the
renormalisation, (mu, gamma) is the same update as (1, gamma / mu).
"""

from __future__ import annotations

import torch
from torch import Tensor


def sim(
    start: Tensor, k: Tensor, v: Tensor, q: Tensor, step: Tensor, encode: bool = False
) -> tuple[Tensor, Tensor]:
    """Alignment cost. start (..., d_v, d_k) with unit columns, k, q (..., C, d_k), v (..., C, d_v), step (..., C).

    s_{t,i} = A_{t,i} s_{0,i} + sum_tau B_{t,tau,i} v_tau. Returns o (..., C, d_v) and the last state.
    encode: squared error of the encoded value. It turns slot i by k_i - <s_i, v> where alignment turns it by k_i, and
    that inner product is what a gate needs anyway.
    """
    size = k.shape[-2]
    overlap, gram = v @ start, v @ v.mT  # (..., C, d_k), (..., C, C)
    kept, written = torch.ones_like(overlap[..., 0, :]), overlap[..., :0, :]
    rows_kept, rows_read = [], []
    for t in range(size):
        p = kept * overlap[..., t, :]
        if t:
            p = p + (gram[..., t, None, :t] @ written)[..., 0, :]
        key = k[..., t, :]
        turn = step[..., t, None] * (key - p if encode else key)
        norm = torch.rsqrt(1 + turn * turn * (gram[..., t, t, None] - p * p).clamp_min(0))
        a, b = norm * (1 - turn * p), norm * turn
        kept = a * kept
        written = torch.cat((written * a[..., None, :], b[..., None, :]), -2)
        rows_kept.append(kept)
        mixed = written @ q[..., t, :, None]
        rows_read.append(torch.nn.functional.pad(mixed[..., 0], (0, size - 1 - t)))
    out = (torch.stack(rows_kept, -2) * q) @ start.mT + torch.stack(rows_read, -2) @ v
    return out, _unit(start * kept[..., None, :] + v.mT @ written)


def dec(start: Tensor, k: Tensor, v: Tensor, q: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of the decoded key, shapes as `sim`: carries the slots' Gram matrix M and S_t = S_0 U + V^T B."""
    size, d_k = k.shape[-2:]
    batch = start.shape[:-2]
    gram = v @ v.mT
    slots, values = start.mT @ start, start.mT @ v.mT  # M (..., d_k, d_k), X (..., d_k, C)
    basis = torch.eye(d_k, dtype=k.dtype, device=k.device).expand(*batch, d_k, d_k)
    written = torch.zeros(*batch, size, d_k, dtype=k.dtype, device=k.device)
    place = torch.eye(size, dtype=k.dtype, device=k.device)
    reads_start, reads_values = [], []
    for t in range(size):
        key, rate, x = k[..., t, :], step[..., t, None], values[..., t]
        gate = 1 + rate * key * ((slots @ key[..., None])[..., 0] - x)
        y = rate * (gate * x - rate * key * (key * x).sum(-1, keepdim=True))

        def turn(z: Tensor, key: Tensor = key, rate: Tensor = rate, gate: Tensor = gate) -> Tensor:
            """z R with R = Diag(gate) - rate k k^T."""
            return z * gate[..., None, :] - (z @ key[..., None]) * (rate * key)[..., None, :]

        basis = turn(basis)
        written = turn(written) + place[t][:, None] * (rate * key)[..., None, :]
        values = turn(values.mT).mT + (rate * key)[..., :, None] * gram[..., t, None, :]
        slots = turn(turn(slots).mT).mT
        slots = slots + y[..., :, None] * key[..., None, :] + key[..., :, None] * y[..., None, :]
        slots = slots + (rate * rate * gram[..., t, t, None])[..., None] * key[..., :, None] * key[..., None, :]
        inverse = torch.rsqrt(slots.diagonal(dim1=-2, dim2=-1))
        basis, written = basis * inverse[..., None, :], written * inverse[..., None, :]
        values, slots = values * inverse[..., :, None], slots * inverse[..., :, None] * inverse[..., None, :]
        reads_start.append((basis @ q[..., t, :, None])[..., 0])
        reads_values.append((written @ q[..., t, :, None])[..., 0])
    out = torch.stack(reads_start, -2) @ start.mT + torch.stack(reads_values, -2) @ v
    return out, _unit(start @ basis + v.mT @ written)


def _unit(state: Tensor) -> Tensor:
    """True norms, not accumulated ones: rounding must not drift (lattice.md L36)."""
    return state * torch.rsqrt((state * state).sum(-2, keepdim=True))
