"""Who computes a depth mixer's read and write of one sublayer: ours, plain torch as others write it, and kernels.

Plain forms are independent of ours: the formulas of the papers on the parameters of our mixer, in the dtype of the
streams as in the code that is named, so that every number and gradient can be checked against the mixer in float64.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from axes.core.state_update import State
from axes.depth.base import DepthMixer
from axes.errors import AxesError

OURS, STACKED, REFERENCE, COMPILED = "axes", "axes, in a stack", "axes, reference", "axes, compiled"
TORCH, LUCIDRAINS, HUGGING_FACE = "torch", "torch, as lucidrains", "torch, as Hugging Face"
LIGER, ENGINE, FLA = "Liger", "TransformerEngine", "fla"
WHO = (OURS, STACKED, TORCH, LUCIDRAINS, HUGGING_FACE, LIGER, ENGINE, FLA, REFERENCE, COMPILED)
DEFAULT_WHO = WHO[:-2]
_EPS = 1e-6
_SWEEPS = 20  # of Sinkhorn

Parameters = Mapping[str, Tensor]
Run = Callable[[Any, Tensor], tuple[Tensor, Any]]  # (streams, y) -> (x, new streams)


def _same(values: Any) -> Any:
    return values


@final
@dataclass(frozen=True)
class Form:
    """One sublayer's read and write: x before it, and the new streams once its output y is there.

    parameters: what gradients are taken of.  enter, leave: from and to the streams (B, T, rows, width) for those who
    keep them otherwise.  named: gradients of `parameters` under the mixer's names and shapes.
    """

    run: Run
    parameters: Parameters
    enter: Callable[[Tensor], Any] = _same
    leave: Callable[[Any], Tensor] = _same
    named: Callable[[dict[str, Tensor]], dict[str, Tensor]] = _same
    exact: Callable[[DepthMixer, torch.dtype], Form] | None = None


Make = Callable[[DepthMixer, torch.dtype], Form]


def contenders(mixer: str, who: tuple[str, ...]) -> dict[str, Make]:
    """Those of the names that compute this mixer."""
    every = {OURS: ours, STACKED: stacked, **_FORMS.get(mixer, {}), REFERENCE: _reference, COMPILED: _compiled}
    return {name: every[name] for name in who if name in every}


def tensors(streams: Any) -> list[Tensor]:
    """The tensors with gradients of streams, however they are kept."""
    return [x for x in tree_leaves(streams) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1]


# ---- ours ------------------------------------------------------------------------------------------------------------


def ours(mixer: DepthMixer, dtype: torch.dtype) -> Form:
    """`read` and `write` as they come."""

    def run(streams: Any, y: Tensor) -> tuple[Tensor, Any]:
        x, coefficients = mixer.read(streams)
        return x, mixer.write(streams, y, coefficients)

    return Form(run, dict(mixer.named_parameters()), lambda values: _entered(mixer, values), _values)


def stacked(mixer: DepthMixer, dtype: torch.dtype) -> Form:
    """The write and the next sublayer's read, as `through` calls them; coefficients are part of what is handed on."""

    def enter(values: Tensor) -> Any:
        streams = _entered(mixer, values)
        return streams, mixer.read(streams)[1]._replace(read=None)

    def run(streams: Any, y: Tensor) -> tuple[Tensor, Any]:
        after, x, coefficients = mixer.write_then_read(streams[0], y, streams[1], mixer)
        return x, (after, coefficients._replace(read=None))

    return Form(run, dict(mixer.named_parameters()), enter, lambda streams: _values(streams[0]), exact=stacked)


def _reference(mixer: DepthMixer, dtype: torch.dtype) -> Form:
    """Ours without kernels, where there are any."""
    setattr(mixer, "implementation", "reference")  # noqa: B010
    return ours(mixer, dtype)


def _compiled(mixer: DepthMixer, dtype: torch.dtype) -> Form:
    form = ours(mixer, dtype)
    read: Any = torch.compile(mixer.read, dynamic=False)
    write: Any = torch.compile(mixer.write, dynamic=False)

    def run(streams: Any, y: Tensor) -> tuple[Tensor, Any]:  # a sublayer stands between the two
        x, coefficients = read(streams)
        return x, write(streams, y, coefficients)

    return Form(run, form.parameters, form.enter, form.leave)


def _entered(mixer: DepthMixer, values: Tensor) -> Any:
    """Streams with these values, as this mixer hands them on."""
    first = values[..., : mixer.fractions, :].flatten(-2)
    entered = mixer.expand(first)
    if not isinstance(entered, State):
        return values
    if mixer.update.parts().memory.kind != "list":
        return entered._replace(theta=(values.mT.to(entered.theta[0].dtype),))
    for index in range(1, values.shape[-2]):
        entered = mixer.write(entered, values[..., index, :], mixer.read(entered)[1])
    return entered


def _values(streams: Any) -> Tensor:
    if not isinstance(streams, State):
        kept: Tensor = streams
        return kept
    return streams.theta[1] if len(streams.theta) > 1 else streams.theta[0].mT


# ---- plain torch -----------------------------------------------------------------------------------------------------


def _plain(build: Callable[[Any], Run]) -> Make:
    return lambda mixer, dtype: Form(build(mixer), dict(mixer.named_parameters()))


def _folded(build: Callable[[Any], Run]) -> Make:
    """Streams folded into the batch, (n B, T, d): a sublayer without hyper-connections sees them as they are."""

    def make(mixer: Any, dtype: torch.dtype) -> Form:
        inner, n = build(mixer), mixer.streams

        def enter(x: Tensor) -> Tensor:
            return x.movedim(-2, 0).flatten(0, 1).contiguous()

        def leave(x: Tensor) -> Tensor:
            return x.unflatten(0, (n, -1)).movedim(0, -2)

        def run(folded: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x, new = inner(leave(folded), y)
            return x, enter(new)

        return Form(run, dict(mixer.named_parameters()), enter, leave)

    return make


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=_EPS)


def _residual(m: Any) -> Run:
    return lambda h, y: (h[..., 0, :], h + y[..., None, :])


def _pre_norm(m: Any) -> Run:
    return lambda h, y: (F.rms_norm(h[..., 0, :], h.shape[-1:]), h + y[..., None, :])


def _post_norm(m: Any) -> Run:
    return lambda h, y: (h[..., 0, :], F.rms_norm(h + y[..., None, :], h.shape[-1:]))


def _hyper(m: Any) -> Run:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pre, post, mix = (w.to(x.dtype) for w in (m.pre, m.post, m.rates["mix"]))
        seen = torch.einsum("n,...nd->...d", pre, x)
        return seen, torch.einsum("ij,...jd->...id", mix, x) + post[:, None] * y[..., None, :]

    return run


def _dynamic(m: Any) -> Run:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        moved = torch.tanh(_norm(x) @ m.phi.to(x.dtype).mT)
        a, b = m.scale
        pre = moved[..., 0] * a + m.pre
        post = moved[..., 1] * b + m.post
        mix = (moved[..., 2:] * a).mT + m.mix
        seen = torch.einsum("...n,...nd->...d", pre.to(x.dtype), x)
        kept = torch.einsum("...ij,...jd->...id", mix.to(x.dtype), x)
        return seen, kept + post.to(x.dtype)[..., None] * y[..., None, :]

    return run


def _projected(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Logits of mHC as DeepSeek's code has them: the norm's scale after the product, all in float32."""
    flat = x.flatten(-2).float()
    mixes = F.linear(flat, m.phi.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + _EPS)
    parts = zip(mixes.split(m.sizes, -1), m.alpha, m.bias.split(m.sizes), strict=True)
    return tuple(part * scale + base for part, scale, base in parts)


def _applied(x: Tensor, y: Tensor, pre: Tensor, post: Tensor, mix: Tensor | None) -> tuple[Tensor, Tensor]:
    seen = (pre[..., None] * x).sum(-2).to(x.dtype)
    kept = x if mix is None else mix.to(x.dtype) @ x
    return seen, kept + (post[..., None] * y[..., None, :]).to(x.dtype)


def _sigmoids(m: Any, mixing: Callable[[Tensor], Tensor] | None) -> Run:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pre, post, *mix = _projected(m, x)
        found = mixing(mix[0]) if mixing is not None else None
        return _applied(x, y, torch.sigmoid(pre), 2 * torch.sigmoid(post), found)

    return run


def _sinkhorn(logits: Tensor) -> Tensor:
    """In turns of rows and columns, as the model's code of DeepSeek-V4 in transformers."""
    mix = _square(logits).softmax(-1) + _EPS
    mix = mix / (mix.sum(-2, keepdim=True) + _EPS)
    for _ in range(_SWEEPS - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + _EPS)
        mix = mix / (mix.sum(-2, keepdim=True) + _EPS)
    return mix


def _log_sinkhorn(logits: Tensor) -> Tensor:
    """The same in logarithms, as hyper-connections of lucidrains."""
    mix = _square(logits)
    for _ in range(_SWEEPS):
        mix = mix - mix.logsumexp(-2, keepdim=True)
        mix = mix - mix.logsumexp(-1, keepdim=True)
    return mix.exp()


def _square(logits: Tensor) -> Tensor:
    return logits.unflatten(-1, (math.isqrt(logits.shape[-1]), -1))


def _permuted(logits: Tensor) -> Tensor:
    """Weights of all n! permutations, in the order of their words, times a table of them."""
    n = next(n for n in range(2, 12) if math.factorial(n) == logits.shape[-1])
    orders = torch.tensor(list(itertools.permutations(range(n))), device=logits.device)
    table = F.one_hot(orders, n).to(logits.dtype)
    return torch.einsum("...p,pij->...ij", logits.softmax(-1), table)


def _cayley(logits: Tensor) -> Tensor:
    return _rotation(0.05 * (logits.mT - logits))  # alpha / 2


def _rotation(skew: Tensor) -> Tensor:
    eye = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    return torch.linalg.solve(eye + skew, eye - skew)


def _fixed_mean(logits: Tensor) -> Tensor:
    n = logits.shape[-1]
    apart = torch.eye(n, dtype=logits.dtype, device=logits.device) - 1 / n
    inside = torch.linalg.qr(apart[:, 1:])[0]  # any orthonormal basis of the complement of the ones
    rotated = _rotation(inside.mT @ (0.05 * (logits.mT - logits)) @ inside)
    return inside @ rotated @ inside.mT + 1 / n


def _orthogonal(m: Any, mixing: Callable[[Tensor], Tensor]) -> Run:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(-2).float()
        logits = F.linear(F.layer_norm(flat, flat.shape[-1:], eps=_EPS), m.phi.float(), m.bias.float())
        read, write, mix = logits.unflatten(-1, (3, m.streams, m.streams)).unbind(-3)
        return _applied(x, y, read.softmax(-1).mean(-2), write.softmax(-2).sum(-1), mixing(mix))

    return run


def _fractions(m: Any) -> Run:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        read, mix, post = (w.to(x.dtype) for w in (m.read_weights, m.mix, m.post))
        return (read.mT @ x).flatten(-2), post[:, None] * y.unflatten(-1, x.shape[-2:]) + mix.mT @ x

    return run


def _matrix(m: Any) -> Run:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        normed = F.rms_norm(x, x.shape[-2:])
        seen = (m.pre.to(x.dtype) @ normed).flatten(-2)
        return seen, x + m.post.to(x.dtype).mT @ y.unflatten(-1, (m.fractions, -1))

    return run


def _attended(sources: Tensor, query: Tensor) -> Tensor:
    weights = (_norm(sources) @ query.to(sources.dtype)).softmax(-1)
    return torch.einsum("...n,...nd->...d", weights, sources)


def _attention(m: Any) -> Run:
    return lambda x, y: (_attended(x, m.query), torch.cat((x, y[..., None, :]), -2))


def _blocks(m: Any) -> Run:
    return lambda x, y: (_attended(x[..., : m.live, :], m.query), _added(x, y, m.target))


def _dense(m: Any) -> Run:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("n,...nd->...d", m.pre.to(x.dtype), x[..., : m.target, :]), _added(x, y, m.target)

    return run


def _predicted(m: Any) -> Run:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        sources = x[..., : m.target, :]
        hidden = F.gelu(F.linear(_norm(sources[..., -1, :]), m.down.to(x.dtype)))
        weights = F.linear(hidden, m.up.to(x.dtype), m.pre.to(x.dtype))
        return torch.einsum("...n,...nd->...d", weights, sources), _added(x, y, m.target)

    return run


def _delta(m: Any) -> Run:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pre, gate, target, at, base = (w.to(x.dtype) for w in (m.pre, m.gate, m.target, m.gate_bias, m.target_bias))
        seen = torch.einsum("n,...nd->...d", pre, x)
        beta = 2 * torch.sigmoid(_norm(seen) @ gate + at)
        wanted = 4 * torch.sigmoid(F.linear(seen, target, base))
        along = F.normalize(y, dim=-1)
        missing = wanted - torch.einsum("...nd,...d->...n", x, along)
        return seen, x + (beta[..., None] * missing)[..., None] * along[..., None, :]

    return run


def _added(x: Tensor, y: Tensor, target: int) -> Tensor:
    new = x.clone()
    new[..., target, :] += y
    return new


# ---- kernels of others -----------------------------------------------------------------------------------------------


def library(package: str, module: str, device: torch.device) -> Any:
    """A package whose kernels need a GPU, or AxesError why it cannot be here."""
    if importlib.util.find_spec(package) is None:
        raise AxesError("not installed")
    if device.type != "cuda":
        raise AxesError("needs a GPU")
    return importlib.import_module(module)


def _leaf(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.detach().to(dtype or x.dtype).contiguous().clone().requires_grad_()


def _liger(mixer: DepthMixer, dtype: torch.dtype) -> Form:
    """LigerMHC's three operators: phi (n d, 2 n + n n) in 16 bits for the tensor cores, one alpha each."""
    m: Any = mixer
    ops = library("liger_kernel", "liger_kernel.transformers.functional", m.phi.device)
    parameters = {"phi": _leaf(m.phi.mT, dtype), "bias": _leaf(m.bias)}
    parameters |= {f"alpha{i}": _leaf(a) for i, a in enumerate(m.alpha)}
    options = {"allow_fp32": dtype == torch.float32, "tmax": _SWEEPS, "rms_eps": _EPS, "post_mult": 2.0}

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pre, post, mix = ops.liger_mhc_coeffs(x, *parameters.values(), pre_eps=0.0, sinkhorn_eps=_EPS, **options)
        return ops.liger_mhc_pre(x, pre), ops.liger_mhc_post_res(x, y, post, mix)

    def named(g: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"phi": g["phi"].mT, "bias": g["bias"], "alpha": torch.stack([g[f"alpha{i}"] for i in range(3)])}

    return Form(run, parameters, named=named)


def _engine(mixer: DepthMixer, dtype: torch.dtype) -> Form:
    """TransformerEngine's five operators: streams (s, b, d, n), and R transposed, for its x @ R. Four streams."""
    m: Any = mixer
    ops = library("transformer_engine", "transformer_engine.pytorch.triton.mhc", m.phi.device)
    n, d = m.streams, m.d_model
    if n != 4:
        raise AxesError("its operators are for four streams")

    def theirs(x: Tensor) -> Tensor:  # rows of outputs: those of R transposed
        return torch.cat((x[: 2 * n], x[2 * n :].unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)))

    phi = theirs(m.phi).unflatten(-1, (n, d)).mT.flatten(-2)
    parameters = {"phi": _leaf(phi, dtype), "alpha": _leaf(m.alpha), "bias": _leaf(theirs(m.bias)[None])}

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        lead = x.shape[:2]
        logits, square = ops.mhc_fused_projection(x.reshape(-1, d * n), parameters["phi"])
        pre, post, mix = ops.mhc_fused_scale(logits, parameters["alpha"], parameters["bias"], square, n)
        mix = ops.mhc_fused_sinkhorn(mix.reshape(*lead, n, n), n, True, _SWEEPS)
        seen = ops.mhc_fused_aggregate(x, pre.reshape(*lead, n), n)
        return seen, ops.mhc_fused_expand_combine(y, None, post.reshape(*lead, n), x, mix, n)

    def named(g: dict[str, Tensor]) -> dict[str, Tensor]:
        back = theirs(g["phi"]).unflatten(-1, (d, n)).mT.flatten(-2)
        return {"phi": back, "alpha": g["alpha"], "bias": theirs(g["bias"][0])}

    return Form(run, parameters, lambda x: x.mT.contiguous(), lambda x: x.mT, named)


def _fla(mixer: DepthMixer, dtype: torch.dtype) -> Form:
    """flash-linear-attention's fused attention over a list of sources; what is written is one more of them."""
    m: Any = mixer
    ops = library("fla", "fla.ops.attnres", m.query.device)
    parameters = {"query": _leaf(m.query, dtype)}
    gain = torch.ones_like(parameters["query"])

    def run(x: tuple[Tensor, ...], y: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return ops.fused_attnres(parameters["query"], list(x), gain, rms_eps=_EPS), (*x, y)

    return Form(
        run, parameters, lambda x: tuple(part.contiguous() for part in x.unbind(-2)), lambda x: torch.stack(x, -2)
    )


_FORMS: dict[str, dict[str, Make]] = {
    "residual": {TORCH: _plain(_residual)},
    "pre-norm": {TORCH: _plain(_pre_norm)},
    "post-norm": {TORCH: _plain(_post_norm)},
    "hyper-connections": {TORCH: _plain(_hyper), LUCIDRAINS: _folded(_hyper)},
    "dynamic-hyper-connections": {TORCH: _plain(_dynamic), LUCIDRAINS: _folded(_dynamic)},
    "mhc": {
        HUGGING_FACE: _plain(lambda m: _sigmoids(m, _sinkhorn)),
        LUCIDRAINS: _folded(lambda m: _sigmoids(m, _log_sinkhorn)),
        LIGER: _liger,
        ENGINE: _engine,
    },
    "mhc-lite": {TORCH: _plain(lambda m: _sigmoids(m, _permuted))},
    "ihc": {TORCH: _plain(lambda m: _sigmoids(m, None))},
    "jpmhc": {TORCH: _plain(lambda m: _orthogonal(m, _cayley))},
    "jpmhc-mean-preserving": {TORCH: _plain(lambda m: _orthogonal(m, _fixed_mean))},
    "frac-connections": {TORCH: _plain(_fractions)},
    "residual-matrix": {TORCH: _plain(_matrix)},
    "attention-residuals": {TORCH: _plain(_attention), FLA: _fla},
    "block-attention-residuals": {TORCH: _plain(_blocks)},
    "denseformer": {TORCH: _plain(_dense)},
    "dynamic-dense": {TORCH: _plain(_predicted)},
    "deep-delta": {TORCH: _plain(_delta)},
}
