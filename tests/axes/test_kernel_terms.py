"""From a tuple to a kernel call: with token loops in the kernels' place, what comes out is the interpreter's result."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from axes import catalogue, explain
from axes.core import reference
from axes.core.algorithms import Read, Step, Sum
from axes.core.costs import Alignment, Linear, Ridge, SquaredError
from axes.core.execution import several as repeated
from axes.core.memory import Entries, normalised
from axes.core.monoids import DPLR, Diagonal, Hadamard, Householder, Product, Rotation, Scalar, rotate
from axes.core.rates import Complement, Per
from axes.core.state_update import StateUpdate
from axes.routes import dispatch, early, several
from axes.routes import kernel_terms as terms
from axes.routes.choice import Choice
from axes.routes.select import select
from tests import chains
from tests.drawn import drawn

if sys.platform == "linux":  # it would keep stand-ins of what it imports, the step of `axes.kernels.contain` too
    import axes.kernels.substitution.chain  # noqa: F401

WIDE, ROWED, DT = Diagonal("wide"), Diagonal("rowed", side="row"), Per("dt", "row")
STEPS = Hadamard("square_decay", times=DT)
BETA, KEYED, ROWS, ERASE = Per("beta"), Per("rate", "key"), Per("write", "row"), Per("erase")
MOMENTUM = StateUpdate(Linear(), monoid=Scalar("momentum"), algorithm=Step(Per("theta")))
FAST = StateUpdate(Linear(), monoid=Scalar(0.5), algorithm=Step(0.3))
TWO = Sum((MOMENTUM, FAST), (0.5, 0.5))
UPDATES = {
    "write": (StateUpdate(Alignment()), "scalar"),
    "strength": (StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA)), "scalar"),
    "constant gate": (StateUpdate(Alignment(), monoid=Scalar(0.9)), "scalar"),
    "normaliser": (StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(debias=True)), "scalar"),
    "normaliser with a floor": (
        StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA, debias=True, floor=0.2)), "scalar",
    ),
    "rotation": (StateUpdate(Alignment(), monoid=Product((Scalar("decay"), Rotation()))), "scalar"),
    "angles of every token": (
        StateUpdate(Alignment(), monoid=Product((Scalar("decay"), Rotation(Per("angle", "pair", "real"))))), "scalar",
    ),
    "delta": (StateUpdate(SquaredError(), algorithm=Step(BETA)), "scalar"),
    "gated delta": (StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="gated")), "scalar"),
    "early": (StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA)), "scalar"),
    "implicit": (StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="new")), "scalar"),
    "a rate for every key entry": (StateUpdate(SquaredError(), algorithm=Step(KEYED)), "scalar"),
    "pairs that turn": (
        StateUpdate(Alignment(), monoid=Product((Diagonal("paired", side="pair"), Rotation()))), "diagonal",
    ),
    "diagonal": (StateUpdate(Alignment(), monoid=Diagonal("wide")), "diagonal"),
    "average": (StateUpdate(Alignment(), monoid=WIDE, algorithm=Step(Complement(WIDE.gate))), "diagonal"),
    "an average and a gate of the state": (
        StateUpdate(Alignment(), monoid=Product((Scalar("decay"), WIDE)), algorithm=Step(Complement(WIDE.gate))),
        "diagonal",
    ),
    "an average by another gate": (
        StateUpdate(Alignment(), monoid=WIDE, algorithm=Step(Complement(Per("other", "key", "unit")))), "diagonal",
    ),
    "average of rows": (StateUpdate(Alignment(), monoid=ROWED, algorithm=Step(Complement(ROWED.gate))), "entries"),
    "diagonal delta": (StateUpdate(SquaredError(), monoid=WIDE, algorithm=Step(BETA, at="gated")), "diagonal"),
    "diagonal early": (StateUpdate(SquaredError(), monoid=Diagonal("wide"), algorithm=Step(BETA)), "diagonal"),
    "diagonal implicit": (StateUpdate(SquaredError(), monoid=WIDE, algorithm=Step(BETA, at="new")), "diagonal"),
    "dplr": (StateUpdate(Alignment(), monoid=DPLR("wide"), algorithm=Step(BETA)), "dplr"),
    "householder": (StateUpdate(Alignment(), monoid=Householder(BETA)), "dplr"),
    "an erase of its own strength": (
        StateUpdate(Alignment(), monoid=Product((Scalar("decay"), Householder(ERASE, "k"))), algorithm=Step(BETA)),
        "scalar",
    ),
    "an erase for every key entry": (
        StateUpdate(Alignment(), monoid=Product((WIDE, Householder(KEYED, "k"))), algorithm=Step(ROWS)), "diagonal",
    ),
    "an erase before the gate": (
        StateUpdate(Alignment(), monoid=Product((Householder(ERASE, "k"), WIDE)), algorithm=Step(BETA)), "dplr",
    ),
    "a rate for every row": (StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(ROWS)), "scalar"),
    "momentum": (StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(via=(MOMENTUM,))), "block"),
    "momentum, gated": (
        StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="gated", via=(MOMENTUM,))), "block",
    ),
    "momentum of writes": (StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(via=(FAST,))), "block"),
    "rows": (StateUpdate(Alignment(), monoid=ROWED, algorithm=Step(ROWS)), "entries"),
    "rows and a gate of the state": (StateUpdate(Alignment(), monoid=Product((Scalar("decay"), ROWED))), "entries"),
    "a gate of entries": (StateUpdate(Alignment(), monoid=Hadamard("square_decay"), algorithm=Step(BETA)), "entries"),
    "steps of rows": (StateUpdate(Alignment(), monoid=STEPS, algorithm=Step(DT)), "entries"),
    "steps of rows, other strengths": (
        StateUpdate(Alignment(), monoid=Product((STEPS, Scalar(0.9))), algorithm=Step(KEYED)), "entries",
    ),
    "entries": (StateUpdate(SquaredError(), monoid=ROWED, algorithm=Step(ROWS), memory=Entries()), "entries"),
    "entries, gated": (
        StateUpdate(SquaredError(), monoid=ROWED, algorithm=Step(BETA, at="gated"), memory=Entries()), "entries",
    ),
    "entries, implicit": (
        StateUpdate(SquaredError(), monoid=ROWED, algorithm=Step(ROWS, at="new"), memory=Entries()), "entries",
    ),
}  # fmt: skip


def chain_step(state, q, k, v, *, beta, g, erase, turn=None, a=None, b=None, rule="write", early=False, into=None):
    """The kernel for one token as a loop of one."""
    into = state if into is None else into
    state = state if turn is None else rotate(state, turn if turn.ndim == 1 else turn[..., None, :])
    wide = None if g is None else (g if g.ndim == 3 else g[..., None])[:, None]
    q, k, v, beta, erase, a, b = (None if x is None else x[:, None] for x in (q, k, v, beta, erase, a, b))
    out, final = chains.diagonal_chain(
        q, k, v, wide, beta, erase=erase, a=a, b=b, initial_state=state, rule=rule, early=early
    )
    into.copy_(final)
    return out[:, 0]


def block_step(state, *tokens, into=None):
    out, final = chains.block_chain(*(None if x is None else x[:, None] for x in tokens), initial_state=state)
    (state if into is None else into).copy_(final)
    return out[:, 0]


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    step = ModuleType("axes.kernels.step")
    step.chain_step, step.block_step = chain_step, block_step  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, step.__name__, step)
    for name in ("scalar", "diagonal", "block", "entries"):
        stand_in = ModuleType(f"axes.kernels.{name}.chain")
        function = f"{name}_chain"
        setattr(stand_in, function, getattr(chains, function))
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    scalar = sys.modules["axes.kernels.scalar.chain"]
    scalar.takes_two = scalar.reads_last = lambda *_: False  # type: ignore[attr-defined]
    mass = ModuleType("axes.kernels.scalar.mass")
    mass.mass_chain = chains.mass_chain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, mass.__name__, mass)
    rows = ModuleType("axes.kernels.diagonal.rows")
    rows.rows_chain = lambda q, k, v, g, start, *, cu_seqlens, average: (  # type: ignore[attr-defined]
        chains.entries_chain(
            q, k, v * (1 - g.exp()) if average else v, g, initial_state=start, cu_seqlens=cu_seqlens
        )
    )
    monkeypatch.setitem(sys.modules, rows.__name__, rows)
    mass = ModuleType("axes.kernels.rows.mass")
    mass.over_mass = normalised  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, mass.__name__, mass)


def signal(
    update: StateUpdate, length: int = 9, d_k: int = 4, d_v: int = 3, heads: int = 2
) -> dict[str, torch.Tensor | float]:
    lead = (2, length, heads)
    out: dict[str, torch.Tensor | float] = {n: torch.randn(*lead, d_v if n == "v" else d_k) / 2 for n in "qkv"}
    for p in update.demands():
        own = {"scalar": (), "key": (d_k,), "row": (d_v,), "pair": (d_k // 2,), "square": (d_v, d_k)}
        shape = (*lead, *own[p.shape])
        x = torch.rand(shape)
        out[p.name] = -x if p.domain == "unit" else x
    for n in update.signals() - set(out) - {"q", "k", "v"}:
        out[n] = torch.randn(*lead, d_k) / 2
    if (writes := update.parts().step.writes) > 1:
        for n in repeated(update.parts()):
            x = out[n]
            assert isinstance(x, torch.Tensor)
            out[n] = torch.stack([x * (1 + i) / writes for i in range(writes)], len(lead))
    return out


@pytest.mark.parametrize("name", UPDATES)
def test_the_kernel_is_given_the_chain(name: str) -> None:
    update, kind = UPDATES[name]
    assert terms.family(update) == kind
    given = signal(update)
    first = {n: x[:, 0] if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    empty = update.init(first)
    start = tuple(torch.randn_like(x) for x in empty.theta)
    want, last = reference.run(update, given, weights=start, time=1)
    got, state = terms.run(update, given, None, start)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    for a, b in zip(_leaves(state), _leaves(last), strict=True):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=2e-4, atol=2e-5)


def seen_calls(monkeypatch: pytest.MonkeyPatch, asked: str) -> list[tuple[tuple[torch.Tensor, ...], dict[str, object]]]:
    """What the scalar chain is called with, which is one that says yes where it is asked for what few kernels do."""
    chain, calls = sys.modules["axes.kernels.scalar.chain"], []
    monkeypatch.setattr(chain, asked, lambda *_: True)
    monkeypatch.setattr(chain, "scalar_chain", lambda *a, **b: calls.append((a, b)) or chains.scalar_chain(*a, **b))
    return calls


@pytest.mark.parametrize("rate", (BETA, 0.7), ids=str)
def test_kernels_that_take_two_strengths_are_given_them(rate: Per | float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and keys stay as they are."""
    erasing = Product((Scalar("decay"), Householder(ERASE, "k")))
    update, calls = StateUpdate(Alignment(), monoid=erasing, algorithm=Step(rate)), seen_calls(monkeypatch, "takes_two")
    given = signal(update)
    start = (torch.randn(2, 2, 3, 4),)
    want, last = reference.run(update, given, weights=start, time=1)
    got, state = terms.run(update, given, None, start)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(state.theta[0], last.theta[0].float(), rtol=2e-4, atol=2e-5)
    (((_, k, v, *_, erase), options),) = calls
    assert k is given["k"] and v is given["v"] and erase is None and options["write"].shape == (2, 9, 2)


@pytest.mark.parametrize("name", ("delta-product", "gated-delta-product"))
def test_kernels_that_read_the_last_token_are_given_queries_as_they_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, calls = catalogue.get(name, axis="sequence").update, seen_calls(monkeypatch, "reads_last")
    given = signal(update)
    want, last = reference.run(update, given, time=1)
    choice = Choice("chain", "triton", "asked for")
    first, state = dispatch._run(update, _part(given, 0, 4), None, choice=choice)
    second, state = dispatch._run(update, _part(given, 4, 9), state, choice=choice)
    torch.testing.assert_close(torch.cat((first, second), 1), want, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(state.theta[0], last.theta[0].float(), rtol=2e-4, atol=2e-5)
    assert int(state.count) == 9
    assert [(a[0].shape[1], a[1].shape[1]) for a, _ in calls] == [(4, 8), (5, 10)]


def test_heads_with_one_query_and_key_have_a_query_of_every_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain is given one head of them, of which no kernel reads the last tokens alone."""
    update, calls = catalogue.get("delta-product", axis="sequence").update, seen_calls(monkeypatch, "reads_last")
    given = signal(update)
    given |= {n: given[n][:, :, :1].expand_as(given[n]) for n in "qk"}  # type: ignore[index, arg-type]
    want, _ = reference.run(update, given, time=1)
    got, _ = dispatch._run(update, given, None, choice=Choice("chain", "triton", "asked for"))
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert all(q.shape[1] == k.shape[1] for (q, k, *_), _ in calls)


@pytest.mark.parametrize("name", UPDATES)
def test_heads_that_share_queries_and_keys(name: str) -> None:
    """Value heads h and h + 1 with key head h // 2, against keys that are written out for every head."""
    update, _ = UPDATES[name]
    wide = signal(update, heads=4)
    for n in "qk":
        wide[n] = wide[n][:, :, ::2].repeat_interleave(2, 2)  # type: ignore[index]
    given = wide | {n: wide[n][:, :, ::2] for n in "qk"}  # type: ignore[index]
    want, last = reference.run(update, wide, time=1)
    got, state = terms.run(update, given, None, None)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(state.theta[0], last.theta[0].float(), rtol=2e-4, atol=2e-5)
    plain, end = dispatch.run(update, given, time=1)
    torch.testing.assert_close(plain, want, rtol=2e-4, atol=2e-5)
    one, _ = dispatch.step(update, {n: x[:, -1:] for n, x in given.items()}, end)  # type: ignore[index]
    again, _ = reference.run(update, {n: x[:, -1:] for n, x in wide.items()}, last, time=1)  # type: ignore[index]
    torch.testing.assert_close(one, again, rtol=2e-4, atol=2e-5)


def test_angles_of_half_precision_tokens_keep_their_digits() -> None:
    """Rounded to bfloat16, angles turn hundreds of tokens elsewhere."""
    update, _ = UPDATES["rotation"]
    given = signal(update, length=600, d_k=16)
    given["decay"] = given["decay"] / 1000  # nobody forgets what is far away
    half = {n: x.bfloat16() if n in "qkv" else x for n, x in given.items()}
    want, _ = reference.run(update, {n: x.float() for n, x in half.items()}, time=1)

    def wide(q, k, v, *rest, **options):
        return chains.scalar_chain(q.float(), k.float(), v.float(), *rest, **options)

    got, _ = terms.run(update, half, None, None, terms.Kernels(wide, wide, wide, wide))
    assert (got - want).norm() < 1e-2 * want.norm()


@pytest.mark.parametrize("name", [name for name, (_, kind) in UPDATES.items() if kind == "block"])
def test_rates_of_half_precision_are_multiplied_in_float32(name: str) -> None:
    """Coefficients of two states are products of rates, made before the kernel; others it widens as it reads them."""
    update, _ = UPDATES[name]
    tokens = ("q", "k", "v")
    made = signal(update)
    given = {n: x if n in tokens or not isinstance(x, torch.Tensor) else x.bfloat16() for n, x in made.items()}
    wide = {n: x.float() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    want, last = terms.run(update, wide, None, None)
    got, state = terms.run(update, given, None, None)
    assert torch.equal(got, want) and all(map(torch.equal, _leaves(state), _leaves(last)))


@pytest.mark.parametrize("name", UPDATES)
def test_a_sequence_in_two_parts(name: str) -> None:
    update, _ = UPDATES[name]
    given = signal(update)
    whole, last = terms.run(update, given, None, None)
    first, state = terms.run(update, _part(given, 0, 4), None, None)
    second, state = terms.run(update, _part(given, 4, 9), state, None)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=2e-4, atol=2e-5)
    assert int(state.count) == int(last.count) == 9


def test_slots_of_a_state_stay_in_one_tensor_from_step_to_step() -> None:
    """Unless gradients are asked for: they go to the states themselves."""
    update, _ = UPDATES["momentum"]
    given = signal(update, 4)
    with torch.no_grad():
        want, _ = reference.run(update, given, time=1)
        state = update.init({n: x[:, 0] if isinstance(x, torch.Tensor) else x for n, x in given.items()})
        outs, places = [], []
        for t in range(4):
            out, state = terms.run(update, _part(given, t, t + 1), state, None, terms.one_token(in_place=True))
            outs.append(out)
            places.append(state.theta[0].data_ptr())
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=2e-4, atol=2e-5)
    assert len(set(places)) == 1
    kept = state.theta[0].clone()
    _, after = terms.run(update, _part(given, 0, 1), state, None, terms.one_token(in_place=False))
    assert torch.equal(state.theta[0], kept) and after.theta[0].data_ptr() not in places
    first, second = after.theta[0].requires_grad_(), after.via[0].theta[0]  # type: ignore[union-attr]
    assert terms._slots(first, second).requires_grad  # a state that is learned gets its gradient


@pytest.mark.parametrize("name", UPDATES)
def test_packed_sequences_are_each_alone(name: str) -> None:
    update, _ = UPDATES[name]
    given = {n: x.flatten(0, 1)[None] if isinstance(x, torch.Tensor) else x for n, x in signal(update).items()}
    ends = torch.tensor([0, 5, 5, 6, 18], dtype=torch.int32)
    first = {n: x[0, :4] if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    start = update.init(first)
    start = start._replace(theta=tuple(torch.randn_like(x) for x in start.theta))
    want, last = dispatch.run_packed(update, given, start, ends, implementation="reference")
    got, state = terms.run(update, given, start, None, cu_seqlens=ends)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert last is not None
    for a, b in zip(_leaves(state), _leaves(last), strict=True):
        if a.ndim:  # counts are at least those of the longest sequence
            torch.testing.assert_close(a.to(b.dtype), b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("width", (8, 32))
@pytest.mark.parametrize("name", ("mesa-net", "gsa", "abc"))
def test_passes_by_kernels_are_the_passes(name: str, width: int) -> None:
    """Dense and packed, from a state; the chains of rows are those of entries, of 16 keys and more by products."""
    layer = catalogue.get(name, axis="sequence").cls(width, heads=2)
    update, sizes = layer.update, layer.sizes
    given, _, _ = layer.around.enter(torch.randn(2, 9, width), layer.around.tails(2, torch.empty(0)))
    start = layer._init_memory(2, torch.empty(0))
    start = start._replace(theta=tuple(torch.rand_like(x) + torch.eye(*x.shape[-2:]) for x in start.theta))
    want, last = dispatch.run(update, given, start, implementation="reference")
    got, state = dispatch._passes_by_kernel(update, given, start)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    for a, b in zip(_leaves(state), _leaves(last), strict=True):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=2e-4, atol=2e-5)
    packed = {n: x.flatten(0, 1)[None] if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    one, after = dispatch._passes_by_kernel(update, packed, start, torch.tensor([0, 9, 18]))
    torch.testing.assert_close(one[0].unflatten(0, (2, 9)), got, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(after.theta, state.theta, rtol=2e-4, atol=2e-5)
    who = select(update, "cuda", torch.bfloat16, implementation="triton")
    assert who[:2] == ("passes", "triton") and sizes.d_v == width // 2
    assert select(update, "cuda", torch.bfloat16)[:2] == who[:2]


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("name", UPDATES)
def test_one_token(name: str, in_place: bool) -> None:
    update, _ = UPDATES[name]
    given = signal(update)
    _, state = terms.run(update, _part(given, 0, 5), None, None)
    before = state.theta[0].clone()
    want, last = terms.run(update, _part(given, 5, 6), state, None)
    got, after = terms.run(update, _part(given, 5, 6), state, None, terms.one_token(in_place))
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    for a, b in zip(_leaves(after), _leaves(last), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
    assert in_place or torch.equal(state.theta[0], before)


def _part(given: dict[str, torch.Tensor | float], first: int, end: int) -> dict[str, torch.Tensor | float]:
    return {n: x[:, first:end] if isinstance(x, torch.Tensor) else x for n, x in given.items()}


def test_keys_shared_by_all_heads_are_passed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    update = UPDATES["strength"][0]
    given = signal(update)
    for n in "qk":
        given[n] = given[n][:, :, :1].expand(-1, -1, 2, -1)  # type: ignore[index]
    seen = []
    inner = sys.modules["axes.kernels.scalar.chain"].scalar_chain
    chain = sys.modules["axes.kernels.scalar.chain"]
    monkeypatch.setattr(chain, "scalar_chain", lambda q, *a, **b: seen.append(q.shape) or inner(q, *a, **b))
    got, _ = terms.run(update, given, None, None)
    assert seen == [(2, 9, 1, 4)]
    torch.testing.assert_close(got, reference.run(update, given, time=1)[0], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("update", "says"),
    (
        (StateUpdate(Ridge(SquaredError(), 0.1), algorithm=Step(BETA)), "change the sign"),
        (StateUpdate(SquaredError(), algorithm=Step(Per("beta", "row"), at="new")), "every row"),
        (StateUpdate(SquaredError(), monoid=DPLR("wide"), algorithm=Step(BETA)), "rank two"),
        (
            StateUpdate(SquaredError(), algorithm=Step(BETA, via=(Sum((MOMENTUM, FAST), (0.5, 0.5)),))),
            "at most one buffer",
        ),
        (StateUpdate(SquaredError(), monoid=Diagonal("wide"), algorithm=Step(BETA, via=(MOMENTUM,))), "scalar gates"),
    ),
)
def test_says_why_there_is_no_kernel(update: StateUpdate, says: str) -> None:
    reason = terms.no_kernel(update, torch.device("cuda"), torch.bfloat16, {}, 1)
    assert reason is not None and says in reason
    named = dispatch.select(update, "cuda", torch.bfloat16, implementation="triton")  # what its step makes
    assert named.route == "substitution" or named.route == "token" and says in named.reason


def test_every_affine_chain_of_the_catalogue_has_a_kernel_or_a_reason() -> None:
    kinds = {e.name: terms.family(e.update) for e in catalogue.entries("sequence")}
    assert kinds["gated-delta-net"] == kinds["gated-delta-net-prev"] == kinds["mamba2"] == kinds["retnet"] == "scalar"
    assert kinds["mamba"] == kinds["hgrn"] == kinds["rg-lru"] == kinds["longhorn-diagonal"] == "entries"
    assert kinds["gla"] == "diagonal" and kinds["rwkv7"] == "dplr" and kinds["titans-matrix"] == "block"
    for name, kind in kinds.items():
        assert not isinstance(kind, terms.NoFamily) or kind.reason, name


def test_what_all_tokens_share_is_found_with_its_gradient() -> None:
    """Where it was expanded; a leaf of one's own that looks like it hears a gradient for every token."""
    base = torch.rand(2, 3, 4, requires_grad=True)
    made = -base.exp()
    shared = terms._same_for_all(made.expand(5, 7, 2, 3, 4))
    assert shared.shape == (2, 3, 4)
    (grad,) = torch.autograd.grad(shared.sum(), base)
    torch.testing.assert_close(grad, -base.exp())
    wide = torch.rand(1, 1, 2, 3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(terms._same_for_all(wide.expand(5, 7, 2, 3, 4)).sum(), wide)
    assert torch.equal(grad, torch.ones_like(wide))
    own = base.detach().expand(5, 7, 2, 3, 4).detach().requires_grad_()
    assert terms._same_for_all(own) is own
    turned = base.transpose(0, 1).expand(5, 7, 3, 2, 4)
    assert terms._same_for_all(turned) is turned
    assert terms._same_for_all(base.detach().expand(5, 7, 2, 3, 4)).shape == (2, 3, 4)


def _leaves(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [x for part in state for x in _leaves(part)] if isinstance(state, tuple) else []


@pytest.mark.parametrize("name", ("gated-delta-net", "mamba2", "gla", "rwkv7", "titans-matrix"))
def test_a_layer_by_its_kernel_is_one_graph_to_a_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "no_kernel", lambda *_: None)
    torch.compiler.reset()
    model = catalogue.get(name, axis="sequence").cls(16, heads=2)
    x = torch.randn(2, 10, 16)
    got, state = torch.compile(model, fullgraph=True, backend="eager")(x)
    want, last = model(x)
    torch.testing.assert_close((got, _leaves(state)), (want, _leaves(last)))


def test_a_layer_is_compiled_once() -> None:
    """What is worked out about a tuple is there before the first call, which therefore changes nothing."""
    torch.compiler.reset()
    cls = catalogue.get("gated-delta-net", axis="sequence").cls
    counter = CompileCounter()
    model = cls(16, heads=2, update=dataclasses.replace(cls.update))  # a tuple of which nothing is known
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(3):
        compiled(torch.randn(2, 40, 16))
        explain(model)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", drawn(("gla", "gated-delta-net", "mamba2"), 3))
def test_a_layer_is_one_graph_to_a_compiler(name: str) -> None:
    torch.compiler.reset()
    model = catalogue.get(name, axis="sequence").cls(16, heads=2)
    x = torch.randn(2, 40, 16)
    got, _ = torch.compile(model, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(got, model(x)[0])
    with dispatch.implementation("reference"):
        by_name, _ = torch.compile(model, fullgraph=True, backend="eager")(x[:, :5])
        torch.testing.assert_close(by_name, model(x[:, :5])[0])


OTHERS = {
    "several writes": StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="gated", writes=3)),
    "bonus": StateUpdate(Alignment(), monoid=WIDE, algorithm=Step(read=Read(1.0, Per("bonus", "key")))),
    "delta": StateUpdate(
        SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="gated", read=Read(0.5, Per("bonus")))
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_reads_between_two_states_and_several_writes_by_the_kernels_of_one(name: str) -> None:
    """Sequences packed with empty ones at both ends, each with a state that its first token reads."""
    update, n = OTHERS[name], OTHERS[name].parts().step.writes
    given = {n: x.flatten(0, 1)[None] if isinstance(x, torch.Tensor) else x for n, x in signal(update).items()}
    ends = torch.tensor([0, 0, 5, 6, 18, 18], dtype=torch.int32)
    start = update.init({n: x[0, :5] if isinstance(x, torch.Tensor) else x for n, x in given.items()})
    start = start._replace(theta=tuple(torch.randn_like(x) for x in start.theta))
    want, last = dispatch.run_packed(update, given, start, ends, implementation="reference")

    def kernels(plain, signal, state):
        return terms.run(plain, signal, state, None, cu_seqlens=ends * n)

    if n > 1:
        got, state = several.run(update, given, start, 1, kernels)
    else:
        got, state = early.run(update, given, start, 1, kernels, ends)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert last is not None
    torch.testing.assert_close(state.theta[0], last.theta[0].float(), rtol=2e-4, atol=2e-5)
    assert select(update, "cuda:sm_90")[:2] == ("chain", "triton")


def test_a_bonus_of_all_tokens_is_read_by_the_kernel_itself() -> None:
    update = OTHERS["bonus"]
    given = {n: x.flatten(0, 1)[None] if isinstance(x, torch.Tensor) else x for n, x in signal(update).items()}
    assert terms.own_bonus(update, given) is None  # a token's own: its query waits at the token before
    bonus = torch.randn(given["bonus"].shape[2:], requires_grad=True)
    given["bonus"] = bonus.expand_as(given["bonus"])
    own = terms.own_bonus(update, given)
    assert own is not None and own.shape == bonus.shape
    ends = torch.tensor([0, 0, 5, 6, 18, 18], dtype=torch.int32)
    start = update.init({n: x[0, :5] if isinstance(x, torch.Tensor) else x for n, x in given.items()})
    start = start._replace(theta=tuple(torch.randn_like(x) for x in start.theta))
    want, last = dispatch.run_packed(update, given, start, ends, implementation="reference")
    got, state = terms.run(early.late(update), given, start, None, cu_seqlens=ends, bonus=own)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert last is not None
    torch.testing.assert_close(state.theta[0], last.theta[0].float(), rtol=2e-4, atol=2e-5)
    do = torch.randn_like(want)
    (hears,), (heard,) = (torch.autograd.grad(x, bonus, do.to(x.dtype)) for x in (got, want))
    torch.testing.assert_close(hears, heard, rtol=2e-4, atol=2e-5)
    gated = dataclasses.replace(update, algorithm=Step(read=Read(0.5, Per("bonus", "key"))))
    assert terms.own_bonus(gated, given) is None
