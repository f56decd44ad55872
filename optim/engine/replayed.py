"""Launches that are recorded once and replayed: dozens of them then cost the host as much as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor


@final
class Replayed:
    """A function of tensors that stay where they are, recorded as a CUDA graph when it is called again as it was.

    Dozens of launches then cost the host as much as one. Results are overwritten by the next call. recorded: a form of
    the function for the graph. Recording takes longer than many calls, so that a function whose numbers move from call
    to call (`forget`) is never recorded.
    """

    def __init__(self, function: Callable[[], list[Tensor]], recorded: Callable[[], list[Tensor]]) -> None:
        self.function, self.recorded = function, recorded
        self.forget()

    def forget(self) -> None:
        """The function is another one now."""
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.results: list[Tensor] = []

    def __call__(self) -> list[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            return self.recorded()  # part of a larger graph
        self.calls += 1
        if self.calls == 1:  # kernels are compiled and libraries wake up, or a schedule moves what it computes
            return self.function()
        if self.graph is None:
            self._record()
        assert self.graph is not None
        self.graph.replay()
        return self.results

    def _record(self) -> None:
        graph, stream, now = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.results = self.recorded()
            finally:
                graph.capture_end()
        now.wait_stream(stream)
        self.graph = graph
