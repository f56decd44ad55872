"""Group C, Frank-Wolfe: the oracle over a ball, the Frank-Wolfe delta rule, Lion and Muon with weight decay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import linalg, optimize
from torch import Tensor
from torch.autograd.functional import jacobian

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, within
from axes.claims.group_a_tools import fed, gradient, layer_tuple, one_step, squared_error, trained
from axes.claims.group_c_steps import directed, parameter, rule
from axes.claims.group_c_writes import eye
from axes.claims.sources import BLOG
from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.costs import SquaredError
from axes.core.derived import structure
from axes.core.geometry import Spectral
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim import SGD, Lion, Muon
from axes.routes import dispatch


@claim(
    "C14",
    "For a rank-one gradient the linear minimisation oracle over a spectral or nuclear ball is R e^ k^^T.",
    Verdict.CONDITIONAL,
    BLOG("Frank-Wolfe, the oracle"),
    "axes.geometry.Spectral, axes.sequence.FrankWolfeDelta",
    conditions="over the nuclear ball; over the spectral ball for the minimiser of least norm (the pseudo-polar "
    "factor, computed to convergence)",
    derivation="With g = -e k^T, <g, S> over the nuclear ball is least at R e^ k^^T alone. Over the spectral ball "
    "anything of norm R on the complements may be added: the value -R |e| |k| stays. A full SVD adds an arbitrary "
    "completion; five steps of the Newton-Schulz quintic miss the singular value one.",
)
def C14(draw: Draw) -> tuple[Finding, ...]:
    d_v, d, radius = 5, 6, 1.5
    e, k = draw.normal(d_v), draw.normal(d)
    g = -torch.outer(e, k)
    point = radius * torch.outer(e, k) / (e.norm() * k.norm())
    zero, one = torch.zeros(d_v, d, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    layer = one_step(
        layer_tuple("frank-wolfe-delta"),
        zero,
        k=k,
        v=e,
        decay=torch.tensor(-math.inf, dtype=torch.float64),
        beta=radius * one,
    )
    u, s, vh = np.linalg.svd(-g.numpy())
    nuclear = torch.from_numpy(radius * np.outer(u[:, 0], vh[0]))
    full = torch.from_numpy(radius * u @ vh[:d_v])
    polar = radius * Spectral("polar").primal(-g)
    cubic = radius * Spectral("newton-schulz", steps=12, coefficients=(1.5, -0.5, 0.0)).primal(-g)
    quintic = torch.linalg.svdvals(Spectral("newton-schulz").primal(-g))[0]
    recalled = one_step(
        layer_tuple("frank-wolfe-delta"), point, k=k, v=point @ k, decay=torch.log(one / 2), beta=radius / 2 * one
    )
    return (
        holds("nuclear ball: top singular pair against the rank-one point", gap(nuclear, point), 1e-11),
        holds("the layer with gamma = 1 against it", gap(layer, point), 1e-11),
        holds("spectral ball: pseudo-polar factor against it", gap(polar, point), 1e-11),
        holds("spectral ball: cubic Newton-Schulz", gap(cubic, point), 1e-9),
        holds(
            "values of both points against -R |e| |k|",
            max(abs(float((g * x).sum()) + radius * float(e.norm() * k.norm())) for x in (point, full)),
            1e-10,
        ),
        holds("no error: nothing is written", gap(recalled, point / 2), 1e-12),
        breaks("full SVD: distance from the rank-one point", (full - point).norm() / radius, 1.9),
        breaks("five quintic steps: |singular value - 1|", (quintic - 1).abs(), 0.02),
    )


@claim(
    "C15",
    "The Frank-Wolfe delta rule S <- (1 - gamma) S + gamma R e^ k^^T is error-corrective, normalised and forgets by a "
    "scalar.",
    Verdict.EXACT,
    BLOG("Frank-Wolfe delta rule"),
    "axes.sequence.FrankWolfeDelta, axes.optim.SGD, axes.StateUpdate",
    derivation="The gradient of |v - S k|/|k| is -e^ k^^T: the rule is gradient descent with decoupled decay on the "
    "error that is not squared, with step gamma R and decay 1/R, and Muon's step with the exact pseudo-polar factor "
    "and no momentum. A convex combination of points of norm R stays in the nuclear ball.",
)
def C15(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, radius, gamma = 60, 3, 5, 2.0, 0.05
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    w0 = draw.normal(d_v, d) / 10
    v[20] = 0.0
    k[20] = 0.0  # an empty datum: e = 0
    rates = {
        "decay": torch.full((n,), math.log1p(-gamma), dtype=torch.float64),
        "beta": torch.full((n,), gamma * radius, dtype=torch.float64),
    }
    layer = reference.run(layer_tuple("frank-wolfe-delta"), {"k": k, "v": v, **rates}, weights=(w0,))[0]
    batched = {name: x[None] for name, x in {"k": k, "v": v, "q": k, **rates}.items()}
    fast = dispatch.run(layer_tuple("frank-wolfe-delta"), batched, time=1, weights=(w0[None],))[1].theta[0][0]

    def unsquared(x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        if not x.any():
            return lambda w: 0 * w.sum()
        return lambda w: torch.linalg.vector_norm(y - w @ x) / x.norm()

    first, second = parameter(w0), parameter(w0)
    descent = SGD([first], lr=gamma * radius, momentum=0.0, weight_decay=1 / radius, decoupled=True)
    muon = rule(directed(Spectral("polar")), second, lr=gamma * radius, weight_decay=1 / radius)
    path = trained(descent, first, [unsquared(x, y) for x, y in zip(k, v, strict=True)])
    polar = trained(muon, second, [squared_error(x, y) for x, y in zip(k, v, strict=True)])
    return (
        holds("layer against SGD with decoupled decay on |v - S k|/|k|", gap(layer, path), 1e-11),
        holds("layer against Muon with the pseudo-polar factor, no momentum", gap(layer, polar), 1e-10),
        holds("the layer's dispatched route, last state", gap(fast, path[-1]), 1e-11),
        holds("nuclear norm beyond R", (torch.linalg.matrix_norm(layer, "nuc").max() - radius).clamp_min(0), 1e-10),
        holds("a datum without error only decays", gap(layer[20], (1 - gamma) * layer[19]), 1e-12),
    )


@claim(
    "C16",
    "The online Frank-Wolfe update solves the constrained least-squares problem.",
    Verdict.STATISTICAL,
    BLOG("Frank-Wolfe delta rule"),
    "axes.StateUpdate, axes.sequence.FrankWolfeDelta",
    derivation="The oracle is not linear: E LMO(g) is not LMO(E g), and one datum at a time settles above the optimum "
    "however small gamma. Averaging gradients over a longer horizon before the oracle (Muon) closes the gap; the full "
    "batch converges as 2 L D^2/(t + 2).",
)
def C16(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, radius, chains, steps, gamma = 12, 2, 3, 1.0, 24, 700, 0.01
    keys, truth = draw.normal(n, d), draw.normal(d_v, d)
    truth = 2.5 * radius * truth / torch.linalg.matrix_norm(truth, 2)
    values = keys @ truth.mT + draw.normal(n, d_v)

    def loss(w: Tensor) -> Tensor:
        return (values - keys @ w.mT).square().sum((-2, -1)) / (2 * n)

    smooth = float(torch.linalg.matrix_norm(keys, 2) ** 2 / n)
    best = torch.zeros(d_v, d, dtype=torch.float64)
    for _ in range(800):  # projected gradient descent: singular values are clipped
        u, s, vh = torch.linalg.svd(best - gradient(loss, best) / smooth, full_matrices=False)
        best = (u * s.clamp_max(radius)) @ vh
    optimum = float(loss(best))

    order = torch.randint(n, (steps, chains), generator=draw.generator)
    signal = {
        "k": keys[order],
        "v": values[order],
        "decay": torch.full((steps, chains), math.log1p(-gamma), dtype=torch.float64),
        "beta": torch.full((steps, chains), gamma * radius, dtype=torch.float64),
    }
    excess = []
    for beta in (0.0, 0.9, 0.99):
        via = (Momentum(beta, "ema"),) if beta else ()
        update = StateUpdate(SquaredError(), OnUpdate(Spectral("polar")), Scalar("decay"), Step(Per("beta"), via=via))
        if not beta:  # of rank one: the catalogue's layer, without a spectrum
            update = layer_tuple("frank-wolfe-delta")
        with torch.no_grad():
            path = reference.run(update, signal)[0]
        excess.append(float(loss(path[steps // 2 :]).mean()) - optimum)

    weight = parameter(best * 0)
    batch = rule(directed(Spectral("polar")), weight, lr=1.0, weight_decay=1 / radius)
    worst = 0.0
    for t in range(200):
        for group in batch.param_groups:
            group["lr"] = 2 / (t + 2) * radius
        weight.grad = gradient(loss, weight.detach())
        batch.step()
        bound = 2 * smooth * (2 * radius) ** 2 * min(d_v, d) / (t + 3)
        worst = max(worst, (float(loss(weight.detach())) - optimum) / bound)
    return (
        within("excess loss of single data, relative to the optimum", excess[0] / optimum, 0.01, 3.0),
        within("excess with an average of horizon 10 over that without", excess[1] / excess[0], 0.0, 0.95),
        within("excess with horizon 100 over that with 10", excess[2] / excess[1], 0.0, 0.95),
        within("full batch: excess over 2 L D^2/(t + 2), largest of 200 steps", worst, -1e-6, 1.0),
    )


@claim(
    "C17",
    "Frank-Wolfe retains by a scalar, while mirror descent inherits structure from the cost: rank one in DeltaNet, "
    "diagonal in Mamba.",
    Verdict.FALSE,
    BLOG("Frank-Wolfe delta rule"),
    "axes.sequence.FrankWolfeDelta, axes.sequence.GLA, axes.sequence.UnnormalisedLinearAttention",
    correction="a diagonal gate is a penalty <S, S Diag(1 - a)>/2 added to the alignment cost, whose own gradient "
    "does not see S; counted as in DeltaNet, with the feedback of the write, the Frank-Wolfe rule's Jacobian is not "
    "scalar either",
    kind="MATH",
    derivation="d(e^ k^^T) = -(I - e^ e^^T) dS k k^^T/|e|, so that the Jacobian is (1 - gamma) I - gamma R/(|e||k|) "
    "(I - e^ e^^T) x k k^T, of rank d_v - 1 beside the scalar.",
)
def C17(draw: Draw) -> tuple[Finding, ...]:
    d_v, d, radius, gamma = 3, 4, 2.0, 0.2
    s, k, v = draw.normal(d_v, d), draw.normal(d), draw.normal(d_v)
    one = torch.ones((), dtype=torch.float64)
    update = layer_tuple("frank-wolfe-delta")
    j = jacobian(lambda x: one_step(update, x, k=k, v=v, decay=torch.log1p(-gamma * one), beta=gamma * radius * one), s)
    assert isinstance(j, Tensor)
    rest = j.reshape(d_v * d, d_v * d) - (1 - gamma) * eye(d_v * d)
    e = v - s @ k
    unit = e / e.norm()
    formula = (
        -gamma * radius / (e.norm() * k.norm()) * torch.kron(eye(d_v) - torch.outer(unit, unit), torch.outer(k, k))
    )
    a = draw.uniform(d, low=0.2, high=0.9)
    gla = one_step(layer_tuple("gla"), s, k=k, v=v, decay=a.log())

    def descended(loss: Callable[[Tensor], Tensor]) -> Tensor:
        weight = parameter(s)
        return trained(SGD([weight], lr=1.0, momentum=0.0), weight, [loss])[0]

    penalised = descended(lambda w: -(v * (w @ k)).sum() + (w * w * (1 - a)).sum() / 2)
    plain = descended(lambda w: -(v * (w @ k)).sum())
    return (
        breaks("norm of the Frank-Wolfe rule's Jacobian less the scalar", rest.norm(), 0.01),
        breaks("a step on the alignment cost alone against GLA's", gap(plain, gla), 0.05),
        breaks(
            "derived transition of the alignment cost alone is the identity (1: yes)",
            float(structure(layer_tuple("linear-attention-unnormalised")) == "identity"),
            1.0,
        ),
        holds("a step on the penalised alignment cost against GLA's", gap(penalised, gla), 1e-12),
        holds("Jacobian less the scalar against its formula", gap(rest, formula), 1e-9),
        holds("its rank less d_v - 1", float(torch.linalg.matrix_rank(rest, rtol=1e-9)) - (d_v - 1), 0.0),
    )


@claim(
    "C18",
    "Lion and Muon with weight decay lambda are stochastic Frank-Wolfe on a ball of radius 1/lambda.",
    Verdict.EXACT,
    BLOG("Frank-Wolfe, Lion and Muon"),
    "axes.optim.Lion, axes.StateUpdate",
    derivation="(1 - lambda eta) W - eta sign(c) = (1 - gamma) W + gamma s with gamma = lambda eta and s = "
    "-sign(c)/lambda, the minimiser of <c, s> over |s|_max <= 1/lambda; the spectral ball and the polar factor alike. "
    "Outside of the ball the excess shrinks by 1 - gamma a step.",
)
def C18(draw: Draw) -> tuple[Finding, ...]:
    m, n, steps, eta, lam = 3, 4, 6, 0.1, 2.0
    gamma, grads, w = lam * eta, draw.normal(steps, m, n), draw.normal(m, n)
    b1, b2, beta = 0.9, 0.99, 0.8
    first, second = parameter(w), parameter(w)
    lion = fed(Lion([first], lr=eta, betas=(b1, b2), weight_decay=lam), first, list(grads))
    muon = fed(rule(directed(Spectral("polar"), beta), second, lr=eta, weight_decay=lam), second, list(grads))
    box, ball, slow, average = w, w, torch.zeros_like(w), torch.zeros_like(w)
    errors = []
    for t, g in enumerate(grads):
        c, slow, average = b1 * slow + (1 - b1) * g, b2 * slow + (1 - b2) * g, beta * average + (1 - beta) * g
        program = optimize.linprog(c.flatten().numpy(), bounds=[(-1 / lam, 1 / lam)] * (m * n))
        box = box + gamma * (torch.from_numpy(program.x).reshape(m, n) - box)
        ball = ball + gamma * (-torch.from_numpy(linalg.polar(average.numpy())[0]) / lam - ball)
        errors.append((gap(lion[t], box), gap(muon[t], ball)))
    far = parameter(20 * w)
    path = fed(Lion([far], lr=eta, betas=(b1, b2), weight_decay=lam), far, list(draw.normal(60, m, n)))
    excess = path.abs().amax((-2, -1)) - 1 / lam
    allowed = (20 * w.abs().max() - 1 / lam) * (1 - gamma) ** torch.arange(1, 61).double()
    held = parameter(w)
    settled = fed(Lion([held], lr=eta, weight_decay=lam), held, [grads[0]] * 150)[-1]
    free = parameter(w)
    unconstrained = fed(Lion([free], lr=eta, betas=(b1, b2)), free, [grads[0]])[0]
    return (
        holds("Lion against Frank-Wolfe with a linear program over the box", max(a for a, _ in errors), 1e-11),
        holds("Muon (exact polar factor) against Frank-Wolfe on the spectral ball", max(b for _, b in errors), 1e-11),
        holds("excess over the radius beyond its bound", (excess - allowed).max().clamp_min(0), 1e-10),
        holds("under a constant gradient W tends to a corner of the box", gap(settled, -grads[0].sign() / lam), 1e-9),
        holds("without decay: W - eta sign", gap(unconstrained, w - eta * grads[0].sign()), 1e-12),
    )


@claim(
    "C19",
    "Muon's weights stay in a spectral ball of radius 1/lambda.",
    Verdict.CONDITIONAL,
    BLOG("Frank-Wolfe, Lion and Muon"),
    "axes.optim.Muon, axes.StateUpdate",
    conditions="the polar factor is exact, and the radius is a/lambda with a the shape factor of the update, which "
    "the decay does not carry",
    derivation="The update is multiplied by a = sqrt(max(1, m/n)) or 0.2 sqrt(max(m, n)), the decay is not: the fixed "
    "point of a constant gradient is -a polar/lambda. Five quintic steps in bfloat16 leave singular values between "
    "0.68 and 1.2.",
)
def C19(draw: Draw) -> tuple[Finding, ...]:
    lam, eta, steps = 0.5, 1.0, 40
    findings = []
    for (m, n), scale in itertools.product(((32, 8), (8, 32)), ("original", "match_rms_adamw")):
        factor = math.sqrt(max(1, m / n)) if scale == "original" else 0.2 * math.sqrt(max(m, n))
        g = draw.normal(m, n)
        grads = [g] * steps
        exact, ours = parameter(torch.zeros_like(g)), parameter(torch.zeros_like(g))
        theirs = parameter(torch.zeros_like(g))
        fed(rule(directed(Spectral("polar", scale=scale)), exact, lr=eta, weight_decay=lam), exact, grads)  # type: ignore[arg-type]
        fed(Muon([{"params": [ours], "rule": "muon"}], lr=eta, weight_decay=lam, scale=scale), ours, grads)  # type: ignore[arg-type]
        fed(torch.optim.Muon([theirs], lr=eta, weight_decay=lam, adjust_lr_fn=scale), theirs, grads)
        values, seen = torch.linalg.svdvals(exact.detach()), torch.linalg.svdvals(theirs.detach())
        findings += [
            holds("exact polar factor: singular values lambda/a - 1", (values * lam / factor - 1).abs().max(), 1e-9),
            holds("axes' Muon against torch's, relative", gap(ours, theirs) / float(theirs.detach().abs().max()), 1e-5),
            holds(
                "torch's Muon: distance of singular values lambda/a from 1", (seen * lam / factor - 1).abs().max(), 0.35
            ),
            breaks("torch's Muon: the same, as a failure of exactness", (seen * lam / factor - 1).abs().max(), 0.03),
        ]
        if factor != 1.0:
            findings.append(
                breaks(
                    "exact polar factor, radius without a: singular values lambda - 1",
                    (values * lam - 1).abs().max(),
                    0.1,
                )
            )
    return tuple(findings)
