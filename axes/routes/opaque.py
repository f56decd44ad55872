"""A sequence by a route of torch's operations as one operator, for compilers: which are, and a state as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from axes.core.facts import fact
from axes.core.memory import List
from axes.core.state_update import State, StateUpdate
from axes.routes import attention
from axes.routes.choice import Choice
from axes.routes.packed import unread
from axes.routes.recomputed import Recomputed, empty

Run = Callable[[StateUpdate, str, dict[str, Tensor], State], tuple[Tensor, State]]

_run: list[Run] = []  # how a route computes a sequence: `axes.routes.dispatch` says


def computed_by(run: Run) -> Run:
    _run[:] = [run]
    return run


def takes(update: StateUpdate, choice: Choice, signal: Mapping[str, Any], length: int) -> bool:
    """Whether a call that is traced is to be an operator: what loops, but for products whose number is known."""
    if not torch.compiler.is_compiling() or not all(isinstance(x, Tensor) for x in signal.values()):
        return False
    if choice.route == "attention" and (choice.implementation == "triton" or not attention.by_blocks(update)):
        return False
    if choice.route not in ("attention", "chain"):
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value  # which loads sympy

    return not has_static_value(length)


def run(update: StateUpdate, route: str, signal: Mapping[str, Any], state: State) -> tuple[Tensor, State]:
    """signal (B, T, ...): `dispatch`'s run of it by a route."""
    names, leaves = list(signal), list(_leaves(state))
    call = " ".join((route, _shape(state), *names))
    out, *after = _sequences.operator([*signal.values(), *leaves], text(update), call)
    return out, _built(_shape(state), iter(after))


# ---- states as lists of tensors --------------------------------------------------------------------------------------


def _leaves(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    else:
        for part in x:
            yield from _leaves(part)


def _shape(x: Any) -> str:
    """Tensors as t, states in brackets, other tuples in parentheses."""
    if isinstance(x, Tensor):
        return "t"
    inner = "".join([_shape(part) for part in x])
    return f"[{inner}]" if isinstance(x, State) else f"({inner})"


def _built(shape: str, leaves: Iterator[Tensor]) -> Any:
    open_: list[list[Any]] = [[]]
    for mark in shape:
        if mark == "t":
            open_[-1].append(next(leaves))
        elif mark in "[(":
            open_.append([])
        else:
            made = open_.pop()
            open_[-1].append(State(*made) if mark == "]" else tuple(made))
    return open_[0][0]


# ---- the operator ----------------------------------------------------------------------------------------------------


def _compute(update: StateUpdate, tensors: Sequence[Tensor], call: str) -> list[Tensor]:
    route, shape, *names = call.split(" ")
    signal = dict(zip(names, tensors, strict=False))
    out, state = _run[0](update, route, signal, _built(shape, iter(tensors[len(names) :])))
    return [out, *_leaves(state)]


def _shapes(update: StateUpdate, tensors: list[Tensor], call: str) -> list[Tensor]:
    route, _, *names = call.split(" ")
    v, leaves = tensors[names.index("v")], tensors[len(names) :]
    after = [empty(x) for x in leaves]
    if route == "attention":  # which dtypes and what else a list has is seen after two pairs more
        few = [x.new_empty(x.shape[0], 2, *x.shape[2:]) if x.ndim > 1 else x for x in tensors[: len(names)]]
        after = [empty(x) for x in _compute(update, [*few, *leaves], call)[1:]]
        memory = update.parts().memory
        most = memory.most if isinstance(memory, List) else None
        for i, time in enumerate((-2, -2, -1)):  # keys, values, masses
            shape, pairs = list(after[i].shape), leaves[i].shape[time] + v.shape[1]
            shape[time] = pairs if most is None else torch.sym_min(pairs, most)
            after[i] = after[i].new_empty(shape)
    reads = update.parts().step.reads
    return [empty(unread(tensors[names.index("q")], v, reads)), *after]


_sequences: Recomputed[StateUpdate] = Recomputed("sequence", _compute, _shapes)


@fact
def text(update: StateUpdate) -> str:
    """What an update is called by in a graph."""
    return _sequences.text(update)
