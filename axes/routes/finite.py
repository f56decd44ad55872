"""What is not finite stays behind the token that brought it, and what a caller may ask about it.

Routes multiply whole chunks by masked matrices, and zero times not-a-number is not zero: a NaN at one token would reach
the tokens before it. So the outputs of a sequence are looked at once, by their sum. Where that is not finite the
sequence is halved until what is finite is found by the route and the rest by the interpreter, token by token. Where a
compiler follows a route on a CPU, and on a GPU, where a look would wait for the device, nothing depends on a number:
torch's routes are given zeros in the place of values that are not finite, and from their token on a head's outputs and
its memory are NaN; so are the kernels of two layers. All others have a remedy behind them (`axes.kernels.contain`),
torch's fused attention on a GPU as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from axes.core import reference
from axes.core.facts import fact
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError, NotFiniteError
from axes.routes.spans import split

Tokens = Mapping[str, Tensor | float]
Run = Callable[[StateUpdate, Tokens, State], tuple[Tensor, State]]

_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


def contained(run: Run, update: StateUpdate, signal: Tokens, state: State, batch: int) -> tuple[Tensor, State]:
    """What a route makes of a sequence, (..., T, d_v) and the last state, as far as it is finite; behind the first
    token where it is not, what the interpreter makes of it. signal: `batch` batch dimensions, then T, then features."""
    q = signal["q"]
    assert isinstance(q, Tensor)
    if not _may_look(q):
        return set_aside(run, update, signal, state, batch, batch)
    out, after = run(update, signal, state)
    if is_finite(out):
        return out, after
    return _halved(run, update, signal, state, batch, (out, after))


def set_aside(
    run: Callable[[StateUpdate, Tokens, Any], tuple[Tensor, State]],
    update: StateUpdate,
    signal: Tokens,
    state: State | None,
    batch: int,
    time: int,
) -> tuple[Tensor, State]:
    """`contained` without a look at any number: zeros stand in for what is not finite, and a head's outputs and its
    memory are NaN from there on. signal: T in dimension `time`, `batch` others around it, then features."""
    q = signal["q"]
    assert isinstance(q, Tensor)
    if q.shape[time] <= 1:
        return run(update, signal, state)  # there is no earlier token
    logs, clean = log_gates(update), dict(signal)
    asked, written = None, None
    for name, x in signal.items():
        if not isinstance(x, Tensor) or x.ndim <= batch or not x.is_floating_point():
            continue
        if name not in ("q", "k", "v") and (x.shape[time] == 1 or x.stride(time) == 0):
            continue  # of all tokens: there is no earlier one
        clean[name], bad = _apart(x, batch, name in logs)
        if name == "q":  # memories do not hear of it
            asked = bad
        else:
            written = bad if written is None else written | bad
    assert asked is not None and written is not None
    behind = written.cumsum(time) > 0
    out, after = run(update, clean, state)
    lost = behind.select(time, -1)
    theta = (x.masked_fill(_of(lost, x), float("nan")) if x.is_floating_point() else x for x in after.theta)
    none = (behind | asked)[(..., *[None] * (out.ndim - batch - 1))]
    return out.masked_fill(none, float("nan")), after.but(theta=tuple(theta))


def _apart(x: Tensor, batch: int, gate: bool) -> tuple[Tensor, Tensor]:
    """x with zeros for what is not finite, and whose features had some. gate: of logs, of which -inf is no accident."""
    features = x[(..., *[None] * (x.ndim == batch + 1))]
    if x.is_cuda:
        from axes.kernels.rows.aside import fits, set_aside  # triton is imported on first use

        if features.ndim == batch + 2 and fits(features):
            clean, bad = set_aside(features, gate)
            return clean.view_as(x), bad
    clean = x.nan_to_num(0.0, 0.0, float("-inf") if gate else 0.0)
    seen = features.detach().clamp_min(0) if gate else features.detach()
    return clean, ~(torch.linalg.vector_norm(seen.flatten(batch + 1), float("inf"), -1) < float("inf"))


def _of(lost: Tensor, leaf: Tensor) -> Tensor:
    """Heads that are lost, as a mask of a leaf of their memory; one that several read is lost with any of them."""
    for i in range(lost.ndim):
        lost = lost.any(i, True) if leaf.shape[i] == 1 else lost
    return lost[(..., *[None] * (leaf.ndim - lost.ndim))]


def _halved(
    run: Run, update: StateUpdate, signal: Tokens, state: State, batch: int, made: tuple[Tensor, State] | None = None
) -> tuple[Tensor, State]:
    """`made` is what the route makes of all of it."""
    out, after = run(update, signal, state) if made is None else made
    if is_finite(out):
        return out, after
    spoilt = [~x.isfinite() for x in state.theta if x.numel()]
    lost = torch.stack([x.flatten(batch).all(batch) for x in spoilt]).all(0) if spoilt else torch.tensor(False)
    if not ((~out.isfinite()).flatten(batch).any(batch) & ~lost).any():
        return out, after  # nothing is left of these memories
    q = signal["q"]
    assert isinstance(q, Tensor)
    length = q.shape[batch]
    if length == 1 or any(bool(x.any()) for x in spoilt):
        return reference.run(update, signal, state, time=batch)
    outputs = []
    for part in split(signal, batch, (length // 2, length - length // 2)):
        out, state = _halved(run, update, part, state, batch)
        outputs.append(out)
    return torch.cat(outputs, batch), state


def is_finite(x: Tensor) -> bool:
    """By one pass over memory: entries are looked at one by one only where their sum says nothing."""
    x = x.detach()
    total = x.sum(dtype=torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None)
    return math.isfinite(total) or bool(x.isfinite().all())


def require_finite(
    who: str,
    named: Mapping[str, Tensor | float],
    time: int = 1,
    hint: str = "",
    gates: Collection[str] = (),
    batch: int = 1,
    cu_seqlens: Tensor | None = None,
) -> None:
    """NotFiniteError that names the first token which is not finite, its sequence, its head and its entry; reads every
    value.

    gates: names of log gates, which may be -inf: that forgets everything.  batch: dimensions around `time` ahead of
    features, the first of which is the sequence, and the last of several the head.  cu_seqlens: of packed sequences.
    """
    if torch.compiler.is_compiling():
        raise AxesError(f"{who}: check_finite reads values, which no compiler follows: leave it out, or run eagerly")
    for name, x in named.items():
        if not isinstance(x, Tensor) or not x.is_floating_point() or is_finite(x):
            continue
        x = x.detach()
        bad = ~x.isfinite()
        place = (bad & ~x.isneginf() if name in gates else bad).nonzero()
        if len(place):
            first = place[place[:, time].argmin()] if x.ndim > time else place[0]
            entry = tuple(first.tolist())
            where = _where(entry, time, batch, cu_seqlens) if x.ndim > max(time, batch) else ""
            raise NotFiniteError(
                f"{who}: {name} is not finite: {float(x[entry])}{where}, entry {entry} of {tuple(x.shape)}{hint}"
            )


def _where(entry: tuple[int, ...], time: int, batch: int, cu_seqlens: Tensor | None) -> str:
    """Which token of which sequence and head an entry is of."""
    token, (*around, last) = entry[time], [n for i, n in enumerate(entry[: batch + 1]) if i != time]
    head = f" and head {last}" if around else ""
    if cu_seqlens is None:
        return f" at token {token} of sequence {around[0] if around else last}{head}"
    ends = cu_seqlens.tolist()
    sequence = sum(end <= token for end in ends) - 1
    return f" at token {token} of the packed ones, {token - ends[sequence]} of sequence {sequence}{head}"


@fact
def log_gates(update: StateUpdate) -> frozenset[str]:
    """The rates of a tuple that are supplied as logs."""
    return frozenset(p.name for p in update.demands() if p.domain == "unit")


def _may_look(x: Tensor) -> bool:
    """Whether the host sees numbers for nothing: of a plain tensor on the CPU, while nobody traces."""
    if x.device.type != "cpu" or type(x) is not Tensor or torch.compiler.is_compiling() or _transformed():
        return False
    return _get_current_dispatch_mode() is None


__all__ = ["contained", "is_finite", "log_gates", "require_finite", "set_aside"]
