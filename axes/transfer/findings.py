"""What several comparisons say together, in plain words.

A finding names the verdicts that it rests on. It is said where results have come out so, and nowhere else: the words
cannot outlive the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from axes.transfer.statistics import Verdict

_LITTLE = 0.02  # accuracy of who has learned next to nothing, where one of 2,048 is right


class Finding(NamedTuple):
    """rests: verdicts of experiments on their first tasks.  little: sides that must have learned next to nothing."""

    rests: Mapping[str, Verdict]
    text: str
    little: tuple[tuple[str, str], ...] = ()


_ARM, _CONTROL = "arm", "control"
FINDINGS = (
    Finding(
        dict.fromkeys(("R1", "R2", "R3", "R4", "R5", "R6"), "hurts"),
        "Recall of 32 pairs in 256 tokens, of 2,048, by two layers of width 128: DeltaNet learns it; Gated "
        "DeltaNet, gated linear attention, Mamba-2, RWKV-7, Titans' matrix and Longhorn as their papers have them "
        "learn next to nothing in as many steps, at every rate that was tried (R1 to R6).",
        tuple((name, _ARM) for name in ("R1", "R2", "R3", "R4", "R5", "R6")),
    ),
    Finding(
        {"G5": "helps", "G6": "hurts", "G7": "helps"},
        "What keeps a Gated DeltaNet whose decay starts open from that recall is the gate of outputs, y silu(W x), "
        "not its memory or its precision: DeltaNet does not learn it either once it has that gate (G6); with a "
        "sigmoid there, as in KDA, Gated DeltaNet learns it (G7), without any gate in some of its seeds (G5). Both "
        "leave the published layer.",
        (("G6", _ARM), ("G7", _CONTROL)),
    ),
    Finding(
        {"G8": "helps"},
        "Gated linear attention learns that recall as well, with short convolutions, a decay that starts open and "
        "no gate of outputs (G8).",
    ),
    Finding(
        {"G1": "equivalent", "G2": "equivalent", "G4": "equivalent"},
        "Decays that start open are not enough alone: under the published gate of outputs neither Gated DeltaNet "
        "nor gated linear attention nor Mamba-2 learns that recall (G1, G2, G4).",
        tuple((name, side) for name in ("G1", "G2", "G4") for side in (_ARM, _CONTROL)),
    ),
)


def found(results: Mapping[str, Any]) -> Iterator[str]:
    """The findings that these results bear out."""
    first = {e["id"]: e["compared"][0] for e in results["experiments"]}
    for finding in FINDINGS:
        borne = all(name in first and first[name].get("verdict") == said for name, said in finding.rests.items())
        if borne and all(_mean(first[name][side]) < _LITTLE for name, side in finding.little):
            yield finding.text


def _mean(side: Mapping[str, Any]) -> float:
    return sum(side["values"].values()) / len(side["values"])
