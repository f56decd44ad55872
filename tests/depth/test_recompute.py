"""Streams that are made again in the backward: the same bits, less memory, every sublayer run once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from axes import catalogue
from axes.depth import MHC, DepthMixer, through, unwrap, wrap
from axes.errors import AxesError, ShapeError
from axes.models.language_model import Architecture, LanguageModel
from axes.tasks.configuration import Configuration

D, SUBLAYERS = 8, 5
NAMES = ("residual", "hyper-connections", "mhc", "deep-delta", "universal-transformer", "attention-residuals")


class _Made(TorchDispatchMode):
    """What operations made, by how much of it is still there. own: what was there before."""

    def __init__(self, own: list[Tensor]) -> None:
        super().__init__()
        self.own = {x.untyped_storage()._cdata for x in own}
        self.storages: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.own:
                self.storages.append((StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()))
        return made

    def bytes(self) -> int:
        return sum({ref.cdata: n for ref, n in self.storages if not ref.expired()}.values())


class _Network(nn.Module):
    def __init__(self, name: str, sublayers: int = SUBLAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        cls = catalogue.get(name, axis="depth").cls
        self.mixers = nn.ModuleList([cls(D, i) for i in range(sublayers)])
        self.sublayers = nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(sublayers)])
        with torch.no_grad():
            for p in self.mixers.parameters():
                p.add_(0.1 * torch.randn(p.shape))

    def forward(self, h: Tensor, recompute: int) -> Tensor:
        mixers: list[Any] = list(self.mixers)
        out: Tensor = mixers[-1].reduce(through(list(self.sublayers), mixers, mixers[0].expand(h), recompute))
        return out


def results(call: Callable[[], Tensor], wanted: list[Tensor]) -> list[Tensor | None]:
    out = call()
    return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> None:
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert (x is None) == (y is None) and (x is None or y is None or torch.equal(x, y)), i


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_same_bits(name: str) -> None:
    network, h = _Network(name), torch.randn(2, 3, D, requires_grad=True)
    wanted = [h, *network.parameters()]
    meant = results(lambda: network(h, 0), wanted)
    for recompute in (1, 2, SUBLAYERS, 100):
        same(results(lambda k=recompute: network(h, k), wanted), meant)  # type: ignore[misc]
    with torch.autocast("cpu", torch.bfloat16):
        same(results(lambda: network(h, 2), wanted), results(lambda: network(h, 0), wanted))


def test_only_streams_between_groups_are_kept() -> None:
    network, h = _Network("mhc", 8), torch.randn(2, 16, D, requires_grad=True)

    def kept(recompute: int) -> float:
        with _Made([h, *network.parameters()]) as made:
            out = network(h, recompute)
        found = made.bytes() / h[..., 0].numel()
        del out
        gc.collect()
        assert made.bytes() == 0, "a graph that nobody holds is not gone"
        return found

    streams, sublayer = 4 * 4 * D, 4 * D * 3  # bytes a token: X, and x, y and what tanh keeps
    every, in_twos, at_once = kept(0), kept(2), kept(8)
    assert every > 8 * (streams + sublayer)
    assert in_twos < 4 * streams + 8 * sublayer + 200
    assert at_once < streams + 8 * sublayer + 200


def test_a_graph_is_used_again_and_differentiated() -> None:
    network, h = _Network("mhc", 3), torch.randn(1, 2, D, requires_grad=True)
    out = network(h, 2)
    first = torch.autograd.grad(out.sum(), h, retain_graph=True)
    same(list(first), list(torch.autograd.grad(out.sum(), h)))
    twice = []
    for recompute in (0, 2):
        (dh,) = torch.autograd.grad(network(h, recompute).square().sum(), h, create_graph=True)
        twice.append(torch.autograd.grad(dh.square().sum(), [h, *network.mixers[0].parameters()]))
    same(list(twice[0]), list(twice[1]))


def test_sublayers_run_once_under_the_hooks_around() -> None:
    network, h = _Network("mhc", 2), torch.randn(1, 2, D, requires_grad=True)
    calls, kept = [], []
    for f in network.sublayers:
        f.register_forward_hook(lambda *given: calls.append(1))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x.detach(), lambda x: x):
        out = network(h, 2)
    out.sum().backward()
    assert len(calls) == 2
    assert kept.count((2, D)) == kept.count((1, 2, D)) == 2  # x of both linear maps and the result of both tanhs


def test_what_was_written_must_stay() -> None:
    network, h = _Network("mhc", 2), torch.randn(1, 2, D, requires_grad=True)
    made: list[Tensor] = []
    network.sublayers[0].register_forward_hook(lambda module, given, y: made.append(y))
    out = network(h, 2)
    made[0].detach().mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


def test_language_models_and_wrapped_blocks() -> None:
    windows = torch.randint(0, 16, (2, 6))
    found = []
    for recompute in (0, 3):
        torch.manual_seed(0)
        sizes = {"layers": 2, "width": 8, "heads": 2, "streams": 2, "vocabulary": 16}
        model = LanguageModel(Architecture("linear-attention", "mhc", recompute=recompute, **sizes))
        found.append(results(lambda m=model: m.loss(windows), list(model.parameters())))  # type: ignore[misc]
    same(*found)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
            self.maps = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.maps[0](self.norms[0](x))
            return x + self.maps[1](self.norms[1](x))

    torch.manual_seed(0)
    model, h, found = nn.Sequential(Block(), Block()), torch.randn(1, 2, D, requires_grad=True), []
    for again in (False, True):
        wrap(model, MHC, streams=2, recompute=again)
        found.append(results(lambda: model(h), [h, *model.parameters()]))
        unwrap(model)
    same(*found)


@pytest.mark.parametrize("wrong", (-1, True, 2.0, "all", None))
def test_what_is_no_number_of_sublayers(wrong: Any) -> None:
    mixers: list[DepthMixer] = [MHC(D)]
    with pytest.raises(ShapeError, match="recompute must be how many sublayers"):
        through([nn.Identity()], mixers, mixers[0].expand(torch.randn(1, 2, D)), wrong)
    with pytest.raises(ShapeError, match="Architecture: recompute"):
        Architecture(recompute=wrong)
    if wrong is not True:
        with pytest.raises(ShapeError, match="wrap: recompute must be True"):
            wrap(nn.Sequential(), MHC, recompute=wrong)


def test_what_else_is_refused() -> None:
    with pytest.raises(ShapeError, match="a mixer for every sublayer"):
        through([], [], torch.randn(1, 2, 4, D))
    with pytest.raises(AxesError, match="0 with compile"):
        Configuration(recompute=2, compile=True)
