"""Training of a language model as a value that can be saved, loaded and stepped.

What is saved is everything the next step depends on: parameters, optimizer, schedule, generators and the position in
the data, which is the step number alone. So a run that was stopped and resumed takes the same steps, bit for bit.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axes import catalogue, parallel
from axes.errors import AxesError, NotFiniteError
from axes.models.flops import training_flops
from axes.models.language_model import LanguageModel, Logits, state_bytes
from axes.models.options import accepted_options
from axes.programs.sent import Told
from axes.tasks.batches import training_batch, validation_batches
from axes.tasks.configuration import Configuration
from axes.tasks.corpus import Corpus, as_tokens
from axes.tasks.machine import peak_flops
from axes.tasks.processes import Processes
from axes.tasks.schedules import Schedule

if TYPE_CHECKING:
    from axes.kernels.common.ahead import Rehearsal

_MANY = 4096  # tokens in a vocabulary from which on logits of all are not kept


@final
class Training:
    """Model, optimizer, schedule and position of one run; construction seeds torch's generators and sets its threads.

    Args:
        configuration: every setting.
        corpus: the text, from `configuration.corpus()`.
        processes: those of torchrun, all of which step together; None for this one alone.
    """

    def __init__(self, configuration: Configuration, corpus: Corpus, processes: Processes | None = None) -> None:
        configuration.require_machine(1 if processes is None else processes.size)
        corpus.require(configuration.context)
        if configuration.threads:
            torch.set_num_threads(configuration.threads)
        torch.manual_seed(configuration.seed)
        self.configuration = configuration
        self.corpus = corpus
        self.processes = processes
        self.device = configuration.torch_device() if processes is None else processes.device
        self._require_shares()
        self.model = configuration.model(self.device)
        if processes is not None:
            processes.shard(self.model)
        self._network: nn.Module = Logits(self.model)
        self.named: nn.Module = self._network  # by whose names checkpoints of several processes call parameters
        self.optimizer = make_optimizer(configuration, self._network)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._schedule())
        self.position = 0  # steps taken
        self._drawn: dict[int, Tensor] = {}  # windows of the step to come
        self._told: Told | None = None  # the loss and the norm of a step
        self.saved = 0  # and at the last checkpoint, while a run goes on
        self.rehearsal: Rehearsal | None = None  # of the first step, from when it was asked for until it is waited for
        if configuration.compile:
            self._network = torch.compile(self._network)  # type: ignore[assignment]

    @property
    def finished(self) -> bool:
        return self.position >= self.configuration.steps

    @property
    def leads(self) -> bool:
        """Whether this process writes and reports."""
        return self.processes is None or self.processes.leads

    def _require_shares(self) -> None:
        settings, processes = self.configuration, self.processes
        segments, replicas = settings.sequence_parallel, 1 if processes is None else processes.replicas
        if processes is None and segments > 1:
            raise AxesError(
                f"sequence-parallel {segments} needs as many processes: torchrun --nproc-per-node {segments} -m axes "
                "train ..."
            )
        if settings.batch % (settings.accumulate * replicas):
            raise AxesError(
                f"batch {settings.batch} is no multiple of {settings.accumulate} (accumulate) times {replicas} "
                "(processes with windows of their own): choose another batch"
            )
        if settings.context % segments:
            raise AxesError(f"context {settings.context} is no multiple of sequence-parallel {segments}")

    def throughput(self, seconds: float) -> dict[str, float]:
        """Tokens a second of all processes, and the share of their peak that the model's operations are (MFU)."""
        speed = self.configuration.batch * self.configuration.context / seconds
        peak = 1e12 * self.configuration.peak or peak_flops(self.device, self.configuration.dtype)
        if not peak:
            return {"tokens_per_second": speed}
        devices = 1 if self.processes is None else self.processes.size
        return {"tokens_per_second": speed, "mfu": speed * self.flops_per_token / (peak * devices)}

    @cached_property
    def flops_per_token(self) -> float:
        return training_flops(self.model, self.configuration.context)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def loss(self, windows: Tensor) -> Tensor:
        """Mean negative log-likelihood per token, in nats.

        Args:
            windows: (B, context + 1) integers.
        """
        return self.loss_of(self.model, windows, self._network)

    def loss_of(self, model: LanguageModel, windows: Tensor, network: nn.Module | None = None) -> Tensor:
        """The same of another model of these settings; network: what gives its logits where all are wanted."""
        if self.configuration.vocabulary >= _MANY and not self.configuration.compile:
            with self._autocast():
                return model.loss(windows)
        with self._autocast():
            logits = model(windows[:, :-1])[0] if network is None else network(windows[:, :-1])
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide).flatten(0, 1), windows[:, 1:].flatten())

    def step(self) -> dict[str, float]:
        """Take one step; the loss, the gradient's norm and the learning rate that it used.

        Raises:
            NotFiniteError: the loss or a gradient is not finite; names the parameter, and no step is taken.
        """
        settings = self.configuration
        windows = self._windows(self.position)
        rate = float(self.scheduler.get_last_lr()[0])
        if not self.model.training:  # a walk over all modules
            self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(windows)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        found = torch.stack([loss.double(), _whole(norm).double()])
        self._told = self._told or Told(found)
        self._told.tell(found)
        if settings.clip:  # by a norm that is no number nothing is scaled, so that what is not finite stays alone
            finite = torch.nan_to_num(norm, nan=0.0, posinf=0.0)
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), settings.clip, finite)
        self._drawn = {self.position + 1: self._windows(self.position + 1)}  # while the device is busy
        value, size = self._told.numbers()  # the step's one wait, while the device scales what is clipped
        if not (math.isfinite(value) and math.isfinite(size)):
            raise self._not_finite(value)
        self.optimizer.step()
        self.scheduler.step()
        self.position += 1
        return {"loss": value, "bits_per_byte": self._bits(value), "gradient_norm": size, "lr": rate}

    def _windows(self, step: int) -> Tensor:
        """Of a step, on the device, by its number alone: those that were drawn ahead, unless the position has been set
        since."""
        if step in self._drawn:
            return self._drawn[step]
        settings = self.configuration
        drawn = training_batch(self.corpus.train, settings.seed, step, settings.batch, settings.context)
        return self._there(self.corpus.known(drawn))

    def _backward(self, windows: Tensor) -> Tensor:
        """The loss of all windows, its gradient in the parameters; part by part, of equal sizes."""
        parts = windows.chunk(self.configuration.accumulate)
        total: Tensor | None = None
        for n, part in enumerate(parts):
            if self.processes is not None:
                part = self.processes.own(part)
                self.model.set_requires_gradient_sync(n == len(parts) - 1)  # type: ignore[operator]
            loss = self.loss(part)
            loss = loss if len(parts) == 1 else loss / len(parts)
            with torch.autograd.grad_mode.set_multithreading_enabled(False):  # another thread has to be woken
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total if self.processes is None else self.processes.mean(total)

    def _there(self, windows: Tensor) -> Tensor:
        """On the device, without waiting for what it still does of the last step."""
        if self.device.type != "cuda":
            return windows.to(self.device)
        return windows.pin_memory().to(self.device, non_blocking=True)

    def _bits(self, nats: float) -> float:
        """Bits per byte of nats per token."""
        return nats / math.log(2.0) / self.corpus.bytes_per_token

    @torch.no_grad()
    def validation_bits_per_byte(self) -> float:
        settings = self.configuration
        self.model.eval()
        total, count = 0.0, 0
        for windows in validation_batches(
            self.corpus.validation, settings.validation_windows, settings.batch, settings.context
        ):
            total += self._mean_loss(self.corpus.known(windows)) * len(windows)
            count += len(windows)
        return self._bits(total / count)

    def _mean_loss(self, windows: Tensor) -> float:
        """Of windows, over all processes, all of which make as many calls."""
        if self.processes is None:
            return self.loss(windows.to(self.device)).item()
        short = -len(windows) % self.processes.replicas
        every = torch.cat((windows, windows[-1:].expand(short, -1))) if short else windows
        mine = self.processes.own(every)
        first = self.processes.replica * len(mine)
        real = max(0, min(len(windows) - first, len(mine)))  # windows that are no repetition of the last one
        loss = self.loss((mine[:real] if real else mine).to(self.device)) * real
        return self.processes.mean(loss).item() * self.processes.replicas / len(windows)

    @torch.no_grad()
    def state_bytes(self) -> int:
        """Bytes that the sequence layers remember after one window."""
        self.model.eval()
        window = as_tokens(self.corpus.validation[: self.configuration.context])[None]
        parallel.whole(self.model)  # a part of a sequence has no state
        try:
            with self._autocast():
                return state_bytes(self.model(window.to(self.device))[1])
        finally:
            if self.processes is not None:
                self.processes.split(self.model)

    def require_finite_parameters(self) -> None:
        """Raise rather than let a checkpoint hold a value that is not a number."""
        for name, parameter in self.model.named_parameters():
            if not _finite(parameter):
                raise NotFiniteError(
                    f"after step {self.position} the parameter {name!r} is not finite; the last checkpoint is kept; "
                    f"try a lower --lr than {self.configuration.learning_rate():g}"
                )

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, as plain containers of tensors."""
        return {
            **self.numbers(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": self.generators(),
        }

    def numbers(self) -> dict[str, Any]:
        """Of `state_dict`, what every process has."""
        return {
            "configuration": self.configuration.as_dict(),
            "corpus": self.corpus.provenance.sha256,
            "position": self.position,
            "scheduler": self.scheduler.state_dict(),
        }

    def generators(self) -> dict[str, Tensor]:
        generators = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.device)
        return generators

    def sharded(self) -> dict[str, Any]:
        """Of `state_dict`, what processes hold shards of, by name: for `torch.distributed.checkpoint`."""
        from torch.distributed.checkpoint import state_dict as state_dicts  # seconds, for processes alone

        return {
            "model": state_dicts.get_model_state_dict(self.model),
            "optimizer": state_dicts.get_optimizer_state_dict(self.named, self.optimizer),
        }

    def load_sharded(self, state: dict[str, Any], numbers: dict[str, Any]) -> None:
        """Continue from `sharded`, read into place, and `numbers` with the `generators` of this process."""
        from torch.distributed.checkpoint import state_dict as state_dicts  # seconds, for processes alone

        self._require_text(numbers)
        state_dicts.set_model_state_dict(self.model, state["model"])
        state_dicts.set_optimizer_state_dict(self.named, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(numbers["scheduler"])
        self.position = int(numbers["position"])
        self._set_generators(numbers["generators"])

    def _set_generators(self, generators: dict[str, Tensor]) -> None:
        torch.set_rng_state(generators["cpu"].cpu())
        if self.device.type == "cuda" and "cuda" in generators:
            torch.cuda.set_rng_state(generators["cuda"].cpu(), self.device)

    def _require_text(self, state: dict[str, Any]) -> None:
        if state.get("corpus") != self.corpus.provenance.sha256:
            raise AxesError(
                "the checkpoint was trained on another text than the one here "
                f"({self.corpus.provenance}): another Python version, or files that have changed since"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            AxesError: the state is of another text or of another model.
        """
        self._require_text(state)
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.position = int(state["position"])
            self._set_generators(state["generators"])
        except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise AxesError(f"the checkpoint does not fit the run's configuration: {reason[:300]}") from None

    def end_after(self, steps: int) -> None:
        """Let the run end after so many steps: rates follow the schedule over these from here on."""
        if steps < self.position:
            raise AxesError(f"the run has taken {self.position} steps: --steps must be at least that, not {steps}")
        self.configuration = replace(self.configuration, steps=steps)
        schedule = self._schedule()
        self.scheduler.lr_lambdas = [schedule for _ in self.scheduler.lr_lambdas]
        rates = [base * schedule(self.position) for base in self.scheduler.base_lrs]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.scheduler._last_lr = rates

    def _schedule(self) -> Schedule:
        settings = self.configuration
        return Schedule(settings.schedule, settings.warmup, settings.steps)

    def tuples(self) -> dict[str, Any]:
        """The exact tuple of each axis, as the objects of this run carry it, and the rule of every parameter."""
        settings = self.configuration

        def declared(name: str, owner: object) -> dict[str, Any]:
            return {"name": name, "update": repr(getattr(owner, "update", None))}

        data = declared(settings.optimizer, self.optimizer)
        report = getattr(self.optimizer, "report", None)
        if callable(report):
            data["rules"] = {row.name.removeprefix("model."): row.rule for row in report().rows}
        return {
            "sequence": declared(settings.sequence, self.model.sublayers[0]),
            "depth": declared(settings.depth, self.model.mixers[0]),
            "data": data,
        }

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.configuration.precision.autocast:
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def _not_finite(self, loss: float) -> NotFiniteError:
        step = self.position + 1
        advice = (
            "the step was not taken and the last checkpoint is kept; try a lower --lr than "
            f"{self.configuration.learning_rate():g}, a longer --warmup or a smaller --clip"
        )
        for name, parameter in self.model.named_parameters():
            if not _finite(parameter):
                return NotFiniteError(f"step {step}: the parameter {name!r} is not finite; {advice}")
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not _finite(parameter.grad):
                return NotFiniteError(f"step {step}: the gradient of {name!r} is not finite (loss {loss:g}); {advice}")
        return NotFiniteError(f"step {step}: the loss is {loss:g} or the gradients' norm overflows; {advice}")


def _finite(x: Tensor) -> bool:
    """On all processes, for what is sharded."""
    return bool(torch.isfinite(_whole(x.detach())).all())


def _whole(x: Tensor) -> Tensor:
    """What all processes hold, of a DTensor: known by its method, since its module takes seconds to import."""
    full = getattr(x, "full_tensor", None)
    return x if full is None else full()


def make_optimizer(configuration: Configuration, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the catalogue for this model; it routes parameters to its rules itself."""
    cls = catalogue.get(configuration.optimizer, axis="data").cls
    options = configuration.options()
    if configuration.weight_decay is not None and not accepted_options(cls, weight_decay=0.0):
        raise AxesError(f"optimizer {configuration.optimizer!r} has no weight decay: leave --weight-decay out")
    # rules that use the Fisher matrix of the outputs are told what the outputs parametrise
    options.update(accepted_options(cls, likelihood="categorical"))
    # the norm of all gradients has been looked at before its step: a second look would wait for the device once more
    optimizer: torch.optim.Optimizer = cls(model, check_finite=False, **options)
    return optimizer
