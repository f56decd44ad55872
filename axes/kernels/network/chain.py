"""Memories of two layers by kernels: y = W1 gelu(W2 x), gradients at the first state of every 16 tokens.

What W1 h is asked for is text of functions, as in substitution (`axes.kernels.substitution.response`); the mathematics
is with the kernels, in `passes`. Where gradients are asked for, states stand in memory every `hold.SEGMENT` blocks, and
backwards those of a segment are made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common.layout import check_like, check_tokens, on_device
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.network import hold, hopper_hold, passes
from axes.kernels.network.hold import Sizes, four
from axes.kernels.substitution.chain import SLOTS, known_response, made

BLOCK, WIDEST = 16, 128  # tokens of an anchor; the widest keys and values
HIDDEN, WARPS = 32, 4  # hidden units of a tile, and warps of a program
HIDDEN_READS, WARPS_READS = 32, 4  # of programs of one block
HIDDEN_BACK, WARPS_BACK = 32, 4  # of the way back
ROWS, READ_WARPS = 16, 4  # of the pass that goes through tokens


@cache
def _kernels(name: str) -> ModuleType:
    return made(passes, known_response(name)[0].text, name)


_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]


def _shapes_of(k: Tensor, w1: Tensor, w2: Tensor, m1: Tensor | None, m2: Tensor | None, record: bool) -> _Outputs:
    """What `_forward` returns, unfilled: o; the last W and M; W before the last block; kept: W1 h, H^T m, and states
    where segments begin."""
    wide = torch.float32
    o = k.new_empty(k.shape, dtype=wide)
    ends = [w1.new_empty(0) if x is None else torch.empty_like(x) for x in (w1, w2, m1, m2)]
    befores, kept = (torch.empty_like(w1), torch.empty_like(w2)), []
    if record:
        segments = cdiv(Sizes.of(k, w2).blocks, hold.SEGMENT)
        starts = [x for x in (w1, w2, m1, m2) if x is not None]
        kept = [torch.empty_like(o), k.new_empty(*k.shape[:3], BLOCK, dtype=wide)]
        kept += [x.new_empty(segments, *x.shape) for x in starts]
    return o, ends[0], ends[1], ends[2], ends[3], *befores, kept


def _forward(
    q: Tensor, k: Tensor, i0: Tensor | None, i1: Tensor | None, i2: Tensor | None, i3: Tensor | None,
    i4: Tensor | None, i5: Tensor | None, i6: Tensor | None, i7: Tensor | None, a: Tensor | None, b: Tensor | None,
    c: Tensor, e0: Tensor | None, e: Tensor | None, g: Tensor | None, r: Tensor | None, w1: Tensor, w2: Tensor,
    m1: Tensor | None, m2: Tensor | None, name: str, record: bool,
) -> _Outputs:  # fmt: skip
    s = Sizes.of(k, w2)
    found = _shapes_of(k, w1, w2, m1, m2, record)
    (o, *moving), befores, kept = found[:5], found[5:7], found[7]
    moving = moving[: 2 if m1 is None else 4]
    for x, start in zip(moving, (w1, w2, m1, m2), strict=False):
        assert start is not None
        x.copy_(start)
    given, numbers = (i0, i1, i2, i3, i4, i5, i6, i7), (a, b, c, e0, e, g, r)
    if hopper_hold.fits(k, w2, name):
        hopper_hold.forward(q, k, given, numbers, w1, w2, name, o, moving, befores, kept)
        return found
    if hold.fits(k, w2):
        hold.forward(q, k, given, numbers, w1, w2, name, o, moving, befores, kept)
        return found
    seen, met = kept[:2] if record else (torch.empty_like(o), k.new_empty(*k.shape[:3], BLOCK, dtype=torch.float32))
    rooms = s.rooms(k, len(moving))
    more, kernels = s.constants(k, m1 is not None, a is not None, g is not None), _kernels(name)
    with on_device(k):
        for first, last in s.segments():
            if record:
                for x, room in zip(moving, kept[2:], strict=True):
                    room[first // hold.SEGMENT].copy_(x)
            for begin, end in ((first, last),) if last < s.blocks else ((first, last - 1), (last - 1, last)):
                if end == s.blocks:
                    for x, before in zip(moving, befores, strict=False):
                        before.copy_(x)
                if begin < end:
                    kernels.states[(s.programs,)](
                        k, *given, *numbers, *four(moving), *four(x[begin - first :] for x in rooms),
                        seen, s.length, s.heads, begin, end, KNOWN=False, **more, BF=s.tile(HIDDEN), num_warps=WARPS,
                    )  # fmt: skip
            kernels.reads[(s.programs * (last - first),)](
                q, k, *given, a, b, c, g, r, *four(rooms), seen, o, met, s.length, s.heads, s.batch, first, **more,
                BF=s.tile(HIDDEN_READS), num_warps=WARPS_READS,
            )  # fmt: skip
    return found


def _shapes(q, k, i0, i1, i2, i3, i4, i5, i6, i7, a, b, c, e0, e, g, r, w1, w2, m1, m2, name, record):
    return _shapes_of(k, w1, w2, m1, m2, record)


def _backward(
    q: Tensor, k: Tensor, i0: Tensor | None, i1: Tensor | None, i2: Tensor | None, i3: Tensor | None,
    i4: Tensor | None, i5: Tensor | None, i6: Tensor | None, i7: Tensor | None, a: Tensor | None, b: Tensor | None,
    c: Tensor, e0: Tensor | None, e: Tensor | None, g: Tensor | None, r: Tensor | None, w1: Tensor, w2: Tensor,
    m1: Tensor | None, m2: Tensor | None, name: str, kept: list[Tensor],
    do: Tensor, d1: Tensor, d2: Tensor, d3: Tensor, d4: Tensor, dbefore1: Tensor, dbefore2: Tensor,
) -> list[Tensor]:  # fmt: skip
    s = Sizes.of(k, w2)
    given, numbers = (i0, i1, i2, i3, i4, i5, i6, i7), (a, b, c, e0, e, g, r)
    plain = hopper_hold.fits(k, w2, name)
    if plain or hold.fits(k, w2):
        ends = [x.clone() for x in (d1, d2, d3, d4)[: 2 if m1 is None else 4]]
        back = hopper_hold.backward if plain else hold.backward
        dq, dk, grads, changes = back(q, k, given, numbers, w2, name, kept, do, ends, (dbefore1, dbefore2))
        return [dq, dk, *grads, *changes, *ends, *[None] * (4 - len(ends))]  # type: ignore[list-item]
    seen, met, *starts = kept
    grads = [None if x is None else torch.empty_like(x) for x in given]
    dq, dk, dc, asked = (torch.empty_like(x) for x in (q, k, c, seen))
    da, db, de0, de, dg, dr = (None if x is None else torch.empty_like(x) for x in (a, b, e0, e, g, r))
    ends = [x.clone() for x in (d1, d2, d3, d4)[: len(starts)]]  # which move to the start
    rooms, moving = s.rooms(k, len(starts)), [torch.empty_like(x) for x in ends]
    places = rooms[0].shape[0] * s.programs
    ms, dns = (k.new_empty(places, s.hidden, BLOCK) for _ in range(2))
    dps, dhs, dzs = (seen.new_empty(places, s.hidden, BLOCK) for _ in range(3))
    dus, dks, dwrites, dsums = (seen.new_empty(places, s.width, BLOCK) for _ in range(4))
    more = s.constants(k, m1 is not None, a is not None, g is not None)
    kernels, tokens = _kernels(name), do.numel() // s.width
    with on_device(k):
        for first, last in reversed(s.segments()):
            for x, start in zip(moving, starts, strict=True):
                x.copy_(start[first // hold.SEGMENT])
            kernels.states[(s.programs,)](
                k, *given, *numbers, *four(moving), *four(rooms), seen, s.length, s.heads, first, last, KNOWN=True,
                **more, BF=s.tile(HIDDEN), num_warps=WARPS,
            )  # fmt: skip
            kernels.reads_back[(s.programs * (last - first),)](
                q, k, *given, a, b, c, g, r, *four(rooms), seen, met, do, ms, dns, dps, dhs, dus, dks, dwrites, dsums,
                dq, da, db, dc, s.length, s.heads, s.batch, first, **more, BF=s.tile(HIDDEN_READS),
                num_warps=WARPS_READS,
            )  # fmt: skip
            kernels.reverse[(s.programs,)](
                q, k, *given, *numbers, *four(rooms), seen, do, dbefore1, dbefore2, ms, dns, dps, dhs, dzs, dus, dks,
                dwrites, dsums, *four(ends), asked, dk, da, db, dc, de0, de, dg, dr, s.length, s.heads, first, last,
                **more, BF=s.tile(HIDDEN_BACK), num_warps=WARPS_BACK,
            )  # fmt: skip
        known_response(name)[1].read_back[(cdiv(tokens, ROWS),)](
            seen, asked, *given, torch.empty_like(do), *grads, tokens, V=s.width, BV=max(16, power_of_2(s.width)),
            R=ROWS, num_warps=READ_WARPS,
        )  # fmt: skip
    return [dq, dk, *grads, da, db, dc, de0, de, dg, dr, *ends, *[None] * (4 - len(ends))]  # type: ignore[list-item]


_chain = Differentiable("network", _forward, _backward, _shapes, gradients=21)


# ---- entry -----------------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """What gates and rates are to the states of a block: a, b (B, T, H) and c (B, T, H, 16) of a token; e0 (B, N, H)
    and e (B, N, H, 16) of what a filter holds after each of the N blocks. g, r (B, T, H, D): logs of the gates of W1's
    rows, and rates, in the place of a and c, which then are those of W2. None: nothing is forgotten, no filter, no
    rows."""

    a: Tensor | None
    b: Tensor | None
    c: Tensor
    e0: Tensor | None = None
    e: Tensor | None = None
    g: Tensor | None = None
    r: Tensor | None = None


class Read(NamedTuple):
    """What a sequence gives: W1 m of every token (B, T, H, D), W and M after it, and W before its last block."""

    o: Tensor
    weights: tuple[Tensor, Tensor]
    held: tuple[Tensor, ...]
    before: tuple[Tensor, Tensor]


def network_chain(
    q: Tensor,
    k: Tensor,
    response: str,
    inputs: Sequence[Tensor],
    numbers: Terms,
    weights: tuple[Tensor, Tensor],
    held: tuple[Tensor, Tensor] | None = None,
) -> Read:
    """The memory over whole sequences, blocks of 16 tokens from the first on; `passes` says what is computed.

    q, k (B, T, H, D) in one of bf16, fp16, fp32, D from 1 to 128, any T; response: a name from substitution's
    `register`, of rows of D entries, whose inputs are rows (B, T, H, D) or numbers (B, T, H). weights: W1 (B, H, D, F)
    and W2 (B, H, F, D); held: the same of a filter. States are float32. All tensors receive gradients, once. Raises
    ShapeError on what does not fit.
    """
    who = "network_chain"
    check_tokens(who, q, k, k)
    (b, t, h, d), device, known = k.shape, k.device, known_response(response)[0]
    n, hidden = cdiv(t, BLOCK), weights[1].shape[-2]
    if d > WIDEST:
        raise ShapeError(f"{who}: keys and values are up to {WIDEST} wide, not {d}")
    if len(inputs) != len(known.rows):
        raise ShapeError(f"{who}: the response has {len(known.rows)} inputs, not {len(inputs)}")
    if (held is None) != (numbers.b is None):
        raise ShapeError(f"{who}: b, e0 and e are of a filter, and come with what it holds")
    for i, (x, row) in enumerate(zip(inputs, known.rows, strict=True)):
        check_like(who, f"input {i}", x, (b, t, h, *((d,) if row else ())), device)
    shapes = ((b, t, h), (b, t, h), (b, t, h, BLOCK), (b, n, h), (b, n, h, BLOCK), (b, t, h, d), (b, t, h, d))
    for name, number, shape in zip(Terms._fields, numbers, shapes, strict=True):
        check_like(who, name, number, shape, device)
    for name, pair in (("weights", weights), ("held", held or ())):
        for x, shape in zip(pair, ((b, h, d, hidden), (b, h, hidden, d)), strict=False):
            check_like(who, name, x, shape, device)
    starts = [x.float().contiguous() for x in (*weights, *(held or ()))]
    if k.numel() == 0:
        return Read(k.new_zeros(k.shape, dtype=torch.float32), tuple(starts[:2]), tuple(starts[2:]), tuple(starts[:2]))
    slots = [*(x.contiguous() for x in inputs), *[None] * (SLOTS - len(inputs))]
    given = (None if x is None else x.float().contiguous() for x in numbers)
    starts = [*starts, *[None] * (4 - len(starts))]
    o, w1, w2, m1, m2, *before = _chain(q.contiguous(), k.contiguous(), *slots, *given, *starts, response)
    return Read(o, (w1, w2), () if held is None else (m1, m2), tuple(before))


__all__ = ["BLOCK", "WIDEST", "Terms", "Read", "network_chain"]
