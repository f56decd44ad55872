"""The chunk form of the block chain in eager torch, its products rounded as those of the kernels are, and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

KINDS = ("titans", "general", "singular", "closed", "heavy", "parallel", "ones")


class _Rounded(torch.autograd.Function):
    """A product whose operands are rounded to a dtype, and so are those of its two gradients; sums in float32."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        a, b = a.to(dtype), b.to(dtype)
        ctx.save_for_backward(a, b)
        return a.float() @ b.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        grad = grads[0].to(a.dtype).float()
        return grad @ b.mT.float(), a.mT.float() @ grad, None


class _Weighted(torch.autograd.Function):
    """Products x weighted by numbers w; the gradient of w is a product of kept, rounded tensors."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(w, x.to(dtype))
        return w * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        w, x = ctx.saved_tensors
        rounded = grads[0].to(x.dtype).float() * x.float()
        return rounded.sum_to_size(w.shape), w * grads[0], None


class _Solved(torch.autograd.Function):
    """u = (I + L)^-1 missing by a rounded inverse; r = (I + L)^-T du and dL = -r u^T of rounded tensors."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor, missing: Tensor, dtype: torch.dtype) -> Tensor:
        inverse = _inverse(lower).to(dtype)
        u = inverse.float() @ missing.to(dtype).float()
        ctx.save_for_backward(inverse, u.to(dtype))
        return u

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inverse, u = ctx.saved_tensors
        r = inverse.mT.float() @ grads[0].to(u.dtype).float()
        return -r.to(u.dtype).float() @ u.mT.float(), r, None


def _inverse(lower: Tensor) -> Tensor:
    return torch.linalg.inv(torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device) + lower)


class Exact:
    """Products as they are."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def weigh(self, w: Tensor, x: Tensor) -> Tensor:
        return w * x

    def solve(self, lower: Tensor, missing: Tensor) -> Tensor:
        return _inverse(lower) @ missing


class Rounded(Exact):
    """Operands of products are rounded to a dtype, and so is what is kept for the backward pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return _Rounded.apply(a, b, self.dtype)  # type: ignore[no-any-return, no-untyped-call]

    def weigh(self, w: Tensor, x: Tensor) -> Tensor:
        return _Weighted.apply(w, x, self.dtype)  # type: ignore[no-any-return, no-untyped-call]

    def solve(self, lower: Tensor, missing: Tensor) -> Tensor:
        return _Solved.apply(lower, missing, self.dtype)  # type: ignore[no-any-return, no-untyped-call]


def chunk_form(
    q: Tensor, k: Tensor, v: Tensor, block: Tensor, write: Tensor, erase: Tensor | None = None,
    start: Tensor | None = None, *, size: int, products: Exact = Exact(),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The identities of axes.kernels.block.chain, chunk by chunk; q and k with as many heads as v."""
    dot, weigh = products.dot, products.weigh
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    q, k, v, block, write = (x.transpose(1, 2) for x in (q, k, v, block, write))  # (B, HV, T, ...)
    erase = None if erase is None else erase.transpose(1, 2)
    shape = (*v.shape[:2], 2, k.shape[-1], v.shape[-1])
    state = v.new_zeros(shape) if start is None else start.permute(0, 1, 3, 4, 2)  # (B, HV, 2, K, V)
    outputs = []
    for left in range(0, v.shape[2], size):
        part = slice(left, left + size)
        kc, qc, u, m, w = k[:, :, part], q[:, :, part], v[:, :, part], block[:, :, part], write[:, :, part]
        c = u.shape[2]
        rows, y = [], w.new_zeros(*w.shape[:2], 0, 2)
        prefix = [torch.eye(2, dtype=m.dtype, device=m.device).expand(*m.shape[:2], 2, 2)]
        for t in range(c):
            y = torch.cat((y @ m[:, :, t], w[:, :, t : t + 1]), 2)
            rows.append(torch.cat((y, y.new_zeros(*y.shape[:2], c - t - 1, 2)), 2))
            prefix.append(prefix[-1] @ m[:, :, t])
        pairs, p = torch.stack(rows, 2), torch.stack(prefix, 2)  # (B, HV, t, s, 2), (B, HV, t + 1, 2, 2)
        if erase is not None:
            e = erase[:, :, part]
            before = torch.cat((torch.zeros_like(pairs[:, :, :1]), pairs[:, :, :-1]), 2)
            lower = (before * e[..., None, :]).sum(-1) * dot(kc, kc.mT)
            carried = (p[:, :, :-1] * e[..., None, :]).sum(-1)
            missing = u - sum(weigh(carried[..., a, None], dot(kc, state[:, :, a])) for a in (0, 1))
            u = products.solve(lower, missing)
        read = p[:, :, 1:, :, 0]
        out = dot(pairs[..., 0] * dot(qc, kc.mT), u)
        outputs.append(out + sum(weigh(read[..., a, None], dot(qc, state[:, :, a])) for a in (0, 1)))
        ends, total = pairs[:, :, -1], p[:, :, -1]
        kept = [sum(weigh(total[:, :, i, j, None, None], state[:, :, i]) for i in (0, 1)) for j in (0, 1)]
        state = torch.stack([kept[j] + dot(kc.mT, weigh(ends[..., j, None], u)) for j in (0, 1)], 2)
    return torch.cat(outputs, 2).transpose(1, 2), state.permute(0, 1, 4, 2, 3)


def draw(
    length: int, d_k: int, d_v: int, dtype: torch.dtype, kind: str = "titans", *, b: int = 2, h: int = 2, hv: int = 2,
    erased: bool = True, started: bool = True, units: int | None = None, device: str = "cpu",
) -> list[Tensor | None]:  # fmt: skip
    """q, k, v, block, write, erase, initial state of a kind."""

    def uniform(*trailing: int) -> Tensor:
        return torch.rand(b, length, hv, *trailing, device=device)

    q, k = (normalize(torch.randn(b, length, h, d_k, device=device), dim=-1) for _ in range(2))
    v = torch.randn(b, length, hv, d_v, device=device)
    start = torch.randn(b if units is None else units, hv, d_v, 2, d_k, device=device) / d_k**0.5
    kept, momentum, strength = 1 - uniform() ** 4, 1 - uniform() ** 2, uniform() * 0.5
    if kind == "closed":
        kept, momentum = (torch.where(uniform() < 0.2, 0.0, x) for x in (kept, momentum))
    if kind == "heavy":
        kept, momentum, strength = torch.ones_like(kept), 1 - 1e-3 * uniform(), 2e-3 * uniform()
    if kind == "parallel":
        k = normalize(torch.randn(b, 1, h, d_k, device=device) + 0.1 * k, dim=-1)
        momentum, strength = 0.8 * momentum, 0.2 * strength
    if kind == "ones":
        q, k, v = (torch.ones_like(x) for x in (q, k, v))
        k[..., 1:] = 0
        kept, momentum, strength = torch.ones_like(kept), torch.zeros_like(kept), torch.ones_like(kept)
    none, full = torch.zeros_like(kept), torch.ones_like(kept)
    block = torch.stack((kept, none, momentum, momentum), -1).unflatten(-1, (2, 2))
    write, erase = torch.stack((strength, strength), -1), torch.stack((full, none), -1)
    if kind in ("general", "singular"):
        angle, scale = 6.3 * uniform(), 1 - uniform(2) ** 3
        turn = torch.stack((angle.cos(), angle.sin(), -angle.sin(), angle.cos()), -1).unflatten(-1, (2, 2))
        block = turn * scale[..., None, :]
        if kind == "singular":
            block = torch.where(uniform(1, 1) < 0.2, 1e-6 * block, torch.where(uniform(1, 2) < 0.3, 0.0, block))
        write, erase = 2 * uniform(2) - 1, 0.5 * (2 * uniform(2) - 1)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    return [q, k, v, block, write, erase if erased else None, start if started else None]


def run(rule: Callable[..., Any], inputs: list[Tensor | None], do: Tensor, dfinal: Tensor, **options: Any) -> list:
    """Outputs and gradients of a rule."""
    inputs = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    o, final = rule(*inputs, **options)
    used = [x for x in inputs if x is not None]
    grads = iter(torch.autograd.grad((o, final), used, (do.to(o.dtype), dfinal.to(final.dtype)), allow_unused=True))
    got = [o.detach(), final.detach(), *(None if x is None else next(grads) for x in inputs)]
    return got


def by_sequence(rule: Callable[..., Any], offsets: list[int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A rule over dense tokens as one over packed sequences, some of them empty."""

    def packed(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        *tokens, start = inputs
        assert start is not None
        outs, finals = [], []
        for u, (left, right) in enumerate(zip(offsets, offsets[1:], strict=False)):
            final = start[u : u + 1]
            if left < right:
                o, final = rule(*(None if x is None else x[:, left:right] for x in tokens), final)
                outs.append(o)
            finals.append(final)
        return torch.cat(outs, 1), torch.cat(finals)

    return packed
