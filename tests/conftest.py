"""Settings shared by all tests: fixed seeds, one thread per process, deterministic random examples."""

import gc
import os

# Set before the first import of pyplot; nothing in the tests opens a window.
os.environ.setdefault("MPLBACKEND", "Agg")
# Graphs that torch has kept know nothing of what our operators returned when they were made.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

from tests.drawn import left_out

# Two workers with one thread each are faster on two cores than two with two, and sums keep their order.
torch.set_num_threads(1)

# `make test` takes quick; `make test-all` passes --hypothesis-profile=thorough.
settings.register_profile(
    "quick",
    max_examples=10,
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=200)
settings.load_profile("quick")


class TorchRandom:
    """torch's generator as Hypothesis wants it: the same seed before each example, the old state after."""

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


TORCH_RANDOM = TorchRandom()  # Hypothesis keeps a weak reference only
register_random(TORCH_RANDOM)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draw-seed", type=int, default=0, help="what draws among cases that are alike (tests/drawn.py)")


def pytest_report_header(config: pytest.Config) -> str:
    return f"cases that are alike are drawn by --draw-seed={config.option.draw_seed}; those left out are slow"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
    """What is not drawn is slow."""
    report = yield
    if isinstance(collector, pytest.Module | pytest.Class) and report.passed:
        items = [x for x in report.result if isinstance(x, pytest.Item)]
        for item in left_out(items, collector.config.option.draw_seed):
            item.add_marker(pytest.mark.slow)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Nothing of what is imported and collected is garbage: looking for it there takes a quarter of the time, and a
    second whenever a test, or what it runs, looks for its own."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests ran on a GPU, and on which."""
    if not torch.cuda.is_available():
        return
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.getreports(outcome)]
    ran = sum(r.nodeid.startswith("tests/gpu") and r.when == "call" for r in reports)
    terminalreporter.write_line(f"{ran} GPU tests ran on {torch.cuda.get_device_name()}, torch {torch.__version__}")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from one seed, and leaves torch's default dtype as it was."""
    torch.manual_seed(0)
    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert left is torch.float32, f"the test left {left} as torch's default dtype"
