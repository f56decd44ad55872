"""Launches without Triton's look-up of the compiled kernel, which costs the host more than a small kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from axes.kernels.common.ahead import missing, rehearsal
from axes.kernels.common.launcher import Launch
from axes.kernels.common.line import recording, unseen


class _Call(NamedTuple):
    """How a kernel is called. rest: arguments after the first ones, in the kernel's order; ready: what was compiled."""

    rest: list[str]
    options: list[str]
    ready: dict[Any, Any]


@final
class Kernel:
    """A kernel of Triton or Gluon that is launched as ever, `kernel[grid](*arguments, **constants_and_options)`.

    What a compiled kernel depends on is looked at here: constants, options, dtypes, alignment, tiles of descriptors,
    and values of integers but those in `do_not_specialize`; of a tuple, those of its members. A call that is new in
    one of these goes through Triton.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names: list[str] = kernel.arg_names
        self._calls: dict[Any, _Call] = {}  # by the number of first arguments and the names of the others
        self._kinds: list[Callable[[Any], Any]] = []
        if isinstance(kernel, JITFunction):  # else Triton's interpreter
            kinds = {(True, False): _constant, (False, True): _open, (False, False): _closed}
            self._kinds = [kinds[p.is_constexpr, p.do_not_specialize and not p.is_constexpr] for p in kernel.params]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch if self._kinds else self._interpret, grid)

    def by_triton(self, grid: tuple[int, ...], *args: Any, **given: Any) -> Any:
        """Launch, compiled before or now. Sums of products are fused: to leave that open will mean no from 3.10 on."""
        return self.kernel[grid](*args, enable_fp_fusion=True, **given)

    def _launch(self, grid: tuple[int, ...], *args: Any, **given: Any) -> None:
        asked = (len(args), *given)
        call = self._calls.get(asked)
        if call is None:
            rest = self.names[len(args) :]
            call = self._calls[asked] = _Call(rest, [name for name in given if name not in rest], {})
        values = (*args, *[given[name] for name in call.rest])
        kinds = [kind(x) for kind, x in zip(self._kinds, values, strict=True)]
        key = (driver.active.get_current_device(), *[given[name] for name in call.options], *kinds)
        ready = call.ready.get(key)
        if (ahead := rehearsal()) is not None:
            if ready is None:
                ahead.ask((self, asked, key), self.kernel, args, {"enable_fp_fusion": True, **given})
            return
        if ready is None:
            missing()
            ready = call.ready[key] = self.by_triton(grid, *args, **given)
        else:
            ready[(*grid, 1, 1)](*values)
        if (recorder := recording()) is not None:
            recorder.launch(Launch(ready, grid), values, {})

    def _interpret(self, grid: tuple[int, ...], *args: Any, **given: Any) -> None:
        recorder = recording()
        if recorder is not None:
            recorder.launch(self.kernel[grid], args, given)
        with unseen():  # the interpreter's own operations
            self.kernel[grid](*args, **given)


def _constant(x: Any) -> Any:
    return x


def _open(x: Any) -> Any:
    """Of an integer only its width counts."""
    return x < 2**31 if isinstance(x, int) else _closed(x)


def _closed(x: Any) -> Any:
    if x is None or type(x) is int:
        return x
    if isinstance(x, Tensor):
        return x.dtype, not x.data_ptr() & 15
    if isinstance(x, float):
        return float
    if isinstance(x, tuple):
        return tuple(map(_closed, x))
    tile = getattr(x, "block_shape", None)
    if tile is None:
        return x
    layout = getattr(x, "layout", None)  # Triton chooses it; with Gluon it is the caller's, and not hashable
    return x.base.dtype, x.padding, *tile, None if layout is None else layout.swizzle_byte_width
