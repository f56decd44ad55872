"""Which route computes a sequence of tokens, and who: a pure function of the tuple, the device and the shapes.

Routes are how (interpreter, chain, substitution, cascade, gram, attention, passes, levels, solve, token);
implementations are who (reference, torch, triton, c).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch

from axes.core.algorithms import Anchor
from axes.core.derived import (
    by_entry,
    erases_along_key,
    idle,
    no_attention,
    no_cascade,
    no_chain,
    no_gram,
    no_levels,
    no_passes,
    no_solve,
    no_substitution,
    scales_values,
)
from axes.core.facts import fact
from axes.core.state_update import StateUpdate
from axes.kernels.common import versions
from axes.routes import (
    attention,
    cascade,
    early,
    given,
    kernel_terms,
    levels_kernel,
    network_kernel,
    opaque,
    passes,
    several,
    solves,
    substitution_kernel,
    token,
    turned,
)
from axes.routes.choice import Choice, Implementation, NoImplementation, Plan, Route, Target, require_implementation
from axes.routes.finite import log_gates

Shapes = Mapping[str, tuple[int, ...]]
_UP_TO = "after a state, up to its next anchor torch"
_LOOPED = "a loop of C generated from the step, a token at a time, state in cache"
_AFTER_C = "which torch or Triton compute"
_WALKED = "a kernel generated from the step, a token at a time, state on chip"


@fact
def routes(update: StateUpdate) -> Mapping[Route, str | None]:
    """Every route of torch's operations, the faster first, with the reason it is not legal, or None where it is."""
    if several.one(update) is not update:
        return routes(several.one(update))
    return {
        "attention": no_attention(update),
        "passes": no_passes(update),
        "levels": no_levels(update),
        "gram": no_gram(update),
        "substitution": no_substitution(update),
        "chain": no_chain(update),
        "solve": no_solve(update),
        "cascade": no_cascade(update),
        "interpreter": None,
    }


def select(
    update: StateUpdate,
    device: str | torch.device | Target = "cpu",
    dtype: torch.dtype = torch.float32,
    shapes: Shapes | None = None,
    implementation: Implementation | None = None,
    time: int = 1,
) -> Choice:
    """The route and implementation for a sequence on a device.

    shapes: of the signal's "q", "k" and "v", which the kernels limit; every torch route takes every shape. Attention
    also asks for "cu_seqlens" of packed sequences and for "pairs", the masses of a list that the state holds; a memory
    of levels for "levels", those that it holds.
    Raises NoImplementation if the named implementation cannot compute it.
    """
    require_implementation(implementation)
    if implementation == "reference":
        return Choice("interpreter", "reference", "asked for by name")
    asked, (update, several_writes, attends) = update, computed(update)
    if several_writes and shapes is not None:
        shapes = _tokens(asked, shapes)
    place = device if type(device) is torch.device else _device(device)
    if attends:
        if implementation == "c":
            raise NoImplementation(f"no loop of C for {update!r}: a list is read by attention, {_AFTER_C}")
        return _attention(update, place, dtype, shapes or {}, implementation, time)
    if implementation == "c":
        return _loop_by_name(update, place, shapes or {}, time)
    legal = routes(update)
    if legal["substitution"] is None:
        no_kernel = substitution_kernel.no_kernel(update, place, dtype, shapes or {}, time)
        if no_kernel is None and implementation != "torch":
            why = "kernels made for what a token writes, blocks of 16 tokens in turn"
            if isinstance(update.parts().step.at, Anchor):
                why = f"{why}; {_UP_TO}"
            return Choice("substitution", "triton", why)
    elif legal["passes"] is None:
        no_kernel = _no_passes(update, place, dtype, shapes or {}, time)
        if no_kernel is None and implementation != "torch":
            return Choice("passes", "triton", "exact passes, each by the kernel of its chain")
    elif legal["levels"] is None:
        no_kernel = _no_levels(update, place, dtype, shapes or {}, time)
        if no_kernel is None and implementation != "torch":
            return Choice("levels", "triton", "exact levels, each doubling of the stretches by the kernel of its chain")
    elif legal["cascade"] is None and network_kernel.layered(update):
        no_kernel = network_kernel.no_kernel(update, place, dtype, shapes or {}, time)
        if no_kernel is None and implementation != "torch":
            return Choice(
                "cascade", "triton", f"two layers by kernels, a program a head, blocks of 16 tokens in turn; {_UP_TO}"
            )
    else:
        no_kernel = kernel_terms.no_kernel(update, place, dtype, shapes or {}, time)
        if no_kernel is None and implementation != "torch":
            return _by_kernel(update, device if isinstance(device, Target) else None, dtype, shapes or {})
    if implementation != "torch":
        no_walk = token.no_kernel(update, place, dtype, shapes or {}, time)
        if no_walk is None:
            return Choice("token", "triton", f"{_WALKED} (no chunks by a kernel: {no_kernel})")
        no_kernel = no_kernel if no_walk == no_kernel else f"{no_kernel}; token by token: {no_walk}"
        if implementation is None and place.type == "cpu" and _bends(update):
            no_loop = token.not_worth(shapes or {}) or token.no_loop(update, place, shapes or {}, time)
            if no_loop is None:
                return Choice("token", "c", f"{_LOOPED} (no kernel: {no_kernel})")
            no_kernel = f"{no_kernel}; no loop of C: {no_loop}"
    return _without_kernel(update, no_kernel, implementation)


def select_token(
    update: StateUpdate,
    device: str | torch.device | Target = "cpu",
    dtype: torch.dtype = torch.float32,
    shapes: Shapes | None = None,
    implementation: Implementation | None = None,
    differentiated: bool = False,
) -> Choice:
    """The same for one token after a state. torch by name is the recurrence itself, which is torch's operations; a list
    is read by the route of sequences."""
    require_implementation(implementation)
    asked, (update, several_writes, attends) = update, computed(update)
    if several_writes and shapes is not None:
        shapes = _tokens(asked, shapes)
    if attends:
        return select(update, device, dtype, shapes, implementation)
    if implementation == "c":
        return _loop_by_name(update, _device(device), shapes or {}, 1)
    no_kernel = kernel_terms.no_kernel(update, _device(device), dtype, shapes or {}, 1)
    if differentiated:
        no_kernel = no_kernel or "the kernel for one token has no backward"
    if no_kernel is not None and implementation in (None, "triton"):
        no_walk = token.no_kernel(update, _device(device), dtype, shapes or {}, 1)
        if no_walk is None:
            return Choice("token", "triton", f"{_WALKED} (no other: {no_kernel})")
    if implementation == "triton" and no_kernel is not None:
        raise NoImplementation(f"no Triton kernel for one token of {update!r}: {no_kernel}")
    if no_kernel is None and implementation in (None, "triton"):
        return Choice("chain", "triton", "one fused kernel, state on chip")
    why = f"{implementation} was asked for by name" if no_kernel is None else no_kernel
    return Choice("interpreter", "reference", f"one step of the recurrence (no kernel: {why})")


def plans(
    update: StateUpdate,
    target: Target,
    dtype: torch.dtype,
    implementation: Implementation | None = None,
    shapes: Shapes | None = None,
) -> tuple[Plan, ...]:
    """What runs for a sequence, for one after the pairs of a list where that is something else, and for one token where
    no gradient is asked for."""
    whole = select(update, target, dtype, shapes, implementation)
    held = {**(shapes or {}), "pairs": (1,), "levels": (1,)}
    longer = {n: (s[0], 2, *s[2:]) for n, s in (shapes or {"v": (1, 1, 1, 1)}).items()}
    later = select(update, target, dtype, {**held, **longer}, implementation)
    token = select_token(update, target, dtype, held, implementation)
    more = (Plan("after pairs", update, later, target, dtype, {}),) if later[:2] != whole[:2] else ()
    return (
        Plan("runs", update, whole, target, dtype, routes(update)),
        *more,
        Plan("one token", update, token, target, dtype, {}),
    )


@fact
def computed(update: StateUpdate) -> tuple[StateUpdate, bool, bool]:
    """What a route computes for an update: itself, the tuple of one write and read a token, the chain of which reads
    between two states are reads, or that of the frame in which no row turns; whether it is the tuple of one write, and
    whether that is attention."""
    one = several.one(update)
    made = turned.still(early.late(one)) if routes(one)["chain"] is None else one
    return made, one is not update, routes(made)["attention"] is None


def _no_passes(update: StateUpdate, device: torch.device, dtype: torch.dtype, shapes: Shapes, time: int) -> str | None:
    """Why kernels do not compute the passes, or None if they do."""
    given = [{**shapes, "v": shapes["k"]}, {**shapes, "k": shapes["v"]}, shapes] if "k" in shapes else [shapes]
    refused = (
        kernel_terms.no_kernel(chain, device, dtype, own, time) for chain in passes.chains(update) for own in given
    )
    return next(filter(None, refused), None)


def _no_levels(update: StateUpdate, device: torch.device, dtype: torch.dtype, shapes: Shapes, time: int) -> str | None:
    """Why kernels do not compute the levels, or None if they do."""
    if "levels" in shapes:
        return "levels go on from a state by torch"
    return kernel_terms.no_kernel(levels_kernel.chain_of(update), device, dtype, shapes, time)


def _tokens(update: StateUpdate, shapes: Shapes) -> Shapes:
    """Shapes of a call as those of tokens with one write and one read."""
    step = update.parts().step
    each = {"k": step.writes, "v": step.writes, "q": step.reads}
    return {n: (*s[:-2], s[-1]) if each.get(n, 1) > 1 and len(s) > 2 else s for n, s in shapes.items()}


def settle(
    update: StateUpdate,
    widths: tuple[int, int] | None = None,
    implementation: Implementation | None = None,
) -> None:
    """Work out now what every run asks of a tuple: a compiler that follows the first run then finds it there.

    widths: of values and keys of its runs; implementation: of its runs, if they name one.
    """
    if computed(update)[0] is not update:
        settle(computed(update)[0], widths, implementation)
    idle(update), turned.still(update)
    network_kernel.layered(update), network_kernel.no_terms(update), cascade.is_factored(update)
    if widths is not None:
        substitution_kernel.settle(update, *widths)
        network_kernel.settle(update, *widths)
    given.asked(update)
    kernel_terms.family(update)
    _bends(update)
    _refusals(update)
    opaque.text(update)
    scales_values(update), erases_along_key(update), by_entry(update)
    bool(update.counts)
    log_gates(update)
    if widths is not None and versions.gpu_is_here() and implementation in (None, "triton"):
        several_writes = () if update.parts().step.writes == 1 else (update.parts().step.writes,)
        shapes = {n: (1, 1, 1, *several_writes, width) for n, width in zip("vk", widths, strict=True)}
        for choose in (select, select_token):
            with suppress(NoImplementation):  # a layer says so when it is called
                choose(update, torch.device("cuda"), torch.float32, shapes, implementation)
    if update.parts().memory.kind == "list":
        attention.asked(update)
    if update.parts().memory.kind == "regression":
        settle(passes.sums(update), widths, implementation)
    if routes(update)["solve"] is None:
        settle(solves.chain_of(update), widths, implementation)
    if update.parts().memory.kind == "levels":
        settle(levels_kernel.chain_of(update), widths, implementation)
    if update.parts().memory.kind == "bounded":
        for chain, sizes in zip(passes.passes(update), passes.widths(update, widths), strict=True):
            settle(chain, sizes, implementation)


def _loop_by_name(update: StateUpdate, device: torch.device, shapes: Shapes, time: int) -> Choice:
    no_loop = token.no_loop(update, device, shapes, time)
    if no_loop is not None:
        raise NoImplementation(f"no loop of C for {update!r}: {no_loop}. Use implementation='torch'")
    return Choice("token", "c", f"{_LOOPED}; asked for by name")


@fact
def _bends(update: StateUpdate) -> bool:
    """Whether torch's fastest route takes some operations a token, or passes over its state a few times, of one that is
    a tile: where it is products of chunks, a loop over tokens does not reach it."""
    route, tile = _fastest(update), update.parts().memory.kind in token.TILES
    return tile and (by_entry(update) if route == "chain" else route in (None, "substitution", "gram", "cascade"))


def _device(device: str | torch.device | Target) -> torch.device:
    return device if isinstance(device, torch.device) else Target.of(device).device


def _by_kernel(update: StateUpdate, target: Target | None, dtype: torch.dtype, shapes: Shapes) -> Choice:
    """Which form of a kernel is told of a target: to run, nobody need know the capability of a device."""
    kind = kernel_terms.family(update)
    if kind == "entries":
        return Choice("chain", "triton", "the exact chain of entries, token by token, state on chip")
    reason = f"the exact {kind} chain in chunks, state on chip"
    if target is not None:
        portable = kernel_terms.portable(update, target.capability, dtype, shapes)
        hopper = "its forms for Hopper where widths are 64 or 128"
        reason += f", by {hopper if portable is None else f'portable kernels: {portable}'}"
    return Choice("chain", "triton", reason)


def _attention(
    update: StateUpdate,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Shapes,
    implementation: Implementation | None,
    time: int,
) -> Choice:
    no_kernel = attention.no_kernel(update, device, dtype, shapes, time)
    if no_kernel is None and implementation != "torch":
        return Choice("attention", "triton", attention.by_kernels(update))
    return _without_kernel(update, no_kernel, implementation)


def _without_kernel(update: StateUpdate, no_kernel: str | None, implementation: Implementation | None) -> Choice:
    """The first legal route of torch's operations, else the interpreter. no_kernel: None if torch was asked for."""
    if implementation == "triton":
        raise NoImplementation(f"no Triton kernel for {update!r}: {no_kernel}. Use implementation='torch'")
    route = _fastest(update)
    if route is not None:
        return Choice(route, "torch", f"exact {route} form (no kernel: {no_kernel or 'torch was asked for by name'})")
    if implementation == "torch":
        why = f"{_refusals(update)}. Use implementation='reference'"
        raise NoImplementation(f"no fast torch route for {update!r}: {why}")
    return Choice("interpreter", "reference", f"only the recurrence itself is exact ({_refusals(update)})")


@fact
def _fastest(update: StateUpdate) -> Route | None:
    """The first legal route of torch's operations but the interpreter."""
    return next((r for r, reason in routes(update).items() if reason is None and r != "interpreter"), None)


@fact
def _refusals(update: StateUpdate) -> str:
    return "; ".join(f"{route}: {reason}" for route, reason in routes(update).items() if reason is not None)


__all__ = ["computed", "plans", "routes", "select", "select_token", "settle"]
