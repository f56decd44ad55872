"""Regression, one example at a time: a layer learns to answer its inputs x with targets v.

    Hebbian                 W = W + lr v x^T
    NLMS                    W = W - lr e x^T / (eps + |x|^2),       e = W x - v
    LpRegression            W = W - lr p sign(e) |e|^{p-1} x^T
    HuberRegression         W = W - lr clip(e, -delta, delta) x^T
    RecursiveLeastSquares   W = W - lr e x^T (sum of x x^T + eps I)^{-1}

x is the input of an nn.Linear and v = W x - (gradient of its output), the target for which the squared error has that
gradient: the label itself, if the layer is a linear model and the loss of an example half its squared error. The
examples of a batch act one after another, each on what the last one left, and each with a cost that carries
weight_decay |W|^2 / 2. All parameters but hidden linear layers take AdamW.
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, final

from torch import Tensor

from axes.core.algorithms import Step
from axes.core.costs import Alignment, Cost, Huber, Linear, Lp, Ridge, SquaredError
from axes.core.geometry import KeyNormalised, Whiten
from axes.core.monoids import Scalar
from axes.core.state_update import OnUpdate, StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.engine.layers import Reduction, require_reduction
from axes.optim.rules.first_order import LR, WEIGHT_DECAY
from axes.optim.rules.matrix import beside_adamw


class _Regression(Optimizer):
    """A rule of inputs and targets; a loss that is a mean over examples is read as each example's own loss."""

    _reduction: Reduction

    def _layer_signal(self, update: StateUpdate, parameter: Tensor, sign: float) -> dict[str, Tensor]:
        signal = super()._layer_signal(update, parameter, sign)
        if signal and self._reduction == "mean":  # the gradient of one example is N times what arrived
            weight = self._places.layout(parameter).matrices(parameter.detach())
            response = signal["k"] @ weight.to(signal["k"].dtype).mT
            signal["v"] = response + len(signal["k"]) * (signal["v"] - response)
        return signal


def _explicit(cost: Cost) -> StateUpdate:
    """One gradient step of a cost of prediction and target per example."""
    return StateUpdate(Ridge(cost, WEIGHT_DECAY), algorithm=Step(LR))


@final
class Hebbian(_Regression):
    """Hebbian learning:  W = (1 - lr weight_decay) W + lr v x^T  for every example.

    What fires together is wired together, whatever W answers: there is no error, so no loss is descended and nothing
    but the decay bounds W. In a network v contains the layer's own response, which the rule reinforces.

    Args:
        params: the model, or parameters or groups ("hebbian", "adamw") together with model=.
        lr: of both rules, AdamW's being lr * aux_lr_scale.
        weight_decay: per example.
        reduction: whether the loss is the "mean" or the "sum" over examples.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: of AdamW.

    Source: Hebb 1949; the outer-product rule is Kohonen 1972, eq. 2. Differs: a decay.
    """

    name: ClassVar[str] = "hebbian"
    paper: ClassVar[str] = "Hebb 1949; Kohonen 1972"
    equation: ClassVar[str] = "the outer-product rule, Kohonen eq. 2"
    differs: ClassVar[str] = (
        "targets are the layer's response minus the gradient of its output, which for a linear model are its labels; a "
        "decay bounds the weights; embeddings, output head, biases and all others take AdamW"
    )
    bibtex: ClassVar[str] = """@article{kohonen1972correlation,
  title = {Correlation Matrix Memories},
  author = {Kohonen, Teuvo},
  journal = {IEEE Transactions on Computers},
  volume = {C-21},
  number = {4},
  year = {1972}
}"""
    default_lr: ClassVar[float] = 1e-5

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        weight_decay: float = 0.0,
        reduction: Reduction = "mean",
        aux_lr_scale: float = 500.0,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        require_reduction("Hebbian", reduction)
        own = {"lr": lr, "weight_decay": weight_decay}
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("hebbian", Hebbian.declare, own, *aux), **options)
        self._reduction = reduction

    @staticmethod
    def declare() -> StateUpdate:
        """The tuple."""
        return _explicit(Alignment())

    update = declare()


@final
class NLMS(_Regression):
    """Normalised least mean squares:  W = W - lr (e x^T + weight_decay W) / (eps + |x|^2)  for every example.

    Stable for 0 < lr < 2 whatever the inputs are. With lr = 1 the error of the example drops to eps / (eps + |x|^2) of
    itself: the exact minimiser of  |W x - v|^2 / 2 + eps |W - W'|^2 / 2. With eps = 0 this is Kaczmarz's projection,
    which cycled over a consistent system finds the solution nearest to where it began.

    Args:
        params: the model, or parameters or groups ("nlms", "adamw") together with model=.
        lr: the relaxation; AdamW's step size is lr * aux_lr_scale.
        eps: added to |x|^2.
        weight_decay: per example.
        reduction: whether the loss is the "mean" or the "sum" over examples.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: of AdamW.

    Source: Nagumo and Noda 1967; Kaczmarz 1937 (eps = 0). Differs: a decay.
    """

    name: ClassVar[str] = "nlms"
    paper: ClassVar[str] = "Nagumo and Noda 1967; Kaczmarz 1937"
    equation: ClassVar[str] = "the normalised step"
    differs: ClassVar[str] = "a decay in the cost; other parameters take AdamW in the same optimizer"
    bibtex: ClassVar[str] = """@article{nagumo1967learning,
  title = {A Learning Method for System Identification},
  author = {Nagumo, Jin-ichi and Noda, Atsuhiko},
  journal = {IEEE Transactions on Automatic Control},
  volume = {12},
  number = {3},
  year = {1967}
}"""
    default_lr: ClassVar[float] = 0.1

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        reduction: Reduction = "mean",
        aux_lr_scale: float = 0.05,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        require_reduction("NLMS", reduction)
        own = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("nlms", NLMS.declare, own, *aux), **options)
        self._reduction = reduction

    @staticmethod
    def declare(eps: float = 1e-8) -> StateUpdate:
        """The tuple."""
        return StateUpdate(Ridge(SquaredError(), WEIGHT_DECAY), OnUpdate(KeyNormalised(eps)), algorithm=Step(LR))

    update = declare()


@final
class LpRegression(_Regression):
    """l_p regression:  W = (1 - lr weight_decay) W - lr p sign(e) |e|^{p-1} x^T  for every example.

    Args:
        params: the model, or parameters or groups ("lp", "adamw") together with model=.
        lr: of both rules, AdamW's being lr * aux_lr_scale.
        p: of the cost |e|_p^p; below 2 the sign is smoothed, tanh(100 e).
        weight_decay: per example.
        reduction: whether the loss is the "mean" or the "sum" over examples.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: of AdamW.

    Source: stochastic gradient descent on |e|_p^p; Behrouz et al. 2025 (Miras), eq. 10-12. Differs: smoothing.
    """

    name: ClassVar[str] = "lp-regression"
    paper: ClassVar[str] = "Behrouz et al. 2025 (Miras)"
    equation: ClassVar[str] = "eq. 10-12"
    differs: ClassVar[str] = "smoothed below p = 2 only; other parameters take AdamW in the same optimizer"
    bibtex: ClassVar[str] = """@misc{behrouz2025connected,
  title = {It's All Connected: A Journey Through Test-Time Memorization, Attentional Bias, Retention, and Online
           Optimization},
  author = {Behrouz, Ali and Razaviyayn, Meisam and Zhong, Peilin and Mirrokni, Vahab},
  year = {2025},
  eprint = {2504.13173},
  archiveprefix = {arXiv}
}"""
    default_lr: ClassVar[float] = 0.01

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        p: float = 1.5,
        weight_decay: float = 0.0,
        reduction: Reduction = "mean",
        aux_lr_scale: float = 0.5,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        require_reduction("LpRegression", reduction)
        own = {"lr": lr, "p": p, "weight_decay": weight_decay}
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("lp", LpRegression.declare, own, *aux), **options)
        self._reduction = reduction

    @staticmethod
    def declare(p: float = 1.5) -> StateUpdate:
        """The tuple."""
        return _explicit(Lp(p))

    update = declare()


@final
class HuberRegression(_Regression):
    """Robust regression:  W = (1 - lr weight_decay) W - lr clip(e, -delta, delta) x^T  for every example.

    Like every explicit step on a quadratic it needs lr |x|^2 < 2.

    Args:
        params: the model, or parameters or groups ("huber", "adamw") together with model=.
        lr: of both rules, AdamW's being lr * aux_lr_scale.
        delta: beyond it an error pulls as if it were delta.
        weight_decay: per example.
        reduction: whether the loss is the "mean" or the "sum" over examples.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: of AdamW.

    Source: Huber 1964, section 2 (the cost). Differs: nothing; the cost is torch.nn.HuberLoss, summed.
    """

    name: ClassVar[str] = "huber-regression"
    paper: ClassVar[str] = "Huber 1964"
    equation: ClassVar[str] = "the cost of section 2, by stochastic gradient descent"
    differs: ClassVar[str] = "coordinate by coordinate; other parameters take AdamW in the same optimizer"
    bibtex: ClassVar[str] = """@article{huber1964robust,
  title = {Robust Estimation of a Location Parameter},
  author = {Huber, Peter J.},
  journal = {The Annals of Mathematical Statistics},
  volume = {35},
  number = {1},
  year = {1964}
}"""
    default_lr: ClassVar[float] = 0.03

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        delta: float = 1.0,
        weight_decay: float = 0.0,
        reduction: Reduction = "mean",
        aux_lr_scale: float = 0.1,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        require_reduction("HuberRegression", reduction)
        own = {"lr": lr, "delta": delta, "weight_decay": weight_decay}
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("huber", HuberRegression.declare, own, *aux), **options)
        self._reduction = reduction

    @staticmethod
    def declare(delta: float = 1.0) -> StateUpdate:
        """The tuple."""
        return _explicit(Huber(delta))

    update = declare()


@final
class RecursiveLeastSquares(_Regression):
    """Recursive least squares:  R = forget R + x x^T,  W = W - lr (e x^T + weight_decay W) (R + eps I)^{-1}.

    With forget = 1, lr = 1 and no decay W is after every example the minimiser of

        sum |W x - v|^2 + eps |W - W_0|^2

    over all examples so far: the batch least-squares solution (empirical risk minimisation) after one pass, ridge
    regression towards W_0. R costs columns^2 numbers, and its inverse columns^3 per example.

    Args:
        params: the model, or parameters or groups ("rls", "adamw") together with model=.
        lr: 1 is the exact solution. AdamW's is lr * aux_lr_scale.
        forget: retention of R per example; less than 1 follows moving targets over about 1 / (1 - forget) examples.
        eps: of the regulariser; held while R forgets, so that unexcited directions do not wind up.
        weight_decay: per example.
        reduction: whether the loss is the "mean" or the "sum" over examples.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: of AdamW.

    Source: Plackett 1950; Haykin, Adaptive Filter Theory, table 9.1. Differs: eps does not fade with forget^t.
    """

    name: ClassVar[str] = "recursive-least-squares"
    paper: ClassVar[str] = "Plackett 1950; Haykin, Adaptive Filter Theory"
    equation: ClassVar[str] = "Haykin, table 9.1"
    differs: ClassVar[str] = (
        "R is kept and inverted instead of its inverse; the regulariser stays where the textbook's fades with the "
        "forgetting; other parameters take AdamW in the same optimizer"
    )
    bibtex: ClassVar[str] = """@article{plackett1950some,
  title = {Some Theorems in Least Squares},
  author = {Plackett, R. L.},
  journal = {Biometrika},
  volume = {37},
  number = {1/2},
  year = {1950}
}"""
    default_lr: ClassVar[float] = 1.0

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        forget: float = 0.99,
        eps: float = 1.0,
        weight_decay: float = 0.0,
        reduction: Reduction = "mean",
        aux_lr_scale: float = 5e-3,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        require_reduction("RecursiveLeastSquares", reduction)
        own = {"lr": lr, "forget": forget, "eps": eps, "weight_decay": weight_decay}
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("rls", RecursiveLeastSquares.declare, own, *aux), **options)
        self._reduction = reduction

    @staticmethod
    def declare(forget: float = 0.99, eps: float = 1.0) -> StateUpdate:
        """The tuple."""
        if not 0.0 < forget <= 1.0:
            raise AxesError(f"RecursiveLeastSquares: forget must lie in (0, 1], got {forget}")
        if not eps > 0.0:
            raise AxesError(f"RecursiveLeastSquares: eps must be positive, got {eps}")
        gram = StateUpdate(Linear("key"), monoid=Scalar(forget))
        newton = OnUpdate(Whiten((gram,), "right", 1.0, eps))
        return StateUpdate(Ridge(SquaredError(), WEIGHT_DECAY), newton, algorithm=Step(LR))

    update = declare()
