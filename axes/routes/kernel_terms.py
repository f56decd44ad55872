"""From a tuple to a kernel call: which kernel family computes the derived chain, and the numbers it is given.

A family is a transition structure: scalar (no gate, a scalar gate, rank one), diagonal, dplr (diagonal plus rank one of
the monoid), block (theta and one momentum buffer) and entries (gates by row, or by row and key). The facts are those
that `axes.core.chain` writes out as vectors; here strengths and gates stay numbers a token, so that the kernels read
keys once, in their own dtype.
Nothing here needs Triton: `no_kernel` is asked on every machine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from axes.core.algorithms import Read
from axes.core.chain import chain
from axes.core.derived import averages, erases_along_key, no_chain, scales_values
from axes.core.execution import SHORT
from axes.core.facts import fact
from axes.core.legality import factors, gates
from axes.core.memory import Leaves
from axes.core.monoids import Diagonal, Element, Hadamard, finite_logs, product, rotate
from axes.core.rates import Per, Rate, Signal, rate_shape, resolve
from axes.core.state_update import State, StateUpdate
from axes.errors import ShapeError
from axes.kernels.common import versions
from axes.routes.packed import Packing
from axes.routes.scaled import scaled

Family = Literal["scalar", "diagonal", "dplr", "block", "entries"]
HOPPER: frozenset[Family] = frozenset({"scalar", "diagonal", "dplr"})  # families with forms for that GPU
WIDEST: dict[Family, int] = {"scalar": 256, "diagonal": 256, "dplr": 256, "block": 256, "entries": 256}
_ANY = (1, 1, 1, 1)
_PRODUCTS, _WIDE_ROWS = 16, 256  # keys and rows between which rows with gates are products of matrices, not entries
_TURNING = {"rotation", "identity", "scalar", "pair"}  # gates that commute with rotations


@final
class NoFamily(NamedTuple):
    """Why no kernel family computes an update."""

    reason: str


@fact
def family(update: StateUpdate) -> Family | NoFamily:
    """The kernel family of an affine chain, from the derived facts alone."""
    reason = no_chain(update)
    if reason is not None:
        return NoFamily(reason)
    cost, _, monoid, step, memory = update.parts()
    kinds, filters = gates(monoid), update.filters()
    if "turn" in kinds:
        return NoFamily("rows that turn stand still in another frame: `axes.routes.turned`")
    if memory.kind == "entries" or kinds & {"row", "hadamard"}:
        reason = _no_entries(update)
        return "entries" if reason is None else NoFamily(reason)
    if rate_shape(step.rate) == "row" and not scales_values(update) or rate_shape(cost.ridge) == "row":
        return NoFamily("every row of the state has a transition of its own")
    if isinstance(cost.ridge, Per) or cost.ridge != 0.0:
        return NoFamily("a ridge decays linearly and can change the sign, kernels take log gates")
    if "dense" in kinds or "rotation" in kinds and (kinds - _TURNING or erases(update)):
        return NoFamily("a dense transition")
    if filters:
        if len(filters) > 1:
            return NoFamily("the kernels carry at most one buffer beside the state")
        every = (update, *filters)
        if any(not gates(u.parts().monoid) <= {"identity", "zero", "scalar"} for u in every) or any(
            rate_shape(u.parts().step.rate) != "scalar" for u in every
        ):
            return NoFamily("a state with a buffer takes scalar gates and rates")
        return "block"
    if "low rank" in kinds and not erases_along_key(update):
        curved = update.parts().predicts
        return NoFamily("a low-rank gate and a curved cost are rank two") if curved else "dplr"
    return "diagonal" if kinds & {"diagonal", "pair"} else "scalar"


def _no_entries(update: StateUpdate) -> str | None:
    """Why the kernel of entries does not compute a chain whose gates are of rows, or of rows and keys."""
    cost, _, monoid, step, memory = update.parts()
    if gates(monoid) - {"identity", "scalar", "row", "hadamard"}:
        return "the kernel of entries takes gates of rows, of entries and of the whole, beside nothing else"
    if sum(isinstance(f, Hadamard) for f in factors(monoid)) > 1:
        return "the kernel of entries takes one gate of entries"
    if step.via or step.debias:
        return "the kernel of entries carries neither buffers nor a normaliser"
    if memory.kind != "entries" and update.parts().predicts:
        return "every row of the state has a transition of its own"
    if isinstance(cost.ridge, Per) or cost.ridge != 0.0:
        return "a ridge decays linearly and can change the sign, kernels take log gates"
    if rate_shape(step.rate) not in ("scalar", "row") and (memory.kind == "entries" or rate_shape(step.rate) != "key"):
        return "the kernel of entries takes strengths of rows"
    return None


def no_kernel(
    update: StateUpdate, device: torch.device, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], time: int
) -> str | None:
    """Why no Triton kernel computes the derived chain, or None if one does."""
    reason = versions.refusal(device)
    if reason is not None:
        return reason
    if dtype not in versions.DTYPES:
        return f"the kernels accumulate in float32, the values are {dtype}"
    kind = family(update)
    if type(kind) is NoFamily:
        return kind.reason
    for name in "kv":
        shape = shapes.get(name, _ANY)
        if time != 1 or len(shape) != 4:
            return "the kernels take (batch, time, head, width)"
        if shape[-1] > WIDEST[kind] and (name == "k" or kind != "entries") or not shape[-1]:
            what = "keys" if kind == "entries" else "widths"
            return f"the {kind} kernels take {what} up to {WIDEST[kind]}"
    return None


def empty_by_kernel(update: StateUpdate) -> bool:
    """Whether the kernels of a chain begin with an empty state by themselves, without one that is all zeros."""
    kind = family(update)
    return not isinstance(kind, NoFamily) and kind != "block" and not update.parts().step.debias


def portable(
    update: StateUpdate,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> str | None:
    """Why the portable kernels of a family compute a chain, whatever its widths, and not its forms for Hopper."""
    kind = family(update)
    if kind not in HOPPER:
        return f"the {kind} family has no other"
    if capability is not None and capability != (9, 0):
        return "the GPU is no Hopper"
    if (reason := versions.gluon_refusal()) is not None:
        return reason
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the forms for Hopper multiply 16-bit values, not {dtype}"
    heads = [shape[2] for name in "kv" if len(shape := (shapes or {}).get(name, _ANY)) == 4]
    if kind == "scalar" and erases(update) and len(set(heads)) > 1:
        return "heads share keys"
    return None


def run(
    update: StateUpdate, signal: Signal, state: State | None, weights: Leaves | None, kernels: Kernels | None = None,
    cu_seqlens: Tensor | None = None, bonus: Tensor | None = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """The chain by its kernel. Inputs keep their dtype, sums and states are float32.

    cu_seqlens: offsets of sequences packed in one batch entry, with a state each.
    bonus: of a tuple that reads between two states, by `own_bonus`; the update is its late one.
    """
    kind = family(update)
    assert not isinstance(kind, NoFamily)
    v = _tensor(signal, "v")
    if state is None and weights is None and empty_by_kernel(update):
        state = State((), (), (), (), (), torch.zeros((), dtype=torch.int64))  # kernels make the empty state themselves
    elif state is None:
        first = {n: _first(x) for n, x in every_head(update, signal).items()}
        state = update.init(first, weights)
    share = averages(update) or rate_shape(update.parts().step.rate) in ("scalar", "row")
    share = share and kind in ("scalar", "diagonal", "entries")
    share = share and not erases_along_key(update)  # whose strengths may be of every head
    share = share and "rotation" not in gates(update.parts().monoid)  # whose angles may be of every head
    if not share:
        signal = every_head(update, signal)
    q, k = _tensor(signal, "q"), _tensor(signal, "k")
    if share:
        q, k = _shared(q, k)
    kernels = kernels or _chunked(cu_seqlens)
    tokens = _Tokens(q.to(v.dtype), k.to(v.dtype), v)
    if kind != "entries" and not (kind == "scalar" and _two(update, tokens, kernels)):
        tokens = tokens._replace(v=_written(update, signal, v))
    families = {"scalar": _scalar, "diagonal": _diagonal, "dplr": _dplr, "block": _block, "entries": _entries}
    compute = families[kind]
    if bonus is not None:
        kernels = kernels._replace(diagonal=partial(kernels.diagonal, bonus=bonus))
    return compute(update, signal, tokens, state, kernels, cu_seqlens)


def own_bonus(update: StateUpdate, signal: Signal) -> Tensor | None:
    """(H, K) of reads of theta_{t-1} + r u_t that the kernel of gates of every key entry makes by itself (RWKV-6): one
    r for all tokens. None where a query has to wait at the token before (`axes.routes.early`)."""
    plain, step = update.normal(), update.parts().step
    look = step.read
    if not isinstance(look, Read) or look.gate != 1.0 or not isinstance(look.rate, Per) or look.rate.shape != "key":
        return None
    kind = family(dataclasses.replace(plain, algorithm=dataclasses.replace(step, read=None)))
    if kind != "diagonal" or erases(update) or "rotation" in gates(update.parts().monoid) or step.rate != 1.0:
        return None
    given, v = _tensor(signal, look.rate.name), _tensor(signal, "v")
    bonus = _same_for_all(given) if given.ndim == 4 and v.ndim == 4 else given
    return bonus if bonus.shape == (v.shape[2], _tensor(signal, "k").shape[-1]) else None


def reads_last(plain: StateUpdate, signal: Signal, writes: int, reads: int) -> bool:
    """Whether the kernels of a chain take the queries of the last of so many of its tokens alone. signal: with several
    writes a token, which the update makes one after another (DeltaProduct)."""
    p, v, q = plain.parts(), _tensor(signal, "v"), _tensor(signal, "q")
    if reads > 1 or p.step.debias or v.ndim != 5 or q.ndim != 4:
        return False
    if family(plain) != "scalar" or not p.predicts or "rotation" in gates(p.monoid):
        return False
    if p.step.at == "prev" and gates(p.monoid) != {"identity"}:  # an early erase
        return False
    k = _tensor(signal, "k")
    if rate_shape(p.step.rate) != "scalar" or p.step.rate == 1.0 or k.shape[2] != v.shape[2]:
        return False
    if _shared(q, k)[0] is not q:  # one key for all heads, which `run` hands on as one
        return False
    from axes.kernels.scalar.chain import reads_last

    each = v.new_empty(()).expand(v.shape[0], v.shape[1] * writes, v.shape[2], v.shape[4])
    return reads_last(q, each, None)


def turning(update: StateUpdate, signal: Signal) -> tuple[Tensor, Tensor] | None:
    """Log gates and angles (B, T, HV, V/2), or (HV, V/2) of all tokens, of modes that have a kernel (S5, the LRU): keys
    of one entry, written as they are, under one gate and one turn of every pair of rows. None of others."""
    p, v = update.parts(), _tensor(signal, "v")
    turns, others = ([f for f in factors(p.monoid) if (f.kind == "turn") is turn] for turn in (True, False))
    plain = len(turns) == 1 and len(others) == 1 and isinstance(others[0], Diagonal) and others[0].side == "row-pair"
    written = not p.predicts and not p.step.via and not p.step.debias and p.step.rate == 1.0 and p.cost.ridge == 0.0
    if not plain or not written or p.step.read is not None or p.memory.kind != "matrix" or v.ndim != 4:
        return None
    if _tensor(signal, "k").shape[-1] != 1:
        return None
    shape = (*v.shape[:-1], v.shape[-1] // 2)
    named = [per.name for f in (others[0], turns[0]) for per in f.rates() if isinstance(per, Per)]
    if len(named) != 2:
        return None
    gate, angle = (signal[name] for name in named)
    if not isinstance(gate, Tensor) or not isinstance(angle, Tensor) or gate.shape != shape or angle.shape != shape:
        return None
    shared = _same_for_all(gate), _same_for_all(angle)
    return shared if shared[0].ndim == shared[1].ndim else (gate, angle)


def run_turning(
    signal: Signal, rates: tuple[Tensor, Tensor], state: State, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, State]:
    """The chain of modes by its kernel, with what `turning` gave."""
    from axes.kernels.entries.modes import modes_chain

    q, k = _shared(_tensor(signal, "q"), _tensor(signal, "k"))
    v = _tensor(signal, "v")
    out, final = modes_chain(q.to(v.dtype), k.to(v.dtype), v, *rates, state.theta[0], cu_seqlens=cu_seqlens)
    return out, _after(state, v, (final,))


class Kernels(NamedTuple):
    """Who computes the families: chunks of a sequence, or one token.

    turns: whether it turns the state by angles that `turn` gives; else keys and queries are, in its frame. mean: what
    reads over a mass, or None; then mass: what makes a mass by itself, or None; then columns, of ones, by which scalar
    reads it. two: whether scalar takes strengths of writes and erases.
    """

    scalar: Callable[..., tuple[Tensor, Tensor]]
    diagonal: Callable[..., tuple[Tensor, Tensor]]
    block: Callable[..., tuple[Tensor, Tensor]]
    entries: Callable[..., tuple[Tensor, Tensor]]
    turns: bool = False
    rows: Callable[..., tuple[Tensor, Tensor]] | None = None
    mass: Callable[[], Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None] = lambda: None
    mean: Callable[[Tensor, Tensor], Callable[..., tuple[Tensor, Tensor, Tensor]] | None] = lambda q, v: None
    columns: Callable[[Tensor, Tensor], int] = lambda q, v: 1
    two: Callable[[Tensor, Tensor], bool] = lambda q, v: False


def _chunked(cu_seqlens: Tensor | None) -> Kernels:
    """Imports on first use: Triton, and only the family that is called."""

    def scalar(*args: object, **options: object) -> tuple[Tensor, Tensor]:
        from axes.kernels.scalar.chain import scalar_chain

        return scalar_chain(*args, cu_seqlens=cu_seqlens, **options)  # type: ignore[arg-type]

    def diagonal(*args: object, **options: object) -> tuple[Tensor, Tensor]:
        from axes.kernels.diagonal.chain import diagonal_chain

        return diagonal_chain(*args, cu_seqlens=cu_seqlens, **options)  # type: ignore[arg-type]

    def block(*args: object, **options: object) -> tuple[Tensor, Tensor]:
        from axes.kernels.block.chain import block_chain

        return block_chain(*args, cu_seqlens=cu_seqlens, **options)  # type: ignore[arg-type]

    def entries(*args: object, **options: object) -> tuple[Tensor, Tensor]:
        from axes.kernels.entries.chain import entries_chain

        return entries_chain(*args, cu_seqlens=cu_seqlens, **options)  # type: ignore[arg-type]

    def rows(*args: object, average: bool) -> tuple[Tensor, Tensor]:
        from axes.kernels.diagonal.rows import rows_chain

        return rows_chain(*args, cu_seqlens=cu_seqlens, average=average)  # type: ignore[arg-type]

    def mass() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None:
        from axes.kernels.scalar.mass import mass_chain

        return partial(mass_chain, cu_seqlens=cu_seqlens)

    def mean(q: Tensor, v: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
        from axes.kernels.scalar.mean import fits, mean_chain

        return mean_chain if fits(q, v, cu_seqlens) else None

    def columns(q: Tensor, v: Tensor) -> int:
        from axes.kernels.scalar.chain import columns_of_ones

        return columns_of_ones(q, v, cu_seqlens)

    def two(q: Tensor, v: Tensor) -> bool:
        from axes.kernels.scalar.chain import takes_two

        return takes_two(q, v, cu_seqlens)

    return Kernels(scalar, diagonal, block, entries, rows=rows, mass=mass, mean=mean, columns=columns, two=two)


def one_token(in_place: bool) -> Kernels:
    """The fused step for signals of one token; the state given is overwritten in place, or left alone."""
    from axes.kernels.step import block_step, chain_step

    def now(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, 0]

    def scalar(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, g: Tensor | None = None,
        erase: Tensor | None = None, initial_state: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert initial_state is not None
        state = (initial_state if initial_state.dtype in SHORT else initial_state.float()).contiguous()
        final = state if in_place else torch.empty_like(state)
        vectors: dict[str, Any] = {n: now(options.pop(n, None)) for n in ("a", "b")}
        if (turn := options.get("turn")) is not None and turn.ndim > 1:
            options["turn"] = turn.expand(*v.shape[:-1], turn.shape[-1])[:, 0]
        out = chain_step(
            state, q[:, 0], k[:, 0], v[:, 0], beta=now(beta), g=now(g), erase=now(erase),
            into=None if in_place else final, **vectors, **options,
        )  # fmt: skip
        return out[:, None], final

    def diagonal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, **o: Any) -> Any:
        return scalar(q, k, v, beta, g, o.pop("erase", None), o.pop("initial_state"), **o)

    def block(
        q: Tensor, k: Tensor, v: Tensor, block: Tensor, write: Tensor, erase: Tensor | None, initial_state: Tensor
    ) -> tuple[Tensor, Tensor]:
        final = initial_state if in_place else torch.empty_like(initial_state)
        into = None if in_place else final
        out = block_step(initial_state, q[:, 0], k[:, 0], v[:, 0], block[:, 0], write[:, 0], now(erase), into=into)
        return out[:, None], final

    def entries(*args: Any, initial_state: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        from axes.kernels.entries.chain import entries_chain

        out, final = entries_chain(*args, initial_state=initial_state, **options)
        return out, initial_state.copy_(final) if in_place else final

    return Kernels(scalar, diagonal, block, entries, turns=True)


def _start(state: State) -> Tensor | None:
    return state.theta[0] if state.theta else None


class _Tokens(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def _scalar(
    update: StateUpdate, signal: Signal, t: _Tokens, state: State, kernels: Kernels, cu_seqlens: Tensor | None
) -> tuple[Tensor, State]:
    element = _element(update, signal, t.k)
    gate = _log_gate(element, t.v.shape[:-1], t.v)
    t, end, more = _in_frame(element, t, cu_seqlens, kernels)
    q, two = t.q, _two(update, t, kernels)
    write, erase, strength = _strengths(update, signal, t, two)
    if two:
        more = {**more, "write": _numbers(update.parts().step.rate, signal, t.v)}
    rule = "delta" if erases(update) else "write"
    early = update.parts().predicts and update.parts().step.at == "prev" and gate is not None

    def pass_over(v: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        out, final = kernels.scalar(
            q, write, v, strength, gate, erase, initial_state=start, rule=rule, early=early, **more
        )
        return out, final if end is None else rotate(final, end[..., None, :])

    if not state.norm:
        out, final = pass_over(t.v, _start(state))
        return out, _after(state, t.v, (final,))
    from axes.kernels.rows.mass import over_mass

    over = kernels.mean(q, t.v) if rule == "write" else None
    if over is not None:
        first = state.norm[0].squeeze(-2)
        out, final, norm = over(q, write, t.v, strength, gate, _start(state), first, update.parts().step.floor)
        norm = norm.unsqueeze(-2)
        if end is not None:
            final, norm = (rotate(x, end[..., None, :]) for x in (final, norm))
        return out, _after(state, t.v, (final,), (norm,))
    scan = kernels.mass() if rule == "write" else None
    if scan is not None:
        mass, norm, q, write = scan(q, write, t.v, strength, gate, state.norm[0].squeeze(-2))
        out, final = pass_over(t.v, _start(state))
        norm = norm.unsqueeze(-2)
        norm = norm if end is None else rotate(norm, end[..., None, :])
        out = over_mass(out, mass.unsqueeze(-1), update.parts().step.floor)
        return out, _after(state, t.v, (final,), (norm,))
    out, final = pass_over(t.v, _start(state))
    columns = kernels.columns(q, t.v)  # alike, of which one is read
    ones = t.v.new_ones(()).expand(*t.v.shape[:-1], columns)  # the normaliser: v is one
    start = state.norm[0]
    mass, norm = pass_over(ones, start.expand(*start.shape[:-2], columns, start.shape[-1]))
    out = over_mass(out, mass[..., :1], update.parts().step.floor)
    return out, _after(state, t.v, (final,), (norm[..., :1, :],))


def _diagonal(
    update: StateUpdate, signal: Signal, t: _Tokens, state: State, kernels: Kernels, cu_seqlens: Tensor | None
) -> tuple[Tensor, State]:
    element = _element(update, signal, t.k)
    gate = _log_gate(element, _wide(t), t.v)
    assert gate is not None
    t, end, turn = _in_frame(element, t, cu_seqlens, kernels)
    write, erase, strength = _strengths(update, signal, t)
    rule = "delta" if erases(update) else "average" if averages(update) else "write"
    early = update.parts().predicts and update.parts().step.at == "prev"
    out, final = kernels.diagonal(
        t.q, write, t.v, gate, strength, erase=erase, initial_state=_start(state), rule=rule, early=early, **turn
    )
    return out, _after(state, t.v, (final if end is None else rotate(final, end[..., None, :]),))


def _in_frame(
    element: Element, t: _Tokens, cu_seqlens: Tensor | None, kernels: Kernels
) -> tuple[_Tokens, Tensor | None, dict[str, Tensor]]:
    """Queries and keys in the frame that turns along, where the chain has no rotation (RoPE); and by what its last
    state is turned, if it is. Kernels that turn the state themselves are told the angles."""
    if element.angle is None or kernels.turns:
        return t, None, {} if element.angle is None else {"turn": element.angle}
    angle = element.angle.expand(*t.k.shape[:-1], element.angle.shape[-1])
    turned, end = _turned(angle.double().cumsum(1), cu_seqlens)
    q, k = (rotate(x.float(), -turned).to(x.dtype) for x in (t.q, t.k))
    return t._replace(q=q, k=k), end, {}


def _dplr(
    update: StateUpdate, signal: Signal, t: _Tokens, state: State, kernels: Kernels, cu_seqlens: Tensor | None
) -> tuple[Tensor, State]:
    element = _element(update, signal, t.k)
    assert element.left is not None and element.right is not None
    gate = _log_gate(element, _wide(t), t.v)
    if gate is None:
        gate = torch.zeros((), device=t.v.device).expand(_wide(t))
    write, _, strength = _strengths(update, signal, t)
    a, b = (x.squeeze(-1).to(t.v.dtype).expand_as(t.k) for x in (element.left, element.right))
    write = write if strength is None else scaled(write, strength[..., None])
    out, final = kernels.diagonal(t.q, write, t.v, gate, a=a, b=b, initial_state=_start(state), rule="dplr")
    return out, _after(state, t.v, (final,))


def _block(
    update: StateUpdate, signal: Signal, t: _Tokens, state: State, kernels: Kernels, cu_seqlens: Tensor | None
) -> tuple[Tensor, State]:
    """Coefficients are those of the chain of a key that is the number one; of values a token's first is enough."""
    rates = {n: x for n, x in signal.items() if n not in ("q", "k", "v")}
    wide = {n: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in rates.items()}
    value = _tensor(signal, "v")[..., :1].float()
    c = chain(update, {**wide, "k": torch.ones_like(value), "v": value})
    assert c.block is not None
    block, write = c.block[..., 0], c.key[..., 0]
    erase = None if c.a is None else c.a[..., 0, :, 0].expand_as(write)
    (buffer,) = state.via
    held = buffer if isinstance(buffer, State) else buffer[0]
    start = _slots(state.theta[0], held.theta[0])
    out, final = kernels.block(t.q, t.k, t.v, block, write, erase, initial_state=start)
    moved = _after(held, t.v, (final[..., 1, :],), held.norm)
    via = moved if isinstance(buffer, State) else (moved,)
    return out, _after(state, t.v, (final[..., 0, :],), via=(via,))


def _entries(
    update: StateUpdate, signal: Signal, t: _Tokens, state: State, kernels: Kernels, cu_seqlens: Tensor | None
) -> tuple[Tensor, State]:
    """Heads that share keys are rows of one."""
    p, shape = update.parts(), t.v.shape
    gate, times, spectrum = _gates_of_entries(update, signal, t)
    sides = t.k.shape[-1], shape[-1]
    alone = gate is not None and times is None and spectrum is None and not erases(update) and kernels.rows is not None
    alone = alone and sides[0] >= _PRODUCTS and max(sides) <= _WIDE_ROWS
    average = alone and averages(update)  # by kernels that have the gate at hand
    rate, beta, k = 1.0 if average else resolve(p.step.rate, signal), None, t.k
    named = p.step.rate.name if isinstance(p.step.rate, Per) else None
    tied = times is not None and any(
        isinstance(f, Hadamard) and f.times is not None and f.times.name == named for f in factors(p.monoid)
    )
    if rate_shape(p.step.rate) == "key":
        k = scaled(k, rate)
    elif not tied and not (isinstance(rate, float) and rate == 1.0):
        each = isinstance(rate, Tensor) and rate.ndim == len(shape) - 1
        beta = torch.as_tensor(rate[..., None] if each else rate, device=t.v.device)  # type: ignore[index]
        beta = (beta if beta.is_floating_point() else beta.float()).expand(shape)
    erase = p.step.at if erases(update) else "none"
    q, start = t.q, _start(state)
    if alone:
        assert kernels.rows is not None
        every = every_head(update, {"q": q, "k": k, "v": t.v})
        written = t.v if beta is None else scaled(t.v, beta)
        out, final = kernels.rows(every["q"], every["k"], written, gate, start, average=average)
        return out, _after(state, t.v, (final,))
    one = q.shape[2] == 1 and k.shape[2] == 1 and shape[2] > 1
    v, gate, times, beta = (x if x is None or not one else x.flatten(2)[:, :, None] for x in (t.v, gate, times, beta))
    if one:
        spectrum = None if spectrum is None else spectrum.flatten(-3, -2)[..., None, :, :]
        start = None if start is None else start.flatten(-3, -2)[:, None]
    out, final = kernels.entries(
        q, k, v, gate, times=times, spectrum=spectrum, beta=beta, tied=tied, erase=erase, initial_state=start
    )
    if one:
        out, final = out.reshape(shape), final.reshape(-1, *shape[2:], final.shape[-1])
    return out, _after(state, t.v, (final,))


def _gates_of_entries(
    update: StateUpdate, signal: Signal, t: _Tokens
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Logs of rows (B, T, HV, V), a step of rows like them, and the logs that it multiplies: (HV, V, K) where all
    tokens share them, else (B, T, HV, V, K)."""
    total: Tensor | None = None
    times: Tensor | None = None
    spectrum: Tensor | None = None
    for f in factors(update.parts().monoid):
        if isinstance(f, Hadamard):
            assert isinstance(f.gate, Per)
            spectrum = _same_for_all(_tensor(signal, f.gate.name))
            if f.times is not None:
                spectrum = finite_logs(spectrum)
                times = torch.as_tensor(resolve(f.times, signal), device=t.v.device).expand(t.v.shape)
            continue
        element = f.element(signal, 1.0, t.k[..., None, :])
        log = None if element.outer is None else element.outer.squeeze(-1)  # whose derivative is a view
        if element.gate is not None:
            log = element.gate
        if not isinstance(element.scale, float) or element.scale != 1.0:
            log = torch.log(torch.as_tensor(element.scale, dtype=torch.float32, device=t.v.device))
        total = log if total is None or log is None else total + log
    return None if total is None else total.expand(t.v.shape), times, spectrum


def _same_for_all(x: Tensor) -> Tensor:
    """What was expanded over batch and tokens, before it was: a gradient then needs no number a token. Else x."""
    if any(x.shape[d] > 1 and x.stride(d) for d in (0, 1)):
        return x
    if not x.requires_grad:
        return x[0, 0]
    if torch.compiler.is_compiling() or x._base is None or type(x.grad_fn).__name__ != "ExpandBackward0":
        return x
    held, heard = x._base, x.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    own = heard is held.grad_fn if held.grad_fn is not None else getattr(heard, "variable", None) is held
    whole = held.shape[2 - x.ndim :] == x.shape[2:] and held.numel() == x[0, 0].numel()
    return held.view(x.shape[2:]) if own and whole else x


def _slots(first: Tensor, second: Tensor) -> Tensor:
    """Two states as the slots of one tensor: a copy, or without gradients the one whose slots they are after a step."""
    whole = None if torch.is_grad_enabled() else first._base
    if whole is not None and whole is second._base and whole.shape == (*first.shape[:-1], 2, first.shape[-1]):
        pairs = zip((first, second), whole.unbind(-2), strict=True)
        if all((x.data_ptr(), x.stride()) == (slot.data_ptr(), slot.stride()) for x, slot in pairs):
            return whole
    return torch.stack((first, second), -2)


# ---- the numbers of a token ----------------------------------------------------------------------------------------


def erases(update: StateUpdate) -> bool:
    """Whether a datum erases what the state holds for its key: what it predicts, or with a strength of its own."""
    p = update.parts()
    return p.predicts and p.cost.curvature == "affine" or erases_along_key(update)


def _written(update: StateUpdate, signal: Signal, v: Tensor) -> Tensor:
    """The value as it is written, where its rate is not the strength of the whole rule."""
    if not (scales_values(update) or erases_along_key(update)):
        return v
    return _by(v, update.parts().step.rate, signal)


def _by(x: Tensor, rate: Rate, signal: Signal) -> Tensor:
    """Vectors by a rate: one number, one a vector, or one an entry."""
    number = resolve(rate, signal)
    if isinstance(number, float) and number == 1.0:
        return x
    each = isinstance(number, Tensor) and number.ndim and rate_shape(rate) == "scalar"
    return scaled(x, number[..., None] if each else number)  # type: ignore[index]


def _strengths(
    update: StateUpdate, signal: Signal, t: _Tokens, two: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Write key, erase key where it is another, and strength (B, T, HV) of every token; two: of what it erases."""
    step = update.parts().step
    if erases_along_key(update):
        last = factors(update.parts().monoid)[-1].strength
        if two and last is not None:
            return t.k, None, _numbers(last, signal, t.v)
        return t.k, _erased(update, signal, t.k), None
    if averages(update):  # whose kernels have the gate at hand
        return t.k, None, None
    rate = 1.0 if scales_values(update) else resolve(step.rate, signal)
    if rate_shape(step.rate) == "key":  # a step size for every key entry bends the write away from the key
        return scaled(t.k, rate), t.k if erases(update) else None, None
    if isinstance(rate, float) and rate == 1.0 and step.at != "new":
        return t.k, None, None
    strength = _numbers(rate, signal, t.v)
    if step.at == "new":  # the implicit step: (I + rate k k^T)^-1 is rank one again
        lengths = t.k.float().square().sum(-1)
        strength = strength / (1 + strength * lengths.repeat_interleave(t.v.shape[2] // t.k.shape[2], -1))
    return t.k, None, strength


def _numbers(rate: Rate | Tensor, signal: Signal, v: Tensor) -> Tensor:
    """A rate, or what it was resolved to, as a number (B, T, HV) of every token."""
    number, shape = rate if isinstance(rate, Tensor) else resolve(rate, signal), v.shape[:-1]
    if not isinstance(number, Tensor):
        return torch.full(shape, number, dtype=torch.float32, device=v.device)
    number = number.float()
    return number if number.shape == shape else number.expand(shape)


def _two(update: StateUpdate, t: _Tokens, kernels: Kernels) -> bool:
    """Whether write and erase, a number each, go to a kernel as such; elsewhere they scale value and erase key."""
    step = update.parts().step
    if not erases_along_key(update) or rate_shape(step.rate) != "scalar" or step.debias:
        return False
    strength = factors(update.parts().monoid)[-1].strength
    return strength is not None and rate_shape(strength) == "scalar" and kernels.two(t.q, t.v)


def _erased(update: StateUpdate, signal: Signal, k: Tensor) -> Tensor:
    """What a map along the written key reads of the state after its gates: the key, by a strength or one an entry."""
    last = factors(update.parts().monoid)[-1]
    if last.strength is None:
        read = last.element(signal, 1.0, k).left
        assert read is not None
        return (-read.squeeze(-1)).to(k.dtype).expand_as(k)
    return _by(k, last.strength, signal)


def _element(update: StateUpdate, signal: Signal, k: Tensor) -> Element:
    """What acts on the state; without a map that erases along the written key, which the rule does."""
    p = update.parts()
    shape = (*k.shape[:-1], 1, k.shape[-1])
    like = k.new_empty((), dtype=torch.float32).expand(shape)  # many tokens turn by an angle's digits
    monoid = product(factors(p.monoid)[:-1]) if erases_along_key(update) else p.monoid
    rate = 1.0 if averages(update) else resolve(p.step.rate, signal)  # which no gate of its own hears
    return monoid.element(signal, rate, like)


def _log_gate(element: Element, shape: torch.Size, like: Tensor) -> Tensor | None:
    """The log gate of this shape: (B, T, HV), or (B, T, HV, K) for one of every key entry; None if nothing is."""
    gate = element.gate
    if gate is not None and gate.ndim and len(shape) == 3:
        gate = gate.squeeze(-1)  # whose derivative is a view, where that of an index is a tensor of zeros
    if not isinstance(element.scale, float) or element.scale != 1.0:
        log = torch.log(torch.as_tensor(element.scale, dtype=torch.float32, device=like.device))
        gate = log if gate is None else gate + log
    return gate if gate is None or gate.shape == shape else gate.expand(shape)


def _turned(total: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Angles since the start of every token's sequence from their cumulative sums, and those of the last tokens."""
    if cu_seqlens is None:
        turned = total.remainder(2 * math.pi).float()
        return turned, turned[:, -1]
    packing = Packing.of(cu_seqlens, total.shape[1])
    turned = packing.from_starts(total).remainder(2 * math.pi).float()
    empty = (packing.offsets[1:] == packing.offsets[:-1])[:, None, None]
    return turned, torch.where(empty, 0.0, turned[0, packing.offsets[1:] - 1])


def _shared(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, 1, D) of keys that are the same for all heads: the kernels read them once a group."""
    if q.shape[2] > 1 and q.stride(2) == 0 and k.stride(2) == 0:
        return q[:, :, :1], k[:, :, :1]
    return q, k


def every_head(update: StateUpdate, signal: Signal) -> dict[str, Tensor | float]:
    """q and k (..., H, K) for every head of v (..., HV, V): neighbours, HV / H of them, share theirs. Tokens of several
    writes have pairs for all heads."""
    v, made = _tensor(signal, "v"), dict(signal)
    if update.parts().step.writes > 1:
        return made
    for name in ("q", "k"):
        x = made.get(name)
        if not isinstance(x, Tensor) or x.ndim != v.ndim or x.shape[-2] >= v.shape[-2]:
            continue
        heads, wanted = x.shape[-2], v.shape[-2]
        if wanted % heads:
            raise ShapeError(f"run: {name} has {heads} heads and v {wanted}, which is not a multiple")
        each = x[..., None, :].expand(*x.shape[:-1], wanted // heads, x.shape[-1])
        made[name] = each.flatten(-3, -2)
    return made


def _wide(t: _Tokens) -> torch.Size:
    return torch.Size((*t.v.shape[:-1], t.k.shape[-1]))


def _tensor(signal: Signal, name: str) -> Tensor:
    x = signal[name]
    assert isinstance(x, Tensor)
    return x


def _first(x: Tensor | float) -> Tensor | float:
    if not isinstance(x, Tensor):
        return x
    x = x.select(1, 0) if x.ndim > 1 else x  # one token first: the rest is not to be copied
    return x.float() if x.is_floating_point() else x


def _after(
    state: State, v: Tensor, theta: Leaves, norm: Leaves = (), via: tuple[State | tuple[State, ...], ...] | None = None
) -> State:
    """The state after v's tokens. Built anew: compilers of torch 2.11 cannot follow a named tuple's `_replace`."""
    filtered = state.via if via is None else via
    return State(theta, filtered, state.stats, norm, state.anchor, state.count + v.shape[1])
