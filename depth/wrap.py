"""Any model in one call: the additions of its residual blocks become a mixer's reads and writes.

    wrap(model, MHC, streams=4)

A block keeps its class (a subclass of it), its children and their names; it gains `mixers`, one for each sublayer. The
first block of a stack expands the stream, the last one reduces it, and between them the model hands on (B, T, n, d).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from axes.depth.base import DepthMixer
from axes.depth.stack import through
from axes.depth.wired import NotResidual, Wiring
from axes.depth.wiring import leaves, wiring
from axes.errors import AxesError, IllegalUpdate, ShapeError, wrong_type

Model = TypeVar("Model", bound=nn.Module)

# relative, in float64: what a mixer may change at the start and still be called the same model
ROUNDING = 1e-10


class MixerClass(Protocol):
    """A mixer class, or what `mixer(update)` returns."""

    def __call__(self, d_model: int, layer_index: int = 0, /, **options: Any) -> DepthMixer: ...


def wrap(
    model: Model,
    mixer: MixerClass,
    streams: int | None = None,
    *,
    blocks: Callable[[nn.Module], bool] | None = None,
    d_model: int | None = None,
    dtype: torch.dtype | None = None,
    recompute: bool = False,
    **options: Any,
) -> Model:
    """Replace the residual additions of `model`, in place, by `mixer`; the model as it was at the start, to rounding.

    A block is found by what it computes: its input, plus what chains of its children make of it. Members of a
    ModuleList, ModuleDict or Sequential are asked, the outermost first; neighbours in a list are one stack and must run
    in its order. Norm before or after the sublayer, sublayers in parallel, further arguments and outputs (masks,
    caches, attention weights) are all the same to it. Between the blocks of a stack the model must do nothing with
    what it hands on, (B, T, n, d): hidden states that it records there are streams.

    Args:
        model: any module. Wrap before `torch.compile` and `fully_shard`; activation checkpointing as you like.
        mixer: a mixer class, or what `mixer(update)` returns, that starts as a plain residual connection.
        streams: n, by default the mixer's own.
        blocks: which modules are blocks, wherever they are in a list; by default all that turn out to be residual.
        d_model: width of the stream, by default that of the blocks' norms.
        dtype: of the mixers' parameters, by default that of the block.
        recompute: keep the streams that enter a block alone, and make those inside again in the backward
            (`axes.depth.stack`).
        options: further options of the mixer.

    Raises:
        NotResidual: no block was found, or one that `blocks` chose is none; says what was looked at, and why not.
        IllegalUpdate: the mixer does not start as a plain residual connection, or hands on more than streams.

    >>> from axes.depth import MHC
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.norm, self.map = nn.LayerNorm(8), nn.Linear(8, 8)
    ...     def forward(self, x):
    ...         return x + self.map(self.norm(x))
    >>> model = wrap(nn.Sequential(Block(), Block()), MHC, streams=2)
    >>> [name for name, _ in model[1].named_parameters()][-4:]
    ['map.bias', 'mixers.0.phi', 'mixers.0.alpha', 'mixers.0.bias']
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("wrap", "model", "a module", model)
    if not isinstance(recompute, bool):
        raise ShapeError(f"wrap: recompute must be True (inside of every block) or False, got {recompute!r}")
    if streams is not None:
        options["streams"] = streams
    if any(isinstance(module, MixedBlock) for module in model.modules()):
        raise AxesError("wrap: the model is wrapped already; unwrap(model) first")
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        raise AxesError("wrap: the model is sharded already: wrap it first, so that its mixers are sharded too")
    require_plain_start(mixer, options)
    for neighbours in find(model, blocks, d_model):
        index = 0
        for place, (block, wired, width) in enumerate(neighbours):
            parameter = next((p for p in block.parameters() if p.is_floating_point()), torch.empty(0))
            made = []
            for _ in wired.sublayers:
                made.append(mixer(width, index, device=parameter.device, dtype=dtype or parameter.dtype, **options))
                index += 1
            block.__class__ = mixed_class(type(block))
            block.mixers = nn.ModuleList(made).train(block.training)
            block._mixing = Mixing(wired, place == 0, place == len(neighbours) - 1, recompute)
    return model


def unwrap(model: Model) -> Model:
    """Take the mixers out again, in place: the blocks add as they did before, with the weights that they have now."""
    wrapped: list[Any] = [module for module in model.modules() if isinstance(module, MixedBlock)]
    if not wrapped:
        raise AxesError("unwrap: the model holds no wrapped block")
    for block in wrapped:
        if "mixes" not in vars(type(block)):
            raise AxesError(f"unwrap: {type(block).__name__} has been made of a wrapped block since: undo that first")
    for block in wrapped:
        block.__class__ = type(block).mixes
        del block.mixers, block._mixing
    return model


# ---- a block that mixes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixing:
    """What a wrapped block does: its own wiring, and its place in the stack."""

    wiring: Wiring
    enters: bool
    leaves: bool
    recompute: bool = False


class MixedBlock(nn.Module):
    """What a wrapped block's class has before the class that it was."""

    mixers: nn.ModuleList
    _mixing: Mixing
    mixes: type[nn.Module]

    def __reduce__(self) -> Any:  # the class is made at run time: copies and pickles make it again
        return _again, (type(self).mixes,), self.__dict__


def _mixed_forward(self: MixedBlock, *args: Any, **kwargs: Any) -> Any:
    mixing = self._mixing
    wired = mixing.wiring
    given, rest = wired.bind(type(self).__name__, args, kwargs)
    mixers: list[Any] = list(self.mixers)
    streams = given[wired.names[0]]
    if mixing.enters:
        streams = mixers[0].expand(streams)
    results: list[Any] = []
    made = [partial(sublayer.run, self, given=given, results=results, rest=rest) for sublayer in wired.sublayers]
    streams = through(made, mixers, streams, mixing.recompute * len(mixers))
    if mixing.leaves:
        streams = mixers[-1].reduce(streams)
    return streams if wired.others is None else (streams, *wired.behind(self, given, results))


_MADE: dict[type[nn.Module], type[MixedBlock]] = {}


def mixed_class(base: type[nn.Module]) -> type[MixedBlock]:
    """The subclass of a block's class whose forward mixes; `isinstance` and class attributes stay what they were."""
    if base not in _MADE:
        space = {"forward": _mixed_forward, "mixes": base, "__module__": base.__module__}
        _MADE[base] = type(f"Mixed{base.__name__}", (MixedBlock, base), space)
    return _MADE[base]


def _again(base: type[nn.Module]) -> MixedBlock:
    cls = mixed_class(base)
    return cls.__new__(cls)


# ---- finding blocks --------------------------------------------------------------------------------------------------

Found = tuple[Any, Wiring, int]  # block, how it is wired, width of its stream


def find(model: nn.Module, blocks: Callable[[nn.Module], bool] | None, d_model: int | None) -> list[list[Found]]:
    """Stacks of residual blocks: neighbours in a list.

    Raises:
        NotResidual: there is none, or a block that was chosen is none, or stands in the model twice.
    """
    stacks: list[list[Found]] = []
    refused: dict[str, tuple[str, str]] = {}
    _search(model, "", blocks, d_model, stacks, refused)
    seen: set[int] = set()
    for block in (found[0] for stack in stacks for found in stack):
        if id(block) in seen:
            raise NotResidual(f"wrap: a {type(block).__name__} stands in the model twice, so it is not one place in it")
        if hasattr(block, "mixers"):
            raise NotResidual(f"wrap: {type(block).__name__} has an attribute `mixers` of its own: rename it")
        seen.add(id(block))
    if stacks:
        return stacks
    looked = "".join(f"\n  {where} ({kind}): {reason}" for kind, (where, reason) in refused.items())
    raise NotResidual(
        "wrap: no residual block in the model. Looked for members of a ModuleList, ModuleDict or Sequential that "
        "return their input plus what their children make of it"
        + (f"; looked at{looked}" if looked else "; there is no such member")
        + "\nWrite a block's additions as x + f(x) in its own forward, f a chain of its children; or choose blocks "
        "with wrap(..., blocks=lambda module: ...); or put Mixed(f, mixer) in the place of a sublayer"
    )


def _search(
    module: nn.Module,
    name: str,
    blocks: Callable[[nn.Module], bool] | None,
    d_model: int | None,
    stacks: list[list[Found]],
    refused: dict[str, tuple[str, str]],
) -> None:
    listed = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    stack: list[Found] = []
    found_before, refused_here = len(stacks), ""
    # `_modules`, since named_children leaves out what comes twice
    for key, child in [(key, child) for key, child in module._modules.items() if child is not None]:
        path = f"{name}.{key}" if name else key
        chosen = blocks is not None and blocks(child)
        if listed and (chosen or blocks is None) and any(True for _ in child.children()):
            try:
                width = d_model or stream_width(child)
                stack.append((child, wiring(child, width), width))
                continue
            except NotResidual as error:
                if chosen:
                    raise NotResidual(f"wrap: {path} ({type(child).__name__}) was chosen, but {error}") from error
                refused.setdefault(type(child).__name__, (path, str(error)))
                refused_here = f"{path} ({type(child).__name__}): {error}"
        elif chosen:
            raise NotResidual(
                f"wrap: {path} ({type(child).__name__}) was chosen, but it is no member of a ModuleList, ModuleDict or "
                "Sequential with children of its own: the order of blocks is taken from their list"
            )
        if stack:
            stacks.append(stack)
            stack = []
        _search(child, path, blocks, d_model, stacks, refused)
    if stack:
        stacks.append(stack)
    if isinstance(module, nn.ModuleList) and refused_here and any(one[0][0] in module for one in stacks[found_before:]):
        raise NotResidual(
            f"wrap: some members of {name or 'the list'} are residual blocks, but not {refused_here}. "
            "To wrap the others, choose them with wrap(..., blocks=lambda module: ...): streams then end before it"
        )


def stream_width(block: nn.Module) -> int:
    """The width that the block's own norms have."""
    widths = set(_norm_widths(leaves(block)))
    if len(widths) != 1:
        found = f"norms of widths {sorted(widths)}" if widths else "no norm with a weight or a normalized_shape"
        raise NotResidual(f"the width of its stream is not known, since it has {found}: give d_model")
    return widths.pop()


def _norm_widths(candidates: Iterator[nn.Module]) -> Iterator[int]:
    for module in candidates:
        shape: Sequence[int] | None = getattr(module, "normalized_shape", None)
        weight = module._parameters.get("weight")
        if shape is not None:
            yield shape[-1]
        elif weight is not None and weight.ndim == 1:
            yield len(weight)


# ---- which mixers ----------------------------------------------------------------------------------------------------


def require_plain_start(mixer: MixerClass, options: dict[str, Any]) -> None:
    """IllegalUpdate unless mixers, as they are initialised, read and write a plain residual stream.

    They are tried over a few sublayers, in float64, on random outputs of sublayers.
    """
    if not callable(mixer) or isinstance(mixer, nn.Module):
        raise wrong_type("wrap", "mixer", "a class of mixers, of which every sublayer gets one of its own", mixer)
    who = getattr(mixer, "__name__", type(mixer).__name__)
    numbers = torch.Generator("cpu").manual_seed(0)

    def drawn() -> Tensor:
        return torch.randn(2, 3, 8, generator=numbers, dtype=torch.float64, device="cpu")

    try:
        mixers = [mixer(8, index, device="cpu", dtype=torch.float64, **options) for index in range(6)]
    except TypeError as error:
        raise ShapeError(f"wrap: {who} does not take these options: {error}") from error
    plain = drawn()
    with torch.no_grad():
        streams = mixers[0].expand(plain)
        if not isinstance(streams, Tensor):
            raise IllegalUpdate(
                f"wrap: {who} remembers more than its streams, and the blocks of a model hand on one tensor: "
                "use `Mixed` in a model of your own"
            )
        for index, one in enumerate(mixers):
            x, coefficients = one.read(streams)
            _require_equal(x, plain, f"{who} reads something else than the stream in sublayer {index}")
            y = drawn()
            streams, plain = one.write(streams, y, coefficients), plain + y
        _require_equal(mixers[-1].reduce(streams), plain, f"{who} leaves something else than the stream")


def _require_equal(got: Tensor, plain: Tensor, what: str) -> None:
    error = ((got - plain).norm() / plain.norm()).item()
    if not error < ROUNDING:
        raise IllegalUpdate(
            f"wrap: {what} (relative difference {error:.1e} at the start), so the wrapped model would not be the model "
            "that it was; mixers that start as plain residual connections: Residual, HyperConnections, "
            "DynamicHyperConnections, MHC, MHCLite, IdentityMixing, JPmHC, JPmHCMeanPreserving"
        )


__all__ = ["NotResidual", "unwrap", "wrap"]
