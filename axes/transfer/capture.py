"""A training step as one CUDA graph: small models are bound by the host, which launches it once.

What a step reads lies in tensors that stay: the batch and the learning rate are copied into them. What it leaves, the
loss, lies in one too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, final, get_args

import torch
from torch import Tensor

from axes.errors import AxesError, UnknownName

Capture = Literal["none", "graph"]
_WARM = 3  # steps before a capture: caches fill, kernels compile, the optimizer makes its state


class Recorder(Protocol):
    """What makes a step that can be run again of one that has been run."""

    def warm(self, step: Callable[[], None]) -> None: ...

    def record(self, step: Callable[[], None]) -> Callable[[], None]: ...


@final
class CudaGraph:
    """torch's: warm-up and capture on a stream of their own."""

    def warm(self, step: Callable[[], None]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        # the capture has launched nothing: this step is still to be taken
        return graph.replay


@final
class Captured:
    """`step(*batch)` -> loss, of which the first few run as they are and every further one is a replay.

    Args:
        step: takes tensors, trains on them and returns the loss; it must read nothing back and launch the same for
            every batch.
        recorder: CUDA's graphs, or what stands for them in a test.
    """

    def __init__(self, step: Callable[..., Tensor], recorder: Recorder | None = None) -> None:
        self._step, self._recorder = step, recorder or CudaGraph()
        self._given: tuple[Tensor, ...] = ()
        self._loss: Tensor | None = None
        self._taken = 0
        self._replay: Callable[[], None] | None = None

    def __call__(self, *batch: Tensor) -> Tensor:
        if not self._given:
            self._given = tuple(x.clone() for x in batch)
        for place, x in zip(self._given, batch, strict=True):
            if place.shape != x.shape:
                raise AxesError(f"a captured step takes {tuple(place.shape)} every time, got {tuple(x.shape)}")
            place.copy_(x)
        if self._replay is not None:
            self._replay()
        elif self._taken < _WARM:
            self._recorder.warm(self._run)
        else:
            self._replay = self._recorder.record(self._run)
            self._replay()
        self._taken += 1
        assert self._loss is not None
        return self._loss

    def _run(self) -> None:
        self._loss = self._step(*self._given)


def require_capture(capture: str, device: torch.device) -> None:
    """AxesError unless steps can be captured so on a device."""
    if capture not in get_args(Capture):
        raise UnknownName("capture", capture, get_args(Capture))
    if capture == "graph" and device.type != "cuda":
        raise AxesError(f"--capture graph makes CUDA graphs, and the device is {device}: leave it out")
