"""Updates on data of their own: signals that supply what a tuple asks for, trajectories, and how far two differ."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from axes.core import execution, reference
from axes.core.costs import Linear
from axes.core.execution import Datum, several
from axes.core.memory import MLP, LayerNormMatrix
from axes.core.rates import extent, resolve
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError


def example(
    *updates: StateUpdate,
    batch: tuple[int, ...] = (2,),
    length: int = 7,
    d_k: int = 4,
    d_v: int = 6,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor | float]:
    """A random signal that supplies what all the updates ask for.

    Keyed updates get the batch dimensions, then time, then features; updates of a parameter get time first, and "g" is
    (T, d_v, d_k). A name has the same values whatever other names are asked for. Memories that need d_v = d_k get d_k.
    """
    parts = [part for update in updates for part in every_part(update)]
    if any(isinstance(part, LayerNormMatrix | MLP) for part in parts):
        d_v = d_k
    keyed = updates[0].parts().memory.keyed
    lead = (*batch, length) if keyed else (length,)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        return torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)

    signal: dict[str, Tensor | float] = {}
    writes = {update.parts().step.writes for update in updates}
    reads = {update.parts().step.reads for update in updates}
    if len(writes) > 1 or len(reads) > 1:
        raise AxesError("example: tuples of one and of several writes or reads take no signal alike")
    for name in sorted({"q", *(("k", "v") if keyed else ("g",))}.union(*(u.signals() for u in updates))):
        x = draw(name, {"v": (d_v,), "e": (d_v,), "g": (d_v, d_k)}.get(name, (d_k,)))
        # keys have unit length; the other vectors of a transition are small enough that products of many stay so
        unit = name == "k" or name.startswith(("w", "mutated_w"))
        if name == "v":  # errors from well inside to well outside any threshold
            x = x * torch.exp(1.5 * draw("size of v", (1,)) - 1)
        if unit:
            x = torch.nn.functional.normalize(x, dim=-1)
        if name == "k":  # unit length would hide what depends on it, more would let explicit steps diverge
            x = x * (0.6 + 0.4 * torch.sigmoid(draw("size of k", (1,))))
        signal[name] = x if unit or name in ("v", "q", "g") else 0.3 * x
    for rate in {rate for update in updates for rate in update.demands()}:
        x = draw(rate.name, extent(rate, d_k, d_v))
        if rate.domain == "unit":
            x = torch.nn.functional.logsigmoid(x)
        elif rate.domain == "positive":
            x = torch.sigmoid(x)
        signal[rate.name] = x
    if (n := writes.pop()) > 1:  # the first of each is what a tuple of one write is given
        single = [replace(u.normal(), algorithm=replace(u.parts().step, writes=1, reads=1)) for u in updates]
        sizes = {"batch": batch, "length": length, "d_k": d_k, "d_v": d_v}
        more = [example(*single, **sizes, seed=seed + 1000 * i) for i in range(n)]  # type: ignore[arg-type]
        for name in frozenset().union(*(several(u.parts()) for u in updates)):
            signal[name] = torch.stack([one[name] for one in more], len(lead))  # type: ignore[misc]
    if (n := reads.pop()) > 1:
        signal["q"] = torch.stack([draw(f"q{i}" if i else "q", (d_k,)) for i in range(n)], len(lead))
    return {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in signal.items()}


def trajectory(
    update: StateUpdate, signal: Mapping[str, Tensor | float], state: State | None = None
) -> tuple[Tensor, State]:
    """Outputs (..., T, ...) and the final state, by the interpreter.

    An update of a parameter descends l(W) = |W|^2 / 4 + <g, W> from W_0 = g_0, its gradient taken where the tuple says;
    a filter or a statistic is driven by g.
    """
    p = update.parts()
    if p.memory.keyed:
        return reference.run(update, signal, state, time=time_of(update, signal))
    outputs: list[Tensor] = []
    out = None
    for datum in reference.tokens(signal, 0):
        g = datum["g"]
        assert isinstance(g, Tensor)
        if isinstance(p.cost, Linear):
            driven = (p.cost.drive(g, datum),)
            state = update.init({**datum, "g": driven[0]}) if state is None else state
            state, out = update.step(state, datum, drive=driven)
        else:
            state = update.init(datum, (g,)) if state is None else state
            datum = {**update.numbered(state, datum)}
            rate = resolve(p.step.rate, datum)
            kept = p.memory.act(p.monoid.element(datum, rate, state.theta[0]), state.theta)
            (point,) = execution.evaluated(p, Datum(state, datum, rate, kept, state.anchor))
            if p.step.at == "read" and out is not None:
                point = out.weights[0]
            state, out = update.step(state, {**datum, "g": point / 2 + g})
        outputs.append(out.weights[0])
    assert state is not None
    return torch.stack(outputs), state


def leaves(tree: object) -> list[Tensor]:
    """The tensors of a nested tuple or list, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, tuple | list) else []


def error(a: object, b: object) -> float:
    """Largest difference between nested tuples of tensors, relative to the largest entry of each; inf if unalike."""
    worst = 0.0
    first, second = leaves(a), leaves(b)
    if [x.shape for x in first] != [x.shape for x in second]:
        return float("inf")
    for x, y in zip(first, second, strict=True):
        if x.numel() and x.is_floating_point():
            x, y = x.detach(), y.detach()
            gap = (x - y).abs().max() / y.abs().max().clamp_min(1)
            worst = max(worst, float(torch.nan_to_num(gap, nan=torch.inf)))
        elif not torch.equal(x, y):
            return float("inf")
    return worst


def time_of(update: StateUpdate, signal: Mapping[str, Tensor | float]) -> int:
    """The time dimension of a signal made by `example`."""
    if not update.parts().memory.keyed:
        return 0
    k = signal["k"]
    assert isinstance(k, Tensor)
    return k.ndim - (2 if update.parts().step.writes == 1 else 3)


def narrowed(signal: Mapping[str, Tensor | float], time: int, start: int, stop: int) -> dict[str, Tensor | float]:
    return {n: x.narrow(time, start, stop - start) if isinstance(x, Tensor) else x for n, x in signal.items()}


def every_part(update: StateUpdate) -> Iterator[object]:
    """Every part of a tuple, filters and statistics included."""
    yield from update.parts()
    for inner in (*update.filters(), *update.parts().h.stats):
        yield from every_part(inner)


def identical(a: object, b: object) -> bool:
    first, second = leaves(a), leaves(b)
    return len(first) == len(second) and all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) and torch.equal(x.isnan(), y.isnan())
        for x, y in zip(first, second, strict=True)
    )


def gradients(result: tuple[Tensor, State], signal: Mapping[str, Tensor | float]) -> tuple[Tensor, ...]:
    """Gradients of a fixed random functional of outputs and final state in every input; zero where there is none."""
    loss = torch.zeros((), dtype=torch.float64)
    for i, x in enumerate(leaves(result)):
        if x.is_floating_point() and x.requires_grad:
            weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            loss = loss + (weights * x).sum()
    inputs = [x for x in signal.values() if isinstance(x, Tensor)]
    if not loss.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


__all__ = ["error", "every_part", "example", "gradients", "identical", "leaves", "narrowed", "time_of", "trajectory"]
