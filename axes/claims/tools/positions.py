"""Positions: the weight of every pair in a read, the maps that carry a state along, and their distance."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from axes.claims.tools.float64 import eye, zeros
from axes.claims.tools.matrices import relative
from axes.claims.tools.tuples import dispatched, layer_tuple, walked
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.memory import List
from axes.core.monoids import Monoid, Scalar
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate

NOTHING = -800.0  # the log of a gate that is exactly zero in float64


def additive(monoid: Monoid) -> StateUpdate:
    """Linear attention whose state is kept by a monoid."""
    return StateUpdate(Alignment(), monoid=monoid)


def logits_of(name: str) -> StateUpdate:
    """A softmax attention layer read without its softmax and its temperature: the weights are the logits."""
    return dataclasses.replace(layer_tuple(name), h=Euclidean(), memory=List(scale=1.0))


def weights(update: StateUpdate, **signal: Tensor) -> Tensor:
    """How much of v_j is in o_t: (T, T) with the query in front, read off from one-hot values.

    signal: q, k (T, d_k) and rates (T, ...).
    """
    return dispatched(update, **signal, v=eye(signal["k"].shape[0]))[0]


def effective_keys(update: StateUpdate, **signal: Tensor) -> Tensor:
    """Rows k~_j with S_T = sum_j v_j k~_j^T: the last state itself if the values are one-hot."""
    return dispatched(update, **signal, v=eye(signal["k"].shape[0]))[1]


def carried(update: StateUpdate, **signal: Tensor) -> Tensor:
    """P[j, t] = A_{j+1} ... A_t for 0 <= j <= t <= T, I elsewhere: what the layer does to the identity, valueless.

    signal: k (T, d_k) and rates (T, ...).  Returns (T + 1, T + 1, d_k, d_k).
    """
    length, width = signal["k"].shape
    rows = []
    for j in range(length):
        rest = {n: x[j:] if x.ndim else x for n, x in signal.items()}
        path = walked(update, eye(width), **rest, v=zeros(length - j, width))
        rows.append(torch.cat((eye(width).expand(j + 1, width, width), path)))
    return torch.stack((*rows, eye(width).expand(length + 1, width, width)))


def distance(maps: Tensor) -> Tensor:
    """-log |P[j, t]| in the spectral norm."""
    return -torch.linalg.matrix_norm(maps, 2).log()


def chain_gaps(d: Tensor) -> Tensor:
    """d(j, t) - d(j, s) - d(s, t) over all j < s < t."""
    j, s, t = torch.combinations(torch.arange(d.shape[0]), 3).unbind(-1)
    return d[j, t] - d[j, s] - d[s, t]


def causal(x: Tensor) -> Tensor:
    """(T, T) with zeros for keys after the query."""
    return x.tril()


def sums(log_gates: Tensor) -> Tensor:
    """G[t, j] = g_{j+1} + ... + g_t from logs (T,), by adding up slices; zero for j >= t."""
    n = log_gates.shape[0]
    return torch.stack([torch.stack([log_gates[j + 1 : t + 1].sum() for j in range(n)]) for t in range(n)])


def softmax_rows(logits: Tensor) -> Tensor:
    """Softmax over the keys up to the query."""
    later = torch.ones_like(logits, dtype=torch.bool).triu(1)
    return torch.softmax(logits.masked_fill(later, -torch.inf), -1)


def gram_change(before: Tensor, after: Tensor) -> float:
    """|K~ K~^T - K K^T| relative to |K K^T|, for keys as rows."""
    return relative(after @ after.mT, before @ before.mT)


def refused(gate: float) -> float:
    """Whether the scalars do not accept a gate: 1 or 0."""
    try:
        Scalar(gate)
    except IllegalUpdate:
        return 1.0
    return 0.0
