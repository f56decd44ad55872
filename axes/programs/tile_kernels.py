"""A sequence of tokens by the two kernels that a step's program makes: launches, what lies between them, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.programs.fused import compile_text
from axes.programs.tile_text import OUT, Walk, source
from axes.programs.tiles import GRAD, Extent


@cache
def _kernel(text: str, name: str) -> Kernel:
    # two kernels of one text: each is compiled from it by its own name
    return Kernel(compile_text(f"# {name}\n{text}", name))


def tokens(
    walk: Walk,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    phase: int = 0,
    offsets: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """What is read at every token (B, T, H, rows), and the last states.

    inputs (B, T, H, ...) in the order of the walk's, any strides but the last; states (units, H, ...), float32, each in
    its own full shape. phase: tokens since held values were renewed. offsets: of sequences packed in one batch entry.
    The first input says the dtype of what is read.
    """
    record = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *states))
    if not record:
        out, last, _ = _forward(walk, inputs, states, phase, offsets, False)
        return out, last
    out, *last = _Tokens.apply(walk, phase, offsets, *inputs, *states)
    return out, list(last)


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, phase: int, offsets: Tensor | None, *tensors: Tensor) -> Any:
        inputs, states = tensors[: len(walk.inputs)], tensors[len(walk.inputs) :]
        out, last, saved = _forward(walk, inputs, states, phase, offsets, True)
        ctx.walk, ctx.phase = walk, phase
        ctx.save_for_backward(*inputs, *saved, *([] if offsets is None else [offsets]))
        ctx.units, ctx.shapes = states[0].shape[0], [x.shape for x in states]
        return out, *last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        walk, saved = ctx.walk, ctx.saved_tensors
        count = len(walk.inputs)
        inputs, rest = saved[:count], saved[count:]
        kept = rest[: len(walk.read) + len(walk.kept)]
        offsets = rest[len(kept)] if len(rest) > len(kept) else None
        found = _backward(walk, inputs, kept, ctx.units, ctx.phase, offsets, grads)
        first = dict(zip(walk.moving, found[count:], strict=True))
        each = zip(walk.states, ctx.shapes, strict=True)
        return None, None, None, *found[:count], *(first[n].reshape(s) if n in first else None for n, s in each)


def _strides(walk: Walk, inputs: Sequence[Tensor]) -> list[int]:
    for x, (name, extent) in zip(inputs, walk.inputs.items(), strict=True):
        inner = x.stride()[3:]
        if inner != ((walk.widths[1], 1)[-sum(extent) :] if any(extent) else ()):
            raise AxesError(f"tokens: the last dimensions of {name} are contiguous, not of strides {inner}")
    return [n for x in inputs for n in x.stride()[:3]]


def _ends(walk: Walk, inputs: Sequence[Tensor], phase: int, offsets: Tensor | None) -> list[Any]:
    like = inputs[0]
    batch, length, heads = like.shape[:3]
    place = like if offsets is None else offsets
    return [place, length, batch * length * heads, heads, phase, *_strides(walk, inputs)]


def _slots(walk: Walk, like: Tensor, units: int, packed: bool) -> int:
    batch, length = like.shape[:2]
    return length // walk.chunk + units if packed else batch * (-(-length // walk.chunk))


def _tail(walk: Walk, extent: Extent) -> tuple[int, ...]:
    return tuple(n for n, there in zip(walk.widths, extent, strict=True) if there)


def _forward(
    walk: Walk, inputs: Sequence[Tensor], states: Sequence[Tensor], phase: int, offsets: Tensor | None, keep: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    like = inputs[0]
    batch, length, heads = like.shape[:3]
    units = states[0].shape[0]
    out = like.new_empty(batch, length, heads, walk.widths[0])
    last = [torch.empty_like(x) for x in states]
    saved: list[Tensor] = []
    if keep:
        slots = _slots(walk, like, units, offsets is not None)
        wide = torch.float32
        saved = [like.new_empty(slots, heads, walk.size(e), dtype=wide) for e in walk.read.values()]
        extents = [walk.step.operations[i].extent for i in walk.kept]
        saved += [like.new_empty(batch * length * heads, walk.size(e), dtype=wide) for e in extents]
    room = saved or [like] * (len(walk.read) + len(walk.kept))
    kernel = _kernel(source_of(walk), "forward")
    with layout.on_device(like):
        kernel[(units * heads, walk.parts)](
            *inputs, *states, out, *last, *room, *_ends(walk, inputs, phase, offsets), KEEP=keep,
            PACKED=offsets is not None, num_warps=walk.warps,
        )  # fmt: skip
    return out, last, saved


def _backward(
    walk: Walk,
    inputs: Sequence[Tensor],
    kept: Sequence[Tensor],
    units: int,
    phase: int,
    offsets: Tensor | None,
    grads: Sequence[Tensor],
) -> list[Tensor]:
    like = inputs[0]
    heads = like.shape[2]
    wide = torch.float32
    total = like.shape[0] * like.shape[1] * heads
    programs = units * heads * walk.parts
    rooms = [
        like.new_empty(programs * walk.chunk * (walk.rows if e[0] else 1) * (walk.keys if e[1] else 1), dtype=wide)
        for e in walk.read.values()
    ]
    alone = [walk.alone(e) for e in (*walk.inputs.values(), *walk.moving.values())]
    made = [
        x.new_empty(x.shape) if one else x.new_empty(walk.parts, *x.shape, dtype=wide)
        for x, one in zip(inputs, alone, strict=False)
    ]
    tails = [(units, heads, *_tail(walk, e)) for e in walk.moving.values()]
    first = [
        like.new_empty(tail if one else (walk.parts, *tail), dtype=wide)
        for tail, one in zip(tails, alone[len(made) :], strict=True)
    ]
    last = dict(zip(walk.states, grads[1:], strict=True))
    whole = [g.contiguous() for g in (grads[0], *(last[n] for n in walk.moving))]
    kernel = _kernel(source_of(walk), "backward")
    assert total == like.shape[:3].numel()
    with layout.on_device(like):
        kernel[(units * heads, walk.parts)](
            *inputs, *kept, *rooms, *whole, *made, *first, *_ends(walk, inputs, phase, offsets),
            PACKED=offsets is not None, num_warps=walk.warps,
        )  # fmt: skip
    found = [*made, *first]
    added = [x if one else x.sum(0) for x, one in zip(found, alone, strict=True)]
    return [g.to(x.dtype) for g, x in zip(added, (*inputs, *first), strict=True)]


@cache
def source_of(walk: Walk) -> str:
    """The text of a walk's kernels, written once."""
    return source(walk)


__all__ = ["GRAD", "OUT", "Walk", "source_of", "tokens"]
