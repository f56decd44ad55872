"""The chain with a scalar gate, exact, forward and backward: retention, Mamba-2, DeltaNet, gated DeltaNet and kin.

    S_t = e^{g_t} S_{t-1} + beta_t (v_t - [delta] S' a_t) k_t^T,     o_t = S_t q_t,
S' = e^{g_t} S_{t-1}, or S_{t-1} with early=True. The mathematics is with the kernels: scalar_delta, scalar_write.
Here: the cut of the tokens into units, the launches, the operators and the entry.

Few heads and many tokens: the tokens of an entry are cut into segments that run side by side. A segment's map of states
is affine, X -> W X + b; one pass finds W and b of every segment, a small kernel carries the state from segment to
segment, and then segments are units with first states of their own. Backwards likewise with W^T. Where gates shrink a
state to nothing in float32 within a segment, W is zero and b comes from the chunks behind that point alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import layout as host
from axes.kernels.common.layout import check_like, check_packing, check_tokens, on_device, precision
from axes.kernels.common.tiles import TILE
from axes.kernels.common.versions import gluon_refusal
from axes.kernels.scalar import delta as scalar_delta
from axes.kernels.scalar import tiles as scalar_tiles
from axes.kernels.scalar import write as scalar_write

if _GLUON := gluon_refusal() is None:  # on an unknown Triton these modules raise, and the portable kernels run
    from axes.kernels.scalar import hopper, hopper_backward, hopper_write

PROCESSORS = 132  # of an H100 or H200: what the choice of segments fills


def _cdiv(x: int, y: int) -> int:
    return -(-x // y)


# ---- launch settings -------------------------------------------------------------------------------------------------


def chunk_length(dtype: torch.dtype) -> int:
    """Tokens of a chunk."""
    return 32 if dtype == torch.float32 else 64


class Setting(NamedTuple):
    """Most keys and values in a block, warps, pipeline stages."""

    keys: int
    values: int
    warps: int
    stages: int


# Of each kernel: for up to 128 keys, for more, and for float32 of up to 128 keys and more. 16 bit: values go by 64
# whatever V is. Seen on an H200 with Triton 3.6 (ptxas 12.8): a reverse pass compiled for 32 values, 4 warps and 1
# stage faults with an illegal access, and some kernel for 16 values did; 64 has passed. The delta rule's gradients with
# 2 stages overwrite tiles that products in flight still read.
SETTINGS = {
    "prepare": (Setting(128, 64, 2, 1), Setting(128, 64, 2, 1), Setting(128, 32, 4, 1), Setting(128, 32, 4, 1)),
    "scan": (Setting(128, 64, 4, 3), Setting(256, 64, 8, 1), Setting(128, 32, 4, 1), Setting(256, 32, 8, 1)),
    "reverse": (Setting(128, 64, 4, 3), Setting(256, 64, 8, 1), Setting(128, 32, 4, 1), Setting(256, 32, 8, 1)),
    "delta gradients": (Setting(128, 64, 8, 1), Setting(128, 64, 8, 1), Setting(64, 32, 8, 1), Setting(64, 32, 8, 1)),
    "mix": (Setting(128, 64, 4, 3), Setting(256, 64, 8, 1), Setting(128, 32, 4, 1), Setting(256, 32, 8, 1)),
    "ends": (Setting(128, 64, 4, 3), Setting(128, 64, 4, 3), Setting(128, 32, 4, 1), Setting(128, 32, 4, 1)),
    "chunks": (Setting(128, 64, 4, 1), Setting(128, 64, 4, 1), Setting(128, 32, 4, 1), Setting(128, 32, 4, 1)),
}


def settings(kernel: str, dtype: torch.dtype, d_k: int, d_v: int, more: bool = False) -> dict[str, int]:
    """Blocks, warps and pipeline stages of a kernel: a function of the dtype, K, V and whether a chunk reads more than
    usual: erase keys with rule "delta", gates or strengths with "write"."""
    full = dtype == torch.float32
    keys, values, warps, stages = SETTINGS[kernel][2 * full + (d_k > 128)]
    least = TILE if full else 64
    keys, values = (max(least, min(x, 1 << (d - 1).bit_length())) for x, d in ((keys, d_k), (values, d_v)))
    if more:
        stages = min(stages, 2)  # for want of shared memory and registers
    return {"BK": keys, "BV": values, "num_warps": warps, "num_stages": stages}


# ---- the cut into units ----------------------------------------------------------------------------------------------


def plain_segments_of(programs: int, chunks: int) -> int:
    """Segments of every entry for the Hopper kernels, a program for each processor at most: the least time, with what
    an H200 takes in microseconds: 2.7 for a chunk, 1.7 for its map, 2 to merge a segment, 10 for more launches."""
    numbers = isinstance(programs, int) and isinstance(chunks, int)  # torch.compile asks with symbols, unhashable
    return _quickest(programs, chunks) if numbers else _quickest.__wrapped__(programs, chunks)


@lru_cache(maxsize=1024)
def _quickest(programs: int, chunks: int) -> int:
    def cost(s: int) -> float:
        return 2.7 * chunks if s == 1 else 4.4 * _cdiv(chunks, s) + 2 * s + 10

    return min(range(1, max(1, min(PROCESSORS // max(1, programs), chunks)) + 1), key=cost)


def segments_of(batch: int, length: int, heads: int, d_v: int, dtype: torch.dtype, delta: bool) -> int:
    """Segments of every entry: enough to give each processor a serial program with 16 chunks or more of it, and with
    rule "write", whose maps cost little, two programs with 8 chunks or more."""
    programs = max(1, batch * heads * _cdiv(d_v, 32 if dtype == torch.float32 else 64))
    chunks = _cdiv(length, chunk_length(dtype))
    most, least = (PROCESSORS, 16) if delta else (2 * PROCESSORS, 8)
    return max(1, min(most // programs, chunks // least))


@final
@dataclass(frozen=True)
class Cut:
    """Units, chunks and their slots. S segments of L tokens make an entry of T tokens; packed: S = 1."""

    T: int
    S: int
    L: int
    N: int
    units: int
    slots: int
    chunk: int
    offsets: Tensor | None = None
    units_of_slots: Tensor | None = None


def cut(batch: int, length: int, chunk: int, segments: int, cu_seqlens: Tensor | None) -> Cut:
    """The cut of (batch, length) tokens; segments are whole chunks but for the last: fewer may be made than asked."""
    if cu_seqlens is not None:
        made = host.layout(batch, length, chunk, cu_seqlens)
        return Cut(length, 1, length, made.chunks, made.units, made.slots, chunk, made.offsets, made.units_of_slots)
    if segments == 1:
        n = _cdiv(length, chunk)
        return Cut(length, 1, length, n, batch, batch * n, chunk)
    n = _cdiv(_cdiv(length, chunk), segments)
    s = _cdiv(length, n * chunk)
    return Cut(length, s, n * chunk, n, batch * s, batch * s * n, chunk)


# ---- launches --------------------------------------------------------------------------------------------------------


def _run(kernel: Any, programs: int, tensors: tuple[Tensor | None, ...], given: dict[str, Any]) -> None:
    """Launch a kernel with its tensors and those of the given arguments that it takes."""
    values = {name: given[name] for name in kernel.names[len(tensors) :]}
    kernel[(programs,)](*tensors, **values, num_warps=given["num_warps"], num_stages=given["num_stages"])


class Chain(NamedTuple):
    """What both directions are given: contiguous tensors, beta and g and start in float32, scales of `normalize`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    g: Tensor | None
    erase: Tensor | None
    early: bool
    runs: Tensor | None  # cumulative gates of chunks, in the forward written before they are read, as the scales are
    spans: Tensor | None  # of gated segments: `scalar_tiles.spans`
    scale_q: Tensor | None
    scale_k: Tensor | None
    cut: Cut
    record: bool = True  # whether a backward may follow

    def common(self, kernel: str, **more: Any) -> dict[str, Any]:
        """Arguments of kernels of the chain, by name, and more."""
        (b, t, h, d_k), (hv, d_v), cut = self.q.shape, self.v.shape[2:], self.cut
        return dict(
            T=cut.T, S=cut.S, L=cut.L, N=cut.N, C=cut.chunk, PACKED=cut.offsets is not None,
            H=h, HV=hv, K=d_k, V=d_v, tokens=b * t, GATED=self.g is not None, WEIGHTED=self.beta is not None,
            UNIT=self.scale_q is not None, EARLY=self.early, ERASE=self.erase is not None,
            PRECISION=precision(self.q), **settings(kernel, self.q.dtype, d_k, d_v, self.erase is not None), **more,
        )  # fmt: skip

    @property
    def unit_heads(self) -> int:
        return self.cut.units * self.v.shape[2]

    @property
    def slot_heads(self) -> int:
        return self.cut.slots * self.v.shape[2]

    def wide(self) -> Tensor:
        """Vectors of keys for every value head."""
        return self.q.new_empty(*self.v.shape[:3], self.q.shape[3])

    def state(self, *sizes: int) -> Tensor:
        """Float32 (units, HV, ...), by default the states of all units."""
        rest = sizes or (self.v.shape[3], self.q.shape[3])
        return self.q.new_empty(self.cut.units, self.v.shape[2], *rest, dtype=torch.float32)


def _delta_pair(x: Chain) -> tuple[Any, Any]:
    """The functions for rule "delta": of shapes, dtype and capability alone. Faster kernels for plain cases go here.

    forward(x, start) -> o, final, M, P, first states of segments and their maps (start and None where x.cut.S is 1);
    backward(x, M, P, first states, maps, do, dfinal) -> dq, dk, da by value head, dv, dbeta, dg, dstart of all units.
    """
    if _plain(x.q, x.v, x.beta, x.erase, x.early or x.scale_q is not None or x.cut.offsets is not None):
        return _hopper_forward, _hopper_backward
    return _delta_forward, _delta_backward


def _merge(x: Chain, constants: Tensor, maps: Tensor, edge: Tensor | None, reverse: bool) -> Tensor:
    """First states of all segments (reverse: gradients of their last ones), from the edge of the entry inwards."""
    starts, s = x.state(), x.cut.S
    d_v, d_k = starts.shape[2:]
    full, matrix = x.q.dtype == torch.float32, maps.ndim == 4
    whole = not matrix or d_k <= 128 and not full
    given = dict(
        S=s, N=x.cut.N, HV=starts.shape[1], K=d_k, V=d_v, BK=max(TILE, 1 << (d_k - 1).bit_length()), BV=16,
        FLAGS=max(TILE, 1 << (s - 1).bit_length()), MATRIX=matrix, WHOLE=whole, GATED=matrix and x.spans is not None,
        REVERSE=reverse, STARTED=edge is not None, PRECISION="ieee" if full else "tf32x3",
        num_warps=8 if matrix and whole else 4, num_stages=3 if whole else 1,
    )  # fmt: skip
    _run(scalar_tiles.merge, x.unit_heads * _cdiv(d_v, 16), (constants, maps, x.spans, edge, starts), given)
    return starts


def _matrices(x: Chain) -> tuple[Tensor, Tensor]:
    """M and P of every chunk; cumulative gates and the scales of `normalize` are written on the way."""
    square = (x.cut.slots, x.v.shape[2], x.cut.chunk, x.cut.chunk)
    m, p = x.q.new_empty(square), x.q.new_empty(square)
    bounds = _bounds(x)
    tensors = (
        x.q, x.k, x.erase, x.beta, x.g, x.runs, x.scale_q, x.scale_k, m, p, bounds, x.cut.offsets, x.cut.units_of_slots,
    )  # fmt: skip
    merging = "ieee" if x.q.dtype == torch.float32 else "tf32x3"
    given = x.common("prepare", SIDE=TILE, MERGE=merging, CUT=bounds is not None)
    _run(scalar_delta.prepare, x.slot_heads, tensors, given)
    _find_spans(x, bounds)
    return m, p


def _bounds(x: Chain) -> Tensor | None:
    """Room for a number of each chunk and head, where segments have gates."""
    return None if x.spans is None else x.spans.new_empty(x.slot_heads, dtype=torch.float32)


def _find_spans(x: Chain, bounds: Tensor | None) -> None:
    if bounds is not None:
        given = x.common("chunks", BLOCK=64) | {"num_warps": 1}
        _run(scalar_tiles.spans, x.unit_heads, (bounds, x.spans), given)


def _scan(
    x: Chain, mode: str, m: Tensor, p: Tensor | None, start: Tensor | None, o: Tensor | None = None,
    final: Tensor | None = None, maps: Tensor | None = None, states: Tensor | None = None,
    written: Tensor | None = None, columns: bool = False,
) -> None:  # fmt: skip
    tensors = (
        x.q, x.k, x.erase, x.v, x.beta, x.runs, x.spans, x.scale_q, x.scale_k, m, p, start, o, final, maps, states,
        written, x.cut.offsets,
    )  # fmt: skip
    given = x.common("scan", STARTED=start is not None, MODE=mode, COLUMNS=columns)
    blocks = _cdiv(x.v.shape[3], given["BV"]) + (_cdiv(x.q.shape[3], given["BV"]) if mode == "map" else 0)
    _run(scalar_delta.scan, x.unit_heads * blocks, tensors, given)


def _reverse(
    x: Chain, m: Tensor, p: Tensor, do: Tensor, dends: Tensor | None, dstart: Tensor, dstates: Tensor | None = None,
    dwritten: Tensor | None = None, columns: bool = False,
) -> None:  # fmt: skip
    tensors = (
        x.q, x.k, x.erase, x.beta, x.runs, x.spans, x.scale_q, x.scale_k, m, p, do, dends, dstates, dwritten, dstart,
        x.cut.offsets,
    )  # fmt: skip
    record = dstates is not None
    given = x.common("reverse", STARTED=dends is not None, RECORD=record, COLUMNS=columns)
    _run(scalar_delta.reverse, x.unit_heads * _cdiv(x.v.shape[3], given["BV"]), tensors, given)


def segment_starts(x: Chain, m: Tensor, start: Tensor | None, columns: bool = False) -> tuple[Tensor, Tensor]:
    """First states of all segments, and the segments' maps; columns: m has the strengths on its columns."""
    constants, maps = x.state(), x.state(x.q.shape[3], x.q.shape[3])
    _scan(x, "map", m, None, start, final=constants, maps=maps, columns=columns)
    return _merge(x, constants, maps, start, reverse=False), maps


def segment_ends(
    x: Chain, m: Tensor, p: Tensor, maps: Tensor, do: Tensor, dfinal: Tensor | None, columns: bool = False
) -> Tensor:
    """Gradients of the last states of all segments."""
    constants = x.state()
    _reverse(x, m, p, do, None, constants, columns=columns)
    return _merge(x, constants, maps, dfinal, reverse=True)


def _delta_forward(x: Chain, start: Tensor | None) -> tuple[Tensor, ...]:
    """o, final, and what the backward needs: M, P, first states of segments and their maps."""
    m, p = _matrices(x)
    o, final, maps = torch.empty_like(x.v), x.state(), None
    if x.cut.S > 1:
        start, maps = segment_starts(x, m, start)
    _scan(x, "output", m, p, start, o=o, final=final)
    return o, final, m, p, start, maps  # type: ignore[return-value]


def _delta_backward(
    x: Chain, m: Tensor, p: Tensor, starts: Tensor | None, maps: Tensor | None, do: Tensor, dfinal: Tensor | None
) -> tuple[Tensor, ...]:
    """dq, dk, da by value head, dv, dbeta, dg, and the gradient of all units' first states."""
    states = x.q.new_empty(x.cut.slots, x.v.shape[2], x.q.shape[3], x.v.shape[3])
    dstates, written, dwritten = torch.empty_like(states), torch.empty_like(x.v), torch.empty_like(x.v)
    dstart = x.state()
    _scan(x, "record", m, None, starts, states=states, written=written)
    if maps is not None:
        dfinal = segment_ends(x, m, p, maps, do, dfinal)
    _reverse(x, m, p, do, dfinal, dstart, dstates, dwritten)
    dq, dk, dv = x.wide(), x.wide(), torch.empty_like(x.v)
    da, dbeta, dg = None if x.erase is None else x.wide(), _like(x.beta), _like(x.g)
    tensors = (
        x.q, x.k, x.erase, x.v, x.beta, x.g, x.runs, x.scale_q, x.scale_k, do, states, dstates, written, dwritten,
        dq, dk, da, dv, dbeta, dg, x.cut.offsets, x.cut.units_of_slots,
    )  # fmt: skip
    _run(scalar_delta.gradients, x.slot_heads, tensors, x.common("delta gradients"))
    return dq, dk, da, dv, dbeta, dg, dstart  # type: ignore[return-value]


def _plain(q: Tensor, v: Tensor, beta: Tensor | None, erase: Tensor | None, special: bool) -> bool:
    """Whether the Hopper kernels compute a chain: 16 bit, dense, K = V in {64, 128}, as many value heads as key heads,
    keys erased where they are written, after the gate; special: packed, early or normalized."""
    return erase is None and beta is not None and not special and _GLUON and hopper.fits(q, v)


def _hopper_forward(x: Chain, start: Tensor | None) -> tuple[Tensor | None, ...]:
    """As `_delta_forward`, W = (I + L diag(beta))^-1, strengths on the columns, in the place of M."""
    assert x.beta is not None
    maps, bounds, cut = None, _bounds(x), x.cut
    runs = None if bounds is None else x.runs
    w, numbers = hopper.prepare(x.k, x.beta, x.g, cut.S, cut.L, runs, bounds)
    shape = (cut.slots, x.v.shape[2], *w.shape[3:])
    if cut.S > 1:
        _find_spans(x, bounds)
        start, maps = segment_starts(x, w.view(shape), start, columns=True)
    o, final, p = hopper.chain(x.q, x.k, x.v, w, numbers, start, cut.S, cut.L, x.record)
    return o, final, w.view(shape), p.view(shape) if x.record else p, start, maps


def _hopper_backward(
    x: Chain, w: Tensor, p: Tensor, start: Tensor | None, maps: Tensor | None, do: Tensor, dfinal: Tensor | None
) -> tuple[Tensor | None, ...]:
    """As `_delta_backward`."""
    assert x.beta is not None
    shape = (x.cut.units, x.v.shape[2], x.cut.N, *w.shape[2:])
    if maps is not None:
        dfinal = segment_ends(x, w, p, maps, do, dfinal, columns=True)
    dfinal = x.state().zero_() if dfinal is None else dfinal
    dq, dk, dv, dbeta, dg, dstart = hopper_backward.backward(
        x.q, x.k, x.v, x.beta, x.g, start, w.view(shape), p.view(shape), do, dfinal, x.cut.S, x.cut.L
    )
    return dq, dk, None, dv, dbeta, None if x.g is None else dg, dstart


def _like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x)


def _ends(x: Chain, do: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of rule "write": constants and factors of segments' maps of states, or with do of their gradients' maps."""
    left, right, scale = (x.k, x.v, x.scale_k) if do is None else (x.q, do, x.scale_q)
    final, through = x.state(), x.q.new_empty(x.cut.units, x.v.shape[2], dtype=torch.float32)
    given = x.common("ends", REVERSE=do is not None)
    blocks = _cdiv(x.v.shape[3], given["BV"]) * _cdiv(x.q.shape[3], given["BK"])
    tensors = (left, right, x.beta, x.runs, scale, final, through, x.cut.offsets)
    _run(scalar_write.ends, x.unit_heads * blocks, tensors, given)
    return final, through


def _numbers(x: Chain) -> Tensor | None:
    """What the Hopper kernel of rule "write" reads of gates and strengths; None where it does not compute a chain."""
    if x.scale_q is not None or x.cut.offsets is not None or not (_GLUON and hopper_write.fits(x.q, x.v)):
        return None
    return hopper_write.numbers(x.beta, x.g, x.v, x.cut.S, x.cut.L, x.cut.N)


def _mix(
    x: Chain, numbers: Tensor | None, role: str, inner: tuple[Tensor, Tensor, Tensor], out: Tensor,
    start: Tensor | None, final: Tensor | None = None, own: Tensor | None = None, trace: Tensor | None = None,
    dots: Tensor | None = None, dbeta: Tensor | None = None, dg: Tensor | None = None,
) -> None:  # fmt: skip
    if numbers is not None:
        kept = (start, final, own, trace, dots, dbeta, dg)
        hopper_write.mix(role, *inner, x.beta, x.g, numbers, out, *kept, cut=(x.cut.S, x.cut.L, x.cut.N))
        return
    a, w = inner[0].shape[3], inner[2].shape[3]
    blocks = settings("mix", x.q.dtype, a, w, x.g is not None or x.beta is not None)
    given = x.common("mix", A=a, W=w, STARTED=start is not None, ROLE=role) | blocks
    tensors = (
        *inner, own, x.beta, x.g, x.runs, x.scale_q, x.scale_k, start, out, final, trace, dots, dbeta, dg,
        x.cut.offsets,
    )  # fmt: skip
    _run(scalar_write.mix, x.unit_heads * _cdiv(w, given["BV"]), tensors, given)


def _write_forward(x: Chain, start: Tensor | None) -> tuple[Tensor, ...]:
    """o, final, and what the backward needs: first states of segments."""
    slots = (x.cut.offsets, x.cut.units_of_slots)
    numbers = _numbers(x)
    if x.scale_q is not None:
        tensors = (x.q, x.k, x.scale_q, x.scale_k, *slots)
        _run(scalar_write.lengths, x.cut.slots * x.q.shape[2], tensors, x.common("chunks"))
    if x.g is not None and (numbers is None or x.cut.S > 1):
        _run(scalar_write.cumulate, x.slot_heads, (x.g, x.runs, *slots), x.common("chunks"))
    o, final, starts = torch.empty_like(x.v), x.state(), start
    if x.cut.S > 1:
        constants, through = _ends(x)
        starts = _merge(x, constants, through, start, reverse=False)
    _mix(x, numbers, "o", (x.q, x.k, x.v), o, starts, final)
    return o, final, starts, x.q.new_empty(0)  # type: ignore[return-value]


def _write_backward(x: Chain, starts: Tensor | None, do: Tensor, dfinal: Tensor | None) -> tuple[Any, ...]:
    """As `_delta_backward`; with `normalize` the gradients of q and k are still those of the unit vectors."""
    if x.cut.S > 1:
        constants, through = _ends(x, do)
        dfinal = _merge(x, constants, through, dfinal, reverse=True)
    numbers = _numbers(x)
    dq, dk, dv = x.wide(), x.wide(), torch.empty_like(x.v)
    dstart, trace, dots, dbeta, dg = x.state(), None, None, None, None
    parts_of_v, parts_of_k = (1 if numbers is not None else _parts(x, y) for y in (x.v, x.q))
    if x.beta is not None:
        dbeta = x.beta.new_empty(parts_of_v, *x.v.shape[:3])
    if x.g is not None:
        trace = x.q.new_empty(x.cut.slots, x.v.shape[2], x.v.shape[3], x.q.shape[3])
        dots, dg = (x.g.new_empty(parts_of_k, *x.v.shape[:3]) for _ in range(2))
    _mix(x, numbers, "dq", (do, x.v, x.k), dq, starts, own=x.q, trace=trace, dots=dots)
    _mix(x, numbers, "dv", (x.k, x.q, do), dv, dfinal, dstart, own=x.v, dbeta=dbeta)
    _mix(x, numbers, "dk", (x.v, do, x.q), dk, dfinal, own=x.k, trace=trace, dots=dots, dg=dg)
    return dq, dk, None, dv, *(None if y is None else y[0] if len(y) == 1 else y.sum(0) for y in (dbeta, dg)), dstart


def _parts(x: Chain, out: Tensor) -> int:
    """In how many blocks of columns `scalar_write.mix` makes a gradient like out."""
    width = out.shape[3]
    return _cdiv(width, settings("mix", out.dtype, x.q.shape[3] + x.v.shape[3] - width, width)["BV"])


# ---- operators -------------------------------------------------------------------------------------------------------


def _cut(
    q: Tensor, v: Tensor, beta: Tensor | None, erase: Tensor | None, cu: Tensor | None, delta: bool, special: bool,
    segments: int,
) -> Cut:  # fmt: skip
    """The cut into `segments`, or with 0 into as many as the sizes ask for; special: early or normalized."""
    b, t, hv, d_v = v.shape
    if segments == 0 and cu is None:
        if delta and _plain(q, v, beta, erase, special):
            segments = plain_segments_of(b * hv, _cdiv(t, 64))
        else:
            segments = segments_of(b, t, hv, d_v, q.dtype, delta)
    return cut(b, t, chunk_length(q.dtype), segments, cu)


def _given(
    g: Tensor | None, normalize: bool, runs: Tensor, spans: Tensor, scale_q: Tensor, scale_k: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Operators pass empty tensors where the kernels want None."""
    given = spans if spans.numel() else None
    return None if g is None else runs, given, scale_q if normalize else None, scale_k if normalize else None


def _compute(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, erase: Tensor | None, start: Tensor | None,
    cu: Tensor | None, delta: bool, early: bool, normalize: bool, segments: int, *, record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, final; for the backward M, P, cumulative gates, spans, scales of q and k, first states of segments and their
    maps: empty where unused."""
    none = [q.new_empty(0) for _ in range(8)]
    units = q.shape[0] if cu is None else cu.shape[0] - 1
    if v.numel() == 0:
        final = q.new_zeros(units, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32)
        if start is not None:
            final.copy_(start)
        return torch.empty_like(v), final, *none  # type: ignore[return-value]
    m, p, runs, spans, scale_q, scale_k, starts, maps = none
    made = _cut(q, v, beta, erase, cu, delta, early or normalize, segments)
    if g is not None:
        runs = torch.empty_like(g)
        if delta and made.S > 1:
            spans = q.new_empty(made.units, v.shape[2], 2, dtype=torch.int32)
    if normalize:
        scale_q, scale_k = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    given = _given(g, normalize, runs, spans, scale_q, scale_k)
    x = Chain(q, k, v, beta, g, erase, early, *given, cut=made, record=record)
    with on_device(q):
        if delta:
            o, final, m, p, *rest = _delta_pair(x)[0](x, start)
        else:
            o, final, *rest = _write_forward(x, start)
    if x.cut.S > 1:
        starts, maps = rest
        final = final.view(-1, x.cut.S, *final.shape[1:])[:, -1].clone(memory_format=torch.contiguous_format)
    return o, final, m, p, runs, spans, scale_q, scale_k, starts, maps


def _forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, erase: Tensor | None, start: Tensor | None,
    cu: Tensor | None, delta: bool, early: bool, normalize: bool, segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`_compute`, with a record for the backward."""
    return _compute(q, k, v, beta, g, erase, start, cu, delta, early, normalize, segments, record=True)


_operator = torch.library.custom_op("axes::scalar_chain", _forward, mutates_args=())


@_operator.register_fake
def _(q, k, v, beta, g, erase, start, cu, delta, early, normalize, segments):
    none = [q.new_empty(0) for _ in range(8)]
    (b, t, h, d_k), hv, d_v = q.shape, v.shape[2], v.shape[3]
    final = q.new_empty(b if cu is None else cu.shape[0] - 1, hv, d_v, d_k, dtype=torch.float32)
    if v.numel() == 0:
        return torch.empty_like(v), final, *none
    m, p, runs, spans, scale_q, scale_k, starts, maps = none
    if g is not None:
        runs = torch.empty_like(g)
    c = chunk_length(q.dtype)
    if cu is None:
        made = _cut(q, v, beta, erase, None, delta, early or normalize, segments)
        units, slots, s = made.units, made.slots, made.S
    else:
        units, s = cu.shape[0] - 1, 1
        slots = t // c + units
    if delta:
        m, p = q.new_empty(slots, hv, c, c), q.new_empty(slots, hv, c, c)
    if normalize:
        scale_q, scale_k = (q.new_empty(b, t, h, dtype=torch.float32) for _ in range(2))
    if s > 1:
        starts = q.new_empty(units, hv, d_v, d_k, dtype=torch.float32)
        maps = q.new_empty(units, hv, d_k, d_k, dtype=torch.float32) if delta else maps
        spans = q.new_empty(units, hv, 2, dtype=torch.int32) if delta and g is not None else spans
    return torch.empty_like(v), final, m, p, runs, spans, scale_q, scale_k, starts, maps


def _backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, erase: Tensor | None, start: Tensor | None,
    cu: Tensor | None, m: Tensor, p: Tensor, runs: Tensor, spans: Tensor, scale_q: Tensor, scale_k: Tensor,
    starts: Tensor, maps: Tensor, do: Tensor, dfinal: Tensor | None,
    delta: bool, early: bool, normalize: bool, segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, beta, g, erase (empty where there is none) and of the first states."""
    none = q.new_empty(0)
    if v.numel() == 0:
        given = [torch.zeros_like(y) if y is not None else q.new_empty(0) for y in (q, k, v, beta, g, erase)]
        units = q.shape[0] if cu is None else cu.shape[0] - 1
        dstart = q.new_zeros(units, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32)
        return *given, dstart if dfinal is None else dstart.copy_(dfinal)  # type: ignore[return-value]
    made = _cut(q, v, beta, erase, cu, delta, early or normalize, segments)
    x = Chain(q, k, v, beta, g, erase, early, *_given(g, normalize, runs, spans, scale_q, scale_k), cut=made)
    cuts = x.cut.S > 1
    first, through = (starts, maps) if cuts else (start, None)
    with on_device(q):
        if delta:
            dq, dk, da, dv, dbeta, dg, dstart = _delta_pair(x)[1](x, m, p, first, through, do, dfinal)
        else:
            dq, dk, da, dv, dbeta, dg, dstart = _write_backward(x, first, do, dfinal)
    if cuts:
        dstart = dstart.view(-1, x.cut.S, *dstart.shape[1:])[:, 0].clone(memory_format=torch.contiguous_format)
    if v.shape[2] > q.shape[2]:
        group = (*q.shape[:3], v.shape[2] // q.shape[2], q.shape[3])
        dq, dk, da = (None if y is None else y.view(group).sum(3) for y in (dq, dk, da))
    if normalize and not delta:
        with on_device(q):
            tensors = (dq, dk, q, k, scale_q, scale_k, x.cut.offsets, x.cut.units_of_slots)
            _run(scalar_write.project_all, x.cut.slots * q.shape[2], tensors, x.common("chunks"))
    dbeta, dg, da = (none.clone() if y is None else y for y in (dbeta, dg, da))
    return dq, dk, dv, dbeta, dg, da, dstart


_backward_operator = torch.library.custom_op("axes::scalar_chain_backward", _backward, mutates_args=())


@_backward_operator.register_fake
def _(q, k, v, beta, g, erase, start, cu, m, p, runs, spans, scale_q, scale_k, starts, maps, do, dfinal, *options):
    given = [torch.empty_like(y) if y is not None else q.new_empty(0) for y in (q, k, v, beta, g, erase)]
    units = q.shape[0] if cu is None else cu.shape[0] - 1
    return *given, q.new_empty(units, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    *tensors, delta, early, normalize, segments = inputs
    ctx.options = (delta, early, normalize, segments)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dfinal, *_, backward=_backward_operator):
    tensors = ctx.saved_tensors
    _, _, v, beta, g, erase, start, _ = tensors[:8]
    do = torch.zeros_like(v) if do is None else do.contiguous()
    dfinal = None if dfinal is None else dfinal.float().contiguous()
    dq, dk, dv, dbeta, dg, derase, dstart = backward(*tensors, do, dfinal, *ctx.options)
    return (
        dq, dk, dv, None if beta is None else dbeta, None if g is None else dg, None if erase is None else derase,
        None if start is None else dstart, *[None] * 5,
    )  # fmt: skip


_operator.register_autograd(_differentiate, setup_context=_save)


class _Eager(torch.autograd.Function):
    """The operator without its dispatch, which costs more than a small chain."""

    @staticmethod
    def forward(*inputs):
        return _forward(*inputs)

    setup_context = staticmethod(_save)

    @staticmethod
    def backward(ctx, *grads):
        return _differentiate(ctx, *grads, backward=_backward)


def _apply(*inputs: Any) -> tuple[Tensor, ...]:
    """o, final and what the backward keeps: as an operator to compilers, plainly to everyone else."""
    if torch.compiler.is_compiling() or type(inputs[0]) not in (Tensor, torch.nn.Parameter):
        return _operator(*inputs)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return _Eager.apply(*inputs)
    return _compute(*inputs, record=False)


# ---- entries ---------------------------------------------------------------------------------------------------------


def scalar_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    erase: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    rule: str = "delta",
    early: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
    segments: int | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t-1} + beta_t (v_t - [rule "delta"] S' a_t) k_t^T and o_t = S_t q_t, the exact recurrence.

    q, k (B, T, H, K), v (B, T, HV, V) in one of bf16, fp16, fp32; HV a multiple of H: value head h has key head
    h // (HV / H). K, V from 1 to 256, any T. beta (B, T, HV) strengths, 0 to 2 for unit keys, None for ones; g
    (B, T, HV) logs of gates, at most 0, floored at -100, None for no gate. rule "write": nothing is erased. "delta":
    S' = e^{g_t} S_{t-1}, or S_{t-1} with early=True; a_t = k_t, or erase (B, T, H, K) in q's dtype.
    normalize: q and k are divided by sqrt(their sum of squares + 1e-6); erase is not.
    cu_seqlens (U + 1,) int32 or int64 with B = 1: offsets 0, ..., T of U packed sequences; else U = B.
    initial_state (U, HV, V, K) or None for zero. segments: in how many pieces an entry's tokens run side by side (not
    with cu_seqlens); None chooses from the sizes alone. Returns o (B, T, HV, V) in v's dtype and the final state
    (U, HV, V, K) in float32; all inputs receive gradients, once. Raises ShapeError on what does not fit.
    """
    who = "scalar_chain"
    check_tokens(who, q, k, v)
    if rule not in ("write", "delta"):
        raise ShapeError(f"{who}: rule is 'write' or 'delta', not {rule!r}")
    if rule == "write" and (erase is not None or early):
        raise ShapeError(f"{who}: rule 'write' erases nothing: no erase keys and no early")
    if segments is not None and (segments < 1 or (segments > 1 and cu_seqlens is not None)):
        raise ShapeError(f"{who}: segments is at least 1, and 1 with cu_seqlens, not {segments}")
    b, t, hv = v.shape[:3]
    check_packing(who, b, cu_seqlens, q.device)
    units = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_like(who, "beta", beta, (b, t, hv), q.device)
    check_like(who, "g", g, (b, t, hv), q.device)
    check_like(who, "erase", erase, tuple(q.shape), q.device)
    check_like(who, "initial_state", initial_state, (units, hv, v.shape[3], q.shape[3]), q.device)
    if erase is not None and erase.dtype != q.dtype:
        raise ShapeError(f"{who}: erase has the dtype of q, {q.dtype}, not {erase.dtype}")
    o, final, *_ = _apply(
        q.contiguous(), k.contiguous(), v.contiguous(), _float(beta), _float(g),
        None if erase is None else erase.contiguous(), _float(initial_state), cu_seqlens,
        rule == "delta", early, normalize, segments or 0,
    )  # fmt: skip
    return o, final


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t: `scalar_chain`, rule "delta"."""
    return scalar_chain(q, k, v, beta, g, initial_state=initial_state)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t-1} + v_t k_t^T, o_t = S_t q_t: `scalar_chain`, rule "write"."""
    return scalar_chain(q, k, v, g=g, initial_state=initial_state, rule="write")
