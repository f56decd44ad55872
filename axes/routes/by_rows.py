"""A chain whose gates differ by row and by nothing else, in torch: the gates stand on the values, not on the keys.

    S_t = Diag(e^g_t) S_{t-1} + v_t k_t^T,   o_t = S_t q_t:   o_tr = sum_s <q_t, k_s> e^(g_{s+1,r} + .. + g_{t,r}) v_sr

Rows share keys and queries, so that a chunk has one matrix of their products, which meets the values between decays
(the first pass of gated slots). Nothing is as large as a state for every token. Legend: M chunks, C tokens, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axes.core.chain import Chain
from axes.routes import one_state

_CHUNK = 32


def takes(c: Chain) -> bool:
    """Whether the chain has this form."""
    plain = c.rows and c.slots == 1 and c.a is None and c.block is None and c.angle is None and c.dense is None
    gated = c.gate is not None and c.gate.shape[-1] == 1
    return plain and gated and c.key.shape[-1] > 1 and c.key.shape[-4:-3] == (1,)


def chunked(c: Chain, start: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """start (..., R, 1, 1, d_k), q (..., 1, T, d_k): o (..., R, T, 1) and the final state."""
    assert c.gate is not None
    gate, value = c.gate.squeeze(-1).mT.clamp_min(one_state.floor(c.gate.dtype)), c.value.squeeze(-1).mT
    key, query, first = c.key[..., 0, :, 0, :], q[..., 0, :, :], start[..., 0, 0, :]
    length = query.shape[-2]
    size = 1 << max(0, min(_CHUNK, length) - 1).bit_length()
    given = (gate, value, key, query)
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in given), first.shape[:-2])
    count = -(-length // size)

    def cut(x: Tensor) -> Tensor:
        """(*batch, M, C, n), with tokens at the end that do nothing."""
        x = torch.nn.functional.pad(x.expand(*batch, *x.shape[-2:]), (0, 0, 0, count * size - length))
        return x.unflatten(-2, (count, size))

    value, key, query = cut(value), cut(key), cut(query)
    decay = one_state.decays(cut(gate), value)
    inside = decay.mixed((query @ key.mT).tril(), value)
    entering = (value * decay.left).mT @ key
    kept = decay.kept[..., -1, :, None]
    state, states = first.expand(*batch, *first.shape[-2:]), []
    for whole, more in zip(kept.unbind(-3), entering.unbind(-3), strict=True):
        states.append(state)
        state = whole * state + more
    out = inside + decay.kept * (query @ torch.stack(states, -3).mT)
    return out.flatten(-3, -2)[..., :length, :].mT[..., None], state[..., None, None, :]


__all__ = ["chunked", "takes"]
