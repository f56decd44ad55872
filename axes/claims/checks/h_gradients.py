"""Group H, gradients: outer products, ranks, and what the transition of a weight matrix is."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, cross_entropy, gelu, one_hot

from axes.catalogue import get
from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds, within
from axes.claims.tools.calculus import derivative, half_square
from axes.claims.tools.descent import randomised, sgd, squared_errors, trained
from axes.claims.tools.float64 import eye, full, ones, zeros
from axes.claims.tools.matrices import cosine, least_squares, rank, relative
from axes.claims.tools.tuples import DELTA, LONGHORN, RLS, layer_tuple, one_step, walked, whitened_sum
from axes.core.algorithms import Step
from axes.core.costs import CrossEntropy, SquaredError
from axes.core.derived import feedback, structure
from axes.core.legality import gates
from axes.core.memory import MLP
from axes.core.reference import run
from axes.core.state_update import StateUpdate
from axes.optim import SGD, Shampoo
from axes.optim.engine.layers import Examples, Layers


class _Twice(nn.Module):
    """One square matrix applied twice, with a nonlinearity between."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(torch.tanh(self.inner(x)))
        return out


def _outer_products(model: nn.Module, weight: Tensor, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, int]:
    """The gradient of a squared error, the sum of delta z^T over what the hooks saw, and how many there were."""
    layers = Layers(model, [weight], Examples)
    weight.grad = None
    half_square(model(x) - target).backward()
    rows = layers.found[weight]
    assert isinstance(rows, Examples) and weight.grad is not None
    z, delta = torch.cat([r[0] for r in rows.rows]), torch.cat([r[2] for r in rows.rows])
    return weight.grad, delta.mT @ z, len(z)


@check
def H01(draw: Draw) -> Findings:
    for what, shape, terms in (("one example", (1, 6), 1), ("a batch of 3", (3, 6), 3), ("4 tokens", (1, 4, 6), 4)):
        layer = randomised(nn.Linear(6, 5, bias=False, dtype=torch.float64), draw)
        g, total, count = _outer_products(layer, layer.weight, draw.normal(*shape), draw.normal(*shape[:-1], 5))
        yield agree(f"{what}: gradient against the sum of delta z^T", g, total, 1e-12)
        yield holds(f"{what}: rank against the number of applications", abs(rank(g) - terms) + abs(count - terms), 0)
        if terms > 1:
            yield breaks(f"{what}: rank beyond one", rank(g) - 1, terms - 1)
    shared = _Twice(randomised(nn.Linear(5, 5, bias=False, dtype=torch.float64), draw))
    g, total, _ = _outer_products(shared, shared.inner.weight, draw.normal(1, 5), draw.normal(1, 5))
    kernel, x, target = draw.normal(4, 3, 2).requires_grad_(), draw.normal(1, 3, 9), draw.normal(1, 4, 8)
    error = conv1d(x, kernel) - target
    by_kernel = torch.autograd.grad(half_square(error), kernel)[0].flatten(1)
    windows = x[0].unfold(1, 2, 1).permute(1, 0, 2).flatten(1)  # (positions, inputs of one application)
    positions = sum((torch.outer(d, z) for d, z in zip(error[0].detach().T, windows, strict=True)), zeros())
    yield agree("a weight used twice: gradient against two outer products", g, total, 1e-12)
    yield breaks("a weight used twice: rank beyond one", rank(g) - 1, 1)
    yield agree("convolution: gradient against a sum over positions", by_kernel, positions, 1e-12)
    yield breaks("convolution, one example: rank beyond one", rank(by_kernel) - 1, 3)


@check
def H02(draw: Draw) -> Findings:
    layer = randomised(nn.Linear(6, 5, bias=False, dtype=torch.float64), draw, scale=1.0)
    start, total = layer.weight.detach().clone(), zeros(5, 6)
    layers, stepper = Layers(layer, [layer.weight], Examples), sgd(layer.weight)
    for eta in draw.uniform(5, low=0.05, high=0.15):
        layers.clear()
        stepper.zero_grad()
        half_square(layer(draw.normal(1, 6)) - draw.normal(1, 5)).backward()
        rows = layers.found[layer.weight]
        assert isinstance(rows, Examples)
        (z, _, delta), stepper.param_groups[0]["lr"] = rows.rows[0], float(eta)
        total = total + eta * torch.outer(delta[0], z[0])
        stepper.step()
    yield differ("the printed sum against the weights after 5 steps", total, layer.weight, 0.5)
    yield differ("with the sign but without the start", -total, layer.weight, 0.5)
    yield agree("start minus the sum against the weights", start - total, layer.weight, 1e-12)


@check
def H03(draw: Draw) -> Findings:
    d = 4
    deep = StateUpdate(SquaredError(), algorithm=Step(0.3), memory=MLP(expansion=3))
    flat = StateUpdate(SquaredError(), algorithm=Step(0.3))
    k, v, gain, bias = draw.normal(d), draw.normal(d), 1 + 0.2 * draw.normal(d), 0.2 * draw.normal(d)
    signal = {"k": k, "v": v, "ln_gain": gain, "ln_bias": bias}
    a, b = ((0.6 * draw.normal(d, 3 * d), 0.6 * draw.normal(3 * d, d)) for _ in range(2))

    def after(update: StateUpdate, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return update.step(update.init(signal, leaves), signal)[0].theta

    def defect(update: StateUpdate, x: tuple[Tensor, ...], y: tuple[Tensor, ...]) -> float:
        """How far the step is from affine: the step of the mean against the mean of the steps."""
        middle = after(update, tuple((p + q) / 2 for p, q in zip(x, y, strict=True)))
        return max(gap(m, (p + q) / 2) for m, p, q in zip(middle, after(update, x), after(update, y), strict=True))

    moved = [(y - x) / 0.3 for x, y in zip(a, after(deep, a), strict=True)]
    live = [w.clone().requires_grad_() for w in a]
    hidden = live[1] @ k
    out = live[0] @ gelu(hidden)
    normal = (out - out.mean()) / (out.var(unbiased=False) + 1e-6).sqrt()
    loss = half_square(k + gain * normal + bias - v)
    at_out, at_hidden, *by_weight = torch.autograd.grad(loss, (out, hidden, *live))
    products = (torch.outer(at_out, gelu(hidden)), torch.outer(at_hidden, k))
    spectra = [torch.linalg.svdvals(m) for m in moved]
    ratio = min(float(s[0] / s[1].clamp_min(1e-300)) for s in spectra)
    yield breaks("first over second singular value of a layer's gradient, one token", ratio, 1e10)
    yield holds("steps against autograd", max(gap(m, -g) for m, g in zip(moved, by_weight, strict=True)), 1e-12)
    yield holds("steps against delta z^T", max(gap(m, -p) for m, p in zip(moved, products, strict=True)), 1e-12)
    yield breaks("MLP: distance of the step from an affine map", defect(deep, a, b), 1e-3)
    yield holds("matrix: distance of the step from an affine map", defect(flat, (a[0][:, :d],), (b[0][:, :d],)), 1e-12)
    yield holds("derived: the MLP's feedback is not called nonlinear", float(feedback(deep) != "nonlinear"), 0)


@check
def H16(draw: Draw) -> Findings:
    v, d, b = 300, 8, 50
    head, hidden = draw.normal(v, d) / math.sqrt(d), draw.normal(b, d)
    target = torch.randint(v, (b,), generator=draw.generator)
    w, h = head.clone().requires_grad_(), hidden.clone().requires_grad_()
    by_head, by_hidden = torch.autograd.grad(cross_entropy(h @ w.T, target, reduction="sum"), (w, h))
    logit = CrossEntropy().gradient(hidden @ head.T, one_hot(target, v).double())
    few = logit[:5].T @ hidden[:5]
    yield agree("dL/dH against (P - Y) W", by_hidden, logit @ head, 1e-12)
    yield agree("dL/dW against (P - Y)^T H", by_head, logit.T @ hidden, 1e-12)
    yield agree("rank of the logits' gradient, less B", rank(logit), b, 0)
    yield agree("rank of dL/dH, less D", rank(by_hidden), d, 0)
    yield agree("rank of dL/dW, less D", rank(by_head), d, 0)
    yield agree("rank of dL/dW of 5 examples, less 5", rank(few), 5, 0)


@check
def H17(draw: Draw) -> Findings:
    for v, d, low, high in ((4000, 40, 0.89, 0.91), (1000, 50, 0.76, 0.79), (8000, 20, 0.945, 0.955)):
        head, n = draw.normal(v, d), 800
        logits = draw.normal(n, d) @ head.T / math.sqrt(d)
        target = torch.randint(v, (n,), generator=draw.generator)
        g = CrossEntropy().gradient(logits, one_hot(target, v).double())
        kept = (g @ torch.linalg.qr(head)[0]).square().sum(-1) / g.square().sum(-1)
        yield within(f"D/V = {d / v:.4f}: energy kept, over D/V", kept.mean() * v / d, 0.9, 1.1)
        yield within(f"D/V = {d / v:.4f}: share of the norm lost", 1 - kept.mean().sqrt(), low, high)


@check
def H18(draw: Draw) -> Findings:
    v, d = 60, draw.integer(2, 9)
    head, basis = draw.normal(v, d), draw.orthogonal(v)
    fit = head @ torch.linalg.lstsq(head, basis).solution  # the nearest logits that some hidden state can make
    wide = torch.linalg.qr(draw.normal(1000, 50))[0]
    g = draw.unit(2000, 1000)
    yield agree("mean energy kept over an orthonormal basis, less D/V", float(fit.square().sum()) / v, d / v, 1e-12)
    yield within("random directions, D/V = 0.05: energy kept", (g @ wide).square().sum(-1).mean(), 0.045, 0.055)


@check
def H24(draw: Draw) -> Findings:
    d_v, d = 3, 6
    k, v, start = draw.normal(d), draw.normal(d_v), draw.normal(d_v, d)
    beta = float(draw.uniform(low=0.5, high=2.0))
    signal = {"k": k, "v": v, "beta": full(beta, d_v)}

    def after(name: str, w: Tensor = start) -> Tensor:
        return one_step(layer_tuple(name), w, **signal)

    def row_map(name: str) -> Tensor:
        """What becomes of one row of the state."""
        return derivative(lambda w: after(name, w), start)[:d, :d].T

    size = 1 + beta * float(k @ k)
    whole = eye(d) - beta / size * torch.outer(k, k)
    exact, diagonal = after(LONGHORN), after("longhorn-diagonal")
    kept, left = torch.diag(torch.diagonal(whole)), (v - start @ k).norm() / size
    off = (v - diagonal @ k).norm() / left
    yield agree("transition of the exact layer against I - eps k k^T", row_map(LONGHORN), whole, 1e-12)
    yield agree("transition of the diagonal layer against its diagonal", row_map("longhorn-diagonal"), kept, 1e-12)
    yield agree("exact layer: recall error against |e|/(1 + beta |k|^2)", (v - exact @ k).norm(), left, 1e-12)
    yield breaks("diagonal layer: relative distance of its state", relative(diagonal, exact), 1e-2)
    yield differ("diagonal layer: relative distance of its recall error", off, 1, 1e-4)


@check
def H25(draw: Draw) -> Findings:
    n, d_v, d = 20, 3, 5
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    fit = least_squares(k, v)
    layer = walked(layer_tuple(RLS), k=k, v=v, decay=zeros(n), beta=ones(n))[-1]
    x, e = k, v - draw.normal(n, d)[:, :d_v]
    products = e[:, :, None] * x[:, None, :]
    _, state = run(Shampoo.declare((0.0, 1.0)).normal(), {"g": products, "lr": full(0.1, n), "weight_decay": zeros(n)})
    seen, weighed = state.via[0].stats[1].theta[0], (x * e.square().sum(-1, keepdim=True)).T @ x  # type: ignore[union-attr]
    yield agree("exponent -1 against least squares", whitened_sum(k, v, 1.0), fit, 1e-10)
    yield agree("the layer, with its ridge, against least squares", layer, least_squares(k, v, 0.1), 1e-10)
    yield breaks("exponent -1/2: relative distance to least squares", relative(whitened_sum(k, v, 0.5), fit), 0.2)
    yield agree("Shampoo's right statistic against sum |e|^2 x x^T", seen, weighed, 1e-10)
    yield breaks("that statistic and sum x x^T: 1 - cosine", 1 - cosine(seen, x.T @ x), 1e-3)


@check
def H26(draw: Draw) -> Findings:
    n, d_v, d, eta = 12, 3, 5, 0.4
    k, v, start = draw.unit(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    delta = layer_tuple(DELTA)

    def descended(first: Tensor, count: int = n) -> Tensor:
        return trained(partial(sgd, lr=eta), first, squared_errors(k[:count], v[:count]))

    path, layer = descended(start), walked(delta, start, k=k, v=v, beta=full(eta, n))
    # the step is affine, so that a difference of steps is its linear part: here that of the first row
    basis = eye(d_v * d)[:d].reshape(d, d_v, d)
    total = torch.stack([descended(start + e, 1)[0] - path[0] for e in basis])[:, 0]
    scalar = total.trace() / d * eye(d)

    def gate(update: StateUpdate) -> bool:
        """Whether the weights are gated by more than the identity."""
        return bool(gates(update.parts().monoid) - {"identity"})

    explicit = {name: gate(get(name, "data").update) for name in ("sgd", "adam", "adamw", "lion", "muon")}
    explicit["sgd with decay"] = gate(SGD.declare(0.9, decoupled=True))
    wanted = {"sgd": False, "adam": False, "adamw": True, "lion": True, "muon": True, "sgd with decay": True}
    adam = get("adam", "data").update.parts().step.via[0]
    assert isinstance(adam, StateUpdate)
    yield agree("SGD on the squared error against DeltaNet", path, layer, 1e-12)
    yield agree("SGD's total transition against I - eta x x^T", total, eye(d) - eta * torch.outer(k[0], k[0]), 1e-12)
    yield breaks("SGD's total transition: distance to the nearest scalar", (total - scalar).norm(), 0.1)
    yield breaks("label of DeltaNet's total transition is not scalar (derived)", float(structure(delta) != "scalar"), 1)
    yield breaks("label Muon: none, against its scalar gate", float(explicit["muon"]), 1)
    yield holds("explicit gates, of 6, unlike the two columns", sum(explicit[x] != wanted[x] for x in wanted), 0)
    yield holds("Adam's buffer is not scalar-gated", float(gates(adam.parts().monoid) != {"scalar"}), 0)
