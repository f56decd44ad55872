"""`axes.select` and `axes.explain` on every instance: what they say runs is what is called; tests/gpu asks again."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch

from axes import catalogue
from axes.optim.engine import around, generated
from axes.routes import attention
from axes.routes import kernel_terms as terms
from axes.routes.select import routes
from tests import what_runs
from tests.drawn import crossed, one_of_each
from tests.interpreter import interpret
from tests.optim.table import INSTANCES, Instance


@pytest.mark.parametrize(
    ("entry", "dtype"),
    crossed((pytest.param(e, id=e.name) for e in catalogue.entries("sequence")), (torch.float32, torch.bfloat16)),
)
def test_a_layer_runs_what_is_said(entry: catalogue.Entry, dtype: torch.dtype) -> None:
    what_runs.check_layer(entry, "cpu", dtype, 8)


@pytest.mark.parametrize("entry", catalogue.entries("depth"), ids=lambda e: e.name)
def test_a_mixer_runs_what_is_said(entry: catalogue.Entry) -> None:
    what_runs.check_mixer(entry, "cpu", torch.float32)


@pytest.mark.parametrize(("instance", "options"), one_of_each(what_runs.optimizers("cpu")))
def test_an_optimizer_runs_what_is_said(instance: Instance, options: dict[str, Any]) -> None:
    what_runs.check_optimizer(instance, options, "cpu", torch.float32)


# ---- with kernels, in Triton's interpreter ---------------------------------------------------------------------------


def as_on_a_gpu() -> None:
    """What is true of a CPU is said to be true of a GPU, by those whom the steps ask."""
    for module in (terms, attention):
        module.no_kernel = partial(_as_if, module.no_kernel)
    generated.no_kernels = lambda device: None
    around._HOST_BOUND = -1  # no CUDA graphs


def _as_if(no_kernel: Any, update: Any, _: Any, *rest: Any) -> Any:
    return no_kernel(update, torch.device("cuda"), *rest)


def layers_with_kernels(part: int) -> None:
    as_on_a_gpu()
    for entry in catalogue.entries("sequence")[part::2]:
        if not isinstance(terms.family(entry.update), terms.NoFamily) or routes(entry.update)["attention"] is None:
            what_runs.check_layer(entry, "cpu", torch.float32, 16)


def optimizers_with_kernels(part: int) -> None:
    as_on_a_gpu()
    for instance in [i for i in INSTANCES if not i.transcendental][part::2]:  # whose functions are a device's
        for way in what_runs.ways(instance, "cuda"):
            what_runs.check_optimizer(instance, {**instance.configurations[0], **way}, "cpu", torch.float32)


CHECKS = [pytest.param(f, id=f.__name__) for f in (layers_with_kernels, optimizers_with_kernels)]


@pytest.mark.parametrize(("check", "part"), crossed(CHECKS, (0, 1)))
def test_kernels_run_where_they_are_said_to(check: Any, part: int) -> None:
    if sys.platform != "linux":
        pytest.importorskip("triton")
    interpret(f"from tests.axes import test_what_runs as t; t.{check.__name__}({part})")
