"""What a rule reads of a model's linear layers: their inputs, and the gradients of their outputs.

Every nn.Linear, and every Conv1D of transformers, gets a forward hook, and each of its outputs a gradient hook, so that
inputs and gradients stay paired when a layer is called several times, checkpointed or differentiated twice. All leading
dimensions of an input are examples: a token of a sequence is one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from axes.errors import AxesError
from axes.linalg.accumulate import outer_sum
from axes.optim.engine.routing import is_listened
from axes.optim.sharding.dtensors import spread, whole

Reduction = Literal["mean", "sum"]


def require_reduction(who: str, reduction: str) -> None:
    """AxesError unless it is one."""
    if reduction not in ("mean", "sum"):
        raise AxesError(f"{who}: reduction {reduction!r} is not mean or sum")


def no_hooks(who: str) -> AxesError:
    """What an optimizer says that watches no layers and should."""
    return AxesError(f"{who}: a copy has no hooks on the model, or hooks were removed: construct it from the model")


class _Hook:
    """A forward hook that calls a method and does not keep its owner alive; copied with its module it is silent."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(module, args, output)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def watch(modules: Iterable[nn.Module], method: Callable[..., None]) -> Callable[[], object]:
    """Call a method after every forward pass of these modules, as long as its owner is there; returns what ends it."""
    hook = _Hook(method)
    handles = [module.register_forward_hook(hook) for module in modules]

    def off() -> None:
        for handle in handles:
            handle.remove()

    ended = weakref.finalize(method.__self__, off)  # type: ignore[attr-defined]
    ended.atexit = False
    return ended


@final
class Examples:
    """Inputs x (N, d_in), linear responses W x and output gradients (N, d_out) of one layer, in order."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, x: Tensor, response: Tensor, gradient: Tensor, observing: bool) -> None:
        self.rows.append((x, response, gradient))

    def columns(self) -> tuple[Tensor, ...]:
        """Inputs, responses and gradients of all examples."""
        return tuple(torch.cat(column) for column in zip(*self.rows, strict=True))

    def counts(self) -> dict[bool, int]:
        """The number of examples."""
        return {False: sum(len(x) for x, _, _ in self.rows)}

    def signal(self, sign: float, reduction: Reduction) -> dict[str, Tensor]:
        """k = x and v = W x - gradient, the target for which the squared error has this gradient."""
        x, response, gradient = self.columns()
        return {"k": x, "v": response - sign * gradient}


class Products:
    """Means of x x^T and of the outer products of per-example output gradients of one layer.

    Passes that only observe (`Layers.observing`) replace the training passes' gradients: with labels drawn from the
    model they give the Fisher matrix instead of its empirical form. Several of them are averaged.
    """

    def __init__(self) -> None:
        self.sums: dict[bool, tuple[Tensor, Tensor, int]] = {}

    def add(self, x: Tensor, response: Tensor, gradient: Tensor, observing: bool) -> None:
        kk, ee, n = outer_sum(x), outer_sum(gradient), len(x)
        if observing:  # every pass is a mean over its own examples
            ee = ee * n**2
        if observing in self.sums:
            past = self.sums[observing]
            kk, ee, n = past[0] + kk, past[1] + ee, past[2] + n
        self.sums[observing] = (kk, ee, n)

    def counts(self) -> dict[bool, int]:
        """The number of examples of training passes (False) and of passes that only observe (True)."""
        return {observing: n for observing, (_, _, n) in self.sums.items()}

    def signal(self, sign: float, reduction: Reduction) -> dict[str, Tensor]:
        """kk = mean x x^T, ee = mean delta delta^T, delta the gradient of one example's own loss."""
        observing = True in self.sums
        kk, ee, n = self.sums[observing]
        if observing and reduction == "sum":
            raise AxesError("passes that only observe are read as means over examples: use reduction='mean'")
        scale = n**2 if reduction == "mean" and not observing else 1
        return {"kk": kk / n, "ee": ee * (scale / n)}


@final
class Rows(Products):
    """`Products`, and the inputs and per-example output gradients themselves, one example a row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[bool, list[tuple[Tensor, Tensor]]] = {}

    def add(self, x: Tensor, response: Tensor, gradient: Tensor, observing: bool) -> None:
        super().add(x, response, gradient, observing)
        self.rows.setdefault(observing, []).append((x, gradient * len(x) if observing else gradient))

    def signal(self, sign: float, reduction: Reduction) -> dict[str, Tensor]:
        """And k_rows, e_rows: inputs and the gradients of each example's own loss."""
        means = super().signal(sign, reduction)
        observing = True in self.sums
        x, gradient = (torch.cat(column).to(means["kk"].dtype) for column in zip(*self.rows[observing], strict=True))
        scale = len(x) if reduction == "mean" and not observing else 1
        return {**means, "k_rows": x, "e_rows": gradient * scale}


@final
class Layers:
    """The hooks on a model's linear layers; they record for the weights that are in `weights`."""

    def __init__(self, model: nn.Module, weights: Collection[Tensor], record: type[Examples] | type[Products]) -> None:
        self.found: dict[Tensor, Examples | Products] = {}
        self._record = record
        self._observing = False
        self.weights = set(weights)
        self._registered: dict[nn.Module, Tensor] = {}  # while a sharded layer runs, its weight is another tensor
        listened = [module for module in model.modules() if is_listened(module)]
        for module in listened:
            weight = _weight(module)
            if spread(weight):
                self._registered[module] = weight
        self.remove = watch(listened, self._forward)

    def clear(self) -> None:
        self.found.clear()

    @contextmanager
    def observing(self) -> Iterator[None]:
        self._observing = True
        try:
            yield
        finally:
            self._observing = False

    def _forward(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        weight = self._registered.get(module, _weight(module))
        if not output.requires_grad or weight not in self.weights:
            return
        if spread(args[0]) or spread(output):
            raise AxesError("inputs of layers in tensor parallel are shards: rules that read them need whole inputs")
        bias, x = None if module.bias is None else whole(module.bias), args[0].detach()
        response = (output if bias is None else output - bias).detach()

        def arrived(gradient: Tensor) -> None:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            rows = [t.detach().reshape(-1, t.shape[-1]) for t in (x, response, gradient)]
            if self._record is Examples or dtype == torch.float64:  # sums of products widen 16-bit rows themselves
                rows = [t.to(dtype) for t in rows]
            self.found.setdefault(weight, self._record()).add(rows[0], rows[1], rows[2], self._observing)

        output.register_hook(arrived)


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return module.weight
