"""Group H, noise: signal to noise of mini-batches and the critical batch size."""

from __future__ import annotations

from itertools import combinations, product

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds, within
from axes.claims.tools.calculus import gradient, half_square
from axes.claims.tools.descent import linear
from axes.claims.tools.float64 import arange, eye, ones, tensor, zeros
from axes.claims.tools.noise import descended, gradients, inputs, snr
from axes.core.costs import CrossEntropy, SquaredError
from axes.optim import SGD, ExactNaturalGradient


class _Regression:
    """A linear regression small enough for every mini-batch of one or two examples to be tried."""

    def __init__(self, draw: Draw, n: int = 8, d: int = 3) -> None:
        self.x, self.y, self.w = draw.normal(n, d), draw.normal(n, 1), draw.normal(1, d)
        self.weight = nn.Parameter(self.w.clone())
        self.sgd = SGD([self.weight], lr=1.0, momentum=0.0)

    def moved(self, batch: tuple[int, ...], lr: float = 1.0) -> Tensor:
        """The weights after one step on the mean loss of a mini-batch."""
        with torch.no_grad():
            self.weight.copy_(self.w)
        self.sgd.param_groups[0]["lr"] = lr
        self.sgd.zero_grad()
        x, y = self.x[list(batch)], self.y[list(batch)]
        (half_square(x @ self.weight.T - y) / len(batch)).backward()
        self.sgd.step()
        return self.weight.detach().clone()

    def steps(self, size: int, replace: bool = True) -> Tensor:
        """Gradients of all mini-batches of a size, as SGD's steps."""
        index = range(len(self.x))
        batches = product(index, repeat=size) if replace else combinations(index, size)
        return torch.stack([(self.w - self.moved(b))[0] for b in batches])

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean gradient G and covariance of one example's gradient, from closed forms."""
        error = self.x @ self.w.T - self.y
        g, mean = error * self.x, (error.T @ self.x / len(self.x))[0]
        return mean, (g - mean).T @ (g - mean) / len(g)

    def loss(self, w: Tensor) -> float:
        return float(half_square(self.x @ w.T - self.y) / len(self.x))


@check
def H12(draw: Draw) -> Findings:
    problem = _Regression(draw)
    n = len(problem.x)
    mean, sigma = problem.moments()
    signal, noise = mean.square().sum(), sigma.trace()

    def ratio(size: int, replace: bool) -> Tensor:
        """Signal to noise over B |G|^2 / tr Sigma."""
        found = signal / (problem.steps(size, replace) - mean).square().sum(-1).mean()
        return found * noise / (size * signal)

    independent, three = torch.stack([ratio(1, True), ratio(2, True)]), ratio(3, False)
    independently = "all mini-batches of B = 1, 2, with replacement: relative error of B |G|^2 / tr Sigma"
    corrected = three * n / (n - 1) * (1 - 3 / n)
    yield agree(independently, independent, ones(2), 1e-10)
    yield agree("without replacement, B = 3: relative error with the factor 1/(1 - B/n)", corrected, 1, 1e-10)
    yield differ("without replacement, B = 3: relative error without the factor", three, 1, 0.2)
    x = inputs(draw, 2000, 10)
    g = gradients(x, draw.normal(10), draw.normal(2000))
    for size in (1, 8, 64):
        chosen = torch.randint(2000, (320_000 // size, size), generator=draw.generator)
        estimate = (g[chosen].mean(1) - g.mean(0)).square().sum(-1).mean()
        relative_noise = estimate * size * snr(g) / g.mean(0).square().sum()
        yield within(f"drawn mini-batches, B = {size}: noise over tr Sigma / B", relative_noise, 0.95, 1.05)


@check
def H13(draw: Draw) -> Findings:
    problem = _Regression(draw)
    mean, sigma = problem.moments()
    simple = sigma.trace() / mean.square().sum()
    one, two = (problem.steps(b).square().sum(-1).mean() for b in (1, 2))  # E|g|^2 at two batch sizes
    squared, trace = 2 * two - one, (one - two) / (1 - 0.5)
    h = problem.x.T @ problem.x / len(problem.x)

    def best(size: int) -> float:
        """The largest expected decrease of the full loss over step sizes: expected loss is a parabola in the rate."""
        batches, rate = list(product(range(len(problem.x)), repeat=size)), 0.1
        start = problem.loss(problem.w)
        at = [sum(problem.loss(problem.moved(b, x)) for b in batches) / len(batches) - start for x in (rate, 2 * rate)]
        bend, slope = (at[1] - 2 * at[0]) / (2 * rate * rate), (4 * at[0] - at[1]) / (2 * rate)
        return slope**2 / (4 * bend)

    full_batch = float((mean @ mean) ** 2 / (2 * mean @ h @ mean))
    measured = tensor([size * (full_batch / best(size) - 1) for size in (1, 2)])
    white = _Regression(draw)
    white.x = torch.linalg.qr(white.x)[0]
    white_mean, white_sigma = white.moments()
    white_simple = white_sigma.trace() / white_mean.square().sum()
    same = _noise_scale(white_sigma, white_mean, white.x.T @ white.x) / white_simple
    x = inputs(draw, 4000, 30)
    g = gradients(x, descended(x, draw.normal(30), 50), zeros(4000))  # the error lies in flat directions
    bent, scale = arange(1, 31) ** -0.5, _noise_scale(sigma, mean, h)
    steps = trace / squared / simple
    yield agree("expected squared steps at two batch sizes against tr Sigma / |G|^2, relative", steps, 1, 1e-9)
    yield holds("best decreases at B = 1, 2 against tr(H Sigma) / (G^T H G), relative", measured / scale - 1, 1e-8)
    yield agree("H = I/n: the two critical batch sizes, relative", same, 1, 1e-10)
    yield differ("curvatures 1/i, d = 30: relative difference of the two", snr(g) / snr(g * bent), 1, 0.05)


def _noise_scale(sigma: Tensor, mean: Tensor, h: Tensor) -> Tensor:
    """tr(H Sigma) / (G^T H G)."""
    return (h @ sigma).trace() / (mean @ h @ mean)


@check
def H14(draw: Draw) -> Findings:
    n, d, directions = 1500, 30, 12
    x, noise = inputs(draw, n, d), draw.normal(n)
    noise = noise - x @ torch.linalg.lstsq(x, noise[:, None]).solution[:, 0]
    whiten = _steps(x)
    exact = torch.linalg.inv(x.T @ x / n)
    norm = torch.linalg.cholesky(x.T @ x / n)  # |L^T g| is the length in the Fisher norm
    ratios: tuple[list[float], ...] = ([], [], [], [])
    early, late, early_norm, late_norm = ratios
    for _ in range(directions):
        start = draw.normal(d)
        for error, plain_ratio, norm_ratio in ((start, early, early_norm), (descended(x, start, 50), late, late_norm)):
            g = gradients(x, error, noise)
            natural = g @ whiten
            plain_ratio.append(float(snr(g) / snr(natural)))
            norm_ratio.append(float(snr(g @ norm) / snr(natural @ norm)))

    def mean(ratios: list[float]) -> float:
        return float(torch.tensor(ratios).log().mean().exp())

    yield holds("the optimizer's steps against H^{-1} g, relative", gap(whiten, exact) / float(exact.abs().max()), 1e-6)
    yield breaks("isotropic error: critical batch size over that of the gradient", mean(early), 1.5)
    yield breaks("isotropic error: tr(H Sigma)/(G^T H G) over that of the gradient", mean(early_norm), 1.2)
    yield holds("late error: critical batch size over that of the gradient", mean(late), 0.7)
    yield holds("late error: tr(H Sigma)/(G^T H G) over that of the gradient", mean(late_norm), 0.5)


def _steps(x: Tensor) -> Tensor:
    """The map (d, d) from gradients to steps of natural gradient, whose Fisher matrix is that of inputs x."""
    d = x.shape[1]
    model = linear(zeros(1, d))
    natural, rows = ExactNaturalGradient(model, lr=1.0, damping=1e-10), []
    for g in eye(d):
        natural.zero_grad()
        before = model.weight.detach().clone()
        model(x)  # the forward pass is what the Fisher matrix is computed from
        model.weight.grad = g[None].clone()
        natural.step()
        rows.append((before - model.weight.detach())[0])
    return torch.stack(rows)


@check
def H15(draw: Draw) -> Findings:
    n, d = 3000, 20
    x = draw.normal(n, d)
    for classes in (2, 10, 50):
        target = one_hot((x @ draw.normal(d, classes)).argmax(-1), classes).double()
        residuals = (cost.gradient(zeros(n, classes), target) for cost in (CrossEntropy(), SquaredError()))
        entropy, square = (snr((r[:, :, None] * x[:, None, :]).flatten(1)) for r in residuals)
        yield within(
            f"{classes} classes: critical size of cross-entropy over squared error", square / entropy, 0.3, 3.5
        )
    by_loss = gradient(lambda w: cross_entropy(x @ w, target), zeros(d, 50))
    by_cost = x.T @ CrossEntropy().gradient(zeros(n, 50), target) / n
    yield agree("mean gradient against autograd's", by_loss, by_cost, 1e-12)
