"""One token of every chain in one launch, the state updated in place (or written elsewhere): decoding.

    S' = S Diag(e^g), g a number of the head or one of each of its K channels,   o = S q
    write   S <- S' + beta v k^T
    average S <- S' + beta v (k (1 - e^g))^T
    delta   S <- S' + beta (v - S' a) k^T,  with early S a instead of S' a
    dplr    S <- S' + (S a) b^T + beta v k^T
    turn    S <- S R(angle) Diag(e^g) + beta v k^T, pairs (j, j + K/2) of every row turned
    block   X_j <- sum_i X_i M_ij + (v - sum_i e_i X_i k) w_j k^T,  o = X_0 q  (two slots X_0, X_1)

A program holds some rows of one head's state in registers: it reads and writes them once, which is all the traffic
that counts (8 K V bytes a head, 4 where the state is held in 16 bits: o is of the state before it is rounded). Rows do
not meet, so nothing is synchronised and the same inputs give the same bits.
Arithmetic is float32 on the CUDA cores. Nothing is read back and nothing allocated but o: CUDA graphs capture it.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import AxesError, ShapeError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import in_place
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.common.tiles import complement, floored

HELD = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of a state
_ENTRIES = 512  # of a slot in one program, which is one warp: many small ones hide each other's loads


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _place(index, V: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr, INDEXED: tl.constexpr):
    """What a program works on: batch entry, head, row of the pool (negative: padding), rows of the head's state."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    entry = pid // (TILES * HV)
    head = pid // TILES % HV
    row = entry.to(tl.int64)
    if INDEXED:
        row = tl.load(index + entry).to(tl.int64)
    return entry.to(tl.int64), head, row, pid % TILES * BV + tl.arange(0, BV)


@triton.jit
def _vector(ptr, entry, stride, head, columns, D: tl.constexpr):
    """One head's vector of a (B, heads, D) tensor in float32, `stride` apart from entry to entry."""
    return tl.load(ptr + entry * stride + head * D + columns, mask=columns < D, other=0.0).to(tl.float32)


@triton.jit
def _half(ptr, entry, stride, head, d, D: tl.constexpr, WHICH: tl.constexpr):
    """The first or the second half of such a vector."""
    at = ptr + entry * stride + head * D + WHICH * (D // 2) + d
    return tl.load(at, mask=d < D // 2, other=0.0).to(tl.float32)


@triton.jit
def _number(ptr, entry, stride, at):
    return tl.load(ptr + entry * stride + at).to(tl.float32)


@triton.jit
def follow(
    old, entry, head, d, e, q, k, v, beta, g, a, b, q_row, k_row, v_row, beta_row, g_row, a_row, b_row,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULE: tl.constexpr, GATE: tl.constexpr,
    EARLY: tl.constexpr, STRENGTH: tl.constexpr, OTHER: tl.constexpr, EVERY: tl.constexpr = 1,
):  # fmt: skip
    """Rows e of a head's state after one token, and the token's query.

    RULE: "write", "average" (gates of channels or rows), "delta", "dplr", or "two" strengths, beta of what is erased
    and b of what is written. GATE: "none", "head", "channel" or "row". STRENGTH: beta is given. OTHER: a is given, else
    it is k. EVERY: of so many the last has a query."""
    query = _vector(q, entry // EVERY, q_row, head // GROUP, d, K)
    key = _vector(k, entry, k_row, head // GROUP, d, K)
    value = _vector(v, entry, v_row, head, e, V)
    new = old
    if GATE == "head":
        new = old * tl.exp(floored(_number(g, entry, g_row, head)))
    if GATE == "channel":
        log = floored(_vector(g, entry, g_row, head, d, K))
        new = old * tl.exp(log)[None, :]
        if RULE == "average":
            key *= complement(log)
    if GATE == "row":
        log = floored(_vector(g, entry, g_row, head, e, V))
        new = old * tl.exp(log)[:, None]
        if RULE == "average":
            value *= complement(log)
    if RULE != "write" and RULE != "average":
        eraser = key
        if OTHER:
            eraser = _vector(a, entry, a_row, head // GROUP, d, K)
        if RULE == "dplr" or EARLY:
            seen = tl.sum(old * eraser[None, :], 1)
        else:
            seen = tl.sum(new * eraser[None, :], 1)
        if RULE == "dplr":
            new += seen[:, None] * _vector(b, entry, b_row, head // GROUP, d, K)[None, :]
        elif RULE == "two":
            value = value * _number(b, entry, b_row, head) - seen * _number(beta, entry, beta_row, head)
        else:
            value -= seen
    if STRENGTH and RULE != "two":
        value *= _number(beta, entry, beta_row, head)
    new += value[:, None] * key[None, :]
    return new, query


@Kernel
@triton.jit
def _chain(
    state, into, index, q, k, v, beta, g, a, b, o,
    state_row, into_row, q_row, k_row, v_row, beta_row, g_row, a_row, b_row,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    RULE: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr, STRENGTH: tl.constexpr, OTHER: tl.constexpr,
    INDEXED: tl.constexpr,
):  # fmt: skip
    """Options as in `follow`."""
    entry, head, row, e = _place(index, V, HV, BV, INDEXED)
    d = tl.arange(0, BK)
    at = head * (V * K) + e[:, None] * K + d[None, :]
    inside = (e < V)[:, None] & (d < K)[None, :] & (row >= 0)
    old = tl.load(state + row * state_row + at, mask=inside, other=0.0).to(tl.float32)
    new, query = follow(
        old, entry, head, d, e, q, k, v, beta, g, a, b, q_row, k_row, v_row, beta_row, g_row, a_row, b_row,
        GROUP, K, V, RULE, GATE, EARLY, STRENGTH, OTHER,
    )  # fmt: skip
    tl.store(into + row * into_row + at, new.to(into.dtype.element_ty), mask=inside)
    out = tl.sum(new * query[None, :], 1)
    tl.store(o + (entry * HV + head) * V + e, tl.where(row >= 0, out, 0.0).to(o.dtype.element_ty), mask=e < V)


@Kernel
@triton.jit
def _turning(
    state, into, index, q, k, v, beta, g, turn, o,
    state_row, into_row, q_row, k_row, v_row, beta_row, g_row, turn_row, turn_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, STRENGTH: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """`_chain` of the rule write on the halves of every row, whose entries are pairs."""
    HALF: tl.constexpr = K // 2
    entry, head, row, e = _place(index, V, HV, BV, INDEXED)
    d = tl.arange(0, BH)
    at = head * (V * K) + e[:, None] * K + d[None, :]
    inside = (e < V)[:, None] & (d < HALF)[None, :] & (row >= 0)
    first = tl.load(state + row * state_row + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(state + row * state_row + at + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = tl.load(turn + entry * turn_row + head * turn_head + d, mask=d < HALF, other=0.0).to(tl.float32)
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    near, far = first * cos - second * sin, first * sin + second * cos
    if GATE == "head":
        kept = tl.exp(floored(_number(g, entry, g_row, head)))
        near, far = near * kept, far * kept
    if GATE == "channel":
        near *= tl.exp(floored(_half(g, entry, g_row, head, d, K, 0)))[None, :]
        far *= tl.exp(floored(_half(g, entry, g_row, head, d, K, 1)))[None, :]
    value = _vector(v, entry, v_row, head, e, V)
    if STRENGTH:
        value *= _number(beta, entry, beta_row, head)
    near += value[:, None] * _half(k, entry, k_row, head // GROUP, d, K, 0)[None, :]
    far += value[:, None] * _half(k, entry, k_row, head // GROUP, d, K, 1)[None, :]
    tl.store(into + row * into_row + at, near.to(into.dtype.element_ty), mask=inside)
    tl.store(into + row * into_row + at + HALF, far.to(into.dtype.element_ty), mask=inside)
    out = tl.sum(near * _half(q, entry, q_row, head // GROUP, d, K, 0)[None, :], 1)
    out += tl.sum(far * _half(q, entry, q_row, head // GROUP, d, K, 1)[None, :], 1)
    tl.store(o + (entry * HV + head) * V + e, tl.where(row >= 0, out, 0.0).to(o.dtype.element_ty), mask=e < V)


@triton.jit
def follow_two(
    first, second, entry, head, d, e, q, k, v, block, write, erase,
    q_row, k_row, v_row, block_row, write_row, erase_row,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ERASE: tl.constexpr,
):  # fmt: skip
    """Rows e of a head's two slots after one token, and the token's query."""
    query = _vector(q, entry, q_row, head // GROUP, d, K)
    key = _vector(k, entry, k_row, head // GROUP, d, K)
    value = _vector(v, entry, v_row, head, e, V)
    if ERASE:
        mixed = first * _number(erase, entry, erase_row, head * 2)
        mixed += second * _number(erase, entry, erase_row, head * 2 + 1)
        value -= tl.sum(mixed * key[None, :], 1)
    drive = value[:, None] * key[None, :]
    near = first * _number(block, entry, block_row, head * 4) + second * _number(block, entry, block_row, head * 4 + 2)
    near += _number(write, entry, write_row, head * 2) * drive
    far = first * _number(block, entry, block_row, head * 4 + 1)
    far += second * _number(block, entry, block_row, head * 4 + 3)
    far += _number(write, entry, write_row, head * 2 + 1) * drive
    return near, far, query


@Kernel
@triton.jit
def _block(
    state, into, index, q, k, v, block, write, erase, o,
    state_row, into_row, q_row, k_row, v_row, block_row, write_row, erase_row,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    entry, head, row, e = _place(index, V, HV, BV, INDEXED)
    d = tl.arange(0, BK)
    at = head * (2 * V * K) + e[:, None] * (2 * K) + d[None, :]
    inside = (e < V)[:, None] & (d < K)[None, :] & (row >= 0)
    first = tl.load(state + row * state_row + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(state + row * state_row + at + K, mask=inside, other=0.0).to(tl.float32)
    near, far, query = follow_two(
        first, second, entry, head, d, e, q, k, v, block, write, erase,
        q_row, k_row, v_row, block_row, write_row, erase_row, GROUP, K, V, ERASE,
    )  # fmt: skip
    tl.store(into + row * into_row + at, near.to(into.dtype.element_ty), mask=inside)
    out = tl.sum(near * query[None, :], 1)
    tl.store(o + (entry * HV + head) * V + e, tl.where(row >= 0, out, 0.0).to(o.dtype.element_ty), mask=e < V)
    tl.store(into + row * into_row + at + K, far.to(into.dtype.element_ty), mask=inside)


# ---- launches --------------------------------------------------------------------------------------------------------


def settings(key: int, value: int) -> dict[str, int]:
    """Block sides and warps by the widths alone; the only ones that are picked."""
    side = max(16, power_of_2(key))
    rows = max(2, min(_ENTRIES // side, power_of_2(value)))
    return {"BK": side, "BV": rows, "num_warps": 1, "num_stages": 1}


def _rows(x: Tensor | None) -> Tensor | None:
    """x if every entry of the batch is contiguous, as a slice of a fused projection is; else a copy."""
    return x if x is None or x.is_contiguous() or x[0].is_contiguous() else x.contiguous()


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def _launch_chain(
    state: Tensor, into: Tensor | None, out: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None,
    g: Tensor | None, a: Tensor | None, b: Tensor | None, index: Tensor | None,
    rule: str, early: bool,
) -> None:  # fmt: skip
    batch, heads, width = v.shape
    sizes, new = settings(k.shape[-1], width), _or(into, state)
    gate = _gate(g)
    with layout.on_device(state):
        _chain[(batch * heads * cdiv(width, sizes["BV"]),)](
            state, new, _or(index, v), q, k, v, _or(beta, v), _or(g, v), _or(a, v), _or(b, v), out,
            *(_stride(x) for x in (state, new, q, k, v, beta, g, a, b)),
            HV=heads, GROUP=heads // k.shape[1], K=k.shape[-1], V=width, RULE=rule, GATE=gate, EARLY=early,
            STRENGTH=beta is not None, OTHER=a is not None, INDEXED=index is not None, **sizes,
        )  # fmt: skip


def _launch_turning(
    state: Tensor, into: Tensor | None, out: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None,
    g: Tensor | None, turn: Tensor, index: Tensor | None,
) -> None:  # fmt: skip
    batch, heads, width = v.shape
    sizes, new = settings(k.shape[-1], width), _or(into, state)
    sizes["BH"] = sizes.pop("BK") // 2
    with layout.on_device(state):
        _turning[(batch * heads * cdiv(width, sizes["BV"]),)](
            state, new, _or(index, v), q, k, v, _or(beta, v), _or(g, v), turn, out,
            *(_stride(x) for x in (state, new, q, k, v, beta, g)), *turn.stride()[:2],
            HV=heads, GROUP=heads // k.shape[1], K=k.shape[-1], V=width, GATE=_gate(g), STRENGTH=beta is not None,
            INDEXED=index is not None, **sizes,
        )  # fmt: skip


def _gate(g: Tensor | None) -> str:
    return "none" if g is None else "head" if g.ndim == 2 else "channel"


def _launch_block(
    state: Tensor, into: Tensor | None, out: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Tensor, write: Tensor,
    erase: Tensor | None, index: Tensor | None,
) -> None:  # fmt: skip
    batch, heads, width = v.shape
    sizes, new = settings(k.shape[-1], width), _or(into, state)
    with layout.on_device(state):
        _block[(batch * heads * cdiv(width, sizes["BV"]),)](
            state, new, _or(index, v), q, k, v, block, write, _or(erase, v), out,
            *(_stride(x) for x in (state, new, q, k, v, block, write, erase)),
            HV=heads, GROUP=heads // k.shape[1], K=k.shape[-1], V=width, ERASE=erase is not None,
            INDEXED=index is not None, **sizes,
        )  # fmt: skip


def _or(x: Tensor | None, like: Tensor) -> Tensor:
    """A pointer that the kernel does not read stands for what is not given."""
    return like if x is None else x


_chain_once = in_place("chain_step", _launch_chain, ("state", "into", "out"))
_turning_once = in_place("turning_step", _launch_turning, ("state", "into", "out"))
_block_once = in_place("block_step", _launch_block, ("state", "into", "out"))


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_token(who: str, state: Tensor, slots: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k (B, H, K), v (B, HV, V), and the state (rows, HV, V, *slots, K) that is written in place."""
    if q.ndim != 3 or v.ndim != 3:
        raise ShapeError(f"{who}: q, k, v are one token, (B, H, D), not {tuple(q.shape)} and {tuple(v.shape)}")
    layout.check_tokens(who, q[:, None], k[:, None], v[:, None])
    shape = (*v.shape[1:], *slots, q.shape[-1])
    names = ", ".join(("HV", "V", *("2" for _ in slots), "K"))
    if tuple(state.shape[1:]) != shape or state.dtype not in HELD:
        raise ShapeError(
            f"{who}: state is float32, or held in 16 bits, (B, {names}) = (B, {', '.join(map(str, shape))}), "
            f"not {state.dtype} {tuple(state.shape)}"
        )
    if state.device != q.device or k.device != q.device or v.device != q.device:
        raise ShapeError(f"{who}: state, k, v are on q's device {q.device}, not {state.device}, {k.device}, {v.device}")
    if not state.is_contiguous() and (not state[0].is_contiguous() or state.stride(0) < state[0].numel()):
        raise ShapeError(f"{who}: entries of the state are contiguous and apart, since they are written in place")


def _check_index(who: str, index: Tensor | None, state: Tensor, batch: int) -> None:
    """index is None, or each batch entry's row of the state; distinct rows are the caller's promise."""
    if index is None:
        if state.shape[0] != batch:
            raise ShapeError(f"{who}: state has one row a batch entry, {batch}, not {state.shape[0]}, or give `index`")
    elif tuple(index.shape) != (batch,) or index.dtype not in (torch.int32, torch.int64):
        raise ShapeError(f"{who}: index is int32 or int64 of shape ({batch},), not {index.dtype} {tuple(index.shape)}")
    elif index.device != state.device or not index.is_contiguous():
        raise ShapeError(f"{who}: index is contiguous on the state's device {state.device}, not on {index.device}")


def _check_into(who: str, into: Tensor | None, state: Tensor, index: Tensor | None) -> None:
    """into is None, or a contiguous tensor like the state, which then stays as it is."""
    if into is None:
        return
    if index is not None:
        raise ShapeError(f"{who}: rows of a pool are written in place: give index or into, not both")
    if into.shape != state.shape or into.dtype != state.dtype or into.device != state.device:
        raise ShapeError(f"{who}: into is like the state, {tuple(state.shape)}, not {into.dtype} {tuple(into.shape)}")
    if not into.is_contiguous():
        raise ShapeError(f"{who}: into is contiguous")


def _check_out(who: str, out: Tensor | None, v: Tensor) -> Tensor:
    if out is None:
        return v.new_empty(v.shape)
    if out.shape != v.shape or out.dtype != v.dtype or out.device != v.device or not out.is_contiguous():
        raise ShapeError(f"{who}: out is contiguous, {v.dtype} {tuple(v.shape)} on {v.device}, not {tuple(out.shape)}")
    return out


def _forward_only(who: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise AxesError(f"{who} overwrites the state and has no gradient: call it under torch.no_grad()")


# ---- entries ---------------------------------------------------------------------------------------------------------


def chain_step(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    erase: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    turn: Tensor | None = None,
    rule: Literal["write", "average", "delta", "dplr"] = "write",
    early: bool = False,
    index: Tensor | None = None,
    into: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One token: S <- S Diag(e^g) + beta (v - [delta] S' a) k^T, or S (Diag(e^g) + a b^T) + beta v k^T; o = S q.

    state (B, HV, V, K) float32, or of 16 bits, to which it is rounded as it is written; overwritten. With `index` (B,)
        a pool (P, HV, V, K) whose rows index[b] are (distinct; a negative one is padding: its o is zero and no state
        is touched).
    q, k (B, H, K), v (B, HV, V) in one of bf16, fp16, fp32; HV a multiple of H; K, V from 1 to 256.
    beta (B, HV) strength, None for 1. g log gate, (B, HV) or (B, HV, K), floored at -100, None for no gate.
    turn (K/2,) or (B, HV, K/2): angles by which the pairs (j, j + K/2) of every row of the state turn before its gate;
        for the rule write.
    rule: "write"; "average", whose g is of channels: an entry takes what it forgets; "delta", erasing at `erase`
        (B, H, K), None for k, after the gate or with `early` (which says nothing to the other rules) before it; "dplr"
        with a, b (B, H, K).
    into, like the state, receives the new state if given, and the state stays as it is. out (B, HV, V) receives o if
        given. Returns o (B, HV, V) in v's dtype.
    ShapeError for shapes, dtypes and devices that do not fit; AxesError if a gradient would be asked for.
    """
    who = "chain_step"
    _check_token(who, state, (), q, k, v)
    batch, heads, _ = v.shape
    if rule not in ("write", "average", "delta", "dplr"):
        raise ShapeError(f"{who}: rule is write, average, delta or dplr, not {rule!r}")
    if rule == "average" and (g is None or g.ndim != 3):
        raise ShapeError(f"{who}: rule average writes what the gates of a key's entries forget: g is (B, HV, K)")
    if (rule == "dplr") != (a is not None and b is not None) or (a is None) != (b is None):
        raise ShapeError(f"{who}: the rule dplr takes a and b, and no other rule does")
    if rule != "delta" and erase is not None:
        raise ShapeError(f"{who}: erase belongs to the rule delta, not to {rule}")
    if turn is not None:
        if rule != "write":
            raise ShapeError(f"{who}: a state that turns is written to, by the rule write, not {rule}")
        if q.shape[-1] % 2:
            raise ShapeError(f"{who}: keys turn in pairs, so that their width is even, not {q.shape[-1]}")
        shape = (batch, heads, q.shape[-1] // 2)[0 if turn.ndim > 1 else 2 :]
        layout.check_like(who, "turn", turn, shape, q.device)
    layout.check_like(who, "beta", beta, (batch, heads), q.device)
    layout.check_like(who, "g", g, (batch, heads, q.shape[-1])[: 3 if g is None else max(g.ndim, 2)], q.device)
    for name, x in (("erase", erase), ("a", a), ("b", b)):
        layout.check_like(who, name, x, tuple(k.shape), q.device)
    _check_index(who, index, state, batch)
    _check_into(who, into, state, index)
    _forward_only(who, state, q, k, v, beta, g, turn, erase, a, b, into, out)
    out = _check_out(who, out, v)
    if v.numel() and turn is not None:
        each = turn if turn.stride(-1) == 1 else turn.contiguous()
        each = each.expand(batch, heads, each.shape[-1])
        _turning_once(state, into, out, *(_rows(x) for x in (q, k, v, beta, g)), each, index)
    elif v.numel():
        tokens = (_rows(x) for x in (q, k, v, beta, g, erase if a is None else a, b))
        _chain_once(state, into, out, *tokens, index, rule, early and rule == "delta")
    return out


def block_step(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Tensor,
    write: Tensor,
    erase: Tensor | None = None,
    *,
    index: Tensor | None = None,
    into: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One token of two slots: X_j <- sum_i X_i M_ij + (v - sum_i e_i X_i k) w_j k^T,  o = X_0 q.

    state (B, HV, V, 2, K), overwritten; its dtypes, `index`, `into`, `out` and errors as in `chain_step`.
    q, k (B, H, K), v (B, HV, V) as there. block M (B, HV, 2, 2), write w (B, HV, 2), erase e (B, HV, 2) or None for
        no erasure.
    Returns o (B, HV, V) in v's dtype.
    """
    who = "block_step"
    _check_token(who, state, (2,), q, k, v)
    batch, heads, _ = v.shape
    layout.check_like(who, "block", block, (batch, heads, 2, 2), q.device)
    layout.check_like(who, "write", write, (batch, heads, 2), q.device)
    layout.check_like(who, "erase", erase, (batch, heads, 2), q.device)
    _check_index(who, index, state, batch)
    _check_into(who, into, state, index)
    _forward_only(who, state, q, k, v, block, write, erase, into, out)
    out = _check_out(who, out, v)
    if v.numel():
        _block_once(state, into, out, *(_rows(x) for x in (q, k, v, block, write, erase)), index)
    return out
