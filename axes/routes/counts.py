"""Data counted for every sequence: what a token is to a tuple may depend on how many there were before it.

A state's count is one number where its sequences are of one length, and one for each (N,) where they are not and the
tuple asks: an anchor or a value that is held is renewed at every so many tokens. Routes take one number: sequences that
stand alike run together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from axes.core.algorithms import Anchor, Held
from axes.core.facts import fact
from axes.core.state_update import State, StateUpdate


@fact
def period(update: StateUpdate) -> int | None:
    """After how many tokens a token is the same again to a tuple; 0 if never, None if all are."""
    found: int | None = None
    for p in update.parts().every():
        if p.counts or p.step.start in ("first", "second") or isinstance(p.step.at, Held):
            return 0
        if isinstance(p.step.at, Anchor) and p.step.at.every > 1:
            found = math.lcm(found or 1, p.step.at.every)
    return found


def phases(update: StateUpdate, state: State, sequences: int) -> list[int]:
    """Where in a period every sequence stands: waits for the device if counts are there."""
    every = period(update)
    if every is None:
        return [0] * sequences
    counts = state.count.tolist() if state.count.ndim else [state.number()] * sequences
    return [n % every if every else n for n in counts]


def one(state: State) -> State:
    """A state of sequences that stand alike, with one count."""

    def single(s: State) -> State:
        return s.but(count=s.count[0].cpu()) if s.count.ndim else s

    return _each(single, state)


def behind(before: State, end: State) -> State:
    """`end`, which began at `one(before)`, with the counts of its sequences."""

    def counted(b: State, e: State) -> State:
        return e.but(count=b.count + (e.count - b.count[0].cpu()).to(b.count.device)) if b.count.ndim else e

    return _each(counted, before, end)


def joined(counts: Sequence[Tensor]) -> Tensor:
    """Of sequences one after another: one number where all are equal."""
    every = torch.cat([n.reshape(-1) for n in counts])
    return every[0].cpu() if bool((every == every[0]).all()) else every


def _each(change: Callable[..., State], *states: Any) -> Any:
    """A change of every state within states of one form, from the inside."""
    first = states[0]
    if isinstance(first, State):
        via = tuple(_each(change, *xs) for xs in zip(*(s.via for s in states), strict=True))
        stats = tuple(_each(change, *xs) for xs in zip(*(s.stats for s in states), strict=True))
        *before, last = states
        return change(*before, last.but(via=via, stats=stats))
    return tuple(_each(change, *xs) for xs in zip(*states, strict=True))


__all__ = ["behind", "joined", "one", "period", "phases"]
