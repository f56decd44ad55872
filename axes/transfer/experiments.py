"""The experiments: a method of one axis on another, beside the same tuple without it.

An experiment is a pair of tuples on the axis where it runs. The control is made from the arm by what is said to have
moved, so that nothing else can differ; where a method comes with a field of its own (a statistic with its rate), that
field goes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from axes import catalogue
from axes.core.algorithms import Step
from axes.core.costs import Alignment, Linear, SquaredError
from axes.core.geometry import Euclidean, Whiten
from axes.core.memory import Matrix
from axes.core.monoids import Householder, Identity, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, UnknownName
from axes.moves import Axis, Difference, differences, replaced

RECALL, COPY, TEXT, DIGITS, LAYERS = "multi-query-recall", "selective-copy", "text", "digits", "deep-narrow"


@final
@dataclass(frozen=True)
class Experiment:
    """What moved, from where, onto which axis; the arm, and what its control has in the place of what moved.

    without: values by path (`axes.moves.replaced`) that make the control of the arm.  margin: differences up to it do
    not matter, in the unit of the first task's metric.
    """

    id: str
    question: str
    source: str
    axis: Axis
    arm: StateUpdate
    without: tuple[tuple[str, Any], ...]
    tasks: tuple[str, ...]
    margin: float = 0.02

    def __post_init__(self) -> None:
        if self.control == self.arm:
            raise AxesError(f"{self.id}: the control is the arm; what moved must differ")

    @cached_property
    def control(self) -> StateUpdate:
        return replaced(self.arm, dict(self.without))

    @property
    def moved(self) -> tuple[Difference, ...]:
        """Field by field, control to arm."""
        return differences(self.control, self.arm)


def _of(name: str) -> StateUpdate:
    update: StateUpdate = catalogue.get(name).update
    return update.normal()


_WRITE, _FORGET = Per("beta"), Per("decay", "scalar", "unit")
_SQUARES = StateUpdate(Linear(of="square"), monoid=Scalar(0.95), algorithm=Step(0.05, debias=True))
_ADAM = StateUpdate(Linear(), Whiten((_SQUARES,), eps=1e-4), Scalar(0.9))
_UNMOVED = (("monoid", Identity()),)  # the state stays as it is between two writes
_NEW = (RECALL, COPY)

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment("S1", "does the metric of recursive least squares help tokens recall?", "recursive-least-squares",
               "sequence", _of("rls-net"), (("h", Euclidean()),), _NEW),
    Experiment("S2", "does Muon's polar factor of a momentum buffer help tokens?", "muon",
               "sequence", _of("muon-net"), (("algorithm.via[0].h", Euclidean()),), _NEW),
    Experiment("S3", "does the polar factor of the state itself help tokens?", "muon",
               "sequence", _of("muon-net-state"), (("h", Euclidean()), ("algorithm.lazy", True)), _NEW),
    Experiment("S4", "does Adam's second moment help tokens?", "adam",
               "sequence", _of("adam-net"), (("algorithm.via[0].h", Euclidean()),), _NEW),
    Experiment("S5", "does the Frank-Wolfe direction help tokens?", "frank-wolfe",
               "sequence", _of("frank-wolfe-delta"), (("algorithm.via", ()),), _NEW),
    Experiment("S6", "does Shampoo's metric help tokens beyond that of least squares?", "shampoo",
               "sequence", _of("shampoo-net"), (("h", _of("rls-net").h),), _NEW),
    Experiment("S7", "does Huber's cost help tokens?", "huber-regression",
               "sequence", _of("yaad-matrix"), (("cost", SquaredError()),), ("noisy-recall", RECALL)),
    Experiment("D1", "does a momentum that turns, as retention's state, help training?", "retnet",
               "data", _of("rotational-momentum"), (("algorithm.via[0].monoid", Scalar(0.9)),), (DIGITS, TEXT)),
    Experiment("D2", "does a momentum that reflects, as a delta rule of rate 2, help training?", "delta-net-reflective",
               "data", _of("reflective-momentum"), (("algorithm.via[0].monoid", Scalar(0.9)),), (DIGITS, TEXT)),
    Experiment("D3", "do multiplicative steps, as a softmax memory's, help training?", "softmax-attention",
               "data", _of("signed-eg"), (("h", Euclidean()),), (DIGITS,)),
    Experiment("D4", "does Huber's cost help where 10 % of the labels are wrong?", "yaad-matrix",
               "data", _of("huber-regression"), (("cost.cost", SquaredError()),), ("flipped-labels",)),
    Experiment("L1", "does the erase of a delta rule help layers?", "delta-net",
               "depth", StateUpdate(Alignment(), monoid=Householder(Per("erase"))), _UNMOVED, (TEXT, LAYERS)),
    Experiment("L2", "does forgetting help layers?", "mamba2",
               "depth", StateUpdate(Alignment(), monoid=Scalar(_FORGET)), _UNMOVED, (TEXT, LAYERS)),
    Experiment("L3", "do Adam's momentum and second moment help layers?", "adam",
               "depth", StateUpdate(Alignment(), algorithm=Step(_WRITE, via=(_ADAM,))), (("algorithm.via", ()),),
               (TEXT, LAYERS)),
    Experiment("L4", "does a softmax over a list, in the place of a sum, help layers?", "softmax-attention",
               "depth", _of("attention-residuals"), (("h", Euclidean()), ("memory", Matrix())), (TEXT, LAYERS)),
    Experiment("L5", "do mixing matrices that keep lengths, as turns of tokens do, help layers?", "rope",
               "depth", _of("jpmhc"), _UNMOVED, (TEXT, LAYERS)),
    Experiment("L6", "does a turning state tell layers with shared weights where they are?", "rope",
               "depth", StateUpdate(Alignment(), monoid=Rotation()), _UNMOVED, (TEXT, LAYERS)),
)  # fmt: skip


def find(names: tuple[str, ...] = ()) -> tuple[Experiment, ...]:
    """Experiments by id, in the order of the table; all of them without names. Raises UnknownName."""
    known = {e.id: e for e in EXPERIMENTS}
    for name in names:
        if name not in known:
            raise UnknownName("experiment", name, known)
    return tuple(e for e in EXPERIMENTS if not names or e.id in names)
