"""The host's side of layers that run by kernels, without a GPU: every launch is looked up and then left out.

with no_launches() as launches:
    y, _ = layer(x)                          # CPU tensors, by the kernels a Hopper GPU would run
    y.sum().backward()
launches == ["_enter", "_prepare", ...]      # what would have been launched

Counts are of torch's operations (aten, views included) and launches: they say what the host does and never flicker.
They are what Python asks for; a call that has been seen follows a line (`axes.kernels.common.line`).
`python -m tests.host [layers or mixers]` times both and counts forward and backward; with --profile, Python's functions
by time. Of a depth mixer it is a write with the next sublayer's read.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

import axes.sequence as sequence
from axes import catalogue
from axes.depth import DepthMixer
from axes.kernels.common import repeated, versions
from axes.kernels.common.launch import Kernel
from axes.kernels.common.line import Line
from axes.kernels.common.repeated import _known
from axes.sequence.base import SequenceLayer
from tests.alive import alive
from tests.hopper import NoDevice

BY_KERNELS = (
    "GatedDeltaNet", "KDA", "DeltaNet", "LinearAttention", "RetNet", "GLA", "Mamba2", "RWKV7", "TitansMatrix",
)  # fmt: skip
MIXERS = ("hyper-connections", "dynamic-hyper-connections", "mhc", "jpmhc")


class _Nothing:
    """Stands for what was compiled."""

    def __init__(self, name: str, launches: list[str]) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self

    def __call__(self, *args: Any) -> None:
        self.launches.append(self.name)


@contextmanager
def no_launches() -> Iterator[list[str]]:
    """Within the block CPU tensors count as a Hopper GPU's and nothing is launched; names of what would have been."""
    launches: list[str] = []

    def compiled(kernel: Kernel, grid: tuple[int, ...], *args: Any, **given: Any) -> _Nothing:
        launches.append(kernel.kernel.fn.__name__)
        return _Nothing(kernel.kernel.fn.__name__, launches)

    reasons = patch.object(versions, "_ask", lambda device: versions._Reasons(None, None))
    unchecked = patch("axes.kernels.common.layout.interpreted", lambda: True)
    previous = driver._active  # asking for `active` would look for a GPU
    driver.set_active(NoDevice())  # type: ignore[arg-type]
    try:
        with patch.object(Kernel, "by_triton", compiled), unchecked, reasons:
            yield launches
    finally:
        driver._active = previous
        for kernel in alive(Kernel):  # nothing of this block is ready for a GPU
            kernel._calls.clear()


def line(name: str) -> tuple[Line, list[str], list[str]]:
    """What a layer's third call follows, and what it launches, forward and backward."""
    layer, x = example(name)
    with no_launches() as launches:
        for _ in range(3):
            launches.clear()
            y, _ = layer(x)
            forward = launches.copy()
            launches.clear()
            y.backward(torch.ones_like(y))
        (found,) = _known[layer].lines.values()
        return found, forward, launches.copy()


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Work(NamedTuple):
    """Of one direction: operations of torch, launches of kernels."""

    operations: list[str]
    launches: list[str]


def example(name: str, length: int = 2) -> tuple[SequenceLayer, torch.Tensor]:
    """A layer of two heads of 64 in bfloat16, which the kernels for Hopper take, and tokens."""
    torch.manual_seed(0)
    layer: SequenceLayer = getattr(sequence, name)(16, heads=2, d_k=64, d_v=64, dtype=torch.bfloat16)
    return layer, torch.randn(1, length, 16, dtype=torch.bfloat16, requires_grad=True)


def work(name: str) -> tuple[Work, Work]:
    """What a layer's second forward and backward ask of torch and of the kernels."""
    layer, x = example(name)
    with no_launches() as launches:
        y, _ = layer(x)
        ones = torch.ones_like(y)
        y.backward(ones)
        layer.zero_grad()
        launches.clear()
        with _Operations() as counted:
            y, _ = layer(x)
        forward = Work(counted.names, launches.copy())
        launches.clear()
        with _Operations() as counted:
            y.backward(ones)
        return forward, Work(counted.names, launches)


def one_token(name: str, before: int = 5) -> Work:
    """What a token after others asks of torch and of the kernels."""
    layer, x = example(name, before + 1)
    with no_launches() as launches, torch.no_grad():
        _, state = layer(x[:, :before])
        _, state = layer.step(x[:, before], state)
        launches.clear()
        with _Operations() as counted:
            layer.step(x[:, before], state)
        return Work(counted.names, launches)


def sublayer(name: str) -> Callable[[], list[torch.Tensor]]:
    """Streams after a write and the next read of them, of four streams of 64 in float32, with tensors to write."""
    torch.manual_seed(0)
    first, second = (catalogue.get(name, axis="depth").cls(64, i, streams=4) for i in range(2))
    assert isinstance(first, DepthMixer)
    streams, y = torch.randn(1, 2, 4, 64, requires_grad=True), torch.randn(1, 2, 64, requires_grad=True)
    with torch.no_grad():
        given = first.read(streams)[1]
    given = given._replace(signal={n: c.clone().requires_grad_() for n, c in given.signal.items()}, read=None)

    def run() -> list[torch.Tensor]:
        after, x, told = first.write_then_read(streams, y, given, second)
        return [told.read[1] if told.read is not None else after, x, *told.signal.values()]

    return run


def mixed(name: str) -> tuple[Work, Work]:
    """What Python asks of torch and of the kernels for a write and a read of a mixer, and in their backward."""
    with no_launches() as launches, patch.object(repeated, "_watched", lambda: True):
        run = sublayer(name)
        ones = [torch.ones_like(x) for x in run()]
        launches.clear()
        with _Operations() as counted:
            made = run()
        forward = Work(counted.names, launches.copy())
        launches.clear()
        with _Operations() as counted:
            torch.autograd.backward(made, ones)
        return forward, Work(counted.names, launches)


def mixed_milliseconds(name: str, calls: int = 50, rounds: int = 10) -> list[tuple[float, float]]:
    """Of the processor, of a forward and of both, as a line and by Python, by turns: the least of some rounds."""
    with no_launches():
        run = sublayer(name)
        ones = [torch.ones_like(x) for x in run()]

        def both() -> None:
            torch.autograd.backward(run(), ones)

        for _ in range(3):
            both()
        found: list[list[tuple[float, float]]] = [[], []]
        watched = repeated._watched
        for _ in range(rounds):
            for held, asked in zip(found, (watched, lambda: True), strict=True):
                with patch.object(repeated, "_watched", asked):
                    held.append((_least(run, calls, 1), _least(both, calls, 1)))
        return [(min(one for one, _ in held), min(two for _, two in held)) for held in found]


def milliseconds(name: str, by_python: bool = False, calls: int = 200, rounds: int = 5) -> tuple[float, float]:
    """Of the processor, of a forward and of both: the least of some rounds. by_python: as a first call."""
    layer, x = example(name)

    def forward() -> Any:
        return (layer._run(x, None, None) if by_python else layer(x))[0]

    def both() -> None:
        y = forward()
        y.backward(ones)

    with no_launches():
        ones = torch.ones_like(forward())
        both(), both()
        return _least(forward, calls, rounds), _least(both, calls, rounds)


def _least(call: Callable[[], object], calls: int, rounds: int) -> float:
    found = []
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(calls):
            call()
        found.append((time.process_time() - begun) / calls * 1e3)
    return min(found)


def _profile(name: str) -> None:
    layer, x = example(name)
    with no_launches():
        y, _ = layer(x)
        ones = torch.ones_like(y)
        y.backward(ones)
        with cProfile.Profile() as profile:
            for _ in range(200):
                layer(x)[0].backward(ones)
    pstats.Stats(profile).sort_stats("cumulative").print_stats(70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="*", default=(*BY_KERNELS, *MIXERS))
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.layers:
        if name in MIXERS:
            forward, backward = mixed(name)
            (one, two), (first, both) = mixed_milliseconds(name)
        else:
            forward, backward = work(name)
            one, two = milliseconds(name)
            first, both = milliseconds(name, by_python=True)
        counts = [f"{len(w.operations)} operations, {len(w.launches)} launches" for w in (forward, backward)]
        times = f"{one:6.3f} / {two:6.3f} ms, by Python {first:6.3f} / {both:6.3f}"
        print(f"{name:25} {times}   forward {counts[0]}; backward {counts[1]}", flush=True)
        if given.profile and name not in MIXERS:
            print(forward.operations, forward.launches, backward.operations, backward.launches, sep="\n")
            _profile(name)


if __name__ == "__main__":
    main()
