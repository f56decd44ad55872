"""What a route computes with torch's operations as one operator, for compilers: a node for every length.

Routes loop over chunks or tokens, and some read the state's count: traced, they would be compiled anew for every
length, or not at all. The backward of an operator computes it again, as a checkpoint does, and differentiates that.
Eager calls never come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor

from axes.errors import AxesError

_FORMAT = torch.contiguous_format
_T = TypeVar("_T")
_SCHEMA = "(Tensor[] tensors, str text, str call) -> Tensor[]"
_BACK = "(Tensor[] tensors, Tensor?[] grads, str text, str call) -> Tensor[]"


@final
class Recomputed(Generic[_T]):
    """axes::name of (tensors, text, call) -> tensors.

    compute(thing, tensors, call): what is computed of a thing, whose text a graph names it by; call is what else a
        graph says, in a string.  shapes: the same, unfilled.
    """

    def __init__(
        self,
        name: str,
        compute: Callable[[_T, Sequence[Tensor], str], Sequence[Tensor]],
        shapes: Callable[[_T, list[Tensor], str], list[Tensor]],
    ) -> None:
        self._things: dict[str, _T] = {}  # of layers, by what graphs call them
        self._compute = compute
        self.operator = torch.library.custom_op(f"axes::{name}", self._forward, mutates_args=(), schema=_SCHEMA)
        self._back = torch.library.custom_op(f"axes::{name}_backward", self._backward, mutates_args=(), schema=_BACK)
        self.operator.register_fake(lambda tensors, text, call: shapes(self.named(text), tensors, call))
        self._back.register_fake(lambda tensors, grads, text, call: [empty(x) for x in tensors])
        self.operator.register_autograd(self._differentiate, setup_context=_keep)

    def text(self, thing: _T) -> str:
        """What a thing is called by in a graph; from now on graphs find it."""
        text = repr(thing)
        while self._things.setdefault(text, thing) != thing:  # a user's part may not tell all of itself
            text += "'"
        return text

    def named(self, text: str) -> _T:
        if text not in self._things:
            raise AxesError(f"no layer of {text} is here: a graph of it runs where one has been made")
        return self._things[text]

    def _forward(self, tensors: list[Tensor], text: str, call: str) -> list[Tensor]:
        given = {x.untyped_storage().data_ptr() for x in tensors}
        made: list[Tensor] = []
        for x in self._compute(self.named(text), tensors, call):  # none shares memory with an input or another
            made.append(x.clone() if x._is_view() or x.untyped_storage().data_ptr() in given else x)
            given.add(made[-1].untyped_storage().data_ptr())
        return [x.contiguous() for x in made]

    def _backward(self, tensors: list[Tensor], grads: list[Tensor | None], text: str, call: str) -> list[Tensor]:
        with _autograd(), torch.enable_grad():
            inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
            outputs = zip(self._compute(self.named(text), inputs, call), grads, strict=True)
            pairs = [(y, g) for y, g in outputs if g is not None and y.requires_grad]
            wanted = [x for x in inputs if x.requires_grad]
            found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        made = []
        for x in inputs:
            grad = next(found) if x.requires_grad else None
            made.append(empty(x).zero_() if grad is None else grad.clone(memory_format=_FORMAT))
        return made

    def _differentiate(self, ctx: Any, grads: list[Tensor | None]) -> Any:
        tensors = list(ctx.saved_tensors)
        found = self._back(tensors, grads, ctx.text, ctx.call)
        return [g if x.is_floating_point() else None for x, g in zip(tensors, found, strict=True)], None, None


def empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=_FORMAT)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.text, ctx.call = inputs
    ctx.save_for_backward(*tensors)


def _autograd() -> Any:
    """Inside an operator autograd is left out of the dispatch: here it is back."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


__all__ = ["Recomputed", "empty"]
