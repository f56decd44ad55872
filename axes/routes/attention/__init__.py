"""Attention: a list memory read for all tokens at once. Gates become masses, rotations and reflections move keys.

A scalar gate adds G_t - G_i to the score of pair i (ALiBi, FoX): of these only the pair's own mass, -G_i, changes a
softmax. A rotation turns new keys and queries once, to the frame in which stored keys stand (RoPE). A generalised
Householder product carries keys past blocks of tokens (PaTH). With Euclidean h the list is read through the matrix that
it equals.

Keys, values and queries keep the dtype of the values, which is what products are taken in and lists are kept in; keys
that a reflection moves at every token are kept in float32, or rounding would add up. Masses are summed in float64.
Legend: ... batch, T tokens, n pairs of the state, S = n + T, d_k key, d_v value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from axes.core.chain import Chain
from axes.core.facts import fact
from axes.core.geometry import Entropic, Geometry
from axes.core.legality import gates
from axes.core.memory import Leaves, List
from axes.core.monoids import Element, rotate
from axes.core.rates import rate_shape, resolve
from axes.core.state_update import State, StateUpdate
from axes.kernels.common import versions
from axes.routes import scan
from axes.routes.attention import errors, softmax, transported
from axes.routes.attention.sequences import Alone, Packed

_WIDEST, _WIDEST_CARRIED = 256, 128
_ONE = (1, 1, 1, 1)  # shape of a token where none is given


def no_kernel(
    update: StateUpdate, device: torch.device, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], time: int
) -> str | None:
    """Why no kernel of ours takes part in attention, or None if one does.

    shapes: of the signal's tensors; with "cu_seqlens" of packed sequences and "pairs" of what the state holds.
    """
    reason, carried, plain = asked(update)
    if reason is not None:
        return reason
    more = "cu_seqlens" in shapes or ("pairs" in shapes and shapes["pairs"][-1] > 0)
    alone = "cu_seqlens" not in shapes and shapes.get("v", _ONE)[time] == 1
    if carried and more and not alone:
        return "stored keys and packed sequences are carried through reflections block by block"
    if plain and not more:
        return "scores as they are: torch's fused attention"
    if (reason := versions.refusal(device)) is not None:
        return reason
    if dtype not in versions.DTYPES:
        return f"the kernels accumulate in float32, the values are {dtype}"
    ranks = {len(shapes[n]) for n in "qkv" if n in shapes}
    grouped = ranks == {5} and not carried and "cu_seqlens" not in shapes and shapes["k"][3] == shapes["v"][3] == 1
    if time != 1 or not (ranks <= {4} or grouped):
        return "the kernels take (batch, time, head, width), and groups of queries of lists with masses side by side"
    widest = _WIDEST_CARRIED if carried else _WIDEST
    if any(not 0 < shapes[n][-1] <= widest for n in "kv" if n in shapes):
        return f"the kernels take widths up to {widest}{', where keys are carried' if carried else ''}"
    return None


@fact
def asked(update: StateUpdate) -> tuple[str | None, bool, bool]:
    """Why no kernel takes part whatever the data; whether keys are carried; whether nothing happens to pairs."""
    _, h, monoid, _, memory = update.parts()
    assert isinstance(memory, List)
    kinds, reason = gates(monoid), None
    if h.is_identity:
        reason = "a list read through a matrix"
    elif update.drive_sees_state:
        reason = "the values are errors of earlier reads: a triangular system for every block"
    elif memory.window is not None:
        reason = f"of a window of {memory.window} pairs torch's fused attention reads what a block of queries sees"
    return reason, "low rank" in kinds, kinds <= {"identity"}


def by_blocks(update: StateUpdate) -> bool:
    """Whether torch's operations take the queries block by block."""
    _, h, monoid, _, memory = update.parts()
    assert isinstance(memory, List)
    plain = not update.drive_sees_state and gates(monoid) <= {"identity", "rotation"}
    return h.is_identity or memory.window is not None or not plain


def reads_again(update: StateUpdate, signal: Mapping[str, Tensor | float]) -> bool:
    """Whether torch's fused attention takes the scores on a GPU, so that a kernel behind it reads again what queries
    lost to values that are not finite."""
    _, h, monoid, _, memory = update.parts()
    if not isinstance(memory, List) or h.is_identity or update.drive_sees_state:
        return False
    q, v = (x for x in (signal["q"], signal["v"]) if isinstance(x, Tensor))
    narrow = max(q.shape[-1], v.shape[-1]) <= softmax.WIDEST and v.dtype in versions.DTYPES
    return narrow and gates(monoid) <= {"identity", "rotation"}


def by_kernels(update: StateUpdate) -> str:
    """What the kernels do where they take part."""
    kinds = gates(update.parts().monoid)
    turns = "queries and keys turned by a kernel, " if "rotation" in kinds else ""
    masses = "masses added" if "scalar" in kinds else "without masses by torch's fused attention where it has a form"
    if "low rank" in kinds:
        return "keys carried through reflections along a tree of blocks, one token's at once, scores on chip"
    return f"{turns}scores on chip, {masses}"


def run(
    update: StateUpdate,
    signal: Mapping[str, Tensor | float],
    state: State,
    kernels: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Outputs (..., T, d_v) and the list after T more pairs. signal: batch dimensions, then T, then features.

    kernels: ours where they take part.  cu_seqlens: of sequences packed in a batch entry (1, H, T, ...), by kernels
    alone, with a state each.
    """
    _, h, _, _, memory = update.parts()
    assert isinstance(memory, List)
    k, v, element = _written(update, signal, kernels)
    q = signal["q"]
    assert isinstance(q, Tensor)
    q, scale, old = q.to(v.dtype), memory.temperature(k.shape[-1]), state.theta[2].shape[-1]
    reader = k
    line = Alone(k.shape[-2]) if cu_seqlens is None else Packed(cu_seqlens, k.shape[-2])
    old_keys, old_values, old_mass, *owed = state.theta
    angle = element.angle
    if owed and element.left is not None:
        old_keys, owed = rotate(old_keys, owed[0][..., None, :]), []
    if owed and angle is None:
        angle = torch.zeros_like(owed[0][..., None, :])
    if angle is not None:
        turned, owed = _turned(angle, owed, k, line)
        if update.drive_sees_state:  # what is read before the token's own turn is a turn behind
            behind = turned if update.parts().step.at == "gated" else turned - angle.to(turned.dtype)
            reader = _turn(q, reader, behind, False)[1]
        q, k = _turn(q, k, turned, kernels)
    moved = kernels and element.left is not None and k.shape[-2] == 1 and old > 0  # by one token, which reads them too
    keys = old_keys if moved else line.behind(old_keys, k)
    gate = _log_gate(memory, element, k)
    total = None if gate is None else line.sums(gate)
    mass = _mass_of(old_mass, total, k, line)
    if update.drive_sees_state:
        assert isinstance(h, Entropic)
        rate = resolve(update.parts().step.rate, signal)
        ahead = None if total is None or gate is None else total
        if ahead is not None and update.parts().step.at != "gated":
            ahead = ahead - gate  # type: ignore[operator]
        kernel = errors.Seen(scale, mass, h.mass, memory.errors, ahead)
        v = errors.written(reader, keys, old_values.to(v.dtype), v, rate, kernel)
    values = line.behind(old_values, v)
    final: Tensor | None = None
    if h.is_identity:
        out = scale * _linear(element, gate, (old_keys, old_values, old_mass), k, v, q)
        if element.left is not None:
            final = transported.last_keys(keys, *_factors(memory, element, k))
    elif element.left is not None:
        a, b = _factors(memory, element, k)
        if moved:
            out, final = transported.one(q, keys, k, values, a, b, scale, mass)
        else:
            out, final = transported.attend(q, keys, values, a, b, scale, mass, kernels, memory.window, memory.first)
    else:
        out = softmax.attend(q, keys, values, scale, mass, kernels, cu_seqlens, memory.window, memory.first)
    if not h.is_identity:
        seen = line.places(old)
        out = _weighed(h, seen if memory.most is None else seen.clamp_max(memory.most), out)
    keys = line.rows(keys if final is None else final)
    theta = (*memory.kept((keys, line.rows(values), _now(mass, total, line, values))), *owed)
    return out.to(v.dtype), State(theta, state.via, state.stats, state.norm, state.anchor, state.count + line.length)


# ---- the numbers of a token ----------------------------------------------------------------------------------------


def _written(
    update: StateUpdate, signal: Mapping[str, Tensor | float], kernels: bool
) -> tuple[Tensor, Tensor, Element]:
    """Keys and values to be stored, in one dtype, and what happens to earlier pairs, in float32 at least; vectors of
    many tokens that kernels take in the dtype of the values stay in it."""
    _, _, monoid, step, _ = update.parts()
    k, v = signal["k"], signal["v"]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    numbers, rates = dict(signal), {p.name for p in update.demands()}
    for name in rates if kernels and k.shape[-2] > 1 else {*monoid.signals(), *rates}:
        x = numbers.get(name)
        if isinstance(x, Tensor):
            numbers[name] = x.to(wide)
    rate = resolve(step.rate, numbers)
    element = monoid.element(numbers, rate, k[..., :1, None, :].to(wide))
    if (isinstance(rate, Tensor) or rate != 1.0) and not update.drive_sees_state:  # else it scales an error
        spread = isinstance(rate, Tensor) and rate.ndim and rate_shape(step.rate) == "scalar"
        v = (v * (rate[..., None] if spread else rate)).to(v.dtype)  # type: ignore[index]
    return k.to(v.dtype), v, element


def _log_gate(memory: List, element: Element, k: Tensor) -> Tensor | None:
    """Log gates (..., T) of the masses: what the element does to a pair that has none. None if nothing."""
    gate = element.gate
    if gate is None and isinstance(element.scale, float) and element.scale == 1.0:
        return None
    none = torch.zeros(1, 1, dtype=_exact(k) if gate is None else gate.dtype, device=k.device)
    moved = scan.floored(memory.act(Element(element.scale, gate), (none, none, none[0]))[2]).squeeze(-1)
    moved = moved + 0 * moved  # what is not finite by now is NaN: of an infinite mass a softmax would hide it
    batch = torch.broadcast_shapes(moved.shape[:-1], k.shape[:-2])
    return moved.to(_exact(k)).expand(*batch, k.shape[-2])


def _exact(like: Tensor) -> torch.dtype:
    """What sums over time are taken in."""
    return torch.float32 if like.device.type == "mps" else torch.float64  # which has no float64


def _mass_of(old: Tensor, total: Tensor | None, k: Tensor, line: Alone | Packed) -> Tensor | None:
    """Log masses (..., S) less the gates since the first token: what the state held, then -G_i. None if all are 0."""
    if total is None and not old.shape[-1]:
        return None
    if total is None and k.shape[-2] == 1 and line.cu_seqlens is None:  # one more, behind the others as they are
        return line.behind(old[..., None], old.new_zeros(*k.shape[:-1], 1)).squeeze(-1)
    new = torch.zeros(k.shape[:-1], dtype=_exact(k), device=k.device) if total is None else -total
    return line.behind(old.to(new.dtype)[..., None], new[..., None]).squeeze(-1)


def _now(mass: Tensor | None, total: Tensor | None, line: Alone | Packed, values: Tensor) -> Tensor:
    """Log masses after the last token, by sequence."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    if mass is None:
        mass = torch.zeros(values.shape[:-1], dtype=wide, device=values.device)
    last = line.rows(mass[..., None], -torch.inf).squeeze(-1)
    return (last if total is None else last + line.ends(total)[..., None]).to(wide)


def _turned(angle: Tensor, owed: list[Tensor], k: Tensor, line: Alone | Packed) -> tuple[Tensor, list[Tensor]]:
    """Angles at every token, (T, d_k/2) where all start together with the same ones, else (..., T, d_k/2); and after
    the last token, by sequence (..., d_k/2)."""
    start = owed[0].to(_exact(k)) if owed else None
    batch = angle.shape[:-2]
    if start is not None or isinstance(line, Packed):
        batch = torch.broadcast_shapes((1, 1), batch) if isinstance(line, Packed) else start.shape[:-1]  # type: ignore[union-attr]
    every = angle.to(_exact(k)).expand(*batch, k.shape[-2], angle.shape[-1])
    sums = line.sums(every.mT, start)
    last = line.ends(sums, start).remainder(2 * math.pi).to(angle.dtype)
    sequences = last.shape[:1] if isinstance(line, Packed) else k.shape[:-2]
    heads = k.shape[1:-2] if isinstance(line, Packed) else ()
    return sums.mT.remainder(2 * math.pi).to(angle.dtype), [last.expand(*sequences, *heads, last.shape[-1])]


def _turn(q: Tensor, k: Tensor, angle: Tensor, kernels: bool) -> tuple[Tensor, Tensor]:
    """Both in the frame of the first token; in float32 at least."""
    constant = angle.ndim == 2 or angle.shape[1] == 1
    if kernels and constant and q.ndim == 4 and not angle.requires_grad:
        from axes.kernels.attention.turn import turn

        angle = -(angle if angle.ndim == 2 else angle[:, 0])
        q, k = (x.transpose(1, 2) for x in turn(q.transpose(1, 2), k.transpose(1, 2), angle))
        return q, k
    one = kernels and q.ndim == angle.ndim == 4 and q.shape[2] == 1  # asked first: a length that is compared is fixed
    if one and q.shape[:3] == k.shape[:3] == angle.shape[:3] and not angle.requires_grad:  # its list owes what it owes
        from axes.kernels.attention.turn import turn

        to_q, to_k = turn(q.reshape(-1, 1, 1, q.shape[-1]), k.reshape(-1, 1, 1, k.shape[-1]), -angle.flatten(0, 1))
        return to_q.view(q.shape), to_k.view(k.shape)
    q, k = (rotate(x.to(angle.dtype), -angle).to(x.dtype) for x in (q, k))
    return q, k


def _factors(memory: List, element: Element, k: Tensor) -> tuple[Tensor, Tensor]:
    """a, b (..., T, d_k) of the transport I + a b^T, with any scalar gate already moved to the mass."""
    left = element.ungated_left()
    assert left is not None and element.right is not None
    if left.shape[-1] != 1:
        raise NotImplementedError("attention transports keys through one reflection a token")
    return left[..., 0].expand_as(k), element.right[..., 0].expand_as(k)


def _weighed(h: Geometry, seen: Tensor, out: Tensor) -> Tensor:
    """Softmax sums to one: times what the weights of a query sum to."""
    mass = _mass(h, seen, out)
    return out if isinstance(mass, float) and mass == 1.0 else out * mass


def _mass(h: Geometry, seen: Tensor, like: Tensor) -> Tensor | float:
    """A number, or the root of how many pairs a query sees."""
    assert isinstance(h, Entropic)
    return seen.to(like).sqrt()[:, None] if h.mass is None else h.mass


def _linear(element: Element, gate: Tensor | None, old: Leaves, k: Tensor, v: Tensor, q: Tensor) -> Tensor:
    """What the matrix sum_i e^mass_i v_i k_i^T reads: keys and queries have been turned, the rest is a chain."""
    k, v, q = (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in (k, v, q))
    keys, values, mass = (x.to(k.dtype) for x in old)
    start = (torch.exp(mass)[..., None] * values).mT @ keys
    a, b = (
        None if x is None else x[..., 0][..., None, None, :].expand(*k.shape[:-1], 1, 1, k.shape[-1])
        for x in (element.left, element.right)
    )
    if gate is not None:
        gate = gate[..., None].to(k.dtype).expand(*k.shape[:-1], 1)
    return scan.chunked(Chain(k[..., None, :], v, gate, a=a, b=b), start[..., None, :], q)[0]
