"""The experiments: a method of one axis on another, beside the same tuple without it.

An experiment is a pair of tuples on the axis where it runs. The control is made from the arm by what is said to have
moved, so that nothing else can differ; where a method comes with a field of its own (a statistic with its rate), that
field goes with it.

D6, L7, L8 and L9 are what D5, L3 and L5 leave unasked: a decay beside annealing, momentum alone, and two more kinds of
matrices that keep something.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, final

from axes import catalogue
from axes.core.algorithms import Step
from axes.core.costs import Alignment, Huber, Linear, SquaredError
from axes.core.geometry import Birkhoff, Cayley, Euclidean, Whiten
from axes.core.memory import Matrix
from axes.core.monoids import GeneralLinear, Householder, Identity, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.moves import Axis, Difference, differences, replaced
from axes.sequence import DeltaNet, DeltaNetReflective
from axes.sequence.blocks import Block, Standard
from axes.sequence.predicted import FrankWolfe
from axes.transfer.systems import System

RECALL, COPY, TEXT, DIGITS, LAYERS = "multi-query-recall", "selective-copy", "text", "digits", "deep-narrow"
NOISY, FLIPPED, PARITY = "noisy-recall", "flipped-labels", "parity"
PERMUTATIONS, SOURCE, LATEST, LATE = "permutations", "source", "latest-recall", "parity-late"
MANY = "recall-of-many"
TASKS: dict[Axis, tuple[str, ...]] = {  # what can be asked on an axis
    "data": (DIGITS, TEXT, FLIPPED),
    "sequence": (
        RECALL,
        MANY,
        COPY,
        NOISY,
        "fuzzy-recall",
        "memorisation",
        LATEST,
        PARITY,
        LATE,
        "modular-sum",
        PERMUTATIONS,
        "permutations-5",
        TEXT,
        SOURCE,
    ),
    "depth": (TEXT, LAYERS),
}


@final
@dataclass(frozen=True)
class Experiment:
    """What moved, from where, onto which axis; the arm, and what its control has in the place of what moved.

    without: values by path (`axes.moves.replaced`) that make the control of the arm.  margin: differences up to it do
    not matter, in the unit of a task's metric: 2 points of accuracy, 0.02 bits a byte.  block, against: around the
    arm's sequence layer, and around the control's if it needs another.  schedules: of the learning rate of arm and
    control.  forget: of the arm, where its tuple has a decay of weights that is what moved.  shared: layers have one
    set of weights.  said: what is published of the two.  apart: what their parameters may differ by, as a share.
    layers: arm and control as the catalogue has them, in the place of the tuples in their blocks.
    """

    id: str
    question: str
    source: str
    axis: Axis
    arm: StateUpdate
    without: tuple[tuple[str, Any], ...]
    tasks: tuple[str, ...]
    margin: float = 0.02
    block: Block | None = None
    against: Block | None = None
    schedules: tuple[str, str] = ("cosine", "cosine")
    forget: float = 0.0
    shared: bool = False
    said: str = ""
    apart: float = 0.01
    layers: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        if self.systems[0] == self.systems[1]:
            raise AxesError(f"{self.id}: the control is the arm; what moved must differ")

    @cached_property
    def control(self) -> StateUpdate:
        return replaced(self.arm, dict(self.without))

    @cached_property
    def systems(self) -> tuple[System, System]:
        """Arm and control as they are trained."""
        (first, second), shared = self.schedules, self.shared
        return (
            System(self.axis, self.arm, self.block, first, self.forget, shared, named=self.layers[0]),
            System(self.axis, self.control, self.against or self.block, second, 0.0, shared, named=self.layers[1]),
        )

    @property
    def moved(self) -> tuple[Difference, ...]:
        """Field by field, control to arm; of the blocks where the tuples are the same."""
        return differences(self.control, self.arm) or tuple(_differing(self.against, self.block))


def _differing(control: Any, arm: Any) -> Iterator[Difference]:
    for field in fields(arm):
        mine, other = getattr(arm, field.name), getattr(control, field.name)
        if mine != other:
            yield Difference(f"block.{field.name}", other, mine)


def _of(name: str) -> StateUpdate:
    update: StateUpdate = catalogue.get(name).update
    return update.normal()


def _block(name: str) -> Standard:
    block: Standard = catalogue.get(name, "sequence").cls.block
    return block


_WRITE, _FORGET, _MIX = Per("beta"), Per("decay", "scalar", "unit"), Per("mix", "mix", "real")
_SQUARES = StateUpdate(Linear(of="square"), monoid=Scalar(0.95), algorithm=Step(0.05, debias=True))
_ADAM = StateUpdate(Linear(), Whiten((_SQUARES,), eps=1e-4), Scalar(0.9))
_BUFFER = StateUpdate(Linear(), monoid=Scalar(0.9))
_PLAIN = replaced(_of("rotational-momentum"), {"algorithm.via[0].monoid": Scalar(0.9)})
# a threshold of every token would have a matrix of weights that the control has not
_BOUNDED = replaced(_of("yaad-matrix"), {"cost": Huber()})
# without the direction's length of one, a step of 1 reaches what is written: the ball's radius goes with it
_CLOSER = replace(_block("frank-wolfe-delta"), charts=(("decay", FrankWolfe("beta", radius=1.0)),))
_UNMOVED = (("monoid", Identity()),)  # the state stays as it is between two writes
_NEW = (RECALL, COPY)

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment("S1", "does the metric of recursive least squares help tokens recall?", "recursive-least-squares",
               "sequence", _of("rls-net"), (("h", Euclidean()),), _NEW, block=_block("rls-net")),
    Experiment("S2", "does Muon's polar factor of a momentum buffer help tokens?", "muon",
               "sequence", _of("muon-net"), (("algorithm.via[0].h", Euclidean()),), _NEW,
               block=_block("muon-net")),
    Experiment("S3", "does the polar factor of the state itself help tokens?", "muon",
               "sequence", _of("muon-net-state"), (("h", Euclidean()), ("algorithm.lazy", True)), _NEW,
               block=_block("muon-net-state")),
    Experiment("S4", "does Adam's second moment help tokens?", "adam",
               "sequence", _of("adam-net"), (("algorithm.via[0].h", Euclidean()),), _NEW,
               block=_block("adam-net")),
    Experiment("S5", "does the Frank-Wolfe direction help tokens?", "frank-wolfe",
               "sequence", _of("frank-wolfe-delta"), (("algorithm.via", ()),), _NEW,
               block=_block("frank-wolfe-delta"), against=_CLOSER),
    Experiment("S6", "does Shampoo's metric help tokens beyond that of least squares?", "shampoo",
               "sequence", _of("shampoo-net"), (("h", _of("rls-net").h),), _NEW,
               block=_block("shampoo-net")),
    Experiment("S7", "does Huber's cost help tokens?", "huber-regression",
               "sequence", _BOUNDED, (("cost", SquaredError()),), (NOISY, RECALL),
               block=_block("yaad-matrix")),
    Experiment("D1", "does a momentum that turns, as retention's state, help training?", "retnet",
               "data", _of("rotational-momentum"), (("algorithm.via[0].monoid", Scalar(0.9)),), (DIGITS, TEXT)),
    Experiment("D2", "does a momentum that reflects, as a delta rule of rate 2, help training?", "delta-net-reflective",
               "data", _of("reflective-momentum"), (("algorithm.via[0].monoid", Scalar(0.9)),), (DIGITS, TEXT)),
    Experiment("D3", "do multiplicative steps, as a softmax memory's, help training?", "softmax-attention",
               "data", _of("signed-eg"), (("h", Euclidean()),), (DIGITS,)),
    Experiment("D4", "does Huber's cost help where 10 % of the labels are wrong?", "yaad-matrix",
               "data", _of("huber-regression"), (("cost.cost", SquaredError()),), (FLIPPED,)),
    Experiment("D5", "does a decay as ALiBi's bias of distance help training in the place of annealing?",
               "alibi", "data", _PLAIN, (("monoid", Identity()),), (DIGITS, TEXT), schedules=("constant", "cosine"),
               forget=1.0),
    Experiment("D6", "does a decay that follows the learning rate, as Mamba-2's gate its step, help beside annealing?",
               "mamba2", "data", _PLAIN, (("monoid", Identity()),), (DIGITS, TEXT), forget=1.0),
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
               "depth", StateUpdate(Alignment(), monoid=Rotation()), _UNMOVED, (TEXT, LAYERS), shared=True),
    Experiment("L7", "does momentum alone help layers?", "sgd",
               "depth", StateUpdate(Alignment(), algorithm=Step(_WRITE, via=(_BUFFER,))), (("algorithm.via", ()),),
               (TEXT, LAYERS)),
    Experiment("L8", "do mixing matrices that keep lengths and the mean help layers?", "rope",
               "depth", StateUpdate(Alignment(), monoid=GeneralLinear(_MIX, Cayley(0.1, "mean-preserving", "closed"))),
               _UNMOVED, (TEXT, LAYERS)),
    Experiment("L9", "do mixing matrices of shares, as a softmax's but by rows and columns, help layers?",
               "softmax-attention", "depth", StateUpdate(Alignment(), monoid=GeneralLinear(_MIX, Birkhoff())),
               _UNMOVED, (TEXT, LAYERS)),
)  # fmt: skip


@final
@dataclass(frozen=True)
class Calibration:
    """A comparison whose outcome is known: what is measured is not believed unless it comes out.

    helps: whether the arm must be better by more than `least`; else neither may be better by more than the margin.
    """

    id: str
    question: str
    arm: System
    control: System
    task: str
    helps: bool = True
    least: float = 0.1


_DELTA = System("sequence", DeltaNet.update, DeltaNet.block)
_COUNTS = System("sequence", DeltaNetReflective.update, DeltaNetReflective.block)
CALIBRATIONS: tuple[Calibration, ...] = (
    Calibration("parity", "eigenvalues in [-1, 1] against [0, 1] count modulo two",
                _COUNTS, _DELTA, LATE),
    Calibration("recall", "the delta rule against linear attention recalls what was written last",
                _DELTA, replace(_DELTA, update=replaced(DeltaNet.update, {"cost": Alignment()})), LATEST),
    Calibration("null", "a system against itself, from other initial parameters",
                replace(_COUNTS, draw=1), _COUNTS, LATE, helps=False),
)  # fmt: skip
