"""Every mixer against its paper's equations, written out with einsum: read, write and all gradients."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from axes.depth import (
    MHC,
    RELEASED_EPS,
    DepthMixer,
    DynamicHyperConnections,
    HyperConnections,
    IdentityMixing,
    JPmHC,
    JPmHCMeanPreserving,
    MHCLite,
    PostNorm,
    PreNorm,
    Residual,
)

D, N, EPS = 6, 4, 1e-6


def sinkhorn(logits: Tensor, iterations: int = 20) -> Tensor:
    """The paper's form: exp, then alternate divisions, rows last."""
    m = logits.exp()
    for _ in range(iterations):
        m = m / m.sum(-2, keepdim=True)
        m = m / m.sum(-1, keepdim=True)
    return m


def cayley(logits: Tensor, alpha: float = 0.1) -> Tensor:
    eye = torch.eye(logits.shape[-1], dtype=logits.dtype)
    skew = -alpha / 2 * (logits - logits.mT)
    return torch.linalg.inv(eye + skew) @ (eye - skew)


def mean_preserving(logits: Tensor) -> Tensor:
    """R = U diag(1, Q) U^T with U a Hadamard basis; Q is the Cayley map of the compressed skew matrix."""
    u = 0.5 * torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=logits.dtype)
    rest = u[:, 1:]
    return u[:, :1] @ u[:, :1].mT + rest @ cayley(rest.mT @ logits @ rest) @ rest.mT


def rms(x: Tensor, eps: float = 0.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def from_mhc(m: DepthMixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hat = rms(x.flatten(-2), EPS)  # the norm before the product
    sizes = [N, N, N * N]
    p, o, r = (a * (hat @ w.T) + b for a, w, b in zip(m.alpha, m.phi.split(sizes), m.bias.split(sizes), strict=True))
    return p.sigmoid(), 2 * o.sigmoid(), sinkhorn(r.unflatten(-1, (N, N)))


def permuted(logits: Tensor) -> Tensor:
    """sum_p softmax_p P_p over words p, P_p[i, p(i)] = 1."""
    shares = logits.exp() / logits.exp().sum(-1, keepdim=True)
    rows = torch.eye(N, dtype=logits.dtype)
    return sum(shares[..., k, None, None] * rows[list(word)] for k, word in enumerate(permutations(range(N))))


def from_lite(m: DepthMixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hat = rms(x.flatten(-2), EPS)
    sizes = [N, N, 24]
    p, o, r = (a * (hat @ w.T) + b for a, w, b in zip(m.alpha, m.phi.split(sizes), m.bias.split(sizes), strict=True))
    return p.sigmoid(), 2 * o.sigmoid(), permuted(r)


def from_ihc(m: DepthMixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hat = rms(x.flatten(-2), EPS)
    p, o = (a * (hat @ w.T) + b for a, w, b in zip(m.alpha, m.phi.split([N, N]), m.bias.split([N, N]), strict=True))
    return p.sigmoid(), 2 * o.sigmoid(), torch.eye(N, dtype=x.dtype)


def from_jpmhc(m: DepthMixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    flat = x.flatten(-2)
    hat = (flat - flat.mean(-1, keepdim=True)) / (flat.var(-1, correction=0, keepdim=True) + EPS).sqrt()
    p, o, r = ((hat @ w.T + b).unflatten(-1, (N, N)) for w, b in zip(m.phi.chunk(3), m.bias.chunk(3), strict=True))
    pre = torch.einsum("...ij->...j", p.softmax(-1)) / N
    return pre, torch.einsum("...ij->...i", o.softmax(-2)), (cayley if isinstance(m, JPmHC) else mean_preserving)(r)


def from_hc(m: DepthMixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return m.pre, m.post, m.rates["mix"]


def from_dhc(m: DepthMixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With the paper's A_r (source, destination): R = A_r^T, each source predicting its own outgoing weights."""
    bar = rms(x, EPS)
    w_m, w_b, w_r = m.phi[0], m.phi[1], m.phi[2:].T
    outgoing = m.scale[0] * torch.tanh(torch.einsum("...jd,di->...ji", bar, w_r)) + m.mix.T
    pre = m.scale[0] * torch.tanh(bar @ w_m) + m.pre
    return pre, m.scale[1] * torch.tanh(bar @ w_b) + m.post, outgoing.mT


FORMULAS = {
    HyperConnections: from_hc,
    DynamicHyperConnections: from_dhc,
    MHC: from_mhc,
    MHCLite: from_lite,
    IdentityMixing: from_ihc,
    JPmHC: from_jpmhc,
    JPmHCMeanPreserving: from_jpmhc,
}


def perturbed(cls: type[DepthMixer], **options: object) -> DepthMixer:
    m = cls(D, layer_index=1, streams=N, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(0.7 * torch.randn_like(p))
    return m


@pytest.mark.parametrize("cls", FORMULAS, ids=lambda c: c.name)
def test_the_mixer_is_the_papers_equation(cls: type[DepthMixer]) -> None:
    m = perturbed(cls)
    x = torch.randn(2, 3, N, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(D, D, dtype=torch.float64)

    seen, coefficients = m.read(x)
    ours = m.write(x, torch.tanh(seen @ weight), coefficients)
    pre, post, mix = FORMULAS[cls](m, x)
    expected_seen = torch.einsum("...j,...jd->...d", pre.expand(2, 3, N), x)
    y = torch.tanh(expected_seen @ weight)
    mix, post = mix.expand(2, 3, N, N), post.expand(2, 3, N)
    theirs = torch.einsum("...ij,...jd->...id", mix, x) + torch.einsum("...i,...d->...id", post, y)

    torch.testing.assert_close(seen, expected_seen, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    upstream = torch.randn_like(ours)  # an all-ones gradient cannot tell a wrong Sinkhorn backward from a right one
    inputs = [x, *m.parameters()]
    found = torch.autograd.grad(ours, inputs, upstream, retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(theirs, inputs, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(m.reduce(ours), theirs.mean(-2), rtol=0, atol=1e-12)


def test_residual_pre_norm_and_post_norm_are_their_equations() -> None:
    h, y = torch.randn(2, 3, D, dtype=torch.float64), torch.randn(2, 3, D, dtype=torch.float64)
    for cls, seen, written, left in (
        (Residual, h, h + y, h + y),
        (PreNorm, rms(h), h + y, rms(h + y)),
        (PostNorm, h, rms(h + y), rms(h + y)),
    ):
        m = cls(D)
        x = m.expand(h)
        got, coefficients = m.read(x)
        new = m.write(x, y, coefficients)
        assert x.shape == new.shape == (2, 3, 1, D)
        torch.testing.assert_close(got, seen, rtol=0, atol=1e-13)
        torch.testing.assert_close(new[..., 0, :], written, rtol=0, atol=1e-13)
        torch.testing.assert_close(m.reduce(new), left, rtol=0, atol=1e-13)
    m = PostNorm(D)  # what a post-norm layer reads is what the write before it normalised
    new = m.write(m.expand(h), y, m.read(m.expand(h))[1])
    torch.testing.assert_close(m.read(new)[0], rms(h + y), rtol=0, atol=1e-13)


def released(fn: Tensor, scale: Tensor, base: Tensor, x: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One token of a released model, entry by entry: what the sublayer sees, and the streams after it wrote y.

    x (n, d); fn (2 n + n^2, n d), the last n^2 rows for comb[source, destination].
    """
    n, flat = len(x), x.flatten()
    root = (sum(a * a for a in flat) / len(flat) + EPS).sqrt()
    mixes = [sum(w * a for w, a in zip(row, flat, strict=True)) / root for row in fn]
    pre = [(mixes[j] * scale[0] + base[j]).sigmoid() + eps for j in range(n)]
    post = [2 * (mixes[n + j] * scale[1] + base[n + j]).sigmoid() for j in range(n)]
    logits = [[mixes[(2 + i) * n + j] * scale[2] + base[(2 + i) * n + j] for j in range(n)] for i in range(n)]
    comb = [[a.exp() / sum(b.exp() for b in row) + eps for a in row] for row in logits]
    for done in range(20):
        if done:
            comb = [[a / (sum(row) + eps) for a in row] for row in comb]
        sums = [sum(row[j] for row in comb) + eps for j in range(n)]
        comb = [[a / b for a, b in zip(row, sums, strict=True)] for row in comb]
    mixed = [sum(comb[i][j] * x[i] for i in range(n)) + post[j] * y for j in range(n)]
    return sum(pre[j] * x[j] for j in range(n)), torch.stack(mixed)


@pytest.mark.parametrize("spread", [0.7, 6.0])
def test_mhc_with_eps_is_what_released_models_compute(spread: float) -> None:
    n, d = 3, 4
    m = MHC(d, 1, n, eps=RELEASED_EPS, learned_reduce=True, dtype=torch.float64)
    for p in m.parameters():
        torch.nn.init.normal_(p, std=spread)
    x, y = torch.randn(n, d, dtype=torch.float64, requires_grad=True), torch.randn(d, dtype=torch.float64)
    turned = torch.tensor([0, 1, 2, 3, 4, 5, 6, 9, 12, 7, 10, 13, 8, 11, 14])  # comb is R^T
    theirs = released(m.phi[turned], m.alpha, m.bias[turned], x, y, 1e-6)
    seen, coefficients = m.read(x)
    ours = (seen, m.write(x, y, coefficients))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    upstream = [torch.randn_like(a) for a in ours]
    inputs = [x, m.phi, m.alpha, m.bias]
    found, wanted = (torch.autograd.grad(out, inputs, upstream, retain_graph=True) for out in (ours, theirs))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    paper = MHC(d, 1, n, learned_reduce=True, dtype=torch.float64)
    assert paper.update == MHC.update and paper.update != m.update and paper.eps == 0
    paper.load_state_dict(m.state_dict())
    apart = (paper.write(x, y, paper.read(x)[1]) - ours[1]).abs().amax()
    assert 1e-7 < apart < 1e-4 if spread < 1 else apart > 1e-3
    shares = torch.sigmoid(m.exit) + 1e-6
    torch.testing.assert_close(m.reduce(x), (shares[:, None] * x).sum(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("cls", "closed", "most"), [(JPmHC, 4, 4), (JPmHCMeanPreserving, 5, 5)])
def test_closed_form_equals_solve_and_the_implicit_definition(cls: type[DepthMixer], closed: int, most: int) -> None:
    for n in range(3, most + 1):
        fast = cls(D, 1, n, method="closed", dtype=torch.float64)
        slow = cls(D, 1, n, method="solve", dtype=torch.float64)
        torch.nn.init.normal_(fast.phi, std=3.0)
        slow.load_state_dict(fast.state_dict())
        x, y = torch.randn(4, n, D, dtype=torch.float64), torch.randn(4, D, dtype=torch.float64)
        ours, theirs = (m.write(x, y, m.read(x)[1]) for m in (fast, slow))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        logits = fast.read(x)[1].signal["mix"]
        link = fast.update.monoid.link
        r = link.primal(logits)
        eye = torch.eye(n, dtype=torch.float64)
        torch.testing.assert_close(r @ r.mT, eye.expand_as(r), rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.linalg.det(r), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-12)
        if cls is JPmHC:  # (I + A) R = I - A
            a = -0.05 * (logits - logits.mT)
            torch.testing.assert_close((eye + a) @ r, eye - a, rtol=0, atol=1e-12)
    assert cls(D, 0, closed).update.monoid.link.method == "closed"
    assert cls(D, 0, closed + 1).update.monoid.link.method == "solve"


def test_rows_of_r_are_destinations() -> None:
    """R X, not R^T X, for a doubly stochastic R that no constraint check could tell from its transpose."""
    r = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.3, 0.5, 0.2]], dtype=torch.float64)
    x = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    y = torch.zeros(1, dtype=torch.float64)
    static = HyperConnections(1, 0, 3, dtype=torch.float64)
    birkhoff = MHC(1, 0, 3, dtype=torch.float64)
    with torch.no_grad():
        static.rates["mix"].copy_(r)
        birkhoff.bias[6:] = r.log().flatten()
    for m in (static, birkhoff):
        got = m.write(x, y, m.read(x)[1])
        torch.testing.assert_close(got[:, 0], torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [HyperConnections, DynamicHyperConnections, MHC, MHCLite, JPmHC, JPmHCMeanPreserving])
def test_the_mixed_streams_are_returned(cls: type[DepthMixer]) -> None:
    m = perturbed(cls)
    x = torch.randn(2, N, D, dtype=torch.float64)
    new = m.write(x, torch.zeros(2, D, dtype=torch.float64), m.read(x)[1])
    assert (new - x).abs().amax() > 1e-2


def test_one_stream_of_hyper_connections_is_the_residual() -> None:
    x, y = torch.randn(5, 1, D), torch.randn(5, D)
    for cls in (HyperConnections, DynamicHyperConnections):
        m, plain = cls(D, 3, 1), Residual(D, 3)
        seen, coefficients = m.read(x)
        other, fixed = plain.read(x)
        assert torch.equal(seen, other)
        assert torch.equal(m.write(x, y, coefficients), plain.write(x, y, fixed))


def test_mhc_with_r_forced_to_the_identity_is_identity_mixing() -> None:
    mixing, plain = MHC(D, 2, N), IdentityMixing(D, 2, N)
    with torch.no_grad():
        mixing.phi[: 2 * N].normal_()
        plain.phi.copy_(mixing.phi[: 2 * N])
        mixing.bias[2 * N :] = (-1e4 * (1 - torch.eye(N))).flatten()
    x, y = torch.randn(5, N, D), torch.randn(5, D)
    torch.testing.assert_close(mixing.write(x, y, mixing.read(x)[1]), plain.write(x, y, plain.read(x)[1]))


def test_dividing_by_the_norm_after_the_product_is_the_same_in_float32() -> None:
    m = MHC(64, 0, N)
    torch.nn.init.normal_(m.phi, std=0.1)
    torch.nn.init.ones_(m.alpha)
    x = 30 * torch.randn(8, N, 64)
    before = rms(x.flatten(-2), EPS) @ m.phi.T + m.bias
    torch.testing.assert_close(m.projection().entries(x)[..., 0, :], before, rtol=1e-5, atol=1e-5)
