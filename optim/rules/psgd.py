"""PSGD with Kronecker factors: two factors are fitted, in training, until what they whiten is white.

    PSGDKron   W = (1 - lr wd) W - lr P_L EMA(g) P_R,   P = (I - r E) P (I - r E),   E = mean of white products - I

Shampoo computes such factors from sums of g g^T, each side for itself; here each side sees what both make of g.
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, final

from axes.core.algorithms import Held, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import FittedFactor, Kronecker
from axes.core.geometry.preconditioners import On
from axes.core.monoids import Decay, Zero
from axes.core.state_update import StateUpdate
from axes.linalg.matrix_roots import Precision
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, average, unit
from axes.optim.rules.matrix import beside_adamw


@final
class PSGDKron(Optimizer):
    """PSGD-Kron:  W = (1 - lr weight_decay) W - lr P_L m P_R,  m = average of g with `beta`, bias-corrected.

    P_L and P_R are fitted to whiten the gradients: with y = P_L g P_R, every step moves them against
    E_L = y y^T / columns + damping P_L^2 - I and its mirror, until the mean of both is zero. For gradients whose
    covariance is a Kronecker product they become its inverse square root, which no pair of one-sided statistics does.

    Args:
        params: a model, named parameters, or groups that name their rule ("psgd-kron" or "adamw").
        lr: of both rules.
        beta: of the average of gradients; 0: g itself.
        fit_rate: of the factors, in (0, 1]: smaller is slower and less noisy.
        damping: bounds the eigenvalues of each factor by damping^{-1/2}, so the direction by g / damping.
        refresh: the factors move at every so many steps.
        precision: of the products, "input" (float32), "bfloat16x3" (16 bits of each factor) or "tf32".
        weight_decay: of the matrices.
        max_side: rows or columns more than these have no factor: the matrix is whitened from the other side alone. One
            longer in both goes to AdamW. None: no limit.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: AdamW for embeddings, output head, vectors and scalars.

    Source: Li 2015, the criterion for gradient noise; Li 2018, section 4. Differs: see `axes.geometry.FittedFactor`.

    Raises:
        AxesError: beta, fit_rate, damping or refresh that make no sense.
    """

    name: ClassVar[str] = "psgd-kron"
    paper: ClassVar[str] = "Li 2015; Li 2018"
    equation: ClassVar[str] = "Li 2018, section 4 (Kronecker products)"
    differs: ClassVar[str] = (
        "symmetric factors that move by a congruence, fitted to the gradients themselves; the damping is added to the "
        "criterion instead of noise to the gradients; embeddings, output head, vectors and scalars take AdamW in the "
        "same optimizer"
    )
    bibtex: ClassVar[str] = """@article{li2018preconditioned,
  title = {Preconditioner on Matrix {Lie} Group for {SGD}},
  author = {Li, Xi-Lin},
  year = {2018},
  eprint = {1809.10232},
  archiveprefix = {arXiv}
}"""
    default_lr: ClassVar[float] = 2e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        beta: float = 0.9,
        fit_rate: float = 0.1,
        damping: float = 1e-9,
        refresh: int = 1,
        precision: Precision = "input",
        weight_decay: float = 1e-2,
        max_side: int | None = 8192,
        aux_lr_scale: float = 1.0,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "weight_decay": weight_decay,
            "beta": beta,
            "fit_rate": fit_rate,
            "damping": damping,
            "refresh": refresh,
            "precision": precision,
            "max_side": max_side,
            "sides": "both",
        }
        auxiliary = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("psgd-kron", PSGDKron.declare, own, *auxiliary), **options)

    @staticmethod
    def declare(
        beta: float = 0.9,
        fit_rate: float = 0.1,
        damping: float = 1e-9,
        refresh: int = 1,
        precision: Precision = "input",
        sides: On = "both",
    ) -> StateUpdate:
        """The tuple. sides: which of them have a factor."""
        unit("PSGDKron", beta=beta)
        at = Step(at=Held(refresh))
        fitted = FittedFactor(fit_rate, damping, precision, 0.25 if sides == "both" else 0.5)
        factors = tuple(
            StateUpdate(Linear("white-left" if rows else "white-right", precision), fitted, Zero(), at)
            for rows in (True, False)
            if sides in ("both", "rows" if rows else "columns")
        )
        kept: dict[str, Any] = average(beta) if beta > 0.0 else {"cost": Linear(), "monoid": Zero()}
        direction = StateUpdate(h=Kronecker(factors, precision, sides), **kept)
        return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=(direction,)))

    update = declare()
