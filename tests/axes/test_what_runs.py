"""`axes.select` and `axes.explain` on every instance: what they say runs is what is called. tests/gpu has the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axes import catalogue
from tests import what_runs
from tests.optim.table import Instance


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("entry", catalogue.entries("sequence"), ids=lambda e: e.name)
def test_a_layer_runs_what_is_said(entry: catalogue.Entry, dtype: torch.dtype) -> None:
    what_runs.check_layer(entry, "cpu", dtype, 8)


@pytest.mark.parametrize("entry", catalogue.entries("depth"), ids=lambda e: e.name)
def test_a_mixer_runs_what_is_said(entry: catalogue.Entry) -> None:
    what_runs.check_mixer(entry, "cpu", torch.float32)


@pytest.mark.parametrize(("instance", "options"), what_runs.optimizers("cpu"))
def test_an_optimizer_runs_what_is_said(instance: Instance, options: dict[str, Any]) -> None:
    what_runs.check_optimizer(instance, options, "cpu", torch.float32)
