"""Parts of core, routes, optimizers and mixers whose planted faults no caller's test saw: each by what it promises."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import depth, dispatch, optim, sequence
from axes.core.algorithms import Read, Step, Sum
from axes.core.costs import Alignment, Given, Linear, SquaredError
from axes.core.declared import resolved
from axes.core.derived import no_gram
from axes.core.geometry import Ball, Entropic, Euclidean, Sphere, Whiten
from axes.core.geometry.low_rank import _cosines, lengths_one
from axes.core.geometry.mixing import Permutations, is_doubly_stochastic
from axes.core.memory import List as ListOf
from axes.core.memory import Matrix
from axes.core.monoids import Householder, Product, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth.attention import _cosines as waves
from axes.depth.checkpoints import _streams
from axes.depth.wired import Argument, NotResidual, Result
from axes.depth.wiring import wiring
from axes.depth.wrap import require_plain_start
from axes.errors import IllegalUpdate, ShapeError
from axes.optim.engine import choice
from axes.optim.engine.groups import both_too_long, by_sides
from axes.optim.engine.lists import readable
from axes.optim.engine.states import evaluation_point
from axes.programs.numbers import Origin
from axes.routes import dispatch as routes
from axes.routes import kernel_terms, opaque, token
from axes.routes.kernel_terms import _shared
from axes.routes.turned import still
from axes.sequence.charts import LogSigmoid
from axes.sequence.latent import Latent
from axes.testing.examples import example


def test_a_gate_between_layers_is_of_the_first_ones_dtype() -> None:
    wide, narrow = sequence.SoftmaxAttention(8, 2).double(), sequence.SoftmaxAttention(8, 2)
    beside = sequence.Beside(wide, narrow, gate=True)
    assert beside.weigh is not None and beside.weigh.weight.dtype == torch.float64


def test_weights_are_a_function_of_the_state_where_the_update_is_lazy_alone() -> None:
    theta = torch.tensor([[3.0, 4.0]])
    eager, lazy = (StateUpdate(Given(), Sphere("rows"), algorithm=Step(0.1, lazy=x)) for x in (False, True))
    assert torch.equal(evaluation_point({}, eager, theta), theta)
    torch.testing.assert_close(evaluation_point({}, lazy, theta), theta / 5)
    assert torch.equal(evaluation_point({}, StateUpdate(Given(), algorithm=Step(0.1)), theta), theta)


def test_gradients_of_few_bits_are_widened_before_a_program_reads_them() -> None:
    few = [torch.full((3,), 1.0, dtype=torch.bfloat16) for _ in range(2)]
    without: Any = SimpleNamespace(kernel=None)
    assert [g.dtype for g in readable(few, torch.float32, without)] == [torch.float32] * 2
    kernel: Any = SimpleNamespace(kernel=object())
    assert [g.dtype for g in readable(few, torch.float32, kernel)] == [torch.bfloat16] * 2
    mixed = [few[0], torch.ones(3)]
    assert [g.dtype for g in readable(mixed, torch.float32, kernel)] == [torch.float32] * 2


def test_of_several_gates_none_is_lost_in_the_frame_that_turns_along() -> None:
    scale, erase = Scalar(Per("decay")), Householder(Per("erase"), "k")
    monoid = Product((Rotation(Per("angle", "row-pair", "real")), scale, erase))
    update = StateUpdate(Alignment(), monoid=monoid, algorithm=Step(Per("beta")))
    assert still(update).parts().monoid == Product((scale, erase))


def test_heads_that_share_keys_are_read_once_a_group_and_no_others() -> None:
    x, own = torch.randn(2, 5, 1, 4), torch.randn(2, 5, 3, 4)
    same = x.expand(2, 5, 3, 4)
    assert [y.shape[2] for y in _shared(same, same)] == [1, 1]
    narrow = x[..., :1].expand(2, 5, 3, 1)
    assert [y.shape[2] for y in _shared(narrow, narrow)] == [1, 1]
    wide = own[..., :1].expand(2, 5, 3, 4)
    for q, k in ((own, same), (same, own), (own, own), (wide, same), (same, wide), (wide, wide)):
        assert all(a is b for a, b in zip(_shared(q, k), (q, k), strict=True))


def test_columns_of_length_one_forget_how_long_they_were() -> None:
    x = torch.randn(6, 3, dtype=torch.float64)
    for scale in (1e-6, 1.0, 1e6):
        made = lengths_one(scale * x, 6)
        torch.testing.assert_close(made, x / x.norm(dim=0))
    x[:, 1] *= 1e-14
    for scale in (1e-6, 1.0, 1e6):  # rounding beside the largest
        assert lengths_one(scale * x, 100)[:, 1].abs().max() == 0.0


@pytest.mark.parametrize(("n", "r"), [(6, 6), (7, 3), (4, 1)])
def test_cosines_are_orthonormal_and_the_constant_one_comes_last(n: int, r: int) -> None:
    made = _cosines(n, r, torch.zeros(1, dtype=torch.float64)).double()
    torch.testing.assert_close(made.mT @ made, torch.eye(r, dtype=torch.float64), atol=1e-6, rtol=0)
    constant = (made - made.mean(0)).norm(dim=0) < 1e-6
    assert constant.tolist() == [False] * (n > r) * r if r < n else [False] * (r - 1) + [True]


def test_sources_begin_orthonormal() -> None:
    made = waves(torch.zeros(4, 6, dtype=torch.float64))
    torch.testing.assert_close(made @ made.mT, torch.eye(4, dtype=torch.float64))


def test_rows_and_columns_that_sum_to_one_are_asked_for() -> None:
    eye = torch.eye(3)
    assert is_doubly_stochastic(eye, 1e-6) and is_doubly_stochastic(torch.full((3, 3), 1 / 3), 1e-6)
    wrong = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert not is_doubly_stochastic(wrong, 1e-6) and not is_doubly_stochastic(wrong.mT, 1e-6)
    assert not is_doubly_stochastic(torch.tensor([[2.0, -1.0], [-1.0, 2.0]]), 1e-6)


def test_a_mixture_of_permutations_begins_at_the_identity() -> None:
    mixing = Permutations()
    logits = mixing.identity_logits(torch.zeros(3, 3), -8.0)
    assert logits.tolist() == [0.0] + [-8.0] * 5
    assert (mixing.primal(logits) - torch.eye(3)).abs().max() < 0.01


def test_numbers_of_a_tuple_are_given_again_at_every_depth() -> None:
    (beta,), kept = Origin((0.9,)).numbers(), Sphere("rows")
    update = StateUpdate(Given(), kept, Scalar(beta), Step(1.0 - beta))
    made = resolved(update, (0.5,))
    assert made.monoid == Scalar(0.5) and made.algorithm == Step(0.5) and made.h is kept
    assert resolved(kept, (0.5,)) is kept


def test_slots_of_any_length_are_those_that_decode_an_error() -> None:
    encodes = sequence.LatticeEnc.update
    assert no_gram(encodes) is None
    said = no_gram(replace(encodes, h=Euclidean(), algorithm=replace(encodes.algorithm, lazy=True)))
    assert said is not None and "unit columns at every token, or of any length where they decode" in said


def test_leaves_without_the_leading_dimensions_stand_for_all_of_the_batch() -> None:
    update = StateUpdate(Alignment(), monoid=Scalar(0.5), algorithm=Step(1.0))
    given = example(update, batch=(2, 3), length=4)
    n, m = given["v"].shape[-1], given["k"].shape[-1]
    start = torch.randn(3, n, m, dtype=given["v"].dtype)
    got, _ = dispatch.run(update, given, time=2, weights=(start,))
    wanted, _ = dispatch.run(update, given, time=2, weights=(start.expand(2, 3, n, m).clone(),))
    torch.testing.assert_close(got, wanted)
    with pytest.raises(ShapeError, match=r"weights\[0\]"):
        dispatch.run(update, given, time=2, weights=(torch.zeros(4, n, m, dtype=start.dtype),))


def test_a_choice_is_asked_about_the_pairs_of_a_list_alone() -> None:
    listed = sequence.SoftmaxAttention.update
    chained = StateUpdate(Alignment(), algorithm=Step(1.0), memory=Matrix())
    for update, told in ((listed, True), (chained, False)):
        given = example(update, batch=(2,), length=3)
        assert ("pairs" in routes._shapes(given, dispatch.run(update, given, time=1)[1])) is told
    assert "pairs" not in routes._shapes({}, None)


def test_an_implementation_that_is_named_is_asked_for_at_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    select = routes.select_token

    def told(*given: Any) -> Any:
        asked.append(given[4])
        return select(*given)

    monkeypatch.setattr(routes, "select_token", told)
    update = StateUpdate(Alignment(), monoid=Scalar(0.5), algorithm=Step(1.0))
    token = {n: torch.randn(2, 1, 1, 3) for n in "qkv"}
    state = update.init({n: x[:, 0] for n, x in token.items()})
    dispatch.step(update, token, state, implementation="reference")
    dispatch.step(update, token, state)
    assert asked == ["reference", None]


def test_what_loops_is_one_operator_to_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    update = StateUpdate(Alignment(), monoid=Scalar(0.5), algorithm=Step(1.0))
    given: Any = {n: x for n, x in example(update, batch=(2,), length=3).items() if isinstance(x, Tensor)}
    loops: Any = SimpleNamespace(route="substitution", implementation="torch")
    assert not opaque.takes(update, loops, given, 3)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert opaque.takes(update, loops, given, 3)
    assert not opaque.takes(update, loops, {**given, "beta": 0.5}, 3)


def test_an_operators_shapes_are_those_of_what_it_computes() -> None:
    """Keys and values of different widths, so that nothing fits by chance; and nothing is handed back as it came."""
    update = StateUpdate(SquaredError(), monoid=Scalar(0.5), algorithm=Step(0.5))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 5, 1, 3, generator=generator) for _ in range(2))
    given = {"q": q, "k": k, "v": torch.randn(2, 5, 1, 4, generator=generator)}
    state = update.init({n: x[:, 0] for n, x in given.items()})
    call = " ".join(("chain", opaque._shape(state), *given))
    tensors = [*given.values(), *opaque._leaves(state)]
    shapes = [tuple(x.shape) for x in opaque._shapes(update, tensors, call)]
    assert shapes == [tuple(x.shape) for x in opaque._compute(update, tensors, call)]


def test_streams_of_a_checkpoint_are_told_by_its_rows() -> None:
    assert _streams("phi", {"coefficients": 8, "all": 6}) == 2 and _streams("phi", {"coefficients": 24, "all": 8}) == 4
    for rows in (3, 9):
        with pytest.raises(ShapeError, match="for n >= 2 streams"):
            _streams("phi", {"coefficients": rows, "all": 6})


def test_one_stream_of_deep_delta_is_read_as_it_is() -> None:
    mixer = depth.DeepDelta(4, streams=1)
    assert torch.equal(mixer.pre.detach(), torch.ones(1))


def test_a_residual_stream_is_added_to_at_once_where_nothing_else_is_asked() -> None:
    assert depth.Residual(4).added
    named = depth.Residual(4)
    named.implementation = "reference"
    assert not named.added


def test_matrices_of_a_stack_are_judged_by_their_own_sides() -> None:
    router: Any = SimpleNamespace(layout=lambda p: SimpleNamespace(shape=lambda x: x.shape))
    stack = [("w", nn.Parameter(torch.ones(3, 8, 6)))]
    for limit, sides in ((8, "both"), (7, "columns"), (5, "neither")):
        assert list(by_sides("SOAP", stack, limit, router)) == [sides]
    said = str(both_too_long("SOAP", "soap", stack, 4, router))
    assert said.startswith("SOAP: w, a matrix of 8 x 6, is longer than max_side=4 in both sides")


def test_a_tuple_by_itself_is_said_to_go_example_by_example_where_it_has_keys() -> None:
    whole = optim.AdamW([nn.Parameter(torch.ones(3))], foreach=False)
    assert "example by example" not in str(whole.report())


class _Remembers:
    def __init__(self, d: int, index: int, **factory: Any) -> None:
        pass

    def expand(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def read(self, streams: Any) -> tuple[Tensor, None]:
        return streams[0], None


def test_a_mixer_that_remembers_more_than_its_streams_is_not_wrapped() -> None:
    with pytest.raises(IllegalUpdate, match="_Remembers remembers more than its streams"):
        require_plain_start(_Remembers, {})  # type: ignore[arg-type]


class _Branches(nn.Module):
    """Keywords beyond its own would change what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        return x * 2 if more else x + self.f(x)


def test_keywords_that_a_block_cannot_hand_on_are_refused_and_others_are_bound() -> None:
    found = wiring(_Branches(), 4)
    assert not found.rest and found.fixed == {}
    assert found.bind("block", (1.0,), {}) == ({"x": 1.0}, {})
    with pytest.raises(NotResidual, match="unknown arguments scale"):
        found.bind("block", (1.0,), {"scale": 2.0})


def test_what_a_block_returns_behind_the_stream_is_what_it_was_given_or_called() -> None:
    block = _Branches()
    found = replace(wiring(block, 4), others=(Argument("mask"), Result(0, 1)))
    assert found.behind(block, {"mask": "m"}, [("y", "cache")]) == ["m", "cache"]


def test_latents_have_the_gates_that_the_tuple_asks_for() -> None:
    turn = Rotation(Per("angle", "pair", "real"))

    class Gated(sequence.SequenceLayer):
        name = "gated latents"
        update = StateUpdate(Alignment(), Entropic(), Product((turn, Scalar("forget"))), Step(), ListOf())
        block = Latent(charts=(("forget", LogSigmoid(bias=0.0)),))

    layer = Gated(16, 2, d_k=12, d_v=8)
    assert any(name.endswith("charts.forget") for name, _ in layer.named_modules())
    assert layer(torch.randn(1, 5, 16))[0].shape == (1, 5, 16)


def test_what_interprets_says_whether_it_goes_example_by_example(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SimpleNamespace(routes={"entrywise": "no", "stacks": "none"})
    monkeypatch.setattr(choice, "facts", lambda update, maximize: refused)
    keyed, plain = StateUpdate(SquaredError(), algorithm=Step(0.1)), StateUpdate(Given(), algorithm=Step(0.1))
    for update, says in ((keyed, "the tuple itself, example by example (entry"), (plain, "the tuple itself (entry")):
        assert choice._why_interpreted(update, {"maximize": False}).startswith(says)


def test_a_library_of_the_host_is_named_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "schedule", lambda update, maximize: SimpleNamespace(library=object()))
    monkeypatch.setattr(choice, "how", lambda group: "host")
    monkeypatch.setattr(choice, "_first", lambda update, group: "")
    for kind, says in (("cpu", "torch's own operations"), ("cuda", "torch's multi-tensor operations")):
        target: Any = SimpleNamespace(device=torch.device(kind))
        said = choice._entrywise(StateUpdate(Given(), algorithm=Step(0.1)), {"maximize": False}, target, "none")
        assert said.startswith(says)


class _Program:
    """What `_sizes` asks of a program: sums over rows, or none."""

    def __init__(self, met: bool) -> None:
        self.met, self.outputs = met, ()

    def needed(self, outputs: Any) -> Any:
        return outputs

    def reductions(self, outputs: Any, axis: str) -> bool:
        return self.met


@pytest.mark.parametrize("met", [False, True])
def test_a_walk_has_its_rows_and_keys_and_no_more_warps_than_there_are(met: bool) -> None:
    step: Any = _Program(met)
    rows, keys, warps, _ = token._sizes(step, None, {"theta": (True, True)}, (16, 64))
    assert (rows, keys) == (16, 64) and warps in (1, 2, 4)
    live = 2 + token._SPARE
    widest = 2 * token.REGISTERS // live // 64
    rows, keys, warps, _ = token._sizes(step, None, {"theta": (True, True)}, (1 << (widest.bit_length() - 1), 64))
    assert keys == 64 and warps <= 16


def test_what_a_filter_forgets_or_weighs_by_a_rate_is_computed_before_a_trace() -> None:
    named = Per("g", "scalar", "real")
    part = StateUpdate(Linear(), monoid=Scalar(0.5), algorithm=Step(1.0))

    def computes(**step: Any) -> bool:
        return StateUpdate(Given(), algorithm=Step(0.1, **step)).parts().computes_rates

    assert not computes(via=(part,)) and not computes(via=(Sum((part, part), (0.5, 0.5)),))
    assert computes(via=(Sum((part, part), (0.5, named)),)) and computes(via=(Sum((part, part), (named, 0.5)),))
    inner = replace(part, algorithm=Step(1.0, read=Read(named, 1.0)))
    assert computes(via=(inner,), read=Read(named, 1.0))  # what is a query's business in one is not in the other


def test_statistics_of_what_kronecker_makes_stand_there_alone() -> None:
    at, loose = Step(0.5), {"monoid": Scalar(0.5)}
    sides = tuple(StateUpdate(Linear(of), algorithm=at, **loose) for of in ("white-left", "white-right"))
    with pytest.raises(IllegalUpdate, match="is of what Kronecker makes with two FittedFactors"):
        StateUpdate(h=Whiten(sides, kind="kronecker"), cost=Linear(), monoid=Scalar(0.5), algorithm=Step(0.5))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_fused_step_holds_a_state_of_16_bits_as_it_came_and_others_in_32(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    import axes.kernels.step as fused

    seen: list[Any] = []

    def step(state: Tensor, *tokens: Tensor, into: Tensor | None, **options: Any) -> Tensor:
        seen.append((state.dtype, into is None))
        return tokens[2]

    monkeypatch.setattr(fused, "chain_step", step)
    token = [torch.zeros(2, 1, 1, 4) for _ in range(3)]
    for held, wanted in ((torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)):
        kernel_terms.one_token(in_place).scalar(*token, initial_state=torch.zeros(2, 1, 4, 4, dtype=held))
        assert seen[-1] == (wanted, in_place)


def test_a_filters_share_of_error_feedback_may_differ_by_datum() -> None:
    """Then no route has the numbers of every datum at once."""
    for share, computed in ((0.5, False), (Per("share", domain="positive"), True)):
        shown = StateUpdate(Linear(), Ball(), Scalar(0.9), Step(feedback=share))
        update = StateUpdate(Linear(), Euclidean(), Scalar(0.9), Step(via=(shown,)))
        assert update.parts().computes_rates is computed
