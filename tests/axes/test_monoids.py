"""Laws of the retention maps: associativity, identity, action, matrices, closure; and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from axes.core.geometry import Birkhoff, Cayley, Euclidean, Permutations
from axes.core.monoids import (
    DPLR,
    Decay,
    Diagonal,
    Element,
    GeneralLinear,
    Hadamard,
    Householder,
    Identity,
    Monoid,
    Product,
    Rotation,
    Scalar,
    Zero,
    rotate,
    rotation_matrix,
)
from axes.core.rates import Per
from axes.errors import IllegalUpdate, ShapeError

D_K, D_V = 6, 5
SEEDS = st.integers(0, 2**20)

# Those with a matrix on the key side, and those that gate element by element.
MATRICES: dict[str, Monoid] = {
    "identity": Identity(),
    "zero": Zero(),
    "scalar": Scalar(0.7),
    "scalar gate": Scalar("g"),
    "constant gate": Scalar(Per("c", domain="unit")),
    "decay": Decay(0.3),
    "independent decay": Decay(Per("weight"), independent=True),
    "diagonal": Diagonal("gk"),
    "rope": Rotation(100.0),
    "rotation": Rotation(Per("angle", "pair", "real")),
    "householder": Householder(Per("beta")),
    "reflection": Householder(2.0),
    "dplr": DPLR("gk"),
    "dplr, number": DPLR(0.8),
    "general linear": GeneralLinear(Per("m", "mix", "real")),
    "birkhoff": GeneralLinear(Per("m", "mix", "real"), Birkhoff()),
    "permutations": GeneralLinear(Per("orders", "permutation", "real"), Permutations()),
    "special orthogonal": GeneralLinear(Per("m", "mix", "real"), Cayley()),
    "mean-preserving": GeneralLinear(Per("m", "mix", "real"), Cayley(kind="mean-preserving")),
    "gate, rotation": Product((Scalar("g"), Rotation(Per("angle", "pair", "real")))),
    "diagonal, rotation": Product((Diagonal("gk"), Rotation(100.0))),
    "rotation, dplr": Product((Rotation(100.0), DPLR("gk"))),
    "two reflections": Product((Householder(Per("beta")), Householder(0.5, "w2"))),
    "all": Product((Scalar("g"), Householder(Per("beta")), GeneralLinear(Per("m", "mix", "real")), Diagonal("gk"))),
}
ELEMENTWISE: dict[str, Monoid] = {
    "rows": Diagonal("gv", side="row"),
    "hadamard": Hadamard("gs"),
    "rows, scalar": Product((Diagonal("gv", side="row"), Scalar("g"))),
    "scalar, hadamard": Product((Scalar(0.5), Hadamard("gs"))),
    "rows, householder": Product((Diagonal("gv", side="row"), Householder(Per("beta")))),
}
ALL = {**MATRICES, **ELEMENTWISE}


def signal(seed: int, batch: tuple[int, ...] = (2,)) -> dict[str, Tensor]:
    r = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn((*batch, *shape), generator=r, dtype=torch.float64)

    return {
        "g": -draw().abs(),
        "c": torch.tensor(-0.3, dtype=torch.float64),
        "weight": torch.tensor(0.2, dtype=torch.float64),
        "gk": -draw(D_K).abs(),
        "gv": -draw(D_V).abs(),
        "gs": -draw(D_V, D_K).abs(),
        "angle": draw(D_K // 2),
        "beta": 2 * torch.sigmoid(draw()),
        "w": torch.nn.functional.normalize(draw(D_K), dim=-1),
        "w2": torch.nn.functional.normalize(draw(D_K), dim=-1),
        "a": 0.5 * draw(D_K),
        "b": 0.5 * draw(D_K),
        "m": 0.5 * draw(D_K, D_K),
        "orders": draw(math.factorial(D_K)),
    }


def element(monoid: Monoid, seed: int, batch: tuple[int, ...] = (2,)) -> Element:
    return monoid.element(signal(seed, batch), 0.5, torch.zeros(*batch, D_V, D_K, dtype=torch.float64))


def state(seed: int, batch: tuple[int, ...] = (2,)) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 10**6)
    return torch.randn((*batch, D_V, D_K), generator=generator, dtype=torch.float64)


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# Measured: 4e-15 over 200 examples of each.
EXACT = 2e-13


@pytest.mark.parametrize("name", ALL)
@given(seed=SEEDS)
def test_acting_with_a_composition_is_acting_twice(name: str, seed: int) -> None:
    x, y, s = element(ALL[name], seed), element(ALL[name], seed + 1), state(seed)
    assert gap(x.then(y).act(s), y.act(x.act(s))) < EXACT


@pytest.mark.parametrize("first", MATRICES)
@given(seed=SEEDS, data=st.data())
def test_any_two_right_actions_compose(first: str, seed: int, data: st.DataObject) -> None:
    second = data.draw(st.sampled_from(sorted(MATRICES)))
    x, y, s = element(MATRICES[first], seed), element(MATRICES[second], seed + 1), state(seed)
    assert gap(x.then(y).act(s), y.act(x.act(s))) < EXACT


@pytest.mark.parametrize("name", ALL)
@given(seed=SEEDS)
def test_composition_is_associative(name: str, seed: int) -> None:
    x, y, z = (element(ALL[name], seed + i) for i in range(3))
    s = state(seed)
    assert gap(x.then(y).then(z).act(s), x.then(y.then(z)).act(s)) < EXACT


@pytest.mark.parametrize("name", ALL)
@given(seed=SEEDS)
def test_identity_is_neutral(name: str, seed: int) -> None:
    x, one, s = element(ALL[name], seed), element(Identity(), seed), state(seed)
    assert torch.equal(one.act(s), s)
    assert gap(one.then(x).act(s), x.act(s)) < EXACT and gap(x.then(one).act(s), x.act(s)) < EXACT


@pytest.mark.parametrize("name", MATRICES)
@given(seed=SEEDS)
def test_to_dense_is_a_homomorphism(name: str, seed: int) -> None:
    x, y, s = element(MATRICES[name], seed), element(MATRICES[name], seed + 1), state(seed)
    a, b = x.to_dense(D_K, s), y.to_dense(D_K, s)
    assert gap(x.then(y).to_dense(D_K, s), a @ b) < EXACT
    assert gap(x.act(s), s @ a) < EXACT


@pytest.mark.parametrize("name", MATRICES)
@given(seed=SEEDS)
def test_the_base_and_its_transpose_are_adjoint(name: str, seed: int) -> None:
    """<x B, y> = <x, B y>, the base of the element being what acts besides the low rank."""
    e = element(MATRICES[name], seed)
    x, y = state(seed), state(seed + 5)
    assert gap((e.base(x) * y).sum((-2, -1)), (x * e.transpose_base(y)).sum((-2, -1))) < EXACT


@given(seed=SEEDS)
def test_formulas(seed: int) -> None:
    """Each map against its formula in one line."""
    s, x = signal(seed), state(seed)
    eye = torch.eye(D_K, dtype=torch.float64)
    w, beta = s["w"], s["beta"][..., None, None]
    angle = 100.0 ** (-torch.arange(0, D_K, 2, dtype=torch.float64) / D_K)
    expected = {
        "zero": 0 * x,
        "scalar": 0.7 * x,
        "scalar gate": s["g"].exp()[..., None, None] * x,
        "constant gate": math.exp(-0.3) * x,
        "decay": (1 - 0.5 * 0.3) * x,
        "independent decay": (1 - 0.2) * x,
        "diagonal": x @ torch.diag_embed(s["gk"].exp()),
        "rope": x @ rotation_matrix(angle),
        "rotation": x @ rotation_matrix(s["angle"]),
        "householder": x @ (eye - beta * w[..., :, None] * w[..., None, :]),
        "dplr": x @ (torch.diag_embed(s["gk"].exp()) + s["a"][..., :, None] * s["b"][..., None, :]),
        "general linear": x @ s["m"].mT,
        "rows": torch.diag_embed(s["gv"].exp()) @ x,
        "hadamard": s["gs"].exp() * x,
        "gate, rotation": s["g"].exp()[..., None, None] * x @ rotation_matrix(s["angle"]),
        "rows, householder": torch.diag_embed(s["gv"].exp()) @ x @ (eye - beta * w[..., :, None] * w[..., None, :]),
    }
    for name, value in expected.items():
        assert gap(element(ALL[name], seed).act(x), value) < EXACT, name


@given(seed=SEEDS)
def test_closure_of_the_groups(seed: int) -> None:
    """Products stay in the family: rotations, SO(n), doubly stochastic, mean-preserving; norms and sums survive."""
    like = state(seed)
    eye, ones = torch.eye(D_K, dtype=torch.float64), torch.ones(D_K, dtype=torch.float64)
    for name in ("rope", "rotation", "special orthogonal", "mean-preserving", "reflection"):
        x, y = element(MATRICES[name], seed), element(MATRICES[name], seed + 1)
        dense = x.then(y).to_dense(D_K, like)
        assert gap(dense @ dense.mT, eye) < 1e-12, name
        assert gap(torch.linalg.det(dense), torch.ones(())) < 1e-11, name  # two reflections make a rotation
        assert gap(torch.linalg.matrix_norm(x.act(like)), torch.linalg.matrix_norm(like)) < 1e-11, name
    stochastic = element(MATRICES["birkhoff"], seed).then(element(MATRICES["birkhoff"], seed + 1)).to_dense(D_K, like)
    assert gap(stochastic.sum(-2), ones) < 1e-12  # rows of R = link(logits) are exact, and R = A^T
    assert gap(stochastic.sum(-1), ones) < 1e-4 and bool((stochastic >= 0).all())
    mean = element(MATRICES["mean-preserving"], seed).to_dense(D_K, like)
    assert gap(mean @ ones, ones) < 1e-12 and gap(mean.mT @ ones, ones) < 1e-12


@given(seed=SEEDS)
def test_householder_at_its_special_strengths(seed: int) -> None:
    """beta = 1 projects the key out, beta = 2 reflects it, and unit keys make both exact."""
    s, x = signal(seed), state(seed)
    w = s["w"]
    once = Householder(1.0).element(s, 1.0, x)
    assert float((once.act(x) @ w[..., None]).abs().max()) < 1e-14
    twice = Householder(2.0).element(s, 1.0, x)
    assert gap(twice.act(x) @ w[..., None], -x @ w[..., None]) < 1e-14
    assert gap(twice.then(twice).act(x), x) < 1e-14


def test_rotate_is_the_rotation_matrix() -> None:
    x, angle = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    assert gap(rotate(x, angle[:, None, :]), x @ rotation_matrix(angle)) < 1e-14


@pytest.mark.parametrize("gate", [0.0, -1e-3, -50.0, -torch.inf])
def test_hard_gates_are_finite(gate: float) -> None:
    """A gate of -inf is zero, not NaN, in value, composition and gradient of what it acts on."""
    g = torch.full((2,), gate, dtype=torch.float64)
    like = state(0)
    x = Scalar("g").element({"g": g}, 1.0, like).then(Householder(1.5, "w").element(signal(0), 1.0, like))
    s = state(0).requires_grad_()
    y = x.act(s)
    y.sum().backward()
    assert bool(y.isfinite().all()) and s.grad is not None and bool(s.grad.isfinite().all())
    expected = math.exp(gate) * Householder(1.5, "w").element(signal(0), 1.0, like).act(state(0))
    assert gap(y.detach(), expected) < 1e-14


@pytest.mark.parametrize("name", ALL)
def test_element_is_differentiable_twice(name: str) -> None:
    """Plain double backward through chart, composition and action."""
    fields = {n: x.requires_grad_() for n, x in signal(1, ()).items() if n not in ("c", "weight")}
    constant = {"c": torch.tensor(-0.3), "weight": torch.tensor(0.2)}
    names = sorted(fields)

    def run(s: Tensor, *values: Tensor) -> Tensor:
        data = {**dict(zip(names, values, strict=True)), **constant}
        e = ALL[name].element(data, 0.5, s)
        # every input has a second derivative of its own to check
        return e.then(e).act(s) * s + sum((x * x).sum() for x in values)

    inputs = (state(2, ()).requires_grad_(), *(fields[n] for n in names))
    assert torch.autograd.gradgradcheck(run, inputs, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Scalar(1.5), r"\[0, 1\], got 1.5"),
        (lambda: Scalar(-0.1), r"\[0, 1\]"),
        (lambda: Scalar(Per("g", "key", "unit")), "use Diagonal or Hadamard"),
        (lambda: Diagonal(0.5), "use Scalar otherwise"),
        (lambda: Diagonal("g", side="left"), "not key, row, pair, row-pair or slot"),
        (lambda: Diagonal(Per("g", "row", "unit")), "must be a Per of shape key"),
        (lambda: Hadamard(0.5), "shape square"),
        (lambda: Rotation(-1.0), "must be positive"),
        (lambda: Rotation(Per("a", "key", "real")), "shape pair"),
        (lambda: GeneralLinear(Per("m", "square", "real")), "shape mix"),
        (lambda: Product((Identity(),)), "at least two"),
    ],
)
def test_declarations_that_are_refused(build, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(IllegalUpdate, match=message):
        build()


@pytest.mark.parametrize(
    ("monoid", "data", "message"),
    [
        (Scalar("g"), {}, "does not supply"),
        (Scalar(Per("g", domain="positive")), {"g": torch.ones(2)}, "declare it unit"),
        (Decay(0.1), {}, None),
        (Householder(1.0), {}, "'w'"),
        (DPLR(0.5), {"a": torch.ones(D_K)}, "'b'"),
        (GeneralLinear(Per("m", "mix", "real")), {"m": 3.0}, "must be a matrix"),
    ],
)
def test_signals_that_are_refused(monoid: Monoid, data: dict[str, Tensor | float], message: str | None) -> None:
    rate = torch.ones(2, dtype=torch.float64) if isinstance(monoid, Decay) else 1.0
    with pytest.raises((IllegalUpdate, ShapeError), match=message or "varies per datum"):
        monoid.element(data, rate, state(0))


def test_widths_that_are_refused() -> None:
    with pytest.raises(IllegalUpdate, match="even, got 5"):
        Rotation().element({}, 1.0, torch.zeros(2, 5))
    with pytest.raises(IllegalUpdate, match="no matrix"):
        element(ELEMENTWISE["hadamard"], 0).to_dense(D_K, state(0))
    with pytest.raises(IllegalUpdate, match="not closed"):
        element(ELEMENTWISE["hadamard"], 0).then(element(MATRICES["householder"], 0))


def test_what_a_monoid_asks_for() -> None:
    product = Product((Scalar("g"), Householder(Per("beta"), "w2"), DPLR("gk", "x", "y")))
    assert {r.name for r in product.rates() if isinstance(r, Per)} == {"g", "beta", "gk"}
    assert product.signals() == {"w2", "x", "y"}
    assert GeneralLinear(Per("m", "mix", "real")).link == Euclidean()
