"""Streams that are rewritten along a direction: a sublayer says where, and what stood there is replaced."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axes.core.algorithms import Step
from axes.core.costs import SquaredError
from axes.core.geometry import Euclidean
from axes.core.monoids import Identity
from axes.core.rates import Per, Signal
from axes.core.state_update import StateUpdate
from axes.depth.base import Coefficients, DepthMixer
from axes.depth.initial import read_shares

EPS = 1e-6
LEAST = 1e-5  # length that is added, squared, to that of a direction
TARGET = 4.0  # targets lie in (0, 4)


@final
class DeepDelta(DepthMixer):
    """S <- S - beta u (u^T S - w^T): the delta rule whose direction u (d) is the sublayer's output, w (n) the target.

        x = S p,   u = f(x) / |f(x)|,   beta = 2 sigmoid(g . RMSNorm(x) + b),   w = 4 sigmoid(W x + c)

    S = X^T (d, n). In the tuple u is the value and w the key, and the cost compares the value encoded, S^T u, with the
    key: `SquaredError(encode=True)`; without `encode` it is what streams store under a key that is corrected. beta = 0
    keeps S, 1 replaces what stood along u, 2 reflects it. One stream is the paper's scalar form.

    Start: beta = 1, w = 2, p mostly on stream l mod n. No network of these equals pre-norm.

    Source: Zhang et al. 2026, eqs. 2.2-2.5, with the maps of their code. Differs: no short convolution before the read;
    the first read is asymmetric; streams leave by their mean or by learned weights.
    """

    update: StateUpdate = StateUpdate(SquaredError(encode=True), Euclidean(), Identity(), Step(rate=Per("beta")))
    name: ClassVar[str] = "deep-delta"
    paper: ClassVar[str] = "Deep delta learning (Zhang et al. 2026)"
    equation: ClassVar[str] = "S <- S + beta u (w^T - u^T S),  u = f(S p) / |f(S p)|"
    differs: ClassVar[str] = "no short convolution before the read, which the first read makes asymmetric"
    bibtex: ClassVar[str] = """@article{zhang2026deep,
  title={Deep Delta Learning},
  author={Zhang, Yifan and Liu, Yifeng and Wang, Mengdi and Gu, Quanquan},
  journal={arXiv preprint arXiv:2601.00417},
  year={2026}
}"""
    dynamic_names: ClassVar[frozenset[str]] = frozenset({"gate", "target"})

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
        self.gate = nn.Parameter(torch.empty(d_model, **factory))
        self.gate_bias = nn.Parameter(torch.empty((), **factory))
        self.target = nn.Parameter(torch.empty(streams, d_model, **factory))
        self.target_bias = nn.Parameter(torch.empty(streams, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.streams > 1:
            self.pre.copy_(read_shares(self.layer_index, self.pre))
        else:
            self.pre.fill_(1.0)
        for parameter in (self.gate, self.gate_bias, self.target, self.target_bias):
            parameter.zero_()

    def coefficients(self, streams: Tensor) -> Coefficients:
        dtype = streams.dtype
        pre = self.pre.to(dtype)
        x = pre @ streams
        unit = torch.rsqrt(x.square().mean(-1) + EPS)
        beta = 2 * torch.sigmoid((x @ self.gate.to(dtype)) * unit + self.gate_bias.to(dtype))
        target = TARGET * torch.sigmoid(F.linear(x, self.target.to(dtype), self.target_bias.to(dtype)))
        return Coefficients(pre, {"k": target, "beta": beta})

    def written(self, y: Tensor, coefficients: Coefficients) -> Signal:
        return {**coefficients.signal, "v": y * torch.rsqrt(y.square().sum(-1, keepdim=True) + LEAST**2)}
