"""What every instance of the catalogue costs beside the others: one small size for an axis, on a CPU.

    python -m axes.bench.instances docs/instances.json        # a few minutes; every page of the site shows its row

Sequence layers: 256 tokens of width 128 in 4 heads, forward and with backward, and the state after them. Depth mixers:
a sublayer's read and write of 256 tokens of width 128, 4 streams. Optimizers: a step of 16 matrices of 128 x 128. All
in float32, default options, the least processor time of five runs of one thread: what else runs is not in it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axes import catalogue
from axes.errors import AxesError
from axes.files import write_json
from axes.models.options import accepted_options

TOKENS, WIDTH, HEADS, MATRICES, SUBLAYERS = 256, 128, 4, 16, 3
_RUNS = 5


def _least(call: Callable[[], object], first: Callable[[], object] = lambda: None) -> float:
    """Milliseconds of processor time of a call, without what comes first."""
    first()
    call()
    taken = []
    for _ in range(_RUNS):
        first()
        begun = time.process_time()
        call()
        taken.append(1e3 * (time.process_time() - begun))
    return round(min(taken), 3)


def _size(held: Any) -> int:
    """Numbers in a nested tuple of tensors."""
    if isinstance(held, Tensor):
        return held.numel()
    return sum(_size(part) for part in held) if isinstance(held, tuple | list) else 0


def _sequence(cls: Any) -> dict[str, float]:
    layer = cls(WIDTH, **accepted_options(cls, heads=HEADS))
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    with torch.no_grad():
        forward, (_, state) = _least(lambda: layer(x)), layer(x)
    return {"forward": forward, "both": _least(lambda: layer(x)[0].sum().backward()), "state": _size(tuple(state))}


def _depth(cls: Any) -> dict[str, float]:
    from axes.depth import through

    mixers = [cls(WIDTH, i, **accepted_options(cls, streams=4)) for i in range(SUBLAYERS)]
    sublayers = [torch.nn.Identity() for _ in mixers]
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)

    def run() -> Tensor:
        made: Tensor = mixers[-1].reduce(through(sublayers, mixers, mixers[0].expand(x)))
        return made

    with torch.no_grad():
        forward = _least(run)
    both = _least(lambda: run().sum().backward())
    return {"forward": round(forward / SUBLAYERS, 3), "both": round(both / SUBLAYERS, 3)}


def _data(cls: Any) -> dict[str, float]:
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES)])
    weights = list(model.parameters())
    for w in weights:
        torch.nn.init.uniform_(w, 0.0, 2.0 / WIDTH)  # of one sign, which some rules keep
    optimizer, x = cls(model, lr=1e-4), torch.rand(64, WIDTH)

    def drawn() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()

    return {"step": _least(optimizer.step, drawn)}


_MEASURE: dict[str, Callable[[Any], dict[str, float]]] = {"sequence": _sequence, "depth": _depth, "data": _data}


def main() -> None:
    torch.set_num_threads(1)
    rows: dict[str, dict[str, float]] = {}
    for entry in catalogue.entries():
        torch.manual_seed(0)
        try:
            rows[entry.name] = _MEASURE[entry.axis](entry.cls)
        except (AxesError, RuntimeError, TypeError) as error:  # steps of what needs more than a gradient
            print(f"{entry.name}: {error}", file=sys.stderr)
            continue
        print(entry.name, json.dumps(rows[entry.name]), file=sys.stderr)
    write_json(Path(sys.argv[1]), {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
