"""The identities that the kernels are built on, in float64 against autograd through the token loop (docs/kernels.md).

One chunk, one head: everything a kernel adds to them is tiling and rounding. Those of the block and diagonal families
stand beside their kernels' tests.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from axes.linalg.accumulate import outer_sum
from tests import chains

C, K, V = 12, 5, 4
EYE = torch.eye(C, dtype=torch.float64)
LOWER, STRICT = torch.ones(C, C).tril().double(), torch.ones(C, C).tril(-1).double()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def setting() -> tuple[Tensor, ...]:
    q, k = normalize(draw(C, K), dim=-1), normalize(draw(C, K), dim=-1)
    beta, g = 2 * torch.rand(C, dtype=torch.float64), -torch.rand(C, dtype=torch.float64)
    return q, k, draw(C, V), beta, g, draw(V, K)


def loop(q, k, v, beta, g, start, **options):
    """The chain token by token for one head of one sequence."""
    q, k, v = (x[None, :, None] for x in (q, k, v))
    beta, g = (None if x is None else x[None, :, None] for x in (beta, g))
    out, final = chains.scalar_chain(q, k, v, beta, g, initial_state=start[None, None], **options)
    return out[0, :, 0], final[0, 0]


def gradients(options, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, final = loop(*leaves, **options)
    do, dfinal = draw(C, V), draw(V, K)
    found = torch.autograd.grad((out, final), leaves, (do, dfinal))
    return do, dfinal, found


def decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e^G, e^E, e^(G_last - G) and D."""
    run = g.cumsum(0)
    gap = (run[:, None] - run[None, :]).masked_fill(LOWER == 0, -torch.inf)
    return run.exp(), (run - g).exp(), (run[-1] - run).exp(), gap.exp()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("early", (False, True))
def test_delta_rule_and_its_backward(early: bool) -> None:
    q, k, v, beta, g, start = setting()
    reach, before, rest, decay = decays(g)
    seen = before if early else reach
    gap = decay if not early else decay * torch.exp(-g)[:, None]  # e^(E_i - G_j)
    x, total = start.mT, reach[-1]
    m = torch.linalg.inv(EYE + beta[:, None] * (k @ k.mT) * gap * STRICT)
    p = (q @ k.mT) * decay * LOWER
    u = m @ (beta[:, None] * (v - seen[:, None] * (k @ x)))
    out = reach[:, None] * (q @ x) + p @ u
    last = total * x + k.mT @ (rest[:, None] * u)
    options = {"rule": "delta", "early": early}
    want, final = loop(q, k, v, beta, g, start, **options)
    close(out, want)
    close(last.mT, final)
    do, dfinal, (dq, dk, dv, dbeta, dg, dstart) = gradients(options, q, k, v, beta, g, start)
    dlast = dfinal.mT
    r = m.mT @ (p.mT @ do + rest[:, None] * (k @ dlast))
    close(total * dlast + q.mT @ (reach[:, None] * do) - k.mT @ ((beta * seen)[:, None] * r), dstart.mT)
    close(beta[:, None] * r, dv)
    pairs = -(r @ u.mT) * gap * STRICT  # beta times this is d(K K^T)
    scores = (do @ u.mT) * decay * LOWER
    close(reach[:, None] * (do @ x.mT) + scores @ k, dq)
    close((r * v).sum(1) + ((pairs @ k - seen[:, None] * (r @ x.mT)) * k).sum(1), dbeta)
    erased = beta[:, None] * (pairs @ k - seen[:, None] * (r @ x.mT))
    written = rest[:, None] * (u @ dlast.mT) + scores.mT @ q + (beta[:, None] * pairs).mT @ k
    close(erased + written, dk)
    # the gate: what readers gain, less what writers lose, and the chunk's end
    tail = (last * dlast).sum()
    read, lost = (q * dq).sum(1) - (k * written).sum(1), (k * erased).sum(1)
    later = STRICT.mT if early else LOWER.mT
    close(LOWER.mT @ read + later @ lost + tail, dg)


def test_the_hopper_form() -> None:
    """W = (I + L diag(beta))^-1: u = beta W z, and dv, dk and dbeta without a division."""
    q, k, v, beta, g, start = setting()
    reach, _, rest, decay = decays(g)
    x, total = start.mT, reach[-1]
    pairs = (k @ k.mT) * decay * STRICT
    w = torch.linalg.inv(EYE + pairs * beta)
    close(torch.diag(1 / beta) @ torch.linalg.inv(EYE + beta[:, None] * pairs) @ torch.diag(beta), w)
    written = w @ (v - reach[:, None] * (k @ x))
    p = (q @ k.mT) * decay * LOWER
    close(reach[:, None] * (q @ x) + p @ (beta[:, None] * written), loop(q, k, v, beta, g, start, rule="delta")[0])
    do, dfinal, (dq, dk, dv, dbeta, dg, dstart) = gradients({"rule": "delta"}, q, k, v, beta, g, start)
    dlast = dfinal.mT
    s = w.mT @ (beta[:, None] * (p.mT @ do + rest[:, None] * (k @ dlast)))
    close(s, dv)
    a, e = (do @ written.mT) * decay * LOWER, (s @ written.mT) * decay * STRICT
    close(reach[:, None] * (do @ x.mT) + (a * beta) @ k, dq)
    y = rest[:, None] * (written @ dlast.mT) + a.mT @ q - e.mT @ k
    close((k * y).sum(1), dbeta)
    close(beta[:, None] * y - (e * beta) @ k - reach[:, None] * (s @ x.mT), dk)
    last = total * x + k.mT @ ((rest * beta)[:, None] * written)
    inside = (q * dq).sum(1) + (k * dk).sum(1) - 2 * beta * dbeta
    close(LOWER.mT @ inside + (last * dlast).sum(), dg)
    close(total * dlast + q.mT @ (reach[:, None] * do) - k.mT @ (reach[:, None] * s), dstart.mT)


def test_one_form_for_all_of_the_write_rule() -> None:
    """out = w (x state) + ((x y^T) D) z, state += y^T z: o, dq forwards, dv, dk backwards."""
    q, k, v, _, g, start = setting()
    reach, _, rest, decay = decays(g)

    def form(x: Tensor, y: Tensor, z: Tensor, state: Tensor, weight: Tensor, pairs: Tensor) -> Tensor:
        return weight[:, None] * (x @ state) + ((x @ y.mT) * pairs) @ z

    out, _ = loop(q, k, v, None, g, start)
    close(form(q, k, v, start.mT, reach, decay), out)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    do, dfinal = draw(C, V), draw(V, K)
    dq, dk, dv = torch.autograd.grad(loop(*leaves, None, g, start), leaves, (do, dfinal))
    close(form(do, v, k, start, reach, decay), dq)
    close(form(k, q, do, dfinal.mT, rest, decay.mT), dv)
    close(form(v, do, q, dfinal, rest, decay.mT), dk)


def test_a_segment_is_an_affine_map() -> None:
    """S_out = S_in W^T + b, where W^T is the state pass on the identity; backwards dS_in = dS_out W + c."""
    q, k, v, beta, g, start = setting()
    _, constant = loop(q, k, v, beta, g, torch.zeros_like(start), rule="delta")
    nothing = torch.zeros(C, K, dtype=torch.float64)
    _, through = loop(q, k, nothing, beta, g, torch.eye(K, dtype=torch.float64), rule="delta")
    _, final = loop(q, k, v, beta, g, start, rule="delta")
    close(start @ through + constant, final)
    leaf, dfinal, do = start.clone().requires_grad_(), draw(V, K), draw(C, V)
    out, final = loop(q, k, v, beta, g, leaf, rule="delta")
    (alone,) = torch.autograd.grad(out, leaf, do, retain_graph=True)
    (dstart,) = torch.autograd.grad((out, final), leaf, (do, dfinal))
    close(dfinal @ through.mT + alone, dstart)


def test_an_outer_sum_and_its_gradients() -> None:
    u, k, w = (x.requires_grad_() for x in (draw(3, C, V), draw(3, C, K), draw(3, C)))
    start, decay = draw(3, V, K).requires_grad_(), torch.rand(3, dtype=torch.float64, requires_grad=True)
    total = outer_sum(u, k, w, start, decay)
    close(total, decay[:, None, None] * start + torch.einsum("ntv,ntk,nt->nvk", u, k, w))
    d = draw(3, V, K)
    du, dk, dw, dstart, ddecay = torch.autograd.grad(total, (u, k, w, start, decay), d)
    close(du, w[..., None] * (k @ d.mT))
    close(dk, w[..., None] * (u @ d))
    close(dw, (u * (k @ d.mT)).sum(-1))
    close(dstart, decay[:, None, None] * d)
    close(ddecay, (start * d).sum((1, 2)))
    alone = draw(C, V).requires_grad_()
    (both,) = torch.autograd.grad(outer_sum(alone), alone, d[0] @ draw(K, V))
    assert both.shape == alone.shape
