"""Muon and Shampoo: rules for hidden matrices, side by side, with AdamW for all other parameters.

    Muon     W = (1 - lr wd) W + lr * polar factor of EMA(u)
    Shampoo  W = (1 - lr wd) W + lr * L^{-p} EMA(u) R^{-p},  L and R sums or averages of u u^T and u^T u

Both belong to one optimizer object with one lr: the auxiliary rule's step size is lr * aux_lr_scale.
`axes.optim.routing` says which parameters are hidden matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack, final

from axes.algorithms import Momentum, Step
from axes.costs import Given, Linear
from axes.errors import AxesError, UnknownName
from axes.geometry import Geometry, Graft, Spectral, Whiten
from axes.monoids import Decay, Zero
from axes.optim.base import Group, Optimizer, Options, Params, Rule
from axes.optim.first_order import LR, WEIGHT_DECAY, AdamW, average, unit
from axes.state_update import OnUpdate, StateUpdate

Coefficients = tuple[float, float, float]
Scale = Literal["original", "match_rms_adamw", "spectral"] | None
Method = Literal["newton-schulz", "polar-express"]
Grafted = Literal["sgd", "momentum", "adagrad", "rmsprop", "adam"] | None


def auxiliary_defaults(
    lr: Any, aux_lr_scale: float, aux_betas: tuple[float, float], aux_eps: float, aux_weight_decay: float
) -> Group:
    """Group defaults of AdamW beside a matrix rule."""
    return {
        "lr": lr,
        "betas": aux_betas,
        "eps": aux_eps,
        "weight_decay": aux_weight_decay,
        "lr_scale": aux_lr_scale,
    }


@final
class Muon(Optimizer):
    """Muon:  m = momentum m + (1 - momentum) g,  W = (1 - lr weight_decay) W - lr s U V^T,  U V^T from Newton-Schulz.

    nesterov orthogonalises  (1 - momentum) g + momentum m  instead of m.  s is `scale`: "match_rms_adamw"
    0.2 sqrt(max(rows, columns)), so that a step size tuned for AdamW serves both rules, "original"
    sqrt(max(1, rows / columns)), "spectral" sqrt(rows / columns), or None (1). The decay is not scaled.
    method "newton-schulz" repeats one polynomial, "polar-express" takes the best one for each step (Amsel et al. 2025):
    the same cost, and singular values closer to 1.

    Args:
        params: a model, named parameters, or groups that name their rule ("muon" or "adamw").
        lr: of both rules.
        momentum, nesterov, ns_steps, ns_coefficients, eps: as in torch.optim.Muon.
        scale, method: see above; ns_coefficients are for "newton-schulz".
        precision: "bfloat16" or "input", of the iteration.
        weight_decay: of the matrices.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: AdamW for embeddings, output head, vectors and scalars.

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025, eq. 4 (match_rms_adamw). With scale="original" equal to
    torch.optim.Muon. Differs: default scale and weight decay, routing, and convolutions are taken as matrices.
    """

    name: ClassVar[str] = "muon"
    paper: ClassVar[str] = "Jordan et al. 2024; Liu et al. 2025"
    equation: ClassVar[str] = "Jordan et al., algorithm 2; Liu et al. eq. 4"
    differs: ClassVar[str] = (
        "an averaging buffer as in the code (the text sums); the step is scaled to AdamW's size by default; "
        "embeddings, output head, vectors and scalars take AdamW in the same optimizer"
    )
    bibtex: ClassVar[str] = """@misc{jordan2024muon,
  title = {Muon: An optimizer for hidden layers in neural networks},
  author = {Jordan, Keller and Jin, Yuchen and Boza, Vlado and You, Jiacheng and Cesista, Franz and Newhouse, Laker and
            Bernstein, Jeremy},
  year = {2024},
  url = {https://kellerjordan.github.io/posts/muon/}
}"""
    default_lr: ClassVar[float] = 2e-2

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        momentum: float = 0.95,
        weight_decay: float = 1e-2,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        scale: Scale = "match_rms_adamw",
        precision: Literal["bfloat16", "input"] = "bfloat16",
        method: Method = "newton-schulz",
        aux_lr_scale: float = 1.0,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "scale": scale,
            "precision": precision,
            "method": method,
        }
        auxiliary = auxiliary_defaults(lr, aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        rules: Mapping[str, Rule] = {"muon": Muon.declare, "adamw": AdamW.declare}
        super().__init__(params, rules, {"muon": own, "adamw": auxiliary}, **options)

    @staticmethod
    def declare(
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        scale: Scale = "match_rms_adamw",
        precision: Literal["bfloat16", "input"] = "bfloat16",
        method: Method = "newton-schulz",
    ) -> StateUpdate:
        """The tuple."""
        unit("Muon", momentum=momentum)
        if nesterov and momentum == 0.0:
            raise AxesError("Muon: nesterov needs momentum > 0")
        polar = Spectral(method, ns_steps, ns_coefficients, scale, eps, precision)
        via = (Momentum(momentum, "ema", nesterov=nesterov),) if momentum > 0.0 else ()
        return StateUpdate(Given(), OnUpdate(polar), Decay(WEIGHT_DECAY), Step(LR, via=via))

    update = declare()


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
    """Shampoo:  L = L + g g^T,  R = R + g^T g,  W = (1 - lr weight_decay) W - lr (L + eps)^{-p} m (R + eps)^{-p}.

    betas: m is a bias-corrected average of g with betas[0] (0: m = g). betas[1] = 1 sums the statistics (AdaGrad),
    less than 1 averages them, bias-corrected.  exponent p: 1/4, or 1/2 (the Kronecker approximation of full AdaGrad's
    square root).  eps is added to the eigenvalues; the roots are exact (symmetric eigendecomposition) in every step, of
    cost rows^3 + columns^3.  graft takes the norm of every matrix's step from another rule on the same gradients: "sgd"
    (g), "momentum" (average of g), "adagrad" (g over the root of the sum of g^2), "rmsprop" (over that of the average)
    or "adam" (m likewise); its betas are Shampoo's, its eps is graft_eps.

    Args:
        params: a model, named parameters, or groups that name their rule ("shampoo" or "adamw").
        lr: of both rules.
        betas, exponent, eps, graft, weight_decay: see above.
        graft_eps: added to the grafted rule's root.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: AdamW for embeddings, output head, vectors and scalars.

    Source: Gupta et al. 2018, algorithm 1 (matrices: exponent 1/4, sums). Differs: momentum averages gradients before
    they are whitened; eps is added to the eigenvalues instead of starting the sums; no blocking. Grafting: Agarwal et
    al. 2020, algorithm 1.
    """

    name: ClassVar[str] = "shampoo"
    paper: ClassVar[str] = "Gupta, Koren and Singer 2018"
    equation: ClassVar[str] = "algorithm 1"
    differs: ClassVar[str] = (
        "momentum before whitening; averaged statistics and exponent 1/2 are options; exact roots in every step; "
        "grafting is an option; embeddings, output head, vectors and scalars take AdamW in the same optimizer"
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
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        graft: Grafted = None,
        graft_eps: float = 1e-8,
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
        }
        auxiliary = auxiliary_defaults(lr, aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        rules: Mapping[str, Rule] = {"shampoo": Shampoo.declare, "adamw": AdamW.declare}
        super().__init__(params, rules, {"shampoo": own, "adamw": auxiliary}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.9, 1.0),
        exponent: float = 0.25,
        eps: float = 1e-12,
        graft: Grafted = None,
        graft_eps: float = 1e-8,
    ) -> StateUpdate:
        """The tuple."""
        unit("Shampoo", beta1=betas[0])
        if betas[1] == 1.0:
            statistics = (StateUpdate(Linear("left")), StateUpdate(Linear("right")))
        else:
            unit("Shampoo", beta2=betas[1])
            statistics = (StateUpdate(**average(betas[1], "left")), StateUpdate(**average(betas[1], "right")))
        whitened: Geometry = Whiten(statistics, "kronecker", exponent, eps)
        if graft is not None:
            whitened = Graft(whitened, _grafted(graft, betas, graft_eps))
        if betas[0] > 0.0:  # a norm that is grafted on drops the bias
            direction = StateUpdate(h=whitened, **average(betas[0], debias=graft is None))
        else:
            direction = StateUpdate(Linear(), whitened, Zero())
        return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=(direction,)))

    update = declare()
