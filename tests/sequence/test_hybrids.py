"""Layers side by side and behind each other: what each gives alone, in every form of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from axes.core.memory import List
from axes.errors import ShapeError, WrongType
from axes.sequence import Based, Behind, Beside, GatedDeltaNet, SlidingWindow, Titans

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
