"""Gradients of a step, and what is asked of every one of them.

The look at them, and the loop that steps, ask the same of a thousand tensors; a thousand answers take as long as the
arithmetic, so that each is found once a step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import cached_property
from typing import final

import torch
from torch import Tensor

_DTYPE, _LAYOUT, _ON_CPU = map(operator.attrgetter, ("dtype", "layout", "is_cpu"))


@final
class Gradients(list[Tensor]):
    """Of one step: nobody changes the list, or where its tensors are, while it is used."""

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> Gradients:
        """These tensors, with what is known of them."""
        return tensors if isinstance(tensors, Gradients) else Gradients(tensors)

    @cached_property
    def sizes(self) -> list[int]:
        return list(map(Tensor.numel, self))

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        return set(map(_DTYPE, self))

    @cached_property
    def on_cpu(self) -> bool:
        return all(map(_ON_CPU, self))

    @cached_property
    def readable(self) -> bool:
        """Whether what they hold is in their memory, in one run of it each; not so of what is no tensor."""
        return set(map(type, self)) == {Tensor} and self.strided and all(map(Tensor.is_contiguous, self))

    @cached_property
    def strided(self) -> bool:
        """Whether none of them is sparse."""
        return set(map(_LAYOUT, self)) <= {torch.strided}

    @cached_property
    def places(self) -> list[int]:
        return list(map(Tensor.data_ptr, self))


__all__ = ["Gradients"]
