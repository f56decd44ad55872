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
