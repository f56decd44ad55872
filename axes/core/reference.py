"""The interpreter: every trajectory computed token by token from the tuple. The meaning of the package.

Any float dtype, no hidden cast, nothing in place, plain autograd (double backward included). It imports no fast path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from axes.core.memory import Leaves
from axes.core.state_update import State, StateUpdate
from axes.errors import ShapeError


def tokens(signal: Mapping[str, Tensor | float], time: int) -> Iterator[dict[str, Tensor | float]]:
    """Split a signal into its data: tensors along dimension `time`; numbers and 0-d tensors are constant in time."""
    tensors = {name: x for name, x in signal.items() if isinstance(x, Tensor) and x.ndim > time}
    lengths = {x.shape[time] for x in tensors.values()}
    if len(lengths) != 1:
        raise ShapeError(
            f"signals disagree about time (dimension {time}): { {n: tuple(x.shape) for n, x in tensors.items()} }"
        )
    constant = {name: x for name, x in signal.items() if name not in tensors}
    unbound = {name: x.unbind(time) for name, x in tensors.items()}
    for t in range(lengths.pop()):
        yield {**constant, **{name: xs[t] for name, xs in unbound.items()}}


def run(
    update: StateUpdate,
    signal: Mapping[str, Tensor | float],
    state: State | None = None,
    *,
    time: int = 0,
    weights: Leaves | None = None,
) -> tuple[Tensor, State]:
    """Run an update over a sequence: step, then read q.

    signal: tensors with time in dimension `time` (batch dimensions before and after it are free); without "q" the
    outputs are the weights themselves.  state: continue from here.  weights: theta_0 otherwise.
    Returns the outputs stacked along `time`, and the final state.
    """
    outputs: list[Tensor] = []
    for datum in tokens(signal, time):
        if state is None:
            state = update.init(datum, weights)
        state, out = update.step(state, datum)
        outputs.append(update.read(out, datum["q"], datum) if "q" in datum else out.weights[0])  # type: ignore[arg-type]
    if state is None:
        raise ShapeError("an empty sequence has no first datum to start a state from: pass state=")
    if not outputs:
        return _nothing(update, signal, state, time), state
    return torch.stack(outputs, dim=time), state


def _nothing(update: StateUpdate, signal: Mapping[str, Tensor | float], state: State, time: int) -> Tensor:
    """The outputs of zero data."""
    v = signal["v"] if "v" in signal else state.theta[0]
    assert isinstance(v, Tensor)
    return v
