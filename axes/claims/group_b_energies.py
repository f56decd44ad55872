"""Group B, energies and capacities: what each cost makes a memory retrieve, and how much it holds."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import optimize
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.nn.functional import scaled_dot_product_attention

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, untestable, within
from axes.claims.capacity_measures import (
    DELTA,
    LINEAR,
    attention_tuple,
    capacity_at,
    read_list,
    recall_error,
    sequence_tuple,
    softmax_capacity_law,
    sphere_capacity,
    written,
)
from axes.claims.group_b_writes import gradient
from axes.claims.sources import BLOG
from axes.core import reference
from axes.core.algorithms import Step
from axes.core.costs import CrossEntropy, SquaredError
from axes.core.state_update import StateUpdate

_HOPFIELD = "What to write: the cost, table of Hopfield energies"


def _patterns(draw: Draw) -> tuple[Tensor, Tensor]:
    n, d = draw.integer(4, 9), draw.integer(3, 6)
    return draw.normal(n, d), draw.normal(d)


def _lse(k: Tensor, q: Tensor, beta: float = 1.0) -> Tensor:
    return torch.logsumexp(beta * (k @ q), 0) / beta


@claim(
    "B04",
    "The classical Hopfield energy -|K q|^2 / 2 has -grad = K^T K q, the read of an additive memory of keys.",
    Verdict.EXACT,
    BLOG(_HOPFIELD + ", row 1"),
    "axes.sequence.UnnormalisedLinearAttention",
    derivation="|K q|^2 = q^T K^T K q, and K^T K = sum k_i k_i^T is what additive writes of v = k leave in the state.",
)
def B04(draw: Draw) -> tuple[Finding, ...]:
    k, q = _patterns(draw)
    state = written(sequence_tuple(LINEAR), k[None], k[None])[0]
    return (
        holds(
            "-grad by autograd against the read",
            gap(-gradient(lambda x: -(k @ x).square().sum() / 2, q), state @ q),
            1e-11,
        ),
    )


@claim(
    "B05",
    "Linear attention has the energy -1^T K q, retrieves the sum of the keys, and has capacity O(1).",
    Verdict.FALSE,
    BLOG(_HOPFIELD + ", row 2"),
    "axes.sequence.UnnormalisedLinearAttention",
    correction="linear attention is the gradient of the quadratic energy -|K q|^2 / 2; its capacity is of order d_k",
    kind="MATH",
    derivation="The gradient of -1^T K q is the sum of the keys whatever is asked, while linear attention reads K^T "
    "K q for values = keys. That is row 1 of the same table without the sign function. It recalls d_k orthonormal "
    "keys exactly, and random ones with error (N - 1)/d_k (B10).",
)
def B05(draw: Draw) -> tuple[Finding, ...]:
    k, q = _patterns(draw)
    state = written(sequence_tuple(LINEAR), k[None], k[None])[0]
    printed = -gradient(lambda x: -(k @ x).sum(), q)
    d = draw.integer(8, 32)
    keys, values = draw.orthogonal(d)[None], draw.normal(1, d, 3)
    recall = recall_error(keys @ written(sequence_tuple(LINEAR), keys, values).mT, values)
    return (
        breaks("the sum of the keys against the read", gap(printed, state @ q), 0.1),
        breaks("how much the read depends on the query", gap(state @ q, state @ (2 * q)), 0.1),
        holds(
            "-grad of -|K q|^2 / 2 against the read",
            gap(-gradient(lambda x: -(k @ x).square().sum() / 2, q), state @ q),
            1e-11,
        ),
        holds("error of recalling d_k orthonormal keys", recall.max(), 1e-20),
    )


@claim(
    "B06",
    "-grad of -log sum exp(k_i . q) is softmax attention with values = keys.",
    Verdict.EXACT,
    BLOG(_HOPFIELD + ", row 3"),
    "axes.sequence.SoftmaxAttention",
    derivation="d log sum exp(s)/ds = softmax(s) and ds/dq = K. At inverse temperature b the energy is -lse(b K q)/b.",
)
def B06(draw: Draw) -> tuple[Finding, ...]:
    k, q = _patterns(draw)
    return tuple(
        holds(
            f"inverse temperature {beta:g}",
            gap(gradient(lambda x, b=beta: _lse(k, x, b), q), read_list(attention_tuple(1 / beta), k, k, q)),  # type: ignore[misc]
            1e-12,
        )
        for beta in (1.0, 0.3, 4.0)
    )


@claim(
    "B07",
    "Softmax attention retrieves by minimising -log sum exp(K q) over the query.",
    Verdict.FALSE,
    BLOG("What to write: the cost, log-sum-exp"),
    "axes.sequence.SoftmaxAttention",
    correction="it minimises |q|^2 / 2 - lse(b K q)/b: q <- attention(q; K, K) never raises that and converges to a "
    "stationary point; one update is minus the gradient of the printed energy",
    kind="MATH",
    derivation="-lse is concave and falls like -t max k_i . q along any q with a positive logit: it has no minimum. "
    "With |q|^2/2 added, the update is a concave-convex step: minimise the tangent of -lse plus |q|^2/2.",
)
def B07(draw: Draw) -> tuple[Finding, ...]:
    k, q = draw.normal(6, 5), draw.normal(5)
    findings = [
        breaks("how far -lse(K q) falls from q = k_1 to 1000 k_1", _lse(k, 1000 * k[0]) - _lse(k, k[0]), 100.0),
        holds(
            "one update is -grad of the printed energy",
            gap(gradient(lambda x: _lse(k, x), q), read_list(attention_tuple(1.0), k, k, q)),
            1e-12,
        ),
    ]
    for beta in (0.5, 1.0, 4.0):

        def energy(x: Tensor, beta: float = beta) -> Tensor:
            return x.square().sum() / 2 - _lse(k, x, beta)

        update, at, rise = attention_tuple(1 / beta), q, 0.0
        for _ in range(300):
            before, at = energy(at), read_list(update, k, k, at)
            rise = max(rise, float(energy(at) - before))
        findings += [
            holds(f"largest rise in 300 updates, b = {beta:g}", rise, 1e-12),
            holds(f"gradient where they end, b = {beta:g}", gradient(energy, at).norm(), 1e-8),
        ]
    return tuple(findings)


@claim(
    "B08",
    "Softmax attention is one retrieval step of a modern Hopfield network.",
    Verdict.CONDITIONAL,
    BLOG("What to write: the cost, on Ramsauer et al."),
    "axes.sequence.SoftmaxAttention",
    conditions="values equal to keys",
    derivation="For V = K the read is a gradient in q, so its Jacobian K^T (diag p - p p^T) K is symmetric. With "
    "other values it is V^T (diag p - p p^T) K: the weights are the same, but no energy of q has the read as its "
    "gradient.",
)
def B08(draw: Draw) -> tuple[Finding, ...]:
    (k, q), update = _patterns(draw), attention_tuple(1.0)
    v = draw.normal(*k.shape)

    def asymmetry(values: Tensor) -> float:
        j = jacobian(lambda x: read_list(update, k, values, x), q)
        assert isinstance(j, Tensor)
        return gap(j, j.mT) / (float(j.norm()) + 1e-300)

    return (
        holds(
            "values = keys: read against -grad of the energy",
            gap(gradient(lambda x: _lse(k, x), q), read_list(update, k, k, q)),
            1e-12,
        ),
        holds("values = keys: asymmetry of the Jacobian", asymmetry(k), 1e-12),
        breaks("other values: asymmetry of the Jacobian, relative", asymmetry(v), 0.01),
    )


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
    shares, state, done = [], None, 0
    for n in counts:
        state = written(sequence_tuple(LINEAR), patterns[:, done:n], patterns[:, done:n], state)
        done = n
        shares.append(_fixed(state, patterns[:, :n]))
    return float(np.interp(-0.5, -np.array(shares), counts))


@claim(
    "B09",
    "A classical Hopfield network holds O(d) patterns by the table, O(d / log d) by the text, and better rules O(d).",
    Verdict.STATISTICAL,
    BLOG(_HOPFIELD + ", capacity column, and the write-strategy hierarchy"),
    "axes.sequence.UnnormalisedLinearAttention",
    derivation="A bit flips if cross-talk of variance N/d exceeds one; for half of the patterns to survive in all d "
    "bits it must stay below 1/(2 ln d): N = d/(2 ln d) up to a constant, falling behind d. The pseudo-inverse makes "
    "every pattern an eigenvector and works up to d - 1. (For Storkey's rule see C24.)",
)
def B09(draw: Draw) -> tuple[Finding, ...]:
    sizes = (64, 128, 256)
    found = [hebbian_patterns(draw, d, 4096 // d) for d in sizes]
    ratios = [n * 2 * math.log(d) / d for n, d in zip(found, sizes, strict=True)]
    d = 128
    patterns = _signs(draw, 1, round(0.95 * d), d)
    projection = torch.linalg.pinv(patterns) @ patterns
    return (
        *(within(f"additive: N 2 ln d / d at d = {d}", r, 1.2, 1.9) for r, d in zip(ratios, sizes, strict=True)),
        within("additive: N/d at d = 256 over d = 64", found[2] / found[0] / 4, 0.55, 0.92),
        within("pseudo-inverse: share of 0.95 d patterns that are fixed", _fixed(projection, patterns), 0.95, 1.0),
    )


@claim(
    "B10",
    "A linear cost stores O(1) pairs per step, a quadratic one O(d).",
    Verdict.FALSE,
    BLOG("What to write: the cost, on cost and capacity"),
    "axes.sequence.UnnormalisedLinearAttention, axes.sequence.DeltaNet",
    correction="both store of order d in one pass, the quadratic cost 1.66 times as many at error one half; what it "
    "alone can do is recall up to d independent keys exactly when it is minimised",
    kind="MATH",
    derivation="Additive error is (N-1)/d: one half at N = d/2. The delta rule's is 2 - E - (1-E)(2-E)/a with E = "
    "exp(-a), a = N/d: one half at a = 0.828. Both grow in proportion to d.",
    figure="capacity",
)
def B10(draw: Draw) -> tuple[Finding, ...]:
    sizes = (16, 32, 64, 128)
    linear, delta = ([capacity_at(name, draw, d, 8192 // d) for d in sizes] for name in (LINEAR, DELTA))

    def exponent(counts: list[float]) -> float:
        return float(np.polyfit(np.log(sizes), np.log(counts), 1)[0])

    keys, values = draw.unit(1, 8, 32), draw.normal(1, 8, 3)
    epochs = written(sequence_tuple(DELTA), keys.repeat(1, 60, 1), values.repeat(1, 60, 1))
    added = written(sequence_tuple(LINEAR), keys.repeat(1, 60, 1), values.repeat(1, 60, 1)) / 60
    return (
        breaks("additive memory: exponent of N at error 1/2 in d (0 if O(1))", exponent(linear), 0.8),
        holds("additive memory: N / (d/2 + 1) - 1 at d = 128", abs(linear[-1] / 65 - 1), 0.1),
        holds("delta rule: distance of the exponent from 1", abs(exponent(delta) - 1), 0.1),
        holds("delta rule over additive: N / 1.66 - 1 at d = 128", abs(delta[-1] / linear[-1] / 1.66 - 1), 0.15),
        holds("delta rule: error after 60 passes, N = d/4", recall_error(keys @ epochs.mT, values).max(), 1e-9),
        breaks("additive memory: error after 60 passes, rescaled", recall_error(keys @ added.mT, values).max(), 0.005),
    )


@claim(
    "B11",
    "The quadratic cost has capacity d_k: it can be brought to zero for all values exactly if N <= d_k keys are "
    "independent.",
    Verdict.EXACT,
    BLOG("What to write: the cost, on cost and capacity"),
    "axes.costs.SquaredError, axes.sequence.DeltaNet",
    derivation="S K^T = V^T is solvable for every V iff K has full row rank. With d_k + 1 keys one combination n of "
    "the pairs cannot be met, and the least cost is |V^T n|^2 / 2 with n the unit vector of the left null space.",
)
def B11(draw: Draw) -> tuple[Finding, ...]:
    d, d_v = draw.integer(2, 7), draw.integer(1, 4)
    keys, values = draw.normal(d + 1, d), draw.normal(d + 1, d_v)

    def least(n: int) -> Tensor:
        s = torch.linalg.lstsq(keys[:n], values[:n], driver="gelsd").solution
        return SquaredError().value(keys[:n] @ s, values[:n]).sum()

    null = torch.linalg.svd(keys)[0][:, -1]
    few, targets = draw.unit(1, 4, 12), draw.normal(1, 4, d_v)
    learnt = written(sequence_tuple(DELTA), few.repeat(1, 200, 1), targets.repeat(1, 200, 1))
    return (
        holds("least cost over d_k pairs", least(d), 1e-12),
        holds(
            "least cost over d_k + 1 pairs against |V^T n|^2 / 2",
            (least(d + 1) - (values.mT @ null).square().sum() / 2).abs(),
            1e-10,
        ),
        holds(
            "DeltaNet's cost after many passes over 4 keys of width 12",
            SquaredError().value(few @ learnt.mT, targets).sum(),
            1e-10,
        ),
    )


@claim(
    "B12",
    "The log-sum-exp cost has capacity exp(O(d)).",
    Verdict.CONDITIONAL,
    BLOG("What to write: the cost, on cost and capacity"),
    "axes.sequence.SoftmaxAttention",
    conditions="all pairs are kept (the memory grows with N), the temperature does not grow with d, and keys have "
    "length sqrt(d)",
    derivation="Signal to noise is one at N = 1/E exp(-2 gap/T), exponential in d while gaps are of order d and T of "
    "order 1. At T = sqrt(d) the exponent is 2 sqrt(d) - 2, for unit keys gaps are bounded, and a matrix of d "
    "numbers per channel holds d.",
)
def B12(draw: Draw) -> tuple[Finding, ...]:
    hot = {d: math.log(sphere_capacity(draw, d, 2.0, trials)) for d, trials in ((8, 61), (16, 7))}
    standard = {d: math.log(sphere_capacity(draw, d, math.sqrt(d), trials)) for d, trials in ((8, 61), (32, 9))}
    unit_keys = math.log(sphere_capacity(draw, 16, 2.0 * 16, 61))  # keys of length 1 divide the logits by d
    n, d, d_v = 40, 16, 3
    keys, values = draw.normal(1, n, d), draw.normal(1, n, d_v)
    stored = reference.run(attention_tuple(2.0), {"k": keys, "v": values, "q": keys}, time=1)[1].theta
    return (
        holds(
            "ln N / d at d = 16, T = 2, against the mean-field law",
            abs(hot[16] - softmax_capacity_law(16, 2.0)) / 16,
            0.03,
        ),
        holds("ln N / d at d = 16 less that at d = 8, T = 2", abs(hot[16] / 16 - hot[8] / 8), 0.06),
        holds(
            "numbers stored less N (d_k + d_v), log-masses aside",
            abs(sum(x.numel() for x in stored[:2]) - n * (d + d_v)),
            0.0,
        ),
        breaks(
            "kept list against a matrix, whose N is d + 1: difference of ln N at d = 16", hot[16] - math.log(17), 5.0
        ),
        breaks("T = sqrt(d): ln N / d falls from d = 8 to 32 by", standard[8] / 8 - standard[32] / 32, 0.12),
        breaks("keys of length 1, T = 2: ln N smaller at d = 16 by", hot[16] - unit_keys, 5.0),
    )


@claim(
    "B17",
    "Cross-entropy is softmax attention on the data axis.",
    Verdict.EXACT,
    BLOG("Cross-entropy as data-axis softmax attention"),
    "axes.sequence.SoftmaxAttention",
    derivation="p = softmax(W x) are the weights of the query x over keys = values = class rows: -dCE/dx = w_y - "
    "attention(x; W, W) and -dCE/dW = (e_y - p) x^T. Attention is the gradient in the query, training the one in the "
    "keys.",
)
def B17(draw: Draw) -> tuple[Finding, ...]:
    w, x = _patterns(draw)
    y, update = draw.integer(0, w.shape[0] - 1), attention_tuple(1.0)
    onehot = torch.eye(w.shape[0], dtype=torch.float64)
    by_query = gradient(lambda u: CrossEntropy().value(w @ u, onehot[y]), x)
    by_keys = gradient(lambda m: CrossEntropy().value(m @ x, onehot[y]), w)
    read, weights = read_list(update, w, w, x), read_list(update, w, onehot, x)
    torch_read = scaled_dot_product_attention(x[None], w, w, scale=1.0)[0]
    return (
        holds("-dCE/dx against w_y - attention", gap(-by_query, w[y] - read), 1e-12),
        holds("-dCE/dW against (e_y - weights) x^T", gap(-by_keys, torch.outer(onehot[y] - weights, x)), 1e-12),
        holds("the read against torch's attention", gap(read, torch_read), 1e-12),
    )


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


@claim(
    "B18",
    "Softmax attention and a classifier trained with cross-entropy both reach capacity exp(O(d)).",
    Verdict.FALSE,
    BLOG("The cost hierarchy, log-sum-exp row"),
    "axes.costs.CrossEntropy, axes.sequence.SoftmaxAttention",
    correction="a linear classifier memorises of order d random labels (2 d for two classes); exponential is only "
    "the number of classes, or stored rows, that can be told apart, and they are stored one by one",
    kind="MATH",
    derivation="Cross-entropy reaches zero iff the labels are linearly separable, and half of all labellings of 2 d "
    "points are (Cover). Rows w_c of a list are distinct noisy queries as long as ln C stays below a multiple of d.",
)
def B18(draw: Draw) -> tuple[Finding, ...]:
    d, trials = 10, 24
    counts = (13, 17, 20, 23, 27)
    shares = [np.mean([_separable(draw.normal(n, d), _signs(draw, n)) for _ in range(trials)]) for n in counts]
    half = float(np.interp(-0.5, -np.array(shares), counts))
    crowded = np.mean([_separable(draw.normal(4 * d, d), _signs(draw, 4 * d)) for _ in range(8)])

    def told_apart(d: int, rows: int) -> float:
        keys = draw.unit(rows, d)
        picked = torch.arange(64)
        q = keys[picked] + draw.normal(64, d) * 0.5 / math.sqrt(d)
        names = torch.arange(rows, dtype=torch.float64)[:, None]
        read = read_list(attention_tuple(1e-4), keys, names, q)[:, 0]
        return float(((read - picked).abs() < 0.5).double().mean())

    return (
        breaks("share of 4 d labellings that cannot be separated, d = 10", float(1 - crowded), 0.99),
        breaks(
            "share of 4 d labellings that cross-entropy steps do not learn, d = 6",
            1 - _memorised(draw, 24, 6, 10, 24),
            0.9,
        ),
        holds("share of d labellings that they do not learn, d = 6", 1 - _memorised(draw, 6, 6, 100, 24), 0.25),
        holds("N at which half are separable, over 2 d, less 1", abs(half / (2 * d) - 1), 0.3),
        holds("share of 16384 stored rows mistaken, d = 24", 1 - told_apart(24, 16384), 0.1),
        breaks("share of 16384 stored rows mistaken, d = 8", 1 - told_apart(8, 16384), 0.5),
    )


@claim(
    "B19",
    "Softmax attention is follow-the-regularised-leader on the log-sum-exp cost.",
    Verdict.FALSE,
    BLOG("The write-strategy hierarchy, batch-optimal row"),
    "axes.sequence.SoftmaxAttention",
    correction="it is the exact minimiser of sum_j exp(k_j . q / T) |v_j - y|^2 over y: Nadaraya-Watson regression "
    "over the stored pairs, solved anew for every query",
    kind="MATH",
    derivation="-lse is a function of the query, not a cost of the memory. FTRL on the squared error over linear "
    "memories is ridge regression, another predictor. A local constant fit with kernel weights is their weighted "
    "mean of the values, which is attention.",
)
def B19(draw: Draw) -> tuple[Finding, ...]:
    n, d, d_v = 12, 4, 3
    k, v, q = draw.normal(n, d), draw.normal(n, d_v), draw.normal(d)
    ridge = torch.linalg.solve(k.mT @ k + torch.eye(d, dtype=torch.float64), k.mT @ v).mT @ q
    findings = [
        breaks("ridge regression against attention", gap(ridge, read_list(attention_tuple(1.0), k, v, q)), 0.02)
    ]
    for temperature in (1.0, 2.0):
        read = read_list(attention_tuple(temperature), k, v, q)
        roots = torch.exp(k @ q / (2 * temperature))[:, None]
        fitted = torch.linalg.lstsq(roots, roots * v, driver="gelsd").solution[0]

        def objective(y: Tensor, roots: Tensor = roots) -> Tensor:
            weights = roots.square() / roots.square().sum()
            return (weights * (v - y).square()).sum()

        findings += [
            holds(f"weighted least squares against the read, T = {temperature:g}", gap(fitted, read), 1e-11),
            holds(
                f"slope of the objective at the read, T = {temperature:g}", gradient(objective, read).abs().max(), 1e-12
            ),
        ]
    return tuple(findings)


B20 = untestable(
    "B20",
    "That cross-entropy is a log-sum-exp cost may explain why it beats squared error in classification and why Adam "
    "gains most with it.",
    BLOG("Cross-entropy as data-axis softmax attention"),
    "a conjecture about causes of empirical behaviour: no identity follows that could be checked",
)
