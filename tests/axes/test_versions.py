"""Which Triton the kernels know, and the sentence that says why they do not run on a machine or a device."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from axes import StateUpdate
from axes.core.costs import SquaredError
from axes.kernels.common import versions
from axes.kernels.common.versions import TRITONS
from axes.linalg import accumulate, symmetric
from axes.routes import dispatch, kernel_terms

ROOT = Path(__file__).resolve().parents[2]
HERE = torch.device("cuda", 0)
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with this Triton, these programs, and a GPU, an H200 unless said."""

    def make(triton: str | None = "3.6.0", reason: str | None = None, hip: str | None = None, **gpu: object) -> None:
        stated = {"name": "NVIDIA H200", "major": 9, "minor": 0, "shared_memory_per_block_optin": 232448, **gpu}
        monkeypatch.setattr(versions, "_ASKED", {})
        monkeypatch.setattr(versions, "VERSION", triton)
        monkeypatch.setattr(versions, "UNUSABLE", versions.unusable(triton) or reason)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(versions, "gpu_is_here", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**stated))

    return make


# ---- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", (*TRITONS, "3.7.0", "3.8.4", "3.6.0+git1234"))
def test_a_known_version_and_its_patches_make_every_kernel(version: str) -> None:
    assert versions.unusable(version) is None and versions.unknown(version) is None


@pytest.mark.parametrize("version", ("3.10.0", "4.0.0", "3.10.0+git7"))
def test_a_newer_one_makes_the_portable_kernels_only(version: str) -> None:
    assert versions.unusable(version) is None
    reason = versions.unknown(version)
    assert reason is not None and version in reason and all(known in reason for known in TRITONS)


@pytest.mark.parametrize("version", ("3.5.1", "2.3.1"))
def test_an_older_one_makes_none(version: str) -> None:
    reason = versions.unusable(version)
    assert reason is not None and version in reason and "3.6.0" in reason and "torch 2.11" in reason
    assert versions.unknown(version) == reason


def test_none_makes_none() -> None:
    assert versions.unusable(None) == versions.unknown(None) == "Triton is not installed"


def test_the_installed_one_is_read_without_an_import() -> None:
    said = "import sys; from axes.kernels.common import versions; print(versions.VERSION, 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", said], cwd=ROOT, capture_output=True, text=True, check=True)
    if sys.platform == "linux":
        import triton

        assert done.stdout.split() == [triton.__version__, "False"]


def test_the_table_is_what_torch_brings() -> None:
    """Where torch's own metadata say so: builds for CPUs bring none."""
    wanted = [re.search(r"triton\W*[=~]=\s*([\d.]+)", line) for line in metadata.requires("torch") or ()]
    torch_line = ".".join(torch.__version__.split(".")[:2])
    for found in filter(None, wanted):
        (brings,) = [version for version, torches in TRITONS.items() if torch_line in torches.split(" and ")]
        assert versions._line(brings) == versions._line(found[1])


def test_the_pinned_triton_is_the_one_that_the_pinned_torch_brings() -> None:
    pins = dict(re.findall(r"^(torch|triton)==([\d.]+)", (ROOT / "requirements" / "dev.txt").read_text(), flags=re.M))
    torches = next(t for version, t in TRITONS.items() if versions._line(version) == versions._line(pins["triton"]))
    assert ".".join(pins["torch"].split(".")[:2]) in torches.split(" and ")


def test_one_module_knows_how_gluon_versions_differ() -> None:
    for path in sorted((ROOT / "axes" / "kernels").rglob("*.py")):
        text = path.read_text()
        if path.name != "gluon.py":
            nodes = list(ast.walk(ast.parse(text)))
            named = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
            named |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
            assert not any(name.startswith("triton.experimental") for name in named), path
            assert "triton.__version__" not in text, path


# ---- what Triton builds its launcher with ----------------------------------------------------------------------------


def program(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_c_compiler_is_looked_for_as_triton_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPATH", "/headers")  # whoever says where headers are is believed
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in str(versions.no_compiler())
    program(tmp_path, "cc")  # Triton does not look for this name
    assert "no C compiler" in str(versions.no_compiler())
    program(tmp_path, "clang")
    assert versions.no_compiler() is None
    monkeypatch.setenv("CC", "icx")
    assert "$CC names, 'icx', is not there" in str(versions.no_compiler())
    monkeypatch.setenv("CC", str(program(tmp_path, "icx")))
    assert versions.no_compiler() is None


def test_pythons_headers_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path, "gcc")
    monkeypatch.setattr(versions.sysconfig, "get_path", lambda *_: str(tmp_path))
    assert "Python's headers are not in" in str(versions.no_compiler())
    (tmp_path / "Python.h").touch()
    assert versions.no_compiler() is None


# ---- devices ---------------------------------------------------------------------------------------------------------

DELTA = StateUpdate(SquaredError())
SQUARE = torch.zeros(1, device="meta")


def test_a_hopper_gpu_runs_every_kernel(machine: Machine) -> None:
    machine()
    assert versions.refusal(HERE) is None and versions.hopper_refusal(HERE) is None


@pytest.mark.parametrize(
    ("made", "says"),
    (
        ({"triton": "3.10.0"}, "not tested with 3.10.0"),
        ({"name": "NVIDIA A100", "major": 8}, r"NVIDIA A100 \(compute capability 8.0\) is not a Hopper GPU"),
        ({"name": "NVIDIA B200", "major": 10}, "NVIDIA B200 .* is not a Hopper GPU"),
        ({"name": "AMD Instinct MI250X", "hip": "7.2"}, "MI250X .* is not a Hopper GPU"),
        ({"shared_memory_per_block_optin": 166912}, "232448 bytes of shared memory a program, NVIDIA H200 has 166912"),
    ),
)
def test_elsewhere_the_portable_kernels_run(machine: Machine, made: dict[str, object], says: str) -> None:
    machine(**made)
    assert versions.refusal(HERE) is None
    assert re.search(says, str(versions.hopper_refusal(HERE)))
    assert kernel_terms.no_kernel(DELTA, HERE, torch.bfloat16, {}, 1) is None


@pytest.mark.parametrize(
    ("made", "says"),
    (
        ({"triton": None}, "Triton is not installed"),
        ({"triton": "3.5.0"}, "Triton 3.5.0 is too old"),
        ({"reason": "there is no C compiler"}, "there is no C compiler"),
        ({"name": "Tesla T4", "major": 7, "minor": 5}, r"Tesla T4 \(compute capability 7.5\) is older"),
    ),
)
def test_a_machine_that_makes_no_kernels_says_why(machine: Machine, made: dict[str, object], says: str) -> None:
    machine(**made)
    x = SimpleNamespace(device=HERE)
    reasons = [
        versions.refusal(HERE), versions.hopper_refusal(HERE), symmetric.no_kernel(x), accumulate.no_kernel(x),  # type: ignore[arg-type]
        kernel_terms.no_kernel(DELTA, HERE, torch.bfloat16, {}, 1),
    ]  # fmt: skip
    assert all(re.search(says, str(reason)) for reason in reasons), reasons
    choice = dispatch.select(DELTA, HERE, torch.bfloat16)
    assert choice.implementation == "torch" and re.search(says, choice.reason)
    with pytest.raises(dispatch.NoImplementation, match=says):
        dispatch.select(DELTA, HERE, torch.bfloat16, implementation="triton")


def test_a_gpu_that_is_not_here_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "gpu_is_here", lambda: False)
    monkeypatch.setattr(versions, "UNUSABLE", None)
    assert versions.refusal(HERE) is None
    assert "not here to be asked" in str(versions.hopper_refusal(HERE))
    assert versions.refusal(torch.device("cpu")) == "device cpu is not a GPU"


# ---- kernels by name -------------------------------------------------------------------------------------------------


UNKNOWN = """
import sys
from axes.kernels.common import versions
versions.VERSION = "3.10.0"
import torch
from axes.errors import AxesError
from axes.kernels.diagonal.chain import diagonal_chain
from axes.kernels.products.symmetric import symmetric_product
from axes.kernels.scalar.chain import scalar_chain

x = torch.randn(1, 20, 1, 16)
gate = -torch.rand(1, 20, 1)
for rule in ("write", "delta"):
    assert scalar_chain(x, x, x, gate.exp(), gate, rule=rule)[0].isfinite().all()
    assert diagonal_chain(x, x, x, -torch.rand_like(x), gate.exp(), rule=rule)[0].isfinite().all()
square = torch.randn(1, 16, 16)
torch.testing.assert_close(symmetric_product(square), square @ square.mT, rtol=1e-2, atol=1e-2)
# as nobody has imported them, which whoever started this process has
for name in ("scalar.hopper", "common.gluon"):
    room, _, module = name.rpartition(".")
    sys.modules.pop(f"axes.kernels.{name}", None)
    vars(sys.modules[f"axes.kernels.{room}"]).pop(module, None)
try:
    from axes.kernels.scalar import hopper
except AxesError as error:
    assert "asked for by name" in str(error) and "3.6.0, 3.7.1, 3.8.0, 3.9.0" in str(error), error
else:
    raise AssertionError("a kernel for an unknown Triton")
"""


def test_on_an_unknown_triton_a_kernel_for_hopper_raises_and_the_portable_ones_run() -> None:
    if sys.platform != "linux":
        pytest.importorskip("triton")
    from tests.interpreter import interpret

    interpret(UNKNOWN)
