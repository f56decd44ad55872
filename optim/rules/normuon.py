"""NorMuon: Muon whose rows are evened out by their own second moment.

W = (1 - lr wd) W + lr * O' |O| / |O'|,  O the polar factor of EMA(u),  O' its rows over the root of their EMA(O^2)
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Unpack, final

from axes.core.costs import Linear
from axes.core.geometry import NormedWhiten
from axes.core.monoids import Scalar, Zero
from axes.core.state_update import StateUpdate
from axes.linalg.newton_schulz import Form
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import unit
from axes.optim.rules.matrix import Coefficients, Method, Muon, Scale, beside_adamw


@final
class NorMuon(Optimizer):
    """NorMuon:  O = Muon's direction,  v_i = beta2 v_i + (1 - beta2) mean_j O_ij^2,  W = W - lr s O_ij / sqrt(v_i).

    s keeps the Frobenius norm of O. Rows that Muon moves much step less, and the others more. v is one number a row:
    the state is Muon's buffer and little else.

    Args:
        params: a model, named parameters, or groups that name their rule ("normuon" or "adamw").
        lr: of both rules.
        beta2: of the rows' second moment.
        row_eps: added to its root.
        momentum, nesterov, ns_steps, ns_coefficients, eps, scale, precision, method, form: as in Muon, and so is
        weight_decay.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: AdamW for embeddings, output head, vectors and scalars.

    Source: Li et al. 2025, algorithm 1. Differs: the norm of O is kept, as in the authors' code; the text sets it to
    0.2 sqrt(rows columns), which is scale="match_rms_adamw" up to the factor sqrt(min / max of the sides).
    """

    name: ClassVar[str] = "normuon"
    paper: ClassVar[str] = "Li et al. 2025 (NorMuon)"
    equation: ClassVar[str] = "algorithm 1"
    differs: ClassVar[str] = (
        "the norm of Muon's step is kept, as in the authors' code, and not set to 0.2 sqrt(rows columns)"
    )
    bibtex: ClassVar[str] = """@misc{li2025normuon,
  title = {{NorMuon}: Making {Muon} more efficient and scalable},
  author = {Li, Zichong and Liu, Liming and Liang, Chen and Chen, Weizhu and Zhao, Tuo},
  year = {2025},
  eprint = {2510.05491},
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
        ns_steps: int = 5,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        row_eps: float = 1e-10,
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
        own = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "beta2": beta2,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "row_eps": row_eps,
            "scale": scale,
            "precision": precision,
            "method": method,
            "form": form,
        }
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("normuon", NorMuon.declare, own, *aux), **options)

    @staticmethod
    def declare(
        momentum: float = 0.95,
        beta2: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        row_eps: float = 1e-10,
        scale: Scale = "match_rms_adamw",
        precision: Literal["bfloat16", "input"] = "bfloat16",
        method: Method = "newton-schulz",
        form: Form = "gram",
    ) -> StateUpdate:
        """The tuple: Muon's, and one more filter."""
        unit("NorMuon", beta2=beta2)
        muon = Muon.declare(momentum, nesterov, ns_steps, ns_coefficients, eps, scale, precision, method, form).normal()
        step = muon.parts().step
        second_moment = StateUpdate(Linear("row-square"), monoid=Scalar(beta2))  # 1 - beta2 would cancel
        rows = StateUpdate(Linear(), NormedWhiten((second_moment,), row_eps), Zero())
        return dataclasses.replace(muon, algorithm=dataclasses.replace(step, via=(*step.via, rows)))

    update = declare()
