"""Trials: a task with the model around what is compared, and what is measured of it.

A trial is a frozen value. Batches are a function of (seed, step) alone, so that an arm and its control see the same;
what is held out is the same for all seeds.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axes.errors import UnknownName
from axes.models import Architecture, DeepNarrow, LanguageModel
from axes.tasks.batches import mixed, training_batch, validation_batches
from axes.tasks.corpus import Corpus, embedded
from axes.tasks.digits import digits
from axes.tasks.recall import FuzzyRecall, LatestRecall, Memorisation, MultiQueryRecall, NoisyRecall, SelectiveCopy
from axes.tasks.synthetic import IGNORED, Task
from axes.tasks.teacher import DeepTeacher, FlippedLabels
from axes.tasks.tracking import GroupWord, ModularSum
from axes.transfer.experiments import (
    DIGITS,
    FLIPPED,
    LATE,
    LATEST,
    LAYERS,
    MANY,
    NOISY,
    PARITY,
    PERMUTATIONS,
    RECALL,
    SOURCE,
    TEXT,
)
from axes.transfer.systems import System

HELD_OUT = 1 << 40  # a seed that no run has
Metric = Literal["accuracy", "bits per byte", "explained"]
By = dict[str, dict[str, float]]  # the metric by position, by length, by number of pairs; of answers the loss as well


def loss_by(kind: str) -> str:
    """The name of cross-entropy by position, length or pairs, where the metric by it is of that name."""
    return f"loss by {kind}"


class Held(NamedTuple):
    """What is measured of a model on data that no run has seen."""

    value: float
    by: By


@dataclass(frozen=True)
class Trial(ABC):
    """steps: of a run; batch: examples in one."""

    name: str
    steps: int
    batch: int
    metric: ClassVar[Metric] = "accuracy"

    @property
    def higher(self) -> bool:
        """Whether more of the metric is better."""
        return self.metric != "bits per byte"

    @property
    def nothing(self) -> float:
        """The metric of who knows nothing; a run that broke down is counted so."""
        return 8.0 if self.metric == "bits per byte" else 0.0

    @property
    @abstractmethod
    def seen(self) -> int:
        """Tokens, or examples, in a step."""

    @abstractmethod
    def model(self, system: System, device: torch.device | str | None = None) -> nn.Module: ...

    @abstractmethod
    def batch_of(self, seed: int, step: int) -> tuple[Tensor, ...]:
        """What `loss` takes beside the model."""

    @abstractmethod
    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor: ...

    @abstractmethod
    def held_out(self, model: nn.Module, device: torch.device) -> Held: ...

    def one(self) -> tuple[Tensor, ...]:
        """A batch of one example, for counting."""
        batch: tuple[Tensor, ...] = replace(self, batch=1).batch_of(0, 0)
        return batch

    def prepare(self) -> None:
        """Raise AxesError now if data is missing that a run would ask for."""
        self.batch_of(0, 0)


def _language_model(architecture: Architecture, system: System, device: torch.device | str | None) -> LanguageModel:
    made = {"layer": system.layer(), "mixer": system.mixer()}
    return LanguageModel(architecture, **made, shared=system.shared, device=device)  # type: ignore[arg-type]


# ---- tokens --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens(Trial):
    """A synthetic task. longer: further lengths, and harder: further numbers of pairs, that are only tested."""

    task: Task
    architecture: Architecture
    longer: tuple[int, ...] = ()
    harder: tuple[Task, ...] = ()
    tested: int = 256

    @property
    def seen(self) -> int:
        return self.batch * self.task.length  # type: ignore[attr-defined]

    def model(self, system: System, device: torch.device | str | None = None) -> nn.Module:
        return _language_model(replace(self.architecture, vocabulary=self.task.vocabulary), system, device)

    def batch_of(self, seed: int, step: int) -> tuple[Tensor, ...]:
        return self.task.draw(self.batch, mixed(seed, step))

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(model(tokens)[0].flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)

    @torch.no_grad()
    def held_out(self, model: nn.Module, device: torch.device) -> Held:
        own = self._read(model, self.task, None, device)
        by: By = {
            "position": _by_position(own.right, own.asked),
            loss_by("position"): _by_position(own.loss, own.asked),
        }
        lengths = {str(n): self._read(model, self.task, n, device) for n in self.longer}
        pairs = {str(t.pairs): self._read(model, t, None, device) for t in self.harder}  # type: ignore[attr-defined]
        for kind, further in (("length", lengths), ("pairs", pairs)):
            if further:
                every = {str(getattr(self.task, kind)): own, **further}
                by[kind] = {n: _share(read.right, read.asked) for n, read in every.items()}
                by[loss_by(kind)] = {n: _share(read.loss, read.asked) for n, read in every.items()}
        return Held(_share(own.right, own.asked), by)

    def _read(self, model: nn.Module, task: Task, length: int | None, device: torch.device) -> _Read:
        """A model's answers, a batch at a time."""
        found = []
        for part in range(-(-self.tested // self.batch)):
            tokens, targets = task.draw(self.batch, mixed(HELD_OUT, part), length)
            said, wanted = model(tokens.to(device))[0].float(), targets.to(device)
            loss = F.cross_entropy(said.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none")
            read = (said.argmax(-1) == wanted, loss.view_as(wanted), wanted != IGNORED)
            found.append([x.cpu().double() for x in read])
        return _Read(*(torch.cat(parts) for parts in zip(*found, strict=True)))


class _Read(NamedTuple):
    """Where an answer is right, its cross-entropy in nats, and where one is asked for; (tested, T) each."""

    right: Tensor
    loss: Tensor
    asked: Tensor


@final
@dataclass(frozen=True)
class Late(Tokens):
    """What is right in the last eighth of the longest windows: first letters are easy, and so are short ones."""

    @torch.no_grad()
    def held_out(self, model: nn.Module, device: torch.device) -> Held:
        found = super().held_out(model, device)
        length: int = max(self.longer, default=self.task.length)  # type: ignore[attr-defined]
        read = self._read(model, self.task, length, device)
        late = slice(length - length // 8, length)
        return Held(_share(read.right[:, late], read.asked[:, late]), found.by)


@final
@dataclass(frozen=True)
class Asked(Tokens):
    """As many answers in every window, and the head says nothing else.

    The model starts as published ones do, with tokens' vectors of standard deviation 0.02: beside vectors of unit
    variance what the first layer finds is small, and no rate that was tried learns 32 pairs in 2,000 steps. Products
    are of bfloat16 under autocast, where papers have them; held-out windows are read in float32.
    """

    deviation: float = 0.02
    products: torch.dtype | None = torch.bfloat16

    def model(self, system: System, device: torch.device | str | None = None) -> nn.Module:
        model = super().model(system, device)
        nn.init.normal_(model.embedding.weight, std=self.deviation)  # type: ignore[union-attr, arg-type]
        return model

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        tokens, targets = batch
        pairs: int = self.task.pairs  # type: ignore[attr-defined]
        places = targets.ne(IGNORED).to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :pairs]
        # a graph that is replayed must cast weights anew, so nothing is kept
        with torch.autocast(tokens.device.type, self.products, self.products is not None, cache_enabled=False):
            hidden, _ = model.hidden(model.embedding(tokens))  # type: ignore[operator]
            said = model.head(hidden.take_along_dim(places[..., None], 1))  # type: ignore[operator]
        return F.cross_entropy(said.flatten(0, 1).float(), targets.take_along_dim(places, 1).flatten())


def _share(right: Tensor, asked: Tensor) -> float:
    return float(right.sum() / asked.sum())


def _by_position(right: Tensor, asked: Tensor, parts: int = 8) -> dict[str, float]:
    """Means in eighths of the window, named by where they end; without those that ask nothing."""
    length = right.shape[1]
    ends = [round(length * (i + 1) / parts) for i in range(parts)]
    spans = {str(b): slice(a, b) for a, b in zip([0, *ends], ends, strict=False)}
    return {end: _share(right[:, s], asked[:, s]) for end, s in spans.items() if asked[:, s].any()}


# ---- text ----------------------------------------------------------------------------------------------------------


@functools.cache
def _corpus(limit: int) -> Corpus:
    return embedded(limit or None)


@dataclass(frozen=True)
class Text(Trial):
    """Bytes of the embedded corpus. windows: that are held out."""

    architecture: Architecture
    context: int = 64
    windows: int = 64
    limit: int = 2_000_000
    metric = "bits per byte"

    @property
    def seen(self) -> int:
        return self.batch * self.context

    def model(self, system: System, device: torch.device | str | None = None) -> nn.Module:
        return _language_model(self.architecture, system, device)

    def batch_of(self, seed: int, step: int) -> tuple[Tensor, ...]:
        return (training_batch(_corpus(self.limit).train, seed, step, self.batch, self.context),)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        loss: Tensor = model.loss(*batch)  # type: ignore[operator]
        return loss

    @torch.no_grad()
    def held_out(self, model: nn.Module, device: torch.device) -> Held:
        bits = self._bits(model, device, self.context)
        return Held(float(bits.mean()), {"position": _by_position(bits, torch.ones_like(bits))})

    def _bits(self, model: nn.Module, device: torch.device, context: int) -> Tensor:
        """Of every byte in windows that are held out, (windows, context), as many tokens at a time as in a step."""
        text, batch = _corpus(self.limit).validation, max(1, self.seen // context)
        windows = max(1, self.windows * self.context // context)
        found = []
        for part in validation_batches(text, windows, batch, context):
            tokens = part.to(device)
            logits = model(tokens[:, :-1])[0].float()
            found.append(F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").cpu().double())
        return torch.cat(found) / math.log(2.0)


@final
@dataclass(frozen=True)
class Source(Text):
    """A text on which a model is read in longer windows than those of training: by length, and in the longest by
    position, which is what a context of that many bytes is worth."""

    longer: tuple[int, ...] = ()

    @torch.no_grad()
    def held_out(self, model: nn.Module, device: torch.device) -> Held:
        bits = {n: self._bits(model, device, n) for n in (self.context, *self.longer)}
        longest = bits[max(bits)]
        by: By = {"length": {str(n): float(b.mean()) for n, b in bits.items()}}
        return Held(
            float(bits[self.context].mean()), {**by, "position": _by_position(longest, torch.ones_like(longest))}
        )


# ---- classes and numbers -------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Digits(Trial):
    """Handwritten digits by a network of two hidden layers."""

    width: int = 64

    @property
    def seen(self) -> int:
        return self.batch

    def model(self, system: System, device: torch.device | str | None = None) -> nn.Module:
        widths, parts = (64, self.width, self.width, 10), []
        for i, o in zip(widths, widths[1:], strict=False):
            parts += [nn.Linear(i, o, device=device), nn.ReLU()]
        return nn.Sequential(*parts[:-1])

    def batch_of(self, seed: int, step: int) -> tuple[Tensor, ...]:
        found = digits()
        draw = torch.Generator().manual_seed(mixed(seed, step))
        chosen = torch.randint(len(found.labels), (self.batch,), generator=draw)
        return found.images[chosen], found.labels[chosen]

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def held_out(self, model: nn.Module, device: torch.device) -> Held:
        found = digits()
        right = model(found.held_images.to(device)).argmax(-1).cpu() == found.held_labels
        return Held(float(right.double().mean()), {})


@final
@dataclass(frozen=True)
class Deep(Trial):
    """Classes of a deep teacher by a deep narrow network."""

    task: DeepTeacher
    width: int = 48
    layers: int = 24
    tested: int = 2048

    @property
    def seen(self) -> int:
        return self.batch

    def model(self, system: System, device: torch.device | str | None = None) -> nn.Module:
        t, mixer = self.task, system.mixer()
        assert mixer is not None, "a deep narrow network is for depth mixers"
        return DeepNarrow(t.features, self.width, self.layers, t.outputs, mixer, shared=system.shared, device=device)

    def batch_of(self, seed: int, step: int) -> tuple[Tensor, ...]:
        return self.task.draw(self.batch, mixed(seed, step))

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def held_out(self, model: nn.Module, device: torch.device) -> Held:
        x, y = self.task.draw(self.tested, mixed(HELD_OUT, 0))
        return Held(float((model(x.to(device)).argmax(-1).cpu() == y).double().mean()), {})


@final
@dataclass(frozen=True)
class Regression(Trial):
    """A linear student of a linear teacher some of whose labels are flipped; what it explains of true labels."""

    task: FlippedLabels
    tested: int = 2048
    metric = "explained"

    @property
    def seen(self) -> int:
        return self.batch

    def model(self, system: System, device: torch.device | str | None = None) -> nn.Module:
        student = nn.Linear(self.task.features, self.task.outputs, bias=False, device=device)
        nn.init.zeros_(student.weight)
        return student

    def batch_of(self, seed: int, step: int) -> tuple[Tensor, ...]:
        return self.task.draw(self.batch, mixed(seed, step))

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        # a sum of halves of squares: rules that are fed examples then see the label as their value
        return 0.5 * (model(batch[0]) - batch[1]).square().sum()

    @torch.no_grad()
    def held_out(self, model: nn.Module, device: torch.device) -> Held:
        x, _ = self.task.draw(self.tested, mixed(HELD_OUT, 0))
        y = self.task.true(x)
        missed = (model(x.to(device)).cpu() - y).square().mean() / y.square().mean()
        return Held(max(0.0, 1.0 - float(missed)), {})


# ---- sizes ---------------------------------------------------------------------------------------------------------


def _small() -> tuple[Trial, ...]:
    tokens, text = Architecture("delta-net", "residual", 2, 32, 2), Architecture("rope", "residual", 2, 48, 2)

    def of(name: str, task: Task, **more: object) -> Trial:
        return Tokens(name, 80, 16, task, tokens, **more)  # type: ignore[arg-type]

    return (
        of(RECALL, MultiQueryRecall(6, 32, 64), harder=(MultiQueryRecall(3, 32, 64),)),
        of("selective-copy", SelectiveCopy(4, 32, 16)), of(NOISY, NoisyRecall(32)), of("fuzzy-recall", FuzzyRecall(32)),
        of("memorisation", Memorisation(32, 64)), replace(of(PARITY, ModularSum(16), longer=(32,)), steps=150),
        Late(LATE, 150, 16, ModularSum(16), tokens, longer=(32,)),
        Late(LATEST, 80, 16, LatestRecall(32, 4, 4), tokens, longer=(64,)),
        Asked(MANY, 450, 24, MultiQueryRecall(8, 32, 64), replace(tokens, heads=1), products=None),
        of("modular-sum", ModularSum(16, 5), longer=(32,)), of(PERMUTATIONS, GroupWord(16, 3), longer=(32,)),
        of("permutations-5", GroupWord(16, 5), longer=(32,)), Text(TEXT, 60, 8, text, windows=32),
        Source(SOURCE, 60, 8, tokens, windows=32, longer=(128,)),
        Digits(DIGITS, 150, 64), Deep(LAYERS, 100, 64, DeepTeacher(), layers=12),
        Regression(FLIPPED, 100, 8, FlippedLabels()),
    )  # fmt: skip


def _whole() -> tuple[Trial, ...]:
    tokens, text = Architecture("delta-net", "residual", 2, 64, 4), Architecture("rope", "residual", 6, 64, 4)
    pairs = MultiQueryRecall(16, 128, 512)

    def of(name: str, steps: int, task: Task, **more: object) -> Trial:
        return Tokens(name, steps, 64, task, tokens, **more)  # type: ignore[arg-type]

    return (
        of(RECALL, 1500, pairs, harder=(replace(pairs, pairs=8), replace(pairs, pairs=32, length=256))),
        of("selective-copy", 1000, SelectiveCopy(16, 256, 16)), of(NOISY, 1500, NoisyRecall()),
        of("fuzzy-recall", 1500, FuzzyRecall()), of("memorisation", 1500, Memorisation()),
        of(PARITY, 600, ModularSum(40), longer=(80, 160, 256)),
        Late(LATE, 800, 64, ModularSum(64), tokens, longer=(128, 256)), _long(4000),
        Late(LATEST, 400, 64, LatestRecall(128, 4, 8, 0.25), tokens, longer=(256, 512)),
        of("modular-sum", 1500, ModularSum(64, 5), longer=(128, 256)),
        of(PERMUTATIONS, 1500, GroupWord(64, 3), longer=(128, 256)),
        of("permutations-5", 3000, GroupWord(32, 5), longer=(64, 128)), _source(2000),
        Text(TEXT, 400, 16, text, context=128, windows=256, limit=0), Digits(DIGITS, 200, 64),
        Deep(LAYERS, 1000, 128, DeepTeacher()), Regression(FLIPPED, 400, 16, FlippedLabels()),
    )  # fmt: skip


def _long(steps: int) -> Trial:
    """Recall at a published size, by one head: four of 32 have no room for 32 pairs beside what else they keep."""
    model, pairs = Architecture("delta-net", "residual", 2, 128, 1), MultiQueryRecall(32, 256, 2048)
    return Asked(MANY, steps, 64, pairs, model, harder=(replace(pairs, pairs=16), replace(pairs, pairs=64)))


def _source(steps: int) -> Trial:
    """Ten million parameters and more, whatever the layer."""
    model = Architecture("delta-net", "residual", 8, 320, 5)
    return Source(SOURCE, steps, 16, model, context=512, windows=64, limit=0, longer=(1024, 2048))


def _minutes() -> tuple[Trial, ...]:
    tokens, text = Architecture("delta-net", "residual", 2, 64, 4), Architecture("rope", "residual", 6, 64, 4)
    pairs = MultiQueryRecall(8, 64, 256)

    def of(name: str, steps: int, task: Task, **more: object) -> Trial:
        return Tokens(name, steps, 64, task, tokens, **more)  # type: ignore[arg-type]

    return (
        of(RECALL, 1000, pairs, harder=(replace(pairs, pairs=4), replace(pairs, pairs=16))),
        of("selective-copy", 1000, SelectiveCopy(8, 64, 16)), of(NOISY, 1000, NoisyRecall(64)),
        of("fuzzy-recall", 1000, FuzzyRecall(64)), of("memorisation", 1000, Memorisation()),
        of(PARITY, 600, ModularSum(40), longer=(80, 160, 256)),
        Late(LATE, 800, 64, ModularSum(64), tokens, longer=(128, 256)), _long(2500),
        Late(LATEST, 400, 64, LatestRecall(128, 4, 8, 0.25), tokens, longer=(256, 512)),
        of("modular-sum", 1000, ModularSum(32, 5), longer=(64, 128)),
        of(PERMUTATIONS, 1000, GroupWord(32, 3), longer=(64, 128)),
        of("permutations-5", 1500, GroupWord(16, 5), longer=(32, 64)), _source(600),
        Text(TEXT, 300, 16, text, context=128, windows=128, limit=0), Digits(DIGITS, 200, 64),
        Deep(LAYERS, 400, 128, DeepTeacher(), layers=12), Regression(FLIPPED, 400, 16, FlippedLabels()),
    )  # fmt: skip


FORMS = ("quick", "small", "whole")


@functools.cache
def trials(form: str) -> dict[str, Trial]:
    """Every trial of a form by name: "quick" for a CPU, "small" for minutes of a GPU, "whole". Raises UnknownName."""
    if form not in FORMS:
        raise UnknownName("form", form, FORMS)
    made = {"quick": _small, "small": _minutes, "whole": _whole}[form]()
    return {t.name: t for t in made}


def trial(name: str, form: str) -> Trial:
    """A trial by name. Raises UnknownName with the nearest names."""
    known = trials(form)
    if name not in known:
        raise UnknownName("task", name, known)
    return known[name]
