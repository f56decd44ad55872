"""Hypothesis strategies that draw random tuples. Hypothesis is imported on first use: it comes with the test extra.

`declarations` draws the five parts of a tuple, legal together or not; `updates` draws legal ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from axes.core.algorithms import Anchor, Held, Momentum, Read, Step, Sum
from axes.core.costs import (
    Alignment,
    Cost,
    CrossEntropy,
    Given,
    Huber,
    HuberSwitch,
    Linear,
    Lp,
    Ridge,
    RobustShift,
    SquaredError,
)
from axes.core.geometry import (
    Ball,
    Bounded,
    Cautious,
    Cayley,
    Decayed,
    Entropic,
    Euclidean,
    Geometry,
    Hypentropy,
    LowRank,
    Lq,
    PowerFactors,
    RankOneWhiten,
    Shrink,
    SignBall,
    SoftThreshold,
    Spectral,
    Sphere,
    TrustRatio,
    Whiten,
)
from axes.core.memory import MLP, Entries, LayerNormMatrix, List, Matrix, Memory, Parameter, Slots
from axes.core.monoids import (
    DPLR,
    Decay,
    Diagonal,
    GeneralLinear,
    Hadamard,
    Householder,
    Identity,
    Monoid,
    Product,
    Rotation,
    Scalar,
    Zero,
)
from axes.core.rates import Count, Per, Rate
from axes.core.state_update import OnUpdate, StateUpdate
from axes.errors import IllegalUpdate

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Declaration = tuple[Cost, Geometry | OnUpdate, Monoid, Step, Memory]

_COSTS: tuple[Cost, ...] = (
    Alignment(),
    SquaredError(),
    SquaredError(encode=True),
    Lp(3.0),
    Lp(1.5),
    Huber(0.5),
    Huber(Per("delta", "row")),
    Huber(0.5, "norm"),
    HuberSwitch(0.5),
    RobustShift(0.2),
    CrossEntropy(),
    Ridge(SquaredError(), 0.1),
    Ridge(Alignment(), Per("ridge")),
    Ridge(Huber(0.5), Per("row_ridge", "row")),
)
_CURVED: tuple[Geometry, ...] = (
    Entropic("row"),
    Entropic("row", None),
    Entropic("whole", 2.0),
    Entropic("column"),
    Lq(4.0),
    Lq(1.5),
    SoftThreshold(0.05),
    Shrink(0.8),
    Bounded(),
    Hypentropy(),
    Sphere("rows"),
    Sphere("columns"),
    Sphere("whole", 2.0),
    SignBall(),
    Spectral("polar"),
)
_GATES: tuple[Monoid, ...] = (
    Identity(),
    Zero(),
    Scalar(0.9),
    Scalar("decay"),
    Diagonal("key_decay"),
    Diagonal("row_decay", side="row"),
    Hadamard("square_decay"),
)
_TRANSITIONS: tuple[Monoid, ...] = (
    Rotation(),
    Rotation(Per("angle", "pair", "real")),
    Rotation(Per("row_angle", "row-pair", "real")),
    Householder(Per("strength")),
    DPLR("key_decay"),
    DPLR(0.5, "x", "y"),
    GeneralLinear(Per("logits", "mix", "real"), Cayley()),
)
_BETA = Per("beta")
_RATES: tuple[Rate, ...] = (1.0, 0.5, _BETA, _BETA / Count(), Per("row_beta", "row"), Per("key_beta", "key"))
_LISTS: tuple[Memory, ...] = (List(), List(1.0), List(window=3), List(window=2, first=2))
_MEMORIES: tuple[Memory, ...] = (*(Matrix(),) * 6, Entries(), Slots(), LayerNormMatrix(), MLP(2), *_LISTS)


def declarations(axis: str = "sequence") -> SearchStrategy[Declaration]:
    """The parts of a random tuple, not all of which can act together.

    axis: "sequence" draws costs that see keys; "data" draws updates of a parameter, with constant rates.
    """
    from hypothesis import strategies as st

    return _keyed(st) if axis == "sequence" else _given(st)


def updates(axis: str = "sequence") -> SearchStrategy[StateUpdate]:
    """A random legal tuple."""
    return declarations(axis).map(_build).filter(_is_legal)  # type: ignore[return-value]


def _build(parts: Declaration) -> StateUpdate | None:
    try:
        return StateUpdate(*parts)
    except IllegalUpdate:
        return None


def _is_legal(update: StateUpdate | None) -> bool:
    return update is not None


def _monoids(st: Any) -> Any:
    one = st.sampled_from(_GATES + _TRANSITIONS)
    return st.one_of(
        st.sampled_from(_GATES),
        one,
        st.builds(Product, st.tuples(st.sampled_from(_GATES[2:5]), st.sampled_from(_TRANSITIONS))),
        st.builds(Product, st.tuples(st.sampled_from(_TRANSITIONS), one)),
    )


def _filters(st: Any, named: bool) -> Any:
    """One filter: momentum, a bare recurrence, a geometry on an average, whitening, or two averages side by side."""
    gate: Any = st.sampled_from((Scalar(0.5), Scalar(0.9)) + ((Scalar("mu"), Diagonal("key_mu")) if named else ()))
    rate: Any = st.sampled_from((1.0, 0.5) + ((Per("alpha"),) if named else ()))
    read = st.sampled_from((None, None, Read(0.5, 0.75)))
    square = st.builds(
        lambda b, debias: StateUpdate(Linear("square"), monoid=Scalar(b), algorithm=Step(1 - b, debias=debias)),
        st.sampled_from((0.9, 0.99)),
        st.booleans(),
    )
    diagonal = square.map(lambda s: Whiten((s,), eps=1e-3))
    roots = st.just(
        Whiten((StateUpdate(Linear("left")), StateUpdate(Linear("right"))), kind="kronecker", power=0.25, eps=0.1)
    )
    sums = st.sampled_from((0.9, 0.8)).map(
        lambda b: tuple(
            StateUpdate(Linear(of), monoid=Scalar(b), algorithm=Step(1 - b)) for of in ("row-square", "column-square")
        )
    )
    ranked = st.builds(RankOneWhiten, sums, st.just(1e-2), st.sampled_from(("added", "floor")))
    pull: Any = st.sampled_from((0.2,) + ((Per("pull"),) if named else ()))
    length = st.sampled_from(("whole", "parts"))
    decayed = st.builds(TrustRatio, st.builds(Decayed, diagonal, pull), st.just(0.5), length)
    wrapped = st.one_of(diagonal.map(Cautious), diagonal.map(TrustRatio), decayed)
    simple = st.sampled_from((SignBall(), Sphere("whole"), Spectral("polar")))
    factors = StateUpdate(Linear("state"), PowerFactors(), Zero(), Step(at=Held(1)))
    approximate = st.sampled_from((Ball(0.5), SoftThreshold(0.2), LowRank((factors,))))
    fed = st.builds(
        lambda h, m, f: StateUpdate(Linear(), h, m, Step(feedback=f)),
        approximate,
        st.sampled_from((Identity(), Scalar(0.9))),
        st.sampled_from((0.3, 1.0)),
    )
    directions = st.one_of(simple, diagonal, roots, ranked, wrapped)
    plain = st.builds(lambda m, r, p: StateUpdate(Linear(), Euclidean(), m, Step(r, read=p)), gate, rate, read)
    curved = st.builds(
        lambda h, m, r: StateUpdate(Linear(), h, m, Step(r)), directions, st.one_of(st.just(Zero()), gate), rate
    )
    momentum = st.builds(
        Momentum, st.sampled_from((0.5, 0.9)), st.sampled_from(("ema", "sum")), st.booleans(), st.booleans()
    )
    return st.one_of(momentum, plain, curved, fed, st.builds(lambda a, b: Sum((a, b), (1.0, -0.5)), plain, plain))


def _chain_of_filters(st: Any, named: bool) -> Any:
    return st.one_of(st.just(()), st.just(()), st.lists(_filters(st, named), min_size=1, max_size=2).map(tuple))


def _keyed(st: Any) -> Any:
    # drawn together: what is legal with a memory or a cost is not independent of it
    at: Any = st.sampled_from(("prev", "prev", "gated", "new", Anchor(3)))
    state = st.sampled_from((Euclidean(),) * 12 + _CURVED + (OnUpdate(SignBall()),))

    def complete(memory: Memory) -> Any:
        listed, deep = isinstance(memory, List), isinstance(memory, MLP | LayerNormMatrix)
        return st.tuples(
            st.just(Alignment()) if listed else st.sampled_from(_COSTS),
            st.sampled_from((Entropic(), Entropic(mass=2.0), Euclidean())) if listed else state,
            st.sampled_from(_GATES[:4] if deep else _GATES[:5])
            if deep or isinstance(memory, Entries)
            else _monoids(st),
            st.builds(
                Step,
                rate=st.sampled_from(_RATES[:4] if listed or deep else _RATES),
                at=st.just("prev") if listed else at,
                steps=st.just(1) if listed else st.sampled_from((1, 1, 1, 2)),
                lazy=st.just(True) if listed else st.sampled_from((True, True, False)),
                via=st.just(()) if listed or deep else _chain_of_filters(st, True),
                read=st.just(None) if listed else st.sampled_from((None, None, None, Read(0.5, 1.5))),
                debias=st.sampled_from((False, False, False, True)),
                start=st.sampled_from(("zero", "zero", "zero", "first")),
            ),
            st.just(memory),
        )

    return st.sampled_from(_MEMORIES).flatmap(complete)


def _given(st: Any) -> Any:
    at: Any = st.sampled_from(("prev", "prev", "gated", "read"))
    return st.tuples(
        st.sampled_from((Given(), Given(), Ridge(Given(), 0.05), Ridge(Given(), Per("weight_decay")))),
        st.one_of(
            st.just(Euclidean()),
            st.just(Euclidean()),
            st.sampled_from(_CURVED),
            st.sampled_from((OnUpdate(SignBall()), OnUpdate(Spectral("newton-schulz")))),
        ),
        st.sampled_from((Identity(), Scalar(0.95), Decay(0.05), Decay(Per("weight_decay")), Scalar(0.5))),
        st.builds(
            Step,
            rate=st.sampled_from((0.1, 0.05, Per("lr"), 0.1 * Count() ** -0.5)),
            at=at,
            lazy=st.sampled_from((True, True, False)),
            via=_chain_of_filters(st, False),
            read=st.sampled_from((None, None, Read(1.0, 0.05))),
        ),
        st.just(Parameter()),
    )
