"""softmax_i(scale q_t . k_i + mass_i) v_i over the pairs that a token sees, by the fused attention of torch.

Memory is linear in T: no scores are kept, no bias of T x T is made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from axes.kernels.common import versions
from axes.linalg.formulas import again, forward_mode

_BLOCK = 256  # queries that share a base of the masses, and a mask
WIDEST = 256  # of keys and values that a kernel reads again
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_HALF = (torch.bfloat16, torch.float16)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mass: Tensor | None = None,
    kernels: bool = False,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    stay: int = 0,
) -> Tensor:
    """q (..., T, d_k), keys (..., S, d_k), values (..., S, d_v), mass (..., S) in float64: (..., T, d_v).

    Token t sees the first S - T + t + 1 pairs, of these the last `window` and the first `stay`. Batch dimensions of the
    pairs broadcast to those of the queries: a last one of size 1 is a group of queries that reads the same pairs.
    kernels: ours, on a GPU, for masses and packed sequences, whose offsets are cu_seqlens.
    """
    batch = torch.broadcast_shapes(q.shape[:-2], keys.shape[:-2], () if mass is None else mass.shape[:-1])
    q = q.expand(*batch, *q.shape[-2:])
    shared = () if len(batch) < 2 or batch[-1] == 1 else (*batch[:-1], 1)
    pairs = keys.shape[:-2] if mass is None else torch.broadcast_shapes(keys.shape[:-2], mass.shape[:-1])
    grouped = pairs == shared and values.shape[:-2] == shared
    inner = shared if grouped else batch
    keys, values = (_four(x.to(q.dtype).expand(*inner, *x.shape[-2:]), grouped) for x in (keys, values))
    if mass is not None:
        mass = _four(mass.expand(*inner, mass.shape[-1])[..., None], grouped).squeeze(-1)
    four = _four(q, False, grouped)
    if kernels and (mass is not None or cu_seqlens is not None):
        out = _by_kernel(four, keys, values, scale, mass, cu_seqlens)
    elif window is not None and window < keys.shape[-2]:
        out = _by_blocks(four, keys, values, scale, mass, window, stay)
    elif mass is not None and q.shape[-2] == 1:
        out = _one(four, keys, values, scale, mass)
    elif mass is None:
        out = _fused(four, keys, values, scale)
    else:
        out = _by_blocks(four, keys, values, scale, mass)
    return out.reshape(*batch, *out.shape[-2:])


def _four(x: Tensor, shared: bool, grouped: bool = False) -> Tensor:
    """(batch, heads, tokens, width) of any batch dimensions; groups of queries are heads next to each other."""
    if shared:
        x = x.squeeze(-3) if x.ndim > 4 else x
    elif grouped and x.ndim > 4:
        x = x.flatten(-4, -3)
    return x.reshape(-1, *x.shape[-3:]) if x.ndim > 2 else x[None, None]


def _one(q: Tensor, keys: Tensor, values: Tensor, scale: float, mass: Tensor) -> Tensor:
    """One query a sequence; those of a group read their pairs together."""
    wide = torch.float32 if q.dtype in _HALF else q.dtype
    weight = (mass - mass[..., -1:]).to(wide)[..., None, :]
    together = q.unflatten(1, (keys.shape[1], -1))[..., 0, :].to(wide)
    p = torch.softmax(scale * (together @ keys.to(wide).mT) + weight, -1)
    return (p @ values.to(wide)).flatten(1, 2)[..., None, :].to(q.dtype)


def _by_kernel(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mass: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    from axes.kernels.attention.attend import attend
    from axes.kernels.attention.decode import attend_one

    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, keys, values, mass))
    one = q.shape[-2] == 1 and cu_seqlens is None and not recorded
    q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
    if one:
        return attend_one(q, keys, values, None if mass is None else mass - mass[..., -1:], scale).transpose(1, 2)
    mass = None if mass is None else mass.transpose(1, 2)
    return attend(q, keys, values, mass, scale=scale, cu_seqlens=cu_seqlens).transpose(1, 2)


def _fused(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, seen: Tensor | None = None, first: int = 0,
    window: int | None = None, stay: int = 0,
) -> Tensor:  # fmt: skip
    """Scores without a mass; seen says what first, window and stay do, the pairs of before, the last and the first.
    Equal and aligned widths, and heads that torch's forms without a T x T matrix take."""
    width = values.shape[-1]
    common = max(q.shape[-1], width)
    common += -common % 8 if q.is_cuda else 0
    q, keys, values = (pad(x, (0, common - x.shape[-1])) if x.shape[-1] < common else x for x in (q, keys, values))
    grouped = q.shape[1] != keys.shape[1]
    if grouped and not (q.is_cuda and q.dtype in _HALF):  # elsewhere groups are multiplied out
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        grouped = False
    with sdpa_kernel(SDPBackend.MATH) if forward_mode() else nullcontext():  # the fused ones have no derivative of it
        out = scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=grouped
        )
    if q.shape[-2] > 1 and may_mend(out):
        out = _mended(out, q, keys, values, scale, first, window, stay)
    return out[..., :width]


def may_mend(x: Tensor) -> bool:
    """Whether a kernel may look behind torch's: on a GPU, of plain tensors (compilers see an operator, lines of layers
    record its launch)."""
    if not x.is_cuda or type(x) is not Tensor or _transformed():
        return False
    return x.dtype in versions.DTYPES and x.shape[-1] <= WIDEST and versions.refusal(x.device) is None


def _mended(
    out: Tensor, q: Tensor, keys: Tensor, values: Tensor, scale: float, first: int, window: int | None, stay: int
) -> Tensor:
    """With what queries lost to values that they do not see and that are not finite (`kernels/attention/contain`), in
    place: torch's backward reads what is returned here. A compiler, which knows who else reads it, decides on that."""
    from axes.kernels import contain
    from axes.kernels.attention.contain import contain as read_again

    if contain.PICKED and out.numel():
        out = out.clone() if torch.compiler.is_compiling() else out
        lines = (x.detach() for x in (out, q, keys, values))
        o, q, keys, values = ((x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in lines)
        read_again(o, q, keys, values, None, None, None, scale, first, window, stay)
    return out


def _by_blocks(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mass: Tensor | None, window: int | None = None,
    stay: int = 0,
) -> Tensor:  # fmt: skip
    """Queries in blocks; what a block makes for itself is made again in the backward pass."""
    if q.dtype in _HALF and mass is not None:  # 16 bits do not hold a mass
        return _by_blocks(q.float(), keys.float(), values.float(), scale, mass, window, stay).to(q.dtype)
    length, outputs = q.shape[-2], []
    old = keys.shape[-2] - length
    for first in range(0, length, _BLOCK):
        end = min(first + _BLOCK, length)
        begin = 0 if window is None else max(0, old + first + 1 - window)
        begin = 0 if begin <= stay else begin - stay  # the first ones are set in front of those in the window
        seen = slice(begin, old + end)
        pairs = keys[..., seen, :], values[..., seen, :], None if mass is None else mass[..., seen]
        if begin and stay:
            pairs = (
                torch.cat((keys[..., :stay, :], pairs[0][..., stay:, :]), -2),
                torch.cat((values[..., :stay, :], pairs[1][..., stay:, :]), -2),
                None if mass is None else torch.cat((mass[..., :stay], mass[..., begin + stay : old + end]), -1),
            )
        read = partial(_block, q[..., first:end, :], *pairs, old + first - begin, window, stay, scale)
        outputs.append(again(read) if length > _BLOCK and torch.is_grad_enabled() else read())
    return torch.cat(outputs, -2)


def within(seen: Tensor, diagonal: int, stay: int) -> Tensor:
    """Of what is seen what is in the window, and the first pairs."""
    inside = seen.triu(diagonal)
    inside[..., :stay] = seen[..., :stay]
    return inside


def _block(
    q: Tensor, keys: Tensor, values: Tensor, mass: Tensor | None, first: int, window: int | None, stay: int,
    scale: float,
) -> Tensor:
    """The queries whose own pairs are those from `first` on. A mass is one more feature of a key, against a one of the
    query, and taken relative to the first own pair's: the masses that weigh anything are small numbers."""
    if mass is not None:
        relative = (mass - mass[..., first, None].detach()).clamp_min(-1e30)  # nothing is no number to multiply
        spare = (0, -(q.shape[-1] + 1) % 8)  # aligned rows
        q = pad(torch.cat((scale * q, torch.ones_like(q[..., :1])), -1), spare)
        keys, scale = pad(torch.cat((keys, relative[..., None].to(keys.dtype)), -1), spare), 1.0
    seen = None
    if first or window is not None:
        seen = torch.ones(q.shape[-2], keys.shape[-2], dtype=torch.bool, device=q.device).tril(first)
        seen = seen if window is None else within(seen, first + 1 - window, stay)
    return _fused(q, keys, values, scale, seen, first, window, stay)
