"""Reading rules under a gate per channel: the chunk identities in float64, and the kernels in Triton's interpreter.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
bfloat16 products are left to tests/gpu: the interpreter multiplies their bit patterns.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from tests.interpreter import interpret


def token_loop(rule: str, q, k, v, g, x, y, start) -> tuple[Tensor, Tensor]:
    """One head: q, k, g (T, K), v (T, V), x the erase key or a (T, K), y beta (T,) or b (T, K), start (V, K)."""
    state, outs = start, []
    for t in range(q.shape[0]):
        faded = state * torch.exp(g[t])
        if rule == "dplr":
            state = faded + torch.outer(state @ x[t], y[t]) + torch.outer(v[t], k[t])
        else:
            read = (state if rule == "early" else faded) @ x[t]
            state = faded + y[t] * torch.outer(v[t] - read, k[t])
        outs.append(state @ q[t])
    return torch.stack(outs), state


def decays(late: Tensor, run: Tensor, strict: bool) -> Tensor:
    keep = torch.ones(late.shape[0], late.shape[0], dtype=torch.bool).tril(-1 if strict else 0)
    return torch.exp((late[:, None] - run[None]).masked_fill(~keep[..., None], -torch.inf))


def rows(pairs: Tensor, writer: Tensor, decay: Tensor) -> Tensor:
    return torch.einsum("ij,jk,ijk->ik", pairs, writer, decay)


def columns(pairs: Tensor, reader: Tensor, decay: Tensor) -> Tensor:
    return torch.einsum("ij,ik,ijk->jk", pairs, reader, decay)


def chunked(rule: str, q, k, v, g, x, y, start, do, dfinal, size: int) -> list[Tensor]:
    """The kernels' mathematics chunk by chunk: o, final and the gradients of q, k, v, g, x, y, start."""
    two, late = rule == "dplr", rule == "delta"
    cuts = [slice(s, s + size) for s in range(0, q.shape[0], size)]
    outs, kept, state = [], [], start.T
    for cut in cuts:
        run = g[cut].cumsum(0)
        reach = run if late else run - g[cut]
        read, decay, strict = x[cut] * reach.exp(), decays(run, run, False), decays(reach, run, True)
        tail = torch.exp(run[-1] - run)
        pair = lambda a, b, d: torch.einsum("ik,jk,ijk->ij", a[cut], b[cut], d)  # noqa: B023, E731
        first = y if two else k
        lower, scores = pair(x, first, strict), pair(q, first, decay)
        eye = torch.eye(lower.shape[0], dtype=q.dtype)
        if two:
            inverse, scores2, lower2 = torch.linalg.inv(eye - lower), pair(q, k, decay), pair(x, k, strict)
            u = inverse @ (read @ state + lower2 @ v[cut])
            outs.append((q[cut] * run.exp()) @ state + scores @ u + scores2 @ v[cut])
        else:
            inverse, scores2, lower2 = torch.linalg.inv(eye + y[cut, None] * lower), None, None
            u = inverse @ (y[cut, None] * (v[cut] - read @ state))
            outs.append((q[cut] * run.exp()) @ state + scores @ u)
        kept.append((state, u, inverse, scores, scores2, lower2))
        state = run[-1].exp()[:, None] * state + (first[cut] * tail).T @ u
        if two:
            state = state + (k[cut] * tail).T @ v[cut]
    out, final, dstate = torch.cat(outs), state.T, dfinal.T
    dq, dk, dv, dg, dx, dy = (torch.empty_like(t) for t in (q, k, v, g, x, y))
    for cut, (state, u, inverse, scores, scores2, lower2) in zip(reversed(cuts), reversed(kept), strict=True):
        run = g[cut].cumsum(0)
        reach = run if late else run - g[cut]
        decay, strict, tail = decays(run, run, False), decays(reach, run, True), torch.exp(run[-1] - run)
        first = (y if two else k)[cut]
        r = inverse.T @ (scores.T @ do[cut] + (first * tail) @ dstate)
        dscores, sign = do[cut] @ u.T, 1 if two else -1
        from_read = sign * (reach.exp() * (r @ state.T) + rows(r @ u.T, first, strict))
        from_write = tail * (u @ dstate.T)
        dq[cut] = run.exp() * (do[cut] @ state.T) + rows(dscores, first, decay)
        inner, moved = columns(dscores, q[cut], decay), first * from_write
        if two:
            dv[cut] = lower2.T @ r + scores2.T @ do[cut] + (k[cut] * tail) @ dstate
            dq[cut] += rows(do[cut] @ v[cut].T, k[cut], decay)
            dx[cut] = from_read + rows(r @ v[cut].T, k[cut], strict)
            inner = inner + columns(r @ u.T, x[cut], strict)
            dy[cut] = inner + from_write
            inner2 = columns(do[cut] @ v[cut].T, q[cut], decay) + columns(r @ v[cut].T, x[cut], strict)
            from_write2 = tail * (v[cut] @ dstate.T)
            dk[cut] = inner2 + from_write2
            pairs, moved, back = y[cut] * inner + k[cut] * inner2, moved + k[cut] * from_write2, r
        else:
            dv[cut] = y[cut, None] * r
            dy[cut] = (r * v[cut]).sum(1) + (x[cut] * from_read).sum(1)
            dx[cut] = y[cut, None] * from_read
            inner = inner - columns(y[cut, None] * (r @ u.T), x[cut], strict)
            dk[cut] = inner + from_write
            pairs, back = k[cut] * inner, -dv[cut]
        here, before = q[cut] * dq[cut] - pairs, x[cut] * dx[cut]
        upper = torch.ones(len(u), len(u), dtype=q.dtype).triu()
        dg[cut] = upper @ here + upper.triu(0 if late else 1) @ before + upper.triu(1).T @ moved
        dg[cut] += run[-1].exp() * (state * dstate).sum(1)
        dstate = run[-1].exp()[:, None] * dstate + (q[cut] * run.exp()).T @ do[cut] + (x[cut] * reach.exp()).T @ back
    return [out, final, dq, dk, dv, dg, dx, dy, dstate.T]


@pytest.mark.parametrize("rule", ("delta", "early", "dplr"))
def test_chunk_identities(rule: str) -> None:
    torch.manual_seed(0)
    length, d_k, d_v = 21, 5, 3
    q, k, x, b = (torch.randn(length, d_k, dtype=torch.double) / 2 for _ in range(4))
    v, g = torch.randn(length, d_v, dtype=torch.double), -torch.rand(length, d_k, dtype=torch.double)
    y = b if rule == "dplr" else torch.rand(length, dtype=torch.double)
    start, dfinal = (torch.randn(d_v, d_k, dtype=torch.double) for _ in range(2))
    inputs, do = [t.requires_grad_() for t in (q, k, v, g, x, y, start)], torch.randn_like(v)
    o, final = token_loop(rule, *inputs)
    want = [o, final, *torch.autograd.grad((o, final), inputs, (do, dfinal))]
    with torch.no_grad():
        got = chunked(rule, *inputs, do, dfinal, size=8)
    for a, w in zip(got, want, strict=True):
        torch.testing.assert_close(a, w, rtol=1e-11, atol=1e-12)


PROGRAM = r"""
import torch
from torch.nn.functional import normalize
from axes.kernels.diagonal_delta import chain as diagonal_delta

NAMES = ("o", "final", "dq", "dk", "dv", "dg", "dx", "dy", "dstart")

def token_loop(rule, q, k, v, g, x, y, start, lengths):
    x = k if x is None else x
    if lengths is not None:
        cuts = zip(*(t.split(lengths, 1) for t in (q, k, v, g, x, y)), start.split(1))
        done = [token_loop(rule, *cut, None) for cut in cuts]
        return torch.cat([o for o, _ in done], 1), torch.cat([s for _, s in done])
    q, k, x = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k, x))
    y = y.repeat_interleave(v.shape[2] // y.shape[2], 2)
    state, outs, fade = start, [torch.empty_like(v[:, :0])], torch.exp(g.clamp(min=-100))
    for t in range(q.shape[1]):
        faded = state * fade[:, t, :, None]
        read = ((faded if rule in ("delta", "erase") else state) @ x[:, t, ..., None]).squeeze(-1)
        if rule == "dplr":
            state = faded + read[..., None] * y[:, t, :, None] + v[:, t, ..., None] * k[:, t, :, None]
        else:
            state = faded + (y[:, t, :, None] * (v[:, t] - read))[..., None] * k[:, t, :, None]
        outs.append((state @ q[:, t, ..., None]).squeeze(-1)[:, None])
    return torch.cat(outs, 1), state

def kernels(rule, q, k, v, g, x, y, start, lengths):
    cu = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    if rule == "dplr":
        return diagonal_delta.dplr(q, k, v, g, x, y, start, cu)
    return diagonal_delta.delta(q, k, v, g, y, x, rule == "early", start, cu)

def run(f, rule, inputs, lengths, do, dfinal):
    inputs = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    o, final = f(rule, *inputs, lengths)
    used = [x for x in inputs if x is not None]
    grads = iter(torch.autograd.grad((o, final), used, (do.to(o.dtype), dfinal.to(final.dtype))))
    return [o, final, *(None if x is None else next(grads) for x in inputs)]

def check(rule, length, d_k, d_v, h=1, hv=1, lengths=None, closed=False, bound=3e-6, dtype=torch.float32):
    torch.manual_seed(0)
    units = 1 if lengths is None else len(lengths)
    length = length if lengths is None else sum(lengths)
    q, k, e = (normalize(torch.randn(1, length, h, d_k), dim=-1) for _ in range(3))
    v, g = torch.randn(1, length, hv, d_v), -torch.rand(1, length, hv, d_k) ** 2
    if closed:  # everywhere, or from this token on: chunks before it stay mild
        first = 0 if closed is True else closed
        g[:, first:] = torch.where(torch.rand_like(g) < 0.1, -1e3, 5 * g)[:, first:]
    start = torch.randn(units, hv, d_v, d_k)
    if rule == "dplr":
        x, y = -e, (torch.rand(1, length, h, 1) * e).to(dtype)
    else:
        x, y = normalize(k + 0.3 * e, dim=-1) if rule == "erase" else None, torch.rand(1, length, hv)
    inputs = [q.to(dtype), k.to(dtype), v.to(dtype), g, None if x is None else x.to(dtype), y, start]
    do, dfinal = torch.randn_like(inputs[2]), torch.randn_like(start)
    got = run(kernels, rule, inputs, lengths, do, dfinal)
    exact = [None if x is None else x.double() for x in inputs]
    want = run(token_loop, rule, exact, lengths, do.double(), dfinal.double())
    for name, a, w in zip(NAMES, got, want):
        if w is not None:
            error = ((a - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
            print(rule, length, d_k, d_v, name, f"{error:.1e}")
            assert error < bound, (rule, length, d_k, d_v, name, error)
"""

CASES = {
    "delta": 'check("delta", 33, 16, 16); check("early", 40, 5, 20, h=1, hv=2); check("erase", 34, 16, 8, closed=True)',
    "dplr": 'check("dplr", 70, 16, 16); check("dplr", 33, 20, 5, hv=2, closed=True)',
    "closing": 'check("delta", 70, 20, 5, closed=32); check("dplr", 70, 20, 5, closed=32)',
    # a program for more than one chunk with closed gates, as on a full chip
    "turns": 'diagonal_delta._PROGRAMS = 1; check("delta", 80, 16, 5, closed=9); check("dplr", 40, 16, 5, closed=9)',
    "packed": 'for rule in ("delta", "dplr"): check(rule, 0, 16, 16, lengths=(0, 1, 33))',
    "half": 'for rule in ("erase", "dplr"): check(rule, 70, 20, 16, bound=3e-3, dtype=torch.float16)',
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_token_loop(case: str) -> None:
    if sys.platform != "linux":  # there its absence is an error, not a reason to skip
        pytest.importorskip("triton")
    interpret(PROGRAM + CASES[case])
