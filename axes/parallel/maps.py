"""The map of states that a segment of tokens is, for affine chains: S_out = S_in A + b.

Where every row of the state has the same transition, A is one matrix over the entries of a row, those of momentum
buffers beside those of the state: (..., p d_k, p d_k). Where nothing is read, entries have factors of their own. Both
are found by running the tokens themselves: b is what they make of an empty state, A what they make, with values of
zero, of the identity. So whatever kernel or route computes the layer computes its maps, and the exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from axes.core.derived import no_chain, scales_values
from axes.core.facts import fact
from axes.core.legality import gates
from axes.core.rates import Per, Signal, rate_shape
from axes.core.state_update import State, StateUpdate
from axes.routes.select import computed

Run = Callable[[Signal, State], tuple[Tensor, State]]
Form = Literal["rows", "entries"]


class NoMap(NamedTuple):
    """Why a segment of an update is no map of states that is small enough to send."""

    reason: str


@fact
def form(update: StateUpdate) -> Form | NoMap:
    """rows: A is a matrix that all rows share; entries: a factor for every entry."""
    plain = computed(update)[0]
    reason = "rows that turn are mixed in pairs" if "turn" in gates(update.parts().monoid) else no_chain(plain)
    if reason is not None:
        return NoMap(reason)
    p = plain.parts()
    kinds, rate = gates(p.monoid), rate_shape(p.step.rate)
    by_row = rate == "row" and not scales_values(plain) or rate_shape(p.cost.ridge) == "row"
    if p.memory.kind == "matrix" and not by_row and not kinds & {"row", "hadamard"}:
        return "rows"
    reads = p.predicts and p.memory.kind == "matrix"
    elementwise = kinds <= {"identity", "zero", "scalar", "diagonal", "row", "hadamard"}
    if elementwise and not reads and not p.step.via and not p.step.debias:
        return "entries"
    return NoMap("every row of the state has a transition of its own: a segment's map is one matrix a row")


def rows(state: State) -> Tensor:
    """The state as the rows of one matrix (..., d_v, p d_k); a normaliser is one more row."""
    slots = [state.theta[0], *(t.theta[0] for t in _buffers(state))]
    whole = slots[0] if len(slots) == 1 else torch.cat(torch.broadcast_tensors(*slots), -1)
    return torch.cat((whole, state.norm[0]), -2) if state.norm else whole


def with_rows(state: State, whole: Tensor, count: Tensor | None = None) -> State:
    """A state as this one with other numbers."""
    count, norm = state.count if count is None else count, state.norm
    if norm:
        whole, norm = whole[..., :-1, :], (whole[..., -1:, :],)
    slots = iter(whole.chunk(1 + len(_buffers(state)), -1))
    theta = next(slots)

    def moved(held: State) -> State:
        return State((next(slots),), held.via, held.stats, held.norm, held.anchor, count)

    via = tuple(moved(s) if isinstance(s, State) else tuple(moved(t) for t in s) for s in state.via)
    return State((theta,), via, state.stats, norm, state.anchor, count)


def _buffers(state: State) -> list[State]:
    return [t for s in state.via for t in ((s,) if isinstance(s, State) else s)]


def constant(run: Run, signal: Signal, start: State) -> Tensor:
    """b, the rows that the segment makes of `start`."""
    return rows(run(signal, start)[1])


def matrix(update: StateUpdate, run: Run, signal: Signal, like: State) -> Tensor:
    """A: (..., p d_k, p d_k), or the factors of every entry."""
    whole = rows(like)
    if form(update) == "entries":
        return rows(run(_written_nothing(update, signal, whole.shape[-2]), with_rows(like, torch.ones_like(whole)))[1])
    width, parts = whole.shape[-1], 1 + len(_buffers(like))
    eye = torch.eye(width, dtype=whole.dtype, device=whole.device)
    found = []
    for slot in eye.chunk(parts):  # as many rows at a time as a key has entries: what kernels take
        given = slot.expand(*whole.shape[:-2], *slot.shape)
        if like.norm:
            given = torch.cat((given, torch.zeros_like(given[..., :1, :])), -2)
        after = rows(run(_written_nothing(update, signal, slot.shape[0]), with_rows(like, given))[1])
        found.append(after[..., : slot.shape[0], :])
    return found[0] if parts == 1 else torch.cat(found, -2)


def _written_nothing(update: StateUpdate, signal: Signal, width: int) -> dict[str, Tensor | float]:
    """The tokens with values of zero, of another width."""
    given, rate = dict(signal), computed(update)[0].parts().step.rate
    names = ["v"]
    if form(update) == "rows" and isinstance(rate, Per) and rate_shape(rate) == "row":
        names.append(rate.name)  # it scales values, which are zero, and have another width; else it may be of gates too
    for name in names:
        x = given[name]
        assert isinstance(x, Tensor)
        given[name] = x.new_zeros(*x.shape[:-1], width)
    return given


def through(update: StateUpdate, state: Tensor, by: Tensor) -> Tensor:
    """Rows of a state through a segment's map."""
    return state * by if form(update) == "entries" else state @ by


def back(update: StateUpdate, adjoint: Tensor, by: Tensor) -> Tensor:
    """Their gradient, back through it."""
    return adjoint * by if form(update) == "entries" else adjoint @ by.mT


def prefix(update: StateUpdate, maps: Sequence[Tensor], constants: Sequence[Tensor], rank: int) -> Tensor:
    """What enters segment `rank` > 0: constants[0] is what leaves the first one."""
    state = constants[0]
    for by, more in zip(maps[1:rank], constants[1:rank], strict=True):
        state = through(update, state, by) + more
    return state


def suffix(update: StateUpdate, maps: Sequence[Tensor], constants: Sequence[Tensor], rank: int) -> Tensor:
    """The gradient of what leaves segment `rank`, from those of what enters the later ones, each for itself."""
    adjoint = constants[-1]
    for by, more in zip(maps[rank + 1 : -1][::-1], constants[rank + 1 : -1][::-1], strict=True):
        adjoint = back(update, adjoint, by) + more
    return adjoint
