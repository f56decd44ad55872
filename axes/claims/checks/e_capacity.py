"""Group E: capacity and signal to noise of additive and of softmax memories."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import torch
from scipy import optimize

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds, within
from axes.claims.tools.capacity import (
    attended,
    capacity_at,
    gaussian_capacity,
    linear_snr,
    softmax_capacity_law,
    softmax_snr,
    sphere,
    sphere_capacity,
)
from axes.claims.tools.fits import exponent, slope
from axes.claims.tools.float64 import eye, tensor, zeros
from axes.claims.tools.matrices import beyond
from axes.claims.tools.tuples import DELTA, LINEAR, dispatched, layer_tuple, walked


@check
def E01(draw: Draw) -> Findings:
    n, d, d_v = draw.integer(2, 40), draw.integer(2, 9), draw.integer(1, 5)
    keys, values, j = draw.normal(n, d), draw.normal(n, d_v), draw.integer(0, n - 1)
    others, q, update = torch.arange(n) != j, keys[j], layer_tuple(LINEAR)
    parts = (q @ q) * values[j] + (values[others] * (keys[others] @ q)[:, None]).sum(0)
    written, interpreted = dispatched(update, k=keys, v=values)[1], walked(update, k=keys, v=values)[-1]
    yield agree("read against signal plus interference", written @ q, parts, 1e-11)
    yield agree("the same, written one token after another", interpreted @ q, parts, 1e-11)


@check
def E02(draw: Draw) -> Findings:
    shapes = ((16, 16), (32, 16), (16, 64))
    unit = [(d, n, linear_snr(draw, d, n, 16, 800) * (n - 1) / d) for d, n in shapes]
    gaussian = [(d, n, linear_snr(draw, d, n, 16, 1600, unit=False) * (n - 1) / (d + 2)) for d, n in shapes[:2]]
    by_d = {d: linear_snr(draw, d, 17, 16, 1200) for d in (8, 16, 32, 64)}
    by_n = {n - 1: linear_snr(draw, 16, n, 16, 400 + 8000 // n) for n in (5, 9, 17, 33, 65)}
    by_width = {d_v: linear_snr(draw, 16, 17, d_v, 3000 // d_v + 300) for d_v in (1, 4, 16, 64)}
    for d, n, x in unit:
        yield within(f"unit keys, d = {d}, N = {n}: SNR (N-1)/d", x, 0.9, 1.1)
    for d, n, x in gaussian:
        yield within(f"Gaussian keys, d = {d}, N = {n}: SNR (N-1)/(d+2)", x, 0.9, 1.1)
    yield within("exponent in d", exponent([*by_d], [*by_d.values()]), 0.95, 1.05)
    yield within("exponent in N - 1", exponent([*by_n], [*by_n.values()]), -1.05, -0.95)
    for w, x in by_width.items():
        yield within(f"d = 16, N = 17, values of width {w}: SNR", x, 0.85, 1.15)


@check
def E03(draw: Draw) -> Findings:
    sizes, counts = (8, 16, 32, 64), []
    for d in sizes:
        points = (d // 2 + 1, 2 * d + 1)
        noise = [1 / linear_snr(draw, d, n, 16, 100 + 4000 // d) for n in points]
        counts.append(float(np.interp(1.0, noise, points)))
    linear, delta = ([capacity_at(name, draw, d, 4096 // d) for d in sizes[1:]] for name in (LINEAR, DELTA))
    for d, n in zip(sizes, counts, strict=True):
        yield within(f"N at SNR 1 over d + 1, d = {d}", n / (d + 1), 0.9, 1.1)
    yield within("exponent of N - 1 at SNR 1 in d", exponent(sizes, np.array(counts) - 1), 0.93, 1.07)
    yield within("additive: exponent of N - 1 at error 1/2", exponent(sizes[1:], np.array(linear) - 1), 0.85, 1.15)
    yield within("delta rule: exponent of N at error 1/2", exponent(sizes[1:], delta), 0.88, 1.12)


@check
def E04(draw: Draw) -> Findings:
    n, d, temperature = draw.integer(2, 12), draw.integer(1, 8), float(draw.uniform(low=0.5, high=5.0))
    keys, j = draw.normal(n, d), draw.integer(0, n - 1)
    weights = attended(keys, eye(n), keys[j], temperature)
    gaps = keys[j].square().sum() - keys @ keys[j]
    yield agree("log weight ratio against -gap/T", torch.log(weights / weights[j]), -gaps / temperature, 1e-11)


@check
def E05(draw: Draw) -> Findings:
    trials, d, n, temperature, wide = 1200, 16, 200, 4.0, 32
    keys = draw.normal(trials, n, d)
    values = draw.unit(trials, n, wide)
    one_hot = zeros(trials, n, 1)
    one_hot[:, 0] = 1.0
    ratios, weight = {}, attended(keys, one_hot, keys[:, 0], temperature)
    for d_v in (1, 2, 8, wide):
        v = values if d_v == wide else draw.unit(trials, n, d_v)
        signal = weight * v[:, 0]
        noise = attended(keys, v, keys[:, 0], temperature) - signal
        ratios[d_v] = float(signal.square().sum() / noise.square().sum())
    violated = []
    for width in (16, 32, 64):
        samples = torch.stack([softmax_snr(draw.normal(2000, width), math.sqrt(width)) for _ in range(60)])
        bound = math.exp(2 * (width - math.sqrt(2 * width * math.log(2000))) / math.sqrt(width)) / 2000
        violated.append(float((samples < bound).double().mean()))
    off = {d_v: math.log(x / ratios[wide]) for d_v, x in ratios.items()}
    yield differ("ln of the ratio at d_v = 32 over d_v = 1, against ln 32", -off[1], math.log(32), 3.0)
    yield holds("largest ln of a ratio at d_v = 1, 2, 8 over d_v = 32", max(map(abs, off.values())), 0.2)
    yield holds("share of draws below the corrected bound, d = 16, 32, 64", max(violated), 0.05)


@check
def E06(draw: Draw) -> Findings:
    n = 2000
    for d in (32, 64):
        ratios = torch.stack([softmax_snr(sphere(draw, n, d), math.sqrt(d)) for _ in range(21)])
        typical = math.log(float(ratios.median()) * n)
        printed = 2 * (d - math.sqrt(2 * d * math.log(n))) / math.sqrt(d)
        yield within(f"median of ln(SNR N) - (2 sqrt(d) - 2), d = {d}", typical - 2 * math.sqrt(d) + 2, -0.3, 0.3)
        yield within(f"the same less the exponent of the printed bound, d = {d}", typical - printed, 4.5, 7.0)


@check
def E07(draw: Draw) -> Findings:
    for d, n, repeats, high in ((16, 20000, 4, 1.4), (32, 40000, 4, 1.4), (64, 40000, 10, 1.15)):
        noise = [1 / float(softmax_snr(sphere(draw, n, d), math.sqrt(d))) for _ in range(repeats)]
        factor = (n - 1) / (sum(noise) / repeats) / math.exp(2 * math.sqrt(d))
        yield within(f"SNR N / exp(2 sqrt(d)) times e^2, d = {d}", factor * math.exp(2), 0.95, high)
    law = softmax_capacity_law(256, math.sqrt(256))
    rare = math.log(gaussian_capacity(draw, 12, 1.0, 61, 20000)) / 24
    yield within("mean-field law at d = 256: exponent less 2 sqrt(d)", law - 2 * math.sqrt(256), -2.05, -1.95)
    yield within("Gaussian keys, T = 1, d = 12: ln N over 2 d", rare, 0.2, 0.4)


@check
def E08(draw: Draw) -> Findings:
    with localcontext() as context:
        context.prec = 30
        exact = float((2 * Decimal(128).sqrt()).exp())
    yield breaks("exp(2 sqrt(128)) over 4e9, less 1", exact / 4e9 - 1, 0.6)
    yield agree("exp(2 sqrt(128)) over 6.71e9, less 1", math.exp(2 * math.sqrt(128)) / 6.71e9, 1, 1e-3)
    yield agree("decimal against binary arithmetic", exact / math.exp(2 * math.sqrt(128)), 1, 1e-13)
    yield agree("with exp(-2), over 9.1e8, less 1", exact * math.exp(-2) / 9.1e8, 1, 0.01)


@check
def E09(draw: Draw) -> Findings:
    size, quoted = math.exp(math.sqrt(128)), math.exp(2 * math.sqrt(128) - 2)
    yield breaks("a context of 10^6 tokens over exp(sqrt(128))", 1e6 / size, 10.0)
    yield breaks("a context of 10^5 tokens over exp(sqrt(128))", 1e5 / size, 1.2)
    yield agree("exp(sqrt(128)) over 8.2e4, less 1", size / 8.2e4, 1, 0.005)
    yield holds("a context of 10^6 tokens over exp(2 sqrt(128) - 2)", 1e6 / quoted, 0.01)
    law = softmax_capacity_law(128, math.sqrt(128))
    yield agree("ln of the mean-field capacity less 2 sqrt(128) - 2", law, math.log(quoted), 0.1)


@check
def E10(draw: Draw) -> Findings:
    trials = {8: 101, 12: 61, 16: 41, 24: 21, 32: 11}
    logs = {d: math.log(sphere_capacity(draw, d, math.sqrt(d), n)) for d, n in trials.items()}
    yield within("slope of ln N in sqrt(d), d = 8 to 32", slope(np.sqrt([*logs]), [*logs.values()]), 1.8, 2.1)
    yield within("ln N - (2 sqrt(d) - 2) at d = 32", logs[32] - 2 * math.sqrt(32) + 2, -0.15, 0.35)
    yield within("exponent of ln N in d", exponent([*logs], [*logs.values()]), 0.5, 0.7)


@check
def E11(draw: Draw) -> Findings:
    def lead(x: float, p: int) -> float:  # x = ln d
        return math.exp(x / 2) - p * x

    leads = []
    for p in range(1, 21):
        turn = 2 * math.log(2 * p)
        last = optimize.brentq(lead, turn, turn + 12, args=(p,)) if lead(turn, p) < 0 else turn
        leads.append([lead(x, p) for x in np.linspace(last, 60, 400)])
    shortfall = beyond(-tensor(leads))
    yield holds("largest ln of d^p over exp(sqrt(d)) beyond their last crossing, p to 20", shortfall, 1e-9)
    yield holds("the lead never shrinks there", beyond(-tensor(leads).diff()), 0.0)


@check
def E12(draw: Draw) -> Findings:
    sizes = {6: (301, 1000), 10: (201, 8000), 14: (121, 40000)}
    for temperature in (1.0, 0.5):
        logs = [math.log(gaussian_capacity(draw, d, temperature, *size)) for d, size in sizes.items()]
        yield within(f"Gaussian keys, T = {temperature:g}: slope of ln N in d", slope([*sizes], logs), 0.45, 0.65)
    for d, n in ((8, 101), (12, 31), (16, 7)):
        share = math.log(sphere_capacity(draw, d, 2.0, n)) / d
        yield within(f"keys on the sphere, T = 2: ln N / d at d = {d}", share, 0.58, 0.66)


@check
def E13(draw: Draw) -> Findings:
    d, n = 64, 65
    keys = sphere(draw, n, d)
    q = keys[0]
    logits = keys @ q
    error = {}
    for temperature in (1e4, 1e5, 1e6):
        first = n * temperature * (attended(keys, eye(n), q, temperature) - 1 / n)
        error[temperature] = gap(first, logits - logits.mean()) / float(logits.abs().max())
    flat = float(softmax_snr(keys, 8e6))
    lost = linear_snr(draw, d, n, 16, 100) - flat
    yield breaks("ratio of linear attention less that at T = 8e6, d = 64, N = 65", lost, 0.7)
    yield agree("ratio at T = 8e6 times N - 1, less 1", flat * (n - 1), 1, 1e-4)
    yield holds("N T (w - 1/N) against centred logits, relative, T = 1e6", error[1e6], 1e-3)
    yield agree("error at T = 1e4 over that at 1e5, over 10, less 1", error[1e4] / error[1e5] / 10, 1, 0.05)
