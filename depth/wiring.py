"""How a block is wired: which children see the residual stream, in which order, and what is added to it.

No list of class names says that: the block is asked. Its forward runs on a few small tensors with stand-ins for its
children, which note what they are called with and return numbers of their own. The numbers are integers, so that sums
are exact, and every tensor that a child is given is recognised by its value: the stream, or what another one returned.
Operations that act entry by entry on what children returned (an activation, a product of two, a factor that is the
block's own parameter) are noted like children. A block that does anything else (a norm or a dropout that is no child)
is refused, not approximated, and so is one whose numbers hang on how long its input is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axes.depth.wired import (
    Argument,
    Call,
    Constant,
    NotResidual,
    Operation,
    Own,
    Read,
    Result,
    Source,
    Sublayer,
    Wiring,
)

LARGEST = 2**16  # sums of a block's outputs stay exact in float32
MOST_OUTPUTS = MOST_IDLE = 6
EXTRA = "an_argument_that_no_block_knows"
SHORT, LONG = (2, 3), (3, 5)  # sequences and tokens that a block is asked with
SUM, COPY = torch.ops.aten.add.Tensor, torch.ops.aten.clone.default


def wiring(block: nn.Module, width: int) -> Wiring:
    """How the block is wired; width: d of its stream.

    Raises:
        NotResidual: the block's output is not its input plus what chains of its children return.
    """
    forward = inspect.unwrap(type(block).forward)
    _, *parameters = inspect.signature(forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not named:
        raise NotResidual("its forward takes no argument by name, so the stream is not to be told apart")
    ask = _Asked(block, forward, width)
    given: dict[str, Any] = {p.name: _Opaque(Argument(p.name)) for p in named[1:] if p.default is p.empty}
    optional = {p.name: p.default for p in named[1:] if p.name not in given}
    found = ask(given, training=True)
    if ask(given, training=False) != found:
        raise NotResidual("its children are called otherwise in training than in evaluation")
    if ask(given, training=True, sizes=LONG) != found:
        raise NotResidual("its children are given numbers that hang on how many sequences or tokens there are")
    fixed: dict[str, str] = {}
    rest, matrices = False, set()
    more = [EXTRA] if any(p.kind is p.VAR_KEYWORD for p in parameters) else []
    for name in (*optional, *more):
        # a mask that the block looks at, its dtype say, is a tensor of numbers of its own
        for stand_in in (_Opaque(Argument(name)), _Numbers(Argument(name))):
            trial = {**given, name: stand_in}
            try:
                found = _merged(found, ask(trial, training=True))
            except NotResidual as error:
                fixed.setdefault(name, str(error))
            else:
                given, rest = trial, name == EXTRA
                fixed.pop(name, None)
                if isinstance(stand_in, _Numbers):
                    matrices.add(name)
                break
    fixed.pop(EXTRA, None)
    names = tuple(p.name for p in named)
    return Wiring(names, optional, fixed, found.sublayers, found.others, rest, frozenset(matrices))


@dataclass(frozen=True)
class _Found:
    sublayers: tuple[Sublayer, ...]
    others: tuple[Source, ...] | None


@dataclass(frozen=True)
class _Opaque:
    """Stands for an argument, or for what a child returns besides its first output; recognised, never computed with."""

    source: Source


@dataclass(frozen=True)
class _Numbers:
    """The same of an argument that has to be a tensor; what is made of it is not recognised."""

    source: Source


@dataclass
class _Seen:
    """One call of a stand-in or an operation: copies, since a block may add in place."""

    child: str
    args: list[Any]
    kwargs: dict[str, Any]
    output: Tensor
    kind: type[Call] = Call


@dataclass
class _Record:
    items: dict[int, int]  # call -> length of the tuple that it returns
    numbers: torch.Generator
    calls: list[_Seen] = field(default_factory=list)
    known: list[tuple[Tensor, Source]] = field(default_factory=list)  # the block's own, and arguments that are tensors
    outside: bool = False  # a stand-in's own operations are not the block's

    def origin(self, value: Any, before: int | None = None) -> Any:
        """Where a value comes from, of calls before that one; itself if it is a tensor that nobody returned."""
        if isinstance(value, Tensor):
            for number in reversed(range(len(self.calls) if before is None else before)):
                if _equal(value, self.calls[number].output):
                    return Result(number)
            return next((source for x, source in self.known if _equal(value, x)), value)
        if isinstance(value, _Opaque):
            return value.source
        if any(isinstance(leaf, (Tensor, _Opaque)) for leaf in tree_leaves(value)):
            raise NotResidual("a child is given tensors or arguments inside another structure")
        return Constant(value)

    def answer(self, child: str, args: Any, kwargs: dict[str, Any], like: Tensor, kind: type[Call] = Call) -> Tensor:
        """Note a call; numbers of that shape in the place of its result."""
        output = _integers(like, self.numbers)
        kept = {k: _kept(x) for k, x in kwargs.items()}
        self.calls.append(_Seen(child, [_kept(x) for x in args], kept, output, kind))
        return output.clone()


class _Followed(TorchDispatchMode):
    """Notes operations that act entry by entry on what calls returned, as if they were children."""

    def __init__(self, record: _Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        if not self.record.outside and torch.Tag.pointwise in func.tags and not func._schema.is_mutable:
            origins = [self.record.origin(x) for x in given]
            whole = not any(isinstance(origin, Tensor) for origin in origins)
            called = any(isinstance(origin, Result) for origin in origins)
            # sums of what calls returned are recognised by their value
            summed = func is SUM and all(isinstance(origin, Result) for origin in origins)
            if whole and called and not summed and func is not COPY:
                name = f"{func._schema.name.split('::')[1]}.{func._overloadname}"
                return self.record.answer(name, args, kwargs, func(*args, **kwargs), Operation)
        return func(*args, **kwargs)


class _Unpacked(Exception):
    """A child's output was taken apart: it is a tuple."""


class _Output(Tensor):
    """What a stand-in returns; sums of it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Any:
        raise _Unpacked

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            raise _Unpacked
        return super().__getitem__(index)


class _StandIn(nn.Module):
    """In the place of a child: notes its arguments, returns numbers of the shape of the first tensor among them."""

    def __init__(self, child: nn.Module, path: str, record: _Record) -> None:
        super().__init__()
        self.__dict__.update(child=child, path=path, record=record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["child"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        record: _Record = self.__dict__["record"]
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not tensors:
            raise NotResidual(f"{self.__dict__['path']} is called without a tensor")
        number = len(record.calls)
        record.outside = True
        first = record.answer(self.__dict__["path"], args, kwargs, tensors[0]).as_subclass(_Output)
        record.outside = False
        if number not in record.items:
            return first
        return (first, *(_Opaque(Result(number, item)) for item in range(1, record.items[number])))


class _Asked:
    """Runs a block's forward with stand-ins."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], width: int) -> None:
        self.block, self.forward, self.width = block, forward, width
        self.items: dict[int, int] = {}

    def __call__(self, given: dict[str, Any], *, training: bool, sizes: tuple[int, int] = SHORT) -> _Found:
        """The wiring under these arguments. How many things a child returns is found by trying."""
        items = dict(self.items)
        while True:
            record = _Record(items, torch.Generator("cpu").manual_seed(0))
            stream = _integers(torch.empty(*sizes, self.width, device="cpu"), record.numbers)
            alone = _with_stand_ins(self.block, record, training)
            arguments = {name: _drawn(x, sizes, record) for name, x in given.items()}
            try:
                # with gradients, since modules of torch have another way in evaluation without
                with torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"), _Followed(record):
                    output = self.forward(alone, stream.clone().requires_grad_().clone(), **arguments)
            except NotResidual:
                raise
            except Exception as error:  # the block's own code, on arguments it may not expect
                last, taken_apart = len(record.calls) - 1, isinstance(error, (_Unpacked, IndexError))
                items[last] = items.get(last, 1) + 1
                if not (taken_apart or "unpack" in str(error)) or last < 0 or items[last] > MOST_OUTPUTS:
                    reason = next(iter(str(error).splitlines()), "")
                    raise NotResidual(f"its forward fails: {type(error).__name__}: {reason}") from error
            else:
                found = _found(record, stream, output)
                self.items = items
                return found


def _with_stand_ins(block: nn.Module, record: _Record, training: bool) -> nn.Module:
    """The block without its children, its own parameters and buffers drawn anew: no factor of one passes unseen."""
    alone = copy.copy(block)
    own = {
        kind: {name: x if x is None else _integers(x, record.numbers) for name, x in block.__dict__[kind].items()}
        for kind in ("_parameters", "_buffers")
    }
    named = (pair for kind in own.values() for pair in kind.items())
    record.known = [(x, Own(name)) for name, x in named if x is not None]
    alone.__dict__.update(own, _modules=_stood_in(block, "", record), training=training)
    return alone


def _drawn(value: Any, sizes: tuple[int, int], record: _Record) -> Any:
    """An argument of a call; numbers of a mask's shape, (T, T), where it has to be a tensor."""
    if not isinstance(value, _Numbers):
        return value
    made = _integers(torch.empty(sizes[1], sizes[1], device="cpu"), record.numbers)
    record.known.append((made.clone(), value.source))
    return made


def _stood_in(module: nn.Module, prefix: str, record: _Record) -> dict[str, nn.Module | None]:
    made: dict[str, nn.Module | None] = {}
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # not called: its members are
            made[name] = copy.copy(child)
            made[name].__dict__["_modules"] = _stood_in(child, f"{prefix}{name}.", record)
        else:
            made[name] = _StandIn(child, f"{prefix}{name}", record)
    return made


def _found(record: _Record, stream: Tensor, output: Any) -> _Found:
    """Sublayers from what was seen: the stream is read where a child is given it, and moves on where it was added to.

    What no child takes in is added; an operation that nobody takes may also have been for the block's own record.
    """
    calls = record.calls
    taken = [[record.origin(x, i) for x in (*c.args, *c.kwargs.values())] for i, c in enumerate(calls)]
    consumed = {x.call for origins in taken for x in origins if isinstance(x, Result) and x.item == 0}
    idle = [i for i, call in enumerate(calls) if call.kind is Operation and i not in consumed]
    refused = None
    for unused in chain.from_iterable(combinations(idle, count) for count in range(len(idle[:MOST_IDLE]) + 1)):
        try:
            return _added(record, stream, output, taken, consumed.union(unused))
        except NotResidual as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _added(record: _Record, stream: Tensor, output: Any, taken: list[list[Any]], consumed: set[int]) -> _Found:
    """The same where calls beyond those that are consumed are added."""
    sublayers: list[Sublayer] = []
    read, added = stream, stream
    made: list[Call] = []
    ends: list[Result] = []
    for number, (call, origins) in enumerate(zip(record.calls, taken, strict=True)):
        for origin in origins:
            if isinstance(origin, Tensor) and not _equal(origin, read):
                if not ends or not _equal(origin, added):
                    raise NotResidual(f"{call.child} is given neither the residual stream nor what a child returned")
                sublayers.append(Sublayer(tuple(made), tuple(ends)))
                read, made, ends = added, [], []
        sources: list[Source] = [Read() if isinstance(origin, Tensor) else origin for origin in origins]
        args, kwargs = sources[: len(call.args)], dict(zip(call.kwargs, sources[len(call.args) :], strict=True))
        made.append(call.kind(call.child, tuple(args), kwargs))
        if number not in consumed:
            ends.append(Result(number))
            added = added + call.output
    if not ends:
        raise NotResidual("its output is that of one of its children: nothing is added to what enters")
    sublayers.append(Sublayer(tuple(made), tuple(ends)))
    first, *others = output if isinstance(output, tuple) else (output,)
    if not isinstance(first, Tensor) or not _equal(first, added):
        raise NotResidual(
            "its output is not what enters plus what its children return: something between them is no child "
            "(a norm, a dropout), or nothing is added"
        )
    if not isinstance(output, tuple):
        return _Found(tuple(sublayers), None)
    behind = [record.origin(x) for x in others]
    if any(isinstance(x, Tensor) for x in behind):
        raise NotResidual("it returns tensors behind the stream that are no child's")
    return _Found(tuple(sublayers), tuple(behind))


def _merged(found: _Found, other: _Found) -> _Found:
    """The wiring with the arguments that the other one shows; NotResidual if they change anything else."""

    def merge(old: Source | None, new: Source | None) -> Source:
        if new is not None and (isinstance(new, Argument) or new == old):
            return new
        raise NotResidual("given, it changes what the block does")

    def merge_call(old: Call, new: Call) -> Call:
        if old.child != new.child or len(old.args) != len(new.args):
            raise NotResidual("given, it changes which children are called")
        kwargs = dict(new.kwargs)
        rest = kwargs.pop(EXTRA, None) is not None
        if kwargs.keys() != old.kwargs.keys():
            raise NotResidual("given, it changes what children are called with")
        args = tuple(merge(a, b) for a, b in zip(old.args, new.args, strict=True))
        kwargs = {k: merge(old.kwargs[k], kwargs[k]) for k in kwargs}
        return replace(old, args=args, kwargs=kwargs, rest=rest or old.rest)

    def shape(x: _Found) -> tuple[Any, ...]:
        ends = [(len(s.calls), s.added) for s in x.sublayers]
        return ends, x.others is None or len(x.others)

    if shape(found) != shape(other):
        raise NotResidual("given, it changes which children are called, or what is returned")
    sublayers = tuple(
        replace(old, calls=tuple(merge_call(a, b) for a, b in zip(old.calls, new.calls, strict=True)))
        for old, new in zip(found.sublayers, other.sublayers, strict=True)
    )
    if found.others is None or other.others is None:
        return _Found(sublayers, None)
    return _Found(sublayers, tuple(merge(a, b) for a, b in zip(found.others, other.others, strict=True)))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _integers(like: Tensor, numbers: torch.Generator) -> Tensor:
    drawn = torch.randint(-LARGEST, LARGEST, like.shape, generator=numbers, device="cpu")
    return drawn.to(torch.float32)


def _kept(value: Any) -> Any:
    return value.detach().clone().as_subclass(Tensor) if isinstance(value, Tensor) else value


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.double(), b.double())


def leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Children without children of their own, through lists and dictionaries."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from leaves(child)
        elif next(child.children(), None) is None:
            yield child


__all__ = ["leaves", "wiring"]
