"""Natural gradient: the gradient whitened by the Fisher matrix, layer by layer or exactly.

    NaturalGradient        W = (1 - lr wd) W + lr * G^{-1} u A^{-1},  G = mean of delta delta^T, A = mean of x x^T
    EKFAC (ekfac.py)       the same eigenvectors, with the second moment of the gradient in each as its eigenvalue
    ExactNaturalGradient   w = (1 - lr wd) w + lr * F^{-1} u,         w all parameters as one vector, F = mean of s s^T

x inputs and delta output gradients of a layer, s the score of an example: the gradient of its log-likelihood in w.
G, A and F are statistics: linear attention on deltas, inputs and scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Unpack, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Whiten
from axes.core.monoids import Decay, Zero
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.linalg.accumulate import outer_sum
from axes.optim.engine import trees
from axes.optim.engine.base import Group, Optimizer, Options, Params, Rule
from axes.optim.engine.forms import Today
from axes.optim.engine.gradients import Gradients
from axes.optim.engine.groups import rates
from axes.optim.engine.layers import no_hooks, require_reduction, watch
from axes.optim.engine.states import show
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, average, unit
from axes.optim.rules.matrix import beside_adamw


def _positive(who: str, damping: float) -> None:
    if not damping > 0.0:
        raise AxesError(f"{who}: damping must be positive, got {damping}")


class FisherFactored(Optimizer):
    """What rules with Kronecker factors of the Fisher matrix share: where the factors come from."""

    @contextmanager
    def fisher_pass(self) -> Iterator[None]:
        """Backward passes inside feed the factors only; gradients are as before afterwards.

        The factors of the next step then come from these passes alone. Several are averaged; each must be the mean over
        its examples of minus the log-likelihood of labels drawn from the model.
        """
        if self._layers is None:
            raise no_hooks(type(self).__name__)
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        try:
            with self._layers.observing():
                yield
        finally:
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g


@final
class NaturalGradient(FisherFactored):
    """Kronecker-factored natural gradient:  W = W - lr (G + sqrt(damping))^{-1} g (A + sqrt(damping))^{-1}.

    A averages x x^T over the inputs of a layer and G delta delta^T over the per-example gradients of its outputs
    (every position of a sequence is an example); both are bias-corrected averages over steps with `beta`.
    G (x) A approximates the layer's block of the Fisher matrix: exactly for one example, or when inputs and output
    gradients are independent. With the training loss's own gradients it is the *empirical* Fisher; run backward passes
    on labels drawn from the model inside `with optimizer.fisher_pass():` for the true one, which for the squared error
    and for cross-entropy is the Gauss-Newton matrix.

    The hidden nn.Linear weights take this rule; embeddings, output head, biases and all other parameters take AdamW.

    Args:
        params: the model, or parameters or groups ("natural-gradient", "adamw") together with model=.
        lr: of both rules, AdamW's being lr * aux_lr_scale.
        beta: retention of the factors between steps.
        damping: added to the Fisher matrix in factored form, sqrt(damping) to each factor.
        momentum: averages the whitened gradients.
        weight_decay: decoupled.
        reduction: whether the loss is the "mean" or the "sum" over examples.

    Source: Martens and Grosse 2015, eq. 12-14 and section 6.3 (factored Tikhonov damping, with pi = 1).
    Differs: empirical Fisher unless asked, no exact rescaling, biases are not appended to the weights, fixed damping.
    """

    name: ClassVar[str] = "natural-gradient"
    paper: ClassVar[str] = "Amari 1998; Martens and Grosse 2015"
    equation: ClassVar[str] = "Martens and Grosse eq. 12-14, section 6.3"
    differs: ClassVar[str] = (
        "empirical Fisher unless passes on sampled labels are run; fixed damping with pi = 1, no rescaling of the "
        "step; biases, embeddings and output head take AdamW in the same optimizer"
    )
    bibtex: ClassVar[str] = """@inproceedings{martens2015optimizing,
  title = {Optimizing Neural Networks with Kronecker-factored Approximate Curvature},
  author = {Martens, James and Grosse, Roger},
  booktitle = {International Conference on Machine Learning},
  year = {2015}
}"""
    default_lr: ClassVar[float] = 0.1

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        beta: float = 0.95,
        damping: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        reduction: Literal["mean", "sum"] = "mean",
        aux_lr_scale: float = 0.2,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        require_reduction("NaturalGradient", reduction)
        own = {"lr": lr, "beta": beta, "damping": damping, "momentum": momentum, "weight_decay": weight_decay}
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("natural-gradient", NaturalGradient.declare, own, *aux), **options)
        self._reduction = reduction

    @staticmethod
    def declare(beta: float = 0.95, damping: float = 1e-3, momentum: float = 0.9) -> StateUpdate:
        """The tuple."""
        unit("NaturalGradient", beta=beta, momentum=momentum)
        _positive("NaturalGradient", damping)
        factors = (StateUpdate(**average(beta, "error")), StateUpdate(**average(beta, "key")))
        direction = StateUpdate(Linear(), Whiten(factors, "kronecker", 1.0, damping**0.5), Zero())
        via: tuple[Any, ...] = (direction, Momentum(momentum, "ema", debias=True)) if momentum else (direction,)
        return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=via))

    update = declare()


@final
class ExactNaturalGradient(Optimizer):
    """Natural gradient with the exact Fisher matrix of a small model:  w = w - lr (F + damping)^{-1} grad.

    F is the mean over examples of J^T H J, J the Jacobian of one example's outputs in all parameters and H the Fisher
    matrix of the likelihood in the outputs: for "gaussian" (loss |output - target|^2 / 2, a mean over examples) H = I,
    for "categorical" (cross-entropy of logits in the last dimension) H = Diag(p) - p p^T. Both are the generalised
    Gauss-Newton matrix of the loss. "empirical" takes s s^T instead, s the gradient of the example's own loss.

    The Jacobians come from forward passes of the model that are recorded between two steps; its inputs must be tensors
    whose first dimension is the example. Time per step is cubic and memory quadratic in the number of parameters.

    Args:
        model: a module whose output is a tensor (N, ..., C).
        lr, damping, weight_decay, likelihood: see above.
        max_parameters: refuse larger models.

    Source: Amari 1998, eq. 8; Martens 2020, section 9.2 (equality with Gauss-Newton). Differs: damping, fixed.
    """

    name: ClassVar[str] = "exact-natural-gradient"
    paper: ClassVar[str] = "Amari 1998; Martens 2020"
    equation: ClassVar[str] = "Amari eq. 8"
    differs: ClassVar[str] = "damped; for models of a few thousand parameters"
    bibtex: ClassVar[str] = """@article{amari1998natural,
  title = {Natural Gradient Works Efficiently in Learning},
  author = {Amari, Shun-ichi},
  journal = {Neural Computation},
  volume = {10},
  number = {2},
  year = {1998}
}"""
    default_lr: ClassVar[float] = 1.0
    watches_layers: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        lr: Any = None,
        damping: float = 1e-3,
        weight_decay: float = 0.0,
        likelihood: Literal["gaussian", "categorical", "empirical"] = "gaussian",
        max_parameters: int = 5000,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise AxesError("ExactNaturalGradient differentiates the model per example: pass the model itself")
        if likelihood not in ("gaussian", "categorical", "empirical"):
            raise AxesError(
                f"ExactNaturalGradient: likelihood {likelihood!r} is not one of gaussian, categorical, empirical"
            )
        size = sum(p.numel() for p in model.parameters())
        if size > max_parameters:
            raise AxesError(
                f"ExactNaturalGradient: the model has {size} parameters, so its Fisher matrix has {size**2} entries; "
                f"the limit is max_parameters={max_parameters}. NaturalGradient is the factored form for large models"
            )
        own = {"lr": lr, "damping": damping, "weight_decay": weight_decay}
        rules: Mapping[str, Rule] = {"exact": ExactNaturalGradient.declare}
        super().__init__(model, rules, {"exact": own}, **options)
        self._likelihood = likelihood
        self._model = model
        self._passes: list[_Pass] = []
        self._recording = True
        self._unwatch = watch([model], self._record)

    @staticmethod
    def declare(damping: float = 1e-3) -> StateUpdate:
        """The tuple, for all parameters as one row; its key is the score."""
        _positive("ExactNaturalGradient", damping)
        fisher = StateUpdate(Linear("key"), monoid=Zero())
        direction = StateUpdate(Linear(), Whiten((fisher,), "right", 1.0, damping), Zero())
        return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=(direction,)))

    update = declare()

    def remove_hooks(self) -> None:
        """Take the hook off the model."""
        self._unwatch()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and the recorded forward passes."""
        super().zero_grad(set_to_none)
        self._passes.clear()

    def add_param_group(self, param_group: Group) -> None:
        """One group: the Fisher matrix couples all parameters."""
        if self.param_groups:
            raise AxesError("ExactNaturalGradient has one group: its Fisher matrix couples all parameters of the model")
        super().add_param_group(param_group)
        if self._shards is not None:
            raise AxesError("ExactNaturalGradient couples all parameters of the model: not for sharded ones (DTensors)")

    def __getstate__(self) -> dict[str, Any]:
        raise AxesError("ExactNaturalGradient is bound to its model: save state_dict() instead of the object")

    def _record(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not (self._recording and torch.is_grad_enabled()):
            return
        if not isinstance(output, Tensor) or not all(isinstance(x, Tensor) for x in args):
            raise AxesError("ExactNaturalGradient: the model must map tensors to one tensor (N, ..., C)")
        recorded = _Pass(tuple(x.detach() for x in args))
        if output.requires_grad:
            output.register_hook(recorded.arrived)
        self._passes.append(recorded)

    def _advance(
        self,
        group: Group,
        update: StateUpdate,
        parameters: list[Tensor],
        today: Today | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        if not self._passes:
            raise AxesError("ExactNaturalGradient: the model was not called since the last step")
        update = (today or self._today(group)).of(update)
        first = parameters[0]
        dtype = torch.promote_types(first.dtype, torch.float32)
        w = torch.cat([p.detach().reshape(-1).to(dtype) for p in parameters])[None]
        g = torch.cat([p.grad.reshape(-1).to(dtype) for p in parameters if p.grad is not None])[None]
        scores = self._scores(parameters, dtype)
        signal = {"g": -g if group["maximize"] else g, "kk": outer_sum(scores) / self._examples}
        flat = self.state.get(first)
        state = trees.unflatten(update, flat, w) if flat else update.init(signal, (w,))
        state, out = update.step(state, {**signal, **rates(group, update, w)})
        self.state[first].update(trees.flatten(update, state))
        pieces = out.weights[0][0].split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            show(parameter, piece)
        self._passes.clear()

    def _scores(self, parameters: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Rows s with mean over examples of sum s s^T = F: (rows, P)."""
        names: dict[Tensor, str] = {p: name for name, p in self._model.named_parameters()}
        live = {names[p]: p.detach() for p in parameters}
        self._recording, self._examples = False, 0
        rows = []
        try:
            with torch.enable_grad():
                for recorded in self._passes:
                    outputs, jacobian = self._jacobian(live, recorded.args)
                    n = len(outputs)
                    self._examples += n
                    rows.append(self._weigh(outputs, jacobian.to(dtype), recorded, n))
        finally:
            self._recording = True
        return torch.cat(rows).detach()

    def _jacobian(self, live: dict[str, Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Outputs (N, C) and their Jacobians (N, C, P), every position of an example a row of its own."""

        def one(values: dict[str, Tensor], *example: Tensor) -> tuple[Tensor, Tensor]:
            out = functional_call(self._model, values, tuple(x[None] for x in example))[0]
            out = out.reshape(-1, out.shape[-1]) if out.ndim else out.reshape(1, 1)
            return out, out

        dims = (None, *(0 for _ in args))
        jacobians, outputs = vmap(jacrev(one, has_aux=True), dims, randomness="different")(live, *args)
        outputs = outputs.flatten(0, 1)
        flat = [j.reshape(*outputs.shape, -1) for j in jacobians.values()]
        return outputs, torch.cat(flat, -1)

    def _weigh(self, outputs: Tensor, jacobian: Tensor, recorded: _Pass, n: int) -> Tensor:
        if self._likelihood == "gaussian":
            return jacobian.flatten(0, 1)
        if self._likelihood == "categorical":
            p = outputs.to(jacobian.dtype).softmax(-1)[..., None]
            return (p.sqrt() * (jacobian - (p * jacobian).sum(1, keepdim=True))).flatten(0, 1)
        if recorded.gradient is None:
            raise AxesError("ExactNaturalGradient: the empirical Fisher needs a backward pass for every forward pass")
        delta = recorded.gradient.reshape(n, -1).to(jacobian.dtype) * n  # of a loss that is a mean over examples
        return torch.einsum("nc,ncp->np", delta, jacobian)


class _Pass:
    """One forward pass: its inputs, and the gradient of its output once it has arrived."""

    def __init__(self, args: tuple[Tensor, ...]) -> None:
        self.args = args
        self.gradient: Tensor | None = None

    def arrived(self, gradient: Tensor) -> None:
        self.gradient = gradient.detach()
