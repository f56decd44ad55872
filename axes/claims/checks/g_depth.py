"""Group G, the depth axis: stream mixing as retention, Sinkhorn and Cayley links, what deep products keep and lose."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds, within
from axes.claims.tools.float64 import eye, ones, tensor, zeros
from axes.claims.tools.matrices import beyond, centred, column, least_squares, polar
from axes.claims.tools.positions import additive
from axes.claims.tools.recurrence import recurrence
from axes.claims.tools.tuples import walked
from axes.core import reference
from axes.core.costs import Alignment
from axes.core.geometry import Birkhoff, Cayley, Entropic, Spectral
from axes.core.memory import List
from axes.core.monoids import GeneralLinear
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import MHC, HyperConnections, JPmHC, Residual

_CAYLEY = Cayley(scale=1.0)
_MIX = Per("mix", "mix", "real")


def _layers(update: StateUpdate, start: Tensor, post: Tensor, y: Tensor, **rates: Tensor) -> Tensor:
    """The streams (n, d) after every layer: the state of the tuple is their transpose."""
    return walked(update, start.mT, k=post, v=y, **rates).mT


def _mixed(gate: GeneralLinear, start: Tensor, logits: Tensor) -> Tensor:
    """The streams after every layer that only mixes them."""
    layers, n, _ = logits.shape
    return _layers(additive(gate), start, zeros(layers, n), zeros(layers, start.shape[1]), mix=logits)


@check
def G01(draw: Draw) -> Findings:
    layers, n, d = 6, 4, 5
    mix, post, y = draw.normal(layers, n, n) / 2, draw.normal(layers, n), draw.normal(layers, d)
    start = draw.normal(n, d)
    last = _layers(HyperConnections.update, start, post, y, mix=mix)[-1]
    unrolled, product = zeros(n, d), eye(n)
    for a, b, f in zip(mix.flip(0), post.flip(0), y.flip(0), strict=True):
        unrolled, product = unrolled + product @ torch.outer(b, f), product @ a
    one = ones(layers, 1)
    stream = _layers(HyperConnections.update, start[:1], one, y, mix=one[..., None])
    residual = _layers(Residual.update, start[:1], one, y)
    yield agree("streams against the unrolled sum", last, unrolled + product @ start, 1e-11)
    yield agree("one stream against x + sum of f", stream[-1, 0], start[0] + y.sum(0), 1e-12)
    yield agree("one stream against the residual's tuple", stream, residual, 0.0)


@check
def G02(draw: Draw) -> Findings:
    n, d = 3, 4
    a, x = draw.normal(n, n), draw.normal(n, d)
    mixed = _layers(HyperConnections.update, x, zeros(1, n), zeros(1, d), mix=a[None])[-1]
    own = torch.block_diag(*draw.normal(d, n, n))
    per_head = (own @ column(x)).reshape(d, n).mT
    nearest = least_squares(x.mT, per_head.mT) @ x
    yield agree("vec(A X) against (I kron A) vec X", column(mixed), torch.kron(eye(d), a) @ column(x), 1e-13)
    yield differ("blocks that differ by feature: distance to the nearest A X", per_head, nearest, 1e-2)


@check
def G03(draw: Draw) -> Findings:
    n = 5
    x = draw.normal(n, n)
    link = MHC.update.parts().monoid.link  # type: ignore[attr-defined]
    assert isinstance(link, Birkhoff)
    b = Birkhoff(500).primal(x)
    logits = x.flatten().numpy()
    rows = torch.cat((torch.kron(torch.eye(n), torch.ones(1, n)), torch.kron(torch.ones(1, n), torch.eye(n)))).numpy()

    solved = optimize.minimize(
        lambda w: float((w * (np.log(w) - logits) - w).sum()),
        np.full(n * n, 1 / n),
        jac=lambda w: np.log(w) - logits,
        method="SLSQP",
        bounds=[(1e-9, None)] * (n * n),
        constraints={"type": "eq", "fun": lambda w: rows[:-1] @ w - 1, "jac": lambda w: rows[:-1]},
        options={"maxiter": 500, "ftol": 1e-14},
    ).x
    slack, sums = centred(centred(b.log() - x, (0,)), (1,)), torch.stack((b.sum(0), b.sum(1)))
    yield holds("optimality: log B - X beyond row and column terms", slack, 1e-10)
    yield agree("row and column sums against 1", sums, ones(2, n), 1e-10)
    yield agree("against a constrained solver", b, torch.from_numpy(solved).reshape(n, n), 1e-4)
    yield agree("mHC's link reaches it in its own iterations", link.primal(x / 4), Birkhoff(500).primal(x / 4), 1e-6)


@check
def G04(draw: Draw) -> Findings:
    x = draw.normal(5, 5)
    rate = float(torch.linalg.svdvals(Birkhoff(2000).primal(x))[1]) ** 2
    errors = [float((Birkhoff(k).primal(x).sum(0) - 1).norm()) for k in range(1, 40)]
    late = [b / a for a, b in pairwise(errors) if b > 1e-11]
    sums = Birkhoff(3).primal(x).sum(1)
    yield within("contraction per iteration over sigma_2^2", late[-1] / rate if late else math.nan, 0.9, 1.1)
    yield within("row sums less 1 after three iterations", gap(sums, ones(5)), 0.0, 1e-14)


@check
def G05(draw: Draw) -> Findings:
    x = draw.normal(4, 4)
    level = x - x.logsumexp(0, keepdim=True)  # the column half done: the row half is left
    half, rows = torch.softmax(level, -1), x.exp() / x.exp().sum(-1, keepdim=True)
    yield agree("one iteration after level columns against softmax", Birkhoff(1).primal(x), half, 1e-14)
    yield agree("entropic geometry of rows against exp over its sum", Entropic("row").primal(x), rows, 1e-14)


@check
def G06(draw: Draw) -> Findings:
    b = Birkhoff(200).primal(draw.normal(8, 4, 4))
    moduli = torch.linalg.eigvals(b).abs().sort(-1, descending=True).values
    swap = eye(4)[torch.tensor([1, 2, 3, 0])]
    yield breaks("largest modulus", moduli[:, 0].min(), 1 - 1e-9)
    yield breaks("smallest modulus of a permutation", torch.linalg.eigvals(swap).abs().min(), 1 - 1e-12)
    yield agree("largest modulus against 1", moduli[:, 0], ones(8), 1e-10)
    yield holds("second modulus beyond 1 (positive entries)", beyond(moduli[:, 1], 1 - 1e-6), 0.0)
    yield agree("spectral norm against 1", torch.linalg.matrix_norm(b, 2), ones(8), 1e-9)


@check
def G07(draw: Draw) -> Findings:
    layers, n = 40, 4
    start = centred(eye(n)[:, :3], (0,))
    logits = draw.normal(layers, n, n)
    size = torch.linalg.matrix_norm(_mixed(GeneralLinear(_MIX, Birkhoff(100)), start, logits), 2)
    turned = torch.linalg.svdvals(_mixed(GeneralLinear(_MIX, Cayley()), start, logits)[-1])
    changed = gap(turned, torch.linalg.svdvals(start))
    yield within("log of the differences per layer, doubly stochastic", (size[9] / size[0]).log() / 9, -3.0, -0.3)
    yield within("differences after 40 layers, doubly stochastic", size[-1], 0.0, 1e-8)
    yield within("change of singular values after 40 layers, orthogonal", changed, 0.0, 1e-12)
    yield within("a scalar gate of 0.9 after 40 layers", 0.9**40, 0.0147, 0.0149)


@check
def G08(draw: Draw) -> Findings:
    r = _CAYLEY.primal(draw.normal(200, 4, 4))
    mirror = torch.diag(tensor([-1.0, 1, 1, 1]))
    nearest = torch.linalg.matrix_norm(r - mirror).min()
    gate = JPmHC.update.parts().monoid
    assert isinstance(gate, GeneralLinear) and isinstance(gate.link, Cayley)
    eigenvalues = torch.linalg.eigvals(_CAYLEY.primal(draw.normal(200, 4, 4)))
    # every rotation without eigenvalue -1 is reached: its own Cayley transform is skew
    s = draw.normal(4, 4)
    target = torch.linalg.matrix_exp(0.7 * (s - s.mT))
    skew = torch.linalg.solve(eye(4) + target, eye(4) - target)
    yield breaks("distance of 200 draws to a reflection", nearest, 1.0)
    yield breaks("distance of eigenvalues to -1", (eigenvalues + 1).abs().min(), 1e-9)
    yield agree("determinant against 1", torch.linalg.det(r), ones(200), 1e-10)
    yield agree("a rotation without eigenvalue -1 is reached", _CAYLEY.primal(-skew), target, 1e-8)


@check
def G09(draw: Draw) -> Findings:
    x = draw.normal(4, 4) * 2
    nearest = (x - polar(x)).norm()
    retracted = min((x - _CAYLEY.primal(s * x)).norm() for s in (1.0, -1.0))
    skew = x - x.mT
    # scale 1: A = -(H - H^T) / 2, and (I - A/2)-form: H = eps K / 2 moves I by eps K to first order
    off = [float((_CAYLEY.primal(e * skew / 2) - polar(eye(4) + e * skew)).norm()) for e in (1e-2, 1e-3)]
    yield breaks("how much farther than the projection", retracted - nearest, 0.05)
    yield agree("pseudo-polar geometry against scipy", Spectral("polar").primal(x), polar(x), 1e-10)
    yield within("order of agreement at the identity", math.log10(off[0] / off[1]), 2.9, 3.1)


@check
def G10(draw: Draw) -> Findings:
    layers, n = 40, 4
    gate = JPmHC.update.parts().monoid
    assert isinstance(gate, GeneralLinear)
    last = _mixed(gate, eye(n), 5 * draw.normal(layers, n, n))[-1]
    yield agree("singular values of 40 layers against 1", torch.linalg.svdvals(last), ones(n), 1e-12)


@check
def G11(draw: Draw) -> Findings:
    layers, p, q = 5, 3, 4
    a, v, k, start = draw.normal(layers, p, p) / 2, draw.normal(layers, p), draw.normal(layers, q), draw.normal(p, q)
    update = additive(GeneralLinear(_MIX))

    def printed(state: Tensor, mix: Tensor, value: Tensor, key: Tensor) -> Tensor:
        return mix @ state + torch.outer(value, key)

    swapped = walked(update, start.mT, k=v, v=k, mix=a).mT
    square, left = draw.normal(layers, p), start[:, :p]
    literal = walked(update, left, k=square, v=v, mix=a)[-1]
    yield agree("transposed state with key and value exchanged", swapped, recurrence(printed, start, a, v, k), 1e-13)
    yield differ(
        "without the exchange (square state), distance", literal, recurrence(printed, left, a, v, square)[-1], 1e-2
    )


@check
def G12(draw: Draw) -> Findings:
    layers, d = 6, 5
    outputs, keys = draw.normal(layers, d), draw.normal(layers, d)
    update = StateUpdate(Alignment(), Entropic(), memory=List())
    read, state = reference.run(update, {"k": keys, "v": outputs, "q": zeros(layers, d)})
    stream = walked(Residual.update, k=ones(layers, 1), v=outputs)[-1, :, 0]
    asked = walked(update, k=keys, v=outputs, q=3 * draw.normal(layers, d))
    yield agree("zero query against the residual sum over L", read[-1], stream / layers, 1e-14)
    yield agree("stored outputs against L", state.theta[1].shape[-2], layers, 0.0)
    yield differ("zero query against the residual sum itself", read[-1], stream, 1e-1)
    yield differ("another query against the mean", asked[-1], stream / layers, 1e-2)
