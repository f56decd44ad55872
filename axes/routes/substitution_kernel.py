"""Substitution by kernels that are made for what a tuple writes; `substitution` is their torch form.

What a token writes, u, is followed into text (`axes.programs.rows`) from the same `response` that the torch
form calls, with |k|^2 in the place of the key: where a filter turns with the key, the key is written as it is and u is
divided by its length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from axes.core.algorithms import Anchor
from axes.core.derived import no_substitution
from axes.core.execution import State
from axes.core.facts import fact
from axes.core.memory import Leaves, Memory, outer
from axes.core.rates import Signal, resolve
from axes.core.state_update import StateUpdate
from axes.kernels.common import versions
from axes.programs import rows
from axes.programs.tiles import NotTiles
from axes.routes import substitution
from axes.routes.kernel_terms import every_head
from axes.routes.substitution import Asked, Read, each, response

BLOCK, WIDEST = 16, 128  # tokens that the kernels take together; the widest keys and values
_WIDTH = 64  # of values where nobody has said how wide they are


class Made(NamedTuple):
    """A response as the kernels know it: its name and its inputs in order."""

    name: str
    inputs: tuple[str, ...]


class NotMade(NamedTuple):
    """Why there is none."""

    reason: str


def no_kernel(
    update: StateUpdate, device: torch.device, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], time: int
) -> str | None:
    """Why no kernel computes what is written, or None if one does."""
    reason = no_substitution(update) or versions.refusal(device)
    if reason is not None:
        return reason
    if dtype not in versions.DTYPES:
        return f"the kernels accumulate in float32, the values are {dtype}"
    sizes = [shapes[name] for name in "kv" if name in shapes]
    if time != 1 or any(len(shape) != 4 for shape in sizes):
        return "the kernels take (batch, time, head, width)"
    if any(not 0 < shape[-1] <= WIDEST for shape in sizes):
        return f"the kernels of substitution take widths up to {WIDEST}"
    at = update.parts().step.at
    if isinstance(at, Anchor) and at.every != BLOCK:
        return f"the kernels hold an anchor for {BLOCK} tokens"
    width, d_k = (shapes[n][-1] if n in shapes else _WIDTH for n in "vk")
    made = response_of(update, width, d_k, names_of(update, shapes))
    return f"what is written is no program on tiles: {made.reason}" if isinstance(made, NotMade) else None


def names_of(update: StateUpdate, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Rates that a signal has; all that are asked for, where none is known."""
    every = _every(update)
    return tuple([name for name in every if name in given]) or every


@fact
def _every(update: StateUpdate) -> tuple[str, ...]:
    return tuple(per.name for per in update.demands())


@fact
def response_of(update: StateUpdate, width: int, d_k: int, names: tuple[str, ...]) -> Made | NotMade:
    """The response of a tuple for rows of this width, from these rates."""
    from axes.kernels.substitution.chain import register

    p = update.parts()
    if p.step.at == "new" and type(p.memory).sharpness is not Memory.sharpness:
        return NotMade("an implicit step of a memory with a sharpness of its own")
    shapes = {per.name: per.shape for per in update.demands()}
    kinds: dict[str, rows.Kind] = {"v": "row", "k": "row"}
    kinds |= {n: "row" if shapes[n] == "row" else "number" for n in names if shapes[n] in ("row", "scalar")}

    def written(x: Tensor, k2: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        signal: dict[str, Tensor | float] = {**given}
        weight = each(p, signal)
        held = [each(f, signal) for f in p.filters()]
        if held:
            held[0] = held[0] * _length(k2)
        u, _ = response(p, x, Asked(signal, weight, weight * k2 if p.step.at == "new" else 0.0, tuple(held)))
        return u * _inverse(k2) if held else u

    try:
        source = rows.source(written, kinds, width)
    except NotTiles as reason:
        return NotMade(str(reason))
    if "k" in source.inputs and d_k != width:
        return NotMade("it reads the key beside the value, and they are not of one width")
    name = register(_known(source, kinds))
    return Made(name, source.inputs)


@fact
def reading_of(update: StateUpdate, width: int, d_k: int, names: tuple[str, ...]) -> Made | NotMade:
    """What a query reads beyond a product, as a response to S q; `names` of rates that the signal has."""
    from axes.kernels.substitution.chain import register

    p, shapes = update.parts(), {per.name: per.shape for per in update.demands()}
    kinds: dict[str, rows.Kind] = {"q": "row"}
    kinds |= {n: "row" if shapes[n] == "row" else "number" for n in names if shapes.get(n) in ("row", "scalar")}
    if d_k != width:
        return NotMade("queries and values are not of one width")
    try:
        source = rows.source(
            lambda x, _, given: p.memory.read(cast(Leaves, (Read(x),)), given["q"], {**given}, p.h), kinds, width
        )
    except NotTiles as reason:
        return NotMade(str(reason))
    name = register(_known(source, kinds))
    return Made(name, source.inputs)


def _known(source: rows.Source, kinds: Mapping[str, rows.Kind]) -> Any:
    """A response as the kernels are told of it."""
    from axes.kernels.substitution.chain import Response

    which = tuple(kinds[n] == "row" for n in source.inputs)
    return Response(source.text, which, source.mixes, source.length, source.radial, source.beside)


def read(update: StateUpdate, signal: Signal, q: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """What queries read, of S q = x: by a kernel, or in torch what is no program on tiles."""
    p = update.parts()
    names = tuple(n for n in (per.name for per in update.demands()) if n in signal)
    made = reading_of(update, x.shape[-1], q.shape[-1], names)
    if isinstance(made, NotMade):
        wide = {n: i.float() if isinstance(i, Tensor) and i.is_floating_point() else i for n, i in signal.items()}
        return p.memory.read(cast(Leaves, (Read(x),)), q.float(), wide, p.h).to(dtype)
    from axes.kernels.substitution.reading import shown

    inputs = [q if n == "q" else of_tokens(signal[n], n, update, x.shape) for n in made.inputs]
    return shown(x, made.name, inputs, dtype)


def _length(k2: Tensor) -> Tensor:
    return torch.where(k2 > 0, torch.where(k2 > 0, k2, 1.0).sqrt(), 0.0)


def _inverse(k2: Tensor) -> Tensor:
    return torch.where(k2 > 0, torch.where(k2 > 0, k2, 1.0).rsqrt(), 0.0)


def settle(update: StateUpdate, width: int, d_k: int) -> None:
    """Make the response now, where there is a GPU that would ask for it."""
    if versions.gpu_is_here() and no_substitution(update) is None and max(width, d_k) <= WIDEST:
        response_of(update, width, d_k, names_of(update, {}))


def no_trace(update: StateUpdate, state: State | None) -> bool:
    """Whether a call looks at the count of its state, which compilers cannot."""
    return state is not None and isinstance(update.parts().step.at, Anchor) and torch.compiler.is_compiling()


# ---- the call --------------------------------------------------------------------------------------------------------


def run(
    update: StateUpdate, signal: Signal, state: State | None, weights: Leaves | None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, State]:
    """Outputs (B, T, H, d_v) and the final state. Inputs keep their dtype, sums and states are float32.

    cu_seqlens: of packed sequences, which stand where anchors are renewed."""
    from axes.kernels.substitution.chain import substitution_chain

    p, signal = update.parts(), every_head(update, signal)
    q, k, v = (cast(Tensor, signal[n]) for n in "qkv")
    anchored = isinstance(p.step.at, Anchor)
    fresh = state is None and weights is None
    if state is None:
        state = update.init({n: first(x) for n, x in signal.items()}, weights)
    elif anchored and cu_seqlens is None and (rest := -state.number() % BLOCK):  # up to where the next anchor stands
        return up_to_anchor(update, signal, state, min(rest, v.shape[1]), substitution.run, run)
    q, k = q.to(v.dtype), k.to(v.dtype)
    shape, made = v.shape, response_of(update, v.shape[-1], k.shape[-1], names_of(update, signal))
    assert isinstance(made, Made)
    given = [of_tokens(signal[n], n, update, shape) if n not in "kv" else k if n == "k" else v for n in made.inputs]
    written = substitution_chain(
        q, k, made.name, shape[-1], given, log_gate(update, signal, k, shape), None if fresh else state.theta[0],
        reads="anchored" if anchored else "before" if p.step.at == "prev" else "gated",
        last=len(p.step.via) > 0, full=not p.memory.linear, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    out = written.o
    if not p.memory.linear:
        out = read(update, signal, q, out, v.dtype)
    count = state.count + (shape[1] if cu_seqlens is None or not anchored else cu_seqlens.diff().long())
    via = _held(update, signal, k, written.last, state, cu_seqlens) if p.step.via else state.via
    anchor = (written.before,) if anchored else state.anchor
    return out, State((written.final,), via, state.stats, state.norm, anchor, count)


def up_to_anchor(
    update: StateUpdate, signal: Signal, state: State, rest: int, in_torch: Callable[..., tuple[Tensor, State]],
    by_kernels: Callable[..., tuple[Tensor, State]],
) -> tuple[Tensor, State]:  # fmt: skip
    """Tokens up to the next anchor in torch, what is behind it by the kernels: `run` of a route and of its kernels."""
    v = cast(Tensor, signal["v"])
    length = v.shape[1]

    def part(first: int, end: int) -> dict[str, Tensor | float]:
        return {n: x[:, first:end] if isinstance(x, Tensor) and x.ndim > 1 else x for n, x in signal.items()}

    moved = {
        n: x.transpose(1, 2).float() if isinstance(x, Tensor) and x.ndim > 1 else x for n, x in part(0, rest).items()
    }
    head, state = in_torch(update, moved, state, cast(Tensor, moved["q"]), 2)
    head = head.transpose(1, 2).to(v.dtype)
    if rest == length:
        return head, state
    out, state = by_kernels(update, part(rest, length), state, None)
    return torch.cat((head, out), 1), state


def first(x: Tensor | float) -> Tensor | float:
    if not isinstance(x, Tensor):
        return x
    x = x.select(1, 0) if x.ndim > 1 else x
    return x.float() if x.is_floating_point() else x


def of_tokens(x: Tensor | float, name: str, update: StateUpdate, shape: torch.Size) -> Tensor:
    """A rate as rows (B, T, H, d_v) or numbers (B, T, H) of float32."""
    (per,) = (per for per in update.demands() if per.name == name)
    x = torch.as_tensor(x, dtype=torch.float32)
    return x.expand(shape if per.shape == "row" else shape[:-1])


def log_gate(update: StateUpdate, signal: Signal, k: Tensor, shape: torch.Size) -> Tensor | None:
    """The log gate (B, T, H), or (B, T, H, d_v) of rows; None where nothing is forgotten."""
    p = update.parts()
    element = p.monoid.element(signal, resolve(p.step.rate, signal), k[..., None, :])
    if element.trivial:
        return None
    gate = None if element.gate is None else element.gate.float()
    if gate is not None and gate.ndim:
        gate = _alone(gate)
    if not isinstance(element.scale, float) or element.scale != 1.0:
        log = torch.as_tensor(element.scale, dtype=torch.float32, device=k.device).log()
        gate = log if gate is None else gate + log
    if element.outer is not None:
        rows_gate = _alone(element.outer).float()
        return (rows_gate if gate is None else rows_gate + (gate[..., None] if gate.ndim else gate)).expand(shape)
    assert gate is not None
    return gate.expand(shape[:-1])


def _alone(gate: Tensor) -> Tensor:
    """One of equal columns; of one column a view, whose derivative takes no pass over zeros."""
    return gate.squeeze(-1) if gate.shape[-1] == 1 else gate[..., 0]


def _held(
    update: StateUpdate, signal: Signal, k: Tensor, last: Tensor, state: State, cu_seqlens: Tensor | None
) -> tuple[Any, ...]:
    """What filters hold after the last tokens, which only the state shows."""
    p, length = update.parts(), k.shape[1]
    if cu_seqlens is None:
        at = {n: x.select(1, length - 1) if isinstance(x, Tensor) and x.ndim > 1 else x for n, x in signal.items()}
    else:
        end = (cu_seqlens[1:].long() - 1).clamp_min(0)
        at = {n: x[0, end] if isinstance(x, Tensor) and x.ndim > 1 else x for n, x in signal.items()}
    at = {n: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in at.items()}
    _, held = response(p, last, Asked.of(p, at))
    key = torch.nn.functional.normalize(cast(Tensor, at["k"]), dim=-1, eps=torch.finfo(torch.float32).tiny ** 0.5)
    found = []
    for s, h in zip(cast(Any, state.via), held, strict=True):
        theta = outer(h, key)
        if cu_seqlens is not None:  # an empty sequence keeps what it had
            some = (cu_seqlens[1:] > cu_seqlens[:-1])[:, None, None, None]
            theta = torch.where(some, theta, s.theta[0])
        found.append(s.but(theta=(theta,), count=s.count + length))
    return tuple(found)


__all__ = [
    "Made", "NotMade", "first", "log_gate", "names_of", "no_kernel", "no_trace", "of_tokens", "read", "response_of",
    "run", "settle", "up_to_anchor",
]  # fmt: skip
