"""Hyper-connections: streams that mix by an unconstrained matrix, constant or predicted from the streams."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.monoids import GeneralLinear
from axes.core.rates import Per, Signal
from axes.core.state_update import StateUpdate
from axes.depth.initial import one_hot
from axes.depth.projection import Projected, Projection
from axes.depth.static import StaticMixer

BIBTEX = """@inproceedings{zhu2025hyper,
  title={Hyper-Connections},
  author={Zhu, Defa and Huang, Hongzhi and Huang, Zihao and Zeng, Yutao and Mao, Yunyao and Wu, Banggu and
          Min, Qiyang and Zhou, Xun},
  booktitle={International Conference on Learning Representations},
  year={2025}
}"""

MIXING = StateUpdate(Alignment(), Euclidean(), GeneralLinear(Per("mix", "mix", "real")), Step())


def relinked(update: StateUpdate, **fields: Any) -> StateUpdate:
    """A tuple that mixes streams by a matrix, with other fields of the link that makes it of logits."""
    monoid = update.monoid
    assert isinstance(monoid, GeneralLinear)
    link = dataclasses.replace(monoid.link, **fields)  # type: ignore[type-var]
    return dataclasses.replace(update, monoid=dataclasses.replace(monoid, link=link))


@final
class HyperConnections(StaticMixer):
    """X <- R X + post y with constant pre, post and R in GL(n).

    Start: pre = e_{l mod n}, post = 1, R = I. One stream with these values is `Residual`. No parameter takes weight
    decay. Nothing bounds products of R: over many sublayers they explode or collapse once R leaves the identity.

    Source: Zhu et al. 2025, eqs. 2-5 and 14; R is their A_r transposed. Differs: streams leave by their mean, so the
    sublayers' output projections keep their scale.
    """

    update: StateUpdate = MIXING
    name: ClassVar[str] = "hyper-connections"
    paper: ClassVar[str] = "Hyper-connections (Zhu et al. 2025), static"
    equation: ClassVar[str] = "X <- R X + post f(pre X),  R in GL(n)"
    differs: ClassVar[str] = "mean instead of sum over streams at the end, so output projections keep their scale"
    bibtex: ClassVar[str] = BIBTEX


@final
class DynamicHyperConnections(Projected):
    """The same with coefficients that every source stream j predicts from itself:

        z_j = RMSNorm(X_j) phi,   phi (d, n + 2)
        pre_j = s_a tanh(z_j0) + A_j,   post_j = s_b tanh(z_j1) + B_j,   R_ij = s_a tanh(z_j,2+i) + M_ij

    Start: phi = 0, s_a = s_b = 0.01, constants as in `HyperConnections`. Weight decay acts on phi only.

    Source: Zhu et al. 2025, eqs. 10-13. Differs: RMSNorm, its gain folded into phi, instead of LayerNorm; mean at exit.
    """

    update: StateUpdate = MIXING
    name: ClassVar[str] = "dynamic-hyper-connections"
    paper: ClassVar[str] = "Hyper-connections (Zhu et al. 2025), dynamic"
    equation: ClassVar[str] = "X <- R(X) X + post(X) f(pre(X) X),  each = constant + s tanh(RMSNorm(X) phi)"
    differs: ClassVar[str] = "RMSNorm instead of LayerNorm; mean instead of sum over streams at the end"
    bibtex: ClassVar[str] = BIBTEX
    dynamic_names: ClassVar[frozenset[str]] = frozenset({"phi"})

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 4,
        *,
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, layer_index, streams, learned_reduce=learned_reduce, device=device, dtype=dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.pre = nn.Parameter(torch.empty(streams, **factory))
        self.post = nn.Parameter(torch.empty(streams, **factory))
        self.mix = nn.Parameter(torch.empty(streams, streams, **factory))
        self.phi = nn.Parameter(torch.empty(streams + 2, d_model, **factory))
        self.scale = nn.Parameter(torch.empty(2, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.pre.copy_(one_hot(self.layer_index, self.pre))
        self.post.fill_(1.0)
        self.mix.copy_(torch.eye(self.streams, dtype=self.mix.dtype, device=self.mix.device))
        self.phi.zero_()
        self.scale.fill_(0.01)

    def projection(self) -> Projection:
        a, b = self.scale
        scale = torch.stack((a, b, *[a] * self.streams))
        constants = torch.cat((self.pre[:, None], self.post[:, None], self.mix.mT), -1)
        return Projection(self.phi, scale, constants, "first", tanh=True)

    def signal(self, k: Tensor, rest: Tensor) -> Signal:
        return {"k": rest[..., 1], "mix": rest[..., 2:].mT}
