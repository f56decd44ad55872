"""Attention whose stored keys are carried through I + a_t b_t^T at every token (PaTH), block by block.

Inside a block of C tokens the maps have the form A_1 ... A_t = I + sum_{s,u<=t} a_u M_us b_s^T with the unit
triangular M = (I - N)^-1, N_us = b_u . a_s for u < s. A key is carried to its block's end once, a query from its
block's start once; in between stand whole blocks, d_k x d_k maps H, through which a block of queries passes on its way
to older and older keys. Products of C x d_k by d_k x d_k take the place of a solve of T x T.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from axes.linalg.formulas import again
from axes.routes.attention.room import beside
from axes.routes.attention.softmax import within

_BLOCK = 128


def attend(
    q: Tensor, keys: Tensor, values: Tensor, a: Tensor, b: Tensor, scale: float, mass: Tensor | None,
    kernels: bool = False, window: int | None = None, stay: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs (..., T, d_v) and all keys (..., S, d_k) after the last token, in the dtype of a.

    A block of queries keeps its scores, C x S; with gradients they are computed again in the backward pass.
    kernels: ours, on a GPU, for (batch, head, T, d) and no earlier pairs.  window: how many pairs a query sees, and the
    first ones that `stay`.
    """
    if kernels:
        return _by_kernels(q, keys, values, a, b, scale, mass)
    q, keys, values = (x.to(a.dtype) for x in (q, keys, values))
    length = q.shape[-2]
    stored, new = keys[..., : keys.shape[-2] - length, :], keys[..., keys.shape[-2] - length :, :]
    old = stored.shape[-2]
    if length == 1:  # its map carries the stored keys themselves: they are owed that anyway, and the query needs none
        stored = stored + stored @ a.mT @ b
        keys = torch.cat((stored, new.expand(*stored.shape[:-2], *new.shape[-2:])), -2)
        weight = None if mass is None else mass - mass[..., -1:].detach()
        return _read(q, q @ keys.mT, scale, weight, window, stay, 0, keys[..., :0, :], values), keys
    size = min(_BLOCK, length)
    k, q, a, b = (_cut(x, size) for x in (new, q, a, b))
    picked, solved = _picked(k, a, b)
    sees = (q @ b.mT).tril()
    inside = q @ k.mT + sees @ picked.mT
    begun = q + sees @ solved.mT @ a
    carried = k + picked @ b
    whole = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device) + a.mT @ solved @ b

    maps, blocks = whole.unbind(-3), carried.unbind(-3)
    outputs = []
    for n, (own, queries) in enumerate(zip(inside.unbind(-3), begun.unbind(-3), strict=True)):
        end = min((n + 1) * size, length)
        rows = slice(0, end - n * size)
        held = (*blocks[:n], *maps[:n], stored, values[..., : old + end, :])
        weight = None if mass is None else mass[..., : old + end] - mass[..., old + n * size, None].detach()
        read = partial(_read, queries[..., rows, :], own[..., rows, rows], scale, weight, window, stay, n, *held)
        outputs.append(again(read) if torch.is_grad_enabled() else read())
    if len(blocks) == 1 and 2 * size < q.shape[-1]:
        stored = stored + stored @ (a.mT @ solved)[..., 0, :, :] @ b[..., 0, :, :]
        return torch.cat(outputs, -2), torch.cat((stored, blocks[0][..., :length, :]), -2)
    return torch.cat(outputs, -2), torch.cat(_carry_on(stored, blocks, maps, length), -2)


def _by_kernels(
    q: Tensor, keys: Tensor, values: Tensor, a: Tensor, b: Tensor, scale: float, mass: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keys that several heads of queries read are carried for each."""
    from axes.kernels.attention.transport import transport

    batch, own = torch.broadcast_shapes(q.shape[:-2], keys.shape[:-2]), keys.shape[:-2]
    q, k, v, a, b = (x.to(values.dtype).expand(*batch, *x.shape[-2:]).transpose(1, 2) for x in (q, keys, values, a, b))
    mass = None if mass is None else mass.expand(*batch, mass.shape[-1]).transpose(1, 2)
    out, last = transport(q, k, v, a, b, mass, scale=scale)
    return out.transpose(1, 2), last.transpose(1, 2)[: own[0], : own[1]]


def one(
    q: Tensor, old: Tensor, k: Tensor, values: Tensor, a: Tensor, b: Tensor, scale: float, mass: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`attend` of one token by our kernel: old keys (..., n, d_k) are read once, and written where they stand next."""
    from axes.kernels.attention.decode_carried import carry_one

    recorded = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, old, k, values, a, b, mass)
    )
    plain = not recorded and not torch.compiler.is_compiling() and type(old) is Tensor
    mass = None if mass is None else mass - mass[..., -1:]
    return carry_one(q, old, k, values, a, b, mass, scale=scale, into=beside(old, 1) if plain else None)


def last_keys(keys: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """All keys (..., S, d_k) after the last of T tokens."""
    length = a.shape[-2]
    stored, new = keys[..., : keys.shape[-2] - length, :].to(a.dtype), keys[..., keys.shape[-2] - length :, :]
    size = min(_BLOCK, length)
    k, a, b = (_cut(x, size) for x in (new.to(a.dtype), a, b))
    picked, solved = _picked(k, a, b)
    whole = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) + a.mT @ solved @ b
    return torch.cat(_carry_on(stored, (k + picked @ b).unbind(-3), whole.unbind(-3), length), -2)


def _cut(x: Tensor, size: int) -> Tensor:
    """(..., N, C, d), padded with tokens that do nothing."""
    return pad(x, (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size))


def _picked(k: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """p_is: how much of b_s key i has picked up after its block, k_i A_{i+1} ... A_C = k_i + sum_s p_is b_s; and M."""
    identity = torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)
    system = identity - (b @ a.mT).triu(1)
    solved = torch.linalg.solve_triangular(system, identity.expand_as(system), upper=True, unitriangular=True)
    return (k @ a.mT).triu(1) @ solved, solved


def _read(
    queries: Tensor, own: Tensor, scale: float, weight: Tensor | None, window: int | None, stay: int, before: int,
    *held: Tensor,
) -> Tensor:  # fmt: skip
    """One block of queries. own: scores of its own block; held: older blocks' keys, their maps, stored keys, values."""
    blocks, maps, (stored, values) = held[:before], held[before : 2 * before], held[2 * before :]
    scores = [own]
    for k, through in zip(reversed(blocks), reversed(maps), strict=True):
        scores.append(queries @ k.mT)
        queries = queries @ through.mT
    if stored.shape[-2]:
        scores.append(queries @ stored.mT)
    every = scale * torch.cat(scores[::-1], -1)
    if weight is not None:
        every = every + weight.to(every.dtype)[..., None, :]
    rows, pairs = every.shape[-2:]
    seen = torch.ones(rows, pairs, dtype=torch.bool, device=every.device).tril(pairs - rows)
    seen = seen if window is None else within(seen, pairs - rows + 1 - window, stay)
    every = every.masked_fill(~seen, -torch.inf)
    return torch.softmax(every, -1) @ values


def _carry_on(stored: Tensor, blocks: Sequence[Tensor], maps: Sequence[Tensor], length: int) -> list[Tensor]:
    """Keys at their blocks' ends, through all later blocks."""
    later: Tensor | None = None
    last = []
    for k, through in zip(reversed(blocks), reversed(maps), strict=True):
        last.append(k if later is None else k @ later)
        later = through if later is None else through @ later
    assert later is not None
    last[0] = last[0][..., : length - (len(blocks) - 1) * last[0].shape[-2], :]
    return [stored @ later, *reversed(last)]
