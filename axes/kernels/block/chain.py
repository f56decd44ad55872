"""Two states that mix, theta and a momentum buffer, in Triton, exact chunk by chunk: X_t = X_{t-1} M_t + write.

    p_t = sum_i e_t[i] X_{t-1}[i] k_t
    X_t[j] = sum_i X_{t-1}[i] M_t[i, j] + w_t[j] (v_t - p_t) k_t^T            o_t = X_t[0] q_t

What carries a token to another is a product of 2 x 2 blocks, Phi(s+1..t) = M_{s+1} ... M_t. It may be singular, so no
ratio of prefixes gives it: rows Y_s^t = w_s Phi(s+1..t) follow the recurrence Y^t = Y^{t-1} M_t over the C tokens of a
chunk, in float32. Inside a chunk with first state X (each slot as K x V), P^t = Phi(1..t):
    D_ts = Y_s^{t-1} . e_t  (s < t)     Q_ts = Y_s^t[0]  (s <= t)     c_t = P^{t-1} e_t     z_t = P^t[:, 0]
    M = (I + D * K K^T)^-1              S = Q * Q K^T
    u = M [V - sum_a c[a] (K X_a)]      o = sum_a z[a] (Q X_a) + S u
    X'_b = sum_a P^C[a, b] X_a + K^T (Y^C[b] u)
and backwards, from do and dX':
    du = S^T do + sum_b Y^C[b] (K dX'_b)         r = M^T du,  dv = r
    dX_a = sum_b P^C[a, b] dX'_b + Q^T (z[a] do) - K^T (c[a] r)
    dD = -(r u^T) * K K^T,  dQ = (do u^T) * Q K^T,  and the rest are products with X, dX', u and r.
dM, dw and de follow from dD, dQ and the gradients of c, z, Y^C, P^C by the adjoint recurrence, last token first.
Forward: the recurrence, M and S of all chunks, one kernel serial in time. Backward: the recurrence again, the states
again, the serial reverse pass, kernels over all chunks, the adjoint recurrence. No atomics: one order, the same bits.
On Hopper `hopper` has the serial passes of plain shapes that erase, `hopper_pairs` and `hopper_tokens` the kernels over
all chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axes.kernels import contain
from axes.kernels.block import kernels, weights
from axes.kernels.common import inverse
from axes.kernels.common.layout import (
    check_chain,
    contiguous,
    extent,
    layout,
    nothing_read,
    on_device,
    precision,
)
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.common.tiles import TILE
from axes.kernels.common.versions import gluon_refusal

if _GLUON := gluon_refusal() is None:  # on an unknown Triton the module raises, and the portable kernels run
    from axes.kernels.block import hopper
    from axes.kernels.block.hopper_pairs import pairs_backward
    from axes.kernels.block.hopper_tokens import tokens_backward

# ---- launches ------------------------------------------------------------------------------------------------------


def _chunk(q: Tensor) -> int:
    """Tokens of a chunk."""
    return 32 if q.dtype == torch.float32 else 64


# of every kernel with tiles: most keys and most values of a tile, warps, stages, in 16 bit, 16 bit with keys wider
# than 128, and float32. 16 bit: tiles are 64 wide whatever the width. Seen on an H200 with Triton 3.6 (ptxas 12.8):
# scan (32 values, 4 warps, 1 stage) faults with an illegal access; gradients with 2 stages: a copy overwrites a tile
# that a product still reads, since the tile is used in registers too and has one buffer (tests/in_flight.py).
_LAUNCH = {
    "prepare": ((256, 64, 4, 1), (256, 64, 4, 1), (256, 32, 8, 1)),
    "scan": ((256, 64, 8, 2), (256, 64, 8, 1), (256, 32, 8, 1)),
    "states": ((256, 64, 8, 2), (256, 64, 8, 1), (256, 32, 8, 1)),
    "reverse": ((256, 64, 8, 2), (256, 64, 8, 1), (256, 32, 8, 1)),
    "pairs": ((64, 64, 4, 2), (64, 64, 4, 2), (32, 32, 4, 1)),
    "gradients": ((64, 64, 8, 1), (64, 64, 8, 1), (64, 32, 8, 1)),
}


def _launch(q: Tensor, v: Tensor, kernel: str) -> dict[str, int]:
    """Tile sides, warps and pipeline stages: the only ones that were tested."""
    full = q.dtype == torch.float32
    most_k, most_v, warps, stages = _LAUNCH[kernel][2 if full else q.shape[-1] > 128]
    least = TILE if full else min(64, most_v)
    d_k, d_v = (power_of_2(x.shape[-1]) for x in (q, v))
    sides = {"BK": min(max(least, d_k), most_k), "BV": min(max(least, d_v), most_v)}
    return {**sides, "num_warps": warps, "num_stages": stages}


def _shape(q: Tensor, v: Tensor) -> dict[str, int]:
    return {"H": q.shape[2], "HV": v.shape[2], "K": q.shape[-1], "V": v.shape[-1], "C": _chunk(q)}


def _weights(
    q: Tensor, v: Tensor, block: Tensor, write: Tensor, erase: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, what readers and writers see of a chunk's first and last state, and P^C."""
    c, hv = _chunk(q), v.shape[2]
    cut = layout(q.shape[0], q.shape[1], c, cu_seqlens)
    recurrence = block.new_empty(cut.slots * hv, 2, c, c)
    carries, totals = block.new_empty(cut.slots * hv, 8, c), block.new_empty(cut.slots * hv, 4)
    weights.recurrence[(cut.slots * hv,)](
        block, write, write if erase is None else erase, recurrence, carries, totals,
        block if cut.offsets is None else cut.offsets, block if cut.units_of_slots is None else cut.units_of_slots,
        cut.length, cut.chunks, HV=hv, C=c, ERASE=erase is not None, PACKED=cut.packed, num_warps=1, num_stages=1,
    )  # fmt: skip
    return recurrence, carries, totals


def _forward(
    q: Tensor, k: Tensor, v: Tensor, block: Tensor, write: Tensor, erase: Tensor | None, start: Tensor | None,
    cu_seqlens: Tensor | None, record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """o, final, and S and M of every chunk."""
    shape, erased = _shape(q, v), erase is not None
    c, hv = _chunk(q), v.shape[2]
    cut = layout(q.shape[0], q.shape[1], c, cu_seqlens)
    offsets = block if cut.offsets is None else cut.offsets
    units = block if cut.units_of_slots is None else cut.units_of_slots
    o, final = torch.empty_like(v), block.new_empty(cut.units, hv, v.shape[-1], 2, q.shape[-1])
    scores = q.new_empty(cut.slots, hv, c, c)
    m = q.new_empty(cut.slots, hv, c, c) if erased else scores
    exact = precision(q)
    with on_device(q):
        recurrence, carries, totals = _weights(q, v, block, write, erase, cu_seqlens)
        tiles = _launch(q, v, "prepare")
        kernels.prepare[(cut.slots * hv,)](
            q, k, erase if erased else write, recurrence, scores, offsets, units,
            cut.length, cut.chunks, **shape, ERASE=erased, PACKED=cut.packed, PRECISION=exact, **tiles,
        )  # fmt: skip
        if erased:
            kernels.solve[(cut.slots * hv,)](
                recurrence, m, C=c, **inverse.constants(q.dtype, c, 1), num_warps=1, num_stages=1
            )
        if erased and not cut.packed and _GLUON and hopper.fits(q, v):
            hopper.walk(q, k, v, carries, totals, m, scores, start, final, o)
        else:
            tiles = _launch(q, v, "scan")
            kernels.scan[(cut.units * hv * cdiv(v.shape[-1], tiles["BV"]),)](
                q, k, v, carries, totals, m, scores, final if start is None else start, o, final, o, o,
                offsets, cut.length, cut.chunks, **shape, ERASE=erased, STARTED=start is not None,
                RECORD=False, PACKED=cut.packed, PRECISION=exact, **tiles,
            )  # fmt: skip
        if contain.PICKED:
            contain.contain_two(o, final, q, k, v, block, write, erase, start, cut.offsets, cut.chunk)
    return o, final, ([scores, m] if erased else [scores]) if record else []


def _shapes(q, k, v, block, write, erase, start, cu_seqlens, record):
    c, hv = _chunk(q), v.shape[2]
    units, slots = extent(q.shape[0], q.shape[1], c, cu_seqlens)
    squares = [q.new_empty(slots, hv, c, c) for _ in range(record * (1 if erase is None else 2))]
    return torch.empty_like(v), block.new_empty(units, hv, v.shape[-1], 2, q.shape[-1]), squares


def _backward(
    q: Tensor, k: Tensor, v: Tensor, block: Tensor, write: Tensor, erase: Tensor | None, start: Tensor | None,
    cu_seqlens: Tensor | None, kept: list[Tensor], do: Tensor, dfinal: Tensor,
) -> list[Tensor]:  # fmt: skip
    shape, erased = _shape(q, v), erase is not None
    (b, t, h, d), hv, c = q.shape, v.shape[2], _chunk(q)
    cut = layout(b, t, c, cu_seqlens)
    offsets = block if cut.offsets is None else cut.offsets
    units = block if cut.units_of_slots is None else cut.units_of_slots
    exact, wide = precision(q), v.shape[-1]
    states = q.new_empty(cut.slots * hv, 2, wide, d)
    dstates = torch.empty_like(states)
    written = torch.empty_like(v) if erased else v
    dv, dblock, dwrite, dstart = (torch.empty_like(x) for x in (v, block, write, dfinal))
    derase = torch.empty_like(write) if erased else dwrite
    grouped = hv != h  # one gradient a value head, summed over the heads that share a key
    dq, dk = (q.new_empty(b, t, hv, d, dtype=torch.float32 if grouped else q.dtype) for _ in range(2))
    tiles = {kernel: _launch(q, v, kernel) for kernel in ("states", "reverse", "pairs", "gradients")}
    parts = cdiv(d, tiles["gradients"]["BK"])
    dpairs = block.new_empty(cut.slots * hv, 2, c, c)
    dcarries = block.new_empty(parts, cut.slots * hv, 6, c)
    dtotals = block.new_empty(parts, cut.slots * hv, 4)
    gate = write if erase is None else erase
    scores, inverted = kept[0], kept[-1]
    reads = torch.empty_like(scores)
    erases = torch.empty_like(inverted) if erased else reads
    heads = cut.units * hv
    common = {"ERASE": erased, "PACKED": cut.packed, "PRECISION": exact}
    with on_device(q):
        recurrence, carries, totals = _weights(q, v, block, write, erase, cu_seqlens)
        plain = erased and not cut.packed and _GLUON and hopper.fits(q, v)
        if plain:
            numbers = carries, totals, inverted, scores
            hopper.walk(q, k, v, *numbers, start, dfinal, written, states)
            hopper.walk(q, k, do, *numbers, dfinal, dstart, dv, dstates, back=True)
        else:
            kernels.scan[(heads * cdiv(wide, tiles["states"]["BV"]),)](
                q, k, v, carries, totals, inverted, scores, dfinal if start is None else start, v, dfinal, states,
                written if erased else states, offsets, cut.length, cut.chunks, **shape,
                STARTED=start is not None, RECORD=True, **common, **tiles["states"],
            )  # fmt: skip
            kernels.reverse[(heads * cdiv(wide, tiles["reverse"]["BV"]),)](
                q, k, carries, totals, inverted, scores, do, dfinal, dstates, dv, dstart, offsets, cut.length,
                cut.chunks, **shape, **common, **tiles["reverse"],
            )  # fmt: skip
        if plain:
            pairs_backward(q, k, gate, recurrence, do, written, dv, dpairs, reads, erases)
        else:
            kernels.pairs[(cut.slots * hv,)](
                q, k, gate, recurrence, do, written, dv, dpairs, reads, erases, offsets, units, cut.length, cut.chunks,
                **shape, **common, **tiles["pairs"],
            )  # fmt: skip
        if plain and not grouped:
            tokens_backward(q, k, carries, do, written, dv, states, dstates, reads, erases, dq, dk, dcarries, dtotals)
        else:
            kernels.gradients[(cut.slots * hv * parts,)](
                q, k, carries, do, written, dv, states, dstates, reads, erases, dq, dk, dcarries, dtotals,
                offsets, units, cut.length, cut.chunks, **shape, **common, **tiles["gradients"],
            )  # fmt: skip
        weights.adjoint[(cut.slots * hv,)](
            block, gate, recurrence, carries, dpairs, dcarries, dtotals, dblock, dwrite, derase,
            offsets, units, cut.length, cut.chunks,
            HV=hv, C=c, PARTS=parts, ERASE=erased, PACKED=cut.packed, num_warps=1, num_stages=1,
        )  # fmt: skip
    if grouped:
        dq, dk = (x.unflatten(2, (h, hv // h)).sum(3).to(q.dtype) for x in (dq, dk))
    return [dq, dk, dv, dblock, dwrite, derase, dstart]


_chain = Differentiable("block_chain", _forward, _backward, _shapes, gradients=7)


# ---- entry ---------------------------------------------------------------------------------------------------------


def block_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Tensor,
    write: Tensor,
    erase: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """X_t[j] = sum_i X_{t-1}[i] M_t[i, j] + w_t[j] (v_t - sum_i e_t[i] X_{t-1}[i] k_t) k_t^T and o_t = X_t[0] q_t.

    q, k (B, T, H, K) and v (B, T, HV, V) in one dtype (bf16, fp16 or fp32), HV a multiple of H; K, V from 1 to 256.
    block (B, T, HV, 2, 2) is M, source slot first; write (B, T, HV, 2) is w; erase (B, T, HV, 2) is e, or None if
    nothing is erased. Any numbers: blocks may be singular. initial_state (B, HV, V, 2, K) or None for zero.
    cu_seqlens (U + 1,) int32 or int64: B = 1 and sequences one after another, with U initial and final states.
    Returns o (B, T, HV, V) in v's dtype and the final state (U or B, HV, V, 2, K) in float32. All inputs receive
    gradients, once: there is no double backward. Raises ShapeError for other shapes, dtypes or devices.
    """
    pairs = {"block": (block, (2, 2)), "write": (write, (2,)), "erase": (erase, (2,))}
    units = check_chain("block_chain", q, k, v, cu_seqlens, initial_state, pairs, (2,))
    if v.shape[:3].numel() == 0:
        return nothing_read(v, (units, *v.shape[2:], 2, q.shape[3]), initial_state)
    numbers = (None if x is None else x.float() for x in (block, write, erase, initial_state))
    matrix, weights, erased, start = contiguous(*numbers)
    queries, keys, values = contiguous(q, k, v)
    o, final = _chain(queries, keys, values, matrix, weights, erased, start, cu_seqlens)
    return o, final
