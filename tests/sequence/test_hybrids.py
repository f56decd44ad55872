"""Layers side by side and behind each other: what each gives alone, in every form of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from axes.core.memory import List
from axes.errors import ShapeError, WrongType
from axes.sequence import (
    MLSTM,
    Based,
    Behind,
    Beside,
    Context,
    GatedDeltaNet,
    Persistent,
    SlidingWindow,
    SoftmaxAttention,
    Titans,
)

B, T, D = 2, 11, 12
_WINDOW = replace(SlidingWindow.update, memory=List(window=4))


def layers(memory: type = GatedDeltaNet) -> tuple[Any, Any]:
    return memory(D, heads=2, dtype=torch.float64), SlidingWindow(D, heads=2, dtype=torch.float64, update=_WINDOW)


def tokens(batch: int = B) -> Tensor:
    return torch.randn(batch, T, D, dtype=torch.float64)


def made(kind: str) -> Any:
    pair = layers(Titans if kind == "behind" else Based if kind == "weighed" else GatedDeltaNet)
    if kind == "behind":
        return Behind(*pair)
    whole = Beside(*pair, gate=kind == "weighed")
    if whole.weigh is not None:
        torch.nn.init.normal_(whole.weigh.weight)
    return whole


every = pytest.mark.parametrize("kind", ("added", "weighed", "behind"))


@every
def test_what_each_gives_alone(kind: str) -> None:
    whole, x = made(kind), tokens()
    first, second = whole.layers
    y, states = whole(x)
    a, one = first(x)
    b, other = second(a if kind == "behind" else x)
    expected = b if kind == "behind" else a + b
    if kind == "weighed":
        shares = torch.exp(x @ whole.weigh.weight.T)
        shares = shares / shares.sum(-1, keepdim=True)
        expected = shares[..., :1] * a + shares[..., 1:] * b
    torch.testing.assert_close(y, expected)
    for found, known in zip(states, (one, other), strict=True):
        for p, q in zip(found.memory.theta, known.memory.theta, strict=True):
            assert torch.equal(p, q)


@every
def test_token_by_token_packed_and_masked(kind: str) -> None:
    whole, x = made(kind), tokens()
    with torch.no_grad():
        y, _ = whole(x)
        state, outputs = whole.init_state(B, dtype=torch.float64), []
        for t in range(T):
            out, state = whole.step(x[:, t], state)
            outputs.append(out)
        torch.testing.assert_close(torch.stack(outputs, 1), y)
        head, state = whole(x[:, :5])
        torch.testing.assert_close(torch.cat((head, whole(x[:, 5:], state)[0]), 1), y)
        packed, _ = whole(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, T, B * T]))
        torch.testing.assert_close(packed[0].unflatten(0, (B, T)), y)
        mask = torch.ones(B, T, dtype=torch.bool)
        mask[0, 7:] = False
        torch.testing.assert_close(whole(x, mask=mask)[0][0, :7], y[0, :7])


def test_a_fresh_gate_weighs_all_alike_and_learns() -> None:
    whole, x = Beside(*layers(), gate=True), tokens()
    a, b = (f(x)[0] for f in whole.layers)
    torch.testing.assert_close(whole(x)[0], (a + b) / 2)
    whole(x)[0].square().sum().backward()
    assert whole.weigh is not None and whole.weigh.weight.grad is not None
    assert whole.weigh.weight.grad.abs().max() > 0
    whole.reset_parameters()
    assert whole.weigh.weight.abs().max() == 0


def test_a_memory_as_a_gate_is_a_product() -> None:
    whole, x = Beside(*layers(), gate="product"), tokens()
    a, b = (f(x)[0] for f in whole.layers)
    torch.testing.assert_close(whole(x)[0], a * b)


@every
def test_learned_tokens_stand_ahead_of_every_sequence(kind: str) -> None:
    whole = Persistent(made(kind), 3)
    x = tokens()
    y, end = whole(x)
    expected, known = whole.layer(torch.cat((whole.tokens.expand(B, 3, D), x), 1))
    torch.testing.assert_close(y, expected[:, 3:])
    packed, _ = whole(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, T, B * T]))
    torch.testing.assert_close(packed[0].unflatten(0, (B, T)), y)
    (grad,) = torch.autograd.grad(y.square().sum(), whole.tokens)
    assert grad.abs().max() > 0
    with torch.no_grad():
        state, outputs = None, []
        for t in range(T):
            out, state = whole.step(x[:, t], state)
            outputs.append(out)
    torch.testing.assert_close(torch.stack(outputs, 1), y)


@pytest.mark.parametrize("memory", [GatedDeltaNet, Titans, SlidingWindow, MLSTM])
def test_what_is_recalled_is_read_and_not_written(memory: type) -> None:
    """The output of a token whose write and gate do nothing: here, of the memory it stands behind, in plain steps."""
    m = memory(D, heads=2, dtype=torch.float64)
    x, more = tokens(), tokens()
    _, state = m(x)
    found, after = m.recall(more, state)
    signal, _, kept = m.around.enter(more, state.tails)
    reads = []
    for t in range(T):
        datum = {n: y[:, t] for n, y in signal.items()}
        reads.append(m.update.read(m.update.output(state.memory, datum), datum["q"], datum))
    torch.testing.assert_close(found, m.around.leave(torch.stack(reads, 1), kept))
    assert after.memory is state.memory


def test_a_memory_as_context() -> None:
    """Titans, section 4.1, token by token: segments of 4, each attending to p, what it recalls and itself."""
    memory, attention = (f(D, heads=2, dtype=torch.float64) for f in (GatedDeltaNet, SoftmaxAttention))
    whole, x = Context(memory, attention, segment=4, tokens=2), tokens()
    state, outputs = memory.init_state(B, dtype=torch.float64), []
    before = memory.init_state(B, dtype=torch.float64)
    for first in range(0, T, 4):
        part, begun = x[:, first : first + 4], before._replace(memory=state.memory)
        for i in range(part.shape[1]):
            seen = [whole.attention.tokens.expand(B, 2, D)]
            for j in range(i + 1):
                seen += [memory.recall(part[:, : j + 1], begun)[0][:, j:], part[:, j : j + 1]]
            y = attention(torch.cat(seen, 1))[0][:, -1]
            read, state = memory.step(y, state)
            outputs.append(y * read)
        before = memory.recall(part, begun)[1]
    y, end = whole(x)
    torch.testing.assert_close(y, torch.stack(outputs, 1))
    assert int(end.place) == T % 4
    with torch.no_grad():  # in parts, token by token, packed and masked
        head, middle = whole(x[:, :6])
        torch.testing.assert_close(torch.cat((head, whole(x[:, 6:], middle)[0]), 1), y)
        packed, _ = whole(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, T, B * T]))
        torch.testing.assert_close(packed[0].unflatten(0, (B, T)), y)
        mask = torch.ones(B, T, dtype=torch.bool)
        mask[0, 7:] = False
        padded, _ = whole(x, mask=mask)
        torch.testing.assert_close(padded[0, :7], y[0, :7])
        assert not padded[0, 7:].any()
    wanted = list(whole.parameters())
    assert all(g is not None for g in torch.autograd.grad(y.square().sum(), wanted, allow_unused=True))


def test_a_context_looks_at_no_later_token() -> None:
    memory, attention = (f(D, heads=2, dtype=torch.float64) for f in (GatedDeltaNet, SoftmaxAttention))
    whole, x = Context(memory, attention, segment=5, tokens=1), tokens(1).requires_grad_()
    y, _ = whole(x)
    for t in (2, 6):
        (grad,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        assert not grad[0, t + 1 :].any() and grad[0, : t + 1].abs().sum(-1).min() > 0


def test_what_is_no_hybrid_is_named() -> None:
    one, window = layers()
    with pytest.raises(ShapeError, match="Beside: give at least two layers, got 1"):
        Beside(one)
    with pytest.raises(WrongType, match="Behind: layer 1 must be a sequence layer"):
        Behind(one, torch.nn.Linear(3, 3))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"layers have one width, got d_model=\[12, 16\]"):
        Beside(one, GatedDeltaNet(16, heads=2))
    with pytest.raises(WrongType, match="Beside: state must be a tuple of 2 layers' states"):
        Beside(one, window)(tokens(), one.init_state(B))
    with pytest.raises(WrongType, match="Beside: gate must be a bool, or 'product'"):
        Beside(one, window, gate="sum")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="Persistent: tokens must be at least 1, got 0"):
        Persistent(one, 0)
    with pytest.raises(WrongType, match="Context: attention must be a sequence layer"):
        Context(one, Beside(one, window))  # type: ignore[arg-type]
    with pytest.raises(WrongType, match="Context: state must be a ContextState"):
        Context(one, window)(tokens(), one.init_state(B))
