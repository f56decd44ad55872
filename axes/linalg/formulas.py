"""Derivatives by a formula of ours in the place of autograd's own operations: where that is possible, and their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_PLAIN = (Tensor, nn.Parameter)
Operator = Callable[..., Tensor]
_operator: ContextVar[Operator | None] = ContextVar("operator", default=None)


def by_formula(*given: Tensor | None) -> bool:
    """Whether nobody but autograd's reverse mode follows operations on these: no compiler, transform or subclass."""
    if torch.compiler.is_compiling() or _transformed() or forward_ad._current_level >= 0:
        return False
    return all(x is None or type(x) in _PLAIN for x in given)


@contextmanager
def iterating_by(operator: Operator) -> Iterator[None]:
    """Within, Newton-Schulz iterations are this operator (`axes.linalg.polynomials.operator`) and its adjoint, for who
    follows a computation operation by operation."""
    before = _operator.set(operator)
    try:
        yield
    finally:
        _operator.reset(before)


def iterates_by() -> Operator | None:
    """The operator that `iterating_by` asks for. Compilers have operations of their own and ask for none; those of
    torch 2.11 cannot follow a context's variable."""
    return None if torch.compiler.is_compiling() else _operator.get()


def by_autograd(
    plain: Callable[..., Any], given: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients of plain(*given), a tensor or several, with a graph of their own: they are differentiated again."""
    # views, since one of them may be made of another, whose gradient would come through it a second time
    given = [x.view_as(x) if isinstance(x, Tensor) else x for x in given]
    made = plain(*given)
    pairs = zip(made if isinstance(made, tuple) else (made,), grads, strict=True)
    # of several some may hang on nothing that has a gradient
    outs, came = zip(*[(y, dy) for y, dy in pairs if dy is not None and y.requires_grad], strict=True)
    wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    found = iter(torch.autograd.grad(outs, wanted, came, create_graph=True, allow_unused=True))
    return tuple(next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in given)


def numberless(x: Tensor) -> bool:
    """Whether a tensor has a shape and no numbers: on the meta device, or a fake one."""
    if type(x) in _PLAIN:
        return x.is_meta
    from torch._subclasses.fake_tensor import is_fake  # which is there where somebody has made one

    return x.is_meta or is_fake(x)


def read(x: Tensor) -> list[Any]:
    """Every number of a tensor, on the host; of one that a vmap cuts in slices, those of all slices."""
    while _transformed() and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.flatten().tolist()


def again(function: Callable[..., Any], *given: Any) -> Any:
    """Computed once more in the backward pass instead of kept; where a transform of torch.func follows, which knows no
    hooks of what is saved, it is kept."""
    if _transformed():
        return function(*given)
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)


def forward_mode() -> bool:
    """Whether forward-mode derivatives follow, `torch.func.jvp` and the like."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def followed() -> bool:
    """Whether a transform of torch.func or forward mode follows, which derivatives by hand tell nothing."""
    return _transformed() or forward_mode()


__all__ = [
    "again", "by_autograd", "by_formula", "followed", "forward_mode", "iterates_by", "iterating_by", "numberless",
    "read",
]  # fmt: skip
