"""`transport`: causal softmax attention whose stored keys every token carries on, its launches and its operator."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels import contain
from axes.kernels.attention import blocks, levels, tree
from axes.kernels.attention.attend import split
from axes.kernels.attention.contain import contain_carried
from axes.kernels.common import inverse, layout
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2

LARGEST = 128  # widest keys: a map of one is a program's accumulator


def transport(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, mass: Tensor | None = None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """o_t = sum_i p_ti v_i with p_t = softmax over i <= t of scale q_t . k_i A_{i+1} ... A_t + mass_i, where a token's
    A_s = I + a_s b_s^T acts on rows; and all keys after the last token, k_i A_{i+1} ... A_T.

    q, k, a, b (B, T, H, K) and v (B, T, H, V) in one of bf16, fp16, fp32; K and V from 1 to 128. mass (B, T, H), taken
    in float64; finite at a token's own pair. Returns o (B, T, H, V) and the keys (B, T, H, K) in float32; everything
    given receives gradients, once. Apart from what is returned the forward keeps one number a query; while it runs, and
    again in the backward, it needs log2 (T / C) vectors a token and a (K, K) map every C / 2 tokens.
    Raises ShapeError on what does not fit.
    """
    who = "transport"
    layout.check_tokens(who, q, k, v)
    for name, x in (("a", a), ("b", b)):
        layout.check_like(who, name, x, tuple(k.shape), q.device)
        if x.dtype != q.dtype:
            raise ShapeError(f"{who}: q, k, v, a, b share a dtype, {name} is {x.dtype} and q {q.dtype}")
    if v.shape[2] != q.shape[2]:
        raise ShapeError(f"{who}: values have the heads of the queries, {q.shape[2]}, not {v.shape[2]}")
    if max(q.shape[3], v.shape[3]) > LARGEST:
        raise ShapeError(f"{who}: K and V are from 1 to {LARGEST}, not {q.shape[3]} and {v.shape[3]}")
    layout.check_like(who, "mass", mass, tuple(k.shape[:3]), q.device)
    mass = None if mass is None else mass.double()
    o, last = _transport(q, k, v, a, b, mass, scale)
    return o, last


class _Cut(NamedTuple):
    """N blocks of C tokens for each line, a head of a batch entry; the softmax takes R blocks together."""

    lines: int
    length: int
    heads: int
    c: int
    r: int
    n: int
    width: int  # of a tile of keys
    levels: int
    precision: str

    @property
    def tiles(self) -> tuple[int]:
        return (self.lines * self.n // self.r,)

    @property
    def every(self) -> tuple[int]:
        return (self.lines * self.n,)


def _cut(q: Tensor) -> _Cut:
    b, t, h, d = q.shape
    size, together = (32, 1) if q.dtype == torch.float32 else (64, 2)
    count = cdiv(t, size * together) * together
    precision = "tf32x3" if q.dtype == torch.float32 else "tf32"  # without matrix units a map does not fit a program
    return _Cut(b * h, t, h, size, together, count, _tile(d, q.dtype), (count - 1).bit_length(), precision)


def _tile(width: int, dtype: torch.dtype) -> int:
    """Of that many features. In 16 bit narrow ones gave wrong outputs on an H200 (docs/kernels.md, faults)."""
    return max(16 if dtype == torch.float32 else 64, power_of_2(width))


def settings(kernel: str, dtype: torch.dtype, width: int) -> dict[str, int]:
    """Warps and pipeline stages: a function of the dtype and the wider of K and V."""
    if dtype == torch.float32:
        return {"num_warps": 4 if width <= 64 else 8, "num_stages": 1}
    warps, stages = _HALF[kernel][width > 64]
    return {"num_warps": warps, "num_stages": stages}


# 16 bit, widths up to 64 and 128
_HALF = {
    "solve": ((4, 1), (4, 1)),
    "enter": ((4, 1), (8, 1)),
    "leave": ((4, 1), (8, 1)),
    "join": ((4, 1), (8, 1)),
    "carry": ((4, 1), (4, 1)),
    "back": ((4, 2), (8, 2)),
    "forward": ((4, 3), (8, 3)),
    "queries": ((8, 2), (8, 2)),
    "pairs": ((8, 2), (8, 2)),
}


def inverting(q: Tensor, cut: _Cut) -> dict[str, int | str]:
    """What `solve` is given beside."""
    warps = settings("solve", q.dtype, cut.width)["num_warps"]
    return {**inverse.constants(q.dtype, cut.c, warps), "MERGE": "tf32x3"}  # as every product of float32 here


class _Carried(NamedTuple):
    """What the softmax reads, and the maps of every level, the first one first; solved: of every block (C, C)."""

    scores: Tensor
    solved: Tensor
    carried: Tensor
    maps: list[Tensor]
    last: Tensor


def _carried(q: Tensor, k: Tensor, a: Tensor, b: Tensor, cut: _Cut) -> _Carried:
    d, c, wide, n = q.shape[3], cut.c, cut.width, cut.n
    begun, ended = (q.new_empty(cut.lines, n, c, wide) for _ in range(2))
    scores = q.new_empty(cut.lines, n, c, c, dtype=torch.float32)
    solved = q.new_empty(scores.shape)
    pieces = [cdiv(n, 2**level) for level in range(max(1, cut.levels))]
    whole = q.new_empty(cut.lines * sum(pieces), wide, wide)
    maps = list(whole.split([cut.lines * m for m in pieces]))
    last = q.new_empty(k.shape, dtype=torch.float32)
    carried = q.new_empty(cut.levels, cut.lines, n, c, wide)
    size = {"T": cut.length, "N": n, "H": cut.heads, "D": d, "BD": wide, "C": c, "PRECISION": cut.precision}

    def chosen(name: str) -> dict[str, int]:
        return settings(name, q.dtype, wide)

    with layout.on_device(q):
        blocks.solve[cut.every](a, b, scores, solved, **size, **inverting(q, cut), **chosen("solve"))
        blocks.enter[cut.every](q, k, a, b, solved, begun, ended, scores, maps[0], **size, **chosen("enter"))
        for below, above, m in zip(maps, maps[1:], pieces, strict=False):
            tree.join[(above.shape[0],)](below, above, m, BD=wide, PRECISION=cut.precision, **chosen("join"))
        for start, keys in ((begun, False), (ended, True)):
            tree.carry[cut.every](start, carried, whole, last, levels=cut.levels, KEYS=keys, **size, **chosen("carry"))
    return _Carried(scores, solved, carried, maps, last)


def _softmax(
    kernel: Any, name: str, tensors: tuple[Tensor, ...], v: Tensor, masses: bool, scale: float, cut: _Cut
) -> None:
    width = v.shape[3]
    kernel[cut.tiles](
        *tensors, scale, cut.length, cut.n, cut.heads, cut.levels, V=width, BD=cut.width,
        BV=_tile(width, v.dtype), C=cut.c, R=cut.r, MASS=masses, PRECISION=cut.precision,
        **settings(name, v.dtype, max(cut.width, width)),
    )  # fmt: skip


def _forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, mass: Tensor | None, scale: float, record: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o, all keys after the last token, and log2 of the sum of every query's weights (B H, T)."""
    q, k, v, a, b = (x.contiguous() for x in (q, k, v, a, b))
    cut = _cut(q)
    found = _carried(q, k, a, b, cut)
    o, lse = torch.empty_like(v), q.new_empty(cut.lines, cut.length, dtype=torch.float32)
    high, low = (x.contiguous() for x in split(mass, v))
    with layout.on_device(q):
        tensors = (found.carried, found.scores, v, high, low, o, lse)
        _softmax(levels.forward, "forward", tensors, v, mass is not None, scale, cut)
    if contain.PICKED:
        parts = (None, None) if mass is None else (high, low)
        contain_carried(o, q, k, v, a, b, parts[0], parts[1], scale, cut.c)
    return o, found.last, [lse] if record else []


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, mass: Tensor | None, scale: float, record: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    lse = q.new_empty(q.shape[0] * q.shape[2], q.shape[1], dtype=torch.float32)
    return v.new_empty(v.shape), k.new_empty(k.shape, dtype=torch.float32), [lse] if record else []


def _backward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, mass: Tensor | None, scale: float,
    kept: list[Tensor], do: Tensor | None, dlast: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, a, b and mass (anything where there is none)."""
    o, lse = kept
    do = torch.zeros_like(o) if do is None else do
    q, k, v, a, b = (x.contiguous() for x in (q, k, v, a, b))
    cut = _cut(q)
    d, c, wide, n = q.shape[3], cut.c, cut.width, cut.n
    found = _carried(q, k, a, b, cut)
    high, low = (x.contiguous() for x in split(mass, v))
    dcarried, dscores, dots = torch.empty_like(found.carried), torch.empty_like(found.scores), torch.empty_like(lse)
    sums, dm = (dots, dots) if mass is None else (torch.empty_like(lse), q.new_empty(k.shape[:3], dtype=torch.float32))
    dq, dk, dv, da, db = (torch.empty_like(x) for x in (q, k, v, a, b))
    rest = (v, mass is not None, scale, cut)
    read = (found.carried, found.scores, v, high, low)
    dbegun = q.new_zeros(cut.lines, n, c, wide)
    dended = torch.zeros_like(dbegun)
    if dlast is not None:
        rows = dlast.transpose(1, 2).reshape(cut.lines, cut.length, d).to(q.dtype)
        dended.view(cut.lines, n * c, wide)[:, : cut.length, :d] = rows

    def chosen(name: str) -> dict[str, int]:
        return settings(name, q.dtype, wide)

    with layout.on_device(q):
        _softmax(levels.queries, "queries", (*read, o, do, lse, dcarried, dscores, dots, sums), *rest)
        _softmax(levels.pairs, "pairs", (*read, do, lse, dots, sums, dscores, dcarried, dv, dm), *rest)
        above = dmaps = torch.zeros_like(found.maps[0])
        for level in reversed(range(cut.levels)):
            maps = found.maps[level]
            dmaps = torch.empty_like(maps)
            tree.back[(maps.shape[0],)](
                found.carried[level], dcarried[level], maps, above, dbegun, dended, dmaps, n,
                maps.shape[0] // cut.lines, level, C=c, BD=wide, ROOT=level == cut.levels - 1,
                PRECISION=cut.precision, **chosen("back"),
            )  # fmt: skip
            above = dmaps
        blocks.leave[cut.every](
            q, k, a, b, found.solved, dbegun, dended, dscores, dmaps, dq, dk, da, db,
            cut.length, n, cut.heads, D=d, BD=wide, C=c, PRECISION=cut.precision, **chosen("leave"),
        )  # fmt: skip
    return [dq, dk, dv, da, db, dm.double()]


_transport = Differentiable("transport", _forward, _backward, _shapes, gradients=6, missing=True, reads=1)
