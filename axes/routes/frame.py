"""A state that turns at a constant rate, in the frame that turns along: there the same update has no rotation (RoPE).

S_t = Z_t R(t angle): the queries and keys of token t turn back by t angle, Z takes them as they are, and the last state
turns forward once. Whoever writes queries and keys anyway turns them for nothing (`axes.sequence.fused`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from axes.core.derived import no_chain
from axes.core.facts import fact
from axes.core.legality import factors
from axes.core.monoids import Identity, Product, Rotation
from axes.core.rates import Per, Signal
from axes.core.state_update import State, StateUpdate
from axes.routes import dispatch
from axes.routes.choice import Implementation


class Frame(NamedTuple):
    """still: the update of Z, that of S without its rotation."""

    still: StateUpdate
    rotation: Rotation


@fact
def frame(update: StateUpdate) -> Frame | None:
    """That of an affine chain that turns by constant angles beside scalar gates and erases nothing; else None."""
    cost, h, monoid, step, memory = update.parts()
    parts = factors(monoid)
    turns = [p for p in parts if isinstance(p, Rotation) and not isinstance(p.angle, Per)]
    rest = tuple(p for p in parts if p not in turns)
    if len(turns) != 1 or any(p.kind not in ("identity", "scalar") for p in rest):
        return None
    if no_chain(update) is not None or update.parts().predicts:
        return None
    still = Product(rest) if len(rest) > 1 else rest[0] if rest else Identity()
    return Frame(StateUpdate(cost, h, still, step, memory), turns[0])


def run(
    frame: Frame,
    signal: Signal,
    state: State,
    cu_seqlens: Tensor | None = None,
    implementation: Implementation | None = None,
) -> tuple[Tensor, State]:
    """`dispatch.run`, or `run_packed` with offsets, of S for queries and keys that have turned back already."""
    k = signal["k"]
    assert isinstance(k, Tensor)
    held = state.held()
    state = state if held is None else state.to(torch.float32)  # rounded once, when it has turned
    if cu_seqlens is None:
        out, after = dispatch.run(frame.still, signal, state, implementation=implementation)
        lengths = torch.full((1,), k.shape[1], device=k.device)
    else:
        out, after = dispatch.run_packed(frame.still, signal, state, cu_seqlens, implementation=implementation)
        lengths = cu_seqlens.diff()
    angle = frame.rotation.element(signal, 1.0, k.new_empty(k.shape[-1], dtype=torch.float64)).angle
    assert angle is not None
    end = (lengths[:, None, None, None] * angle).remainder(2 * math.pi)
    turned = tuple(_forward(x, end.to(x.dtype)) for x in after.theta)
    last = State(turned, after.via, after.stats, after.norm, after.anchor, after.count)
    return out, last if held is None else last.to(held)


def _forward(x: Tensor, angle: Tensor) -> Tensor:
    """`rotate` by angles that are numbers of the length: three operations on the state and the others on these, which
    a line of operations makes once (`axes.kernels.common.line`)."""
    cos, sin = torch.cos(angle), torch.sin(angle)
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * torch.cat((cos, cos), -1), swapped, torch.cat((-sin, sin), -1))


__all__ = ["Frame", "frame", "run"]
