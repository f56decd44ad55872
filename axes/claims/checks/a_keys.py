"""Group A, keys and values: what a read and a write are as maps of the state, and how heads share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn.functional import scaled_dot_product_attention

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds
from axes.claims.tools.calculus import derivative
from axes.claims.tools.descent import randomised
from axes.claims.tools.float64 import eye, ones, zeros
from axes.claims.tools.matrices import column, rank, relative
from axes.claims.tools.tuples import DELTA, LINEAR, SOFTMAX, dispatched, layer_tuple, one_step, read, ridge_path
from axes.core.memory import List
from axes.sequence import SoftmaxAttention, UnnormalisedLinearAttention


@check
def A09(draw: Draw) -> Findings:
    d_v, d_k = draw.integer(3, 5), draw.integer(3, 5)
    s, q = draw.normal(d_v, d_k), draw.normal(d_k)
    y, printed = read(layer_tuple(DELTA), s, q), torch.kron(q[None], eye(d_v))
    yield agree("columns: (q^T x I) vec S", y, printed @ column(s), 1e-12)
    yield agree("rows: (I x q^T) vec S", y, torch.kron(eye(d_v), q[None]) @ s.flatten(), 1e-12)
    yield differ("rows with the printed matrix", y, printed @ s.flatten(), 0.02)


@check
def A10(draw: Draw) -> Findings:
    d_v, d_k = draw.integer(3, 5), draw.integer(3, 5)
    k, v = draw.normal(d_k), draw.normal(d_v)
    s = one_step(layer_tuple(LINEAR), zeros(d_v, d_k), k=k, v=v)
    yield agree("columns: k x v", column(s), torch.kron(k, v), 0.0)
    yield agree("rows: v x k", s.flatten(), torch.kron(v, k), 0.0)
    yield differ("rows against k x v", s.flatten(), torch.kron(k, v), 0.005)


@check
def A11(draw: Draw) -> Findings:
    d_v, d_k = draw.integer(2, 4), draw.integer(2, 5)
    s = draw.normal(d_v, d_k)

    def as_map(q: Tensor) -> Tensor:
        return derivative(lambda x: read(layer_tuple(DELTA), x, q), s).flatten()

    def write(k: Tensor, v: Tensor) -> Tensor:
        return one_step(layer_tuple(LINEAR), torch.zeros_like(s), k=k, v=v).flatten()

    reads = rank(torch.stack([as_map(draw.normal(d_k)) for _ in range(d_k + d_v + 2)]))
    writes = rank(torch.cat(jacobian(write, (draw.normal(d_k), draw.normal(d_v))), -1))
    span = rank(torch.stack([write(draw.normal(d_k), draw.normal(d_v)) for _ in range(d_v * d_k + 2)]))
    yield breaks("d_k + d_v less the dimension of the reads", d_k + d_v - reads, 1.0)
    yield agree("dimension of the reads less d_k", reads, d_k, 0.0)
    yield agree("dimension of the writes less d_k + d_v - 1", writes, d_k + d_v - 1, 0.0)
    yield agree("dimension that the writes span less d_v d_k", span, d_v * d_k, 0.0)
    yield agree("entries of a general read less d_v d_v d_k", as_map(draw.normal(d_k)).numel(), d_v * d_v * d_k, 0.0)


@check
def A12(draw: Draw) -> Findings:
    d, heads = 6, draw.integer(1, 3)
    layer = randomised(UnnormalisedLinearAttention(d, heads, 3, 4, dtype=torch.float64), draw)
    x, y, c = draw.normal(1, 1, d), draw.normal(1, 1, d), float(draw.uniform(low=-3.0, high=3.0))

    def f(token: Tensor) -> Tensor:
        return layer(token)[1].memory.theta[0].detach()

    yield agree("f(c x) against c^2 f(x)", f(c * x), c * c * f(x), 1e-11)
    yield agree("parallelogram identity", f(x + y) + f(x - y), 2 * f(x) + 2 * f(y), 1e-11)


@check
def A13(draw: Draw) -> Findings:
    d, d_v = draw.integer(2, 6), draw.integer(1, 4)
    keys = draw.conditioned(d, d, low=0.5, high=2.0)
    extra, values = draw.unit(1, d), draw.normal(d + 1, d_v)

    def error(k: Tensor, v: Tensor) -> float:
        s = ridge_path(k, v, 0.0)[-1]
        return max(gap(read(layer_tuple(DELTA), s, x), y) for x, y in zip(k, v, strict=True))

    # an error of size one along the combination of d + 1 keys that vanishes
    more = torch.cat((keys, extra))
    null = torch.linalg.svd(more)[0][:, -1]
    unmet = values - null[:, None] * (null @ values) + null[:, None]
    twice = torch.cat((keys, keys[:1]))
    yield holds("one pair", error(keys[:1], values[:1]), 1e-10)
    yield holds("d_k independent keys", error(keys, values[:d]), 1e-10)
    yield holds("a repeated key with the same value", error(twice, torch.cat((values[:d], values[:1]))), 1e-10)
    yield breaks("d_k + 1 keys", error(more, unmet), 0.1)
    yield breaks("a repeated key with another value", error(twice, torch.cat((values[:d], values[:1] + 1))), 0.1)


@check
def A14(draw: Draw) -> Findings:
    d, heads = 12, 3
    width = d // heads
    layer = randomised(SoftmaxAttention(d, heads, dtype=torch.float64), draw)
    module = randomised(nn.MultiheadAttention(d, heads, bias=False, batch_first=True, dtype=torch.float64), draw)
    with torch.no_grad():  # the map out of the heads is left out: it mixes them
        module.out_proj.weight.copy_(torch.eye(d))
        layer.get_parameter("around.o_proj.weight").copy_(torch.eye(d))

    def outside(f: Callable[[Tensor], Tensor]) -> tuple[Tensor, float]:
        dense = derivative(f, draw.normal(1, 1, d))
        return dense, relative(dense * torch.block_diag(*[ones(width, width)] * heads), dense)

    ours, share = outside(lambda x: layer(x)[0])
    theirs, share_torch = outside(lambda x: module(x, x, x, need_weights=False)[0])
    key_map, value_map = (layer.get_parameter(f"around.{x}_proj.weight") for x in "kv")
    k, v = draw.normal(7, heads, width), draw.normal(7, heads, width)
    memory = dispatched(layer_tuple(LINEAR), k=k, v=v)[1]
    yield breaks("share of a layer's value map outside the heads' slices", share, 0.5)
    yield breaks("the same share in torch's module", share_torch, 0.5)
    yield breaks("parameters of a projection less d d_h", key_map.numel() - d * width, 1.0)
    yield agree("a head's map against its rows of the projection", ours, value_map, 1e-12)
    yield agree("the same in torch's module", theirs, module.in_proj_weight[2 * d :], 1e-12)
    yield agree("parameters of a projection less d^2", key_map.numel(), d * d, 0.0)
    yield agree("numbers in the state less d d_h", memory.numel(), d * width, 0.0)


@check
def A15(draw: Draw) -> Findings:
    heads, width, n = draw.integer(1, 4), draw.integer(1, 5), draw.integer(1, 30)
    d = heads * width
    signal = {"k": draw.normal(n, d), "v": draw.normal(n, d), "q": draw.normal(n, d)}
    split = {name: x.unflatten(-1, (heads, width)) for name, x in signal.items()}
    out, states = dispatched(layer_tuple(LINEAR), **split)
    masked = dispatched(layer_tuple(LINEAR), **signal)[1] * torch.block_diag(*[ones(width, width)] * heads)
    read_off = masked @ signal["q"][-1]
    yield agree("last read of the heads against the masked memory", out[-1].flatten(), read_off, 1e-11)
    yield agree("states of the heads against the blocks", torch.block_diag(*states), masked, 1e-11)
    yield agree("numbers kept less d^2 / H", states.numel(), d * d / heads, 0.0)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Causal softmax attention (N, H, .) by the catalogue's tuple: outputs, and the keys that it keeps."""
    return dispatched(dataclasses.replace(layer_tuple(SOFTMAX), memory=List(scale)), q=q, k=k, v=v)


def by_torch(q: Tensor, k: Tensor, v: Tensor, grouped: bool = False) -> Tensor:
    """The same by torch's own attention."""
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)[0].transpose(0, 1)


@check
def A16(draw: Draw) -> Findings:
    d, heads, width, n = 8, draw.integer(1, 3), draw.integer(2, 4), draw.integer(2, 12)
    for latent in (3, d + 2):
        down, up, up_v = draw.normal(latent, d), draw.normal(heads, width, latent), draw.normal(heads, width, latent)
        x, q = draw.normal(n, d), draw.normal(n, heads, width)
        c = x @ down.mT
        k, v = (torch.einsum("hwl,nl->nhw", w, c) for w in (up, up_v))
        plain = by_torch(q, k, v)
        absorbed = torch.einsum("hwl,nhw->nhl", up, q)
        shared = c[:, None, :].expand(n, heads, latent)
        over, kept = attend(absorbed, shared, shared, width**-0.5)
        key_map, most = torch.cat(list(up)) @ down, min(latent, d, heads * width)
        yield agree(f"d_c = {latent}: attention over latents", torch.einsum("hwl,nhl->nhw", up_v, over), plain, 1e-10)
        yield agree(f"d_c = {latent}: rank of the key map less its bound", rank(key_map), most, 0.0)
        yield agree(f"d_c = {latent}: numbers kept a token less d_c", kept[0].numel() / n, latent, 0.0)


@check
def A17(draw: Draw) -> Findings:
    heads, width, n = 4, draw.integer(2, 4), draw.integer(3, 10)
    d = heads * width
    q = draw.normal(n, heads, width)
    for g in (1, 2, 4):
        k, v = draw.normal(n, heads // g, width), draw.normal(n, heads // g, width)
        native = by_torch(q, k, v, grouped=True)
        tied = attend(q, k.repeat_interleave(g, 1), v.repeat_interleave(g, 1))[0]
        yield agree(f"g = {g}: tied heads against grouped attention", tied, native, 1e-11)
        if g == 2:
            tiled = attend(q, k.repeat(1, g, 1), v.repeat(1, g, 1))[0]
            yield differ("groups of every second head", tiled, native, 0.1)
        # one key projection of a layer with H/g heads of the same width
        layer = SoftmaxAttention(d, heads // g, width, width)
        count = layer.get_parameter("around.k_proj.weight").numel()
        yield agree("parameters of a key projection less d d/g", count, d * d // g, 0.0)
        yield breaks("parameters over d d_h/g", count / (d * width / g), 2.0)
