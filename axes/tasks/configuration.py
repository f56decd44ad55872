"""The configuration of a run: every setting, checked where it is made, written to and read from `config.json`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, final

import torch

from axes import catalogue
from axes.errors import AxesError, UnknownName
from axes.models.language_model import Architecture, LanguageModel
from axes.tasks import tokens
from axes.tasks.corpus import VOCABULARY, Corpus, embedded, from_files
from axes.tasks.machine import most_threads, require_memory
from axes.tasks.schedules import SCHEDULES


@final
@dataclass(frozen=True)
class Precision:
    """The dtypes of a run. autocast: products are bfloat16 whatever the parameters are."""

    parameters: torch.dtype
    streams: torch.dtype
    autocast: bool = False


DTYPES: Mapping[str, Precision] = {
    "float32": Precision(torch.float32, torch.float32),
    "float64": Precision(torch.float64, torch.float64),
    "bfloat16": Precision(torch.float32, torch.float32, autocast=True),
    "bfloat16-streams": Precision(torch.float32, torch.bfloat16, autocast=True),
    "bfloat16-pure": Precision(torch.bfloat16, torch.bfloat16),
}
TRACKERS = ("tensorboard", "wandb")

_FALLBACK_LR = 1e-3  # for optimizers that state no `default_lr`
# For small models and few steps, where the defaults of an optimizer, which are torch's, are for other ones.
_OPTIONS: Mapping[str, Mapping[str, float]] = {
    "sgd": {"lr": 0.3, "momentum": 0.9},
    "adam": {"lr": 5e-3},
    "adamw": {"lr": 5e-3},
    "nadam": {"lr": 5e-3},
    "muon": {"lr": 2e-2, "weight_decay": 1e-2},
}
# Mixers whose tokens have n streams, of width d: numbers that one of them holds at least.
_STREAMS: dict[str, Callable[[int, int], int]] = {
    **dict.fromkeys(("hyper-connections", "dynamic-hyper-connections"), lambda n, d: n * n),
    **dict.fromkeys(("mhc-lite", "ihc"), lambda n, d: n * n * d),
    **dict.fromkeys(("mhc", "jpmhc", "jpmhc-mean-preserving"), lambda n, d: n**3 * d),
}
_OBJECTS = 32_000  # bytes of a block's modules and parameters beside their numbers: twice that was measured


@final
@dataclass(frozen=True)
class Configuration:
    """A training run. `lr`, `weight_decay` None: the demonstration's, or else the optimizer's own default. `text` and
    `tokens` empty: the embedded corpus.

    recompute: sublayers that keep the streams which enter them alone (`axes.depth.stack`), 0 to keep all;
    context: tokens per window, bytes of text; batch: windows per step, over all processes; warmup: steps of linear
    warm-up; clip: largest gradient norm, 0 for none; text_limit: take about this many bytes of the text, 0 for all;
    validation_windows: windows of `context` tokens per evaluation; eval_every, save_every: steps between, 0 for only at
    the end; threads: of the CPU, 0 for what torch finds (sums round differently on another number of threads);
    accumulate: in how many parts one after another a batch's gradient is found; tokens: a folder that `axes tokenize`
    wrote; vocabulary: of the model, at least that of the tokens; sequence_parallel: processes that share the tokens of
    a window; peak: what MFU is a share of, in TFLOP/s of one device, 0 for what is known of it; track: another place
    for the log.
    """

    sequence: str = "gated-delta-net"
    optimizer: str = "muon"
    depth: str = "mhc"
    layers: int = 4
    width: int = 128
    heads: int = 4
    streams: int = 4
    recompute: int = 0
    context: int = 256
    batch: int = 16
    steps: int = 1000
    lr: float | None = None
    schedule: str = "cosine"
    warmup: int = 20
    weight_decay: float | None = None
    clip: float = 1.0
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    dtype: str = "float32"
    text: tuple[str, ...] = ()
    text_limit: int = 0
    validation_windows: int = 64
    eval_every: int = 100
    save_every: int = 100
    compile: bool = False
    accumulate: int = 1
    tokens: str = ""
    vocabulary: int = VOCABULARY
    sequence_parallel: int = 1
    peak: float = 0.0
    track: str = ""

    def __post_init__(self) -> None:
        self._require_types()
        self.architecture()  # checks names and sizes
        catalogue.get(self.optimizer, axis="data")
        for name in ("context", "batch", "steps", "validation_windows", "accumulate", "sequence_parallel"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("warmup", "eval_every", "save_every", "text_limit", "threads", "seed"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        self._require("clip", 0 <= self.clip < float("inf"), "0 (no clipping) or a positive number")
        self._require("lr", self.lr is None or 0 < self.lr < float("inf"), "a positive number")
        decay = self.weight_decay
        self._require("weight_decay", decay is None or 0 <= decay < float("inf"), "0 or a positive number")
        for kind, name, known in (("dtype", self.dtype, DTYPES), ("schedule", self.schedule, SCHEDULES)):
            if name not in known:
                raise UnknownName(kind, name, known)
        self._require("accumulate", self.batch % self.accumulate == 0, f"a divisor of batch ({self.batch})")
        self._require("peak", 0 <= self.peak < float("inf"), "0 or a positive number of TFLOP/s")
        self._require("text", not (self.text and self.tokens), "left out where tokens are given")
        if self.tokens and self.text_limit:
            raise AxesError("text-limit is of text: leave it out where tokens are given")
        if self.track and self.track not in TRACKERS:
            raise UnknownName("tracker", self.track, TRACKERS)
        compiled = self.compile and self.recompute > 0
        self._require("recompute", not compiled, "0 with compile: a compiler decides itself what is kept")
        self.torch_device()

    def require_machine(self, processes: int = 1) -> None:
        """AxesError if one of so many processes cannot train so here; a run of another machine may still be read."""
        self._require("threads", self.threads <= most_threads(), f"at most {most_threads()} on this machine")
        needed = self.least_bytes(processes)
        require_memory(needed, self.torch_device(), "weights, gradients and activations of this model")

    def least_bytes(self, processes: int = 1) -> int:
        """What no layer, mixer or optimizer does without: eight products of width^2 a block, each with its gradient,
        of every block an activation that the backward pass reads, and the streams, once. Processes share all that."""
        more, part = self.streams if self.depth in _STREAMS else 0, self.batch // self.accumulate
        kept = self.precision.streams.itemsize * (self.layers + more) * part * self.context * self.width
        weights = 2 * self.precision.parameters.itemsize * self.least_weights()
        return (weights + kept) // processes + _OBJECTS * self.layers

    def least_weights(self) -> int:
        """How many numbers every model of these sizes holds."""
        mixer = _STREAMS[self.depth](self.streams, self.width) if self.depth in _STREAMS else 0
        return self.layers * (8 * self.width**2 + 2 * mixer) + self.vocabulary * self.width

    def _require_types(self) -> None:
        # a hand-edited config.json can hold anything; annotations are strings here
        kinds: Mapping[str, tuple[type, ...]] = {
            "int": (int,),
            "float": (int, float),
            "float | None": (int, float, type(None)),
            "str": (str,),
            "bool": (bool,),
            "tuple[str, ...]": (tuple,),
        }
        for field in fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "bool"):
                raise AxesError(f"{field.name} must be {kind}, got {reprlib.repr(value)}")
            if isinstance(value, int) and abs(value) >= 2**63:
                raise AxesError(f"{field.name} must be less than 2**63, got {value:.3g}")

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise AxesError(f"{name.replace('_', '-')} must be {allowed}, got {getattr(self, name)}")

    @property
    def name(self) -> str:
        """The three axes, as tables and curves call the run."""
        return f"{self.sequence} x {self.optimizer} x {self.depth}"

    def architecture(self) -> Architecture:
        return Architecture(
            self.sequence, self.depth, self.layers, self.width, self.heads, self.streams, self.vocabulary,
            recompute=self.recompute,
        )  # fmt: skip

    def torch_device(self) -> torch.device:
        """The device, refused here if this machine lacks it."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise UnknownName("device", self.device, ("auto", "cpu", "cuda", "cuda:0", "mps")) from None
        if device.type == "cuda":
            count = torch.cuda.device_count()
            if (device.index or 0) >= count:
                raise AxesError(f"device {self.device!r} is not available: torch sees {count} CUDA devices here")
        elif device.type == "mps":
            if not torch.backends.mps.is_available():
                raise AxesError("device 'mps' is not available to torch here")
        elif device.type != "cpu":
            raise AxesError(f"device {self.device!r} is not supported: use auto, cpu, cuda or mps")
        return device

    @property
    def precision(self) -> Precision:
        """What `dtype` stands for."""
        return DTYPES[self.dtype]

    def torch_dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.precision.parameters

    def model(self, device: torch.device | None = None) -> LanguageModel:
        """A new model as it is trained, on the run's device if none is given."""
        precision = self.precision
        carried = precision.streams if precision.streams != precision.parameters else None
        return LanguageModel(
            self.architecture(),
            stream_dtype=carried,
            device=self.torch_device() if device is None else device,
            dtype=precision.parameters,
        )

    def learning_rate(self) -> float:
        """The peak learning rate: given, or the default of the optimizer."""
        return float(self.options()["lr"])

    def options(self) -> dict[str, Any]:
        """What the optimizer is given of its hyperparameters."""
        cls: Callable[..., Any] = catalogue.get(self.optimizer, axis="data").cls
        options = {"lr": float(getattr(cls, "default_lr", _FALLBACK_LR)), **_OPTIONS.get(self.optimizer, {})}
        given = {"lr": self.lr, "weight_decay": self.weight_decay}
        return options | {name: float(value) for name, value in given.items() if value is not None}

    def corpus(self) -> Corpus:
        limit = self.text_limit or None
        if self.tokens:
            corpus = tokens.read(self.tokens)
        else:
            corpus = from_files(self.text, limit) if self.text else embedded(limit)
        corpus.require(self.context)
        if corpus.vocabulary > self.vocabulary:
            raise AxesError(
                f"vocabulary must be at least {corpus.vocabulary}, that of {corpus.provenance.source}, "
                f"got {self.vocabulary}"
            )
        return corpus

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "text": list(self.text)}


def configuration_from_dict(settings: Mapping[str, Any]) -> Configuration:
    """The inverse of `Configuration.as_dict`.

    Raises:
        AxesError: an unknown or ill-typed setting, so that a run folder of another version is not misread.
    """
    unknown = sorted(set(settings) - {field.name for field in fields(Configuration)})
    if unknown:
        raise AxesError(f"the configuration holds settings that this version does not know: {', '.join(unknown)}")
    text = settings.get("text", ())
    if not isinstance(text, (list, tuple)) or not all(isinstance(path, str) for path in text):
        raise AxesError(f"text must be a list of paths, got {reprlib.repr(text)}")
    return Configuration(**{**settings, "text": tuple(text)})
