"""Launches of the scalar chain's kernels: the two rules, each forward and backward, in segments or not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from axes.kernels.common import inverse
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.common.tiles import TILE
from axes.kernels.common.versions import gluon_refusal
from axes.kernels.scalar import delta as scalar_delta
from axes.kernels.scalar import tiles as scalar_tiles
from axes.kernels.scalar import write as scalar_write
from axes.kernels.scalar.sizes import Cut, form, products, settings

if GLUON := gluon_refusal() is None:  # on an unknown Triton these modules raise, and the portable kernels run
    from axes.kernels.scalar import hopper, hopper_backward, hopper_write


def run(kernel: Any, programs: int, tensors: tuple[Tensor | None, ...], given: dict[str, Any]) -> None:
    """Launch a kernel with its tensors and those of the given arguments that it takes."""
    values = {name: given[name] for name in kernel.names[len(tensors) :]}
    kernel[(programs,)](*tensors, **values, num_warps=given["num_warps"], num_stages=given["num_stages"])


class Chain(NamedTuple):
    """What both directions are given: contiguous tensors, beta and g and start in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    g: Tensor | None
    erase: Tensor | None
    early: bool
    runs: Tensor | None  # cumulative gates of chunks, in the forward written before they are read
    spans: Tensor | None  # of gated segments: `scalar_tiles.spans`
    cut: Cut
    record: bool = True  # whether a backward may follow
    write: Tensor | None = None  # strengths of writes; beta is then of erases alone. On Hopper's kernels

    def common(self, kernel: str, **more: Any) -> dict[str, Any]:
        """Arguments of kernels of the chain, by name, and more."""
        (b, t, h, d_k), (hv, d_v), cut = self.q.shape, self.v.shape[2:], self.cut
        return dict(
            T=cut.T, S=cut.S, L=cut.L, N=cut.N, C=cut.chunk, PACKED=cut.offsets is not None,
            H=h, HV=hv, K=d_k, V=d_v, tokens=b * t, GATED=self.g is not None, WEIGHTED=self.beta is not None,
            EARLY=self.early, ERASE=self.erase is not None,
            PRECISION=products(self.q.dtype, d_k), **settings(kernel, self.form, d_k, d_v, self.erase is not None),
            **more,
        )  # fmt: skip

    @property
    def form(self) -> str:
        return form(self.q.dtype, self.q.shape[3])

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


def _merge(x: Chain, constants: Tensor, maps: Tensor, edge: Tensor | None, reverse: bool) -> Tensor:
    """First states of all segments (reverse: gradients of their last ones), from the edge of the entry inwards."""
    starts, s = x.state(), x.cut.S
    d_v, d_k = starts.shape[2:]
    matrix = maps.ndim == 4
    whole = not matrix or d_k <= 128
    given = dict(
        S=s, N=x.cut.N, HV=starts.shape[1], K=d_k, V=d_v, BK=max(TILE, power_of_2(d_k)), BV=16,
        FLAGS=max(TILE, power_of_2(s)), MATRIX=matrix, WHOLE=whole, GATED=matrix and x.spans is not None,
        REVERSE=reverse, STARTED=edge is not None,
        PRECISION="tf32x3" if x.form == "halves" else products(x.q.dtype, d_k),
        num_warps=8 if matrix and whole else 4, num_stages=3 if whole else 1,
    )  # fmt: skip
    run(scalar_tiles.merge, x.unit_heads * cdiv(d_v, 16), (constants, maps, x.spans, edge, starts), given)
    return starts


def matrices(x: Chain) -> tuple[Tensor, Tensor]:
    """M and P of every chunk; cumulative gates are written on the way."""
    square = (x.cut.slots, x.v.shape[2], x.cut.chunk, x.cut.chunk)
    m, p = x.q.new_empty(square), x.q.new_empty(square)
    lowers = x.q.new_empty(square, dtype=torch.float32)  # what is inverted
    bounds = _bounds(x)
    tensors = (
        x.q, x.k, x.erase, x.beta, x.g, x.runs, lowers, m, p, bounds, x.cut.offsets,
        x.cut.units_of_slots,
    )  # fmt: skip
    given = x.common("prepare", CUT=bounds is not None)
    given |= inverse.constants(x.q.dtype, x.cut.chunk, given["num_warps"])
    run(scalar_delta.prepare, x.slot_heads, tensors, given)
    _find_spans(x, bounds)
    return m, p


def _bounds(x: Chain) -> Tensor | None:
    """Room for a number of each chunk and head, where segments have gates."""
    return None if x.spans is None else x.spans.new_empty(x.slot_heads, dtype=torch.float32)


def _find_spans(x: Chain, bounds: Tensor | None) -> None:
    if bounds is not None:
        given = x.common("chunks", BLOCK=64) | {"num_warps": 1}
        run(scalar_tiles.spans, x.unit_heads, (bounds, x.spans), given)


def _scan(
    x: Chain, mode: str, m: Tensor, p: Tensor | None, start: Tensor | None, o: Tensor | None = None,
    final: Tensor | None = None, maps: Tensor | None = None, states: Tensor | None = None,
    written: Tensor | None = None, columns: bool = False,
) -> None:  # fmt: skip
    tensors = (
        x.q, x.k, x.erase, x.v, x.beta, x.runs, x.spans, m, p, start, o, final, maps, states,
        written, x.cut.offsets,
    )  # fmt: skip
    given = x.common("scan", STARTED=start is not None, MODE=mode, COLUMNS=columns)
    blocks = cdiv(x.v.shape[3], given["BV"]) + (cdiv(x.q.shape[3], given["BV"]) if mode == "map" else 0)
    run(scalar_delta.scan, x.unit_heads * blocks, tensors, given)


def _reverse(
    x: Chain, m: Tensor, p: Tensor, do: Tensor, dends: Tensor | None, dstart: Tensor, dstates: Tensor | None = None,
    dwritten: Tensor | None = None, columns: bool = False,
) -> None:  # fmt: skip
    tensors = (
        x.q, x.k, x.erase, x.beta, x.runs, x.spans, m, p, do, dends, dstates, dwritten, dstart,
        x.cut.offsets,
    )  # fmt: skip
    record = dstates is not None
    given = x.common("reverse", STARTED=dends is not None, RECORD=record, COLUMNS=columns)
    run(scalar_delta.reverse, x.unit_heads * cdiv(x.v.shape[3], given["BV"]), tensors, given)


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


def delta_forward(x: Chain, start: Tensor | None) -> tuple[Any, ...]:
    """o, final, and what the backward needs: M, P, first states of segments and their maps."""
    m, p = matrices(x)
    o, final, maps = torch.empty_like(x.v), x.state(), None
    if x.cut.S > 1:
        start, maps = segment_starts(x, m, start)
    _scan(x, "output", m, p, start, o=o, final=final)
    return o, final, m, p, start, maps


def delta_backward(
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
        x.q, x.k, x.erase, x.v, x.beta, x.g, x.runs, do, states, dstates, written, dwritten,
        dq, dk, da, dv, dbeta, dg, x.cut.offsets, x.cut.units_of_slots,
    )  # fmt: skip
    run(scalar_delta.gradients, x.slot_heads, tensors, x.common("delta gradients"))
    return dq, dk, da, dv, dbeta, dg, dstart  # type: ignore[return-value]


def hopper_delta_forward(x: Chain, start: Tensor | None) -> tuple[Any, ...]:
    """As `delta_forward`, W = (I + L diag(beta))^-1, strengths on the columns, in the place of M."""
    assert x.beta is not None
    maps, bounds, cut = None, _bounds(x), x.cut
    runs = None if bounds is None else x.runs
    every = x.k.shape[1] // x.q.shape[1]
    w, numbers = hopper.prepare(x.k, x.beta, x.g, cut.S, cut.L, runs, bounds, x.write, every)
    shape = (cut.slots, x.v.shape[2], *w.shape[3:])
    if cut.S > 1:
        _find_spans(x, bounds)
        start, maps = segment_starts(_of_erases(x), w.view(shape), start, columns=True)
    o, final, p = hopper.chain(x.q, x.k, x.v, w, numbers, start, cut.S, cut.L, x.record, x.write is not None)
    return o, final, w.view(shape), p.view(*shape[:2], *p.shape[3:]) if x.record else p, start, maps


def _of_erases(x: Chain) -> Chain:
    """The same states by one strength: values as large as their writes are to the erases."""
    if x.write is None:
        return x
    assert x.beta is not None
    beta = torch.where(x.beta.abs() < 2.0**-24, 2.0**-24, x.beta)  # `tiles.apart`
    return x._replace(v=(x.v * (x.write / beta)[..., None]).to(x.v.dtype), beta=beta, write=None)


def hopper_delta_backward(
    x: Chain, w: Tensor, p: Tensor, start: Tensor | None, maps: Tensor | None, do: Tensor, dfinal: Tensor | None
) -> tuple[Tensor | None, ...]:
    """As `delta_backward`, and the gradient of the writes' strengths in the place of that of erase keys."""
    assert x.beta is not None
    if maps is not None:
        dfinal = segment_ends(x, w, p, maps, do, dfinal, columns=True)
    w, p = (y.view(x.cut.units, x.v.shape[2], x.cut.N, *y.shape[2:]) for y in (w, p))
    dfinal = x.state().zero_() if dfinal is None else dfinal
    dq, dk, dv, dbeta, dg, dstart, dwrite = hopper_backward.backward(
        x.q, x.k, x.v, x.beta, x.g, start, w, p, do, dfinal, x.cut.S, x.cut.L, x.write
    )
    return dq, dk, dwrite, dv, dbeta, None if x.g is None else dg, dstart


def _like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x)


def _ends(x: Chain, do: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of rule "write": constants and factors of segments' maps of states, or with do of their gradients' maps."""
    left, right = (x.k, x.v) if do is None else (x.q, do)
    final, through = x.state(), x.q.new_empty(x.cut.units, x.v.shape[2], dtype=torch.float32)
    given = x.common("ends", REVERSE=do is not None)
    blocks = cdiv(x.v.shape[3], given["BV"]) * cdiv(x.q.shape[3], given["BK"])
    tensors = (left, right, x.beta, x.runs, final, through, x.cut.offsets)
    run(scalar_write.ends, x.unit_heads * blocks, tensors, given)
    return final, through


def _numbers(x: Chain) -> Tensor | None:
    """What the Hopper kernel of rule "write" reads of gates and strengths; None where it does not compute a chain."""
    if x.cut.offsets is not None or not (GLUON and hopper_write.fits(x.q, x.v)):
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
    blocks = settings("mix", x.form, a, w, x.g is not None or x.beta is not None)
    given = x.common("mix", A=a, W=w, STARTED=start is not None, ROLE=role) | blocks
    tensors = (
        *inner, own, x.beta, x.g, x.runs, start, out, final, trace, dots, dbeta, dg,
        x.cut.offsets,
    )  # fmt: skip
    run(scalar_write.mix, x.unit_heads * cdiv(w, given["BV"]), tensors, given)


def write_forward(x: Chain, start: Tensor | None) -> tuple[Any, ...]:
    """As `delta_forward`, of which only first states of segments are needed."""
    slots = (x.cut.offsets, x.cut.units_of_slots)
    numbers = _numbers(x)
    if x.g is not None and (numbers is None or x.cut.S > 1):
        run(scalar_write.cumulate, x.slot_heads, (x.g, x.runs, *slots), x.common("chunks"))
    o, final, starts = torch.empty_like(x.v), x.state(), start
    if x.cut.S > 1:
        constants, through = _ends(x)
        starts = _merge(x, constants, through, start, reverse=False)
    _mix(x, numbers, "o", (x.q, x.k, x.v), o, starts, final)
    return o, final, None, None, starts, None


def write_backward(x: Chain, starts: Tensor | None, do: Tensor, dfinal: Tensor | None) -> tuple[Any, ...]:
    """As `delta_backward`."""
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
    return cdiv(width, settings("mix", x.form, x.q.shape[3] + x.v.shape[3] - width, width)["BV"])
