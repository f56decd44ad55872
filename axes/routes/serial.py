"""What is serial in a chunked form: the state at the start of every chunk, and what the chunk writes beside it.

    U_n = F_n - R_n X_n^T,    X_{n+1} = X_n Diag(w_n) + U_n^T E_n,    or X_{n+1} = X_n Diag(w_n) + F_n

The adjoint is by hand: chunk after chunk it needs two products, as many as the way forward, and all others are products
of all chunks at once. Autograd makes four a chunk, each of them small. Legend: M batch entries, N chunks, C tokens.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from axes.linalg.formulas import by_autograd, by_formula
from axes.routes.precision import own_precision_back


def states(start: Tensor, fixed: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """start (M, d_v, d_k), F: what chunks add (M, N, d_v, d_k), w (M, N, 1, 1|d_k): X (M, N, d_v, d_k), the last."""
    made, last = _Serial.apply(start, fixed, kept, None, None) if by_hand(start) else _plain(start, fixed, kept)
    return made, last


def writes(
    start: Tensor, fixed: Tensor, kept: Tensor | None, reach: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """fixed F (M, N, C, d_v), reach R and ends E (M, N, C, d_k): X, the last state, U (M, N, C, d_v)."""
    given = start, fixed, kept, reach, ends
    made, last, written = _Serial.apply(*given) if by_hand(start) else _plain(*given)
    return made, last, written


def by_hand(*given: Tensor) -> bool:
    """Whether adjoints by hand are the ones that pay, and nothing rounds what they are products of."""
    return given[0].device.type == "cpu" and not torch.is_autocast_enabled("cpu") and by_formula(*given)


def _plain(
    start: Tensor, fixed: Tensor, kept: Tensor | None, reach: Tensor | None = None, ends: Tensor | None = None
) -> tuple[Tensor, ...]:
    state, made, written = start, [], []
    given = [None if x is None else x.unbind(1) for x in (kept, reach, ends)]
    for n, f in enumerate(fixed.unbind(1)):
        w, r, e = (None if x is None else x[n] for x in given)
        made.append(state)
        if r is None or e is None:
            state = f + state if w is None else torch.addcmul(f, state, w)
        else:
            written.append(torch.baddbmm(f, r, state.mT, alpha=-1))
            state = torch.baddbmm(state if w is None else state * w, written[-1].mT, e)
    return (torch.stack(made, 1), state, *([torch.stack(written, 1)] if written else []))


@final
class _Serial(torch.autograd.Function):
    """dU_n = dU_n + E_n G_n^T and G_{n-1} = dX_n + G_n Diag(w_n) - dU_n^T R_n, where G_n is of X_{n+1}."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor | None) -> tuple[Tensor, ...]:
        out = _plain(*given)  # type: ignore[arg-type]
        ctx.save_for_backward(*given, out[0], *out[2:])
        return out

    @staticmethod
    @own_precision_back
    def backward(ctx: Any, dmade: Tensor, dlast: Tensor, *dwritten: Tensor) -> tuple[Tensor | None, ...]:
        start, fixed, kept, reach, ends, made, *written = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_autograd(_plain, (start, fixed, kept, reach, ends), (dmade, dlast, *dwritten))
        g, after, into = dlast, [], []
        for n in reversed(range(made.shape[1])):
            after.append(g)
            if written:
                into.append(torch.baddbmm(dwritten[0][:, n], ends[:, n], g.mT))
            g = dmade[:, n] + g if kept is None else torch.addcmul(dmade[:, n], g, kept[:, n])
            if written:
                g.baddbmm_(into[-1].mT, reach[:, n], alpha=-1)
        gs, dkept = torch.stack(after[::-1], 1), None
        if ctx.needs_input_grad[2]:
            dkept = (gs * made).sum_to_size(kept.shape)
        if not written:
            return g, gs, dkept, None, None
        du = torch.stack(into[::-1], 1)
        dreach = torch.baddbmm(du.new_zeros(()), du.flatten(0, 1), made.flatten(0, 1), beta=0, alpha=-1)
        dends = torch.bmm(written[0].flatten(0, 1), gs.flatten(0, 1))
        return g, du, dkept, dreach.view_as(reach), dends.view_as(ends)


__all__ = ["by_hand", "states", "writes"]
