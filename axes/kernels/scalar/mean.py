"""Reads over the mass of what was written, by the chain's own passes: the normaliser of linear attention and of mLSTM.

    y_t = S_t q_t,   m_t = n_t . q_t,   n_t = e^{g_t} n_{t-1} + beta_t k_t,   o_t = y_t / c_t,
c = m, or max(|m|, floor), and o = 0 where c = 0. n is the state's row of a value that is the number one, so that with
    dy_t = do_t / c_t,     dm_t = -(do_t . o_t) / c_t, times the sign of m_t, and 0 below a floor
a pair's weight in the gradients of queries, keys, strengths and gates is dy_t . v_s + dm_t where the chain alone has
dy_t . v_s, and the states have the columns n, and r on the way back, beside them: no pass over keys and queries is the
mass's own. What is kept is a number a token. Forward, the warpgroup that makes scores adds them up (m_t less what n
before the chunk gives), and n and what queries find in it are products with eight columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels import contain
from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import check_chain, check_like, on_device
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.tiles import load_line, load_tile, reciprocal
from axes.kernels.common.versions import gluon_refusal
from axes.kernels.scalar.sizes import segments_of
from axes.kernels.scalar.tiles import chunk_span

if GLUON := gluon_refusal() is None:
    from axes.kernels.scalar import hopper_write
    from axes.kernels.scalar.hopper_norm import parted
    from axes.kernels.scalar.hopper_write import put_numbers

    @Kernel
    @triton.jit(do_not_specialize=["T", "N", "HV"])
    def _numbers_back(
        beta, g, mass, o, do, numbers, T, N, HV,
        V: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, FLOOR: tl.constexpr,
    ):  # fmt: skip
        """What scales the tiles of one chunk of one head on the way back."""
        pid = tl.program_id(0).to(tl.int64)
        head, first, rows, index = chunk_span(None, None, pid, T, 1, T, N, HV, C, False)
        at = numbers + index * (8 * C) + tl.arange(0, C)
        put_numbers(at, beta, g, first, rows, head, HV, C, GATED, WEIGHTED)
        d = tl.arange(0, V)
        heard = load_tile(do, first, rows, d, head, HV, V, C).to(tl.float32)
        read = load_tile(o, first, rows, d, head, HV, V, C).to(tl.float32)
        m = load_line(mass, first, rows, head, HV, C)
        by = reciprocal(m, FLOOR)
        change = -tl.sum(heard * read, 1) * by
        if FLOOR > 0:
            change = tl.where(tl.abs(m) < FLOOR, 0.0, tl.where(m < 0, -change, change))
        tl.store(at + 4 * C, by)
        tl.store(at + 5 * C, change)
        if WEIGHTED:
            digits, power = parted(load_line(beta, first, rows, head, HV, C))
            tl.store(at + 6 * C, digits)
            tl.store(at + 7 * C, power)


def fits(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether `mean_chain` may be called: what Hopper's kernel of rule "write" takes, in one segment."""
    if cu_seqlens is not None or not GLUON or not hopper_write.fits(q, v):
        return False
    (b, t, hv, d_v), d_k = v.shape, q.shape[3]
    return segments_of(b, t, hv, d_k, d_v, q.dtype, False) == 1


def _cut(v: Tensor) -> tuple[int, int, int]:
    return 1, v.shape[1], cdiv(v.shape[1], 64)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, start: Tensor | None, norm: Tensor,
    floor: float, record: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    o, final, last, mass = (torch.empty_like(x) for x in _outputs(q, v))
    norms = hopper_write.Norms(norm, last, None, mass, floor)
    with on_device(q):
        numbers = hopper_write.numbers(beta, g, v, *_cut(v))
        hopper_write.mix("o", q, k, v, beta, g, numbers, o, start, final, cut=_cut(v), norms=norms)
        if contain.PICKED:
            contain.contain(o, final, q, k, v, beta, g, start, None, 64, "write", mass=mass, floor=floor)
    return o, final, last, [mass] if record else []


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like o, the last state, n behind it, and masses; nothing is in them."""
    full, (b, t, hv, d_v), d_k = torch.float32, v.shape, q.shape[3]
    states, norms = q.new_empty(b, hv, d_v, d_k, dtype=full), q.new_empty(b, hv, d_k, dtype=full)
    return torch.empty_like(v), states, norms, q.new_empty(b, t, hv, dtype=full)


def _shapes(q, k, v, beta, g, start, norm, floor, record):
    *outputs, mass = _outputs(q, v)
    return *outputs, [mass] if record else []


def _backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, start: Tensor | None, norm: Tensor,
    floor: float, kept: list[Tensor], do: Tensor | None, dfinal: Tensor | None, dlast: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    o, mass = kept
    (b, t, hv, d_v), d_k, cut = v.shape, q.shape[3], _cut(v)
    n, full = cut[2], torch.float32
    do = torch.zeros_like(v) if do is None else do
    dlast = torch.zeros_like(norm) if dlast is None else dlast
    dq, dk = (v.new_empty(b, t, hv, d_k) for _ in range(2))
    dv, dstart, dnorm, unread = torch.empty_like(v), v.new_empty(b, hv, d_v, d_k, dtype=full), *_like(norm, norm)
    dbeta, dg = _like(beta, g)
    trace, dots = (None, None) if g is None else (v.new_empty(b * n, hv, d_v, d_k), torch.empty_like(g))
    norms = hopper_write.Norms(norm, unread, v.new_empty(b, hv, n, d_k, dtype=full), mass, floor)
    behind = norms._replace(first=dlast, last=dnorm)
    numbers = v.new_empty(b, hv, n, 8, 64, dtype=full)
    given: dict[str, Any] = dict(beta=beta, g=g, made=numbers, cut=cut)
    with on_device(q):
        _numbers_back[(b * n * hv,)](
            *(mass if x is None else x for x in (beta, g)), mass, o, do, numbers, t, n, hv,
            V=d_v, C=64, GATED=g is not None, WEIGHTED=beta is not None, FLOOR=floor, num_warps=4,
        )  # fmt: skip
        mix = hopper_write.mix
        mix("dq", do, v, k, out=dq, start=start, own=q, trace=trace, dots=dots, norms=norms, **given)
        mix("dv", k, q, do, out=dv, start=dfinal, final=dstart, own=v, norms=behind, **given)
        given |= dict(trace=trace, dots=dots, dbeta=dbeta, dg=dg)
        mix("dk", v, do, q, out=dk, start=dfinal, own=k, norms=behind, **given)
    if hv > q.shape[2]:
        dq, dk = (x.view(*q.shape[:3], -1, d_k).sum(3) for x in (dq, dk))
    return [dq, dk, dv, dbeta, dg, dstart, dnorm]


def _like(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if x is None else torch.empty_like(x) for x in tensors)


_chain = Differentiable("mean_chain", _forward, _backward, _shapes, gradients=7, missing=True, reads=1)


def mean_chain(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, start: Tensor | None, norm: Tensor,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What `scalar_chain` with rule "write" reads, over what `mass_chain` finds, or over max(|mass|, floor).

    Tensors as these take them, for what `fits`; norm (B, HV, K), start may be None for zero. Returns o, the last state
    and the last n; all inputs receive gradients, once. Raises ShapeError on what does not fit.
    """
    who = "mean_chain"
    check_chain(who, q, k, v, None, start, {"beta": (beta, ()), "g": (g, ())})
    check_like(who, "norm", norm, (v.shape[0], v.shape[2], q.shape[3]), q.device)
    given = (None if x is None else x.float().contiguous() for x in (beta, g, start, norm))
    made: tuple[Tensor, Tensor, Tensor] = _chain(q.contiguous(), k.contiguous(), v.contiguous(), *given, floor)
    return made


__all__ = ["fits", "mean_chain"]
