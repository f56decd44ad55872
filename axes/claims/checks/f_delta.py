"""Group F, the delta rule: its parallel form, WY and UT representations, chunk forms, and products of reflections."""

from __future__ import annotations

import torch
from torch import Tensor

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, holds
from axes.claims.tools.calculus import gradient
from axes.claims.tools.chunks import by_chunks, decay_mask, delta_chunk, furthest, householder_product, passed_on, ut
from axes.claims.tools.descent import squared_error
from axes.claims.tools.float64 import eye, ones, zeros
from axes.claims.tools.matrices import rank, unit_rows
from axes.claims.tools.positions import causal
from axes.claims.tools.tuples import (
    DELTA,
    GATED,
    LINEAR,
    PREV,
    REFLECTIVE,
    delta_product,
    layer_tuple,
    one_step,
    recurrent,
    walked,
)

Tokens = tuple[Tensor, Tensor, Tensor, Tensor]


def _tokens(draw: Draw, n: int, d_k: int = 6, d_v: int = 4, high: float = 1.0) -> Tokens:
    """Queries, keys of length one, values, and rates in (0, high)."""
    return draw.normal(n, d_k), draw.unit(n, d_k), draw.normal(n, d_v), draw.uniform(n, high=high)


def _printed(q: Tensor, k: Tensor) -> Tensor:
    """A = (Q K^T * L)(I + K K^T * (L - I))^-1 * M, as printed."""
    return (causal(q @ k.mT) @ torch.linalg.inv(eye(len(k)) + (k @ k.mT).tril(-1))).tril()


def _parallel(q: Tensor, k: Tensor, beta: Tensor) -> Tensor:
    """The same for any rates: (Q K^T * L)(I + diag(beta)(K K^T * (L - I)))^-1 diag(beta)."""
    strict = (beta[:, None] * (k @ k.mT)).tril(-1)
    return causal(q @ k.mT) @ torch.linalg.solve(eye(len(k)) + strict, torch.diag(beta))


@check
def F07(draw: Draw) -> Findings:
    n = 24
    q, k, v, beta = _tokens(draw, n)
    long, start, one = k * draw.uniform(n, 1, low=0.5, high=1.2), draw.normal(4, 6), ones(n)

    def layer(keys: Tensor, rates: Tensor, first: Tensor | None = None) -> Tensor:
        return recurrent(layer_tuple(DELTA), q, keys, v, first, beta=rates)[0]

    whole, rated, started = layer(k, one), layer(k, beta), layer(k, beta, start)
    scores, printed, general = causal(q @ k.mT), _printed(q, k), _parallel(q, k, beta)
    inverse, correlated = (torch.linalg.inv(eye(n) + (k @ k.mT).tril(x)) for x in (-1, 0))
    chunks = by_chunks(layer_tuple(DELTA), n, q, k, v, start, beta=beta)[0]
    yield agree("beta = 1, unit keys", whole, printed @ v, 1e-10)
    yield agree("beta = 1, other lengths", layer(long, one), _printed(q, long) @ v, 1e-10)
    yield agree("the last mask is redundant", printed, scores @ inverse, 1e-12)
    yield agree("any rates, with diag(beta) twice", rated, general @ v, 1e-10)
    yield agree("any start, with (Q - A K) S_0^T", started, general @ v + (q - general @ k) @ start.mT, 1e-10)
    yield agree("the chunked scan of all tokens", started, chunks, 1e-10)
    yield differ("printed form at rates in (0, 1)", rated, printed @ v, 0.1)
    yield differ("printed form from a start that is not zero", layer(k, one, start), printed @ v, 0.1)
    yield differ("masked at the end only", whole, causal(q @ k.mT @ inverse) @ v, 0.1)
    yield differ("the diagonal kept in the inverse", whole, scores @ correlated @ v, 0.1)


@check
def F08(draw: Draw) -> Findings:
    n = draw.integer(10, 40)
    q, k, v, beta = _tokens(draw, n)
    alpha = draw.uniform(n, low=0.3)
    wanted = (_parallel(q, k, beta) * decay_mask(alpha)) @ v
    rates = {"decay": alpha.log(), "beta": beta}
    yield agree("the gate first", recurrent(layer_tuple(GATED), q, k, v, **rates)[0], wanted, 1e-11)
    yield differ("the gradient first", recurrent(layer_tuple(PREV), q, k, v, **rates)[0], wanted, 0.01)


@check
def F09(draw: Draw) -> Findings:
    n = 20
    _, k, v, beta = _tokens(draw, n, high=2.0)
    reached = walked(layer_tuple(REFLECTIVE), k=k, v=v, beta=beta)

    def unrolled(t: int, descending: bool) -> Tensor:
        writes = [
            beta[i] * torch.outer(v[i], k[i]) @ householder_product(k[i + 1 : t], beta[i + 1 : t], descending)
            for i in range(t)
        ]
        return torch.stack(writes).sum(0)

    for t in (1, 2, 9, n):
        yield agree(f"after {t} tokens", reached[t - 1], unrolled(t, False), 1e-11)
    yield differ("factors descending", reached[8], unrolled(9, True), 0.01)


def _pseudo(k: Tensor, v: Tensor, beta: Tensor, start: Tensor) -> Tensor:
    """beta_t (v_t - S_{t-1} k_t) from the layer's own states."""
    after = walked(layer_tuple(REFLECTIVE), start, k=k, v=v, beta=beta)
    before = torch.cat((start[None], after[:-1]))
    return beta[:, None] * (v - (before @ k[..., None])[..., 0])


@check
def F10(draw: Draw) -> Findings:
    q, k, v, beta = _tokens(draw, 40, high=2.0)
    reads, last = recurrent(layer_tuple(REFLECTIVE), q, k, v, beta=beta)
    u = ut(k, beta) @ v
    yield agree("U from the states against T V", _pseudo(k, v, beta, zeros(4, 6)), u, 1e-11)
    yield agree("S = U^T K", last, u.mT @ k, 1e-11)
    yield agree("linear attention over pseudo-values", reads, recurrent(layer_tuple(LINEAR), q, k, u)[0], 1e-11)


def _wy(k: Tensor, beta: Tensor) -> Tensor:
    """w_t = beta_t (k_t - sum_{i<t} (k_i . k_t) w_i), one after another."""
    w = torch.zeros_like(k)
    for t in range(len(k)):
        w[t] = beta[t] * (k[t] - (k[:t] @ k[t]) @ w[:t])
    return w


@check
def F11(draw: Draw) -> Findings:
    n, d = 30, 6
    _, k, _, beta = _tokens(draw, n, high=2.0)
    w = _wy(k, beta)
    products = walked(layer_tuple(REFLECTIVE), eye(d), k=k, v=zeros(n, d), beta=beta)
    sums = eye(d) - torch.cumsum(w[:, :, None] * k[:, None, :], 0)
    yield agree("all partial products", products, sums, 1e-11)
    yield agree("written out", householder_product(k, beta), sums[-1], 1e-11)
    yield differ("factors descending", householder_product(k[:4], beta[:4], True), sums[3], 1e-3)


@check
def F12(draw: Draw) -> Findings:
    n, d = 32, 6
    _, k, v, beta = _tokens(draw, n, high=2.0)
    transform, erased = ut(k, beta), _pseudo(k, zeros(n, d), beta, eye(d))
    yield agree("T from the layer", _pseudo(k, eye(n), beta, zeros(n, d)), transform, 1e-11)
    yield agree("U = T V", _pseudo(k, v, beta, zeros(v.shape[1], d)), transform @ v, 1e-11)
    yield agree("W = T K against the layer", -erased, transform @ k, 1e-11)
    yield agree("W = T K against the recursion", _wy(k, beta), transform @ k, 1e-11)


@check
def F13(draw: Draw) -> Findings:
    q, k, v, beta = _tokens(draw, 37, high=2.0)
    start, update = draw.normal(4, 6), layer_tuple(REFLECTIVE)
    wanted = recurrent(update, q, k, v, start, beta=beta)
    for size in (1, 2, 5, 8, 32):
        formula = passed_on(delta_chunk, size, start, q, k, v, beta)
        scanned = by_chunks(update, size, q, k, v, start, beta=beta)
        yield holds(f"formula, C = {size}", furthest(formula, wanted), 1e-10)
        yield holds(f"chunked scan, C = {size}", furthest(scanned, wanted), 1e-10)
    late = delta_chunk(delta_chunk(start, q, k, v, beta)[1], q, k, v, beta)[0]
    yield differ("with the state after the chunk", late, wanted[0], 0.01)


def _gated_chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """`delta_chunk` with gates before the gradient: ratios of cumulated gates from differences of logs."""
    total = gate.cumsum(0)
    future = torch.ones(len(k), len(k), dtype=torch.bool).triu(1)
    ratio = torch.exp((total[:, None] - total[None, :]).masked_fill(future, -torch.inf))
    gamma, strict = total.exp(), (beta[:, None] * (k @ k.mT) * ratio).tril(-1)
    t = torch.linalg.solve_triangular(eye(len(k)) + strict, torch.diag(beta), upper=False)
    z = t @ v - (t @ (gamma[:, None] * k)) @ state.mT
    out = gamma[:, None] * (q @ state.mT) + ((q @ k.mT) * ratio) @ z
    return out, gamma[-1] * state + (ratio[-1][:, None] * z).mT @ k


@check
def F14(draw: Draw) -> Findings:
    q, k, v, beta = _tokens(draw, 37)
    start, update, gate = draw.normal(4, 6), layer_tuple(GATED), draw.uniform(37, low=0.2).log()
    almost, closed = gate.clone(), gate.clone()
    almost[5], almost[6], almost[20] = -400.0, -500.0, -30.0
    closed[5], closed[20] = -torch.inf, -torch.inf
    for name, logs, sizes in (
        ("open", gate, (1, 4, 7, 32)),
        ("nearly closed", almost, (7, 32)),
        ("closed", closed, (7, 32)),
    ):
        wanted = recurrent(update, q, k, v, start, beta=beta, decay=logs)
        for size in sizes:
            scanned = by_chunks(update, size, q, k, v, start, beta=beta, decay=logs)
            yield holds(f"chunked scan, {name}, C = {size}", furthest(scanned, wanted), 1e-10)
            if name != "closed":  # differences of infinite logs
                formula = passed_on(_gated_chunk, size, start, q, k, v, beta, logs)
                yield holds(f"formula, {name}, C = {size}", furthest(formula, wanted), 1e-10)


def _after(k: Tensor, v: Tensor, beta: Tensor, start: Tensor) -> Tensor:
    """The state after the writes of one token of DeltaProduct."""
    if len(k) == 1:
        return one_step(layer_tuple(REFLECTIVE), start, k=k[0], v=v[0], beta=beta[0])
    return one_step(delta_product(len(k)), start, k=k, v=v, beta=beta)


@check
def F24(draw: Draw) -> Findings:
    d = 5
    start = draw.normal(d, d)
    k = unit_rows(draw.unit(d) + draw.unit(3, d))  # that overlap: the order of orthogonal reflections does not matter
    v, beta = draw.normal(3, d), draw.uniform(3, low=0.3, high=1.8)
    step = one_step(layer_tuple(REFLECTIVE), start, k=k[0], v=v[0], beta=beta[0])
    factor = eye(d) - beta[0] * torch.outer(k[0], k[0])
    write = beta[0] * torch.outer(v[0], k[0])
    right = start - beta[0] * gradient(squared_error(k[0], v[0]), start)
    for n in (1, 2, 3):
        made = _after(k[:n], v[:n], beta[:n], torch.zeros_like(start))
        writes = [beta[j] * torch.outer(v[j], k[j]) for j in range(n)]
        later = sum((w @ householder_product(k[j + 1 : n], beta[j + 1 : n]) for j, w in enumerate(writes)), 0 * start)
        earlier = sum((w @ householder_product(k[:j], beta[:j]) for j, w in enumerate(writes)), 0 * start)
        a = householder_product(k[:n], beta[:n])
        yield agree(f"B over later steps, n_h = {n}", made, later, 1e-11)
        yield agree(f"S A + B, n_h = {n}", _after(k[:n], v[:n], beta[:n], start), start @ a + later, 1e-11)
        if n > 1:
            yield differ(f"B as printed, n_h = {n}", made, earlier, 1e-4)
    yield agree("one step against autograd", step, right, 1e-12)
    yield agree("reflection on the right", step, start @ factor + write, 1e-12)
    yield differ("reflection on the left", step, factor @ start + write, 0.05)


@check
def F25(draw: Draw) -> Findings:
    d, n = 6, 3
    k, v, beta = draw.unit(n, d), draw.normal(n, d), draw.uniform(n, low=0.2, high=0.8)
    nothing, projected = torch.zeros_like(v), beta.clone()
    projected[1] = 1.0
    singular = _after(k, nothing, projected, eye(d))
    a, b = _after(k, nothing, beta, eye(d)), _after(k, v, beta, 0 * eye(d))
    yield breaks("rank of A above n_h", rank(a) - n, 1.0)
    yield agree("|rank A - d|", rank(a), d, 0.0)
    yield agree("|rank (I - A) - n_h|", rank(eye(d) - a), n, 0.0)
    yield agree("|rank B - n_h|", rank(b), n, 0.0)
    yield agree("|rank A - (d - 1)| when one beta is 1", rank(singular), d - 1, 0.0)
