"""A model for sequences that are split over processes, and which tokens are whose."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from axes.errors import AxesError, ShapeError, wrong_type
from axes.parallel.group import group_of
from axes.parallel.split import Split
from axes.sequence.base import SequenceLayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=nn.Module)

# Modules of torch that mix the tokens they are given, and so would miss those of other processes.
_MIXING = (
    nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase, nn.RNNCellBase,
    nn.Conv1d, nn.ConvTranspose1d, nn.modules.batchnorm._BatchNorm,
)  # fmt: skip


def sequence(model: Model, mesh: DeviceMesh | dist.ProcessGroup, *, states: bool = False) -> Model:
    """The model, its sequence layers told that a sequence's tokens are split over the processes of a mesh.

    Every process has the whole model and gives it its own tokens (B, own T, ...) as `segment` cuts them, in the order
    of the ranks; outputs are those of its tokens. A layer whose state is an affine chain exchanges maps of states, any
    other its heads for tokens (all to all); what acts on tokens one by one (mixers along depth, networks, norms) needs
    nothing. Backward is called on all processes, on their own losses: each gets the gradient of the sum of all losses
    in its own use of the parameters, so that parameters' gradients are to be added up, or averaged where losses are
    means, as DistributedDataParallel and fully_shard do over this mesh or over one that holds it.

    Args:
        model: changed in place; before it is wrapped, sharded or compiled, or after.
        mesh: one dimension of a DeviceMesh, or a process group.
        states: return the state after the last token, on every process, instead of None. A state given to the model is
            that before the first token, the same on every process.

    Raises:
        AxesError: no processes; no sequence layer; a module that mixes tokens in a way that is not known; heads that
            cannot be shared out; in a call, another process that is gone or did not come in the group's time.
    """
    who = "parallel.sequence"
    if not isinstance(model, nn.Module):
        raise wrong_type(who, "model", "an nn.Module", model)
    group = group_of(who, mesh)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SequenceLayer)}
    if not layers:
        raise AxesError(f"{who}: {type(model).__name__} holds no layer of axes.sequence whose tokens could be split")
    for name, module in model.named_modules():
        if isinstance(module, _MIXING):
            raise AxesError(
                f"{who}: {name or 'the model'} is a {type(module).__name__}, which mixes the tokens that it is given "
                "and knows nothing of other processes: put a layer of axes.sequence in its place (SoftmaxAttention "
                "for attention), or leave this model whole"
            )
    made = {name: Split(f"{type(m).__name__} {name}".rstrip(), m, group, states) for name, m in layers.items()}
    for name, layer in layers.items():
        layer.across = made[name]
    return model


def whole(model: Model) -> Model:
    """The model as before `sequence`: every call is a whole sequence."""
    for module in model.modules():
        if isinstance(module, SequenceLayer):
            module.across = None
    return model


def segment(x: Tensor, mesh: DeviceMesh | dist.ProcessGroup, dim: int = 1, *, more: int = 0) -> Tensor:
    """This process's tokens of a whole tensor: equal parts in the order of the ranks, the first longer by one where
    they cannot be equal.

    more: tokens of the next part beside them. Of windows (B, T + 1), whose last column is only a target, each process
    takes (B, own T + 1) with more=1.
    """
    group = group_of("parallel.segment", mesh)
    tokens = x.shape[dim] - more
    if tokens < group.size:
        raise ShapeError(f"parallel.segment: {tokens} tokens are too few for {group.size} processes")
    each, longer = divmod(tokens, group.size)
    first = each * group.rank + min(group.rank, longer)
    return x.narrow(dim, first, each + (group.rank < longer) + more)
