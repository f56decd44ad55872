"""Sixty steps of the entry-by-entry rules beside torch, pytorch_optimizer and the recurrences written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import pytorch_optimizer
import torch
from torch import Tensor

from axes import optim
from tests.drawn import crossed

STEPS = 60
SHAPES = ((), (5,), (4, 6), (3, 2, 2, 2))
Make = Callable[[list[torch.nn.Parameter]], Any]


class Case(NamedTuple):
    """Ours beside another one, with options that both know by these names."""

    name: str
    options: dict[str, Any]
    peer: Callable[..., Any]
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    lr: float = 0.01
    bound: float = 1e-11  # of the largest relative difference in float64

    def __str__(self) -> str:
        return f"{self.name} { ({**self.options, **self.ours}) }"


def of_torch(name: str, *options: dict[str, Any], **case: Any) -> list[Case]:
    return [Case(name, some, getattr(torch.optim, name), **case) for some in options]


@contextmanager
def numbers_in(dtype: torch.dtype) -> Iterator[None]:
    """torch keeps some numbers of a state, a product of momenta say, in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def walk(make: Make, dtype: torch.dtype = torch.float64, steps: int = STEPS) -> list[Tensor]:
    """Parameters after steps on gradients that depend on the parameters and on the step alone."""
    generator = torch.Generator().manual_seed(7)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    parameters = [torch.nn.Parameter(draw(s)) for s in SHAPES]
    optimizer = make(parameters)
    for _ in range(steps):
        for p in parameters:
            p.grad = draw(tuple(p.shape)) + 0.3 * p.detach()
        optimizer.step()
    return [p.detach() for p in parameters]


def gap(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference, relative to the largest weight."""
    size = max(float(y.double().abs().max()) for y in b)
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True)) / size


class ByHand:
    """One recurrence in float64, for one parameter at a time: a generator that is sent (w, g) and yields the new w."""

    def __init__(
        self, rule: Callable[..., Iterator[Any]], parameters: list[torch.nn.Parameter], **options: Any
    ) -> None:
        self.parameters, self.maximize = parameters, options.pop("maximize", False)
        self.rules: list[Any] = [rule(**options) for _ in parameters]
        for r in self.rules:
            next(r)

    @torch.no_grad()
    def step(self) -> None:
        for p, r in zip(self.parameters, self.rules, strict=True):
            assert p.grad is not None
            g = -p.grad if self.maximize else p.grad
            p.copy_(r.send((p.double(), g.double())))


def by_hand(rule: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
    return lambda parameters, **options: ByHand(rule, parameters, **options)


def adopt(lr: float, betas: Any, eps: float, weight_decay: float, decoupled: bool, clip_exponent: float | None) -> Any:
    """The authors' code: the first gradient fills v, and nothing else."""
    m = v = w = 0
    for t in range(10**9):
        w, g = yield w
        if not decoupled:
            g = g + weight_decay * w
        if t == 0:
            v = g * g
            continue
        if decoupled:
            w = w - lr * weight_decay * w
        normed = g / v.sqrt().clamp(min=eps)
        if clip_exponent is not None:
            normed = normed.clamp(-(t**clip_exponent), t**clip_exponent)
        m = betas[0] * m + (1 - betas[0]) * normed
        w = w - lr * m
        v = betas[1] * v + (1 - betas[1]) * g * g


def laprop(lr: float, betas: Any, eps: float, weight_decay: float) -> Any:
    m = v = w = 0
    for t in range(1, 10**9):
        w, g = yield w
        v = betas[1] * v + (1 - betas[1]) * g * g
        m = betas[0] * m + (1 - betas[0]) * g / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        w = (1 - lr * weight_decay) * w - lr * m / (1 - betas[0] ** t)


def mars(lr: float, betas: Any, eps: float, gamma: float, weight_decay: float) -> Any:
    m = v = w = last = 0
    for t in range(1, 10**9):
        w, g = yield w
        c = g + gamma * betas[0] / (1 - betas[0]) * (g - last)
        c = c / max(1.0, float(c.norm()))
        m, v, last = betas[0] * m + (1 - betas[0]) * c, betas[1] * v + (1 - betas[1]) * c * c, g
        hat = (v / (1 - betas[1] ** t)).sqrt() + eps
        w = (1 - lr * weight_decay) * w - lr * m / (1 - betas[0] ** t) / hat


def qhm(lr: float, momentum: float, nu: float, weight_decay: float, decoupled: bool) -> Any:
    m = w = 0
    while True:
        w, g = yield w
        g = g if decoupled else g + weight_decay * w
        m = momentum * m + (1 - momentum) * g
        w = (1 - lr * weight_decay * decoupled) * w - lr * ((1 - nu) * g + nu * m)


def qhadam(lr: float, betas: Any, nus: Any, eps: float, weight_decay: float) -> Any:
    m = v = w = 0
    for t in range(1, 10**9):
        w, g = yield w
        g = g + weight_decay * w
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        first, second = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        root = ((1 - nus[1]) * g * g + nus[1] * second).sqrt() + eps
        w = w - lr * ((1 - nus[0]) * g + nus[0] * first) / root


class Prodigy:
    """The paper's recurrence with the options of its code, over all parameters in float64."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float = float("inf"),
        maximize: bool = False,
    ) -> None:
        self.parameters, self.lr, self.betas, self.eps, self.decay = parameters, lr, betas, eps, weight_decay
        self.beta3 = betas[1] ** 0.5 if beta3 is None else beta3
        self.decoupled, self.corrects, self.safe, self.maximize = decoupled, bias_correction, safeguard_warmup, maximize
        self.d_coef, self.growth_rate = d_coef, growth_rate
        self.d = self.most = self.start = d0
        self.first = [p.detach().double().clone() for p in parameters]
        self.m, self.v, self.s = ([torch.zeros_like(w) for w in self.first] for _ in range(3))
        self.r, self.t = 0.0, 0

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        (a, b), d = self.betas, self.d
        rate = self.lr * d * ((1 - b**self.t) ** 0.5 / (1 - a**self.t) if self.corrects else 1.0)
        self.r *= self.beta3
        for i, p in enumerate(self.parameters):
            assert p.grad is not None
            g, w = (-p.grad if self.maximize else p.grad).double(), p.double()
            g = g if self.decoupled else g + self.decay * w
            self.r += d * rate * float((g * (self.first[i] - w)).sum())
            self.s[i] = self.beta3 * self.s[i] + d * (d if self.safe else rate) * g
            self.m[i] = a * self.m[i] + (1 - a) * d * g
            self.v[i] = b * self.v[i] + (1 - b) * (d * g) ** 2
            p.copy_(w * (1 - rate * self.decay * self.decoupled) - rate * self.m[i] / (self.v[i].sqrt() + d * self.eps))
        estimate = self.d_coef * self.r / sum(float(s.abs().sum()) for s in self.s)
        self.d = max(d, estimate) if d == self.start else d
        self.most = max(self.most, estimate)
        self.d = min(self.most, self.d * self.growth_rate)


ADAM = {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
PO = pytorch_optimizer
CASES = [
    *of_torch(
        "RMSprop",
        {},
        {"alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1, "momentum": 0.9},
        {"centered": True, "weight_decay": 0.1, "alpha": 0.9},
        {"centered": True, "momentum": 0.7},
    ),
    *of_torch(
        "Adagrad", {}, {"lr_decay": 0.1, "weight_decay": 0.1}, {"initial_accumulator_value": 0.3, "eps": 1e-3}, lr=0.1
    ),
    *of_torch("Adadelta", {}, {"rho": 0.8, "eps": 1e-4, "weight_decay": 0.1}, lr=1.0),
    *of_torch("Adam", {"amsgrad": True}, {**ADAM, "amsgrad": True}),
    *of_torch("AdamW", {"amsgrad": True}, {**ADAM, "amsgrad": True}),
    Case("AMSGrad", ADAM, torch.optim.Adam, {"amsgrad": True}),
    *of_torch("Adamax", {}, ADAM, {"betas": (0.0, 0.5)}),
    *of_torch(
        "NAdam",
        {},
        {**ADAM, "momentum_decay": 0.05},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.0},
    ),
    *of_torch("RAdam", {}, ADAM, {"betas": (0.9, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True}),
    *of_torch("RAdam", {"betas": (0.9, 0.5)}),  # never rectified
    *of_torch("ASGD", {}, {"lambd": 0.1, "alpha": 0.5, "t0": 5, "weight_decay": 0.1}),
    Case("AdEMAMix", {"weight_decay": 0.1}, PO.AdEMAMix, {"weight_decouple": True}),
    Case("AdEMAMix", {"betas": (0.8, 0.95, 0.99), "alpha": 2.0}, PO.AdEMAMix, {"t_alpha_beta3": 40}, {"warmup": 40}),
    Case(
        "QHAdam", {"betas": (0.9, 0.95), "nus": (0.7, 0.6)}, PO.QHAdam, bound=1e-7
    ),  # its bias corrections are float32
    Case("QHAdam", {**ADAM, "nus": (0.7, 1.0)}, PO.QHAdam, bound=1e-7),
    Case("QHAdam", {**ADAM, "nus": (0.7, 1.0)}, by_hand(qhadam)),
    Case("QHAdam", {**ADAM, "nus": (1.0, 0.8)}, PO.QHAdam, {"weight_decouple": True}, {"decoupled": True}, bound=1e-7),
    Case("QHM", {"momentum": 0.9, "nu": 0.7, "weight_decay": 0.1}, PO.QHM, lr=0.1),
    Case("QHM", {"momentum": 0.9, "nu": 0.6, "weight_decay": 0.1, "decoupled": True}, by_hand(qhm)),
    Case("QHM", {"momentum": 0.9, "nu": 1.0, "weight_decay": 0.1, "decoupled": False}, by_hand(qhm)),
    Case("LaProp", {"betas": (0.8, 0.95)}, PO.LaProp, bound=1e-9),
    Case("LaProp", {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}, by_hand(laprop)),
    Case(
        "ADOPT",
        {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
        PO.ADOPT,
        {"clip_lambda": lambda step: (step - 1) ** 0.25},  # the package is one step ahead of the authors
    ),
    *(
        Case("ADOPT", {**ADAM, "decoupled": d, "clip_exponent": c}, by_hand(adopt))
        for d, c in ((True, 0.25), (False, 0.1), (False, None))
    ),
    Case("MARS", {"eps": 1e-30, "weight_decay": 0.1}, PO.MARS, {"optimize_1d": True}, bound=1e-7),
    *(  # eps is multiplied by the next d there, and a coupled decay has no effect
        Case("Prodigy", {"eps": 1e-30, **options}, PO.Prodigy, lr=1.0)
        for options in (
            {"weight_decay": 0.1, "d_coef": 0.3},
            {"betas": (0.8, 0.95), "bias_correction": True, "d_coef": 2.0},
            {"d0": 1e-3, "growth_rate": 1.05, "beta3": 0.9, "safeguard_warmup": True},
        )
    ),
    *(
        Case("Prodigy", options, Prodigy, lr=lr)
        for lr, options in (
            (1.0, {}),
            (0.5, {**ADAM, "decoupled": False, "d0": 1e-4}),
            (1.0, {**ADAM, "bias_correction": True, "d0": 1e-3, "d_coef": 0.5}),
            (0.7, {"eps": 1e-3, "beta3": 0.9, "safeguard_warmup": True, "growth_rate": 1.1, "d0": 1e-2}),
        )
    ),
    Case("MARS", {"betas": (0.8, 0.9), "gamma": 0.2, "eps": 1e-3, "weight_decay": 0.1}, by_hand(mars)),
]
WAYS: tuple[dict[str, Any], ...] = ({"foreach": False}, {}, {"capturable": True})


def compared(case: Case, dtype: torch.dtype, maximize: bool = False, **way: Any) -> float:
    """How far ours is from the other after all steps."""
    ours = walk(
        lambda ps: getattr(optim, case.name)(ps, lr=case.lr, maximize=maximize, **case.options, **case.ours, **way),
        dtype,
    )
    foreach = {"foreach": False} if case.peer.__module__.startswith(("torch", "pytorch_optimizer")) else {}
    with numbers_in(dtype):
        theirs = walk(
            lambda ps: case.peer(ps, lr=case.lr, maximize=maximize, **case.options, **case.theirs, **foreach), dtype
        )
    return gap(ours, theirs)


@pytest.mark.parametrize(
    ("case", "way", "maximize"), crossed((pytest.param(case, id=str(case)) for case in CASES), WAYS, [False, True])
)
def test_in_float64(case: Case, way: dict[str, Any], maximize: bool) -> None:
    assert compared(case, torch.float64, maximize, **way) < case.bound


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_float32_to_rounding(case: Case) -> None:
    assert compared(case, torch.float32) < 2e-5


def table() -> str:
    """The largest differences of every rule from every oracle, over all options and both directions."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for case in CASES:
        module = case.peer.__module__.split(".")[0]
        oracle = {"torch": "torch.optim", "pytorch_optimizer": "pytorch_optimizer"}.get(module, "the recurrence")
        last = found.get((case.name, oracle), (0.0, 0.0))
        now = [max(compared(case, dtype, up) for up in (False, True)) for dtype in (torch.float64, torch.float32)]
        found[case.name, oracle] = max(last[0], now[0]), max(last[1], now[1])
    rows = [f"| {rule} | {oracle} | {STEPS} | {a:.0e} | {b:.0e} |" for (rule, oracle), (a, b) in found.items()]
    head = ["| rule | oracle | steps | float64 | float32 |", "| --- | --- | ---: | ---: | ---: |"]
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    print(table())
