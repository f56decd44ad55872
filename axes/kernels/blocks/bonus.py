"""`leave_bonus`: reads, normed in every head, with what the current token adds, times a gate, in one launch and back.

    n = (y - mean y) (var y + eps)^-1/2,    m = <q, rho k>,    u = (w n + c + m v) g          of every head

Backwards, with e = du g and r = (var y + eps)^-1/2,
    dg = du u / g,   dv = m e,   dm = <e, v>,   dq = dm rho k,   dk = dm rho q,   drho = sum dm q k,
    dw = sum e n,    dc = sum e,   dy = r (e w - mean(e w) - n mean(e w n)):
a program adds up the parameters' over its tokens, and the sums of programs are added in their order. Nothing but the
arguments is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.blocks.heads import columns, cut, load, store
from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import LARGEST, on_device
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import power_of_2

# ---- kernels: a head of some tokens ----------------------------------------------------------------------------------


@triton.jit
def _normed(y, D: tl.constexpr, DP: tl.constexpr, EPS: tl.constexpr):
    """y normed, zero past the D numbers of a head, and the factor."""
    centred = tl.where(tl.arange(0, DP)[None, :] < D, y - (tl.sum(y, 1) / D)[:, None], 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, 1) / D + EPS)[:, None]
    return centred * r, r


@Kernel
@triton.jit(do_not_specialize=["tokens", "steps"])
def _leave(
    y, q, k, v, gate, rho, weight, bias, u, tokens, steps,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    p, w, c = columns(rho, K, KP, H), columns(weight, D, DP, H), columns(bias, D, DP, H)
    for i in range(steps):
        n, _ = _normed(load(y, i, steps, tokens, H, D, DP, BR), D, DP, EPS)
        m = load(q, i, steps, tokens, H, K, KP, BR) * p * load(k, i, steps, tokens, H, K, KP, BR)
        read = w * n + c + tl.sum(m, 1)[:, None] * load(v, i, steps, tokens, H, D, DP, BR)
        store(u, read * load(gate, i, steps, tokens, H, D, DP, BR), i, steps, tokens, H, D, DP, BR)


@Kernel
@triton.jit(do_not_specialize=["tokens", "steps"])
def _leave_backward(
    y, q, k, v, gate, rho, weight, bias, du, dy, dq, dk, dv, dgate, sums, tokens, steps,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """sums (programs, H, K + 2 D): of rho, the weight and the bias."""
    p, w, c = columns(rho, K, KP, H), columns(weight, D, DP, H), columns(bias, D, DP, H)
    sp = tl.zeros([BR, KP], dtype=tl.float32)
    sw = tl.zeros([BR, DP], dtype=tl.float32)
    sc = tl.zeros([BR, DP], dtype=tl.float32)
    for i in range(steps):
        n, r = _normed(load(y, i, steps, tokens, H, D, DP, BR), D, DP, EPS)
        query, key = load(q, i, steps, tokens, H, K, KP, BR), load(k, i, steps, tokens, H, K, KP, BR)
        value, d = load(v, i, steps, tokens, H, D, DP, BR), load(du, i, steps, tokens, H, D, DP, BR)
        m = tl.sum(query * p * key, 1)[:, None]
        store(dgate, d * (w * n + c + m * value), i, steps, tokens, H, D, DP, BR)
        d *= load(gate, i, steps, tokens, H, D, DP, BR)
        dm = tl.sum(d * value, 1)[:, None]
        store(dv, d * m, i, steps, tokens, H, D, DP, BR)
        store(dq, dm * p * key, i, steps, tokens, H, K, KP, BR)
        store(dk, dm * p * query, i, steps, tokens, H, K, KP, BR)
        sp += dm * query * key
        sw += d * n
        sc += d
        d *= w
        d -= (tl.sum(d, 1) / D)[:, None] + n * (tl.sum(d * n, 1) / D)[:, None]
        store(dy, r * d, i, steps, tokens, H, D, DP, BR)
    column, key_column = tl.arange(0, DP), tl.arange(0, KP)
    sums += tl.program_id(0) * (K + 2 * D)
    tl.store(sums + key_column, tl.sum(sp, 0), mask=key_column < K)
    tl.store(sums + K + column, tl.sum(sw, 0), mask=column < D)
    tl.store(sums + K + D + column, tl.sum(sc, 0), mask=column < D)


# ---- launches --------------------------------------------------------------------------------------------------------


def _forward(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, rho: Tensor, weight: Tensor, bias: Tensor, eps: float,
    record: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    u, (programs, sizes), keys = torch.empty_like(gate), cut(y), q.shape[-1]
    with on_device(y):
        _leave[(programs * y.shape[2],)](
            y, q, k, v, gate, rho, weight, bias, u, **sizes, K=keys, KP=power_of_2(keys), EPS=eps
        )
    return u, []


def _backward(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, rho: Tensor, weight: Tensor, bias: Tensor, eps: float,
    kept: list[Tensor], du: Tensor,
) -> list[Tensor]:  # fmt: skip
    dy, dq, dk, dv, dgate = (torch.empty_like(x) for x in (y, q, k, v, gate))
    (programs, sizes), keys, d = cut(y), q.shape[-1], y.shape[-1]
    sums = y.new_empty(programs, y.shape[2], keys + 2 * d, dtype=torch.float32)
    with on_device(y):
        _leave_backward[(programs * y.shape[2],)](
            y, q, k, v, gate, rho, weight, bias, du, dy, dq, dk, dv, dgate, sums, **sizes, K=keys, KP=power_of_2(keys),
            EPS=eps,
        )  # fmt: skip
    total = sums.sum(0).split((keys, d, d), -1)
    own = [x.reshape(like.shape).to(like.dtype) for x, like in zip(total, (rho, weight, bias), strict=True)]
    return [dy, dq, dk, dv, dgate, *own]


def _shapes(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, rho: Tensor, weight: Tensor, bias: Tensor, eps: float,
    record: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    return torch.empty_like(gate), []


_leaving = Differentiable("leave_bonus", _forward, _backward, _shapes, gradients=8)


def leave_bonus(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, rho: Tensor, weight: Tensor, bias: Tensor, *,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """(B, T, H D) in the gate's dtype, of reads y and values v (B, T, H, D), queries and keys (B, T, H, K).

    gate: (B, T, H D), multiplies as it is.  rho: (H, K).  weight, bias: (H D), of the norm of every head.
    All receive gradients, once.  Raises ShapeError on what does not fit.
    """
    who = "leave_bonus"
    if y.ndim != 4 or 0 in y.shape or max(y.shape[-1], q.shape[-1]) > LARGEST:
        raise ShapeError(f"{who}: y is (B, T, H, D), not empty, widths up to {LARGEST}, not {tuple(y.shape)}")
    lead, channels = y.shape[:3], y.shape[2] * y.shape[3]
    keys = (*lead, q.shape[-1])
    wanted = {
        "q": (q, keys), "k": (k, keys), "v": (v, y.shape), "gate": (gate, (*lead[:2], channels)),
        "rho": (rho, keys[2:]), "weight": (weight, (channels,)), "bias": (bias, (channels,)),
    }  # fmt: skip
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ShapeError(f"{who}: {name} is {tuple(shape)}, not {tuple(x.shape)}")
    made: Tensor = _leaving(*[x.contiguous() for x in (y, q, k, v, gate, rho, weight, bias)], eps)[0]
    return made
