"""Sublayers that read every earlier output: by attention, over outputs or sums of blocks, or by weights of their own,
constant or predicted from the last output."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Entropic, Euclidean
from axes.core.memory import List
from axes.core.monoids import Identity
from axes.core.rates import Signal
from axes.core.state_update import StateUpdate
from axes.depth.base import Coefficients, DepthMixer
from axes.depth.initial import one_hot
from axes.errors import ShapeError

EPS = 1e-6

BIBTEX = """@article{kimi2026attention,
  title={Attention Residuals},
  author={{Kimi Team}},
  journal={arXiv preprint arXiv:2603.15031},
  year={2026}
}"""


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@final
class AttentionResiduals(DepthMixer):
    """x_in = sum_i softmax_i(w . RMSNorm(v_i)) v_i over what entered and all earlier outputs, which a list keeps.

    Start: w = 0, the mean of all v_i, which equals pre-norm up to the norm's eps. The output is read by a query of its
    own with `learned_reduce`, by their mean without.

    Source: Kimi Team 2026, full form. Differs: the key norm's gain is folded into w.
    """

    update: StateUpdate = StateUpdate(Alignment(), Entropic(), Identity(), Step(), List(scale=1.0))
    name: ClassVar[str] = "attention-residuals"
    paper: ClassVar[str] = "Attention residuals (Kimi Team 2026), full"
    equation: ClassVar[str] = "x_in = sum_i softmax_i(w . RMSNorm(v_i)) v_i,  v_l = f(x_in)"
    differs: ClassVar[str] = "the key norm's gain is folded into the query"
    bibtex: ClassVar[str] = BIBTEX

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        *,
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, layer_index, 1, device=device, dtype=dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Parameter(torch.empty(d_model, **factory))
        self.exit = nn.Parameter(torch.empty(d_model, **factory)) if learned_reduce else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.query.zero_()
        if self.exit is not None:
            self.exit.zero_()

    def coefficients(self, streams: Tensor) -> Coefficients:
        return Coefficients(self.query.to(streams.dtype), {})

    def written(self, y: Tensor, coefficients: Coefficients) -> Signal:
        return {"k": _unit(y), "v": y}

    def leave(self, streams: Tensor) -> Tensor:
        return torch.zeros_like(streams[0, ..., 0, :]) if self.exit is None else self.exit.to(streams.dtype)


def _cosines(like: Tensor) -> Tensor:
    """Rows (m, d) of unit length, orthogonal as far as m <= d: a cosine transform."""
    m, d = like.shape
    i, j = (torch.arange(n, dtype=torch.float64, device=like.device) + 0.5 for n in (m, d))
    return (2 / d) ** 0.5 * torch.cos(torch.pi / d * i[:, None] * j)


class _Sources(DepthMixer):
    """Stream 0 holds what entered, each further one what some sublayers wrote: k = e_i, and the read says the rest."""

    entry = "first"
    update: StateUpdate = StateUpdate(Alignment(), Euclidean(), Identity(), Step())

    def _write_to(self, index: int) -> None:
        if index >= self.streams:
            raise ShapeError(
                f"{type(self).__name__}: sublayer {self.layer_index} writes to stream {index} of {self.streams}: "
                f"streams must be at least {index + 1}, one more than there are outputs or blocks to keep"
            )
        self.target = index

    def _key(self, streams: Tensor) -> Signal:
        return {"k": one_hot(self.target, streams.new_empty(self.streams))}


@final
class BlockAttentionResiduals(_Sources):
    """The same attention over sums of blocks: `size` sublayers add to one stream, the first stream is what entered.

    Args:
        streams: one more than there are blocks.
        size: sublayers in a block; 1 is `AttentionResiduals` without its list.

    Source: Kimi Team 2026, block form. Differs: the key norm's gain is folded into w.
    """

    name: ClassVar[str] = "block-attention-residuals"
    paper: ClassVar[str] = "Attention residuals (Kimi Team 2026), block"
    equation: ClassVar[str] = "x_in = sum_i softmax_i(w . RMSNorm(X_i)) X_i,  X_b <- X_b + f(x_in)"
    differs: ClassVar[str] = "the key norm's gain is folded into the query"
    bibtex: ClassVar[str] = BIBTEX

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 9,
        *,
        size: int = 2,
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, layer_index, streams, device=device, dtype=dtype)
        if not isinstance(size, int) or size < 1:
            raise ShapeError(f"{type(self).__name__}: size must be an integer >= 1, got {size!r}")
        self.size = size
        self._write_to(layer_index // size + 1)
        self.live = self.target + (layer_index % size > 0)  # the block's own sum is a source once it has begun
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Parameter(torch.empty(d_model, **factory))
        self.exit = nn.Parameter(torch.empty(d_model, **factory)) if learned_reduce else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.query.zero_()
        if self.exit is not None:
            self.exit.zero_()

    def coefficients(self, streams: Tensor) -> Coefficients:
        return Coefficients(self._weights(streams, self.query, self.live), self._key(streams))

    def leave(self, streams: Tensor) -> Tensor:
        return self._weights(streams, torch.zeros_like(self.query) if self.exit is None else self.exit, self.target + 1)

    def _weights(self, streams: Tensor, query: Tensor, live: int) -> Tensor:
        weights = (_unit(streams[..., :live, :]) @ query.to(streams.dtype)).softmax(-1)
        return torch.nn.functional.pad(weights, (0, self.streams - live))


@final
class DenseFormer(_Sources):
    """h_l = sum_{i <= l} a_{l,i} z_i with z_i the output of block i: the sublayer is a block with its own residuals.

    Args:
        streams: one more than there are blocks.

    Start: a_{l,l} = 1 and 0 elsewhere: the network without the averages. The averages after the last block are
    parameters with `learned_reduce`.

    Source: Pagliardini et al. 2024, without dilation. Differs: averages belong to the block that reads them.
    """

    sees = False
    name: ClassVar[str] = "denseformer"
    paper: ClassVar[str] = "DenseFormer: enhancing information flow in transformers (Pagliardini et al. 2024)"
    equation: ClassVar[str] = "h_l = sum_i a_{l,i} z_i,  z_{l+1} = f(h_l)"
    differs: ClassVar[str] = "no dilation or period; averages belong to the block that reads them"
    bibtex: ClassVar[str] = """@inproceedings{pagliardini2024denseformer,
  title={{DenseFormer}: Enhancing Information Flow in Transformers via Depth Weighted Averaging},
  author={Pagliardini, Matteo and Mohtashami, Amirkeivan and Fleuret, Fran{\\c{c}}ois and Jaggi, Martin},
  booktitle={Advances in Neural Information Processing Systems},
  year={2024}
}"""

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 13,
        *,
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, layer_index, streams, device=device, dtype=dtype)
        self._write_to(layer_index + 1)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.pre = nn.Parameter(torch.empty(self.target, **factory))
        self.exit = nn.Parameter(torch.empty(self.target + 1, **factory)) if learned_reduce else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weights in (self.pre, self.exit):
            if weights is not None:
                weights.copy_(one_hot(len(weights) - 1, weights))

    def coefficients(self, streams: Tensor) -> Coefficients:
        pre = torch.nn.functional.pad(self.pre.to(streams.dtype), (0, self.streams - self.target))
        return Coefficients(pre, self._key(streams))

    def leave(self, streams: Tensor) -> Tensor:
        if self.exit is None:
            return one_hot(self.target, streams.new_empty(self.streams))
        return torch.nn.functional.pad(self.exit.to(streams.dtype), (0, self.streams - len(self.exit)))


@final
class DynamicDense(_Sources):
    """h_l = sum_{i <= l} a_{l,i}(z_l) z_i,  a_l = W2 gelu(W1 RMSNorm(z_l)) + b: what `DenseFormer` reads by constants,
    every token reads by weights of its own, predicted from the last output.

    Args:
        streams: one more than there are blocks.

    Start: W2 = 0, b_l = 1 and 0 elsewhere: the network without the connections, as in `DenseFormer`.

    Source: Xiao et al. 2025, one way. Differs: one read for queries, keys, values and the block's residual, where four
    ways have weights of their own; weights belong to the block that reads, the first one among them.
    """

    name: ClassVar[str] = "dynamic-dense"
    paper: ClassVar[str] = "MUDDFormer: multiway dynamic dense connections (Xiao et al. 2025), one way"
    equation: ClassVar[str] = "h_l = sum_i a_{l,i} z_i,  a_l = W2 gelu(W1 RMSNorm(z_l)) + b,  z_{l+1} = f(h_l)"
    differs: ClassVar[str] = "one read for queries, keys, values and residual; weights belong to the block that reads"
    bibtex: ClassVar[str] = """@article{xiao2025mudd,
  title={{MUDDFormer}: Breaking Residual Bottlenecks in Transformers via Multiway Dynamic Dense Connections},
  author={Xiao, Da and Meng, Qingye and Li, Shengping and Yuan, Xingyuan},
  journal={arXiv preprint arXiv:2502.12170},
  year={2025}
}"""
    dynamic_names: ClassVar[frozenset[str]] = frozenset({"down", "up", "exit_down", "exit_up"})

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 13,
        *,
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, layer_index, streams, device=device, dtype=dtype)
        self._write_to(layer_index + 1)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **factory))

        now, after = self.target, self.target + 1
        self.down, self.up, self.pre = empty(now, d_model), empty(now, now), empty(now)
        self.exit_down = empty(after, d_model) if learned_reduce else None
        self.exit_up = empty(after, after) if learned_reduce else None
        self.exit = empty(after) if learned_reduce else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for down, up, constant in (
            (self.down, self.up, self.pre),
            (self.exit_down, self.exit_up, self.exit),
        ):
            if down is not None and up is not None and constant is not None:
                down.copy_(_cosines(down))  # not zero, or neither map would ever move
                up.zero_()
                constant.copy_(one_hot(len(constant) - 1, constant))

    def coefficients(self, streams: Tensor) -> Coefficients:
        return Coefficients(self._weights(streams, self.down, self.up, self.pre), self._key(streams))

    def leave(self, streams: Tensor) -> Tensor:
        if self.exit_down is None or self.exit_up is None or self.exit is None:
            return one_hot(self.target, streams.new_empty(self.streams))
        return self._weights(streams, self.exit_down, self.exit_up, self.exit)

    def _weights(self, streams: Tensor, down: Tensor, up: Tensor, constant: Tensor) -> Tensor:
        last = _unit(streams[..., len(constant) - 1, :])
        hidden = torch.nn.functional.gelu(last @ down.to(last.dtype).mT)
        weights = hidden @ up.to(last.dtype).mT + constant.to(last.dtype)
        return torch.nn.functional.pad(weights, (0, self.streams - len(constant)))
