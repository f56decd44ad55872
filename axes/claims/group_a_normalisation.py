"""Group A, normalisation: what is a projection, where it acts, and what the tuple determines."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, untestable, within
from axes.claims.group_a_tools import fed, gradient, layer_tuple, minimiser, one_output, one_step, squared_error
from axes.claims.sources import BLOG
from axes.core import reference
from axes.core.algorithms import Step
from axes.core.costs import Linear
from axes.core.geometry import Entropic, SignBall, Spectral, Sphere, Whiten
from axes.core.geometry.bregman import Context
from axes.core.monoids import Identity
from axes.core.rates import Per
from axes.core.state_update import Output, StateUpdate
from axes.depth import PostNorm, PreNorm
from axes.depth.base import DepthMixer
from axes.optim import Shampoo
from axes.sequence import TTTMLP, DeltaNet, TTTLinear

_NORMS = "Retention, normalization, and the generating function h"


@claim(
    "A35",
    "RMSNorm is the projection onto the sphere in Euclidean geometry.",
    Verdict.EXACT,
    BLOG(_NORMS + ", row RMSNorm"),
    "axes.geometry.Sphere",
    derivation="The nearest point of the sphere of radius sqrt(d) is sqrt(d) x / |x| (eps = 0, no gain). LayerNorm "
    "projects onto its equator sum x = 0: first to the hyperplane, then radially.",
)
def A35(draw: Draw) -> tuple[Finding, ...]:
    d = draw.integer(3, 8)
    x, sphere = draw.normal(1, d), Sphere("rows", radius=None)
    near, centred = sphere.primal(x), sphere.primal(x - x.mean())
    normed = layer_norm(x, (d,), eps=0.0)
    points = draw.normal(2000, d)
    points = sphere.primal(points - points.mean(-1, keepdim=True))
    on_sphere = minimiser(lambda w: (w - x).square().sum(), 0.5 * near, equal=[lambda w: w.square().sum() - d])
    on_equator = minimiser(
        lambda w: (w - x).square().sum(), 0.5 * centred, equal=[lambda w: w.square().sum() - d, lambda w: w.sum()]
    )
    return (
        holds("against RMSNorm", gap(near, rms_norm(x, (d,), eps=0.0)), 1e-12),
        holds("against the nearest point of the sphere, by a solver", gap(near, on_sphere), 1e-5),
        holds("LayerNorm against the sphere's projection after centring", gap(centred, normed), 1e-12),
        holds("LayerNorm against the nearest point of the equator, by a solver", gap(normed, on_equator), 1e-5),
        holds(
            "LayerNorm: how much nearer 2000 points come",
            ((normed - x).norm() - (points - x).norm(dim=-1).min()).clamp_min(0.0),
            1e-12,
        ),
        holds(
            "applied twice", max(gap(sphere.primal(near), near), gap(layer_norm(normed, (d,), eps=0.0), normed)), 1e-12
        ),
        holds("zero stays zero", sphere.primal(torch.zeros_like(x)).abs().max(), 0.0),
    )


def _stream(mixer: type[DepthMixer], x: Tensor, maps: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """States, sublayer inputs and sublayer outputs of a stack of random linear sublayers."""
    states, inputs, outputs = [x], [], []
    streams = mixer(x.shape[-1]).expand(x)
    for layer, w in enumerate(maps):
        depth = mixer(x.shape[-1], layer)
        seen, coefficients = depth.read(streams)
        f = seen @ w.mT
        streams = depth.write(streams, f, coefficients)
        assert isinstance(streams, Tensor)
        states.append(streams[..., 0, :])
        inputs.append(seen)
        outputs.append(f)
    return states, inputs, outputs


@claim(
    "A36",
    "Pre-norm is the instance on the depth axis whose state h normalises.",
    Verdict.FALSE,
    BLOG("Taxonomy, row Pre-Norm"),
    "axes.depth.PreNorm, axes.depth.PostNorm",
    correction="pre-norm normalises what is read; its state keeps everything and grows like the square root of depth. "
    "Post-norm normalises the state, which gives it the data-dependent gate sqrt(d)/|x + f|",
    kind="LABEL",
    derivation="x + f(Norm(x)) never touches x; with independent sublayers the squared norms add up. Norm(x + f) = g "
    "x + g f.",
)
def A36(draw: Draw) -> tuple[Finding, ...]:
    d, depth = 64, 100
    x, maps = math.sqrt(d) * draw.unit(1, 16, d), draw.normal(depth, d, d) / math.sqrt(d)
    states, inputs, outputs = _stream(PreNorm, x, maps)
    sizes = torch.stack([s.norm(dim=-1).mean() for s in states])
    radius = math.sqrt(d)
    lasting = states[0] + torch.stack(outputs).sum(0)
    index = np.arange(10, depth + 1)
    exponent = float(np.polyfit(np.log(index), sizes[10:].log().numpy(), 1)[0])
    post, _, post_outputs = _stream(PostNorm, x, maps)
    gated, gates = [], []
    for before, f, after in zip(post, post_outputs, post[1:], strict=False):
        gate = radius / (before + f).norm(dim=-1, keepdim=True)
        gates.append(gate)
        gated.append(gap(after, gate * before + gate * f))
    return (
        breaks("pre-norm's state after 100 sublayers: |x| / sqrt(d)", sizes[-1] / radius, 3.0),
        within("its exponent in depth", exponent, 0.3, 0.7),
        holds("pre-norm keeps everything: x_0 plus the sum of the sublayers", gap(states[-1], lasting), 1e-11),
        holds(
            "what pre-norm reads against RMSNorm of the state",
            gap(inputs[-1], rms_norm(states[-2], (d,), eps=0.0)),
            1e-12,
        ),
        holds(
            "post-norm's state against the sphere",
            max(float((s.norm(dim=-1) - radius).abs().max()) for s in post),
            1e-11,
        ),
        holds("post-norm against g x + g f, g = sqrt(d)/|x + f|", max(gated), 1e-11),
        breaks("spread of the gate over sublayers and data", torch.stack(gates).max() - torch.stack(gates).min(), 0.05),
    )


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def soap(gradients: Tensor, beta1: float, beta2: float, eps: float) -> Tensor:
    """The last direction of Adam in the eigenbasis of averages of g g^T and g^T g, rotated anew at every step."""
    n, rows, columns = gradients.shape
    left, right = torch.zeros(rows, rows, dtype=torch.float64), torch.zeros(columns, columns, dtype=torch.float64)
    first, second, direction = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0]), gradients[0]
    for t, g in enumerate(gradients, 1):
        left, right = beta2 * left + (1 - beta2) * g @ g.mT, beta2 * right + (1 - beta2) * g.mT @ g
        u, w = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * (u.mT @ g @ w).square()
        root = (second / (1 - beta2**t)).sqrt() + eps
        direction = u @ ((u.mT @ first @ w) / (1 - beta1**t) / root) @ w.mT
    return direction


@claim(
    "A37",
    "The tuple (cost, h, monoid, algorithm), each by its name in the taxonomy, determines write, retention, "
    "normalisation and read.",
    Verdict.FALSE,
    BLOG("The unified cost; The full specification"),
    "axes.optim.Shampoo, axes.sequence.Mamba2, axes.sequence.GLA, axes.sequence.TTTLinear, axes.sequence.TTTMLP",
    correction="it takes the site and the statistics of h with their exponent, the gate's shape, the filters, the "
    "point where the gradient is taken, rates and memory as well: tuples with equal parts in this sense have equal "
    "trajectories",
    kind="MATH",
    derivation="The taxonomy gives Shampoo and SOAP one label (any, Kronecker, none, Newton), Mamba-2 and GLA another "
    "(dot product, Euclidean, diagonal, gradient descent), and the two memories of test-time training a third: on "
    "equal data they differ.",
)
def A37(draw: Draw) -> tuple[Finding, ...]:
    # one label, two optimizers
    n, shape, betas, eps = 20, (5, 7), (0.9, 0.95), 1e-8
    scales = [10 ** torch.linspace(0.0, -2.0, size, dtype=torch.float64) for size in shape]
    gradients = draw.normal(n, *shape) * scales[0][:, None] * scales[1]

    def shampoo(exponent: float) -> Tensor:
        weight = nn.Parameter(torch.zeros(*shape, dtype=torch.float64))
        group = [{"params": [weight], "rule": "shampoo"}]
        path = fed(Shampoo(group, lr=1.0, betas=betas, exponent=exponent, eps=eps), weight, list(gradients))
        return path[-2] - path[-1]

    quarter, half, rotated = shampoo(0.25), shampoo(0.5), soap(gradients, *betas, eps)

    # one label, two layers
    d = 4
    k, v, q = (draw.normal(6, d) for _ in range(3))
    decay = -draw.uniform(6, d)
    data: dict[str, Tensor | float] = {"k": k, "v": v, "q": q}
    ones = torch.ones(6, dtype=torch.float64)
    scalar = reference.run(layer_tuple("mamba2"), {**data, "decay": decay.mean(-1), "dt": ones})[0]
    channel = reference.run(layer_tuple("gla"), {**data, "decay": decay})[0]
    learn = {**data, "eta": 0.1 * ones}
    linear, deep = (reference.run(t.update, learn)[0] for t in (TTTLinear, TTTMLP))

    # equal parts, equal trajectories
    rebuilt, gaps = 0, []
    for name in ("mamba2", "titans-matrix", "delta-net", "memora-matrix"):
        update = layer_tuple(name)
        again = StateUpdate(*copy.deepcopy(update.parts()))
        rebuilt += again == update and hash(again) == hash(update)
        rates: dict[str, Tensor | float] = {}
        for p in update.demands():
            rate = torch.full((6, d), -0.1 if p.domain == "unit" else 0.2, dtype=torch.float64)
            rates[p.name] = rate[:, 0] if p.shape == "scalar" else rate
        signal = {**data, **rates}
        gaps.append(gap(reference.run(update, signal)[0], reference.run(again, signal)[0]))
    told_apart = (
        layer_tuple("mamba2") != layer_tuple("gla"),
        TTTLinear.update != TTTMLP.update,
        Shampoo.declare(betas, 0.25) != Shampoo.declare(betas, 0.5),
    )
    return (
        breaks("Shampoo with power 1/4 and SOAP: 1 - cosine", 1 - cosine(quarter, rotated), 0.02),
        breaks("Shampoo with power 1/2 and SOAP: 1 - cosine", 1 - cosine(half, rotated), 1e-4),
        breaks("Shampoo with powers 1/4 and 1/2: 1 - cosine", 1 - cosine(quarter, half), 0.01),
        breaks("Mamba-2 and GLA", gap(scalar, channel), 0.01),
        breaks("TTT-Linear and TTT-MLP", gap(linear, deep), 0.01),
        holds("pairs that the declared tuples do not tell apart", len(told_apart) - sum(told_apart), 0.0),
        holds("rebuilt tuples that are not equal", 4 - rebuilt, 0.0),
        holds("trajectories of equal tuples", max(gaps), 0.0),
    )


@claim(
    "A38",
    "RMSNorm, attention's softmax and the normalised gradients of Adam and Muon are all Bregman projections.",
    Verdict.FALSE,
    BLOG(_NORMS),
    "axes.geometry.Sphere, axes.geometry.Spectral, axes.geometry.SignBall, axes.geometry.Entropic, "
    "axes.geometry.Whiten",
    correction="RMSNorm, LayerNorm, the polar factor and sign are projections; softmax(x) is the projection of "
    "exp(x), and Adam changes the metric by statistics of earlier gradients",
    kind="OVER",
    derivation="A projection leaves the points of its set alone. softmax = grad h* composes exp with the "
    "Kullback-Leibler projection y / sum y. Division by a root of past squares fixes no set of its own.",
)
def A38(draw: Draw) -> tuple[Finding, ...]:
    x, matrix = 2 * draw.normal(1, 6), draw.normal(5, 3)
    y = draw.uniform(1, 6, low=0.1, high=2.0)

    def twice(f: Callable[[Tensor], Tensor], at: Tensor) -> float:
        return gap(f(f(at)), f(at))

    def to_simplex(z: Tensor) -> Tensor:
        return Entropic("row").primal(z.log())

    projected = minimiser(
        lambda w: (w * (w / x.exp()).log() - w).sum(),
        torch.full_like(x, 1 / 6),
        equal=[lambda w: w.sum() - 1],
        lower=1e-14,
    )
    softmax = Entropic("row").primal(x)
    slope = gradient(lambda w: (w * (w / x.exp()).log() - w).sum(), softmax)
    whiten, g = Whiten((StateUpdate(Linear("square")),), "diagonal", 0.5, 0.0), draw.normal(3, 4)

    def adam(z: Tensor, past: Tensor) -> Tensor:
        return whiten.primal(z, Context(stats=(past,)))

    one, other = draw.uniform(3, 4, low=0.1, high=0.5), draw.uniform(3, 4, low=1.0, high=2.0)
    return (
        breaks("softmax applied twice", twice(Entropic("row").primal, x), 0.05),
        breaks("division by a root of past squares applied twice", twice(lambda z: adam(z, one), g), 0.05),
        breaks("the same gradient with two pasts", gap(adam(g, one), adam(g, other)), 0.05),
        holds("RMSNorm applied twice", twice(Sphere("rows", radius=None).primal, x), 1e-12),
        holds("LayerNorm applied twice", twice(lambda z: layer_norm(z, (6,), eps=0.0), x), 1e-12),
        holds("polar factor applied twice", twice(Spectral("polar").primal, matrix), 1e-12),
        holds("sign applied twice", twice(SignBall().primal, x), 0.0),
        holds("y / sum y applied twice", twice(to_simplex, y), 1e-12),
        holds("y / sum y: entropic link of log y", gap(to_simplex(y), y / y.sum()), 1e-12),
        holds("softmax(x) against the projection of exp(x), by a solver", gap(softmax, projected), 1e-5),
        holds("softmax(x): stationarity of that projection", gap(slope, slope.mean().expand_as(slope)), 1e-11),
    )


A39 = untestable(
    "A39",
    "Every normalisation in deep learning is the link of some h, and the same h sets the retention.",
    BLOG("Open questions, the normalisation conjecture"),
    "a statement about all normalisations, not a finite one; single links are checked in A26, A28 and A35, and A34 "
    "refutes the half about retention",
)


def memora(mass: float | None, axis: Literal["row", "column", "whole"] = "row") -> StateUpdate:
    """Memora's matrix tuple with the gradient at the previous state, without a gate, on the chosen simplices."""
    layer = layer_tuple("memora-matrix")
    return dataclasses.replace(layer, h=Entropic(axis, mass), monoid=Identity(), algorithm=Step(Per("eta")))


@claim(
    "A40",
    "Memora and DeltaNet share cost and algorithm; another h gives states of another kind.",
    Verdict.EXACT,
    BLOG("Taxonomy, DeltaNet and Memora"),
    "axes.sequence.MemoraMatrix, axes.sequence.DeltaNet",
    derivation="Rows of an entropic state are positive with a fixed sum: every read lies between mass min q and mass "
    "max q. And softmax is not linear: the state is no linear function of the values, as DeltaNet's is.",
)
def A40(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d_k, mass = 25, 3, 4, math.sqrt(4)
    k, v, other = draw.unit(n, d_k), 3 * draw.normal(n, d_v), 3 * draw.normal(n, d_v)
    size = torch.full((n,), 0.8, dtype=torch.float64)
    rows = torch.full((n, d_v), 0.8, dtype=torch.float64)

    def states(update: StateUpdate, values: Tensor) -> Tensor:
        gates = {"decay": torch.zeros(n, d_v, dtype=torch.float64), "eta": rows, "beta": size}
        wanted = {p.name: gates[p.name] for p in update.demands()}
        return reference.run(update, {"k": k, "v": values, **wanted})[0]

    layer = layer_tuple("memora-matrix")
    simplex, free = states(layer, v), states(DeltaNet.update, v)
    q = draw.normal(d_k)
    reads = torch.stack([layer.read(Output((s,)), q, {"q": q}) for s in simplex])

    def defect(update: StateUpdate) -> float:
        empty = states(update, torch.zeros_like(v))
        both = states(update, 2 * v - other)
        return gap(both - empty, 2 * (states(update, v) - empty) - (states(update, other) - empty))

    return (
        holds("Memora: row sums less their mass", (simplex.sum(-1) - mass).abs().max(), 1e-12),
        holds("Memora: entries below zero", (-simplex.min()).clamp_min(0.0), 0.0),
        holds(
            "Memora: reads outside the hull",
            torch.maximum(reads.max() - mass * q.max(), mass * q.min() - reads.min()).clamp_min(0.0),
            1e-12,
        ),
        holds("DeltaNet: defect of linearity in the values", defect(DeltaNet.update), 1e-11),
        breaks("Memora: defect of linearity in the values", defect(layer), 0.05),
        breaks("DeltaNet: spread of the row sums", free.sum(-1).max() - free.sum(-1).min(), 0.5),
        breaks("DeltaNet: least entry below zero", -free.min(), 0.1),
        holds("the two tuples have different costs", float(layer.cost != DeltaNet.update.cost), 0.0),
    )


@claim(
    "A41",
    "Memora is S_t = softmax(log S_{t-1} - eta (S_{t-1} k - v) k^T).",
    Verdict.CONDITIONAL,
    BLOG("Taxonomy, table row Memora"),
    "axes.sequence.MemoraMatrix",
    conditions="the axis of the softmax is given (rows, columns and the whole matrix are three simplices), the mass "
    "is one, S_{t-1} is strictly positive, and the retention exponent alpha of its paper is one",
    derivation="Each axis is the entropic mirror step of its own constraint: g + (log S_t - log S_{t-1})/eta is "
    "constant on each slice. A mass c multiplies the softmax, an exponent alpha log S_{t-1}; a zero entry stays zero. "
    "The paper's memory has two layers.",
)
def A41(draw: Draw) -> tuple[Finding, ...]:
    d_v, d_k, eta = 5, 8, torch.tensor(0.7, dtype=torch.float64)
    k, v, theta = draw.normal(d_k), 2 * draw.normal(d_v), 0.5 * draw.normal(d_v, d_k)
    dims: dict[Literal["row", "column", "whole"], tuple[int, ...]] = {"row": (-1,), "column": (-2,), "whole": (-2, -1)}
    findings, news = [], {}
    for axis, slices in dims.items():
        before = theta - theta.logsumexp(slices, keepdim=True)
        new = news[axis] = one_output(memora(1.0, axis), before, k=k, v=v, eta=eta)
        g = gradient(squared_error(k, v), before.exp())
        weighed = (before - eta * g).exp()
        residual = g + (gradient(lambda s: -torch.special.entr(s).sum(), new) - before - 1) / eta
        findings += [
            holds(f"{axis}: against the printed step", gap(new, weighed / weighed.sum(slices, keepdim=True)), 1e-12),
            holds(
                f"{axis}: stationarity on its simplices",
                gap(residual, residual.mean(slices, keepdim=True).expand_as(residual)),
                1e-9,
            ),
        ]
    row = theta.log_softmax(-1)
    heavy = one_output(memora(None), row, k=k, v=v, eta=eta)
    gates = {"decay": torch.full((d_v,), -0.3, dtype=torch.float64), "eta": eta.expand(d_v)}
    mass_one = dataclasses.replace(layer_tuple("memora-matrix"), h=Entropic("row"))
    forgetting = one_output(mass_one, row, k=k, v=v, **gates)

    # one row that must put 0.9 on its first entry
    key, two = torch.eye(1, d_k, dtype=torch.float64)[0], 2 * torch.ones((), dtype=torch.float64)
    goal, states = torch.full((1,), 0.9, dtype=torch.float64), [torch.zeros(1, d_k, dtype=torch.float64)]
    states.append(states[0].clone())
    states[1][0, 0] = -math.inf
    for _ in range(200):
        states = [one_step(memora(1.0), s, k=key, v=goal, eta=two) for s in states]
    positive, with_zero = (abs(float(s.softmax(-1)[0, 0]) - 0.9) for s in states)
    return (
        *findings,
        holds("sum of all rows less d_v", (news["row"].sum() - d_v).abs(), 1e-11),
        holds("sum of all columns less d_k", (news["column"].sum() - d_k).abs(), 1e-11),
        holds("sum of the whole less one", (news["whole"].sum() - 1).abs(), 1e-11),
        breaks("rows against columns", gap(news["row"], news["column"]), 0.05),
        breaks("rows against the whole", gap(news["row"], news["whole"]), 0.05),
        breaks("mass sqrt(d_k) against mass one", gap(heavy, news["row"]), 0.1),
        breaks("exponent 0.74 against one", gap(forgetting, news["row"]), 1e-3),
        holds("a positive start: error after 200 steps", positive, 1e-9),
        breaks("a start with a zero: error after 200 steps", with_zero, 0.5),
    )


A42 = untestable(
    "A42",
    "A chain leads from cost to capacity: gradient to update, h to retention, Hessian to kernel, kernel to signal and "
    "noise.",
    BLOG("From cost to capacity"),
    "the step from the Hessian to the kernel has no definition: of -|K q|^2 / 2 the Hessian is -K^T K, of "
    "-log-sum-exp it is minus a covariance of keys",
)
