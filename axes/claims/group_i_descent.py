"""Group I, descent: optimizers of the data axis and layers of the sequence axis walk through the same matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, huber_loss

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, within
from axes.claims.group_a_tools import layer_tuple, squared_error, trained
from axes.claims.sources import BLOG, SLIDES
from axes.core import reference
from axes.core.algorithms import Step
from axes.core.costs import Alignment, CrossEntropy, Given, Huber, Lp, RobustShift, SquaredError
from axes.core.geometry import Euclidean
from axes.core.monoids import Decay, Scalar, rotate
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.optim import SGD, ExactNaturalGradient, optimizer
from axes.routes import dispatch

_TABLES = "Tables of correspondences"
LR, DECAY = Per("lr"), Per("weight_decay")
Loss = Callable[[Tensor], Tensor]

# weight decay first: the optimizer asks for the gradient at the decayed weights
DECAY_FIRST = StateUpdate(Given(), Euclidean(), Decay(DECAY), Step(LR, at="gated"))


def parameter(w: Tensor) -> nn.Parameter:
    return nn.Parameter(w.clone())


def pairs(draw: Draw, n: int, d_v: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of length at most one, values and a start."""
    return draw.unit(n, d) * draw.uniform(n, 1, low=0.3), draw.normal(n, d_v), draw.normal(d_v, d)


def losses(k: Tensor, v: Tensor) -> list[Loss]:
    return [squared_error(x, y) for x, y in zip(k, v, strict=True)]


def walked(update: StateUpdate, start: Tensor, **signal: Tensor) -> Tensor:
    """The weights (N, d_v, d) of a sequence tuple after every token."""
    return reference.run(update, signal, weights=(start,))[0]


def dispatched(update: StateUpdate, start: Tensor, **signal: Tensor) -> Tensor:
    """The last state of the layer's public operation, by its fastest route."""
    batched = {name: x[None] for name, x in signal.items()}
    return dispatch.run(update, {"q": batched["k"], **batched}, time=1, weights=(start[None],))[1].theta[0][0]


def descended(
    make: Callable[[nn.Parameter], torch.optim.Optimizer],
    start: Tensor,
    functions: Sequence[Loss],
    **rates: Sequence[float],
) -> Tensor:
    """The weights of an optimizer along one step on each loss; rates: per step, set in its parameter group."""
    weight = parameter(start)
    rule, path = make(weight), []
    for n, loss in enumerate(functions):
        for name, values in rates.items():
            rule.param_groups[0][name] = values[n]
        rule.step(partial(_evaluated, rule, weight, loss))
        path.append(weight.detach().clone())
    return torch.stack(path)


def _evaluated(rule: torch.optim.Optimizer, weight: Tensor, loss: Loss) -> float:
    """The closure of a step: the loss at the weights as they are, and its gradient."""
    rule.zero_grad()
    value = loss(weight)
    value.backward()
    return float(value.detach())


def sgd(weight: nn.Parameter, **options: Any) -> SGD:
    return SGD([weight], **{"lr": 1.0, "momentum": 0.0, **options})


def torch_sgd(weight: nn.Parameter, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([weight], **{"lr": 1.0, **options})


def decay_first(weight: nn.Parameter, **rates: Any) -> torch.optim.Optimizer:
    return optimizer(DECAY_FIRST)([weight], **rates)


@claim(
    "I01",
    "SGD on the squared error is DeltaNet.",
    Verdict.EXACT,
    BLOG("The same algorithm; Conclusion"),
    "axes.optim.SGD, axes.sequence.DeltaNet",
    derivation="Both add beta (v - S k) k^T, one with v, k, S named y, x, W and beta a learning rate per example. The "
    "layer's own tuple, handed to a linear model as its optimizer, replays the batch token by token.",
)
def I01(draw: Draw) -> tuple[Finding, ...]:
    findings = []
    for d_v, d in ((1, 6), (5, 3), (draw.integer(2, 6), draw.integer(2, 6))):
        n = 60
        k, v, start = pairs(draw, n, d_v, d)
        beta = draw.uniform(n, high=2.0)
        update = layer_tuple("delta-net")
        layer = walked(update, start, k=k, v=v, beta=beta)
        ours = descended(sgd, start, losses(k, v), lr=beta.tolist())
        theirs = descended(torch_sgd, start, losses(k, v), lr=beta.tolist())
        model = nn.Linear(d, d_v, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(start)
        replay = optimizer(update)([{"params": [model.weight], "rule": "matrix"}], model=model, beta=0.5)
        ((model(k) - v).square().sum() / 2).backward()
        replay.step()
        even = walked(update, start, k=k, v=v, beta=torch.full_like(beta, 0.5))[-1]
        findings += [
            holds("axes' SGD against the layer, every token", gap(ours, layer), 1e-11),
            holds("torch's SGD against the layer", gap(theirs, layer), 1e-11),
            holds(
                "axes' SGD against the layer's chunked route",
                gap(ours[-1], dispatched(update, start, k=k, v=v, beta=beta)),
                1e-10,
            ),
            holds("the layer's tuple as the optimizer of a linear model", gap(model.weight, even), 1e-11),
        ]
    return tuple(findings)


@claim(
    "I02",
    "SGD with weight decay is Gated DeltaNet.",
    Verdict.APPROXIMATE,
    BLOG(_TABLES),
    "axes.optim.SGD, axes.sequence.GatedDeltaNet, axes.sequence.GatedDeltaNetPrev",
    derivation="SGD takes the gradient before it decays, a S + eta (v - S k) k^T; Gated DeltaNet afterwards, a S + "
    "eta (v - a S k) k^T with a = 1 - lambda eta. One step differs by lambda eta^2 (S k) k^T exactly. Decay first is "
    "Gated DeltaNet; SGD's order is the tuple with the gradient at the old state, erasing by eta/a instead of eta.",
)
def I02(draw: Draw) -> tuple[Finding, ...]:
    d_v, d, n, lam, few = 4, 5, 200, 0.1, 40
    k, v, start = draw.unit(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    functions, findings, off = losses(k, v), [], []
    gated, prev = layer_tuple("gated-delta-net"), layer_tuple("gated-delta-net-prev")
    for eta in (1.0, 0.5, 0.1, 0.01):
        alpha = 1 - lam * eta
        rates = {
            "decay": torch.full((n,), math.log(alpha), dtype=torch.float64),
            "beta": torch.full((n,), eta, dtype=torch.float64),
        }
        coupled = descended(partial(sgd, lr=eta, weight_decay=lam), start, functions)
        first = descended(partial(decay_first, lr=eta, weight_decay=lam), start, functions[:few])
        cut = {"k": k[:few], "v": v[:few], **{name: x[:few] for name, x in rates.items()}}
        layer = walked(gated, start, **cut)
        one = gap(coupled[0], layer[0])
        extra = lam * eta**2 * torch.outer(start @ k[0], k[0])
        erased = alpha * start @ (
            torch.eye(d, dtype=torch.float64) - eta / alpha * torch.outer(k[0], k[0])
        ) + eta * torch.outer(v[0], k[0])
        last = dispatched(gated, start, k=k, v=v, **rates)
        off.append(float((coupled[-1] - last).norm() / last.norm()))
        findings += [
            within(
                "one step: largest difference over that of lambda eta^2 (S k) k^T",
                one / float(extra.abs().max()),
                1 - 1e-8,
                1 + 1e-8,
            ),
            holds(
                "one step: Gated DeltaNet against SGD + lambda eta^2 (S k) k^T",
                gap(layer[0], coupled[0] + extra),
                1e-12,
            ),
            holds(
                "SGD against the layer with the gradient at the old state",
                gap(coupled[:few], walked(prev, start, **cut)),
                1e-10,
            ),
            holds(
                "SGD against that layer's chunked route",
                gap(coupled[-1], dispatched(prev, start, k=k, v=v, **rates)),
                1e-10,
            ),
            holds("decay first, gradient at the decayed weights, against Gated DeltaNet", gap(first, layer), 1e-10),
            holds("one step with erase strength eta/a", gap(erased, coupled[0]), 1e-12),
        ]
    slope = float(np.polyfit(np.log([0.5, 0.1, 0.01]), np.log(off[1:]), 1)[0])
    return (
        *findings,
        within("200 tokens, lambda = 0.1, eta = 1: relative difference", off[0], 0.02, 0.3),
        within("200 tokens, eta = 0.01", off[3], 1e-5, 2e-3),
        within("exponent of eta in it", slope, 0.8, 1.8),
    )


@claim(
    "I03",
    "Gated DeltaNet is S <- a S (I - beta k k^T) + beta v k^T.",
    Verdict.CONDITIONAL,
    SLIDES("Gated DeltaNet"),
    "axes.sequence.GatedDeltaNet, axes.StateUpdate",
    conditions="the gate acts before the gradient is taken",
    derivation="a S + beta (v - a S k) k^T multiplies out to the printed product: decay the weights, then one SGD "
    "step. With the gradient at the old state the erase strength is beta, not a beta.",
)
def I03(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d = 40, 3, 5
    k, v, start = pairs(draw, n, d_v, d)
    alpha, beta = draw.uniform(n, low=0.5, high=0.95), draw.uniform(n, low=0.2, high=1.5)
    signal = {"k": k, "v": v, "decay": alpha.log(), "beta": beta}
    layer = walked(layer_tuple("gated-delta-net"), start, **signal)
    printed, s, weight = [], start, parameter(start)
    plain, shrunk = torch_sgd(weight), []
    for x, y, a, b in zip(k, v, alpha, beta, strict=True):
        s = a * s @ (torch.eye(d, dtype=torch.float64) - b * torch.outer(x, x)) + b * torch.outer(y, x)
        printed.append(s)
        with torch.no_grad():
            weight.mul_(a)
        plain.zero_grad()
        squared_error(x, y)(weight).backward()
        plain.param_groups[0]["lr"] = float(b)
        plain.step()
        shrunk.append(weight.detach().clone())
    first = descended(decay_first, start, losses(k, v), lr=beta.tolist(), weight_decay=((1 - alpha) / beta).tolist())
    return (
        holds("layer against the printed product", gap(layer, torch.stack(printed)), 1e-11),
        holds("layer against weights shrunk, then torch's SGD", gap(layer, torch.stack(shrunk)), 1e-11),
        holds("layer against the optimizer that decays first", gap(layer, first), 1e-11),
        holds(
            "layer's chunked route against it",
            gap(dispatched(layer_tuple("gated-delta-net"), start, **signal), first[-1]),
            1e-10,
        ),
        breaks(
            "gradient at the old state against the printed product",
            gap(walked(layer_tuple("gated-delta-net-prev"), start, **signal), torch.stack(printed)),
            0.02,
        ),
    )


@claim(
    "I04",
    "Mamba-2's forget gate is weight decay on the alignment cost.",
    Verdict.EXACT,
    SLIDES("Weight decay enables effective forgetting"),
    "axes.sequence.Mamba2, axes.sequence.GLA, axes.optim.SGD",
    derivation="-<v, S k> + (1 - a)/2 |S|^2 has gradient -v k^T + (1 - a) S: a unit step gives a S + v k^T. A penalty "
    "per key channel, <S, S Diag(1 - a)>/2, gives S Diag(a) + v k^T.",
)
def I04(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d = 40, 3, 5
    k, v, start = draw.normal(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    alpha, dt, channel = (
        draw.uniform(n, low=0.3, high=0.99),
        draw.uniform(n, low=0.2, high=1.0),
        draw.uniform(n, d, low=0.3, high=0.99),
    )
    align = [lambda w, x=x, y=y: -(y * (w @ x)).sum() for x, y in zip(k, v, strict=True)]
    penal = [lambda w, f=f, a=a: f(w) + ((1 - a) * w * w).sum() / 2 for f, a in zip(align, channel, strict=True)]
    mamba = {"k": k, "v": v, "decay": alpha.log(), "dt": dt}
    decays = ((1 - alpha) / dt).tolist()
    ours = descended(sgd, start, align, lr=dt.tolist(), weight_decay=decays)
    theirs = descended(torch_sgd, start, align, lr=dt.tolist(), weight_decay=decays)
    diagonal = descended(sgd, start, penal)
    gla = layer_tuple("gla")
    return (
        holds("axes' SGD with decay against Mamba-2", gap(ours, walked(layer_tuple("mamba2"), start, **mamba)), 1e-11),
        holds(
            "torch's SGD with decay against Mamba-2's chunked route",
            gap(theirs[-1], dispatched(layer_tuple("mamba2"), start, **mamba)),
            1e-11,
        ),
        holds(
            "SGD with a penalty per channel against GLA",
            gap(diagonal, walked(gla, start, k=k, v=v, decay=channel.log())),
            1e-11,
        ),
        holds(
            "the same against GLA's chunked route",
            gap(diagonal[-1], dispatched(gla, start, k=k, v=v, decay=channel.log())),
            1e-11,
        ),
    )


@claim(
    "I05",
    "Longhorn is natural gradient.",
    Verdict.CONDITIONAL,
    BLOG(_TABLES),
    "axes.sequence.Longhorn, axes.optim.ExactNaturalGradient, axes.optim.SGD",
    conditions="the Fisher matrix of one example with damping 1/eta and a unit step; as derived, not the diagonal "
    "layer",
    derivation="For a Gaussian likelihood one example's Fisher matrix is I x k k^T, and e k^T (k k^T + I/eta)^{-1} = "
    "eta/(1 + eta |k|^2) e k^T: also SGD with that rate, normalised LMS with a floor. An accumulated Fisher matrix "
    "gives recursive least squares.",
)
def I05(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, eta = 12, 2, 4, float(draw.uniform(low=0.5, high=4.0))
    k, v, start = draw.normal(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    rate = torch.full((n, d_v), eta, dtype=torch.float64)
    layer = walked(layer_tuple("longhorn"), start, k=k, v=v, beta=rate)

    def natural(damping: float, examples: int = 1) -> Tensor:
        model = nn.Linear(d, d_v, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(start)
        rule, path = ExactNaturalGradient(model, lr=1.0, damping=damping), []
        for t in range(0, n, examples):
            rule.zero_grad()
            part = slice(t, t + examples)
            ((model(k[part]) - v[part]).square().sum() / (2 * examples)).backward()
            rule.step()
            path.append(model.weight.detach().clone())
        return torch.stack(path)

    lms = (eta / (1 + eta * k.square().sum(-1))).tolist()
    diagonal = walked(layer_tuple("longhorn-diagonal"), start, k=k, v=v, beta=rate)
    return (
        holds("natural gradient, one example a step, against the layer", gap(natural(1 / eta), layer), 1e-10),
        holds(
            "SGD with the normalised rate against the layer",
            gap(descended(sgd, start, losses(k, v), lr=lms), layer),
            1e-11,
        ),
        holds(
            "the layer's chunked route against SGD",
            gap(dispatched(layer_tuple("longhorn"), start, k=k, v=v, beta=rate), layer[-1]),
            1e-10,
        ),
        breaks("twice the damping", gap(natural(2 / eta), layer), 0.02),
        breaks("the Fisher matrix of four examples", gap(natural(1 / eta, 4)[0], layer[3]), 0.02),
        breaks("the diagonal layer", gap(diagonal, layer), 0.05),
    )


@claim(
    "I10",
    "Linear attention, Hebbian learning and one batch gradient step from zero are the same.",
    Verdict.EXACT,
    SLIDES("Linear attention: test-time objective"),
    "axes.sequence.UnnormalisedLinearAttention, axes.optim.SGD",
    derivation="At W = 0 the gradient of sum |v_i - W k_i|^2/2 is -V^T K, that of the alignment cost anywhere. Read "
    "causally, o_t = sum_{i<=t} (k_i . q_t) v_i.",
)
def I10(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, eta = draw.integer(1, 70), 3, 5, 0.3
    k, v, q = draw.normal(n, d), draw.normal(n, d_v), draw.normal(n, d)
    update, zero = layer_tuple("linear-attention-unnormalised"), torch.zeros(d_v, d, dtype=torch.float64)
    batch: list[Loss] = [lambda w: (v - k @ w.mT).square().sum() / 2]
    align = [lambda w, x=x, y=y: -(y * (w @ x)).sum() for x, y in zip(k, v, strict=True)]
    stepped = descended(lambda p: sgd(p, lr=eta), zero, batch)[0]
    hebbian = descended(lambda p: sgd(p, lr=eta), zero, align)
    out, state = dispatch.run(update, {"q": q[None], "k": k[None], "v": eta * v[None]}, time=1)
    scores = torch.tril(q @ k.mT)
    return (
        holds("one batch step of SGD on the squared error against the layer", gap(stepped, state.theta[0][0]), 1e-11),
        holds(
            "torch's SGD, the same",
            gap(descended(lambda p: torch_sgd(p, lr=eta), zero, batch)[0], state.theta[0][0]),
            1e-11,
        ),
        holds(
            "SGD on the alignment cost, example by example, against the layer",
            gap(hebbian, walked(update, zero, k=k, v=eta * v)),
            1e-11,
        ),
        holds("outputs against masked scores without softmax", gap(out[0], eta * scores @ v), 1e-10),
    )


@claim(
    "I11",
    "DeltaProduct is n_h SGD steps per token.",
    Verdict.EXACT,
    SLIDES("DeltaProduct"),
    "axes.sequence.DeltaNet, axes.optim.SGD, axes.StateUpdate",
    derivation="n_h pairs a token, one delta step for each: S prod_l (I - b_l k_l k_l^T) + sum_j b_j v_j k_j^T "
    "prod_{l>j} (I - b_l k_l k_l^T), factors from the right in order. It is DeltaNet on a list n_h times as long, "
    "read at every n_h-th place.",
)
def I11(draw: Draw) -> tuple[Finding, ...]:
    tokens, micro, d_v, d = 12, 3, 4, 5
    k, v, start = pairs(draw, tokens * micro, d_v, d)
    beta = draw.uniform(tokens * micro, high=2.0)
    update = layer_tuple("delta-net")
    path = descended(sgd, start, losses(k, v), lr=beta.tolist())[micro - 1 :: micro]
    theirs = descended(torch_sgd, start, losses(k, v), lr=beta.tolist())[micro - 1 :: micro]
    layer = walked(update, start, k=k, v=v, beta=beta)[micro - 1 :: micro]
    eye, s, product = torch.eye(d, dtype=torch.float64), start, []
    for t in range(tokens):
        span = range(t * micro, (t + 1) * micro)
        factors = [eye - beta[j] * torch.outer(k[j], k[j]) for j in span]
        s = s @ torch.linalg.multi_dot(factors) + sum(
            beta[j] * torch.outer(v[j], k[j]) @ torch.linalg.multi_dot([eye, eye, *factors[i + 1 :]])
            for i, j in enumerate(span)
        )
        product.append(s)
    q = draw.normal(tokens, d)
    reads = dispatch.run(
        update,
        {"q": q.repeat_interleave(micro, 0)[None], "k": k[None], "v": v[None], "beta": beta[None]},
        time=1,
        weights=(start[None],),
    )[0]
    again = StateUpdate(SquaredError(), algorithm=Step(0.4, steps=micro))
    same = descended(lambda p: sgd(p, lr=0.4), start, [f for f in losses(k[:5], v[:5]) for _ in range(micro)])[
        micro - 1 :: micro
    ]
    return (
        holds("layer on micro-tokens against axes' SGD", gap(layer, path), 1e-11),
        holds("torch's SGD against the product of Householder factors", gap(theirs, torch.stack(product)), 1e-11),
        holds(
            "outputs of the chunked route against SGD's weights",
            gap(reads[0, micro - 1 :: micro], (path @ q[..., None])[..., 0]),
            1e-10,
        ),
        holds(
            "several steps on one datum: tuple against SGD", gap(walked(again, start, k=k[:5], v=v[:5]), same), 1e-11
        ),
    )


@claim(
    "I12",
    "Linear attention is a one-step algorithm on the alignment cost, RetNet gradient descent on the dot product.",
    Verdict.CONDITIONAL,
    BLOG("The sequence axis, table of models"),
    "axes.sequence.UnnormalisedLinearAttention, axes.sequence.RetNet, axes.optim.SGD",
    conditions="gamma = 1 and keys that are not rotated (or rotated by their position beforehand)",
    derivation="Both names mean one explicit step on -<v, S k>. RetNet's tuple is linear attention's with a decay and "
    "a rotation; without decay the rotation of the state is a rotation of keys and queries by position.",
)
def I12(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d = 30, 3, 4
    k, v, q = draw.normal(n, d), draw.normal(n, d_v), draw.normal(n, d)
    linear, retnet = layer_tuple("linear-attention-unnormalised"), layer_tuple("retnet")
    bare = StateUpdate(Alignment(), Euclidean(), Scalar(1.0), Step())
    zero = torch.zeros(d_v, d, dtype=torch.float64)

    def outputs(update: StateUpdate, keys: Tensor, queries: Tensor, gamma: float = 1.0) -> Tensor:
        log = torch.full((1, n), math.log(gamma), dtype=torch.float64)
        return dispatch.run(update, {"q": queries[None], "k": keys[None], "v": v[None], "decay": log}, time=1)[0][0]

    plain = outputs(linear, k, q)
    angle = -torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, d, 2).double() / d)
    align = [lambda w, x=x, y=y: -(y * (w @ x)).sum() for x, y in zip(k, v, strict=True)]
    descent = descended(sgd, zero, align)
    gated = StateUpdate(Alignment(), Euclidean(), Scalar("decay"), Step())
    same = (retnet.parts().cost, retnet.parts().step) == (linear.parts().cost, linear.parts().step)
    return (
        holds("tuples with a constant gate of one are unequal (0: equal)", float(bare != linear), 0.0),
        holds("cost and step of RetNet and linear attention are unequal", float(not same), 0.0),
        holds("gate of one against linear attention", gap(outputs(gated, k, q), plain), 1e-12),
        holds(
            "RetNet, gamma = 1, against linear attention on rotated keys and queries",
            gap(outputs(retnet, k, q), outputs(linear, rotate(k, angle), rotate(q, angle))),
            1e-11,
        ),
        holds(
            "SGD, one step an example, against linear attention", gap((descent @ q[..., None])[..., 0], plain), 1e-11
        ),
        breaks("gamma = 0.9", gap(outputs(gated, k, q, 0.9), plain), 0.5),
        breaks("RetNet's rotation, gamma = 1", gap(outputs(retnet, k, q), plain), 0.5),
    )


def _cost_losses(k: Tensor, v: Tensor) -> dict[str, tuple[Any, Loss]]:
    """Costs by name, with the same loss in torch's own words."""

    def e(w: Tensor) -> Tensor:
        return w @ k - v

    def by_norm(w: Tensor) -> Tensor:
        size = e(w).norm()
        return torch.where(size <= 0.5, size**2 / 2, 0.5 * (size - 0.25))

    return {
        "alignment": (Alignment(), lambda w: -torch.dot(v, w @ k)),
        "squared error": (SquaredError(), squared_error(k, v)),
        "l_1.5": (Lp(1.5, smooth=None), lambda w: e(w).abs().pow(1.5).sum()),
        "l_3": (Lp(3.0), lambda w: e(w).abs().pow(3).sum()),
        "Huber by coordinate": (Huber(0.5), lambda w: huber_loss(w @ k, v, reduction="sum", delta=0.5)),
        "Huber by norm": (Huber(0.5, "norm"), by_norm),
        "robust shift": (RobustShift(0.3), lambda w: (e(w).norm() + 0.3) ** 2 / 2),
        "cross-entropy": (CrossEntropy(), lambda w: cross_entropy(w @ k, torch.softmax(v, 0))),
    }


@claim(
    "I13",
    "The same cost of one pair gives the same update on both axes: a token written or an example learned.",
    Verdict.EXACT,
    BLOG("The sequence axis and the data axis, rows Hebbian, l_p and robust regression"),
    "axes.core.costs, axes.optim.SGD, axes.StateUpdate",
    derivation="A cost is a function of prediction and target; whether the pair is called (k, v) or (x, y) does not "
    "enter. SGD sees autograd's gradients of the loss, the layer only keys and values.",
)
def I13(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, eta = 10, 3, 4, 0.05
    k, v, start = draw.unit(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    findings = []
    for name in _cost_losses(k[0], v[0]):
        cases = [_cost_losses(x, y)[name] for x, y in zip(k, v, strict=True)]
        targets = torch.softmax(v, -1) if name == "cross-entropy" else v
        layer = walked(
            StateUpdate(cases[0][0], algorithm=Step(Per("eta"))),
            start,
            k=k,
            v=targets,
            eta=torch.full((n,), eta, dtype=torch.float64),
        )
        functions = [f for _, f in cases]
        for kind, path in (
            ("axes'", descended(lambda p: sgd(p, lr=eta), start, functions)),
            ("torch's", trained(torch_sgd(w := parameter(start), lr=eta), w, functions)),
        ):
            findings.append(holds(f"{name}: {kind} SGD against the layer", gap(path, layer), 1e-10))
    return tuple(findings)
