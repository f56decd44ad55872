"""Ctrl-C between steps: the first one asks the loop to stop and save, the second one stops at once.

So do a request to end and a terminal that is closed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """A function that tells whether SIGINT, SIGTERM or SIGHUP has arrived since the block began.

    A step is never cut in half, so what is saved afterwards is a state that the uninterrupted run also passes
    through. Outside the main thread, where Python delivers no signals, nothing is installed.
    """
    requested = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return
    ends = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    previous = {number: signal.signal(number, handle) for number in ends}
    try:
        yield requested.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
