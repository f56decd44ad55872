"""Group B, write rules: what one step on each cost writes into a matrix memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, huber_loss, layer_norm

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds
from axes.claims.capacity_measures import DELTA, LINEAR, recall_error, sequence_tuple, written
from axes.claims.sources import BLOG, SLIDES
from axes.core import reference
from axes.core.algorithms import Step
from axes.core.costs import Alignment, Cost, CrossEntropy, Huber, HuberSwitch, Lp, SquaredError
from axes.core.memory import LayerNormMatrix
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.optim import SGD
from axes.sequence.ttt import TTTLinear


def gradient(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The derivative of a scalar function by autograd."""
    x = at.detach().clone().requires_grad_()
    return torch.autograd.grad(value(x), x)[0]


def one_step(update: StateUpdate, start: Tensor, **signal: Tensor) -> Tensor:
    """The matrix after one datum."""
    return update.step(update.init(signal, (start,)), signal)[0].theta[0]


def write(cost: Cost, start: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What one unit step on a cost adds to the matrix: minus its gradient."""
    return one_step(StateUpdate(cost), start, k=k, v=v) - start


def _pair(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    d_v, d_k = draw.integer(2, 6), draw.integer(2, 7)
    return draw.normal(d_v, d_k), draw.normal(d_k), draw.normal(d_v)


@claim(
    "B01",
    "One unit gradient step on the alignment cost -<v, S k> adds v k^T.",
    Verdict.EXACT,
    BLOG("What to write: the cost, additive"),
    "axes.sequence.UnnormalisedLinearAttention",
    derivation="<v, S k> = <v k^T, S> is linear in S, so its gradient is the constant v k^T and a step of beta adds "
    "beta v k^T.",
)
def B01(draw: Draw) -> tuple[Finding, ...]:
    s, k, v = _pair(draw)
    g = gradient(lambda x: -(v * (x @ k)).sum(), s)
    beta = draw.uniform(low=0.1, high=2.0)
    scaled = StateUpdate(Alignment(), algorithm=Step(Per("beta")))
    return (
        holds(
            "S - grad against one token of linear attention",
            gap(s - g, one_step(sequence_tuple(LINEAR), s, k=k, v=v)),
            1e-13,
        ),
        holds("S - beta grad", gap(s - beta * g, one_step(scaled, s, k=k, v=v, beta=beta)), 1e-13),
    )


@claim(
    "B02",
    "N Hebbian steps leave S_0 + V^T K, with keys and values as rows.",
    Verdict.EXACT,
    BLOG("What to write: the cost, additive"),
    "axes.sequence.UnnormalisedLinearAttention",
    derivation="The write does not look at the state: the sum of outer products v_i k_i^T is the matrix product V^T K.",
)
def B02(draw: Draw) -> tuple[Finding, ...]:
    n, d_k, d_v = draw.integer(1, 70), draw.integer(1, 9), draw.integer(1, 7)
    k, v, start = draw.normal(1, n, d_k), draw.normal(1, n, d_v), draw.normal(1, d_v, d_k)
    update = sequence_tuple(LINEAR)
    interpreted = reference.run(update, {"k": k, "v": v}, time=1, weights=(start,))[1].theta[0]
    return (
        holds("from an empty memory", gap(written(update, k, v), v.mT @ k), 1e-11),
        holds("from S_0", gap(written(update, k, v, start), start + v.mT @ k), 1e-11),
        holds("from S_0, one token after another", gap(interpreted, start + v.mT @ k), 1e-11),
    )


@claim(
    "B03",
    "A unit gradient step on |v - S k|^2 / 2 is the delta rule, on the sequence and on the data axis.",
    Verdict.EXACT,
    BLOG("What to write: the cost, error-corrective"),
    "axes.sequence.DeltaNet, axes.optim.SGD",
    derivation="grad = (S k - v) k^T, so that minus the gradient is (v - S k) k^T. Fed with the same pairs, an "
    "optimizer that sees only autograd's gradients and a layer that sees only keys and values move through the same "
    "matrices.",
)
def B03(draw: Draw) -> tuple[Finding, ...]:
    s, k, v = _pair(draw)
    one = torch.ones((), dtype=s.dtype)
    stepped = one_step(sequence_tuple(DELTA), s, k=k, v=v, beta=one)
    keys, values = draw.unit(1, 12, s.shape[1]), draw.normal(1, 12, s.shape[0])
    weight = nn.Parameter(s.clone())
    optimizer = SGD([weight], lr=1.0, momentum=0.0)
    for x, y in zip(keys[0], values[0], strict=True):
        optimizer.zero_grad()
        ((y - weight @ x).square().sum() / 2).backward()
        optimizer.step()
    return (
        holds(
            "S - grad against one token of DeltaNet",
            gap(s - gradient(lambda x: (v - x @ k).square().sum() / 2, s), stepped),
            1e-12,
        ),
        holds(
            "12 steps of SGD against 12 tokens",
            gap(weight, written(sequence_tuple(DELTA), keys, values, s[None])[0]),
            1e-11,
        ),
    )


@claim(
    "B13",
    "The l_p cost sum |S k - v|_i^p has gradient p sign(e) |e|^(p-1) k^T with e = S k - v.",
    Verdict.EXACT,
    BLOG("The cost hierarchy, row l_p norm"),
    "axes.costs.Lp",
    derivation="Coordinate by coordinate d|e|^p/de = p sign(e) |e|^(p-1); the chain rule adds k^T. It is the p-th "
    "power, without a root and without 1/p. At p = 1 the element 0 of the subdifferential is taken at e = 0.",
)
def B13(draw: Draw) -> tuple[Finding, ...]:
    s, k, v = _pair(draw)
    findings = []
    for p in (1.5, 2.0, 3.0, 4.0):
        g = gradient(lambda x, p=p: (x @ k - v).abs().pow(p).sum(), s)  # type: ignore[misc]
        step = write(Lp(p, smooth=None), s, k, v)
        findings.append(holds(f"p = {p:g}", gap(-g, step) / (1 + float(g.abs().max())), 1e-12))
    recalled = write(Lp(1.0, smooth=None), s, k, s @ k)
    return (*findings, holds("p = 1 writes nothing at zero error", recalled.abs().max(), 0.0))


def _vector_huber(e: Tensor, delta: float) -> Tensor:
    size = e.norm()
    return torch.where(size <= delta, size * size / 2, delta * (size - delta / 2))


@claim(
    "B14",
    "The Huber cost gives a robust delta rule.",
    Verdict.CONDITIONAL,
    BLOG("The cost hierarchy, row Huber"),
    "axes.costs.Huber, axes.costs.HuberSwitch",
    conditions="the kind (by coordinate or by norm) and the threshold are given; the printed switch of Yaad is neither",
    derivation="By coordinate r = clip(e, -delta, delta), by norm r = e min(1, delta/|e|): two different costs. The "
    "switch (e, or delta sign(e) beyond |e| = delta) jumps at the threshold, while the gradient of a convex "
    "differentiable cost is continuous: it is the gradient of no Huber cost.",
)
def B14(draw: Draw) -> tuple[Finding, ...]:
    s, k, v = draw.normal(5, 6), draw.unit(6), 2 * draw.normal(5)
    delta = 0.5
    by_coordinate = gradient(lambda x: huber_loss(x @ k, v, reduction="sum", delta=delta), s)
    by_norm = gradient(lambda x: _vector_huber(x @ k - v, delta), s)
    coordinate, norm, switch = (write(c, s, k, v) for c in (Huber(delta), Huber(delta, "norm"), HuberSwitch(delta)))

    def jump(cost: Cost) -> float:
        u, zero = draw.unit(5), torch.zeros(5, dtype=torch.float64)
        return gap(cost.gradient(u * delta * (1 - 1e-10), zero), cost.gradient(u * delta * (1 + 1e-10), zero))

    return (
        holds("by coordinate against torch's huber_loss", gap(-by_coordinate, coordinate), 1e-12),
        holds("by norm against autograd", gap(-by_norm, norm), 1e-12),
        holds("jump of the cost by norm at its threshold", jump(Huber(delta, "norm")), 1e-9),
        breaks("kinds differ: coordinate and norm", gap(coordinate, norm), 0.01),
        breaks("kinds differ: norm and switch", gap(norm, switch), 0.01),
        breaks("the switch jumps at its threshold", jump(HuberSwitch(delta)), 0.25),
        breaks("thresholds 0.5 and 0.1 differ", gap(coordinate, write(Huber(0.1), s, k, v)), 0.01),
    )


def _fitted(cost: Cost, keys: Tensor, values: Tensor) -> tuple[float, Tensor]:
    """The least total cost over matrices and the minimiser, by L-BFGS."""
    shape = (values.shape[-1], keys.shape[-1])

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        s = torch.from_numpy(x).reshape(shape).requires_grad_()
        total = cost.value(keys @ s.mT, values).sum()
        return float(total.detach()), torch.autograd.grad(total, s)[0].numpy().ravel()

    options = {"maxiter": 4000, "maxfun": 8000, "ftol": 1e-20, "gtol": 1e-13}
    found = optimize.minimize(value, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options=options)
    return float(found.fun), torch.from_numpy(found.x).reshape(shape)


@claim(
    "B15",
    "Memories with l_p and Huber costs store O(d) pairs.",
    Verdict.CONDITIONAL,
    BLOG("The cost hierarchy, capacity column"),
    "axes.costs.Lp, axes.costs.Huber",
    conditions="the keys are independent (N <= d_k), the cost is least exactly where S k = v, and it is minimised "
    "rather than stepped on once",
    derivation="If the keys are independent some S meets every S k_i = v_i, and a cost whose only minimum is there "
    "ends in it. With one key more the equations contradict each other. A cost without a minimum (alignment) rewards "
    "overshooting.",
)
def B15(draw: Draw) -> tuple[Finding, ...]:
    d, d_v = 5, 2
    keys, values = draw.orthogonal(d) + 0.2 * draw.normal(d, d) / math.sqrt(d), draw.normal(d, d_v)
    exact, key = torch.linalg.solve(keys, values), draw.unit(1, d)
    more, targets = torch.cat((keys, key)), torch.cat((values, key @ exact + 1.0))  # one pair off by one
    findings = []
    for name, cost in (("l_3", Lp(3.0)), ("Huber", Huber(1.0))):
        findings += [
            holds(f"least {name} cost over d_k pairs", _fitted(cost, keys, values)[0], 1e-6),
            breaks(f"least {name} cost over d_k + 1 pairs", _fitted(cost, more, targets)[0], 1e-4),
        ]
    rewarded = Alignment().value(keys @ exact, values).sum() - Alignment().value(2 * keys @ exact, values).sum()
    once = keys.new_zeros(d_v, d)
    random = draw.unit(d, d)
    for k, v in zip(random, values, strict=True):
        once = one_step(StateUpdate(Huber(1.0)), once, k=k, v=v)
    return (
        *findings,
        breaks("alignment falls further beyond S k = v", rewarded, 0.1),
        breaks("error after one pass of Huber steps over random keys", recall_error(random @ once.mT, values), 1e-3),
    )


@claim(
    "B16",
    "Cross-entropy on logits W x has gradient (p - e_y) x^T with p = softmax(W x).",
    Verdict.EXACT,
    BLOG("Cross-entropy as data-axis softmax attention"),
    "axes.costs.CrossEntropy, axes.optim.SGD",
    derivation="The gradient of log sum exp is softmax, that of -<e_y, z> is -e_y; z = W x adds x^T. Smoothed labels "
    "take the place of e_y.",
)
def B16(draw: Draw) -> tuple[Finding, ...]:
    classes, d = draw.integer(2, 9), draw.integer(2, 8)
    w, x, y = draw.normal(classes, d), draw.normal(d), draw.integer(0, classes - 1)
    update = StateUpdate(CrossEntropy(), algorithm=Step(0.3))
    onehot = torch.eye(classes, dtype=torch.float64)[y]
    label = torch.tensor(y)
    weight = nn.Parameter(w.clone())
    cross_entropy(weight @ x, label).backward()
    SGD([weight], lr=0.3, momentum=0.0).step()
    smooth = gradient(lambda m: cross_entropy(m @ x, label, label_smoothing=0.1), w)
    smoothed = 0.9 * onehot + 0.1 / classes
    return (
        holds("a step of the cost against SGD on torch's loss", gap(weight, one_step(update, w, k=x, v=onehot)), 1e-13),
        holds("the same with smoothed labels", gap(w - 0.3 * smooth, one_step(update, w, k=x, v=smoothed)), 1e-13),
        holds("closed form", gap(w - 0.3 * torch.outer(torch.softmax(w @ x, 0) - onehot, x), weight), 1e-13),
    )


@claim(
    "B21",
    "The alignment cost can be lowered without end by making |S k| larger: a repeated pair grows the memory linearly.",
    Verdict.EXACT,
    SLIDES("Linear Attention: Test-Time Objective"),
    "axes.sequence.UnnormalisedLinearAttention, axes.sequence.DeltaNet",
    derivation="Each repetition adds v k^T again, so |S_N| = N |v| |k|. The delta rule writes the error, which is "
    "zero after the first time: |S_N| = |v| for |k| = 1.",
)
def B21(draw: Draw) -> tuple[Finding, ...]:
    n, k, v = 1000, draw.unit(1, 1, 8), draw.normal(1, 1, 6)
    keys, values = k.expand(1, n, 8), v.expand(1, n, 6)
    hebbian, delta = (written(sequence_tuple(name), keys, values).norm() / v.norm() for name in (LINEAR, DELTA))
    return (
        holds("|S_N| / |v| is N for linear attention (relative)", (hebbian / n - 1).abs(), 1e-12),
        holds("|S_N| / |v| is 1 for the delta rule", (delta - 1).abs(), 1e-11),
    )


@claim(
    "B22",
    "The delta rule keeps the norm of its memory under control.",
    Verdict.CONDITIONAL,
    SLIDES("DeltaNet: Test-Time Objective, numerical stability"),
    "axes.sequence.DeltaNet",
    conditions="beta |k|^2 below 2, and keys that do not follow the state",
    derivation="For beta |k|^2 = 1 one step replaces the row components along k: |S|^2 -> |S|^2 - |S k|^2/|k|^2 + "
    "|v|^2 (values scaled by 1/|k|). Random keys erase |S|^2/d_k on average, which balances at d_k E|v|^2. Keys "
    "orthogonal to what is stored erase nothing, and the norm grows as sqrt(t). Beyond beta |k|^2 = 2 every erasure "
    "overshoots.",
)
def B22(draw: Draw) -> tuple[Finding, ...]:
    update, d, d_v = sequence_tuple(DELTA), 8, 4
    s, energy = draw.normal(d_v, d), []
    for _ in range(20):
        k, v = draw.normal(d), draw.normal(d_v)
        after = one_step(update, s, k=k, v=v, beta=1 / (k @ k))
        kept = s.square().sum() - (s @ k).square().sum() / (k @ k) + v.square().sum() / (k @ k)
        energy.append((after.square().sum() - kept).abs())
        s = after
    chains, length = 1024, 100
    final = written(update, draw.unit(chains, length, d), draw.normal(chains, length, d_v))
    stationary = final.square().sum((-2, -1)).mean() / (d * d_v)
    hunted, steps, one = draw.unit(1, 4), 225, torch.ones(1, dtype=torch.float64)
    for _ in range(steps - 1):
        key = draw.normal(4)
        key = key - (key @ hunted[0]) / (hunted[0] @ hunted[0]) * hunted[0]
        hunted = one_step(update, hunted, k=key / key.norm(), v=one, beta=one[0])
    keys, values = draw.unit(1, 1, d).expand(1, 400, d), draw.normal(1, 1, d_v).expand(1, 400, d_v)
    return (
        holds("energy balance of a full step", torch.stack(energy).max(), 1e-9),
        holds("E|S|^2 / (d_k E|v|^2) - 1 under random keys", (stationary - 1).abs(), 0.06),
        breaks("|S| after 225 unit values under keys that avoid it", hunted.norm(), 14.9),
        breaks(
            "|S| / |v| after 400 steps of beta |k|^2 = 2.05",
            written(update, keys, values, beta=2.05).norm() / values[0, 0].norm(),
            1e6,
        ),
        holds(
            "|S| / |v| after 400 steps of beta |k|^2 = 1.9",
            written(update, keys, values, beta=1.9).norm() / values[0, 0].norm(),
            1.0 + 1e-9,
        ),
    )


@claim(
    "B23",
    "The delta rule recalls every stored association exactly.",
    Verdict.CONDITIONAL,
    SLIDES("In-context associative recall"),
    "axes.sequence.DeltaNet, axes.sequence.UnnormalisedLinearAttention",
    conditions="orthonormal keys (hence N <= d_k) and beta |k|^2 = 1; without both only the last pair, with beta "
    "|k|^2 = 1",
    derivation="A full step makes S k = v and moves S along k only, which leaves reads at orthogonal keys alone. "
    "Additive writes are exact under the same conditions if the memory starts empty. Random keys overlap, and later "
    "writes disturb earlier ones.",
)
def B23(draw: Draw) -> tuple[Finding, ...]:
    n, d, d_v = 6, 8, 3
    delta, linear = sequence_tuple(DELTA), sequence_tuple(LINEAR)
    q, values, start = draw.orthogonal(d)[None, :n], draw.normal(1, n, d_v), draw.normal(1, d_v, d)
    random = draw.unit(1, n, d)
    crowd, many = draw.unit(1, d + 1, d), draw.normal(1, d + 1, d_v)

    def recall(update: StateUpdate, k: Tensor, v: Tensor, first: Tensor | None = None, beta: float = 1.0) -> Tensor:
        return k @ written(update, k, v, first, beta).mT - v

    return (
        holds("orthonormal keys, delta rule, any start", recall(delta, q, values, start).abs().max(), 1e-12),
        holds("orthonormal keys, additive, empty start", recall(linear, q, values).abs().max(), 1e-12),
        holds("random keys, the last pair", recall(delta, random, values)[:, -1].abs().max(), 1e-12),
        breaks("random keys, all pairs", recall(delta, random, values).abs().max(), 0.05),
        breaks("one pair more than d_k", recall(delta, crowd, many).abs().max(), 0.05),
        breaks("half a step", recall(delta, q, values, beta=0.5).abs().max(), 0.1),
        breaks("additive writes into a memory that is not empty", recall(linear, q, values, start).abs().max(), 0.1),
    )


@claim(
    "B24",
    "TTT-Linear writes by a gradient step on |x + LN(S x) - v|^2 / 2.",
    Verdict.CONDITIONAL,
    SLIDES("Going beyond online linear regression objective"),
    "axes.sequence.ttt.TTTLinear",
    conditions="the memory is the map x + LN(S x) with its eps; it is then a nonlinear cost, not the squared error "
    "of S k",
    derivation="LN sits between S k and the error, so the gradient is LN'(S k)^T e k^T: still one outer product, but "
    "not (S k - v) k^T, and the feedback on the state is nonlinear.",
)
def B24(draw: Draw) -> tuple[Finding, ...]:
    d = draw.integer(3, 8)
    s, k, v, one = draw.normal(d, d), draw.normal(d), draw.normal(d), torch.ones((), dtype=torch.float64)

    def loss(x: Tensor, key: Tensor = k, value: Tensor = v) -> Tensor:
        return (key + layer_norm(x @ key, (d,), eps=1e-6) - value).square().sum() / 2

    g, squared = gradient(loss, s), gradient(lambda x: (x @ k - v).square().sum() / 2, s)
    step = s - one_step(TTTLinear.update, s, k=k, v=v, eta=one)
    each_token = StateUpdate(SquaredError(), algorithm=Step(Per("eta")), memory=LayerNormMatrix())
    keys, values, rates = draw.normal(5, d), draw.normal(5, d), draw.uniform(5, high=0.2)
    chain = s
    for key, value, rate in zip(keys, values, rates, strict=True):
        chain = chain - rate * gradient(lambda x, key=key, value=value: loss(x, key, value), chain)  # type: ignore[misc]
    final = reference.run(each_token, {"k": keys, "v": values, "eta": rates}, weights=(s,))[1].theta[0]
    singular = torch.linalg.svdvals(step)
    coarse = one_step(StateUpdate(SquaredError(), memory=LayerNormMatrix(eps=0.1)), s, k=keys[0], v=values[0])
    fine = one_step(StateUpdate(SquaredError(), memory=LayerNormMatrix()), s, k=keys[0], v=values[0])
    return (
        holds("one token against autograd through torch's layer_norm", gap(g, step) / (1 + float(g.norm())), 1e-11),
        holds("five tokens", gap(chain, final), 1e-8),
        holds("second singular value of the write over the first", singular[1] / singular[0], 1e-12),
        breaks("distance from the gradient of the squared error, relative", (step - squared).norm() / step.norm(), 0.1),
        breaks("distance between eps = 1e-6 and 0.1", gap(coarse, fine), 1e-4),
    )
