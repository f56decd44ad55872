"""Group J, predicted combinations: the systems that the taxonomy leaves open, by the definitions this package gives."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, untestable, within
from axes.claims.sources import BLOG
from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Alignment, Given, Linear, SquaredError
from axes.core.geometry import Entropic, Euclidean, Spectral, Whiten
from axes.core.monoids import Decay, Identity, Product, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim import ReflectiveMomentum, RotationalMomentum, SignedEG, optimizer
from axes.sequence import AdamNet, FrankWolfeDelta, RLSNet, ShampooNet

_TRANSFER = "Cross-axis transfer"


def _stream(draw: Draw, length: int = 12, d_v: int = 4, d_k: int = 5) -> dict[str, Tensor]:
    """Keys and values, with every key also a query."""
    k = draw.normal(length, d_k)
    return {"k": k, "q": k, "v": draw.normal(length, d_v)}


def _final(update: StateUpdate, signal: dict[str, Tensor]) -> Tensor:
    """The weights after the last token."""
    without = {n: x for n, x in signal.items() if n != "q"}
    return reference.run(update, without)[0][-1]


@claim(
    "J01",
    "RLS-Net, whose state is whitened by its own key statistic, is recursive least squares: at every token the "
    "minimiser "
    "of the discounted squared error with ridge, in one pass.",
    Verdict.EXACT,
    BLOG(_TRANSFER + ", RLS-Net"),
    "axes.sequence.RLSNet",
    derivation="theta = sum a beta v k^T and R = sum a beta k k^T solve W (R + delta I) = theta. The recursion with "
    "the gain "
    "g = P k / (a + k^T P k) inverts R + delta I by Sherman and Morrison while nothing is forgotten; with P frozen "
    "at the "
    "identity and a + |k|^2 = 1 its step is the delta rule.",
)
def J01(draw: Draw) -> tuple[Finding, ...]:
    s = _stream(draw)
    t, d_k, delta = 12, 5, 0.1
    decay, beta = -draw.uniform(t, high=0.4), draw.uniform(t, low=0.3)
    w = _final(RLSNet.update, {**s, "decay": decay, "beta": beta})
    mass = beta * torch.exp(decay.flip(0).cumsum(0).flip(0) - decay)  # what is left of each token's weight at the end
    design = torch.cat((s["k"] * mass.sqrt()[:, None], math.sqrt(delta) * torch.eye(d_k, dtype=torch.float64)))
    target = torch.cat((s["v"] * mass.sqrt()[:, None], torch.zeros(d_k, 4, dtype=torch.float64)))
    solved = torch.linalg.lstsq(design, target).solution.T
    kept = _final(
        RLSNet.update, {**s, "decay": torch.zeros(t, dtype=torch.float64), "beta": torch.ones(t, dtype=torch.float64)}
    )
    p, recursive = torch.eye(d_k, dtype=torch.float64) / delta, torch.zeros(4, d_k, dtype=torch.float64)
    for k, v in zip(s["k"], s["v"], strict=True):
        g = p @ k / (1 + k @ p @ k)
        recursive = recursive + torch.outer(v - recursive @ k, g)
        p = p - torch.outer(g, k @ p)
    k, v = draw.unit(d_k) * 0.6, draw.normal(4)
    start = draw.normal(4, d_k)
    step, frozen = 1 / (1 - 0.36 + float(k @ k)), start + torch.outer(v - start @ k, k)
    delta_rule = StateUpdate(SquaredError(), algorithm=Step(step))
    moved = reference.run(delta_rule, {"k": k[None], "v": v[None]}, weights=(start,))[0][0]
    return (
        holds("state against the weighted ridge solution", gap(w, solved), 1e-9),
        holds("state against the recursion with gain P k / (1 + k P k)", gap(kept, recursive), 1e-8),
        holds("frozen P with a + |k|^2 = 1 against the delta rule", gap(moved, frozen), 1e-12),
    )


@claim(
    "J02",
    "Muon-Net on the state (polar factor of the state after every write) is an isometry and stores no magnitudes; "
    "Muon-Net on the update is Muon, and without momentum it is the Frank-Wolfe delta rule.",
    Verdict.CONDITIONAL,
    BLOG(_TRANSFER + ", Muon-Net"),
    "axes.core.state_update.StateUpdate with axes.geometry.Spectral",
    conditions="the pseudo-polar factor, which drops null directions; for the second part no momentum, and the "
    "radius 1/weight",
    derivation="polar(S) polar(S)^T = I once S has full row rank, whatever |v| is. The gradient of one token is rank "
    "one, "
    "-e k^T, and its pseudo-polar factor is -e^ k^^T: with gate 1 - lambda eta and step eta this is a Frank-Wolfe "
    "step on "
    "the ball of radius 1/lambda.",
)
def J02(draw: Draw) -> tuple[Finding, ...]:
    s = _stream(draw)
    polar = Spectral("polar")
    state = StateUpdate(Alignment(), polar, Identity(), Step(lazy=False))
    path = reference.run(state, {n: x for n, x in s.items() if n != "q"})[0]
    loud = reference.run(state, {"k": s["k"], "v": 4 * s["v"]})[0]
    eye = torch.eye(4, dtype=torch.float64)
    eta, weight = 0.2, 0.5
    update = StateUpdate(SquaredError(), OnUpdate(polar), Decay(weight), Step(eta))
    start = draw.normal(4, 5) * 0.1
    muon = reference.run(update, {n: x for n, x in s.items() if n != "q"}, weights=(start,))[0]
    w, closed, inside = start, [], 0.0
    for k, v in zip(s["k"], s["v"], strict=True):
        e = v - w @ k
        w = (1 - weight * eta) * w + eta * torch.outer(e / e.norm(), k / k.norm())
        closed.append(w)
        inside = max(inside, float(torch.linalg.matrix_norm(w, 2)) - 1 / weight)
    filtered = StateUpdate(SquaredError(), OnUpdate(polar), Decay(weight), Step(eta, via=(Momentum(0.9, "ema"),)))
    with_momentum = reference.run(filtered, {n: x for n, x in s.items() if n != "q"}, weights=(start,))[0]
    full = torch.linalg.svd(torch.outer(s["v"][0], s["k"][0]), full_matrices=False)
    completed = full.U @ full.Vh
    rank_one = torch.outer(s["v"][0] / s["v"][0].norm(), s["k"][0] / s["k"][0].norm())
    return (
        holds("state: S S^T against I", gap(path[-1] @ path[-1].mT, eye), 1e-11),
        holds("update: against the Frank-Wolfe delta rule", gap(muon, torch.stack(closed)), 1e-11),
        holds("update: spectral norm beyond 1/weight", max(inside, 0.0), 1e-10),
        holds(
            "state: singular values of louder values against 1",
            gap(torch.linalg.svdvals(loud[-1]), torch.ones(4).double()),
            1e-11,
        ),
        breaks("with momentum, distance to the Frank-Wolfe delta rule", gap(with_momentum, muon), 1e-2),
        breaks("full polar factor of a rank-one gradient, distance to e^ k^^T", gap(completed, rank_one), 1e-1),
    )


@claim(
    "J03",
    "Shampoo-Net, L^{-1/2} C R^{-1/2} with statistics of values and keys, holds canonical correlations; with the "
    "powers "
    "(0, 1) it is least squares, and no choice of powers gives the delta rule.",
    Verdict.CONDITIONAL,
    BLOG(_TRANSFER + ", Shampoo-Net"),
    "axes.sequence.ShampooNet",
    conditions="statistics over the same weights as the state, and vanishing damping for singular values equal to one",
    derivation="C = V^T K, L = V^T V, R = K^T K: L^{-1/2} C R^{-1/2} = polar(V)^T polar(K), a product of two "
    "contractions. "
    "With powers (0, 1) it is V^T K (K^T K)^{-1}.",
)
def J03(draw: Draw) -> tuple[Finding, ...]:
    s = _stream(draw, length=16)
    t = 16
    ones, zeros = torch.ones(t, dtype=torch.float64), torch.zeros(t, dtype=torch.float64)
    rates = {"decay": zeros, "beta": ones}
    w = _final(ShampooNet.update, {**s, **rates})
    k, v, eps = s["k"], s["v"], 0.1

    def root(a: Tensor) -> Tensor:
        values, basis = torch.linalg.eigh(a + eps * torch.eye(len(a), dtype=a.dtype))
        return (basis * values**-0.5) @ basis.mT

    largest = float(torch.linalg.svdvals(w)[0])
    statistic = lambda of: StateUpdate(Linear(of))  # noqa: E731
    undamped = StateUpdate(Alignment(), Whiten((statistic("value"), statistic("key")), "kronecker", 0.5, eps=0.0))
    true = draw.normal(4, 5)
    linear = _final(undamped, {"k": k, "v": k @ true.T})
    ridge = StateUpdate(Alignment(), Whiten((statistic("key"),), "right", 1.0, eps=0.0))
    fitted, lstsq = _final(ridge, {"k": k, "v": v}), torch.linalg.lstsq(k, v).solution.T
    noisy = torch.linalg.svdvals(_final(undamped, {"k": k, "v": v}))
    lopsided = Whiten((StateUpdate(Linear("value"), monoid=Scalar(0.5)), statistic("key")), "kronecker", 0.5, eps=0.0)
    uneven = torch.linalg.svdvals(_final(StateUpdate(Alignment(), lopsided), {"k": k, "v": v}))
    return (
        holds("against two eigendecompositions", gap(w, root(v.T @ v) @ (v.T @ k) @ root(k.T @ k)), 1e-9),
        holds("largest singular value beyond 1", max(largest - 1, 0.0), 1e-12),
        holds(
            "noiseless linear data: singular values against 1",
            gap(torch.linalg.svdvals(linear), torch.ones(4).double()),
            1e-8,
        ),
        holds("powers (0, 1) against least squares", gap(fitted, lstsq), 1e-9),
        breaks(
            "with damping, distance of noiseless singular values to 1",
            1 - float(torch.linalg.svdvals(_final(ShampooNet.update, {"k": k, "v": k @ true.T, **rates}))[-1]),
            1e-4,
        ),
        breaks(
            "statistics that forget faster than the state: largest singular value beyond 1",
            float(uneven[0]) - float(noisy[0]),
            1e-3,
        ),
    )


@claim(
    "J04",
    "Adam-Net is Adam on the stream of per-token recall losses: Titans' momentum with a second moment per entry.",
    Verdict.EXACT,
    BLOG(_TRANSFER + ", Adam-Net"),
    "axes.sequence.AdamNet",
    derivation="The filter is Adam's first moment whitened by the root of its second, both divided by their response "
    "to a "
    "unit drive; nothing in it knows that the drive is (S k - v) k^T.",
)
def J04(draw: Draw) -> tuple[Finding, ...]:
    t = 100
    s = _stream(draw, length=t)
    _, h, monoid, step, _ = AdamNet.update.parts()
    here = StateUpdate(SquaredError(), h, monoid, Step(step.rate, at="prev", via=step.via))
    signal = {**s, "decay": torch.zeros(t, dtype=torch.float64), "beta": torch.full((t,), 0.05, dtype=torch.float64)}
    path = reference.run(here, {n: x for n, x in signal.items() if n != "q"})[0]
    weight = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=0.05, betas=(0.9, 0.95), eps=1e-4)
    expected = []
    for k, v in zip(s["k"], s["v"], strict=True):
        adam.zero_grad()
        ((v - weight @ k).square().sum() / 2).backward()
        adam.step()
        expected.append(weight.detach().clone())
    return (holds("100 steps against torch.optim.Adam", gap(path, torch.stack(expected)), 1e-11),)


@claim(
    "J05",
    "The Frank-Wolfe delta rule (1 - gamma) S + gamma R e^ k^^T is gradient descent with decay on the norm of the "
    "error "
    "over the norm of the key, and never leaves its ball.",
    Verdict.EXACT,
    BLOG(_TRANSFER + ", Frank-Wolfe delta rule"),
    "axes.sequence.FrankWolfeDelta",
    derivation="The gradient of |v - S k| / |k| is -e^ k^^T. A convex combination of S and a point of the nuclear "
    "ball stays "
    "in the ball. Where e = 0 nothing is written.",
)
def J05(draw: Draw) -> tuple[Finding, ...]:
    t, radius = 12, 2.0
    s = _stream(draw, length=t)
    gamma = draw.uniform(t, low=0.05, high=0.6)
    signal = {"k": s["k"], "v": s["v"], "decay": torch.log1p(-gamma), "beta": radius * gamma}
    path = reference.run(FrankWolfeDelta.update, signal)[0]
    w, expected, outside = torch.zeros(4, 5, dtype=torch.float64), [], 0.0
    for k, v, g in zip(s["k"], s["v"], gamma, strict=True):
        x = w.clone().requires_grad_()
        (slope,) = torch.autograd.grad((v - x @ k).norm() / k.norm(), x)
        w = (1 - g) * w - g * radius * slope
        expected.append(w)
        outside = max(outside, float(torch.linalg.matrix_norm(w, "nuc")) - radius)
    known = {
        "k": s["k"][:1],
        "v": torch.zeros(1, 4, dtype=torch.float64),
        "decay": torch.log1p(-gamma[:1]),
        "beta": gamma[:1],
    }
    silent = reference.run(FrankWolfeDelta.update, known)[0][-1]
    return (
        holds("against descent on |v - S k| / |k| with decay", gap(path, torch.stack(expected)), 1e-12),
        holds("nuclear norm beyond the radius", max(outside, 0.0), 1e-10),
        holds("write where the error is zero", silent.abs().max(), 0.0),
    )


def _driven(make: object, start: Tensor, stream: list[Tensor]) -> Tensor:
    """Weights (N, ...) of an optimizer that is handed these gradients."""
    weight = nn.Parameter(start.clone())
    stepper, path = make(weight), []  # type: ignore[operator]
    for g in stream:
        weight.grad = g.clone()
        stepper.step()
        path.append(weight.detach().clone())
    return torch.stack(path)


@claim(
    "J06",
    "Momentum with a rotation in its retention is complex momentum with rate beta e^(i angle): it passes gradients "
    "that turn "
    "by the angle and still converges to the minimiser.",
    Verdict.CONDITIONAL,
    BLOG(_TRANSFER + ", rotational or reflective decay"),
    "axes.optim.RotationalMomentum",
    conditions="the rotation acts on the momentum; on the weights the fixed point is another one",
    derivation="m_n = sum (1 - beta) beta^{n-j} g_j R^{n-j}. At a minimiser g = 0, so m decays and W stays. A "
    "rotated weight "
    "solves W R - eta g(W R) = W instead, which the minimiser does not.",
)
def J06(draw: Draw) -> tuple[Finding, ...]:
    beta, angle, lr, n = 0.8, 0.3, 0.1, 25
    start, stream = draw.normal(3, 6), list(draw.normal(n, 3, 6))
    make = lambda w: RotationalMomentum([{"params": [w], "rule": "rotational"}], lr=lr, momentum=beta, angle=angle)  # noqa: E731
    path = _driven(make, start, stream)
    turn = beta * complex(math.cos(angle), math.sin(angle))
    w, m, unrolled = torch.complex(*start.chunk(2, -1)), torch.zeros((), dtype=torch.complex128), []
    for g in stream:
        m = turn * m + (1 - beta) * torch.complex(*g.chunk(2, -1))
        w = w - lr * m
        unrolled.append(torch.cat((w.real, w.imag), -1))
    frequencies = torch.linspace(0.01, 1.0, 400, dtype=torch.float64)
    response = (1 - beta) / (1 - turn * torch.exp(-1j * frequencies)).abs()
    target = draw.normal(3, 6)
    weight = nn.Parameter(start.clone())
    descend = make(weight)
    turned = StateUpdate(Given(), Euclidean(), Product((Scalar(1.0), Rotation(angle, uniform=True))), Step(Per("lr")))
    rotated = nn.Parameter(start.clone())
    on_weights = optimizer(turned)([rotated], lr=lr)
    for _ in range(800):
        weight.grad = weight.detach() - target
        descend.step()
        rotated.grad = rotated.detach() - target
        on_weights.step()
    return (
        holds("against complex momentum", gap(path, torch.stack(unrolled)), 1e-12),
        holds("distance to the minimiser", gap(weight.detach(), target), 1e-9),
        within("frequency of the largest response", frequencies[response.argmax()], angle - 0.01, angle + 0.01),
        breaks(
            "rotation on the weights: relative distance to the minimiser",
            float((rotated.detach() - target).norm() / target.norm()),
            0.3,
        ),
    )


@claim(
    "J07",
    "Mirror descent with the negative entropy of rows, W = softmax(alpha log W - eta g), is exponentiated gradient at "
    "alpha = 1, and keeps every row on the simplex.",
    Verdict.EXACT,
    BLOG("Open questions, entropic retention on the data axis"),
    "axes.optim.optimizer of an entropic tuple; axes.optim.SignedEG",
    derivation="grad h* of the entropy on a simplex is the softmax, and log softmax differs from the identity by a "
    "constant of "
    "the row. On signed weights both halves of U - V are multiplied by exp(-+ eta g). Kivinen and Warmuth's algorithm, "
    "not a new one; alpha < 1 adds a pull to the uniform row.",
)
def J07(draw: Draw) -> tuple[Finding, ...]:
    start, stream, eta = torch.softmax(draw.normal(3, 5), -1), list(draw.normal(20, 3, 5)), 0.2
    tuple_of = lambda monoid: StateUpdate(Given(), Entropic("row"), monoid, Step(Per("lr")))  # noqa: E731
    path = _driven(
        lambda w: optimizer(tuple_of(Identity()))([{"params": [w], "rule": "matrix"}], lr=eta), start, stream
    )
    pulled = _driven(
        lambda w: optimizer(tuple_of(Scalar(0.7)))([{"params": [w], "rule": "matrix"}], lr=eta), start, stream
    )
    w, forgetful, multiplied, softened = start, start, [], []
    for g in stream:
        w = w * torch.exp(-eta * g)
        w = w / w.sum(-1, keepdim=True)
        multiplied.append(w)
        forgetful = forgetful**0.7 * torch.exp(-eta * g)
        forgetful = forgetful / forgetful.sum(-1, keepdim=True)
        softened.append(forgetful)
    signed = draw.normal(3, 5)
    two = _driven(lambda x: SignedEG([x], lr=eta, scale=1.0), signed, stream)
    u, v = torch.exp(torch.asinh(signed)) / 2, torch.exp(-torch.asinh(signed)) / 2
    halves = []
    for g in stream:
        u, v = u * torch.exp(-eta * g), v * torch.exp(eta * g)
        halves.append(u - v)
    return (
        holds("alpha = 1 against exponentiated gradient", gap(path, torch.stack(multiplied)), 1e-12),
        holds("alpha < 1 against its multiplicative form", gap(pulled, torch.stack(softened)), 1e-12),
        holds("row sums against 1", gap(path.sum(-1), torch.ones(20, 3).double()), 1e-12),
        holds("signed weights against two multiplicative halves", gap(two, torch.stack(halves)), 1e-10),
    )


@claim(
    "J08",
    "A learning-rate schedule can be read off a distance: eta_s = (1 - e^{-D_s}) / weight gives step s the retention "
    "e^{-D_s}.",
    Verdict.EXACT,
    BLOG("The data axis, learning rate as positional encoding"),
    "axes.optim.SGD",
    derivation="Decoupled decay keeps 1 - weight eta_s of the weights at step s, so the distance between two steps "
    "is the sum "
    "of -log(1 - weight eta_s) = D_s.",
)
def J08(draw: Draw) -> tuple[Finding, ...]:
    from axes.optim import SGD

    weight, distance, start = 0.4, draw.uniform(15, low=0.01, high=0.5), draw.normal(3, 4)
    parameter = nn.Parameter(start.clone())
    sgd = SGD([parameter], lr=0.0, weight_decay=weight, decoupled=True)
    rates = -torch.expm1(-distance) / weight
    for rate in rates:
        sgd.param_groups[0]["lr"] = float(rate)
        parameter.grad = torch.zeros_like(parameter)
        sgd.step()
    back = -torch.log1p(-weight * rates)
    return (
        holds(
            "weights left after the schedule against e^{-sum D}",
            gap(parameter.detach(), start * torch.exp(-distance.sum())),
            1e-12,
        ),
        holds("distance recovered from the schedule", gap(back, distance), 1e-12),
    )


@claim(
    "J09",
    "Momentum with a reflection in its retention is momentum across the mirror's normal and negative momentum along "
    "it.",
    Verdict.CONDITIONAL,
    BLOG(_TRANSFER + ", reflective decay"),
    "axes.optim.ReflectiveMomentum",
    conditions="a constant reflection; with a normal that changes per step the products do not commute",
    derivation="I - 2 u u^T is -1 along u and 1 across it, so beta times it is -beta and beta.",
)
def J09(draw: Draw) -> tuple[Finding, ...]:
    beta, lr, n = 0.8, 0.1, 20
    start, stream = draw.normal(3, 5), list(draw.normal(n, 3, 5))
    make = lambda w: ReflectiveMomentum([{"params": [w], "rule": "reflective"}], lr=lr, momentum=beta)  # noqa: E731
    path = _driven(make, start, stream)
    u = torch.full((5,), 5**-0.5, dtype=torch.float64)

    def split(normals: list[Tensor]) -> Tensor:
        across, along, w, out = torch.zeros_like(start), torch.zeros_like(start), start, []
        for g, normal in zip(stream, normals, strict=True):
            part = torch.outer(g @ normal, normal)
            across, along = beta * across + (1 - beta) * (g - part), -beta * along + (1 - beta) * part
            w = w - lr * (across + along)
            out.append(w)
        return torch.stack(out)

    normals = list(draw.unit(n, 5))
    m, w, turning = torch.zeros_like(start), start, []
    for g, normal in zip(stream, normals, strict=True):
        m = beta * (m - 2 * torch.outer(m @ normal, normal)) + (1 - beta) * g
        w = w - lr * m
        turning.append(w)
    return (
        holds("constant normal: against the two momenta", gap(path, split([u] * n)), 1e-12),
        breaks("changing normal: distance to the two momenta", gap(torch.stack(turning), split(normals)), 1e-2),
    )


J10 = untestable(
    "J10",
    "The predicted combinations are present in no current model.",
    BLOG("Cross-axis transfer; Open questions"),
    "a statement about the literature; exponentiated gradient and complex momentum are known precedents of two of them",
)

CLAIMS = (J01, J02, J03, J04, J05, J06, J07, J08, J09, J10)
