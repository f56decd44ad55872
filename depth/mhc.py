"""Streams that mix by a doubly stochastic matrix (mHC), and the same coefficients without mixing (iHC)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Birkhoff, Euclidean, Geometry, Permutations
from axes.core.monoids import GeneralLinear, Identity
from axes.core.rates import Per, Signal, extent
from axes.core.state_update import StateUpdate
from axes.depth.hyper_connections import relinked
from axes.depth.initial import OFF_DIAGONAL, read_shares, require_several
from axes.depth.projection import Projected, Projection
from axes.errors import ShapeError

RELEASED_EPS = 1e-6  # of DeepSeek-V4 and of models after it: hc_eps of their configurations

MHC_BIBTEX = """@article{xie2025mhc,
  title={{mHC}: Manifold-Constrained Hyper-Connections},
  author={Xie, Zhenda and Wei, Yixuan and Cao, Huanqi and others},
  journal={arXiv preprint arXiv:2512.24880},
  year={2025}
}"""


Reduce = bool | Literal["per-token"]


class _Shares(Projected):
    """Coefficients from one projection of all streams of a token,

        [p, o, r] = alpha * (RMSNorm(X^) phi) + b,   pre = sigmoid(p), post = 2 sigmoid(o), logits of R = r,

    as many r as the tuple asks for. X^ = vec(X) (n d). The norm's gain is part of phi, and the division by the root
    mean square comes after the product. At the start phi = 0, so that the network equals pre-norm: sum(pre) = 1,
    post = 1, R has unit row sums. learned_reduce="per-token" predicts the weights at the exit in the same way, with
    parameters of their own.
    """

    dynamic_names: ClassVar[frozenset[str]] = frozenset({"phi", "exit_phi"})
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
        self.mixing = {rate.name: extent(rate, streams, d_model) for rate in self.update.demands()}
        self.sizes = [streams, streams, *map(math.prod, self.mixing.values())]
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
        links = (link for link in self.update.parts().monoid.neutral().values() if isinstance(link, Geometry))
        near_identity = [link.identity_logits(like, OFF_DIAGONAL).flatten() for link in links]
        self.bias.copy_(torch.cat([torch.logit(shares), like, *near_identity]))

    def projection(self) -> Projection:
        return Projection(self.phi, self.alpha, self.bias[None], writes=True, floor=self.eps)

    def signal(self, k: Tensor, rest: Tensor) -> Signal:
        """k, and logits of the tuple's own in their shapes."""
        rest = rest.squeeze(-2)
        each = rest.split(self.sizes[2:], -1) if len(self.mixing) > 1 else (rest,)
        shaped = zip(self.mixing.items(), each, strict=False)  # without mixing there is no rest
        return {"k": k, **{name: logits.unflatten(-1, shape) for (name, shape), logits in shaped}}

    def exit_projection(self) -> Projection | None:
        if self.exit is None or self.exit_phi is None or self.exit_alpha is None:
            return None
        return Projection(self.exit_phi, self.exit_alpha, self.exit[None], floor=self.eps)

    def leave(self, streams: Tensor) -> Tensor:
        learned = self.exit is not None and self.exit_phi is None
        return super().leave(streams) + (self.eps if learned else 0.0)


@final
class MHC(_Shares):
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
class MHCLite(_Shares):
    """X <- R X + post y,  R = sum_p softmax(logits)_p P_p: the same polytope, from one logit a permutation.

    Row and column sums are 1 to rounding at any logits, where Sinkhorn's iterations stop short of it. There are n!
    permutations: 24 for four streams, and more than five streams are dear.

    Args:
        alpha: initial factor of the dynamic part.

    Start: identity logit 0, the others -8. Ends as in `MHC`: R of the first and of the last sublayer has no effect.

    Source: Yang and Gao 2026. Differs: biases start at an asymmetric read and post = 1; phi starts at 0.
    """

    update: StateUpdate = StateUpdate(
        Alignment(), Euclidean(), GeneralLinear(Per("mix", "permutation", "real"), Permutations()), Step()
    )
    name: ClassVar[str] = "mhc-lite"
    paper: ClassVar[str] = "mHC-lite: you don't need 20 Sinkhorn-Knopp iterations (Yang and Gao 2026)"
    equation: ClassVar[str] = "X <- R X + post f(pre X),  R = sum_p softmax(alpha RMSNorm(X) phi + b)_p P_p"
    differs: ClassVar[str] = "initial biases: asymmetric read, post = 1"
    bibtex: ClassVar[str] = """@article{yang2026mhclite,
  title={{mHC-lite}: You Don't Need 20 {Sinkhorn-Knopp} Iterations},
  author={Yang, Yongyi and Gao, Jianyang},
  journal={arXiv preprint arXiv:2601.05732},
  year={2026}
}"""


@final
class IdentityMixing(_Shares):
    """X <- X + post y: the coefficients of mHC with R = I, the baseline that tells what mixing adds.

    Source: Xie et al. 2025, ablation; shipped at four streams. Differs: asymmetric initial read instead of pre = 1/n.
    """

    update: StateUpdate = StateUpdate(Alignment(), Euclidean(), Identity(), Step())
    name: ClassVar[str] = "ihc"
    paper: ClassVar[str] = "mHC: manifold-constrained hyper-connections (Xie et al. 2025), ablation without mixing"
    equation: ClassVar[str] = "X <- X + post f(pre X)"
    differs: ClassVar[str] = "the first read is asymmetric; with pre = 1/n only a random phi would separate the streams"
    bibtex: ClassVar[str] = MHC_BIBTEX
