"""Two GPUs step as one, through NCCL: fully_shard and DTensors by hand, checkpoints between two and one.

This file, executed, is one of the two processes; each compares with the optimizer on ordinary parameters of its GPU.
Every part is a pair of processes of its own, and says how long each of its cases took: `pytest -s -k muon`.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytestmark = pytest.mark.gpu
if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

from axes import optim  # noqa: E402
from axes.errors import NotFiniteError  # noqa: E402
from tests.gpu.together import together  # noqa: E402

WORLD = 2
PARTS: dict[str, dict[str, Callable[[Path], None]]] = {}


def add(part: str, name: str, function: Callable[[Path], None]) -> None:
    PARTS.setdefault(part, {})[name] = function


def case(part: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def added(function: Callable[[Path], None]) -> Callable[[Path], None]:
        add(part, function.__name__, function)
        return function

    return added


@functools.cache  # every mesh brings communicators of its own, which take longer to connect than a case to run
def gpus(*shape: int) -> DeviceMesh:
    return init_device_mesh("cuda", shape, mesh_dim_names=tuple("ab"[: len(shape)]))


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank() if dist.is_initialized() else 0)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 192, bias=False), nn.GELU(), nn.Linear(192, 64), nn.LayerNorm(64)]
    model = nn.Sequential(*layers, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 33))  # 33 rows: uneven
    return model.to(device(), dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, shares: int = 1, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(32, 64, generator=generator).to(device(), dtype)
        optimizer.zero_grad()
        model(x.chunk(shares)[dist.get_rank() if shares > 1 else 0]).square().mean().backward()
        optimizer.step()


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(model: nn.Module, plain: nn.Module, rtol: float, atol: float) -> None:
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        a, b = whole(a.detach()), whole(b.detach())
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


# rule, and how far rounded gradients carry it: signs and bfloat16 polynomials amplify, so those are compared by hand
RULES: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda m: optim.SGD(m, lr=0.1, momentum=0.9),
    "adamw": lambda m: optim.AdamW(m, lr=1e-3),
    "adamw-fused": lambda m: optim.AdamW(m, lr=1e-3, fused=True),
    "muon": lambda m: optim.Muon(m, lr=1e-3, precision="input"),
    "shampoo": lambda m: optim.Shampoo(m, lr=1e-3, betas=(0.9, 0.95), eps=1e-4),
}


def _fsdp(make: Callable[[Any], optim.Optimizer]) -> None:
    model, plain = net(), net()
    fully_shard(model)
    optimizer, expected = make(model), make(plain)
    train(model, optimizer, 4, WORLD)
    train(plain, expected, 4)
    # Adam divides by the root of a gradient's square: an entry near zero moves by up to lr for any rounding
    difference = [(whole(a.detach()) - b.detach()).norm() / b.norm() for a, b in pairs(model, plain)]
    assert max(difference) < 2e-5, difference


def pairs(model: nn.Module, plain: nn.Module) -> list[tuple[Any, Any]]:
    return list(zip(model.parameters(), plain.parameters(), strict=True))


for rule, make in RULES.items():
    add("fsdp", rule, lambda folder, make=make: _fsdp(make))

SHAPES = [(96, 64), (96, 64), (64, 96), (33, 40), (1, 64), (48,)]
LAYOUTS: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((2,), (Shard(0),)),
    ((2,), (Shard(1),)),
    ((2,), (Replicate(),)),
    ((2, 1), (Replicate(), Shard(0))),
]


def routed(ps: list[Any], rule: str) -> list[dict[str, Any]]:
    groups = {rule: [p for p in ps if p.ndim > 1], "adamw": [p for p in ps if p.ndim < 2]}
    return [{"params": members, "rule": name} for name, members in groups.items() if members]


BY_HAND: dict[str, Callable[[list[Any]], optim.Optimizer]] = {
    "adamw": lambda ps: optim.AdamW(ps, lr=0.1),
    "adamw-fused": lambda ps: optim.AdamW(ps, lr=0.1, fused=True),
    "lion-fused": lambda ps: optim.Lion(ps, lr=0.1, fused=True),
    "muon": lambda ps: optim.Muon(routed(ps, "muon"), lr=0.1),
    "muon-tensor-lr": lambda ps: optim.Muon(routed(ps, "muon"), lr=torch.tensor(0.1, device=device())),
    "normuon": lambda ps: optim.NorMuon(routed(ps, "normuon"), lr=0.1),
    "soap": lambda ps: optim.SOAP(routed(ps, "soap"), lr=1e-3),
}


def _by_hand(make: Callable[[list[Any]], optim.Optimizer], dtype: torch.dtype) -> None:
    for mesh_shape, placements in LAYOUTS:
        mesh = gpus(*mesh_shape)
        torch.manual_seed(2)
        shapes = [s for s in SHAPES if all(p.is_replicate() or p.dim < len(s) for p in placements)]
        plain = [torch.randn(s, device=device(), dtype=dtype, requires_grad=True) for s in shapes]
        spread = [distribute_tensor(p.detach().clone(), mesh, placements).requires_grad_() for p in plain]
        optimizer, expected = make(spread), make(plain)
        for _ in range(3):
            for p, q in zip(plain, spread, strict=True):
                p.grad = torch.randn_like(p)
                q.grad = distribute_tensor(p.grad.clone(), mesh, placements)
            optimizer.step()
            expected.step()
        # what is batched differs between one process and the owners, and with it the order of sums in 16-bit products,
        # or the basis that a decomposition takes in a null space
        products = isinstance(optimizer, optim.Muon | optim.NorMuon | optim.SOAP)
        close = 2e-2 if dtype == torch.bfloat16 else 1e-2 if products else 1e-5
        for p, q in zip(plain, spread, strict=True):
            gap = (whole(q.detach()) - p.detach()).float().norm() / p.detach().float().norm()
            assert gap < close, (placements, tuple(p.shape), float(gap))


for rule, make_by_hand in BY_HAND.items():
    for dtype in (torch.float32, torch.bfloat16):
        add(rule, str(dtype), lambda folder, m=make_by_hand, d=dtype: _by_hand(m, d))


@case("large")
def few_matrices_on_each_gpu(folder: Path) -> None:
    """Products are chosen by all 16 matrices, not by the 8 of a process: kernels, and float16 in the Gram form."""
    mesh = gpus(2)
    torch.manual_seed(3)
    shapes = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)] * 4
    start = [torch.randn(s, device=device()) * 0.02 for s in shapes]
    plain = [x.clone().requires_grad_() for x in start]
    spread = [distribute_tensor(x.clone(), mesh, (Shard(0),)).requires_grad_() for x in start]
    optimizer, expected = (optim.Muon([{"params": ps, "rule": "muon"}], lr=0.1) for ps in (spread, plain))
    for _ in range(3):
        for p, q in zip(plain, spread, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = distribute_tensor(p.grad.clone(), mesh, (Shard(0),))
        optimizer.step()
        expected.step()
    for x, p, q in zip(start, plain, spread, strict=True):
        moved = p.detach() - x
        assert (whole(q.detach()) - x - moved).norm() < 1e-5 * moved.norm(), tuple(p.shape)


@case("messages")
def a_gradient_that_is_not_finite_on_one_gpu(folder: Path) -> None:
    mesh = gpus(2)
    p = distribute_tensor(torch.ones(4, 2, device=device()), mesh, (Shard(0),)).requires_grad_()
    bad = torch.ones(4, 2, device=device())
    bad[3, 1] = torch.inf
    p.grad = distribute_tensor(bad, mesh, (Shard(0),))
    with pytest.raises(NotFiniteError):
        optim.AdamW([p]).step()
    assert torch.equal(whole(p.detach()), torch.ones(4, 2, device=device()))


def _checkpoint(rule: str, folder: Path) -> None:
    model = net()
    fully_shard(model)
    optimizer = RULES[rule](model)
    train(model, optimizer, 2, WORLD)
    saved = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": saved}, checkpoint_id=folder / rule)
    again = net()
    fully_shard(again)
    again.load_state_dict(model.state_dict())
    resumed = RULES[rule](again)
    state = get_optimizer_state_dict(again, resumed)
    dcp.load({"optimizer": state}, checkpoint_id=folder / rule)
    set_optimizer_state_dict(again, resumed, state)
    train(model, optimizer, 2, WORLD, seed=5)
    train(again, resumed, 2, WORLD, seed=5)
    same(again, model, 0.0, 0.0)


for rule in ("adamw-fused", "muon", "shampoo"):
    add("checkpoints", rule, lambda folder, rule=rule: _checkpoint(rule, folder))


def _work(rank: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=rank, world_size=WORLD,
                            timeout=timedelta(seconds=60), device_id=torch.device("cuda", rank))  # fmt: skip
    part = (folder / "part").read_text()
    for name, run in PARTS[part].items():
        begun = time.perf_counter()
        torch.manual_seed(0)
        try:
            run(folder)
        except BaseException:
            (folder / f"failed-{name}-{rank}").write_text(f"{part} {name}, process {rank}:\n{traceback.format_exc()}")
            os._exit(1)  # the other process waits in some collective: it fails too
        print(f"{part} {name}, process {rank}: {time.perf_counter() - begun:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("part", PARTS)
def test_two_gpus_step_as_one(part: str, tmp_path: Path) -> None:
    (tmp_path / "part").write_text(part)
    codes = together(__file__, tmp_path, WORLD)
    failed = [path.read_text() for path in sorted(tmp_path.glob("failed-*"))]
    assert not failed and not any(codes), "\n".join(failed) or f"exit codes {codes}"


if __name__ == "__main__":
    _work(int(sys.argv[1]), Path(sys.argv[2]))
