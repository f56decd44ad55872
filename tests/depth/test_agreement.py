"""Networks of every mixer beside their papers' formulas written out: the table of docs/depth.md, and its bounds.

python -m tests.depth.test_agreement
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from axes.depth import ALL, MHC, RELEASED_EPS, DepthMixer, PostNorm, PreNorm, Residual, UniversalTransformer
from axes.depth.checkpoints import to_deepseek
from tests.depth import test_equations, test_rows

D, N = test_rows.D, test_equations.N


class Case(NamedTuple):
    """What it is called, its mixers, and the formula of a network of them."""

    name: str
    cls: type[DepthMixer]
    formula: Callable[[list[Any], Tensor], Tensor]
    options: dict[str, Any] = {}
    layers: int = 3

    def mixers(self, dtype: torch.dtype) -> list[Any]:
        if self.cls is UniversalTransformer:  # one for the first sublayer of every step
            return [self.cls(D, dtype=dtype)] * self.layers
        return [self.cls(D, l, dtype=dtype, **self.options) for l in range(self.layers)]


def streams(mixers: list[Any], h: Tensor) -> Tensor:
    """X <- R X + post f(pre X) with the formula's coefficients; out by the mean."""
    x = h[..., None, :].expand(*h.shape[:-1], N, D)
    for m in mixers:
        pre, post, mix = test_equations.FORMULAS[type(m)](m, x)
        y = test_rows.f((pre[..., None] * x).sum(-2))
        x = (mix[..., None] * x[..., None, :, :]).sum(-2) + post[..., None] * y[..., None, :]
    return x.mean(-2)


def released(mixers: list[Any], h: Tensor) -> Tensor:
    """A released model's modules, token by token and entry by entry, with its names and its order of rows."""
    tokens = []
    for token in h.flatten(0, -2):
        x = token.expand(N, -1)
        for m in mixers:
            theirs = to_deepseek(dict(m.named_parameters()))
            weights = (theirs["fn"], theirs["scale"], theirs["base"])
            seen, _ = test_equations.released(*weights, x, torch.zeros_like(token), RELEASED_EPS)
            _, x = test_equations.released(*weights, x, test_rows.f(seen), RELEASED_EPS)
        tokens.append(x.mean(-2))
    return torch.stack(tokens).view_as(h)


def plain(before: bool, after: bool) -> Callable[[list[Any], Tensor], Tensor]:
    """One stream, normalised before the sublayer and at the end, or after every addition."""

    def formula(mixers: list[Any], h: Tensor) -> Tensor:
        for _ in mixers:
            h = h + test_rows.f(test_equations.rms(h) if before else h)
            h = test_equations.rms(h) if after else h
        return test_equations.rms(h) if before else h

    return formula


CASES = [
    Case("residual", Residual, plain(False, False)),
    Case("pre-norm", PreNorm, plain(True, False)),
    Case("post-norm", PostNorm, plain(False, True)),
    Case("universal-transformer", UniversalTransformer, lambda mixers, h: test_rows.universal(h, len(mixers))),
    *(Case(cls.name, cls, streams, {"streams": N}) for cls in test_equations.FORMULAS),
    Case("mhc, eps as released", MHC, released, {"streams": N, "eps": RELEASED_EPS}, 2),
    *(Case(cls.name, cls, formula, options, 5) for cls, options, formula in test_rows.ROWS.values()),
]


def walk(mixers: list[Any], h: Tensor) -> Tensor:
    if not isinstance(mixers[0], UniversalTransformer):
        return test_rows.run(mixers, h)
    x, second = mixers[0].expand(h), UniversalTransformer(D, 1, dtype=h.dtype)
    for first in mixers:
        for sublayer, m in ((test_rows.f, first), (test_rows.g, second)):
            seen, coefficients = m.read(x)
            x = m.write(x, sublayer(seen), coefficients)
    return second.reduce(x)


def compared(case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """Largest difference of outputs, and of gradients, from the formula in float64, relative to their largest entry."""
    torch.manual_seed(0)
    ours, theirs = case.mixers(dtype), case.mixers(torch.float64)
    for p, q in zip(*(torch.nn.ModuleList(mixers).parameters() for mixers in (ours, theirs)), strict=True):
        p.data.copy_(0.7 * torch.randn_like(p))
        q.data.copy_(p)
    h, upstream = torch.randn(2, 3, D).to(dtype), torch.randn(2, 3, D)
    found = []
    for mixers, network, x in ((ours, walk, h), (theirs, case.formula, h.double())):
        inputs = [x.clone().requires_grad_(), *torch.nn.ModuleList(mixers).parameters()]
        out = network(mixers, inputs[0])
        gradients = torch.autograd.grad(out, inputs, upstream.to(out.dtype), materialize_grads=True)
        found.append((out.detach().double(), torch.cat([x.double().flatten() for x in gradients])))
    out, gradients = (float((a - b).abs().amax() / b.abs().amax()) for a, b in zip(*found, strict=True))
    return out, gradients


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_mixer_is_its_formula(case: Case) -> None:
    assert max(compared(case, torch.float64)) < 1e-13
    assert max(compared(case, torch.float32)) < 1e-4


def test_every_mixer_has_one() -> None:
    assert {case.cls for case in CASES} == set(ALL)


def table() -> str:
    """The largest differences of every mixer, over all of its cases, in the order of the catalogue."""
    worst: dict[str, list[float]] = {}
    for case in sorted(CASES, key=lambda case: [cls.name for cls in ALL].index(case.cls.name)):
        now = [error for dtype in (torch.float64, torch.float32) for error in compared(case, dtype)]
        worst[case.name] = [max(pair) for pair in zip(now, worst.get(case.name, now), strict=True)]
    head = ["| mixer | float64 | its gradients | float32 | its gradients |", "| --- | ---: | ---: | ---: | ---: |"]
    rows = ["| " + " | ".join([name, *(f"{error:.0e}" for error in errors)]) + " |" for name, errors in worst.items()]
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    print(table())
