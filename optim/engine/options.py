"""Keywords that every optimizer takes, and what its parameter groups have of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

from torch import Tensor, nn

from axes.errors import AxesError, unexpected
from axes.optim.engine.forms import Group, plain
from axes.optim.engine.generated import How
from axes.optim.engine.precision import DEFAULTS, Master, Moments, Rounding
from axes.optim.engine.router import QKV, Key

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]
FiniteCheck = Literal["raise", "skip"] | None


class Options(TypedDict, total=False):
    """Keywords that every optimizer takes.

    maximize: ascend.
    foreach: None or True batches parameters, False interprets the tuple parameter by parameter. A batch of a rule that
        acts entry by entry is one generated kernel over all parameters on CUDA devices for which Triton makes one, and
        torch's multi-tensor operations on others, with capturable, and for parameters that are subclasses of tensors.
    fused: True asks for that kernel, with all that it reads on the device: counts, and the scale and the flag of a
        gradient scaler. Refused where it cannot be had; for parameters on a CPU it is what foreach runs. A key of every
        group, like the next four: a group of another rule can have it for itself.
    capturable: nothing in a step waits for the device, so that a CUDA graph can hold it; a learning rate that changes
        is then a tensor on the device.
    master, moments, rounding, seed: how 16-bit parameters and states are stored, see `axes.optim.engine.precision`.
    check_finite: look at all gradients before anything changes: "raise" or True, "skip" to leave everything as it is
        and count the step in `skipped`, or False. Left out it is "raise", and False with fused or capturable: it reads
        every gradient once more, and "raise" waits for the device.
    model: where the parameters live, if `params` is not the model itself.
    rules, matrices, qkv: which parameters are hidden matrices and how they are, of optimizers with two rules: see
        `axes.optim.engine.router`.
    differentiable: refused unless False.
    """

    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    master: Master | None
    moments: Moments | None
    rounding: Rounding
    seed: int
    check_finite: bool | Literal["raise", "skip"] | None
    model: nn.Module | None
    rules: Mapping[Key, str] | None
    matrices: Mapping[Key, str] | None
    qkv: QKV
    differentiable: bool


def require_known(who: str, options: Options, own: Iterable[str] = ()) -> None:
    """AxesError or TypeError unless these are options that can be had together. own: what it takes beside them."""
    if options.get("differentiable"):
        raise AxesError(
            f"{who}: differentiable=True is not available; differentiate through axes.core.reference.run(update, ...) "
            "instead: it is plain autograd"
        )
    if options.get("fused") and options.get("foreach"):
        raise AxesError(f"{who}: fused=True and foreach=True are two ways to do the same: choose one")
    every = Options.__annotations__
    for unknown in sorted(set(options) - set(every)):
        raise unexpected(who, unknown, [name for name in own if name != "options"], every)


def of_groups(options: Options) -> Group:
    """The options that are keys of every group."""
    return {
        "maximize": options.get("maximize", False),
        "foreach": options.get("foreach") is not False,
        "fused": bool(options.get("fused")),
        "capturable": bool(options.get("capturable")),
        **{name: options.get(name, default) for name, default in DEFAULTS.items()},
    }


def check_of(who: str, options: Options) -> FiniteCheck:
    """What to do about gradients that are not finite."""
    given = options.get("check_finite")
    there = bool(options.get("fused") or options.get("capturable"))
    if given is None:
        return None if there else "raise"
    if given not in (True, False, "raise", "skip"):
        raise AxesError(f"{who}: check_finite must be 'raise' (or True), 'skip', False or None, got {given!r}")
    if given and given != "skip" and options.get("capturable"):
        raise AxesError(f"{who}: raising waits for the device, which capturable=True rules out: check_finite='skip'")
    return "skip" if given == "skip" else "raise" if given else None


def plain_group(group: Group) -> Group:
    """A group whose hyperparameters are. What else it has stays."""
    return {name: value if name == "params" else plain(value) for name, value in group.items()}


def how(group: Mapping[str, Any]) -> How:
    """Where a group's counts and numbers are."""
    return "fused" if group["fused"] else "device" if group["capturable"] else "host"
