"""Depth mixers: a state update along layers, acting on residual streams."""

if __name__ != "axes.depth":
    raise ImportError("import axes.depth, not depth: the folder is installed as axes.depth")

from axes.depth.base import Coefficients, DepthMixer, Mixed
from axes.depth.hyper_connections import DynamicHyperConnections, HyperConnections
from axes.depth.jpmhc import JPmHC, JPmHCMeanPreserving
from axes.depth.mhc import MHC, IdentityMixing
from axes.depth.residual import PostNorm, PreNorm, Residual
from axes.depth.static import TupleMixer, mixer
from axes.depth.wrap import unwrap, wrap

ALL: tuple[type[DepthMixer], ...] = (
    Residual,
    PreNorm,
    PostNorm,
    HyperConnections,
    DynamicHyperConnections,
    MHC,
    IdentityMixing,
    JPmHC,
    JPmHCMeanPreserving,
)

__all__ = [
    "ALL",
    "Coefficients",
    "DepthMixer",
    "DynamicHyperConnections",
    "HyperConnections",
    "IdentityMixing",
    "JPmHC",
    "JPmHCMeanPreserving",
    "MHC",
    "Mixed",
    "PostNorm",
    "PreNorm",
    "Residual",
    "TupleMixer",
    "mixer",
    "unwrap",
    "wrap",
]
