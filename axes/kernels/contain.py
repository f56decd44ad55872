"""What is not finite stays behind its token: chunks that it spoilt are computed again, token by token.

Chunk kernels multiply masked matrices, and zero times not-a-number is not zero: of token t's numbers that are not
finite the tokens before t in its chunk get a NaN. One more launch looks at the last output of every chunk, column by
column; rows of a state do not meet, so that each column of outputs is a recurrence of its own. From the first chunk on
whose last output is not finite the recurrence itself makes outputs and the last state (`step.follow`). docs/finite.md
says why the last output tells. Nothing waits for the host, and the same inputs give the same bits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.common.tiles import reciprocal, unit_rows
from axes.kernels.step import _vector, follow, follow_two

PICKED = True
_ENTRIES = 4096  # of a state in one program
_LOOK = 64  # chunks at once


@triton.jit
def first_bad(o, row, columns, begin, length, V: tl.constexpr, C: tl.constexpr, LOOK: tl.constexpr):
    """From chunk `begin` on the first chunk of C rows whose last output is not finite in these columns; as many as
    there are, if none is. o: of the first row, `row` numbers apart."""
    chunks = (length + C - 1) // C
    bad = chunks
    for n in range(begin, chunks, LOOK):
        chunk = n + tl.arange(0, LOOK)
        last = (tl.minimum((chunk + 1) * C, length) - 1).to(tl.int64)
        seen = (chunk < chunks)[:, None] & (columns < V)[None, :]
        out = tl.load(o + last[:, None] * row + columns[None, :], mask=seen, other=0.0).to(tl.float32)
        finite = tl.min((tl.abs(out) < float("inf")).to(tl.int32), 1)  # a NaN is less than nothing
        bad = tl.minimum(bad, tl.min(tl.where(finite == 0, chunk, chunks), 0))
    return bad, chunks


@triton.jit
def mend(o, out, at, inside):
    """What is finite replaces what was lost, and nothing else."""
    held = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    lost = ~(tl.abs(held) < float("inf")) & (tl.abs(out) < float("inf"))
    tl.store(o + at, out.to(o.dtype.element_ty), mask=inside & lost)


@Kernel
@triton.jit(do_not_specialize=("T",))
def _again(
    q, k, v, beta, g, a, b, bonus, mass, start, o, final, offsets, T,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, LOOK: tl.constexpr, PACKED: tl.constexpr, STARTED: tl.constexpr,
    RULE: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr, STRENGTH: tl.constexpr, OTHER: tl.constexpr,
    BONUS: tl.constexpr, SLOTS: tl.constexpr, EVERY: tl.constexpr, MEAN: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """One unit, head and block of the columns of o. Two SLOTS of a state have blocks g, strengths b, and a erases."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    unit, head, e = pid // (PARTS * HV), pid // PARTS % HV, pid % PARTS * BV + tl.arange(0, BV)
    first, end = unit_rows(offsets, unit, T, PACKED)
    length = (end - first).to(tl.int32)
    outputs = o + (first // EVERY * HV + head) * V
    bad, chunks = first_bad(outputs, HV * V, e, 0, length // EVERY, V, C // EVERY, LOOK)
    if bad < chunks:
        d = tl.arange(0, BK)
        at = ((unit.to(tl.int64) * HV + head) * V + e[:, None]) * (SLOTS * K) + d[None, :]
        inside = (e < V)[:, None] & (d < K)[None, :]
        state = tl.zeros([BV, BK], dtype=tl.float32)
        other = tl.zeros([BV, BK], dtype=tl.float32)
        if STARTED:
            state = tl.load(start + at, mask=inside, other=0.0)
            if SLOTS == 2:
                other = tl.load(start + at + K, mask=inside, other=0.0)
        for t in range(0, length):
            token = first + t
            before = state
            if SLOTS == 2:
                state, other, query = follow_two(
                    state, other, token, head, d, e, q, k, v, g, b, a,
                    HV // GROUP * K, HV // GROUP * K, HV * V, HV * 4, HV * 2, HV * 2, GROUP, K, V, OTHER,
                )  # fmt: skip
            else:
                state, query = follow(
                    state, token, head, d, e, q, k, v, beta, g, a, b,
                    HV // GROUP * K, HV // GROUP * K, HV * V, HV,
                    HV * K if GATE == "channel" else HV * V if GATE == "row" else HV,
                    HV // GROUP * K, HV if RULE == "two" else HV // GROUP * K,
                    GROUP, K, V, RULE, GATE, EARLY, STRENGTH, OTHER, EVERY,
                )  # fmt: skip
            if BONUS:  # what a query reads is the state before its token, and of that token a share of its own
                own = query * _vector(k, token, HV // GROUP * K, head // GROUP, d, K)
                own *= tl.load(bonus + head * K + d, mask=d < K, other=0.0).to(tl.float32)
                out = tl.sum(before * query[None, :], 1) + _vector(v, token, HV * V, head, e, V) * tl.sum(own, 0)
            else:
                out = tl.sum(state * query[None, :], 1)
            if MEAN:  # a mass is of its token and those before it alone
                out *= reciprocal(tl.load(mass + token * HV + head), FLOOR)
            kept = (e < V) & (t >= bad * C)  # of several tokens with one output the last
            tl.store(o + (token // EVERY * HV + head) * V + e, out.to(o.dtype.element_ty), mask=kept)
        tl.store(final + at, state, mask=inside)
        if SLOTS == 2:
            tl.store(final + at + K, other, mask=inside)


def settings(d_k: int, d_v: int, slots: int = 1) -> dict[str, int]:
    side = max(16, power_of_2(d_k))
    rows = max(2, min(_ENTRIES // (slots * side), 64, power_of_2(d_v)))
    return {"BK": side, "BV": rows, "num_warps": 4, "num_stages": 1}


def contain(
    o: Tensor, final: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None,
    start: Tensor | None, offsets: Tensor | None, chunk: int, rule: str, a: Tensor | None = None,
    b: Tensor | None = None, early: bool = False, *, by_rows: bool = False, bonus: Tensor | None = None,
    mass: Tensor | None = None, floor: float = 0.0,
) -> None:  # fmt: skip
    """Make o and the last states again where a chunk kernel with this length of chunks lost them; contiguous tensors.

    q, k, a, b (B, T, H, K), v and o (B, T, HV, V), beta (B, T, HV), g (B, T, HV), (B, T, HV, K) or with `by_rows`
    (B, T, HV, V), start and final (U, HV, V, K); offsets (U + 1,) of packed sequences. rule "write", "delta", "dplr",
    `a` and `early` as in `step.chain_step`, or "two", whose b (B, T, HV) are strengths of writes; bonus (HV, K): o is
    of the states before their tokens, and so much of each token. Of q and o there may be the last of several tokens
    alone. mass (B, T, HV): outputs are over it, held from below in size by a floor above 0.
    """
    wide = "row" if by_rows else "channel"
    gate = "none" if g is None else "head" if g.ndim == 3 else wide
    _walk(
        o, final, q, k, v, beta, g, a, b, bonus, mass, start, offsets, chunk,
        RULE=rule, GATE=gate, EARLY=early, FLOOR=floor,
    )  # fmt: skip


def contain_two(
    o: Tensor, final: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Tensor, write: Tensor, erase: Tensor | None,
    start: Tensor | None, offsets: Tensor | None, chunk: int,
) -> None:  # fmt: skip
    """`contain` of two slots: block (B, T, HV, 2, 2), write and erase (B, T, HV, 2), start and final
    (U, HV, V, 2, K)."""
    _walk(
        o, final, q, k, v, None, block, erase, write, None, None, start, offsets, chunk, 2,
        RULE="", GATE="", EARLY=False, FLOOR=0.0,
    )  # fmt: skip


def _walk(
    o: Tensor, final: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, a: Tensor | None,
    b: Tensor | None, bonus: Tensor | None, mass: Tensor | None, start: Tensor | None, offsets: Tensor | None,
    chunk: int, slots: int = 1, **options: Any,
) -> None:  # fmt: skip
    (batch, length, h, d_k), (hv, d_v) = k.shape, v.shape[2:]
    units = batch if offsets is None else offsets.shape[0] - 1
    sizes = settings(d_k, d_v, slots)
    _again[(units * hv * cdiv(d_v, sizes["BV"]),)](
        q, k, v, *(v if x is None else x for x in (beta, g, a, b, bonus, mass, start)), o, final,
        v if offsets is None else offsets, length,
        HV=hv, GROUP=hv // h, K=d_k, V=d_v, C=chunk, LOOK=_LOOK, PACKED=offsets is not None,
        STARTED=start is not None, STRENGTH=beta is not None, OTHER=a is not None, BONUS=bonus is not None,
        MEAN=mass is not None, SLOTS=slots, EVERY=max(1, length // max(1, q.shape[1])), **options, **sizes,
    )  # fmt: skip


__all__ = ["PICKED", "contain", "contain_two", "first_bad", "mend"]
