"""Functions that launch kernels as operators of torch: what every family would say again, said once.

Compilers, fake tensors and torch.func see an operator. An eager call takes the function itself: the dispatcher costs
the host more than a small kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, final

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active  # by vmap and the like


def in_place(name: str, run: Callable[..., None], mutates: Sequence[str]) -> Callable[..., None]:
    """`run`, which writes to the arguments named in `mutates` and returns nothing; compilers see axes::name."""
    operator = torch.library.custom_op(f"axes::{name}", run, mutates_args=mutates)
    operator.register_fake(lambda *inputs: None)

    def call(*inputs: Any) -> None:
        (operator if torch.compiler.is_compiling() else run)(*inputs)

    return call


@final
class Differentiable:
    """A function of (*tensors, *options), with gradients; tensors may be None and come before numbers.

    forward(*tensors, *options, record) -> (*outputs, kept). kept is a list of what the backward reads beside the
        inputs, empty unless `record` says that a backward may follow. A call returns the outputs.
    backward(*tensors, *options, kept, *grads) -> a list: gradients of the first `gradients` tensors, anything where one
        is None. grads are contiguous; one that did not come is zero, or with `missing` None. One of them may be a
        gradient as it is: an operator, whose results are in memory of their own, copies it.
    shapes(*tensors, *options, record): what forward returns, unfilled. A gradient is like its tensor, contiguous.
    twice: backward is made of torch's operators and may itself be differentiated; otherwise a second derivative raises.
    reads: so many of the first outputs are read by the backward, in front of what is kept.
    passes: a call also returns so many of its first tensors once more. What hears from behind each, in an eager call,
        is given to the backward after grads, or None: it adds it to the gradient that it writes, which saves a pass
        over both.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        shapes: Callable[..., Any],
        *,
        gradients: int,
        missing: bool = False,
        twice: bool = False,
        reads: int = 0,
        passes: int = 0,
    ) -> None:
        @wraps(backward)
        def given(*inputs: Any) -> list[Tensor]:
            made = zip(inputs, backward(*inputs), strict=False)
            return [grad.contiguous() for x, grad in made if x is not None]

        self.forward, self.backward, self.gradients = forward, given, gradients
        self.missing, self.twice, self.reads, self.passes = missing, twice, reads, passes
        self.operator = torch.library.custom_op(f"axes::{name}", forward, mutates_args=())
        self.operator.register_fake(shapes)
        self.reverse: Callable[..., Any] = given
        if not twice:

            @wraps(backward)
            def apart(*inputs: Any) -> list[Tensor]:
                return [grad.clone() if any(grad is x for x in inputs) else grad for grad in given(*inputs)]

            self.reverse = operator = torch.library.custom_op(f"axes::{name}_backward", apart, mutates_args=())
            operator.register_fake(lambda *inputs: [x.new_empty(x.shape) for x in inputs[:gradients] if x is not None])
        self.operator.register_autograd(
            lambda ctx, *grads: self.differentiate(ctx, self.reverse, grads[:-1]), setup_context=self.save
        )

    def __call__(self, *inputs: Any) -> Any:
        record = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        again = inputs[: self.passes]
        if torch.compiler.is_compiling() or type(inputs[0]) not in _PLAIN or _transformed():
            return (*self.operator(*inputs, record)[:-1], *again)
        if record:
            return _Eager.apply(self, *inputs, record)
        return (*self.forward(*inputs, record)[:-1], *again)

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        tensors, kept = [x for x in inputs if x is None or isinstance(x, Tensor)], output[-1]
        ctx.tensors, ctx.options = len(tensors), inputs[len(tensors) : -1]
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*tensors, *output[: self.reads], *kept)
        ctx.set_materialize_grads(not self.missing)

    def differentiate(self, ctx: Any, backward: Callable[..., Any], grads: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """A gradient or None for each argument of forward."""
        saved = ctx.saved_tensors
        tensors, kept = saved[: ctx.tensors], list(saved[ctx.tensors :])
        whole = (None if x is None else x.contiguous() for x in grads)
        found = iter(backward(*tensors, *ctx.options, kept, *whole))
        given = [None if x is None else next(found) for x in tensors[: self.gradients]]
        return *given, *[None] * (len(tensors) - self.gradients + len(ctx.options) + 1)


class _Eager(torch.autograd.Function):
    """A `Differentiable` without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, of: Differentiable, *inputs: Any) -> Any:
        output = of.forward(*inputs)
        ctx.of = of
        of.save(ctx, inputs, output)
        return (*output[:-1], *inputs[: of.passes])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of = ctx.of
        again = torch.is_grad_enabled()  # asked for a graph of the gradients: the operator says what is not there
        return None, *of.differentiate(ctx, of.reverse if again else of.backward, grads)
