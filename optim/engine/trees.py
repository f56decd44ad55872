"""A nested `State` as a flat dict of tensors (what is saved), and several states as one batch (what is executed)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from axes.core.algorithms import Held, Read, Sum
from axes.core.declared import Recurrence
from axes.core.monoids import Zero
from axes.core.state_update import State, StateUpdate
from axes.programs.program import COUNT

HELD, MISSES = "held", "misses"  # a statistic's value since its last refresh; how often none could be taken
# COUNT: keys with this name are integers on the host; all others are tensors beside their parameter


def counts(name: str) -> bool:
    """Whether a tensor of a state counts data."""
    return name.rsplit(".", 1)[-1] == COUNT


def responds(name: str) -> bool:
    """Whether a tensor of a state is the response to a unit drive: one number, whatever the gradients are."""
    return name.rsplit(".", 1)[-1] == "norm"


def keeps_theta(update: StateUpdate) -> bool:
    """Whether the parameter does not determine theta: a lazy mirror map, or an output that is read elsewhere."""
    p = update.parts()
    return (p.step.lazy and not p.h.is_identity) or p.step.read is not None


def _forgets(update: StateUpdate) -> bool:
    """Whether theta's old value is read by nobody, so that it need not be kept."""
    p = update.parts()
    return isinstance(p.monoid, Zero) and not isinstance(p.step.read, Read)


def flatten(update: StateUpdate, state: State) -> dict[str, Tensor]:
    """The tensors of a state by readable names; theta only where the parameter does not stand for it."""
    flat = dict(_inside(update, state, ""))
    if keeps_theta(update):
        flat["theta"] = state.theta[0]
    return flat


def _inside(update: StateUpdate, state: State, prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield prefix + COUNT, state.count
    if state.norm:
        yield prefix + "norm", state.norm[0]
    if isinstance(update.parts().step.at, Held):
        yield prefix + HELD, state.anchor[0]
        yield prefix + MISSES, state.anchor[1]
    for name, inner, below in _children(update, state):
        yield from _whole(inner, below, prefix + name)


def _whole(update: StateUpdate, state: State, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if not _forgets(update):
        yield prefix + "theta", state.theta[0]
    yield from _inside(update, state, prefix)


def _children(update: StateUpdate, state: State) -> Iterator[tuple[str, StateUpdate, State]]:
    for i, (f, s) in enumerate(zip(update.parts().step.via, state.via, strict=True)):
        if isinstance(f, Sum):
            for j, (branch, t) in enumerate(zip(f.branches, s, strict=True)):
                assert isinstance(branch, StateUpdate) and isinstance(t, State)
                yield f"via.{i}.{j}.", branch, t
        else:
            assert isinstance(f, StateUpdate) and isinstance(s, State)
            yield f"via.{i}.", f, s
    for i, (f, s) in enumerate(zip(update.statistics(), state.stats, strict=True)):
        yield f"stats.{i}.", f, s


def unflatten(update: StateUpdate, flat: Mapping[str, Tensor], theta: Tensor) -> State:
    """The state whose tensors `flatten` named; KeyError where one is missing.

    theta: what the parameter stands for, unless it is among the tensors.
    """
    return _build(update, flat, flat.get("theta", theta), "")


def _build(update: StateUpdate, flat: Mapping[str, Tensor], theta: Tensor, prefix: str) -> State:
    step = update.parts().step

    def inner(child: Recurrence, name: str) -> State:
        assert isinstance(child, StateUpdate)
        forgotten = _forgets(child)
        value = theta.new_zeros(()) if forgotten else flat[prefix + name + "theta"]
        return _build(child, flat, value, prefix + name)

    via: list[Any] = []
    for i, f in enumerate(step.via):
        if isinstance(f, Sum):
            via.append(tuple(inner(branch, f"via.{i}.{j}.") for j, branch in enumerate(f.branches)))
        else:
            assert isinstance(f, Recurrence)
            via.append(inner(f, f"via.{i}."))
    stats = tuple(inner(s, f"stats.{i}.") for i, s in enumerate(update.statistics()))
    norm = (flat[prefix + "norm"],) if step.debias else ()
    held = (flat[prefix + HELD], flat[prefix + MISSES]) if isinstance(step.at, Held) else ()
    return State((theta,), tuple(via), stats, norm, held, flat[prefix + COUNT])


def missed(flat: Mapping[str, Tensor]) -> int:
    """How many held values of a state could not be computed."""
    return sum(int(x.sum()) for name, x in flat.items() if name.rsplit(".", 1)[-1] == MISSES)


def _map(function: Callable[..., Tensor], *trees: Any) -> Any:
    first = trees[0]
    if isinstance(first, Tensor):
        return function(*trees)
    mapped = tuple(_map(function, *column) for column in zip(*trees, strict=True))
    return State(*mapped) if isinstance(first, State) else mapped


def stack(states: Sequence[State]) -> State:
    """One state with a leading batch dimension; counts must agree, and 0-d tensors are shared."""

    def together(*leaves: Tensor) -> Tensor:
        return leaves[0] if leaves[0].ndim == 0 else stacked(leaves)

    whole: State = _map(together, *states)
    return whole


def stacked(leaves: Sequence[Tensor]) -> Tensor:
    """torch.stack(leaves), without a copy where they lie one after another in memory, as `unstack` leaves them."""
    first = leaves[0]
    if torch.compiler.is_compiling() or first.requires_grad:
        return torch.stack(list(leaves))
    size, place = first.numel(), first.untyped_storage().data_ptr()
    adjacent = all(
        x.is_contiguous()
        and x.storage_offset() == first.storage_offset() + i * size
        and x.untyped_storage().data_ptr() == place
        for i, x in enumerate(leaves)
    )
    if not adjacent:
        return torch.stack(list(leaves))
    return first.as_strided((len(leaves), *first.shape), (size, *first.stride()))


def rows(leaves: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The members of a stack, of which a leaf has so many each; a number of a leaf is that of all its members."""
    if all(count == 1 for count in counts):
        return stacked([x.reshape(x.shape[-2:]) if x.ndim > 2 else x for x in leaves])
    pairs = zip(leaves, counts, strict=True)
    return torch.cat([x.reshape(-1, *x.shape[-2:]).expand(count, -1, -1) for x, count in pairs])


def divide(whole: Tensor, leaves: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Views of a stack in the shapes of the leaves that it was made of."""
    parts = zip(whole.split(list(counts)), leaves, strict=True)
    return [(part if part.numel() == x.numel() else part[:1]).view(x.shape) for part, x in parts]


def unstack(state: State, index: int) -> State:
    """One member of a batch, as views."""

    def member(leaf: Tensor) -> Tensor:
        return leaf if leaf.ndim == 0 else leaf[index]

    alone: State = _map(member, state)
    return alone
