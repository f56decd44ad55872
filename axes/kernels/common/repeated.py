"""Modules whose calls are followed as lines (`axes.kernels.common.line`) once they have been seen: `repeated`.

What a line depends on is compared at every call: how the tensors look, that of the module's parameters and buffers
included, which are looked up where they stand; that the modules are the ones they were, with the attributes that they
had and without hooks; autograd, autocast, what torch is told of products and of attention, and who else watches
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import is_, itemgetter
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from axes.kernels.common.ahead import Ahead, expect
from axes.kernels.common.line import Line, _tensors, cast

_PLAIN = (Tensor, nn.Parameter)
_KNOWN = {
    nn.Linear, nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, nn.ModuleDict, nn.ModuleList, nn.ParameterList, nn.ParameterDict,
    nn.Identity,
}  # fmt: skip
_OF_TORCH = nn.Module().__dict__  # looked at where they matter: tables, hooks that calls meet, whether it trains
_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MOST = 64  # looks of a module; past them all are forgotten
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active

Run = Callable[..., Any]


@final
class Same:
    """A fact that is this very object, whatever it equals."""

    __slots__ = ("it",)

    def __init__(self, it: object) -> None:
        self.it = it

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is other.it


def repeated(module: nn.Module, run: Run, given: tuple[Tensor, ...], *facts: Hashable) -> Any:
    """run(module, *given, *facts), whose operations depend on how `given` and the module's tensors look and on `facts`,
    and which does nothing else. The results are tensors, in tuples, lists and dictionaries."""
    if not all(x.__class__ in _PLAIN for x in given) or _watched():
        return run(module, *given, *facts)
    known = _known.get(module)
    if known is None or not known.current():
        known = _known[module] = _Calls(module)
    if not known.own or known.hooked():
        return run(module, *given, *facts)
    return known(module, run, given, facts)


def _plainly(x: Tensor) -> Tensor:
    return x.detach()  # a node that kept what it returned would keep itself


_PLAINLY = (_plainly, _plainly)


def around() -> AbstractContextManager[Any]:
    """Within the block tensors are kept for the backward as they are now, whatever hooks come between."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) or _PLAINLY
    return torch.autograd.graph.saved_tensors_hooks(*hooks)


def _watched() -> bool:
    """Whether somebody but autograd watches operations, or autograd does more than gradients."""
    c = torch._C
    return bool(
        c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or _transformed()
        or (c._autograd._top_saved_tensors_default_hooks(False) or _PLAINLY)[0] is not _plainly
        or forward_ad._current_level >= 0
        or c._get_tracing_state() is not None
        or torch.is_anomaly_enabled()
        or nn.modules.module._has_any_global_hook()
    )


@final
class _Calls:
    """The lines of a module by the look of its calls. The second of a look is written down, the third followed."""

    def __init__(self, module: nn.Module) -> None:
        every = list(module.modules())
        self.own = all(type(m) in _KNOWN or type(m).__module__.startswith("axes.") for m in every[1:])
        self.children = [(m._modules, n, child, type(child)) for m in every for n, child in m._modules.items()]
        self.held = [m.__dict__ for m in every]  # not the modules: this one would never go
        own = [(held, n, x) for held in self.held for n, x in held.items() if n not in _OF_TORCH]
        own = [(held, n, x) for held, n, x in own if type(x) is not dict]
        self.attributes, self.were = [(held, n) for held, n, _ in own], [x for _, _, x in own]
        self.tensors = [(held, n) for m in every for held in (m._parameters, m._buffers) for n in held]
        self.lines: dict[Hashable, Line] = {}
        self.before: Line | None = None
        self.again: _Again | None = None

    def current(self) -> bool:
        for held, name, child, cls in self.children:
            if held.get(name) is not child or child.__class__ is not cls:
                return False
        return all(map(is_, [held.get(name) for held, name in self.attributes], self.were))

    def hooked(self) -> bool:
        """Whether a module beside the first, whose hooks are around all of this, would call somebody."""
        return any(map(any, map(_HOOKS, self.held[1:])))

    def __call__(self, module: nn.Module, run: Run, given: tuple[Tensor, ...], facts: tuple[Hashable, ...]) -> Any:
        own = [held.get(name) for held, name in self.tensors]
        tensors, device = [*given, *[p for p in own if p is not None]], given[0].device
        grad = torch.is_grad_enabled()
        told = (
            run, facts, grad, cast(device), torch.is_inference_mode_enabled(), _told(),
            *[held["training"] for held in self.held], *[p is None for p in own],
        )  # fmt: skip
        line = self.again.line_of(told, tensors) if self.again is not None else None
        if line is None:
            look = (*told, *map(_look, given), *map(_look, own))
            line = self.lines.get(look)
            if line is not None and line is self.before and line.ready:
                self.again = _Again.of(line, told, tensors)
            self.before = line
        record = grad and any(p.requires_grad for p in tensors)
        call = partial(self.with_tensors, module, run, len(given), facts)
        if line is not None and line.ready:
            return line.follow(call, tensors, record)
        if line is not None and line.open:
            return line.write(call, tensors, record)
        if line is None and all(p.__class__ in _PLAIN for p in tensors):
            if len(self.lines) >= _MOST:
                self.lines.clear()
            self.lines[look] = Line(device)
            if _compiles(device):
                alike = [*map(_Alike.of, tensors)]
                expect(partial(_rehearse, ref(module), run, facts, alike, len(given), record, cast(device)))
        return run(module, *given, *facts)

    def with_tensors(self, module: nn.Module, run: Run, many: int, facts: Sequence[Any], *tensors: Tensor) -> Any:
        """run with other tensors in the place of those that are given, so many, and of the module's."""
        twin, rest = _twin(module, {}), iter(tensors[many:])
        for m in twin.modules():
            for held in (m._parameters, m._buffers):
                held.update({name: None if p is None else next(rest) for name, p in held.items()})
        return run(twin, *tensors[:many], *facts)


_known: WeakKeyDictionary[nn.Module, _Calls] = WeakKeyDictionary()


class _Again(NamedTuple):
    """A line by the look of its last call, which torch's compiler compares tensors with in a tenth of the time that
    reading a look takes. told: what is no tensor's.  starts: the tensors', modulo the bytes of bulk copies."""

    line: Line
    told: tuple[Any, ...]
    starts: list[int]
    alike: Callable[..., bool]

    @classmethod
    def of(cls, line: Line, told: tuple[Any, ...], tensors: Sequence[Tensor]) -> _Again | None:
        if _Guards is None or not all(x.__class__ in _PLAIN for x in tensors):
            return None
        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        guards = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return cls(line, told, [x.data_ptr() & 15 for x in tensors], guards.check)

    def line_of(self, told: tuple[Any, ...], tensors: Sequence[Tensor]) -> Line | None:
        """The line, if this call looks the same: where a tensor begins in its storage a line does not ask."""
        same = told == self.told and [x.data_ptr() & 15 for x in tensors] == self.starts
        return self.line if same and self.alike(*tensors) else None


_Guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def _compiles(device: torch.device) -> bool:
    """Whether kernels are compiled there, and a call may do more than was asked for: in a capture all is repeated."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


class _Alike(NamedTuple):
    """A tensor's look, which holds no memory of it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool

    @classmethod
    def of(cls, x: Tensor) -> _Alike:
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad)

    def made(self) -> Tensor:
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.grad)


def _rehearse(
    module: ref[nn.Module],
    run: Run,
    facts: Sequence[Any],
    alike: Sequence[_Alike],
    given: int,
    record: bool,
    dtype: torch.dtype | None,
) -> None:
    """Have what a call launches, forward and backward, compiled side by side (`axes.kernels.common.ahead`).
    given: how many of the tensors are no parameters.  dtype: of autocast, or None."""
    own, device = module(), alike[0].device
    if own is None or (known := _known.get(own)) is None or not _compiles(device):
        return
    rehearsing = Ahead(device)
    try:
        cast_to = torch.autocast(device.type, dtype, enabled=dtype is not None)
        with torch.inference_mode(False), torch.set_grad_enabled(record), cast_to, rehearsing:
            tensors = [x.made() for x in alike]
            made = _tensors(known.with_tensors(own, run, given, facts, *tensors))
            ends = [x for x in made if x.requires_grad][:1]  # a state's gradients have launches of their own
            wanted = [x for x in tensors if x.requires_grad]
            if ends:
                torch.autograd.grad(ends, wanted, [torch.ones_like(x) for x in ends], allow_unused=True)
    except Exception:  # as where memory is short: the call itself says what it lacks, or waits for one after the other
        pass
    finally:
        rehearsing.wait()


def _told() -> tuple[Any, ...]:
    """What torch has been told of operations, which the code that was written down may have asked."""
    c = torch._C
    return (
        c._get_deterministic_algorithms(), c._get_flash_sdp_enabled(), c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(), c._get_cudnn_sdp_enabled(), c._get_float32_matmul_precision(),
    )  # fmt: skip


def _look(x: Tensor | None) -> Any:
    if x is None or x.__class__ not in _PLAIN:
        return type(x)
    return (
        x.dtype, x.device, x.shape, x.stride(), x.storage_offset(), x.requires_grad, x.data_ptr() & 15,
    )  # fmt: skip


def _twin(module: Any, made: dict[Any, Any]) -> Any:
    """A module whose tables of parameters, buffers and modules are its own, and all else the module's."""
    if module is None:
        return None
    if module not in made:
        twin = made[module] = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        tables = {"_parameters": dict(module._parameters), "_buffers": dict(module._buffers)}
        modules = {name: _twin(child, made) for name, child in module._modules.items()}
        twin.__dict__.update(tables, _modules=modules)
    return made[module]
