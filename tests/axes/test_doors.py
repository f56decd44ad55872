"""Wrong calls are refused at the door, in a sentence that names what is wrong, or mean what the reference means."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch

from axes import dispatch, sequence
from axes.core import reference
from axes.errors import AxesError, ShapeError, UnknownName, WrongType
from axes.routes.given import asked, require_call, require_packed
from axes.sequence import RWKV7, S4D, FoX, GatedDeltaNet, PaTH, SequenceLayer
from axes.testing.examples import example
from tests.doors import DOORS, spoil

FEW, MANY = 60, 2000


@pytest.mark.parametrize("door", DOORS)
def test_a_wrong_call_is_refused_by_name(door: str) -> None:
    wrong = [x for x in map(lambda seed: spoil(door, seed), range(FEW)) if not x.right]
    assert not wrong, "\n".join(map(str, wrong[:10]))


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_many_wrong_calls(door: str) -> None:
    wrong = [x for x in map(lambda seed: spoil(door, seed), range(FEW, MANY)) if not x.right]
    assert not wrong, "\n".join(map(str, wrong[:10]))


def signal(**changed: Any) -> dict[str, Any]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, 5, 4, *shape)

    made = {"q": draw(3), "k": 0.3 * draw(3), "v": draw(6), "decay": -draw().abs(), "beta": draw().sigmoid()}
    return {**made, **changed}


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"v": [1.0]}, TypeError, "dispatch.run: v must be a tensor .*, got a list: torch.tensor makes a tensor"),
        ({"q": numpy.ones(3)}, TypeError, "q must be a tensor .*, got a numpy.ndarray: torch.from_numpy"),
        ({"k": None}, WrongType, "k must be a tensor .*, got None"),
        ({"q": torch.ones(2, 4, 4, 3)}, ValueError, r"q must be \(2, 5, 4, 3\) beside k .* in dimension 1, got \(2, 4"),
        ({"v": torch.ones(2, 1, 4, 6)}, ShapeError, r"v must be \(2, 5, 4, 6\)"),
        ({"q": torch.ones(2, 5, 3, 3)}, ShapeError, "q has 3 heads and v 4, which is not a multiple"),
        ({"beta": torch.ones(2, 5, 4, 3)}, ShapeError, r"beta must be .*; a number, or a tensor \(\), stands for all"),
        ({"beta": torch.ones(4)}, ShapeError, r"beta must be \(2, 5, 4\)"),
        ({"beta": torch.ones(2, 5, 4).long()}, ShapeError, r"beta must be floating point, got torch.int64"),
        ({"beta": torch.ones(2, 5, 4, device="meta")}, ShapeError, "beta is on meta and v on cpu"),
        ({"decay": 0.5}, ShapeError, "decay is unit, the log of a gate, at most 0, not 0.5"),
        ({"beta": "1"}, WrongType, r"beta must be a number or a tensor \(scalar, positive\), got a str"),
        ({"betta": 1.0}, UnknownName, "unknown name in the signal of dispatch.run 'betta': did you mean beta?"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_signal(changed: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        dispatch.run(GatedDeltaNet.update, signal(**changed))
    assert isinstance(raised.value, AxesError)


@pytest.mark.parametrize(
    "changed",
    [
        {"beta": 0.5, "decay": -0.1},
        {"beta": torch.tensor(0.5)},
        {"beta": torch.rand(2, 5, 1), "decay": -torch.rand(1, 5, 4)},
        {"k": torch.rand(1, 5, 4, 3)},
        {"q": torch.rand(2, 5, 1, 3), "k": torch.rand(2, 5, 1, 3)},
    ],
)
def test_what_stands_for_all(changed: dict[str, Any]) -> None:
    given = signal(**changed)
    got, want = dispatch.run(GatedDeltaNet.update, given), reference.run(GatedDeltaNet.update, given, time=1)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("time", [1, 2])
def test_no_vector_stands_for_all_tokens(time: int) -> None:
    """One token of a key is no key of every token, wherever time stands."""
    given = {n: x.movedim(1, time) for n, x in signal().items()}
    for name in "qkv":
        with pytest.raises(ShapeError, match=rf"\b{name}\b"):
            dispatch.run(GatedDeltaNet.update, {**given, name: given[name].narrow(time, 0, 1)}, time=time)


def test_a_state_is_one_of_this_tuple_and_input() -> None:
    _, state = dispatch.run(GatedDeltaNet.update, signal())
    for bad, says in (
        (state._replace(theta=(state.theta[0][:1].expand(3, -1, -1, -1),)), "a state of 3 sequences for 2"),
        (state._replace(theta=(state.theta[0][..., :2],)), r"state.theta\[0\] must be \(2, 4, 6, 3\) .* k of width 3"),
        (state._replace(theta=(state.theta[0].double(),)), r"state.theta\[0\] is torch.float64"),
        (state._replace(count=1), "state.count must be a tensor, got an int"),
        (FoX(8, heads=2).init_state(2).memory, "state.theta has 3 parts, in a state of this tuple 1"),
        ((state,), "state must be a State"),
    ):
        with pytest.raises(ShapeError, match=says):
            dispatch.run(GatedDeltaNet.update, signal(), bad)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="one token has 1 in dimension 1 of q, k and v, not 5: call run"):
        dispatch.step(GatedDeltaNet.update, signal(), state)


@pytest.mark.parametrize("cls", [GatedDeltaNet, RWKV7, FoX])
def test_a_layer_takes_its_own_state(cls: type[SequenceLayer]) -> None:
    layer, x = cls(8, heads=2), torch.randn(2, 3, 8)
    state = layer(x)[1]
    other = cls(12, heads=2).init_state(2)
    for bad in (other, state.memory, [state], layer.init_state(3), state._replace(tails=(*state.tails, x))):
        for call in (lambda s: layer(x, s), lambda s: layer.step(x[:, 0], s)):
            with pytest.raises(ShapeError, match=rf"{cls.__name__}: .*\bstate\b"):
                call(bad)
    layer(x, state)  # what was refused was not remembered as right
    with pytest.raises(ShapeError, match="state"):
        layer(x, other)


@pytest.mark.parametrize("cls", (*sequence.ALL, *sequence.PREDICTED), ids=lambda cls: cls.name)
def test_keys_of_width_one_run_or_are_refused(cls: type[SequenceLayer]) -> None:
    """Two heads of a width of two; layers whose keys are narrower than values would have none."""
    try:
        layer = cls(2, heads=2)
    except ShapeError as error:
        assert re.search("width must be even, got 1|leaves heads=2 keys of width 0", str(error))
        return
    x = torch.randn(2, 3, 2)
    y, state = layer(x)
    one, _ = layer.step(x[:, 0], state)
    assert y.shape == (2, 3, 2) and one.shape == (2, 2) and y.isfinite().all()


def test_a_call_that_was_seen_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.routes import given

    update = GatedDeltaNet(8, heads=2).update
    asked(update).forget()
    require_call("here", update, signal(), None)
    monkeypatch.setattr(given, "require_signal", lambda *_: pytest.fail("asked again"))
    require_call("here", update, signal(), None)
    monkeypatch.undo()
    for changed in ({"v": torch.ones(2, 4, 4, 6)}, {"beta": torch.ones(2, 5, 4).int()}, {"decay": 1.0}):
        with pytest.raises(ShapeError, match=re.escape(next(iter(changed)))):
            require_call("here", update, signal(**changed), None)
    for _ in range(100):  # of looks no more than so many are kept
        require_call("here", update, signal(beta=torch.rand(()).item()), None)
    assert len(asked(update).looks) <= 64


def test_packed_sequences_that_were_seen_are_asked_for_their_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.routes import given

    update = GatedDeltaNet(8, heads=2).update
    asked(update).forget()
    packed = {name: x[:1] for name, x in signal().items()}
    state = update.init({name: x[:, 0].expand(2, *x.shape[2:]) for name, x in packed.items() if name in "kv"})
    require_packed("here", update, packed, state, torch.tensor([0, 2, 5]))
    monkeypatch.setattr(given, "require_signal", lambda *_: pytest.fail("asked again"))
    require_packed("here", update, packed, state, torch.tensor([0, 5, 5]))
    for wrong in ([0, 2, 4], [1, 2, 5], [0, 6, 5]):
        with pytest.raises(ShapeError, match="cu_seqlens must rise from 0 to T = 5"):
            require_packed("here", update, packed, state, torch.tensor(wrong))
    monkeypatch.undo()
    with pytest.raises(ShapeError, match="state"):  # a boundary more, and no state for it
        require_packed("here", update, packed, state, torch.tensor([0, 2, 3, 5]))


def test_angles_of_pairs_may_be_one_number() -> None:
    given = {n: torch.randn(2, 5, 3, 4) for n in ("q", "k", "v")} | {"decay": -torch.rand(2, 5, 3, 2)}
    number, same = ({**given, "angle": x} for x in (-1.5, torch.full((2, 5, 3, 2), -1.5)))
    for run in (dispatch.run, reference.run):
        torch.testing.assert_close(run(S4D.update, number, time=1), run(S4D.update, same, time=1))


def test_a_list_in_fewer_bits_is_moved_by_what_has_more() -> None:
    """Reflections of float32 over keys of float16, in the interpreter as by routes."""
    given = {n: torch.randn(2, 5, 3, 4) for n in ("q", "k", "v")} | {"beta": torch.rand(2, 5, 3)}
    given["w"] = torch.nn.functional.normalize(torch.randn(2, 5, 3, 4), dim=-1)
    state = reference.run(PaTH.update, given, time=1)[1]
    halves = state._replace(theta=tuple(x.half() for x in state.theta))
    got, want = (run(PaTH.update, given, halves, time=1)[0] for run in (dispatch.run, reference.run))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["lru", "s5", "s4d", "mamba3", "mamba3-mimo", "mla"])
@pytest.mark.parametrize("angle", [0.5, torch.tensor(-0.5)], ids=["number", "tensor"])
def test_one_number_is_the_rate_of_every_pair(name: str, angle: Any) -> None:
    update = {cls.name: cls for cls in sequence.ALL}[name].update
    given = example(update, batch=(2,), length=5)
    each = {**given, "angle": torch.full_like(given["angle"], float(angle))}
    for run in (dispatch.run, reference.run):
        got, want = (run(update, signal, time=1)[0] for signal in ({**given, "angle": angle}, each))
        torch.testing.assert_close(got, want)
