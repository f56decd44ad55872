"""What `axes.explain` says of an object beside what its steps call: the calls themselves are recorded."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import axes
from axes import catalogue
from axes.answers import plans
from axes.core.state_update import StateUpdate
from axes.depth import products
from axes.depth.residual import _OneStream
from axes.optim.engine.batch import Batch
from axes.optim.engine.capabilities import holds
from axes.optim.engine.entries import Entries
from axes.programs.batched import Schedule
from axes.programs.library import LibraryStep
from axes.programs.program import Unrecorded, _Recorded
from axes.routes import (
    attention,
    cascade,
    gram,
    levels,
    levels_kernel,
    matrix_cells,
    passes,
    recurrent,
    scan,
    solves,
    substitution,
)
from axes.routes.attention import softmax, transported
from axes.routes.choice import Choice
from tests.optim.table import INSTANCES, Instance

TRITON = importlib.util.find_spec("triton") is not None
# (module or class, function, route, implementation): None says nothing of it
WATCHED: list[tuple[Any, str, str | None, str | None]] = [
    (scan, "chunked", "chain", "torch"),
    (cascade, "run", "cascade", "torch"),
    (substitution, "run", "substitution", "torch"),
    (solves, "run", "solve", "torch"),
    (attention, "run", "attention", None),
    (passes, "run", "passes", None),  # who computes a chain says so itself
    (levels, "run", "levels", "torch"),
    (levels_kernel, "run", "levels", "triton"),
    (softmax, "_one", None, "torch"),
    (softmax, "_fused", None, "torch"),
    (transported, "attend", None, "torch"),
    (recurrent._Walk, "apply", "recurrent", "torch"),
    (matrix_cells.Walk, "apply", "recurrent", "torch"),
    (gram, "sim", "gram", "torch"),
    (gram, "dec", "gram", "torch"),
    (Entries, "step", "entrywise", None),
    (Batch, "_programs", "stacks", None),
    (Schedule, "over", None, "torch"),
    (products, "write", "chain", "torch"),
    (_OneStream, "_made", "chain", "torch"),
]
KERNELS = (
    ("axes.kernels.scalar.chain", "scalar_chain", "chain"),
    ("axes.kernels.diagonal.chain", "diagonal_chain", "chain"),
    ("axes.kernels.diagonal.rows", "rows_chain", "chain"),
    ("axes.kernels.block.chain", "block_chain", "chain"),
    ("axes.kernels.entries.chain", "entries_chain", "chain"),
    ("axes.kernels.recurrent.chain", "recurrent_chain", "recurrent"),
    ("axes.kernels.recurrent.matrix", "matrix_chain", "recurrent"),
    ("axes.kernels.step", "chain_step", "chain"),
    ("axes.kernels.step", "block_step", "chain"),
    ("axes.kernels.substitution.chain", "substitution_chain", "substitution"),
    ("axes.kernels.network.chain", "network_chain", "cascade"),
    ("axes.kernels.entries.modes", "modes_chain", "chain"),
    ("axes.programs.tile_kernels", "tokens", "token"),
    ("axes.kernels.attention.attend", "attend", None),
    ("axes.kernels.attention.decode", "attend_one", None),
    ("axes.kernels.attention.decode_carried", "carry_one", None),
    ("axes.kernels.attention.transport", "transport", None),
    ("axes.kernels.attention.turn", "turn", None),
    ("axes.kernels.streams.mix", "mix_read", "chain"),
    ("axes.kernels.streams.mix", "mix_write", "chain"),
)


@dataclass
class Calls:
    """Routes that were entered, and implementations that worked inside them. library: what torch's own steps said."""

    routes: set[str] = field(default_factory=set)
    implementations: set[str] = field(default_factory=set)
    library: list[bool] = field(default_factory=list)

    def are(self, choice: Choice) -> bool:
        who = self.implementations
        ends = choice.route == "stacks" and "by torch's operations over the stacks" in choice.reason
        ends = ends or "up to its next anchor torch" in choice.reason
        if (ends or choice.route == "attention") and "triton" in who:  # torch may read what a kernel has turned
            who = who - {"torch"}
        return self.routes == {choice.route} and who == {choice.implementation}


@contextmanager
def recorded(update: StateUpdate) -> Iterator[Calls]:
    """The calls of a block. The interpreter's are those of `update.step` that no route makes for itself."""
    calls, inside = Calls(), 0

    def watch(function: Callable[..., Any], route: str | None, implementation: str | None) -> Callable[..., Any]:
        def watched(*args: Any, **given: Any) -> Any:
            nonlocal inside
            if route == "interpreter" and (inside or args[0] != update or _traced(args[2])):
                return function(*args, **given)
            calls.routes |= {route} - {None} if not inside else set()  # type: ignore[arg-type]
            calls.implementations |= {implementation} - {None}  # type: ignore[arg-type]
            inside += route is not None
            try:
                return function(*args, **given)
            finally:
                inside -= route is not None

        return watched

    watched = [*WATCHED, (StateUpdate, "step", "interpreter", "reference")]
    if TRITON:
        watched += [(importlib.import_module(module), name, route, "triton") for module, name, route in KERNELS]
        watched.append((importlib.import_module("axes.programs.fused").Fused, "step", None, "triton"))
    own = LibraryStep.run

    def library(*args: Any) -> bool:
        calls.library.append(own(*args))
        return calls.library[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LibraryStep, "run", library)
        for owner, name, route, implementation in watched:
            patched.setattr(owner, name, watch(getattr(owner, name), route, implementation))
        yield calls


def _traced(signal: Any) -> bool:
    """Whether a step is of no data: a program is made of it, for another shape or of other numbers than those known."""
    g, around = signal.get("g"), _get_current_dispatch_mode_stack()
    return isinstance(g, torch.Tensor) and g.is_meta or any(isinstance(m, _Recorded | Unrecorded) for m in around)


# ---- one check for each axis -----------------------------------------------------------------------------------------


def check_layer(entry: catalogue.Entry, device: str, dtype: torch.dtype, width: int) -> None:
    """A sequence and one token after a state, from a state: the first data of some routes are special."""
    layer = entry.cls(2 * width, heads=2, device=device, dtype=dtype)
    whole, *later, token = plans(layer)
    assert [plan.name for plan in later] in ([], ["after pairs"])
    batch = 1 if device == "cpu" else 2  # one sequence calls what two call, in half of the interpreter's time
    x = torch.randn(batch, 9, 2 * width, device=device, dtype=dtype)
    with torch.no_grad():
        with recorded(layer.update) as calls:
            _, state = layer(x)
        if later:
            assert calls.are(whole.choice), (whole.choice, calls)
        with recorded(layer.update) as calls:
            layer(x, state)
        assert calls.are((later or [whole])[0].choice), (whole.choice, later, calls)
        with recorded(layer.update) as calls:
            layer.step(x[:, 0], state)
        assert calls.are(token.choice), (token.choice, calls)
    if dtype == torch.float32 and device == "cpu":
        assert axes.select(entry.name)[:2] == axes.select(entry.cls)[:2] == whole.choice[:2]


def check_mixer(entry: catalogue.Entry, device: str, dtype: torch.dtype) -> None:
    """Reading and writing streams."""
    mixer = entry.cls(8, device=device, dtype=dtype)
    (plan,) = plans(mixer, device, dtype)  # a mixer without parameters is nowhere
    h = torch.randn(2, 3, 8, device=device, dtype=dtype)
    with torch.no_grad(), recorded(mixer.update) as calls:
        streams = mixer.expand(h)
        seen, coefficients = mixer.read(streams)
        mixer.write(streams, seen, coefficients)
    assert calls.are(plan.choice), (plan.choice, calls)
    assert axes.select(entry.name, device, dtype)[:2] == axes.select(entry.cls, device, dtype)[:2] == plan.choice[:2]


class Net(torch.nn.Module):
    """Two matrices of one shape and one of another, whose rows begin where a kernel may read, and their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(16, n) for n in (16, 16, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers(x)).square().mean()


def check_optimizer(instance: Instance, options: dict[str, Any], device: str, dtype: torch.dtype) -> None:
    """Two steps of every group, one group after another."""
    torch.manual_seed(0)
    model = Net().to(device, dtype)
    optimizer = instance.cls(model, **options)
    said = {plan.name: plan for plan in plans(optimizer)}
    assert len(said) == len(optimizer.param_groups) == (2 if instance.matrices else 1)
    for i, plan in enumerate(said.values()):
        for step in range(2):
            optimizer.zero_grad()
            model(torch.randn(5, 16, device=device, dtype=dtype)).backward()
            for j, group in enumerate(optimizer.param_groups):
                for p in group["params"]:
                    p.grad = p.grad if i == j else None
            with recorded(plan.update) as calls:
                optimizer.step()
            if step == 0 and "the first step of a parameter is interpreted" in plan.choice.reason:
                assert calls.are(Choice("interpreter", "reference", "")), calls
            else:
                assert calls.are(plan.choice), (plan.name, plan.choice, calls)
                assert any(calls.library) == ("torch's own" in plan.choice.reason), (plan.choice, calls)


def ways(instance: Instance, device: str) -> Iterator[dict[str, Any]]:
    """Of stepping a rule: by default, interpreted, so that it can be captured, and fused."""
    yield {}
    yield {"foreach": False}
    cls = instance.cls
    if not holds(cls.update):  # what is refreshed in some steps is no graph
        yield {"capturable": True}
    if device == "cuda" and axes.select(cls).route == "entrywise":
        yield {"fused": True}


def optimizers(device: str) -> list[list[Any]]:
    """Every rule of the catalogue in every configuration of the optimizers' table: each in every way."""
    known = {e.cls for e in catalogue.entries("data")}
    assert known == {i.cls for i in INSTANCES}
    return [
        [pytest.param(i, {**options, **way}, id=f"{i}-{n}-{''.join(way)}") for way in ways(i, device)]
        for i in INSTANCES
        for n, options in enumerate(i.configurations)
    ]
