"""Warp-specialised Gluon in plain torch: every warp or warpgroup of a program a thread, which meet at its barriers.

`module(*files)` has the device functions of kernels for Hopper: the text is what a GPU runs, with functions of torch in
the place of Gluon's. It tells what warps compute and whether they wait for each other, nothing of layouts or costs.
Products, sums and shared memory have the dtypes that they have there.
"""

from __future__ import annotations

import re
import threading
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_SECONDS = 60
_program = threading.local()


class _Pointer:
    """Somewhere in a tensor's memory."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, further: Any) -> _Pointer:
        return _Pointer(self.memory, self.at + further)


class _Tile:
    """Shared memory, or a view of it."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    shape = property(lambda self: list(self.held.shape))
    dtype = property(lambda self: self.held.dtype)

    def index(self, i: Any) -> _Tile:
        return _Tile(self.held[int(i)])

    def permute(self, order: tuple[int, ...]) -> _Tile:
        return _Tile(self.held.permute(order))

    def reshape(self, shape: list[int]) -> _Tile:
        return _Tile(self.held.view(shape))

    def slice(self, first: int, length: int) -> _Tile:
        return _Tile(self.held[first : first + length])

    def load(self, layout: Any = None) -> Tensor:
        return self.held.clone()

    def store(self, x: Tensor) -> None:
        assert x.dtype == self.held.dtype and x.shape == self.held.shape, (x.dtype, x.shape, self.held.shape)
        self.held.copy_(x)


class _Number(int):
    """A program's place, which adds to nothing where it stands."""

    def to(self, dtype: Any) -> _Number:
        return self


def _closed(name: str) -> Any:
    plain = getattr(int, name)

    def operator(self: _Number, other: Any) -> Any:
        made = plain(self, other)
        return made if made is NotImplemented else _Number(made)

    return operator


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _side in ("", "r"):
        setattr(_Number, f"__{_side}{_name}__", _closed(f"__{_side}{_name}__"))


class _Barrier:
    """Of so many arrivals, with bytes that are expected to come."""

    def __init__(self) -> None:
        self.count = self.left = self.phase = 0
        self.changed = threading.Condition()

    def index(self, i: Any) -> _Barrier:
        return self

    def init(self, count: int) -> None:
        self.count = self.left = count

    def arrive(self) -> None:
        with self.changed:
            self.left -= 1
            if self.left == 0:
                self.left, self.phase = self.count, self.phase ^ 1
                self.changed.notify_all()

    def wait(self, phase: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != int(phase), _SECONDS), "nobody arrives"


class _Barriers(list[_Barrier]):
    def index(self, i: Any) -> _Barrier:  # type: ignore[override]
        return self[int(i)]


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.as_tensor(x)


def _load(at: _Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    places = _tensor(at.at)
    if mask is None:
        return at.memory.view(-1)[places.long()]
    there = mask.expand_as(places)
    return torch.where(there, at.memory.view(-1)[torch.where(there, places, 0)], other).to(at.memory.dtype)


def _store(at: _Pointer, x: Tensor, mask: Any = None) -> None:
    places = _tensor(at.at)
    x = x.expand_as(places)
    there = torch.ones_like(places, dtype=torch.bool) if mask is None else mask.expand_as(places)
    at.memory.view(-1)[places[there]] = x[there].to(at.memory.dtype)


def _box(tiles: Any, at: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Which part of a descriptor's tensor a tile is, and of the tile what lies inside of the tensor."""
    first = [int(x) for x in at]
    ends = [min(a + n, whole) for a, n, whole in zip(first, tiles.block_shape, tiles.shape, strict=True)]
    return tuple(map(slice, first, ends)), tuple(slice(0, max(0, e - a)) for a, e in zip(first, ends, strict=True))


def _async_load(tiles: Any, at: list[Any], bar: _Barrier, to: _Tile) -> None:
    whole, part = _box(tiles, at)
    to.held.zero_()
    to.held[part] = tiles.base.as_strided(tiles.shape, tiles.strides)[whole]
    bar.expected -= to.held.numel() * to.held.element_size()  # type: ignore[attr-defined]
    assert bar.expected >= 0, "more bytes than are expected"  # type: ignore[attr-defined]
    if bar.expected == 0:  # type: ignore[attr-defined]
        bar.arrive()


def _async_store(tiles: Any, at: list[Any], tile: _Tile) -> None:
    whole, part = _box(tiles, at)
    tiles.base.as_strided(tiles.shape, tiles.strides)[whole] = tile.held[part]


def _expect(bar: _Barrier, count: int) -> None:
    bar.expected = int(count)  # type: ignore[attr-defined]


def _multiply(a: Any, b: _Tile, c: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    left = a.held if isinstance(a, _Tile) else a
    made = left.float() @ b.held.float()
    return made + c if use_acc else made


def _multiply_wait(count: int, deps: list[Tensor]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def _specialize(parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    failed: list[BaseException] = []
    program = _program.at

    def work(part: Any, given: tuple[Any, ...]) -> None:
        _program.at = program
        try:
            with torch.no_grad():
                part(*given)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _allocate(dtype: Any, shape: list[int], layout: Any = None) -> Any:
    if layout == "barrier":
        return _Barriers(_Barrier() for _ in range(shape[0])) if len(shape) > 1 else _Barrier()
    return _Tile(torch.full(shape, float("nan")).to(dtype))


def _where(mask: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(mask, a, b)


def _scan(x: Tensor, axis: int, function: Any, reverse: bool = False) -> Tensor:
    return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)


def _language() -> SimpleNamespace:
    def nothing(*_: Any, **__: Any) -> None:
        return None

    names = dict.fromkeys(
        ("SliceLayout", "SwizzledSharedLayout", "NVMMASharedLayout", "NVMMADistributedLayout", "BlockedLayout"), nothing
    )
    return SimpleNamespace(
        **names, DotOperandLayout=nothing, constexpr=lambda x: x, float32=torch.float32, int64=torch.int64,
        int32=torch.int32, arange=lambda a, b, layout=None: torch.arange(a, b), where=_where, exp2=torch.exp2,
        sum=lambda x, axis: x.sum(axis), abs=torch.abs, minimum=min, load=_load, store=_store,
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
        convert_layout=lambda x, layout, assert_trivial=False: x, static_range=range, associative_scan=_scan,
        allocate_shared_memory=_allocate, warp_specialize=_specialize, program_id=lambda axis: _Number(_program.at),
    )  # fmt: skip


def _mbarrier() -> SimpleNamespace:
    return SimpleNamespace(
        MBarrierLayout=lambda: "barrier", init=lambda bar, count: bar.init(count), expect=_expect,
        arrive=lambda bar, count: bar.arrive(), wait=lambda bar, phase: bar.wait(phase), invalidate=lambda bar: None,
    )  # fmt: skip


def module(*paths: Path, **more: Any) -> ModuleType:
    """The device functions of these files, and what else they call."""
    made = ModuleType("warps")
    made.__dict__.update(
        gl=_language(), mbarrier=_mbarrier(), async_load=_async_load, async_store=_async_store, barrier=lambda: None,
        fence_async_shared=lambda: None, warpgroup_mma=_multiply, warpgroup_mma_wait=_multiply_wait,
        store_wait=lambda count: None, reinterpret=lambda x, dtype, shape, layout: x.reshape(shape), torch=torch,
    )  # fmt: skip
    for path in paths:
        pieces = re.split(r"(?m)^(?=def |@|_?[A-Z]+ = |# ----|class )", path.read_text())
        source = "from __future__ import annotations\n"
        for before, piece in zip(["", *pieces], pieces, strict=False):
            if before.startswith("@gluon") or re.match(r"_?[A-Z]+ = gl\.constexpr\(\d", piece):
                source += piece
        exec(compile(source, f"<{path.name}>", "exec"), made.__dict__)
    made.__dict__.update(more, retire=lambda bar: None)
    return made


def _seen(x: Any) -> Any:
    """What a program sees of an argument."""
    if not hasattr(x, "block_shape"):
        return x
    return SimpleNamespace(**x.__dict__, dtype=x.base.dtype)


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
    """Programs one after another; tensors become pointers."""
    options = {n: x for n, x in options.items() if not n.startswith("num_") and n != "maxnreg"}
    values = [_Pointer(x) if isinstance(x, Tensor) else _seen(x) for x in given]
    for (at,) in product(range(grid[0])):
        _program.at = at
        kernel(*values, **options)
