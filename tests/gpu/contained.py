"""What it costs that a NaN stays behind its token: forwards without and with `kernels/contain.py`, by turns.

python -m tests.gpu.contained [NAME..]     # a minute; eager calls, and CUDA graphs, for which no host is waited
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from axes import catalogue, dispatch
from axes.bench.timing import median
from axes.kernels import contain
from axes.testing.examples import example

# not rwkv7: under random erase keys its state overflows before 4,096 tokens, and what would be timed is the remedy
CHAINS = ("linear-attention", "retnet", "mamba2", "delta-net", "gated-delta-net", "gla", "kda")
OTHERS = ("rwkv6", "gru", "titans-matrix", "longhorn", "yaad-matrix", "ttt-linear", "alibi", "softmax-attention")
BATCH, TOKENS, HEADS, WIDTH, TURNS = 8, 4096, 16, 128, 3


def signal(name: str) -> dict[str, Tensor]:
    """Of 64 tokens, repeated."""
    update = catalogue.get(name, axis="sequence").update
    made = example(update, batch=(1, HEADS), length=64, d_k=WIDTH, d_v=WIDTH, dtype=torch.float32)
    given = {n: x.movedim(2, 1) for n, x in made.items() if isinstance(x, Tensor)}
    wide = {n: x.repeat(BATCH, TOKENS // 64, *[1] * (x.ndim - 2)).cuda() for n, x in given.items()}
    return {n: x.bfloat16() if n in "qkv" else x for n, x in wide.items()}


def main() -> None:
    for name in sys.argv[1:] or (*CHAINS, *OTHERS):
        update, given = catalogue.get(name, axis="sequence").update, signal(name)

        def call(update: Any = update, given: Any = given) -> tuple[Tensor]:
            return (dispatch.run(update, given)[0],)

        shown = []
        for _ in range(TURNS):
            for picked in (False, True):
                with patch.object(contain, "PICKED", picked), torch.no_grad():
                    found = median(call, torch.device("cuda"))
                shown.append(f"{'with' if picked else 'without'} {found.eager:.3f} ({found.best:.3f})")
        print(f"{name}: eager ms (graph): {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
