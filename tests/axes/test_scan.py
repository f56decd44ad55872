"""Scans against the sequential oracle: outputs, final state and every gradient, over lengths, chunks and hard gates."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from systems import CHAINS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from axes.core import reference
from axes.core.chain import Chain, chain
from axes.routes import dispatch, one_state, scan
from axes.routes.states import states
from axes.testing import checks

LENGTHS = (1, 2, 3, 15, 16, 17, 33, 64, 65, 130)
EXACT = 1e-10  # measured 2e-13 in a value and 4e-12 in a gradient
TENSORS = ("key", "value", "gate", "block", "angle", "dense", "a", "b")


def random_chain(kind: str, length: int, *, d: int = 4, d_v: int = 3, seed: int = 0) -> Chain:
    """A chain of each shape that a tuple can derive, stable by construction."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if kind in ERASING:  # the delta rule: what is written is what is taken away, b = -key
        gate = {"delta": None, "gated delta": -draw(2, length, 1).abs(), "diagonal delta": -draw(2, length, d).abs()}
        unit = torch.nn.functional.normalize(draw(2, length, d), dim=-1)
        key = (2 * torch.sigmoid(draw(2, length, 1)) * unit)[..., None, :]
        reads = (unit + 0.1 * draw(2, length, d))[..., None, None, :]
        return Chain(key, draw(2, length, d_v), gate=gate[kind], a=reads, b=-key[..., None, :, :], erases=True)
    slots = 2 if kind == "block" else 1
    unit = torch.nn.functional.normalize(draw(2, length, d), dim=-1)
    beta = 2 * torch.sigmoid(draw(2, length, 1))
    low_rank = {"a": unit[..., None, None, :], "b": -(beta * unit)[..., None, None, :]}
    fields: dict[str, Tensor] = {
        "identity": {},
        "scalar": {"gate": -draw(2, length, 1).abs()},
        "diagonal": {"gate": -draw(2, length, d).abs()},
        "rank one": low_rank,
        "gated rank one": {"gate": -draw(2, length, 1).abs(), **low_rank},
        "dplr": {
            "gate": -draw(2, length, d).abs(),
            "a": 0.3 * draw(2, length, 2, 1, d),
            "b": 0.3 * draw(2, length, 2, 1, d),
        },
        "rotation": {"angle": draw(2, length, d // 2), "gate": -draw(2, length, 1).abs()},
        "rotated rank one": {"angle": draw(2, length, d // 2), "gate": -draw(2, length, 1).abs(), **low_rank},
        "dense": {"dense": 0.4 * draw(2, length, d, d)},
        "block": {
            "block": 0.4 * torch.sigmoid(draw(2, length, 2, 2, 1)),
            "a": torch.cat((low_rank["a"], torch.zeros_like(low_rank["a"])), -2),
            "b": 0.3 * torch.cat((low_rank["b"], low_rank["b"]), -2),
        },
    }[kind]  # type: ignore[assignment]
    return Chain(draw(2, length, slots, d), draw(2, length, d_v), **fields)


ERASING = ("delta", "gated delta", "diagonal delta")
KINDS = (
    *ERASING, "identity", "scalar", "diagonal", "rank one", "gated rank one", "dplr",
    "rotation", "rotated rank one", "dense", "block",
)  # fmt: skip


def inputs(c: Chain, length: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, d = c.key.shape[-2:]
    start = torch.randn(2, c.value.shape[-1], p, d, generator=generator, dtype=torch.float64)
    return start, torch.randn(2, length, d, generator=generator, dtype=torch.float64)


def with_gradients(run, c: Chain, start: Tensor, q: Tensor):  # type: ignore[no-untyped-def]
    """Outputs, final state, and gradients in the start, the queries and every field of the chain."""
    live = {n: x.detach().requires_grad_() for n in TENSORS if (x := getattr(c, n)) is not None}
    start, q = start.detach().requires_grad_(), q.detach().requires_grad_()
    if c.erases:
        live["b"] = -live["key"][..., None, :, :]
    y, final = run(dataclasses.replace(c, **live), start, q)
    live.pop("b" if c.erases else "", None)
    generator = torch.Generator().manual_seed(7)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in (y, final))
    gradients = torch.autograd.grad(loss, (start, q, *live.values()), materialize_grads=True, allow_unused=True)
    return (y.detach(), final.detach()), gradients


def check(c: Chain, length: int, size: int | None = None) -> None:
    start, q = inputs(c, length)
    expected = with_gradients(scan.sequential, c, start, q)
    runs = (scan.associative, lambda *args: scan.chunked(*args, size))
    for name, run in zip(("associative", "chunked"), runs, strict=True):
        found = with_gradients(run, c, start, q)
        assert all(bool(x.isfinite().all()) for x in (*found[0], *found[1])), name
        assert checks.error(found[0], expected[0]) < EXACT, name
        assert checks.error(found[1], expected[1]) < EXACT, name


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_scans_agree(kind: str, length: int) -> None:
    check(random_chain(kind, length), length)


@pytest.mark.parametrize("size", [1, 2, 5, 7, 16, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_need_not_divide_the_length(kind: str, size: int) -> None:
    check(random_chain(kind, 17, seed=size), 17, size)


@pytest.mark.parametrize("gate", [0.0, -1e-3, -50.0, -torch.inf])
@pytest.mark.parametrize("kind", ["scalar", "diagonal", *ERASING[1:], "gated rank one", "dplr", "rotated rank one"])
def test_hard_gates(kind: str, gate: float) -> None:
    """All tokens hard, and single hard tokens among soft ones; nothing overflows, nothing is NaN."""
    c = random_chain(kind, 33)
    assert c.gate is not None
    soft = c.gate
    some = torch.arange(33) % 5 == 2
    for hard in (torch.full_like(soft, gate), torch.where(some[:, None], torch.full_like(soft, gate), soft)):
        changed = dataclasses.replace(c, gate=hard)
        start, q = inputs(c, 33)
        for size in (None, 8):
            if gate == -torch.inf:  # the derivative in a log of zero is zero or undefined: values and the rest only
                y, final = scan.chunked(changed, start, q, size)
                assert checks.error((y, final), scan.sequential(changed, start, q)) < EXACT
            else:
                check(changed, 33, size)


@pytest.mark.parametrize("gate", [-50.0, -torch.inf])
@pytest.mark.parametrize("kind", ["scalar", "diagonal", *ERASING[1:], "gated rank one", "dplr"])
def test_gates_that_close_often_cost_no_digits(kind: str, gate: float) -> None:
    """In float32, beside the recurrence in float64: cumulated gates are large, differences of neighbours are not."""
    c = random_chain(kind, 200)
    assert c.gate is not None
    some = (torch.arange(200) % 2 == 0)[:, None]
    c = dataclasses.replace(c, gate=torch.where(some, torch.full_like(c.gate, gate), 0.1 * c.gate))
    start, q = inputs(c, 200)
    narrow = {n: x.float() for n in TENSORS if (x := getattr(c, n)) is not None}
    got = scan.chunked(dataclasses.replace(c, **narrow), start.float(), q.float())
    assert checks.error(tuple(x.double() for x in got), scan.sequential(c, start, q)) < 1e-6  # measured 3e-7


def test_a_closed_gate_passes_no_gradient_and_no_nan() -> None:
    c = random_chain("gated rank one", 9)
    gate = torch.full((2, 9, 1), -torch.inf, dtype=torch.float64)
    (_, _), gradients = with_gradients(scan.chunked, dataclasses.replace(c, gate=gate), *inputs(c, 9))
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert not gradients[0].any() or c.a is not None  # only what bypasses the gate can see the start


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9, 2.0])
@pytest.mark.parametrize("spread", [0.0, 1e-4, 1e-1])
def test_near_parallel_keys(beta: float, spread: float) -> None:
    """The unit triangular system of a chunk at its worst: keys all but equal, reflections included."""
    c = random_chain("rank one", 65)
    assert c.a is not None
    key = torch.nn.functional.normalize(c.a[:, :1] + spread * c.a, dim=-1)
    start, q = inputs(c, 65)
    changed = dataclasses.replace(c, a=key, b=-beta * key, key=beta * key[..., 0, :, :])
    y, final = scan.chunked(changed, start, q)
    assert checks.error((y, final), scan.sequential(changed, start, q)) < EXACT
    check(changed, 65)


def test_very_long_sequences_stay_bounded() -> None:
    """20000 tokens of a gated delta rule: finite, bounded by its writes, and equal to a run from the middle."""
    length = 20000
    c = random_chain("gated rank one", length, d=2, d_v=2)
    assert c.gate is not None and c.a is not None
    key = c.a[..., 0, :, :]
    slow = dataclasses.replace(c, gate=1e-4 * c.gate, b=-0.5 * c.a, key=0.5 * key)
    start, q = inputs(slow, length)
    y, final = scan.chunked(slow, start, q)
    assert bool(y.isfinite().all()) and float(final.abs().max()) < 50
    half = {n: x[:, length // 2 :] for n in TENSORS if (x := getattr(slow, n)) is not None}
    first = {n: x[:, : length // 2] for n in TENSORS if (x := getattr(slow, n)) is not None}
    _, middle = scan.chunked(Chain(**first), start, q[:, : length // 2])
    tail, last = scan.chunked(Chain(**half), middle, q[:, length // 2 :])
    assert checks.error((tail, last), (y[:, length // 2 :], final)) < EXACT


@pytest.mark.parametrize("name", CHAINS)
def test_every_chain_of_the_table_by_every_scan(name: str) -> None:
    """From the tuple: outputs of the scans are the interpreter's, final slots are its state."""
    update = CHAINS[name]
    signal = checks.example(update, length=37)
    v = signal["v"]
    assert isinstance(v, Tensor)
    if update.parts().step.debias:
        pytest.skip("the normaliser is one more row: test_routes")
    c = chain(update, signal)
    start = torch.zeros(2, *((6, 1) if c.rows else (6,)), c.slots, 4, dtype=torch.float64)
    q = signal["q"][..., None, :, :] if c.rows else signal["q"]  # type: ignore[index, call-overload]
    expected, state = reference.run(update, signal, time=1)
    for run in (scan.sequential, scan.associative, scan.chunked, lambda *args: scan.chunked(*args, 5)):
        y, final = run(c, start, q)
        y, final = (y[..., 0].mT, final[..., 0, :, :]) if c.rows else (y, final)
        assert checks.error((y, final[..., 0, :]), (expected, state.theta[0])) < EXACT


@pytest.mark.parametrize("length", [1, 7, 16, 33])
def test_cumulative_is_the_gated_sum(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gate = torch.rand(2, length, 3, 4, generator=generator, dtype=torch.float64)
    gate[:, length // 2] = 0
    drive, start = torch.randn(2, length, 3, 4).double(), torch.randn(2, 3, 4).double()
    expected, y = [], start
    for t in range(length):
        y = gate[:, t] * y + drive[:, t]
        expected.append(y)
    assert checks.error(scan.cumulative(gate, drive, start), torch.stack(expected, 1)) < 1e-13


def test_loops_do_not_run_over_tokens() -> None:
    """Doubling the length adds a few operations per chunk of 64, or per level, and none per token."""

    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.operations += 1
            return func(*args, **(kwargs or {}))

    grown = {}
    for run in (scan.sequential, scan.associative, scan.chunked):
        counts = []
        for length in (256, 512):
            c = random_chain("gated rank one", length)
            with Count() as count:
                run(c, *inputs(c, length))
            counts.append(count.operations)
        grown[run] = counts[1] - counts[0]
    assert grown[scan.sequential] > 4 * 256
    assert grown[scan.chunked] < 256 and grown[scan.associative] < 64


@pytest.mark.parametrize("kind", ["identity", "scalar", "diagonal", "gated delta"])
def test_heads_that_share_keys_and_queries_share_their_products(kind: str) -> None:
    """Expanded over the batch or copied: the same outputs, state and gradients."""
    c = random_chain(kind, 70)
    start, q = inputs(c, 70)
    key, query = c.key[:1].clone(), q[:1].clone()

    def run(copied: bool) -> tuple[Tensor, ...]:
        k, x, s = (z.clone().requires_grad_() for z in (key, query, start))
        wide = [z.expand(2, *z.shape[1:]) for z in (k, x)]
        wide = [z.clone() for z in wide] if copied else wide
        b = None if c.b is None else -wide[0][..., None, :, :]
        out, final = scan.chunked(dataclasses.replace(c, key=wide[0], b=b), s, wide[1])
        return out, final, *torch.autograd.grad(out.square().sum() + final.square().sum(), (k, x, s))

    assert checks.error(run(False), run(True)) < 1e-12


def test_second_derivatives() -> None:
    c = random_chain("gated rank one", 5, d=2, d_v=2)
    start, q = inputs(c, 5)
    fields = [n for n in TENSORS if getattr(c, n) is not None]

    def run(start: Tensor, q: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        return scan.chunked(dataclasses.replace(c, **dict(zip(fields, values, strict=True))), start, q, 2)

    live = tuple(x.requires_grad_() for x in (start, q, *(getattr(c, n) for n in fields)))
    assert torch.autograd.gradcheck(run, live, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, live, fast_mode=True)
    assert dispatch.select(CHAINS["gated delta"]).route == "chain"


@pytest.mark.parametrize("damage", ["sign", "gate", "order"])
def test_a_planted_error_is_found(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if damage == "sign":
        solve = torch.linalg.solve_triangular
        monkeypatch.setattr(
            torch.linalg, "solve_triangular", lambda a, b, **k: solve(2 * torch.eye(a.shape[-1]).to(a) - a, b, **k)
        )
    elif damage == "gate":
        transfer = scan._transfer
        monkeypatch.setattr(scan, "_transfer", lambda c, size: transfer(dataclasses.replace(c, gate=0 * c.gate), size))
    else:
        reach_end = scan._reach_end
        monkeypatch.setattr(scan, "_reach_end", lambda pairs, written: reach_end(pairs, written.flip(-4)))
    with pytest.raises(AssertionError):
        check(random_chain("gated rank one", 17), 17)


@pytest.mark.parametrize("damage", ["sign", "border", "few", "before"])
def test_a_planted_error_in_one_state_is_found(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if damage == "sign":
        solve = torch.linalg.solve_triangular
        monkeypatch.setattr(
            torch.linalg, "solve_triangular", lambda a, b, **k: solve(2 * torch.eye(a.shape[-1]).to(a) - a, b, **k)
        )
    elif damage == "border":
        through = staticmethod(lambda gate: gate.flip(-2).cumsum(-2).flip(-2).exp())
        monkeypatch.setattr(one_state._Channels, "after", through)
    elif damage == "few":
        monkeypatch.setattr(one_state, "_PAIRS", 1)
        monkeypatch.setattr(one_state._Channels, "until", staticmethod(torch.ones_like))
    else:
        true = one_state._Channels.scores
        unshifted = lambda self, x, w, before=False: true(self, x, w).tril(-int(before))  # noqa: E731
        monkeypatch.setattr(one_state._Channels, "scores", unshifted)
    with pytest.raises(AssertionError):
        check(random_chain("diagonal delta", 17), 17)


@pytest.mark.parametrize("shape", [(2, 1, 7, 1, 3), (7, 4, 1), (1, 3, 7, 4, 3)])
def test_cumulative_is_the_recurrence_with_both_derivatives(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = (shape, (2, 3, 7, 4, 3), (3, 4, 3))
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in sizes]
    gate, drive, y = inputs
    expected = []
    for t in range(7):
        y = gate[..., t, :, :] * y + drive[..., t, :, :]
        expected.append(y)
    torch.testing.assert_close(scan.cumulative(*inputs), torch.stack(expected, -3), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(scan.cumulative, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(scan.cumulative, inputs, fast_mode=True)


@pytest.mark.parametrize("by", ["numbers", "rows"])
def test_states_are_those_of_a_plain_loop(by: str) -> None:
    """Gates of either sign, zero among them, with all derivatives, and theirs; a batch dimension that keys share."""
    torch.manual_seed(0)
    gate = torch.randn(2, 3, 5, 1 if by == "numbers" else 4, dtype=torch.float64)
    gate[0, 1, 2] = 0.0
    value, key = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(2, 1, 5, 6, dtype=torch.float64)
    given = [x.requires_grad_() for x in (gate, value, key, torch.randn(2, 3, 4, 6, dtype=torch.float64))]

    def loop(gate: Tensor, value: Tensor, key: Tensor, state: Tensor) -> Tensor:
        found = []
        for t in range(5):
            state = gate[..., t, :, None] * state + value[..., t, :, None] * key[..., t, None, :]
            found.append(state)
        return torch.stack(found, -3)

    out, want = states(*given), loop(*given)
    torch.testing.assert_close(out, want)
    weight = torch.randn_like(out)
    for mine, theirs in zip(*(torch.autograd.grad((y * weight).sum(), given) for y in (out, want)), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.autograd.gradgradcheck(states, given, fast_mode=True)
    *others, start = given  # which may have none
    assert torch.autograd.gradgradcheck(lambda *given: states(*given, start.detach()), others, fast_mode=True)


@pytest.mark.parametrize(("rows", "batch", "length"), [(1, (2,), 37), (3, (1,), 37), (1, (), 5)])
def test_entries_read_token_by_token_are_the_recurrence_with_both_derivatives(
    rows: int, batch: tuple[int, ...], length: int
) -> None:
    """Keys of all rows or of each, gates that a batch shares; more tokens than are scanned at a time, and fewer."""
    generator = torch.Generator().manual_seed(2)
    shapes = (*batch, 3, length, 1, 4), (2, 3, length, 1), (2, rows, length, 1, 4), (2, 3, 1, 1, 4), (2, 1, length, 4)
    leaves = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]

    def scanned(*given: Tensor) -> tuple[Tensor, Tensor]:
        block, value, key, start, q = given
        return scan.chunked(Chain(key, value, block=block.tanh()[..., None, :], rows=True), start, q)

    def looped(*given: Tensor) -> tuple[Tensor, Tensor]:
        block, value, key, start, q = given
        y, read = start[..., 0, 0, :], []
        for t in range(length):
            y = block.tanh()[..., t, 0, :] * y + value[..., t, :] * key[..., t, 0, :]
            read.append((y * q[..., t, :]).sum(-1))
        return torch.stack(read, -1)[..., None], y[..., None, None, :]

    given = [torch.randn_like(x) for x in looped(*leaves)]
    ours, theirs = scanned(*leaves), looped(*leaves)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    first, expected = (torch.autograd.grad(made, leaves, given) for made in (ours, theirs))
    torch.testing.assert_close(first, expected, rtol=1e-11, atol=1e-11)
    assert torch.autograd.gradgradcheck(scanned, leaves, fast_mode=True)
