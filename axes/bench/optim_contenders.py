"""Who takes part in `axes bench optim`: the rules, the sets of parameters, and every optimizer that computes a rule."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from axes import optim
from axes.core.declared import leaves
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.capabilities import elementwise, holds
from axes.optim.engine.precision import Precision

OURS = "axes"
Parameters = list[nn.Parameter]
Make = Callable[[Parameters], torch.optim.Optimizer]
REFRESH = 10  # steps between roots or bases, for every contender that has them


@final
@dataclass(frozen=True)
class Suite:
    """A set of parameters. rules: what is worth measuring on it when no rule is asked for."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    rules: tuple[str, ...]

    @property
    def numbers(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def for_rule(self, rule: OptimizerRule) -> Suite:
        """Without what the rule has no use for: whole-matrix rules take the matrices."""
        return Suite(self.name, tuple(s for s in self.shapes if len(s) > 1 or not rule.matrices), self.rules)


@final
@dataclass(frozen=True)
class OptimizerRule:
    """What contenders of one table compute. bound: largest relative error of an update in float32 (see `check`).

    matrices: for whole matrices only. statistics: steps depend on bases or roots of Gram matrices, which are only
    determined where these have full rank.
    """

    name: str
    bound: float
    matrices: bool = False
    statistics: bool = False


@final
@dataclass(frozen=True)
class _Pair:
    """A rule, and who has it too: torch, or pytorch_optimizer under the name `library`, told `theirs` besides."""

    ours: Any
    options: dict[str, Any]
    torch: Any = None
    library: str = ""
    theirs: dict[str, Any] = field(default_factory=dict)
    alike: bool = True  # whether its convention is ours


_PAIRS = {
    "rmsprop": _Pair(optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}, torch.optim.RMSprop),
    "adagrad": _Pair(optim.Adagrad, {"lr": 1e-2}, torch.optim.Adagrad),
    "adadelta": _Pair(optim.Adadelta, {"lr": 1.0}, torch.optim.Adadelta),
    "amsgrad": _Pair(optim.AMSGrad, {"lr": 1e-3}, functools.partial(torch.optim.Adam, amsgrad=True)),
    "adamax": _Pair(optim.Adamax, {"lr": 1e-3}, torch.optim.Adamax),
    "nadam": _Pair(optim.NAdam, {"lr": 1e-3}, torch.optim.NAdam),
    "radam": _Pair(optim.RAdam, {"lr": 0.1, "betas": (0.9, 0.9)}, torch.optim.RAdam),
    "asgd": _Pair(optim.ASGD, {"lr": 1e-2}, torch.optim.ASGD),
    "qhm": _Pair(optim.QHM, {"lr": 0.1, "momentum": 0.9, "nu": 0.7}, library="QHM"),
    "qhadam": _Pair(optim.QHAdam, {"lr": 1e-3, "betas": (0.9, 0.999), "nus": (0.7, 1.0)}, library="QHAdam"),
    "ademamix": _Pair(optim.AdEMAMix, {"lr": 1e-3}, library="AdEMAMix", theirs={"weight_decouple": True}),
    "laprop": _Pair(optim.LaProp, {"lr": 1e-3}, library="LaProp", alike=False),
    "adopt": _Pair(optim.ADOPT, {"lr": 1e-2}, library="ADOPT", theirs={"clip_lambda": lambda step: (step - 1) ** 0.25}),
    "mars": _Pair(optim.MARS, {"lr": 1e-3}, library="MARS", theirs={"optimize_1d": True}, alike=False),
    "sign-sgd": _Pair(
        optim.SignSGD,
        {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-2},
        library="SignSGD",
        theirs={"weight_decouple": True, "foreach": True},
    ),
    "prodigy": _Pair(optim.Prodigy, {"lr": 1.0, "d0": 1e-2}, library="Prodigy", alike=False),
}

# Measured in float32: AdamW and SGD 1e-6; Lion and SignSGD 4e-3, an entry whose sign rounding decides; Muon 1e-2 to
# 3e-2, which is what products in bfloat16 leave of five iterations; roots and bases of float32 statistics 1e-3 to 2e-2.
RULES = (
    OptimizerRule("adamw", 1e-4),
    OptimizerRule("sgd", 1e-4),
    OptimizerRule("lion", 2e-2),
    *(OptimizerRule(name, 2e-2 if name == "sign-sgd" else 1e-4) for name in _PAIRS),
    OptimizerRule("lars", 1e-4),
    OptimizerRule("lamb", 1e-4),
    OptimizerRule("adafactor", 1e-4),
    OptimizerRule("muon", 6e-2, matrices=True),
    OptimizerRule("normuon", 6e-2, matrices=True),
    OptimizerRule("adamuon", 2e-1, matrices=True),
    OptimizerRule("dion", 5e-2, matrices=True),
    OptimizerRule("soap", 5e-2, matrices=True, statistics=True),
    OptimizerRule("shampoo", 5e-2, matrices=True, statistics=True),
    OptimizerRule("psgd-kron", 5e-2, matrices=True, statistics=True),
)
_ELEMENTWISE = ("adamw", "sgd", "lion")
_ALL = (*_ELEMENTWISE, "muon", "soap", "shampoo", "psgd-kron")
_NINE = (*_ELEMENTWISE, "nadam", "sign-sgd", "muon", "normuon", "soap", "shampoo")


def _blocks(layers: int, width: int) -> tuple[tuple[int, ...], ...]:
    """The hidden matrices of a transformer."""
    return ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)) * layers


SUITES = (
    Suite("302M", _blocks(24, 1024), (*_ELEMENTWISE, "muon")),
    Suite("50M", _blocks(4, 1024), _ALL),
    Suite("small", ((64, 64),) * 1000, (*_ELEMENTWISE, "muon")),
    Suite("0.9M", (*_blocks(4, 128), (256, 128), (256, 128), *((128,),) * 9), (*_ELEMENTWISE, "muon")),
    Suite("10M", _blocks(13, 256), _ELEMENTWISE),
    Suite("8x512", ((512, 512),) * 8, _ALL),
    Suite("64x64", ((64, 64),) * 64, _ALL),
    Suite("20x210", ((210, 210),) * 20, _NINE),
    Suite("1000x16", ((16, 16),) * 1000, _NINE),
    Suite("38x512", ((512, 512),) * 38, _NINE),
)
DEFAULT_SUITES = {"cuda": ("302M", "50M", "small"), "cpu": ("0.9M", "10M", "8x512", "64x64")}


@final
@dataclass(frozen=True)
class Contender:
    """One optimizer.

    make: for eager steps. captured: for CUDA graphs, or None where a replayed step would not be the next one. exact:
    the same convention, which is run in float64 as the reference; None where steps are random, and only descent can be
    checked. period: steps until the work repeats.
    """

    name: str
    make: Make
    exact: Make | None
    captured: Make | None = None
    period: int = 1


@final
@dataclass(frozen=True)
class Place:
    """Where parameters are, and in what dtype."""

    device: torch.device
    dtype: torch.dtype

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


def contenders(rule: OptimizerRule, place: Place, names: tuple[str, ...] = ()) -> list[Contender]:
    """Who computes a rule there, ours first; packages that are not installed are left out."""
    found = list(_BY_RULE[rule.name](place))
    return [c for c in found if not names or c.name in names]


def known_names() -> list[str]:
    """The names that contenders can have."""
    places = [Place(torch.device(d), t) for d in ("cpu", "cuda") for t in (torch.float32, torch.bfloat16)]
    return list(dict.fromkeys(c.name for rule in RULES for place in places for c in contenders(rule, place)))


def find_rules(names: tuple[str, ...]) -> tuple[OptimizerRule, ...]:
    """Rules by name; all without names."""
    return _find("rule", names, {rule.name: rule for rule in RULES})


def find_suites(names: tuple[str, ...], device: torch.device) -> tuple[Suite, ...]:
    """Sets of parameters by name; those of the device without names."""
    return _find("suite", names or DEFAULT_SUITES[device.type], {suite.name: suite for suite in SUITES})


def _find(kind: str, names: tuple[str, ...], known: dict[str, Any]) -> tuple[Any, ...]:
    for name in names:
        if name not in known:
            raise AxesError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    return tuple(known[name] for name in names or known)


def package(name: str) -> Any:
    """A peer's module, or None where it is not installed."""
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


def _ours(
    cls: Any, place: Place, options: dict[str, Any], exact: dict[str, Any], rule: str = "",
    variants: dict[str, dict[str, Any]] | None = None, period: int = 1,
) -> Iterator[Contender]:  # fmt: skip
    """Our class: as it is constructed by default, without the look at the gradients, and on a GPU as one kernel.

    rule: how bare parameters are told to be matrices, "" where they need not be. variants: other forms by name.
    """

    def made(extra: dict[str, Any]) -> Make:
        def make(parameters: Parameters) -> torch.optim.Optimizer:
            given: Any = [{"params": parameters, "rule": rule}] if rule else parameters
            optimizer: torch.optim.Optimizer = cls(given, **options, **extra)
            return optimizer

        return make

    reference = made({**exact, "foreach": False})
    unchecked: dict[str, Any] = {"check_finite": False}
    forms: dict[str, dict[str, Any]] = {"": {}, " unchecked": unchecked}
    if not rule and elementwise(cls.update):
        fused = {"fused": True, **unchecked} if place.cuda else unchecked
        forms = {"": {}, " fused" if place.cuda else " unchecked": fused}
        if place.dtype == torch.bfloat16 and _stores(cls.update):
            forms[" 32-bit master"] = {**fused, "master": "32bit"}
            forms[" 24-bit master, 8-bit moments"] = {**fused, "master": "24bit", "moments": "8bit"}
    for label, extra in (variants or {}).items():
        forms[f" {label}"] = {**extra, **unchecked}
    for label, extra in forms.items():
        recorded = place.cuda and not holds(cls.update)  # what is refreshed in some steps is not one graph
        captured = made({**extra, "capturable": True, **unchecked}) if recorded else None
        yield Contender(OURS + label, made(extra), reference, captured, period)
    yield Contender(f"{OURS} scheduled", _scheduled(made({})), _scheduled(reference), period=period)


def _scheduled(make: Make) -> Make:
    """The same while every number of every group moves from step to step: beside it, the constant one."""

    def made(parameters: Parameters) -> torch.optim.Optimizer:
        optimizer: Any = make(parameters)
        groups = optimizer.param_groups
        numbers = [(group, name, group[name]) for group in groups for name in _numbers(optimizer, group)]
        steps = itertools.count()

        def move(*_: Any) -> None:
            t = next(steps)
            for group, name, value in numbers:
                group[name] = _moved(value, t)

        optimizer.register_step_pre_hook(move)
        return optimizer

    return made


def _numbers(optimizer: Any, group: dict[str, Any]) -> list[str]:
    """The hyperparameters of a group that a schedule can move: floats, and tuples of them."""
    names = [*inspect.signature(optimizer._rules[group["rule"]]).parameters, "lr", "weight_decay"]
    return [n for n in names if any(isinstance(x, float) for x in leaves(group.get(n)))]


def _moved(value: Any, t: int) -> Any:
    """What a schedule makes of a value; what decides whether a part is there stays."""
    if isinstance(value, tuple):
        return tuple(_moved(x, t) for x in value)
    return value * (1.0 - 1e-4 * (t % 50)) if isinstance(value, float) and value not in (0.0, 1.0) else value


def _stores(update: StateUpdate) -> bool:
    """Whether weights and moments can be kept in fewer bits."""
    try:
        Precision(master="24bit", moments="8bit").require(OURS, update.normal())
    except AxesError:
        return False
    return True


def _torch(
    cls: Any, place: Place, options: dict[str, Any], exact: Make | None, capturable: bool
) -> Iterator[Contender]:
    """torch.optim's forms: three, or two."""
    forms: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}}
    if "fused" in inspect.signature(cls).parameters:
        forms["fused"] = {"fused": True}
    for name, form in forms.items():

        def make(parameters: Parameters, form: dict[str, Any] = form) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = cls(parameters, **options, **form)
            return optimizer

        def captured(parameters: Parameters, form: dict[str, Any] = form) -> torch.optim.Optimizer:
            extra = {"capturable": True} if capturable else {}
            optimizer: torch.optim.Optimizer = cls(parameters, **options, **form, **extra)
            return optimizer

        yield Contender(f"torch {name}", make, exact, captured if place.cuda else None)


def _adamw(place: Place) -> Iterator[Contender]:
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    ours = list(_ours(optim.AdamW, place, options, {}))
    yield from ours
    exact = ours[0].exact
    yield from _torch(torch.optim.AdamW, place, options, exact, capturable=True)
    if (library := package("pytorch_optimizer")) is not None:
        yield Contender("pytorch_optimizer", lambda ps: library.AdamW(ps, foreach=True, **options), exact)


def _sgd(place: Place) -> Iterator[Contender]:
    options = {"lr": 0.1, "momentum": 0.9}
    ours = list(_ours(optim.SGD, place, options, {}))
    yield from ours
    exact = ours[0].exact
    yield from _torch(torch.optim.SGD, place, options, exact, capturable=False)


def _pair(name: str, place: Place) -> Iterator[Contender]:
    """Ours beside torch's, or beside pytorch_optimizer's."""
    pair = _PAIRS[name]
    ours = list(_ours(pair.ours, place, pair.options, {}))
    yield from ours
    exact = ours[0].exact
    if pair.torch is not None:
        yield from _torch(pair.torch, place, pair.options, exact, capturable=True)
    elif (library := package("pytorch_optimizer")) is not None:
        make: Make = lambda ps: getattr(library, pair.library)(ps, **pair.options, **pair.theirs)  # noqa: E731
        yield Contender("pytorch_optimizer", make, exact if pair.alike else make)


def _lion(place: Place) -> Iterator[Contender]:
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 1e-2}
    ours = list(_ours(optim.Lion, place, options, {}))
    yield from ours
    exact = ours[0].exact
    if (library := package("pytorch_optimizer")) is not None:
        yield _replayable("pytorch_optimizer", lambda ps: library.Lion(ps, foreach=True, **options), exact, place)
    if (lion := package("lion_pytorch")) is not None:
        yield _replayable("lion-pytorch", lambda ps: lion.Lion(ps, **options), exact, place)
        if place.cuda:
            make: Make = lambda ps: lion.Lion(ps, use_triton=True, **options)  # noqa: E731
            yield _replayable("lion-pytorch triton", make, exact, place)


def _muon(place: Place) -> Iterator[Contender]:
    options = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 1e-2}
    direct = {"direct": {"form": "direct"}}
    precise = {"precision": "input", "form": "direct"}
    ours = list(_ours(optim.Muon, place, {**options, "scale": "original"}, precise, "muon", direct))
    yield from ours
    exact = ours[0].exact
    yield _replayable("torch loop", lambda ps: torch.optim.Muon(ps, **options), exact, place)  # type: ignore[arg-type]
    if (library := package("pytorch_optimizer")) is not None:
        for name, extra in (
            ("pytorch_optimizer", {"foreach": True}),
            ("pytorch_optimizer loop", {"foreach": False}),
            ("pytorch_optimizer gram", {"foreach": True, "ns_method": "gram_newton_schulz"}),
        ):

            def make(parameters: Parameters, extra: dict[str, Any] = extra) -> torch.optim.Optimizer:
                groups = [{"params": parameters, "use_muon": True}]
                optimizer: torch.optim.Optimizer = library.Muon(groups, **options, **extra)
                return optimizer

            yield _replayable(name, make, exact, place)


def _lars(place: Place) -> Iterator[Contender]:
    options = {"lr": 100.0, "momentum": 0.9, "weight_decay": 1e-2}  # steps that bfloat16 can show
    yield from _ours(optim.LARS, place, options, {})
    if (library := package("pytorch_optimizer")) is not None:  # which leaves vectors alone
        yield from _forms("pytorch_optimizer", library.LARS, {**options, "trust_coefficient": 1e-3}, None, place)


def _lamb(place: Place) -> Iterator[Contender]:
    options = {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 1e-2}
    yield from _ours(optim.LAMB, place, options, {})
    if (library := package("pytorch_optimizer")) is not None:
        yield from _forms("pytorch_optimizer", library.Lamb, {**options, "weight_decouple": False}, None, place)


def _adafactor(place: Place) -> Iterator[Contender]:
    options = {"lr": 0.1}
    ours = list(_ours(optim.Adafactor, place, options, {}))
    yield from ours
    yield from _forms("torch", torch.optim.Adafactor, options, ours[0].exact, place)
    if (library := package("pytorch_optimizer")) is not None:
        theirs = {**options, "betas": (None, 0.999)}
        yield from _forms("pytorch_optimizer", library.AdaFactor, theirs, None, place)


def _forms(name: str, cls: Any, options: dict[str, Any], exact: Make | None, place: Place) -> Iterator[Contender]:
    """A peer with and without multi-tensor operations, beside itself in float64 where its convention is its own."""
    for label, foreach in (("loop", False), ("foreach", True)):

        def make(parameters: Parameters, foreach: bool = foreach) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = cls(parameters, foreach=foreach, **options)
            return optimizer

        yield Contender(f"{name} {label}", make, exact or make)


def _normuon(place: Place) -> Iterator[Contender]:
    options = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 1e-2}
    precise = {"precision": "input", "form": "direct"}
    ours = list(_ours(optim.NorMuon, place, {**options, "scale": "original"}, precise, "normuon"))
    yield from ours
    if (library := package("pytorch_optimizer")) is not None:
        for label, foreach in (("", True), (" loop", False)):

            def make(parameters: Parameters, foreach: bool = foreach) -> torch.optim.Optimizer:
                groups = [{"params": parameters, "use_muon": True}]
                optimizer: torch.optim.Optimizer = library.NorMuon(groups, foreach=foreach, **options)
                return optimizer

            yield Contender("pytorch_optimizer" + label, make, ours[0].exact)


def _adamuon(place: Place) -> Iterator[Contender]:
    options = {"lr": 1e-3, "weight_decay": 1e-2}
    published = {"momentum": 0.9, "beta2": 0.95, "sign": False, "nesterov": False}
    precise = {"precision": "input", "form": "direct"}
    ours = list(_ours(optim.AdaMuon, place, {**options, **published}, precise, "adamuon"))
    yield from ours
    if (library := package("pytorch_optimizer")) is not None:

        def make(parameters: Parameters) -> torch.optim.Optimizer:
            groups = [{"params": parameters, "use_muon": True}]
            optimizer: torch.optim.Optimizer = library.AdaMuon(groups, betas=(0.9, 0.95), foreach=True, **options)
            return optimizer

        yield Contender("pytorch_optimizer", make, ours[0].exact)


def _dion(place: Place) -> Iterator[Contender]:
    """No package of the requirements has it."""
    yield from _ours(optim.Dion, place, {"lr": 1e-3, "weight_decay": 1e-2, "divisor": 4}, {}, "dion")


_TF32 = {"precision": "tf32", "refresh_precision": "tf32"}


def _soap(place: Place) -> Iterator[Contender]:
    options = {"lr": 1e-3, "betas": (0.95, 0.95), "weight_decay": 1e-2, "refresh": REFRESH}
    yield from _ours(optim.SOAP, place, options, {}, "soap", {"tf32": _TF32} if place.cuda else {}, REFRESH)
    if (library := package("pytorch_optimizer")) is not None:
        theirs = {"lr": 1e-3, "betas": (0.95, 0.95), "weight_decay": 1e-2, "precondition_frequency": REFRESH}
        make: Make = lambda ps: library.SOAP(ps, **theirs)  # noqa: E731
        yield Contender("pytorch_optimizer", make, make, period=REFRESH)


def _shampoo(place: Place) -> Iterator[Contender]:
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "damping": 0.0, "refresh": REFRESH}
    yield from _ours(optim.Shampoo, place, options, {}, "shampoo", period=REFRESH)
    newton = {"newton": ({"damping": 1e-4}, {}), "newton tf32": ({"damping": 1e-2}, _TF32)}
    for name, (damped, precision) in newton.items():
        if place.cuda or not precision:
            forms = {name: {"method": "newton", **precision}}
            found = _ours(optim.Shampoo, place, {**options, **damped}, {"method": "eigh"}, "shampoo", forms, REFRESH)
            yield from (c for c in found if c.name == f"{OURS} {name}")
    if (library := package("pytorch_optimizer")) is not None:
        every = {"lr": 1e-3, "preconditioning_compute_steps": REFRESH}
        for name, cls, extra in (
            ("pytorch_optimizer", library.Shampoo, {}),
            ("pytorch_optimizer scalable", library.ScalableShampoo, {"start_preconditioning_step": 1}),
        ):

            def make(parameters: Parameters, cls: Any = cls, extra: Any = extra) -> torch.optim.Optimizer:
                optimizer: torch.optim.Optimizer = cls(parameters, **every, **extra)
                return optimizer

            yield Contender(name, make, make, period=REFRESH)


def _psgd(place: Place) -> Iterator[Contender]:
    forms = {"tf32": {"precision": "tf32"}} if place.cuda else {}
    yield from _ours(optim.PSGDKron, place, {"lr": 1e-3, "weight_decay": 0.0}, {}, "psgd-kron", forms)
    # without opt_einsum torch contracts its three-operand products from the left: n^4 numbers of memory
    if (library := package("pytorch_optimizer")) is not None and torch.backends.opt_einsum.is_available():
        yield Contender("pytorch_optimizer", lambda ps: library.Kron(ps, lr=1e-3), None, period=REFRESH)


def _replayable(name: str, make: Make, exact: Make | None, place: Place) -> Contender:
    """A rule without a count of steps: a captured step is the next one."""
    return Contender(name, make, exact, make if place.cuda else None)


_BY_RULE: dict[str, Callable[[Place], Iterator[Contender]]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
    **{name: functools.partial(_pair, name) for name in _PAIRS},
    "lars": _lars,
    "lamb": _lamb,
    "adafactor": _adafactor,
    "muon": _muon,
    "normuon": _normuon,
    "adamuon": _adamuon,
    "dion": _dion,
    "soap": _soap,
    "shampoo": _shampoo,
    "psgd-kron": _psgd,
}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of every tensor that an optimizer keeps of its parameters, however nested."""
    return sum(_bytes(value) for state in optimizer.state.values() for value in state.values())


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return 0
