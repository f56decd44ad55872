"""Group A, keys and values: what a read and a write are as maps of the state, and how heads share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn.functional import scaled_dot_product_attention

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds
from axes.claims.group_a_tools import layer_tuple, one_step, randomised
from axes.claims.sources import BLOG
from axes.core.geometry import Whiten
from axes.core.memory import List
from axes.core.state_update import Output, StateUpdate
from axes.routes import dispatch
from axes.sequence import SoftmaxAttention, UnnormalisedLinearAttention
from axes.sequence.predicted import RLSNet

_KEYS, _SPECTRUM = "Write, read, and the key-value abstraction", "The projection spectrum"
_LINEAR = "linear-attention-unnormalised"


def read(update: StateUpdate, s: Tensor, q: Tensor) -> Tensor:
    """What the tuple reads from a matrix."""
    return update.read(Output((s,)), q, {"q": q})


def column(s: Tensor) -> Tensor:
    """vec: the columns of a matrix one below the other."""
    return s.mT.flatten()


def additive(k: Tensor, v: Tensor) -> Tensor:
    """The state (..., d_v, d_k) that linear attention leaves after the pairs (B, N, [H,] .), by the fast route."""
    return dispatch.run(layer_tuple(_LINEAR), {"k": k, "v": v, "q": k}, time=1)[1].theta[0]


@claim(
    "A09",
    "Reading is linear in the state: S q = (q^T x I) vec S.",
    Verdict.CONDITIONAL,
    BLOG(_KEYS),
    "axes.sequence.DeltaNet",
    conditions="vec stacks columns; for rows, the order of torch's flatten, it is (I x q^T) vec S",
    derivation="vec(A X B) = (B^T x A) vec X for stacked columns, here with A = I and B = q.",
)
def A09(draw: Draw) -> tuple[Finding, ...]:
    d_v, d_k = draw.integer(3, 5), draw.integer(3, 5)
    s, q = draw.normal(d_v, d_k), draw.normal(d_k)
    y, eye = read(layer_tuple("delta-net"), s, q), torch.eye(d_v, dtype=torch.float64)
    return (
        holds("columns: (q^T x I) vec S", gap(y, torch.kron(q[None], eye) @ column(s)), 1e-12),
        holds("rows: (I x q^T) vec S", gap(y, torch.kron(eye, q[None]) @ s.flatten()), 1e-12),
        breaks("rows with the printed matrix", gap(y, torch.kron(q[None], eye) @ s.flatten()), 0.02),
    )


@claim(
    "A10",
    "Writing adds vec(v k^T) = k x v.",
    Verdict.CONDITIONAL,
    BLOG(_KEYS),
    "axes.sequence.UnnormalisedLinearAttention",
    conditions="vec stacks columns; for rows it is v x k",
    derivation="Column j of v k^T is k_j v. Row i is v_i k.",
)
def A10(draw: Draw) -> tuple[Finding, ...]:
    d_v, d_k = draw.integer(3, 5), draw.integer(3, 5)
    k, v = draw.normal(d_k), draw.normal(d_v)
    s = one_step(layer_tuple(_LINEAR), torch.zeros(d_v, d_k, dtype=torch.float64), k=k, v=v)
    return (
        holds("columns: k x v", gap(column(s), torch.kron(k, v)), 0.0),
        holds("rows: v x k", gap(s.flatten(), torch.kron(v, k)), 0.0),
        breaks("rows against k x v", gap(s.flatten(), torch.kron(k, v)), 0.005),
    )


def _rank(x: Tensor) -> int:
    return int(torch.linalg.matrix_rank(x, rtol=1e-9))


@claim(
    "A11",
    "A Kronecker-structured read has d_k + d_v parameters, by the table; d_k, by the text.",
    Verdict.FALSE,
    BLOG(_SPECTRUM + ", first row"),
    "axes.sequence.DeltaNet, axes.sequence.UnnormalisedLinearAttention",
    correction="a read has d_k parameters, the query; d_k + d_v numbers, key and value, make a rank-one write (one of "
    "them is a scale shared between the two); a general read has d_v d_v d_k",
    kind="NOTN",
    derivation="The maps q^T x I span a space of dimension d_k. The outer products v k^T are a manifold of dimension "
    "d_k + d_v - 1, since (c k, v / c) write the same, and span all d_v d_k dimensions.",
)
def A11(draw: Draw) -> tuple[Finding, ...]:
    d_v, d_k = draw.integer(2, 4), draw.integer(2, 5)
    s, update = draw.normal(d_v, d_k), layer_tuple("delta-net")

    def as_map(q: Tensor) -> Tensor:
        j = jacobian(lambda x: read(update, x, q), s)
        assert isinstance(j, Tensor)
        return j.flatten()

    def write(k: Tensor, v: Tensor) -> Tensor:
        return one_step(layer_tuple(_LINEAR), torch.zeros_like(s), k=k, v=v).flatten()

    reads = _rank(torch.stack([as_map(draw.normal(d_k)) for _ in range(d_k + d_v + 2)]))
    of_k, of_v = jacobian(write, (draw.normal(d_k), draw.normal(d_v)))
    writes = _rank(torch.cat((of_k, of_v), -1))
    span = _rank(torch.stack([write(draw.normal(d_k), draw.normal(d_v)) for _ in range(d_v * d_k + 2)]))
    return (
        breaks("d_k + d_v less the dimension of the reads", d_k + d_v - reads, 1.0),
        holds("dimension of the reads less d_k", abs(reads - d_k), 0.0),
        holds("dimension of the writes less d_k + d_v - 1", abs(writes - (d_k + d_v - 1)), 0.0),
        holds("dimension that the writes span less d_v d_k", abs(span - d_v * d_k), 0.0),
        holds(
            "entries of a general read less d_v d_v d_k", abs(as_map(draw.normal(d_k)).numel() - d_v * d_v * d_k), 0.0
        ),
    )


@claim(
    "A12",
    "With keys and values projected linearly from the same x, a write is quadratic in x.",
    Verdict.EXACT,
    BLOG(_KEYS),
    "axes.sequence.UnnormalisedLinearAttention",
    derivation="f(x) = (W_v x)(W_k x)^T is bilinear in (x, x): f(c x) = c^2 f(x), and f(x + y) + f(x - y) = 2 f(x) + "
    "2 f(y), which characterises quadratic maps. Normalised keys would leave degree one.",
)
def A12(draw: Draw) -> tuple[Finding, ...]:
    d, heads = 6, draw.integer(1, 3)
    layer = randomised(UnnormalisedLinearAttention(d, heads, 3, 4, dtype=torch.float64), draw)
    x, y, c = draw.normal(1, 1, d), draw.normal(1, 1, d), float(draw.uniform(low=-3.0, high=3.0))

    def f(token: Tensor) -> Tensor:
        return layer(token)[1].memory.theta[0].detach()

    return (
        holds("f(c x) against c^2 f(x)", gap(f(c * x), c * c * f(x)), 1e-11),
        holds("parallelogram identity", gap(f(x + y) + f(x - y), 2 * f(x) + 2 * f(y)), 1e-11),
    )


def least_squares(k: Tensor, v: Tensor) -> Tensor:
    """The matrix of least squared error on the pairs: recursive least squares without ridge."""
    h = RLSNet.update.h
    assert isinstance(h, Whiten)
    update = dataclasses.replace(RLSNet.update, h=dataclasses.replace(h, eps=0.0))
    zero, one = torch.zeros_like(k[:, 0]), torch.ones_like(k[:, 0])
    state, out = None, Output(())
    for i in range(k.shape[0]):
        datum = {"k": k[i], "v": v[i], "decay": zero[i], "beta": one[i]}
        state, out = update.step(update.init(datum) if state is None else state, datum)
    return out.weights[0]


@claim(
    "A13",
    "A matrix state stores up to d_k associations.",
    Verdict.CONDITIONAL,
    BLOG(_KEYS),
    "axes.sequence.predicted.RLSNet",
    conditions="the keys are linearly independent, or dependent keys carry equally dependent values",
    derivation="S k_i = v_i is solvable for all values iff the keys are independent, so N <= d_k. A repeated key is "
    "harmless with the same value and impossible with another.",
)
def A13(draw: Draw) -> tuple[Finding, ...]:
    d, d_v = draw.integer(2, 6), draw.integer(1, 4)
    keys = draw.orthogonal(d) @ torch.diag(draw.uniform(d, low=0.5, high=2.0)) @ draw.orthogonal(d)
    extra, values = draw.unit(1, d), draw.normal(d + 1, d_v)

    def error(k: Tensor, v: Tensor) -> float:
        s = least_squares(k, v)
        return max(gap(read(layer_tuple("delta-net"), s, x), y) for x, y in zip(k, v, strict=True))

    # an error of size one along the combination of d + 1 keys that vanishes
    more = torch.cat((keys, extra))
    null = torch.linalg.svd(more)[0][:, -1]
    unmet = values - null[:, None] * (null @ values) + null[:, None]
    twice = torch.cat((keys, keys[:1]))
    return (
        holds("one pair", error(keys[:1], values[:1]), 1e-10),
        holds("d_k independent keys", error(keys, values[:d]), 1e-10),
        holds("a repeated key with the same value", error(twice, torch.cat((values[:d], values[:1]))), 1e-10),
        breaks("d_k + 1 keys", error(more, unmet), 0.1),
        breaks("a repeated key with another value", error(twice, torch.cat((values[:d], values[:1] + 1))), 0.1),
    )


@claim(
    "A14",
    "Multi-head attention projects with block-diagonal matrices: every head sees its own slice of the residual stream.",
    Verdict.FALSE,
    BLOG(_SPECTRUM + ", multi-head attention"),
    "axes.sequence.SoftmaxAttention",
    correction="every head projects the whole stream: the stacked projection is a dense d x d matrix with d^2 "
    "parameters instead of d d_h; what is block-diagonal is the state",
    kind="MATH",
    derivation="Head h has a d_h x d matrix of its own. For one token attention returns that token's value, so the "
    "derivative of a head's output in x is its value projection: it has no zero outside the slice.",
)
def A14(draw: Draw) -> tuple[Finding, ...]:
    d, heads = 12, 3
    width = d // heads
    layer = randomised(SoftmaxAttention(d, heads, dtype=torch.float64), draw)
    module = randomised(nn.MultiheadAttention(d, heads, bias=False, batch_first=True, dtype=torch.float64), draw)
    with torch.no_grad():  # the map out of the heads is left out: it mixes them
        module.out_proj.weight.copy_(torch.eye(d))
        layer.get_parameter("around.o_proj.weight").copy_(torch.eye(d))

    def outside(f: Callable[[Tensor], Tensor]) -> tuple[Tensor, float]:
        j = jacobian(f, draw.normal(1, 1, d))
        assert isinstance(j, Tensor)
        dense = j.reshape(d, d)
        slices = torch.block_diag(*[torch.ones(width, width, dtype=dense.dtype)] * heads)
        return dense, float((dense * (1 - slices)).norm() / dense.norm())

    ours, share = outside(lambda x: layer(x)[0])
    theirs, share_torch = outside(lambda x: module(x, x, x, need_weights=False)[0])
    printed = d * width
    k = draw.normal(1, 7, heads, width)
    memory = additive(k, draw.normal(1, 7, heads, width))
    return (
        breaks("share of a layer's value map outside the heads' slices", share, 0.5),
        breaks("the same share in torch's module", share_torch, 0.5),
        breaks(
            "parameters of a projection less d d_h", layer.get_parameter("around.k_proj.weight").numel() - printed, 1.0
        ),
        holds(
            "a head's map against its rows of the projection",
            gap(ours, layer.get_parameter("around.v_proj.weight")),
            1e-12,
        ),
        holds("the same in torch's module", gap(theirs, module.in_proj_weight[2 * d :]), 1e-12),
        holds("parameters of a projection less d^2", layer.get_parameter("around.k_proj.weight").numel() - d * d, 0.0),
        holds("numbers in the state less d d_h", abs(memory.numel() - printed), 0.0),
    )


@claim(
    "A15",
    "Multi-head linear attention is one d x d memory from which all but H diagonal blocks are erased.",
    Verdict.EXACT,
    BLOG("Multi-head: block-diagonal memory"),
    "axes.sequence.UnnormalisedLinearAttention",
    derivation="Block (h, h) of V^T K is V_h^T K_h, head h's state; heads concatenated are the masked matrix on the "
    "whole query. H d_h^2 = d^2 / H numbers remain.",
)
def A15(draw: Draw) -> tuple[Finding, ...]:
    heads, width, n = draw.integer(1, 4), draw.integer(1, 5), draw.integer(1, 30)
    d = heads * width
    k, v, q = draw.normal(1, n, d), draw.normal(1, n, d), draw.normal(1, n, d)
    signal = {"k": k, "v": v, "q": q}
    split = {name: x.unflatten(-1, (heads, width)) for name, x in signal.items()}
    out, state = dispatch.run(layer_tuple(_LINEAR), split, time=1)
    mask = torch.block_diag(*[torch.ones(width, width, dtype=torch.float64)] * heads)
    masked = additive(k, v)[0] * mask
    return (
        holds("last read of the heads against the masked memory", gap(out[0, -1].flatten(), masked @ q[0, -1]), 1e-11),
        holds("states of the heads against the blocks", gap(torch.block_diag(*state.theta[0][0]), masked), 1e-11),
        holds("numbers kept less d^2 / H", abs(state.theta[0].numel() - d * d / heads), 0.0),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Causal softmax attention (B, N, H, .) by the catalogue's tuple: outputs, and the keys that it keeps."""
    update = dataclasses.replace(layer_tuple("softmax-attention"), memory=List(scale))
    out, state = dispatch.run(update, {"q": q, "k": k, "v": v}, time=1)
    return out, state.theta[0]


@claim(
    "A16",
    "Latent attention's key map W_U W_D has rank at most d_c, and only d_c numbers a token need to be kept.",
    Verdict.EXACT,
    BLOG(_SPECTRUM + ", MLA"),
    "axes.sequence.SoftmaxAttention",
    derivation="q_h . (W_U W_D x) = (W_U^T q_h) . (W_D x): all heads can attend to the latent W_D x with absorbed "
    "queries, and the value map, being linear, can be applied after the average.",
)
def A16(draw: Draw) -> tuple[Finding, ...]:
    d, heads, width, n = 8, draw.integer(1, 3), draw.integer(2, 4), draw.integer(2, 12)
    findings = []
    for latent in (3, d + 2):
        down, up, up_v = draw.normal(latent, d), draw.normal(heads, width, latent), draw.normal(heads, width, latent)
        x, q = draw.normal(1, n, d), draw.normal(1, n, heads, width)
        c = x @ down.mT
        k, v = (torch.einsum("hwl,bnl->bhnw", w, c) for w in (up, up_v))
        plain = scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)
        absorbed = torch.einsum("hwl,bnhw->bnhl", up, q)
        shared = c[..., None, :].expand(1, n, heads, latent)
        over, kept = attend(absorbed, shared, shared, width**-0.5)
        rank, most = _rank(torch.cat(list(up)) @ down), min(latent, d, heads * width)
        findings += [
            holds(
                f"d_c = {latent}: attention over latents", gap(torch.einsum("hwl,bnhl->bnhw", up_v, over), plain), 1e-10
            ),
            holds(f"d_c = {latent}: rank of the key map less its bound", abs(rank - most), 0.0),
            holds(f"d_c = {latent}: numbers kept a token less d_c", abs(kept[:, 0].numel() / n - latent), 0.0),
        ]
    return tuple(findings)


@claim(
    "A17",
    "Grouped queries with H/g key-value heads lie between multi-head (g = 1) and multi-query attention (g = H).",
    Verdict.CONDITIONAL,
    BLOG(_SPECTRUM + ", GQA"),
    "axes.sequence.SoftmaxAttention",
    conditions="consecutive heads form a group, and the projections read the whole stream: d d/g parameters, not d "
    "d_h/g",
    derivation="Repeating each key-value head g times ties the heads of a group. Another order of the repetition "
    "pairs queries with other groups. A count with d_h inputs would need the sliced projections of A14.",
)
def A17(draw: Draw) -> tuple[Finding, ...]:
    heads, width, n = 4, draw.integer(2, 4), draw.integer(3, 10)
    d = heads * width
    q, findings = draw.normal(1, n, heads, width), []
    for g in (1, 2, 4):
        k, v = draw.normal(1, n, heads // g, width), draw.normal(1, n, heads // g, width)
        native = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        ).transpose(1, 2)
        tied = attend(q, k.repeat_interleave(g, 2), v.repeat_interleave(g, 2))[0]
        findings.append(holds(f"g = {g}: tied heads against grouped attention", gap(tied, native), 1e-11))
        if g == 2:
            tiled = attend(q, k.repeat(1, 1, g, 1), v.repeat(1, 1, g, 1))[0]
            findings.append(breaks("groups of every second head", gap(tiled, native), 0.1))
        # one key projection of a layer with H/g heads of the same width
        layer = SoftmaxAttention(d, heads // g, width, width)
        count = layer.get_parameter("around.k_proj.weight").numel()
        findings.append(holds("parameters of a key projection less d d/g", abs(count - d * d // g), 0.0))
        findings.append(breaks("parameters over d d_h/g", count / (d * width / g), 2.0))
    return tuple(findings)
