"""Which parameters are matrices to an optimizer.

A matrix rule (Muon, Shampoo, natural gradient) is for hidden matrices: maps from activations to activations. A
parameter is routed to the auxiliary rule when

- it has fewer than two dimensions, or one row or column (norms, biases, gains);
- it belongs to an `nn.Embedding`, or is tied to one;
- its own name or its module's (indices left out) ends in `head`, `embed`, `embedding` or `embeddings`, `wte` or `wpe`;
- it is the weight of a grouped convolution, whose filters do not share inputs;
- with a model at hand: it belongs to a module that is not a linear map of torch.nn (linear, convolution, attention,
  recurrent). From names alone every other parameter with two or more dimensions counts as a matrix.

Parameters with more than two dimensions are matrices (first dimension, all others).
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

Roles = dict[Tensor, "Role"]

_EMBEDDING = re.compile(r"(embed|embedding|embeddings|wte|wpe)$")
_HEAD = re.compile(r"head$")
_LINEAR = (nn.Linear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


class Role(NamedTuple):
    """What a parameter is: whether a matrix rule applies, and why."""

    matrix: bool
    reason: str


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def canonical_shape(parameter: Tensor) -> tuple[int, int]:
    """The matrix that a parameter is: (1, 1), (1, n), (m, n) or (m, all others); complex numbers are pairs."""
    shape = tuple(parameter.shape) + ((2,) if parameter.is_complex() else ())
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def roles(module: nn.Module, linear_only: bool = False) -> Roles:
    """The role of every parameter of a module; one that plays several roles is a matrix only if it is one in all.

    linear_only: accept the weights of nn.Linear alone (rules that read layer inputs).
    """
    found: Roles = {}
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(path, recurse=False):
            role = _role(name, parameter, owner, linear_only)
            if parameter not in found or not role.matrix:
                found[parameter] = role
    return found


def named_role(name: str, parameter: Tensor) -> Role:
    """The role of a parameter of which only name and shape are known."""
    return _role(name, parameter, None, False)


def _role(name: str, parameter: Tensor, owner: nn.Module | None, linear_only: bool) -> Role:
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return Role(False, "embedding")
    if parameter.ndim < 2:
        return Role(False, "scalar" if parameter.ndim == 0 else "vector")
    if min(canonical_shape(parameter)) == 1:
        return Role(False, "one row or column")
    words = [word for word in name.lower().split(".") if not word.isdigit()]
    for word in words[-2:]:
        if _EMBEDDING.search(word):
            return Role(False, f"embedding by name ({word})")
        if _HEAD.search(word):
            return Role(False, f"output head by name ({word})")
    if owner is None:
        return Role(True, "matrix")
    if not isinstance(owner, _LINEAR):
        return Role(False, f"of {type(owner).__name__}, which is not a linear map of torch.nn")
    if isinstance(owner, _ConvNd) and owner.groups > 1:
        return Role(False, "grouped convolution")
    if linear_only and not (isinstance(owner, nn.Linear) and parameter is owner.weight):
        return Role(False, f"of {type(owner).__name__}: inputs are collected from nn.Linear only")
    return Role(True, f"hidden matrix of {type(owner).__name__}")
