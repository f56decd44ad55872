"""Our operators behind the names of flash-linear-attention and of transformers' own copies of them.

    with accelerate() as ours:      # or: ours = accelerate(); ...; ours.undo()
        model(tokens)
    print(ours)                     # what was replaced, what was computed, what was passed on and why

A name stands for the same function with the same arguments: gates g are logs, states are (N, H, K, V) in float32,
queries are scaled by K^(-1/2) unless `scale` is given. A call with an argument that has no meaning here goes to the
original, with a warning that says which; each is counted. Numbers are those of the recurrence's tuple, by whatever
`axes.dispatch.select` picks; on a GPU only where that is a kernel.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from axes.core.costs import Alignment
from axes.core.monoids import Scalar
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError
from axes.kernels.common import versions
from axes.kernels.common.repeated import repeated
from axes.routes import dispatch
from axes.routes.choice import require_implementation
from axes.sequence import (
    GLA,
    IPLR,
    KDA,
    RWKV7,
    DeltaNet,
    FoX,
    GatedDeltaNet,
    UnnormalisedLinearAttention,
)

_GATED = StateUpdate(Alignment(), monoid=Scalar("decay"))
_LIST = "list"


class PassedOn(UserWarning):
    """A call that the original computes."""


class _Cannot(Exception):
    """Why a call is the original's."""


# ---- what a call means -----------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A tuple and its signal, each (B, T, H, ...); the output alone where a state has no meaning to the caller."""

    update: StateUpdate
    signal: dict[str, Tensor]
    alone: bool = False


Given = Mapping[str, Any]  # arguments by name, defaults among them


def _wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _beta(a: Given) -> Tensor:
    beta = a.get("beta")
    if beta is None:
        return torch.ones_like(a["k"][..., 0])
    if beta.ndim != 3:
        raise _Cannot("beta has a number for every value entry")
    if a.get("allow_neg_eigval") and not a.get("use_beta_sigmoid_in_kernel"):
        raise _Cannot("allow_neg_eigval is given without use_beta_sigmoid_in_kernel")
    if a.get("use_beta_sigmoid_in_kernel"):
        beta = _wide(beta).sigmoid() * (2.0 if a.get("allow_neg_eigval") else 1.0)
    return beta


def _delta(a: Given) -> Call:
    return Call(DeltaNet.update, {"beta": _beta(a)})


def _gated_delta(a: Given) -> Call:
    if a.get("g") is None:
        return _delta(a)
    return Call(GatedDeltaNet.update, {"decay": a["g"], "beta": _beta(a)})


def _kda(a: Given) -> Call:
    return Call(KDA.update, {"decay": a["g"], "beta": _beta(a)})


def _linear(a: Given) -> Call:
    return Call(UnnormalisedLinearAttention.update, {})


def _gla(a: Given) -> Call:
    gate = a.get("g", a.get("gk"))
    return _linear(a) if gate is None else Call(GLA.update, {"decay": gate})


def _simple_gla(a: Given) -> Call:
    gate, fixed = a.get("g"), a.get("g_gamma")
    if gate is None and fixed is None:
        return _linear(a)
    logs = [_wide(x) for x in (gate, fixed) if x is not None]
    return Call(_GATED, {"decay": sum(logs[1:], logs[0]).expand(a["v"].shape[:3])})


def _retention(a: Given) -> Call:
    q = a["q"]
    heads = torch.arange(q.shape[2], device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
    return Call(_GATED, {"decay": torch.log1p(-torch.exp2(-5 - heads)).expand(q.shape[:3])})


def _dplr(a: Given) -> Call:
    return Call(RWKV7.update, {"decay": a["w"] if "w" in a else a["gk"], "a": a["a"], "b": a["b"]})


def _iplr(a: Given) -> Call:
    return Call(IPLR.update, {"a": a["a"], "b": a["b"]})


def _forgetting(a: Given) -> Call:
    if a["q"].shape[2] != a["k"].shape[2]:
        raise _Cannot("several heads of queries read one list")
    return Call(FoX.update, {"forget": a["g"]}, alone=True)


# ---- names -----------------------------------------------------------------------------------------------------------

_COMMON = ("q", "k", "v", "scale", "initial_state", "output_final_state", "state_v_first", "cu_seqlens")
_DELTA = ("beta", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
_NO_MATTER = ("cu_seqlens_cpu", "chunk_indices", "chunk_size", "disable_recompute", "use_graph", "max_num_seqs")


@final
@dataclass(frozen=True)
class Entry:
    """A name and what it computes. takes: arguments with a meaning here beside the common ones, those without one.
    copy: in torch, of transformers: what else is given changes nothing, and on a CPU it is faster than ours."""

    name: str
    means: Callable[[Given], Call]
    takes: tuple[str, ...] = ()
    copy: bool = False


ENTRIES: tuple[Entry, ...] = (
    Entry("chunk_delta_rule", _delta, _DELTA),
    Entry("fused_recurrent_delta_rule", _delta, _DELTA),
    Entry("chunk_gated_delta_rule", _gated_delta, (*_DELTA, "g")),
    Entry("fused_recurrent_gated_delta_rule", _gated_delta, (*_DELTA, "g")),
    Entry("chunk_kda", _kda, (*_DELTA, "g")),
    Entry("fused_recurrent_kda", _kda, (*_DELTA, "g")),
    Entry("chunk_gla", _gla, ("g",)),
    Entry("fused_chunk_gla", _gla, ("g",)),
    Entry("fused_recurrent_gla", _gla, ("gk",)),
    Entry("chunk_simple_gla", _simple_gla, ("g", "g_gamma")),
    Entry("fused_chunk_simple_gla", _simple_gla, ("g", "g_gamma")),
    Entry("fused_recurrent_simple_gla", _simple_gla, ("g", "g_gamma")),
    Entry("chunk_retention", _retention),
    Entry("fused_chunk_retention", _retention),
    Entry("fused_recurrent_retention", _retention),
    Entry("chunk_linear_attn", _linear),
    Entry("fused_chunk_linear_attn", _linear),
    Entry("fused_recurrent_linear_attn", _linear),
    Entry("chunk_rwkv7", _dplr, ("r", "w", "a", "b", "safe_gate", "lower_bound")),
    Entry("fused_recurrent_rwkv7", _dplr, ("r", "w", "a", "b")),
    Entry("chunk_dplr_delta_rule", _dplr, ("gk", "a", "b", "safe_gate", "lower_bound")),
    Entry("fused_recurrent_dplr_delta_rule", _dplr, ("gk", "a", "b")),
    Entry("chunk_iplr_delta_rule", _iplr, ("a", "b")),
    Entry("fused_recurrent_iplr_delta_rule", _iplr, ("a", "b")),
    Entry("parallel_forgetting_attn", _forgetting, ("g",)),
)
_WORDS = ("query", "key", "value")  # as transformers writes q, k, v
COPIES: tuple[Entry, ...] = (
    Entry("torch_chunk_gated_delta_rule", _gated_delta, (*_DELTA, *_WORDS, "g"), copy=True),
    Entry("torch_recurrent_gated_delta_rule", _gated_delta, (*_DELTA, *_WORDS, "g"), copy=True),
)


# ---- computing -------------------------------------------------------------------------------------------------------


def _bound(entry: Entry, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by our names; _Cannot for one that has no meaning here and is not what it is by default."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind, default = signature.parameters[name].kind, signature.parameters[name].default
        if kind is inspect.Parameter.VAR_KEYWORD:
            others = {n: x for n, x in value.items() if x is not None and x is not False}
            given.update({n: others.pop(n) for n in list(others) if n in _COMMON})
            unknown = [n for n in others if n not in _NO_MATTER and (not entry.copy or n == "seq_idx")]
            if unknown:
                raise _Cannot(f"{unknown[0]} is given")
        elif name in _COMMON or name in entry.takes:
            given[name] = value
        elif name not in _NO_MATTER and not (value is default or value is None or value is False):
            raise _Cannot(f"{name} is given")
        elif name == "normalize" and value:
            raise _Cannot("normalize=True divides by a state of its own")
    for ours, theirs in zip("qkv", _WORDS, strict=True):
        if theirs in given:
            given[ours] = given.pop(theirs)
    if "r" in given:
        given["q"] = given.pop("r")
    return given


def _unit(x: Tensor, by: float, dtype: torch.dtype, kernels: bool) -> Tensor:
    """by x (|x|^2 + 1e-6)^(-1/2) of rows, rounded once: by a kernel an RMS norm, whose mean is |x|^2 / d."""
    d = x.shape[-1]
    if kernels:
        from axes.kernels.rows.norm import WIDEST, add_norm  # triton is imported by the first call that needs it

        if 0 < d <= WIDEST:
            return add_norm(x, None, torch.full((d,), by * d**-0.5, device=x.device), 1e-6 / d, dtype)[1]
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6) * by).to(dtype)


_LINES = nn.Module()  # of calls that look alike: they have no parameters


def _compute(entry: Entry, a: dict[str, Any], implementation: dispatch.Implementation | None) -> Any:
    """What the name gives; where kernels run, a call like one before follows its line: the host's time is a model's."""
    if isinstance(a.get("initial_state"), tuple):
        raise _Cannot("initial_state is a pair")
    named = implementation or dispatch.chosen()
    tensors = {n: x for n, x in a.items() if isinstance(x, Tensor)}
    others = tuple((n, x) for n, x in a.items() if n not in tensors)
    given, v = tuple(tensors.values()), a["v"]
    facts = entry, implementation, named, tuple(tensors), others
    eager = not torch.compiler.is_compiling() and v.numel() > 0
    kernels = eager and named in (None, "triton") and versions.no_kernel(v.device, v.dtype) is None
    if kernels and "cu_seqlens" not in tensors:
        return repeated(_LINES, _computed, given, *facts, kernels)
    return _computed(_LINES, *given, *facts, kernels)


def _computed(_: nn.Module, *given: Any) -> Any:
    *tensors, entry, implementation, _named, names, others, kernels = given  # as `_compute` has them
    a = {**dict(zip(names, tensors, strict=True)), **dict(others)}
    update, signal, alone = entry.means(a)
    q, k, v, cu = a["q"], a["k"], a["v"], a.get("cu_seqlens")
    scale = k.shape[-1] ** -0.5 if a.get("scale") is None else a["scale"]
    if update.parts().memory.kind == _LIST:
        scale *= k.shape[-1] ** 0.5  # a list's scores are divided by it already
    if a.get("use_qk_l2norm_in_kernel"):
        q, k = _unit(q, scale, v.dtype, kernels), _unit(k, 1.0, v.dtype, kernels)
    else:
        q = (q * scale).to(v.dtype)
    signal = {"q": q, "k": k, "v": v, **signal}
    start, first = a.get("initial_state"), bool(a.get("state_v_first"))
    sequences = v.shape[0] if cu is None else cu.shape[0] - 1
    if entry.copy and v.device.type == "cpu" and implementation is None and cu is None and not _has_fla():
        raise _Cannot("on a CPU it is faster than ours, which an implementation by name asks for")
    if v.is_cuda and implementation is None:
        shapes = {n: tuple(x.shape) for n, x in signal.items()}
        choice = dispatch.select(update, v.device, v.dtype, shapes, None, 1)
        if choice.implementation != "triton":
            raise _Cannot(f"no kernel of ours takes it: {choice.reason}")
    state = _state(update, k, v, sequences, start if start is None or first else start.mT)
    if cu is not None:
        out, after = dispatch.run_packed(update, signal, state, cu, implementation=implementation)
    elif v.shape[1] == 1:
        out, after = dispatch.step(update, signal, state, implementation=implementation)
    else:
        out, after = dispatch.run(update, signal, state, implementation=implementation)
    if alone:
        return out
    if not a.get("output_final_state"):
        return out, None
    theta = after.theta[0]
    return out, theta if first else theta.mT.contiguous()


def _state(update: StateUpdate, k: Tensor, v: Tensor, sequences: int, given: Tensor | None) -> State:
    """The state before the first token: zeros, or what is given (N, H, V, K)."""
    wide = torch.promote_types(v.dtype, torch.float32)
    zero = torch.zeros((), device=v.device, dtype=v.dtype if update.parts().memory.kind == _LIST else wide)
    like = {n: zero.expand(sequences, v.shape[2], x.shape[-1]) for n, x in (("k", k), ("v", v))}
    state = update.init(like)
    return state if given is None else state.but(theta=(given.to(wide),))


# ---- replacing -------------------------------------------------------------------------------------------------------


@final
@dataclass
class Acceleration:
    """What stands where. replaced: names and the modules that hold them.  computed: calls by name.  passed: calls that
    went to the original, by name and reason.  left: what could not be looked at, and why."""

    replaced: dict[str, list[str]] = field(default_factory=dict)
    computed: Counter[str] = field(default_factory=Counter)
    passed: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)
    _before: list[tuple[ModuleType, str, Any, Any]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put the originals back, wherever ours still stand."""
        while self._before:
            module, name, original, ours = self._before.pop()
            if vars(module).get(name) is ours:
                setattr(module, name, original)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"{name}: {', '.join(places)}" for name, places in self.replaced.items()] or ["nothing is replaced"]
        lines += [f"{name}: {count} calls computed" for name, count in self.computed.items()]
        lines += [f"{name}: {count} calls passed on, {why}" for (name, why), count in self.passed.items()]
        return "\n".join([*lines, *self.left])


def accelerate(implementation: dispatch.Implementation | None = None) -> Acceleration:
    """Put our operators behind fla's names and transformers' copies, in every module that has imported them.

    Args:
        implementation: of every recurrence, by name; None for what is picked, and on a CPU for transformers' own torch
            functions as they are: they are faster there.

    A module that is imported later finds ours in fla.ops; of transformers' models, import those to be replaced first.

    Raises: AxesError where there is neither flash-linear-attention nor a module of transformers with such a function,
        NoImplementation for a name that is none.
    """
    require_implementation(implementation)
    made = Acceleration()
    replacements: dict[int, tuple[Entry, Any, Any]] = {}
    for entry, original in _originals(made):
        if not hasattr(original, "axes_entry") and id(original) not in replacements:
            replacements[id(original)] = entry, original, _ours(entry, original, made, implementation)
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.startswith("axes.integrations"):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in replacements and value is replacements[id(value)][1]:
                entry, original, ours = replacements[id(value)]
                setattr(module, attribute, ours)
                made._before.append((module, attribute, original, ours))
                made.replaced.setdefault(entry.name, []).append(name)
    if not made.replaced and not any(_standing()):
        told = f" ({'; '.join(made.left)})" if made.left else ""
        raise AxesError(
            f"accelerate: there is nothing to replace{told}: install flash-linear-attention, or import a model of "
            "transformers that has a gated delta rule first"
        )
    return made


def _has_fla() -> bool:
    """Then transformers' copies lead to its kernels, which no CPU runs."""
    return importlib.util.find_spec("fla") is not None


def _originals(made: Acceleration) -> Iterator[tuple[Entry, Any]]:
    if not _has_fla():
        made.left.append("flash-linear-attention is not installed")
    else:
        try:
            ops = importlib.import_module("fla.ops")
        except Exception as error:  # without a GPU's software it may fail in ways of its own
            made.left.append(f"fla.ops cannot be imported: {error}")
        else:
            yield from ((entry, getattr(ops, entry.name)) for entry in ENTRIES if hasattr(ops, entry.name))
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models."):
            yield from ((entry, vars(module)[entry.name]) for entry in COPIES if entry.name in vars(module))


def _standing() -> Iterator[bool]:
    """Whether an earlier call's functions stand somewhere."""
    for module in list(sys.modules.values()):
        names = [entry.name for entry in (*ENTRIES, *COPIES)]
        if isinstance(module, ModuleType) and module.__name__.startswith(("fla.", "transformers.models.")):
            yield any(hasattr(vars(module).get(name), "axes_entry") for name in names)


def _ours(entry: Entry, original: Any, made: Acceleration, implementation: dispatch.Implementation | None) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = _compute(entry, _bound(entry, signature, args, kwargs), implementation)
        except _Cannot as reason:
            if not made.passed[entry.name, str(reason)]:
                warnings.warn(f"{entry.name} is the original's: {reason}", PassedOn, stacklevel=2)
            made.passed[entry.name, str(reason)] += 1
            return original(*args, **kwargs)
        made.computed[entry.name] += 1
        return result

    run.axes_entry = entry  # type: ignore[attr-defined]
    return run


__all__ = ["Acceleration", "Call", "Entry", "ENTRIES", "COPIES", "PassedOn", "accelerate"]
