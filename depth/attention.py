"""Sublayers that read every earlier output: by attention, over outputs or sums of blocks, or by constant weights."""

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
        return {"k": one_hot(self.target, streams[..., 0])}


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
            return one_hot(self.target, streams[..., 0])
        return torch.nn.functional.pad(self.exit.to(streams.dtype), (0, self.streams - len(self.exit)))
