"""Launches of `hopper` and `around`: memories of two layers 64 x 256 in 16 bits on Hopper, with or without a filter.

A segment of blocks at a time: what is before its serial pass, the pass, and what is behind it.
"""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from axes.kernels.common import versions
from axes.kernels.common.layout import on_device
from axes.kernels.network import around, hold
from axes.kernels.network.hold import BLOCK, Given, Numbers, Sizes
from axes.kernels.substitution.chain import known_response, made

WIDTH, HIDDEN = 64, 256  # what `hopper` is written for
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
WARPS, WARPS_AGAIN, WARPS_BACK, WARPS_AROUND = 8, 8, 8, 4
# Gluon adds no dimension by itself: sums over a token's entries in the text of a response.
_SUMS = re.compile(r"(tl\.sum\(tl\.where\(inside, \w+, 0\.0\), 0\))")


@cache
def _around(name: str) -> ModuleType:
    return made(around, known_response(name)[0].text, name)


@cache
def _serial(name: str) -> ModuleType:
    from axes.kernels.network import hopper

    return made(hopper, _SUMS.sub(r"\1[None, :]", known_response(name)[0].text), name)


def fits(k: Tensor, w2: Tensor, name: str) -> bool:
    """Whether these kernels take a call: sizes of their tiles, a response that is Gluon too, and a GPU."""
    sizes = (k.shape[-1], w2.shape[-2]) == (WIDTH, HIDDEN) and k.dtype in DTYPES
    plain = "functions." not in known_response(name)[0].text
    return sizes and plain and versions.hopper_refusal(k.device) is None


def _four(x: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Of W, and M if there is one, four arguments."""
    return (*x, None, None)[:4]


def _flags(k: Tensor, w2: Tensor, numbers: Numbers) -> tuple[Sizes, dict[str, Any], dict[str, Any]]:
    """Sizes of a call, and constants of what is around the serial passes, and of these."""
    s = Sizes.of(k, w2)
    gated, filtered, rows = (numbers[i] is not None for i in (0, 1, 5))
    more = s.constants(k, filtered, gated, rows)
    sides = {n: more[n] for n in ("GATED", "ROWS", "FILTER", "PRECISION")}
    return s, dict(**sides, D=WIDTH, num_warps=WARPS_AROUND), dict(GATED=gated or rows, FILTER=filtered)


def forward(
    q: Tensor, k: Tensor, given: Given, numbers: Numbers, w1: Tensor, w2: Tensor, name: str, o: Tensor,
    ends: list[Tensor], befores: tuple[Tensor, Tensor], kept: list[Tensor],
) -> None:  # fmt: skip
    """What `hold.forward` fills."""
    s, sides, more = _flags(k, w2, numbers)
    a, _, c, _, _, g, r = numbers
    seen, met, *starts = kept or (torch.empty_like(o), o.new_empty(*o.shape[:3], BLOCK))
    places = min(hold.SEGMENT, s.blocks) * s.programs
    pack, pairs = k.new_empty(places, 2, BLOCK, WIDTH), k.new_empty(places, BLOCK, BLOCK)
    lines, lasts, left = o.new_empty(places, 4, BLOCK), o.new_empty(places, 4), o.new_empty(places, WIDTH)
    reads, factor = (o.new_empty(places, BLOCK, WIDTH) for _ in range(2))
    begun = [w1, w2, *ends[2:]]
    for x, start in zip(starts, begun, strict=False):
        x[0].copy_(start)
    beside, serial = _around(name), _serial(name)
    with on_device(k):
        for first, last in s.segments():
            after = [x[last // hold.SEGMENT] for x in starts] if starts and last < s.blocks else ends
            grid, sizes = (s.programs * (last - first),), (s.length, s.heads)
            beside.early[grid](
                q, k, *numbers, pack, pairs, lines, left, lasts, factor, *sizes, s.batch, first, **sides
            )  # fmt: skip
            serial.onward[(s.programs,)](
                *given, pack, pairs, lines, left, lasts, factor, *_four(begun), *_four(after), *befores, seen, reads,
                met, *sizes, first, last, W=WARPS, ROWS=g is not None, num_warps=WARPS, **more,
            )  # fmt: skip
            beside.late[grid](
                *given, a, c, g, r, seen, reads, met, o, *sizes, s.batch, first, DTYPE=DTYPES[k.dtype], **sides
            )  # fmt: skip
            begun = after


def backward(
    q: Tensor, k: Tensor, given: Given, numbers: Numbers, w2: Tensor, name: str, kept: list[Tensor], do: Tensor,
    ends: list[Tensor], dbefores: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, list[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """What `hold.backward` returns."""
    s, sides, more = _flags(k, w2, numbers)
    a, _, c, _, _, g, r = numbers
    filtered = more["FILTER"]
    sides["N"] = more["N"] = tiles = 7 if filtered else 5
    seen, met, *starts = kept
    dq, dk, asked = (torch.empty_like(x) for x in (q, k, seen))
    changes = [None if x is None else torch.empty_like(x) for x in numbers]
    places = min(hold.SEGMENT, s.blocks) * s.programs
    pack, pairs = k.new_empty(places, tiles, BLOCK, WIDTH), k.new_empty(places, 2, BLOCK, BLOCK)
    lines, lasts, left = seen.new_empty(places, 4, BLOCK), seen.new_empty(places, 4), seen.new_empty(places, WIDTH)
    base, factor, dwrites, dlogs = (seen.new_empty(places, BLOCK, WIDTH) for _ in range(4))
    sums = [seen.new_empty(places, BLOCK, WIDTH) for _ in range(5)]  # over hidden units
    of_pairs, of_states = seen.new_empty(places, BLOCK, BLOCK), seen.new_empty(places, 2 * WIDTH)
    of_filter = [seen.new_empty(places, BLOCK, WIDTH) if filtered else None for _ in range(4)]
    rooms = [k.new_empty(places, HIDDEN, WIDTH) for _ in starts]
    moving = list(ends)
    if filtered:  # which has no room on chip: units are its rows, as in the passes
        moving[2] = ends[2].mT.contiguous()
    beside, serial = _around(name), _serial(name)
    with on_device(k):
        for first, last in reversed(s.segments()):
            begun = [x[first // hold.SEGMENT] for x in starts]
            grid, sizes = (s.programs * (last - first),), (s.length, s.heads)
            beside.before[grid](
                q, k, *given, *numbers, seen, met, do, pack, pairs, lines, left, lasts, base, factor, dwrites, dlogs,
                *sizes, s.batch, first, **sides,
            )  # fmt: skip
            serial.again[(s.programs,)](
                pack, lines, left, lasts, *_four(begun), *_four(rooms), first, last, W=WARPS_AGAIN,
                num_warps=WARPS_AGAIN, **more,
            )  # fmt: skip
            serial.walk[(s.programs,)](
                *given, seen, pack, pairs, lines, left, lasts, base, factor, *_four(rooms), *dbefores, *_four(moving),
                asked, *sums, of_pairs, of_states, *of_filter, *sizes, first, last, W=WARPS_BACK, num_warps=WARPS_BACK,
                **more,
            )  # fmt: skip
            beside.behind[grid](
                *given, a, c, g, r, seen, met, do, pack, lines, dwrites, dlogs, *sums, of_pairs, of_states, *of_filter,
                dq, dk, *changes, *sizes, s.batch, first, **sides,
            )  # fmt: skip
    if filtered:
        ends[2].copy_(moving[2].mT)
    return dq, dk, hold.through_tokens(given, seen, asked, do, name), changes
