"""A chain whose stretches are weighed by what reads them (log-linear attention), in chunks: O(T log T).

    o_t = sum_s w_t[bitlength(t xor s)] v_s k_s^T A_s+1 .. A_t q_t

Inside a chunk of C tokens that begins at a multiple of C, the level of a pair is a table, which the matrix from values
to outputs is weighed with. Between chunks a level is a stretch of whole chunks: as few states as the number of a chunk
has bits go from chunk to chunk, joined where stretches are. A state in the middle of a chunk has levels inside of it,
which this chunk takes up and the last one leaves. Legend: F batch entries, N chunks of C tokens, L levels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from axes.core.chain import Chain, chain
from axes.core.derived import of_levels
from axes.core.memory import Fenwick
from axes.core.monoids import rotate
from axes.core.rates import Signal, resolve
from axes.core.state_update import State, StateUpdate
from axes.linalg.formulas import numberless, read
from axes.routes import one_state, scan

_CHUNK, _CHUNK_CHANNELS = 64, 32


def run(update: StateUpdate, signal: Signal, state: State, batch: int) -> tuple[Tensor, State]:
    """Outputs (..., T, d_v) and the last state. signal: `batch` batch dimensions, then T, then features."""
    memory = update.parts().memory
    assert isinstance(memory, Fenwick)
    q, k = signal["q"], signal["k"]
    assert isinstance(q, Tensor) and isinstance(k, Tensor)
    levels, number = state.theta[0], memory.place(state.theta[1])
    c, turned = chain(of_levels(update), signal), None
    if c.angle is not None:
        c, q, turned = scan.in_rotating_frame(c, q)
    weights = _weights(memory, signal, k)
    begins = [0] if numberless(number) or not number.numel() else sorted({int(n) for n in read(number)})
    out, after = _from(memory, c, q, weights, levels, begins[0])
    for begin in begins[1:]:  # states of sequences of unequal length: each position alone
        more, other = _from(memory, c, q, weights, levels, begin)
        here = number == begin
        out, after = torch.where(here, more, out), torch.where(here[..., None], other, after)
    if turned is not None:
        after = rotate(after, turned[..., None, None, :])
    count = q.shape[-2]
    number = memory.place(number + count).expand(*after.shape[:-3], 1, 1)
    return out, state.but(theta=(after, number), count=state.count + count)


def _weights(memory: Fenwick, signal: Signal, k: Tensor) -> Tensor:
    """(..., T, L)."""
    (per,) = memory.rates()
    given = resolve(per, signal) if per.name in signal else 1.0  # type: ignore[union-attr]
    return (k.new_ones(()) * given).expand(*k.shape[:-1], memory.levels)


class _Chunks(NamedTuple):
    """What is known of every chunk before any state: of F batch entries.

    inside (F, N, C, C): from values to outputs, weights left out.  asked (F, N, C, d_k): what a query reads of the
    chunk's first state.  value (F, N, C, d_v), ends (F, N, C, d_k): an outer product of a token's is what the chunk's
    last state has of it.  kept (F, N, 1, 1|d_k), read (F, N, C, d_k): S -> S diag(kept) - (S read^T) ends.
    """

    inside: Tensor
    asked: Tensor
    value: Tensor
    ends: Tensor
    kept: Tensor
    read: Tensor | None


def _from(memory: Fenwick, c: Chain, q: Tensor, weights: Tensor, levels: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    """Outputs and levels after tokens of which the first has this number, modulo the memory's period."""
    gated, length = c.gate is not None and c.gate.shape[-1] > 1, q.shape[-2]
    size = min(_CHUNK_CHANNELS if gated else _CHUNK, memory.period)
    size = min(size, 1 << max(0, begin % size + length - 1).bit_length())  # one chunk of few tokens
    front = begin % size
    batch, chunks, w, out = _cut(c, q, weights, front, size, levels.shape[:-3])
    held = {i: x for i, x in enumerate(levels.expand(*batch, *levels.shape[-3:]).flatten(0, -4).unbind(1))}
    between, held = _between(memory, chunks, w, held, begin, length, size)
    out = (out + between).flatten(1, 2)[:, front : front + length]
    return out.reshape(*batch, length, levels.shape[-2]), _stacked(held, memory.levels, batch)


def inside(update: StateUpdate, signal: Signal, weights: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Of chunks that begin empty: outputs (..., T, d_v) and the levels (..., levels, d_v, d_k) that the last leaves."""
    q, memory = signal["q"], update.parts().memory
    assert isinstance(q, Tensor) and isinstance(memory, Fenwick)
    c, turned = chain(of_levels(update), signal), None
    if c.angle is not None:
        c, q, turned = scan.in_rotating_frame(c, q)
    batch, chunks, w, out = _cut(c, q, weights, 0, size)
    length = q.shape[-2]
    after = _stacked(_left(chunks, (length - 1) % size, {}), memory.levels, batch)
    if turned is not None:
        after = rotate(after, turned[..., None, None, :])
    return out.flatten(1, 2)[:, :length].reshape(*batch, length, -1), after


def _cut(
    c: Chain, q: Tensor, weights: Tensor, front: int, size: int, beside: torch.Size = torch.Size()
) -> tuple[torch.Size, _Chunks, Tensor, Tensor]:
    """Batch dimensions, chunks, weights (F, N, C, L) and what tokens read of their own chunk (F, N, C, d_v)."""
    length, value, key = q.shape[-2], c.value, c.key.squeeze(-2)
    read = None if c.a is None else c.a.squeeze(-2).squeeze(-2)
    gate = None if c.gate is None else c.gate.clamp_min(one_state.floor(c.gate.dtype))
    given = [x for x in (q, key, value, read, gate) if x is not None]
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in given), beside)
    count = -(-(front + length) // size)

    def cut(x: Tensor) -> Tensor:
        """(F, N, C, n), with tokens around them that do nothing."""
        x = x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
        x = torch.nn.functional.pad(x, (0, 0, front, count * size - length - front))
        return x.unflatten(-2, (count, size))

    around = [None if x is None else cut(x) for x in (read, gate)]
    chunks, w = _chunks(cut(q), cut(key), cut(value), *around), cut(weights)
    table = _table(size, q.device).expand(*w.shape[:-2], size, size)
    return batch, chunks, w, (chunks.inside * w.gather(-1, table)) @ chunks.value


def _stacked(held: dict[int, Tensor], levels: int, batch: torch.Size) -> Tensor:
    some = next(iter(held.values()))
    none = torch.zeros_like(some)
    after = torch.stack([held.get(i, none) for i in range(levels)], 1)
    return after.reshape(*batch, *after.shape[1:])


def _chunks(q: Tensor, key: Tensor, value: Tensor, read: Tensor | None, gate: Tensor | None) -> _Chunks:
    decay = one_state.decays(gate, q)
    inside, asked, ends = decay.scores(q, key), q * decay.kept, key * decay.left
    kept = decay.kept[..., -1:, :].expand(*q.shape[:2], 1, -1)
    if read is None:
        return _Chunks(inside, asked, value, ends, kept, None)
    system = decay.scores(read, key, before=True)  # ones on its diagonal are understood
    if gate is not None:
        one = torch.ones_like(decay.kept[..., :1, :])
        read = read * torch.cat((one, decay.kept[..., :-1, :]), -2)
    both = torch.cat((inside, ends.mT), -2)  # what is written is a solution: these are of what is to be written
    inside, ends = torch.linalg.solve_triangular(system, both, upper=False, left=False, unitriangular=True).split(
        (inside.shape[-2], ends.shape[-1]), -2
    )
    return _Chunks(inside, asked - inside @ read, value, ends.mT, kept, read)


def _table(size: int, device: torch.device) -> Tensor:
    """The level of token s for token t, both of one chunk (C, C)."""
    order = torch.arange(size, device=device)
    apart = order[:, None] ^ order
    return sum(((apart >> i) > 0).long() for i in range(size.bit_length()))  # type: ignore[return-value]


def _between(
    memory: Fenwick, chunks: _Chunks, w: Tensor, held: dict[int, Tensor], begin: int, length: int, size: int
) -> tuple[Tensor, dict[int, Tensor]]:
    """What earlier states add to the outputs, and the levels after the last token. held: level by level."""
    low, front, top = size.bit_length(), begin % size, memory.levels - 1  # levels below `low` are inside of a chunk
    first, last = begin // size, (front + length - 1) % size
    count = chunks.value.shape[1]
    fine: dict[int, Tensor] = {}  # by the token of the first chunk that stands for them
    if front:
        fine = {s: held.pop(i) for i in range(low) if (s := _stands(front - 1, i)) is not None}
        held = _there(held, first, low, top)
    else:
        held = _joined(held, first, low, top)
    outputs = []
    for n in range(count):
        found = [(w[:, n, :, i, None], x) for i, x in held.items()]
        if n == 0 and fine:
            tokens = torch.arange(size, device=w.device)
            levels = {s: _bits(tokens ^ s, low) for s in fine}
            found += [(w[:, 0].gather(-1, levels[s].expand(w.shape[0], -1)[..., None]), x) for s, x in fine.items()]
        asked = chunks.asked[:, n]
        if found:
            weighed, states = ([weight * asked for weight, _ in found], [x for _, x in found])
            outputs.append(torch.cat(weighed, -1) @ torch.cat(states, -1).mT)
        else:
            outputs.append(torch.zeros_like(chunks.value[:, n]))
        held = {i: _through(chunks, n, x) for i, x in held.items()}
        whole = n + 1 < count
        if whole:
            entering = chunks.value[:, n].mT @ chunks.ends[:, n]
            for x in fine.values():
                entering = entering + _through(chunks, n, x)
            held[0], fine = entering, {}
            held = _joined(held, first + n + 1, low, top)
    for s, x in fine.items():
        level = (last ^ s).bit_length()
        held[level] = held.get(level, 0.0) + _through(chunks, count - 1, x)
    held = _left(chunks, last, held)
    return torch.stack(outputs, 1), held


def _left(chunks: _Chunks, last: int, held: dict[int, Tensor]) -> dict[int, Tensor]:
    """Beside what is held, the levels that are inside of the last chunk, whose token `last` is the last."""
    value, end = chunks.value[:, -1], chunks.ends[:, -1]
    size, held = end.shape[-2], dict(held)
    table, until = _table(size, end.device)[last], torch.arange(size, device=end.device) <= last
    for level in range(last.bit_length() + 1):
        if level == 0 or last >> (level - 1) & 1:
            mine = ((table == level) & until).to(end.dtype)
            held[level] = held.get(level, 0.0) + (value * mine[:, None]).mT @ end
    return held


def _stands(token: int, level: int) -> int | None:
    """A token of a level, of those inside of a chunk after this one; None if it is empty."""
    if level == 0:
        return token
    return token >> level << level if token >> (level - 1) & 1 else None


def _bits(x: Tensor, most: int) -> Tensor:
    return sum(((x >> i) > 0).long() for i in range(most))  # type: ignore[return-value]


def _joined(held: dict[int, Tensor], chunk: int, low: int, top: int) -> dict[int, Tensor]:
    """The levels that chunk number `chunk` finds: the full ones are where the first free one is."""
    period = 1 << (top - low)
    chunk %= period
    target = top if chunk == 0 else low + (chunk & -chunk).bit_length() - 1
    moving = [x for i, x in held.items() if i < target or i == target == top]
    kept = _there({i: x for i, x in held.items() if i > target}, chunk, low, top)
    return {target: sum(moving[1:], moving[0]), **kept} if moving else kept


def _there(held: dict[int, Tensor], chunk: int, low: int, top: int) -> dict[int, Tensor]:
    """Of levels of whole chunks those that hold something during this one: its number has the bit; and the top."""
    return {i: x for i, x in held.items() if i == top or i >= low and chunk >> (i - low) & 1}


def _through(chunks: _Chunks, n: int, state: Tensor) -> Tensor:
    """A state (F, d_v, d_k) through chunk n."""
    kept = state * chunks.kept[:, n]
    if chunks.read is None:
        return kept
    return kept - (state @ chunks.read[:, n].mT) @ chunks.ends[:, n]


__all__ = ["inside", "run"]
