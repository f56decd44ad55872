"""Group I, rules with several states: momentum and Titans, Adam and Adam-Net, least squares and ridge."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor, nn

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds
from axes.claims.group_a_tools import layer_tuple
from axes.claims.group_c_writes import conditioned, ridge_weights
from axes.claims.group_i_descent import (
    LR,
    descended,
    dispatched,
    losses,
    pairs,
    parameter,
    sgd,
    torch_sgd,
    walked,
)
from axes.claims.sources import BLOG
from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given, Linear, SquaredError
from axes.core.geometry import Euclidean, Whiten
from axes.core.monoids import Identity, Scalar
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, State, StateUpdate
from axes.optim import Adam, optimizer

_TITANS, _TABLES = "Titans", "Tables of correspondences"


def averaged(beta: float) -> StateUpdate:
    """W = a W - eta m, m = beta m + (1 - beta) grad: the step size multiplies what leaves the buffer."""
    return StateUpdate(SquaredError(), Euclidean(), Scalar("decay"), Step(Per("eta"), via=(Momentum(beta, "ema"),)))


def full(n: int, value: float) -> Tensor:
    return torch.full((n,), value, dtype=torch.float64)


@claim(
    "I06",
    "Titans, M = a M - eta m with m = b m + (1 - b) grad l, is SGD with momentum and weight decay.",
    Verdict.CONDITIONAL,
    BLOG(_TITANS),
    "axes.sequence.TitansMatrix, axes.optim.SGD, axes.StateUpdate",
    conditions="the decay is decoupled from the momentum, the gradient is taken at the weights before they decay, and "
    "the rates are constant: step eta (1 - b) for a buffer that sums",
    derivation="A summing buffer is the average over 1 - b. Multiplying the weights by a beside the step never enters "
    "the buffer; a decay that is added to the gradient does, and is averaged with it.",
)
def I06(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, beta, eta = 80, 3, 5, 0.8, 0.4
    alpha, lr = float(draw.uniform(low=0.9, high=0.98)), eta * (1 - beta)
    k, v, start = pairs(draw, n, d_v, d)
    functions = losses(k, v)
    titans = {
        "k": k,
        "v": v,
        "decay": full(n, math.log(alpha)),
        "momentum": full(n, math.log(beta)),
        "theta": full(n, lr),
    }
    layer = walked(layer_tuple("titans-matrix"), start, **titans)
    blog = walked(averaged(beta), start, k=k, v=v, decay=titans["decay"], eta=full(n, eta))
    decay = (1 - alpha) / lr
    ours = descended(lambda p: sgd(p, lr=lr, momentum=beta, weight_decay=decay, decoupled=True), start, functions)

    def beside(shrink_first: bool) -> Tensor:
        weight = parameter(start)
        rule, path = torch_sgd(weight, lr=lr, momentum=beta), []
        for loss in functions:
            rule.zero_grad()
            if shrink_first:
                with torch.no_grad():
                    weight.mul_(alpha)
            loss(weight).backward()
            if not shrink_first:
                with torch.no_grad():
                    weight.mul_(alpha)
            rule.step()
            path.append(weight.detach().clone())
        return torch.stack(path)

    coupled = descended(lambda p: torch_sgd(p, lr=lr, momentum=beta, weight_decay=decay), start, functions)
    return (
        holds("axes' SGD, decoupled decay, against the layer", gap(ours, layer), 1e-11),
        holds("axes' SGD against the tuple with an averaging buffer", gap(ours, blog), 1e-11),
        holds("torch's SGD with the weights shrunk between gradient and step", gap(beside(False), layer), 1e-11),
        holds(
            "the layer's chunked route against axes' SGD",
            gap(dispatched(layer_tuple("titans-matrix"), start, **titans), ours[-1]),
            1e-10,
        ),
        breaks("torch's own weight decay, which goes through the momentum", gap(coupled, layer), 0.01),
        breaks("gradient at the decayed weights", gap(beside(True), layer), 0.005),
        breaks(
            "a summing buffer with the same step",
            gap(
                descended(
                    lambda p: sgd(p, lr=eta, momentum=beta, weight_decay=decay * lr / eta, decoupled=True),
                    start,
                    functions,
                ),
                layer,
            ),
            0.1,
        ),
    )


@claim(
    "I07",
    "Titans written with an average, m = b m + (1 - b) grad, W = a W - eta m, is Titans as published, S = b S - theta "
    "grad, W = a W + S.",
    Verdict.CONDITIONAL,
    BLOG(_TITANS),
    "axes.sequence.TitansMatrix, axes.StateUpdate, axes.optim.SGD",
    conditions="constant rates with theta = eta (1 - b), and the buffer is added to the weights",
    derivation="S = -eta m if eta is constant. A rate that varies multiplies the whole buffer in one form and only "
    "the newest gradient in the other. With W = a W - S, as one table prints it, the same buffer climbs the loss.",
)
def I07(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, beta, eta, alpha = 80, 3, 4, 0.8, 0.5, 0.99
    k, v, start = draw.unit(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    log_a, log_b = full(n, math.log(alpha)), full(n, math.log(beta))
    published = layer_tuple("titans-matrix")

    def both(rates: Tensor) -> tuple[Tensor, Tensor]:
        first = walked(published, start, k=k, v=v, decay=log_a, momentum=log_b, theta=(1 - beta) * rates)
        return first, walked(averaged(beta), start, k=k, v=v, decay=log_a, eta=rates)

    constant, varying = both(full(n, eta)), both(draw.uniform(n, high=2 * eta))
    w, buffer, climbed = start, torch.zeros_like(start), []
    for x, y in zip(k, v, strict=True):  # the printed sign: S descends, and is then subtracted
        buffer = beta * buffer + eta * (1 - beta) * torch.outer(y - w @ x, x)
        w = alpha * w - buffer
        climbed.append(w)
    weight_decay = (1 - alpha) / (eta * (1 - beta))
    stepped = descended(
        lambda p: sgd(p, lr=eta * (1 - beta), momentum=beta, weight_decay=weight_decay, decoupled=True),
        start,
        losses(k, v),
    )
    relative = (varying[0][-1] - varying[1][-1]).norm() / varying[1][-1].norm()
    return (
        holds("constant rates, 80 tokens", gap(*constant), 1e-11),
        holds("both against SGD with momentum", gap(stepped, constant[0]), 1e-11),
        breaks("rates that vary: relative distance", relative, 0.05),
        breaks(
            "buffer subtracted: norm over that of the published form", climbed[-1].norm() / constant[0][-1].norm(), 10.0
        ),
    )


def count(state: State) -> int:
    """How many matrices of the memory's shape a state holds, filters and statistics included."""
    inner = [s for f in state.via for s in ((f,) if isinstance(f, State) else f)]
    return len(state.theta) + sum(count(s) for s in (*inner, *state.stats))


@claim(
    "I08",
    "Titans keeps the pair (m, v) of Adam: it is Adam on the sequence axis.",
    Verdict.FALSE,
    BLOG(_TITANS + "; Write strategies; " + _TABLES),
    "axes.sequence.TitansMatrix, axes.sequence.AdamNet, axes.optim.Adam, axes.optim.SGD",
    correction="Titans is SGD with momentum and decay (two states); Adam also keeps the second moment (three) and is "
    "Adam-Net",
    kind="MATH",
    derivation="Titans carries (M, S) and steps linearly in the gradients, Adam (W, m, v) and divides by sqrt(v): no "
    "learning rate makes one path the other. Adam's filter over the squared error of keys and values is Adam-Net's "
    "tuple.",
)
def I08(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, lr, eps = 100, 4, 4, 0.05, 1e-4
    betas = (0.9, 0.95)
    k, v, start = draw.unit(n, d), draw.normal(n, d_v), torch.zeros(d_v, d, dtype=torch.float64)
    functions = losses(k, v)
    titans, adam_net = layer_tuple("titans-matrix"), layer_tuple("adam-net")
    adam = descended(lambda p: Adam([p], lr=lr, betas=betas, eps=eps), start, functions)
    etas = np.geomspace(1e-3, 1.0, 60)
    zero = full(n, 0.0)
    batch = len(etas)  # all learning rates at once
    spread = {
        name: x[:, None].expand(n, batch, *x.shape[1:])
        for name, x in {"k": k, "v": v, "decay": zero, "momentum": zero + math.log(0.9)}.items()
    }
    theta = (0.1 * torch.from_numpy(etas)).expand(n, batch)
    walks = reference.run(titans, {**spread, "theta": theta}, weights=(start.expand(batch, d_v, d),))[0]
    best = ((walks[-1] - adam[-1]).flatten(1).norm(dim=1) / adam[-1].norm()).min()
    momentum = descended(lambda p: sgd(p, lr=0.02, momentum=0.9), start, functions)
    layer = walked(titans, start, k=k, v=v, decay=zero, momentum=zero + math.log(0.9), theta=full(n, 0.02))
    each = dataclasses.replace(adam_net, algorithm=dataclasses.replace(adam_net.algorithm, at="prev"))
    rates = {"decay": zero, "beta": full(n, lr)}
    anchored, weight, anchor = [], parameter(start), start
    rule = torch.optim.Adam([weight], lr=lr, betas=betas, eps=eps)
    for t, (x, y) in enumerate(zip(k, v, strict=True)):
        if t % 16 == 0:
            anchor = weight.detach().clone()
        weight.grad = -torch.outer(y - anchor @ x, x)
        rule.step()
        anchored.append(weight.detach().clone())
    datum = {"k": k[0], "v": v[0], **{name: x[0] for name, x in {**rates, "theta": zero, "momentum": zero}.items()}}
    held = parameter(start)
    counted = Adam([held], lr=lr)
    held.grad = start
    counted.step()
    kept = 1 + sum(x.shape == start.shape for x in counted.state[held].values())  # the weights and two averages
    return (
        breaks("states of axes' Adam (W, m, v) less those of Titans", kept - count(titans.init(datum)), 1),
        breaks("Titans with the best of 60 learning rates against Adam after 100 pairs, relative", best, 0.03),
        holds("states of Adam-Net less those of Adam", abs(count(adam_net.init(datum)) - kept), 0.0),
        holds("Titans against SGD with momentum", gap(layer, momentum), 1e-11),
        holds(
            "Adam-Net's tuple, gradient at the previous state, against axes' Adam",
            gap(walked(each, start, k=k, v=v, **rates), adam),
            1e-9,
        ),
        holds(
            "the same against torch's Adam",
            gap(
                walked(each, start, k=k, v=v, **rates),
                descended(lambda p: torch.optim.Adam([p], lr=lr, betas=betas, eps=eps), start, functions),
            ),
            1e-9,
        ),
        holds(
            "Adam-Net against torch's Adam with gradients anchored every 16 pairs",
            gap(walked(adam_net, start, k=k, v=v, **rates), torch.stack(anchored)),
            1e-9,
        ),
    )


def batch_ridge(k: Tensor, v: Tensor, delta: float, forget: float, fading: bool) -> Tensor:
    """argmin sum forget^(t-i) |v_i - S k_i|^2 + delta |S|^2 for every prefix, by QR; fading: delta forget^t instead."""
    found = []
    for t in range(1, len(k) + 1):
        root = forget ** (torch.arange(t - 1, -1, -1, dtype=torch.float64) / 2)[:, None]
        floor = math.sqrt(delta * (forget**t if fading else 1.0)) * torch.eye(k.shape[1], dtype=torch.float64)
        nothing = torch.zeros(k.shape[1], v.shape[1], dtype=torch.float64)
        a, b = torch.cat((root * k[:t], floor)), torch.cat((root * v[:t], nothing))
        found.append(torch.linalg.lstsq(a, b).solution.mT)
    return torch.stack(found)


def textbook(k: Tensor, v: Tensor, delta: float, forget: float) -> Tensor:
    """S + (v - S k) g^T, g = P k/(forget + k^T P k), P = (P - g k^T P)/forget, from P = I/delta and S = 0."""
    s, p, path = (
        torch.zeros(v.shape[1], k.shape[1], dtype=torch.float64),
        torch.eye(k.shape[1], dtype=torch.float64) / delta,
        [],
    )
    for x, y in zip(k, v, strict=True):
        g = p @ x / (forget + x @ p @ x)
        s, p = s + torch.outer(y - s @ x, g), (p - torch.outer(g, x @ p)) / forget
        p = (p + p.mT) / 2
        path.append(s)
    return torch.stack(path)


# W - lr g (sum k k^T + eps)^{-1}: natural gradient whose Fisher matrix adds up over the examples
def accumulated(delta: float) -> StateUpdate:
    return StateUpdate(
        Given(), OnUpdate(Whiten((StateUpdate(Linear("key")),), "right", 1.0, delta)), Identity(), Step(LR)
    )


@claim(
    "I09",
    "Recursive least squares is batch ridge in one pass.",
    Verdict.EXACT,
    BLOG("How to write, RLS; Open questions, pseudo-inverse in one pass"),
    "axes.sequence.RLSNet, axes.StateUpdate",
    derivation="The statistics V^T K and K^T K are additive, so that their quotient is the ridge solution of every "
    "prefix. It is natural gradient with the accumulated Fisher matrix and a unit step, since grad_t = -(v - S k) k^T "
    "and S already solves the prefix before. As delta -> 0 the distance from the pseudo-inverse solution is O(delta).",
)
def I09(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, delta = 14, 3, 5, 0.2
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    layer, forgetting = ridge_weights(k, v, delta), ridge_weights(k, v, delta, math.log(0.95))
    model = nn.Linear(d, d_v, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.zero_()
    rule = optimizer(accumulated(delta))([{"params": [model.weight], "rule": "matrix"}], model=model, lr=1.0)
    natural = []
    for x, y in zip(k, v, strict=True):
        rule.zero_grad()
        ((model(x[None]) - y).square().sum() / 2).backward()
        rule.step()
        natural.append(model.weight.detach().clone())
    slopes, recall = [], []
    for m in (4, 9):
        keys = conditioned(draw, m, d)
        inverse = torch.linalg.lstsq(keys, v[:m], driver="gelsd").solution.mT
        deltas = [1e-2, 1e-4, 1e-6]
        off = [gap(ridge_weights(keys, v[:m], x)[-1], inverse) for x in deltas]
        slopes.append(float(np.polyfit(np.log(deltas), np.log(off), 1)[0]))
        if m < d:
            recall.append(gap(keys @ ridge_weights(keys, v[:m], 1e-8)[-1].mT, v[:m]))
    return (
        holds("layer against batch ridge, every prefix", gap(layer, batch_ridge(k, v, delta, 1.0, False)), 1e-10),
        holds(
            "layer with forgetting 0.95 against discounted ridge",
            gap(forgetting, batch_ridge(k, v, delta, 0.95, False)),
            1e-10,
        ),
        holds(
            "textbook recursion against ridge whose floor fades as 0.95^t",
            gap(textbook(k, v, delta, 0.95), batch_ridge(k, v, delta, 0.95, True)),
            1e-10,
        ),
        holds("textbook recursion without forgetting against the layer", gap(textbook(k, v, delta, 1.0), layer), 1e-10),
        holds(
            "natural gradient on a linear model, Fisher accumulated, against the layer",
            gap(torch.stack(natural), layer),
            1e-10,
        ),
        holds(
            "exponent of delta in the distance from the pseudo-inverse, less 1", max(abs(x - 1) for x in slopes), 0.03
        ),
        holds("recall of N < d_k pairs at delta = 1e-8", max(recall), 1e-6),
    )
