"""A language model whose sequence layers and depth mixers are names in the catalogue.

    X = expand(embedding(tokens))
    for every sublayer (a sequence layer, then a SwiGLU network, `layers` times):
        x, ctx = read(X);  X = write(X, sublayer(norm(x)), ctx)
    logits = head(norm(reduce(X)))

The sequence layers are the only part that mixes positions, so the same loop serves the parallel form (B, T) and, with
T = 1, the recurrent one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axes import catalogue
from axes.depth.base import Streams
from axes.depth.lines import Before
from axes.depth.stack import require_recompute, through
from axes.errors import AxesError, ShapeError
from axes.kernels.blocks.products import is_plain, products
from axes.kernels.common import versions
from axes.kernels.common.repeated import repeated
from axes.models.loss import linear_cross_entropy
from axes.models.options import accepted_options
from axes.routes.precision import taken_in

LayerStates = tuple[Any, ...]  # one nested tuple of tensors per sequence layer
Block = Callable[[Streams], Streams]  # a sequence layer and a network, each in its mixer

_EPS = 1e-6
_WIDEST = 8192  # as in axes.kernels.rows.norm, which imports Triton


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


@final
@dataclass(frozen=True)
class Architecture:
    """What has to be known to build the model again, and how it keeps what its backward wants: `recompute` as in
    `axes.depth.through`.

    sequence: a name for all layers, or one for each: a hybrid.
    """

    sequence: str | tuple[str, ...] = "gated-delta-net"
    depth: str = "mhc"
    layers: int = 4
    width: int = 128
    heads: int = 4
    streams: int = 4
    vocabulary: int = 256
    recompute: int = 0

    def __post_init__(self) -> None:
        require_recompute("Architecture", self.recompute)
        for name in ("layers", "width", "heads", "streams", "vocabulary"):
            if getattr(self, name) < 1:
                raise AxesError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise AxesError(f"heads must divide width: {self.heads} heads do not divide a width of {self.width}")
        for name in (self.sequence,) if isinstance(self.sequence, str) else self.each_sequence():
            catalogue.get(name, axis="sequence")
        catalogue.get(self.depth, axis="depth")

    def each_sequence(self) -> tuple[str, ...]:
        """The name of every sequence layer."""
        if isinstance(self.sequence, str):
            return (self.sequence,) * self.layers
        if len(self.sequence) != self.layers:
            raise AxesError(
                f"sequence is a name for all layers or one for each: {len(self.sequence)} names are given for "
                f"{self.layers} layers"
            )
        return tuple(self.sequence)


@final
class RMSNorm(nn.Module):
    """y = weight * x / rms(x), in the dtype of the weight: under autocast the norm stays in float32."""

    def __init__(self, width: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, _EPS)


def no_norm_by_kernel(norm: nn.Module, x: Tensor) -> str | None:
    """Why torch takes this norm of x, or None if one launch does, with the casts around it, and one its gradients."""
    if type(norm) is not RMSNorm or _hooked(norm) or type(norm.weight) is not nn.Parameter:
        return "a norm is not a plain RMSNorm"
    if norm.weight.dtype not in (x.dtype, torch.float32):  # the kernel computes in float32, whatever the streams have
        return "norms are neither of the streams' dtype nor of float32"
    if x.numel() == 0 or x.shape[-1] > _WIDEST:
        return f"rows of {x.shape[-1]} entries do not fit a program, or there are none"
    if torch.compiler.is_compiling():
        return "a compiler follows torch's operations"
    if torch._C._are_functorch_transforms_active() or type(x) not in (Tensor, nn.Parameter):
        return "tensors are transformed"
    return versions.no_kernel(x.device, x.dtype) or versions.no_kernel(x.device, taken_in(norm.weight))


def _norm_by_kernel(norm: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    from axes.kernels.rows.norm import add_norm  # triton is imported by the first call that needs it

    return add_norm(x, None, cast(Tensor, norm.weight), _EPS, dtype)[1]


def _norm_facts(norm: nn.Module) -> tuple[torch.dtype]:
    """The dtype that it is taken in."""
    return (taken_in(cast(Tensor, norm.weight)),)


@final
class SwiGLU(nn.Module):
    """y = W_out (silu(W_gate x) * W_in x), hidden width 8/3 of the width, rounded up to a multiple of 16."""

    def __init__(self, width: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        hidden = -(-8 * width // 48) * 16
        self.gate = nn.Linear(width, hidden, bias=False, device=device, dtype=dtype)
        self.inner = nn.Linear(width, hidden, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(hidden, width, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        dtype = taken_in(x)
        if x.numel() == 0 or self.no_kernel(x.device, dtype) is not None:
            y: Tensor = self.out(F.silu(self.gate(x)) * self.inner(x))
            return y
        run = SwiGLU._by_kernels
        y = run(self, x, dtype) if torch.compiler.is_compiling() else repeated(self, run, (x,), dtype)
        return y

    def _by_kernels(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        from axes.kernels.rows.gated import gated  # triton is imported by the first call that needs it

        hidden = self.out.in_features
        weights, groups = (self.gate.weight, self.inner.weight), (((0, 0, hidden), (1, 0, hidden)),)
        (both,) = products(x.to(dtype), weights, groups, (2 * hidden,))
        y: Tensor = self.out(gated(both))
        return y

    def no_kernel(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why the gate is multiplied by torch's operations, or None if one launch does it, and one its gradients."""
        if not is_plain(self.gate) or not is_plain(self.inner):
            return "a projection is not a plain nn.Linear, whose gradient of x may be added to another's"
        return versions.no_kernel(device, dtype)


class Trunk(nn.Module):
    """A language model but for its head: an embedding, sublayers in their mixers, and a last norm.

    Args:
        architecture: names and sizes.
        layer, mixer: what makes a sequence layer and a mixer, in the place of the classes of these names.
        shared: the first two sublayers with their norms and mixers are those of every block.
        stream_dtype: of what sublayers read and add to; None for that of what enters, the embedding's. Norms are in
            the dtype of their weights, whatever it is.
    """

    _norms_before: Sequence[Before] = ()  # made by the first call that takes norms where a sublayer is read

    def __init__(
        self,
        architecture: Architecture,
        *,
        layer: Callable[..., Any] | None = None,
        mixer: Callable[..., Any] | None = None,
        shared: bool = False,
        stream_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        width = architecture.width
        layers = [layer or catalogue.get(name, axis="sequence").cls for name in architecture.each_sequence()]
        mixer = mixer or catalogue.get(architecture.depth, axis="depth").cls
        self.architecture, self.stream_dtype = architecture, stream_dtype
        self.embedding = nn.Embedding(architecture.vocabulary, width, **factory)  # its rows are of unit variance
        self.sublayers = nn.ModuleList()
        self.mixers = nn.ModuleList()
        self.norms = nn.ModuleList()
        for index in range(2 * architecture.layers):
            if shared and index > 1:
                for parts in (self.sublayers, self.mixers, self.norms):
                    parts.append(parts[index % 2])
                continue
            make = layers[index // 2]
            made: nn.Module = (
                make(width, **accepted_options(make, heads=architecture.heads), **factory)
                if index % 2 == 0
                else SwiGLU(width, **factory)
            )
            mixed = mixer(width, layer_index=index, **accepted_options(mixer, streams=architecture.streams), **factory)
            self.sublayers.append(made)
            self.mixers.append(mixed)
            self.norms.append(self._norm(mixed, factory))
        self.norm = self._norm(self.mixers[-1], factory)

    def _norm(self, mixer: nn.Module, factory: dict[str, Any]) -> nn.Module:
        # a mixer that normalises what it writes (post-norm) leaves nothing for a norm before the sublayer to do
        if getattr(mixer, "prenorm", True):
            return RMSNorm(self.architecture.width, **factory)
        return nn.Identity()

    def hidden(
        self,
        x: Tensor,
        state: LayerStates | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        recurrent: bool = False,
        around: Callable[[Block, Streams], Streams] | None = None,
    ) -> tuple[Tensor, LayerStates]:
        """What a head reads.

        Args:
            x: embedded tokens (B, T, width).
            state: what a call returned for the tokens before these.
            mask: (B, T), true at real tokens: no sequence layer sees the others, whose outputs mean nothing.
            cu_seqlens: boundaries (N + 1,) of N sequences packed into B = 1, with a state each.
            recurrent: T = 1, by the recurrent form of every sequence layer.
            around: how a block is run, given it and the streams before it: at once, unless streams are to be seen or
                computed again.

        Returns:
            (B, T, width), in autocast's dtype under autocast, and of every sequence layer the state after the last
            token.
        """
        x = x if self.stream_dtype is None else x.to(self.stream_dtype)
        memories = list(state) if state is not None else [None] * self.architecture.layers
        if len(memories) != self.architecture.layers:
            who = type(self).__name__
            raise ShapeError(f"{who}: the state holds {len(memories)} layers, not {self.architecture.layers}")
        after = list(memories)
        mixers: list[Any] = list(self.mixers)

        def sublayer(index: int, x: Tensor, normed: bool = False) -> Tensor:
            made, x = self.sublayers[index], x if normed else self._normed(self.norms[index], x)
            if index % 2:
                y: Tensor = made(x)
                return y
            layer: Any = made
            if recurrent:
                token, after[index // 2] = layer.step(x[:, 0], memories[index // 2])
                y = token[:, None]
            elif mask is None and cu_seqlens is None:
                y, after[index // 2] = layer(x, memories[index // 2])
            else:
                y, after[index // 2] = layer(x, memories[index // 2], mask=mask, cu_seqlens=cu_seqlens)
            return y

        streams, recompute = mixers[0].expand(x), self.architecture.recompute
        before = self._before(x) if around is None and not recompute else None
        sublayers = [partial(sublayer, index, normed=before is not None) for index in range(len(mixers))]
        if around is None and not recompute and self.no_norms_by_kernel(x) is None:
            return self._added(sublayer, streams), tuple(after)
        if around is None:
            streams = through(sublayers, mixers, streams, recompute, before)
        else:
            for first in range(0, len(mixers), 2):
                both = slice(first, first + 2)
                streams = around(partial(through, sublayers[both], mixers[both], recompute=recompute), streams)
        last = self._normed(self.norm, mixers[-1].reduce(streams))
        return last.to(taken_in(last)), tuple(after)

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """In a dtype that products with weights take, where streams have one of their own and no norm converts it."""
        if no_norm_by_kernel(norm, x) is None:
            normed: Tensor = repeated(norm, _norm_by_kernel, (x,), *_norm_facts(norm))
            return normed
        y: Tensor = norm(x)
        if self.stream_dtype is None:
            return y
        return y.to(torch.promote_types(y.dtype, taken_in(self.embedding.weight)))

    def _before(self, x: Tensor) -> Sequence[Before] | None:
        """The norms before sublayers, to be taken where these are read, or None where torch's operations take one."""
        if any(no_norm_by_kernel(norm, x) is not None for norm in self.norms):
            return None
        known, pairs = self._norms_before, list(zip(self.mixers, self.norms, strict=True))
        if [(b.mixer, b.module) for b in known] != pairs:  # modules are compared as themselves
            self._norms_before = [Before(mixer, norm, _norm_by_kernel, _norm_facts) for mixer, norm in pairs]
        return self._norms_before

    def no_norms_by_kernel(self, x: Tensor) -> str | None:
        """Why a sublayer's output is added and the next norm taken by torch's operations, or None if one launch does
        both, and one their gradients."""
        if not all(mixer.added for mixer in self.mixers):
            return "streams are more than a sum"
        norms = [*self.norms, self.norm]
        if (reason := next((r for norm in norms if (r := no_norm_by_kernel(norm, x)) is not None), None)) is not None:
            return reason
        said = {cast(Tensor, norm.weight).dtype for norm in norms}
        return "norms are neither of the streams' dtype nor of float32" if len(said) > 1 else None

    def _added(self, sublayer: Callable[..., Tensor], streams: Streams) -> Tensor:
        """`through` and the last norm, where every norm is one pass with the addition before it: the first has none."""
        from axes.kernels.rows.norm import add_norm  # triton is imported by the first call that needs it

        mixers: list[Any] = list(self.mixers)
        x, _ = mixers[0].read(streams)
        y, dtype = None, taken_in(cast(Tensor, self.norm.weight))  # as `RMSNorm` and the products behind it
        for index in range(len(mixers)):
            x, normed = add_norm(x, y, cast(Tensor, self.norms[index].weight), _EPS, dtype)
            y = sublayer(index, normed, normed=True)
        return add_norm(x, y, cast(Tensor, self.norm.weight), _EPS, dtype)[1]

    def extra_repr(self) -> str:
        return str(self.architecture)


@final
class LanguageModel(Trunk):
    """Next-token logits from tokens; `forward` over a window and `step` over one token agree.

    The output head is not tied to the embedding: with 256 bytes the table is small, and the two then have their own
    scale (unit rows where streams begin, a near-uniform prediction where they end) and their own optimizer rule.

    Args:
        architecture: names and sizes.
        layer, mixer: what makes a sequence layer and a mixer, in the place of the classes of these names.
        shared: the first two sublayers with their norms and mixers are those of every block.
        stream_dtype: of what sublayers read and add to; None for that of what enters, the embedding's. Norms are in
            the dtype of their weights, whatever it is.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        layer: Callable[..., Any] | None = None,
        mixer: Callable[..., Any] | None = None,
        shared: bool = False,
        stream_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        more: dict[str, Any] = {"shared": shared, "stream_dtype": stream_dtype, "device": device, "dtype": dtype}
        super().__init__(architecture, layer=layer, mixer=mixer, **more)
        self.head = nn.Linear(architecture.width, architecture.vocabulary, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the model's own tables; layers and mixers initialise themselves on construction."""
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.normal_(self.head.weight, std=1.0 / self.architecture.width)

    def forward(self, tokens: Tensor, state: LayerStates | None = None) -> tuple[Tensor, LayerStates]:
        """Logits at every position.

        Args:
            tokens: (B, T) integers.
            state: what `forward` or `step` returned for the tokens before these.

        Returns:
            logits (B, T, vocabulary) and the state after the last token.
        """
        if tokens.ndim != 2:
            raise ShapeError(f"LanguageModel.forward: tokens must be (B, T), got {tuple(tokens.shape)}")
        hidden, state = self.hidden(self.embedding(tokens), state)
        return self.head(hidden), state

    def loss(self, windows: Tensor, state: LayerStates | None = None) -> Tensor:
        """Mean cross-entropy of each token after the first from those before it, in nats; logits are never all there.

        Args:
            windows: (B, T + 1) integers.
            state: what `forward` or `step` returned for the tokens before these.
        """
        if windows.ndim != 2 or windows.shape[1] < 2:
            raise ShapeError(f"LanguageModel.loss: windows must be (B, T + 1), T >= 1, got {tuple(windows.shape)}")
        hidden, _ = self.hidden(self.embedding(windows[:, :-1]), state)
        return linear_cross_entropy(hidden, self.head.weight, windows[:, 1:])

    def step(self, token: Tensor, state: LayerStates | None = None) -> tuple[Tensor, LayerStates]:
        """Logits after one more token, by the recurrent form of every sequence layer.

        Args:
            token: (B,) integers.
            state: what `forward` or `step` returned for the tokens before this one.

        Returns:
            logits (B, vocabulary) and the new state.
        """
        if token.ndim != 1:
            raise ShapeError(f"LanguageModel.step: token must be (B,), got {tuple(token.shape)}")
        hidden, state = self.hidden(self.embedding(token[:, None]), state, recurrent=True)
        return self.head(hidden)[:, 0], state


@final
class Logits(nn.Module):
    """tokens (B, T) -> logits (B, T, vocabulary): the model as training and optimizers that differentiate it see it."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)[0]
        return logits


def state_bytes(state: Any) -> int:
    """Bytes of every tensor in a nested state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, (tuple, list)):
        return sum(state_bytes(part) for part in state)
    return 0
