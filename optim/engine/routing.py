"""What a parameter is to a rule for matrices.

A matrix rule (Muon, Shampoo, natural gradient) is for hidden matrices: maps from activations to activations. With a
model at hand these are

- the weights of linear maps: nn.Linear, convolutions, nn.MultiheadAttention, recurrent layers of torch.nn; a module
  whose `in_features` and `out_features` are the sides of its weight; transformers' Conv1D, stored (in, out); routers of
  mixtures of experts;
- the factors of low-rank adapters, by the names lora_A and lora_B;
- what their module says: its class has `hidden_matrices`, layouts by name, as `{"up": "experts in out"}`; what such a
  class does not name is none;
- stacked experts: three dimensions, in a module or under a name of experts: a batch of matrices.

Others take the auxiliary rule:

- what has fewer than two dimensions, or one row or column (norms, biases, gains), stacks and tables of biases;
- embeddings: of an nn.Embedding, of a class called so, tied to one, or by name (...embed, embed_..., ...embedding(s),
  wte, wpe); output heads: what the model says its output embeddings are, or by name (...head, embed_out, classifier,
  and output or score of the model itself);
- grouped convolutions, whose filters do not share inputs;
- what belongs to any other module. Of it nothing is known, so whoever asks is told.

Names alone are read as the model would be: a `weight` is that of a linear map, a parameter of another name is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from axes.optim.engine.layouts import (
    PLAIN,
    STACKED,
    STACKED_TRANSPOSED,
    TRANSPOSED,
    Layout,
    canonical_shape,
    real,
)

Roles = dict[Tensor, "Role"]

# words of a name: its own and its module's, indices left out
_EMBEDDING = re.compile(r"(embed|embedding|embeddings|wte|wpe)$|^embed_(tokens|positions|in)$|^lora_embedding_[ab]$")
_HEAD = re.compile(r"head$|^embed_out$")
_LORA = re.compile(r"^lora_[ab]$")
_GATES = re.compile(r"bias(_table)?$|^a_log$")  # stacks of biases, tables of them, decays of state-space layers
# whole names
_OUTPUT = re.compile(
    r"^((model|module)\.)?(output|score)\.weight$|(^|\.)((lm_head|predictions)\.decoder|classifier)\.weight$"
)
# of embeddings whose module does not say what they are; T5's among them
_TABLE = re.compile(r"(^|\.)(tokens?|vocab|vocabulary|shared|relative_attention_bias)\.weight$")
_EMBEDDING_CLASS = re.compile(r"Embeddings?$")
_ROUTER_CLASS = re.compile(r"(Router|TopKGating|TopKGate|MoEGate)$")
_EXPERTS = re.compile(r"expert|moe", re.IGNORECASE)
_WEIGHT = re.compile(r"^weight|_weight$")
_LINEAR = (nn.Linear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_LONG = 256  # from here on a last dimension is that of a matrix and no width of a kernel
_GPT2 = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})  # the layers of OpenAI's GPT-2, in any of its ports


class Role(NamedTuple):
    """What a parameter is: whether a matrix rule applies, and why.

    layout: how it is a matrix, if it is one. known: whether something says what it is. listened: whether the inputs of
    its layer can be collected. entrywise: whether its dimensions are those of a list, of biases say.
    """

    matrix: bool
    reason: str
    layout: Layout = PLAIN
    known: bool = True
    listened: bool = False
    entrywise: bool = False

    @property
    def unclear(self) -> bool:
        """Whether it takes the auxiliary rule for want of knowledge."""
        return not self.matrix and not self.known


_ADAPTER = Role(True, "factor of a low-rank adapter, by name")


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, x W + b with W (in, out), which is not imported for it."""
    weight = getattr(module, "weight", None)
    called = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    return called and isinstance(weight, Tensor) and weight.ndim == 2 and getattr(module, "nf", None) == weight.shape[1]


def is_listened(module: nn.Module) -> bool:
    """Whether rules that read layers collect a module's inputs and output gradients."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def roles(module: nn.Module, linear_only: bool = False) -> Roles:
    """The role of every parameter of a module; one that plays several roles is a matrix only if it is one in all.

    linear_only: accept the weights of layers whose inputs can be collected alone (rules that read layer inputs).
    """
    found: Roles = {}
    outputs = _outputs(module)
    modules = dict(module.named_modules(remove_duplicate=False))
    for path, owner in module.named_modules():
        lists = isinstance(owner, nn.ParameterList | nn.ParameterDict) and path
        start = path.rpartition(".")[0] if lists else path
        for name, parameter in owner.named_parameters(path, recurse=False):
            role = _role(name, parameter, owner, modules[start], name[len(start) + 1 :] if start else name)
            if role.matrix and parameter in outputs:
                role = Role(False, "output head of the model")
            if linear_only and role.matrix and not role.listened:
                why = f"of {type(owner).__name__}: inputs are collected from nn.Linear and Conv1D only"
                role = role._replace(matrix=False, reason=why)
            if parameter not in found or (found[parameter].matrix and not role.matrix):
                found[parameter] = role
    return found


def named_roles(members: Iterable[tuple[str, Tensor]]) -> Roles:
    """The roles of parameters of which only names and shapes are known."""
    members = list(members)
    shapes = {name: tuple(p.shape) for name, p in members}
    turned = any(
        _layer(name) in ("c_attn", "c_fc") and len(shape) == 2 and shape[1] > shape[0] for name, shape in shapes.items()
    )
    return {p: _named_role(name, p, turned, shapes) for name, p in members}


# ---- with the module -------------------------------------------------------------------------------------------------


def _role(name: str, parameter: Tensor, owner: nn.Module, holder: nn.Module, inside: str) -> Role:
    """holder: the module that has the parameter, or the list with it, under the name `inside`."""
    called = type(holder).__name__
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or _EMBEDDING_CLASS.search(called):
        return Role(False, "embedding")
    role = _by_shape_and_name(name, parameter)
    if role is not None:
        return role
    declared = getattr(holder, "hidden_matrices", None)
    if isinstance(declared, Mapping):
        if inside not in declared:
            return Role(False, f"no hidden matrix, by {called}.hidden_matrices")
        layout = Layout.of(called, declared[inside]).fitted(f"{called}.hidden_matrices: {name!r}", parameter)
        return Role(True, f"hidden matrix, by {called}.hidden_matrices", layout)
    if isinstance(owner, _ConvNd) and owner.groups > 1:
        return Role(False, "grouped convolution")
    if isinstance(owner, _LINEAR):
        own = isinstance(owner, nn.Linear) and parameter is owner.weight
        # nn.MultiheadAttention reads the weight of its output layer, and does not call it
        listened = own and not isinstance(owner, NonDynamicallyQuantizableLinear)
        return Role(True, f"hidden matrix of {called}", listened=listened)
    if is_conv1d(owner) and parameter is owner.weight:
        return Role(True, f"hidden matrix of {called}, stored (in, out)", TRANSPOSED, listened=True)
    if _adapts(name, parameter):
        return _ADAPTER
    if _words(name)[-1] == "weight":
        sides = getattr(owner, "out_features", None), getattr(owner, "in_features", None)
        if tuple(parameter.shape) == sides:
            return Role(True, f"hidden matrix of {called}, by its in_features and out_features")
        if _ROUTER_CLASS.search(called) and parameter.ndim == 2:
            return Role(True, f"hidden matrix of {called}, a router")
    pair = getattr(owner, "gate_up_proj", None), getattr(owner, "down_proj", None)
    if parameter.ndim == 3 and (_EXPERTS.search(f"{called} {name}") or all(isinstance(x, Tensor) for x in pair)):
        said = getattr(owner, "is_transposed", None)
        turned = said if isinstance(said, bool) else _turned(*map(_shape, pair))
        return _experts(f"stacked experts of {called}", turned)
    return Role(False, f"of {called}, which is no linear map that is known here", known=False)


def _outputs(module: nn.Module) -> set[Tensor]:
    """What a model of transformers says its output head is."""
    asked = getattr(module, "get_output_embeddings", None)
    if not callable(asked):
        return set()
    try:
        head = asked()
    except (NotImplementedError, AttributeError):
        return set()
    return set(head.parameters()) if isinstance(head, nn.Module) else set()


# ---- by name and shape -----------------------------------------------------------------------------------------------


def _by_shape_and_name(name: str, parameter: Tensor) -> Role | None:
    if parameter.ndim < 2:
        return Role(False, "scalar" if parameter.ndim == 0 else "vector")
    if min(canonical_shape(parameter)) == 1:
        return Role(False, "one row or column")
    words = _words(name)
    for word in words[-2:]:
        if _EMBEDDING.search(word):
            return Role(False, f"embedding by name ({word})")
        if _HEAD.search(word):
            return Role(False, f"output head by name ({word})")
    if _OUTPUT.search(name.lower()):
        return Role(False, f"output head by name ({name})")
    if _GATES.search(words[-1]):
        return Role(False, f"biases or decays by name ({words[-1]})", entrywise=True)
    return None


def _adapts(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and any(map(_LORA.search, _words(name)[-3:]))


def _named_role(name: str, parameter: Tensor, turned: bool, shapes: Mapping[str, tuple[int, ...]]) -> Role:
    """turned: whether GPT-2's layers are stored (in, out)."""
    role = _by_shape_and_name(name, parameter)
    if role is not None:
        return role
    words, low = _words(name), name.lower()
    if _TABLE.search(low):
        return Role(False, f"embedding by name ({words[-2]})")
    if _adapts(name, parameter):
        return _ADAPTER
    if parameter.ndim == 3 and (_EXPERTS.search(low) or parameter.shape[2] >= _LONG):
        start = name.rpartition(".")[0]
        pair = (shapes.get(f"{start}.{x}" if start else x) for x in ("gate_up_proj", "down_proj"))
        return _experts("assumed to be stacked experts, by name and shape", _turned(*pair))
    if not _WEIGHT.search(words[-1]) and len(words) > 1:
        why = f"assumed to be no linear map: {words[-1]!r} is not called weight"
        return Role(False, why, known=False)
    if turned and _layer(name) in _GPT2 and parameter.ndim == 2:
        return Role(True, "assumed to be stored (in, out), as GPT-2's Conv1D: c_attn and c_fc are wide", TRANSPOSED)
    if parameter.ndim > 2 and parameter.shape[1] == 1:
        return Role(False, "assumed to be a kernel of a depthwise convolution: one input to a filter")
    if parameter.ndim > 2:
        return Role(True, "assumed to be a kernel (out, in, ...): more than two dimensions")
    return Role(True, "assumed to be the weight of a linear map (out, in), by name and shape")


def _words(name: str) -> list[str]:
    return [word for word in name.lower().split(".") if not word.isdigit()] or [name]


def _layer(name: str) -> str:
    """The module of a weight: c_attn of h.0.attn.c_attn.weight."""
    parts = name.lower().split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] == "weight" else ""


def _experts(reason: str, turned: bool | None) -> Role:
    if turned is None:
        return Role(True, f"{reason}, assumed (experts, out, in)", STACKED)
    layout, stored = (STACKED_TRANSPOSED, "(experts, in, out)") if turned else (STACKED, "(experts, out, in)")
    return Role(True, f"{reason}, stored {stored}", layout)


def _turned(gate_up: tuple[int, ...] | None, down: tuple[int, ...] | None) -> bool | None:
    """Whether experts are stored (in, out), which their two shapes tell: gate_up has twice the outputs."""
    if gate_up is None or down is None or len(gate_up) != 3 or len(down) != 3:
        return None
    if (gate_up[2], gate_up[1]) == (2 * down[1], down[2]):
        return True
    return False if (gate_up[1], gate_up[2]) == (2 * down[2], down[1]) else None


def _shape(x: object) -> tuple[int, ...] | None:
    return tuple(x.shape) if isinstance(x, Tensor) else None


__all__ = ["Role", "Roles", "canonical_shape", "is_conv1d", "is_listened", "named_roles", "real", "roles"]
