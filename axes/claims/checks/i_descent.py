"""Group I, descent: optimizers of the data axis and layers of the sequence axis walk through the same matrices."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, huber_loss

from axes.claims.base import Draw, Findings, agree, check, differ, gap, holds, within
from axes.claims.tools.calculus import half_square, vector_huber
from axes.claims.tools.chunks import householder_product
from axes.claims.tools.descent import (
    DECAY,
    LR,
    Loss,
    alignments,
    model_rule,
    model_trained,
    rule,
    sgd,
    short_pairs,
    squared_error,
    squared_errors,
    torch_sgd,
    trained,
)
from axes.claims.tools.fits import exponent
from axes.claims.tools.float64 import arange, eye, full, zeros
from axes.claims.tools.matrices import relative
from axes.claims.tools.recurrence import recurrence
from axes.claims.tools.tuples import (
    DELTA,
    GATED,
    GLA,
    LINEAR,
    LONGHORN,
    MAMBA2,
    PREV,
    delta_product,
    dispatched,
    layer_tuple,
    walked,
)
from axes.core.algorithms import Step
from axes.core.costs import Alignment, CrossEntropy, Given, Huber, Lp, RobustShift, SquaredError
from axes.core.geometry import Euclidean
from axes.core.monoids import Decay, Scalar, rotate
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.optim import ExactNaturalGradient

# weight decay first: the optimizer asks for the gradient at the decayed weights
DECAY_FIRST = StateUpdate(Given(), Euclidean(), Decay(DECAY), Step(LR, at="gated"))


decay_first = partial(rule, DECAY_FIRST)


@check
def I01(draw: Draw) -> Findings:
    for d_v, d in ((1, 6), (5, 3), (draw.integer(2, 6), draw.integer(2, 6))):
        n = 60
        k, v, start = short_pairs(draw, n, d_v, d)
        beta = draw.uniform(n, high=2.0)
        update = layer_tuple(DELTA)
        layer, chunked = walked(update, start, k=k, v=v, beta=beta), dispatched(update, start, k=k, v=v, beta=beta)[1]
        ours, theirs = (trained(make, start, squared_errors(k, v), lr=beta.tolist()) for make in (sgd, torch_sgd))
        replayed = model_trained(partial(model_rule, update, beta=0.5), start, [(k, v)])[0]
        even = walked(update, start, k=k, v=v, beta=torch.full_like(beta, 0.5))[-1]
        yield agree("axes' SGD against the layer, every token", ours, layer, 1e-11)
        yield agree("torch's SGD against the layer", theirs, layer, 1e-11)
        yield agree("axes' SGD against the layer's chunked route", ours[-1], chunked, 1e-10)
        yield agree("the layer's tuple as the optimizer of a linear model", replayed, even, 1e-11)


@check
def I02(draw: Draw) -> Findings:
    d_v, d, n, lam, few = 4, 5, 200, 0.1, 40
    k, v, start = draw.unit(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    losses, off = squared_errors(k, v), []
    gated, prev = layer_tuple(GATED), layer_tuple(PREV)
    for eta in (1.0, 0.5, 0.1, 0.01):
        alpha, rates = 1 - lam * eta, {"lr": eta, "weight_decay": lam}
        signal = {"k": k, "v": v, "decay": full(math.log(alpha), n), "beta": full(eta, n)}
        cut = {name: x[:few] for name, x in signal.items()}
        coupled = trained(partial(sgd, **rates), start, losses)
        first = trained(partial(decay_first, **rates), start, losses[:few])
        layer, old = walked(gated, start, **cut), walked(prev, start, **cut)
        last, old_last = dispatched(gated, start, **signal)[1], dispatched(prev, start, **signal)[1]
        extra = lam * eta**2 * torch.outer(start @ k[0], k[0])
        share = gap(coupled[0], layer[0]) / float(extra.abs().max())
        erased = alpha * start @ (eye(d) - eta / alpha * torch.outer(k[0], k[0])) + eta * torch.outer(v[0], k[0])
        off.append(relative(coupled[-1], last))
        corrected = coupled[0] + extra
        yield within("one step: largest difference over that of lambda eta^2 (S k) k^T", share, 1 - 1e-8, 1 + 1e-8)
        yield agree("one step: Gated DeltaNet against SGD + lambda eta^2 (S k) k^T", layer[0], corrected, 1e-12)
        yield agree("SGD against the layer with the gradient at the old state", coupled[:few], old, 1e-10)
        yield agree("SGD against that layer's chunked route", coupled[-1], old_last, 1e-10)
        yield agree("decay first, gradient at the decayed weights, against Gated DeltaNet", first, layer, 1e-10)
        yield agree("one step with erase strength eta/a", erased, coupled[0], 1e-12)
    yield within("200 tokens, lambda = 0.1, eta = 1: relative difference", off[0], 0.02, 0.3)
    yield within("200 tokens, eta = 0.01", off[3], 1e-5, 2e-3)
    yield within("exponent of eta in it", exponent([0.5, 0.1, 0.01], off[1:]), 0.8, 1.8)


@check
def I03(draw: Draw) -> Findings:
    n, d_v, d = 40, 3, 5
    k, v, start = short_pairs(draw, n, d_v, d)
    alpha, beta = draw.uniform(n, low=0.5, high=0.95), draw.uniform(n, low=0.2, high=1.5)
    signal = {"k": k, "v": v, "decay": alpha.log(), "beta": beta}
    layer, old = walked(layer_tuple(GATED), start, **signal), walked(layer_tuple(PREV), start, **signal)
    chunked = dispatched(layer_tuple(GATED), start, **signal)[1]

    def product(s: Tensor, x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return a * s @ (eye(d) - b * torch.outer(x, x)) + b * torch.outer(y, x)

    def shrunk_first(s: Tensor, x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return trained(partial(torch_sgd, lr=float(b)), a * s, [squared_error(x, y)])[0]

    printed, shrunk = (recurrence(step, start, k, v, alpha, beta) for step in (product, shrunk_first))
    decays = ((1 - alpha) / beta).tolist()
    first = trained(decay_first, start, squared_errors(k, v), lr=beta.tolist(), weight_decay=decays)
    yield agree("layer against the printed product", layer, printed, 1e-11)
    yield agree("layer against weights shrunk, then torch's SGD", layer, shrunk, 1e-11)
    yield agree("layer against the optimizer that decays first", layer, first, 1e-11)
    yield agree("layer's chunked route against it", chunked, first[-1], 1e-10)
    yield differ("gradient at the old state against the printed product", old, printed, 0.02)


@check
def I04(draw: Draw) -> Findings:
    n, d_v, d = 40, 3, 5
    k, v, start = draw.normal(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    alpha, dt = draw.uniform(n, low=0.3, high=0.99), draw.uniform(n, low=0.2, high=1.0)
    channel = draw.uniform(n, d, low=0.3, high=0.99)
    align = alignments(k, v)
    penal = [lambda w, f=f, a=a: f(w) + ((1 - a) * w * w).sum() / 2 for f, a in zip(align, channel, strict=True)]
    rates = {"lr": dt.tolist(), "weight_decay": ((1 - alpha) / dt).tolist()}
    ours, theirs = (trained(make, start, align, **rates) for make in (sgd, torch_sgd))
    diagonal = trained(sgd, start, penal)

    def both(name: str, **gates: Tensor) -> tuple[Tensor, Tensor]:
        """Every state of a layer, and the last one by its chunked route."""
        signal = {"k": k, "v": v, **gates}
        return walked(layer_tuple(name), start, **signal), dispatched(layer_tuple(name), start, **signal)[1]

    mamba, mamba_last = both(MAMBA2, decay=alpha.log(), dt=dt)
    gla, gla_last = both(GLA, decay=channel.log())
    yield agree("axes' SGD with decay against Mamba-2", ours, mamba, 1e-11)
    yield agree("torch's SGD with decay against Mamba-2's chunked route", theirs[-1], mamba_last, 1e-11)
    yield agree("SGD with a penalty per channel against GLA", diagonal, gla, 1e-11)
    yield agree("the same against GLA's chunked route", diagonal[-1], gla_last, 1e-11)


@check
def I05(draw: Draw) -> Findings:
    n, d_v, d, eta = 12, 2, 4, float(draw.uniform(low=0.5, high=4.0))
    k, v, start = draw.normal(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    signal = {"k": k, "v": v, "beta": full(eta, n, d_v)}
    layer, chunked = (
        walked(layer_tuple(LONGHORN), start, **signal),
        dispatched(layer_tuple(LONGHORN), start, **signal)[1],
    )

    def natural(damping: float, examples: int = 1) -> Tensor:
        batches = zip(k.split(examples), v.split(examples), strict=True)
        make = partial(ExactNaturalGradient, lr=1.0, damping=damping)
        return model_trained(make, start, batches, lambda out, y: half_square(out - y) / examples)

    lms = (eta / (1 + eta * k.square().sum(-1))).tolist()
    normalised = trained(sgd, start, squared_errors(k, v), lr=lms)
    diagonal = walked(layer_tuple("longhorn-diagonal"), start, **signal)
    yield agree("natural gradient, one example a step, against the layer", natural(1 / eta), layer, 1e-10)
    yield agree("SGD with the normalised rate against the layer", normalised, layer, 1e-11)
    yield agree("the layer's chunked route against SGD", chunked, layer[-1], 1e-10)
    yield differ("twice the damping", natural(2 / eta), layer, 0.02)
    yield differ("the Fisher matrix of four examples", natural(1 / eta, 4)[0], layer[3], 0.02)
    yield differ("the diagonal layer", diagonal, layer, 0.05)


@check
def I10(draw: Draw) -> Findings:
    n, d_v, d, eta = draw.integer(1, 70), 3, 5, 0.3
    k, v, q = draw.normal(n, d), draw.normal(n, d_v), draw.normal(n, d)
    update, zero = layer_tuple(LINEAR), zeros(d_v, d)
    ours, theirs = (trained(partial(make, lr=eta), zero, [squared_error(k, v)])[0] for make in (sgd, torch_sgd))
    hebbian = trained(partial(sgd, lr=eta), zero, alignments(k, v))
    out, last = dispatched(update, q=q, k=k, v=eta * v)
    states = walked(update, zero, k=k, v=eta * v)
    yield agree("one batch step of SGD on the squared error against the layer", ours, last, 1e-11)
    yield agree("torch's SGD, the same", theirs, last, 1e-11)
    yield agree("SGD on the alignment cost, example by example, against the layer", hebbian, states, 1e-11)
    yield agree("outputs against masked scores without softmax", out, eta * (q @ k.mT).tril() @ v, 1e-10)


@check
def I11(draw: Draw) -> Findings:
    tokens, micro, d_v, d = 12, 3, 4, 5
    k, v, start = short_pairs(draw, tokens * micro, d_v, d)
    beta = draw.uniform(tokens * micro, high=2.0)
    update, ends = layer_tuple(DELTA), slice(micro - 1, None, micro)
    ours, theirs = (trained(make, start, squared_errors(k, v), lr=beta.tolist())[ends] for make in (sgd, torch_sgd))
    layer = walked(update, start, k=k, v=v, beta=beta)[ends]

    def token(s: Tensor, x: Tensor, y: Tensor, b: Tensor) -> Tensor:
        """S prod (I - b k k^T) + sum b v k^T prod over the later ones."""
        writes = [b[j] * torch.outer(y[j], x[j]) @ householder_product(x[j + 1 :], b[j + 1 :]) for j in range(micro)]
        return s @ householder_product(x, b) + torch.stack(writes).sum(0)

    products = recurrence(token, start, *(x.unflatten(0, (tokens, micro)) for x in (k, v, beta)))
    q = draw.normal(tokens, d)
    reads = dispatched(update, start, q=q.repeat_interleave(micro, 0), k=k, v=v, beta=beta)[0][ends]
    several = walked(StateUpdate(SquaredError(), algorithm=Step(0.4, steps=micro)), start, k=k[:5], v=v[:5])
    repeated = [loss for loss in squared_errors(k[:5], v[:5]) for _ in range(micro)]
    stepped = trained(partial(sgd, lr=0.4), start, repeated)[ends]
    writes = {"k": k.unflatten(0, (tokens, micro)), "v": v.unflatten(0, (tokens, micro))}
    writes["beta"] = beta.unflatten(0, (tokens, micro))
    product = walked(delta_product(micro), start, **writes)
    read = dispatched(delta_product(micro), start, q=q, **writes)[0]
    yield agree("layer on micro-tokens against axes' SGD", layer, ours, 1e-11)
    yield agree("DeltaProduct against axes' SGD", product, ours, 1e-11)
    yield agree("DeltaProduct's route against SGD's weights", read, (ours @ q[..., None])[..., 0], 1e-10)
    yield agree("torch's SGD against the product of Householder factors", theirs, products, 1e-11)
    yield agree("outputs of the chunked route against SGD's weights", reads, (ours @ q[..., None])[..., 0], 1e-10)
    yield agree("several steps on one datum: tuple against SGD", several, stepped, 1e-11)


@check
def I12(draw: Draw) -> Findings:
    n, d_v, d = 30, 3, 4
    k, v, q = draw.normal(n, d), draw.normal(n, d_v), draw.normal(n, d)
    linear, retnet = layer_tuple(LINEAR), layer_tuple("retnet")
    bare = StateUpdate(Alignment(), Euclidean(), Scalar(1.0), Step())

    def outputs(update: StateUpdate, keys: Tensor = k, queries: Tensor = q, gamma: float = 1.0) -> Tensor:
        return dispatched(update, q=queries, k=keys, v=v, decay=full(math.log(gamma), n))[0]

    plain, turned = outputs(linear), outputs(retnet)
    angle = -arange(n)[:, None] * 10000.0 ** (-2 * arange(d // 2) / d)
    beforehand = outputs(linear, rotate(k, angle), rotate(q, angle))
    descent = trained(sgd, zeros(d_v, d), alignments(k, v))
    gated = StateUpdate(Alignment(), Euclidean(), Scalar("decay"), Step())
    same = (retnet.parts().cost, retnet.parts().step) == (linear.parts().cost, linear.parts().step)
    yield holds("tuples with a constant gate of one are unequal (0: equal)", float(bare != linear), 0.0)
    yield holds("cost and step of RetNet and linear attention are unequal", float(not same), 0.0)
    yield agree("gate of one against linear attention", outputs(gated), plain, 1e-12)
    yield agree("RetNet, gamma = 1, against linear attention on rotated keys and queries", turned, beforehand, 1e-11)
    yield agree("SGD, one step an example, against linear attention", (descent @ q[..., None])[..., 0], plain, 1e-11)
    yield differ("gamma = 0.9", outputs(gated, gamma=0.9), plain, 0.5)
    yield differ("RetNet's rotation, gamma = 1", turned, plain, 0.5)


def _cost_losses(k: Tensor, v: Tensor) -> dict[str, tuple[Any, Loss]]:
    """Costs by name, with the same loss in torch's own words."""

    def e(w: Tensor) -> Tensor:
        return w @ k - v

    return {
        "alignment": (Alignment(), lambda w: -torch.dot(v, w @ k)),
        "squared error": (SquaredError(), squared_error(k, v)),
        "l_1.5": (Lp(1.5, smooth=None), lambda w: e(w).abs().pow(1.5).sum()),
        "l_3": (Lp(3.0), lambda w: e(w).abs().pow(3).sum()),
        "Huber by coordinate": (Huber(0.5), lambda w: huber_loss(w @ k, v, reduction="sum", delta=0.5)),
        "Huber by norm": (Huber(0.5, "norm"), lambda w: vector_huber(e(w), 0.5)),
        "robust shift": (RobustShift(0.3), lambda w: (e(w).norm() + 0.3) ** 2 / 2),
        "cross-entropy": (CrossEntropy(), lambda w: cross_entropy(w @ k, torch.softmax(v, 0))),
    }


@check
def I13(draw: Draw) -> Findings:
    n, d_v, d, eta = 10, 3, 4, 0.05
    k, v, start = draw.unit(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    for name in _cost_losses(k[0], v[0]):
        cases = [_cost_losses(x, y)[name] for x, y in zip(k, v, strict=True)]
        targets = torch.softmax(v, -1) if name == "cross-entropy" else v
        layer = walked(StateUpdate(cases[0][0], algorithm=Step(Per("eta"))), start, k=k, v=targets, eta=full(eta, n))
        for kind, make in (("axes'", sgd), ("torch's", torch_sgd)):
            path = trained(partial(make, lr=eta), start, [loss for _, loss in cases])
            yield agree(f"{name}: {kind} SGD against the layer", path, layer, 1e-10)
