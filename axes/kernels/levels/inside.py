"""Levels inside of the chunks of a chain that erases, in Triton: what tokens read of their own chunk, weighed.

With P = (Q K^T) * D and M = (I + strict(A K^T * D))^-1, which are those of the delta rule, R = P M is what turns values
into outputs where a chunk begins empty. Levels weigh its entries: o = (R * w[bitlength(t xor s)]) v. Backwards
E = do v^T * w is the gradient of R: dP = E M^T, and what is inverted has -M^T (P^T E) M^T = -R^T dP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axes.kernels import contain
from axes.kernels.common.layout import on_device, precision
from axes.kernels.common.operators import Differentiable
from axes.kernels.levels import kernels
from axes.kernels.levels.chain import chunk_length, settings
from axes.kernels.levels.contain import contain as read_again
from axes.kernels.scalar.launches import Chain, matrices
from axes.kernels.scalar.sizes import cut


def _constants(q: Tensor, v: Tensor, w: Tensor, *names: str) -> dict[str, Any]:
    c = chunk_length(q.dtype)
    sizes = settings(q.dtype, q.shape[3], v.shape[3], "inside")
    given = dict(K=q.shape[3], V=v.shape[3], W=w.shape[-1], C=c, LOW=c.bit_length(), PRECISION=precision(q), **sizes)
    return {n: x for n, x in given.items() if n not in names}


def _forward(
    q: Tensor, k: Tensor, a: Tensor, v: Tensor, g: Tensor, w: Tensor, record: bool
) -> tuple[Tensor, list[Tensor]]:
    """Outputs in float32, and P, M and the logs of chunks."""
    made = cut(v.shape[0], v.shape[1], chunk_length(q.dtype), 1, None)
    x = Chain(q, k, v, None, g, a, False, torch.empty_like(g), None, made)
    o = torch.empty_like(v, dtype=torch.float32)
    with on_device(q):
        m, p = matrices(x)
        kernels.inside[(x.slot_heads,)](
            v, p, m, w, o, v.shape[1], made.N, v.shape[2], **_constants(q, v, w, "K", "BK")
        )  # fmt: skip
        if contain.PICKED:
            read_again(o, q, k, v, None, g, a, w, made.chunk, inside=True)
    assert x.runs is not None
    return o, [p, m, x.runs] if record else []


def _shapes(q: Tensor, k: Tensor, a: Tensor, v: Tensor, g: Tensor, w: Tensor, record: bool) -> Any:
    c = chunk_length(q.dtype)
    square = (v.shape[0] * -(-v.shape[1] // c), v.shape[2], c, c)
    kept = [q.new_empty(square), q.new_empty(square), torch.empty_like(g)]
    return torch.empty_like(v, dtype=torch.float32), kept if record else []


def _backward(
    q: Tensor, k: Tensor, a: Tensor, v: Tensor, g: Tensor, w: Tensor, kept: list[Tensor], do: Tensor
) -> list[Tensor]:
    (p, m, runs), (b, t, h, d_k), hv = kept, q.shape, v.shape[2]
    n = -(-t // chunk_length(q.dtype))
    wide = torch.float32 if hv > h else q.dtype
    dq, dk, da = (q.new_empty(b, t, hv, d_k, dtype=wide) for _ in range(3))
    dv, dw, dg = torch.empty_like(v), torch.zeros_like(w), torch.empty_like(g)
    with on_device(q):
        kernels.inside_gradients[(b * n * hv,)](
            q, k, a, v, p, m, w, runs, g, do, dq, dk, da, dv, dw, dg, t, n, h, hv, **_constants(q, v, w)
        )  # fmt: skip
    if hv > h:
        dq, dk, da = (x.unflatten(2, (h, -1)).sum(3).to(q.dtype) for x in (dq, dk, da))
    return [dq, dk, da, dv, dg, dw]


_inside = Differentiable("levels_inside", _forward, _backward, _shapes, gradients=6)


def levels_inside(q: Tensor, k: Tensor, a: Tensor, v: Tensor, g: Tensor | None, w: Tensor) -> Tensor:
    """Outputs (B, T, HV, V), in float32, of chunks of `chunk_length` tokens that begin empty, with
    S_t = e^{g_t} S_{t-1} (I - a_t k_t^T) + v_t k_t^T and levels weighed by w (B, T, HV, levels).

    q, k, a (B, T, H, K), v (B, T, HV, V), K and V from 1 to 128. All inputs receive gradients, once.
    """
    g = v.new_zeros(v.shape[:3], dtype=torch.float32) if g is None else g.float()
    tokens = (x.contiguous() for x in (q, k, a, v, g))
    (made,) = _inside(*tokens, w.float().contiguous())
    return made


__all__ = ["chunk_length", "levels_inside"]
