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
Turn = Callable[[Tensor, float, torch.dtype], Tensor]  # rows by 1 or -1 times the angles so far, in a dtype


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
    update: StateUpdate, signal: Signal, state: State, time: int, compute: Compute, cu_seqlens: Tensor | None = None,
    by_kernel: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Outputs and the state after the last token. compute: of Z, from its update, signal and state.

    signal: batch dimensions around `time`, then features; with cu_seqlens sequences packed in (1, T, ...), and a state
    for each. by_kernel: whether values and outputs are turned by one.
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
    turn = _turn_by_kernel(total) if by_kernel else _turn(total)
    keys, scanned = signal.get("k"), total.dtype
    if not isinstance(keys, Tensor) or keys.shape[-1] > 1:  # products take the values' dtype, a scan of rows any
        scanned = v.dtype
    turned_back = turn(v, -1.0, scanned)
    out, end = compute(plain, {n: x for n, x in signal.items() if n in asks} | {"v": turned_back}, state)
    out = turn(out, 1.0, v.dtype)
    if end is None:
        return out, None
    if packing is None:
        last = total.select(time, -1)
    else:  # of an empty sequence nothing turned
        places = (packing.offsets[1:] - 1).clamp_min(0)
        kept = packing.offsets.diff() > 0
        last = total[0, places] * kept.view(-1, *[1] * (total.ndim - 2))
    theta = tuple(rotate(x.mT, last[..., None, :].to(x.dtype)).mT for x in end.theta)
    return out, end.but(theta=theta)


def _turn(total: Tensor) -> Turn:
    def turn(x: Tensor, sign: float, dtype: torch.dtype) -> Tensor:
        angle = total if x.ndim == total.ndim else total.unsqueeze(-2)  # of several writes or reads
        return rotate(x.to(total.dtype), angle if sign > 0 else -angle).to(dtype)

    return turn


def _turn_by_kernel(total: Tensor) -> Turn:
    """By cosines and sines that both ways share."""
    from axes.kernels.attention.turn import turn_rows

    held = total.detach()
    cos, sin = torch.cos(held), torch.sin(held)

    def turn(x: Tensor, sign: float, dtype: torch.dtype) -> Tensor:
        if x.ndim == total.ndim:
            return turn_rows(x, total, cos, sin, sign, dtype)
        each = [z.unsqueeze(-2).expand(*x.shape[:-1], z.shape[-1]) for z in (total, cos, sin)]
        return turn_rows(x, each[0], each[1], each[2], sign, dtype)

    return turn


def _angles(update: StateUpdate, signal: Signal, v: Tensor, time: int, each: int) -> Tensor:
    """The sum of the turns of every token (..., T, ..., d_v/2), in float32 at least."""
    wide = torch.promote_types(v.dtype, torch.float32)
    lead = v.shape[: v.ndim - 1 - each]
    total: Tensor | None = None
    for f in factors(update.parts().monoid):
        if f.kind == "turn":
            (per,) = f.rates()
            assert isinstance(per, Per)
            angle = torch.as_tensor(signal[per.name], dtype=wide, device=v.device)
            total = angle if total is None else total + angle
    assert total is not None
    return total.expand(*lead, v.shape[-1] // 2)


__all__ = ["run", "still"]
