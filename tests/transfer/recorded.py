"""A graph without a GPU: what a step launches is recorded, and a replay launches that again and asks Python nothing.

As on a GPU, whatever the host worked out while it recorded stays as it was, and a number that is read back from what
the step computes cannot be recorded. What lies on the host is known by where it came from: made without a device, or of
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MADE = {torch.zeros, torch.ones, torch.full, torch.arange, torch.empty, torch.eye, torch.tensor, torch.linspace}
_READ = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select"}


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.host: dict[int, Tensor] = {}  # alive, so that no other tensor has their numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, name = _tensors((args, kwargs)), func._schema.name.split("::")[1]
        hosted = bool(given) and all(id(x) in self.host for x in given)
        if name in _READ and not hosted:
            raise RuntimeError(f"{name} reads back what a graph computes")
        out = func(*args, **kwargs)
        if hosted or name == "lift_fresh":
            self.host.update({id(x): x for x in _tensors(out)})
        else:
            fresh = [] if any(r.alias_info is not None for r in func._schema.returns) else _tensors(out)
            self.launched.append((func, args, kwargs, fresh))
        return out


class _Made(TorchFunctionMode):
    """What is made without a device is made on the host."""

    def __init__(self, record: _Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _MADE and (kwargs or {}).get("device") is None:
            self.record.host[id(out)] = out
        return out


class Recorded:
    """In the place of `CudaGraph`."""

    def here(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        with _Record() as record, _Made(record):
            step()
        self.first = True

        def replay() -> None:
            if self.first:  # a recording on a CPU has taken the step
                self.first = False
                return
            with torch._C._AutoDispatchBelowAutograd():
                for func, args, kwargs, fresh in record.launched:
                    out = func(*args, **kwargs)
                    for mine, new in zip(fresh, _tensors(out) if fresh else (), strict=True):
                        if mine is not new:
                            mine.copy_(new)

        return replay
