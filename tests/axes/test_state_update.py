"""Tuples against the formulas of their papers, written out; sugar, equality, demands, dtypes, second derivatives."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from systems import DATA, KEYED, SYSTEMS, second_moment
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, normalize, scaled_dot_product_attention

from axes.core import costs, geometry, memory, monoids, reference
from axes.core.algorithms import Anchor, Momentum, Read, Step, Sum
from axes.core.costs import Alignment, Cost, Given, Huber, Linear, Lp, Ridge, SquaredError
from axes.core.geometry import Entropic, Euclidean, Lq, SignBall, Spectral, Sphere, Whiten
from axes.core.memory import MLP, Entries, LayerNormMatrix, List, Slots
from axes.core.monoids import DPLR, Decay, Diagonal, Hadamard, Householder, Identity, Product, Rotation, Scalar, Zero
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, State, StateUpdate
from axes.errors import IllegalUpdate
from axes.testing import checks, examples

B, T, D_K, D_V = 2, 9, 4, 5
BETA = Per("beta")
# Measured over all systems: 5e-14.
EXACT = 1e-11


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(d_v: int = D_V) -> dict[str, Tensor]:
    """One random sequence, with every name that a formula below reads."""
    return {
        "k": normalize(draw(0, B, T, D_K), dim=-1),
        "v": draw(1, B, T, d_v),
        "q": draw(2, B, T, D_K),
        "beta": torch.sigmoid(draw(3, B, T)),
        "row_beta": torch.sigmoid(draw(4, B, T, d_v)),
        "decay": -draw(5, B, T).abs(),
        "key_decay": -draw(6, B, T, D_K).abs(),
        "row_decay": -draw(7, B, T, d_v).abs(),
        "square_decay": -draw(8, B, T, d_v, D_K).abs(),
        "mu": -draw(9, B, T).abs(),
        "a": 0.3 * draw(10, B, T, D_K),
        "b": 0.3 * draw(11, B, T, D_K),
        "w": normalize(draw(12, B, T, D_K), dim=-1),
        "angle": draw(13, B, T, D_K // 2),
        "ln_gain": 1 + 0.1 * draw(14, B, T, d_v),
        "ln_bias": 0.1 * draw(15, B, T, d_v),
    }


Recurrence = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def mv(m: Tensor, x: Tensor) -> Tensor:
    return (m @ x[..., None])[..., 0]


def scalar(x: Tensor) -> Tensor:
    return x[..., None, None]


def recur(step: Recurrence, start: Tensor | None = None) -> Tensor:
    """Outputs S_t q_t of a recurrence on one matrix."""
    signal = data()
    s = torch.zeros(B, D_V, D_K, dtype=torch.float64) if start is None else start
    outputs = []
    for t in range(T):
        datum = {name: x[:, t] for name, x in signal.items()}
        s = step(s, datum)
        outputs.append(mv(s, datum["q"]))
    return torch.stack(outputs, 1)


def delta(s: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    return mv(s, x["k"]) - x["v"]


# name: (tuple, the paper's recurrence)
FORMULAS: dict[str, tuple[StateUpdate, Recurrence]] = {
    "linear attention": (StateUpdate(Alignment()), lambda s, x: s + outer(x["v"], x["k"])),
    "retnet": (StateUpdate(Alignment(), monoid=Scalar(0.9)), lambda s, x: 0.9 * s + outer(x["v"], x["k"])),
    "mamba-2": (
        StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA)),
        lambda s, x: scalar(x["decay"].exp()) * s + scalar(x["beta"]) * outer(x["v"], x["k"]),
    ),
    "gla": (
        StateUpdate(Alignment(), monoid=Diagonal("key_decay")),
        lambda s, x: s @ torch.diag_embed(x["key_decay"].exp()) + outer(x["v"], x["k"]),
    ),
    "mamba-1": (
        StateUpdate(Alignment(), monoid=Hadamard("square_decay"), algorithm=Step(Per("row_beta", "row"))),
        lambda s, x: x["square_decay"].exp() * s + outer(x["row_beta"] * x["v"], x["k"]),
    ),
    "deltanet": (
        StateUpdate(SquaredError(), algorithm=Step(BETA)),
        lambda s, x: s - scalar(x["beta"]) * outer(delta(s, x), x["k"]),
    ),
    "gated deltanet": (
        StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="gated")),
        lambda s, x: (
            scalar(x["decay"].exp()) * s @ (torch.eye(D_K) - scalar(x["beta"]) * outer(x["k"], x["k"]))
            + scalar(x["beta"]) * outer(x["v"], x["k"])
        ),
    ),
    "gradient, then gate": (
        StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA)),
        lambda s, x: scalar(x["decay"].exp()) * s - scalar(x["beta"]) * outer(delta(s, x), x["k"]),
    ),
    "kimi delta attention": (
        StateUpdate(SquaredError(), monoid=Diagonal("key_decay"), algorithm=Step(BETA, at="gated")),
        lambda s, x: (
            s @ torch.diag_embed(x["key_decay"].exp()) @ (torch.eye(D_K) - scalar(x["beta"]) * outer(x["k"], x["k"]))
            + scalar(x["beta"]) * outer(x["v"], x["k"])
        ),
    ),
    "rwkv-7": (
        StateUpdate(Alignment(), monoid=DPLR("key_decay")),
        lambda s, x: s @ (torch.diag_embed(x["key_decay"].exp()) + outer(x["a"], x["b"])) + outer(x["v"], x["k"]),
    ),
    "deltaproduct": (
        StateUpdate(SquaredError(), monoid=Householder(BETA), algorithm=Step(BETA, at="gated")),
        lambda s, x: (
            s
            @ (torch.eye(D_K) - scalar(x["beta"]) * outer(x["w"], x["w"]))
            @ (torch.eye(D_K) - scalar(x["beta"]) * outer(x["k"], x["k"]))
            + scalar(x["beta"]) * outer(x["v"], x["k"])
        ),
    ),
    "longhorn": (
        StateUpdate(SquaredError(), algorithm=Step(Per("row_beta", "row"), at="new")),
        lambda s, x: longhorn_rows(s, x),
    ),
    "longhorn, diagonal": (
        StateUpdate(SquaredError(), algorithm=Step(Per("row_beta", "row"), at="new"), memory=Entries()),
        lambda s, x: (1 - outer(longhorn_step(x), x["k"] ** 2)) * s + outer(longhorn_step(x) * x["v"], x["k"]),
    ),
    "ridge": (
        StateUpdate(Ridge(SquaredError(), 0.3), monoid=Scalar("decay"), algorithm=Step(BETA)),
        lambda s, x: scalar(x["decay"].exp()) * s - scalar(x["beta"]) * (outer(delta(s, x), x["k"]) + 0.3 * s),
    ),
    "huber": (
        StateUpdate(Huber(0.5), monoid=Scalar("decay"), algorithm=Step(BETA)),
        lambda s, x: scalar(x["decay"].exp()) * s - scalar(x["beta"]) * outer(delta(s, x).clamp(-0.5, 0.5), x["k"]),
    ),
    "l_3": (
        StateUpdate(Lp(3.0, smooth=None), monoid=Scalar("decay"), algorithm=Step(0.1)),
        lambda s, x: scalar(x["decay"].exp()) * s - 0.3 * outer(delta(s, x).sign() * delta(s, x).abs() ** 2, x["k"]),
    ),
    "rotation": (
        StateUpdate(Alignment(), monoid=Rotation(Per("angle", "pair", "real"))),
        lambda s, x: s @ monoids.rotation_matrix(x["angle"]) + outer(x["v"], x["k"]),
    ),
}


def longhorn_step(x: Mapping[str, Tensor]) -> Tensor:
    """Longhorn, algorithm 1: Delta = beta / (1 + beta k^T k)."""
    return x["row_beta"] / (1 + x["row_beta"] * x["k"].square().sum(-1, keepdim=True))


def longhorn_rows(s: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    """argmin |S - S'|^2 + |S k - v|^2_beta row by row: (I + beta_i k k^T) s_i = s'_i + beta_i v_i k."""
    eye = torch.eye(D_K, dtype=torch.float64)
    system = eye + x["row_beta"][..., None, None] * outer(x["k"], x["k"])[:, None]
    right = s + (x["row_beta"] * x["v"])[..., None] * x["k"][:, None, :]
    return torch.linalg.solve(system, right)


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        update, formula = FORMULAS[name]
        y, _ = reference.run(update, data(), time=1)
        assert checks.error(y, recur(formula)) < EXACT
    finally:
        torch.set_default_dtype(torch.float32)


def test_normalised_linear_attention() -> None:
    """sum_i v_i <k_i, q> / sum_i <k_i, q>, with positive features."""
    x = data()
    x["k"], x["q"] = x["k"].exp(), x["q"].exp()
    y, _ = reference.run(StateUpdate(Alignment(), algorithm=Step(debias=True)), x, time=1)
    weights = (x["q"] @ x["k"].mT).tril()
    assert checks.error(y, weights @ x["v"] / weights.sum(-1, keepdim=True)) < EXACT


def test_the_two_orders_of_gate_and_delta_differ_by_the_stated_gap() -> None:
    """eta (1 - alpha) W' k k^T: gated minus gradient-first, after one step from the same W'."""
    x = {n: t[:, 0] for n, t in data().items()}
    w = draw(20, B, D_V, D_K)
    states = []
    for at in ("gated", "prev"):
        update = StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at=at))  # type: ignore[arg-type]
        states.append(update.step(update.init(x, (w,)), x)[0].theta[0])
    alpha, eta = scalar(x["decay"].exp()), scalar(x["beta"])
    gap = eta * (1 - alpha) * (w @ outer(x["k"], x["k"]))
    assert float((states[0] - states[1] - gap).abs().max()) < 1e-14


def test_deltanet_is_also_an_alignment_under_a_low_rank_transition() -> None:
    """Tuples are not unique: (squared error, identity) = (alignment, I - beta k k^T)."""
    x = {**data(), "w": data()["k"]}
    y, _ = reference.run(StateUpdate(SquaredError(), algorithm=Step(BETA)), x, time=1)
    other, _ = reference.run(StateUpdate(Alignment(), monoid=Householder(BETA), algorithm=Step(BETA)), x, time=1)
    assert checks.error(other, y) < 1e-13


def test_titans() -> None:
    """M = alpha M + S, S = eta S - theta grad."""
    x, m = data(), torch.zeros(B, D_V, D_K, dtype=torch.float64)
    s, outputs = torch.zeros_like(m), []
    for t in range(T):
        d = {n: z[:, t] for n, z in x.items()}
        s = scalar(d["mu"].exp()) * s - scalar(d["beta"]) * outer(delta(m, d), d["k"])
        m = scalar(d["decay"].exp()) * m + s
        outputs.append(mv(m, d["q"]))
    y, _ = reference.run(KEYED["titans"], x, time=1)
    assert checks.error(y, torch.stack(outputs, 1)) < EXACT


@pytest.mark.parametrize("every", [1, 4])
def test_ttt_linear(every: int) -> None:
    """f(x) = x + LN(W x), gradient by autograd at the start of the mini-batch."""
    x, w = data(D_K), torch.zeros(B, D_K, D_K, dtype=torch.float64)
    outputs, anchor = [], w

    def forward(w: Tensor, z: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        return z + d["ln_gain"] * layer_norm(mv(w, z), (D_K,), eps=1e-6) + d["ln_bias"]

    for t in range(T):
        d = {n: z[:, t] for n, z in x.items()}
        anchor = w.detach().clone().requires_grad_() if t % every == 0 else anchor
        loss = (forward(anchor, d["k"], d) - d["v"]).square().sum() / 2
        w = w - scalar(d["beta"]) * torch.autograd.grad(loss, anchor)[0]
        outputs.append(forward(w, d["q"], d))
    at = "prev" if every == 1 else Anchor(every)
    update = StateUpdate(SquaredError(), algorithm=Step(BETA, at=at), memory=LayerNormMatrix())  # type: ignore[arg-type]
    y, _ = reference.run(update, x, time=1)
    assert checks.error(y, torch.stack(outputs, 1)) < EXACT


def test_ttt_mlp_with_titans_momentum() -> None:
    """Two-layer memory with momentum and forgetting, gradients by autograd at every token."""
    x, update = (
        data(D_K),
        StateUpdate(
            SquaredError(),
            monoid=Scalar("decay"),
            algorithm=Step(via=(StateUpdate(Linear(), monoid=Scalar("mu"), algorithm=Step(BETA)),)),
            memory=MLP(2),
        ),
    )
    first = {n: z[:, 0] for n, z in x.items()}
    weights = update.init(first).theta
    buffers, outputs = tuple(torch.zeros_like(w) for w in weights), []

    def forward(w: tuple[Tensor, ...], z: Tensor, d: Mapping[str, Tensor]) -> Tensor:
        return z + d["ln_gain"] * layer_norm(mv(w[0], gelu(mv(w[1], z))), (D_K,), eps=1e-6) + d["ln_bias"]

    for t in range(T):
        d = {n: z[:, t] for n, z in x.items()}
        live = tuple(w.detach().clone().requires_grad_() for w in weights)
        loss = (forward(live, d["k"], d) - d["v"]).square().sum() / 2
        grads = torch.autograd.grad(loss, live)
        buffers = tuple(scalar(d["mu"].exp()) * b - scalar(d["beta"]) * g for b, g in zip(buffers, grads, strict=True))
        weights = tuple(scalar(d["decay"].exp()) * w + b for w, b in zip(weights, buffers, strict=True))
        outputs.append(forward(weights, d["q"], d))
    y, _ = reference.run(update, x, time=1)
    assert checks.error(y, torch.stack(outputs, 1)) < EXACT


def anchored(
    primal: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], gate: str, rate: str, every: int
) -> Tensor:
    """theta = gate theta - rate grad l(W at the start of the chunk), W = primal(theta)."""
    x, theta, outputs = data(), torch.zeros(B, D_V, D_K, dtype=torch.float64), []
    anchor = primal(theta)
    for t in range(T):
        d = {n: z[:, t] for n, z in x.items()}
        anchor = primal(theta) if t % every == 0 else anchor
        g, r = d[gate].exp(), d[rate]
        g, r = (z[..., None] if z.ndim == 2 else scalar(z) for z in (g, r))
        theta = g * theta - r * outer(slope(delta(anchor, d)), d["k"])
        outputs.append(mv(primal(theta), d["q"]))
    return torch.stack(outputs, 1)


def test_memora_moneta_yaad() -> None:
    """Miras: softmax rows of mass sqrt(d_k); the l_4 link; Huber; each with a frozen chunk."""
    for name, expected in (
        ("memora", anchored(lambda w: 2 * w.softmax(-1), lambda e: e, "row_decay", "row_beta", 4)),
        (
            "moneta",
            anchored(
                lambda w: w.sign() * w.abs() ** 3 / (w**4).sum((-2, -1), keepdim=True).clamp_min(1e-300) ** 0.5,
                lambda e: 3 * e.sign() * e**2,
                "decay",
                "beta",
                3,
            ),
        ),
    ):
        y, _ = reference.run(KEYED[name], data(), time=1)
        assert checks.error(y, expected) < EXACT, name
    update = StateUpdate(Huber(0.7), monoid=Scalar("decay"), algorithm=Step(BETA, at=Anchor(4)))
    y, _ = reference.run(update, data(), time=1)
    assert checks.error(y, anchored(lambda w: w, lambda e: e.clamp(-0.7, 0.7), "decay", "beta", 4)) < EXACT


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("rule", ["dec", "enc", "sim"])
def test_lattice(rule: str, normalised: bool) -> None:
    """Slots s_i: gradient through their directions by autograd, then renormalised or not (lattice.md section 2)."""
    x, outputs = data(), []
    s = torch.eye(D_V, dtype=torch.float64)[:, :D_K].expand(B, D_V, D_K)
    for t in range(T):
        d = {n: z[:, t] for n, z in x.items()}
        live = s.detach().clone().requires_grad_()
        phi = live / live.norm(dim=-2, keepdim=True)
        loss = {
            "dec": (mv(phi, d["k"]) - d["v"]).square().sum() / 2,
            "enc": (mv(phi.mT, d["v"]) - d["k"]).square().sum() / 2,
            "sim": -(mv(phi, d["k"]) * d["v"]).sum(),
        }[rule]
        s = scalar(d["decay"].exp()) * s - scalar(d["beta"]) * torch.autograd.grad(loss, live)[0]
        s = s / s.norm(dim=-2, keepdim=True) if normalised else s
        outputs.append(mv(s, d["q"]))
    cost = {"dec": SquaredError(), "enc": SquaredError(encode=True), "sim": Alignment()}[rule]
    h = Sphere("columns") if normalised else Euclidean()
    update = StateUpdate(cost, h, Scalar("decay"), Step(BETA, lazy=not normalised), memory=Slots())
    y, _ = reference.run(update, x, time=1)
    assert checks.error(y, torch.stack(outputs, 1)) < EXACT


def test_attention_with_its_position_encodings() -> None:
    """Softmax, ALiBi, FoX, RoPE and PaTH against scores written out."""
    x = data()
    q, k, v = x["q"], x["k"], x["v"]
    y, _ = reference.run(KEYED["softmax"], x, time=1)
    assert checks.error(y, scaled_dot_product_attention(q, k, v, is_causal=True)) < EXACT

    total = x["decay"].cumsum(-1)
    position = torch.arange(T, dtype=torch.float64)
    causal = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)
    for name, bias in (
        ("alibi", math.log(0.9) * (position[:, None] - position)),
        ("fox", total[:, :, None] - total[:, None, :]),
    ):
        value = v * x["beta"][..., None] if name == "fox" else v
        expected = scaled_dot_product_attention(q, k, value, attn_mask=bias + causal)
        assert checks.error(reference.run(KEYED[name], x, time=1)[0], expected) < EXACT, name

    turn = position[:, None] * 10000.0 ** (-torch.arange(0, D_K, 2, dtype=torch.float64) / D_K)
    turned = [monoids.rotate(z, -turn) for z in (q, k)]
    expected = scaled_dot_product_attention(*turned, v, is_causal=True)
    assert checks.error(reference.run(KEYED["rope"], x, time=1)[0], expected) < EXACT

    scores = torch.full((B, T, T), -torch.inf, dtype=torch.float64)
    eye = torch.eye(D_K, dtype=torch.float64)
    for t in range(T):
        carried = eye.expand(B, D_K, D_K)
        for i in range(t, -1, -1):  # k_i A_{i+1} ... A_t q_t
            scores[:, t, i] = (k[:, i] * mv(carried, q[:, t])).sum(-1)
            carried = (eye - scalar(x["beta"][:, i]) * outer(x["w"][:, i], x["w"][:, i])) @ carried
    expected = (scores / math.sqrt(D_K)).softmax(-1) @ v
    assert checks.error(reference.run(KEYED["path"], x, time=1)[0], expected) < EXACT


def test_recursive_least_squares() -> None:
    """Whitening by the Gram matrix of the keys: W_t = (sum v k^T) (sum k k^T + eps)^-1, the ridge regression."""
    x, outputs = data(), []
    for t in range(T):
        k, v = x["k"][:, : t + 1], x["v"][:, : t + 1]
        gram = k.mT @ k + 0.5 * torch.eye(D_K, dtype=torch.float64)
        outputs.append(mv(torch.linalg.solve(gram, k.mT @ v).mT, x["q"][:, t]))
    assert checks.error(reference.run(KEYED["rls"], x, time=1)[0], torch.stack(outputs, 1)) < EXACT


def test_lazy_and_agile_are_two_algorithms() -> None:
    """ISTA thresholds W at every step, soft-threshold FTRL thresholds a dual state that remembers."""

    def shrink(s: Tensor) -> Tensor:
        return s.sign() * (s.abs() - 0.05).clamp_min(0)

    x = data()
    for lazy in (True, False):
        stored, outputs = torch.zeros(B, D_V, D_K, dtype=torch.float64), []
        for t in range(T):
            d = {n: z[:, t] for n, z in x.items()}
            w = shrink(stored) if lazy else stored
            stored = scalar(d["decay"].exp()) * stored - scalar(d["beta"]) * outer(delta(w, d), d["k"])
            stored = stored if lazy else shrink(stored)
            outputs.append(mv(shrink(stored) if lazy else stored, d["q"]))
        y, _ = reference.run(KEYED["soft-threshold ftrl" if lazy else "ista"], x, time=1)
        assert checks.error(y, torch.stack(outputs, 1)) < EXACT


@pytest.mark.parametrize(
    ("h", "cost"),
    [
        (Entropic("row"), SquaredError()),
        (Lq(3.0), SquaredError()),
        (Lq(4.0), Huber(0.5)),
        (Entropic("whole"), Huber(0.5, "norm")),
        (Euclidean(), Huber(0.5)),
        (Euclidean(), Lp(3.0)),
    ],
    ids=repr,
)
def test_the_implicit_step_is_stationary(h: geometry.Geometry, cost: Cost) -> None:
    """theta_t = A theta - eta grad l(grad h*(theta_t)): the optimality condition, with autograd's gradient."""
    update = StateUpdate(cost, h, Scalar("decay"), Step(BETA, at="new"))
    x = {n: z[:, 0] for n, z in data().items()}
    start = draw(30, B, D_V, D_K)
    new, out = update.step(update.init(x, (start,)), x)
    w = h.primal(new.theta[0]).detach().requires_grad_()
    slope = torch.autograd.grad(cost.value(mv(w, x["k"]), x["v"]).sum(), w)[0]
    residual = new.theta[0] - scalar(x["decay"].exp()) * start + scalar(x["beta"]) * slope
    assert float(residual.abs().max()) < 1e-10  # measured 3e-15
    assert torch.equal(out.weights[0], w.detach())


def test_two_averages_side_by_side() -> None:
    """A Sum of two EMAs: 2 m_1 + 0.5 m_2, each with its own beta."""
    branches = tuple(StateUpdate(Linear(), monoid=Scalar(b), algorithm=Step(1 - b)) for b in (0.9, 0.99))
    update = StateUpdate(Given(), algorithm=Step(0.1, via=(Sum(branches, (2.0, 0.5)),)))
    w, first, second = draw(40, 3, 2), torch.zeros(3, 2).double(), torch.zeros(3, 2).double()
    state = update.init({"g": w}, (w,))
    for t in range(8):
        g = draw(50 + t, 3, 2)
        state, _ = update.step(state, {"g": g})
        first, second = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g
        w = w - 0.1 * (2 * first + 0.5 * second)
    assert float((state.theta[0] - w).abs().max()) < 1e-14


# ---- updates of a parameter --------------------------------------------------------------------------------------


def follow(update: StateUpdate, optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], **rates: float) -> float:
    """Largest difference over 40 steps on the same quadratic."""
    curvature, start = draw(60, 6, 4).abs() + 0.1, draw(61, 6, 4)
    theirs = start.clone().requires_grad_()
    opt, state, worst = optimizer([theirs]), update.init({"g": start}, (start,)), 0.0
    for t in range(40):
        noise = 0.1 * draw(100 + t, 6, 4)
        theirs.grad = curvature * theirs.detach() + noise
        opt.step()
        g = curvature * state.theta[0] + noise
        state, _ = update.step(state, {"g": g, **rates})
        worst = max(worst, float((state.theta[0] - theirs.detach()).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("update", "optimizer", "tolerance"),
    [
        (DATA["sgd"], lambda p: torch.optim.SGD(p, lr=0.1), 1e-15),
        (
            StateUpdate(Given(), algorithm=Step(0.1, via=(Momentum(0.9, "sum"),))),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            1e-14,
        ),
        (
            DATA["dampened from the first"],
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.9),
            1e-14,
        ),
        (
            DATA["nesterov, coupled decay"],
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
            1e-14,
        ),
        (
            StateUpdate(
                Given(),
                monoid=Decay(0.01),
                algorithm=Step(
                    0.1,
                    via=(
                        StateUpdate(Linear(), Whiten((second_moment(0.95),)), Scalar(0.9), Step(1 - 0.9, debias=True)),
                    ),
                ),
            ),
            lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01),
            1e-13,
        ),
        (
            StateUpdate(
                Ridge(Given(), 0.02),
                algorithm=Step(
                    0.1,
                    via=(
                        StateUpdate(Linear(), Whiten((second_moment(0.95),)), Scalar(0.9), Step(1 - 0.9, debias=True)),
                    ),
                ),
            ),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.02),
            1e-12,
        ),
        (
            StateUpdate(
                Given(),
                algorithm=Step(
                    0.1,
                    via=(StateUpdate(Linear(), Whiten((second_moment(0.9, debias=False),)), Zero()),),
                ),
            ),
            lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, eps=1e-8),
            1e-13,
        ),
        (
            StateUpdate(
                Given(),
                algorithm=Step(
                    0.1,
                    via=(StateUpdate(Linear(), Whiten((StateUpdate(Linear("square")),), eps=1e-10), Zero()),),
                ),
            ),
            lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10),
            1e-13,
        ),
    ],
    ids=["sgd", "momentum", "dampening", "nesterov", "adamw", "adam", "rmsprop", "adagrad"],
)
def test_torch_optim(
    update: StateUpdate, optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], tolerance: float
) -> None:
    assert follow(update, optimizer) <= tolerance


def test_muon_direction() -> None:
    """Orthogonalised Nesterov average, decoupled decay: torch.optim.Muon's formula with the polynomial written out."""
    w, m = draw(70, 6, 4), torch.zeros(6, 4, dtype=torch.float64)
    update, state = DATA["muon"], DATA["muon"].init({"g": w}, (w,))
    for t in range(12):
        g = draw(80 + t, 6, 4)
        state, _ = update.step(state, {"g": g})
        m = 0.95 * m + 0.05 * g
        x = (0.05 * g + 0.95 * m).mT
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        w = (1 - 0.1 * 0.1) * w - 0.1 * x.mT
        assert float((state.theta[0] - w).abs().max()) < 1e-11  # measured 1e-13


def test_lion() -> None:
    """sign(beta_1 m + (1 - beta_1) g), then m = beta_2 m + (1 - beta_2) g."""
    w, m = draw(90, 6, 4), torch.zeros(6, 4, dtype=torch.float64)
    update, state = DATA["lion"], DATA["lion"].init({"g": w}, (w,))
    for t in range(40):
        g = draw(100 + t, 6, 4) + 0.1 * state.theta[0]
        state, _ = update.step(state, {"g": g})
        w = (1 - 0.1 * 0.1) * w - 0.1 * (0.9 * m + 0.1 * g).sign()
        m = 0.99 * m + 0.01 * g
    assert float((state.theta[0] - w).abs().max()) < 1e-14


# ---- the value ---------------------------------------------------------------------------------------------------


PARTS: list[object] = [
    *{type(part): part for update in SYSTEMS.values() for part in examples.every_part(update)}.values(),
    costs.Alignment(),
    Anchor(3),
    Read(0.5, 1.0),
    Momentum(0.9, "sum", nesterov=True),
    OnUpdate(SignBall()),
    Per("beta", "row", "real"),
    Identity(),
    Product((Scalar(0.5), Diagonal("g"))),
    *SYSTEMS.values(),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_parts_are_values(part: object) -> None:
    """Equality, hash, pickle, deepcopy, and a repr that is the declaration."""
    for again in (pickle.loads(pickle.dumps(part)), copy.deepcopy(part), eval(repr(part), dict(checks.NAMES))):
        assert again == part and hash(again) == hash(part) and repr(again) == repr(part)
    assert part != "something else"
    with pytest.raises(dataclasses.FrozenInstanceError):
        part.anything = 1  # type: ignore[attr-defined]


def test_repr_names_what_was_declared_and_nothing_else() -> None:
    update = StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Momentum(0.9, "ema"))
    expected = (
        "StateUpdate(cost=SquaredError(), monoid=Scalar(gate=Per(name='decay', domain='unit')), "
        "algorithm=Momentum(beta=0.9, kind='ema'))"
    )
    assert repr(update) == expected
    assert repr(StateUpdate(Given(), memory=memory.Parameter())) == "StateUpdate(cost=Given())"
    assert repr(StateUpdate(SquaredError(), memory=Slots())) == "StateUpdate(cost=SquaredError(), memory=Slots())"
    assert repr(Lp(3.0)) == "Lp(p=3.0)" and repr(Lp(3.0, (5.0, 0.1))) == "Lp(p=3.0, smooth=(5.0, 0.1))"
    assert repr(Step(1.0, steps=True)) == "Step(steps=True)"  # another type is not the default


SUGAR = [
    (
        StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Momentum(0.9, "ema", rate=0.5, at="gated")),
        StateUpdate(
            SquaredError(),
            monoid=Scalar("decay"),
            algorithm=Step(0.5, at="gated", via=(StateUpdate(Linear(), monoid=Scalar(0.9), algorithm=Step(1 - 0.9)),)),
        ),
    ),
    (
        StateUpdate(SquaredError(), OnUpdate(SignBall()), Scalar("decay"), Step(BETA)),
        StateUpdate(
            SquaredError(),
            monoid=Scalar("decay"),
            algorithm=Step(BETA, via=(StateUpdate(Linear(), SignBall(), Zero()),)),
        ),
    ),
    (
        StateUpdate(Given(), OnUpdate(Spectral()), algorithm=Step(0.1, via=(Momentum(0.95, "ema", nesterov=True),))),
        StateUpdate(
            Given(),
            algorithm=Step(
                0.1,
                via=(
                    StateUpdate(
                        Linear(),
                        Spectral(),
                        Scalar(0.95),
                        Step(1 - 0.95, read=Read(0.95 * 0.95, (1 - 0.95) + 0.95 * (1 - 0.95))),
                    ),
                ),
            ),
        ),
    ),
    (
        StateUpdate(Given(), algorithm=Step(0.1, via=(Momentum(0.9, "sum", nesterov=True),))),
        StateUpdate(
            Given(),
            algorithm=Step(
                0.1, via=(StateUpdate(Linear(), monoid=Scalar(0.9), algorithm=Step(read=Read(0.9 * 0.9, 1.9))),)
            ),
        ),
    ),
    (
        StateUpdate(Alignment(), monoid=Product((Identity(), Product((Scalar(1.0), Diagonal("gate")))))),
        StateUpdate(Alignment(), monoid=Diagonal("gate")),
    ),
    (StateUpdate(Alignment(), monoid=Scalar(0.0)), StateUpdate(Alignment(), monoid=Zero())),
]


@pytest.mark.parametrize(("sugar", "plain"), SUGAR, ids=range(len(SUGAR)))
def test_sugar_is_its_normal_form(sugar: StateUpdate, plain: StateUpdate) -> None:
    """Equal, of equal hash, and the same numbers bit for bit; the normal form is its own."""
    assert sugar == plain and hash(sugar) == hash(plain) and sugar.normal() == plain.normal()
    assert plain.normal() is plain and sugar.normal().normal() is sugar.normal() and sugar.normal() is not sugar
    assert eval(repr(sugar), dict(checks.NAMES)) == plain
    signal = checks.example(sugar, plain)
    assert examples.identical(checks.trajectory(sugar, signal), checks.trajectory(plain, signal))


def test_different_tuples_are_not_equal() -> None:
    values = list(SYSTEMS.values())
    assert all(a != b for i, a in enumerate(values) for b in values[:i])
    assert StateUpdate(Alignment()) != StateUpdate(Alignment(), memory=List(1.0))
    assert StateUpdate(Alignment()) != Alignment()


def test_parallel_branches_have_a_normal_form_too() -> None:
    branches = (StateUpdate(Linear(), monoid=Product((Identity(), Scalar(0.9)))), StateUpdate(Linear(), monoid=Zero()))
    update = StateUpdate(Given(), algorithm=Step(0.1, via=(Sum(branches, (1.0, 2.0)),)))
    assert update.normal() is not update and update.normal().normal() is update.normal()
    assert [type(f.monoid) for f in update.filters()] == [Scalar, Zero]


def test_wrapped_statistics_are_lowered() -> None:
    """Statistics inside a cautious or trust-ratio link are normal in the normal form."""
    stat = StateUpdate(Linear("square"), monoid=Product((Identity(), Scalar(0.9))), algorithm=Step(0.1))
    update = StateUpdate(Given(), OnUpdate(geometry.Cautious(Whiten((stat,)))), algorithm=Step(0.1))
    (inner,) = update.filters()[0].parts().h.stats
    assert inner.normal() is inner and inner.monoid == Scalar(0.9)


def test_demands_list_every_named_rate_once() -> None:
    update = StateUpdate(
        Ridge(Huber(Per("delta", "row")), Per("ridge")),
        Whiten((StateUpdate(Linear("key"), monoid=Scalar("forget"), algorithm=Step(Per("enter"))),), kind="right"),
        Product((Scalar("gate"), Householder(Per("beta"), "w"))),
        Step(Per("rate"), via=(StateUpdate(Linear(), monoid=Scalar("mu"), algorithm=Step(Per("beta"))),)),
    )
    assert {p.name for p in update.demands()} == {
        "delta", "ridge", "forget", "enter", "gate", "beta", "rate", "mu"
    }  # fmt: skip
    assert update.signals() == {"k", "v", "w"}
    assert StateUpdate(Given()).demands() == () and StateUpdate(Given()).signals() == {"g"}
    assert KEYED["ttt"].demands()[-2:] == (Per("ln_gain", "row", "real"), Per("ln_bias", "row", "real"))
    with pytest.raises(IllegalUpdate, match="two rates named 'beta' disagree"):
        StateUpdate(Alignment(), monoid=Scalar("beta"), algorithm=Step(Per("beta")))


def test_state_is_a_plain_tuple_of_tensors() -> None:
    update = KEYED["adam net"]
    _, state = reference.run(update, checks.example(update), time=1)
    assert isinstance(state, State) and isinstance(state.via[0], State)
    assert int(state.count) == 7 and all(isinstance(x, Tensor) for x in checks.leaves(state))


def test_output_without_a_step() -> None:
    """Depth reads before it writes: the weights of a state are those its last step put out."""
    for name in ("gated delta", "memora", "ista", "normalised gla", "lattice enc"):
        update, signal = KEYED[name], checks.example(KEYED[name])
        state = None
        for datum in reference.tokens(signal, 1):
            state = update.init(datum) if state is None else state
            state, out = update.step(state, datum)
            assert checks.error(update.output(state, datum), out) == 0.0, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_float_dtype_without_a_hidden_cast(name: str, dtype: torch.dtype) -> None:
    update = SYSTEMS[name]
    # LAPACK has no half precision, and a list's or a stream's link may widen on purpose
    half = dtype in (torch.float16, torch.bfloat16)
    solves = update.parts().step.at == "new" and not isinstance(update.cost, SquaredError)
    if half and (solves or not update.parts().h.is_identity and update.parts().step.at == "new"):
        pytest.skip("implicit steps are solved in at least float32")
    signal = checks.example(update, dtype=dtype, length=3)
    if (
        half
        and any(isinstance(m, monoids.GeneralLinear) for m in examples.every_part(update))
        or (half and any(isinstance(p, Product) for p in examples.every_part(update)) and "logits" in signal)
    ):
        pytest.skip("a mixing matrix stays in float32 on purpose")
    y, state = checks.trajectory(update, signal)
    assert y.dtype == dtype
    assert {x.dtype for x in checks.leaves(state)} == {dtype, torch.int64}


SMOOTH = [
    "gated delta", "kda", "longhorn, vector rate", "longhorn, diagonal", "titans", "two averages", "rotated delta",
    "householder", "normalised gla", "fox with path", "lattice sim", "lattice enc", "memora", "moneta",
    "adam net", "ttt", "ttt, every token", "titans mlp", "rls", "entropic delta", "cross-entropy", "bounded",
    "adamw", "muon", "shampoo", "schedule-free",
]  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_double_backward_through_the_interpreter(name: str) -> None:
    update = SYSTEMS[name]
    signal = checks.example(update, batch=(), length=3, d_k=2, d_v=3)
    names = sorted(signal)

    def run(*values: Tensor) -> Tensor:
        y, _ = checks.trajectory(update, dict(zip(names, values, strict=True)))
        return y

    inputs = tuple(signal[n].requires_grad_() for n in names)  # type: ignore[union-attr]
    assert torch.autograd.gradcheck(run, inputs, atol=1e-5, rtol=1e-3, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, atol=1e-4, rtol=1e-3, fast_mode=True)


def test_soap_is_adam_in_the_eigenbasis_of_the_factors() -> None:
    """An average of gradients over the root of squares averaged in the eigenbasis of L and R, rotated back."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    gradients = torch.randn(12, 4, 3, generator=generator, dtype=torch.float64)
    update = DATA["soap"]
    state = update.init({"g": gradients[0]}, (start,))
    w, m, v = start, torch.zeros_like(start), torch.zeros_like(start)
    left, right = torch.zeros(4, 4).double(), torch.zeros(3, 3).double()
    for t, g in enumerate(gradients, 1):
        state, _ = update.step(state, {"g": g})
        left, right = 0.9 * left + 0.1 * g @ g.T, 0.9 * right + 0.1 * g.T @ g
        u, r = torch.from_numpy(np.linalg.eigh(left.numpy())[1]), torch.from_numpy(np.linalg.eigh(right.numpy())[1])
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * (u.T @ g @ r) ** 2
        step = (u.T @ m @ r / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-3)
        w = w - 0.1 * u @ step @ r.T
    # the first factors are rank deficient, where a null-space basis is arbitrary: primed ones would give rounding
    torch.testing.assert_close(state.theta[0], w, rtol=0, atol=1e-6)


def test_a_filter_may_start_at_the_weights() -> None:
    """Averages of weights: z is gradient descent from W_0, the update's own state averages z."""
    start, gradients = torch.randn(3, 2, dtype=torch.float64), torch.randn(9, 3, 2, dtype=torch.float64)
    update = DATA["averaged weights"]
    state = update.init({"g": gradients[0]}, (start,))
    x = z = start
    for g in gradients:
        state, _ = update.step(state, {"g": g})
        z = z - 0.2 * g
        x = 0.9 * x + 0.1 * z
    torch.testing.assert_close(state.theta[0], x, rtol=0, atol=1e-13)


def test_an_average_may_leave_the_first_datum_to_statistics() -> None:
    """It puts out nothing then, and goes on as if the second datum were its first; a statistic has seen both."""
    update, gradients = DATA["averaged from the second"], torch.randn(6, 3, 2, dtype=torch.float64)
    state = update.init({"g": gradients[0]}, (torch.zeros(3, 2, dtype=torch.float64),))
    w, m = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    for t, g in enumerate(gradients):
        state, out = update.step(state, {"g": g})
        if t:
            m = 0.9 * m + 0.1 * g
            w = w - 0.1 * m / (1 - 0.9**t)
        torch.testing.assert_close(out.weights[0], w, rtol=0, atol=1e-13)
    squares = StateUpdate(Linear("square"))
    waiting = StateUpdate(Linear(), Whiten((squares,)), Zero(), Step(start="second"))
    whole = StateUpdate(Given(), algorithm=Step(via=(waiting,)))
    state = whole.init({"g": gradients[0]}, (w,))
    for g in gradients[:2]:
        state, out = whole.step(state, {"g": g})
    moved = w - gradients[1] / ((gradients[0] ** 2 + gradients[1] ** 2).sqrt() + 1e-8)
    torch.testing.assert_close(out.weights[0], moved, rtol=0, atol=1e-13)


def test_only_filters_start_at_the_weights() -> None:
    with pytest.raises(IllegalUpdate, match="starts at the weights it is given"):
        StateUpdate(Given(), algorithm=Step(0.1, start="W0"))
    with pytest.raises(IllegalUpdate, match="no bias to correct"):
        StateUpdate(Linear(), monoid=Scalar(0.9), algorithm=Step(0.1, start="W0", debias=True))
    with pytest.raises(IllegalUpdate, match="takes a statistic of the entries"):
        StateUpdate(Linear(), Whiten((StateUpdate(Linear("eigen-square")),)), Scalar(0.9))
