"""Generating functions h and their links grad h*: where a state lives and how a dual vector becomes a point there.

The contract is in `bregman`; `norms` and `balls` act entry by entry or on vectors, `spectral` on a spectrum,
`preconditioners` makes roots and bases of statistics, `low_rank` factors, `mixing` turns free logits into mixing
matrices, `normalised` and `wrappers` rescale a direction, `distance` estimates how far to go.
"""

from axes.core.geometry.balls import Ball, SignBall, Sphere
from axes.core.geometry.bregman import Context, Geometry
from axes.core.geometry.distance import DISTANCE, Distance
from axes.core.geometry.low_rank import LowRank, PowerFactors
from axes.core.geometry.mixing import Birkhoff, Cayley, Permutations
from axes.core.geometry.normalised import KeyNormalised, NormedWhiten, RankOneWhiten
from axes.core.geometry.norms import Bounded, Entropic, Euclidean, Hypentropy, Lq, LqLiteral, Shrink, SoftThreshold
from axes.core.geometry.preconditioners import Eigenbasis, FittedFactor, InverseRoot, Kronecker, RotatedWhiten
from axes.core.geometry.spectral import Spectral, Whiten
from axes.core.geometry.wrappers import Cautious, Composite, ConstantNorm, Decayed, Graft, RelativeStep, TrustRatio

__all__ = [
    "DISTANCE",
    "Ball",
    "Birkhoff",
    "Bounded",
    "Cautious",
    "Cayley",
    "Composite",
    "ConstantNorm",
    "Context",
    "Decayed",
    "Distance",
    "Eigenbasis",
    "Entropic",
    "Euclidean",
    "FittedFactor",
    "Hypentropy",
    "Geometry",
    "KeyNormalised",
    "Kronecker",
    "Graft",
    "InverseRoot",
    "LowRank",
    "Lq",
    "LqLiteral",
    "NormedWhiten",
    "Permutations",
    "PowerFactors",
    "RankOneWhiten",
    "RelativeStep",
    "RotatedWhiten",
    "Shrink",
    "SignBall",
    "SoftThreshold",
    "Spectral",
    "Sphere",
    "TrustRatio",
    "Whiten",
]
