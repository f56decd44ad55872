"""SOAP: Adam in the eigenbasis of Shampoo's statistics.

    W = (1 - lr wd) W + lr * Q_L [ (Q_L^T m Q_R) / (sqrt(v) + eps) ] Q_R^T

m = EMA(u), L = EMA(u u^T), R = EMA(u^T u), Q their eigenvectors as they were at the last refresh, v =
EMA((Q_L^T u Q_R)^2).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Unpack, final

from axes.core.algorithms import Held, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Eigenbasis, RotatedWhiten
from axes.core.geometry.preconditioners import On
from axes.core.monoids import Decay, Scalar
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.linalg.matrix_roots import Precision
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, average, unit
from axes.optim.rules.matrix import beside_adamw

Basis = Literal["power-qr", "eigh"]
Orthonormal = Literal["cholesky", "householder"]


@final
class SOAP(Optimizer):
    """SOAP: AdamW on the gradient rotated into the eigenbases of L = EMA(g g^T) and R = EMA(g^T g), and back.

    basis "power-qr" begins with the eigenvectors of the first statistics; after every `refresh` gradients it takes one
    step of orthogonal iteration from the last basis, which serves from the next gradient on. Its orthonormalisation is
    made of matrix products (qr="cholesky") or torch.linalg.qr ("householder"). basis "eigh" decomposes the statistics
    at steps 1, 1 + refresh, ..., this step's gradient included: exact, and slow for large matrices. Between refreshes a
    step is matrix products alone. A basis that fails (statistics that are not finite, or too ill-conditioned) is not
    taken: the last good one stays, and `report()` counts it.

    The first gradient fills L and R and no more: in its own eigenbases it is diagonal, and what Adam would make of the
    rest is rounding divided by itself. m and v begin at the second one, and the weights only decay before.

    m is kept in the parameter's own coordinates and rotated when it is read, and v stays as it was when the basis
    turns. Where gradients have low rank, rounding in the directions they leave out is divided by eps: in float32 an eps
    of 1e-8 is not above it. Which basis these directions have is no matter of rounding but fixed
    (`axes.linalg.matrix_roots.eigenvectors`), so that gradients that differ in their last bits, as from tensors of
    another layout, take steps that differ by 1e-6 lr in float64 (4.6 lr with the basis that a library leaves) and by
    0.2 lr in float32 (4.8), where the basis of the smallest eigenvalues is within rounding.

    Args:
        params: a model, named parameters, or groups that name their rule ("soap" or "adamw").
        lr: of both rules.
        betas, eps, weight_decay: of Adam in the eigenbasis.
        shampoo_beta: retention of L and R.
        refresh, basis, qr: see above.
        precision: of the products of every step, "input" (float32), "bfloat16x3" (16 bits of each factor) or "tf32".
        refresh_precision: of those that a refresh of "power-qr" takes; "tf32" is too coarse for statistics whose
            eigenvalues differ by more than 1e4.
        max_side: rows or columns more than these have no statistic and no basis, as in the authors' code: the matrix is
            rotated from the other side alone. One longer in both goes to AdamW. None: no limit.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: AdamW for embeddings, output head, vectors and scalars.

    Source: Vyas et al. 2024, algorithms 3 and 4, and the authors' code, which skips the first step as well. Differs: a
    small multiple of I is added to the statistics in the iteration; a null space has a fixed basis; the second moment
    keeps its place instead of being sorted with the basis; decay comes before the step, at the first gradient too.

    Raises:
        AxesError: betas, eps or options that make no sense, or that have no effect with this basis.
    """

    name: ClassVar[str] = "soap"
    paper: ClassVar[str] = "Vyas et al. 2024"
    equation: ClassVar[str] = "algorithms 3 and 4"
    differs: ClassVar[str] = (
        "the first gradient only fills the statistics, as in the authors' code, where the text has a step; "
        "orthonormalisation by matrix products; exact eigenbases are an option; "
        "embeddings, output head, vectors and scalars take AdamW in the same optimizer"
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
        refresh: int = 10,
        basis: Basis = "power-qr",
        qr: Orthonormal = "cholesky",
        precision: Precision = "input",
        refresh_precision: Precision = "input",
        max_side: int | None = 10000,
        aux_lr_scale: float = 1.0,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "refresh": refresh,
            "basis": basis,
            "qr": qr,
            "precision": precision,
            "refresh_precision": refresh_precision,
            "max_side": max_side,
            "sides": "both",
        }
        auxiliary = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("soap", SOAP.declare, own, *auxiliary), **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        refresh: int = 10,
        basis: Basis = "power-qr",
        qr: Orthonormal = "cholesky",
        precision: Precision = "input",
        refresh_precision: Precision = "input",
        sides: On = "both",
    ) -> StateUpdate:
        """The tuple. sides: which of them have a statistic and a basis; the other one stays as it is."""
        unit("SOAP", beta1=betas[0], beta2=betas[1], shampoo_beta=shampoo_beta)
        if betas[1] == 0.0:
            raise AxesError("SOAP: beta2 must be positive: without a memory of squares every entry is its own root")
        if not eps > 0.0:
            raise AxesError(f"SOAP: eps must be positive, got {eps}")
        exact = basis == "eigh"
        eigenvectors = Eigenbasis(basis, qr, refresh_precision)
        at = Held(refresh, "included" if exact else "excluded")
        factors = tuple(
            StateUpdate(
                Linear("left" if rows else "right", precision),
                eigenvectors,
                Scalar(shampoo_beta),
                Step(1.0 - shampoo_beta, at=at),
            )
            for rows in (True, False)
            if sides in ("both", "rows" if rows else "columns")
        )
        turned = {"both": "eigen-square", "rows": "eigen-square-left", "columns": "eigen-square-right"}
        second_moment = StateUpdate(
            Linear(turned[sides], precision),  # type: ignore[arg-type]
            monoid=Scalar(betas[1]),
            algorithm=Step(1.0 - betas[1], debias=True, start="second"),
        )
        rotated = RotatedWhiten((*factors, second_moment), eps=eps, precision=precision, on=sides)
        direction = StateUpdate(h=rotated, **average(betas[0], start="second"))
        return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=(direction,)))

    update = declare()
