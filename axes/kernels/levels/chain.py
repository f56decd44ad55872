"""Levels of a chain that erases nothing, in Triton: log-linear attention over retention, Mamba-2 and kin.

    o_t = sum_{s <= t} w_t[bitlength(t xor s)] e^(G_t - G_s) (q_t . k_s) beta_s v_s

Inside a chunk of C tokens that is one product of matrices, its scores times the table of weights. Two chunks are in
sibling stretches of 2^j chunks at exactly one j: what a left sibling wrote, faded to its end, is one matrix M that all
tokens of its right sibling read, with the weight of level log2(C) + 1 + j:
    M = sum_s e^(G_end - G_s) k_s (beta v)_s^T,      o_t += w_t e^(G_t - G_end) M^T q_t
and backwards, with the matrix of what its right sibling hears:
    dM = sum_t w_t e^(G_t - G_end) q_t do_t^T,       dq_t += w_t e^(..) M do_t,   dk_s += e^(..) dM (beta v)_s,
    d(beta v)_s += e^(..) dM^T k_s,   dw_t = e^(..) q_t . M do_t,   dg_t = sum_{i >= t} (q . dq - k . dk)_i
There are N - 1 such pairs of N chunks, and half of the tokens for every j are in left siblings: so all M and all dM are
each one launch without an order, the outputs one and the gradients two, a chunk a program, and nothing is serial but
the longest stretch. Logs between chunks are float64 sums; matrices between chunks have the tokens' dtype, sums are
float32, no atomics, one order. Levels that the last token leaves are sums of stretches as well, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axes.kernels import contain
from axes.kernels.common.layout import on_device, precision
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.levels import kernels
from axes.kernels.levels.contain import contain as read_again
from axes.kernels.scalar import write

WIDEST = 128


def chunk_length(dtype: torch.dtype) -> int:
    """Tokens of a chunk."""
    return 32 if dtype == torch.float32 else 64


def settings(dtype: torch.dtype, d_k: int, d_v: int, kernel: str) -> dict[str, int]:
    """Block sides, warps and stages of a kernel."""
    full = dtype == torch.float32
    least = 16 if full else 64
    keys, values = (max(least, power_of_2(d)) for d in (d_k, d_v))
    if kernel == "sums":
        return {"BK": min(keys, 64), "BV": min(values, 32 if full else 128), "num_warps": 4, "num_stages": 1}
    return {"BK": keys, "BV": min(values, 32 if full else 64), "num_warps": 8, "num_stages": 1}


class _Sizes:
    """What every launch is given of sizes."""

    def __init__(self, q: Tensor, v: Tensor, w: Tensor, strong: bool) -> None:
        self.units, self.T, self.H, self.K = q.shape
        self.HV, self.V, self.W, self.C = v.shape[2], v.shape[3], w.shape[-1], chunk_length(q.dtype)
        self.N = cdiv(self.T, self.C)
        self.numbers = (self.T, self.N, (self.N - 1).bit_length(), self.units, self.H, self.HV)
        self.constants = dict(K=self.K, V=self.V, W=self.W, C=self.C, LOW=self.C.bit_length(), STRONG=strong,
                              PRECISION=precision(q))  # fmt: skip

    def launch(self, kernel: Any, name: str, programs: int, *tensors: Tensor, parts: str = "", **more: Any) -> None:
        """parts: of which widths a program has a block."""
        chosen = settings(tensors[0].dtype, self.K, self.V, name)
        for side, width in (("K", self.K), ("V", self.V)):
            programs *= cdiv(width, chosen["B" + side]) if side in parts else 1
        if programs:
            kernel[(programs,)](*tensors, *self.numbers, **self.constants, **more, **chosen)


def _logs(g: Tensor, s: _Sizes) -> tuple[Tensor, Tensor]:
    """Logs to the base 2 of gates so far: of a chunk (tokens, HV), and of all chunks before (units, N + 1, HV)."""
    runs = torch.empty_like(g)
    write.cumulate[(s.units * s.N * s.HV,)](g, runs, g, g, s.T, 1, s.T, s.N, s.HV, C=s.C, PACKED=False)
    last = runs[:, s.C - 1 :: s.C]
    if s.T % s.C:
        last = torch.cat((last, runs[:, -1:]), 1)
    return runs, torch.nn.functional.pad(last.double().cumsum(1), (0, 0, 1, 0))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor, w: Tensor, record: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o, the levels that the last token leaves, and what left siblings wrote with logs."""
    s, by = _Sizes(q, v, w, beta is not None), g if beta is None else beta
    o, heads = torch.empty_like(v), s.units * s.HV
    left = q.new_empty(s.units, s.HV, s.N - 1, s.K, s.V)
    last = q.new_empty(s.units, s.HV, s.W, s.V, s.K, dtype=torch.float32)
    with on_device(q):
        runs, edges = _logs(g, s)
        s.launch(kernels.sums, "sums", heads * (s.N - 1), k, v, by, runs, edges, left, parts="KV", OF="left")
        s.launch(kernels.sums, "sums", heads * s.W, k, v, by, runs, edges, last, parts="KV", OF="last")
        s.launch(kernels.outputs, "outputs", heads * s.N, q, k, v, by, w, runs, edges, left, o, parts="V")
        if contain.PICKED:
            read_again(o, q, k, v, beta, g, None, w, s.C, inside=False)
    return o, last, [left, runs, edges] if record else []


def _shapes(q: Tensor, k: Tensor, v: Tensor, beta: Any, g: Tensor, w: Tensor, record: bool) -> Any:
    (b, t, _, d_k), (hv, d_v), c = q.shape, v.shape[2:], chunk_length(q.dtype)
    last = q.new_empty(b, hv, w.shape[-1], d_v, d_k, dtype=torch.float32)
    n = cdiv(t, c)
    kept = [
        q.new_empty(b, hv, n - 1, d_k, d_v), torch.empty_like(g), q.new_empty(b, n + 1, hv, dtype=torch.float64)
    ]  # fmt: skip
    return torch.empty_like(v), last, kept if record else []


def _backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor, w: Tensor, kept: list[Tensor],
    do: Tensor | None, dlast: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    left, runs, edges = kept
    s, by = _Sizes(q, v, w, beta is not None), g if beta is None else beta
    heads, do = s.units * s.HV, torch.zeros_like(v) if do is None else do
    right, dw, dlog = torch.empty_like(left), torch.zeros_like(w), torch.empty_like(g)
    dtype = torch.float32 if s.HV > s.H or dlast is not None else q.dtype
    dq, dk = (q.new_empty(s.units, s.T, s.HV, s.K, dtype=dtype) for _ in range(2))
    dv = torch.empty_like(v)
    parts = cdiv(s.V, settings(q.dtype, s.K, s.V, "values")["BV"])
    dbeta = g.new_empty((parts, *g.shape) if beta is not None else (1, 0))
    with on_device(q):
        s.launch(kernels.sums, "sums", heads * (s.N - 1), q, do, w, runs, edges, right, parts="KV", OF="right")
        given = (q, k, v, by, w, runs, edges)
        s.launch(kernels.gradients_of_keys, "keys", heads * s.N, *given, left, right, do, dq, dk, dw, dlog)
        s.launch(kernels.gradients_of_values, "values", heads * s.N, *given, right, do, dv, dbeta, parts="V")
    dbeta = dbeta[0] if parts == 1 else dbeta.sum(0)
    if dlast is not None:
        dv = _of_last(k, v, beta, runs, edges, dlast, dk, dbeta, dlog, dv.float(), s).to(v.dtype)
    dg = torch.where(g > -100.0, dlog.flip(1).cumsum(1).flip(1), 0.0)
    if s.HV > s.H:
        dq, dk = (x.unflatten(2, (s.H, -1)).sum(3) for x in (dq, dk))
    return [dq.to(q.dtype), dk.to(k.dtype), dv, dbeta, dg, dw]


def _of_last(
    k: Tensor, v: Tensor, beta: Tensor | None, runs: Tensor, edges: Tensor, dlast: Tensor,
    dk: Tensor, dbeta: Tensor, dlog: Tensor, dv: Tensor, s: _Sizes,
) -> Tensor:  # fmt: skip
    """What the levels of the last token add to the gradients, which are added to; dv is returned. In torch: few ask."""
    token = s.T - 1
    for level in range(min(s.W, token.bit_length() + 1)):
        if level and not token >> (level - 1) & 1:
            continue
        begin = token if level == 0 else token >> level << level
        some = slice(begin, begin + (1 << level - 1 if level else 1))
        keys = k[:, some].float().repeat_interleave(s.HV // s.H, 2)
        values = v[:, some].float() if beta is None else v[:, some] * beta[:, some, :, None]
        chunk = torch.arange(some.start, some.stop, device=v.device) // s.C
        log = (edges[:, -1:] - edges[:, chunk]).float() - runs[:, some]
        factor, state = torch.exp2(log)[..., None], dlast[:, :, level]
        more = factor * torch.einsum("bthv,bhvk->bthk", values, state)
        written = factor * torch.einsum("bthk,bhvk->bthv", keys, state)
        dk[:, some] += more
        dots = (more * keys).sum(-1)
        dlog[:, some] -= dots
        dlog[:, -1] += dots.sum(1)
        if beta is not None:
            dbeta[:, some] += (v[:, some] * written).sum(-1)
            written = written * beta[:, some, :, None]
        dv[:, some] += written
    return dv


_chain = Differentiable("levels_write", _forward, _backward, _shapes, gradients=6, missing=True)


def levels_chain(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, w: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs (B, T, HV, V) and the levels after the last token (B, HV, levels, V, K) in float32.

    q, k (B, T, H, K), v (B, T, HV, V) in one of bf16, fp16, fp32, HV a multiple of H, K and V from 1 to 128; beta, g
    (B, T, HV) strengths and logs of gates, at most 0, or None; w (B, T, HV, levels): what a token has for each level.
    The tokens are no more than the levels tell apart, 2^(levels - 1). All inputs receive gradients, once.
    """
    g = v.new_zeros(v.shape[:3], dtype=torch.float32) if g is None else g.float()
    beta = None if beta is None else beta.float().contiguous()
    made: tuple[Tensor, Tensor] = _chain(
        q.contiguous(), k.contiguous(), v.contiguous(), beta, g.contiguous(), w.float().contiguous()
    )
    return made
