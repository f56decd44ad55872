"""Dion: Muon of low rank, whose buffer keeps what a step did not use.

    B = M + g,  P R^T near B by one power iteration,  M = B - (1 - momentum) P R^T
    W = (1 - lr wd) W - lr s P Q^T,  Q the columns of R at length one
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Unpack, final

from axes.core.algorithms import Held, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import LowRank, PowerFactors
from axes.core.monoids import Decay, Zero
from axes.core.state_update import StateUpdate
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, unit
from axes.optim.rules.matrix import beside_adamw

Scale = Literal["match_rms_adamw", "spectral"] | None


@final
class Dion(Optimizer):
    """Dion:  B = M + g,  M = B - (1 - momentum) P R^T,  W = (1 - lr weight_decay) W - lr s P Q^T.

    P R^T is near the best matrix of rank r for B: P is an orthonormal basis of B Q with the Q of the step before, R =
    B^T P, and Q the columns of R at length one. What the step left out of B stays in the buffer whole, and what it used
    decays. s is `scale`: "spectral" sqrt(rows / columns), "match_rms_adamw" as in Muon, or None (1). The state is a
    number an entry, and P and R.

    Args:
        params: a model, named parameters, or groups that name their rule ("dion" or "adamw").
        lr: of both rules.
        momentum: what stays of the part that was used (mu).
        divisor: of the smaller side: the rank is what it leaves, at least 1.
        scale: see above. weight_decay: of the matrices.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: AdamW for embeddings, output head, vectors and scalars.

    Source: Ahn et al. 2025, algorithms 1 and 2. Differs: the first Q is a cosine transform, where the authors' is
    random; columns of R that are rounding beside the largest one count as zero; every process has the whole matrix.
    """

    name: ClassVar[str] = "dion"
    paper: ClassVar[str] = "Ahn et al. 2025 (Dion)"
    equation: ClassVar[str] = "algorithms 1 and 2"
    differs: ClassVar[str] = (
        "the first right factor is the first columns of a cosine transform and not random; columns that are rounding "
        "beside the largest one count as zero; not the distributed form: a matrix is whole where it is stepped; "
        "embeddings, output head, vectors and scalars take AdamW in the same optimizer"
    )
    bibtex: ClassVar[str] = """@misc{ahn2025dion,
  title = {Dion: Distributed Orthonormalized Updates},
  author = {Ahn, Kwangjun and Xu, Byron and Abreu, Natalie and Fan, Ying and Magakyan, Gagik and Sharma, Pratyusha and
            Zhan, Zheng and Langford, John},
  year = {2025},
  eprint = {2504.05295},
  archiveprefix = {arXiv}
}"""
    default_lr: ClassVar[float] = 1e-2

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        momentum: float = 0.95,
        weight_decay: float = 1e-2,
        divisor: int = 2,
        scale: Scale = "spectral",
        aux_lr_scale: float = 1.0,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "divisor": divisor, "scale": scale}
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("dion", Dion.declare, own, *aux), **options)

    @staticmethod
    def declare(momentum: float = 0.95, divisor: int = 2, scale: Scale = "spectral") -> StateUpdate:
        """The tuple."""
        unit("Dion", momentum=momentum)
        factors = StateUpdate(Linear("state"), PowerFactors(divisor), Zero(), Step(at=Held(1)))
        direction = StateUpdate(Linear(), LowRank((factors,), scale), algorithm=Step(feedback=1.0 - momentum))
        return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=(direction,)))

    update = declare()
