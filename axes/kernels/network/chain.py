"""Memories of two layers by kernels: y = W1 gelu(W2 x), gradients at the first state of every 16 tokens.

What W1 h is asked for is text of functions, as in substitution (`axes.kernels.substitution.response`); the mathematics
is with the kernels, in `passes`. Where gradients are asked for, states stand in memory every `SEGMENT` blocks, and
backwards those of a segment are made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common.layout import check_like, check_tokens, on_device, precision
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.network import passes
from axes.kernels.substitution.chain import SLOTS, known_response, made

BLOCK, WIDEST = 16, 128  # tokens of an anchor; the widest keys and values
SEGMENT = 16  # blocks between states that are kept
HIDDEN, WARPS = 64, 4  # hidden units of a tile, and warps of a program
HIDDEN_BACK, WARPS_BACK = 64, 4
ROWS, READ_WARPS = 16, 4  # of the pass that goes through tokens


@cache
def _kernels(name: str) -> ModuleType:
    return made(passes, known_response(name)[0].text, name)


class _Sizes(NamedTuple):
    """Sizes of a call: B, T, H, D and F, hidden units."""

    batch: int
    length: int
    heads: int
    width: int
    hidden: int

    @classmethod
    def of(cls, k: Tensor, w2: Tensor) -> _Sizes:
        b, t, h, d = k.shape
        return cls(b, t, h, d, w2.shape[-2])

    @property
    def blocks(self) -> int:
        return cdiv(self.length, BLOCK)

    @property
    def programs(self) -> int:
        return self.batch * self.heads

    def cuts(self, record: bool) -> list[int]:
        """Where a launch ends: at every kept state, and at the anchor that is shown."""
        whole = list(range(0, self.blocks, SEGMENT)) if record else [0]
        return sorted({*whole, self.blocks - 1, self.blocks})

    def constants(self, k: Tensor, tile: int, m: Tensor | None, a: Tensor | None, g: Tensor | None) -> dict[str, Any]:
        wide = max(16, power_of_2(self.width))
        return dict(
            D=self.width, F=self.hidden, BD=wide, BF=min(tile, max(16, power_of_2(self.hidden))), FILTER=m is not None,
            GATED=a is not None, ROWS=g is not None, PRECISION=precision(k), num_stages=1,
        )  # fmt: skip


_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]


def _rooms(k: Tensor, w1: Tensor, w2: Tensor, m1: Tensor | None, m2: Tensor | None, record: bool) -> _Outputs:
    """What `_forward` returns, unfilled: o; the last W and M; W before the last block; kept: W1 h, H^T m, and states
    where segments begin."""
    wide, none = torch.float32, w1.new_empty(0)
    o = k.new_empty(k.shape, dtype=wide)
    ends = [
        torch.empty_like(w1),
        torch.empty_like(w2),
        *(none.clone() if m is None else torch.empty_like(m) for m in (m1, m2)),
    ]
    befores = torch.empty_like(w1), torch.empty_like(w2)
    kept = []
    if record:
        segments = cdiv(_Sizes.of(k, w2).blocks, SEGMENT)
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
    s = _Sizes.of(k, w2)
    found = _rooms(k, w1, w2, m1, m2, record)
    (o, *ends), befores, kept = found[:5], found[5:7], found[7]
    seen, met = kept[:2] if record else (torch.empty_like(o), k.new_empty(*k.shape[:3], BLOCK, dtype=torch.float32))
    now, into = _four(w1, w2, m1, m2), _four(*ends[:2], *(None if m1 is None else x for x in ends[2:]))
    more, cuts = s.constants(k, HIDDEN, m1, a, g), s.cuts(record)
    with on_device(k):
        for first, last in zip(cuts, cuts[1:], strict=False):
            if record and first % SEGMENT == 0:
                for x, room in zip(now, kept[2:], strict=False):
                    room[first // SEGMENT].copy_(x)
            if first == s.blocks - 1:
                for x, before in zip(now, befores, strict=False):
                    before.copy_(x)
            _kernels(name).forward[(s.programs,)](
                q, k, i0, i1, i2, i3, i4, i5, i6, i7, a, b, c, e0, e, g, r, *now, *into, o, seen, met, s.length,
                s.heads, first, last, 0, READ=True, **more, num_warps=WARPS,
            )  # fmt: skip
            now = into
    return found


def _shapes(q, k, i0, i1, i2, i3, i4, i5, i6, i7, a, b, c, e0, e, g, r, w1, w2, m1, m2, name, record):
    return _rooms(k, w1, w2, m1, m2, record)


def _four(w1: Tensor, w2: Tensor, m1: Tensor | None = None, m2: Tensor | None = None) -> tuple[Tensor, ...]:
    """W and M as arguments of the kernels, which do not look at an M where there is none."""
    return w1, w2, w1 if m1 is None else m1, w2 if m2 is None else m2


def _backward(
    q: Tensor, k: Tensor, i0: Tensor | None, i1: Tensor | None, i2: Tensor | None, i3: Tensor | None,
    i4: Tensor | None, i5: Tensor | None, i6: Tensor | None, i7: Tensor | None, a: Tensor | None, b: Tensor | None,
    c: Tensor, e0: Tensor | None, e: Tensor | None, g: Tensor | None, r: Tensor | None, w1: Tensor, w2: Tensor,
    m1: Tensor | None, m2: Tensor | None, name: str, kept: list[Tensor],
    do: Tensor, d1: Tensor, d2: Tensor, d3: Tensor, d4: Tensor, dbefore1: Tensor, dbefore2: Tensor,
) -> list[Tensor]:  # fmt: skip
    s = _Sizes.of(k, w2)
    seen, met, *starts = kept
    given = (i0, i1, i2, i3, i4, i5, i6, i7)
    grads = [None if x is None else torch.empty_like(x) for x in given]
    dq, dk, dc, asked = (torch.empty_like(x) for x in (q, k, c, seen))
    da, db, de0, de, dg, dr = (None if x is None else torch.empty_like(x) for x in (a, b, e0, e, g, r))
    ends = [d1.clone(), d2.clone(), *(() if m1 is None else (d3.clone(), d4.clone()))]  # which move to the start
    length = min(SEGMENT, s.blocks) - 1
    rooms = [x.new_empty(length, *x.shape) for x in (w1, w2, m1, m2) if x is not None]
    own = [seen.new_empty(s.programs, s.hidden, BLOCK) for _ in range(2)]
    inputs, numbers, room = (q, k, *given), (a, b, c, e0, e, g, r), w1.numel()
    derivatives, later = _four(*ends), _four(*rooms)
    kernels, tokens = _kernels(name), do.numel() // s.width
    with on_device(k):
        for first in reversed(range(0, s.blocks, SEGMENT)):
            last = min(first + SEGMENT, s.blocks)
            held = _four(*(x[first // SEGMENT] for x in starts))
            if last - first > 1:
                kernels.forward[(s.programs,)](
                    *inputs, *numbers, *held, *later, asked, seen, met, s.length, s.heads, first, last - 1, room,
                    READ=False, **s.constants(k, HIDDEN, m1, a, g), num_warps=WARPS,
                )  # fmt: skip
            kernels.backward[(s.programs,)](
                *inputs, *numbers, *held, *later, seen, met, do, dbefore1, dbefore2, *derivatives, *own, asked, dq, dk,
                da, db, dc, de0, de, dg, dr, s.length, s.heads, first, last, room,
                **s.constants(k, HIDDEN_BACK, m1, a, g), num_warps=WARPS_BACK,
            )  # fmt: skip
        known_response(name)[1].read_back[(cdiv(tokens, ROWS),)](
            seen, asked, *given, do.new_empty(do.shape), *grads, tokens, V=s.width, BV=max(16, power_of_2(s.width)),
            R=ROWS, num_warps=READ_WARPS,
        )  # fmt: skip
    return [dq, dk, *grads, da, db, dc, de0, de, dg, dr, *ends, *[None] * (4 - len(ends))]


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
