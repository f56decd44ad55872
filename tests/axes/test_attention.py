"""The attention route against the interpreter in float64: every kind of element, with and without a state, in blocks;
groups of heads; memory; lists that grow.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from axes.core import reference
from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Entropic, Euclidean
from axes.core.memory import List
from axes.core.monoids import Householder, Identity, Monoid, Product, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import State, StateUpdate
from axes.routes import dispatch
from axes.routes.attention import room, softmax, transported
from axes.routes.packed import join
from axes.testing import checks

EXACT = 1e-9
MONOIDS: dict[str, Monoid] = {
    "nothing": Identity(),
    "gate": Scalar("decay"),
    "constant gate": Scalar(0.8),
    "rotation": Rotation(),
    "part of a rotation": Rotation(100.0, pairs=1),
    "named angles": Rotation(Per("angle", "pair", "real")),
    "gate, rotation": Product((Scalar("decay"), Rotation())),
    "reflection": Householder(Per("beta")),
    "constant reflection": Householder(1.5, None),
    "gate, reflection": Product((Scalar("decay"), Householder(Per("beta")))),
}


def made(monoid: str, h: str = "entropic", **options: Any) -> StateUpdate:
    geometry = Euclidean() if h == "euclidean" else Entropic(mass=1.5)
    return StateUpdate(Alignment(), geometry, MONOIDS[monoid], Step(Per("rate")), List(**options))


def example(update: StateUpdate, length: int, seed: int = 0) -> dict[str, Tensor]:
    signal = checks.example(update, length=length, seed=seed) if seed else checks.example(update, length=length)
    return {n: x for n, x in signal.items() if isinstance(x, Tensor)}


def everything(run: Any, update: StateUpdate, signal: dict[str, Tensor], state: State) -> list[Tensor]:
    """Outputs, the list, and the gradient of everything given, for a loss of both."""
    live = {n: x.detach().requires_grad_() for n, x in signal.items()}
    theta = tuple(x.detach().requires_grad_() for x in state.theta)
    out, last = run(update, live, state._replace(theta=theta), time=1)
    weights = (torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in (out, *last.theta))
    loss = sum((w * x).sum() for w, x in zip(weights, (out, *last.theta), strict=True))
    given = [*live.values(), *theta]
    return [out, *last.theta, *torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)]  # type: ignore[arg-type]


@pytest.fixture(params=[5, 256], ids=["small blocks", "one block"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(softmax, "_BLOCK", request.param)
    monkeypatch.setattr(transported, "_BLOCK", request.param)
    return request.param


@pytest.mark.parametrize("earlier", [0, 1, 9])
@pytest.mark.parametrize("h", ["entropic", "euclidean"])
@pytest.mark.parametrize("monoid", MONOIDS)
def test_every_element_in_blocks_and_behind_a_state(monoid: str, h: str, earlier: int, blocks: int) -> None:
    update = made(monoid, h)
    signal = example(update, earlier + 14)
    state = update.init({n: x[:, 0] for n, x in signal.items()})
    if earlier:
        state = reference.run(update, {n: x[:, :earlier] for n, x in signal.items()}, state, time=1)[1]
    rest = {n: x[:, earlier:] for n, x in signal.items()}
    assert dispatch.select(update).route == "attention"
    found, expected = (everything(run, update, rest, state) for run in (dispatch.run, reference.run))
    assert checks.error(found, expected) < EXACT


@pytest.mark.parametrize("window", [1, 3, 8, 30])
@pytest.mark.parametrize("earlier", [0, 1, 9])
@pytest.mark.parametrize("monoid", MONOIDS)
def test_a_window_in_blocks_and_behind_a_state(monoid: str, earlier: int, window: int, blocks: int) -> None:
    update = made(monoid, window=window)
    signal = example(update, earlier + 14)
    state = update.init({n: x[:, 0] for n, x in signal.items()})
    if earlier:
        state = reference.run(update, {n: x[:, :earlier] for n, x in signal.items()}, state, time=1)[1]
        assert state.theta[2].shape[-1] == min(earlier, window)
    rest = {n: x[:, earlier:] for n, x in signal.items()}
    assert dispatch.select(update).route == "attention"
    found, expected = (everything(run, update, rest, state) for run in (dispatch.run, reference.run))
    assert checks.error(found, expected) < EXACT


def test_a_window_counts_what_a_query_sees() -> None:
    """Masses of one that grow with the pairs seen, until the window is full; and no window read as a matrix."""
    update = StateUpdate(Alignment(), Entropic(mass=None), Identity(), Step(), List(window=4))
    signal = example(update, 11)
    found, expected = (run(update, signal, time=1) for run in (dispatch.run, reference.run))
    assert checks.error(found, expected) < EXACT
    assert "pairs leave its window" in str(dispatch.routes(made("gate", "euclidean", window=4))["attention"])


def test_massless_pairs_weigh_nothing(blocks: int) -> None:
    """Wherever they stand, in every form."""
    for monoid in ("nothing", "gate", "rotation", "reflection"):
        update = made(monoid)
        signal = example(update, 17)
        head, tail = ({n: x[:, part] for n, x in signal.items()} for part in (slice(6), slice(6, 17)))
        state = reference.run(update, head, time=1)[1]
        keys, values, mass, *owed = state.theta
        noise = (torch.randn_like(keys), torch.randn_like(values), torch.full_like(mass, -torch.inf))
        pairs = zip(noise, (keys, values, mass), (-2, -2, -1), strict=True)
        padded = [torch.cat((x, y), dim) for x, y, dim in pairs]
        out, _ = dispatch.run(update, tail, state._replace(theta=(*padded, *owed)))
        assert checks.error(out, reference.run(update, tail, state, time=1)[0]) < EXACT


@pytest.mark.parametrize(("heads", "group"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("monoid", ["nothing", "gate", "rotation", "reflection"])
def test_groups_of_queries_read_one_list(monoid: str, heads: int, group: int, blocks: int) -> None:
    """Pairs (B, heads, 1, T, .) and queries (B, heads, group, T, .): broadcast, as the interpreter reads them."""
    update = made(monoid)
    signal = checks.example(update, batch=(2, heads, 1), length=13)
    signal = {n: x for n, x in signal.items() if isinstance(x, Tensor)}
    signal["q"] = torch.randn(2, heads, group, 13, signal["k"].shape[-1], dtype=torch.float64)
    out, state = dispatch.run(update, signal, time=3)
    expected, last = reference.run(update, signal, time=3)
    assert out.shape == expected.shape and checks.error(out, expected) < EXACT
    assert checks.error(state, last) < EXACT
    shared = {n: x[:, :, 0] if n != "q" else x.flatten(1, 2) for n, x in signal.items()}
    if heads == 1:  # the usual four dimensions
        assert checks.error(dispatch.run(update, shared, time=2)[0], expected.flatten(1, 2)) < EXACT


def test_large_masses_keep_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of e^-3 over thousands of tokens, in float32: masses in the thousands, near pairs that still weigh."""
    update = StateUpdate(Alignment(), Entropic(), Scalar("decay"), memory=List())
    signal = {n: torch.randn(2, 2000, d) for n, d in (("q", 4), ("k", 4), ("v", 6))}
    signal["decay"] = -6 * torch.rand(2, 2000)
    exact, _ = dispatch.run(update, {n: x.double() for n, x in signal.items()})
    assert (dispatch.run(update, signal)[0] - exact).abs().max() < 1.5e-4  # measured 7e-5
    monkeypatch.setattr(softmax, "_BLOCK", 2000)
    assert (dispatch.run(update, signal)[0] - exact).abs().max() > 3e-4, "one base for all is enough: drop the blocks"


# ---- memory ---------------------------------------------------------------------------------------------------------


def saved(update: StateUpdate, length: int) -> int:
    """Bytes kept for the backward pass."""
    signal = {n: x.float().requires_grad_() for n, x in example(update, length).items()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, _ = dispatch.run(update, signal)
    del out
    return sum(kept.values())


@pytest.mark.parametrize("monoid", MONOIDS)
def test_memory_is_linear_in_time(monoid: str) -> None:
    """Four times the tokens keep about four times the bytes, where scores or a bias would be sixteen times as many."""
    update = made(monoid)
    few, many = saved(update, 512), saved(update, 2048)
    assert many < 5 * few


# ---- lists that grow ------------------------------------------------------------------------------------------------


def one_by_one(update: StateUpdate, signal: dict[str, Tensor], state: State) -> Iterator[tuple[Tensor, State]]:
    for t in range(signal["q"].shape[1]):
        y, state = dispatch.step(update, {n: x[:, t : t + 1] for n, x in signal.items()}, state)
        yield y, state


def begun(update: StateUpdate, length: int, more: int) -> tuple[State, dict[str, Tensor], dict[str, Tensor]]:
    """A state after some tokens, these tokens, and all of them with more behind."""
    signal = example(update, length + more)
    state = dispatch.run(update, {n: x[:, :length] for n, x in signal.items()})[1]
    return state, {n: x[:, length:] for n, x in signal.items()}, signal


@pytest.mark.parametrize("monoid", MONOIDS)
def test_tokens_one_by_one_are_the_run(monoid: str) -> None:
    update = made(monoid)
    state, rest, whole = begun(update, 5, 80)  # past a buffer's end
    outputs = []
    for y, last_one in one_by_one(update, rest, state):
        outputs.append(y)
        state = last_one
    expected, last = reference.run(update, whole, time=1)
    assert checks.error((torch.cat(outputs, 1), state), (expected[:, 5:], last)) < EXACT


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("earlier", [0, 1, 5])
@pytest.mark.parametrize("massive", [False, True])
def test_one_carried_token_is_the_first_of_two(massive: bool, earlier: int, heads: int, window: int | None) -> None:
    """Alone it has a form of its own; before a token that carries nothing it goes through a block. Gradients too."""
    g = torch.Generator().manual_seed(earlier)

    def draw(*size: int) -> Tensor:
        return torch.randn(2, *size, dtype=torch.float64, generator=g).requires_grad_()

    pairs = earlier + 1
    inputs = [draw(4, 1, 6), draw(heads, pairs, 6), draw(heads, pairs, 3), draw(heads, 1, 6), draw(heads, 1, 6)]
    mass = draw(4, pairs) if massive else None
    inputs += [] if mass is None else [mass]

    def twice(x: Tensor) -> Tensor:
        return torch.cat((x, torch.zeros_like(x[..., :1, :])), -2)

    still = None if mass is None else torch.cat((mass, mass[..., -1:]), -1)
    alone = transported.attend(*inputs[:5], 0.4, mass, window=window)
    out, keys = transported.attend(*map(twice, inputs[:5]), 0.4, still, window=window)
    found = []
    for y, kept in (alone, (out[..., :1, :], keys[..., :-1, :])):
        loss = y.square().sum() + kept.square().sum()
        found.append((y, kept, *torch.autograd.grad(loss, inputs, materialize_grads=True)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("monoid", ["nothing", "gate", "rotation"])
def test_a_list_is_copied_when_it_doubles_only(monoid: str) -> None:
    update = made(monoid)
    state, rest, _ = begun(update, 40, 200)
    places = [state.theta[1].data_ptr() for _, state in one_by_one(update, rest, state)]
    keys = {state.theta[0].data_ptr() for _, state in one_by_one(update, rest, state)}
    assert len(set(places)) <= 3 and len(keys) <= 3  # 80, 160, 320 rows


def test_two_futures_of_one_list_do_not_meet() -> None:
    update = made("rotation")
    state, rest, whole = begun(update, 5, 12)
    *_, (_, state) = one_by_one(update, {n: x[:, :3] for n, x in rest.items()}, state)
    kept = pytree.tree_map(torch.clone, state)
    other = {n: x[:, 3:].flip(1) for n, x in rest.items()}
    futures = ({n: x[:, 3:] for n, x in rest.items()}, other)
    both = zip(*(one_by_one(update, future, state) for future in futures), strict=True)
    first, second = zip(*([y for y, _ in tokens] for tokens in both), strict=True)
    assert checks.error(state, kept) == 0, "a state that was continued has changed"
    assert checks.error(torch.cat(first, 1), reference.run(update, whole, time=1)[0][:, 8:]) < EXACT
    assert checks.error(torch.cat(second, 1), reference.run(update, other, kept, time=1)[0]) < EXACT


def test_what_is_made_of_a_growing_list_grows_by_itself() -> None:
    """Parts, batches, files, detached and cloned lists: whatever happens to the others."""
    update = made("gate")
    state, rest, _ = begun(update, 5, 9)
    *_, (_, state) = one_by_one(update, {n: x[:, :4] for n, x in rest.items()}, state)
    with io.BytesIO() as file:
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    first = pytree.tree_map(lambda x: x[:1] if x.ndim else x, state)
    others = {
        "the list": (state, slice(None)),
        "saved": (loaded, slice(None)),
        "detached": (pytree.tree_map(torch.detach, state), slice(None)),
        "a part of the batch": (first, slice(1)),
        "joined": (join([first, pytree.tree_map(lambda x: x[1:] if x.ndim else x, state)], 0), slice(None)),
        "without its first pair": (
            state._replace(theta=tuple(x[:, 1:] for x in state.theta)),
            slice(None),
        ),
    }
    for name, (start, rows) in others.items():
        tail = {n: x[rows, 4:] for n, x in rest.items()}
        kept = pytree.tree_map(torch.clone, start)
        outputs = [y for y, _ in one_by_one(update, tail, start)]
        assert checks.error(torch.cat(outputs, 1), reference.run(update, tail, kept, time=1)[0]) < EXACT, name


def test_lists_grow_in_inference_mode() -> None:
    update = made("nothing")
    state, rest, whole = begun(update, 40, 30)
    with torch.inference_mode():
        steps = list(one_by_one(update, rest, state))
        assert len({s.theta[1].data_ptr() for _, s in steps}) == 1
    assert checks.error(torch.cat([y for y, _ in steps], 1), reference.run(update, whole, time=1)[0][:, 40:]) < EXACT


def test_gradients_pass_through_steps() -> None:
    update = made("gate")
    signal = {n: x.requires_grad_() for n, x in example(update, 6).items()}
    state = update.init({n: x[:, 0] for n, x in signal.items()})
    found = torch.cat([y for y, _ in one_by_one(update, signal, state)], 1)
    expected, _ = reference.run(update, signal, time=1)
    pairs = itertools.product((found, expected), [list(signal.values())])
    first, second = (torch.autograd.grad(y.sin().sum(), x) for y, x in pairs)
    assert checks.error(first, second) < EXACT


def test_a_list_that_forgets_who_took_its_room_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plant: a buffer that thinks its room is free."""

    def careless(rows: Tensor, new: Tensor) -> Tensor:
        if rows._base is not None:
            setattr(rows._base, room._TAKEN, rows.shape[-2])
        return append(rows, new)

    append = room.append
    monkeypatch.setattr("axes.routes.attention.sequences.append", careless)
    with pytest.raises(AssertionError):
        test_two_futures_of_one_list_do_not_meet()


def test_differences_in_lists_of_tensors_are_seen() -> None:
    """What the tests above hold against each other are lists."""
    x = torch.ones(3, dtype=torch.float64)
    assert checks.error([x, (x, [x + 1])], [x, (x, [x])]) == 1
