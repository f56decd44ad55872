"""Levels by kernels. Where nothing is erased, all of them at once (`axes.kernels.levels`). Elsewhere by the kernel of
their chain: one run of it for every doubling of the stretches, half of the tokens each.

The state of a stretch of 2^j chunks, empty before it, goes through the stretch beside it as through a chain that writes
nothing: what queries read on the way is level j's share of their outputs, and what is left, with the state of the
stretch beside it, is the state of both together. So log2(N) runs of half as many tokens compute all levels that are
longer than a chunk, forward and backward; those inside of a chunk are a table of weights over its matrix from values to
outputs, by a kernel where tokens erase along their keys, else in torch (`levels.inside`). Legend: B batch, T tokens,
H heads, C tokens of a chunk, N chunks, P pairs of stretches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from axes.core.derived import erases_along_key, of_levels
from axes.core.facts import fact
from axes.core.legality import gates
from axes.core.memory import Fenwick
from axes.core.rates import Per, Signal, resolve
from axes.core.state_update import State, StateUpdate
from axes.routes import levels
from axes.routes.kernel_terms import Kernels, erases, every_head, family
from axes.routes.kernel_terms import run as by_kernel

Compute = Callable[[StateUpdate, Signal, State | None], tuple[Tensor, State]]
CHUNK = 64
WIDEST, _LEAST = 128, 64  # of keys and values, and of tokens that levels tell apart, for a kernel of all levels
_Places = tuple[tuple[int, int, int | None], ...]  # a level, the tokens of a stretch, and which: None, every second


@fact
def chain_of(update: StateUpdate) -> StateUpdate:
    """What the kernels compute: it does not know of levels."""
    return of_levels(update)


def run(update: StateUpdate, signal: Signal, compute: Compute, whole: bool = False) -> tuple[Tensor, State]:
    """Outputs (B, T, H, d_v) and the last state, of sequences that begin. compute: the chain, by its kernel; whole:
    levels have a kernel of their own, where `no_whole` has nothing against it."""
    memory, plain = update.parts().memory, chain_of(update)
    assert isinstance(memory, Fenwick) and isinstance(memory.weights, Per)
    v = signal["v"]
    assert isinstance(v, Tensor)
    length, (size, low, top) = v.shape[1], _sizes(memory, v.shape[1])
    last = (length - 1) // size
    weights = resolve(memory.weights, signal) if memory.weights.name in signal else 1.0
    wide = torch.promote_types(v.dtype, torch.float32)
    w = (v.new_ones((), dtype=wide) * weights).expand(*v.shape[:3], memory.levels)
    own = {n: x for n, x in signal.items() if n != memory.weights.name}
    shapes = {n: tuple(x.shape) for n, x in own.items() if isinstance(x, Tensor)}
    if whole and no_whole(update, shapes) is None:
        return _whole(plain, memory, own, w)
    if whole and no_inside(update, shapes) is None:
        size = min(_chunk_length(v.dtype), memory.period)
        low, last = size.bit_length(), (length - 1) // size
        inside = _inside(plain, own, w).transpose(1, 2)
        tail = {n: x[:, last * size :] if isinstance(x, Tensor) and x.ndim > 2 else x for n, x in own.items()}
        w_tail = w[:, last * size :]
        _, ends = levels.inside(update, _moved(every_head(update, tail), wide), w_tail.transpose(1, 2), size)
    else:
        inside, ends = levels.inside(update, _moved(every_head(update, own), wide), w.transpose(1, 2), size)

    def cut(x: Tensor | float, stretch: int, every: slice | int) -> Tensor | float:
        """Of stretches side by side some, as sequences; tokens behind the last do nothing."""
        if not isinstance(x, Tensor) or x.ndim < 3:
            return x
        x = x.expand(v.shape[0], length, *x.shape[2:])
        if isinstance(every, int):
            return _padded(x, (every + 1) * stretch)[:, every * stretch : (every + 1) * stretch]
        each = stretch * (every.step or 1)
        x = _padded(x, -(-length // each) * each)
        return x.unflatten(1, (-1, stretch))[:, every].flatten(0, 1)

    def through(stretch: int, every: slice | int, start: Tensor) -> tuple[Tensor, Tensor]:
        """What is read of states on their way through stretches, and what is left of them."""
        signals = {n: cut(x, stretch, every) for n, x in own.items()}
        values = signals["v"]
        assert isinstance(values, Tensor)
        signals["v"] = torch.zeros_like(values)
        out, after = compute(plain, signals, State((start,), (), (), (), (), _none(start)))
        return out, after.theta[0]

    chunks = {n: cut(x, size, slice(None)) for n, x in own.items()}
    states = compute(plain, chunks, None)[1].theta[0].unflatten(0, (v.shape[0], last + 1))
    found = dict(enumerate(ends[:, :, :low].unbind(2)))
    places: list[tuple[int, int, int | None]] = []
    shares: list[Tensor] = []
    for level in range(low, top):
        if states.shape[1] == 1:
            break
        stretch, height = size << (level - low), level - low
        even = states[:, 0::2]
        out, left = through(stretch, slice(1, None, 2), even.flatten(0, 1))
        left = left.unflatten(0, even.shape[:2])
        places.append((level, stretch, None))
        shares.append(out)
        if last >> height & 1:
            found[level] = left[:, -1]
        odd = states[:, 1::2]
        if odd.shape[1] < left.shape[1]:  # nothing follows the last one
            odd = torch.cat((odd, torch.zeros_like(even[:, -1:])), 1)
        states = left + odd
    stretch, before = size << (top - low), states[:, 0]
    for m in range(1, states.shape[1]):  # beyond what levels tell apart
        out, left = through(stretch, m, before)
        places.append((top, stretch, m))
        shares.append(out)
        found[top], before = left, left + states[:, m]
    total = _Weighed.apply(inside, w, tuple(places), *shares)
    none = torch.zeros_like(ends[:, :, 0])
    theta = torch.stack([found.get(i, none) for i in range(memory.levels)], 2)
    number = memory.place(theta.new_full((*theta.shape[:2], 1, 1), length))
    return total.to(v.dtype), State((theta, number), (), (), (), (), _none(theta) + length)


def no_whole(update: StateUpdate, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why no kernel computes all levels at once, and runs of the chain's kernel do; or None."""
    plain, memory = chain_of(update), update.parts().memory
    assert isinstance(memory, Fenwick)
    if family(plain) != "scalar" or erases(plain):
        return "what is written changes what was"
    if gates(plain.parts().monoid) - {"identity", "scalar"}:
        return "queries and keys turn"
    if max((shapes.get(n, (1,))[-1] for n in "kv"), default=1) > WIDEST:
        return f"widths are up to {WIDEST}"
    length = shapes["v"][1] if len(shapes.get("v", ())) == 4 else 1
    if max(_LEAST, length) > 2 * memory.period:
        return "tokens are more than the levels tell apart"
    return None


def no_inside(update: StateUpdate, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why levels inside of a chunk are not those of the kernel of chains that erase; or None."""
    plain, memory = chain_of(update), update.parts().memory
    assert isinstance(memory, Fenwick)
    if family(plain) != "scalar" or not erases_along_key(plain):
        return "nothing is erased along the key"
    if gates(plain.parts().monoid) - {"identity", "scalar", "low rank"}:
        return "queries and keys turn"
    if max((shapes.get(n, (1,))[-1] for n in "kv"), default=1) > WIDEST:
        return f"widths are up to {WIDEST}"
    return None if memory.period >= _LEAST else "levels tell fewer tokens apart than a chunk has"


def _chunk_length(dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float32 else 64


def _inside(plain: StateUpdate, signal: Signal, w: Tensor) -> Tensor:
    """What tokens read of their own chunk, (B, T, H, d_v), of chunks as long as the kernel's."""
    found: list[Tensor] = []

    def scalar(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, a: Tensor, **options: object
    ) -> tuple[Tensor, Tensor]:
        from axes.kernels.levels.inside import levels_inside

        found.append(levels_inside(q, k, a, v, g, w))
        return v, v.new_empty(0)

    by_kernel(plain, signal, None, None, Kernels(scalar, scalar, scalar, scalar))
    return found[0]


def _whole(plain: StateUpdate, memory: Fenwick, signal: Signal, w: Tensor) -> tuple[Tensor, State]:
    """Levels by their own kernel, given what the chain's would be."""

    def scalar(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, *_: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        from axes.kernels.levels.chain import levels_chain

        return levels_chain(q, k, v, beta, g, w)

    out, state = by_kernel(plain, signal, None, None, Kernels(scalar, scalar, scalar, scalar))
    (theta,) = state.theta
    number = memory.place(theta.new_full((*theta.shape[:2], 1, 1), out.shape[1]))
    return out, State((theta, number), (), (), (), (), _none(theta) + out.shape[1])


def _sizes(memory: Fenwick, length: int) -> tuple[int, int, int]:
    """Tokens of a chunk, the first level that is longer, the highest level."""
    size = min(CHUNK, memory.period)
    return size, size.bit_length(), memory.levels - 1


def _none(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=like.device)


def _moved(signal: Signal, dtype: torch.dtype) -> dict[str, Tensor | float]:
    """Heads before time, in this dtype."""
    wide = {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in signal.items()}
    return {n: x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim > 2 else x for n, x in wide.items()}


class _Weighed(torch.autograd.Function):
    """inside (B, H, T, V) and each level's share where it stands, by its weight (B, T, H, levels)."""

    @staticmethod
    def forward(ctx: Any, inside: Tensor, w: Tensor, places: _Places, *shares: Tensor) -> Tensor:
        length, room = w.shape[1], _room(places, w.shape[1])
        out, padded = _padded(inside.transpose(1, 2), room).contiguous(), _padded(w, room)
        for (level, stretch, number), share in zip(places, shares, strict=True):
            mine = _standing(out, length, stretch, number)
            weight = _standing(padded, length, stretch, number)[..., level, None]
            mine.addcmul_(weight, share.view(mine.shape).to(out.dtype))
        ctx.places = places
        ctx.save_for_backward(w, *shares)
        return out[:, :length]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        w, *shares = ctx.saved_tensors
        length, dshares = w.shape[1], []
        room = _room(ctx.places, length)
        whole, padded = _padded(dout, room), _padded(w, room)
        dw = torch.zeros_like(padded, memory_format=torch.contiguous_format)
        for (level, stretch, number), share in zip(ctx.places, shares, strict=True):
            d = _standing(whole, length, stretch, number)
            _standing(dw, length, stretch, number)[..., level].add_((d * share.view(d.shape)).sum(-1))
            weight = _standing(padded, length, stretch, number)[..., level, None]
            dshares.append((d * weight).to(share.dtype).view(share.shape))
        return dout.transpose(1, 2), dw[:, :length], None, *dshares


def _room(places: _Places, length: int) -> int:
    """As many tokens as the stretches take that stand somewhere."""
    ends = (-(-length // (2 * n)) * 2 * n if m is None else (m + 1) * n for _, n, m in places)
    return max(ends, default=length)


def _standing(x: Tensor, length: int, stretch: int, number: int | None) -> Tensor:
    """(B, P, stretch, ...), of a view: every second stretch of those that tokens reach, or one."""
    if number is not None:
        return x[:, None, number * stretch : (number + 1) * stretch]
    whole = -(-length // (2 * stretch)) * 2 * stretch
    return x[:, :whole].unflatten(1, (-1, 2, stretch))[:, :, 1]


def _padded(x: Tensor, length: int) -> Tensor:
    """Tokens behind the last that do nothing; more than there are wanted stay."""
    more = length - x.shape[1]
    if more <= 0:
        return x
    return torch.cat((x, x.new_zeros(()).expand(x.shape[0], more, *x.shape[2:])), 1)


__all__ = ["CHUNK", "chain_of", "no_whole", "run"]
