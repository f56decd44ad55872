"""What every kernel entry shares on the host: the cut of tokens into units and chunks, checks, launch settings."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
import triton
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import versions
from axes.kernels.common.sizes import cdiv

DTYPES = versions.DTYPES
LARGEST = 256  # widest keys and values


@final
@dataclass(frozen=True)
class Layout:
    """Units (runs of tokens with one state each) and their chunks: B batch entries of T tokens, or packed sequences.

    offsets: cu_seqlens of packed sequences as int32 (units + 1), else None. units_of_slots: each chunk slot's unit.
    """

    units: int
    length: int  # T of a dense layout, all tokens of a packed one
    chunk: int
    chunks: int  # N of a dense unit; the most chunks that a packed unit can have
    slots: int
    offsets: Tensor | None = None
    units_of_slots: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.offsets is not None


def extent(batch: int, length: int, chunk: int, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Units and slots of a layout."""
    if cu_seqlens is None:
        return batch, batch * ((length + chunk - 1) // chunk)
    units = cu_seqlens.shape[0] - 1
    return units, length // chunk + units


def layout(batch: int, length: int, chunk: int, cu_seqlens: Tensor | None = None) -> Layout:
    """The layout of (batch, length) tokens in chunks; nothing is read back from the device."""
    units, slots = extent(batch, length, chunk, cu_seqlens)
    if cu_seqlens is None:
        return Layout(units, length, chunk, cdiv(length, chunk), slots)
    offsets = cu_seqlens.to(torch.int32)
    first = offsets[:-1] // chunk + torch.arange(units, device=offsets.device, dtype=torch.int32)
    slot = torch.arange(slots, device=offsets.device, dtype=torch.int32)
    units_of_slots = (torch.searchsorted(first, slot, right=True) - 1).to(torch.int32)
    return Layout(units, length, chunk, cdiv(length, chunk), slots, offsets, units_of_slots)


# ---- checks ----------------------------------------------------------------------------------------------------------


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the first import)."""
    return bool(triton.knobs.runtime.interpret)


def _mend_interpreter() -> None:
    """Two faults of Triton's interpreter. Up to 3.6 loop bounds are arrays of one element, of which numpy 2.4 makes no
    int; and a comparison of numbers says that it is an integer, so that 3.9 takes what comes of it for no mask."""
    from triton.runtime import interpreter

    patch, splat = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def mended_splat(builder: Any, kind: Any, x: Any) -> Any:
        made = splat(builder, kind, x)
        made.data = made.data.astype(x.data.dtype)
        return made

    interpreter._patch_lang_tensor = mended
    interpreter.InterpreterBuilder.create_splat = mended_splat


if interpreted():
    _mend_interpreter()


def check_tokens(who: str, q: Tensor, k: Tensor, v: Tensor, widest_values: int | None = LARGEST) -> None:
    """q, k (B, T, H, K), v (B, T, HV, V) with HV a multiple of H, one dtype, one device that kernels run on."""
    if q.ndim != 4 or v.ndim != 4:
        raise ShapeError(f"{who}: q, k, v are (B, T, H, D), not {tuple(q.shape)} and {tuple(v.shape)}")
    if k.shape != q.shape:
        raise ShapeError(f"{who}: k has the shape of q, {tuple(q.shape)}, not {tuple(k.shape)}")
    if v.shape[:2] != q.shape[:2]:
        raise ShapeError(f"{who}: v agrees with q in (B, T) = {tuple(q.shape[:2])}, not {tuple(v.shape[:2])}")
    if q.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise ShapeError(f"{who}: value heads are a multiple of key heads, not {v.shape[2]} of {q.shape[2]}")
    if not 1 <= q.shape[-1] <= LARGEST or v.shape[-1] < 1 or widest_values is not None and v.shape[-1] > widest_values:
        most = "K and V are from 1 to" if widest_values == LARGEST else "V is from 1 on and K from 1 to"
        raise ShapeError(f"{who}: {most} {LARGEST}, not {q.shape[-1]} and {v.shape[-1]}")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ShapeError(f"{who}: q, k, v share one of bf16, fp16, fp32, not {q.dtype}, {k.dtype}, {v.dtype}")
    if q.device.type != "cuda" and not interpreted():
        raise ShapeError(
            f"{who}: the Triton kernels need a CUDA device, not {q.device}; implementation='torch' runs everywhere"
        )


def check_like(who: str, name: str, x: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """x is None, or floating point of this shape on this device."""
    if x is None:
        return
    if tuple(x.shape) != shape or not x.is_floating_point():
        raise ShapeError(f"{who}: {name} is floating point of shape {shape}, not {x.dtype} {tuple(x.shape)}")
    if x.device != device:
        raise ShapeError(f"{who}: {name} is on {x.device} and q on {device}")


def check_packing(who: str, batch: int, cu_seqlens: Tensor | None, device: torch.device) -> None:
    """cu_seqlens is None, or the ascending offsets 0, ..., T of sequences packed in one batch entry.

    Their values are not read: that would wait for the device.
    """
    if cu_seqlens is None:
        return
    if batch != 1:
        raise ShapeError(f"{who}: packed sequences (cu_seqlens) have batch size 1, not {batch}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            f"{who}: cu_seqlens holds at least two int32 or int64 offsets, not {cu_seqlens.dtype} "
            f"{tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != device:
        raise ShapeError(f"{who}: cu_seqlens is on {cu_seqlens.device} and q on {device}")


def check_chain(
    who: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None,
    tokens: Mapping[str, tuple[Tensor | None, tuple[int, ...]]], slots: tuple[int, ...] = (),
    widest_values: int | None = LARGEST,
) -> int:  # fmt: skip
    """What every family asks of its inputs, and U, the number of states: a batch entry's or a packed sequence's.

    initial_state: (U, HV, V, *slots, K).  tokens: of every token and value head (B, T, HV, *shape), with that shape.
    """
    check_tokens(who, q, k, v, widest_values)
    check_packing(who, q.shape[0], cu_seqlens, q.device)
    units = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for name, (x, shape) in tokens.items():
        check_like(who, name, x, (*v.shape[:3], *shape), q.device)
    check_like(who, "initial_state", initial_state, (units, *v.shape[2:], *slots, q.shape[3]), q.device)
    return units


def nothing_read(v: Tensor, shape: tuple[int, ...], initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs and the last state (of this shape) where there are no numbers to read."""
    final = v.new_zeros(shape, dtype=torch.float32) if initial_state is None else initial_state.float().clone()
    return v.new_zeros(v.shape), final


# ---- launches --------------------------------------------------------------------------------------------------------


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the device that holds x."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def precision(x: Tensor) -> str:
    """float32 is IEEE; the setting does nothing for 16-bit operands."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def pieces() -> str:
    """The precision of float32 products on the matrix units, with the error of IEEE products: each number is three
    pieces of bfloat16, and the six products of pieces that reach float32's last bits are added. IEEE's, which have no
    matrix units, in the interpreter: it knows no pieces.

    A piece ends where bfloat16 does, at 2^-133: numbers below 2^-109 lose digits that IEEE keeps.
    """
    return "ieee" if interpreted() else "bf16x6"


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else x.contiguous() for x in tensors)
