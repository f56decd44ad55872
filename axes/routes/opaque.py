"""A sequence by a route of torch's operations as one operator, for compilers.

The routes loop over chunks or tokens and some read the state's count: traced, they would be compiled anew for every
length, or not at all. The operator is one node for every length. Its backward computes the sequence again, as a
checkpoint does, and differentiates that. Eager calls never come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from axes.core.facts import fact
from axes.core.memory import List
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError
from axes.routes import attention
from axes.routes.choice import Choice
from axes.routes.packed import unread

Run = Callable[[StateUpdate, str, dict[str, Tensor], State], tuple[Tensor, State]]

_UPDATES: dict[str, StateUpdate] = {}  # of layers, by what graphs call them
_FORMAT = torch.contiguous_format
_run: list[Run] = []  # how a route computes a sequence: `axes.routes.dispatch` says


def computed_by(run: Run) -> Run:
    _run[:] = [run]
    return run


@fact
def text(update: StateUpdate) -> str:
    """What an update is called by in a graph."""
    name = repr(update)
    while _UPDATES.setdefault(name, update) != update:  # a user's part may not tell all of itself
        name += "'"
    return name


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
    out, *after = _operator([*signal.values(), *leaves], text(update), call)
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


# ---- operators -------------------------------------------------------------------------------------------------------


def _compute(tensors: Sequence[Tensor], name: str, call: str) -> list[Tensor]:
    update = _UPDATES.get(name)
    if update is None:
        raise AxesError(f"no layer of {name} is here: a graph of it runs where one has been made")
    route, shape, *names = call.split(" ")
    signal = dict(zip(names, tensors, strict=False))
    out, state = _run[0](update, route, signal, _built(shape, iter(tensors[len(names) :])))
    return [out, *_leaves(state)]


def _forward(tensors: list[Tensor], name: str, call: str) -> list[Tensor]:
    given = {x.untyped_storage().data_ptr() for x in tensors}
    made: list[Tensor] = []
    for x in _compute(tensors, name, call):  # no result shares memory with an input or another
        made.append(x.clone() if x._is_view() or x.untyped_storage().data_ptr() in given else x)
        given.add(made[-1].untyped_storage().data_ptr())
    return [x.contiguous() for x in made]


def _backward(tensors: list[Tensor], grads: list[Tensor | None], name: str, call: str) -> list[Tensor]:
    with autograd(), torch.enable_grad():
        inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        outputs = zip(_compute(inputs, name, call), grads, strict=True)
        pairs = [(y, g) for y, g in outputs if g is not None and y.requires_grad]
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    made = []
    for x in inputs:
        grad = next(found) if x.requires_grad else None
        made.append(_empty(x).zero_() if grad is None else grad.clone(memory_format=_FORMAT))
    return made


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=_FORMAT)


def autograd() -> Any:
    """Inside an operator autograd is left out of the dispatch: here it is back."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


_operator = torch.library.custom_op("axes::sequence", _forward, mutates_args=())
_backward_operator = torch.library.custom_op(
    "axes::sequence_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor[] tensors, Tensor?[] grads, str name, str call) -> Tensor[]",
)


@_operator.register_fake
def _(tensors: list[Tensor], name: str, call: str) -> list[Tensor]:
    route, _, *names = call.split(" ")
    v, leaves = tensors[names.index("v")], tensors[len(names) :]
    after = [_empty(x) for x in leaves]
    if route == "attention":  # which dtypes and what else a list has is seen after two pairs more
        few = [x.new_empty(x.shape[0], 2, *x.shape[2:]) if x.ndim > 1 else x for x in tensors[: len(names)]]
        after = [_empty(x) for x in _compute([*few, *leaves], name, call)[1:]]
        memory = _UPDATES[name].parts().memory
        window = memory.window if isinstance(memory, List) else None
        for i, time in enumerate((-2, -2, -1)):  # keys, values, masses
            shape, pairs = list(after[i].shape), leaves[i].shape[time] + v.shape[1]
            shape[time] = pairs if window is None else torch.sym_min(pairs, window)
            after[i] = after[i].new_empty(shape)
    reads = _UPDATES[name].parts().step.reads
    return [_empty(unread(tensors[names.index("q")], v, reads)), *after]


@_backward_operator.register_fake
def _(tensors: list[Tensor], grads: list[Tensor | None], name: str, call: str) -> list[Tensor]:
    return [_empty(x) for x in tensors]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.name, ctx.call = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> Any:
    tensors = list(ctx.saved_tensors)
    found = _backward_operator(tensors, grads, ctx.name, ctx.call)
    return [g if x.is_floating_point() else None for x, g in zip(tensors, found, strict=True)], None, None


_operator.register_autograd(_differentiate, setup_context=_keep)
