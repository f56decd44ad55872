"""A state whose rows turn in pairs, in the frame of its values: there the same update has rows that stand still.

S_t = R(theta_t) A_t S_{t-1} + u_t k_t^T is S_t = R(theta_1 + ... + theta_t) Z_t with

    Z_t = A_t Z_{t-1} + R(-(theta_1 + ... + theta_t)) u_t k_t^T,   o_t = R(theta_1 + ... + theta_t) Z_t q_t:

values turn back, outputs and the last state forward, and whatever computes Z, kernels included, computes S (S5, the
LRU). Errors of the turned state are errors of values that turned back, so they do too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from axes.core.facts import fact
from axes.core.legality import factors
from axes.core.monoids import product, rotate
from axes.core.rates import Per, Signal
from axes.core.state_update import State, StateUpdate
from axes.routes.packed import Packing

Compute = Callable[[StateUpdate, Signal, State], tuple[Tensor, State | None]]


@fact
def still(update: StateUpdate) -> StateUpdate:
    """The update of Z; the update itself where no row turns."""
    parts = factors(update.parts().monoid)
    rest = tuple(f for f in parts if f.kind != "turn")
    if len(rest) == len(parts):
        return update
    monoid = product(rest)
    step = update.parts().step
    if not rest and step.at == "gated":  # nothing is left that a gradient could come after
        step = dataclasses.replace(step, at="prev")
    return dataclasses.replace(update.normal(), monoid=monoid, algorithm=step)


def run(
    update: StateUpdate, signal: Signal, state: State, time: int, compute: Compute, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Outputs and the state after the last token. compute: of Z, from its update, signal and state.

    signal: batch dimensions around `time`, then features; with cu_seqlens sequences packed in (1, T, ...), and a state
    for each.
    """
    v = signal["v"]
    assert isinstance(v, Tensor)
    plain, each = still(update), int(update.parts().step.writes > 1)
    angle = _angles(update, signal, v, time, each)
    total = angle.cumsum(time)
    packing = None if cu_seqlens is None else Packing.of(cu_seqlens, v.shape[time])
    if packing is not None:
        total = packing.from_starts(total)
    asks = {per.name for per in plain.demands()} | plain.signals() | {"q", "k"}
    back = -(total.unsqueeze(-2) if each else total)
    turned_back = rotate(v.to(total.dtype), back)
    keys = signal.get("k")
    if not isinstance(keys, Tensor) or keys.shape[-1] > 1:  # products take the values' dtype, a scan of rows any
        turned_back = turned_back.to(v.dtype)
    out, end = compute(plain, {n: x for n, x in signal.items() if n in asks} | {"v": turned_back}, state)
    ahead = total if update.parts().step.reads == 1 else total.unsqueeze(-2)
    out = rotate(out.to(total.dtype), ahead).to(v.dtype)
    if end is None:
        return out, None
    if packing is None:
        last = total.select(time, -1)
    else:  # of an empty sequence nothing turned
        places = (packing.offsets[1:] - 1).clamp_min(0)
        kept = packing.offsets.diff() > 0
        last = total[0, places] * kept.view(-1, *[1] * (total.ndim - 2))
    theta = tuple(rotate(x.mT, last[..., None, :].to(x.dtype)).mT for x in end.theta)
    return out, end._replace(theta=theta)


def _angles(update: StateUpdate, signal: Signal, v: Tensor, time: int, each: int) -> Tensor:
    """The sum of the turns of every token (..., T, ..., d_v/2), in float32 at least."""
    wide = torch.promote_types(v.dtype, torch.float32)
    lead = v.shape[: v.ndim - 1 - each]
    total = torch.zeros((), dtype=wide, device=v.device)
    for f in factors(update.parts().monoid):
        if f.kind == "turn":
            (per,) = f.rates()
            assert isinstance(per, Per)
            total = total + torch.as_tensor(signal[per.name], dtype=wide, device=v.device)
    return total.expand(*lead, v.shape[-1] // 2)


__all__ = ["run", "still"]
