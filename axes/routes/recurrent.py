"""Tokens whose signals depend on the last read: a walk, by the tuple's own steps, by torch at once, or by a kernel.

`cells` says what a token's signals are. The interpreter makes them and steps the tuple; `_Walk` computes a token of a
cell at once and its derivative backwards without a graph, with one product for the gradient of W; the kernel has W and
the state on chip. Legend: B batch, T tokens, H heads, G pre-activations, V channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from axes.core import reference
from axes.core.state_update import State, StateUpdate
from axes.kernels.common import versions
from axes.kernels.recurrent.sizes import refusal
from axes.linalg.formulas import followed
from axes.routes.cells import Carry, Cell, VectorCell
from axes.routes.choice import Choice, Implementation, NoImplementation, Plan, Target, require_implementation
from axes.routes.matrix_cells import MatrixCell, Walk, by_steps
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
    if implementation == "c":
        why = "its tokens ask for the last read. Use implementation='torch'"
        raise NoImplementation(f"no loop of C for {cell!r}: {why}")
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
    tokens: Mapping[str, Tensor],
    matrices: tuple[Tensor, ...],
    carry: Carry,
    state: State,
    cu_seqlens: Tensor | None = None,
    implementation: Implementation | None = None,
) -> tuple[Tensor, State, Carry]:
    """Outputs (B, T, H, V), the state and what is carried after the last token.

    Of a cell of vectors: tokens inputs, x (B, T, H, G, V); matrices weight (H, V, G, V) and bias (H, G, V); carry
    (B, H, V) each. Of one of matrices: tokens q, k (B, T, H, K), v (B, T, H, V) and decay (B, T, H), logs; matrices
    weight (H, V, V).  cu_seqlens: of sequences packed in one batch entry, with a state each.
    """
    given = tuple(tokens[n] for n in _tokens(cell))
    like = tokens["v"] if isinstance(cell, MatrixCell) else tokens["inputs"]
    dtype, length = like.dtype, like.shape[1]
    choice = select(cell, like.device, dtype, max(x.shape[-1] for x in given[:3]), implementation)
    if length == 0:
        return like.new_zeros((*like.shape[:3], like.shape[-1])), state, carry
    if (held := state.held()) is not None:  # computed in float32 and rounded once
        kinds = [x.dtype for x in carry]
        wide_carry = tuple(x.float() for x in carry)
        wide_state = state.to(torch.float32)
        out, state, carry = run(update, cell, tokens, matrices, wide_carry, wide_state, cu_seqlens, implementation)
        return out, state.to(held), tuple(x.to(kind) for x, kind in zip(carry, kinds, strict=True))
    with own_precision(like):
        if choice.implementation == "triton":
            out, theta, carry = _by_kernel(cell, given, matrices, state.theta[0], carry, cu_seqlens)
            return out, _after(state, theta, length), carry
        wide = torch.promote_types(state.theta[0].dtype, torch.float32)
        given, matrices = (tuple(x.to(wide) for x in xs) for xs in (given, matrices))
        if cu_seqlens is None:
            out, state, carry = _one(choice, update, cell, given, matrices, carry, state)
            return out.to(dtype), state, carry
        outs, ends, carries = [], [], []
        bounds: list[int] = cu_seqlens.tolist()
        for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):  # each has a length and a state of its own
            own = state.but(theta=(state.theta[0][n : n + 1],))
            mine = tuple(x[n : n + 1] for x in carry)
            if b > a:
                each = tuple(x[:, a:b] for x in given)
                out, own, mine = _one(choice, update, cell, each, matrices, mine, own)
                outs.append(out)
            ends.append(own.theta[0])
            carries.append(mine)
        whole = tuple(torch.cat(x) for x in zip(*carries, strict=True))
        longest = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
        after = state.but(theta=(torch.cat(ends),), count=state.count + longest)
        return torch.cat(outs, 1).to(dtype), after, whole


def _tokens(cell: Cell) -> tuple[str, ...]:
    return ("q", "k", "v", "decay") if isinstance(cell, MatrixCell) else ("inputs",)


def _after(state: State, theta: Tensor, length: int) -> State:
    return State((theta,), state.via, state.stats, state.norm, state.anchor, state.count + length)


def _by_kernel(
    cell: Cell, given: tuple[Tensor, ...], matrices: tuple[Tensor, ...], theta: Tensor, carry: Carry,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Carry]:  # fmt: skip
    if isinstance(cell, MatrixCell):
        from axes.kernels.recurrent.matrix import matrix_chain

        q, k, v, decay = given
        return *matrix_chain(q, k, v, decay, matrices[0], theta, cu_seqlens), ()
    from axes.kernels.recurrent.chain import recurrent_chain

    weight, bias = matrices
    out, y, carry = recurrent_chain(cell.kernel, given[0], weight, bias, theta[..., 0], carry, cu_seqlens)
    return out, y[..., None], carry


def _one(
    choice: Choice, update: StateUpdate, cell: Cell, given: tuple[Tensor, ...], matrices: tuple[Tensor, ...],
    carry: Carry, state: State,
) -> tuple[Tensor, State, Carry]:  # fmt: skip
    if choice.implementation == "reference" or followed():
        if isinstance(cell, VectorCell):
            return _by_steps(update, cell, carry, state, *given, *matrices)
        return *by_steps(update, state, *given, *matrices), ()
    y = state.theta[0] if isinstance(cell, MatrixCell) else state.theta[0][..., 0]
    tensors = [*given, *matrices, y, *carry]
    if torch.compiler.is_compiling():
        out, y, *rest = _cells.operator(tensors, cell.text, "")
    else:
        out, y, *rest = _compute(cell, tensors, "")
    theta = y if isinstance(cell, MatrixCell) else y[..., None]
    return out, _after(state, theta, given[0].shape[1]), tuple(rest)


def _by_steps(
    update: StateUpdate, cell: VectorCell, carry: Carry, state: State, inputs: Tensor, weight: Tensor, bias: Tensor
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
    def forward(
        ctx: Any, cell: VectorCell, inputs: Tensor, weight: Tensor, bias: Tensor, y: Tensor, *carry: Tensor
    ) -> Any:
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
    return list(Walk.apply(*tensors) if isinstance(cell, MatrixCell) else _Walk.apply(cell, *tensors))


def _shapes(cell: Cell, tensors: list[Tensor], call: str) -> list[Tensor]:
    if isinstance(cell, MatrixCell):
        return [tensors[2].new_empty(tensors[2].shape), tensors[-1].new_empty(tensors[-1].shape)]
    inputs, _, _, *states = tensors
    out = inputs.new_empty(*inputs.shape[:3], inputs.shape[-1])
    return [out, *(x.new_empty(x.shape) for x in states)]


_cells: Recomputed[Cell] = Recomputed("cells", _compute, _shapes)


def known(cell: Cell) -> None:
    """A layer of this cell is made: a graph names it by its text."""
    object.__setattr__(cell, "text", _cells.text(cell))


__all__ = ["known", "no_kernel", "plans", "run", "select"]
