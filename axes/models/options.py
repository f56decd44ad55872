"""Which of the model's settings a constructor of the catalogue takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def accepted_options(cls: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """The options that a constructor names: a plain residual has no number of streams, a memory may have no heads."""
    parameters = inspect.signature(cls).parameters
    return {name: value for name, value in options.items() if name in parameters}
