"""`axes bench layers`: whole layers, beside the products that they cannot do without and the same layers elsewhere."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from axes import catalogue
from axes.bench.apart import Steps
from axes.bench.check import compare
from axes.bench.peers import AttentionLayer, fla, lifted_guard, tune_again, tuned
from axes.bench.results import Apart, Watch, begin, fill, said, unwatched
from axes.bench.sequence import device_of, dtype_of
from axes.bench.timing import Timing, kept_for_backward, median, peak_extra, wait
from axes.errors import AxesError
from axes.sequence import SequenceLayer, fused

FILE = "layers.json"
OURS, TORCH_BLOCKS, COMPILED, PRODUCTS, FLA, SDPA = (
    "axes", "axes, blocks in torch", "axes, compiled", "products alone", "fla", "torch, flash SDPA"
)  # fmt: skip
WHO = (OURS, PRODUCTS, FLA, SDPA, TORCH_BLOCKS, COMPILED)
DEFAULT_WHO = WHO[:4]
ON_GPU = (
    "gated-delta-net", "delta-net", "kda", "mamba2", "gla", "linear-attention", "retnet", "rwkv7", "titans-matrix",
    "softmax-attention", "rope", "alibi", "fox", "path", "moneta-matrix", "memora-matrix", "adam-net", "lattice-dec",
    "lattice-osr",
)  # fmt: skip
ON_CPU = ("gated-delta-net", "gla", "mamba2", "softmax-attention")
ATTENTION = ("softmax-attention", "rope", "alibi", "fox", "path")
_FEW = 64  # tokens of one sequence, whose kernels the host outlasts
_CHECKED = 200  # tokens compared with float64
_BOUNDS = {torch.float32: 5e-3, torch.float16: 3e-2, torch.bfloat16: 6e-2}


class Size(NamedTuple):
    """Batch, tokens, model width, heads."""

    batch: int = 8
    tokens: int = 4096
    width: int = 2048
    heads: int = 16

    @classmethod
    def parse(cls, text: str) -> Size:
        try:
            batch, tokens, width, heads = map(int, text.split(","))
        except ValueError:
            raise AxesError(f"--size is B,T,D,H, four numbers, not {text!r}") from None
        size = cls(batch, tokens, width, heads)
        if min(size) < 1 or size.width % size.heads:
            raise AxesError(f"--size is B,T,D,H, positive, D a multiple of H, not {text!r}")
        return size

    def __str__(self) -> str:
        return ",".join(map(str, self))


@final
@dataclass(frozen=True)
class Row:
    """One contender as one layer. Milliseconds; bytes; None where it was not measured.

    peak: beyond parameters, the input and what is returned.  saved: bytes a token kept for the backward, measured;
    predicted: those that a block by its kernels keeps itself, `axes.sequence.fused.saved`.  host: from the call to its
    return with next to no work for the device.
    """

    layer: str
    size: str
    dtype: str
    who: str
    forward: float | None = None
    both: float | None = None
    forward_graph: float | None = None
    both_graph: float | None = None
    peak: int | None = None
    saved: int | None = None
    predicted: int | None = None
    host: float | None = None
    host_both: float | None = None
    first: float | None = None  # seconds of the first forward and backward in this process (apart: beside others')
    parameters: int = 0
    error: float | None = None
    worst: str = ""
    refused: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.layer, self.size, self.dtype, self.who


@final
@dataclass(frozen=True)
class Plan:
    """What is compared. rows: pairs of layer and contender in this order, instead of all of `layers` by all of `who`.
    configurations: of a peer's kernel that its tuner may try; 0 for all. apart: see `results.fill`."""

    layers: tuple[str, ...] = ()
    size: Size = Size()
    dtype: str = "bfloat16"
    device: str = "cuda"
    who: tuple[str, ...] = DEFAULT_WHO
    rows: tuple[tuple[str, str], ...] = ()
    configurations: int = 0
    apart: Apart | None = None


def measure(
    plan: Plan,
    folder: Path,
    watch: Watch = unwatched,
    fresh: bool = False,
) -> dict[str, Any]:
    """Measure every row that the folder does not hold yet; the file is written after each. Returns its contents."""
    device, dtype = device_of(plan.device), dtype_of(plan.dtype)
    if unknown := {who for _, who in plan.rows}.union(plan.who) - set(WHO):
        raise AxesError(f"unknown contender {', '.join(sorted(unknown))}; known: {', '.join(WHO)}")
    results = begin(folder / FILE, Row, device, 0, fresh)
    names = plan.layers or (ON_GPU if device.type == "cuda" else ON_CPU)
    pairs = plan.rows or [(n, who) for n in names for who in plan.who if who != SDPA or n in ATTENTION]
    steps = partial(_row, size=plan.size, dtype=dtype, device=device, configurations=plan.configurations)
    work = [(Row(name, str(plan.size), plan.dtype, who), steps) for name, who in pairs]
    return fill(folder / FILE, results, work, watch, plan.apart)


@contextmanager
def _its_way(who: str, configurations: int) -> Iterator[None]:
    """What a contender needs around its calls."""
    if who != FLA:
        yield
        return
    with lifted_guard(), tuned(configurations):  # fla's gated backward refuses Hopper with some Tritons
        yield


def _row(row: Row, size: Size, dtype: torch.dtype, device: torch.device, configurations: int = 0) -> Steps[Row]:
    """The row; pauses when everything is compiled."""
    with _its_way(row.who, configurations):
        return (yield from _measured(row, size, dtype, device))


def _measured(row: Row, size: Size, dtype: torch.dtype, device: torch.device) -> Steps[Row]:
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        layer, call = _contender(row.layer, row.who, size, dtype, device)
    except Exception as error:
        return replace(row, refused=said(error))
    parameters = [p for p in layer.parameters() if p.requires_grad]
    row = replace(row, parameters=sum(p.numel() for p in parameters))

    def draw() -> tuple[Tensor, Tensor]:
        x = torch.randn(size.batch, size.tokens, size.width, device=device, dtype=dtype, requires_grad=True)
        return x, torch.randn_like(x)

    x, direction = draw()
    few, along = x[:1, :_FEW].detach().clone().requires_grad_(), direction[:1, :_FEW].clone()
    try:
        begun = time.perf_counter()
        _both(call, x, parameters, direction)
        wait(device)
        row = replace(row, first=time.perf_counter() - begun)
        if row.who == OURS:
            off, worst = _error(layer, x)
            row = replace(row, error=off, worst=worst)
            if not off <= _BOUNDS[dtype]:
                return replace(row, refused=f"{worst} is off by {off:.1e}")
        _both(call, few, parameters, along)
        with torch.no_grad():
            call(x), call(few)
        del x, direction
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield
        x, direction = draw()
        tune_again()
        with torch.no_grad():
            forward = median(lambda: (call(x),), device)
            host = _host(lambda: call(few), device)
        both = median(lambda: _both(call, x, parameters, direction), device)
        row = _timed(row, forward, both)
        host_both = _host(lambda: _both(call, few, parameters, along), device)
        row = replace(row, host=host, host_both=host_both)
        row = replace(row, saved=_saved(call, x, parameters), predicted=_predicted(layer, x))
        if device.type == "cuda":
            row = replace(row, peak=peak_extra(lambda: _both(call, x, parameters, direction)))
    except torch.OutOfMemoryError:
        return replace(row, refused="out of memory")
    except Exception as error:
        return replace(row, refused=said(error))
    return row


def _timed(row: Row, forward: Timing, both: Timing) -> Row:
    eager = replace(row, forward=forward.eager, both=both.eager)
    return replace(eager, forward_graph=forward.graph, both_graph=both.graph)


def _both(
    call: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter], along: Tensor
) -> Iterable[Tensor]:
    return torch.autograd.grad(call(x), [x, *parameters], along, allow_unused=True)


def _host(call: Callable[[], object], device: torch.device) -> float | None:
    """Milliseconds until a call returns, the device idle before it."""
    if device.type != "cuda":
        return None
    taken = []
    for _ in range(30):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(taken[5:])


def _saved(call: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]) -> int:
    """Bytes a token."""
    return round(kept_for_backward(lambda: (call(x),), parameters) / (x.shape[0] * x.shape[1]))


def _predicted(layer: nn.Module, x: Tensor) -> int | None:
    around = getattr(layer, "around", None)
    if around is None or fused.no_block_kernel(around, x.device, x.dtype) is not None:
        return None
    return sum(fused.saved(around, x.dtype).values())


def _error(layer: nn.Module, x: Tensor) -> tuple[float, str]:
    """Output and gradients of the first tokens of one sequence against the same layer in float64: the worst."""
    few = x[:1, :_CHECKED].detach()
    along = torch.randn(few.shape, device=few.device, dtype=few.dtype)
    found = []
    for module, kind in ((layer, few.dtype), (copy.deepcopy(layer).double(), torch.float64)):
        leaf = few.to(kind).requires_grad_()
        names, leaves = zip(*((n, p) for n, p in module.named_parameters() if p.requires_grad), strict=True)
        out = module(leaf)[0]
        grads = torch.autograd.grad(out, [leaf, *leaves], along.to(kind), allow_unused=True)
        pairs = zip(("output", "x", *names), (out.detach(), *grads), strict=True)
        found.append({n: g for n, g in pairs if g is not None})
    got, want = found
    verdict = compare(got, want, _BOUNDS[x.dtype])
    return verdict.error, verdict.worst


# ---- contenders ------------------------------------------------------------------------------------------------------


def _contender(
    name: str, who: str, size: Size, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The layer, and x -> y."""
    layer: nn.Module
    if who in (OURS, TORCH_BLOCKS, COMPILED):
        layer = _ours(name, size, dtype, device)
        if who == TORCH_BLOCKS:
            layer.around.fused = None
        run = torch.compile(layer, dynamic=False) if who == COMPILED else layer
        return layer, lambda x: run(x)[0]
    if who == PRODUCTS:
        layer = _Products(_ours(name, size, torch.float32, torch.device("meta"))).to(device, dtype)
        return layer, layer
    if who == SDPA:
        layer = AttentionLayer(size.width, size.heads).to(device, dtype)
        return layer, layer
    layer = _peer(name, size).to(device, dtype)
    return layer, lambda x: layer(x)[0]


def _ours(name: str, size: Size, dtype: torch.dtype, device: torch.device) -> SequenceLayer:
    made: SequenceLayer = catalogue.get(name, "sequence").cls(size.width, heads=size.heads, device=device, dtype=dtype)
    return made


@final
class _Products(nn.Module):
    """The products of a layer's matrices alone: those of the input side by side in one, and the last one."""

    def __init__(self, layer: SequenceLayer) -> None:
        super().__init__()
        first, self.width = 0, layer.sizes.heads * layer.sizes.d_v
        for name, module in layer.around.named_modules():
            if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] not in ("o_proj", "out_proj"):
                first += module.out_features if module.in_features == layer.sizes.d_model else 0
        self.into = nn.Linear(layer.sizes.d_model, max(first, self.width), bias=False)
        self.out = nn.Linear(self.width, layer.sizes.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.into(x)[..., : self.width])
        return out


def _peer(name: str, size: Size) -> nn.Module:
    """flash-linear-attention's layer of the same sizes."""
    layers = fla("fla.layers")
    d, h = size.width, size.heads
    common: dict[str, Any] = {"hidden_size": d, "num_heads": h, "layer_idx": 0}
    made = {
        "gated-delta-net": ("GatedDeltaNet", {**common, "head_dim": d // h, "expand_v": 1.0}),
        "delta-net": ("DeltaNet", {**common, "use_gate": False}),
        "mamba2": ("Mamba2", {**common, "head_dim": 2 * d // h, "use_bias": False, "use_conv_bias": True}),
        "kda": ("KimiDeltaAttention", {**common, "head_dim": d // h, "expand_v": 1.0}),
        "gla": ("GatedLinearAttention", {**common, "expand_k": 0.5, "expand_v": 1.0}),
        "linear-attention": ("LinearAttention", {"hidden_size": d, "num_heads": h, "feature_map": "elu"}),
        "retnet": ("MultiScaleRetention", {**common, "expand_k": 1.0, "expand_v": 2.0}),
        "rwkv7": ("RWKV7Attention", {**common, "head_dim": d // h, "num_hidden_layers": 12, "fuse_norm": True}),
        "softmax-attention": ("Attention", common),
        "rope": ("Attention", common),
        "fox": ("ForgettingAttention", common),
        "path": ("PaTHAttention", {**common, "use_forget_gate": False}),
    }
    if name not in made:
        raise AxesError(f"flash-linear-attention has no layer for {name}")
    kind, options = made[name]
    layer: nn.Module = getattr(layers, kind)(**options)
    # in training fla's Mamba2 wants causal-conv1d's CUDA; else its own convolution and mamba-ssm's kernels
    return layer.eval() if name == "mamba2" else layer
