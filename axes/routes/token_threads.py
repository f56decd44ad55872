"""How the tile of a walk lies over the threads of a Hopper GPU, by what its step sums.

A token waits for one sum after another: for few cycles where a thread or a warp has all that is added, for some two
hundred where warps pass it to each other. So the axis along which a step sums tiles is one that a warp has whole: rows
where it sums over them (keys lie across warps), else keys. Where rows do not meet at all, a warp is a program with some
of them, and waits for nobody.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from axes.programs.forms import Prices, simplified
from axes.programs.tile_text import OUT, Threads, Walk
from axes.programs.tiles import FULL, GRAD, NEXT

_SIDE = 64  # of the tiles that lie so: what was measured, and seen right, on an H200
_EARLY = 2  # tokens ahead of which vectors are loaded: one is shorter than memory takes
_LONGEST = 8  # tokens of a span


class _Kind(NamedTuple):
    """Forward and back; rows of a program; tiles of a state that it was measured with, at most; tiles of a head's span
    that shared memory is given to; what operations cost."""

    forward: Threads
    back: Threads
    rows: int
    tiles: int
    shared: int
    prices: Prices


# tiles are summed over rows, vectors are, nothing is
_COLUMNS = _Kind(Threads((16, 2), (1, 4)), Threads((8, 4), (1, 4)), _SIDE, 1, 8, Prices(0.5, 0.13, 1.5, 5.0))
_NUMBERS = _Kind(Threads((4, 8), (4, 1)), Threads((2, 16), (8, 1)), _SIDE, 2, 6, Prices(0.25, 0.25, 5.0, 1.5))
_APART = _Kind(Threads((4, 8), (1, 1)), Threads((4, 8), (1, 1)), 8, 4, 10, Prices(0.13, 0.5, 1.5, 1.0))


def on_hopper(walk: Walk) -> tuple[Walk, Walk] | None:
    """The walks forward and back, or None where the compiler lays a tile out."""
    if walk.widths != (_SIDE, _SIDE):
        return None
    kind = _kind(walk)
    if sum(e == FULL for e in walk.states.values()) > kind.tiles:
        return None
    held = [n for n, e in walk.read.items() if e == FULL and n not in walk.changing]
    moved = [n for n, e in walk.read.items() if e == FULL and n in walk.changing]
    inner = _LONGEST
    while inner and inner * len(moved) + 2 * len(held) > kind.shared:
        inner //= 2
    step = simplified(walk.step, walk.widths, lambda program: _cost(replace(walk, step=program), kind.prices))
    forward, back = (
        replace(
            walk, step=step, rows=kind.rows, warps=threads.warps[0] * threads.warps[1], across="v", threads=threads,
            early=_EARLY, inner=inner, told=None,
        )
        for threads in (kind.forward, kind.back)
    )  # fmt: skip
    return forward, back


def _cost(walk: Walk, prices: Prices) -> float:
    """Of a token: its step, the state twice again and the adjoint."""
    program = walk.step
    forward = program.needed([OUT, *walk.states, *(f"{NEXT}{i}" for i in walk.carried)], walk.carried)
    total = prices.of(program, [i for i in forward if i not in walk.carried])
    for times, outputs in ((2, walk.remade), (1, walk.grads)):
        order = program.needed(outputs, walk.kept)
        total += times * prices.of(program, [i for i in order if i not in walk.kept])
    return total


def _kind(walk: Walk) -> _Kind:
    """By the sums over rows on the way forward, held values included."""
    programs = [(walk.step, [OUT, *walk.states])]
    if walk.refresh is not None:
        programs.append((walk.refresh, [n for n in walk.refresh.outputs if not n.startswith(GRAD)]))
    summed = [p.extent(p.operations[i].inputs[0]) for p, outputs in programs
              for i in p.reductions(p.needed(outputs), "v")]  # fmt: skip
    return _COLUMNS if FULL in summed else _NUMBERS if summed else _APART
