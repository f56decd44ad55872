"""Derived facts against autograd: the chain's transition is the Jacobian of a step, feedback is what a drive sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from systems import (
    ATTENTION,
    BY_ROWS,
    CASCADES,
    CHAINS,
    EARLY,
    GRAM,
    KEYED,
    LEVELS,
    PASSES,
    SEQUENTIAL,
    SEVERAL,
    SOLVES,
    SUBSTITUTIONS,
    TURNED,
)
from torch import Tensor

from axes.core import derived, reference
from axes.core.algorithms import Anchor, Read, Step, Sum
from axes.core.chain import Chain, chain
from axes.core.costs import Alignment, Given, Linear, Ridge, SquaredError
from axes.core.execution import Datum, drive
from axes.core.geometry import TrustRatio, Whiten
from axes.core.legality import gates
from axes.core.memory import List
from axes.core.monoids import Hadamard, Scalar
from axes.core.rates import Per, resolve
from axes.core.state_update import OnUpdate, State, StateUpdate
from axes.routes import dispatch, scan
from axes.testing import checks, strategies
from axes.testing.mutations import solves

EXACT = 1e-10  # measured 2e-14 over the table and 2000 random tuples


def slots_of(update: StateUpdate, state: State) -> list[Tensor]:
    """theta and the buffers, in the order of the chain's slots."""
    found = [state.theta[0]]
    for f, s in zip(update.parts().step.via, state.via, strict=True):
        found += [t.theta[0] for t in s] if isinstance(f, Sum) else [s.theta[0]]  # type: ignore[union-attr, list-item]
    return found


def with_slots(update: StateUpdate, state: State, slots: tuple[Tensor, ...]) -> State:
    """The same state with other contents."""
    via, at = [], 1
    for f, s in zip(update.parts().step.via, state.via, strict=True):
        if isinstance(f, Sum):
            via.append(tuple(t._replace(theta=(slots[at + i],)) for i, t in enumerate(s)))  # type: ignore[union-attr, arg-type]
            at += len(f.branches)
        else:
            via.append(s._replace(theta=(slots[at],)))  # type: ignore[union-attr]
            at += 1
    return state._replace(theta=(slots[0],), via=tuple(via))  # type: ignore[arg-type]


def step_map(update: StateUpdate, signal: dict[str, Tensor], rows: int):  # type: ignore[no-untyped-def]
    """The interpreter's step on the stacked slots (d_v, p, d_k), and a random point."""
    datum = {n: x[0] for n, x in signal.items()}
    state = update.init(datum)

    def run(stacked: Tensor) -> Tensor:
        new, _ = update.step(with_slots(update, state, stacked.unbind(-2)), datum)
        return torch.stack(slots_of(update, new), -2)

    shape = torch.stack(slots_of(update, state), -2).shape
    return run, torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def check_chain(update: StateUpdate, make: Callable[..., Chain] = chain) -> None:
    """The derived map and write are the interpreter's step: value at two points and whole Jacobian."""
    signal = {
        n: x for n, x in checks.example(update, batch=(), length=1, d_k=4, d_v=3).items() if isinstance(x, Tensor)
    }
    run, x = step_map(update, signal, 3)
    c = make(update, signal)
    maps = c.transition()[..., 0, :, :]  # (p d, p d), one per row if rows differ
    jacobian = torch.autograd.functional.jacobian(run, x)  # (d_v, p, d, d_v, p, d)
    flat = jacobian.flatten(4, 5).flatten(1, 2)  # (d_v, p d, d_v, p d)
    expected = torch.zeros_like(flat)
    for row in range(3):
        expected[row, :, row, :] = maps.expand(3, *maps.shape[-2:])[row].mT
    assert float((flat - expected).abs().max()) < EXACT, update
    written = c.value[..., 0, :, None] * c.key[..., 0, :, :].flatten(-2)[..., None, :]
    written = (written[:, 0] if c.rows else written).unflatten(-1, x.shape[1:])
    assert float((run(torch.zeros_like(x)) - written).abs().max()) < EXACT, update


def check_feedback(update: StateUpdate) -> None:
    """With none, no drive after the first datum sees the state; affine drives have a constant Jacobian."""
    signal = {
        n: x for n, x in checks.example(update, batch=(), length=3, d_k=4, d_v=4).items() if isinstance(x, Tensor)
    }
    p = update.parts()
    first, second = ({n: x[i] for n, x in signal.items()} for i in (0, 1))
    state, _ = update.step(update.init(first), first)

    def driven(*theta: Tensor) -> Tensor:
        here = state._replace(theta=theta)
        datum = update.numbered(state, second)
        rate = resolve(p.step.rate, datum)
        kept = p.memory.act(p.monoid.element(datum, rate, theta[0]), theta)
        u = drive(p, Datum(here, datum, rate, kept, here.anchor))
        return torch.cat([x.flatten() for x in u])

    def jacobian(shift: float) -> Tensor:
        at = tuple(x + shift * torch.cos(torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape)) for x in state.theta)
        blocks = torch.autograd.functional.jacobian(driven, at)
        return torch.cat([b.flatten(1) for b in blocks], 1)

    here, there = jacobian(0.0), jacobian(1.0)
    kind = derived.feedback(update)
    if kind == "none":
        assert not here.any() and not there.any(), update
    elif kind == "affine":
        assert here.any() and float((here - there).abs().max()) < EXACT, update


@pytest.mark.parametrize("name", CHAINS)
def test_the_transition_is_the_jacobian_of_a_step(name: str) -> None:
    check_chain(CHAINS[name])


@given(update=strategies.updates())
@settings(max_examples=4 * settings().max_examples, suppress_health_check=list(HealthCheck))
def test_no_false_affine_among_random_tuples(update: StateUpdate) -> None:
    if derived.no_chain(update) is None:
        check_chain(update)


@pytest.mark.parametrize("name", [n for n, u in KEYED.items() if not isinstance(u.memory, List)])
def test_feedback(name: str) -> None:
    check_feedback(KEYED[name])


@given(update=strategies.updates())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_feedback_of_random_tuples(update: StateUpdate) -> None:
    if not isinstance(update.memory, List) and not solves(update):
        check_feedback(update)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear attention", "none"),
        ("adam net", "none"),
        ("memora", "none"),
        ("softmax", "none"),
        ("deltanet", "affine"),
        ("titans", "affine"),
        ("ridge by row", "affine"),
        ("huber, every token", "nonlinear"),
        ("entropic delta", "nonlinear"),
        ("lattice sim", "nonlinear"),
        ("ttt, every token", "nonlinear"),
    ],
)
def test_feedback_by_name(name: str, kind: str) -> None:
    assert derived.feedback(KEYED[name]) == kind


@pytest.mark.parametrize(
    ("name", "structure", "block"),
    [
        ("linear attention", "identity", 1),
        ("retnet", "scalar", 1),
        ("gla", "diagonal", 1),
        ("mamba-1", "diagonal", 1),
        ("longhorn, diagonal", "diagonal", 1),
        ("deltanet", "dplr", 1),
        ("rwkv-7", "dplr", 1),
        ("titans", "dplr", 2),
        ("two averages", "dplr", 3),
        ("rotation", "diagonal", 1),
        ("rotated delta", "dense", 1),
        ("birkhoff", "dense", 1),
        ("permutations", "dense", 1),
    ],
)
def test_structure_by_name(name: str, structure: str, block: int) -> None:
    assert derived.structure(KEYED[name]) == structure and derived.block_size(KEYED[name]) == block


@pytest.mark.parametrize("name", CHAINS)
def test_folding_the_maps_reproduces_the_recurrence(name: str) -> None:
    """Left to right, and as a balanced tree (any bracketing): X_T = X_0 M + B."""
    update = CHAINS[name]
    signal = {n: x for n, x in checks.example(update, batch=(), length=11).items() if isinstance(x, Tensor)}
    v = signal["v"]
    if update.parts().step.debias:
        signal = {**signal, "v": torch.cat((v, torch.ones_like(v[..., :1])), -1)}
    c = chain(update, signal)
    maps = c.transition()
    writes = c.value[..., :, None] * c.key.flatten(-2)[..., None, :]
    pairs = [(maps[..., t, :, :], writes[..., t, :, :]) for t in range(11)]

    def then(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return a[0] @ b[0], a[1] @ b[0] + b[1]

    folded = pairs[0]
    for pair in pairs[1:]:
        folded = then(folded, pair)
    level = pairs
    while len(level) > 1:
        level = [then(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    _, state = reference.run(update, {n: x for n, x in signal.items()} | {"v": v})
    rows = state.theta[0]
    for total in (folded[1], level[0][1]):
        found = (total[:, 0] if c.rows else total)[: rows.shape[0], : rows.shape[1]]
        assert checks.error(found, rows) < EXACT


@pytest.mark.parametrize(
    ("table", "route"),
    [
        (CHAINS, "chain"),
        (EARLY, "chain"),
        (SEVERAL, "chain"),
        (TURNED, "chain"),
        (ATTENTION, "attention"),
        (GRAM, "gram"),
        (CASCADES, "cascade"),
        (SOLVES, "solve"),
        (SUBSTITUTIONS, "substitution"),
        (SEQUENTIAL, "interpreter"),
        (PASSES, "passes"),
        (LEVELS, "levels"),
    ],  # fmt: skip
    ids=[
        "chain",
        "early",
        "several",
        "turned",
        "attention",
        "gram",
        "cascade",
        "solve",
        "substitution",
        "interpreter",
        "passes",
        "levels",
    ],  # fmt: skip
)
def test_each_system_has_the_route_it_is_listed_under(table: dict[str, StateUpdate], route: str) -> None:
    for name, update in table.items():
        assert dispatch.select(update).route == ("substitution" if name in BY_ROWS else route), name


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (KEYED["memora"], "anchored"),
        (KEYED["huber, every token"], "not affine"),
        (KEYED["several steps"], "several steps"),
        (KEYED["projected linear attention"], "acts on the state"),
        (StateUpdate(Alignment(), algorithm=Step(read=Read(Per("r", "row"), 1.0))), "a rate for every row"),
        (StateUpdate(Alignment(), algorithm=Step(debias=True, read=Read(1.0, 0.5))), "a normaliser"),
        (KEYED["ttt"], "not one matrix"),
        (KEYED["adam net"], "geometry, bias correction"),
        (StateUpdate(SquaredError(encode=True)), "from the left"),
        (StateUpdate(SquaredError(), monoid=Hadamard("g")), "does not compose"),
        (StateUpdate(Alignment(), algorithm=Step(Per("r", "square"))), "element-wise step size"),
        (StateUpdate(Ridge(Alignment(), Per("r", "square"))), "element-wise ridge"),
    ],
    ids=range(12),
)
def test_reasons_against_a_chain(update: StateUpdate, reason: str) -> None:
    assert reason in str(derived.no_chain(update))
    with pytest.raises(ValueError, match="not an affine chain"):
        chain(update, {})


def test_other_reasons() -> None:
    assert "state inside a chunk" in str(derived.no_cascade(KEYED["deltanet"]))
    assert "projects at every datum" in str(derived.no_cascade(KEYED["lattice sim"])) or derived.no_cascade(
        KEYED["lattice sim"]
    )
    trust = StateUpdate(
        Alignment(), OnUpdate(TrustRatio(Whiten((StateUpdate(Linear("square"), monoid=Scalar(0.9)),), eps=0.1)))
    )
    assert "sees the weights" in str(derived.no_cascade(trust)) and dispatch.select(trust).route == "interpreter"
    assert "does not keep a list" in str(derived.no_attention(KEYED["retnet"]))
    assert derived.feedback(StateUpdate(Given())) == "nonlinear"
    assert derived.feedback(StateUpdate(SquaredError(), algorithm=Step(at=Anchor(2)))) == "none"
    assert gates(Scalar("g")) == {"scalar"} and scan.sequential is not None


def test_a_planted_error_in_the_transition_is_found() -> None:
    """A dropped gate, a flipped sign and a swapped factor each turn the Jacobian test red."""
    for damage in (
        lambda c: replace(c, gate=None),
        lambda c: replace(c, b=-c.b),
        lambda c: replace(c, a=c.b, b=c.a),
        lambda c: replace(c, key=-c.key),
    ):
        with pytest.raises(AssertionError):
            check_chain(CHAINS["dplr delta"], lambda *args, damage=damage: damage(chain(*args)))
