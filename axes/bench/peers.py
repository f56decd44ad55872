"""Peers by name: how each is reached, or why it cannot be here."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from axes.bench.rules import Run, SequenceRule, Signal
from axes.errors import AxesError
from axes.routes import dispatch

OURS, CHUNKED, LOOP, FLA, SDPA = "axes", "chunked torch", "token loop", "fla", "flash SDPA"
_OPS = (
    "linear_attn",
    "retention",
    "simple_gla",
    "gla",
    "delta_rule",
    "gated_delta_rule",
    "kda",
    "generalized_delta_rule",
    "hgrn",
    "rwkv6",
    "gsa",
    "log_linear_attn",
    "comba",
    "gated_delta_product",
)


@final
@dataclass(frozen=True)
class Contender:
    """Someone who computes a rule. same_rule: the recurrence is the rule's own, so that numbers can be checked."""

    name: str
    run: Run
    same_rule: bool = True


def contenders(rule: SequenceRule, device: torch.device, names: tuple[str, ...] = ()) -> list[Contender]:
    """Who can compute this rule on this device; ours first."""
    found: list[Contender] = []
    if device.type == "cuda":
        found.append(Contender(OURS, rule.ours("triton")))
    by_torch = dispatch.select(rule.update).implementation == "torch"
    if by_torch:
        found.append(Contender(CHUNKED, rule.ours("torch")))
    if device.type != "cuda" or not by_torch:
        found.append(Contender(LOOP, rule.token_loop()))
    if device.type == "cuda" and rule.fla is not None and importlib.util.find_spec("fla") is not None:
        found.append(Contender(FLA, peer(rule)))
    if device.type == "cuda" and rule.key_width is None and rule.update.parts().step.writes == 1:
        found.append(Contender(SDPA, attention, same_rule=False))
    return [c for c in found if not names or c.name in names]


def peer(rule: SequenceRule) -> Run:
    """flash-linear-attention's chunked operator for a rule."""
    call, module = rule.fla, library()
    assert call is not None
    return lambda signal: call(module, "chunk", signal, scale=1.0, output_final_state=True)


def library() -> Any:
    """The operators of flash-linear-attention by name, those that the installed one has."""
    fla("fla")
    return SimpleNamespace(**{name: fla(f"fla.ops.{name}") for name in _OPS if _has(f"fla.ops.{name}")})


def _has(module: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.util.find_spec(module) is not None


def fla(module: str) -> Any:
    """A module of flash-linear-attention. fla-core has its operators, the whole package its layers too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no GPU, that an extra of theirs is missing
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("fla"):
            raise
        part = "" if error.name == "fla" else f" whole: fla-core has no {module}"
        raise AxesError(f"flash-linear-attention is not installed{part}") from None


@contextmanager
def lifted_guard() -> Iterator[None]:
    """Within the block fla's gated backward runs where it refuses to (Hopper with Triton 3.4 to 3.7.0).

    Its gradients are checked like everybody's, and rows made so say it.
    """
    if importlib.util.find_spec("fla") is None:
        yield
        return
    module = fla("fla.ops.common.chunk_o")
    with patch.object(module, "IS_NVIDIA_HOPPER", False):
        yield


@contextmanager
def tuned(configurations: int) -> Iterator[None]:
    """Within the block Triton's tuners try at most so many configurations of a kernel, evenly spread over those that it
    has, each for some milliseconds; 0: all of them, as they are. All of fla's take minutes a layer."""
    if not configurations or importlib.util.find_spec("triton") is None:
        yield
        return
    module = importlib.import_module("triton.runtime.autotuner")
    every = module.Autotuner.prune_configs

    def some(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        found = list(every(self, kwargs))
        most = min(configurations, len(found))
        return [found[i * len(found) // most] for i in range(most)]

    def brief(self: Any) -> Any:
        bench = importlib.import_module("triton.testing").do_bench
        return lambda call, quantiles: bench(call, warmup=2, rep=20, quantiles=quantiles)

    def unkept(self: Any, key: Any, configurations: list[Any], bench: Any) -> bool:
        bench()  # what another process found on a busy device is not read from the disk
        return False

    ours: dict[str, Any] = {"prune_configs": some, "do_bench": property(brief), "check_disk_cache": unkept}
    with patch.multiple(module.Autotuner, **ours):
        yield


def tune_again() -> None:
    """Forget what Triton's tuners chose, beside other processes say; what is compiled stays so."""
    if "triton" not in sys.modules:
        return
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    for found in gc.get_objects():
        if issubclass(type(found), tuner):  # `isinstance` would wake objects that are made when looked at
            found.cache.clear()


def attention(signal: Signal) -> tuple[Tensor, Tensor]:
    """Causal softmax attention of the same shapes: another rule, shown for scale. The state is the list of keys."""
    q, k, v = (signal[n].contiguous().transpose(1, 2) for n in "qkv")  # the kernel wants rows of adjacent numbers
    backends = [SDPBackend.FLASH_ATTENTION] if q.device.type == "cuda" else [SDPBackend.MATH]
    with sdpa_kernel(backends):
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), k


@final
class AttentionLayer(nn.Module):
    """Causal attention as torch has it: one projection, flash SDPA, one projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.split = (heads, width // heads)
        self.into = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (z.unflatten(-1, self.split).transpose(1, 2) for z in self.into(x).chunk(3, -1))
        y: Tensor = self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return y
