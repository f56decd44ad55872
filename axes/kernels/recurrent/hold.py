"""Launches of `held`: cells of vectors in 16 bits on Hopper, one gate's matrix a set of registers.

Forward keeps h before every token, and of cells that carry more, y and the log of their mass. Backward makes u of all
tokens again by one product, what gradients are multiplied by (`slopes`), walks, and has the gradients of W and b from
one product and one sum. Heads are padded to a power of two with zeros, which stay zeros.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from axes.kernels.common import versions
from axes.kernels.common.layout import on_device
from axes.kernels.common.sizes import cdiv, power_of_2

# Programs, in those that a chip has place for, one a multiprocessor; beyond them the walk of `kernels`, of twice as
# many sequences a program, takes less. H200, 128 channels, forward with backward in ms, this walk and that: 64
# sequences of 1,024 tokens, GRU 2.86 and 6.42 (cuDNN 5.82), sLSTM 3.54 and 9.61; 500 of 128 tokens and 8 heads, four
# times the chip, GRU 4.08 and 2.63, sLSTM 4.27 and 3.12.
WAVES = 1.0
DTYPES = (torch.float16, torch.bfloat16)
_SEQUENCES = 8  # of a program, as many as a product has columns: 16 take more registers than there are
_ROWS = 8  # tokens of a program that makes slopes


def fits(x: Tensor, cu: Tensor | None) -> bool:
    """Whether these kernels take a call: 16 bits, a GPU, and all programs on it at once."""
    if x.dtype not in DTYPES or versions.hopper_refusal(x.device) is not None:
        return False
    return _programs(x, cu) <= WAVES * _multiprocessors(x.device)


def _programs(x: Tensor, cu: Tensor | None) -> int:
    return cdiv(x.shape[0] if cu is None else cu.shape[0] - 1, _SEQUENCES) * x.shape[2]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _side(width: int) -> int:
    return max(16, power_of_2(width))


def _wider(x: Tensor, *axes: int) -> Tensor:
    """Axes of channels as wide as a tile."""
    for axis in axes:
        more = _side(x.shape[axis]) - x.shape[axis]
        x = torch.cat((x, x.new_zeros(*x.shape[:axis], more, *x.shape[axis:][1:])), axis) if more else x
    return x


def _sizes(x: Tensor, cu: Tensor | None, cell: str) -> tuple[int, tuple[int, int, int], dict[str, Any]]:
    """The number of programs, the kernels' numbers and constants."""
    batch, heads, side = x.shape[0] if cu is None else cu.shape[0] - 1, x.shape[2], _side(x.shape[4])
    warps = side // 16
    constants = dict(V=side, G=x.shape[3], BM=_SEQUENCES, W=warps, CELL=cell, PACKED=cu is not None, num_warps=warps)
    return _programs(x, cu), (batch, x.shape[1], heads), constants


def kept(x: Tensor, cell: str) -> list[Tensor]:
    """What a walk keeps for the way back, unfilled: h, y and what is carried before every token."""
    shape = (*x.shape[:3], _side(x.shape[4]))
    if cell == "gru":  # whose y is its h
        return [x.new_empty(shape)]
    return [x.new_empty(shape), x.new_empty(shape), x.new_empty(shape, dtype=torch.float32)]


def forward(
    x: Tensor, w: Tensor, b: Tensor, h: Tensor, y: Tensor, e: Tensor, cu: Tensor | None, cell: str, record: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Outputs, the last h, y and what is carried, and what is kept."""
    from axes.kernels.recurrent import held

    width = x.shape[4]
    programs, sizes, constants = _sizes(x, cu, cell)
    keeps = kept(x, cell) if record else []
    x, w, b, h, y, e = _wider(x, 4), _wider(w, 1, 3), _wider(b, 2), _wider(h, 2), _wider(y, 2), _wider(e, 2)
    out, last = x.new_empty(*x.shape[:3], x.shape[4]), [torch.empty_like(h) for _ in range(3)]
    pairs = [z.view(torch.int32) for z in (x, out, *[*keeps, out, out][:2])]
    with on_device(x):
        held.forward[(programs,)](
            pairs[0], w, b, h, y, e, pairs[1], *last, *pairs[2:], keeps[-1] if keeps else last[2],
            x if cu is None else cu, *sizes, SAVE=bool(keeps), **constants,
        )  # fmt: skip
    made = [z[..., :width].contiguous() for z in (out, *last)]
    return made[0], made[1], made[2], made[3], keeps


def backward(
    x: Tensor, w: Tensor, b: Tensor, cu: Tensor | None, cell: str, keeps: list[Tensor], dout: Tensor,
    dh: Tensor, dy: Tensor, de: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, w, b and of h, y and what was carried before the first token."""
    from axes.kernels.recurrent import held
    from axes.kernels.recurrent.slopes import slopes

    width = x.shape[4]
    programs, sizes, constants = _sizes(x, cu, cell)
    x, w, b, dout, dh, dy, de = (
        _wider(x, 4), _wider(w, 1, 3), _wider(b, 2), _wider(dout, 3), _wider(dh, 2), _wider(dy, 2), _wider(de, 2)
    )  # fmt: skip
    heads, side, gates = w.shape[:3]
    hs, ys, es = (*keeps, *keeps[:1] * 2)[:3]
    heard = hs.view(-1, heads, side).transpose(0, 1)
    us = torch.bmm(heard, w.view(heads, side, gates * side))
    count = us.shape[1]
    words = torch.empty(count, heads, 2, side, dtype=torch.int64, device=x.device)
    asked = torch.empty(count, heads, side, dtype=torch.int64, device=x.device)
    before = [torch.empty_like(dh) for _ in range(3)]
    with on_device(x):
        slopes[(cdiv(count, _ROWS), heads)](
            x, us, b, hs, ys, es, dout, words, count, heads, V=side, G=gates, BR=_ROWS, CELL=cell, num_warps=4
        )
        held.backward[(programs,)](
            w, words, dh, dy, de, asked, *before, asked if cu is None else cu, *sizes, **constants
        )
    # of a channel the gradients of x, and for GRU that of the u that r multiplies
    four = asked.view(x.dtype).view(count, heads, side, 4)
    by_gate = four.unbind(3)
    dx = torch.stack(by_gate[:gates], 2).view(x.shape)
    by_head = four.flatten(2).transpose(0, 1)  # (H, tokens, 4 V)
    of_u = [0, 1, 3] if gates == 3 else [0, 1, 2, 3]
    dw = torch.bmm(heard.mT, by_head).view(heads, side, side, 4)[..., of_u].mT
    db = by_head.sum(1, dtype=torch.float32).view(heads, side, 4)[..., of_u].mT.to(b.dtype)
    dw = dw[:, :width, :, :width]
    return [dx[..., :width], dw, db[..., :width], *(z[..., :width] for z in before)]


__all__ = ["DTYPES", "WAVES", "backward", "fits", "forward", "kept"]
