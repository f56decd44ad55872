"""Streams in rows that are narrower than the sublayer, which reads and writes several of them."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Sphere
from axes.core.monoids import Identity
from axes.core.state_update import StateUpdate
from axes.depth.base import Coefficients, DepthMixer
from axes.depth.hyper_connections import MIXING
from axes.depth.static import StaticMixer


@final
class ResidualMatrix(StaticMixer):
    """M <- M + W_w^T mat(f(x_in)),  x_in = vec(W_r N(M)): a matrix of n r rows of width d / r, N its RMS norm.

    Args:
        fractions: r, the number of rows that a sublayer reads and writes.

    Start: n copies of what enters, W_r reads copy l mod n, W_w writes to all: the network equals pre-norm.

    Source: Mak and Flanigan 2025. Differs: a mixer around an unchanged sublayer, where the paper's attention reads
    queries, keys and values by weights of their own; no gain, which the next linear map can hold.
    """

    update: StateUpdate = StateUpdate(Alignment(), Sphere("whole", radius=None), Identity(), Step())
    fractions: int = 2
    name: ClassVar[str] = "residual-matrix"
    paper: ClassVar[str] = "Residual matrix transformers (Mak and Flanigan 2025)"
    equation: ClassVar[str] = "M <- M + W_w^T mat(f(vec(W_r N(M))))"
    differs: ClassVar[str] = "around an unchanged sublayer: one read for queries, keys and values; no gain"
    bibtex: ClassVar[str] = """@article{mak2025residual,
  title={Residual Matrix Transformers: Scaling the Size of the Residual Stream},
  author={Mak, Brian and Flanigan, Jeffrey},
  journal={arXiv preprint arXiv:2506.22696},
  year={2025}
}"""

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 4,
        *,
        fractions: int = 2,
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model,
            layer_index,
            streams,
            fractions=fractions,
            learned_reduce=learned_reduce,
            device=device,
            dtype=dtype,
        )


@final
class FracConnections(DepthMixer):
    """H <- A^T H + diag(B) mat(f(x_in)),  x_in = vec(Y^T H): one stream in m fractions of width d / m.

    Args:
        fractions: m.

    Start: Y = A = I, B = 1: the network equals pre-norm. No parameter takes weight decay.

    Source: Zhu et al. 2025, Frac-Connections, static. Differs: no dynamic part.
    """

    update: StateUpdate = MIXING
    fractions: int = 2
    name: ClassVar[str] = "frac-connections"
    paper: ClassVar[str] = "Frac-connections: fractional extension of hyper-connections (Zhu et al. 2025), static"
    equation: ClassVar[str] = "H <- A^T H + diag(B) mat(f(vec(Y^T H)))"
    differs: ClassVar[str] = "no dynamic part"
    bibtex: ClassVar[str] = """@article{zhu2025frac,
  title={Frac-Connections: Fractional Extension of Hyper-Connections},
  author={Zhu, Defa and Huang, Hongzhi and Zhou, Jundong and Huang, Zihao and Zeng, Yutao and others},
  journal={arXiv preprint arXiv:2503.14125},
  year={2025}
}"""

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        *,
        fractions: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, layer_index, 1, fractions=fractions, device=device, dtype=dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.read_weights = nn.Parameter(torch.empty(fractions, fractions, **factory))
        self.mix = nn.Parameter(torch.empty(fractions, fractions, **factory))
        self.post = nn.Parameter(torch.empty(fractions, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.eye_(self.read_weights)
        nn.init.eye_(self.mix)
        nn.init.ones_(self.post)

    def coefficients(self, streams: Tensor) -> Coefficients:
        dtype = streams.dtype
        signal = {"k": torch.diag(self.post.to(dtype)), "mix": self.mix.to(dtype).mT}
        return Coefficients(self.read_weights.to(dtype).mT, signal)
