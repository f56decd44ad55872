"""Group A, the common update: gradient steps, retention on either side, and the rows of the table of instances."""

from __future__ import annotations

import numpy as np
import torch
from scipy import integrate
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from axes.catalogue import get
from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds
from axes.claims.group_a_tools import fed, gradient, layer_tuple, one_step, squared_error, trained
from axes.claims.sources import BLOG
from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Alignment, Given
from axes.core.derived import structure
from axes.core.geometry import Birkhoff, Euclidean
from axes.core.monoids import Diagonal, Hadamard, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import Residual
from axes.optim import SGD
from axes.routes import dispatch

_SAME, _TABLE = "The same algorithm", "The same algorithm, table of instances"


def column(s: Tensor) -> Tensor:
    """vec: the columns of a matrix one below the other."""
    return s.mT.flatten()


@claim(
    "A01",
    "One gradient step of size eta on |y - W x|^2 / 2 is the Widrow-Hoff rule W + eta (y - W x) x^T.",
    Verdict.EXACT,
    BLOG(_SAME),
    "axes.optim.SGD",
    derivation="d/dW |y - W x|^2 / 2 = -(y - W x) x^T, with a sum over outputs and one half. A mean of squares over "
    "d_v outputs, the default of a library's loss, has 2/d_v times this gradient.",
)
def A01(draw: Draw) -> tuple[Finding, ...]:
    findings = []
    for d_v, d_k in ((1, 4), (5, 3), (draw.integer(2, 7), draw.integer(1, 8))):
        w, x, y, eta = draw.normal(d_v, d_k), draw.normal(d_k), draw.normal(d_v), float(draw.uniform(low=0.01, high=2))
        for datum in (x, torch.zeros_like(x)):
            weight = nn.Parameter(w.clone())
            stepped = trained(SGD([weight], lr=eta, momentum=0.0), weight, [squared_error(datum, y)])[0]
            findings.append(
                holds("SGD against the rule", gap(stepped, w + eta * torch.outer(y - w @ datum, datum)), 1e-12)
            )
        mean = gradient(lambda u, x=x, y=y: nn.functional.mse_loss(u @ x, y), w)  # type: ignore[misc]
        scaled = 2 / d_v * gradient(squared_error(x, y), w)
        findings.append(holds("gradient of the mean square against 2/d_v times it", gap(mean, scaled), 1e-12))
    return tuple(findings)


@claim(
    "A02",
    "DeltaNet is the Widrow-Hoff rule with inputs, targets and weights renamed: SGD with one learning rate a token.",
    Verdict.CONDITIONAL,
    BLOG(_SAME + ", and Costs and update equations"),
    "axes.sequence.DeltaNet, axes.optim.SGD",
    conditions="the same initial state, one example a step, no momentum, no weight decay; neither unit keys nor a "
    "rate of one",
    derivation="Both add beta (v - S k) k^T. A second example in the same step sees the old state, momentum adds "
    "earlier gradients, decay shrinks S: each puts another term into the recursion.",
)
def A02(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d_k = 50, draw.integer(2, 5), draw.integer(3, 7)
    k, v, start = draw.unit(n, d_k) * draw.uniform(n, 1, low=0.2, high=1.0), draw.normal(n, d_v), draw.normal(d_v, d_k)
    beta = draw.uniform(n, high=2.0)
    beta[n // 2], k[n // 3] = 0.0, 0.0
    update, signal = layer_tuple("delta-net"), {"k": k, "v": v, "beta": beta}
    layer = reference.run(update, signal, weights=(start,))[0]
    batched = {name: x[None] for name, x in {**signal, "q": k}.items()}
    fast = dispatch.run(update, batched, time=1, weights=(start[None],))[1].theta[0][0]
    losses, rates = [squared_error(x, y) for x, y in zip(k, v, strict=True)], beta.tolist()

    def path(kind: type, first: Tensor = start, **options: float) -> Tensor:
        weight = nn.Parameter(first.clone())
        return trained(kind([weight], **{"lr": 1.0, "momentum": 0.0} | options), weight, losses, rates)

    pairs = [lambda w, i=i: losses[i](w) + losses[i + 1](w) for i in range(0, n, 2)]
    weight = nn.Parameter(start.clone())
    two = trained(SGD([weight], lr=1.0, momentum=0.0), weight, pairs, rates[::2])
    even = reference.run(update, {**signal, "beta": beta[::2].repeat_interleave(2)}, weights=(start,))[0]
    return (
        holds("50 tokens against axes' SGD", gap(layer, path(SGD)), 1e-10),
        holds("50 tokens against torch's SGD", gap(layer, path(torch.optim.SGD)), 1e-10),
        holds("the layer's fast route against SGD", gap(fast, path(SGD)[-1]), 1e-10),
        breaks("another initial state", gap(layer, path(SGD, start + 1)), 0.05),
        breaks("two examples a step", gap(even[1::2], two), 0.05),
        breaks("momentum 0.5", gap(layer, path(SGD, momentum=0.5)), 0.2),
        breaks("weight decay 0.1", gap(layer, path(SGD, weight_decay=0.1)), 0.05),
    )


@claim(
    "A03",
    "Retention acts entry by entry on the sequence axis, S -> A * S, and as a matrix product on the depth axis only.",
    Verdict.FALSE,
    BLOG(_SAME + ", common form; The depth axis"),
    "axes.sequence.DeltaNet, axes.sequence.GLA, axes.depth.MHC, axes.monoids.Hadamard",
    correction="it multiplies the state from the right on the sequence axis, vec(S A) = (A^T x I) vec S, and the "
    "streams from the left on the depth axis, vec(R X) = (I x R) vec X; only scalar, key-wise and Hadamard gates are "
    "entry-wise",
    kind="OVER",
    derivation="(S (I - b k k^T))_ij mixes the whole row i of S, so that the factor (S A)_ij / S_ij depends on S. A "
    "diagonal A scales columns and is entry-wise; an S6 gate scales entries and is no matrix at all.",
)
def A03(draw: Draw) -> tuple[Finding, ...]:
    d_v, d_k = 3, 4
    k, nothing = draw.unit(d_k), torch.zeros(d_v, dtype=torch.float64)
    eye_v, eye_k = torch.eye(d_v, dtype=torch.float64), torch.eye(d_k, dtype=torch.float64)
    s, other = draw.uniform(d_v, d_k, low=0.5, high=2.0), draw.uniform(d_v, d_k, low=0.5, high=2.0)
    delta = layer_tuple("delta-net")
    kept, kept_other = (one_step(delta, x, k=k, v=nothing, beta=torch.ones(())) for x in (s, other))
    right = torch.kron((eye_k - torch.outer(k, k)).mT.contiguous(), eye_v) @ column(s)
    log_gate = -draw.uniform(d_k)
    channel = one_step(layer_tuple("gla"), s, k=k, v=nothing, decay=log_gate)
    log_square = -draw.uniform(d_v, d_k)
    entry = one_step(StateUpdate(Alignment(), Euclidean(), Hadamard("decay")), s, k=k, v=nothing, decay=log_square)
    logits = draw.normal(d_k, d_k)
    streams = draw.normal(d_k, d_v)  # X, one stream a row; the tuple stores X^T
    mixed = one_step(get("mhc", "depth").update, streams.mT, k=k, v=nothing, mix=logits).mT
    left = torch.kron(eye_v, Birkhoff(20).primal(logits)) @ column(streams)
    return (
        breaks("factors that DeltaNet's retention takes, for two states", gap(kept / s, kept_other / other), 1e-3),
        holds("DeltaNet: vec(S A) against (A^T x I) vec S", gap(column(kept), right), 1e-12),
        holds("GLA: columns of S times the gate", gap(channel, s @ torch.diag(log_gate.exp())), 1e-12),
        holds("Hadamard gate: entries of S times the gate", gap(entry, log_square.exp() * s), 1e-12),
        holds("streams: vec(R X) against (I x R) vec X", gap(column(mixed), left), 1e-12),
    )


GRU = StateUpdate(Alignment(), Euclidean(), Diagonal("keep", side="row"), Step(Per("write", "row")))


def _gru_cell(cell: nn.GRUCell, x: Tensor, h: Tensor, sign: float) -> tuple[Tensor, Tensor, Tensor]:
    """(next state, z, h~): z is the cell's own update gate; the next state has that gate's weights times `sign`."""
    d = h.shape[-1]
    with torch.no_grad():
        of_x = (cell.weight_ih @ x + cell.bias_ih).split(d)
        of_h = (cell.weight_hh @ h + cell.bias_hh).split(d)
        signs = torch.ones(3 * d, dtype=h.dtype)
        signs[d : 2 * d] = sign
        changed = {name: (p.mT * signs).mT if p.ndim == 2 else p * signs for name, p in cell.named_parameters()}
        after = torch.func.functional_call(cell, changed, (x[None], h[None]))[0]
    reset, update = (torch.sigmoid(of_x[i] + of_h[i]) for i in (0, 1))
    return after, update, torch.tanh(of_x[2] + reset * of_h[2])


@claim(
    "A04",
    "A GRU keeps (1 - z) of its state and writes z of its candidate h~.",
    Verdict.CONDITIONAL,
    BLOG(_TABLE + ", GRU"),
    "axes.StateUpdate",
    conditions="z is the weight of the candidate; in torch.nn.GRUCell z is the weight of the old state",
    derivation="Both conventions are one affine row gate; they differ by z <-> 1 - z, that is by the sign of the "
    "update gate's weights. As a tuple: alignment cost, a memory with one key k = 1, row gate 1 - z and row rate z.",
)
def A04(draw: Draw) -> tuple[Finding, ...]:
    d, d_x = draw.integer(2, 6), draw.integer(1, 5)
    cell = nn.GRUCell(d_x, d, dtype=torch.float64)
    with torch.no_grad():
        for p in cell.parameters():
            p.copy_(draw.normal(*p.shape))
    one = torch.ones(1, dtype=torch.float64)

    def printed(h: Tensor, z: Tensor, candidate: Tensor) -> Tensor:
        return one_step(GRU, h[:, None], k=one, v=candidate, keep=torch.log1p(-z), write=z)[:, 0]

    negated, exchanged, literal = [], [], []
    h = draw.normal(d)
    for _ in range(5):
        x = draw.normal(d_x)
        after, z, candidate = _gru_cell(cell, x, h, -1.0)
        negated.append(gap(printed(h, z, candidate), after))
        after, z, candidate = _gru_cell(cell, x, h, 1.0)
        exchanged.append(gap(printed(h, 1 - z, candidate), after))
        literal.append(gap(printed(h, z, candidate), after))
        h = after
    return (
        holds("GRUCell with the update gate's weights negated", max(negated), 1e-12),
        holds("GRUCell with z and 1 - z exchanged", max(exchanged), 1e-12),
        breaks("GRUCell with the printed form", max(literal), 0.01),
    )


S6 = StateUpdate(Alignment(), Euclidean(), Hadamard("decay"), Step(Per("hold", "square")))


@claim(
    "A05",
    "A state space model under zero-order hold is s -> exp(dt A) s + A^-1 (exp(dt A) - I) B u.",
    Verdict.EXACT,
    BLOG(_TABLE + ", SSM"),
    "axes.StateUpdate",
    derivation="The solution of s' = A s + B u with u constant over dt. With diagonal A: entry-wise gate exp(dt a) "
    "and rate (exp(dt a) - 1)/a, which tends to dt as a -> 0. One input channel has a vector of states, all of them a "
    "matrix.",
)
def A05(draw: Draw) -> tuple[Finding, ...]:
    channels, n, length = 2, 3, 4
    a = -draw.uniform(channels, n, low=0.05, high=2.0)
    a[0, 0] = -1e-9
    b, u, dt = draw.normal(n), draw.normal(length, channels), draw.uniform(length, channels, low=0.1, high=1.0)
    start = draw.normal(channels, n)
    log_gate = dt[..., None] * a
    signal = {"k": b.expand(length, n), "v": u, "decay": log_gate, "hold": torch.expm1(log_gate) / a}
    states = reference.run(S6, signal, weights=(start,))[0]

    exact, s = [], start
    for t in range(length):  # exp of [[dt A, dt B u], [0, 0]] carries (s, 1) over one interval
        rows = []
        for c in range(channels):
            block = torch.zeros(n + 1, n + 1, dtype=torch.float64)
            block[:n, :n], block[:n, n] = torch.diag(a[c]), b * u[t, c]
            rows.append(torch.linalg.matrix_exp(dt[t, c] * block)[:n] @ torch.cat((s[c], torch.ones(1, dtype=s.dtype))))
        s = torch.stack(rows)
        exact.append(s)

    def slope(_: float, x: np.ndarray) -> np.ndarray:
        return a[1].numpy() * x + (b * u[0, 1]).numpy()

    solved = integrate.solve_ivp(
        slope, (0.0, float(dt[0, 1])), start[1].numpy(), rtol=1e-12, atol=1e-13, method="DOP853"
    )
    return (
        holds("tuple against the matrix exponential", gap(states, torch.stack(exact)), 1e-11),
        holds("tuple against an integrator", gap(states[0, 1], torch.from_numpy(solved.y[:, -1].copy())), 1e-9),
    )


@claim(
    "A06",
    "The residual stream and linear attention keep everything: their retention is the identity.",
    Verdict.EXACT,
    BLOG(_TABLE + ", residual and linear attention"),
    "axes.depth.Residual, axes.sequence.UnnormalisedLinearAttention",
    derivation="x_L = x_0 + sum f_l and S_N = sum v_i k_i^T: nothing multiplies what was there, so that the "
    "derivative of the new state in the old one, the write held fixed, is the identity.",
)
def A06(draw: Draw) -> tuple[Finding, ...]:
    d, depth = draw.integer(2, 6), draw.integer(2, 8)
    x0 = draw.normal(2, 3, d)
    streams, total = Residual(d).expand(x0), x0
    for layer in range(depth):
        mixer = Residual(d, layer, dtype=torch.float64)
        x, coefficients = mixer.read(streams)
        f = torch.tanh(x @ draw.normal(d, d))
        streams, total = mixer.write(streams, f, coefficients), total + f
    n, d_v = draw.integer(1, 40), draw.integer(1, 5)
    k, v = draw.normal(1, n, d), draw.normal(1, n, d_v)
    update = layer_tuple("linear-attention-unnormalised")
    state = dispatch.run(update, {"k": k, "v": v, "q": k}, time=1)[1].theta[0][0]
    kept = jacobian(lambda s: one_step(update, s, k=k[0, 0], v=v[0, 0]), draw.normal(d_v, d))
    assert isinstance(kept, Tensor)
    eye = torch.eye(d_v * d, dtype=torch.float64)
    return (
        holds("stream against x_0 plus the sum of the sublayers", gap(Residual(d).reduce(streams), total), 1e-11),
        holds("state against the sum of outer products", gap(state, v[0].mT @ k[0]), 1e-11),
        holds("derivative of a step of linear attention", gap(kept.reshape(d_v * d, d_v * d), eye), 0.0),
        holds("the tuples' derived transition is not the identity", float(structure(update) != "identity"), 0.0),
    )


@claim(
    "A07",
    "The momentum buffer is m_n = beta m_{n-1} + (1 - beta) g_n.",
    Verdict.CONDITIONAL,
    BLOG(_TABLE + ", momentum"),
    "axes.Momentum, axes.optim.SGD",
    conditions="m_0 = 0, which torch.optim.SGD with dampening does not do: its buffer begins at the first gradient",
    derivation="From zero, m_n = (1 - beta) sum beta^(n-i) g_i. A buffer that begins at g_1, undamped, differs by "
    "beta g_1 after the first step, and by beta^n g_1 after n. Without dampening the buffer is m_n / (1 - beta).",
)
def A07(draw: Draw) -> tuple[Finding, ...]:
    n, beta, shape = 12, float(draw.uniform(low=0.5, high=0.95)), (3, 4)
    g = draw.normal(n, *shape)
    powers = beta ** (torch.arange(n)[:, None] - torch.arange(n)).double()
    average = (1 - beta) * torch.einsum("ni,iab->nab", torch.tril(powers), g)
    filtered = StateUpdate(Given(), algorithm=Step(1.0, via=(Momentum(beta, "ema"),)))

    def buffers(kind: type, dampening: float) -> Tensor:
        weight = nn.Parameter(torch.zeros(*shape, dtype=torch.float64))
        path = fed(kind([weight], lr=1.0, momentum=beta, dampening=dampening), weight, list(g))
        return -torch.diff(path, dim=0, prepend=torch.zeros(1, *shape, dtype=torch.float64))

    path = reference.run(filtered, {"g": g})[0]
    moves = -torch.diff(path, dim=0, prepend=torch.zeros(1, *shape, dtype=torch.float64))
    first = beta ** torch.arange(1, n + 1).double()[:, None, None] * g[0]
    findings = [holds("filter from zero against the weighted sum", gap(moves, average), 1e-12)]
    for kind, name in ((SGD, "axes"), (torch.optim.SGD, "torch")):
        damped = buffers(kind, beta)
        findings += [
            holds(
                f"{name}: (1 - beta) times the undamped buffer", gap((1 - beta) * buffers(kind, 0.0), average), 1e-12
            ),
            holds(f"{name}: excess of the damped buffer against beta^n g_1", gap(damped - average, first), 1e-12),
            breaks(f"{name}: the damped buffer against the average", gap(damped, average), 0.3),
        ]
    return tuple(findings)


@claim(
    "A08",
    "SGD with weight decay keeps (1 - eta lambda) W and writes + eta g.",
    Verdict.FALSE,
    BLOG(_TABLE + ", SGD with weight decay"),
    "axes.optim.SGD",
    correction="with g the gradient it writes - eta g, which for the squared error is + eta e x^T with e = y - W x",
    kind="NOTN",
    derivation="W - eta (g + lambda W) = (1 - eta lambda) W - eta g. The printed sign climbs the loss.",
)
def A08(draw: Draw) -> tuple[Finding, ...]:
    n, eta, weight_decay = 20, 0.1, float(draw.uniform(low=0.05, high=0.5))
    w0, xs, ys = draw.normal(3, 4), draw.normal(n, 4), draw.normal(n, 3)
    losses = [squared_error(x, y) for x, y in zip(xs, ys, strict=True)]

    def path(kind: type, **options: object) -> Tensor:
        weight = nn.Parameter(w0.clone())
        return trained(kind([weight], lr=eta, momentum=0.0, weight_decay=weight_decay, **options), weight, losses)

    def written(sign: float) -> Tensor:
        steps, w = [], w0
        for loss in losses:
            w = (1 - eta * weight_decay) * w + sign * eta * gradient(loss, w)
            steps.append(w)
        return torch.stack(steps)

    e = ys[0] - w0 @ xs[0]
    corrective = one_step(
        StateUpdate(Alignment(), Euclidean(), Scalar(1 - eta * weight_decay), Step(eta)), w0, k=xs[0], v=e
    )
    return (
        breaks("+ eta g: one step", gap(path(SGD)[0], written(1.0)[0]), 0.005),
        breaks("+ eta g: twenty steps", gap(path(SGD), written(1.0)), 0.5),
        holds("- eta g against SGD, coupled decay", gap(path(SGD), written(-1.0)), 1e-11),
        holds("- eta g against SGD, decoupled decay", gap(path(SGD, decoupled=True), written(-1.0)), 1e-11),
        holds("- eta g against torch's SGD", gap(path(torch.optim.SGD), written(-1.0)), 1e-11),
        holds("+ eta e x^T, one step", gap(corrective, path(SGD)[0]), 1e-12),
    )
