"""Extras: packages that an integration needs and the package does not."""

from __future__ import annotations

import importlib.util
from typing import final

from axes.errors import AxesError

_DISTRIBUTION = "axes-state-update"


@final
class MissingExtra(AxesError, ImportError):
    """A package that an extra brings is not there; says how to install it."""


def require_extra(who: str, package: str, extra: str) -> None:
    """MissingExtra unless the package can be imported."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(
            f"{who} needs the package {package}, which is not installed: pip install '{_DISTRIBUTION}[{extra}]'"
        )
