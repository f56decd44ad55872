"""Kernels compiled before they are needed: a rehearsal asks for what a step then launches, and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from threading import Semaphore
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._pytree import tree_flatten
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import axes
from axes.kernels.common import ahead as module
from axes.kernels.common import repeated
from axes.kernels.common.ahead import Ahead, compile_ahead, really, rehearsal
from axes.kernels.common.launch import Kernel
from axes.kernels.rows.cross_entropy import _cross_entropy
from axes.tasks import rehearsal as tasks
from axes.tasks.batches import training_batch
from axes.tasks.configuration import Configuration
from axes.tasks.training import Training
from tests.alive import alive
from tests.hopper import NoDevice
from tests.host import example, no_launches

CPU = torch.device("cpu")


@pytest.fixture
def ahead() -> Iterator[Ahead]:
    with patch.object(module, "_compiled", lambda *_: 0.0):  # what is asked for, not what becomes of it
        yield Ahead(CPU, compilers=1)


def training(**changes: Any) -> Training:
    settings: dict[str, Any] = {
        "sequence": "gated-delta-net", "optimizer": "muon", "depth": "residual", "layers": 2, "width": 128, "heads": 2,
        "context": 64, "batch": 2, "vocabulary": 4096, "dtype": "bfloat16", "steps": 4, "device": "cpu",
        "text_limit": 40_000,
    }  # fmt: skip
    configuration = Configuration(**{**settings, **changes})
    return Training(configuration, configuration.corpus())


def known() -> set[Any]:
    """What kernels have been launched with, as `Kernel` tells launches apart."""
    return {(k, asked, key) for k in alive(Kernel) for asked, call in k._calls.items() for key in call.ready}


@pytest.mark.parametrize("changes", [{}, {"sequence": "gla", "depth": "mhc", "accumulate": 2}])
def test_a_rehearsal_asks_for_the_kernels_of_the_step_and_launches_none(changes: dict[str, Any], ahead: Ahead) -> None:
    made = training(**changes)
    with no_launches() as launches:
        said = tasks.compile_ahead(made, ahead)
        assert launches == [] and known() == set() and said.missed is None
        settings = made.configuration
        windows = training_batch(made.corpus.train, 0, 0, settings.batch // settings.accumulate, settings.context)
        made.loss(windows).backward()
        assert len(ahead.asked) > 8 and known() == set(ahead.asked)
    assert str(said).startswith(f"compiling {len(ahead.asked)} kernels, up to 1 side by side")
    assert said.wait().startswith("compiled after")


def test_a_rehearsal_leaves_the_run_as_it_was(ahead: Ahead) -> None:
    made = training()
    before = tree_flatten(deepcopy(made.state_dict()))[0]
    with no_launches():
        tasks.compile_ahead(made, ahead)
    after = tree_flatten(made.state_dict())[0]
    assert all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(before, after, strict=True))
    assert all(p.grad is None for p in made.model.parameters())


@pytest.mark.parametrize("name", ["GatedDeltaNet", "LinearAttention", "GLA"])
def test_a_layer_is_compiled_before_its_first_call(name: str) -> None:
    layer, x = example(name, 8)
    with no_launches() as launches, patch.object(module, "_compiled", lambda *_: 0.0):
        made = compile_ahead(layer, x, compilers=1)
        assert launches == [] and known() == set() and made >= 3 and x.grad is None
        y, _ = layer(x)
        y.backward(torch.ones_like(y))
        assert len(known()) == made


@pytest.mark.parametrize("name", ["GatedDeltaNet", "PaTH", "Mamba2", "FoX"])
def test_a_first_call_has_its_kernels_compiled_side_by_side(name: str) -> None:
    layer, x = example(name, 8)
    compiled: list[str] = []
    compile_one = patch.object(module, "_compiled", lambda kernel, *_: compiled.append(kernel.fn.__name__) or 0.0)
    many, there = patch.object(module, "_processors", lambda: 2), patch.object(repeated, "_compiles", lambda _: True)
    rehearsals: list[Ahead] = []
    told = patch.object(repeated, "Ahead", lambda device: rehearsals.append(Ahead(device)) or rehearsals[-1])
    with no_launches() as launches, compile_one, many, there, told:
        y, _ = layer(x)
        forward = len(compiled)
        y.backward(torch.ones_like(y))
        layer(x)[0].backward(torch.ones_like(y))
        assert 3 <= forward == len(compiled)
        assert known() == set(rehearsals[0].asked)  # those of the backward among them, and no other
        assert set(compiled) == set(launches)
        twin = deepcopy(layer)
        twin(x)[0].backward(torch.ones_like(y))  # whose kernels are there
        assert len(compiled) == forward
        with torch.no_grad(), patch.object(repeated, "_rehearse") as rehearse:
            twin(x[:, :3].expand(2, -1, -1))
            assert not rehearse.called or not rehearse.call_args.args[5]  # without gradients, no backward
    layer, x = example(name, 8)
    with no_launches(), many, there, patch.object(Ahead, "ask", side_effect=RuntimeError("no memory")):
        y, _ = layer(x)  # one after the other
        y.backward(torch.ones_like(y))


def test_what_is_no_module_or_no_tensor_is_refused() -> None:
    for module_, inputs, name in (("layer", (torch.ones(1),), "module"), (torch.nn.Linear(1, 1), (), "inputs")):
        with pytest.raises(TypeError, match=f"compile_ahead: {name} must be"):
            axes.compile_ahead(module_, *inputs)
    assert axes.compile_ahead(torch.nn.Linear(2, 2), torch.ones(3, 2)) == 0  # nothing of it is ours


def test_a_step_that_cannot_be_rehearsed_says_why(ahead: Ahead) -> None:
    made = training()
    with no_launches(), patch.object(Training, "loss_of", side_effect=RuntimeError("no such\nthing")):
        said = tasks.compile_ahead(made, ahead)
    assert str(said).endswith("others when they are first needed (no such)")


def test_only_the_threads_of_the_block_rehearse(ahead: Ahead) -> None:
    with ahead, ThreadPoolExecutor(1) as pool:
        assert rehearsal() is ahead and pool.submit(rehearsal).result() is None
        with really():
            assert rehearsal() is None
        assert torch.empty(1000).abs().sum() == 0 and torch.empty_strided((50, 2), (2, 1)).abs().sum() == 0
    assert rehearsal() is None


@contextmanager
def compiled() -> Iterator[list[str]]:
    """Hashes of what Triton compiles for sm_90 within the block, where nothing is launched."""
    hashes: list[str] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        kernel = run(self, *args, grid=None, warmup=True, **given)
        hashes.append(kernel.hash)
        return kernel

    previous = driver._active
    driver.set_active(NoDevice())  # type: ignore[arg-type]
    try:
        with patch.object(JITFunction, "run", compile_only):
            yield hashes
    finally:
        driver._active = previous
        _cross_entropy._calls.clear()


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_compiled_is_what_a_launch_compiles(first: int) -> None:
    logits, targets = torch.zeros(33)[first : first + 32].view(2, 16), torch.zeros(2, dtype=torch.int64)
    given = {"GRAD": True, "BLOCK": 16, "num_warps": 4}
    with compiled() as hashes:
        with Ahead(CPU, compilers=2) as ahead:
            for _ in range(2):
                _cross_entropy[(2,)](logits, targets, torch.empty(2), -100, 16, **given)
        ahead.wait()
        asked = hashes.copy()
        _cross_entropy.by_triton((2,), logits, targets, torch.empty(2), -100, 16, **given)
        assert asked == hashes[1:] and len(asked) == 1
        other = torch.zeros(33)[1 - first : 33 - first].view(2, 16)
        _cross_entropy.by_triton((2,), other, targets, torch.empty(2), -100, 16, **given)
        assert hashes[2] != asked[0]  # where a tensor begins counts


@pytest.mark.parametrize("known_before", [False, True])
def test_kernels_are_read_one_at_a_time(known_before: bool, tmp_path: Path) -> None:
    reading, order = Semaphore(1), list[int]()
    make_ir = ASTSource.make_ir

    def read(self: ASTSource, *given: Any) -> Any:
        alone = reading.acquire(blocking=False)
        time.sleep(0.5)  # others would come in
        order.append(self.constants[(6,)] if alone else 0)
        reading.release()
        return make_ir(self, *given)

    def ask() -> None:
        targets, logits = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 16)
        with Ahead(CPU, compilers=3) as ahead:
            for block in (16, 32, 64):
                _cross_entropy[(2,)](logits, targets, torch.empty(2), -100, 16, GRAD=True, BLOCK=block, num_warps=4)
            assert ahead.kernels == 3
        ahead.wait()

    with compiled() as hashes, knobs.cache.scope(), patch.object(ASTSource, "make_ir", read):
        knobs.cache.dir = str(tmp_path)
        _cross_entropy.kernel.device_caches.clear()
        ask()
        assert sorted(order) == [16, 32, 64] and len(hashes) == 3
        if known_before:  # on disk: nobody reads, and nobody waits for who does not
            order.clear()
            _cross_entropy.kernel.device_caches.clear()
            ask()
            assert order == [] and len(hashes) == 6
