"""Group B, write rules: what one step on each cost writes into a matrix memory."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from scipy import optimize
from torch import Tensor
from torch.nn.functional import cross_entropy, huber_loss, layer_norm

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds
from axes.claims.tools.calculus import gradient, half_square, vector_huber
from axes.claims.tools.capacity import recall_error, written
from axes.claims.tools.descent import Loss, alignment, sgd, squared_error, squared_errors, trained
from axes.claims.tools.float64 import eye, ones, zeros
from axes.claims.tools.matrices import relative
from axes.claims.tools.recurrence import recurrence
from axes.claims.tools.tuples import DELTA, LINEAR, dispatched, layer_tuple, one_step, walked
from axes.core.algorithms import Step
from axes.core.costs import Alignment, Cost, CrossEntropy, Huber, HuberSwitch, Lp, SquaredError
from axes.core.memory import LayerNormMatrix
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.ttt import TTTLinear


def write(cost: Cost, start: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What one unit step on a cost adds to the matrix: minus its gradient."""
    return one_step(StateUpdate(cost), start, k=k, v=v) - start


def _pair(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    d_v, d_k = draw.integer(2, 6), draw.integer(2, 7)
    return draw.normal(d_v, d_k), draw.normal(d_k), draw.normal(d_v)


@check
def B01(draw: Draw) -> Findings:
    s, k, v = _pair(draw)
    g, token = gradient(alignment(k, v), s), one_step(layer_tuple(LINEAR), s, k=k, v=v)
    beta = draw.uniform(low=0.1, high=2.0)
    scaled = StateUpdate(Alignment(), algorithm=Step(Per("beta")))
    yield agree("S - grad against one token of linear attention", s - g, token, 1e-13)
    yield agree("S - beta grad", s - beta * g, one_step(scaled, s, k=k, v=v, beta=beta), 1e-13)


@check
def B02(draw: Draw) -> Findings:
    n, d_k, d_v = draw.integer(1, 70), draw.integer(1, 9), draw.integer(1, 7)
    k, v, start, update = draw.normal(n, d_k), draw.normal(n, d_v), draw.normal(d_v, d_k), layer_tuple(LINEAR)
    interpreted = walked(update, start, k=k, v=v)[-1]
    yield agree("from an empty memory", dispatched(update, k=k, v=v)[1], v.mT @ k, 1e-11)
    yield agree("from S_0", dispatched(update, start, k=k, v=v)[1], start + v.mT @ k, 1e-11)
    yield agree("from S_0, one token after another", interpreted, start + v.mT @ k, 1e-11)


@check
def B03(draw: Draw) -> Findings:
    s, k, v = _pair(draw)
    stepped = one_step(layer_tuple(DELTA), s, k=k, v=v, beta=ones())
    keys, values = draw.unit(12, s.shape[1]), draw.normal(12, s.shape[0])
    tokens = dispatched(layer_tuple(DELTA), s, k=keys, v=values, beta=ones(12))[1]
    descended = trained(sgd, s, squared_errors(keys, values))[-1]
    yield agree("S - grad against one token of DeltaNet", s - gradient(squared_error(k, v), s), stepped, 1e-12)
    yield agree("12 steps of SGD against 12 tokens", descended, tokens, 1e-11)


@check
def B13(draw: Draw) -> Findings:
    s, k, v = _pair(draw)
    for p in (1.5, 2.0, 3.0, 4.0):
        g = gradient(lambda x, p=p: (x @ k - v).abs().pow(p).sum(), s)  # type: ignore[misc]
        step = write(Lp(p, smooth=None), s, k, v)
        yield holds(f"p = {p:g}", gap(-g, step) / (1 + float(g.abs().max())), 1e-12)
    recalled = write(Lp(1.0, smooth=None), s, k, s @ k)
    yield holds("p = 1 writes nothing at zero error", recalled.abs().max(), 0.0)


@check
def B14(draw: Draw) -> Findings:
    s, k, v = draw.normal(5, 6), draw.unit(6), 2 * draw.normal(5)
    delta = 0.5
    by_coordinate = gradient(lambda x: huber_loss(x @ k, v, reduction="sum", delta=delta), s)
    by_norm = gradient(lambda x: vector_huber(x @ k - v, delta), s)
    coordinate, norm, switch = (write(c, s, k, v) for c in (Huber(delta), Huber(delta, "norm"), HuberSwitch(delta)))

    def jump(cost: Cost) -> float:
        u, zero = draw.unit(5), zeros(5)
        return gap(cost.gradient(u * delta * (1 - 1e-10), zero), cost.gradient(u * delta * (1 + 1e-10), zero))

    yield agree("by coordinate against torch's huber_loss", -by_coordinate, coordinate, 1e-12)
    yield agree("by norm against autograd", -by_norm, norm, 1e-12)
    yield holds("jump of the cost by norm at its threshold", jump(Huber(delta, "norm")), 1e-9)
    yield differ("kinds differ: coordinate and norm", coordinate, norm, 0.01)
    yield differ("kinds differ: norm and switch", norm, switch, 0.01)
    yield breaks("the switch jumps at its threshold", jump(HuberSwitch(delta)), 0.25)
    yield differ("thresholds 0.5 and 0.1 differ", coordinate, write(Huber(0.1), s, k, v), 0.01)


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


@check
def B15(draw: Draw) -> Findings:
    d, d_v = 5, 2
    keys, values = draw.orthogonal(d) + 0.2 * draw.normal(d, d) / math.sqrt(d), draw.normal(d, d_v)
    exact, key = torch.linalg.solve(keys, values), draw.unit(1, d)
    more, targets = torch.cat((keys, key)), torch.cat((values, key @ exact + 1.0))  # one pair off by one
    for name, cost in (("l_3", Lp(3.0)), ("Huber", Huber(1.0))):
        yield holds(f"least {name} cost over d_k pairs", _fitted(cost, keys, values)[0], 1e-6)
        yield breaks(f"least {name} cost over d_k + 1 pairs", _fitted(cost, more, targets)[0], 1e-4)
    rewarded = Alignment().value(keys @ exact, values).sum() - Alignment().value(2 * keys @ exact, values).sum()
    random = draw.unit(d, d)
    once = walked(StateUpdate(Huber(1.0)), k=random, v=values)[-1]
    yield breaks("alignment falls further beyond S k = v", rewarded, 0.1)
    yield breaks("error after one pass of Huber steps over random keys", recall_error(random @ once.mT, values), 1e-3)


@check
def B16(draw: Draw) -> Findings:
    classes, d = draw.integer(2, 9), draw.integer(2, 8)
    w, x, y = draw.normal(classes, d), draw.normal(d), draw.integer(0, classes - 1)
    update = StateUpdate(CrossEntropy(), algorithm=Step(0.3))
    label, onehot = torch.tensor(y), eye(classes)[y]
    stepped = trained(partial(sgd, lr=0.3), w, [lambda m: cross_entropy(m @ x, label)])[0]
    smooth = gradient(lambda m: cross_entropy(m @ x, label, label_smoothing=0.1), w)
    smoothed = 0.9 * onehot + 0.1 / classes
    yield agree("a step of the cost against SGD on torch's loss", stepped, one_step(update, w, k=x, v=onehot), 1e-13)
    yield agree("the same with smoothed labels", w - 0.3 * smooth, one_step(update, w, k=x, v=smoothed), 1e-13)
    yield agree("closed form", w - 0.3 * torch.outer(torch.softmax(w @ x, 0) - onehot, x), stepped, 1e-13)


@check
def B21(draw: Draw) -> Findings:
    n, k, v = 1000, draw.unit(1, 1, 8), draw.normal(1, 1, 6)
    keys, values = k.expand(1, n, 8), v.expand(1, n, 6)
    hebbian, delta = (written(layer_tuple(name), keys, values).norm() / v.norm() for name in (LINEAR, DELTA))
    yield agree("|S_N| / |v| is N for linear attention (relative)", hebbian / n, 1, 1e-12)
    yield agree("|S_N| / |v| is 1 for the delta rule", delta, 1, 1e-11)


@check
def B22(draw: Draw) -> Findings:
    update, d, d_v = layer_tuple(DELTA), 8, 4
    s, energy = draw.normal(d_v, d), []
    for _ in range(20):
        k, v = draw.normal(d), draw.normal(d_v)
        after = one_step(update, s, k=k, v=v, beta=1 / (k @ k))
        kept = s.square().sum() - (s @ k).square().sum() / (k @ k) + v.square().sum() / (k @ k)
        energy.append(after.square().sum() - kept)
        s = after
    chains, length = 1024, 100
    final = written(update, draw.unit(chains, length, d), draw.normal(chains, length, d_v))
    stationary = final.square().sum((-2, -1)).mean() / (d * d_v)
    hunted, steps, one = draw.unit(1, 4), 225, ones(1)
    for _ in range(steps - 1):
        key = draw.normal(4)
        key = key - (key @ hunted[0]) / (hunted[0] @ hunted[0]) * hunted[0]
        hunted = one_step(update, hunted, k=key / key.norm(), v=one, beta=one[0])
    keys, values = draw.unit(1, 1, d).expand(1, 400, d), draw.normal(1, 1, d_v).expand(1, 400, d_v)

    def growth(beta: float) -> Tensor:
        return written(update, keys, values, beta=beta).norm() / values[0, 0].norm()

    yield holds("energy balance of a full step", torch.stack(energy), 1e-9)
    yield agree("E|S|^2 / (d_k E|v|^2) - 1 under random keys", stationary, 1, 0.06)
    yield breaks("|S| after 225 unit values under keys that avoid it", hunted.norm(), 14.9)
    yield breaks("|S| / |v| after 400 steps of beta |k|^2 = 2.05", growth(2.05), 1e6)
    yield holds("|S| / |v| after 400 steps of beta |k|^2 = 1.9", growth(1.9), 1.0 + 1e-9)


@check
def B23(draw: Draw) -> Findings:
    n, d, d_v = 6, 8, 3
    delta, linear = layer_tuple(DELTA), layer_tuple(LINEAR)
    q, values, start = draw.orthogonal(d)[None, :n], draw.normal(1, n, d_v), draw.normal(1, d_v, d)
    random = draw.unit(1, n, d)
    crowd, many = draw.unit(1, d + 1, d), draw.normal(1, d + 1, d_v)

    def recalled(update: StateUpdate, k: Tensor, v: Tensor, first: Tensor | None = None, beta: float = 1.0) -> Tensor:
        return k @ written(update, k, v, first, beta).mT

    yield agree("orthonormal keys, delta rule, any start", recalled(delta, q, values, start), values, 1e-12)
    yield agree("orthonormal keys, additive, empty start", recalled(linear, q, values), values, 1e-12)
    yield agree("random keys, the last pair", recalled(delta, random, values)[:, -1], values[:, -1], 1e-12)
    yield differ("random keys, all pairs", recalled(delta, random, values), values, 0.05)
    yield differ("one pair more than d_k", recalled(delta, crowd, many), many, 0.05)
    yield differ("half a step", recalled(delta, q, values, beta=0.5), values, 0.1)
    yield differ("additive writes into a memory that is not empty", recalled(linear, q, values, start), values, 0.1)


@check
def B24(draw: Draw) -> Findings:
    d = draw.integer(3, 8)
    s, k, v = draw.normal(d, d), draw.normal(d), draw.normal(d)

    def loss(key: Tensor, value: Tensor) -> Loss:
        return lambda x: half_square(key + layer_norm(x @ key, (d,), eps=1e-6) - value)

    g, squared = gradient(loss(k, v), s), gradient(squared_error(k, v), s)
    step = s - one_step(TTTLinear.update, s, k=k, v=v, eta=ones())
    each_token = StateUpdate(SquaredError(), algorithm=Step(Per("eta")), memory=LayerNormMatrix())
    keys, values, rates = draw.normal(5, d), draw.normal(5, d), draw.uniform(5, high=0.2)
    descended = recurrence(lambda x, key, value, rate: x - rate * gradient(loss(key, value), x), s, keys, values, rates)
    tokens = walked(each_token, s, k=keys, v=values, eta=rates)
    singular = torch.linalg.svdvals(step)
    coarse, fine = (
        one_step(StateUpdate(SquaredError(), memory=LayerNormMatrix(eps=eps)), s, k=keys[0], v=values[0])
        for eps in (0.1, 1e-6)
    )
    yield holds("one token against autograd through torch's layer_norm", gap(g, step) / (1 + float(g.norm())), 1e-11)
    yield agree("five tokens", descended[-1], tokens[-1], 1e-8)
    yield holds("second singular value of the write over the first", singular[1] / singular[0], 1e-12)
    yield breaks("distance from the gradient of the squared error, relative", relative(squared, step), 0.1)
    yield differ("distance between eps = 1e-6 and 0.1", coarse, fine, 1e-4)
