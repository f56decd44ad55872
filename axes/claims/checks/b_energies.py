"""Group B, energies and capacities: what each cost makes a memory retrieve, and how much it holds."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import optimize
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds, within
from axes.claims.tools.calculus import derivative, gradient, half_square
from axes.claims.tools.capacity import (
    attended,
    attention_tuple,
    capacity_at,
    growing,
    recall_error,
    softmax_capacity_law,
    sphere_capacity,
    written,
)
from axes.claims.tools.fits import exponent, half_count
from axes.claims.tools.float64 import arange, eye
from axes.claims.tools.tuples import DELTA, LINEAR, layer_tuple
from axes.core import reference
from axes.core.algorithms import Step
from axes.core.costs import CrossEntropy, SquaredError
from axes.core.state_update import StateUpdate


def _patterns(draw: Draw) -> tuple[Tensor, Tensor]:
    n, d = draw.integer(4, 9), draw.integer(3, 6)
    return draw.normal(n, d), draw.normal(d)


def _stored(k: Tensor) -> Tensor:
    """The state that additive writes of the patterns on themselves leave."""
    return written(layer_tuple(LINEAR), k[None], k[None])[0]


def _descent_on_square(k: Tensor, q: Tensor) -> Tensor:
    """-grad of -|K q|^2 / 2, by autograd."""
    return -gradient(lambda x: -half_square(k @ x), q)


def _lse(k: Tensor, q: Tensor, beta: float = 1.0) -> Tensor:
    return torch.logsumexp(beta * (k @ q), 0) / beta


@check
def B04(draw: Draw) -> Findings:
    k, q = _patterns(draw)
    yield agree("-grad by autograd against the read", _descent_on_square(k, q), _stored(k) @ q, 1e-11)


@check
def B05(draw: Draw) -> Findings:
    k, q = _patterns(draw)
    state, printed = _stored(k), -gradient(lambda x: -(k @ x).sum(), q)
    d = draw.integer(8, 32)
    keys, values = draw.orthogonal(d)[None], draw.normal(1, d, 3)
    recall = recall_error(keys @ written(layer_tuple(LINEAR), keys, values).mT, values)
    yield differ("the sum of the keys against the read", printed, state @ q, 0.1)
    yield differ("how much the read depends on the query", state @ q, state @ (2 * q), 0.1)
    yield agree("-grad of -|K q|^2 / 2 against the read", _descent_on_square(k, q), state @ q, 1e-11)
    yield holds("error of recalling d_k orthonormal keys", recall.max(), 1e-20)


@check
def B06(draw: Draw) -> Findings:
    k, q = _patterns(draw)
    for beta in (1.0, 0.3, 4.0):
        slope = gradient(lambda x, b=beta: _lse(k, x, b), q)  # type: ignore[misc]
        yield agree(f"inverse temperature {beta:g}", slope, attended(k, k, q, 1 / beta), 1e-12)


@check
def B07(draw: Draw) -> Findings:
    k, q = draw.normal(6, 5), draw.normal(5)
    yield breaks("how far -lse(K q) falls from q = k_1 to 1000 k_1", _lse(k, 1000 * k[0]) - _lse(k, k[0]), 100.0)
    slope = gradient(lambda x: _lse(k, x), q)
    yield agree("one update is -grad of the printed energy", slope, attended(k, k, q), 1e-12)
    for beta in (0.5, 1.0, 4.0):

        def energy(x: Tensor, beta: float = beta) -> Tensor:
            return half_square(x) - _lse(k, x, beta)

        at, rise = q, 0.0
        for _ in range(300):
            before, at = energy(at), attended(k, k, at, 1 / beta)
            rise = max(rise, float(energy(at) - before))
        yield holds(f"largest rise in 300 updates, b = {beta:g}", rise, 1e-12)
        yield holds(f"gradient where they end, b = {beta:g}", gradient(energy, at).norm(), 1e-8)


@check
def B08(draw: Draw) -> Findings:
    k, q = _patterns(draw)
    v = draw.normal(*k.shape)

    def asymmetry(values: Tensor) -> float:
        j = derivative(lambda x: attended(k, values, x), q)
        return gap(j, j.mT) / (float(j.norm()) + 1e-300)

    slope = gradient(lambda x: _lse(k, x), q)
    yield agree("values = keys: read against -grad of the energy", slope, attended(k, k, q), 1e-12)
    yield holds("values = keys: asymmetry of the Jacobian", asymmetry(k), 1e-12)
    yield breaks("other values: asymmetry of the Jacobian, relative", asymmetry(v), 0.01)


def _signs(draw: Draw, *shape: int) -> Tensor:
    return torch.where(draw.uniform(*shape) < 0.5, -1.0, 1.0).to(torch.float64)


def _fixed(weights: Tensor, patterns: Tensor) -> float:
    """The fraction of patterns (B, N, d) that a network without self-connections leaves as they are."""
    weights = weights - torch.diag_embed(torch.diagonal(weights, dim1=-2, dim2=-1))
    return float(((patterns @ weights.mT) * patterns > 1e-9).all(-1).double().mean())


def hebbian_patterns(draw: Draw, d: int, batch: int) -> float:
    """The N at which half of N random sign patterns are fixed points of the memory that additive writes leave."""
    counts = [max(2, round(d / (2 * math.log(d)) * x)) for x in (1.0, 1.2, 1.4, 1.6, 1.8, 2.1)]
    patterns = _signs(draw, batch, counts[-1], d)
    states = growing(layer_tuple(LINEAR), patterns, patterns, counts)
    return half_count(counts, [_fixed(state, patterns[:, :n]) for n, state in zip(counts, states, strict=True)])


@check
def B09(draw: Draw) -> Findings:
    sizes = (64, 128, 256)
    found = [hebbian_patterns(draw, d, 4096 // d) for d in sizes]
    patterns = _signs(draw, 1, round(0.95 * 128), 128)
    projection = torch.linalg.pinv(patterns) @ patterns
    for n, d in zip(found, sizes, strict=True):
        yield within(f"additive: N 2 ln d / d at d = {d}", n * 2 * math.log(d) / d, 1.2, 1.9)
    yield within("additive: N/d at d = 256 over d = 64", found[2] / found[0] / 4, 0.55, 0.92)
    yield within("pseudo-inverse: share of 0.95 d patterns that are fixed", _fixed(projection, patterns), 0.95, 1.0)


@check
def B10(draw: Draw) -> Findings:
    sizes = (16, 32, 64, 128)
    linear, delta = ([capacity_at(name, draw, d, 8192 // d) for d in sizes] for name in (LINEAR, DELTA))
    keys, values = draw.unit(1, 8, 32), draw.normal(1, 8, 3)
    epochs, added = (
        written(layer_tuple(name), keys.repeat(1, 60, 1), values.repeat(1, 60, 1)) for name in (DELTA, LINEAR)
    )
    forgetful, kept = (recall_error(keys @ state.mT, values).max() for state in (added / 60, epochs))
    yield breaks("additive memory: exponent of N at error 1/2 in d (0 if O(1))", exponent(sizes, linear), 0.8)
    yield agree("additive memory: N / (d/2 + 1) - 1 at d = 128", linear[-1] / 65, 1, 0.1)
    yield agree("delta rule: distance of the exponent from 1", exponent(sizes, delta), 1, 0.1)
    yield agree("delta rule over additive: N / 1.66 - 1 at d = 128", delta[-1] / linear[-1] / 1.66, 1, 0.15)
    yield holds("delta rule: error after 60 passes, N = d/4", kept, 1e-9)
    yield breaks("additive memory: error after 60 passes, rescaled", forgetful, 0.005)


@check
def B11(draw: Draw) -> Findings:
    d, d_v = draw.integer(2, 7), draw.integer(1, 4)
    keys, values = draw.normal(d + 1, d), draw.normal(d + 1, d_v)

    def least(n: int) -> Tensor:
        s = torch.linalg.lstsq(keys[:n], values[:n], driver="gelsd").solution
        return SquaredError().value(keys[:n] @ s, values[:n]).sum()

    null = torch.linalg.svd(keys)[0][:, -1]
    few, targets = draw.unit(1, 4, 12), draw.normal(1, 4, d_v)
    learnt = written(layer_tuple(DELTA), few.repeat(1, 200, 1), targets.repeat(1, 200, 1))
    cost, unmet = SquaredError().value(few @ learnt.mT, targets).sum(), half_square(values.mT @ null)
    yield holds("least cost over d_k pairs", least(d), 1e-12)
    yield agree("least cost over d_k + 1 pairs against |V^T n|^2 / 2", least(d + 1), unmet, 1e-10)
    yield holds("DeltaNet's cost after many passes over 4 keys of width 12", cost, 1e-10)


@check
def B12(draw: Draw) -> Findings:
    hot = {d: math.log(sphere_capacity(draw, d, 2.0, trials)) for d, trials in ((8, 61), (16, 7))}
    standard = {d: math.log(sphere_capacity(draw, d, math.sqrt(d), trials)) for d, trials in ((8, 61), (32, 9))}
    unit_keys = math.log(sphere_capacity(draw, 16, 2.0 * 16, 61))  # keys of length 1 divide the logits by d
    n, d, d_v = 40, 16, 3
    keys, values = draw.normal(1, n, d), draw.normal(1, n, d_v)
    stored = reference.run(attention_tuple(2.0), {"k": keys, "v": values, "q": keys}, time=1)[1].theta
    numbers, law = sum(x.numel() for x in stored[:2]), softmax_capacity_law(16, 2.0)
    against_matrix = "kept list against a matrix, whose N is d + 1: difference of ln N at d = 16"
    yield agree("ln N / d at d = 16, T = 2, against the mean-field law", hot[16] / 16, law / 16, 0.03)
    yield agree("ln N / d at d = 16 less that at d = 8, T = 2", hot[16] / 16, hot[8] / 8, 0.06)
    yield agree("numbers stored less N (d_k + d_v), log-masses aside", numbers, n * (d + d_v), 0.0)
    yield breaks(against_matrix, hot[16] - math.log(17), 5.0)
    yield breaks("T = sqrt(d): ln N / d falls from d = 8 to 32 by", standard[8] / 8 - standard[32] / 32, 0.12)
    yield breaks("keys of length 1, T = 2: ln N smaller at d = 16 by", hot[16] - unit_keys, 5.0)


@check
def B17(draw: Draw) -> Findings:
    w, x = _patterns(draw)
    y = draw.integer(0, w.shape[0] - 1)
    onehot = eye(w.shape[0])
    by_query = gradient(lambda u: CrossEntropy().value(w @ u, onehot[y]), x)
    by_keys = gradient(lambda m: CrossEntropy().value(m @ x, onehot[y]), w)
    read, weights = attended(w, w, x), attended(w, onehot, x)
    torch_read = scaled_dot_product_attention(x[None], w, w, scale=1.0)[0]
    yield agree("-dCE/dx against w_y - attention", -by_query, w[y] - read, 1e-12)
    yield agree("-dCE/dW against (e_y - weights) x^T", -by_keys, torch.outer(onehot[y] - weights, x), 1e-12)
    yield agree("the read against torch's attention", read, torch_read, 1e-12)


def _separable(points: Tensor, labels: Tensor) -> bool:
    """Whether some w has labels * (points w) >= 1, by linear programming."""
    signed = -(labels[:, None] * points).numpy()
    found = optimize.linprog(
        np.zeros(signed.shape[1]), A_ub=signed, b_ub=-np.ones(len(signed)), bounds=(None, None), method="highs"
    )
    return int(found.status) == 0


def _memorised(draw: Draw, n: int, d: int, passes: int, batch: int) -> float:
    """The share of batches of n random labels in two classes that cross-entropy steps, one pair at a time, learn."""
    x, classes = draw.normal(batch, n, d), _signs(draw, batch, n)
    targets = torch.stack((classes > 0, classes < 0), -1).double()
    update = StateUpdate(CrossEntropy(), algorithm=Step(1.0))
    signal = {"k": x.repeat(1, passes, 1), "v": targets.repeat(1, passes, 1)}
    state = update.init({name: s[:, 0] for name, s in signal.items()})
    for t in range(n * passes):
        state, _ = update.step(state, {name: s[:, t] for name, s in signal.items()})
    right = (x @ state.theta[0].mT).argmax(-1) == targets.argmax(-1)
    return float(right.all(-1).double().mean())


@check
def B18(draw: Draw) -> Findings:
    d, trials = 10, 24
    counts = (13, 17, 20, 23, 27)
    shares = [float(np.mean([_separable(draw.normal(n, d), _signs(draw, n)) for _ in range(trials)])) for n in counts]
    half = half_count(counts, shares)
    crowded = np.mean([_separable(draw.normal(4 * d, d), _signs(draw, 4 * d)) for _ in range(8)])

    def told_apart(d: int, rows: int) -> float:
        keys = draw.unit(rows, d)
        picked = torch.arange(64)
        q = keys[picked] + draw.normal(64, d) * 0.5 / math.sqrt(d)
        read = attended(keys, arange(rows)[:, None], q, 1e-4)[:, 0]
        return float(((read - picked).abs() < 0.5).double().mean())

    learnt = _memorised(draw, 24, 6, 10, 24)
    yield breaks("share of 4 d labellings that cannot be separated, d = 10", float(1 - crowded), 0.99)
    yield breaks("share of 4 d labellings that cross-entropy steps do not learn, d = 6", 1 - learnt, 0.9)
    yield holds("share of d labellings that they do not learn, d = 6", 1 - _memorised(draw, 6, 6, 100, 24), 0.25)
    yield agree("N at which half are separable, over 2 d, less 1", half / (2 * d), 1, 0.3)
    yield holds("share of 16384 stored rows mistaken, d = 24", 1 - told_apart(24, 16384), 0.1)
    yield breaks("share of 16384 stored rows mistaken, d = 8", 1 - told_apart(8, 16384), 0.5)


@check
def B19(draw: Draw) -> Findings:
    n, d, d_v = 12, 4, 3
    k, v, q = draw.normal(n, d), draw.normal(n, d_v), draw.normal(d)
    ridge = torch.linalg.solve(k.mT @ k + eye(d), k.mT @ v).mT @ q
    yield differ("ridge regression against attention", ridge, attended(k, v, q), 0.02)
    for temperature in (1.0, 2.0):
        read = attended(k, v, q, temperature)
        roots = torch.exp(k @ q / (2 * temperature))[:, None]
        fitted = torch.linalg.lstsq(roots, roots * v, driver="gelsd").solution[0]

        def objective(y: Tensor, roots: Tensor = roots) -> Tensor:
            weights = roots.square() / roots.square().sum()
            return (weights * (v - y).square()).sum()

        yield agree(f"weighted least squares against the read, T = {temperature:g}", fitted, read, 1e-11)
        yield holds(f"slope of the objective at the read, T = {temperature:g}", gradient(objective, read), 1e-12)
