"""Each refusal names its reason; and a random tuple is either refused or runs, finite and deterministic."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from systems import DATA, second_moment
from torch import Tensor

from axes.core.algorithms import Anchor, Held, Momentum, Read, Step, Sum
from axes.core.costs import Alignment, CrossEntropy, Given, Huber, HuberSwitch, Linear, Ridge, SquaredError
from axes.core.declared import Declared, _numbers
from axes.core.geometry import (
    Cautious,
    Composite,
    Context,
    Entropic,
    Euclidean,
    Geometry,
    Kronecker,
    Lq,
    SignBall,
    Sphere,
    TrustRatio,
    Whiten,
)
from axes.core.geometry.bregman import NO_CONTEXT
from axes.core.legality import factors, gates
from axes.core.memory import (
    MLP,
    Entries,
    Factors,
    LayerNormMatrix,
    Leaves,
    List,
    Matrix,
    Parameter,
    RankOne,
    Slots,
    times,
)
from axes.core.monoids import DPLR, Decay, Diagonal, Hadamard, Householder, Identity, Product, Rotation, Scalar, Zero
from axes.core.rates import Per, Signal
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.testing import checks, examples, strategies

ALIGN, SQUARED = Alignment(), SquaredError()
EMA = StateUpdate(Linear(), monoid=Scalar(0.9), algorithm=Step(0.1))

# What is declared, and what the refusal says.
REFUSED = {
    "no cost": (dict(cost=Matrix()), "cost must be a Cost"),
    "no geometry": (dict(cost=ALIGN, h=3), "h must be a Geometry"),
    "keys for a given gradient": (dict(cost=Given(), memory=Matrix()), r"use Parameter\(\)"),
    "keys for a filter": (dict(cost=Linear(), memory=Matrix()), r"use Parameter\(\)"),
    "no keys": (dict(cost=SQUARED, memory=Parameter()), "needs a prediction"),
    "zero rate": (dict(cost=ALIGN, algorithm=Step(0.0)), "step size of zero"),
    "gated, identity": (dict(cost=SQUARED, algorithm=Step(at="gated")), "needs a gate"),
    "gated, scale-free": (
        dict(cost=SQUARED, h=Sphere("rows"), monoid=Scalar("g"), algorithm=Step(at="gated")),
        "drops the factor of a scalar gate",
    ),
    "evaluated filter": (dict(cost=Linear(), monoid=Scalar(0.5), algorithm=Step(at="gated")), "linear in the drive"),
    "evaluated alignment": (dict(cost=ALIGN, monoid=Scalar(0.5), algorithm=Step(at="gated")), "does not depend"),
    "anchored alignment": (dict(cost=ALIGN, algorithm=Step(at=Anchor(4))), "does not depend on the state"),
    "repeated alignment": (dict(cost=ALIGN, algorithm=Step(steps=2)), "steps > 1"),
    "repeated with filters": (dict(cost=SQUARED, algorithm=Step(steps=2, via=(EMA,))), "steps > 1"),
    "repeated implicit": (dict(cost=SQUARED, algorithm=Step(steps=2, at="new")), "steps > 1"),
    "agile, Euclidean": (dict(cost=SQUARED, algorithm=Step(lazy=False)), "no-op for Euclidean"),
    "agile, mirror": (dict(cost=SQUARED, h=Entropic(), algorithm=Step(lazy=False)), "no-op for Entropic"),
    "agile, forgetful": (
        dict(cost=SQUARED, h=Sphere(), monoid=Zero(), algorithm=Step(lazy=False)),
        "keeps nothing",
    ),
    "average of all": (dict(cost=Linear(), algorithm=Step(debias=True)), "decaying monoid"),
    "debias, scale-free": (
        dict(cost=Linear(), h=SignBall(), monoid=Scalar(0.9), algorithm=Step(0.1, debias=True)),
        "debias has no effect",
    ),
    "debias, curved": (dict(cost=ALIGN, h=Lq(), algorithm=Step(debias=True)), "linear, Euclidean memory"),
    "debias, feedback": (dict(cost=SQUARED, algorithm=Step(debias=True)), "linear, Euclidean memory"),
    "debias, rotation": (dict(cost=ALIGN, monoid=Rotation(), algorithm=Step(debias=True)), "scalar or diagonal gates"),
    "debias, first": (
        dict(cost=Linear(), monoid=Scalar(0.9), algorithm=Step(0.1, debias=True, start="first")),
        "no bias to correct",
    ),
    "first at rate one": (dict(cost=Linear(), monoid=Scalar(0.9), algorithm=Step(start="first")), "its first drive"),
    "second of a keyed memory": (dict(cost=ALIGN, algorithm=Step(start="second")), "writes at every key"),
    "first of an empty memory": (dict(cost=ALIGN, algorithm=Step(start="first")), "starts at its first"),
    "independent decay at rate one": (
        dict(cost=Given(), monoid=Decay(0.1, independent=True)),
        "no effect at rate 1",
    ),
    "anchored oracle": (dict(cost=Given(), algorithm=Step(0.1, at=Anchor(2))), "one number at one point"),
    "implicit oracle": (dict(cost=Given(), algorithm=Step(0.1, at="new")), "one number at one point"),
    "read point of a key": (
        dict(cost=SQUARED, algorithm=Step(at="read", read=Read(1.0, 0.5))),
        "is for oracles",
    ),
    "no read point": (dict(cost=Given(), algorithm=Step(0.1, at="read")), "set read=Read"),
    "filtered implicit": (dict(cost=SQUARED, algorithm=Step(at="new", via=(EMA,))), "cannot be filtered"),
    "implicit slots": (dict(cost=SQUARED, algorithm=Step(at="new"), memory=Slots()), "prediction is linear"),
    "implicit encoding": (dict(cost=SquaredError(encode=True), algorithm=Step(at="new")), "encoding cost"),
    "implicit operator": (dict(cost=HuberSwitch(), algorithm=Step(at="new")), "gradient of nothing"),
    "implicit ridge": (dict(cost=Ridge(SQUARED, 0.1), algorithm=Step(at="new")), "no explicit ridge"),
    "implicit key rate": (dict(cost=SQUARED, algorithm=Step(Per("r", "key"), at="new")), "scalar or row rates"),
    "implicit curved entries": (
        dict(cost=SQUARED, h=Lq(), algorithm=Step(at="new"), memory=Entries()),
        "only with Euclidean h",
    ),
    "encoding entries": (dict(cost=SquaredError(encode=True), memory=Entries()), "Entries cannot"),
    "entries without prediction": (dict(cost=ALIGN, memory=Entries()), r"use Matrix\(\)"),
    "entries with named parameter": (dict(cost=Huber(Per("d")), memory=Entries()), "constant parameters"),
    "matrix gate of a network": (
        dict(cost=SQUARED, monoid=Diagonal("g"), memory=MLP()),
        "no common key side",
    ),
    "key rate of a network": (
        dict(cost=SQUARED, algorithm=Step(Per("r", "key")), memory=LayerNormMatrix()),
        "row rates",
    ),
    "row ridge of a network": (dict(cost=Ridge(SQUARED, Per("r", "row")), memory=MLP()), "ridge is a scalar"),
    "gated filter of a network": (
        dict(
            cost=SQUARED,
            algorithm=Step(via=(StateUpdate(Linear(), monoid=Diagonal("m")),)),
            memory=MLP(),
        ),
        "filters over MLP",
    ),
    "filtered list": (dict(cost=ALIGN, algorithm=Step(via=(EMA,)), memory=List()), r"factored pairs.*\(given: via=\)"),
    "read of a list": (
        dict(cost=ALIGN, algorithm=Step(read=Read(1.0, Per("c"))), memory=List()), r"\(given: read=\)",
    ),
    "curved list": (dict(cost=ALIGN, h=Lq(), memory=List()), "Euclidean or entropic"),
    "column list": (dict(cost=ALIGN, h=Entropic("column"), memory=List()), "axis='row'"),
    "robust softmax": (dict(cost=Huber(0.5), h=Entropic(), memory=List()), "the cost is Alignment or SquaredError"),
    "softmax of errors behind a scalar gate": (
        dict(cost=SQUARED, h=Entropic(), monoid=Scalar("g"), algorithm=Step(at="gated"), memory=List()),
        "softmax drops the factor",
    ),
    "ridge of a list": (dict(cost=Ridge(ALIGN, 0.1), memory=List()), "gate a list memory"),
    "row gate of a list": (dict(cost=ALIGN, monoid=Diagonal("g", side="row"), memory=List()), "gates on the key side"),
    "vector rate of a list": (dict(cost=ALIGN, algorithm=Step(Per("r", "row")), memory=List()), "scalar rates"),
    "diagonal softmax": (dict(cost=ALIGN, h=Entropic(), monoid=Diagonal("g"), memory=List()), "use Scalar"),
    "first of a list": (dict(cost=ALIGN, algorithm=Step(0.5, start="first"), memory=List()), "nothing to replace"),
    "key gate in a row": (dict(cost=SQUARED, h=Entropic("row"), monoid=Diagonal("g")), "constant on each slice"),
    "row rate in a whole": (
        dict(cost=SQUARED, h=Entropic("whole"), algorithm=Step(Per("r", "row"))),
        r"constant on each slice \(whole\)",
    ),
    "list statistics": (
        dict(cost=ALIGN, h=Whiten((StateUpdate(Linear("key")),), kind="right"), memory=List()),
        "drive with the shape of the state|Euclidean or entropic",
    ),
    "filter with a cost": (dict(cost=SQUARED, algorithm=Step(via=(StateUpdate(Given()),))), r"must be Linear\(\)"),
    "statistic as filter": (
        dict(cost=Given(), algorithm=Step(0.1, via=(StateUpdate(Linear("square")),))),
        "put it in h.stats",
    ),
    "statistic with a cost": (dict(cost=ALIGN, h=Whiten((StateUpdate(Given()),))), "statistic's cost"),
    "statistic with a read": (
        dict(cost=ALIGN, h=Whiten((StateUpdate(Linear("square"), algorithm=Step(read=Read(0.5, 0.5))),))),
        "a read point is for those of filters",
    ),
    "statistic of the wrong side": (dict(cost=ALIGN, h=Whiten((StateUpdate(Linear("left")),))), "of the entries"),
    "wrapped statistic of the wrong side": (
        dict(cost=Linear(), h=Cautious(Whiten((StateUpdate(Linear("square")),), kind="right"))),
        "of the columns",
    ),
    "key gate of a Gram matrix": (
        dict(cost=ALIGN, h=Whiten((StateUpdate(Linear("key"), monoid=Diagonal("g")),), kind="right")),
        "square matrix of its own size",
    ),
    "trust ratio on a state": (
        dict(cost=Given(), h=TrustRatio(Whiten((second_moment(0.9),)))),
        "put it on a filter",
    ),
    "conflicting names": (
        dict(cost=ALIGN, monoid=Scalar("g"), algorithm=Step(Per("g"))),
        "two rates named 'g' disagree",
    ),
    "momentum with a rate in via": (
        dict(cost=Given(), algorithm=Step(0.1, via=(Momentum(0.9, "ema", rate=0.5),))),
        "belong to the step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(IllegalUpdate, match=message):
        StateUpdate(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Anchor(0), "at least 1"),
        (lambda: Sum((EMA,), (1.0,)), "at least two"),
        (lambda: Sum((EMA, EMA), (1.0,)), "one weight for each"),
        (lambda: Momentum(0.9, "average"), "not ema or sum"),
        (lambda: Momentum(1.0, "ema"), r"\[0, 1\)"),
        (lambda: Step(Per("r", domain="unit")), "positive or real"),
        (lambda: Step(at="then"), "not prev, gated"),
        (lambda: Step(steps=0), "at least 1"),
        (lambda: Step(start="third"), "start must be zero or first or second or W0 or a number"),
        (lambda: Per("a b"), "letters, digits"),
        (lambda: Per("a", "column"), "shape 'column'"),
        (lambda: Per("a", domain="logs"), "domain 'logs'"),
    ],
)
def test_refused_parts(build, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(IllegalUpdate, match=message):
        build()


def test_the_refusal_names_the_parts() -> None:
    with pytest.raises(IllegalUpdate, match=r"StateUpdate\(SquaredError, Entropic, \.\.\.\): lazy=False is a no-op"):
        StateUpdate(SQUARED, Entropic(), algorithm=Step(lazy=False))


def test_the_kinds_of_a_monoid() -> None:
    product = Product((Scalar("g"), Product((Rotation(), Householder(1.0))), Diagonal("r", side="row")))
    assert gates(product) == {"scalar", "rotation", "low rank", "row"}
    assert factors(product) == (Scalar("g"), Rotation(), Householder(1.0), Diagonal("r", side="row"))
    assert (
        gates(Identity()) == {"identity"} and gates(DPLR("g")) == {"low rank"} and gates(Hadamard("g")) == {"hadamard"}
    )


def test_statistics_that_fit_are_legal() -> None:
    for h in (
        Whiten((second_moment(0.9),)),
        Whiten((StateUpdate(Linear("value")), StateUpdate(Linear("key"))), kind="kronecker"),
        Whiten((StateUpdate(Linear("right")),), kind="right"),
    ):
        assert StateUpdate(ALIGN, h).demands() == ()
    assert StateUpdate(CrossEntropy()).parts().h == Euclidean()
    assert DATA["lamb"].filters()


@dataclass(frozen=True, repr=False)
class Turned(Geometry):
    """Someone else's link: it turns a direction about the weights."""

    reads = frozenset({"weights"})

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        assert context.weights is not None
        return theta - context.weights


@dataclass(frozen=True, repr=False)
class Root(Geometry):
    """Someone else's inverse root, which improves the last one."""

    matrix, makes, continues = True, "root", True

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta


@dataclass(frozen=True, repr=False)
class Network(RankOne):
    """Someone else's memory: a nonlinear function of the key."""

    linear, matrix_gates = False, False

    def predict(self, leaves: Leaves, x: Tensor, signal: Signal, *, encode: bool = False) -> Tensor:
        return torch.tanh(times(leaves[0], x))

    def factors(self, leaves: Leaves, x: Tensor, r: Tensor, signal: Signal, *, encode: bool = False) -> Factors:
        return ((r / torch.cosh(times(leaves[0], x)) ** 2, x),)

    def zeros(self, signal: Signal) -> Leaves:
        return Matrix().zeros(signal)


def of(side: str, h: Geometry, **fields: object) -> StateUpdate:
    return StateUpdate(Linear(side), h, Scalar(0.9), Step(**fields))  # type: ignore[arg-type]


def test_a_part_written_elsewhere_is_judged_by_what_it_declares() -> None:
    held = dict(at=Held(2))
    whitened = Kronecker((of("left", Root(), **held), of("right", Root(), **held)))
    for legal in (
        lambda: StateUpdate(Given(), algorithm=Step(0.1, via=(StateUpdate(Linear(), Turned(), Zero()),))),
        lambda: StateUpdate(Linear(), whitened, Zero()),
        lambda: StateUpdate(SQUARED, monoid=Scalar("g"), algorithm=Step(0.1, at="gated"), memory=Network()),
    ):
        update = legal()
        signal = checks.example(update, d_k=4, d_v=4)
        assert all(bool(x.isfinite().all()) for x in checks.leaves(checks.trajectory(update, signal)))
    for illegal, message in (
        (lambda: StateUpdate(Given(), Turned()), "Turned compares a direction with the weights"),
        (lambda: StateUpdate(Given(), Composite(Turned(), SignBall())), "compares a direction with the weights"),
        (lambda: of("left", Root()), "continues from the last root"),
        (lambda: of("square", Root(), **held), "Root is the h of a statistic of rows or columns"),
        (lambda: of("left", Root(), lazy=False, **held), "accumulate onto the Root"),
        (lambda: StateUpdate(Linear(), Cautious(Kronecker(whitened.stats[::-1]))), "statistic of the rows here"),
        (lambda: StateUpdate(SQUARED, algorithm=Step(Per("r", "key")), memory=Network()), "scalar or row rates"),
        (lambda: StateUpdate(SQUARED, monoid=Rotation(), memory=Network()), "no common key side"),
        (lambda: StateUpdate(SQUARED, algorithm=Step(at="new"), memory=Network()), "whose prediction is linear"),
        (lambda: StateUpdate(SquaredError(encode=True), memory=Network()), "Network cannot"),
    ):
        with pytest.raises(IllegalUpdate, match=message):
            illegal()


@pytest.mark.parametrize("stranger", [3, "momentum", Scalar(0.9)])
def test_what_stands_where_an_update_should(stranger: object) -> None:
    for build in (
        lambda: StateUpdate(Given(), algorithm=Step(0.1, via=(stranger,))),  # type: ignore[arg-type]
        lambda: StateUpdate(Given(), algorithm=Step(0.1, via=(Sum((EMA, stranger), (1.0, 1.0)),))),  # type: ignore[arg-type]
        lambda: StateUpdate(Given(), Whiten((stranger,))),
    ):
        with pytest.raises(IllegalUpdate, match="filters and statistics are StateUpdates"):
            build()


@given(parts=strategies.declarations())
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_a_random_tuple_is_refused_or_runs(parts: strategies.Declaration) -> None:
    run_or_refuse(parts)


@given(parts=strategies.declarations("data"))
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_a_random_update_of_a_parameter_is_refused_or_runs(parts: strategies.Declaration) -> None:
    run_or_refuse(parts)


def run_or_refuse(parts: strategies.Declaration) -> None:
    try:
        update = StateUpdate(*parts)
    except IllegalUpdate as refusal:
        assert len(str(refusal)) > 20
        return
    signal = checks.example(update, batch=(2,), length=4)
    for name in ("v", "g"):  # explicit steps on costs that grow faster than squares diverge on large errors
        signal = {n: 0.2 * x if n == name else x for n, x in signal.items()}
    first, second = checks.trajectory(update, signal), checks.trajectory(update, signal)
    assert all(bool(x.isfinite().all()) for x in checks.leaves(first) if x.is_floating_point()), update
    assert examples.identical(first, second), update


def test_what_holds_a_number_holds_nothing_else() -> None:
    """Every field of every part that is annotated as one."""
    stranger = StateUpdate(Given(), algorithm=Step(0.1))
    seen = 0
    for cls in sorted(_parts(Declared), key=lambda cls: cls.__name__):
        if not cls.__module__.startswith("axes.") or not dataclasses.is_dataclass(cls):
            continue
        for name in _numbers(cls):
            part = object.__new__(cls)
            for field in dataclasses.fields(cls):
                object.__setattr__(part, field.name, field.default)
            object.__setattr__(part, name, stranger)
            with pytest.raises(IllegalUpdate, match=f"{cls.__name__}: .* must be .*(a number|an integer)"):
                part.__post_init__()
            seen += 1
    assert seen > 50


def _parts(cls: Any) -> set[Any]:
    return {cls, *(found for below in cls.__subclasses__() for found in _parts(below))}


def test_a_number_is_any_real_one() -> None:
    assert Step(numpy.float32(0.5)).rate == 0.5 and Step(1).rate == 1  # type: ignore[arg-type]
    for wrong in (lambda: Step("fast"), lambda: Step(None), lambda: Step(torch.ones(2)), lambda: Step(steps=1.5)):
        with pytest.raises(IllegalUpdate, match="must be"):
            wrong()
