"""One token of every layer in a CUDA graph: what a replay computes for whatever its input and its state hold by then.

`python tests/gpu/test_captured_steps.py [layers]`: microseconds of a replay beside the sum of its kernels, and eager.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes import catalogue  # noqa: E402
from axes.sequence import ALL, LayerState, SequenceLayer  # noqa: E402

READ_BY_TORCH = {"shampoo-net": "torch's eigh reads its result on the host"}
BEFORE = 3  # tokens; what a step does may hang on how many came before, which the host counts and a graph has fixed


def make(cls: type[SequenceLayer], width: int, heads: int, dtype: torch.dtype) -> SequenceLayer:
    torch.manual_seed(0)
    layer = cls(width, heads=heads, device="cuda", dtype=dtype)
    return layer.requires_grad_(False)


def begun(layer: SequenceLayer, batch: int, tokens: int) -> tuple[Tensor, LayerState]:
    """A token, and the state behind `tokens` others, in memory of its own, which may be written to."""
    like = next(layer.parameters())
    x = torch.randn(batch, tokens + 1, layer.sizes.d_model, device="cuda", dtype=like.dtype)
    _, state = layer(x[:, :-1])
    own = pytree.tree_map(lambda x: x.clone(memory_format=torch.contiguous_format) if x.is_cuda else x, state)
    return x[:, -1].clone(), own


def leaves(state: LayerState) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor) and x.is_cuda]


def captured(layer: SequenceLayer, x: Tensor, state: LayerState) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of one step, and where it leaves its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer.step(x, state)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = layer.step(x, state)
    return graph, made


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.name)
def test_a_replay_is_the_step(cls: type[SequenceLayer], dtype: torch.dtype) -> None:
    if cls.name in READ_BY_TORCH:
        pytest.skip(READ_BY_TORCH[cls.name])
    layer = make(cls, 128, 2, dtype)
    with torch.no_grad():
        others = [begun(layer, 3, BEFORE) for _ in range(3)]
        x, state = begun(layer, 3, BEFORE)
        graph, made = captured(layer, x, state)
        for other, held in others:
            x.copy_(other)
            for mine, theirs in zip(leaves(state), leaves(held), strict=True):
                mine.copy_(theirs)
            graph.replay()
            want = layer.step(other, held)
            for a, b in zip(leaves(made), leaves(want), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


def time_it(names: list[str], batch: int = 64, width: int = 2048, heads: int = 16) -> None:
    from triton.testing import do_bench

    print(f"B={batch} d={width} H={heads} bfloat16, lists of 1,000; us: replay, sum of kernels, ratio, kernels, eager")
    for cls in (catalogue.get(n, "sequence").cls for n in names) if names else ALL:
        try:
            with torch.no_grad():
                layer = make(cls, width, heads, torch.bfloat16)
                is_list = layer.update.parts().memory.kind == "list"
                x, state = begun(layer, batch, 1000 if is_list else BEFORE)
                graph, made = captured(layer, x, state)

                def eager() -> None:
                    layer.step(x, state)  # noqa: B023

                replayed, called = (1e3 * do_bench(f, rep=40, return_mode="median") for f in (graph.replay, eager))
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    for _ in range(5):
                        eager()
                    torch.cuda.synchronize()
                kernels = [e for e in profile.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
                total = sum(e.device_time_total for e in kernels) / 5
                print(
                    f"{cls.name:28s} {replayed:8.1f} {total:8.1f} {replayed / total:5.2f} {len(kernels) // 5:4d} "
                    f"{called:8.1f}", flush=True,
                )  # fmt: skip
                del graph, made
        except Exception as error:
            print(f"{cls.name:28s} {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}", flush=True)
            torch.cuda.synchronize()


if __name__ == "__main__":
    time_it(sys.argv[1:])
