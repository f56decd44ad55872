"""Moneta, Yaad, Memora against loops written from the paper, with the gradients of the stated losses by autograd."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from axes.core import reference
from axes.core.algorithms import Anchor, Step
from axes.core.costs import Huber, Lp, SquaredError
from axes.core.geometry import Entropic, Lq
from axes.core.memory import MLP
from axes.core.monoids import Diagonal, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.routes import dispatch
from axes.sequence.features import Centred
from axes.sequence.miras import (
    MIRAS,
    Memora,
    MemoraLiteral,
    MemoraMatrix,
    Moneta,
    MonetaLiteral,
    MonetaMatrix,
    Yaad,
    YaadMatrix,
    YaadSwitch,
)

D, HEADS, B, T = 12, 2, 2, 37
Weights = list[Tensor]


# ---- the specification, leaf by leaf ---------------------------------------------------------------------------------


def cubic(e: Tensor, s: dict[str, Tensor]) -> Tensor:
    return e.abs().pow(3).sum()


def half_square(e: Tensor, s: dict[str, Tensor]) -> Tensor:
    return 0.5 * e.square().sum()


def huber(e: Tensor, s: dict[str, Tensor]) -> Tensor:
    delta = s["delta"]
    return torch.where(e.abs() <= delta, 0.5 * e * e, delta * (e.abs() - 0.5 * delta)).sum()


def switch(e: Tensor, s: dict[str, Tensor]) -> Tensor:
    """Eq. 16 as the gradient of whichever branch holds: l_2 inside, delta l_1 outside."""
    return 0.5 * e.square().sum() if e.norm() <= s["delta"] else s["delta"] * e.abs().sum()


def same(theta: Tensor) -> Tensor:
    return theta


def dual_norm(theta: Tensor) -> Tensor:
    """grad of |theta|_4^2 / 2, by autograd."""
    a = theta.detach().requires_grad_()
    return torch.autograd.grad(0.5 * a.abs().pow(4).sum().sqrt(), a)[0]


def printed(theta: Tensor) -> Tensor:
    return theta / theta.abs().pow(4).sum().sqrt()


def rows(theta: Tensor) -> Tensor:
    return math.sqrt(theta.shape[-1]) * torch.softmax(theta, -1)


def whole(theta: Tensor) -> Tensor:
    return torch.softmax(theta.flatten(), 0).reshape(theta.shape)


SPECIFICATION: dict[type, tuple[Callable, Callable]] = {
    Moneta: (cubic, dual_norm),
    MonetaMatrix: (cubic, dual_norm),
    MonetaLiteral: (cubic, printed),
    Yaad: (huber, same),
    YaadMatrix: (huber, same),
    YaadSwitch: (switch, same),
    Memora: (half_square, rows),
    MemoraMatrix: (half_square, rows),
    MemoraLiteral: (half_square, whole),
}


def predict(w: Weights, x: Tensor, s: dict[str, Tensor], eps: float) -> Tensor:
    if len(w) == 1:
        return w[0] @ x
    return x + layer_norm(w[0] @ gelu(w[1] @ x), x.shape, s["ln_gain"], s["ln_bias"], eps)


def by_leaf(rate: Tensor, leaves: int) -> Weights:
    """Channel-wise rates act on the rows of the first leaf and by their mean on the second."""
    if rate.ndim == 0:
        return [rate] * leaves
    return [rate[:, None], rate.mean()][:leaves]


def miras(cls: type, start: Weights, signal: dict[str, Tensor], every: int) -> Tensor:
    """theta = alpha theta - eta grad l at W `every` tokens apart; W = link(theta); y = M(W; q)."""
    loss, link = SPECIFICATION[cls]
    eps = getattr(cls.update.memory, "eps", 0.0)
    out = torch.zeros_like(signal["v"])
    for b in range(out.shape[0]):
        for h in range(out.shape[2]):
            theta = [leaf[h].detach() for leaf in start]
            for t in range(out.shape[1]):
                s = {n: x[b, t, h] for n, x in signal.items()}
                if t % every == 0:
                    anchor = [link(leaf).detach().requires_grad_() for leaf in theta]
                grads = torch.autograd.grad(loss(predict(anchor, s["k"], s, eps) - s["v"], s), anchor)
                kept, step = by_leaf(s["decay"].exp(), len(theta)), by_leaf(s["eta"], len(theta))
                theta = [a * x - e * g for a, x, e, g in zip(kept, theta, step, grads, strict=True)]
                out[b, t, h] = predict([link(leaf) for leaf in theta], s["q"], s, eps)
    return out


def perturbed(cls: type, **fields: object) -> torch.nn.Module:
    layer = cls(D, heads=HEADS, dtype=torch.float64, **fields)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return layer


def begun(layer: torch.nn.Module, signal: dict[str, Tensor]) -> Weights:
    """What the layer starts from: what it has learned, or zero."""
    if layer.initial is not None:
        return list(layer.initial)
    return [signal["v"][0, 0, :, :, None] * 0 * signal["k"][0, 0, :, None, :]]


def signal_of(layer: torch.nn.Module, x: Tensor) -> tuple[dict[str, Tensor], object]:
    signal, _, kept = layer.around.enter(x, layer.around.tails(x.shape[0], x))
    return {n: s.detach() for n, s in signal.items()}, kept


def at(update: StateUpdate, where: object) -> StateUpdate:
    return dataclasses.replace(update, algorithm=dataclasses.replace(update.algorithm, at=where))


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", MIRAS)
def test_layer_is_the_chunked_recurrence(cls) -> None:
    layer = perturbed(cls)
    x = torch.randn(B, T, D, dtype=torch.float64)
    signal, kept = signal_of(layer, x)
    expected = layer.around.leave(miras(cls, begun(layer, signal), signal, 16), kept)
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cls", MIRAS)
def test_with_the_gradient_at_the_previous_state(cls) -> None:
    """The paper's recurrence itself (eqs. 24, 26, 27), and the chunk of one token that equals it."""
    layer = perturbed(cls, update=at(cls.update, "prev"))
    x = torch.randn(1, 11, D, dtype=torch.float64)
    signal, kept = signal_of(layer, x)
    expected = layer.around.leave(miras(cls, begun(layer, signal), signal, 1), kept)
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-10)
    layer.update = at(cls.update, Anchor(1))
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cls", MIRAS)
def test_starts_in_the_calm(cls) -> None:
    """Neither random tokens nor one repeated token blow up outputs or outer gradients at initialisation."""
    layer = cls(32, heads=HEADS)
    for x in (torch.randn(1, 256, 32), torch.randn(1, 1, 32).expand(1, 256, 32)):
        layer.zero_grad()
        y = layer(x)[0]
        y.square().mean().backward()
        assert torch.isfinite(y).all()
        assert max(p.grad.abs().max() for p in layer.parameters()) < 100


def test_literal_operators_are_marked() -> None:
    assert {cls for cls in MIRAS if hasattr(cls, "named_operator")} == {MonetaLiteral, YaadSwitch}
    assert not MonetaLiteral.update.h.is_potential and not YaadSwitch.update.cost.is_gradient


# ---- claims ----------------------------------------------------------------------------------------------------------


def random_signal(t: int, d_v: int, d_k: int) -> dict[str, Tensor]:
    k, q, v = (torch.randn(1, t, 1, n, dtype=torch.float64) for n in (d_k, d_k, d_v))
    eta = 0.02 + 0.1 * torch.rand(1, t, 1, d_v, dtype=torch.float64)
    decay = torch.rand(1, t, 1, d_v, dtype=torch.float64).clamp_min(0.3).log()
    return {"k": k / k.norm(dim=-1, keepdim=True), "q": q, "v": v, "eta": eta, "decay": decay}


@pytest.mark.parametrize("cost", [SquaredError(), Lp(3.0), Huber(0.7), Huber(0.7, "norm")])
def test_explicit_mlp_gradients(cost) -> None:
    """C27: equal to autograd for every cost, and orthogonal to W1 where LN's eps vanishes."""
    memory = MLP(eps=1e-12)
    k, v = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    w = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((6, 24), (24, 6))]
    signal = {"ln_gain": torch.rand(6, dtype=torch.float64) + 0.5, "ln_bias": torch.randn(6, dtype=torch.float64)}
    expected = torch.autograd.grad(cost.value(predict(w, k, signal, 1e-12), v), w)
    p = memory.predict(tuple(w), k, signal)
    got = tuple(g.detach() for g in memory.vjp(tuple(w), k, cost.residual(p, v), signal))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert abs((got[0] * w[0].detach()).sum()) < 1e-9 * got[0].norm() * w[0].detach().norm()


@pytest.mark.parametrize("axis", ["row", "whole"])
def test_memora_is_the_softmax_of_a_linear_recursion(axis: str) -> None:
    """C36: log softmax differs from the dual state by a constant per slice, so (27) needs no logarithm of W."""
    signal = random_signal(30, 4, 6)
    if axis == "whole":
        signal |= {n: signal[n][..., 0] for n in ("eta", "decay")}
    monoid = Diagonal("decay", side="row") if axis == "row" else Scalar("decay")
    update = StateUpdate(SquaredError(), Entropic(axis), monoid, Step(Per("eta", "row" if axis == "row" else "scalar")))
    theta = torch.randn(4, 6, dtype=torch.float64)
    dims = -1 if axis == "row" else (-2, -1)

    def softmax(z: Tensor) -> Tensor:
        return z.exp() / z.exp().sum(dims, keepdim=True)

    w, outs = softmax(theta), []
    for t in range(30):
        k, v, q, eta, decay = (signal[n][0, t, 0] for n in ("k", "v", "q", "eta", "decay"))
        eta, alpha = (x[:, None] if x.ndim else x for x in (eta, decay.exp()))
        w = softmax(alpha * w.log() - eta * torch.outer(w @ k - v, k))
        outs.append(w @ q)
    got, _ = reference.run(update, signal, time=1, weights=(theta.expand(1, 1, 4, 6),))
    torch.testing.assert_close(got[0, :, 0], torch.stack(outs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cost", [SquaredError(), Lp(3.0)])
def test_chunk_as_matrix_products(cost) -> None:
    """C38: eqs. 28-29 with row gates, all residuals at the chunk's first state, as one masked product."""
    signal = random_signal(16, 5, 7)
    start = torch.randn(5, 7, dtype=torch.float64)
    update = StateUpdate(cost, monoid=Diagonal("decay", side="row"), algorithm=Step(Per("eta", "row"), at=Anchor(16)))
    out, state = dispatch.run(update, signal, weights=(start.expand(1, 1, 5, 7),))
    k, v, q, eta, decay = (signal[n][0, :, 0] for n in ("k", "v", "q", "eta", "decay"))
    e = k @ start.T - v
    r = e if isinstance(cost, SquaredError) else 3 * e.sign() * e.abs().pow(2)
    total, written = decay.cumsum(0), eta * r
    mask = torch.ones(16, 16, dtype=torch.bool).tril()[..., None]
    between = (total[:, None] - total[None]).masked_fill(~mask, -torch.inf).exp()
    y = total.exp() * (q @ start.T) - torch.einsum("tid,id,ti->td", between, written, q @ k.T)
    end = total[-1].exp()[:, None] * start - ((total[-1] - total).exp() * written).T @ k
    torch.testing.assert_close(out[0, :, 0], y, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.theta[0][0, 0], end, rtol=0, atol=1e-12)


def test_moneta_carries_the_dual_state_over_chunks() -> None:
    """C40: replacing theta by W at a chunk's end is another algorithm, wrong already at a chunk of one."""
    signal = random_signal(12, 5, 5)
    start = torch.randn(5, 5, dtype=torch.float64)
    update = StateUpdate(Lp(3.0), Lq(4.0), Diagonal("decay", side="row"), Step(Per("eta", "row"), at=Anchor(1)))
    carried, _ = dispatch.run(update, signal, weights=(start.expand(1, 1, 5, 5),))
    sequential, _ = reference.run(at(update, "prev"), signal, time=1, weights=(start.expand(1, 1, 5, 5),))
    torch.testing.assert_close(carried, sequential, rtol=0, atol=1e-12)
    theta, replaced = start, []
    for t in range(12):
        datum = {n: x[0, t, 0] for n, x in signal.items()}
        state, out = update.step(update.init(datum, (theta,)), datum)
        theta = out.weights[0]
        replaced.append(theta @ datum["q"])
    assert (torch.stack(replaced) - sequential[0, :, 0]).abs().max() > 0.1


def test_mlp_read_without_forming_the_weights() -> None:
    """C41: the dual form of both layers' reads equals the memory formed at every token."""
    signal = {n: x if x.shape[-1] != 6 or n in "kqv" else x[..., 0] for n, x in random_signal(16, 6, 6).items()}
    step = Step(Per("eta"), at=Anchor(16))
    update = StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=step, memory=MLP())
    start = tuple(torch.randn(s, dtype=torch.float64) / 3 for s in ((6, 24), (24, 6)))
    out, state = dispatch.run(update, signal, weights=tuple(w.expand(1, 1, *w.shape) for w in start))
    k, v, q, eta, decay = (signal[n][0, :, 0] for n in ("k", "v", "q", "eta", "decay"))
    z = (k @ start[1].T).requires_grad_()
    hidden = gelu(z)
    u = hidden @ start[0].T
    u.retain_grad()
    (0.5 * (k + layer_norm(u, (6,), eps=1e-6) - v).square().sum()).backward()
    total = decay.cumsum(0)
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    weight = (total[:, None] - total[None]).masked_fill(~mask, -torch.inf).exp() * eta
    kept = total.exp()[:, None]
    h = gelu(kept * (q @ start[1].T) - (weight * (q @ k.T)) @ z.grad)
    read = kept * (h @ start[0].T) - (weight * (h @ hidden.T)) @ u.grad
    torch.testing.assert_close(out[0, :, 0], (q + layer_norm(read, (6,), eps=1e-6)).detach(), rtol=0, atol=1e-10)
    end = kept[-1] * start[1] - (weight[-1][:, None] * z.grad).T @ k
    torch.testing.assert_close(state.theta[1][0, 0], end, rtol=0, atol=1e-11)


def test_strong_gates_stay_finite() -> None:
    """C43: alpha = 0.05 over 64 tokens in float32, where a ratio of cumulative products is 0 / 0."""
    signal = {n: x.float() for n, x in random_signal(64, 5, 7).items()}
    signal["decay"] = torch.full_like(signal["decay"], 0.05).log()
    signal = {n: x.requires_grad_() for n, x in signal.items()}
    step = Step(Per("eta", "row"), at=Anchor(64))
    update = StateUpdate(SquaredError(), monoid=Diagonal("decay", side="row"), algorithm=step)
    out, _ = dispatch.run(update, signal)
    out.square().sum().backward()
    assert torch.isfinite(out).all() and all(torch.isfinite(x.grad).all() for x in signal.values())
    exact, _ = reference.run(update, {n: x.detach().double() for n, x in signal.items()}, time=1)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [4.0, 3.0, 2.0, 1.5])
def test_step_is_the_argmin(p: float) -> None:
    """C47: with row-wise eta and gate, W minimises <eta grad, W> + D_h(W, W^-), W^- = grad h*(alpha theta)."""
    s = p / (p - 1)
    datum = {n: x[0, 0, 0] for n, x in random_signal(1, 5, 4).items()}
    theta = torch.randn(5, 4, dtype=torch.float64)
    update = StateUpdate(Lp(3.0), Lq(p), Diagonal("decay", side="row"), Step(Per("eta", "row")))

    def norm(w: Tensor, r: float) -> Tensor:
        return 0.5 * w.abs().pow(r).sum().pow(2 / r)

    def link(a: Tensor) -> Tensor:
        a = a.detach().requires_grad_()
        return torch.autograd.grad(norm(a, p), a)[0]

    before = link(theta).requires_grad_()
    g = torch.autograd.grad((before @ datum["k"] - datum["v"]).abs().pow(3).sum(), before)[0]
    kept = link(datum["decay"].exp()[:, None] * theta).requires_grad_()
    slope = torch.autograd.grad(norm(kept, s), kept)[0]

    def objective(w: Tensor) -> Tensor:
        return (datum["eta"][:, None] * g * w).sum() + norm(w, s) - norm(kept, s) - (slope * (w - kept)).sum()

    w = update.step(update.init(datum, (theta,)), datum)[1].weights[0].requires_grad_()
    best = objective(w)
    assert torch.autograd.grad(best, w)[0].abs().max() < 1e-12
    for size in (1e-3, 0.1, 1.0):
        for _ in range(50):
            assert objective(w + size * torch.randn_like(w)) > best


def test_pre_norm_signal_of_the_simplex() -> None:
    """C37: one simplex of mass 1 leaves LN a variance far below its usual eps; rows of mass sqrt(n) a healthy one."""
    d, x = 64, torch.nn.functional.normalize(torch.randn(64, dtype=torch.float64), dim=0)
    theta = [torch.randn(s, dtype=torch.float64) for s in ((d, 4 * d), (4 * d, d))]
    variance = {}
    for h in (Entropic("whole"), Entropic("row", None)):
        w1, w2 = (h.primal(leaf) for leaf in theta)
        variance[h.axis] = float((w1 @ gelu(w2 @ x)).var())
    assert variance["whole"] < 1e-12 and variance["row"] > 1e-3
    assert MemoraLiteral.update.memory.eps > 1e6 * variance["whole"]  # silent, as the printed form is


def test_an_even_memory_reads_nothing_of_centred_queries() -> None:
    """A row of one sum, spread evenly, reads c mean(q): nothing of a query less its mean, something of another."""
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = []
    for features in (Centred(), None):
        block = dataclasses.replace(MemoraMatrix.block, feature_map=features)
        layer = MemoraMatrix(16, heads=2, block=block, dtype=torch.float64)
        signal = layer.around.enter(x, layer.around.tails(2, x))[0]
        assert torch.allclose(signal["k"].norm(dim=-1), torch.ones((), dtype=torch.float64))
        sums.append(max(float(signal[name].detach().sum(-1).abs().max()) for name in "qk"))
    assert sums[0] < 1e-12 < 1e-2 < sums[1]
