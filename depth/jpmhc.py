"""Streams that mix by a rotation: no difference between streams is ever lost (JPmHC)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Cayley, Euclidean
from axes.core.monoids import GeneralLinear
from axes.core.rates import Per, Signal
from axes.core.state_update import StateUpdate
from axes.depth.hyper_connections import relinked
from axes.depth.initial import read_shares, require_several
from axes.depth.projection import Projected, Projection
from axes.errors import ShapeError

LOGITS = Per("mix", "mix", "real")

BIBTEX = """@article{sengupta2026jpmhc,
  title={{JPmHC} Dynamical Isometry via Orthogonal Hyper-Connections},
  author={Sengupta, Biswa and Wang, Jinhua and Brunswic, Leo},
  journal={arXiv preprint arXiv:2602.18308},
  year={2026}
}"""


class _Rotated(Projected):
    """Coefficients from one projection of all streams of a token, three n x n matrices:

        [P, O, H] = LayerNorm(vec X) phi + b
        pre  = mean over rows of softmax_rows(P),   sum(pre) = 1
        post = sum over columns of softmax_columns(O),   sum(post) = n
        logits of R = H

    Start: phi = 0, P concentrated on column l mod n, O = H = 0: post = 1, R = I, and the network equals pre-norm.
    """

    dynamic_names: ClassVar[frozenset[str]] = frozenset({"phi"})
    closed_up_to: ClassVar[int]
    least: ClassVar[int]

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 4,
        *,
        method: Literal["closed", "solve"] | None = None,
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        who = type(self).__name__
        require_several(who, streams, self.least)
        if method not in (None, "closed", "solve"):
            raise ShapeError(f"{who}: method must be 'closed', 'solve' or None, got {method!r}")
        if method == "closed" and streams > self.closed_up_to:
            raise ShapeError(f"{who}: the closed form takes at most {self.closed_up_to} streams, got {streams}")
        if method == "solve" or streams > self.closed_up_to:
            self.update = relinked(self.update, method="solve")
        super().__init__(d_model, layer_index, streams, learned_reduce=learned_reduce, device=device, dtype=dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.phi = nn.Parameter(torch.empty(3 * streams**2, streams * d_model, **factory))
        self.bias = nn.Parameter(torch.empty(3 * streams**2, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.phi.zero_()
        like = torch.zeros(self.streams, dtype=torch.float64, device=self.bias.device)
        rows = read_shares(self.layer_index, like).log().repeat(self.streams)
        self.bias.copy_(torch.cat((rows - rows.amin(), rows.new_zeros(2 * len(rows)))))

    def projection(self) -> Projection:
        scale = torch.ones_like(self.bias[:1])
        return Projection(self.phi, scale, self.bias[None], "softmax", writes=True, centred=True)

    def signal(self, k: Tensor, rest: Tensor) -> Signal:
        return {"k": k, "mix": rest.squeeze(-2).unflatten(-1, (self.streams, self.streams))}


@final
class JPmHC(_Rotated):
    """X <- R X + post y,  R = Cayley(logits) in SO(n).

    All singular values of products of R are 1, but their row sums are not: the mean of the streams rotates into their
    differences.

    Args:
        method: how the Cayley map is computed: "closed" (up to four streams), "solve", or the first that is possible.

    Source: Sengupta et al. 2026. Differs: the exact Cayley map, where the paper takes two steps of a fixed-point
    iteration, orthogonal only for small logits; a bias, which the paper does not have, and an asymmetric read at the
    start: without it zero logits give no gradient at all.
    """

    closed_up_to: ClassVar[int] = 4
    least: ClassVar[int] = 2

    update: StateUpdate = StateUpdate(
        Alignment(), Euclidean(), GeneralLinear(LOGITS, Cayley(0.1, "full", "closed")), Step()
    )
    name: ClassVar[str] = "jpmhc"
    paper: ClassVar[str] = "JPmHC dynamical isometry via orthogonal hyper-connections (Sengupta et al. 2026)"
    equation: ClassVar[str] = "X <- R X + post f(pre X),  R = (I + A)^-1 (I - A),  A = -(alpha/2) (H - H^T)"
    differs: ClassVar[str] = "exact Cayley map instead of two fixed-point steps; biases, with an asymmetric first read"
    bibtex: ClassVar[str] = BIBTEX


@final
class JPmHCMeanPreserving(_Rotated):
    """X <- R X + post y,  R a rotation of the complement of the all-ones vector: row and column sums are 1.

    Doubly stochastic without the sign condition: the mean of the streams passes unchanged, as in mHC, and differences
    keep their size, as in JPmHC. As in mHC, the R of the first and of the last sublayer have no effect.

    Args:
        method: how the Cayley map is computed: "closed" (up to five streams), "solve", or the first that is possible.

    Source: ours, after Sengupta et al. 2026.
    """

    closed_up_to: ClassVar[int] = 5
    least: ClassVar[int] = 3

    update: StateUpdate = StateUpdate(
        Alignment(), Euclidean(), GeneralLinear(LOGITS, Cayley(0.1, "mean-preserving", "closed")), Step()
    )
    name: ClassVar[str] = "jpmhc-mean-preserving"
    paper: ClassVar[str] = "after JPmHC (Sengupta et al. 2026)"
    equation: ClassVar[str] = "X <- R X + post f(pre X),  R = 1 1^T / n + U Cayley(U^T A U) U^T,  U^T 1 = 0"
    differs: ClassVar[str] = "not in the paper: its rotation moves the mean of the streams, this one fixes it"
    bibtex: ClassVar[str] = BIBTEX
