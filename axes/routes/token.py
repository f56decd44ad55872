"""Tuples whose state bends at every token, by a kernel that is generated from their step (`axes.programs.tile_text`).

Whatever `StateUpdate.step` does with one token is followed as torch executes it, with its adjoint; if it is a program
on tiles, and the state with its cotangent stays in registers, one GPU program walks the tokens of a head. On a CPU the
same program is a loop of C (`axes.programs.c_text`), whose state stays in the nearest cache. No tuple is named: what
cannot be followed says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from axes.core import execution, reference
from axes.core.algorithms import Anchor
from axes.core.facts import fact
from axes.core.memory import Leaves
from axes.core.rates import Signal
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError
from axes.kernels.common import versions
from axes.kernels.common.sizes import power_of_2
from axes.programs import c_library
from axes.programs.tile_text import OUT, Language, Walk
from axes.programs.tiles import GRAD, Axis, Extent, NotTiles, Program, Shape, trace
from axes.routes.counts import period
from axes.routes.token_threads import on_hopper

REGISTERS = 65536  # of a processor, 32 bits each
_FEW = 32  # keys of a program that lie across warps: then sums over rows, which a way back has more of, stay in one
_SPARE = 5  # tiles beside the states and their cotangents that a step holds at a time
_SHAPES: dict[str, Shape] = {"scalar": (None,), "key": (None, "k"), "row": (None, "v"), "square": (None, "v", "k")}
_USUAL = 64  # a width that is assumed where none is known
TILES = ("matrix", "slots", "entries")  # kinds of memory whose state is one
_SMALL = (6, 8)
_FOLLOWED = "torch's compilers, and modes that follow its operations, do not look into C"
WORTH = 512  # tokens of a call from which a loop of C is compiled, which takes as long as some thousands of them do
_CHUNK = 32  # tokens between states that C keeps
_FEWER = 8  # where a step iterates on a matrix: every iterate of so many tokens is there on the way back


class NoWalk(NamedTuple):
    """Why no kernel is generated for an update."""

    reason: str


@fact
def walk(update: StateUpdate, d_v: int, d_k: int, steady: bool = True, language: Language = "triton") -> Walk | NoWalk:
    """What the kernels of an update are written from, for values and keys of these widths.

    steady: no gradient is asked of states that no token moves (normalisers of constant averages).
    """
    try:
        return _walk(update, (d_v, d_k), steady, language)
    except NotTiles as error:
        return NoWalk(str(error))


def no_kernel(
    update: StateUpdate, device: torch.device, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], time: int
) -> str | None:
    """Why no kernel is generated, or None if one is."""
    reason = versions.refusal(device)
    if reason is not None:
        return reason
    if dtype not in versions.DTYPES:
        return f"the kernels accumulate in float32, the values are {dtype}"
    return _no_walk(update, shapes, time, "triton")


def no_loop(update: StateUpdate, device: torch.device, shapes: Mapping[str, tuple[int, ...]], time: int) -> str | None:
    """Why no loop of C is generated for a CPU, or None if one is."""
    if device.type != "cpu":
        return f"loops of C run on a CPU, not on {device}"
    if c_library.followed():
        return _FOLLOWED
    return c_library.no_compiler() or _no_walk(update, shapes, time, "c")


def not_worth(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why nobody who did not ask for a loop of C waits for it to be compiled, or None where it pays."""
    if torch.compiler.is_compiling():  # whose lengths may be any
        return _FOLLOWED
    shape = shapes.get("v", ())
    return None if len(shape) == 4 and shape[0] * shape[1] >= WORTH else f"it is compiled for {WORTH} tokens or more"


def _no_walk(
    update: StateUpdate, shapes: Mapping[str, tuple[int, ...]], time: int, language: Language
) -> str | None:
    if update.parts().memory.kind not in TILES:
        return f"the state is a {update.parts().memory.kind} and no matrix"
    for n in "kv":
        if time != 1 or (n in shapes and len(shapes[n]) != 4):
            return "the kernels take (batch, time, head, width)"
    d_v, d_k = shapes["v"][-1] if "v" in shapes else _USUAL, shapes["k"][-1] if "k" in shapes else _USUAL
    found = walk(update, d_v, d_k, *_asked(True, language))
    return found.reason if type(found) is NoWalk else None


def _asked(steady: bool, language: Language) -> tuple[Any, ...]:
    """Arguments of `walk` that are not its defaults, as facts are kept by what was given."""
    return (steady, language) if language != "triton" else () if steady else (False,)


def run(
    update: StateUpdate,
    signal: Signal,
    state: State | None,
    weights: Leaves | None,
    cu_seqlens: Tensor | None = None,
    language: Language = "triton",
) -> tuple[Tensor, State]:
    """The sequence (B, T, H, ...) by the kernels. Inputs of Triton's keep their dtype, sums and states are float32; C
    has all in float32, or in float64 where v is."""
    from axes.programs.tile_kernels import tokens

    q, v = signal["q"], signal["v"]
    assert isinstance(q, Tensor) and isinstance(v, Tensor)
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    if state is None:
        first = {n: x.select(1, 0).to(wide) if isinstance(x, Tensor) and x.ndim > 1 else x for n, x in signal.items()}
        state = update.init(first, weights)
    batch, length, heads = v.shape[:3]
    leaves, form = pytree.tree_flatten(state)
    steady = not (torch.is_grad_enabled() and any(leaves[int(n[1:])].requires_grad for n in _steady(update)))
    found = walk(update, v.shape[-1], q.shape[-1], *_asked(steady, language))
    if isinstance(found, NoWalk):
        raise NotTiles(found.reason)
    inputs = [_spread(signal[n], e, found.widths, v) for n, e in found.inputs.items()]
    if language == "c":
        inputs = [x.to(wide) for x in inputs]
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.long().contiguous()
    units = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    places = [int(n[1:]) for n in found.states]
    starts = [leaves[i].to(wide).expand(units, heads, *leaves[i].shape[2:]).contiguous() for i in places]
    phase = int(state.count.reshape(-1)[0]) % found.every if found.refresh is not None else 0  # of all sequences
    again = partial(_interpreted, update, found, state) if language == "c" else None
    out, last = tokens(found, inputs, starts, phase, cu_seqlens, language, again)
    for i, x in zip(places, last, strict=True):
        if f"s{i}" in _steady(update):  # which is the same of every head, and of sequences of one length
            own = leaves[i].shape[:2]
            x = x[tuple(slice(0, n) for n in (own if cu_seqlens is None else (units, *own[1:])))]
        leaves[i] = x
    tokens_each = length if cu_seqlens is None or period(update) is None else cu_seqlens.diff().long()
    for i, each in _counts(update):
        leaves[i] = leaves[i] + each * tokens_each
    return out.to(v.dtype), pytree.tree_unflatten(leaves, form)


def _interpreted(
    update: StateUpdate, found: Walk, state: State, offsets: Tensor | None, *given: Tensor
) -> tuple[Tensor, ...]:
    """What `tokens` makes of inputs and states, by the interpreter: what derivatives of derivatives are taken of."""
    inputs, starts = given[: len(found.inputs)], given[len(found.inputs) :]
    bounds = [0, inputs[0].shape[1]] if offsets is None else offsets.tolist()
    outputs, ends = [], []
    for i, (first, end) in enumerate(pairwise(bounds)):
        leaves, form = pytree.tree_flatten(state)
        for n, x in zip(found.states, starts, strict=True):
            leaves[int(n[1:])] = x if offsets is None else x[i : i + 1]
        leaves = [x if x.is_floating_point() or not x.ndim else x.reshape(-1)[i] for x in leaves]
        last = pytree.tree_unflatten(leaves, form)
        if end > first:
            part = {n: x[:, first:end] for n, x in zip(found.inputs, inputs, strict=True)}
            out, last = reference.run(update, part, last, time=1)
            outputs.append(out)
        after = pytree.tree_leaves(last)
        own = starts if offsets is None else [x[:1] for x in starts]
        ends.append([after[int(n[1:])].expand_as(x) for n, x in zip(found.states, own, strict=True)])
    return torch.cat(outputs, 1), *(torch.cat(xs) for xs in zip(*ends, strict=True))


def _spread(x: Tensor | float, extent: Extent, widths: tuple[int, int], v: Tensor) -> Tensor:
    """A signal as (B, T, H, ...), without a copy where it repeats."""
    tail = tuple(n for n, there in zip(widths, extent, strict=True) if there)
    made = x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float32, device=v.device)
    made = made.expand(*v.shape[:3], *tail)
    return made if not tail or made.stride()[3:] == ((widths[1], 1)[-len(tail) :]) else made.contiguous()


# ---- from a tuple to programs ----------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """What a token of an update brings and what it changes. counts: leaves that count, and by how much a token moves
    them."""

    signal: dict[str, Shape]
    states: dict[str, Shape]
    spec: Any
    counts: tuple[tuple[int, int], ...]


@fact
def _form(update: StateUpdate) -> _Form:
    if "g" in update.signals():
        raise NotTiles("its gradients are given")
    signal: dict[str, Shape] = {"q": (None, "k")}
    signal |= {n: (None, "v" if n == "v" else "k") for n in sorted(update.signals())}
    for rate in update.demands():
        if rate.shape not in _SHAPES:
            raise NotTiles(f"its rate {rate.name!r} has shape {rate.shape}")
        signal[rate.name] = _SHAPES[rate.shape]
    sizes = dict(zip("vk", _SMALL, strict=True))
    token = {n: torch.full([sizes[a] if a else 1 for a in shape], -0.5) for n, shape in signal.items()}
    try:
        before, spec = pytree.tree_flatten(update.init(token))
        after = pytree.tree_leaves(update.step(pytree.tree_unflatten(before, spec), token)[0])
    except (RuntimeError, AxesError) as error:
        raise NotTiles(f"its step cannot be followed: {str(error).partition(chr(10))[0]}") from None
    states: dict[str, Shape] = {}
    counts = []
    for i, x in enumerate(before):
        if not x.is_floating_point():
            counts.append((i, int(after[i] - x)))
            continue
        if any(n not in (1, *_SMALL) for n in x.shape) or len(set(x.shape) - {1}) < sum(n > 1 for n in x.shape):
            raise NotTiles(f"it keeps a tensor of shape {tuple(x.shape)} beside a state {_SMALL}")
        states[f"s{i}"] = tuple(None if n == 1 else "vk"[_SMALL.index(n)] for n in x.shape)  # type: ignore[misc]
    return _Form(signal, states, spec, tuple(counts))


def _counts(update: StateUpdate) -> tuple[tuple[int, int], ...]:
    return _form(update).counts


def _state(form: _Form, given: Mapping[str, Tensor], count: int) -> State:
    leaves: list[Any] = [None] * (len(form.states) + len(form.counts))
    for n in form.states:
        leaves[int(n[1:])] = given[n]
    for i, _ in form.counts:
        leaves[i] = torch.tensor(count)
    return pytree.tree_unflatten(leaves, form.spec)


@fact
def _steady(update: StateUpdate) -> frozenset[str]:
    """States that depend on nothing but themselves and each other."""
    form, program = _form(update), _program(update, _SMALL, 1)
    found = set(form.states)
    if isinstance(update.parts().step.at, Anchor):
        found -= set(_renewal(update, _SMALL).outputs)
    while True:
        kept = {n for n in found if {program.names.get(i, n) for i in program.needed([n])} <= found}
        if kept == found:
            return frozenset(found)
        found = kept


@fact
def _program(
    update: StateUpdate,
    widths: tuple[int, int],
    count: int,
    wanted: tuple[str, ...] = (),
    renewed: bool = False,
) -> Program:
    """A token's program after `count` others. wanted: what its derivatives are by; renewed: its anchor is the state
    itself."""
    form = _form(update)
    counted = _state(form, {n: torch.zeros(()) for n in form.states}, count)

    def step(given: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = pytree.tree_leaves(counted)  # counts are numbers of the host
        for n in form.states:
            leaves[int(n[1:])] = given[n]
        state = pytree.tree_unflatten(leaves, form.spec)
        signal = {n: given[n] for n in form.signal}
        if renewed:
            state = state.but(anchor=execution.primal(update.parts(), state.theta, state, signal))
        after, shown = update.step(state, signal)
        out = {OUT: update.read(shown, signal["q"], signal)}
        new = pytree.tree_leaves(after)
        return out | {n: new[int(n[1:])] for n in form.states}

    given = {**form.signal, **form.states}
    return trace(step, given, widths, wanted, staged=True)


def _renewal(update: StateUpdate, widths: tuple[int, int]) -> Program:
    """The program of an anchor: what the held weights are when they are renewed."""
    form = _form(update)

    def look(given: dict[str, Tensor]) -> dict[str, Tensor]:
        state = _state(form, given, 1)
        signal = {n: given[n] for n in form.signal}
        anchor = execution.primal(update.parts(), state.theta, state, signal)
        names = [n for n in form.states if any(given[n] is x for x in state.anchor)]
        return dict(zip(names, anchor, strict=True))

    given = {**form.signal, **form.states}
    return trace(look, given, widths, tuple(given), staged=True)


@fact
def _every_token_alike(update: StateUpdate) -> None:
    """NotTiles if a token's program depends on how many there were before it, an anchor apart."""
    at = update.parts().step.at
    every = at.every if isinstance(at, Anchor) else 1
    first = _program(update, _SMALL, 0)
    if not first.same(_program(update, _SMALL, 1, renewed=every > 1)):
        raise NotTiles("the first token is treated unlike others")


def _walk(update: StateUpdate, widths: tuple[int, int], steady: bool, language: Language) -> Walk:
    form = _form(update)
    _every_token_alike(update)
    at = update.parts().step.at
    every = at.every if isinstance(at, Anchor) and at.every > 1 else 0
    still = _steady(update) if steady else frozenset()
    step = _program(update, widths, 1, tuple(n for n in (*form.signal, *form.states) if n not in still))
    refresh = _renewal(update, widths) if every else None
    inputs = {n: ("v" in s, "k" in s) for n, s in form.signal.items()}
    states = {n: ("v" in s, "k" in s) for n, s in form.states.items()}
    staged = any(p.stages(range(len(p.operations))) for p in (step, refresh) if p is not None)
    if language == "c":  # in the order in which states lie in memory, whatever their size
        chunk = _FEWER if staged else _CHUNK
        return Walk(step, refresh, every, inputs, states, still, widths, *widths, chunk=chunk, warps=1)
    if staged:
        raise NotTiles("it multiplies matrices, which loops of C do on a CPU")
    rows, keys, warps, chunk = _sizes(step, refresh, states, widths)
    across: Axis = "k" if keys >= _FEW else "v"
    return Walk(
        step, refresh, every, inputs, states, still, widths, rows, keys, chunk, warps, across=across, told=on_hopper
    )


def _sizes(
    step: Program, refresh: Program | None, states: Mapping[str, Extent], widths: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Rows and keys of a GPU program, its warps, and tokens between kept states."""
    tiles = sum(e == (True, True) for e in states.values())
    keys, rows = power_of_2(widths[1]), power_of_2(widths[0])
    programs = [(step, [OUT, *states])]
    if refresh is not None:
        programs.append((refresh, [n for n in refresh.outputs if not n.startswith(GRAD)]))
    free = not any(p.reductions(p.needed(outputs), "v") for p, outputs in programs)
    live = 2 * tiles + _SPARE
    while free and rows > 16 and rows * keys * live > REGISTERS:
        rows //= 2
    if rows * keys * live > 2 * REGISTERS:  # up to twice as many spill to the nearest cache
        why = "keys are too wide" if free else "rows meet in norms or sums, so that one program holds them all"
        size = f"{live} tiles of {rows} x {keys} take {rows * keys * live} registers of {REGISTERS}"
        raise NotTiles(f"{size} with the adjoint: {why}")
    warps = 1
    while warps < 16 and rows * keys * live > warps * 32 * 200:
        warps *= 2
    return rows, keys, warps, 64 if tiles > 1 else 32
