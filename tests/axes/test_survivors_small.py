"""Small functions that many call and whose planted faults no caller's test saw: each by what it promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import dispatch, optim
from axes.core.algorithms import Anchor, Held, Momentum, Read, Step
from axes.core.chain import chain
from axes.core.costs import Alignment, Given, Huber, Linear, Ridge, SquaredError
from axes.core.derived import erases_along_key
from axes.core.geometry import Ball, Context, Euclidean, Lq, RankOneWhiten, RelativeStep, Sphere
from axes.core.geometry.low_rank import PowerFactors
from axes.core.geometry.mixing import Birkhoff
from axes.core.geometry.preconditioners import Eigenbasis, InverseRoot, Kronecker
from axes.core.geometry.spectral import solved
from axes.core.memory import Fenwick, Matrix
from axes.core.monoids import Decay, Diagonal, Householder, Identity, Product, Rotation, Scalar
from axes.core.rates import SEEN, Count, Per, resolve
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, IllegalUpdate, NotFiniteError, WrongType
from axes.optim.engine.layers import Products
from axes.optim.rules.wrappers import nesterov
from axes.programs.numbers import Number, Origin
from axes.routes import by_rows, spans
from axes.routes.counts import period, phases
from axes.routes.finite import require_finite
from axes.routes.parameters import are_plain, some_parameter
from axes.routes.precision import autocast, own_precision, taken_in
from axes.routes.recomputed import Recomputed
from axes.routes.turned import still
from axes.sequence import DeltaProduct
from axes.testing.examples import example


class _Elsewhere(Tensor):
    """A parameter of another kind, as parts on several devices are."""


def test_plain_parameters_are_of_torch_alone_at_every_depth() -> None:
    foreign = nn.Linear(2, 2)
    foreign._parameters["weight"] = torch.ones(2, 2).as_subclass(_Elsewhere)  # type: ignore[assignment]
    empty = nn.Module()
    empty.register_module("none", None)
    bare = nn.Linear(2, 2, bias=False)  # its bias is None
    assert are_plain(bare) and are_plain(empty)
    assert are_plain(nn.Sequential(bare, nn.Sequential(empty, nn.Linear(2, 2))))
    assert not are_plain(foreign) and not are_plain(nn.Sequential(bare, nn.Sequential(foreign)))
    foreign.extra = bare  # what is beneath is plain, and it is not
    assert not are_plain(foreign)


def test_one_parameter_stands_for_a_module() -> None:
    inner, empty = nn.Linear(2, 2), nn.Module()
    empty.register_module("none", None)
    assert some_parameter(nn.Module()) is None and some_parameter(empty) is None
    assert some_parameter(inner) is inner.weight and some_parameter(nn.Sequential(inner)) is inner.weight
    empty.register_module("deep", nn.Sequential(nn.Sequential(inner)))
    assert some_parameter(empty) is inner.weight


def test_autocast_is_heard_of_and_left() -> None:
    x, none = torch.ones(2, 2), torch.ones(2, 2, device="meta")
    assert not autocast(x) and not autocast(none) and taken_in(x) == taken_in(none) == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast(x) and not autocast(none) and taken_in(x) == torch.bfloat16
        assert (x @ x).dtype == torch.bfloat16
        with own_precision(x):
            assert (x @ x).dtype == torch.float32
    with own_precision(x):
        assert not autocast(x)


def _sides() -> tuple[StateUpdate, ...]:
    """Statistics of rows and of columns."""
    return tuple(StateUpdate(Linear(of), monoid=Scalar(0.9)) for of in ("row-square", "column-square"))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "axis": (lambda: Sphere("diagonal"), "Sphere: axis 'diagonal'"),  # type: ignore[arg-type]
    "no radius": (lambda: Sphere(radius=0.0), "Sphere: radius must be positive"),
    "endless radius": (lambda: Sphere(radius=math.inf), "Sphere: radius must be positive"),
    "radius by row": (lambda: Ball(Per("r", "row")), "Ball: the radius must be scalar"),
    "radius of a ball": (lambda: Ball(0.0), "Ball: radius must be positive"),
    "norm": (lambda: Ball(norm="l1"), "Ball: norm 'l1'"),  # type: ignore[arg-type]
    "share of an error": (lambda: Step(feedback=1.5), "Step: feedback is a share in"),
    "no step back": (lambda: Step(feedback=-0.5), "Step: feedback is a share in"),
    "divisor": (lambda: PowerFactors(0), "PowerFactors: divisor must be an integer >= 1"),
    "half a divisor": (lambda: PowerFactors(1.5), "PowerFactors: divisor must be an integer"),  # type: ignore[arg-type]
    "eps of rows": (lambda: RankOneWhiten(_sides(), -1.0), "RankOneWhiten: eps must be positive and finite"),
    "products of no products": (lambda: InverseRoot(precision="tf32"), "InverseRoot: precision is of products"),
    "a size of nothing": (lambda: Per("x", "own", size=0), r"Per\('x'\): a rate of shape own has a size"),
    "a size beside a shape": (lambda: Per("x", "row", size=3), r"Per\('x'\): a rate of shape own has a size"),
    "root": (lambda: InverseRoot(method="qr"), "InverseRoot: method 'qr'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", REFUSED)
def test_parts_refuse_by_their_own_name(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(IllegalUpdate, match=f"^{message}"):
        make()


def test_the_least_that_is_taken() -> None:
    assert Step(feedback=1.0).feedback == 1.0 and Per("x", "own", size=1).size == 1 and PowerFactors(1).divisor == 1


def test_what_has_no_direction_has_no_derivative_either() -> None:
    zero = torch.zeros(2, 3, requires_grad=True)
    point = Sphere().primal(zero)
    assert not point.any() and not torch.autograd.grad(point.sum(), zero)[0].any()


def test_a_step_relative_to_weights_of_zero_is_the_least() -> None:
    step, weights = RelativeStep(Euclidean(), 0.25), torch.zeros(2, 3, requires_grad=True)
    made = step.primal(torch.full((2, 3), 2.0), Context(weights=weights))
    assert torch.equal(made, torch.full((2, 3), 0.5))
    assert torch.autograd.grad(made.sum(), weights)[0].isfinite().all()
    torch.testing.assert_close(
        step.primal(torch.ones(2, 3), Context(weights=torch.full((2, 3), -3.0))), torch.full((2, 3), 3.0)
    )
    with pytest.raises(IllegalUpdate, match="RelativeStep scales by the weights"):
        step.primal(torch.ones(2, 3))


def test_of_links_by_a_norm_the_euclidean_one_alone_is_the_identity() -> None:
    theta = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    for p in (1.5, 2.0, 3.0, 4.0):
        h = Lq(p)
        assert h.is_identity == h.linear == h.entrywise == torch.equal(h.primal(theta), theta) == (p == 2)


@pytest.mark.parametrize("kind", ["coordinate", "norm"])
def test_an_implicit_step_on_hubers_cost_is_stationary(kind: Any) -> None:
    """The residual r of a step c is the slope where the step ends: r = H'(e - c r)."""
    e = torch.tensor([[0.1, -0.2, 0.05], [3.0, -4.0, 0.5]], dtype=torch.float64)
    for c in (0.0, 0.5, 3.0, torch.tensor([0.5, 2.0, 0.1], dtype=torch.float64)):
        r = Huber(0.7, kind).residual(e, torch.zeros_like(e), c)
        end = e - c * r
        size = end.abs() if kind == "coordinate" else torch.linalg.vector_norm(end, dim=-1, keepdim=True)
        torch.testing.assert_close(r, end * (0.7 / size).clamp_max(1.0), rtol=0, atol=1e-9)


def test_a_ridge_is_added_to_what_is_solved_with() -> None:
    generator = torch.Generator().manual_seed(0)
    root, theta = (torch.randn(2, 3, n, generator=generator, dtype=torch.float64) for n in (2, 3))
    made = solved(theta, root @ root.mT, 0.5)
    assert made is not None
    torch.testing.assert_close(made @ (root @ root.mT + 0.5 * torch.eye(3, dtype=torch.float64)), theta)


def test_square_matrices_are_asked_for() -> None:
    for part in (InverseRoot(), Birkhoff()):
        with pytest.raises(AxesError, match="square"):
            part.primal(torch.ones(2, 3))


def test_a_point_on_the_edge_is_in_the_set() -> None:
    edge = torch.tensor([[3.0, 4.0]])
    assert Sphere("rows", 5.0).contains(edge, 0.0) and not Sphere("rows", 4.0).contains(edge, 0.5)
    assert Ball(5.0).contains(edge, 0.0) and not Ball(4.0).contains(edge, 0.5)
    torch.testing.assert_close(Ball(2.5).primal(edge), edge / 2)  # half of a norm of 5
    torch.testing.assert_close(Ball(2.5, "rms").primal(edge), edge * (2.5 * 2**0.5 / 5.0))


@pytest.mark.parametrize("kind", ["ema", "sum"])
def test_nesterov_reads_the_newest_gradient_and_the_buffer_after_it(kind: Any) -> None:
    """w g + beta m' of m' = beta m + w g: (beta^2) m + (w + beta w) g."""
    w = 0.25 if kind == "ema" else 1.0
    for ahead in (False, True):
        (found,) = StateUpdate(Given(), algorithm=Step(via=(Momentum(0.75, kind, nesterov=ahead),))).normal().filters()
        step, wanted = found.parts().step, Read(0.5625, 1.75 * w) if ahead else None
        assert step.rate == w and step.read == wanted


def test_nesterov_of_the_last_filter_leaves_those_before_it() -> None:
    first = StateUpdate(Linear(), monoid=Scalar(0.5), algorithm=Step(0.5))
    last = StateUpdate(Linear(), monoid=Scalar(0.75), algorithm=Step(0.25))
    step = Step(Per("lr"), via=(first, last))
    one, two = nesterov(StateUpdate(Given(), monoid=Decay(Per("weight_decay")), algorithm=step)).filters()
    assert one == first.normal() and two.parts().step.read == Read(0.5625, 0.25 + 0.75 * 0.25)


def test_the_first_token_that_is_not_finite_is_named() -> None:
    x = torch.zeros(2, 6, 3)
    x[0, 4, 1], x[1, 2, 0] = math.inf, math.nan
    place = r"token 2 of sequence 1, entry \(1, 2, 0\) of \(2, 6, 3\)"
    with pytest.raises(NotFiniteError, match=f"f: v is not finite: nan at {place}"):
        require_finite("f", {"v": x})
    with pytest.raises(NotFiniteError, match=r"f: lr is not finite: nan, entry \(1,\) of \(2,\)$"):
        require_finite("f", {"lr": torch.tensor([0.0, math.nan])})
    require_finite("f", {"g": -x.abs().nan_to_num(0.0, math.inf)}, gates=("g",))  # a gate of -inf forgets


def test_spans_end_where_an_anchor_is_refreshed() -> None:
    assert spans.sizes(10, 4, "prev", 0) == [4, 4, 2]
    assert spans.sizes(10, 4, Anchor(6), 3) == [3, 4, 2, 1]
    for start in range(7):
        ends = torch.tensor([start, *spans.sizes(12, 4, Anchor(6), start)]).cumsum(0)
        assert ends[-1] == start + 12 and all(a // 6 == (b - 1) // 6 for a, b in zip(ends, ends[1:], strict=False))


def test_what_has_no_time_is_the_same_in_every_span() -> None:
    """At dim 1: numbers, and tensors of one dimension, are of every token."""
    signal = {"k": torch.arange(6.0).view(1, 3, 2), "lr": torch.ones(2), "one": 3.0}
    first, second = spans.split(signal, 1, [2, 1])
    assert torch.equal(first["k"], signal["k"][:, :2]) and torch.equal(second["k"], signal["k"][:, 2:])
    for part in (first, second, spans.datum(signal, 1, 2)):
        assert part["lr"] is signal["lr"] and part["one"] == 3.0
    assert torch.equal(spans.datum(signal, 1, 2)["k"], signal["k"][:, 2])  # type: ignore[arg-type]


def test_when_a_token_is_the_same_again() -> None:
    plain, anchored = StateUpdate(SquaredError()), StateUpdate(SquaredError(), algorithm=Step(at=Anchor(3)))
    held = StateUpdate(Linear("left"), Eigenbasis(), Scalar(0.5), Step(0.5, at=Held(4)))
    always = StateUpdate(SquaredError(), algorithm=Step(at=Anchor(1)))
    assert [period(u) for u in (plain, anchored, always)] == [None, 3, None]
    assert period(held) == 0 and period(StateUpdate(Linear(), algorithm=Step(0.5, start="first"))) == 0
    state = anchored.init({"k": torch.zeros(2), "v": torch.zeros(2)})._replace(count=torch.tensor([4, 7, 5]))
    assert phases(anchored, state, 3) == [1, 1, 2] and len(set(phases(plain, state, 3))) == 1


def test_passes_that_observe_are_means_over_their_own_examples() -> None:
    """Gradients of a mean are a share of each example's: squares are that share twice."""
    x, g = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    seen, trained = Products(), Products()
    seen.add(x, g, g / 4, True)
    trained.add(x, g, g, False)
    for (_, a, m), (_, b, n) in zip(seen.sums.values(), trained.sums.values(), strict=True):
        torch.testing.assert_close(a, b)
        assert m == n == 4


@pytest.mark.parametrize(("gates", "left"), [((), "prev"), ((Scalar("decay"),), "gated")])
def test_in_the_frame_that_turns_along_every_other_gate_is_left(gates: tuple[Any, ...], left: str) -> None:
    """Where nothing is left, a gradient after it is one before."""
    turns = Rotation(Per("angle", "row-pair", "real"))
    monoid = Product((turns, *gates)) if gates else turns
    update = StateUpdate(SquaredError(), monoid=monoid, algorithm=Step(0.5, at="gated"))
    made = still(update).parts()
    assert made.step.at == left and made.monoid == (gates[0] if gates else Identity())
    signal = example(update, batch=(1,), length=5)
    torch.testing.assert_close(
        dispatch.run(update, signal, time=1), dispatch.run(update, signal, time=1, implementation="reference")
    )


def test_what_is_no_parameter_is_refused_as_params() -> None:
    for given in ("weights", 1.0, None):
        with pytest.raises(WrongType, match="SGD: params must be a module, or an iterable"):
            optim.SGD(given)  # type: ignore[arg-type]


def test_vectors_beside_matrices_are_stepped_by_plain_adamw() -> None:
    """Gradients that fall: the largest of their squares would hold the step back."""
    one, two = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
    with torch.no_grad():
        one.bias.fill_(1.0)
    muon = optim.Muon(one, lr=0.1, weight_decay=0.0)
    adam = optim.AdamW([two], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for g in (10.0, 1.0, 0.1, 0.01):
        one.weight.grad, one.bias.grad, two.grad = torch.ones(2, 3), torch.full((2,), g), torch.full((2,), g)
        muon.step()
        adam.step()
    torch.testing.assert_close(one.bias, two)


def test_weights_of_exponentiated_gradients_stay_on_the_simplex() -> None:
    w = nn.Parameter(torch.tensor([0.2, 0.3, 0.5]))
    w.grad = torch.tensor([1.0, -1.0, 2.0])
    optim.ExponentiatedGradient([w], lr=0.5).step()
    expected = torch.tensor([0.2, 0.3, 0.5]) * torch.exp(-0.5 * torch.tensor([1.0, -1.0, 2.0]))
    torch.testing.assert_close(w.detach(), expected / expected.sum())


def test_a_convolution_of_two_groups_is_no_matrix() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3, groups=2))
    said = str(optim.Muon(model).report())
    assert said.count("grouped convolution") == 1


def test_what_is_held_without_its_datum_is_no_function_of_nothing() -> None:
    held = Held(2, datum="excluded")
    assert [held.before(n) for n in range(6)] == [False, False, False, True, False, True]
    assert not Held(1, datum="excluded").before(1) and Held(1, datum="excluded").before(2)


def test_a_read_point_of_the_update_is_a_querys_business_and_of_a_filter_is_not() -> None:
    """`computes_rates` asks whoever steps the tuple to make rates before anything is traced."""
    named = Per("g", "scalar", "real")

    def made(read: Read | None, inner: Read | None = None) -> bool:
        via = (StateUpdate(Linear(), monoid=Scalar(0.5), algorithm=Step(1.0, read=inner)),) if inner else ()
        return StateUpdate(Given(), algorithm=Step(0.1, via=via, read=read)).parts().computes_rates

    assert not made(None) and not made(Read(named, 1.0)) and not made(Read(1.0, named))
    assert not made(None, Read(1.0, 1.0))
    assert made(None, Read(named, 1.0)) and made(None, Read(1.0, named))


def test_a_ridge_pulls_on_the_gated_state_where_the_gradient_comes_after_the_gate() -> None:
    update = StateUpdate(
        Ridge(SquaredError(), 0.3),
        monoid=Scalar(Per("decay", "scalar", "unit")),
        algorithm=Step(Per("beta"), at="gated"),
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (0.3 * torch.randn(2, 7, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    decay = -2.0 * torch.rand(2, 7, generator=generator, dtype=torch.float64)
    given = {"q": q, "k": k, "v": v, "decay": decay, "beta": torch.full((2, 7), 0.4, dtype=torch.float64)}
    assert dispatch.select(update).route == "chain"
    state, wanted = torch.zeros(2, 3, 3, dtype=torch.float64), []
    for t in range(7):
        gated = decay[:, t].exp()[:, None, None] * state
        error = v[:, t] - (gated @ k[:, t, :, None])[..., 0]
        state = gated + 0.4 * (error[:, :, None] * k[:, t, None, :] - 0.3 * gated)
        wanted.append((state @ q[:, t, :, None])[..., 0])
    torch.testing.assert_close(dispatch.run(update, given, time=1)[0], torch.stack(wanted, 1))


def test_kronecker_sides_are_named() -> None:
    with pytest.raises(IllegalUpdate, match="on='up' is not one of"):
        Kronecker((), on="up")  # type: ignore[arg-type]


def test_gates_by_rows_are_taken_where_nothing_else_is_by_rows() -> None:
    update = StateUpdate(
        Alignment(), monoid=Diagonal(Per("gate", "row", "unit"), "row"), algorithm=Step(Per("beta")), memory=Matrix()
    )
    given = example(update, batch=(2,), length=5)
    c = chain(update, {n: x.movedim(1, -2) if isinstance(x, Tensor) and x.ndim > 2 else x for n, x in given.items()})
    assert by_rows.takes(c)
    assert c.gate is not None
    assert not by_rows.takes(replace(c, rows=False)) and not by_rows.takes(replace(c, gate=None))
    assert not by_rows.takes(replace(c, gate=c.gate.expand(*c.gate.shape[:-1], 2)))
    for name in ("a", "block", "angle", "dense"):
        assert not by_rows.takes(replace(c, **{name: torch.zeros(1)})), name
    assert not by_rows.takes(replace(c, key=c.key[..., :1]))  # entries
    several = c.key.expand(*c.key.shape[:-4], 3, *c.key.shape[-3:])
    assert not by_rows.takes(replace(c, key=several))  # rows with keys of their own


def test_a_state_of_another_kind_is_named_as_what_it_is() -> None:
    update = StateUpdate(Alignment(), monoid=Scalar(0.5), algorithm=Step(1.0))
    given = example(update, batch=(2,), length=3)
    state = dispatch.run(update, given, time=1)[1]._replace(stats=1)  # type: ignore[arg-type]
    with pytest.raises(WrongType, match=r"^dispatch\.run: state\S* must be a tuple, as init makes it, got an int"):
        dispatch.run(update, given, state, time=1)


@pytest.mark.parametrize("step", [Step(Per("beta"), writes=2), Step(Per("beta"), write="max")], ids=["two", "max"])
def test_levels_take_one_pair_added(step: Step) -> None:
    with pytest.raises(IllegalUpdate, match="levels begin at zero and take one pair"):
        StateUpdate(Alignment(), monoid=Scalar(Per("decay")), algorithm=step, memory=Fenwick(4))


def test_formulas_of_numbers_are_numbers() -> None:
    rate = Per("a") * 2.0 + 1.0
    assert float(resolve(rate, {"a": 3.0})) == 7.0
    made = torch.as_tensor(resolve(rate, {"a": torch.tensor([3.0, 4.0])}))
    torch.testing.assert_close(made, torch.tensor([7.0, 9.0]))


def test_an_erase_of_its_own_strength_is_one_where_errors_do_not_erase_too() -> None:
    monoid = Product((Scalar(Per("decay")), Householder(Per("erase"), "k")))
    assert erases_along_key(StateUpdate(Alignment(), monoid=monoid, algorithm=Step(Per("beta"))))
    assert not erases_along_key(StateUpdate(SquaredError(), monoid=monoid, algorithm=Step(Per("beta"))))


def test_several_writes_may_have_one_strength() -> None:
    update = DeltaProduct.update
    given = example(update, batch=(2,), length=4)
    number = {**given, "beta": 0.25}
    each = {**given, "beta": torch.full_like(given["beta"], 0.25)}
    got, wanted = (dispatch.run(update, x, time=1)[0] for x in (number, each))
    torch.testing.assert_close(got, wanted)


def test_a_formula_of_hyperparameters_that_move_remembers_them() -> None:
    """Of whatever operation: it is a number that knows how it was made, not the tensor that a logarithm makes."""
    (rate,) = Origin((0.75,)).numbers()
    made = resolve(rate - Count() ** -0.5, {SEEN: torch.tensor(3)})
    assert isinstance(made, Number) and made.value == 0.25


def test_what_an_operator_returns_shares_no_memory() -> None:
    """Inputs handed on, parts of them and one result named twice: a compiler may write to each."""
    made = Recomputed[str]("shares_nothing", _handed_on, lambda thing, tensors, call: tensors)
    x = torch.arange(6.0).view(2, 3)
    out = made._forward([x], made.text("it"), "")
    for got, want in zip(out, (x, x[1], x + 1, x + 1), strict=True):
        assert torch.equal(got, want)
    assert len({y.untyped_storage().data_ptr() for y in (x, *out)}) == 5


def _handed_on(thing: str, tensors: Any, call: str) -> list[Tensor]:
    (x,) = tensors
    new = x + 1
    return [x, x[1], new, new]
