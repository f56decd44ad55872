"""The gated delta rule in Triton, exact chunk by chunk: S_t = a_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T.

Inside a chunk of C tokens with first state X (as K x V), cumulative log gates G and D_ij = exp(G_i - G_j), i >= j:
    M = (I + strict(beta K K^T * D))^-1                 P = lower(Q K^T * D)
    u = M [beta (V - e^G (K X))]                        what each token really writes
    o = e^G (Q X) + P u                                 X' = e^G_last X + K^T (e^(G_last - G) u)
and backwards, from do and dX':
    r = M^T [P^T do + e^(G_last - G) (K dX')]           dX = e^G_last dX' + Q^T (e^G do) - K^T (beta e^G r)
    dv = beta r,  strict part of d(K K^T) = -beta r u^T * D, and the rest are products with X, dX', u and r.
Forward: one kernel over all chunks (M, P), one serial in time (o, final state); W, U and the states are never stored.
Backward: the states again (X, u), the serial reverse pass (dX', r), and one kernel over all chunks for the gradients.
The gradient of a gate is a sum inside its chunk of what q, k gain and lose: no division, no atomics, one order.
Sums are in float32; products of float32 inputs are IEEE.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError

_TILE = 16  # rows of a block that forward substitution inverts; also the smallest side of a matrix product
_LARGEST = 128
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# ---- pieces of the kernels ---------------------------------------------------------------------------------------


@triton.jit
def _gates(g, at, inside, C: tl.constexpr, GATED: tl.constexpr):
    """Cumulative log gates of a chunk and their total. A gate below exp(-100) is zero in float32."""
    if GATED:
        log = tl.maximum(tl.load(g + at, mask=inside, other=0.0), -100.0)
        total = tl.sum(log, 0)
        run = tl.cumsum(log, 0)
    else:
        run = tl.zeros([C], dtype=tl.float32)
        total = 0.0
    return run, total


@triton.jit
def _decay(run, keep):
    """exp(G_i - G_j) where keep, else 0: masked before exp."""
    return tl.exp(tl.where(keep, run[:, None] - run[None, :], float("-inf")))


@triton.jit
def _diagonal(x, C: tl.constexpr, SIDE: tl.constexpr):
    """The diagonal blocks (C / SIDE, SIDE, SIDE) of (C, C)."""
    B: tl.constexpr = C // SIDE
    same = tl.arange(0, B)[:, None, None, None] == tl.arange(0, B)[None, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(x, [B, SIDE, B, SIDE]), 0.0), axis=2)


@triton.jit
def _merge(lower, x, C: tl.constexpr, SIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses x (2 B, SIDE, SIDE) of diagonal blocks to those (B, C, C) of the blocks `lower` of twice the size."""
    B: tl.constexpr = x.shape[0] // 2
    pair = tl.reshape(x, [B, 2, SIDE, SIDE])
    second = tl.arange(0, 2)[None, :, None, None] == 1
    x1 = tl.sum(tl.where(second, 0.0, pair), axis=1)
    x2 = tl.sum(tl.where(second, pair, 0.0), axis=1)
    quarters = tl.reshape(lower, [B, 2, SIDE, 2, SIDE])
    row = tl.arange(0, 2)[None, :, None, None, None]
    col = tl.arange(0, 2)[None, None, None, :, None]
    part = tl.sum(tl.sum(tl.where((row == 1) & (col == 0), quarters, 0.0), axis=3), axis=1)
    if B == 1:
        flat1 = tl.reshape(x1, [SIDE, SIDE])
        flat2 = tl.reshape(x2, [SIDE, SIDE])
        inner = tl.dot(tl.reshape(part, [SIDE, SIDE]), flat1, input_precision=PRECISION)
        cross = tl.reshape(tl.dot(flat2, inner, input_precision=PRECISION), [B, SIDE, SIDE])
    else:
        cross = tl.dot(x2, tl.dot(part, x1, input_precision=PRECISION), input_precision=PRECISION)
    out = tl.where((row == 0) & (col == 0), x1[:, None, :, None, :], 0.0)
    out += tl.where((row == 1) & (col == 1), x2[:, None, :, None, :], 0.0)
    out -= tl.where((row == 1) & (col == 0), cross[:, None, :, None, :], 0.0)
    return tl.reshape(out, [B, C, C])


@triton.jit
def _inverse(lower, C: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower (C, C): substitution in the diagonal blocks, then blocks of twice the size.

    Powers of `lower` are never formed: with keys close to each other they grow past what float32 resolves.
    """
    B: tl.constexpr = C // TILE
    blocks = _diagonal(lower, C, TILE)
    row = tl.arange(0, TILE)[None, :, None]
    col = tl.arange(0, TILE)[None, None, :]
    x = tl.where(row == col, 1.0, 0.0) + tl.zeros([B, TILE, TILE], dtype=tl.float32)
    for i in range(1, TILE):
        line = tl.sum(tl.where(row == i, blocks, 0.0), axis=1)
        gain = tl.sum(line[:, :, None] * x, axis=1)
        x = x - tl.where(row == i, gain[:, None, :], 0.0)
    if C == 2 * TILE:
        x = _merge(lower, x, C, TILE, PRECISION)
    if C == 4 * TILE:
        x = _merge(_diagonal(lower, C, 2 * TILE), x, 2 * TILE, TILE, PRECISION)
        x = _merge(lower, x, C, 2 * TILE, PRECISION)
    return tl.reshape(x, [C, C])


# ---- kernels -----------------------------------------------------------------------------------------------------
# Tokens are (B, T, H, D); chunk matrices (B, H, N, C, C); states of chunks (B, H, N, K, V); public states (B, H, V, K).


@triton.jit
def _prepare(
    q, k, beta, g, m, p, T, N,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """M and P of every chunk."""
    pid = tl.program_id(0).to(tl.int64)
    n, bh = pid % N, pid // N
    first = ((bh // H) * T + n * C) * H + bh % H
    at = tl.arange(0, C) * H
    inside = tl.arange(0, C) < T - n * C
    d = tl.arange(0, BK)
    tile = at[:, None] * K + d[None, :]
    seen = inside[:, None] & (d < K)[None, :]
    keys = tl.load(k + first * K + tile, mask=seen, other=0.0)
    queries = tl.load(q + first * K + tile, mask=seen, other=0.0)
    strength = tl.load(beta + first + at, mask=inside, other=0.0)
    run, _ = _gates(g + first, at, inside, C, GATED)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    decay = _decay(run, i >= j)
    out = i * C + j
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decay
    tl.store(p + pid * C * C + out, scores.to(p.dtype.element_ty))
    lower = tl.where(i > j, tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * decay, 0.0)
    x = _inverse(strength[:, None] * lower, C, TILE, MERGE)
    tl.store(m + pid * C * C + out, x.to(m.dtype.element_ty))


@triton.jit
def _scan(
    q, k, v, beta, g, m, p, start, o, final, states, written, T, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, STARTED: tl.constexpr, RECORD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Serial over chunks for one head and one block of values: o and the final state, or with RECORD each X and u."""
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (V + BV - 1) // BV
    bh = pid // parts
    d = tl.arange(0, BK)
    e = (pid % parts) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    within = (d < K)[:, None] & (e < V)[None, :]
    public = bh * V * K + e[None, :] * K + d[:, None]
    first = (bh // H) * T * H + bh % H
    hop = tl.full([], C * H, tl.int64)
    at = tl.arange(0, C) * H
    tile = at[:, None] * K + d[None, :]
    wide = at[:, None] * V + e[None, :]
    square = i * C + j
    chunk = d[:, None] * V + e[None, :]
    if STARTED:
        state = tl.load(start + public, mask=within, other=0.0)
    else:
        state = tl.zeros([BK, BV], dtype=tl.float32)
    for n in tl.range(N):
        inside = tl.arange(0, C) < T - n * C
        shown = inside[:, None] & (e < V)[None, :]
        seen = inside[:, None] & (d < K)[None, :]
        here, block = first + n * hop, bh * N + n
        keys = tl.load(k + here * K + tile, mask=seen, other=0.0)
        values = tl.load(v + here * V + wide, mask=shown, other=0.0)
        inverse = tl.load(m + block * C * C + square)
        strength = tl.load(beta + here + at, mask=inside, other=0.0)
        run, total = _gates(g + here, at, inside, C, GATED)
        old = state.to(keys.dtype)
        if RECORD:
            tl.store(states + block * K * V + chunk, old, mask=within)
        missing = values - tl.exp(run)[:, None] * tl.dot(keys, old, input_precision=PRECISION)
        u = tl.dot(inverse, (strength[:, None] * missing).to(keys.dtype), input_precision=PRECISION)
        if RECORD:
            tl.store(written + here * V + wide, u.to(keys.dtype), mask=shown)
        else:
            queries = tl.load(q + here * K + tile, mask=seen, other=0.0)
            scores = tl.load(p + block * C * C + square)
            out = tl.exp(run)[:, None] * tl.dot(queries, old, input_precision=PRECISION)
            out += tl.dot(scores, u.to(keys.dtype), input_precision=PRECISION)
            tl.store(o + here * V + wide, out.to(o.dtype.element_ty), mask=shown)
        kept = (tl.exp(total - run)[:, None] * u).to(keys.dtype)
        if GATED:
            state *= tl.exp(total)
        state += tl.dot(tl.trans(keys), kept, input_precision=PRECISION)
    if not RECORD:
        tl.store(final + public, state, mask=within)


@triton.jit
def _reverse(
    q, k, beta, g, m, p, do, dfinal, dstates, dwritten, dstart, T, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Serial over chunks from the last: dX' of every chunk, r, and the gradient of the initial state."""
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (V + BV - 1) // BV
    bh = pid // parts
    d = tl.arange(0, BK)
    e = (pid % parts) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    within = (d < K)[:, None] & (e < V)[None, :]
    public = bh * V * K + e[None, :] * K + d[:, None]
    first = (bh // H) * T * H + bh % H
    hop = tl.full([], C * H, tl.int64)
    at = tl.arange(0, C) * H
    tile = at[:, None] * K + d[None, :]
    wide = at[:, None] * V + e[None, :]
    square = i * C + j
    chunk = d[:, None] * V + e[None, :]
    grad = tl.load(dfinal + public, mask=within, other=0.0)
    for back in tl.range(N):
        n = N - 1 - back
        inside = tl.arange(0, C) < T - n * C
        shown = inside[:, None] & (e < V)[None, :]
        seen = inside[:, None] & (d < K)[None, :]
        here, block = first + n * hop, bh * N + n
        keys = tl.load(k + here * K + tile, mask=seen, other=0.0)
        queries = tl.load(q + here * K + tile, mask=seen, other=0.0)
        dout = tl.load(do + here * V + wide, mask=shown, other=0.0)
        inverse = tl.load(m + block * C * C + square)
        scores = tl.load(p + block * C * C + square)
        strength = tl.load(beta + here + at, mask=inside, other=0.0)
        run, total = _gates(g + here, at, inside, C, GATED)
        later = grad.to(keys.dtype)
        tl.store(dstates + block * K * V + chunk, later, mask=within)
        du = tl.exp(total - run)[:, None] * tl.dot(keys, later, input_precision=PRECISION)
        du += tl.dot(tl.trans(scores), dout, input_precision=PRECISION)
        r = tl.dot(tl.trans(inverse), du.to(keys.dtype), input_precision=PRECISION)
        tl.store(dwritten + here * V + wide, r.to(keys.dtype), mask=shown)
        if GATED:
            grad *= tl.exp(total)
        reach = tl.exp(run)[:, None]
        grad += tl.dot(tl.trans(queries), (reach * dout).to(keys.dtype), input_precision=PRECISION)
        erased = (-(strength[:, None] * reach) * r).to(keys.dtype)
        grad += tl.dot(tl.trans(keys), erased, input_precision=PRECISION)
    tl.store(dstart + public, grad, mask=within)


@triton.jit
def _gradients(
    q, k, v, beta, g, do, states, dstates, written, dwritten, dq, dk, dv, dbeta, dg, size, T, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks at once: every gradient of a token from X, dX', u and r; dbeta and dg of one block of keys."""
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (K + BK - 1) // BK
    part = pid % parts
    pid = pid // parts
    n, bh = pid % N, pid // N
    first = ((bh // H) * T + n * C) * H + bh % H
    at = tl.arange(0, C) * H
    inside = tl.arange(0, C) < T - n * C
    d = part * BK + tl.arange(0, BK)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    strength = tl.load(beta + first + at, mask=inside, other=0.0)
    run, total = _gates(g + first, at, inside, C, GATED)
    from_out = tl.zeros([C, BK], dtype=tl.float32)
    from_read = tl.zeros([C, BK], dtype=tl.float32)
    from_write = tl.zeros([C, BK], dtype=tl.float32)
    dscores = tl.zeros([C, C], dtype=tl.float32)
    dlower = tl.zeros([C, C], dtype=tl.float32)
    dstrength = tl.zeros([C], dtype=tl.float32)
    both = tl.zeros([BK], dtype=tl.float32)
    for left in range(0, V, BV):
        e = left + tl.arange(0, BV)
        wide = at[:, None] * V + e[None, :]
        shown = inside[:, None] & (e < V)[None, :]
        chunk = d[:, None] * V + e[None, :]
        within = (d < K)[:, None] & (e < V)[None, :]
        dout = tl.load(do + first * V + wide, mask=shown, other=0.0)
        u = tl.load(written + first * V + wide, mask=shown, other=0.0)
        r = tl.load(dwritten + first * V + wide, mask=shown, other=0.0)
        state = tl.load(states + pid * K * V + chunk, mask=within, other=0.0)
        grad = tl.load(dstates + pid * K * V + chunk, mask=within, other=0.0)
        from_out += tl.dot(dout, tl.trans(state), input_precision=PRECISION)
        from_read += tl.dot(r, tl.trans(state), input_precision=PRECISION)
        from_write += tl.dot(u, tl.trans(grad), input_precision=PRECISION)
        dscores += tl.dot(dout, tl.trans(u), input_precision=PRECISION)
        dlower += tl.dot(r, tl.trans(u), input_precision=PRECISION)
        if part == 0:
            values = tl.load(v + first * V + wide, mask=shown, other=0.0)
            dstrength += tl.sum(r.to(tl.float32) * values, 1)
            tl.store(dv + first * V + wide, (strength[:, None] * r).to(dv.dtype.element_ty), mask=shown)
        if GATED:
            both += tl.sum(state.to(tl.float32) * grad, 1)
    tile = at[:, None] * K + d[None, :]
    seen = inside[:, None] & (d < K)[None, :]
    keys = tl.load(k + first * K + tile, mask=seen, other=0.0)
    queries = tl.load(q + first * K + tile, mask=seen, other=0.0)
    decay = _decay(run, i >= j)
    reach = tl.exp(run)[:, None]
    dscores = (dscores * decay).to(keys.dtype)
    dlower = tl.where(i > j, -dlower * decay, 0.0)
    scaled = (strength[:, None] * dlower).to(keys.dtype)

    dquery = reach * from_out + tl.dot(dscores, keys, input_precision=PRECISION)
    tl.store(dq + first * K + tile, dquery.to(dq.dtype.element_ty), mask=seen)
    from_read = reach * from_read
    alone = tl.dot(dlower.to(keys.dtype), keys, input_precision=PRECISION) - from_read
    dstrength += tl.sum(keys * alone, 1)
    tl.store(dbeta + part * size + first + at, dstrength, mask=inside)
    # what a key gains as the later token of a pair, and as the earlier one
    gains = tl.dot(scaled, keys, input_precision=PRECISION) - strength[:, None] * from_read
    from_write = tl.exp(total - run)[:, None] * from_write
    loses = from_write + tl.dot(tl.trans(dscores), queries, input_precision=PRECISION)
    loses += tl.dot(tl.trans(scaled), keys, input_precision=PRECISION)
    tl.store(dk + first * K + tile, (gains + loses).to(dk.dtype.element_ty), mask=seen)
    if GATED:
        change = tl.sum(queries * dquery + keys * (gains - loses), 1)
        last = tl.sum(tl.sum(keys * from_write, 1), 0) + tl.exp(total) * tl.sum(both, 0)
        dlog = tl.sum(change, 0) - tl.cumsum(change, 0) + change + last
        alive = tl.load(g + first + at, mask=inside, other=0.0) > -100.0
        tl.store(dg + part * size + first + at, tl.where(alive, dlog, 0.0), mask=inside)


# ---- launches ----------------------------------------------------------------------------------------------------


def _sizes(q: Tensor, v: Tensor) -> dict[str, int]:
    """Tokens of a chunk and block sides.

    16 bit: values go by 64 whatever V is. Seen on an H200 with Triton 3.6 (ptxas 12.8): `_reverse` compiled for 32
    values, 4 warps and 1 stage faults with an illegal access, and some kernel for 16 values did; 64 has passed.
    """
    d_k, d_v = (triton.next_power_of_2(x.shape[-1]) for x in (q, v))
    if q.dtype == torch.float32:
        return {"C": 32, "BK": max(_TILE, d_k), "BV": max(_TILE, min(d_v, 32))}
    return {"C": 64, "BK": max(64, d_k), "BV": 64}


def _launch(q: Tensor, kernel: str) -> dict[str, int]:
    """Warps and pipeline stages: the only ones that were tested."""
    if q.dtype == torch.float32:
        return {"num_warps": 8 if kernel == "gradients" else 4, "num_stages": 1}
    warps, stages = {"prepare": (2, 1), "gradients": (4, 2)}.get(kernel, (4, 3))
    return {"num_warps": warps, "num_stages": stages}


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"  # the latter is not asked for by 16 bit operands


@torch.library.custom_op("axes::gated_delta_rule", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, t, h, d = q.shape
    sizes = _sizes(q, v)
    c, n = sizes["C"], triton.cdiv(t, sizes["C"])
    o, final = torch.empty_like(v), q.new_empty(b, h, v.shape[-1], d, dtype=torch.float32)
    m, p = q.new_empty(b, h, n, c, c), q.new_empty(b, h, n, c, c)
    precision, gated = _precision(q), g is not None
    merge = "ieee" if precision == "ieee" else "tf32x3"
    _prepare[(b * h * n,)](
        q, k, beta, g if gated else beta, m, p, t, n,
        H=h, K=d, C=c, BK=sizes["BK"], GATED=gated, TILE=_TILE, PRECISION=precision, MERGE=merge,
        **_launch(q, "prepare"),
    )  # fmt: skip
    _scan[(b * h * triton.cdiv(v.shape[-1], sizes["BV"]),)](
        q, k, v, beta, g if gated else beta, m, p, final if start is None else start, o, final, o, o, t, n,
        H=h, K=d, V=v.shape[-1], **sizes, GATED=gated, STARTED=start is not None, RECORD=False, PRECISION=precision,
        **_launch(q, "scan"),
    )  # fmt: skip
    return o, final, m, p


@_forward.register_fake
def _(q, k, v, beta, g, start):
    b, t, h, d = q.shape
    c = _sizes(q, v)["C"]
    square = (b, h, (t + c - 1) // c, c, c)
    return (
        torch.empty_like(v),
        q.new_empty(b, h, v.shape[-1], d, dtype=torch.float32),
        q.new_empty(square),
        q.new_empty(square),
    )


@torch.library.custom_op("axes::gated_delta_rule_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, start: Tensor | None,
    m: Tensor, p: Tensor, do: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    b, t, h, d = q.shape
    sizes = _sizes(q, v)
    n = triton.cdiv(t, sizes["C"])
    states = q.new_empty(b, h, n, d, v.shape[-1])
    dstates, written, dwritten = torch.empty_like(states), torch.empty_like(v), torch.empty_like(v)
    dq, dk, dv, dstart = (torch.empty_like(x) for x in (q, k, v, dfinal))
    block = min(sizes["BK"], 64)  # two blocks of 64 keys: their sums fit in registers twice over on a processor
    parts = triton.cdiv(d, block)
    dbeta = beta.new_empty(parts, b, t, h)
    gated, precision = g is not None, _precision(q)
    dg = torch.empty_like(dbeta) if gated else beta.new_empty(0)
    gate = g if gated else beta
    shape = dict(H=h, K=d, V=v.shape[-1], **sizes, GATED=gated, PRECISION=precision)
    serial = (b * h * triton.cdiv(v.shape[-1], sizes["BV"]),)
    _scan[serial](
        q, k, v, beta, gate, m, p, dfinal if start is None else start, v, dfinal, states, written, t, n,
        **shape, STARTED=start is not None, RECORD=True, **_launch(q, "states"),
    )  # fmt: skip
    _reverse[serial](
        q, k, beta, gate, m, p, do, dfinal, dstates, dwritten, dstart, t, n,
        **shape, **_launch(q, "reverse"),
    )  # fmt: skip
    _gradients[(b * h * n * parts,)](
        q, k, v, beta, gate, do, states, dstates, written, dwritten, dq, dk, dv, dbeta, dg, beta.numel(), t, n,
        **{**shape, "BK": block}, **_launch(q, "gradients"),
    )  # fmt: skip
    return dq, dk, dv, dbeta.sum(0), dg.sum(0) if gated else dg, dstart


@_backward.register_fake
def _(q, k, v, beta, g, start, m, p, do, dfinal):
    dg = beta.new_empty(0) if g is None else torch.empty_like(beta)
    return (*(torch.empty_like(x) for x in (q, k, v, beta)), dg, torch.empty_like(dfinal))


def _save(ctx, inputs, output) -> None:
    q, k, v, beta, g, start = inputs
    _, _, m, p = output
    ctx.mark_non_differentiable(m, p)
    ctx.save_for_backward(q, k, v, beta, g, start, m, p)
    ctx.set_materialize_grads(True)


def _differentiate(ctx, do, dfinal, _m, _p):
    q, k, v, beta, g, start, m, p = ctx.saved_tensors
    dq, dk, dv, dbeta, dg, dstart = _backward(
        q, k, v, beta, g, start, m, p, do.contiguous(), dfinal.contiguous().float()
    )
    return dq, dk, dv, dbeta, None if g is None else dg, None if start is None else dstart


_forward.register_autograd(_differentiate, setup_context=_save)


# ---- entry -------------------------------------------------------------------------------------------------------


def _wrong(message: str) -> ShapeError:
    return ShapeError(f"gated_delta_rule: {message}")


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and o_t = S_t q_t, the exact recurrence.

    q, k (B, T, H, K) and v (B, T, H, V) in one dtype (bf16, fp16 or fp32); K, V from 1 to 128; any T >= 1.
    beta (B, T, H) the strength, from 0 to 2 for unit keys; g (B, T, H) the log gate, g <= 0, or None for no gate.
    initial_state (B, H, V, K) or None for zero. Returns o (B, T, H, V) in v's dtype and the final state
    (B, H, V, K) in float32. All inputs receive gradients, once: there is no double backward.
    """
    if q.ndim != 4 or v.ndim != 4:
        raise _wrong(f"q, k, v are (B, T, H, D), not {tuple(q.shape)} and {tuple(v.shape)}")
    if k.shape != q.shape:
        raise _wrong(f"k has the shape of q, {tuple(q.shape)}, not {tuple(k.shape)}")
    if v.shape[:3] != q.shape[:3]:
        raise _wrong(f"v agrees with q in (B, T, H) = {tuple(q.shape[:3])}, not {tuple(v.shape[:3])}")
    if 0 in q.shape or 0 in v.shape:
        raise _wrong(f"no dimension is empty: q {tuple(q.shape)}, v {tuple(v.shape)}")
    if max(q.shape[-1], v.shape[-1]) > _LARGEST:
        raise _wrong(f"K and V are at most {_LARGEST}, not {q.shape[-1]} and {v.shape[-1]}")
    if q.dtype not in _DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise _wrong(f"q, k, v share one of bf16, fp16, fp32, not {q.dtype}, {k.dtype}, {v.dtype}")
    for name, x in (("beta", beta), ("g", g)):
        if x is not None and (x.shape != q.shape[:3] or not x.is_floating_point()):
            raise _wrong(f"{name} is floating point of shape (B, T, H) = {tuple(q.shape[:3])}, not {tuple(x.shape)}")
    state = (q.shape[0], q.shape[2], v.shape[3], q.shape[3])
    if initial_state is not None and (initial_state.shape != state or not initial_state.is_floating_point()):
        raise _wrong(f"initial_state is (B, H, V, K) = {state}, not {tuple(initial_state.shape)}")
    for name, x in (("k", k), ("v", v), ("beta", beta), ("g", g), ("initial_state", initial_state)):
        if x is not None and x.device != q.device:
            raise _wrong(f"{name} is on {x.device} and q on {q.device}")
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise _wrong(f"the Triton kernels need a CUDA device, not {q.device}: use axes.scan there")
    o, final, _, _ = _forward(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        beta.float().contiguous(),
        None if g is None else g.float().contiguous(),
        None if initial_state is None else initial_state.float().contiguous(),
    )
    return o, final
