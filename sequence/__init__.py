"""Sequence layers: a state update along tokens, as `torch.nn.Module`."""

if __name__ != "axes.sequence":
    raise ImportError("import axes.sequence, not sequence: the folder is installed as axes.sequence")

from axes.sequence.attention import ALiBi, FoX, PaTH, RoPE, SoftmaxAttention
from axes.sequence.base import LayerState, SequenceLayer, layer
from axes.sequence.delta import KDA, DeltaNet, DeltaNetReflective, GatedDeltaNet, GatedDeltaNetPrev
from axes.sequence.lattice import LatticeDec, LatticeEnc, LatticeOSR, LatticeSim
from axes.sequence.linear import GLA, LinearAttention, Mamba2, RetNet, UnnormalisedLinearAttention
from axes.sequence.longhorn import Longhorn, LonghornDiagonal
from axes.sequence.miras import (
    Memora,
    MemoraLiteral,
    MemoraMatrix,
    Moneta,
    MonetaLiteral,
    MonetaMatrix,
    Yaad,
    YaadMatrix,
    YaadSwitch,
)
from axes.sequence.predicted import PREDICTED, AdamNet, FrankWolfeDelta, MuonNet, MuonNetState, RLSNet, ShampooNet
from axes.sequence.rwkv7 import RWKV7
from axes.sequence.titans import Titans, TitansMatrix
from axes.sequence.ttt import TTTMLP, TTTLinear

# relatives stand next to each other
ALL: tuple[type[SequenceLayer], ...] = (
    LinearAttention,
    UnnormalisedLinearAttention,
    RetNet,
    Mamba2,
    GLA,
    RWKV7,
    DeltaNet,
    DeltaNetReflective,
    GatedDeltaNet,
    GatedDeltaNetPrev,
    KDA,
    Longhorn,
    LonghornDiagonal,
    TitansMatrix,
    Titans,
    TTTLinear,
    TTTMLP,
    MonetaMatrix,
    Moneta,
    MonetaLiteral,
    YaadMatrix,
    Yaad,
    YaadSwitch,
    MemoraMatrix,
    Memora,
    MemoraLiteral,
    LatticeDec,
    LatticeEnc,
    LatticeSim,
    LatticeOSR,
    SoftmaxAttention,
    ALiBi,
    RoPE,
    FoX,
    PaTH,
    *PREDICTED,
)

__all__ = [
    "ALL",
    "ALiBi",
    "AdamNet",
    "DeltaNet",
    "DeltaNetReflective",
    "FoX",
    "FrankWolfeDelta",
    "GLA",
    "GatedDeltaNet",
    "GatedDeltaNetPrev",
    "KDA",
    "LatticeDec",
    "LatticeEnc",
    "LatticeOSR",
    "LatticeSim",
    "LayerState",
    "LinearAttention",
    "Longhorn",
    "LonghornDiagonal",
    "Mamba2",
    "Memora",
    "MemoraLiteral",
    "MemoraMatrix",
    "Moneta",
    "MonetaLiteral",
    "MonetaMatrix",
    "MuonNet",
    "MuonNetState",
    "PaTH",
    "RLSNet",
    "RWKV7",
    "RetNet",
    "RoPE",
    "SequenceLayer",
    "ShampooNet",
    "SoftmaxAttention",
    "TTTLinear",
    "TTTMLP",
    "Titans",
    "TitansMatrix",
    "UnnormalisedLinearAttention",
    "Yaad",
    "YaadMatrix",
    "YaadSwitch",
    "layer",
]
