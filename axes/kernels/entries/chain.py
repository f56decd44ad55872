"""Chains of entries in Triton: S_t = A_t * S_{t-1} + c_t (v_t - [erase] k_t * S') k_t^T entry by entry, o_t = S_t q_t.

    log A_t = g_t (a row's own) + dt_t a   (a row's step times a spectrum that all tokens share, or one a token)
    c_t = b_t, or dt_t, or 1; S' = S_{t-1} ("prev") or A_t * S_{t-1} ("gated"); "new", an implicit step, is "gated" with
    c_t / (1 + c_t |k_t|^2)
and backwards, from do and D = dS_t, with e = v - [erase] k S':
    D += do q^T     dc = D k e     dv = sum_k D c k     dk = sum_r D c (e - [erase] k S')
    dlog A = D' A S_{t-1}, D' = D, or D - [erase] c k^2 D behind a gate     dS_{t-1} = A D', or A D - [prev] c k^2 D
A state is in registers while its rows go through all tokens; with gradients, those before chunks of C tokens are kept
(K V / C numbers a token), from which the way back makes the others again. Sums are in float32 and one order: dq and dk
are added up in blocks of rows, and the blocks by torch; no atomics.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import triton
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common.layout import (
    check_chain,
    check_like,
    contiguous,
    extent,
    layout,
    nothing_read,
    on_device,
)
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv
from axes.kernels.entries import kernels, tiles

Erase = Literal["none", "prev", "gated", "new"]
_CHUNK, _ROWS = 16, 32  # tokens and rows that a program holds: one warp, a row a thread


_TILED = 16  # key entries up to which a program holds a state whole: rows by entries of a warp, and of each thread
_TILE: dict[str, Any] = dict(RL=8, RT=2, NL=4, C=4)  # C: tokens of a chunk, and of a round of the forward


def _constants(
    k: Tensor, gate: Any, times: Any, spectrum: Any, beta: Any, erase: str, tied: bool, cu: Any
) -> dict[str, Any]:
    return dict(
        K=k.shape[-1], ERASE="gated" if erase == "new" else erase, GATED=gate is not None, TIMES=times is not None,
        SPECTRUM=spectrum is not None, VARIES=spectrum is not None and spectrum.ndim == 5, STRONG=beta is not None,
        TIED=tied, PACKED=cu is not None, num_warps=1,
    )  # fmt: skip


def _tile(k: Tensor) -> bool:
    """Whether a program holds every key entry of its rows."""
    return 1 < k.shape[-1] <= _TILED


def _options(k: Tensor) -> dict[str, Any]:
    """A kernel's sizes: RT RL rows and NT NL >= K entries of a warp in tiles, else rows alone."""
    if not _tile(k):
        return dict(BR=_ROWS, C=_CHUNK)
    entries = triton.next_power_of_2(k.shape[-1])
    lanes = min(_TILE["NL"], entries)
    return _TILE | dict(NL=lanes, NT=entries // lanes)


def _sizes(v: Tensor, k: Tensor, cu: Tensor | None, options: dict[str, Any]) -> tuple[Any, tuple[int, ...], int]:
    """The layout, the kernels' last numbers and the number of programs."""
    cut = layout(v.shape[0], v.shape[1], options["C"], cu)
    blocks = cdiv(v.shape[3], options["RL"] * options["RT"] if _tile(k) else _ROWS)
    return cut, (cut.length, cut.chunks, k.shape[2], v.shape[2], v.shape[3], blocks), cut.units * v.shape[2] * blocks


def _kept_as(k: Tensor, v: Tensor) -> torch.dtype:
    """What states before chunks are kept in: those of tiles, whose chunks are short, in bf16 where rows are."""
    return torch.bfloat16 if _tile(k) and v.dtype == torch.bfloat16 else torch.float32


def _forward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, times: Tensor | None, spectrum: Tensor | None,
    beta: Tensor | None, start: Tensor | None, cu_seqlens: Tensor | None, erase: str, tied: bool, keys: bool,
    record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    (hv, d_v), d_k = v.shape[2:], k.shape[-1]
    options = _options(k)
    cut, sizes, programs = _sizes(v, k, cu_seqlens, options)
    kernel = tiles.forward if _tile(k) else kernels.forward
    other = {"IMPLICIT": erase == "new"} if _tile(k) else {"AHEAD": d_k == 1}
    o = torch.empty_like(v)
    shape = (cut.units, hv, d_k, d_v)
    state = v.new_zeros(shape, dtype=torch.float32) if start is None else start.clone()
    saved = v.new_empty(cut.slots, hv, d_k, d_v, dtype=_kept_as(k, v)) if record else state
    with on_device(v):
        kernel[(programs,)](
            q, k, v, *(v if x is None else x for x in (gate, times, spectrum, beta)), state, saved, o,
            v if cut.offsets is None else cut.offsets, *sizes, SAVE=record, **other, **options,
            **_constants(k, gate, times, spectrum, beta, erase, tied, cu_seqlens),
        )  # fmt: skip
    return o, state, [saved] if record else []


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, gate: Any, times: Any, spectrum: Any, beta: Any, start: Any,
    cu_seqlens: Tensor | None, erase: str, tied: bool, keys: bool, record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    (hv, d_v), d_k = v.shape[2:], k.shape[-1]
    units, slots = extent(v.shape[0], v.shape[1], _options(k)["C"], cu_seqlens)
    kept = [v.new_empty(slots, hv, d_k, d_v, dtype=_kept_as(k, v))] if record else []
    return torch.empty_like(v), v.new_empty(units, hv, d_k, d_v, dtype=torch.float32), kept


def _backward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, times: Tensor | None, spectrum: Tensor | None,
    beta: Tensor | None, start: Tensor | None, cu_seqlens: Tensor | None, erase: str, tied: bool, keys: bool,
    kept: list[Tensor], do: Tensor, dfinal: Tensor,
) -> list[Tensor]:  # fmt: skip
    (b, t, h, d_k), (hv, d_v) = k.shape, v.shape[2:]
    options = _options(k)
    cut, sizes, programs = _sizes(v, k, cu_seqlens, options)
    kernel = tiles.backward if _tile(k) else kernels.backward
    other = {"IMPLICIT": erase == "new"} if _tile(k) else {}
    blocks = sizes[-1]
    carry = dfinal.clone()
    dv, dgate, dtimes, dbeta = (None if x is None else torch.empty_like(x) for x in (v, gate, times, beta))
    dq, dk = (v.new_empty(b, t, hv, blocks, d_k, dtype=torch.float32) if keys else v for _ in range(2))
    dspectrum: Tensor | None = None
    if spectrum is not None and spectrum.ndim == 5:
        dspectrum = torch.empty_like(spectrum)
    elif spectrum is not None:
        dspectrum = v.new_zeros(cut.units, hv, d_k, d_v, dtype=torch.float32)
    with on_device(v):
        kernel[(programs,)](
            q, k, v, *(v if x is None else x for x in (gate, times, spectrum, beta)), kept[0], do, carry, dq, dk,
            *(v if x is None else x for x in (dv, dgate, dtimes, dspectrum, dbeta)),
            v if cut.offsets is None else cut.offsets, *sizes, KEYS=keys, **other, **options,
            **_constants(k, gate, times, spectrum, beta, erase, tied, cu_seqlens),
        )  # fmt: skip
    if keys:
        dq, dk = (x.view(b, t, h, hv // h * blocks, d_k).sum(3).to(q.dtype) for x in (dq, dk))
    else:
        dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    if dspectrum is not None and spectrum is not None and spectrum.ndim == 3:
        dspectrum = dspectrum.sum(0)
    return [dq, dk, dv, dgate, dtimes, dspectrum, dbeta, carry]  # type: ignore[list-item]  # None where no tensor is


_chain = Differentiable("entries", _forward, _backward, _shapes, gradients=8)


def entries_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None = None,
    *,
    times: Tensor | None = None,
    spectrum: Tensor | None = None,
    beta: Tensor | None = None,
    tied: bool = False,
    erase: Erase = "none",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A chain of which every entry has a gate of its own, as the module says; o_t = S_t q_t.

    q, k (B, T, H, K) and v (B, T, HV, V) in one dtype (bf16, fp16, fp32), HV a multiple of H, K up to 256, V any;
    gate (logs, <= 0), times and beta (B, T, HV, V) or None; spectrum (HV, V, K) or one a token (B, T, HV, V, K), logs
    that `times` multiplies where it is given; tied: strengths are `times`; initial_state (U, HV, V, K) or None for
    zero, U = B or the number of sequences that cu_seqlens (U + 1,) packs in one batch entry.
    Returns o (B, T, HV, V) in v's dtype and the final state (U, HV, V, K) in float32. All inputs receive gradients,
    once; q and k none where neither asks. Raises ShapeError for other shapes, dtypes or devices.
    """
    who = "entries_chain"
    rows = {name: (x, v.shape[3:]) for name, x in (("gate", gate), ("times", times), ("beta", beta))}
    units = check_chain(who, q, k, v, cu_seqlens, initial_state, rows, widest_values=None)
    (batch, t, _, d_k), (hv, d_v) = k.shape, v.shape[2:]
    each = () if spectrum is None or spectrum.ndim == 3 else (batch, t)
    check_like(who, "spectrum", spectrum, (*each, hv, d_v, d_k), q.device)
    if times is not None and spectrum is None:
        raise ShapeError(f"{who}: times multiply a spectrum: give it, or use gate and beta")
    if tied and (times is None or beta is not None):
        raise ShapeError(f"{who}: tied strengths are times: give times and no beta")
    if erase not in get_args(Erase):
        raise ShapeError(f"{who}: erase is one of {', '.join(get_args(Erase))}, not {erase!r}")
    if q.numel() == 0 or v.numel() == 0:
        return nothing_read(v, (units, hv, d_v, d_k), initial_state)
    if erase == "new" and not _tile(k):  # whose kernel meets one entry of a key after another
        length = k.float().square().sum(-1, keepdim=True).repeat_interleave(hv // k.shape[2], 2)
        by = times if tied else beta
        by = torch.ones_like(v, dtype=torch.float32) if by is None else by.float()
        erase, tied, beta = "gated", False, by / (1.0 + by * length)
    keys = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    spectrum = None if spectrum is None else spectrum.float().mT
    start = None if initial_state is None else initial_state.float().mT
    given = contiguous(q, k, v, gate, times, spectrum, beta, start)
    o, final = _chain(*given, cu_seqlens, erase, tied, keys)
    return o, final.mT


__all__ = ["Erase", "entries_chain"]
