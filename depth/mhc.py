"""Streams that mix by a doubly stochastic matrix (mHC), and the same coefficients without mixing (iHC)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Birkhoff, Euclidean
from axes.core.monoids import GeneralLinear, Identity
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth.base import Coefficients, DepthMixer
from axes.depth.hyper_connections import relinked
from axes.depth.initial import near_identity, read_shares, require_several
from axes.errors import ShapeError

EPS = 1e-6
RELEASED_EPS = 1e-6  # of DeepSeek-V4 and of models after it: hc_eps of their configurations

MHC_BIBTEX = """@article{xie2025mhc,
  title={{mHC}: Manifold-Constrained Hyper-Connections},
  author={Xie, Zhenda and Wei, Yixuan and Cao, Huanqi and others},
  journal={arXiv preprint arXiv:2512.24880},
  year={2025}
}"""


Reduce = bool | Literal["per-token"]


class _Projected(DepthMixer):
    """Coefficients from one projection of all streams of a token,

        [p, o, r] = alpha * (RMSNorm(X^) phi) + b,   pre = sigmoid(p), post = 2 sigmoid(o), logits of R = r,

    X^ = vec(X) (n d). The norm's gain is part of phi, and the division by the root mean square comes after the product.
    At the start phi = 0, so that the network equals pre-norm: sum(pre) = 1, post = 1, R has unit row sums.
    learned_reduce="per-token" predicts the weights at the exit in the same way, with parameters of their own.
    """

    dynamic_names: ClassVar[frozenset[str]] = frozenset({"phi", "exit_phi"})
    widths: ClassVar[tuple[str, ...]] = ("n", "n", "nn")
    eps: float = 0.0  # added to what is read with

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 4,
        *,
        alpha: float = 0.01,
        learned_reduce: Reduce = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_several(type(self).__name__, streams)
        if learned_reduce not in (False, True, "per-token"):
            raise ShapeError(
                f"{type(self).__name__}: learned_reduce must be False, True or 'per-token', got {learned_reduce!r}"
            )
        super().__init__(d_model, layer_index, streams, learned_reduce=bool(learned_reduce), device=device, dtype=dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.initial_alpha = alpha
        self.sizes = [streams ** len(width) for width in self.widths]
        self.phi = nn.Parameter(torch.empty(sum(self.sizes), streams * d_model, **factory))
        self.alpha = nn.Parameter(torch.empty(len(self.sizes), **factory))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes), **factory))
        moves = learned_reduce == "per-token"
        self.exit_phi = nn.Parameter(torch.empty(streams, streams * d_model, **factory)) if moves else None
        self.exit_alpha = nn.Parameter(torch.empty(1, **factory)) if moves else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.phi.zero_()
        self.alpha.fill_(self.initial_alpha)
        if self.exit_phi is not None and self.exit_alpha is not None:
            self.exit_phi.zero_()
            self.exit_alpha.fill_(self.initial_alpha)
        like = torch.zeros(self.streams, dtype=torch.float64, device=self.bias.device)
        shares = read_shares(self.layer_index, like)
        start = [torch.logit(shares), like]
        if len(self.sizes) == 3:
            start.append(near_identity(like).flatten())
        self.bias.copy_(torch.cat(start))

    def project(self, streams: Tensor) -> list[Tensor]:
        """The logits of pre (..., n), post (..., n) and, where it is mixed, R (..., n n)."""
        return _projected(streams, self.phi, self.alpha, self.bias, self.sizes)

    def coefficients(self, streams: Tensor) -> Coefficients:
        read, write, *mix = self.project(streams)
        signal = {"k": 2 * torch.sigmoid(write)}
        if mix:
            signal["mix"] = mix[0].unflatten(-1, (self.streams, self.streams))
        return Coefficients(self._shares(read), signal)

    def leave(self, streams: Tensor) -> Tensor:
        if self.exit is None:
            return super().leave(streams)
        if self.exit_phi is None or self.exit_alpha is None:
            return self._shares(self.exit.to(streams.dtype))
        return self._shares(_projected(streams, self.exit_phi, self.exit_alpha, self.exit, [self.streams])[0])

    def _shares(self, logits: Tensor) -> Tensor:
        shares = torch.sigmoid(logits)
        return shares + self.eps if self.eps else shares


def _projected(streams: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, sizes: list[int]) -> list[Tensor]:
    """alpha_i (RMSNorm(vec X) phi_i) + bias_i, one for each of the sizes."""
    flat = streams.flatten(-2)
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    dynamic = ((flat @ phi.to(flat.dtype).mT) * scale).split(sizes, -1)
    static = bias.to(flat.dtype).split(sizes)
    return [a * x + b for a, x, b in zip(alpha.to(flat.dtype), dynamic, static, strict=True)]


@final
class MHC(_Projected):
    """X <- R X + post y,  R = Sinkhorn_20(logits): streams mix inside the polytope of doubly stochastic matrices.

    The mean of the streams passes unchanged both ways, and their differences shrink at every sublayer by the second
    singular value of R. The map is exact on rows and truncated on columns (`Birkhoff`).

    Args:
        alpha: initial factor of the dynamic part.
        eps: 0 is the paper's form; released models compute with `RELEASED_EPS`, added to pre, to the learned weights at
            the exit and inside of Sinkhorn (`Birkhoff(20, eps)`). Such a network starts n eps away from pre-norm.

    Behaviour at the ends: equal streams make R of the first sublayer irrelevant, and the mean at the exit makes that of
    the last one irrelevant (column sums are one); their logits have zero gradient, up to the truncation.

    Source: Xie et al. 2025, eqs. 7-9; eps from the code of DeepSeek-V4. Differs: biases start at an asymmetric read,
    post = 1 and off-diagonal logits of -8 (the paper does not print them); phi starts at 0; Sinkhorn in the log domain
    where eps = 0, rows last.
    """

    update: StateUpdate = StateUpdate(
        Alignment(), Euclidean(), GeneralLinear(Per("mix", "mix", "real"), Birkhoff(20)), Step()
    )
    name: ClassVar[str] = "mhc"
    paper: ClassVar[str] = "mHC: manifold-constrained hyper-connections (Xie et al. 2025)"
    equation: ClassVar[str] = "X <- R X + post f(pre X),  R = Sinkhorn_20(alpha RMSNorm(X) phi + b)"
    differs: ClassVar[str] = "initial biases, which the paper does not print: asymmetric read, post = 1, R near I"
    bibtex: ClassVar[str] = MHC_BIBTEX

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 4,
        *,
        alpha: float = 0.01,
        eps: float = 0.0,
        learned_reduce: Reduce = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if eps:
            self.update, self.eps = relinked(self.update, eps=eps), eps
        super().__init__(
            d_model, layer_index, streams, alpha=alpha, learned_reduce=learned_reduce, device=device, dtype=dtype
        )


@final
class IdentityMixing(_Projected):
    """X <- X + post y: the coefficients of mHC with R = I, the baseline that tells what mixing adds.

    Source: Xie et al. 2025, ablation; shipped at four streams. Differs: asymmetric initial read instead of pre = 1/n.
    """

    widths: ClassVar[tuple[str, ...]] = ("n", "n")

    update: StateUpdate = StateUpdate(Alignment(), Euclidean(), Identity(), Step())
    name: ClassVar[str] = "ihc"
    paper: ClassVar[str] = "mHC: manifold-constrained hyper-connections (Xie et al. 2025), ablation without mixing"
    equation: ClassVar[str] = "X <- X + post f(pre X)"
    differs: ClassVar[str] = "the first read is asymmetric; with pre = 1/n only a random phi would separate the streams"
    bibtex: ClassVar[str] = MHC_BIBTEX
