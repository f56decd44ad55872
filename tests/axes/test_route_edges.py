"""What routes share: which pairs tokens see, steps of cells, numbers beside tensors, sums of filters, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from axes import dispatch, sequence
from axes.core.algorithms import Anchor, Step, Sum
from axes.core.costs import Alignment, Linear, SquaredError
from axes.core.memory import MLP
from axes.core.monoids import Decay, Scalar
from axes.core.rates import Per
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError
from axes.routes import given, network_kernel, select
from axes.routes.attention import errors
from axes.routes.attention.sequences import Alone
from axes.routes.attention.softmax import _four
from axes.routes.cells import GRU, SLSTM, VectorCell
from axes.routes.each import times
from axes.routes.finite import log_gates
from axes.routes.recomputed import Recomputed
from axes.routes.states import states
from axes.testing.examples import example

F64 = torch.float64


def test_tokens_see_what_is_stored_and_all_up_to_themselves() -> None:
    assert Alone(3).places(0).tolist() == [1, 2, 3] and Alone(2).places(4).tolist() == [5, 6]


def test_one_new_pair_stands_behind_what_all_of_a_batch_share() -> None:
    old, new = torch.randn(1, 3, 2), torch.randn(2, 1, 2)
    made = Alone(1).behind(old, new)
    assert torch.equal(made, torch.cat((old.expand(2, 3, 2), new), 1))
    assert torch.equal(Alone(2).behind(made, torch.cat((new, new), 1))[:, -2:], torch.cat((new, new), 1))


def test_heads_and_groups_are_one_dimension() -> None:
    x = torch.arange(48.0).reshape(2, 1, 3, 1, 4, 2)
    assert torch.equal(_four(x, True), x.reshape(2, 3, 4, 2))
    x = torch.arange(96.0).reshape(2, 1, 3, 2, 4, 2)
    assert torch.equal(_four(x, False, True), x.reshape(2, 6, 4, 2))
    assert _four(x[0, 0, 0, 0], True).shape == (1, 1, 4, 2)


@pytest.mark.parametrize("length", [100, 300])
def test_values_that_are_errors_solve_the_triangular_system(length: int) -> None:
    """Blocks of tokens as the whole system at once: (I + Diag(r) P) u = Diag(r) (v - P_old old)."""
    generator = torch.Generator().manual_seed(0)
    readers, values = (torch.randn(2, length, 3, generator=generator, dtype=F64) for _ in range(2))
    keys = torch.randn(2, length + 2, 3, generator=generator, dtype=F64)
    old = torch.randn(2, 2, 3, generator=generator, dtype=F64)
    made = errors.written(readers, keys, old, values, 0.5, errors.Seen(0.4, None))
    scores = (0.4 * readers @ keys.mT).masked_fill(torch.ones(length, length + 2).triu(2).bool(), -torch.inf)
    weights = 0.5 * scores.softmax(-1)
    system = torch.eye(length, dtype=F64) + weights[..., 2:]
    want = torch.linalg.solve(system, 0.5 * values - weights[..., :2] @ old)
    torch.testing.assert_close(made, want)


@pytest.mark.parametrize("cell", [GRU(), SLSTM()])
def test_a_step_of_a_cell_is_its_gates_and_what_it_writes(cell: VectorCell) -> None:
    generator = torch.Generator().manual_seed(0)
    x, u = (torch.randn(2, cell.gates, 3, generator=generator, dtype=F64) for _ in range(2))
    y = torch.randn(2, 3, generator=generator, dtype=F64)
    carry: Any = () if isinstance(cell, GRU) else (torch.randn(2, 3, dtype=F64), torch.rand(2, 3, dtype=F64))
    signal, made = cell.signal(x, u, carry)
    want = signal["decay"].exp() * y + signal["write"] * signal["v"]
    shown, last = cell.shown(want, made) if made else (want, made)
    out, now, held, _ = cell.walk(x, u, y, carry)
    torch.testing.assert_close((out, now), (shown, want) if made else (want, want))
    for a, b in zip(held, last, strict=True):
        torch.testing.assert_close(a, b)


def test_a_product_with_every_vector_has_both_gradients() -> None:
    w = torch.randn(2, 3, 4, dtype=F64, requires_grad=True)
    x = torch.randn(2, 4, dtype=F64, requires_grad=True)
    torch.testing.assert_close(times(w, x), (w @ x[..., None])[..., 0])
    for first, second in ((w, x), (w, x.detach()), (w.detach(), x)):
        assert torch.autograd.gradcheck(times, (first, second))


def test_states_of_all_tokens_have_derivatives_of_derivatives() -> None:
    drawn = [torch.randn(s, dtype=F64, requires_grad=True) for s in ((3, 1), (3, 2), (3, 2), (2, 2))]
    gate, value, key, start = drawn
    made, state = states(gate, value, key, start), start
    for t in range(3):
        state = gate[t, :, None] * state + value[t, :, None] * key[t]
        torch.testing.assert_close(made[t], state)
    once = torch.autograd.grad(made.square().sum(), drawn, retain_graph=True)
    again = torch.autograd.grad(made.square().sum(), drawn, create_graph=True)  # by operations
    torch.testing.assert_close(again, once)
    assert torch.autograd.gradgradcheck(states, tuple(drawn))


def test_gates_alone_are_supplied_as_logs() -> None:
    update = StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(Per("beta")))
    assert log_gates(update) == {"decay"}
    assert not log_gates(StateUpdate(Alignment(), monoid=Decay(Per("w")), algorithm=Step(Per("beta"))))


def test_what_a_call_looks_like_is_of_tensors_and_numbers_at_every_depth() -> None:
    x, found = torch.ones(2), list[Any]()
    assert given.look(((x, 0.5, None, (x, 3)), x), found) and found.count(x.shape) == 3 and 0.5 in found
    for other in ("a", object(), [x]):
        for tree in (other, (other,), ((x, other),), (((other,),),)):
            assert not given.look(tree, []), tree


def test_leading_dimensions_of_one_stand_for_all_of_the_others() -> None:
    def lead(k: Sequence[int], v: Sequence[int]) -> tuple[int, ...]:
        return tuple(given._pairs_lead(torch.empty(*k, 3), torch.empty(*v, 4)))

    assert lead((2, 1, 5), (2, 4, 5)) == lead((2, 4, 5), (2, 1, 5)) == lead((2, 4, 5), (2, 4, 5)) == (2, 4, 5)
    assert lead((5,), (2, 4, 5)) == (2, 4, 5) and lead((2, 4, 5), (5,)) == (5,)


def test_a_rate_that_is_a_number_is_one_of_every_packed_sequence() -> None:
    update = StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(Per("beta")))
    drawn = {n: x for n, x in example(update, batch=(1,), length=5).items() if n in ("q", "k", "v")}
    numbers = {"decay": -0.25, "beta": torch.tensor(0.5)}
    offsets, packed = torch.tensor([0, 2, 5]), {**drawn, **numbers}
    state = update.init({n: x[0, :2] for n, x in drawn.items() if isinstance(x, Tensor)})
    ways: tuple[Any, ...] = (None, "reference")
    for implementation in ways:
        made, _ = dispatch.run_packed(update, packed, state, offsets, implementation=implementation)
        for first, end in ((0, 2), (2, 5)):
            alone, _ = dispatch.run(update, {**{n: x[:, first:end] for n, x in drawn.items()}, **numbers}, time=1)
            torch.testing.assert_close(made[:, first:end], alone)


def test_filters_side_by_side_add_up_in_a_cascade() -> None:
    branches = tuple(StateUpdate(Linear(), monoid=Scalar(d), algorithm=Step(1.0)) for d in (0.5, 0.25, 0.75))
    side = Sum(branches, (1.0, -0.5, 0.25))
    update = StateUpdate(SquaredError(), algorithm=Step(0.05, at=Anchor(4), via=(side,)), memory=MLP())
    assert select.select(update).route == "cascade"
    drawn = example(update, batch=(2,), length=9)
    ways: tuple[Any, ...] = (None, "reference")
    made, want = (dispatch.run(update, drawn, time=1, implementation=n) for n in ways)
    torch.testing.assert_close(made[0], want[0])


def test_a_filter_of_a_chain_leaves_one_state_and_several_leave_several() -> None:
    update = sequence.TitansMatrix.update
    _, state = dispatch.run(update, example(update, batch=(2,), length=3), time=1)
    assert [type(x) for x in state.via] == [State] and isinstance(state.via[0], State)
    assert state.via[0].theta[0].shape == state.theta[0].shape


def test_kernels_of_two_layers_have_room_for_a_filter() -> None:
    for cls, layers in ((sequence.Titans, True), (sequence.TTTMLP, True), (sequence.TitansMatrix, False)):
        assert network_kernel.layered(cls.update) == layers
        assert (network_kernel.no_terms(cls.update) is None) == layers


def test_rows_that_need_not_meet_are_shared_out_until_they_fit_a_program() -> None:
    update = sequence.MemoraMatrix.update
    for width, fits in ((32, True), (512, True), (1024, False)):
        choice = select.select(update, "cuda:sm_90", torch.float32, {n: (2, 64, 4, width) for n in "qkv"})
        assert (choice.route == "token") == fits and fits != ("tiles of 16 x 1024" in choice.reason)


def test_an_implicit_step_alone_reads_the_length_of_its_key() -> None:
    pytest.importorskip("triton")
    from axes.kernels.substitution.chain import known_response
    from axes.routes import substitution_kernel

    for cls, implicit in ((sequence.Longhorn, True), (sequence.YaadMatrix, False)):
        made = substitution_kernel.response_of(cls.update, 8, 8, substitution_kernel.names_of(cls.update, {}))
        assert isinstance(made, substitution_kernel.Made)
        text = known_response(made.name)[0].text
        body = text[text.index("def respond") :].split("return")[0].partition("\n")[2]
        assert ("k2" in body) == implicit


def test_one_token_is_chosen_for_without_shapes_too() -> None:
    for cls in (sequence.DeltaProduct, sequence.DeltaNet):
        assert select.select_token(cls.update).route == select.select_token(cls.update, shapes={}).route
    shapes = {n: (2, 1, 4, 8) if n == "q" else (2, 1, 2, 4, 8) for n in "qkv"}
    assert select.select_token(sequence.DeltaProduct.update, "cuda:sm_90", shapes=shapes).implementation == "triton"


def test_an_operator_says_its_shapes_to_who_traces_without_numbers() -> None:
    def compute(thing: str, tensors: Sequence[Tensor], call: str) -> list[Tensor]:
        raise AxesError("nothing is computed of no numbers")

    operator: Recomputed[str] = Recomputed("edges", compute, lambda thing, tensors, call: [tensors[0].new_empty(3, 2)])
    text = operator.text("thing")
    (made,) = operator.operator([torch.empty(4, device="meta")], text, "")
    assert made.shape == (3, 2) and made.is_meta
