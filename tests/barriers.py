"""Barriers of shared memory that are never invalidated, found in Triton's GPU dialect.

The memory of a barrier is given to other data after its last use, and at once if it has none. Only an invalidation
makes the processor let go of what it keeps of a barrier; else that is written into the other data, seldom: with
programs of other processes on the device two numbers in some thousand chunks were not numbers.
"""

from __future__ import annotations

import re

_MADE = re.compile(r"%(\w+) = ttg\.local_alloc")
_VIEW = re.compile(r"%(\w+) = ttg\.memdesc_\w+ %(\w+)")
_BEGUN = re.compile(r"ttng\.init_barrier %(\w+)")
_ENDED = re.compile(r"ttng\.inval_barrier %(\w+)")


def not_ended(ttgir: str) -> list[str]:
    """Names of barriers that are initialised and not invalidated."""
    whole: dict[str, str] = {}
    begun, ended = set(), set()
    for line in ttgir.splitlines():
        made, view, begins, ends = (pattern.search(line) for pattern in (_MADE, _VIEW, _BEGUN, _ENDED))
        if made:
            whole[made[1]] = made[1]
        if view:
            whole[view[1]] = whole.get(view[2], view[2])
        if begins:
            begun.add(whole.get(begins[1], begins[1]))
        if ends:
            ended.add(whole.get(ends[1], ends[1]))
    return sorted(begun - ended)
