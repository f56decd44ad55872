"""AdaMuon: Muon whose entries are evened out by their own second moment.

W = (1 - lr wd) W + lr * O' 0.2 sqrt(m n) / |O'|,  O' = O / sqrt(EMA(O^2)),  O the polar factor of sign(sum of u)
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Unpack, final

from axes.core.costs import Linear
from axes.core.geometry import NormedWhiten, SignBall
from axes.core.monoids import Scalar, Zero
from axes.core.state_update import StateUpdate
from axes.linalg.newton_schulz import Form
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import unit
from axes.optim.rules.matrix import Coefficients, Method, Muon, beside_adamw


@final
class AdaMuon(Optimizer):
    """AdaMuon:  O = polar factor of sign(m),  v = beta2 v + (1 - beta2) O^2,  W = W - lr rms sqrt(size) O' / |O'|.

    m is Muon's momentum and O' = O / (sqrt(v) + entry_eps), entry by entry; size is the number of entries. A step has
    the root mean square lr * rms whatever the shape, so that a step size tuned for AdamW serves both rules. The bias of
    v cancels in the norm.

    Args:
        params: a model, named parameters, or groups that name their rule ("adamuon" or "adamw").
        lr: of both rules.
        beta2: of the second moment of O.
        sign: whether the signs of the momentum are orthogonalised, or the momentum itself.
        entry_eps: added to the root of v.
        rms: of a step at lr 1.
        momentum, nesterov, ns_steps, ns_coefficients, eps, precision, method, form: as in Muon, and so is weight_decay.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: AdamW for embeddings, output head, vectors and scalars.

    Source: Si, Zhang and Shen 2025, algorithm 1. With sign=False it is that of the paper's first version, which the
    authors' first code, pytorch_optimizer and timm have. Differs: the momentum buffer averages.
    """

    name: ClassVar[str] = "adamuon"
    paper: ClassVar[str] = "Si, Zhang and Shen 2025 (AdaMuon)"
    equation: ClassVar[str] = "algorithm 1"
    differs: ClassVar[str] = (
        "an averaging momentum buffer, which the sign or the polar factor cannot tell from the paper's sum; "
        "embeddings, output head, vectors and scalars take AdamW in the same optimizer"
    )
    bibtex: ClassVar[str] = """@misc{si2025adamuon,
  title = {{AdaMuon}: Adaptive {Muon} Optimizer},
  author = {Si, Chongjie and Zhang, Debing and Shen, Wei},
  year = {2025},
  eprint = {2507.11005},
  archiveprefix = {arXiv}
}"""
    default_lr: ClassVar[float] = 2e-2

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        momentum: float = 0.95,
        beta2: float = 0.95,
        weight_decay: float = 1e-2,
        nesterov: bool = True,
        sign: bool = True,
        ns_steps: int = 5,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        entry_eps: float = 1e-8,
        rms: float = 0.2,
        precision: Literal["bfloat16", "input"] = "bfloat16",
        method: Method = "newton-schulz",
        form: Form = "gram",
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
            "beta2": beta2,
            "nesterov": nesterov,
            "sign": sign,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "entry_eps": entry_eps,
            "rms": rms,
            "precision": precision,
            "method": method,
            "form": form,
        }
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("adamuon", AdaMuon.declare, own, *aux), **options)

    @staticmethod
    def declare(
        momentum: float = 0.95,
        beta2: float = 0.95,
        nesterov: bool = True,
        sign: bool = True,
        ns_steps: int = 5,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        entry_eps: float = 1e-8,
        rms: float = 0.2,
        precision: Literal["bfloat16", "input"] = "bfloat16",
        method: Method = "newton-schulz",
        form: Form = "gram",
    ) -> StateUpdate:
        """The tuple: Muon's without its scale, and one more filter; with `sign` its momentum's signs in between."""
        unit("AdaMuon", beta2=beta2)
        muon = Muon.declare(momentum, nesterov, ns_steps, ns_coefficients, eps, None, precision, method, form).normal()
        step = muon.parts().step
        (last,) = muon.filters()
        orthogonal: tuple[StateUpdate, ...] = (last,)
        if sign:
            orthogonal = (dataclasses.replace(last, h=SignBall()), StateUpdate(Linear(), last.parts().h, Zero()))
        second_moment = StateUpdate(Linear("square"), monoid=Scalar(beta2))  # 1 - beta2 would cancel
        entries = StateUpdate(Linear(), NormedWhiten((second_moment,), entry_eps, rms), Zero())
        return dataclasses.replace(muon, algorithm=dataclasses.replace(step, via=(*orthogonal, entries)))

    update = declare()
