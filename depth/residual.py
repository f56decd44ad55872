"""One stream: the residual connection, the two places where a norm can stand, and one block for every step."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean, Sphere
from axes.core.monoids import Identity
from axes.core.rates import Signal
from axes.core.state_update import State, StateUpdate
from axes.depth import kernels
from axes.depth.base import Coefficients, DepthMixer, Streams
from axes.errors import ShapeError
from axes.routes.choice import Implementation

_ONE = torch.ones(1)  # that nothing is multiplied by: it may be on another device


class _OneStream(DepthMixer):
    """pre = post = 1 on one stream, without parameters."""

    sees = False
    adds = "one stream with constants of one is one addition"

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, layer_index, 1, device=device, dtype=dtype)

    def coefficients(self, streams: Tensor) -> Coefficients:
        one = streams.new_ones(1)
        return Coefficients(one, {"k": one})

    @property
    def added(self) -> bool:
        return kernels.adds(self.update) and not kernels.normalises(self.update) and self.implementation is None

    # with weights of one a read is the stream, and a write an addition if the tuple says no more

    def _seen(self, kept: Tensor, who: Implementation) -> tuple[Tensor, Coefficients]:
        if not kernels.adds(self.update):
            return super()._seen(kept, who)
        return self._left(kept, who), Coefficients(_ONE, {"k": _ONE})

    def _made(self, kept: Tensor, y: Tensor, coefficients: Coefficients, who: Implementation) -> Tensor:
        if not kernels.adds(self.update):
            return super()._made(kept, y, coefficients, who)
        return kernels.on_sphere(self.update, (kept + y[..., None, :]).to(kept.dtype), written=True)

    def _left(self, kept: Tensor, who: Implementation) -> Tensor:
        return kernels.on_sphere(self.update, kept, written=False).squeeze(-2)


@final
class Residual(_OneStream):
    """h <- h + f(h): nothing is forgotten, nothing is normalised.

    `prenorm` is true: the sublayer brings its own norm, as in every language model. A network of such sublayers on this
    mixer is the pre-norm transformer, with the norm and its gain inside f. It is the control of every other mixer.

    Source: He et al. 2016, eq. 1. Differs: nothing acts on the stream after the addition.
    """

    update: StateUpdate = StateUpdate(Alignment(), Euclidean(), Identity(), Step())
    name: ClassVar[str] = "residual"
    paper: ClassVar[str] = "Deep residual learning for image recognition (He et al. 2016)"
    equation: ClassVar[str] = "h <- h + f(h)"
    differs: ClassVar[str] = "nothing acts on the stream after the addition; the norm belongs to the sublayer"
    bibtex: ClassVar[str] = """@inproceedings{he2016deep,
  title={Deep Residual Learning for Image Recognition},
  author={He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian},
  booktitle={IEEE Conference on Computer Vision and Pattern Recognition},
  year={2016}
}"""


@final
class PreNorm(_OneStream):
    """h <- h + f(Norm(h)): dual averaging on a sphere. theta = h is stored, its projection W = Norm(h) is read.

    `prenorm` is false: the tuple's read is the norm, so the sublayer takes none; `reduce` normalises too, which is the
    final norm of a pre-norm network. The same recursion as `Residual` with a norm in the sublayer, declared where it
    acts; the sublayer's first linear map holds the gain.

    Source: Xiong et al. 2020, section 3; Zhang and Sennrich 2019 (RMSNorm). Differs: RMSNorm, without gain.
    """

    update: StateUpdate = StateUpdate(Alignment(), Sphere("columns", radius=None), Identity(), Step())
    name: ClassVar[str] = "pre-norm"
    paper: ClassVar[str] = "On layer normalization in the transformer architecture (Xiong et al. 2020)"
    equation: ClassVar[str] = "h <- h + f(Norm(h)), output Norm(h)"
    differs: ClassVar[str] = "RMSNorm instead of LayerNorm; no gain, which the next linear map can hold"
    bibtex: ClassVar[str] = """@inproceedings{xiong2020layer,
  title={On Layer Normalization in the Transformer Architecture},
  author={Xiong, Ruibin and Yang, Yunchang and He, Di and Zheng, Kai and Zheng, Shuxin and Xing, Chen and
          Zhang, Huishuai and Lan, Yanyan and Wang, Liwei and Liu, Tie-Yan},
  booktitle={International Conference on Machine Learning},
  year={2020}
}"""


@final
class PostNorm(_OneStream):
    """h <- Norm(h + f(h)): projected (mirror) descent on the same sphere. W = Norm(theta) is stored: lazy=False.

    `prenorm` is false: what is read has been normalised by the write before it (what enters the network has not).

    Source: Vaswani et al. 2017, section 3.1. Differs: RMSNorm, without gain, which here would stay in the stream.
    """

    update: StateUpdate = StateUpdate(Alignment(), Sphere("columns", radius=None), Identity(), Step(lazy=False))
    name: ClassVar[str] = "post-norm"
    paper: ClassVar[str] = "Attention is all you need (Vaswani et al. 2017)"
    equation: ClassVar[str] = "h <- Norm(h + f(h))"
    differs: ClassVar[str] = "RMSNorm instead of LayerNorm; no gain"
    bibtex: ClassVar[str] = """@inproceedings{vaswani2017attention,
  title={Attention Is All You Need},
  author={Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and
          Gomez, Aidan N. and Kaiser, Lukasz and Polosukhin, Illia},
  booktitle={Advances in Neural Information Processing Systems},
  year={2017}
}"""


@final
class UniversalTransformer(_OneStream):
    """h <- Norm(h + p_t + f(h + p_t)): one block for every step t, which it is told by the position p_t of its depth,

        p_t[2 j] = sin(t / 10000^(2 j / d)),   p_t[2 j + 1] = cos(t / 10000^(2 j / d)),   t = 1, 2, ...

    added once a step, before the block's first sublayer. The tuple is that of `PostNorm`: nothing of the update differs
    between steps but the datum. Streams are the tuple's `State`, whose count of data is the depth: the mixers of a
    block, shared as its weights are, hold no number of a layer.

    Args:
        layer_index: the sublayer's place in the block.
        sublayers: of the block.

    Source: Dehghani et al. 2019, eqs. 4 and 5 and the part of eqs. 6 and 7 that depends on t. Differs: positions of
    tokens are the sublayers' own; RMSNorm, without gain; no dynamic halting.
    """

    counts = True
    update: StateUpdate = PostNorm.update
    name: ClassVar[str] = "universal-transformer"
    paper: ClassVar[str] = "Universal transformers (Dehghani et al. 2019)"
    equation: ClassVar[str] = "h <- Norm(h + p_t + f(h + p_t)), the same f at every t"
    differs: ClassVar[str] = "positions of tokens are the sublayers' own; RMSNorm; no dynamic halting"
    bibtex: ClassVar[str] = """@inproceedings{dehghani2019universal,
  title={Universal Transformers},
  author={Dehghani, Mostafa and Gouws, Stephan and Vinyals, Oriol and Uszkoreit, Jakob and Kaiser, {\\L}ukasz},
  booktitle={International Conference on Learning Representations},
  year={2019}
}"""

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        *,
        sublayers: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, layer_index, device=device, dtype=dtype)
        if not isinstance(sublayers, int) or sublayers < 1:
            raise ShapeError(f"{type(self).__name__}: sublayers must be an integer >= 1, got {sublayers!r}")
        self.sublayers = sublayers

    def read(self, streams: Streams) -> tuple[Tensor, Coefficients]:
        x, coefficients = super().read(streams)
        if self.layer_index % self.sublayers:
            return x, coefficients
        assert isinstance(streams, State)
        position = self.position(torch.div(streams.count, self.sublayers, rounding_mode="floor") + 1, x)
        return x + position, coefficients._replace(signal={**coefficients.signal, "position": position})

    def written(self, y: Tensor, coefficients: Coefficients) -> Signal:
        """What the sublayer saw besides the state is written with its output."""
        position = coefficients.signal.get("position", 0.0)
        return {"k": coefficients.signal["k"], "v": y + position}

    def position(self, step: Tensor, like: Tensor) -> Tensor:
        """p_t (d) of step t, in the dtype and on the device of `like`."""
        j = torch.arange((self.d_model + 1) // 2, dtype=torch.float64, device=like.device)
        angle = step.to(j) * 10000.0 ** (-2 * j / self.d_model)
        return torch.stack((angle.sin(), angle.cos()), -1).flatten()[: self.d_model].to(like.dtype)
