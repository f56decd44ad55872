"""Group C, the delta rule: its transition, what it stores in one pass, and the pseudo-inverse it tends to."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import linalg
from torch import Tensor

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, holds, within
from axes.claims.tools.calculus import curvature, gradient
from axes.claims.tools.capacity import matrix_curve, written
from axes.claims.tools.descent import squared_error
from axes.claims.tools.fits import exponent, half_count
from axes.claims.tools.float64 import eye, full, ones, tensor, zeros
from axes.claims.tools.matrices import least_squares, rank, relative, unit_rows
from axes.claims.tools.tuples import (
    DELTA,
    GATED,
    LINEAR,
    LONGHORN,
    PREV,
    REFLECTIVE,
    RLS,
    dispatched,
    layer_tuple,
    one_step,
    ridge_path,
    transition,
    walked,
)
from axes.core import reference
from axes.core.monoids import Householder
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.routes import dispatch
from axes.tasks.capacity import delta_recall_law


def passes(
    keys: Tensor, values: Tensor, epochs: int, start: Tensor | None = None, scale: Tensor | float = 1.0
) -> Tensor:
    """The matrix after so many passes of the delta rule over a list (N, .), with beta |k|^2 = scale."""
    k, v = keys.repeat(epochs, 1), values.repeat(epochs, 1)
    return dispatched(layer_tuple(DELTA), start, k=k, v=v, beta=scale / k.square().sum(-1))[1]


def stored_keys(keys: Tensor, epochs: int = 1) -> Tensor:
    """Rows k~_i with S = sum_i v_i k~_i^T: the memory itself if the values are one-hot."""
    return passes(keys, eye(len(keys)), epochs)


def _complement(rows: Tensor) -> Tensor:
    """The projection onto what is orthogonal to all rows, by a basis."""
    basis = torch.from_numpy(linalg.null_space(rows.numpy()))
    return basis @ basis.mT


def _mean_cosine(rows: Tensor) -> Tensor:
    """The root mean square of the inner products of different unit rows."""
    n = len(rows)
    return ((rows @ rows.mT) * (1 - eye(n))).square().sum().div(n * (n - 1)).sqrt()


@check
def C01(draw: Draw) -> Findings:
    d = draw.integer(1, 9)
    k = draw.normal(d)
    beta = 1 / (k @ k)
    p = transition(layer_tuple(DELTA), k=k, beta=beta)
    element = Householder(Per("beta")).element({"w": k, "beta": beta}, 1.0, k)
    yield agree("DeltaNet's transition against a basis of the complement", p, _complement(k[None]), 1e-12)
    yield agree("generalised Householder element against the same", element.to_dense(d, k), _complement(k[None]), 1e-12)
    yield agree("P P - P", p @ p, p, 1e-12)
    yield agree("P - P^T", p, p.mT, 1e-12)
    yield holds("P k", (p @ k).abs().max() / (1 + k.norm()), 1e-12)


@check
def C02(draw: Draw) -> Findings:
    d = draw.integer(2, 9)
    k = draw.normal(d)
    k = k + 0.5 * k[0].sign() * eye(d)[0]  # LAPACK scales the first entry to one
    beta = 2 / (k @ k)
    h = transition(layer_tuple(REFLECTIVE), k=k, beta=beta)
    element = Householder(Per("beta")).element({"w": k, "beta": beta}, 1.0, k)
    unit = k / k[0]
    lapack = torch.linalg.householder_product(torch.cat((unit[:, None], zeros(d, d - 1)), 1), (2 / (unit @ unit))[None])
    yield agree("layer's transition against LAPACK's reflector", h, lapack, 1e-11)
    yield agree("element of the monoid against the same", element.to_dense(d, k), lapack, 1e-11)
    yield agree("H H - I", h @ h, eye(d), 1e-12)
    yield agree("H H^T - I", h @ h.mT, eye(d), 1e-12)
    yield agree("det H + 1", torch.linalg.det(h), -1, 1e-12)


@check
def C03(draw: Draw) -> Findings:
    d = draw.integer(2, 9)
    k = draw.normal(d)
    for x in (-0.1, 0.0, 0.5, 1.0, 1.5, 2.0, 2.1):
        a = transition(layer_tuple(DELTA), k=k, beta=x / (k @ k))
        expected = torch.cat((ones(d - 1), tensor([1.0 - x])))
        norm = torch.linalg.matrix_norm(a, 2)
        yield agree("eigenvalues", torch.linalg.eigvalsh(a), expected.sort().values, 1e-12)
        yield agree("norm: 1 inside of [0, 2], 1.1 at -0.1 and 2.1", norm, 1.0 if 0 <= x <= 2 else 1.1, 1e-12)


@check
def C04(draw: Draw) -> Findings:
    n, d = 16, 32
    three = unit_rows(draw.conditioned(3, 5) + 0.6 * draw.unit(1, 5))  # keys that overlap
    k1, k2, k3 = three
    stored = stored_keys(three)
    carried = k1 - (k1 @ k2) * k2
    formula = -(carried @ k3) * (k3 @ k2)
    keys = draw.unit(n, d)
    kept = stored_keys(keys)
    unit = unit_rows(kept)
    gram_schmidt = _complement(keys[1:]) @ keys[0]  # what it would leave of the first key, from the back
    crossed = _mean_cosine(unit)
    yield differ("largest cosine of two stored keys, N = 16, d = 32", unit @ unit.mT, eye(n), 0.05)
    yield breaks("root mean square cosine, which Gram-Schmidt makes 0", crossed, 0.02)
    yield differ("first stored key against Gram-Schmidt's", kept[0], gram_schmidt, 0.02)
    yield holds("stored keys times the last key", kept[:-1] @ keys[-1], 1e-12)
    yield agree("three keys: <k~_1, k~_2> against its formula", stored[0] @ stored[1], formula, 1e-12)
    yield holds("cosines shrink: root mean square over that of the raw keys", crossed / _mean_cosine(keys), 0.75)


@check
def C05(draw: Draw) -> Findings:
    n, d = 6, 12
    keys = draw.conditioned(n, d)
    stored, perfect = stored_keys(keys, 500), stored_keys(draw.orthogonal(d)[:n], 2)
    inverse = torch.from_numpy(linalg.inv((keys @ keys.mT).numpy()))
    yield differ("E E^T - I", stored @ stored.mT, eye(n), 0.1)
    yield agree("E K^T - I", stored @ keys.mT, eye(n), 1e-10)
    yield agree("E E^T - (K K^T)^{-1}", stored @ stored.mT, inverse, 1e-9)
    yield agree("orthonormal keys: E E^T - I", perfect @ perfect.mT, eye(n), 1e-12)


@check
def C06(draw: Draw) -> Findings:
    d, batch, loads = 128, 40, (0.5, 1.0, 2.0, 4.0)
    counts = [round(a * d) for a in loads]
    keys, values = draw.unit(batch, counts[-1], d), draw.normal(batch, counts[-1], 6)
    delta, linear = (matrix_curve(name, keys, values, counts) for name in (DELTA, LINEAR))
    theory = delta_recall_law(np.array(loads))
    for i, a in enumerate(loads):
        yield within(f"delta rule at load {a:g}, minus theory", float(delta[i]) - theory[i], -0.02, 0.02)
        yield within(f"additive at load {a:g}, over (N - 1)/d", float(linear[i]) * d / (counts[i] - 1), 0.94, 1.06)
    n, a = 2 * d, 2.0
    memory = written(layer_tuple(DELTA), keys[:, :n], values[:, :n])
    error = (keys[:, :n] @ memory.mT - values[:, :n]).square().sum(-1).mean(0) / values.square().sum(-1).mean()
    age = (np.arange(n) + 1) / d
    profile = 2 - math.exp(-a) + np.exp(age - 2 * a) - 2 * np.exp(age - a)
    drift = np.abs((error.numpy() - profile).reshape(4, -1).mean(1)).max()
    yield within("error by age at load 2, quarters of the list, minus theory", float(drift), 0.0, 0.08)


def _randomised(draw: Draw, chains: int, steps: int) -> tuple[float, float]:
    """Relative squared distance after full steps in random order over unit keys, and Strohmer and Vershynin's bound."""
    n, d = 10, 6
    keys, target = draw.unit(n, d), draw.normal(2, d)
    order = torch.randint(n, (chains, steps), generator=draw.generator)
    memory = written(layer_tuple(DELTA), keys[order], (keys @ target.mT)[order])
    error = (memory - target).square().sum((-2, -1)).mean() / target.square().sum()
    smallest = torch.linalg.svdvals(keys)[-1]
    return float(error), float((1 - smallest**2 / n) ** steps)


@check
def C07(draw: Draw) -> Findings:
    d, d_v = 8, 3
    few, start = draw.conditioned(4, d), draw.normal(d_v, d)
    values = draw.normal(4, d_v)
    solution = torch.from_numpy(linalg.lstsq(few.numpy(), values.numpy(), cond=1e-10)[0]).mT
    kept = start - start @ few.mT @ torch.linalg.solve(few @ few.mT, few)
    many, truth = draw.conditioned(14, d), draw.normal(d_v, d)
    noisy = many @ truth.mT + draw.normal(14, d_v)
    rows, epochs = many.norm(dim=-1, keepdim=True), 1500
    decaying = 1 / (1 + torch.arange(epochs * 14) // 14 / 4).double()
    error, bound = _randomised(draw, 64, 120)
    started = passes(few, values, 400, start)
    slow = relative(passes(many, noisy, epochs, scale=decaying), least_squares(many / rows, noisy / rows))
    cycling = relative(passes(many, noisy, 300), least_squares(many, noisy))
    yield agree("N < d_k: limit against the least-norm solution", passes(few, values, 400), solution, 1e-9)
    yield agree("half steps, the same", passes(few, values, 800, scale=0.5), solution, 1e-9)
    yield agree("N > d_k, consistent: limit against the solution", passes(many, many @ truth.mT, 300), truth, 1e-8)
    yield agree("S_0 (I - K^+ K) is added", started, solution + kept, 1e-9)
    yield holds("random order: mean squared error over the bound", error / bound, 1.0)
    yield holds("decaying steps: relative distance from row-normalised least squares", slow, 0.01)
    yield breaks("inconsistent pairs: relative distance from least squares", cycling, 0.05)
    yield differ("S_0 not zero", started, solution, 0.1)
    yield breaks("beta |k|^2 = 2.1", passes(few, values, 400, scale=2.1).abs().max(), 1e3)


@check
def C08(draw: Draw) -> Findings:
    n, d, weight = 7, 5, 0.1
    keys, values = draw.normal(n, d), draw.normal(n, d)
    inverse = torch.from_numpy(linalg.pinv(keys.numpy()))
    over_pairs, over_keys = keys @ keys.mT + weight * eye(n), keys.mT @ keys + weight * eye(d)
    printed = values @ keys.mT @ torch.linalg.inv(over_pairs)
    by_keys = torch.linalg.solve(over_keys, keys.mT @ values).mT
    by_pairs = torch.linalg.solve(over_pairs, values).mT @ keys
    least, ridge = least_squares(keys, values), least_squares(keys, values, weight)
    layer = ridge_path(keys, values, weight)[-1]
    yield differ("V K^+ against the least-squares memory", values @ inverse, least, 1.0)
    yield differ("V K^T (K K^T + lambda I)^{-1} against the ridge memory", printed, ridge, 1.0)
    yield agree("(K^+ V)^T against least squares", (inverse @ values).mT, least, 1e-10)
    yield agree("V^T K (K^T K + lambda I)^{-1} against the layer", by_keys, layer, 1e-10)
    yield agree("V^T (K K^T + lambda I)^{-1} K against the layer", by_pairs, layer, 1e-10)
    yield agree("the layer against least squares with more rows", layer, ridge, 1e-10)


@check
def C09(draw: Draw) -> Findings:
    d_v, d, n, eta = 3, 5, 40, float(draw.uniform(low=0.3, high=3.0))
    s, k, v = draw.normal(d_v, d), draw.normal(d), draw.normal(d_v)
    loss = squared_error(k, v)
    h, g = curvature(loss, s), gradient(loss, s).flatten()
    pure = s - (torch.from_numpy(linalg.pinv(h.numpy(), rtol=1e-10)) @ g).reshape(d_v, d)
    damped = s - torch.linalg.solve(h + eye(d_v * d) / eta, g).reshape(d_v, d)
    keys, truth = draw.normal(n, d), draw.normal(d_v, d)
    values = keys @ truth.mT + draw.normal(n, d_v)
    first = walked(layer_tuple(LONGHORN), k=keys, v=values, beta=full(eta, n, d_v))
    whole = ridge_path(keys, values, 1 / eta)
    token = one_step(layer_tuple(LONGHORN), s, k=k, v=v, beta=full(eta, d_v))
    step = one_step(layer_tuple(DELTA), s, k=k, v=v, beta=1 / (k @ k))
    unseen = rank(keys.mT @ keys) - rank(torch.outer(k, k))
    yield breaks("rank of the whole list's curvature, less the rank that a step of Longhorn sees", unseen, 1)
    yield breaks("Longhorn against full curvature after 40 pairs, relative", relative(first[-1], whole[-1]), 0.1)
    yield agree("Longhorn against damped Newton, Hessian by autograd", token, damped, 1e-11)
    yield agree("pseudo-inverse Newton against a full step of the delta rule", step, pure, 1e-11)
    yield agree("the first pair, where one datum is all there is", first[0], whole[0], 1e-11)


@check
def C22(draw: Draw) -> Findings:
    for n, d, r in ((4, 6, 4), (6, 5, 3)):
        s = draw.uniform(r, low=0.7, high=1.4).sort(descending=True).values
        u = draw.orthogonal(n)[:, :r]
        keys = (u * s) @ draw.orthogonal(d)[:r]
        norm = float(linalg.norm(linalg.pinv(keys.numpy(), rtol=1e-10), 2))
        stored = passes(keys, u[:, -1:], 600)
        yield agree(f"|K^+|_2 sigma_min - 1, rank {r}", norm * float(s[-1]), 1, 1e-10)
        yield agree(f"norm of stored unit noise times sigma_min - 1, rank {r}", stored.norm() * s[-1], 1, 1e-9)


def _limit(update: StateUpdate, keys: Tensor, values: Tensor, beta: Tensor, decay: float) -> Tensor:
    """Where passes over lists (B, N, .) end: the fixed point of the affine map of one pass, read off the layer."""
    b, n, d = keys.shape
    gates = full(decay, b, n)
    signal = {"k": keys, "q": keys, "beta": beta.expand(b, n), "decay": gates}
    offset = dispatch.run(update, {**signal, "v": values}, time=1)[1].theta[0]
    start = eye(d).expand(b, d, d)
    linear = dispatch.run(update, {**signal, "v": torch.zeros_like(keys)}, time=1, weights=(start,))[1].theta[0]
    return torch.linalg.solve(eye(d) - linear, offset, left=False)


@check
def C23(draw: Draw) -> Findings:
    problems, n, d, noise, delta = 60, 12, 16, 0.1, 0.1
    for width in (0.2, 1.0):
        base, truth = draw.normal(problems, 1, d) / 4, draw.normal(problems, 1, d) / 4
        keys, test = (base + width * draw.normal(problems, m, d) / 4 for m in (n, 40))
        values = keys @ truth.mT + noise * draw.normal(problems, n, 1)
        whole = 1 / keys.square().sum(-1)
        kept = _limit(layer_tuple(GATED), keys, values, whole, math.log(0.99))
        inverse = (torch.linalg.pinv(keys) @ values).mT
        update = layer_tuple(RLS)
        signal = {"k": keys, "v": values, "beta": torch.ones_like(whole), "decay": torch.zeros_like(whole)}
        state = reference.run(update, signal, time=1)[1]
        ridge = update.output(state, {"k": keys[:, 0], "v": values[:, 0]}).weights[0]
        of_inverse, of_kept, of_ridge = (
            float((test @ (memory - truth).mT).square().mean()) for memory in (inverse, kept, ridge)
        )
        against_gate = f"error of the pseudo-inverse over that of alpha = 0.99, spread {width:g}"
        yield within(against_gate, of_inverse / of_kept, 1.2, 100.0)
        yield within(f"error of alpha = 0.99 over that of ridge, spread {width:g}", of_kept / of_ridge, 1.0, 50.0)
        if width == 1.0:
            etas = (0.1, 0.05, 0.02, 0.01)
            slow = [_limit(layer_tuple(PREV), keys, values, tensor(x), math.log1p(-x * delta / n)) for x in etas]
            power = exponent(etas, [relative(x, ridge) for x in slow])
            yield within("exponent of eta in the distance of small steps with decay from ridge", power, 0.8, 1.2)


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
    return half_count(counts, shares)


@check
def C24(draw: Draw) -> Findings:
    sizes = (64, 128, 256)
    found = [storkey_capacity(draw, d, 8192 // d**2 * 20 if d < 128 else 8 * 256**2 // d**2) for d in sizes]
    shares = [n / d for n, d in zip(found, sizes, strict=True)]
    constants = [n * math.sqrt(2 * math.log(d)) / d for n, d in zip(found, sizes, strict=True)]
    yield breaks("N/d at d = 64 over N/d at d = 256 (1 if O(d))", shares[0] / shares[2], 1.08)
    yield holds("spread of N sqrt(2 ln d)/d over d = 64, 128, 256", max(constants) / min(constants) - 1, 0.08)
    yield agree("its mean less 1.63", sum(constants) / 3, 1.63, 0.1)


@check
def C25(draw: Draw) -> Findings:
    n, d, d_v = 8, 6, 3
    k, v = draw.unit(n, d), draw.normal(n, d_v)
    update = layer_tuple("lucid")
    _, state = reference.run(update, {"q": k, "k": k, "v": v})
    stored = state.theta[1]
    gram = torch.exp(math.sqrt(d) * (k @ k.mT - 1))
    slope = gradient(lambda u: (gram @ u - v).square().sum() / 2, 0 * v)
    natural = -torch.linalg.solve(gram @ gram, slope)
    sweep = torch.linalg.solve_triangular(gram.tril(), v, upper=False)
    still = eye(n) - torch.linalg.solve_triangular(gram.tril(), gram, upper=False)  # what a sweep leaves of an error
    for _ in range(16):
        still = still @ still
    yield agree("LUCID's stored values are one sweep of Gauss and Seidel", stored, sweep, 1e-12)
    yield agree("natural gradient recalls every pair", gram @ natural, v, 1e-7)
    yield differ("LUCID recalls every pair", gram @ stored, v, 0.05)
    yield differ("LUCID's stored values are natural gradient's", stored, natural, 0.05)
    yield holds("what 2^16 sweeps leave of their difference", float((still @ (stored - natural)).abs().max()), 1e-6)
