"""The delta rule and its gated relatives: squared error, one step per token."""

from __future__ import annotations

from typing import final

from axes.algorithms import Step
from axes.costs import SquaredError
from axes.geometry import Euclidean
from axes.monoids import Identity, Scalar
from axes.rates import Per
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.charts import SSM, Sigmoid
from axes.state_update import StateUpdate


@final
class DeltaNet(SequenceLayer):
    """S = S (I - beta k k^T) + beta v k^T, beta in (0, 1)."""

    name = "delta-net"
    update = StateUpdate(SquaredError(), Euclidean(), Identity(), Step(Per("beta")))
    block = Standard(charts=(("beta", Sigmoid()),), output_gate=None)


@final
class GatedDeltaNet(SequenceLayer):
    """S = a S (I - beta k k^T) + beta v k^T: the gate first, the gradient at the gated state."""

    name = "gated-delta-net"
    update = StateUpdate(SquaredError(), Euclidean(), Scalar("decay"), Step(Per("beta"), at="gated"))
    block = Standard(charts=(("decay", SSM(step=None)), ("beta", Sigmoid())))
