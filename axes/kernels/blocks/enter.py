"""`enter`: one product of the tokens, (B, T, W), to the vectors and rates of every head in one launch, and back in one.

What is done with which columns is declared (`axes.kernels.blocks.plan`). The kernels and their mathematics are with
`axes.kernels.blocks.streams`. Nothing is kept for the backward but the arguments, without the product where all is
linear in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.blocks import streams as device
from axes.kernels.blocks.plan import Plan, read
from axes.kernels.common.layout import check_packing, layout, on_device

_PROCESSORS = 132


def _length(rows: int, blocks: int) -> int:
    """Tokens of a program: as many as leave some programs for every processor; a walk begins with what it waits for."""
    length = 128
    while length > 16 and rows * blocks < length * 12 * _PROCESSORS:
        length //= 2
    return length


# ---- launches --------------------------------------------------------------------------------------------------------


def _forward(
    p: Tensor, parameters: list[Tensor], tails: list[Tensor], cu: Tensor | None, text: str
) -> list[Tensor]:  # fmt: skip
    """Results of the parts, then new tails."""
    made, (b, t, _) = read(text), p.shape
    cut = layout(b, t, _length(b * t, made.blocks), cu)
    results = [p.new_empty(s, dtype=torch.float32 if wide else p.dtype) for s, wide in made.shapes(b, t)]
    ends = [p.new_empty(s) for s in made.tails(cut.units)]
    outs, others = made.over_results(results, ends)
    weights, biases = made.over_parameters(parameters)
    with on_device(p):
        device.enter[(cut.slots * made.blocks,)](
            p, outs, others, weights, biases, made.over_tails(tails), cut.offsets, cut.units_of_slots, t, cut.chunks,
            cut.chunk, W=made.width, PARTS=made.parts, BLOCKS=made.blocks, PACKED=cut.packed, num_warps=made.warps,
        )  # fmt: skip
    return [*results, *ends]


def _backward(
    p: Tensor | None, parameters: list[Tensor], tails: list[Tensor], cu: Tensor | None, dresults: list[Tensor],
    dends: list[Tensor], text: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the product, parameters and tails. p: None if all is linear in it.  dends: of new tails, or none."""
    made, dtails = read(text), [torch.empty_like(x) for x in tails]
    dp = _gradient_of_product(p, dresults, made)
    b, t, _ = dp.shape
    cut = layout(b, t, _length(b * t, made.blocks), cu)
    sums = dp.new_empty(cut.slots, made.sums, dtype=torch.float32)
    douts, dothers = made.over_results(dresults, dends)
    weights, biases = made.over_parameters(parameters)
    with on_device(dp):
        device.enter_backward[(cut.slots * made.blocks,)](
            p, douts, dothers, weights, biases, made.over_tails(tails), dp, made.over_tails(dtails), sums,
            cut.offsets, cut.units_of_slots, t, cut.chunks, cut.chunk,
            W=made.width, PARTS=made.parts, BLOCKS=made.blocks, SUMS=made.sums, PACKED=cut.packed, num_warps=made.warps,
        )  # fmt: skip
    if not parameters:
        return [dp, *dtails]
    total, kinds = sums.sum(0), {x.dtype for x in parameters}
    total = total.to(kinds.pop()) if len(kinds) == 1 else total
    each = total.split(made.parameters())
    return [dp, *[x.view(y.shape).to(y.dtype) for x, y in zip(each, parameters, strict=True)], *dtails]


def _gradient_of_product(p: Tensor | None, dresults: list[Tensor], made: Plan) -> Tensor:
    if p is not None:
        return torch.empty_like(p)
    like = next(x for x, (_, wide) in zip(dresults, made.shapes(1, 1), strict=True) if not wide)
    return like.new_empty(*like.shape[:2], made.width)


def _backward_apart(*inputs: Any) -> list[Tensor]:
    """`_backward`, no two of whose results share memory."""
    return [x.clone() if x._is_view() else x for x in _backward(*inputs)]


# ---- operators -------------------------------------------------------------------------------------------------------

_operator = torch.library.custom_op("axes::enter", _forward, mutates_args=())
_backward_operator = torch.library.custom_op(
    "axes::enter_backward",
    _backward_apart,
    mutates_args=(),
    schema="(Tensor? p, Tensor[] parameters, Tensor[] tails, Tensor? cu, Tensor[] dresults, Tensor[] dends, str text) "
    "-> Tensor[]",
)


@_operator.register_fake
def _(p, parameters, tails, cu, text):
    made, (b, t, _) = read(text), p.shape
    results = [p.new_empty(s, dtype=torch.float32 if wide else p.dtype) for s, wide in made.shapes(b, t)]
    return [*results, *[p.new_empty(s) for s in made.tails(b if cu is None else cu.shape[0] - 1)]]


@_backward_operator.register_fake
def _(p, parameters, tails, cu, dresults, dends, text):
    dp = _gradient_of_product(p, dresults, read(text))
    return [dp, *[torch.empty_like(x) for x in (*parameters, *tails)]]


def _keep(ctx, p, parameters, tails, cu, text, *, output) -> None:
    ctx.text, ctx.counts = text, (len(parameters), len(tails))
    ctx.like = [(x.shape, x.dtype) for x in output]
    ctx.save_for_backward(None if read(text).linear else p, *parameters, *tails, cu)
    ctx.set_materialize_grads(False)


def _gradients(ctx, grads, backward) -> tuple[Tensor | None, list[Any], list[Any]]:
    p, *rest, cu = ctx.saved_tensors
    n, m = ctx.counts
    results = read(ctx.text).results()
    if all(g is None for g in grads[results:]):
        grads = grads[:results]
    some = next((g for g in grads if g is not None), None)
    if some is None:
        return None, [None] * n, [None] * m
    full = [
        some.new_zeros(shape, dtype=dtype) if g is None else g.contiguous()
        for g, (shape, dtype) in zip(grads, ctx.like, strict=False)
    ]
    dp, *others = backward(p, rest[:n], rest[n:], cu, full[:results], full[results:], ctx.text)
    return dp, others[:n], others[n:]


def _differentiate(ctx, grads):
    return *_gradients(ctx, grads, _backward_operator), None, None


_operator.register_autograd(
    _differentiate, setup_context=lambda ctx, inputs, output: _keep(ctx, *inputs, output=output)
)


class _Eager(torch.autograd.Function):
    """The operator without its dispatch, which costs more than a small sequence."""

    @staticmethod
    def forward(ctx, p, cu, text, count, *tensors):
        parameters, tails = list(tensors[:count]), list(tensors[count:])
        output = _forward(p, parameters, tails, cu, text)
        _keep(ctx, p, parameters, tails, cu, text, output=output)
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        dp, dparameters, dtails = _gradients(ctx, grads, _backward)
        return dp, None, None, None, *dparameters, *dtails


def enter(
    p: Tensor, plan: Plan, parameters: Sequence[Tensor] = (), tails: Sequence[Tensor] = (),
    cu_seqlens: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Vectors (B, T, heads, width) in p's dtype and numbers (B, T, columns) in float32 of a product p (B, T, W).

    plan: what is declared of the columns.  parameters: of every stream the weights (channels, [1,] conv) and the bias
    (channels) that it has, then of every row of numbers the log rates ("ssm") and the bias (columns).  tails: of every
    stream with a convolution its last tokens (units, conv - 1, channels), or none at all for empty ones; as many come
    back, in p's dtype.  cu_seqlens: offsets 0, ..., T of packed sequences, with a tail each; else units are the batch.
    All of p, parameters and tails receive gradients, once.  Raises ShapeError on what does not fit.
    """
    who = "enter"
    if p.ndim != 3 or p.shape[-1] != plan.width or 0 in p.shape:
        raise ShapeError(f"{who}: the product is (B, T, {plan.width}) and not empty, not {tuple(p.shape)}")
    check_packing(who, p.shape[0], cu_seqlens, p.device)
    units = p.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if [x.numel() for x in parameters] != plan.parameters():
        raise ShapeError(f"{who}: parameters have {plan.parameters()} numbers, not {[x.numel() for x in parameters]}")
    if tails and [tuple(x.shape) for x in tails] != plan.tails(units):
        raise ShapeError(f"{who}: tails are {plan.tails(units)}, not {[tuple(x.shape) for x in tails]}")
    p, parameters, tails = p.contiguous(), [x.contiguous() for x in parameters], [x.contiguous() for x in tails]
    made: Sequence[Tensor]
    if torch.compiler.is_compiling() or type(p) is not Tensor:
        made = _operator(p, parameters, tails, cu_seqlens, plan.text)
    elif torch.is_grad_enabled() and any(x.requires_grad for x in (p, *parameters, *tails)):
        made = _Eager.apply(p, cu_seqlens, plan.text, len(parameters), *parameters, *tails)
    else:
        made = _forward(p, parameters, tails, cu_seqlens, plan.text)
    return list(made[: plan.results()]), list(made[plan.results() :])
