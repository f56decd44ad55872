"""Group H, noise: signal to noise of mini-batches and the critical batch size."""

from __future__ import annotations

from itertools import combinations, product

import torch
from torch import Tensor, nn

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, within
from axes.claims.figures_data import descended, gradients, inputs, snr
from axes.claims.sources import BLOG
from axes.core.costs import CrossEntropy, SquaredError
from axes.optim import SGD, ExactNaturalGradient

_NOISE = "The data axis, signal to noise of gradients"


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
        ((x @ self.weight.T - y).square().sum() / (2 * len(batch))).backward()
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
        return float((self.x @ w.T - self.y).square().sum() / (2 * len(self.x)))


@claim(
    "H12",
    "The signal to noise of a mini-batch gradient is B |G|^2 / tr Sigma.",
    Verdict.EXACT,
    BLOG(_NOISE),
    "axes.optim.SGD",
    derivation="The mean of B independent draws has covariance Sigma / B. Without replacement from n examples a factor "
    "(1 - B/n) comes in, with Sigma normalised by n - 1.",
    figure="critical-batch",
)
def H12(draw: Draw) -> tuple[Finding, ...]:
    problem = _Regression(draw)
    n = len(problem.x)
    mean, sigma = problem.moments()
    signal, noise = mean.square().sum(), sigma.trace()

    def ratio(size: int, replace: bool) -> Tensor:
        return signal / (problem.steps(size, replace) - mean).square().sum(-1).mean()

    findings = [
        holds(
            "all mini-batches of B = 1, 2, with replacement: relative error of B |G|^2 / tr Sigma",
            max(float((ratio(b, True) * noise / (b * signal) - 1).abs()) for b in (1, 2)),
            1e-10,
        ),
        holds(
            "without replacement, B = 3: relative error with the factor 1/(1 - B/n)",
            float((ratio(3, False) * (noise * n / (n - 1)) * (1 - 3 / n) / (3 * signal) - 1).abs()),
            1e-10,
        ),
        breaks(
            "without replacement, B = 3: relative error without the factor",
            float((ratio(3, False) * noise / (3 * signal) - 1).abs()),
            0.2,
        ),
    ]
    x = inputs(draw, 2000, 10)
    g = gradients(x, draw.normal(10), draw.normal(2000))
    for size in (1, 8, 64):
        chosen = torch.randint(2000, (320_000 // size, size), generator=draw.generator)
        estimate = (g[chosen].mean(1) - g.mean(0)).square().sum(-1).mean()
        findings.append(
            within(
                f"drawn mini-batches, B = {size}: noise over tr Sigma / B",
                estimate * size * snr(g) / g.mean(0).square().sum(),
                0.95,
                1.05,
            )
        )
    return tuple(findings)


@claim(
    "H13",
    "The critical batch size, where signal and noise are equal, is tr Sigma / |G|^2.",
    Verdict.EXACT,
    BLOG(_NOISE),
    "axes.optim.SGD",
    derivation="B |G|^2 / tr Sigma = 1. The batch size at which half of the best decrease of the loss is reached is "
    "tr(H "
    "Sigma)/(G^T H G): the same only for curvature H proportional to the identity.",
    figure="critical-batch",
)
def H13(draw: Draw) -> tuple[Finding, ...]:
    problem = _Regression(draw)
    mean, sigma = problem.moments()
    simple = float(sigma.trace() / mean.square().sum())
    one, two = (problem.steps(b).square().sum(-1).mean() for b in (1, 2))  # E|g|^2 at two batch sizes
    squared, trace = 2 * two - one, (one - two) / (1 - 0.5)
    curvature = problem.x.T @ problem.x / len(problem.x)
    noise_scale = float((curvature @ sigma).trace() / (mean @ curvature @ mean))

    def best(size: int) -> float:
        """The largest expected decrease of the full loss over step sizes: expected loss is a parabola in the rate."""
        batches, h = list(product(range(len(problem.x)), repeat=size)), 0.1
        start = problem.loss(problem.w)
        at = [sum(problem.loss(problem.moved(b, x)) for b in batches) / len(batches) - start for x in (h, 2 * h)]
        bend, slope = (at[1] - 2 * at[0]) / (2 * h * h), (4 * at[0] - at[1]) / (2 * h)
        return slope**2 / (4 * bend)

    full = float((mean @ mean) ** 2 / (2 * mean @ curvature @ mean))
    measured = [size * (full / best(size) - 1) for size in (1, 2)]
    white = _Regression(draw)
    white.x = torch.linalg.qr(white.x)[0]
    white_mean, white_sigma = white.moments()
    flat = white.x.T @ white.x
    same = float(
        (flat @ white_sigma).trace()
        / (white_mean @ flat @ white_mean)
        * white_mean.square().sum()
        / white_sigma.trace()
    )
    x = inputs(draw, 4000, 30)
    g = gradients(
        x, descended(x, draw.normal(30), 50), torch.zeros(4000, dtype=torch.float64)
    )  # the error lies in flat directions
    bent = torch.arange(1, 31, dtype=torch.float64) ** -0.5
    return (
        holds(
            "expected squared steps at two batch sizes against tr Sigma / |G|^2, relative",
            abs(float(trace / squared) / simple - 1),
            1e-9,
        ),
        holds(
            "best decreases at B = 1, 2 against tr(H Sigma) / (G^T H G), relative",
            max(abs(b / noise_scale - 1) for b in measured),
            1e-8,
        ),
        holds("H = I/n: the two critical batch sizes, relative", abs(same - 1), 1e-10),
        breaks("curvatures 1/i, d = 30: relative difference of the two", abs(float(snr(g) / snr(g * bent)) - 1), 0.05),
    )


@claim(
    "H14",
    "Natural gradient lowers the critical batch size.",
    Verdict.FALSE,
    BLOG(_NOISE),
    "axes.optim.ExactNaturalGradient",
    correction="it raises it while the error is isotropic, and lowers it late in training, when the error lies in flat "
    "directions",
    kind="OVER",
    derivation="Gaussian regression: Sigma = (error^T H error + noise) H + G G^T, so tr Sigma/|G|^2 is about r tr H/|H "
    "error|^2, and after whitening r tr H^{-1}/|error|^2: the weights of flat directions are inverted.",
    figure="critical-batch",
)
def H14(draw: Draw) -> tuple[Finding, ...]:
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

    return (
        holds("the optimizer's steps against H^{-1} g, relative", gap(whiten, exact) / float(exact.abs().max()), 1e-6),
        breaks("isotropic error: critical batch size over that of the gradient", mean(early), 1.5),
        breaks("isotropic error: tr(H Sigma)/(G^T H G) over that of the gradient", mean(early_norm), 1.2),
        holds("late error: critical batch size over that of the gradient", mean(late), 0.7),
        holds("late error: tr(H Sigma)/(G^T H G) over that of the gradient", mean(late_norm), 0.5),
    )


def _steps(x: Tensor) -> Tensor:
    """The map (d, d) from gradients to steps of natural gradient, whose Fisher matrix is that of inputs x."""
    d = x.shape[1]
    model = nn.Linear(d, 1, bias=False, dtype=torch.float64)
    natural, rows = ExactNaturalGradient(model, lr=1.0, damping=1e-10), []
    for g in torch.eye(d, dtype=torch.float64):
        natural.zero_grad()
        before = model.weight.detach().clone()
        model(x)  # the forward pass is what the Fisher matrix is computed from
        model.weight.grad = g[None].clone()
        natural.step()
        rows.append((before - model.weight.detach())[0])
    return torch.stack(rows)


@claim(
    "H15",
    "Cross-entropy and squared error have exponentially different critical batch sizes.",
    Verdict.STATISTICAL,
    BLOG("Open questions"),
    "axes.costs.CrossEntropy, axes.costs.SquaredError",
    derivation="Not at initialisation: a linear classifier starts with residuals p - y and -y, and the two sizes "
    "differ "
    "by at most a factor of three for 2 to 50 classes. Later ones diverge as G vanishes, for squared error first.",
)
def H15(draw: Draw) -> tuple[Finding, ...]:
    n, d, findings, ratios = 3000, 20, [], []
    x = draw.normal(n, d)
    for classes in (2, 10, 50):
        target = torch.nn.functional.one_hot((x @ draw.normal(d, classes)).argmax(-1), classes).double()
        start = torch.zeros(n, classes, dtype=torch.float64)
        sizes = []
        for cost in (CrossEntropy(), SquaredError()):
            residual = cost.gradient(start, target)
            sizes.append(1 / float(snr((residual[:, :, None] * x[:, None, :]).flatten(1))))
        ratios.append(sizes[0] / sizes[1])
        findings.append(
            within(f"{classes} classes: critical size of cross-entropy over squared error", ratios[-1], 0.3, 3.5)
        )
    w = torch.zeros(20, 50, dtype=torch.float64, requires_grad=True)
    (by_loss,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ w, target), w)
    by_cost = x.T @ CrossEntropy().gradient(start, target) / n
    return (*findings, holds("mean gradient against autograd's", gap(by_loss, by_cost), 1e-12))
