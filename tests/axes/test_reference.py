"""The interpreter over time: where time and batch dimensions may stand, states, and what it says about bad input."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from systems import CHAINS, KEYED

from axes.core import reference
from axes.core.costs import Alignment
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate, ShapeError
from axes.testing import checks, examples

UPDATE = KEYED["gated delta"]


def test_time_and_batch_dimensions_are_free() -> None:
    signal = checks.example(UPDATE, batch=(2, 3), length=5)
    y, state = reference.run(UPDATE, signal, time=2)
    assert y.shape == (2, 3, 5, 6) and state.theta[0].shape == (2, 3, 6, 4)
    moved = {n: x.movedim(2, 0) for n, x in signal.items() if isinstance(x, torch.Tensor)}
    first, _ = reference.run(UPDATE, moved)
    assert torch.equal(first.movedim(0, 2), y)
    between = {n: x.movedim(2, 1) for n, x in signal.items() if isinstance(x, torch.Tensor)}
    assert torch.equal(reference.run(UPDATE, between, time=1)[0].movedim(1, 2), y)
    one = {n: x[0, 0] for n, x in signal.items() if isinstance(x, torch.Tensor)}
    assert checks.error(reference.run(UPDATE, one)[0], y[0, 0]) < 1e-14


def test_numbers_and_small_tensors_are_constant_in_time() -> None:
    signal = checks.example(UPDATE)
    beta = torch.tensor(0.5, dtype=torch.float64)
    for constant in (0.5, beta):
        y, _ = reference.run(UPDATE, {**signal, "beta": constant}, time=1)
        full = {**signal, "beta": torch.full((2, 7), 0.5, dtype=torch.float64)}
        assert checks.error(y, reference.run(UPDATE, full, time=1)[0]) < 1e-14


def test_without_a_query_the_outputs_are_the_weights() -> None:
    signal = checks.example(UPDATE)
    del signal["q"]
    y, state = reference.run(UPDATE, signal, time=1)
    assert y.shape == (2, 7, 6, 4) and torch.equal(y[:, -1], state.theta[0])


def test_it_starts_from_given_weights() -> None:
    signal, start = checks.example(UPDATE), torch.ones(2, 6, 4, dtype=torch.float64)
    y, _ = reference.run(UPDATE, signal, time=1, weights=(start,))
    state = UPDATE.init({n: x[:, 0] for n, x in signal.items() if isinstance(x, torch.Tensor)}, (start,))
    assert torch.equal(y, reference.run(UPDATE, signal, state, time=1)[0])
    assert not torch.equal(y, reference.run(UPDATE, signal, time=1)[0])


@pytest.mark.parametrize("name", ["gated delta", "titans", "normalised gla", "softmax", "memora", "adam net"])
def test_token_by_token_is_the_run(name: str) -> None:
    update, outputs, state = KEYED[name], [], None
    signal = checks.example(update)
    for datum in reference.tokens(signal, 1):
        state = update.init(datum) if state is None else state
        state, out = update.step(state, datum)
        outputs.append(update.read(out, datum["q"], datum))  # type: ignore[arg-type]
    assert examples.identical((torch.stack(outputs, 1), state), reference.run(update, signal, time=1))


@pytest.mark.parametrize("name", KEYED)
def test_causality(name: str) -> None:
    """Changing token t changes no output before t, and does change one from t on."""
    update = KEYED[name]
    signal, t = checks.example(update), 4
    before, _ = reference.run(update, signal, time=1)
    changed = {n: x.clone() for n, x in signal.items() if isinstance(x, torch.Tensor)}
    for x in changed.values():
        x[:, t] = x[:, t] * 0.5
    after, _ = reference.run(update, changed, time=1)
    assert torch.equal(after[:, :t], before[:, :t]) and not torch.equal(after[:, t:], before[:, t:])


@pytest.mark.parametrize("name", CHAINS)
def test_sequences_of_a_batch_do_not_mix(name: str) -> None:
    signal = checks.example(KEYED[name])
    y, _ = reference.run(KEYED[name], signal, time=1)
    alone, _ = reference.run(KEYED[name], {n: x[1:] for n, x in signal.items() if isinstance(x, torch.Tensor)}, time=1)
    assert checks.error(alone, y[1:]) < 1e-13


def test_nothing_is_written_in_place() -> None:
    """Inputs and the state that was passed in are as they were; the source has no trailing-underscore methods."""
    for name in ("two filters", "softmax", "adam net", "lattice sim"):
        signal = checks.example(KEYED[name])
        _, state = reference.run(KEYED[name], signal, time=1)
        kept = [
            x.clone() for x in (*checks.leaves(state), *(x for x in signal.values() if isinstance(x, torch.Tensor)))
        ]
        reference.run(KEYED[name], signal, state, time=1)
        now = [*checks.leaves(state), *(x for x in signal.values() if isinstance(x, torch.Tensor))]
        assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True)), name
    folder = Path(reference.__file__).parent
    parts = "reference", "state_update", "memory", "monoids", "costs"
    links = "norms", "balls", "normalised", "wrappers"
    for module in [folder / f"{n}.py" for n in parts] + [folder / "geometry" / f"{n}.py" for n in links]:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                method = node.func.attr
                where = f"{module.name}: {method} at {node.lineno}"
                assert not (method.endswith("_") and not method.startswith("_")), where
                assert method != "item", where


def test_an_empty_sequence() -> None:
    signal = {n: x[:, :0] for n, x in checks.example(UPDATE).items() if isinstance(x, torch.Tensor)}
    with pytest.raises(ShapeError, match="pass state="):
        reference.run(UPDATE, signal, time=1)
    _, state = reference.run(UPDATE, checks.example(UPDATE), time=1)
    y, after = reference.run(UPDATE, signal, state, time=1)
    assert y.shape == (2, 0, 6) and after is state


def test_bad_signals() -> None:
    signal = checks.example(UPDATE)
    v = signal["v"]
    assert isinstance(v, torch.Tensor)
    with pytest.raises(ShapeError, match="disagree about time"):
        reference.run(UPDATE, {**signal, "v": v[:, :3]}, time=1)
    with pytest.raises(ShapeError, match="'beta'.*does not supply"):
        reference.run(UPDATE, {n: x for n, x in signal.items() if n != "beta"}, time=1)
    with pytest.raises(IllegalUpdate, match="keys 'k'"):
        reference.run(StateUpdate(Alignment()), {"v": v, "q": v}, time=1)
    with pytest.raises(IllegalUpdate, match="driven from outside"):
        update = KEYED["titans"].filters()[0]
        update.step(update.init({"g": torch.zeros(3)}), {"mu": -1.0, "beta": 1.0})
