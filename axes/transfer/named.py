"""Runs that the papers of the layers ask for: what is published beside what is measured, in the form of an experiment.

An arm and its control are layers as the catalogue has them, each in its own block; so more than a tuple differs, and
parameters may be further apart, as they are in the papers. Both are in the report.

G1 to G4 ask whether gated layers recall late because they forget where they start. Published starts, which the
catalogue's layers have, forget: of Gated DeltaNet's and Mamba-2's heads one in ten keeps a tenth of what it was given
over 200 tokens, so that in 65 of 100 layers of four heads none does; GLA's channels keep 1e-4. (Weights of deviation
0.02, as released code draws them, change that to 62 of 100.) The arms start where 200 tokens are kept.

G5 to G8 ask whether it is the gate of the outputs, y silu(W x) without a bias, as released. What was recalled is read
through it at the query, where W x is of either sign, another for every key, and the factor's mean is a quarter of its
deviation; a sigmoid's is nearly four of them. That is all there is between the two: with its decay held at one and
without this gate Gated DeltaNet is DeltaNet. The decays of arm and control start open, for a head that forgets at once
has nothing to be read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from axes import catalogue
from axes.errors import UnknownName
from axes.moves import differences
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Block
from axes.sequence.charts import SSM, Chart, LogSigmoid
from axes.transfer.experiments import EXPERIMENTS, MANY, PERMUTATIONS, SOURCE, Experiment

_FIVE, _SUM = "permutations-5", "modular-sum"


def _beside(
    id: str, question: str, arm: str, control: str, tasks: tuple[str, ...], said: str, apart: float = 0.6
) -> Experiment:
    """One layer beside another. said: what is published.  apart: what their parameters may differ by, as a share."""
    first, second = (catalogue.get(name, "sequence") for name in (arm, control))
    mine, other = first.update.normal(), second.update.normal()
    without = tuple((d.path, d.second) for d in differences(mine, other))
    blocks: tuple[Block, Block] = (first.cls.block, second.cls.block)
    return Experiment(
        id,
        question,
        arm,
        "sequence",
        mine,
        without,
        tasks,
        0.02,
        *blocks,
        said=said,
        apart=apart,
        layers=(_own(arm), _own(control)),
    )


def _own(name: str) -> str:
    """The name of a layer that has widths of its own; every other one is the layer of its tuple and its block."""
    cls = catalogue.get(name, "sequence").cls
    return name if cls.widths.__func__ is not SequenceLayer.widths.__func__ else ""  # type: ignore[attr-defined]


_UNSAID = "no claim: where a layer starts, its paper does not compare"


def _opened(id: str, name: str, block: Block, question: str) -> Experiment:
    """A layer whose gates start otherwise beside the same layer as it is published."""
    return _within(id, name, block, catalogue.get(name, "sequence").cls.block, question, _UNSAID)


def _ungated(id: str, name: str, block: Block, against: Block, question: str) -> Experiment:
    """A layer in two blocks, one of which may lack the projection of a gate."""
    return _within(id, name, block, against, question, "no claim of what the gate does to recall", 0.1)


def _within(
    id: str, name: str, block: Block, against: Block, question: str, said: str, apart: float = 0.01
) -> Experiment:
    update = catalogue.get(name, "sequence").update.normal()
    return Experiment(id, question, name, "sequence", update, (), (MANY,), 0.02, block, against, said=said, apart=apart)


def _charts(name: str, **charts: Chart) -> Any:
    """The layer's block with other charts, and other starts in them."""
    block: Any = catalogue.get(name, "sequence").cls.block
    return replace(block, charts=tuple(charts.items()))


_GLA_LONG = _charts("gla", decay=LogSigmoid(bias=5.0, temperature=16.0, rank=16))
_GLA_OPEN = replace(_GLA_LONG, conv=4, activation="silu")
_GDN, _MAMBA = "gated-delta-net", "mamba2"
_DELTA_BLOCK: Any = catalogue.get("delta-net", "sequence").cls.block
_GDN_BLOCK: Any = catalogue.get(_GDN, "sequence").cls.block
_OLD = dict(_GDN_BLOCK.charts)
_GDN_OPEN = _charts(_GDN, decay=replace(_OLD["decay"], dt_min=1e-5, dt_max=1e-3), beta=_OLD["beta"])

NAMED: tuple[Experiment, ...] = (
    _beside("T1", "do eigenvalues in [-1, 1] track what those in [0, 1] do not?", "delta-net-reflective", "delta-net",
            (PERMUTATIONS, _SUM),
            "S3 needs products of reflections; with [0, 1] no group is tracked (Grazzi et al. 2024)"),
    _beside("T2", "do two Householder maps a token track S5, where one does not?", "delta-product",
            "delta-net-reflective", (_FIVE, PERMUTATIONS),
            "two products a token track S5 at lengths of training, one does not (Siems et al. 2025, section 5.1)"),
    _beside("R1", "does Gated DeltaNet recall as DeltaNet does?", _GDN, "delta-net", (MANY,),
            "as good as DeltaNet (Yang et al. 2024)"),
    _beside("R2", "does gated linear attention recall as DeltaNet does?", "gla", "delta-net", (MANY,),
            "worse than DeltaNet at equal width (Yang et al. 2024, Parallelizing, figure 2)"),
    _beside("R3", "does Mamba-2 recall as DeltaNet does?", _MAMBA, "delta-net", (MANY,),
            "with a state of 128 it solves MQAR that fits (Dao and Gu 2024, figure 8)"),
    _beside("R4", "does RWKV-7 recall as DeltaNet does?", "rwkv7", "delta-net", (MANY,),
            "solves MQAR up to 256 pairs at width 512 (Peng et al. 2025, section 7.5)"),
    _beside("R5", "do Titans' matrix and momentum recall as DeltaNet does?", "titans-matrix", "delta-net", (MANY,),
            "no MQAR in the paper (Behrouz et al. 2024)"),
    _beside("R6", "does Longhorn recall as DeltaNet does?", "longhorn", "delta-net", (MANY,),
            "solves MQAR that Mamba needs a larger state for (Liu et al. 2024, section 5.1)"),
    _opened("G1", _GDN, _GDN_OPEN, "does Gated DeltaNet recall sooner if its gates start open?"),
    _opened("G2", "gla", _GLA_LONG, "does gated linear attention recall sooner if its gates start open?"),
    _opened("G3", "gla", _GLA_OPEN, "does it with short convolutions as well?"),
    _opened("G4", _MAMBA, _charts(_MAMBA, decay=SSM(dt_min=1e-2, dt_max=0.5, slowest=1e-3, fastest=1e-2)),
            "does Mamba-2 recall sooner if it starts to write more and to forget less?"),
    _ungated("G5", _GDN, replace(_GDN_OPEN, output_gate=None), _GDN_OPEN,
             "does an open Gated DeltaNet recall sooner without a gate of its outputs?"),
    _ungated("G6", "delta-net", replace(_DELTA_BLOCK, output_gate="silu"), _DELTA_BLOCK,
             "does DeltaNet recall later with Gated DeltaNet's gate of outputs?"),
    _ungated("G7", _GDN, replace(_GDN_OPEN, output_gate="sigmoid"), _GDN_OPEN,
             "does an open Gated DeltaNet recall sooner if the gate of its outputs is a sigmoid, as KDA's?"),
    _ungated("G8", "gla", replace(_GLA_OPEN, output_gate=None), _GLA_OPEN,
             "does an open GLA with short convolutions recall sooner without a gate of its outputs?"),
    _beside("P1", "does Lattice predict text better than Gated DeltaNet?", "lattice-dec", _GDN, (SOURCE,),
            "lower perplexity than Gated DeltaNet at 110 M to 400 M (Karami and Mirrokni 2025)"),
    _beside("P2", "does Longhorn predict text better than Mamba-2?", "longhorn", _MAMBA, (SOURCE,),
            "lower perplexity than Mamba at equal sizes (Liu et al. 2024)"),
    _beside("P3", "does Moneta predict text better than Gated DeltaNet?", "moneta-matrix", _GDN, (SOURCE,),
            "lower perplexity at 340 M to 1.3 B (Behrouz et al. 2025, Miras)"),
    _beside("P4", "does Yaad predict text better than Gated DeltaNet?", "yaad-matrix", _GDN, (SOURCE,),
            "lower perplexity at 340 M to 1.3 B (Behrouz et al. 2025, Miras)"),
    _beside("P5", "does Memora predict text better than Gated DeltaNet?", "memora-matrix", _GDN, (SOURCE,),
            "lower perplexity at 340 M to 1.3 B (Behrouz et al. 2025, Miras)"),
    _beside("P6", "does Titans' deep memory predict text better than its matrix?", "titans", "titans-matrix", (SOURCE,),
            "deeper memories have lower perplexity (Behrouz et al. 2024, section 5.5)"),
)  # fmt: skip


def find(names: tuple[str, ...] = ()) -> tuple[Experiment, ...]:
    """Experiments and named runs by id, in the order of the names; the experiments without. Raises UnknownName."""
    known = {e.id: e for e in (*EXPERIMENTS, *NAMED)}
    for name in names:
        if name not in known:
            raise UnknownName("experiment", name, known)
    return tuple(dict.fromkeys(known[name] for name in names)) if names else EXPERIMENTS
