"""Tuples over data: one datum, the interpreter's path through many, and the fastest route."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from axes.catalogue import get
from axes.claims.tools.float64 import eye
from axes.core import reference
from axes.core.costs import Alignment, Linear
from axes.core.geometry import Whiten
from axes.core.state_update import Output, StateUpdate
from axes.routes import dispatch

LINEAR, SOFTMAX = "linear-attention-unnormalised", "softmax-attention"
DELTA, REFLECTIVE, GATED, PREV = "delta-net", "delta-net-reflective", "gated-delta-net", "gated-delta-net-prev"
MAMBA2, GLA, LONGHORN, RLS = "mamba2", "gla", "longhorn", "rls-net"


def layer_tuple(name: str) -> StateUpdate:
    """The tuple of a sequence layer in the catalogue."""
    return get(name, "sequence").update


def delta_product(writes: int) -> StateUpdate:
    """DeltaProduct of so many writes a token."""
    update = layer_tuple("delta-product")
    return dataclasses.replace(update, algorithm=dataclasses.replace(update.parts().step, writes=writes))


def one_step(update: StateUpdate, start: Tensor, **signal: Tensor | float) -> Tensor:
    """The stored matrix (dual, if the update is lazy) after one datum."""
    return update.step(update.init(signal, (start,)), signal)[0].theta[0]


def one_output(update: StateUpdate, start: Tensor, **signal: Tensor | float) -> Tensor:
    """The weights after one datum."""
    return update.step(update.init(signal, (start,)), signal)[1].weights[0]


def transition(update: StateUpdate, **signal: Tensor | float) -> Tensor:
    """A with S -> S A of one datum without a value: what it does to the identity."""
    k = signal["k"]
    assert isinstance(k, Tensor)
    return one_step(update, eye(k.shape[-1]), **signal, v=torch.zeros_like(k))


def read(update: StateUpdate, s: Tensor, q: Tensor) -> Tensor:
    """What the tuple reads from a matrix."""
    return update.read(Output((s,)), q, {"q": q})


def walked(update: StateUpdate, start: Tensor | None = None, **signal: Tensor | float) -> Tensor:
    """Token by token: the weights (N, ...), or the reads if the signal has queries."""
    return reference.run(update, signal, weights=None if start is None else (start,))[0]


def recurrent(
    update: StateUpdate, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None = None, **rates: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: the reads (T, d_v) and the last state (d_v, d_k)."""
    weights = None if start is None else (start,)
    out, state = reference.run(update, {"q": q, "k": k, "v": v, **rates}, weights=weights)
    return out, state.theta[0]


def supplied(update: StateUpdate, signal: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a signal that several tuples are given, what this one asks for."""
    names = update.signals() | {"q", "k", "v"} | {per.name for per in update.demands()}
    return {name: x for name, x in signal.items() if name in names}


def dispatched(update: StateUpdate, start: Tensor | None = None, **signal: Tensor) -> tuple[Tensor, Tensor]:
    """By the route that `dispatch` picks: the reads (T, d_v), at the keys without queries, and the last state."""
    batched = {name: x[None] for name, x in supplied(update, signal).items()}
    weights = None if start is None else (start[None],)
    out, state = dispatch.run(update, {"q": batched["k"], **batched}, time=1, weights=weights)
    return out[0], state.theta[0][0]


def ridge_path(keys: Tensor, values: Tensor, delta: float, decay: float = 0.0) -> Tensor:
    """The weights (N, d_v, d_k) of the recursive least squares layer after every token; decay: log of its gate."""
    update = layer_tuple(RLS)
    metric = dataclasses.replace(update.h, eps=delta)  # type: ignore[type-var]
    one = torch.ones_like(keys[..., 0])
    return walked(dataclasses.replace(update, h=metric), k=keys, v=values, beta=one, decay=decay * one)


def whitened_sum(k: Tensor, v: Tensor, power: float, ridge: float = 0.0) -> Tensor:
    """V^T K (K^T K + ridge)^-power: additive writes, read through their own key statistic."""
    metric = Whiten((StateUpdate(Linear("key")),), "right", power, eps=ridge)
    return walked(StateUpdate(Alignment(), metric), k=k, v=v)[-1]
