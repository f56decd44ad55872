"""What a query finds of the mass of all that was written, m_t = q_t . n_t with n_t = e^{g_t} n_{t-1} + beta_t k_t.

A chain whose values are the number one, which is a scan of keys: in a chunk of C tokens with first n_0, cumulative log
gates G and D_ij = e^(G_i - G_j),
    n_i = e^G_i n_0 + sum_{j <= i} D_ij beta_j k_j                            m_i = q_i . n_i
and backwards, from dm and r, the gradient of the chunk's last n, with M_j what n_j hears:
    M_j = e^(G_last - G_j) r + sum_{i >= j} D_ij dm_i q_i                     r' = e^G_1 M_1, at the chunk's start
    dq_i = dm_i n_i     dk_j = beta_j M_j     dbeta_j = k_j . M_j     dg_t = (n_t - beta_t k_t) . M_t
One serial kernel each way, whose sums are products of matrices; forward leaves n before every chunk. Nothing cancels: a
token's own write is not in the sum of dg.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import check_chain, contiguous, extent, layout, nothing_read, on_device, precision
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import power_of_2
from axes.kernels.common.tiles import (
    decay,
    first_slot,
    floored,
    load_line,
    load_tile,
    store_line,
    store_tile,
    unit_rows,
)

_LENGTHS = ["T", "N", "H", "HV"]
_FEWEST, _SHORT = 64, 1024  # programs, and tokens that any number of them walks


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


@Kernel
@triton.jit(do_not_specialize=_LENGTHS)
def forward(
    q, k, beta, g, start, mass, last, saved, offsets, T, N, H, HV,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, STRONG: tl.constexpr, GATED: tl.constexpr,
    STARTED: tl.constexpr, SAVE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """mass of one head of a unit, and its last n; with SAVE those before chunks."""
    pid = tl.program_id(0).to(tl.int64)
    unit, head = pid // HV, pid % HV
    shared = head // (HV // H)
    first, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(first, unit, N, C, PACKED)
    d = tl.arange(0, BK)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    n = tl.zeros([BK], dtype=tl.float32)
    if STARTED:
        n = tl.load(start + pid * K + d, mask=d < K, other=0.0)
    chunks = ((end - first + C - 1) // C).to(tl.int32)
    for chunk in tl.range(chunks):
        at = first + chunk * C
        count = tl.minimum(end - at, C).to(tl.int32)
        if SAVE:
            tl.store(saved + ((slot + chunk) * HV + head) * K + d, n, mask=d < K)
        keys = load_tile(k, at, count, d, shared, H, K, C)
        queries = load_tile(q, at, count, d, shared, H, K, C)
        strength, _, run, total = _numbers(beta, g, at, count, head, HV, C, STRONG, GATED)
        weights = decay(run[:, None], run[None, :], i >= j) * strength[None, :]
        found = tl.dot(weights.to(keys.dtype), keys, input_precision=PRECISION) + tl.exp(run)[:, None] * n[None, :]
        store_line(mass, tl.sum(queries * found, 1), at, count, head, HV, C)
        n = tl.exp(total) * n + tl.sum((strength * tl.exp(total - run))[:, None] * keys, 0)
    tl.store(last + pid * K + d, n, mask=d < K)


@Kernel
@triton.jit(do_not_specialize=_LENGTHS)
def backward(
    q, k, beta, g, saved, dmass, dlast, heard, dq, dk, dbeta, dg, dstart, offsets, T, N, H, HV,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, STRONG: tl.constexpr, GATED: tl.constexpr,
    HEARD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one head of a unit, last chunk first. HEARD: added to dq."""
    pid = tl.program_id(0).to(tl.int64)
    unit, head = pid // HV, pid % HV
    shared = head // (HV // H)
    first, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(first, unit, N, C, PACKED)
    d = tl.arange(0, BK)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    r = tl.load(dlast + pid * K + d, mask=d < K, other=0.0)
    chunks = ((end - first + C - 1) // C).to(tl.int32)
    for step in tl.range(chunks):
        chunk = chunks - 1 - step
        at = first + chunk * C
        count = tl.minimum(end - at, C).to(tl.int32)
        n = tl.load(saved + ((slot + chunk) * HV + head) * K + d, mask=d < K, other=0.0)
        keys = load_tile(k, at, count, d, shared, H, K, C)
        queries = load_tile(q, at, count, d, shared, H, K, C)
        dm = load_line(dmass, at, count, head, HV, C)
        strength, log, run, total = _numbers(beta, g, at, count, head, HV, C, STRONG, GATED)
        later = decay(run[None, :], run[:, None], j >= i) * dm[None, :]
        hears = tl.dot(later.to(queries.dtype), queries, input_precision=PRECISION)
        hears += tl.exp(total - run)[:, None] * r[None, :]
        weights = decay(run[:, None], run[None, :], i > j) * strength[None, :]
        found = tl.dot(weights.to(keys.dtype), keys, input_precision=PRECISION) + tl.exp(run)[:, None] * n[None, :]
        if GATED:
            store_line(dg, tl.where(log > -100.0, tl.sum(found * hears, 1), 0.0), at, count, head, HV, C)
        if STRONG:
            store_line(dbeta, tl.sum(keys * hears, 1), at, count, head, HV, C)
        out = dm[:, None] * (found + strength[:, None] * keys)
        if HEARD:
            out += load_tile(heard, at, count, d, head, HV, K, C).to(tl.float32)
        store_tile(dq, out, at, count, d, head, HV, K, C)
        store_tile(dk, strength[:, None] * hears, at, count, d, head, HV, K, C)
        r = tl.exp(total) * r + tl.sum((dm * tl.exp(run))[:, None] * queries, 0)
    tl.store(dstart + pid * K + d, r, mask=d < K)


# ---- launches --------------------------------------------------------------------------------------------------------


def pays(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether programs that are serial in time, one a head of a unit, are quick: there are many, or few tokens. Else a
    chain whose values are ones has segments of a sequence side by side."""
    units = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return units * v.shape[2] >= _FEWEST or q.shape[1] <= _SHORT


def chunk_length(q: Tensor) -> int:
    return 64 if q.dtype != torch.float32 and q.shape[3] <= 128 else 32


def _constants(q: Tensor, beta: Tensor | None, g: Tensor | None, cu: Tensor | None) -> dict[str, Any]:
    return dict(
        K=q.shape[3], BK=max(16, power_of_2(q.shape[3])), C=chunk_length(q), STRONG=beta is not None,
        GATED=g is not None, PACKED=cu is not None, PRECISION=precision(q), num_warps=8, num_stages=2,
    )  # fmt: skip


def _forward(
    q: Tensor, k: Tensor, beta: Tensor | None, g: Tensor | None, start: Tensor | None, cu_seqlens: Tensor | None,
    hv: int, record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    b, t, h, d = q.shape
    cut = layout(b, t, chunk_length(q), cu_seqlens)
    mass = q.new_empty(b, t, hv, dtype=torch.float32)
    last = q.new_empty(cut.units, hv, d, dtype=torch.float32)
    saved = q.new_empty(cut.slots, hv, d, dtype=torch.float32) if record else last
    with on_device(q):
        forward[(cut.units * hv,)](
            q, k, *(mass if x is None else x for x in (beta, g, start)), mass, last, saved,
            q if cut.offsets is None else cut.offsets, cut.length, cut.chunks, h, hv,
            STARTED=start is not None, SAVE=record, **_constants(q, beta, g, cu_seqlens),
        )  # fmt: skip
    return mass, last, [saved] if record else []


def _shapes(q, k, beta, g, start, cu_seqlens, hv, record):
    b, t, _, d = q.shape
    units, slots = extent(b, t, chunk_length(q), cu_seqlens)
    kept = [q.new_empty(slots, hv, d, dtype=torch.float32)] if record else []
    return q.new_empty(b, t, hv, dtype=torch.float32), q.new_empty(units, hv, d, dtype=torch.float32), kept


def _backward(
    q: Tensor, k: Tensor, beta: Tensor | None, g: Tensor | None, start: Tensor | None, cu_seqlens: Tensor | None,
    hv: int, kept: list[Tensor], dmass: Tensor, dlast: Tensor, heard: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    b, t, h, d = q.shape
    cut = layout(b, t, chunk_length(q), cu_seqlens)
    dq, dk = (q.new_empty(b, t, hv, d, dtype=torch.float32 if hv > h else q.dtype) for _ in range(2))
    dbeta, dg = (None if x is None else torch.empty_like(x) for x in (beta, g))
    dstart, alone = torch.empty_like(dlast), hv == h
    with on_device(q):
        backward[(cut.units * hv,)](
            q, k, *(dmass if x is None else x for x in (beta, g)), kept[0], dmass, dlast,
            heard if heard is not None and alone else q, dq, dk, *(dmass if x is None else x for x in (dbeta, dg)),
            dstart, q if cut.offsets is None else cut.offsets, cut.length, cut.chunks, h, hv,
            HEARD=heard is not None and alone, **_constants(q, beta, g, cu_seqlens),
        )  # fmt: skip
    if not alone:
        dq, dk = (x.view(b, t, h, hv // h, d).sum(3) for x in (dq, dk))
        dq, dk = (dq if heard is None else dq + heard).to(q.dtype), dk.to(q.dtype)
    return [dq, dk, dbeta, dg, dstart]  # type: ignore[list-item]  # None where no tensor is


_chain = Differentiable("mass", _forward, _backward, _shapes, gradients=5, passes=True)


def mass_chain(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, g: Tensor | None = None, start: Tensor | None = None,
    *, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What queries find of the mass of writes, m (B, T, HV), and the last n (U, HV, K), in float32; and q once more.

    q, k (B, T, H, K), v (B, T, HV, .) that says how many heads write, beta and g (B, T, HV) as `scalar_chain` takes
    them; start (U, HV, K) or None for zero. What is asked of q behind this goes through what is returned of it: its
    gradient is then added where the kernel writes its own. All but v receive gradients, once.
    """
    who = "mass_chain"
    units = check_chain(who, q, k, v, cu_seqlens, None, {"beta": (beta, ()), "g": (g, ())})
    if q.numel() == 0 or v.numel() == 0:
        mass, last = nothing_read(v[..., 0].float(), (units, v.shape[2], q.shape[3]), start)
        return mass, last, q
    beta, g, start = (None if x is None else x.float() for x in (beta, g, start))
    made: tuple[Tensor, Tensor, Tensor] = _chain(*contiguous(q, k, beta, g, start), cu_seqlens, v.shape[2])
    return made


__all__ = ["mass_chain", "pays"]
