"""Costs, by the name that user code imports."""

from axes.core.costs import *  # noqa: F403
from axes.core.costs import __all__ as __all__
