"""The common suite as people with tuples of their own meet it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import pytest
import torch
from torch import Tensor

from axes import AxesError, Per, StateUpdate, Step
from axes.costs import Given, Lp, SquaredError
from axes.geometry import Context, Geometry
from axes.monoids import Scalar
from axes.sequence import layer
from axes.testing.suite import Suite, agrees, check, learns

GATED = StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(Per("beta")))
SIGN = StateUpdate(Lp(1.0, smooth=None), monoid=Scalar("decay"), algorithm=Step(Per("beta")))


class TestGated(Suite):
    update = GATED


class TestSign(Suite):
    update = SIGN


def gated(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    state, out = torch.zeros(v.shape[-1], k.shape[-1], dtype=v.dtype), []
    for t in range(len(k)):
        state = decay[t] * state - beta[t] * torch.outer(state @ k[t] - v[t], k[t])
        out.append(state @ q[t])
    return torch.stack(out)


def test_a_formula_that_is_the_tuple() -> None:
    agrees(GATED, gated)


def test_the_other_order_is_another_system() -> None:
    other = StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(Per("beta"), at="gated"))
    with pytest.raises(AssertionError, match=r"away from the formula \(allowed 1e-10\), first at token 1 of 17"):
        agrees(other, gated)
    with pytest.raises(AssertionError, match=r"the formula returns \(3, 6\), the tuple \(17, 6\)"):
        agrees(GATED, lambda **given: gated(**given)[:3])


def test_a_formula_is_told_what_it_must_take_and_give() -> None:
    with pytest.raises(AxesError, match="must take beta, decay, k, q, v: got an unexpected keyword argument"):
        agrees(GATED, lambda q, k, v: v)
    with pytest.raises(AxesError, match=r"must return outputs \(17, 6\), got None"):
        agrees(GATED, lambda **given: None)  # type: ignore[arg-type, return-value]
    agrees(TestGated, gated)


def test_gradients_from_outside_have_no_sequence() -> None:
    with pytest.raises(AxesError, match="step axes.optim.optimizer"):
        agrees(StateUpdate(Given(), algorithm=Step(Per("lr"))), gated)


@final
@dataclass(frozen=True, repr=False)
class Lying(Geometry):
    """Says that it acts entry by entry, and takes the mean away."""

    entrywise = True

    def primal(self, theta: Tensor, context: Context = Context()) -> Tensor:
        return theta - theta.mean((-2, -1), keepdim=True)


def test_all_that_fail_are_named_and_excuses_are_used_up() -> None:
    false = StateUpdate(Given(), Lying(), algorithm=Step(Per("lr")))
    with pytest.raises(AssertionError, match="check_declarations: .* says that it acts entry by entry"):
        check(false)

    class Excused:
        update = GATED
        known_failures = (("check_split", "not yet"),)

    with pytest.raises(AssertionError, match=r"check_split: passes, where a failure was expected \(not yet\)"):
        check(Excused())
    with pytest.raises(AxesError, match="neither a StateUpdate nor something"):
        check("delta")


def test_a_sign_without_a_derivative_stops_learning() -> None:
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0))
    learns(layer(StateUpdate(Lp(1.0), monoid=Scalar("decay"), algorithm=Step(Per("beta"))))(16, heads=2), x)
    with pytest.raises(AssertionError, match=r"does not learn .*v_proj.weight \(no gradient\)"):
        learns(layer(SIGN)(16, heads=2), x)
    with pytest.raises(AssertionError, match="the output depends on no parameter"):
        learns(torch.nn.Identity(), x)


def test_a_sign_leaves_a_nan_what_it_is() -> None:
    e = torch.tensor([float("nan"), 0.0, -2.0])
    found = SIGN.parts().cost.residual(e, torch.zeros(3))
    assert found[0].isnan() and found[1:].tolist() == [0.0, -1.0]
