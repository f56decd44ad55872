"""Group E: capacity and signal to noise of additive and of softmax memories."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import torch
from scipy import optimize

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, untestable, within
from axes.claims.capacity_measures import (
    DELTA,
    LINEAR,
    attention_tuple,
    capacity_at,
    gaussian_capacity,
    linear_snr,
    read_list,
    sequence_tuple,
    softmax_capacity_law,
    softmax_snr,
    sphere,
    sphere_capacity,
    written,
)
from axes.claims.sources import BLOG
from axes.core import reference

_SECTION = "Capacity and the SNR"
_LINEAR, _SOFTMAX = "axes.sequence.UnnormalisedLinearAttention", "axes.sequence.SoftmaxAttention"


def _slope(x: list[float], y: list[float]) -> float:
    return float(np.polyfit(x, y, 1)[0])


@claim(
    "E01",
    "Reading an additive memory at a stored key gives (k . q) v of that pair plus the interference of all others.",
    Verdict.EXACT,
    BLOG(_SECTION),
    _LINEAR,
    derivation="S q = sum_i v_i (k_i . q) is linear in the stored pairs: the state without the pair reads the "
    "interference.",
)
def E01(draw: Draw) -> tuple[Finding, ...]:
    n, d, d_v = draw.integer(2, 40), draw.integer(2, 9), draw.integer(1, 5)
    keys, values, j = draw.normal(1, n, d), draw.normal(1, n, d_v), draw.integer(0, n - 1)
    others, q = torch.arange(n) != j, keys[0, j]
    read = written(sequence_tuple(LINEAR), keys, values)[0] @ q
    parts = (q @ q) * values[0, j] + (values[0, others] * (keys[0, others] @ q)[:, None]).sum(0)
    interpreted = reference.run(sequence_tuple(LINEAR), {"k": keys[0], "v": values[0]})[1].theta[0] @ q
    return (
        holds("read against signal plus interference", gap(read, parts), 1e-11),
        holds("the same, written one token after another", gap(interpreted, parts), 1e-11),
    )


@claim(
    "E02",
    "The signal to noise ratio of the additive memory is d / N.",
    Verdict.STATISTICAL,
    BLOG(_SECTION),
    _LINEAR,
    derivation="In power: d/(N-1) for keys of unit length, since E(k . k')^2 = 1/d, and (d+2)/(N-1) for Gaussian "
    "keys, since E|k|^4 = d^2 + 2d while E(k . k')^2 = d. The width of the values divides out.",
    figure="snr",
)
def E02(draw: Draw) -> tuple[Finding, ...]:
    shapes = ((16, 16), (32, 16), (16, 64))
    unit = [(d, n, linear_snr(draw, d, n, 16, 800) * (n - 1) / d) for d, n in shapes]
    gaussian = [(d, n, linear_snr(draw, d, n, 16, 1600, unit=False) * (n - 1) / (d + 2)) for d, n in shapes[:2]]
    by_d = [linear_snr(draw, d, 17, 16, 1200) for d in (8, 16, 32, 64)]
    by_n = [linear_snr(draw, 16, n, 16, 400 + 8000 // n) for n in (5, 9, 17, 33, 65)]
    widths = [linear_snr(draw, 16, 17, d_v, 3000 // d_v + 300) for d_v in (1, 4, 16, 64)]
    return (
        *(within(f"unit keys, d = {d}, N = {n}: SNR (N-1)/d", x, 0.9, 1.1) for d, n, x in unit),
        *(within(f"Gaussian keys, d = {d}, N = {n}: SNR (N-1)/(d+2)", x, 0.9, 1.1) for d, n, x in gaussian),
        within(
            "exponent in d", _slope([math.log(d) for d in (8, 16, 32, 64)], [math.log(x) for x in by_d]), 0.95, 1.05
        ),
        within(
            "exponent in N - 1",
            _slope([math.log(n) for n in (4, 8, 16, 32, 64)], [math.log(x) for x in by_n]),
            -1.05,
            -0.95,
        ),
        *(
            within(f"d = 16, N = 17, values of width {w}: SNR", x, 0.85, 1.15)
            for w, x in zip((1, 4, 16, 64), widths, strict=True)
        ),
    )


@claim(
    "E03",
    "An additive memory saturates at a number of pairs proportional to d.",
    Verdict.STATISTICAL,
    BLOG(_SECTION),
    _LINEAR,
    derivation="The ratio d/(N-1) is one at N = d + 1. The count at a fixed recall error is proportional to d as "
    "well, for the delta rule too (B10).",
    figure="capacity",
)
def E03(draw: Draw) -> tuple[Finding, ...]:
    sizes, counts = (8, 16, 32, 64), []
    for d in sizes:
        points = (d // 2 + 1, 2 * d + 1)
        noise = [1 / linear_snr(draw, d, n, 16, 100 + 4000 // d) for n in points]
        counts.append(float(np.interp(1.0, noise, points)))
    logs = [math.log(d) for d in sizes]
    half = {name: [capacity_at(name, draw, d, 4096 // d) for d in sizes[1:]] for name in (LINEAR, DELTA)}
    return (
        *(within(f"N at SNR 1 over d + 1, d = {d}", n / (d + 1), 0.9, 1.1) for d, n in zip(sizes, counts, strict=True)),
        within("exponent of N - 1 at SNR 1 in d", _slope(logs, [math.log(n - 1) for n in counts]), 0.93, 1.07),
        within(
            "additive: exponent of N - 1 at error 1/2",
            _slope(logs[1:], [math.log(n - 1) for n in half[LINEAR]]),
            0.85,
            1.15,
        ),
        within(
            "delta rule: exponent of N at error 1/2", _slope(logs[1:], [math.log(n) for n in half[DELTA]]), 0.88, 1.12
        ),
    )


@claim(
    "E04",
    "Queried with a stored key, softmax attention weighs another pair by exp(-gap/T) relative to it, gap = |k_*|^2 - "
    "k_* . k_j.",
    Verdict.EXACT,
    BLOG(_SECTION + ", softmax attention"),
    _SOFTMAX,
    derivation="Weights are exp(k_j . q / T) over a common normaliser; with q = k_* the quotient of two of them is "
    "exp(-gap/T).",
)
def E04(draw: Draw) -> tuple[Finding, ...]:
    n, d, temperature = draw.integer(2, 12), draw.integer(1, 8), float(draw.uniform(low=0.5, high=5.0))
    keys, j = draw.normal(n, d), draw.integer(0, n - 1)
    weights = read_list(attention_tuple(temperature), keys, torch.eye(n, dtype=torch.float64), keys[j])
    gaps = keys[j].square().sum() - keys @ keys[j]
    return (holds("log weight ratio against -gap/T", gap(torch.log(weights / weights[j]), -gaps / temperature), 1e-11),)


@claim(
    "E05",
    "The signal to noise ratio of softmax attention is at least d_v exp(2 (d - c sqrt(d ln N)) / T) / N.",
    Verdict.FALSE,
    BLOG(_SECTION + ", softmax attention"),
    _SOFTMAX,
    correction="without the factor d_v, and with c = sqrt(2): exp(2 (d - sqrt(2 d ln N)) / T) / N bounds Gaussian keys",
    kind="MATH",
    derivation="Signal w_*^2 |v|^2 and noise sum w_j^2 |v_j|^2 both carry d_v, as they do in the linear ratio d/N. "
    "The largest of N logits k_* . k_j is about |k_*| sqrt(2 ln N), which makes every gap at least d - sqrt(2 d ln "
    "N).",
)
def E05(draw: Draw) -> tuple[Finding, ...]:
    trials, d, n, temperature, wide = 1200, 16, 200, 4.0, 32
    keys = draw.normal(trials, n, d)
    values = draw.unit(trials, n, wide)
    one_hot = torch.zeros(trials, n, 1, dtype=torch.float64)
    one_hot[:, 0] = 1.0
    update, ratios = attention_tuple(temperature), {}
    weight = read_list(update, keys, one_hot, keys[:, 0])
    for d_v in (1, 2, 8, wide):
        v = values[..., :d_v] if d_v == wide else draw.unit(trials, n, d_v)
        signal = weight * v[:, 0]
        noise = read_list(update, keys, v, keys[:, 0]) - signal
        ratios[d_v] = float(signal.square().sum() / noise.square().sum())
    violated = []
    for width in (16, 32, 64):
        samples = torch.stack([softmax_snr(draw.normal(2000, width), math.sqrt(width)) for _ in range(60)])
        bound = math.exp(2 * (width - math.sqrt(2 * width * math.log(2000))) / math.sqrt(width)) / 2000
        violated.append(float((samples < bound).double().mean()))
    spread = max(abs(math.log(x / ratios[wide])) for x in ratios.values())
    return (
        breaks(
            "ln of the ratio at d_v = 32 over d_v = 1, against ln 32",
            abs(math.log(ratios[32] / ratios[1]) - math.log(32)),
            3.0,
        ),
        holds("largest ln of a ratio at d_v = 1, 2, 8 over d_v = 32", spread, 0.2),
        holds("share of draws below the corrected bound, d = 16, 32, 64", max(violated), 0.05),
    )


@claim(
    "E06",
    "At T = sqrt(d) the ratio is typically exp(2 sqrt(d) - 2) / N.",
    Verdict.STATISTICAL,
    BLOG(_SECTION + ", softmax attention"),
    _SOFTMAX,
    derivation="E exp(2 (k_* . k - d)/T) = exp(-2d/T + 2d/T^2) for logits of variance d. The printed lower bound, "
    "with its sqrt(d ln N), is smaller by five to six in the exponent.",
    figure="snr",
)
def E06(draw: Draw) -> tuple[Finding, ...]:
    n, findings = 2000, []
    for d in (32, 64):
        ratios = torch.stack([softmax_snr(sphere(draw, n, d), math.sqrt(d)) for _ in range(21)])
        typical = math.log(float(ratios.median()) * n)
        printed = 2 * (d - math.sqrt(2 * d * math.log(n))) / math.sqrt(d)
        findings += [
            within(f"median of ln(SNR N) - (2 sqrt(d) - 2), d = {d}", typical - 2 * math.sqrt(d) + 2, -0.3, 0.3),
            within(f"the same less the exponent of the printed bound, d = {d}", typical - printed, 4.5, 7.0),
        ]
    return tuple(findings)


@claim(
    "E07",
    "Softmax attention amplifies the ratio by exp(2 sqrt(d)) at T = sqrt(d) and by exp(2 d) at T = 1.",
    Verdict.APPROXIMATE,
    BLOG(_SECTION + ", table of temperatures"),
    _SOFTMAX,
    derivation="Relative to 1/N (not to d/N) and up to exp(-2d/T^2): a factor exp(-2) at T = sqrt(d), which measured "
    "capacities approach from above, and at T = 1 one that cancels exp(2 d) altogether for Gaussian keys, where rare "
    "large logits rule (E12).",
    figure="snr-temperature",
)
def E07(draw: Draw) -> tuple[Finding, ...]:
    findings, factors = [], []
    for d, n, repeats in ((16, 20000, 4), (32, 40000, 4), (64, 40000, 10)):
        noise = [1 / float(softmax_snr(sphere(draw, n, d), math.sqrt(d))) for _ in range(repeats)]
        factors.append((n - 1) / (sum(noise) / repeats) / math.exp(2 * math.sqrt(d)))
        findings.append(within(f"SNR N / exp(2 sqrt(d)) times e^2, d = {d}", factors[-1] * math.exp(2), 0.95, 1.4))
    findings[-1] = within("SNR N / exp(2 sqrt(d)) times e^2, d = 64", factors[-1] * math.exp(2), 0.95, 1.15)
    law = [softmax_capacity_law(d, math.sqrt(d)) - 2 * math.sqrt(d) for d in (64, 256)]
    rare = math.log(gaussian_capacity(draw, 12, 1.0, 61, 20000)) / 24
    return (
        *findings,
        within("mean-field law at d = 256: exponent less 2 sqrt(d)", law[-1], -2.05, -1.95),
        within("Gaussian keys, T = 1, d = 12: ln N over 2 d", rare, 0.2, 0.4),
    )


@claim(
    "E08",
    "exp(2 sqrt(128)) is about 4e9.",
    Verdict.FALSE,
    BLOG(_SECTION + ", example d_k = 128"),
    "none: arithmetic",
    correction="it is 6.7e9, and 9.1e8 with the factor exp(-2) that belongs to it (E07)",
    kind="NOTN",
    derivation="2 sqrt(128) = 22.627 and exp(22.627) = 6.71e9; ln(4e9) = 22.11.",
)
def E08(draw: Draw) -> tuple[Finding, ...]:
    with localcontext() as context:
        context.prec = 30
        exact = float((2 * Decimal(128).sqrt()).exp())
    return (
        breaks("exp(2 sqrt(128)) over 4e9, less 1", exact / 4e9 - 1, 0.6),
        holds("exp(2 sqrt(128)) over 6.71e9, less 1", abs(math.exp(2 * math.sqrt(128)) / 6.71e9 - 1), 1e-3),
        holds("decimal against binary arithmetic", abs(exact / math.exp(2 * math.sqrt(128)) - 1), 1e-13),
        holds("with exp(-2), over 9.1e8, less 1", abs(exact * math.exp(-2) / 9.1e8 - 1), 0.01),
    )


@claim(
    "E09",
    "At d_k = 128 even exp(sqrt(d_k)) exceeds any sequence length in practice.",
    Verdict.FALSE,
    BLOG(_SECTION + ", example d_k = 128"),
    "none: arithmetic",
    correction="exp(sqrt(128)) = 8.2e4, less than contexts of 1e5 to 1e6; the capacity to quote is exp(2 sqrt(d_k) - "
    "2) = 9.1e8",
    kind="NOTN",
    derivation="The sentence compares exp(sqrt(d)) and then evaluates exp(2 sqrt(d)), its square.",
)
def E09(draw: Draw) -> tuple[Finding, ...]:
    size, quoted = math.exp(math.sqrt(128)), math.exp(2 * math.sqrt(128) - 2)
    return (
        breaks("a context of 10^6 tokens over exp(sqrt(128))", 1e6 / size, 10.0),
        breaks("a context of 10^5 tokens over exp(sqrt(128))", 1e5 / size, 1.2),
        holds("exp(sqrt(128)) over 8.2e4, less 1", abs(size / 8.2e4 - 1), 0.005),
        holds("a context of 10^6 tokens over exp(2 sqrt(128) - 2)", 1e6 / quoted, 0.01),
        holds(
            "ln of the mean-field capacity less 2 sqrt(128) - 2",
            abs(softmax_capacity_law(128, math.sqrt(128)) - math.log(quoted)),
            0.1,
        ),
    )


@claim(
    "E10",
    "A standard transformer (T = sqrt(d)) holds exp(O(sqrt(d))) pairs.",
    Verdict.STATISTICAL,
    BLOG(_SECTION + ", table of temperatures"),
    _SOFTMAX,
    derivation="N at ratio one, over keys on the sphere of radius sqrt(d): ln N = 2 sqrt(d) - 2 + o(1), since logits "
    "at the tilt 2/T are still common among N keys and the mean describes a typical draw.",
    figure="snr",
)
def E10(draw: Draw) -> tuple[Finding, ...]:
    trials = {8: 101, 12: 61, 16: 41, 24: 21, 32: 11}
    logs = {d: math.log(sphere_capacity(draw, d, math.sqrt(d), n)) for d, n in trials.items()}
    power = _slope([math.log(d) for d in logs], [math.log(x) for x in logs.values()])
    return (
        within(
            "slope of ln N in sqrt(d), d = 8 to 32", _slope([math.sqrt(d) for d in logs], list(logs.values())), 1.8, 2.1
        ),
        within("ln N - (2 sqrt(d) - 2) at d = 32", logs[32] - 2 * math.sqrt(32) + 2, -0.15, 0.35),
        within("exponent of ln N in d", power, 0.5, 0.7),
    )


@claim(
    "E11",
    "exp(sqrt(d)) grows faster than any polynomial.",
    Verdict.EXACT,
    BLOG(_SECTION),
    "none: calculus",
    derivation="sqrt(d) - p ln d has derivative (sqrt(d)/2 - p)/d: it increases for d > 4 p^2 without bound, so that "
    "it stays positive beyond its last zero.",
)
def E11(draw: Draw) -> tuple[Finding, ...]:
    shortfall, slopes = 0.0, 0.0
    for p in range(1, 21):

        def lead(x: float, p: int = p) -> float:  # x = ln d
            return math.exp(x / 2) - p * x

        turn = 2 * math.log(2 * p)
        last = optimize.brentq(lead, turn, turn + 12) if lead(turn) < 0 else turn
        beyond = np.linspace(last, 60, 400)
        values = np.array([lead(x) for x in beyond])
        shortfall = max(shortfall, float(-values.min()))
        slopes = max(slopes, float(-np.diff(values).min()))
    return (
        holds("largest ln of d^p over exp(sqrt(d)) beyond their last crossing, p to 20", max(shortfall, 0.0), 1e-9),
        holds("the lead never shrinks there", max(slopes, 0.0), 0.0),
    )


@claim(
    "E12",
    "At temperatures O(1) the capacity is exp(O(d)).",
    Verdict.STATISTICAL,
    BLOG(_SECTION + ", table of temperatures"),
    _SOFTMAX,
    derivation="Gaussian keys fail when some k_* . k_j exceeds |k_*|^2: N = exp(d/2) whatever the temperature. On "
    "the sphere that cannot happen and N depends on it: ln N = 0.62 d at T = 2.",
)
def E12(draw: Draw) -> tuple[Finding, ...]:
    sizes = {6: (301, 1000), 10: (201, 8000), 14: (121, 40000)}
    findings = []
    for temperature in (1.0, 0.5):
        logs = [math.log(gaussian_capacity(draw, d, temperature, *size)) for d, size in sizes.items()]
        findings.append(
            within(f"Gaussian keys, T = {temperature:g}: slope of ln N in d", _slope([6, 10, 14], logs), 0.45, 0.65)
        )
    ball = {d: math.log(sphere_capacity(draw, d, 2.0, n)) / d for d, n in ((8, 101), (12, 31), (16, 7))}
    return (
        *findings,
        *(within(f"keys on the sphere, T = 2: ln N / d at d = {d}", x, 0.58, 0.66) for d, x in ball.items()),
    )


@claim(
    "E13",
    "Softmax attention at T -> infinity is linear attention, with capacity O(d).",
    Verdict.FALSE,
    BLOG(_SECTION + ", table of temperatures, first row"),
    _SOFTMAX + ", " + _LINEAR,
    correction="it is the uniform average, with ratio 1/(N - 1); linear attention, with centred logits, is the "
    "first-order term: N T (w_j - 1/N) -> q . k_j - mean",
    kind="MATH",
    derivation="exp(x/T) = 1 + x/T + O(1/T^2): the constant 1 dominates the weights and carries no information about "
    "the key. The next term, divided by the normaliser, is the centred logit over N T.",
    figure="snr-temperature",
)
def E13(draw: Draw) -> tuple[Finding, ...]:
    d, n = 64, 65
    keys = sphere(draw, n, d)
    q, identity = keys[0], torch.eye(n, dtype=torch.float64)
    logits = keys @ q
    error = {}
    for temperature in (1e4, 1e5, 1e6):
        weights = read_list(attention_tuple(temperature), keys, identity, q)
        first = n * temperature * (weights - 1 / n)
        error[temperature] = gap(first, logits - logits.mean()) / float(logits.abs().max())
    flat = float(softmax_snr(keys, 8e6))
    return (
        breaks(
            "ratio of linear attention less that at T = 8e6, d = 64, N = 65",
            linear_snr(draw, d, n, 16, 100) - flat,
            0.7,
        ),
        holds("ratio at T = 8e6 times N - 1, less 1", abs(flat * (n - 1) - 1), 1e-4),
        holds("N T (w - 1/N) against centred logits, relative, T = 1e6", error[1e6], 1e-3),
        holds("error at T = 1e4 over that at 1e5, over 10, less 1", abs(error[1e4] / error[1e5] / 10 - 1), 0.05),
    )


E14 = untestable(
    "E14",
    "The trade between a state of fixed size (capacity O(d)) and a growing cache (exp(O(d/T))) is universal, and "
    "softmax attention's capacity never binds.",
    BLOG(_SECTION + ", closing remarks"),
    "a statement about all architectures and about practice; the parts that can be measured are E03, E10 and E12",
)

CLAIMS = (E01, E02, E03, E04, E05, E06, E07, E08, E09, E10, E11, E12, E13, E14)
