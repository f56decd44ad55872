"""Running a tuple over tensors, by the name that user code imports: (B, T, H, D) signals in, outputs and state out."""

from axes.routes.dispatch import *  # noqa: F403
from axes.routes.dispatch import __all__ as __all__
