"""Group H, schedules: weight decay and learning rates as forgetting, and Adam's bias correction."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import integrate
from torch import Tensor, nn

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, untestable, within
from axes.claims.group_a_tools import layer_tuple
from axes.claims.group_h_tools import handed, scheduled
from axes.claims.sources import BLOG
from axes.core import reference
from axes.core.algorithms import Step
from axes.core.costs import Given
from axes.core.derived import structure
from axes.core.geometry import Whiten
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.optim import SGD, Adam, optimizer
from axes.optim.rules.first_order import average

_TABLE = "The data axis, learning rate as positional encoding"


def _cosine(step: np.ndarray, total: int, high: float, low: float = 0.0) -> np.ndarray:
    return low + (high - low) * (1 + np.cos(np.pi * step / total)) / 2


@claim(
    "H04",
    "With weight decay the influence of gradient j on the weights after N steps is rho(j, N) = prod_{s>j} (1 - lambda "
    "eta_s).",
    Verdict.CONDITIONAL,
    BLOG(_TABLE),
    "axes.optim.SGD, axes.sequence.GatedDeltaNetPrev",
    conditions="the later gradients are held fixed; each gradient also carries its own eta_j",
    derivation="W_N = rho(0, N) W_0 - sum eta_j rho(j, N) g_j. If the loss is the squared error, later gradients see "
    "the "
    "change and dW_N/dg_j = -eta_j prod_{s>j} ((1 - lambda eta_s) I - eta_s x_s x_s^T).",
)
def H04(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, lam, j = 12, 3, 5, 0.3, 4
    start, stream, eta = draw.normal(d_v, d), draw.normal(n, d_v, d), draw.uniform(n, low=0.1, high=0.6)
    path = scheduled(start, list(stream), eta.tolist(), lam)
    kept = 1 - lam * eta
    rho = torch.stack([kept[i:].prod() for i in range(1, n + 1)])  # an empty product is 1
    printed = kept.prod() * start - torch.einsum("n,nij->ij", eta * rho, stream)
    unweighted = kept.prod() * start - torch.einsum("n,nij->ij", rho, stream)
    k, v = draw.unit(n, d), draw.normal(n, d_v)
    signal = {"k": k[j + 1 :], "v": v[j + 1 :], "decay": kept[j + 1 :].log(), "beta": eta[j + 1 :]}
    layer = layer_tuple("gated-delta-net-prev")
    total = torch.autograd.functional.jacobian(
        lambda row: reference.run(layer, signal, weights=(torch.cat((row[None], start[1:])),))[0][-1, 0], start[0]
    ).T  # row vectors act from the left
    product, eye = torch.eye(d, dtype=torch.float64), torch.eye(d, dtype=torch.float64)
    for s in range(j + 1, n):
        product = product @ (kept[s] * eye - eta[s] * torch.outer(k[s], k[s]))
    return (
        holds("fixed gradients: weights against the weighted sum", gap(path[-1], printed), 1e-12),
        holds("squared error: total derivative against the product of transitions", gap(total, product), 1e-12),
        breaks("squared error: total derivative against rho alone", gap(total, rho[j] * eye), 0.05),
        breaks("fixed gradients: without each gradient's own eta", gap(path[-1], unweighted), 0.1),
    )


@claim(
    "H05",
    "The distance between two steps is lambda times the area under the schedule of learning rates.",
    Verdict.APPROXIMATE,
    BLOG(_TABLE),
    "axes.optim.SGD",
    derivation="Exactly d = -sum log(1 - lambda eta_s) = lambda sum eta + lambda^2 sum eta^2 / 2 + ...: the relative "
    "error is linear in lambda eta, 3/8 of it for a cosine; summing at the left adds lambda (eta_0 - eta_T)/2. At "
    "lambda eta >= 1 there is no distance: the weights are erased or change sign.",
    seeds=1,
)
def H05(draw: Draw) -> tuple[Finding, ...]:
    steps, findings, off = 10_000, [], []
    peaks = np.array([1e-4, 1e-3, 1e-2, 1e-1])
    for peak in peaks:
        rates = _cosine(np.arange(steps), steps, peak)
        exact, area = float(-np.log1p(-rates).sum()), float(rates.sum())
        integral = integrate.quad(lambda s, p=peak: float(_cosine(np.array(s), steps, p)), 0, steps, epsabs=1e-12)[0]
        off.append((exact - area) / area)
        findings += [
            within(f"lambda eta = {peak:g}: relative error over 3/8 lambda eta", off[-1] / (0.375 * peak), 0.98, 1.08),
            within(
                "sum at the left less the integral, over lambda (eta_0 - eta_T)/2",
                (area - integral) / (peak / 2),
                0.98,
                1.02,
            ),
        ]
    few = 200
    start, lam = draw.normal(2, 3), 0.1
    rates = _cosine(np.arange(few), few, 0.5)
    path = scheduled(start, [torch.zeros(2, 3, dtype=torch.float64)] * few, rates.tolist(), lam)
    distance = float(-(path[-1] / start).log().mean())
    over = scheduled(start, [torch.zeros(2, 3, dtype=torch.float64)], [1.2 / lam], lam)
    return (
        *findings,
        within(
            "exponent of lambda eta in the relative error", np.polyfit(np.log(peaks), np.log(off), 1)[0], 0.95, 1.05
        ),
        holds(
            "SGD on a cosine: -log of what is left, against -sum log(1 - lambda eta)",
            abs(distance + float(np.log1p(-lam * rates).sum())),
            1e-12,
        ),
        within(
            "SGD on a cosine, lambda eta = 0.05: distance over lambda sum eta",
            distance / (lam * float(rates.sum())),
            1.01,
            1.03,
        ),
        breaks("lambda eta = 1.2: what is left of the weights is negative", -float((over[-1] / start).max()), 0.1),
    )


@claim(
    "H06",
    "With eta = 1e-3 and weight decay 0.1 a gradient loses half its influence in about 7000 steps.",
    Verdict.EXACT,
    BLOG(_TABLE),
    "axes.optim.SGD",
    derivation="ln 2 / (-ln(1 - 1e-4)) = 6931.13.",
    seeds=1,
)
def H06(draw: Draw) -> tuple[Finding, ...]:
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    weight.grad = torch.zeros_like(weight)
    sgd = SGD([weight], lr=1e-3, momentum=0.0, weight_decay=0.1, decoupled=True, check_finite=False)
    step, before = 0, 1.0
    while weight.item() > 0.5 and step < 8000:
        before = weight.item()
        sgd.step()
        step += 1
    # between two steps an exponential is linear in its logarithm
    half = step - 1 + math.log(before / 0.5) / math.log(before / weight.item())
    return (
        holds(
            "steps until half is left, less ln 2 / (-ln(1 - 1e-4))", abs(half - math.log(2) / -math.log1p(-1e-4)), 1e-6
        ),
        holds("steps until half is left, less 6931.125", abs(half - 6931.125), 1e-3),
        holds("to one digit, less 7000", abs(round(half, -3) - 7000), 0),
    )


@claim(
    "H07",
    "A constant learning rate with weight decay is the uniform exponential decay of ALiBi and RetNet.",
    Verdict.EXACT,
    BLOG(_TABLE),
    "axes.optim.SGD, axes.sequence.Mamba2, axes.sequence.ALiBi",
    derivation="Each step keeps 1 - lambda eta, so pair j enters with eta e^{-m (N - j)}, m = -ln(1 - lambda eta). "
    "ALiBi's weights at a query of zero are those factors, normalised.",
)
def H07(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, lam, eta = 15, 3, 4, 0.3, 0.5
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    path = scheduled(
        torch.zeros(d_v, d, dtype=torch.float64),
        [-torch.outer(y, x) for x, y in zip(k, v, strict=True)],
        [eta] * n,
        lam,
    )
    m = -math.log1p(-lam * eta)
    log_gate, step = torch.full((n,), -m, dtype=torch.float64), torch.full((n,), eta, dtype=torch.float64)
    layer = reference.run(layer_tuple("mamba2"), {"k": k, "v": v, "decay": log_gate, "dt": step})[0]
    lag = torch.arange(n, dtype=torch.float64)[:, None] - torch.arange(n, dtype=torch.float64)
    bias = torch.where(lag >= 0, -m * lag, torch.full_like(lag, -math.inf))
    unrolled = torch.einsum("nj,ji,jk->nik", eta * bias.exp(), v, k)
    blind = {"q": torch.zeros(n, d, dtype=torch.float64), "k": k, "v": v, "decay": log_gate}
    alibi = reference.run(layer_tuple("alibi"), blind)[0]
    ones = scheduled(
        torch.zeros(1, 1, dtype=torch.float64), [-torch.ones(1, 1, dtype=torch.float64)] * n, [eta] * n, lam
    )
    values = scheduled(torch.zeros(d_v, 1, dtype=torch.float64), [-y[:, None] for y in v], [eta] * n, lam)
    return (
        holds("SGD with decay against the layer with a constant gate", gap(path, layer), 1e-12),
        holds("SGD with decay against eta e^{-m (N - j)}", gap(path, unrolled), 1e-12),
        holds(
            "ALiBi at a query of zero against SGD with decay, normalised", gap(alibi, (values / ones)[..., 0]), 1e-12
        ),
    )


@claim(
    "H08",
    "A weight decay per parameter is the diagonal, adaptive gate of FoX and Mamba-2.",
    Verdict.FALSE,
    BLOG(_TABLE),
    "axes.optim.SGD, axes.sequence.GLA, axes.sequence.Mamba2",
    correction="a constant decay per channel is GLA with constant gates, RetNet per channel; FoX and Mamba-2 have one "
    "scalar per head that depends on the data",
    kind="LABEL",
    derivation="Decaying column j by (1 - lambda_j eta) multiplies the state by a diagonal matrix that no datum "
    "enters. "
    "A scalar gate scales q.k by one factor for every query; a diagonal one does not.",
)
def H08(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, eta = 15, 3, 4, 0.5
    k, v, lam = draw.normal(n, d), draw.normal(n, d_v), torch.linspace(0.1, 1.2, d, dtype=torch.float64)
    columns = [nn.Parameter(torch.zeros(d_v, 1, dtype=torch.float64)) for _ in range(d)]
    sgd = SGD(
        [{"params": [c], "weight_decay": float(x)} for c, x in zip(columns, lam, strict=True)],
        lr=eta,
        momentum=0.0,
        decoupled=True,
    )
    path = []
    for x, y in zip(k, v, strict=True):
        for i, c in enumerate(columns):
            c.grad = -(y * x[i])[:, None]
        sgd.step()
        path.append(torch.cat([c.detach() for c in columns], -1))
    decayed = torch.stack(path)
    constant = torch.log1p(-lam * eta).expand(n, d)
    gla = reference.run(layer_tuple("gla"), {"k": k, "v": eta * v, "decay": constant})[0]
    step = torch.full((n,), eta, dtype=torch.float64)

    def mamba(gate: float) -> Tensor:
        rates = {"decay": torch.full((n,), math.log(gate), dtype=torch.float64), "dt": step}
        return reference.run(layer_tuple("mamba2"), {"k": k, "v": v, **rates})[0]

    nearest = min(float((mamba(g) - decayed).norm() / decayed.norm()) for g in np.linspace(0.3, 0.99, 30))
    q = draw.normal(6, d)
    ratios = (q * k[0] * constant[0].exp() ** 5).sum(-1) / (q * k[0]).sum(-1)
    named = [layer_tuple(x).parts().monoid for x in ("mamba2", "fox")]
    return (
        holds("SGD with a decay per column against GLA with constant gates", gap(decayed, gla), 1e-12),
        breaks("relative distance to Mamba-2 with the best constant scalar gate", nearest, 0.02),
        breaks("five steps of that decay: spread over queries of the factor on q.k", float(ratios.std()), 1e-3),
        breaks(
            "label diagonal: layers, of Mamba-2 and FoX, whose transition is scalar",
            sum(structure(layer_tuple(x)) == "scalar" for x in ("mamba2", "fox")),
            2,
        ),
        holds("gates, of those two, that are not named per datum", sum(not isinstance(m.gate, Per) for m in named), 0),  # type: ignore[attr-defined]
        holds("derived transition of GLA is not diagonal", float(structure(layer_tuple("gla")) != "diagonal"), 0),
    )


@claim(
    "H09",
    "Cosine annealing is the analogue of sinusoidal positional encoding.",
    Verdict.FALSE,
    BLOG(_TABLE),
    "axes.optim.SGD driven by torch.optim.lr_scheduler.CosineAnnealingLR",
    correction="its distance is linear plus sinusoidal, as said, but not a function of N - j: a bias on the logits "
    "that "
    "is not stationary, without a relative counterpart",
    kind="OVER",
    derivation="d/lambda = (max + min)/2 (N - j) + (max - min)/2 (T/pi)(sin pi N/T - sin pi j/T), while inner products "
    "of sinusoidal encodings are sums of cos(omega (N - j)).",
    seeds=1,
)
def H09(draw: Draw) -> tuple[Finding, ...]:
    total, lam, high, low = 1000, 1.0, 1e-3, 1e-5

    def closed(j: int, n: int) -> float:
        wave = math.sin(math.pi * n / total) - math.sin(math.pi * j / total)
        return lam * ((high + low) / 2 * (n - j) + (high - low) / 2 * total / math.pi * wave)

    spans = ((100, 200), (400, 500), (700, 800))
    area = [
        lam * integrate.quad(lambda s: float(_cosine(np.array(s), total, high, low)), *s, epsabs=1e-14)[0]
        for s in spans
    ]
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    weight.grad = torch.zeros_like(weight)
    sgd = SGD([weight], lr=high, momentum=0.0, weight_decay=lam, decoupled=True)
    scheduler, left = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, total, low), [1.0]
    for _ in range(800):
        sgd.step()
        scheduler.step()
        left.append(weight.item())
    measured = [math.log(left[j] / left[n]) for j, n in spans]
    omega = 1e4 ** (-torch.arange(16, dtype=torch.float64) / 16)
    angle = torch.arange(total, dtype=torch.float64)[:, None] * omega
    encoding = torch.cat((angle.sin(), angle.cos()), -1)
    similar = [float(encoding[j] @ encoding[n]) for j, n in spans]
    return (
        holds(
            "closed form against quadrature", max(abs(closed(*s) - a) for s, a in zip(spans, area, strict=True)), 1e-10
        ),
        holds(
            "closed form against what SGD keeps (rates are sampled)",
            max(abs(closed(*s) - m) for s, m in zip(spans, measured, strict=True)),
            2e-4,
        ),
        breaks("distances of equal spans, early over late", measured[0] / measured[2], 3.0),
        holds("sinusoidal encodings: inner products of equal spans", max(similar) - min(similar), 1e-10),
    )


H10 = untestable(
    "H10",
    "A curriculum is input-dependent gating, and positional encoding has no meaning on the data axis.",
    BLOG(_TABLE + "; Table of relevance by axis"),
    "a metaphor without an equation; the second half contradicts the reading of learning rates as distances",
)


def _filter(first: bool, second: bool) -> StateUpdate:
    """Adam with the bias correction of either moment left out."""
    moment = StateUpdate(**average(0.999, "square", debias=second))
    ratio = StateUpdate(h=Whiten((moment,), "diagonal", power=0.5, eps=0.0), **average(0.9, debias=first))
    return StateUpdate(Given(), algorithm=Step(Per("lr"), via=(ratio,)))


@claim(
    "H11",
    "Adam's correction of the first moment, m/(1 - beta1^n), warms up.",
    Verdict.FALSE,
    BLOG("The data axis, Adam"),
    "axes.optim.Adam, axes.optim.optimizer of Adam's tuple without a correction",
    correction="it makes early steps larger, ten times at n = 1; the correction of the second moment makes them "
    "smaller, "
    "and both together give a factor with a minimum of 0.152 at n = 12. With a constant gradient every step is eta",
    kind="MATH",
    derivation="The factors are 1/(1 - beta1^n) and sqrt(1 - beta2^n), whatever the gradients.",
    seeds=1,
)
def H11(draw: Draw) -> tuple[Finding, ...]:
    n, lr = 100, 0.1
    start, stream = torch.zeros(3, 2, dtype=torch.float64), list(draw.normal(n, 3, 2))

    def moves(make: object, gradients: list[Tensor]) -> Tensor:
        path = handed(make, start, gradients)  # type: ignore[arg-type]
        return torch.diff(torch.cat((start[None], path)), dim=0)

    def variant(first: bool, second: bool) -> object:
        return lambda w: optimizer(_filter(first, second))([w], lr=lr)

    neither = moves(variant(False, False), stream)
    by_first = (moves(variant(True, False), stream) / neither)[:, 0, 0]
    by_second = (moves(variant(False, True), stream) / neither)[:, 0, 0]
    both = (moves(lambda w: Adam([w], lr=lr, eps=0.0), stream) / neither)[:, 0, 0]
    index = torch.arange(1, n + 1, dtype=torch.float64)
    level = [torch.full((3, 2), 0.7, dtype=torch.float64)] * 30
    constant = moves(lambda w: Adam([w], lr=lr, eps=0.0), level)
    raw = moves(variant(False, False), level)[:3, 0, 0] / -lr
    table = torch.tensor([10.0, 5.2632, 1.5353, 1.0052], dtype=torch.float64)
    joint = torch.tensor([0.3162, 0.2353, 0.1725, 0.1532, 0.3086], dtype=torch.float64)
    return (
        breaks("correction of m at n = 1: factor on the step, beyond 1", by_first[0] - 1, 8.9),
        holds("correction of m against 1/(1 - beta1^n)", gap(by_first, 1 / (1 - 0.9**index)), 1e-9),
        holds(
            "correction of m at n = 1, 2, 10, 50 against 10, 5.26, 1.54, 1.005",
            gap(by_first[[0, 1, 9, 49]], table),
            1e-4,
        ),
        holds("correction of v against sqrt(1 - beta2^n)", gap(by_second, (1 - 0.999**index).sqrt()), 1e-9),
        holds(
            "both at n = 1, 2, 5, 10, 100 against .316, .235, .172, .153, .309",
            gap(both[[0, 1, 4, 9, 99]], joint),
            1e-4,
        ),
        holds("step of the smallest joint factor, less 12", abs(int(both.argmin()) + 1 - 12), 0),
        holds("smallest joint factor, less 0.1522", abs(float(both.min()) - 0.1522), 1e-4),
        holds(
            "constant gradient: every corrected step against eta", gap(constant, torch.full_like(constant, -lr)), 1e-12
        ),
        holds(
            "constant gradient: first uncorrected steps over eta",
            gap(raw, torch.tensor([3.1623, 4.2498, 4.9502], dtype=torch.float64)),
            1e-3,
        ),
    )
