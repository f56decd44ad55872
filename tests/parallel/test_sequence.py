"""Sequences split over processes are computed as on one: outputs, every gradient, final states, in float64.

The cases run in gloo processes, started once: this file, executed, is such a process. Each also runs the whole
sequence by itself, and compares.
"""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from axes import catalogue, parallel
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, ShapeError
from axes.models import Architecture, LanguageModel
from axes.models.options import accepted_options
from axes.parallel import maps
from axes.sequence import SLSTM, GatedDeltaNet, SoftmaxAttention, TitansMatrix
from tests.processes import joined, run

# One of every way: a normaliser, key gates, entries, erasing before and after the gate, two writes a token, a read
# between states, rotations, two slots, rates by rows, a network, a list, slots, statistics, keys that heads share
SOME = (
    "linear-attention", "gla", "mamba", "gated-delta-net", "gated-delta-product", "rwkv6", "retnet", "titans-matrix",
    "longhorn", "ttt-mlp", "rope", "path-fox", "adam-net", "log-linear-mamba2",
)  # fmt: skip
FEW_HEADS = ("gqa", "mqa", "mla")  # of keys
CASES: dict[str, Callable[[DeviceMesh], None]] = {}


def case(function: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CASES[function.__name__] = function
    return function


def tensors(held: Any) -> list[Tensor]:
    return [held] if isinstance(held, Tensor) else [x for part in held for x in tensors(part)]


def same_layer(name: str, mesh: DeviceMesh, **options: Any) -> None:
    torch.manual_seed(0)
    world = mesh.size()
    cls = catalogue.get(name, axis="sequence").cls
    layer = cls(16, **accepted_options(cls, heads=4, **options))
    x, w = (torch.randn(2, 5 * world + 1, 16) for _ in range(2))  # the first segment is longer by one
    with torch.no_grad():
        _, start = layer(torch.randn(2, 5, 16))
    x.requires_grad_()
    y, end = layer(x, start)
    weights = [torch.randn_like(s) if s.is_floating_point() and s.isfinite().all() else None for s in tensors(end)]

    def loss(y: Tensor, w: Tensor, end: Any) -> Tensor:
        states = [(s * m).sum() for s, m in zip(tensors(end), weights, strict=True) if m is not None]
        return (y * w).sum() + sum(states)

    wanted = torch.autograd.grad(loss(y, w, end), [x, *layer.parameters()], allow_unused=True)
    parallel.sequence(layer, mesh, states=True)
    own = parallel.segment(x.detach(), mesh).requires_grad_()
    mine, after = layer(own, start)
    torch.testing.assert_close(mine, parallel.segment(y, mesh), msg=lambda m: f"{name}: {m}")
    torch.testing.assert_close(after, end, msg=lambda m: f"{name}: {m}")
    part = parallel.segment(w, mesh)
    said = loss(mine, part, after) if mesh.get_local_rank() == world - 2 else (mine * part).sum()  # one reads the state
    found = torch.autograd.grad(said, [own, *layer.parameters()], allow_unused=True)
    torch.testing.assert_close(found[0], parallel.segment(wanted[0], mesh), msg=lambda m: f"{name}: {m}")
    for (n, p), a, b in zip(layer.named_parameters(), found[1:], wanted[1:], strict=True):
        a, b = (torch.zeros_like(p) if g is None else g.clone() for g in (a, b))
        dist.all_reduce(a)
        torch.testing.assert_close(a, b, msg=lambda m, n=n: f"{name}, {n}: {m}")


@case
def some_layers(mesh: DeviceMesh) -> None:
    for name in SOME:
        same_layer(name, mesh)


@case
def every_layer(mesh: DeviceMesh) -> None:
    for entry in catalogue.entries("sequence"):
        if entry.cls.block.cell is not None:  # a token waits for the one before, and the layer says so
            continue
        try:
            same_layer(entry.name, mesh)
        except AxesError as error:  # fewer heads than processes
            assert entry.name in FEW_HEADS and "are no multiple of" in str(error), error


def model() -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(Architecture("gated-delta-net", "mhc", layers=2, width=16, heads=2, streams=2, vocabulary=11))


@case
def a_model_under_ddp_and_fsdp(mesh: DeviceMesh) -> None:
    """Means of equal segments, averaged: the gradient of the mean over all tokens."""
    windows = torch.randint(11, (3, 6 * mesh.size() + 1))
    one = model()
    expected = one.loss(windows)
    expected.backward()
    own = parallel.segment(windows, mesh, more=1)
    for sharded in (False, True):
        split = parallel.sequence(model(), mesh)
        if sharded:
            for layer in split.sublayers:
                fully_shard(layer, mesh=mesh)
            fully_shard(split, mesh=mesh)
            made: nn.Module = split
        else:
            made = DistributedDataParallel(split, process_group=mesh.get_group())
        logits, states = made(own[:, :-1])
        assert all(s is None for s in states)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        for (name, p), q in zip(split.named_parameters(), one.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(grad, q.grad, msg=lambda m, n=name: f"{n}: {m}")
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / mesh.size(), expected.detach())


@case
def layers_that_compute_again(mesh: DeviceMesh) -> None:
    layer = GatedDeltaNet(16, heads=2)
    x = torch.randn(2, 6 * mesh.size(), 16)
    grads = []
    for again in (False, True):
        for p in layer.parameters():
            p.grad = None
        made = parallel.sequence(copy.deepcopy(layer), mesh)
        made.checkpoint = again
        y, _ = made(parallel.segment(x, mesh))
        y.square().sum().backward()
        grads.append([p.grad for p in made.parameters()])
    torch.testing.assert_close(grads[0], grads[1])


@case
def calls_without_gradients_and_whole_again(mesh: DeviceMesh) -> None:
    layer = GatedDeltaNet(16, heads=2)
    x = torch.randn(2, 7 * mesh.size(), 16)
    with torch.no_grad():
        y = layer(x)[0]
        own, _ = parallel.sequence(layer, mesh)(parallel.segment(x, mesh))
        torch.testing.assert_close(own, parallel.segment(y, mesh))
        torch.testing.assert_close(parallel.whole(layer)(x)[0], y)


@case
def what_cannot_be_split(mesh: DeviceMesh) -> None:
    with pytest.raises(AxesError, match="cannot be split over .* 3 heads are no multiple"):
        parallel.sequence(SoftmaxAttention(12, heads=3), mesh)
    with pytest.raises(AxesError, match="sequence: SLSTM cannot be split .* share out sequences instead"):
        parallel.sequence(SLSTM(16, heads=2), mesh)
    with pytest.raises(AxesError, match="no layer of axes.sequence"):
        parallel.sequence(nn.Linear(2, 2), mesh)
    with pytest.raises(AxesError, match="1 is a MultiheadAttention, which mixes the tokens"):
        parallel.sequence(nn.Sequential(GatedDeltaNet(16), nn.MultiheadAttention(16, 2)), mesh)
    layer = parallel.sequence(GatedDeltaNet(16, heads=2), mesh)
    with pytest.raises(ShapeError, match="read 3 tokens of the process before"):
        layer(torch.randn(1, 2, 16))
    with pytest.raises(ShapeError, match="leave mask and cu_seqlens out"):
        layer(torch.randn(1, 8, 16), mask=torch.ones(1, 8, dtype=torch.bool))
    with pytest.raises(ShapeError, match="too few for"):
        parallel.segment(torch.randn(1, 1, 16), mesh)
    y, _ = layer(torch.randn(1, 8, 16, requires_grad=True))
    with pytest.raises(AxesError, match="differentiated once"):
        torch.autograd.grad(y.sum(), list(layer.parameters()), create_graph=True, allow_unused=True)


@case
def a_process_that_dies(mesh: DeviceMesh) -> None:
    layer = parallel.sequence(GatedDeltaNet(16, heads=2), mesh)
    if mesh.get_local_rank() == mesh.size() - 1:
        os._exit(0)
    with pytest.raises(AxesError, match="another process of the group is gone"):
        layer(torch.randn(1, 8, 16))[0].sum().backward()  # the first process is told when it first waits
    os._exit(0)  # the last case: nobody is left to wait for


# ---- the processes ---------------------------------------------------------------------------------------------------


def test_two_processes_compute_as_one(tmp_path: Path) -> None:
    run(__file__, tmp_path, 2, *(n for n in CASES if n != "every_layer"))


@pytest.mark.slow
def test_four_processes_compute_as_one(tmp_path: Path) -> None:
    run(__file__, tmp_path, 4, "every_layer", "a_model_under_ddp_and_fsdp")


# ---- without processes -----------------------------------------------------------------------------------------------


def test_no_processes_are_missed_in_words() -> None:
    with pytest.raises(AxesError, match="no processes: call torch.distributed.init_process_group"):
        parallel.sequence(GatedDeltaNet(16), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [GatedDeltaNet, TitansMatrix])
def test_a_map_is_what_tokens_make_of_any_state(cls: Any) -> None:
    """S_out = S_in A + b, and a segment's map is the product of those of its parts."""
    layer = cls(8, heads=2).double()
    update: StateUpdate = layer.update
    signal, _, _ = layer.around.enter(torch.randn(1, 9, 8).double(), layer.init_state(1).tails)
    start = layer.init_state(1).memory
    whole = maps.rows(start)
    begun = maps.with_rows(start, torch.randn(whole.shape, dtype=torch.float64))

    def part(first: int, last: int) -> tuple[Tensor, Tensor]:
        tokens = {n: x[:, first:last] if isinstance(x, Tensor) else x for n, x in signal.items()}
        like = maps.with_rows(start, torch.zeros_like(whole).double())
        return maps.matrix(update, layer._recur, tokens, like), maps.constant(layer._recur, tokens, like)

    (a, b), (first, c), (second, d) = part(0, 9), part(0, 4), part(4, 9)
    torch.testing.assert_close(a, first @ second)
    torch.testing.assert_close(b, c @ second + d)
    _, after = layer._recur(signal, begun)
    torch.testing.assert_close(maps.rows(after), maps.rows(begun) @ a + b)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    with joined() as (_, names):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for case_name in names:
            torch.manual_seed(0)
            CASES[case_name](mesh)
