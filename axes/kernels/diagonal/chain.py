"""Chains with one decay a channel in Triton, exact chunk by chunk: S_t = S_{t-1} Diag(e^{g_t}) + beta_t v_t k_t^T.

In a chunk of C tokens with first state S, cumulative log gates G (C, K) and u = beta v:
    P_ij = sum_c q_ic k_jc e^(G_ic - G_jc), i >= j        o = (q e^G) S^T + P u
    S' = S Diag(e^G_last) + u^T (k e^(G_last - G))
and backwards, from do and dS':
    dS = dS' Diag(e^G_last) + do^T (q e^G)                du = (k e^(G_last - G)) dS'^T + P^T do
    dP = lower(do u^T)                                    dq = e^G (do S) + dq of P
    m = e^(G_last - G) (u dS')                            dk = m + dk of P
    dg_t = sum_{i >= t} (q dq - k dk of P)_i + sum_{i < t} (k m)_i + e^G_last sum_v S dS'
Averaged, k is k (1 - e^g), from which dk and one more term of dg follow: dk (1 - e^g), -dk k e^g.
With a bonus, tokens are read before their own gate and write: q e^(G - g) in the place of q e^G, P_ij with
e^(G_i - g_i - G_j) where i > j, P_ii = sum_c bonus_c q_ic k_ic; backwards dg_t has q dq of i > t only.
Forward: one kernel serial in time leaves the state before every chunk, one over all chunks reads it (P, o).
Backward: the states again, the same pass over reversed time (dS'), one kernel over all chunks for dv, one for the rest.
On Hopper, for plain shapes, the serial kernels are those of `hopper_diagonal`, which make o and dv on the way, and the
mild chunks' dq, dk, dg those of `hopper_diagonal_keys`.
A chunk in which no channel decays by more than e^-MILD takes r = q e^G and w = k e^-G, P = lower(r w^T): two
exponentials for a number; the others (DEEP) take channels.pairs, exact for any gates, in launches of their own.
The channels of a state do not mix, so that serial passes split keys: every exponential is taken once.
Sums are in float32; products of float32 inputs have IEEE's error; no atomics, no division, one order.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels import contain
from axes.kernels.common.layout import (
    Layout,
    check_chain,
    check_like,
    contiguous,
    extent,
    layout,
    nothing_read,
    on_device,
)
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.common.versions import gluon_refusal
from axes.kernels.diagonal import kernels
from axes.kernels.diagonal.channels import exponents, sums
from axes.kernels.scalar import sizes

if _GLUON := gluon_refusal() is None:  # on an unknown Triton these modules raise, and the portable kernels run
    from axes.kernels.diagonal import hopper as hopper_diagonal
    from axes.kernels.diagonal import hopper_keys as hopper_diagonal_keys
    from axes.kernels.scalar import hopper_write

# ---- launches --------------------------------------------------------------------------------------------------------


def _side(width: int, least: int, most: int) -> int:
    return max(least, min(most, power_of_2(width)))


def chunk_length(q: Tensor) -> int:
    """Tokens of a chunk."""
    return sizes.chunk_length(q.dtype, q.shape[3])


def settings(q: Tensor, v: Tensor, kernel: str) -> dict[str, int]:
    """Block sides, warps and stages of a kernel: the only ones that were tested. 16 bit: no tile below 64."""
    d_k, d_v = q.shape[-1], v.shape[-1]
    if q.dtype == torch.float32:
        values = 16 if kernel == "keys" and sizes.form(q.dtype, d_k) == "pieces" else 32
        return {"BK": _side(d_k, 16, 32), "BV": _side(d_v, 16, values), "num_warps": 4, "num_stages": 1}
    d_v = 64 if kernel == "keys" else _side(d_v, 64, 128)
    return {"BK": 64, "BV": d_v, "num_warps": 4, "num_stages": 3 if kernel == "pass" else 1}


def mild(q: Tensor) -> float:
    """Largest decay of a chunk, as a log, whose inverse scales an operand of a product; -1: no chunk is mild.

    float16 has few exponents; float32 saves too little for kernels of its own.
    """
    return {torch.float16: 6.0, torch.float32: -1.0}.get(q.dtype, 60.0)


def group(programs: int) -> int:
    """Programs that one of few looks after, where all chunks may be mild and nothing is to be done."""
    return 16 if programs >= 2048 else 1


def _blocks(q: Tensor, v: Tensor, chosen: dict[str, int]) -> tuple[int, int]:
    return cdiv(q.shape[-1], chosen["BK"]), cdiv(v.shape[-1], chosen["BV"])


def _pass_over(
    x: Tensor, y: Tensor, beta: Tensor | None, g: Tensor, start: Tensor | None, cut: Layout, *, reverse: bool,
    early: bool = False, average: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """States of chunks (slots, HV, V, K) in the tokens' dtype, the last (units, HV, V, K), totals (slots, HV, K).

    early: of reverse passes, whether x reads before its own gate.
    """
    h, hv, d_k, d_v = x.shape[2], y.shape[2], x.shape[3], y.shape[3]
    states = x.new_empty(cut.slots, hv, d_v, d_k)
    last = x.new_empty(cut.units, hv, d_v, d_k, dtype=torch.float32)
    totals = last if reverse else x.new_empty(cut.slots, hv, d_k, dtype=torch.float32)
    chosen = settings(x, y, "pass")
    k_parts, v_parts = _blocks(x, y, chosen)
    kernels.scan[(cut.units * hv * k_parts * v_parts,)](
        x, y, g if beta is None else beta, g, states, totals, last if start is None else start, last,
        x if cut.offsets is None else cut.offsets, cut.length, cut.chunks, h, hv,
        REVERSE=reverse, STARTED=start is not None, BONUS=early, PARTS=exponents(x, g)["PARTS"],
        **_constants(x, y, beta, cut, average), **chosen,
    )  # fmt: skip
    return states, last, totals


def _constants(q: Tensor, v: Tensor, beta: Tensor | None, cut: Layout, average: bool = False) -> dict[str, Any]:
    dot = sizes.products(q.dtype, q.shape[3])
    widths, kinds = dict(K=q.shape[3], V=v.shape[3], C=cut.chunk), dict(STRONG=beta is not None, AVERAGE=average)
    return dict(**widths, **kinds, PACKED=cut.packed, PRECISION=dot)


def _where(q: Tensor, v: Tensor, cut: Layout) -> tuple[Any, ...]:
    """The last arguments of every kernel over chunks: which tokens a slot holds."""
    if cut.offsets is None or cut.units_of_slots is None:
        return q, q, cut.length, cut.chunks, q.shape[2], v.shape[2]
    return cut.offsets, cut.units_of_slots, cut.length, cut.chunks, q.shape[2], v.shape[2]


def _twice(
    kernel: Any, name: str, tensors: tuple[Tensor, ...], programs: int,
    q: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, cut: Layout, average: bool, shallow: bool = True, **more: int,
) -> None:  # fmt: skip
    """A kernel over chunks for the mild ones, where that is another kernel and they are not done, and for the rest."""
    limit = mild(q)
    for deep in (False, True) if limit > 0 and shallow else (True,):
        members = group(programs) if deep and limit > 0 else 1
        kernel[(cdiv(programs, members),)](
            *tensors, *_where(q, v, cut), programs, **_constants(q, v, beta, cut, average), **exponents(q, g),
            MILD=limit, DEEP=deep, GROUP=members, **more, **settings(q, v, name),
        )  # fmt: skip


def _plain(q: Tensor, v: Tensor, cut: Layout) -> bool:
    """Whether the serial passes are those of `hopper_diagonal`."""
    return not cut.packed and _GLUON and hopper_write.fits(q, v)


def _values_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scores: Tensor, do: Tensor, dstates: Tensor,
    cut: Layout, average: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dv and dbeta from the gradients of states."""
    chosen = settings(q, v, "values")
    parts = _blocks(q, v, chosen)[1]
    dv = torch.empty_like(v)
    dbeta = g.new_empty((parts, *v.shape[:3]) if beta is not None else (1, 0), dtype=torch.float32)
    kernels.values[(cut.slots * v.shape[2] * parts,)](
        k, v, g if beta is None else beta, g, scores, do, dstates, dv, dbeta, v.shape[0] * v.shape[1],
        *_where(q, v, cut), **_constants(q, v, beta, cut, average), PARTS=exponents(q, g)["PARTS"], **chosen,
    )  # fmt: skip
    return dv, dbeta[0] if parts == 1 else dbeta.sum(0)


# ---- operator --------------------------------------------------------------------------------------------------------


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, start: Tensor | None, bonus: Tensor | None,
    cu_seqlens: Tensor | None, average: bool, record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """o, final, and P of every chunk."""
    cut = layout(q.shape[0], q.shape[1], chunk_length(q), cu_seqlens)
    programs, strength = cut.slots * v.shape[2], g if beta is None else beta
    with on_device(q):
        plain = _plain(q, v, cut)
        if plain:
            o, final, scores, totals = hopper_diagonal.forward(q, k, v, g, beta, start, mild(q), record, bonus, average)
            states = o
        else:
            states, final, totals = _pass_over(k, v, beta, g, start, cut, reverse=False, average=average)
            o, scores = torch.empty_like(v), q.new_empty(cut.slots * record, v.shape[2], cut.chunk, cut.chunk)
        blocks = _blocks(q, v, settings(q, v, "outputs"))[1]
        tensors = (q, k, v, strength, g if bonus is None else bonus, g, totals, states, scores, o)
        more = dict(shallow=not plain, KEEP=record, ADD=plain, BONUS=bonus is not None)
        _twice(kernels.outputs, "outputs", tensors, programs * blocks, q, v, g, beta, cut, average, **more)
        if contain.PICKED:
            rule = "average" if average else "write"
            contain.contain(o, final, q, k, v, beta, g, start, cut.offsets, cut.chunk, rule, bonus=bonus)
    return o, final, [scores] if record else []


def _shapes(q, k, v, g, beta, start, bonus, cu_seqlens, average, record):
    c, (hv, d_v) = chunk_length(q), v.shape[2:]
    units, slots = extent(q.shape[0], q.shape[1], c, cu_seqlens)
    final = q.new_empty(units, hv, d_v, q.shape[3], dtype=torch.float32)
    return torch.empty_like(v), final, [q.new_empty(slots, hv, c, c)] if record else []


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, start: Tensor | None, bonus: Tensor | None,
    cu_seqlens: Tensor | None, average: bool, kept: list[Tensor], do: Tensor, dfinal: Tensor,
) -> list[Tensor]:  # fmt: skip
    (scores,) = kept
    cut = layout(q.shape[0], q.shape[1], chunk_length(q), cu_seqlens)
    (b, t, h, d_k), hv = q.shape, v.shape[2]
    programs, strength = cut.slots * hv, g if beta is None else beta
    with on_device(q):
        plain = _plain(q, v, cut)
        dg = torch.empty_like(g)
        dbonus = None  # a chunk's share; the slots of packed sequences are more than there are chunks
        if bonus is not None:
            dbonus = (g.new_zeros if cut.packed else g.new_empty)(cut.slots, hv, d_k, dtype=torch.float32)
        if plain:
            states, _, totals = hopper_diagonal.states(q, k, v, g, beta, start, average)
        else:
            states, _, totals = _pass_over(k, v, beta, g, start, cut, reverse=False, average=average)
        if plain and beta is None:
            dv, dstates, dstart = hopper_diagonal.values_backward(
                q, k, g, do, dfinal, scores, totals, bonus, average
            )
            dbeta = g.new_empty(0, dtype=torch.float32)
        else:
            dstates, dstart, _ = _pass_over(q, do, None, g, dfinal, cut, reverse=True, early=bonus is not None)
            dv, dbeta = _values_backward(q, k, v, g, beta, scores, do, dstates, cut, average)
        # a value head's share of a shared query's gradient: float32, added below
        dq, dk = (q.new_empty(b, t, hv, d_k, dtype=torch.float32 if hv > h else q.dtype) for _ in range(2))
        blocks = _blocks(q, v, settings(q, v, "keys"))[0]
        own, down = (g if x is None else x for x in (bonus, dbonus))
        tensors = (q, k, v, strength, own, g, totals, do, states, dstates, dq, dk, dg, down)
        plain = plain and beta is None and hv == h
        if plain:
            hopper_diagonal_keys.keys_backward(
                q, k, v, g, totals, do, states, dstates, dq, dk, dg, mild(q), bonus, dbonus, average
            )
        more, parts = dict(shallow=not plain, BONUS=bonus is not None), exponents(q, g)["PARTS"]
        _twice(kernels.keys, "keys", tensors, programs * blocks, q, v, g, beta, cut, average, SUMS=sums(parts), **more)
        if hv > h:
            dq, dk = (x.view(b, t, h, hv // h, d_k).sum(3).to(q.dtype) for x in (dq, dk))
    return [dq, dk, dv, dg, dbeta, dstart, dstart if dbonus is None else dbonus.sum(0)]


_chain = Differentiable("diagonal_write", _forward, _backward, _shapes, gradients=7)


# ---- entry -----------------------------------------------------------------------------------------------------------


def diagonal_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    initial_state: Tensor | None = None,
    rule: Literal["write", "average", "delta", "dplr"] = "write",
    early: bool = False,
    bonus: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chains with one log gate a channel; o_t = S_t q_t. With D_t = Diag(e^{g_t}):

    "write": S_t = S_{t-1} D_t + beta_t v_t k_t^T (gated linear attention). With bonus, o_t = S_{t-1} q_t +
        ((bonus * k_t) . q_t) beta_t v_t: tokens are read before their own gate and write (RWKV-6).
    "average": S_t = S_{t-1} D_t + beta_t v_t ((1 - e^{g_t}) * k_t)^T: an entry takes what it forgets (HGRN2).
    "delta": S_t = S_{t-1} D_t + beta_t (v_t - S' e_t) k_t^T, e = erase or k, S' = S_{t-1} D_t or, with early, S_{t-1}.
    "dplr": S_t = S_{t-1} (D_t + a_t b_t^T) + beta_t v_t k_t^T.

    q, k, erase, a, b (B, T, H, K) and v (B, T, HV, V) in one dtype (bf16, fp16, fp32), HV a multiple of H, K and V
    from 1 to 256; g (B, T, HV, K) logs, g <= 0, floored at -100; beta (B, T, HV) or None for one; bonus (HV, K) or
    None; initial_state (U, HV, V, K) or None for zero, U = B or the number of sequences that cu_seqlens (U + 1,) packs
    in one batch entry.
    Returns o (B, T, HV, V) in v's dtype and the final state (U, HV, V, K) in float32. All inputs receive gradients,
    once. Raises ShapeError for other shapes, dtypes or devices.
    """
    who = "diagonal_chain"
    units = check_chain(who, q, k, v, cu_seqlens, initial_state, {"g": (g, q.shape[3:]), "beta": (beta, ())})
    for name, x in (("erase", erase), ("a", a), ("b", b)):
        check_like(who, name, x, tuple(q.shape), q.device)
    if rule not in ("write", "average", "delta", "dplr"):
        raise ShapeError(f'{who}: rule is "write", "average", "delta" or "dplr", not {rule!r}')
    if (erase is not None and rule != "delta") or ((a is not None) + (b is not None)) != 2 * (rule == "dplr"):
        raise ShapeError(f'{who}: erase belongs to rule "delta", a and b to rule "dplr", not to {rule!r}')
    check_like(who, "bonus", bonus, (v.shape[2], q.shape[3]), q.device)
    if bonus is not None and rule != "write":
        raise ShapeError(f'{who}: a bonus belongs to rule "write", not to {rule!r}')
    bonus = None if bonus is None else bonus.float()
    g = g if g.dtype in (torch.bfloat16, torch.float16) else g.float()
    beta = None if beta is None else beta.float()
    start = None if initial_state is None else initial_state.float()
    if q.numel() == 0 or v.numel() == 0:
        return nothing_read(v, (units, *v.shape[2:], q.shape[3]), start)
    if rule in ("delta", "dplr"):
        from axes.kernels.diagonal_delta import chain as diagonal_delta

        if a is not None and b is not None:
            v = v if beta is None else (v * beta[..., None]).to(v.dtype)
            return diagonal_delta.dplr(q, k, v, g, a, b, start, cu_seqlens)
        beta = v.new_ones(v.shape[:3], dtype=torch.float32) if beta is None else beta
        return diagonal_delta.delta(q, k, v, g, beta, erase, early, start, cu_seqlens)
    o, final = _chain(*contiguous(q, k, v, g, beta, start, bonus), cu_seqlens, rule == "average")
    return o, final
