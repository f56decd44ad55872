"""Tokens whose signals depend on the last read: a walk, by the tuple's own steps, by torch at once, or by a kernel.

`cells` says what a token's signals are. The interpreter makes them and steps the tuple; `_Walk` computes a token of a
cell at once and its derivative backwards without a graph, with one product for the gradient of W; the kernel has W and
the state on chip. Legend: B batch, T tokens, H heads, G pre-activations, V channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from axes.core import reference
from axes.core.state_update import State, StateUpdate
from axes.kernels.common import versions
from axes.kernels.recurrent.sizes import refusal
from axes.routes.cells import Carry, Cell
from axes.routes.choice import Choice, Implementation, NoImplementation, Plan, Target, require_implementation
from axes.routes.precision import own_precision
from axes.routes.recomputed import Recomputed


def no_kernel(cell: Cell, device: torch.device, dtype: torch.dtype, width: int = 1) -> str | None:
    """Why no kernel walks a cell, or None if one does."""
    return versions.refusal(device) or refusal(cell.kernel, dtype, width)


def select(
    cell: Cell,
    device: torch.device,
    dtype: torch.dtype,
    width: int = 1,
    implementation: Implementation | None = None,
) -> Choice:
    """Who walks."""
    require_implementation(implementation)
    if implementation == "reference":
        return Choice("interpreter", "reference", "asked for by name")
    reason = no_kernel(cell, device, dtype, width)
    if implementation == "triton" and reason is not None:
        raise NoImplementation(f"no Triton kernel for {cell!r}: {reason}. Use implementation='torch'")
    if reason is None and implementation != "torch":
        return Choice("recurrent", "triton", "signals depend on the last read: a walk, matrices and state on chip")
    why = f"(no kernel: {reason or 'torch was asked for by name'})"
    return Choice("recurrent", "torch", f"signals depend on the last read: a walk, a token at once {why}")


def plans(
    update: StateUpdate,
    cell: Cell,
    target: Target,
    dtype: torch.dtype,
    implementation: Implementation | None = None,
    width: int = 1,
) -> tuple[Plan, ...]:
    """What runs for a sequence, and for one token."""
    choice = select(cell, target.device, dtype, width, implementation)
    told = {"recurrent": None, "interpreter": None}
    return (
        Plan("runs", update, choice, target, dtype, told),  # type: ignore[arg-type]
        Plan("one token", update, choice, target, dtype, {}),
    )


def run(
    update: StateUpdate,
    cell: Cell,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor,
    carry: Carry,
    state: State,
    cu_seqlens: Tensor | None = None,
    implementation: Implementation | None = None,
) -> tuple[Tensor, State, Carry]:
    """Outputs (B, T, H, V), the state and what is carried after the last token.

    inputs: x (B, T, H, G, V); weight (H, V, G, V), bias (H, G, V); carry: (B, H, V) each; cu_seqlens: of sequences
    packed in one batch entry, with a state each.
    """
    choice = select(cell, inputs.device, inputs.dtype, inputs.shape[-1], implementation)
    if inputs.shape[1] == 0:
        return inputs.new_zeros((*inputs.shape[:3], inputs.shape[-1])), state, carry
    if (held := state.held()) is not None:  # computed in float32 and rounded once
        kinds = [x.dtype for x in carry]
        wide_carry = tuple(x.float() for x in carry)
        out, state, carry = run(
            update, cell, inputs, weight, bias, wide_carry, state.to(torch.float32), cu_seqlens, implementation
        )
        return out, state.to(held), tuple(x.to(kind) for x, kind in zip(carry, kinds, strict=True))
    with own_precision(inputs):
        y = state.theta[0][..., 0]
        if choice.implementation == "triton":
            from axes.kernels.recurrent.chain import recurrent_chain

            out, y, carry = recurrent_chain(cell.kernel, inputs, weight, bias, y, carry, cu_seqlens)
            return out, _after(state, y, inputs), carry
        dtype = inputs.dtype
        wide = torch.promote_types(y.dtype, torch.float32)
        inputs, weight, bias = (x.to(wide) for x in (inputs, weight, bias))
        if cu_seqlens is None:
            out, state, carry = _one(choice, update, cell, inputs, weight, bias, carry, state)
            return out.to(dtype), state, carry
        outs, ends, carries = [], [], []
        bounds: list[int] = cu_seqlens.tolist()
        for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):  # each has a length and a state of its own
            own = state._replace(theta=(state.theta[0][n : n + 1],))
            mine = tuple(x[n : n + 1] for x in carry)
            if b > a:
                out, own, mine = _one(choice, update, cell, inputs[:, a:b], weight, bias, mine, own)
                outs.append(out)
            ends.append(own.theta[0])
            carries.append(mine)
        whole = tuple(torch.cat(x) for x in zip(*carries, strict=True))
        longest = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
        after = state._replace(theta=(torch.cat(ends),), count=state.count + longest)
        return torch.cat(outs, 1).to(dtype), after, whole


def _after(state: State, y: Tensor, inputs: Tensor) -> State:
    return State((y[..., None],), state.via, state.stats, state.norm, state.anchor, state.count + inputs.shape[1])


def _one(
    choice: Choice, update: StateUpdate, cell: Cell, inputs: Tensor, weight: Tensor, bias: Tensor, carry: Carry,
    state: State,
) -> tuple[Tensor, State, Carry]:  # fmt: skip
    if choice.implementation == "reference":
        return _by_steps(update, cell, inputs, weight, bias, carry, state)
    given = (inputs, weight, bias, state.theta[0][..., 0], *carry)
    if torch.compiler.is_compiling():
        out, y, *rest = _cells.operator(list(given), cell.text, "")
    else:
        out, y, *rest = _Walk.apply(cell, *given)
    return out, _after(state, y, inputs), tuple(rest)


def _by_steps(
    update: StateUpdate, cell: Cell, inputs: Tensor, weight: Tensor, bias: Tensor, carry: Carry, state: State
) -> tuple[Tensor, State, Carry]:
    """The meaning: signals of a token, a step of the tuple, what is read."""
    outs = []
    one = inputs.new_ones(()).expand(inputs.shape[0], 1, inputs.shape[2], 1)
    for x in inputs.unbind(1):
        h = cell.heard(state.theta[0][..., 0], carry)
        u = torch.einsum("bhv,hvgw->bhgw", h, weight) + bias
        signal, made = cell.signal(x, u, carry)
        given: dict[str, Tensor | float] = {n: s[:, None] for n, s in signal.items()}
        read, state = reference.run(update, {"q": one, "k": one, **given}, state, time=1)
        out, carry = cell.shown(read[:, 0], made)
        outs.append(out)
    return torch.stack(outs, 1), state, carry


class _Walk(torch.autograd.Function):
    """All tokens of a cell. Inside, heads are the batch of a product: (H, B, ...)."""

    @staticmethod
    def forward(ctx: Any, cell: Cell, inputs: Tensor, weight: Tensor, bias: Tensor, y: Tensor, *carry: Tensor) -> Any:
        heads, width, gates = weight.shape[:3]
        matrix, shift = weight.flatten(-2), bias.flatten(-2)[:, None]
        xs = inputs.permute(1, 2, 0, 3, 4).contiguous().unbind(0)
        y, carry = y.transpose(0, 1).contiguous(), tuple(x.transpose(0, 1) for x in carry)
        first, outs, heard, states, kept = cell.heard(y, carry), [], [], [y], []
        h = first
        for x in xs:
            heard.append(h)
            u = torch.baddbmm(shift, h, matrix).unflatten(-1, (gates, width))
            out, y, carry, more = cell.walk(x, u, y, carry)
            h = cell.heard(y, carry)
            outs.append(out)
            states.append(y)
            kept.append(more)
        ctx.cell, ctx.kept, ctx.states, ctx.heard = cell, kept, states, heard
        ctx.save_for_backward(weight)
        ctx.carried = len(carry)
        back = (x.transpose(0, 1).contiguous() for x in (y, *carry))
        return (torch.stack(outs).permute(2, 0, 1, 3), *back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dy: Tensor, *dcarry: Tensor) -> Any:
        cell, (weight,) = ctx.cell, ctx.saved_tensors
        turned = weight.flatten(-2).mT
        douts = dout.permute(1, 2, 0, 3).contiguous().unbind(0)
        dy = dy.transpose(0, 1)
        carries = [x.transpose(0, 1) for x in dcarry]
        # what is carried is h, and the rest; where h is the state itself, nothing is
        dh, rest = (carries[0], tuple(carries[1:])) if carries else (torch.zeros_like(dy), ())
        dxs, dus = [], []
        for t in range(len(douts) - 1, -1, -1):
            if carries:
                dx, du, dy, rest = cell.back(ctx.kept[t], ctx.states[t], douts[t] + dh, dy, rest)
            else:
                dx, du, dy, rest = cell.back(ctx.kept[t], ctx.states[t], douts[t], dy + dh, rest)
            dh = du.flatten(-2) @ turned
            dxs.append(dx)
            dus.append(du)
        by_u = torch.stack(dus[::-1], 1).flatten(-2)  # (H, T, B, G V)
        heard = torch.stack(ctx.heard, 1).flatten(1, 2)
        dweight = (heard.mT @ by_u.flatten(1, 2)).view(weight.shape)
        dbias = by_u.sum((1, 2)).view(weight.shape[0], *weight.shape[2:])
        dinputs = torch.stack(dxs[::-1]).permute(2, 0, 1, 3, 4)
        if carries:
            return None, dinputs, dweight, dbias, dy.transpose(0, 1), *(x.transpose(0, 1) for x in (dh, *rest))
        return None, dinputs, dweight, dbias, (dy + dh).transpose(0, 1)


# ---- for compilers: one operator for every length --------------------------------------------------------------------


def _compute(cell: Cell, tensors: Sequence[Tensor], call: str) -> list[Tensor]:
    return list(_Walk.apply(cell, *tensors))


def _shapes(cell: Cell, tensors: list[Tensor], call: str) -> list[Tensor]:
    inputs, _, _, *states = tensors
    out = inputs.new_empty(*inputs.shape[:3], inputs.shape[-1])
    return [out, *(x.new_empty(x.shape) for x in states)]


_cells: Recomputed[Cell] = Recomputed("cells", _compute, _shapes)


def known(cell: Cell) -> None:
    """A layer of this cell is made: a graph names it by its text."""
    object.__setattr__(cell, "text", _cells.text(cell))


__all__ = ["known", "no_kernel", "plans", "run", "select"]
