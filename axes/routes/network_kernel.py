"""Anchored memories of two layers by kernels; `cascade` is their torch form.

Gates, rates and a filter are numbers of a block of 16 tokens (`axes.kernels.network.chain.Terms`), which torch makes
and differentiates. What W1 is asked for, and what queries read of it, are those of the memory that the upper layer is
of hidden units (`Memory.upper`): text that substitution's kernels have (`substitution_kernel.response_of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from axes.core.algorithms import Anchor, Step
from axes.core.derived import no_cascade
from axes.core.execution import State
from axes.core.facts import fact
from axes.core.geometry import Euclidean
from axes.core.legality import gates
from axes.core.memory import Leaves, mean_gate
from axes.core.monoids import Identity
from axes.core.rates import Per, Signal, rate_shape, resolve
from axes.core.state_update import StateUpdate
from axes.kernels.common import versions
from axes.routes import cascade, substitution_kernel
from axes.routes.finite import set_aside
from axes.routes.kernel_terms import every_head
from axes.routes.substitution_kernel import BLOCK, WIDEST, Made, NotMade

if TYPE_CHECKING:
    from axes.kernels.network.chain import Terms

_WIDTH, _FLOOR = 64, -100.0  # where nobody has said how wide values are; of logs of gates, as in kernels


def no_kernel(
    update: StateUpdate, device: torch.device, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], time: int
) -> str | None:
    """Why no kernel computes an anchored memory of two layers, or None if one does."""
    reason = no_terms(update) or versions.refusal(device)
    if reason is not None:
        return reason
    if dtype not in versions.DTYPES:
        return f"the kernels accumulate in float32, the values are {dtype}"
    width = d_k = _WIDTH
    if "k" in shapes and "v" in shapes:
        if time != 1 or not len(shapes["k"]) == len(shapes["v"]) == 4:
            return "the kernels take (batch, time, head, width)"
        width, d_k = shapes["v"][-1], shapes["k"][-1]
    if not 0 < width == d_k <= WIDEST:
        return f"the kernels of two layers take keys and values of one width up to {WIDEST}, not {d_k} and {width}"
    made = _response(update, width, substitution_kernel.names_of(update, shapes))
    return f"what is written is no program on tiles: {made.reason}" if isinstance(made, NotMade) else None


@fact
def layered(update: StateUpdate) -> bool:
    """Whether a memory has two layers."""
    return update.parts().memory.upper is not None


@fact
def no_terms(update: StateUpdate) -> str | None:
    """Why a tuple's gates, rates and filters are no numbers of the kernels, or None if they are."""
    p = update.parts()
    if p.memory.upper is None:
        return "the memory has no two layers"
    if (reason := no_cascade(update)) is not None:
        return reason
    if not p.h.is_identity:
        return f"h = {type(p.h).__name__} acts on the state"
    if not (isinstance(p.step.at, Anchor) and p.step.at.every == BLOCK):
        return f"the kernels hold an anchor for {BLOCK} tokens"
    if not cascade.is_factored(update) or p.step.debias or p.step.read is not None or p.step.steps != 1:
        return "stages of outer products alone, read at the state, have kernels"
    filters = update.filters()
    if len(filters) != len(p.step.via) or len(filters) > 1:
        return "the kernels have room for one filter"
    for f in filters:
        q = f.parts()
        if q.step.debias or q.step.read is not None or q.step.via or not q.h.is_identity:
            return "the filter holds more than a sum"
    stages = [u.parts() for u in (update, *filters)]
    if filters and any("row" in gates(s.monoid) | {rate_shape(s.step.rate)} for s in stages):
        return "gates or rates by rows beside a filter"
    if any(not gates(s.monoid) <= {"identity", "scalar", "row"} for s in stages):
        return "the kernels take gates of the whole or of rows"
    return None


@fact
def upper(update: StateUpdate) -> StateUpdate:
    """The tuple of the upper layer over hidden units, whose u is the gradient with its sign."""
    p = update.parts()
    assert p.memory.upper is not None
    return StateUpdate(p.cost, Euclidean(), Identity(), Step(1.0, at=Anchor(BLOCK)), p.memory.upper)


@fact
def _response(update: StateUpdate, width: int, names: tuple[str, ...]) -> Made | NotMade:
    """What is written, from these rates."""
    top = upper(update)
    asked = {per.name for per in top.demands()}
    return substitution_kernel.response_of(top, width, width, tuple(name for name in names if name in asked))


def settle(update: StateUpdate, width: int, d_k: int) -> None:
    """Make the response now, where there is a GPU that would ask for it."""
    if versions.gpu_is_here() and no_terms(update) is None and width == d_k <= WIDEST:
        _response(update, width, substitution_kernel.names_of(update, {}))


# ---- the call --------------------------------------------------------------------------------------------------------


def run(update: StateUpdate, signal: Signal, state: State | None, weights: Leaves | None) -> tuple[Tensor, State]:
    """Outputs (B, T, H, d_v) and the final state. Inputs keep their dtype, sums and states are float32. What is not
    finite is set aside ahead of the launch: tokens of a block meet by masked products, forward and backward."""

    def by_kernels(update: StateUpdate, signal: Signal, state: State | None) -> tuple[Tensor, State]:
        return _run(update, signal, state, weights)

    return set_aside(by_kernels, update, every_head(update, signal), state, batch=2, time=1)


def _run(update: StateUpdate, signal: Signal, state: State | None, weights: Leaves | None) -> tuple[Tensor, State]:
    from axes.kernels.network.chain import network_chain

    top = upper(update)
    q, k, v = (cast(Tensor, signal[n]) for n in "qkv")
    if state is None:
        state = update.init({n: substitution_kernel.first(x) for n, x in signal.items()}, weights)
    elif rest := -state.number() % BLOCK:  # up to where the next anchor stands
        return substitution_kernel.up_to_anchor(update, signal, state, min(rest, v.shape[1]), cascade.run, _run)
    q, k = q.to(v.dtype), k.to(v.dtype)
    shape = v.shape
    made = _response(update, shape[-1], substitution_kernel.names_of(update, signal))
    assert isinstance(made, Made)
    own = {"k": k, "v": v}
    inputs = [own[n] if n in own else substitution_kernel.of_tokens(signal[n], n, top, shape) for n in made.inputs]
    leaves = (*state.theta, *(x for s in _held(state) for x in s.theta))
    starts = [x.expand(shape[0], shape[2], *x.shape[-2:]) for x in leaves]
    read = network_chain(
        q, k, made.name, inputs, numbers(update, signal, k, shape), (starts[0], starts[1]),
        (starts[2], starts[3]) if len(starts) > 2 else None,
    )  # fmt: skip
    out = substitution_kernel.read(top, signal, q, read.o, v.dtype)
    count = state.count + shape[1]
    via = tuple(s.but(theta=read.held, count=s.count + shape[1]) for s in _held(state))
    return out, State(read.weights, via, state.stats, state.norm, read.before, count)


def _held(state: State) -> tuple[State, ...]:
    return cast(Any, state.via)


def numbers(update: StateUpdate, signal: Signal, k: Tensor, shape: torch.Size) -> Terms:
    """Of gates, rates and a filter, what the kernels ask of every token and block."""
    from axes.kernels.network.chain import Terms

    length = shape[1]
    g, r = _log(update, signal, k, shape), _rate(update, signal, shape)
    by_rows = None
    if r.ndim == 4 or g is not None and g.ndim == 4:  # W2, whose rows are hidden units, takes means
        by_rows = [torch.zeros_like(r) if g is None else g, r]
        by_rows = [x if x.ndim == 4 else x[..., None].expand(shape) for x in by_rows]
        g = g if g is None or g.ndim == 3 else mean_gate(g, -1, keepdim=False)
        r = r if r.ndim == 3 else r.mean(-1)
    kept, left = _decays(g, r)
    c, b = left * _blocks(r)[..., None, :], None
    ends: tuple[Tensor | None, Tensor | None] = (None, None)
    for f in update.filters():
        kept_f, left_f = _decays(_log(f, signal, k, shape), r)
        written = left_f * _blocks(_rate(f, signal, shape))[..., None, :]
        ends = kept_f[..., -1], written[..., -1, :]
        b, c = (c @ kept_f[..., None])[..., 0], c @ written
    a = None if g is None else _tokens(kept, length)
    b = None if b is None else _tokens(b, length)
    return Terms(a, b, c.movedim(3, 2).flatten(1, 2)[:, :length], *ends, *(by_rows or (None, None)))


def _log(update: StateUpdate, signal: Signal, k: Tensor, shape: torch.Size) -> Tensor | None:
    g = substitution_kernel.log_gate(update, signal, k, shape)
    return None if g is None else g.clamp_min(_FLOOR)


def _rate(update: StateUpdate, signal: Signal, shape: torch.Size) -> Tensor:
    rate = update.parts().step.rate
    if isinstance(rate, Per):
        return substitution_kernel.of_tokens(resolve(rate, signal), rate.name, update, shape)
    made, device = resolve(rate, signal), cast(Tensor, signal["v"]).device
    if not isinstance(made, Tensor):  # a number that is copied to a GPU is no part of a captured graph
        return torch.full((), made, dtype=torch.float32, device=device).expand(shape[:-1])
    return made.to(device, torch.float32).expand(shape[:-1])


def _blocks(x: Tensor) -> Tensor:
    """(B, T, H) as (B, N, H, 16), zero behind the last token."""
    room = -x.shape[1] % BLOCK
    return torch.nn.functional.pad(x, (0, 0, 0, room)).unflatten(1, (-1, BLOCK)).movedim(2, -1)


def _tokens(x: Tensor, length: int) -> Tensor:
    """(B, N, H, 16) as (B, T, H)."""
    return x.movedim(-1, 2).flatten(1, 2)[:, :length]


def _decays(g: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """What is left at every token of a block of what stood before it (B, N, H, 16), and of every token (.., 16, 16)."""
    sums = _blocks(torch.zeros_like(like) if g is None else g).cumsum(-1)
    if g is None:
        return torch.ones_like(sums), torch.ones_like(sums[..., None] * sums[..., None, :]).tril()
    late = sums[..., :, None] - sums[..., None, :]
    open_ = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=sums.device).tril()
    return sums.exp(), torch.where(open_, late, -torch.inf).exp()


__all__ = ["layered", "no_kernel", "no_terms", "numbers", "run", "settle", "upper"]
