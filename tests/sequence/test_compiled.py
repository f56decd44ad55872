"""Every layer on the meta device, exported and compiled with a length that is open: one graph for all lengths."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from axes.core.memory import List
from axes.errors import AxesError
from axes.routes import opaque
from axes.routes.select import settle
from axes.sequence import (
    ALL,
    PREDICTED,
    FoX,
    GatedDeltaNet,
    LatticeSim,
    LinearAttention,
    LonghornDiagonal,
    Mamba1,
    PaTH,
    SlidingWindow,
    SoftmaxAttention,
    Titans,
)
from axes.sequence.base import SequenceLayer
from tests.drawn import one_of_each

D = 8
# One of each route and kind of memory, from which `make test` draws; `make test-all` runs all layers. Attention without
# keys that are carried on is followed once below, where a length is known first.
QUICK = (GatedDeltaNet, Titans, LatticeSim, PaTH)
every_layer = pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.name)


def _marks(cls: type[SequenceLayer]) -> Any:
    return () if cls in QUICK else pytest.mark.slow


def make(cls: type[SequenceLayer]) -> SequenceLayer:
    torch.manual_seed(0)
    return cls(D, heads=2)


def tokens(length: int) -> Tensor:
    return torch.randn(2, length, D, generator=torch.Generator().manual_seed(length)).requires_grad_()


def both(call: Any, layer: SequenceLayer, length: int) -> list[Tensor]:
    """Output and gradients; where there is none, zero."""
    x = tokens(length).detach().to(next(layer.parameters()).dtype).requires_grad_()
    y, _ = call(x)
    leaves = [x, *layer.parameters()]
    grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    return [y, *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True))]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, b.abs().max().item()))


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@every_layer
def test_on_the_meta_device(cls: type[SequenceLayer]) -> None:
    layer = cls(D, heads=2, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    assert layer(torch.empty(2, 5, D, device="meta"))[0].shape == (2, 5, D)
    layer.to_empty(device="cpu").reset_parameters()
    assert layer(tokens(5))[0].isfinite().all()


FAKED = ("frank-wolfe-delta", "lattice-sim", "log-linear-mamba2", "rls-net", "ttt-linear", "ttt-mlp")


@pytest.mark.parametrize("cls", [c for c in (*ALL, *PREDICTED) if c.name in FAKED], ids=lambda cls: cls.name)
def test_on_fake_tensors(cls: type[SequenceLayer]) -> None:
    """Outside of compilers, which have operators of what looks at a count: of one without numbers as of a first one."""
    layer = make(cls)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(tokens(6))
        y, state = layer(x)
        y.sum().backward()
        y, state = layer(x, state)
        assert y.shape == x.shape and layer.step(x[:, 0], state)[0].shape == x[:, 0].shape


@every_layer
def test_what_runs_need_of_a_tuple_is_known_before(cls: type[SequenceLayer]) -> None:
    """A graph is guarded by what its trace found on the tuple: what came with it would compile it again."""
    layer = make(cls)
    layer.update = copy.deepcopy(layer.update)  # which knows nothing yet
    settle(layer.update, (layer.sizes.d_v, layer.sizes.d_k))
    before = set(vars(layer.update))
    layer(tokens(6))
    assert set(vars(layer.update)) == before


def alike() -> Iterator[list[type[SequenceLayer]]]:
    """Layers of one kind of block around one kind of memory, a dozen at a time: what has its own code is drawn from."""
    kinds: dict[Any, list[type[SequenceLayer]]] = {}
    for cls in ALL:
        kinds.setdefault((type(cls.block), cls.update.parts().memory.kind), []).append(cls)
    for kind in kinds.values():
        yield from (kind[i : i + 12] for i in range(0, len(kind), 12))


@pytest.mark.parametrize("cls", one_of_each(alike()), ids=lambda cls: cls.name)
def test_exported_with_any_length(cls: type[SequenceLayer]) -> None:
    layer = make(cls)
    exported = torch.export.export(layer, (tokens(6),), dynamic_shapes=({1: torch.export.Dim("T", min=2, max=4096)},))
    with torch.no_grad():
        for length in (5, 70):
            close([exported.module()(tokens(length))[0]], [layer(tokens(length))[0]])


def test_a_list_that_drops_pairs_is_exported() -> None:
    layer = SlidingWindow(D, heads=2, update=replace(SlidingWindow.update, memory=List(window=9)))
    exported = torch.export.export(layer, (tokens(6),), dynamic_shapes=({1: torch.export.Dim("T", min=2, max=4096)},))
    with torch.no_grad():
        for length in (5, 70):
            close([exported.module()(tokens(length))[0]], [layer(tokens(length))[0]])


@pytest.mark.parametrize("cls", [pytest.param(cls, id=cls.name, marks=_marks(cls)) for cls in ALL])
def test_a_new_length_compiles_nothing(cls: type[SequenceLayer]) -> None:
    layer = make(cls)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (6, 11, 70):
        close(both(compiled, layer, length), both(layer, layer, length))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("cls", [LinearAttention, GatedDeltaNet, SoftmaxAttention, Titans], ids=lambda cls: cls.name)
def test_by_inductor(cls: type[SequenceLayer]) -> None:
    layer = make(cls).double()  # rounded to float32, gradients of Titans' 70 tokens are 5e-5 of themselves apart
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (6, 11, 70):
        close(both(compiled, layer, length), both(layer, layer, length))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # looked at only
def test_a_copy_and_a_state_are_compiled() -> None:
    """A copy's tuple knows nothing yet; tokens after a state, which receives gradients too."""
    layer = copy.deepcopy(make(GatedDeltaNet))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    found = []
    for call in (layer, compiled):
        first, second = tokens(7), tokens(9)
        y, end = call(second, call(first)[1])
        found.append([y, *torch.autograd.grad(y.sum() + end.memory.theta[0].square().sum(), (first, second))])
    close(*found)


@pytest.mark.parametrize("cls", [pytest.param(GatedDeltaNet, marks=pytest.mark.slow), FoX], ids=lambda cls: cls.name)
def test_known_lengths_and_half_precision(cls: type[SequenceLayer]) -> None:
    """A first length is known, the second opens it; results keep the dtype of the tokens."""
    layer = make(cls)
    # decomposed as for inductor: aot_eager alone gives derivatives of charts wrong strides (torch 2.13)
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    for length in (6, 11):
        close(both(compiled, layer, length), both(layer, layer, length))
    layer, x = layer.bfloat16(), tokens(9).detach().bfloat16()
    got, want = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)(x)[0], layer(x)[0]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("cls", [Mamba1, LonghornDiagonal], ids=lambda cls: cls.name)
def test_known_lengths_of_entry_scans(cls: type[SequenceLayer]) -> None:
    layer = make(cls)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=False)
    close(both(compiled, layer, 35), both(layer, layer, 35))


def test_the_operator() -> None:
    """What torch asks of one, gradients included."""
    layer = make(GatedDeltaNet)
    names = {"q": (2, 5, 2, 4), "k": (2, 5, 2, 4), "v": (2, 5, 2, 4), "decay": (2, 5, 2), "beta": (2, 5, 2)}
    signal = {n: (torch.rand(s) * 0.3 * (-1 if n == "decay" else 1)).requires_grad_() for n, s in names.items()}
    state = layer.init_state(2).memory
    call = " ".join(("chain", opaque._shape(state), *signal))
    given = ([*signal.values(), *opaque._leaves(state)], opaque.text(layer.update), call)
    torch.library.opcheck(opaque._sequences.operator, given)


def test_a_graph_without_its_layer_says_so() -> None:
    with pytest.raises(AxesError, match="no layer of StateUpdate"):
        opaque._sequences.operator([], "StateUpdate(nowhere)", "chain [tt] q")
