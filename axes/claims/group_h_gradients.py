"""Group H, gradients: outer products, ranks, and what the transition of a weight matrix is."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, cross_entropy

from axes.catalogue import get
from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, within
from axes.claims.group_a_tools import layer_tuple, randomised
from axes.claims.group_h_tools import rank, stepped
from axes.claims.sources import BLOG
from axes.core.algorithms import Step
from axes.core.costs import Alignment, CrossEntropy, Linear, SquaredError
from axes.core.derived import feedback, structure
from axes.core.geometry import Whiten
from axes.core.legality import gates
from axes.core.memory import MLP
from axes.core.reference import run
from axes.core.state_update import StateUpdate
from axes.optim import SGD, Shampoo
from axes.optim.engine.layers import Examples, Layers

_DATA = "The data axis"


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
    ((model(x) - target).square().sum() / 2).backward()
    rows = layers.found[weight]
    assert isinstance(rows, Examples) and weight.grad is not None
    z, delta = torch.cat([r[0] for r in rows.rows]), torch.cat([r[2] for r in rows.rows])
    return weight.grad, sum((torch.outer(d, y) for d, y in zip(delta, z, strict=True)), torch.zeros(())), len(z)


@claim(
    "H01",
    "The gradient of every layer of a network is one outer product delta z^T.",
    Verdict.FALSE,
    BLOG(_DATA + ", gradients as outer products"),
    "axes.optim.engine.layers.Layers",
    correction="true per example and per application of a linear weight; in general a sum of such products, of rank at "
    "most the smallest of their number, d_in and d_out",
    kind="OVER",
    derivation="dl/dW = sum over applications of (dl/dy)(z)^T. A batch, the tokens of a sequence, the positions of a "
    "convolution and a shared weight each add terms.",
)
def H01(draw: Draw) -> tuple[Finding, ...]:
    findings = []
    for what, shape, terms in (("one example", (1, 6), 1), ("a batch of 3", (3, 6), 3), ("4 tokens", (1, 4, 6), 4)):
        layer = randomised(nn.Linear(6, 5, bias=False, dtype=torch.float64), draw)
        g, total, count = _outer_products(layer, layer.weight, draw.normal(*shape), draw.normal(*shape[:-1], 5))
        findings += [
            holds(f"{what}: gradient against the sum of delta z^T", gap(g, total), 1e-12),
            holds(f"{what}: rank against the number of applications", abs(rank(g) - terms) + abs(count - terms), 0),
        ]
        if terms > 1:
            findings.append(breaks(f"{what}: rank beyond one", rank(g) - 1, terms - 1))
    shared = _Twice(randomised(nn.Linear(5, 5, bias=False, dtype=torch.float64), draw))
    g, total, _ = _outer_products(shared, shared.inner.weight, draw.normal(1, 5), draw.normal(1, 5))
    kernel, x, target = draw.normal(4, 3, 2).requires_grad_(), draw.normal(1, 3, 9), draw.normal(1, 4, 8)
    error = conv1d(x, kernel) - target
    (by_kernel,) = torch.autograd.grad(error.square().sum() / 2, kernel)
    windows = x[0].unfold(1, 2, 1).permute(1, 0, 2).flatten(1)  # (positions, inputs of one application)
    positions = sum((torch.outer(d, z) for d, z in zip(error[0].detach().T, windows, strict=True)), torch.zeros(()))
    return (
        *findings,
        holds("a weight used twice: gradient against two outer products", gap(g, total), 1e-12),
        breaks("a weight used twice: rank beyond one", rank(g) - 1, 1),
        holds("convolution: gradient against a sum over positions", gap(by_kernel.flatten(1), positions), 1e-12),
        breaks("convolution, one example: rank beyond one", rank(by_kernel.flatten(1)) - 1, 3),
    )


@claim(
    "H02",
    "Trained weights are W_N = sum_n eta_n delta_n z_n^T.",
    Verdict.FALSE,
    BLOG(_DATA + ", weights as sums of outer products"),
    "axes.optim.SGD, axes.optim.engine.layers.Layers",
    correction="W_N = W_0 - sum_n eta_n delta_n z_n^T: descent subtracts, and the initial weights stay",
    kind="NOTN",
    derivation="Unroll W_n = W_{n-1} - eta_n delta_n z_n^T.",
)
def H02(draw: Draw) -> tuple[Finding, ...]:
    layer = randomised(nn.Linear(6, 5, bias=False, dtype=torch.float64), draw, scale=1.0)
    start, total = layer.weight.detach().clone(), torch.zeros(5, 6, dtype=torch.float64)
    layers, sgd = Layers(layer, [layer.weight], Examples), SGD([layer.weight], lr=0.0, momentum=0.0)
    for eta in draw.uniform(5, low=0.05, high=0.15):
        layers.clear()
        sgd.zero_grad()
        ((layer(draw.normal(1, 6)) - draw.normal(1, 5)).square().sum() / 2).backward()
        rows = layers.found[layer.weight]
        assert isinstance(rows, Examples)
        (z, _, delta), sgd.param_groups[0]["lr"] = rows.rows[0], float(eta)
        total = total + eta * torch.outer(delta[0], z[0])
        sgd.step()
    return (
        breaks("the printed sum against the weights after 5 steps", gap(total, layer.weight), 0.5),
        breaks("with the sign but without the start", gap(-total, layer.weight), 0.5),
        holds("start minus the sum against the weights", gap(start - total, layer.weight), 1e-12),
    )


@claim(
    "H03",
    "A memory that is an MLP breaks the rank-one structure of the gradient.",
    Verdict.FALSE,
    BLOG(_DATA + ", an MLP as memory"),
    "axes.memory.MLP",
    correction="each layer of the MLP still has a gradient of rank one per token; what breaks is that the step is "
    "affine "
    "in the state, and with it the scan",
    kind="MATH",
    derivation="Backpropagation gives delta_l z_l^T per layer and token. The map from old to new weights contains the "
    "MLP's own forward pass and is not affine.",
)
def H03(draw: Draw) -> tuple[Finding, ...]:
    d = 4
    deep = StateUpdate(SquaredError(), algorithm=Step(0.3), memory=MLP(expansion=3))
    flat = StateUpdate(SquaredError(), algorithm=Step(0.3))
    signal = {
        "k": draw.normal(d),
        "v": draw.normal(d),
        "ln_gain": 1 + 0.2 * draw.normal(d),
        "ln_bias": 0.2 * draw.normal(d),
    }
    a, b = ((0.6 * draw.normal(d, 3 * d), 0.6 * draw.normal(3 * d, d)) for _ in range(2))

    def after(update: StateUpdate, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return update.step(update.init(signal, leaves), signal)[0].theta

    def defect(update: StateUpdate, x: tuple[Tensor, ...], y: tuple[Tensor, ...]) -> float:
        """How far the step is from affine: the step of the mean against the mean of the steps."""
        middle = after(update, tuple((p + q) / 2 for p, q in zip(x, y, strict=True)))
        return max(gap(m, (p + q) / 2) for m, p, q in zip(middle, after(update, x), after(update, y), strict=True))

    moved = [(y - x) / 0.3 for x, y in zip(a, after(deep, a), strict=True)]
    live = [w.clone().requires_grad_() for w in a]
    hidden = live[1] @ signal["k"]
    out = live[0] @ torch.nn.functional.gelu(hidden)
    normal = (out - out.mean()) / (out.var(unbiased=False) + 1e-6).sqrt()
    error = signal["k"] + signal["ln_gain"] * normal + signal["ln_bias"] - signal["v"]
    at_out, at_hidden, *by_weight = torch.autograd.grad(error.square().sum() / 2, (out, hidden, *live))
    products = (torch.outer(at_out, torch.nn.functional.gelu(hidden)), torch.outer(at_hidden, signal["k"]))
    spectra = [torch.linalg.svdvals(m) for m in moved]
    return (
        breaks(
            "first over second singular value of a layer's gradient, one token",
            min(float(s[0] / s[1].clamp_min(1e-300)) for s in spectra),
            1e10,
        ),
        holds("steps against autograd", max(gap(m, -g) for m, g in zip(moved, by_weight, strict=True)), 1e-12),
        holds("steps against delta z^T", max(gap(m, -p) for m, p in zip(moved, products, strict=True)), 1e-12),
        breaks("MLP: distance of the step from an affine map", defect(deep, a, b), 1e-3),
        holds("matrix: distance of the step from an affine map", defect(flat, (a[0][:, :d],), (b[0][:, :d],)), 1e-12),
        holds("derived: the MLP's feedback is not called nonlinear", float(feedback(deep) != "nonlinear"), 0),
    )


@claim(
    "H16",
    "A head of D columns lets only rank D of the gradient of V logits through.",
    Verdict.EXACT,
    BLOG(_DATA + ", the language-model head"),
    "axes.costs.CrossEntropy",
    derivation="dL/dH = (P - Y) W with W of V rows and D columns, whatever the batch; dL/dW = (P - Y)^T H has rank at "
    "most min(B, D).",
)
def H16(draw: Draw) -> tuple[Finding, ...]:
    v, d, b = 300, 8, 50
    head, hidden = draw.normal(v, d) / math.sqrt(d), draw.normal(b, d)
    target = torch.randint(v, (b,), generator=draw.generator)
    w, h = head.clone().requires_grad_(), hidden.clone().requires_grad_()
    by_head, by_hidden = torch.autograd.grad(cross_entropy(h @ w.T, target, reduction="sum"), (w, h))
    logit = CrossEntropy().gradient(hidden @ head.T, torch.nn.functional.one_hot(target, v).double())
    few = logit[:5].T @ hidden[:5]
    return (
        holds("dL/dH against (P - Y) W", gap(by_hidden, logit @ head), 1e-12),
        holds("dL/dW against (P - Y)^T H", gap(by_head, logit.T @ hidden), 1e-12),
        holds("rank of the logits' gradient, less B", abs(rank(logit) - b), 0),
        holds("rank of dL/dH, less D", abs(rank(by_hidden) - d), 0),
        holds("rank of dL/dW, less D", abs(rank(by_head) - d), 0),
        holds("rank of dL/dW of 5 examples, less 5", abs(rank(few) - 5), 0),
    )


@claim(
    "H17",
    "The head destroys 95 to 99 % of the logits' gradient.",
    Verdict.STATISTICAL,
    BLOG(_DATA + ", the language-model head"),
    "axes.costs.CrossEntropy",
    derivation="A random column space of dimension D keeps D/V of the energy, so 95 to 99 % is energy for D/V of 5 to "
    "1 %. Of the norm 1 - sqrt(D/V) is lost: 78 to 90 % there, and 95 % only from D/V = 1/400 down. Untrained heads.",
)
def H17(draw: Draw) -> tuple[Finding, ...]:
    findings = []
    for v, d, low, high in ((4000, 40, 0.89, 0.91), (1000, 50, 0.76, 0.79), (8000, 20, 0.945, 0.955)):
        head, n = draw.normal(v, d), 800
        logits = draw.normal(n, d) @ head.T / math.sqrt(d)
        target = torch.randint(v, (n,), generator=draw.generator)
        g = CrossEntropy().gradient(logits, torch.nn.functional.one_hot(target, v).double())
        kept = (g @ torch.linalg.qr(head)[0]).square().sum(-1) / g.square().sum(-1)
        findings += [
            within(f"D/V = {d / v:.4f}: energy kept, over D/V", kept.mean() * v / d, 0.9, 1.1),
            within(f"D/V = {d / v:.4f}: share of the norm lost", 1 - kept.mean().sqrt(), low, high),
        ]
    return tuple(findings)


@claim(
    "H18",
    "D/V is a capacity ratio like d_k/N: the share of an isotropic gradient's energy that the head keeps.",
    Verdict.EXACT,
    BLOG(_DATA + ", the language-model head"),
    "none: a property of a projection, before any update",
    derivation="E |Pi g|^2 / |g|^2 = tr(Pi)/V = D/V for any D columns of full rank.",
)
def H18(draw: Draw) -> tuple[Finding, ...]:
    v, d = 60, draw.integer(2, 9)
    head, basis = draw.normal(v, d), draw.orthogonal(v)
    fit = head @ torch.linalg.lstsq(head, basis).solution  # the nearest logits that some hidden state can make
    wide = torch.linalg.qr(draw.normal(1000, 50))[0]
    g = draw.unit(2000, 1000)
    return (
        holds(
            "mean energy kept over an orthonormal basis, less D/V", abs(float(fit.square().sum()) / v - d / v), 1e-12
        ),
        within("random directions, D/V = 0.05: energy kept", (g @ wide).square().sum(-1).mean(), 0.045, 0.055),
    )


@claim(
    "H24",
    "A diagonal gate is the diagonal of a full transition: Diag(I - eps k k^T) = 1 - eps k^2.",
    Verdict.EXACT,
    BLOG("The sequence axis, diagonal gates"),
    "axes.sequence.LonghornDiagonal, axes.sequence.Longhorn",
    derivation="With eps = beta/(1 + beta |k|^2) this is what the layer computes. Only the exact transition leaves the "
    "recall error |e|/(1 + beta |k|^2) at the key just written; its diagonal is a poor stand-in.",
)
def H24(draw: Draw) -> tuple[Finding, ...]:
    d_v, d = 3, 6
    k, v, start = draw.normal(d), draw.normal(d_v), draw.normal(d_v, d)
    beta = float(draw.uniform(low=0.5, high=2.0))
    signal = {"k": k, "v": v, "beta": torch.full((d_v,), beta, dtype=torch.float64)}

    def after(name: str, w: Tensor) -> Tensor:
        update = layer_tuple(name)
        return update.step(update.init(signal, (w,)), signal)[0].theta[0]

    def transition(name: str) -> Tensor:
        """The map of one row of the state."""
        return torch.autograd.functional.jacobian(lambda w: after(name, w), start)[0, :, 0].T

    eps = beta / (1 + beta * float(k @ k))
    full = torch.eye(d, dtype=torch.float64) - eps * torch.outer(k, k)
    exact, diagonal = after("longhorn", start), after("longhorn-diagonal", start)
    left = (v - start @ k).norm() / (1 + beta * float(k @ k))
    return (
        holds("transition of the exact layer against I - eps k k^T", gap(transition("longhorn"), full), 1e-12),
        holds(
            "transition of the diagonal layer against its diagonal",
            gap(transition("longhorn-diagonal"), torch.diag(torch.diagonal(full))),
            1e-12,
        ),
        holds("exact layer: recall error against |e|/(1 + beta |k|^2)", gap((v - exact @ k).norm(), left), 1e-12),
        breaks("diagonal layer: relative distance of its state", float((exact - diagonal).norm() / exact.norm()), 1e-2),
        breaks(
            "diagonal layer: relative distance of its recall error",
            abs(float((v - diagonal @ k).norm() / left) - 1),
            1e-4,
        ),
    )


@claim(
    "H25",
    "Recursive least squares and Shampoo's R^{-1/2} are the same whitening of keys.",
    Verdict.FALSE,
    BLOG("Table of normalisations, whitening of the key side"),
    "axes.sequence.RLSNet, axes.optim.Shampoo",
    correction="recursive least squares applies R^{-1} with R = sum k k^T; Shampoo's right factor is R^{-1/2} with R = "
    "sum g^T g = sum |e|^2 x x^T: exponent and statistic differ",
    kind="MATH",
    derivation="Normal equations: W sum k k^T = sum v k^T. For g = e x^T, g^T g = |e|^2 x x^T.",
)
def H25(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d = 20, 3, 5
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    key = StateUpdate(Linear("key"))
    fit = torch.linalg.lstsq(k, v).solution.T

    def whitened(power: float) -> Tensor:
        return run(StateUpdate(Alignment(), Whiten((key,), "right", power, eps=0.0)), {"k": k, "v": v})[0][-1]

    zeros, ones = torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)
    layer = run(layer_tuple("rls-net"), {"k": k, "v": v, "decay": zeros, "beta": ones})[0][-1]
    padded = torch.cat((k, math.sqrt(0.1) * torch.eye(d, dtype=torch.float64)))
    ridge = torch.linalg.lstsq(padded, torch.cat((v, torch.zeros(d, d_v, dtype=torch.float64)))).solution.T
    x, e = k, v - draw.normal(n, d)[:, :d_v]
    shampoo = Shampoo.declare((0.0, 1.0)).normal()
    rates = {"lr": 0.1, "weight_decay": 0.0}
    state = shampoo.init({"g": e[0], **rates}, (torch.zeros(d_v, d, dtype=torch.float64),))
    for error, datum in zip(e, x, strict=True):
        state, _ = shampoo.step(state, {"g": error[:, None] * datum, **rates})
    seen, plain = state.via[0].stats[1].theta[0], x.T @ x  # type: ignore[union-attr]
    cosine = float((seen * plain).sum() / seen.norm() / plain.norm())
    return (
        holds("exponent -1 against least squares", gap(whitened(1.0), fit), 1e-10),
        holds("the layer, with its ridge, against least squares", gap(layer, ridge), 1e-10),
        breaks(
            "exponent -1/2: relative distance to least squares", float((whitened(0.5) - fit).norm() / fit.norm()), 0.2
        ),
        holds(
            "Shampoo's right statistic against sum |e|^2 x x^T",
            gap(seen, (x * e.square().sum(-1, keepdim=True)).T @ x),
            1e-10,
        ),
        breaks("that statistic and sum x x^T: 1 - cosine", 1 - cosine, 1e-3),
    )


@claim(
    "H26",
    "In one table of transitions SGD is scalar, DeltaNet a Householder product, Muon none and Lion scalar.",
    Verdict.FALSE,
    BLOG("Table of optimizers, column of monoids"),
    "axes.optim.SGD, axes.sequence.DeltaNet, axes.core.derived.structure",
    correction="two columns: the explicit gate (SGD and Adam identity; SGD with decoupled decay, AdamW, Lion and Muon "
    "scalar) and the total transition (for the squared error a generalised Householder, SGD's as DeltaNet's)",
    kind="LABEL",
    derivation="SGD on the squared error is DeltaNet, so what one table calls scalar and Householder is one "
    "transition, "
    "(I - eta x x^T). Adam's scalars are those of its buffers.",
)
def H26(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, eta = 12, 3, 5, 0.4
    k, v, start = draw.unit(n, d), draw.normal(n, d_v), draw.normal(d_v, d)
    path = stepped(lambda w: SGD([w], lr=eta, momentum=0.0), start, k, v)
    delta = layer_tuple("delta-net")
    layer = run(delta, {"k": k, "v": v, "beta": torch.full((n,), eta, dtype=torch.float64)}, weights=(start,))[0]
    ends = [stepped(lambda w: SGD([w], lr=eta, momentum=0.0), start + e, k[:1], v[:1])[0] for e in _basis(d_v, d)]
    moved = torch.stack(ends) - path[0]  # the step is affine, so that a difference of steps is its linear part
    total = moved[:d, 0]
    eye = torch.eye(d, dtype=torch.float64)

    def gate(update: StateUpdate) -> bool:
        """Whether the weights are gated by more than the identity."""
        return bool(gates(update.parts().monoid) - {"identity"})

    explicit = {name: gate(get(name, "data").update) for name in ("sgd", "adam", "adamw", "lion", "muon")}
    explicit["sgd with decay"] = gate(SGD.declare(decoupled=True))
    wanted = {"sgd": False, "adam": False, "adamw": True, "lion": True, "muon": True, "sgd with decay": True}
    adam = get("adam", "data").update.parts().step.via[0]
    assert isinstance(adam, StateUpdate)
    return (
        holds("SGD on the squared error against DeltaNet", gap(path, layer), 1e-12),
        holds("SGD's total transition against I - eta x x^T", gap(total, eye - eta * torch.outer(k[0], k[0])), 1e-12),
        breaks(
            "SGD's total transition: distance to the nearest scalar",
            float((total - total.trace() / d * eye).norm()),
            0.1,
        ),
        breaks("label of DeltaNet's total transition is not scalar (derived)", float(structure(delta) != "scalar"), 1),
        breaks("label Muon: none, against its scalar gate", float(explicit["muon"]), 1),
        holds("explicit gates, of 6, unlike the two columns", sum(explicit[x] != wanted[x] for x in wanted), 0),
        holds("Adam's buffer is not scalar-gated", float(gates(adam.parts().monoid) != {"scalar"}), 0),
    )


def _basis(rows: int, columns: int) -> Tensor:
    return torch.eye(rows * columns, dtype=torch.float64).reshape(-1, rows, columns)
