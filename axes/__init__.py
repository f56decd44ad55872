"""Optimizers, sequence layers and depth mixers as one algorithm: steps of a `StateUpdate` along data, time or depth.

from axes import StateUpdate, Per, explain
import axes.optim, axes.sequence, axes.depth
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from axes.answers import explain, select
from axes.core.algorithms import Anchor, Held, Mix, Momentum, Read, Step, Sum
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.errors import AxesError
from axes.routes.dispatch import implementation

__version__ = "0.1.0"

# families and everything above them load on first use: `import axes` stays the core
_LAZY = frozenset(
    "algorithms catalogue costs depth dispatch geometry memory monoids optim sequence testing".split()  # noqa: SIM905
)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"axes.{name}")
    if name == "cite":
        return importlib.import_module("axes.catalogue").cite
    if name == "compile_ahead":
        return importlib.import_module("axes.kernels.common.ahead").compile_ahead
    if name == "retarget":
        return importlib.import_module("axes.moves").retarget
    raise AttributeError(f"module 'axes' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


__all__ = [
    "Anchor",
    "AxesError",
    "Held",
    "Mix",
    "Momentum",
    "OnUpdate",
    "Per",
    "Read",
    "StateUpdate",
    "Step",
    "Sum",
    "__version__",
    "cite",
    "compile_ahead",
    "explain",
    "implementation",
    "retarget",
    "select",
]
