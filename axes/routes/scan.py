"""Scans in torch over the affine chain that a tuple derives: sequential (the oracle), associative, chunked.

A scan takes a `Chain` and never asks which instance it came from. Python loops run over chunks or log2 T levels;
only `sequential` loops over tokens. Legend: T tokens, N chunks of C tokens, p slots, m vectors of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast, final

import torch
from torch import Tensor

from axes.core.chain import Chain
from axes.core.monoids import rotate
from axes.linalg.formulas import by_autograd, followed
from axes.routes import by_rows, one_state, serial
from axes.routes.precision import own_precision_back

# exp of these is zero in its dtype; a finite floor keeps differences of cumulative logs finite
_FLOOR = {torch.float64: -800.0}
_CHUNK_SCALAR, _CHUNK_CHANNEL = 64, 16
_FEW = 32  # tokens whose states stay in cache


def sequential(c: Chain, start: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token. start (..., d_v, p, d_k), q (..., T, d_k): returns o (..., T, d_v) and the final state."""
    state, shape = start.flatten(-2), start.shape[-2:]
    maps, written, outputs = c.transition(), c.key.flatten(-2), []
    for t in range(q.shape[-2]):
        state = state @ maps[..., t, :, :] + c.value[..., t, :, None] * written[..., t, None, :]
        outputs.append((state[..., : shape[1]] @ q[..., t, :, None])[..., 0])
    return torch.stack(outputs, -2), state.unflatten(-1, shape)


def associative(c: Chain, start: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """log2 T levels over dense affine maps: any transition at all, at the price of one state per token."""
    shape, length, reach = start.shape[-2:], q.shape[-2], 1
    maps, states = c.transition(), c.value[..., :, None] * c.key.flatten(-2)[..., None, :]
    batch = torch.broadcast_shapes(maps.shape[:-2], states.shape[:-2])
    maps, states = maps.expand(*batch, *maps.shape[-2:]), states.expand(*batch, *states.shape[-2:])
    while reach < length:  # the later map after the earlier one: X -> (X A + B) A' + B'
        later = maps[..., reach:, :, :]
        merged = states[..., :-reach, :, :] @ later + states[..., reach:, :, :]
        states = torch.cat((states[..., :reach, :, :], merged), -3)
        maps = torch.cat((maps[..., :reach, :, :], maps[..., :-reach, :, :] @ later), -3)
        reach *= 2
    states = states + start.flatten(-2)[..., None, :, :] @ maps
    return (states[..., : shape[1]] @ q[..., None])[..., 0], states[..., -1, :, :].unflatten(-1, shape)


def chunked(c: Chain, start: Tensor, q: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Chunk by chunk, exactly: one triangular solve and matrix products inside a chunk.

    Phi(s, t) carries what token s wrote to after token t. What the rank-one factors read, p_t = X_{t-1} . a_t, solves
        p_t = X_0 . Phi(0, t-1) a_t + sum_{s<t} (p_s b_s + v_s k_s) . Phi(s, t-1) a_t ,
    a unit triangular system; outputs and the chunk's last state are products with p, v and X_0.
    Gates enter as differences of cumulative logs, so no exponent is positive. Dense chains go through `associative`.
    """
    if c.dense is not None:
        return associative(c, start, q)
    if c.angle is not None:
        return _in_rotating_frame(c, start, q, size)
    if one_state.takes(c):
        return one_state.chunked(c, start, q, size)
    if by_rows.takes(c):
        return by_rows.chunked(c, start, q)
    if c.a is None and c.slots == 1 and c.rows:
        return _entry_by_entry(c, start, q)
    length = q.shape[-2]
    if size is None:
        uniform = c.block is None and (c.gate is None or c.gate.shape[-1] == 1)
        size = _CHUNK_SCALAR if uniform and not c.rows else _CHUNK_CHANNEL
    size = max(1, min(size, length))

    slots, rank = c.slots, 0 if c.a is None else c.a.shape[-3]
    query = torch.stack([q] + [torch.zeros_like(q)] * (slots - 1), dim=-2)[..., None, :, :]  # (..., T, 1, p, d)
    written, readers = c.key[..., None, :, :], query
    if c.a is not None and c.b is not None:
        written, readers = _cat(c.b, written, -3), _cat(c.a, readers, -3)
    written, readers = _cut(written, size, 3), _cut(readers, size, 3)  # (..., N, C, m, p, d): b and k; a and q
    value = _cut(c.value, size, 1)[..., None, :]
    pairs, prefix = _transfer(c, size)

    eye = torch.eye(slots, dtype=q.dtype, device=q.device)[..., None]
    seen, last = readers[..., :rank, :, :], readers[..., rank:, :, :]
    carried_q = _carry(prefix, last).flatten(-3)  # (..., N, C, p d): what X_0 contributes to the output
    scores_q = _score(pairs, written, last).flatten(-4, -3).flatten(-2)  # (..., N, C, C m)
    ends = _reach_end(pairs, written).flatten(-4, -3).flatten(-2)  # (..., N, C m, p d)
    whole = prefix[..., -1, :, :, :]
    if rank:
        before = torch.cat((eye.expand_as(prefix[..., :1, :, :, :]), prefix[..., :-1, :, :, :]), -4)
        strict = torch.cat((torch.zeros_like(pairs[..., :1, :, :, :, :]), pairs[..., :-1, :, :, :, :]), -5)
        among = _score(strict, written, seen).flatten(-4, -3)  # (..., N, C r, C, m)
        system = among[..., :rank].flatten(-2)
        forced = _cat(among[..., rank] @ value[..., 0, :], _carry(before, seen).flatten(-4, -3).flatten(-2), -1)
        identity = torch.eye(system.shape[-1], dtype=q.dtype, device=q.device)
        solved = torch.linalg.solve_triangular(identity - system, forced, upper=False, unitriangular=True)
        from_values, from_start = solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]

    # Serial in time: only what a chunk reads of its first state, and the next state. Outputs follow for all at once.
    count, states, seen_states = value.shape[-4], [], []
    left = ends.unflatten(-2, (size, -1))
    entering = value[..., 0, :].mT @ left[..., rank, :]
    batch = torch.broadcast_shapes(start.shape[:-3], entering.shape[:-3], whole.shape[:-4])
    state = _flat(start.flatten(-2), batch, 2)
    wholes, drives = _chunks(whole, batch, count, 3), _chunks(entering, batch, count, 2)
    if rank:
        leaving = _chunks(left[..., :rank, :].flatten(-3, -2), batch, count, 2)
        fixed, varying = (_chunks(x, batch, count, 2) for x in (from_values, from_start))
    for n in range(count):
        states.append(state)
        after = drives[n] + _transport(state, wholes[n])
        if rank:
            seen_states.append(torch.baddbmm(fixed[n], varying[n], state.mT))
            after = torch.baddbmm(after, seen_states[-1].mT, leaving[n])
        state = after
    values = value
    if rank:
        p = _unflat(torch.stack(seen_states, -3), batch).unflatten(-2, (size, rank))
        values = _cat(p, value, -2)
    read = _unflat(torch.stack(states, -3), batch)
    out = carried_q @ read.mT + scores_q @ values.flatten(-3, -2)
    return out.flatten(-3, -2)[..., :length, :], _unflat(state, batch).unflatten(-1, start.shape[-2:])


def floored(gate: Tensor) -> Tensor:
    """Log gates with a finite zero: differences of their cumulative sums stay numbers."""
    return gate.clamp_min(_FLOOR.get(gate.dtype, -200.0))


def cumulative(gate: Tensor, drive: Tensor, start: Tensor) -> Tensor:
    """y_t = gate_t * y_{t-1} + drive_t, entry by entry, time in dimension -3; any gate."""
    length = max(gate.shape[-3], drive.shape[-3])
    gate, drive = (x.expand(*x.shape[:-3], length, *x.shape[-2:]) for x in (gate, drive))
    if followed():
        return torch.stack(_walked(gate.unbind(-3), drive.unbind(-3), start), -3)
    return cast(Tensor, _Cumulative.apply(gate, drive, start, False))


def _walked(gates: Sequence[Tensor], drives: Sequence[Tensor], y: Tensor) -> list[Tensor]:
    """Every y by torch's operations, which anybody follows."""
    made = []
    for gate, drive in zip(gates, drives, strict=True):
        y = torch.addcmul(drive, gate, y)
        made.append(y)
    return made


class _Cumulative(torch.autograd.Function):
    """One pass over memory, token by token; the adjoint is the same backwards, with derivatives of its own."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, drive: Tensor, start: Tensor, back: bool) -> Tensor:
        gates, drives, order = gate.unbind(-3), drive.unbind(-3), range(drive.shape[-3])
        first, *rest = order[::-1] if back else order
        if torch.compiler.is_compiling():  # compilers follow no result into a part of a tensor
            along = slice(None, None, -1 if back else 1)
            out = torch.stack(_walked(gates[along], drives[along], start)[along], -3)
        else:
            y = torch.addcmul(drives[first], gates[first], start)
            out = y.new_empty((*y.shape[:-2], len(drives), *y.shape[-2:]))
            found = out.unbind(-3)
            found[first].copy_(y)
            for t in rest:
                y = torch.addcmul(drives[t], gates[t], y, out=found[t])
        ctx.save_for_backward(gate, start, out)
        ctx.drive, ctx.back = drive.shape, back
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        gate, start, out = ctx.saved_tensors
        back, ends = ctx.back, (slice(1, None), slice(None, -1))
        later, earlier = ends[::-1] if back else ends
        last = torch.zeros_like(gate[..., :1, :, :])
        other = torch.cat((last, gate[..., later, :, :]) if back else (gate[..., later, :, :], last), -3)
        into = cast(Tensor, _Cumulative.apply(other, given, torch.zeros_like(out[..., 0, :, :]), not back))
        first, by_gate = -1 if back else 0, None
        if ctx.needs_input_grad[0]:
            begun = _summed((into[..., first, :, :] * start)[..., None, :, :], gate)
            rest = _summed(into[..., later, :, :] * out[..., earlier, :, :], gate)
            by_gate = torch.cat((rest, begun) if back else (begun, rest), -3)
        by_start = (into[..., first, :, :] * gate[..., first, :, :]).sum_to_size(start.shape)
        return by_gate, into.sum_to_size(ctx.drive), by_start, None


def _summed(x: Tensor, like: Tensor) -> Tensor:
    """Sums over the dimensions along which some tokens of `like` were expanded."""
    return x.sum_to_size((*like.shape[:-3], x.shape[-3], *like.shape[-2:]))


# ---- pieces ------------------------------------------------------------------------------------------------------


def _flat(x: Tensor, batch: Sequence[int], trailing: int) -> Tensor:
    """(..., *trailing) with its batch dimensions expanded and joined in one."""
    return x.expand(*batch, *x.shape[x.ndim - trailing :]).reshape(-1, *x.shape[x.ndim - trailing :])


def _unflat(x: Tensor, batch: Sequence[int]) -> Tensor:
    return x.reshape(*batch, *x.shape[1:])


def _chunks(x: Tensor, batch: Sequence[int], count: int, trailing: int) -> Sequence[Tensor]:
    """One tensor a chunk, from (..., N or 1, *trailing). Unbound once: indexing would cost a full gradient a chunk."""
    x = _flat(x, batch, trailing + 1)
    return x.unbind(1) if x.shape[1] == count else [x[:, 0]] * count


def _transport(state: Tensor, whole: Tensor) -> Tensor:
    """The state (..., d_v, p d) through a chunk's blocks (..., p, p, 1|d)."""
    slots = whole.shape[-2]
    if slots == 1:
        return state * whole[..., 0, :, :]
    parts = state.unflatten(-1, (slots, -1))
    moved = torch.einsum("...vac,...abc->...vbc", parts, whole.expand(*whole.shape[:-1], parts.shape[-1]))
    return moved.flatten(-2)


def _cat(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """Join along a (negative) dimension, broadcasting all others."""
    if dim != -1:
        return _cat(first.transpose(dim, -1), second.transpose(dim, -1), -1).transpose(dim, -1)
    batch = torch.broadcast_shapes(first.shape[:-1], second.shape[:-1])
    return torch.cat([x.expand(*batch, x.shape[-1]) for x in (first, second)], -1)


def _cut(x: Tensor, size: int, trailing: int, fill: float = 0.0) -> Tensor:
    """(..., T, *trailing) -> (..., N, C, *trailing), padded at the end with tokens that do nothing."""
    dim = x.ndim - trailing - 1
    pad = -x.shape[dim] % size
    if pad:
        x = torch.cat((x, x.new_full((*x.shape[:dim], pad, *x.shape[dim + 1 :]), fill)), dim)
    return x.unflatten(dim, (-1, size))


def _transfer(c: Chain, size: int) -> tuple[Tensor, Tensor]:
    """Phi(s, t) as (..., N, C_t, C_s, p, p, 1|d), zero for t < s, and Phi(0, t) as (..., N, C, p, p, 1|d)."""
    causal = torch.ones(size, size, dtype=torch.bool, device=c.key.device).tril()
    if c.block is None:
        gate = c.gate if c.gate is not None else torch.zeros_like(c.key[..., 0, :1])
        exact = _cut(floored(gate), size, 1).double().cumsum(-2)
        total = exact.to(gate.dtype)
        rest = (exact - total).detach().to(gate.dtype)  # what rounding took: a gate that closes leaves large sums
        gap = (total[..., :, None, :] - total[..., None, :, :]) + (rest[..., :, None, :] - rest[..., None, :, :])
        pairs = torch.exp(gap.masked_fill(~causal[..., None], -torch.inf))  # mask before exp: no inf * 0
        return pairs[..., None, None, :], torch.exp(total)[..., None, None, :]
    eye = torch.eye(c.slots, dtype=c.block.dtype, device=c.block.device)[..., None]
    pad = -c.block.shape[-4] % size
    block = c.block if not pad else torch.cat((c.block, eye.expand(*c.block.shape[:-4], pad, *c.block.shape[-3:])), -4)
    block = block.unflatten(-4, (-1, size))
    # column s holds M_t for t > s and I before; s = -1 (first) is the start of the chunk
    begun = torch.ones(size, size + 1, dtype=torch.bool, device=block.device).tril(0)[..., None, None, None]
    run, reach = torch.where(begun, block[..., :, None, :, :, :], eye), 1
    while reach < size:
        merged = torch.einsum("...abc,...bdc->...adc", run[..., :-reach, :, :, :, :], run[..., reach:, :, :, :, :])
        run = torch.cat((run[..., :reach, :, :, :, :], merged), -5)
        reach *= 2
    return run[..., 1:, :, :, :] * causal[..., None, None, None], run[..., 0, :, :, :]


def _score(pairs: Tensor, written: Tensor, readers: Tensor) -> Tensor:
    """<w_{s,j} Phi(s, t), x_{t,i}> as (..., C_t, i, C_s, j)."""
    if pairs.shape[-1] != 1:
        return torch.einsum("...sjac,...tsabc,...tibc->...tisj", written, pairs, readers)
    if pairs.shape[-2] == 1:
        dots = torch.einsum("...sjd,...tid->...tisj", written[..., 0, :], readers[..., 0, :])
        return dots * pairs[..., :, None, :, None, 0, 0, 0]
    dots = torch.einsum("...sjad,...tibd->...tisjab", written, readers)
    return (dots * pairs[..., :, None, :, None, :, :, 0]).sum((-2, -1))


def _carry(prefix: Tensor, readers: Tensor) -> Tensor:
    """Phi(0, t) x_{t,i}: what a reader sees of the chunk's first state, (..., C, i, p, d)."""
    return torch.einsum("...tabc,...tibc->...tiac", prefix.expand(*prefix.shape[:-1], readers.shape[-1]), readers)


def _reach_end(pairs: Tensor, written: Tensor) -> Tensor:
    """w_{s,j} Phi(s, C): what a token leaves in the chunk's last state, (..., C_s, j, p, d)."""
    last = pairs[..., -1, :, :, :, :]
    return torch.einsum("...sjac,...sabc->...sjbc", written, last.expand(*last.shape[:-1], written.shape[-1]))


def _entry_by_entry(c: Chain, start: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Gates that differ by row and key: one element-wise scan, chunk by chunk (Mamba-1, diagonal Longhorn)."""
    gate = torch.exp(c.gate) if c.gate is not None else c.block[..., 0, 0, :] if c.block is not None else None
    gate = torch.ones_like(c.key[..., 0, :1]) if gate is None else gate
    given = (gate, c.value, c.key[..., 0, :], start[..., 0, 0, :], q)
    alike = len({x.dtype for x in given}) == 1 and q.shape[-3] == 1
    if alike and serial.by_hand(*given):
        batch = torch.broadcast_shapes(start.shape[:-4], *(x.shape[:-3] for x in (gate, c.value, given[2], q)))
        rows, full = start.shape[-4], (start.shape[-4], *q.shape[-2:])
        sizes = full, (*full[:2], 1), (given[2].shape[-3], *full[1:]), (rows, full[2]), (1, *full[1:])
        given = tuple(x.expand(*batch, *size) for x, size in zip(given, sizes, strict=True))  # type: ignore[assignment]
        out, last = cast(tuple[Tensor, Tensor], _Entries.apply(*given))
    else:
        out, last = _entries(*given)
    return out, last[..., None, None, :]


def _entries(gate: Tensor, value: Tensor, key: Tensor, start: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """What is read (..., rows, T, 1) and the last state (..., rows, d_k), of gate (..., rows, T, d_k), value
    (..., rows, T, 1), key (..., rows|1, T, d_k), start (..., rows, d_k) and q (..., 1, T, d_k)."""
    # time in front of (rows, d_k); a row's value is one number
    gate, entering, query = (x.transpose(-3, -2) for x in (gate, value * key, q))
    state, outputs = start, []
    for t in range(0, q.shape[-2], _CHUNK_SCALAR):
        part = slice(t, t + _CHUNK_SCALAR)
        states = cumulative(gate[..., part, :, :], entering[..., part, :, :], state)
        outputs.append((states * query[..., part, :, :]).sum(-1))
        state = states[..., -1, :, :]
    return torch.cat(outputs, -2).mT[..., None], state


@final
class _Entries(torch.autograd.Function):
    """`_entries` a few tokens at a time, whose states stay in cache: those between them are kept, the others made
    again on the way back, where no tensor but the gates' derivative has a row, a token and a key each."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor, key: Tensor, start: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        begun, state = [], start
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        for part in _parts(q):
            begun.append(state)
            *timed, asked, read = (x[..., part, :].movedim(-2, 0) for x in (gate, value, key, q, out))
            states = _some(timed, state)
            read.copy_(states[1:] @ asked.mT)
            state = states[-1].clone()
        ctx.save_for_backward(gate, value, key, q, *begun)
        return out, state

    @staticmethod
    @own_precision_back
    def backward(ctx: Any, given: Tensor, state: Tensor) -> tuple[Tensor | None, ...]:
        gate, value, key, q, *begun = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_autograd(_entries, (gate, value, key, begun[0], q), (given, state))
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, value, key, q)]
        for part, start in zip(reversed(_parts(q)), reversed(begun), strict=True):
            *timed, asked, wanted = (x[..., part, :].movedim(-2, 0) for x in (gate, value, key, q, given))
            by_gate, by_value, by_key, by_q = (x[..., part, :].movedim(-2, 0) for x in found)
            (gates, values, keys), states, into = timed, _some(timed, start), wanted * asked
            into[-1].add_(state)
            back_through(into.unbind(0), gates.unbind(0))
            state = gates[0] * into[0]
            torch.mul(into, states[:-1], out=by_gate)
            shared = keys.shape[-2] == 1
            by_value.copy_(into @ keys.mT if shared else (into * keys).sum(-1, keepdim=True))
            by_key.copy_(values.mT @ into if shared else values * into)
            by_q.copy_(wanted.mT @ states[1:])
        return found[0], found[1], found[2], state, found[3]


def back_through(asked: Sequence[Tensor], gates: Sequence[Tensor]) -> None:
    """What is asked of every token's state, in place: also what later ones ask of it through their gates."""
    for t in range(len(asked) - 1, 0, -1):
        asked[t - 1].addcmul_(asked[t], gates[t])


def _parts(q: Tensor) -> list[slice]:
    return [slice(t, t + _FEW) for t in range(0, q.shape[-2], _FEW)]


def _some(timed: Sequence[Tensor], start: Tensor) -> Tensor:
    """The state before some tokens and after each of them, time first."""
    gates, values, keys = timed
    states = start.new_empty(len(gates) + 1, *start.shape)
    states[0] = start
    torch.mul(values, keys, out=states[1:])
    each = states.unbind(0)
    for t, gate in enumerate(gates.unbind(0)):
        each[t + 1].addcmul_(gate, each[t])
    return states


def _in_rotating_frame(c: Chain, start: Tensor, q: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
    """S_t = Z_t R(theta_1 + ... + theta_t): in the frame that turns along, the chain of Z has no rotation (RoPE)."""
    still, turned, last = in_rotating_frame(c, q)
    out, final = chunked(still, start, turned, size)
    return out, rotate(final, last[..., None, None, :])


def in_rotating_frame(c: Chain, q: Tensor) -> tuple[Chain, Tensor, Tensor]:
    """The chain of Z, its queries, and by how much its last state has yet to turn."""
    assert c.angle is not None
    total = c.angle.cumsum(-2)
    key = rotate(c.key, -total[..., None, :])
    a = b = None
    if c.a is not None and c.b is not None:
        a = rotate(c.a, -(total - c.angle)[..., None, None, :])
        b = rotate(c.b, -total[..., None, None, :])
    return replace(c, key=key, angle=None, a=a, b=b), rotate(q, -total), total[..., -1, :]
