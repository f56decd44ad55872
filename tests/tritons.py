"""Every Triton that is supported, unpacked beside the checkout, so that each can compile in a process of its own.

`python -m tests.tritons 3.7.1 3.9.0` fetches these, `python -m tests.tritons` the newest; a version that is there is
left alone. pip fetches the wheels, by the configuration of the machine; AXES_TRITON_CACHE says where they are unpacked
if not in `.cache/triton` of this checkout.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from axes.kernels.common.versions import TRITONS, installed

ROOT = Path(__file__).resolve().parents[1]
NEWEST = list(TRITONS)[-1]
OWN = installed()  # that of the environment
# Of the large files, those that compiling for Hopper needs; the others (AMD, profilers) are not unpacked.
_NEEDED = {"libtriton.so", "ptxas", "ptxas-blackwell", "cuobjdump", "libdevice.10.bc"}
_LARGE = 300_000  # bytes


def cache() -> Path:
    return Path(os.environ.get("AXES_TRITON_CACHE") or ROOT / ".cache" / "triton")


def folder(version: str) -> Path:
    """Where a version is importable from; fetched if it is not there."""
    place = cache() / f"{version}-{sys.implementation.cache_tag}"  # a wheel is for one version of Python
    if place.is_dir():
        return place
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes wait here for the one that fetches
        if not place.is_dir():
            with tempfile.TemporaryDirectory(dir=cache()) as beside:
                unpack(_fetch(version, Path(beside)), place)
    return place


def _fetch(version: str, to: Path) -> Path:
    print(f"fetching triton {version} into {cache()}", file=sys.stderr)
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(to)]
    done = subprocess.run([*fetch, f"triton=={version}"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"pip could not fetch the wheel of triton {version}, which the kernels are tested with:\n{done.stderr}\n"
            f"With a network, `python -m tests.tritons {version}` fetches it; or unpack the wheel into {cache()}"
        )
    (wheel,) = to.glob("triton-*.whl")
    return wheel


def unpack(wheel: Path, place: Path) -> None:
    """What compiling needs of a wheel. It is whole as soon as it has its name: it is unpacked beside, then renamed."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as beside, zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = Path(member.filename).name
            if member.file_size > _LARGE and name not in _NEEDED:
                continue
            made = archive.extract(member, Path(beside, "made"))
            if member.external_attr >> 16 & 0o100:
                os.chmod(made, 0o755)
        shutil.rmtree(place, ignore_errors=True)
        Path(beside, "made").rename(place)


if __name__ == "__main__":
    for asked in sys.argv[1:] or [NEWEST]:
        print(folder(asked))
