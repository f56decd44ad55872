"""`enter`: one product of the tokens, (B, T, W), to the vectors and rates of every head in one launch, and back in one.

What is done with which columns is declared: `Stream`s, then `Numbers`, side by side in this order. The kernels and
their mathematics are with `axes.kernels.blocks.streams`. Nothing is kept for the backward but the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.blocks import streams as device
from axes.kernels.blocks.functions import ACTIVATIONS, CHARTS
from axes.kernels.common.layout import LARGEST, check_packing, layout, on_device

WIDEST = device.WIDEST  # convolution
NORMS = ("none", "unit", "rms")
_WARPS = 4
_ENTRIES = 4  # of a row in a thread: 8 bytes of a 16-bit number, which half as many registers hold as 16
_TILE = 1024  # numbers at once
_PROCESSORS = 132


class Stream(NamedTuple):
    """Columns (heads, width) that become a vector of every head: a convolution, functions, a norm, a scale, in turn.

    conv: width of the causal convolution, 0 for none, with a bias if `biased`.  norm: of a head, "unit" length or
    "rms"; eps is added under the root.
    """

    heads: int
    width: int
    conv: int = 0
    biased: bool = False
    activation: str = "none"
    feature_map: str = "none"
    norm: str = "none"
    eps: float = 0.0
    scale: float = 1.0


class Numbers(NamedTuple):
    """Columns that become factor * chart(x + bias) entry by entry, in float32 or, if `narrow`, in the product's dtype.

    "ssm" is two results of one column: -e^r softplus(x + bias), r a parameter of the column, and the softplus alone if
    it is a `step` too.
    """

    columns: int
    chart: str = "linear"
    factor: float = 1.0
    biased: bool = False
    narrow: bool = False
    step: bool = False


@final
class Plan:
    """The kernels' view of a declaration: parts, and how flat lists of tensors (of what exists, in the order of the
    declaration) are spread over them. Streams that differ in norm and scale alone are members of one part."""

    def __init__(self, streams: Sequence[Stream], numbers: Sequence[Numbers], width: int) -> None:
        self.streams, self.numbers, self.width = tuple(streams), tuple(numbers), width
        used = sum(s.heads * s.width for s in streams) + sum(n.columns for n in numbers)
        self.padding = (Numbers(width - used, "nothing"),) if width > used else ()
        self.members = self._members()
        firsts, starts, self.sums = self._places()
        parts: list[tuple[Any, ...]] = []
        block = 0
        for members in self.members:
            s = max((streams[m] for m in members), key=lambda s: s.norm != "none")
            side = 1 << (s.width - 1).bit_length()
            together = max(1, min(32 * _WARPS * _ENTRIES // side, 1 << (s.heads - 1).bit_length()))
            each = -(-s.heads // together)
            codes = ACTIVATIONS.index(s.activation), ACTIVATIONS.index(s.feature_map), NORMS.index(s.norm), s.eps
            whole = each * len(members)
            parts.append((
                0, block, whole, each, s.heads, s.width, side, together, s.conv, *codes, len(members),
                *[firsts[m] for m in members], *[streams[m].scale for m in members],
                *[int(streams[m].norm != "none") for m in members], *[starts[m] for m in members],
            ))  # fmt: skip
            block += whole
        for n, first, start in zip((*self.numbers, *self.padding), firsts[len(streams):], starts[len(streams):]):
            side = min(128, 1 << (n.columns - 1).bit_length())
            blocks = -(-n.columns // side)
            code = CHARTS.index(n.chart)
            parts.append((1, block, blocks, first, n.columns, side, _TILE // side, code, n.factor, start))
            block += blocks
        self.parts, self.blocks = tuple(parts), block

    def _members(self) -> list[list[int]]:
        parts: dict[Any, list[int]] = {}
        plain = [s._replace(norm="none", eps=0.0, scale=1.0) for s in self.streams]
        for i, s in enumerate(self.streams):
            if s.norm != "none":
                parts.setdefault((plain[i], s.norm, s.eps), []).append(i)
        for i, s in enumerate(self.streams):
            if s.norm == "none":
                alike = next((key for key in parts if key[0] == plain[i]), (plain[i], "none", 0.0))
                parts.setdefault(alike, []).append(i)
        return list(parts.values())

    def _places(self) -> tuple[list[int], list[int], int]:
        """First columns in the product and first places among the sums, and how many sums there are."""
        firsts, starts, first, start = [], [], 0, 0
        for s in self.streams:
            firsts.append(first)
            starts.append(start)
            first, start = first + s.heads * s.width, start + s.heads * s.width * (s.conv + s.biased)
        for n in (*self.numbers, *self.padding):
            firsts.append(first)
            starts.append(start)
            first, start = first + n.columns, start + n.columns * (n.biased + (n.chart == "ssm"))
        return firsts, starts, start

    def shapes(self, b: int, t: int) -> list[tuple[tuple[int, ...], bool]]:
        """Of every result and whether it is float32."""
        made: list[tuple[tuple[int, ...], bool]] = [((b, t, s.heads, s.width), False) for s in self.streams]
        for n in self.numbers:
            made += [((b, t, n.columns), not n.narrow)] * (1 + n.step)
        return made

    def tails(self, units: int) -> list[tuple[int, int, int]]:
        return [(units, s.conv - 1, s.heads * s.width) for s in self.streams if s.conv > 1]

    def parameters(self) -> list[int]:
        """Sizes of the parameters in the order of the sums and of the list."""
        made: list[int] = []
        for s in self.streams:
            made += [s.heads * s.width * s.conv] * (s.conv > 0) + [s.heads * s.width] * s.biased
        for n in self.numbers:
            made += [n.columns] * ((n.chart == "ssm") + n.biased)
        return made

    def _over_parts(self, streams: Sequence[Tensor | None], numbers: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Of a part of streams what its members have, or None if they have nothing."""
        made = [tuple(streams[m] for m in members) for members in self.members]
        return (*[None if x[0] is None else x for x in made], *numbers, *[None] * len(self.padding))

    def over_parameters(self, given: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Weights and biases."""
        rest = iter(given)
        pairs = [(next(rest) if s.conv else None, next(rest) if s.biased else None) for s in self.streams]
        pairs += [(next(rest) if n.chart == "ssm" else None, next(rest) if n.biased else None) for n in self.numbers]
        n = len(self.streams)
        return tuple(self._over_parts([x[i] for x in pairs[:n]], [x[i] for x in pairs[n:]]) for i in (0, 1))  # type: ignore[return-value]

    def over_tails(self, given: Sequence[Tensor]) -> tuple[Any, ...]:
        rest = iter(given)
        tails = [next(rest) if s.conv > 1 and given else None for s in self.streams]
        return self._over_parts(tails, [None] * len(self.numbers))

    def over_results(self, results: Sequence[Tensor], tails: Sequence[Tensor]) -> tuple[tuple[Any, ...], ...]:
        """First results, and new tails or step sizes."""
        rest = iter(results)
        streams = [next(rest) for _ in self.streams]
        pairs = [(next(rest), next(rest) if n.step else None) for n in self.numbers]
        others, steps = self.over_tails(tails), [y for _, y in pairs]
        n = len(self.members)
        return self._over_parts(streams, [x for x, _ in pairs]), (*others[:n], *steps, *others[n + len(steps) :])


def declare(streams: Sequence[Stream], numbers: Sequence[Numbers], width: int) -> str:
    """The declaration as text, which operators carry. width: of the product; columns past the last part are padding."""
    return json.dumps([streams, numbers, width])


@lru_cache(maxsize=1024)
def plan(declared: str) -> Plan:
    streams, numbers, width = json.loads(declared)
    return Plan([Stream(*s) for s in streams], [Numbers(*n) for n in numbers], width)


def _length(rows: int, blocks: int) -> int:
    """Tokens of a program: as many as leave some programs for every processor; a walk begins with what it waits for."""
    length = 128
    while length > 16 and rows * blocks < length * 12 * _PROCESSORS:
        length //= 2
    return length


# ---- launches --------------------------------------------------------------------------------------------------------


def _forward(p: Tensor, parameters: list[Tensor], tails: list[Tensor], cu: Tensor | None, declared: str) -> list[Tensor]:
    """Results of the parts, then new tails."""
    made, (b, t, _) = plan(declared), p.shape
    cut = layout(b, t, _length(b * t, made.blocks), cu)
    results = [p.new_empty(s, dtype=torch.float32 if wide else p.dtype) for s, wide in made.shapes(b, t)]
    ends = [p.new_empty(s) for s in made.tails(cut.units)]
    outs, others = made.over_results(results, ends)
    weights, biases = made.over_parameters(parameters)
    with on_device(p):
        device.enter[(cut.slots * made.blocks,)](
            p, outs, others, weights, biases, made.over_tails(tails), cut.offsets, cut.units_of_slots, t, cut.chunks,
            cut.chunk, W=made.width, PARTS=made.parts, BLOCKS=made.blocks, PACKED=cut.packed, num_warps=_WARPS,
        )  # fmt: skip
    return [*results, *ends]


def _backward(
    p: Tensor, parameters: list[Tensor], tails: list[Tensor], cu: Tensor | None, dresults: list[Tensor],
    dends: list[Tensor], declared: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the product, the parameters and the tails. dends: of the new tails, or none."""
    made, (b, t, _) = plan(declared), p.shape
    cut = layout(b, t, _length(b * t, made.blocks), cu)
    dp, dtails = torch.empty_like(p), [torch.empty_like(x) for x in tails]
    sums = p.new_empty(cut.slots, made.sums, dtype=torch.float32)
    douts, dothers = made.over_results(dresults, dends)
    weights, biases = made.over_parameters(parameters)
    with on_device(p):
        device.enter_backward[(cut.slots * made.blocks,)](
            p, douts, dothers, weights, biases, made.over_tails(tails), dp, made.over_tails(dtails), sums,
            cut.offsets, cut.units_of_slots, t, cut.chunks, cut.chunk,
            W=made.width, PARTS=made.parts, BLOCKS=made.blocks, SUMS=made.sums, PACKED=cut.packed, num_warps=_WARPS,
        )  # fmt: skip
    if not parameters:
        return [dp, *dtails]
    total, kinds = sums.sum(0), {x.dtype for x in parameters}
    total = total.to(kinds.pop()) if len(kinds) == 1 else total
    each = total.split(made.parameters())
    return [dp, *[x.view(y.shape).to(y.dtype) for x, y in zip(each, parameters, strict=True)], *dtails]


def _backward_apart(*inputs: Any) -> list[Tensor]:
    """`_backward`, no two of whose results share memory."""
    return [x.clone() if x._is_view() else x for x in _backward(*inputs)]


# ---- operators -------------------------------------------------------------------------------------------------------

_operator = torch.library.custom_op("axes::enter", _forward, mutates_args=())
_backward_operator = torch.library.custom_op(
    "axes::enter_backward",
    _backward_apart,
    mutates_args=(),
    schema="(Tensor p, Tensor[] parameters, Tensor[] tails, Tensor? cu, Tensor[] dresults, Tensor[] dends, str declared)"
    " -> Tensor[]",
)


@_operator.register_fake
def _(p, parameters, tails, cu, declared):
    made, (b, t, _) = plan(declared), p.shape
    results = [p.new_empty(s, dtype=torch.float32 if wide else p.dtype) for s, wide in made.shapes(b, t)]
    return [*results, *[p.new_empty(s) for s in made.tails(b if cu is None else cu.shape[0] - 1)]]


@_backward_operator.register_fake
def _(p, parameters, tails, cu, dresults, dends, declared):
    return [torch.empty_like(x) for x in (p, *parameters, *tails)]


def _keep(ctx, p, parameters, tails, cu, declared, output) -> None:
    ctx.declared, ctx.counts = declared, (len(parameters), len(tails))
    ctx.like = [(x.shape, x.dtype) for x in output]
    ctx.save_for_backward(p, *parameters, *tails, cu)


def _gradients(ctx, grads, backward) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    p, *rest, cu = ctx.saved_tensors
    n, m = ctx.counts
    ends = len(plan(ctx.declared).tails(1))
    results = len(grads) - ends
    if all(g is None for g in grads[results:]):
        grads = grads[:results]
    full = [
        p.new_zeros(shape, dtype=dtype) if g is None else g.contiguous()
        for g, (shape, dtype) in zip(grads, ctx.like, strict=False)
    ]
    dp, *others = backward(p, rest[:n], rest[n:], cu, full[:results], full[results:], ctx.declared)
    return dp, others[:n], others[n:]


def _save(ctx, inputs, output) -> None:
    _keep(ctx, *inputs, output)


def _differentiate(ctx, grads):
    return *_gradients(ctx, grads, _backward_operator), None, None


_operator.register_autograd(_differentiate, setup_context=_save)


class _Eager(torch.autograd.Function):
    """The operator without its dispatch, which costs more than a small sequence."""

    @staticmethod
    def forward(ctx, p, cu, declared, count, *tensors):
        ctx.set_materialize_grads(False)
        parameters, tails = list(tensors[:count]), list(tensors[count:])
        output = _forward(p, parameters, tails, cu, declared)
        _keep(ctx, p, parameters, tails, cu, declared, output)
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        dp, dparameters, dtails = _gradients(ctx, grads, _backward)
        return dp, None, None, None, *dparameters, *dtails


def enter(
    p: Tensor, declared: str, parameters: Sequence[Tensor] = (), tails: Sequence[Tensor] = (),
    cu_seqlens: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Vectors (B, T, heads, width) in p's dtype and numbers (B, T, columns) in float32 of a product p (B, T, W).

    declared: by `declare`.  parameters: of every stream the weights (channels, [1,] conv) and the bias (channels) that
    it has, then of every row of numbers the log rates ("ssm") and the bias (columns).  tails: of every stream with a
    convolution wider than 1 its last tokens (units, conv - 1, channels), or none at all for empty ones; as many come
    back, in p's dtype.  cu_seqlens: offsets 0, ..., T of packed sequences, with a tail each; else units are the batch.
    All of p, parameters and tails receive gradients, once.  Raises ShapeError on what does not fit.
    """
    who, made = "enter", plan(declared)
    if p.ndim != 3 or p.shape[-1] != made.width or 0 in p.shape:
        raise ShapeError(f"{who}: the product is (B, T, {made.width}) and not empty, not {tuple(p.shape)}")
    check_packing(who, p.shape[0], cu_seqlens, p.device)
    units = p.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wanted = made.parameters()
    if [x.numel() for x in parameters] != wanted:
        raise ShapeError(f"{who}: parameters have {wanted} numbers, not {[x.numel() for x in parameters]}")
    if tails and [tuple(x.shape) for x in tails] != made.tails(units):
        raise ShapeError(f"{who}: tails are {made.tails(units)}, not {[tuple(x.shape) for x in tails]}")
    given = [x.contiguous() for x in parameters], [x.contiguous() for x in tails]
    p = p.contiguous()
    if torch.compiler.is_compiling() or type(p) is not Tensor:
        made_ = _operator(p, *given, cu_seqlens, declared)
    elif torch.is_grad_enabled() and any(x.requires_grad for x in (p, *given[0], *given[1])):
        made_ = list(_Eager.apply(p, cu_seqlens, declared, len(given[0]), *given[0], *given[1]))
    else:
        made_ = _forward(p, *given, cu_seqlens, declared)
    cut = len(made_) - len(made.tails(1))
    return list(made_[:cut]), list(made_[cut:])


def no_stream(stream: Stream) -> str | None:
    """Why the kernels do not make a stream, or None."""
    if not 1 <= stream.width <= LARGEST:
        return f"heads are from 1 to {LARGEST} wide, not {stream.width}"
    if stream.conv > WIDEST:
        return f"convolutions are up to {WIDEST} wide, not {stream.conv}"
    return None
