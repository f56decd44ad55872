"""Kernels compiled side by side before they are needed: a rehearsal asks for all of them and launches none.

with Ahead(device) as ahead:
    loss(twin).backward()                    # what runs is of no interest; every launch is handed to a thread
ahead.wait()                                 # and the first real call finds its kernels

A first call waits for one compiler after the other, since what follows a kernel reads what it has written. In a
rehearsal nothing is written: tensors that operations leave unfilled are zeros, so that indices point somewhere. Only
the threads that the block runs in, those of its backward passes included, rehearse.

A kernel is read in Python, whose lock one thread has at a time, and compiled without. So kernels are read one by one:
who has been read is compiled while the next is read, and all that are read by turns are late.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from axes.errors import wrong_type

_MOST = 32  # compilers at once: each takes a few hundred MB
_aten = torch.ops.aten
_UNFILLED = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip


@final
class Ahead(TorchDispatchMode):
    """A rehearsal, and who compiles what it asks for.

    Args:
        device: whose kernels they are.
        compilers: threads; by default one for every processor that this process may use.
    """

    def __init__(self, device: torch.device, compilers: int | None = None) -> None:
        super().__init__()
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.compilers = min(_MOST, compilers or _processors())
        self.asked: dict[Any, Future[float]] = {}
        self._turn = _Turn()
        self._pool = ThreadPoolExecutor(self.compilers, "compiler", self._begin)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation, which takes seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made.zero_() if function in _UNFILLED else made

    def ask(self, key: Any, kernel: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        """Compile `kernel[grid](*args, **given)`, once for every key, without its tensors."""
        if key not in self.asked:
            small = [_alike(x) for x in args]
            options = {name: _alike(x) for name, x in given.items()}
            self.asked[key] = self._pool.submit(_compiled, kernel, small, options, self._turn)

    @property
    def kernels(self) -> int:
        return len(self.asked)

    def wait(self) -> float:
        """Until all are compiled: the seconds that they took, added up. One that cannot be is tried again by the call
        that needs it, which says why."""
        seconds = [future.exception() is None and future.result() for future in self.asked.values()]
        self._pool.shutdown()
        return float(sum(seconds))

    def _begin(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)


@final
class Rehearsal:
    """Kernels that are being compiled while other things are done. missed: why it did not reach the step's end."""

    def __init__(self, ahead: Ahead, missed: str | None = None) -> None:
        self.ahead, self.missed, self.begun = ahead, missed, time.perf_counter()

    def __str__(self) -> str:
        said = f"compiling {self.ahead.kernels} kernels, up to {self.ahead.compilers} side by side"
        return said if self.missed is None else f"{said}; others when they are first needed ({self.missed})"

    def wait(self) -> str:
        """Until there are no more; how long that took, in words."""
        added = self.ahead.wait()
        return f"compiled after {time.perf_counter() - self.begun:.1f} s, {added:.1f} s one after the other"


def compile_ahead(module: nn.Module, *inputs: Tensor, compilers: int | None = None) -> int:
    """Compile what a module's first call and the backward of its first output would, side by side: how many kernels.

    A copy of the module is called, and none of its kernels runs: the module, its gradients and generators stay as they
    are. Inputs are tensors of the sizes, dtypes and device that are to come, whatever they hold. Where nothing is to be
    compiled, as on a CPU, it is 0.

    Raises:
        TypeError: what is given is no module, or no tensor.
    """
    who = "compile_ahead"
    if not isinstance(module, nn.Module):
        raise wrong_type(who, "module", "an nn.Module", module)
    if not inputs or not isinstance(inputs[0], Tensor):
        raise wrong_type(who, "inputs", "the tensors of the call that is to come", inputs[0] if inputs else None)
    device, twin = inputs[0].device, copy.deepcopy(module)
    ahead = Ahead(device, compilers)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad(), ahead:
        made = twin(*[x.detach().requires_grad_(x.requires_grad) for x in inputs])
        ends = [x for x in tree_leaves(made) if isinstance(x, Tensor) and x.requires_grad][:1]
        torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])
    ahead.wait()
    return ahead.kernels


def expect(rehearse: Callable[[], None]) -> None:
    """A call whose like has not been: should a kernel be missing from now on, `rehearse` is called first, once.

    So a first call waits for its slowest compiler and not for one after the other, and one whose kernels are all there
    rehearses nothing. It may be the call's backward that misses one, in a thread of autograd's.
    """
    _expected[:] = [rehearse]


_expected: list[Callable[[], None]] = []


def missing() -> None:
    """A kernel is about to be compiled. Where operations are watched nobody rehearses."""
    if _expected and not torch._C._len_torch_dispatch_stack() and _processors() > 1:
        _expected.pop()()


def rehearsal() -> Ahead | None:
    """The one that this thread takes part in."""
    if not torch._C._len_torch_dispatch_stack():
        return None
    return next((mode for mode in _get_current_dispatch_mode_stack() if type(mode) is Ahead and not _really), None)


_really: list[bool] = []


@contextmanager
def really() -> Iterator[None]:
    """Within the block kernels are launched, in a rehearsal too: for what asks whether they run at all."""
    _really.append(True)
    try:
        yield
    finally:
        _really.pop()


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compiled(kernel: Any, args: list[Any], given: dict[str, Any], turn: _Turn) -> float:
    from triton.runtime import driver

    with turn:
        begun = time.perf_counter()
        if kernel.device_caches[driver.active.get_current_device()]:  # looked up, the kernel knows what reads it
            kernel.ASTSource = _by_turns(kernel.ASTSource)
        made = kernel.warmup(*args, grid=(1,), **given)
    made._init_handles()  # the C code that launches it, and its binary on the device
    return time.perf_counter() - begun


class _Turn:
    """Who reads a kernel: one thread at a time, until the kernel has been read or was there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        _reading.turn = self

    def __exit__(self, *raised: Any) -> None:
        self.over()

    def over(self) -> None:
        if getattr(_reading, "turn", None) is self:
            _reading.turn = None
            self._lock.release()


_reading = threading.local()


@cache
def _by_turns(source: type) -> type:
    """A kernel as Triton reads it, after which its turn is over."""
    if hasattr(source, "_in_turn"):
        return source

    class Read(source):
        _in_turn = True

        def make_ir(self, *given: Any, **options: Any) -> Any:
            made = super().make_ir(*given, **options)
            if (turn := getattr(_reading, "turn", None)) is not None:
                turn.over()
            return made

    return Read


def _alike(x: Any) -> Any:
    """An argument that is compiled for as `x` is, which holds no memory of it."""
    if isinstance(x, Tensor):
        start = x.data_ptr() % 16 // x.element_size()
        return x.detach().new_empty(start + 1)[start:]
    if isinstance(x, tuple) and not hasattr(x, "_fields"):
        return tuple(map(_alike, x))
    if hasattr(x, "block_shape") and isinstance(getattr(x, "base", None), Tensor):
        return dataclasses.replace(x, base=_alike(x.base))
    return x
