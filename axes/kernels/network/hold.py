"""Launches of `held`: memories without a filter whose two matrices a program holds in registers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from axes.kernels.common.layout import on_device, precision
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.network import held
from axes.kernels.substitution.chain import known_response, made

BLOCK, ENTRIES = 16, 64 * 256  # of a matrix on chip
DTYPES = (torch.float16, torch.bfloat16)  # products of float32 have no tensor cores: theirs stand in memory
WARPS, WARPS_AGAIN, WARPS_READS, WARPS_BACK = 8, 8, 8, 8  # of programs; each owns hidden units
SEGMENT = 16  # blocks between states that are kept
ROWS, READ_WARPS = 16, 4  # of the pass that goes through tokens


@cache
def _kernels(name: str) -> ModuleType:
    return made(held, known_response(name)[0].text, name)


def fits(k: Tensor, w2: Tensor) -> bool:
    """Whether the matrices of a head stand on chip."""
    d, f = (max(16, power_of_2(x)) for x in (k.shape[-1], w2.shape[-2]))
    return k.dtype in DTYPES and d * max(f, 16 * WARPS) <= ENTRIES


class Sizes(NamedTuple):
    """Of a call, (B, T, H, D) and hidden units F."""

    batch: int
    length: int
    heads: int
    width: int
    hidden: int

    @classmethod
    def of(cls, k: Tensor, w2: Tensor) -> Self:
        b, t, h, d = k.shape
        return cls(b, t, h, d, w2.shape[-2])

    @property
    def blocks(self) -> int:
        return cdiv(self.length, BLOCK)

    @property
    def programs(self) -> int:
        return self.batch * self.heads

    def segments(self) -> list[tuple[int, int]]:
        """First blocks, and those after the last ones."""
        return [(n, min(n + SEGMENT, self.blocks)) for n in range(0, self.blocks, SEGMENT)]

    def rooms(self, k: Tensor, leaves: int) -> list[Tensor]:
        """For the first W, and M, of the blocks of a segment, in the dtype of products."""
        own = (min(SEGMENT, self.blocks), self.batch, self.heads)
        wide = ((self.width, self.hidden), (self.hidden, self.width))
        return [k.new_empty(*own, *wide[i % 2]) for i in range(leaves)]

    def tile(self, hidden: int) -> int:
        return min(hidden, max(16, power_of_2(self.hidden)))

    def constants(self, k: Tensor, filtered: bool, gated: bool, rows: bool) -> dict[str, Any]:
        return dict(
            D=self.width, F=self.hidden, BD=max(16, power_of_2(self.width)), FILTER=filtered, GATED=gated, ROWS=rows,
            PRECISION=precision(k), num_stages=1,
        )  # fmt: skip

    def warps(self, most: int) -> dict[str, int]:
        """W warps that own FW hidden units each, of which a product takes 16 at least."""
        units = max(16 * most, power_of_2(self.hidden))
        return dict(W=most, FW=units // most, num_warps=most, maxnreg=min(255, 2048 // most))


def _call(k: Tensor, w2: Tensor, numbers: Numbers) -> tuple[Sizes, dict[str, Any]]:
    s = Sizes.of(k, w2)
    gate, filtered, _, _, _, rows, _ = (x is not None for x in numbers)
    return s, s.constants(k, filtered, gate, rows)


Given = tuple[Tensor | None, ...]  # inputs of the response
Numbers = tuple[Tensor | None, ...]  # a, b, c, e0, e, g, r


def four(x: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Of W, and M if there is one, four arguments: kernels do not look at what holds its place."""
    given = tuple(x)
    return (*given, *given)[:4]


def forward(
    q: Tensor, k: Tensor, given: Given, numbers: Numbers, w1: Tensor, w2: Tensor, name: str, o: Tensor,
    ends: list[Tensor], befores: tuple[Tensor, Tensor], kept: list[Tensor],
) -> None:  # fmt: skip
    """Fill what queries read, last states and those before the last block; and kept, if there is room for it. What
    a filter holds moves in its place, from its start to its last."""
    s, more = _call(k, w2, numbers)
    seen, met, *starts = kept or (o, o, *ends)  # which nobody looks at
    filters = four(ends)[2:]
    with on_device(k):
        _kernels(name).states[(s.programs,)](
            q, k, *given, *numbers, w1, w2, *filters, o, seen, met, *ends[:2], *befores, *four(starts), *[None] * 4,
            s.length, s.heads, 0, s.blocks, AGAIN=False, RECORD=bool(kept), SEGMENT=SEGMENT, **more, **s.warps(WARPS),
        )  # fmt: skip


def backward(
    q: Tensor, k: Tensor, given: Given, numbers: Numbers, w2: Tensor, name: str, kept: list[Tensor], do: Tensor,
    ends: list[Tensor], dbefores: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, list[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """Derivatives in q, k, in what the response is given, and in numbers. ends: those in the last W and M, which move
    to the start."""
    s, more = _call(k, w2, numbers)
    seen, met, *starts = kept
    a, b, c, e0, e, g, r = numbers
    dq, dk, asked = (torch.empty_like(x) for x in (q, k, seen))
    da, db, dc, de0, de, dg, dr = changes = [None if x is None else torch.empty_like(x) for x in numbers]
    places = min(SEGMENT, s.blocks) * s.programs
    rooms = [k.new_empty(places, s.width * s.hidden) for _ in starts]
    units = [k.new_empty(places, BLOCK, s.hidden) for _ in range(6)]  # h, slopes, bends, p, m, dn
    pairs = [k.new_empty(places, BLOCK, BLOCK) for _ in range(2)]
    rows = [seen.new_empty(places, BLOCK, s.width) for _ in range(4)]  # parts in u, k, and with rates, in logs
    moving = [torch.empty_like(x) for x in ends[2:]]  # what a filter holds
    kernels = _kernels(name)
    with on_device(k):
        for first, last in reversed(s.segments()):
            begun = [x[first // SEGMENT] for x in starts]
            for x, start in zip(moving, begun[2:], strict=True):
                x.copy_(start)
            kernels.states[(s.programs,)](
                q, k, *given, *numbers, *begun[:2], *four([*begun[:2], *moving])[2:], do, seen, met, *ends[:2],
                *dbefores, *four(starts), *four(rooms), s.length, s.heads, first, last, AGAIN=True, RECORD=False,
                SEGMENT=SEGMENT, **more, **s.warps(WARPS_AGAIN),
            )  # fmt: skip
            kernels.reads_back[(s.programs * (last - first),)](
                q, k, *given, a, b, c, g, r, *four(rooms), seen, met, do, *units, *pairs, *rows, dq, da, db, dc,
                s.length, s.heads, s.batch, first, **more, **s.warps(WARPS_READS),
            )  # fmt: skip
            kernels.reverse[(s.programs,)](
                q, k, *given, *numbers, *four(rooms), seen, do, *dbefores, *units, *pairs, *rows, *four(ends), asked,
                dk, da, db, dc, de0, de, dg, dr, s.length, s.heads, first, last, **more, **s.warps(WARPS_BACK),
            )  # fmt: skip
    return dq, dk, through_tokens(given, seen, asked, do, name), changes


def through_tokens(given: Given, seen: Tensor, asked: Tensor, do: Tensor, name: str) -> list[Tensor | None]:
    """Derivatives in what the response is given, of what u is asked for."""
    grads, width = [None if x is None else torch.empty_like(x) for x in given], do.shape[-1]
    tokens = do.numel() // width
    with on_device(do):
        known_response(name)[1].read_back[(cdiv(tokens, ROWS),)](
            seen, asked, *given, torch.empty_like(do), *grads, tokens, V=width, BV=max(16, power_of_2(width)),
            R=ROWS, num_warps=READ_WARPS,
        )  # fmt: skip
    return grads
