"""Group H, schedules: weight decay and learning rates as forgetting, and Adam's bias correction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from scipy import integrate
from torch import Tensor, nn

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, holds, within
from axes.claims.tools.calculus import derivative
from axes.claims.tools.descent import Make, fed, moves, rule, sgd
from axes.claims.tools.fits import exponent
from axes.claims.tools.float64 import arange, eye, full, ones, tensor, zeros
from axes.claims.tools.matrices import relative, spread
from axes.claims.tools.tuples import GLA, MAMBA2, PREV, layer_tuple, walked
from axes.core.algorithms import Step
from axes.core.costs import Given
from axes.core.derived import structure
from axes.core.geometry import Whiten
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.optim import SGD, Adam
from axes.optim.rules.first_order import average


def _cosine(step: np.ndarray, total: int, high: float, low: float = 0.0) -> np.ndarray:
    return low + (high - low) * (1 + np.cos(np.pi * step / total)) / 2


def _area(first: float, last: float, total: int, high: float, low: float = 0.0) -> float:
    """The integral of the cosine schedule between two steps."""
    rate = lambda s: float(_cosine(np.array(s), total, high, low))  # noqa: E731
    return float(integrate.quad(rate, first, last, epsabs=1e-14)[0])


def _scheduled(start: Tensor, gradients: Iterable[Tensor], rates: Sequence[float], weight_decay: float) -> Tensor:
    """The weights of SGD with decoupled decay along a schedule of learning rates."""
    return fed(partial(sgd, weight_decay=weight_decay, decoupled=True), start, gradients, lr=rates)


@check
def H04(draw: Draw) -> Findings:
    n, d_v, d, lam, j = 12, 3, 5, 0.3, 4
    start, stream, eta = draw.normal(d_v, d), draw.normal(n, d_v, d), draw.uniform(n, low=0.1, high=0.6)
    last = _scheduled(start, stream, eta.tolist(), lam)[-1]
    kept = 1 - lam * eta
    rho = torch.stack([kept[i:].prod() for i in range(1, n + 1)])  # an empty product is 1
    printed = kept.prod() * start - torch.einsum("n,nij->ij", eta * rho, stream)
    unweighted = kept.prod() * start - torch.einsum("n,nij->ij", rho, stream)
    k, v = draw.unit(n, d), draw.normal(n, d_v)
    signal = {"k": k[j + 1 :], "v": v[j + 1 :], "decay": kept[j + 1 :].log(), "beta": eta[j + 1 :]}
    # of the first row; row vectors act from the left
    total = derivative(lambda w: walked(layer_tuple(PREV), w, **signal)[-1], start)[:d, :d].T
    product = eye(d)
    for s in range(j + 1, n):
        product = product @ (kept[s] * eye(d) - eta[s] * torch.outer(k[s], k[s]))
    yield agree("fixed gradients: weights against the weighted sum", last, printed, 1e-12)
    yield agree("squared error: total derivative against the product of transitions", total, product, 1e-12)
    yield differ("squared error: total derivative against rho alone", total, rho[j] * eye(d), 0.05)
    yield differ("fixed gradients: without each gradient's own eta", last, unweighted, 0.1)


@check
def H05(draw: Draw) -> Findings:
    steps, off = 10_000, []
    peaks = np.array([1e-4, 1e-3, 1e-2, 1e-1])
    for peak in peaks:
        rates = _cosine(np.arange(steps), steps, peak)
        exact, area = float(-np.log1p(-rates).sum()), float(rates.sum())
        left = (area - _area(0, steps, steps, peak)) / (peak / 2)
        off.append((exact - area) / area)
        yield within(f"lambda eta = {peak:g}: relative error over 3/8 lambda eta", off[-1] / (0.375 * peak), 0.98, 1.08)
        yield within("sum at the left less the integral, over lambda (eta_0 - eta_T)/2", left, 0.98, 1.02)
    few = 200
    start, lam = draw.normal(2, 3), 0.1
    rates = _cosine(np.arange(few), few, 0.5)
    path = _scheduled(start, [zeros(2, 3)] * few, rates.tolist(), lam)
    distance, exact = float(-(path[-1] / start).log().mean()), float(-np.log1p(-lam * rates).sum())
    over = _scheduled(start, [zeros(2, 3)], [1.2 / lam], lam)[-1] / start
    share = distance / (lam * float(rates.sum()))
    yield within("exponent of lambda eta in the relative error", exponent(peaks, off), 0.95, 1.05)
    yield agree("SGD on a cosine: -log of what is left, against -sum log(1 - lambda eta)", distance, exact, 1e-12)
    yield within("SGD on a cosine, lambda eta = 0.05: distance over lambda sum eta", share, 1.01, 1.03)
    yield breaks("lambda eta = 1.2: what is left of the weights is negative", -over.max(), 0.1)


@check
def H06(draw: Draw) -> Findings:
    weight = nn.Parameter(ones())
    weight.grad = torch.zeros_like(weight)
    stepper = sgd(weight, lr=1e-3, weight_decay=0.1, decoupled=True, check_finite=False)
    step, before = 0, 1.0
    while weight.item() > 0.5 and step < 8000:
        before = weight.item()
        stepper.step()
        step += 1
    # between two steps an exponential is linear in its logarithm
    half = step - 1 + math.log(before / 0.5) / math.log(before / weight.item())
    yield agree("steps until half is left, less ln 2 / (-ln(1 - 1e-4))", half, math.log(2) / -math.log1p(-1e-4), 1e-6)
    yield agree("steps until half is left, less 6931.125", half, 6931.125, 1e-3)
    yield agree("to one digit, less 7000", round(half, -3), 7000, 0)


@check
def H07(draw: Draw) -> Findings:
    n, d_v, d, lam, eta = 15, 3, 4, 0.3, 0.5
    k, v = draw.normal(n, d), draw.normal(n, d_v)

    def summed(writes: Tensor) -> Tensor:
        """What SGD with decay makes of a stream of writes from zero."""
        return _scheduled(torch.zeros_like(writes[0]), -writes, [eta] * n, lam)

    path = summed(v[:, :, None] * k[:, None])
    m = -math.log1p(-lam * eta)
    layer = walked(layer_tuple(MAMBA2), k=k, v=v, decay=full(-m, n), dt=full(eta, n))
    lag = arange(n)[:, None] - arange(n)
    unrolled = torch.einsum("nj,ji,jk->nik", (eta * (-m * lag).exp()).tril(), v, k)
    alibi = walked(layer_tuple("alibi"), q=zeros(n, d), k=k, v=v, decay=full(-m, n))
    yield agree("SGD with decay against the layer with a constant gate", path, layer, 1e-12)
    yield agree("SGD with decay against eta e^{-m (N - j)}", path, unrolled, 1e-12)
    normalised = summed(v) / summed(ones(n, 1))
    yield agree("ALiBi at a query of zero against SGD with decay, normalised", alibi, normalised, 1e-12)


@check
def H08(draw: Draw) -> Findings:
    n, d_v, d, eta = 15, 3, 4, 0.5
    k, v, lam = draw.normal(n, d), draw.normal(n, d_v), torch.linspace(0.1, 1.2, d, dtype=torch.float64)
    columns = [nn.Parameter(zeros(d_v)) for _ in range(d)]
    groups = [{"params": [c], "weight_decay": float(x)} for c, x in zip(columns, lam, strict=True)]
    stepper, path = SGD(groups, lr=eta, momentum=0.0, decoupled=True), []
    for x, y in zip(k, v, strict=True):
        for c, entry in zip(columns, x, strict=True):
            c.grad = -y * entry
        stepper.step()
        path.append(torch.stack([c.detach() for c in columns], -1))
    decayed = torch.stack(path)
    constant = torch.log1p(-lam * eta).expand(n, d)
    gla = walked(layer_tuple(GLA), k=k, v=eta * v, decay=constant)

    def mamba(gate: float) -> Tensor:
        return walked(layer_tuple(MAMBA2), k=k, v=v, decay=full(math.log(gate), n), dt=full(eta, n))

    nearest = min(relative(mamba(g), decayed) for g in np.linspace(0.3, 0.99, 30))
    q = draw.normal(6, d)
    ratios = (q * k[0] * constant[0].exp() ** 5).sum(-1) / (q * k[0]).sum(-1)
    both = [layer_tuple(x) for x in (MAMBA2, "fox")]
    scalar = sum(structure(x) == "scalar" for x in both)
    constants = sum(not isinstance(x.parts().monoid.gate, Per) for x in both)  # type: ignore[attr-defined]
    yield agree("SGD with a decay per column against GLA with constant gates", decayed, gla, 1e-12)
    yield breaks("relative distance to Mamba-2 with the best constant scalar gate", nearest, 0.02)
    yield breaks("five steps of that decay: spread over queries of the factor on q.k", ratios.std(), 1e-3)
    yield breaks("label diagonal: layers, of Mamba-2 and FoX, whose transition is scalar", scalar, 2)
    yield holds("gates, of those two, that are not named per datum", constants, 0)
    yield holds("derived transition of GLA is not diagonal", float(structure(layer_tuple(GLA)) != "diagonal"), 0)


@check
def H09(draw: Draw) -> Findings:
    total, lam, high, low = 1000, 1.0, 1e-3, 1e-5

    def closed(j: int, n: int) -> float:
        wave = math.sin(math.pi * n / total) - math.sin(math.pi * j / total)
        return lam * ((high + low) / 2 * (n - j) + (high - low) / 2 * total / math.pi * wave)

    spans = ((100, 200), (400, 500), (700, 800))
    formula, area = tensor([closed(*s) for s in spans]), tensor([lam * _area(*s, total, high, low) for s in spans])
    weight = nn.Parameter(ones(1))
    weight.grad = torch.zeros_like(weight)
    stepper = sgd(weight, lr=high, weight_decay=lam, decoupled=True)
    scheduler, left = torch.optim.lr_scheduler.CosineAnnealingLR(stepper, total, low), [1.0]
    for _ in range(800):
        stepper.step()
        scheduler.step()
        left.append(weight.item())
    measured = tensor([math.log(left[j] / left[n]) for j, n in spans])
    omega = 1e4 ** (-arange(16) / 16)
    angle = arange(total)[:, None] * omega
    encoding = torch.cat((angle.sin(), angle.cos()), -1)
    similar = torch.stack([encoding[j] @ encoding[n] for j, n in spans])
    yield agree("closed form against quadrature", formula, area, 1e-10)
    yield agree("closed form against what SGD keeps (rates are sampled)", formula, measured, 2e-4)
    yield breaks("distances of equal spans, early over late", measured[0] / measured[2], 3.0)
    yield holds("sinusoidal encodings: inner products of equal spans", spread(similar), 1e-10)


def _filter(first: bool, second: bool) -> StateUpdate:
    """Adam with the bias correction of either moment left out."""
    moment = StateUpdate(**average(0.999, "square", debias=second))
    ratio = StateUpdate(h=Whiten((moment,), "diagonal", power=0.5, eps=0.0), **average(0.9, debias=first))
    return StateUpdate(Given(), algorithm=Step(Per("lr"), via=(ratio,)))


@check
def H11(draw: Draw) -> Findings:
    n, lr = 100, 0.1
    start, stream, index = zeros(3, 2), draw.normal(n, 3, 2), arange(1, n + 1)

    def adam(weight: nn.Parameter) -> Adam:
        return Adam([weight], lr=lr, eps=0.0)

    def corrected(first: bool, second: bool) -> Make:
        return partial(rule, _filter(first, second), lr=lr)

    def factor(make: Make) -> Tensor:
        """By how much each step is larger than without any correction."""
        return (moves(make, start, stream) / moves(corrected(False, False), start, stream))[:, 0, 0]

    by_first, by_second, both = factor(corrected(True, False)), factor(corrected(False, True)), factor(adam)
    level = [full(0.7, 3, 2)] * 30
    constant, raw = moves(adam, start, level), moves(corrected(False, False), start, level)[:3, 0, 0] / -lr
    first, joint = by_first[[0, 1, 9, 49]], both[[0, 1, 4, 9, 99]]
    first_table = tensor([10.0, 5.2632, 1.5353, 1.0052])
    joint_table = tensor([0.3162, 0.2353, 0.1725, 0.1532, 0.3086])
    yield breaks("correction of m at n = 1: factor on the step, beyond 1", by_first[0] - 1, 8.9)
    yield agree("correction of m against 1/(1 - beta1^n)", by_first, 1 / (1 - 0.9**index), 1e-9)
    yield agree("correction of m at n = 1, 2, 10, 50 against 10, 5.26, 1.54, 1.005", first, first_table, 1e-4)
    yield agree("correction of v against sqrt(1 - beta2^n)", by_second, (1 - 0.999**index).sqrt(), 1e-9)
    yield agree("both at n = 1, 2, 5, 10, 100 against .316, .235, .172, .153, .309", joint, joint_table, 1e-4)
    yield agree("step of the smallest joint factor, less 12", int(both.argmin()) + 1, 12, 0)
    yield agree("smallest joint factor, less 0.1522", both.min(), 0.1522, 1e-4)
    yield agree("constant gradient: every corrected step against eta", constant, full(-lr, 30, 3, 2), 1e-12)
    yield agree("constant gradient: first uncorrected steps over eta", raw, tensor([3.1623, 4.2498, 4.9502]), 1e-3)
