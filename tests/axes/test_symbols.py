"""A tuple's recurrence in symbols says what is executed, and tells tuples apart."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import final

import pytest
from torch import Tensor

from axes import catalogue
from axes.core.algorithms import Step
from axes.core.costs import Alignment, Huber, Lp, SquaredError
from axes.core.geometry import Context, Entropic, Geometry
from axes.core.monoids import Diagonal, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.symbols import equations

PRINTED = {
    # eq. 10 of the paper, its two factors apart
    "gated-delta-net": (
        r"\bar{S}_t = \alpha_t\,S_{t-1}",
        r"e_t = \bar{S}_t\,k_t - v_t",
        r"u_t = -e_t\,k_t^\top",
        r"S_t = \bar{S}_t + \beta_t\,u_t",
        r"o_t = S_t\,q_t",
    ),
    "adamw": (
        r"u_t = -\nabla \ell_t(W_{t-1})",
        r"m_t = 0.9\,m_{t-1} + 0.1\,u_t",
        r"v_t = 0.999\,v_{t-1} + 0.001\,(u_t \odot u_t)",
        r"\hat{v}_t = v_t / (1 - 0.999^t)",
        r"d_t = \frac{m_t / (1 - 0.9^t)}{\sqrt{\hat{v}_t} + 10^{-8}}",
        r"W_t = (1 - \eta_t\,\lambda)\,W_{t-1} + \eta_t\,d_t",
    ),
    "fox": (
        r"K_t = (k_1, \dots, k_t),\quad V_t = (v_1, \dots, v_t)",
        r"m_i \leftarrow m_i + \log f_t\quad (i < t),\quad m_t = 0",
        r"o_t = \sum_{i \le t} \mathrm{softmax}_i(d_k^{-1/2}\,k_i^\top q_t + m_i)\,v_i",
    ),
    "mhc": (
        r"u_t = v_t\,k_t^\top",
        r"S_t = S_{t-1}\,\mathrm{Sinkhorn}_{20}(\exp M_t)^\top + u_t",
        r"o_t = S_t\,q_t",
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_as_printed(name: str) -> None:
    assert equations(catalogue.get(name).update) == PRINTED[name]


def test_every_instance_has_its_recurrence() -> None:
    for entry in catalogue.entries():
        lines = equations(entry.update)
        assert lines and all(line.count("{") == line.count("}") for line in lines), entry.name
        assert not any(re.search(r"\\mathrm\{(axes|Geometry|Cost|Monoid)", line) for line in lines), entry.name
        demanded = {per.name for per in entry.update.demands()} - {"ln_gain", "ln_bias"}
        assert not demanded or len(lines) > 1, entry.name


def test_what_differs_in_meaning_differs_in_symbols() -> None:
    base = StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(Per("beta")))
    others = (
        replace(base, cost=Huber(0.5)),
        replace(base, cost=Lp(1.0)),
        replace(base, cost=Lp(1.0, smooth=None)),
        replace(base, cost=Lp(1.5)),
        replace(base, cost=Lp(3.0)),
        replace(base, h=Entropic()),
        replace(base, monoid=Diagonal("decay")),
        replace(base, monoid=Diagonal("decay", side="row")),
        replace(base, algorithm=Step(Per("beta"), at="gated")),
        replace(base, algorithm=Step(Per("beta"), at="new")),
        replace(base, algorithm=Step(Per("beta", "row"))),
        replace(base, algorithm=Step(Per("beta"), writes=2)),
        replace(base, algorithm=Step(Per("beta"), steps=2)),
        replace(base, cost=Alignment()),
        replace(base, cost=Alignment(), algorithm=Step(Per("beta"), debias=True)),
    )
    assert len({equations(update) for update in (base, *others)}) == len(others) + 1


@final
@dataclass(frozen=True, repr=False)
class Softsign(Geometry):
    """W = theta / (1 + |theta|)."""

    entrywise = True

    def primal(self, theta: Tensor, context: Context = Context()) -> Tensor:
        return theta / (1 + theta.abs())


def test_a_part_of_ones_own_goes_by_its_name() -> None:
    update = StateUpdate(SquaredError(), Softsign(), algorithm=Step(Per("beta")))
    assert r"W_t = \mathrm{Softsign}(\Theta_t)" in equations(update)
