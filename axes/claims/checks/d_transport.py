"""Group D, maps as positions: rotations, products of Householder maps, closure, and the Gram matrix of stored keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds
from axes.claims.tools.float64 import arange, eye, full, ones, zeros
from axes.claims.tools.matrices import beyond, rank, unit_rows
from axes.claims.tools.positions import (
    additive,
    causal,
    effective_keys,
    gram_change,
    logits_of,
    refused,
    softmax_rows,
    weights,
)
from axes.claims.tools.recurrence import recurrence
from axes.claims.tools.tuples import DELTA, GLA, MAMBA2, REFLECTIVE, dispatched, layer_tuple, transition
from axes.core.geometry import Birkhoff
from axes.core.monoids import Diagonal, Element, GeneralLinear, Householder, Identity, Monoid, Product, Rotation, Scalar
from axes.core.rates import Per

_ANGLES = Per("angle", "pair", "real")


def complexed(x: Tensor) -> Tensor:
    """Pairs (x_j, x_{j + d/2}) as complex numbers: a row times R(theta) is a number times exp(i theta)."""
    a, b = x.chunk(2, -1)
    return torch.complex(a, b)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Numbers times exp(-i angle): R x for x as a column."""
    return complexed(x) * torch.exp(-1j * angles)


def scores(q: Tensor, k: Tensor, angles: Tensor) -> Tensor:
    """Inner products (T, T) of queries and keys that are turned by angles (T, d/2)."""
    return (turned(q, angles) @ turned(k, angles).mH).real


@check
def D09(draw: Draw) -> Findings:
    length, d = 16, 6
    q, k = draw.normal(length, d), draw.normal(length, d)
    time = arange(1, length + 1)[:, None]
    published = 10000.0 ** (-2 * arange(d // 2) / d)
    for name, monoid, theta in (
        ("geometric angles", Rotation(), published),
        ("angle 0.7", Rotation(0.7, uniform=True), full(0.7, d // 2)),
    ):
        read = weights(additive(monoid), q=q, k=k)
        closed, other = causal(scores(q, k, time * theta)), causal(scores(q, k, -time * theta))
        yield agree(f"{name}: linear attention under R against turned keys and queries", read, closed, 1e-11)
        yield differ(f"{name}: with the transpose", read, other, 1.0)
    attended = weights(layer_tuple("rope"), q=q, k=k)
    logits = scores(q, k, time * published)
    yield agree("logits stored by RoPE", weights(logits_of("rope"), q=q, k=k), causal(logits), 1e-11)
    yield agree("RoPE against the softmax of these logits", attended, softmax_rows(logits / math.sqrt(d)), 1e-12)
    yield differ("RoPE with its softmax against the recurrence", attended, weights(additive(Rotation()), q=q, k=k), 1.0)


@check
def D10(draw: Draw) -> Findings:
    length, d = 20, 6
    q, k, angle = draw.normal(length, d), draw.normal(length, d), 2 * draw.normal(length, d // 2)
    g = draw.uniform(length, low=0.5, high=1.0).log()
    turning = weights(additive(Rotation(_ANGLES)), q=q, k=k, angle=angle)
    gated = additive(Product((Scalar("decay"), Rotation(_ANGLES))))
    read = weights(gated, q=q, k=k, angle=angle, decay=g)
    values = draw.normal(length, 3)
    writes, factors = values[:, :, None] * complexed(k)[:, None], torch.exp(torch.complex(g[:, None], angle))
    states = recurrence(lambda s, gate, write: s * gate + write, torch.zeros_like(writes[0]), factors, writes)
    outputs = (states * complexed(q).conj()[:, None]).real.sum(-1)
    out = dispatched(gated, q=q, k=k, v=values, angle=angle, decay=g)[0]
    start = draw.normal(4, d)
    kept = start @ transition(additive(Rotation(_ANGLES)), k=k[0], angle=angle[0])
    yield agree("rotations against cumulative angles", turning, causal(scores(q, k, angle.cumsum(0))), 1e-11)
    yield agree("with decay: outputs against the complex recurrence", out, outputs, 1e-11)
    yield agree("a rotation keeps the norm of a state", kept.norm(dim=-1), start.norm(dim=-1), 1e-12)
    yield differ("and a complex gate does not: largest change of a weight", read, turning, 0.1)


@check
def D11(draw: Draw) -> Findings:
    length, d = 8, 5
    q, k, u = draw.normal(length, d), draw.normal(length, d), draw.unit(length, d)
    g = draw.uniform(length, d, low=0.5).log()
    left, right = draw.unit(length, d), 0.7 * draw.unit(length, d)
    dplr = [np.diag(np.exp(x)) + np.outer(a, b) for x, a, b in zip(g.numpy(), left.numpy(), right.numpy(), strict=True)]
    householder = [np.eye(d) - np.outer(x, x) for x in u.numpy()]
    read = weights(layer_tuple("rwkv7"), q=q, k=k, decay=g, a=left, b=right)
    erased = weights(layer_tuple(DELTA), q=q, k=u, beta=ones(length))
    gla = weights(layer_tuple(GLA), q=q, k=k, decay=g)

    def formed(keys: Tensor, maps: list[np.ndarray], descending: bool, transposed: bool) -> Tensor:
        """q_t^T P k_j with P multiplied up from the maps after j."""
        out = zeros(length, length)
        for t in range(length):
            for j in range(t + 1):
                run = [m.T if transposed else m for m in maps[j + 1 : t + 1]]
                p = functools.reduce(np.matmul, reversed(run) if descending else run, np.eye(d))
                out[t, j] = float(q[t].numpy() @ p @ keys[j].numpy())
        return out

    diagonal = [np.diag(x) for x in g.exp().numpy()]
    yield agree("RWKV-7: descending transposes", read, formed(k, dplr, True, True), 1e-10)
    yield differ("RWKV-7: ascending product", read, formed(k, dplr, False, False), 0.1)
    yield differ("RWKV-7: descending without transposes", read, formed(k, dplr, True, False), 0.1)
    yield differ("RWKV-7: ascending transposes", read, formed(k, dplr, False, True), 0.1)
    yield agree("DeltaNet, symmetric maps: descending", erased, formed(u, householder, True, False), 1e-10)
    yield differ("DeltaNet: ascending product", erased, formed(u, householder, False, False), 0.05)
    yield agree("GLA, maps that commute: ascending", gla, formed(k, diagonal, False, False), 1e-10)


@check
def D12(draw: Draw) -> Findings:
    length, d = 12, 5
    q, k, w = draw.normal(length, d), draw.unit(length, d), draw.unit(length, d)
    beta = draw.uniform(length, low=0.2, high=0.8)
    delta = weights(layer_tuple(DELTA), q=q, k=k, beta=beta)
    stored = weights(logits_of("path"), q=q, k=k, w=k, beta=beta)
    apart = weights(logits_of("path"), q=q, k=k, w=w, beta=beta)
    attended = weights(layer_tuple("path"), q=q, k=k, w=k, beta=beta)
    closed = zeros(length, length)
    for t in range(length):
        x = q[t]
        for j in range(t, -1, -1):  # apply the maps to the query, the last one first
            closed[t, j] = k[j] @ x
            x = x - beta[j] * (k[j] @ x) * k[j]
    yield agree("DeltaNet's weights against their closed form", delta, closed * beta, 1e-11)
    yield agree("beta_j times PaTH's logits with w = k against DeltaNet", stored * beta, delta, 1e-11)
    yield agree("PaTH against the softmax of the same logits", attended, softmax_rows(closed / math.sqrt(d)), 1e-11)
    yield differ("w drawn apart from k", apart * beta, delta, 0.1)
    yield differ("without beta on the write", stored, delta, 0.1)
    yield differ("with the softmax", attended, delta, 0.1)


@check
def D13(draw: Draw) -> Findings:
    d = draw.integer(2, 8)
    k = draw.unit(d)
    betas = draw.uniform(5, low=0.05, high=1.0)
    maps = [transition(layer_tuple(DELTA), k=k, beta=b) for b in (*betas, torch.ones_like(betas[0]))]
    determinants = torch.stack([torch.linalg.det(a) for a in maps])
    reflected = transition(layer_tuple(REFLECTIVE), k=k, beta=torch.full_like(betas[0], 2.0))
    projected = maps[-1]
    yield breaks("beta in (0, 1]: how far the determinant stays from -1", (determinants + 1).min(), 0.999)
    yield differ("beta = 1: |H H - I|", projected @ projected, eye(d), 1.0 / d - 1e-9)
    yield agree("beta in (0, 1]: determinant against 1 - beta", determinants[:-1], 1 - betas, 1e-12)
    yield agree("beta = 1: H H - H", projected @ projected, projected, 1e-12)
    yield agree("beta = 2: det + 1", torch.linalg.det(reflected), -1, 1e-12)
    yield agree("beta = 2: H H - I", reflected @ reflected, eye(d), 1e-12)


@check
def D14(draw: Draw) -> Findings:
    n = 6
    like, mix = draw.normal(1, n), Per("mix", "mix", "real")
    families: dict[str, tuple[Monoid, Callable[[], dict[str, Tensor]]]] = {
        "identity": (Identity(), dict),
        "scalar": (Scalar("g"), lambda: {"g": -draw.uniform(1)[0]}),
        "diagonal": (Diagonal("g"), lambda: {"g": -draw.uniform(n)}),
        "rotation": (Rotation(_ANGLES), lambda: {"angle": draw.normal(n // 2)}),
        "doubly stochastic": (GeneralLinear(mix, Birkhoff(200)), lambda: {"mix": draw.normal(n, n)}),
        "generalised Householder": (
            Householder(Per("beta")),
            lambda: {"w": draw.unit(n), "beta": draw.uniform(1, high=2.0)[0]},
        ),
        "matrices": (GeneralLinear(mix), lambda: {"mix": draw.normal(n, n)}),
    }

    def dense(x: Element) -> Tensor:
        return x.to_dense(n, like)

    one = Identity().element({}, 1.0, like)
    products: dict[str, Tensor] = {}
    for name, (monoid, signal) in families.items():
        a, b, c = (monoid.element(signal(), 1.0, like) for _ in range(3))
        product = products[name] = dense(a.then(b))
        multiplied = torch.from_numpy(dense(a).numpy() @ dense(b).numpy())
        yield agree(f"{name}: composition is the matrix product", product, multiplied, 1e-12)
        yield agree(f"{name}: associative", dense(a.then(b).then(c)), dense(a.then(b.then(c))), 1e-11)
        yield agree(f"{name}: identity on the right", dense(a.then(one)), dense(a), 1e-14)
        yield agree(f"{name}: identity on the left", dense(one.then(a)), dense(a), 1e-14)
    stochastic, rotation = products["doubly stochastic"], products["rotation"]
    pairs = complexed(rotation)[: n // 2, : n // 2].diagonal()
    first, second = (Householder(2.0).element({"w": draw.unit(n)}, 1.0, like) for _ in range(2))
    both = dense(first.then(second))
    singular = dense(GeneralLinear(mix).element({"mix": draw.normal(n, 2) @ draw.normal(2, n)}, 1.0, like))
    excess = beyond(torch.linalg.matrix_norm(products["generalised Householder"], 2), 1)
    yield holds("scalars: a product stays a scalar in (0, 1]", _outside(products["scalar"], n), 1e-14)
    yield holds("diagonals: a product stays diagonal", products["diagonal"] * (1 - eye(n)), 0.0)
    yield holds("rotations: a product still turns each pair", pairs.abs() - 1, 1e-12)
    yield agree("rotations: a product stays orthogonal", rotation @ rotation.mT, eye(n), 1e-12)
    yield agree("doubly stochastic: sums of a product", stochastic.sum(-1), ones(n), 1e-9)
    yield agree("doubly stochastic: sums of columns", stochastic.sum(-2), ones(n), 1e-9)
    yield holds("doubly stochastic: below zero", beyond(-stochastic), 0.0)
    yield holds("generalised Householder: excess of a product's norm over one", excess, 1e-12)
    yield agree("two reflections: an orthogonal matrix", both @ both.mT, eye(n), 1e-12)
    yield breaks("two reflections are no reflection: det + 1", torch.linalg.det(both) + 1, 1.999)
    yield breaks("doubly stochastic inverse: how far below zero", -torch.linalg.inv(stochastic).min(), 0.05)
    yield breaks("GL(n): rank that an accepted mixing matrix lacks", n - rank(singular), n - 2.0)
    yield breaks("positive scalars above one are refused", refused(1.5), 1.0)


def _outside(x: Tensor, n: int) -> Tensor:
    """How far a matrix is from a multiple of I with a factor in [0, 1]."""
    a = x[0, 0]
    return (x - a * eye(n)).abs().max() + (a - 1).clamp_min(0) + (-a).clamp_min(0)


def _cosines(x: Tensor) -> Tensor:
    u = unit_rows(x)
    return u @ u.mT


@check
def D15(draw: Draw) -> Findings:
    length, d = 16, 8
    k = draw.normal(length, d)
    decay = full(math.log(0.9), length)
    faded = effective_keys(layer_tuple(MAMBA2), k=k, decay=decay, dt=ones(length))
    rotated = dispatched(layer_tuple("rope"), k=k, v=k)[1]  # the keys that the layer keeps
    both = effective_keys(layer_tuple("retnet"), k=k, decay=decay)
    theta = 10000.0 ** (-2 * arange(d // 2) / d)
    ages = arange(length)
    z = complexed(k)
    turn = torch.exp(1j * (ages[None, :] - ages[:, None])[..., None] * theta)  # older keys have turned further
    closed = (z[:, None].conj() * z[None].mul(turn.conj())).real.sum(-1)
    yield breaks("decay 0.9: relative change of the Gram matrix", gram_change(k, faded), 0.3)
    yield breaks("rotation: relative change of the Gram matrix", gram_change(k, rotated), 0.2)
    yield differ("rotation: largest change of a cosine", _cosines(k), _cosines(rotated), 0.3)
    yield breaks("decay: largest relative change of a norm", (1 - faded.norm(dim=-1) / k.norm(dim=-1)).max(), 0.5)
    yield agree("decay: cosines", _cosines(k), _cosines(faded), 1e-12)
    yield agree("rotation: norms", k.norm(dim=-1), rotated.norm(dim=-1), 1e-12)
    yield agree("rotation: Gram matrix against k_i^T R^(j-i) k_j", rotated @ rotated.mT, closed, 1e-11)
    yield agree("RetNet, both at once: cosines as under rotation", _cosines(both), _cosines(rotated), 1e-12)


@check
def D16(draw: Draw) -> Findings:
    n, d = 10, 6
    keys, k = draw.normal(n, d), draw.unit(d)
    rates = draw.uniform(d, low=0.5, high=0.95).log()
    maps = {
        "constant rotation": (transition(additive(Rotation()), k=k), True),
        "reflection by the key": (transition(layer_tuple(REFLECTIVE), k=k, beta=2 * ones()), True),
        "constant scalar": (transition(additive(Scalar(0.9)), k=k), False),
        "constant diagonal": (transition(layer_tuple(GLA), k=k, decay=rates), False),
        "projection by the key": (transition(layer_tuple(DELTA), k=k, beta=ones()), False),
    }
    for name, (a, kept) in maps.items():
        changed, defect = gram_change(keys, keys @ a), gap(a @ a.mT, eye(d))
        if kept:
            yield holds(f"{name}: change of the Gram matrix", changed, 1e-12)
            yield holds(f"{name}: A A^T - I", defect, 1e-12)
        else:
            yield breaks(f"{name}: change of the Gram matrix", changed, 0.02)
            yield breaks(f"{name}: A A^T - I", defect, 0.05)
