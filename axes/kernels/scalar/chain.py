"""The chain with a scalar gate, exact, forward and backward: retention, Mamba-2, DeltaNet, gated DeltaNet and kin.

    S_t = e^{g_t} S_{t-1} + beta_t (v_t - [delta] S' a_t) k_t^T,     o_t = S_t q_t,
S' = e^{g_t} S_{t-1}, or S_{t-1} with early=True; or with two strengths (write_t v_t - beta_t S' k_t) k_t^T (Comba); and
read at every token, or at the last of several (DeltaProduct). The mathematics is with the kernels, in `delta` and
`write`; the cut of the tokens into units is in `sizes`, the launches in `launches`, the entry here.

Few heads and many tokens: the tokens of an entry are cut into segments that run side by side. A segment's map of states
is affine, X -> W X + b; one pass finds W and b of every segment, a small kernel carries the state from segment to
segment, and then segments are units with first states of their own. Backwards likewise with W^T. Where gates shrink a
state to nothing in float32 within a segment, W is zero and b comes from the chunks behind that point alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels import contain
from axes.kernels.common.layout import check_chain, check_like, extent, on_device
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv
from axes.kernels.scalar.launches import (
    GLUON,
    Chain,
    delta_backward,
    delta_forward,
    hopper_delta_backward,
    hopper_delta_forward,
    write_backward,
    write_forward,
)
from axes.kernels.scalar.sizes import Cut, chunk_length, cut, plain_segments_of, segments_of

if GLUON:
    from axes.kernels.scalar import hopper, hopper_write

# ---- the choice of kernels -------------------------------------------------------------------------------------------


def _plain(q: Tensor, v: Tensor, beta: Tensor | None, erase: Tensor | None, special: bool) -> bool:
    """Whether the Hopper kernels compute a chain: 16 bit, dense, K = V in {64, 128}, as many value heads as key heads,
    keys erased where they are written, after the gate; special: packed or early."""
    like = q if q.shape[1] == v.shape[1] else v  # several writes a read
    return erase is None and beta is not None and not special and GLUON and hopper.fits(like, v)


def _delta_pair(x: Chain) -> tuple[Any, Any]:
    """The functions for rule "delta": of shapes, dtype and capability alone. Faster kernels for plain cases go here.

    forward(x, start) -> o, final, M, P, first states of segments and their maps (start and None where x.cut.S is 1);
    backward(x, M, P, first states, maps, do, dfinal) -> dq, dk, da by value head, dv, dbeta, dg, dstart of all units.
    """
    if _plain(x.q, x.v, x.beta, x.erase, x.early or x.cut.offsets is not None):
        return hopper_delta_forward, hopper_delta_backward
    return delta_forward, delta_backward


def takes_two(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether the kernels of rule "delta" take a strength of writes beside that of erases: those for Hopper, where a
    quotient of the two has bfloat16's range."""
    return v.dtype == torch.bfloat16 and cu_seqlens is None and GLUON and hopper.fits(q, v)


def reads_last(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether the kernels of rule "delta" take queries of the last of several tokens alone: q (B, T, H, K) of v
    (B, n T, H, V), where those for Hopper run in one segment."""
    (b, t, h, _), n = v.shape, v.shape[1] // max(1, q.shape[1])
    plain = q.shape[0] == b and q.shape[2:] == v.shape[2:] and q.dtype == v.dtype
    if not plain or n not in (2, 4) or t != n * q.shape[1]:
        return False
    if cu_seqlens is not None or not GLUON or not hopper.fits(v, v):
        return False
    return plain_segments_of(b * h, cdiv(t, 64)) == 1


def in_halves(q: Tensor, v: Tensor, rule: str, cu_seqlens: Tensor | None) -> bool:
    """Whether the Hopper kernel of rule "write" computes a chain whose values are twice as wide as it takes: rows of a
    state never meet there, so that the halves of a head are two that share its key, gate and strength."""
    if rule != "write" or cu_seqlens is not None or not GLUON:
        return False
    if v.shape[-1] != 2 * hopper_write.WIDEST:
        return False
    return hopper_write.fits(q, v.unflatten(-1, (2, -1)))


def columns_of_ones(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> int:
    """In how many equal columns rule "write" reads the mass of what is written, where one would do: as many as its
    kernel for Hopper takes at least, where that computes the values."""
    if cu_seqlens is not None or not GLUON:
        return 1
    narrow = hopper_write.WIDEST // 2
    return narrow if hopper_write.fits(q, q.new_empty(()).expand(*v.shape[:3], narrow)) else 1


# ---- operator --------------------------------------------------------------------------------------------------------


def _cut(
    q: Tensor, v: Tensor, beta: Tensor | None, erase: Tensor | None, cu: Tensor | None, delta: bool, special: bool,
    segments: int,
) -> Cut:  # fmt: skip
    """The cut into `segments`, or with 0 into as many as the sizes ask for; special: early."""
    (b, t, hv, d_v), d_k = v.shape, q.shape[3]
    if segments == 0 and cu is None:
        if delta and _plain(q, v, beta, erase, special):
            segments = plain_segments_of(b * hv, cdiv(t, 64))
        else:
            segments = segments_of(b, t, hv, d_k, d_v, q.dtype, delta)
    return cut(b, t, chunk_length(q.dtype, d_k), segments, cu)


def _present(g: Tensor | None, delta: bool, segments: int) -> tuple[bool, ...]:
    """Which of cumulative gates, spans, M, P, first states of segments and their maps there are."""
    gated, cuts = g is not None, segments > 1
    return gated, gated and delta and cuts, delta, delta, cuts, cuts and delta


def _forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, erase: Tensor | None,
    write: Tensor | None, start: Tensor | None, cu: Tensor | None, delta: bool, early: bool, segments: int,
    record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """o, final, and those of `_present`."""
    if v.numel() == 0:
        units = q.shape[0] if cu is None else cu.shape[0] - 1
        final = q.new_zeros(units, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32)
        return _empty(q, v), final if start is None else final.copy_(start), []
    made = _cut(q, v, beta, erase, cu, delta, early, segments)
    runs = spans = None
    if g is not None:
        runs = torch.empty_like(g)
        if delta and made.S > 1:
            spans = q.new_empty(made.units, v.shape[2], 2, dtype=torch.int32)
    x = Chain(q, k, v, beta, g, erase, early, runs, spans, cut=made, record=record, write=write)
    with on_device(q):
        o, final, m, p, starts, maps = (_delta_pair(x)[0] if delta else write_forward)(x, start)
    if made.S > 1:
        final = final.view(-1, made.S, *final.shape[1:])[:, -1].clone(memory_format=torch.contiguous_format)
    if contain.PICKED:
        rule = "write" if not delta else "delta" if write is None else "two"
        with on_device(q):
            contain.contain(
                o, final, q, k, v, beta, g, start, made.offsets, made.chunk, rule, erase, write, early=early
            )
    if not record:
        return o, final, []
    held: tuple[Any, ...] = (runs, spans, m, p, starts, maps)
    return o, final, [y for y, given in zip(held, _present(g, delta, made.S), strict=True) if given]


def _empty(q: Tensor, v: Tensor) -> Tensor:
    """Outputs: of every token, or of the last of several."""
    return v.new_empty(*q.shape[:2], *v.shape[2:])


def _shapes(q, k, v, beta, g, erase, write, start, cu, delta, early, segments, record):
    (b, t, _, d_k), (hv, d_v), c = k.shape, v.shape[2:], chunk_length(q.dtype, k.shape[3])
    units, slots = extent(b, t, c, cu)
    o, final = _empty(q, v), q.new_empty(units, hv, d_v, d_k, dtype=torch.float32)
    if v.numel() == 0 or not record:
        return o, final, []
    s = 1
    if cu is None:
        made = _cut(q, v, beta, erase, None, delta, early, segments)
        units, slots, s = made.units, made.slots, made.S
    full = torch.float32
    rooms = (
        ((b, t, hv), full), ((units, hv, 2), torch.int32), ((slots, hv, c, c), q.dtype),
        ((slots, hv, c * q.shape[1] // max(1, t), c), q.dtype),
        ((units, hv, d_v, d_k), full), ((units, hv, d_k, d_k), full),
    )  # fmt: skip
    there = zip(rooms, _present(g, delta, s), strict=True)
    return o, final, [q.new_empty(sizes, dtype=dtype) for (sizes, dtype), given in there if given]


def _backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, erase: Tensor | None,
    write: Tensor | None, start: Tensor | None, cu: Tensor | None, delta: bool, early: bool, segments: int,
    kept: list[Tensor], do: Tensor | None, dfinal: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    if v.numel() == 0:
        zeros = [None if y is None else torch.zeros_like(y) for y in (q, k, v, beta, g, erase, write, start)]
        return [*zeros[:-1], zeros[-1] if dfinal is None else dfinal.clone()]  # type: ignore[list-item]
    do = _empty(q, v).zero_() if do is None else do
    made, rest = _cut(q, v, beta, erase, cu, delta, early, segments), iter(kept)
    held = (next(rest) if given else None for given in _present(g, delta, made.S))
    runs, spans, m, p, starts, maps = held
    x = Chain(q, k, v, beta, g, erase, early, runs, spans, cut=made, write=write)
    first = start if starts is None else starts
    with on_device(q):
        if delta:
            dq, dk, da, dv, dbeta, dg, dstart = _delta_pair(x)[1](x, m, p, first, maps, do, dfinal)
            da, dwrite = (da, None) if write is None else (None, da)
        else:
            dq, dk, da, dv, dbeta, dg, dstart = write_backward(x, first, do, dfinal)
            dwrite = None
    if made.S > 1:
        dstart = dstart.view(-1, made.S, *dstart.shape[1:])[:, 0].clone(memory_format=torch.contiguous_format)
    if v.shape[2] > q.shape[2]:
        group = (*q.shape[:3], v.shape[2] // q.shape[2], q.shape[3])
        dq, dk, da = (None if y is None else y.view(group).sum(3) for y in (dq, dk, da))
    return [dq, dk, dv, dbeta, dg, da, dwrite, dstart]


_chain = Differentiable("scalar_chain", _forward, _backward, _shapes, gradients=8, missing=True)


# ---- entries ---------------------------------------------------------------------------------------------------------


def scalar_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    erase: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    rule: str = "delta",
    early: bool = False,
    cu_seqlens: Tensor | None = None,
    segments: int | None = None,
    write: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t-1} + beta_t (v_t - [rule "delta"] S' a_t) k_t^T and o_t = S_t q_t, the exact recurrence.

    q, k (B, T, H, K), v (B, T, HV, V) in one of bf16, fp16, fp32; HV a multiple of H: value head h has key head
    h // (HV / H). K, V from 1 to 256, any T. beta (B, T, HV) strengths, 0 to 2 for unit keys, None for ones; g
    (B, T, HV) logs of gates, at most 0, floored at -100, None for no gate. rule "write": nothing is erased. "delta":
    S' = e^{g_t} S_{t-1}, or S_{t-1} with early=True; a_t = k_t, or erase (B, T, H, K) in q's dtype.
    write (B, T, HV), where `takes_two` says so: strengths of what is written, beta then being of what is erased.
    q (B, T / n, H, K), where `reads_last` says so: of every n-th token alone, and o likewise.
    cu_seqlens (U + 1,) int32 or int64 with B = 1: offsets 0, ..., T of U packed sequences; else U = B.
    initial_state (U, HV, V, K) or None for zero. segments: in how many pieces an entry's tokens run side by side (not
    with cu_seqlens); None chooses from the sizes alone. Returns o (B, T, HV, V) in v's dtype and the final state
    (U, HV, V, K) in float32; all inputs receive gradients, once. Raises ShapeError on what does not fit.
    """
    who = "scalar_chain"
    fewer = q.ndim == v.ndim == 4 and reads_last(q, v, cu_seqlens)
    every = q.new_empty(()).expand(*v.shape[:2], *q.shape[2:]) if fewer else q
    check_chain(who, every, k, v, cu_seqlens, initial_state, {"beta": (beta, ()), "g": (g, ())})
    if rule not in ("write", "delta"):
        raise ShapeError(f"{who}: rule is 'write' or 'delta', not {rule!r}")
    if rule == "write" and (erase is not None or early):
        raise ShapeError(f"{who}: rule 'write' erases nothing: no erase keys and no early")
    if segments is not None and (segments < 1 or (segments > 1 and cu_seqlens is not None)):
        raise ShapeError(f"{who}: segments is at least 1, and 1 with cu_seqlens, not {segments}")
    other = rule == "write" or early or beta is None or erase is not None or write is not None
    if fewer and (other or (segments or 1) > 1):
        raise ShapeError(
            f"{who}: {q.shape[1]} queries of {v.shape[1]} tokens are read by rule 'delta' in one segment, with beta "
            "and without erase keys, early and write; elsewhere every token has a query, zeros where nobody reads"
        )
    check_like(who, "erase", erase, tuple(q.shape), q.device)
    if erase is not None and erase.dtype != q.dtype:
        raise ShapeError(f"{who}: erase has the dtype of q, {q.dtype}, not {erase.dtype}")
    if write is not None:
        check_like(who, "write", write, tuple(v.shape[:3]), q.device)
        if rule != "delta" or beta is None or erase is not None or early or not takes_two(q, v, cu_seqlens):
            raise ShapeError(
                f"{who}: write has a strength of its own beside beta, by rule 'delta' without erase keys and early, in "
                "bfloat16 of 64 or 128 entries on a Hopper GPU; elsewhere scale v, and give erase keys"
            )
    halves = 2 if in_halves(q, v, rule, cu_seqlens) else 1
    shape = v.shape
    if halves > 1:
        v = v.reshape(*shape[:2], 2 * shape[2], -1)
        beta, g = (None if x is None else x.repeat_interleave(2, 2) for x in (beta, g))
        initial_state = None if initial_state is None else initial_state.reshape(shape[0], *v.shape[2:], q.shape[3])
    o, final = _chain(
        q.contiguous(), k.contiguous(), v.contiguous(), _float(beta), _float(g),
        None if erase is None else erase.contiguous(), _float(write), _float(initial_state), cu_seqlens,
        rule == "delta", early, segments or 0,
    )  # fmt: skip
    if halves > 1:
        o, final = o.view(shape), final.view(-1, *shape[2:], final.shape[-1])
    return o, final


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t: `scalar_chain`, rule "delta"."""
    return scalar_chain(q, k, v, beta, g, initial_state=initial_state)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t-1} + v_t k_t^T, o_t = S_t q_t: `scalar_chain`, rule "write"."""
    return scalar_chain(q, k, v, g=g, initial_state=initial_state, rule="write")
