"""Sequences packed one after another in one batch entry: where their tokens stand, and each sequence run alone.

offsets (N + 1,) are the boundaries 0, ..., T of N sequences. Where a kernel takes packed tokens, only
`Packing` is used, which never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from axes.core.memory import List
from axes.core.rates import Signal
from axes.core.state_update import State, StateUpdate
from axes.errors import ShapeError
from axes.routes.counts import behind, joined, one, phases

Run = Callable[[Signal, State], tuple[Tensor, State]]


class Packing(NamedTuple):
    """Offsets of N packed sequences (N + 1,), and of every token its sequence (T,)."""

    offsets: Tensor
    sequence: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, length: int) -> Packing:
        offsets = cu_seqlens.long()
        tokens = torch.arange(length, device=offsets.device)
        return cls(offsets, torch.searchsorted(offsets[1:], tokens, right=True))

    @property
    def sequences(self) -> int:
        return self.offsets.shape[0] - 1

    def places(self, width: int) -> Tensor:
        """Where the tokens (T,) stand once every sequence is behind a tail of this width."""
        return torch.arange(self.sequence.shape[0], device=self.sequence.device) + (self.sequence + 1) * width

    def behind(self, x: Tensor, tails: Tensor) -> Tensor:
        """Every sequence behind its tail: (1, T, C) and (N, w, C) to (1, T + N w, C)."""
        n, width, channels = tails.shape
        heads = self.offsets[:-1] + torch.arange(n, device=x.device) * width
        rows = heads[:, None] + torch.arange(width, device=x.device)
        whole = x.new_empty(1, x.shape[1] + n * width, channels)
        parts = torch.cat((x, tails.to(x.dtype).reshape(1, n * width, channels)), 1)
        return whole.index_copy(1, torch.cat((self.places(width), rows.flatten())), parts)

    def new_tails(self, whole: Tensor, width: int) -> Tensor:
        """The last w rows (N, w, C) of every sequence behind its tail."""
        numbers = torch.arange(1, self.sequences + 1, device=whole.device)
        ends = self.offsets[1:] + numbers * width
        return whole[0, ends[:, None] - width + torch.arange(width, device=whole.device)]

    def from_starts(self, total: Tensor) -> Tensor:
        """Cumulative sums (1, T, ...) over all tokens as sums that begin anew with every sequence."""
        padded = torch.cat((torch.zeros_like(total[:, :1]), total), 1)
        return total - padded[:, self.offsets[:-1]][:, self.sequence]


def unread(q: Tensor, v: Tensor, reads: int = 1) -> Tensor:
    """What queries of no memory would read: several may share a value, and several values a query. reads: of a token,
    a dimension of q."""
    several = () if reads == 1 else (reads,)
    return v.new_zeros(*map(max, q.shape[: q.ndim - 1 - len(several)], v.shape[:-1]), *several, v.shape[-1])


def each_alone(
    run: Callable[[Signal, State], tuple[Tensor, State]],
    update: StateUpdate,
    signal: Signal,
    state: State,
    offsets: list[int],
) -> tuple[Tensor, list[State]]:
    """A recurrence over packed sequences, those of one length that stand alike in one batch: outputs, and states to
    `join`."""
    groups: dict[tuple[int, int], list[int]] = {}
    stand = phases(update, state, len(offsets) - 1)
    for n, (a, b) in enumerate(zip(offsets, offsets[1:], strict=False)):
        groups.setdefault((b - a, stand[n]), []).append(n)
    q, v = signal["q"], signal["v"]
    assert isinstance(q, Tensor) and isinstance(v, Tensor)
    out = unread(q, v, update.parts().step.reads)
    ends: dict[int, State] = {}
    total = len(offsets) - 1
    for (length, _), members in groups.items():
        first = torch.tensor([offsets[n] for n in members], device=v.device)
        rows = first[:, None] + torch.arange(length, device=v.device)
        part = {n: x[0, rows] if isinstance(x, Tensor) and x.ndim > 1 else x for n, x in signal.items()}
        before = select(state, torch.tensor(members, device=v.device), total)
        got, end = run(part, one(before))
        end = behind(before, end)
        out = out.index_put((torch.zeros_like(rows), rows), got.to(out.dtype))
        if len(groups) == 1:  # equal lengths: all sequences, in order
            return out, [end]
        for i, n in enumerate(members):
            ends[n] = select(end, torch.tensor([i], device=v.device), len(members))
    return out, [ends[n] for n in range(total)]


def each_phase(run: Run, update: StateUpdate, signal: Signal, state: State, time: int) -> tuple[Tensor, State]:
    """A recurrence over sequences side by side whose counts differ: those that stand alike at once."""
    q, v = signal["q"], signal["v"]
    assert isinstance(q, Tensor) and isinstance(v, Tensor)
    total = state.count.shape[0]
    stand = phases(update, state, total)
    if len(set(stand)) <= 1:
        out, end = run(signal, one(state))
        return out, behind(state, end)
    out, ends = unread(q, v), list[Any]([None] * total)
    for phase in dict.fromkeys(stand):
        members = [n for n, at in enumerate(stand) if at == phase]
        rows = torch.tensor(members, device=v.device)
        part = {
            n: x[rows] if isinstance(x, Tensor) and x.ndim > time and x.shape[0] == total else x
            for n, x in signal.items()
        }
        before = select(state, rows, total)
        got, end = run(part, one(before))
        end = behind(before, end)
        out = out.index_put((rows,), got.to(out.dtype))
        for i, n in enumerate(members):
            ends[n] = select(end, torch.tensor([i], device=v.device), len(members))
    return out, join(ends, grows(update), counted=True)


def grows(update: StateUpdate) -> int | None:
    """Of a list, one item a token, how many of the first stay in front; None of other memories."""
    memory = update.parts().memory
    return memory.first if isinstance(memory, List) else None


def select(state: Any, rows: Tensor, batch: int) -> Any:
    """Some sequences of a batched state; constants of size one stay as they are."""
    return _map(state, lambda x: x[rows.to(x.device)] if x.shape[0] == batch else x)


def join(states: list[Any], growing: int | None, counted: bool = False) -> Any:
    """Batch states of single sequences; lists of unequal length are padded with massless items, in front or behind the
    `growing` that stay there. counted: a count for every sequence where they differ, else the largest."""
    first = states[0]
    if isinstance(first, Tensor):
        if not first.is_floating_point():
            return joined(states) if counted else torch.stack(states).max()
        return torch.cat(states) if all(s.shape[1:] == first.shape[1:] for s in states) else first
    if isinstance(first, State) and growing is not None:
        length = max(s.theta[2].shape[-1] for s in states)
        owed = next((s.theta[3] for s in states if len(s.theta) > 3), None)
        states = [_pad_list(s, length, owed, growing) for s in states]
    items = [join([s[i] for s in states], growing, counted) for i in range(len(first))]
    return type(first)(*items) if hasattr(first, "_fields") else tuple(items)


def _map(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply to every batched tensor of a nested state (counts have no batch)."""
    if isinstance(state, Tensor):
        return function(state) if state.ndim else state
    items = [_map(x, function) for x in state]
    return type(state)(*items) if hasattr(state, "_fields") else tuple(items)


def _pad_list(state: State, length: int, like: Tensor | None, stay: int) -> State:
    """like: the turn that another list owes; an empty one, which was never turned, owes none."""
    keys, values, mass, *owed = state.theta
    if like is not None and not owed:
        owed = [torch.zeros_like(like)]
    short = length - mass.shape[-1]
    if short and mass.shape[-1] < stay:
        raise ShapeError(
            f"run: where the first {stay} pairs of a list stay, sequences of unequal length go on together once they "
            f"have as many, and one has {mass.shape[-1]}: run it alone, or behind learned tokens "
            "(axes.sequence.Persistent)"
        )
    pad = torch.nn.functional.pad
    keys, values = (torch.cat((x[..., :stay, :], pad(x[..., stay:, :], (0, 0, short, 0))), -2) for x in (keys, values))
    mass = torch.cat((mass[..., :stay], pad(mass[..., stay:], (short, 0), value=-torch.inf)), -1)
    return state.but(theta=(keys, values, mass, *owed))
