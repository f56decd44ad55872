"""SOAP: Adam in the eigenbasis of Shampoo's statistics.

    W = (1 - lr wd) W + lr * Q_L [ (Q_L^T m Q_R) / (sqrt(v) + eps) ] Q_R^T

m = EMA(u), L = EMA(u u^T), R = EMA(u^T u), Q their eigenvectors, v = EMA((Q_L^T u Q_R)^2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack, final

from axes.algorithms import Step
from axes.costs import Given
from axes.errors import AxesError
from axes.geometry import Whiten
from axes.monoids import Decay
from axes.optim.base import Optimizer, Options, Params, Rule
from axes.optim.first_order import LR, WEIGHT_DECAY, AdamW, average, unit
from axes.optim.matrix import auxiliary_defaults
from axes.state_update import StateUpdate


@final
class SOAP(Optimizer):
    """SOAP: AdamW on the gradient rotated into the eigenbases of L = EMA(g g^T) and R = EMA(g^T g), and back.

    The bases are those of the current statistics in every step, from symmetric eigendecompositions of cost
    rows^3 + columns^3; m is kept in the parameter's own coordinates and rotated when it is read, and v stays as it was
    when the basis turns. A young basis turns much, so the second step may be 10 to 20 times lr in an entry (about 2 in
    the authors' code, which acts in the basis before this gradient): warm lr up. Where gradients have low rank,
    rounding in the directions they leave out is divided by eps: in float32 an eps of 1e-8 is not above it.

    Args:
        params: a model, named parameters, or groups that name their rule ("soap" or "adamw").
        lr: of both rules.
        betas, eps, weight_decay: of Adam in the eigenbasis.
        shampoo_beta: retention of L and R.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: AdamW for embeddings, output head, vectors and scalars.

    Source: Vyas et al. 2024, algorithm 3 with f = 1. Differs: the first step moves the weights, where the authors' code
    only fills the statistics; the basis is exact and that of this step's statistics, where theirs is one step of power
    iteration and QR from the last basis, taken after the update.
    """

    name: ClassVar[str] = "soap"
    paper: ClassVar[str] = "Vyas et al. 2024"
    equation: ClassVar[str] = "algorithm 3 with f = 1"
    differs: ClassVar[str] = (
        "an exact eigenbasis of the current statistics in every step instead of one power iteration after it; the "
        "first step moves the weights, and the next few are several times larger; embeddings, output head, vectors and "
        "scalars take AdamW in the same optimizer"
    )
    bibtex: ClassVar[str] = """@misc{vyas2024soap,
  title = {{SOAP}: Improving and Stabilizing {Shampoo} using {Adam}},
  author = {Vyas, Nikhil and Morwani, Depen and Zhao, Rosie and Kwun, Mujin and Shapira, Itai and Brandfonbrener, David
            and Janson, Lucas and Kakade, Sham},
  year = {2024},
  eprint = {2409.11321},
  archiveprefix = {arXiv}
}"""
    default_lr: ClassVar[float] = 5e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        aux_lr_scale: float = 1.0,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "shampoo_beta": shampoo_beta, "eps": eps}
        auxiliary = auxiliary_defaults(lr, aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        rules: Mapping[str, Rule] = {"soap": SOAP.declare, "adamw": AdamW.declare}
        super().__init__(params, rules, {"soap": own, "adamw": auxiliary}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.95, 0.95), shampoo_beta: float = 0.95, eps: float = 1e-8
    ) -> StateUpdate:
        """The tuple."""
        unit("SOAP", beta1=betas[0], beta2=betas[1], shampoo_beta=shampoo_beta)
        if not eps > 0.0:
            raise AxesError(f"SOAP: eps must be positive, got {eps}")
        factors = (
            StateUpdate(**average(shampoo_beta, "left", debias=False)),
            StateUpdate(**average(shampoo_beta, "right", debias=False)),
        )
        second_moment = StateUpdate(**average(betas[1], "eigen-square"))
        rotated = Whiten((*factors, second_moment), "eigenbasis", power=0.5, eps=eps)
        direction = StateUpdate(h=rotated, **average(betas[0]))
        return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=(direction,)))

    update = declare()
