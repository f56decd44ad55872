"""Muon: a rule for hidden matrices, with AdamW for all other parameters.

    W = (1 - lr wd) W + lr * polar factor of EMA(u)

Both rules belong to one optimizer object with one lr: the auxiliary rule's step size is lr * aux_lr_scale.
`axes.optim.engine.routing` says which parameters are hidden matrices.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Unpack, final

from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given
from axes.core.geometry import Spectral
from axes.core.monoids import Decay
from axes.core.state_update import OnUpdate, StateUpdate
from axes.errors import AxesError, UnknownName
from axes.linalg.newton_schulz import Form
from axes.optim.engine.base import Group, Optimizer, Options, Params, Rule
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, AdamW, unit

Coefficients = tuple[float, float, float]
Scale = Literal["original", "match_rms_adamw", "spectral"] | None
Method = Literal["newton-schulz", "polar-express"]


def auxiliary_defaults(
    lr: Any, aux_lr_scale: float, aux_betas: tuple[float, float], aux_eps: float, aux_weight_decay: float
) -> Group:
    """Group defaults of AdamW beside a matrix rule."""
    return {
        "lr": lr,
        "betas": aux_betas,
        "eps": aux_eps,
        "weight_decay": aux_weight_decay,
        "amsgrad": False,
        "lr_scale": aux_lr_scale,
    }


def beside_adamw(
    rule: str,
    declare: Rule,
    own: Group,
    aux_lr_scale: float,
    aux_betas: tuple[float, float],
    aux_eps: float,
    aux_weight_decay: float,
) -> tuple[dict[str, Rule], dict[str, Group]]:
    """Tuple builders and group defaults of a matrix rule with AdamW beside it."""
    auxiliary = auxiliary_defaults(own["lr"], aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
    return {rule: declare, "adamw": AdamW.declare}, {rule: own, "adamw": auxiliary}


@final
class Muon(Optimizer):
    """Muon:  m = momentum m + (1 - momentum) g,  W = (1 - lr weight_decay) W - lr s U V^T,  U V^T from Newton-Schulz.

    nesterov orthogonalises  (1 - momentum) g + momentum m  instead of m.  s is `scale`: "match_rms_adamw"
    0.2 sqrt(max(rows, columns)), so that a step size tuned for AdamW serves both rules, "original"
    sqrt(max(1, rows / columns)), "spectral" sqrt(rows / columns), or None (1). The decay is not scaled.
    method "newton-schulz" repeats one polynomial, "polar-express" takes the best one for each step (Amsel et al. 2025):
    the same cost, and singular values closer to 1. form "gram" evaluates them in the cheapest way that is as accurate
    (`axes.linalg.newton_schulz`): on Hopper GPUs by symmetric products in float16, on a CPU without instructions
    for bfloat16 by products in float32 that are rounded to it, elsewhere mostly as "direct" does, which is
    torch.optim.Muon's order of operations.

    Args:
        params: a model, named parameters, or groups that name their rule ("muon" or "adamw").
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as in torch.optim.Muon, defaults too.
        scale, method, form: see above; ns_coefficients are for "newton-schulz". scale is torch's adjust_lr_fn, which is
            taken under that name as well; torch's default, None, is "original".
        precision: "bfloat16" or "input", of the iteration.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: AdamW for embeddings, output head, vectors and scalars.

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025, eq. 4 (match_rms_adamw). With scale="original", form="direct"
    torch.optim.Muon's to rounding. Differs: the default scale, for one lr is that of both rules; routing; convolutions
    are taken as matrices.
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
    default_lr: ClassVar[float] = 1e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "as scale"] | None = "as scale",
        scale: Scale = "match_rms_adamw",
        precision: Literal["bfloat16", "input"] = "bfloat16",
        method: Method = "newton-schulz",
        form: Form = "gram",
        aux_lr_scale: float = 1.0,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        if adjust_lr_fn != "as scale":
            if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
                raise UnknownName("adjust_lr_fn of Muon", str(adjust_lr_fn), ("original", "match_rms_adamw"))
            scale = adjust_lr_fn or "original"
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
            "form": form,
        }
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("muon", Muon.declare, own, *aux), **options)

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
        form: Form = "gram",
    ) -> StateUpdate:
        """The tuple."""
        unit("Muon", momentum=momentum)
        if nesterov and momentum == 0.0:
            raise AxesError("Muon: nesterov needs momentum > 0")
        polar = Spectral(method, ns_steps, ns_coefficients, scale, eps, precision, form=form)
        via = (Momentum(momentum, "ema", nesterov=nesterov),) if momentum > 0.0 else ()
        return StateUpdate(Given(), OnUpdate(polar), Decay(WEIGHT_DECAY), Step(LR, via=via))

    update = declare()
