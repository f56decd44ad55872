"""Group A, the common update: gradient steps, retention on either side, and the rows of the table of instances."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from scipy import integrate
from torch import Tensor, nn

from axes.catalogue import get
from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds
from axes.claims.tools.calculus import derivative, gradient
from axes.claims.tools.descent import (
    Family,
    Make,
    moves,
    randomised,
    sgd,
    squared_error,
    squared_errors,
    torch_sgd,
    trained,
)
from axes.claims.tools.float64 import arange, eye, ones, zeros
from axes.claims.tools.matrices import column
from axes.claims.tools.recurrence import recurrence
from axes.claims.tools.tuples import DELTA, GLA, LINEAR, dispatched, layer_tuple, one_step, walked
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Alignment, Given
from axes.core.derived import structure
from axes.core.geometry import Birkhoff, Euclidean
from axes.core.monoids import Diagonal, Hadamard, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import Residual


@check
def A01(draw: Draw) -> Findings:
    for d_v, d_k in ((1, 4), (5, 3), (draw.integer(2, 7), draw.integer(1, 8))):
        w, x, y, eta = draw.normal(d_v, d_k), draw.normal(d_k), draw.normal(d_v), float(draw.uniform(low=0.01, high=2))
        for datum in (x, torch.zeros_like(x)):
            stepped = trained(partial(sgd, lr=eta), w, [squared_error(datum, y)])[0]
            yield agree("SGD against the rule", stepped, w + eta * torch.outer(y - w @ datum, datum), 1e-12)
        mean = gradient(lambda u, x=x, y=y: nn.functional.mse_loss(u @ x, y), w)  # type: ignore[misc]
        scaled = 2 / d_v * gradient(squared_error(x, y), w)
        yield agree("gradient of the mean square against 2/d_v times it", mean, scaled, 1e-12)


@check
def A02(draw: Draw) -> Findings:
    n, d_v, d_k = 50, draw.integer(2, 5), draw.integer(3, 7)
    k, v, start = draw.unit(n, d_k) * draw.uniform(n, 1, low=0.2, high=1.0), draw.normal(n, d_v), draw.normal(d_v, d_k)
    beta = draw.uniform(n, high=2.0)
    beta[n // 2], k[n // 3] = 0.0, 0.0
    update, signal = layer_tuple(DELTA), {"k": k, "v": v, "beta": beta}
    layer, fast = walked(update, start, **signal), dispatched(update, start, **signal)[1]
    even = walked(update, start, **{**signal, "beta": beta[::2].repeat_interleave(2)})

    def path(make: Make, first: Tensor = start) -> Tensor:
        return trained(make, first, squared_errors(k, v), lr=beta.tolist())

    two = trained(
        sgd, start, [squared_error(k[i : i + 2], v[i : i + 2]) for i in range(0, n, 2)], lr=beta[::2].tolist()
    )
    ours = path(sgd)
    yield agree("50 tokens against axes' SGD", layer, ours, 1e-10)
    yield agree("50 tokens against torch's SGD", layer, path(torch_sgd), 1e-10)
    yield agree("the layer's fast route against SGD", fast, ours[-1], 1e-10)
    yield differ("another initial state", layer, path(sgd, start + 1), 0.05)
    yield differ("two examples a step", even[1::2], two, 0.05)
    yield differ("momentum 0.5", layer, path(partial(sgd, momentum=0.5)), 0.2)
    yield differ("weight decay 0.1", layer, path(partial(sgd, weight_decay=0.1)), 0.05)


@check
def A03(draw: Draw) -> Findings:
    d_v, d_k = 3, 4
    k, nothing = draw.unit(d_k), zeros(d_v)
    s, other = draw.uniform(d_v, d_k, low=0.5, high=2.0), draw.uniform(d_v, d_k, low=0.5, high=2.0)
    delta = layer_tuple(DELTA)
    kept, kept_other = (one_step(delta, x, k=k, v=nothing, beta=torch.ones(())) for x in (s, other))
    right = torch.kron((eye(d_k) - torch.outer(k, k)).mT.contiguous(), eye(d_v)) @ column(s)
    log_gate = -draw.uniform(d_k)
    channel = one_step(layer_tuple(GLA), s, k=k, v=nothing, decay=log_gate)
    log_square = -draw.uniform(d_v, d_k)
    entry = one_step(StateUpdate(Alignment(), Euclidean(), Hadamard("decay")), s, k=k, v=nothing, decay=log_square)
    logits = draw.normal(d_k, d_k)
    streams = draw.normal(d_k, d_v)  # X, one stream a row; the tuple stores X^T
    mixed = one_step(get("mhc", "depth").update, streams.mT, k=k, v=nothing, mix=logits).mT
    left = torch.kron(eye(d_v), Birkhoff(20).primal(logits)) @ column(streams)
    yield differ("factors that DeltaNet's retention takes, for two states", kept / s, kept_other / other, 1e-3)
    yield agree("DeltaNet: vec(S A) against (A^T x I) vec S", column(kept), right, 1e-12)
    yield agree("GLA: columns of S times the gate", channel, s @ torch.diag(log_gate.exp()), 1e-12)
    yield agree("Hadamard gate: entries of S times the gate", entry, log_square.exp() * s, 1e-12)
    yield agree("streams: vec(R X) against (I x R) vec X", column(mixed), left, 1e-12)


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


@check
def A04(draw: Draw) -> Findings:
    d, d_x = draw.integer(2, 6), draw.integer(1, 5)
    cell = randomised(nn.GRUCell(d_x, d, dtype=torch.float64), draw, scale=1.0)

    def printed(h: Tensor, z: Tensor, candidate: Tensor) -> Tensor:
        return one_step(GRU, h[:, None], k=ones(1), v=candidate, keep=torch.log1p(-z), write=z)[:, 0]

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
    yield holds("GRUCell with the update gate's weights negated", max(negated), 1e-12)
    yield holds("GRUCell with z and 1 - z exchanged", max(exchanged), 1e-12)
    yield breaks("GRUCell with the printed form", max(literal), 0.01)


S6 = StateUpdate(Alignment(), Euclidean(), Hadamard("decay"), Step(Per("hold", "square")))


@check
def A05(draw: Draw) -> Findings:
    channels, n, length = 2, 3, 4
    a = -draw.uniform(channels, n, low=0.05, high=2.0)
    a[0, 0] = -1e-9
    b, u, dt = draw.normal(n), draw.normal(length, channels), draw.uniform(length, channels, low=0.1, high=1.0)
    start = draw.normal(channels, n)
    log_gate = dt[..., None] * a
    signal = {"k": b.expand(length, n), "v": u, "decay": log_gate, "hold": torch.expm1(log_gate) / a}
    states = walked(S6, start, **signal)

    def held(s: Tensor, row: Tensor, force: Tensor, interval: Tensor) -> Tensor:
        """exp of [[dt A, dt B u], [0, 0]] carries (s, 1) over one interval."""
        block = zeros(n + 1, n + 1)
        block[:n, :n], block[:n, n] = torch.diag(row), b * force
        return torch.linalg.matrix_exp(interval * block)[:n] @ torch.cat((s, ones(1)))

    def exact(s: Tensor, forces: Tensor, intervals: Tensor) -> Tensor:
        return torch.stack([held(*channel) for channel in zip(s, a, forces, intervals, strict=True)])

    def slope(_: float, x: np.ndarray) -> np.ndarray:
        return a[1].numpy() * x + (b * u[0, 1]).numpy()

    solved = integrate.solve_ivp(
        slope, (0.0, float(dt[0, 1])), start[1].numpy(), rtol=1e-12, atol=1e-13, method="DOP853"
    )
    yield agree("tuple against the matrix exponential", states, recurrence(exact, start, u, dt), 1e-11)
    yield agree("tuple against an integrator", states[0, 1], torch.from_numpy(solved.y[:, -1].copy()), 1e-9)


@check
def A06(draw: Draw) -> Findings:
    d, depth = draw.integer(2, 6), draw.integer(2, 8)
    x0 = draw.normal(2, 3, d)
    streams, total = Residual(d).expand(x0), x0
    for layer in range(depth):
        mixer = Residual(d, layer, dtype=torch.float64)
        x, coefficients = mixer.read(streams)
        f = torch.tanh(x @ draw.normal(d, d))
        streams, total = mixer.write(streams, f, coefficients), total + f
    n, d_v = draw.integer(1, 40), draw.integer(1, 5)
    k, v, update = draw.normal(n, d), draw.normal(n, d_v), layer_tuple(LINEAR)
    kept = derivative(lambda s: one_step(update, s, k=k[0], v=v[0]), draw.normal(d_v, d))
    yield agree("stream against x_0 plus the sum of the sublayers", Residual(d).reduce(streams), total, 1e-11)
    yield agree("state against the sum of outer products", dispatched(update, k=k, v=v)[1], v.mT @ k, 1e-11)
    yield agree("derivative of a step of linear attention", kept, eye(d_v * d), 0.0)
    yield holds("the tuples' derived transition is not the identity", float(structure(update) != "identity"), 0.0)


@check
def A07(draw: Draw) -> Findings:
    n, beta, shape = 12, float(draw.uniform(low=0.5, high=0.95)), (3, 4)
    g = draw.normal(n, *shape)
    powers = beta ** (torch.arange(n)[:, None] - torch.arange(n)).double()
    average = (1 - beta) * torch.einsum("ni,iab->nab", torch.tril(powers), g)
    filtered = StateUpdate(Given(), algorithm=Step(1.0, via=(Momentum(beta, "ema"),)))

    def buffers(make: Family, dampening: float) -> Tensor:
        return -moves(partial(make, momentum=beta, dampening=dampening), zeros(*shape), g)

    steps = -torch.diff(walked(filtered, g=g), dim=0, prepend=zeros(1, *shape))
    first = beta ** arange(1, n + 1)[:, None, None] * g[0]
    yield agree("filter from zero against the weighted sum", steps, average, 1e-12)
    for make, name in ((sgd, "axes"), (torch_sgd, "torch")):
        damped = buffers(make, beta)
        yield agree(f"{name}: (1 - beta) times the undamped buffer", (1 - beta) * buffers(make, 0.0), average, 1e-12)
        yield agree(f"{name}: excess of the damped buffer against beta^n g_1", damped - average, first, 1e-12)
        yield differ(f"{name}: the damped buffer against the average", damped, average, 0.3)


@check
def A08(draw: Draw) -> Findings:
    n, eta, weight_decay = 20, 0.1, float(draw.uniform(low=0.05, high=0.5))
    w0, xs, ys = draw.normal(3, 4), draw.normal(n, 4), draw.normal(n, 3)
    losses, kept = squared_errors(xs, ys), 1 - eta * weight_decay

    def path(make: Family, **options: bool) -> Tensor:
        return trained(partial(make, lr=eta, weight_decay=weight_decay, **options), w0, losses)

    def written(sign: float) -> Tensor:
        return recurrence(lambda w, loss: kept * w + sign * eta * gradient(loss, w), w0, losses)

    corrective = StateUpdate(Alignment(), Euclidean(), Scalar(kept), Step(eta))
    ours, printed, descent = path(sgd), written(1.0), written(-1.0)
    yield differ("+ eta g: one step", ours[0], printed[0], 0.005)
    yield differ("+ eta g: twenty steps", ours, printed, 0.5)
    yield agree("- eta g against SGD, coupled decay", ours, descent, 1e-11)
    yield agree("- eta g against SGD, decoupled decay", path(sgd, decoupled=True), descent, 1e-11)
    yield agree("- eta g against torch's SGD", path(torch_sgd), descent, 1e-11)
    yield agree("+ eta e x^T, one step", one_step(corrective, w0, k=xs[0], v=ys[0] - w0 @ xs[0]), ours[0], 1e-12)
