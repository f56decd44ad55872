"""Group F, the delta rule: its parallel form, WY and UT representations, chunk forms, and products of reflections."""

from __future__ import annotations

import torch
from torch import Tensor

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds
from axes.claims.group_a_tools import gradient, layer_tuple, one_step, squared_error
from axes.claims.group_f_tools import (
    DELTA,
    GATED,
    LINEAR,
    PREV,
    REFLECTIVE,
    by_chunks,
    causal,
    decay_mask,
    eye,
    householder_product,
    passed_on,
    recurrent,
    states,
    ut,
)
from axes.claims.sources import BLOG, SLIDES

_TRAINING = "DeltaNet: Chunkwise Parallel Training"
Tokens = tuple[Tensor, Tensor, Tensor, Tensor]


def _tokens(draw: Draw, n: int, d_k: int = 6, d_v: int = 4, high: float = 1.0) -> Tokens:
    """Queries, keys of length one, values, and rates in (0, high)."""
    return draw.normal(n, d_k), draw.unit(n, d_k), draw.normal(n, d_v), draw.uniform(n, high=high)


def _printed(q: Tensor, k: Tensor) -> Tensor:
    """A = (Q K^T * L)(I + K K^T * (L - I))^-1 * M, as printed."""
    low = causal(len(k))
    return ((q @ k.mT) * low) @ torch.linalg.inv(eye(len(k)) + (k @ k.mT) * (low - eye(len(k)))) * low


def _parallel(q: Tensor, k: Tensor, beta: Tensor) -> Tensor:
    """The same for any rates: (Q K^T * L)(I + diag(beta)(K K^T * (L - I)))^-1 diag(beta)."""
    low = causal(len(k))
    strict = beta[:, None] * (k @ k.mT) * (low - eye(len(k)))
    return ((q @ k.mT) * low) @ torch.linalg.solve(eye(len(k)) + strict, torch.diag(beta))


@claim(
    "F07",
    "The delta rule has the parallel form O = A V, A = (Q K^T * L)(I + K K^T * (L - I))^-1 * M.",
    Verdict.CONDITIONAL,
    BLOG("Duality: recurrent and attention views"),
    "axes.sequence.DeltaNet, axes.routes.scan.chunked",
    conditions="beta = 1 and S_0 = 0 (keys of any length); L has its diagonal in the first factor and not in the "
    "inverse; the last mask is redundant but cannot replace the first",
    derivation="The written errors solve u_t + sum_{i<t} (k_i . k_t) u_i = v_t, a unit triangular system, and O = (Q "
    "K^T * L) U. Rates enter the system as diag(beta) on both places, a start as (Q - A K) S_0^T. Products of lower "
    "triangular matrices are lower triangular.",
)
def F07(draw: Draw) -> tuple[Finding, ...]:
    n = 24
    q, k, v, beta = _tokens(draw, n)
    long, start, one = k * draw.uniform(n, 1, low=0.5, high=1.2), draw.normal(4, 6), torch.ones(n, dtype=q.dtype)
    update, low = layer_tuple(DELTA), causal(n)
    full, rated = recurrent(update, q, k, v, beta=one)[0], recurrent(update, q, k, v, beta=beta)[0]
    started = recurrent(update, q, k, v, start, beta=beta)[0]
    inverse = torch.linalg.inv(eye(n) + (k @ k.mT) * (low - eye(n)))
    correlated = torch.linalg.inv(eye(n) + (k @ k.mT) * low)
    general = _parallel(q, k, beta)
    chunks = by_chunks(update, n, q, k, v, start, beta=beta)[0]
    return (
        holds("beta = 1, unit keys", gap(full, _printed(q, k) @ v), 1e-10),
        holds("beta = 1, other lengths", gap(recurrent(update, q, long, v, beta=one)[0], _printed(q, long) @ v), 1e-10),
        holds("the last mask is redundant", gap(_printed(q, k), ((q @ k.mT) * low) @ inverse), 1e-12),
        holds("any rates, with diag(beta) twice", gap(rated, general @ v), 1e-10),
        holds("any start, with (Q - A K) S_0^T", gap(started, general @ v + (q - general @ k) @ start.mT), 1e-10),
        holds("the chunked scan of all tokens", gap(started, chunks), 1e-10),
        breaks("printed form at rates in (0, 1)", gap(rated, _printed(q, k) @ v), 0.1),
        breaks(
            "printed form from a start that is not zero",
            gap(recurrent(update, q, k, v, start, beta=one)[0], _printed(q, k) @ v),
            0.1,
        ),
        breaks("masked at the end only", gap(full, ((q @ k.mT) @ inverse * low) @ v), 0.1),
        breaks("the diagonal kept in the inverse", gap(full, ((q @ k.mT) * low) @ correlated @ v), 0.1),
    )


@claim(
    "F08",
    "Gates compose with the mask: Gated DeltaNet is O = (A * D) V with A of the delta rule.",
    Verdict.EXACT,
    BLOG("Capacity and the SNR: log-linear attention, O = (A * M) V"),
    "axes.sequence.GatedDeltaNet, axes.sequence.GatedDeltaNetPrev",
    derivation="With the gate before the gradient the transition is alpha_t (I - beta_t k_t k_t^T), and numbers "
    "commute with matrices: pair j picks up alpha_{j+1} ... alpha_i beside its product of reflections. With the "
    "gradient at the ungated state alpha_t I - beta_t k_t k_t^T does not factor.",
)
def F08(draw: Draw) -> tuple[Finding, ...]:
    n = draw.integer(10, 40)
    q, k, v, beta = _tokens(draw, n)
    alpha = draw.uniform(n, low=0.3)
    wanted = (_parallel(q, k, beta) * decay_mask(alpha)) @ v
    rates = {"decay": alpha.log(), "beta": beta}
    return (
        holds("the gate first", gap(recurrent(layer_tuple(GATED), q, k, v, **rates)[0], wanted), 1e-11),
        breaks("the gradient first", gap(recurrent(layer_tuple(PREV), q, k, v, **rates)[0], wanted), 0.01),
    )


@claim(
    "F09",
    "S_t = sum_i beta_i v_i k_i^T prod_{j=i+1}^t (I - beta_j k_j k_j^T), the factors ascending from left to right.",
    Verdict.EXACT,
    SLIDES("DeltaNet's expressiveness"),
    "axes.sequence.DeltaNet",
    derivation="S <- S (I - beta k k^T) + beta v k^T unrolled: later maps multiply on the right. The factors do not "
    "commute, so the other order is another matrix.",
)
def F09(draw: Draw) -> tuple[Finding, ...]:
    n = 20
    _, k, v, beta = _tokens(draw, n, high=2.0)
    reached = states(layer_tuple(REFLECTIVE), k, v, beta=beta)

    def unrolled(t: int, descending: bool) -> Tensor:
        writes = [
            beta[i] * torch.outer(v[i], k[i]) @ householder_product(k[i + 1 : t], beta[i + 1 : t], descending)
            for i in range(t)
        ]
        return torch.stack(writes).sum(0)

    return (
        *(holds(f"after {t} tokens", gap(reached[t - 1], unrolled(t, False)), 1e-11) for t in (1, 2, 9, n)),
        breaks("factors descending", gap(reached[8], unrolled(9, True)), 0.01),
    )


@claim(
    "F10",
    "S_t = sum_i u_i k_i^T with pseudo-values u_t = beta_t (v_t - S_{t-1} k_t), so that linear attention can run it.",
    Verdict.EXACT,
    SLIDES(_TRAINING),
    "axes.sequence.DeltaNet, axes.sequence.UnnormalisedLinearAttention",
    derivation="Each step adds u_t k_t^T to the state: linear attention over (k, u). U = T V with the UT transform's T "
    "gives all of them at once.",
)
def F10(draw: Draw) -> tuple[Finding, ...]:
    n = 40
    q, k, v, beta = _tokens(draw, n, high=2.0)
    update = layer_tuple(REFLECTIVE)
    after = states(update, k, v, beta=beta)
    before = torch.cat((torch.zeros_like(after[:1]), after[:-1]))
    u = beta[:, None] * (v - (before @ k[..., None])[..., 0])
    return (
        holds("U from the states against T V", gap(u, ut(k, beta) @ v), 1e-11),
        holds("S = U^T K", gap(after[-1], (ut(k, beta) @ v).mT @ k), 1e-11),
        holds(
            "linear attention over pseudo-values",
            gap(recurrent(update, q, k, v, beta=beta)[0], recurrent(layer_tuple(LINEAR), q, k, ut(k, beta) @ v)[0]),
            1e-11,
        ),
    )


def _wy(k: Tensor, beta: Tensor) -> Tensor:
    """w_t = beta_t (k_t - sum_{i<t} (k_i . k_t) w_i), one after another."""
    w = torch.zeros_like(k)
    for t in range(len(k)):
        w[t] = beta[t] * (k[t] - (k[:t] @ k[t]) @ w[:t])
    return w


@claim(
    "F11",
    "prod_{j<=t} (I - beta_j k_j k_j^T) = I - sum_i w_i k_i^T, w_t = beta_t (k_t - sum_{i<t} (k_i . k_t) w_i).",
    Verdict.EXACT,
    SLIDES(f"{_TRAINING}, WY representation"),
    "axes.sequence.DeltaNet",
    derivation="P_t = P_{t-1} (I - beta_t k_t k_t^T) = P_{t-1} - beta_t (P_{t-1} k_t) k_t^T, so w_t = beta_t P_{t-1} "
    "k_t; put the sum in for P_{t-1}. The product is what DeltaNet does to the identity when all values are zero.",
)
def F11(draw: Draw) -> tuple[Finding, ...]:
    n, d = 30, 6
    _, k, _, beta = _tokens(draw, n, high=2.0)
    nothing, w = torch.zeros(n, d, dtype=k.dtype), _wy(k, beta)
    products = states(layer_tuple(REFLECTIVE), k, nothing, eye(d), beta=beta)
    sums = eye(d) - torch.cumsum(w[:, :, None] * k[:, None, :], 0)
    return (
        holds("all partial products", gap(products, sums), 1e-11),
        holds("written out", gap(householder_product(k, beta), sums[-1]), 1e-11),
        breaks("factors descending", gap(householder_product(k[:4], beta[:4], True), sums[3]), 1e-3),
    )


@claim(
    "F12",
    "T = (I + tril(diag(beta) K K^T, -1))^-1 diag(beta) gives all w and u at once: W = T K, U = T V.",
    Verdict.EXACT,
    SLIDES(f"{_TRAINING}, UT transform"),
    "axes.sequence.DeltaNet",
    derivation="Both recursions are the same triangular system with K or V on the right. T itself is read off the "
    "layer: the pseudo-values of one-hot values. W is minus the pseudo-values of zero values over the identity.",
)
def F12(draw: Draw) -> tuple[Finding, ...]:
    n, d = 32, 6
    _, k, v, beta = _tokens(draw, n, high=2.0)
    update = layer_tuple(REFLECTIVE)

    def pseudo(values: Tensor, start: Tensor) -> Tensor:
        after = states(update, k, values, start, beta=beta)
        before = torch.cat((start[None], after[:-1]))
        return beta[:, None] * (values - (before @ k[..., None])[..., 0])

    transform = ut(k, beta)
    from_layer = pseudo(eye(n), torch.zeros(n, d, dtype=k.dtype))
    written = pseudo(v, torch.zeros(v.shape[1], d, dtype=k.dtype))
    erased = pseudo(torch.zeros(n, d, dtype=k.dtype), eye(d))
    return (
        holds("T from the layer", gap(from_layer, transform), 1e-11),
        holds("U = T V", gap(written, transform @ v), 1e-11),
        holds("W = T K against the layer", gap(-erased, transform @ k), 1e-11),
        holds("W = T K against the recursion", gap(_wy(k, beta), transform @ k), 1e-11),
    )


def delta_chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """O = Q S^T + (Q K^T * M)(U - W S^T), S + (U - W S^T)^T K, S the state before the chunk."""
    t = ut(k, beta)
    z = t @ v - (t @ k) @ state.mT
    return q @ state.mT + ((q @ k.mT) * causal(len(k))) @ z, state + z.mT @ k


@claim(
    "F13",
    "The delta rule by chunks: O = Q S^T + (Q K^T * M)(U - W S^T), S the state before the chunk.",
    Verdict.EXACT,
    SLIDES(f"{_TRAINING}, parallel output computation"),
    "axes.routes.scan.chunked, axes.sequence.DeltaNet",
    derivation="Z = U - W S^T are the errors that the chunk writes when it starts from S: T (V - K S^T). The next "
    "chunk starts from S + Z^T K.",
)
def F13(draw: Draw) -> tuple[Finding, ...]:
    n = 37
    q, k, v, beta = _tokens(draw, n, high=2.0)
    start, update = draw.normal(4, 6), layer_tuple(REFLECTIVE)
    wanted, last = recurrent(update, q, k, v, start, beta=beta)
    findings = []
    for size in (1, 2, 5, 8, 32):
        out, end = by_chunks(update, size, q, k, v, start, beta=beta)
        formula, state = passed_on(delta_chunk, size, start, q, k, v, beta)
        findings += [
            holds(f"formula, C = {size}", max(gap(formula, wanted), gap(state, last)), 1e-10),
            holds(f"chunked scan, C = {size}", max(gap(out, wanted), gap(end, last)), 1e-10),
        ]
    late = delta_chunk(delta_chunk(start, q, k, v, beta)[1], q, k, v, beta)[0]
    return (*findings, breaks("with the state after the chunk", gap(late, wanted), 0.01))


def _gated_chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The same with gates before the gradient: ratios of cumulated gates from differences of logs."""
    total = gate.cumsum(0)
    ratio = torch.exp((total[:, None] - total[None, :]).masked_fill(causal(len(k)) == 0, -torch.inf))
    gamma, strict = total.exp(), (beta[:, None] * (k @ k.mT) * ratio).tril(-1)
    t = torch.linalg.solve_triangular(eye(len(k)) + strict, torch.diag(beta), upper=False)
    z = t @ v - (t @ (gamma[:, None] * k)) @ state.mT
    out = gamma[:, None] * (q @ state.mT) + ((q @ k.mT) * ratio) @ z
    return out, gamma[-1] * state + (ratio[-1][:, None] * z).mT @ k


@claim(
    "F14",
    "Gated DeltaNet by chunks: the UT form with scores and keys weighted by ratios of cumulated gates.",
    Verdict.EXACT,
    SLIDES("Combining DeltaNet and Mamba2's chunkwise algorithms"),
    "axes.routes.scan.chunked, axes.sequence.GatedDeltaNet",
    derivation="S_t / (alpha_1 ... alpha_t) follows the delta rule with rescaled values, and the ratios gamma_i / "
    "gamma_j for i >= j undo the rescaling. From logs they never exceed one, so that closed gates underflow to zero "
    "instead of dividing by it.",
)
def F14(draw: Draw) -> tuple[Finding, ...]:
    n = 37
    q, k, v, beta = _tokens(draw, n)
    start, update, gate = draw.normal(4, 6), layer_tuple(GATED), draw.uniform(n, low=0.2).log()
    almost, closed = gate.clone(), gate.clone()
    almost[5], almost[6], almost[20] = -400.0, -500.0, -30.0
    closed[5], closed[20] = -torch.inf, -torch.inf
    findings = []
    for name, logs, sizes in (
        ("open", gate, (1, 4, 7, 32)),
        ("nearly closed", almost, (7, 32)),
        ("closed", closed, (7, 32)),
    ):
        wanted, last = recurrent(update, q, k, v, start, beta=beta, decay=logs)
        for size in sizes:
            out, end = by_chunks(update, size, q, k, v, start, beta=beta, decay=logs)
            findings.append(holds(f"chunked scan, {name}, C = {size}", max(gap(out, wanted), gap(end, last)), 1e-10))
            if name != "closed":  # differences of infinite logs
                formula, state = passed_on(_gated_chunk, size, start, q, k, v, beta, logs)
                findings.append(
                    holds(f"formula, {name}, C = {size}", max(gap(formula, wanted), gap(state, last)), 1e-10)
                )
    return tuple(findings)


def _after(k: Tensor, v: Tensor, beta: Tensor, start: Tensor) -> Tensor:
    """The state after the micro-steps of one token of DeltaProduct: as many tokens of the delta rule."""
    return states(layer_tuple(REFLECTIVE), k, v, start, beta=beta)[-1]


@claim(
    "F24",
    "DeltaProduct: S_j = (I - beta k k^T) S_{j-1} + beta v k^T, B = sum_j beta_j v_j k_j^T prod_{l<j} (I - beta_l k_l "
    "k_l^T).",
    Verdict.FALSE,
    SLIDES("DeltaProduct"),
    "axes.sequence.DeltaNetReflective",
    correction="the reflections multiply on the right, and the product in B runs over the later ones, l = j + 1 .. n_h",
    kind="NOTN",
    derivation="grad |S k - v|^2 / 2 = (S k - v) k^T acts on the key side. A write is changed only by the maps that "
    "come after it.",
)
def F24(draw: Draw) -> tuple[Finding, ...]:
    d = 5
    start, findings = draw.normal(d, d), []
    k = draw.unit(d) + draw.unit(3, d)  # keys that overlap: the order of orthogonal reflections does not matter
    k, v, beta = k / k.norm(dim=-1, keepdim=True), draw.normal(3, d), draw.uniform(3, low=0.3, high=1.8)
    step = one_step(layer_tuple(REFLECTIVE), start, k=k[0], v=v[0], beta=beta[0])
    factor = eye(d) - beta[0] * torch.outer(k[0], k[0])
    write = beta[0] * torch.outer(v[0], k[0])
    right = start - beta[0] * gradient(squared_error(k[0], v[0]), start)
    for n in (1, 2, 3):
        made = _after(k[:n], v[:n], beta[:n], torch.zeros_like(start))
        writes = [beta[j] * torch.outer(v[j], k[j]) for j in range(n)]
        later = sum((w @ householder_product(k[j + 1 : n], beta[j + 1 : n]) for j, w in enumerate(writes)), 0 * start)
        earlier = sum((w @ householder_product(k[:j], beta[:j]) for j, w in enumerate(writes)), 0 * start)
        a = householder_product(k[:n], beta[:n])
        findings += [
            holds(f"B over later steps, n_h = {n}", gap(made, later), 1e-11),
            holds(f"S A + B, n_h = {n}", gap(_after(k[:n], v[:n], beta[:n], start), start @ a + later), 1e-11),
        ]
        if n > 1:
            findings.append(breaks(f"B as printed, n_h = {n}", gap(made, earlier), 1e-4))
    return (
        *findings,
        holds("one step against autograd", gap(step, right), 1e-12),
        holds("reflection on the right", gap(step, start @ factor + write), 1e-12),
        breaks("reflection on the left", gap(step, factor @ start + write), 0.05),
    )


def _rank(x: Tensor) -> int:
    return int(torch.linalg.matrix_rank(x, rtol=1e-9))


@claim(
    "F25",
    "In DeltaProduct both the transition A_t and the input B_t have rank n_h.",
    Verdict.FALSE,
    SLIDES("DeltaProduct"),
    "axes.sequence.DeltaNet",
    correction="A_t is the identity plus a matrix of rank n_h, and has full rank unless some beta |k|^2 = 1; B_t has "
    "rank n_h",
    kind="MATH",
    derivation="A factor I - beta k k^T is singular only for beta |k|^2 = 1, so the product is invertible; WY form: I "
    "- A = W^T K with n_h rows.",
)
def F25(draw: Draw) -> tuple[Finding, ...]:
    d, n = 6, 3
    k, v, beta = draw.unit(n, d), draw.normal(n, d), draw.uniform(n, low=0.2, high=0.8)
    nothing, projected = torch.zeros_like(v), beta.clone()
    projected[1] = 1.0
    singular = _after(k, nothing, projected, eye(d))
    a, b = _after(k, nothing, beta, eye(d)), _after(k, v, beta, 0 * eye(d))
    return (
        breaks("rank of A above n_h", float(_rank(a) - n), 1.0),
        holds("|rank A - d|", float(abs(_rank(a) - d)), 0.0),
        holds("|rank (I - A) - n_h|", float(abs(_rank(eye(d) - a) - n)), 0.0),
        holds("|rank B - n_h|", float(abs(_rank(b) - n)), 0.0),
        holds("|rank A - (d - 1)| when one beta is 1", float(abs(_rank(singular) - d + 1)), 0.0),
    )
