"""`removal`: keys and logits of rates to the three vectors of a state that forgets what it replaces, and back.

    rate = sigmoid(z + c),    n = k xi / |k xi|,    key = k (1 + alpha (rate - 1)),    a = -n,    b = rate n

of every head, |.| with eps^2 under the root. Backwards, s = |k xi|^-1, dn = rate db - da, dr = n db + k alpha dkey,
    dz = dr rate (1 - rate),    du = s (dn - n <n, dn>),    dk = dkey (1 + alpha (rate - 1)) + xi du,
    dc = sum dz,    dxi = sum k du,    dalpha = sum dkey k (rate - 1):
a program adds up the last three over its tokens, and the sums of programs are added in their order. Nothing but the
arguments is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.blocks.functions import sigmoid
from axes.kernels.blocks.heads import columns, cut, load, store
from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import LARGEST, on_device
from axes.kernels.common.operators import Differentiable

# ---- kernels: a head of some tokens ----------------------------------------------------------------------------------


@triton.jit
def _made(k, z, xi, alpha, c, EPS: tl.constexpr):
    """The rate, the unit vector with its factor, and what multiplies the key."""
    rate = sigmoid(z + c)
    u = k * xi
    s = tl.rsqrt(tl.sum(u * u, 1) + EPS * EPS)[:, None]
    return rate, u * s, s, 1.0 + alpha * (rate - 1.0)


@Kernel
@triton.jit(do_not_specialize=["tokens", "steps"])
def _removal(
    k, z, xi, alpha, bias, key, a, b, tokens, steps,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    x, al, c = columns(xi, D, DP, H), columns(alpha, D, DP, H), columns(bias, D, DP, H)
    for n in range(steps):
        own = load(k, n, steps, tokens, H, D, DP, BR)
        rate, unit, _, share = _made(own, load(z, n, steps, tokens, H, D, DP, BR), x, al, c, EPS)
        store(key, own * share, n, steps, tokens, H, D, DP, BR)
        store(a, -unit, n, steps, tokens, H, D, DP, BR)
        store(b, rate * unit, n, steps, tokens, H, D, DP, BR)


@Kernel
@triton.jit(do_not_specialize=["tokens", "steps"])
def _removal_backward(
    k, z, xi, alpha, bias, dkey, da, db, dk, dz, sums, tokens, steps,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """sums (programs, 3, H, D): of xi, alpha and the bias."""
    x, al, c = columns(xi, D, DP, H), columns(alpha, D, DP, H), columns(bias, D, DP, H)
    sx = tl.zeros([BR, DP], dtype=tl.float32)
    sa = tl.zeros([BR, DP], dtype=tl.float32)
    sc = tl.zeros([BR, DP], dtype=tl.float32)
    for n in range(steps):
        own = load(k, n, steps, tokens, H, D, DP, BR)
        rate, unit, s, share = _made(own, load(z, n, steps, tokens, H, D, DP, BR), x, al, c, EPS)
        g = load(dkey, n, steps, tokens, H, D, DP, BR)
        h = load(db, n, steps, tokens, H, D, DP, BR)
        dunit = rate * h - load(da, n, steps, tokens, H, D, DP, BR)
        du = s * (dunit - unit * tl.sum(unit * dunit, 1)[:, None])
        logit = (unit * h + own * al * g) * rate * (1.0 - rate)
        store(dz, logit, n, steps, tokens, H, D, DP, BR)
        store(dk, g * share + x * du, n, steps, tokens, H, D, DP, BR)
        sx += own * du
        sa += g * own * (rate - 1.0)
        sc += logit
    column = tl.arange(0, DP)
    sums += (tl.program_id(0) // H * 3 * H + tl.program_id(0) % H) * D + column
    tl.store(sums, tl.sum(sx, 0), mask=column < D)
    tl.store(sums + H * D, tl.sum(sa, 0), mask=column < D)
    tl.store(sums + 2 * H * D, tl.sum(sc, 0), mask=column < D)


# ---- launches --------------------------------------------------------------------------------------------------------


def _forward(
    k: Tensor, z: Tensor, xi: Tensor, alpha: Tensor, bias: Tensor, eps: float, record: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    key, a, b = torch.empty_like(k), torch.empty_like(k), torch.empty_like(k)
    programs, sizes = cut(k)
    with on_device(k):
        _removal[(programs * k.shape[2],)](k, z, xi, alpha, bias, key, a, b, **sizes, EPS=eps)
    return key, a, b, []


def _backward(
    k: Tensor, z: Tensor, xi: Tensor, alpha: Tensor, bias: Tensor, eps: float, kept: list[Tensor],
    dkey: Tensor, da: Tensor, db: Tensor,
) -> list[Tensor]:  # fmt: skip
    dk, dz, (programs, sizes) = torch.empty_like(k), torch.empty_like(z), cut(k)
    sums = k.new_empty(programs, 3, *k.shape[2:], dtype=torch.float32)
    with on_device(k):
        _removal_backward[(programs * k.shape[2],)](k, z, xi, alpha, bias, dkey, da, db, dk, dz, sums, **sizes, EPS=eps)
    total = sums.sum(0).flatten(1)
    return [dk, dz, *[total[i].to(x.dtype, copy=True) for i, x in enumerate((xi, alpha, bias))]]


def _shapes(
    k: Tensor, z: Tensor, xi: Tensor, alpha: Tensor, bias: Tensor, eps: float, record: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    return torch.empty_like(k), torch.empty_like(k), torch.empty_like(k), []


_removed = Differentiable("removal", _forward, _backward, _shapes, gradients=5)


def removal(
    k: Tensor, z: Tensor, xi: Tensor, alpha: Tensor, bias: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(key, a, b), each (B, T, H, D) in k's dtype, of keys k (B, T, H, D) and logits z (B, T, H D) of the rates.

    xi, alpha, bias (H D).  All receive gradients, once.  Raises ShapeError on what does not fit.
    """
    who = "removal"
    if k.ndim != 4 or 0 in k.shape or k.shape[-1] > LARGEST:
        raise ShapeError(f"{who}: k is (B, T, H, D), not empty, D up to {LARGEST}, not {tuple(k.shape)}")
    channels = k.shape[2] * k.shape[3]
    if z.shape != (*k.shape[:2], channels) or z.dtype != k.dtype:
        raise ShapeError(f"{who}: z is {k.dtype} {(*k.shape[:2], channels)}, not {z.dtype} {tuple(z.shape)}")
    for name, x in (("xi", xi), ("alpha", alpha), ("the bias", bias)):
        if x.shape != (channels,):
            raise ShapeError(f"{who}: {name} is {(channels,)}, not {tuple(x.shape)}")
    key, a, b = _removed(*[x.contiguous() for x in (k, z, xi, alpha, bias)], eps)
    return key, a, b
