"""Turning states in the frame that turns along: queries and keys turned back give what the interpreter gives."""

from __future__ import annotations

import pytest
import torch

from axes import catalogue
from axes.core import reference
from axes.core.algorithms import Step
from axes.core.costs import Alignment, SquaredError
from axes.core.monoids import Identity, Product, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.routes import frame as frames
from axes.routes.frame import frame

TURNING = {
    "alone": (Rotation(), Identity()),
    "gated": (Product((Scalar("decay"), Rotation(100.0))), Scalar("decay")),
    "behind two gates": (
        Product((Rotation(0.3, uniform=True), Scalar("decay"), Scalar(0.9))),
        Product((Scalar("decay"), Scalar(0.9))),
    ),
}


def turned_back(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """The n-th token (B, T, H, d), from 1 on, by n angles, pairs as complex numbers."""
    turns = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None, None] * angle
    pairs = torch.complex(*x.unflatten(-1, (2, -1)).unbind(-2)) * torch.polar(torch.ones_like(turns), -turns)
    return torch.cat((pairs.real, pairs.imag), -1)


@pytest.mark.parametrize("name", TURNING)
def test_the_still_update_of_turned_tokens_is_the_turning_one(name: str) -> None:
    monoid, rest = TURNING[name]
    update = StateUpdate(Alignment(), monoid=monoid, algorithm=Step(Per("beta")))
    found = frame(update)
    assert found is not None and found.still == StateUpdate(Alignment(), monoid=rest, algorithm=Step(Per("beta")))
    q, k, v = torch.randn(3, 2, 11, 2, 6, dtype=torch.float64).unbind()
    signal = {"q": q, "k": k, "v": v, "beta": torch.rand(2, 11, 2).double()}
    if any(per.name == "decay" for per in update.demands()):
        signal["decay"] = -torch.rand(2, 11, 2).double()
    first = update.init({"k": k[:, 0], "v": v[:, 0]}, (torch.randn(2, 2, 6, 6, dtype=torch.float64),))
    want, last = reference.run(update, signal, first, time=1)
    angle = found.rotation.element({}, 1.0, k).angle
    turned = {**signal, "q": turned_back(q, angle), "k": turned_back(k, angle)}
    out, after = frames.run(found, turned, first)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(after.theta[0], last.theta[0])
    assert after.count == last.count == 11

    cu = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    pieces = [slice(a, b) for a, b in ((0, 4), (4, 4), (4, 11))]
    start = update.init({"k": k[:1, 0].expand(3, -1, -1), "v": v[:1, 0].expand(3, -1, -1)})
    packed = {n: x[:1] for n, x in signal.items()}
    for n in "qk":
        packed[n] = torch.cat([turned_back(packed[n][:, p], angle) for p in pieces], 1)
    out, after = frames.run(found, packed, start, cu)
    for i, p in enumerate(pieces):
        if p.start < p.stop:
            want, last = reference.run(update, {n: x[:1, p] for n, x in signal.items()}, time=1)
            torch.testing.assert_close(out[:, p], want)
            torch.testing.assert_close(after.theta[0][i], last.theta[0][0])


def test_who_has_a_frame() -> None:
    assert {e.cls.name for e in catalogue.entries("sequence") if frame(e.cls.update)} == {"retnet", "gated-retention"}
    per = StateUpdate(Alignment(), monoid=Rotation(Per("angle", "pair", "real")))
    erasing = StateUpdate(SquaredError(), monoid=Rotation(), algorithm=Step(Per("beta"), at="gated"))
    twice = StateUpdate(Alignment(), monoid=Product((Rotation(), Rotation(50.0))))
    assert frame(per) is frame(erasing) is frame(twice) is None
