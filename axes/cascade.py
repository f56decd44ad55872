"""The cascade: stage by stage inside a chunk, exact for every lazy update without feedback inside it.

With an anchored gradient (or a cost linear in the state) no buffer reads the state, so all drives of a chunk come
first, then each filter as one scan, its geometry point by point, then the state as one scan, its geometry, the reads.
It interprets the same tuple as `reference`, stage-major instead of time-major.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from axes.algorithms import Anchor, Sum
from axes.geometry import Context
from axes.memory import Leaves
from axes.rates import rate_shape, resolve
from axes.scan import cumulative
from axes.state_update import Output, State, StateUpdate

Tokens = Mapping[str, Tensor | float]
_CHUNK = 16


def run(update: StateUpdate, signal: Tokens, state: State, q: Tensor, batch: int) -> tuple[Tensor, State]:
    """Outputs (..., T, d_v) and the final state. signal: `batch` batch dimensions, then T, then features."""
    _, _, _, step, _ = update.parts()
    length, outputs, t = q.shape[batch], [], 0
    while t < length:
        size = _CHUNK
        if isinstance(step.at, Anchor):  # a chunk ends where the anchor is refreshed
            size = step.at.every - int(state.count) % step.at.every
        size = min(size, length - t)
        part = {n: _narrow(x, batch, t, size) for n, x in signal.items()}
        out, state = _chunk(update, part, state, size)
        outputs.append(update.read(out, _narrow(q, batch, t, size), part))  # type: ignore[arg-type]
        t += size
    return torch.cat(outputs, batch), state


def _narrow(x: Tensor | float, dim: int, start: int, size: int) -> Tensor | float:
    return x.narrow(dim, start, size) if isinstance(x, Tensor) and x.ndim > dim else x


def _chunk(update: StateUpdate, signal: Tokens, state: State, size: int) -> tuple[Output, State]:
    """All data of one chunk; leaves of the output have time before their matrix dimensions."""
    _, _, _, step, _ = update.parts()
    if isinstance(step.at, Anchor) and int(state.count) % step.at.every == 0:
        state = state._replace(anchor=update.output(state, signal).weights)
    timeless = state._replace(theta=_with_time(state.theta), anchor=_with_time(state.anchor))
    rate = resolve(step.rate, signal)
    u = update._drive(timeless, timeless.theta, timeless.anchor, rate, signal, None, 0)
    via: list[State | tuple[State, ...]] = []
    for f, s in zip(step.via, state.via, strict=True):
        if isinstance(f, Sum):
            assert not isinstance(s, State)
            pairs = [_stage(b, t, signal, u, size) for b, t in zip(f.branches, s, strict=True)]
            via.append(tuple(t for _, t in pairs))
            mixed = [tuple(w * x for x in out.weights) for w, (out, _) in zip(f.weights, pairs, strict=True)]
            u = tuple(sum(xs[1:], xs[0]) for xs in zip(*mixed, strict=True))
        else:
            assert isinstance(f, StateUpdate) and isinstance(s, State)
            out, s = _stage(f, s, signal, u, size)
            via.append(s)
            u = out.weights
    out, new = _stage(update, state, signal, u, size)
    return out, new._replace(via=tuple(via))


def _stage(update: StateUpdate, state: State, signal: Tokens, u: Leaves, size: int) -> tuple[Output, State]:
    """One linear recurrence over the chunk (after its statistics), and its geometry point by point."""
    _, h, monoid, step, memory = update.parts()
    rate = resolve(step.rate, signal)
    stats, seen = [], []
    for s, t in zip(h.stats, state.stats, strict=True):
        out, t = _stage(s, t, signal, tuple(s.cost.drive(x, signal) for x in u), size)
        stats.append(t)
        seen.append(out.weights)
    # element-wise gates act on ones: what is left is the gate of each leaf
    ones = tuple(torch.ones((1, 1), dtype=x.dtype, device=x.device) for x in u)
    gates = memory.act(monoid.element(signal, rate, u[0]), ones)
    entering = memory.add(tuple(torch.zeros_like(x) for x in u), rate, rate_shape(step.rate), u)
    theta = tuple(_over_time(g, e, s, size) for g, e, s in zip(gates, entering, state.theta, strict=True))
    norm: Leaves = ()
    if step.debias:
        unit = memory.add(ones, rate, rate_shape(step.rate), tuple(torch.zeros_like(o) for o in ones))
        unit = tuple(x - o for x, o in zip(memory.add(ones, rate, rate_shape(step.rate), ones), unit, strict=True))
        norm = tuple(_over_time(g, e, s, size) for g, e, s in zip(gates, unit, state.norm, strict=True))
    context = tuple(
        Context(x, tuple(s[i] for s in seen), _previous(theta[i], state.theta[i]), signal) for i, x in enumerate(u)
    )
    point, scale = theta, norm
    if step.read is not None:
        g, r = step.read.gate, step.read.rate
        point = tuple(g * _previous(x, s) + r * d for x, s, d in zip(theta, state.theta, u, strict=True))
        scale = tuple(g * _previous(n, s) + r for n, s in zip(norm, state.norm, strict=True))
    out = update._output(point, scale, context)
    last = State(
        tuple(x[..., -1, :, :] for x in theta),
        state.via,
        tuple(stats),
        tuple(n[..., -1, :, :] for n in norm),
        state.anchor,
        state.count + size,
    )
    return out, last


def _with_time(leaves: Leaves) -> Leaves:
    return tuple(x[..., None, :, :] for x in leaves)


def _over_time(gate: Tensor, entering: Tensor, start: Tensor, size: int) -> Tensor:
    """Scan a leaf over the chunk; constants are the same at every token."""
    gate, entering = (x if x.ndim > 2 else x.expand(size, *x.shape) for x in (gate, entering))
    return cumulative(gate, entering, start)


def _previous(theta: Tensor, start: Tensor) -> Tensor:
    """theta_{t-1} for every token of the chunk."""
    first = start[..., None, :, :].expand(*theta.shape[:-3], 1, *theta.shape[-2:])
    return torch.cat((first, theta[..., :-1, :, :]), -3)
