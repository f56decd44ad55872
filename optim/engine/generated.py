"""Where a program over entries is a generated kernel, and why it is not elsewhere."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import Literal

import torch
from torch import Tensor

from axes.kernels.common.ahead import really
from axes.programs.program import PARAMETER, trace
from axes.routes.choice import Target

How = Literal["host", "device", "fused"]
GRADIENT = "g"
_TRITON = importlib.util.find_spec("triton") is not None


def no_kernel(how: How, device: torch.device | Target, plain: bool = True) -> str | None:
    """Why a batch that steps in this way is no kernel, or None if it is one. plain: as its parameters are."""
    if how == "fused":
        return None
    if how == "device":
        return "capturable=True computes the numbers of a step beside the tensors"
    return no_kernels(device) or (None if plain else "a parameter is a tensor with arithmetic of its own")


def no_kernels(device: torch.device | Target) -> str | None:
    """Why no program is a kernel on a device, or None. One that is here is tried; of others it is taken for granted."""
    target = device if isinstance(device, Target) else Target(device)
    if target.device.type != "cuda":
        return f"device {target.device} is not a GPU"
    if not _TRITON:
        return "Triton is not installed"
    if torch.compiler.is_compiling():
        return "a compiler follows torch's operations"
    return unable(target.device) if target.known == "here" else None


@functools.cache
def unable(device: torch.device) -> str | None:
    """Why the smallest kernel does not run on a device: Triton needs a C compiler, and does not know every GPU."""
    try:
        from axes.programs.fused import Fused  # triton is imported on first use

        one, counts = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        smallest = trace(lambda v: {PARAMETER: v[PARAMETER] + v[GRADIENT]}, (PARAMETER, GRADIENT), ())
        with really():
            Fused(smallest, {PARAMETER: [one]}, {}, {}, counts).step([torch.zeros_like(one)], {})
    except Exception as error:  # whatever a compiler, an assembler or a driver says
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"no kernels for {device}, torch's operations step instead: {reason}", stacklevel=2)
        return reason
    return None


def is_plain(parameter: Tensor) -> bool:
    """Whether a parameter is memory that a kernel can be given, and not a tensor with arithmetic of its own."""
    return type(parameter.detach()) is Tensor
