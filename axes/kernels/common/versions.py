"""Which Triton the kernels are made for, and why they do not run on a device: asked everywhere, Triton is not imported.

A patch of a known version is known. On a newer Triton the portable kernels run and those for Hopper, written in Gluon,
which changes with every version, do not; on an older one none does.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Every one of these is tested (tests/axes/test_kernels_compile.py), beside the torch whose CUDA builds bring it.
TRITONS = {"3.6.0": "2.11", "3.7.1": "2.12 and 2.13", "3.8.0": "2.14", "3.9.0": "2.15"}

_AMPERE, _HOPPER = (8, 0), (9, 0)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("0", "")  # compilers cannot ask Triton
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHARED = 232448  # bytes of shared memory of a program on an H100 or H200, which the kernels for Hopper may use up


# ---- Triton ----------------------------------------------------------------------------------------------------------


def installed() -> str | None:
    """The version of the Triton that would be imported, None if there is none."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"""^__version__ = ['"](\S+)['"]""", Path(spec.origin).read_text(), flags=re.M)
    return found[1] if found else "0.0"


def _line(version: str) -> tuple[int, ...]:
    """(3, 6) of 3.6.0 and of its patches."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


_OLDEST = next(iter(TRITONS))
_LINES = [_line(version) for version in TRITONS]


def unusable(version: str | None) -> str | None:
    """Why no kernel can be made with this version of Triton, or None."""
    if version is None:
        return "Triton is not installed"
    if _line(version) < _LINES[0]:
        return f"Triton {version} is too old: the kernels need {_OLDEST}, which torch {TRITONS[_OLDEST]} has, or newer"
    return None


@functools.cache
def unknown(version: str | None) -> str | None:
    """Why the kernels for Hopper cannot be made with this version of Triton, or None."""
    if version is not None and _line(version) > _LINES[0] and _line(version) not in _LINES:
        return f"the kernels for Hopper are made for Triton {', '.join(TRITONS)} and not tested with {version}"
    return unusable(version)


# ---- what Triton builds its launcher with ----------------------------------------------------------------------------


def no_compiler() -> str | None:
    """Why Triton cannot build the C code that launches kernels, or None if it can: it takes $CC, gcc or clang."""
    named = os.environ.get("CC")
    if named is not None:
        if shutil.which(named) is None:
            return f"Triton launches kernels by C code, and the compiler that $CC names, {named!r}, is not there"
    elif shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton launches kernels by C code, and there is no C compiler: install gcc or clang, or name one in $CC"
    scheme = sysconfig.get_default_scheme()  # that of Debian names a folder of its own, which Triton does not look into
    headers = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    if not (Path(headers) / "Python.h").exists() and not {"CPATH", "C_INCLUDE_PATH"} & set(os.environ):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"Triton launches kernels by C code, and Python's headers are not in {headers}: "
            f"Debian and Ubuntu have them in python{version}-dev"
        )
    return None


# ---- devices ---------------------------------------------------------------------------------------------------------

VERSION = installed()
UNUSABLE = unusable(VERSION) or no_compiler()  # why no kernel can be made on this machine, or None


class _Reasons(NamedTuple):
    """Why kernels do not run on a device: any of them, and those for Hopper."""

    any: str | None
    hopper: str | None


_ASKED: dict[int, _Reasons] = {}  # by the number of a GPU


def since(version: str) -> bool:
    """Whether the environment's Triton is of this version's line or of a later one."""
    return VERSION is not None and _line(VERSION) >= _line(version)


def gluon_refusal() -> str | None:
    """Why the kernels for Hopper cannot be made here, whatever the GPU, or None."""
    return unknown(VERSION)


def refusal(device: torch.device) -> str | None:
    """Why no Triton kernel runs on a device, or None if they do; of a GPU that is not here, what this machine lacks."""
    return _ask(device).any


def no_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why numbers of this dtype on this device are not for Triton's kernels, or None; its interpreter runs anywhere."""
    if not INTERPRETED and (reason := refusal(device)) is not None:
        return reason
    return None if dtype in DTYPES else f"the kernels take float32, float16 and bfloat16, not {dtype}"


def hopper_refusal(device: torch.device) -> str | None:
    """Why the kernels for Hopper do not run on a device, or None if they do."""
    return _ask(device).hopper


@functools.cache
def gpu_is_here() -> bool:
    return torch.cuda.is_available()


def _ask(device: torch.device) -> _Reasons:
    if device.type != "cuda":
        return _no_gpu(device)
    if not gpu_is_here():
        return _not_here(device, UNUSABLE, unknown(VERSION))
    number = torch.cuda.current_device() if device.index is None else device.index
    if number not in _ASKED:
        gpu = torch.cuda.get_device_properties(number)
        none = UNUSABLE or _too_old(gpu)
        _ASKED[number] = _Reasons(none, none or gluon_refusal() or _no_hopper(gpu))
    return _ASKED[number]


@functools.cache
def _no_gpu(device: torch.device) -> _Reasons:
    reason = f"device {device} is not a GPU"
    return _Reasons(reason, reason)


@functools.cache
def _not_here(device: torch.device, unusable: str | None, no_gluon: str | None) -> _Reasons:
    asked = f"device {device} is not here to be asked whether it is a Hopper GPU"
    return _Reasons(unusable, unusable or no_gluon or asked)


# Asked and not traced, since devices stay what they are: `torch.compiler.assume_constant_result`, which imports dynamo.
_ask._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _too_old(gpu: Any) -> str | None:
    if (gpu.major, gpu.minor) < _AMPERE:
        return f"{_named(gpu)} is older than the oldest that Triton makes kernels for (8.0)"
    return None


def _no_hopper(gpu: Any) -> str | None:
    if (gpu.major, gpu.minor) != _HOPPER or torch.version.hip is not None:
        return f"{_named(gpu)} is not a Hopper GPU, as H100 and H200 are (9.0)"
    if gpu.shared_memory_per_block_optin < SHARED:
        has = gpu.shared_memory_per_block_optin
        return f"the kernels for Hopper take up to {SHARED} bytes of shared memory a program, {gpu.name} has {has}"
    return None


def _named(gpu: Any) -> str:
    return f"{gpu.name} (compute capability {gpu.major}.{gpu.minor})"
