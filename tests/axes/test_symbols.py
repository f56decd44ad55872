"""A tuple's recurrence in symbols says what is executed, and tells tuples apart."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, final

import pytest
import torch
from torch import Tensor

from axes import catalogue, symbols
from axes.core.algorithms import Anchor, Step
from axes.core.costs import Alignment, Huber, Lp, SquaredError
from axes.core.geometry import Context, Entropic, Geometry
from axes.core.memory import Matrix
from axes.core.monoids import Diagonal, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.symbols import equations
from axes.testing.examples import error, example, trajectory
from tests.latex import Unread, worked_out

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
        r"S_t = S_{t-1}\,\mathrm{Sinkhorn}_{20}(\exp(M_t))^\top + u_t",
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


# ---- what is written, worked out -------------------------------------------------------------------------------------

# Newton-Schulz ends in a band around one; printed numbers have four digits
PRECISION = {"muon": 0.1, "normuon": 0.1, "adamuon": 0.1, "muon-net": 0.1, "natural-gradient": 2e-3, "mhc": 1e-3}
ANCHOR = r"_\{(\d+) \\lfloor \(t-1\)/\1 \\rfloor\}"


class Walk:
    """The lines of a tuple, worked out one datum after another on the data of its example."""

    def __init__(self, update: StateUpdate, length: int) -> None:
        self.p, self.lines = update.parts(), [re.sub(ANCHOR, "_{b}", line) for line in equations(update)]
        self.keyed = self.p.memory.keyed
        if self.keyed and not isinstance(self.p.memory, Matrix) or self.p.step.writes > 1:
            raise Unread("only matrices with one write are read")
        self.signal: Any = example(update, batch=(), length=length)
        self.unit = {per.name for per in update.demands() if per.domain == "unit"}
        g, k, v = (self.signal.get(name) for name in "gkv")
        start = g.new_zeros(0) if g is not None else k.new_zeros(v.shape[-1], k.shape[-1])
        start = g[0] if g is not None else start
        read = self.p.h.is_identity or not self.p.step.lazy or self.p.h.stats
        shown = start if read else self.p.h.primal(start)
        self.held = {"W": shown, "S": shown, "Theta": start}
        height, width = start.shape
        self.sizes = {"m": height, "n": width, "d_v": height, "d_k": width}
        self.before: dict[str, Any] = {f"{name}_t": x for name, x in self.held.items()} | {"y_t": shown}
        self.now: dict[str, Any] = {}
        self.outputs = [self.step(t) for t in range(length)]

    def step(self, t: int) -> Tensor:
        self.t, self.now = t, {}
        if isinstance(at := self.p.step.at, Anchor) and t % at.every == 0:
            self.anchor = {name: self.before.get(f"{name}_t") for name in ("S", "W")}
        for line in self.lines:
            if (start := re.search(r",\\quad (\S+)_0 = W_0$", line)) is not None:
                self.before.setdefault(f"{start[1]}_t", self.held["W"])
                line = line[: start.start()]
            worked_out(line, self.now, self.value)
        self.before = self.now
        return self.now["o_t" if self.keyed else "W_t" if self.p.step.read is None else "y_t"]

    def value(self, name: str) -> Any:
        word, _, index = name.partition("_")
        if name == "gradient":  # of the loss of `trajectory`
            return lambda w: w / 2 + self.signal["g"][self.t]
        if name == "t":
            return float(self.t + 1)
        if index == "t-1":
            return self.before.get(f"{word}_t", 0.0)
        if name in self.now:
            return self.now[name]
        if index in ("0", "b"):
            return self.anchor[word] if index == "b" else self.held[word]
        if name in self.sizes:
            return float(self.sizes[name])
        words = [key for key, symbol in symbols._NAMES.items() if symbol.replace("\\", "") == name]
        own = word.removeprefix("word ").replace("-", "_")
        names = (own,) if word.startswith("word ") else (*words, own)
        rate = next((key for key in names if key in self.signal), None)
        if rate is None:
            raise Unread(name)
        x = self.signal[rate][self.t]
        x = x.exp() if rate in self.unit else x
        return x[:, None] if x.ndim == 1 else x


def test_what_is_printed_is_what_is_executed() -> None:
    """Of most of the catalogue, by a calculator that knows nothing of the package; the rest has words in its lines."""
    read, unread = [], {}
    for entry in catalogue.entries():
        try:
            found = torch.stack(Walk(entry.update, 6).outputs)
        except Unread as reason:
            unread[entry.name] = str(reason)
            continue
        expected, _ = trajectory(entry.update, example(entry.update, batch=(), length=6))
        gap = error(found.view_as(expected), expected)
        assert gap < PRECISION.get(entry.name, 1e-6), (entry.name, gap)
        read.append(entry.name)
    assert len(read) > 75, unread
