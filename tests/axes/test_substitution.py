"""Nonlinear drives found from inner products of keys: long chunks, packed sequences, bad numbers, refusals."""

from __future__ import annotations

import pytest
import torch
from systems import BETA, ROW_BETA, SUBSTITUTIONS
from torch import Tensor

from axes import catalogue
from axes.core import reference
from axes.core.algorithms import Anchor, Step
from axes.core.costs import Alignment, Huber, Lp, SquaredError
from axes.core.derived import no_substitution
from axes.core.execution import State
from axes.core.geometry import Sphere
from axes.core.memory import MLP
from axes.core.monoids import Diagonal, Scalar
from axes.core.state_update import OnUpdate, StateUpdate
from axes.errors import AxesError
from axes.routes import dispatch, substitution, substitution_kernel
from axes.testing import checks, examples

EXACT = 1e-9
ROWS = StateUpdate(Huber(ROW_BETA), monoid=Diagonal("row_decay", side="row"), algorithm=Step(ROW_BETA))
BALL = StateUpdate(SquaredError(), OnUpdate(Sphere("whole")), Scalar("decay"), Step(BETA))


def example(update: StateUpdate, length: int, **sizes: int) -> dict[str, Tensor]:
    return {n: x for n, x in checks.example(update, length=length, **sizes).items() if isinstance(x, Tensor)}  # type: ignore[arg-type]


def both(update: StateUpdate, signal: dict[str, Tensor]) -> list[tuple[object, object]]:
    """Results and all gradients by the route and by the interpreter."""
    live = {n: x.clone().requires_grad_() for n, x in signal.items()}
    results = [f(update, live, time=1) for f in (dispatch.run, reference.run)]
    return [(r, examples.gradients(r, live)) for r in results]  # type: ignore[misc]


@pytest.mark.parametrize("length", [64, 150])
@pytest.mark.parametrize("update", [ROWS, BALL], ids=["by rows", "on a ball"])
def test_several_chunks(update: StateUpdate, length: int) -> None:
    assert dispatch.select(update).route == "substitution"
    signal = example(update, length)
    for rate in {"beta", "row_beta"} & set(signal):  # long steps of one length overshoot, and then rounding grows
        signal[rate] = 0.1 * signal[rate]
    assert checks.error(*both(update, signal)) < EXACT


@pytest.mark.parametrize("name", SUBSTITUTIONS)
def test_keys_of_one_entry(name: str) -> None:
    update = SUBSTITUTIONS[name]
    assert checks.error(*both(update, example(update, 5, d_k=1, d_v=1 if "ttt" in name else 3))) < EXACT


@pytest.mark.parametrize("name", ["huber by rows", "ttt, every token", "frank-wolfe on a ball"])
def test_packed_sequences_from_states_of_their_own(name: str) -> None:
    update = SUBSTITUTIONS[name]
    signal = {n: x[:1] for n, x in example(update, 23).items()}
    first = {n: x[:, 0].expand(3, *x.shape[2:]) for n, x in signal.items()}
    start = tuple(x + torch.randn(3, *x.shape[1:], dtype=x.dtype) for x in update.init(first).theta)
    offsets = torch.tensor([0, 1, 18, 23])
    out, last = dispatch.run_packed(update, signal, update.init(first, start), offsets)
    assert last is not None
    for n, (a, b) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        own = {m: x[:, a:b] for m, x in signal.items()}
        y, state = reference.run(update, own, time=1, weights=tuple(x[n : n + 1] for x in start))
        assert checks.error((out[:, a:b], last.theta[0][n : n + 1]), (y, state.theta[0])) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("update", [ROWS, BALL], ids=["by rows", "on a ball"])
def test_closed_gates_and_zero_keys_leave_numbers(update: StateUpdate, dtype: torch.dtype) -> None:
    signal = {n: x.to(dtype) for n, x in example(update, 40).items()}
    for name, x in signal.items():
        if "decay" in name:
            x[:, 5::7] = -torch.inf
            x[:, 6::7] = 0.0
    signal["k"][:, 3] = 0.0
    signal["v"][:, 4] = 0.0
    (found, grads), (expected, _) = both(update, signal)
    assert all(bool(g.isfinite().all()) for g in grads)  # type: ignore[attr-defined]
    assert checks.error(found, expected) < (EXACT if dtype == torch.float64 else 1e-4)


def test_second_derivatives_are_refused() -> None:
    signal = {n: x.requires_grad_() for n, x in example(ROWS, 5).items()}
    out, _ = dispatch.run(ROWS, signal)
    with pytest.raises(AxesError, match="first derivatives only.*implementation='reference'"):
        torch.autograd.grad(out.square().sum(), signal["k"], create_graph=True)


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (StateUpdate(Huber(1.0), algorithm=Step(BETA), memory=MLP(2)), "not one matrix"),
        (StateUpdate(Huber(1.0), Sphere("rows"), Scalar("decay"), Step(BETA)), "acts on the state"),
        (StateUpdate(Huber(1.0), monoid=Diagonal("key_decay"), algorithm=Step(BETA)), "rows or on the whole"),
        (StateUpdate(SquaredError(), OnUpdate(Sphere("columns")), Scalar("decay"), Step(BETA)), "where keys point"),
        (StateUpdate(SquaredError(), OnUpdate(Sphere("rows", None)), Scalar("decay"), Step(BETA)), "where keys point"),
        (StateUpdate(Huber(1.0), algorithm=Step(BETA, steps=2)), "several steps"),
        (StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA)), "the chain is its exact form"),
        (StateUpdate(Alignment(), algorithm=Step(ROW_BETA)), "does not depend on the state"),
    ],
    ids=range(8),
)
def test_reasons_against_it(update: StateUpdate, reason: str) -> None:
    assert reason in str(no_substitution(update))


@pytest.mark.parametrize("damage", ["slopes", "order"])
def test_a_planted_error_is_found(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update = StateUpdate(Lp(3.0), monoid=Scalar("decay"), algorithm=Step(BETA))
    signal = example(update, 6)
    signal["v"] = 0.1 * signal["v"]
    assert checks.error(*both(update, signal)) < EXACT
    if damage == "slopes":
        slopes = substitution._Tape._slopes
        monkeypatch.setattr(substitution._Tape, "_slopes", lambda tape: 0.9 * slopes(tape))
    else:
        gate = substitution.row_gate
        monkeypatch.setattr(substitution, "row_gate", lambda *args: 0.9 * gate(*args))
    assert checks.error(*both(update, signal)) > 1e-4


@pytest.mark.parametrize("rest", [5, 3])
def test_tokens_up_to_an_anchor_and_behind_it_are_one_sequence(rest: int) -> None:
    """Kernels start at an anchor: what stands before it is torch's, and its state is what they go on from."""
    update = catalogue.get("yaad-matrix", "sequence").update
    assert update.parts().step.at == Anchor(16)
    signal = {n: x.unsqueeze(2).float() for n, x in example(update, 11 + rest + 24).items()}
    want, last = dispatch.run(update, signal, time=1)
    _, state = dispatch.run(update, {n: x[:, :11] for n, x in signal.items()}, time=1)
    asked: list[int] = []

    def kernels(update: StateUpdate, signal: dict[str, Tensor], state: State, _: None) -> tuple[Tensor, State]:
        asked.append(int(state.count))
        return dispatch.run(update, signal, state, time=1)

    if rest == 3:  # no token is behind the anchor
        signal, want = {n: x[:, :14] for n, x in signal.items()}, want[:, :14]
    behind = {n: x[:, 11:] for n, x in signal.items()}
    out, end = substitution_kernel.up_to_anchor(update, behind, state, rest, substitution.run, kernels)
    torch.testing.assert_close(out, want[:, 11:], rtol=1e-5, atol=1e-6)
    if rest == 5:
        assert asked == [16]
        torch.testing.assert_close(end.theta[0], last.theta[0], rtol=1e-5, atol=1e-6)
    else:
        assert not asked and int(end.count) == 14
