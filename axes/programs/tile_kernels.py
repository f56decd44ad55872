"""A sequence of tokens by the two kernels that a step's program makes: launches, what lies between them, gradients.

They are Triton's on a GPU, and on a CPU functions of C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.linalg.formulas import by_autograd
from axes.programs import c_library, c_text
from axes.programs.tile_text import OUT, Language, Walk, source
from axes.programs.tiles import GRAD, Extent


@cache
def _kernel(text: str, name: str) -> Any:
    from axes.programs.fused import compile_text

    # two kernels of one text: each is compiled from it by its own name
    return compile_text(f"# {name}\n{text}", name)


@cache
def _function(walk: Walk, name: str, real: c_text.Real) -> c_library.Kernel:
    return c_library.Kernel(c_text.source(walk, real), name)


def _launch(
    walk: Walk, name: str, language: Language, like: Tensor, wide: torch.dtype, units: int, given: Sequence[Any],
    constants: Mapping[str, bool],
) -> None:  # fmt: skip
    """A kernel over the heads of `units` sequences, with states of dtype wide."""
    grid = (units * like.shape[2], walk.parts)
    if language == "c":
        _function(walk, name, "double" if wide == torch.float64 else "float")[grid](*given, **constants)
        return
    from axes.kernels.common import layout

    with layout.on_device(like):
        _kernel(source_of(walk, _gluon(walk)), name)[grid](*given, **constants, num_warps=walk.warps)


def _gluon(walk: Walk) -> bool:
    """Whether kernels are in Gluon's language, which Triton's interpreter has not."""
    from axes.kernels.common import versions

    return walk.threads is not None and not versions.INTERPRETED


def _on(walk: Walk, language: Language, device: torch.device) -> tuple[Walk, Walk]:
    """What a device walks forward and back."""
    from axes.kernels.common import versions

    if language == "c" or versions.hopper_refusal(device) is not None or walk.hopper is None:
        return walk, walk
    return walk.hopper


def tokens(
    walk: Walk,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    phase: int = 0,
    offsets: Tensor | None = None,
    language: Language = "triton",
    again: Callable[..., tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """What is read at every token (B, T, H, rows), and the last states.

    inputs (B, T, H, ...) in the order of the walk's, any strides but the last; states (units, H, ...), float32, each in
    its own full shape. phase: tokens since held values were renewed. offsets: of sequences packed in one batch entry.
    The first input says the dtype of what is read. C takes float32 or float64, the same of all.
    again: of offsets, inputs and states, the same by operations of torch, for derivatives of derivatives.
    """
    record = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *states))
    if not record:
        forward, _ = _on(walk, language, inputs[0].device)
        out, last, _ = _forward(language, forward, inputs, states, phase, offsets, False)
        return out, last
    function = _Tokens if again is None else _TokensTwice
    out, *last = function.apply(language, again, walk, phase, offsets, *inputs, *states)
    return out, list(last)


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, language: Language, again: Any, walk: Walk, phase: int, offsets: Tensor | None, *tensors: Tensor
    ) -> Any:
        inputs, states = tensors[: len(walk.inputs)], tensors[len(walk.inputs) :]
        walk, back = _on(walk, language, inputs[0].device)
        out, last, saved = _forward(language, walk, inputs, states, phase, offsets, True)
        ctx.language, ctx.walk, ctx.phase, ctx.wide = language, back, phase, states[0].dtype
        ctx.again = again
        starts = [] if again is None else states
        ctx.save_for_backward(*inputs, *saved, *([] if offsets is None else [offsets]), *starts)
        ctx.packed = offsets is not None
        ctx.units, ctx.shapes = states[0].shape[0], [x.shape for x in states]
        return out, *last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        walk, saved = ctx.walk, ctx.saved_tensors
        count = len(walk.inputs)
        inputs, rest = saved[:count], saved[count:]
        kept = rest[: len(walk.read) + len(walk.kept)]
        offsets = rest[len(kept)] if ctx.packed else None
        found = _backward(ctx.language, walk, inputs, kept, ctx.units, ctx.phase, offsets, grads, ctx.wide)
        first = dict(zip(walk.moving, found[count:], strict=True))
        each = zip(walk.states, ctx.shapes, strict=True)
        return *[None] * 5, *found[:count], *(first[n].reshape(s) if n in first else None for n, s in each)


class _TokensTwice(_Tokens):
    """The same, whose derivatives have derivatives of their own."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return _Tokens.backward(ctx, *grads)
        saved, walk = ctx.saved_tensors, ctx.walk
        given = (*saved[: len(walk.inputs)], *saved[len(saved) - len(walk.states) :])
        offsets = saved[-len(walk.states) - 1] if ctx.packed else None
        return *[None] * 5, *by_autograd(partial(ctx.again, offsets), given, grads)


def _strides(walk: Walk, inputs: Sequence[Tensor]) -> list[int]:
    for x, (name, extent) in zip(inputs, walk.inputs.items(), strict=True):
        inner = x.stride()[3:]
        if inner != ((walk.widths[1], 1)[-sum(extent) :] if any(extent) else ()):
            raise AxesError(f"tokens: the last dimensions of {name} are contiguous, not of strides {inner}")
    return [n for x in inputs for n in x.stride()[:3]]


def _ends(
    walk: Walk, inputs: Sequence[Tensor], phase: int, offsets: Tensor | None, window: int | None = None
) -> list[Any]:
    """window: tokens of a sequence that there is room for, of what programs add up."""
    like = inputs[0]
    batch, length, heads = like.shape[:3]
    place = like if offsets is None else offsets
    total = batch * (length if window is None else window) * heads
    return [place, length, total, heads, phase, *_strides(walk, inputs)]


def _saved(walk: Walk, shape: Sequence[int], units: int, packed: bool) -> list[tuple[int, ...]]:
    """What forward keeps for the way back: states between chunks of tokens, sums of every token."""
    batch, length, heads = shape
    slots = length // walk.chunk + units if packed else batch * (-(-length // walk.chunk))
    sums = (walk.step.operations[i].extent for i in walk.kept)
    return [
        *((slots, heads, walk.size(e)) for e in walk.read.values()),
        *((batch * length * heads, walk.size(e)) for e in sums),
    ]


def _rooms(walk: Walk, heads: int, language: Language) -> list[int]:
    """Entries of the rooms that the programs of some heads walk back by."""
    if language == "c":
        return [heads * walk.chunk * walk.size(e) for e in walk.read.values()]
    return [heads * walk.parts * walk.room(n, _gluon(walk)) for n in walk.read]


def _window(walk: Walk, length: int, language: Language, packed: bool) -> int:
    """Tokens of a launch of the way back: of all, or of a segment where programs of a head add up what lies side by
    side, which then takes no more room than the sums do, but for short ones."""
    if language == "c" or packed or all(map(walk.alone, walk.inputs.values())):
        return length
    chunks = -(-max(_SEGMENT, -(-length // walk.parts)) // walk.chunk)
    return min(length, chunks * walk.chunk)


_SEGMENT = 512  # tokens, at least


def beyond(forward: Walk, back: Walk, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> int:
    """Bytes that sequences (batch, length, heads) of equal lengths, of inputs of these dtypes, take on a GPU for their
    way back beyond inputs, outputs, gradients and states: what is kept, rooms, and what programs of a head add up."""
    batch, length, heads = shape
    kept = sum(map(math.prod, _saved(forward, shape, batch, packed=False)))
    rooms = sum(_rooms(back, batch * heads, "triton"))
    window = _window(back, length, "triton", packed=False)
    each = zip(back.inputs.values(), dtypes, strict=True)
    added = sum(back.size(e) * dtype.itemsize for e, dtype in each if not back.alone(e))
    return 4 * (kept + rooms) + back.parts * batch * window * heads * added


def _tail(walk: Walk, extent: Extent) -> tuple[int, ...]:
    return tuple(n for n, there in zip(walk.widths, extent, strict=True) if there)


def _forward(
    language: Language,
    walk: Walk,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    phase: int,
    offsets: Tensor | None,
    keep: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    like = inputs[0]
    batch, length, heads = like.shape[:3]
    units = states[0].shape[0]
    out = like.new_empty(batch, length, heads, walk.widths[0])
    last = [torch.empty_like(x) for x in states]
    saved: list[Tensor] = []
    if keep:
        shapes = _saved(walk, like.shape[:3], units, offsets is not None)
        saved = [like.new_empty(shape, dtype=states[0].dtype) for shape in shapes]
    room = saved or [like] * (len(walk.read) + len(walk.kept))
    given = [*inputs, *states, out, *last, *room, *_ends(walk, inputs, phase, offsets)]
    constants = {"KEEP": keep, "PACKED": offsets is not None}
    _launch(walk, "forward", language, like, states[0].dtype, units, given, constants)
    return out, last, saved


def _backward(
    language: Language,
    walk: Walk,
    inputs: Sequence[Tensor],
    kept: Sequence[Tensor],
    units: int,
    phase: int,
    offsets: Tensor | None,
    grads: Sequence[Tensor],
    wide: torch.dtype,
) -> list[Tensor]:
    like = inputs[0]
    batch, length, heads = like.shape[:3]
    rooms = [like.new_empty(n, dtype=wide) for n in _rooms(walk, units * heads, language)]
    alone = [walk.alone(e) for e in walk.inputs.values()]
    whole = [x.new_empty(x.shape) for x in inputs]
    # what programs of one head add up lies side by side, of one segment at a time
    window = _window(walk, length, language, offsets is not None)
    beside = [
        x if one else x.new_empty(walk.parts, batch, window, *x.shape[2:]) for x, one in zip(whole, alone, strict=True)
    ]
    pull, last = grads[0].contiguous(), dict(zip(walk.states, grads[1:], strict=True))
    ends = _ends(walk, inputs, phase, offsets, window)
    carried = [last[n].contiguous() for n in walk.moving]
    for begin in reversed(range(0, max(length, 1), max(window, 1))):
        firsts = [
            like.new_empty((*(() if walk.alone(e) else (walk.parts,)), units, heads, *_tail(walk, e)), dtype=wide)
            for e in walk.moving.values()
        ]
        low = begin // walk.chunk
        within = [] if language == "c" else [low, low - (-window // walk.chunk), window]
        given = [*inputs, *kept, *rooms, pull, *carried, *beside, *firsts, *ends, *within]
        _launch(walk, "backward", language, like, wide, units, given, {"PACKED": offsets is not None})
        carried = [x if walk.alone(e) else x.sum(0) for x, e in zip(firsts, walk.moving.values(), strict=True)]
        for x, parts, one in zip(whole, beside, alone, strict=True):
            if not one:
                own = x[:, begin : begin + window]
                torch.sum(parts[:, :, : own.shape[1]], 0, out=own)
    return [*whole, *carried]


@cache
def source_of(walk: Walk, gluon: bool) -> str:
    """The text of a walk's kernels, written once."""
    return source(walk, gluon)


__all__ = ["GRAD", "OUT", "Walk", "source_of", "tokens"]
