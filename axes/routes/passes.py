"""Memories of two sums as passes of matrices. A bounded one: slots by keys and values by slots, h between them (gated
slot attention). A regression: a pass over the keys for every step of its solve, one over the values at what it finds; a
correlation goes on with a pass of values on values for every step of a second one.

    K_t = a * K_{t-1} + w k_t^T,   V_t = a * V_{t-1} + w v_t^T,   o_t = V_t^T p,   p = grad h*(scale K_t q_t):

the scores K_t q_t are a chain whose values are the writes w and whose gates stand on rows, the outputs one whose keys
are the writes, whose queries are p and whose gates stand on keys. Whatever computes chains computes both.
Legend: ... batch, T tokens, m slots, d_k key, d_v value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.derived import refills
from axes.core.facts import fact
from axes.core.geometry import Euclidean
from axes.core.legality import factors
from axes.core.memory import BoundedList, Solved, normalised
from axes.core.monoids import Diagonal, Monoid, product
from axes.core.rates import Complement, Per, Shape, Signal, resolve
from axes.core.state_update import State, StateUpdate

_Widths = tuple[tuple[int, int] | None, tuple[int, int] | None]
Compute = Callable[[StateUpdate, Signal, State, int], tuple[Tensor, State]]


class _Passes(NamedTuple):
    """The chains of scores and of outputs."""

    scores: StateUpdate
    outputs: StateUpdate


@fact
def passes(update: StateUpdate) -> _Passes:
    """Of a bounded memory; gates keep their names. Slots that take what they forget are chains that say so."""
    monoid, rate = update.parts().monoid, update.parts().step.rate
    found, refilled = [], refills(update)
    for side in ("row", "key"):
        own = _of(rate.of, side) if isinstance(rate, Complement) and refilled else None
        step = Step() if own is None else Step(Complement(own))
        found.append(StateUpdate(Alignment(), Euclidean(), _on(monoid, side), step))
    return _Passes(*found)


def widths(update: StateUpdate, of: tuple[int, int] | None) -> _Widths:
    """Of values and keys of either chain, where those of the memory are known."""
    memory = update.parts().memory
    assert isinstance(memory, BoundedList)
    return (None, None) if of is None else ((memory.slots, of[1]), (of[0], memory.slots))


def _on(monoid: Monoid, side: Shape) -> Monoid:
    """The gates of slots on rows, or on keys."""
    parts = []
    for f in factors(monoid):
        if isinstance(f, Diagonal):
            assert isinstance(f.gate, Per)
            f = Diagonal(_of(f.gate, side), side)  # type: ignore[arg-type]
        parts.append(f)
    return product(parts)


def _of(gate: Per, side: Shape) -> Per:
    """A gate of slots as one of rows, or of keys."""
    return replace(gate, shape=side, size=None)


def run(update: StateUpdate, signal: Signal, state: State, batch: int, compute: Compute) -> tuple[Tensor, State]:
    """Outputs (..., T, d_v) and the last state. signal: `batch` batch dimensions, then T, then features.

    compute: what takes chains, of a tuple, a signal, a state and the number of batch dimensions.
    """
    p = update.parts()
    if p.memory.kind == "regression":
        return _solved(update, signal, state, batch, compute)
    memory, (scores, outputs) = p.memory, passes(update)
    assert isinstance(memory, BoundedList)
    q, k, v = (signal[n] for n in "qkv")
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    write, gates = _write(update, signal, k).to(k.dtype), {per.name: signal[per.name] for per in scores.demands()}
    keys, values = state.theta

    def passed(chain: StateUpdate, start: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first = State((start,), (), (), (), (), state.count)
        out, last = compute(chain, {"q": q, "k": k, "v": v, **gates}, first, batch)
        return out, last.theta[0]

    seen, keys = passed(scores, keys, q, k, write)
    norm = state.norm
    one = torch.ones_like(k[..., :1])
    if norm:
        mass, last = passed(scores, norm[0], one, one, write)
        norm, floor = (last,), p.step.floor
        seen = normalised(seen, mass, floor)
    weights = memory.weights(seen, k.shape[-1], p.h)
    if norm:
        weights = normalised(weights, mass, floor)
    out, columns = passed(outputs, values.mT, weights, write, v)
    return out, State((keys, columns.mT), state.via, state.stats, norm, state.anchor, state.count + q.shape[batch])


def chains(update: StateUpdate) -> tuple[StateUpdate, ...]:
    """Of which kernels may compute the passes."""
    return (sums(update),) if update.parts().memory.kind == "regression" else tuple(passes(update))


@fact
def sums(update: StateUpdate) -> StateUpdate:
    """Of a regression: the chain of either sum."""
    p = update.parts()
    return StateUpdate(Alignment(), Euclidean(), p.monoid, Step(p.step.rate))


def _solved(update: StateUpdate, signal: Signal, state: State, batch: int, compute: Compute) -> tuple[Tensor, State]:
    """R_t p of every token t is what the chain whose values are keys reads at p: no R is formed for a token."""
    chain, memory = sums(update), update.parts().memory
    assert isinstance(memory, Solved)
    q, k, v = (signal[n] for n in "qkv")
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    rates = {per.name: signal[per.name] for per in chain.demands()}

    def passed(start: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        own = State((start,), (), (), (), (), state.count)
        out, end = compute(chain, {"q": q, "k": k, "v": v, **rates}, own, batch)
        return out, end.theta[0]

    def solved(start: Tensor, key: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """What the sum of key key^T, which starts there, is solved with, and its end."""
        end = start

        def apply(p: Tensor) -> Tensor:
            nonlocal end
            out, end = passed(start, p, key, key)
            return out

        return memory.solve(apply, b, signal), end

    wide = torch.promote_types(q.dtype, torch.float32)  # what is solved is not rounded from step to step
    first, keys, *values = state.theta
    x, keys = solved(keys, k, q.to(wide))
    out, first = passed(first, x, k, v)
    if values:
        out, values[0] = solved(values[0], v, out.to(wide))
    return out, State(
        (first, keys, *values), state.via, state.stats, state.norm, state.anchor, state.count + q.shape[batch]
    )


def _write(update: StateUpdate, signal: Signal, k: Tensor) -> Tensor:
    """How much of a token every slot takes, (..., T, m)."""
    p = update.parts()
    assert isinstance(p.memory, BoundedList)
    if refills(update):  # ones, whole since both chains want them so
        return k.new_ones(*k.shape[:-1], p.memory.slots)
    rate = resolve(p.step.rate, signal)
    if isinstance(p.step.rate, Per) and p.step.rate.shape == "scalar" and isinstance(rate, Tensor) and rate.ndim:
        rate = rate[..., None]
    shape = (*k.shape[:-1], p.memory.slots)
    return rate if isinstance(rate, Tensor) and rate.shape == shape else (k.new_ones(()) * rate).expand(shape)


__all__ = ["chains", "passes", "run", "sums", "widths"]
