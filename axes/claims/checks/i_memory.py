"""Group I, rules with several states: momentum and Titans, Adam and Adam-Net, least squares and ridge."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap
from axes.claims.tools.descent import (
    LR,
    Family,
    model_rule,
    model_trained,
    parameter,
    sgd,
    short_pairs,
    squared_errors,
    torch_sgd,
    trained,
)
from axes.claims.tools.fits import exponent
from axes.claims.tools.float64 import arange, full, ones, tensor, zeros
from axes.claims.tools.matrices import least_squares, relative
from axes.claims.tools.recurrence import recurrence, textbook_least_squares
from axes.claims.tools.tuples import dispatched, layer_tuple, ridge_path, walked
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given, Linear, SquaredError
from axes.core.geometry import Euclidean, Whiten
from axes.core.monoids import Identity, Scalar
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, State, StateUpdate
from axes.optim import Adam

TITANS, ADAM_NET = "titans-matrix", "adam-net"


def averaged(beta: float) -> StateUpdate:
    """W = a W - eta m, m = beta m + (1 - beta) grad: the step size multiplies what leaves the buffer."""
    return StateUpdate(SquaredError(), Euclidean(), Scalar("decay"), Step(Per("eta"), via=(Momentum(beta, "ema"),)))


@check
def I06(draw: Draw) -> Findings:
    n, d_v, d, beta, eta = 80, 3, 5, 0.8, 0.4
    alpha, lr = float(draw.uniform(low=0.9, high=0.98)), eta * (1 - beta)
    k, v, start = short_pairs(draw, n, d_v, d)
    losses, log_a = squared_errors(k, v), full(math.log(alpha), n)
    titans = {"k": k, "v": v, "decay": log_a, "momentum": full(math.log(beta), n), "theta": full(lr, n)}
    layer, chunked = walked(layer_tuple(TITANS), start, **titans), dispatched(layer_tuple(TITANS), start, **titans)[1]
    blog = walked(averaged(beta), start, k=k, v=v, decay=log_a, eta=full(eta, n))

    def stepped(make: Family, rate: float = lr, **options: bool) -> Tensor:
        decay = (1 - alpha) / rate
        return trained(partial(make, lr=rate, momentum=beta, weight_decay=decay, **options), start, losses)

    def beside(shrink_first: bool) -> Tensor:
        weight = parameter(start)
        stepper, path = torch_sgd(weight, lr=lr, momentum=beta), []
        for loss in losses:
            stepper.zero_grad()
            if shrink_first:
                weight.data.mul_(alpha)
            loss(weight).backward()
            if not shrink_first:
                weight.data.mul_(alpha)
            stepper.step()
            path.append(weight.detach().clone())
        return torch.stack(path)

    ours = stepped(sgd, decoupled=True)
    yield agree("axes' SGD, decoupled decay, against the layer", ours, layer, 1e-11)
    yield agree("axes' SGD against the tuple with an averaging buffer", ours, blog, 1e-11)
    yield agree("torch's SGD with the weights shrunk between gradient and step", beside(False), layer, 1e-11)
    yield agree("the layer's chunked route against axes' SGD", chunked, ours[-1], 1e-10)
    yield differ("torch's own weight decay, which goes through the momentum", stepped(torch_sgd), layer, 0.01)
    yield differ("gradient at the decayed weights", beside(True), layer, 0.005)
    yield differ("a summing buffer with the same step", stepped(sgd, eta, decoupled=True), layer, 0.1)


@check
def I07(draw: Draw) -> Findings:
    n, d_v, d, beta, eta, alpha = 80, 3, 4, 0.8, 0.5, 0.99
    k, v, start = draw.unit(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    log_a, log_b = full(math.log(alpha), n), full(math.log(beta), n)

    def both(rates: Tensor) -> tuple[Tensor, Tensor]:
        first = walked(layer_tuple(TITANS), start, k=k, v=v, decay=log_a, momentum=log_b, theta=(1 - beta) * rates)
        return first, walked(averaged(beta), start, k=k, v=v, decay=log_a, eta=rates)

    def climb(state: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The printed sign: the buffer descends, and is then subtracted."""
        w, buffer = state
        buffer = beta * buffer + eta * (1 - beta) * torch.outer(y - w @ x, x)
        return alpha * w - buffer, buffer

    constant, varying = both(full(eta, n)), both(draw.uniform(n, high=2 * eta))
    climbed = recurrence(climb, (start, torch.zeros_like(start)), k, v)
    lr = eta * (1 - beta)
    momentum = partial(sgd, lr=lr, momentum=beta, weight_decay=(1 - alpha) / lr, decoupled=True)
    stepped, growth = trained(momentum, start, squared_errors(k, v)), climbed[-1].norm() / constant[0][-1].norm()
    yield agree("constant rates, 80 tokens", constant[0], constant[1], 1e-11)
    yield agree("both against SGD with momentum", stepped, constant[0], 1e-11)
    yield breaks("rates that vary: relative distance", relative(varying[0][-1], varying[1][-1]), 0.05)
    yield breaks("buffer subtracted: norm over that of the published form", growth, 10.0)


def count(state: State) -> int:
    """How many matrices of the memory's shape a state holds, filters and statistics included."""
    inner = [s for f in state.via for s in ((f,) if isinstance(f, State) else f)]
    return len(state.theta) + sum(count(s) for s in (*inner, *state.stats))


@check
def I08(draw: Draw) -> Findings:
    n, d_v, d, lr, eps = 100, 4, 4, 0.05, 1e-4
    betas = (0.9, 0.95)
    k, v, start = draw.unit(n, d), draw.normal(n, d_v), zeros(d_v, d)
    losses = squared_errors(k, v)
    titans, adam_net = layer_tuple(TITANS), layer_tuple(ADAM_NET)
    adam = trained(lambda p: Adam([p], lr=lr, betas=betas, eps=eps), start, losses)
    etas = torch.from_numpy(np.geomspace(1e-3, 1.0, 60))
    zero = zeros(n)
    signal = {"k": k, "v": v, "decay": zero, "momentum": zero + math.log(0.9)}
    spread = {name: x[:, None].expand(n, len(etas), *x.shape[1:]) for name, x in signal.items()}
    # all learning rates at once
    walks = walked(titans, start.expand(len(etas), d_v, d), **spread, theta=(0.1 * etas).expand(n, len(etas)))
    best = ((walks[-1] - adam[-1]).flatten(1).norm(dim=1) / adam[-1].norm()).min()
    momentum = trained(partial(sgd, lr=0.02, momentum=0.9), start, losses)
    layer = walked(titans, start, **signal, theta=full(0.02, n))
    each = dataclasses.replace(adam_net, algorithm=dataclasses.replace(adam_net.algorithm, at="prev"))
    rates = {"decay": zero, "beta": full(lr, n)}
    each_path = walked(each, start, k=k, v=v, **rates)
    anchored, weight, anchor = [], parameter(start), start
    theirs = partial(torch.optim.Adam, lr=lr, betas=betas, eps=eps)
    stepper = theirs([weight])
    for t, (x, y) in enumerate(zip(k, v, strict=True)):
        if t % 16 == 0:
            anchor = weight.detach().clone()
        weight.grad = -torch.outer(y - anchor @ x, x)
        stepper.step()
        anchored.append(weight.detach().clone())
    datum = {"k": k[0], "v": v[0], **{name: x[0] for name, x in {**rates, "theta": zero, "momentum": zero}.items()}}
    held = parameter(start)
    counted = Adam([held], lr=lr)
    held.grad = start
    counted.step()
    kept = 1 + sum(x.shape == start.shape for x in counted.state[held].values())  # the weights and two averages
    by_torch, by_layer = trained(lambda p: theirs([p]), start, losses), walked(adam_net, start, k=k, v=v, **rates)
    in_spans = "Adam-Net against torch's Adam with gradients anchored every 16 pairs"
    yield breaks("states of axes' Adam (W, m, v) less those of Titans", kept - count(titans.init(datum)), 1)
    yield breaks("Titans with the best of 60 learning rates against Adam after 100 pairs, relative", best, 0.03)
    yield agree("states of Adam-Net less those of Adam", count(adam_net.init(datum)), kept, 0.0)
    yield agree("Titans against SGD with momentum", layer, momentum, 1e-11)
    yield agree("Adam-Net's tuple, gradient at the previous state, against axes' Adam", each_path, adam, 1e-9)
    yield agree("the same against torch's Adam", each_path, by_torch, 1e-9)
    yield agree(in_spans, by_layer, torch.stack(anchored), 1e-9)


def batch_ridge(k: Tensor, v: Tensor, delta: float, forget: float = 1.0, fading: bool = False) -> Tensor:
    """argmin sum forget^(t-i) |v_i - S k_i|^2 + delta |S|^2 for every prefix, by QR; fading: delta forget^t instead."""
    found = []
    for t in range(1, len(k) + 1):
        root = forget ** (arange(t).flip(0) / 2)[:, None]
        found.append(least_squares(root * k[:t], root * v[:t], delta * (forget**t if fading else 1.0)))
    return torch.stack(found)


def accumulated(delta: float) -> StateUpdate:
    """W - lr g (sum k k^T + delta)^{-1}: natural gradient whose Fisher matrix adds up over the examples."""
    metric = Whiten((StateUpdate(Linear("key")),), "right", 1.0, delta)
    return StateUpdate(Given(), OnUpdate(metric), Identity(), Step(LR))


@check
def I09(draw: Draw) -> Findings:
    n, d_v, d, delta = 14, 3, 5, 0.2
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    layer, forgetting = ridge_path(k, v, delta), ridge_path(k, v, delta, math.log(0.95))
    model = partial(model_rule, accumulated(delta), lr=1.0)
    natural = model_trained(model, zeros(d_v, d), zip(k[:, None], v, strict=True))
    exponents = []
    for m in (4, 9):
        keys = draw.conditioned(m, d)
        inverse = torch.linalg.lstsq(keys, v[:m], driver="gelsd").solution.mT
        deltas = [1e-2, 1e-4, 1e-6]
        exponents.append(exponent(deltas, [gap(ridge_path(keys, v[:m], x)[-1], inverse) for x in deltas]))
        if m < d:
            recalled, stored = keys @ ridge_path(keys, v[:m], 1e-8)[-1].mT, v[:m]
    textbook, faded = (textbook_least_squares(k, v, delta, forget) for forget in (1.0, 0.95))
    floating, fading = batch_ridge(k, v, delta, 0.95), batch_ridge(k, v, delta, 0.95, fading=True)
    approach = "exponent of delta in the distance from the pseudo-inverse, less 1"
    yield agree("layer against batch ridge, every prefix", layer, batch_ridge(k, v, delta), 1e-10)
    yield agree("layer with forgetting 0.95 against discounted ridge", forgetting, floating, 1e-10)
    yield agree("textbook recursion against ridge whose floor fades as 0.95^t", faded, fading, 1e-10)
    yield agree("textbook recursion without forgetting against the layer", textbook, layer, 1e-10)
    yield agree("natural gradient on a linear model, Fisher accumulated, against the layer", natural, layer, 1e-10)
    yield agree(approach, tensor(exponents), ones(2), 0.03)
    yield agree("recall of N < d_k pairs at delta = 1e-8", recalled, stored, 1e-6)
