"""Running a tuple over tensors, and what runs, by the name that user code imports: (B, T, H, D) signals in and out."""

from axes.answers import explain, select
from axes.routes.choice import Choice, Implementation, Route
from axes.routes.dispatch import NoImplementation, implementation, routes, run, run_packed, step

__all__ = [
    "Choice",
    "Implementation",
    "NoImplementation",
    "Route",
    "explain",
    "implementation",
    "routes",
    "run",
    "run_packed",
    "select",
    "step",
]
