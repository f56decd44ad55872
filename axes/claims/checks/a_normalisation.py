"""Group A, normalisation: what is a projection, where it acts, and what the tuple determines."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds, within
from axes.claims.tools.calculus import gradient, minimiser, negative_entropy
from axes.claims.tools.descent import moves, shampoo, squared_error
from axes.claims.tools.fits import exponent
from axes.claims.tools.float64 import eye, full, ones, tensor, zeros
from axes.claims.tools.matrices import beyond, centred, cosine, spread
from axes.claims.tools.tuples import DELTA, GLA, MAMBA2, layer_tuple, one_output, read, walked
from axes.core.algorithms import Step
from axes.core.costs import Linear
from axes.core.geometry import Entropic, SignBall, Spectral, Sphere, Whiten
from axes.core.geometry.bregman import Context
from axes.core.monoids import Identity
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import PostNorm, PreNorm
from axes.depth.base import DepthMixer
from axes.optim import Shampoo
from axes.sequence import TTTMLP, DeltaNet, TTTLinear


@check
def A35(draw: Draw) -> Findings:
    d = draw.integer(3, 8)
    x, sphere = draw.normal(1, d), Sphere("rows", radius=None)
    near, level = sphere.primal(x), sphere.primal(centred(x))
    normed = layer_norm(x, (d,), eps=0.0)
    points = draw.normal(2000, d)
    points = sphere.primal(centred(points, (-1,)))

    def distance(w: Tensor) -> Tensor:
        return (w - x).square().sum()

    def radius(w: Tensor) -> Tensor:
        return w.square().sum() - d

    on_sphere = minimiser(distance, 0.5 * near, equal=[radius])
    on_equator = minimiser(distance, 0.5 * level, equal=[radius, torch.sum])
    nearer = (normed - x).norm() - (points - x).norm(dim=-1)
    yield agree("against RMSNorm", near, rms_norm(x, (d,), eps=0.0), 1e-12)
    yield agree("against the nearest point of the sphere, by a solver", near, on_sphere, 1e-5)
    yield agree("LayerNorm against the sphere's projection after centring", level, normed, 1e-12)
    yield agree("LayerNorm against the nearest point of the equator, by a solver", normed, on_equator, 1e-5)
    yield holds("LayerNorm: how much nearer 2000 points come", beyond(nearer), 1e-12)
    twice = torch.cat((sphere.primal(near), layer_norm(normed, (d,), eps=0.0)))
    yield agree("applied twice", twice, torch.cat((near, normed)), 1e-12)
    yield holds("zero stays zero", sphere.primal(torch.zeros_like(x)).abs().max(), 0.0)


def _stream(mixer: type[DepthMixer], x: Tensor, maps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States (L + 1, ...), sublayer inputs and sublayer outputs (L, ...) of a stack of random linear sublayers."""
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
    return torch.stack(states), torch.stack(inputs), torch.stack(outputs)


@check
def A36(draw: Draw) -> Findings:
    d, depth = 64, 100
    radius = math.sqrt(d)
    x, maps = radius * draw.unit(1, 16, d), draw.normal(depth, d, d) / radius
    states, inputs, outputs = _stream(PreNorm, x, maps)
    sizes = states.norm(dim=-1).flatten(1).mean(1)
    normed = rms_norm(states[-2], (d,), eps=0.0)
    post, _, f = _stream(PostNorm, x, maps)
    gate = radius / (post[:-1] + f).norm(dim=-1, keepdim=True)
    yield breaks("pre-norm's state after 100 sublayers: |x| / sqrt(d)", sizes[-1] / radius, 3.0)
    yield within("its exponent in depth", exponent(np.arange(10, depth + 1), sizes[10:].numpy()), 0.3, 0.7)
    yield agree("pre-norm keeps everything: x_0 plus the sum of the sublayers", states[-1], x + outputs.sum(0), 1e-11)
    yield agree("what pre-norm reads against RMSNorm of the state", inputs[-1], normed, 1e-12)
    yield holds("post-norm's state against the sphere", post.norm(dim=-1) - radius, 1e-11)
    yield agree("post-norm against g x + g f, g = sqrt(d)/|x + f|", post[1:], gate * post[:-1] + gate * f, 1e-11)
    yield breaks("spread of the gate over sublayers and data", spread(gate), 0.05)


def soap(gradients: Tensor, beta1: float, beta2: float, eps: float) -> Tensor:
    """The last direction of Adam in the eigenbasis of averages of g g^T and g^T g, rotated anew at every step."""
    _, rows, columns = gradients.shape
    left, right = zeros(rows, rows), zeros(columns, columns)
    first, second, direction = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0]), gradients[0]
    for t, g in enumerate(gradients, 1):
        left, right = beta2 * left + (1 - beta2) * g @ g.mT, beta2 * right + (1 - beta2) * g.mT @ g
        u, w = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * (u.mT @ g @ w).square()
        root = (second / (1 - beta2**t)).sqrt() + eps
        direction = u @ ((u.mT @ first @ w) / (1 - beta1**t) / root) @ w.mT
    return direction


@check
def A37(draw: Draw) -> Findings:
    # one label, two optimizers
    n, shape, betas, eps = 20, (5, 7), (0.9, 0.95), 1e-8
    scales = [10 ** torch.linspace(0.0, -2.0, size, dtype=torch.float64) for size in shape]
    gradients = draw.normal(n, *shape) * scales[0][:, None] * scales[1]

    quarter, half = (-moves(shampoo(p, betas=betas, eps=eps), zeros(*shape), gradients)[-1] for p in (0.25, 0.5))
    rotated = soap(gradients, *betas, eps)

    # one label, two layers
    d = 4
    k, v, q = (draw.normal(6, d) for _ in range(3))
    decay = -draw.uniform(6, d)
    data = {"k": k, "v": v, "q": q}
    scalar = walked(layer_tuple(MAMBA2), **data, decay=decay.mean(-1), dt=ones(6))
    channel = walked(layer_tuple(GLA), **data, decay=decay)
    linear, deep = (walked(t.update, **data, eta=full(0.1, 6)) for t in (TTTLinear, TTTMLP))

    # equal parts, equal trajectories
    rebuilt, gaps = 0, []
    for name in (MAMBA2, "titans-matrix", DELTA, "memora-matrix"):
        update = layer_tuple(name)
        again = StateUpdate(*copy.deepcopy(update.parts()))
        rebuilt += again == update and hash(again) == hash(update)
        rates = {
            p.name: full(-0.1 if p.domain == "unit" else 0.2, *((6,) if p.shape == "scalar" else (6, d)))
            for p in update.demands()
        }
        gaps.append(gap(walked(update, **data, **rates), walked(again, **data, **rates)))
    told_apart = (
        layer_tuple(MAMBA2) != layer_tuple(GLA),
        TTTLinear.update != TTTMLP.update,
        Shampoo.declare(betas, 0.25) != Shampoo.declare(betas, 0.5),
    )
    yield breaks("Shampoo with power 1/4 and SOAP: 1 - cosine", 1 - cosine(quarter, rotated), 0.02)
    yield breaks("Shampoo with power 1/2 and SOAP: 1 - cosine", 1 - cosine(half, rotated), 1e-4)
    yield breaks("Shampoo with powers 1/4 and 1/2: 1 - cosine", 1 - cosine(quarter, half), 0.01)
    yield differ("Mamba-2 and GLA", scalar, channel, 0.01)
    yield differ("TTT-Linear and TTT-MLP", linear, deep, 0.01)
    yield holds("pairs that the declared tuples do not tell apart", len(told_apart) - sum(told_apart), 0.0)
    yield holds("rebuilt tuples that are not equal", 4 - rebuilt, 0.0)
    yield holds("trajectories of equal tuples", max(gaps), 0.0)


@check
def A38(draw: Draw) -> Findings:
    x, matrix = 2 * draw.normal(1, 6), draw.normal(5, 3)
    y = draw.uniform(1, 6, low=0.1, high=2.0)

    def twice(f: Callable[[Tensor], Tensor], at: Tensor) -> float:
        return gap(f(f(at)), f(at))

    def to_simplex(z: Tensor) -> Tensor:
        return Entropic("row").primal(z.log())

    def divergence(w: Tensor) -> Tensor:
        """Kullback-Leibler, from exp(x)."""
        return (w * (w / x.exp()).log() - w).sum()

    projected = minimiser(divergence, torch.full_like(x, 1 / 6), equal=[lambda w: w.sum() - 1], lower=1e-14)
    softmax = Entropic("row").primal(x)
    whiten, g = Whiten((StateUpdate(Linear("square")),), "diagonal", 0.5, 0.0), draw.normal(3, 4)

    def adam(z: Tensor, past: Tensor) -> Tensor:
        return whiten.primal(z, Context(stats=(past,)))

    one, other = draw.uniform(3, 4, low=0.1, high=0.5), draw.uniform(3, 4, low=1.0, high=2.0)
    yield breaks("softmax applied twice", twice(Entropic("row").primal, x), 0.05)
    yield breaks("division by a root of past squares applied twice", twice(lambda z: adam(z, one), g), 0.05)
    yield differ("the same gradient with two pasts", adam(g, one), adam(g, other), 0.05)
    yield holds("RMSNorm applied twice", twice(Sphere("rows", radius=None).primal, x), 1e-12)
    yield holds("LayerNorm applied twice", twice(lambda z: layer_norm(z, (6,), eps=0.0), x), 1e-12)
    yield holds("polar factor applied twice", twice(Spectral("polar").primal, matrix), 1e-12)
    yield holds("sign applied twice", twice(SignBall().primal, x), 0.0)
    yield holds("y / sum y applied twice", twice(to_simplex, y), 1e-12)
    yield agree("y / sum y: entropic link of log y", to_simplex(y), y / y.sum(), 1e-12)
    yield agree("softmax(x) against the projection of exp(x), by a solver", softmax, projected, 1e-5)
    yield holds("softmax(x): stationarity of that projection", centred(gradient(divergence, softmax)), 1e-11)


def memora(mass: float | None, axis: Literal["row", "column", "whole"] = "row") -> StateUpdate:
    """Memora's matrix tuple with the gradient at the previous state, without a gate, on the chosen simplices."""
    layer = layer_tuple("memora-matrix")
    return dataclasses.replace(layer, h=Entropic(axis, mass), monoid=Identity(), algorithm=Step(Per("eta")))


@check
def A40(draw: Draw) -> Findings:
    n, d_v, d_k, mass = 25, 3, 4, math.sqrt(4)
    k, v, other = draw.unit(n, d_k), 3 * draw.normal(n, d_v), 3 * draw.normal(n, d_v)
    rates = {"decay": zeros(n, d_v), "eta": full(0.8, n, d_v), "beta": full(0.8, n)}

    def states(update: StateUpdate, values: Tensor) -> Tensor:
        return walked(update, k=k, v=values, **{p.name: rates[p.name] for p in update.demands()})

    layer = layer_tuple("memora-matrix")
    simplex, free = states(layer, v), states(DeltaNet.update, v)
    q = draw.normal(d_k)
    reads = torch.stack([read(layer, s, q) for s in simplex])

    def defect(update: StateUpdate) -> float:
        empty = states(update, torch.zeros_like(v))
        both = states(update, 2 * v - other)
        return gap(both - empty, 2 * (states(update, v) - empty) - (states(update, other) - empty))

    outside = torch.stack((reads.max() - mass * q.max(), mass * q.min() - reads.min()))
    yield holds("Memora: row sums less their mass", simplex.sum(-1) - mass, 1e-12)
    yield holds("Memora: entries below zero", beyond(-simplex), 0.0)
    yield holds("Memora: reads outside the hull", beyond(outside), 1e-12)
    yield holds("DeltaNet: defect of linearity in the values", defect(DeltaNet.update), 1e-11)
    yield breaks("Memora: defect of linearity in the values", defect(layer), 0.05)
    yield breaks("DeltaNet: spread of the row sums", spread(free.sum(-1)), 0.5)
    yield breaks("DeltaNet: least entry below zero", -free.min(), 0.1)
    yield holds("the two tuples have different costs", float(layer.cost != DeltaNet.update.cost), 0.0)


@check
def A41(draw: Draw) -> Findings:
    d_v, d_k, eta = 5, 8, tensor(0.7)
    k, v, theta = draw.normal(d_k), 2 * draw.normal(d_v), 0.5 * draw.normal(d_v, d_k)
    dims: dict[Literal["row", "column", "whole"], tuple[int, ...]] = {"row": (-1,), "column": (-2,), "whole": (-2, -1)}
    news = {}
    for axis, slices in dims.items():
        before = theta - theta.logsumexp(slices, keepdim=True)
        new = news[axis] = one_output(memora(1.0, axis), before, k=k, v=v, eta=eta)
        g = gradient(squared_error(k, v), before.exp())
        weighed = (before - eta * g).exp()
        residual = g + (gradient(negative_entropy, new) - before - 1) / eta
        yield agree(f"{axis}: against the printed step", new, weighed / weighed.sum(slices, keepdim=True), 1e-12)
        yield holds(f"{axis}: stationarity on its simplices", centred(residual, slices), 1e-9)
    row = theta.log_softmax(-1)
    heavy = one_output(memora(None), row, k=k, v=v, eta=eta)
    gates = {"decay": full(-0.3, d_v), "eta": eta.expand(d_v)}
    mass_one = dataclasses.replace(layer_tuple("memora-matrix"), h=Entropic("row"))
    forgetting = one_output(mass_one, row, k=k, v=v, **gates)

    # one row that must put 0.9 on its first entry
    datum = {"k": eye(d_k)[0].expand(200, d_k), "v": full(0.9, 200, 1), "eta": full(2.0, 200)}
    lacking = zeros(1, d_k)
    lacking[0, 0] = -math.inf
    positive, with_zero = (walked(memora(1.0), s, **datum)[-1, 0, 0] for s in (zeros(1, d_k), lacking))
    yield agree("sum of all rows less d_v", news["row"].sum(), d_v, 1e-11)
    yield agree("sum of all columns less d_k", news["column"].sum(), d_k, 1e-11)
    yield agree("sum of the whole less one", news["whole"].sum(), 1, 1e-11)
    yield differ("rows against columns", news["row"], news["column"], 0.05)
    yield differ("rows against the whole", news["row"], news["whole"], 0.05)
    yield differ("mass sqrt(d_k) against mass one", heavy, news["row"], 0.1)
    yield differ("exponent 0.74 against one", forgetting, news["row"], 1e-3)
    yield agree("a positive start: error after 200 steps", positive, 0.9, 1e-9)
    yield differ("a start with a zero: error after 200 steps", with_zero, 0.9, 0.5)
