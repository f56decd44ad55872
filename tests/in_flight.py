"""Operands of products in flight that the next copy of a pipelined loop overwrites, found in Triton's GPU dialect.

Triton 3.6 gives a tile of a pipelined loop two buffers if only products read it. A tile that is used in registers too
has one, and still the product that reads it may be left in flight (a wait with `pendings` above zero): the next
asynchronous copy writes where the matrix unit reads. On a full chip that is other bits at every run.
"""

from __future__ import annotations

import re

_ONE_BUFFER = re.compile(r"%(\w+) = ttg\.memdesc_index .* -> ")
_TRANSPOSED = re.compile(r"%(\w+) = ttg\.memdesc_trans %(\w+)")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait ([^{]*)\{pendings = (\d+)")


def overwritten(ttgir: str) -> list[str]:
    """Names of such operands: of a wait that leaves products in flight, those in a buffer that exists once."""
    once: set[str] = set()
    found: list[str] = []
    for line in ttgir.splitlines():
        tile, turned, wait = (pattern.search(line) for pattern in (_ONE_BUFFER, _TRANSPOSED, _WAIT))
        if tile and "!ttg.memdesc<1x" in line:
            once.add(tile[1])
        if turned and turned[2] in once:
            once.add(turned[1])
        if wait and int(wait[2]):
            found += [name for name in re.findall(r"%(\w+)", wait[1]) if name in once]
    return found
