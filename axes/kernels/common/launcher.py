"""A launch of what was compiled, written into a function that is called often: `axes.kernels.common.line`.

Triton's launcher does at every launch what could be done once: it asks the driver to describe each tile again and what
each pointer is, and tells hooks that nobody has set. Here the C function below it is called with addresses, and the
driver's descriptions of tiles are kept by the address that they begin at, since nothing else of them moves.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch

from axes.kernels.common.versions import VERSION

# versions of Triton whose C function is called; its arguments have an order of their own in each
BELOW_TRITON = VERSION is not None and VERSION.startswith(("3.6.", "3.7."))
_MOST = 256  # addresses of one descriptor; a training step has a few


class Tiles(NamedTuple):
    """A descriptor of tiles of a tensor, but for the tensor: that is whatever stands for it."""

    cls: type
    rest: dict[str, Any]
    base: Any


@final
class Launch:
    """A compiled kernel on a grid. Called, it is Triton's launch."""

    def __init__(self, compiled: Any, grid: tuple[int, ...]) -> None:
        self.compiled, self.grid = compiled, (*grid, 1, 1)[:3]
        self._by_triton: Callable[..., None] = compiled[self.grid]

    def __call__(self, *args: Any) -> None:
        self._by_triton(*args)

    def text(self, args: Sequence[Any], constant: Callable[[Any], str], address: Callable[[Any], str]) -> str | None:
        """The call of Triton's C function, with the names that `here` gives; None where Triton has more to do.

        constant: the name of a constant.  address: the text of an argument, with addresses in the place of tensors.
        """
        from triton.backends.nvidia.driver import CudaLauncher

        run = getattr(self.compiled, "run", None) if BELOW_TRITON else None
        if not isinstance(run, CudaLauncher) or run.global_scratch_size or run.profile_scratch_size:
            return None
        described = iter(getattr(self.compiled.metadata, "tensordesc_meta", None) or ())
        texts = []
        for x in args:
            if not isinstance(x, Tiles):
                texts.append(address(x))
                continue
            if (meta := next(described, None)) is None:
                return None
            texts.append(f"{constant(_Maps(x, meta))}[{address(x.base)}]")
            texts += [repr(int(n)) for n in (*x.rest["shape"], *x.rest["strides"])]
        launch = run.launch
        if inspect.isfunction(launch):  # it describes tiles
            launch = inspect.getclosurevars(launch).nonlocals.get("launcher", launch)
        start = (*self.grid, "stream", self.compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        kernel, told = constant(self.compiled.packed_metadata), constant(self.compiled.launch_metadata)
        hooks = (f"None if enter is None else {told}({self.grid}, stream)", "enter", "leave")
        if hasattr(run, "arg_annotations"):  # from Triton 3.7 on
            kinds = constant(run.arg_annotations), constant(run.kernel_signature)
            every = (*start, kernel, *hooks, None, None, *kinds, f"({''.join(f'{x}, ' for x in texts)})")
        else:
            every = (*start, None, None, kernel, *hooks, *texts)
        return f"{constant(launch)}({', '.join(map(str, every))})"


def here(device: int) -> tuple[int, Any, Any]:
    """The stream that launches go to, and hooks before and after them, None where nobody has set any."""
    runtime = sys.modules["triton"].knobs.runtime  # an import statement takes longer than a launch
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave)):
        enter = leave = None
    return torch._C._cuda_getCurrentRawStream(device), enter, leave


class _At:
    """What a descriptor asks of its tensor."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


@final
class _Maps(dict[int, Any]):
    """The driver's descriptions of tiles, by the address of their tensor."""

    def __init__(self, tiles: Tiles, meta: Any) -> None:
        super().__init__()
        self.tiles, self.meta = tiles, meta

    def __missing__(self, address: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) >= _MOST:
            self.clear()
        tiles: Any = object.__new__(self.tiles.cls)
        tiles.__dict__.update(self.tiles.rest, base=_At(address))
        found = self[address] = make_tensordesc_arg(tiles, self.meta)[0]
        return found


__all__ = ["BELOW_TRITON", "Launch", "Tiles", "here"]
