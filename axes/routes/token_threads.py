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
from axes.programs.monomials import gathered
from axes.programs.tile_text import OUT, Threads, Walk
from axes.programs.tiles import FULL, GRAD, NEXT, Program

_SIDE, _WIDE = 64, 128  # of the tiles that lie so: what was measured, and seen right, on an H200
_LONGEST = 8  # tokens of a span


class _Way(NamedTuple):
    """threads; tokens of a turn; tokens ahead of which vectors are loaded: one is shorter than memory takes, but leaves
    registers free; whether states in shared memory are read again behind exchanges."""

    threads: Threads
    unroll: int = 1
    early: int = 2
    reread: bool = False


class _Kind(NamedTuple):
    """Forward and back; rows of a program; tiles of a state that it was measured with, at most; tiles of a head's span
    that shared memory is given to; what operations cost."""

    forward: _Way
    back: _Way
    rows: int
    tiles: int
    shared: int
    prices: Prices
    carrying: Prices | None = None  # of a step that carries sums, which then goes forward by two tokens a turn


# tiles are summed over rows, vectors are, nothing is
_COLUMNS = _Kind(
    _Way(Threads((16, 2), (1, 4))), _Way(Threads((8, 4), (1, 4))), _SIDE, 1, 8, Prices(0.5, 0.13, 1.5, 5.0),
    carrying=Prices(0.5, 0.13, 1.5, 5.0, level=15.0),
)  # fmt: skip
_WIDE_COLUMNS = _Kind(
    _Way(Threads((16, 2), (1, 8))), _Way(Threads((8, 4), (1, 8)), reread=True), _WIDE, 1, 8, Prices(0.5, 0.13, 1.5, 5.0)
)  # fmt: skip
_NUMBERS = _Kind(
    _Way(Threads((4, 8), (4, 1)), 2), _Way(Threads((2, 16), (8, 1))), _SIDE, 2, 8, Prices(0.25, 0.25, 5.0, 1.5)
)  # fmt: skip
_APART = _Kind(
    _Way(Threads((8, 4), (1, 1)), 2), _Way(Threads((4, 8), (1, 1)), early=1), 8, 4, 12, Prices(0.13, 0.5, 1.5, 1.0)
)  # fmt: skip


def on_hopper(walk: Walk) -> tuple[Walk, Walk] | None:
    """The walks forward and back, or None where the compiler lays a tile out."""
    kind = kind_of(walk)
    if kind is None or sum(e == FULL for e in walk.states.values()) > kind.tiles:
        return None
    moved = [n for n, e in walk.read.items() if e == FULL and n in walk.changing]
    inner = _LONGEST
    while inner and inner * len(moved) * (walk.size(FULL) // _SIDE**2) > kind.shared:
        inner //= 2
    step, ahead = cheapest(walk, kind.prices), kind.forward
    if kind.carrying is not None and replace(walk, step=step).carried:  # by fewer sums that wait for each other
        step, ahead = cheapest(walk, kind.carrying), ahead._replace(unroll=2)
    renewal = walk.refresh
    asked = renewal is not None and any(renewal.names.get(i) in walk.inputs for i in renewal.needed(renewal.outputs))
    forward, back = (
        replace(
            walk, step=step, rows=kind.rows, warps=way.threads.warps[0] * way.threads.warps[1], across="v",
            threads=way.threads, early=way.early, inner=inner, unroll=1 if asked else way.unroll, reread=way.reread,
            told=None,
        )
        for way in (ahead, kind.back)
    )  # fmt: skip
    return forward, back


def kind_of(walk: Walk) -> _Kind | None:
    """What is known of a walk's widths and sums."""
    if walk.widths not in ((_SIDE, _SIDE), (_WIDE, _WIDE)):
        return None
    kind = _kind(walk)
    if walk.widths == (_SIDE, _SIDE):
        return kind
    return _WIDE_COLUMNS if kind is _COLUMNS else None


def cheapest(walk: Walk, prices: Prices) -> Program:
    """A walk's step in forms and by products that cost the least."""

    def cost(program: Program) -> float:
        return _cost(replace(walk, step=program), prices)

    step = simplified(walk.step, walk.widths, cost)
    return min(step, gathered(step, walk.widths), key=cost)


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
