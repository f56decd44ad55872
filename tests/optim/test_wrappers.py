"""Wrappers: each against an oracle of its own, and all of them over all instances."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_optimizer.optimizer.grokfast import gradfilter_ema, gradfilter_ma
from torch import Tensor, nn

from axes import optim
from axes.core.algorithms import Momentum, Step, Sum
from axes.core.costs import Given
from axes.core.geometry import Ball, ConstantNorm, Graft, SignBall
from axes.core.monoids import Decay
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.capabilities import keyed, needs_layers, needs_matrices
from axes.optim.rules import wrappers

LR = Per("lr")
PLAIN = StateUpdate(Given(), algorithm=Step(LR))
HEAVY = StateUpdate(Given(), algorithm=Step(LR, via=(Momentum(0.9, "ema"),)))
NADAM = optim.NAdam.declare(momentum_decay=None, decoupled_weight_decay=True)
ADAM = wrappers.undecayed(optim.AdamW.declare())
STEPS = 30


def start(shape: tuple[int, ...] = (4, 6)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(shape: tuple[int, ...] = (4, 6), steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def run(optimizer: torch.optim.Optimizer, p: nn.Parameter, pull: float = 0.3) -> Tensor:
    """STEPS steps on gradients that depend on the parameter, some of whose entries agree with it and some not."""
    for g in gradients(tuple(p.shape)):
        p.grad = g + pull * p.detach()
        optimizer.step()
    return p.detach()


def ours(update: StateUpdate, foreach: bool = True, shape: tuple[int, ...] = (4, 6), **rates: Any) -> Tensor:
    p = nn.Parameter(start(shape))
    groups: Any = [{"params": [p], "rule": "matrix"}] if needs_matrices(update) else [p]
    return run(optim.optimizer(update)(groups, foreach=foreach, **rates), p)


def theirs(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Tensor:
    p = nn.Parameter(start())
    return run(make([p]), p)


def by_hand(direction: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """w + direction(g, w), g as in `run`."""
    w = start()
    for g in gradients():
        w = w + direction(g + 0.3 * w, w)
    return w


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


class Adam:
    """Bias-corrected averages, written out."""

    def __init__(self, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> None:
        self.b1, self.b2, self.eps, self.t = b1, b2, eps, 0
        self.m = self.v = torch.zeros(4, 6, dtype=torch.float64)

    def __call__(self, g: Tensor) -> Tensor:
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        return self.m / (1 - self.b1**self.t) / ((self.v / (1 - self.b2**self.t)).sqrt() + self.eps)


# ---- weight decay ----------------------------------------------------------------------------------------------------


def test_decays_make_the_named_optimizers() -> None:
    assert wrappers.decoupled(ADAM) == optim.AdamW.declare()
    assert wrappers.coupled(ADAM) == optim.Adam.declare()
    assert wrappers.decoupled(wrappers.undecayed(optim.Lion.declare())) == optim.Lion.declare()
    assert wrappers.undecayed(optim.SGD.declare(0.9)) == wrappers.undecayed(optim.SGD.declare(0.9, decoupled=True))


def test_coupled_and_decoupled_decay_are_torchs() -> None:
    close(
        ours(wrappers.coupled(ADAM), lr=0.05, weight_decay=0.2),
        theirs(lambda ps: torch.optim.Adam(ps, 0.05, weight_decay=0.2)),
    )
    close(
        ours(wrappers.decoupled(ADAM), lr=0.05, weight_decay=0.2),
        theirs(lambda ps: torch.optim.AdamW(ps, 0.05, weight_decay=0.2)),
    )


def test_independent_decay_is_that_of_pytorch_optimizer() -> None:
    mine = ours(wrappers.independent(HEAVY), lr=0.05, weight_decay=0.02)
    m = [torch.zeros(4, 6, dtype=torch.float64)]

    def direction(g: Tensor, w: Tensor) -> Tensor:
        m[0] = 0.9 * m[0] + 0.1 * g
        return -0.02 * w - 0.05 * m[0]

    close(mine, by_hand(direction))
    lion = wrappers.independent(wrappers.undecayed(optim.Lion.declare()))
    po = theirs(lambda ps: pytorch_optimizer.Lion(ps, lr=0.01, betas=(0.9, 0.99), weight_decay=0.02, fixed_decay=True))
    close(ours(lion, lr=0.01, weight_decay=0.02), po)


def test_per_parameter_decay() -> None:
    weight = torch.rand(4, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    retention = torch.log1p(-0.05 * weight)
    mine = ours(wrappers.per_parameter(PLAIN), lr=0.05, retention=retention)
    close(mine, by_hand(lambda g, w: -0.05 * (g + weight * w)))
    same = torch.full((4, 1), math.log1p(-0.05 * 0.2), dtype=torch.float64)
    even = ours(wrappers.per_parameter(ADAM), lr=0.05, retention=same)
    close(even, ours(wrappers.decoupled(ADAM), lr=0.05, weight_decay=0.2))


# ---- directions ------------------------------------------------------------------------------------------------------


def test_cautious_is_that_of_pytorch_optimizer() -> None:
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    lion = wrappers.cautious(optim.Lion.declare())
    close(
        ours(lion, lr=0.01, weight_decay=0.1), theirs(lambda ps: pytorch_optimizer.Lion(ps, cautious=True, **options))
    )
    adam = Adam()

    def mean(g: Tensor, w: Tensor) -> Tensor:
        d = adam(g)
        mask = (d * g > 0).double()
        return -0.05 * (d * mask / mask.mean().clamp_min(1e-3))

    close(ours(wrappers.cautious(ADAM, "mean"), lr=0.05), by_hand(mean))


def test_trust_ratio_is_lamb_without_decay() -> None:
    adam = Adam()

    def lamb(g: Tensor, w: Tensor) -> Tensor:
        d = adam(g)
        return -0.05 * d * w.norm() / d.norm()

    close(ours(wrappers.trust_ratio(ADAM), lr=0.05), by_hand(lamb))


def test_grafting_takes_direction_and_norm_apart() -> None:
    adam, average = Adam(), [torch.zeros(4, 6, dtype=torch.float64)]

    def sgd_norm(g: Tensor, w: Tensor) -> Tensor:
        d = adam(g)
        return -0.05 * d * g.norm() / d.norm()

    close(ours(wrappers.grafting(ADAM, PLAIN), lr=0.05), by_hand(sgd_norm))
    adam = Adam()

    def adam_norm(g: Tensor, w: Tensor) -> Tensor:
        average[0] = 0.9 * average[0] + 0.1 * g
        return -0.05 * average[0] / average[0].norm() * adam(g).norm()

    close(ours(wrappers.grafting(HEAVY, ADAM), lr=0.05), by_hand(adam_norm))


@pytest.mark.parametrize("name", ["plain", "adam", "muon"])
def test_a_rule_grafted_onto_itself_is_itself(name: str) -> None:
    muon = optim.Muon.declare(nesterov=False, precision="input")
    update = {"plain": PLAIN, "adam": ADAM, "muon": muon}[name]
    rates = {"lr": 0.05, **({"weight_decay": 0.1} if name == "muon" else {})}
    close(ours(wrappers.grafting(update, update), **rates), ours(update, **rates))


def test_rotational_is_the_hyperball_step() -> None:
    adam, radius, lr = Adam(), start().norm(), 0.05

    def hyperball(g: Tensor, w: Tensor) -> Tensor:
        u = adam(g)
        moved = w - lr * radius * u / u.norm()
        return radius * moved / moved.norm() - w

    close(ours(wrappers.rotational(ADAM), lr=lr), by_hand(hyperball))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("axis", ["whole", "rows"])
def test_rotational_keeps_norms_and_turns_by_lr(axis: Any, foreach: bool) -> None:
    update = wrappers.rotational(optim.AdamW.declare(), axis)
    dims = (0, 1) if axis == "whole" else (1,)
    end = ours(update, foreach, lr=0.05)
    close(end.square().sum(dims), start().square().sum(dims))
    p = nn.Parameter(start())
    optimizer = optim.optimizer(update)([p], lr=1e-3)
    for g in gradients():  # without a pull towards zero the directions are across the weights on average
        before = p.detach().clone()
        p.grad = g
        optimizer.step()
        cosine = (p.detach() * before).sum(dims) / before.square().sum(dims)
        assert bool((cosine.clamp(max=1.0).arccos() <= 1.001e-3).all())


def test_rotational_at_lr_zero_and_at_zero_weights() -> None:
    update = wrappers.rotational(PLAIN)
    close(ours(update, lr=0.0), start(), 0.0)
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = optim.optimizer(update)([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    close(p.detach(), torch.full((3,), -0.1, dtype=torch.float64))


# ---- drive and reading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["euclidean", "max"])
def test_clipping_is_torchs_parameter_by_parameter(norm: Any) -> None:
    def make(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(ps, 0.05, weight_decay=0.0)

        def clip(*_: Any) -> None:
            if norm == "max":
                torch.nn.utils.clip_grad_value_(ps, 0.5)
            else:
                torch.nn.utils.clip_grad_norm_(ps, 2.0)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    radius = 0.5 if norm == "max" else 2.0
    # torch divides by norm + 1e-6
    close(ours(wrappers.clipped(ADAM, radius, norm), lr=0.05), theirs(make), 1e-12 if norm == "max" else 1e-6)


def test_nesterov_makes_the_named_optimizers() -> None:
    assert wrappers.nesterov(optim.AdamW.declare()) == NADAM
    assert wrappers.nesterov(optim.SGD.declare(0.9)) == optim.SGD.declare(0.9, nesterov=True)
    assert wrappers.nesterov(optim.Muon.declare(nesterov=False)) == optim.Muon.declare()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("decay_at", ["y", "z"])
def test_schedule_free_against_its_recursion(decay_at: Any, foreach: bool) -> None:
    beta, c, lr, decay = 0.9, 0.05, 0.05, 0.1
    x = z = start()
    y, adam = x, Adam()
    for g in gradients():
        z = z - lr * decay * (y if decay_at == "y" else z) - lr * adam(g + 0.3 * y)
        x = (1 - c) * x + c * z
        y = beta * x + (1 - beta) * z
    update = wrappers.schedule_free(optim.AdamW.declare(), beta, c, decay_at)
    p = nn.Parameter(start())
    optimizer = optim.optimizer(update)([p], foreach=foreach, lr=lr, weight_decay=decay)
    close(run(optimizer, p), y)
    close(optimizer.state[p]["theta"], x)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_act_is_refused() -> None:
    adamw = optim.AdamW.declare()
    for wrap in (wrappers.decoupled, wrappers.independent, wrappers.coupled, wrappers.per_parameter):
        with pytest.raises(AxesError, match="already decays"):
            wrap(adamw)
    rotating = wrappers.rotational(adamw)
    for wrap in (wrappers.decoupled, wrappers.independent, wrappers.per_parameter):
        with pytest.raises(AxesError, match="would undo it"):
            wrap(rotating)
    with pytest.raises(AxesError, match="already"):
        wrappers.rotational(rotating)
    with pytest.raises(AxesError, match="has none"):
        wrappers.nesterov(PLAIN)
    with pytest.raises(AxesError, match="read elsewhere"):
        wrappers.nesterov(NADAM)
    with pytest.raises(AxesError, match="constant retention"):
        wrappers.nesterov(optim.SignSGD.declare())
    with pytest.raises(AxesError, match="no read point"):
        wrappers.grafting(adamw, NADAM)
    with pytest.raises(AxesError, match="same filters"):
        wrappers.grafting(wrappers.clipped(adamw), PLAIN)
    with pytest.raises(AxesError, match="side by side"):
        branch = adamw.filters()[0]
        wrappers.cautious(StateUpdate(Given(), algorithm=Step(LR, via=(Sum((branch, branch), (0.5, 0.5)),))))
    with pytest.raises(AxesError, match="Euclidean h"):
        wrappers.rotational(optim.SignedEG.declare())
    with pytest.raises(AxesError, match="keeps and shows"):
        wrappers.schedule_free(wrappers.schedule_free(adamw))
    with pytest.raises(AxesError, match=r"\(0, 1\)"):
        wrappers.schedule_free(adamw, average=1.0)


def test_wrappers_go_inside_a_rotational_update() -> None:
    inside = wrappers.cautious(wrappers.rotational(optim.AdamW.declare()))
    assert inside == wrappers.rotational(wrappers.cautious(optim.AdamW.declare()))
    assert isinstance(inside.filters()[-1].h, ConstantNorm)


@pytest.mark.parametrize("foreach", [False, True])
def test_query_key_clip_scales_heads_after_the_step(foreach: bool) -> None:
    """Beside Muon with the rows scaled by hand, to rounding, and beside pytorch_optimizer's MuonClip."""
    given: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "foreach": foreach}
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randn(6, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    mine, plain, theirs = ([nn.Parameter(x.clone()) for x in starts] for _ in range(3))
    rule = optim.optimizer(wrappers.query_key_clip(optim.Muon.declare(0.9, False)))
    ours = rule([{"params": [p], "rule": "matrix"} for p in mine], kept=1.0, **given)
    muon = optim.Muon([{"params": [p], "rule": "muon"} for p in plain], momentum=0.9, nesterov=False, **given)
    named = [{"qk_clip": "query", "attention_name": "a"}, {"qk_clip": "key", "attention_name": "a"}, {}]
    groups = [{"params": [p], "use_muon": True, **n} for p, n in zip(theirs, named, strict=True)]
    clip = pytorch_optimizer.MuonClip(groups, momentum=0.9, qk_clip_threshold=100.0, **given)
    for t in range(6):
        logits = torch.tensor([90.0, 130.0 + t], dtype=torch.float64)
        for three in zip(mine, plain, theirs, strict=True):
            g = torch.randn(6, 8, generator=generator, dtype=torch.float64)
            for p in three:
                p.grad = g.clone()
        for group in ours.param_groups[:2]:
            group["kept"] = wrappers.head_factors(logits, 6)
        ours.step()
        muon.step()
        clip.step(attention_max_logits={"a": logits})
        for p in plain[:2]:
            p.data[3:] *= (100 / (130 + t)) ** 0.5
    for p, q, r in zip(mine, plain, theirs, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-14)
        torch.testing.assert_close(p.detach(), r.detach(), rtol=0, atol=2e-3)  # sums in bfloat16, where ours averages
    assert float(mine[0].detach()[3:].norm()) < 0.5 * float(mine[2].detach()[3:].norm())


def test_query_key_clip_refuses_what_it_cannot_scale() -> None:
    with pytest.raises(AxesError, match="keep and show them"):
        wrappers.query_key_clip(optim.SignedEG.declare())
    with pytest.raises(AxesError, match="keep and show them"):
        wrappers.query_key_clip(wrappers.schedule_free(optim.AdamW.declare(), 0.8, 0.2))
    with pytest.raises(AxesError, match="7 rows are not a whole number"):
        wrappers.head_factors(torch.ones(2), 7)
    with pytest.raises(AxesError, match="share in"):
        wrappers.head_factors(torch.ones(2), 6, share=2.0)
    torch.testing.assert_close(
        wrappers.head_factors(torch.tensor([400.0, -5.0]), 4, share=1.0), torch.tensor([0.25, 0.25, 1.0, 1.0])
    )


def test_a_decay_inside_a_trust_ratio_is_not_joined_by_another() -> None:
    for rule in (optim.LAMB.declare(), optim.LARS.declare()):
        for change in (wrappers.decoupled, wrappers.coupled, wrappers.undecayed, wrappers.rotational):
            with pytest.raises(AxesError, match="inside its trust ratio"):
                change(rule)
    assert wrappers.undecayed(optim.LAMB.declare(adapt=False)) == wrappers.undecayed(optim.AdamW.declare(eps=1e-6))


# ---- composition -----------------------------------------------------------------------------------------------------

RULES = {cls.name: cls.update for cls in optim.ALL if not (keyed(cls.update) or needs_layers(cls.update))}
# where rounding is not amplified: products in float64, and no division by what rounding left of a low-rank gradient
RULES |= {
    "muon": optim.Muon.declare(precision="input"),
    "normuon": optim.NorMuon.declare(precision="input"),
    "adamuon": optim.AdaMuon.declare(precision="input"),
    "soap": optim.SOAP.declare(eps=1e-3),
}
WRAPPERS: dict[str, Callable[[StateUpdate], StateUpdate]] = {
    "decoupled": lambda u: wrappers.decoupled(wrappers.undecayed(u)),
    "coupled": lambda u: wrappers.coupled(wrappers.undecayed(u)),
    "independent": lambda u: wrappers.independent(wrappers.undecayed(u)),
    "per parameter": lambda u: wrappers.per_parameter(wrappers.undecayed(u)),
    "cautious": wrappers.cautious,
    "cautious mean": lambda u: wrappers.cautious(u, "mean"),
    "trust ratio": wrappers.trust_ratio,
    "grafting": lambda u: wrappers.grafting(u, HEAVY),
    "rotational": wrappers.rotational,
    "rotational rows": lambda u: wrappers.rotational(u, "rows"),
    "clipped": lambda u: wrappers.clipped(u, 0.5),
    "clipped by all": lambda u: wrappers.clipped(u, 0.1, "all"),
    "clipped max": lambda u: wrappers.clipped(u, 0.1, "max"),
    "nesterov": wrappers.nesterov,
    "schedule-free": lambda u: wrappers.schedule_free(u, 0.8, 0.2),
    "query-key clip": wrappers.query_key_clip,
}
SHAPE = (3, 4)


def descend(update: StateUpdate, foreach: bool) -> list[Tensor]:
    """Parameters of one shape on (w - target)^2 / 2, from inside the unit cube."""
    generator = torch.Generator().manual_seed(3)
    ps = [nn.Parameter(torch.rand(SHAPE, generator=generator, dtype=torch.float64).softmax(-1)) for _ in range(2)]
    target = torch.rand(SHAPE, generator=generator, dtype=torch.float64)
    rates: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "average": 0.3}
    rates["kept"] = 0.5 + 0.5 * torch.rand(SHAPE[0], generator=generator, dtype=torch.float64)
    rates["retention"] = torch.log1p(-0.1 * torch.rand(SHAPE, generator=generator, dtype=torch.float64))
    rates = {name: value for name, value in rates.items() if name in {per.name for per in update.demands()}}
    groups: Any = [{"params": ps, "rule": "matrix"}] if needs_matrices(update) else ps
    optimizer = optim.optimizer(update)(groups, foreach=foreach, **rates)
    for _ in range(5):
        for p in ps:
            p.grad = p.detach() - target
        optimizer.step()
    return [p.detach() for p in ps]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(rule=st.sampled_from(sorted(RULES)), wraps=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3))
def test_wrapped_rules_are_tuples_like_all_others(rule: str, wraps: list[str]) -> None:
    """Refused with a reason, or a normal form that survives pickling, moves weights, and steps alike in batches."""
    update = RULES[rule]
    try:
        for name in wraps:
            update = WRAPPERS[name](update)
    except AxesError as refusal:
        assert len(str(refusal)) > 20
        return
    normal = update.normal()
    assert normal.normal() is normal and normal == update and pickle.loads(pickle.dumps(update)) == update
    alone, batched = descend(update, False), descend(update, True)
    for a, b in zip(alone, batched, strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_every_wrapper_changes_every_rule_it_takes(name: str, rule: str) -> None:
    """Or is refused; and wrapping is a function: twice the same tuple."""
    try:
        wrapped = WRAPPERS[name](RULES[rule])
    except AxesError:
        return
    assert wrapped == WRAPPERS[name](RULES[rule])
    if wrapped != RULES[rule]:
        assert hash(wrapped) == hash(WRAPPERS[name](RULES[rule]))


def test_the_new_parts_say_what_they_take() -> None:
    for build in (
        lambda: Ball(0.0),
        lambda: Ball(1.0, "l1"),  # type: ignore[arg-type]
        lambda: ConstantNorm(SignBall(), 1.0, "columns"),  # type: ignore[arg-type]
        lambda: ConstantNorm(SignBall(), Per("lr", "row")),
        lambda: Graft(3, PLAIN),  # type: ignore[arg-type]
    ):
        with pytest.raises(AxesError):
            build()
    assert Decay(Per("weight_decay")) == optim.AdamW.declare().monoid


# ---- grokfast --------------------------------------------------------------------------------------------------------


def _amplified(way: str, steps: int = 12, **numbers: float) -> tuple[list[Tensor], list[Tensor]]:
    """Ours, and torch's AdamW on gradients that the authors' filter has changed."""
    update = optim.AdamW.declare()
    wrapped = getattr(wrappers, "grokfast" if way == "ema" else "grokfast_window")(update, **numbers)
    models = [nn.Linear(4, 3).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = optim.optimizer(wrapped)(list(models[0].parameters()), lr=0.01, weight_decay=0.1)
    theirs = torch.optim.AdamW(models[1].parameters(), lr=0.01, weight_decay=0.1)
    kept: Any = None
    for t in range(steps):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            generator = torch.Generator().manual_seed(t)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if optimizer is theirs and way == "ema":
                kept = gradfilter_ema(model, kept, **numbers)
            elif optimizer is theirs:
                kept = gradfilter_ma(model, kept, window_size=int(numbers["window"]), lamb=numbers["lamb"])
            optimizer.step()
    first, second = ([p.detach() for p in model.parameters()] for model in models)
    return first, second


def test_grokfast_is_the_authors_filter_ahead_of_the_rule() -> None:
    for way, numbers in (("ema", {"alpha": 0.8, "lamb": 3.0}), ("ma", {"window": 5, "lamb": 3.0})):
        for ours, theirs in zip(*_amplified(way, **numbers), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("window", [2, 3, 7, 12, 25])
def test_a_window_is_a_sum_of_its_length_kept_in_one_tensor_less(window: int) -> None:
    update = StateUpdate(Given(), algorithm=Step(1.0))
    ahead = wrappers.grokfast_window(update, window, 2.0)
    drives = torch.randn(3 * window, 2, 2, dtype=torch.float64)
    state, w = ahead.init({"g": drives[0]}, (torch.zeros(2, 2, dtype=torch.float64),)), torch.zeros(2, 2)
    for t, u in enumerate(drives):
        state, out = ahead.step(state, {"g": -u})
        w = w + u + (2.0 / window * drives[t + 1 - window : t + 1].sum(0) if t + 1 >= window else 0.0)
        torch.testing.assert_close(out.weights[0], w, rtol=1e-13, atol=1e-13)
    kept = optim.optimizer(ahead)([nn.Parameter(torch.zeros(2, 2))]).state_dict()["state"][0]
    assert sum(x.ndim == 2 for x in kept.values()) == window - 1


def test_the_usual_window_is_made_and_steps() -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    optimizer = optim.optimizer(wrappers.grokfast_window(optim.AdamW.declare()))([p], lr=0.1)
    p.grad = torch.ones(2, 2)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((2, 2), -0.1))


@pytest.mark.parametrize("numbers", [{"alpha": 1.0}, {"lamb": 0.0}])
def test_grokfast_of_nothing_is_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(AxesError, match="grokfast: alpha must lie"):
        wrappers.grokfast(optim.AdamW.declare(), **numbers)
    with pytest.raises(AxesError, match="window must be at least 2"):
        wrappers.grokfast_window(optim.AdamW.declare(), 1)
