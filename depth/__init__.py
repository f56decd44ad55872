"""Depth mixers: a state update along layers, acting on residual streams."""

if __name__ != "axes.depth":
    raise ImportError("import axes.depth, not depth: the folder is installed as axes.depth")

from axes.depth.attention import AttentionResiduals, BlockAttentionResiduals, DenseFormer
from axes.depth.base import Coefficients, DepthMixer, Mixed
from axes.depth.fractions import FracConnections, ResidualMatrix
from axes.depth.hyper_connections import DynamicHyperConnections, HyperConnections
from axes.depth.jpmhc import JPmHC, JPmHCMeanPreserving
from axes.depth.mhc import MHC, RELEASED_EPS, IdentityMixing, MHCLite
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
    MHCLite,
    IdentityMixing,
    JPmHC,
    JPmHCMeanPreserving,
    FracConnections,
    ResidualMatrix,
    AttentionResiduals,
    BlockAttentionResiduals,
    DenseFormer,
)

__all__ = [
    "ALL",
    "AttentionResiduals",
    "BlockAttentionResiduals",
    "Coefficients",
    "DenseFormer",
    "DepthMixer",
    "DynamicHyperConnections",
    "FracConnections",
    "HyperConnections",
    "IdentityMixing",
    "JPmHC",
    "JPmHCMeanPreserving",
    "MHC",
    "MHCLite",
    "Mixed",
    "PostNorm",
    "PreNorm",
    "RELEASED_EPS",
    "Residual",
    "ResidualMatrix",
    "TupleMixer",
    "mixer",
    "unwrap",
    "wrap",
]
