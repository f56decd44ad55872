"""What a query finds of the mass of all that was written, m_t = q_t . n_t with n_t = e^{g_t} n_{t-1} + beta_t k_t.

A chain whose values are the number one, which is a scan of keys: in a chunk of C tokens with first n_0, cumulative log
gates G and D_ij = e^(G_i - G_j),
    n_i = e^G_i n_0 + sum_{j <= i} D_ij beta_j k_j                            m_i = q_i . n_i
and backwards, from dm and r, the gradient of the chunk's last n, with M_j what n_j hears:
    M_j = e^(G_last - G_j) r + sum_{i >= j} D_ij dm_i q_i                     r' = e^G_1 M_1, at the chunk's start
    dq_i = dm_i n_i     dk_j = beta_j M_j     dbeta_j = k_j . M_j     dg_t = (n_t - beta_t k_t) . M_t
All chunks at once: what each adds to n (backwards to r), which is then carried from chunk to chunk, and what each
makes of its first n. The sums of a chunk are products of matrices. Nothing cancels: a token's own write is not in the
sum of dg.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import (
    Layout,
    check_chain,
    contiguous,
    extent,
    layout,
    nothing_read,
    on_device,
    precision,
)
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import power_of_2
from axes.kernels.common.tiles import (
    decay,
    first_slot,
    floored,
    load_line,
    load_tile,
    slot_rows,
    store_line,
    store_tile,
    unit_rows,
)

_LENGTHS = ["T", "N", "H", "HV"]


@triton.jit
def _numbers(beta, g, at, count, head, HV, C: tl.constexpr, STRONG: tl.constexpr, GATED: tl.constexpr):
    """Of a chunk: strengths, which past its end are zero, logs and their sums."""
    strength = (tl.arange(0, C) < count).to(tl.float32)
    log = tl.zeros([C], dtype=tl.float32)
    if STRONG:
        strength = load_line(beta, at, count, head, HV, C)
    if GATED:
        log = floored(load_line(g, at, count, head, HV, C))
    return strength, log, tl.cumsum(log, 0), tl.sum(log, 0)


@triton.jit
def _place(offsets, units, pid, T, N, H, HV, C: tl.constexpr, PACKED: tl.constexpr):
    """Of a program's chunk and head: where its numbers are, its first row, how many, its head and that of its keys."""
    head, slot = pid % HV, pid // HV
    _, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    return pid, first, tl.maximum(end - first, 0).to(tl.int32), head, head // (HV // H)


@Kernel
@triton.jit(do_not_specialize=_LENGTHS)
def sums(
    x, weight, g, sums, totals, offsets, units, T, N, H, HV,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, STRONG: tl.constexpr, GATED: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to n, x = k and weight = beta; REVERSE: to r, x = q and weight = dm. And its logs' sum."""
    place, at, count, head, shared = _place(offsets, units, tl.program_id(0).to(tl.int64), T, N, H, HV, C, PACKED)
    d = tl.arange(0, BK)
    vectors = load_tile(x, at, count, d, shared, H, K, C)
    strength, _, run, total = _numbers(weight, g, at, count, head, HV, C, STRONG, GATED)
    reach = run if REVERSE else total - run
    tl.store(sums + place * K + d, tl.sum((strength * tl.exp(reach))[:, None] * vectors, 0), mask=d < K)
    tl.store(totals + place, total)


@Kernel
@triton.jit(do_not_specialize=["T", "N", "HV"])
def carry(
    sums, totals, edge, last, offsets, T, N, HV,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MANY: tl.constexpr, STARTED: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """n before every chunk of a unit in the place of what it adds, MANY chunks at a time; REVERSE: r behind it."""
    pid = tl.program_id(0).to(tl.int64)
    unit, head = pid // HV, pid % HV
    first, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(first, unit, N, C, PACKED)
    chunks = ((end - first + C - 1) // C).to(tl.int32)
    d = tl.arange(0, BK)
    i, j = tl.arange(0, MANY)[:, None], tl.arange(0, MANY)[None, :]
    n = tl.zeros([BK], dtype=tl.float32)
    if STARTED:
        n = tl.load(edge + pid * K + d, mask=d < K, other=0.0)
    for done in range(0, chunks, MANY):
        order = done + tl.arange(0, MANY)
        there = order < chunks
        chunk = (chunks - 1 - order) if REVERSE else order
        line = (slot + chunk) * HV + head
        own = tl.load(sums + line[:, None] * K + d[None, :], mask=there[:, None] & (d < K)[None, :], other=0.0)
        total = tl.load(totals + line, mask=there, other=0.0)
        shut = total != total  # what is not finite is not to meet a zero: chunks ahead of it stay as they are
        lost = ((tl.abs(own) < float("inf")).to(tl.int32) == 0) | shut[:, None]
        known = tl.where(shut, 0.0, total)
        run = tl.cumsum(known, 0)
        before = run - known
        met = tl.dot(decay(before[:, None], run[None, :], i > j), tl.where(lost, 0.0, own), input_precision="ieee")
        met += tl.exp(before)[:, None] * n[None, :]
        met = tl.where(tl.cumsum(lost.to(tl.int32), 0) > lost.to(tl.int32), float("nan"), met)
        tl.store(sums + line[:, None] * K + d[None, :], met, mask=there[:, None] & (d < K)[None, :])
        whole = tl.sum(total, 0)
        n = tl.exp(whole) * n + tl.sum(tl.exp(whole - run)[:, None] * own, 0)
    tl.store(last + pid * K + d, n, mask=d < K)


@Kernel
@triton.jit(do_not_specialize=_LENGTHS)
def masses(
    q, k, beta, g, firsts, mass, offsets, units, T, N, H, HV,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, STRONG: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """m of a chunk of one head."""
    place, at, count, head, shared = _place(offsets, units, tl.program_id(0).to(tl.int64), T, N, H, HV, C, PACKED)
    d = tl.arange(0, BK)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    keys = load_tile(k, at, count, d, shared, H, K, C)
    queries = load_tile(q, at, count, d, shared, H, K, C)
    n = tl.load(firsts + place * K + d, mask=d < K, other=0.0)
    strength, _, run, _ = _numbers(beta, g, at, count, head, HV, C, STRONG, GATED)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    weighed = scores * (decay(run[:, None], run[None, :], i >= j) * strength[None, :])
    inside = tl.sum(tl.where(i >= j, weighed, 0.0), 1)  # zero times what is not finite is not zero
    store_line(mass, inside + tl.exp(run) * tl.sum(queries * n[None, :], 1), at, count, head, HV, C)


@Kernel
@triton.jit(do_not_specialize=_LENGTHS)
def gradients(
    q, k, beta, g, firsts, behind, dmass, heard, keys_heard, dq, dk, dbeta, dg, offsets, units, T, N, H, HV,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, STRONG: tl.constexpr, GATED: tl.constexpr,
    HEARD: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk of one head. HEARD, KEYS: added to dq, to dk."""
    place, at, count, head, shared = _place(offsets, units, tl.program_id(0).to(tl.int64), T, N, H, HV, C, PACKED)
    d = tl.arange(0, BK)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    keys = load_tile(k, at, count, d, shared, H, K, C)
    queries = load_tile(q, at, count, d, shared, H, K, C)
    dm = load_line(dmass, at, count, head, HV, C)
    strength, log, run, total = _numbers(beta, g, at, count, head, HV, C, STRONG, GATED)
    r = tl.load(behind + place * K + d, mask=d < K, other=0.0)
    later = decay(run[None, :], run[:, None], j >= i) * dm[None, :]
    hears = tl.dot(later.to(queries.dtype), queries, input_precision=PRECISION)
    hears += tl.exp(total - run)[:, None] * r[None, :]
    of_keys = strength[:, None] * hears
    if KEYS:
        of_keys += load_tile(keys_heard, at, count, d, head, HV, K, C).to(tl.float32)
    store_tile(dk, of_keys, at, count, d, head, HV, K, C)
    if STRONG:
        store_line(dbeta, tl.sum(keys * hears, 1), at, count, head, HV, C)
    n = tl.load(firsts + place * K + d, mask=d < K, other=0.0)
    weights = decay(run[:, None], run[None, :], i > j) * strength[None, :]
    found = tl.dot(weights.to(keys.dtype), keys, input_precision=PRECISION) + tl.exp(run)[:, None] * n[None, :]
    if GATED:
        store_line(dg, tl.where(log > -100.0, tl.sum(found * hears, 1), 0.0), at, count, head, HV, C)
    out = dm[:, None] * (found + strength[:, None] * keys)
    if HEARD:
        out += load_tile(heard, at, count, d, head, HV, K, C).to(tl.float32)
    store_tile(dq, out, at, count, d, head, HV, K, C)


# ---- launches --------------------------------------------------------------------------------------------------------


_MANY, _ROWS = 16, 8  # chunks that are carried over at once; thousands of numbers of a tile for a warp


def chunk_length(q: Tensor) -> int:
    return 64 if q.dtype != torch.float32 and q.shape[3] <= 128 else 32


class _Chunks(NamedTuple):
    """The cut of tokens, and what every kernel over chunks is given."""

    cut: Layout
    programs: int
    where: tuple[Any, ...]
    width: dict[str, Any]

    @classmethod
    def of(cls, q: Tensor, hv: int, cu: Tensor | None) -> _Chunks:
        b, t, h, d = q.shape
        cut = layout(b, t, chunk_length(q), cu)
        where = (q if cut.offsets is None else cut.offsets, q if cut.units_of_slots is None else cut.units_of_slots)
        width = dict(K=d, BK=max(16, power_of_2(d)), C=cut.chunk, PACKED=cut.packed)
        return cls(cut, cut.slots * hv, (*where, cut.length, cut.chunks, h, hv), width)

    def carried(
        self, x: Tensor, weight: Tensor | None, g: Tensor | None, edge: Tensor | None, hv: int, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        """n before every chunk (slots, HV, K) and the last (units, HV, K); reverse: r behind it, and at the start."""
        states = x.new_empty(self.cut.slots, hv, x.shape[3], dtype=torch.float32)
        totals = x.new_empty(self.cut.slots, hv, dtype=torch.float32)
        last = x.new_empty(self.cut.units, hv, x.shape[3], dtype=torch.float32)
        sums[(self.programs,)](
            x, *(totals if y is None else y for y in (weight, g)), states, totals, *self.where,
            STRONG=weight is not None, GATED=g is not None, REVERSE=reverse, **self.width, num_warps=4,
        )  # fmt: skip
        offsets, _, length, chunks, _, _ = self.where
        carry[(self.cut.units * hv,)](
            states, totals, last if edge is None else edge, last, offsets, length, chunks, hv,
            MANY=_MANY, STARTED=edge is not None, REVERSE=reverse, **self.width, num_warps=4,
        )  # fmt: skip
        return states, last


def _forward(
    q: Tensor, k: Tensor, beta: Tensor | None, g: Tensor | None, start: Tensor | None, cu_seqlens: Tensor | None,
    hv: int, record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    mass = q.new_empty(*q.shape[:2], hv, dtype=torch.float32)
    with on_device(q):
        x = _Chunks.of(q, hv, cu_seqlens)
        firsts, last = x.carried(k, beta, g, start, hv, False)
        masses[(x.programs,)](
            q, k, *(mass if y is None else y for y in (beta, g)), firsts, mass, *x.where,
            STRONG=beta is not None, GATED=g is not None, PRECISION=precision(q), **x.width, num_warps=4,
        )  # fmt: skip
    return mass, last, [firsts] if record else []


def _shapes(q, k, beta, g, start, cu_seqlens, hv, record):
    b, t, _, d = q.shape
    units, slots = extent(b, t, chunk_length(q), cu_seqlens)
    kept = [q.new_empty(slots, hv, d, dtype=torch.float32)] if record else []
    return q.new_empty(b, t, hv, dtype=torch.float32), q.new_empty(units, hv, d, dtype=torch.float32), kept


def _backward(
    q: Tensor, k: Tensor, beta: Tensor | None, g: Tensor | None, start: Tensor | None, cu_seqlens: Tensor | None,
    hv: int, kept: list[Tensor], dmass: Tensor, dlast: Tensor, heard: Tensor | None = None,
    keys_heard: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    b, t, h, d = q.shape
    dq, dk = (q.new_empty(b, t, hv, d, dtype=torch.float32 if hv > h else q.dtype) for _ in range(2))
    dbeta, dg = (None if y is None else torch.empty_like(y) for y in (beta, g))
    with on_device(q):
        x = _Chunks.of(q, hv, cu_seqlens)
        behind, dstart = x.carried(q, dmass, g, dlast, hv, True)
        more = [q if y is None or hv > h else y for y in (heard, keys_heard)]
        gradients[(x.programs,)](
            q, k, *(dmass if y is None else y for y in (beta, g)), kept[0], behind, dmass,
            *more, dq, dk, *(dmass if y is None else y for y in (dbeta, dg)),
            *x.where,
            STRONG=beta is not None, GATED=g is not None, HEARD=more[0] is not q, KEYS=more[1] is not q,
            PRECISION=precision(q), **x.width, num_warps=8,
        )  # fmt: skip
    if hv > h:
        dq, dk = (y.view(b, t, h, hv // h, d).sum(3) for y in (dq, dk))
        dq = (dq if heard is None else dq + heard).to(q.dtype)
        dk = (dk if keys_heard is None else dk + keys_heard).to(q.dtype)
    return [dq, dk, dbeta, dg, dstart]  # type: ignore[list-item]  # None where no tensor is


# Through this kernel goes what is asked of q and k behind it: mLSTM's reads on an H200, B 8, T 4,096, H 16, D 128 in
# bfloat16, forward with backward 2.83 ms, and 3.19 where autograd adds what is asked of k.
_chain = Differentiable("mass", _forward, _backward, _shapes, gradients=5, passes=2)


def mass_chain(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, g: Tensor | None = None, start: Tensor | None = None,
    *, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What queries find of the mass of writes, m (B, T, HV), and the last n (U, HV, K), in float32; q and k once more.

    q, k (B, T, H, K), v (B, T, HV, .) that says how many heads write, beta and g (B, T, HV) as `scalar_chain` takes
    them; start (U, HV, K) or None for zero. What is asked of q and k behind this goes through what is returned of them:
    its gradient is then added where the kernel writes its own. All but v receive gradients, once.
    """
    who = "mass_chain"
    units = check_chain(who, q, k, v, cu_seqlens, None, {"beta": (beta, ()), "g": (g, ())})
    if q.numel() == 0 or v.numel() == 0:
        mass, last = nothing_read(v[..., 0].float(), (units, v.shape[2], q.shape[3]), start)
        return mass, last, q, k
    beta, g, start = (None if x is None else x.float() for x in (beta, g, start))
    mass, last, q, k = _chain(*contiguous(q, k, beta, g, start), cu_seqlens, v.shape[2])
    return mass, last, q, k


__all__ = ["mass_chain"]
