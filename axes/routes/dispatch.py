"""A sequence of tokens by the route that `select` names, or that the caller does.

A named implementation runs or raises; nothing falls back and no environment variable changes meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import cast

import torch
from torch import Tensor

from axes.core import reference
from axes.core.chain import chain
from axes.core.derived import by_entry
from axes.core.memory import Leaves, normalised
from axes.core.rates import Signal, resolve
from axes.core.state_update import State, StateUpdate
from axes.linalg.formulas import again, by_formula
from axes.routes import (
    attention,
    cascade,
    early,
    gram,
    kernel_terms,
    levels,
    levels_kernel,
    network_kernel,
    opaque,
    passes,
    scan,
    several,
    solves,
    substitution,
    substitution_kernel,
    token,
    turned,
)  # fmt: skip
from axes.routes.choice import Choice, Implementation, NoImplementation, Route, require_implementation
from axes.routes.counts import period, phases
from axes.routes.finite import contained, log_gates, require_finite
from axes.routes.given import require_call, require_packed, require_token
from axes.routes.packed import each_alone, each_phase, grows, join, unread
from axes.routes.precision import own_precision
from axes.routes.select import computed, routes, select, select_token
from axes.routes.spans import sizes, split

__all__ = [
    "Choice",
    "Implementation",
    "NoImplementation",
    "Route",
    "implementation",
    "routes",
    "run",
    "run_packed",
    "select",
    "step",
]

_preferred: ContextVar[Implementation | None] = ContextVar("axes_implementation", default=None)
_traced: Implementation | None = None  # the same for compilers, which cannot look into a ContextVar
_GRAM_CHUNK, _SPAN = 32, 256
_GREW = ", of a signal that is: values are too large for this dtype, or the state was not finite before"


@contextmanager
def implementation(name: Implementation) -> Iterator[None]:
    """Within the block, sequences whose call names no implementation use this one, or raise."""
    require_implementation(name)
    global _traced
    token, before = _preferred.set(name), _traced
    _traced = name
    try:
        yield
    finally:
        _preferred.reset(token)
        _traced = before


def chosen() -> Implementation | None:
    """The implementation of the block that is running."""
    return _traced if torch.compiler.is_compiling() else _preferred.get()


def run(
    update: StateUpdate,
    signal: Signal,
    state: State | None = None,
    *,
    time: int = 1,
    weights: Leaves | None = None,
    implementation: Implementation | None = None,
    check_finite: bool = False,
) -> tuple[Tensor, State]:
    """`reference.run` by the fastest legal route: step, then read q, for a whole sequence.

    signal: tensors with time in dimension `time`, batch dimensions around it; "q" is required; q and k of fewer heads
    than v, which has a multiple, are shared by neighbours.  Half precision is computed in float32, but for attention,
    which multiplies and keeps pairs in the dtype of v; float64 in float64.  Outputs come back in the dtype of v, states
    stay in the computing dtype, or are rounded to the 16 bits that the first one was held in (`State.to`).  Raises
    ShapeError, WrongType or UnknownName for what does not fit the tuple; domains are asked of numbers, values of
    tensors are not read.

    check_finite: read them: NotFiniteError for the first token of the signal, or else of the outputs, that is not
    finite, with its sequence and head. Without it what is not finite goes where the recurrence takes it
    (`axes.routes.finite`).
    """
    if not torch.compiler.is_compiling():
        require_call("dispatch.run", update, signal, state, time, weights)
    if check_finite:
        require_finite("dispatch.run", signal, time, gates=log_gates(update), batch=_around(update, signal))
    held = _held(update, state)
    if held is not None:
        assert state is not None
        state = state.to(torch.float32)
    out, state = _run(update, signal, state, time, weights, implementation)
    state = state if held is None else state.to(held)
    if check_finite:
        require_finite("dispatch.run", {"the output": out}, time, _GREW, batch=_around(update, signal))
    return out, state


def _run(
    update: StateUpdate,
    signal: Signal,
    state: State | None,
    time: int = 1,
    weights: Leaves | None = None,
    implementation: Implementation | None = None,
    choice: Choice | None = None,
) -> tuple[Tensor, State]:
    """`run` of what has been checked, by the fastest route or by this choice of `select_token`."""
    q, v = signal["q"], signal["v"]
    assert isinstance(q, Tensor) and isinstance(v, Tensor)
    if state is not None and state.count.ndim:

        def alike(signal: Signal, state: State) -> tuple[Tensor, State]:
            return _run(update, signal, state, time, None, implementation)

        return each_phase(alike, update, signal, state, time)
    if choice is None:
        choice = select(update, v.device, v.dtype, _shapes(signal, state), implementation or chosen(), time)
    if choice.implementation == "c" and not by_formula(*(x for x in signal.values() if isinstance(x, Tensor))):
        if (implementation or chosen()) == "c":
            raise NoImplementation("dispatch.run: no loop of C where transforms of torch.func follow a call")
        choice = select(update, v.device, v.dtype, {}, implementation or chosen(), time)
    plain, several_writes, _ = computed(update)
    if plain is not update and choice.route != "interpreter" and q.shape[time]:
        # of dense bfloat16, as it was seen right on a GPU; other dtypes and packed tokens wait at the token before
        own = choice[:2] == ("chain", "triton") and v.dtype == torch.bfloat16
        if own and (bonus := kernel_terms.own_bonus(update, signal)) is not None:
            with own_precision(v):
                return kernel_terms.run(plain, signal, state, weights, bonus=bonus)
        if choice[:2] == ("chain", "triton") and (rates := kernel_terms.turning(update, signal)) is not None:
            begun = state or _begun(update, kernel_terms.every_head(update, signal), time, weights)
            with own_precision(v):
                return kernel_terms.run_turning(signal, rates, begun)
        written = several_writes and choice[:2] == ("chain", "triton") and plain is several.one(update)
        if written and kernel_terms.reads_last(plain, signal, several.each(update), update.parts().step.reads):

            def by_kernel(update: StateUpdate, signal: Signal, state: State | None) -> tuple[Tensor, State]:
                with own_precision(v):
                    return kernel_terms.run(update, signal, state, weights)

            return several.run(update, signal, state, time, by_kernel, alone=True)
        kernel = choice.implementation == "triton"
        return _otherwise(update, several_writes, signal, state, time, weights, implementation, kernel)
    if choice[:2] == ("chain", "triton") and q.shape[time]:
        with own_precision(v):
            return kernel_terms.run(update, signal, state, weights)
    anchored = choice[:2] in (("substitution", "triton"), ("cascade", "triton"))
    if anchored and substitution_kernel.no_trace(update, state):
        choice = select(update, v.device, v.dtype, _shapes(signal, state), "torch", time)
    if choice[:2] == ("substitution", "triton") and q.shape[time]:
        with own_precision(v):
            return substitution_kernel.run(update, signal, state, weights)
    if choice[:2] == ("cascade", "triton") and q.shape[time]:
        with own_precision(v):
            return network_kernel.run(update, signal, state, weights)
    if choice[:2] == ("passes", "triton") and q.shape[time]:
        with own_precision(v):
            begun = state or _begun(update, kernel_terms.every_head(update, signal), time, weights)
            return _passes_by_kernel(update, signal, begun)
    if (
        choice[:2] == ("levels", "triton")
        and torch.compiler.is_compiling()
        and levels_kernel.no_whole(update, _shapes(signal, state))
    ):  # its runs are as many as the length says
        choice = select(update, v.device, v.dtype, _shapes(signal, state), "torch", time)
    if choice[:2] == ("levels", "triton") and q.shape[time]:
        with own_precision(v):
            return levels_kernel.run(update, signal, _chain_by_kernel, whole=True)
    signal = kernel_terms.every_head(update, signal)
    if choice.route not in _AS_GIVEN:
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        signal = {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in signal.items()}
    if q.shape[time] == 0:
        if state is None:
            empty = _each(signal, time, lambda x: x.new_zeros(_without(x, time)))
            state = update.init(empty, weights)
        return unread(q, v, update.parts().step.reads), state
    with own_precision(v):  # the recurrence stays in its own precision
        if state is not None and time == 1 and opaque.takes(update, choice, signal, q.shape[time]):
            out, state = opaque.run(update, choice.route, signal, state)
            return out.to(v.dtype), state
        return _execute(choice, update, signal, state, time, weights, v.dtype)


def _otherwise(
    update: StateUpdate,
    several_writes: bool,
    signal: Signal,
    state: State | None,
    time: int,
    weights: Leaves | None,
    implementation: Implementation | None,
    kernel: bool,
) -> tuple[Tensor, State]:
    """`_run` by the tuple that computes it: of rows that stand still, one write a token, or read at states alone.
    kernel: whether kernels do."""

    def plain(update: StateUpdate, signal: Signal, state: State | None) -> tuple[Tensor, State]:
        return _run(update, signal, state, time, weights, implementation)

    if turned.still(update) is not update:
        signal = kernel_terms.every_head(update, signal)
        begun = state or _begun(update, signal, time, weights)
        return turned.run(update, signal, begun, time, plain, by_kernel=kernel)
    if several_writes:
        return several.run(update, signal, state, time, plain)
    signal = kernel_terms.every_head(update, signal)
    return early.run(update, signal, state or _begun(update, signal, time, weights), time, plain)


def run_packed(
    update: StateUpdate,
    signal: Signal,
    state: State,
    cu_seqlens: Tensor,
    *,
    implementation: Implementation | None = None,
    check_finite: bool = False,
) -> tuple[Tensor, State]:
    """`run` over N sequences packed in one batch entry (1, T, ...), with a state each: (N, ...) in `state`.

    cu_seqlens: boundaries 0, ..., T (N + 1,), whose values are checked on the CPU; a kernel leaves them on the device,
    the torch routes read them and take the sequences of one length together.  The state's count is one number for each
    sequence (N,) where the tuple asks for it (an anchor) and they differ; else at least that of the longest sequence.
    check_finite: as `run`.
    """
    if not torch.compiler.is_compiling():
        require_packed("dispatch.run_packed", update, signal, state, cu_seqlens)
    if check_finite:
        require_finite("dispatch.run_packed", signal, gates=log_gates(update), batch=2, cu_seqlens=cu_seqlens)
    held = _held(update, state)
    if held is not None:
        state = state.to(torch.float32)
    out, after = _run_packed(update, signal, state, cu_seqlens, implementation)
    after = after if held is None or after is None else after.to(held)
    if check_finite:
        require_finite("dispatch.run_packed", {"the output": out}, 1, _GREW, batch=2, cu_seqlens=cu_seqlens)
    return out, after


def _run_packed(
    update: StateUpdate, signal: Signal, state: State, cu_seqlens: Tensor, implementation: Implementation | None
) -> tuple[Tensor, State]:
    """`run_packed` of what has been checked."""
    q, v = signal["q"], signal["v"]
    assert isinstance(q, Tensor) and isinstance(v, Tensor)
    shapes = {**_shapes(signal, state), "cu_seqlens": tuple(cu_seqlens.shape)}
    choice = select(update, v.device, v.dtype, shapes, implementation or chosen(), 1)
    other, several_writes, _ = computed(update)
    if other is not update and choice.implementation == "triton" and q.shape[1]:
        rates = kernel_terms.turning(update, signal) if choice.route == "chain" else None
        if rates is not None:
            with own_precision(v):
                return kernel_terms.run_turning(signal, rates, state, cu_seqlens)
        still = turned.still(update) is update
        bounds = cu_seqlens * several.each(update) if still else cu_seqlens

        def plain(update: StateUpdate, signal: Signal, state: State | None) -> tuple[Tensor, State]:
            assert state is not None
            return run_packed(update, signal, state, bounds, implementation=implementation)

        if not still:
            every = kernel_terms.every_head(update, signal)
            return turned.run(update, every, state, 1, plain, cu_seqlens, by_kernel=True)
        if several_writes:
            return several.run(update, signal, state, 1, plain)
        return early.run(update, kernel_terms.every_head(update, signal), state, 1, plain, cu_seqlens)
    walked = choice.implementation == "c" and other is update
    if (choice.implementation == "triton" or walked) and q.shape[1] and _alike(update, choice, state):
        with own_precision(v):
            if choice.route == "attention":
                moved = {n: x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim > 1 else x for n, x in signal.items()}
                out, state = attention.run(update, moved, state, True, cu_seqlens)
                return out.transpose(1, 2), state
            if choice.route == "substitution":
                return substitution_kernel.run(update, signal, state, None, cu_seqlens)
            if choice.route == "passes":
                return _passes_by_kernel(update, signal, state, cu_seqlens)
            if choice.route == "token":
                own = kernel_terms.every_head(update, signal)
                return token.run(update, own, state, None, cu_seqlens, "c" if walked else "triton")
            return kernel_terms.run(update, signal, state, None, cu_seqlens=cu_seqlens)

    def alone(signal: Signal, state: State) -> tuple[Tensor, State]:
        return _run(update, signal, state, implementation=implementation)

    out, ends = each_alone(alone, update, signal, state, cu_seqlens.tolist())
    return out, join(ends, grows(update), counted=period(update) is not None) if len(ends) > 1 else ends[0]


def _alike(update: StateUpdate, choice: Choice, state: State) -> bool:
    """Whether packed sequences stand where one kernel takes them all; else it takes those that stand alike."""
    if choice.route == "cascade":  # whose kernels take sequences of one length
        return False
    if period(update) is None or choice.route not in ("substitution", "token"):
        return True
    if torch.compiler.is_compiling():
        return False
    stand = set(phases(update, state, 1))
    return stand == {0} if choice.route == "substitution" else len(stand) == 1


def _passes_by_kernel(
    update: StateUpdate, signal: Signal, state: State, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, State]:
    def by_kernel(chain: StateUpdate, own: Signal, start: State, _: int) -> tuple[Tensor, State]:
        return kernel_terms.run(chain, own, start, None, cu_seqlens=cu_seqlens)

    v = signal["v"]
    assert isinstance(v, Tensor)
    out, state = passes.run(update, kernel_terms.every_head(update, signal), state, 1, by_kernel)
    return out.to(v.dtype), state


def _chain_by_kernel(update: StateUpdate, signal: Signal, start: State | None) -> tuple[Tensor, State]:
    return kernel_terms.run(update, signal, start, None)


def step(
    update: StateUpdate, signal: Signal, state: State, *, implementation: Implementation | None = None,
    in_place: bool = False,
) -> tuple[Tensor, State]:  # fmt: skip
    """One token (B, 1, H, ...): by the fused kernel where one is and no gradient is asked, else by the interpreter; a
    list by its route, which grows it in place of a copy.

    in_place: the kernel writes the new state over the old one, which the caller gives up.
    """
    if not torch.compiler.is_compiling():
        require_token("dispatch.step", update, signal, state)
    return one_token(update, signal, state, implementation, in_place)


def one_token(
    update: StateUpdate, signal: Signal, state: State, implementation: Implementation | None, in_place: bool = False
) -> tuple[Tensor, State]:
    """`step` of what has been checked."""
    v = signal["v"]
    assert isinstance(v, Tensor)
    if state.count.ndim:

        def alike(signal: Signal, state: State) -> tuple[Tensor, State]:
            return one_token(update, signal, state, implementation, in_place)

        return each_phase(alike, update, signal, state, 1)
    shapes = _shapes(signal, state)
    inputs = [x for x in (*signal.values(), *state.theta) if isinstance(x, Tensor)]
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    named = implementation or chosen()
    choice = select_token(update, v.device, v.dtype, shapes, named, differentiated)
    other, several_writes, _ = computed(update)
    kernel = choice[:2] == ("chain", "triton") and other is update
    if not kernel and (held := _held(update, state)) is not None:
        out, after = one_token(update, signal, state.to(torch.float32), implementation)
        return out, after.to(held)
    if other is not update and choice.implementation == "triton":
        return _step_otherwise(update, several_writes, signal, state, implementation, in_place)
    if choice.route in ("attention", "token"):
        return _run(update, signal, state, implementation=named, choice=choice)
    if choice.implementation == "triton":
        with own_precision(v):
            return kernel_terms.run(update, signal, state, None, kernel_terms.one_token(in_place))
    return _run(update, signal, state, implementation="reference")


def _held(update: StateUpdate, state: State | None) -> torch.dtype | None:
    """The 16 bits that a state is held in: computed in float32, rounded once. Lists keep a dtype of their own."""
    return None if state is None or update.parts().memory.kind == "list" else state.held()


def _step_otherwise(
    update: StateUpdate,
    several_writes: bool,
    signal: Signal,
    state: State,
    implementation: Implementation | None,
    in_place: bool,
) -> tuple[Tensor, State]:
    """`step` by the kernel of the tuple that computes it."""

    def plain(update: StateUpdate, signal: Signal, given: State) -> tuple[Tensor, State]:
        return step(update, signal, given, implementation=implementation, in_place=in_place)

    if turned.still(update) is not update:
        return turned.run(update, kernel_terms.every_head(update, signal), state, 1, plain)
    if not several_writes:
        before = state.but(theta=(state.theta[0].clone(),)) if in_place else state  # it is read after the step
        return early.run(update, kernel_terms.every_head(update, signal), before, 1, lambda u, s, _: plain(u, s, state))
    one, count, outputs = several.one(update), state.count + 1, []
    tokens, reads = several.tokens(update, signal, 1), update.parts().step.reads
    for i in range(several.each(update)):
        token = {n: x[:, i : i + 1] if isinstance(x, Tensor) and x.ndim > 1 else x for n, x in tokens.items()}
        out, state = plain(one, token, state)
        outputs.append(out)
    return out if reads == 1 else torch.stack(outputs[-reads:], -2), state.but(count=count)


def _begun(update: StateUpdate, signal: Signal, time: int, weights: Leaves | None) -> State:
    """The state before the first token, in the dtype that chains are computed in."""
    v = signal["v"]
    assert isinstance(v, Tensor)
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    first = _each(signal, time, lambda x: x.select(time, 0).to(wide) if x.is_floating_point() else x.select(time, 0))
    return update.init(first, weights)


@opaque.computed_by
def _by_route(update: StateUpdate, route: str, signal: Signal, state: State) -> tuple[Tensor, State]:
    """For `opaque`: signals with time in dimension 1 and a state."""
    v = signal["v"]
    assert isinstance(v, Tensor)
    choice = Choice(route, "reference" if route == "interpreter" else "torch", "as it was traced")  # type: ignore[arg-type]
    return _execute(choice, update, signal, state, 1, None, v.dtype)


def _execute(
    choice: Choice,
    update: StateUpdate,
    signal: Signal,
    state: State | None,
    time: int,
    weights: Leaves | None,
    dtype: torch.dtype,
) -> tuple[Tensor, State]:
    q = signal["q"]
    assert isinstance(q, Tensor)
    if choice.route == "interpreter":
        out, state = reference.run(update, signal, state, time=time, weights=weights)
        return out.to(dtype), state
    if choice.route == "token":
        return token.run(update, signal, state, weights, language="c" if choice.implementation == "c" else "triton")
    batch = q.ndim - 2
    moved = _each(signal, time, lambda x: x.movedim(time, batch))
    if state is None:
        state = update.init(_each(moved, batch, lambda x: x.select(batch, 0)), weights)
    route = _route(choice, batch)
    if choice.implementation == "triton" or attention.reads_again(update, moved) and attention.softmax.may_mend(q):
        out, state = route(update, moved, state)
    else:
        out, state = contained(route, update, moved, state, batch)
    return out.movedim(batch, time).to(dtype), state


def _route(choice: Choice, batch: int) -> Callable[[StateUpdate, Signal, State], tuple[Tensor, State]]:
    """For signals of `batch` batch dimensions, then T, then features."""

    def run(update: StateUpdate, signal: Signal, state: State) -> tuple[Tensor, State]:
        if choice.route == "attention":
            return attention.run(update, signal, state, choice.implementation == "triton")
        return _ROUTES[choice.route](update, signal, state, batch)

    return run


def _shapes(signal: Signal, state: State | None) -> dict[str, tuple[int, ...]]:
    """What `select` asks of a call."""
    shapes = {n: tuple(x.shape) for n, x in signal.items() if isinstance(x, Tensor)}
    if state is not None and len(state.theta) == 2 and state.theta[0].ndim > state.theta[1].ndim:  # and their number
        shapes["levels"] = tuple(state.theta[0].shape)
    return shapes if state is None or len(state.theta) < 3 else {**shapes, "pairs": tuple(state.theta[2].shape)}


def _around(update: StateUpdate, signal: Signal) -> int:
    """Batch dimensions of a signal: those of its values without time, features and several writes."""
    v = signal["v"]
    assert isinstance(v, Tensor)
    return v.ndim - 2 - (update.parts().step.writes > 1)


def _each(signal: Signal, time: int, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor | float]:
    """Change every tensor that varies in time; numbers and constants stay."""
    return {n: change(x) if isinstance(x, Tensor) and x.ndim > time else x for n, x in signal.items()}


def _without(x: Tensor, time: int) -> list[int]:
    return [n for i, n in enumerate(x.shape) if i != time]


# ---- routes: each takes batch dimensions, then T, then features ---------------------------------------------------


def _run_chain(update: StateUpdate, signal: Signal, state: State, batch: int) -> tuple[Tensor, State]:
    v = signal["v"]
    assert isinstance(v, Tensor)
    length = v.shape[batch]
    if length <= _SPAN or not by_entry(update) or torch.compiler.is_compiling():
        return _chain_of(update, signal, state, batch)
    outputs = []  # span by span, each computed again in the backward pass: entries of a state are kept for one alone
    for part in split(signal, batch, sizes(length, _SPAN, None, 0)):
        if torch.is_grad_enabled():
            out, state = again(_chain_of, update, part, state, batch)
        else:
            out, state = _chain_of(update, part, state, batch)
        outputs.append(out)
    return torch.cat(outputs, batch), state


def _chain_of(update: StateUpdate, signal: Signal, state: State, batch: int) -> tuple[Tensor, State]:
    q, v = signal["q"], signal["v"]
    assert isinstance(q, Tensor) and isinstance(v, Tensor)
    buffers = [t.theta[0] for s in state.via for t in _branches(s)]
    start = torch.stack([state.theta[0], *buffers], -2)  # (..., d_v, p, d_k)
    if state.norm:  # the normaliser is one more row, whose value is always one
        start = torch.cat((start, state.norm[0][..., None, :]), -3)
        v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    c = chain(update, {**signal, "v": v})
    if c.rows:
        start, q = start[..., None, :, :], q[..., None, :, :]
    out, final = scan.chunked(c, start, q)
    if c.rows:
        out, final = out[..., 0].mT, final[..., 0, :, :]
    norm: Leaves = ()
    if state.norm:
        mass = out[..., -1:]
        out = normalised(out[..., :-1], mass, update.parts().step.floor)
        final, norm = final[..., :-1, :, :], (final[..., -1:, 0, :],)
    count = state.count + q.shape[-2]
    slots = iter(final.unbind(-2))
    theta, via = next(slots), []
    for s in state.via:
        moved = tuple(t.but(theta=(next(slots),), count=count) for t in _branches(s))
        via.append(moved[0] if isinstance(s, State) else moved)
    return out, State((theta,), tuple(via), (), norm, (), count)


def _branches(filtered: State | tuple[State, ...]) -> tuple[State, ...]:
    return (filtered,) if isinstance(filtered, State) else filtered


def _run_cascade(update: StateUpdate, signal: Signal, state: State, batch: int) -> tuple[Tensor, State]:
    q = signal["q"]
    assert isinstance(q, Tensor)
    return cascade.run(update, signal, state, q, batch)


def _run_substitution(update: StateUpdate, signal: Signal, state: State, batch: int) -> tuple[Tensor, State]:
    q = signal["q"]
    assert isinstance(q, Tensor)
    return substitution.run(update, signal, state, q, batch)


def _run_passes(update: StateUpdate, signal: Signal, state: State, batch: int) -> tuple[Tensor, State]:
    return passes.run(update, signal, state, batch, _run_chain)


def _run_solve(update: StateUpdate, signal: Signal, state: State, batch: int) -> tuple[Tensor, State]:
    return solves.run(update, signal, state, batch, _run_chain)


def _run_levels(update: StateUpdate, signal: Signal, state: State, batch: int) -> tuple[Tensor, State]:
    return levels.run(update, signal, state, batch)


def _run_gram(update: StateUpdate, signal: Signal, state: State, batch: int) -> tuple[Tensor, State]:
    cost, h, monoid, step, _ = update.parts()
    outputs, done = [], 0
    if not h.is_identity and state.number() == 0:  # a first state need not have unit columns; every later one has
        first = _each(signal, batch, lambda x: x.narrow(batch, 0, 1))
        out, state = reference.run(update, first, state, time=batch)
        outputs.append(out)
        done = 1
    k, v, q = (signal[n] for n in "kvq")
    assert isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(q, Tensor)
    rate = resolve(step.rate, signal)
    element = monoid.element(signal, rate, k[..., None, :])
    gate = 0.0 if element.gate is None else element.gate if element.gate.ndim == 0 else element.gate[..., 0]
    one = torch.ones_like(k[..., 0])
    kept, gamma = torch.exp(one * gate) * element.scale, one * rate
    form = gram.dec if cost.drives == "error" and not cost.encode else partial(gram.sim, encode=cost.encode)
    if not h.is_identity:  # what is normalised forgets by larger steps
        kept, gamma = one, gamma * torch.exp(-one * gate) / element.scale
    slots = state.theta[0]
    given = (k, v, q, gamma[..., None], *((kept[..., None],) if h.is_identity else ()))
    rest = {str(i): x[..., done:, :] for i, x in enumerate(given)}
    for part in split(rest, k.ndim - 2, sizes(k.shape[-2] - done, _GRAM_CHUNK, step.at, done)):
        keys, values, asked, *numbers = (cast(Tensor, x) for x in part.values())
        out, slots = form(slots, keys, values, asked, *(x[..., 0] for x in numbers))
        outputs.append(out)
    count = state.count + (k.shape[-2] - done)
    return torch.cat(outputs, -2), state.but(theta=(slots,), count=count)


_AS_GIVEN = frozenset(("attention", "token"))  # routes that take half precision as it is
_ROUTES = {
    "chain": _run_chain,
    "substitution": _run_substitution,
    "cascade": _run_cascade,
    "gram": _run_gram,
    "passes": _run_passes,
    "levels": _run_levels,
    "solve": _run_solve,
}
