"""A training step as one CUDA graph: small models are bound by the host, which launches it once.

Everything that differs between steps lies in tables on the device, and the graph counts its steps itself: it looks up
its batch and its learning rate, takes the step, and writes its loss. So a replay is all that a step costs the host, and
graphs of several runs are replayed in turn, each on a stream of its own, where small kernels run beside one another.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol, final, get_args

import torch
from torch import Tensor

from axes.errors import AxesError, UnknownName

Capture = Literal["none", "graph"]
WARM = 3  # steps before a capture: caches fill, kernels compile, the optimizer makes its state


class Recorder(Protocol):
    """What makes a step that can be run again of one that has been run."""

    def here(self) -> AbstractContextManager[object]:
        """Where everything of a run happens."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step as it can be run again; it has not been run."""


@final
class CudaGraph:
    """torch's, on a stream of its own: what libraries keep for a stream is then no other graph's."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def here(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        torch.cuda.empty_cache()  # what warm steps let go of: a graph's own pool cannot have it
        collecting = gc.isenabled()
        gc.disable()  # nothing of another graph may be freed while this one is recorded
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph.replay


@final
class Captured:
    """Steps of a run, of which the first few run as they are and every further one is a replay.

    Args:
        step: takes a batch, trains on it and returns the loss; it must read nothing back and launch the same for every
            batch.
        lr: () that `step` reads, and rates (steps,) that are put there, one a step.
        recorder: CUDA's graphs, or what stands for them in a test.
    """

    def __init__(self, step: Callable[..., Tensor], lr: Tensor, rates: Tensor, recorder: Recorder) -> None:
        self._step, self._recorder, self._lr, self._rates = step, recorder, lr, rates
        self.losses = torch.full_like(rates, torch.nan)
        self._at, self._place = (torch.zeros(1, dtype=torch.int64, device=rates.device) for _ in range(2))
        self._given: tuple[Tensor, ...] = ()
        self._taken = 0
        self._replay: Callable[[], None] | None = None

    def load(self, batches: Sequence[Tensor]) -> None:
        """The batches of the next steps, (steps, ...) each; never more than the first time."""
        if not self._given:
            self._given = tuple(x.to(self.losses.device, copy=True) for x in batches)
        else:
            for mine, x in zip(self._given, batches, strict=True):
                if mine.shape[1:] != x.shape[1:] or len(mine) < len(x):
                    raise AxesError(f"captured steps take at most {tuple(mine.shape)} at once, got {tuple(x.shape)}")
                mine[: len(x)].copy_(x.pin_memory() if mine.is_cuda else x, non_blocking=True)
        self._place.zero_()

    def take(self) -> None:
        """One step."""
        if self._replay is None and self._taken >= WARM:
            self._replay = self._recorder.record(self._run)
        (self._replay or self._run)()
        self._taken += 1

    def _run(self) -> None:
        self._lr.copy_(self._rates.index_select(0, self._at)[0])
        loss = self._step(*(x.index_select(0, self._place)[0] for x in self._given))
        self.losses.index_copy_(0, self._at, loss.reshape(1).to(self.losses.dtype))
        self._at.add_(1)
        self._place.add_(1)


@final
class Again:
    """In the place of a graph where there is none: what is recorded is not run, as on a GPU, and is run anew."""

    def here(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


def require_capture(capture: str, device: torch.device) -> None:
    """AxesError unless steps can be captured so on a device."""
    if capture not in get_args(Capture):
        raise UnknownName("capture", capture, get_args(Capture))
    if capture == "graph" and device.type != "cuda":
        raise AxesError(f"--capture graph makes CUDA graphs, and the device is {device}: leave it out")
