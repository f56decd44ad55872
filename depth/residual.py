"""One stream: the residual connection, and the two places where a norm can stand."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean, Sphere
from axes.core.monoids import Identity
from axes.core.state_update import StateUpdate
from axes.depth.base import Coefficients, DepthMixer


class _OneStream(DepthMixer):
    """pre = post = 1 on one stream, without parameters."""

    sees = False

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
