"""Sequence layers: a state update along tokens, as `torch.nn.Module`."""

if __name__ != "axes.sequence":
    raise ImportError("import axes.sequence, not sequence: the folder is installed as axes.sequence")

from axes.sequence.attention import ALiBi, FoX, PaTH, RoPE, SoftmaxAttention
from axes.sequence.base import LayerState, SequenceLayer, layer
from axes.sequence.delta import DeltaNet, DeltaNetReflective, GatedDeltaNet, GatedDeltaNetPrev
from axes.sequence.linear import GLA, LinearAttention, Mamba2, RetNet, UnnormalisedLinearAttention
from axes.sequence.longhorn import Longhorn, LonghornDiagonal
from axes.sequence.rwkv7 import RWKV7

# relatives stand next to each other: alignment, squared error, implicit steps, stored lists
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
    Longhorn,
    LonghornDiagonal,
    SoftmaxAttention,
    ALiBi,
    RoPE,
    FoX,
    PaTH,
)

__all__ = [
    "ALL",
    "ALiBi",
    "DeltaNet",
    "DeltaNetReflective",
    "FoX",
    "GLA",
    "GatedDeltaNet",
    "GatedDeltaNetPrev",
    "LayerState",
    "LinearAttention",
    "Longhorn",
    "LonghornDiagonal",
    "Mamba2",
    "PaTH",
    "RWKV7",
    "RetNet",
    "RoPE",
    "SequenceLayer",
    "SoftmaxAttention",
    "UnnormalisedLinearAttention",
    "layer",
]
