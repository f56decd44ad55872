"""Depth mixers: a state update along layers, acting on residual streams."""

if __name__ != "axes.depth":
    raise ImportError("import axes.depth, not depth: the folder is installed as axes.depth")

from axes.depth.attention import AttentionResiduals, BlockAttentionResiduals, DenseFormer, DynamicDense
from axes.depth.base import Coefficients, DepthMixer, Mixed
from axes.depth.deep_delta import DeepDelta
from axes.depth.fractions import FracConnections, ResidualMatrix
from axes.depth.hyper_connections import DynamicHyperConnections, HyperConnections
from axes.depth.jpmhc import JPmHC, JPmHCMeanPreserving
from axes.depth.mhc import MHC, RELEASED_EPS, IdentityMixing, MHCLite
from axes.depth.residual import PostNorm, PreNorm, Residual, UniversalTransformer
from axes.depth.stack import through
from axes.depth.static import TupleMixer, mixer
from axes.depth.wrap import unwrap, wrap

ALL: tuple[type[DepthMixer], ...] = (
    Residual,
    PreNorm,
    PostNorm,
    UniversalTransformer,
    HyperConnections,
    DynamicHyperConnections,
    MHC,
    MHCLite,
    IdentityMixing,
    JPmHC,
    JPmHCMeanPreserving,
    DeepDelta,
    FracConnections,
    ResidualMatrix,
    AttentionResiduals,
    BlockAttentionResiduals,
    DenseFormer,
    DynamicDense,
)

__all__ = [
    "ALL",
    "AttentionResiduals",
    "BlockAttentionResiduals",
    "Coefficients",
    "DeepDelta",
    "DenseFormer",
    "DepthMixer",
    "DynamicDense",
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
    "UniversalTransformer",
    "mixer",
    "through",
    "unwrap",
    "wrap",
]
