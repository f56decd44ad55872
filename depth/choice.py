"""Who reads and writes along depth: one choice for a tuple, that every read and write of a mixer asks for."""

from __future__ import annotations

import torch

from axes.core.facts import fact
from axes.core.state_update import StateUpdate
from axes.depth import kernels
from axes.kernels.common import versions
from axes.routes.choice import Choice, Implementation, Plan, Target, require_named


def choose(
    update: StateUpdate,
    device: torch.device,
    dtype: torch.dtype,
    implementation: Implementation | None = None,
    streams: int = 1,
    own: str | None = None,
    adds: str | None = None,
) -> Choice:
    """How a tuple takes one step a sublayer; NoImplementation if the named implementation does not.

    own, adds: why a mixer does not take it by products, or by a kernel's.
    """
    settle = _settled if torch.compiler.is_compiling() else _once_settled  # a compiler would see facts appear
    return settle(update, versions.no_kernel(device, dtype), implementation, streams, own, adds)


def _settled(
    update: StateUpdate,
    refused: str | None,
    implementation: Implementation | None,
    streams: int,
    own: str | None,
    adds: str | None,
) -> Choice:
    """The choice where kernels are refused, or not, whatever the tuple is."""
    no_form = own or kernels.no_form(update)
    no_kernel = own or (adds if kernels.adds(update) else None) or refused or kernels.no_kernel(update, streams)
    if no_kernel is None and implementation in (None, "triton"):
        choice = Choice("chain", "triton", "streams are read in one pass, and mixed and written in another")
    elif no_form is None and implementation != "reference":
        why = no_kernel or f"{implementation} was asked for by name"
        choice = Choice("chain", "torch", f"streams are read by one product and written by another (no kernel: {why})")
    else:
        why = no_form or "reference was asked for by name"
        choice = Choice("interpreter", "reference", f"one step a sublayer, there is nothing to scan (no chain: {why})")
    return require_named(choice, implementation, update)


_once_settled = fact(_settled)


def plans(
    update: StateUpdate,
    target: Target,
    dtype: torch.dtype,
    implementation: Implementation | None = None,
    streams: int = 1,
    own: str | None = None,
    adds: str | None = None,
) -> tuple[Plan, ...]:
    """What runs for the tuple of a mixer."""
    choice = choose(update, target.device, dtype, implementation, streams, own, adds)
    routes = {"chain": own or kernels.no_form(update), "interpreter": None}
    return (Plan("runs", update, choice, target, dtype, routes),)  # type: ignore[arg-type]


__all__ = ["choose", "plans"]
