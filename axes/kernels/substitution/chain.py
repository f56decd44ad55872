"""Substitution by kernels: S_t = e^{g_t} S_{t-1} + u_t k_t^T, u_t = rho(x_t, inputs) of what the key reads.

The response rho is text of functions (`axes.programs.rows` writes it), under a name that operators know it by; the
mathematics of what is around it is with the kernels, in `passes`.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import re
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels import contain
from axes.kernels.common import versions
from axes.kernels.common.layout import (
    Layout,
    check_like,
    check_packing,
    check_tokens,
    extent,
    layout,
    on_device,
    precision,
)
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.substitution import chunks, passes
from axes.kernels.substitution.response import ask

Reads = Literal["before", "gated", "anchored"]
READS: dict[str, int] = {"before": 0, "gated": 1, "anchored": 2}
SLOTS, BLOCK, WIDEST = 8, 16, 128
SLOPES_WARPS, MEETINGS_WARPS, CLOSINGS_WARPS, GRADIENTS_WARPS = 4, 8, 8, 8  # of those that go through chunks
COLUMNS = 128  # of the gradients of keys and queries, of a program
# Gradients of a chunk in one pass: of which gates (none, of the state) and reads, rows of the state at a time. Of an
# anchored response they are right too, and 5 % slower.
AT_ONCE: tuple[tuple[int, int], ...] = ((0, 0), (0, 1), (1, 0), (1, 1))
AT_ONCE_PART, AT_ONCE_WARPS, AT_ONCE_COLUMNS = 64, 4, 64
SERIAL_PART = 64  # rows of a serial program on Hopper, where rows do not meet
PART = 64  # rows of the state of a serial program, where rows do not meet
RADIAL = True  # whether responses by the length of an error have serial passes of their own
STAGES = 3  # blocks of tokens in shared memory
SETTLED_WARPS = 1
ANCHORED, ANCHORED_BACK = (64, 3), (64, 2)  # rows of a program of `anchored`, blocks of tokens in shared memory
TOGETHER = (64, 4, 1, 128)  # rows of a state at a time, warps, stages, columns of a program
AGAIN = 32  # of one that makes tokens again behind what is not finite


class Response(NamedTuple):
    """What a token writes: text of the functions of `response`, which of its inputs are rows, whether entries of a row
    meet in it, whether it reads |k|^2, is a number times an error, by its length (`stride` in its text), and has
    derivatives that are made entry by entry (`beside`)."""

    text: str
    rows: tuple[bool, ...]
    mixes: bool
    length: bool = True
    radial: bool = False
    beside: bool = False


_IMPORT = re.compile(r"from axes\.kernels\.substitution\.response import .*  # replaced\n")
_RESPONSES: dict[str, tuple[Response, ModuleType]] = {}


def register(response: Response) -> str:
    """The name of a response, whose kernels are made of it."""
    name = hashlib.sha256(response.text.encode()).hexdigest()[:16]
    if name not in _RESPONSES:
        _RESPONSES[name] = response, made(passes, response.text, name)
    return name


def made(of: ModuleType, text: str, name: str) -> ModuleType:
    """A module of kernels with the text of a response, and of `ask`, in the place of what it imports of `response`."""
    source = inspect.getsource(of)
    assert len(_IMPORT.findall(source)) == 1
    room = of.__name__.removesuffix(".passes")
    text = "\n" + text + "\n\n" + inspect.getsource(ask.fn) + "\n"
    whole, file = _IMPORT.sub(lambda _: text, source), f"<{room.replace('.kernels.', ' ')} {name}>"
    linecache.cache[file] = (len(whole), None, whole.splitlines(keepends=True), file)  # Triton reads it again
    module = ModuleType(f"{room}.made_{name}")
    module.__file__ = file
    sys.modules[module.__name__] = module
    exec(compile(whole, file, "exec"), module.__dict__)
    return module


def known_response(name: str) -> tuple[Response, ModuleType]:
    """A response that was registered, and the module of its kernels."""
    return _RESPONSES[name]


# ---- serial passes on Hopper ----------------------------------------------------------------------------------------

_SIXTEEN = (torch.bfloat16, torch.float16)
_ANCHORED = (torch.bfloat16,)  # whose range holds what gates of a chunk divide by
_SERIAL_WIDTHS = (64, 128)
_NO_GLUON = ("functions.", "tl.max(")
# Gluon adds no dimension by itself: sums over a token's entries in the text of a response.
_SUMS = re.compile(r"(tl\.sum\(tl\.where\(inside, \w+, 0\.0\), 0\))")


@cache
def _serial(name: str) -> ModuleType:
    from axes.kernels.substitution import hopper

    return made(hopper, _SUMS.sub(r"\1[None, :]", known_response(name)[0].text), name)


@cache
def _radial(name: str) -> ModuleType:
    from axes.kernels.substitution import radial

    return made(radial, _SUMS.sub(r"\1[None, :]", known_response(name)[0].text), name)


@cache
def _anchored(name: str) -> ModuleType:
    from axes.kernels.substitution import anchored

    return made(anchored, known_response(name)[0].text, name)


def anchored_on_hopper(k: Tensor, g: Tensor | None, width: int, name: str, reads: int, last: bool) -> bool:
    """Whether `anchored` takes a call: gates by rows and inputs that are rows, which do not meet, sizes of its tiles
    and a GPU."""
    of = known_response(name)[0]
    sizes = k.shape[-1] in _SERIAL_WIDTHS and width in _SERIAL_WIDTHS and k.dtype in _ANCHORED
    terms = reads == 2 and _gate(g) == 2 and not last and all(of.rows) and not of.mixes and not of.length
    return sizes and terms and versions.hopper_refusal(k.device) is None


def _whole(*tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors that copies of 16 bytes may read."""
    return [x if x is None or x.data_ptr() % 16 == 0 else x.clone() for x in tensors]


def serial_on_hopper(
    k: Tensor, g: Tensor | None, given: Sequence[Tensor | None], width: int, name: str, reads: int
) -> bool:
    """Whether the serial passes of `hopper` take a call: one token reads another, no gate is by rows, sizes of their
    tiles, rows that copies may begin at, a response that is Gluon too, and a GPU."""
    sizes = k.shape[-1] in _SERIAL_WIDTHS and width in _SERIAL_WIDTHS and k.dtype in _SIXTEEN
    text = known_response(name)[0].text
    terms = reads != 2 and _gate(g) < 2 and not any(word in text for word in _NO_GLUON)
    whole = all(x is None or x.data_ptr() % 16 == 0 for x in given)
    return sizes and terms and whole and versions.hopper_refusal(k.device) is None


# ---- launches --------------------------------------------------------------------------------------------------------


def chunk_length(dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float32 else 64


def _padded(width: int) -> int:
    return max(64, power_of_2(width))


class _Sizes(NamedTuple):
    """Sizes of a call. part: rows of the state that a program of the serial passes owns, of which there are `parts`."""

    cut: Layout
    shape: tuple[int, int, int, int, int]  # B, T, H, K, V
    part: int
    parts: int
    response: Response
    kernels: Any

    @classmethod
    def of(cls, k: Tensor, cu: Tensor | None, name: str, width: int) -> _Sizes:
        response, kernels = _RESPONSES[name]
        b, t, h, d_k = k.shape
        part = _padded(width) if response.mixes else 32 if k.dtype == torch.float32 else PART
        cut = layout(b, t, chunk_length(k.dtype), cu)
        return cls(cut, (b, t, h, d_k, width), part, cdiv(width, part), response, kernels)

    @property
    def warps(self) -> int:
        """Of a serial program: 16 rows each, and whole groups of four."""
        return max(4, self.part // 16)

    def where(self) -> dict[str, Any]:
        return dict(T=self.cut.length, N=self.cut.chunks, H=self.shape[2], C=self.cut.chunk, PACKED=self.cut.packed)

    @property
    def serial_part(self) -> int:
        return self.shape[4] if self.response.mixes else min(self.shape[4], SERIAL_PART)

    @property
    def serial_parts(self) -> int:
        return self.shape[4] // self.serial_part

    def serial(self, g: Tensor | None) -> dict[str, Any]:
        warps, kinds = self.serial_part // 16, "".join("r" if row else "n" for row in self.response.rows)
        sizes = dict(K=self.shape[3], V=self.shape[4], BV=self.serial_part, W=warps, num_warps=warps)
        terms = dict(GATED=g is not None, KINDS=kinds, MIXES=self.response.mixes, STAGES=STAGES)
        return {**self.where(), **sizes, **terms}

    def radial(self, g: Tensor | None) -> dict[str, Any]:
        return {n: x for n, x in self.serial(g).items() if n not in ("BV", "MIXES")}

    def anchored(self, rows: int, stages: int) -> dict[str, Any]:
        part = min(self.shape[4], rows)
        sizes = dict(K=self.shape[3], V=self.shape[4], BV=part, W=part // 16, num_warps=part // 16)
        return {**self.where(), **sizes, "COUNT": len(self.response.rows), "STAGES": stages}

    def constants(self, k: Tensor) -> dict[str, Any]:
        d_k = self.shape[3]
        return dict(K=d_k, BK=_padded(d_k), PRECISION=precision(k), num_stages=1, **self.where())


def _split(k: Tensor, g: Tensor | None, width: int, name: str, reads: int, last: bool) -> int:
    """Parts of a head in `anchored`, none where it does not take a call."""
    return cdiv(width, ANCHORED[0]) if anchored_on_hopper(k, g, width, name, reads, last) else 0


def _gate(g: Tensor | None) -> int:
    """None, of the state, of rows."""
    return 0 if g is None else g.ndim - 2


def _rooms(
    k: Tensor, cu: Tensor | None, width: int, reads: int, last: bool, full: bool, record: bool, split: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """What `_forward` returns, unfilled. split: parts of a head that say whether `anchored` took its gates, if any."""
    (b, t, h, d_k), c, wide = k.shape, chunk_length(k.dtype), torch.float32
    units, slots = extent(b, t, c, cu)
    o = k.new_empty(b, t, h, width, dtype=wide if full else k.dtype)
    final = k.new_empty(units, h, width, d_k, dtype=wide)
    before = k.new_empty(units if reads == 2 else 0, h, width, d_k, dtype=wide)
    ends = k.new_empty(units if last else 0, h, width, dtype=wide)
    if not record:
        return o, final, before, ends, []
    products = k.new_empty(slots, h, c // BLOCK, 36, BLOCK, dtype=wide)
    seen, states = k.new_empty(b, t, h, width, dtype=wide), k.new_empty(slots, h, width, d_k)
    return o, final, before, ends, [products, seen, states, k.new_empty(units, h, split, dtype=torch.int32)]


# ---- operator --------------------------------------------------------------------------------------------------------


def _forward(
    q: Tensor, k: Tensor, g: Tensor | None, start: Tensor | None, i0: Tensor | None, i1: Tensor | None,
    i2: Tensor | None, i3: Tensor | None, i4: Tensor | None, i5: Tensor | None, i6: Tensor | None, i7: Tensor | None,
    cu: Tensor | None, name: str, width: int, reads: int, last: bool, full: bool, record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """o, the final state, that before the last block (anchored), what the last key of every unit reads (last); kept:
    products of pairs, what keys read, first states of chunks, which heads `anchored` left to others."""
    s = _Sizes.of(k, cu, name, width)
    cut, h = s.cut, s.shape[2]
    split = _split(k, g, width, name, reads, last)
    o, final, before, ends, kept = _rooms(k, cu, width, reads, last, full, True, split)
    products, seen, states, harsh = kept
    with on_device(k):
        if split:
            _anchored(name).forward[(cut.units * h * split,)](
                *_whole(q, k, g, i0, i1, i2, i3, i4, i5, i6, i7), start, o, seen, states, final, before, harsh,
                cut.offsets, **s.anchored(*ANCHORED), STARTED=start is not None, RECORD=record,
            )  # fmt: skip
        more = s.constants(k)
        s.kernels.pairs[(cut.slots * h * (cut.chunk // BLOCK),)](
            q,
            k,
            g,
            products,
            cut.offsets,
            cut.units_of_slots,
            harsh,
            **more,
            SPLIT=split,
            V=width,
            BV=_padded(width),
            GATE=_gate(g),
            READS=reads,
            num_warps=1,
        )
        serial = serial_on_hopper(k, g, (q, k, i0, i1, i2, i3, i4, i5, i6, i7), width, name, reads)
        if serial and s.response.radial and RADIAL:
            _radial(name).forward[(cut.units * h,)](
                q, k, i0, i1, i2, i3, i4, i5, i6, i7, products, start, o, seen, states, final, cut.offsets,
                **s.radial(g), STARTED=start is not None, RECORD=record or last,
            )  # fmt: skip
        elif serial:
            _serial(name).forward[(cut.units * h * s.serial_parts,)](
                q, k, i0, i1, i2, i3, i4, i5, i6, i7, products, start, o, seen, states, final, cut.offsets,
                **s.serial(g), STARTED=start is not None, RECORD=record or last,
            )  # fmt: skip
        else:
            s.kernels.forward[(cut.units * h * s.parts,)](
                q, k, g, i0, i1, i2, i3, i4, i5, i6, i7, products, start, o, seen, states, final, before,
                cut.offsets, harsh, **more, SPLIT=split, V=width, BV=s.part, STARTED=start is not None, GATE=_gate(g),
                READS=reads, RECORD=record or last, num_warps=s.warps,
            )  # fmt: skip
        if contain.PICKED:
            part = _padded(width) if s.response.mixes else AGAIN
            s.kernels.again[(cut.units * h * cdiv(width, part),)](
                q, k, g, i0, i1, i2, i3, i4, i5, i6, i7, start, o, final, cut.offsets, cut.length, h, K=s.shape[3],
                V=width, C=cut.chunk, BK=_padded(s.shape[3]), BV=part, PACKED=cut.packed, STARTED=start is not None,
                GATE=_gate(g), READS=reads, num_warps=max(4, part // 16), num_stages=1,
            )  # fmt: skip
    if last:
        unit = torch.arange(cut.units, device=k.device)
        ends = seen[unit, -1] if cu is None else seen[0, (cu[1:].long() - 1).clamp_min(0)]
    return o, final, before, ends, kept if record or last else []


def _shapes(q, k, g, start, i0, i1, i2, i3, i4, i5, i6, i7, cu, name, width, reads, last, full, record):
    split = _split(k, g, width, name, reads, last)
    return _rooms(k, cu, width, reads, last, full, record or last, split)


def _backward(
    q: Tensor, k: Tensor, g: Tensor | None, start: Tensor | None, i0: Tensor | None, i1: Tensor | None,
    i2: Tensor | None, i3: Tensor | None, i4: Tensor | None, i5: Tensor | None, i6: Tensor | None, i7: Tensor | None,
    cu: Tensor | None, name: str, width: int, reads: int, last: bool, full: bool, kept: list[Tensor],
    do: Tensor, dfinal: Tensor, dbefore: Tensor, dlast: Tensor,
) -> list[Tensor]:  # fmt: skip
    o, final, before, products, seen, states, harsh = kept
    s = _Sizes.of(k, cu, name, width)
    cut, (b, t, h, _, _) = s.cut, s.shape
    given = (i0, i1, i2, i3, i4, i5, i6, i7)
    grads = [None if x is None else torch.empty_like(x) for x in given]
    dq, dk, dstates, dstart, asked = (torch.empty_like(x) for x in (q, k, states, final, seen))
    dg = None if g is None else torch.empty_like(g)
    dk2 = k.new_empty(b, t, h, dtype=torch.float32)
    written, turns = (k.new_empty(b, t, h, width) for _ in range(2))
    more, programs, split = s.constants(k), cut.slots * h, harsh.shape[-1]
    with on_device(k):
        if split:
            shown = torch.empty_like(written)
            early, left = torch.empty_like(final, dtype=k.dtype), k.new_empty(cut.slots, h, width, dtype=torch.float32)
            _anchored(name).reverse[(cut.units * h * cdiv(width, ANCHORED_BACK[0]),)](
                *_whole(q, k, g, *given), *grads, seen, o, *_whole(do), states, before, final, dfinal,
                dbefore, dg, shown, written, turns, dstates, left, early, dstart, harsh, cut.offsets,
                **s.anchored(*ANCHORED_BACK), SPLIT=split,
            )  # fmt: skip
            columns = min(TOGETHER[3], more["BK"])
            chunks.together[(programs * (more["BK"] // columns),)](
                q, k, shown, written, turns, states, dstates, left, early, dq, dk, cut.offsets, cut.units_of_slots,
                harsh, **{**more, "num_stages": TOGETHER[2]}, V=width, BD=columns, BV=TOGETHER[0],
                SPLIT=split, num_warps=TOGETHER[1],
            )  # fmt: skip
        serial = serial_on_hopper(k, g, (q, k, do, *given), width, name, reads)
        radial, beside = serial and s.response.radial and RADIAL, serial and s.response.beside
        if radial:
            sizes, of, blocks = s.radial(g), s.response.rows.index(True), programs * (cut.chunk // BLOCK)
            kinds = sizes.pop("KINDS")
            settles, squares = k.new_empty(blocks, 816, dtype=torch.float32), torch.empty_like(dk2)
            met = torch.empty_like(dk2)
            _radial(name).settled[(blocks,)](
                *given, products, seen, settles, squares, cut.offsets, cut.units_of_slots, **s.where(), V=width,
                KINDS=kinds, num_warps=SETTLED_WARPS,
            )  # fmt: skip
            _radial(name).reverse[(cut.units * h,)](
                q, k, given[of], grads[of], products, settles, seen, do, dfinal, dlast, written, turns, met, dstates,
                dstart, cut.offsets, **sizes, LAST=last,
            )  # fmt: skip
            _radial(name).paid[(programs,)](
                *given, *grads, products, squares, met, dk2, cut.offsets, cut.units_of_slots, **s.where(), KINDS=kinds,
                num_warps=1,
            )  # fmt: skip
        elif serial:
            own = s.serial(g)
            shares = k.new_empty(s.serial_parts * own["W"] if s.response.length else 0, b, t, h, dtype=torch.float32)
            _serial(name).reverse[(cut.units * h * s.serial_parts,)](
                q, k, *given, *grads, products, seen, do, dfinal, dlast, asked, written, turns, shares, dstates, dstart,
                cut.offsets, b * t * h, **own, LAST=last, BESIDE=beside, LENGTH=s.response.length,
            )  # fmt: skip
            dk2 = shares.sum(0) if beside else dk2
        else:
            s.kernels.reverse[(cut.units * h * s.parts,)](
                q, k, g, *given, products, seen, do, dfinal, dbefore, dlast, asked, dstates, dstart,
                cut.offsets, harsh, **more, SPLIT=split, V=width, BV=s.part, GATE=_gate(g), READS=reads, LAST=last,
                num_warps=s.warps,
            )  # fmt: skip
        if not (radial or beside):
            s.kernels.slopes[(programs * (cut.chunk // BLOCK),)](
                *given, *grads, products, seen, asked, dlast, written, turns, dk2, cut.offsets, cut.units_of_slots,
                harsh, **s.where(), SPLIT=split, V=width, BV=_padded(width), LAST=last, num_warps=SLOPES_WARPS,
                num_stages=1,
            )  # fmt: skip
        exact, do = k.dtype == torch.float32, do.to(k.dtype)
        if k.dtype in _SIXTEEN and (_gate(g), reads) in AT_ONCE:
            columns = min(AT_ONCE_COLUMNS, more["BK"])
            apart = None if g is None else g.new_empty(more["BK"] // columns, *g.shape)
            chunks.behind[(programs * (more["BK"] // columns),)](
                q, k, g, do, written, turns, states, dstates, before, dbefore, dk2, dq, dk, apart, cut.offsets,
                cut.units_of_slots, b * t * h, **more, V=width, BD=columns, BV=AT_ONCE_PART, READS=reads,
                GATED=g is not None, num_warps=AT_ONCE_WARPS,
            )  # fmt: skip
            dg = None if apart is None else apart.sum(0)
            return [dq, dk, dg, dstart, *grads]  # type: ignore[list-item]
        met = k.new_empty(programs, 2, cut.chunk, cut.chunk)
        more |= dict(V=width, BV=32 if exact else 64, GATE=_gate(g), READS=reads, SUMS="ieee" if exact else "halves")
        more |= dict(SPLIT=split)
        s.kernels.meetings[(programs,)](
            g, do, written, turns, met, cut.offsets, cut.units_of_slots, harsh, **more, num_warps=MEETINGS_WARPS
        )
        if g is not None:
            s.kernels.closings[(programs,)](
                q, k, g, do, written, turns, seen, asked, states, dstates, final, before, dbefore, dg, cut.offsets,
                cut.units_of_slots, harsh, **more, num_warps=CLOSINGS_WARPS,
            )  # fmt: skip
        columns = min(COLUMNS, more["BK"])
        s.kernels.gradients[(programs * (more["BK"] // columns),)](
            q, k, g, do, written, turns, states, dstates, dbefore, met, dk2, dq, dk, cut.offsets, cut.units_of_slots,
            harsh, **more, BD=columns, num_warps=GRADIENTS_WARPS,
        )  # fmt: skip
    return [dq, dk, dg, dstart, *grads]  # type: ignore[list-item]


_chain = Differentiable("substitution", _forward, _backward, _shapes, gradients=12, reads=3)


# ---- entry -----------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """What a sequence gives. before: the state before the last block of 16 tokens, of anchored responses; last: what
    the last key of every unit reads, where it was asked for."""

    o: Tensor
    final: Tensor
    before: Tensor
    last: Tensor


def substitution_chain(
    q: Tensor,
    k: Tensor,
    response: str,
    width: int,
    inputs: Sequence[Tensor],
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    reads: Reads = "before",
    last: bool = False,
    full: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Written:
    """S_t = e^{g_t} S_{t-1} + u_t k_t^T, u_t = rho(S' k_t, inputs), o_t = S_t q_t.

    q, k (B, T, H, K) in one of bf16, fp16, fp32, any T; response: a name from `register`, of rows of `width` V; K, V
    from 1 to 128. inputs: rows (B, T, H, V) or numbers (B, T, H), as the response says. g (B, T, H) or, of rows,
    (B, T, H, V): logs of gates, at most 0, floored at -100, None for no gate. S' is S_{t-1} (reads "before"),
    e^{g_t} S_{t-1} ("gated"), or the state before the block of 16 tokens from the first on ("anchored").
    initial_state (U, H, V, K) or None for zero; cu_seqlens (U + 1,) with B = 1: offsets of packed sequences.
    full: o is float32, not in q's dtype; last: what the last keys read is wanted. States are float32. Tensors receive
    gradients, once. Raises ShapeError on what does not fit.
    """
    who = "substitution_chain"
    check_tokens(who, q, k, k)
    (b, t, h, d_k), device = k.shape, k.device
    check_packing(who, b, cu_seqlens, device)
    units = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    known = _RESPONSES[response][0]
    if not 1 <= width <= WIDEST or d_k > WIDEST:
        raise ShapeError(f"{who}: K and V are from 1 to {WIDEST}, not {d_k} and {width}")
    if len(inputs) != len(known.rows):
        raise ShapeError(f"{who}: the response has {len(known.rows)} inputs, not {len(inputs)}")
    for n, (x, row) in enumerate(zip(inputs, known.rows, strict=True)):
        check_like(who, f"input {n}", x, (b, t, h, *((width,) if row else ())), device)
    if g is not None and g.ndim not in (3, 4):
        raise ShapeError(f"{who}: g is (B, T, H) or (B, T, H, V), not {tuple(g.shape)}")
    if g is not None:
        check_like(who, "g", g, (b, t, h, width)[: g.ndim], device)
    check_like(who, "initial_state", initial_state, (units, h, width, d_k), device)
    start = None if initial_state is None else initial_state.float().contiguous()
    if k.numel() == 0:
        final = k.new_zeros(units, h, width, d_k, dtype=torch.float32) if start is None else start.clone()
        o = k.new_zeros(b, t, h, width, dtype=torch.float32 if full else k.dtype)
        return Written(o, final, final, final[..., 0])
    given = [x.contiguous() for x in inputs]
    slots: list[Tensor | None] = [*given, *[None] * (SLOTS - len(given))]
    g = None if g is None else g.float().contiguous()
    made = _chain(
        q.contiguous(), k.contiguous(), g, start, *slots, cu_seqlens, response, width, READS[reads], last, full
    )
    return Written(*made)
