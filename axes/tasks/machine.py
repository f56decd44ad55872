"""What the machine has, for settings that no machine of its kind could carry out."""

from __future__ import annotations

import os

import torch

from axes.errors import AxesError


def memory(device: torch.device) -> int | None:
    """Bytes that a device has in all; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def require_memory(needed: int, device: torch.device, what: str) -> None:
    """Refuse what needs more bytes than there are. needed: a lower bound."""
    there = memory(device)
    if there is not None and needed > there:
        raise AxesError(
            f"{what} need at least {needed / 1e9:,.1f} GB, and {device} has {there / 1e9:,.1f}: choose smaller sizes"
        )


def most_threads() -> int:
    """More threads than this are never what somebody wants, and at some number the system ends the process."""
    return max(64, 8 * (os.cpu_count() or 1))


# Dense products of 16 bit in TFLOP/s, as NVIDIA's data sheets have them; the first name that a device's holds counts.
_PEAKS = (
    ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.4), ("H200", 989.4), ("H20", 148.0), ("B200", 2250.0),
    ("A100", 312.0), ("L40S", 362.0), ("L4", 121.0), ("RTX 4090", 165.2),
)  # fmt: skip


def peak_flops(device: torch.device, dtype: str) -> float:
    """Operations a second that a device's products of 16 bit could do; 0 if nobody says, or for other dtypes."""
    if device.type != "cuda" or not dtype.startswith("bfloat16"):
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for known, peak in _PEAKS if known in name), 0.0)
