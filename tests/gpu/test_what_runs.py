"""On a GPU as on a CPU: what is said to run is what is called, and a GPU that is named answers like the one here."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

import axes
from axes import catalogue
from axes.routes.choice import Target
from tests import what_runs
from tests.optim.table import Instance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("width", (64, 24))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("entry", catalogue.entries("sequence"), ids=lambda e: e.name)
def test_a_layer_runs_what_is_said(entry: catalogue.Entry, dtype: torch.dtype, width: int) -> None:
    what_runs.check_layer(entry, "cuda", dtype, width)


@pytest.mark.parametrize("entry", catalogue.entries("depth"), ids=lambda e: e.name)
def test_a_mixer_runs_what_is_said(entry: catalogue.Entry) -> None:
    what_runs.check_mixer(entry, "cuda", torch.float32)


OPTIMIZERS = what_runs.optimizers("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("instance", "options"), list(chain.from_iterable(OPTIMIZERS)))
def test_an_optimizer_runs_what_is_said(instance: Instance, options: dict[str, Any]) -> None:
    what_runs.check_optimizer(instance, options, "cuda", torch.float32)


@pytest.mark.parametrize("entry", catalogue.entries(), ids=lambda e: e.name)
def test_a_gpu_by_name_answers_like_the_one_that_is_here(entry: catalogue.Entry) -> None:
    here = Target.of("cuda")
    assert here.known == "here" and here.capability is not None
    named = "cuda:sm_{}{}".format(*here.capability)
    for dtype in (torch.float32, torch.bfloat16):
        assert axes.select(entry, named, dtype) == axes.select(entry, "cuda", dtype)
