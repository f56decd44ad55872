"""A block's forward as sublayers: which children it calls, with what, and what it adds to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from axes.errors import AxesError


class NotResidual(AxesError):
    """A block whose forward is not a sum of its children's outputs and its input; says what it does instead."""


@dataclass(frozen=True)
class Now:
    """One call of a block: what is read from the streams, its arguments by name, and what its calls returned so far."""

    block: nn.Module
    read: Tensor
    given: Mapping[str, Any]
    results: list[Any]


class Source(Protocol):
    """Where a child's argument comes from."""

    def take(self, now: Now) -> Any: ...


@dataclass(frozen=True)
class Read:
    """The residual stream, as the sublayer reads it."""

    def take(self, now: Now) -> Any:
        return now.read


@dataclass(frozen=True)
class Result:
    """What the call of this number returned; its item where it returned a tuple."""

    call: int
    item: int = 0

    def take(self, now: Now) -> Any:
        result = now.results[self.call]
        return result[self.item] if isinstance(result, (tuple, list)) else result


@dataclass(frozen=True)
class Argument:
    """What the block was given under this name."""

    name: str

    def take(self, now: Now) -> Any:
        return now.given[self.name]


@dataclass(frozen=True)
class Own:
    """A parameter or buffer of the block itself, by its name."""

    name: str

    def take(self, now: Now) -> Any:
        return getattr(now.block, self.name)


@dataclass(frozen=True)
class Constant:
    """A value that the block's code supplies."""

    value: Any

    def take(self, now: Now) -> Any:
        return self.value


@dataclass(frozen=True)
class Call:
    """A call of one child; `rest`: it is handed whatever keywords the block does not name."""

    child: str
    args: tuple[Source, ...]
    kwargs: Mapping[str, Source]
    rest: bool = False

    def run(self, now: Now, rest: Mapping[str, Any]) -> Any:
        kwargs = {name: source.take(now) for name, source in self.kwargs.items()}
        if self.rest:
            kwargs.update(rest)
        return self.called(now.block)(*[source.take(now) for source in self.args], **kwargs)

    def called(self, block: nn.Module) -> Callable[..., Any]:
        return block.get_submodule(self.child)


class Operation(Call):
    """The same of an operation of torch that acts entry by entry, by its name, "gelu.default": it is not pickled."""

    def called(self, block: nn.Module) -> Callable[..., Any]:
        name, overload = self.child.split(".")
        found: Callable[..., Any] = getattr(getattr(torch.ops.aten, name), overload)
        return found


@dataclass(frozen=True)
class Sublayer:
    """The calls between one read of the stream and the next; the sum of `added` is what the block adds to it."""

    calls: tuple[Call, ...]
    added: tuple[Result, ...]

    def run(
        self, block: nn.Module, read: Tensor, given: Mapping[str, Any], results: list[Any], rest: Mapping[str, Any]
    ) -> Tensor:
        """y of the sublayer for what it reads; results: what the block's calls returned so far, extended."""
        now = Now(block, read, given, results)
        for call in self.calls:
            results.append(call.run(now, rest))
        first, *others = (result.take(now) for result in self.added)
        y: Tensor = first
        for other in others:
            y = y + other
        return y


@dataclass(frozen=True)
class Wiring:
    """A block's forward, as sublayers.

    Attributes:
        names: of the arguments, the stream first.
        defaults: of those that need not be given.
        fixed: arguments that must keep their default, and what else would happen.
        sublayers: in order.
        others: what is returned behind the stream; None if the stream is returned alone.
        rest: whether keywords beyond `names` have a place to go.
        matrices: arguments that the block looks at, known for floating-point tensors of two dimensions alone.
    """

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, str]
    sublayers: tuple[Sublayer, ...]
    others: tuple[Source, ...] | None
    rest: bool = False
    matrices: frozenset[str] = frozenset()

    def bind(self, who: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments of one call by name, and keywords beyond them."""
        if len(args) > len(self.names):
            raise NotResidual(f"{who}: takes {len(self.names)} arguments without names, got {len(args)}")
        given = {**self.defaults, **dict(zip(self.names, args, strict=False))}
        rest = {}
        for name, value in kwargs.items():
            if name in self.names:
                given[name] = value
            else:
                rest[name] = value
        if rest and not self.rest:
            raise NotResidual(f"{who}: unknown arguments {', '.join(rest)}; known: {', '.join(self.names)}")
        for name, reason in self.fixed.items():
            if not _same(given[name], self.defaults[name]):
                raise NotResidual(f"{who}: wrapped, it takes {name}={self.defaults[name]!r} only: {reason}")
        for name in self.matrices:
            value = given[name]
            if not _same(value, self.defaults[name]) and not (
                isinstance(value, Tensor) and value.ndim == 2 and value.is_floating_point()
            ):
                raise NotResidual(
                    f"{who}: wrapped, it takes {name} as a floating-point tensor of two dimensions (a mask of zeros "
                    f"and -inf, say), since its forward looks at it; got {_called(value)}"
                )
        return given, rest

    def behind(self, block: nn.Module, given: Mapping[str, Any], results: list[Any]) -> list[Any]:
        """What the block returns after the stream."""
        now = Now(block, results[0], given, results)
        return [source.take(now) for source in self.others or ()]

    def __str__(self) -> str:
        return " ; ".join(" > ".join(call.child for call in sublayer.calls) for sublayer in self.sublayers)


def _called(value: Any) -> str:
    return f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)


def _same(value: Any, default: Any) -> bool:
    return value is None or value is default or (isinstance(value, (bool, int, float, str)) and value == default)


__all__ = [
    "Argument", "Call", "Constant", "NotResidual", "Operation", "Own", "Read", "Result", "Source", "Sublayer", "Wiring",
]  # fmt: skip
