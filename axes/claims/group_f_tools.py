"""What the checks of group F share: tuples run token by token and by chunks, masks, the matrices of the UT form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from axes.claims.group_a_tools import layer_tuple
from axes.core import reference
from axes.core.chain import chain
from axes.core.state_update import StateUpdate
from axes.routes import scan

LINEAR, MAMBA2, SOFTMAX = "linear-attention-unnormalised", "mamba2", "softmax-attention"
DELTA, REFLECTIVE, GATED, PREV = "delta-net", "delta-net-reflective", "gated-delta-net", "gated-delta-net-prev"

Chunk = Callable[..., tuple[Tensor, Tensor]]


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def causal(n: int) -> Tensor:
    """Ones on and below the diagonal."""
    return torch.ones(n, n, dtype=torch.float64).tril()


def decay_mask(gamma: Tensor) -> Tensor:
    """D_ij = gamma_{j+1} ... gamma_i, products taken one factor after another."""
    n = len(gamma)
    mask = eye(n)
    for i in range(1, n):
        mask[i, :i] = mask[i - 1, :i] * gamma[i]
    return mask


def recurrent(
    update: StateUpdate, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None = None, **rates: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs (T, d_v) and the last state (d_v, d_k), token by token."""
    weights = None if start is None else (start,)
    out, state = reference.run(update, {"q": q, "k": k, "v": v, **rates}, weights=weights)
    return out, state.theta[0]


def states(update: StateUpdate, k: Tensor, v: Tensor, start: Tensor | None = None, **rates: Tensor) -> Tensor:
    """The states (T, d_v, d_k) after each token."""
    weights = None if start is None else (start,)
    return reference.run(update, {"k": k, "v": v, **rates}, weights=weights)[0]


def by_chunks(
    update: StateUpdate, size: int, q: Tensor, k: Tensor, v: Tensor, start: Tensor, **rates: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and last state by the chunked scan of the chain that the tuple derives."""
    c = chain(update, {"q": q, "k": k, "v": v, **rates})
    out, last = scan.chunked(c, start[:, None, :], q, size)
    return out, last[:, 0]


def passed_on(chunk: Chunk, size: int, start: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk formula applied to consecutive pieces, the last of which may be shorter: outputs and last state."""
    outputs, state = [], start
    for t in range(0, len(inputs[0]), size):
        out, state = chunk(state, *(x[t : t + size] for x in inputs))
        outputs.append(out)
    return torch.cat(outputs), state


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
    """The largest numerical rank of a block below the diagonal, M[i:, :i]."""
    ranks = []
    for i in range(1, len(mixer)):
        singular = torch.linalg.svdvals(mixer[i:, :i])
        ranks.append(int((singular > tolerance * singular[0]).sum()))
    return max(ranks)
