"""The works whose claims are checked; call one with a section, table row or equation to get a `Source`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from axes.claims.base import Source


@final
@dataclass(frozen=True)
class Work:
    """An author and a title."""

    author: str
    title: str

    def __call__(self, place: str) -> Source:
        return Source(self.author, self.title, place)


BLOG = Work("Unsigned article", "Associative Memory, States, Attention, Optimization: A Unifying Perspective")
SLIDES = Work("Songlin Yang", "Linear Attention and Beyond")
LONGHORN = Work("Liu et al.", "Longhorn: State Space Models are Amortized Online Learners")
MIRAS = Work(
    "Behrouz et al.", "It's All Connected: Test-Time Memorization, Attentional Bias, Retention, and Online Optimization"
)
LATTICE = Work("Karami and Mirrokni", "Lattice: Learning to Efficiently Compress the Memory")
TITANS = Work("Behrouz et al.", "Titans: Learning to Memorize at Test Time")
