"""How a parameter's entries are a matrix, or a batch of matrices that a rule steps each for itself.

A layout is written as the dimensions of the parameter by name, in their order:

    out in            a matrix, as nn.Linear has it: what it gives against what it takes
    in out            the same map stored the other way round (transformers' Conv1D)
    experts out in    a batch of matrices; every name but out and in is one of the batch
    (3 out) in        rows that are three maps below one another (queries, keys and values)
    in (3 out)        the same, the other way round
    out ...           one matrix: the first dimension against all others (kernels of convolutions)

A rule sees (*batch, out, in). Its geometry acts on the last two dimensions, so a batch is stepped as its matrices
would be alone. Every layout but the last is a view of the parameter.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from axes.errors import AxesError, ShapeError

Axes = tuple[tuple[str, ...], ...]

_TOKEN = re.compile(r"\(([^()]*)\)|([^\s()]+)")


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def canonical_shape(parameter: Tensor) -> tuple[int, int]:
    """The one matrix that a parameter is: (1, 1), (1, n), (m, n) or (m, all others); complex numbers are pairs."""
    shape = tuple(parameter.shape) + ((2,) if parameter.is_complex() else ())
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


@final
@dataclass(frozen=True)
class Layout:
    """The dimensions of a parameter, each a product of named or counted factors; none: the first against all others."""

    axes: Axes = ()

    @staticmethod
    def of(who: str, text: str) -> Layout:
        """The layout that a text says."""
        if text.split() == ["out", "..."]:
            return PLAIN
        axes = tuple(tuple((inner or alone).split()) for inner, alone in _TOKEN.findall(text))
        names = [name for factors in axes for name in factors]
        counted = all(len(f) == 1 or sum(not n.isdigit() for n in f) == 1 for f in axes)
        words = all(axes) and all(name.isidentifier() or (name.isdigit() and int(name)) for name in names)
        sides = names.count("out") == names.count("in") == 1
        if _TOKEN.sub("", text).strip() or not (words and counted and sides):
            raise AxesError(
                f"{who}: {text!r} is no layout of matrices: name every dimension of the parameter in its order, with "
                "'out' and 'in' once each, as in 'out in', 'in out', 'experts out in', '(3 out) in' (three maps below "
                "one another) or 'out ...' (the first dimension against all others)"
            )
        return Layout(axes)

    @property
    def text(self) -> str:
        """As it is written; nothing for what is one matrix as it stands."""
        return " ".join(f[0] if len(f) == 1 else f"({' '.join(f)})" for f in self.axes)

    def fitted(self, who: str, parameter: Tensor) -> Layout:
        """The layout of a parameter; ShapeError unless it has these dimensions. who: what the message calls the two."""
        shape = tuple(parameter.shape)
        if not self.axes:
            return self
        if parameter.is_complex():
            raise AxesError(f"{who} is complex, which no layout of matrices is for")
        if len(shape) != len(self.axes):
            raise ShapeError(f"{who} has shape {shape}, and {self.text!r} names {len(self.axes)} dimensions")
        for size, factors in zip(shape, self.axes, strict=True):
            known = math.prod(int(f) for f in factors if f.isdigit())
            if size % known or (size != known and all(f.isdigit() for f in factors)):
                raise ShapeError(f"{who} has shape {shape}, and {self.text!r} divides {size} into {known}")
        return PLAIN if self.axes == (("out",), ("in",)) else self

    def matrices(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as (*batch, out, in); a view of it if there is a layout."""
        if not self.axes:
            x = real(tensor)
            return x.reshape(canonical_shape(tensor))
        return self.seen(tensor)

    def seen(self, tensor: Tensor) -> Tensor:
        """The same without reshaping: a tensor that is one matrix as it is keeps its shape."""
        if not self.axes:
            return real(tensor)
        sizes: list[int] = []
        for size, factors in zip(tensor.shape, self.axes, strict=True):
            rest = size // math.prod(int(f) for f in factors if f.isdigit())
            sizes += [int(f) if f.isdigit() else rest for f in factors]
        x = tensor
        for i in reversed(range(len(self.axes))):
            count = len(self.axes[i])
            if count > 1:
                place = sum(map(len, self.axes[:i]))
                x = x.unflatten(i, sizes[place : place + count])
        return x.permute(self._order)

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """What a rule sees: (*batch, out, in)."""
        if not self.axes:
            return canonical_shape(parameter)
        return tuple(self.seen(torch.empty(parameter.shape, device="meta")).shape)

    @property
    def _order(self) -> list[int]:
        names = [name for factors in self.axes for name in factors]
        out, taken = names.index("out"), names.index("in")
        return [i for i in range(len(names)) if i not in (out, taken)] + [out, taken]


PLAIN = Layout()
TRANSPOSED = Layout((("in",), ("out",)))
STACKED = Layout((("experts",), ("out",), ("in",)))
STACKED_TRANSPOSED = Layout((("experts",), ("in",), ("out",)))


def divided(layout: Layout, count: int) -> Layout:
    """A layout whose outputs are so many maps below one another."""
    axes = layout.axes or (("out",), ("in",))
    return Layout(tuple((str(count), *f) if "out" in f else f for f in axes))


def words(shape: tuple[int, ...]) -> str:
    """What a rule sees, in words: (768, 768), or 3 x (768, 768)."""
    *batch, rows, columns = shape
    return "".join(f"{n} x " for n in batch) + f"({rows}, {columns})"


__all__ = [
    "PLAIN",
    "STACKED",
    "STACKED_TRANSPOSED",
    "TRANSPOSED",
    "Layout",
    "canonical_shape",
    "divided",
    "real",
    "words",
]
