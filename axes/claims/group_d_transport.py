"""Group D, maps as positions: rotations, products of Householder maps, closure, and the Gram matrix of stored keys."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds
from axes.claims.group_a_tools import layer_tuple
from axes.claims.group_d_tools import (
    additive,
    causal,
    effective_keys,
    eye,
    gram_change,
    logits_of,
    one_map,
    softmax_rows,
    unit_rows,
    weights,
)
from axes.claims.sources import BLOG
from axes.core.geometry import Birkhoff
from axes.core.monoids import (
    Diagonal,
    Element,
    GeneralLinear,
    Householder,
    Identity,
    Monoid,
    Product,
    Rotation,
    Scalar,
    rotate,
)
from axes.core.rates import Per
from axes.errors import IllegalUpdate
from axes.routes import dispatch

_SECTION = "Retention and forgetting"
_TABLE = _SECTION + ", table of transition monoids"
_CRUCIAL = _SECTION + ", data-independent and data-dependent transitions"
_ANGLES = Per("angle", "pair", "real")


def complexed(x: Tensor) -> Tensor:
    """Pairs (x_j, x_{j + d/2}) as complex numbers: a row times R(theta) is a number times exp(i theta)."""
    a, b = x.chunk(2, -1)
    return torch.complex(a, b)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Numbers times exp(-i angle): R x for x as a column."""
    return complexed(x) * torch.exp(-1j * angles)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Inner products (T, T) of complex queries and keys."""
    return (q @ k.mH).real


@claim(
    "D09",
    "The transition S_t = S_{t-1} R + v k^T by a constant rotation is RoPE: q~_t = R^t q_t and k~_j = R^j k_j.",
    Verdict.CONDITIONAL,
    BLOG(_TABLE + ", rotations"),
    "axes.sequence.RoPE, axes.monoids.Rotation",
    conditions="attention without normalisation (RoPE as published adds the softmax), and keys turned by R itself, not "
    "by its transpose",
    derivation="A pair written at j has been multiplied by R^(t-j) when it is read: k_j^T R^(t-j) q_t = (R^j k_j)^T "
    "(R^t q_t), since R^T = R^-1. The transpose turns the other way.",
)
def D09(draw: Draw) -> tuple[Finding, ...]:
    length, d = 16, 6
    q, k = draw.normal(length, d), draw.normal(length, d)
    time = torch.arange(1, length + 1, dtype=torch.float64)[:, None]
    published = 10000.0 ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    findings: list[Finding] = []
    for name, monoid, theta in (
        ("geometric angles", Rotation(), published),
        ("angle 0.7", Rotation(0.7, uniform=True), torch.full((d // 2,), 0.7, dtype=torch.float64)),
    ):
        read = weights(additive(monoid), q=q, k=k)
        closed = causal(scores(turned(q, time * theta), turned(k, time * theta)))
        other = causal(scores(turned(q, -time * theta), turned(k, -time * theta)))
        findings += [
            holds(f"{name}: linear attention under R against turned keys and queries", gap(read, closed), 1e-11),
            breaks(f"{name}: with the transpose", gap(read, other), 1.0),
        ]
    attended = weights(layer_tuple("rope"), q=q, k=k)
    logits = scores(turned(q, time * published), turned(k, time * published))
    return (
        *findings,
        holds("logits stored by RoPE", gap(weights(logits_of("rope"), q=q, k=k), causal(logits)), 1e-11),
        holds("RoPE against the softmax of these logits", gap(attended, softmax_rows(logits / math.sqrt(d))), 1e-12),
        breaks(
            "RoPE with its softmax against the recurrence", gap(attended, weights(additive(Rotation()), q=q, k=k)), 1.0
        ),
    )


@claim(
    "D10",
    "Complex, data-dependent gates are rotations by cumulative angles, next to a scalar decay.",
    Verdict.EXACT,
    BLOG(_TABLE + ", complex-valued gates"),
    "axes.monoids.Rotation, axes.monoids.Product",
    derivation="Rotations of the same pairs commute, so that their product turns by the sum of the angles. A gate r "
    "exp(i theta) is a decay and a rotation; the rotation alone is an isometry and forgets nothing.",
)
def D10(draw: Draw) -> tuple[Finding, ...]:
    length, d = 20, 6
    q, k, angle = draw.normal(length, d), draw.normal(length, d), 2 * draw.normal(length, d // 2)
    g = draw.uniform(length, low=0.5, high=1.0).log()
    total = angle.cumsum(0)
    turning = weights(additive(Rotation(_ANGLES)), q=q, k=k, angle=angle)
    gated = additive(Product((Scalar("decay"), Rotation(_ANGLES))))
    read = weights(gated, q=q, k=k, angle=angle, decay=g)
    values, state, outputs = draw.normal(length, 3), torch.zeros(3, d // 2, dtype=torch.complex128), []
    for t in range(length):  # the complex recurrence itself
        state = state * torch.exp(torch.complex(g[t], angle[t])) + values[t][:, None] * complexed(k[t])
        outputs.append((state * complexed(q[t]).conj()).real.sum(-1))
    given = {"q": q, "k": k, "v": values, "angle": angle, "decay": g}
    out = dispatch.run(gated, {n: x[None] for n, x in given.items()}, time=1)[0][0]
    start = draw.normal(4, d)
    kept = start @ one_map(additive(Rotation(_ANGLES)), k=k[0], angle=angle[0])
    return (
        holds(
            "rotations against cumulative angles",
            gap(turning, causal(scores(turned(q, total), turned(k, total)))),
            1e-11,
        ),
        holds("with decay: outputs against the complex recurrence", gap(out, torch.stack(outputs)), 1e-11),
        holds("a rotation keeps the norm of a state", (kept.norm(dim=-1) - start.norm(dim=-1)).abs().max(), 1e-12),
        breaks("and a complex gate does not: largest change of a weight", gap(read, turning), 0.1),
    )


@claim(
    "D11",
    "With matrix transitions the logit is q_t^T P k_j, P the product of the transitions after j.",
    Verdict.CONDITIONAL,
    BLOG(_SECTION + ", multiplicative form"),
    "axes.sequence.RWKV7, axes.sequence.DeltaNet",
    conditions="for S_t = S_{t-1} A_t + v k^T, P is the descending product A_t^T ... A_{j+1}^T of transposes, unless "
    "the maps commute and are symmetric",
    derivation="The pair v_j k_j^T has become v_j k_j^T A_{j+1} ... A_t at time t: its score is k_j^T A_{j+1} ... A_t "
    "q_t, and a number equals its transpose.",
)
def D11(draw: Draw) -> tuple[Finding, ...]:
    length, d = 8, 5
    q, k, u = draw.normal(length, d), draw.normal(length, d), draw.unit(length, d)
    g, ones = draw.uniform(length, d, low=0.5).log(), torch.ones(length, dtype=torch.float64)
    left, right = draw.unit(length, d), 0.7 * draw.unit(length, d)
    dplr = [np.diag(np.exp(x)) + np.outer(a, b) for x, a, b in zip(g.numpy(), left.numpy(), right.numpy(), strict=True)]
    householder = [np.eye(d) - np.outer(x, x) for x in u.numpy()]
    read = weights(layer_tuple("rwkv7"), q=q, k=k, decay=g, a=left, b=right)
    erased = weights(layer_tuple("delta-net"), q=q, k=u, beta=ones)
    gla = weights(layer_tuple("gla"), q=q, k=k, decay=g)

    def formed(keys: Tensor, maps: list[np.ndarray], descending: bool, transposed: bool) -> Tensor:
        """q_t^T P k_j with P multiplied up from the maps after j."""
        out = torch.zeros(length, length, dtype=torch.float64)
        for t in range(length):
            for j in range(t + 1):
                run = [m.T if transposed else m for m in maps[j + 1 : t + 1]]
                p = functools.reduce(np.matmul, reversed(run) if descending else run, np.eye(d))
                out[t, j] = float(q[t].numpy() @ p @ keys[j].numpy())
        return out

    diagonal = [np.diag(x) for x in g.exp().numpy()]
    return (
        holds("RWKV-7: descending transposes", gap(read, formed(k, dplr, True, True)), 1e-10),
        breaks("RWKV-7: ascending product", gap(read, formed(k, dplr, False, False)), 0.1),
        breaks("RWKV-7: descending without transposes", gap(read, formed(k, dplr, True, False)), 0.1),
        breaks("RWKV-7: ascending transposes", gap(read, formed(k, dplr, False, True)), 0.1),
        holds("DeltaNet, symmetric maps: descending", gap(erased, formed(u, householder, True, False)), 1e-10),
        breaks("DeltaNet: ascending product", gap(erased, formed(u, householder, False, False)), 0.05),
        holds("GLA, maps that commute: ascending", gap(gla, formed(k, diagonal, False, False)), 1e-10),
    )


@claim(
    "D12",
    "DeltaNet is PaTH attention: both carry keys through products of Householder maps.",
    Verdict.CONDITIONAL,
    BLOG(_TABLE + ", Householder"),
    "axes.sequence.DeltaNet, axes.sequence.PaTH",
    conditions="PaTH's vectors are the keys, w_s = k_s; DeltaNet's write is not scaled (beta_j = 1 on the value); and "
    "no softmax is taken",
    derivation="The delta rule's weight of pair j is beta_j k_j^T prod (I - beta_s k_s k_s^T) q_t, PaTH's logit is "
    "k_j^T prod (I - beta_s w_s w_s^T) q_t.",
)
def D12(draw: Draw) -> tuple[Finding, ...]:
    length, d = 12, 5
    q, k, w = draw.normal(length, d), draw.unit(length, d), draw.unit(length, d)
    beta = draw.uniform(length, low=0.2, high=0.8)
    delta = weights(layer_tuple("delta-net"), q=q, k=k, beta=beta)
    stored = weights(logits_of("path"), q=q, k=k, w=k, beta=beta)
    apart = weights(logits_of("path"), q=q, k=k, w=w, beta=beta)
    attended = weights(layer_tuple("path"), q=q, k=k, w=k, beta=beta)
    closed = torch.zeros(length, length, dtype=torch.float64)
    for t in range(length):
        x = q[t]
        for j in range(t, -1, -1):  # apply the maps to the query, the last one first
            closed[t, j] = k[j] @ x
            x = x - beta[j] * (k[j] @ x) * k[j]
    return (
        holds("DeltaNet's weights against their closed form", gap(delta, closed * beta), 1e-11),
        holds("beta_j times PaTH's logits with w = k against DeltaNet", gap(stored * beta, delta), 1e-11),
        holds("PaTH against the softmax of the same logits", gap(attended, softmax_rows(closed / math.sqrt(d))), 1e-11),
        breaks("w drawn apart from k", gap(apart * beta, delta), 0.1),
        breaks("without beta on the write", gap(stored, delta), 0.1),
        breaks("with the softmax", gap(attended, delta), 0.1),
    )


@claim(
    "D13",
    "DeltaNet's transitions are Householder reflections.",
    Verdict.FALSE,
    BLOG(_TABLE + ", Householder reflections"),
    "axes.sequence.DeltaNet, axes.sequence.DeltaNetReflective",
    correction="they are generalised Householder maps: a reflection only at beta |k|^2 = 2, a projection at 1, a "
    "contraction in between",
    kind="LABEL",
    derivation="det(I - beta k k^T) = 1 - beta |k|^2, which is -1 at 2 alone; rates in (0, 1) on unit keys give "
    "determinants in (0, 1).",
)
def D13(draw: Draw) -> tuple[Finding, ...]:
    d = draw.integer(2, 8)
    k = draw.unit(d)
    betas = draw.uniform(5, low=0.05, high=1.0)
    maps = [one_map(layer_tuple("delta-net"), k=k, beta=b) for b in (*betas, torch.ones_like(betas[0]))]
    determinants = torch.stack([torch.linalg.det(a) for a in maps])
    reflected = one_map(layer_tuple("delta-net-reflective"), k=k, beta=torch.full_like(betas[0], 2.0))
    projected = maps[-1]
    return (
        breaks("beta in (0, 1]: how far the determinant stays from -1", (determinants + 1).min(), 0.999),
        breaks("beta = 1: |H H - I|", gap(projected @ projected, eye(d)), 1.0 / d - 1e-9),
        holds("beta in (0, 1]: determinant against 1 - beta", gap(determinants[:-1], 1 - betas), 1e-12),
        holds("beta = 1: H H - H", gap(projected @ projected, projected), 1e-12),
        holds("beta = 2: det + 1", (torch.linalg.det(reflected) + 1).abs(), 1e-12),
        holds("beta = 2: H H - I", gap(reflected @ reflected, eye(d)), 1e-12),
    )


def _elements(monoid: Monoid, signals: list[dict[str, Tensor]], like: Tensor) -> list[Element]:
    return [monoid.element(s, 1.0, like) for s in signals]


@claim(
    "D14",
    "The transition sets of the table are monoids: closed under products, with an identity.",
    Verdict.CONDITIONAL,
    BLOG(_TABLE + "; Taxonomy, column of monoids"),
    "axes.core.monoids",
    conditions="reflections stand for what they generate, the orthogonal matrices; scalars lie in (0, 1]; GL(n) stands "
    "for all matrices; doubly stochastic maps form a monoid and no group",
    derivation="Each set is closed under products and composition is matrix multiplication. Two reflections make a "
    "rotation (det +1), which is no reflection; nothing keeps a mixing matrix invertible; gates above one are closed "
    "but expand, and are refused.",
)
def D14(draw: Draw) -> tuple[Finding, ...]:
    n = 6
    like, mix = draw.normal(1, n), Per("mix", "mix", "real")
    families: dict[str, tuple[Monoid, list[dict[str, Tensor]]]] = {
        "identity": (Identity(), [{} for _ in range(3)]),
        "scalar": (Scalar("g"), [{"g": -draw.uniform(1)[0]} for _ in range(3)]),
        "diagonal": (Diagonal("g"), [{"g": -draw.uniform(n)} for _ in range(3)]),
        "rotation": (Rotation(_ANGLES), [{"angle": draw.normal(n // 2)} for _ in range(3)]),
        "doubly stochastic": (GeneralLinear(mix, Birkhoff(200)), [{"mix": draw.normal(n, n)} for _ in range(3)]),
        "generalised Householder": (
            Householder(Per("beta")),
            [{"w": draw.unit(n), "beta": draw.uniform(1, high=2.0)[0]} for _ in range(3)],
        ),
        "matrices": (GeneralLinear(mix), [{"mix": draw.normal(n, n)} for _ in range(3)]),
    }
    findings: list[Finding] = []
    one = Identity().element({}, 1.0, like)
    products: dict[str, Tensor] = {}
    for name, (monoid, signals) in families.items():
        a, b, c = _elements(monoid, signals, like)
        dense = [x.to_dense(n, like).numpy() for x in (a, b, c)]
        product = a.then(b).to_dense(n, like)
        products[name] = product
        findings += [
            holds(
                f"{name}: composition is the matrix product", gap(product, torch.from_numpy(dense[0] @ dense[1])), 1e-12
            ),
            holds(
                f"{name}: associative",
                gap(a.then(b).then(c).to_dense(n, like), a.then(b.then(c)).to_dense(n, like)),
                1e-11,
            ),
            holds(f"{name}: identity on the right", gap(a.then(one).to_dense(n, like), a.to_dense(n, like)), 1e-14),
            holds(f"{name}: identity on the left", gap(one.then(a).to_dense(n, like), a.to_dense(n, like)), 1e-14),
        ]
    off = 1 - eye(n)
    stochastic = products["doubly stochastic"]
    pairs = complexed(products["rotation"])[: n // 2, : n // 2].diagonal()
    first, second = (Householder(2.0).element({"w": draw.unit(n)}, 1.0, like) for _ in range(2))
    both = first.then(second).to_dense(n, like)
    singular = GeneralLinear(mix).element({"mix": draw.normal(n, 2) @ draw.normal(2, n)}, 1.0, like).to_dense(n, like)
    excess = (torch.linalg.matrix_norm(products["generalised Householder"], 2) - 1).clamp_min(0)
    try:
        Scalar(1.5)
        refused = 0.0
    except IllegalUpdate:
        refused = 1.0
    return (
        *findings,
        holds("scalars: a product stays a scalar in (0, 1]", _outside(products["scalar"], n), 1e-14),
        holds("diagonals: a product stays diagonal", (products["diagonal"] * off).abs().max(), 0.0),
        holds("rotations: a product still turns each pair", (pairs.abs() - 1).abs().max(), 1e-12),
        holds(
            "rotations: a product stays orthogonal", gap(products["rotation"] @ products["rotation"].mT, eye(n)), 1e-12
        ),
        holds("doubly stochastic: sums of a product", (stochastic.sum(-1) - 1).abs().max(), 1e-9),
        holds("doubly stochastic: sums of columns", (stochastic.sum(-2) - 1).abs().max(), 1e-9),
        holds("doubly stochastic: below zero", (-stochastic).clamp_min(0).max(), 0.0),
        holds("generalised Householder: excess of a product's norm over one", excess, 1e-12),
        holds("two reflections: an orthogonal matrix", gap(both @ both.mT, eye(n)), 1e-12),
        breaks("two reflections are no reflection: det + 1", torch.linalg.det(both) + 1, 1.999),
        breaks("doubly stochastic inverse: how far below zero", -torch.linalg.inv(stochastic).min(), 0.05),
        breaks(
            "GL(n): rank that an accepted mixing matrix lacks", float(n - torch.linalg.matrix_rank(singular)), n - 2.0
        ),
        breaks("positive scalars above one are refused", refused, 1.0),
    )


def _outside(x: Tensor, n: int) -> Tensor:
    """How far a matrix is from a multiple of I with a factor in [0, 1]."""
    a = x[0, 0]
    return (x - a * eye(n)).abs().max() + (a - 1).clamp_min(0) + (-a).clamp_min(0)


def _cosines(x: Tensor) -> Tensor:
    u = unit_rows(x)
    return u @ u.mT


@claim(
    "D15",
    "Data-independent transitions, RoPE's rotation and RetNet's decay, preserve the Gram matrix of the stored keys.",
    Verdict.FALSE,
    BLOG(_CRUCIAL),
    "axes.sequence.RoPE, axes.sequence.Mamba2, axes.sequence.RetNet",
    correction="scalar decay preserves the cosines, rotation the norms of the stored keys; neither preserves their "
    "Gram matrix",
    kind="MATH",
    derivation="Keys of different age have been through different powers: gamma^(N-i) gamma^(N-j) k_i . k_j, and k_i^T "
    "R^(j-i) k_j up to the sense of R. The first is a rescaling of every key, the second turns them against each "
    "other.",
)
def D15(draw: Draw) -> tuple[Finding, ...]:
    length, d = 16, 8
    k = draw.normal(length, d)
    decay, ones = torch.full((length,), math.log(0.9), dtype=torch.float64), torch.ones(length, dtype=torch.float64)
    faded = effective_keys(layer_tuple("mamba2"), k=k, decay=decay, dt=ones)
    stored = {"q": k[None], "k": k[None], "v": k[None]}
    keys, _, _, owed = dispatch.run(layer_tuple("rope"), stored, time=1)[1].theta  # what the layer keeps
    rotated = rotate(keys, owed[:, None])[0]
    both = effective_keys(layer_tuple("retnet"), k=k, decay=decay)
    theta = 10000.0 ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    ages = torch.arange(length, dtype=torch.float64)
    z = complexed(k)
    turn = torch.exp(1j * (ages[None, :] - ages[:, None])[..., None] * theta)  # older keys have turned further
    closed = (z[:, None].conj() * z[None].mul(turn.conj())).real.sum(-1)
    return (
        breaks("decay 0.9: relative change of the Gram matrix", gram_change(k, faded), 0.3),
        breaks("rotation: relative change of the Gram matrix", gram_change(k, rotated), 0.2),
        breaks("rotation: largest change of a cosine", gap(_cosines(k), _cosines(rotated)), 0.3),
        breaks("decay: largest relative change of a norm", (1 - faded.norm(dim=-1) / k.norm(dim=-1)).max(), 0.5),
        holds("decay: cosines", gap(_cosines(k), _cosines(faded)), 1e-12),
        holds("rotation: norms", gap(k.norm(dim=-1), rotated.norm(dim=-1)), 1e-12),
        holds("rotation: Gram matrix against k_i^T R^(j-i) k_j", gap(rotated @ rotated.mT, closed), 1e-11),
        holds("RetNet, both at once: cosines as under rotation", gap(_cosines(both), _cosines(rotated)), 1e-12),
    )


@claim(
    "D16",
    "Whether the Gram matrix of stored keys is preserved is decided by data-dependence of the transition.",
    Verdict.FALSE,
    BLOG(_CRUCIAL),
    "axes.monoids.Rotation, axes.sequence.DeltaNet, axes.sequence.DeltaNetReflective, axes.sequence.GLA",
    correction="one step preserves it for all stored keys if and only if A A^T = I, data-dependent or not",
    kind="MATH",
    derivation="Keys K as rows become K A and their Gram matrix K A A^T K^T. It equals K K^T for every K iff A is "
    "orthogonal: reflections that depend on the data are, constant decays are not.",
)
def D16(draw: Draw) -> tuple[Finding, ...]:
    n, d = 10, 6
    keys, k = draw.normal(n, d), draw.unit(d)
    one = torch.ones((), dtype=torch.float64)
    rates = draw.uniform(d, low=0.5, high=0.95).log()
    maps = {
        "constant rotation": (one_map(additive(Rotation()), k=k), True),
        "reflection by the key": (one_map(layer_tuple("delta-net-reflective"), k=k, beta=2 * one), True),
        "constant scalar": (one_map(additive(Scalar(0.9)), k=k), False),
        "constant diagonal": (one_map(layer_tuple("gla"), k=k, decay=rates), False),
        "projection by the key": (one_map(layer_tuple("delta-net"), k=k, beta=one), False),
    }
    findings: list[Finding] = []
    for name, (a, kept) in maps.items():
        changed, defect = gram_change(keys, keys @ a), gap(a @ a.mT, eye(d))
        if kept:
            findings += [
                holds(f"{name}: change of the Gram matrix", changed, 1e-12),
                holds(f"{name}: A A^T - I", defect, 1e-12),
            ]
        else:
            findings += [
                breaks(f"{name}: change of the Gram matrix", changed, 0.02),
                breaks(f"{name}: A A^T - I", defect, 0.05),
            ]
    return tuple(findings)
