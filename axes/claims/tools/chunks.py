"""Chunks: the chunked scan of a tuple, printed chunk formulas, and the matrices that they are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from axes.claims.base import gap
from axes.claims.tools.float64 import eye
from axes.claims.tools.tuples import layer_tuple, recurrent
from axes.core.chain import chain
from axes.core.state_update import StateUpdate
from axes.routes import scan

Chunk = Callable[..., tuple[Tensor, Tensor]]


def decay_mask(gamma: Tensor) -> Tensor:
    """D_ij = gamma_{j+1} ... gamma_i, products taken one factor after another."""
    n = len(gamma)
    mask = eye(n)
    for i in range(1, n):
        mask[i, :i] = mask[i - 1, :i] * gamma[i]
    return mask


def by_chunks(
    update: StateUpdate, size: int, q: Tensor, k: Tensor, v: Tensor, start: Tensor, **rates: Tensor
) -> tuple[Tensor, Tensor]:
    """Reads and last state by the chunked scan of the chain that the tuple derives."""
    c = chain(update, {"q": q, "k": k, "v": v, **rates})
    out, last = scan.chunked(c, start[:, None, :], q, size)
    return out, last[:, 0]


def passed_on(chunk: Chunk, size: int, start: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk formula applied to consecutive pieces, the last of which may be shorter: reads and last state."""
    outputs, state = [], start
    for t in range(0, len(inputs[0]), size):
        out, state = chunk(state, *(x[t : t + size] for x in inputs))
        outputs.append(out)
    return torch.cat(outputs), state


def furthest(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """The largest difference of reads or of last states."""
    return max(gap(x, y) for x, y in zip(a, b, strict=True))


def mixing_matrix(name: str, q: Tensor, k: Tensor, **rates: Tensor) -> Tensor:
    """M with O = M V: what a layer answers when the values are the unit vectors of R^N."""
    return recurrent(layer_tuple(name), q, k, eye(len(k)), **rates)[0]


def ut(k: Tensor, beta: Tensor) -> Tensor:
    """T = (I + tril(diag(beta) K K^T, -1))^-1 diag(beta), by a triangular solve."""
    strict = (beta[:, None] * (k @ k.mT)).tril(-1)
    return torch.linalg.solve_triangular(eye(len(k)) + strict, torch.diag(beta), upper=False)


def householder_product(k: Tensor, beta: Tensor, descending: bool = False) -> Tensor:
    """prod_j (I - beta_j k_j k_j^T), the first factor on the left (or, descending, on the right)."""
    total = eye(k.shape[-1])
    for x, b in zip(k, beta, strict=True):
        factor = eye(k.shape[-1]) - b * torch.outer(x, x)
        total = factor @ total if descending else total @ factor
    return total


def block_rank(mixer: Tensor, tolerance: float = 1e-9) -> int:
    """The most singular values above a relative tolerance of a block below the diagonal, M[i:, :i]."""
    ranks = []
    for i in range(1, len(mixer)):
        singular = torch.linalg.svdvals(mixer[i:, :i])
        ranks.append(int((singular > tolerance * singular[0]).sum()))
    return max(ranks)


def delta_chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """O = Q S^T + (Q K^T * M)(U - W S^T), S + (U - W S^T)^T K, S the state before the chunk."""
    t = ut(k, beta)
    z = t @ v - (t @ k) @ state.mT
    return q @ state.mT + (q @ k.mT).tril() @ z, state + z.mT @ k
