"""The Tritons that tests compile with: what is unpacked of a wheel, and when it counts as there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from tests import tritons

FILES = {
    "triton/__init__.py": b"__version__ = '9.9.9'\n",
    "triton/_C/libtriton.so": bytes(400_000),
    "triton/_C/libproton.so": bytes(400_000),
    "triton/backends/nvidia/bin/ptxas": b"#!/bin/sh\n",
    "triton-9.9.9.dist-info/entry_points.txt": b"[triton.backends]\n",
}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AXES_TRITON_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "triton-9.9.9-cp311-cp311-linux.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in FILES.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = (0o755 if name.endswith("ptxas") else 0o644) << 16
            archive.writestr(member, content)
    return path


def fetched(monkeypatch: pytest.MonkeyPatch, wheel: Path | None, says: str = "") -> list[list[str]]:
    """pip that copies a wheel, or none and says why; its calls."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if wheel is not None:
            (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0 if wheel else 1, "", says)

    monkeypatch.setattr(tritons.subprocess, "run", run)
    return calls


def test_a_version_is_fetched_once_without_what_compiling_does_not_need(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fetched(monkeypatch, wheel)
    place = tritons.folder("9.9.9")
    assert tritons.folder("9.9.9") == place and len(calls) == 1 and calls[0][-1] == "triton==9.9.9"
    found = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert found == set(FILES) - {"triton/_C/libproton.so"}
    assert os.access(place / "triton/backends/nvidia/bin/ptxas", os.X_OK)
    assert sorted(path.name for path in place.parent.iterdir()) == sorted([place.name, "lock"])


def test_a_wheel_that_breaks_off_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel.write_bytes(wheel.read_bytes().replace(b"[triton.backends]", b"[triton.????????]"))  # the last of its files
    fetched(monkeypatch, wheel)
    with pytest.raises(zipfile.BadZipFile, match="CRC"):
        tritons.folder("9.9.9")
    assert [path.name for path in tritons.cache().iterdir()] == ["lock"]


def test_what_pip_says_is_shown(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched(monkeypatch, None, "No matching distribution")
    with pytest.raises(RuntimeError, match=r"(?s)triton 9.9.9.*No matching distribution.*tests.tritons 9.9.9"):
        tritons.folder("9.9.9")
