"""Several writes and reads a token as so many tokens: the monoid acts with the first, and the last ones are read.

    S_t = (... ((S_{t-1} A_t) written at (k_t1, v_t1)) ...) written at (k_tn, v_tn),    o_tj = S_t q_tj,  j = 1 .. r

The others keep the state as it is: named gates are open there, other maps of the monoid at their neutral values. A read
after the first has a token that writes nothing, with a key and a value of zero. So (n + r - 1) T tokens of the tuple
with one write and one read are computed by whatever computes that, kernels included, and nothing else is new. Queries
of tokens that are not read are zeros, unless what computes takes those of the last ones alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from axes.core.derived import idle, no_several
from axes.core.execution import several
from axes.core.facts import fact
from axes.core.rates import Signal, extent
from axes.core.state_update import State, StateUpdate

Compute = Callable[[StateUpdate, Signal, State | None], tuple[Tensor, State]]


@fact
def one(update: StateUpdate) -> StateUpdate:
    """The tuple with one write and one read a token, where that computes it over more tokens; else itself."""
    step = update.parts().step
    if step.writes == step.reads == 1 or no_several(update) is not None:
        return update
    return dataclasses.replace(update.normal(), algorithm=dataclasses.replace(step, writes=1, reads=1))


def each(update: StateUpdate) -> int:
    """Tokens of the tuple with one write and one read that a token of this one is."""
    step = update.parts().step
    return step.writes + step.reads - 1


def run(
    update: StateUpdate, signal: Signal, state: State | None, time: int, compute: Compute, alone: bool = False
) -> tuple[Tensor, State]:
    """Outputs and the last state. compute: the tuple with one write's own, of more tokens and a state; alone: it takes
    the queries that are there, one read a token, and gives their outputs."""
    n, reads = each(update), update.parts().step.reads
    given = tokens(update, signal, time, alone)
    out, end = compute(one(update), given, state)
    if not alone:
        out = out.unflatten(time, (-1, n))
        read = out.narrow(time + 1, n - reads, reads)
        out = out.select(time + 1, n - 1) if reads == 1 else read.movedim(time + 1, -2)
    before = 0 if state is None else state.count
    return out, end.but(count=before + (end.count - before) // n)


def tokens(update: StateUpdate, signal: Signal, time: int, alone: bool = False) -> dict[str, Tensor | float]:
    """A signal (..., T at `time`, ...) as one of more tokens with a write and a read each; alone: q as it is."""
    p = update.parts()
    n, writes, reads, repeated, still = each(update), p.step.writes, p.step.reads, several(p), idle(update)
    v, shapes = signal["v"], {per.name: per for per in update.demands()}
    assert isinstance(v, Tensor)
    lead = v.shape[:-2] if writes > 1 else v.shape[:-1]
    k = signal["k"]
    assert isinstance(k, Tensor)
    given: dict[str, Tensor | float] = {}
    for name, x in signal.items():
        own = extent(shapes[name], k.shape[-1], v.shape[-1]) if name in shapes else x.shape[-1:]  # type: ignore[union-attr]
        last = len(own)
        if name in repeated:
            if isinstance(x, Tensor) and x.ndim > time + last:  # else it is the same for every token and write
                x = x.movedim(-1 - last, time + 1)
                given[name] = _longer(x, n - writes, time + 1).flatten(time, time + 1)
                continue
            given[name] = x
            continue
        if name == "q" and alone:
            given[name] = x
            continue
        if name == "q" and reads > 1:
            assert isinstance(x, Tensor)
            given[name] = _longer(x.movedim(-2, time + 1), reads - n, time + 1).flatten(time, time + 1)
            continue
        if name in ("k", "v") and writes == 1:
            assert isinstance(x, Tensor)
            given[name] = _longer(x.unsqueeze(time + 1), n - 1, time + 1).flatten(time, time + 1)
            continue
        if not isinstance(x, Tensor) or x.ndim <= time:  # a gate that is constant acts once a token, like any other
            if name not in still:
                given[name] = x
                continue
            x = torch.as_tensor(x, dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)
            x = x.expand(*lead, *own)
        made = x.unsqueeze(time + 1)
        if name in still or name == "q":
            made = _longer(made, 1 - n if name == "q" else n - 1, time + 1)
        else:
            made = made.expand(*x.shape[: time + 1], n, *x.shape[time + 1 :])
        given[name] = made.flatten(time, time + 1)
    return given


def _longer(x: Tensor, by: int, dim: int) -> Tensor:
    """So many zeros behind a dimension, or ahead of it where the number is negative."""
    if not by:
        return x
    behind = [0, 0] * (x.ndim - 1 - dim)  # one pass of zeros and one of x; a concatenation with zeros takes twice that
    return torch.nn.functional.pad(x, [*behind, max(-by, 0), max(by, 0)])


__all__ = ["each", "one", "run", "tokens"]
