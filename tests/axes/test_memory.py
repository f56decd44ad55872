"""Memories: their only derivative against autograd, linearity where it is claimed, and the list as a matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from axes.core import reference
from axes.core.algorithms import Step
from axes.core.costs import Alignment, SquaredError
from axes.core.geometry import Entropic, Euclidean
from axes.core.memory import MLP, Entries, LayerNormMatrix, Leaves, List, Matrix, Memory, Parameter, Slots
from axes.core.monoids import DPLR, Diagonal, Householder, Monoid, Product, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate

SEEDS = st.integers(0, 2**20)
KEYED: dict[str, Memory] = {
    "matrix": Matrix(),
    "slots": Slots(),
    "entries": Entries(),
    "layer norm": LayerNormMatrix(),
    "mlp": MLP(2),
}
ENCODING = ("matrix", "slots")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(memory: Memory, seed: int, encode: bool = False) -> tuple[Leaves, Tensor, Tensor, dict[str, Tensor]]:
    """Leaves, an input, a cotangent and a signal."""
    d_k, d_v = (4, 4) if isinstance(memory, LayerNormMatrix | MLP) else (4, 5)
    signal = {
        "k": draw(seed, 2, d_k),
        "v": draw(seed + 1, 2, d_v),
        "ln_gain": draw(seed + 2, 2, d_v),
        "ln_bias": draw(seed + 3, 2, d_v),
    }
    leaves = tuple(draw(seed + 4 + i, *leaf.shape) for i, leaf in enumerate(memory.zeros(signal)))
    x = signal["v"] if encode else signal["k"]
    return leaves, x, draw(seed + 9, *memory.predict(leaves, x, signal, encode=encode).shape), signal


@pytest.mark.parametrize(
    ("name", "encode"), [(n, False) for n in KEYED] + [(n, True) for n in ENCODING], ids=lambda x: str(x)
)
@given(seed=SEEDS)
def test_vjp_is_the_gradient_of_the_prediction(name: str, encode: bool, seed: int) -> None:
    memory = KEYED[name]
    leaves, x, r, signal = case(memory, seed, encode)
    live = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    expected = torch.autograd.grad((memory.predict(live, x, signal, encode=encode) * r).sum(), live)
    for ours, theirs in zip(memory.vjp(leaves, x, r, signal, encode=encode), expected, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-11  # measured 3e-13


@pytest.mark.parametrize("name", KEYED)
@given(seed=SEEDS)
def test_linear_where_it_is_claimed(name: str, seed: int) -> None:
    memory = KEYED[name]
    first, x, _, signal = case(memory, seed)
    second, *_ = case(memory, seed + 100)
    mixed = tuple(2.0 * a - 3.0 * b for a, b in zip(first, second, strict=True))

    def predict(leaves: Leaves) -> Tensor:
        return memory.predict(leaves, x, signal)

    gap = float((predict(mixed) - 2 * predict(first) + 3 * predict(second)).abs().max())
    assert (gap < 1e-12) == memory.linear, gap


@pytest.mark.parametrize("name", ["matrix", "slots", "entries"])
@given(seed=SEEDS)
def test_the_read_is_linear_in_query_and_state(name: str, seed: int) -> None:
    memory = KEYED[name]
    (s,), q, _, signal = case(memory, seed)
    read = memory.read((s,), q, signal, Euclidean())
    assert float((read - (s @ q[..., None])[..., 0]).abs().max()) < 1e-13
    assert float((memory.read((2 * s,), -q, signal, Euclidean()) + 2 * read).abs().max()) < 1e-12


@given(seed=SEEDS)
def test_sharpness_is_the_squared_gradient(seed: int) -> None:
    """|d prediction_i / d W|^2 per unit of c: |k|^2 for a matrix; Longhorn's convention for entries."""
    leaves, x, _, signal = case(Matrix(), seed)
    unit = torch.zeros(2, 5, dtype=torch.float64)
    unit[:, 0] = 1
    (row,) = Matrix().vjp(leaves, x, unit, signal)
    assert float((row.square().sum((-2, -1)) - Matrix().sharpness(x)[..., 0]).abs().max()) < 1e-12
    assert torch.equal(Entries().sharpness(x)[..., 0, 0], Matrix().sharpness(x)[..., 0])


def test_entries_predict_the_target_each_alone() -> None:
    s, x = draw(0, 2, 5, 4), draw(1, 2, 4)
    predicted = Entries().predict((s,), x, {})
    assert torch.equal(predicted, s * x[:, None, :])


@given(seed=SEEDS)
def test_slots_depend_on_directions_only(seed: int) -> None:
    (s,), x, r, signal = case(Slots(), seed)
    scale = draw(seed + 50, 2, 1, 4).exp()
    for encode, y in ((False, x), (True, signal["v"])):
        gap = Slots().predict((s * scale,), y, signal, encode=encode) - Slots().predict((s,), y, signal, encode=encode)
        assert float(gap.abs().max()) < 1e-13
    (tangent,) = Slots().vjp((s,), x, r, signal)
    assert float((tangent * s).sum(-2).abs().max()) < 1e-11  # orthogonal to every slot


@pytest.mark.parametrize("encode", [False, True])
def test_zero_columns_have_no_nan(encode: bool) -> None:
    s = draw(0, 2, 5, 4)
    s[..., 1] = 0
    s = s.requires_grad_()
    x, r = (draw(1, 2, 5), draw(2, 2, 4)) if encode else (draw(1, 2, 4), draw(2, 2, 5))
    y = Slots().predict((s,), x, {}, encode=encode)
    (g,) = Slots().vjp((s,), x, r, {}, encode=encode)
    first = torch.autograd.grad(y.sum() + g.square().sum(), s, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), s)[0]
    assert all(bool(z.isfinite().all()) for z in (y, g, first, second))
    assert bool((g[..., 1] == 0).all())


def test_empty_slots_are_made_where_the_signal_is() -> None:
    """What would be made elsewhere and copied here cannot be captured; on meta it could not be copied at all."""
    signal = {"k": draw(0, 2, 4), "v": draw(1, 2, 5)}
    with torch.device("meta"):
        (slots,) = Slots().zeros(signal)
    assert torch.equal(slots, Slots().zeros(signal)[0])


def test_zeros_make_an_empty_memory() -> None:
    signal = {"k": draw(0, 2, 3, 4), "v": draw(1, 2, 3, 6)}
    assert Matrix().zeros(signal)[0].shape == (2, 3, 6, 4) and not Matrix().zeros(signal)[0].any()
    (slots,) = Slots().zeros(signal)
    assert torch.equal(slots.mT @ slots, torch.eye(4, dtype=torch.float64).expand(2, 3, 4, 4))
    wide = {"k": draw(0, 7), "v": draw(1, 3)}
    assert torch.allclose(Slots().zeros(wide)[0].square().sum(-2), torch.ones(7, dtype=torch.float64))
    square = {"k": draw(0, 2, 4), "v": draw(1, 2, 4)}
    w1, w2 = MLP(3).zeros(square)
    assert w1.shape == (2, 4, 12) and w2.shape == (2, 12, 4) and bool(w1.any())
    again = MLP(3).zeros(square)
    assert torch.equal(w1, again[0]) and torch.equal(w1[0], w1[1])  # the same for every sequence
    keys, values, mass = List().zeros(signal)
    assert keys.shape == (2, 3, 0, 4) and values.shape == (2, 3, 0, 6) and mass.shape == (2, 3, 0)
    assert torch.equal(Parameter().zeros({"g": draw(0, 3)})[0], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", KEYED)
def test_dtype_is_kept(name: str, dtype: torch.dtype) -> None:
    memory = KEYED[name]
    leaves, x, r, signal = case(memory, 0)
    cast = {n: t.to(dtype) for n, t in signal.items()}
    low = tuple(leaf.to(dtype) for leaf in leaves)
    assert memory.predict(low, x.to(dtype), cast).dtype == dtype
    assert all(g.dtype == dtype for g in memory.vjp(low, x.to(dtype), r.to(dtype), cast))
    assert all(z.dtype == dtype for z in memory.zeros(cast))


def test_row_rates_of_an_mlp() -> None:
    """Rows of W1 take their own rate, hidden units the mean; gates likewise."""
    memory, signal = MLP(2), {"k": draw(0, 4), "v": draw(1, 4)}
    leaves, drive = memory.zeros(signal), tuple(torch.ones_like(x) for x in memory.zeros(signal))
    rate = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    first, second = memory.add(leaves, rate, "row", drive)
    assert torch.allclose(first - leaves[0], rate[:, None].expand(4, 8))
    assert torch.allclose(second - leaves[1], torch.full((8, 4), 0.25, dtype=torch.float64))
    gate = Diagonal("g", side="row").element({"g": rate.log()}, 1.0, leaves[0])
    first, second = memory.act(gate, leaves)
    assert torch.allclose(first, rate[:, None] * leaves[0]) and torch.allclose(second, 0.25 * leaves[1])


# ---- the list ----------------------------------------------------------------------------------------------------

LIST_MONOIDS: dict[str, Monoid | None] = {
    "identity": None,
    "constant gate": Scalar(0.8),
    "scalar gate": Scalar("g"),
    "key gate": Diagonal("gk"),
    "rotation": Rotation(Per("angle", "pair", "real")),
    "householder": Householder(Per("beta")),
    "dplr": DPLR("gk"),
    "gated householder": Product((Scalar("g"), Householder(Per("beta")))),
    "householder, then gate": Product((Householder(Per("beta")), Scalar("g"))),
}


@pytest.mark.parametrize("cost", [Alignment(), SquaredError()], ids=repr)
@pytest.mark.parametrize("name", LIST_MONOIDS)
@given(seed=SEEDS)
def test_a_list_with_euclidean_h_is_the_matrix(name: str, cost: Alignment | SquaredError, seed: int) -> None:
    monoid, length = LIST_MONOIDS[name], 6
    signal = {
        "k": torch.nn.functional.normalize(draw(seed, 2, length, 4), dim=-1),
        "v": draw(seed + 1, 2, length, 3),
        "q": draw(seed + 2, 2, length, 4),
        "rate": torch.sigmoid(draw(seed + 3, 2, length)),
        "beta": 2 * torch.sigmoid(draw(seed + 4, 2, length)),
        "g": -draw(seed + 5, 2, length).abs(),
        "gk": -draw(seed + 6, 2, length, 4).abs(),
        "angle": draw(seed + 7, 2, length, 2),
        "w": torch.nn.functional.normalize(draw(seed + 8, 2, length, 4), dim=-1),
        "a": 0.3 * draw(seed + 9, 2, length, 4),
        "b": 0.3 * draw(seed + 10, 2, length, 4),
    }
    fields = {} if monoid is None else {"monoid": monoid}
    listed = StateUpdate(cost, algorithm=Step(Per("rate")), memory=List(scale=1.0), **fields)
    matrix = StateUpdate(cost, algorithm=Step(Per("rate")), **fields)
    y, _ = reference.run(listed, signal, time=1)
    expected, _ = reference.run(matrix, signal, time=1)
    assert float((y - expected).abs().max()) < 1e-12  # measured 2e-14


def test_a_list_grows_and_reads_a_mean() -> None:
    update = StateUpdate(Alignment(), Entropic(), memory=List())
    signal = {"k": draw(0, 5, 4), "v": draw(1, 5, 3), "q": torch.zeros(5, 4, dtype=torch.float64)}
    y, state = reference.run(update, signal)
    assert state.theta[0].shape == (5, 4)
    running = signal["v"].cumsum(0) / torch.arange(1, 6, dtype=torch.float64)[:, None]
    assert torch.allclose(y, running)


def test_what_memories_refuse() -> None:
    with pytest.raises(IllegalUpdate, match="predicts nothing"):
        Parameter().predict((draw(0, 3),), draw(1, 3), {})
    with pytest.raises(IllegalUpdate, match="predicts nothing"):
        Parameter().vjp((draw(0, 3),), draw(1, 3), draw(2, 3), {})
    with pytest.raises(IllegalUpdate, match="'g' must be a tensor"):
        Parameter().zeros({"g": 1.0})
    with pytest.raises(IllegalUpdate, match="read through its geometry"):
        List().predict((), draw(0, 3), {})
    with pytest.raises(IllegalUpdate, match="keys 'k' and values 'v'"):
        Matrix().zeros({"q": draw(0, 3)})
    with pytest.raises(IllegalUpdate, match="no rows to gate"):
        List().act(
            Diagonal("g", side="row").element({"g": draw(0, 3)}, 1.0, draw(1, 3, 4)),
            List().zeros({"k": draw(0, 3, 4), "v": draw(1, 3, 4)}),
        )
