"""Shampoo: a matrix rule that whitens rows and columns, with AdamW for all other parameters.

    W = (1 - lr wd) W + lr * L^{-p} EMA(u) R^{-p},  L and R sums or averages of u u^T and u^T u
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Unpack, final

from axes.core.algorithms import Held, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Geometry, Graft, InverseRoot, Kronecker, Whiten
from axes.core.geometry.preconditioners import On
from axes.core.monoids import Decay, Scalar, Zero
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, UnknownName
from axes.linalg.matrix_roots import Precision
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, average, positive, unit
from axes.optim.rules.matrix import beside_adamw

Root = Literal["eigh", "newton"]
Grafted = Literal["sgd", "momentum", "adagrad", "rmsprop", "adam"] | None


def _grafted(graft: str, betas: tuple[float, float], eps: float) -> StateUpdate:
    """The filter whose norm a step takes."""
    rules = ("sgd", "momentum", "adagrad", "rmsprop", "adam")
    if graft not in rules:
        raise UnknownName("graft of Shampoo", graft, rules)
    averaged = graft in ("momentum", "adam")
    if averaged and betas[0] == 0.0 or graft in ("rmsprop", "adam") and betas[1] == 1.0:
        raise AxesError(f"Shampoo: graft {graft!r} needs an average of its own: betas {betas} do not average")
    kept: dict[str, Any] = average(betas[0]) if averaged else {"cost": Linear(), "monoid": Zero()}
    if graft in ("sgd", "momentum"):
        return StateUpdate(**kept)
    second = StateUpdate(Linear("square")) if graft == "adagrad" else StateUpdate(**average(betas[1], "square"))
    return StateUpdate(h=Whiten((second,), "diagonal", 0.5, eps), **kept)


@final
class Shampoo(Optimizer):
    """Shampoo:  L = L + g g^T,  R = R + g^T g,  W = (1 - lr weight_decay) W - lr (L + d I)^{-p} m (R + d I)^{-p}.

    betas: m is a bias-corrected average of g with betas[0] (0: m = g). betas[1] = 1 sums the statistics (AdaGrad),
    less than 1 averages them, bias-corrected.  exponent p: 1/4, or 1/2 (the Kronecker approximation of full AdaGrad's
    square root).  d = eps + damping |A| is added to the eigenvalues of a statistic A, |A| between the largest of them
    and a little more (`axes.core.geometry.InverseRoot`). What a gradient of low rank leaves out is rounding, of a size
    relative to |A|, and its root the largest of all: at rank 1 the paper's absolute eps (eps=1e-12, damping=0) puts
    float32 steps 2e-2 (8 x 8) to 1e-1 (256 x 128) away from exact ones with sums, and 1 to 4 with averages and exponent
    1/2; relative damping 2e-5 and 2e-2.

    The roots are computed at steps 1, 1 + refresh, ... and kept in between, where a step is matrix products alone.
    method "eigh" decomposes the statistics: exact, and slow for large matrices. "newton" is made of matrix products; it
    takes exponents 1, 1/2, 1/3, ... and a damping of at least 1e-7, 1e-4 with refresh_precision "bfloat16x3", 1e-2 with
    "tf32". A root that fails (statistics that are not finite, or too ill-conditioned) is not taken: the last good one
    stays, and `report()` counts it. On a GPU, refresh=10 and method="newton" are many times faster.

    graft takes the norm of every matrix's step from another rule on the same gradients: "sgd"
    (g), "momentum" (average of g), "adagrad" (g over the root of the sum of g^2), "rmsprop" (over that of the average)
    or "adam" (m likewise); its betas are Shampoo's, its eps is graft_eps.

    Args:
        params: a model, named parameters, or groups that name their rule ("shampoo" or "adamw").
        lr: of both rules.
        betas, exponent, eps, damping, refresh, method, graft, weight_decay: see above.
        precision: of the products of every step, "input" (float32), "bfloat16x3" (16 bits of each factor) or "tf32".
        refresh_precision: of those that a refresh by "newton" takes.
        graft_eps: added to the grafted rule's root.
        max_side: rows or columns more than these have no statistic: the matrix is whitened from the other side alone,
            with exponent 2 p. One longer in both goes to AdamW. None: no limit.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: AdamW for embeddings, output head, vectors and scalars.

    Source: Gupta et al. 2018, algorithm 1 (matrices: exponent 1/4, sums). Differs: momentum averages gradients before
    they are whitened; the damping is relative and added to the eigenvalues, where the text starts its sums at eps I; no
    blocking. Grafting: Agarwal et al. 2020, algorithm 1. Newton iterations: Guo and Higham 2006.

    Raises:
        AxesError: betas, graft or options that make no sense together.
    """

    name: ClassVar[str] = "shampoo"
    paper: ClassVar[str] = "Gupta, Koren and Singer 2018"
    equation: ClassVar[str] = "algorithm 1"
    differs: ClassVar[str] = (
        "momentum before whitening; a damping relative to the largest eigenvalue, where the text has a constant; "
        "averaged statistics, exponent 1/2, a refresh interval, roots by Newton iterations "
        "and grafting are options; embeddings, output head, vectors and scalars take AdamW in the same optimizer"
    )
    bibtex: ClassVar[str] = """@inproceedings{gupta2018shampoo,
  title = {Shampoo: Preconditioned Stochastic Tensor Optimization},
  author = {Gupta, Vineet and Koren, Tomer and Singer, Yoram},
  booktitle = {International Conference on Machine Learning},
  year = {2018}
}"""
    default_lr: ClassVar[float] = 0.1

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.9, 1.0),
        exponent: float = 0.25,
        eps: float = 0.0,
        weight_decay: float = 0.0,
        graft: Grafted = None,
        graft_eps: float = 1e-8,
        refresh: int = 1,
        method: Root = "eigh",
        damping: float = 1e-6,
        precision: Precision = "input",
        refresh_precision: Precision = "input",
        max_side: int | None = 8192,
        aux_lr_scale: float = 0.15,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "exponent": exponent,
            "eps": eps,
            "graft": graft,
            "graft_eps": graft_eps,
            "refresh": refresh,
            "method": method,
            "damping": damping,
            "precision": precision,
            "refresh_precision": refresh_precision,
            "max_side": max_side,
            "sides": "both",
        }
        auxiliary = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("shampoo", Shampoo.declare, own, *auxiliary), **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.9, 1.0),
        exponent: float = 0.25,
        eps: float = 0.0,
        graft: Grafted = None,
        graft_eps: float = 1e-8,
        refresh: int = 1,
        method: Root = "eigh",
        damping: float = 1e-6,
        precision: Precision = "input",
        refresh_precision: Precision = "input",
        sides: On = "both",
    ) -> StateUpdate:
        """The tuple. sides: which of them are whitened; one alone takes the power that two share."""
        unit("Shampoo", beta1=betas[0])
        positive("Shampoo", graft_eps=graft_eps)
        averaged = betas[1] != 1.0
        if averaged:
            unit("Shampoo", beta2=betas[1])
            if betas[1] == 0.0:
                raise AxesError("Shampoo: beta2 must be positive, 1 for a sum: an average of one datum is no statistic")
        step = Step(1.0 - betas[1] if averaged else 1.0, debias=averaged, at=Held(refresh))
        root = InverseRoot(exponent if sides == "both" else 2 * exponent, eps, damping, method, refresh_precision)
        statistics = tuple(
            StateUpdate(Linear("left" if rows else "right", precision), root, Scalar(betas[1]), step)
            for rows in (True, False)
            if sides in ("both", "rows" if rows else "columns")
        )
        whitened: Geometry = Kronecker(statistics, precision, sides)
        if graft is not None:
            whitened = Graft(whitened, _grafted(graft, betas, graft_eps))
        if betas[0] > 0.0:  # a norm that is grafted on drops the bias
            direction = StateUpdate(h=whitened, **average(betas[0], debias=graft is None))
        else:
            direction = StateUpdate(Linear(), whitened, Zero())
        return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=(direction,)))

    update = declare()
