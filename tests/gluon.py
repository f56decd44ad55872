"""Gluon's text in Triton's interpreter, where layouts, barriers and waiting are nobody's business: what a kernel of
Ampere's products computes, not whether its warps wait for each other.

`plain(source)` is the text of a module of kernels as the interpreter takes it.
"""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_IMPORT = re.compile(r"from axes\.kernels\.common\.gluon import (.*)\n")

_NAMES = (("gl.constexpr", "tl.constexpr"), ("@gluon.constexpr_function\n", ""), ("@gluon.jit", "@triton.jit"))


class _Tile:
    """Shared memory: what was stored in it last; a part of it, and in the order, of a view."""

    def __init__(
        self, cell: list[Any], part: tuple[slice, ...] = (), order: tuple[int, ...] | None = None
    ) -> None:
        self.cell, self.part, self.order = cell, part, order

    def permute(self, order: tuple[int, ...]) -> _Tile:
        return _Tile(self.cell, self.part, order if self.order is None else None)

    def slice(self, start: int, length: int, dim: int = 0) -> _Tile:
        first, count, dim = (getattr(x, "value", x) for x in (start, length, dim))
        part = [*self.part, *[slice(None)] * (dim + 1 - len(self.part))]
        assert self.order is None and part[dim] == slice(None)
        part[dim] = slice(first, first + count)
        return _Tile(self.cell, tuple(part))

    def load(self, layout: Any = None) -> Any:
        whole = self.cell[0]
        made = tl.core.tensor(TensorHandle(whole.handle.data[self.part], whole.handle.dtype), whole.dtype)
        made = tl.core.tensor(made.handle, tl.block_type(whole.dtype.scalar, list(made.handle.data.shape)))
        return made if self.order is None else tl.trans(made, *self.order)

    def store(self, x: Any) -> None:
        x = x if self.order is None else tl.trans(x, *self.order)
        if self.part:
            held, kind = self.cell[0], x.handle.dtype
            data = np.zeros(self.cell[1], x.handle.data.dtype) if held is None else held.handle.data.copy()
            data[self.part] = x.handle.data
            x = tl.core.tensor(TensorHandle(data, kind), tl.block_type(x.dtype.scalar, list(data.shape)))
        self.cell[0] = x


class _Tiles:
    def __init__(self, count: int, shape: list[int]) -> None:
        self.cells: list[list[Any]] = [[None, shape] for _ in range(count)]

    def index(self, i: Any) -> _Tile:
        return _Tile(self.cells[int(i.handle.data[0] if hasattr(i, "handle") else i)])


def _nothing(*_: Any, **__: Any) -> None:
    return None


class _Language:
    BlockedLayout = SliceLayout = SwizzledSharedLayout = NVMMADistributedLayout = DotOperandLayout = _nothing
    static_range = staticmethod(range)

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    @staticmethod
    def arange(first: int, last: int, layout: Any = None) -> Any:
        return tl.arange(first, last)

    @staticmethod
    def zeros(shape: list[Any], dtype: Any, layout: Any = None) -> Any:
        return tl.zeros([getattr(x, "value", x) for x in shape], dtype)

    @staticmethod
    def inline_asm_elementwise(text: str, constraints: str, args: list[Any], dtype: Any, pure: bool, pack: int) -> Any:
        return tl.exp2(args[0]) if text.startswith("ex2.") else 1.0 / args[0]

    @staticmethod
    def convert_layout(x: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return x

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: list[Any], layout: Any, value: Any = None) -> _Tile | _Tiles:
        sizes = [getattr(x, "value", x) for x in shape]
        return _Tile([value, sizes]) if len(sizes) == 2 else _Tiles(sizes[0], sizes[1:])


gl = _Language()
barrier = copies_end = copies_wait = _nothing


def copy(tile: _Tile, pointer: Any, mask: Any = None) -> None:
    tile.store(tl.load(pointer) if mask is None else tl.load(pointer, mask=mask, other=0.0))


def mma_v2(a: Any, b: Any, acc: Any) -> Any:
    return tl.dot(a, b, acc)


def plain(source: str) -> str:
    (names,) = _IMPORT.findall(source)
    kept = ", ".join(name for name in names.split(", ") if name != "gluon")
    made = _IMPORT.sub(lambda _: f"import triton\nfrom tests.gluon import {kept}\n", source)
    for of_gluon, of_triton in _NAMES:
        made = made.replace(of_gluon, of_triton)
    return made


def stand_in(name: str) -> ModuleType:
    """The module of this name as the interpreter takes it, for all who import it from now on."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    whole, file = plain(Path(spec.origin).read_text()), f"<plain {name}>"
    linecache.cache[file] = (len(whole), None, whole.splitlines(keepends=True), file)  # Triton reads it again
    sys.modules[name] = module = ModuleType(name)
    module.__file__ = file
    exec(compile(whole, file, "exec"), module.__dict__)
    room, _, last = name.rpartition(".")
    setattr(importlib.import_module(room), last, module)
    return module
