"""Reads between two states, a theta_{t-1} + r u_t, as reads of states: a query waits at the token before.

A drive is an outer product, u_t = (v_t - [where it holds an error] theta_{t-1} s_t) k_t^T, so that

    o_t = theta_{t-1} (a * q_t - c_t s_t) + c_t v_t,    c_t = <r * k_t, q_t>:

the state before the token, read with another query, and a multiple of its own value (RWKV-6's bonus). The chain whose
reads are late is computed by whatever computes it, with the query of token t + 1 at token t.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from axes.core.algorithms import Read
from axes.core.chain import read_by_key
from axes.core.facts import fact
from axes.core.rates import Rate, Signal, rate_shape, resolve
from axes.core.state_update import State, StateUpdate
from axes.linalg.formulas import by_formula
from axes.routes.packed import Packing
from axes.routes.scaled import behind, inner, scaled

Compute = Callable[[StateUpdate, Signal, State], tuple[Tensor, State]]


@fact
def late(update: StateUpdate) -> StateUpdate:
    """The same recurrence, read at the new state; the update itself where it is."""
    step = update.parts().step
    if not isinstance(step.read, Read):
        return update
    return dataclasses.replace(update.normal(), algorithm=dataclasses.replace(step, read=None))


def run(
    update: StateUpdate, signal: Signal, state: State, time: int, compute: Compute, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, State]:
    """Outputs and the state after the last token. compute: the late chain's own, of signal and state.

    signal: batch dimensions around `time`, then features; with cu_seqlens sequences packed in (1, T, ...), and a state
    for each.
    """
    query, bonus = _asked(update, signal)
    value = signal["v"]
    assert isinstance(value, Tensor)
    plain = late(update)
    asks = {per.name for per in plain.demands()} | plain.signals() | {"k", "v"}
    given, length = {n: x for n, x in signal.items() if n in asks}, query.shape[time]
    wide = torch.promote_types(query.dtype, torch.float32)
    held = state.theta[0].to(wide)
    if cu_seqlens is None and by_formula(query):  # cut once, so that the gradients of both parts are joined in one pass
        first, rest = query.split((1, length - 1), time)
        ahead = torch.cat((rest, torch.zeros_like(first)), time)
    else:  # no length is compared with what it may be
        first, ahead = query.narrow(time, 0, 1), torch.roll(query, -1, time)
    out, end = compute(plain, given | {"q": ahead}, state)
    if cu_seqlens is None:
        firsts = (held @ first.squeeze(time).to(wide)[..., None])[..., 0].to(out.dtype).unsqueeze(time)
        return behind(firsts, out, value, bonus, time), end
    tokens, packing = torch.arange(length, device=out.device), Packing.of(cu_seqlens, length)
    begins = packing.offsets[:-1].clamp_max(length - 1)  # of an empty sequence nobody asks
    starts = tokens == packing.offsets[packing.sequence]
    firsts = (held @ query[0, begins].to(wide)[..., None])[..., 0].to(out.dtype)[packing.sequence][None]
    before = torch.where(starts.view(-1, *[1] * (out.ndim - time - 1)), firsts, torch.roll(out, 1, time))
    return before + scaled(value, bonus).to(out.dtype), end


def _asked(update: StateUpdate, signal: Signal) -> tuple[Tensor, Tensor]:
    """The query of the state before a token (..., d_k), and the multiple of its value (..., 1) or (..., d_v)."""
    p = update.parts()
    look, q, k = p.step.read, signal["q"], signal["k"]
    assert isinstance(look, Read) and isinstance(q, Tensor) and isinstance(k, Tensor)
    wide = torch.promote_types(q.dtype, torch.float32)
    gate, value = _spread(look.gate, signal), _spread(look.rate, signal)
    plain = isinstance(gate, float) and gate == 1.0 and not p.predicts
    query = q if plain else q.to(wide) * gate  # each pass over all tokens is memory's time
    keyed, multiple = (k, value) if rate_shape(look.rate) == "row" else (scaled(k, value), 1.0)
    bonus = inner(keyed, q)
    if p.predicts:
        seen, shrink = read_by_key(update, {**signal, "k": k.to(wide)})
        bonus = bonus * shrink
        query = query - bonus * seen
    return query, bonus * multiple


def _spread(rate: Rate, signal: Signal) -> Tensor | float:
    """A rate against vectors (..., n)."""
    value = resolve(rate, signal)
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    return value[..., None] if rate_shape(rate) == "scalar" else value


__all__ = ["late", "run"]
