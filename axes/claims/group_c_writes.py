"""Group C, the delta rule: its transition, what it stores in one pass, and the pseudo-inverse it tends to."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from scipy import linalg
from torch import Tensor
from torch.autograd.functional import hessian

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, within
from axes.claims.capacity_measures import DELTA, LINEAR, delta_recall_law, matrix_curve, written
from axes.claims.group_a_tools import gradient, layer_tuple, one_step, squared_error
from axes.claims.sources import BLOG, SLIDES
from axes.core import reference
from axes.core.monoids import Householder
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.routes import dispatch

_HOW = "How to write"
RLS, GATED, DECAYED, LONGHORN = "rls-net", "gated-delta-net", "gated-delta-net-prev", "longhorn"


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def transition(name: str, k: Tensor, beta: Tensor) -> Tensor:
    """The matrix A with S -> S A of one datum without a value: what a step does to the identity."""
    nothing = torch.zeros_like(k)
    return one_step(layer_tuple(name), eye(k.shape[-1]), k=k, v=nothing, beta=beta)


def conditioned(draw: Draw, n: int, d: int, low: float = 0.6, high: float = 1.4) -> Tensor:
    """Keys (n, d) with singular values between two numbers."""
    r = min(n, d)
    return (draw.orthogonal(n)[:, :r] * draw.uniform(r, low=low, high=high)) @ draw.orthogonal(d)[:r]


def passes(
    keys: Tensor,
    values: Tensor,
    epochs: int,
    start: Tensor | None = None,
    scale: float = 1.0,
    rates: Tensor | None = None,
) -> Tensor:
    """The matrix after so many passes of the delta rule over a list (N, .), with beta |k|^2 = scale (times `rates`)."""
    k, v = keys.repeat(epochs, 1), values.repeat(epochs, 1)
    beta = scale / k.square().sum(-1) * (1.0 if rates is None else rates)
    signal = {"k": k[None], "v": v[None], "q": k[None], "beta": beta[None]}
    first = None if start is None else (start[None],)
    return dispatch.run(layer_tuple(DELTA), signal, time=1, weights=first)[1].theta[0][0]


def effective_keys(keys: Tensor, epochs: int = 1) -> Tensor:
    """Rows k~_i with S = sum_i v_i k~_i^T: the memory itself if the values are one-hot."""
    return passes(keys, eye(len(keys)), epochs)


def ridge_weights(keys: Tensor, values: Tensor, delta: float, decay: float = 0.0) -> Tensor:
    """The weights (N, d_v, d_k) of the recursive least squares layer after every token; decay: log of its gate."""
    update = layer_tuple(RLS)
    metric = dataclasses.replace(update.h, eps=delta)  # type: ignore[type-var]
    signal = {
        "k": keys,
        "v": values,
        "beta": torch.ones_like(keys[..., 0]),
        "decay": torch.full_like(keys[..., 0], decay),
    }
    return reference.run(dataclasses.replace(update, h=metric), signal)[0]


@claim(
    "C01",
    "With beta |k|^2 = 1 the transition I - beta k k^T is the orthogonal projection onto the complement of k.",
    Verdict.EXACT,
    BLOG(_HOW),
    "axes.sequence.DeltaNet, axes.monoids.Householder",
    derivation="k k^T / |k|^2 projects on k; one minus it on what is orthogonal to k. Hence P P = P = P^T and P k = 0.",
)
def C01(draw: Draw) -> tuple[Finding, ...]:
    d = draw.integer(1, 9)
    k = draw.normal(d)
    beta = 1 / (k @ k)
    p = transition("delta-net", k, beta)
    element = Householder(Per("beta")).element({"w": k, "beta": beta}, 1.0, k)
    rest = torch.from_numpy(linalg.null_space(k[None].numpy()))  # an orthonormal basis of the complement
    return (
        holds("DeltaNet's transition against a basis of the complement", gap(p, rest @ rest.mT), 1e-12),
        holds("generalised Householder element against the same", gap(element.to_dense(d, k), rest @ rest.mT), 1e-12),
        holds("P P - P", gap(p @ p, p), 1e-12),
        holds("P - P^T", gap(p, p.mT), 1e-12),
        holds("P k", (p @ k).abs().max() / (1 + k.norm()), 1e-12),
    )


@claim(
    "C02",
    "With beta |k|^2 = 2 the transition is a reflection.",
    Verdict.EXACT,
    BLOG(_HOW),
    "axes.sequence.DeltaNetReflective, axes.monoids.Householder",
    derivation="The eigenvalue along k is 1 - 2 = -1, all others are 1: H H = H H^T = I and det H = -1.",
)
def C02(draw: Draw) -> tuple[Finding, ...]:
    d = draw.integer(2, 9)
    k = draw.normal(d)
    k = k + 0.5 * k[0].sign() * eye(d)[0]  # LAPACK scales the first entry to one
    beta = 2 / (k @ k)
    h = transition("delta-net-reflective", k, beta)
    element = Householder(Per("beta")).element({"w": k, "beta": beta}, 1.0, k)
    unit = k / k[0]
    lapack = torch.linalg.householder_product(
        torch.cat((unit[:, None], torch.zeros(d, d - 1, dtype=torch.float64)), 1), (2 / (unit @ unit))[None]
    )
    return (
        holds("layer's transition against LAPACK's reflector", gap(h, lapack), 1e-11),
        holds("element of the monoid against the same", gap(element.to_dense(d, k), lapack), 1e-11),
        holds("H H - I", gap(h @ h, eye(d)), 1e-12),
        holds("H H^T - I", gap(h @ h.mT, eye(d)), 1e-12),
        holds("det H + 1", (torch.linalg.det(h) + 1).abs(), 1e-12),
    )


@claim(
    "C03",
    "I - beta k k^T is a generalised Householder matrix, a contraction for beta |k|^2 in [0, 2].",
    Verdict.EXACT,
    SLIDES("DeltaNet's expressiveness"),
    "axes.sequence.DeltaNet",
    derivation="Eigenvalue 1 with multiplicity d - 1 and 1 - beta |k|^2 along k. The matrix is symmetric, so its norm "
    "is max(1, |1 - beta |k|^2|), above one outside of [0, 2] only.",
)
def C03(draw: Draw) -> tuple[Finding, ...]:
    d, k = draw.integer(2, 9), torch.zeros(0)
    k = draw.normal(d)
    findings = []
    for x in (-0.1, 0.0, 0.5, 1.0, 1.5, 2.0, 2.1):
        a = transition("delta-net", k, x / (k @ k))
        expected = torch.cat((torch.ones(d - 1, dtype=torch.float64), torch.tensor([1.0 - x], dtype=torch.float64)))
        excess = float(torch.linalg.matrix_norm(a, 2)) - (1.0 if 0 <= x <= 2 else 1.1)
        findings += [
            holds("eigenvalues", gap(torch.linalg.eigvalsh(a), expected.sort().values), 1e-12),
            holds("norm: 1 inside of [0, 2], 1.1 at -0.1 and 2.1", abs(excess), 1e-12),
        ]
    return tuple(findings)


@claim(
    "C04",
    "Unrolled, the delta rule is an online Gram-Schmidt process on its keys.",
    Verdict.FALSE,
    BLOG(_HOW),
    "axes.sequence.DeltaNet",
    correction="a stored key is carried by a product of projections, k~_i = P_N ... P_{i+1} k_i: orthogonal to the "
    "last key, not to the others",
    kind="MATH",
    derivation="P_3 P_2 k_1 is orthogonal to k_3, but P_3 brings back a part along k_2: <k~_1, k~_2> = -<P_2 k_1, k_3> "
    "<k_3, k_2>. A projection onto the complement of a span needs the keys' inverse Gram matrix (least squares).",
)
def C04(draw: Draw) -> tuple[Finding, ...]:
    n, d = 16, 32
    three = conditioned(draw, 3, 5) + 0.6 * draw.unit(1, 5)  # keys that overlap
    three = three / three.norm(dim=-1, keepdim=True)
    k1, k2, k3 = three
    stored = effective_keys(three)
    carried = k1 - (k1 @ k2) * k2
    formula = -(carried @ k3) * (k3 @ k2)
    keys = draw.unit(n, d)
    kept = effective_keys(keys)
    unit = kept / kept.norm(dim=-1, keepdim=True)
    off = 1 - eye(n)
    # what Gram-Schmidt from the back would leave of the first key
    rest = torch.from_numpy(linalg.null_space(keys[1:].numpy()))
    crossed = ((unit @ unit.mT) * off).square().sum().div(n * (n - 1)).sqrt()
    raw = ((keys @ keys.mT) * off).square().sum().div(n * (n - 1)).sqrt()
    return (
        breaks("largest cosine of two stored keys, N = 16, d = 32", ((unit @ unit.mT) * off).abs().max(), 0.05),
        breaks("root mean square cosine, which Gram-Schmidt makes 0", crossed, 0.02),
        breaks("first stored key against Gram-Schmidt's", gap(kept[0], rest @ (rest.mT @ keys[0])), 0.02),
        holds("stored keys times the last key", (kept[:-1] @ keys[-1]).abs().max(), 1e-12),
        holds("three keys: <k~_1, k~_2> against its formula", (stored[0] @ stored[1] - formula).abs(), 1e-12),
        holds("cosines shrink: root mean square over that of the raw keys", crossed / raw, 0.75),
    )


@claim(
    "C05",
    "The delta rule drives the Gram matrix of its effective keys to the identity.",
    Verdict.FALSE,
    BLOG("The Gram matrix view"),
    "axes.sequence.DeltaNet",
    correction="iterated to convergence, effective and raw keys are bi-orthogonal, E K^T = I, and E E^T = (K K^T)^{-1}",
    kind="MATH",
    derivation="The limit stores the pseudo-inverse: E = (K^+)^T. Its Gram matrix is the inverse of the keys', the "
    "identity for orthonormal keys only.",
)
def C05(draw: Draw) -> tuple[Finding, ...]:
    n, d = 6, 12
    keys = conditioned(draw, n, d)
    stored = effective_keys(keys, 500)
    inverse = torch.from_numpy(linalg.inv((keys @ keys.mT).numpy()))
    orthonormal = draw.orthogonal(d)[:n]
    perfect = effective_keys(orthonormal, 2)
    return (
        breaks("E E^T - I", gap(stored @ stored.mT, eye(n)), 0.1),
        holds("E K^T - I", gap(stored @ keys.mT, eye(n)), 1e-10),
        holds("E E^T - (K K^T)^{-1}", gap(stored @ stored.mT, inverse), 1e-9),
        holds("orthonormal keys: E E^T - I", gap(perfect @ perfect.mT, eye(n)), 1e-12),
    )


@claim(
    "C06",
    "The delta rule recalls more than additive writes do.",
    Verdict.STATISTICAL,
    BLOG("Write strategies"),
    "axes.sequence.DeltaNet, axes.sequence.UnnormalisedLinearAttention",
    derivation="For random unit keys at load a = N/d, full steps and one pass, with E = exp(-a), the delta rule's "
    "relative error is 2 - E - (1 - E)(2 - E)/a, while additive writes have (N - 1)/d. A pair written at load t is "
    "found with error 2 - E + exp(t - 2a) - 2 exp(t - a): old pairs are forgotten, so that the total saturates at 2 "
    "instead of growing.",
    figure="capacity",
)
def C06(draw: Draw) -> tuple[Finding, ...]:
    d, batch, loads = 128, 40, (0.5, 1.0, 2.0, 4.0)
    counts = [round(a * d) for a in loads]
    keys, values = draw.unit(batch, counts[-1], d), draw.normal(batch, counts[-1], 6)
    delta, linear = (matrix_curve(name, keys, values, counts) for name in (DELTA, LINEAR))
    theory = delta_recall_law(np.array(loads))
    findings = []
    for i, a in enumerate(loads):
        findings += [
            within(f"delta rule at load {a:g}, minus theory", float(delta[i]) - theory[i], -0.02, 0.02),
            within(f"additive at load {a:g}, over (N - 1)/d", float(linear[i]) * d / (counts[i] - 1), 0.94, 1.06),
        ]
    n, a = 2 * d, 2.0
    memory = written(layer_tuple(DELTA), keys[:, :n], values[:, :n])
    error = (keys[:, :n] @ memory.mT - values[:, :n]).square().sum(-1).mean(0) / values.square().sum(-1).mean()
    age = (np.arange(n) + 1) / d
    profile = 2 - math.exp(-a) + np.exp(age - 2 * a) - 2 * np.exp(age - a)
    drift = np.abs((error.numpy() - profile).reshape(4, -1).mean(1)).max()
    return (*findings, within("error by age at load 2, quarters of the list, minus theory", float(drift), 0.0, 0.08))


def _randomised(draw: Draw, chains: int, steps: int) -> tuple[float, float]:
    """Relative squared distance after full steps in random order over unit keys, and Strohmer and Vershynin's bound."""
    n, d = 10, 6
    keys, target = draw.unit(n, d), draw.normal(2, d)
    order = torch.randint(n, (chains, steps), generator=draw.generator)
    memory = written(layer_tuple(DELTA), keys[order], (keys @ target.mT)[order])
    error = (memory - target).square().sum((-2, -1)).mean() / target.square().sum()
    smallest = torch.linalg.svdvals(keys)[-1]
    return float(error), float((1 - smallest**2 / n) ** steps)


@claim(
    "C07",
    "Passed over a fixed list again and again, the delta rule converges to the pseudo-inverse solution (Kaczmarz).",
    Verdict.CONDITIONAL,
    BLOG(_HOW),
    "axes.sequence.DeltaNet",
    conditions="the pairs are consistent, S_0 = 0, and 0 < beta |k|^2 < 2",
    derivation="Every step projects the error on the complement of its key and leaves rows of S in S_0 plus the span "
    "of the keys: the limit is the solution nearest to S_0, (K^+ V)^T + S_0 (I - K^+ K). Inconsistent pairs have no "
    "common solution, and full steps cycle; decaying steps end in least squares with every row divided by |k_i|.",
)
def C07(draw: Draw) -> tuple[Finding, ...]:
    d, d_v = 8, 3
    few, start = conditioned(draw, 4, d), draw.normal(d_v, d)
    values = draw.normal(4, d_v)
    solution = torch.from_numpy(linalg.lstsq(few.numpy(), values.numpy(), cond=1e-10)[0]).mT
    projector = few.mT @ torch.linalg.solve(few @ few.mT, few)
    many, truth = conditioned(draw, 14, d), draw.normal(d_v, d)
    consistent = passes(many, many @ truth.mT, 300)
    noisy = many @ truth.mT + draw.normal(14, d_v)
    least = torch.linalg.lstsq(many, noisy).solution.mT
    rows = many.norm(dim=-1, keepdim=True)
    weighted = torch.linalg.lstsq(many / rows, noisy / rows).solution.mT
    epochs = 1500
    decaying = 1 / (1 + torch.arange(epochs * 14) // 14 / 4).double()
    slow = passes(many, noisy, epochs, rates=decaying)
    error, bound = _randomised(draw, 64, 120)
    return (
        holds("N < d_k: limit against the least-norm solution", gap(passes(few, values, 400), solution), 1e-9),
        holds("half steps, the same", gap(passes(few, values, 800, scale=0.5), solution), 1e-9),
        holds("N > d_k, consistent: limit against the solution", gap(consistent, truth), 1e-8),
        holds(
            "S_0 (I - K^+ K) is added",
            gap(passes(few, values, 400, start), solution + start @ (eye(d) - projector)),
            1e-9,
        ),
        holds("random order: mean squared error over the bound", error / bound, 1.0),
        holds(
            "decaying steps: relative distance from row-normalised least squares",
            (slow - weighted).norm() / weighted.norm(),
            0.01,
        ),
        breaks(
            "inconsistent pairs: relative distance from least squares",
            (passes(many, noisy, 300) - least).norm() / least.norm(),
            0.05,
        ),
        breaks("S_0 not zero", gap(passes(few, values, 400, start), solution), 0.1),
        breaks("beta |k|^2 = 2.1", passes(few, values, 400, scale=2.1).abs().max(), 1e3),
    )


@claim(
    "C08",
    "With keys and values as rows, the pseudo-inverse memory is V K^+ and the ridge memory V K^T (K K^T + lambda "
    "I)^{-1}.",
    Verdict.FALSE,
    BLOG(_HOW + ", batch solutions"),
    "axes.sequence.RLSNet",
    correction="(K^+ V)^T, and V^T K (K^T K + lambda I)^{-1} = V^T (K K^T + lambda I)^{-1} K; the printed forms hold "
    "for keys and values as columns",
    kind="NOTN",
    derivation="K^+ is d_k x N and V is N x d_v: the product needs d_v = d_k, and is N x N then. Stationarity of the "
    "ridge cost reads S (K^T K + lambda I) = V^T K; pushing K through the inverse gives the form with N x N matrices.",
)
def C08(draw: Draw) -> tuple[Finding, ...]:
    n, d, weight = 7, 5, 0.1
    keys, values = draw.normal(n, d), draw.normal(n, d)
    inverse = torch.from_numpy(linalg.pinv(keys.numpy()))
    printed = values @ keys.mT @ torch.linalg.inv(keys @ keys.mT + weight * eye(n))
    least = torch.linalg.lstsq(keys, values).solution.mT
    stacked = torch.cat((keys, math.sqrt(weight) * eye(d)))  # ridge as least squares with more rows
    ridge = torch.linalg.lstsq(stacked, torch.cat((values, torch.zeros(d, d, dtype=torch.float64)))).solution.mT
    layer = ridge_weights(keys, values, weight)[-1]
    return (
        breaks("V K^+ against the least-squares memory", gap(values @ inverse, least), 1.0),
        breaks("V K^T (K K^T + lambda I)^{-1} against the ridge memory", gap(printed, ridge), 1.0),
        holds("(K^+ V)^T against least squares", gap((inverse @ values).mT, least), 1e-10),
        holds(
            "V^T K (K^T K + lambda I)^{-1} against the layer",
            gap(torch.linalg.solve(keys.mT @ keys + weight * eye(d), keys.mT @ values).mT, layer),
            1e-10,
        ),
        holds(
            "V^T (K K^T + lambda I)^{-1} K against the layer",
            gap(torch.linalg.solve(keys @ keys.mT + weight * eye(n), values).mT @ keys, layer),
            1e-10,
        ),
        holds("the layer against least squares with more rows", gap(layer, ridge), 1e-10),
    )


@claim(
    "C09",
    "Longhorn is Newton's method: full curvature.",
    Verdict.FALSE,
    BLOG("Write strategies, Newton; table of optimizers"),
    "axes.sequence.Longhorn, axes.sequence.RLSNet",
    correction="it is a proximal step, that is damped Newton on the curvature k k^T of one datum; full curvature is "
    "recursive least squares",
    kind="LABEL",
    derivation="The Hessian of one datum is k k^T, of rank one: Newton's step does not exist, with the pseudo-inverse "
    "it is a full step of the delta rule, and with damping 1/eta it is e k^T (k k^T + I/eta)^{-1} = eta/(1 + eta "
    "|k|^2) e k^T, Longhorn.",
)
def C09(draw: Draw) -> tuple[Finding, ...]:
    d_v, d, n, eta = 3, 5, 40, float(draw.uniform(low=0.3, high=3.0))
    s, k, v = draw.normal(d_v, d), draw.normal(d), draw.normal(d_v)
    loss = squared_error(k, v)
    curvature = hessian(loss, s)
    assert isinstance(curvature, Tensor)
    h, g = curvature.reshape(d_v * d, d_v * d), gradient(loss, s).flatten()
    pure = s - (torch.from_numpy(linalg.pinv(h.numpy(), rtol=1e-10)) @ g).reshape(d_v, d)
    damped = s - torch.linalg.solve(h + eye(d_v * d) / eta, g).reshape(d_v, d)
    longhorn, rate = layer_tuple(LONGHORN), torch.full((d_v,), eta, dtype=torch.float64)
    keys, truth = draw.normal(n, d), draw.normal(d_v, d)
    values = keys @ truth.mT + draw.normal(n, d_v)
    first = reference.run(longhorn, {"k": keys, "v": values, "beta": rate.expand(n, d_v)})[0]
    full = ridge_weights(keys, values, 1 / eta)
    return (
        breaks(
            "rank of the whole list's curvature, less the rank that a step of Longhorn sees",
            _rank(keys.mT @ keys) - _rank(torch.outer(k, k)),
            1,
        ),
        breaks(
            "Longhorn against full curvature after 40 pairs, relative",
            (first[-1] - full[-1]).norm() / full[-1].norm(),
            0.1,
        ),
        holds(
            "Longhorn against damped Newton, Hessian by autograd",
            gap(one_step(longhorn, s, k=k, v=v, beta=rate), damped),
            1e-11,
        ),
        holds(
            "pseudo-inverse Newton against a full step of the delta rule",
            gap(one_step(layer_tuple(DELTA), s, k=k, v=v, beta=1 / (k @ k)), pure),
            1e-11,
        ),
        holds("the first pair, where one datum is all there is", gap(first[0], full[0]), 1e-11),
    )


def _rank(x: Tensor) -> float:
    return float(torch.linalg.matrix_rank(x))


@claim(
    "C22",
    "The pseudo-inverse memory amplifies noise in the values by up to 1/sigma_min(K).",
    Verdict.EXACT,
    BLOG(_HOW + ", noise"),
    "axes.sequence.DeltaNet",
    derivation="|K^+|_2 is one over the smallest singular value that is not zero. Noise along its left singular "
    "vector is stored as a matrix of that norm; the delta rule, iterated, shows it.",
)
def C22(draw: Draw) -> tuple[Finding, ...]:
    findings = []
    for n, d, rank in ((4, 6, 4), (6, 5, 3)):
        s = draw.uniform(rank, low=0.7, high=1.4).sort(descending=True).values
        u = draw.orthogonal(n)[:, :rank]
        keys = (u * s) @ draw.orthogonal(d)[:rank]
        norm = float(linalg.norm(linalg.pinv(keys.numpy(), rtol=1e-10), 2))
        stored = passes(keys, u[:, -1:], 600)
        findings += [
            holds(f"|K^+|_2 sigma_min - 1, rank {rank}", abs(norm * float(s[-1]) - 1), 1e-10),
            holds(
                f"norm of stored unit noise times sigma_min - 1, rank {rank}", (stored.norm() * s[-1] - 1).abs(), 1e-9
            ),
        ]
    return tuple(findings)


def _limit(update: StateUpdate, keys: Tensor, values: Tensor, beta: Tensor, decay: float) -> Tensor:
    """Where passes over lists (B, N, .) end: the fixed point of the affine map of one pass, read off the layer."""
    b, n, d = keys.shape
    gates = torch.full((b, n), decay, dtype=torch.float64)
    signal = {"k": keys, "q": keys, "beta": beta.expand(b, n), "decay": gates}
    offset = dispatch.run(update, {**signal, "v": values}, time=1)[1].theta[0]
    start = eye(d).expand(b, d, d)
    linear = dispatch.run(update, {**signal, "v": torch.zeros_like(keys)}, time=1, weights=(start,))[1].theta[0]
    return torch.linalg.solve(eye(d) - linear, offset, left=False)


@claim(
    "C23",
    "For nearly collinear keys forgetting (alpha < 1) serves better than exact orthogonalisation.",
    Verdict.STATISTICAL,
    BLOG(_HOW + ", noise"),
    "axes.sequence.GatedDeltaNet, axes.sequence.GatedDeltaNetPrev, axes.sequence.RLSNet",
    derivation="The pseudo-inverse fits the noise along directions that the keys hardly span. A gate damps them, but "
    "full steps chase the noise of the latest pairs; ridge does not, and small steps with decay tend to ridge as "
    "O(eta).",
)
def C23(draw: Draw) -> tuple[Finding, ...]:
    problems, n, d, noise, delta = 60, 12, 16, 0.1, 0.1
    findings = []
    for spread in (0.2, 1.0):
        base, truth = draw.normal(problems, 1, d) / 4, draw.normal(problems, 1, d) / 4
        keys, test = (base + spread * draw.normal(problems, m, d) / 4 for m in (n, 40))
        values = keys @ truth.mT + noise * draw.normal(problems, n, 1)

        def error(memory: Tensor, test: Tensor = test, truth: Tensor = truth) -> float:
            return float((test @ (memory - truth).mT).square().mean())

        full = 1 / keys.square().sum(-1)
        kept = _limit(layer_tuple(GATED), keys, values, full, math.log(0.99))
        inverse = (torch.linalg.pinv(keys) @ values).mT
        update = layer_tuple(RLS)
        signal = {"k": keys, "v": values, "beta": torch.ones_like(full), "decay": torch.zeros_like(full)}
        state = reference.run(update, signal, time=1)[1]
        ridge = update.output(state, {"k": keys[:, 0], "v": values[:, 0]}).weights[0]
        findings += [
            within(
                f"error of the pseudo-inverse over that of alpha = 0.99, spread {spread:g}",
                error(inverse) / error(kept),
                1.2,
                100.0,
            ),
            within(
                f"error of alpha = 0.99 over that of ridge, spread {spread:g}", error(kept) / error(ridge), 1.0, 50.0
            ),
        ]
        if spread == 1.0:
            etas = (0.1, 0.05, 0.02, 0.01)
            off = []
            for eta in etas:
                slow = _limit(
                    layer_tuple(DECAYED),
                    keys,
                    values,
                    torch.tensor(eta, dtype=torch.float64),
                    math.log1p(-eta * delta / n),
                )
                off.append(float((slow - ridge).norm() / ridge.norm()))
            slope = float(np.polyfit(np.log(etas), np.log(off), 1)[0])
            findings.append(
                within("exponent of eta in the distance of small steps with decay from ridge", slope, 0.8, 1.2)
            )
    return tuple(findings)


def storkey_capacity(draw: Draw, d: int, batch: int) -> float:
    """The number of random +-1 patterns of which half are fixed points of Storkey's rule, interpolated.

    W_ij grows by (x_i x_j - x_i h_ji - h_ij x_j) / d, h_ij the field of i without the entries i and j.
    """
    scale = d / math.sqrt(2 * math.log(d))
    counts = [round(f * scale) for f in (1.4, 1.6, 1.8)]
    patterns = (draw.uniform(batch, counts[-1], d) < 0.5).float() * 2 - 1
    w, shares = torch.zeros(batch, d, d), []
    for n, x in enumerate(patterns.unbind(1), start=1):
        own = w.diagonal(dim1=-2, dim2=-1) * x
        field = (w @ x[..., None])[..., 0] - own
        h = field[..., :, None] - w * x[..., None, :] + torch.diag_embed(own)
        w = w + (x[..., :, None] * (x[..., None, :] - h.mT) - h * x[..., None, :]) / d
        if n in counts:
            stored = patterns[:, :n]
            fields = stored @ w.mT - stored * w.diagonal(dim1=-2, dim2=-1)[..., None, :]
            shares.append(float((fields * stored > 0).all(-1).double().mean()))
    return float(np.interp(-0.5, [-x for x in shares], counts))


@claim(
    "C24",
    "Along the write strategies capacity jumps from O(d / log d) to O(d) (Storkey) to exponential in d.",
    Verdict.FALSE,
    BLOG("Write strategies, capacity"),
    "none: Storkey's write acts on both sides of the state at once, which no tuple does",
    correction="d/(2 ln d) for additive writes, d/sqrt(2 ln d) up to a constant for Storkey's rule, d for the "
    "pseudo-inverse",
    kind="MATH",
    derivation="Storkey's local field correction removes part of the cross-talk: a pattern survives in all d bits up "
    "to N of the order d/sqrt(2 ln d), still falling behind d. Only the pseudo-inverse is linear in d.",
)
def C24(draw: Draw) -> tuple[Finding, ...]:
    sizes = (64, 128, 256)
    found = [storkey_capacity(draw, d, 8192 // d**2 * 20 if d < 128 else 8 * 256**2 // d**2) for d in sizes]
    shares = [n / d for n, d in zip(found, sizes, strict=True)]
    constants = [n * math.sqrt(2 * math.log(d)) / d for n, d in zip(found, sizes, strict=True)]
    return (
        breaks("N/d at d = 64 over N/d at d = 256 (1 if O(d))", shares[0] / shares[2], 1.08),
        holds("spread of N sqrt(2 ln d)/d over d = 64, 128, 256", max(constants) / min(constants) - 1, 0.08),
        holds("its mean less 1.63", abs(sum(constants) / 3 - 1.63), 0.1),
    )
