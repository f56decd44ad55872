"""The register: every claim, by group, in order; counts that the reports and tests compare."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence

from axes.claims.base import Claim, Verdict
from axes.errors import UnknownName

GROUPS = {
    "A": "Core framework",
    "B": "Costs",
    "C": "Algorithms",
    "D": "Monoids and positional encodings",
    "E": "Capacity and signal to noise",
    "F": "Duality, parallel and chunk forms",
    "G": "Depth axis",
    "H": "Data axis",
    "I": "Cross-axis identities",
    "J": "Predicted combinations",
    "K": "Empirical or external statements",
}

ALL: tuple[Claim, ...] = tuple(
    claim for group in GROUPS for claim in importlib.import_module(f"axes.claims.group_{group.lower()}").CLAIMS
)


def find(names: Sequence[str] = ()) -> tuple[Claim, ...]:
    """Claims by id (A01) or group (A), in the register's order; all without names. Raises UnknownName."""
    if not names:
        return ALL
    ids = {c.id for c in ALL}
    wanted = {n.upper() for n in names}
    for name in sorted(wanted - ids - set(GROUPS)):
        # a group's own ids are the nearest; without the group there is nothing near, only the groups
        raise UnknownName("claim", name, [i for i in ids if i[0] == name[:1]] or GROUPS)
    return tuple(c for c in ALL if c.id in wanted or c.group in wanted)


def counts(claims: Sequence[Claim] = ALL) -> dict[str, dict[Verdict, int]]:
    """How many claims of each verdict a group has."""
    tally = Counter((c.group, c.verdict) for c in claims)
    return {g: {v: tally[g, v] for v in Verdict} for g in GROUPS}
