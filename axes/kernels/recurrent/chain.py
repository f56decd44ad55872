"""Cells in Triton: u_t = W h_{t-1} + b, a token of the cell, and again; forward and backward, one launch each.

A program walks a tile of sequences and one head: W stays on chip. Forward writes outputs, and where gradients are asked
for u, h, y and what is carried before every token; backward walks in reverse with W turned, and leaves the gradients of
x and of u, from which those of W and b are one product and one sum by torch. Sums are in float32 and one order, no
atomics. On Hopper `hold` has a walk of 16 bits whose matrices are in registers, where it is picked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import layout, versions
from axes.kernels.common.layout import check_like, check_packing, contiguous, on_device, precision
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.recurrent import hold, kernels
from axes.kernels.recurrent.sizes import CELLS, WIDEST

_SEQUENCES = 16


def _constants(x: Tensor, cell: str, cu: Tensor | None) -> dict[str, Any]:
    side = max(16, power_of_2(x.shape[-1]))
    return dict(
        G=x.shape[3], BM=_SEQUENCES, BV=side, CELL=cell, PACKED=cu is not None, PRECISION=precision(x),
        num_warps=(8 if side == 128 else 4) if x.dtype == torch.float32 else max(4, side // 8), num_stages=1,
    )  # fmt: skip


def _sizes(x: Tensor, cu: Tensor | None) -> tuple[tuple[int, int, int, int], int]:
    """The kernels' numbers and the number of programs."""
    batch = x.shape[0] if cu is None else cu.shape[0] - 1
    return (batch, x.shape[1], x.shape[2], x.shape[4]), cdiv(batch, _SEQUENCES) * x.shape[2]


def _forward(
    x: Tensor, w: Tensor, b: Tensor, h: Tensor, y: Tensor, e: Tensor, cu_seqlens: Tensor | None, cell: str,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    if hold.fits(x, cu_seqlens):
        return hold.forward(x, w, b, h, y, e, cu_seqlens, cell, record)
    out, last, kept = _shaped(x, h, record)
    sizes, programs = _sizes(x, cu_seqlens)
    us, hs, ys, es = kept or [out] * 4
    with on_device(x):
        kernels.forward[(programs,)](
            x, w, b, h, y, e, out, *last, us, hs, ys, es, x if cu_seqlens is None else cu_seqlens, *sizes, SAVE=record,
            **_constants(x, cell, cu_seqlens),
        )  # fmt: skip
    return out, *last, kept


def _shaped(x: Tensor, h: Tensor, record: bool) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], list[Tensor]]:
    out = x.new_empty(*x.shape[:3], x.shape[4])
    kept: list[Tensor] = []
    if record:
        carried = [torch.empty_like(out, dtype=torch.float32) for _ in range(2)]
        kept = [torch.empty_like(x), torch.empty_like(out), *carried]
    return out, (torch.empty_like(h), torch.empty_like(h), torch.empty_like(h)), kept


def _shapes(
    x: Tensor, w: Tensor, b: Tensor, h: Tensor, y: Tensor, e: Tensor, cu_seqlens: Tensor | None, cell: str,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    out, last, kept = _shaped(x, h, record)
    if record and hold.fits(x, cu_seqlens):
        kept = hold.kept(x, cell)
    return out, *last, kept


def _backward(
    x: Tensor, w: Tensor, b: Tensor, h: Tensor, y: Tensor, e: Tensor, cu_seqlens: Tensor | None, cell: str,
    kept: list[Tensor], dout: Tensor, dh: Tensor, dy: Tensor, de: Tensor,
) -> list[Tensor]:  # fmt: skip
    if hold.fits(x, cu_seqlens):
        return hold.backward(x, w, b, cu_seqlens, cell, kept, dout, dh, dy, de)
    us, hs, ys, es = kept
    dx, dh0, dy0, de0 = torch.empty_like(x), torch.empty_like(h), torch.empty_like(h), torch.empty_like(h)
    own = cell == "gru"
    du = torch.empty_like(hs) if own else dx
    sizes, programs = _sizes(x, cu_seqlens)
    with on_device(x):
        kernels.backward[(programs,)](
            x, w, us, ys, es, dout, dh, dy, de, dx, du, dh0, dy0, de0, x if cu_seqlens is None else cu_seqlens, *sizes,
            **_constants(x, cell, cu_seqlens),
        )  # fmt: skip
    heard, of_u = hs.flatten(0, 1).transpose(0, 1), dx
    if own:
        of_u = torch.cat((dx[:, :, :, :2], du[:, :, :, None]), 3)
    by_head = of_u.flatten(0, 1).transpose(0, 1)  # (H, tokens, G, V)
    dw = (heard.mT @ by_head.flatten(-2)).view(w.shape)
    db = by_head.sum(1, dtype=torch.float32).to(b.dtype)
    return [dx, dw, db, dh0, dy0, de0]


_chain = Differentiable("recurrent", _forward, _backward, _shapes, gradients=6)


def recurrent_chain(
    cell: str,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor,
    y: Tensor,
    carry: tuple[Tensor, ...] = (),
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """A cell over all tokens: outputs (B, T, H, V) in the dtype of inputs, the last state and what is carried.

    inputs (B, T, H, G, V) in bf16, fp16 or fp32, V up to 128; weight (H, V, G, V) and bias (H, G, V), read in the dtype
    of inputs; y and carry (U, H, V), U = B or the number of sequences that cu_seqlens (U + 1,) packs in one batch
    entry. All but cu_seqlens receive gradients, once. Raises ShapeError for other shapes, dtypes or devices.
    """
    who = "recurrent_chain"
    if cell not in CELLS:
        raise ShapeError(f"{who}: cell is one of {', '.join(CELLS)}, not {cell!r}")
    gates, carried = CELLS[cell][:2]
    if inputs.ndim != 5 or inputs.shape[3] != gates or not 1 <= inputs.shape[4] <= WIDEST:
        raise ShapeError(f"{who}: inputs of {cell} are (B, T, H, {gates}, V <= {WIDEST}), not {tuple(inputs.shape)}")
    if inputs.dtype not in versions.DTYPES:
        raise ShapeError(f"{who}: inputs are bf16, fp16 or fp32, not {inputs.dtype}")
    if inputs.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(
            f"{who}: the Triton kernels need a CUDA device, not {inputs.device}; implementation='torch' runs everywhere"
        )
    batch, _, heads, _, width = inputs.shape
    check_packing(who, batch, cu_seqlens, inputs.device)
    units = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_like(who, "weight", weight, (heads, width, gates, width), inputs.device)
    check_like(who, "bias", bias, (heads, gates, width), inputs.device)
    if len(carry) != carried:
        raise ShapeError(f"{who}: {cell} carries {carried} tensors beside its state, got {len(carry)}")
    for name, held in (("y", y), *(("carry", x) for x in carry)):
        check_like(who, name, held, (units, heads, width), inputs.device)
    h, e = carry or (y, y.detach())
    given = contiguous(inputs, weight.to(inputs.dtype), bias.to(inputs.dtype), h.float(), y.float(), e.float())
    offsets = None if cu_seqlens is None else cu_seqlens.to(torch.int32)
    out, last_h, last_y, last_e = _chain(*given, offsets, cell)
    return out, last_y, (last_h, last_e) if carry else ()


__all__ = ["CELLS", "recurrent_chain"]
