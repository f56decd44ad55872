"""Monoids, by the name that user code imports."""

from axes.core.monoids import *  # noqa: F403
from axes.core.monoids import __all__ as __all__
