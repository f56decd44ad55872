"""What is not finite stays behind its token where levels weigh a chain: chunks that it spoilt are read again.

    o_i = sum_{j <= i} w_i[bitlength(i xor j)] beta_j (k_j A_{j+1} .. A_i q_i) v_j,    A_t = e^{g_t} (I - a_t k_t^T)

or A_t = e^{g_t} where nothing is erased. As in `axes.kernels.contain`, one more launch looks at the last output of
every chunk. Where that is not finite, a walk back over the tokens takes the queries of the chunk along, q <- A_j q, and
so meets none that is later than a query. What is finite then replaces what was lost. Where the chunk's own levels are
all that is read, the walk ends where it begins.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import power_of_2
from axes.kernels.common.tiles import floored
from axes.kernels.contain import first_bad, mend

_LOOK = 16  # chunks at once


@Kernel
@triton.jit(do_not_specialize=["T"])
def _again(
    q, k, v, beta, g, a, w, o, T,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, LOOK: tl.constexpr, STRONG: tl.constexpr, ERASE: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """One head of one sequence. INSIDE: of chunks that begin empty."""
    pid = tl.program_id(0)
    first, head = (pid // HV).to(tl.int64) * T, pid % HV
    shared: tl.constexpr = HV // GROUP
    keys, values = tl.arange(0, BK), tl.arange(0, BV)
    head_of_o = o + (first * HV + head) * V
    bad, chunks = first_bad(head_of_o, HV * V, values, 0, T, V, C, LOOK)
    while bad < chunks:
        i = bad * C + tl.arange(0, C)
        line = (first + i) * HV + head
        from_q = ((first + i) * shared + head // GROUP)[:, None] * K + keys[None, :]
        query = tl.load(q + from_q, mask=(i < T)[:, None] & (keys < K)[None, :], other=0.0).to(tl.float32)
        gone = bad * 0  # whether every later query is lost
        out = tl.zeros([C, BV], tl.float32)
        end = tl.minimum((bad + 1) * C, T)
        begin = bad * C if INSIDE else bad * 0
        for back in range(0, end - begin):
            j = end - 1 - back
            from_ = (first + j) * HV + head
            from_k = ((first + j) * shared + head // GROUP) * K + keys
            key = tl.load(k + from_k, mask=keys < K, other=0.0).to(tl.float32)
            value = tl.load(v + from_ * V + values, mask=values < V, other=0.0).to(tl.float32)
            gate = tl.exp(floored(tl.load(g + from_).to(tl.float32)))
            lost = tl.min((tl.abs(key) < float("inf")).to(tl.int32), 0) == 0
            lost |= gate != gate
            if STRONG:
                value *= tl.load(beta + from_).to(tl.float32)
            level = tl.zeros([C], tl.int32)
            for bit in tl.static_range(W - 1):
                level += (((i ^ j) >> bit) > 0).to(tl.int32)
            sees = j <= i
            weight = tl.load(w + line * W + level, mask=sees & (i < T), other=0.0).to(tl.float32)
            met = tl.sum(query * key[None, :], 1)
            out += tl.where(sees[:, None], (weight * met)[:, None] * value[None, :], 0.0)
            moved = query
            if ERASE:
                eraser = tl.load(a + from_k, mask=keys < K, other=0.0).to(tl.float32)
                lost |= tl.min((tl.abs(eraser) < float("inf")).to(tl.int32), 0) == 0
                moved = query - met[:, None] * eraser[None, :]
            query = tl.where(sees[:, None], moved * gate, query)
            lost |= tl.max(((tl.abs(value) < float("inf")) & (values < V)).to(tl.int32), 0) == 0
            if not INSIDE:
                gone = tl.maximum(gone, lost.to(tl.int32))
        mend(o, out, line[:, None] * V + values[None, :], (i < T)[:, None] & (values < V)[None, :])
        bad, chunks = first_bad(head_of_o, HV * V, values, bad + 1 + gone * chunks, T, V, C, LOOK)


def contain(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor, a: Tensor | None, w: Tensor,
    chunk: int, inside: bool,
) -> None:  # fmt: skip
    """Read again, into o, what kernels with this length of chunks lost to later tokens; contiguous tensors.

    q, k, a (B, T, H, K), v and o (B, T, HV, V), beta and g (B, T, HV), w (B, T, HV, levels).
    """
    (batch, length, h, d_k), (hv, d_v) = q.shape, v.shape[2:]
    _again[(batch * hv,)](
        q, k, v, v if beta is None else beta, g, v if a is None else a, w, o, length,
        HV=hv, GROUP=hv // h, K=d_k, V=d_v, W=w.shape[3], BK=max(16, power_of_2(d_k)), BV=max(16, power_of_2(d_v)),
        C=chunk, LOOK=_LOOK, STRONG=beta is not None, ERASE=a is not None, INSIDE=inside, num_warps=8, num_stages=1,
    )  # fmt: skip


__all__ = ["contain"]
