"""The chunked form of a chain with one state and at most the erasure of a delta rule, in torch.

    X_t = X_{t-1} Diag(e^g_t) + u_t k_t^T,    u_t = v_t - X_{t-1} a_t,  or u = v where nothing is erased

Inside a chunk (I + strict(a k^T * D)) u = v - e^E a X_0, then outputs and the last state are products. The exponent of
D_ts = e^(g_s+1 + .. + g_t) is a sum of gates, never a difference of longer sums: a gate that closes costs the pairs
beside it no digits. Legend: M chunks of all batch entries, C tokens.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from axes.core.chain import Chain
from axes.linalg.formulas import by_autograd
from axes.routes import serial
from axes.routes.precision import own_precision_back

_CHUNK, _CHUNK_CHANNELS = 64, 32
_CHUNK_ERASES = 32  # on a CPU, where pairs of a chunk cost more than a loop twice as long
_PAIRS = 4  # tokens of a block whose pairs have exponentials of their own, where every key entry has a gate


def takes(c: Chain) -> bool:
    """Whether the chain has this form."""
    plain = c.slots == 1 and not c.rows and c.block is None and c.angle is None and c.dense is None
    return plain and (c.a is None or c.erases)


def chunked(c: Chain, start: Tensor, q: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    """start (..., d_v, 1, d_k), q (..., T, d_k): o (..., T, d_v) and the final state."""
    length, value, key = q.shape[-2], c.value, c.key.squeeze(-2)
    if size is None:
        size = _CHUNK if c.gate is None or c.gate.shape[-1] == 1 else _CHUNK_CHANNELS
        size = _CHUNK_ERASES if c.a is not None and q.device.type == "cpu" else size
    size = min(size, length)
    size = 1 << max(0, size - 1).bit_length()  # halves of halves
    read = None if c.a is None else c.a.squeeze(-2).squeeze(-2)
    gate = None if c.gate is None else c.gate.clamp_min(floor(c.gate.dtype))
    given = [x for x in (q, key, value, read, gate) if x is not None]
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in given), start.shape[:-3])
    count = -(-length // size)

    def cut(x: Tensor, shared: bool = False) -> Tensor:
        """(*batch, M, C, n); shared: dimensions along which x repeats itself have length one."""
        x = _once(x) if shared else x.expand(*batch, *x.shape[-2:])
        if count * size != length:  # tokens that do nothing
            x = torch.nn.functional.pad(x, (0, 0, 0, count * size - length))
        return x.unflatten(-2, (count, size)).contiguous()

    gated = gate is not None
    together = gate is None or gate.shape[-1] == 1  # heads that share keys and queries share their products
    q, key, value = cut(q, together), cut(key, together), cut(value)
    decay = decays(None if gate is None else cut(gate), q)
    inside = decay.scores(q, key)
    carried, remaining = (q * decay.kept, key * decay.left) if gated else (q, key)
    fixed, varying = value, None
    if read is not None:
        read = cut(read)
        system = decay.scores(read, key, before=True)  # ones on its diagonal are understood
        if gated:
            one = torch.ones_like(decay.kept[..., :1, :])
            read = read * torch.cat((one, decay.kept[..., :-1, :]), -2)
        forced = torch.cat((value, read), -1)
        # transposed, rows are the columns that LAPACK wants: nothing is copied
        solved = torch.linalg.solve_triangular(system.mT, forced.mT, upper=True, left=False, unitriangular=True).mT
        fixed, varying = solved.split((value.shape[-1], q.shape[-1]), -1)

    def chunks(x: Tensor) -> Tensor:
        return x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:])

    d_v, d_k = start.shape[-3], start.shape[-1]
    state = start[..., 0, :].expand(*batch, d_v, d_k).reshape(-1, d_v, d_k)
    wholes = chunks(decay.kept[..., -1:, :]) if gated else None
    if varying is None:
        states, state = serial.states(state, chunks(fixed.mT @ remaining), wholes)
        written = fixed
    else:
        states, state, written = serial.writes(state, chunks(fixed), wholes, chunks(varying), chunks(remaining))

    def matrices(x: Tensor) -> Tensor:
        return x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-2:])

    read_first = states.flatten(0, 1).mT
    inner = torch.bmm(matrices(inside), written.reshape(-1, *written.shape[-2:]))
    out = torch.baddbmm(inner, matrices(carried), read_first).unflatten(0, (-1, count)).flatten(1, 2)[:, :length]
    return out.reshape(*batch, length, d_v), state.reshape(*batch, *state.shape[-2:])[..., None, :]


def _once(x: Tensor) -> Tensor:
    """Batch dimensions along which a tensor was expanded, at length one."""
    for dim, (n, stride) in enumerate(zip(x.shape[:-2], x.stride()[:-2], strict=True)):
        x = x.narrow(dim, 0, 1) if n > 1 and stride == 0 else x
    return x


def floor(dtype: torch.dtype) -> float:
    """A log gate whose exponential is zero: a finite one, because an empty sum times minus infinity is not zero."""
    return -800.0 if dtype == torch.float64 else -200.0


def _normal(dtype: torch.dtype) -> float:
    """The log of a number close to the smallest normal one."""
    return -700.0 if dtype == torch.float64 else -87.0


# ---- decays inside a chunk -----------------------------------------------------------------------------------------


class Decays:
    """What a chunk's gates do: kept (.., C, 1|d) of the first state, left (.., C, 1|d) of a write at its end."""

    kept: Tensor
    left: Tensor

    def scores(self, readers: Tensor, writers: Tensor, before: bool = False) -> Tensor:
        """x_t Diag(e^(g_s+1 + .. + g_t)) w_s for s <= t; before: of the state before token t, up to g_t-1 and s < t."""
        raise NotImplementedError

    def mixed(self, pairs: Tensor, values: Tensor, before: bool = False) -> Tensor:
        """sum_s pairs_ts e^(g_s+1 + .. + g_t) w_s, gates on the entries of values (M, C, d); before: as `scores`."""
        raise NotImplementedError

    def between(self, before: bool = False) -> Tensor:
        """e^(g_s+1 + .. + g_t) of every pair (M, C, C, 1|d), which fits short chunks; before: as `scores`."""
        raise NotImplementedError


class _Ungated(Decays):
    def __init__(self, like: Tensor) -> None:
        self.kept = self.left = like.new_ones((1,) * like.ndim)

    def between(self, before: bool = False) -> Tensor:
        return self.kept[..., None]

    def scores(self, readers: Tensor, writers: Tensor, before: bool = False) -> Tensor:
        return (readers @ writers.mT).tril(-int(before))

    def mixed(self, pairs: Tensor, values: Tensor, before: bool = False) -> Tensor:
        return pairs.tril(-int(before)) @ values


class _Scalar(Decays):
    """One gate a token: a matrix of all decays."""

    def __init__(self, gate: Tensor) -> None:
        size = gate.shape[-2]
        later = torch.ones(size, size, dtype=gate.dtype, device=gate.device).tril()
        sums = (later * gate.mT) @ later.tril(-1)  # over s < s' <= t: a product, because differences would lose digits
        with torch.no_grad():  # below it nothing is left of a gradient either, and many CPUs slow down fifty times
            sums.clamp_min_(_normal(sums.dtype))
        self.decay = sums.exp().tril()
        self.kept, self.left = gate.cumsum(-2).exp(), self.decay[..., -1, :, None]

    def scores(self, readers: Tensor, writers: Tensor, before: bool = False) -> Tensor:
        return readers @ writers.mT * self._between(before)

    def mixed(self, pairs: Tensor, values: Tensor, before: bool = False) -> Tensor:
        return (pairs * self._between(before)) @ values

    def between(self, before: bool = False) -> Tensor:
        return self._between(before)[..., None]

    def _between(self, before: bool) -> Tensor:
        return torch.nn.functional.pad(self.decay[..., :-1, :], (0, 0, 1, 0)) if before else self.decay


class _Channels(Decays):
    """A gate for every key entry. Pairs in different halves of a block meet at the border between them, so that they
    are products of two scaled operands, and so on in each half. Of `mixed` and `between` the last few pairs have
    exponentials of their own."""

    def __init__(self, gate: Tensor, pairs: int) -> None:
        self.batch, self.gate = gate.shape[:-2], gate.flatten(0, -3)
        self.kept, self.left = (x.unflatten(0, self.batch) for x in (self.until(self.gate), self.after(self.gate)))
        self.few = self.gate.unflatten(1, (-1, min(gate.shape[-2], pairs)))
        # kept by hand: compilers cannot trace a cached_property's lock
        self._levels: list[tuple[Tensor, Tensor, Tensor]] | None = None
        self._factors: Tensor | None = None

    @property
    def levels(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of halves that are no few pairs: up to each token of the second, ahead of it, behind each of the first."""
        if self._levels is None:
            self._levels, half = [], self.gate.shape[-2] // 2
            while half >= self.few.shape[-2]:
                first, second = _halves(self.gate, half)
                until = self.until(second)
                self._levels.append((until, _shifted(until), self.after(first)))
                half //= 2
        return self._levels

    def between(self, before: bool = False) -> Tensor:
        return self.among(self.few.flatten(1, 2), before).unflatten(0, self.batch)

    def _between(self, before: bool) -> Tensor:
        """Of the last few pairs: (M, n, few, few, d)."""
        return self.among(self.few, before)

    @staticmethod
    def until(gate: Tensor) -> Tensor:
        """What is left of the gates (..., C, d) up to each token's own."""
        return gate.cumsum(-2).exp()

    @staticmethod
    def after(gate: Tensor) -> Tensor:
        """Of the gates behind each token."""
        back = gate.flip(-2).cumsum(-2)
        return torch.nn.functional.pad(back[..., :-1, :], (0, 0, 1, 0)).flip(-2).exp()

    @staticmethod
    def among(gate: Tensor, before: bool) -> Tensor:
        """Of the gates behind s up to t, or up to t - 1, for every pair: (..., C, C, d)."""
        size = gate.shape[-2]
        sums = _inside(size, before, gate).to(gate.dtype).flatten(0, 1) @ gate
        return sums.exp().unflatten(-2, (size, size))

    def mixed(self, pairs: Tensor, values: Tensor, before: bool = False) -> Tensor:
        pairs, values = (x.reshape(-1, *x.shape[-2:]) for x in (pairs, values))
        few = self.few.shape[-2]
        blocks = pairs.unflatten(-1, (-1, few)).unflatten(-3, (-1, few)).diagonal(0, -4, -2).movedim(-1, -3)
        w = values.unflatten(1, (-1, few))
        out = (blocks.tril(-int(before))[..., None] * self._between(before) * w[..., None, :, :]).sum(-2).flatten(1, 2)
        for until, excluded, after in reversed(self.levels):
            half = until.shape[-2]
            quarters = pairs.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))  # (M, n, 2, half, n, 2, half)
            cross = quarters[:, :, 1, :, :, 0].diagonal(0, 1, 3).movedim(-1, 1)
            more = (excluded if before else until) * (cross @ (_halves(values, half)[0] * after))
            out = out + torch.nn.functional.pad(more, (0, 0, half, 0)).flatten(1, 2)
        return out.unflatten(0, self.batch)

    def scores(self, readers: Tensor, writers: Tensor, before: bool = False) -> Tensor:
        x, w = (y.reshape(-1, *y.shape[-2:]) for y in (readers, writers))
        made: Tensor = (_Pairs.apply if serial.by_hand(x, w) else _pairs)(self.factors, x, w, before)
        return made.unflatten(0, self.batch)

    @property
    def factors(self) -> Tensor:
        """What is left between each token and the border of its block at every level: (M, levels, C, d)."""
        if self._factors is None:
            size = self.gate.shape[-2]
            between = _until_border(size, self.gate).expand(self.gate.shape[0], -1, -1)
            self._factors = torch.bmm(between, self.gate).exp().unflatten(1, (-1, size))
        return self._factors


def _pairs(factors: Tensor, readers: Tensor, writers: Tensor, before: bool) -> Tensor:
    """x_t Diag(what is left between s and t) w_s: by their halves' border, (M, C, C). factors: `_Channels.factors`."""
    own = (readers * writers).sum(-1)
    out = (torch.zeros_like(own) if before else own)[..., None, None]  # blocks (M, n, half, half), of one token first
    for level, half in _halving(readers.shape[-2]):
        _, _, x, w = _scaled(factors[:, level], readers, writers, half, before)
        upper, lower = out.unflatten(1, (-1, 2)).unbind(2)
        cross = torch.bmm(x.flatten(0, 1), w.flatten(0, 1).mT).view_as(upper)
        out = torch.cat((torch.cat((upper, torch.zeros_like(cross)), -1), torch.cat((cross, lower), -1)), -2)
    return out[:, 0]


@final
class _Pairs(torch.autograd.Function):
    """Derivatives of a level's factors, readers and writers from two products, without those of how they are put
    together."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, readers: Tensor, writers: Tensor, before: bool) -> Tensor:
        ctx.before = before
        ctx.save_for_backward(factors, readers, writers)
        return _pairs(factors, readers, writers, before)

    @staticmethod
    @own_precision_back
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        factors, readers, writers = ctx.saved_tensors
        before: bool = ctx.before
        if torch.is_grad_enabled():
            return by_autograd(_pairs, (factors, readers, writers, before), (given,))
        own = given.diagonal(0, -2, -1)[..., None]
        dx, dw = (torch.zeros_like(y) if before else own * y for y in (writers, readers))
        dfactors = torch.empty_like(factors)
        for level, half in _halving(readers.shape[-2]):
            until, after, x, w = _scaled(factors[:, level], readers, writers, half, before)
            quarters = given.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))  # (M, n, 2, half, n, 2, half)
            cross = quarters[:, :, 1, :, :, 0].diagonal(0, 1, 3).movedim(-1, 1).flatten(0, 1)
            along_x = torch.bmm(cross, w.flatten(0, 1)).view_as(x)
            along_w = torch.bmm(cross.mT, x.flatten(0, 1)).view_as(w)
            (first, second), into = _halves(writers, half)[:1] + _halves(readers, half)[1:], dfactors[:, level]
            torch.mul(along_w, first, out=_halves(into, half)[0])
            if before:
                of_until = _halves(into, half)[1]
                torch.mul(along_x[..., 1:, :], second[..., 1:, :], out=of_until[..., :-1, :])
                of_until[..., -1, :] = 0
            else:
                torch.mul(along_x, second, out=_halves(into, half)[1])
            _halves(dx, half)[1].addcmul_(along_x, until)
            _halves(dw, half)[0].addcmul_(along_w, after)
        return dfactors, dx, dw, None


def _halving(size: int) -> list[tuple[int, int]]:
    """Levels of blocks of two tokens and more, and half of their lengths."""
    return [(level, 1 << level) for level in range(size.bit_length() - 1)]


def _scaled(
    factors: Tensor, readers: Tensor, writers: Tensor, half: int, before: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Factors of second and of first halves, and with them readers and writers, each (M, n, half, d)."""
    after, until = _halves(factors, half)
    until = _shifted(until) if before else until
    return until, after, _halves(readers, half)[1] * until, _halves(writers, half)[0] * after


def _shifted(until: Tensor) -> Tensor:
    """Ahead of each token in the place of up to it."""
    return torch.nn.functional.pad(until[..., :-1, :], (0, 0, 1, 0), value=1.0)


def _until_border(size: int, like: Tensor) -> Tensor:
    """Ones at the gates between each token and the border of its block, of blocks of two tokens and more: (levels
    times C, C)."""
    order = torch.arange(size, device=like.device)
    t, r = order[:, None], order
    found = []
    for _, half in _halving(size):
        border = (t | half) & -half  # the first token of the second half
        found.append(torch.where(t >= border, (r >= border) & (r <= t), (r > t) & (r < border)))
    return torch.cat(found).to(like.dtype) if found else like.new_zeros(0, size)


def _inside(size: int, before: bool, like: Tensor) -> Tensor:
    """Whether a token lies behind s and not behind t, or t - 1: (t, s, token)."""
    order = torch.arange(size, device=like.device)
    t, s = order[:, None, None], order[None, :, None]
    return (order > s) & (order <= t - int(before))


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """(M, C, d) as the first and the second halves (M, n, half, d) of blocks."""
    first, second = x.unflatten(1, (-1, 2, half)).unbind(2)
    return first, second


def decays(gate: Tensor | None, like: Tensor, pairs: int | None = None) -> Decays:
    """Of log gates (M, C, 1|d) above `floor`, or of none; C is a power of two where every entry has a gate.
    pairs: of so many tokens in a row they have exponentials of their own."""
    if gate is None:
        return _Ungated(like)
    return _Scalar(gate) if gate.shape[-1] == 1 else _Channels(gate, pairs or _PAIRS)
