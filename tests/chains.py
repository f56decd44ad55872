"""The chains of the kernels token by token, in whatever dtype they are given: what every kernel is compared with."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def _one_after_another(chain):
    """Packed sequences: each alone, with its own first state."""

    @functools.wraps(chain)
    def run(*tokens, initial_state=None, cu_seqlens=None, **options):
        if cu_seqlens is None:
            first = {} if initial_state is None else {"initial_state": initial_state}  # it may be the last of tokens
            return chain(*tokens, **first, **options)
        parts = []
        for n, (a, b) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
            own = [None if x is None else x[:, a:b] for x in tokens]
            named = {n: x[:, a:b] if isinstance(x, Tensor) and n != "bonus" else x for n, x in options.items()}
            start = None if initial_state is None else initial_state[n : n + 1]
            parts.append(chain(*own, initial_state=start, **named))
        outs, finals = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(finals)

    return run


@_one_after_another
def scalar_chain(
    q, k, v, beta=None, g=None, erase=None, initial_state=None, *, rule="write", early=False, write=None, **_
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t-1} + beta_t (v_t - S' a_t) k_t^T, or of two strengths (write_t v_t - beta_t S' k_t) k_t^T; of
    fewer queries than tokens, each is of the last of several."""
    each = max(1, v.shape[1] // max(1, q.shape[1]))
    if write is not None:
        assert erase is None and not early
        erase, v, beta = beta[..., None] * _grouped(k, v.shape[2]), write[..., None] * v, None
    wide = None if g is None else g[..., None]
    out, final = _chain(q.repeat_interleave(each, 1), k, v, wide, beta, erase, initial_state, rule, early)
    return out[:, each - 1 :: each], final


def mass_chain(q, k, v, beta=None, g=None, start=None, *, cu_seqlens=None) -> tuple[Tensor, ...]:
    """m_t = q_t . n_t, n_t = e^{g_t} n_{t-1} + beta_t k_t; q and k once more."""
    first = None if start is None else start[:, :, None]
    mass, last = scalar_chain(q, k, torch.ones_like(v[..., :1]), beta, g, initial_state=first, cu_seqlens=cu_seqlens)
    return mass[..., 0], last[:, :, 0], q, k


@_one_after_another
def diagonal_chain(
    q, k, v, g, beta=None, *, erase=None, a=None, b=None, initial_state=None, rule="write", early=False, bonus=None, **_
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} Diag(e^{g_t}) + beta_t (v_t - S' a_t) k_t^T, or S_{t-1} (Diag(e^{g_t}) + a_t b_t^T) + v_t k_t^T;
    with bonus o_t = (S_{t-1} + beta_t v_t (bonus * k_t)^T) q_t; "average" writes (1 - e^{g_t}) * k_t."""
    if rule == "average":
        k, rule = _grouped(k, v.shape[2]) * (1 - g.exp()), "write"
    return _chain(q, k, v, g, beta, erase, initial_state, rule, early, a, b, bonus)


def entries_chain(
    q, k, v, gate=None, *, times=None, spectrum=None, beta=None, tied=False, erase="none", initial_state=None,
    cu_seqlens=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S_t = A_t * S_{t-1} + c_t (v_t - [erase] k_t * S') k_t^T entry by entry, log A_t = gate_t + times_t spectrum."""
    if cu_seqlens is not None:
        parts = []
        for n, (a, b) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
            own = [None if x is None else x[:, a:b] for x in (q, k, v, gate)]
            named = dict(times=None if times is None else times[:, a:b], beta=None if beta is None else beta[:, a:b])
            each = spectrum if spectrum is None or spectrum.ndim == 3 else spectrum[:, a:b]
            start = None if initial_state is None else initial_state[n : n + 1]
            parts.append(entries_chain(*own, **named, spectrum=each, tied=tied, erase=erase, initial_state=start))
        return tuple(torch.cat(x, n) for n, x in zip((1, 0), zip(*parts, strict=True), strict=True))  # type: ignore[return-value]
    q, k = (_grouped(x, v.shape[2]) for x in (q, k))
    state = v.new_zeros(v.shape[0], *v.shape[2:], q.shape[-1]) if initial_state is None else initial_state.to(v.dtype)
    outs = [v[:, :0]]
    for t in range(v.shape[1]):
        log = torch.zeros_like(state)
        if spectrum is not None:
            a = spectrum if spectrum.ndim == 3 else spectrum[:, t]
            log = log + (a if times is None else a * times[:, t, ..., None])
        if gate is not None:
            log = log + gate[:, t, ..., None]
        key, kept = k[:, t, :, None], log.exp()
        strength = torch.ones_like(v) if beta is None else beta
        c = (times if tied else strength)[:, t, ..., None]
        if erase == "new":  # an implicit step shrinks by the whole key
            c = c / (1 + c * key.square().sum(-1, keepdim=True))
        seen = {"none": torch.zeros_like(state), "prev": state}.get(erase, kept * state)
        state = kept * state + c * key * (v[:, t, ..., None] - key * seen)
        outs.append((state * q[:, t, :, None]).sum(-1)[:, None])
    return torch.cat(outs, 1), state


@_one_after_another
def block_chain(q, k, v, block, write, erase=None, initial_state=None, **_) -> tuple[Tensor, Tensor]:
    """X_t[j] = sum_i X_{t-1}[i] M_t[i, j] + w_t[j] (v_t - sum_i e_t[i] X_{t-1}[i] k_t) k_t^T, o_t = X_t[0] q_t."""
    q, k = (_grouped(x, v.shape[2]) for x in (q, k))
    state = (
        v.new_zeros(v.shape[0], *v.shape[2:], 2, q.shape[-1]) if initial_state is None else initial_state.to(v.dtype)
    )
    outs = []
    for t in range(v.shape[1]):
        drive = v[:, t]
        if erase is not None:
            drive = drive - torch.einsum("bhvik,bhi,bhk->bhv", state, erase[:, t], k[:, t])
        state = torch.einsum("bhvik,bhij->bhvjk", state, block[:, t])
        state = state + torch.einsum("bhv,bhj,bhk->bhvjk", drive, write[:, t], k[:, t])
        outs.append(torch.einsum("bhvk,bhk->bhv", state[..., 0, :], q[:, t]))
    return torch.stack(outs, 1) if outs else torch.zeros_like(v), state


def _grouped(x: Tensor | None, heads: int) -> Tensor | None:
    return x if x is None else x.repeat_interleave(heads // x.shape[2], 2)


def _chain(q, k, v, g, beta, erase, initial_state, rule, early, a=None, b=None, bonus=None) -> tuple[Tensor, Tensor]:
    assert rule == "delta" or not early and erase is None, "as the kernels' entries have it"
    assert bonus is None or rule == "write"
    q, k, erase, a, b = (_grouped(x, v.shape[2]) for x in (q, k, erase, a, b))
    state = v.new_zeros(v.shape[0], *v.shape[2:], q.shape[-1]) if initial_state is None else initial_state.to(v.dtype)
    outs = []
    for t in range(v.shape[1]):
        before = state
        if g is not None:
            state = state * torch.exp(g[:, t])[..., None, :]
        drive = v[:, t]
        if rule == "delta":
            seen = (k if erase is None else erase)[:, t]
            drive = drive - torch.einsum("bhvk,bhk->bhv", before if early else state, seen)
        if rule == "dplr":
            state = state + torch.einsum("bhvk,bhk,bhl->bhvl", before, a[:, t], b[:, t])
        if beta is not None:
            drive = drive * beta[:, t, :, None]
        state = state + torch.einsum("bhv,bhk->bhvk", drive, k[:, t])
        read = state if bonus is None else before + torch.einsum("bhv,bhk->bhvk", drive, k[:, t] * bonus)
        outs.append(torch.einsum("bhvk,bhk->bhv", read, q[:, t]))
    return torch.stack(outs, 1) if outs else torch.zeros_like(v), state
