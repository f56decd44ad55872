"""EKFAC: the natural gradient in the eigenvectors of the Kronecker factors, with eigenvalues of its own."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Unpack, final

from axes.core.algorithms import Held, Momentum, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Eigenbasis, RotatedWhiten
from axes.core.monoids import Decay, Scalar, Zero
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Options, Params
from axes.optim.engine.layers import require_reduction
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, average, unit
from axes.optim.rules.matrix import beside_adamw
from axes.optim.rules.natural_gradient import FisherFactored


@final
class EKFAC(FisherFactored):
    """Eigenvalue-corrected natural gradient:  W = W - lr Q_G [(Q_G^T g Q_A) / (s + damping)] Q_A^T.

    Q_G and Q_A are the eigenvectors of the factors of `NaturalGradient`, G of the per-example gradients delta of a
    layer's outputs and A of its inputs x, computed at every `refresh`-th step.  s is the mean over examples of
    (Q_G^T delta x^T Q_A)^2, entry by entry: the diagonal of the layer's Fisher block in this basis, which no other
    diagonal is closer to in Frobenius norm.  G, A and s are averages over steps with `beta`; s goes on in new
    bases as it is.  As with `NaturalGradient`, the Fisher matrix is the empirical one unless passes on labels drawn
    from the model are run inside `with optimizer.fisher_pass():`.

    The hidden nn.Linear weights take this rule; embeddings, output head, biases and all other parameters take AdamW.

    Args:
        params: the model, or parameters or groups ("ekfac", "adamw") together with model=.
        lr: of both rules, AdamW's being lr * aux_lr_scale.
        beta: retention of G, A and s between steps.
        damping: added to s.
        refresh: steps between two decompositions.
        momentum: averages the whitened gradients.
        weight_decay: decoupled.
        reduction: whether the loss is the "mean" or the "sum" over examples.

    Source: George et al. 2018, algorithm 1 (with the running average of their section 4.2). Differs: empirical Fisher
    unless asked, biases are not appended to the weights, a first step has its own statistics.

    Raises:
        AxesError: beta, momentum, damping, refresh or reduction that make no sense.
    """

    name: ClassVar[str] = "ekfac"
    paper: ClassVar[str] = "George et al. 2018"
    equation: ClassVar[str] = "algorithm 1, running averages of section 4.2"
    differs: ClassVar[str] = (
        "empirical Fisher unless passes on sampled labels are run; biases, embeddings and output head take AdamW in "
        "the same optimizer"
    )
    bibtex: ClassVar[str] = """@inproceedings{george2018fast,
  title = {Fast Approximate Natural Gradient Descent in a {Kronecker}-factored Eigenbasis},
  author = {George, Thomas and Laurent, C{\\'e}sar and Bouthillier, Xavier and Ballas, Nicolas and Vincent, Pascal},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2018}
}"""
    default_lr: ClassVar[float] = 0.1

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        beta: float = 0.95,
        damping: float = 1e-3,
        refresh: int = 10,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        reduction: Literal["mean", "sum"] = "mean",
        aux_lr_scale: float = 0.2,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        require_reduction("EKFAC", reduction)
        own = {
            "lr": lr,
            "beta": beta,
            "damping": damping,
            "refresh": refresh,
            "momentum": momentum,
            "weight_decay": weight_decay,
        }
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("ekfac", EKFAC.declare, own, *aux), **options)
        self._reduction = reduction

    @staticmethod
    def declare(beta: float = 0.95, damping: float = 1e-3, refresh: int = 10, momentum: float = 0.9) -> StateUpdate:
        """The tuple."""
        unit("EKFAC", beta=beta, momentum=momentum)
        if not damping > 0.0:
            raise AxesError(f"EKFAC: damping must be positive, got {damping}")
        step = Step(1.0 - beta, at=Held(refresh))
        factors = tuple(StateUpdate(Linear(of), Eigenbasis(), Scalar(beta), step) for of in ("error", "key"))
        moment = StateUpdate(**average(beta, "eigen-fisher"))
        direction = StateUpdate(Linear(), RotatedWhiten((*factors, moment), 1.0, damping), Zero())
        via: tuple[Any, ...] = (direction, Momentum(momentum, "ema", debias=True)) if momentum else (direction,)
        return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=via))

    update = declare()
