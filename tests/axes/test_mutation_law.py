"""Every field of a tuple means something: changing it moves the trajectory, is refused, or is a proven invariance."""

from __future__ import annotations

import dataclasses

import pytest
from systems import DATA, KEYED, SYSTEMS

from axes import catalogue
from axes.core import execution
from axes.core.algorithms import Momentum, Read, Step
from axes.core.costs import Alignment, Given, Huber, Linear, SquaredError
from axes.core.geometry import Entropic, SignBall, Spectral, Sphere
from axes.core.memory import List
from axes.core.monoids import Identity, Scalar, Zero
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.errors import AxesError, IllegalUpdate
from axes.testing import checks
from axes.testing.gauges import gauge_of
from tests.drawn import drawn

# Dear neighbours, and each has relatives among the quick ones.
DEAR = {"longhorn, vector rate", "gated longhorn", "huber, implicit", "shampoo", "moneta", "cross-entropy"}
# A proximal step on a curved h is solved for numerically, for each of some hundred neighbours.
SOLVED = {"entropic, implicit", "l_q, implicit"}
# Tuples of the catalogue, each once.
LISTED = {e.update.normal(): e for e in catalogue.entries()[::-1]}
for known in SYSTEMS.values():
    LISTED.pop(known.normal(), None)


@pytest.mark.parametrize(
    "name", drawn((pytest.param(n, marks=pytest.mark.slow) if n in SOLVED | DEAR else n for n in SYSTEMS), 4), ids=str
)
def test_every_field_matters(name: str) -> None:
    count = checks.mutation_law(SYSTEMS[name])
    assert count["moved"] > 8, count  # the law is not vacuous


@pytest.mark.parametrize("entry", drawn(LISTED.values(), 6), ids=lambda entry: f"{entry.axis} {entry.name}")
def test_every_field_of_the_catalogue_matters(entry: catalogue.Entry) -> None:
    checks.mutation_law(entry.update)


def test_the_mutations_reach_every_field() -> None:
    """All fields of all parts occur among the paths, filters and statistics included."""
    paths = [path for path, _ in checks.mutations(DATA["adamw"])]
    for path in (
        ".monoid .weight",
        ".algorithm .rate",
        ".algorithm .at 'gated'",
        ".algorithm .steps 2",
        ".algorithm .lazy False",
        ".algorithm .via [0] .h .stats [0] .cost .of 'left'",
        ".algorithm .via [0] .h .stats [0] .monoid .gate",
        ".algorithm .via [0] .h .stats [0] .algorithm .debias",
        ".algorithm .via [0] .h .power",
        ".algorithm .via [0] .h .eps",
        ".algorithm .via [0] .h .eps_inside",
        ".algorithm .via [0] .algorithm .start 'first'",
        ".algorithm .via [0] removed",
        ".algorithm .via one more",
        ".algorithm .read Read",
        ".algorithm .debias",
        ".cost Ridge",
        ".h Entropic",
        ".memory Matrix",
    ):
        assert any(found.startswith(path) for found in paths), path
    assert any(".algorithm .at Anchor" in path for path, _ in checks.mutations(KEYED["gated delta"]))
    assert any(".cost .delta" in path for path, _ in checks.mutations(KEYED["huber, norm"]))


def test_mutations_are_legal_or_refused_and_never_the_same() -> None:
    for update in (KEYED["titans"], DATA["lion"]):
        for path, mutated in checks.mutations(update):
            assert isinstance(mutated, StateUpdate | IllegalUpdate), path
            assert mutated != update, path


@pytest.mark.parametrize(
    ("update", "mutated", "gauge"),
    [
        (
            StateUpdate(Alignment(), algorithm=Step(debias=True)),
            StateUpdate(Alignment(), algorithm=Step(0.3, debias=True)),
            "rate of a debiased recurrence",
        ),
        (
            StateUpdate(Given(), OnUpdate(Spectral("polar")), algorithm=Step(0.1, via=(Momentum(0.9, "ema"),))),
            StateUpdate(Given(), OnUpdate(Spectral("polar")), algorithm=Step(0.1, via=(Momentum(0.9, "sum"),))),
            "rate of a linear filter before a scale-free h",
        ),
        (
            StateUpdate(Alignment(), Sphere("rows"), algorithm=Step(0.5)),
            StateUpdate(Alignment(), Sphere("rows"), algorithm=Step(2.0)),
            "rate under a scale-free h",
        ),
        (
            StateUpdate(Alignment(), memory=List(1.0)),
            StateUpdate(Alignment()),
            "list memory with Euclidean h",
        ),
        (
            StateUpdate(Given(), Entropic("row"), algorithm=Step(0.1)),
            StateUpdate(Given(), Entropic("last"), algorithm=Step(0.1)),
            "entropic axis of a matrix parameter",
        ),
        (
            StateUpdate(SquaredError(), OnUpdate(SignBall()), algorithm=Step(0.1)),
            StateUpdate(Huber(0.1), OnUpdate(SignBall()), algorithm=Step(0.1)),
            "cost before a memoryless direction",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gauge_invariance_is_one(update: StateUpdate, mutated: StateUpdate, gauge: str) -> None:
    """The documented invariances hold to rounding on data, and are named."""
    assert gauge_of(update.normal(), mutated.normal()) == gauge
    signal = checks.example(update, mutated)
    before, _ = checks.trajectory(update, signal)
    assert checks.error(checks.trajectory(mutated, signal)[0], before) < 1e-12


def test_gauges_are_documented() -> None:
    assert all(len(gauge.reason) > 40 for gauge in checks.GAUGES)
    assert len({gauge.name for gauge in checks.GAUGES}) == len(checks.GAUGES) <= 12


def test_a_dead_field_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an interpreter that ignores the read point breaks the law."""
    step = execution.step

    def deaf(parts, state, signal, given=None, outer=None):  # type: ignore[no-untyped-def]
        new, out = step(parts, state, signal, given, outer)
        return new, execution.output(parts, new, signal) if isinstance(parts.step.read, Read) else out

    checks.mutation_law(DATA["lion"])
    monkeypatch.setattr(execution, "step", deaf)
    with pytest.raises(AssertionError, match="move nothing"):
        checks.mutation_law(DATA["lion"])


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name not in SOLVED])
def test_equal_tuples_give_the_same_bits(name: str) -> None:
    checks.check_deterministic(SYSTEMS[name])
    checks.check_normal_form(SYSTEMS[name])


# ---- the common suite as a mechanism -----------------------------------------------------------------------------

CASES = [
    pytest.param(name, check, id=f"{name}-{check.__name__}", marks=[pytest.mark.slow] if name in SOLVED else [])
    for name, update in SYSTEMS.items()
    for check, _ in checks.checks(update)
    if check not in (checks.check_mutation_law, checks.check_deterministic, checks.check_normal_form)
]


@pytest.mark.parametrize(("name", "check"), CASES)
def test_common(name: str, check: checks.Check) -> None:
    check(SYSTEMS[name])


@dataclasses.dataclass
class Excused:
    update: StateUpdate
    known_failures: tuple[tuple[str, str], ...]


def test_excuses_are_handed_on() -> None:
    update = StateUpdate(Alignment())
    found = dict(checks.checks(Excused(update, (("check_split", "for a reason"),))))
    assert found[checks.check_split] == "for a reason" and found[checks.check_repr] is None
    assert checks.check_routes in found and checks.check_routes not in dict(checks.checks(DATA["sgd"]))


def test_an_unknown_excuse_is_an_error() -> None:
    with pytest.raises(AxesError, match="check_spilt"):
        list(checks.checks(Excused(StateUpdate(Alignment()), (("check_spilt", "typo"),))))
    with pytest.raises(AxesError, match="neither a StateUpdate"):
        list(checks.checks(3))


def test_numbers_and_names_of_a_zero_filter() -> None:
    """A memoryless filter is legal, and only its own constants are invariances."""
    update = StateUpdate(
        Given(), algorithm=Step(Per("lr"), via=(StateUpdate(Linear(), SignBall(), Zero()),)), monoid=Scalar(0.9)
    )
    assert checks.mutation_law(update)["gauge"] >= 1
    assert isinstance(StateUpdate(Given(), monoid=Scalar(1.0)).normal().monoid, Identity)
