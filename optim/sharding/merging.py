"""What the processes know of one parameter, brought together: what its layer saw, and its state for a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.optim.engine.layers import Examples, Products, Rows, no_hooks
from axes.optim.sharding.dtensors import own_region, row_placements, wrapped
from axes.optim.sharding.exchange import Exchange, Part, Region, ToShards, Way
from axes.optim.sharding.member import Member, Owner


def merge_layers(optimizer: Any, exchange: Exchange, held: Member) -> None:
    """Bring what the processes collected of one layer, each from its own examples, to the layer's owner.

    The losses of the processes are averaged, so that a mean over one process's examples counts as that over all.
    """
    import torch.distributed as dist

    if optimizer._layers is None:
        raise no_hooks(type(optimizer).__name__)
    found = optimizer._layers.found.get(held.parameter)
    said = exchange.share(None if found is None else found.counts())
    if any(counts is None for counts in said):
        raise AxesError(
            f"no layer inputs were collected for {optimizer._label(held.parameter)} on some process: its nn.Linear "
            "must be called, and its output differentiated, between two steps"
        )
    assert held.part is not None
    share = 1.0 / exchange.size if optimizer._reduction == "mean" else 1.0
    merged = type(found)()
    if isinstance(found, Examples):
        columns = [x * scale for x, scale in zip(found.columns(), (1.0, 1.0, share), strict=True)]
        gathered = _rows_of_all(exchange, held, columns, [counts[False] for counts in said])
        if held.owned:
            merged.rows.extend(gathered)
    else:
        assert isinstance(found, Products)
        for observing in sorted({key for counts in said for key in counts}):
            if not all(observing in counts for counts in said):
                raise AxesError("passes that only observe must be run on every process, or on none")
            kk, ee, _ = found.sums[observing]
            kk, ee = kk.clone(), ee * (1.0 if observing else share**2)
            dist.all_reduce(kk, group=exchange.group)
            dist.all_reduce(ee, group=exchange.group)
            numbers = [counts[observing] for counts in said]
            merged.sums[observing] = (kk, ee, sum(numbers))
            if isinstance(found, Rows):
                x, gradient = (torch.cat(column) for column in zip(*found.rows[observing], strict=True))
                columns = [x, gradient * (1.0 if observing else share)]
                merged.rows[observing] = _rows_of_all(exchange, held, columns, numbers)
    if held.owned:
        optimizer._layers.found[held.stand_in] = merged


def _rows_of_all(
    exchange: Exchange, held: Member, columns: list[Tensor], numbers: list[int]
) -> list[tuple[Tensor, ...]]:
    """Columns of examples, one a row, brought to the owner: process after process; nothing elsewhere."""
    assert held.part is not None
    found = []
    for x in columns:
        sent: list[list[Tensor]] = [[] for _ in range(exchange.size)]
        sent[held.part.owner] = [x]
        expected = [[Region((0, 0), (n, x.shape[1]))] if held.owned else [] for n in numbers]
        found.append([piece for pieces in exchange.all_to_all(sent, expected, x) for piece in pieces])
    return list(zip(*found, strict=True))


def sharded_states(optimizer: Owner, exchange: Exchange, members: list[Member]) -> list[dict[str, Tensor]]:
    """The state of every member as DTensors of rows; numbers are the owner's, on every process."""
    notes: dict[int, dict[str, Any]] = {}
    for i, held in enumerate(members):
        if held.owned:
            state = optimizer.state.get(held.parameter, {})
            notes[i] = {n: x.cpu() if x.numel() == 1 else (tuple(x.shape), x.dtype) for n, x in state.items()}
    said = exchange.share(notes)
    named = [said[held.part.owner][i] for i, held in enumerate(members) if held.part is not None]
    placements = [row_placements(held.parameter) for held in members]
    mine = [
        {n: own_region(x[0], h.mesh, places) for n, x in note.items() if not isinstance(x, Tensor)}
        for h, places, note in zip(members, placements, named, strict=True)
    ]
    regions = exchange.share(mine)
    out = []
    for i, (held, places, note) in enumerate(zip(members, placements, named, strict=True)):
        assert held.part is not None
        shown: dict[str, Tensor] = {}
        for name, x in note.items():
            if isinstance(x, Tensor):
                shown[name] = x.to(held.shard.device) if x.is_floating_point() else x
                continue
            shape, dtype = x
            part = Part(shape, [r[i][name] for r in regions], held.part.owner)
            own = [optimizer.state[held.parameter][name]] if held.owned else []
            way = Way(exchange, [part])
            near, far = (held.shard.new_empty(way.room(dtype), dtype=torch.uint8) for _ in range(2))
            (shard,) = ToShards(way, own, near, far, dtype).start()()
            shown[name] = wrapped(shard, held.mesh, places, shape)
        out.append(shown)
    return out
