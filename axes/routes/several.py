"""Several writes a token as so many tokens: the monoid acts with the first, and the last one is read.

    S_t = (... ((S_{t-1} A_t) written at (k_t1, v_t1)) ...) written at (k_tn, v_tn),    o_t = S_t q_t

The others keep the state as it is: named gates are open there, other maps of the monoid at their neutral values. So n T
tokens of the tuple with one write are computed by whatever computes that, kernels included, and nothing else is new.
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
    """The tuple with one write a token, where that computes it over more tokens; the update itself where not."""
    step = update.parts().step
    if step.writes == 1 or no_several(update) is not None:
        return update
    return dataclasses.replace(update.normal(), algorithm=dataclasses.replace(step, writes=1))


def run(update: StateUpdate, signal: Signal, state: State | None, time: int, compute: Compute) -> tuple[Tensor, State]:
    """Outputs and the last state. compute: the tuple with one write's own, of n T tokens and a state."""
    n = update.parts().step.writes
    given = tokens(update, signal, time)
    out, end = compute(one(update), given, state)
    out = out.unflatten(time, (-1, n)).select(time + 1, n - 1)
    before = 0 if state is None else state.count
    return out, end._replace(count=before + (end.count - before) // n)


def tokens(update: StateUpdate, signal: Signal, time: int) -> dict[str, Tensor | float]:
    """A signal (..., T at `time`, ...) as one of n T tokens with a write each."""
    p = update.parts()
    n, repeated, still = p.step.writes, several(p), idle(update)
    v, shapes = signal["v"], {per.name: per for per in update.demands()}
    assert isinstance(v, Tensor)
    lead = v.shape[:-2]
    k = signal["k"]
    assert isinstance(k, Tensor)
    given: dict[str, Tensor | float] = {}
    for name, x in signal.items():
        last = 1 if name not in shapes else len(extent(shapes[name], k.shape[-1], v.shape[-1]))
        if name in repeated:
            if isinstance(x, Tensor) and x.ndim > time + last:  # else it is the same for every token and write
                x = x.movedim(-1 - last, time + 1).flatten(time, time + 1)
            given[name] = x
            continue
        if not isinstance(x, Tensor) or x.ndim <= time:  # a gate that is constant acts once a token, like any other
            if name not in still:
                given[name] = x
                continue
            x = torch.as_tensor(x, dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)
            x = x.expand(*lead, *x.shape[x.ndim - last :] if last and x.ndim else ())
        rest = x.new_zeros(()).expand_as(x) if name in still or name == "q" else x
        order = [rest] * (n - 1) + [x] if name == "q" else [x] + [rest] * (n - 1)
        given[name] = torch.stack(order, time + 1).flatten(time, time + 1)
    return given


__all__ = ["one", "run", "tokens"]
