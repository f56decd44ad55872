"""Lattice: slots on the unit sphere, each turned by the part of the write that is orthogonal to it.

    s_i <- normalise(s_i - gamma c_i P(s_i) h / |s_i|),    P(s) = I - s s^T / |s|^2,    y = S q after the write
    Dec: h = Phi k - v, c = k      Enc: h = v, c = Phi^T v - k      Sim: h = -v, c = k,    Phi = S with unit columns

The cost sees directions only (`Slots`), which yields the projection P; `Sphere("columns")` with lazy=False is the
renormalisation. A forget gate changes nothing but the step under renormalisation, (mu, gamma) = (1, gamma / mu), so
only the unnormalised form has one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

from axes.core.algorithms import Step
from axes.core.costs import Alignment, SquaredError
from axes.core.geometry import Euclidean, Sphere
from axes.core.memory import Slots
from axes.core.monoids import Identity, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.charts import Capped, LogSigmoid

_PAPER = "Lattice: Learning to Efficiently Compress the Memory (Karami and Mirrokni 2025)"
_BIBTEX = """@article{karami2025lattice,
  title={Lattice: Learning to Efficiently Compress the Memory},
  author={Karami, Mahdi and Mirrokni, Vahab},
  journal={arXiv preprint arXiv:2504.05646},
  year={2025}
}"""
_BLOCK = (
    "no official code. The paper leaves the step size, the normalisation of q, k and v, the output norm and the"
    " convolutions'"
    " details open: q and k have unit length after SiLU, and so have v, since slots overshoot what they turn to where"
    " gamma |k_i| |v| > 2 (Sim), gamma |k|^2 > 2 (Dec) or gamma |v|^2 > 2 (Enc); gamma = sigmoid(W x) starts at 0.5,"
    " Sim's is twice that. An RMSNorm per head precedes the GELU gate. S_0 is fixed with"
    " orthonormal columns, the same for all heads, since a rotation of the values turns one choice into any other;"
    " random"
    " unit columns if d_k > d_v."
)
_NO_GATE = " The forget gate of the final configuration is left out: renormalised, it only rescales gamma"
_STEP = Step(Per("gamma"), lazy=False)
_GAMMA = ("gamma", Capped(0.5))
_MAMBA = Standard(values_conv=False, value_norm="unit", shared_projection=True, output_gate="gelu", charts=(_GAMMA,))


@final
class LatticeDec(SequenceLayer):
    """s_i <- normalise(s_i - gamma k_i P(s_i)(S k - v)): the slots decode the key into the value.

    Source: Lattice, eqs. 6-7 with the normalisation 14. Exact in the Gram space of slots and values.
    """

    name = "lattice-dec"
    paper = _PAPER
    equation = "eq. 14 with h = Phi k - v, c = k (eqs. 6, 7, 13)"
    differs = "one half in the loss, as the printed update 13 has it and its loss 6 does not; " + _BLOCK + _NO_GATE
    bibtex = _BIBTEX
    update = StateUpdate(SquaredError(), Sphere("columns"), Identity(), _STEP, memory=Slots())
    block = _MAMBA


@final
class LatticeEnc(SequenceLayer):
    """s_i <- normalise(s_i - gamma (s_i . v - k_i) P(s_i) v): the slots encode the value into the key.

    Source: Lattice, eqs. 9-10 with the normalisation 14. Exact in the Gram space of the values, as LatticeSim.
    """

    name = "lattice-enc"
    paper = _PAPER
    equation = "eq. 14 with h = v, c = Phi^T v - k (eqs. 9, 10, 13)"
    differs = "one half in the loss, as the printed update 10 has it and its loss 9 does not; " + _BLOCK + _NO_GATE
    bibtex = _BIBTEX
    update = StateUpdate(SquaredError(encode=True), Sphere("columns"), Identity(), _STEP, memory=Slots())
    block = _MAMBA


@final
class LatticeSim(SequenceLayer):
    """s_i <- normalise(s_i + gamma k_i P(s_i) v): the slots turn towards the value.

    Source: Lattice, eqs. 11-12 with the normalisation 14. Exact in the Gram space of the values.
    """

    name = "lattice-sim"
    paper = _PAPER
    equation = "eq. 14 with h = -v, c = k (eqs. 11, 12, 13)"
    differs = _BLOCK + _NO_GATE
    bibtex = _BIBTEX
    update = StateUpdate(Alignment(), Sphere("columns"), Identity(), _STEP, memory=Slots())
    block = replace(_MAMBA, charts=(("gamma", Capped(1.0, scale=2.0)),))


@final
class LatticeOSR(SequenceLayer):
    """s_i <- mu s_i - gamma k_i P(s_i)(Phi k - v) / |s_i|: Lattice-Dec without renormalisation, with its forget gate.

    Norms only grow under the orthogonal write, and a slot's step decays with them; here mu is what bounds them.
    Source: Lattice, eqs. 7 and 16 (the ablation row before the normalised projection).
    """

    name = "lattice-osr"
    paper = _PAPER
    equation = "eq. 16 over eq. 7: S = mu S - gamma grad l, no renormalisation"
    differs = (
        "one half in the loss; " + _BLOCK + " The read is S q as printed, not Phi q; mu and gamma are emitted"
        " independently"
        " (mu = 1 - gamma lambda in the paper), mu = sigmoid(W x + 6)^(1/16): a slot that fades is turned by 1 / |s|^2"
    )
    bibtex = _BIBTEX
    update = StateUpdate(SquaredError(), Euclidean(), Scalar("decay"), Step(Per("gamma")), memory=Slots())
    block = replace(_MAMBA, charts=(_GAMMA, ("decay", LogSigmoid(bias=6.0, temperature=16.0))))


LATTICE = (LatticeDec, LatticeEnc, LatticeSim, LatticeOSR)
