"""Chains with a gate for every row, by tensor cores: S_t = Diag(e^{g_t}) S_{t-1} + v_t k_t^T, o_t = S_t q_t.

    o_tr = sum_{s <= t} v_sr e^(G_tr - G_sr) (q_t . k_s)
Turned, the state is that of a chain with a gate for every key entry, whose keys are v and whose values are k. The form
sum_t a_t . o_t is that chain's too, read by a: so o is its gradient with respect to the queries where q is that of its
outputs (`kernels.rows` computes nothing else), and backwards, from do = a, its outputs are dq, and its other gradients
dv, dk and dg.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels import contain
from axes.kernels.common.layout import check_chain, contiguous, extent, layout, nothing_read, on_device
from axes.kernels.common.operators import Differentiable
from axes.kernels.diagonal import chain, kernels
from axes.kernels.diagonal.channels import exponents


def settings(v: Tensor, k: Tensor) -> dict[str, int]:
    """Block sides, warps and stages of the kernel that reads."""
    return {**chain.settings(v, k, "keys"), "num_warps": 4 if v.dtype == torch.float32 else 8}


def _turned(start: Tensor | None) -> Tensor | None:
    return None if start is None else start.mT.contiguous()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, start: Tensor | None, cu_seqlens: Tensor | None, average: bool,
    record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """o and the final state."""
    cut = layout(v.shape[0], v.shape[1], chain.chunk_length(v), cu_seqlens)
    o, chosen = torch.empty_like(v), settings(v, k)
    parts = chain._blocks(v, k, chosen)[0]
    with on_device(v):
        if chain._plain(v, k, cut):
            states, last, _ = chain.hopper_diagonal.states(v, v, k, g, None, _turned(start), average)
        else:
            first = _turned(start)
            states, last, _ = chain._pass_over(v, k, None, g, first, cut, reverse=False, average=average)
        kernels.rows[(cut.slots * v.shape[2] * parts,)](
            v, k, q, g, states, o, *chain._where(v, k, cut)[:-1], **_constants(v, k, cut, average),
            **exponents(v, g), **chosen,
        )  # fmt: skip
        final = last.mT.contiguous()
        if contain.PICKED:
            rule = "average" if average else "write"
            contain.contain(o, final, q, k, v, None, g, start, cut.offsets, cut.chunk, rule, by_rows=True)
    return o, final, []


def _constants(v: Tensor, k: Tensor, cut: Any, average: bool) -> dict[str, Any]:
    given = chain._constants(v, k, None, cut, average)
    return {n: x for n, x in given.items() if n != "STRONG"}


def _shapes(q, k, v, g, start, cu_seqlens, average, record):
    units, _ = extent(v.shape[0], v.shape[1], chain.chunk_length(v), cu_seqlens)
    return torch.empty_like(v), q.new_empty(units, *v.shape[2:], k.shape[3], dtype=torch.float32), []


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, start: Tensor | None, cu_seqlens: Tensor | None,
    average: bool, kept: list[Tensor], do: Tensor, dfinal: Tensor,
) -> list[Tensor]:  # fmt: skip
    first = _turned(start)
    dq, _, scores = chain._forward(do, v, k, g, None, first, None, cu_seqlens, average, True)
    last = dfinal.mT.contiguous()
    found = chain._backward(do, v, k, g, None, first, None, cu_seqlens, average, scores, q, last)
    _, dv, dk, dg, _, dstart, _ = found
    return [dq, dk, dv, dg, dstart.mT.contiguous()]


_chain = Differentiable("diagonal_rows", _forward, _backward, _shapes, gradients=5)


def rows_chain(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None, *,
    cu_seqlens: Tensor | None = None, average: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S_t = Diag(e^{g_t}) S_{t-1} + v_t k_t^T and o_t = S_t q_t, the exact recurrence; average: a row takes what it
    forgets, (1 - e^{g_t}) * v_t in the place of v_t.

    q, k (B, T, H, K) and v (B, T, H, V) in one dtype (bf16, fp16, fp32), K and V from 1 to 256; g (B, T, H, V) logs, at
    most 0, floored at -100; initial_state (U, H, V, K) or None for zero, U = B or the number of sequences that
    cu_seqlens packs in one batch entry. Returns o (B, T, H, V) in v's dtype and the last state (U, H, V, K) in float32.
    """
    who = "rows_chain"
    units = check_chain(who, q, k, v, cu_seqlens, initial_state, {"g": (g, v.shape[3:])})
    if q.shape[2] != v.shape[2]:
        raise ShapeError(f"{who}: q and k have the heads of v, {v.shape[2]}, not {q.shape[2]}")
    g = g if g.dtype in (torch.bfloat16, torch.float16) else g.float()
    start = None if initial_state is None else initial_state.float()
    if q.numel() == 0 or v.numel() == 0:
        return nothing_read(v, (units, *v.shape[2:], q.shape[3]), start)
    made: tuple[Tensor, Tensor] = _chain(*contiguous(q, k, v, g, start), cu_seqlens, average)
    return made
